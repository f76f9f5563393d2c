//! Hosts whose connections were dropped lately. One log line per host and minute, over all reactors: a flood of bad
//! bytes must not become a flood of log lines.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const SILENCE: Duration = Duration::from_secs(60);
const MOST: usize = 1024;

#[derive(Default)]
pub struct LogLimiter(Mutex<HashMap<String, Instant>>);

impl LogLimiter {
    /// True if nothing was logged about this host in the last minute, and there is room to remember it.
    pub fn allows(&self, host: &str, now: Instant) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, at| now.saturating_duration_since(*at) < SILENCE);
        if known.contains_key(host) || known.len() >= MOST {
            return false;
        }
        known.insert(host.to_owned(), now);
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
}
