//! The server side of a connection: requests that arrive, replies that it sends.

use super::{Connection, Side};
use crate::error::{ConnectionError, ProtocolError, code};
use crate::frame::{CallFrame, RecvFrame, put};
use crate::idmap::{IdHash, IdMap};
use crate::keys::KeyReceiver;
use crate::limits::{MAX_MESSAGE, MAX_META, MAX_OPEN_STEPS, MAX_PARTS};
use crate::open_steps::OpenSteps;
use crate::outgoing::{Answers, Dropped, Head, Measure};
use crate::owner::{CallBuffer, CallHead, Owner, Payload};
use starwire_marks::mark;

/// All requests of the peer that have not been answered.
pub struct Server<O: Owner> {
    requests: IdMap<Request<O>>,
    keys: KeyReceiver,
    /// Steps of the rendezvous requests.
    steps: OpenSteps,
    /// Requests whose answer has not left: an answer counts until then.
    unanswered: Answers,
    /// A request has come.
    was_asked: bool,
    /// We sent GOODBYE: new requests are answered with this.
    leaving: Option<String>,
    lens: Vec<u64>,
}

enum Request<O: Owner> {
    Recv { step: i64 },
    Arriving { method: u16, deadline_ms: u32, bytes: u64, body: O::Body },
    Call { method: u16, bytes: u64 },
}

impl<O: Owner> Request<O> {
    fn answers(&self) -> Answers {
        match self {
            Request::Recv { .. } => Answers { recvs: 1, ..Answers::default() },
            Request::Arriving { bytes, .. } | Request::Call { bytes, .. } => {
                Answers { calls: 1, call_bytes: *bytes, ..Answers::default() }
            }
        }
    }
}

impl<O: Owner> Server<O> {
    pub fn new(hash: IdHash) -> Self {
        Server {
            requests: IdMap::with_hasher(hash),
            keys: KeyReceiver::default(),
            steps: OpenSteps::default(),
            unanswered: Answers::default(),
            was_asked: false,
            leaving: None,
            lens: Vec::new(),
        }
    }

    /// No request has come yet.
    pub fn is_untouched(&self) -> bool {
        !self.was_asked
    }

    pub fn in_flight(&self) -> usize {
        self.requests.len()
    }

    pub fn body_mut(&mut self, id: u64) -> Option<&mut O::Body> {
        match self.requests.get_mut(&id)? {
            Request::Arriving { body, .. } => Some(body),
            _ => None,
        }
    }

    pub fn slim(&mut self) {
        self.requests.shrink_to_fit();
        self.lens = Vec::new();
    }

    /// These answers are on their way.
    pub fn answered(&mut self, answers: Answers) {
        self.unanswered.remove(answers);
    }

    pub fn leave(&mut self, reason: &str) {
        self.leaving = Some(reason.to_owned());
    }
}

impl<O: Owner> Connection<O> {
    /// Answers a request. Ignored, and the payload dropped, if the id is unknown, answered, cancelled or not yet
    /// delivered by an event. With `code` ≠ 0 `meta` is the message and the payload's first part (optional) the error
    /// details.
    pub fn reply(&mut self, id: u64, code: i32, meta: &[u8], payload: Option<O::Payload>) {
        let Side::Server(server) = &mut self.side else { return };
        let request = match server.requests.remove(&id) {
            None => return,
            Some(arriving @ Request::Arriving { .. }) => {
                server.requests.insert(id, arriving);
                return;
            }
            Some(request) => request,
        };
        if let Request::Recv { step } = request {
            server.steps.leave(step);
        }
        self.answer(id, code, meta, payload, request.answers());
    }

    fn answer(&mut self, id: u64, code: i32, meta: &[u8], payload: Option<O::Payload>, answers: Answers) {
        self.stats.replies += 1;
        if code != 0 {
            return self.answer_error(id, code, meta, payload.as_ref(), answers);
        }
        let max_payload = self.peer.as_ref().map_or(0, |peer| peer.limits.max_payload);
        let measure = Measure::of(payload.as_ref()).filter(|measure| measure.count <= MAX_PARTS);
        let measure = measure.filter(|measure| measure.total() <= max_payload);
        let Some(measure) = measure else {
            let message = format!("the reply has more than {MAX_PARTS} parts or more than {max_payload} bytes");
            return self.answer_error(id, code::RESOURCE_EXHAUSTED, message.as_bytes(), None, answers);
        };
        if meta.len() > MAX_META {
            let message = format!("reply metadata of {} bytes is too long: at most {MAX_META}", meta.len());
            return self.answer_error(id, code::RESOURCE_EXHAUSTED, message.as_bytes(), None, answers);
        }
        match payload {
            Some(payload) if measure.bulk != 0 || (measure.inline != 0 && self.out.is_high()) => {
                self.out.transfer(id, Head::Reply { code, meta: meta.to_vec(), answers }, payload, measure);
            }
            payload => {
                self.stats.payload_out += measure.inline;
                self.stats.copied_out += measure.inline;
                self.out.frame(answers, |out| put::reply(out, id, 0, meta, payload.as_ref()));
            }
        }
    }

    /// Error details that do not fit inline are dropped, a longer message is cut.
    fn answer_error(&mut self, id: u64, code: i32, message: &[u8], details: Option<&O::Payload>, answers: Answers) {
        let message = String::from_utf8_lossy(message);
        let message = put::cut(&message, MAX_MESSAGE).as_bytes();
        let details = details.filter(|details| details.part_count() >= 1 && details.part_len(0) <= MAX_MESSAGE as u64);
        let details = details.map(|details| {
            let mut bytes = Vec::new();
            details.copy_part(0, &mut bytes);
            Details(bytes)
        });
        self.out.frame(answers, |out| put::reply(out, id, code, message, details.as_ref()));
    }

    pub(super) fn on_key(&mut self, key: u64, forget: bool, prefix: &[u8]) -> Result<(), ConnectionError> {
        let Side::Server(server) = &mut self.side else { return Ok(()) };
        if forget {
            mark!("a full key table starts again");
            server.keys.forget();
            self.stats.key_resets += 1;
            self.events.keys_forgotten();
        }
        let limits = &self.settings.limits;
        server.keys.define(key, prefix, limits.max_keys, limits.max_key_bytes)?;
        self.stats.keys += 1;
        self.events.key_defined(key, prefix);
        Ok(())
    }

    pub(super) fn on_recv_frame(&mut self, recv: RecvFrame) -> Result<(), ConnectionError> {
        let RecvFrame { id, step, .. } = recv;
        let Side::Server(server) = &mut self.side else { return Ok(()) };
        let limit = self.settings.limits.max_recvs;
        if server.unanswered.recvs >= limit {
            let what = "number of rendezvous requests in flight";
            return Err(ProtocolError::Window { what, limit: u64::from(limit) }.into());
        }
        if !server.keys.is_defined(recv.key) {
            return Err(ProtocolError::Frame { frame: "RECV", why: "its key was never defined" }.into());
        }
        if self.out.has_begun(id).is_some() || self.incoming.has_transfer(id) {
            return Err(used_twice("RECV", id).into());
        }
        let entered = server.leaving.is_none() && server.steps.enter(step);
        let used = match entered {
            true => match server.requests.insert(id, Request::Recv { step }) {
                None => false,
                Some(other) => server.requests.insert(id, other).is_some(),
            },
            false => server.requests.contains_key(&id),
        };
        if used {
            return Err(used_twice("RECV", id).into());
        }
        let answers = Answers { recvs: 1, ..Answers::default() };
        server.unanswered.add(answers);
        server.was_asked = true;
        if entered {
            self.events.recv_request(recv);
        } else if let Some(reason) = server.leaving.clone() {
            mark!("a request meets a server that drains");
            self.answer(id, code::UNAVAILABLE, reason.as_bytes(), None, answers);
        } else {
            mark!("tensor requests of too many steps");
            let message = format!(
                "starwire: tensor requests for {MAX_OPEN_STEPS} steps are pending on this connection, the most allowed"
            );
            self.answer(id, code::RESOURCE_EXHAUSTED, message.as_bytes(), None, answers);
        }
        Ok(())
    }

    pub(super) fn on_call_frame(&mut self, call: CallFrame<'_>, owner: &mut O) -> Result<(), ConnectionError> {
        let CallFrame { id, method, deadline_ms, meta, parts } = call;
        let Side::Server(server) = &mut self.side else { return Ok(()) };
        if server.requests.contains_key(&id) || self.out.has_begun(id).is_some() || self.incoming.has_transfer(id) {
            return Err(used_twice("CALL", id).into());
        }
        let limits = &self.settings.limits;
        let (open, bytes) = (&mut server.unanswered, parts.total());
        // Payloads that are no longer wanted are bounded as well.
        if open.calls >= limits.max_calls || self.incoming.transfer_count() >= 2 * limits.max_calls as usize {
            let what = "number of calls in flight";
            return Err(ProtocolError::Window { what, limit: u64::from(limits.max_calls) }.into());
        }
        if bytes > limits.max_payload {
            let (value, limit) = (bytes, limits.max_payload);
            return Err(ProtocolError::TooLarge { what: "length of a payload", value, limit }.into());
        }
        let fits = open.call_bytes.checked_add(bytes).is_some_and(|sum| sum <= limits.max_call_bytes);
        if bytes != 0 && !fits && open.call_bytes != 0 {
            let what = "payload of calls in flight";
            return Err(ProtocolError::Window { what, limit: limits.max_call_bytes }.into());
        }
        self.stats.calls += 1;
        let answers = Answers { calls: 1, call_bytes: bytes, ..Answers::default() };
        open.add(answers);
        server.was_asked = true;

        let body = match &server.leaving {
            Some(reason) => Err((code::UNAVAILABLE, reason.clone())),
            None => {
                server.lens.clear();
                server.lens.extend(parts.lens());
                let body = owner.call_memory(&CallHead { id, method, meta, lens: &server.lens });
                body.map_err(|failure| (if failure.code == 0 { code::INTERNAL } else { failure.code }, failure.message))
            }
        };
        if parts.bulk() != 0 {
            self.incoming.expect(id, &parts, body.is_ok());
        }
        let mut body = match body {
            Ok(body) => body,
            Err((code, message)) => {
                self.answer(id, code, message.as_bytes(), None, answers);
                return Ok(());
            }
        };
        for (number, part) in parts.iter().enumerate() {
            if let Some(bytes) = part.inline.filter(|bytes| !bytes.is_empty()) {
                body.write(number, bytes);
                self.stats.payload_in += part.len;
                self.stats.copied_in += part.len;
            }
        }
        if parts.bulk() != 0 {
            server.requests.insert(id, Request::Arriving { method, deadline_ms, bytes, body });
        } else {
            server.requests.insert(id, Request::Call { method, bytes });
            self.events.call_ready(id, method, deadline_ms, body);
        }
        Ok(())
    }

    /// The last bulk byte of a call arrived.
    pub(super) fn call_complete(&mut self, id: u64) {
        let Side::Server(server) = &mut self.side else { return };
        match server.requests.remove(&id) {
            Some(Request::Arriving { method, deadline_ms, bytes, body }) => {
                server.requests.insert(id, Request::Call { method, bytes });
                self.events.call_ready(id, method, deadline_ms, body);
            }
            Some(other) => {
                server.requests.insert(id, other);
            }
            None => {}
        }
    }

    pub(super) fn on_cancel(&mut self, id: u64, wanted_code: i32) {
        let Side::Server(server) = &mut self.side else { return };
        let code = if wanted_code == 0 { code::CANCELLED } else { wanted_code };
        let message = b"cancelled by the caller";
        // With its CANCEL the client stops sending the payload.
        self.incoming.forget(id);
        if let Some(request) = server.requests.remove(&id) {
            let answers = request.answers();
            match request {
                Request::Recv { step } => {
                    server.steps.leave(step);
                    self.events.request_cancelled(id, 0, step, false);
                }
                Request::Call { method, .. } => self.events.request_cancelled(id, method, 0, false),
                Request::Arriving { .. } => {}
            }
            return self.answer(id, code, message, None, answers);
        }
        match self.out.drop_transfer(id) {
            // A short answer takes the place of the one that has not been sent.
            Some((Dropped::Unsent, answers)) => {
                mark!("a reply is cancelled before any of it was sent");
                self.answer(id, code, message, None, answers);
            }
            Some((Dropped::Begun, _)) => {
                mark!("a reply is cancelled while it is sent");
                self.out.frame(Answers::default(), |out| put::data(out, id, 0));
            }
            // The answer is on its way.
            None => mark!("a cancellation crosses its answer"),
        }
    }

    pub(super) fn fail_server(&mut self) {
        let Side::Server(server) = &mut self.side else { return };
        server.unanswered = Answers::default();
        server.steps.clear();
        let mut ended: Vec<_> = server.requests.drain().collect();
        // Oldest first.
        ended.sort_unstable_by_key(|(id, _)| *id);
        for (id, request) in ended {
            if matches!(request, Request::Arriving { .. }) {
                mark!("a connection is lost in the middle of a call");
            }
            match request {
                Request::Recv { step } => self.events.request_cancelled(id, 0, step, true),
                Request::Call { method, .. } => self.events.request_cancelled(id, method, 0, true),
                Request::Arriving { .. } => {}
            }
        }
    }
}

/// An id of the peer's must not name two things at once.
fn used_twice(frame: &'static str, id: u64) -> ProtocolError {
    ProtocolError::BadId { frame, id, why: "is still in flight" }
}

/// Error details, in parts that are short enough to be inline.
struct Details(Vec<u8>);

impl Details {
    const PART: usize = 4096;

    fn part(&self, part: usize) -> &[u8] {
        self.0.chunks(Self::PART).nth(part).unwrap_or_default()
    }
}

impl Payload for Details {
    fn part_count(&self) -> usize {
        self.0.len().div_ceil(Self::PART)
    }

    fn part_len(&self, part: usize) -> u64 {
        self.part(part).len() as u64
    }

    fn copy_part(&self, part: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(self.part(part));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::connection::Phase;
    use crate::event::tests::Nothing;
    use crate::settings::Settings;

    #[test]
    fn a_quiet_server_releases_its_tables() {
        let now = Instant::now();
        let settings = Settings::new("/job:ps/task:0", "grpc++", 1, [0; 32]);
        let interval = settings.keepalive_interval;
        let mut connection = Connection::<Nothing>::server(settings, now);
        connection.phase = Phase::Ready;
        let Side::Server(server) = &mut connection.side else { panic!("no server") };
        server.requests.reserve(100);
        server.lens.reserve(100);
        connection.on_timeout(now + interval).unwrap();
        let Side::Server(server) = &connection.side else { panic!("no server") };
        assert_eq!((server.requests.capacity(), server.lens.capacity()), (0, 0));
    }
}
