//! Usage of a server by its peers, added up over all connections of a peer and over all peers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::Refused;
use crate::config::StepLimits;

/// One incarnation of a task, with all its connections.
type Identity = (String, u64);

/// The usage of one peer.
#[derive(Debug, Default)]
pub struct Account {
    name: String,
    calls: AtomicU64,
    values: AtomicU64,
    bytes: AtomicU64,
    all: Arc<AtomicU64>,
}

/// The accounts of all peers.
#[derive(Default)]
pub struct Accounts {
    open: Mutex<HashMap<Identity, Weak<Account>>>,
    /// Bytes of all of them.
    bytes: Arc<AtomicU64>,
}

impl Accounts {
    /// The account of this peer; it is closed with its last connection.
    pub fn of(&self, name: &str, incarnation: u64) -> Arc<Account> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, account| account.strong_count() > 0);
        let known = open.entry((name.to_owned(), incarnation)).or_default();
        known.upgrade().unwrap_or_else(|| {
            let account = Arc::new(Account { name: name.to_owned(), all: self.bytes.clone(), ..Account::default() });
            *known = Arc::downgrade(&account);
            account
        })
    }
}

impl Account {
    pub fn name(&self) -> &str {
        &self.name
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
    use super::*;

    const LIMITS: StepLimits = StepLimits { values: 100, bytes: 1000, calls: 2, all_bytes: 1200 };

    #[test]
    fn connections_of_one_peer_share_what_one_may_have() {
        let accounts = Accounts::default();
        let (first, second) = (accounts.of("worker", 1), accounts.of("worker", 1));
        first.take_call(&LIMITS).unwrap();
        second.take_call(&LIMITS).unwrap();
        assert_eq!(first.take_call(&LIMITS), Err(Refused::Calls { peer: "worker".into(), max: 2 }));
        accounts.of("worker", 2).take_call(&LIMITS).unwrap();
        second.give_calls(1);
        first.take_call(&LIMITS).unwrap();
        first.take(60, 10, 0, &LIMITS).unwrap();
        assert!(matches!(second.take(41, 10, 0, &LIMITS), Err(Refused::Values { values: 101, .. })));
        second.take(40, 10, 0, &LIMITS).unwrap();
        assert_eq!(first.has(), (2, 100, 20));
        first.give(100, 20);
        drop((first, second));
        assert_eq!(accounts.of("worker", 1).has(), (0, 0, 0));
        assert_eq!(accounts.open.lock().unwrap().len(), 1, "what nobody uses is forgotten");
    }

    #[test]
    fn nobody_takes_all_and_everybody_finds_something() {
        let accounts = Accounts::default();
        let mut taken = 0;
        let mut least = u64::MAX;
        let peers: Vec<_> = (0..20).map(|n| accounts.of("any", n)).collect();
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
