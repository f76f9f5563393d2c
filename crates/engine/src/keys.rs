//! The keys of connections, and maps whose keys are numbers.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A connection's key has its shard's index above this bit, and a number that is never reused below.
const CONN_BITS: u32 = 48;

/// The key of a shard's connection with this number.
pub fn conn_key(shard: usize, number: u64) -> u64 {
    ((shard as u64) << CONN_BITS) | number
}

/// The shard of a connection.
pub fn shard_of(conn: u64) -> usize {
    usize::from((conn >> CONN_BITS) as u16)
}

/// Keys are counters or the driver's own numbers, so a multiplication is a sufficient hash.
#[derive(Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u64(u64::from(*b));
        }
    }
    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

pub type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;
