//! The client side of a reactor: starts requests, and carries out the decisions of its [channels](crate::peers).

use std::time::{Duration, Instant};

use super::Shard;
use crate::api::{Host, Level};
use crate::command::Request;
use crate::peers::{Channel, Do, Peer, Waiting};
use crate::resolver::resolve;
use crate::shared::Shared;
use starwire_protocol::code;

impl<H: Host> Shard<H> {
    pub(super) fn submit(&mut self, channel: u32, id: u64, mut request: Request<H::Op>, now: Instant) {
        request.stamp(now);
        let (deadline_ms, wait_for_ready) = match &request {
            Request::Call(call) => (call.deadline_ms, call.wait_for_ready),
            Request::Recv(_) => (0, false),
        };
        let deadline = (deadline_ms > 0).then(|| now + Duration::from_millis(u64::from(deadline_ms)));
        let waiting = Waiting { id, request, deadline, wait_for_ready };
        let Some(found) = self.peers.get(channel) else {
            return self.links.end(waiting.request.into_op(), code::UNAVAILABLE, "starwire: the task has left");
        };
        match found.connection().filter(|_| self.stopping.is_none()) {
            Some(conn) if self.links.is_open(conn) => self.links.start(conn, waiting),
            // Once it is closed, the channel hears of it. A request that is sent again until then needs another one.
            Some(conn) => self.tell(channel, now, |channel| {
                channel.goodbye(conn);
                channel.submit(waiting, now);
            }),
            None => self.tell(channel, now, |channel| channel.submit(waiting, now)),
        }
    }

    pub(super) fn cancel(&mut self, channel: u32, id: u64, code: i32, message: &str, now: Instant) {
        match self.peers.get(channel).and_then(Channel::connection) {
            Some(conn) => self.links.cancel(conn, id, code, message),
            None => self.tell(channel, now, |channel| channel.cancel(id, code, message)),
        }
    }

    /// The task has left. Another process may have its address by now.
    pub(super) fn disconnect(&mut self, channel: u32) {
        if let Some(conn) = self.peers.get(channel).and_then(Channel::any_connection) {
            self.links.lose(conn, code::UNAVAILABLE, "the task has left".to_owned());
        }
    }

    /// The task is back at another address: ends what waits for it.
    pub(super) fn close_channel(&mut self, channel: u32, now: Instant) {
        let conn = self.peers.get(channel).and_then(Channel::any_connection);
        self.tell(channel, now, |channel| channel.stop(now));
        self.peers.remove(channel);
        if let Some(conn) = conn {
            self.links.lose(conn, code::UNAVAILABLE, "the task has left".to_owned());
        }
    }

    /// Gives a channel an input, and carries out its decisions.
    pub(super) fn tell(&mut self, channel: u32, now: Instant, input: impl FnOnce(&mut Channel<Request<H::Op>>)) {
        self.peers.tell(channel, input);
        self.carry_out(now);
    }

    /// Carries out the decisions of all channels.
    pub(super) fn carry_out(&mut self, now: Instant) {
        while let Some((channel, action)) = self.peers.poll() {
            match action {
                Do::Resolve => {
                    let Some((peer, at)) = self.peers.get(channel).map(|found| (found.peer(), found.address())) else {
                        continue;
                    };
                    if let Some(result) = resolve(&self.shared, self.index, channel, peer, at, self.look_up_name) {
                        self.peers.tell(channel, |channel| channel.resolved(result, now));
                    }
                }
                Do::Connect { address, with_pairs } => {
                    let Some(peer) = self.peers.get(channel).map(Channel::peer) else { continue };
                    let result = self.links.connect(channel, peer, &address, with_pairs);
                    self.peers.tell(channel, |channel| channel.connecting(result, now));
                }
                Do::Close(conn, why) => self.links.lose(conn, code::UNAVAILABLE, why.to_owned()),
                Do::Connected { conn, after, is_new } => {
                    self.links.metrics().connect_time.record(after);
                    let names = self.links.peer_task(conn).zip(self.peers.get(channel).map(Channel::peer));
                    if let Some((name, peer)) = names.filter(|(name, peer)| is_new && *name != peer.task) {
                        log_name(&self.shared, name, peer);
                    }
                }
                Do::Start(conn, requests) => requests.into_iter().for_each(|waiting| self.links.start(conn, waiting)),
                Do::End { requests, code, message } => {
                    let metrics = self.links.metrics();
                    let is_late = code == code::DEADLINE_EXCEEDED;
                    let counter = if is_late { &metrics.deadlines_exceeded } else { &metrics.ended_locally };
                    counter.add(requests.len() as u64);
                    let ops = requests.into_iter().map(|waiting| waiting.request.into_op());
                    ops.for_each(|op| self.links.end(op, code, &message));
                }
                Do::WakeAt(at) => self.peers.wake_at(channel, at),
                Do::Log(level, line) => self.shared.host.log(level, &line),
                Do::CountFailedAttempt => self.links.metrics().connect_failures.add(1),
                Do::CountFallback => self.links.metrics().verbs_fallbacks.add(1),
            }
        }
    }
}

/// Logs a name that differs from the one of this side.
fn log_name<H: Host>(shared: &Shared<H>, name: &str, peer: &Peer) {
    let Peer { task, grpc_address: address, data, .. } = peer;
    let tasks = &shared.config.identity.tasks;
    let elsewhere = tasks.iter().find(|(task, at)| task == name && at != address);
    match elsewhere {
        Some((_, at)) => shared.host.log(
            Level::Warning,
            &format!("starwire: {task} ({address}) reports its name as {name}, which is at {at} in this server's ClusterSpec: check job_name and task_index of both tasks{}", data.remark(address)),
        ),
        None => shared.host.log(Level::Info, &format!("starwire: {task} ({address}) reports its name as {name}")),
    }
}
