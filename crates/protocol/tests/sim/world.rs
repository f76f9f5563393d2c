//! Deterministic simulation: several connections in virtual time, a hostile network between them, and a check of what
//! must always hold after each step.
//!
//! `STARWIRE_SIM_SEED=n` repeats one run, `STARWIRE_SIM_SEEDS=n` makes more of them than the default.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use starwire_protocol::{Call, ConnectionError, FEATURE_LENDING, Recv, Secret, Settings};

use crate::owner::{BAD_PREFIX, Ended, REFUSED_META, REFUSED_METHOD, Request};
use crate::pair::{End, settings};
use crate::random::{Random, bytes_of, parts_of};

/// Stretching takes its time.
static SECRET: LazyLock<Secret> = LazyLock::new(|| Secret::new(b"simulated"));

const DEFAULT_SEEDS: u64 = 80;
const STEPS: u64 = 120;

/// One direction of a connection.
#[derive(Default)]
struct Wire {
    bytes: VecDeque<u8>,
    stalled_until: Option<Instant>,
    /// Bytes vanish, nobody is told.
    silent: bool,
}

/// What the client asked for and has not got.
struct Asked {
    request: Request,
    deadline: Option<Instant>,
    cancelled: bool,
}

/// What happened in all runs together: a simulation that never gets anywhere proves nothing.
#[derive(Debug, Default)]
struct Tally {
    ok: u64,
    errors: u64,
    refused_replies: u64,
    refused_requests: u64,
    cancelled: u64,
    deadlines: u64,
    lost: u64,
    turned_away: u64,
    silences: u64,
    violations: u64,
    cancelled_at_server: u64,
    peers_gone: u64,
    key_resets: u64,
    bulk_bytes: u64,
    lent_bytes: u64,
}

struct Link {
    client: End,
    server: End,
    to_server: Wire,
    to_client: Wire,
    open: BTreeMap<u64, Asked>,
    asked: u64,
    ended: u64,
    next_id: u64,
    keys: u64,
    /// Bytes were changed on the wire: contents cannot be trusted any more, everything else can.
    tainted: bool,
    silent_since: Option<Instant>,
    leaving: bool,
    over: bool,
    neighbours: bool,
}

impl Link {
    fn new(random: &mut Random, now: Instant) -> Link {
        let nonce = random.next() as u8;
        let (mut client, mut server) = (settings("/job:worker/task:0", nonce), settings("/job:ps/task:0", nonce ^ 255));
        let mut tighten = |settings: &mut Settings| {
            if random.chance(50) {
                settings.limits.max_recvs = 1 + random.below(20) as u32;
                settings.limits.max_calls = 1 + random.below(5) as u32;
                settings.limits.max_call_bytes = random.below(200_000);
                settings.limits.max_keys = 1 + random.below(12) as u32;
            }
        };
        tighten(&mut client);
        tighten(&mut server);
        if random.chance(30) {
            client.secret = Some(SECRET.clone());
            server.secret = client.secret.clone();
        }
        let neighbours = random.chance(40);
        if neighbours {
            (client.features, server.features) = (FEATURE_LENDING, FEATURE_LENDING);
        }
        let (mut client, mut server) = (End::client(client, now), End::server(server, now));
        if neighbours {
            End::make_neighbours(&mut client, &mut server);
        }
        Link {
            client,
            server,
            neighbours,
            to_server: Wire::default(),
            to_client: Wire::default(),
            open: BTreeMap::new(),
            asked: 0,
            ended: 0,
            next_id: 1,
            keys: 1 + random.below(30),
            tainted: false,
            silent_since: None,
            leaving: false,
            over: false,
        }
    }

    fn ask(&mut self, random: &mut Random, now: Instant) {
        let id = self.next_id;
        self.next_id += 1 + random.below(3);
        let deadline = random.chance(15).then(|| now + Duration::from_millis(random.below(400)));
        let request = if random.chance(65) {
            let prefix = match random.chance(3) {
                true => BAD_PREFIX.to_vec(),
                false => format!("key {}", random.below(self.keys)).into_bytes(),
            };
            let (frame, iter) = if random.chance(20) { (random.next(), random.below(4)) } else { (0, 0) };
            let step = random.next() as i64;
            self.client.recv(now, Recv { id, step, prefix: &prefix, frame, iter, deadline, op: () });
            Request::Recv { id, step, prefix, frame, iter }
        } else {
            let seed = random.next();
            let method = if random.chance(5) { REFUSED_METHOD } else { 1 + random.below(50) as u16 };
            let parts = match random.below(100) {
                0..30 => Vec::new(),
                // It is refused before all of it was sent.
                30..33 if method == REFUSED_METHOD => vec![bytes_of(seed, 9_000_000)],
                _ => parts_of(seed),
            };
            let payload = if parts.is_empty() { None } else { self.client.payload(parts.clone()) };
            let meta = seed.to_le_bytes().to_vec();
            self.client.call(now, Call { id, method, meta: meta.clone(), payload, deadline, op: () });
            Request::Call { id, method, deadline_ms: 0, meta, parts }
        };
        self.open.insert(id, Asked { request, deadline, cancelled: false });
        self.asked += 1;
    }

    fn cancel(&mut self, random: &mut Random, now: Instant) {
        let ids: Vec<u64> = self.open.keys().copied().collect();
        let Some(&id) = ids.get(random.below(ids.len() as u64) as usize) else { return };
        if let Some(asked) = self.open.get_mut(&id) {
            asked.cancelled = true;
        }
        self.client.cancel(now, id, "simulated");
    }

    fn answer(&mut self, random: &mut Random) {
        if random.chance(2) {
            // Nobody asked for this one.
            let payload = self.server.payload(vec![vec![1; 9000]]);
            self.server.connection.reply(u64::MAX, 0, b"", payload);
        }
        let count = self.server.owner.requests.len() as u64;
        if count == 0 {
            return;
        }
        let request = self.server.owner.requests.remove(random.below(count) as usize);
        if let (Request::Call { meta, parts, .. }, false) = (&request, self.tainted) {
            let seed = u64::from_le_bytes(meta[..].try_into().expect("8 bytes"));
            assert!(parts.is_empty() || *parts == parts_of(seed), "the payload of a call changed on its way");
        }
        let seed = seed_of(&request);
        match Answer::of(seed) {
            Answer::Ok => {
                let parts = parts_of(seed);
                let payload = if parts.is_empty() { None } else { self.server.payload(parts) };
                self.server.connection.reply(request.id(), 0, &seed.to_le_bytes(), payload);
            }
            Answer::Refused => {
                let payload = self.server.payload(vec![vec![1; 100], vec![2; 50_000]]);
                self.server.connection.reply(request.id(), 0, REFUSED_META, payload);
            }
            Answer::Error => {
                let payload = self.server.payload(vec![vec![9; (seed % 20_000) as usize]]);
                self.server.connection.reply(request.id(), 5, b"not here", payload);
            }
        }
    }

    /// Compares what ended with what was asked.
    fn collect(&mut self, now: Instant, tally: &mut Tally) {
        for (.., peer_gone) in self.server.owner.cancelled.drain(..) {
            *(if peer_gone { &mut tally.peers_gone } else { &mut tally.cancelled_at_server }) += 1;
        }
        for (id, ended) in std::mem::take(&mut self.client.owner.ended) {
            let asked = self.open.remove(&id).expect("only what is open can end, and only once");
            self.ended += 1;
            *match ended {
                Ended::Ok { .. } => &mut tally.ok,
                Ended::Peer { code: 5, .. } => &mut tally.errors,
                Ended::Peer { code: 14, .. } => &mut tally.turned_away,
                Ended::Peer { .. } => &mut tally.refused_requests,
                Ended::Local { code: 1, .. } => &mut tally.cancelled,
                Ended::Local { code: 4, .. } => &mut tally.deadlines,
                Ended::Local { code: 8, .. } => &mut tally.refused_replies,
                Ended::Local { .. } => &mut tally.lost,
            } += 1;
            match ended {
                Ended::Ok { meta, parts } => {
                    let seed = seed_of(&asked.request);
                    assert!(!asked.cancelled, "a cancelled request has no result");
                    assert!(self.tainted || matches!(Answer::of(seed), Answer::Ok));
                    assert!(self.tainted || meta == seed.to_le_bytes());
                    assert!(self.tainted || parts == parts_of(seed), "the payload of a reply changed on its way");
                }
                Ended::Peer { code: 5, message, details } => {
                    let seed = seed_of(&asked.request);
                    assert!(self.tainted || matches!(Answer::of(seed), Answer::Error));
                    assert!(self.tainted || (message == "not here" && details.len() as u64 == seed % 20_000));
                }
                Ended::Peer { code, message, .. } => {
                    let refused = match &asked.request {
                        Request::Recv { prefix, .. } => prefix == BAD_PREFIX && code == 3,
                        Request::Call { method, .. } => *method == REFUSED_METHOD && code == 12,
                    };
                    let leaving = self.leaving && code == 14;
                    assert!(self.tainted || refused || leaving, "unexpected answer {code} {message}");
                }
                Ended::Local { code: 1, .. } => assert!(asked.cancelled),
                Ended::Local { code: 4, .. } => assert!(asked.deadline.is_some_and(|deadline| deadline <= now)),
                Ended::Local { code: 8, message } => assert!(message.contains("no memory"), "{message}"),
                Ended::Local { code: 14, .. } => assert!(self.over || self.leaving),
                Ended::Local { code: 10, .. } => assert!(self.over),
                Ended::Local { code, message } => panic!("ended with {code} {message}"),
            }
        }
    }

    fn end_both(&mut self, code: i32, why: &str) {
        self.over = true;
        self.client.fail(code, why);
        self.server.fail(code, why);
        for wire in [&mut self.to_client, &mut self.to_server] {
            wire.bytes.clear();
        }
    }

    fn transmit(&mut self, random: &mut Random, now: Instant) {
        for (end, wire) in [(&mut self.client, &mut self.to_server), (&mut self.server, &mut self.to_client)] {
            // A socket's buffer is full sometimes.
            if wire.bytes.len() < 100_000 && random.chance(70) {
                end.send(now, &mut wire.bytes);
                if wire.silent {
                    wire.bytes.clear();
                }
            }
        }
    }

    fn deliver(&mut self, random: &mut Random, now: Instant) {
        for (end, wire) in [(&mut self.client, &mut self.to_client), (&mut self.server, &mut self.to_server)] {
            if end.error.is_some() || wire.stalled_until.is_some_and(|until| until > now) {
                continue;
            }
            for _ in 0..1 + random.below(6) {
                // The receive stays in flight over the next steps if nothing arrives for it now.
                let nothing = wire.bytes.is_empty() && !end.borrows();
                if !end.begin_receive() || nothing || random.chance(20) || end.error.is_some() {
                    break;
                }
                let max = match random.below(4) {
                    0 => 1 + random.below(40),
                    1 => 1 + random.below(2000),
                    2 => 1 + random.below(100_000),
                    _ => u64::from(u32::MAX),
                };
                end.finish_receive(now, &mut wire.bytes, max as usize);
            }
        }
    }

    fn tick(&mut self, now: Instant) {
        for end in [&mut self.client, &mut self.server] {
            if end.error.is_none() && end.connection.next_timeout().is_some_and(|at| at <= now) {
                end.on_timeout(now);
                let next = end.connection.next_timeout();
                assert!(
                    end.error.is_some() || next.is_none_or(|at| at > now),
                    "a timeout that was handled comes again"
                );
            }
        }
    }

    /// A side that found an error closes; the other side notices.
    fn close_broken(&mut self, now: Instant, tally: &mut Tally) {
        if self.over {
            return;
        }
        let errors = [self.client.error.clone(), self.server.error.clone()];
        for error in errors.iter().flatten() {
            let silent = self.silent_since.is_some();
            *(if silent { &mut tally.silences } else { &mut tally.violations }) += 1;
            match error {
                ConnectionError::PeerSilent { .. } | ConnectionError::HandshakeTimeout { .. } => {
                    // A damaged length makes a side wait for what never comes.
                    assert!(silent || self.tainted, "the peer was not silent: {error}");
                }
                ConnectionError::Misuse(what) => panic!("misuse: {what}"),
                other => assert!(self.tainted, "nobody broke the protocol: {other}"),
            }
        }
        if errors.iter().any(Option::is_some) {
            self.end_both(14, "simulated loss");
        } else if let Some(since) = self.silent_since {
            // 1 s + 3 s of keep-alive, 10 s of handshake patience.
            assert!(now - since < Duration::from_millis(10_500), "silence goes unnoticed");
        }
    }

    fn fault(&mut self, random: &mut Random, now: Instant) {
        match random.below(7) {
            0 => self.end_both(14, "reset"),
            1 => {
                let wire = if random.chance(50) { &mut self.to_client } else { &mut self.to_server };
                wire.stalled_until = Some(now + Duration::from_millis(random.below(900)));
            }
            2 => {
                self.silent_since.get_or_insert(now);
                for wire in [&mut self.to_client, &mut self.to_server] {
                    wire.silent = true;
                    wire.bytes.clear();
                }
            }
            3 => {
                // One side goes away in the middle of something; what it had sent still arrives.
                let code = if random.chance(50) { 14 } else { 10 };
                let (gone, rest, wire) = if random.chance(50) {
                    (&mut self.client, &mut self.server, &mut self.to_server)
                } else {
                    (&mut self.server, &mut self.client, &mut self.to_client)
                };
                gone.fail(code, "half closed");
                self.over = true;
                // What the one that went has lent is not to be had.
                while !wire.bytes.is_empty()
                    && rest.error.is_none()
                    && rest.connection.loan().is_none()
                    && rest.begin_receive()
                {
                    rest.finish_receive(now, &mut wire.bytes, 1000);
                }
                assert!(self.tainted || rest.error.is_none(), "what had arrived was fine: {:?}", rest.error);
                self.end_both(14, "end of stream");
            }
            4 => {
                let wire = if random.chance(50) { &mut self.to_client } else { &mut self.to_server };
                let len = wire.bytes.len() as u64;
                if len != 0 {
                    self.tainted = true;
                    match random.below(3) {
                        0 => wire.bytes[random.below(len) as usize] ^= 1 << random.below(8),
                        1 => drop(wire.bytes.remove(random.below(len) as usize)),
                        _ => wire.bytes.insert(random.below(len) as usize, random.next() as u8),
                    }
                }
            }
            5 => {
                self.leaving = true;
                self.server.goodbye("simulated leave");
            }
            _ => {
                self.leaving = true;
                self.client.goodbye("simulated leave");
            }
        }
    }

    fn check(&self, now: Instant) {
        assert_eq!(self.asked, self.ended + self.open.len() as u64, "every request is open or has ended");
        let held = self.client.payloads.get();
        // What is lent is kept until it was taken, also if nobody wants it any more.
        let fits = held <= self.open.len() as i64 || self.neighbours;
        assert!(0 <= held && fits, "{held} payloads for {} requests", self.open.len());
        assert!(self.server.payloads.get() >= 0 && self.server.owner.bodies.get() >= 0);
        let limits = self.server.connection.peer().map(|_| 1 << 20);
        assert!(limits.is_none_or(|limit| self.server.owner.requests.len() < limit));
        if self.over {
            assert!(self.open.is_empty(), "a lost connection leaves nothing open");
            assert_eq!((held, self.server.payloads.get(), self.server.owner.bodies.get()), (0, 0, 0));
            assert!(!self.client.connection.wants_transmit() && !self.server.connection.wants_transmit());
        } else {
            let overdue = self.open.values().filter(|asked| !asked.cancelled);
            let overdue = overdue.filter(|asked| asked.deadline.is_some_and(|deadline| deadline <= now)).count();
            // The one whose buffers the receive in flight names may have to wait for that.
            assert!(overdue <= 513, "deadlines pass unnoticed");
        }
    }

    /// No more faults and no new requests: everything must come to its end.
    fn drain(&mut self, random: &mut Random, mut now: Instant, tally: &mut Tally) {
        let healthy = self.silent_since.is_none() && !self.tainted;
        for round in 0.. {
            assert!(round < 100_000, "the connection does not come to rest");
            if self.over
                || (self.open.is_empty() && self.client.connection.is_idle() && self.server.connection.is_idle())
            {
                break;
            }
            now += Duration::from_millis(10);
            self.tick(now);
            self.answer(random);
            for (end, wire) in [(&mut self.client, &mut self.to_server), (&mut self.server, &mut self.to_client)] {
                while end.send(now, &mut wire.bytes) {}
                if wire.silent {
                    wire.bytes.clear();
                }
            }
            self.deliver(random, now);
            self.collect(now, tally);
            self.close_broken(now, tally);
            self.collect(now, tally);
            self.check(now);
            if self.tainted && round > 5000 {
                // A damaged length can swallow what follows; keep-alives do not help as long as bytes arrive.
                self.end_both(14, "given up");
                self.collect(now, tally);
            }
        }
        assert!(!healthy || !self.over || self.leaving || self.asked == self.ended);
        assert_eq!(self.asked, self.ended);
        assert_eq!((self.client.payloads.get(), self.server.payloads.get()), (0, 0));
        assert_eq!(self.server.owner.bodies.get(), 0);
    }
}

enum Answer {
    Ok,
    Refused,
    Error,
}

impl Answer {
    fn of(seed: u64) -> Answer {
        match seed % 16 {
            0 => Answer::Refused,
            1 | 2 => Answer::Error,
            _ => Answer::Ok,
        }
    }
}

/// Both sides compute the answer from the request.
fn seed_of(request: &Request) -> u64 {
    match request {
        Request::Recv { step, prefix, frame, iter, .. } => {
            let prefix = prefix.iter().fold(7u64, |sum, byte| sum.wrapping_mul(31) + u64::from(*byte));
            Random::new((*step as u64) ^ prefix ^ frame.rotate_left(20) ^ iter.rotate_left(40)).next()
        }
        Request::Call { meta, .. } => meta.iter().fold(11, |sum: u64, byte| sum.wrapping_mul(131) + u64::from(*byte)),
    }
}

/// One run. Returns a digest of what happened.
fn run(seed: u64, tally: &mut Tally) -> u64 {
    let mut random = Random::new(seed);
    let mut now = Instant::now();
    let start = now;
    let mut links: Vec<Link> = (0..2 + random.below(2)).map(|_| Link::new(&mut random, now)).collect();
    let faults = random.below(3);
    let busy = 1 + random.below(8);
    let mut digest = seed;
    let mut note = |value: u64| digest = Random::new(digest ^ value).next();
    for _ in 0..STEPS {
        now += Duration::from_micros(random.below(20_000));
        for link in &mut links {
            if link.over {
                // A restart: new connection, new tables, old state gone.
                note(link.ended);
                if random.chance(20) {
                    *link = Link::new(&mut random, now);
                }
                continue;
            }
            link.tick(now);
            link.collect(now, tally);
            for _ in 0..random.below(busy) {
                if link.open.len() < 120 {
                    link.ask(&mut random, now);
                }
            }
            if random.chance(25) {
                link.cancel(&mut random, now);
            }
            link.transmit(&mut random, now);
            link.deliver(&mut random, now);
            for _ in 0..random.below(busy) {
                link.answer(&mut random);
            }
            link.transmit(&mut random, now);
            if random.below(100) < faults {
                link.fault(&mut random, now);
            }
            link.collect(now, tally);
            link.close_broken(now, tally);
            link.collect(now, tally);
            link.check(now);
            let stats = link.server.connection.stats();
            note(stats.bytes_in ^ stats.bytes_out.rotate_left(32));
        }
    }
    for link in &mut links {
        // Each on a clock of its own: connections know nothing of each other.
        link.drain(&mut random, now, tally);
        note(link.ended);
        tally.key_resets += link.client.connection.stats().key_resets;
        let stats = link.server.connection.stats();
        tally.bulk_bytes += stats.payload_out - stats.copied_out;
        tally.lent_bytes += stats.lent + link.client.connection.stats().lent;
    }
    note((now - start).as_micros() as u64);
    digest
}

/// The paths that the simulation has to take.
const RARE: [&str; 8] = [
    "a call is answered before all of it was sent",
    "a call is cancelled before any of it was sent",
    "a cancellation crosses its answer",
    "a connection is lost in the middle of a call",
    "a connection is lost in the middle of a reply",
    "a full key table starts again",
    "a reply is cancelled before any of it was sent",
    "requests wait for the peer's limits",
];

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} is not a number: {value}")))
}

#[test]
fn every_seed_keeps_every_promise() {
    let seeds = match number("STARWIRE_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("STARWIRE_SIM_SEEDS").unwrap_or(DEFAULT_SEEDS),
    };
    let several = seeds.end - seeds.start >= DEFAULT_SEEDS;
    let _reached = RARE.map(|name| several.then(|| starwire_marks::expect(name)));
    let mut tally = Tally::default();
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed, &mut tally))) {
            eprintln!(
                "the simulation failed with seed {seed}: STARWIRE_SIM_SEED={seed} cargo test --test sim every_seed"
            );
            resume_unwind(panic);
        }
    }
    println!("{tally:?}");
    let Tally { ok, errors, refused_replies, refused_requests, cancelled, deadlines, lost, .. } = tally;
    let Tally {
        turned_away,
        silences,
        violations,
        cancelled_at_server,
        peers_gone,
        key_resets,
        bulk_bytes,
        lent_bytes,
        ..
    } = tally;
    let happened = [ok, errors, refused_replies, refused_requests, cancelled, deadlines, lost, turned_away, silences];
    let more = [violations, cancelled_at_server, peers_gone, key_resets, bulk_bytes, lent_bytes];
    assert!(!several || happened.iter().chain(&more).all(|count| *count != 0), "something never happened");
}

#[test]
fn a_seed_always_makes_the_same_run() {
    for seed in [1, 2, 3] {
        assert_eq!(run(seed, &mut Tally::default()), run(seed, &mut Tally::default()));
    }
}
