//! The address of a peer's data port and who must answer there: from `.endpoint_map`, or from the peer's own gRPC port.
//!
//! Without a map, the gRPC port is asked at each attempt, and the task that answers *is* the peer: whatever a client's
//! ClusterSpec calls it, its advertisement has the name and the incarnation to expect at the data port. With a map, the
//! address is known and the name is the one of the ClusterSpec; the gRPC port is asked if the address leads nowhere,
//! because a peer that is up need not be waited for.
//!
//! If tasks have one port, its address is the one of the ClusterSpec, and nobody is asked.
//!
//! If there is a secret or TLS, a task must have the name that the ClusterSpec has for it: what its gRPC port or a name
//! service say may be somebody else's invention.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::api::{Host, Level, Op};
use crate::channel::{ChannelState, State};
use crate::config::{Advertisement, HostPort, MapLine, Ports, Shortcut};
use crate::dial::token;
use crate::shard::Shard;
use starwire_net::transport::{SocketAddress, unix};
use starwire_protocol::{Failure, PeerInfo, code};

/// How long a gRPC port may take to answer why its data port cannot be reached.
const ANSWER: Duration = Duration::from_secs(5);
/// A peer that has answered on its gRPC port for this long, but not at its address in the map, is somewhere else.
const GRACE: Duration = Duration::from_secs(3);

/// The task that must answer at a data address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Its own name.
    pub task: String,
    /// The incarnation that it advertised; None: any.
    pub incarnation: Option<u64>,
}

impl Expected {
    fn advertised(by: &Advertisement) -> Self {
        Self { task: by.task.clone(), incarnation: Some(by.incarnation) }
    }

    /// The difference to the peer that answered, whose name the handshake has compared.
    fn misses(&self, peer: &PeerInfo) -> Option<String> {
        let expected = self.incarnation.filter(|expected| *expected != peer.incarnation)?;
        Some(format!(
            "expected {} with incarnation {expected:016x} at this address but found {} with incarnation {:016x}: check STARWIRE_ADVERTISE",
            self.task, peer.task, peer.incarnation
        ))
    }
}

/// Whether waiting cannot help: a wrong peer stays wrong, but a peer that is down may come up.
pub fn is_final(code: i32) -> bool {
    !matches!(code, code::UNAVAILABLE | code::DEADLINE_EXCEEDED | code::CANCELLED)
}

type Answer = Result<String, (i32, String)>;

fn read(answer: Answer) -> Result<Advertisement, Failure> {
    let text = answer.map_err(|(code, message)| Failure { code, message })?;
    text.parse::<Advertisement>()
        .map_err(|error| Failure { code: code::FAILED_PRECONDITION, message: error.to_string() })
}

impl<H: Host> Shard<H> {
    /// Begins an attempt: looks up the addresses and the task to expect.
    pub(crate) fn seek(&mut self, number: u32, attempt: u32, now: Instant) {
        let asks = self.shared.host.resolves();
        let Some(channel) = self.channels.get_mut(&number) else { return };
        channel.expected = None;
        channel.was_refused = false;
        match channel.shared.mapped.clone() {
            Some(line) if channel.goes_by_name || !asks => {
                let task = channel.goes_by_name.then(|| channel.shared.task.clone());
                channel.expected = task.map(|task| Expected { task, incarnation: None });
                self.look_up(number, attempt, VecDeque::new(), vec![line.data], now);
            }
            None if self.shared.config.ports == Ports::One => self.seek_only_port(number, attempt, now),
            _ if asks => self.ask(number, attempt),
            _ => {
                let message = format!("no data address for {}: add it to .endpoint_map", channel.shared.task);
                self.attempt_failed(number, code::FAILED_PRECONDITION, &message, now);
            }
        }
    }

    /// With one port, the ClusterSpec has the data address, and whoever answers there is the peer.
    fn seek_only_port(&mut self, number: u32, attempt: u32, now: Instant) {
        let Some(channel) = self.channels.get(&number) else { return };
        match channel.shared.grpc_address.parse::<HostPort>() {
            Ok(target) => self.look_up(number, attempt, VecDeque::new(), vec![target], now),
            Err(error) => self.attempt_failed(number, code::INVALID_ARGUMENT, &error.to_string(), now),
        }
    }

    /// With one port, the address of a task on this host leads to its unix socket as well, which is tried first.
    pub(crate) fn with_short_ways(&self, found: VecDeque<SocketAddress>, mapped: bool) -> VecDeque<SocketAddress> {
        let config = &self.shared.config;
        if mapped || config.ports == Ports::Two || config.unix == Shortcut::Off {
            return found;
        }
        let beside = |address: &SocketAddress| match address {
            SocketAddress::Inet(address) => unix::possibly_beside(*address),
            SocketAddress::Unix(_) => Vec::new(),
        };
        let mut all: VecDeque<SocketAddress> = found.iter().flat_map(beside).collect();
        all.extend(found);
        all
    }

    /// A unix socket of which nobody has said that it exists.
    pub(crate) fn is_guess(&self, address: &SocketAddress) -> bool {
        self.shared.config.ports == Ports::One && matches!(address, SocketAddress::Unix(_))
    }

    fn ask(&self, number: u32, attempt: u32) {
        let Some(channel) = self.channels.get(&number) else { return };
        let (task, address) = (&channel.shared.task, &channel.shared.grpc_address);
        self.shared.host.resolve(task, address, token(self.index, number, attempt));
    }

    /// The peer's gRPC port returned its data address, or the reason why there is none.
    pub(crate) fn resolved(&mut self, number: u32, attempt: u32, answer: Answer, now: Instant) {
        let Some(channel) = self.channels.get_mut(&number).filter(|c| c.attempt == attempt) else { return };
        let line = channel.shared.mapped.clone();
        match std::mem::replace(&mut channel.state, State::LookingUp) {
            State::LookingUp => {}
            State::Asking { failure } => {
                channel.state = State::Idle;
                return match line {
                    Some(line) => self.explained(number, &line, failure, read(answer), now),
                    None => self.give_up(number, &failure, now),
                };
            }
            other => {
                channel.state = other;
                return;
            }
        }
        let advertisement = match read(answer) {
            Ok(advertisement) => advertisement,
            Err(failure) => {
                let failure = line.map_or_else(|| failure.clone(), |line| blame(&line, &failure));
                return self.attempt_failed(number, failure.code, &failure.message, now);
            }
        };
        channel.expected = Some(Expected::advertised(&advertisement));
        let mut first = VecDeque::new();
        if line.is_none() {
            first.extend(self.short_way(&advertisement));
        }
        let targets = line.map_or(advertisement.data, |line| vec![line.data]);
        self.look_up(number, attempt, first, targets, now);
    }

    /// The unix socket of a task on this host.
    fn short_way(&self, to: &Advertisement) -> Option<SocketAddress> {
        let (path, host) = (to.unix.as_ref()?, to.host.as_ref()?);
        let here = self.shared.config.unix == Shortcut::Auto && self.shared.machine.as_ref() == Some(host);
        here.then(|| SocketAddress::Unix(path.into()))
    }

    /// Whether this is the expected task; otherwise, why not.
    pub(crate) fn recognises(&self, number: u32, peer: &PeerInfo, is_proved: bool) -> Result<(), String> {
        let Some(channel) = self.channels.get(&number) else { return Ok(()) };
        let task = &channel.shared.task;
        // A secret or a certificate has proved its name; the address and the name to expect there may be somebody
        // else's invention.
        if is_proved && peer.task != *task {
            return Err(format!(
                "expected {task} at this address but found {}: with a secret or TLS, a task must have the name that the ClusterSpec gives it",
                peer.task
            ));
        }
        channel.expected.as_ref().and_then(|expected| expected.misses(peer)).map_or(Ok(()), Err)
    }

    /// An attempt failed. True: before any request ends (or waits longer), the gRPC port is asked, for the first time
    /// or again.
    pub(crate) fn looks_again(&mut self, number: u32, failure: &Failure, now: Instant) -> bool {
        if !self.shared.host.resolves() || self.is_stopping() {
            return false;
        }
        let Some(channel) = self.channels.get_mut(&number) else { return false };
        if channel.expected.is_none() {
            // The gRPC port itself gave this answer, or none.
            return false;
        }
        if channel.shared.mapped.is_some() {
            if !is_final(failure.code) {
                self.tell_impatient(number, failure);
            }
            return self.asks_why(number, failure, now);
        }
        // The advertisement may be outdated, and another task have the address since.
        let advertised = channel.expected.as_ref().and_then(|e| e.incarnation);
        if !is_final(failure.code) || advertised == channel.doubted {
            return false;
        }
        channel.doubted = advertised;
        channel.state = State::Idle;
        self.dial(number, now);
        true
    }

    /// The address in the map failed, and requests wait.
    fn asks_why(&mut self, number: u32, failure: &Failure, now: Instant) -> bool {
        let Some(channel) = self.channels.get_mut(&number) else { return false };
        if channel.waiting.is_empty() {
            return false;
        }
        channel.attempt = channel.attempt.wrapping_add(1);
        channel.state = State::Asking { failure: failure.clone() };
        let (attempt, ends) = (channel.attempt, now + ANSWER);
        channel.attempt_ends = Some(ends);
        self.arm_channel(number, ends);
        self.ask(number, attempt);
        true
    }

    /// The gRPC port answered why an attempt at the map's address failed.
    fn explained(
        &mut self,
        number: u32,
        line: &MapLine,
        failure: Failure,
        said: Result<Advertisement, Failure>,
        now: Instant,
    ) {
        let Some(channel) = self.channels.get_mut(&number) else { return };
        let verdict = match said {
            Ok(advertisement) if is_final(failure.code) => {
                if channel.learns_name(&advertisement) {
                    return self.dial(number, now);
                }
                blame(line, &failure)
            }
            Ok(advertisement) if channel.is_elsewhere(&advertisement, now) => {
                let data: Vec<String> = advertisement.data.iter().map(HostPort::to_string).collect();
                let says = format!("the task is up and advertises data port {} on its gRPC port", data.join(", "));
                misled(line, &failure, &says)
            }
            Ok(_) => failure,
            Err(said) if is_final(said.code) => misled(line, &failure, &said.message),
            // It is not up, which may change.
            Err(_) => {
                channel.answers_since = None;
                if is_final(failure.code) { blame(line, &failure) } else { failure }
            }
        };
        self.give_up(number, &verdict, now);
    }

    /// Logs a name that differs from the one of this side, once for each incarnation.
    pub(crate) fn note_name(&self, number: u32, own: &str) {
        let Some(channel) = self.channels.get(&number) else { return };
        let (task, address) = (&channel.shared.task, &channel.shared.grpc_address);
        if task == own {
            return;
        }
        let tasks = &self.shared.config.identity.tasks;
        let elsewhere = tasks.iter().find(|(name, at)| name == own && at != address);
        match elsewhere {
            Some((_, at)) => self.shared.host.log(
                Level::Warning,
                &format!("starwire: {task} ({address}) reports its name as {own}, which is at {at} in this server's ClusterSpec: check job_name and task_index of both tasks"),
            ),
            None => self.shared.host.log(Level::Info, &format!("starwire: {task} ({address}) reports its name as {own}")),
        }
    }
}

impl<O: Op> ChannelState<O> {
    /// The ClusterSpec may use any name for a peer. True: the task behind the gRPC address has another name than was
    /// expected at its data address.
    fn learns_name(&mut self, advertisement: &Advertisement) -> bool {
        let advertised = Expected::advertised(advertisement);
        let allows = self.expected.as_ref().is_some_and(|expected| {
            expected.task != advertised.task
                || expected.incarnation.is_some_and(|life| Some(life) != advertised.incarnation)
        });
        self.goes_by_name &= advertised.task == self.shared.task;
        allows
    }

    /// The peer answers on its gRPC port, but not at the map's address. It may just have started, or be back soon if it
    /// was there before.
    fn is_elsewhere(&mut self, advertisement: &Advertisement, now: Instant) -> bool {
        let since = *self.answers_since.get_or_insert(now);
        let was_met = self.was_refused || self.incarnation == Some(advertisement.incarnation);
        !was_met && now.saturating_duration_since(since) >= GRACE
    }
}

/// A final answer, with the line of the map that led to it.
fn blame(line: &MapLine, failure: &Failure) -> Failure {
    if !is_final(failure.code) {
        return failure.clone();
    }
    let message = format!("{} ({line} gives data port {})", failure.message, line.data);
    Failure { code: failure.code, message }
}

/// The line is wrong: the task is up, but has no data port there.
fn misled(line: &MapLine, failure: &Failure, but: &str) -> Failure {
    let message = format!("{line} gives data port {} ({}), but {but}", line.data, failure.message);
    Failure { code: code::FAILED_PRECONDITION, message }
}
