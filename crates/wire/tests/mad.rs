//! Management datagrams: every recorded one, any message, any bytes, and the corpus that fuzzing starts from.

#[path = "common/check_mad.rs"]
mod check;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use ferroce_testkit::{Args, Datagram, Frame, Recording, read_pcap};
use ferroce_wire::mad::{
    ApStatus, Ece, GSI_QKEY, GsiError, IpHeader, MAD_LEN, Mad, MadError, Message, PortSpace, RejReason, ServiceId,
    SidrStatus, address_of, check_gsi, gid_of, gsi_headers,
};
use ferroce_wire::{Headers, ICRC_LEN, Opcode, Psn};
use proptest::collection::vec;
use proptest::prelude::*;

/// The payload of a packet to queue pair 1; `None` if it is another packet.
fn gsi_payload(datagram: &Datagram) -> Option<(Headers, Vec<u8>)> {
    let (packet, _) = datagram.payload.split_last_chunk::<ICRC_LEN>().unwrap();
    let (headers, payload) = Headers::parse(packet).ok()?;
    check_gsi(&headers).ok()?;
    Some((headers, packet[payload].to_vec()))
}

/// Emits to the same bytes, and the packet around it is the one that we would send.
fn check_bytes(place: &str, headers: &Headers, payload: &[u8]) -> Mad {
    let mad = Mad::parse(payload).unwrap_or_else(|error| panic!("{place}: {error}"));
    assert_eq!(mad.emit(), payload, "{place}: {mad}");
    check::any_mad(payload);
    let mut expected = gsi_headers(headers.bth.psn);
    expected.bth.mig_req = headers.bth.mig_req; // rxe never sets it.
    assert_eq!(*headers, expected, "{place}");
    mad
}

/// The recordings of programs; their texts were decoded by another program.
#[test]
fn recorded_dialogues() {
    let mut seen = BTreeSet::new();
    let mut frames = 0;
    for recording in Recording::all().unwrap() {
        for frame in &recording.frames {
            let Some((headers, payload)) = gsi_payload(&frame.datagram) else { continue };
            let place = format!("{}, frame {}", recording.name, frame.number);
            let mad = check_bytes(&place, &headers, &payload);
            check_against_text(&place, frame, &mad);
            seen.insert(mad.message.name());
            frames += 1;
        }
    }
    assert_eq!(seen, BTreeSet::from(["REQ", "REP", "RTU", "DREQ", "DREP", "SIDR_REQ", "SIDR_REP"]));
    assert_eq!(frames, 17);
}

fn check_against_text(place: &str, frame: &Frame, mad: &Mad) {
    let text = frame.decoded[2..].join(" ").replace("(REQ)", "");
    let says = Args::parse(&text);
    let is = |name: &str, ours: u64| assert_eq!(says.number(name), Some(ours), "{place}: {name} of {mad}");
    is("tid", mad.tid);
    is("attr", mad.message.attribute().into());
    is("mod", mad.attr_mod.into());
    is("status", mad.status.into());
    match &mad.message {
        Message::Req(req) => {
            is("local_comm_id", req.local_comm_id.into());
            is("service_id", req.service_id.0);
            is("ca_guid", req.local_ca_guid);
            is("qpn", req.local_qpn.into());
            is("resp_res", req.responder_resources.into());
            is("init_depth", req.initiator_depth.into());
            is("rem_cm_timeout", req.remote_cm_response_timeout.into());
            is("transport", req.transport_service_type.into());
            is("fc", req.end_to_end_flow_control.into());
            is("start_psn", req.starting_psn.into());
            is("local_cm_timeout", req.local_cm_response_timeout.into());
            is("retry", req.retry_count.into());
            is("mtu", req.path_mtu.into());
            is("rnr", req.rnr_retry_count.into());
            is("max_cm_retries", req.max_cm_retries.into());
            is("srq", req.srq.into());
            is("slid", req.primary.local_lid.into());
            is("flow", req.primary.flow_label.into());
            is("hop", req.primary.hop_limit.into());
            is("ack_timeout", req.primary.local_ack_timeout.into());
            assert_eq!(address_of(req.primary.local_gid), frame.datagram.src, "{place}");
            assert_eq!(address_of(req.primary.remote_gid), frame.datagram.dst, "{place}");
            check_ip_header(place, frame, &says, &req.private_data);
        }
        Message::Rep(rep) => {
            is("local", rep.local_comm_id.into());
            is("remote", rep.remote_comm_id.into());
            is("qpn", rep.local_qpn.into());
            is("start_psn", rep.starting_psn.into());
            is("resp_res", rep.responder_resources.into());
            is("init_depth", rep.initiator_depth.into());
            is("target_ack_delay", rep.target_ack_delay.into());
            is("failover", rep.failover_accepted.into());
            is("fc", rep.end_to_end_flow_control.into());
            is("rnr", rep.rnr_retry_count.into());
            is("srq", rep.srq.into());
            is("ca_guid", rep.local_ca_guid);
        }
        Message::Rtu(rtu) => {
            is("local", rtu.local_comm_id.into());
            is("remote", rtu.remote_comm_id.into());
        }
        Message::Dreq(dreq) => {
            is("local", dreq.local_comm_id.into());
            is("remote", dreq.remote_comm_id.into());
            is("remote_qpn", dreq.remote_qpn.into());
        }
        Message::Drep(drep) => {
            is("local", drep.local_comm_id.into());
            is("remote", drep.remote_comm_id.into());
        }
        Message::SidrReq(req) => {
            is("reqid", req.request_id.into());
            is("pkey", req.partition_key.into());
            is("service_id", req.service_id.0);
            check_ip_header(place, frame, &says, &req.private_data);
        }
        Message::SidrRep(rep) => {
            is("reqid", rep.request_id.into());
            is("info_len", rep.info_length.into());
            is("qpn", rep.qpn.into());
            is("service_id", rep.service_id.0);
            assert_eq!((rep.qkey, rep.status), (0x0123_4567, SidrStatus::SUCCESS), "{place}");
        }
        other => panic!("{place}: {} in a recording", other.name()),
    }
}

fn check_ip_header(place: &str, frame: &Frame, says: &Args, private_data: &[u8]) {
    let header = IpHeader::parse(private_data).unwrap_or_else(|error| panic!("{place}: {error}"));
    assert_eq!(says.number("port"), Some(header.src_port.into()), "{place}");
    assert_eq!((header.src, header.dst), (frame.datagram.src, frame.datagram.dst), "{place}");
    assert_eq!(header.emit(), private_data[..36], "{place}");
}

/// Eight dialogues between two kernels, with a refusal, a rejection and datagrams.
#[test]
fn recorded_kernels() {
    let file = fs::read(Recording::folder().join("cm/cm-golden-rxe-6.12.pcap")).unwrap();
    let mut mads = Vec::new();
    for (index, record) in read_pcap(&file).unwrap().iter().enumerate() {
        let Some(datagram) = Datagram::from_ethernet(&record.frame).unwrap() else { continue };
        let Some((headers, payload)) = gsi_payload(&datagram) else { continue };
        mads.push(check_bytes(&format!("record {}", index + 1), &headers, &payload));
    }
    let names: Vec<_> = mads.iter().map(|mad| mad.message.name()).collect();
    let connection = ["REQ", "REP", "RTU", "DREQ", "DREP"];
    let expected = [&connection[..], &["REQ", "REJ", "SIDR_REQ", "SIDR_REP"]].concat();
    let expected = [&expected[..], &connection, &connection, &connection, &["REQ", "REJ"], &connection].concat();
    assert_eq!(names, expected);
    let reasons: Vec<_> = mads
        .iter()
        .filter_map(|mad| if let Message::Rej(rej) = mad.message { Some((rej.reason, rej.private_data)) } else { None })
        .collect();
    assert_eq!(reasons[0], (RejReason::INVALID_SERVICE_ID, [0; 148]));
    assert_eq!(reasons[1].0, RejReason::CONSUMER_DEFINED);
    assert!(reasons[1].1.starts_with(b"go away please\0"));
}

#[test]
fn errors_say_what_is_wrong() {
    let drep = Mad::new(7, Message::Drep(zeroed(0x16)));
    let with = |at: usize, byte: u8| {
        let mut bytes = drep.emit();
        bytes[at] = byte;
        Mad::parse(&bytes)
    };
    assert_eq!(with(0, 1), Ok(drep));
    assert_eq!(with(0, 2), Err(MadError::BaseVersion { version: 2 }));
    assert_eq!(with(1, 3), Err(MadError::Class { class: 3 }));
    assert_eq!(with(2, 1), Err(MadError::ClassVersion { version: 1 }));
    assert_eq!(with(3, 0x83), Err(MadError::Method { method: 0x83 }));
    assert_eq!(with(17, 0x1b), Err(MadError::Attribute { attribute: 0x1b }));
    assert_eq!(Mad::parse(&drep.emit()[..255]), Err(MadError::Length { len: 255 }));
    assert_eq!(Mad::parse(&[&drep.emit()[..], &[0]].concat()), Err(MadError::Length { len: 257 }));
}

/// The message of an attribute with every field zero.
fn zeroed<T: TryFromMessage>(attribute: u8) -> T {
    let mut bytes = [0; MAD_LEN];
    bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
    bytes[17] = attribute;
    T::take(Mad::parse(&bytes).unwrap().message).expect("the attribute is that of the type")
}

trait TryFromMessage: Sized {
    fn take(message: Message) -> Option<Self>;
}

macro_rules! try_from_message {
    ($($name:ident)*) => {
        $(impl TryFromMessage for ferroce_wire::mad::$name {
            fn take(message: Message) -> Option<Self> {
                if let Message::$name(message) = message { Some(message) } else { None }
            }
        })*
    };
}

try_from_message!(Req Rep Rej Drep Apr SidrRep);

#[test]
fn enhanced_connection_establishment() {
    let ece = Ece { vendor_id: 0x0a_0b0c, attr_mod: 0x1002_0304 };
    let req = Mad::new(1, Message::Req(zeroed(0x10))).with_ece(ece);
    let rep = Mad::new(1, Message::Rep(zeroed(0x13))).with_ece(ece);
    let sidr = Mad::new(1, Message::SidrRep(zeroed(0x18))).with_ece(ece);
    for mad in [req, rep, sidr] {
        let again = Mad::parse(&mad.emit()).unwrap();
        assert_eq!(again, mad);
        assert_eq!(again.ece(), ece);
        assert!(again.to_string().ends_with("options 0x10020304"));
    }
    let rej = Mad::new(1, Message::Rej(zeroed(0x12)));
    assert_eq!(rej.with_ece(ece), rej);
    assert_eq!(rej.ece(), Ece::default());
    // Where the kernel puts the vendor: REQ bytes 5 to 7; REP bytes 15, 19, 23; SIDR_REP bytes 6, 7, 11.
    let at = |mad: Mad, places: [usize; 3]| places.map(|place| mad.emit()[24 + place]);
    assert_eq!(at(req, [5, 6, 7]), [0x0a, 0x0b, 0x0c]);
    assert_eq!(at(rep, [15, 19, 23]), [0x0a, 0x0b, 0x0c]);
    assert_eq!(at(sidr, [6, 7, 11]), [0x0a, 0x0b, 0x0c]);
}

#[test]
fn codes_and_service_ids_print() {
    assert_eq!(RejReason::STALE_CONNECTION.to_string(), "10 (stale connection)");
    assert_eq!(RejReason(77).to_string(), "77");
    assert_eq!(ApStatus::UNSUPPORTED.name(), Some("automatic path migration not supported"));
    assert_eq!(ServiceId::new(PortSpace::Tcp, 7174).to_string(), "Tcp port 7174");
    assert_eq!(ServiceId(0x1000_0000_0000_0001).to_string(), "0x1000000000000001");
}

#[test]
fn packets_to_queue_pair_1() {
    let good = gsi_headers(Psn::new(5));
    assert_eq!(check_gsi(&good), Ok(()));
    let mut other = good;
    other.bth.dest_qp = 2;
    assert_eq!(check_gsi(&other), Err(GsiError::Destination { qpn: 2 }));
    let mut other = good;
    other.bth.opcode = Opcode::UD_SEND_ONLY_IMM;
    assert_eq!(check_gsi(&other), Err(GsiError::Opcode { opcode: Opcode::UD_SEND_ONLY_IMM }));
    let mut other = good;
    other.deth.as_mut().unwrap().qkey = GSI_QKEY - 1;
    assert_eq!(check_gsi(&other), Err(GsiError::QKey { qkey: GSI_QKEY - 1 }));
    let mut other = good;
    other.deth.as_mut().unwrap().src_qp = 17;
    assert_eq!(check_gsi(&other), Err(GsiError::Source { qpn: 17 }));
    let mut other = good;
    other.deth = None;
    assert!(check_gsi(&other).is_err());
}

proptest! {
    #[test]
    fn any_message(attribute in 0x0f..0x1c_u8, tid: u64, options: u32, data in vec(any::<u8>(), MAD_LEN - 24)) {
        let mut bytes = vec![1, 7, 2, 3, 0, 0, 0, 0];
        bytes.extend(tid.to_be_bytes());
        bytes.extend([0, attribute, 0, 0]);
        bytes.extend(options.to_be_bytes());
        bytes.extend(data);
        prop_assert_eq!(Mad::parse(&bytes).is_ok(), (0x10..=0x1a).contains(&attribute));
        check::any_mad(&bytes);
    }

    #[test]
    fn any_bytes(bytes in vec(any::<u8>(), 0..300)) {
        check::any_mad(&bytes);
    }

    #[test]
    fn any_ip_header(src_port: u16, src: std::net::IpAddr, dst: std::net::IpAddr) {
        let header = IpHeader { src_port, src, dst };
        let again = IpHeader::parse(&header.emit()).unwrap();
        let mapped = |address: std::net::IpAddr| address_of(gid_of(address));
        prop_assert_eq!((again.src_port, mapped(again.src), mapped(again.dst)), (src_port, mapped(src), mapped(dst)));
        prop_assert_eq!(again.src.is_ipv4(), src.is_ipv4() && dst.is_ipv4());
    }
}

/// The corpus has each message and each error.
#[test]
fn fuzz_corpus() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/mad");
    let mut seen = BTreeSet::new();
    for entry in fs::read_dir(&folder).unwrap() {
        let bytes = fs::read(entry.unwrap().path()).unwrap();
        check::any_mad(&bytes);
        seen.insert(match Mad::parse(&bytes) {
            Ok(mad) => mad.message.name(),
            Err(MadError::Length { .. }) => "length",
            Err(MadError::BaseVersion { .. }) => "base version",
            Err(MadError::Class { .. }) => "class",
            Err(MadError::ClassVersion { .. }) => "class version",
            Err(MadError::Method { .. }) => "method",
            Err(MadError::Attribute { .. }) => "attribute",
        });
    }
    let messages = ["REQ", "MRA", "REJ", "REP", "RTU", "DREQ", "DREP", "SIDR_REQ", "SIDR_REP", "LAP", "APR"];
    let errors = ["length", "base version", "class", "class version", "method", "attribute"];
    assert_eq!(seen, messages.into_iter().chain(errors).collect());
}
