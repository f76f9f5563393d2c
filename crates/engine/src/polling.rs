//! How a shard waits for completions: with a busy wait, if that is enabled, and then in the kernel.

use std::time::{Duration, Instant};

use crate::api::{Host, Level};
use crate::shard::Shard;
use starwire_net::reactor::polling::involuntary_switches;

/// Looks at the sockets between two checks whether spinning takes CPU time from other threads.
const LOOKS_PER_QUESTION: u32 = 64;

impl<H: Host> Shard<H> {
    /// Waits for the next completions: not at all if other work waits, otherwise with a busy wait (if enabled) or a
    /// sleep.
    pub(crate) fn wait(&mut self, now: Instant) {
        // A stopped reactor with nothing to close ends at once.
        if self.has_local() || !self.mailbox.is_empty() || self.finished() {
            return self.look(Some(Duration::ZERO));
        }
        if self.polling.is_on() && self.spin(now) {
            return;
        }
        let next = self.timers.next_due().map(|t| t.saturating_duration_since(now));
        let timeout = match self.stopping {
            Some(until) => Some(next.unwrap_or(Duration::MAX).min(until.saturating_duration_since(now))),
            None => next,
        };
        if timeout == Some(Duration::ZERO) || !self.mailbox.prepare_sleep() {
            return self.look(Some(Duration::ZERO));
        }
        self.dispatch.metrics.sleeps.add(1);
        self.look(timeout);
        if self.mailbox.awake() {
            self.dispatch.metrics.wakes.add(1);
        }
        if self.polling.is_on() {
            self.polling.arrived_after(now.elapsed());
        }
    }

    /// True if work arrived within the budget.
    fn spin(&mut self, since: Instant) -> bool {
        let budget = self.polling.budget(since);
        loop {
            let idle = since.elapsed();
            if idle >= budget {
                return false;
            }
            self.look(Some(Duration::ZERO));
            if !self.completions.is_empty() || !self.mailbox.is_empty() {
                self.polling.arrived_after(idle);
                return true;
            }
            self.looks = self.looks.wrapping_add(1);
            if self.looks % LOOKS_PER_QUESTION == 0 {
                self.polling.preempted(Instant::now(), involuntary_switches());
            }
            std::hint::spin_loop();
        }
    }

    fn look(&mut self, timeout: Option<Duration>) {
        self.dispatch.metrics.waits.add(1);
        if let Err(error) = self.driver.wait(timeout, &mut self.completions) {
            let line = format!("starwire: reactor {}: waiting for events failed: {error}", self.index);
            self.shared.host.log(Level::Error, &line);
            // Avoid a tight loop.
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
