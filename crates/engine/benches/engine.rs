//! Two engines in one process over real sockets: the cost of the transport without TensorFlow.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a test may panic, and its numbers are small"
)]

#[allow(dead_code)]
#[path = "../tests/engine/harness.rs"]
mod harness;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use harness::*;

const PS: &str = "/job:ps/replica:0/task:0";
const WORKER: &str = "/job:worker/replica:0/task:0";
const ROADS: [(&str, &str); 4] = [("epoll", "off"), ("epoll", "auto"), ("io_uring", "off"), ("io_uring", "auto")];

fn main() {
    divan::main();
}

fn pair(driver: &str, unix: &str) -> (Task, Task) {
    let env = [
        ("STARWIRE_DRIVER", driver),
        ("STARWIRE_UNIX", unix),
        ("NETWORK_PS_CORE_NUMBER", "1"),
        ("NETWORK_WORKER_CORE_NUMBER", "1"),
    ];
    let ps = Task::start(PS, &env);
    let worker = Task::start(WORKER, &env);
    worker.knows(PS, &ps);
    (ps, worker)
}

#[divan::bench(args = ROADS, sample_count = 200, sample_size = 5)]
fn round_trip_of_an_empty_call(bencher: Bencher, (driver, unix): (&str, &str)) {
    let (_ps, worker) = pair(driver, unix);
    let channel = worker.channel(PS);
    bencher.bench_local(|| assert_eq!(call(&channel, ECHO, b"", None).code, 0));
}

fn tensors(bencher: Bencher, (driver, unix): (&str, &str), count: usize, size: usize) {
    let (_ps, worker) = pair(driver, unix);
    let channel = worker.channel(PS);
    let keys: Vec<String> = (0..count).map(|i| format!("/job:ps/replica:0/task:0/device:CPU:0;0123456789abcdef;/job:worker/replica:0/task:0/device:CPU:0;edge_{i}_variable;{size}")).collect();
    let mut step = 0;
    bencher.counter(ItemsCount::new(count)).counter(BytesCount::new(count * size)).bench_local(|| {
        step += 1;
        let waiters: Vec<_> = keys.iter().map(|k| recv(&channel, step, k, 0, 0).1).collect();
        for waiter in waiters {
            assert_eq!(waiter.wait().code, 0);
        }
    });
}

#[divan::bench(args = ROADS, sample_count = 50, sample_size = 1)]
fn a_thousand_tensors_of_4_kb(bencher: Bencher, road: (&str, &str)) {
    tensors(bencher, road, 1000, 4096);
}

#[divan::bench(args = ROADS, sample_count = 30, sample_size = 1)]
fn four_tensors_of_10_mb(bencher: Bencher, road: (&str, &str)) {
    tensors(bencher, road, 4, 10 << 20);
}
