//! The part of the control thread's time that TLS handshakes of HTTP clients may take.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::sleep_until;

use crate::admission::HandshakeBudget;

/// As on the reactors: handshakes that end with a client whose certificate was verified cost nothing, and when the
/// others have used up their part, all wait.
pub struct Handshakes(Mutex<HandshakeBudget>);

impl Handshakes {
    pub fn new() -> Self {
        Self(Mutex::new(HandshakeBudget::new(Instant::now())))
    }

    /// Does a handshake when there is budget for it; `delayed` is called if it has to wait.
    pub async fn run<T, E>(
        &self,
        handshake: impl Future<Output = Result<T, E>>,
        delayed: impl FnOnce(),
    ) -> Result<T, E> {
        let mut delayed = Some(delayed);
        while let Some(at) = self.wait() {
            if let Some(delayed) = delayed.take() {
                delayed();
            }
            sleep_until(at.into()).await;
        }
        let mut handshake = pin!(handshake);
        let mut took = Duration::ZERO;
        let done = poll_fn(|context| {
            let begun = Instant::now();
            let step = handshake.as_mut().poll(context);
            // After each step, not at the end: most of those that lead to nothing have none.
            let time = begun.elapsed();
            took += time;
            self.budget().spend(time, begun + time);
            step
        })
        .await;
        if done.is_ok() {
            self.budget().refund(took);
        }
        done
    }

    fn wait(&self) -> Option<Instant> {
        self.budget().wait(Instant::now())
    }

    fn budget(&self) -> MutexGuard<'_, HandshakeBudget> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
