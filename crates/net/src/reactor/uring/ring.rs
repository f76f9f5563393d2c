//! The queues that this process shares with the kernel.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};

use crate::reactor::error::DriverError;

pub struct Ring {
    ring: IoUring,
    /// Entries for which the submission queue had no room.
    unsubmitted: VecDeque<squeue::Entry>,
}

/// A completion.
#[derive(Clone, Copy)]
pub struct Reaped {
    pub user_data: u64,
    pub result: i32,
    pub flags: u32,
}

impl Ring {
    /// Second: whether the kernel is Linux 5.19 or later. The error names what is missing if the kernel, or a sandbox
    /// around this process, lacks a required feature.
    pub fn new(submissions: u32, completions: u32) -> Result<(Self, bool), DriverError> {
        let ring = setup(submissions, completions)?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(DriverError::missing("IORING_FEAT_EXT_ARG and IORING_FEAT_NODROP", "5.11"));
        }
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(DriverError::Uring)?;
        for (code, name, since) in [
            (opcode::PollAdd::CODE, "IORING_OP_POLL_ADD", "5.1"),
            (opcode::SendMsg::CODE, "IORING_OP_SENDMSG", "5.3"),
            (opcode::RecvMsg::CODE, "IORING_OP_RECVMSG", "5.3"),
            (opcode::Accept::CODE, "IORING_OP_ACCEPT", "5.5"),
            (opcode::AsyncCancel::CODE, "IORING_OP_ASYNC_CANCEL", "5.5"),
            (opcode::Connect::CODE, "IORING_OP_CONNECT", "5.5"),
            (opcode::Send::CODE, "IORING_OP_SEND", "5.6"),
            (opcode::Recv::CODE, "IORING_OP_RECV", "5.6"),
        ] {
            if !probe.is_supported(code) {
                return Err(DriverError::missing(name, since));
            }
        }
        // Came in the same release as multishot accept and poll-first, which cannot be probed.
        let modern = probe.is_supported(opcode::Socket::CODE);
        Ok((Ring { ring, unsubmitted: VecDeque::new() }, modern))
    }

    /// Queues an entry, for the next `enter` at the latest.
    ///
    /// # Safety
    /// The memory that the entry points at stays valid until its completion.
    pub unsafe fn push(&mut self, entry: squeue::Entry) {
        if self.unsubmitted.is_empty() {
            // SAFETY: the caller keeps the memory valid.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            // A full queue is not an error: submit it and continue. If the kernel takes nothing now, `enter` submits
            // the rest.
            let _ = self.ring.submit();
            // SAFETY: as above.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
        }
        self.unsubmitted.push_back(entry);
    }

    /// Moves as much as fits from `unsubmitted` to the queue.
    pub fn refill(&mut self) {
        let mut queue = self.ring.submission();
        while let Some(entry) = self.unsubmitted.front() {
            // SAFETY: as in `push`.
            if unsafe { queue.push(entry) }.is_err() {
                break;
            }
            self.unsubmitted.pop_front();
        }
    }

    /// Some entries are not in the queue yet.
    pub fn is_behind(&self) -> bool {
        !self.unsubmitted.is_empty()
    }

    /// Replaces the content of `out` by the completions that are there.
    pub fn reap(&mut self, out: &mut Vec<Reaped>) {
        out.clear();
        out.extend(self.ring.completion().map(|entry| Reaped {
            user_data: entry.user_data(),
            result: entry.result(),
            flags: entry.flags(),
        }));
    }

    /// Submits what is queued and waits for a completion, at most for `timeout`.
    pub fn enter(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let poll = timeout.is_some_and(|timeout| timeout.is_zero());
        if poll {
            let queue = self.ring.submission();
            if queue.is_empty() && !queue.taskrun() && !queue.cq_overflow() {
                return Ok(());
            }
        }
        let limit = timeout.map(Timespec::from);
        let mut arguments = SubmitArgs::new();
        if let Some(limit) = &limit {
            arguments = arguments.timespec(limit);
        }
        match self.ring.submitter().submit_with_args(usize::from(!poll), &arguments) {
            Ok(_) => Ok(()),
            // Timeout; signal; completions must be taken first; out of memory for now: the next call continues.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

/// Chooses the cheapest way of running completions that this kernel supports: on this thread, on request.
fn setup(submissions: u32, completions: u32) -> Result<IoUring, DriverError> {
    let build = |level: u32| {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_clamp().setup_cqsize(completions);
        if level >= 1 {
            builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
        }
        if level >= 2 {
            builder.setup_single_issuer().setup_defer_taskrun();
        }
        builder.build(submissions)
    };
    let mut level = 2;
    loop {
        match build(level) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && level > 0 => level -= 1,
            result => return result.map_err(DriverError::setup),
        }
    }
}
