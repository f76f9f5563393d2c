//! A shard's timers.

use std::time::Instant;

use crate::api::Host;
use crate::shard::{Shard, TimerKey, mark};

impl<H: Host> Shard<H> {
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

    pub(crate) fn fire_timers(&mut self, now: Instant) {
        while let Some(key) = self.timers.pop_due(now) {
            match key {
                TimerKey::Channel(channel) => self.tell(channel, now, |channel| channel.tick(now)),
                TimerKey::Conn(key) => self.conn_timer(key, now),
                TimerKey::Handshakes => self.resume_handshakes(now),
            }
        }
    }

    fn conn_timer(&mut self, key: u64, now: Instant) {
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
            mark(&mut self.dirty, conn);
            self.deliver(key, now);
            if let Err(error) = result {
                return self.broken(key, error, now);
            }
        }
        self.arm(key);
    }
}
