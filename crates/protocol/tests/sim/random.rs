//! A small generator of pseudo-random numbers: the same seed gives the same run everywhere.

#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_add(0x9e37_79b9_7f4a_7c15));
        random.next();
        random
    }

    /// splitmix64
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `0..bound`
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next() % bound }
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// A payload that both sides can compute from a number.
pub fn parts_of(seed: u64) -> Vec<Vec<u8>> {
    let mut random = Random::new(seed);
    let count = match random.below(10) {
        0 | 1 => 0,
        2..=6 => 1,
        7 | 8 => 1 + random.below(6),
        _ => 1 + random.below(40),
    };
    let large = random.below(3000) == 0;
    (0..count)
        .map(|_| {
            let len = match random.below(64) {
                0..=9 => 0,
                10..=39 => random.below(600),
                40..=44 => 8190 + random.below(4),
                45..=58 => random.below(20_000),
                59..=61 => random.below(70_000),
                _ if large => 4_000_000 + random.below(1_000_000),
                _ => 150_000,
            };
            bytes_of(random.next(), len as usize)
        })
        .collect()
}

pub fn bytes_of(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    let mut word = seed | 1;
    while bytes.len() < len {
        bytes.extend_from_slice(&word.to_le_bytes());
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
    }
    bytes.truncate(len);
    bytes
}
