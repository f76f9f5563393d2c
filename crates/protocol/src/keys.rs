//! Interning of rendezvous key prefixes: each is sent once, requests name its number.
//!
//! Both tables are bounded. A sender whose table is full forgets all of it and sets a flag in the next KEY frame; keys
//! then start from 0 again. Frames are in order, so both sides always agree on the meaning of a key.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::error::ProtocolError;

/// The frames that a request with some prefix needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interned {
    Known { key: u64 },
    New { key: u64, forget: bool },
}

/// The client's table.
#[derive(Debug, Default)]
pub struct KeySender {
    keys: HashMap<Box<[u8]>, u64, BuildHasherDefault<PrefixHasher>>,
    bytes: usize,
}

impl KeySender {
    /// To be called once for each request, in the order in which the requests are sent.
    pub fn intern(&mut self, prefix: &[u8], max_keys: u32, max_bytes: u32) -> Interned {
        if let Some(&key) = self.keys.get(prefix) {
            return Interned::Known { key };
        }
        let full = self.keys.len() >= max_keys as usize || self.bytes + prefix.len() > max_bytes as usize;
        if full {
            self.keys.clear();
            self.bytes = 0;
        }
        let key = self.keys.len() as u64;
        self.keys.insert(prefix.into(), key);
        self.bytes += prefix.len();
        Interned::New { key, forget: full }
    }
}

/// The server's table: which keys exist. The owner keeps their prefixes.
#[derive(Debug, Default)]
pub struct KeyReceiver {
    keys: u32,
    bytes: usize,
}

impl KeyReceiver {
    pub fn forget(&mut self) {
        *self = KeyReceiver::default();
    }

    pub fn define(&mut self, key: u64, prefix: &[u8], max_keys: u32, max_bytes: u32) -> Result<(), ProtocolError> {
        if key != u64::from(self.keys) {
            return Err(ProtocolError::Frame { frame: "KEY", why: "keys are not numbered in order" });
        }
        if self.keys >= max_keys {
            return Err(ProtocolError::Window { what: "number of keys", limit: u64::from(max_keys) });
        }
        if self.bytes + prefix.len() > max_bytes as usize {
            return Err(ProtocolError::Window { what: "total length of keys", limit: u64::from(max_bytes) });
        }
        self.keys += 1;
        self.bytes += prefix.len();
        Ok(())
    }

    pub fn is_defined(&self, key: u64) -> bool {
        key < u64::from(self.keys)
    }
}

/// Prefixes are our own, so collisions are not an attack, and some hundred bytes long: CRC32C in hardware is the
/// fastest hash available.
#[derive(Default)]
pub struct PrefixHasher(u32);

impl Hasher for PrefixHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, bytes);
    }

    fn write_usize(&mut self, _length: usize) {}

    fn finish(&self) -> u64 {
        u64::from(self.0).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_agree_while_the_table_overflows_again_and_again() {
        let (mut sender, mut receiver) = (KeySender::default(), KeyReceiver::default());
        let mut meaning: Vec<Vec<u8>> = Vec::new();
        let mut resets = 0;
        for round in 0..200u64 {
            let prefix =
                format!("/job:ps;{};edge_{}", "x".repeat((round % 5) as usize), round * round % 17).into_bytes();
            let key = match sender.intern(&prefix, 7, 120) {
                Interned::Known { key } => key,
                Interned::New { key, forget } => {
                    if forget {
                        resets += 1;
                        receiver.forget();
                        meaning.clear();
                    }
                    receiver.define(key, &prefix, 7, 120).expect("the sender keeps the bounds");
                    meaning.push(prefix.clone());
                    key
                }
            };
            assert!(receiver.is_defined(key));
            assert_eq!(meaning[key as usize], prefix);
        }
        assert!(resets > 5);
    }

    #[test]
    fn receiver_enforces_order_and_bounds() {
        let mut receiver = KeyReceiver::default();
        assert!(receiver.define(1, b"a", 2, 10).is_err());
        receiver.define(0, b"a", 2, 10).expect("first key");
        assert!(receiver.is_defined(0) && !receiver.is_defined(1) && !receiver.is_defined(u64::MAX));
        assert!(matches!(receiver.define(1, b"0123456789", 2, 10), Err(ProtocolError::Window { .. })));
        receiver.define(1, b"012345678", 2, 10).expect("second key");
        assert!(matches!(receiver.define(2, b"", 2, 10), Err(ProtocolError::Window { .. })));
    }

    #[test]
    fn a_sender_uses_all_of_its_table() {
        let mut sender = KeySender::default();
        assert_eq!(sender.intern(b"aaaa", 10, 8), Interned::New { key: 0, forget: false });
        assert_eq!(sender.intern(b"bbbb", 10, 8), Interned::New { key: 1, forget: false });
        assert_eq!(sender.intern(b"aaaa", 10, 8), Interned::Known { key: 0 });
        assert_eq!(sender.intern(b"c", 10, 8), Interned::New { key: 0, forget: true });
    }

    /// The CRC32C of "123456789" is 0xe3069283.
    #[test]
    fn prefixes_are_hashed_by_their_checksum() {
        let mut hasher = PrefixHasher::default();
        hasher.write_usize(9);
        hasher.write(b"12345");
        hasher.write(b"6789");
        assert_eq!(hasher.finish(), 0xf007_1c4a_255f_78bf);
    }
}
