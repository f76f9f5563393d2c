//! The figures of a run.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use serde_json::{Value as Json, json};

use crate::observe::Seen;
use crate::recording::What;
use crate::worker::Played;
use crate::{Plan, Protocol};

pub struct Report {
    protocol: Protocol,
    model: String,
    workers: u32,
    /// Per step: calls, tensors pulled, tensors pushed.
    operations: [usize; 3],
    /// Per step: tensors that travel, by themselves or in star calls.
    tensors: u64,
    registrations: u64,
    /// The server's process: alone, with all workers connected, with their sessions and graphs, after a step of each,
    /// and in the end.
    pub before: Option<Seen>,
    pub connected: Option<Seen>,
    pub ready: Option<Seen>,
    pub warm: Option<Seen>,
    pub after: Option<Seen>,
    pub peak: Option<u64>,
    pub connecting: Duration,
    pub setting_up: Duration,
    /// Of the measured steps.
    pub elapsed: Duration,
    pub server_cpu: Duration,
    pub own_cpu: Duration,
    /// How the workers got over the loss of the server.
    pub outage: Option<Json>,
    times: Vec<Duration>,
    /// How often each recorded step was made, warming up included.
    made: Vec<u64>,
}

/// Steps as they are made.
pub struct Counts {
    made: Vec<Cell<u64>>,
    times: RefCell<Vec<Duration>>,
    registrations: Cell<u64>,
}

impl Counts {
    pub fn new(steps: usize) -> Self {
        Self { made: vec![Cell::new(0); steps], times: RefCell::default(), registrations: Cell::new(0) }
    }

    pub fn add(&self, played: &Played) {
        let made = &self.made[played.which];
        made.set(made.get() + 1);
        self.times.borrow_mut().push(played.took);
        self.registrations.set(self.registrations.get() + played.registrations as u64);
    }

    /// What was made so far still counts as made, but not as measured.
    pub fn begin_measuring(&self) {
        self.times.borrow_mut().clear();
    }
}

impl Report {
    pub fn new(plan: &Plan) -> Self {
        let (mut operations, mut tensors) = ([0; 3], 0);
        for operation in plan.recording.steps.first().map_or(&[][..], |step| &step.operations) {
            let (kind, carried) = match &operation.what {
                What::Call(_) => (0, 0),
                What::Pull(_) => (1, 1),
                What::Push(_) => (2, 1),
                What::Star(call) => (0, call.feeds + call.fetches),
            };
            operations[kind] += 1;
            tensors += carried;
        }
        Self {
            protocol: plan.protocol,
            model: plan.recording.model.clone(),
            workers: plan.workers,
            operations,
            tensors,
            registrations: 0,
            before: None,
            connected: None,
            ready: None,
            warm: None,
            after: None,
            peak: None,
            connecting: Duration::ZERO,
            setting_up: Duration::ZERO,
            elapsed: Duration::ZERO,
            server_cpu: Duration::ZERO,
            own_cpu: Duration::ZERO,
            outage: None,
            times: Vec::new(),
            made: Vec::new(),
        }
    }

    pub fn count(&mut self, counts: &Counts) {
        self.made = counts.made.iter().map(Cell::get).collect();
        self.registrations = counts.registrations.get();
        self.times = counts.times.borrow().clone();
        self.times.sort_unstable();
    }

    pub fn json(&self) -> Json {
        let seconds = self.elapsed.as_secs_f64();
        let steps = self.times.len() as f64;
        let [calls, pulls, pushes] = self.operations;
        let crossings = steps * (calls + pulls + pushes) as f64;
        let mut json = json!({
            "protocol": self.protocol.name(),
            "model": self.model,
            "workers": self.workers,
            "calls_per_step": calls,
            "pulls_per_step": pulls,
            "pushes_per_step": pushes,
            "tensors_per_step": self.tensors,
            "registrations": self.registrations,
            "made": self.made,
            "steps": self.times.len(),
            "seconds": seconds,
            "steps_per_s": steps / seconds,
            "calls_per_s": crossings / seconds,
            "p50_s": self.quantile(0.5),
            "p99_s": self.quantile(0.99),
            "connect_s": self.connecting.as_secs_f64(),
            "set_up_s": self.setting_up.as_secs_f64(),
            "swarm_cpu_s_per_step": self.own_cpu.as_secs_f64() / steps,
        });
        if let Some(outage) = &self.outage {
            json["outage"] = outage.clone();
        }
        // Without a process to look at there is nothing to say about it.
        if let (Some(before), Some(connected), Some(ready), Some(warm), Some(after)) =
            (self.before, self.connected, self.ready, self.warm, self.after)
        {
            let per_worker = |now: Seen| (now.rss_bytes as f64 - before.rss_bytes as f64) / f64::from(self.workers);
            json["server"] = json!({
                "cpu_s_per_step": self.server_cpu.as_secs_f64() / steps,
                "cpu_s_per_call": self.server_cpu.as_secs_f64() / crossings,
                "rss_before": before.rss_bytes,
                "rss_per_worker_connected": per_worker(connected),
                "rss_per_worker_ready": per_worker(ready),
                "rss_per_worker_warm": per_worker(warm),
                "rss_per_worker_after": per_worker(after),
                "rss_peak": self.peak,
                "threads": after.threads,
                "threads_before": before.threads,
                "descriptors": after.descriptors,
            });
        }
        json
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to the number of times")]
    fn quantile(&self, q: f64) -> f64 {
        let last = self.times.len().saturating_sub(1);
        self.times.get((last as f64 * q).round() as usize).map_or(0.0, Duration::as_secs_f64)
    }
}
