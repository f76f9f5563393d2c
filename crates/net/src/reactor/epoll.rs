//! The epoll driver: runs on every kernel, and is the faster one on small machines.
//!
//! An operation is tried at once if the descriptor is believed to be ready, so that a small request and its answer cost
//! three system calls: `recv`, `send`, `epoll_wait`. The belief is a hint per direction: an operation that moves less
//! than requested clears it, an event sets it. The result of an immediate attempt is reported by the next `wait`, never
//! by the call that started it, so a busy connection cannot starve the others.
//!
//! Streams are edge-triggered. EPOLLOUT is requested only once a send had to wait, because a unix socket raises it each
//! time the peer reads. Listeners are level-triggered, so that a burst of connections can be accepted in pieces.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use super::driver::{Completion, Driver, IoPart, Token};
use super::slots::Slots;
use super::sys::{self, Wake};
use crate::transport::{RawAddress, SocketAddress};

const WAKE: u64 = u64::MAX;
const EVENTS: u16 = 256;
/// Connections accepted from one listener before other descriptors get their turn.
const ACCEPT_BURST: usize = 64;

pub struct EpollDriver {
    epoll: OwnedFd,
    wake: Wake,
    slots: Slots<Slot>,
    /// Results of immediate attempts, in order, for the next `wait`.
    ready: VecDeque<Completion>,
    events: Vec<libc::epoll_event>,
    /// The last `wait` returned without checking the descriptors.
    skipped: bool,
    /// Listeners that hit the descriptor limit, and when to try them again.
    paused: Vec<(Instant, Token)>,
    millisecond_waits: bool,
}

struct Slot {
    fd: OwnedFd,
    /// The registered events; 0: the descriptor is not registered.
    interest: u32,
    readable: bool,
    writable: bool,
    /// The read side has ended or failed: a receive never has to wait again.
    read_ended: bool,
    recv: Vec<libc::iovec>,
    send: Vec<libc::iovec>,
    /// Total bytes of `recv`/`send`; 0: nothing is in flight.
    recv_len: usize,
    send_len: usize,
    connecting: bool,
    accepting: bool,
    watching: bool,
    closing: bool,
    /// Completions of this token that wait in `ready`.
    unreported: usize,
}

impl EpollDriver {
    pub fn new() -> io::Result<Self> {
        // SAFETY: takes no pointers; `owned` checks the new descriptor, which has no other owner.
        let epoll = unsafe { sys::owned(libc::epoll_create1(libc::EPOLL_CLOEXEC))? };
        let wake = Wake::new()?;
        // Edge-triggered: each write to the eventfd is an edge, so it never has to be read.
        control(&epoll, libc::EPOLL_CTL_ADD, wake.fd(), sys::bits(libc::EPOLLIN | libc::EPOLLET), WAKE)?;
        Ok(EpollDriver {
            epoll,
            wake,
            slots: Slots::new(),
            ready: VecDeque::new(),
            events: vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS.into()],
            skipped: false,
            paused: Vec::new(),
            millisecond_waits: false,
        })
    }

    fn slot(&mut self, token: Token) -> io::Result<&mut Slot> {
        self.slots.get_mut(token).filter(|slot| !slot.closing).ok_or_else(sys::stale_token)
    }

    fn report(&mut self, completion: Completion) {
        if let Some(slot) = self.slots.get_mut(completion.token()) {
            slot.unreported += 1;
            self.ready.push_back(completion);
        }
    }

    /// Adds `interest` to the registered events.
    fn ask_for(&mut self, token: Token, interest: u32) -> io::Result<()> {
        let slot = self.slots.get_mut(token).ok_or_else(sys::stale_token)?;
        let wanted = slot.interest | interest;
        if wanted == slot.interest {
            return Ok(());
        }
        let how = if slot.interest == 0 { libc::EPOLL_CTL_ADD } else { libc::EPOLL_CTL_MOD };
        control(&self.epoll, how, slot.fd.as_raw_fd(), wanted, token.0)?;
        slot.interest = wanted;
        Ok(())
    }

    fn try_recv(&mut self, token: Token) {
        let Some(slot) = self.slots.get_mut(token) else { return };
        let asked = slot.recv_len;
        // SAFETY: the iovecs point at the parts given to `recv`, whose caller keeps them valid until the completion
        // queued below.
        let result = unsafe { sys::recv(slot.fd.as_raw_fd(), &mut slot.recv) };
        match result {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => slot.readable = false,
            result => {
                slot.readable = matches!(result, Ok(moved) if moved == asked);
                slot.read_ended |= matches!(result, Ok(0) | Err(_));
                slot.recv_len = 0;
                sys::slim(&mut slot.recv);
                self.report(Completion::Recv { token, result });
            }
        }
    }

    fn try_send(&mut self, token: Token) {
        let Some(slot) = self.slots.get_mut(token) else { return };
        let asked = slot.send_len;
        // SAFETY: the iovecs point at the parts given to `send`, whose caller keeps them valid until the completion
        // queued below.
        let result = unsafe { sys::send(slot.fd.as_raw_fd(), &mut slot.send) };
        match result {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => slot.writable = false,
            result => {
                // After an error the next attempt fails at once as well.
                slot.writable = !matches!(result, Ok(moved) if moved < asked);
                slot.send_len = 0;
                sys::slim(&mut slot.send);
                self.report(Completion::Send { token, result });
            }
        }
    }

    fn try_accept(&mut self, listener: Token) {
        for _ in 0..ACCEPT_BURST {
            let Some(slot) = self.slots.get_mut(listener) else { return };
            // SAFETY: `accept4` allows null addresses; `owned` checks the new descriptor, which has no other owner.
            let result = unsafe {
                sys::owned(libc::accept4(
                    slot.fd.as_raw_fd(),
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC,
                ))
            };
            match result {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if sys::is_lost_before_accept(&error) => {}
                Err(error) => {
                    // Staying registered would report the same connection again and again.
                    self.pause(listener);
                    self.report(Completion::Accepted { listener, result: Err(error) });
                    return;
                }
                result => self.report(Completion::Accepted { listener, result }),
            }
        }
    }

    fn pause(&mut self, listener: Token) {
        let Some(slot) = self.slots.get_mut(listener) else { return };
        // If it cannot be removed, events repeat; nothing is lost.
        if control(&self.epoll, libc::EPOLL_CTL_DEL, slot.fd.as_raw_fd(), 0, 0).is_ok() {
            slot.interest = 0;
            self.paused.push((Instant::now() + sys::ACCEPT_PAUSE, listener));
        }
    }

    fn resume_paused(&mut self) {
        let now = Instant::now();
        let mut index = 0;
        while index < self.paused.len() {
            if self.paused[index].0 > now {
                index += 1;
                continue;
            }
            let (_, listener) = self.paused.swap_remove(index);
            if self.slot(listener).is_ok() {
                if let Err(error) = self.ask_for(listener, libc::EPOLLIN as u32) {
                    self.paused.push((now + sys::ACCEPT_PAUSE, listener));
                    self.report(Completion::Accepted { listener, result: Err(error) });
                    return;
                }
            }
        }
    }

    fn on_event(&mut self, token: Token, events: u32) {
        let Ok(slot) = self.slot(token) else { return };
        let seen = |flags: libc::c_int| events & sys::bits(flags) != 0;
        if slot.accepting {
            return self.try_accept(token);
        }
        if slot.watching {
            return self.report(Completion::Readable { token });
        }
        if slot.connecting {
            if seen(libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP) {
                slot.connecting = false;
                slot.writable = true;
                // The stream may have ended by now, which no other event will say.
                slot.read_ended |= seen(libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR);
                let result = sys::take_error(slot.fd.as_raw_fd());
                self.report(Completion::Connected { token, result });
            }
            return;
        }
        if seen(libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) {
            slot.read_ended = true;
        }
        if seen(libc::EPOLLIN) || slot.read_ended {
            slot.readable = true;
        }
        if seen(libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP) {
            slot.writable = true;
        }
        let (recv, send) = (slot.readable && slot.recv_len > 0, slot.writable && slot.send_len > 0);
        if seen(libc::EPOLLOUT) && slot.send_len == 0 {
            let interest = slot.interest & !(libc::EPOLLOUT as u32);
            let fd = slot.fd.as_raw_fd();
            // If this fails, the only cost is spurious events.
            if control(&self.epoll, libc::EPOLL_CTL_MOD, fd, interest, token.0).is_ok() {
                if let Some(slot) = self.slots.get_mut(token) {
                    slot.interest = interest;
                }
            }
        }
        if recv {
            self.try_recv(token);
        }
        if send {
            self.try_send(token);
        }
    }

    fn deliver(&mut self, out: &mut Vec<Completion>) {
        while let Some(completion) = self.ready.pop_front() {
            let token = completion.token();
            if let Completion::Closed { .. } = completion {
                self.slots.remove(token);
                out.push(completion);
            } else if let Some(slot) = self.slots.get_mut(token).filter(|slot| !slot.closing) {
                // After `close` only `Closed` is reported.
                slot.unreported -= 1;
                out.push(completion);
            }
        }
    }

    fn poll(&mut self, timeout: Option<Duration>) -> io::Result<usize> {
        let (epoll, events) = (self.epoll.as_raw_fd(), self.events.as_mut_ptr());
        let count = if self.millisecond_waits {
            let limit = timeout.map_or(-1, sys::milliseconds_up);
            // SAFETY: `events` has room for EVENTS entries.
            unsafe { libc::epoll_wait(epoll, events, EVENTS.into(), limit) }.into()
        } else {
            let limit = timeout.map(sys::timespec);
            let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
            let (call, mask) = (libc::SYS_epoll_pwait2, std::ptr::null::<libc::sigset_t>());
            // SAFETY: `events` has room for EVENTS entries; `limit` is null or outlives the call; the signal mask may
            // be null.
            unsafe { libc::syscall(call, epoll, events, libc::c_int::from(EVENTS), limit, mask, 0usize) }
        };
        usize::try_from(count).or_else(|_| {
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => Ok(0),
                // Before Linux 5.11, or filtered by a sandbox.
                Some(libc::ENOSYS | libc::EPERM) if !self.millisecond_waits => {
                    self.millisecond_waits = true;
                    self.poll(timeout)
                }
                _ => Err(error),
            }
        })
    }
}

impl Driver for EpollDriver {
    fn name(&self) -> &'static str {
        "epoll"
    }

    fn register(&mut self, fd: OwnedFd) -> io::Result<Token> {
        Ok(self.slots.insert(Slot {
            fd,
            interest: 0,
            readable: true,
            writable: true,
            read_ended: false,
            recv: Vec::new(),
            send: Vec::new(),
            recv_len: 0,
            send_len: 0,
            connecting: false,
            accepting: false,
            watching: false,
            closing: false,
            unreported: 0,
        }))
    }

    fn accept(&mut self, listener: Token) -> io::Result<()> {
        let slot = self.slot(listener)?;
        if slot.accepting {
            return Err(sys::already("accept"));
        }
        slot.accepting = true;
        self.ask_for(listener, libc::EPOLLIN as u32).inspect_err(|_| {
            if let Some(slot) = self.slots.get_mut(listener) {
                slot.accepting = false;
            }
        })
    }

    fn connect(&mut self, token: Token, address: &SocketAddress) -> io::Result<()> {
        let slot = self.slot(token)?;
        if slot.connecting {
            return Err(sys::already("connect"));
        }
        let address = RawAddress::new(address)?;
        match sys::connect(slot.fd.as_raw_fd(), &address) {
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
                slot.connecting = true;
                self.ask_for(token, STREAM | libc::EPOLLOUT as u32).inspect_err(|_| {
                    if let Some(slot) = self.slots.get_mut(token) {
                        slot.connecting = false;
                    }
                })
            }
            result => {
                self.report(Completion::Connected { token, result });
                Ok(())
            }
        }
    }

    unsafe fn recv(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()> {
        let slot = self.slot(token)?;
        if slot.recv_len > 0 {
            return Err(sys::already("recv"));
        }
        slot.recv_len = sys::fill_iovecs(&mut slot.recv, parts)?;
        if slot.readable || slot.read_ended {
            self.try_recv(token);
        }
        match self.slots.get_mut(token) {
            Some(slot) if slot.recv_len > 0 => self.ask_for(token, STREAM).inspect_err(|_| {
                if let Some(slot) = self.slots.get_mut(token) {
                    slot.recv_len = 0;
                }
            }),
            _ => Ok(()),
        }
    }

    unsafe fn send(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()> {
        let slot = self.slot(token)?;
        if slot.send_len > 0 {
            return Err(sys::already("send"));
        }
        slot.send_len = sys::fill_iovecs(&mut slot.send, parts)?;
        if slot.writable {
            self.try_send(token);
        }
        match self.slots.get_mut(token) {
            Some(slot) if slot.send_len > 0 => self.ask_for(token, STREAM | libc::EPOLLOUT as u32).inspect_err(|_| {
                if let Some(slot) = self.slots.get_mut(token) {
                    slot.send_len = 0;
                }
            }),
            _ => Ok(()),
        }
    }

    fn watch(&mut self, fd: OwnedFd) -> io::Result<Token> {
        let token = self.register(fd)?;
        self.slot(token)?.watching = true;
        self.ask_for(token, STREAM)?;
        Ok(token)
    }

    fn finish(&mut self, token: Token) {
        if let Ok(found) = self.slot(token) {
            sys::shutdown_write(found.fd.as_raw_fd());
        }
    }

    fn close(&mut self, token: Token) {
        let Ok(slot) = self.slot(token) else { return };
        slot.closing = true;
        (slot.recv_len, slot.send_len) = (0, 0);
        let (fd, watched) = (slot.fd.as_raw_fd(), slot.interest != 0);
        sys::shutdown(fd);
        if watched {
            // Explicitly, because a forked child may hold the description open, and epoll would keep watching it.
            // Cannot fail for a registered descriptor.
            let _ = control(&self.epoll, libc::EPOLL_CTL_DEL, fd, 0, 0);
        }
        self.ready.push_back(Completion::Closed { token });
    }

    fn release(&mut self, token: Token) -> io::Result<OwnedFd> {
        let slot = self.slot(token)?;
        if slot.recv_len > 0 || slot.send_len > 0 || slot.connecting || slot.accepting || slot.unreported > 0 {
            return Err(sys::busy());
        }
        let (fd, watched) = (slot.fd.as_raw_fd(), slot.interest != 0);
        if watched {
            control(&self.epoll, libc::EPOLL_CTL_DEL, fd, 0, 0)?;
        }
        self.slots.remove(token).map(|slot| slot.fd).ok_or_else(sys::stale_token)
    }

    fn quiesce(&mut self, _patience: Duration) -> bool {
        for token in self.slots.keys() {
            self.close(token);
        }
        self.deliver(&mut Vec::new());
        true
    }

    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()> {
        // Deliver what is ready without a system call, but not twice in a row, or other descriptors would starve.
        if !self.ready.is_empty() && !self.skipped {
            self.skipped = true;
            self.deliver(out);
            return Ok(());
        }
        self.skipped = false;
        let mut timeout = if self.ready.is_empty() { timeout } else { Some(Duration::ZERO) };
        if let Some(resume) = self.paused.iter().map(|(at, _)| at.saturating_duration_since(Instant::now())).min() {
            timeout = Some(timeout.map_or(resume, |timeout| timeout.min(resume)));
        }
        let count = self.poll(timeout)?;
        for index in 0..count {
            let libc::epoll_event { events, u64: data } = self.events[index];
            if data != WAKE {
                self.on_event(Token(data), events);
            }
        }
        if !self.paused.is_empty() {
            self.resume_paused();
        }
        self.deliver(out);
        Ok(())
    }

    fn wake_fd(&self) -> RawFd {
        self.wake.fd()
    }
}

const STREAM: u32 = sys::bits(libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET);

fn control(epoll: &OwnedFd, how: libc::c_int, fd: RawFd, events: u32, data: u64) -> io::Result<()> {
    let mut event = libc::epoll_event { events, u64: data };
    // SAFETY: `event` is valid for the call, which copies it.
    sys::check(unsafe { libc::epoll_ctl(epoll.as_raw_fd(), how, fd, &mut event) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn an_idle_connection_keeps_no_long_lists() {
        let mut driver = EpollDriver::new().unwrap();
        let [a, b] = UnixStream::pair().map(|(a, b)| [a, b]).unwrap().map(|end| driver.register(end.into()).unwrap());
        let mut bytes = [[7u8; 500], [0u8; 500]];
        let [from, to] = bytes.each_mut().map(|list| {
            list.iter_mut().map(|byte| IoPart { ptr: std::ptr::from_mut(byte), len: 1 }).collect::<Vec<_>>()
        });
        // SAFETY: the bytes outlive the driver's use of them, which ends with the completions below.
        unsafe {
            driver.send(a, &from).unwrap();
            driver.recv(b, &to).unwrap();
        }
        let mut seen = Vec::new();
        while seen.len() < 2 {
            driver.wait(None, &mut seen).unwrap();
        }
        assert_eq!(bytes[1], bytes[0]);
        for token in [a, b] {
            let Slot { recv, send, .. } = driver.slot(token).unwrap();
            assert!(recv.capacity() <= sys::FEW_PARTS && send.capacity() <= sys::FEW_PARTS);
        }
    }
}
