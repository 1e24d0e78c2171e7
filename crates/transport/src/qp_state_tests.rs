use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use super::*;
use crate::verbs::PathAddr;

const STATES: [QpState; 7] = [Reset, Init, Rtr, Rts, Sqd, Sqe, Err];
const TYPES: [QpType; 6] = [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcSend, QpType::XrcRecv, QpType::RawPacket];

fn init(qp_type: QpType) -> QpInit {
    QpInit { qpn: 1, qp_type, pd: 1, has_srq: false, max_send_wr: 1 }
}

/// Attributes that are good for anything.
fn good(to: QpState) -> QpAttr {
    let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let path = PathAddr { src: local, dst: local, ifindex: 0, tclass: 0, hop_limit: 64, flow_label: 0 };
    QpAttr { state: to, port_num: 1, path: Some(Arc::new(path)), ..QpAttr::default() }
}

fn bits(mask: M) -> String {
    let names: Vec<_> = mask.iter_names().map(|(name, _)| name).collect();
    if names.is_empty() { "-".to_owned() } else { names.join(" ") }
}

/// Tries every attribute in every pair of states, alone and left out, and writes down what the checks say.
fn observe(qp_type: QpType, from: QpState, to: QpState) -> Option<(M, M)> {
    let attempt = |mask: M| {
        let mut attr = good(to);
        attr.cur_state = from;
        check(&init(qp_type), from, &attr, mask | M::STATE)
    };
    // What is required shows one by one: each error names the next.
    let mut required = M::empty();
    loop {
        match attempt(required) {
            Ok(_) => break,
            Result::Err(error) if error.attr == "qp_state" => return None,
            Result::Err(error) => {
                let (bit, ..) = NAMES.iter().find(|(.., field)| *field == error.attr).expect("a known attribute");
                assert!(!required.contains(*bit), "{error}");
                required |= *bit;
            }
        }
    }
    let mut optional = M::empty();
    for bit in M::all().iter().filter(|bit| !required.contains(*bit) && *bit != M::STATE) {
        if attempt(required | bit).is_ok() {
            optional |= bit;
        }
    }
    // Without any single required one it fails, and says which.
    for bit in required.iter() {
        let error = attempt(required.difference(bit)).expect_err("a required attribute is missing");
        assert_eq!(NAMES.iter().find(|(b, ..)| *b == bit).map(|&(.., field)| field), Some(error.attr));
    }
    Some((required, optional))
}

#[test]
fn every_pair_of_states_is_as_written_down() {
    let mut text = String::new();
    for qp_type in TYPES {
        for from in STATES {
            for to in STATES {
                let change = format!("{} {:>5} -> {:<5}", type_name(qp_type), state_name(from), state_name(to));
                match observe(qp_type, from, to) {
                    None => writeln!(text, "{change} refused").unwrap(),
                    Some((required, optional)) => {
                        writeln!(text, "{change} required: {} | optional: {}", bits(required), bits(optional)).unwrap();
                    }
                }
            }
        }
    }
    let pinned = include_str!("qp_state_table.txt");
    if let Some((number, (have, want))) =
        text.lines().zip(pinned.lines()).enumerate().find(|(_, (have, want))| have != want)
    {
        panic!("qp_state_table.txt, line {}:\n  is     {have}\n  pinned {want}\n\n{text}", number + 1);
    }
    assert_eq!(text, pinned, "the whole table:\n{text}");
}

fn error(qp_type: QpType, from: QpState, attr: &QpAttr, mask: M) -> String {
    check(&init(qp_type), from, attr, mask).expect_err("must be refused").to_string()
}

const RC_RTR: M = M::STATE
    .union(M::PATH_MTU)
    .union(M::DEST_QPN)
    .union(M::RQ_PSN)
    .union(M::MAX_DEST_RD_ATOMIC)
    .union(M::MIN_RNR_TIMER);

#[test]
fn errors_name_the_attribute_and_say_why() {
    assert_eq!(
        error(QpType::Rc, Init, &good(Rtr), RC_RTR),
        "RTR needs IBV_QP_AV: a RoCE device needs a GID (ibv_rc_pingpong -g 0)"
    );
    let no_path = QpAttr { path: None, ..good(Rtr) };
    assert!(error(QpType::Rc, Init, &no_path, RC_RTR | M::AV).contains("needs a GID"));
    assert_eq!(
        error(QpType::Rc, Init, &good(Rtr), (RC_RTR | M::AV).difference(M::DEST_QPN)),
        "RTR needs IBV_QP_DEST_QPN (dest_qp_num) on a RC QP"
    );
    assert_eq!(
        error(QpType::Rc, Rtr, &good(Err), M::STATE | M::CAP),
        "IBV_QP_CAP (cap): the queues of a QP cannot be resized"
    );
    assert_eq!(error(QpType::Ud, Reset, &good(Rts), M::STATE), "qp_state: a UD QP cannot go from RESET to RTS");
    assert_eq!(
        error(QpType::Rc, Rts, &good(Rts), M::PATH_MTU),
        "IBV_QP_PATH_MTU (path_mtu) cannot be changed on a RC QP going from RTS to RTS"
    );
    let wrong = QpAttr { cur_state: Sqd, ..good(Rts) };
    assert_eq!(
        error(QpType::Rc, Rts, &wrong, M::CUR_STATE),
        "cur_qp_state (IBV_QP_CUR_STATE) says SQD, but the QP is in RTS"
    );
}

#[test]
fn values_at_their_limits_and_past_them() {
    let rc_rts = M::STATE | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC;
    let rtr = |attr: QpAttr| check(&init(QpType::Rc), Init, &attr, RC_RTR | M::AV).map(|(to, _)| to);
    let rts = |attr: QpAttr| check(&init(QpType::Rc), Rtr, &attr, rc_rts).map(|(to, _)| to);
    for path_mtu in [256, 512, 1024, 2048, 4096] {
        assert_eq!(rtr(QpAttr { path_mtu, ..good(Rtr) }), Ok(Rtr));
    }
    for path_mtu in [0, 1, 1500, 8192] {
        assert_eq!(rtr(QpAttr { path_mtu, ..good(Rtr) }).unwrap_err().attr, "path_mtu");
    }
    assert_eq!(rtr(QpAttr { max_dest_rd_atomic: 128, min_rnr_timer: 31, dest_qpn: 0xff_ffff, ..good(Rtr) }), Ok(Rtr));
    assert_eq!(rtr(QpAttr { max_dest_rd_atomic: 129, ..good(Rtr) }).unwrap_err().attr, "max_dest_rd_atomic");
    assert_eq!(rtr(QpAttr { min_rnr_timer: 32, ..good(Rtr) }).unwrap_err().attr, "min_rnr_timer");
    assert_eq!(rtr(QpAttr { dest_qpn: 0x100_0000, ..good(Rtr) }).unwrap_err().attr, "dest_qp_num");
    assert_eq!(rts(QpAttr { max_rd_atomic: 128, timeout: 31, retry_cnt: 7, rnr_retry: 7, ..good(Rts) }), Ok(Rts));
    assert_eq!(rts(QpAttr { max_rd_atomic: 129, ..good(Rts) }).unwrap_err().attr, "max_rd_atomic");
    assert_eq!(rts(QpAttr { timeout: 32, ..good(Rts) }).unwrap_err().attr, "timeout");
    assert_eq!(rts(QpAttr { retry_cnt: 8, ..good(Rts) }).unwrap_err().attr, "retry_cnt");
    assert_eq!(rts(QpAttr { rnr_retry: 8, ..good(Rts) }).unwrap_err().attr, "rnr_retry");
    let to_init = M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
    let init_state = |attr: QpAttr| check(&init(QpType::Rc), Reset, &attr, to_init).map(|(to, _)| to);
    assert_eq!(init_state(good(Init)), Ok(Init));
    assert_eq!(init_state(QpAttr { port_num: 2, ..good(Init) }).unwrap_err().attr, "port_num");
    assert_eq!(init_state(QpAttr { pkey_index: 1, ..good(Init) }).unwrap_err().attr, "pkey_index");
}

#[test]
fn the_mtu_of_ud_is_taken_at_rtr_and_must_be_one() {
    let rtr = |path_mtu| check(&init(QpType::Ud), Init, &QpAttr { path_mtu, ..good(Rtr) }, M::STATE);
    assert_eq!(rtr(4096), Ok((Rtr, M::STATE | M::PATH_MTU)));
    assert_eq!(rtr(0).unwrap_err().attr, "path_mtu");
}

#[test]
fn only_what_the_mask_names_is_taken_over() {
    let mut attr = QpAttr::default();
    let new = QpAttr { timeout: 9, retry_cnt: 5, dest_qpn: 77, ..good(Rts) };
    apply(&mut attr, &new, M::TIMEOUT | M::DEST_QPN | M::STATE);
    assert_eq!((attr.timeout, attr.dest_qpn, attr.retry_cnt, attr.state), (9, 77, 0, Reset));
    assert!(attr.path.is_none());
}
