//! What the examples share: two connected queue pairs in one process, and waiting for a completion.

use std::sync::Arc;

use ferroce::{
    Access, Buffer, Completion, ConnectOptions, Context, Cq, Mr, Qp, QpCreate, QpType, QueueCaps, Result, SendData,
    SendFlags, SendOp, SendWr, Sge, WcStatus,
};

/// One end: a queue pair, its completion queue, and registered memory.
pub(crate) struct End {
    pub(crate) cq: Arc<Cq>,
    pub(crate) qp: Arc<Qp>,
    pub(crate) buffer: Arc<Buffer>,
    pub(crate) mr: Arc<Mr>,
}

/// Opens the first device and connects two queue pairs of this process with each other.
pub(crate) fn connected_pair(bytes: usize) -> Result<(End, End)> {
    let devices = ferroce::devices()?;
    let context = devices[0].open()?;
    let a = end(&context, bytes)?;
    let b = end(&context, bytes)?;
    let (from_a, from_b) = (a.qp.endpoint(0, 0x111111)?, b.qp.endpoint(0, 0x222222)?);
    a.qp.connect(from_a.psn, &from_b, &ConnectOptions::default())?;
    b.qp.connect(from_b.psn, &from_a, &ConnectOptions::default())?;
    Ok((a, b))
}

fn end(context: &Arc<Context>, bytes: usize) -> Result<End> {
    let pd = context.alloc_pd()?;
    let cq = context.create_cq(64, None, 0)?;
    let qp = pd.create_qp(&QpCreate {
        send_cq: Arc::clone(&cq),
        recv_cq: Arc::clone(&cq),
        srq: None,
        caps: QueueCaps { max_send_wr: 32, max_recv_wr: 32, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 },
        qp_type: QpType::Rc,
        sq_sig_all: false,
        cookie: 0,
    })?;
    let buffer = Arc::new(Buffer::new(bytes));
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let mr = pd.reg_buffer(&buffer, access)?;
    Ok(End { cq, qp, buffer, mr })
}

impl End {
    /// The first `length` bytes of the memory as a scatter/gather element.
    pub(crate) fn sge(&self, length: u32) -> Sge {
        Sge { addr: self.buffer.addr(), length, lkey: self.mr.lkey() }
    }

    /// Posts one signalled request over the first `length` bytes.
    pub(crate) fn post(&self, wr_id: u64, op: SendOp, length: u32) -> Result<()> {
        let data = SendData::Sges([self.sge(length)].into_iter().collect());
        self.qp.post_send(SendWr { wr_id, op, flags: SendFlags::SIGNALED, data, ud: None, xrc_srqn: None })?;
        self.qp.ring();
        Ok(())
    }

    /// Polls until a completion comes, and insists on success.
    pub(crate) fn wait(&self) -> Result<Completion> {
        let mut out = [Completion::UNUSED];
        while self.cq.poll(&mut out)? == 0 {}
        assert_eq!(out[0].status, WcStatus::Success);
        Ok(out[0])
    }
}
