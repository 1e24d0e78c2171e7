//! Mutated packets and operations in any order on queue pairs with the simulated host: no socket, no thread, the same on every
//! machine.

use ferroce_transport::{Count, Drop};
use hostile_tests::campaign;

#[test]
fn nothing_leaves_its_bounds_whatever_comes() {
    let report = campaign::run(1, |report| report.seeds < 60);
    println!("{report}");
    for reason in [
        Drop::QpState,
        Drop::WrongTransport,
        Drop::WrongSource,
        Drop::PKey,
        Drop::QKey,
        Drop::Psn,
        Drop::DuplicateUnknown,
        Drop::GhostResponse,
        Drop::BadOpcode,
        Drop::BadLength,
        Drop::NoReceive,
        Drop::MessageBroken,
        Drop::Version,
        Drop::Access,
        Drop::Overload,
    ] {
        assert!(report.dropped(reason) > 0, "no packet was dropped for {reason:?}\n{report}");
    }
    for what in [
        Count::AckSent,
        Count::AckReceived,
        Count::NakSequenceSent,
        Count::NakSequenceReceived,
        Count::NakInvalidRequestSent,
        Count::NakInvalidRequestReceived,
        Count::NakRemoteAccessSent,
        Count::NakRemoteAccessReceived,
        Count::RnrNakSent,
        Count::RnrNakReceived,
        Count::DuplicateRequest,
        Count::RequestHeld,
        Count::ProbeSent,
        Count::Timeout,
        Count::PacketsRetransmitted,
    ] {
        assert!(report.counted(what) > 0, "{what:?} never happened\n{report}");
    }
    assert!(report.delivered > report.packets / 2 && report.delivered < report.packets, "{report}");
}
