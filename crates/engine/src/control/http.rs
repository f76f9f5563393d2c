//! Routing of requests.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::sync::watch;
use tonic::server::NamedService;

use super::ControlState;
use super::health::HealthService;
use super::proto::health::health_server::HealthServer;
use super::proto::starwire::control_server::ControlServer;
use super::stats::{self, StatsService};
use crate::metrics::{
    BUILD_INFO, TLS_EXPIRY, render_process, render_prometheus, render_prometheus_gauge, render_prometheus_peers,
    to_openmetrics,
};

/// Requests contain a name or a flag; nothing needs more.
const MAX_REQUEST: usize = 4 << 10;

/// Shows what /metrics says, which it reads again and again.
const PAGE: &str = include_str!("page.html");
/// The page loads nothing and speaks to nobody else, whatever peers call themselves.
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                           base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The routes of the control service.
pub fn router(state: Arc<dyn ControlState>, serving: watch::Receiver<bool>) -> Router {
    let health = HealthServer::new(HealthService::new(Arc::clone(&state), serving.clone()))
        .max_decoding_message_size(MAX_REQUEST);
    let control = ControlServer::new(StatsService::new(Arc::clone(&state))).max_decoding_message_size(MAX_REQUEST);
    Router::new()
        .route_service(&grpc_path(&health), health)
        .route_service(&grpc_path(&control), control)
        .route("/", get(page))
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .fallback(unknown)
        .layer(map_response(for_no_other_site))
        .with_state(Shared { state, serving })
}

/// Browsers must not hand an answer to a page of another site, nor take it for a script.
async fn for_no_other_site(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert("cross-origin-resource-policy", HeaderValue::from_static("same-origin"));
    response
}

fn grpc_path<S: NamedService>(_: &S) -> String {
    format!("/{}/{{*method}}", S::NAME)
}

#[derive(Clone)]
struct Shared {
    state: Arc<dyn ControlState>,
    serving: watch::Receiver<bool>,
}

async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, PAGE_POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, PAGE).into_response()
}

async fn metrics(State(shared): State<Shared>, headers: HeaderMap) -> Response {
    let server = shared.state.server();
    let own = [("protocol", server.protocol.as_str()), ("task", &server.task)];
    let build = stats::build();
    let wire_version = build.wire_version.to_string();
    let facts = [("version", build.version.as_str()), ("wire_version", &wire_version), ("profile", &build.profile)];
    let mut text = render_prometheus_gauge(&BUILD_INFO, &[own.as_slice(), facts.as_slice()].concat(), 1);
    if let Some(seconds) = server.certificate_ends {
        text += &render_prometheus_gauge(&TLS_EXPIRY, &own, seconds);
    }
    text += &render_prometheus(&shared.state.metrics(), &own);
    text += &render_prometheus_peers(&shared.state.peers(), &own);
    text += &render_process();
    // Prometheus prefers OpenMetrics, and says so.
    let accepted = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    if accepted.contains("application/openmetrics-text") {
        let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        return ([(header::CONTENT_TYPE, kind)], to_openmetrics(&text)).into_response();
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

async fn healthz(State(shared): State<Shared>) -> Response {
    let is_serving = *shared.serving.borrow();
    match shared.state.server().moved_to.filter(|_| is_serving) {
        Some(to) => (StatusCode::SERVICE_UNAVAILABLE, format!("moved to {to}\n")).into_response(),
        None if is_serving => (StatusCode::OK, "ok\n").into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "stopping\n").into_response(),
    }
}

pub fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

async fn unknown(headers: HeaderMap, request: Request) -> Response {
    if is_grpc(&headers) {
        return tonic::Status::unimplemented(format!("{} is not served here", request.uri().path()))
            .into_http::<tonic::body::Body>()
            .into_response();
    }
    (
        StatusCode::NOT_FOUND,
        "a starwire server answers GET /, GET /metrics, GET /healthz and gRPC health and statistics here\n",
    )
        .into_response()
}
