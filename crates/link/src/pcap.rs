//! A middleware that writes what a link sends and receives to a capture file.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant, SystemTime};

use ferroce_transport::{PathAddr, Train};
use ferroce_wire::{Headers, NetHeader, UDP_PORT};

pub use crate::capture_file::CaptureError;
use crate::capture_file::CaptureFile;
use crate::{Corrupt, Frame, Link, LinkStats, SendError, Tap, WireHooks};

/// Magic of a classic capture file with nanoseconds, in the byte order of the host that wrote it.
const MAGIC: u32 = 0xa1b2_3c4d;
const LINKTYPE_ETHERNET: u32 = 1;
/// Longest frame: Ethernet, IPv6 and UDP headers and the longest datagram.
const SNAPLEN: u32 = 14 + 40 + 65_535;
const BUFFER: usize = 256 << 10;

/// A link that writes all its packets, good and bad, to a file in the classic pcap format.
///
/// A socket hands over UDP payload only; the Ethernet, IP and UDP headers in front are made up from what is known, so that the ICRC
/// in the file verifies. Ethernet addresses carry the last four bytes of the IP address. Packets appear one by one, also if
/// they travelled as a batch, with the destination port 4791, which the ICRC takes them to have.
///
/// Bytes are written when the buffer of a quarter MiB is full, when nothing is left to receive, and at the end. Traffic never waits for
/// that: frames that a FIFO and the buffer have no room for are left out. If writing fails, the capture ends there. Either is
/// logged once, as a warning, and frames that are missing are counted ([`LinkStats::pcap_lost`]).
///
/// The end waits for a reader, for two seconds at most ([`finish_captures`]): a FIFO takes a part of a record as well, and should end after
/// a whole one.
///
/// Links of one process that capture to the same file share it. Another process is refused.
pub struct PcapLink<L> {
    link: L,
    tapped: Arc<Mutex<Tapped>>,
}

impl<L: Link + WireHooks> PcapLink<L> {
    /// Captures to a new file, or to a FIFO that somebody reads.
    ///
    /// # Errors
    /// It is something else, nobody reads it, or it cannot be made or written.
    pub fn create(link: L, path: impl AsRef<Path>) -> Result<PcapLink<L>, CaptureError> {
        Ok(PcapLink::with(link, shared(path.as_ref())?))
    }

    /// Captures to anything that takes bytes.
    ///
    /// # Errors
    /// The file header cannot be written.
    pub fn new(link: L, out: impl Write + Send + 'static) -> io::Result<PcapLink<L>> {
        Ok(PcapLink::with(link, Arc::new(Mutex::new(Writer::new(Box::new(out))?))))
    }

    fn with(mut link: L, writer: Arc<Mutex<Writer>>) -> PcapLink<L> {
        let tapped = Arc::new(Mutex::new(Tapped { writer, lost: 0, next: None }));
        let tap = Arc::clone(&tapped);
        link.set_tap(Box::new(move |frame| lock(&tap).frame(frame)));
        PcapLink { link, tapped }
    }
}

/// A capture file that the process has open.
struct Open {
    /// A forked child has its parent's list, and none of its files.
    pid: u32,
    path: PathBuf,
    writer: Weak<Mutex<Writer>>,
}

static OPEN: Mutex<Vec<Open>> = Mutex::new(Vec::new());

/// What writes to this file, opened for the first link.
fn shared(path: &Path) -> Result<Arc<Mutex<Writer>>, CaptureError> {
    let pid = std::process::id();
    let mut open = lock(&OPEN);
    open.retain(|open| open.pid == pid && open.writer.strong_count() > 0);
    let known = open.iter().find(|open| open.path == path).and_then(|open| open.writer.upgrade());
    if let Some(writer) = known {
        return Ok(writer);
    }
    let writer = Arc::new(Mutex::new(Writer::new(Box::new(CaptureFile::open(path)?))?));
    open.push(Open { pid, path: path.to_owned(), writer: Arc::downgrade(&writer) });
    Ok(writer)
}

/// For the exit of the process: what its captures have not written yet is written, as far as readers take it within two seconds each. They
/// end with it. One that a thread is at, and does not let go of within that time, ends early: it may be the thread that exits, from a signal
/// handler.
pub fn finish_captures() {
    let pid = std::process::id();
    let writers: Vec<_> = match OPEN.try_lock() {
        Ok(open) => open.iter().filter(|open| open.pid == pid).filter_map(|open| open.writer.upgrade()).collect(),
        // A thread that opens one has captured nothing yet.
        Err(_) => return,
    };
    for writer in writers {
        let give_up = Instant::now() + PATIENCE;
        match lock_until(&writer, give_up) {
            Some(mut writer) => writer.finish(give_up),
            None => log::warn!("the packet capture ends early: a thread that was interrupted is at it"),
        }
    }
}

/// So long the end of a capture waits, in all.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between looks whether it may go on.
const PAUSE: Duration = Duration::from_millis(1);

/// None: somebody has it all the time.
fn lock_until<T>(of: &Mutex<T>, give_up: Instant) -> Option<MutexGuard<'_, T>> {
    loop {
        match of.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() >= give_up => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
        }
    }
}

/// A panic while writing leaves at worst half a record.
fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<L: Link> Link for PcapLink<L> {
    fn send(&mut self, cookie: u64, src_qpn: u32, path: &PathAddr, train: &Train) -> Result<(), SendError> {
        self.link.send(cookie, src_qpn, path, train)
    }

    fn flush(&mut self, failed: &mut dyn FnMut(u64, SendError)) {
        self.link.flush(failed);
    }

    fn recv(&mut self, budget: usize, sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8])) -> usize {
        let read = self.link.recv(budget, sink);
        if read == 0 {
            lock(&self.tapped).flush();
        }
        read
    }

    fn rx_fds(&self) -> Vec<RawFd> {
        self.link.rx_fds()
    }

    fn stats(&self) -> LinkStats {
        let mut stats = self.link.stats();
        stats.pcap_lost += lock(&self.tapped).lost;
        stats
    }

    fn next_due(&self) -> Option<u64> {
        self.link.next_due()
    }
}

impl<L: WireHooks> WireHooks for PcapLink<L> {
    /// `tap` sees the packets beside the capture.
    fn set_tap(&mut self, tap: Tap) {
        lock(&self.tapped).next = Some(tap);
    }

    fn set_corrupt(&mut self, corrupt: Corrupt) {
        self.link.set_corrupt(corrupt);
    }
}

impl<L> Drop for PcapLink<L> {
    fn drop(&mut self) {
        lock(&self.tapped).flush();
    }
}

/// Where a link's frames go.
struct Tapped {
    writer: Arc<Mutex<Writer>>,
    /// Frames of the link that are missing.
    lost: u64,
    next: Option<Tap>,
}

impl Tapped {
    fn frame(&mut self, frame: &Frame<'_>) {
        self.lost += u64::from(!lock(&self.writer).frame(frame));
        if let Some(next) = &mut self.next {
            next(frame);
        }
    }

    fn flush(&mut self) {
        lock(&self.writer).flush();
    }
}

struct Writer {
    /// `None` after a failure, and after the end.
    out: Option<Box<dyn Write + Send>>,
    waiting: Waiting,
    record: Vec<u8>,
    /// It was told that frames are missing.
    told: bool,
}

/// Bytes that are not written yet.
#[derive(Default)]
struct Waiting {
    bytes: VecDeque<u8>,
    /// Bytes of each record, of which the first one may have been written in part.
    records: VecDeque<usize>,
    /// So much of the first record is written.
    begun: usize,
}

impl Waiting {
    fn push(&mut self, record: &[u8]) {
        self.bytes.extend(record);
        self.records.push_back(record.len());
    }

    /// So many bytes were written.
    fn pass(&mut self, len: usize) {
        self.bytes.drain(..len);
        self.begun += len;
        while let Some(first) = self.records.front().copied().filter(|first| *first <= self.begun) {
            self.begun -= first;
            self.records.pop_front();
        }
    }

    /// Hands all to `out`, as far as that takes it.
    fn write(&mut self, out: &mut dyn Write) -> io::Result<()> {
        while !self.bytes.is_empty() {
            match out.write(self.bytes.as_slices().0) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(len) => self.pass(len),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        out.flush()
    }
}

impl Writer {
    fn new(mut out: Box<dyn Write + Send>) -> io::Result<Writer> {
        let mut header = Vec::new();
        header.extend(MAGIC.to_ne_bytes());
        for version in [2u16, 4] {
            header.extend(version.to_ne_bytes());
        }
        // Time zone and accuracy are always 0.
        for field in [0, 0, SNAPLEN, LINKTYPE_ETHERNET] {
            header.extend(field.to_ne_bytes());
        }
        // Who reads a FIFO waits for it; and a disk that is full is told at once.
        out.write_all(&header)?;
        out.flush()?;
        Ok(Writer { out: Some(out), waiting: Waiting::default(), record: Vec::new(), told: false })
    }

    /// False: the frame will be missing.
    fn frame(&mut self, frame: &Frame<'_>) -> bool {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        self.record.clear();
        put_record(&mut self.record, time, frame);
        // A record is shorter than the buffer, which takes it whole or not at all.
        let has_room = self.waiting.bytes.len() + self.record.len() <= BUFFER || {
            self.flush();
            self.waiting.bytes.len() + self.record.len() <= BUFFER
        };
        let is_there = has_room && self.out.is_some();
        if is_there {
            self.waiting.push(&self.record);
        }
        if !is_there && self.out.is_some() && !self.told {
            self.told = true;
            log::warn!(
                "the packet capture lacks frames, which pcap_lost counts: its reader is too slow; write it to a file"
            );
        }
        is_there
    }

    /// What a FIFO has no room for now is written later.
    fn flush(&mut self) {
        let Some(out) = self.out.as_mut().filter(|_| !self.waiting.bytes.is_empty()) else { return };
        if let Err(error) = self.waiting.write(out)
            && error.kind() != ErrorKind::WouldBlock
        {
            log::warn!("the packet capture ends here: {error}; {}", remedy(&error));
            self.out = None;
        }
    }

    /// Writes what waits, as far as the reader takes it until then. The capture ends with it.
    fn finish(&mut self, give_up: Instant) {
        self.flush();
        while self.out.is_some() && !self.waiting.bytes.is_empty() {
            if Instant::now() >= give_up {
                let cut = if self.waiting.begun > 0 { "in the middle of a record" } else { "early" };
                let missing = self.waiting.records.len();
                log::warn!("the packet capture ends {cut}: its reader is too slow, and {missing} frames are missing");
                break;
            }
            std::thread::sleep(PAUSE);
            self.flush();
        }
        self.out = None;
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.finish(Instant::now() + PATIENCE);
    }
}

/// What to do about a failure.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::BrokenPipe => "its reader has ended: read until the program does, or write the capture to a file",
        ErrorKind::FileTooLarge => "allow larger files (ulimit -f), or capture less",
        _ => "make room there, or write the capture elsewhere",
    }
}

/// One record: header of the record, Ethernet, IP, UDP, the packet.
fn put_record(out: &mut Vec<u8>, time: Duration, frame: &Frame<'_>) {
    let Frame { net, bytes, .. } = frame;
    let udp_len = bytes.len() + 8;
    let ip_header = if net.dst.is_ipv4() { 20 } else { 40 };
    let len = (14 + ip_header + udp_len) as u32;
    for field in [time.as_secs() as u32, time.subsec_nanos(), len, len] {
        out.extend(field.to_ne_bytes());
    }
    out.extend(mac(net.dst));
    out.extend(mac(net.src));
    let pseudo_header = match (net.src, net.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            out.extend(0x0800u16.to_be_bytes());
            let start = out.len();
            out.extend([0x45, net.tclass]);
            out.extend(((20 + udp_len) as u16).to_be_bytes());
            out.extend(frame.identification.to_be_bytes());
            out.extend([0x40, 0, net.hop_limit, 17, 0, 0]);
            out.extend(src.octets());
            out.extend(dst.octets());
            let checksum = !fold(sum(0, &out[start..]));
            out[start + 10..start + 12].copy_from_slice(&checksum.to_be_bytes());
            sum(sum(0, &src.octets()), &dst.octets())
        }
        (src, dst) => {
            let (src, dst) = (v6(src), v6(dst));
            out.extend(0x86ddu16.to_be_bytes());
            out.extend((6 << 28 | u32::from(net.tclass) << 20).to_be_bytes());
            out.extend((udp_len as u16).to_be_bytes());
            out.extend([17, net.hop_limit]);
            out.extend(src);
            out.extend(dst);
            sum(sum(0, &src), &dst)
        }
    };
    let start = out.len();
    for field in [net.src_port, UDP_PORT, udp_len as u16, 0] {
        out.extend(field.to_be_bytes());
    }
    out.extend(*bytes);
    let checksum = !fold(sum(pseudo_header + 17 + udp_len as u64, &out[start..]));
    // 0 stands for "no checksum", so that a sum of 0 is sent as its other form.
    let checksum = if checksum == 0 { 0xffff } else { checksum };
    out[start + 6..start + 8].copy_from_slice(&checksum.to_be_bytes());
}

fn v6(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// A locally administered address that ends in the IP address.
fn mac(ip: IpAddr) -> [u8; 6] {
    let [.., a, b, c, d] = v6(ip);
    [2, 0, a, b, c, d]
}

/// The Internet checksum's sum (RFC 1071), not folded yet.
fn sum(start: u64, bytes: &[u8]) -> u64 {
    bytes
        .chunks(2)
        .fold(start, |sum, pair| sum + u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)])))
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// The exit waited for ever, where a signal handler called it in the midst of a frame.
    #[test]
    fn an_exit_in_the_midst_of_a_frame_ends_captures_early() {
        let path = std::env::temp_dir().join(format!("ferroce-interrupted-{}.pcap", std::process::id()));
        let writer = shared(&path).unwrap();
        let held = lock(&writer);
        let (finished, finishes) = mpsc::channel();
        std::thread::spawn(move || {
            finish_captures();
            finished.send(())
        });
        finishes.recv_timeout(Duration::from_secs(60)).expect("it waits for who was interrupted");
        assert!(held.out.is_some(), "that one has it still");
        drop(held);
        finish_captures();
        assert!(lock(&writer).out.is_none(), "nobody has it any more");
        std::fs::remove_file(&path).unwrap();
    }
}
