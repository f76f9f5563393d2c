//! Counters, gauges and latencies, cheap enough for the hot path: each writer has its own cells, which are added up on
//! request.

mod cells;
mod connections;
mod list;
mod process;
mod prometheus;

use std::fmt::{self, Write};
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_utils::CachePadded;

pub use cells::{BUCKETS, Counter, Distribution, Gauge, Histogram};
pub use connections::{
    ConnectionEntry, ConnectionFacts, Connections, Direction, MAX_PEERS, OTHER_PEERS, PeerFacts, State,
};
pub use list::{BUILD_INFO, Cells, LIST, OF_PEERS, TLS_EXPIRY};
pub use process::render as render_process;
pub use prometheus::{
    render as render_prometheus, render_gauge as render_prometheus_gauge, render_peers as render_prometheus_peers,
    to_openmetrics,
};

/// The static description of a metric.
#[derive(Debug, PartialEq, Eq)]
pub struct Description {
    pub name: &'static str,
    pub kind: Kind,
    pub help: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub description: &'static Description,
    pub value: Value,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Counter(u64),
    Gauge(i64),
    Histogram(Box<Distribution>),
}

impl Value {
    fn type_name(&self) -> &'static str {
        match self {
            Value::Counter(_) => "counter",
            Value::Gauge(_) => "gauge",
            Value::Histogram(_) => "histogram",
        }
    }

    fn zero(kind: Kind) -> Self {
        match kind {
            Kind::Counter => Value::Counter(0),
            Kind::Gauge => Value::Gauge(0),
            Kind::Histogram => Value::Histogram(Box::default()),
        }
    }
}

/// All metrics of an engine.
#[derive(Default)]
pub struct Metrics {
    writers: Mutex<Vec<Arc<CachePadded<Cells>>>>,
    /// For threads that count rarely.
    common: Mutex<Option<Recorder>>,
}

impl Metrics {
    /// Counts on a thread that has no recorder of its own.
    pub fn count(&self, f: impl FnOnce(&Cells)) {
        let mut common = self.common.lock().unwrap_or_else(PoisonError::into_inner);
        f(common.get_or_insert_with(|| self.recorder()));
    }

    /// A new set of cells for a thread. Its counts stay when the recorder is dropped.
    pub fn recorder(&self) -> Recorder {
        let cells = Arc::new(CachePadded::new(Cells::default()));
        self.lock().push(Arc::clone(&cells));
        Recorder { cells, not_sync: PhantomData }
    }

    /// The sums over all writers, in the order of [`LIST`].
    pub fn snapshot(&self) -> Vec<Sample> {
        let mut sums: Vec<Sample> =
            LIST.iter().map(|description| Sample { description, value: Value::zero(description.kind) }).collect();
        for cells in self.lock().iter() {
            for (sum, cell) in sums.iter_mut().zip(cells.each()) {
                match (&mut sum.value, cell) {
                    (Value::Counter(sum), list::Cell::Counter(cell)) => *sum = sum.wrapping_add(cell.get()),
                    (Value::Gauge(sum), list::Cell::Gauge(cell)) => *sum = sum.wrapping_add(cell.get()),
                    (Value::Histogram(sum), list::Cell::Histogram(cell)) => sum.merge(&cell.get()),
                    _ => unreachable!("cells and descriptions come from one list"),
                }
            }
        }
        sums
    }

    /// The sum of a gauge over all writers.
    #[cfg(test)]
    pub fn gauge(&self, of: fn(&Cells) -> &Gauge) -> i64 {
        self.lock().iter().map(|cells| of(cells).get()).sum()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<CachePadded<Cells>>>> {
        self.writers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Metrics of {} writers", self.lock().len())
    }
}

/// The right to count: belongs to one thread at a time (it can be sent, not shared), which is why adding needs no
/// atomic read-modify-write.
#[derive(Debug)]
pub struct Recorder {
    cells: Arc<CachePadded<Cells>>,
    not_sync: PhantomData<std::cell::Cell<()>>,
}

impl Deref for Recorder {
    type Target = Cells;

    fn deref(&self) -> &Cells {
        &self.cells
    }
}

/// The table of `docs/metrics.md`.
pub fn markdown_table() -> String {
    let mut out = String::from("| name | kind | meaning |\n|---|---|---|\n");
    for description in [BUILD_INFO, TLS_EXPIRY].iter().chain(LIST).chain(&OF_PEERS) {
        let kind = Value::zero(description.kind).type_name();
        // Writing to a String cannot fail.
        let _ = writeln!(out, "| `{}` | {kind} | {} |", description.name, description.help);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::time::Duration;

    fn value(metrics: &Metrics, name: &str) -> Value {
        metrics.snapshot().into_iter().find(|s| s.description.name == name).unwrap().value
    }

    #[test]
    fn anybody_may_count() {
        let metrics = Metrics::default();
        for _ in 0..3 {
            metrics.count(|cells| cells.fused_tensors_sent.add(2));
        }
        assert_eq!(value(&metrics, "starwire_fused_tensors_sent_total"), Value::Counter(6));
    }

    #[test]
    fn writers_are_summed_and_outlive_their_threads() {
        let metrics = Arc::new(Metrics::default());
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let recorder = metrics.recorder();
                std::thread::spawn(move || {
                    for _ in 0..1000 {
                        recorder.calls_sent.add(2);
                        recorder.requests_in_flight.add(1);
                        recorder.call_time.record(Duration::from_micros(5));
                    }
                    recorder.requests_in_flight.add(-400);
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(value(&metrics, "starwire_calls_sent_total"), Value::Counter(8000));
        assert_eq!(value(&metrics, "starwire_requests_in_flight"), Value::Gauge(2400));
        let Value::Histogram(d) = value(&metrics, "starwire_call_seconds") else { panic!("not a histogram") };
        assert_eq!((d.count(), d.sum), (4000, 4000 * 5_000));
    }

    #[test]
    fn names_follow_the_rules_and_are_unique() {
        let mut seen = HashSet::new();
        for d in LIST.iter().chain(&OF_PEERS) {
            assert!(seen.insert(d.name), "{} is there twice", d.name);
            assert!(
                d.name.starts_with("starwire_") && d.name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'),
                "{}",
                d.name
            );
            assert_eq!(d.kind == Kind::Counter, d.name.ends_with("_total"), "{}", d.name);
            assert_eq!(d.kind == Kind::Histogram, d.name.ends_with("_seconds"), "{}", d.name);
            assert!(d.help.ends_with('.') && !d.help.contains('\n') && !d.help.contains('\\'), "{}", d.name);
        }
    }
}
