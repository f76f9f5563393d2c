//! Admission: which unauthenticated connections a reactor keeps, and which TLS handshakes may go on. No I/O; time is an
//! argument.
//!
//! Tasks on this host connect over the unix socket, which admits only processes of the same user. They are counted
//! separately, so that no one on the network can evict them.
//!
//! A reactor spends a bounded part of its time on TLS handshakes that lead to nothing ([`HandshakeBudget`]). When that
//! is used up, further handshakes wait, and sources take turns: first those that authenticated peers have come from. A
//! handshake that ends with an authenticated peer costs nothing, so that a thousand tasks may start together.

mod budget;
mod fair;
#[cfg(test)]
mod simulation;

use std::collections::HashSet;
use std::time::{Duration, Instant};

pub use budget::HandshakeBudget;
use fair::FairQueue;
pub use fair::{FairTable, Source};

/// The most sources of authenticated peers that are remembered.
const KNOWN_SOURCES: usize = 16_384;

/// Where an accepted socket came in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Listener {
    Tcp,
    Unix,
}

pub struct Admission {
    tcp: FairTable<u64>,
    unix: FairTable<u64>,
    /// Evicted connections that are still being told the reason.
    draining: HashSet<u64>,
    budget: HandshakeBudget,
    known_sources: HashSet<Source>,
    /// Handshakes that wait for the budget: from known sources, and the others.
    known: FairQueue<u64>,
    unknown: FairQueue<u64>,
    /// The handshake whose turn it is, until it goes on.
    resumed: Option<u64>,
}

/// An evicted connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted {
    pub key: u64,
    /// It may be told the reason before it is closed. Not many are at a time.
    pub drains: bool,
}

/// Whether a handshake may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handshake {
    Proceeds,
    /// `is_new`: it has not waited before. `wake_at`: the first to wait asks to be woken then.
    Waits {
        is_new: bool,
        wake_at: Option<Instant>,
    },
}

/// The next handshake that has waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Resume(u64),
    WakeAt(Instant),
    Empty,
}

impl Admission {
    /// `limit`: the most unauthenticated connections through each kind of listener.
    pub fn new(limit: usize, now: Instant) -> Self {
        Self {
            tcp: FairTable::new(limit),
            unix: FairTable::new(limit),
            draining: HashSet::new(),
            budget: HandshakeBudget::new(now),
            known_sources: HashSet::new(),
            known: FairQueue::new(),
            unknown: FairQueue::new(),
            resumed: None,
        }
    }

    /// A connection was accepted. Returns the one that is evicted for it.
    pub fn arrived(&mut self, key: u64, listener: Listener, source: Source) -> Option<Evicted> {
        let table = if listener == Listener::Tcp { &mut self.tcp } else { &mut self.unix };
        let evicted = table.insert(key, source)?;
        self.known.remove(evicted);
        self.unknown.remove(evicted);
        let drains = self.draining.len() < self.tcp.limit();
        if drains {
            self.draining.insert(evicted);
        }
        Some(Evicted { key: evicted, drains })
    }

    /// The ClientHello of a task has arrived, or the connection asks again.
    pub fn handshake(&mut self, key: u64, now: Instant) -> Handshake {
        let wait = self.budget.wait(now);
        // Those that wait are woken when there is budget again; others may not overtake them.
        if wait.is_none() && (self.resumed == Some(key) || !self.has_waiting()) {
            self.resumed = None;
            return Handshake::Proceeds;
        }
        let wake_at = wait.filter(|_| !self.has_waiting());
        let source = self.tcp.source(key).unwrap_or(Source::Unknown);
        let is_known = self.known_sources.contains(&source);
        let queue = if is_known { &mut self.known } else { &mut self.unknown };
        // It may have begun to wait before its source was known.
        let is_new = queue.push(key, source) && !(is_known && self.unknown.remove(key));
        Handshake::Waits { is_new, wake_at }
    }

    /// Returns the next handshake to go on with.
    pub fn next(&mut self, now: Instant) -> Next {
        if !self.has_waiting() {
            return Next::Empty;
        }
        if let Some(at) = self.budget.wait(now) {
            return Next::WakeAt(at);
        }
        self.resumed = self.known.pop().or_else(|| self.unknown.pop());
        self.resumed.map_or(Next::Empty, Next::Resume)
    }

    /// A handshake took this time so far.
    pub fn spent(&mut self, time: Duration, now: Instant) {
        self.budget.spend(time, now);
    }

    /// The certificate of a client was verified, after a handshake that took this time. Returns whether others wait.
    pub fn verified(&mut self, key: u64, time: Duration) -> bool {
        self.budget.refund(time);
        if let Some(source) = self.tcp.source(key) {
            if self.known_sources.len() == KNOWN_SOURCES && !self.known_sources.contains(&source) {
                // Members that come back are known again after a handshake.
                self.known_sources.clear();
            }
            self.known_sources.insert(source);
        }
        self.has_waiting()
    }

    /// The connection is authenticated, handed over or closed.
    pub fn removed(&mut self, key: u64) {
        self.known.remove(key);
        self.unknown.remove(key);
        self.draining.remove(&key);
        if !self.tcp.remove(key) {
            self.unix.remove(key);
        }
    }

    fn has_waiting(&self) -> bool {
        !self.known.is_empty() || !self.unknown.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_sources_come_first() {
        let now = Instant::now();
        let mut admission = Admission::new(100, now);
        let host = |n: u8| Source::V4([10, 0, 0, n]);
        for key in 0..6 {
            admission.arrived(key, Listener::Tcp, host(if key == 0 || key > 3 { 1 } else { 2 }));
        }
        assert!(!admission.verified(0, Duration::ZERO));
        admission.removed(0);
        admission.spent(Duration::from_secs(1), now);
        for key in 1..6 {
            let Handshake::Waits { is_new: true, wake_at } = admission.handshake(key, now) else { panic!("proceeds") };
            assert_eq!(wake_at.is_some(), key == 1);
            assert_eq!(admission.handshake(key, now), Handshake::Waits { is_new: false, wake_at: None });
        }
        admission.removed(2);
        let Next::WakeAt(later) = admission.next(now) else { panic!("too soon") };
        let order: Vec<_> = std::iter::from_fn(|| match admission.next(later) {
            Next::Resume(key) => Some(key),
            _ => None,
        })
        .collect();
        assert_eq!(order, [4, 5, 1, 3]);
        assert_eq!(admission.next(later), Next::Empty);
    }

    #[test]
    fn only_a_new_source_makes_room_among_known_ones() {
        let mut admission = Admission::new(100, Instant::now());
        let mut verify = |n: usize| {
            admission.arrived(0, Listener::Tcp, Source::V4([10, (n >> 16) as u8, (n >> 8) as u8, n as u8]));
            admission.verified(0, Duration::ZERO);
            admission.removed(0);
            admission.known_sources.len()
        };
        assert_eq!((0..KNOWN_SOURCES).map(&mut verify).last(), Some(KNOWN_SOURCES));
        assert_eq!(verify(7), KNOWN_SOURCES, "it is known");
        assert_eq!(verify(KNOWN_SOURCES), 1);
    }

    #[test]
    fn few_evicted_connections_are_told_the_reason() {
        let mut admission = Admission::new(4, Instant::now());
        let evicted: Vec<_> =
            (0..20).filter_map(|key| admission.arrived(key, Listener::Tcp, Source::Unknown)).collect();
        assert_eq!(evicted.len(), 16);
        assert!(evicted.iter().enumerate().all(|(at, evicted)| evicted.drains == (at < 4)), "{evicted:?}");
        admission.removed(evicted[0].key);
        assert_eq!(admission.arrived(20, Listener::Tcp, Source::Unknown).map(|evicted| evicted.drains), Some(true));
        // The unix socket has a table of its own.
        assert_eq!(admission.arrived(21, Listener::Unix, Source::Process(1)), None);
    }
}
