//! Places for connections. A newcomer always gets one, from the source with the most connections ([`crate::crowd`]);
//! this host's own connections, such as the probes of an orchestrator's agent, are counted separately.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::Limits;
use crate::crowd::{Crowd, Source};

pub struct Places {
    all: Mutex<All>,
    /// Most connections, including those that are about to end.
    most: usize,
}

struct All {
    next: u64,
    local: Crowd<u64>,
    remote: Crowd<u64>,
    open: HashMap<u64, Arc<Notify>>,
}

impl Places {
    pub fn new(limits: &Limits) -> Arc<Self> {
        let (local, remote) = (Crowd::new(limits.local), Crowd::new(limits.connections));
        let most = 2 * (local.limit() + remote.limit());
        Arc::new(Self { all: Mutex::new(All { next: 0, local, remote, open: HashMap::new() }), most })
    }

    /// A place for one more. None: those that lost theirs have not ended yet.
    pub fn take(self: &Arc<Self>, source: Source, is_local: bool) -> Option<Place> {
        let mut all = self.lock();
        if all.open.len() >= self.most {
            return None;
        }
        let (number, wanted) = (all.next, Arc::new(Notify::new()));
        all.next += 1;
        let crowd = if is_local { &mut all.local } else { &mut all.remote };
        let leaves = crowd.enter(number, source);
        if let Some(notify) = leaves.and_then(|leaves| all.open.get(&leaves)) {
            notify.notify_one();
        }
        all.open.insert(number, wanted.clone());
        Some(Place { number, wanted, places: self.clone() })
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

/// A place.
pub struct Place {
    number: u64,
    wanted: Arc<Notify>,
    places: Arc<Places>,
}

impl Place {
    /// Ends when the place was given to another connection.
    pub async fn lost(&self) {
        self.wanted.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = self.places.lock();
        if !all.local.leave(self.number) {
            all.remote.leave(self.number);
        }
        all.open.remove(&self.number);
    }
}
