//! What always holds, and what holds at the end of a task.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::owner::{Ledger, Open};
use super::{Scenario, Task, World};
use crate::metrics::Value;

/// A request may end so long after its deadline: the peer of its connection may have a second to take the reason why it
/// ends.
const LATE: Duration = Duration::from_secs(2);

/// What a task has, and must give back.
const GAUGES: [&str; 5] =
    ["connections_in", "connections_out", "requests_in_flight", "requests_unanswered", "star_slots"];

impl Task {
    /// The numbers of all its requests.
    fn ids(&self) -> BTreeSet<u64> {
        self.started.iter().map(|(_, _, id)| id).chain(&self.cancelled).copied().collect()
    }
}

impl World {
    /// The values of some counters and gauges of a task.
    fn metrics<const N: usize>(&self, task: usize, names: [&str; N]) -> [i64; N] {
        let samples = self.tasks[task].shared.metrics.snapshot();
        names.map(|name| {
            let sample = samples.iter().find(|sample| sample.description.name.strip_prefix("starwire_") == Some(name));
            match sample.map(|sample| &sample.value) {
                Some(Value::Counter(count)) => *count as i64,
                Some(Value::Gauge(value)) => *value,
                _ => panic!("no number: {name}"),
            }
        })
    }

    /// A task that was stopped has nothing any more.
    pub(super) fn check_end(&self, task: usize) {
        let host = &self.tasks[task].shared.host;
        assert_eq!(host.state.lock().unwrap().connections, 0, "connections that did not end");
        assert_eq!(host.keys.load(Ordering::Relaxed), 0, "keys");
        let may_lose = matches!(self.scenario, Scenario::Faults | Scenario::Resets);
        assert!(may_lose || self.metrics(task, ["losses_total"]) == [0]);
        assert_eq!(self.metrics(task, GAUGES), [0; GAUGES.len()], "{GAUGES:?}");
        self.check_requests(task);
    }

    /// Nothing is given back twice.
    pub(super) fn check_gauges(&self) {
        for task in 0..self.tasks.len() {
            let values = self.metrics(task, GAUGES);
            assert!(values.iter().all(|value| *value >= 0), "task {task}: {GAUGES:?} are {values:?}");
        }
    }

    /// No request waits for longer than it should, unless its task stands still.
    pub(super) fn check_deadlines(&self) {
        let ledger = self.ledger.lock().unwrap();
        for task in self.tasks.iter().filter(|task| task.pauses_until + LATE <= self.now) {
            let open = task.started.iter().filter_map(|(_, _, id)| ledger.open.get(id).map(|open| (id, open)));
            let keepalive = &task.shared.config.keepalive;
            for (id, Open { due, has_buffers, .. }) in open {
                // The buffers of a reply that is arriving are in use until more of it comes, or its connection is lost.
                let most = if *has_buffers { LATE + keepalive.interval + keepalive.timeout } else { LATE };
                assert!(due.is_none_or(|due| self.now < due + most), "request {id} has not ended in time");
            }
        }
    }

    /// The requests of a task without reactors have ended, and its payloads are released.
    pub(super) fn check_requests(&self, task: usize) {
        let shared = &self.tasks[task].shared;
        shared.host.state.lock().unwrap().is_stopped = true;
        // They own the engine, which owns them.
        shared.host.kernels.jobs.lock().unwrap().clear();
        assert_eq!(shared.host.payloads.load(Ordering::Relaxed), 0, "payloads");
        let Ledger { open, next, .. } = &mut *self.ledger.lock().unwrap();
        // Its star calls do not go on.
        next.retain(|next| {
            let is_own = next.call().from == task;
            if is_own {
                open.remove(&next.call().id);
            }
            !is_own
        });
        assert!(self.tasks[task].ids().iter().all(|id| !open.contains_key(id)), "requests that did not end");
    }
}
