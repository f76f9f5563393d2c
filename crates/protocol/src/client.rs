//! The client's half: requests on their way out, replies on their way in.

use std::collections::{BTreeSet, VecDeque};
use std::time::Instant;

use super::connection::{Connection, Side};
use super::error::{ConnectionError, ProtocolError, code};
use super::frame::{Parts, put};
use super::handler::{Handler, Outcome};
use super::idmap::{IdHash, IdMap};
use super::keys::{Interned, KeySender};
use super::limits::{Limits, MAX_KEY, MAX_META, MAX_PARTS};
use super::outgoing::{Answers, Dropped, Head, Measure, remaining_ms};

/// All requests of one connection that wait for something.
pub struct Client<H: Handler> {
    requests: IdMap<Request<H>>,
    /// Requests that the peer's limits hold back. Ids whose request ended meanwhile are skipped.
    waiting: [VecDeque<u64>; 3],
    deadlines: BTreeSet<(Instant, u64)>,
    keys: KeySender,
    recvs_out: u32,
    calls_out: u32,
    call_bytes_out: u64,
    /// Ended ops whose buffers the current receive plan names.
    deferred: Vec<(H::Op, i32, String)>,
    /// Why no new requests may be sent.
    leaving: Option<String>,
    lens: Vec<u64>,
}

/// Requests that wait for the same limit, in order.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Queue {
    Recv,
    /// Calls without payload do not wait behind payloads.
    Call,
    HeavyCall,
}

struct Request<H: Handler> {
    /// None: ended here, but the peer does not know yet.
    op: Option<H::Op>,
    deadline: Option<Instant>,
    queue: Queue,
    /// Payload bytes of the call.
    bytes: u64,
    state: State<H>,
}

enum State<H: Handler> {
    WaitingRecv(Box<WaitingRecv>),
    WaitingCall(Box<WaitingCall<H>>),
    Sent,
    /// The reply's bulk parts are arriving.
    Arriving {
        meta: Box<[u8]>,
    },
}

struct WaitingRecv {
    step: i64,
    prefix: Box<[u8]>,
    frame: u64,
    iter: u64,
}

struct WaitingCall<H: Handler> {
    method: u16,
    meta: Vec<u8>,
    payload: Option<H::Payload>,
    measure: Measure,
}

impl<H: Handler> Client<H> {
    pub fn new(hash: IdHash) -> Self {
        Client {
            requests: IdMap::with_hasher(hash),
            waiting: Default::default(),
            deadlines: BTreeSet::new(),
            keys: KeySender::default(),
            recvs_out: 0,
            calls_out: 0,
            call_bytes_out: 0,
            deferred: Vec::new(),
            leaving: None,
            lens: Vec::new(),
        }
    }

    pub fn in_flight(&self) -> usize {
        self.requests.len()
    }

    pub fn op_mut(&mut self, id: u64) -> Option<&mut H::Op> {
        self.requests.get_mut(&id)?.op.as_mut()
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    pub fn slim(&mut self) {
        self.requests.shrink_to_fit();
        self.waiting.iter_mut().for_each(VecDeque::shrink_to_fit);
        self.lens = Vec::new();
    }

    /// The receive plan is over: nobody writes into the buffers of ended ops any more.
    pub fn end_deferred(&mut self, handler: &mut H) {
        for (op, code, message) in self.deferred.drain(..) {
            handler.reply_done(op, Outcome::Local { code, message: &message });
        }
    }

    fn has_room(&self, queue: Queue, bytes: u64, limits: &Limits) -> bool {
        match queue {
            Queue::Recv => self.recvs_out < limits.max_recvs,
            Queue::Call => self.calls_out < limits.max_calls,
            Queue::HeavyCall => {
                let fits = self.call_bytes_out.checked_add(bytes).is_some_and(|sum| sum <= limits.max_call_bytes);
                self.calls_out < limits.max_calls && (fits || self.call_bytes_out == 0)
            }
        }
    }

    fn charge(&mut self, queue: Queue, bytes: u64) {
        match queue {
            Queue::Recv => self.recvs_out += 1,
            Queue::Call | Queue::HeavyCall => self.calls_out += 1,
        }
        self.call_bytes_out += bytes;
    }

    fn release(&mut self, queue: Queue, bytes: u64) {
        match queue {
            Queue::Recv => self.recvs_out = self.recvs_out.saturating_sub(1),
            Queue::Call | Queue::HeavyCall => self.calls_out = self.calls_out.saturating_sub(1),
        }
        self.call_bytes_out = self.call_bytes_out.saturating_sub(bytes);
    }

    fn wait(&mut self, queue: Queue, id: u64) {
        let ids = &mut self.waiting[queue as usize];
        ids.push_back(id);
        if ids.len() > 64 + 2 * self.requests.len() {
            ids.retain(|id| self.requests.contains_key(id));
        }
    }

    fn remove(&mut self, id: u64) -> Option<Request<H>> {
        let request = self.requests.remove(&id)?;
        self.forget_deadline(id, request.deadline);
        Some(request)
    }

    fn forget_deadline(&mut self, id: u64, deadline: Option<Instant>) {
        if let Some(deadline) = deadline {
            self.deadlines.remove(&(deadline, id));
        }
    }
}

/// A request that cannot be sent, and why.
fn refuse<H: Handler>(handler: &mut H, op: H::Op, code: i32, message: &str) {
    handler.reply_done(op, Outcome::Local { code, message });
}

impl<H: Handler> Connection<H> {
    /// Starts a rendezvous request. Ids are the owner's and never used twice on a connection. The op may end before
    /// this returns.
    #[allow(clippy::too_many_arguments)]
    pub fn recv(
        &mut self,
        now: Instant,
        id: u64,
        step: i64,
        prefix: &[u8],
        frame: u64,
        iter: u64,
        deadline: Option<Instant>,
        op: H::Op,
        handler: &mut H,
    ) {
        if prefix.len() > MAX_KEY {
            let message = format!("a rendezvous key of {} bytes is too long: at most {MAX_KEY}", prefix.len());
            return refuse(handler, op, code::INVALID_ARGUMENT, &message);
        }
        let Some(op) = self.admissible(now, id, deadline, op, handler) else { return };
        let Side::Client(client) = &mut self.side else { return };
        let mut request = Request { op: Some(op), deadline, queue: Queue::Recv, bytes: 0, state: State::Sent };
        self.stats.recvs += 1;
        if let Some(deadline) = deadline {
            client.deadlines.insert((deadline, id));
        }
        match &self.peer {
            Some(peer) if client.waiting[0].is_empty() && client.has_room(Queue::Recv, 0, &peer.limits) => {
                client.requests.insert(id, request);
                let limits = peer.limits;
                self.send_recv(id, step, prefix, frame, iter, &limits);
            }
            _ => {
                let prefix = prefix.into();
                request.state = State::WaitingRecv(Box::new(WaitingRecv { step, prefix, frame, iter }));
                client.requests.insert(id, request);
                client.wait(Queue::Recv, id);
            }
        }
    }

    /// Starts a call. `method` is not 0. The op may end before this returns.
    #[allow(clippy::too_many_arguments)]
    pub fn call(
        &mut self,
        now: Instant,
        id: u64,
        method: u16,
        meta: Vec<u8>,
        payload: Option<H::Payload>,
        deadline: Option<Instant>,
        op: H::Op,
        handler: &mut H,
    ) {
        if method == 0 {
            return refuse(handler, op, code::INVALID_ARGUMENT, "method 0 does not exist");
        }
        if meta.len() > MAX_META {
            let message = format!("call metadata of {} bytes is too long: at most {MAX_META}", meta.len());
            return refuse(handler, op, code::INVALID_ARGUMENT, &message);
        }
        let measure = Measure::of(payload.as_ref()).filter(|measure| measure.count <= MAX_PARTS);
        let Some(measure) = measure else {
            let message = format!("the payload has too many parts (at most {MAX_PARTS}) or too many bytes");
            return refuse(handler, op, code::INVALID_ARGUMENT, &message);
        };
        let Some(op) = self.admissible(now, id, deadline, op, handler) else { return };
        let Side::Client(client) = &mut self.side else { return };
        self.stats.calls += 1;
        let bytes = measure.total();
        let queue = if bytes == 0 { Queue::Call } else { Queue::HeavyCall };
        let call = Box::new(WaitingCall { method, meta, payload, measure });
        let mut request = Request { op: Some(op), deadline, queue, bytes, state: State::Sent };
        if let Some(deadline) = deadline {
            client.deadlines.insert((deadline, id));
        }
        match &self.peer {
            Some(peer) if client.waiting[queue as usize].is_empty() && client.has_room(queue, bytes, &peer.limits) => {
                let limits = peer.limits;
                client.requests.insert(id, request);
                self.send_call(now, id, *call, &limits, handler);
            }
            _ => {
                request.state = State::WaitingCall(call);
                client.requests.insert(id, request);
                client.wait(queue, id);
            }
        }
    }

    /// Ends a request with `Outcome::Local` and tells the peer. Unknown ids are ignored. The op ends at once, or, if
    /// the receive plan that the owner is filling at the moment names its buffers, in the next `on_received` or `fail`.
    pub fn cancel(&mut self, now: Instant, id: u64, code: i32, message: &str, handler: &mut H) {
        self.end(id, code, message, handler);
        if self.unblocked {
            self.send_waiting(now, handler);
        }
    }

    fn end(&mut self, id: u64, code: i32, message: &str, handler: &mut H) {
        let Side::Client(client) = &mut self.side else { return };
        let Some(request) = client.requests.get_mut(&id) else { return };
        let Some(op) = request.op.take() else { return };
        let deadline = request.deadline.take();
        let (queue, bytes) = (request.queue, request.bytes);
        let mut deferred = false;
        let tell = match request.state {
            State::WaitingRecv(_) | State::WaitingCall(_) => {
                client.requests.remove(&id);
                false
            }
            State::Sent => match self.out.drop_transfer(id) {
                Some((Dropped::Unsent, _)) => {
                    client.requests.remove(&id);
                    client.release(queue, bytes);
                    self.unblocked = true;
                    false
                }
                Some((Dropped::Begun, _)) | None => true,
            },
            State::Arriving { .. } => {
                if let Some(transfer) = self.incoming.transfer_mut(id) {
                    transfer.wanted = false;
                    deferred = transfer.in_plan;
                }
                true
            }
        };
        client.forget_deadline(id, deadline);
        if tell {
            self.stats.cancels += 1;
            self.out.frame(Answers::default(), &mut self.stats, |out| put::cancel(out, id, code));
        }
        if deferred {
            client.deferred.push((op, code, message.to_owned()));
        } else {
            handler.reply_done(op, Outcome::Local { code, message });
        }
    }

    /// Ends the op at once if no request can be made.
    fn admissible(
        &mut self,
        now: Instant,
        id: u64,
        deadline: Option<Instant>,
        op: H::Op,
        handler: &mut H,
    ) -> Option<H::Op> {
        if let Some((code, message)) = self.broken() {
            refuse(handler, op, code, &message);
            return None;
        }
        let (code, message) = match &self.side {
            Side::Server(_) => (code::INTERNAL, "only the client side of a connection can send requests"),
            Side::Client(client) => match &client.leaving {
                Some(reason) => (code::UNAVAILABLE, reason.as_str()),
                None if client.requests.contains_key(&id) => (code::INTERNAL, "a request id was used twice"),
                None if deadline.is_some_and(|deadline| deadline <= now) => {
                    (code::DEADLINE_EXCEEDED, "the deadline passed before the request could be sent")
                }
                None => return Some(op),
            },
        };
        refuse(handler, op, code, message);
        None
    }

    fn send_recv(&mut self, id: u64, step: i64, prefix: &[u8], frame: u64, iter: u64, limits: &Limits) {
        let Side::Client(client) = &mut self.side else { return };
        client.charge(Queue::Recv, 0);
        let key = match client.keys.intern(prefix, limits.max_keys, limits.max_key_bytes) {
            Interned::Known { key } => key,
            Interned::New { key, forget } => {
                self.stats.keys += 1;
                self.stats.key_resets += u64::from(forget);
                self.out.frame(Answers::default(), &mut self.stats, |out| put::key(out, key, forget, prefix));
                key
            }
        };
        self.out.frame(Answers::default(), &mut self.stats, |out| put::recv(out, id, step, key, frame, iter));
    }

    /// Sends a call whose request is in the table.
    fn send_call(&mut self, now: Instant, id: u64, call: WaitingCall<H>, limits: &Limits, handler: &mut H) {
        let Side::Client(client) = &mut self.side else { return };
        let WaitingCall { method, meta, payload, measure } = call;
        if measure.total() > limits.max_payload {
            let message =
                format!("a payload of {} bytes exceeds the peer's limit of {}", measure.total(), limits.max_payload);
            if let Some(op) = client.remove(id).and_then(|request| request.op) {
                refuse(handler, op, code::RESOURCE_EXHAUSTED, &message);
            }
            return;
        }
        let Some(request) = client.requests.get(&id) else { return };
        let deadline = request.deadline;
        let queue = request.queue;
        client.charge(queue, measure.total());
        match payload {
            Some(payload) if measure.bulk != 0 || (measure.inline != 0 && self.out.is_high()) => {
                self.out.transfer(id, Head::Call { method, meta, deadline }, payload, measure);
            }
            payload => {
                self.stats.payload_out += measure.inline;
                self.stats.copied_out += measure.inline;
                let deadline_ms = remaining_ms(now, deadline);
                self.out.frame(Answers::default(), &mut self.stats, |out| {
                    put::call(out, id, method, deadline_ms, &meta, payload.as_ref());
                });
            }
        }
    }

    /// Sends what waited for limits or for the handshake.
    pub(super) fn send_waiting(&mut self, now: Instant, handler: &mut H) {
        self.unblocked = false;
        let Some(limits) = self.peer.as_ref().map(|peer| peer.limits) else { return };
        for queue in [Queue::Recv, Queue::Call, Queue::HeavyCall] {
            loop {
                let Side::Client(client) = &mut self.side else { return };
                let Some(&id) = client.waiting[queue as usize].front() else { break };
                let Some(request) = client.requests.get_mut(&id) else {
                    client.waiting[queue as usize].pop_front();
                    continue;
                };
                let bytes = request.bytes;
                if !client.has_room(queue, bytes, &limits) {
                    break;
                }
                client.waiting[queue as usize].pop_front();
                let Some(request) = client.requests.get_mut(&id) else { continue };
                match std::mem::replace(&mut request.state, State::Sent) {
                    State::WaitingRecv(recv) => {
                        self.send_recv(id, recv.step, &recv.prefix, recv.frame, recv.iter, &limits);
                    }
                    State::WaitingCall(call) => self.send_call(now, id, *call, &limits, handler),
                    other => request.state = other,
                }
            }
        }
    }

    /// Ends what waits and was never sent.
    pub(super) fn refuse_waiting(&mut self, reason: &str, handler: &mut H) {
        let Side::Client(client) = &mut self.side else { return };
        client.leaving = Some(reason.to_owned());
        for queue in 0..client.waiting.len() {
            while let Some(id) = client.waiting[queue].pop_front() {
                if let Some(op) = client.remove(id).and_then(|request| request.op) {
                    refuse(handler, op, code::UNAVAILABLE, reason);
                }
            }
        }
    }

    pub(super) fn end_overdue(&mut self, now: Instant, handler: &mut H) {
        loop {
            let Side::Client(client) = &mut self.side else { return };
            let Some(&(deadline, id)) = client.deadlines.first() else { return };
            if deadline > now {
                return;
            }
            client.deadlines.pop_first();
            let peer = self.peer.as_ref().map_or("a peer that has not answered the handshake", |peer| &peer.task);
            let message = format!("deadline exceeded while waiting for {peer}");
            self.end(id, code::DEADLINE_EXCEEDED, &message, handler);
        }
    }

    pub(super) fn on_reply(
        &mut self,
        id: u64,
        reply_code: i32,
        meta: &[u8],
        parts: Parts<'_>,
        handler: &mut H,
    ) -> Result<(), ConnectionError> {
        let bad = |why| ProtocolError::BadId { frame: "REPLY", id, why };
        let Side::Client(client) = &mut self.side else { return Ok(()) };
        let Some(mut request) = client.requests.remove(&id) else { return Err(bad("is not in flight").into()) };
        let problem = match request.state {
            State::Sent if self.out.has_begun(id) == Some(false) => Some("was never sent"),
            State::Sent => None,
            State::Arriving { .. } => Some("was already answered"),
            State::WaitingRecv(_) | State::WaitingCall(_) => Some("was never sent"),
        };
        if let Some(why) = problem {
            client.requests.insert(id, request);
            return Err(bad(why).into());
        }
        client.release(request.queue, request.bytes);
        self.unblocked = true;
        self.stats.replies += 1;
        if self.out.drop_transfer(id).is_some() {
            // Answered before it was complete: the rest need not travel.
            self.out.frame(Answers::default(), &mut self.stats, |out| put::data(out, id, 0));
        }
        let bulk = parts.bulk() != 0;
        if reply_code != 0 {
            if bulk {
                client.requests.insert(id, request);
                return Err(ProtocolError::Frame { frame: "REPLY", why: "error details are not inline" }.into());
            }
            client.forget_deadline(id, request.deadline);
            if let Some(op) = request.op {
                let message = String::from_utf8_lossy(meta);
                let details: Vec<u8> = parts.iter().filter_map(|part| part.inline).flatten().copied().collect();
                handler.reply_done(op, Outcome::PeerError { code: reply_code, message: &message, details: &details });
            }
            return Ok(());
        }
        if parts.total() > self.settings.limits.max_payload {
            let (value, limit) = (parts.total(), self.settings.limits.max_payload);
            client.requests.insert(id, request);
            return Err(ProtocolError::TooLarge { what: "length of a payload", value, limit }.into());
        }
        if let Some(op) = request.op.as_mut().filter(|_| parts.count() != 0) {
            client.lens.clear();
            client.lens.extend(parts.iter().map(|part| part.len));
            match handler.reply_alloc(op, meta, &client.lens) {
                Ok(()) => {
                    for (number, part) in parts.iter().enumerate() {
                        if let Some(bytes) = part.inline.filter(|bytes| !bytes.is_empty()) {
                            handler.write_reply(op, number, bytes);
                            self.stats.payload_in += part.len;
                            self.stats.copied_in += part.len;
                        }
                    }
                }
                Err(failure) => {
                    client.forget_deadline(id, request.deadline.take());
                    if let Some(op) = request.op.take() {
                        let message = format!("reply refused by receiver: {}", failure.message);
                        handler.reply_done(op, Outcome::Local { code: failure.code, message: &message });
                    }
                    if bulk {
                        self.stats.cancels += 1;
                        let code = code::CANCELLED;
                        self.out.frame(Answers::default(), &mut self.stats, |out| put::cancel(out, id, code));
                    }
                }
            }
        }
        if bulk {
            self.incoming.expect(id, &parts, request.op.is_some());
            let meta = if request.op.is_some() { meta.into() } else { Box::default() };
            request.state = State::Arriving { meta };
            client.requests.insert(id, request);
        } else {
            client.forget_deadline(id, request.deadline);
            if let Some(op) = request.op {
                handler.reply_done(op, Outcome::Ok { meta });
            }
        }
        Ok(())
    }

    /// The last bulk byte of a reply arrived.
    pub(super) fn reply_complete(&mut self, id: u64, handler: &mut H) {
        let Side::Client(client) = &mut self.side else { return };
        let Some(request) = client.remove(id) else { return };
        if let (Some(op), State::Arriving { meta }) = (request.op, request.state) {
            handler.reply_done(op, Outcome::Ok { meta: &meta });
        }
    }

    /// The server says that the rest of a reply will not come, which it may after our CANCEL only.
    pub(super) fn reply_aborted(&mut self, id: u64) {
        self.incoming.forget(id);
        if let Side::Client(client) = &mut self.side {
            client.remove(id);
        }
    }

    pub(super) fn fail_client(&mut self, code: i32, message: &str, handler: &mut H) {
        let Side::Client(client) = &mut self.side else { return };
        client.end_deferred(handler);
        client.deadlines.clear();
        client.waiting = Default::default();
        let mut ended: Vec<_> = client.requests.drain().collect();
        // Oldest first.
        ended.sort_unstable_by_key(|(id, _)| *id);
        for (_, request) in ended {
            if let Some(op) = request.op {
                handler.reply_done(op, Outcome::Local { code, message });
            }
        }
    }
}
