//! Makes connected workers.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::rc::Rc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::mpsc::unbounded_channel;

use crate::link::{Events, Link};
use crate::recording::Recording;
use crate::worker::Worker;
use crate::{Plan, Protocol, grpc, starwire};

/// What a connection attempt may take.
const CONNECT_PATIENCE: Duration = Duration::from_secs(30);

/// Cheap to clone.
#[derive(Clone)]
pub struct Factory {
    recording: Rc<Recording>,
    protocol: Protocol,
    server: SocketAddr,
    first: SocketAddrV4,
    patience: Duration,
    starwire_doors: starwire::Doors,
    grpc_doors: grpc::Doors,
}

impl Factory {
    /// `listener` takes the server's connections to the workers.
    pub fn new(plan: &Plan, listener: TcpListener) -> Self {
        let (starwire_doors, grpc_doors) = (starwire::Doors::default(), grpc::Doors::default());
        match plan.protocol {
            Protocol::Starwire(_) => {
                tokio::task::spawn_local(starwire::accept(listener, starwire_doors.clone()));
            }
            Protocol::Grpc => {
                tokio::task::spawn_local(grpc::serve(listener, grpc_doors.clone()));
            }
        }
        let Plan { recording, protocol, server, first, patience, .. } = plan;
        let recording = recording.clone();
        Self {
            recording,
            protocol: *protocol,
            server: *server,
            first: *first,
            patience: *patience,
            starwire_doors,
            grpc_doors,
        }
    }

    pub async fn worker(&self, index: usize) -> Result<Worker, String> {
        let (events, heard) = unbounded_channel();
        let link = tokio::time::timeout(CONNECT_PATIENCE, self.link(index, events)).await;
        let link = link.unwrap_or_else(|_| Err("no answer in time".to_owned()));
        let link = link.map_err(|why| format!("worker {index} cannot connect: {why}"))?;
        Ok(Worker::new(index, &self.recording, link, heard, self.patience))
    }

    async fn link(&self, index: usize, events: Events) -> Result<Box<dyn Link>, String> {
        let (server, own) = (self.server, self.address(index));
        Ok(match self.protocol {
            Protocol::Starwire(name) => {
                let job = self.recording.worker.rsplit_once(':').map_or(self.recording.worker.as_str(), |(job, _)| job);
                let identity = starwire::Identity::new(name, format!("{job}:{index}"));
                let doors = &self.starwire_doors;
                Box::new(starwire::Starwire::connect(server, own, identity, &self.recording, doors, events).await?)
            }
            Protocol::Grpc => Box::new(grpc::Grpc::connect(server, own, &self.grpc_doors, events).await?),
        })
    }

    fn address(&self, worker: usize) -> SocketAddr {
        let ip = u32::from(*self.first.ip()) + u32::try_from(worker).expect("at most 65,536 workers");
        SocketAddr::new(IpAddr::V4(Ipv4Addr::from(ip)), self.first.port())
    }
}
