//! The thread of a queue pair, as requester and responder.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::abi::*;
use super::objects::Regions;
use super::queue::{Shared, Work, completion};
use super::wire::{self, HEAD, Head, Kind, PIECE};

/// Copies between registered memory and a buffer. The lock keeps the memory registered meanwhile.
fn access(regions: &Regions, sges: &[ibv_sge], mut offset: u64, buffer: &mut [u8], write: bool) -> Result<(), ()> {
    let regions = regions.lock().unwrap();
    let mut done = 0;
    for sge in sges {
        let len = u64::from(sge.length);
        if offset >= len {
            offset -= len;
            continue;
        }
        let region = regions.get(&sge.lkey).ok_or(())?;
        let inside = sge.addr >= region.addr && sge.addr + len <= region.addr + region.len;
        if !inside || write && region.access & ACCESS_LOCAL_WRITE == 0 {
            return Err(());
        }
        let piece = (len - offset).min((buffer.len() - done) as u64) as usize;
        let at = (sge.addr + offset) as *mut u8;
        unsafe {
            if write {
                std::ptr::copy_nonoverlapping(buffer[done..].as_ptr(), at, piece);
            } else {
                std::ptr::copy_nonoverlapping(at, buffer[done..].as_mut_ptr(), piece);
            }
        }
        done += piece;
        offset = 0;
        if done == buffer.len() {
            return Ok(());
        }
    }
    if done == buffer.len() { Ok(()) } else { Err(()) }
}

/// The requester's current work request.
struct Request {
    work: Work,
    attempt: u32,
    sent_at: Instant,
    tries: u32,
    rnr_tries: u32,
    wait_until: Option<Instant>,
    received: u64,
    status: c_int,
}

/// A message that is arriving.
struct Arriving {
    work: Work,
    received: u64,
}

pub struct Machine {
    shared: Arc<Shared>,
    socket: UnixDatagram,
    out: VecDeque<Vec<u8>>,
    request: Option<Request>,
    arriving: Option<Arriving>,
    attempts: u32,
}

impl Machine {
    pub fn new(shared: Arc<Shared>, socket: UnixDatagram) -> Self {
        Machine { shared, socket, out: VecDeque::new(), request: None, arriving: None, attempts: 0 }
    }

    pub fn run(mut self) {
        let mut buffer = vec![0u8; HEAD + PIECE];
        while !self.shared.stop.load(Ordering::SeqCst) {
            self.receive(&mut buffer);
            self.next_request();
            let stuck = self.flush();
            let timeout = match &self.request {
                _ if stuck => 1,
                Some(_) => 5,
                None => -1,
            };
            let mut fds = [
                libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLIN, revents: 0 },
                libc::pollfd { fd: self.shared.wake, events: libc::POLLIN, revents: 0 },
            ];
            unsafe { libc::poll(fds.as_mut_ptr(), 2, timeout) };
            if fds[1].revents != 0 {
                let mut count = 0;
                unsafe { libc::eventfd_read(self.shared.wake, &mut count) };
            }
        }
    }

    fn say(&mut self, head: Head, payload: &[u8]) {
        let mut bytes = head.encode();
        bytes.extend_from_slice(payload);
        self.out.push_back(bytes);
    }

    /// Returns true if unsent datagrams remain.
    fn flush(&mut self) -> bool {
        let (gid, peer) = {
            let state = self.shared.state.lock().unwrap();
            (state.peer_gid, state.peer)
        };
        while let Some(bytes) = self.out.pop_front() {
            if self.shared.spec.unreachable {
                continue;
            }
            match self.socket.send_to_addr(&bytes, &wire::address(&gid, peer)) {
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    self.out.push_front(bytes);
                    return true;
                }
                // No receiver: lost, as on a network.
                Err(_) => {}
            }
        }
        false
    }

    fn next_request(&mut self) {
        let shared = self.shared.clone();
        let mut state = shared.state.lock().unwrap();
        if state.qp_state == QPS_ERR && !(state.sends.is_empty() && state.receives.is_empty()) {
            shared.fail(&mut state);
        }
        if state.qp_state != QPS_RTS {
            self.request = None;
            return;
        }
        if let Some(request) = &mut self.request {
            let now = Instant::now();
            if request.wait_until.is_some_and(|until| now >= until) {
                request.wait_until = None;
                let (work, psn) = (request.work.clone(), state.send_psn);
                drop(state);
                return self.transmit(&work, psn);
            }
            // Resend only if the peer is gone: a slow test machine is not a broken network.
            let gone = shared.spec.unreachable || {
                let address = wire::address(&state.peer_gid, state.peer);
                matches!(self.socket.send_to_addr(&[], &address), Err(e) if e.kind() != std::io::ErrorKind::WouldBlock)
            };
            if request.wait_until.is_none() && gone && now > request.sent_at + state.timeout {
                request.tries += 1;
                request.sent_at = now;
                if request.tries > state.retries {
                    drop(state);
                    return self.complete(WC_RETRY_EXC_ERR);
                }
                let (work, psn) = (request.work.clone(), state.send_psn);
                drop(state);
                self.transmit(&work, psn);
            }
            return;
        }
        let Some(work) = state.sends.pop_front() else { return };
        let psn = state.send_psn;
        drop(state);
        let now = Instant::now();
        let what = if work.opcode == WR_SEND { "send" } else { "read" };
        self.request = Some(Request {
            work: work.clone(),
            attempt: 0,
            sent_at: now,
            tries: 0,
            rnr_tries: 0,
            wait_until: None,
            received: 0,
            status: 0,
        });
        if shared.spec.hit("cq_err").is_some() {
            return shared.send_cq.break_down();
        }
        if shared.spec.hit("fatal").is_some() {
            return shared.send_cq.fatal();
        }
        if work.opcode == WR_RDMA_READ && shared.spec.hit("lost").is_some() {
            if let Some(request) = &mut self.request {
                request.sent_at += Duration::from_secs(1 << 20);
            }
            return;
        }
        match shared.spec.hit(what) {
            Some(status) => self.complete(status),
            None => self.transmit(&work, psn),
        }
    }

    fn transmit(&mut self, work: &Work, psn: u32) {
        self.attempts += 1;
        let attempt = self.attempts;
        if let Some(request) = &mut self.request {
            request.attempt = attempt;
            request.received = 0;
        }
        let total = work.len();
        let base =
            Head { kind: Kind::Send, from: self.shared.number, psn, status: 0, offset: 0, total, rkey: 0, attempt };
        if work.opcode == WR_RDMA_READ {
            return self.say(Head { kind: Kind::Read, offset: work.remote, rkey: work.rkey, ..base }, &[]);
        }
        let mut offset = 0;
        loop {
            let mut piece = vec![0; (total - offset).min(PIECE as u64) as usize];
            if !piece.is_empty() && access(&self.shared.regions, &work.sges, offset, &mut piece, false).is_err() {
                return self.complete(WC_LOC_PROT_ERR);
            }
            self.say(Head { offset, ..base }, &piece);
            offset += piece.len() as u64;
            if offset >= total {
                return;
            }
        }
    }

    fn complete(&mut self, status: c_int) {
        let Some(request) = self.request.take() else { return };
        let opcode = if request.work.opcode == WR_SEND { WC_OPCODE_SEND } else { WC_OPCODE_RDMA_READ };
        let mut state = self.shared.state.lock().unwrap();
        state.send_psn = (state.send_psn + 1) & 0xff_ffff;
        if status != WC_SUCCESS || request.work.signaled {
            let len = request.work.len();
            self.shared.send_cq.push(completion(self.shared.number, request.work.id, opcode, status, len));
        }
        if status != WC_SUCCESS {
            self.shared.fail(&mut state);
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) {
        // Bounded, so that this side's requests make progress.
        for _ in 0..64 {
            let Ok(len) = self.socket.recv(buffer) else { return };
            let Some(head) = Head::decode(&buffer[..len]) else { continue };
            let payload = &buffer[HEAD.min(len)..len];
            let (state, peer, expected, own) = {
                let state = self.shared.state.lock().unwrap();
                (state.qp_state, state.peer, state.receive_psn, state.send_psn)
            };
            match head.kind {
                Kind::Send | Kind::Read => {
                    let answers = matches!(state, QPS_RTR | QPS_RTS);
                    if answers && head.from == peer && head.psn == expected {
                        self.serve(head, payload);
                    } else if head.from == peer {
                        self.answer(head, Kind::Closed, 0);
                    }
                }
                _ if head.from != peer || head.psn != own => {}
                _ => self.answered(head, payload),
            }
        }
    }

    fn answer(&mut self, to: Head, kind: Kind, status: c_int) {
        self.say(Head { kind, from: self.shared.number, status: status as u32, ..to }, &[]);
    }

    /// The responder: handles a request.
    fn serve(&mut self, head: Head, payload: &[u8]) {
        if head.kind == Kind::Read {
            return self.serve_read(head);
        }
        if head.offset == 0 {
            let work = self.shared.state.lock().unwrap().receives.pop_front();
            let Some(work) = work else {
                self.arriving = None;
                return self.answer(head, Kind::NotReady, 0);
            };
            if work.len() < head.total {
                self.finish_receive(work.id, WC_LOC_LEN_ERR, 0);
                return self.answer(head, Kind::Nak, WC_REM_INV_REQ_ERR);
            }
            self.arriving = Some(Arriving { work, received: 0 });
        }
        let Some(arriving) = &mut self.arriving else { return };
        let mut bytes = payload.to_vec();
        let stored = bytes.is_empty()
            || access(&self.shared.regions, &arriving.work.sges, head.offset, &mut bytes, true).is_ok();
        arriving.received += payload.len() as u64;
        let (id, received) = (arriving.work.id, arriving.received);
        if !stored {
            self.arriving = None;
            self.finish_receive(id, WC_LOC_PROT_ERR, 0);
            return self.answer(head, Kind::Nak, WC_REM_OP_ERR);
        }
        if received == head.total {
            self.arriving = None;
            self.advance();
            self.finish_receive(id, WC_SUCCESS, received);
            self.answer(head, Kind::Ack, 0);
        }
    }

    fn advance(&self) {
        let mut state = self.shared.state.lock().unwrap();
        state.receive_psn = (state.receive_psn + 1) & 0xff_ffff;
    }

    fn finish_receive(&self, id: u64, status: c_int, len: u64) {
        self.shared.recv_cq.push(completion(self.shared.number, id, WC_OPCODE_RECV, status, len));
        if status != WC_SUCCESS {
            let mut state = self.shared.state.lock().unwrap();
            self.shared.fail(&mut state);
        }
    }

    fn serve_read(&mut self, head: Head) {
        let allowed = {
            let regions = self.shared.regions.lock().unwrap();
            regions.get(&head.rkey).is_some_and(|region| {
                region.access & ACCESS_REMOTE_READ != 0
                    && head.offset >= region.addr
                    && head.offset + head.total <= region.addr + region.len
            })
        };
        if !allowed {
            self.answer(head, Kind::Nak, WC_REM_ACCESS_ERR);
            let mut state = self.shared.state.lock().unwrap();
            return self.shared.fail(&mut state);
        }
        let sges: Vec<ibv_sge> = vec![ibv_sge { addr: head.offset, length: head.total as u32, lkey: head.rkey }];
        let mut offset = 0;
        while offset < head.total {
            let mut piece = vec![0; (head.total - offset).min(PIECE as u64) as usize];
            if access(&self.shared.regions, &sges, offset, &mut piece, false).is_err() {
                return self.answer(head, Kind::Nak, WC_REM_ACCESS_ERR);
            }
            let data = Head { kind: Kind::Data, from: self.shared.number, offset, ..head };
            offset += piece.len() as u64;
            self.say(data, &piece);
        }
        self.advance();
    }

    /// The requester: handles a response.
    fn answered(&mut self, head: Head, payload: &[u8]) {
        let Some(request) = self.request.as_mut().filter(|request| request.attempt == head.attempt) else { return };
        match head.kind {
            Kind::Ack => self.complete(WC_SUCCESS),
            Kind::Nak => self.complete(head.status as c_int),
            Kind::Data => {
                let mut bytes = payload.to_vec();
                let stored = access(&self.shared.regions, &request.work.sges, head.offset, &mut bytes, true);
                request.received += payload.len() as u64;
                if stored.is_err() {
                    request.status = WC_LOC_PROT_ERR;
                }
                if request.received == head.total {
                    let status = request.status;
                    self.complete(status);
                }
            }
            Kind::NotReady | Kind::Closed => {
                let (limit, patience) = {
                    let state = self.shared.state.lock().unwrap();
                    if head.kind == Kind::NotReady {
                        (state.rnr_retries, Duration::from_millis(1))
                    } else {
                        (state.retries, state.timeout)
                    }
                };
                let tries = if head.kind == Kind::NotReady { &mut request.rnr_tries } else { &mut request.tries };
                *tries += 1;
                let tries = *tries;
                request.wait_until = Some(Instant::now() + patience);
                if head.kind == Kind::NotReady && limit != 7 && tries > limit {
                    self.complete(WC_RNR_RETRY_EXC_ERR);
                } else if head.kind == Kind::Closed && tries > limit {
                    self.complete(WC_RETRY_EXC_ERR);
                }
            }
            Kind::Send | Kind::Read => {}
        }
    }
}
