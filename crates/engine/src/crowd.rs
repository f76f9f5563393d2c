//! Bounded places for connections, and who loses one.
//!
//! Anyone who can reach a port can open connections and leave them open. If newcomers were turned away at a limit, one
//! stranger could shut out all others. So a newcomer is always admitted, and the source with the most connections loses
//! its oldest: other sources lose nothing, and a client of the same source needs only a moment to finish its handshake.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::net::IpAddr;

/// The origin of a connection. Addresses that one stranger can choose freely count as one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    V4([u8; 4]),
    /// A network: its addresses belong to one party.
    V6([u8; 8]),
    /// A process of this host.
    Process(i32),
    Unknown,
}

impl Source {
    pub fn of_ip(ip: IpAddr) -> Self {
        match ip.to_canonical() {
            IpAddr::V4(v4) => Source::V4(v4.octets()),
            IpAddr::V6(v6) => {
                let mut network = [0; 8];
                network.copy_from_slice(&v6.octets()[..8]);
                Source::V6(network)
            }
        }
    }
}

/// The holders of a bounded number of places. Keys are ordered by age: the oldest is the smallest.
pub struct Crowd<K> {
    limit: usize,
    members: BTreeMap<K, Source>,
    sources: HashMap<Source, usize>,
}

impl<K: Ord + Copy> Crowd<K> {
    pub fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), members: BTreeMap::new(), sources: HashMap::new() }
    }

    /// Admits a newcomer. Some: the one that loses its place.
    pub fn enter(&mut self, key: K, source: Source) -> Option<K> {
        self.leave(key);
        self.members.insert(key, source);
        *self.sources.entry(source).or_default() += 1;
        if self.members.len() <= self.limit {
            return None;
        }
        let most = self.sources.values().copied().max()?;
        let of_the_most = |source: &Source| self.sources.get(source) == Some(&most);
        let oldest = self.members.iter().find(|(_, source)| of_the_most(source)).map(|(key, _)| *key)?;
        self.leave(oldest);
        Some(oldest)
    }

    /// Releases a place. False: it had none.
    pub fn leave(&mut self, key: K) -> bool {
        let Some(source) = self.members.remove(&key) else { return false };
        if let Some(count) = self.sources.get_mut(&source) {
            *count -= 1;
            if *count == 0 {
                self.sources.remove(&source);
            }
        }
        true
    }

    /// Of a holder of a place.
    pub fn source(&self, key: K) -> Option<Source> {
        self.members.get(&key).copied()
    }

    pub fn limit(&self) -> usize {
        self.limit
    }
}

/// Those who wait to be served one after another: sources take turns, and each source's oldest comes first.
pub struct Queue<K> {
    members: HashMap<K, Source>,
    sources: HashMap<Source, Line<K>>,
    turns: BTreeMap<u64, Source>,
    next_turn: u64,
}

/// Those of one source.
struct Line<K> {
    turn: u64,
    members: BTreeSet<K>,
}

impl<K: Ord + Copy + Hash> Queue<K> {
    pub fn new() -> Self {
        Self { members: HashMap::new(), sources: HashMap::new(), turns: BTreeMap::new(), next_turn: 0 }
    }

    /// False: it waits already.
    pub fn enter(&mut self, key: K, source: Source) -> bool {
        if self.members.contains_key(&key) {
            return false;
        }
        self.members.insert(key, source);
        let line = self.sources.entry(source).or_insert_with(|| {
            self.turns.insert(self.next_turn, source);
            self.next_turn += 1;
            Line { turn: self.next_turn - 1, members: BTreeSet::new() }
        });
        line.members.insert(key);
        true
    }

    pub fn leave(&mut self, key: K) {
        let Some(source) = self.members.remove(&key) else { return };
        let Some(line) = self.sources.get_mut(&source) else { return };
        line.members.remove(&key);
        if line.members.is_empty() {
            self.turns.remove(&line.turn);
            self.sources.remove(&source);
        }
    }

    /// The next one, which leaves. Its source's next turn comes after those of all others.
    pub fn pop(&mut self) -> Option<K> {
        let (_, source) = self.turns.pop_first()?;
        let line = self.sources.get_mut(&source)?;
        let key = line.members.first().copied()?;
        line.turn = self.next_turn;
        self.turns.insert(self.next_turn, source);
        self.next_turn += 1;
        self.leave(key);
        Some(key)
    }

    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Source = Source::V4([10, 0, 0, 1]);
    const B: Source = Source::V4([10, 0, 0, 2]);

    #[test]
    fn whoever_has_most_makes_way() {
        let mut crowd = Crowd::new(4);
        assert_eq!(crowd.enter(1, B), None);
        for key in 2..5 {
            assert_eq!(crowd.enter(key, A), None);
        }
        // However many come, it is always one of theirs that goes.
        for key in 5..100 {
            assert_eq!(crowd.enter(key, A), Some(key - 3));
        }
        assert_eq!(crowd.enter(100, B), Some(97));
        assert_eq!(crowd.members.len(), 4);
    }

    #[test]
    fn among_equals_the_oldest_makes_way() {
        let mut crowd = Crowd::new(3);
        let source = |n: u64| Source::Process(n as i32);
        for key in 0..3u64 {
            assert_eq!(crowd.enter(key, source(key)), None);
        }
        assert_eq!(crowd.enter(3, source(3)), Some(0));
        assert!(crowd.leave(1));
        assert!(!crowd.leave(1));
        assert_eq!(crowd.enter(4, source(4)), None);
        assert_eq!(crowd.enter(5, source(5)), Some(2));
        for key in 3..6 {
            assert!(crowd.leave(key));
        }
        assert!(crowd.members.is_empty() && crowd.sources.is_empty());
    }

    #[test]
    fn a_network_of_addresses_is_one_source() {
        let of = |ip: &str| Source::of_ip(ip.parse().unwrap());
        assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::9"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:10.0.0.1"), A);
        assert_ne!(A, B);
    }

    #[test]
    fn sources_take_turns() {
        let mut queue = Queue::new();
        for key in 0..4 {
            assert!(queue.enter(key, A));
        }
        assert!(queue.enter(10, B) && !queue.enter(10, B));
        assert!(queue.enter(11, B));
        queue.leave(1);
        queue.leave(77);
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [0, 10, 2, 11, 3]);
        assert!(queue.is_empty() && queue.sources.is_empty() && queue.turns.is_empty());
    }

    #[test]
    fn those_who_leave_leave_nothing() {
        let mut queue = Queue::new();
        for key in 0..1000 {
            queue.enter(key, A);
            queue.enter(key + 1000, B);
            queue.leave(key);
        }
        assert_eq!((queue.sources.len(), queue.turns.len(), queue.members.len()), (1, 1, 1000));
        // Whoever has just come back has waited less than the others.
        queue.enter(1, A);
        assert_eq!((queue.pop(), queue.pop(), queue.pop()), (Some(1000), Some(1), Some(1001)));
    }
}
