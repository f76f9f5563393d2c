//! Shortages of lockable memory: a connection signals them to all others of its device in this process, which keep
//! registrations for later.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// Each reactor opens the device separately; these are shared by all with one name.
#[derive(Clone)]
pub struct Shortages(Arc<AtomicU64>);

static BY_DEVICE: LazyLock<Mutex<HashMap<String, Shortages>>> = LazyLock::new(Mutex::default);

impl Shortages {
    pub fn of(device: &str) -> Self {
        let mut all = BY_DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(device.to_owned()).or_insert_with(|| Shortages(Arc::default())).clone()
    }

    pub fn report(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    pub fn count(&self) -> u64 {
        self.0.load(Relaxed)
    }
}
