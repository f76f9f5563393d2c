//! Whose connection it is that a listener on 127.0.0.1 accepted: TCP has no credentials, but the kernel lists the user
//! of every socket.

use std::io;
use std::net::{SocketAddr, SocketAddrV4};

/// A client may have made its socket for both versions of IP, as gRPC does.
const TABLES: [&str; 2] = ["/proc/self/net/tcp6", "/proc/self/net/tcp"];
const ESTABLISHED: &str = "01";

/// Whether the client at `from` of the connection that was accepted at `to` is a process of this user, or of root.
pub fn is_ours(from: SocketAddr, to: SocketAddr) -> io::Result<bool> {
    let (SocketAddr::V4(from), SocketAddr::V4(to)) = (from, to) else { return Ok(false) };
    let mut owner = None;
    for table in TABLES {
        match std::fs::read_to_string(table) {
            Ok(table) => owner = owner.or_else(|| owner_in(&table, from, to)),
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound && table.ends_with('6') => {}
            Err(error) => return Err(error),
        }
    }
    // SAFETY: geteuid has no preconditions and always succeeds.
    let own = unsafe { libc::geteuid() };
    Ok(owner.is_some_and(|owner| owner == own || owner == 0))
}

/// The user of the open socket with these addresses. (That of a socket whose process has closed it is not known: the
/// table has 0 for it.)
fn owner_in(table: &str, from: SocketAddrV4, to: SocketAddrV4) -> Option<u32> {
    let (from, to) = (Written::of(from), Written::of(to));
    table.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let is_wanted = from.is(fields.next()?) && to.is(fields.next()?) && fields.next()? == ESTABLISHED;
        // Queues, timer, retransmissions, then the user.
        fields.nth(3).filter(|_| is_wanted)?.parse().ok()
    })
}

/// An address as the tables have it: each group of four bytes as a number of the machine.
struct Written {
    v4: String,
    v6: String,
}

impl Written {
    fn of(address: SocketAddrV4) -> Self {
        let hex = |bytes: &[u8]| {
            let groups = bytes.chunks_exact(4).filter_map(|group| group.first_chunk::<4>());
            groups.map(|group| format!("{:08X}", u32::from_ne_bytes(*group))).collect::<String>()
        };
        let (ip, port) = (address.ip(), address.port());
        Self {
            v4: format!("{}:{port:04X}", hex(&ip.octets())),
            v6: format!("{}:{port:04X}", hex(&ip.to_ipv6_mapped().octets())),
        }
    }

    fn is(&self, field: &str) -> bool {
        field == self.v4 || field == self.v6
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn the_own_client_is_found_while_it_is_open() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let client = TcpStream::connect(to).unwrap();
        let (_accepted, from) = listener.accept().unwrap();
        assert!(is_ours(from, to).unwrap());
        drop(client);
        assert!(!is_ours(from, to).unwrap(), "nobody's any more");
        let SocketAddr::V4(v4) = to else { unreachable!("an IPv4 address") };
        let mapped = SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port());
        let Ok(_client) = TcpStream::connect(mapped) else { return };
        let (_accepted, from) = listener.accept().unwrap();
        assert!(is_ours(from, to).unwrap());
    }

    #[test]
    fn the_user_is_the_one_of_the_clients_socket() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000     7        0 1 1 0 20 4 30 10 -1
   1: 0100007F:C350 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 2 1 0 20 4 30 10 -1
   2: 0100007F:C351 0100007F:1F90 06 00000000:00000000 03:00000000 00000000     0        0 0 3 0
   3: 0000000000000000FFFF00000100007F:C353 0000000000000000FFFF00000100007F:1F90 01 00000000:00000000 02:00000B0F 00000000    33        0 9 2 0 20 4 30 10 -1";
        let at = |port| SocketAddrV4::new([127, 0, 0, 1].into(), port);
        assert_eq!(owner_in(table, at(50000), at(8080)), Some(1000));
        assert_eq!(owner_in(table, at(8080), at(50000)), Some(7));
        assert_eq!(owner_in(table, at(50001), at(8080)), None, "it is closed");
        assert_eq!(owner_in(table, at(50003), at(8080)), Some(33), "its socket is for IPv6 as well");
        assert_eq!(owner_in(table, at(50002), at(8080)), None);
        assert_eq!(owner_in("", at(50000), at(8080)), None);
    }
}
