//! Whole engines in virtual time: reactors of several tasks in one thread, over a simulated network.
//!
//! Requests of random sizes between all tasks, with random limits, while connections stall and break, pairs of tasks
//! are cut off from each other, and tasks pause, stop, die in the middle of what they do, and start again; with a
//! secret or TLS, and with names that a name service looks up, or without; and clients that are no tasks ask, send
//! garbage, or wait. Each request ends once, in time, with the right bytes or an error that fits; a call is executed at
//! most once, also if its caller sends it again; after the faults, requests succeed; what a stopped task had is
//! released. Without such faults, no request fails, and no connection is lost: not even if tasks stop in order, or the
//! whole machine stalls. If connections are reset, and nothing else happens, no star call fails that may be sent again.

mod certificates;
mod checks;
mod clients;
mod names;
#[allow(unsafe_code)]
mod net;
mod owner;
mod star;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::admission::{Admission, Listener};
use crate::api::PendingOp;
use crate::channel::{Channel, Channels};
use crate::command::{Command, Meta, NewCall, NewRecv, StarCommand};
use crate::config::{Config, DataAddress, HostPort, Identity, MapEnv};
use crate::keys::shard_of;
use crate::links::Services;
use crate::peers::Peer;
use crate::random::Random;
use crate::shard::Shard;
use crate::shared::Shared;
use certificates::Certificates;
use names::Names;
use net::{Net, SimDriver};
use owner::{Any, Ledger, Open, Owner, Request, Unanswered, payload, value};
use star::{Call, Next, Plan};
use starwire_marks::fail_points::observe;
use starwire_net::reactor::mailbox::{EventWaker, mailbox};
use starwire_protocol::{Secret, code};

/// Until all requests have ended after the last fault: connections that hang are noticed, back-off, handshakes.
const RECOVERY: Duration = Duration::from_secs(60);

/// What happens beside requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scenario {
    /// Everything.
    Faults,
    /// The machine stands still now and then. All connections are open before.
    Stalls,
    /// Tasks stop in order, and start again.
    Restarts,
    /// Connections are reset, after each task has reached each, and nothing else happens: no star call whose plan ends
    /// by itself may fail.
    Resets,
}

struct Task {
    incarnation: u64,
    shared: Arc<Shared<Owner>>,
    shards: Vec<Shard<Owner>>,
    /// By task.
    channels: Vec<Channel<Owner>>,
    /// Requests of this task that have not ended, with the channel.
    started: Vec<(usize, u64, u64)>,
    /// The same, of which the task has said that it needs no answer.
    cancelled: Vec<u64>,
    pauses_until: Instant,
}

/// Of a simulation.
const MOST_TASKS: usize = 24;

/// The seeds up to this one do what they did before there were clients that are no tasks.
const LAST_WITHOUT_CLIENTS: u64 = 17;

struct World {
    scenario: Scenario,
    net: Rc<RefCell<Net>>,
    now: Instant,
    ledger: Arc<Mutex<Ledger>>,
    tasks: Vec<Task>,
    settings: Vec<(&'static str, String)>,
    has_more: bool,
    has_clients: bool,
    secret: Option<Secret>,
    /// Their files are there as long as this is.
    _certificates: Option<Certificates>,
    names: Option<Names>,
    kill: Rc<Kill>,
    incarnations: u64,
    next: u64,
}

/// A task that is killed at a fail point.
#[derive(Default)]
struct Kill {
    /// The task that runs.
    runs: Cell<usize>,
    /// Which task, and how many points it passes before.
    next: Cell<Option<(usize, u64)>>,
}

impl Kill {
    /// A point is reached. Returns the task that is killed there.
    fn reached(&self) -> Option<usize> {
        let (task, left) = self.next.get().filter(|(task, _)| *task == self.runs.get())?;
        self.next.set(left.checked_sub(1).map(|left| (task, left)));
        (left == 0).then_some(task)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        observe(None);
    }
}

fn name(task: usize) -> String {
    format!("/job:ps/replica:0/task:{task}")
}

/// In the ClusterSpec.
fn known_address(task: usize, has_names: bool) -> String {
    if has_names { names::of(task) } else { address(task).to_string() }
}

fn address(task: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, task as u8], 1000))
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let now = Instant::now();
        let mut some = |values: &[u64]| values[random.below(values.len() as u64) as usize].to_string();
        let mut settings = vec![
            ("STARWIRE_UNIX", "off".to_owned()),
            (
                "STARWIRE_KEEPALIVE",
                format!("after_ms={},timeout_ms={}", some(&[100, 1000, 5000]), some(&[500, 3000, 15_000])),
            ),
            ("NETWORK_MAX_CONNECTION_TIMEOUT", some(&[500, 2000, 10_000])),
        ];
        let mut scenario = match random.below(4) {
            0 => Scenario::Stalls,
            1 => Scenario::Restarts,
            _ => Scenario::Faults,
        };
        let has_secret = random.below(3) == 0;
        let mut tasks = 2 + random.below(3) as usize;
        let (mut certificates, mut names) = (None, None);
        // Odd seeds repeat what they did before there was this.
        let has_more = seed % 2 == 0;
        if has_more {
            certificates = (!has_secret && random.below(2) == 0).then(Certificates::new);
            names = (random.below(3) == 0).then(Names::default);
            if scenario == Scenario::Faults && random.below(3) == 0 {
                scenario = Scenario::Resets;
            }
            // Seldom dozens, which take their time.
            if random.below(12) == 0 {
                tasks = MOST_TASKS;
            }
        }
        // Nor do the first ones have this.
        let has_clients = has_more && seed > LAST_WITHOUT_CLIENTS;
        if has_clients {
            let mut some = |values: &[u64]| values[random.below(values.len() as u64) as usize];
            let limits = format!("plan_idle_s={},inline_us={}", some(&[1, 10, 3600]), some(&[0, 250]));
            settings.push(("STARWIRE_STAR_LIMITS", limits));
        }
        settings.extend(certificates.iter().flat_map(Certificates::settings));
        let net = Rc::new(RefCell::new(Net::new(random, now)));
        net.borrow_mut().is_faulty = scenario == Scenario::Faults;
        net.borrow_mut().cuts_early = has_more && scenario == Scenario::Faults;
        let mut world = Self {
            scenario,
            net,
            now,
            ledger: Arc::default(),
            tasks: Vec::new(),
            settings,
            has_more,
            has_clients,
            secret: has_secret.then(|| Secret::new(b"of all tasks")),
            _certificates: certificates,
            names,
            kill: Rc::default(),
            incarnations: 0,
            next: 0,
        };
        let (kill, net, ledger) = (world.kill.clone(), world.net.clone(), world.ledger.clone());
        observe(Some(Box::new(move |point| {
            if let Some(task) = kill.reached() {
                net.borrow_mut().dying = Some(task);
                *ledger.lock().unwrap().deaths.entry(point).or_default() += 1;
            }
        })));
        for task in 0..tasks {
            let started = world.start(task, tasks);
            world.tasks.push(started);
        }
        world
    }

    fn below(&self, n: u64) -> u64 {
        self.net.borrow_mut().below(n)
    }

    fn millis(&self, most: u64) -> Duration {
        Duration::from_millis(self.below(most))
    }

    /// Starts a task with a new incarnation.
    fn start(&mut self, task: usize, tasks: usize) -> Task {
        let env = self.settings.iter().fold(MapEnv::new("/nonexistent"), |env, (name, value)| env.set(name, value));
        let has_names = self.names.is_some();
        let identity = Identity {
            protocol: "grpc++".parse().unwrap(),
            job: "ps".into(),
            task: name(task),
            grpc_address: known_address(task, has_names),
            tasks: (0..tasks).map(|task| (name(task), known_address(task, has_names))).collect(),
            cpus_allowed: 2,
            grpc_gives_way: true,
        };
        let mut config = Config::from_env(&env, identity).unwrap();
        config.reactors = 1 + self.below(2) as usize;
        config.secret.clone_from(&self.secret);
        self.incarnations += 1;
        let shared = Arc::new(Shared::new(config, Owner::new(self.incarnations, &self.ledger), self.incarnations));
        let services = Services::new(&shared).unwrap();
        let (mut senders, mut shards) = (Vec::new(), Vec::new());
        for index in 0..shared.config.reactors {
            let driver = Box::new(SimDriver::new(&self.net, task));
            let (sender, receiver) = mailbox(EventWaker::of(&*driver).unwrap());
            senders.push(sender);
            // So many that only some seeds evict.
            let least = if self.scenario == Scenario::Faults { 1 } else { 100 };
            let admission = Admission::new(least + self.below(20) as usize, self.now);
            let mut shard = Shard::new(index, shared.clone(), services.clone(), driver, receiver, admission);
            shard.set_names(names::ask);
            shards.push(shard);
        }
        let _ = shared.senders.set(senders);
        let listener = self.net.borrow_mut().listener(address(task));
        shards[0].listen(listener, Listener::Tcp).unwrap();
        let mut open_channels = Channels::default();
        let channels = (0..tasks).map(|peer| open(&shared, &mut open_channels, peer, has_names)).collect();
        let incarnation = self.incarnations;
        Task {
            incarnation,
            shared,
            shards,
            channels,
            started: Vec::new(),
            cancelled: Vec::new(),
            pauses_until: self.now,
        }
    }

    /// Starts a request of random kind and size.
    fn request(&mut self, from: usize, to: usize, must_succeed: bool) {
        self.next += 1;
        let id = self.next;
        if self.below(3) == 0 {
            return self.star_call(id, from, to, must_succeed);
        }
        let size = match self.below(6) {
            0 => 0,
            1 => self.below(100),
            2 => self.below(20_000),
            3 if self.below(8) == 0 => self.below(4_000_000),
            3 => self.below(400_000),
            _ => self.below(9000),
        } as usize;
        let is_recv = self.below(2) == 0;
        let refuses = !must_succeed && self.below(30) == 0;
        let (deadline_ms, waits) = match self.below(4) {
            _ if must_succeed => (0, true),
            0 => (1 + self.below(5000) as u32, self.below(2) == 0),
            1 => (0, true),
            _ => (0, false),
        };
        // It begins to count when the task runs again.
        let begins = self.now.max(self.tasks[from].pauses_until);
        let due = (deadline_ms > 0 && !is_recv).then(|| begins + Duration::from_millis(deadline_ms.into()));
        self.ledger.lock().unwrap().open.insert(id, Open { is_cancelled: false, has_buffers: false, due });
        let request = |meta, parts| Any::Plain(Request { id, ledger: self.ledger.clone(), meta, parts, refuses });
        let task = &self.tasks[from];
        let number = if is_recv && !must_succeed {
            let (step, frame, iter) = (self.below(9) as i64, self.below(2), self.below(3));
            let prefix = format!("key;{};{}", self.below(20), size).into_bytes();
            let op = PendingOp::new(request(prefix.clone(), value(&prefix, step, frame, iter)));
            task.channels[to].recv(NewRecv { step, prefix: prefix.into(), frame, iter, op })
        } else {
            let meta = id.to_le_bytes().to_vec();
            let parts: Vec<Vec<u8>> = (0..self.below(4)).map(|part| vec![(id + part) as u8; size]).collect();
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

    fn star_call(&mut self, id: u64, from: usize, to: usize, must_succeed: bool) {
        let (lane, number) = self.tasks[from].channels[to].take_lane();
        let incarnations = (self.tasks[from].incarnation, self.tasks[to].incarnation);
        let waits = must_succeed;
        let must_succeed = must_succeed || self.scenario == Scenario::Resets;
        // Only what ends by itself, when all others wait for it.
        let plan = Plan::of(self.below(if must_succeed { 2 } else { 3 }));
        self.ledger.lock().unwrap().open.insert(id, Open { is_cancelled: false, has_buffers: false, due: None });
        let call = Call { id, from, to, incarnations, plan, lane, number, attempt: 0, waits, must_succeed };
        self.ledger.lock().unwrap().next.push(Next::Call(call));
        self.proceed();
    }

    /// Workers go on with star calls of which a request has ended.
    fn proceed(&mut self) {
        let all = std::mem::take(&mut self.ledger.lock().unwrap().next);
        for next in all {
            let call = next.call();
            let Task { channels, started, incarnation, .. } = &mut self.tasks[call.from];
            if *incarnation != call.incarnations.0 {
                self.ledger.lock().unwrap().open.remove(&call.id);
                continue;
            }
            let registers = match &next {
                Next::Call(_) => false,
                Next::Register(_) => true,
                Next::GiveLane(call) => {
                    channels[call.to].give_lane(call.lane);
                    continue;
                }
            };
            let number = channels[call.to].call(call.request(&self.ledger, registers));
            started.push((call.to, number, call.id));
        }
    }

    fn cancel_one(&mut self, from: usize) {
        if self.tasks[from].started.is_empty() {
            return;
        }
        let at = self.below(self.tasks[from].started.len() as u64) as usize;
        let (to, number, id) = self.tasks[from].started.swap_remove(at);
        self.tasks[from].cancelled.push(id);
        if let Some(open) = self.ledger.lock().unwrap().open.get_mut(&id) {
            open.is_cancelled = true;
            self.tasks[from].channels[to].cancel(number, 1, "cancelled by the test".into());
        }
    }

    /// Answers some of the requests that wait at a task.
    fn answer(&self, task: usize, all: bool) {
        let Task { shared, .. } = &self.tasks[task];
        let jobs = std::mem::take(&mut *shared.host.kernels.jobs.lock().unwrap());
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
            let (ticket, outcome) = (run.ticket, run.outcome(bytes));
            let done = Command::Star(Box::new(StarCommand::Done { ticket, outcome }));
            shared.send(shard_of(ticket.conn), done);
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
            if !all && self.below(3) == 0 {
                return;
            }
        }
    }

    /// Lets all reactors of a task run once.
    fn run(&mut self, task: usize) {
        self.kill.runs.set(task);
        for shard in &mut self.tasks[task].shards {
            shard.turn(self.now);
            if self.net.borrow().dying == Some(task) {
                return self.die(task);
            }
        }
        if let Some(names) = &mut self.names {
            names.take(&self.tasks[task].shared, &mut self.net.borrow_mut());
        }
    }

    /// Lets time pass until something happens, but not beyond `most`.
    fn pass(&mut self, most: Instant) {
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
        let is_busy = self.net.borrow().moved > before;
        let due = self.tasks.iter_mut().flat_map(|task| &mut task.shards).filter_map(Shard::next_due).min();
        let others = self.net.borrow().next_due().into_iter().chain(self.names.as_ref().and_then(Names::next_due));
        let due = due.into_iter().chain(others).min().filter(|_| !is_busy);
        let little = Duration::from_micros(10 + self.below(200));
        let next = due.unwrap_or(self.now).max(self.now + little).min(most.max(self.now + little));
        self.now = next;
        self.net.borrow_mut().now = next;
    }

    fn fault(&mut self) {
        let tasks = self.tasks.len() as u64;
        let (a, b) = (self.below(tasks) as usize, self.below(tasks) as usize);
        match self.below(20) {
            0..3 if self.scenario == Scenario::Stalls => {
                self.now += self.millis(30_000);
                self.net.borrow_mut().now = self.now;
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
                let bytes = clients::first_bytes(&mut self.net.borrow_mut().random);
                self.net.borrow_mut().send_as_client(address(a), bytes);
            }
            0..16 if self.scenario == Scenario::Resets => self.net.borrow_mut().reset_one(),
            _ if self.scenario != Scenario::Faults => {}
            0..4 => self.net.borrow_mut().reset_one(),
            4..6 => {
                let until = self.now + self.millis(20_000);
                self.net.borrow_mut().partition(a, b, until);
            }
            6 if self.tasks[a].pauses_until <= self.now => {
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
        if self.scenario == Scenario::Restarts || self.below(2) == 0 {
            self.stop(task);
            self.check_end(task);
            let tasks = self.tasks.len();
            self.tasks[task] = self.start(task, tasks);
        } else {
            self.die(task);
        }
    }

    /// A task dies, and starts again.
    fn die(&mut self, task: usize) {
        self.net.borrow_mut().kill(task);
        self.tasks[task].shards.iter_mut().for_each(Shard::abandon);
        if let Some(names) = &mut self.names {
            names.forget(&self.tasks[task].shared);
        }
        self.check_requests(task);
        let tasks = self.tasks.len();
        self.tasks[task] = self.start(task, tasks);
    }

    fn stop(&mut self, task: usize) {
        let shards = self.tasks[task].shards.len();
        (0..shards).for_each(|shard| self.tasks[task].shared.send(shard, Command::Stop));
        let until = self.now + Duration::from_secs(3);
        while self.now < until && !self.tasks[task].shards.iter().all(|shard| shard.is_finished(self.now)) {
            self.pass(until);
            self.run(task);
        }
        self.tasks[task].shards.iter_mut().for_each(Shard::end);
    }

    /// Requests between all tasks succeed, and all others end.
    fn request_all(&mut self) {
        let tasks = self.tasks.len();
        for from in 0..tasks {
            (0..tasks).for_each(|to| self.request(from, to, true));
        }
        let until = self.now + RECOVERY;
        while !self.ledger.lock().unwrap().open.is_empty() {
            assert!(self.now < until, "requests that do not end: {:?}", self.ledger.lock().unwrap().open.keys());
            (0..tasks).for_each(|task| self.answer(task, true));
            self.pass(until);
        }
    }
}

fn open(shared: &Arc<Shared<Owner>>, channels: &mut Channels, task: usize, has_names: bool) -> Channel<Owner> {
    let address = known_address(task, has_names);
    let data = DataAddress::Derived(address.parse::<HostPort>().unwrap());
    let peer = Peer { task: name(task), grpc_address: address, data, has_joined: false };
    channels.open(shared, peer).unwrap()
}

/// Returns what has come of it.
fn simulate(seed: u64, rounds: u64) -> Ledger {
    let mut world = World::new(seed);
    let tasks = world.tasks.len() as u64;
    if matches!(world.scenario, Scenario::Stalls | Scenario::Resets) {
        world.request_all();
    }
    if world.scenario == Scenario::Resets {
        world.net.borrow_mut().cuts_early = true;
    }
    for round in 0..rounds {
        match world.below(10) {
            0..5 => {
                let (from, to) = (world.below(tasks) as usize, world.below(tasks) as usize);
                (0..1 + world.below(5)).for_each(|_| world.request(from, to, false));
            }
            5..8 => world.answer(world.below(tasks) as usize, false),
            8 => world.cancel_one(world.below(tasks) as usize),
            _ => world.fault(),
        }
        let until = world.now + world.millis(if world.below(20) == 0 { 2000 } else { 20 });
        // At least once: all requests are started.
        world.pass(until);
        while world.now < until {
            world.pass(until);
        }
        world.check_deadlines();
        // It takes long.
        if round % 10 == 0 {
            world.check_gauges();
        }
    }
    world.kill.next.set(None);
    world.net.borrow_mut().heal();
    world.tasks.iter_mut().for_each(|task| task.pauses_until = world.now);
    world.request_all();
    for task in 0..tasks as usize {
        world.stop(task);
        world.check_end(task);
    }
    let found = std::mem::take(&mut *world.ledger.lock().unwrap());
    let has_lost = found.ended.contains_key(&code::UNAVAILABLE);
    assert!(world.scenario != Scenario::Stalls || !has_lost, "{:?}", found.ended);
    found
}

/// Names the seed of a simulation that fails.
struct Seed(u64);

impl Drop for Seed {
    #[expect(clippy::print_stderr, reason = "for whoever runs the test")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the simulation of seed {} failed", self.0);
        }
    }
}

#[test]
fn requests_end_as_they_should() {
    let _reached = starwire_marks::expect("a connection is cut before its reactor sees it");
    let (mut all, mut saved, mut deaths) = (BTreeMap::<i32, u64>::new(), 0, BTreeMap::<&str, u64>::new());
    for seed in 1..=LAST_WITHOUT_CLIENTS + 3 {
        let _seed = Seed(seed);
        let found = simulate(seed, 300);
        found.ended.into_iter().for_each(|(code, count)| *all.entry(code).or_default() += count);
        found.deaths.into_iter().for_each(|(point, count)| *deaths.entry(point).or_default() += count);
        saved += found.saved;
    }
    let codes: Vec<i32> = all.keys().copied().collect();
    let errors = [code::CANCELLED, code::DEADLINE_EXCEEDED, code::RESOURCE_EXHAUSTED, code::ABORTED, code::UNAVAILABLE];
    assert_eq!(codes, [&[0][..], &errors].concat(), "{all:?}");
    assert!(saved > 0);
    assert!(deaths.len() > 2, "tasks died at these points only: {deaths:?}");
}

/// `make simulate`; `STARWIRE_SIM_SEED=7 make simulate` begins with this seed.
#[test]
#[ignore = "has no end"]
fn requests_end_as_they_should_with_any_seed() {
    let given = std::env::var("STARWIRE_SIM_SEED").ok().map(|seed| seed.parse().unwrap());
    let first = given.unwrap_or_else(|| std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() << 20);
    for seed in first.. {
        let _seed = Seed(seed);
        simulate(seed, 300);
    }
}
