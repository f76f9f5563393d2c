//! Timers of connections.

use std::time::Instant;

use super::{Links, mark};
use crate::api::Host;

impl<H: Host> Links<H> {
    /// Returns when [`Links::fire_timers`] has something to do.
    pub fn next_due(&mut self) -> Option<Instant> {
        self.timers.next_due()
    }

    pub fn fire_timers(&mut self) {
        while let Some(key) = self.timers.pop_due(self.dispatch.now) {
            self.timer(key);
        }
    }

    /// Arms a connection's timer for the protocol's next timeout.
    pub(super) fn arm(&mut self, key: u64) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let Some(at) = conn.proto.next_timeout() else { return };
        // A timer that fires too early is harmless, so a later timeout needs nothing.
        if conn.timer.is_none_or(|(armed, _)| at < armed) {
            self.rearm(key, at);
        }
    }

    pub(super) fn rearm(&mut self, key: u64, at: Instant) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if let Some((_, old)) = conn.timer.take() {
            self.timers.cancel(old);
        }
        conn.timer = Some((at, self.timers.start(at, key)));
    }

    fn timer(&mut self, key: u64) {
        let now = self.dispatch.now;
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.timer = None;
        if conn.closing.is_some() {
            // The last frame did not get through in time, or the peer does not end its side.
            conn.drain = None;
            let token = conn.token;
            return self.driver.close(token);
        }
        if conn.proto.next_timeout().is_some_and(|t| t <= now) {
            let result = conn.proto.on_timeout(now);
            conn.slim();
            mark(&mut self.dirty, conn);
            self.deliver(key);
            if let Err(error) = result {
                return self.broken(key, error);
            }
        }
        self.arm(key);
    }
}
