//! What the property tests share.

use ferroce_wire::{Aeth, AtomicEth, Bth, Deth, Ext, Feth, Headers, Opcode, Psn, Reth, Syndrome};
use proptest::prelude::*;

const U24: std::ops::Range<u32> = 0..1 << 24;

prop_compose! {
    /// Any BTH of version 0.
    pub(crate) fn bth()(
        opcode: u8,
        [solicited, mig_req, fecn, becn, ack_req]: [bool; 5],
        pad in 0..4u8,
        pkey: u16,
        resv6 in 0..64u8,
        dest_qp in U24,
        resv7 in 0..128u8,
        psn in U24,
    ) -> Bth {
        let (opcode, psn) = (Opcode(opcode), Psn::new(psn));
        Bth { opcode, solicited, mig_req, pad, tver: 0, pkey, fecn, becn, resv6, dest_qp, ack_req, resv7, psn }
    }
}

/// Any headers that match their opcode.
pub(crate) fn headers() -> impl Strategy<Value = Headers> {
    let numbers = any::<([u32; 6], [u64; 4], u8, u8)>();
    (bth(), numbers, U24, U24).prop_map(
        |(
            bth,
            ([srqn, qkey, feth, rkey, imm, ieth], [va, swap_add, compare, original], syndrome, resv8),
            src_qp,
            msn,
        )| {
            let ext = bth.opcode.layout().map_or(Ext::empty(), |layout| layout.ext);
            let has = |header| ext.contains(header);
            Headers {
                bth,
                xrc_srqn: has(Ext::XRCETH).then_some(srqn & 0xff_ffff),
                deth: has(Ext::DETH).then_some(Deth { qkey, src_qp }),
                feth: has(Ext::FETH).then_some(Feth(feth)),
                reth: has(Ext::RETH).then_some(Reth { va, rkey, len: imm }),
                atomic: has(Ext::ATOMIC_ETH).then_some(AtomicEth { va, rkey, swap_add, compare }),
                aeth: has(Ext::AETH).then_some(Aeth { syndrome: Syndrome(syndrome), msn }),
                atomic_ack: has(Ext::ATOMIC_ACK_ETH).then_some(original),
                imm: has(Ext::IMM_DT).then_some(imm),
                ieth: has(Ext::IETH).then_some(ieth),
                resv8: if has(Ext::DETH) || has(Ext::XRCETH) { resv8 } else { 0 },
            }
        },
    )
}
