//! Random numbers of clients and attackers against one [`Admission`], in virtual time.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

use super::budget::HandshakeBudget;
use super::{Admission, Handshake, Listener, Next, Source};
use crate::random::Random;

/// A connection that was accepted and is not over.
struct Client {
    listener: Listener,
    source: Source,
    /// It completes its handshake; others stop after their hello.
    is_honest: bool,
    waits: bool,
    /// It waits, and its source was known when it last asked.
    is_known: bool,
}

struct World {
    random: Random,
    now: Instant,
    begun: Instant,
    limit: usize,
    admission: Admission,
    clients: BTreeMap<u64, Client>,
    /// Evicted and not yet closed.
    draining: BTreeSet<u64>,
    next_key: u64,
    wake_at: Option<Instant>,
    wasted: Duration,
    verified: u64,
    known: HashSet<Source>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let (now, limit) = (Instant::now(), 4 + random.below(60) as usize);
        Self {
            admission: Admission::new(limit, now),
            random,
            now,
            begun: now,
            limit,
            clients: BTreeMap::new(),
            draining: BTreeSet::new(),
            next_key: 0,
            wake_at: None,
            wasted: Duration::ZERO,
            verified: 0,
            known: HashSet::new(),
        }
    }

    fn counts(&self, listener: Listener) -> HashMap<Source, usize> {
        let mut counts = HashMap::new();
        for client in self.clients.values().filter(|client| client.listener == listener) {
            *counts.entry(client.source).or_default() += 1;
        }
        counts
    }

    fn count(&self, listener: Listener) -> usize {
        self.clients.values().filter(|client| client.listener == listener).count()
    }

    fn arrives(&mut self) {
        let key = self.next_key;
        self.next_key += 1;
        // Sources 0 and 1 attack; the others have a few honest clients.
        let host = if self.random.below(3) == 0 { 2 + self.random.below(20) } else { self.random.below(2) };
        let is_honest = host > 1;
        let (listener, source) = match self.random.below(10) {
            0 => (Listener::Unix, Source::Process(host as i32)),
            _ => (Listener::Tcp, Source::V4([10, 0, 0, host as u8])),
        };
        self.clients.insert(key, Client { listener, source, is_honest, waits: false, is_known: false });
        let before = self.count(listener);
        let evicted = self.admission.arrived(key, listener, source);
        assert_eq!(evicted.is_some(), before > self.limit, "a connection is evicted if and only if the table was full");
        let Some(evicted) = evicted else { return };
        let loser = &self.clients[&evicted.key];
        let (listener, source) = (loser.listener, loser.source);
        let counts = self.counts(listener);
        let most = counts.values().copied().max().unwrap_or_default();
        assert_eq!(counts[&source], most, "another source has more");
        let mut older = self.clients.range(..evicted.key).map(|(_, client)| client);
        let is_rival = |client: &Client| client.listener == listener && counts[&client.source] == most;
        assert!(!older.any(is_rival), "an older connection of a source with as many");
        self.clients.remove(&evicted.key);
        assert_eq!(evicted.drains, self.draining.len() < self.limit);
        if evicted.drains {
            self.draining.insert(evicted.key);
        }
    }

    fn any(&mut self) -> Option<u64> {
        let at = self.random.below(self.clients.len().max(1) as u64) as usize;
        self.clients.keys().nth(at).copied()
    }

    fn leaves(&mut self) {
        if let Some(key) = self.any() {
            self.clients.remove(&key);
            self.admission.removed(key);
        }
        if let Some(key) = self.draining.pop_first() {
            self.admission.removed(key);
        }
    }

    fn says_hello(&mut self, key: u64) {
        let some_wait = self.clients.values().any(|client| client.waits);
        let Some(client) = self.clients.get_mut(&key).filter(|client| client.listener == Listener::Tcp) else { return };
        match self.admission.handshake(key, self.now) {
            Handshake::Proceeds => {
                assert!(!some_wait, "a newcomer overtakes");
                self.shakes_hands(key);
            }
            Handshake::Waits { is_new, wake_at } => {
                assert_eq!(is_new, !client.waits);
                client.waits = true;
                client.is_known = self.known.contains(&client.source);
                if let Some(at) = wake_at {
                    assert!(at > self.now);
                    self.wake_at = Some(at);
                }
                assert!(self.wake_at.is_some(), "a handshake that waits is resumed");
            }
        }
    }

    fn shakes_hands(&mut self, key: u64) {
        let took = Duration::from_micros(100 + self.random.below(400));
        self.now += took;
        self.admission.spent(took, self.now);
        let Some(client) = self.clients.get_mut(&key) else { panic!("a handshake of a connection that is gone") };
        client.waits = false;
        if !client.is_honest {
            self.wasted += took;
            return;
        }
        self.verified += 1;
        self.known.insert(client.source);
        self.clients.remove(&key);
        if self.admission.verified(key, took) {
            self.wake_at = Some(self.now);
        }
        self.admission.removed(key);
    }

    fn wakes(&mut self) {
        if self.wake_at.is_none_or(|at| at > self.now) {
            return;
        }
        self.wake_at = None;
        loop {
            match self.admission.next(self.now) {
                Next::Resume(key) => {
                    let next = &self.clients[&key];
                    assert!(next.waits);
                    let is_passed_over = |client: &Client| client.waits && client.is_known && !next.is_known;
                    assert!(!self.clients.values().any(is_passed_over), "known sources come first");
                    assert_eq!(self.admission.handshake(key, self.now), Handshake::Proceeds);
                    self.shakes_hands(key);
                }
                Next::WakeAt(at) => {
                    assert!(at > self.now);
                    self.wake_at = Some(at);
                    return;
                }
                Next::Empty => {
                    assert!(self.clients.values().all(|client| !client.waits));
                    return;
                }
            }
        }
    }

    fn run(mut self) -> (u64, bool) {
        let mut waited = false;
        for _ in 0..1_000 {
            match self.random.below(10) {
                0..4 => self.arrives(),
                4 => self.leaves(),
                _ => {
                    if let Some(key) = self.any() {
                        self.says_hello(key);
                    }
                }
            }
            self.now += Duration::from_micros(self.random.below(1_000));
            self.wakes();
            waited |= self.clients.values().any(|client| client.waits);
            let due = HandshakeBudget::due(self.now - self.begun);
            // A refund comes after the handshake, so that honest clients may hold back others, never the reverse.
            assert!(self.wasted <= due + Duration::from_micros(500), "{:?} of {due:?} wasted", self.wasted);
            for listener in [Listener::Tcp, Listener::Unix] {
                assert!(self.count(listener) <= self.limit);
            }
        }
        while !self.clients.is_empty() || !self.draining.is_empty() {
            self.leaves();
        }
        let Admission { tcp, unix, draining, known, unknown, .. } = &self.admission;
        assert!(tcp.len() == 0 && unix.len() == 0 && draining.is_empty() && known.is_empty() && unknown.is_empty());
        (self.verified, waited)
    }
}

#[test]
fn random_clients_and_attackers() {
    let (mut verified, mut waited) = (0, 0);
    for seed in 0..100 {
        let (some, waits) = World::new(seed).run();
        verified += some;
        waited += u64::from(waits);
    }
    assert!(verified > 1_000 && waited > 30, "{verified} verified; in {waited} runs handshakes waited");
}
