//! Bounds the connections of the control service. A newcomer always gets a slot, from the source with the most
//! connections ([`FairTable`]). Connections from this host, such as an orchestrator's probes, are counted separately.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::HttpLimits;
use crate::admission::{FairTable, Source};

pub struct Slots {
    all: Mutex<All>,
    /// The most connections, including those that are about to end.
    most: usize,
}

struct All {
    next: u64,
    local: FairTable<u64>,
    remote: FairTable<u64>,
    open: HashMap<u64, Arc<Notify>>,
}

impl Slots {
    pub fn new(limits: &HttpLimits) -> Arc<Self> {
        let (local, remote) = (FairTable::new(limits.local), FairTable::new(limits.connections));
        let most = 2 * (local.limit() + remote.limit());
        Arc::new(Self { all: Mutex::new(All { next: 0, local, remote, open: HashMap::new() }), most })
    }

    /// Returns a slot for one more connection, or `None` while too many that lost theirs have not ended.
    pub fn acquire(self: &Arc<Self>, source: Source, is_local: bool) -> Option<Slot> {
        let mut all = self.lock();
        if all.open.len() >= self.most {
            return None;
        }
        let (number, wanted) = (all.next, Arc::new(Notify::new()));
        all.next += 1;
        let table = if is_local { &mut all.local } else { &mut all.remote };
        let evicted = table.insert(number, source);
        if let Some(notify) = evicted.and_then(|evicted| all.open.get(&evicted)) {
            notify.notify_one();
        }
        all.open.insert(number, wanted.clone());
        Some(Slot { number, wanted, slots: self.clone() })
    }

    pub fn open(&self) -> usize {
        self.lock().open.len()
    }

    pub fn most(&self) -> usize {
        self.most
    }

    fn lock(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The slot of one connection, released when it is dropped.
pub struct Slot {
    number: u64,
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
        if !all.local.remove(self.number) {
            all.remote.remove(self.number);
        }
        all.open.remove(&self.number);
    }
}
