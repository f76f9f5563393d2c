//! The format between two queue pairs: datagrams with a fixed head.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

pub const HEAD: usize = 48;
/// Payload bytes per datagram.
pub const PIECE: usize = 60 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Send = 1,
    Ack = 2,
    /// `status`: the result of the requester's work request.
    Nak = 3,
    /// No buffer posted.
    NotReady = 4,
    /// The queue pair does not receive (yet), or the numbers do not match.
    Closed = 5,
    Read = 6,
    Data = 7,
}

#[derive(Clone, Copy, Debug)]
pub struct Head {
    pub kind: Kind,
    pub from: u32,
    pub psn: u32,
    pub status: u32,
    /// SEND and DATA: offset of this piece. READ: the address.
    pub offset: u64,
    pub total: u64,
    pub rkey: u32,
    /// Counts attempts, to recognise late responses to an earlier one.
    pub attempt: u32,
}

impl Head {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD);
        for word in [self.kind as u32, self.from, self.psn, self.status, self.rkey, self.attempt] {
            out.extend(word.to_le_bytes());
        }
        out.extend(self.offset.to_le_bytes());
        out.extend(self.total.to_le_bytes());
        out.resize(HEAD, 0);
        out
    }

    pub fn decode(bytes: &[u8]) -> Option<Head> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let double = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let kind = match word(0)? {
            1 => Kind::Send,
            2 => Kind::Ack,
            3 => Kind::Nak,
            4 => Kind::NotReady,
            5 => Kind::Closed,
            6 => Kind::Read,
            7 => Kind::Data,
            _ => return None,
        };
        Some(Head {
            kind,
            from: word(4)?,
            psn: word(8)?,
            status: word(12)?,
            rkey: word(16)?,
            attempt: word(20)?,
            offset: double(24)?,
            total: double(32)?,
        })
    }
}

/// The address at which the queue pair with this number receives.
pub fn address(gid: &[u8; 16], number: u32) -> SocketAddr {
    let uid = unsafe { libc::geteuid() };
    let gid: String = gid.iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddr::from_abstract_name(format!("fake-verbs-{uid}-{gid}-{number:06x}")).unwrap()
}

/// Binds a socket to a number that is unused on this host.
pub fn bind(gid: &[u8; 16]) -> (UnixDatagram, u32) {
    loop {
        let mut random = [0u8; 4];
        unsafe { libc::getrandom(random.as_mut_ptr().cast(), 4, 0) };
        let number = u32::from_le_bytes(random) & 0xff_ffff;
        if let Ok(socket) = UnixDatagram::bind_addr(&address(gid, number)) {
            socket.set_nonblocking(true).unwrap();
            return (socket, number);
        }
    }
}
