//! The ICRC up to the BTH, remembered for the packet length that comes up again and again.

use std::sync::LazyLock;

use ferroce_wire::icrc::Pseudo;

/// What Identifications up to a batch's length change in the sum up to the BTH; the same for every IPv4 path.
static IDENTIFICATIONS: LazyLock<[u32; 128]> = LazyLock::new(|| {
    let any = Pseudo::new([0; 4].into(), [0; 4].into(), 0);
    std::array::from_fn(|identification| any.state(0, identification as u16) ^ any.state(0, 0))
});

/// Makes the table now.
pub(super) fn prepare() {
    LazyLock::force(&IDENTIFICATIONS);
}

/// The sum of one path.
pub(super) struct PathSum {
    pseudo: Pseudo,
    v4: bool,
    len: u16,
    sum: u32,
}

impl PathSum {
    pub(super) fn new(pseudo: Pseudo, v4: bool) -> PathSum {
        PathSum { pseudo, v4, len: 0, sum: pseudo.state(0, 0) }
    }

    /// [`Pseudo::state`].
    pub(super) fn state(&mut self, udp_len: u16, identification: u16) -> u32 {
        if udp_len != self.len {
            self.len = udp_len;
            self.sum = self.pseudo.state(udp_len, 0);
        }
        match IDENTIFICATIONS.get(usize::from(identification)) {
            _ if !self.v4 => self.sum,
            Some(change) => self.sum ^ change,
            None => self.pseudo.state(udp_len, identification),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_wire_crate() {
        for (src, dst) in [("10.1.2.3", "192.168.7.9"), ("fe80::1", "2001:db8::2")] {
            let (src, dst): (std::net::IpAddr, std::net::IpAddr) = (src.parse().unwrap(), dst.parse().unwrap());
            let pseudo = Pseudo::new(src, dst, 49_152);
            let mut sum = PathSum::new(pseudo, src.is_ipv4());
            for len in [16, 4112, 4112, 0, u16::MAX, 16] {
                for identification in [0, 1, 127, 128, 129, 0xfffe, 0xffff] {
                    assert_eq!(sum.state(len, identification), pseudo.state(len, identification));
                }
            }
        }
    }
}
