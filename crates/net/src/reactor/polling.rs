//! When, and for how long, a reactor spins before it sleeps.
//!
//! Spinning saves the wake-up (tens of microseconds) if the next message is near, and wastes a core if it is not. So it
//! is off by default; if on, the budget adapts: it grows while messages arrive soon after the reactor would have slept,
//! and shrinks when they do not. A spinning thread that is preempted is in the way of another: it then stops spinning
//! for a while, longer each time. All inputs come from the caller; see [`involuntary_switches`].

use std::time::{Duration, Instant};

/// The first budget after zero.
const SMALLEST: Duration = Duration::from_micros(10);
const FIRST_PENALTY: Duration = Duration::from_millis(10);
const LONGEST_PENALTY: Duration = Duration::from_secs(1);
/// Without contention for this long, the next penalty starts short again.
const FORGIVEN: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct Polling {
    /// The longest spin; zero: off.
    limit: Duration,
    budget: Duration,
    switches: Option<u64>,
    penalty: Duration,
    /// Until then every wait sleeps at once.
    suspended_until: Option<Instant>,
    last_contention: Option<Instant>,
}

impl Polling {
    pub fn off() -> Self {
        Polling::up_to(Duration::ZERO)
    }

    /// Spins at most for `limit` before each sleep.
    pub fn up_to(limit: Duration) -> Self {
        Polling {
            limit,
            budget: SMALLEST.min(limit),
            switches: None,
            penalty: FIRST_PENALTY,
            suspended_until: None,
            last_contention: None,
        }
    }

    pub fn is_on(&self) -> bool {
        !self.limit.is_zero()
    }

    /// How long to look for work, from now on, without sleeping.
    pub fn budget(&self, now: Instant) -> Duration {
        if self.suspended_until.is_some_and(|until| now < until) { Duration::ZERO } else { self.budget }
    }

    /// Work arrived `idle` after the reactor had run out of it, during the spin or the sleep after it.
    pub fn arrived_after(&mut self, idle: Duration) {
        if idle > self.limit {
            // No spin would have caught it.
            self.budget /= 2;
            if self.budget < SMALLEST {
                self.budget = Duration::ZERO;
            }
        } else if idle > self.budget {
            // A longer one would have.
            self.budget = (self.budget * 2).max(SMALLEST).max(idle).min(self.limit);
        }
    }

    /// The number of times that this thread has been preempted since it started; to be called now and then while
    /// spinning.
    pub fn preempted(&mut self, now: Instant, switches: u64) {
        let before = self.switches.replace(switches);
        if before.is_none_or(|before| switches <= before) {
            return;
        }
        if self.last_contention.is_some_and(|last| now.saturating_duration_since(last) > FORGIVEN) {
            self.penalty = FIRST_PENALTY;
        }
        self.last_contention = Some(now);
        self.suspended_until = Some(now + self.penalty);
        self.penalty = (self.penalty * 2).min(LONGEST_PENALTY);
    }
}

/// The number of times that the calling thread has been preempted: more threads are runnable than there are cores.
pub fn involuntary_switches() -> u64 {
    // SAFETY: all-zero is a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a valid, writable rusage. The call cannot fail with these arguments; if it did, the count
    // would stay zero: no contention.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    usage.ru_nivcsw.max(0).unsigned_abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    #[test]
    fn off_never_spins() {
        let mut polling = Polling::off();
        let now = Instant::now();
        for idle in [0, 1, 10, 1000] {
            polling.arrived_after(us(idle));
            assert_eq!(polling.budget(now), Duration::ZERO);
        }
        assert!(!polling.is_on());
    }

    #[test]
    fn the_budget_follows_the_gaps_between_messages() {
        let mut polling = Polling::up_to(us(100));
        let now = Instant::now();
        assert_eq!(polling.budget(now), us(10));
        polling.arrived_after(us(60));
        assert_eq!(polling.budget(now), us(60));
        polling.arrived_after(us(5));
        assert_eq!(polling.budget(now), us(60), "what works is kept");
        polling.arrived_after(us(90));
        assert_eq!(polling.budget(now), us(100), "never above the limit");
        for _ in 0..10 {
            polling.arrived_after(us(5000));
        }
        assert_eq!(polling.budget(now), Duration::ZERO, "no spin would have met those");
        polling.arrived_after(us(30));
        assert_eq!(polling.budget(now), us(30), "and it comes back");
    }

    #[test]
    fn a_preempted_spinner_sleeps_for_longer_and_longer() {
        let mut polling = Polling::up_to(us(100));
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        polling.preempted(at(0), 7);
        assert_eq!(polling.budget(at(0)), us(10), "the first number is only where counting starts");
        polling.preempted(at(1), 7);
        assert_eq!(polling.budget(at(1)), us(10));
        polling.preempted(at(2), 8);
        assert_eq!((polling.budget(at(2)), polling.budget(at(11))), (Duration::ZERO, Duration::ZERO));
        assert_eq!(polling.budget(at(12)), us(10));
        polling.preempted(at(20), 9);
        assert_eq!((polling.budget(at(39)), polling.budget(at(40))), (Duration::ZERO, us(10)));
        polling.preempted(at(6000), 10);
        assert_eq!(polling.budget(at(6010)), us(10), "old sins are forgiven");
    }

    #[test]
    fn penalties_are_bounded() {
        let mut polling = Polling::up_to(us(100));
        let mut now = Instant::now();
        for switches in 0..100 {
            polling.preempted(now, switches);
            now += Duration::from_millis(1);
        }
        assert!(polling.budget(now + LONGEST_PENALTY) > Duration::ZERO);
    }

    #[test]
    fn switches_of_this_thread_can_be_counted() {
        let first = involuntary_switches();
        assert!(involuntary_switches() >= first);
    }
}
