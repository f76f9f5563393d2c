//! `grpc.health.v1`: reports whether the server runs.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::{mpsc, watch};
use tonic::codegen::tokio_stream::Stream;
use tonic::{Request, Response, Status};

use super::ControlState;
use super::proto::health::health_check_response::ServingStatus;
use super::proto::health::health_server::Health;
use super::proto::health::{HealthCheckRequest, HealthCheckResponse};

/// Names that `Check` knows; the empty one is the whole server.
const SERVICES: [&str; 3] = ["", "grpc.health.v1.Health", "starwire.control.v1.Control"];

pub struct HealthService {
    state: Arc<dyn ControlState>,
    serving: watch::Receiver<bool>,
}

impl HealthService {
    pub fn new(state: Arc<dyn ControlState>, serving: watch::Receiver<bool>) -> Self {
        Self { state, serving }
    }
}

#[tonic::async_trait]
impl Health for HealthService {
    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let service = &request.get_ref().service;
        if !SERVICES.contains(&service.as_str()) {
            return Err(Status::not_found("unknown service"));
        }
        let is_serving = *self.serving.borrow() && self.state.server().moved_to.is_none();
        Ok(Response::new(reply(status(is_serving))))
    }

    type WatchStream = Updates;

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Updates>, Status> {
        let known = SERVICES.contains(&request.get_ref().service.as_str());
        let (sender, receiver) = mpsc::channel(1);
        let mut serving = self.serving.clone();
        tokio::spawn(async move {
            loop {
                let running = *serving.borrow_and_update();
                let now = if known { status(running) } else { ServingStatus::ServiceUnknown };
                // A server that stops never serves again, so this is the last reply.
                if sender.send(Ok(reply(now))).await.is_err() || !running {
                    return;
                }
                tokio::select! {
                    changed = serving.changed() => if changed.is_err() { return },
                    () = sender.closed() => return,
                }
            }
        });
        Ok(Response::new(Updates(receiver)))
    }
}

/// The replies to a watcher, one per change.
pub struct Updates(mpsc::Receiver<Result<HealthCheckResponse, Status>>);

impl Stream for Updates {
    type Item = Result<HealthCheckResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx)
    }
}

fn status(serving: bool) -> ServingStatus {
    if serving { ServingStatus::Serving } else { ServingStatus::NotServing }
}

fn reply(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}
