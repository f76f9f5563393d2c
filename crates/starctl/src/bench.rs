//! `starctl bench`: what the data port gives on this machine, or between two, without TensorFlow.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use crate::probe::{Keys, MAX_SIZE, Probe, Way};
use starwire_engine::config::{Config, Env, HostPort, Identity, ProcessEnv, Protocol};
use starwire_engine::control::proto::starwire::StatsRequest;
use starwire_engine::control::proto::starwire::control_client::ControlClient;
use starwire_net::transport::verbs::{Device, Library};

use crate::args::{Args, Command, Failure, Opt};
use crate::remote;

pub const COMMAND: Command = Command {
    name: "bench",
    about: "Measures calls and tensors over the data port, without TensorFlow.",
    positional: "",
    options: &[
        Opt { name: "--serve", value: "", help: "only serve, for --to on another machine; stop with Ctrl-C" },
        Opt { name: "--to", value: "ADDRESS", help: "measure against the data port of a `starctl bench --serve`" },
        Opt { name: "--size", value: "BYTES", help: "measure tensors of this size only" },
        Opt { name: "--count", value: "N", help: "tensors of that size in each step (1)" },
        Opt { name: "--seconds", value: "N", help: "time per case (2)" },
    ],
    details: "\
Without --serve and --to, both ends run in this process: over a unix socket, over TCP, and over RDMA if this host has a
device for it. Between hosts, STARWIRE_TRANSPORT=verbs at both ends measures RDMA. A step requests all its
tensors at once and ends with the last byte of the last one; the bytes are checked. The server's tensors are already in
memory, so the result is the limit of the transport, not the speed of a training job. CPU is the time of this process
per tensor (or call), of both ends if both run here.
The variables of docs/configuration.md apply, except those for addresses if both ends run here.
",
    run,
};

const SERVER: &str = "/job:starctl/replica:0/task:0";
const CLIENT: &str = "/job:starctl/replica:0/task:1";
const PROTOCOL: Protocol = Protocol::GrpcPlusPlus;
const PATIENCE: Duration = Duration::from_secs(30);

fn run(args: &Args) -> Result<ExitCode, Failure> {
    let duration = Duration::from_secs(args.number("--seconds", 2, 1, 3600)?);
    let cases = cases(args)?;
    match (args.has("--serve"), args.get("--to")) {
        (true, Some(_)) => Err(Failure::Usage("--serve and --to exclude each other".to_owned())),
        (true, None) => serve(),
        (false, Some(address)) => {
            let address = remote::parse_address(address)?;
            ask_who(&address)?;
            let client = start(
                &BenchEnv { unix: None, transport: None, anywhere: true },
                CLIENT,
                own_host(),
                &address.to_string(),
            )?;
            println!("{}", client.banner());
            let way = way(&client, &address.to_string())?;
            measure(&format!("to {address}"), &way, &cases, duration)?;
            Ok(ExitCode::SUCCESS)
        }
        (false, None) => {
            let mut ways = vec![("unix socket", "auto", "tcp"), ("TCP, loopback", "off", "tcp")];
            if has_rdma() {
                ways.push(("RDMA, both ends on this host's device", "off", "verbs"));
            }
            for (title, unix, transport) in ways {
                let env = BenchEnv { unix: Some(unix), transport: Some(transport), anywhere: false };
                let (server, client) = (start_here(&env, SERVER)?, start_here(&env, CLIENT)?);
                let way = way(&client, &server.bound().to_string())?;
                println!("{}", client.banner());
                measure(title, &way, &cases, duration)?;
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// A device that connections could use. Without one there is nothing to compare.
fn has_rdma() -> bool {
    let env = BenchEnv { unix: None, transport: Some("verbs"), anywhere: false };
    let config = Config::from_env(&env, identity(CLIENT, "localhost".to_owned(), "localhost:0"));
    config.is_ok_and(|config| {
        Library::load(&config.verbs.library).and_then(|library| Device::open(library, &config.verbs)).is_ok()
    })
}

fn serve() -> Result<ExitCode, Failure> {
    let host = own_host();
    let server =
        start(&BenchEnv { unix: None, transport: None, anywhere: true }, SERVER, host.clone(), &format!("{host}:0"))?;
    let bound = server.bound();
    let host = if bound.ip().is_unspecified() { host } else { bound.ip().to_string() };
    println!("{}", server.banner());
    println!("starctl bench --to {}", HostPort { host, port: bound.port() });
    loop {
        std::thread::park();
    }
}

fn start(env: &BenchEnv, task: &str, host: String, server: &str) -> Result<Probe, Failure> {
    let identity = identity(task, host, server);
    // Only has to differ from the last one's. Nanoseconds have 30 bits.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let incarnation = now.map_or(1, |now| now.as_secs() << 30 | u64::from(now.subsec_nanos()));
    Probe::start(env, identity, incarnation).map_err(|e| Failure::Failed(e.to_string()))
}

fn identity(task: &str, host: String, server: &str) -> Identity {
    Identity {
        protocol: PROTOCOL,
        job: "starctl".to_owned(),
        task: task.to_owned(),
        tasks: vec![(SERVER.to_owned(), server.to_owned()), (CLIENT.to_owned(), format!("{host}:0"))],
        grpc_address: HostPort { host, port: 0 }.to_string(),
        cpus_allowed: std::thread::available_parallelism().map_or(1, usize::from),
        grpc_gives_way: true,
    }
}

fn start_here(env: &BenchEnv, task: &str) -> Result<Probe, Failure> {
    start(env, task, "localhost".to_owned(), "localhost:0")
}

fn own_host() -> String {
    ProcessEnv
        .host_name()
        .filter(|name| format!("{name}:0").parse::<HostPort>().is_ok())
        .unwrap_or_else(|| "localhost".to_owned())
}

fn way(client: &Probe, address: &str) -> Result<Way, Failure> {
    client.way(SERVER, address).map_err(|e| Failure::Failed(e.to_string()))
}

/// The other end must be a `starctl bench --serve`.
fn ask_who(address: &HostPort) -> Result<(), Failure> {
    let runtime = remote::runtime()?;
    let reply = runtime.block_on(async {
        let mut client = ControlClient::new(remote::channel(address, Duration::from_secs(5))?);
        let request = StatsRequest { without_connections: true };
        client
            .stats(request)
            .await
            .map_err(|status| Failure::Failed(format!("{address}: {}", remote::explain(&status))))
    })?;
    let server = reply.into_inner().server.unwrap_or_default();
    if server.task != SERVER {
        let what = format!(
            "{address} belongs to {} ({}): give the address of a `starctl bench --serve`",
            server.task, server.protocol
        );
        return Err(Failure::Failed(what));
    }
    Ok(())
}

/// The process's environment, less what would make two servers of one process quarrel and what belongs to a cluster.
struct BenchEnv {
    /// Instead of STARWIRE_UNIX.
    unix: Option<&'static str>,
    /// Instead of STARWIRE_TRANSPORT.
    transport: Option<&'static str>,
    /// STARWIRE_BIND counts.
    anywhere: bool,
}

impl BenchEnv {
    fn hides(&self, name: &str) -> bool {
        match name {
            "TF_SEASTAR_ENDPOINT_MAP_PATH" | "STARWIRE_ENDPOINT_MAP" | "STARWIRE_PORTS" => true,
            "STARWIRE_BIND" => !self.anywhere,
            _ => false,
        }
    }
}

impl Env for BenchEnv {
    fn var(&self, name: &str) -> Option<OsString> {
        match self.unix {
            Some(unix) if name == "STARWIRE_UNIX" => Some(unix.into()),
            _ if self.hides(name) => None,
            _ => match self.transport {
                Some(transport) if name == "STARWIRE_TRANSPORT" => Some(transport.into()),
                _ => ProcessEnv.var(name),
            },
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

fn cases(args: &Args) -> Result<Vec<Case>, Failure> {
    let count = args.number("--count", 1, 1, 100_000)?;
    if args.has("--size") {
        let size = args.number("--size", 0, 0, MAX_SIZE)?;
        let total = size.checked_mul(count).filter(|total| *total <= 8 << 30);
        total.ok_or_else(|| Failure::Usage(format!("{count} tensors of {size} bytes exceed 8 GiB")))?;
        return Ok(vec![Case::Tensors(Keys::new(count, size))]);
    }
    if args.has("--count") {
        return Err(Failure::Usage("--count needs --size".to_owned()));
    }
    let tensors = |count, size| Case::Tensors(Keys::new(count, size));
    Ok(vec![Case::Call, tensors(1, 4 << 10), tensors(1000, 4 << 10), tensors(10, 1 << 20), tensors(4, 10_000_000)])
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

    fn step(&self, way: &Way, step: i64) -> Result<Duration, Failure> {
        let result = match self {
            Case::Call => way.call(PATIENCE),
            Case::Tensors(keys) => way.tensors(step, keys, PATIENCE),
        };
        result.map_err(Failure::Failed)
    }
}

fn measure(title: &str, way: &Way, cases: &[Case], duration: Duration) -> Result<(), Failure> {
    println!(
        "\n{title}\n{:<22}{:>10}{:>12}{:>12}{:>12}{:>10}{:>12}",
        "case", "steps/s", "p50 µs", "p99 µs", "items/s", "GB/s", "CPU µs/item"
    );
    for case in cases {
        let mut number = 0;
        // Connects, interns the keys, touches the memory.
        let warm_up = Instant::now();
        while number < 3 || warm_up.elapsed() < duration / 10 {
            case.step(way, number)?;
            number += 1;
        }
        let (begun, cpu_before) = (Instant::now(), cpu_time());
        let mut times = Vec::new();
        while times.len() < 3 || begun.elapsed() < duration {
            times.push(case.step(way, number)?);
            number += 1;
        }
        println!(
            "{}",
            report(case, &mut times, begun.elapsed(), cpu_time().zip(cpu_before).map(|(after, before)| after - before))
        );
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
    use crate::args::{Parsed, parse};

    fn args(words: &[&str]) -> Args {
        let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
        let Ok(Parsed::Run(args)) = parse(&COMMAND, &words) else { panic!("bad words") };
        args
    }

    #[test]
    fn both_ends_in_one_process() {
        let env = BenchEnv { unix: Some("off"), transport: None, anywhere: false };
        let (Ok(server), Ok(client)) = (start_here(&env, SERVER), start_here(&env, CLIENT)) else {
            panic!("the ends start")
        };
        let Ok(way) = way(&client, &server.bound().to_string()) else { panic!("there is a way") };
        let Ok(cases) = cases(&args(&["--size", "100", "--count", "5"])) else { panic!("good arguments") };
        assert!(measure("test", &way, &cases, Duration::from_millis(20)).is_ok());
    }

    #[test]
    fn the_other_end_is_found_by_its_data_port() {
        let env = BenchEnv { unix: None, transport: None, anywhere: false };
        let Ok(server) = start_here(&env, SERVER) else { panic!("the server starts") };
        let address = |of: &Probe| of.bound().to_string().parse().unwrap();
        assert!(ask_who(&address(&server)).is_ok());
        // A server of a job is left alone.
        let Ok(other) = start_here(&env, CLIENT) else { panic!("the other starts") };
        let Err(Failure::Failed(message)) = ask_who(&address(&other)) else { panic!("refused") };
        assert!(message.contains("give the address of a `starctl bench --serve`"), "{message}");
    }

    #[test]
    fn cases_of_ones_own_have_limits() {
        let sizes = |words: &[&str]| cases(&args(words)).map(|c| c.iter().map(Case::bytes).collect::<Vec<_>>()).ok();
        assert_eq!(sizes(&["--size", "10", "--count", "3"]), Some(vec![30]));
        assert_eq!(sizes(&["--count", "3"]), None);
        assert_eq!(sizes(&["--size", "1000000", "--count", "100000"]), None);
        assert_eq!(sizes(&[]).map(|s| s.len()), Some(5));
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
