//! The pause before another attempt to connect.

use std::time::Duration;

const FIRST_MS: u64 = 20;
const LONGEST_MS: u64 = 500;

/// 20 ms after the first failed attempt, growing to half a second, with ±25 % jitter so that a thousand workers do not
/// reconnect in step. `failures`: how many attempts failed before this one.
pub fn pause(failures: u32, random: u64) -> Duration {
    let base = FIRST_MS.saturating_mul(1 << failures.min(7)).min(LONGEST_MS);
    Duration::from_millis(base * 3 / 4 + random % (base / 2 + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_half_a_second_and_differ() {
        let range = |failures| [0, u64::MAX / 3, u64::MAX].map(|random| pause(failures, random).as_millis());
        for (failures, from, to) in [(0, 15, 25), (1, 30, 50), (4, 240, 400), (5, 375, 625), (u32::MAX, 375, 625)] {
            assert!(range(failures).iter().all(|ms| (from..=to).contains(ms)), "{failures}: {:?}", range(failures));
        }
        assert_ne!(pause(9, 0), pause(9, 100));
    }
}
