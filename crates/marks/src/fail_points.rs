//! Fail points: places where a test can kill the process, or let its thread sleep.
//!
//! The code says `fail_point!("name")`. The environment variable `FAIL_POINTS` has the faults of a process, with
//! semicolons between them: `name=kill@3` kills it when the point is reached the third time, `name=sleep@3` lets the
//! thread sleep for [`NAP`]. A simulation calls [`observe`] instead. In builds without debug assertions and without the
//! feature `fail-points`, a fail point is nothing.

use std::cell::RefCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Whether fail points are compiled in.
pub const ARE_COMPILED: bool = cfg!(any(debug_assertions, feature = "fail-points"));

/// How long a thread sleeps at a point.
pub const NAP: Duration = Duration::from_millis(300);

const VARIABLE: &str = "FAIL_POINTS";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Kill,
    Sleep,
}

/// What happens at a point when it is reached for the `at`th time.
struct Fault {
    name: String,
    action: Action,
    at: u64,
    reached: AtomicU64,
}

type Observer = Box<dyn FnMut(&'static str)>;

thread_local! {
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// A place where a test can kill the process.
#[macro_export]
macro_rules! fail_point {
    ($name:literal) => {
        if $crate::fail_points::ARE_COMPILED {
            $crate::fail_points::reach($name);
        }
    };
}

/// Calls the function at each point that this thread reaches, until the next call; `None`: nothing.
pub fn observe(observer: Option<Observer>) {
    OBSERVER.set(observer);
}

/// The thread is at a point. Use [`fail_point!`].
#[cold]
pub fn reach(name: &'static str) {
    OBSERVER.with_borrow_mut(|observer| {
        if let Some(observer) = observer {
            observer(name);
        }
    });
    for fault in from_environment().iter().filter(|fault| fault.name == name) {
        match fault.action {
            _ if fault.reached.fetch_add(1, Ordering::Relaxed) + 1 != fault.at => {}
            Action::Kill => kill(),
            Action::Sleep => std::thread::sleep(NAP),
        }
    }
}

fn from_environment() -> &'static [Fault] {
    static FAULTS: OnceLock<Vec<Fault>> = OnceLock::new();
    FAULTS.get_or_init(|| read(&std::env::var(VARIABLE).unwrap_or_default()))
}

fn read(text: &str) -> Vec<Fault> {
    let read = |fault: &str| {
        let (name, action) = fault.split_once('=')?;
        let (action, at) = action.split_once('@')?;
        let action = match action {
            "kill" => Action::Kill,
            "sleep" => Action::Sleep,
            _ => return None,
        };
        Some(Fault { name: name.to_owned(), action, at: at.parse().ok()?, reached: AtomicU64::new(0) })
    };
    let faults = text.split(';').filter(|fault| !fault.is_empty());
    faults.map(|fault| read(fault).unwrap_or_else(|| panic!("{VARIABLE} has {fault:?}, which is no fault"))).collect()
}

fn kill() {
    // SAFETY: neither call touches memory.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    loop {
        std::thread::park();
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn faults_are_read_from_text() {
        let found = read("a call, and its end=kill@3;b=sleep@1");
        let found: Vec<_> = found.iter().map(|fault| (fault.name.as_str(), fault.action, fault.at)).collect();
        assert_eq!(found, [("a call, and its end", Action::Kill, 3), ("b", Action::Sleep, 1)]);
        assert!(read("").is_empty());
    }

    #[test]
    #[should_panic(expected = "\"a=explode@1\", which is no fault")]
    fn an_unknown_action_is_an_error() {
        read("a=explode@1");
    }

    #[test]
    fn an_observer_sees_the_points_of_its_thread() {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let observer = seen.clone();
        observe(Some(Box::new(move |name| observer.borrow_mut().push(name))));
        fail_point!("here");
        std::thread::spawn(|| fail_point!("elsewhere")).join().expect("no panic");
        observe(None);
        fail_point!("later");
        assert_eq!(*seen.borrow(), ["here"]);
    }
}
