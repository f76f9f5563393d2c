//! The guarantees of [`fuse`](starwire_planner::fuse), on random graphs and on graphs that once broke it.

use std::collections::BTreeSet;

use proptest::prelude::*;

use crate::generate::{Case, Random, case};
use crate::simulate::{Luck, run};
use starwire_planner::fuse::{Fate, FuseLimits, FusePlan, Group, Reason, plan};
use starwire_planner::graph::{Class, Edge, Graph, Kind, Memory, Node};

/// Groups everything that it may, in a graph `without_hints`.
const GREEDY: FuseLimits = FuseLimits {
    message_us: 0,
    bytes_per_us: 1_000,
    node_us: 0,
    wait_us: u32::MAX,
    small_bytes: u64::MAX - 1,
    large_bytes: u64::MAX,
    group_bytes: u64::MAX,
    group_items: u32::MAX,
};

/// Limits of the size that users have by default.
const LIMITS: FuseLimits = FuseLimits {
    message_us: 100,
    wait_us: 500,
    small_bytes: 16 << 10,
    large_bytes: 256 << 10,
    group_bytes: 1 << 20,
    ..FuseLimits::FIXED
};

/// Nothing takes time and everything is small, so every permitted group is worthwhile.
fn without_hints(mut case: Case) -> Case {
    case.nodes.iter_mut().for_each(|node| node.cost_us = None);
    case.edges.iter_mut().for_each(|edge| edge.bytes = Some(0));
    case
}

/// Checks that the fused graph does what the unfused one does.
fn check(case: &Case, limits: &FuseLimits) -> FusePlan {
    let graph = case.graph();
    let plan = plan(&graph, limits).unwrap();
    for luck in (0..4).map(|seed| Luck { values: seed, order: seed }) {
        let plain = run(&graph, &case.hidden, None, luck);
        let fused = run(&graph, &case.hidden, Some(&plan), luck);
        for (ran, value) in &plain {
            assert_eq!(fused.get(ran), Some(value), "{ran:?} with {luck:?}");
        }
        assert_eq!(plain.len(), fused.len());
    }
    plan
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn fusing_changes_nothing(seed: u64, size in 10usize..150) {
        let case = case(seed, size);
        check(&case, &LIMITS);
        check(&without_hints(case), &GREEDY);
    }

    #[test]
    fn groups_keep_their_invariants(seed: u64, size in 10usize..150) {
        let graph = without_hints(case(seed, size)).graph();
        let plan = plan(&graph, &GREEDY).unwrap();
        let mut seen = BTreeSet::new();
        for (number, group) in (0u32..).zip(&plan.groups) {
            prop_assert!(group.items.len() > 1);
            for place in &group.items {
                let item = &plan.items[*place as usize];
                prop_assert_eq!(item.fate, Fate::Grouped(number));
                prop_assert!(seen.insert(*place));
                prop_assert_eq!((graph.node(item.src).task, item.task), (group.src_task, group.dst_task));
                prop_assert!(group.src_task != group.dst_task);
                for edge in item.edges.iter().map(|edge| graph.edge(*edge)) {
                    prop_assert_eq!(edge.src, item.src);
                    prop_assert_eq!(graph.node(edge.dst).task, item.task);
                    prop_assert!(edge.is_control() || edge.memory == group.memory);
                    prop_assert!(matches!(edge.class, Class::Plain | Class::String | Class::Control));
                    prop_assert!(!graph.node(edge.src).untouchable && !graph.node(edge.dst).untouchable);
                }
            }
        }
        // Every crossing edge is in exactly one item.
        let mut edges: Vec<u32> = plan.items.iter().flat_map(|item| item.edges.iter().copied()).collect();
        edges.sort_unstable();
        let crossing = (0u32..).zip(graph.edges()).filter(|(_, edge)| graph.crosses(edge)).map(|(number, _)| number);
        prop_assert!(edges.into_iter().eq(crossing));
        let grouped = plan.items.iter().filter(|item| matches!(item.fate, Fate::Grouped(_))).count();
        prop_assert_eq!(grouped, seen.len());
    }

    #[test]
    fn the_order_of_edges_does_not_matter(seed: u64, size in 10usize..150) {
        let mut case = case(seed, size);
        let named = |case: &Case| {
            let plan = plan(&case.graph(), &LIMITS).unwrap();
            let item = |number: &u32| {
                let item = &plan.items[*number as usize];
                (item.src, item.output, item.edges.len())
            };
            plan.groups.iter().map(|group| group.items.iter().map(item).collect()).collect::<Vec<Vec<_>>>()
        };
        let before = named(&case);
        let mut random = Random(seed);
        for at in (1..case.edges.len()).rev() {
            let other = random.below(at + 1);
            case.edges.swap(at, other);
        }
        prop_assert_eq!(named(&case), before);
    }
}

/// Guards the properties above against holding vacuously.
#[test]
fn random_graphs_cover_the_hard_cases() {
    let (mut groups, mut in_branches, mut in_loops, mut with_control, mut largest) = (0, 0, 0, 0, 0);
    for seed in 0..300 {
        let case = without_hints(case(seed, 100));
        let graph = case.graph();
        let plan = plan(&graph, &GREEDY).unwrap();
        groups += plan.groups.len();
        let trace = run(&graph, &case.hidden, None, Luck { values: seed, order: seed });
        assert!(graph.ids().all(|node| trace.keys().any(|(ran, _)| *ran == node) || in_a_loop(&graph, node)), "{seed}");
        for group in &plan.groups {
            let sources: BTreeSet<u32> = group.items.iter().map(|item| plan.items[*item as usize].src).collect();
            largest = largest.max(sources.len());
            with_control += usize::from(group.items.iter().any(|item| plan.items[*item as usize].output < 0));
            if sources.len() > 1 {
                let of = |node: u32| trace.iter().filter(move |((ran, _), _)| *ran == node);
                in_loops += usize::from(sources.iter().all(|node| of(*node).any(|((_, path), _)| !path.is_empty())));
                in_branches += usize::from(sources.iter().all(|node| of(*node).any(|(_, value)| value.is_none())));
            }
        }
    }
    assert!(
        groups > 1_000 && in_branches > 50 && in_loops > 50 && with_control > 100 && largest > 4,
        "{groups} groups, {in_branches} in branches, {in_loops} in loops, {with_control} with control, largest {largest}"
    );
}

/// Possibly in a loop, whose body may never run.
fn in_a_loop(graph: &Graph, node: u32) -> bool {
    graph.nodes()[..=node as usize].iter().any(|node| node.kind == Kind::Enter)
}

fn edge(src: u32, dst: u32, dst_input: i32) -> Edge {
    Edge { src, src_output: 0, dst, dst_input, class: Class::Plain, memory: Memory::Host, bytes: Some(64) }
}

fn nodes(kinds: &[(Kind, u32)]) -> Vec<Node> {
    kinds.iter().map(|(kind, task)| Node::of(*kind, *task)).collect()
}

/// The plan of a naive planner that looks only at sources and destinations.
fn everything(graph: &Graph) -> FusePlan {
    let mut all = plan(graph, &FuseLimits { group_items: 1, ..GREEDY }).unwrap();
    let numbers: Vec<u32> = (0..all.items.len() as u32).collect();
    let wanted = |number: &u32| all.items[*number as usize].task == 1;
    let items = numbers.into_iter().filter(wanted).collect();
    all.groups = vec![Group { src_task: 0, dst_task: 1, memory: Memory::Host, level: 0, items }];
    all
}

/// The graph runs; naively fused it deadlocks, so the check has teeth; as planned it runs, with this many groups.
fn trouble(nodes: Vec<Node>, edges: Vec<Edge>, hidden: &[(u32, u32)], groups: usize) {
    let case = without_hints(Case { nodes, edges, hidden: hidden.to_vec() });
    let graph = case.graph();
    let naive = everything(&graph);
    let same = (0..8)
        .map(|seed| Luck { values: seed, order: seed })
        .all(|luck| run(&graph, hidden, None, luck) == run(&graph, hidden, Some(&naive), luck));
    assert!(!same, "this graph is no trouble");
    assert_eq!(check(&case, &GREEDY).groups.len(), groups, "{}", plan(&graph, &GREEDY).unwrap().describe(&graph));
}

#[test]
fn an_item_is_not_tied_to_one_that_it_depends_on() {
    use Kind::Plain;
    // 0 → [1] → 2 → [3], and 4 → [5] independently.
    let nodes = nodes(&[(Plain, 0), (Plain, 1), (Plain, 0), (Plain, 1), (Plain, 0), (Plain, 1)]);
    trouble(nodes, vec![edge(0, 1, 0), edge(1, 2, 0), edge(2, 3, 0), edge(4, 5, 0)], &[], 1);
}

#[test]
fn a_value_that_leaves_a_loop_comes_after_all_of_it() {
    use Kind::{Enter, Exit, LoopCond, Merge, NextIteration, Plain, Switch};
    // Task 1 answers 1 → 2, which the loop of task 0 needs only in its body: the path to the exit 10 → 11 leads through
    // an iteration.
    let kinds = [
        (Plain, 0),
        (Plain, 0),
        (Plain, 1),
        (Enter, 0),
        (Enter, 0),
        (Merge, 0),
        (LoopCond, 0),
        (Switch, 0),
        (Plain, 0),
        (NextIteration, 0),
        (Exit, 0),
        (Plain, 1),
    ];
    let mut nodes = nodes(&kinds);
    nodes[3].detail = 1;
    nodes[4].detail = 1;
    nodes[4].stateful = true;
    let mut leave = edge(7, 10, 0);
    let mut stay = edge(7, 8, 0);
    (leave.src_output, stay.src_output) = (0, 1);
    let edges = vec![
        edge(1, 2, 0),
        edge(0, 3, 0),
        edge(2, 4, 0),
        edge(3, 5, 0),
        edge(9, 5, 1),
        edge(5, 6, 0),
        edge(5, 7, 0),
        edge(6, 7, 1),
        stay,
        edge(4, 8, 1),
        edge(8, 9, 0),
        leave,
        edge(10, 11, 0),
    ];
    trouble(nodes, edges, &[], 0);
}

#[test]
fn an_item_behind_a_queue_is_not_tied_to_one_that_fills_it() {
    use Kind::Plain;
    // 0 → [1], which fills the queue that 2 waits for; 2 → [3].
    let mut nodes = nodes(&[(Plain, 0), (Plain, 1), (Plain, 0), (Plain, 1)]);
    nodes[1].stateful = true;
    nodes[2].blocking = true;
    trouble(nodes, vec![edge(0, 1, 0), edge(2, 3, 0)], &[(1, 2)], 0);
}

#[test]
fn a_pull_waits_for_the_input_unless_it_has_other_effects() {
    use Kind::Plain;
    // 0: a variable's value; 1: the next input, from which 2 is made; both go to 3, and 4 has an effect there.
    let mut nodes = nodes(&[(Plain, 0), (Plain, 0), (Plain, 0), (Plain, 1), (Plain, 1)]);
    nodes[1].blocking = true;
    nodes[4].stateful = true;
    let edges = vec![edge(1, 2, 0), edge(0, 3, 0), edge(2, 3, 1), edge(3, 4, 0)];
    let mut case = without_hints(Case { nodes, edges, hidden: Vec::new() });
    assert_eq!(check(&case, &GREEDY).groups.len(), 1);
    // Another effect that depends on the variable's value alone: the input could be waiting for it.
    case.nodes.extend([Node { stateful: true, ..Node::plain(1) }, Node::plain(1)]);
    case.edges.extend([edge(0, 5, 0), edge(5, 6, 0), edge(4, 6, 1)].map(|edge| Edge { bytes: Some(0), ..edge }));
    case.hidden.push((5, 1));
    assert_eq!(check(&case, &GREEDY).groups.len(), 0);
}

#[test]
fn an_item_that_may_be_dead_is_not_tied_to_a_live_one() {
    use Kind::{Plain, Switch};
    let nodes = nodes(&[(Plain, 0), (Plain, 0), (Switch, 0), (Plain, 0), (Plain, 1), (Plain, 1)]);
    trouble(nodes, vec![edge(0, 2, 0), edge(1, 2, 1), edge(2, 3, 0), edge(3, 4, 0), edge(0, 5, 0)], &[], 0);
}

#[test]
fn a_merge_of_two_conditions_is_a_new_condition() {
    use Kind::{Merge, Plain, Switch};
    // Merge(switch by 1, switch by 2): dead if both choose the other branch. 7 depends on it, 8 on nothing.
    let kinds =
        [(Plain, 0), (Plain, 0), (Plain, 0), (Switch, 0), (Switch, 0), (Merge, 0), (Plain, 0), (Plain, 1), (Plain, 1)];
    let edges = vec![
        edge(0, 3, 0),
        edge(1, 3, 1),
        edge(0, 4, 0),
        edge(2, 4, 1),
        edge(3, 5, 0),
        edge(4, 5, 1),
        edge(5, 6, 0),
        edge(6, 7, 0),
        edge(0, 8, 0),
    ];
    trouble(nodes(&kinds), edges, &[], 0);
}

#[test]
fn both_branches_together_are_no_condition() {
    use Kind::{Identity, Merge, Plain, Switch};
    // Merge(both branches of 1) is alive whenever 0 is, so it is tied to 9's item. One Switch gets its predicate
    // through an Identity.
    let kinds = [
        (Plain, 0),
        (Plain, 0),
        (Switch, 0),
        (Identity, 0),
        (Switch, 0),
        (Plain, 0),
        (Merge, 0),
        (Plain, 1),
        (Plain, 1),
        (Plain, 0),
    ];
    let mut other = edge(4, 6, 1);
    other.src_output = 1;
    let edges = vec![
        edge(0, 2, 0),
        edge(1, 2, 1),
        edge(1, 3, 0),
        edge(0, 4, 0),
        edge(3, 4, 1),
        edge(2, 5, 0),
        edge(5, 6, 0),
        other,
        edge(6, 7, 0),
        edge(9, 8, 0),
    ];
    let case = Case { nodes: nodes(&kinds), edges, hidden: Vec::new() };
    assert_eq!(check(&case, &GREEDY).groups.len(), 1);
}

#[test]
fn loops_are_fused_unless_something_in_them_may_block() {
    use Kind::{Enter, Exit, LoopCond, Merge, NextIteration, Plain, Switch};
    // 0 → enter 1 → merge 2 → cond 3, switch 4 → (exit 5 | 6 → 7 → next 8), where task 1 also needs 6 and 7.
    let kinds = [
        (Plain, 0),
        (Enter, 0),
        (Merge, 0),
        (LoopCond, 0),
        (Switch, 0),
        (Exit, 0),
        (Plain, 0),
        (Plain, 0),
        (NextIteration, 0),
        (Plain, 1),
        (Plain, 1),
    ];
    let mut stay = edge(4, 6, 0);
    stay.src_output = 1;
    let edges = [
        vec![edge(0, 1, 0), edge(1, 2, 0), edge(8, 2, 1), edge(2, 3, 0), edge(2, 4, 0), edge(3, 4, 1), edge(4, 5, 0)],
        vec![stay, edge(6, 7, 0), edge(7, 8, 0), edge(6, 9, 0), edge(7, 10, 0)],
    ];
    let mut case = Case { nodes: nodes(&kinds), edges: edges.concat(), hidden: Vec::new() };
    assert_eq!(check(&case, &LIMITS).groups.len(), 1);
    let not_fused = |case: &Case| {
        let plan = check(case, &LIMITS);
        assert!(
            plan.items.iter().all(|item| item.fate == Fate::Alone(Reason::Loop)),
            "{}",
            plan.describe(&case.graph())
        );
    };
    case.nodes[10].blocking = true;
    not_fused(&case);
    // If the next iteration waits for it, it cannot wait for anything there.
    case.nodes[10].blocking = false;
    case.nodes.push(Node { blocking: true, ..Node::plain(0) });
    case.edges.push(Edge { dst: 11, ..stay });
    not_fused(&case);
    case.edges.push(Edge { src_output: -1, dst_input: -1, class: Class::Control, ..edge(11, 8, 0) });
    assert_eq!(check(&case, &LIMITS).groups.len(), 1);
}

/// Tensors of `bytes[i]` bytes that are ready `ready[i]` microseconds after the start.
fn timed(items: &[(u32, Option<u64>)], limits: &FuseLimits) -> (Vec<Vec<u32>>, Vec<Fate>) {
    let (mut nodes, mut edges) = (Vec::new(), Vec::new());
    for (number, (ready, bytes)) in (0u32..).zip(items) {
        nodes.push(Node { cost_us: Some(*ready), ..Node::plain(0) });
        nodes.push(Node::plain(1));
        edges.push(Edge { bytes: *bytes, ..edge(2 * number, 2 * number + 1, 0) });
    }
    let plan = plan(&Graph::new(nodes, edges, None).unwrap(), limits).unwrap();
    (plan.groups.into_iter().map(|group| group.items).collect(), plan.items.into_iter().map(|item| item.fate).collect())
}

#[test]
fn early_tensors_do_not_wait_for_late_ones() {
    let limits = FuseLimits { message_us: 100, wait_us: 150, ..LIMITS };
    let small = |ready: &u32| (*ready, Some(64));
    let groups = |ready: &[u32]| timed(&ready.iter().map(small).collect::<Vec<_>>(), &limits).0;
    assert_eq!(groups(&[0, 100]), [[0, 1]], "waits 100, saves 100");
    assert_eq!(groups(&[0, 101]), Vec::<Vec<u32>>::new(), "waits 101, saves 100");
    assert_eq!(groups(&[0, 0, 0, 100, 101]), [[0, 1, 2, 3, 4].to_vec()], "four wait for a hundred each: 301 of 400");
    assert_eq!(groups(&[0, 0, 120, 0, 120]), [vec![0, 1, 3], vec![2, 4]], "three would wait for 120 each");
    assert_eq!(groups(&[0, 140, 145, 149, 150, 151]), [vec![1, 2, 3, 4, 5]], "one message less is not worth 140");
    assert_eq!(groups(&[0, 75, 150, 151]).first(), Some(&vec![0, 1]), "75 + 2 × 75 are more than 200");
    let (_, fates) = timed(&[small(&0), small(&1_000)], &limits);
    assert_eq!(fates, [Fate::Alone(Reason::NotWorthWaiting); 2]);
}

#[test]
fn small_tensors_do_not_wait_for_large_ones() {
    let limits = FuseLimits { small_bytes: 10, large_bytes: 100, group_bytes: 150, ..LIMITS };
    let groups = |bytes: &[Option<u64>]| timed(&bytes.iter().map(|b| (1, *b)).collect::<Vec<_>>(), &limits);
    let (together, fates) = groups(&[Some(1), Some(50), None, Some(101), Some(10), Some(100), None]);
    assert_eq!(together, [[0, 4], [1, 5], [2, 6]]);
    assert_eq!(fates[3], Fate::Alone(Reason::Large));
    assert_eq!(groups(&[Some(60), Some(60), Some(60), Some(60)]).0, [[0, 1], [2, 3]], "150 bytes at most");
    let few = FuseLimits { group_items: 2, ..LIMITS };
    assert_eq!(timed(&[(1, Some(1)); 5], &few).0, [[0, 1], [2, 3]]);
}

#[test]
fn a_producer_is_sent_once_to_each_task() {
    // 0 goes to two consumers on task 1 and one on task 2; 1 to one of those on task 1.
    let nodes = nodes(&[(Kind::Plain, 0), (Kind::Plain, 0), (Kind::Plain, 1), (Kind::Plain, 1), (Kind::Plain, 2)]);
    let edges = vec![edge(0, 3, 0), edge(0, 2, 0), edge(0, 4, 0), edge(1, 2, 1)];
    let plan = plan(&Graph::new(nodes, edges, None).unwrap(), &LIMITS).unwrap();
    let items: Vec<_> = plan.items.iter().map(|item| (item.src, item.task, item.edges.clone())).collect();
    assert_eq!(items, [(0, 1, vec![1, 0]), (0, 2, vec![2]), (1, 1, vec![3])]);
    assert_eq!(plan.groups.len(), 1);
    assert_eq!(plan.saved(), 1);
}

#[test]
fn a_large_graph_is_planned_at_once() {
    // 50,000 pulls and pushes: 200,000 nodes.
    let (mut nodes, mut edges) = (Vec::new(), Vec::new());
    for variable in 0..50_000 {
        let ps = variable % 7;
        let first = nodes.len() as u32;
        nodes.extend([Node::plain(ps), Node::plain(9), Node::plain(9), Node::plain(ps)]);
        edges.extend([edge(first, first + 1, 0), edge(first + 1, first + 2, 0), edge(first + 2, first + 3, 0)]);
    }
    let graph = Graph::new(nodes, edges, None).unwrap();
    // Takes a fraction of a second. Time that grew with the square of the graph would be minutes, which no test may
    // take.
    let plan = plan(&graph, &LIMITS).unwrap();
    assert_eq!(plan.groups.iter().map(|group| group.items.len()).sum::<usize>(), 100_000);
}
