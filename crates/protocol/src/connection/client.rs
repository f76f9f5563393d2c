//! The client side of a connection: requests that it sends, replies that arrive.

use std::collections::{BTreeSet, VecDeque};
use std::time::Instant;

use super::{Connection, Side};
use crate::error::{ConnectionError, ProtocolError, code};
use crate::event::{Ending, Events};
use crate::frame::{RecvFrame, ReplyFrame, put};
use crate::idmap::{IdHash, IdMap};
use crate::keys::{Interned, KeySender};
use crate::limits::{Limits, MAX_KEY, MAX_META, MAX_PARTS};
use crate::outgoing::{Answers, Dropped, Head, Measure, remaining_ms};
use crate::owner::{Owner, ReplyBuffer};
use starwire_marks::mark;

/// A rendezvous request to send: see `Connection::recv`.
pub struct Recv<'a, Op> {
    /// Chosen by the owner, and used once on a connection.
    pub id: u64,
    pub step: i64,
    pub prefix: &'a [u8],
    pub frame: u64,
    pub iter: u64,
    pub deadline: Option<Instant>,
    pub op: Op,
}

/// A call to send: see `Connection::call`.
pub struct Call<Payload, Op> {
    /// Chosen by the owner, and used once on a connection.
    pub id: u64,
    /// Not 0.
    pub method: u16,
    pub meta: Vec<u8>,
    pub payload: Option<Payload>,
    pub deadline: Option<Instant>,
    pub op: Op,
}

/// All requests of a connection that have not ended.
pub struct Client<O: Owner> {
    requests: IdMap<Request<O>>,
    /// Requests that the peer's limits hold back. Ids whose request has ended are skipped.
    waiting: [VecDeque<u64>; 3],
    deadlines: BTreeSet<(Instant, u64)>,
    keys: KeySender,
    recvs_out: u32,
    calls_out: u32,
    call_bytes_out: u64,
    /// Ops that have ended, but whose buffers the current receive targets name.
    deferred: Vec<(O::Op, i32, String)>,
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

/// Which side has said GOODBYE.
#[derive(Clone, Copy)]
pub(super) enum Leaves {
    Own,
    Peer,
}

const QUEUES: [Queue; 3] = [Queue::Recv, Queue::Call, Queue::HeavyCall];

struct Request<O: Owner> {
    /// None: it has ended here, but the server has not confirmed that.
    op: Option<O::Op>,
    deadline: Option<Instant>,
    queue: Queue,
    /// Payload bytes of the call.
    bytes: u64,
    state: State<O>,
}

enum State<O: Owner> {
    WaitingRecv(Box<WaitingRecv>),
    WaitingCall(Box<WaitingCall<O>>),
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

struct WaitingCall<O: Owner> {
    method: u16,
    meta: Vec<u8>,
    payload: Option<O::Payload>,
    measure: Measure,
}

impl<O: Owner> Client<O> {
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

    pub fn op_mut(&mut self, id: u64) -> Option<&mut O::Op> {
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

    /// The receive targets are filled, so nothing is written into the buffers of ended ops any more.
    pub fn end_deferred(&mut self, events: &mut Events<O>) {
        for (op, code, message) in self.deferred.drain(..) {
            events.end(op, code, &message);
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

    /// Takes back what `charge` added for the same request.
    fn release(&mut self, queue: Queue, bytes: u64) {
        match queue {
            Queue::Recv => self.recvs_out -= 1,
            Queue::Call | Queue::HeavyCall => self.calls_out -= 1,
        }
        self.call_bytes_out -= bytes;
    }

    fn wait(&mut self, queue: Queue, id: u64) {
        let ids = &mut self.waiting[queue as usize];
        ids.push_back(id);
        if ids.len() > 64 + 2 * self.requests.len() {
            ids.retain(|id| self.requests.contains_key(id));
        }
    }

    /// Adds a request. An id that is in use changes nothing.
    fn enter(&mut self, id: u64, request: Request<O>) -> Result<(), Option<O::Op>> {
        let deadline = request.deadline;
        if let Some(other) = self.requests.insert(id, request) {
            return Err(self.requests.insert(id, other).and_then(|request| request.op));
        }
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, id));
        }
        Ok(())
    }

    fn remove(&mut self, id: u64) -> Option<Request<O>> {
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

impl<O: Owner> Connection<O> {
    /// Starts a rendezvous request. It may end at once.
    pub fn recv(&mut self, now: Instant, recv: Recv<'_, O::Op>) {
        let Recv { id, step, prefix, frame, iter, deadline, op } = recv;
        if prefix.len() > MAX_KEY {
            let message = format!("a rendezvous key of {} bytes is too long: at most {MAX_KEY}", prefix.len());
            return self.events.end(op, code::INVALID_ARGUMENT, &message);
        }
        if let Some((code, message)) = self.refusal(now, deadline) {
            return self.events.end(op, code, &message);
        }
        let Side::Client(client) = &mut self.side else { return };
        let limits = self.peer.as_ref().map(|peer| peer.limits);
        let limits = limits.filter(|limits| {
            client.waiting[Queue::Recv as usize].is_empty() && client.has_room(Queue::Recv, 0, limits)
        });
        let state = match limits {
            Some(_) => State::Sent,
            None => State::WaitingRecv(Box::new(WaitingRecv { step, prefix: prefix.into(), frame, iter })),
        };
        let request = Request { op: Some(op), deadline, queue: Queue::Recv, bytes: 0, state };
        if let Err(op) = client.enter(id, request) {
            return self.refuse_twin(op);
        }
        match limits {
            Some(limits) => self.send_recv(RecvFrame { id, step, key: 0, frame, iter }, prefix, &limits),
            None => client.wait(Queue::Recv, id),
        }
    }

    /// Starts a call. It may end at once.
    pub fn call(&mut self, now: Instant, call: Call<O::Payload, O::Op>) {
        let Call { id, method, meta, payload, deadline, op } = call;
        if method == 0 {
            return self.events.end(op, code::INVALID_ARGUMENT, "method 0 does not exist");
        }
        if meta.len() > MAX_META {
            let message = format!("call metadata of {} bytes is too long: at most {MAX_META}", meta.len());
            return self.events.end(op, code::INVALID_ARGUMENT, &message);
        }
        let measure = Measure::of(payload.as_ref()).filter(|measure| measure.count <= MAX_PARTS);
        let Some(measure) = measure else {
            let message = format!("the payload has too many parts (at most {MAX_PARTS}) or too many bytes");
            return self.events.end(op, code::INVALID_ARGUMENT, &message);
        };
        if let Some((code, message)) = self.refusal(now, deadline) {
            return self.events.end(op, code, &message);
        }
        let Side::Client(client) = &mut self.side else { return };
        let bytes = measure.total();
        let queue = if bytes == 0 { Queue::Call } else { Queue::HeavyCall };
        let limits = self.peer.as_ref().map(|peer| peer.limits);
        let limits =
            limits.filter(|limits| client.waiting[queue as usize].is_empty() && client.has_room(queue, bytes, limits));
        let mut call = Some(WaitingCall { method, meta, payload, measure });
        let state = match limits {
            Some(_) => State::Sent,
            None => call.take().map_or(State::Sent, |call| State::WaitingCall(Box::new(call))),
        };
        let request = Request { op: Some(op), deadline, queue, bytes, state };
        if let Err(op) = client.enter(id, request) {
            return self.refuse_twin(op);
        }
        self.stats.calls += 1;
        match (limits, call) {
            (Some(limits), Some(call)) => self.send_call(now, id, call, &limits),
            _ => client.wait(queue, id),
        }
    }

    /// Ends a request with `Outcome::Local` and tells the server. Unknown ids are ignored. The op ends at once, or, if
    /// the current receive targets name its buffers, with the next `on_received` or `fail`.
    pub fn cancel(&mut self, now: Instant, id: u64, code: i32, message: &str) {
        self.end(id, code, message);
        if self.unblocked {
            self.send_waiting(now);
        }
    }

    fn end(&mut self, id: u64, code: i32, message: &str) {
        let Side::Client(client) = &mut self.side else { return };
        let Some(request) = client.requests.get_mut(&id) else { return };
        let Some(op) = request.op.take() else { return };
        let deadline = request.deadline.take();
        let (queue, bytes) = (request.queue, request.bytes);
        let mut deferred = false;
        let tell = match request.state {
            State::WaitingRecv(_) | State::WaitingCall(_) => {
                client.requests.remove(&id);
                // Others may have waited for it only.
                self.unblocked = true;
                false
            }
            State::Sent => match self.out.drop_transfer(id) {
                Some((Dropped::Unsent, _)) => {
                    mark!("a call is cancelled before any of it was sent");
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
            self.out.frame(Answers::default(), |out| put::cancel(out, id, code));
        }
        if deferred {
            mark!("a reply is cancelled while its buffers are written to");
            client.deferred.push((op, code, message.to_owned()));
        } else {
            self.events.end(op, code, message);
        }
    }

    /// Why no request can be made, if so.
    fn refusal(&self, now: Instant, deadline: Option<Instant>) -> Option<(i32, String)> {
        if let Some(broken) = self.broken() {
            return Some(broken);
        }
        match &self.side {
            Side::Server(_) => {
                Some((code::INTERNAL, "only the client side of a connection can send requests".to_owned()))
            }
            Side::Client(client) => match &client.leaving {
                Some(reason) => Some((code::UNAVAILABLE, reason.clone())),
                None if deadline.is_some_and(|deadline| deadline <= now) => {
                    Some((code::DEADLINE_EXCEEDED, "the deadline passed before the request could be sent".to_owned()))
                }
                None => None,
            },
        }
    }

    fn refuse_twin(&mut self, op: Option<O::Op>) {
        if let Some(op) = op {
            self.events.end(op, code::INTERNAL, "a request id was used twice");
        }
    }

    /// Sends a rendezvous request; `recv.key` is determined here.
    fn send_recv(&mut self, mut recv: RecvFrame, prefix: &[u8], limits: &Limits) {
        let Side::Client(client) = &mut self.side else { return };
        client.charge(Queue::Recv, 0);
        recv.key = match client.keys.intern(prefix, limits.max_keys, limits.max_key_bytes) {
            Interned::Known { key } => key,
            Interned::New { key, forget } => {
                self.stats.keys += 1;
                self.stats.key_resets += u64::from(forget);
                self.out.frame(Answers::default(), |out| put::key(out, key, forget, prefix));
                key
            }
        };
        self.out.frame(Answers::default(), |out| put::recv(out, &recv));
    }

    /// Sends a call whose request is in the table.
    fn send_call(&mut self, now: Instant, id: u64, call: WaitingCall<O>, limits: &Limits) {
        let Side::Client(client) = &mut self.side else { return };
        let WaitingCall { method, meta, payload, measure } = call;
        if measure.total() > limits.max_payload {
            let message =
                format!("a payload of {} bytes exceeds the peer's limit of {}", measure.total(), limits.max_payload);
            if let Some(op) = client.remove(id).and_then(|request| request.op) {
                self.events.end(op, code::RESOURCE_EXHAUSTED, &message);
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
                self.out.frame(Answers::default(), |out| {
                    put::call(out, id, method, deadline_ms, &meta, payload.as_ref());
                });
            }
        }
    }

    /// Sends requests that waited for limits or for the handshake.
    pub(super) fn send_waiting(&mut self, now: Instant) {
        self.unblocked = false;
        let Some(limits) = self.peer.as_ref().map(|peer| peer.limits) else { return };
        for queue in QUEUES {
            loop {
                let Side::Client(client) = &mut self.side else { return };
                let Some(&id) = client.waiting[queue as usize].front() else { break };
                let Some(request) = client.requests.get_mut(&id) else {
                    client.waiting[queue as usize].pop_front();
                    continue;
                };
                let bytes = request.bytes;
                if !client.has_room(queue, bytes, &limits) {
                    mark!("requests wait for the peer's limits");
                    break;
                }
                client.waiting[queue as usize].pop_front();
                let Some(request) = client.requests.get_mut(&id) else { continue };
                match std::mem::replace(&mut request.state, State::Sent) {
                    State::WaitingRecv(recv) => {
                        let WaitingRecv { step, prefix, frame, iter } = *recv;
                        self.send_recv(RecvFrame { id, step, key: 0, frame, iter }, &prefix, &limits);
                    }
                    State::WaitingCall(call) => self.send_call(now, id, *call, &limits),
                    other => request.state = other,
                }
            }
        }
    }

    /// Ends requests that were never sent: as lost if the peer leaves, like those that were sent, which may be made
    /// again elsewhere.
    pub(super) fn refuse_waiting(&mut self, reason: &str, leaves: Leaves) {
        let Side::Client(client) = &mut self.side else { return };
        client.leaving = Some(reason.to_owned());
        for queue in QUEUES {
            while let Some(id) = client.waiting[queue as usize].pop_front() {
                if let Some(op) = client.remove(id).and_then(|request| request.op) {
                    match leaves {
                        Leaves::Own => self.events.end(op, code::UNAVAILABLE, reason),
                        Leaves::Peer => self.events.lose(op, code::UNAVAILABLE, reason),
                    }
                }
            }
        }
    }

    pub(super) fn end_overdue(&mut self, now: Instant) {
        loop {
            let Side::Client(client) = &mut self.side else { return };
            let Some(&(deadline, id)) = client.deadlines.first() else { return };
            if deadline > now {
                return;
            }
            client.deadlines.pop_first();
            let peer = self.peer.as_ref().map_or("a peer that has not answered the handshake", |peer| &peer.task);
            let message = format!("deadline exceeded while waiting for {peer}");
            self.end(id, code::DEADLINE_EXCEEDED, &message);
        }
    }

    pub(super) fn on_reply(&mut self, reply: ReplyFrame<'_>) -> Result<(), ConnectionError> {
        let ReplyFrame { id, meta, parts, .. } = reply;
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
            mark!("a call is answered before all of it was sent");
            // Answered before it was complete: the rest need not travel.
            self.out.frame(Answers::default(), |out| put::data(out, id, 0));
        }
        let bulk = parts.bulk() != 0;
        if reply.code != 0 {
            if bulk {
                client.requests.insert(id, request);
                return Err(ProtocolError::Frame { frame: "REPLY", why: "error details are not inline" }.into());
            }
            client.forget_deadline(id, request.deadline);
            if let Some(op) = request.op {
                let message = self.events.keep(String::from_utf8_lossy(meta).as_bytes());
                let details: Vec<u8> = parts.iter().filter_map(|part| part.inline).flatten().copied().collect();
                let details = self.events.keep(&details);
                self.events.reply_done(op, Ending::PeerError { code: reply.code, message, details });
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
            client.lens.extend(parts.lens());
            match op.alloc(meta, &client.lens) {
                Ok(()) => {
                    for (number, part) in parts.iter().enumerate() {
                        if let Some(bytes) = part.inline.filter(|bytes| !bytes.is_empty()) {
                            op.write(number, bytes);
                            self.stats.payload_in += part.len;
                            self.stats.copied_in += part.len;
                        }
                    }
                }
                Err(failure) => {
                    client.forget_deadline(id, request.deadline.take());
                    if let Some(op) = request.op.take() {
                        let message = format!("reply refused by receiver: {}", failure.message);
                        self.events.end(op, failure.code, &message);
                    }
                    if bulk {
                        let code = code::CANCELLED;
                        self.out.frame(Answers::default(), |out| put::cancel(out, id, code));
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
                let meta = self.events.keep(meta);
                self.events.reply_done(op, Ending::Ok { meta });
            }
        }
        Ok(())
    }

    /// The last bulk byte of a reply arrived.
    pub(super) fn reply_complete(&mut self, id: u64) {
        let Side::Client(client) = &mut self.side else { return };
        let Some(request) = client.remove(id) else { return };
        if let (Some(op), State::Arriving { meta }) = (request.op, request.state) {
            let meta = self.events.keep(&meta);
            self.events.reply_done(op, Ending::Ok { meta });
        }
    }

    /// The rest of a reply will not come, which is allowed after our CANCEL only.
    pub(super) fn reply_aborted(&mut self, id: u64) {
        self.incoming.forget(id);
        if let Side::Client(client) = &mut self.side {
            client.remove(id);
        }
    }

    pub(super) fn fail_client(&mut self, code: i32, message: &str) {
        let Side::Client(client) = &mut self.side else { return };
        client.end_deferred(&mut self.events);
        client.deadlines.clear();
        client.waiting = Default::default();
        let mut ended: Vec<_> = client.requests.drain().collect();
        // Oldest first.
        ended.sort_unstable_by_key(|(id, _)| *id);
        let message = self.events.keep(message.as_bytes());
        for (_, request) in ended {
            if matches!(request.state, State::Arriving { .. }) {
                mark!("a connection is lost in the middle of a reply");
            }
            if let Some(op) = request.op {
                self.events.reply_done(op, Ending::Lost { code, message });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::Phase;
    use crate::event::tests::Nothing;
    use crate::settings::Settings;

    #[test]
    fn a_quiet_client_releases_its_tables() {
        let now = Instant::now();
        let settings = Settings::new("/job:worker/task:0", "grpc++", 1, [0; 32]);
        let interval = settings.keepalive_interval;
        let mut connection = Connection::<Nothing>::client(settings, now);
        connection.phase = Phase::Ready;
        let Side::Client(client) = &mut connection.side else { panic!("no client") };
        client.requests.reserve(100);
        client.waiting.iter_mut().for_each(|ids| ids.reserve(100));
        client.lens.reserve(100);
        connection.on_timeout(now + interval).unwrap();
        let Side::Client(client) = &connection.side else { panic!("no client") };
        let waiting: usize = client.waiting.iter().map(VecDeque::capacity).sum();
        assert_eq!((client.requests.capacity(), waiting, client.lens.capacity()), (0, 0, 0));
    }

    #[test]
    fn ended_requests_do_not_pile_up_in_a_queue() {
        let mut client = Client::<Nothing>::new(IdHash::new());
        for id in 0..10_000 {
            if id < 100 {
                let request = Request { op: None, deadline: None, queue: Queue::Call, bytes: 0, state: State::Sent };
                assert!(client.enter(id, request).is_ok());
            }
            client.wait(Queue::Call, id);
            assert!(client.waiting[Queue::Call as usize].len() <= 64 + 2 * 100);
        }
        assert!(client.waiting[Queue::Call as usize].iter().copied().take(100).eq(0..100));
    }
}
