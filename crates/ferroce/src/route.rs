//! Is there a way to a peer? The kernel is asked when a path is made, so that an address that leads nowhere is refused at once instead of
//! after all retries.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use ferroce_service::cm::route::bound_socket;
use ferroce_transport::PathAddr;
use ferroce_wire::UDP_PORT;

use crate::error::{Error, Result};

/// What the kernel says of a destination without a usable route: none, none to the host, forbidden, a black hole.
const NO_WAY: [i32; 4] = [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EACCES, libc::EINVAL];

/// Checks that packets from `path.src` to `path.dst` can leave. `ifindex` is the device's interface.
///
/// # Errors
/// What connect(2) of a UDP socket says: ENETUNREACH, EHOSTUNREACH, EACCES (`ip route add prohibit`), EINVAL (`blackhole`).
pub(crate) fn check(path: &PathAddr, ifindex: u32) -> Result<()> {
    let attempt = bound_socket(address(path.src, 0, ifindex)).map(|socket| {
        // Nothing is sent by that.
        socket.connect(address(path.dst, UDP_PORT, ifindex))
    });
    let error = match attempt {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => error,
        // No descriptor to be had, or the address is just going: that is said where it matters.
        Err(error) => {
            log::debug!("the route from {} to {} was not checked: {error}", path.src, path.dst);
            return Ok(());
        }
    };
    match error.raw_os_error().filter(|errno| NO_WAY.contains(errno)) {
        Some(errno) => Err(no_route(path, errno)),
        None => Ok(()),
    }
}

fn no_route(path: &PathAddr, errno: i32) -> Error {
    let (src, dst) = (path.src, path.dst);
    let why = io::Error::from_raw_os_error(errno);
    Error::new(
        errno,
        format!(
            "no route from {src} to {dst}: {why}; check the peer's address (its GID) and `ip route get {dst} from {src}`"
        ),
    )
}

/// Link-local addresses mean something only together with an interface.
fn address(ip: IpAddr, port: u16, ifindex: u32) -> SocketAddr {
    match ip {
        IpAddr::V6(v6) if v6.is_unicast_link_local() || v6.is_multicast() => {
            SocketAddrV6::new(v6, port, 0, ifindex).into()
        }
        ip => SocketAddr::new(ip, port),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(src: &str, dst: &str) -> PathAddr {
        let ip = |text: &str| text.parse().expect("an address");
        PathAddr { src: ip(src), dst: ip(dst), ifindex: 0, tclass: 0, hop_limit: 64, flow_label: 0 }
    }

    #[test]
    fn loopback_reaches_itself_and_nothing_outside() {
        check(&path("127.0.0.1", "127.0.0.1"), 1).expect("loopback");
        // An address of the loopback network cannot be the source of what leaves it.
        let error = check(&path("127.0.0.1", "203.0.113.9"), 1).expect_err("there is no such way");
        assert!(NO_WAY.contains(&error.errno()), "{error}");
        assert!(error.to_string().contains("203.0.113.9"), "{error}");
    }

    #[test]
    fn a_source_that_is_not_here_is_left_to_others() {
        check(&path("203.0.113.1", "203.0.113.9"), 1).expect("not checked");
    }
}
