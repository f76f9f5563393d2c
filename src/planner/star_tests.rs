//! What [`star`](super::star) promises, on random graphs and on those that caused trouble.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use proptest::prelude::*;

use super::generate::{Case, training_case};
use super::graph::{Class, Edge, Graph, Kind, Memory, Node};
use super::placement::{Place, Reason, Roles, is_variable};
use super::simulate::{Luck, Net, Op, carries_a_reference, run};
use super::star::{SPLIT_BYTES, StarPlan, Style, Way};

const STYLES: [Style; 2] = [Style::Robust, Style::Lite];

/// Task 0 is the worker.
fn roles(graph: &Graph) -> Roles {
    let tasks = graph.nodes().iter().map(|node| node.task).max().unwrap_or(0);
    Roles { servers: (0..=tasks).map(|task| task != 0).collect() }
}

/// The split graph as something that runs: a call starts when all that it needs is there, and is done when all of it has run.
fn split(graph: &Graph, plan: &StarPlan) -> Net {
    let mut net = Net::nodes(graph);
    let gate: Vec<u32> = plan.calls.iter().map(|_| net.add(Op::Bundle, 0)).collect();
    let done: Vec<u32> = plan.calls.iter().map(|_| net.add(Op::Bundle, 0)).collect();
    let call = |node: u32| plan.calls_of[node as usize].map(|call| call as usize);
    let mut copies: HashMap<(Option<usize>, u32), u32> = HashMap::new();
    for (number, it) in plan.calls.iter().enumerate() {
        for copy in &it.copies {
            let node = net.add(Op::Node(graph.node(*copy).kind), *copy);
            copies.insert((Some(number), *copy), node);
        }
        for node in it.nodes.iter().copied().chain(it.copies.iter().map(|copy| copies[&(Some(number), *copy)])) {
            net.wire((gate[number], -1), (node, -1), false);
            net.wire((node, -1), (done[number], -1), false);
        }
        for before in &it.after {
            net.wire((done[*before as usize], -1), (gate[number], -1), false);
        }
        for (node, output) in &it.controls {
            assert_eq!(call(*node), None);
            net.wire((*node, *output), (gate[number], -1), false);
        }
        for (place, (src, output, way)) in (0..).zip(&it.feeds) {
            let from = match call(*src) {
                None => (*src, *output),
                Some(from) => (done[from], slot(plan, from, *src, *output)),
            };
            assert_eq!(*way == Way::Feed, call(*src).is_none());
            net.wire(from, (gate[number], place), false);
        }
    }
    // What leaves a call, by way of its end.
    let mut leaving = BTreeSet::new();
    for (edge, way) in graph.edges().iter().zip(&plan.ways) {
        if matches!(way, Way::Fetch | Way::Slot | Way::Direct | Way::Relay) {
            leaving.insert((call(edge.src).unwrap(), edge.src, edge.src_output));
        }
    }
    for (from, src, output) in leaving {
        net.wire((src, output), (done[from], slot(plan, from, src, output)), false);
    }
    let kept: BTreeSet<u32> = plan.kept.iter().copied().collect();
    for node in graph.ids() {
        if plan.places[node as usize] == Place::Copied && call(node).is_none() && !kept.contains(&node) {
            net.gone.insert(node);
        }
    }
    // What is in a call and in the graph as well is there twice.
    let mut stayed: HashMap<u32, u32> = HashMap::new();
    for (number, (edge, way)) in (0u32..).zip(graph.edges().iter().zip(&plan.ways)) {
        let (from, to) = (call(edge.src), call(edge.dst));
        let reference = carries_a_reference(graph, number);
        let dst = (edge.dst, edge.dst_input);
        let mut copy_of = |net: &mut Net, node: u32| match to {
            Some(to) if call(node) == Some(to) => node,
            // The worker's own copies of constants.
            None => *copies.entry((None, node)).or_insert_with(|| net.add(Op::Node(Kind::Plain), node)),
            Some(_) => copies[&(to, node)],
        };
        match way {
            Way::Untouched if from.is_some() => {
                assert!(kept.contains(&edge.src));
                let copy = *stayed.entry(edge.src).or_insert_with(|| net.add(Op::Node(Kind::Plain), edge.src));
                net.wire((copy, edge.src_output), dst, reference);
            }
            Way::Untouched => net.keep(graph, number),
            Way::Inside => {
                assert!(from.is_some() && from == to);
                net.keep(graph, number);
            }
            // Copies of reads read what copies of variables are.
            Way::Copy if plan.places[edge.dst as usize] == Place::Copied && to.is_none() => {
                if kept.contains(&edge.dst) {
                    assert!(kept.contains(&edge.src));
                    let mut stayed =
                        || *stayed.entry(edge.src).or_insert_with(|| net.add(Op::Node(Kind::Plain), edge.src));
                    let src = if from.is_none() { edge.src } else { stayed() };
                    net.wire((src, edge.src_output), dst, reference);
                }
            }
            Way::Copy => {
                let copy = copy_of(&mut net, edge.src);
                net.wire((copy, edge.src_output), dst, reference);
            }
            Way::CopyOf(root) => {
                let copy = copy_of(&mut net, *root);
                net.wire((copy, 0), dst, true);
            }
            Way::Feed | Way::Slot | Way::Direct | Way::Relay => {
                let to = to.unwrap();
                let feed = |(src, output, _): &(u32, i32, Way)| (*src, *output) == (edge.src, edge.src_output);
                let place = plan.calls[to].feeds.iter().position(feed).unwrap();
                net.wire((gate[to], place as i32), dst, reference);
            }
            Way::Fetch => {
                let from = from.unwrap();
                net.wire((done[from], slot(plan, from, edge.src, edge.src_output)), dst, reference);
                assert!(plan.calls[from].fetches.contains(&(edge.src, edge.src_output)));
            }
            Way::Order if to.is_none() => {
                let src = from.map_or((edge.src, edge.src_output), |from| (done[from], -1));
                net.wire(src, (edge.dst, -1), false);
            }
            // In the call's own list.
            Way::Order | Way::Dropped => {}
        }
    }
    // Copies of reads read copies of variables.
    for (origin, copy) in stayed.clone() {
        for number in graph.ins(origin) {
            let edge = graph.edge(*number);
            assert!(kept.contains(&edge.src));
            let source = match call(edge.src) {
                None => edge.src,
                Some(_) => *stayed.entry(edge.src).or_insert_with(|| net.add(Op::Node(Kind::Plain), edge.src)),
            };
            net.wire((source, edge.src_output), (copy, edge.dst_input), carries_a_reference(graph, *number));
        }
    }
    for ((to, origin), copy) in copies.iter().filter(|((to, _), _)| to.is_some()) {
        for number in graph.ins(*origin) {
            let edge = graph.edge(*number);
            let source = copies.get(&(*to, edge.src)).copied().unwrap_or(edge.src);
            assert!(source != edge.src || call(edge.src) == *to);
            net.wire((source, edge.src_output), (*copy, edge.dst_input), carries_a_reference(graph, *number));
        }
    }
    net
}

fn slot(plan: &StarPlan, call: usize, src: u32, output: i32) -> i32 {
    let place = plan.calls[call].nodes.binary_search(&src).unwrap();
    place as i32 * 16 + output
}

fn is_no_op(graph: &Graph, node: u32) -> bool {
    let it = graph.node(node);
    let mut edges = graph.ins(node).iter().chain(graph.outs(node));
    !it.stateful && !it.blocking && edges.all(|edge| graph.edge(*edge).is_control())
}

fn plan(graph: &Graph, roles: &Roles, style: Style) -> Result<StarPlan, super::graph::PlanError> {
    super::star::plan(graph, roles, style, SPLIT_BYTES)
}

/// The split graph does what the whole one does, each node once, in an order that its edges allow.
fn check(case: &Case, style: Style) -> StarPlan {
    check_parts(case, style, SPLIT_BYTES)
}

fn check_parts(case: &Case, style: Style, split_bytes: u64) -> StarPlan {
    let graph = case.graph();
    let plan = super::star::plan(&graph, &roles(&graph), style, split_bytes).unwrap();
    let place = |node: u32| plan.places[node as usize];
    let only_copies = |node: u32| {
        place(node) == Place::Copied && plan.calls_of[node as usize].is_none() && !plan.kept.contains(&node)
    };
    for luck in (0..3).map(|seed| Luck { values: seed, order: seed }) {
        let whole = run(&graph, &case.hidden, None, luck);
        let outcome = split(&graph, &plan).run(&case.hidden, luck);
        for ((node, path), value) in &whole {
            if !only_copies(*node) {
                assert_eq!(outcome.trace.get(&(*node, path.clone())), Some(value), "{node} {path:?}, {luck:?}");
            }
            for copy in outcome.copies.get(node).into_iter().flatten() {
                assert!(copy == value || copy.is_none(), "a copy of {node} differs");
            }
        }
        assert!(outcome.trace.keys().all(|ran| whole.contains_key(ran)));
        for edge in graph.edges().iter().filter(|edge| place(edge.src) != Place::Copied) {
            let alive = |node: u32| whole.get(&(node, Vec::new())).is_some_and(Option::is_some);
            if alive(edge.src) && alive(edge.dst) && graph.node(edge.dst).kind != Kind::Merge {
                let time = |node: u32| outcome.times.get(&node);
                assert!(time(edge.src) < time(edge.dst), "{} must be before {}", edge.src, edge.dst);
            }
        }
        for call in &plan.calls {
            let fates: BTreeSet<bool> =
                call.nodes.iter().filter_map(|node| whole.get(&(*node, Vec::new()))).map(Option::is_some).collect();
            assert!(fates.len() <= 1, "alive and dead in one call");
        }
    }
    let mut seen = BTreeSet::new();
    for (number, call) in (0u32..).zip(&plan.calls) {
        assert!(!call.nodes.is_empty());
        for node in &call.nodes {
            assert!(seen.insert(*node), "{node} is in two calls");
            assert_eq!(plan.calls_of[*node as usize], Some(number));
            assert!(graph.node(*node).task == call.task || is_no_op(&graph, *node));
        }
        assert!(call.after.iter().all(|before| plan.calls[*before as usize].round < call.round));
        for copy in &call.copies {
            let variable = is_variable(&graph, *copy);
            assert!(place(*copy) == Place::Copied && (!variable || graph.node(*copy).task == call.task));
            assert!(style == Style::Lite || !graph.node(*copy).pure_read, "star_server reads once");
        }
    }
    for node in graph.ids() {
        let stays = graph.node(node).task == 0;
        assert_eq!(place(node) == Place::Stays, stays && plan.calls_of[node as usize].is_none());
        assert_eq!(matches!(place(node), Place::Called), seen.contains(&node) && place(node) != Place::Copied);
        assert!(place(node) != Place::Moved || !graph.node(node).stateful, "an effect was moved to another task");
    }
    plan
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn calls_do_what_the_graph_does(seed: u64, size in 10usize..150) {
        let case = training_case(seed, size);
        check(&case, Style::Robust);
        check(&case, Style::Lite);
    }

    #[test]
    fn calls_in_parts_do_what_the_graph_does(seed: u64, size in 10usize..150, split_bytes in 0u64..4096) {
        let case = training_case(seed, size);
        check_parts(&case, Style::Robust, split_bytes);
        check_parts(&case, Style::Lite, split_bytes);
    }
}

/// In these graphs, a Merge in a loop took an Enter that is dead in the loop's last round: alive or dead, as it happened.
#[test]
fn a_merge_beside_a_dead_enter() {
    for (seed, size) in [(10426696931242409343, 40), (13442, 28)] {
        for style in STYLES {
            check(&training_case(seed, size), style);
        }
    }
}

/// Otherwise the property above would hold of nothing.
#[test]
fn random_graphs_have_what_is_hard() {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut calls = [0, 0];
    let mut taken_along = 0;
    for seed in 0..300 {
        let graph = training_case(seed, 100).graph();
        for (number, style) in STYLES.into_iter().enumerate() {
            let plan = plan(&graph, &roles(&graph), style).unwrap();
            calls[number] += plan.calls.len();
            taken_along += graph
                .ids()
                .filter(|node| graph.node(*node).task == 0 && plan.places[*node as usize] == Place::Called)
                .count();
            for what in
                plan.ways.iter().map(|way| format!("{way:?}")).chain(plan.places.iter().map(|p| format!("{p:?}")))
            {
                let what = what.split('(').next().unwrap_or_default().to_string();
                *seen.entry(what).or_default() += 1;
            }
            *seen.entry("conditional".to_string()).or_default() +=
                plan.calls.iter().filter(|call| !call.predicates.is_empty()).count();
        }
    }
    let wanted = [
        "Called",
        "Moved",
        "Pivot",
        "Copied",
        "Left",
        "Inside",
        "Copy",
        "CopyOf",
        "Feed",
        "Fetch",
        "Slot",
        "Direct",
        "Relay",
        "Order",
        "Dropped",
        "conditional",
    ];
    let rare: Vec<_> = wanted.into_iter().filter(|what| seen.get(*what).is_none_or(|count| *count < 20)).collect();
    assert!(rare.is_empty(), "{rare:?} of {seen:?}");
    assert!(taken_along > 20, "{taken_along} of the worker's no-ops in calls");
    assert!(calls[1] < calls[0], "star_server_lite makes more calls: {calls:?}");
}

/// Task 0 is the worker; 1 and 2 are servers.
#[derive(Default)]
struct Build {
    nodes: Vec<Node>,
    edges: Vec<Edge>,
    /// Variables of the old kind: a read of one takes no reference, and an update hands its reference on.
    references: bool,
}

impl Build {
    fn op(&mut self, task: u32, inputs: &[(u32, Class)]) -> u32 {
        let node = self.nodes.len() as u32;
        self.nodes.push(Node::plain(task));
        for (place, (src, class)) in (0..).zip(inputs) {
            self.input((*src, 0), node, place, *class);
        }
        node
    }

    fn input(&mut self, (src, src_output): (u32, i32), dst: u32, dst_input: i32, class: Class) {
        self.edges.push(Edge { src, src_output, dst, dst_input, class, memory: Memory::Host, bytes: None });
    }

    fn after(&mut self, src: u32, dst: u32) {
        self.input((src, -1), dst, -1, Class::Control);
    }

    fn variable(&mut self, task: u32) -> u32 {
        let node = self.op(task, &[]);
        (self.nodes[node as usize].cloneable, self.nodes[node as usize].stateful) = (true, true);
        node
    }

    fn constant(&mut self, task: u32) -> u32 {
        let node = self.op(task, &[]);
        self.nodes[node as usize].cloneable = true;
        node
    }

    fn read(&mut self, variable: u32) -> u32 {
        let class = if self.references { Class::Plain } else { Class::Resource };
        let node = self.op(self.nodes[variable as usize].task, &[(variable, class)]);
        let it = &mut self.nodes[node as usize];
        // As TensorFlow has it: ReadVariableOp counts as stateful.
        (it.pure_read, it.stateful) = (true, !self.references);
        it.kind = if self.references { Kind::Identity } else { Kind::Plain };
        node
    }

    fn update(&mut self, variable: u32, inputs: &[u32]) -> u32 {
        let mut all = vec![(variable, if self.references { Class::Ref } else { Class::Resource })];
        all.extend(inputs.iter().map(|input| (*input, Class::Plain)));
        let node = self.op(self.nodes[variable as usize].task, &all);
        let it = &mut self.nodes[node as usize];
        (it.stateful, it.forwards_ref) = (!self.references, self.references);
        node
    }

    fn check(self, style: Style) -> StarPlan {
        check(&Case { nodes: self.nodes, edges: self.edges, hidden: Vec::new() }, style)
    }
}

use Class::Plain;

#[test]
fn a_training_step_is_a_pull_a_push_and_the_counter() {
    for style in STYLES {
        let mut b = Build::default();
        let counter = b.variable(1);
        let mut reads = Vec::new();
        let variables: Vec<u32> = (0..20).map(|number| b.variable(1 + number % 2)).collect();
        for variable in &variables {
            reads.push(b.read(*variable));
        }
        let forward = b.op(0, &reads.iter().map(|read| (*read, Plain)).collect::<Vec<_>>());
        let count = b.update(counter, &[]);
        for variable in variables {
            let gradient = b.op(0, &[(forward, Plain)]);
            let update = b.update(variable, &[gradient]);
            b.after(update, count);
        }
        let plan = b.check(style);
        let calls: Vec<_> = plan.calls.iter().map(|call| (call.round, call.task, call.nodes.len())).collect();
        let pulls = [(1, 1, 10), (1, 2, 10)];
        match style {
            Style::Robust => assert_eq!(calls, [&pulls[..], &[(2, 1, 10), (2, 2, 10), (3, 1, 1)]].concat()),
            // The counter has to wait for the other server: the pushes of its own server go with it.
            Style::Lite => assert_eq!(calls, [&pulls[..], &[(2, 2, 10), (3, 1, 11)]].concat()),
        }
        let last = plan.calls.last().unwrap();
        assert!(last.after.contains(&2));
        assert_eq!((plan.calls[0].fetches.len(), plan.calls[2].feeds.len()), (10, 10));
        assert_eq!((plan.calls[0].copies.len(), plan.calls[2].copies.len()), (10, 10));
    }
}

#[test]
fn a_no_op_between_the_pushes_and_the_counter_is_no_detour() {
    // tf.group of the updates on two servers is a no-op on each and one on the worker.
    for style in STYLES {
        let mut b = Build::default();
        let (counter, variables) = (b.variable(1), [b.variable(1), b.variable(2)]);
        let all = b.op(0, &[]);
        for variable in variables {
            let read = b.read(variable);
            let gradient = b.op(0, &[(read, Plain)]);
            let update = b.update(variable, &[gradient]);
            let done = b.op(b.nodes[variable as usize].task, &[]);
            b.after(update, done);
            b.after(done, all);
        }
        let count = b.update(counter, &[]);
        b.after(all, count);
        let plan = b.check(style);
        assert_eq!(plan.calls_of[all as usize], plan.calls_of[count as usize]);
        // Robust pushes to both at once; lite has the counter's server wait, and makes two calls to each.
        assert_eq!(plan.calls.len(), if style == Style::Robust { 5 } else { 4 });
    }
}

#[test]
fn what_only_the_push_needs_is_pushed() {
    // Unique(ids) could run with the pull, but only the update needs it.
    let mut b = Build::default();
    let (variable, ids) = (b.variable(1), b.op(0, &[]));
    let unique = b.op(1, &[(ids, Plain)]);
    let read = b.read(variable);
    let gradient = b.op(0, &[(read, Plain)]);
    let update = b.update(variable, &[unique, gradient]);
    let plan = b.check(Style::Robust);
    assert_eq!((plan.calls.len(), plan.calls_of[unique as usize]), (2, plan.calls_of[update as usize]));
    assert_eq!(plan.calls[0].fetches, [(read, 0)]);
}

#[test]
fn lite_reads_again_instead_of_keeping() {
    // The update needs the value that was pulled.
    let build = || {
        let mut b = Build::default();
        let variable = b.variable(1);
        let read = b.read(variable);
        let gradient = b.op(0, &[(read, Plain)]);
        b.update(variable, &[gradient, read]);
        (b, read)
    };
    let (robust, read) = build();
    let plan = robust.check(Style::Robust);
    assert_eq!(plan.calls[1].feeds.last(), Some(&(read + 1, 0, Way::Feed)));
    assert_eq!(plan.calls[1].feeds.first(), Some(&(read, 0, Way::Slot)));
    let plan = build().0.check(Style::Lite);
    assert_eq!((plan.calls.len(), plan.calls[1].feeds.len(), plan.calls[1].copies.len()), (2, 1, 2));
}

#[test]
fn a_branch_on_a_server_is_decided_by_the_worker() {
    // if p: update(v) — with the handle through a Switch on the server.
    for style in STYLES {
        let mut b = Build::default();
        let (variable, predicate) = (b.variable(1), b.op(0, &[]));
        let switch = b.op(1, &[(variable, Class::Resource), (predicate, Plain)]);
        b.nodes[switch as usize].kind = Kind::Switch;
        let update = b.op(1, &[]);
        b.nodes[update as usize].stateful = true;
        b.input((switch, 1), update, 0, Class::Resource);
        let read = b.read(variable);
        b.op(0, &[(read, Plain)]);
        let plan = b.check(style);
        assert_eq!(plan.places[switch as usize], Place::Pivot);
        let call = &plan.calls[plan.calls_of[update as usize].unwrap() as usize];
        assert_eq!((&call.controls, &call.copies), (&vec![(switch, 1)], &vec![variable]));
        assert_eq!(call.predicates.len(), 1);
    }
}

/// Robust on one server: a pull and a push, which needs nothing that stayed there in between.
fn is_a_pull_and_a_push(b: Build) {
    let graph = Graph::new(b.nodes.clone(), b.edges.clone(), None).unwrap();
    for style in STYLES {
        let plan = check(&Case { nodes: b.nodes.clone(), edges: b.edges.clone(), hidden: Vec::new() }, style);
        let tasks: Vec<String> = (0..3).map(|task| format!("task {task}")).collect();
        assert_eq!(plan.calls.len(), 2, "{}", plan.describe(&graph, &tasks));
        let kept = plan.calls[1].feeds.iter().filter(|(.., way)| *way != Way::Feed);
        assert_eq!(kept.count(), 0, "{}", plan.describe(&graph, &tasks));
    }
}

#[test]
fn adam_is_a_pull_and_a_push() {
    for references in [false, true] {
        let mut b = Build { references, ..Build::default() };
        let powers = [b.variable(1), b.variable(1)];
        let beta = b.constant(1);
        let mut updates = Vec::new();
        for _ in 0..10 {
            let variable = b.variable(1);
            let read = b.read(variable);
            let gradient = b.op(0, &[(read, Plain)]);
            let bias = powers.map(|power| b.read(power));
            updates.push(b.update(variable, &[bias[0], bias[1], beta, gradient]));
        }
        let counter = b.variable(1);
        let all = b.op(1, &[]);
        for power in powers {
            let read = b.read(power);
            let next = b.op(1, &[(read, Plain), (beta, Plain)]);
            let assign = b.update(power, &[next]);
            for update in &updates {
                b.after(*update, read);
            }
            b.after(assign, all);
        }
        for update in updates {
            b.after(update, all);
        }
        let one = b.constant(1);
        let count = b.update(counter, &[one]);
        b.after(all, count);
        is_a_pull_and_a_push(b);
    }
}

#[test]
fn a_rate_that_decays_with_the_step_is_pulled_and_pushed() {
    for references in [false, true] {
        let mut b = Build { references, ..Build::default() };
        let (counter, variable, accumulator) = (b.variable(1), b.variable(1), b.variable(1));
        let (step, read) = (b.read(counter), b.read(variable));
        let rate = b.op(0, &[(step, Plain)]);
        let gradient = b.op(0, &[(read, Plain)]);
        let update = b.update(variable, &[rate, gradient]);
        // Adagrad's second variable.
        b.input((accumulator, 0), update, 3, Class::Resource);
        let one = b.constant(1);
        let count = b.update(counter, &[one]);
        b.after(update, count);
        is_a_pull_and_a_push(b);
    }
}

#[test]
fn parts_of_an_embedding_are_looked_up_and_scattered() {
    for references in [false, true] {
        let mut b = Build { references, ..Build::default() };
        let ids = b.op(0, &[]);
        let parts: Vec<u32> = (0..6).map(|_| b.variable(1)).collect();
        let rows: Vec<u32> = parts
            .iter()
            .map(|part| {
                let own = b.op(0, &[(ids, Plain)]);
                let rows = b.read(*part);
                b.input((own, 0), rows, 1, Plain);
                rows
            })
            .collect();
        let forward = b.op(0, &rows.iter().map(|rows| (*rows, Plain)).collect::<Vec<_>>());
        for part in parts {
            let gradient = b.op(0, &[(forward, Plain)]);
            // Unique and UnsortedSegmentSum of the gradient, on the server.
            let unique = b.op(1, &[(ids, Plain)]);
            let sum = b.op(1, &[(gradient, Plain)]);
            b.input((unique, 1), sum, 1, Plain);
            b.update(part, &[unique, sum]);
        }
        is_a_pull_and_a_push(b);
    }
}

#[test]
fn a_read_that_could_be_overtaken_is_made_at_once() {
    // Only the push of the second variable needs the first one's value.
    let build = |ordered: bool| {
        let mut b = Build::default();
        let (first, second) = (b.variable(1), b.variable(1));
        let pulled = b.read(second);
        let gradient = b.op(0, &[(pulled, Plain)]);
        let decay = b.read(first);
        let update = b.update(second, &[gradient, decay]);
        let other = b.update(first, &[gradient]);
        if ordered {
            b.after(update, other);
        }
        (b.check(Style::Robust), decay)
    };
    let (plan, decay) = build(false);
    assert_eq!((plan.calls_of[decay as usize], plan.calls[1].feeds[1].2), (Some(0), Way::Slot));
    let (plan, decay) = build(true);
    assert_eq!((plan.calls_of[decay as usize], plan.calls[1].feeds.len()), (Some(1), 1));
}

#[test]
fn a_conditional_step_is_a_pull_and_a_push() {
    // if p: update(v), then no_op after it, then count(v, 1) — all of it on the server, but for the predicate and the gradient.
    for style in STYLES {
        let mut b = Build::default();
        let (variable, counter, predicate) = (b.variable(1), b.variable(1), b.op(0, &[]));
        let read = b.read(variable);
        let gradient = b.op(0, &[(read, Plain)]);
        let switch = |b: &mut Build, task: u32, data: u32, class: Class| {
            let switch = b.op(task, &[(data, class), (predicate, Plain)]);
            b.nodes[switch as usize].kind = Kind::Switch;
            switch
        };
        let pivot = switch(&mut b, 0, predicate, Plain);
        let taken = b.op(0, &[]);
        b.nodes[taken as usize].kind = Kind::Identity;
        b.input((pivot, 1), taken, 0, Plain);
        let pushed = switch(&mut b, 0, gradient, Plain);
        let handles = [variable, counter].map(|handle| switch(&mut b, 1, handle, Class::Resource));
        let [update, count] = handles.map(|handle| {
            let node = b.op(1, &[]);
            b.nodes[node as usize].stateful = true;
            b.input((handle, 1), node, 0, Class::Resource);
            node
        });
        b.input((pushed, 1), update, 1, Plain);
        let (no_op, one) = (b.op(1, &[]), b.op(1, &[]));
        let group = b.op(0, &[]);
        b.after(update, no_op);
        b.after(no_op, group);
        b.after(group, count);
        b.after(taken, one);
        b.input((one, 0), count, 1, Plain);
        // What the worker needs as well is moved there.
        let shared = b.op(1, &[]);
        b.after(taken, shared);
        b.input((shared, 0), update, 2, Plain);
        b.op(0, &[(shared, Plain)]);
        let plan = b.check(style);
        assert_eq!(plan.calls.len(), 2);
        assert_eq!(plan.calls[1].nodes, [update, count, no_op, one, group]);
        assert_eq!(plan.places[shared as usize], Place::Moved);
    }
}

#[test]
fn from_server_to_server_it_goes_directly_where_both_run_or_neither() {
    let mut b = Build::default();
    let input = b.op(0, &[]);
    let one = b.op(1, &[(input, Plain)]);
    let two = b.op(2, &[(one, Plain)]);
    b.op(0, &[(two, Plain)]);
    let plan = b.check(Style::Robust);
    assert_eq!(plan.calls[1].feeds, [(one, 0, Way::Direct)]);
    assert!(plan.calls[0].fetches.is_empty());
}

#[test]
fn what_cannot_leave_its_neighbours_is_left_with_them() {
    // A handle that is no variable's, made before and used after a detour to the worker; a loop; and a graph of servers only.
    let mut b = Build::default();
    let input = b.op(0, &[]);
    let stack = b.op(1, &[(input, Plain)]);
    let pushed = b.op(1, &[(stack, Class::Resource)]);
    let worker = b.op(0, &[(pushed, Plain)]);
    let popped = b.op(1, &[(stack, Class::Resource), (worker, Plain)]);
    let other = b.op(1, &[(input, Plain)]);
    b.op(0, &[(other, Plain), (popped, Plain)]);
    let plan = b.check(Style::Robust);
    for node in [stack, pushed, popped] {
        assert_eq!(plan.places[node as usize], Place::Left(Reason::Resource));
    }
    assert_eq!(plan.places[other as usize], Place::Called);

    let mut b = Build::default();
    let variable = b.variable(1);
    b.update(variable, &[]);
    let plan = b.check(Style::Robust);
    assert_eq!(plan.places, [Place::Left(Reason::NothingCrosses); 2]);
}

/// Otherwise the property of calls in parts would hold of nothing.
#[test]
fn random_graphs_have_calls_in_parts() {
    let mut parts = [0, 0];
    let mut levels = 0;
    for seed in 0..200 {
        let graph = training_case(seed, 120).graph();
        for (number, style) in STYLES.into_iter().enumerate() {
            let [whole, split] = [0, 512]
                .map(|split_bytes| super::star::plan(&graph, &roles(&graph), style, split_bytes).unwrap().calls);
            parts[number] += split.len() - whole.len().min(split.len());
            let rounds = |calls: &[super::star::Call]| calls.iter().map(|call| call.round).max().unwrap_or(0);
            levels += usize::from(rounds(&split) > rounds(&whole));
        }
    }
    assert!(parts.iter().all(|parts| *parts > 100), "{parts:?} more calls");
    assert!(levels > 10, "only {levels} plans have more rounds");
}

const MB: u64 = 1 << 20;

/// Pulls and pushes of variables of this size, after which a counter counts, all on one server.
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
fn what_is_large_has_calls_of_its_own_and_what_is_small_shares_one() {
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
        // The counter waits for all of them, which is a round of its own.
        let counted = &plan.calls[plan.calls_of[count as usize].unwrap() as usize];
        assert_eq!((plan.calls.len(), counted.round, counted.after.len()), (9, 3, 4));
    }
}

#[test]
fn parts_are_as_large_as_it_pays() {
    let calls = |sizes: &[u64]| large_step(sizes, false).0.check(Style::Robust).calls.len();
    // A pull and a push, and what is too little for two parts.
    assert_eq!(calls(&[MB - 1, MB]), 2);
    assert_eq!(calls(&[100 * MB]), 2);
    // Four parts each way, and the counter.
    assert_eq!(calls(&[MB / 2; 8]), 9);
    // Not more than 64 (and the one that is not full) of the largest model.
    assert!(calls(&[MB; 1000]) <= 131);
}

#[test]
fn what_parts_share_does_not_hold_them_together_unless_it_is_large() {
    // The push of each variable needs a rate that is read on the server, and something of the worker's.
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
fn what_waits_in_a_circle_stays_together() {
    // Each of two values has an update that comes before the other's: two calls cannot both be first.
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
    for (style, split_bytes, calls) in
        [(Style::Robust, 0, 4), (Style::Lite, 0, 4), (Style::Robust, 1 << 10, 256), (Style::Lite, 1 << 10, 256)]
    {
        let begun = std::time::Instant::now();
        let plan = super::star::plan(&graph, &roles(&graph), style, split_bytes).unwrap();
        let took = begun.elapsed();
        assert_eq!(plan.calls.len(), calls);
        assert!(took.as_millis() < 1_000, "{took:?}");
    }
}
