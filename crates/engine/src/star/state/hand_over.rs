//! What other processes of the task want of a state: copies, and at last the state itself (`copies.rs`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Flush, INTERVAL, LEAST_WAIT, State};
use crate::api::{Host, Level, StarFailure, Ticket};
use crate::command::{Command, Meta};
use crate::keys::shard_of;
use crate::star::StarHost;
use crate::star::copies::{CopyReply, TakeOver};
use crate::star::server::StarServer;
use starwire_marks::fail_point;
use starwire_protocol::code;
use starwire_protocol::state::{Position, StateReply, StateRequest};
use starwire_state::{StateError, state_of};

impl State {
    /// Another process of the task asks for something. May block.
    fn serve<H: Host>(
        &self,
        server: &Arc<StarServer<H>>,
        ticket: Ticket,
        request: &StateRequest<'_>,
    ) -> Result<Option<CopyReply>, StarFailure> {
        let state = state_of(&self.incarnations);
        let failed = |error: StateError| StarFailure::new(code::INTERNAL, format!("starwire: {error}"));
        match request {
            StateRequest::Begin => match self.copies.take_over() {
                TakeOver::Done { address, .. } => {
                    let message =
                        format!("starwire: the state has moved to {address}: what is left of it here is older");
                    Err(StarFailure::new(code::FAILED_PRECONDITION, message))
                }
                _ => self.copies.begin(ticket, &self.folder, state).map(Some).map_err(failed),
            },
            StateRequest::Resume { position, crc } => {
                self.copies.resume(ticket, &self.folder, *position, *crc, state).map(Some).map_err(failed)
            }
            StateRequest::Variable { .. } => self.copies.read(ticket, request).map_err(failed),
            StateRequest::Journal(position) => {
                if let Some(number) = self.copies.has(ticket.conn, *position) {
                    self.written(number);
                }
                self.copies.read(ticket, request).map_err(failed)
            }
            StateRequest::TakeOver { address } => {
                let reply = self.copies.ask(ticket, address)?;
                self.wake();
                Ok(reply)
            }
            StateRequest::Confirm { position, address } => self.confirm(server, ticket, *position, address),
        }
    }

    /// The other process has everything: it is the owner from here on.
    fn confirm<H: Host>(
        &self,
        server: &Arc<StarServer<H>>,
        ticket: Ticket,
        position: Position,
        by: &str,
    ) -> Result<Option<CopyReply>, StarFailure> {
        let hand_over = |address: &str| self.store().as_mut().map_or(Ok(()), |store| store.hand_over(address));
        fail_point!("the new owner has everything, and this is still the owner");
        let address = self.copies.confirm(position, by, hand_over)?;
        fail_point!("the state has moved, and no peer knows");
        let shared = &server.shared;
        let line = format!(
            "starwire: {} has moved to {address}: this process sends its peers there, and keeps no state",
            shared.config.identity.task
        );
        if shared.moved_to.set(address).is_ok() {
            shared.host.log(Level::Info, &line);
            self.end();
        }
        // The new owner is told once no reactor can answer a peer.
        let last: Arc<dyn Send + Sync> = Arc::new(Silenced { server: server.clone(), ticket });
        for shard in 0..shared.config.reactors {
            shared.send(shard, Command::Moved { to: ticket.conn, last: last.clone() });
        }
        self.wake();
        Ok(None)
    }

    /// Lets nobody in any more, writes what is left, and tells the process that takes over.
    fn prepare<H: Host>(&self, server: &Arc<StarServer<H>>) {
        self.hands_over.store(true, Ordering::SeqCst);
        let why = match self.flush(server, Flush::HandOver) {
            Ok(_) if self.gate.is_closed() => match self.copies.prepared(Instant::now()) {
                Some(reply) => {
                    fail_point!("the last changes are written, and the new owner does not know");
                    server.reply_to_copy(reply);
                    return self.answer_copies(server);
                }
                None => "the process that takes over is gone".to_owned(),
            },
            Ok(_) => {
                server.host().into_iter().for_each(StarHost::changes_were_lost);
                "calls that change something do not end".to_owned()
            }
            Err(error) => {
                server.host().into_iter().for_each(StarHost::changes_were_lost);
                error.to_string()
            }
        };
        self.give_up(server, &why);
    }

    fn give_up<H: Host>(&self, server: &StarServer<H>, why: &str) {
        let (is_given_up, asked) = self.copies.give_up();
        if !is_given_up {
            return;
        }
        self.hands_over.store(false, Ordering::SeqCst);
        self.let_in(server);
        let task = &server.shared.config.identity.task;
        let line = format!("starwire: {task} was not handed over: {why}");
        server.shared.host.log(Level::Warning, &line);
        if let Some(Ticket { conn, id }) = asked {
            let (code, meta) = (code::ABORTED, Meta::of(line.as_bytes()));
            server.shared.send(shard_of(conn), Command::Reply { conn, id, code, meta, payload: None });
        }
    }

    /// Answers copies that wait for what was written.
    pub(super) fn answer_copies<H: Host>(&self, server: &Arc<StarServer<H>>) {
        for (ticket, position, has_news) in self.copies.due(Instant::now()) {
            if has_news {
                server.serve_copy(ticket, StateRequest::Journal(position).write());
            } else {
                server.reply_to_copy(CopyReply { ticket, head: StateReply::Nothing, payload: None });
            }
        }
        let copies = i64::try_from(self.copies.count()).unwrap_or(i64::MAX);
        server.shared.metrics.count(|cells| cells.state_copies.set(copies));
    }

    /// What a take-over needs of this thread. None: nothing; else for how long it may sleep.
    pub(super) fn hand_over<H: Host>(&self, server: &Arc<StarServer<H>>, now: Instant) -> Option<Duration> {
        match self.copies.take_over() {
            TakeOver::No => None,
            TakeOver::Asked { .. } => {
                self.prepare(server);
                Some(Duration::ZERO)
            }
            TakeOver::Prepared { until, .. } if until > now => {
                self.answer_copies(server);
                Some((until - now).min(LEAST_WAIT))
            }
            TakeOver::Prepared { .. } => {
                self.give_up(server, "the process that takes over was not heard of");
                Some(Duration::ZERO)
            }
            TakeOver::Done { .. } => Some(INTERVAL),
        }
    }
}

/// Tells the new owner, when it is dropped.
struct Silenced<H: Host> {
    server: Arc<StarServer<H>>,
    ticket: Ticket,
}

impl<H: Host> Drop for Silenced<H> {
    fn drop(&mut self) {
        fail_point!("the state has moved, and its new owner does not know");
        self.server.reply_to_copy(CopyReply { ticket: self.ticket, head: StateReply::Yours, payload: None });
    }
}

impl<H: Host> StarServer<H> {
    /// Another process of this task copies the state, or takes it over.
    pub(in crate::star) fn copy(self: &Arc<Self>, ticket: Ticket, peer: &str, meta: &[u8]) -> Result<(), StarFailure> {
        let task = &self.shared.config.identity.task;
        let Some(state) = &self.state else {
            let message = format!("starwire: {task} keeps no state that could be copied (STARWIRE_STATE)");
            return Err(StarFailure::new(code::FAILED_PRECONDITION, message));
        };
        if peer != task {
            let message = format!("starwire: the state of {task} is copied by processes of that task only");
            return Err(StarFailure::new(code::PERMISSION_DENIED, message));
        }
        StateRequest::read(meta).map_err(|error| StarFailure::malformed(error.to_string()))?;
        state.copies.asks(ticket.conn);
        self.serve_copy(ticket, meta.to_vec());
        Ok(())
    }

    fn serve_copy(self: &Arc<Self>, ticket: Ticket, meta: Vec<u8>) {
        let Some(host) = self.host() else { return };
        let server = self.clone();
        host.spawn(Box::new(move || {
            let (Some(state), Ok(request)) = (&server.state, StateRequest::read(&meta)) else { return };
            match state.serve(&server, ticket, &request) {
                Ok(reply) => reply.into_iter().for_each(|reply| server.reply_to_copy(reply)),
                Err(failure) => {
                    let (code, meta, payload) = failure.into_reply(None);
                    let Ticket { conn, id } = ticket;
                    server.shared.send(shard_of(conn), Command::Reply { conn, id, code, meta, payload });
                }
            }
        }));
    }

    fn reply_to_copy(&self, CopyReply { ticket: Ticket { conn, id }, head, payload }: CopyReply) {
        let meta = Meta::of(&head.write());
        self.shared.send(shard_of(conn), Command::Reply { conn, id, code: 0, meta, payload });
    }

    /// A connection is closed: it may have been that of a copy.
    pub(in crate::star) fn copy_gone(&self, conn: u64) {
        let Some(state) = &self.state else { return };
        let Some((confirmed, was_complete)) = state.copies.gone(conn) else { return };
        confirmed.into_iter().for_each(|number| state.written(number));
        state.wake();
        let shared = &self.shared;
        if was_complete && shared.moved_to.get().is_none() && shared.log_limiter.allows_event("copy", Instant::now()) {
            let task = &shared.config.identity.task;
            let line = format!(
                "starwire: the process that keeps a copy of the state of {task} is gone (repeats are suppressed for a minute)"
            );
            shared.host.log(Level::Warning, &line);
        }
    }
}
