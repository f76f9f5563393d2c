//! What always holds, and what holds at the end of a task.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::owner::{Ledger, Open, Owner};
use super::{Scenario, Task, World};
use crate::metrics::{Cells, Gauge, Value};

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
    /// The values of [`GAUGES`]. They are looked at all the time, so nothing else is added up.
    fn gauges(&self, task: usize) -> [i64; GAUGES.len()] {
        let cells: [fn(&Cells) -> &Gauge; GAUGES.len()] = [
            |cells| &cells.connections_in,
            |cells| &cells.connections_out,
            |cells| &cells.requests_in_flight,
            |cells| &cells.requests_unanswered,
            |cells| &cells.star_slots,
        ];
        cells.map(|of| self.tasks[task].shared.metrics.gauge(of))
    }

    /// The values of some counters and gauges of a task.
    pub(super) fn metrics<const N: usize>(&self, task: usize, names: [&str; N]) -> [i64; N] {
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
        assert_eq!(self.gauges(task), [0; GAUGES.len()], "{GAUGES:?}");
        self.check_requests(task);
    }

    /// No task has more than what its requests and its peers' connections and values can be.
    pub(super) fn check_gauges(&self) {
        for (at, task) in self.tasks.iter().enumerate() {
            let values = self.gauges(at);
            let Owner { state, kernels, ledger, .. } = &task.shared.host;
            let state = state.lock().unwrap();
            let ledger = ledger.lock().unwrap();
            let open = ledger.open.values().filter(|open| open.from == at).count();
            let given_up = ledger.given_up.get(&at).copied().unwrap_or(0);
            let kept = kernels.values.load(Ordering::Relaxed);
            // Replies that are being sent count as unanswered.
            let most = [state.connections, state.connections, (open + given_up) as i64, i64::MAX, kept];
            let is_right = values.iter().zip(&most).all(|(value, most)| (0..=*most).contains(value));
            assert!(is_right, "task {at}: {GAUGES:?} are {values:?}, and at most {most:?}");
            assert_eq!(values[0] + values[1], state.connections, "task {at}: connections in and out");
        }
    }

    /// While no task has requests, and all are connected: what they have had is given back. Returns what is not.
    pub(super) fn find_unrest(&self) -> Option<String> {
        self.tasks.iter().enumerate().find_map(|(at, task)| {
            let Owner { state, kernels, payloads, .. } = &task.shared.host;
            let [_, _, in_flight, unanswered, slots] = self.gauges(at);
            let known = state.lock().unwrap().unanswered.len() + kernels.running.lock().unwrap().len();
            let (values, payloads) = (kernels.values.load(Ordering::Relaxed), payloads.load(Ordering::Relaxed));
            let is_at_rest = (in_flight, unanswered, known, payloads) == (0, 0, 0, 0) && slots == values;
            let found = || {
                format!(
                    "task {at} has {in_flight} requests, {unanswered} and {known} of peers, {payloads} payloads, and \
                     {slots} slots for {values} values"
                )
            };
            (!is_at_rest).then(found)
        })
    }

    /// A task without reactors has nothing, and is not used any more.
    pub(super) fn check_release(&mut self, task: Task) {
        let Task { shared, shards, channels, .. } = task;
        drop((shards, channels));
        if let Some(names) = &mut self.names {
            names.forget(&shared);
        }
        let kernels = &shared.host.kernels;
        let left = [&kernels.values, &kernels.plans, &shared.host.payloads].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(left, [0; 3], "values, plans and payloads of a task that has ended");
        assert_eq!(Arc::strong_count(&shared), 1, "a task that has ended is still used");
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

/// Sockets that this process has, by inode.
pub fn open_sockets() -> BTreeSet<u64> {
    let files =
        std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    let inode = |name: &str| name.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok();
    files.filter_map(|file| inode(file.to_str()?)).collect()
}
