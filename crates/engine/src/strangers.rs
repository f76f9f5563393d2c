//! Strangers: how many there may be, and which one loses its place when there are too many.
//!
//! Tasks on this host connect over the unix socket, which admits only processes of the same user. They are counted
//! separately, so that no one on the network can take their places.
//!
//! With TLS, a stranger that sends a hello and no more makes the server agree on keys and sign, for nothing. So a
//! reactor spends only a part of its time on handshakes that lead to nothing; when that is used up, further ones wait,
//! and hosts take turns: first those that members have come from. Handshakes of members cost them nothing in the end,
//! so that a thousand of them may start together.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::command::Door;
use crate::conn::{Farewell, Role};
use crate::crowd::{Crowd, Queue, Source};
use crate::host::{Host, Level};
use crate::pace::TimerKey;
use crate::shard::{LAST_WORD, Shard};
use starwire_net::transport::{SocketAddress, descriptors, tcp, unix};
use starwire_protocol::{Connection, Failure, code};

/// Most strangers of a server, through each of its listeners …
const MOST: usize = 4096;
/// … but no more than this part of the descriptors that the process may have, as sessions and files need some as well …
const SHARE_OF_DESCRIPTORS: usize = 4;
/// … and no fewer than this on each reactor.
const LEAST: usize = 16;

/// The part of a reactor's time, one in this many, that TLS handshakes may take …
const HANDSHAKES: u32 = 64;
/// … after so much, which it saves up while there are none: about a hundred unfinished handshakes.
const SAVINGS: Duration = Duration::from_millis(20);
/// Most hosts that are remembered because members came from there.
const ACQUAINTANCES: usize = 16_384;

pub struct Strangers {
    tcp: Crowd<u64>,
    unix: Crowd<u64>,
    /// Those that have lost their places and are still being told.
    sent_away: usize,
    allowance: Allowance,
    acquaintances: HashSet<Source>,
    /// Those whose hello has arrived while the allowance was used up: from hosts of members, and the others.
    expected: Queue<u64>,
    unexpected: Queue<u64>,
}

/// Time to spend: it comes at a fixed rate, and is saved up to a limit.
struct Allowance {
    /// When the savings would be complete if nothing more were spent.
    full_at: Instant,
}

impl Allowance {
    /// None: something is left. Otherwise: when that will be so.
    fn wait(&self, now: Instant) -> Option<Instant> {
        let again_at = self.full_at.checked_sub(SAVINGS * HANDSHAKES)?;
        (again_at > now).then_some(again_at)
    }

    fn spend(&mut self, time: Duration, now: Instant) {
        self.full_at = self.full_at.max(now) + time * HANDSHAKES;
    }

    fn give_back(&mut self, time: Duration) {
        self.full_at = self.full_at.checked_sub(time * HANDSHAKES).unwrap_or(self.full_at);
    }
}

impl Strangers {
    /// For one of `reactors` reactors.
    pub fn new(reactors: usize, now: Instant) -> Self {
        let all = MOST.min(descriptors::allowed() / SHARE_OF_DESCRIPTORS);
        let limit = (all / reactors.max(1)).max(LEAST);
        Self {
            tcp: Crowd::new(limit),
            unix: Crowd::new(limit),
            sent_away: 0,
            allowance: Allowance { full_at: now },
            acquaintances: HashSet::new(),
            expected: Queue::new(),
            unexpected: Queue::new(),
        }
    }

    /// So much was spent on a handshake.
    pub fn spent(&mut self, time: Duration, now: Instant) {
        self.allowance.spend(time, now);
    }

    /// It was spent on a member.
    pub fn was_well_spent(&mut self, key: u64, time: Duration) {
        self.allowance.give_back(time);
        if let Some(source) = self.tcp.source(key).filter(|_| self.acquaintances.len() < ACQUAINTANCES) {
            self.acquaintances.insert(source);
        }
    }

    /// False: it waits already.
    fn wait_in_line(&mut self, key: u64) -> bool {
        let source = self.tcp.source(key).unwrap_or(Source::Unknown);
        let line = if self.acquaintances.contains(&source) { &mut self.expected } else { &mut self.unexpected };
        line.enter(key, source)
    }

    fn next_in_line(&mut self) -> Option<u64> {
        self.expected.pop().or_else(|| self.unexpected.pop())
    }

    pub fn has_waiting(&self) -> bool {
        !self.expected.is_empty() || !self.unexpected.is_empty()
    }

    /// It has completed the handshake, or is gone.
    pub fn leave(&mut self, key: u64) {
        self.expected.leave(key);
        self.unexpected.leave(key);
        if !self.tcp.leave(key) {
            self.unix.leave(key);
        }
    }
}

impl<H: Host> Shard<H> {
    /// Takes over a socket that a listener of any reactor has accepted.
    pub(crate) fn adopt(&mut self, fd: OwnedFd, door: Door, now: Instant) {
        if self.is_stopping() {
            return;
        }
        let address = if door == Door::Tcp { tcp::peer_address(fd.as_fd()).ok().flatten() } else { None };
        let (name, source) = match address {
            Some(SocketAddress::Inet(address)) => (address.to_string(), Source::of_ip(address.ip())),
            _ => ("a local process".to_string(), Source::Unknown),
        };
        let checked = match door {
            Door::Unix => unix::check_peer(fd.as_fd()).map(Some),
            Door::Tcp => tcp::configure(&fd, &self.shared.tcp_options()).map(|()| None),
        };
        let local_peer = match checked {
            Ok(peer) => peer,
            Err(error) => return self.log_offender(&name, &error.to_string(), now),
        };
        let source = local_peer.map_or(source, |peer| Source::Process(peer.pid));
        let mut settings = self.shared.settings_for_peer();
        if door == Door::Tcp {
            self.offer_pairs(&mut settings, true);
        } else {
            self.offer_loans(&mut settings);
        }
        let proto = Connection::server(settings, now);
        let key = match self.driver.register(fd) {
            Ok(token) => self.add_conn(token, Role::Server, proto, name),
            Err(error) => {
                if self.shared.offenders.is_news("register", now) {
                    let line = format!("starwire: cannot serve {name}: {error} (repeats are suppressed for a minute)");
                    self.shared.host.log(Level::Warning, &line);
                }
                return;
            }
        };
        if door == Door::Tcp {
            let session = self.session_from().map(Box::new);
            if let Some(conn) = self.conns.get_mut(&key) {
                conn.tls = session;
            }
        }
        let crowd = if door == Door::Tcp { &mut self.strangers.tcp } else { &mut self.strangers.unix };
        if let Some(other) = crowd.enter(key, source) {
            self.send_away(other, now);
        }
        if let Some(peer) = local_peer {
            self.met_local_peer(key, peer.pid);
        }
        self.arm(key);
        self.receive_on(key);
    }

    /// The hello of a task has arrived. False: the handshake has to wait, and goes on later.
    pub(crate) fn may_shake_hands(&mut self, key: u64) -> bool {
        let now = self.delivery.now;
        let Some(at) = self.strangers.allowance.wait(now) else { return true };
        let is_first = !self.strangers.has_waiting();
        if self.strangers.wait_in_line(key) {
            self.delivery.metrics.tls_handshakes_delayed.add(1);
        }
        if is_first {
            self.timers.start(at, TimerKey::Handshakes);
        }
        false
    }

    /// Goes on with handshakes that wait, as far as the allowance goes.
    pub(crate) fn shake_hands(&mut self, now: Instant) {
        while self.strangers.has_waiting() {
            if let Some(at) = self.strangers.allowance.wait(now) {
                self.timers.start(at, TimerKey::Handshakes);
                return;
            }
            if let Some(key) = self.strangers.next_in_line() {
                self.receive_on(key);
            }
        }
    }

    /// Its place is needed. It may be a slow member, so it is told to try again.
    fn send_away(&mut self, key: u64, now: Instant) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let name = conn.name.clone();
        self.delivery.metrics.strangers_dropped.add(1);
        self.log_offender(&name, "it had not completed the handshake, and too many connections have not", now);
        let Some(conn) = self.conns.get_mut(&key).filter(|conn| conn.closing.is_none()) else { return };
        // Who has not proved that it knows the secret is not told whose port this is.
        let who = if self.shared.config.secret.is_some() { "this task" } else { &self.shared.config.identity.task };
        let reason = format!("{who} has too many connections that have not completed the handshake: try again");
        if self.strangers.sent_away >= self.strangers.tcp.limit() {
            return self.lose(key, code::UNAVAILABLE, reason);
        }
        conn.proto.refuse(code::UNAVAILABLE, &reason);
        conn.closing = Some(Failure { code: code::UNAVAILABLE, message: reason });
        conn.farewell = Some(Farewell::default());
        conn.sent_away = true;
        self.strangers.sent_away += 1;
        self.rearm(key, now + LAST_WORD);
        self.take_leave(key);
    }

    /// A connection that never completed the handshake was closed.
    pub(crate) fn stranger_gone(&mut self, key: u64, sent_away: bool) {
        self.strangers.leave(key);
        self.strangers.sent_away -= usize::from(sent_away);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_get_their_part_of_the_time() {
        let begin = Instant::now();
        let mut allowance = Allowance { full_at: begin };
        let one = Duration::from_micros(200);
        let (mut now, mut spent) = (begin, Duration::ZERO);
        // Always as many as are allowed, each for what it takes.
        while now < begin + Duration::from_secs(10) {
            match allowance.wait(now) {
                Some(at) => now = at,
                None => {
                    allowance.spend(one, now);
                    spent += one;
                    now += one;
                }
            }
        }
        let due = SAVINGS + Duration::from_secs(10) / HANDSHAKES;
        assert!(spent >= due - one && spent <= due + one * 2, "{spent:?} of {due:?}");
        // What is not used is not saved beyond the limit.
        now += Duration::from_secs(3600);
        let mut at_once = 0;
        while allowance.wait(now).is_none() {
            allowance.spend(one, now);
            at_once += 1;
        }
        assert_eq!(at_once, SAVINGS.as_micros() / one.as_micros() + 1);
        allowance.give_back(one * 2);
        assert!(allowance.wait(now).is_none());
    }

    #[test]
    fn hosts_of_members_come_first() {
        let mut strangers = Strangers::new(1, Instant::now());
        let host = |n: u8| Source::V4([10, 0, 0, n]);
        for key in 0..6 {
            strangers.tcp.enter(key, host(if key == 0 || key > 3 { 1 } else { 2 }));
        }
        strangers.was_well_spent(0, Duration::ZERO);
        strangers.leave(0);
        for key in 1..6 {
            assert!(strangers.wait_in_line(key) && !strangers.wait_in_line(key));
        }
        strangers.leave(2);
        let order: Vec<_> = std::iter::from_fn(|| strangers.next_in_line()).collect();
        assert_eq!(order, [4, 5, 1, 3]);
        assert!(!strangers.has_waiting());
    }
}
