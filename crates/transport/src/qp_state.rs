//! The state table of queue pairs: which change is allowed for which type, with which attributes (`ibv_modify_qp(3)`, IBA
//! 11.2.5.2), and the check of attribute values.

use std::borrow::Cow;

use crate::pacer::{RATE_LIMIT_MAX, RATE_LIMIT_MIN};
use crate::verbs::{QpAttr, QpAttrMask as M, QpInit, QpState, QpType};

/// Largest number of outstanding READs and atomics, as requester and as responder: what kernel rxe has too, and perftest asks for.
pub const MAX_RD_ATOMIC: u8 = 128;

/// Why a queue pair was not modified. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct ModifyError {
    /// The attribute at fault, by its name in `verbs.h`.
    pub attr: &'static str,
    /// A sentence that names it and says why.
    pub reason: Cow<'static, str>,
}

impl ModifyError {
    pub(crate) fn new(attr: &'static str, reason: impl Into<Cow<'static, str>>) -> ModifyError {
        ModifyError { attr, reason: reason.into() }
    }
}

/// Attributes that a change of state must and may carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Masks {
    required: M,
    optional: M,
}

impl Masks {
    /// Those of `mask` mean nothing: they may be left out. (perftest gives all of RC's to both ends of XRC.)
    fn without(self, mask: M) -> Masks {
        let (required, unneeded) = (self.required.difference(mask), self.required.intersection(mask));
        Masks { required, optional: self.optional.union(unneeded) }
    }

    /// Those of `mask` do not exist.
    fn except(self, mask: M) -> Masks {
        Masks { required: self.required.difference(mask), optional: self.optional.difference(mask) }
    }

    /// Others than those of `mask` do not exist.
    fn only(self, mask: M) -> Masks {
        Masks { required: self.required.intersection(mask), optional: self.optional.intersection(mask) }
    }
}

/// One line of the table.
struct Transition {
    from: QpState,
    to: QpState,
    rc: Option<Masks>,
    uc: Option<Masks>,
    ud: Option<Masks>,
}

const fn set(flags: &[M]) -> M {
    let mut all = M::empty();
    let mut i = 0;
    while i < flags.len() {
        all = all.union(flags[i]);
        i += 1;
    }
    all
}

const fn masks(required: &[M], optional: &[M]) -> Option<Masks> {
    Some(Masks { required: set(required), optional: set(optional) })
}

const fn line(from: QpState, to: QpState, rc: Option<Masks>, uc: Option<Masks>, ud: Option<Masks>) -> Transition {
    Transition { from, to, rc, uc, ud }
}

/// A change that any type may make, without attributes.
const fn bare(from: QpState, to: QpState) -> Transition {
    line(from, to, masks(&[], &[]), masks(&[], &[]), masks(&[], &[]))
}

use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};

const CONNECTED_INIT: &[M] = &[M::PKEY_INDEX, M::PORT, M::ACCESS_FLAGS];
const DATAGRAM_INIT: &[M] = &[M::PKEY_INDEX, M::PORT, M::QKEY];

const TABLE: &[Transition] = &[
    bare(Reset, Reset),
    line(Reset, Init, masks(CONNECTED_INIT, &[]), masks(CONNECTED_INIT, &[]), masks(DATAGRAM_INIT, &[])),
    bare(Init, Reset),
    bare(Init, Err),
    line(Init, Init, masks(&[], CONNECTED_INIT), masks(&[], CONNECTED_INIT), masks(&[], DATAGRAM_INIT)),
    line(
        Init,
        Rtr,
        masks(
            &[M::AV, M::PATH_MTU, M::DEST_QPN, M::RQ_PSN, M::MAX_DEST_RD_ATOMIC, M::MIN_RNR_TIMER],
            &[M::ALT_PATH, M::ACCESS_FLAGS, M::PKEY_INDEX],
        ),
        masks(&[M::AV, M::PATH_MTU, M::DEST_QPN, M::RQ_PSN], &[M::ALT_PATH, M::ACCESS_FLAGS, M::PKEY_INDEX]),
        masks(&[], &[M::PKEY_INDEX, M::QKEY]),
    ),
    bare(Rtr, Reset),
    bare(Rtr, Err),
    line(
        Rtr,
        Rts,
        masks(
            &[M::TIMEOUT, M::RETRY_CNT, M::RNR_RETRY, M::SQ_PSN, M::MAX_QP_RD_ATOMIC],
            &[M::CUR_STATE, M::ALT_PATH, M::ACCESS_FLAGS, M::MIN_RNR_TIMER, M::PATH_MIG_STATE, M::RATE_LIMIT],
        ),
        masks(&[M::SQ_PSN], &[M::CUR_STATE, M::ALT_PATH, M::ACCESS_FLAGS, M::PATH_MIG_STATE, M::RATE_LIMIT]),
        masks(&[M::SQ_PSN], &[M::CUR_STATE, M::QKEY, M::RATE_LIMIT]),
    ),
    bare(Rts, Reset),
    bare(Rts, Err),
    line(
        Rts,
        Rts,
        masks(&[], &[M::CUR_STATE, M::ACCESS_FLAGS, M::ALT_PATH, M::PATH_MIG_STATE, M::MIN_RNR_TIMER, M::RATE_LIMIT]),
        masks(&[], &[M::CUR_STATE, M::ACCESS_FLAGS, M::ALT_PATH, M::PATH_MIG_STATE, M::RATE_LIMIT]),
        masks(&[], &[M::CUR_STATE, M::QKEY, M::RATE_LIMIT]),
    ),
    line(
        Rts,
        Sqd,
        masks(&[], &[M::EN_SQD_ASYNC_NOTIFY]),
        masks(&[], &[M::EN_SQD_ASYNC_NOTIFY]),
        masks(&[], &[M::EN_SQD_ASYNC_NOTIFY]),
    ),
    bare(Sqd, Reset),
    bare(Sqd, Err),
    line(
        Sqd,
        Rts,
        masks(&[], &[M::CUR_STATE, M::ALT_PATH, M::ACCESS_FLAGS, M::MIN_RNR_TIMER, M::PATH_MIG_STATE, M::RATE_LIMIT]),
        masks(&[], &[M::CUR_STATE, M::ALT_PATH, M::ACCESS_FLAGS, M::PATH_MIG_STATE, M::RATE_LIMIT]),
        masks(&[], &[M::CUR_STATE, M::QKEY, M::RATE_LIMIT]),
    ),
    line(
        Sqd,
        Sqd,
        masks(
            &[],
            &[
                M::PORT,
                M::AV,
                M::TIMEOUT,
                M::RETRY_CNT,
                M::RNR_RETRY,
                M::MAX_QP_RD_ATOMIC,
                M::MAX_DEST_RD_ATOMIC,
                M::ALT_PATH,
                M::ACCESS_FLAGS,
                M::PKEY_INDEX,
                M::MIN_RNR_TIMER,
                M::PATH_MIG_STATE,
                M::RATE_LIMIT,
            ],
        ),
        masks(&[], &[M::AV, M::ALT_PATH, M::ACCESS_FLAGS, M::PKEY_INDEX, M::PATH_MIG_STATE, M::RATE_LIMIT]),
        masks(&[], &[M::PKEY_INDEX, M::QKEY, M::RATE_LIMIT]),
    ),
    bare(Sqe, Reset),
    bare(Sqe, Err),
    line(Sqe, Rts, None, masks(&[], &[M::CUR_STATE, M::ACCESS_FLAGS]), masks(&[], &[M::CUR_STATE, M::QKEY])),
    bare(Err, Reset),
    bare(Err, Err),
];

fn find(from: QpState, to: QpState, qp_type: QpType) -> Option<Masks> {
    let found = TABLE.iter().find(|line| line.from == from && line.to == to)?;
    match qp_type {
        QpType::Rc => found.rc,
        QpType::Uc => found.uc,
        QpType::Ud => found.ud,
        QpType::XrcSend => found.rc.map(|masks| masks.without(RESPONDER).except(UNPACED)),
        QpType::XrcRecv => found.rc.map(|masks| masks.without(REQUESTER).except(UNPACED)),
        QpType::RawPacket => found.ud.map(|masks| masks.only(FRAMES)),
    }
}

/// What only a responder needs: to an XRC initiator it means nothing.
const RESPONDER: M = set(&[M::MAX_DEST_RD_ATOMIC, M::MIN_RNR_TIMER]);
/// What only a requester needs: to an XRC target it means nothing. (Nor do the timeout and the first PSN, which it must have.)
const REQUESTER: M = set(&[M::RETRY_CNT, M::RNR_RETRY, M::MAX_QP_RD_ATOMIC]);

/// What queue pairs that are not paced lack: all but RC, UC and UD.
const UNPACED: M = M::RATE_LIMIT;

/// What a RAW_PACKET queue pair has of a datagram's attributes: frames know neither P_Key nor Q_Key nor PSN.
const FRAMES: M = set(&[M::PORT, M::CUR_STATE, M::EN_SQD_ASYNC_NOTIFY]);

/// Names of attributes and of their mask bits. The order is that in which a missing one is reported.
const NAMES: &[(M, &str, &str)] = &[
    (M::STATE, "IBV_QP_STATE", "qp_state"),
    (M::CUR_STATE, "IBV_QP_CUR_STATE", "cur_qp_state"),
    (M::AV, "IBV_QP_AV", "ah_attr"),
    (M::EN_SQD_ASYNC_NOTIFY, "IBV_QP_EN_SQD_ASYNC_NOTIFY", "en_sqd_async_notify"),
    (M::ACCESS_FLAGS, "IBV_QP_ACCESS_FLAGS", "qp_access_flags"),
    (M::PKEY_INDEX, "IBV_QP_PKEY_INDEX", "pkey_index"),
    (M::PORT, "IBV_QP_PORT", "port_num"),
    (M::QKEY, "IBV_QP_QKEY", "qkey"),
    (M::PATH_MTU, "IBV_QP_PATH_MTU", "path_mtu"),
    (M::TIMEOUT, "IBV_QP_TIMEOUT", "timeout"),
    (M::RETRY_CNT, "IBV_QP_RETRY_CNT", "retry_cnt"),
    (M::RNR_RETRY, "IBV_QP_RNR_RETRY", "rnr_retry"),
    (M::RQ_PSN, "IBV_QP_RQ_PSN", "rq_psn"),
    (M::MAX_QP_RD_ATOMIC, "IBV_QP_MAX_QP_RD_ATOMIC", "max_rd_atomic"),
    (M::ALT_PATH, "IBV_QP_ALT_PATH", "alt_ah_attr"),
    (M::MIN_RNR_TIMER, "IBV_QP_MIN_RNR_TIMER", "min_rnr_timer"),
    (M::SQ_PSN, "IBV_QP_SQ_PSN", "sq_psn"),
    (M::MAX_DEST_RD_ATOMIC, "IBV_QP_MAX_DEST_RD_ATOMIC", "max_dest_rd_atomic"),
    (M::PATH_MIG_STATE, "IBV_QP_PATH_MIG_STATE", "path_mig_state"),
    (M::CAP, "IBV_QP_CAP", "cap"),
    (M::DEST_QPN, "IBV_QP_DEST_QPN", "dest_qp_num"),
    (M::RATE_LIMIT, "IBV_QP_RATE_LIMIT", "rate_limit"),
];

/// The name of the first attribute in `mask`.
fn first_name(mask: M) -> (&'static str, &'static str) {
    NAMES
        .iter()
        .find(|(bit, ..)| mask.contains(*bit))
        .map_or(("attr_mask", "attr_mask"), |&(_, bit, field)| (bit, field))
}

/// The name of a state as programs print it.
pub(crate) fn state_name(state: QpState) -> &'static str {
    match state {
        Reset => "RESET",
        Init => "INIT",
        Rtr => "RTR",
        Rts => "RTS",
        Sqd => "SQD",
        Sqe => "SQE",
        Err => "ERR",
    }
}

fn type_name(qp_type: QpType) -> &'static str {
    match qp_type {
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
        QpType::XrcSend => "XRC_SEND",
        QpType::XrcRecv => "XRC_RECV",
        QpType::RawPacket => "RAW_PACKET",
    }
}

/// Checks one modify call against the table and the limits. Gives the state to go to and what to take over.
pub(crate) fn check(init: &QpInit, from: QpState, attr: &QpAttr, mask: M) -> Result<(QpState, M), ModifyError> {
    if mask.contains(M::CUR_STATE) && attr.cur_state != from {
        return Result::Err(ModifyError::new(
            "cur_qp_state",
            format!(
                "cur_qp_state (IBV_QP_CUR_STATE) says {}, but the QP is in {}",
                state_name(attr.cur_state),
                state_name(from)
            ),
        ));
    }
    let to = if mask.contains(M::STATE) { attr.state } else { from };
    let Some(masks) = find(from, to, init.qp_type) else {
        return Result::Err(ModifyError::new(
            "qp_state",
            format!(
                "qp_state: a {} QP cannot go from {} to {}",
                type_name(init.qp_type),
                state_name(from),
                state_name(to)
            ),
        ));
    };
    check_missing(init, to, masks.required.difference(mask))?;
    check_surplus(init, from, to, mask.difference(masks.required.union(masks.optional).union(M::STATE)))?;
    // The path MTU of UD is the port's: the host always gives it.
    let mask = if init.qp_type == QpType::Ud && to == Rtr { mask | M::PATH_MTU } else { mask };
    check_values(attr, mask)?;
    Ok((to, mask))
}

fn check_missing(init: &QpInit, to: QpState, missing: M) -> Result<(), ModifyError> {
    if missing.is_empty() {
        return Ok(());
    }
    let (bit, field) = first_name(missing);
    let state = state_name(to);
    let reason = match field {
        "ah_attr" => format!("{state} needs {bit}: a RoCE device needs a GID (ibv_rc_pingpong -g 0)"),
        _ => format!("{state} needs {bit} ({field}) on a {} QP", type_name(init.qp_type)),
    };
    Result::Err(ModifyError::new(field, reason))
}

fn check_surplus(init: &QpInit, from: QpState, to: QpState, surplus: M) -> Result<(), ModifyError> {
    if surplus.is_empty() {
        return Ok(());
    }
    let (bit, field) = first_name(surplus);
    let reason = match field {
        "cap" => format!("{bit} ({field}): the queues of a QP cannot be resized"),
        "rate_limit" => {
            format!("{bit} ({field}): RC, UC and UD queue pairs are paced, in RTS or SQD or on the way to RTS")
        }
        _ => format!(
            "{bit} ({field}) cannot be changed on a {} QP going from {} to {}",
            type_name(init.qp_type),
            state_name(from),
            state_name(to)
        ),
    };
    Result::Err(ModifyError::new(field, reason))
}

fn check_values(attr: &QpAttr, mask: M) -> Result<(), ModifyError> {
    let fault = |attr: &'static str, reason: String| Result::Err(ModifyError::new(attr, reason));
    if mask.contains(M::PKEY_INDEX) && attr.pkey_index != 0 {
        return fault(
            "pkey_index",
            format!("pkey_index {} is outside the P_Key table, which has one entry (index 0)", attr.pkey_index),
        );
    }
    if mask.contains(M::PORT) && attr.port_num != 1 {
        return fault("port_num", format!("port_num {} does not exist: the device has port 1 only", attr.port_num));
    }
    if mask.contains(M::AV) && attr.path.is_none() {
        return fault(
            "ah_attr",
            "ah_attr (IBV_QP_AV) has no usable destination: a RoCE device needs a GID (ibv_rc_pingpong -g 0)"
                .to_owned(),
        );
    }
    if mask.contains(M::PATH_MTU) && !matches!(attr.path_mtu, 256 | 512 | 1024 | 2048 | 4096) {
        return fault("path_mtu", format!("path_mtu of {} bytes is none of 256, 512, 1024, 2048, 4096", attr.path_mtu));
    }
    if mask.contains(M::DEST_QPN) && attr.dest_qpn > 0x00ff_ffff {
        return fault("dest_qp_num", format!("dest_qp_num {:#x} has more than 24 bits", attr.dest_qpn));
    }
    for (bit, field, value, max) in [
        (M::MAX_QP_RD_ATOMIC, "max_rd_atomic", attr.max_rd_atomic, MAX_RD_ATOMIC),
        (M::MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic", attr.max_dest_rd_atomic, MAX_RD_ATOMIC),
        (M::MIN_RNR_TIMER, "min_rnr_timer", attr.min_rnr_timer, 31),
        (M::TIMEOUT, "timeout", attr.timeout, 31),
        (M::RETRY_CNT, "retry_cnt", attr.retry_cnt, 7),
        (M::RNR_RETRY, "rnr_retry", attr.rnr_retry, 7),
    ] {
        if mask.contains(bit) && value > max {
            return fault(field, format!("{field} of {value} is above the limit of {max}"));
        }
    }
    let rate = attr.rate_limit;
    if mask.contains(M::RATE_LIMIT) && rate != 0 && !(RATE_LIMIT_MIN..=RATE_LIMIT_MAX).contains(&rate) {
        return fault(
            "rate_limit",
            format!(
                "rate_limit of {rate} kbit/s is outside {RATE_LIMIT_MIN} to {RATE_LIMIT_MAX}, the packet_pacing_caps"
            ),
        );
    }
    if mask.contains(M::ALT_PATH) {
        return fault(
            "alt_ah_attr",
            "alt_ah_attr (IBV_QP_ALT_PATH): automatic path migration is not supported".to_owned(),
        );
    }
    Ok(())
}

/// Takes over what `mask` names.
pub(crate) fn apply(into: &mut QpAttr, attr: &QpAttr, mask: M) {
    macro_rules! take {
        ($($bit:ident => $field:ident),* $(,)?) => {
            $(if mask.contains(M::$bit) { into.$field = attr.$field.clone(); })*
        };
    }
    take! {
        EN_SQD_ASYNC_NOTIFY => en_sqd_async_notify,
        ACCESS_FLAGS => access,
        PKEY_INDEX => pkey_index,
        PORT => port_num,
        QKEY => qkey,
        AV => path,
        PATH_MTU => path_mtu,
        TIMEOUT => timeout,
        RETRY_CNT => retry_cnt,
        RNR_RETRY => rnr_retry,
        RQ_PSN => rq_psn,
        MAX_QP_RD_ATOMIC => max_rd_atomic,
        MIN_RNR_TIMER => min_rnr_timer,
        SQ_PSN => sq_psn,
        MAX_DEST_RD_ATOMIC => max_dest_rd_atomic,
        DEST_QPN => dest_qpn,
        RATE_LIMIT => rate_limit,
    }
}

#[cfg(test)]
#[path = "qp_state_tests.rs"]
mod tests;
