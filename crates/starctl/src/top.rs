//! `starctl top`: a live table of servers, from their statistics.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::json;
use starwire_engine::config::HostPort;
use starwire_engine::control::proto::starwire as pb;
use starwire_engine::control::proto::starwire::control_client::ControlClient;
use starwire_engine::metrics::{BUCKETS, Distribution};
use tonic::transport::Channel;

use crate::args::{Args, Command, Failure, JSON, Opt};
use crate::remote;
use crate::targets::{self, Target};

pub const COMMAND: Command = Command {
    name: "top",
    about: "Shows the activity of servers, refreshed at an interval.",
    positional: "[ADDRESS...]",
    options: &[
        targets::CLUSTER,
        Opt { name: "--interval-ms", value: "N", help: "time between two updates (2000)" },
        Opt { name: "--once", value: "", help: "print one table (of one interval) and exit" },
        Opt { name: "--connections", value: "", help: "list each server's connections, busiest first" },
        JSON,
    ],
    details: "\
ADDRESS is host:port of a server, as in the ClusterSpec. The endpoint map, and STARWIRE_PORTS=two with
STARWIRE_PORT_OFFSET, tell where its data port is, as for a server; set them as there.
Without an ADDRESS: all tasks of --cluster, or of $TF_CONFIG.
Rates are per second of the last interval. p50/p99 are upper bounds (powers of two) of the time from the start to
the end of the method calls and tensor requests that ended within the interval. With --json: one object per line and
server and update, with the raw metrics and connections.
",
    run,
};

/// A cluster may be large, but nobody looks at ten thousand lines.
const MAX_CONNECTION_LINES: usize = 50;
/// For a server's answer.
const PATIENCE: Duration = Duration::from_secs(2);

fn run(args: &Args) -> Result<ExitCode, Failure> {
    let interval = Duration::from_millis(args.number("--interval-ms", 2000, 50, 3_600_000)?);
    let (once, connections, json) = (args.has("--once"), args.has("--connections"), args.has(JSON.name));
    let targets = targets::targets(args)?;
    let runtime = remote::runtime()?;
    runtime.block_on(async {
        let mut servers: Vec<Server> = targets.into_iter().map(|target| Server::new(target, connections)).collect();
        let clear = std::io::stdout().is_terminal() && !once && !json;
        look_at(&mut servers).await;
        loop {
            tokio::time::sleep(interval).await;
            look_at(&mut servers).await;
            let text = match json {
                true => servers.iter().map(|server| format!("{}\n", server.json())).collect(),
                false => render(&servers, connections) + "\n",
            };
            let cleared = if clear { "\x1b[2J\x1b[H" } else { "" };
            // A closed pipe (`| head`) is the end of the show.
            if write!(std::io::stdout(), "{cleared}{text}").is_err() {
                return Ok(ExitCode::SUCCESS);
            }
            if once {
                let reached = servers.iter().all(|server| server.error.is_none());
                return Ok(if reached { ExitCode::SUCCESS } else { ExitCode::FAILURE });
            }
        }
    })
}

async fn look_at(servers: &mut [Server]) {
    // A few at a time would do, but one server that hangs must not hold up the others.
    let mut tasks = Vec::new();
    for server in servers.iter() {
        let (known, data, connections) = (server.client.clone(), server.data.clone(), server.connections);
        tasks.push(tokio::spawn(async move { ask(known, &data, connections).await }));
    }
    for (server, task) in servers.iter_mut().zip(tasks) {
        match task.await.unwrap_or_else(|error| Err(error.to_string())) {
            Ok((client, reply)) => {
                server.client = Some(client);
                server.saw(reply);
            }
            Err(error) => server.lost(error),
        }
    }
}

/// The statistics of the server with this data port.
async fn ask(
    known: Option<ControlClient<Channel>>,
    data: &HostPort,
    connections: bool,
) -> Result<(ControlClient<Channel>, pb::StatsReply), String> {
    let mut client = match known {
        Some(client) => client,
        None => {
            let channel = remote::channel(data, PATIENCE).map_err(|e| e.to_string())?;
            // A thousand connections with long names take a few hundred kilobytes.
            ControlClient::new(channel).max_decoding_message_size(64 << 20)
        }
    };
    let request = pb::StatsRequest { without_connections: !connections };
    let reply = client.stats(request).await.map_err(|status| remote::explain(&status))?;
    Ok((client, reply.into_inner()))
}

struct Server {
    /// As it was given.
    address: HostPort,
    data: HostPort,
    /// To its data port, once it has answered.
    client: Option<ControlClient<Channel>>,
    connections: bool,
    before: Option<Look>,
    now: Option<Look>,
    error: Option<String>,
}

struct Look {
    at: Instant,
    reply: pb::StatsReply,
    metrics: BTreeMap<String, pb::metric::Value>,
}

impl Server {
    fn new(Target { address, data }: Target, connections: bool) -> Self {
        Self { address, data, client: None, connections, before: None, now: None, error: None }
    }

    fn saw(&mut self, mut reply: pb::StatsReply) {
        let metrics = std::mem::take(&mut reply.metrics).into_iter().filter_map(|m| Some((m.name, m.value?))).collect();
        let look = Look { at: Instant::now(), reply, metrics };
        let restarted = self.now.as_ref().is_some_and(|now| now.incarnation() != look.incarnation());
        self.before = if restarted { None } else { self.now.take() };
        self.now = Some(look);
        self.error = None;
    }

    fn json(&self) -> serde_json::Value {
        let Some(now) = self.now.as_ref() else {
            return json!({"address": self.address.to_string(), "error": self.error});
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
            "address": self.address.to_string(), "task": server.task, "protocol": server.protocol, "pid": server.pid,
            "uptime_ms": server.uptime_ms, "version": now.reply.build.as_ref().map(|build| build.version.clone()),
            "metrics": metrics.collect::<serde_json::Map<_, _>>(),
            "connections": self.connections.then(|| connections.collect::<Vec<_>>()),
        })
    }

    fn lost(&mut self, error: String) {
        // A restarted task has another data port.
        (self.client, self.before, self.now, self.error) = (None, None, None, Some(error));
    }
}

impl Look {
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

fn render(servers: &[Server], connections: bool) -> String {
    let mut rows: Vec<Vec<String>> = vec![HEADER.map(str::to_owned).to_vec()];
    let mut notes = String::new();
    for server in servers {
        match (&server.error, &server.before, &server.now) {
            (Some(error), _, _) => notes += &format!("{}: {error}\n", server.address),
            (None, Some(before), Some(now)) => {
                rows.push(row(before, now));
            }
            _ => notes += &format!("{}: just (re)started; rates follow with the next update\n", server.address),
        }
    }
    let mut text = columns(&rows);
    if connections {
        for server in servers {
            if let (Some(before), Some(now)) = (&server.before, &server.now) {
                text += &format!("\n{}\n{}", server.address, connection_table(before, now));
            }
        }
    }
    text + &notes
}

/// What a counter has grown by. A server that was restarted meanwhile counts from 0 again: nothing.
fn growth(before: u64, now: u64) -> u64 {
    now.saturating_sub(before)
}

fn row(before: &Look, now: &Look) -> Vec<String> {
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

fn quantiles(before: &Look, now: &Look, name: &str) -> String {
    let (then, now) = (before.buckets(name), now.buckets(name));
    let during = Distribution { sum: 0, buckets: std::array::from_fn(|i| growth(then[i], now[i])) };
    if during.count() == 0 {
        return "–".to_owned();
    }
    let show = |q| during.quantile(q).map_or_else(|| "> 1 min".to_owned(), duration);
    format!("{}/{}", show(0.5), show(0.99))
}

fn connection_table(before: &Look, now: &Look) -> String {
    let seconds = (now.at - before.at).as_secs_f64().max(1e-3);
    let then: BTreeMap<&str, &pb::Connection> =
        before.reply.connections.iter().map(|c| (c.address.as_str(), c)).collect();
    let rate = |c: &pb::Connection, bytes: fn(&pb::Connection) -> u64| {
        let earlier = then.get(c.address.as_str()).map_or(0, |c| bytes(c));
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
    use super::*;

    fn look(at: Instant, calls: u64, buckets: &[(usize, u64)]) -> Look {
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
        Look { at, reply: pb::StatsReply { server: Some(server), ..Default::default() }, metrics }
    }

    #[test]
    fn rates_and_quantiles_are_those_of_the_interval() {
        let begun = Instant::now();
        let before = look(begun, 100, &[(20, 1000)]);
        let now = look(begun + Duration::from_secs(2), 300, &[(2, 90), (6, 10), (20, 1000)]);
        let row = row(&before, &now);
        assert_eq!(row[..6], ["/job:ps/task:0 grpc++", "1m01s", "2", "0", "0", "100"]);
        assert_eq!(row[10], "4.1µs/66µs");
        assert_eq!(row[11], "–");
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
