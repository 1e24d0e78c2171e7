//! Where we differ from the recordings, and why: faults of rxe, freedom that the specification leaves, and what we do not have yet.
//!
//! A difference that is not here fails the test, and so does an entry that does not happen any more.

use ferroce_testkit::End;

/// Differences of one end of a recording that have one reason.
pub(crate) struct Known {
    /// Name of the recording.
    pub(crate) recording: &'static str,
    /// Which end we play.
    pub(crate) end: End,
    /// As [`super::difference::lines`] writes them.
    pub(crate) lines: &'static [&'static str],
    /// The reason.
    pub(crate) why: &'static str,
}

const fn known(recording: &'static str, end: End, lines: &'static [&'static str], why: &'static str) -> Known {
    Known { recording, end, lines, why }
}

/// Ends whose requests are not all in the recording, and why: they are played in real time only.
pub(crate) const UNRECORDED: &[(&str, End, &str)] =
    &[("rc-netem", End::A, "netem in the guest lost and swapped frames before they were recorded")];

use End::{A, B};

// What we do not have yet.
const NO_BIND: &str = "missing: a send request that binds a memory window; the test's memory binds it instead";
const NO_CM: &str = "missing: the connection manager behind QP1, which is not the transport's part";

// Faults of rxe.
const REPEATED_WITHOUT_ADDRESS: &str =
    "rxe: a FLUSH or ATOMIC WRITE that it sends again has va 0 (tests/vectors/README.md)";
const GARBLED_ID: &str = "rxe: libibverbs 44 has no FLUSH, so it was put into the queue by hand, which garbled its id";
const FLUSH_OF_A_REGION: &str =
    "free: a FLUSH of a region names no range; rxe sends what the program gave all the same";
const FLUSH_ICRC: &str = "rxe: the ICRC of its FLUSH is wrong, so the queue pair never sees one";
const FLUSHED_FIRST: &str = "rxe: a local error completes as flushed; it is a protection error (IBA 11.6.2)";
const WINDOW_BOUND: &str = "rxe: does not check the upper bound of a window";
const INVALIDATE: &str = "rxe: acknowledges a SEND whose invalidation fails; we refuse it with a remote access error";
const RESERVED: &str = "rxe: drops requests with reserved opcodes; we refuse them as invalid (IBA 9.7.4.1.4)";
const TOO_LONG: &str = "rxe: says remote operational error to a SEND that is too long for its receive; that is a length \
                        error at the receiver and an invalid request to the sender, as hardware has it";
const STRAY_PAYLOAD: &str = "rxe: answers a READ request with stray payload, with a broken response; we refuse it";
const RETRY_7: &str = "rxe: retry_cnt 7 is endless; in verbs only rnr_retry 7 is";
const UC_NEXT_LOST: &str = "rxe: after a UC message that lost its middle or end it drops the next one too; we take it";
const UD_TOO_LONG: &str = "rxe: a datagram above the MTU completes with success and is not sent; it is a local length error, \
                           and the queue pair goes to SQE";

// Freedom.
const ATTEMPTS: &str =
    "free: we give up after the longest time that the attributes allow, and send again more often until then";
const ACK_REQ: &str = "free: we ask for an ACK with the last packet of a train, rxe with every 66th packet";
const ACK_SPARED: &str =
    "free: where nobody waits for a completion we ask for an ACK with every 17th message, rxe with every one";
const REPAIR_ALONE: &str = "free: the first packet that a NAK asks for goes alone and asks for its ACK, which tells whether the peer keeps what is behind it";
const FLOW: &str =
    "free: AckReq asks for an answer of our flow control every 32 KiB; rxe, which does not look at it on UC, leaves it";
const EARLY_LENGTH: &str =
    "free: a FIRST whose RETH promises no more than it has is wrong already; rxe waits for the LAST";
const EARLY_LENGTH_AND_STRAY_PAYLOAD: &str = "the NAKs of the two entries before";
const RECEIVE_UNUSED: &str =
    "free: we refuse the request before it takes a receive, which is flushed then; rxe fails the receive";
const RNR_SILENCE: &str =
    "free: rxe tells what is in flight behind an RNR NAK once more where to go on; the RNR NAK said it";
const RNR_NEW: &str = "free: rxe sends new requests while it waits for the receiver; we wait with those too";
const RNR_RACE: &str = "free: the recorder saw the RNR NAK before requests that rxe had sent already; we have not, so they come \
                        when the wait is over";
const RNR_FROM_START: &str =
    "free: rxe repeats a message from its start though the RNR NAK acknowledged its first packet";
const READ_AGAIN: &str = "free: we answer a READ asked for again from its middle as the new request that it is";
const LOCAL_FIRST: &str = "free: we look at the place of the response before we ask for it, so that an atomic that must fail is not \
                           executed; rxe when the response is there";
const LOST_UNRECORDED: &str = "free: netem in the guest lost these before they were recorded";

/// All of them.
pub(crate) const KNOWN: &[Known] = &[
    known("cm-rping-v4", A, &["no pair, frames 2, 29: not sent: UD_SEND_ONLY"], NO_CM),
    known("cm-rping-v4", B, &["no pair, frames 1, 3, 28: not sent: UD_SEND_ONLY"], NO_CM),
    known("cm-rping-v6", A, &["no pair, frames 2, 29: not sent: UD_SEND_ONLY"], NO_CM),
    known("cm-rping-v6", B, &["no pair, frames 1, 3, 28: not sent: UD_SEND_ONLY"], NO_CM),
    known("cm-rping-v6-linklocal", A, &["no pair, frames 2, 17: not sent: UD_SEND_ONLY"], NO_CM),
    known("cm-rping-v6-linklocal", B, &["no pair, frames 1, 3, 16: not sent: UD_SEND_ONLY"], NO_CM),
    known("cm-udaddy-v6", A, &["no pair, frame 2: not sent: UD_SEND_ONLY"], NO_CM),
    known("cm-udaddy-v6", B, &["no pair, frame 1: not sent: UD_SEND_ONLY"], NO_CM),
    known(
        "rc-ack-coalesce",
        A,
        &["pair 0, frames 4-8, 51-61, 66-69, 72, 74-77, 80-91, 93-97: AckReq false instead of true"],
        ACK_SPARED,
    ),
    known("rc-unsignaled-single", A, &["pair 0, frame 3: AckReq false instead of true"], ACK_SPARED),
    known(
        "rc-ackreq-long",
        A,
        &[
            "pair 0, frames 60, 121: AckReq true instead of false",
            "pair 0, frames 66, 133: AckReq false instead of true",
        ],
        ACK_REQ,
    ),
    known(
        "rc-atomic-write-loss-req",
        A,
        &[
            "pair 0, frame 2: RETH Reth { va: 140104904290304, rkey: 1780, len: 8 } instead of Reth { va: 0, rkey: 1780, len: 8 }",
        ],
        REPEATED_WITHOUT_ADDRESS,
    ),
    known(
        "rc-atomic-write-replay",
        A,
        &[
            "pair 0, frame 3: RETH Reth { va: 139683539271680, rkey: 27299, len: 8 } instead of Reth { va: 0, rkey: 27299, len: 8 }",
        ],
        REPEATED_WITHOUT_ADDRESS,
    ),
    known(
        "rc-dup-flush-awrite",
        A,
        &["pair 0, send completion of 18369614679682410242: wr_id 2 instead of 18369614679682410242"],
        GARBLED_ID,
    ),
    known(
        "rc-flush",
        A,
        &[
            "pair 0, send completion of 18369614679682410242: wr_id 2 instead of 18369614679682410242",
            "pair 0, send completion of 18369614434598635011: wr_id 3 instead of 18369614434598635011",
            "pair 0, send completion of 18369614648297679108: wr_id 4 instead of 18369614648297679108",
        ],
        GARBLED_ID,
    ),
    known(
        "rc-flush",
        A,
        &[
            "pair 0, frame 5: RETH Reth { va: 0, rkey: 893, len: 0 } instead of Reth { va: 140104902967296, rkey: 893, len: 64 }",
        ],
        FLUSH_OF_A_REGION,
    ),
    known(
        "rc-flush-loss-req",
        A,
        &["pair 0, send completion of 18369614679682410242: wr_id 2 instead of 18369614679682410242"],
        GARBLED_ID,
    ),
    known(
        "rc-flush-loss-req",
        A,
        &[
            "pair 0, frame 2: RETH Reth { va: 140397379158016, rkey: 1982, len: 64 } instead of Reth { va: 0, rkey: 1982, len: 64 }",
        ],
        REPEATED_WITHOUT_ADDRESS,
    ),
    known(
        "rc-flush-replay",
        A,
        &["pair 0, send completion of 18369614679682410242: wr_id 2 instead of 18369614679682410242"],
        GARBLED_ID,
    ),
    known(
        "rc-flush-replay",
        A,
        &[
            "pair 0, frames 3-4: RETH Reth { va: 140397379158016, rkey: 887, len: 64 } instead of Reth { va: 0, rkey: 887, len: 64 }",
        ],
        REPEATED_WITHOUT_ADDRESS,
    ),
    known("rc-flush-replay", A, &["pair 0, end: also sent: RC_FLUSH"], ATTEMPTS),
    known(
        "rc-dup-flush-awrite",
        B,
        &["pair 0, frames 3, 6-7: not sent: RC_READ_RESPONSE_ONLY", "pair 0, end: also sent: RC_ACKNOWLEDGE NAK 0x60"],
        FLUSH_ICRC,
    ),
    known(
        "rc-flush",
        B,
        &[
            "pair 0, frames 4, 6: not sent: RC_READ_RESPONSE_ONLY",
            "pair 0, frame 8: not sent: RC_ACKNOWLEDGE NAK 0x62",
            "pair 0, state: 3 instead of 6",
        ],
        FLUSH_ICRC,
    ),
    known("rc-flush-loss-req", B, &["pair 0, frame 3: not sent: RC_ACKNOWLEDGE NAK 0x62"], FLUSH_ICRC),
    known("rc-flush-replay", B, &["pair 0, frame 2: not sent: RC_READ_RESPONSE_ONLY"], FLUSH_ICRC),
    known("rc-local-prot-error", A, &["pair 0, send completion of 1: status 4 instead of 5"], FLUSHED_FIRST),
    known("rc-loss-middle", A, &["pair 0, frame 7: AckReq true instead of false"], REPAIR_ALONE),
    known(
        "rc-mw",
        B,
        &["pair 0, send completion of 50, send completion of 51, send completion of 52: missing"],
        NO_BIND,
    ),
    known("rc-mw-bounds", B, &["pair 0, send completion of 50: missing"], NO_BIND),
    known(
        "rc-mw-bounds",
        B,
        &[
            "pair 0, frame 2: not sent: RC_ACKNOWLEDGE",
            "pair 0, state: 6 instead of 3",
            "pair 0, end: also sent: RC_ACKNOWLEDGE NAK 0x62",
        ],
        WINDOW_BOUND,
    ),
    known(
        "rc-nak-invalid-request",
        B,
        &[
            "pair 5, frame 10: AETH syndrome NAK 0x61 instead of NAK 0x63",
            "pair 6, frame 14: AETH syndrome NAK 0x61 instead of NAK 0x63",
            "pairs 5-6, receive completion of 100: status 1 instead of 2",
        ],
        TOO_LONG,
    ),
    known("rc-nak-invalid-request", B, &["pair 8, receive completion of 100: status 5 instead of 9"], RECEIVE_UNUSED),
    known("rc-nak-length", B, &["pairs 0-1, receive completion of 101: status 5 instead of 9"], RECEIVE_UNUSED),
    known("rc-nak-length", B, &["pair 6, frame 43: not sent: RC_ACKNOWLEDGE NAK 0x61"], EARLY_LENGTH),
    known(
        "rc-nak-length",
        B,
        &[
            "pair 12, frame 79: not sent: RC_READ_RESPONSE_ONLY",
            "pair 12, frames 81, 83: not sent: RC_ACKNOWLEDGE",
            "pair 12, receive completion of 101, receive completion of 102, receive completion of 103: also: Recv WrFlushErr",
            "pair 12, state: 6 instead of 3",
        ],
        STRAY_PAYLOAD,
    ),
    known(
        "rc-nak-length",
        B,
        &["pairs 6, 12, end: also sent: RC_ACKNOWLEDGE NAK 0x61"],
        EARLY_LENGTH_AND_STRAY_PAYLOAD,
    ),
    known(
        "rc-nak-opcode",
        B,
        &[
            "pairs 6-8, receive completion of 101, receive completion of 102, receive completion of 103: also: Recv WrFlushErr",
            "pairs 6-8, state: 6 instead of 3",
            "pair 6, frame 44: not sent: RC_ACKNOWLEDGE",
            "pair 7, frame 49: not sent: RC_ACKNOWLEDGE",
            "pair 8, frame 54: not sent: RC_ACKNOWLEDGE",
            "pairs 6-8, end: also sent: RC_ACKNOWLEDGE NAK 0x61",
        ],
        RESERVED,
    ),
    known("rc-netem", B, &["pair 0, frames 16, 26, 55, end: also sent: RC_ACKNOWLEDGE"], LOST_UNRECORDED),
    known("rc-peer-error-state", A, &["pair 0, end: also sent: RC_SEND_ONLY"], ATTEMPTS),
    known("rc-peer-gone", A, &["pair 0, end: also sent: RC_SEND_ONLY"], ATTEMPTS),
    known("rc-read-local-bounds", A, &["pair 0, frame 1: not sent: RC_READ_REQUEST"], LOCAL_FIRST),
    known(
        "rc-read-loss-resp-last",
        B,
        &["pair 0, frame 7: RC_READ_RESPONSE_ONLY instead of RC_READ_RESPONSE_LAST"],
        READ_AGAIN,
    ),
    known(
        "rc-read-loss-resp-mid",
        B,
        &["pair 0, frame 8: RC_READ_RESPONSE_FIRST instead of RC_READ_RESPONSE_MIDDLE"],
        READ_AGAIN,
    ),
    known(
        "rc-read-loss-resp-mid-v6",
        B,
        &["pair 0, frame 8: RC_READ_RESPONSE_FIRST instead of RC_READ_RESPONSE_MIDDLE"],
        READ_AGAIN,
    ),
    known(
        "rc-read-reorder-resp",
        B,
        &["pair 0, frame 7: RC_READ_RESPONSE_FIRST instead of RC_READ_RESPONSE_MIDDLE"],
        READ_AGAIN,
    ),
    known("rc-reorder-write", A, &["pair 0, frame 6: AckReq true instead of false"], REPAIR_ALONE),
    known("rc-retry-0", A, &["pair 0, end 9 times: also sent: RC_SEND_ONLY"], ATTEMPTS),
    known(
        "rc-retry-7-endless",
        A,
        &[
            "pair 0, frames 11-60: not sent: RC_SEND_ONLY",
            "pair 0, send completion of 1: also: Send RetryExcErr",
            "pair 0, state: 6 instead of 3",
        ],
        RETRY_7,
    ),
    known("rc-rnr-0", B, &["pair 0, frame 4: not sent: RC_ACKNOWLEDGE NAK 0x60"], RNR_SILENCE),
    known("rc-rnr-exceeded", A, &["pair 0, frame 3: also sent: RC_SEND_ONLY"], RNR_NEW),
    known("rc-rnr-exceeded", B, &["pair 0, frames 4, 8, 12: not sent: RC_ACKNOWLEDGE NAK 0x60"], RNR_SILENCE),
    known("rc-rnr-pipeline", B, &["pair 0, frames 7, 12, 17, 22: not sent: RC_ACKNOWLEDGE NAK 0x60"], RNR_SILENCE),
    known(
        "rc-rnr-read",
        A,
        &["pair 0, frames 9, 14: also sent: RC_SEND_ONLY", "pair 0, frames 9, 14: also sent: RC_READ_REQUEST"],
        RNR_RACE,
    ),
    known("rc-rnr-read", B, &["pair 0, frames 5, 10, 15: not sent: RC_ACKNOWLEDGE NAK 0x60"], RNR_SILENCE),
    known("rc-rnr-writeimm", A, &["pair 0, frame 4: not sent: RC_WRITE_FIRST"], RNR_FROM_START),
    known(
        "rc-send-inv",
        B,
        &[
            "pair 0, send completion of 50, send completion of 51, send completion of 52, send completion of 53, send completion of 54, send completion of 55: missing",
        ],
        NO_BIND,
    ),
    known(
        "rc-send-inv-bad",
        B,
        &[
            "pair 0, frame 2: not sent: RC_ACKNOWLEDGE",
            "pair 0, receive completion of 100: status 6 instead of 9",
            "pair 0, end: also sent: RC_ACKNOWLEDGE NAK 0x62",
        ],
        INVALIDATE,
    ),
    known(
        "rc-send-inv-unknown",
        B,
        &[
            "pair 0, frame 2: not sent: RC_ACKNOWLEDGE",
            "pair 0, receive completion of 100: status 6 instead of 9",
            "pair 0, end: also sent: RC_ACKNOWLEDGE NAK 0x62",
        ],
        INVALIDATE,
    ),
    known("uc-loss-first", B, &["pair 0, receive completion of 101: also: Recv Success"], UC_NEXT_LOST),
    known(
        "uc-loss-last",
        B,
        &[
            "pair 0, receive completion of 100: also: Recv Success",
            "pair 0, receive completion of 100: wr_id 101 instead of 100",
            "pair 0, receive completion of 101: wr_id 102 instead of 101",
            "pair 0, receive completion of 102: wr_id 103 instead of 102",
            "pair 0, receive completion of 103: wr_id 104 instead of 103",
            "pair 0, receive completion of 104: wr_id 105 instead of 104",
        ],
        UC_NEXT_LOST,
    ),
    known(
        "uc-loss-middle",
        B,
        &[
            "pair 0, receive completion of 100: also: Recv Success",
            "pair 0, receive completion of 100: wr_id 101 instead of 100",
            "pair 0, receive completion of 101: wr_id 102 instead of 101",
            "pair 0, receive completion of 102: wr_id 103 instead of 102",
            "pair 0, receive completion of 103: wr_id 104 instead of 103",
            "pair 0, receive completion of 104: wr_id 105 instead of 104",
        ],
        UC_NEXT_LOST,
    ),
    known("uc-loss-write", B, &["pair 0, receive completion of 100: also: RecvRdmaWithImm Success"], UC_NEXT_LOST),
    known("uc-send-4096", A, &["pair 0, frame 14: AckReq true instead of false"], FLOW),
    known(
        "ud-send",
        A,
        &["pair 0, send completion of 21: status 1 instead of 0", "pair 0, state: 5 instead of 3"],
        UD_TOO_LONG,
    ),
    known(
        "ud-send-4096",
        A,
        &["pair 0, send completion of 21: status 1 instead of 0", "pair 0, state: 5 instead of 3"],
        UD_TOO_LONG,
    ),
    known(
        "ud-send-v6",
        A,
        &["pair 0, send completion of 21: status 1 instead of 0", "pair 0, state: 5 instead of 3"],
        UD_TOO_LONG,
    ),
];
