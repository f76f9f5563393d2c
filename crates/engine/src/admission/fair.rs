//! Fairness between the sources of connections: a bounded table that evicts, and a queue that takes turns.
//!
//! Anyone who can reach a port can open connections and leave them open. If newcomers were turned away at a limit, one
//! source could shut out all others. So the table always admits a newcomer and evicts the oldest connection of the
//! source with the most: other sources lose nothing, and a client of the same source needs only a moment to finish its
//! handshake.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::net::IpAddr;

/// The origin of a connection. Addresses that one party can choose freely count as one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    V4([u8; 4]),
    /// A /64 network: its addresses belong to one party.
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

/// A bounded table of connections. Keys are ordered by age: the oldest is the smallest.
pub struct FairTable<K> {
    limit: usize,
    entries: BTreeMap<K, Source>,
    counts: HashMap<Source, usize>,
}

impl<K: Ord + Copy> FairTable<K> {
    pub fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), entries: BTreeMap::new(), counts: HashMap::new() }
    }

    /// Adds a connection. Returns the one that is evicted for it, if the table was full.
    pub fn insert(&mut self, key: K, source: Source) -> Option<K> {
        self.remove(key);
        self.entries.insert(key, source);
        *self.counts.entry(source).or_default() += 1;
        if self.entries.len() <= self.limit {
            return None;
        }
        let most = self.counts.values().copied().max()?;
        let has_most = |source: &Source| self.counts.get(source) == Some(&most);
        let oldest = self.entries.iter().find(|(_, source)| has_most(source)).map(|(key, _)| *key)?;
        self.remove(oldest);
        Some(oldest)
    }

    /// Removes a connection. Returns whether it was in the table.
    pub fn remove(&mut self, key: K) -> bool {
        let Some(source) = self.entries.remove(&key) else { return false };
        if let Some(count) = self.counts.get_mut(&source) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&source);
            }
        }
        true
    }

    /// Returns the source of a connection in the table.
    pub fn source(&self, key: K) -> Option<Source> {
        self.entries.get(&key).copied()
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.entries.len()
    }
}

/// A queue in which sources take turns. Within a source, the oldest key comes first.
pub struct FairQueue<K> {
    entries: HashMap<K, Source>,
    sources: HashMap<Source, Turns<K>>,
    /// The next source is the first one.
    order: BTreeMap<u64, Source>,
    next_turn: u64,
}

/// The keys of one source.
struct Turns<K> {
    next: u64,
    keys: BTreeSet<K>,
}

impl<K: Ord + Copy + Hash> FairQueue<K> {
    pub fn new() -> Self {
        Self { entries: HashMap::new(), sources: HashMap::new(), order: BTreeMap::new(), next_turn: 0 }
    }

    /// Adds a key. Returns false if it is in the queue already.
    pub fn push(&mut self, key: K, source: Source) -> bool {
        if self.entries.contains_key(&key) {
            return false;
        }
        self.entries.insert(key, source);
        let turns = self.sources.entry(source).or_insert_with(|| {
            self.order.insert(self.next_turn, source);
            self.next_turn += 1;
            Turns { next: self.next_turn - 1, keys: BTreeSet::new() }
        });
        turns.keys.insert(key);
        true
    }

    /// Removes a key. Returns whether it was in the queue.
    pub fn remove(&mut self, key: K) -> bool {
        let Some(source) = self.entries.remove(&key) else { return false };
        if let Some(turns) = self.sources.get_mut(&source) {
            turns.keys.remove(&key);
            if turns.keys.is_empty() {
                self.order.remove(&turns.next);
                self.sources.remove(&source);
            }
        }
        true
    }

    /// Removes and returns the next key. The next turn of its source comes after those of all others.
    pub fn pop(&mut self) -> Option<K> {
        let (_, source) = self.order.pop_first()?;
        let turns = self.sources.get_mut(&source)?;
        let key = turns.keys.first().copied()?;
        turns.next = self.next_turn;
        self.order.insert(self.next_turn, source);
        self.next_turn += 1;
        self.remove(key);
        Some(key)
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Source = Source::V4([10, 0, 0, 1]);
    const B: Source = Source::V4([10, 0, 0, 2]);

    #[test]
    fn the_source_with_the_most_is_evicted() {
        let mut table = FairTable::new(4);
        assert_eq!(table.insert(1, B), None);
        for key in 2..5 {
            assert_eq!(table.insert(key, A), None);
        }
        // However many come, one of the same source is evicted.
        for key in 5..100 {
            assert_eq!(table.insert(key, A), Some(key - 3));
        }
        assert_eq!(table.insert(100, B), Some(97));
        assert_eq!(table.len(), 4);
    }

    #[test]
    fn among_equals_the_oldest_is_evicted() {
        let mut table = FairTable::new(3);
        let source = |n: u64| Source::Process(n as i32);
        for key in 0..3u64 {
            assert_eq!(table.insert(key, source(key)), None);
        }
        assert_eq!(table.insert(3, source(3)), Some(0));
        assert!(table.remove(1));
        assert!(!table.remove(1));
        assert_eq!(table.insert(4, source(4)), None);
        assert_eq!(table.insert(5, source(5)), Some(2));
        for key in 3..6 {
            assert!(table.remove(key));
        }
        assert!(table.entries.is_empty() && table.counts.is_empty());
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
        let mut queue = FairQueue::new();
        for key in 0..4 {
            assert!(queue.push(key, A));
        }
        assert!(queue.push(10, B) && !queue.push(10, B));
        assert!(queue.push(11, B));
        queue.remove(1);
        queue.remove(77);
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [0, 10, 2, 11, 3]);
        assert!(queue.is_empty() && queue.sources.is_empty() && queue.order.is_empty());
    }

    #[test]
    fn removed_keys_leave_nothing_behind() {
        let mut queue = FairQueue::new();
        for key in 0..1000 {
            queue.push(key, A);
            queue.push(key + 1000, B);
            queue.remove(key);
        }
        assert_eq!((queue.sources.len(), queue.order.len(), queue.entries.len()), (1, 1, 1000));
        // A source that was gone has its turn after the others.
        queue.push(1, A);
        assert_eq!((queue.pop(), queue.pop(), queue.pop()), (Some(1000), Some(1), Some(1001)));
    }
}
