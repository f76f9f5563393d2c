//! Virtual time, and who runs in it.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::names::Names;
use super::{Scenario, Task, World};
use crate::command::Command;
use crate::shard::Shard;

thread_local! {
    static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// The time of the world that this thread simulates.
pub(super) fn now() -> Instant {
    NOW.get().unwrap()
}

/// A world begins.
pub(super) fn begin(now: Instant) {
    NOW.set(Some(now));
}

impl World {
    pub(super) fn set_now(&mut self, now: Instant) {
        begin(now);
        self.now = now;
        self.net.borrow_mut().now = now;
        self.ledger.lock().unwrap().now = Some(now);
    }

    /// Lets the reactors of a task run once, those that have a reason to.
    pub(super) fn run(&mut self, task: usize) {
        if !self.is_early && self.net.borrow().dying == Some(task) {
            return self.die(task);
        }
        self.kill.runs.set(task);
        let is_asked = self.tasks[task].shared.host.is_asked.swap(false, Ordering::Relaxed);
        for at in 0..self.tasks[task].shards.len() {
            let Task { shards, drivers, may_have_mail, .. } = &mut self.tasks[task];
            let has_reason = is_asked || self.net.borrow().has_reason(drivers[at]);
            let has_mail = std::mem::take(&mut may_have_mail[at]);
            if self.sleeps && !has_reason && !has_mail {
                continue;
            }
            shards[at].turn(self.now);
            if has_reason {
                // It may have sent something to the others.
                may_have_mail.iter_mut().enumerate().for_each(|(other, mail)| *mail |= other != at);
            }
            if self.net.borrow().dying == Some(task) {
                return self.die(task);
            }
        }
        if let Some(names) = &mut self.names {
            names.take(&self.tasks[task].shared, &mut self.net.borrow_mut());
        }
    }

    /// Lets time pass until something happens, but not beyond `most`.
    pub(super) fn pass(&mut self, most: Instant) {
        let before = self.net.borrow().moved;
        for task in 0..self.tasks.len() {
            if self.tasks[task].pauses_until <= self.now {
                self.run(task);
            }
        }
        if let Some(names) = &mut self.names {
            names.answer(self.now);
        }
        self.proceed();
        if self.checks_always {
            self.check_gauges();
        }
        let due = if self.sleeps { self.next_due_asleep() } else { self.next_due() };
        let due = due.filter(|_| self.net.borrow().moved == before);
        let little = Duration::from_micros(10 + self.below(200));
        let next = due.unwrap_or(self.now).max(self.now + little).min(most.max(self.now + little));
        self.set_now(next);
    }

    fn next_due(&mut self) -> Option<Instant> {
        let due = self.tasks.iter_mut().flat_map(|task| &mut task.shards).filter_map(Shard::next_due).min();
        let names = self.names.as_ref().and_then(Names::next_due);
        due.into_iter().chain(self.net.borrow().next_due(|_| true)).chain(names).min()
    }

    /// The same, if reactors that have no reason to run do not, and nor do tasks that pause.
    fn next_due_asleep(&self) -> Option<Instant> {
        let net = self.net.borrow();
        let (paused, running): (Vec<_>, Vec<_>) = self.tasks.iter().partition(|task| task.pauses_until > self.now);
        let has_mail = |task: &&Task| {
            task.shared.host.is_asked.load(Ordering::Relaxed) || task.may_have_mail.iter().any(|has_mail| *has_mail)
        };
        if running.iter().any(has_mail) {
            return Some(self.now);
        }
        let wake_ups = running.iter().flat_map(|task| &task.drivers).filter_map(|driver| net.sleeps_until(*driver));
        let resumes = paused.iter().map(|task| task.pauses_until);
        let of_net = net.next_due(|task| self.tasks[task].pauses_until <= self.now);
        let names = self.names.as_ref().and_then(Names::next_due);
        wake_ups.chain(resumes).chain(of_net).chain(names).min()
    }

    pub(super) fn fault(&mut self) {
        let tasks = self.tasks.len() as u64;
        let (a, b) = (self.below(tasks) as usize, self.below(tasks) as usize);
        match self.below(20) {
            0..3 if self.scenario == Scenario::Stalls => {
                self.note("the machine stands still");
                let until = self.now + self.millis(30_000);
                self.set_now(until);
            }
            0..3 if self.scenario == Scenario::Restarts => {
                // A client that stops in the middle of a handshake is a loss for a server that is done with it.
                let until = self.now + Duration::from_secs(1);
                while self.now < until {
                    self.pass(until);
                }
                self.restart(a);
            }
            16.. if self.has_clients && matches!(self.scenario, Scenario::Faults | Scenario::Resets) => {
                self.note("a client that is no task");
                let bytes = super::clients::first_bytes(&mut self.net.borrow_mut().random);
                self.net.borrow_mut().send_as_client(super::address(a), bytes);
            }
            0..16 if self.scenario == Scenario::Resets => self.net.borrow_mut().reset_one(),
            _ if self.scenario != Scenario::Faults => {}
            0..4 => self.net.borrow_mut().reset_one(),
            4..6 => {
                let until = self.now + self.millis(20_000);
                self.net.borrow_mut().partition(a, b, until);
            }
            6 if self.tasks[a].pauses_until <= self.now => {
                self.note("a task pauses");
                self.tasks[a].pauses_until = self.now + self.millis(10_000);
            }
            7 => self.restart(a),
            8..11 if self.has_more => self.kill.next.set(Some((a, self.below(10)))),
            _ => {}
        }
    }

    /// A task stops in order, or dies; then it starts again.
    fn restart(&mut self, task: usize) {
        self.kill.next.set(None);
        if self.net.borrow().dying == Some(task) {
            return self.die(task);
        }
        if self.scenario == Scenario::Restarts || self.below(2) == 0 {
            self.note("a task stops in order");
            self.stop(task);
            self.check_end(task);
            self.start_again(task);
        } else {
            self.note("a task dies");
            self.die(task);
        }
    }

    /// A task dies, and starts again.
    pub(super) fn die(&mut self, task: usize) {
        self.net.borrow_mut().kill(task);
        self.tasks[task].shards.iter_mut().for_each(Shard::abandon);
        if let Some(names) = &mut self.names {
            names.forget(&self.tasks[task].shared);
        }
        self.check_requests(task);
        self.start_again(task);
    }

    fn start_again(&mut self, task: usize) {
        let started = self.start(task, self.tasks.len());
        let old = std::mem::replace(&mut self.tasks[task], started);
        self.check_release(old);
        self.may_kill(task);
    }

    /// Plans are made when a task is new: it may die then.
    pub(super) fn may_kill(&self, task: usize) {
        if !self.is_early && self.has_more && self.scenario == Scenario::Faults && self.below(2) == 0 {
            self.kill.next.set(Some((task, self.below(20))));
        }
    }

    pub(super) fn stop(&mut self, task: usize) {
        if self.sleeps {
            self.tasks[task].pauses_until = self.now;
        }
        let shards = self.tasks[task].shards.len();
        (0..shards).for_each(|shard| self.tasks[task].shared.send(shard, Command::Stop));
        self.tasks[task].shared.host.ask();
        let until = self.now + Duration::from_secs(3);
        while self.now < until && !self.tasks[task].shards.iter().all(|shard| shard.is_finished(self.now)) {
            self.pass(until);
            self.run(task);
        }
        for shard in &mut self.tasks[task].shards {
            assert_eq!(shard.wakes_at(self.now), Some(self.now), "a reactor with nothing to close ends at once");
            shard.end();
        }
    }
}
