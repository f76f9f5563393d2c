//! The control service's view of an engine.

use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::api::Host;
use crate::config::Setting;
use crate::control::{ControlError, ControlState, ServerFacts};
use crate::metrics::{ConnectionFacts, PeerFacts, Sample};
use crate::shared::Shared;

/// Reads from an engine without keeping it alive.
pub struct View<H: Host> {
    shared: Weak<Shared<H>>,
    banner: String,
}

impl<H: Host> View<H> {
    pub fn new(shared: &Arc<Shared<H>>, banner: String) -> Self {
        Self { shared: Arc::downgrade(shared), banner }
    }
}

impl<H: Host> ControlState for View<H> {
    fn passed_on(&self) {
        let Some(shared) = self.shared.upgrade() else { return };
        shared.metrics.count(|cells| cells.grpc_connections.add(1));
    }

    fn handshake_delayed(&self) {
        let Some(shared) = self.shared.upgrade() else { return };
        shared.metrics.count(|cells| cells.tls_handshakes_delayed.add(1));
    }

    fn refused(&self, client: &str, why: &ControlError) {
        let Some(shared) = self.shared.upgrade() else { return };
        shared.log_refusal(client, why, Instant::now());
    }

    fn answers_to(&self, authority: &str) -> bool {
        self.shared.upgrade().is_some_and(|shared| shared.config.names.include(authority))
    }

    fn server(&self) -> ServerFacts {
        let Some(shared) = self.shared.upgrade() else { return ServerFacts::default() };
        let identity = &shared.config.identity;
        ServerFacts {
            protocol: identity.protocol.to_string(),
            task: identity.task.clone(),
            incarnation: shared.incarnation,
            banner: self.banner.clone(),
            uptime: shared.started.elapsed(),
            moved_to: shared.moved_to.get().cloned(),
            certificate_ends: shared.credentials().and_then(|credentials| credentials.ends),
        }
    }

    fn metrics(&self) -> Vec<Sample> {
        self.shared.upgrade().map_or_else(Vec::new, |s| s.metrics.snapshot())
    }

    fn connections(&self) -> Vec<ConnectionFacts> {
        self.shared.upgrade().map_or_else(Vec::new, |s| s.connections.list())
    }

    fn peers(&self) -> Vec<PeerFacts> {
        self.shared.upgrade().map_or_else(Vec::new, |s| s.connections.peers())
    }

    fn settings(&self) -> Vec<Setting> {
        self.shared.upgrade().map_or_else(Vec::new, |s| s.config.settings.clone())
    }
}
