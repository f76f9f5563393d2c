//! Tasks of one host that copy large payloads straight from each other's memory.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::owner::Level;
use super::peer_memory::PeerMemory;
use super::shard::Shard;
use crate::config::Shortcut;
use crate::protocol::{FEATURE_LENDING, Settings, code};

/// The kernel allowed it and then did not do it: this process does not try again.
static GIVEN_UP: AtomicBool = AtomicBool::new(false);

impl Shard {
    /// For a new connection over a unix socket.
    pub(super) fn offer_loans(&self, settings: &mut Settings) {
        if self.shared.config.loans == Shortcut::Auto {
            settings.features |= FEATURE_LENDING;
        }
    }

    /// Who is at the other end of a unix socket.
    pub(super) fn met_local_peer(&mut self, key: u64, pid: i32) {
        let random = self.random();
        let Some(conn) = self.conns.get_mut(&key).filter(|_| self.shared.config.loans == Shortcut::Auto) else {
            return;
        };
        if self.shared.owner.lends() {
            conn.lend(random);
        }
        conn.peer_memory = PeerMemory::of(pid).filter(|_| !GIVEN_UP.load(Relaxed));
    }

    pub(super) fn cannot_borrow(&mut self, key: u64, error: &io::Error) {
        let Some(conn) = self.conns.get(&key) else { return };
        // A peer that has ended, or has given the connection up, is no reason to do without; what cannot be read although the peer vouches for it, is.
        let is_gone = error.raw_os_error().is_none();
        if !is_gone && !GIVEN_UP.swap(true, Relaxed) {
            let line = format!("starwire: cannot read what {} lent: {error}; from now on through sockets", conn.name);
            self.shared.owner.log(Level::Warning, &line);
        }
        self.lose(key, code::UNAVAILABLE, format!("cannot read what it lent: {error}"));
    }
}
