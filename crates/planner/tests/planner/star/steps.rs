use super::build::Build;
use super::random::check;
use super::{STYLES, roles};
use crate::generate::Case;
use starwire_planner::graph::Class::{self, Plain};
use starwire_planner::graph::{Graph, Kind};
use starwire_planner::placement::{Place, Reason};
use starwire_planner::star::{self, Style, Way};

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
            // The counter waits for the other server, and the pushes to its own server go with it.
            Style::Lite => assert_eq!(calls, [&pulls[..], &[(2, 2, 10), (3, 1, 11)]].concat()),
        }
        let last = plan.calls.last().unwrap();
        assert!(last.after.contains(&2));
        assert_eq!((plan.calls[0].fetches.len(), plan.calls[2].feeds.len()), (10, 10));
        assert_eq!((plan.calls[0].copies.len(), plan.calls[2].copies.len()), (10, 10));
    }
}

#[test]
fn a_no_op_between_the_pushes_and_the_counter_adds_no_detour() {
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
fn values_that_only_the_push_needs_are_pushed() {
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
        let (nodes, edges) = (b.nodes.clone(), b.edges.clone());
        let graph = Graph::new(nodes, edges, None).unwrap();
        let plan = b.check(style);
        assert_eq!(plan.places[switch as usize], Place::Pivot);
        let call = &plan.calls[plan.calls_of[update as usize].unwrap() as usize];
        assert_eq!((&call.controls, &call.copies), (&vec![(switch, 1)], &vec![variable]));
        assert_eq!(call.predicates.len(), 1);
        let tasks: Vec<String> = (0..3).map(|task| format!("task {task}")).collect();
        let (text, decides) = (plan.describe(&graph, &tasks).to_string(), graph.describe(predicate));
        assert!(text.contains(&format!(", to task 1, if {decides}:0 is 1\n")), "{text}");
    }
}

/// Both styles make a pull and a push, and the push needs nothing kept on the server in between.
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
    let build = || {
        let mut b = Build::default();
        let (first, second) = (b.variable(1), b.variable(1));
        let pulled = b.read(second);
        let gradient = b.op(0, &[(pulled, Plain)]);
        let decay = b.read(first);
        b.update(second, &[gradient, decay]);
        b.update(first, &[gradient]);
        (b, decay)
    };
    let (b, decay) = build();
    let graph = Graph::new(b.nodes, b.edges, None).unwrap();
    let plan = star::plan(&graph, &roles(&graph), Style::Robust, 0).unwrap();
    assert_eq!((plan.calls_of[decay as usize], plan.calls[1].feeds[1].2), (Some(0), Way::Slot));
    // It is made first in its call.
    let (b, decay) = build();
    let plan = b.check(Style::Robust);
    assert_eq!((plan.calls_of[decay as usize], plan.calls[1].feeds.len()), (Some(1), 1));
}

#[test]
fn a_conditional_step_is_a_pull_and_a_push() {
    // if p: update(v), then no_op after it, then count(v, 1): all on the server except the predicate and the gradient.
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
        // A node that the worker needs as well moves there.
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
fn servers_send_directly_if_both_calls_run_or_neither() {
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
fn nodes_tied_to_their_neighbours_are_left_with_them() {
    // A handle that belongs to no variable, made before and used after a detour to the worker; a loop; and a graph of
    // servers only.
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
