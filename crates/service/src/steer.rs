//! The program that steers packets to lanes.
//!
//! The kernel runs it for each packet of the port, with offset 0 at the UDP payload, and takes
//! its result as an index into the group of sockets. The base transport header has the
//! destination QP number in the low 24 bits of the word at offset 4; its upper 10 bits are the
//! lane. A packet too short for that goes to index 0 (a failed load ends the program with 0).

use crate::LANE_SHIFT;
use crate::sys::BpfInstruction;

const LOAD_WORD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const AND: u16 = 0x54; // BPF_ALU | BPF_AND | BPF_K
const SHIFT_RIGHT: u16 = 0x74; // BPF_ALU | BPF_RSH | BPF_K
const JUMP: u16 = 0x05; // BPF_JMP | BPF_JA
const JUMP_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const JUMP_ABOVE: u16 = 0x25; // BPF_JMP | BPF_JGT | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K

/// Builds the program for `(lane, index of its socket)` pairs, sorted by lane; every other lane
/// goes to index 0. A binary search: about 15 steps for 1,023 lanes.
pub(crate) fn program(lanes: &[(u16, u32)]) -> Vec<BpfInstruction> {
    assert!(lanes.is_sorted_by(|a, b| a.0 < b.0), "lanes are sorted and unique");
    let mut code = vec![
        instruction(LOAD_WORD, 0, 0, 4),
        instruction(AND, 0, 0, 0x00ff_ffff),
        instruction(SHIFT_RIGHT, 0, 0, LANE_SHIFT),
    ];
    search(lanes, &mut code);
    code
}

/// Lanes that are compared one after the other: fewer instructions than a branch for each.
const CHAIN: usize = 4;

fn search(lanes: &[(u16, u32)], code: &mut Vec<BpfInstruction>) {
    if lanes.len() <= CHAIN {
        for (lane, index) in lanes {
            code.push(instruction(JUMP_EQUAL, 0, 1, u32::from(*lane)));
            code.push(instruction(RETURN, 0, 0, *index));
        }
        code.push(instruction(RETURN, 0, 0, 0));
        return;
    }
    let (below, above) = lanes.split_at(lanes.len() / 2);
    let branch = code.len();
    code.push(instruction(JUMP_ABOVE, 0, 0, u32::from(below[below.len() - 1].0)));
    search(below, code);
    // The offset of a branch has 8 bits only; a longer way takes a jump of its own.
    let skipped = code.len() - branch - 1;
    if let Ok(near) = u8::try_from(skipped) {
        code[branch].jt = near;
    } else {
        code.insert(branch + 1, instruction(JUMP, 0, 0, skipped as u32));
        code[branch].jf = 1;
    }
    search(above, code);
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
    fn every_lane_finds_its_socket_and_strays_go_to_zero() {
        for count in [0usize, 1, 2, 3, 7, 64, 130, 700, 1023] {
            let step = 1023 / count.max(1);
            let lanes: Vec<(u16, u32)> = (0..count).map(|n| ((1 + n * step) as u16, 1 + (count - n) as u32)).collect();
            let code = program(&lanes);
            assert!(code.len() <= 4096, "{count} lanes: {} instructions", code.len());
            for lane in 0..=1023u16 {
                let expected = lanes.iter().find(|(l, _)| *l == lane).map_or(0, |(_, index)| *index);
                assert_eq!(run(&code, &packet(lane, 0)), expected, "{count} lanes, lane {lane}");
                assert_eq!(run(&code, &packet(lane, 0x3fff)), expected, "{count} lanes, lane {lane}");
            }
            assert_eq!(run(&code, &packet(5, 0)[..7]), 0);
        }
    }
}
