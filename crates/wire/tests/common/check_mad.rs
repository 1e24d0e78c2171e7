// What must hold for any bytes that come to queue pair 1. Shared by the property test, the replay of the fuzz corpus and the fuzz target.

use ferroce_wire::mad::{self, IP_HEADER_LEN, IpHeader, Mad, Message};

/// Parses, prints and emits the payload of a packet to queue pair 1. Panics if anything is not as it must be.
pub(crate) fn any_mad(payload: &[u8]) {
    let mad = match Mad::parse(payload) {
        Ok(mad) => mad,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let emitted = mad.emit();
    assert_eq!(Mad::parse(&emitted), Ok(mad), "{mad}");
    assert_eq!(Mad::parse(&emitted).map(|mad| mad.emit()), Ok(emitted), "{mad}");
    // Only reserved bits may be lost.
    assert!(emitted.iter().zip(payload).all(|(ours, theirs)| ours & !theirs == 0), "{mad}: bits out of nowhere");
    let ece = mad.ece();
    if ece != mad::Ece::default() {
        assert_eq!(mad.with_ece(ece), mad);
    }
    assert!(mad.to_string().starts_with(mad.message.name()));
    let private_data = match &mad.message {
        Message::Req(req) => &req.private_data[..],
        Message::SidrReq(req) => &req.private_data[..],
        _ => return,
    };
    match IpHeader::parse(private_data) {
        Ok(header) => assert_eq!(IpHeader::parse(&header.emit()), Ok(header)),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    assert!(IpHeader::parse(&private_data[..IP_HEADER_LEN - 1]).is_err());
}
