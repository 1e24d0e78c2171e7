//! What the script says: the program's calls, and what they must show.

use std::sync::Arc;

use ferroce_testkit::{Act, Args, Pair, Wc};
use ferroce_transport::{
    Access, Completion, FlushRange, PathAddr, Placement, Qp, QpAttr, QpAttrMask, QpInit, QpState, QpType, RecvWr,
    SendData, SendFlags, SendOp, SendWr, Sge, UdDest, WcFlags, WcOpcode, WcStatus,
};
use ferroce_wire::Psn;
use smallvec::{SmallVec, smallvec};

use super::capture::address;
use super::derive::bytes;
use super::difference::At;
use super::memory::REGION_LEN;
use super::node::{Fetch, Node, Played, STEPS_MAX, Stage};
use super::schedule::{psns_of, was_refused};

/// The Q_Key of the recording program's UD queue pairs.
const QKEY: u64 = 0x1111_1111;
/// Bytes of a receive if the text does not say it.
const RECEIVE_LEN: u64 = 65_536;
/// Names of the completion queues: of sends, of receives.
const QUEUES: [&str; 2] = ["send", "receive"];

impl<'a> Node<'a> {
    pub(super) fn connect(&mut self, pair: &'a Pair) {
        let (own, peer) = (self.end as usize, self.end.peer() as usize);
        let qp_type = match pair.transport.as_str() {
            "rc" => QpType::Rc,
            "uc" => QpType::Uc,
            "ud" => QpType::Ud,
            other => panic!("transport {other}"),
        };
        let option = |name: &str, default: u64| pair.options[own].number(name).unwrap_or(default);
        let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let mut attr = QpAttr {
            path_mtu: option("mtu", pair.path_mtu.into()) as u32,
            qkey: option("qkey", QKEY) as u32,
            rq_psn: Psn::new(pair.start_psn[peer]),
            sq_psn: Psn::new(pair.start_psn[own]),
            dest_qpn: pair.qpn[peer],
            access: Access::from_bits_truncate(option("acc", remote.bits().into()) as u32),
            path: Some(self.path()),
            port_num: 1,
            max_rd_atomic: option("rd", 16) as u8,
            max_dest_rd_atomic: option("drd", 16) as u8,
            min_rnr_timer: option("minrnr", 12) as u8,
            timeout: option("timeout", 14) as u8,
            retry_cnt: option("retry", 7) as u8,
            rnr_retry: option("rnr", 7) as u8,
            ..QpAttr::default()
        };
        let mut qp = Qp::new(QpInit { qpn: pair.qpn[own], qp_type, pd: 1, has_srq: false, max_send_wr: 128 });
        // As rxe does; what a queue pair keeps of what comes early would change the whole dialogue.
        qp.go_back_n(true);
        self.played.push(Played::new(pair, self.end, qp));
        let (qp, mut host) = self.lend(self.played.len() - 1, false);
        for (state, mask) in to_rts(qp_type) {
            attr.state = state;
            qp.modify(&attr, mask | QpAttrMask::STATE, &mut host).expect("the recording's attributes are good");
        }
    }

    fn path(&self) -> Arc<PathAddr> {
        Arc::new(PathAddr {
            src: address(self.end, self.heard),
            dst: address(self.end.peer(), self.heard),
            ifindex: 0,
            tclass: 0,
            hop_limit: 64,
            flow_label: 0,
        })
    }

    pub(super) fn act(&mut self, act: &'a Act) {
        match act.verb.as_str() {
            "sh" | "async" | "mw" => return,
            "mr" => return self.register(act),
            "fill" => {
                let bytes = bytes(&act.args).expect("what to fill with");
                return self.memory.write(act.args.number("addr").expect("where to fill"), &bytes);
            }
            _ => {}
        }
        let index = self.played.iter().position(|played| played.pair.id == act.pair()).expect("an act is about a pair");
        if self.played[index].stage != Stage::Playing {
            return;
        }
        match act.verb.as_str() {
            "post" => self.post(index, act),
            "recv" => self.receive(index, &act.args),
            "poll" => self.poll(index, act),
            "state" => self.state(index, act),
            "modify" => self.modify(index, act),
            "dump" => self.dump(index, act),
            "arm" => self.played[index].armed = Some(self.played[index].queues.received.len()),
            "event" => self.event(index, act),
            other => panic!("unknown act {other}"),
        }
    }

    fn register(&mut self, act: &Act) {
        let results = act.results();
        let number = |name| results.number(name).expect("a registered region");
        let access = Access::from_bits_truncate(act.args.number("acc").expect("rights") as u32);
        let len = results.number("len").map_or(REGION_LEN, |len| len as usize);
        self.memory.register(number("addr"), number("rkey") as u32, access, vec![0; len]);
    }

    fn post(&mut self, index: usize, act: &Act) {
        if was_refused(act) {
            return;
        }
        let number = |name| act.args.number(name).unwrap_or(0);
        let (raddr, rkey, imm) = (number("raddr"), number("rkey") as u32, number("imm") as u32);
        let op = match act.args.text("op").expect("an operation") {
            "send" => SendOp::Send,
            "sendimm" => SendOp::SendImm { imm },
            "sendinv" => SendOp::SendInv { rkey },
            "write" => SendOp::Write { raddr, rkey },
            "writeimm" => SendOp::WriteImm { raddr, rkey, imm },
            "read" => SendOp::Read { raddr, rkey },
            "cas" => SendOp::CompareSwap { raddr, rkey, compare: number("cmp"), swap: number("swap") },
            "faa" => SendOp::FetchAdd { raddr, rkey, add: number("cmp") },
            "linv" => SendOp::LocalInv { rkey },
            "awrite" => SendOp::AtomicWrite { raddr, rkey },
            "flush" => SendOp::Flush {
                rkey,
                range: match number("level") {
                    0 => FlushRange::Bytes { raddr, len: number("len") as u32 },
                    _ => FlushRange::Region,
                },
                placement: Placement::from_bits(number("ftype") as u8).expect("a placement type"),
            },
            "bind" => return self.bind(act),
            other => {
                self.differ(index, At::Script(format!("post {other}")), "no such operation, not played any further");
                self.played[index].stage = Stage::Stopped;
                return;
            }
        };
        let (mut data, sge) = self.data(&act.args);
        match op {
            SendOp::AtomicWrite { .. } => data = SendData::Inline(number("val").to_ne_bytes().into()),
            SendOp::Flush { .. } => data = SendData::Sges(SmallVec::new()),
            _ => {}
        }
        self.count(index, act, &op, sge);
        let ud = (self.played[index].pair.transport == "ud").then(|| UdDest {
            path: self.path(),
            qpn: self.played[index].pair.qpn[self.end.peer() as usize],
            qkey: act.args.number("qkey").map_or(self.played[index].qp.attr().qkey, |qkey| qkey as u32),
        });
        let wr = SendWr { wr_id: number("wid"), flags: send_flags(&act.args), data, ud, xrc_srqn: None, op };
        let (qp, mut host) = self.lend(index, false);
        qp.post_send(wr, &mut host);
        self.drain(index);
    }

    /// Keeps account of a post.
    fn count(&mut self, index: usize, act: &Act, op: &SendOp, sge: Sge) {
        let played = &mut self.played[index];
        let (psn, count) = (played.next_psn, psns_of(act, played.pair));
        played.posted += 1;
        if send_flags(&act.args).contains(SendFlags::FENCE) {
            played.fenced.push(psn);
        }
        played.next_psn = psn.add(count);
        match op {
            SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => {
                let wr_id = act.args.number("wid").unwrap_or(0);
                played.fetches.push(Fetch { wr_id, psn, count, sge, sent: false });
            }
            // Named one by one: when an operation is added, this and `post` must know it.
            SendOp::Send
            | SendOp::SendImm { .. }
            | SendOp::SendInv { .. }
            | SendOp::Write { .. }
            | SendOp::WriteImm { .. }
            | SendOp::LocalInv { .. }
            | SendOp::BindMw(_)
            | SendOp::AtomicWrite { .. }
            | SendOp::Flush { .. } => {}
        }
    }

    /// Binds a window in the memory, without a request and its completion.
    fn bind(&mut self, act: &Act) {
        let number = |name| act.args.number(name).expect("a bind is complete");
        let key = act.results().number("mwkey").expect("the window's new key") as u32;
        let access = Access::from_bits_truncate(number("acc") as u32);
        self.memory.bind(key, self.buffer + number("off"), number("len"), access);
    }

    /// The local side of a send request, and its first element.
    fn data(&self, args: &Args) -> (SendData, Sge) {
        let number = |name| args.number(name).unwrap_or(0);
        let first = Sge {
            addr: self.buffer + number("off"),
            length: number("len") as u32,
            lkey: args.number("lkey").map_or(self.recording.script.rkey[self.end as usize], |lkey| lkey as u32),
        };
        if let Some(bytes) = bytes(args) {
            return (SendData::Inline(bytes.into()), first);
        }
        if args.text("fl").is_some_and(|flags| flags.contains('i')) {
            return (SendData::Inline(self.memory.read(first.addr, first.length as usize).into()), first);
        }
        let mut sges = smallvec![first];
        if let Some(len) = args.number("len2") {
            sges.push(Sge { addr: self.buffer + number("off2"), length: len as u32, ..first });
        }
        (SendData::Sges(sges), first)
    }

    /// Every receive of the recordings has the beginning of the buffer.
    fn receive(&mut self, index: usize, args: &Args) {
        let first = args.number("wid").unwrap_or(100);
        let length = args.number("len").unwrap_or(RECEIVE_LEN) as u32;
        let sge = Sge { addr: self.buffer, length, lkey: self.recording.script.rkey[self.end as usize] };
        for wr_id in first..first + args.number("n").unwrap_or(1) {
            self.played[index].queues.receives.push_back(RecvWr { wr_id, sges: smallvec![sge] });
        }
        let (qp, mut host) = self.lend(index, false);
        qp.flush_recv(&mut host);
    }

    /// What the program polled must be there, if need be after timeouts; nothing more where it waited in vain.
    fn poll(&mut self, index: usize, act: &Act) {
        let queue = usize::from(act.args.text("w") == Some("r"));
        let recorded: Vec<Wc> = act.completions().collect();
        let from = self.played[index].polled[queue];
        for _ in 0..STEPS_MAX {
            if self.completions(index, queue).len() >= from + recorded.len() || !self.jump(index) {
                break;
            }
            self.pull_all(index);
        }
        let ours = self.completions(index, queue)[from..].to_vec();
        let at = |wr_id: u64| At::Script(format!("{} completion of {wr_id}", QUEUES[queue]));
        for (place, wc) in recorded.iter().enumerate() {
            match ours.get(place) {
                Some(completion) => {
                    for what in compare_completion(completion, wc, queue == 1) {
                        self.differ(index, at(wc.wr_id), what);
                    }
                }
                None => self.differ(index, at(wc.wr_id), "missing"),
            }
        }
        let mut taken = ours.len().min(recorded.len());
        if act.replies.iter().any(|reply| reply.starts_with("timeout")) {
            for completion in &ours[taken..] {
                self.differ(index, at(completion.wr_id), also(completion));
            }
            taken = ours.len();
        }
        self.played[index].polled[queue] += taken;
    }

    /// Errors that the program did not poll; what was flushed, programs seldom did.
    pub(super) fn compare_rest(&mut self, index: usize) {
        for (queue, name) in QUEUES.into_iter().enumerate() {
            let from = self.played[index].polled[queue];
            let rest = self.completions(index, queue)[from..].to_vec();
            for completion in rest {
                if !matches!(completion.status, WcStatus::Success | WcStatus::WrFlushErr) {
                    let at = At::Script(format!("{name} completion of {}", completion.wr_id));
                    self.differ(index, at, also(&completion));
                }
            }
        }
    }

    fn completions(&self, index: usize, queue: usize) -> &[Completion] {
        let queues = &self.played[index].queues;
        if queue == 1 { &queues.received } else { &queues.sends }
    }

    fn state(&mut self, index: usize, act: &Act) {
        let recorded = act.results().number("state").expect("a state");
        let ours = self.played[index].qp.state() as u64;
        if ours != recorded {
            self.differ(index, At::Script("state".into()), format!("{ours} instead of {recorded}"));
        }
    }

    fn modify(&mut self, index: usize, act: &Act) {
        assert_eq!(act.args.number("state"), Some(QpState::Err as u64));
        let (qp, mut host) = self.lend(index, false);
        let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
        qp.modify(&attr, QpAttrMask::STATE, &mut host).expect("ERR is always allowed");
        self.drain(index);
    }

    fn dump(&mut self, index: usize, act: &Act) {
        let number = |name| act.args.number(name).expect("a dump is complete");
        let bytes = self.memory.read(self.buffer + number("off"), number("len") as usize);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        if hex != act.replies[0] {
            self.differ(index, At::Script("memory".into()), format!("{hex} instead of {}", act.replies[0]));
        }
    }

    fn event(&mut self, index: usize, act: &Act) {
        let played = &mut self.played[index];
        let from = played.armed.expect("events come to who armed");
        let raised = played.queues.received[from..].iter().any(|completion| completion.solicited);
        if raised {
            played.armed = None;
        }
        let recorded = act.replies[0] == "event";
        if raised != recorded {
            self.differ(index, At::Script("solicited event".into()), format!("{raised} instead of {recorded}"));
        }
    }
}

fn to_rts(qp_type: QpType) -> [(QpState, QpAttrMask); 3] {
    use QpAttrMask as M;
    let common = M::PKEY_INDEX | M::PORT;
    let connected = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
    let (init, rtr, rts) = match qp_type {
        QpType::Rc => (
            M::ACCESS_FLAGS,
            connected | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
            M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC,
        ),
        QpType::Uc => (M::ACCESS_FLAGS, connected, M::SQ_PSN),
        QpType::Ud => (M::QKEY, M::empty(), M::SQ_PSN),
        QpType::XrcSend | QpType::XrcRecv | QpType::RawPacket => {
            unreachable!("no recording has XRC or frames: the kernel's rxe has none")
        }
    };
    [(QpState::Init, common | init), (QpState::Rtr, rtr), (QpState::Rts, rts)]
}

fn send_flags(args: &Args) -> SendFlags {
    let letters = args.text("fl").unwrap_or("s");
    let mut flags = SendFlags::empty();
    for (letter, flag) in
        [('s', SendFlags::SIGNALED), ('e', SendFlags::SOLICITED), ('f', SendFlags::FENCE), ('i', SendFlags::INLINE)]
    {
        flags.set(flag, letters.contains(letter));
    }
    flags
}

/// How a completion differs from the recorded one. Lengths count only where the specification defines them.
fn compare_completion(ours: &Completion, recorded: &Wc, receive: bool) -> Vec<String> {
    let mut found = Vec::new();
    let mut field = |name: &str, ours: u64, recorded: u64| {
        if ours != recorded {
            found.push(format!("{name} {ours} instead of {recorded}"));
        }
    };
    field("wr_id", ours.wr_id, recorded.wr_id);
    field("qp_num", ours.qp_num.into(), recorded.qpn);
    field("status", ours.status as u64, recorded.status);
    if ours.status != WcStatus::Success || recorded.status != 0 {
        return found;
    }
    field("opcode", ours.opcode as u64, recorded.opcode);
    if receive || matches!(ours.opcode, WcOpcode::RdmaRead | WcOpcode::CompSwap | WcOpcode::FetchAdd) {
        field("byte_len", ours.byte_len.into(), recorded.byte_len.unwrap_or(0));
    }
    if receive {
        let flags = recorded.flags.unwrap_or(0);
        field("with immediate", ours.flags.contains(WcFlags::WITH_IMM).into(), flags >> 1 & 1);
        // rxe has the kernel's bit here, not that of verbs.
        field("with invalidate", ours.flags.contains(WcFlags::WITH_INV).into(), flags >> 2 & 1);
        if ours.flags.contains(WcFlags::WITH_IMM) {
            field("imm", ours.imm.into(), recorded.imm.unwrap_or(0));
        }
        if ours.flags.contains(WcFlags::GRH) {
            field("src_qp", ours.src_qp.into(), recorded.src_qp.unwrap_or(0));
        }
    }
    found
}

fn also(completion: &Completion) -> String {
    format!("also: {:?} {:?}", completion.opcode, completion.status)
}
