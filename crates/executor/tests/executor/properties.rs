//! Every run of every graph matches the reference: on one thread or many, with reports in any order, with a kernel
//! failing anywhere, in reused arenas.

use crate::graph::{Graph, Menu, graphs};
use crate::rig::Bench;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

fn check(graph: &Graph, lanes: u32, alone: bool, fails_at: u16) {
    let bench = Bench::new(graph, lanes);
    let fails_at = match graph.nodes.len() {
        0 => None,
        nodes => u32::try_from(usize::from(fails_at) % nodes).ok(),
    };
    bench.start(1, None, alone)();
    bench.start(2, fails_at, alone)();
    // Arenas that saw a failure are as good as new; concurrent runs do not interfere.
    let running: Vec<_> = (3..7).map(|seed| bench.start(seed, None, alone)).collect();
    running.into_iter().for_each(|check| check());
    let running: Vec<_> = (7..10).map(|seed| bench.start(seed, fails_at, alone)).collect();
    // Dropping the executor does not wait for runs in flight.
    drop(bench);
    running.into_iter().for_each(|check| check());
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, max_shrink_time: 60_000, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(150))]

    #[test]
    fn straight(graph in graphs(Menu { asynchronous: false, expensive: false }), fails_at: u16) {
        check(&graph, 4, false, fails_at);
    }

    #[test]
    fn asynchronous_kernels(graph in graphs(Menu { asynchronous: true, expensive: false }), fails_at: u16) {
        check(&graph, 1, false, fails_at);
    }

    #[test]
    fn everything_one_thread_at_a_time(graph in graphs(Menu { asynchronous: true, expensive: true }), fails_at: u16) {
        check(&graph, 4, true, fails_at);
    }

    #[test]
    fn shared_out(graph in graphs(Menu { asynchronous: false, expensive: true }), fails_at: u16) {
        check(&graph, 4, false, fails_at);
    }

    #[test]
    fn everything_shared_out(graph in graphs(Menu { asynchronous: true, expensive: true }), fails_at: u16) {
        check(&graph, 3, false, fails_at);
    }
}

/// Guards the properties above against holding vacuously.
#[test]
fn random_graphs_take_the_rare_paths() {
    let _reached = starwire_marks::expect("a kernel reports before its call returns");
    let mut runner = TestRunner::new(config(300));
    let everything = (graphs(Menu { asynchronous: true, expensive: true }), any::<u16>());
    let result = runner.run(&everything, |(graph, fails_at)| {
        check(&graph, 3, false, fails_at);
        Ok(())
    });
    result.unwrap();
}
