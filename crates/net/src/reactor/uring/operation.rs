//! What the kernel works on: sockets and their operations.

use std::os::fd::OwnedFd;

use io_uring::types::Fd;
use io_uring::{opcode, squeue};

use crate::reactor::driver::Token;
use crate::reactor::sys;
use crate::transport::RawAddress;

/// IORING_RECVSEND_POLL_FIRST: wait for readiness before the first attempt.
const POLL_FIRST: u16 = 1;
/// A single RECV or SEND has a 32-bit length; no operation moves more than this at once anyway.
const MAX_SINGLE: u32 = 1 << 30;
/// POLLIN, as the ring takes it.
pub const READABLE: u32 = libc::POLLIN as u32;

pub struct Socket {
    pub fd: OwnedFd,
    /// By kind: the operation in flight.
    pub in_flight: [Option<Token>; KINDS],
    pub accepting: bool,
    /// The last receive left nothing behind: the next one waits before it tries.
    pub drained: bool,
    pub closing: bool,
    /// Completions of this token that wait in `ready`.
    pub unreported: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Recv,
    Send,
    Connect,
    Accept,
    Watch,
}

const KINDS: usize = Kind::Watch as usize + 1;

/// The memory that the kernel may access until the operation's completion.
pub struct Operation {
    pub owner: Token,
    pub kind: Kind,
    pub asked: usize,
    pub iovecs: Vec<libc::iovec>,
    pub header: libc::msghdr,
    pub address: RawAddress,
}

impl Socket {
    pub fn has(&self, kind: Kind) -> bool {
        self.in_flight[kind as usize].is_some()
    }

    pub fn is_idle(&self) -> bool {
        self.in_flight.iter().all(Option::is_none)
    }
}

impl Operation {
    /// The entry that starts it. It points into `self`, and at the memory of the caller's parts.
    pub fn entry(&mut self, fd: Fd, modern: bool, drained: bool) -> squeue::Entry {
        match self.kind {
            Kind::Connect => opcode::Connect::new(fd, self.address.as_ptr(), self.address.size()).build(),
            Kind::Accept => {
                const FLAGS: i32 = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
                if modern {
                    opcode::AcceptMulti::new(fd).flags(FLAGS).build()
                } else {
                    opcode::Accept::new(fd, std::ptr::null_mut(), std::ptr::null_mut()).flags(FLAGS).build()
                }
            }
            Kind::Watch => opcode::PollAdd::new(fd, READABLE).multi(true).build(),
            Kind::Recv => {
                let poll_first = if modern && drained { POLL_FIRST } else { 0 };
                if let [single] = self.iovecs[..] {
                    opcode::Recv::new(fd, single.iov_base.cast(), single_len(single)).ioprio(poll_first).build()
                } else {
                    self.header = sys::message(&mut self.iovecs);
                    opcode::RecvMsg::new(fd, &mut self.header).ioprio(poll_first).build()
                }
            }
            Kind::Send => {
                if let [single] = self.iovecs[..] {
                    opcode::Send::new(fd, single.iov_base.cast_const().cast(), single_len(single))
                        .flags(libc::MSG_NOSIGNAL)
                        .build()
                } else {
                    self.header = sys::message(&mut self.iovecs);
                    opcode::SendMsg::new(fd, &self.header).flags(sys::bits(libc::MSG_NOSIGNAL)).build()
                }
            }
        }
    }
}

fn single_len(single: libc::iovec) -> u32 {
    u32::try_from(single.iov_len).map_or(MAX_SINGLE, |len| len.min(MAX_SINGLE))
}
