//! What connections tell a reactor: for its [admission](crate::admission) and its [channels](crate::peers).

use std::os::fd::OwnedFd;
use std::time::Instant;

use super::Shard;
use crate::admission::{Handshake, Listener, Next};
use crate::api::Host;
use crate::links::LinkEvent;
use starwire_protocol::code;

impl<H: Host> Shard<H> {
    pub(super) fn adopt(&mut self, fd: OwnedFd, listener: Listener) {
        if self.stopping.is_some() {
            return;
        }
        let Some((key, source)) = self.links.adopt(fd, listener) else { return };
        if let Some(evicted) = self.admission.arrived(key, listener, source) {
            self.links.evict(evicted);
        }
    }

    pub(super) fn take_events(&mut self, now: Instant) {
        while let Some(event) = self.links.poll() {
            match event {
                LinkEvent::Hello(key) => self.hello(key, now),
                LinkEvent::HandshakeTook(time) => self.admission.spent(time, now),
                LinkEvent::Verified(key, took) => {
                    if self.admission.verified(key, took) {
                        self.handshakes_at = Some(now);
                    }
                }
                LinkEvent::Settled(key) => self.admission.removed(key),
                LinkEvent::Ready { channel, key, incarnation } => {
                    let is_wanted = self.peers.get(channel).is_some_and(|channel| {
                        let peer = channel.peer();
                        // Another process may answer where the task that has joined was.
                        !peer.has_joined || self.shared.joined().incarnation(&peer.task) == Some(incarnation)
                    });
                    if is_wanted {
                        self.tell(channel, now, |channel| channel.ready(key, incarnation, now));
                    } else {
                        self.links.lose(key, code::UNAVAILABLE, "the task has left".to_owned());
                    }
                }
                LinkEvent::Moved { channel, key, to } => {
                    self.tell(channel, now, |channel| channel.moved(key, &to, now));
                }
                LinkEvent::Goodbye { channel, key } => self.tell(channel, now, |channel| channel.goodbye(key)),
                LinkEvent::PairsWork { channel } => self.tell(channel, now, |channel| channel.pairs_work()),
                LinkEvent::PairsFailed { channel, why } => {
                    self.tell(channel, now, |channel| channel.shun_pairs(&why, now));
                }
                LinkEvent::Lost { channel, key, stage, failure } => {
                    self.tell(channel, now, |channel| channel.lost(key, stage, failure, now));
                }
            }
        }
    }

    /// A handshake goes on, or waits for the budget.
    fn hello(&mut self, key: u64, now: Instant) {
        match self.admission.handshake(key, now) {
            Handshake::Proceeds => self.links.admit(key),
            Handshake::Waits { is_new, wake_at } => {
                self.links.metrics().tls_handshakes_delayed.add(u64::from(is_new));
                self.resume_at(wake_at);
            }
        }
    }

    fn resume_at(&mut self, at: Option<Instant>) {
        self.handshakes_at = [self.handshakes_at, at].into_iter().flatten().min();
    }

    /// Resumes handshakes that wait, as far as the budget goes.
    pub(super) fn resume_handshakes(&mut self, now: Instant) {
        loop {
            match self.admission.next(now) {
                Next::Resume(key) => {
                    self.hello(key, now);
                    self.take_events(now);
                }
                Next::WakeAt(at) => return self.resume_at(Some(at)),
                Next::Empty => return,
            }
        }
    }
}
