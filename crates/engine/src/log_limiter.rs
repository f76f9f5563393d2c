//! What was logged lately. One log line per client's party or kind of event, and minute, over all reactors: a flood of
//! bad bytes must not become a flood of log lines.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const SILENCE: Duration = Duration::from_secs(60);
const MOST: usize = 1024;

#[derive(Default)]
pub struct LogLimiter {
    parties: Mutex<HashMap<String, Instant>>,
    /// However many parties there are, they keep no line about anything else out of the log.
    events: Mutex<HashMap<&'static str, Instant>>,
}

impl LogLimiter {
    /// True if nothing was logged about this party in the last minute, and there is room to remember it.
    pub fn allows(&self, party: &str, now: Instant) -> bool {
        let mut known = self.parties.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, at| now.saturating_duration_since(*at) < SILENCE);
        if known.contains_key(party) || known.len() >= MOST {
            return false;
        }
        known.insert(party.to_owned(), now);
        true
    }

    /// True if nothing was logged about such an event in the last minute.
    pub fn allows_event(&self, event: &'static str, now: Instant) -> bool {
        let mut known = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if known.get(event).is_some_and(|at| now.saturating_duration_since(*at) < SILENCE) {
            return false;
        }
        known.insert(event, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_news_once_a_minute_and_the_table_is_bounded() {
        let log_limiter = LogLimiter::default();
        let now = Instant::now();
        assert!(log_limiter.allows("a", now));
        assert!(!log_limiter.allows("a", now + SILENCE / 2));
        assert!(log_limiter.allows("b", now + SILENCE / 2));
        assert!(log_limiter.allows("a", now + SILENCE));
        let accepted = (0..2 * MOST).filter(|n| log_limiter.allows(&n.to_string(), now + SILENCE)).count();
        assert_eq!(accepted, MOST - 2);
    }

    #[test]
    fn parties_keep_no_event_out_of_the_log() {
        let (log_limiter, now) = (LogLimiter::default(), Instant::now());
        let accepted = (0..2 * MOST).filter(|n| log_limiter.allows(&n.to_string(), now)).count();
        assert_eq!(accepted, MOST);
        assert!(log_limiter.allows_event("copy", now));
        assert!(!log_limiter.allows_event("copy", now + SILENCE / 2));
        assert!(log_limiter.allows_event("accept", now + SILENCE / 2));
        assert!(log_limiter.allows_event("copy", now + SILENCE));
    }
}
