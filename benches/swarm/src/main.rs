//! Simulates many workers on one real parameter server (benches/swarm/README.md).

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command prints")]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic, and its numbers are small"))]
#![forbid(unsafe_code)]

mod args;
mod disguise;
mod factory;
mod grpc;
mod link;
mod observe;
mod outage;
mod recording;
mod report;
mod star;
mod starwire;
mod tensor;
mod wire;
mod worker;

use std::cell::Cell;
use std::fmt::Display;
use std::net::{SocketAddr, SocketAddrV4, ToSocketAddrs};
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde_json::Value as Json;
use starwire_net::transport::descriptors;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::{JoinSet, LocalSet};

use args::{Args, Failure};
use factory::Factory;
use observe::{Process, Seen};
use recording::Recording;
use report::{Counts, Report};
use worker::Worker;

/// Connections that are made, graphs that are registered, and first steps, in which the server connects to the workers,
/// at the same time.
const CONNECTING: usize = 32;
const SETTING_UP: usize = 8;
const WARMING_UP: usize = 16;
const ALL: usize = Semaphore::MAX_PERMITS;
/// A server's memory is looked at when it had time to tidy up.
const SETTLE: Duration = Duration::from_millis(300);
/// How long a process may take to end.
const DYING: Duration = Duration::from_secs(20);

struct Plan {
    recording: Rc<Recording>,
    protocol: Protocol,
    server: SocketAddr,
    workers: u32,
    first: SocketAddrV4,
    steps: u64,
    duration: Duration,
    process: Option<Process>,
    patience: Duration,
    /// Within which the server is lost once, and all workers train again.
    outage: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Grpc,
    /// grpc++ or one of the star protocols.
    Starwire(&'static str),
}

/// Whose servers speak starwire on their data port.
const STARWIRE: [&str; 3] = ["grpc++", "star_server", "star_server_lite"];

impl Protocol {
    fn name(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Starwire(name) => name,
        }
    }

    fn has_star_calls(self) -> bool {
        matches!(self, Self::Starwire(name) if name != "grpc++")
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(Failure::Usage(message)) => {
            eprintln!("swarm: {message}\ntry: swarm --help");
            ExitCode::from(2)
        }
        Err(Failure::Failed(message)) => {
            eprintln!("swarm: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<String, Failure> {
    let Some(args) = Args::parse(std::env::args_os().skip(1))? else { return Ok(args::help()) };
    let plan = Plan::from(&args)?;
    // Two connections for each worker, the listener and what a process has anyway.
    descriptors::allow(2 * u64::from(plan.workers) + 64).map_err(|error| Failure::Failed(error.to_string()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::Failed(format!("cannot start an event loop: {error}")))?;
    let report = LocalSet::new().block_on(&runtime, plan.play()).map_err(|why| Failure::Failed(plan.explain(why)))?;
    Ok(format!("{}\n", report.json()))
}

impl Plan {
    fn from(args: &Args) -> Result<Self, Failure> {
        let protocol = match args.needed("--protocol")? {
            "grpc" => Protocol::Grpc,
            other => match STARWIRE.into_iter().find(|name| *name == other) {
                Some(name) => Protocol::Starwire(name),
                None => {
                    let known = STARWIRE.join(", ");
                    return Err(Failure::Usage(format!("--protocol {other:?} must be one of grpc, {known}")));
                }
            },
        };
        let server = args.needed("--server")?;
        let wrong = |why: &dyn Display| Failure::Usage(format!("--server {server:?} is not an address: {why}"));
        let server = server.to_socket_addrs().map_err(|error| wrong(&error))?.next();
        let server = server.ok_or_else(|| wrong(&"the host has none"))?;
        let first = args.needed("--first-worker")?;
        let first: SocketAddrV4 = first.parse().map_err(|_| {
            Failure::Usage(format!(
                "--first-worker {first:?} is not an IPv4 address with a port, such as 127.1.0.1:7000"
            ))
        })?;
        let workers = args.number("--workers", 1, 1, 65536)?;
        let last = u32::from(*first.ip()).checked_add(workers);
        if last.is_none() {
            return Err(Failure::Usage(format!("fewer than {workers} addresses from {first} on")));
        }
        let process = args.get("--pid").map(|_| args.number("--pid", 0, 1, u32::MAX)).transpose()?.map(Process::new);
        let recording = Recording::load(Path::new(args.needed("--recording")?)).map_err(Failure::Failed)?;
        if recording.has_star_calls() && !protocol.has_star_calls() {
            let why = format!("the recording has star calls, which {} does not have", protocol.name());
            return Err(Failure::Usage(why));
        }
        Ok(Self {
            recording: Rc::new(recording),
            protocol,
            server,
            workers,
            first,
            steps: args.number("--steps", 5, 1, 1_000_000)?,
            duration: Duration::from_secs(args.number("--seconds", 5, 0, 3600)?),
            process,
            patience: Duration::from_secs(args.number("--patience", 120, 1, 3600)?),
            outage: args
                .get("--outage")
                .map(|_| args.number("--outage", 0, 1, 3600))
                .transpose()?
                .map(Duration::from_secs),
        })
    }

    async fn play(&self) -> Result<Report, String> {
        let mut report = Report::new(self);
        let listener = TcpListener::bind(("0.0.0.0", self.first.port())).await;
        let listener = listener.map_err(|error| format!("cannot listen on port {}: {error}", self.first.port()))?;
        report.before = self.look().await;

        let begun = Instant::now();
        let factory = Factory::new(self, listener);
        let workers = self.connect(&factory).await?;
        report.connecting = begun.elapsed();
        report.connected = self.look().await;

        let begun = Instant::now();
        let workers = each(workers, SETTING_UP, |mut worker| async move {
            worker.set_up().await?;
            Ok(worker)
        })
        .await?;
        report.setting_up = begun.elapsed();
        report.ready = self.look().await;

        // The first steps connect the server to the workers, and make kernels.
        let counts = Rc::new(Counts::new(self.recording.steps.len()));
        let workers = self.steps(workers, &counts, WARMING_UP, 1, Duration::ZERO).await?;
        report.warm = self.look().await;
        counts.begin_measuring();

        if let Some(within) = self.outage {
            let begun = Instant::now();
            let (counts, outage) = self.outage(workers, &factory, within).await?;
            report.elapsed = begun.elapsed();
            report.outage = Some(outage);
            report.count(&counts);
            return Ok(report);
        }

        if let Some(process) = &self.process {
            process.forget_peak();
        }
        let (own, server, begun) = (cpu(&Process::own())?, self.server_cpu()?, Instant::now());
        let workers = self.steps(workers, &counts, ALL, self.steps, self.duration).await?;
        report.elapsed = begun.elapsed();
        report.server_cpu = self.server_cpu()?.saturating_sub(server);
        report.own_cpu = cpu(&Process::own())?.saturating_sub(own);
        report.peak = self.process.as_ref().and_then(Process::peak);

        each(workers, ALL, |mut worker| async move {
            worker.settle().await?;
            Ok(worker)
        })
        .await?;
        report.after = self.look().await;
        report.count(&counts);
        Ok(report)
    }

    async fn connect(&self, factory: &Factory) -> Result<Vec<Worker>, String> {
        let all = (0..self.workers as usize).collect();
        each(all, CONNECTING, |index| {
            let factory = factory.clone();
            async move { factory.worker(index).await }
        })
        .await
    }

    /// Lets all workers train until the server is lost, and again with its successor.
    async fn outage(
        &self,
        workers: Vec<Worker>,
        factory: &Factory,
        within: Duration,
    ) -> Result<(Counts, Json), String> {
        let (counts, until) = (Rc::new(Counts::new(self.recording.steps.len())), Instant::now() + within);
        let survived = each(workers, ALL, |worker| {
            let (counts, factory, least) = (counts.clone(), factory.clone(), self.steps);
            async move { outage::survive(worker, &factory, &counts, least, until).await }
        })
        .await?;
        let counts = Rc::into_inner(counts).ok_or("internal error: steps are still counted")?;
        Ok((counts, outage::json(&survived)))
    }

    /// Lets all workers, `at_once` of them at a time, make at least `least` steps, and go on for `duration`.
    async fn steps(
        &self,
        workers: Vec<Worker>,
        counts: &Rc<Counts>,
        at_once: usize,
        least: u64,
        duration: Duration,
    ) -> Result<Vec<Worker>, String> {
        let until = Instant::now() + duration;
        let failed = Rc::new(Cell::new(false));
        each(workers, at_once, |mut worker| {
            let (counts, failed) = (counts.clone(), failed.clone());
            async move {
                let mut made = 0;
                while (made < least || Instant::now() < until) && !failed.get() {
                    match worker.step().await {
                        Ok(played) => counts.add(&played),
                        Err(why) => {
                            failed.set(true);
                            return Err(why);
                        }
                    }
                    made += 1;
                }
                Ok(worker)
            }
        })
        .await
    }

    /// Zero if there is no process to look at.
    fn server_cpu(&self) -> Result<Duration, String> {
        self.process.as_ref().map_or(Ok(Duration::ZERO), cpu)
    }

    async fn look(&self) -> Option<Seen> {
        let process = self.process.as_ref()?;
        tokio::time::sleep(SETTLE).await;
        process.look()
    }

    /// A failure, with the news that explains most of them.
    fn explain(&self, why: String) -> String {
        let Some(process) = &self.process else { return why };
        // Its connections are closed a little before it is gone.
        let begun = Instant::now();
        while begun.elapsed() < DYING {
            if !process.is_there() {
                return format!("the parameter server exited ({why})");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        why
    }
}

fn cpu(process: &Process) -> Result<Duration, String> {
    process.look().map(|seen| seen.cpu).ok_or_else(|| "the CPU time of a process cannot be read".to_owned())
}

/// Does the same for each of `items`, `at_once` of them at a time. The first failure ends all.
async fn each<T, U, F>(items: Vec<T>, at_once: usize, work: impl Fn(T) -> F) -> Result<Vec<U>, String>
where
    F: Future<Output = Result<U, String>> + 'static,
    U: 'static,
{
    let places = Rc::new(Semaphore::new(at_once));
    let mut tasks = JoinSet::new();
    for item in items {
        let (places, work) = (places.clone(), work(item));
        tasks.spawn_local(async move {
            let _place = places.acquire().await;
            work.await
        });
    }
    let mut done = Vec::with_capacity(tasks.len());
    while let Some(joined) = tasks.join_next().await {
        done.push(joined.map_err(|error| format!("internal error: {error}"))??);
    }
    Ok(done)
}
