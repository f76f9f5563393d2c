//! The part of a reactor's time that TLS handshakes may take.

use std::time::{Duration, Instant};

/// Handshakes may take one in this many seconds of a reactor's time …
const SHARE: u32 = 64;
/// … after a burst, which is saved up while there are none: about a hundred unfinished handshakes.
const BURST: Duration = Duration::from_millis(20);

/// Most waiting for what was overspent: less than the handshake timeout, so that one handshake that took long for its
/// reactor (a stall of the machine, a certificate that is slow to verify) does not shut members out.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

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
        let most = now + BURST * SHARE + LONGEST_WAIT;
        self.full_at = (self.full_at.max(now) + time * SHARE).min(most);
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

    #[test]
    fn one_long_handshake_makes_nobody_wait_for_long() {
        let now = Instant::now();
        let mut budget = HandshakeBudget::new(now);
        for _ in 0..2 {
            budget.spend(Duration::from_secs(4), now);
            assert_eq!(budget.wait(now), Some(now + LONGEST_WAIT));
        }
        assert!(budget.wait(now + LONGEST_WAIT).is_none());
    }
}
