//! Process exit. TensorFlow's and Python's statics are destroyed while our threads may still run, so at exit every
//! reactor stops where it is, without callbacks. Only when all have stopped do they say GOODBYE: a peer answers that by
//! ending steps, and Python ends the process with SIGABRT if one of its threads comes back from a step now.

use std::sync::{Mutex, Once, PoisonError, Weak};
use std::time::{Duration, Instant};

/// An engine, whoever owns it.
pub trait Freeze: Send + Sync {
    /// Tells the reactors to stop where they are.
    fn freeze(&self);
    /// None of them makes callbacks any more.
    fn is_frozen(&self) -> bool;
    /// Lets frozen reactors say GOODBYE.
    fn leave(&self);
    /// A reactor of this process has not said GOODBYE yet, or the state's thread still runs.
    fn is_running(&self) -> bool;
}

static ENGINES: Mutex<Vec<Weak<dyn Freeze>>> = Mutex::new(Vec::new());

/// A reactor that does not stop within this time is in a callback; exit does not wait for it, and no reactor says
/// GOODBYE.
const PATIENCE: Duration = Duration::from_secs(2);

pub fn watch(engine: Weak<dyn Freeze>) {
    static ONCE: Once = Once::new();
    // Handlers run in reverse order of registration: ours was registered after TensorFlow was loaded, so it runs before
    // TensorFlow's statics are destroyed.
    // SAFETY: freeze_all is a function of this library, which is never unloaded.
    ONCE.call_once(|| unsafe {
        libc::atexit(freeze_all);
    });
    let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
    engines.retain(|e| e.strong_count() > 0);
    engines.push(engine);
}

extern "C" fn freeze_all() {
    let _ = std::panic::catch_unwind(|| {
        let Ok(engines) = ENGINES.try_lock() else { return };
        let live: Vec<_> = engines.iter().filter_map(Weak::upgrade).collect();
        let until = Instant::now() + PATIENCE;
        for engine in &live {
            engine.freeze();
        }
        if eventually(until, || live.iter().all(|engine| engine.is_frozen())) {
            live.iter().for_each(|engine| engine.leave());
            eventually(until, || !live.iter().any(|engine| engine.is_running()));
        }
        // Dropping the last reference here would call back into a half-destroyed process.
        std::mem::forget(live);
    });
}

fn eventually(until: Instant, condition: impl Fn() -> bool) -> bool {
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
