//! What clients that are no tasks send first, and often last.

use crate::random::Random;

/// A request over HTTP, the beginning of a handshake, garbage, or nothing.
pub fn first_bytes(random: &mut Random) -> Vec<u8> {
    let mut bytes = match random.below(6) {
        0 => b"GET /metrics HTTP/1.1\r\nHost: task\r\n\r\n".to_vec(),
        1 => b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        2 => b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        3 => b"SWB1\x01".to_vec(),
        4 => Vec::new(),
        _ => (0..1 + random.below(100)).map(|_| random.below(256) as u8).collect(),
    };
    if random.below(4) == 0 {
        bytes.truncate(random.below(bytes.len() as u64 + 1) as usize);
    }
    bytes
}
