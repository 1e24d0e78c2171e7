//! Code numbers of communication management. All are open: an unknown one survives and prints as a number.

use super::fields::{Data, Field};

macro_rules! codes {
    ($(#[$meta:meta])* $name:ident($int:ty) { $($(#[$code_meta:meta])* $code:ident = $value:literal $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $int);

        impl $name {
            $($(#[$code_meta])* #[doc = concat!("Code ", stringify!($value), ": ", $text, ".")] pub const $code: $name = $name($value);)*

            /// What the specification calls it.
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $($name::$code => Some($text),)*
                    _ => None,
                }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => write!(f, "{} ({name})", self.0),
                    None => write!(f, "{}", self.0),
                }
            }
        }

        impl Field for $name {
            fn read(data: &Data, at: usize, width: usize) -> $name {
                $name(Field::read(data, at, width))
            }

            fn write(&self, data: &mut Data, at: usize, width: usize) {
                self.0.write(data, at, width);
            }
        }
    };
}

codes! {
    /// Why a connection is rejected (IBA 12.6.7.2, table 99).
    RejReason(u16) {
        NO_QP = 1 "no queue pair available",
        NO_EEC = 2 "no end-to-end context available",
        NO_RESOURCES = 3 "no resources available",
        TIMEOUT = 4 "timeout",
        UNSUPPORTED = 5 "unsupported request",
        INVALID_COMM_ID = 6 "invalid communication id",
        INVALID_COMM_INSTANCE = 7 "invalid communication instance",
        INVALID_SERVICE_ID = 8 "invalid service id",
        INVALID_TRANSPORT_TYPE = 9 "invalid transport service type",
        STALE_CONNECTION = 10 "stale connection",
        RDC_NOT_EXIST = 11 "no reliable datagram channel",
        INVALID_GID = 12 "primary remote port GID rejected",
        INVALID_LID = 13 "primary remote port LID rejected",
        INVALID_SL = 14 "invalid primary SL",
        INVALID_TRAFFIC_CLASS = 15 "invalid primary traffic class",
        INVALID_HOP_LIMIT = 16 "invalid primary hop limit",
        INVALID_PACKET_RATE = 17 "invalid primary packet rate",
        INVALID_ALT_GID = 18 "alternate remote port GID rejected",
        INVALID_ALT_LID = 19 "alternate remote port LID rejected",
        INVALID_ALT_SL = 20 "invalid alternate SL",
        INVALID_ALT_TRAFFIC_CLASS = 21 "invalid alternate traffic class",
        INVALID_ALT_HOP_LIMIT = 22 "invalid alternate hop limit",
        INVALID_ALT_PACKET_RATE = 23 "invalid alternate packet rate",
        PORT_CM_REDIRECT = 24 "port and communication manager redirection",
        PORT_REDIRECT = 25 "port redirection",
        INVALID_MTU = 26 "invalid path MTU",
        INSUFFICIENT_RESP_RESOURCES = 27 "insufficient responder resources",
        CONSUMER_DEFINED = 28 "rejected by the program",
        INVALID_RNR_RETRY = 29 "RNR retry count rejected",
        DUPLICATE_LOCAL_COMM_ID = 30 "duplicate local communication id",
        INVALID_CLASS_VERSION = 31 "invalid class version",
        INVALID_FLOW_LABEL = 32 "invalid primary flow label",
        INVALID_ALT_FLOW_LABEL = 33 "invalid alternate flow label",
        VENDOR_OPTION_NOT_SUPPORTED = 35 "vendor option not supported",
    }
}

codes! {
    /// How a service id was resolved (IBA 12.11.2, table 119).
    SidrStatus(u8) {
        SUCCESS = 0 "queue pair number and Q_Key are valid",
        UNSUPPORTED = 1 "service id not supported",
        REJECTED = 2 "rejected by the program",
        NO_QP = 3 "no queue pair available",
        REDIRECT = 4 "request should be redirected",
        UNSUPPORTED_VERSION = 5 "unsupported version",
    }
}

codes! {
    /// What came of a LAP (IBA 12.8.2, table 115).
    ApStatus(u8) {
        SUCCESS = 0 "alternate path loaded",
        INVALID_COMM_ID = 1 "invalid communication id",
        UNSUPPORTED = 2 "automatic path migration not supported",
        REJECTED = 3 "alternate path rejected by the program",
    }
}

codes! {
    /// Which message an MRA or a REJ is about.
    Subject(u8) {
        REQ = 0 "REQ",
        REP = 1 "REP",
        OTHER = 2 "none of them",
    }
}
