//! TLS of the control service's clients.

use std::sync::{Arc, Weak};

use crate::api::Host;
use crate::control::{ControlAccess, Guard};
use crate::shared::Shared;
use crate::tls::{Subject, Tls};
use rustls::pki_types::CertificateDer;

/// TLS for the control service, if the task has it. Does not keep the engine alive.
pub fn guard<H: Host>(shared: &Arc<Shared<H>>) -> Option<Arc<dyn Guard>> {
    let tls = shared.config.tls.clone()?;
    Some(Arc::new(HttpGuard { tls, shared: Arc::downgrade(shared) }))
}

struct HttpGuard<H: Host> {
    tls: Arc<Tls>,
    shared: Weak<Shared<H>>,
}

impl<H: Host> Guard for HttpGuard<H> {
    fn server(&self) -> Arc<rustls::ServerConfig> {
        let log = |level, line: &str| {
            if let Some(shared) = self.shared.upgrade() {
                shared.host.log(level, line);
            }
        };
        self.tls.current(log).http.clone()
    }

    fn is_member(&self, certificate: &CertificateDer<'_>) -> bool {
        let Some(shared) = self.shared.upgrade() else { return false };
        let tasks = &shared.config.identity.tasks;
        tasks.iter().any(|(task, address)| {
            self.tls.speaks_for(Some(certificate), &Subject { task, address: Some(address) }).is_ok()
        })
    }

    fn access(&self) -> ControlAccess {
        self.shared.upgrade().map_or(ControlAccess::Nobody, |shared| shared.config.control_by_tls)
    }
}
