//! Memory windows (type 2), and their end by SEND with invalidate or by the owner.

use ferroce_wire::{Opcode, Syndrome};

use super::responder::{Send, acked, read_back, segments};
use super::{Case, case};
use crate::bench::{
    ALL, Bench, Conn, ERR, MW_BIND, REMOTE_READ, REMOTE_WRITE, SETUP, Seen, Stop, WC_RECV, WC_WITH_INV, add, departs,
    must, pattern, status, wr,
};
use crate::dut::{Post, Region, Window};

/// The window lies in the middle of a region of 4096 bytes.
const AT: u64 = 1000;
const LEN: u32 = 500;

const CLOSED: &str = "NAK remote access error; no byte is touched; the queue pair goes to ERR";
const NOT_INVALIDATED: &str =
    "the receive completes in error, the queue pair goes to ERR, the key is as good as before";

pub(super) const CASES: &[Case] = &[
    case(
        "Window, WRITE and READ through it",
        "10.6.7.2, 9.7.4.1.5",
        "a type 2 window in the middle of a region; a WRITE of its first byte, one of its last, a READ of all of it",
        "executed as with the region's R_Key",
        |b| {
            let (mut c, region, window) = windowed(b, REMOTE_WRITE | REMOTE_READ)?;
            let last = u64::from(LEN) - 1;
            for at in [0, last] {
                b.say(&c.request(Opcode::RC_WRITE_ONLY).reth(window.addr + at, window.rkey, 1).payload(b"w"))?;
                acked(b, &mut c)?;
            }
            b.say(&c.request(Opcode::RC_READ_REQUEST).reth(window.addr, window.rkey, LEN))?;
            let mut bytes = vec![0; LEN as usize];
            (bytes[0], bytes[last as usize]) = (b'w', b'w');
            read_back(b, &mut c, &bytes, 0)?;
            b.expect_bytes(region, AT as i64 - 1, &[&[0], &bytes[..], &[0]].concat())
        },
    ),
    case(
        "Window, bounds",
        "10.6.7.2, 9.7.4.1.5",
        "WRITEs of 8 bytes that begin one before the window and end one behind it, inside its region",
        CLOSED,
        |b| {
            for at in [-1, i64::from(LEN) - 7] {
                let (c, region, window) = windowed(b, REMOTE_WRITE | REMOTE_READ)?;
                refused(b, &c, region, Window { addr: window.addr.wrapping_add_signed(at), ..window }, 8)?;
            }
            Ok(())
        },
    )
    .remark("it looks at the bounds of the region, not of the window"),
    case("Window without REMOTE_WRITE", "10.6.7.2, 9.7.4.1.5", "a WRITE through a window for READs", CLOSED, |b| {
        let (c, region, window) = windowed(b, REMOTE_READ)?;
        refused(b, &c, region, window, 8)
    }),
    case(
        "Window of another queue pair",
        "10.6.7.2",
        "a WRITE with the R_Key of a type 2 window to a queue pair of the same protection domain that it was not bound for",
        CLOSED,
        |b| {
            let (_, region, window) = windowed(b, REMOTE_WRITE)?;
            let other = b.connect(SETUP)?;
            refused(b, &other, region, window, 8)
        },
    ),
    case(
        "Window, invalidated by its owner",
        "10.6.7.2, 10.6.5",
        "the owner posts LOCAL_INV; then a WRITE through the window",
        CLOSED,
        |b| {
            let (c, region, window) = windowed(b, REMOTE_WRITE)?;
            invalidate(b, &c, window)?;
            refused(b, &c, region, window, 8)
        },
    ),
    case(
        "Window, bound anew",
        "10.6.7.2",
        "a window is invalidated and bound to other bytes with the next key; a WRITE with the new key, one with the old",
        "the first is executed; the second draws a NAK remote access error and touches nothing",
        |b| {
            let (mut c, region, old) = windowed(b, REMOTE_WRITE)?;
            invalidate(b, &c, old)?;
            let new = b.bind(&c, old.id, region, 2000, LEN, REMOTE_WRITE)?;
            must(new.rkey != old.rkey, || "the key is the same".to_owned())?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).reth(new.addr, new.rkey, 3).payload(b"new"))?;
            acked(b, &mut c)?;
            b.expect_bytes(region, 2000, b"new")?;
            refused(b, &c, region, old, 8)
        },
    ),
    case(
        "SEND with invalidate",
        "9.4.1.1, 10.6.7.2",
        "SEND ONLY with invalidate of a window's R_Key, one receive posted; then a WRITE through the window",
        "the receive completes with the invalidated R_Key; the WRITE draws a NAK remote access error",
        |b| {
            let (mut c, region, window) = windowed(b, REMOTE_WRITE)?;
            b.recv(&c, 1, region, 64)?;
            b.say(&c.request(Opcode::RC_SEND_ONLY_INV).ieth(window.rkey).payload(&pattern(20)))?;
            acked(b, &mut c)?;
            invalidating_receive(b, &c, window, 20)?;
            b.expect_bytes(region, 0, &pattern(20))?;
            refused(b, &c, region, window, 8)
        },
    )
    .remark("the kernel's bit for it is another than libibverbs's IBV_WC_WITH_INV; the window is closed"),
    case(
        "SEND with invalidate, the window is closed",
        "9.4.1.1, 10.6.7.2",
        "the same with SENDs of no bytes, one packet and three; of the completion only success and length are looked at",
        "the WRITE behind it draws a NAK remote access error and touches nothing",
        |b| {
            for len in [0, 20, 2 * 1024 + 5] {
                let (mut c, region, window) = windowed(b, REMOTE_WRITE)?;
                let received = b.region(4096, ALL)?;
                b.recv(&c, 1, received, 4096)?;
                send_invalidate(b, &mut c, &pattern(len), window.rkey)?;
                let wc = b.expect_completions(&c, &[(1, status::SUCCESS)])?;
                must(wc[0].byte_len as usize == len, || format!("completes as {:?}", wc[0]))?;
                b.expect_bytes(received, 0, &pattern(len))?;
                refused(b, &c, region, window, 8)?;
            }
            Ok(())
        },
    ),
    case(
        "SEND with invalidate, received twice",
        "9.4.1.1, 9.7.5.1.3",
        "SEND ONLY with invalidate twice, two receives posted; a window bound in between",
        "acknowledged again; one receive is used; the other window is open",
        |b| {
            let (mut c, region, window) = windowed(b, REMOTE_WRITE)?;
            for wr_id in [1, 2] {
                b.recv(&c, wr_id, region, 64)?;
            }
            let send = c.request(Opcode::RC_SEND_ONLY_INV).ieth(window.rkey).payload(&pattern(4));
            b.say(&send)?;
            acked(b, &mut c)?;
            b.expect_completions(&c, &[(1, status::SUCCESS)])?;
            let again = b.bind(&c, window.id, region, AT, LEN, REMOTE_WRITE)?;
            b.say(&send)?;
            b.expect_ack(&c, add(c.psn, 0x00ff_ffff), c.msn)?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).reth(again.addr, again.rkey, 4).payload(b"open"))?;
            acked(b, &mut c)?;
            b.expect_completions(&c, &[])?;
            b.expect_bytes(region, AT as i64, b"open")
        },
    ),
    case(
        "SEND with invalidate of a region's R_Key",
        "9.4.1.1, 9.9.3 (class J)",
        "SEND ONLY with invalidate of the R_Key of an ordinary region; then a WRITE to the region over another queue pair",
        NOT_INVALIDATED,
        |b| {
            let (c, region) = (b.connect(SETUP)?, b.region(4096, ALL)?);
            not_invalidated(b, &c, region, region.rkey)?;
            writable(b, region)
        },
    ),
    case(
        "SEND with invalidate of an unknown R_Key",
        "9.4.1.1, 9.9.3 (class J)",
        "SEND ONLY with invalidate of a window's R_Key with the last byte changed",
        NOT_INVALIDATED,
        |b| {
            let (c, region, window) = windowed(b, REMOTE_WRITE)?;
            not_invalidated(b, &c, region, window.rkey ^ 0x5a)?;
            writable(b, region)
        },
    ),
    case(
        "SEND with invalidate of another queue pair's window",
        "9.4.1.1, 10.6.7.2, 9.9.3 (class J)",
        "SEND ONLY with invalidate of a window that was bound for another queue pair; then a WRITE through it over that one",
        NOT_INVALIDATED,
        |b| {
            let (mut owner, region, window) = windowed(b, REMOTE_WRITE)?;
            let c = b.connect(SETUP)?;
            not_invalidated(b, &c, region, window.rkey)?;
            b.say(&owner.request(Opcode::RC_WRITE_ONLY).reth(window.addr, window.rkey, 4).payload(b"open"))?;
            acked(b, &mut owner)?;
            b.expect_bytes(region, AT as i64, b"open")
        },
    )
    .remark("it closes the window, whoever's it is"),
    case(
        "Requester, SEND with invalidate",
        "9.4.1.1, 9.2",
        "the device posts SENDs with invalidate of R_Key 0x01020304, of one packet and of three",
        "SEND ONLY or LAST with invalidate, the key in its IETH; FIRST and MIDDLE as of any SEND",
        requester,
    ),
];

/// A connection, a region of 4096 zero bytes, and a window over part of it.
fn windowed(b: &mut Bench, access: u32) -> Seen<(Conn, Region, Window)> {
    let (c, region) = (b.connect(SETUP)?, b.region(4096, ALL | MW_BIND)?);
    let window = b.window(&c, region, AT, LEN, access)?;
    Ok((c, region, window))
}

/// The owner closes a window.
fn invalidate(b: &mut Bench, c: &Conn, window: Window) -> Seen {
    b.post(c, 5, Post { opcode: wr::LOCAL_INV, key: window.rkey, ..Post::default() })?;
    b.expect_completions(c, &[(5, status::SUCCESS)]).map(drop)
}

/// A SEND with invalidate from the next PSN on, acknowledged.
fn send_invalidate(b: &mut Bench, c: &mut Conn, bytes: &[u8], rkey: u32) -> Seen {
    let mut packets = segments(c, Send, bytes, c.setup.mtu as usize);
    let last = packets.pop().expect("a message has packets");
    let opcode = if packets.is_empty() { Opcode::RC_SEND_ONLY_INV } else { Opcode::RC_SEND_LAST_INV };
    packets.push(last.bth(|bth| bth.opcode = opcode).ieth(rkey));
    for packet in &packets {
        b.say(packet)?;
    }
    c.psn = add(c.psn, packets.len() as u32 - 1);
    acked(b, c)
}

/// The receive tells what was invalidated.
fn invalidating_receive(b: &mut Bench, c: &Conn, window: Window, len: u32) -> Seen {
    let wc = b.expect_completions(c, &[(1, status::SUCCESS)])?[0];
    let plain = wc.byte_len == len && wc.opcode == WC_RECV;
    must(plain, || format!("completes as {wc:?}"))?;
    must(wc.flags & WC_WITH_INV != 0, || "the receive completes without IBV_WC_WITH_INV".to_owned())?;
    must(wc.imm == window.rkey, || "the receive completes with another R_Key".to_owned())
}

/// A WRITE to where the window is draws a NAK, and nothing of the region changes.
fn refused(b: &mut Bench, c: &Conn, region: Region, window: Window, len: u32) -> Seen {
    let before = b.dut.get(region, 0, 4096)?;
    let write = c.request(Opcode::RC_WRITE_ONLY).reth(window.addr, window.rkey, len);
    b.say(&write.payload(&vec![0xee; len as usize]))?;
    b.expect_nak(c, c.psn, Syndrome::NAK_REMOTE_ACCESS)?;
    b.expect_state(c, ERR)?;
    b.expect_bytes(region, 0, &before)
}

/// A SEND with invalidate of what may not be invalidated. How the requester is told is not judged: of the specification's
/// editions not all have a NAK for it.
fn not_invalidated(b: &mut Bench, c: &Conn, region: Region, rkey: u32) -> Seen {
    b.recv(c, 1, region, 64)?;
    b.say(&c.request(Opcode::RC_SEND_ONLY_INV).ieth(rkey).payload(&pattern(4)))?;
    b.expect_state(c, ERR)?;
    let wcs = b.dut.wait(c.id, 1, b.patience)?;
    match wcs[..] {
        [wc] => must(wc.wr_id == 1 && ![status::SUCCESS, status::FLUSHED].contains(&wc.status), || {
            format!("the receive completes as {wc:?}")
        }),
        _ => departs("the receive does not complete"),
    }
}

/// A region is as good as before.
fn writable(b: &mut Bench, region: Region) -> Seen {
    let mut other = b.connect(SETUP)?;
    b.say(&other.request(Opcode::RC_WRITE_ONLY).reth(region.addr + 100, region.rkey, 4).payload(b"good"))?;
    acked(b, &mut other)?;
    b.expect_bytes(region, 100, b"good")
}

fn requester(b: &mut Bench) -> Seen {
    const KEY: u32 = 0x0102_0304;
    let (c, region) = (b.connect(SETUP)?, b.region(4096, ALL)?);
    let mut next = 0;
    for (id, len, opcodes) in [
        (1, 5, &[Opcode::RC_SEND_ONLY_INV][..]),
        (2, 2 * 1024 + 1, &[Opcode::RC_SEND_FIRST, Opcode::RC_SEND_MIDDLE, Opcode::RC_SEND_LAST_INV][..]),
    ] {
        let post = Post { opcode: wr::SEND_INV, region: region.id, len, key: KEY, ..Post::default() };
        b.post(&c, id, post)?;
        for (i, opcode) in opcodes.iter().enumerate() {
            let heard = b.expect_request(&c, c.sq(next))?;
            let ieth = (i + 1 == opcodes.len()).then_some(KEY);
            let good = heard.opcode() == *opcode && heard.headers.ieth == ieth;
            must(good, || format!("sent {heard}, not {opcode} with {ieth:?}"))?;
            next += 1;
        }
        b.say(&c.ack(c.sq(next - 1), id as u32))?;
        b.expect_completions(&c, &[(id, status::SUCCESS)]).map_err(|stop| match stop {
            Stop::Departs(what) => Stop::Departs(format!("{len} bytes: {what}")),
            trouble => trouble,
        })?;
    }
    Ok(())
}
