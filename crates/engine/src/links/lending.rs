//! Tasks of one host that copy large payloads straight from each other's memory.

use std::io;

use super::Links;
use crate::api::{Host, Level};
use crate::config::UnixSockets;
use crate::system::peer_memory::PeerMemory;
use starwire_protocol::{FEATURE_LENDING, Settings, code};

impl<H: Host> Links<H> {
    /// For a new connection over a unix socket.
    pub(super) fn offer_loans(&self, settings: &mut Settings) {
        if self.shared.config.unix == UnixSockets::Auto {
            settings.features |= FEATURE_LENDING;
        }
    }

    /// The process at the other end of a unix socket.
    pub(super) fn met_local_peer(&mut self, key: u64, pid: i32) {
        let random = self.random();
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.on_this_host = true;
        if self.shared.config.unix != UnixSockets::Auto {
            return;
        }
        if self.shared.host.lends() {
            conn.lend(random);
        }
        conn.peer_memory = PeerMemory::of(pid).filter(|_| !self.shared.unreadable.contains(pid));
    }

    pub(super) fn cannot_borrow(&mut self, key: u64, error: &io::Error) {
        let Some(conn) = self.conns.get(&key) else { return };
        // A peer that has exited or closed the connection is no reason to stop borrowing; unreadable memory that the
        // peer vouches for is.
        let is_gone = error.raw_os_error().is_none();
        let pid = conn.peer_memory.as_ref().map(PeerMemory::pid).filter(|_| !is_gone);
        let is_news = pid.is_some_and(|pid| self.shared.unreadable.insert(pid));
        // Processes that lie may be many.
        if is_news && self.shared.log_limiter.allows_event("lent memory", self.dispatch.now) {
            let line = format!(
                "starwire: cannot read the memory that {} lent: {error}; using the socket for this process from now on",
                conn.name
            );
            self.shared.host.log(Level::Warning, &line);
        }
        self.lose(key, code::UNAVAILABLE, unread(error));
    }
}

/// Why a connection is lost whose loan cannot be read. A peer that is gone is told of as if its socket had ended first,
/// in gRPC's words: programs look for them.
fn unread(error: &io::Error) -> String {
    match error.raw_os_error() {
        None => format!("Socket closed by the peer: cannot read the memory that it lent: {error}"),
        Some(_) => format!("cannot read the memory that it lent: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_is_gone_is_told_of_in_the_words_of_grpc() {
        assert!(unread(&io::Error::other("the peer has revoked the loan")).starts_with("Socket closed"));
        assert!(!unread(&io::Error::from_raw_os_error(1)).contains("Socket closed"));
    }
}
