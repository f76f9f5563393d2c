//! The io_uring driver: one system call submits the queued operations and waits for completions.
//!
//! Each operation lives in a boxed slot (message header, pieces, address) that is freed only after its completion was
//! seen. The slot's key is the operation's user data; it carries a generation, so a late completion never finds another
//! operation. A descriptor is closed after its last operation has ended: `close` shuts it down and cancels them, the
//! last completion reports `Closed`.
//!
//! Descriptors are blocking while registered: with O_NONBLOCK the kernel would end an operation with EAGAIN instead of
//! waiting for it.

mod operation;
mod ring;

use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use io_uring::types::Fd;
use io_uring::{cqueue, opcode};

use operation::{Kind, Operation, Socket};
use ring::{Reaped, Ring};

use super::driver::{Completion, Driver, IoPart, Token};
use super::error::DriverError;
use super::slots::Slots;
use super::sys::{self, Wake};
use crate::transport::{RawAddress, SocketAddress};

const SUBMISSIONS: u32 = 512;
const COMPLETIONS: u32 = 8192;
const WAKE: u64 = u64::MAX;
const CANCEL: u64 = u64::MAX - 1;
/// How long dropping the driver waits for the kernel to release the memory of cancelled operations.
const DRAIN: Duration = Duration::from_secs(5);

pub struct UringDriver {
    ring: Ring,
    wake: Wake,
    sockets: Slots<Socket>,
    operations: Slots<Box<Operation>>,
    /// Finished operations, for reuse.
    #[expect(clippy::vec_box, reason = "they go back into `operations`, where their address must not change")]
    spare: Vec<Box<Operation>>,
    ready: VecDeque<Completion>,
    /// Completions taken out of the ring in one go; kept for its capacity.
    reaped: Vec<Reaped>,
    woken: bool,
    /// Listeners that hit the descriptor limit, and when to try them again.
    paused: Vec<(Instant, Token)>,
    /// Linux 5.19: multishot accept, poll-first.
    modern: bool,
    /// The ring belongs to the thread that made it (IORING_SETUP_SINGLE_ISSUER).
    _not_send: PhantomData<*mut ()>,
}

impl UringDriver {
    /// To be called on the thread that will use the driver. The error names what is missing if the kernel, or a sandbox
    /// around this process, lacks a required feature.
    pub fn new() -> Result<Self, DriverError> {
        Self::with_queues(SUBMISSIONS, COMPLETIONS)
    }

    /// With room for this many operations to be submitted, and completions to be taken, at once. Exceeding them only
    /// costs system calls.
    pub fn with_queues(submissions: u32, completions: u32) -> Result<Self, DriverError> {
        let (ring, modern) = Ring::new(submissions, completions)?;
        let mut driver = UringDriver {
            ring,
            wake: Wake::new().map_err(DriverError::Uring)?,
            sockets: Slots::new(),
            operations: Slots::new(),
            spare: Vec::new(),
            ready: VecDeque::new(),
            reaped: Vec::new(),
            woken: false,
            paused: Vec::new(),
            modern,
            _not_send: PhantomData,
        };
        driver.watch_wake();
        Ok(driver)
    }

    /// Each write to the eventfd is an edge, so it never has to be read.
    fn watch_wake(&mut self) {
        let poll = opcode::PollAdd::new(Fd(self.wake.fd()), operation::READABLE).multi(true);
        // SAFETY: points at no memory.
        unsafe { self.ring.push(poll.build().user_data(WAKE)) };
    }

    fn insert(&mut self, fd: OwnedFd) -> Token {
        self.sockets.insert(Socket {
            fd,
            in_flight: Default::default(),
            accepting: false,
            drained: false,
            closing: false,
            unreported: 0,
        })
    }

    fn socket(&mut self, token: Token) -> io::Result<&mut Socket> {
        self.sockets.get_mut(token).filter(|socket| !socket.closing).ok_or_else(sys::stale_token)
    }

    fn report(&mut self, completion: Completion) {
        if let Some(socket) = self.sockets.get_mut(completion.token()) {
            socket.unreported += 1;
            self.ready.push_back(completion);
        }
    }

    fn operation(&mut self, owner: Token, kind: Kind) -> Box<Operation> {
        let mut operation = self.spare.pop().unwrap_or_else(|| {
            Box::new(Operation {
                owner,
                kind,
                asked: 0,
                iovecs: Vec::new(),
                header: sys::message(&mut []),
                address: RawAddress::empty(),
            })
        });
        (operation.owner, operation.kind) = (owner, kind);
        operation
    }

    /// Hands an operation to the kernel. Its box does not move until its completion.
    fn start(&mut self, operation: Box<Operation>) {
        let (owner, kind) = (operation.owner, operation.kind);
        let key = self.operations.insert(operation);
        if let Some(socket) = self.sockets.get_mut(owner) {
            socket.in_flight[kind as usize] = Some(key);
        }
        self.submit_operation(key);
    }

    fn submit_operation(&mut self, key: Token) {
        let Some(operation) = self.operations.get_mut(key) else { return };
        let Some(socket) = self.sockets.get_mut(operation.owner) else { return };
        let entry = operation.entry(Fd(socket.fd.as_raw_fd()), self.modern, socket.drained);
        // SAFETY: what the entry points at is in the operation's box, which lives until the completion, or was given to
        // `recv` or `send`, whose caller keeps it valid until then.
        unsafe { self.ring.push(entry.user_data(key.0)) };
    }

    fn reap(&mut self) {
        let mut reaped = std::mem::take(&mut self.reaped);
        loop {
            self.ring.reap(&mut reaped);
            if reaped.is_empty() {
                break;
            }
            for &Reaped { user_data, result, flags } in &reaped {
                match user_data {
                    CANCEL => {}
                    WAKE => {
                        self.woken = true;
                        if !cqueue::more(flags) {
                            self.watch_wake();
                        }
                    }
                    key => self.on_completion(Token(key), result, flags),
                }
            }
        }
        self.reaped = reaped;
    }

    fn on_completion(&mut self, key: Token, result: i32, flags: u32) {
        let Some(operation) = self.operations.get_mut(key) else { return };
        let (token, kind, asked) = (operation.owner, operation.kind, operation.asked);
        if kind == Kind::Accept {
            self.on_accepted(token, result, cqueue::more(flags));
        }
        if kind == Kind::Watch && result > 0 {
            self.report(Completion::Readable { token });
        }
        let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        if cqueue::more(flags) {
            return;
        }
        let Some(socket) = self.sockets.get_mut(token) else { return };
        let interrupted =
            matches!(&result, Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)));
        if interrupted && !socket.closing && matches!(kind, Kind::Recv | Kind::Send) {
            return self.submit_operation(key);
        }
        socket.in_flight[kind as usize] = None;
        if let Some(operation) = self.operations.remove(key) {
            self.spare.push(operation);
        }
        if socket.closing {
            if socket.is_idle() {
                self.ready.push_back(Completion::Closed { token });
            }
            return;
        }
        match kind {
            Kind::Recv => {
                socket.drained = matches!(result, Ok(moved) if moved < asked) && !cqueue::sock_nonempty(flags);
                self.report(Completion::Recv { token, result });
            }
            Kind::Send => self.report(Completion::Send { token, result }),
            Kind::Connect => self.report(Completion::Connected { token, result: result.map(drop) }),
            Kind::Watch => {
                if result.is_ok() {
                    let operation = self.operation(token, Kind::Watch);
                    self.start(operation);
                }
            }
            Kind::Accept => {
                if !self.paused.iter().any(|(_, listener)| *listener == token) {
                    let operation = self.operation(token, Kind::Accept);
                    self.start(operation);
                }
            }
        }
    }

    fn on_accepted(&mut self, listener: Token, result: i32, goes_on: bool) {
        let result = if result < 0 {
            Err(io::Error::from_raw_os_error(-result))
        } else {
            // SAFETY: not negative, so a descriptor that the kernel has just created for us.
            unsafe { sys::owned(result) }
        };
        // A connection to a listener that is being closed is closed here, by dropping it.
        if self.socket(listener).is_err() {
            return;
        }
        if let Err(error) = &result {
            if error.raw_os_error() == Some(libc::EINVAL) && self.modern && !goes_on {
                self.modern = false;
                return;
            }
            if sys::is_lost_before_accept(error) {
                return;
            }
            self.paused.push((Instant::now() + sys::ACCEPT_PAUSE, listener));
        }
        self.report(Completion::Accepted { listener, result });
    }

    fn resume_paused(&mut self) {
        let now = Instant::now();
        let (due, later): (Vec<_>, Vec<_>) = self.paused.drain(..).partition(|(at, _)| *at <= now);
        self.paused = later;
        for (_, listener) in due {
            if self.socket(listener).is_ok_and(|socket| !socket.has(Kind::Accept)) {
                let operation = self.operation(listener, Kind::Accept);
                self.start(operation);
            }
        }
    }

    fn deliver(&mut self, out: &mut Vec<Completion>) {
        while let Some(completion) = self.ready.pop_front() {
            let token = completion.token();
            if let Completion::Closed { .. } = completion {
                self.sockets.remove(token);
                out.push(completion);
            } else if let Some(socket) = self.sockets.get_mut(token).filter(|socket| !socket.closing) {
                // After `close` only `Closed` is reported.
                socket.unreported -= 1;
                out.push(completion);
            }
        }
    }

    fn set_nonblocking(fd: &OwnedFd, nonblocking: bool) -> io::Result<()> {
        let flags = if nonblocking { libc::O_NONBLOCK } else { 0 };
        // SAFETY: takes no pointers. A socket has no other flags that F_SETFL would lose.
        sys::check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_RDWR | flags) })
    }
}

impl Driver for UringDriver {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn register(&mut self, fd: OwnedFd) -> io::Result<Token> {
        Self::set_nonblocking(&fd, false)?;
        Ok(self.insert(fd))
    }

    fn accept(&mut self, listener: Token) -> io::Result<()> {
        let socket = self.socket(listener)?;
        if socket.accepting {
            return Err(sys::already("accept"));
        }
        socket.accepting = true;
        let operation = self.operation(listener, Kind::Accept);
        self.start(operation);
        Ok(())
    }

    fn connect(&mut self, token: Token, address: &SocketAddress) -> io::Result<()> {
        if self.socket(token)?.has(Kind::Connect) {
            return Err(sys::already("connect"));
        }
        let address = RawAddress::new(address)?;
        let mut operation = self.operation(token, Kind::Connect);
        operation.address = address;
        self.start(operation);
        Ok(())
    }

    unsafe fn recv(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()> {
        if self.socket(token)?.has(Kind::Recv) {
            return Err(sys::already("recv"));
        }
        self.transfer(token, Kind::Recv, parts)
    }

    unsafe fn send(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()> {
        if self.socket(token)?.has(Kind::Send) {
            return Err(sys::already("send"));
        }
        self.transfer(token, Kind::Send, parts)
    }

    fn watch(&mut self, fd: OwnedFd) -> io::Result<Token> {
        let token = self.insert(fd);
        let operation = self.operation(token, Kind::Watch);
        self.start(operation);
        Ok(token)
    }

    fn finish(&mut self, token: Token) {
        if let Ok(found) = self.socket(token) {
            sys::shutdown_write(found.fd.as_raw_fd());
        }
    }

    fn close(&mut self, token: Token) {
        let Ok(socket) = self.socket(token) else { return };
        socket.closing = true;
        sys::shutdown(socket.fd.as_raw_fd());
        let operations = socket.in_flight;
        if socket.is_idle() {
            self.ready.push_back(Completion::Closed { token });
        }
        for key in operations.into_iter().flatten() {
            // SAFETY: points at no memory.
            unsafe { self.ring.push(opcode::AsyncCancel::new(key.0).build().user_data(CANCEL)) };
        }
    }

    fn release(&mut self, token: Token) -> io::Result<OwnedFd> {
        let socket = self.socket(token)?;
        if !socket.is_idle() || socket.accepting || socket.unreported > 0 {
            return Err(sys::busy());
        }
        Self::set_nonblocking(&socket.fd, true)?;
        self.sockets.remove(token).map(|socket| socket.fd).ok_or_else(sys::stale_token)
    }

    fn quiesce(&mut self, patience: Duration) -> bool {
        for token in self.sockets.keys() {
            self.close(token);
        }
        let deadline = Instant::now() + patience;
        let mut out = Vec::new();
        while !self.sockets.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.wait(Some(left), &mut out).is_err() {
                return false;
            }
        }
        true
    }

    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()> {
        self.reap();
        self.ring.refill();
        let mut timeout = timeout;
        if let Some(resume) = self.paused.iter().map(|(at, _)| at.saturating_duration_since(Instant::now())).min() {
            timeout = Some(timeout.map_or(resume, |timeout| timeout.min(resume)));
        }
        if !self.ready.is_empty() || self.woken || self.ring.is_behind() {
            timeout = Some(Duration::ZERO);
        }
        self.ring.enter(timeout)?;
        self.reap();
        if !self.paused.is_empty() {
            self.resume_paused();
        }
        self.woken = false;
        self.deliver(out);
        Ok(())
    }

    fn wake_fd(&self) -> RawFd {
        self.wake.fd()
    }
}

impl UringDriver {
    fn transfer(&mut self, token: Token, kind: Kind, parts: &[IoPart]) -> io::Result<()> {
        let mut operation = self.operation(token, kind);
        match sys::fill_iovecs(&mut operation.iovecs, parts) {
            Ok(asked) => operation.asked = asked,
            Err(error) => {
                self.spare.push(operation);
                return Err(error);
            }
        }
        self.start(operation);
        Ok(())
    }
}

impl Drop for UringDriver {
    /// Closing a ring cancels operations, but later, on a kernel thread. So this cancels them and waits: once the
    /// driver is gone, nothing touches the callers' memory.
    fn drop(&mut self) {
        if !self.quiesce(DRAIN) {
            // The kernel may still use the operations: leak them.
            std::mem::forget(std::mem::replace(&mut self.operations, Slots::new()));
        }
    }
}
