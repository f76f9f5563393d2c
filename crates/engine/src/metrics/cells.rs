//! Cells for numbers. Each has one writer, so that adding is a plain load and store; any thread may read.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Only goes up.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicI64);

impl Gauge {
    pub fn add(&self, n: i64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    pub fn set(&self, n: i64) {
        self.0.store(n, Relaxed);
    }

    pub fn get(&self) -> i64 {
        self.0.load(Relaxed)
    }
}

/// Number of buckets of every histogram.
pub const BUCKETS: usize = 28;
/// The first bucket holds what is below 2^10 ns, about a microsecond.
const FIRST_BITS: u32 = 10;

/// Durations in buckets whose bounds are powers of two, from 1.024 µs to 68.7 s.
#[derive(Debug, Default)]
pub struct Histogram {
    sum: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

impl Histogram {
    pub fn record(&self, duration: Duration) {
        // 584 years fit, and end in the last bucket like everything above a minute.
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let bucket = &self.buckets[bucket_of(nanos)];
        bucket.store(bucket.load(Relaxed).wrapping_add(1), Relaxed);
        self.sum.store(self.sum.load(Relaxed).wrapping_add(nanos), Relaxed);
    }

    pub fn get(&self) -> Distribution {
        Distribution { sum: self.sum.load(Relaxed), buckets: std::array::from_fn(|i| self.buckets[i].load(Relaxed)) }
    }
}

fn bucket_of(nanos: u64) -> usize {
    let bits = u64::BITS - nanos.leading_zeros();
    let index = bits.saturating_sub(FIRST_BITS);
    usize::try_from(index).map_or(BUCKETS - 1, |index| index.min(BUCKETS - 1))
}

/// A snapshot of a histogram.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distribution {
    /// Nanoseconds.
    pub sum: u64,
    /// Bucket i counts durations below [`Distribution::bound`]`(i)` that are in no bucket before it.
    pub buckets: [u64; BUCKETS],
}

impl Distribution {
    /// Upper bound of bucket `i` in nanoseconds; `None` for the last one, which has no bound.
    pub fn bound(i: usize) -> Option<u64> {
        let shift = u32::try_from(i).ok()?.checked_add(FIRST_BITS)?;
        if i + 1 < BUCKETS { 1u64.checked_shl(shift) } else { None }
    }

    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, n| sum.wrapping_add(*n))
    }

    /// An upper bound of the `q`-quantile (0 to 1) in nanoseconds; `None` if nothing was recorded or it lies in the
    /// last bucket.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        let mut seen = 0u64;
        for (i, n) in self.buckets.iter().enumerate() {
            seen = seen.wrapping_add(*n);
            if seen as f64 >= q * count as f64 {
                return Self::bound(i);
            }
        }
        None
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.sum = self.sum.wrapping_add(other.sum);
        for (a, b) in self.buckets.iter_mut().zip(other.buckets) {
            *a = a.wrapping_add(b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_lies_below_its_bound_and_not_below_the_one_before() {
        for nanos in [0, 1, 1023, 1024, 1025, 2047, 2048, 1_000_000, 68_719_476_735, 68_719_476_736, u64::MAX] {
            let i = bucket_of(nanos);
            assert!(Distribution::bound(i).is_none_or(|bound| nanos < bound), "{nanos} in {i}");
            assert!(i == 0 || Distribution::bound(i - 1).is_some_and(|bound| nanos >= bound), "{nanos} in {i}");
        }
        assert_eq!(Distribution::bound(0), Some(1024));
        assert_eq!(Distribution::bound(BUCKETS - 2), Some(68_719_476_736));
        assert_eq!(Distribution::bound(BUCKETS - 1), None);
    }

    #[test]
    fn quantiles_are_upper_bounds() {
        let h = Histogram::default();
        assert_eq!(h.get().quantile(0.5), None);
        for _ in 0..90 {
            h.record(Duration::from_micros(3));
        }
        for _ in 0..10 {
            h.record(Duration::from_millis(3));
        }
        let d = h.get();
        assert_eq!(d.count(), 100);
        assert_eq!(d.sum, 90 * 3_000 + 10 * 3_000_000);
        assert_eq!(d.quantile(0.5), Some(4096));
        assert_eq!(d.quantile(0.99), Some(4_194_304));
        h.record(Duration::from_secs(1000));
        assert_eq!(h.get().quantile(1.0), None);
    }
}
