//! The host that a request names, as a defence against DNS rebinding: a page of another site makes a browser connect
//! here under that site's name, which the site's DNS server resolves to this host's address, and could then read the
//! replies.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};

use super::http::is_grpc;
use super::{ControlError, ControlState};

/// Characters of a foreign name that the reply and the log repeat.
const MOST_SHOWN: usize = 64;

/// Refuses requests of `client` that name another host.
pub fn checked(router: Router, state: &Arc<dyn ControlState>, client: &str) -> Router {
    let (state, client) = (state.clone(), client.to_owned());
    router.layer(from_fn(move |request: Request, next: Next| {
        let foreign = foreign_name(&request, &*state).map(ControlError::ForeignName);
        if let Some(error) = &foreign {
            state.refused(&client, error);
        }
        async move {
            match foreign {
                None => next.run(request).await,
                Some(error) => refusal(&request, &error),
            }
        }
    }))
}

/// From the `Host` headers, and from the target of the request, where HTTP/2 has `:authority`. A request without either
/// comes from no browser.
fn foreign_name(request: &Request, state: &dyn ControlState) -> Option<String> {
    let target = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    let hosts = request.headers().get_all(header::HOST).iter().map(|host| host.as_bytes());
    let mut foreign =
        target.into_iter().chain(hosts).map(String::from_utf8_lossy).filter(|name| !state.answers_to(name));
    foreign.next().map(|name| name.chars().take(MOST_SHOWN).collect())
}

fn refusal(request: &Request, error: &ControlError) -> Response {
    if is_grpc(request.headers()) {
        return tonic::Status::permission_denied(error.to_string()).into_http::<tonic::body::Body>().into_response();
    }
    (StatusCode::MISDIRECTED_REQUEST, format!("{error}\n")).into_response()
}
