//! Requests of all tasks, their answers, and their cancellations.

use std::collections::BTreeSet;
use std::time::Duration;

use super::bytes::bytes_of;
use super::owner::{Any, Open, Request, Unanswered, payload, reply_meta, value};
use super::star::{Call, Next, Plan, Step};
use super::{Scenario, Task, World};
use crate::api::PendingOp;
use crate::command::{Command, Meta, NewCall, NewRecv, StarCommand};
use crate::keys::shard_of;
use starwire_protocol::star::CallId;

/// Until all requests have ended after the last fault: connections that hang are noticed, back-off, handshakes.
const RECOVERY: Duration = Duration::from_secs(60);
/// After the last fault, a request may be made so often until it succeeds: once on a connection that nobody has noticed
/// is gone, in each direction of a pair.
const MOST_WAVES: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Call,
    Recv,
    Star,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Call, Self::Recv, Self::Star];
}

/// Whether a request has to succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// There are faults.
    None,
    /// There were faults: it is made again until it does.
    Soon,
    /// There was no fault.
    Now,
}

impl World {
    /// Starts a request of random size, and of random kind unless it is given.
    pub(super) fn request(&mut self, from: usize, to: usize, need: Need, only: Option<Kind>) {
        self.next += 1;
        let id = self.next;
        self.tasks[from].shared.host.ask();
        if only.map_or_else(|| self.below(3) == 0, |kind| kind == Kind::Star) {
            return self.star_call(id, from, to, need);
        }
        let must_succeed = need != Need::None;
        let size = match self.below(6) {
            0 => 0,
            1 => self.below(100),
            2 => self.below(20_000),
            3 if self.below(8) == 0 => self.below(4_000_000),
            3 => self.below(400_000),
            _ => self.below(9000),
        } as usize;
        let is_recv = only.map_or_else(|| self.below(2) == 0, |kind| kind == Kind::Recv);
        let refuses = !must_succeed && self.below(30) == 0;
        let (deadline_ms, waits) = match self.below(4) {
            _ if must_succeed => (0, true),
            0 => (1 + self.below(5000) as u32, self.below(2) == 0),
            1 => (0, true),
            _ => (0, false),
        };
        // It begins to count when the task runs again, which may be as soon as the faults end.
        let deadline = (deadline_ms > 0 && !is_recv).then(|| Duration::from_millis(deadline_ms.into()));
        let latest = self.now.max(self.tasks[from].pauses_until);
        let (not_before, due) = (deadline.map(|after| self.now + after), deadline.map(|after| latest + after));
        let open = Open { from, is_cancelled: false, has_buffers: false, not_before, due };
        self.ledger.lock().unwrap().open.insert(id, open);
        let sends_recv = is_recv && (!must_succeed || only.is_some());
        let kind = if sends_recv { Kind::Recv } else { Kind::Call };
        let ledger = self.ledger.clone();
        let request =
            |meta, parts| Any::Plain(Request { id, ledger, route: (from, to, kind), need, meta, parts, refuses });
        let task = &self.tasks[from];
        let number = if sends_recv {
            let (step, frame, iter) = (self.below(9) as i64, self.below(2), self.below(3));
            let prefix = format!("key;{};{}", self.below(20), size).into_bytes();
            let meta = reply_meta(&prefix, step, frame, iter, self.is_early);
            let op = PendingOp::new(request(meta, value(&prefix, step, frame, iter)));
            task.channels[to].recv(NewRecv { step, prefix: prefix.into(), frame, iter, op })
        } else {
            let meta = id.to_le_bytes().to_vec();
            let parts: Vec<Vec<u8>> = (0..self.below(4)).map(|part| bytes_of(id << 2 | part, size)).collect();
            let op = PendingOp::new(request(meta.clone(), parts.clone()));
            let payload = payload(parts, &task.shared.host.payloads);
            let call = NewCall {
                method: 7,
                meta,
                payload,
                deadline_ms,
                wait_for_ready: waits,
                deadline_to_connect: false,
                op,
            };
            task.channels[to].call(call)
        };
        self.tasks[from].started.push((to, number, id));
    }

    fn star_call(&mut self, id: u64, from: usize, to: usize, need: Need) {
        let (lane, number) = self.tasks[from].channels[to].take_lane();
        let incarnations = (self.tasks[from].incarnation, self.tasks[to].incarnation);
        let waits = need != Need::None;
        let must_succeed = waits || self.scenario == Scenario::Resets;
        // Only what ends by itself, when all others wait for it.
        let plan = Plan::of(self.below(if must_succeed { 2 } else { 3 }));
        let mut step = if self.is_early { Step::default() } else { self.step() };
        if self.ledger.lock().unwrap().is_tight && waits {
            // What must succeed keeps nothing that could be too much.
            step.slots.clear();
        }
        let feeds = if !self.is_early && self.below(2) == 0 { self.below(20_000) as usize } else { 0 };
        let call_id = step.can_repeat().then_some(CallId { lane, attempt: 0, number });
        if call_id.is_none() {
            self.tasks[from].channels[to].give_lane(lane);
        }
        // What cannot be sent again may be lost.
        let must_succeed = must_succeed && (call_id.is_some() || need == Need::Now);
        let open = Open { from, is_cancelled: false, has_buffers: false, not_before: None, due: None };
        self.ledger.lock().unwrap().open.insert(id, open);
        let has_table = !self.is_early;
        let call =
            Call { id, from, to, incarnations, plan, call_id, attempt: 0, waits, must_succeed, feeds, step, has_table };
        self.ledger.lock().unwrap().next.push(Next::Call(call));
        self.proceed();
    }

    /// What a star call has to do with its step.
    fn step(&self) -> Step {
        let number = 1 + self.below(3) as i64;
        let (ends, is_last) = (self.below(10) == 0, self.below(4) == 0);
        let keeps = if self.below(3) == 0 { 1 + self.below(3) as u32 } else { 0 };
        let first = self.below(4) as u32;
        Step { number, ends, is_last, slots: (first..first + keeps).collect() }
    }

    /// Workers go on with star calls of which a request has ended.
    pub(super) fn proceed(&mut self) {
        let all = std::mem::take(&mut self.ledger.lock().unwrap().next);
        for next in all {
            let call = next.call();
            let Task { channels, started, incarnation, shared, .. } = &mut self.tasks[call.from];
            if *incarnation != call.incarnations.0 {
                self.ledger.lock().unwrap().open.remove(&call.id);
                continue;
            }
            let registers = match &next {
                Next::Call(_) => false,
                Next::Register(_) => true,
                Next::GiveLane(Call { call_id, to, .. }) => {
                    call_id.iter().for_each(|id| channels[*to].give_lane(id.lane));
                    continue;
                }
            };
            shared.host.ask();
            let number = channels[call.to].call(call.request(&self.ledger, registers, &shared.host.payloads, self.now));
            started.push((call.to, number, call.id));
        }
    }

    pub(super) fn cancel_one(&mut self, from: usize) {
        if self.tasks[from].started.is_empty() {
            return;
        }
        let at = self.below(self.tasks[from].started.len() as u64) as usize;
        let (to, number, id) = self.tasks[from].started.swap_remove(at);
        self.tasks[from].cancelled.push(id);
        if let Some(open) = self.ledger.lock().unwrap().open.get_mut(&id) {
            open.is_cancelled = true;
            self.tasks[from].channels[to].cancel(number, 1, "cancelled by the test".into());
            self.tasks[from].shared.host.ask();
        }
    }

    /// Answers some of the requests that wait at a task.
    pub(super) fn answer(&self, task: usize, all: bool) {
        let Task { shared, .. } = &self.tasks[task];
        if !self.is_early {
            self.kill.runs.set(task);
        }
        let jobs = std::mem::take(&mut *shared.host.kernels.jobs.lock().unwrap());
        // What is sent to a reactor wakes it, and nothing else does.
        if !jobs.is_empty() {
            shared.host.ask();
        }
        jobs.into_iter().for_each(|job| job());
        let runs = std::mem::take(&mut *shared.host.kernels.running.lock().unwrap());
        for run in runs {
            if !all && self.below(3) == 0 {
                shared.host.kernels.running.lock().unwrap().push(run);
                continue;
            }
            // A long reply that is lost cannot be sent again, and then the call fails.
            let most = if all || self.scenario == Scenario::Resets { 10_000 } else { 40_000 };
            let bytes = if self.below(3) == 0 { self.below(most) as usize } else { 0 };
            let (ticket, outcome) = (run.ticket, run.outcome(bytes, &shared.host));
            let done = Command::Star(Box::new(StarCommand::Done { ticket, outcome }));
            shared.send(shard_of(ticket.conn), done);
            shared.host.ask();
        }
        loop {
            let taken = {
                let unanswered = &mut shared.host.state.lock().unwrap().unanswered;
                if unanswered.is_empty() {
                    return;
                }
                let at = self.below(unanswered.len() as u64) as usize;
                unanswered.swap_remove(at)
            };
            let Unanswered { ticket, meta, parts } = taken;
            let payload = payload(parts, &shared.host.payloads);
            let (conn, id) = (ticket.conn, ticket.id);
            shared.send(shard_of(conn), Command::Reply { conn, id, code: 0, meta: Meta::of(&meta), payload });
            shared.host.ask();
            if !all && self.below(3) == 0 {
                return;
            }
        }
    }

    /// Requests between all tasks succeed, and all others end.
    pub(super) fn request_all(&mut self, need: Need) {
        let tasks = self.tasks.len();
        self.ledger.lock().unwrap().succeeded.clear();
        for from in 0..tasks {
            (0..tasks).for_each(|to| self.request(from, to, need, None));
        }
        let until = self.now + RECOVERY;
        for wave in 0.. {
            while !self.ledger.lock().unwrap().open.is_empty() {
                assert!(self.now < until, "requests that do not end: {:?}", self.ledger.lock().unwrap().open);
                (0..tasks).for_each(|task| self.answer(task, true));
                self.pass(until);
            }
            let missing = self.missing();
            if missing.is_empty() || self.is_early {
                return;
            }
            assert!(wave <= MOST_WAVES, "requests do not succeed after the faults: {missing:?}");
            missing.into_iter().for_each(|(from, to, kind)| self.request(from, to, need, Some(kind)));
        }
    }

    /// Nothing happens any more: also what nobody waits for ends, at the latest when connections are found to be dead.
    pub(super) fn settle(&mut self) {
        let (soon, until) = (self.now + Duration::from_secs(1), self.now + RECOVERY);
        while self.now < soon || self.now < until && self.find_unrest().is_some() {
            (0..self.tasks.len()).for_each(|task| self.answer(task, true));
            self.pass(until);
        }
        self.check_gauges();
        assert_eq!(self.find_unrest(), None);
    }

    /// Which kinds of requests between which tasks have not succeeded yet.
    fn missing(&self) -> BTreeSet<(usize, usize, Kind)> {
        let tasks = 0..self.tasks.len();
        let pairs = tasks.clone().flat_map(|from| tasks.clone().map(move |to| (from, to)));
        let all: BTreeSet<_> = pairs.flat_map(|(from, to)| Kind::ALL.map(|kind| (from, to, kind))).collect();
        &all - &self.ledger.lock().unwrap().succeeded
    }
}
