//! Translations between the kernel's structures and those of verbs, which old connection managers use.

use crate::abi::*;
use crate::entry::{Refusal, Void, verb};

/// An address vector of the kernel.
fn ah_attr(from: &ib_uverbs_ah_attr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: from.dgid },
            flow_label: from.flow_label,
            sgid_index: from.sgid_index,
            hop_limit: from.hop_limit,
            traffic_class: from.traffic_class,
        },
        dlid: from.dlid,
        sl: from.sl,
        src_path_bits: from.src_path_bits,
        static_rate: from.static_rate,
        is_global: from.is_global,
        port_num: from.port_num,
    }
}

/// Queue pair attributes of the kernel, which knows no rate limit in this form.
fn qp_attr(from: &ib_uverbs_qp_attr) -> ibv_qp_attr {
    ibv_qp_attr {
        qp_state: from.qp_state,
        cur_qp_state: from.cur_qp_state,
        path_mtu: from.path_mtu,
        path_mig_state: from.path_mig_state,
        qkey: from.qkey,
        rq_psn: from.rq_psn,
        sq_psn: from.sq_psn,
        dest_qp_num: from.dest_qp_num,
        qp_access_flags: from.qp_access_flags,
        cap: ibv_qp_cap {
            max_send_wr: from.max_send_wr,
            max_recv_wr: from.max_recv_wr,
            max_send_sge: from.max_send_sge,
            max_recv_sge: from.max_recv_sge,
            max_inline_data: from.max_inline_data,
        },
        ah_attr: ah_attr(&from.ah_attr),
        alt_ah_attr: ah_attr(&from.alt_ah_attr),
        pkey_index: from.pkey_index,
        alt_pkey_index: from.alt_pkey_index,
        en_sqd_async_notify: from.en_sqd_async_notify,
        sq_draining: from.sq_draining,
        max_rd_atomic: from.max_rd_atomic,
        max_dest_rd_atomic: from.max_dest_rd_atomic,
        min_rnr_timer: from.min_rnr_timer,
        port_num: from.port_num,
        timeout: from.timeout,
        retry_cnt: from.retry_cnt,
        rnr_retry: from.rnr_retry,
        alt_port_num: from.alt_port_num,
        alt_timeout: from.alt_timeout,
        rate_limit: 0,
    }
}

/// A path record of the kernel. Numbers that are big-endian on one side are so on the other.
fn path_rec(from: &ib_user_path_rec) -> ibv_sa_path_rec {
    ibv_sa_path_rec {
        dgid: ibv_gid { raw: from.dgid },
        sgid: ibv_gid { raw: from.sgid },
        dlid: from.dlid,
        slid: from.slid,
        raw_traffic: from.raw_traffic as i32,
        flow_label: from.flow_label,
        hop_limit: from.hop_limit,
        traffic_class: from.traffic_class,
        reversible: from.reversible as i32,
        numb_path: from.numb_path,
        pkey: from.pkey,
        sl: from.sl,
        mtu_selector: from.mtu_selector,
        mtu: from.mtu as u8,
        rate_selector: from.rate_selector,
        rate: from.rate,
        packet_life_time_selector: from.packet_life_time_selector,
        packet_life_time: from.packet_life_time,
        preference: from.preference,
    }
}

/// The way back.
fn path_rec_kern(from: &ibv_sa_path_rec) -> ib_user_path_rec {
    ib_user_path_rec {
        dgid: from.dgid.raw,
        sgid: from.sgid.raw,
        dlid: from.dlid,
        slid: from.slid,
        raw_traffic: from.raw_traffic as u32,
        flow_label: from.flow_label,
        reversible: from.reversible as u32,
        mtu: from.mtu.into(),
        pkey: from.pkey,
        hop_limit: from.hop_limit,
        traffic_class: from.traffic_class,
        numb_path: from.numb_path,
        sl: from.sl,
        mtu_selector: from.mtu_selector,
        rate_selector: from.rate_selector,
        rate: from.rate,
        packet_life_time_selector: from.packet_life_time_selector,
        packet_life_time: from.packet_life_time,
        preference: from.preference,
    }
}

/// Reads, translates, writes.
///
/// # Safety
///
/// The pointers are NULL or point to structures of the caller.
unsafe fn copy<T, U>(to: *mut U, from: *const T, translate: impl FnOnce(&T) -> U) -> crate::entry::Verb<()> {
    if to.is_null() || from.is_null() {
        return Err(Refusal::invalid("dst or src is NULL"));
    }
    // SAFETY: by the contract above, and not NULL.
    unsafe { to.write(translate(&*from)) };
    Ok(())
}

verb! {
    /// An address vector from its kernel form.
    fn ibv_copy_ah_attr_from_kern(dst: *mut ibv_ah_attr, src: *mut ib_uverbs_ah_attr) -> Void {
        // SAFETY: by the contract of the function.
        unsafe { copy(dst, src, ah_attr) }
    }

    /// Queue pair attributes from their kernel form.
    fn ibv_copy_qp_attr_from_kern(dst: *mut ibv_qp_attr, src: *mut ib_uverbs_qp_attr) -> Void {
        // SAFETY: by the contract of the function.
        unsafe { copy(dst, src, qp_attr) }
    }

    /// A path record from its kernel form.
    fn ibv_copy_path_rec_from_kern(dst: *mut ibv_sa_path_rec, src: *mut ib_user_path_rec) -> Void {
        // SAFETY: by the contract of the function.
        unsafe { copy(dst, src, path_rec) }
    }

    /// A path record to its kernel form.
    fn ibv_copy_path_rec_to_kern(dst: *mut ib_user_path_rec, src: *mut ibv_sa_path_rec) -> Void {
        // SAFETY: by the contract of the function.
        unsafe { copy(dst, src, path_rec_kern) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_records_survive_the_round_trip() {
        let mut bytes = [0u8; size_of::<ib_user_path_rec>()];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = at as u8 + 1;
        }
        // SAFETY: plain numbers without padding, of the same size.
        let mut kern: ib_user_path_rec = unsafe { std::mem::transmute(bytes) };
        // The verbs form has one byte for the MTU.
        kern.mtu = 5;
        let back = path_rec_kern(&path_rec(&kern));
        let bytes = |record: ib_user_path_rec| {
            // SAFETY: as above.
            unsafe { std::mem::transmute::<ib_user_path_rec, [u8; 64]>(record) }
        };
        assert_eq!(bytes(kern), bytes(back));
    }
}
