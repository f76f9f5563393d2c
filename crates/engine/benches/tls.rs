//! The cost of TLS: two engines over loopback TCP, plain and with TLS in turns, so that both see the same machine.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "a measurement prints and may panic, and its numbers are small"
)]

#[allow(dead_code)]
#[path = "../tests/engine/tls/authority.rs"]
mod authority;
#[allow(dead_code)]
#[path = "../tests/engine/harness.rs"]
mod harness;

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use authority::{Authority, Identity};
use harness::*;

const PS: &str = "/job:ps/replica:0/task:0";
const WORKER: &str = "/job:worker/replica:0/task:0";
/// Turns of both, and how long each lasts.
const TURNS: usize = 21;
const TURN: Duration = Duration::from_millis(150);

/// Tensors of a step, and their bytes.
const CASES: [(usize, usize); 5] = [(0, 0), (1, 4 << 10), (100, 4 << 10), (10, 100_000), (4, 10 << 20)];

struct Pair {
    _ps: Task,
    _worker: Task,
    channel: Channel,
    step: i64,
}

fn pair(driver: &str, identities: Option<&[Identity; 2]>) -> Pair {
    let own = [
        ("STARWIRE_DRIVER", driver),
        ("STARWIRE_UNIX", "off"),
        ("STARWIRE_PORTS", "one"),
        ("STARWIRE_REACTORS", "1"),
        ("STARWIRE_TLS_PEERS", "bench.example"),
    ];
    let mut number = 0;
    let mut start = |name: &str, index: usize| {
        let env = identities.map_or_else(|| own.to_vec(), |both| both[index].env(&own));
        Task::start_behind(name, "grpc++", 1, &env, ["127.0.0.1:0", ELSEWHERE], |port| {
            number = port.number();
            std::mem::forget(UnixListener::bind(port.grpc_address().trim_start_matches("unix:")).unwrap());
        })
        .unwrap()
    };
    let worker = start(WORKER, 1);
    let ps = start(PS, 0);
    let channel = worker.engine().channel(PS, &format!("127.0.0.1:{number}")).unwrap();
    Pair { _ps: ps, _worker: worker, channel, step: 0 }
}

impl Pair {
    fn step(&mut self, count: usize, size: usize) {
        self.step += 1;
        if count == 0 {
            return assert_eq!(call(&self.channel, ECHO, b"", None).code, 0);
        }
        let waiters: Vec<_> =
            (0..count).map(|i| recv(&self.channel, self.step, &format!("edge_{i}_variable;{size}"), 0, 0).1).collect();
        for waiter in waiters {
            let end = waiter.wait();
            assert_eq!(end.code, 0, "{}", end.message);
        }
    }

    /// Steps per second in one turn.
    fn turn(&mut self, count: usize, size: usize) -> f64 {
        let (begin, mut steps) = (Instant::now(), 0);
        while begin.elapsed() < TURN {
            self.step(count, size);
            steps += 1;
        }
        f64::from(steps) / begin.elapsed().as_secs_f64()
    }
}

fn quartiles(mut of: Vec<f64>) -> [f64; 3] {
    of.sort_by(f64::total_cmp);
    [of[of.len() / 4], of[of.len() / 2], of[of.len() * 3 / 4]]
}

fn main() {
    let authority = Authority::new("bench");
    let identities = [authority.identity("bench.example"), authority.identity("bench.example")];
    println!("{TURNS} turns of {} ms each; with TLS / plain: median of the ratios (quartiles)", TURN.as_millis());
    for driver in ["epoll", "io_uring"] {
        let (mut plain, mut sealed) = (pair(driver, None), pair(driver, Some(&identities)));
        for (count, size) in CASES {
            plain.step(count, size);
            sealed.step(count, size);
            let turns: Vec<_> = (0..TURNS).map(|_| (plain.turn(count, size), sealed.turn(count, size))).collect();
            let [low, ratio, high] = quartiles(turns.iter().map(|(plain, sealed)| sealed / plain).collect());
            let [_, of_plain, _] = quartiles(turns.iter().map(|turn| turn.0).collect());
            let [_, of_tls, _] = quartiles(turns.iter().map(|turn| turn.1).collect());
            let megabytes = |steps: f64| steps * (count * size) as f64 / 1e6;
            println!(
                "{driver:>8} {count:>3} x {size:>8} B: {ratio:.2} ({low:.2} to {high:.2}); plain {of_plain:.0} steps/s {:.0} MB/s, TLS {of_tls:.0} steps/s {:.0} MB/s",
                megabytes(of_plain),
                megabytes(of_tls),
            );
        }
    }
}
