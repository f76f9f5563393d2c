//! Measured costs of kernels, on which sharing them among threads is based.
//!
//! Reading the clock twice costs as much as a small kernel, so few runs are measured. An estimate moves in bounded
//! steps, up more slowly than down: one preemption does not make a kernel look expensive.

use super::sync::{AtomicU32, Ordering};

/// From this cost on, waking another core pays.
pub const EXPENSIVE_NS: u32 = 25_000;
/// An arena's first runs are measured, except the very first, which pays for cold caches; later, one in
/// `MEASURED_LATER`.
const MEASURED_AT_FIRST: u32 = 4;
const MEASURED_LATER: u32 = 64;

pub struct Costs {
    /// By node; 0: not known.
    ns: Box<[AtomicU32]>,
    expensive: AtomicU32,
}

impl Costs {
    pub fn new(hints: impl Iterator<Item = u32>) -> Self {
        let ns: Box<[AtomicU32]> = hints.map(AtomicU32::new).collect();
        let expensive = ns.iter().map(|ns| u32::from(ns.load(Ordering::Relaxed) >= EXPENSIVE_NS)).sum();
        Costs { ns, expensive: AtomicU32::new(expensive) }
    }

    /// Whether an arena measures its run number `run`, counted from 0.
    pub fn measures(run: u32) -> bool {
        (1..=MEASURED_AT_FIRST).contains(&run) || (run != 0 && run % MEASURED_LATER == 0)
    }

    pub fn note(&self, node: u32, took: u128) {
        let Some(cell) = self.ns.get(node as usize) else { return };
        // Saturates after four seconds: it is expensive, however long it takes.
        let took = u32::try_from(took).unwrap_or(u32::MAX).max(1);
        let old = cell.load(Ordering::Relaxed);
        let new = match old {
            0 => took,
            old => took.clamp(old / 4, old.saturating_add(old / 2).saturating_add(1_000)),
        };
        // Of two concurrent updates, each counts the step that it made.
        let old = cell.swap(new, Ordering::Relaxed);
        match (old >= EXPENSIVE_NS, new >= EXPENSIVE_NS) {
            (false, true) => _ = self.expensive.fetch_add(1, Ordering::Relaxed),
            (true, false) => _ = self.expensive.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
    }

    pub fn is_expensive(&self, node: u32) -> bool {
        self.ns.get(node as usize).is_some_and(|ns| ns.load(Ordering::Relaxed) >= EXPENSIVE_NS)
    }

    /// The number of expensive kernels.
    pub fn expensive(&self) -> u32 {
        self.expensive.load(Ordering::Relaxed)
    }

    /// The known cost of all kernels, run one after another.
    pub fn total_ns(&self) -> u64 {
        self.ns.iter().map(|ns| u64::from(ns.load(Ordering::Relaxed))).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slow_run_does_not_make_a_kernel_expensive() {
        let costs = Costs::new([0].into_iter());
        costs.note(0, 2_000);
        costs.note(0, 10_000_000);
        assert!(!costs.is_expensive(0));
        for _ in 0..20 {
            costs.note(0, 10_000_000);
        }
        assert!(costs.is_expensive(0));
        assert_eq!(costs.expensive(), 1);
        for _ in 0..30 {
            costs.note(0, 100);
        }
        assert_eq!((costs.is_expensive(0), costs.expensive()), (false, 0));
    }

    #[test]
    fn few_runs_are_measured() {
        let measured: Vec<u32> = (0..200).filter(|run| Costs::measures(*run)).collect();
        assert_eq!(measured, [1, 2, 3, 4, 64, 128, 192]);
    }

    #[test]
    fn hints_count() {
        let costs = Costs::new([EXPENSIVE_NS, 1, u32::MAX].into_iter());
        assert_eq!((costs.expensive(), costs.is_expensive(1)), (2, false));
        assert_eq!(costs.total_ns(), u64::from(EXPENSIVE_NS) + 1 + u64::from(u32::MAX));
    }
}
