use crate::testing::*;
use crate::verbs::*;

#[test]
fn send_of_each_size() {
    for len in [0, 1, 63, 1024, 1025, 200_000] {
        let mut pair = Pair::new(QpType::Rc);
        pair.b.post_recvs(100, 1, 0, 300_000);
        pair.post(1, SendOp::Send, 0, len);
        pair.run();
        assert_eq!(pair.a.host.sent.len(), 1, "{len}");
        assert_eq!(pair.a.host.sent[0].status, WcStatus::Success);
        assert_eq!(pair.b.host.received[0].byte_len, len);
        assert_eq!(pair.b.bytes(0, len), pair.a.bytes(0, len));
    }
}
