//! How a worker gets over the loss of its server: it connects again, as often and as fast as a real worker, and trains.

use std::rc::Rc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value as Json, json};
use starwire_net::transport::backoff;

use crate::factory::Factory;
use crate::report::Counts;
use crate::starwire::random;
use crate::worker::{Played, Worker};

/// Seconds since 1970, which other processes know, too.
pub struct Survived {
    lost: f64,
    /// The end of the first step with the new server.
    back: f64,
    attempts: u32,
}

/// Trains until the server is lost, and then until `least` steps were made with its successor, which `counts` counts.
pub async fn survive(
    mut worker: Worker,
    factory: &Factory,
    counts: &Rc<Counts>,
    least: u64,
    until: Instant,
) -> Result<Survived, String> {
    let index = worker.index;
    loop {
        if Instant::now() >= until {
            return Err(format!("worker {index}: the server was not lost in time"));
        }
        if let Err(why) = worker.step().await {
            if worker.has_lost_its_server().await {
                break;
            }
            return Err(why);
        }
    }
    drop(worker);
    let (lost, mut attempts) = (now(), 0);
    let (mut worker, first) = loop {
        attempts += 1;
        let failed = match session(factory, index).await {
            Ok(worker) => match first_step(worker, until).await {
                Ok(found) => break found,
                Err(why) => why,
            },
            Err(why) => why,
        };
        if Instant::now() >= until {
            return Err(failed);
        }
        tokio::time::sleep(backoff::pause(attempts - 1, random())).await;
    };
    let back = now();
    counts.add(&first);
    for _ in 1..least {
        counts.add(&worker.step().await?);
    }
    worker.settle().await?;
    Ok(Survived { lost, back, attempts })
}

async fn session(factory: &Factory, index: usize) -> Result<Worker, String> {
    let mut worker = factory.worker(index).await?;
    worker.set_up().await?;
    Ok(worker)
}

/// A server that has just started may still lack its variables. A real worker's session also tries again then, on the
/// same connection.
async fn first_step(mut worker: Worker, until: Instant) -> Result<(Worker, Played), String> {
    loop {
        match worker.step().await {
            Ok(played) => return Ok((worker, played)),
            Err(why) if worker.has_lost_its_server().await || Instant::now() >= until => return Err(why),
            Err(_) => {}
        }
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

pub fn json(all: &[Survived]) -> Json {
    let mut back: Vec<f64> = all.iter().map(|one| one.back).collect();
    back.sort_unstable_by(f64::total_cmp);
    let lost = all.iter().map(|one| one.lost).fold(f64::INFINITY, f64::min);
    let attempts: u64 = all.iter().map(|one| u64::from(one.attempts)).sum();
    json!({
        "lost_at": lost,
        "back_at": back,
        "attempts_per_worker": attempts as f64 / all.len().max(1) as f64,
    })
}
