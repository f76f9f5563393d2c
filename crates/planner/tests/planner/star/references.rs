//! Reference variables: a value read from one is its memory.

use super::build::Build;
use super::{STYLES, roles};
use starwire_planner::flow::Flow;
use starwire_planner::graph::Class::{Deref, Plain, Ref, Resource};
use starwire_planner::graph::{Graph, Kind};
use starwire_planner::placement::{LARGE_BYTES, Place, Reason};
use starwire_planner::predicates::Predicates;
use starwire_planner::star::{self, Style, Way};

/// Task 1 has reference variables; task 0 provides a value and a predicate.
fn build() -> (Build, u32, u32) {
    let mut b = Build { references: true, ..Build::default() };
    let (value, predicate) = (b.op(0, &[]), b.op(0, &[]));
    (b, value, predicate)
}

fn switch(b: &mut Build, from: (u32, i32), class: starwire_planner::graph::Class, predicate: u32) -> u32 {
    let switch = b.op(1, &[]);
    b.nodes[switch as usize].kind = Kind::Switch;
    b.input(from, switch, 0, class);
    b.input((predicate, 0), switch, 1, Plain);
    switch
}

#[test]
fn an_update_behind_a_merge_of_two_variables_is_left() {
    for (same, style) in [false, true].into_iter().flat_map(|same| STYLES.map(|style| (same, style))) {
        let (mut b, value, predicate) = build();
        let one = b.variable(1);
        let other = if same { one } else { b.variable(1) };
        let merge = b.op(1, &[]);
        b.nodes[merge as usize].kind = Kind::Merge;
        for (input, variable) in [one, other].into_iter().enumerate() {
            let switch = switch(&mut b, (variable, 0), Ref, predicate);
            b.input((switch, input as i32), merge, input as i32, Ref);
        }
        let update = b.op(1, &[(merge, Ref), (value, Plain)]);
        (b.nodes[update as usize].stateful, b.nodes[update as usize].forwards_ref) = (true, true);
        // Something that is called.
        let third = b.variable(1);
        b.update(third, &[value]);
        let plan = b.check(style);
        let update = plan.places[update as usize];
        assert!(if same { update == Place::Called } else { matches!(update, Place::Left(_)) }, "{same} {update:?}");
    }
}

#[test]
fn a_switch_that_a_variable_itself_decides_is_left() {
    for style in STYLES {
        let (mut b, value, _) = build();
        let (variable, flag) = (b.variable(1), b.variable(1));
        let gate = b.op(1, &[]);
        b.nodes[gate as usize].kind = Kind::Switch;
        b.input((variable, 0), gate, 0, Ref);
        b.input((flag, 0), gate, 1, Deref);
        let update = b.op(1, &[]);
        (b.nodes[update as usize].stateful, b.nodes[update as usize].forwards_ref) = (true, true);
        b.input((gate, 1), update, 0, Ref);
        b.input((value, 0), update, 1, Plain);
        // Something that is called.
        let third = b.variable(1);
        let called = b.update(third, &[value]);
        let plan = b.check(style);
        assert!(matches!(plan.places[gate as usize], Place::Left(_)), "{:?}", plan.places[gate as usize]);
        assert!(matches!(plan.places[update as usize], Place::Left(_)));
        assert_eq!(plan.places[called as usize], Place::Called);
    }
}

#[test]
fn a_snapshot_that_must_show_an_update_stays_beside_its_variable() {
    // if p: v += value; w = v/read * 3. v/read was read before the condition and shares v's memory.
    for (updated, style) in [false, true].into_iter().flat_map(|updated| STYLES.map(|style| (updated, style))) {
        let (mut b, value, predicate) = build();
        let variable = b.variable(1);
        let read = b.read(variable);
        let snapshot = switch(&mut b, (read, 0), Plain, predicate);
        let triple = b.op(1, &[]);
        b.input((snapshot, 1), triple, 0, Plain);
        if updated {
            let gate = switch(&mut b, (variable, 0), Ref, predicate);
            let update = b.op(1, &[]);
            (b.nodes[update as usize].stateful, b.nodes[update as usize].forwards_ref) = (true, true);
            b.input((gate, 1), update, 0, Ref);
            b.input((value, 0), update, 1, Plain);
            b.after(update, triple);
        }
        let user = b.op(0, &[(triple, Plain)]);
        let other = b.variable(1);
        b.update(other, &[user]);
        let plan = b.check(style);
        for node in [snapshot, triple] {
            let place = plan.places[node as usize];
            assert_eq!(place, if updated { Place::Left(Reason::Alias) } else { Place::Moved });
        }
    }
}

#[test]
fn a_branch_of_a_large_value_stays_beside_it() {
    // if p: gather(table/read, ids), on the server; the rows are used on the worker. table/read is used elsewhere, too.
    for (large, style) in [false, true].into_iter().flat_map(|large| STYLES.map(|style| (large, style))) {
        let bytes = Some(if large { LARGE_BYTES } else { LARGE_BYTES - 1 });
        let (mut b, ids, predicate) = build();
        let variable = b.variable(1);
        let read = b.read(variable);
        let choice = switch(&mut b, (read, 0), Plain, predicate);
        let gather = b.op(1, &[]);
        b.input((choice, 1), gather, 0, Plain);
        b.input((ids, 0), gather, 1, Plain);
        let other = b.op(1, &[(read, Plain), (ids, Plain)]);
        for edge in b.edges.iter_mut().filter(|edge| [read, choice].contains(&edge.src)) {
            edge.bytes = bytes;
        }
        b.op(0, &[(gather, Plain), (other, Plain)]);
        let third = b.variable(1);
        b.update(third, &[ids]);
        let plan = b.check(style);
        for node in [read, choice, gather, other] {
            let is_left = plan.places[node as usize] == Place::Left(Reason::Large);
            assert_eq!(is_left, large, "{large} {node} {:?}", plan.places[node as usize]);
        }
    }
}

#[test]
fn what_is_computed_of_a_large_value_in_a_branch_is_computed_beside_it() {
    // if p: sum(w * w), on the server, with a resource variable.
    for (large, style) in [false, true].into_iter().flat_map(|large| STYLES.map(|style| (large, style))) {
        let (mut b, value, predicate) = build();
        b.references = false;
        let variable = b.variable(1);
        let handle = switch(&mut b, (variable, 0), Resource, predicate);
        let read = b.op(1, &[]);
        b.input((handle, 1), read, 0, Resource);
        (b.nodes[read as usize].pure_read, b.nodes[read as usize].stateful) = (true, true);
        let square = b.op(1, &[(read, Plain), (read, Plain)]);
        let sum = b.op(1, &[(square, Plain)]);
        for edge in b.edges.iter_mut().filter(|edge| [read, square].contains(&edge.src)) {
            edge.bytes = Some(if large { LARGE_BYTES } else { 1 });
        }
        b.op(0, &[(sum, Plain)]);
        let third = b.variable(1);
        b.update(third, &[value]);
        let plan = b.check(style);
        let place = if large { Place::Called } else { Place::Moved };
        assert_eq!([plan.places[square as usize], plan.places[sum as usize]], [place; 2]);
        assert_eq!(plan.calls_of[read as usize] == plan.calls_of[sum as usize], large);
    }
}

#[test]
fn a_copy_of_a_workers_variable_stays_where_an_update_follows() {
    // if p: w/read * 3, on the server. Then w += value, on the worker, whose memory w/read is.
    for (updated, style) in [false, true].into_iter().flat_map(|updated| STYLES.map(|style| (updated, style))) {
        let (mut b, value, predicate) = build();
        let variable = b.variable(0);
        let read = b.read(variable);
        let copy = switch(&mut b, (read, 0), Plain, predicate);
        let triple = b.op(1, &[]);
        b.input((copy, 1), triple, 0, Plain);
        if updated {
            let update = b.update(variable, &[value]);
            b.after(copy, update);
        }
        b.op(0, &[(triple, Plain)]);
        let other = b.variable(1);
        b.update(other, &[value]);
        let plan = b.check(style);
        let place = plan.places[copy as usize];
        assert_eq!(place, if updated { Place::Left(Reason::Alias) } else { Place::Moved });
    }
}

#[test]
fn a_snapshot_that_something_keeps_stays_beside_its_variable() {
    for style in STYLES {
        let (mut b, value, _) = build();
        let variable = b.variable(1);
        let read = b.read(variable);
        // For example, a queue of an unknown kind.
        let keeper = b.op(1, &[(read, Plain)]);
        let it = &mut b.nodes[keeper as usize];
        (it.unknown, it.stateful, it.blocking) = (true, true, true);
        b.update(variable, &[value]);
        let plan = b.check(style);
        assert_eq!(plan.places[keeper as usize], Place::Left(Reason::Unknown));
        // A copy of the read is kept for it, or the read itself is left.
        let kept = plan.kept.contains(&read) || plan.places[read as usize] == Place::Left(Reason::Alias);
        assert!(kept, "{:?}", plan.places[read as usize]);
    }
}

#[test]
fn a_value_behind_a_reference_is_taken_when_its_consumer_runs() {
    // v = value; then another server's answer; then v * 2, read from the reference that the assignment returns.
    for style in STYLES {
        let (mut b, value, _) = build();
        let (variable, far) = (b.variable(1), b.variable(2));
        let assign = b.update(variable, &[value]);
        let elsewhere = b.update(far, &[value]);
        let double = b.op(1, &[(assign, Deref)]);
        b.after(elsewhere, double);
        b.op(0, &[(double, Plain)]);
        let plan = b.check(style);
        let call = |node: u32| plan.calls_of[node as usize];
        assert!(call(double).is_some());
        if call(double) != call(assign) {
            let copies = &plan.calls[call(double).unwrap() as usize].copies;
            assert!(copies.contains(&variable), "the value of then, not of now");
        }
    }
}

#[test]
fn a_conditional_node_of_unknown_effect_is_not_moved() {
    for style in STYLES {
        let (mut b, value, predicate) = build();
        let gate = switch(&mut b, (value, 0), Plain, predicate);
        let nodes: Vec<u32> = [(false, true), (true, true), (false, false)]
            .map(|(unknown, stateful)| {
                let node = b.op(1, &[]);
                b.input((gate, 1), node, 0, Plain);
                let it = &mut b.nodes[node as usize];
                (it.unknown, it.stateful, it.blocking) = (unknown, stateful, unknown);
                b.op(0, &[(node, Plain)]);
                node
            })
            .into();
        let plan = b.check(style);
        let places: Vec<Place> = nodes.iter().map(|node| plan.places[*node as usize]).collect();
        assert_eq!(places, [Place::Called, Place::Left(Reason::Unknown), Place::Moved]);
    }
}

/// `old = v.read(); after it: v += 1; return old`
#[test]
fn lite_keeps_the_order_of_a_read_and_an_update() {
    let mut b = Build::default();
    let variable = b.variable(1);
    let read = b.read(variable);
    let update = b.update(variable, &[]);
    b.after(read, update);
    b.op(0, &[(read, Plain)]);
    let plan = b.check(Style::Lite);
    assert_eq!(plan.places[read as usize], Place::Called);
    let control = plan.ways[2];
    assert!(matches!(control, Way::Inside | Way::Order), "{control:?}");
}

/// A value read before the step's own update is used after it.
#[test]
fn lite_repeats_no_read_that_would_see_the_steps_own_update() {
    let mut b = Build::default();
    let (variable, other) = (b.variable(1), b.variable(1));
    let read = b.read(variable);
    let gradient = b.op(0, &[(read, Plain)]);
    let update = b.update(variable, &[gradient]);
    let late = b.update(other, &[read]);
    b.after(update, late);
    let plan = b.check(Style::Lite);
    assert_eq!(plan.places[read as usize], Place::Called);
    let feeds = &plan.calls[plan.calls_of[late as usize].unwrap() as usize].feeds;
    let feed = feeds.iter().find(|(src, ..)| *src == read);
    assert_eq!(feed.map(|(.., way)| *way), Some(Way::Slot));
}

#[test]
fn a_handle_is_no_snapshot() {
    // Reads of resource variables are values: conditional users of them may move.
    let (mut b, value, predicate) = build();
    b.references = false;
    let variable = b.variable(1);
    let read = b.read(variable);
    let snapshot = switch(&mut b, (read, 0), Plain, predicate);
    let update = b.op(1, &[(variable, Resource), (value, Plain)]);
    b.nodes[update as usize].stateful = true;
    b.after(read, update);
    let triple = b.op(1, &[]);
    b.input((snapshot, 1), triple, 0, Plain);
    b.after(update, triple);
    b.op(0, &[(triple, Plain)]);
    let plan = b.check(Style::Robust);
    assert_eq!(plan.places[triple as usize], Place::Moved);
}

/// Two handles of one variable: a read through one waits for no later call, which an update through the other may
/// overtake.
#[test]
fn a_read_is_not_deferred_if_another_handle_is_updated() {
    for (style, same) in [(Style::Robust, true), (Style::Lite, true), (Style::Robust, false), (Style::Lite, false)] {
        let mut b = Build::default();
        let (handle, other, third) = (b.variable(1), b.variable(1), b.variable(1));
        for (number, variable) in (1..).zip([handle, other, third]) {
            b.nodes[variable as usize].detail = if same { 1 } else { number };
        }
        let (read, first) = (b.read(handle), b.read(third));
        let gradient = b.op(0, &[(first, Plain)]);
        b.after(first, gradient);
        b.update(other, &[]);
        let late = b.update(third, &[gradient, read]);
        let plan = b.check(style);
        let call = |node: u32| plan.calls_of[node as usize];
        let at_once = call(read).is_some_and(|it| Some(it) != call(late));
        assert_eq!(at_once, same, "{style:?}");
    }
}

/// Only the push of another variable needs the product, which is made of the variable's memory.
#[test]
fn a_product_of_a_snapshot_is_not_overtaken_by_an_update() {
    for style in STYLES {
        let build = || {
            let (mut b, value, _) = build();
            let (variable, other) = (b.variable(1), b.variable(1));
            let read = b.read(variable);
            let product = b.op(1, &[(read, Plain)]);
            let (gradient, rest) = (b.op(0, &[(read, Plain)]), b.op(0, &[(read, Plain)]));
            let sum = b.op(1, &[(product, Plain), (rest, Plain)]);
            b.update(variable, &[gradient, value]);
            b.update(other, &[sum]);
            (b, product)
        };
        // As it is: at once.
        let (b, product) = build();
        let graph = Graph::new(b.nodes, b.edges, None).unwrap();
        let plan = star::plan(&graph, &roles(&graph), style, 0).unwrap();
        assert_eq!(plan.calls_of[product as usize], Some(0), "{style:?}");
        // With the order that is added: before the update, wherever it is made.
        build().0.check(style);
    }
}

/// Two conditions on a reference variable, whose value changes in between if `changes`: only the second has the update.
fn two_conditions(one_read: bool, changes: bool) -> (Graph<'static>, u32, u32) {
    let (mut b, value, _) = build();
    let flag = b.variable(1);
    let first = b.read(flag);
    let read = switch(&mut b, (value, 0), Plain, first);
    let between = if changes { b.update(flag, &[value]) } else { b.op(1, &[]) };
    b.after(read, between);
    let second = if one_read { first } else { b.read(flag) };
    let update = switch(&mut b, (value, 0), Plain, second);
    b.after(between, update);
    for gate in [read, update] {
        let user = b.op(1, &[]);
        b.input((gate, 1), user, 0, Plain);
    }
    (Graph::new(b.nodes, b.edges, None).unwrap(), read, update)
}

#[test]
fn reads_of_a_variable_at_two_moments_are_two_predicates() {
    let is_same = |one_read, changes| {
        let (graph, read, update) = two_conditions(one_read, changes);
        let flow = Flow::of(&graph).unwrap();
        let predicates = Predicates::of(&graph, &flow);
        predicates.implies(predicates.output(update, 1), predicates.output(read, 1))
    };
    assert!(is_same(true, false), "one read of a variable that nothing changes");
    assert!(!is_same(true, true), "what was read is the memory of the variable");
    assert!(!is_same(false, true));
    assert!(!is_same(false, false), "another session may change it");
}
