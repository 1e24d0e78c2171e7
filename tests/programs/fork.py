"""Python's multiprocessing by fork under traffic: the parent is undisturbed, children open the device anew.

Uses Debian's python3-pyverbs. One argument: index of the GID.
"""

import multiprocessing
import sys

import pyverbs.device as d
import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

GID_INDEX = int(sys.argv[1])
LENGTH = 20000
REMOTE = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ


class Loop:
    """Two queue pairs of one process that are connected with each other."""

    def __init__(self):
        name = d.get_device_list()[0].name.decode()
        self.context = d.Context(name=name)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 16)
        self.source = MR(self.pd, LENGTH, REMOTE)
        self.target = MR(self.pd, LENGTH, REMOTE)
        cap = QPCap(max_send_wr=8, max_recv_wr=8, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap)
        self.qps = [QP(self.pd, init) for _ in range(2)]
        port = self.context.query_port(1)
        gid = self.context.query_gid(1, GID_INDEX)
        for mine, other in zip(self.qps, reversed(self.qps)):
            attr = QPAttr(port_num=1)
            attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
            attr.dest_qp_num = other.qp_num
            attr.path_mtu = port.active_mtu
            attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
            attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer = 14, 7, 7, 12
            route = GlobalRoute(dgid=gid, sgid_index=GID_INDEX)
            attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
            mine.to_rts(attr)

    def write(self, text):
        """Moves `text` by RDMA WRITE and checks it at its target."""
        self.source.write(text.ljust(LENGTH), LENGTH)
        sge = SGE(self.source.buf, LENGTH, self.source.lkey)
        wr = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[sge])
        wr.set_wr_rdma(self.target.rkey, self.target.buf)
        self.qps[0].post_send(wr)
        while True:
            count, completions = self.cq.poll(1)
            if count:
                break
        assert completions[0].status == e.IBV_WC_SUCCESS, completions[0]
        assert self.target.read(LENGTH, 0).decode().rstrip() == text


def child(inherited, number):
    """What a child does: inherited objects fail, new ones work."""
    try:
        PD(inherited.context)
    except PyverbsError:
        pass
    else:
        raise AssertionError("a child could allocate a PD in its parent's context")
    Loop().write(f"child {number}")


def main():
    multiprocessing.set_start_method("fork")
    loop = Loop()
    for number in range(5):
        loop.write(f"before {number}")
        process = multiprocessing.Process(target=child, args=(loop, number))
        process.start()
        rounds = 0
        while process.is_alive():
            loop.write(f"round {rounds}")
            rounds += 1
        process.join()
        assert process.exitcode == 0, f"child {number} exited with {process.exitcode}"
    loop.write("after")
    print("ok")


main()
