//! What simulations have had, and how long they take.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::setup::Scenario;
use starwire_protocol::code;

/// A simulation takes no longer than this, in real time.
const LONGEST: Duration = Duration::from_secs(300);
/// Between two reports.
pub const PAUSE: Duration = Duration::from_secs(5);

/// Each happens within a few seeds.
const FAULTS: [&str; 20] = [
    "a client that is no task",
    "a connect hangs",
    "a connect is refused",
    "a connection is cut early",
    "a connection is reset",
    "a host is unreachable",
    "a look-up takes long",
    "a name has a wrong address",
    "a name is unknown",
    "a receive is short",
    "a send is short",
    "a task dies",
    "a task pauses",
    "a task stops in order",
    "an accept fails",
    "bytes are late",
    "no memory to send",
    "one direction is cut",
    "the machine stands still",
    "two tasks are cut off from each other",
];

/// The fail points of tasks without a folder for their state, but for two where tasks seldom die: a plan that is
/// registered, or evicted.
const POINTS: [&str; 5] = [
    "a connection is accepted",
    "a plan is compiled, and nobody can use it yet",
    "a star call has run, and has no answer yet",
    "a star call is read, and does not run yet",
    "part of a payload is sent",
];

/// What one simulation has had.
#[derive(Debug, PartialEq, Eq)]
pub struct Found {
    /// Requests by the code of their end.
    pub ended: BTreeMap<i32, u64>,
    /// Tasks that died at fail points.
    pub deaths: BTreeMap<&'static str, u64>,
    /// Star calls that succeeded although they had lost a connection.
    pub saved: u64,
    pub faults: BTreeMap<&'static str, u64>,
    pub kinds: Vec<(Scenario, &'static str)>,
    /// In virtual time.
    pub time: Duration,
}

/// What several simulations have had.
#[derive(Default)]
pub struct Tally {
    seeds: u64,
    time: Duration,
    ended: BTreeMap<i32, u64>,
    deaths: BTreeMap<&'static str, u64>,
    saved: u64,
    faults: BTreeMap<&'static str, u64>,
    kinds: BTreeSet<(Scenario, &'static str)>,
}

impl Tally {
    pub fn add(&mut self, found: Found) {
        self.seeds += 1;
        self.time += found.time;
        self.saved += found.saved;
        found.ended.into_iter().for_each(|(code, count)| *self.ended.entry(code).or_default() += count);
        found.deaths.into_iter().for_each(|(point, count)| *self.deaths.entry(point).or_default() += count);
        found.faults.into_iter().for_each(|(fault, count)| *self.faults.entry(fault).or_default() += count);
        self.kinds.extend(found.kinds);
    }

    pub fn has_all_faults(&self) -> bool {
        FAULTS.iter().all(|fault| self.faults.contains_key(fault))
            && POINTS.iter().all(|point| self.deaths.contains_key(point))
    }

    /// Everything has happened.
    pub fn check(&self) {
        let codes: Vec<i32> = self.ended.keys().copied().collect();
        let errors =
            [code::CANCELLED, code::DEADLINE_EXCEEDED, code::RESOURCE_EXHAUSTED, code::ABORTED, code::UNAVAILABLE];
        assert_eq!(codes, [&[0][..], &errors].concat(), "{:?}", self.ended);
        assert!(self.saved > 0);
        assert!(self.has_all_faults(), "{:?}; tasks died at these points: {:?}", self.faults, self.deaths);
        let kinds = Scenario::ALL.iter().flat_map(|scenario| ["TLS", "names", "secret"].map(|way| (*scenario, way)));
        assert!(kinds.eq(self.kinds.iter().copied()), "{:?}", self.kinds);
    }

    /// Says how far it is. `took`: in real time.
    #[expect(clippy::print_stderr, reason = "for whoever waits for it")]
    pub fn report(&self, last: u64, took: Duration) {
        let (time, took) = (self.time.as_secs_f64(), took.as_secs_f64());
        let (seeds, rate) = (self.seeds, time / took);
        eprintln!("simulated {seeds} seeds to {last}: {time:.0} s in {took:.0} s, {rate:.1} virtual seconds a second");
    }
}

/// Ends the process if a simulation takes too long.
pub struct Watchdog(Arc<Mutex<Option<(u64, Instant)>>>);

impl Watchdog {
    #[expect(clippy::print_stderr, reason = "for whoever runs the test")]
    pub fn new() -> Self {
        let current: Arc<Mutex<Option<(u64, Instant)>>> = Arc::default();
        let weak = Arc::downgrade(&current);
        std::thread::spawn(move || {
            while let Some(current) = weak.upgrade() {
                let now = *current.lock().unwrap();
                drop(current);
                if let Some((seed, _)) = now.filter(|(_, began)| began.elapsed() > LONGEST) {
                    eprintln!("the simulation of seed {seed} takes longer than {LONGEST:?}");
                    std::process::abort();
                }
                std::thread::sleep(Duration::from_secs(1));
            }
        });
        Self(current)
    }

    pub fn begins(&self, seed: u64) {
        *self.0.lock().unwrap() = Some((seed, Instant::now()));
    }
}
