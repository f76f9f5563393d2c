//! The metrics of two servers match a known amount of traffic between them.

use std::time::{Duration, Instant};

use crate::harness::{self, Channel, ECHO, PATIENCE, Task, call, recv};

const SERVER: &str = "/job:starctl/replica:0/task:0";
const CLIENT: &str = "/job:starctl/replica:0/task:1";
const CALLS: i64 = 7;
const STEPS: i64 = 5;
const SMALL: (usize, usize) = (20, 1000);
/// Large enough to be lent in a block of its own.
const LARGE: (usize, usize) = (3, 200_000);

fn start(task: &str, unix: &str) -> Task {
    Task::start(task, &[("STARWIRE_UNIX", unix)])
}

/// The value of a metric whose line has only the common labels.
fn number(of: &Task, name: &str) -> f64 {
    let text = of.engine().metrics_text();
    let line = text
        .lines()
        .find(|line| line.starts_with(&format!("{name}{{")))
        .unwrap_or_else(|| panic!("no {name} in\n{text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

fn eventually(of: &Task, name: &str, expected: i64) {
    let begun = Instant::now();
    while number(of, name) != expected as f64 {
        assert!(begun.elapsed() < PATIENCE, "{name} is {}, not {expected}", number(of, name));
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn traffic(client: &Task, channel: &Channel) {
    for _ in 0..CALLS {
        let before = number(client, "starwire_sleeps_total");
        assert_eq!(call(channel, ECHO, b"", None).code, 0);
        harness::eventually("the reactor goes to sleep", || number(client, "starwire_sleeps_total") > before);
    }
    for (count, size) in [SMALL, LARGE] {
        for step in 0..STEPS {
            let under_way: Vec<_> =
                (0..count).map(|i| recv(channel, step, &format!("edge_{i};{size}"), 0, 0)).collect();
            for (_, waiter) in under_way {
                assert_eq!(waiter.wait().parts[0].len(), size);
            }
        }
    }
}

#[test]
fn both_sides_count_the_same_traffic_and_large_tensors_are_never_copied() {
    for unix in ["off", "auto"] {
        let (server, client) = (start(SERVER, unix), start(CLIENT, unix));
        client.knows(SERVER, &server);
        if unix == "auto" {
            harness::eventually("the unix socket", || harness::unix_sockets(&server) == 1);
        }
        traffic(&client, &client.channel(SERVER));

        let tensors = STEPS * (SMALL.0 + LARGE.0) as i64;
        let small = STEPS * (SMALL.0 * SMALL.1) as i64;
        let payload = small + STEPS * (LARGE.0 * LARGE.1) as i64;
        for (name, expected) in [
            ("starwire_connects_total", 1),
            ("starwire_connections_out", 1),
            ("starwire_calls_sent_total", CALLS),
            ("starwire_tensors_requested_total", tensors),
            ("starwire_replies_received_total", CALLS + tensors),
            ("starwire_error_replies_received_total", 0),
            ("starwire_ended_locally_total", 0),
            ("starwire_requests_in_flight", 0),
            ("starwire_payload_bytes_received_total", payload),
            ("starwire_copied_bytes_received_total", small),
            ("starwire_keys_interned_total", (SMALL.0 + LARGE.0) as i64),
            ("starwire_call_seconds_count", CALLS),
            ("starwire_tensor_seconds_count", tensors),
            ("starwire_connect_seconds_count", 1),
        ] {
            eventually(&client, name, expected);
        }
        for (name, expected) in [
            ("starwire_accepts_total", 1),
            ("starwire_connections_in", 1),
            ("starwire_calls_received_total", CALLS),
            ("starwire_tensor_requests_received_total", tensors),
            ("starwire_replies_sent_total", CALLS + tensors),
            ("starwire_requests_unanswered", 0),
            ("starwire_payload_bytes_sent_total", payload),
            ("starwire_copied_bytes_sent_total", small),
        ] {
            eventually(&server, name, expected);
        }
        // Handshake and frames add to the payload.
        let borrowed = number(&client, "starwire_borrowed_bytes_total");
        assert_eq!(borrowed > 0.0, unix == "auto", "large tensors of tasks of one host do not go through the socket");
        assert_eq!(number(&server, "starwire_lent_bytes_total"), borrowed);
        assert!(number(&client, "starwire_bytes_received_total") + borrowed > payload as f64);
        harness::eventually("the client counts all bytes", || {
            number(&client, "starwire_bytes_received_total") == number(&server, "starwire_bytes_sent_total")
        });
        assert!(number(&client, "starwire_call_seconds_sum") > 0.0);
        // At least this thread woke the client's reactor.
        assert!(number(&client, "starwire_wakes_total") > 0.0);
        assert!(number(&client, "starwire_wakes_total") <= number(&client, "starwire_sleeps_total"));
        assert!(number(&client, "starwire_sleeps_total") <= number(&client, "starwire_waits_total"));
    }
}

#[test]
fn a_lost_peer_shows() {
    let (server, client) = (start(SERVER, "off"), start(CLIENT, "off"));
    client.knows(SERVER, &server);
    let channel = client.channel(SERVER);
    assert_eq!(call(&channel, ECHO, b"", None).code, 0);
    drop(server);
    eventually(&client, "starwire_connections_out", 0);
    assert_ne!(call(&channel, ECHO, b"", None).code, 0);
    eventually(&client, "starwire_ended_locally_total", 1);
    assert!(number(&client, "starwire_connect_failures_total") >= 1.0);
    eventually(&client, "starwire_requests_in_flight", 0);
}
