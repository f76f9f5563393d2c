//! Migration of connections from their socket to an RDMA queue pair, and the fallback to TCP.

use super::conn::{Path, Side};
use super::dispatch::MigrationEvent;
use super::{LinkEvent, Links, mark};
use crate::api::{Host, Level};
use crate::shared::party_of;
use starwire_net::transport::verbs::VerbsError;
use starwire_protocol::{FEATURE_QUEUE_PAIRS, Failure, Settings, code};

impl<H: Host> Links<H> {
    /// Offers RDMA on a new TCP connection, if this reactor has it. `wanted`: it has not failed with this peer.
    pub(super) fn offer_pairs(&mut self, settings: &mut Settings, wanted: bool) -> bool {
        let required = self.requires_pairs();
        if required {
            settings.required_features |= FEATURE_QUEUE_PAIRS;
        }
        let offers = self.driver.offload().is_some() && (wanted || required);
        if offers {
            settings.features |= FEATURE_QUEUE_PAIRS;
        }
        offers
    }

    pub(super) fn requires_pairs(&self) -> bool {
        let verbs = &self.shared.config.verbs;
        verbs.transport == crate::config::TransportChoice::Verbs && !verbs.fallback
    }

    pub(super) fn on_migration(&mut self, key: u64, event: MigrationEvent) {
        match event {
            MigrationEvent::May => self.propose(key),
            MigrationEvent::Proposed(endpoint) => self.answer(key, &endpoint),
            MigrationEvent::Answered(Ok(endpoint)) => self.agreed(key, &endpoint),
            MigrationEvent::Answered(Err(failure)) => self.stay(key, failure),
        }
    }

    fn propose(&mut self, key: u64) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let token = conn.token;
        match self.driver.offload().map(|offload| offload.prepare(token)) {
            Some(Ok(endpoint)) => {
                conn.path = Path::Migrating;
                conn.proto.propose_move(&endpoint);
                mark(&mut self.dirty, conn);
            }
            Some(Err(error)) => self.stay(key, failure(&error)),
            None => self.stay(key, Failure { code: code::INTERNAL, message: "no RDMA device is open".into() }),
        }
    }

    fn answer(&mut self, key: u64, endpoint: &[u8]) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let token = conn.token;
        let Some(offload) = self.driver.offload() else { return };
        match offload.prepare(token).and_then(|own| offload.connect_pair(token, endpoint).map(|()| own)) {
            Ok(own) => {
                conn.path = Path::Migrating;
                if let Some(tls) = &mut conn.tls {
                    tls.receives = false;
                }
                conn.proto.accept_move(&own);
                mark(&mut self.dirty, conn);
            }
            Err(error) => {
                offload.abandon(token);
                conn.proto.refuse_move(code::FAILED_PRECONDITION, &error.to_string());
                mark(&mut self.dirty, conn);
                let line = format!("starwire: no RDMA for {}: {error}; asking it to use TCP", conn.name);
                self.dispatch.metrics.verbs_fallbacks.add(1);
                let offender = format!("RDMA {}", party_of(&conn.name));
                if self.shared.log_limiter.allows(&offender, self.dispatch.now) {
                    self.shared.host.log(Level::Warning, &line);
                }
            }
        }
    }

    fn agreed(&mut self, key: u64, endpoint: &[u8]) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let token = conn.token;
        let Some(offload) = self.driver.offload() else { return };
        match offload.connect_pair(token, endpoint) {
            Ok(()) => {
                offload.move_sends(token);
                conn.tls = None;
                conn.proto.moved();
                mark(&mut self.dirty, conn);
            }
            // The server has already moved, so this connection is of no use.
            Err(error) => self.lose(key, code::UNAVAILABLE, error.to_string()),
        }
    }

    /// Client: this connection gets no queue pair, although both sides have RDMA.
    fn stay(&mut self, key: u64, why: Failure) {
        let required = self.requires_pairs();
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.path = Path::Socket;
        if let Some(offload) = self.driver.offload() {
            offload.abandon(conn.token);
        }
        if required {
            return self.lose(key, why.code, why.message);
        }
        starwire_marks::mark!("a connection falls back from RDMA to TCP");
        if let Side::Client { channel, .. } = conn.side {
            self.events.push_back(LinkEvent::PairsFailed { channel, why: why.message });
        }
        conn.proto.stay(self.dispatch.now);
        mark(&mut self.dirty, conn);
    }

    /// Server: once its answer has left, everything else uses the queue pair.
    pub(super) fn resume_migrated(&mut self, key: u64) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let is_server = matches!(conn.side, Side::Server);
        if is_server && conn.path == Path::Migrating && !conn.has_unsent() && conn.proto.is_held() {
            if let Some(offload) = self.driver.offload() {
                offload.move_sends(conn.token);
            }
            conn.tls = None;
            conn.path = Path::QueuePair;
            conn.proto.resume();
            self.dispatch.metrics.verbs_connections.add(1);
        }
    }

    /// A client connection is ready: notes its transport.
    pub(super) fn settle_path(&mut self, key: u64, channel: u32) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if conn.path == Path::Migrating {
            conn.path = Path::QueuePair;
            self.dispatch.metrics.verbs_connections.add(1);
            self.events.push_back(LinkEvent::PairsWork { channel });
        } else if conn.offered_pairs && conn.peer.as_ref().is_some_and(|p| p.features & FEATURE_QUEUE_PAIRS == 0) {
            let task = conn.peer.as_ref().map_or_else(String::new, |p| p.task.clone());
            self.events.push_back(LinkEvent::PairsFailed { channel, why: format!("{task} has none") });
        }
    }

    /// Adds the counters of the queue pairs to the metrics.
    pub fn count_pairs(&mut self) {
        let Some(offload) = self.driver.offload() else { return };
        let stats = offload.take_stats();
        let metrics = &self.dispatch.metrics;
        metrics.verbs_messages_sent.add(stats.messages_sent);
        metrics.verbs_messages_received.add(stats.messages_received);
        metrics.verbs_completions.add(stats.completions);
        metrics.verbs_copied_bytes.add(stats.copied + stats.bounced);
        metrics.verbs_reads.add(stats.reads);
        metrics.verbs_read_bytes.add(stats.read_bytes);
        metrics.verbs_offered_bytes.add(stats.offered_bytes);
        metrics.verbs_registrations.add(stats.registrations);
        metrics.verbs_registrations_reused.add(stats.registrations_reused);
        metrics.verbs_registration_failures.add(stats.registration_failures);
    }
}

fn failure(error: &VerbsError) -> Failure {
    Failure { code: code::FAILED_PRECONDITION, message: error.to_string() }
}
