//! The worker processes that a server knows: their usage of it, added up over all connections of a process and over all
//! processes, and the calls that they may make again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Refused;
use super::call_log::CallLog;
use crate::config::StepLimits;
use starwire_state::codec::{Reader, put_bytes, put_u64};

/// For so long after its last connection, a process gets the replies that it has missed.
const GRACE: Duration = Duration::from_secs(60);
/// So many processes without a connection are known.
const MOST_GONE: usize = 4096;
/// After so long without a connection, a process repeats none of its calls: these wait for a connection for an hour at
/// most (STARWIRE_RECOVER_S).
const LONG_GONE: Duration = Duration::from_secs(24 * 60 * 60);

/// One incarnation of a task, with all its connections.
type Identity = (String, u64);

/// One process.
pub struct Account {
    name: String,
    incarnation: u64,
    calls: AtomicU64,
    values: AtomicU64,
    bytes: AtomicU64,
    all: Arc<AtomicU64>,
    log: Mutex<CallLog>,
}

struct Entry {
    account: Arc<Account>,
    connections: usize,
    /// When the last connection ended.
    gone: Option<Instant>,
}

/// The accounts of all processes.
#[derive(Default)]
pub struct Accounts {
    known: Mutex<Known>,
    /// Bytes of all of them.
    bytes: Arc<AtomicU64>,
}

#[derive(Default)]
struct Known {
    entries: HashMap<Identity, Entry>,
    /// Some were dropped that might come back, the last ones then.
    dropped: Option<Instant>,
}

impl Accounts {
    /// A process has another connection. Returns its account.
    pub fn came(&self, name: &str, incarnation: u64, now: Instant) -> Arc<Account> {
        let mut known = self.known();
        known.tidy(now);
        let Known { entries, dropped } = &mut *known;
        let entry = entries.entry((name.to_owned(), incarnation)).or_insert_with(|| {
            let log = if dropped.is_some() { CallLog::incomplete() } else { CallLog::complete() };
            self.entry((name.to_owned(), incarnation), log)
        });
        entry.connections += 1;
        entry.gone = None;
        entry.account.clone()
    }

    /// A connection of this process has ended.
    pub fn gone(&self, account: &Account, now: Instant) {
        let mut known = self.known();
        if let Some(entry) = known.entries.get_mut(&(account.name.clone(), account.incarnation)) {
            entry.connections = entry.connections.saturating_sub(1);
            entry.gone = (entry.connections == 0).then_some(now);
        }
        known.tidy(now);
    }

    fn entry(&self, (name, incarnation): Identity, log: CallLog) -> Entry {
        let (calls, values, bytes) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(log.bytes()));
        self.bytes.fetch_add(log.bytes(), Relaxed);
        let log = Mutex::new(log);
        let account = Account { name, incarnation, calls, values, bytes, all: self.bytes.clone(), log };
        Entry { account: Arc::new(account), connections: 0, gone: None }
    }

    /// The logs of all processes, for [`Accounts::load`].
    pub fn save(&self) -> Vec<u8> {
        let known = self.known();
        let mut out = Vec::new();
        put_u64(&mut out, known.dropped.is_some().into());
        let mut entries: Vec<_> = known.entries.iter().collect();
        entries.sort_unstable_by_key(|(identity, _)| *identity);
        put_u64(&mut out, entries.len() as u64);
        for ((name, incarnation), entry) in entries {
            put_bytes(&mut out, name.as_bytes());
            put_u64(&mut out, *incarnation);
            entry.account.log().save(&mut out);
        }
        out
    }

    /// The processes of an earlier life of this server, none of which is connected.
    pub fn load(&self, saved: &[u8], now: Instant) -> Option<()> {
        let mut saved = Reader(saved);
        let mut known = self.known();
        known.dropped = (saved.u64()? != 0).then_some(now);
        for _ in 0..saved.count(48)? {
            let identity = (String::from_utf8(saved.bytes()?.to_vec()).ok()?, saved.u64()?);
            let entry = Entry { gone: Some(now), ..self.entry(identity.clone(), CallLog::load(&mut saved)?) };
            known.entries.insert(identity, entry);
        }
        saved.0.is_empty().then_some(())
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    /// Forgets the replies of processes that have been gone for too long, and whole processes if that is longer, or if
    /// there are very many.
    fn tidy(&mut self, now: Instant) {
        let is_long_ago = |at: Instant| at + LONG_GONE <= now;
        self.entries.retain(|_, entry| {
            let stays = !entry.gone.is_some_and(is_long_ago);
            if !stays {
                entry.account.change_log(CallLog::forget);
            }
            stays
        });
        self.dropped = self.dropped.filter(|at| !is_long_ago(*at));
        let mut gone = Vec::new();
        for (identity, entry) in &self.entries {
            let Some(at) = entry.gone else { continue };
            if at + GRACE <= now {
                entry.account.change_log(CallLog::forget);
            }
            gone.push((at, identity));
        }
        if gone.len() > MOST_GONE {
            gone.sort_unstable();
            // Half of them, so that this does not happen each time.
            let dropped: Vec<Identity> =
                gone[..MOST_GONE / 2].iter().map(|(_, identity)| (*identity).clone()).collect();
            for entry in dropped.iter().filter_map(|identity| self.entries.remove(identity)) {
                entry.account.change_log(CallLog::forget);
            }
            self.dropped = Some(now);
        }
    }
}

impl Account {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn log(&self) -> MutexGuard<'_, CallLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A change after which fewer replies may stay.
    pub(super) fn change_log<R>(&self, change: impl FnOnce(&mut CallLog) -> R) -> R {
        let mut log = self.log();
        let before = log.bytes();
        let result = change(&mut log);
        self.give(0, before - log.bytes());
        result
    }

    pub(super) fn take_call(&self, limits: &StepLimits) -> Result<(), Refused> {
        if self.calls.fetch_add(1, Relaxed) < limits.calls {
            return Ok(());
        }
        self.calls.fetch_sub(1, Relaxed);
        Err(Refused::Calls { peer: self.name.clone(), max: limits.calls })
    }

    pub(super) fn give_calls(&self, calls: u64) {
        self.calls.fetch_sub(calls, Relaxed);
    }

    /// Reserves room for more values and bytes, while the peer will release some bytes. A peer may use at most as much
    /// as is left for the others, so that no peer takes everything.
    pub(super) fn take(&self, values: u64, bytes: u64, back: u64, limits: &StepLimits) -> Result<(), Refused> {
        let all = self.all.fetch_add(bytes, Relaxed).saturating_add(bytes).saturating_sub(back);
        let own = self.bytes.fetch_add(bytes, Relaxed).saturating_add(bytes).saturating_sub(back);
        let own_values = self.values.fetch_add(values, Relaxed).saturating_add(values);
        let left = limits.all_bytes.saturating_sub(all);
        let refused = if own_values > limits.values || own > limits.bytes {
            Refused::Values {
                peer: self.name.clone(),
                values: own_values,
                bytes: own,
                max_values: limits.values,
                max_bytes: limits.bytes,
            }
        } else if own > left && bytes > back {
            Refused::Left { peer: self.name.clone(), bytes: own, left, max: limits.all_bytes }
        } else {
            return Ok(());
        };
        self.give(values, bytes);
        Err(refused)
    }

    pub(super) fn give(&self, values: u64, bytes: u64) {
        self.values.fetch_sub(values, Relaxed);
        self.bytes.fetch_sub(bytes, Relaxed);
        self.all.fetch_sub(bytes, Relaxed);
    }

    #[cfg(test)]
    pub(super) fn has(&self) -> (u64, u64, u64) {
        (self.calls.load(Relaxed), self.values.load(Relaxed), self.bytes.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::super::call_log::Begin;
    use super::*;
    use crate::api::Ticket;
    use starwire_protocol::star::CallId;

    const LIMITS: StepLimits = StepLimits { values: 100, bytes: 1000, calls: 2, all_bytes: 1200 };

    #[test]
    fn connections_of_one_peer_share_what_one_may_have() {
        let (accounts, now) = (Accounts::default(), Instant::now());
        let (first, second) = (accounts.came("worker", 1, now), accounts.came("worker", 1, now));
        first.take_call(&LIMITS).unwrap();
        second.take_call(&LIMITS).unwrap();
        assert_eq!(first.take_call(&LIMITS), Err(Refused::Calls { peer: "worker".into(), max: 2 }));
        accounts.came("worker", 2, now).take_call(&LIMITS).unwrap();
        second.give_calls(1);
        first.take_call(&LIMITS).unwrap();
        first.take(60, 10, 0, &LIMITS).unwrap();
        assert!(matches!(second.take(41, 10, 0, &LIMITS), Err(Refused::Values { values: 101, .. })));
        second.take(40, 10, 0, &LIMITS).unwrap();
        assert_eq!(first.has(), (2, 100, 20));
        first.give(100, 20);
        assert_eq!(accounts.came("worker", 1, now).has(), (2, 0, 0));
    }

    #[test]
    fn a_process_without_connections_is_remembered_for_a_while() {
        let call_id = |number, attempt| CallId { lane: 0, attempt, number: NonZeroU64::new(number).unwrap() };
        let ticket = Ticket { conn: 1, id: 1 };
        let (accounts, start) = (Accounts::default(), Instant::now());
        let (first, second) = (accounts.came("worker", 1, start), accounts.came("worker", 1, start));
        assert_eq!(first.log().begin(call_id(1, 0), ticket, 9), Ok(Begin::Run));
        let late = start + GRACE * 2;
        accounts.gone(&first, start);
        assert_eq!(accounts.came("worker", 2, late).log().begin(call_id(1, 1), ticket, 9), Ok(Begin::Run), "another");
        assert_eq!(second.log().begin(call_id(1, 1), ticket, 9), Ok(Begin::Waits), "it has a connection");
        accounts.gone(&second, late);
        let back = accounts.came("worker", 1, late + GRACE - Duration::from_secs(1));
        assert_eq!(back.log().begin(call_id(1, 2), ticket, 9), Ok(Begin::Waits));
        accounts.gone(&back, late);
        let back = accounts.came("worker", 1, late + GRACE);
        assert_eq!(back.log().begin(call_id(1, 3), ticket, 9), Err(Refused::MayHaveRun));
        assert_eq!(back.log().begin(call_id(2, 1), ticket, 9), Ok(Begin::Run), "it is known that this one never came");
    }

    #[test]
    fn accounts_that_were_saved_have_the_same_logs() {
        let call_id = |number, attempt| CallId { lane: 0, attempt, number: NonZeroU64::new(number).unwrap() };
        let ticket = Ticket { conn: 1, id: 1 };
        let (accounts, start) = (Accounts::default(), Instant::now());
        for (name, incarnation, number) in [("worker", 1, 7), ("worker", 2, 8), ("chief", 1, 9)] {
            let account = accounts.came(name, incarnation, start);
            assert_eq!(account.log().begin(call_id(number, 0), ticket, 9), Ok(Begin::Run));
        }
        let bytes = accounts.save();
        assert_eq!(bytes, accounts.save());
        let loaded = Accounts::default();
        loaded.load(&bytes, start).unwrap();
        assert_eq!(loaded.save(), bytes);
        let again = |name, incarnation, number| {
            loaded.came(name, incarnation, start).log().begin(call_id(number, 1), ticket, 9)
        };
        assert_eq!(again("worker", 2, 8), Err(Refused::MayHaveRun));
        assert_eq!(again("worker", 1, 8), Ok(Begin::Run), "the call of another process");
        assert_eq!(again("worker", 3, 8), Ok(Begin::Run), "a new process");
        for end in 0..bytes.len() {
            assert_eq!(Accounts::default().load(&bytes[..end], start), None);
        }
        assert_eq!(Accounts::default().load(&[&bytes[..], &[0]].concat(), start), None);
    }

    #[test]
    fn of_very_many_processes_the_last_ones_are_remembered() {
        let call_id = |attempt| CallId { lane: 0, attempt, number: NonZeroU64::MIN };
        let (accounts, start) = (Accounts::default(), Instant::now());
        let ticket = Ticket { conn: 1, id: 1 };
        for number in 0..=MOST_GONE as u64 {
            let account = accounts.came("worker", number, start);
            assert_eq!(account.log().begin(call_id(0), ticket, 9), Ok(Begin::Run));
            accounts.gone(&account, start + Duration::from_nanos(number));
        }
        let again = |number| accounts.came("worker", number, start).log().begin(call_id(1), ticket, 9);
        assert_eq!(again(0), Err(Refused::MayHaveRun));
        assert_eq!(again(MOST_GONE as u64), Ok(Begin::Waits));
        assert_eq!(accounts.known().entries.len(), MOST_GONE / 2 + 2);
    }

    #[test]
    fn of_processes_that_went_long_ago_nothing_is_left() {
        let call_id = |attempt| CallId { lane: 0, attempt, number: NonZeroU64::MIN };
        let (accounts, start) = (Accounts::default(), Instant::now());
        let ticket = Ticket { conn: 1, id: 1 };
        let hour = |hours| start + Duration::from_secs(60 * 60) * hours;
        let fleet = || {
            for number in 0..=MOST_GONE as u32 {
                accounts.gone(&accounts.came("worker", number.into(), hour(number)), hour(number));
            }
        };
        let repeats = |number: u32, at| {
            let account = accounts.came("worker", number.into(), at);
            let begun = account.log().begin(call_id(1), ticket, 9);
            accounts.gone(&account, at);
            begun
        };
        // A process each hour.
        fleet();
        assert_eq!(accounts.known().entries.len(), 24);
        assert_eq!(repeats(10_000, hour(5000)), Ok(Begin::Run), "it is new");
        // So many within a day that some are forgotten, which may come back in the next one only.
        for number in 0..=MOST_GONE as u64 {
            accounts.gone(&accounts.came("other", number, hour(6000)), hour(6000));
        }
        assert_eq!(repeats(10_001, hour(6023)), Err(Refused::MayHaveRun));
        let restarted = Accounts::default();
        restarted.load(&accounts.save(), hour(6023)).unwrap();
        for (accounts, hours) in [(&accounts, 6024), (&restarted, 6047)] {
            let again =
                |number, hours| accounts.came("another", number, hour(hours)).log().begin(call_id(1), ticket, 9);
            assert_eq!(again(1, hours - 1), Err(Refused::MayHaveRun));
            assert_eq!(again(2, hours), Ok(Begin::Run));
        }
    }

    #[test]
    fn nobody_takes_all_and_everybody_finds_something() {
        let (accounts, now) = (Accounts::default(), Instant::now());
        let mut taken = 0;
        let mut least = u64::MAX;
        let peers: Vec<_> = (0..20).map(|n| accounts.came("any", n, now)).collect();
        for peer in &peers {
            let mut own = 0;
            while peer.take(0, 1, 0, &LIMITS).is_ok() {
                own += 1;
            }
            taken += own;
            least = least.min(own);
            assert!(own <= 600 && taken <= 1200, "{own} {taken}");
            if own == 0 {
                break;
            }
        }
        assert!(taken > 1190, "{taken}");
        // Its own values may be replaced even if no room is left.
        peers[0].take(0, 5, 5, &LIMITS).unwrap();
        peers[0].give(0, 5);
        peers[0].give(0, 500);
        assert!(peers[19].take(1, 200, 0, &LIMITS).is_ok());
    }
}
