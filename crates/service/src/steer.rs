//! The program that steers packets to lanes.
//!
//! The kernel runs it for each packet of the port, with offset 0 at the UDP payload, and takes
//! its result as an index into the group of sockets. The base transport header has the
//! destination QP number in the low 24 bits of the word at offset 4; its upper 10 bits are the
//! lane. What is too short for that, or for a lane that nobody has, goes to the service's own socket.

use ferroce_wire::LANE_SHIFT;

use crate::probe::{MARK_BYTES, TAG_BYTES};
use crate::sys::BpfInstruction;

const LOAD_LENGTH: u16 = 0x80; // BPF_LD | BPF_W | BPF_LEN
const LOAD_WORD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const AND: u16 = 0x54; // BPF_ALU | BPF_AND | BPF_K
const SHIFT_RIGHT: u16 = 0x74; // BPF_ALU | BPF_RSH | BPF_K
const JUMP: u16 = 0x05; // BPF_JMP | BPF_JA
const JUMP_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const JUMP_ABOVE: u16 = 0x25; // BPF_JMP | BPF_JGT | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K

/// Builds the program for `(lane, index of its socket)` pairs, sorted by lane; every other lane
/// goes to the index `own`. A binary search: about 15 steps for 1,023 lanes.
pub(crate) fn program(lanes: &[(u16, u32)], own: u32) -> Vec<BpfInstruction> {
    assert!(lanes.is_sorted_by(|a, b| a.0 < b.0), "lanes are sorted and unique");
    let mut code = vec![
        // A load behind the end would end the program with 0.
        instruction(LOAD_LENGTH, 0, 0, 0),
        instruction(JUMP_ABOVE, 1, 0, 7),
        instruction(RETURN, 0, 0, own),
        instruction(LOAD_WORD, 0, 0, 4),
        instruction(AND, 0, 0, 0x00ff_ffff),
        instruction(SHIFT_RIGHT, 0, 0, LANE_SHIFT),
    ];
    search(lanes, own, &mut code);
    code
}

/// The program that gives every packet to one index.
pub(crate) fn constant(index: u32) -> [BpfInstruction; 1] {
    [instruction(RETURN, 0, 0, index)]
}

/// A socket's filter that drops the probes that begin with `tag` and takes all other UDP datagrams whole.
pub(crate) fn drop_marked(tag: [u8; TAG_BYTES]) -> [BpfInstruction; 9] {
    /// The UDP header is there, too.
    const PAYLOAD: u32 = 8;
    let [a, b, c, d, last] = tag;
    [
        instruction(LOAD_LENGTH, 0, 0, 0),
        instruction(JUMP_EQUAL, 0, 6, PAYLOAD + MARK_BYTES as u32),
        instruction(LOAD_WORD, 0, 0, PAYLOAD),
        instruction(JUMP_EQUAL, 0, 4, u32::from_be_bytes([a, b, c, d])),
        instruction(LOAD_WORD, 0, 0, PAYLOAD + 4),
        instruction(AND, 0, 0, 0xff00_0000),
        instruction(JUMP_EQUAL, 0, 1, u32::from_be_bytes([last, 0, 0, 0])),
        instruction(RETURN, 0, 0, 0),
        instruction(RETURN, 0, 0, u32::MAX),
    ]
}

/// Lanes that are compared one after the other: fewer instructions than a branch for each.
const CHAIN: usize = 4;

fn search(lanes: &[(u16, u32)], own: u32, code: &mut Vec<BpfInstruction>) {
    if lanes.len() <= CHAIN {
        for (lane, index) in lanes {
            code.push(instruction(JUMP_EQUAL, 0, 1, u32::from(*lane)));
            code.push(instruction(RETURN, 0, 0, *index));
        }
        code.push(instruction(RETURN, 0, 0, own));
        return;
    }
    let (below, above) = lanes.split_at(lanes.len() / 2);
    let branch = code.len();
    code.push(instruction(JUMP_ABOVE, 0, 0, u32::from(below[below.len() - 1].0)));
    search(below, own, code);
    // The offset of a branch has 8 bits only; a longer way takes a jump of its own.
    let skipped = code.len() - branch - 1;
    if let Ok(near) = u8::try_from(skipped) {
        code[branch].jt = near;
    } else {
        code.insert(branch + 1, instruction(JUMP, 0, 0, skipped as u32));
        code[branch].jf = 1;
    }
    search(above, own, code);
}

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> BpfInstruction {
    BpfInstruction { code, jt, jf, k }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel does with the program.
    fn run(code: &[BpfInstruction], packet: &[u8]) -> u32 {
        let mut a = 0u32;
        let mut at = 0;
        for _ in 0..code.len() {
            let BpfInstruction { code: op, jt, jf, k } = code[at];
            at += 1;
            match op {
                LOAD_LENGTH => a = packet.len() as u32,
                LOAD_WORD => match packet.get(k as usize..k as usize + 4) {
                    Some(word) => a = u32::from_be_bytes(word.try_into().unwrap()),
                    None => return 0,
                },
                AND => a &= k,
                SHIFT_RIGHT => a >>= k,
                JUMP => at += k as usize,
                JUMP_EQUAL => at += usize::from(if a == k { jt } else { jf }),
                JUMP_ABOVE => at += usize::from(if a > k { jt } else { jf }),
                RETURN => return k,
                _ => panic!("unknown instruction {op:#x}"),
            }
        }
        panic!("the program does not end");
    }

    fn packet(lane: u16, low: u32) -> [u8; 12] {
        let mut bytes = [0xa5; 12];
        let qpn = u32::from(lane) << LANE_SHIFT | low;
        bytes[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
        bytes
    }

    #[test]
    fn the_filter_drops_what_is_marked_and_nothing_else() {
        let filter = drop_marked(*b"12345");
        for (payload, taken) in [
            ("12345678", 0),
            ("12345xyz", 0),
            ("12345678 and more", u32::MAX),
            ("12345", u32::MAX),
            ("12346678", u32::MAX),
            ("x2345678", u32::MAX),
            ("", u32::MAX),
        ] {
            assert_eq!(run(&filter, &[&[0; 8], payload.as_bytes()].concat()), taken, "{payload}");
        }
    }

    #[test]
    fn every_lane_finds_its_socket_and_strays_go_to_zero() {
        for count in [0usize, 1, 2, 3, 7, 64, 130, 700, 1023] {
            let step = 1023 / count.max(1);
            let lanes: Vec<(u16, u32)> = (0..count).map(|n| ((1 + n * step) as u16, 1 + (count - n) as u32)).collect();
            let code = program(&lanes, 3000);
            assert!(code.len() <= 4096, "{count} lanes: {} instructions", code.len());
            for lane in 0..=1023u16 {
                let expected = lanes.iter().find(|(l, _)| *l == lane).map_or(3000, |(_, index)| *index);
                assert_eq!(run(&code, &packet(lane, 0)), expected, "{count} lanes, lane {lane}");
                assert_eq!(run(&code, &packet(lane, 0x3fff)), expected, "{count} lanes, lane {lane}");
            }
            for len in 0..8 {
                assert_eq!(run(&code, &packet(1, 0)[..len]), 3000);
            }
        }
    }
}
