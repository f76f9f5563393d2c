//! Threads do not survive a fork. A child that inherited an engine gets errors, not hangs.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

static FORKS: AtomicU64 = AtomicU64::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Number of forks between this process and the one that loaded the library.
pub fn count() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

/// Starts counting.
pub fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: in_child only touches an atomic, which is allowed between fork and exec. The library is never
        // unloaded (TensorFlow's loader keeps it), so the handler's code stays mapped.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}
