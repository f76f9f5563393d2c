//! `starctl bench`: what the data port gives on this machine, or between two, without TensorFlow.

mod task;

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use clap::builder::RangedU64ValueParser;
use starwire_engine::config::{Config, Env, HostPort, Identity, ProcessEnv, Protocol};
use starwire_engine::control::proto::starwire::StatsRequest;
use starwire_engine::control::proto::starwire::control_client::ControlClient;
use starwire_net::transport::verbs::{Device, Library};

use self::task::{Keys, MAX_SIZE, Peer, Task};
use crate::cluster;
use crate::failure::Failure;
use crate::output::{say, unless_unread};
use crate::remote;

/// Measure calls and tensors over the data port, without TensorFlow
#[derive(clap::Args)]
#[command(after_help = "\
Without --serve and --to, both ends run in this process: over a unix socket, over TCP, and over
RDMA if this host has a device for it. Between hosts, STARWIRE_TRANSPORT=verbs at both ends measures
RDMA. A step requests all its tensors at once and ends with the last byte of the last one; three
bytes of each are checked. The server's tensors are already in memory, so the result is the limit of
the transport, not the speed of a training job. CPU is the time of this process per tensor (or
call), of both ends if both run here.
The variables of docs/configuration.md apply, except those for addresses if both ends run here.")]
pub struct Args {
    /// Only serve, for --to on another machine; stop with Ctrl-C
    #[arg(long, conflicts_with = "to")]
    serve: bool,
    /// Measure against the data port of a `starctl bench --serve`
    #[arg(long, value_name = "ADDRESS", value_parser = cluster::address)]
    to: Option<HostPort>,
    /// Measure tensors of this size only
    #[arg(long, value_name = "BYTES", value_parser = RangedU64ValueParser::<usize>::new().range(..=MAX_SIZE as u64))]
    size: Option<usize>,
    /// Tensors of that size in each step
    #[arg(long, value_name = "N", requires = "size", default_value_t = 1,
        value_parser = RangedU64ValueParser::<usize>::new().range(1..=100_000))]
    count: usize,
    /// Time per case
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
}

pub const SERVER: &str = "/job:starctl/replica:0/task:0";
const CLIENT: &str = "/job:starctl/replica:0/task:1";
const TIMEOUT: Duration = Duration::from_secs(30);

pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let duration = Duration::from_secs(args.seconds);
    let cases = cases(args.size, args.count)?;
    if args.serve {
        return serve();
    }
    if let Some(address) = &args.to {
        require_bench(address)?;
        let client = start(&Environment::default(), CLIENT, &own_host(), &address.to_string())?;
        say(client.banner())?;
        let peer = client.peer(SERVER, &address.to_string())?;
        measure(&format!("to {address}"), &peer, &cases, duration)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut paths = vec![("unix socket", "auto", "tcp"), ("TCP, loopback", "off", "tcp")];
    if has_rdma() {
        paths.push(("RDMA, both ends on this host's device", "off", "verbs"));
    }
    for (title, unix, transport) in paths {
        let env = Environment::of_both_ends(unix, transport);
        let (server, client) = (start_here(&env, SERVER)?, start_here(&env, CLIENT)?);
        let peer = client.peer(SERVER, &server.bound().to_string())?;
        say(client.banner())?;
        measure(title, &peer, &cases, duration)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A device that connections could use. Without one there is nothing to compare.
fn has_rdma() -> bool {
    let env = Environment::of_both_ends("off", "verbs");
    let config = Config::from_env(&env, identity(CLIENT, "localhost", "localhost:0"));
    config.is_ok_and(|config| {
        Library::load(&config.verbs.library).and_then(|library| Device::open(library, &config.verbs)).is_ok()
    })
}

fn serve() -> Result<ExitCode, Failure> {
    let host = own_host();
    let server = start(&Environment::default(), SERVER, &host, &format!("{host}:0"))?;
    let bound = server.bound();
    let host = if bound.ip().is_unspecified() { host } else { bound.ip().to_string() };
    let to = HostPort { host, port: bound.port() };
    unless_unread(say(format_args!("{}\nstarctl bench --to {to}", server.banner())))?;
    loop {
        std::thread::park();
    }
}

fn start(env: &Environment, task: &str, host: &str, server: &str) -> Result<Task, Failure> {
    // Only has to differ from the last one's. Nanoseconds have 30 bits.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let incarnation = now.map_or(1, |now| now.as_secs() << 30 | u64::from(now.subsec_nanos()));
    Ok(Task::start(env, identity(task, host, server), incarnation)?)
}

pub fn start_here(env: &Environment, task: &str) -> Result<Task, Failure> {
    start(env, task, "localhost", "localhost:0")
}

fn identity(task: &str, host: &str, server: &str) -> Identity {
    Identity {
        protocol: Protocol::GrpcPlusPlus,
        job: "starctl".to_owned(),
        task: task.to_owned(),
        tasks: vec![(SERVER.to_owned(), server.to_owned()), (CLIENT.to_owned(), format!("{host}:0"))],
        grpc_address: HostPort { host: host.to_owned(), port: 0 }.to_string(),
        cpus_allowed: std::thread::available_parallelism().map_or(1, usize::from),
        grpc_gives_way: true,
    }
}

fn own_host() -> String {
    ProcessEnv
        .host_name()
        .filter(|name| format!("{name}:0").parse::<HostPort>().is_ok())
        .unwrap_or_else(|| "localhost".to_owned())
}

/// The server must be a `starctl bench --serve`: one of a job is not disturbed.
fn require_bench(address: &HostPort) -> Result<(), Failure> {
    let reply = remote::block_on(async {
        let timeout = Duration::from_secs(5);
        let mut client = ControlClient::new(remote::channel(address, timeout)?);
        let reply = remote::within(timeout, client.stats(StatsRequest { without_connections: true })).await;
        reply.map_err(|status| Failure::Failed(format!("{address}: {}", remote::explain(&status))))
    })?;
    let server = reply.into_inner().server.unwrap_or_default();
    if server.task == SERVER {
        return Ok(());
    }
    let (task, protocol) = (server.task, server.protocol);
    let remedy = "give the address of a `starctl bench --serve`";
    Err(Failure::Failed(format!("{address} belongs to {task} ({protocol}): {remedy}")))
}

/// The process's environment without what belongs to a cluster, and with other changes. `None`: not set.
pub struct Environment(Vec<(&'static str, Option<&'static str>)>);

impl Default for Environment {
    fn default() -> Self {
        Self(
            ["TF_SEASTAR_ENDPOINT_MAP_PATH", "STARWIRE_ENDPOINT_MAP", "STARWIRE_PORTS"].map(|name| (name, None)).into(),
        )
    }
}

impl Environment {
    /// Two servers of one process cannot have one address.
    pub fn of_both_ends(unix: &'static str, transport: &'static str) -> Self {
        let mut env = Self::default();
        let changes = [("STARWIRE_BIND", None), ("STARWIRE_UNIX", Some(unix)), ("STARWIRE_TRANSPORT", Some(transport))];
        env.0.extend(changes);
        env
    }
}

impl Env for Environment {
    fn var(&self, name: &str) -> Option<OsString> {
        match self.0.iter().find(|(changed, _)| *changed == name) {
            Some((_, value)) => value.map(OsString::from),
            None => ProcessEnv.var(name),
        }
    }

    fn names(&self) -> Vec<String> {
        ProcessEnv.names()
    }

    fn current_dir(&self) -> io::Result<PathBuf> {
        // The working directory's .endpoint_map is about other tasks.
        Ok(PathBuf::from("/nonexistent"))
    }

    fn host_name(&self) -> Option<String> {
        ProcessEnv.host_name()
    }
}

/// What is done in one step.
enum Case {
    Call,
    Tensors(Keys),
}

fn cases(size: Option<usize>, count: usize) -> Result<Vec<Case>, Failure> {
    let tensors = |count, size| Case::Tensors(Keys::new(count, size));
    let Some(size) = size else {
        return Ok(vec![
            Case::Call,
            tensors(1, 4 << 10),
            tensors(1000, 4 << 10),
            tensors(10, 1 << 20),
            tensors(4, 10_000_000),
        ]);
    };
    if size.checked_mul(count).is_none_or(|total| total > 8 << 30) {
        return Err(Failure::Usage(format!("{count} tensors of {size} bytes exceed 8 GiB")));
    }
    Ok(vec![tensors(count, size)])
}

impl Case {
    fn name(&self) -> String {
        match self {
            Case::Call => "empty call".to_owned(),
            Case::Tensors(keys) => format!("{} × {} B", keys.count(), keys.bytes() / keys.count()),
        }
    }

    fn items(&self) -> usize {
        match self {
            Case::Call => 1,
            Case::Tensors(keys) => keys.count(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Case::Call => 0,
            Case::Tensors(keys) => keys.bytes(),
        }
    }

    fn step(&self, peer: &Peer, step: i64) -> Result<Duration, Failure> {
        let result = match self {
            Case::Call => peer.call(TIMEOUT),
            Case::Tensors(keys) => peer.tensors(step, keys, TIMEOUT),
        };
        result.map_err(Failure::Failed)
    }
}

fn measure(title: &str, peer: &Peer, cases: &[Case], duration: Duration) -> Result<(), Failure> {
    say(format_args!(
        "\n{title}\n{:<22}{:>10}{:>12}{:>12}{:>12}{:>10}{:>12}",
        "case", "steps/s", "p50 µs", "p99 µs", "items/s", "GB/s", "CPU µs/item"
    ))?;
    for case in cases {
        let mut number = 0;
        // Connects, interns the keys, touches the memory.
        let warm_up = Instant::now();
        while number < 3 || warm_up.elapsed() < duration / 10 {
            case.step(peer, number)?;
            number += 1;
        }
        let (begun, cpu_before) = (Instant::now(), cpu_time());
        let mut times = Vec::new();
        while times.len() < 3 || begun.elapsed() < duration {
            times.push(case.step(peer, number)?);
            number += 1;
        }
        let cpu = cpu_time().zip(cpu_before).map(|(after, before)| after - before);
        say(report(case, &mut times, begun.elapsed(), cpu))?;
    }
    Ok(())
}

fn report(case: &Case, times: &mut [Duration], elapsed: Duration, cpu: Option<Duration>) -> String {
    times.sort_unstable();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to the number of times")]
    let quantile =
        |q: f64| times.get(((times.len() - 1) as f64 * q).round() as usize).map_or(0.0, Duration::as_secs_f64) * 1e6;
    let seconds = elapsed.as_secs_f64();
    let steps = times.len() as f64;
    let items = steps * case.items() as f64;
    let cpu = cpu.map_or_else(|| "?".to_owned(), |cpu| format!("{:.2}", cpu.as_secs_f64() * 1e6 / items));
    format!(
        "{:<22}{:>10.0}{:>12.1}{:>12.1}{:>12.0}{:>10.3}{:>12}",
        case.name(),
        steps / seconds,
        quantile(0.5),
        quantile(0.99),
        items / seconds,
        steps * case.bytes() as f64 / seconds / 1e9,
        cpu
    )
}

/// CPU time of this process; the kernel accounts in ticks of 10 ms.
fn cpu_time() -> Option<Duration> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name in parentheses may contain anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(Duration::from_millis(ticks * 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_in_one_process() {
        let env = Environment::of_both_ends("off", "tcp");
        let (server, client) = (start_here(&env, SERVER).unwrap(), start_here(&env, CLIENT).unwrap());
        let peer = client.peer(SERVER, &server.bound().to_string()).unwrap();
        measure("test", &peer, &cases(Some(100), 5).unwrap(), Duration::from_millis(20)).unwrap();
    }

    #[test]
    fn the_other_end_is_found_by_its_data_port() {
        let env = Environment::of_both_ends("auto", "tcp");
        let address = |of: &Task| of.bound().to_string().parse().unwrap();
        let server = start_here(&env, SERVER).unwrap();
        require_bench(&address(&server)).unwrap();
        let other = start_here(&env, CLIENT).unwrap();
        let Err(Failure::Failed(message)) = require_bench(&address(&other)) else { panic!("refused") };
        assert!(message.contains("give the address of a `starctl bench --serve`"), "{message}");
    }

    #[test]
    fn tensors_have_limits() {
        let sizes = |size, count| cases(size, count).map(|c| c.iter().map(Case::bytes).collect::<Vec<_>>()).ok();
        assert_eq!(sizes(Some(10), 3), Some(vec![30]));
        assert_eq!(sizes(Some(1_000_000), 100_000), None);
        assert_eq!(sizes(None, 1).map(|s| s.len()), Some(5));
    }

    #[test]
    fn the_report_adds_up() {
        let case = Case::Tensors(Keys::new(10, 1000));
        let mut times: Vec<Duration> = (1..=100).map(Duration::from_micros).collect();
        let line = report(&case, &mut times, Duration::from_secs(1), Some(Duration::from_millis(10)));
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words, ["10", "×", "1000", "B", "100", "51.0", "99.0", "1000", "0.001", "10.00"]);
    }
}
