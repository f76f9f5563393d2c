//! A shard's time: waiting, and timers.

use std::time::{Duration, Instant};

use crate::host::{Host, Level};
use crate::shard::{Shard, mark};
use starwire_net::reactor::polling::{Polling, involuntary_switches};

/// The longest busy wait before a sleep, where polling is on.
const LONGEST_SPIN: Duration = Duration::from_micros(200);
/// Looks at the sockets between two checks whether spinning takes CPU time from other threads.
const LOOKS_PER_QUESTION: u32 = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimerKey {
    Conn(u64),
    Channel(u32),
    /// The allowance for handshakes is not used up any more.
    Handshakes,
}

pub struct Pace {
    polling: Polling,
    looks: u32,
}

impl Pace {
    pub fn new(polling: bool) -> Self {
        Self { polling: if polling { Polling::up_to(LONGEST_SPIN) } else { Polling::off() }, looks: 0 }
    }
}

impl<H: Host> Shard<H> {
    /// Waits for the next completions: not at all if other work waits, otherwise with a busy wait (if enabled) or a
    /// sleep.
    pub(crate) fn wait(&mut self, now: Instant) {
        // A stopped reactor with nothing to close ends at once.
        if self.has_local() || !self.mailbox.is_empty() || self.finished() {
            return self.look(Some(Duration::ZERO));
        }
        if self.pace.polling.is_on() && self.spin(now) {
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
        self.delivery.metrics.sleeps.add(1);
        self.look(timeout);
        if self.mailbox.awake() {
            self.delivery.metrics.wakes.add(1);
        }
        if self.pace.polling.is_on() {
            self.pace.polling.arrived_after(now.elapsed());
        }
    }

    /// True if work arrived within the budget.
    fn spin(&mut self, since: Instant) -> bool {
        let budget = self.pace.polling.budget(since);
        loop {
            let idle = since.elapsed();
            if idle >= budget {
                return false;
            }
            self.look(Some(Duration::ZERO));
            if !self.completions.is_empty() || !self.mailbox.is_empty() {
                self.pace.polling.arrived_after(idle);
                return true;
            }
            self.pace.looks = self.pace.looks.wrapping_add(1);
            if self.pace.looks % LOOKS_PER_QUESTION == 0 {
                self.pace.polling.preempted(Instant::now(), involuntary_switches());
            }
            std::hint::spin_loop();
        }
    }

    fn look(&mut self, timeout: Option<Duration>) {
        self.delivery.metrics.waits.add(1);
        if let Err(error) = self.driver.wait(timeout, &mut self.completions) {
            let line = format!("starwire: reactor {}: waiting for events failed: {error}", self.index);
            self.shared.host.log(Level::Error, &line);
            // Avoid a tight loop.
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Arms a connection's timer for the protocol's next timeout.
    pub(crate) fn arm(&mut self, key: u64) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let Some(at) = conn.proto.next_timeout() else { return };
        // A timer that fires too early is harmless, so a later timeout needs nothing.
        if conn.timer.is_none_or(|(armed, _)| at < armed) {
            self.rearm(key, at);
        }
    }

    pub(crate) fn rearm(&mut self, key: u64, at: Instant) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if let Some((_, old)) = conn.timer.take() {
            self.timers.cancel(old);
        }
        conn.timer = Some((at, self.timers.start(at, TimerKey::Conn(key))));
    }

    pub(crate) fn arm_channel(&mut self, channel: u32, at: Instant) {
        self.timers.start(at, TimerKey::Channel(channel));
    }

    pub(crate) fn fire_timers(&mut self, now: Instant) {
        while let Some(key) = self.timers.pop_due(now) {
            match key {
                TimerKey::Channel(channel) => self.channel_timer(channel, now),
                TimerKey::Conn(key) => self.conn_timer(key, now),
                TimerKey::Handshakes => self.shake_hands(now),
            }
        }
    }

    fn conn_timer(&mut self, key: u64, now: Instant) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.timer = None;
        if conn.closing.is_some() {
            // The last frame did not get through in time, or the peer does not end its side.
            conn.farewell = None;
            let token = conn.token;
            return self.driver.close(token);
        }
        if conn.proto.next_timeout().is_some_and(|t| t <= now) {
            let result = conn.proto.on_timeout(now);
            mark(&mut self.dirty, conn);
            self.deliver(key, now);
            if let Err(error) = result {
                return self.broken(key, error, now);
            }
        }
        self.arm(key);
    }
}
