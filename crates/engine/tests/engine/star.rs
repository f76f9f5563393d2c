//! Star calls over real connections, to kernels without TensorFlow.

use std::collections::HashSet;
use std::fs;
use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use starwire_engine::config::{Identity, MapEnv};
use starwire_marks::fail_points::observe;
use starwire_protocol::code;
use starwire_protocol::star::{
    CALL, CallHead, CallId, END, EndHead, Keep, LAST, PlanHash, REGISTER, REPLY_BYTES, RegisterHead, ReplyHead, TRACE,
    UNKNOWN_PLAN, plan_hash,
};
use starwire_protocol::state::{STATE, StateReply, StateRequest};

use crate::admission::{self, CANCEL, PING, REPLY, WELCOME, connect, heard, hello_of};
use crate::harness::kernels::INCARNATION;
use crate::harness::{self, Channel, End, Options, PATIENCE, Task, Waiter, eventually, payload};
use crate::{PS, WORKER, count};

struct Pair {
    ps: Task,
    _worker: Task,
    channel: Channel,
}

/// The raw connections of a test answer no PING.
const QUIET: (&str, &str) = ("STARWIRE_KEEPALIVE", "after_ms=600000,timeout_ms=600000");

fn pair(env: &[(&str, &str)]) -> Pair {
    let ps = Task::try_start(PS, "star_server", 1, env).unwrap();
    let worker = Task::try_start(WORKER, "star_server", 1, env).unwrap();
    worker.knows(PS, &ps);
    let channel = worker.channel(PS);
    Pair { ps, _worker: worker, channel }
}

/// The head of a call of this plan.
fn head<'a>(session: &'a str, plan: &str, step: i64) -> CallHead<'a> {
    let (plan, session) = (plan_hash(plan.as_bytes()), session.as_bytes());
    CallHead { flags: 0, step, incarnation: INCARNATION, plan, call_id: None, session, keeps: Vec::new() }
}

fn keeping<'a>(session: &'a str, plan: &str, step: i64, slots: &[u32]) -> CallHead<'a> {
    let keeps = slots.iter().map(|slot| Keep { fetch: 0, slot: *slot, flags: 0 }).collect();
    CallHead { keeps, ..head(session, plan, step) }
}

impl Pair {
    fn begin(&self, head: &CallHead<'_>, table: &str) -> (u64, Arc<Waiter>) {
        let mut meta = Vec::new();
        head.write(&mut meta).unwrap();
        meta.extend_from_slice(table.as_bytes());
        harness::call_with(&self.channel, CALL, &meta, None, &Options::default())
    }

    fn call(&self, head: &CallHead<'_>, table: &str) -> End {
        self.begin(head, table).1.wait()
    }

    fn begin_register(&self, session: &str, hash: PlanHash, parts: Vec<Vec<u8>>, incarnation: u64) -> Arc<Waiter> {
        let mut meta = Vec::new();
        RegisterHead { incarnation, plan: hash, session: session.as_bytes() }.write(&mut meta).unwrap();
        let payload = payload(parts, &self.ps.seen.released);
        harness::call_with(&self.channel, REGISTER, &meta, Some(payload), &Options::default()).1
    }

    fn register(&self, session: &str, plan: &str) -> End {
        let plan = plan.as_bytes();
        self.begin_register(session, plan_hash(plan), vec![plan.to_vec()], INCARNATION).wait()
    }

    fn end_step(&self, step: i64) -> End {
        let mut meta = Vec::new();
        EndHead { step, session: b"one" }.write(&mut meta).unwrap();
        harness::call(&self.channel, END, &meta, None)
    }

    fn metric(&self, name: &str) -> f64 {
        let text = self.ps.engine().metrics_text();
        let line = text.lines().find(|line| line.starts_with(&format!("starwire_star_{name}{{"))).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    fn has(&self, name: &str, value: f64) {
        eventually(&format!("{name} = {value}"), || self.metric(name) == value);
    }
}

/// The table of the reply to a call whose plan is known.
fn table(end: &End) -> String {
    assert_eq!(end.code, 0, "{}", end.message);
    assert_eq!(ReplyHead::read(&end.meta).unwrap().flags, 0);
    String::from_utf8(end.meta[REPLY_BYTES..].to_vec()).unwrap()
}

fn asks_for_plan(end: &End) -> bool {
    assert_eq!(end.code, 0, "{}", end.message);
    ReplyHead::read(&end.meta).unwrap().flags == UNKNOWN_PLAN
}

#[test]
fn sessions_share_plans() {
    let pair = pair(&[]);
    assert!(asks_for_plan(&pair.call(&head("one", "echo", 1), "x")));
    assert_eq!(pair.register("one", "echo").code, 0);
    assert_eq!(table(&pair.call(&head("one", "echo", 1), "hello")), "hello");
    assert_eq!(table(&pair.call(&head("two", "echo", 1), "adopted")), "adopted");
    assert!(asks_for_plan(&pair.call(&head("alone", "echo", 1), "own devices")));
    assert_eq!(pair.call(&head("nobody", "echo", 1), "").code, code::ABORTED);
    pair.has("plans", 1.0);
    pair.has("registrations_total", 1.0);
    pair.has("calls_total", 5.0);
    pair.has("plan_hits_total", 2.0);
}

#[test]
fn cheap_plans_run_on_the_reactor() {
    let pair = pair(&[("STARWIRE_STAR_LIMITS", "inline_us=1000000")]);
    for plan in ["echo", "echo, and one may block"] {
        pair.register("one", plan);
    }
    let kernels = &pair.ps.seen.kernels;
    for round in 0..10 {
        assert_eq!(table(&pair.call(&head("one", "echo", round), "x")), "x");
        assert_eq!(kernels.inline.load(Relaxed), u64::try_from(round - 2).unwrap_or(0), "after three runs elsewhere");
    }
    let traced = CallHead { flags: TRACE, ..head("one", "echo", 1) };
    assert_eq!(table(&pair.call(&traced, "x")), "x");
    assert_eq!(kernels.inline.load(Relaxed), 7, "a traced run takes longer");
    pair.has("calls_inline_total", 7.0);
}

#[test]
fn values_stay_for_later_calls_of_the_step() {
    let mut pair = pair(&[]);
    pair.register("one", "echo");
    assert_eq!(table(&pair.call(&keeping("one", "echo", 11, &[5]), "kept")), "kept");
    pair.has("slots", 1.0);
    assert_eq!(table(&pair.call(&head("one", "echo", 11), "slot 5")), "kept");
    assert_eq!(pair.call(&head("one", "echo", 11), "slot 6").code, code::FAILED_PRECONDITION);
    assert_eq!(pair.call(&head("one", "echo", 12), "slot 5").code, code::FAILED_PRECONDITION, "another step's");
    let last = CallHead { flags: LAST, ..head("one", "echo", 11) };
    assert_eq!(table(&pair.call(&last, "slot 5")), "kept");
    pair.has("slots", 0.0);
    assert_eq!(pair.call(&last, "slot 5").code, code::FAILED_PRECONDITION);
    // So does the end of the step ...
    pair.call(&keeping("one", "echo", 11, &[5, 6]), "kept");
    pair.has("slots", 2.0);
    assert_eq!(pair.end_step(11).code, 0);
    pair.has("slots", 0.0);
    // ... and the end of the connection.
    pair.call(&keeping("one", "echo", 11, &[5, 6]), "kept");
    pair.has("slots", 2.0);
    pair._worker.stop();
    pair.has("slots", 0.0);
    eventually("the values go", || pair.ps.seen.kernels.alive.load(Relaxed) == 1);
}

#[test]
fn limits_name_the_peer() {
    let pair = pair(&[("STARWIRE_STAR_LIMITS", "values=1,calls=1")]);
    for plan in ["echo", "block"] {
        pair.register("one", plan);
    }
    assert_eq!(pair.call(&keeping("one", "echo", 1, &[1]), "a").code, 0);
    let refused = pair.call(&keeping("one", "echo", 1, &[2]), "b");
    assert_eq!(refused.code, code::RESOURCE_EXHAUSTED);
    assert!(refused.message.contains("/job:worker/replica:0/task:0 keeps 2 values"), "{}", refused.message);
    let (id, waiting) = pair.begin(&head("one", "block", 2), "");
    eventually("it runs", || pair.ps.seen.kernels.running.load(Relaxed) == 1);
    let refused = pair.call(&head("one", "echo", 2), "");
    assert_eq!(refused.code, code::RESOURCE_EXHAUSTED);
    assert!(refused.message.contains("STARWIRE_STAR_LIMITS=calls"), "{}", refused.message);
    pair.channel.cancel(id, code::CANCELLED, "enough".into());
    waiting.wait();
    eventually("the call ends", || pair.call(&head("one", "echo", 2), "").code == 0);
    eventually("the refused value goes", || pair.ps.seen.kernels.alive.load(Relaxed) == 3);
}

#[test]
fn a_call_that_is_answered_counts_no_more() {
    let pair = pair(&[("STARWIRE_STAR_LIMITS", "calls=1,inline_us=1000000")]);
    pair.register("one", "echo");
    // On the reactor, and elsewhere.
    for flags in [0, TRACE] {
        for step in 0..300 {
            let call = CallHead { flags, ..head("one", "echo", step) };
            assert_eq!(table(&pair.call(&call, "x")), "x", "call {step}");
        }
    }
}

#[test]
fn a_cancelled_run_is_told_and_ends() {
    let pair = pair(&[]);
    pair.register("one", "block");
    let kernels = &pair.ps.seen.kernels;
    let (id, waiting) = pair.begin(&head("one", "block", 1), "");
    eventually("it runs", || kernels.running.load(Relaxed) == 1);
    pair.channel.cancel(id, code::CANCELLED, "no longer wanted".into());
    assert_eq!(waiting.wait().code, code::CANCELLED);
    eventually("it ends", || kernels.running.load(Relaxed) == 0);
    pair.has("calls_total", 1.0);
    assert_eq!(kernels.cancelled.load(Relaxed), 1);
}

#[test]
fn the_id_of_a_cancelled_call_is_in_use_until_its_run_ends() {
    let pair = pair(&[admission::ANY_WAY, QUIET]);
    pair.register("one", "block");
    let kernels = &pair.ps.seen.kernels;
    let mut peer = connect(&pair.ps);
    peer.write_all(&hello_of("star_server", 0, &[])).unwrap();
    assert_eq!(heard(&mut peer).unwrap()[0], WELCOME);
    let mut meta = Vec::new();
    head("one", "block", 1).write(&mut meta).unwrap();
    let call = admission::frame(admission::CALL, CALL, 1, &[0], &meta);
    let cancel = admission::frame(CANCEL, 1, 1, &[], b"");
    peer.write_all(&admission::block(1, &[call.clone(), cancel, call].concat())).unwrap();
    let mut replies = Vec::new();
    while !replies.windows(9).any(|text| text == b"is in use") {
        let control = heard(&mut peer).unwrap();
        assert_eq!(control[0], REPLY);
        replies.extend(control);
    }
    eventually("it ends", || kernels.running.load(Relaxed) == 0);
    pair.has("calls_total", 1.0);
    assert_eq!(kernels.cancelled.load(Relaxed), 1);
    drop(peer);
    assert!(asks_for_plan(&pair.call(&head("one", "another", 1), "it serves on")));
}

/// A worker's connection, byte by byte: always of the same process.
struct Wire {
    stream: TcpStream,
    sent: u64,
}

impl Wire {
    fn to(task: &Task) -> Self {
        let mut stream = connect(task);
        stream.write_all(&hello_of("star_server", 0, &[])).unwrap();
        assert_eq!(heard(&mut stream).unwrap()[0], WELCOME);
        Self { stream, sent: 0 }
    }

    /// Sends a call of this plan in lane 0.
    fn call(&mut self, plan: &str, number: u64, attempt: u32) {
        let call_id = Some(CallId { lane: 0, attempt, number: NonZeroU64::new(number).unwrap() });
        let mut meta = Vec::new();
        CallHead { call_id, ..head("one", plan, 1) }.write(&mut meta).unwrap();
        meta.extend(b"table");
        self.sent += 1;
        let call = admission::frame(admission::CALL, CALL, self.sent, &[0], &meta);
        self.stream.write_all(&admission::block(self.sent, &call)).unwrap();
    }

    /// Returns the next reply: its code, and its metadata or message.
    fn reply(&mut self) -> (u16, String) {
        let control = loop {
            let control = heard(&mut self.stream).unwrap();
            // After some seconds without a word.
            if control[0] != PING {
                break control;
            }
        };
        assert_eq!(control[0], REPLY);
        let code = u16::from_le_bytes(control[2..4].try_into().unwrap());
        let word = |at: usize| u32::from_le_bytes(control[at..at + 4].try_into().unwrap()) as usize;
        let (len, start) = (word(4), 24 + 8 * word(16));
        (code, String::from_utf8_lossy(&control[start..start + len]).into_owned())
    }

    fn gets_its_table(&mut self) {
        let (code, meta) = self.reply();
        assert!(code == 0 && meta.ends_with("table"), "{code} {meta}");
    }

    fn gets(&mut self, code: i32, words: &str) {
        let (found, message) = self.reply();
        assert!(i32::from(found) == code && message.contains(words), "{found} {message}");
    }
}

#[test]
fn a_call_that_comes_again_over_another_connection_runs_once() {
    let pair = pair(&[admission::ANY_WAY, QUIET]);
    let kernels = &pair.ps.seen.kernels;
    let ran = |runs| eventually("it runs", || kernels.runs.load(Relaxed) == runs);
    for plan in ["hold, then update", "update", "update much", "block, update", "read"] {
        assert_eq!(pair.register("one", plan).code, 0);
    }
    let mut wire = Wire::to(&pair.ps);
    // The connection ends during the run, the next one leaves with it.
    wire.call("hold, then update", 1, 0);
    ran(1);
    drop(wire);
    eventually("the server notices", || count(&pair.ps, "starwire_losses_total") == 1);
    let mut wire = Wire::to(&pair.ps);
    wire.call("hold, then update", 1, 1);
    kernels.released.store(true, Relaxed);
    wire.gets_its_table();
    // It ends before the worker has the reply. A request on the old connection may come late.
    let mut old = wire;
    wire = Wire::to(&pair.ps);
    wire.call("hold, then update", 1, 2);
    wire.gets_its_table();
    old.call("hold, then update", 1, 1);
    old.gets(code::CANCELLED, "too late");
    pair.has("calls_repeated_total", 2.0);
    assert_eq!(kernels.runs.load(Relaxed), 1);
    // The request never arrived.
    wire.call("update", 2, 1);
    wire.gets_its_table();
    assert_eq!(kernels.runs.load(Relaxed), 2);
    wire.call("hold, then update", 1, 3);
    wire.gets(code::CANCELLED, "too late");
    // Replies that are too long are not kept, and what changes nothing runs again.
    wire.call("update much", 3, 0);
    assert_eq!(wire.reply().0, 0);
    let mut wire = Wire::to(&pair.ps);
    wire.call("update much", 3, 1);
    wire.gets(code::UNAVAILABLE, "may have run");
    wire.call("read", 4, 0);
    wire.gets_its_table();
    wire.call("read", 4, 1);
    wire.gets_its_table();
    assert_eq!(kernels.runs.load(Relaxed), 5);
}

#[test]
fn sessions_with_other_names_for_a_server_have_calls_of_their_own() {
    let mut pair = pair(&[]);
    assert_eq!(pair.register("one", "update").code, 0);
    let other_name = "/job:there/replica:0/task:0";
    pair._worker.knows(other_name, &pair.ps);
    let other = pair._worker.channel(other_name);
    let mut taken = HashSet::new();
    for table in ["first", "second"] {
        for channel in [pair.channel.clone(), other.clone()] {
            let (lane, number) = channel.take_lane();
            assert!(taken.insert((lane, number)), "{lane} {number}");
            pair.channel = channel;
            let call_id = Some(CallId { lane, attempt: 0, number });
            assert_eq!(self::table(&pair.call(&CallHead { call_id, ..head("one", "update", 1) }, table)), table);
            // A repeat is recognised while the other name's calls go on.
            let call_id = Some(CallId { lane, attempt: 1, number });
            assert_eq!(self::table(&pair.call(&CallHead { call_id, ..head("one", "update", 1) }, "again")), table);
            pair.channel.give_lane(lane);
        }
    }
    assert_eq!(pair.ps.seen.kernels.runs.load(Relaxed), 4);
}

/// A folder that is removed at the end, and a copy of it: what a server finds that was killed then.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("starwire-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    fn copy(&self, name: &str) -> Self {
        let copy = Self::new(name);
        for entry in fs::read_dir(self.0.join("ps-0")).unwrap() {
            let path = entry.unwrap().path();
            fs::create_dir_all(copy.0.join("ps-0")).unwrap();
            fs::copy(&path, copy.0.join("ps-0").join(path.file_name().unwrap())).unwrap();
        }
        copy
    }

    fn pair(&self) -> Pair {
        self.pair_with("async")
    }

    fn pair_with(&self, mode: &str) -> Pair {
        let state = [("STARWIRE_STATE", self.0.to_str().unwrap()), ("STARWIRE_STATE_MODE", mode)];
        let pair = pair(&[admission::ANY_WAY, QUIET, state[0], state[1]]);
        for plan in ["hold, then update", "update", "read"] {
            assert_eq!(pair.register("one", plan).code, 0);
        }
        pair
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_server_that_was_killed_has_whole_calls_back_and_recognises_them() {
    let folder = Folder::new("killed");
    let pair = folder.pair();
    let mut wire = Wire::to(&pair.ps);
    wire.call("update", 1, 0);
    wire.gets_its_table();
    // The flush that has it is on the disk when the next one has begun.
    let kernels = &pair.ps.seen.kernels;
    eventually("a flush", || kernels.written.lock().unwrap().is_some_and(|(_, updates)| updates == 1));
    let copied = kernels.copied.load(Relaxed);
    eventually("the next flush", || kernels.copied.load(Relaxed) > copied);
    let killed = folder.copy("killed-copy");
    wire.call("update", 2, 0);
    wire.gets_its_table();
    // The end of a server writes everything.
    drop(pair);

    let pair = killed.pair();
    let kernels = &pair.ps.seen.kernels;
    assert_eq!(kernels.updates.load(Relaxed), 1);
    let mut wire = Wire::to(&pair.ps);
    wire.call("update", 1, 1);
    wire.gets_its_table();
    assert_eq!((kernels.runs.load(Relaxed), kernels.updates.load(Relaxed)), (0, 1), "it has run");
    wire.call("update", 2, 1);
    wire.gets_its_table();
    assert_eq!((kernels.runs.load(Relaxed), kernels.updates.load(Relaxed)), (1, 2), "its run was lost");
    drop(pair);

    for folder in [&folder, &killed] {
        let pair = folder.pair();
        let mut wire = Wire::to(&pair.ps);
        wire.call("update", 2, 2);
        wire.gets_its_table();
        assert_eq!(pair.ps.seen.kernels.updates.load(Relaxed), 2);
        pair.has("calls_repeated_total", 1.0);
    }
}

#[test]
fn what_a_synchronous_state_has_answered_is_in_the_folder() {
    let folder = Folder::new("synchronous");
    let pair = folder.pair_with("sync");
    let kernels = &pair.ps.seen.kernels;
    let mut wire = Wire::to(&pair.ps);
    for number in 1..=3 {
        wire.call("update", number, 0);
        wire.gets_its_table();
        let killed = folder.copy("synchronous-copy");
        let pair = killed.pair();
        assert_eq!(pair.ps.seen.kernels.updates.load(Relaxed), number);
        let mut wire = Wire::to(&pair.ps);
        wire.call("update", number, 1);
        wire.gets_its_table();
        assert_eq!(pair.ps.seen.kernels.updates.load(Relaxed), number, "it has run");
    }
    // A call is answered when it is written, also one that comes again; one that only reads is answered at once.
    kernels.holds.store(4, Relaxed);
    wire.call("update", 4, 0);
    eventually("it runs", || kernels.updates.load(Relaxed) == 4);
    wire.stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(wire.stream.peek(&mut [0]).is_err());
    let mut again = Wire::to(&pair.ps);
    again.call("update", 4, 1);
    again.stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(again.stream.peek(&mut [0]).is_err());
    assert_eq!(table(&pair.call(&head("one", "read", 1), "reads")), "reads");
    kernels.holds.store(0, Relaxed);
    again.stream.set_read_timeout(Some(PATIENCE)).unwrap();
    again.gets_its_table();
    assert_eq!(folder.copy("synchronous-copy").pair().ps.seen.kernels.updates.load(Relaxed), 4);
    assert_eq!(kernels.updates.load(Relaxed), 4);
}

#[test]
fn a_state_is_for_processes_of_its_task_and_whoever_comes_later_is_sent_on() {
    let (folder, other) = (Folder::new("moves"), Folder::new("moved"));
    let pair = folder.pair();
    let end = harness::call(&pair.channel, STATE, &StateRequest::Begin.write(), None);
    assert_eq!(end.code, code::PERMISSION_DENIED, "{}", end.message);
    assert!(end.message.ends_with("is copied by processes of that task only"), "{}", end.message);

    let vars = MapEnv::new("/nonexistent").set("STARWIRE_STATE", other.0.to_str().unwrap());
    let vars = vars.set("STARWIRE_STATE_FROM", format!("move={}", pair.ps.address()));
    let (said, lines) = std::sync::mpsc::channel();
    let takes_over = move |address: &str| {
        let identity = Identity {
            protocol: "star_server".parse().unwrap(),
            job: "ps".into(),
            task: PS.into(),
            grpc_address: address.into(),
            tasks: vec![(PS.into(), address.into())],
            cpus_allowed: 2,
            grpc_gives_way: true,
        };
        let said = said.clone();
        starwire_engine::take_over(&vars, identity, Arc::new(move |_, line| drop(said.send(line.to_owned()))))
    };
    for (own, lacks) in [("127.0.0.1:0", "port"), ("0.0.0.0:2", "host"), ("[::]:2", "host")] {
        let refused = takes_over(own).unwrap_err().to_string();
        let expected = format!("{own}, this server's address in the ClusterSpec, has no {lacks} that workers");
        assert!(refused.contains(&expected), "{refused}");
    }
    let mut copy = connect(&pair.ps);
    copy.write_all(&admission::hello_as(PS, "star_server", 0, &[])).unwrap();
    assert_eq!(heard(&mut copy).unwrap()[0], WELCOME);
    // It dies, and comes back, when the state is its own, and it does not know yet.
    observe(Some(Box::new(|point| assert_ne!(point, "the state is this process's, and its folder does not say so"))));
    let died = catch_unwind(AssertUnwindSafe(|| takes_over("127.0.0.1:2")));
    observe(None);
    assert!(died.is_err());
    takes_over("127.0.0.1:2").unwrap();
    whoever_copies_a_state_that_moves_is_sent_on(copy);
    // A client that does not go where WELCOME leads.
    let mut wire = Wire::to(&pair.ps);
    wire.call("update", 1, 0);
    wire.gets(code::UNAVAILABLE, "starwire: another process has this task now");
    assert_eq!(pair.ps.seen.kernels.updates.load(Relaxed), 0);
    // Its disk is lost, and with it what it has written since. The thread waits until the test ends.
    fs::remove_dir_all(&other.0).unwrap();
    std::thread::spawn(move || takes_over("127.0.0.1:2"));
    let is_refused =
        |line: String| line.contains("the state has moved to 127.0.0.1:2: what is left of it here is older");
    eventually("it is refused", || lines.try_iter().any(is_refused));
}

#[test]
fn a_server_goes_on_if_the_process_that_takes_over_is_not_heard_of() {
    let folder = Folder::new("given-up");
    let pair = folder.pair();
    let asks = |request: StateRequest<'_>| {
        let other = Task::try_start(PS, "star_server", 2, &[]).unwrap();
        other.knows(PS, &pair.ps);
        (harness::call(&other.channel(PS), STATE, &request.write(), None), other)
    };
    let address = "127.0.0.1:2";
    let (end, other) = asks(StateRequest::TakeOver { address });
    let Ok(StateReply::Prepared(position)) = StateReply::read(&end.meta) else { panic!("{end:?}") };
    let mut wire = Wire::to(&pair.ps);
    wire.call("update", 1, 0);
    wire.stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(wire.stream.peek(&mut [0]).is_err(), "no change follows");
    drop(other);
    wire.stream.set_read_timeout(Some(harness::PATIENCE)).unwrap();
    wire.gets_its_table();
    let line = "was not handed over: the process that takes over was not heard of";
    eventually("a line in the log", || pair.ps.logged(line) == 1);
    let (end, _other) = asks(StateRequest::Confirm { position, address });
    assert!(end.code == code::ABORTED && end.message.contains("the take-over was given up"), "{end:?}");
}

/// A third process of the task: it would follow one whose state is older, and be told to take over when that ends.
fn whoever_copies_a_state_that_moves_is_sent_on(mut copy: TcpStream) {
    let ended = std::iter::repeat_with(|| heard(&mut copy)).find_map(Result::err).unwrap().kind();
    assert!(matches!(ended, ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset), "{ended}");
}

#[test]
fn calls_run_while_a_flush_waits_for_one_that_does_not_end() {
    let folder = Folder::new("waits");
    let pair = folder.pair();
    let kernels = &pair.ps.seen.kernels;
    let mut slow = Wire::to(&pair.ps);
    slow.call("hold, then update", 1, 0);
    eventually("it runs", || kernels.runs.load(Relaxed) == 1);
    eventually("a flush that waits for it", || kernels.begun.load(Relaxed) > kernels.copied.load(Relaxed));
    // The flush tries again every second, for longer each time, and nothing tells of it.
    for number in 0..30 {
        assert_eq!(table(&pair.call(&head("one", "update", number), "goes on")), "goes on");
        assert_eq!(table(&pair.call(&head("one", "read", number), "reads")), "reads");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(kernels.written.lock().unwrap().is_none_or(|(_, updates)| updates == 0), "never a part of a call");
    kernels.released.store(true, Relaxed);
    slow.gets_its_table();
    eventually("everything is written", || kernels.written.lock().unwrap().is_some_and(|(_, all)| all == 31));
}

#[test]
fn a_stop_does_not_wait_for_a_flush_that_waits_for_a_call() {
    let folder = Folder::new("stops");
    let pair = folder.pair();
    let kernels = pair.ps.seen.kernels.clone();
    let begun = || kernels.begun.load(Relaxed);
    Wire::to(&pair.ps).call("hold, then update", 1, 0);
    eventually("it runs", || kernels.runs.load(Relaxed) == 1);
    eventually("a flush that waits for it", || begun() > kernels.copied.load(Relaxed));
    let before = begun();
    let engine = pair.ps.engine().clone();
    let stop = std::thread::spawn(move || engine.stop());
    eventually("the last flush", || begun() == before + 1);
    assert_eq!(kernels.lost.load(Relaxed), 1, "what was copied for the first one comes again");
    kernels.released.store(true, Relaxed);
    stop.join().unwrap();
    drop(pair);
    assert_eq!(folder.pair().ps.seen.kernels.updates.load(Relaxed), 1);
}

#[test]
fn what_is_answered_while_a_server_stops_is_in_the_folder() {
    let folder = Folder::new("stopping");
    let pair = folder.pair();
    let (kernels, engine) = (pair.ps.seen.kernels.clone(), pair.ps.engine().clone());
    let stopping = engine.clone();
    let stop = std::thread::spawn(move || stopping.stop());
    let (answer, answers) = std::sync::mpsc::channel();
    // As a graph that TensorFlow runs: it is not in the log of calls, and no flush waits for it.
    let update = move || {
        kernels.updates.fetch_add(1, Relaxed);
        let answer = answer.clone();
        engine.when_written(Box::new(move |is_written| answer.send(is_written).unwrap()));
    };
    while !stop.is_finished() {
        update();
    }
    stop.join().unwrap();
    update();
    drop(update);
    let answers: Vec<bool> = answers.iter().collect();
    let answered = answers.iter().filter(|is_written| **is_written).count() as u64;
    assert_eq!(answers.last(), Some(&false), "the server has stopped");
    drop(pair);
    let restored = folder.pair().ps.seen.kernels.updates.load(Relaxed);
    assert!(answered <= restored, "{answered} updates were answered, {restored} are back");
}

#[test]
fn a_run_that_waits_does_not_outlive_its_connection() {
    let pair = pair(&[admission::ANY_WAY, QUIET]);
    pair.register("one", "block, update");
    let kernels = &pair.ps.seen.kernels;
    let mut wire = Wire::to(&pair.ps);
    wire.call("block, update", 1, 0);
    eventually("it runs", || kernels.running.load(Relaxed) == 1);
    drop(wire);
    eventually("it is cancelled", || kernels.running.load(Relaxed) == 0);
    let mut wire = Wire::to(&pair.ps);
    wire.call("block, update", 1, 1);
    wire.gets(code::UNAVAILABLE, "may have run");
    assert_eq!((kernels.runs.load(Relaxed), kernels.cancelled.load(Relaxed)), (1, 1));
}

#[test]
fn runs_of_a_lost_peer_are_cancelled() {
    let mut pair = pair(&[]);
    pair.register("one", "block");
    let (_, waiting) = pair.begin(&head("one", "block", 1), "");
    eventually("it runs", || pair.ps.seen.kernels.running.load(Relaxed) == 1);
    pair._worker.stop();
    assert_eq!(waiting.wait().code, code::UNAVAILABLE);
    eventually("it is cancelled", || pair.ps.seen.kernels.running.load(Relaxed) == 0);
    pair.has("calls_total", 1.0);
}

#[test]
fn a_stop_cancels_runs_and_drops_plans() {
    let mut pair = pair(&[]);
    pair.register("one", "block");
    let kernels = pair.ps.seen.kernels.clone();
    let (_, waiting) = pair.begin(&head("one", "block", 1), "");
    eventually("it runs", || kernels.running.load(Relaxed) == 1);
    let engine = pair.ps.engine().clone();
    engine.stop();
    assert_eq!(waiting.wait().code, code::UNAVAILABLE);
    eventually("it is cancelled", || kernels.running.load(Relaxed) == 0);
    assert_eq!(kernels.alive.load(Relaxed), 1, "the table has the plan");
    engine.star_forget_plans();
    eventually("the plan goes", || kernels.alive.load(Relaxed) == 0);
    drop(engine);
    pair.ps.stop();
}

#[test]
fn what_leaves_the_table_leaves_the_shards() {
    let pair = pair(&[("STARWIRE_STAR_LIMITS", "plans=2")]);
    let alive = || pair.ps.seen.kernels.alive.load(Relaxed);
    for round in 0..3 {
        for plan in ["a", "b", "c"] {
            assert!(asks_for_plan(&pair.call(&head("one", plan, 1), "x")), "evicted: {plan}, {round}");
            assert_eq!(pair.register("one", plan).code, 0);
            assert_eq!(table(&pair.call(&head("one", plan, 1), "x")), "x");
        }
    }
    pair.has("evictions_total", 7.0);
    eventually("evicted plans go", || alive() == 2);
    pair.ps.engine().star_forget_plans();
    eventually("all plans go", || alive() == 0);
    assert!(asks_for_plan(&pair.call(&head("one", "c", 1), "x")));
    pair.has("plans", 0.0);
}

#[test]
fn a_closed_session_takes_its_plans_along() {
    let pair = pair(&[]);
    for (session, plan) in [("one", "echo with state"), ("two", "echo with state"), ("one", "echo")] {
        pair.register(session, plan);
        assert_eq!(table(&pair.call(&head(session, plan, 1), "x")), "x");
    }
    pair.has("plans", 3.0);
    pair.ps.engine().star_session_closed(b"one");
    pair.has("plans", 2.0);
    eventually("the plan goes", || pair.ps.seen.kernels.alive.load(Relaxed) == 2);
    assert!(asks_for_plan(&pair.call(&head("one", "echo with state", 1), "x")));
    assert_eq!(table(&pair.call(&head("two", "echo with state", 1), "x")), "x");
    assert_eq!(table(&pair.call(&head("one", "echo", 1), "x")), "x", "what all share is adopted again");
}

#[test]
fn a_session_that_rests_keeps_its_state_until_it_is_deleted() {
    let pair = pair(&[("STARWIRE_STAR_LIMITS", "session_idle_s=1")]);
    for session in ["one", "two"] {
        pair.register(session, "echo with state");
        assert_eq!(table(&pair.call(&head(session, "echo with state", 1), "x")), "x");
    }
    pair.register("one", "echo");
    pair.call(&keeping("one", "echo", 11, &[5]), "kept");
    let kernels = &pair.ps.seen.kernels;
    // The server looks around while another session calls, and asks about those that rest.
    let rests = |session: usize, busy: &str, step: i64| {
        let before = kernels.asked[session].load(Relaxed);
        eventually("the session is asked about", || {
            assert_eq!(table(&pair.call(&head(busy, "echo with state", step), "x")), "x");
            kernels.asked[session].load(Relaxed) > before
        });
    };
    rests(0, "two", 2);
    assert_eq!(table(&pair.call(&head("one", "echo with state", 2), "x")), "x");
    // So does a step that rests between two calls.
    assert_eq!(table(&pair.call(&head("one", "echo", 11), "slot 5")), "kept");
    pair.has("plans", 3.0);
    kernels.two_is_gone.store(true, Relaxed);
    rests(1, "one", 3);
    pair.has("plans", 2.0);
    pair.has("slots", 1.0);
}

#[test]
fn a_plan_is_compiled_once_whoever_registers_it() {
    let pair = pair(&[]);
    for (plan, outcome) in [("echo slowly", 0), ("bad, slowly", code::INVALID_ARGUMENT)] {
        let before = pair.ps.seen.kernels.compiled.load(Relaxed);
        let begin = |session| {
            let bytes = plan.as_bytes();
            pair.begin_register(session, plan_hash(bytes), vec![bytes.to_vec()], INCARNATION)
        };
        let all: Vec<_> = (0..20).map(|n| begin(if n % 2 == 0 { "one" } else { "two" })).collect();
        for waiter in all {
            let end = waiter.wait();
            assert_eq!(end.code, outcome, "{}", end.message);
            if outcome != 0 {
                assert_eq!(end.message, format!("a bad plan (from {WORKER})"));
                assert_eq!(end.meta, b"details");
            }
        }
        let compiled = pair.ps.seen.kernels.compiled.load(Relaxed) - before;
        assert!(compiled == 1 || outcome != 0, "{compiled}");
    }
    pair.has("plans", 1.0);
}

#[test]
fn requests_that_break_the_rules_are_refused() {
    let pair = pair(&[]);
    pair.register("one", "echo");
    let restarted = CallHead { incarnation: INCARNATION + 1, ..head("one", "echo", 1) };
    let end = pair.call(&restarted, "x");
    assert_eq!(end.code, code::ABORTED);
    assert!(end.message.starts_with(&format!("starwire: {PS} was restarted:")), "{}", end.message);
    // Programs look for TensorFlow's words.
    assert!(end.message.contains("RecvTensor expects a different device incarnation"), "{}", end.message);
    assert_eq!(table(&pair.call(&CallHead { incarnation: 0, ..restarted }, "any")), "any");
    for method in [CALL, REGISTER, END] {
        let end = harness::call(&pair.channel, method, b"nonsense", None);
        assert_eq!(end.code, code::INVALID_ARGUMENT);
        assert!(
            end.message.starts_with("starwire: malformed ")
                && end.message.ends_with("(from /job:worker/replica:0/task:0)")
        );
    }
    let register = |hash, parts| pair.begin_register("one", hash, parts, INCARNATION).wait();
    let other = register(plan_hash(b"other"), vec![b"plan".to_vec()]);
    assert_eq!(other.code, code::INVALID_ARGUMENT);
    assert!(other.message.contains("plan hash mismatch"), "{}", other.message);
    let parts = register(plan_hash(b"plan"), vec![b"pl".to_vec(), b"an".to_vec()]);
    assert!(parts.message.contains("in 2 parts instead of one"), "{}", parts.message);
    assert_eq!(pair.begin_register("one", [0; 32], vec![b"x".to_vec()], 5).wait().code, code::ABORTED);
    assert_eq!(pair.begin_register("nobody", plan_hash(b"x"), vec![b"x".to_vec()], 0).wait().code, code::ABORTED);
    assert_eq!(table(&pair.call(&head("one", "echo", 1), "it serves on")), "it serves on");
}
