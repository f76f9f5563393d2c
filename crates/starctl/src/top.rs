//! `starctl top`: a live table of servers, from their statistics.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::json;
use starwire_engine::config::ProcessEnv;
use starwire_engine::control::proto::starwire as pb;
use starwire_engine::control::proto::starwire::control_client::ControlClient;
use starwire_engine::metrics::{BUCKETS, Distribution};
use tonic::transport::Channel;

use crate::failure::Failure;
use crate::output::print;
use crate::remote;
use crate::targets::{self, Servers, Target};

/// Show the activity of servers, refreshed at an interval
#[derive(clap::Args)]
#[command(after_help = format!("{}
Rates are per second of the last interval. p50/p99 are upper bounds (powers of two) of the time from
the start to the end of the method calls and tensor requests that ended within the interval. With
--json: one object per line and server and update, with the raw metrics, and with
--connections the connections.", targets::DETAILS))]
pub struct Args {
    #[command(flatten)]
    servers: Servers,
    /// Time between two updates
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(50..=3_600_000))]
    interval_ms: u64,
    /// Print one table (of one interval) and exit
    #[arg(long)]
    once: bool,
    /// List each server's connections, busiest first
    #[arg(long)]
    connections: bool,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

/// A cluster may be large, but nobody looks at ten thousand lines.
const MAX_CONNECTION_LINES: usize = 50;
/// For a server's answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// A thousand connections with long names take a few hundred kilobytes.
const MAX_REPLY: usize = 64 << 20;

pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let targets = args.servers.targets(&ProcessEnv)?;
    remote::block_on(async {
        let servers: Result<Vec<Server>, Failure> =
            targets.into_iter().map(|target| Server::new(target, args.connections)).collect();
        let mut servers = servers?;
        let clear = std::io::stdout().is_terminal() && !args.once && !args.json;
        poll(&mut servers).await;
        loop {
            tokio::time::sleep(Duration::from_millis(args.interval_ms)).await;
            poll(&mut servers).await;
            let text = match args.json {
                true => servers.iter().map(|server| format!("{}\n", server.json())).collect(),
                false => render(&servers) + "\n",
            };
            let cleared = if clear { "\x1b[2J\x1b[H" } else { "" };
            print(format_args!("{cleared}{text}"))?;
            if args.once {
                let reached = servers.iter().all(|server| server.error.is_none());
                return Ok(if reached { ExitCode::SUCCESS } else { ExitCode::FAILURE });
            }
        }
    })
}

/// Asks all servers at once: one that hangs must not hold up the others.
async fn poll(servers: &mut [Server]) {
    let mut replies = Vec::new();
    for server in servers.iter() {
        let (mut client, request) =
            (server.client.clone(), pb::StatsRequest { without_connections: !server.connections });
        replies.push(tokio::spawn(async move {
            let reply = remote::within(TIMEOUT, client.stats(request)).await;
            // Rates are those of the time between two replies, however long others have taken.
            reply.map(|reply| (Instant::now(), reply.into_inner()))
        }));
    }
    for (server, reply) in servers.iter_mut().zip(replies) {
        match reply.await {
            Ok(Ok((at, reply))) => server.update(at, reply),
            Ok(Err(status)) => server.fail(server.target.explain(&remote::explain(&status))),
            Err(error) => server.fail(error.to_string()),
        }
    }
}

struct Server {
    target: Target,
    client: ControlClient<Channel>,
    /// Whether to ask for them.
    connections: bool,
    before: Option<Sample>,
    now: Option<Sample>,
    error: Option<String>,
}

/// A server's statistics at one time.
struct Sample {
    at: Instant,
    reply: pb::StatsReply,
    metrics: BTreeMap<String, pb::metric::Value>,
}

impl Server {
    fn new(target: Target, connections: bool) -> Result<Self, Failure> {
        let channel = remote::channel(target.data.address(), TIMEOUT)?;
        let client = ControlClient::new(channel).max_decoding_message_size(MAX_REPLY);
        Ok(Self { target, client, connections, before: None, now: None, error: None })
    }

    fn update(&mut self, at: Instant, mut reply: pb::StatsReply) {
        let metrics = std::mem::take(&mut reply.metrics).into_iter().filter_map(|m| Some((m.name, m.value?))).collect();
        let sample = Sample { at, reply, metrics };
        let restarted = self.now.as_ref().is_some_and(|now| now.incarnation() != sample.incarnation());
        self.before = if restarted { None } else { self.now.take() };
        self.now = Some(sample);
        self.error = None;
    }

    fn fail(&mut self, error: String) {
        (self.before, self.now, self.error) = (None, None, Some(error));
    }

    fn json(&self) -> serde_json::Value {
        let Some(now) = self.now.as_ref() else {
            return json!({"address": self.target.address.to_string(), "error": self.error});
        };
        let metrics = now.metrics.iter().map(|(name, value)| {
            let value = match value {
                pb::metric::Value::Counter(n) => json!(n),
                pb::metric::Value::Gauge(n) => json!(n),
                // Nanoseconds. Bucket i counts values below 2^(i + 10) that are in no bucket before it.
                pb::metric::Value::Histogram(h) => json!({"count": h.count, "sum": h.sum, "buckets": h.buckets}),
            };
            (name.clone(), value)
        });
        let connections = now.reply.connections.iter().map(|c| {
            let direction = if c.direction() == pb::connection::Direction::Outgoing { "outgoing" } else { "incoming" };
            json!({"peer": c.peer, "address": c.address, "direction": direction, "state": c.state, "reactor": c.reactor,
                "bytes_in": c.bytes_in, "bytes_out": c.bytes_out, "in_flight": c.calls_in_flight, "age_ms": c.age_ms})
        });
        let server = now.reply.server.clone().unwrap_or_default();
        json!({
            "address": self.target.address.to_string(), "task": server.task, "protocol": server.protocol, "pid": server.pid,
            "uptime_ms": server.uptime_ms, "version": now.reply.build.as_ref().map(|build| build.version.clone()),
            "metrics": metrics.collect::<serde_json::Map<_, _>>(),
            "connections": self.connections.then(|| connections.collect::<Vec<_>>()),
        })
    }
}

impl Sample {
    fn incarnation(&self) -> u64 {
        self.reply.server.as_ref().map_or(0, |server| server.incarnation)
    }

    fn counter(&self, name: &str) -> u64 {
        match self.metrics.get(name) {
            Some(pb::metric::Value::Counter(n)) => *n,
            _ => 0,
        }
    }

    fn gauge(&self, name: &str) -> i64 {
        match self.metrics.get(name) {
            Some(pb::metric::Value::Gauge(n)) => *n,
            _ => 0,
        }
    }

    fn buckets(&self, name: &str) -> [u64; BUCKETS] {
        match self.metrics.get(name) {
            // A server of another version may have fewer.
            Some(pb::metric::Value::Histogram(h)) => std::array::from_fn(|i| h.buckets.get(i).copied().unwrap_or(0)),
            _ => [0; BUCKETS],
        }
    }
}

const HEADER: [&str; 12] = [
    "TASK",
    "UP",
    "CONN",
    "WAIT",
    "OWED",
    "CALLS/s",
    "TENSORS/s",
    "SERVED/s",
    "OUT MB/s",
    "IN MB/s",
    "CALL p50/p99",
    "TENSOR p50/p99",
];

fn render(servers: &[Server]) -> String {
    let mut rows: Vec<Vec<String>> = vec![HEADER.map(str::to_owned).to_vec()];
    let mut notes = String::new();
    for server in servers {
        match (&server.error, &server.before, &server.now) {
            (Some(error), _, _) => notes += &format!("{}: {error}\n", server.target.address),
            (None, Some(before), Some(now)) => {
                rows.push(row(before, now));
                notes += &joined(now);
            }
            _ => notes += &format!("{}: just (re)started; rates follow with the next update\n", server.target.address),
        }
    }
    let mut text = columns(&rows);
    for server in servers.iter().filter(|server| server.connections) {
        if let (Some(before), Some(now)) = (&server.before, &server.now) {
            text += &format!("\n{}\n{}", server.target.address, connection_table(before, now));
        }
    }
    text + &notes
}

/// About tasks that are not in the ClusterSpec.
fn joined(now: &Sample) -> String {
    let [joined, left] = ["joined", "left"].map(|what| now.counter(&format!("starwire_tasks_{what}_total")));
    let task = now.reply.server.as_ref().map_or("", |server| &server.task);
    if joined == 0 { String::new() } else { format!("{task}: {joined} tasks have joined, {left} of them have left\n") }
}

/// What a counter has grown by. A server that was restarted meanwhile counts from 0 again: nothing.
fn growth(before: u64, now: u64) -> u64 {
    now.saturating_sub(before)
}

fn row(before: &Sample, now: &Sample) -> Vec<String> {
    let seconds = (now.at - before.at).as_secs_f64().max(1e-3);
    let rate = |name: &str| growth(before.counter(name), now.counter(name)) as f64 / seconds;
    let served = rate("starwire_calls_received_total") + rate("starwire_tensor_requests_received_total");
    let server = now.reply.server.clone().unwrap_or_default();
    let connections = now.gauge("starwire_connections_out") + now.gauge("starwire_connections_in");
    vec![
        format!("{} {}", server.task, server.protocol),
        age(server.uptime_ms),
        connections.to_string(),
        now.gauge("starwire_requests_in_flight").to_string(),
        now.gauge("starwire_requests_unanswered").to_string(),
        format!("{:.0}", rate("starwire_calls_sent_total")),
        format!("{:.0}", rate("starwire_tensors_requested_total")),
        format!("{served:.0}"),
        format!("{:.1}", (rate("starwire_bytes_sent_total") + rate("starwire_lent_bytes_total")) / 1e6),
        format!("{:.1}", (rate("starwire_bytes_received_total") + rate("starwire_borrowed_bytes_total")) / 1e6),
        quantiles(before, now, "starwire_call_seconds"),
        quantiles(before, now, "starwire_tensor_seconds"),
    ]
}

fn quantiles(before: &Sample, now: &Sample, name: &str) -> String {
    let (then, now) = (before.buckets(name), now.buckets(name));
    let during = Distribution { sum: 0, buckets: std::array::from_fn(|i| growth(then[i], now[i])) };
    if during.count() == 0 {
        return "–".to_owned();
    }
    let show = |q| during.quantile(q).map_or_else(|| "> 1 min".to_owned(), duration);
    format!("{}/{}", show(0.5), show(0.99))
}

/// What tells a connection from the others of its server: processes of its host have no address of their own.
fn identity(c: &pb::Connection) -> (i32, &str, &str, u32) {
    (c.direction, &c.peer, &c.address, c.reactor)
}

fn connection_table(before: &Sample, now: &Sample) -> String {
    let seconds = (now.at - before.at).as_secs_f64().max(1e-3);
    let then: BTreeMap<_, &pb::Connection> = before.reply.connections.iter().map(|c| (identity(c), c)).collect();
    let rate = |c: &pb::Connection, bytes: fn(&pb::Connection) -> u64| {
        let is_new = c.age_ms as f64 / 1e3 < seconds;
        let earlier = then.get(&identity(c)).filter(|_| !is_new).map_or(0, |c| bytes(c));
        growth(earlier, bytes(c)) as f64 / seconds / 1e6
    };
    let mut lines: Vec<(f64, Vec<String>)> = now
        .reply
        .connections
        .iter()
        .map(|c| {
            let (out, incoming) = (rate(c, |c| c.bytes_out), rate(c, |c| c.bytes_in));
            let arrow = if c.direction() == pb::connection::Direction::Outgoing { "to" } else { "from" };
            let peer = if c.peer.is_empty() { "?" } else { &c.peer };
            let cells = vec![
                format!("  {arrow} {peer}"),
                c.address.clone(),
                c.state.clone(),
                c.reactor.to_string(),
                age(c.age_ms),
                c.calls_in_flight.to_string(),
                format!("{out:.1}"),
                format!("{incoming:.1}"),
            ];
            (out + incoming, cells)
        })
        .collect();
    lines.sort_by(|a, b| b.0.total_cmp(&a.0));
    let more = lines.len().saturating_sub(MAX_CONNECTION_LINES);
    let head = ["  PEER", "ADDRESS", "STATE", "REACTOR", "AGE", "WAIT", "OUT MB/s", "IN MB/s"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(lines.into_iter().take(MAX_CONNECTION_LINES).map(|(_, cells)| cells));
    let table = columns(&rows);
    if more > 0 { format!("{table}  … and {more} more\n") } else { table }
}

/// The first column to the left, the others to the right.
fn columns(rows: &[Vec<String>]) -> String {
    let width = |i: usize| rows.iter().filter_map(|row| row.get(i)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows.iter().map(Vec::len).max().unwrap_or(0)).map(width).collect();
    let mut text = String::new();
    for row in rows {
        for (i, cell) in row.iter().enumerate() {
            let padding = " ".repeat(widths[i] - cell.chars().count());
            text += &if i == 0 { format!("{cell}{padding}") } else { format!("  {padding}{cell}") };
        }
        text = text.trim_end().to_owned() + "\n";
    }
    text
}

fn age(milliseconds: u64) -> String {
    let seconds = milliseconds / 1000;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

fn duration(nanos: u64) -> String {
    match nanos {
        0..10_000 => format!("{:.1}µs", nanos as f64 / 1e3),
        10_000..1_000_000 => format!("{:.0}µs", nanos as f64 / 1e3),
        1_000_000..10_000_000 => format!("{:.1}ms", nanos as f64 / 1e6),
        10_000_000..1_000_000_000 => format!("{:.0}ms", nanos as f64 / 1e6),
        _ => format!("{:.1}s", nanos as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use starwire_engine::config::{DataAddress, HostPort};

    use super::*;
    use crate::bench;

    fn sample(at: Instant, calls: u64, buckets: &[(usize, u64)]) -> Sample {
        let mut histogram = pb::Histogram { count: 0, sum: 0, buckets: vec![0; BUCKETS] };
        for (i, n) in buckets {
            histogram.buckets[*i] = *n;
        }
        let metrics = BTreeMap::from([
            ("starwire_calls_sent_total".to_owned(), pb::metric::Value::Counter(calls)),
            ("starwire_connections_in".to_owned(), pb::metric::Value::Gauge(2)),
            ("starwire_call_seconds".to_owned(), pb::metric::Value::Histogram(histogram)),
        ]);
        let server = pb::Server {
            task: "/job:ps/task:0".to_owned(),
            protocol: "grpc++".to_owned(),
            uptime_ms: 61_000,
            ..Default::default()
        };
        Sample { at, reply: pb::StatsReply { server: Some(server), ..Default::default() }, metrics }
    }

    #[test]
    fn rates_and_quantiles_are_those_of_the_interval() {
        let begun = Instant::now();
        let before = sample(begun, 100, &[(20, 1000)]);
        let now = sample(begun + Duration::from_secs(2), 300, &[(2, 90), (6, 10), (20, 1000)]);
        let row = row(&before, &now);
        assert_eq!(row[..6], ["/job:ps/task:0 grpc++", "1m01s", "2", "0", "0", "100"]);
        assert_eq!(row[10], "4.1µs/66µs");
        assert_eq!(row[11], "–");
    }

    #[test]
    fn connections_of_one_host_have_rates_of_their_own() {
        let connection = |peer: &str, age_ms, bytes_out| pb::Connection {
            peer: peer.to_owned(),
            address: "a local process".to_owned(),
            age_ms,
            bytes_out,
            ..Default::default()
        };
        let begun = Instant::now();
        let (mut before, mut now) = (sample(begun, 0, &[]), sample(begun + Duration::from_secs(2), 0, &[]));
        before.reply.connections = vec![connection("w0", 9000, 7_000_000_000), connection("w1", 9000, 1_000_000_000)];
        // The one of w1 has ended, and there is another.
        now.reply.connections = vec![connection("w0", 11_000, 7_100_000_000), connection("w1", 1000, 1_060_000_000)];
        let table = connection_table(&before, &now);
        let rates: Vec<_> = table.lines().skip(1).map(|line| line.split_whitespace().nth_back(1).unwrap()).collect();
        assert_eq!(rates, ["530.0", "50.0"], "{table}");
    }

    #[test]
    fn a_server_that_hangs_changes_no_rates_of_others() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let task = bench::start_here(&bench::Environment::of_both_ends("off", "tcp"), bench::SERVER).unwrap();
        let server = |at: std::net::SocketAddr| {
            let address: HostPort = at.to_string().parse().unwrap();
            Server::new(Target { data: DataAddress::Derived(address.clone()), address }, false).unwrap()
        };
        let begun = Instant::now();
        let polled = remote::block_on(async {
            let mut servers = vec![server(silent.local_addr().unwrap()), server(task.bound())];
            poll(&mut servers).await;
            Ok(servers)
        });
        let servers = polled.unwrap();
        assert!(begun.elapsed() >= TIMEOUT);
        assert_eq!(servers[0].error.as_deref(), Some("no answer in time"));
        let at = servers[1].now.as_ref().unwrap().at;
        assert!(at < begun + TIMEOUT, "when the reply came");
    }

    #[test]
    fn tasks_that_joined_are_counted() {
        let mut now = sample(Instant::now(), 0, &[]);
        assert_eq!(joined(&now), "");
        for (name, count) in [("starwire_tasks_joined_total", 3), ("starwire_tasks_left_total", 1)] {
            now.metrics.insert(name.to_owned(), pb::metric::Value::Counter(count));
        }
        assert_eq!(joined(&now), "/job:ps/task:0: 3 tasks have joined, 1 of them have left\n");
    }

    #[test]
    fn columns_line_up() {
        let rows = [["a", "b"], ["longer", "1"], ["µ", "22"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(columns(&rows), "a        b\nlonger   1\nµ       22\n");
    }

    #[test]
    fn times_are_short() {
        assert_eq!([age(999), age(60_000), age(3_661_000), age(90_000_000)], ["0s", "1m00s", "1h01m", "1d01h"]);
        assert_eq!(
            [duration(1024), duration(65_536), duration(1_048_576), duration(68_719_476_736)],
            ["1.0µs", "66µs", "1.0ms", "68.7s"]
        );
    }
}
