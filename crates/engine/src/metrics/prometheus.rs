//! The text format that Prometheus scrapes.

use std::fmt::Write;

use super::cells::Distribution;
use super::{Description, OF_PEERS, PeerFacts, Sample, Value};

/// `labels`: names and values on every line.
pub fn render(samples: &[Sample], labels: &[(&str, &str)]) -> String {
    let labels = join(labels);
    let mut out = String::new();
    for sample in samples {
        let name = sample.description.name;
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(out, "# HELP {name} {}\n# TYPE {name} {}", sample.description.help, sample.value.type_name());
        let _ = match &sample.value {
            Value::Counter(n) => writeln!(out, "{name}{{{labels}}} {n}"),
            Value::Gauge(n) => writeln!(out, "{name}{{{labels}}} {n}"),
            Value::Histogram(d) => {
                histogram(&mut out, name, &labels, d);
                Ok(())
            }
        };
    }
    out
}

/// A gauge that nobody counts.
pub fn render_gauge(description: &Description, labels: &[(&str, &str)], value: u64) -> String {
    let Description { name, help, .. } = description;
    format!("# HELP {name} {help}\n# TYPE {name} gauge\n{name}{{{}}} {value}\n", join(labels))
}

/// The series of each peer.
pub fn render_peers(peers: &[PeerFacts], labels: &[(&str, &str)]) -> String {
    let labels = join(labels);
    let mut out = String::new();
    let numbers: [fn(&PeerFacts) -> u64; OF_PEERS.len()] =
        [|peer| peer.bytes_in, |peer| peer.bytes_out, |peer| peer.connections, |peer| peer.in_flight];
    for (Description { name, kind, help }, number) in OF_PEERS.iter().zip(numbers) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {}", Value::zero(*kind).type_name());
        for peer in peers {
            let _ = writeln!(out, "{name}{{{labels},peer=\"{}\"}} {}", escape(&peer.peer), number(peer));
        }
    }
    out
}

/// The same as OpenMetrics, which calls a family of counters by its name without `_total`, and marks the end.
pub fn to_openmetrics(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some(what), Some(name), Some(rest)) => {
                let _ = writeln!(out, "# {what} {} {rest}", name.strip_suffix("_total").unwrap_or(name));
            }
            _ => {
                let _ = writeln!(out, "{line}");
            }
        }
    }
    out += "# EOF\n";
    out
}

fn join(labels: &[(&str, &str)]) -> String {
    let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escape(value))).collect();
    labels.join(",")
}

fn histogram(out: &mut String, name: &str, labels: &str, d: &Distribution) {
    let comma = if labels.is_empty() { "" } else { "," };
    let mut below = 0u64;
    for (i, n) in d.buckets.iter().enumerate() {
        below = below.wrapping_add(*n);
        let bound = Distribution::bound(i).map_or_else(|| "+Inf".to_owned(), |nanos| seconds(nanos).to_string());
        let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {below}");
    }
    let _ = writeln!(out, "{name}_sum{{{labels}}} {}\n{name}_count{{{labels}}} {below}", seconds(d.sum));
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, Recorder};
    use super::*;
    use std::time::Duration;

    fn line<'a>(text: &'a str, start: &str) -> &'a str {
        text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("no line {start} in\n{text}"))
    }

    #[test]
    fn lines_as_prometheus_reads_them() {
        let metrics = Metrics::default();
        let recorder: Recorder = metrics.recorder();
        recorder.calls_sent.add(3);
        recorder.connections_in.set(-1);
        recorder.call_time.record(Duration::from_micros(1));
        recorder.call_time.record(Duration::from_millis(1));
        let text = render(&metrics.snapshot(), &[("protocol", "grpc++"), ("task", "a\"b\\c\nd")]);
        let labels = r#"protocol="grpc++",task="a\"b\\c\nd""#;
        assert_eq!(line(&text, "starwire_calls_sent_total"), format!("starwire_calls_sent_total{{{labels}}} 3"));
        assert_eq!(line(&text, "starwire_connections_in"), format!("starwire_connections_in{{{labels}}} -1"));
        assert!(text.contains("# TYPE starwire_calls_sent_total counter\n"));
        assert!(text.contains("# TYPE starwire_call_seconds histogram\n"));
        let bucket =
            |le: &str| line(&text, &format!("starwire_call_seconds_bucket{{{labels},le=\"{le}\"}}")).to_owned();
        assert!(bucket("0.000001024").ends_with(" 1"));
        assert!(bucket("0.000524288").ends_with(" 1"));
        assert!(bucket("0.001048576").ends_with(" 2"));
        assert!(bucket("+Inf").ends_with(" 2"));
        assert!(line(&text, "starwire_call_seconds_sum").ends_with(" 0.001001"));
        assert!(line(&text, "starwire_call_seconds_count").ends_with(" 2"));
    }

    #[test]
    fn openmetrics_differ_in_the_names_of_counters() {
        let metrics = Metrics::default();
        metrics.recorder().calls_sent.add(3);
        let text = to_openmetrics(&render(&metrics.snapshot(), &[]));
        assert!(text.contains("# TYPE starwire_calls_sent counter\nstarwire_calls_sent_total{} 3\n"), "{text}");
        assert!(text.contains("# HELP starwire_calls_sent Method calls sent.\n"));
        assert!(text.contains("# TYPE starwire_connections_in gauge\nstarwire_connections_in{} 0\n"));
        assert!(text.contains("# TYPE starwire_call_seconds histogram\n"));
        assert!(text.ends_with("\n# EOF\n") && text.matches("# EOF").count() == 1);
        // A counter without the suffix would be lost.
        let mut lines = text.lines().peekable();
        while let Some(line) = lines.next() {
            if let Some(name) = line.strip_prefix("# TYPE ").and_then(|rest| rest.strip_suffix(" counter")) {
                assert!(lines.peek().is_some_and(|next| next.starts_with(&format!("{name}_total{{"))), "{name}");
            }
        }
    }

    #[test]
    fn without_labels_too() {
        let text = render(&Metrics::default().snapshot(), &[]);
        assert_eq!(line(&text, "starwire_calls_sent_total"), "starwire_calls_sent_total{} 0");
        assert_eq!(line(&text, "starwire_call_seconds_bucket"), "starwire_call_seconds_bucket{le=\"0.000001024\"} 0");
    }

    #[test]
    fn a_peer_has_a_line_of_each_kind() {
        let peer = PeerFacts { peer: "/job:\"x\"".to_owned(), bytes_in: 1, bytes_out: 2, connections: 3, in_flight: 4 };
        let text = render_peers(&[peer], &[("task", "t")]);
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let labels = r#"{task="t",peer="/job:\"x\""}"#;
        assert_eq!(
            lines,
            [
                format!("starwire_peer_bytes_received_total{labels} 1"),
                format!("starwire_peer_bytes_sent_total{labels} 2"),
                format!("starwire_peer_connections{labels} 3"),
                format!("starwire_peer_requests_in_flight{labels} 4"),
            ]
        );
        assert!(text.contains("# TYPE starwire_peer_bytes_sent_total counter\n"));
    }
}
