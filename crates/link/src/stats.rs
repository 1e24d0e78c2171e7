//! Counters of a link.

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a link did and what it dropped, and why. Counters only grow.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct LinkStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl LinkStats {
            /// Every counter with its name, in a fixed order.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }

            /// Adds another link's counters to these.
            pub fn merge(&mut self, other: &LinkStats) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

stats! {
    /// Packets given to the system.
    tx_packets,
    /// UDP payload bytes given to the system, BTH to ICRC.
    tx_bytes,
    /// Datagrams handed over: a GSO batch counts once.
    tx_datagrams,
    /// Datagrams of more than one packet among them.
    tx_gso_batches,
    /// `sendmmsg` calls.
    tx_calls,
    /// Trains queued.
    tx_trains,
    /// Packets dropped because a socket or device queue stayed full (EAGAIN, ENOBUFS).
    tx_drop_full,
    /// Packets not sent because the destination was refused.
    tx_unreachable,
    /// Trains not sent because their memory was gone.
    tx_fault,
    /// Times the queue was full and was flushed inside `send`.
    tx_auto_flush,
    /// Times a socket lost GSO because the system refused a batch.
    tx_gso_refused,
    /// Sockets closed to make room for others.
    tx_sockets_evicted,
    /// Packets received, good and bad ones.
    rx_packets,
    /// UDP payload bytes received.
    rx_bytes,
    /// Datagrams received: a GRO batch counts once.
    rx_datagrams,
    /// Datagrams of more than one packet among them.
    rx_gro_batches,
    /// `recvmmsg` calls.
    rx_calls,
    /// Packets whose ICRC held with a known IPv4 Identification, or over IPv6.
    rx_icrc_known,
    /// Packets whose ICRC held for an Identification that had to be solved for.
    rx_icrc_solved,
    /// Packets dropped: the ICRC is wrong.
    rx_icrc_errors,
    /// Packets dropped: too short for their headers.
    rx_too_short,
    /// Packets dropped: a transport header version other than 0.
    rx_bad_version,
    /// Packets dropped: more pad than bytes, or not filled up to words.
    rx_bad_pad,
    /// Datagrams dropped: longer than a receive buffer, or without the facts that the ICRC needs.
    rx_bad_datagram,
    /// Datagrams that the system dropped before they could be read, most often because the socket's buffer was full. Known when the next
    /// one is read.
    rx_drop_full,
    /// Errors of `recvmmsg` other than "nothing there".
    rx_errors,
    /// Packets written to rings: for lanes of other processes on this host.
    ring_tx_packets,
    /// Their bytes, BTH to pad.
    ring_tx_bytes,
    /// Packets whose payload was lent: the other end fetches it from the program's memory.
    ring_tx_lent,
    /// Packets dropped because a ring was full.
    ring_tx_drop_full,
    /// Packets dropped because their ring is broken or gone.
    ring_tx_drop_broken,
    /// Sleeping peers that were woken because a ring has something for them.
    ring_wakeups,
    /// Times that a direction of a ring gave its memory back to the system.
    ring_given_back,
    /// Packets read from rings.
    ring_rx_packets,
    /// Their bytes, BTH to pad.
    ring_rx_bytes,
    /// Packets whose payload was lent by the other end.
    ring_rx_borrowed,
    /// Packets lost because what was lent could not be had any more.
    ring_rx_unfetched,
    /// Packets from rings dropped: they cannot be parsed, or are not filled up to words.
    ring_rx_bad,
    /// Packets from rings dropped: for a queue pair that is not connected to the lane at the other end.
    ring_rx_stranger,
    /// Rings given up because the peer wrote what it must not.
    ring_broken,
    /// Rings that were offered and not taken: no sealed memory, of the wrong size or version, or unasked-for.
    ring_refused,
    /// Frames of RAW_PACKET queue pairs given to interfaces.
    frame_tx,
    /// Frames that an interface refused because it is down, or gone.
    frame_tx_lost,
    /// Frames that came in by interfaces with flows, wanted by a flow or not.
    frame_rx,
    /// Frames that came in and no flow wanted: most of them are the host's.
    frame_rx_unwanted,
    /// Frames dropped: shorter than their two addresses, or longer than any interface's MTU (merged by the system).
    frame_rx_bad_length,
    /// Frames that the system dropped because they were not read in time. Known when the next one is read.
    frame_rx_drop_full,
    /// Errors of reading frames, such as an interface that goes down.
    frame_rx_errors,
    /// Packets that a fault middleware lost on purpose.
    fault_lost,
    /// Packets that a fault middleware doubled.
    fault_duplicated,
    /// Packets that a fault middleware put behind later ones.
    fault_reordered,
    /// Packets that a fault middleware delayed.
    fault_delayed,
    /// Packets that a fault middleware corrupted.
    fault_corrupted,
    /// Frames that a capture lacks: they came faster than its FIFO was read, or after it had failed.
    pcap_lost,
}
