use std::collections::BTreeSet;
use std::time::Duration;

use super::build::Build;
use super::{STYLES, roles};
use crate::generate::training_case;
use starwire_planner::graph::Class::Plain;
use starwire_planner::graph::Graph;
use starwire_planner::parts::{MOST_VALUES, UNMEASURED_BYTES, worthwhile_bytes};
use starwire_planner::placement::{Place, Reason};
use starwire_planner::star::{self, Style, Way};

/// Guards the property of calls in parts against holding vacuously.
#[test]
fn random_graphs_have_calls_in_parts() {
    let mut parts = [0, 0];
    let mut levels = 0;
    for seed in 0..200 {
        let graph = training_case(seed, 120).graph();
        for (number, style) in STYLES.into_iter().enumerate() {
            let [whole, split] =
                [0, 512].map(|split_bytes| star::plan(&graph, &roles(&graph), style, split_bytes).unwrap().calls);
            parts[number] += split.len() - whole.len().min(split.len());
            let rounds = |calls: &[star::Call]| calls.iter().map(|call| call.round).max().unwrap_or(0);
            levels += usize::from(rounds(&split) > rounds(&whole));
        }
    }
    assert!(parts.iter().all(|parts| *parts > 100), "{parts:?} more calls");
    assert!(levels > 10, "only {levels} plans have more rounds");
}

const MB: u64 = 1 << 20;

/// Pulls and pushes of variables of these sizes, after which a counter is updated, all on one server.
fn large_step(sizes: &[u64], references: bool) -> (Build, Vec<[u32; 2]>, u32) {
    let mut b = Build { references, ..Build::default() };
    let mut pairs = Vec::new();
    let (counter, all) = (b.variable(1), b.op(1, &[]));
    for size in sizes {
        let variable = b.variable(1);
        let read = b.read(variable);
        let gradient = b.op(0, &[(read, Plain)]);
        b.edges.last_mut().unwrap().bytes = Some(*size);
        let update = b.update(variable, &[gradient]);
        b.edges.last_mut().unwrap().bytes = Some(*size);
        b.after(update, all);
        pairs.push([read, update]);
    }
    let one = b.constant(1);
    let count = b.update(counter, &[one]);
    b.after(all, count);
    (b, pairs, count)
}

#[test]
fn large_values_get_separate_calls_and_small_ones_share_one() {
    let _reached = starwire_marks::expect("a call is split");
    for (references, style) in
        [(false, Style::Robust), (true, Style::Robust), (false, Style::Lite), (true, Style::Lite)]
    {
        let (b, pairs, count) = large_step(&[10 * MB, 40, 10 * MB, 50, 60, 10 * MB], references);
        let plan = b.check(style);
        let calls = |which: usize| pairs.iter().map(|pair| plan.calls_of[pair[which] as usize]).collect::<Vec<_>>();
        for which in [calls(0), calls(1)] {
            let large: BTreeSet<_> = [0, 2, 5].map(|at| which[at]).into();
            assert_eq!(large.len(), 3);
            assert!(which[1] == which[3] && which[3] == which[4] && !large.contains(&which[1]));
        }
        // The counter waits for all of them and so has its own round.
        let counted = &plan.calls[plan.calls_of[count as usize].unwrap() as usize];
        assert_eq!((plan.calls.len(), counted.round, counted.after.len()), (9, 3, 4));
    }
}

#[test]
fn the_worker_waits_for_the_parts() {
    // tf.group of the updates of two servers, on the first one: no call for it, in parts or not.
    for (style, size, calls) in
        [(Style::Robust, MB, 8), (Style::Lite, MB, 8), (Style::Robust, 4, 4), (Style::Lite, 4, 4)]
    {
        let mut b = Build::default();
        let all = b.op(1, &[]);
        for task in [1, 1, 2, 2] {
            let variable = b.variable(task);
            let read = b.read(variable);
            let gradient = b.op(0, &[(read, Plain)]);
            b.edges.last_mut().unwrap().bytes = Some(size);
            let update = b.update(variable, &[gradient]);
            b.edges.last_mut().unwrap().bytes = Some(size);
            b.after(update, all);
        }
        let plan = b.check(style);
        assert_eq!((plan.places[all as usize], plan.calls.len()), (Place::Moved, calls));
        assert_eq!(plan.calls.iter().map(|call| call.round).max(), Some(2));
    }
}

#[test]
fn parts_have_a_worthwhile_size() {
    let _reached = starwire_marks::expect("parts would run one after the other");
    let calls = |sizes: &[u64]| large_step(sizes, false).0.check(Style::Robust).calls.len();
    // A pull and a push: too little for two parts.
    assert_eq!(calls(&[MB - 1, MB]), 2);
    assert_eq!(calls(&[100 * MB]), 2);
    // Four parts each way, and the counter.
    assert_eq!(calls(&[MB / 2; 8]), 9);
    // At most 64 parts each way (and a partly filled one), even for the largest model.
    assert!(calls(&[MB; 1000]) <= 131);
}

#[test]
fn many_small_values_are_worth_parts_as_well() {
    let calls = |sizes: &[u64]| large_step(sizes, false).0.check(Style::Robust).calls.len();
    // Too little for two parts.
    assert_eq!(calls(&[4 << 10; 500]), 2);
    // Four parts each way, and the counter.
    assert_eq!(calls(&[4 << 10; 1024]), 9);
    // However many there are, values of a few bytes travel together.
    assert_eq!(calls(&[256; 8192]), 2);
    // Next to large ones, small ones still share a part.
    let mut mixed = vec![MB; 2];
    mixed.extend([4 << 10; 100]);
    assert_eq!(calls(&mixed), 7);
}

#[test]
fn parts_suit_the_path() {
    const GBIT: u64 = 125_000_000;
    let micros = Duration::from_micros;
    for (rate, round_trip, bytes) in [
        (1, 0, 32 << 10),
        (GBIT / 10, 1_000, 32 << 10),
        (GBIT, 200, 32 << 10),
        (GBIT, 1_000, 32 << 10),
        // Fewer calls do where a round trip is long.
        (GBIT, 10_000, 128 << 10),
        (GBIT * 5, 100, 128 << 10),
        (GBIT * 10, 50, 512 << 10),
        (GBIT * 40, 30, UNMEASURED_BYTES),
        (u64::MAX, 1_000_000, UNMEASURED_BYTES),
    ] {
        assert_eq!(worthwhile_bytes(rate, micros(round_trip)), bytes, "{rate} bytes/s, {round_trip} us");
    }
}

#[test]
fn small_shared_values_do_not_prevent_a_split() {
    // The push of each variable needs a rate that is read on the server, and a value of the worker's.
    let build = |size: Option<u64>| {
        let mut b = Build::default();
        let (rate, shared) = (b.variable(1), b.op(0, &[]));
        let rate = b.read(rate);
        for _ in 0..3 {
            let variable = b.variable(1);
            let read = b.read(variable);
            let gradient = b.op(0, &[(read, Plain)]);
            b.edges.last_mut().unwrap().bytes = Some(10 * MB);
            b.update(variable, &[gradient, rate, shared]);
            let last = b.edges.len() - 1;
            b.edges[last].bytes = size;
            b.edges[last - 2].bytes = Some(10 * MB);
        }
        b.check(Style::Robust)
    };
    let plan = build(Some(4));
    assert_eq!(plan.calls.len(), 7, "three pulls, one of the rate, three pushes");
    assert!(plan.calls[4..].iter().all(|call| call.feeds.iter().any(|(.., way)| *way == Way::Slot)));
    for large in [Some(MB), None] {
        assert_eq!(build(large).calls.len(), 5);
    }
}

#[test]
fn components_in_a_cycle_stay_together() {
    let _reached = starwire_marks::expect("parts would wait for each other");
    // Each of two values has an update that precedes the other's: two calls cannot both be first.
    let mut b = Build::default();
    let mut updates = Vec::new();
    for _ in 0..2 {
        let gradient = b.op(0, &[]);
        let shared = b.op(1, &[(gradient, Plain)]);
        b.edges.last_mut().unwrap().bytes = Some(10 * MB);
        updates.push([0, 1].map(|_| {
            let variable = b.variable(1);
            b.update(variable, &[shared])
        }));
    }
    b.after(updates[0][0], updates[1][0]);
    b.after(updates[1][1], updates[0][1]);
    let done = b.op(0, &[]);
    b.after(updates[0][1], done);
    b.after(updates[1][0], done);
    assert_eq!(b.check(Style::Robust).calls.len(), 1);
}

#[test]
fn a_large_graph_is_split_at_once() {
    let mut b = Build::default();
    for number in 0..30_000 {
        let variable = b.variable(1 + number % 2);
        let read = b.read(variable);
        let gradient = b.op(0, &[(read, Plain)]);
        b.edges.last_mut().unwrap().bytes = Some(1 << 10);
        b.update(variable, &[gradient]);
        b.edges.last_mut().unwrap().bytes = Some(1 << 10);
    }
    let graph = Graph::new(b.nodes, b.edges, None).unwrap();
    // Of 15,000 values for each server and direction, a call carries 8192.
    for (style, split_bytes, calls) in
        [(Style::Robust, 0, 8), (Style::Lite, 0, 8), (Style::Robust, 1 << 10, 256), (Style::Lite, 1 << 10, 256)]
    {
        // Takes a fraction of a second. Time that grew with the square of the graph would be minutes, which no test may
        // take.
        let plan = star::plan(&graph, &roles(&graph), style, split_bytes).unwrap();
        assert_eq!(plan.calls.len(), calls);
    }
}

#[test]
fn a_node_with_more_values_than_a_call_can_carry_is_left() {
    for (outputs, is_left) in [(MOST_VALUES as i32, false), (MOST_VALUES as i32 + 1, true)] {
        for style in STYLES {
            let mut b = Build::default();
            let (given, few) = (b.op(0, &[]), b.variable(1));
            let many = b.op(1, &[(given, Plain)]);
            let taker = b.op(0, &[]);
            (0..outputs).for_each(|output| b.input((many, output), taker, output, Plain));
            let update = b.update(few, &[given]);
            let graph = Graph::new(b.nodes, b.edges, None).unwrap();
            let plan = star::plan(&graph, &roles(&graph), style, 0).unwrap();
            let place = if is_left { Place::Left(Reason::Many) } else { Place::Called };
            assert_eq!(plan.places[many as usize], place);
            assert_eq!(plan.places[update as usize], Place::Called, "only that node");
        }
    }
}
