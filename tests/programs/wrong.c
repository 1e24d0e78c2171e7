/*
 * Wrong input: each gives the errno of the contract at once. One process, no peer. Modes:
 *   mtu           a path_mtu above the interface's
 *   gid           a GID index that does not exist
 *   unreachable   an address to which no route leads
 *   full          queues that are full
 *   state         calls that the QP's state forbids, and transitions that do not exist
 *   nobody        a QP number that nobody has, at this host
 *   absent        an address of the network at which there is nobody (argument HOST)
 *   limits        more than the device has
 */
#include "self.h"

static struct node node;
static struct ibv_cq *cq;

static struct ibv_qp *fresh(void)
{
	return qp_make(&node, cq, cq, NULL, 16);
}

/* An address that is in order: this host's own. */
static struct address good(struct ibv_qp *qp)
{
	return address_of(&node, qp, NULL);
}

static void expect(int error, int wanted, const char *what)
{
	CHECK(error == wanted, "%s: %s instead of %s", what, strerror(error), strerror(wanted));
}

static void wrong_mtu(void)
{
	struct ibv_qp *qp = fresh();
	struct address peer = good(qp);

	CHECK(node.port.active_mtu < IBV_MTU_4096, "this interface takes the largest MTU there is");
	qp_init(qp, &usual);
	expect(qp_try_rtr(qp, &peer, node.port.active_mtu + 1u, &usual), EINVAL, "path_mtu above the port's");
	expect(qp_try_rtr(qp, &peer, 0, &usual), EINVAL, "path_mtu 0");
	expect(qp_try_rtr(qp, &peer, 6, &usual), EINVAL, "path_mtu 6");
	/* The refusals changed nothing. */
	qp_rtr(qp, &peer, node.port.active_mtu, &usual);
}

static void wrong_gid(void)
{
	union ibv_gid gid;
	struct ibv_qp *qp = fresh();
	struct address peer = good(qp);
	int was = opt.gid;

	CHECK(node.port.gid_tbl_len < 255, "gid_tbl_len is %d", node.port.gid_tbl_len);
	CHECK(ibv_query_gid(node.context, 1, node.port.gid_tbl_len, &gid) == -1 && errno != 0, "a GID beyond the table was found");
	qp_init(qp, &usual);
	opt.gid = node.port.gid_tbl_len;
	int error = qp_try_rtr(qp, &peer, node.port.active_mtu, &usual);
	CHECK(error == EINVAL || error == ENODATA, "sgid_index beyond the table: %s", strerror(error));
	struct ibv_ah_attr attr = ah_attr_to(&peer);
	CHECK(ibv_create_ah(node.pd, &attr) == NULL && errno != 0, "an AH of a GID beyond the table was made");
	opt.gid = was;
	attr = ah_attr_to(&peer);
	attr.is_global = 0;
	CHECK(ibv_create_ah(node.pd, &attr) == NULL && errno != 0, "an AH without GRH was made");
	qp_rtr(qp, &peer, node.port.active_mtu, &usual);
}

static void unreachable(void)
{
	struct ibv_qp *qp = fresh();
	struct address peer = good(qp);
	static const uint8_t documentation[16] = {[10] = 0xff, [11] = 0xff, 203, 0, 113, 9};

	memcpy(peer.gid.raw, documentation, 16);
	qp_init(qp, &usual);
	double begun = now_s();
	int error = qp_try_rtr(qp, &peer, node.port.active_mtu, &usual);
	CHECK(error == ENETUNREACH || error == EHOSTUNREACH, "an address without a route: %s", strerror(error));
	CHECK(now_s() - begun < 10, "that took %.1f s", now_s() - begun);
}

static void full(void)
{
	static uint8_t memory[4096];
	struct ibv_mr *mr = mr_make(node.pd, memory, sizeof(memory), ALL_REMOTE);
	struct ibv_qp *qp = fresh();
	struct address peer = good(qp);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	unsigned posted = 0;

	CHECK(ibv_query_qp(qp, &attr, IBV_QP_CAP, &init) == 0, "ibv_query_qp failed");
	peer.qpn ^= 1; /* nobody takes the requests */
	qp_init(qp, &usual);
	int error = 0;
	for (; error == 0 && posted <= 100000; posted++)
		error = post_recv_one(qp, memory, mr->lkey, 8);
	expect(error, ENOMEM, "a full receive queue");
	CHECK(posted - 1 >= 16 && posted - 1 <= init.cap.max_recv_wr, "%u receives fitted in, max_recv_wr is %u", posted - 1, init.cap.max_recv_wr);
	qp_rtr(qp, &peer, node.port.active_mtu, &usual);
	qp_rts(qp, &peer, &usual);
	for (error = 0, posted = 0; error == 0 && posted <= 100000; posted++)
		error = post_one(qp, IBV_WR_RDMA_WRITE, memory, mr->lkey, 8, (uintptr_t)memory, mr->rkey);
	expect(error, ENOMEM, "a full send queue");
	CHECK(posted - 1 >= 16 && posted - 1 <= init.cap.max_send_wr, "%u requests fitted in, max_send_wr is %u", posted - 1, init.cap.max_send_wr);
	/* A list: what fitted in was taken, and bad_wr names the first that did not. */
	struct ibv_qp *other = fresh();
	qp_init(other, &usual);
	struct ibv_sge sge = {(uintptr_t)memory, 8, mr->lkey};
	struct ibv_recv_wr list[1024], *bad = NULL;
	CHECK(init.cap.max_recv_wr < 1024, "max_recv_wr is %u although 16 were asked for", init.cap.max_recv_wr);
	for (int i = 0; i < 1024; i++)
		list[i] = (struct ibv_recv_wr){.wr_id = (uint64_t)i, .next = i < 1023 ? &list[i + 1] : NULL, .sg_list = &sge, .num_sge = 1};
	expect(ibv_post_recv(other, list, &bad), ENOMEM, "a list longer than the queue");
	CHECK(bad >= list + 16 && bad <= list + init.cap.max_recv_wr, "bad_wr does not name the first that did not fit");
	/* And too many pieces. */
	struct ibv_sge many[64];
	for (int i = 0; i < 64; i++)
		many[i] = sge;
	struct ibv_qp *third = fresh();
	qp_init(third, &usual);
	struct ibv_recv_wr wide = {.sg_list = many, .num_sge = 64};
	CHECK(ibv_post_recv(third, &wide, &bad) != 0 && bad == &wide, "a receive of 64 pieces was taken");
}

static void state(void)
{
	static uint8_t memory[4096];
	struct ibv_mr *mr = mr_make(node.pd, memory, sizeof(memory), ALL_REMOTE);
	struct ibv_qp *qp = fresh();
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS};
	struct address peer = good(qp);

	CHECK(post_one(qp, IBV_WR_SEND, memory, mr->lkey, 8, 0, 0) != 0, "a SEND was posted in RESET");
	CHECK(post_recv_one(qp, memory, mr->lkey, 8) != 0, "a receive was posted in RESET");
	expect(ibv_modify_qp(qp, &attr, IBV_QP_STATE), EINVAL, "RESET to RTS");
	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	expect(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT), EINVAL, "to INIT without all attributes");
	attr.port_num = 2;
	expect(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS), EINVAL, "to INIT on port 2");
	qp_init(qp, &usual);
	CHECK(post_one(qp, IBV_WR_SEND, memory, mr->lkey, 8, 0, 0) != 0, "a SEND was posted in INIT");
	CHECK(post_recv_one(qp, memory, mr->lkey, 8) == 0, "no receive could be posted in INIT");
	qp_rtr(qp, &peer, node.port.active_mtu, &usual);
	CHECK(post_one(qp, IBV_WR_SEND, memory, mr->lkey, 8, 0, 0) != 0, "a SEND was posted in RTR");
	qp_rts(qp, &peer, &usual);
	CHECK(qp->state == IBV_QPS_RTS, "qp->state is %d after the transition to RTS", qp->state);
	/* RESET forgets, ERR flushes. */
	attr.qp_state = IBV_QPS_ERR;
	expect(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0, "to ERR");
	struct ibv_wc wc = wait_wc(cq, "a receive in ERR");
	CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 2, "a receive in ERR: %s", ibv_wc_status_str(wc.status));
}

/* Requests to a peer that does not answer end with RETRY_EXC_ERR in the promised time. */
static void no_answer(struct address peer)
{
	static uint8_t memory[4096];
	struct ibv_mr *mr = mr_make(node.pd, memory, sizeof(memory), ALL_REMOTE);
	struct ibv_qp *qp = fresh();
	struct conduct conduct = usual;
	struct address mine = good(qp);

	conduct.timeout = 15;
	conduct.retry = 2;
	double timeout_s = 4.096e-6 * (1 << conduct.timeout), promise_s = 4 * timeout_s * (conduct.retry + 1);
	if (peer.qpn == 0)
		peer.qpn = qp->qp_num ^ 0x1555;
	qp_init(qp, &conduct);
	int error = qp_try_rtr(qp, &peer, node.port.active_mtu, &conduct);
	CHECK(error == 0, "to RTR: %s", strerror(error));
	qp_rts(qp, &mine, &conduct);
	double begun = now_s();
	enum ibv_wc_status status = do_one(qp, IBV_WR_RDMA_WRITE, memory, mr->lkey, 8, (uintptr_t)memory, mr->rkey);
	double took = now_s() - begun;
	CHECK(status == IBV_WC_RETRY_EXC_ERR, "a request that nobody answers: %s", ibv_wc_status_str(status));
	CHECK(took < promise_s + 1, "that took %.2f s; at most %.2f s are promised", took, promise_s);
	printf("RETRY_EXC_ERR after %.2f s (timeout %.2f s, %d retries)\n", took, timeout_s, conduct.retry);
}

static void nobody(void)
{
	struct address peer = {.gid = node.gid, .psn = 1, .rd_atomic = 1};

	no_answer(peer);
}

static void absent(void)
{
	struct address peer = {.qpn = 0x4711, .psn = 1, .rd_atomic = 1};

	CHECK(opt.host != NULL, "--mode absent needs an address");
	if (inet_pton(AF_INET6, opt.host, peer.gid.raw) != 1) {
		peer.gid.raw[10] = peer.gid.raw[11] = 0xff;
		CHECK(inet_pton(AF_INET, opt.host, peer.gid.raw + 12) == 1, "%s is no address", opt.host);
	}
	no_answer(peer);
}

static void limits(void)
{
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
	struct ibv_srq_init_attr srq = {.attr = {.max_wr = (uint32_t)node.device.max_srq_wr + 1, .max_sge = 1}};
	static uint8_t memory[4096];

	CHECK(ibv_create_cq(node.context, node.device.max_cqe + 1, NULL, NULL, 0) == NULL && errno == EINVAL, "a CQ beyond max_cqe: %s", strerror(errno));
	CHECK(ibv_create_cq(node.context, 1, NULL, NULL, node.context->num_comp_vectors) == NULL && errno == EINVAL, "a CQ beyond num_comp_vectors: %s", strerror(errno));
	CHECK(ibv_create_srq(node.pd, &srq) == NULL && errno != 0, "an SRQ beyond max_srq_wr was made");
	init.cap.max_send_wr = (uint32_t)node.device.max_qp_wr + 1;
	CHECK(ibv_create_qp(node.pd, &init) == NULL && (errno == EINVAL || errno == ENOMEM), "a QP beyond max_qp_wr: %s", strerror(errno));
	init.cap.max_send_wr = 1;
	init.cap.max_send_sge = (uint32_t)node.device.max_sge + 1;
	CHECK(ibv_create_qp(node.pd, &init) == NULL && (errno == EINVAL || errno == ENOMEM), "a QP beyond max_sge: %s", strerror(errno));
	CHECK(ibv_reg_mr(node.pd, memory, sizeof(memory), IBV_ACCESS_REMOTE_WRITE) == NULL && errno == EINVAL, "REMOTE_WRITE without LOCAL_WRITE: %s", strerror(errno));
	void *hole = pages(8192);
	munmap(hole, 8192);
	CHECK(ibv_reg_mr(node.pd, hole, 8192, IBV_ACCESS_LOCAL_WRITE) == NULL && errno == EFAULT, "memory that is not mapped: %s", strerror(errno));
	struct ibv_port_attr port;
	expect(ibv_query_port(node.context, 2, &port), EINVAL, "port 2");
	struct ibv_qp *qp = fresh();
	CHECK(ibv_dealloc_pd(node.pd) == EBUSY, "a PD in use could be deallocated");
	CHECK(ibv_destroy_cq(cq) == EBUSY, "a CQ in use could be destroyed");
	CHECK(ibv_destroy_qp(qp) == 0, "ibv_destroy_qp failed");
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} modes[] = {{"mtu", wrong_mtu}, {"gid", wrong_gid}, {"unreachable", unreachable}, {"full", full}, {"state", state},
		     {"nobody", nobody}, {"absent", absent}, {"limits", limits}};

	parse_options(argc, argv);
	node = node_open();
	cq = cq_make(&node, 1024, NULL);
	for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++)
		if (strcmp(opt.mode, modes[i].name) == 0) {
			modes[i].run();
			ok("%s", opt.mode);
			return 0;
		}
	die("unknown --mode %s", opt.mode);
}
