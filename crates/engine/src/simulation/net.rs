//! A network in virtual time: connections that deliver late and in pieces, stall, and
//! break. Descriptors are real, but nothing passes through them.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use super::driver::Wait;
use crate::random::Random;
use starwire_net::reactor::driver::{Completion, Token};
use starwire_net::transport::IoPart;
use starwire_net::transport::tcp::{self, TcpOptions};

/// Bytes on their way and in the kernels of a connection's two hosts, in each direction.
const ROOM: usize = 256 << 10;
/// Whose clients are no tasks.
const OUTSIDE: usize = usize::MAX;
/// The longest way of bytes while all is well.
const LATENCY: Duration = Duration::from_millis(5);

/// One end of a connection, or a socket that is not connected.
#[derive(Default)]
pub struct End {
    /// The task and the driver that have it.
    task: usize,
    driver: Option<usize>,
    pub fd: Option<OwnedFd>,
    other: Option<usize>,
    /// What arrives, and when.
    arrivals: VecDeque<(Instant, Vec<u8>)>,
    pub arriving: usize,
    /// A send to it was short: the other end's kernel has no room before something is received here.
    is_full: bool,
    /// When the other end's last byte arrived, or its reset.
    ends_at: Option<Instant>,
    reset_at: Option<Instant>,
    pub recv: Option<Vec<IoPart>>,
    pub send: Option<Vec<IoPart>>,
    /// When a connect ends; false: it is refused.
    connects: Option<(Instant, bool)>,
    pub finishes: bool,
    pub closes_at: Option<Instant>,
    pub is_closed: bool,
}

impl End {
    /// Nothing uses its memory any more.
    fn close(&mut self) {
        *self = Self { task: self.task, driver: self.driver, other: self.other, is_closed: true, ..Self::default() };
    }
}

/// A connection that a listener has not reported yet.
struct Accepted {
    driver: usize,
    listener: usize,
    fd: OwnedFd,
    not_before: Instant,
}

pub struct Net {
    pub random: Random,
    pub now: Instant,
    pub is_faulty: bool,
    /// Some connections are cut as soon as they are accepted.
    pub cuts_early: bool,
    was_cut: bool,
    /// The kernel may have room for less than [`ROOM`]; otherwise a send may be short although there is room.
    pub fills_early: bool,
    /// Bytes that pass through a connection in a second; `None`: any number.
    pub rate: Option<u32>,
    pub ends: Vec<End>,
    /// Those that are not closed; and of these the ones of each driver. Ascending.
    live: Vec<usize>,
    pub of_drivers: Vec<Vec<usize>>,
    /// Accepted sockets that no driver has yet, by inode.
    by_inode: HashMap<u64, usize>,
    pub addresses: HashMap<u64, SocketAddr>,
    /// Listeners: driver and token.
    pub listeners: BTreeMap<SocketAddr, (usize, usize)>,
    accepted: Vec<Accepted>,
    /// An accept may fail for a while, and a cut be of one direction.
    pub has_more: bool,
    /// Until when nothing passes from one task to another.
    partitions: BTreeMap<(usize, usize), Instant>,
    pub tasks: Vec<usize>,
    /// A task that has died, and does not know it yet: nothing that it does reaches anybody.
    pub dying: Option<usize>,
    pub moved: u64,
    /// By driver.
    pub waits: Vec<Wait>,
    /// The sockets that there ever were, by inode.
    pub inodes: HashSet<u64>,
    /// How often each fault happened.
    pub faults: BTreeMap<&'static str, u64>,
}

/// Of a socket.
pub fn inode(fd: &OwnedFd) -> u64 {
    File::from(fd.try_clone().unwrap()).metadata().unwrap().ino()
}

impl Net {
    pub fn new(random: Random, now: Instant) -> Self {
        Self {
            random,
            now,
            is_faulty: true,
            cuts_early: false,
            was_cut: false,
            fills_early: false,
            rate: None,
            ends: Vec::new(),
            live: Vec::new(),
            of_drivers: Vec::new(),
            by_inode: HashMap::new(),
            addresses: HashMap::new(),
            listeners: BTreeMap::new(),
            accepted: Vec::new(),
            has_more: false,
            partitions: BTreeMap::new(),
            tasks: Vec::new(),
            dying: None,
            moved: 0,
            waits: Vec::new(),
            inodes: HashSet::new(),
            faults: BTreeMap::new(),
        }
    }

    pub fn note(&mut self, fault: &'static str) {
        *self.faults.entry(fault).or_default() += 1;
    }

    fn socket(&mut self, address: SocketAddr) -> OwnedFd {
        let fd = tcp::socket(address, &TcpOptions::default()).unwrap();
        self.inodes.insert(inode(&fd));
        fd
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.random.below(n)
    }

    /// One of `n` times, while there are faults.
    fn fails(&mut self, n: u64) -> bool {
        self.is_faulty && self.below(n) == 0
    }

    /// The same, with a name.
    pub fn fails_as(&mut self, fault: &'static str, n: u64) -> bool {
        let fails = self.fails(n);
        if fails {
            self.note(fault);
        }
        fails
    }

    /// A socket that listens at this address, once a driver accepts with it.
    pub fn listener(&mut self, address: SocketAddr) -> OwnedFd {
        let fd = self.socket(address);
        self.addresses.insert(inode(&fd), address);
        fd
    }

    /// Nothing passes between two tasks before this time, or nothing in one direction.
    pub fn partition(&mut self, a: usize, b: usize, until: Instant) {
        let both = !self.has_more || self.below(2) == 0;
        self.note(if both { "two tasks are cut off from each other" } else { "one direction is cut" });
        self.partitions.insert((a, b), until);
        if both {
            self.partitions.insert((b, a), until);
        }
    }

    pub fn heal(&mut self) {
        self.partitions.clear();
        self.is_faulty = false;
        self.cuts_early = false;
    }

    fn partitioned_until(&self, from: usize, to: usize) -> Option<Instant> {
        self.partitions.get(&(from, to)).copied().filter(|until| *until > self.now)
    }

    /// When something that is sent now arrives.
    fn arrival(&mut self, from: usize, to: usize) -> Instant {
        let late =
            if self.fails_as("bytes are late", 50) { Duration::from_millis(self.below(2000)) } else { Duration::ZERO };
        let after = Duration::from_micros(self.below(LATENCY.as_micros() as u64)) + late;
        self.partitioned_until(from, to).unwrap_or(self.now) + after
    }

    /// Resets a random connection.
    pub fn reset_one(&mut self) {
        let open: Vec<usize> = self.live.iter().copied().filter(|at| self.is_open(*at)).collect();
        if open.is_empty() {
            return;
        }
        self.note("a connection is reset");
        let at = open[self.below(open.len() as u64) as usize];
        let now = self.now;
        for at in [Some(at), self.ends[at].other].into_iter().flatten() {
            self.ends[at].reset_at.get_or_insert(now);
        }
    }

    /// A client that is no task sends these bytes to whoever listens at the address. Then it waits, or is gone.
    pub fn send_as_client(&mut self, address: SocketAddr, bytes: Vec<u8>) {
        let Some((driver, listener)) = self.listeners.get(&address).copied() else { return };
        let fd = self.socket(address);
        let (client, task) = (self.ends.len(), self.tasks[driver]);
        // It reads all, or nothing.
        let is_closed = self.below(2) == 0;
        self.ends.push(End { task: OUTSIDE, other: Some(client + 1), is_closed, ..End::default() });
        let at = self.add(End { task, other: Some(client), ..End::default() });
        let when = self.arrival(OUTSIDE, task);
        let later = when + Duration::from_millis(self.below(3000));
        let (ends, resets) = (self.below(3) == 0, self.below(3) == 0);
        let end = &mut self.ends[at];
        end.arriving = bytes.len();
        end.arrivals.extend((!bytes.is_empty()).then_some((when, bytes)));
        end.ends_at = ends.then_some(later);
        end.reset_at = resets.then_some(later);
        self.by_inode.insert(inode(&fd), at);
        self.accepted.push(Accepted { driver, listener, fd, not_before: self.now });
    }

    fn is_open(&self, at: usize) -> bool {
        let end = &self.ends[at];
        end.other.is_some() && !end.is_closed && end.closes_at.is_none() && end.reset_at.is_none()
    }

    pub fn is_dying(&self, driver: usize) -> bool {
        self.dying == Some(self.tasks[driver])
    }

    /// The process of a task has died: its peers get resets.
    pub fn kill(&mut self, task: usize) {
        self.dying = None;
        let (dead, live): (Vec<usize>, _) =
            std::mem::take(&mut self.live).into_iter().partition(|at| self.ends[*at].task == task);
        self.live = live;
        self.listeners.retain(|_, (driver, _)| self.tasks[*driver] != task);
        self.accepted.retain(|accepted| self.tasks[accepted.driver] != task);
        for (own, of) in self.of_drivers.iter_mut().zip(&self.tasks) {
            if *of == task {
                own.clear();
            }
        }
        for at in dead {
            self.gone(at, true);
            self.ends[at].close();
        }
    }

    /// The other end learns of the end of this one.
    pub fn gone(&mut self, at: usize, is_reset: bool) {
        let Some(other) = self.ends[at].other else { return };
        let arrival = self.arrival(self.ends[at].task, self.ends[other].task);
        let end = &mut self.ends[other];
        let after = end.arrivals.back().map_or(arrival, |(last, _)| arrival.max(*last));
        if is_reset {
            end.reset_at.get_or_insert(arrival);
        } else {
            end.ends_at.get_or_insert(after);
        }
    }

    /// The time of the next change that nobody has to ask for, of the tasks that run.
    pub fn next_due(&self, runs: impl Fn(usize) -> bool) -> Option<Instant> {
        let of_end = |end: &End| {
            let waits = end.recv.as_ref().map(|_| ());
            let arrival = waits.and_then(|()| end.arrivals.front().map(|(at, _)| *at).or(end.ends_at));
            let reset = end.reset_at.filter(|_| end.recv.is_some() || end.send.is_some());
            [arrival, reset, end.connects.map(|(at, _)| at), end.closes_at].into_iter().flatten().min()
        };
        let open = self.live.iter().map(|at| &self.ends[*at]).filter(|end| end.driver.is_some() && runs(end.task));
        let late = self.accepted.iter().filter(|accepted| accepted.not_before > self.now);
        let late = late.filter(|accepted| runs(self.tasks[accepted.driver])).map(|accepted| accepted.not_before);
        open.filter_map(of_end).chain(late).min()
    }

    fn add(&mut self, end: End) -> usize {
        self.live.push(self.ends.len());
        self.ends.push(end);
        self.ends.len() - 1
    }

    /// A driver is done with an end.
    pub fn forget(&mut self, at: usize) {
        let driver = self.ends[at].driver;
        self.ends[at].close();
        for list in [Some(&mut self.live), driver.map(|driver| &mut self.of_drivers[driver])].into_iter().flatten() {
            if let Ok(place) = list.binary_search(&at) {
                list.remove(place);
            }
        }
    }

    pub fn register(&mut self, driver: usize, fd: OwnedFd) -> Token {
        self.inodes.insert(inode(&fd));
        let at = self
            .by_inode
            .remove(&inode(&fd))
            .unwrap_or_else(|| self.add(End { task: self.tasks[driver], ..End::default() }));
        let end = &mut self.ends[at];
        (end.driver, end.fd) = (Some(driver), Some(fd));
        let own = &mut self.of_drivers[driver];
        own.insert(own.partition_point(|other| *other < at), at);
        Token(at as u64)
    }

    pub fn connect(&mut self, at: usize, address: SocketAddr) {
        let found = self.listeners.get(&address).copied();
        let from = self.ends[at].task;
        let to = found.map(|(driver, _)| self.tasks[driver]);
        let when = self.arrival(from, to.unwrap_or(from)) + Duration::from_micros(self.below(5000));
        // The answer has a way of its own.
        let when = to.and_then(|to| self.partitioned_until(to, from)).map_or(when, |until| when.max(until));
        if self.fails_as("a connect hangs", 20) {
            return;
        }
        let Some((driver, listener)) = found.filter(|_| !self.fails_as("a connect is refused", 20)) else {
            self.ends[at].connects = Some((when, false));
            return;
        };
        let fd = self.socket(address);
        let other = self.add(End { task: self.tasks[driver], other: Some(at), ..End::default() });
        self.ends[at].other = Some(other);
        self.ends[at].connects = Some((when, true));
        // Not twice in a row: a peer that nobody can reach is given up.
        self.was_cut = self.cuts_early && !self.was_cut && self.below(10) == 0;
        if self.was_cut {
            self.note("a connection is cut early");
            for end in [at, other] {
                self.ends[end].reset_at = Some(when);
            }
        }
        self.by_inode.insert(inode(&fd), other);
        self.accepted.push(Accepted { driver, listener, fd, not_before: self.now });
    }

    /// How many bytes can be sent to an end.
    fn room(&self, to: usize) -> usize {
        let end = &self.ends[to];
        if end.is_full { 0 } else { ROOM.saturating_sub(end.arriving) }
    }

    /// Moves the bytes of a send, some of them. Returns how many.
    fn send(&mut self, at: usize) -> Option<io::Result<usize>> {
        let end = &self.ends[at];
        let parts = end.send.as_ref()?;
        if end.reset_at.is_some_and(|when| when <= self.now) {
            return Some(Err(io::Error::from_raw_os_error(libc::EPIPE)));
        }
        let other = end.other?;
        let all: usize = parts.iter().map(|part| part.len).sum();
        let room = self.room(other);
        if room == 0 {
            return None;
        }
        let most = all.min(room);
        let n = if self.fails_as("a send is short", 3) { 1 + self.below(most as u64) as usize } else { most };
        let mut bytes = Vec::with_capacity(n);
        for part in self.ends[at].send.iter().flatten() {
            let len = part.len.min(n - bytes.len());
            // SAFETY: the parts of a send that was not reported are readable (`Driver::send`).
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(part.ptr, len) });
        }
        let arrival = self.arrival(self.ends[at].task, self.ends[other].task);
        let passes = self.rate.map_or(Duration::ZERO, |rate| Duration::from_secs(1) * n as u32 / rate);
        let fills = self.fills_early && n < most;
        let end = &mut self.ends[other];
        let after = end.arrivals.back().map_or(arrival, |(last, _)| arrival.max(*last)) + passes;
        if !end.is_closed {
            end.arrivals.push_back((after, bytes));
            end.arriving += n;
            end.is_full = fills;
        }
        Some(Ok(n))
    }

    /// Fills the memory of a receive with some of what has arrived.
    fn recv(&mut self, at: usize) -> Option<io::Result<usize>> {
        let now = self.now;
        let end = &self.ends[at];
        end.recv.as_ref()?;
        if end.reset_at.is_some_and(|when| when <= now) {
            return Some(Err(io::Error::from_raw_os_error(libc::ECONNRESET)));
        }
        let Some((when, bytes)) = end.arrivals.front() else {
            return end.ends_at.filter(|when| *when <= now).map(|_| Ok(0));
        };
        if *when > now {
            return None;
        }
        let room: usize = end.recv.iter().flatten().map(|part| part.len).sum();
        let most = room.min(bytes.len());
        let n = if self.fails_as("a receive is short", 3) { 1 + self.below(most as u64) as usize } else { most };
        let end = &mut self.ends[at];
        let (when, mut bytes) = end.arrivals.pop_front()?;
        let rest = bytes.split_off(n);
        end.arriving -= n;
        end.is_full = false;
        let mut left = &bytes[..];
        for part in end.recv.iter().flatten() {
            let len = part.len.min(left.len());
            // SAFETY: the parts of a receive that was not reported are writable (`Driver::recv`).
            unsafe { std::ptr::copy_nonoverlapping(left.as_ptr(), part.ptr, len) };
            left = &left[len..];
        }
        if !rest.is_empty() {
            end.arrivals.push_front((when, rest));
        }
        Some(Ok(n))
    }

    /// Whether the reactor of a driver would run now: it does not sleep, its time has come, or something has ended.
    pub fn has_reason(&self, driver: usize) -> bool {
        let is_due = match self.waits[driver] {
            Wait::Runs => true,
            Wait::Sleeps(until) => until.is_some_and(|until| until <= self.now),
        };
        let is_accepted = || self.accepted.iter().any(|of| of.driver == driver && of.not_before <= self.now);
        let has_ended = || self.of_drivers[driver].iter().any(|at| self.has_ended(&self.ends[*at]));
        is_due || (!self.is_dying(driver) && (is_accepted() || has_ended()))
    }

    /// When a driver's reactor wakes up by itself.
    pub fn sleeps_until(&self, driver: usize) -> Option<Instant> {
        match self.waits[driver] {
            Wait::Runs => Some(self.now),
            Wait::Sleeps(until) => until,
        }
    }

    /// Whether [`Net::progress`] may report something about this end.
    fn has_ended(&self, end: &End) -> bool {
        let is_past = |when: Option<Instant>| when.is_some_and(|when| when <= self.now);
        if end.closes_at.is_some() {
            return is_past(end.closes_at);
        }
        if let Some((when, _)) = end.connects {
            return when <= self.now;
        }
        let has_room = end.other.is_some_and(|other| self.room(other) > 0);
        let arrival = end.arrivals.front().map(|(when, _)| *when).or(end.ends_at);
        (end.send.is_some() && (is_past(end.reset_at) || has_room))
            || (end.send.is_none() && end.finishes)
            || (end.recv.is_some() && (is_past(end.reset_at) || is_past(arrival)))
    }

    /// Reports what has ended for a driver.
    pub fn progress(&mut self, driver: usize, out: &mut Vec<Completion>) {
        if self.is_dying(driver) {
            return;
        }
        let before = out.len();
        for mut accepted in std::mem::take(&mut self.accepted) {
            let listener = Token(accepted.listener as u64);
            if accepted.driver != driver || accepted.not_before > self.now {
                self.accepted.push(accepted);
            } else if self.has_more && self.fails_as("an accept fails", 20) {
                // The connection stays in the listener's queue, and the driver tries again.
                accepted.not_before = self.now + Duration::from_millis(1 + self.below(500));
                self.accepted.push(accepted);
                out.push(Completion::Accepted { listener, result: Err(io::Error::from_raw_os_error(libc::EMFILE)) });
            } else {
                out.push(Completion::Accepted { listener, result: Ok(accepted.fd) });
            }
        }
        let mut mine = self.of_drivers[driver].clone();
        if !mine.is_empty() {
            let first = self.below(mine.len() as u64) as usize;
            mine.rotate_left(first);
        }
        for at in mine {
            let token = Token(at as u64);
            if let Some(when) = self.ends[at].closes_at {
                if when <= self.now {
                    // The kernel may write until it says that it does not.
                    for part in self.ends[at].recv.take().iter().flatten() {
                        // SAFETY: as in `recv`.
                        unsafe { std::ptr::write_bytes(part.ptr, 0xDD, part.len) };
                    }
                    self.forget(at);
                    out.push(Completion::Closed { token });
                }
                continue;
            }
            if let Some((when, is_accepted)) = self.ends[at].connects {
                if when <= self.now {
                    self.ends[at].connects = None;
                    let is_reset = self.ends[at].reset_at.is_some_and(|when| when <= self.now);
                    let result = match (is_accepted, is_reset) {
                        (true, false) => Ok(()),
                        (true, true) => Err(io::Error::from_raw_os_error(libc::ECONNRESET)),
                        (false, _) => Err(io::Error::from_raw_os_error(libc::ECONNREFUSED)),
                    };
                    out.push(Completion::Connected { token, result });
                }
                continue;
            }
            if self.fails(4) {
                continue;
            }
            if let Some(result) = self.send(at) {
                self.ends[at].send = None;
                out.push(Completion::Send { token, result });
            } else if self.ends[at].finishes && self.ends[at].send.is_none() {
                self.ends[at].finishes = false;
                self.gone(at, false);
            }
            if let Some(result) = self.recv(at) {
                self.ends[at].recv = None;
                out.push(Completion::Recv { token, result });
            }
        }
        self.moved += (out.len() - before) as u64;
    }
}
