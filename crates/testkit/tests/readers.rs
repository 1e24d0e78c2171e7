//! The readers against small inputs, good and bad.

use std::time::Duration;

use ferroce_testkit::{Act, Args, Datagram, End, Fate, Line, Recording, Wc, read_pcap};

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

const HEADER: [u32; 6] = [0xa1b2_c3d4, 0x0004_0002, 0, 0, 65_535, 1];

#[test]
fn pcap_records() {
    let file = words(&[&HEADER[..], &[7, 500_000, 4, 4, 0x0403_0201, 8, 1, 0, 0]].concat());
    let records = read_pcap(&file).unwrap();
    assert_eq!(records.len(), 2);
    assert_eq!((records[0].time, &records[0].frame[..]), (Duration::from_millis(7500), &[1, 2, 3, 4][..]));
    assert_eq!((records[1].time, records[1].frame.len()), (Duration::new(8, 1000), 0));
}

#[test]
fn pcap_errors_say_where() {
    let error = |file: Vec<u8>| read_pcap(&file).unwrap_err().to_string();
    assert_eq!(error(vec![1, 2]), "pcap: the file ends inside a header");
    assert_eq!(error(words(&[0xd4c3_b2a1])), "pcap header: magic 0xd4c3b2a1");
    assert_eq!(error(words(&[0xa1b2_c3d4, 0, 0, 0, 0, 113])), "pcap header: link type 113 is not Ethernet");
    let with = |record: &[u32]| error(words(&[&HEADER[..], record].concat()));
    assert_eq!(with(&[0, 0, 4, 5, 0]), "pcap record 1: only 4 of 5 bytes were captured");
    assert_eq!(with(&[0, 0, 5, 5, 0]), "pcap record 1: the file ends inside the frame");
    assert_eq!(with(&[0, 1_000_000, 0, 0]), "pcap record 1: a fraction of a second of a second or more");
    assert_eq!(with(&[0, 0, 0]), "pcap: the file ends inside a header");
}

#[test]
fn other_frames_are_not_datagrams() {
    let mut arp = vec![0; 60];
    (arp[12], arp[13]) = (0x08, 0x06);
    assert_eq!(Datagram::from_ethernet(&arp).unwrap(), None);
    assert!(Datagram::from_ethernet(&arp[..13]).is_err());
}

/// Cutting or damaging a frame gives an error, never a panic.
#[test]
fn damaged_frames_are_errors() {
    let recording = Recording::read("rc-send").unwrap();
    let pcap = std::fs::read(Recording::folder().join("rc-send.pcap")).unwrap();
    let frame = &read_pcap(&pcap).unwrap()[0].frame;
    assert_eq!(Datagram::from_ethernet(frame).unwrap().as_ref(), Some(&recording.frames[0].datagram));
    for len in 0..frame.len() {
        assert!(Datagram::from_ethernet(&frame[..len]).is_err(), "{len} bytes");
    }
    for byte in 14..34 {
        let mut damaged = frame.clone();
        damaged[byte] ^= 0x80;
        assert!(!matches!(Datagram::from_ethernet(&damaged), Ok(Some(_))), "byte {byte}");
    }
}

#[test]
fn words_with_values() {
    let args = Args::parse("post op=send len=12 key=0xff neg=-1; status=10(remote access error)");
    assert_eq!(args.text("op"), Some("send"));
    assert_eq!(args.number("len"), Some(12));
    assert_eq!(args.number("key"), Some(255));
    assert_eq!(args.number("neg"), Some(u64::MAX));
    assert_eq!(args.number("status"), Some(10));
    assert_eq!(args.number("none"), None);
}

#[test]
fn scripts() {
    let script = Recording::read("rc-nak-access").unwrap().script;
    let pairs: Vec<_> = script.pairs().collect();
    assert_eq!(pairs.len(), 7);
    assert_eq!((pairs[6].id, &pairs[6].transport[..], pairs[6].qpn, pairs[6].path_mtu), (6, "rc", [0x49; 2], 1024));
    assert_eq!(pairs[6].start_psn, [0x1000, 0xa0_0000]);

    let script = Recording::read("rc-rnr-retry0").unwrap().script;
    let pair = script.pairs().next().unwrap();
    assert_eq!((pair.options[0].number("rnr"), pair.options[1].number("minrnr")), (Some(0), Some(14)));
    let polls: Vec<&Act> = script.acts().filter(|act| act.verb == "poll" && act.end == End::A).collect();
    let wc = polls[0].completions().next().unwrap();
    assert_eq!((wc.status, wc.byte_len), (13, None));
    assert!(script.lines.iter().all(|line| !matches!(line, Line::Note(note) if note.is_empty())));
}

#[test]
fn completions() {
    let wc = Wc::parse(
        "wc wr_id=100 status=0(success) opcode=128 byte_len=103 flags=0x3 imm=0x11220002 src_qp=0x16 slid=0 sl=0 qpn=0x17 vendor=0x0",
    );
    let wc = wc.unwrap();
    assert_eq!((wc.wr_id, wc.status, wc.opcode, wc.byte_len, wc.flags), (100, 0, 128, Some(103), Some(3)));
    assert_eq!((wc.imm, wc.src_qp, wc.qpn), (Some(0x1122_0002), Some(0x16), 0x17));
    assert_eq!(Wc::parse("timeout 1 missing"), None);
}

#[test]
fn fates() {
    let recordings = Recording::all().unwrap();
    assert_eq!(recordings.len(), 130);
    let frames = || recordings.iter().flat_map(|recording| &recording.frames);
    assert_eq!(frames().filter(|frame| !frame.arrived()).count(), 111);
    assert_eq!(frames().filter(|frame| frame.fates.contains(&Fate::Duplicated)).count(), 20);
    assert_eq!(frames().filter(|frame| frame.fates.contains(&Fate::Delayed)).count(), 4);
    let made = frames().flat_map(|frame| &frame.fates).filter(|fate| matches!(fate, Fate::Injected(_))).count();
    let altered = frames().flat_map(|frame| &frame.fates).filter(|fate| matches!(fate, Fate::Altered(_))).count();
    assert_eq!((made, altered), (68, 3));
}
