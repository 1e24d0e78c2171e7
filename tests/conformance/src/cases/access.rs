//! Keys, bounds and rights.

use ferroce_wire::{Opcode, Syndrome};

use super::{Case, case};
use crate::bench::{
    ALL, Bench, Conn, ERR, LOCAL_WRITE, REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE, SETUP, Seen, Stop, pattern, status,
};
use crate::dut::{Region, Setup};
use crate::frame::Packet;

/// Operations that need a key.
const OPERATIONS: [Operation; 4] = [Operation::Write, Operation::Read, Operation::FetchAdd, Operation::CompareSwap];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Write,
    Read,
    FetchAdd,
    CompareSwap,
}

const REFUSED: &str = "NAK remote access error with its PSN; no byte is touched; the queue pair goes to ERR";

pub(super) const CASES: &[Case] = &[
    case(
        "Invalid R_Key",
        "9.7.4.1.5, 9.9.3",
        "WRITE, READ, FETCH ADD, COMPARE SWAP with the R_Key's last byte changed",
        REFUSED,
        |b| refused(b, &OPERATIONS, ALL, 0x5a, 0, 8),
    ),
    case("R_Key of another index", "9.7.4.1.5", "the same with a bit of the upper bytes changed", REFUSED, |b| {
        refused(b, &OPERATIONS, ALL, 0x0010_0000, 0, 8)
    }),
    case(
        "R_Key of another protection domain",
        "9.7.4.1.5, 10.2.3",
        "WRITE, READ, FETCH ADD, COMPARE SWAP to a region of another protection domain",
        REFUSED,
        |b| {
            for operation in OPERATIONS {
                let (c, region) = (b.connect(SETUP)?, b.foreign_region(4096)?);
                let packet = request(&c, operation, region.addr, region.rkey, 8);
                expect_refusal(b, &c, region, operation, packet)?;
            }
            Ok(())
        },
    ),
    case(
        "R_Key of a deregistered region",
        "9.7.4.1.5, 10.6.3",
        "the same to a region that was deregistered",
        REFUSED,
        |b| {
            for operation in OPERATIONS {
                let (c, region) = (b.connect(SETUP)?, b.region(4096, ALL)?);
                b.dut.deregister(region)?;
                let packet = request(&c, operation, region.addr, region.rkey, 8);
                expect_refusal(b, &c, region, operation, packet)?;
            }
            Ok(())
        },
    ),
    case(
        "Bounds, one byte behind the end",
        "9.7.4.1.5",
        "WRITE and READ of 8 bytes that end one behind the region",
        REFUSED,
        |b| refused(b, &[Operation::Write, Operation::Read], ALL, 0, 4096 - 7, 8),
    ),
    case(
        "Bounds, before the start",
        "9.7.4.1.5",
        "WRITE and READ of 8 bytes that begin one before the region",
        REFUSED,
        |b| refused(b, &[Operation::Write, Operation::Read], ALL, 0, -1, 8),
    ),
    case(
        "Bounds, atomics",
        "9.7.4.1.5",
        "FETCH ADD and COMPARE SWAP directly behind and before the region",
        REFUSED,
        |b| {
            let atomics = [Operation::FetchAdd, Operation::CompareSwap];
            refused(b, &atomics, ALL, 0, 4096, 8)?;
            refused(b, &atomics, ALL, 0, -8, 8)
        },
    ),
    case("Bounds, address wraps around", "9.7.4.1.5", "WRITE and READ of 8 bytes at address 2^64 - 4", REFUSED, |b| {
        for operation in [Operation::Write, Operation::Read] {
            let (c, region) = (b.connect(SETUP)?, b.region(4096, ALL)?);
            let packet = request(&c, operation, u64::MAX - 3, region.rkey, 8);
            expect_refusal(b, &c, region, operation, packet)?;
        }
        Ok(())
    }),
    case(
        "Bounds, second packet of a WRITE",
        "9.7.4.1.5",
        "WRITE FIRST and LAST whose last byte is behind the region",
        "NAK remote access error, of the FIRST or of the LAST; no byte behind the region is touched",
        |b| {
            let (c, region) = (b.connect(SETUP)?, b.region(1025, ALL)?);
            b.say(
                &c.request(Opcode::RC_WRITE_FIRST)
                    .reth(region.addr, region.rkey, 1026)
                    .payload(&pattern(1024))
                    .ack_req(false),
            )?;
            b.say(&c.request(Opcode::RC_WRITE_LAST).psn(crate::bench::add(c.psn, 1)).payload(&pattern(2)))?;
            let heard = b.hear(&c)?;
            let good = heard.headers.aeth.is_some_and(|aeth| aeth.syndrome == Syndrome::NAK_REMOTE_ACCESS);
            crate::bench::must(good, || format!("answered {heard}"))?;
            b.expect_state(&c, ERR)?;
            b.expect_bytes(region, 1025, &[0; 8])
        },
    ),
    case("Region without REMOTE_WRITE", "9.7.4.1.5", "a WRITE to it", REFUSED, |b| {
        refused(b, &[Operation::Write], LOCAL_WRITE | REMOTE_READ | REMOTE_ATOMIC, 0, 0, 8)
    }),
    case("Region without REMOTE_READ", "9.7.4.1.5", "a READ from it", REFUSED, |b| {
        refused(b, &[Operation::Read], LOCAL_WRITE | REMOTE_WRITE | REMOTE_ATOMIC, 0, 0, 8)
    }),
    case("Region without REMOTE_ATOMIC", "9.7.4.1.5", "FETCH ADD and COMPARE SWAP to it", REFUSED, |b| {
        let atomics = [Operation::FetchAdd, Operation::CompareSwap];
        refused(b, &atomics, LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ, 0, 0, 8)
    }),
    case(
        "Queue pair without the right",
        "9.7.4.1.4, 9.9.3",
        "the region allows all; the queue pair has no REMOTE_WRITE, READ, ATOMIC: WRITE, READ, FETCH ADD, COMPARE SWAP",
        "NAK invalid request: the operation is not one that this queue pair supports",
        |b| {
            for (operation, right) in [
                (Operation::Write, REMOTE_WRITE),
                (Operation::Read, REMOTE_READ),
                (Operation::FetchAdd, REMOTE_ATOMIC),
                (Operation::CompareSwap, REMOTE_ATOMIC),
            ] {
                let c = b.connect(Setup { access: ALL & !right, ..SETUP })?;
                let region = b.region(4096, ALL)?;
                b.say(&request(&c, operation, region.addr, region.rkey, 8))?;
                b.expect_nak(&c, c.psn, Syndrome::NAK_INVALID_REQUEST).map_err(|stop| named(stop, operation))?;
                b.expect_state(&c, ERR)?;
                b.expect_bytes(region, 0, &[0; 8])?;
            }
            Ok(())
        },
    ),
    case(
        "WRITE with immediate, invalid R_Key",
        "9.9.3 (class C), 9.4.3",
        "WRITE ONLY with immediate with the R_Key's last byte changed, two receives posted",
        "NAK remote access error; no byte is touched; the error is told by the completion of the receive that the immediate \
         needed; the other is flushed",
        |b| {
            let (c, region) = (b.connect(SETUP)?, b.region(64, ALL)?);
            for wr_id in [8, 9] {
                b.recv(&c, wr_id, region, 0)?;
            }
            let write = c.request(Opcode::RC_WRITE_ONLY_IMM).imm(1).reth(region.addr, region.rkey ^ 0x5a, 8);
            b.say(&write.payload(&pattern(8)))?;
            b.expect_nak(&c, c.psn, Syndrome::NAK_REMOTE_ACCESS)?;
            b.expect_state(&c, ERR)?;
            b.expect_completions(&c, &[(8, status::REM_ACCESS), (9, status::FLUSHED)])?;
            b.expect_bytes(region, 0, &[0; 8])
        },
    ),
    case(
        "WRITE with immediate, invalid R_Key in the first of two packets",
        "9.9.3 (class C), 9.4.3",
        "WRITE FIRST with the R_Key's last byte changed, a receive posted",
        "NAK remote access error; no receive is needed yet: it is flushed",
        |b| {
            let (c, region) = (b.connect(SETUP)?, b.region(4096, ALL)?);
            b.recv(&c, 8, region, 0)?;
            let write = c.request(Opcode::RC_WRITE_FIRST).reth(region.addr, region.rkey ^ 0x5a, 1028);
            b.say(&write.payload(&pattern(1024)))?;
            b.expect_nak(&c, c.psn, Syndrome::NAK_REMOTE_ACCESS)?;
            b.expect_state(&c, ERR)?;
            b.expect_completions(&c, &[(8, status::FLUSHED)]).map(drop)
        },
    ),
    case(
        "What is behind a fatal NAK",
        "9.9.3, 10.3.1",
        "a WRITE with an invalid R_Key, then good WRITEs; a receive is posted",
        "one NAK; the receive is flushed; a good request draws no answer",
        |b| {
            let (c, region) = (b.connect(SETUP)?, b.region(64, ALL)?);
            b.recv(&c, 9, region, 64)?;
            b.say(&request(&c, Operation::Write, region.addr, region.rkey ^ 0x5a, 8))?;
            b.expect_nak(&c, c.psn, Syndrome::NAK_REMOTE_ACCESS)?;
            b.expect_state(&c, ERR)?;
            let next = crate::bench::add(c.psn, 1);
            b.say(&request(&c, Operation::Write, region.addr, region.rkey, 8).psn(next))?;
            b.say(&request(&c, Operation::Write, region.addr, region.rkey, 8))?;
            b.expect_completions(&c, &[(9, status::FLUSHED)])?;
            b.expect_bytes(region, 0, &[0; 8])?;
            let answers = b.drain(&c)?;
            crate::bench::must(answers.is_empty(), || format!("answered {}", answers[0]))
        },
    ),
];

fn named(stop: Stop, operation: Operation) -> Stop {
    match stop {
        Stop::Departs(what) => Stop::Departs(format!("{operation:?}: {what}")),
        trouble => trouble,
    }
}

fn request(c: &Conn, operation: Operation, va: u64, rkey: u32, len: u32) -> Packet {
    match operation {
        Operation::Write => c.request(Opcode::RC_WRITE_ONLY).reth(va, rkey, len).payload(&pattern(len as usize)),
        Operation::Read => c.request(Opcode::RC_READ_REQUEST).reth(va, rkey, len),
        Operation::FetchAdd => c.request(Opcode::RC_FETCH_ADD).atomic(va, rkey, 1, 0),
        Operation::CompareSwap => c.request(Opcode::RC_COMPARE_SWAP).atomic(va, rkey, 1, 0),
    }
}

/// Each operation, on a region of 4096 zero bytes with `rights`, is refused with a remote access error.
fn refused(b: &mut Bench, operations: &[Operation], rights: u32, key: u32, offset: i64, len: u32) -> Seen {
    for &operation in operations {
        let (c, region) = (b.connect(SETUP)?, b.region(4096, rights)?);
        let va = region.addr.wrapping_add_signed(offset);
        let packet = request(&c, operation, va, region.rkey ^ key, len);
        expect_refusal(b, &c, region, operation, packet)?;
    }
    Ok(())
}

fn expect_refusal(b: &mut Bench, c: &Conn, region: Region, operation: Operation, packet: Packet) -> Seen {
    b.say(&packet)?;
    let mut check = || {
        b.expect_nak(c, c.psn, Syndrome::NAK_REMOTE_ACCESS)?;
        b.expect_state(c, ERR)?;
        b.expect_bytes(region, -16, &[0; 4096 + 32])
    };
    check().map_err(|stop| named(stop, operation))
}
