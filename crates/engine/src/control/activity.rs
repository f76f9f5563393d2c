//! Activity of a connection: an HTTP/2 client that answers pings could stay open without ever sending a request.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use http_body::{Frame, SizeHint};

/// The requests of one connection.
#[derive(Default)]
pub struct Activity {
    begun: AtomicU64,
    under_way: AtomicUsize,
}

impl Activity {
    /// Number of requests so far; `None`: one is being answered, such as that of a watcher.
    pub fn resting_at(&self) -> Option<u64> {
        (self.under_way.load(Relaxed) == 0).then(|| self.begun.load(Relaxed))
    }
}

/// Counts the requests that `router` answers.
pub fn watched(router: Router, activity: &Arc<Activity>) -> Router {
    let activity = activity.clone();
    router.layer(from_fn(move |request: Request, next: Next| {
        activity.begun.fetch_add(1, Relaxed);
        activity.under_way.fetch_add(1, Relaxed);
        let answering = Answering(activity.clone());
        async move { next.run(request).await.map(|body| Body::new(Answer { body, _answering: answering })) }
    }))
}

struct Answering(Arc<Activity>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Relaxed);
    }
}

/// A response, until its last byte was taken.
struct Answer {
    body: Body,
    _answering: Answering,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
