//! `starwire.control.v1`: the facts about a server, in one reply.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::ControlState;
use super::proto::starwire as pb;
use super::proto::starwire::control_server::Control;
use crate::config::Setting;
use crate::metrics::{ConnectionFacts, Direction, Sample, Value};
use starwire_protocol::WIRE_VERSION;

pub struct StatsService {
    state: Arc<dyn ControlState>,
}

impl StatsService {
    pub fn new(state: Arc<dyn ControlState>) -> Self {
        Self { state }
    }
}

#[tonic::async_trait]
impl Control for StatsService {
    async fn stats(&self, request: Request<pb::StatsRequest>) -> Result<Response<pb::StatsReply>, Status> {
        let server = self.state.server();
        let without_connections = request.get_ref().without_connections;
        let connections = if without_connections { Vec::new() } else { self.state.connections() };
        Ok(Response::new(pb::StatsReply {
            build: Some(build()),
            server: Some(pb::Server {
                protocol: server.protocol,
                task: server.task,
                incarnation: server.incarnation,
                pid: std::process::id(),
                banner: server.banner,
                uptime_ms: milliseconds(server.uptime),
            }),
            metrics: self.state.metrics().into_iter().map(metric).collect(),
            connections: connections.into_iter().map(connection).collect(),
            settings: self.state.settings().into_iter().map(setting).collect(),
        }))
    }
}

pub fn build() -> pb::Build {
    pb::Build {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        profile: if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned(),
        wire_version: u32::from(WIRE_VERSION),
    }
}

fn metric(sample: Sample) -> pb::Metric {
    let value = match sample.value {
        Value::Counter(n) => pb::metric::Value::Counter(n),
        Value::Gauge(n) => pb::metric::Value::Gauge(n),
        Value::Histogram(d) => {
            pb::metric::Value::Histogram(pb::Histogram { count: d.count(), sum: d.sum, buckets: d.buckets.to_vec() })
        }
    };
    pb::Metric { name: sample.description.name.to_owned(), value: Some(value) }
}

#[expect(clippy::cast_possible_truncation, reason = "a reactor's number fits into the 8 bits of a token")]
fn connection(c: ConnectionFacts) -> pb::Connection {
    let direction = match c.direction {
        Direction::Incoming => pb::connection::Direction::Incoming,
        Direction::Outgoing => pb::connection::Direction::Outgoing,
    };
    pb::Connection {
        direction: direction.into(),
        peer: c.peer,
        address: c.address,
        state: c.state.name().to_owned(),
        reactor: c.reactor as u32,
        bytes_in: c.bytes_in,
        bytes_out: c.bytes_out,
        calls_in_flight: c.in_flight,
        age_ms: milliseconds(c.age),
    }
}

fn setting(s: Setting) -> pb::Setting {
    pb::Setting { name: s.name.to_owned(), value: s.value, is_default: s.is_default }
}

fn milliseconds(duration: std::time::Duration) -> u64 {
    duration.as_secs() * 1000 + u64::from(duration.subsec_millis())
}
