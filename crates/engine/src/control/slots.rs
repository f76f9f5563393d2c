//! Bounds the connections of the control service. A newcomer always gets a slot, from the source with the most
//! connections ([`FairTable`]). Connections from this host, such as an orchestrator's probes, are counted separately.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::HttpLimits;
use crate::admission::{FairTable, Source};

pub struct Slots(Mutex<All>);

struct All {
    next: u64,
    local: Kind,
    remote: Kind,
}

/// The connections from this host, or those from others.
struct Kind {
    table: FairTable<u64>,
    /// Including those that lost their slots and have not ended.
    open: HashMap<u64, Arc<Notify>>,
}

impl Kind {
    fn new(limit: usize) -> Self {
        Self { table: FairTable::new(limit), open: HashMap::new() }
    }

    /// The most connections, including those that are about to end.
    fn most(&self) -> usize {
        2 * self.table.limit()
    }
}

impl All {
    fn kind(&mut self, is_local: bool) -> &mut Kind {
        if is_local { &mut self.local } else { &mut self.remote }
    }
}

impl Slots {
    pub fn new(limits: &HttpLimits) -> Arc<Self> {
        let (local, remote) = (Kind::new(limits.local), Kind::new(limits.connections));
        Arc::new(Self(Mutex::new(All { next: 0, local, remote })))
    }

    /// Returns a slot for one more connection, or `None` while too many of its kind that lost theirs have not ended.
    pub fn acquire(self: &Arc<Self>, source: Source, is_local: bool) -> Option<Slot> {
        let mut all = self.lock();
        let number = all.next;
        all.next += 1;
        let kind = all.kind(is_local);
        if kind.open.len() >= kind.most() {
            return None;
        }
        let wanted = Arc::new(Notify::new());
        let evicted = kind.table.insert(number, source);
        if let Some(notify) = evicted.and_then(|evicted| kind.open.get(&evicted)) {
            notify.notify_one();
        }
        kind.open.insert(number, wanted.clone());
        Some(Slot { number, is_local, wanted, slots: self.clone() })
    }

    pub fn open(&self) -> usize {
        let all = self.lock();
        all.local.open.len() + all.remote.open.len()
    }

    /// The most connections from this host, or from others.
    pub fn most(&self, is_local: bool) -> usize {
        self.lock().kind(is_local).most()
    }

    fn lock(&self) -> MutexGuard<'_, All> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The slot of one connection, released when it is dropped.
pub struct Slot {
    number: u64,
    is_local: bool,
    wanted: Arc<Notify>,
    slots: Arc<Slots>,
}

impl Slot {
    /// Waits until the slot is given to another connection.
    pub async fn lost(&self) {
        self.wanted.notified().await;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut all = self.slots.lock();
        let kind = all.kind(self.is_local);
        kind.table.remove(self.number);
        kind.open.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_other_hosts_leave_the_places_of_this_one() {
        let slots = Slots::new(&HttpLimits { connections: 64, local: 16, ..HttpLimits::default() });
        let acquire = |n: u8, is_local| slots.acquire(Source::V4([10, 0, 0, n]), is_local);
        // None ends although it lost its place, as while the thread that serves them is behind.
        let remote: Vec<_> = (0..160).filter_map(|n| acquire(n, false)).collect();
        let local: Vec<_> = (0..160).filter_map(|n| acquire(n, true)).collect();
        assert_eq!((remote.len(), local.len()), (128, 32));
        assert_eq!((slots.most(false), slots.most(true), slots.open()), (128, 32, 160));
        drop(remote);
        assert!(acquire(0, true).is_none() && acquire(0, false).is_some());
        drop(local);
        assert!(acquire(0, true).is_some());
    }
}
