//! Port spaces: which id has which address and port. They have nothing to do with the ports of TCP and UDP sockets.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use ferroce_wire::mad::PortSpace;
use rand::Rng;

use crate::{BindOptions, CmError, CmId};

/// Ports for those who ask for none (Linux's `ip_local_port_range`).
const EPHEMERAL: std::ops::RangeInclusive<u16> = 32_768..=60_999;

#[derive(Debug, Default)]
pub(crate) struct Ports {
    bound: BTreeMap<(PortSpace, u16), Vec<Binding>>,
}

#[derive(Debug)]
struct Binding {
    id: CmId,
    ip: IpAddr,
    options: BindOptions,
    listens: bool,
}

impl Ports {
    /// Takes an address; port 0 stands for any free one. Gives the port.
    pub(crate) fn bind(
        &mut self,
        space: PortSpace,
        addr: SocketAddr,
        id: CmId,
        options: BindOptions,
        rng: &mut impl Rng,
    ) -> Result<u16, CmError> {
        let ip = addr.ip().to_canonical();
        let port = match addr.port() {
            0 => self.free_port(space, ip, rng)?,
            port => port,
        };
        let binding = Binding { id, ip, options, listens: false };
        let others = self.bound.entry((space, port)).or_default();
        let collision = others.iter().find_map(|other| collision(&binding, other, SocketAddr::new(ip, port)));
        match collision {
            None => others.push(binding),
            Some(error) => {
                self.drop_if_empty(space, port);
                return Err(error);
            }
        }
        Ok(port)
    }

    fn free_port(&self, space: PortSpace, ip: IpAddr, rng: &mut impl Rng) -> Result<u16, CmError> {
        let start = rng.random_range(EPHEMERAL);
        let candidates = (start..=*EPHEMERAL.end()).chain(*EPHEMERAL.start()..start);
        let free = |port: &u16| {
            let others = self.bound.get(&(space, *port)).into_iter().flatten();
            others.into_iter().all(|other| other.ip != ip && !other.ip.is_unspecified() && !ip.is_unspecified())
        };
        candidates.into_iter().find(free).ok_or(CmError::NoPort)
    }

    /// The id listens from now on: nobody may share its address.
    pub(crate) fn listen(&mut self, space: PortSpace, port: u16, id: CmId) -> Result<(), CmError> {
        let bindings = self.bound.get_mut(&(space, port)).expect("a bound id has a binding");
        let at = bindings.iter().position(|binding| binding.id == id).expect("a bound id has a binding");
        let mine = Binding { listens: true, ..Binding { id, ip: bindings[at].ip, ..bindings[at] } };
        let others = bindings.iter().filter(|other| other.id != id);
        if let Some(error) = others.filter_map(|other| collision(&mine, other, SocketAddr::new(mine.ip, port))).next() {
            return Err(error);
        }
        bindings[at].listens = true;
        Ok(())
    }

    /// Gives the address back.
    pub(crate) fn release(&mut self, space: PortSpace, port: u16, id: CmId) {
        let bindings = self.bound.get_mut(&(space, port)).expect("a bound id has a binding");
        bindings.retain(|binding| binding.id != id);
        self.drop_if_empty(space, port);
    }

    fn drop_if_empty(&mut self, space: PortSpace, port: u16) {
        if self.bound.get(&(space, port)).is_some_and(Vec::is_empty) {
            self.bound.remove(&(space, port));
        }
    }

    /// Who listens there: at the very address, or else at the wildcard of its family, or else at that of IPv6.
    pub(crate) fn listener(&self, space: PortSpace, port: u16, ip: IpAddr) -> Option<CmId> {
        let listeners = || self.bound.get(&(space, port)).into_iter().flatten().filter(|binding| binding.listens);
        listeners()
            .find(|binding| binding.ip == ip)
            .or_else(|| listeners().find(|b| b.ip.is_unspecified() && b.ip.is_ipv4() == ip.is_ipv4()))
            .or_else(|| listeners().find(|b| b.ip.is_unspecified() && b.ip.is_ipv6() && !b.options.v6_only))
            .map(|binding| binding.id)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bound.is_empty()
    }
}

/// Why two ids cannot have the same port (`cma_check_port` of the kernel says the same).
fn collision(mine: &Binding, other: &Binding, addr: SocketAddr) -> Option<CmError> {
    let shared = mine.options.reuse && other.options.reuse && !mine.listens && !other.listens;
    let v6_only = |binding: &Binding| binding.ip.is_ipv4() || binding.options.v6_only;
    let apart = mine.ip.is_ipv4() != other.ip.is_ipv4() && v6_only(mine) && v6_only(other);
    if shared || apart {
        None
    } else if mine.ip.is_unspecified() || other.ip.is_unspecified() {
        // Also when both are: the kernel looks at wildcards first.
        Some(CmError::AddressNotAvailable(addr))
    } else if mine.ip == other.ip {
        Some(CmError::AddressInUse(addr))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    const TCP: PortSpace = PortSpace::Tcp;

    struct Bench(Ports, StdRng);

    impl Bench {
        fn new() -> Bench {
            Bench(Ports::default(), StdRng::seed_from_u64(1))
        }

        fn bind(&mut self, id: u64, addr: &str, options: BindOptions) -> Result<u16, CmError> {
            self.0.bind(TCP, addr.parse().unwrap(), CmId(id), options, &mut self.1)
        }
    }

    const PLAIN: BindOptions = BindOptions { reuse: false, v6_only: false };
    const REUSE: BindOptions = BindOptions { reuse: true, v6_only: false };
    const V6_ONLY: BindOptions = BindOptions { reuse: false, v6_only: true };

    #[test]
    fn one_address_one_id() {
        let mut ports = Bench::new();
        assert_eq!(ports.bind(1, "10.0.0.1:7", PLAIN), Ok(7));
        assert_eq!(
            ports.bind(2, "10.0.0.1:7", PLAIN),
            Err(CmError::AddressInUse(SocketAddr::from(([10, 0, 0, 1], 7))))
        );
        assert_eq!(ports.bind(2, "10.0.0.2:7", PLAIN), Ok(7));
        assert!(matches!(ports.bind(3, "0.0.0.0:7", PLAIN), Err(CmError::AddressNotAvailable(_))));
        assert!(matches!(ports.bind(3, "[::ffff:10.0.0.1]:7", PLAIN), Err(CmError::AddressInUse(_))));
        // Another space has its own ports.
        let udp = PortSpace::Udp;
        assert_eq!(ports.0.bind(udp, "10.0.0.1:7".parse().unwrap(), CmId(4), PLAIN, &mut ports.1), Ok(7));
        ports.0.release(TCP, 7, CmId(1));
        ports.0.release(TCP, 7, CmId(2));
        assert_eq!(ports.bind(3, "0.0.0.0:7", PLAIN), Ok(7));
        assert!(matches!(ports.bind(5, "0.0.0.0:7", PLAIN), Err(CmError::AddressNotAvailable(_))));
        ports.0.release(TCP, 7, CmId(3));
        ports.0.release(udp, 7, CmId(4));
        assert!(ports.0.is_empty());
    }

    #[test]
    fn reuse_until_one_listens() {
        let mut ports = Bench::new();
        assert_eq!(ports.bind(1, "10.0.0.1:7", REUSE), Ok(7));
        assert_eq!(ports.bind(2, "10.0.0.1:7", REUSE), Ok(7));
        assert!(matches!(ports.0.listen(TCP, 7, CmId(1)), Err(CmError::AddressInUse(_))));
        ports.0.release(TCP, 7, CmId(2));
        assert_eq!(ports.0.listen(TCP, 7, CmId(1)), Ok(()));
        assert!(matches!(ports.bind(2, "10.0.0.1:7", REUSE), Err(CmError::AddressInUse(_))));
    }

    #[test]
    fn families() {
        let mut ports = Bench::new();
        assert_eq!(ports.bind(1, "[::]:7", V6_ONLY), Ok(7));
        assert_eq!(ports.bind(2, "0.0.0.0:7", PLAIN), Ok(7));
        assert_eq!(ports.bind(3, "[::]:8", PLAIN), Ok(8));
        assert!(matches!(ports.bind(4, "0.0.0.0:8", PLAIN), Err(CmError::AddressNotAvailable(_))));
        for (port, id) in [(7, 1), (7, 2), (8, 3)] {
            ports.0.listen(TCP, port, CmId(id)).unwrap();
        }
        let v4 = "10.0.0.1".parse().unwrap();
        assert_eq!(ports.0.listener(TCP, 7, v4), Some(CmId(2)));
        assert_eq!(ports.0.listener(TCP, 7, "fd00::1".parse().unwrap()), Some(CmId(1)));
        assert_eq!(ports.0.listener(TCP, 8, v4), Some(CmId(3)));
        assert_eq!(ports.0.listener(TCP, 9, v4), None);
        assert_eq!(ports.0.listener(PortSpace::Ib, 7, v4), None);
    }

    #[test]
    fn the_very_address_wins() {
        let mut ports = Bench::new();
        ports.bind(1, "10.0.0.1:7", PLAIN).unwrap();
        ports.bind(2, "10.0.0.2:7", PLAIN).unwrap();
        assert_eq!(ports.0.listener(TCP, 7, "10.0.0.1".parse().unwrap()), None, "bound is not listening");
        ports.0.listen(TCP, 7, CmId(1)).unwrap();
        assert_eq!(ports.0.listener(TCP, 7, "10.0.0.1".parse().unwrap()), Some(CmId(1)));
        assert_eq!(ports.0.listener(TCP, 7, "10.0.0.2".parse().unwrap()), None);
    }

    #[test]
    fn ephemeral_ports_run_out_and_no_sooner() {
        let mut ports = Bench::new();
        let all = EPHEMERAL.count() as u64;
        let mut seen = std::collections::BTreeSet::new();
        for id in 0..all {
            seen.insert(ports.bind(id, "10.0.0.1:0", PLAIN).unwrap());
        }
        assert_eq!(seen.len() as u64, all);
        assert_eq!(ports.bind(all, "10.0.0.1:0", PLAIN), Err(CmError::NoPort));
        assert!(ports.bind(all, "10.0.0.2:0", PLAIN).is_ok());
    }
}
