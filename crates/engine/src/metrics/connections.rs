//! The table of connections, which enter and leave it by themselves; readable from any thread without asking a reactor.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::cells::Counter;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The peer connected and sends requests.
    Incoming,
    /// This side connected and sends requests.
    Outgoing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Connecting,
    Handshake,
    Ready,
    /// One side sent GOODBYE; requests in flight are still answered.
    Draining,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            State::Connecting => "connecting",
            State::Handshake => "handshake",
            State::Ready => "ready",
            State::Draining => "draining",
        }
    }

    fn from_code(code: u8) -> Self {
        match code {
            0 => State::Connecting,
            1 => State::Handshake,
            2 => State::Ready,
            _ => State::Draining,
        }
    }

    fn code(self) -> u8 {
        match self {
            State::Connecting => 0,
            State::Handshake => 1,
            State::Ready => 2,
            State::Draining => 3,
        }
    }
}

/// The current state of a connection.
#[derive(Clone, Debug)]
pub struct ConnectionFacts {
    pub direction: Direction,
    pub state: State,
    /// The peer's task; empty before the handshake.
    pub peer: String,
    pub address: String,
    pub reactor: usize,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub in_flight: u64,
    pub age: Duration,
}

/// The traffic with a peer since it was first seen, over all connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerFacts {
    /// Its task, or [`OTHER_PEERS`].
    pub peer: String,
    pub bytes_in: u64,
    pub bytes_out: u64,
    /// Open ones.
    pub connections: u64,
    pub in_flight: u64,
}

/// Peers that are told apart, first come, first served; the rest counts as one, because a monitoring system keeps a
/// series for each.
pub const MAX_PEERS: usize = 64;
pub const OTHER_PEERS: &str = "other";

/// The table of an engine.
#[derive(Debug, Default)]
pub struct Connections {
    next: AtomicU64,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    entries: BTreeMap<u64, Arc<Entry>>,
    /// Bytes received from and sent to each peer over connections that have ended.
    ended: BTreeMap<String, (u64, u64)>,
}

impl Table {
    /// Under which name a peer counts.
    fn name<'a>(&self, peer: &'a str) -> &'a str {
        if self.ended.contains_key(peer) { peer } else { OTHER_PEERS }
    }

    fn meet(&mut self, peer: &str) {
        if self.ended.len() < MAX_PEERS {
            self.ended.entry(peer.to_owned()).or_default();
        }
    }

    fn leave(&mut self, number: u64) {
        let Some(entry) = self.entries.remove(&number) else { return };
        let facts = entry.facts();
        if !facts.peer.is_empty() {
            let ended = self.ended.entry(self.name(&facts.peer).to_owned()).or_default();
            ended.0 = ended.0.wrapping_add(facts.bytes_in);
            ended.1 = ended.1.wrapping_add(facts.bytes_out);
        }
    }
}

impl Connections {
    /// Enters a connection. It leaves when the guard is dropped.
    pub fn enter(
        self: &Arc<Self>,
        direction: Direction,
        state: State,
        address: &str,
        reactor: usize,
    ) -> ConnectionEntry {
        let number = self.next.fetch_add(1, Relaxed);
        let entry = Arc::new(Entry {
            direction,
            state: AtomicU8::new(state.code()),
            peer: Mutex::new(String::new()),
            address: address.to_owned(),
            reactor,
            opened: Instant::now(),
            bytes_in: Counter::default(),
            bytes_out: Counter::default(),
            in_flight: AtomicU64::new(0),
        });
        self.lock().entries.insert(number, Arc::clone(&entry));
        ConnectionEntry { table: Arc::clone(self), number, entry }
    }

    /// Oldest first.
    pub fn list(&self) -> Vec<ConnectionFacts> {
        let entries: Vec<Arc<Entry>> = self.lock().entries.values().cloned().collect();
        entries.iter().map(|entry| entry.facts()).collect()
    }

    /// By name; at most [`MAX_PEERS`] and [`OTHER_PEERS`]. The numbers of bytes never fall.
    pub fn peers(&self) -> Vec<PeerFacts> {
        let table = self.lock();
        let mut peers: BTreeMap<&str, PeerFacts> = BTreeMap::new();
        for (peer, (bytes_in, bytes_out)) in &table.ended {
            let facts = PeerFacts { bytes_in: *bytes_in, bytes_out: *bytes_out, ..PeerFacts::default() };
            peers.insert(peer, facts);
        }
        let live: Vec<ConnectionFacts> = table.entries.values().map(|entry| entry.facts()).collect();
        for connection in live.iter().filter(|connection| !connection.peer.is_empty()) {
            let facts = peers.entry(table.name(&connection.peer)).or_default();
            facts.bytes_in = facts.bytes_in.wrapping_add(connection.bytes_in);
            facts.bytes_out = facts.bytes_out.wrapping_add(connection.bytes_out);
            facts.connections += 1;
            facts.in_flight = facts.in_flight.saturating_add(connection.in_flight);
        }
        peers.into_iter().map(|(peer, facts)| PeerFacts { peer: peer.to_owned(), ..facts }).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's place in the table, held and written by the reactor that owns the connection.
#[derive(Debug)]
pub struct ConnectionEntry {
    table: Arc<Connections>,
    number: u64,
    entry: Arc<Entry>,
}

impl ConnectionEntry {
    pub fn set_state(&self, state: State) {
        self.entry.state.store(state.code(), Relaxed);
    }

    pub fn set_peer(&self, task: &str) {
        self.table.lock().meet(task);
        task.clone_into(&mut self.entry.peer.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub fn add_bytes_in(&self, n: u64) {
        self.entry.bytes_in.add(n);
    }

    pub fn add_bytes_out(&self, n: u64) {
        self.entry.bytes_out.add(n);
    }

    pub fn set_in_flight(&self, n: usize) {
        self.entry.in_flight.store(n as u64, Relaxed);
    }
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        self.table.lock().leave(self.number);
    }
}

#[derive(Debug)]
struct Entry {
    direction: Direction,
    state: AtomicU8,
    peer: Mutex<String>,
    address: String,
    reactor: usize,
    opened: Instant,
    bytes_in: Counter,
    bytes_out: Counter,
    in_flight: AtomicU64,
}

impl Entry {
    fn facts(&self) -> ConnectionFacts {
        ConnectionFacts {
            direction: self.direction,
            state: State::from_code(self.state.load(Relaxed)),
            peer: self.peer.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            address: self.address.clone(),
            reactor: self.reactor,
            bytes_in: self.bytes_in.get(),
            bytes_out: self.bytes_out.get(),
            in_flight: self.in_flight.load(Relaxed),
            age: self.opened.elapsed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_come_change_and_go() {
        let table = Arc::new(Connections::default());
        let first = table.enter(Direction::Incoming, State::Handshake, "10.0.0.1:5", 0);
        let second = table.enter(Direction::Outgoing, State::Connecting, "unix:@x", 1);
        assert_eq!(table.list()[0].peer, "");
        for state in [State::Connecting, State::Handshake, State::Ready, State::Draining] {
            first.set_state(state);
            assert_eq!(table.list()[0].state, state);
        }
        first.set_peer("/job:ps/task:0");
        first.add_bytes_in(3);
        first.add_bytes_in(4);
        first.add_bytes_out(5);
        first.set_in_flight(6);
        let list = table.list();
        assert_eq!(list.len(), 2);
        assert_eq!(
            (list[0].peer.as_str(), list[0].bytes_in, list[0].bytes_out, list[0].in_flight),
            ("/job:ps/task:0", 7, 5, 6)
        );
        assert_eq!((list[1].direction, list[1].address.as_str(), list[1].reactor), (Direction::Outgoing, "unix:@x", 1));
        drop(first);
        assert_eq!(table.list().len(), 1);
        drop(second);
        assert!(table.list().is_empty());
    }

    #[test]
    fn traffic_of_a_peer_outlives_its_connections() {
        let table = Arc::new(Connections::default());
        let enter = |peer: &str, bytes: u64| {
            let entry = table.enter(Direction::Incoming, State::Ready, "a:1", 0);
            entry.set_peer(peer);
            entry.add_bytes_in(bytes);
            entry.set_in_flight(1);
            entry
        };
        let nameless = table.enter(Direction::Incoming, State::Handshake, "b:1", 0);
        nameless.add_bytes_in(1);
        drop((enter("worker", 5), enter("worker", 6)));
        let again = enter("worker", 7);
        let worker = PeerFacts { peer: "worker".to_owned(), bytes_in: 18, bytes_out: 0, connections: 1, in_flight: 1 };
        assert_eq!(table.peers(), std::slice::from_ref(&worker));
        drop(again);
        assert_eq!(table.peers(), [PeerFacts { connections: 0, in_flight: 0, ..worker }]);
    }

    #[test]
    fn only_so_many_peers_are_told_apart() {
        let table = Arc::new(Connections::default());
        for n in 0..2 * MAX_PEERS {
            let entry = table.enter(Direction::Incoming, State::Ready, "a:1", 0);
            entry.set_peer(&format!("worker {n}"));
            entry.add_bytes_out(10);
        }
        let late = table.enter(Direction::Incoming, State::Ready, "a:1", 0);
        late.set_peer("late");
        late.add_bytes_out(3);
        let peers = table.peers();
        assert_eq!(peers.len(), MAX_PEERS + 1);
        let other = peers.iter().find(|peer| peer.peer == OTHER_PEERS).unwrap();
        assert_eq!((other.bytes_out, other.connections), (10 * MAX_PEERS as u64 + 3, 1));
        assert_eq!(peers.iter().find(|peer| peer.peer == "worker 5").unwrap().bytes_out, 10);
    }
}
