//! The wire format written down a second time, independently of the implementation: blocks and frames as
//! `docs/protocol.md` has them, well-formed or not.

use std::collections::VecDeque;
use std::time::Instant;

use crate::pair::End;

pub const HELLO: u8 = 1;
pub const WELCOME: u8 = 2;
pub const CHALLENGE: u8 = 3;
pub const REFUSE: u8 = 4;
pub const MOVE: u8 = 5;
pub const KEY: u8 = 10;
pub const RECV: u8 = 11;
pub const CALL: u8 = 12;
pub const REPLY: u8 = 13;
pub const DATA: u8 = 14;
pub const CANCEL: u8 = 15;
pub const LEND: u8 = 16;
pub const TAKEN: u8 = 17;
pub const PING: u8 = 20;
pub const PONG: u8 = 21;
pub const GOODBYE: u8 = 22;
pub const BULK: u64 = 1 << 63;

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().div_ceil(8) * 8, 0);
}

#[derive(Clone)]
pub struct RawFrame {
    pub kind: u8,
    pub flags: u8,
    pub code: u16,
    pub id: u64,
    pub fixed: Vec<u8>,
    pub meta: Vec<u8>,
    pub inline: Vec<Vec<u8>>,
}

impl RawFrame {
    pub fn new(kind: u8, id: u64) -> RawFrame {
        RawFrame { kind, flags: 0, code: 0, id, fixed: Vec::new(), meta: Vec::new(), inline: Vec::new() }
    }
    pub fn flags(mut self, flags: u8) -> RawFrame {
        self.flags = flags;
        self
    }
    pub fn code(mut self, code: u16) -> RawFrame {
        self.code = code;
        self
    }
    pub fn meta(mut self, meta: &[u8]) -> RawFrame {
        self.meta = meta.to_vec();
        self
    }
    pub fn words(mut self, words: &[u64]) -> RawFrame {
        for word in words {
            self.fixed.extend_from_slice(&word.to_le_bytes());
        }
        self
    }
    pub fn inline(mut self, part: &[u8]) -> RawFrame {
        self.inline.push(part.to_vec());
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = vec![self.kind, self.flags];
        out.extend_from_slice(&self.code.to_le_bytes());
        out.extend_from_slice(&(self.meta.len() as u32).to_le_bytes());
        out.extend_from_slice(&self.id.to_le_bytes());
        out.extend_from_slice(&self.fixed);
        out.extend_from_slice(&self.meta);
        pad(&mut out);
        for part in &self.inline {
            out.extend_from_slice(part);
            pad(&mut out);
        }
        out
    }
}

pub fn key(key: u64, prefix: &[u8]) -> RawFrame {
    RawFrame::new(KEY, key).meta(prefix)
}

pub fn recv(id: u64, key: u64) -> RawFrame {
    RawFrame::new(RECV, id).words(&[7, key])
}

/// A CALL (method 5) with the given part lengths (with their bulk bits).
pub fn call(id: u64, lens: &[u64]) -> RawFrame {
    let mut frame = RawFrame::new(CALL, id).code(5);
    frame.fixed = [0u32.to_le_bytes(), (lens.len() as u32).to_le_bytes()].concat();
    frame.words(lens)
}

pub fn reply(id: u64, lens: &[u64]) -> RawFrame {
    RawFrame::new(REPLY, id).words(&[lens.len() as u64]).words(lens)
}

pub fn data(id: u64, len: u64) -> RawFrame {
    RawFrame::new(DATA, id).words(&[len])
}

/// Fields of a HELLO or WELCOME.
pub fn fields(task: &str, more: &[(u16, &[u8])]) -> Vec<u8> {
    let mut limits = Vec::new();
    limits.extend_from_slice(&1000u32.to_le_bytes());
    limits.extend_from_slice(&1000u32.to_le_bytes());
    limits.extend_from_slice(&(1u64 << 30).to_le_bytes());
    limits.extend_from_slice(&1000u32.to_le_bytes());
    limits.extend_from_slice(&(1u32 << 20).to_le_bytes());
    limits.extend_from_slice(&(1u64 << 32).to_le_bytes());
    let incarnation = 77u64.to_le_bytes();
    let mut all: Vec<(u16, &[u8])> = vec![(1, b"grpc++"), (2, task.as_bytes()), (3, &incarnation), (9, &limits)];
    all.extend_from_slice(more);
    let mut out = Vec::new();
    for (tag, value) in all {
        out.extend_from_slice(&tag.to_le_bytes());
        out.extend_from_slice(&(value.len() as u16).to_le_bytes());
        out.extend_from_slice(value);
    }
    out
}

pub fn hello(more: &[(u16, &[u8])]) -> RawFrame {
    RawFrame::new(HELLO, 0).meta(&fields("/job:worker/task:0", more))
}

pub fn welcome(more: &[(u16, &[u8])]) -> RawFrame {
    RawFrame::new(WELCOME, 0).meta(&fields("/job:ps/task:0", more))
}

pub fn section(frames: &[RawFrame]) -> Vec<u8> {
    frames.iter().flat_map(RawFrame::bytes).collect()
}

/// A block with the right checksum.
pub fn block(sequence: u64, mut control: Vec<u8>, bulk: &[u8]) -> Vec<u8> {
    if !bulk.is_empty() && control.len() < 1024 - 32 {
        control.resize(1024 - 32, 0);
    }
    let mut out = b"SWB1\x03\0\0\0".to_vec();
    out.extend_from_slice(&(control.len() as u32).to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&(bulk.len() as u64).to_le_bytes());
    out.extend_from_slice(&sequence.to_le_bytes());
    out.extend_from_slice(&control);
    seal(&mut out);
    out.extend_from_slice(bulk);
    out
}

/// Puts the checksum into a block without bulk bytes.
pub fn seal(block: &mut [u8]) {
    block[12..16].fill(0);
    let sum = crc32c::crc32c(block);
    block[12..16].copy_from_slice(&sum.to_le_bytes());
}

/// The other side of a connection under test, speaking raw bytes.
pub struct RawPeer {
    pub end: End,
    pub now: Instant,
    /// What is sent arrives in pieces of at most so many bytes.
    pub cut: usize,
    sequence: u64,
}

impl RawPeer {
    pub fn new(end: End) -> RawPeer {
        RawPeer { end, now: Instant::now(), cut: usize::MAX, sequence: 0 }
    }

    /// A peer whose HELLO was accepted by a server.
    pub fn welcomed(settings: starwire_protocol::Settings) -> RawPeer {
        let now = Instant::now();
        let mut peer = RawPeer::new(End::server(settings, now));
        peer.say(&[hello(&[])]);
        assert!(peer.end.connection.is_ready());
        peer.end.blocks.clear();
        peer
    }

    /// A peer that answered a client's HELLO.
    pub fn serving(settings: starwire_protocol::Settings) -> RawPeer {
        let now = Instant::now();
        let mut peer = RawPeer::new(End::client(settings, now));
        peer.listen();
        peer.say(&[welcome(&[])]);
        assert!(peer.end.connection.is_ready());
        peer
    }

    pub fn say(&mut self, frames: &[RawFrame]) {
        self.say_bulk(frames, &[]);
    }

    pub fn say_bulk(&mut self, frames: &[RawFrame], bulk: &[u8]) {
        let bytes = block(self.sequence, section(frames), bulk);
        self.sequence += 1;
        self.send(&bytes);
    }

    pub fn send(&mut self, bytes: &[u8]) {
        let mut wire: VecDeque<u8> = bytes.iter().copied().collect();
        while !wire.is_empty() && self.end.error.is_none() && self.end.begin_receive() {
            self.end.finish_receive(self.now, &mut wire, self.cut);
        }
    }

    /// Everything that the side under test has to say.
    pub fn listen(&mut self) -> Vec<u8> {
        let mut wire = VecDeque::new();
        while self.end.send(self.now, &mut wire) {}
        wire.into()
    }

    /// Kinds and ids of the frames without payload that the side under test says; blocks must have no bulk bytes.
    pub fn listen_frames(&mut self) -> Vec<(u8, u64)> {
        let bytes = self.listen();
        let mut frames = Vec::new();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
            let control = word(rest, 8) as usize;
            assert_eq!(rest[16..24], [0; 8]);
            let mut section = &rest[32..32 + control];
            rest = &rest[32 + control..];
            while !section.is_empty() && section[0] != 0 {
                let (kind, flags) = (section[0], section[1]);
                frames.push((kind, u64::from_le_bytes(section[8..16].try_into().expect("8 bytes"))));
                let fixed = match kind {
                    RECV => 16 + 16 * usize::from(flags & 1),
                    DATA => 8,
                    CALL => 8 + 8 * word(section, 20) as usize,
                    REPLY => 8 + 8 * word(section, 16) as usize,
                    _ => 0,
                };
                let inline: usize = match kind {
                    CALL | REPLY => section[24..16 + fixed]
                        .chunks(8)
                        .map(|len| u64::from_le_bytes(len.try_into().expect("8 bytes")))
                        .filter(|len| len & BULK == 0)
                        .map(|len| (len as usize).div_ceil(8) * 8)
                        .sum(),
                    _ => 0,
                };
                let meta = (word(section, 4) as usize).div_ceil(8) * 8;
                section = &section[16 + fixed + meta + inline..];
            }
        }
        frames
    }
}
