//! The messages and where their fields lie (IBA 12.6.5 to 12.11.2; fields of Enhanced Connection Establishment as the kernel has
//! them in `ibta_vol1_c12.h`). Private data is always whole; what a program gave is followed by zeros.

use super::fields::{Data, Field, layout};
use super::{ApStatus, Gid, RejReason, ServiceId, SidrStatus, Subject};

/// Bytes of private data in a REQ, of which RDMA-CM uses the first 36 for its [`IpHeader`](super::IpHeader).
pub const REQ_PRIVATE_DATA_LEN: usize = 92;
/// Bytes of private data in a REP.
pub const REP_PRIVATE_DATA_LEN: usize = 196;
/// Bytes of private data in a REJ.
pub const REJ_PRIVATE_DATA_LEN: usize = 148;
/// Bytes of private data in a SIDR_REQ, of which RDMA-CM uses the first 36 for its [`IpHeader`](super::IpHeader).
pub const SIDR_REQ_PRIVATE_DATA_LEN: usize = 216;
/// Bytes of private data in a SIDR_REP.
pub const SIDR_REP_PRIVATE_DATA_LEN: usize = 136;

layout! {
    /// A path between two ports, as a REQ names it.
    #[allow(missing_docs)]
    ReqPath {
        local_lid: u16 = [0, 0, 16],
        remote_lid: u16 = [2, 0, 16],
        local_gid: Gid = [4, 0, 128],
        remote_gid: Gid = [20, 0, 128],
        flow_label: u32 = [36, 0, 20],
        packet_rate: u8 = [39, 2, 6],
        traffic_class: u8 = [40, 0, 8],
        hop_limit: u8 = [41, 0, 8],
        sl: u8 = [42, 0, 4],
        subnet_local: bool = [42, 4, 1],
        /// Code: 4.096 us * 2^code.
        local_ack_timeout: u8 = [43, 0, 5],
    }
}

layout! {
    /// Request for communication (IBA 12.6.5).
    #[allow(missing_docs)]
    Req {
        local_comm_id: u32 = [0, 0, 32],
        /// ECE: the vendor, 24 bits.
        vendor_id: u32 = [5, 0, 24],
        service_id: ServiceId = [8, 0, 64],
        local_ca_guid: u64 = [16, 0, 64],
        local_qkey: u32 = [28, 0, 32],
        local_qpn: u32 = [32, 0, 24],
        responder_resources: u8 = [35, 0, 8],
        local_eecn: u32 = [36, 0, 24],
        initiator_depth: u8 = [39, 0, 8],
        remote_eecn: u32 = [40, 0, 24],
        /// Code: how long the receiver may take to answer, 4.096 us * 2^code.
        remote_cm_response_timeout: u8 = [43, 0, 5],
        /// 0 RC, 1 UC, 2 RD, 3 see `extended_transport_type`.
        transport_service_type: u8 = [43, 5, 2],
        end_to_end_flow_control: bool = [43, 7, 1],
        starting_psn: u32 = [44, 0, 24],
        /// Code: how long the sender may take to answer, 4.096 us * 2^code.
        local_cm_response_timeout: u8 = [47, 0, 5],
        retry_count: u8 = [47, 5, 3],
        partition_key: u16 = [48, 0, 16],
        /// Code: 1 is 256 bytes, 5 is 4096.
        path_mtu: u8 = [50, 0, 4],
        rdc_exists: bool = [50, 4, 1],
        rnr_retry_count: u8 = [50, 5, 3],
        max_cm_retries: u8 = [51, 0, 4],
        srq: bool = [51, 4, 1],
        /// 1 is XRC.
        extended_transport_type: u8 = [51, 5, 3],
        primary: ReqPath = [52, 0, 44 * 8],
        alternate: ReqPath = [96, 0, 44 * 8],
        private_data: [u8; REQ_PRIVATE_DATA_LEN] = [140, 0, REQ_PRIVATE_DATA_LEN * 8],
    }
}

layout! {
    /// Message receipt acknowledgement: "received, I need more time" (IBA 12.6.6).
    #[allow(missing_docs)]
    Mra {
        local_comm_id: u32 = [0, 0, 32],
        remote_comm_id: u32 = [4, 0, 32],
        subject: Subject = [8, 0, 2],
        /// Code: how much time, 4.096 us * 2^code.
        service_timeout: u8 = [9, 0, 5],
        private_data: [u8; 222] = [10, 0, 222 * 8],
    }
}

layout! {
    /// Reject (IBA 12.6.7).
    #[allow(missing_docs)]
    Rej {
        local_comm_id: u32 = [0, 0, 32],
        remote_comm_id: u32 = [4, 0, 32],
        subject: Subject = [8, 0, 2],
        /// Valid bytes of `info`.
        info_length: u8 = [9, 0, 7],
        reason: RejReason = [10, 0, 16],
        /// Additional rejection information, per reason; the sender's CA GUID with a timeout.
        info: [u8; 72] = [12, 0, 72 * 8],
        private_data: [u8; REJ_PRIVATE_DATA_LEN] = [84, 0, REJ_PRIVATE_DATA_LEN * 8],
    }
}

layout! {
    /// Reply to a request for communication (IBA 12.6.8).
    #[allow(missing_docs)]
    Rep {
        local_comm_id: u32 = [0, 0, 32],
        remote_comm_id: u32 = [4, 0, 32],
        local_qkey: u32 = [8, 0, 32],
        local_qpn: u32 = [12, 0, 24],
        /// ECE: bits 16 to 23 of the vendor.
        vendor_id_h: u8 = [15, 0, 8],
        local_eecn: u32 = [16, 0, 24],
        /// ECE: bits 8 to 15 of the vendor.
        vendor_id_m: u8 = [19, 0, 8],
        starting_psn: u32 = [20, 0, 24],
        /// ECE: bits 0 to 7 of the vendor.
        vendor_id_l: u8 = [23, 0, 8],
        responder_resources: u8 = [24, 0, 8],
        initiator_depth: u8 = [25, 0, 8],
        /// Code: 4.096 us * 2^code.
        target_ack_delay: u8 = [26, 0, 5],
        failover_accepted: u8 = [26, 5, 2],
        end_to_end_flow_control: bool = [26, 7, 1],
        rnr_retry_count: u8 = [27, 0, 3],
        srq: bool = [27, 3, 1],
        local_ca_guid: u64 = [28, 0, 64],
        private_data: [u8; REP_PRIVATE_DATA_LEN] = [36, 0, REP_PRIVATE_DATA_LEN * 8],
    }
}

layout! {
    /// Ready to use (IBA 12.6.9).
    #[allow(missing_docs)]
    Rtu {
        local_comm_id: u32 = [0, 0, 32],
        remote_comm_id: u32 = [4, 0, 32],
        private_data: [u8; 224] = [8, 0, 224 * 8],
    }
}

layout! {
    /// Request for communication release (IBA 12.6.10).
    #[allow(missing_docs)]
    Dreq {
        local_comm_id: u32 = [0, 0, 32],
        remote_comm_id: u32 = [4, 0, 32],
        /// The receiver's queue pair.
        remote_qpn: u32 = [8, 0, 24],
        private_data: [u8; 220] = [12, 0, 220 * 8],
    }
}

layout! {
    /// Reply to a request for communication release (IBA 12.6.11).
    #[allow(missing_docs)]
    Drep {
        local_comm_id: u32 = [0, 0, 32],
        remote_comm_id: u32 = [4, 0, 32],
        private_data: [u8; 224] = [8, 0, 224 * 8],
    }
}

layout! {
    /// Load alternate path (IBA 12.8.1). The path is left as bytes: nobody here takes one.
    #[allow(missing_docs)]
    Lap {
        local_comm_id: u32 = [0, 0, 32],
        remote_comm_id: u32 = [4, 0, 32],
        remote_qpn: u32 = [12, 0, 24],
        remote_cm_response_timeout: u8 = [15, 0, 5],
        alternate: [u8; 44] = [20, 0, 44 * 8],
        private_data: [u8; 168] = [64, 0, 168 * 8],
    }
}

layout! {
    /// Alternate path response (IBA 12.8.2).
    #[allow(missing_docs)]
    Apr {
        local_comm_id: u32 = [0, 0, 32],
        remote_comm_id: u32 = [4, 0, 32],
        /// Valid bytes of `info`.
        info_length: u8 = [8, 0, 8],
        status: ApStatus = [9, 0, 8],
        info: [u8; 72] = [12, 0, 72 * 8],
        private_data: [u8; 148] = [84, 0, 148 * 8],
    }
}

layout! {
    /// Service id resolution request (IBA 12.11.1).
    #[allow(missing_docs)]
    SidrReq {
        request_id: u32 = [0, 0, 32],
        partition_key: u16 = [4, 0, 16],
        service_id: ServiceId = [8, 0, 64],
        private_data: [u8; SIDR_REQ_PRIVATE_DATA_LEN] = [16, 0, SIDR_REQ_PRIVATE_DATA_LEN * 8],
    }
}

layout! {
    /// Service id resolution response (IBA 12.11.2).
    #[allow(missing_docs)]
    SidrRep {
        request_id: u32 = [0, 0, 32],
        status: SidrStatus = [4, 0, 8],
        /// Valid bytes of `info`.
        info_length: u8 = [5, 0, 8],
        /// ECE: bits 8 to 23 of the vendor.
        vendor_id_h: u16 = [6, 0, 16],
        qpn: u32 = [8, 0, 24],
        /// ECE: bits 0 to 7 of the vendor.
        vendor_id_l: u8 = [11, 0, 8],
        service_id: ServiceId = [12, 0, 64],
        qkey: u32 = [20, 0, 32],
        info: [u8; 72] = [24, 0, 72 * 8],
        private_data: [u8; SIDR_REP_PRIVATE_DATA_LEN] = [96, 0, SIDR_REP_PRIVATE_DATA_LEN * 8],
    }
}

macro_rules! message {
    ($($(#[$meta:meta])* $variant:ident = $attribute:literal $name:literal,)*) => {
        /// A message of communication management.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, clippy::large_enum_variant)]
        pub enum Message {
            $($variant($variant),)*
        }

        impl Message {
            /// Reads the message of that attribute. `None`: no such attribute is known.
            pub(super) fn read(attribute: u16, data: &Data) -> Option<Message> {
                Some(match attribute {
                    $($attribute => Message::$variant(Field::read(data, 0, 0)),)*
                    _ => return None,
                })
            }

            pub(super) fn write(&self, data: &mut Data) {
                match self {
                    $(Message::$variant(message) => message.write(data, 0, 0),)*
                }
            }

            /// The attribute id of the MAD header.
            pub const fn attribute(&self) -> u16 {
                match self {
                    $(Message::$variant(_) => $attribute,)*
                }
            }

            /// The specification's name.
            pub const fn name(&self) -> &'static str {
                match self {
                    $(Message::$variant(_) => $name,)*
                }
            }
        }

        $(impl From<$variant> for Message {
            fn from(message: $variant) -> Message {
                Message::$variant(message)
            }
        })*
    };
}

message! {
    Req = 0x10 "REQ",
    Mra = 0x11 "MRA",
    Rej = 0x12 "REJ",
    Rep = 0x13 "REP",
    Rtu = 0x14 "RTU",
    Dreq = 0x15 "DREQ",
    Drep = 0x16 "DREP",
    SidrReq = 0x17 "SIDR_REQ",
    SidrRep = 0x18 "SIDR_REP",
    Lap = 0x19 "LAP",
    Apr = 0x1a "APR",
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fields follow each other, never overlap, and end where the message does.
    #[test]
    fn layouts_have_no_overlap() {
        let whole = 232 * 8;
        for (name, fields, end) in [
            ("path", ReqPath::FIELDS, 44 * 8 - 3),
            ("REQ", Req::FIELDS, whole),
            ("MRA", Mra::FIELDS, whole),
            ("REJ", Rej::FIELDS, whole),
            ("REP", Rep::FIELDS, whole),
            ("RTU", Rtu::FIELDS, whole),
            ("DREQ", Dreq::FIELDS, whole),
            ("DREP", Drep::FIELDS, whole),
            ("LAP", Lap::FIELDS, whole),
            ("APR", Apr::FIELDS, whole),
            ("SIDR_REQ", SidrReq::FIELDS, whole),
            ("SIDR_REP", SidrRep::FIELDS, whole),
        ] {
            let mut at = 0;
            for (field, start, width) in fields {
                assert!(*start >= at, "{name}: {field} overlaps what is before it");
                at = start + width;
            }
            assert_eq!(at, end, "{name}");
        }
    }
}
