//! The part of a reactor's time that TLS handshakes may take.

use std::time::{Duration, Instant};

/// Handshakes may take one in this many seconds of a reactor's time …
const SHARE: u32 = 64;
/// … after a burst, which is saved up while there are none: about a hundred unfinished handshakes.
const BURST: Duration = Duration::from_millis(20);

/// A token bucket of time. Handshakes that end with an authenticated peer are refunded, so that only those that lead to
/// nothing use it up: a client that stops after its ClientHello costs the server a key exchange and a signature.
pub struct HandshakeBudget {
    /// When the bucket would be full if nothing more were spent.
    full_at: Instant,
}

impl HandshakeBudget {
    pub fn new(now: Instant) -> Self {
        Self { full_at: now }
    }

    /// Returns `None` if budget is left, else when it will be.
    pub fn wait(&self, now: Instant) -> Option<Instant> {
        let again_at = self.full_at.checked_sub(BURST * SHARE)?;
        (again_at > now).then_some(again_at)
    }

    pub fn spend(&mut self, time: Duration, now: Instant) {
        self.full_at = self.full_at.max(now) + time * SHARE;
    }

    /// Takes back what was spent on a peer that authenticated itself.
    pub fn refund(&mut self, time: Duration) {
        self.full_at = self.full_at.checked_sub(time * SHARE).unwrap_or(self.full_at);
    }

    /// The most that may be spent within this time.
    #[cfg(test)]
    pub fn due(time: Duration) -> Duration {
        BURST + time / SHARE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_get_their_part_of_the_time() {
        let begin = Instant::now();
        let mut budget = HandshakeBudget::new(begin);
        let one = Duration::from_micros(200);
        let (mut now, mut spent) = (begin, Duration::ZERO);
        // Always as many as are allowed, each for what it takes.
        while now < begin + Duration::from_secs(10) {
            match budget.wait(now) {
                Some(at) => now = at,
                None => {
                    budget.spend(one, now);
                    spent += one;
                    now += one;
                }
            }
        }
        let due = HandshakeBudget::due(Duration::from_secs(10));
        assert!(spent >= due - one && spent <= due + one * 2, "{spent:?} of {due:?}");
        // Idle time does not save up more than the burst.
        now += Duration::from_secs(3600);
        let mut at_once = 0;
        while budget.wait(now).is_none() {
            budget.spend(one, now);
            at_once += 1;
        }
        assert_eq!(at_once, BURST.as_micros() / one.as_micros() + 1);
        budget.refund(one * 2);
        assert!(budget.wait(now).is_none());
    }
}
