//! Hash maps with request ids as keys. The peer chooses the ids, so the hash is seeded; a multiplication is enough for
//! numbers.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

pub type IdMap<V> = HashMap<u64, V, IdHash>;

#[derive(Clone, Copy, Debug)]
pub struct IdHash {
    add: u64,
    multiply: u64,
}

impl IdHash {
    /// A hash for which the peer cannot construct collisions: its seed never leaves the process.
    pub fn new() -> Self {
        let random = std::hash::RandomState::new();
        IdHash { add: random.hash_one(0), multiply: random.hash_one(1) | 1 }
    }
}

impl BuildHasher for IdHash {
    type Hasher = IdHasher;

    fn build_hasher(&self) -> IdHasher {
        IdHasher { seed: *self, state: 0 }
    }
}

pub struct IdHasher {
    seed: IdHash,
    state: u64,
}

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        let mixed = u128::from(id ^ self.state ^ self.seed.add) * u128::from(self.seed.multiply);
        let (high, low) = ((mixed >> 64) as u64, (mixed & 0xffff_ffff_ffff_ffff) as u64);
        self.state = high ^ low;
    }

    fn finish(&self) -> u64 {
        self.state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The two halves of the product of the multiplier and `id ^ state ^ add`, one xor the other.
    #[test]
    fn a_hash_mixes_all_ids_and_its_seed() {
        let seed = IdHash { add: 0x0123_4567_89ab_cdef, multiply: 0xfedc_ba98_7654_3211 };
        let mut hasher = seed.build_hasher();
        hasher.write_u64(0x1122_3344_5566_7788);
        assert_eq!(hasher.finish(), 0x953f_e435_cfdd_7d50);
        hasher.write_u64(0x99aa_bbcc_ddee_ff00);
        assert_eq!(hasher.finish(), 0x6534_a1f6_f120_ca5e);
        let mut hasher = seed.build_hasher();
        hasher.write(&[7, 9]);
        assert_eq!(hasher.finish(), 0x9178_a4ef_a904_2580);
    }
}
