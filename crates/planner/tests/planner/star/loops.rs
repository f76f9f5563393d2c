use super::STYLES;
use super::build::Build;
use starwire_planner::graph::Class::{Plain, Resource};
use starwire_planner::graph::Kind;
use starwire_planner::placement::{Place, Reason};
use starwire_planner::star::{StarPlan, Style, Way};

/// A loop of the worker that counts. `body` runs as long as it turns, and the next turn waits for everything that
/// `finish` is given.
struct Turning {
    b: Build,
    frame: u32,
    body: u32,
    next: u32,
}

impl Turning {
    fn new(mut b: Build, frame: u32) -> Self {
        let start = b.op(0, &[]);
        let enter = b.node(Kind::Enter, 0, &[(start, Plain)]);
        b.nodes[enter as usize].detail = frame;
        let header = b.node(Kind::Merge, 0, &[(enter, Plain)]);
        let decision = b.op(0, &[(header, Plain)]);
        let condition = b.node(Kind::LoopCond, 0, &[(decision, Plain)]);
        let switch = b.node(Kind::Switch, 0, &[(header, Plain), (condition, Plain)]);
        let body = b.node(Kind::Identity, 0, &[]);
        b.input((switch, 1), body, 0, Plain);
        let count = b.op(0, &[(body, Plain)]);
        let next = b.node(Kind::NextIteration, 0, &[(count, Plain)]);
        b.input((next, 0), header, 1, Plain);
        b.node(Kind::Exit, 0, &[(switch, Plain)]);
        Self { b, frame, body, next }
    }

    /// A handle, in the loop.
    fn enter(&mut self, variable: u32) -> u32 {
        let task = self.b.nodes[variable as usize].task;
        let enter = self.b.node(Kind::Enter, task, &[(variable, Resource)]);
        (self.b.nodes[enter as usize].detail, self.b.nodes[enter as usize].invariant) = (self.frame, true);
        enter
    }

    /// Something of the body that waits for nothing else.
    fn input(&mut self, task: u32) -> u32 {
        self.b.op(task, &[(self.body, Plain)])
    }

    fn read(&mut self, handle: u32) -> u32 {
        let read = self.b.read(handle);
        self.b.after(self.body, read);
        read
    }

    /// A pull, something of the worker, and a push.
    fn step(&mut self, handle: u32) -> (u32, u32) {
        let read = self.read(handle);
        let gradient = self.b.op(0, &[(read, Plain)]);
        (read, self.b.update(handle, &[gradient]))
    }

    fn finish(&mut self, node: u32) {
        self.b.after(node, self.next);
    }

    fn check(self, style: Style) -> StarPlan {
        self.b.check(style)
    }
}

/// Variables on both servers, and a loop.
fn loop_over(tasks: &[u32]) -> (Turning, Vec<u32>) {
    let mut b = Build::default();
    let variables: Vec<u32> = tasks.iter().map(|task| b.variable(*task)).collect();
    let mut it = Turning::new(b, 1);
    let handles = variables.into_iter().map(|variable| it.enter(variable)).collect();
    (it, handles)
}

#[test]
fn each_turn_of_a_training_loop_is_a_pull_and_a_push() {
    for style in STYLES {
        let (mut it, handles) = loop_over(&[1, 2, 1]);
        let all = it.b.op(0, &[]);
        for handle in &handles {
            let (_, update) = it.step(*handle);
            it.b.after(update, all);
        }
        it.finish(all);
        let plan = it.check(style);
        let calls: Vec<_> = plan.calls.iter().map(|call| (call.round, call.task, call.nodes.len())).collect();
        assert_eq!(calls, [(1, 1, 2), (1, 2, 1), (2, 1, 2), (2, 2, 1)]);
        assert!(handles.iter().all(|handle| plan.places[*handle as usize] == Place::Pivot));
        assert!(!plan.places.iter().any(|place| matches!(place, Place::Left(_))));
    }
}

#[test]
fn what_may_still_run_in_the_next_turn_is_left() {
    for style in STYLES {
        let (mut it, handles) = loop_over(&[1, 1]);
        let (read, update) = it.step(handles[0]);
        let (_, waited_for) = it.step(handles[1]);
        it.finish(waited_for);
        let plan = it.check(style);
        for node in [read, update] {
            assert_eq!(plan.places[node as usize], Place::Left(Reason::Loop));
        }
        assert_eq!(plan.calls.len(), 2);
    }
}

#[test]
fn a_node_that_waits_for_something_elsewhere_must_end_with_its_turn() {
    for style in STYLES {
        for ends in [true, false] {
            let (mut it, handles) = loop_over(&[1]);
            let dequeue = it.input(0);
            it.b.nodes[dequeue as usize].blocking = true;
            let (_, update) = it.step(handles[0]);
            it.finish(update);
            if ends {
                it.finish(dequeue);
            }
            assert_eq!(it.check(style).calls.len(), if ends { 2 } else { 0 });
        }
    }
}

#[test]
fn nothing_is_kept_on_a_server_between_the_calls_of_a_turn() {
    // A rate that is pulled and pushed: outside of loops it stays on the server.
    let (mut it, handles) = loop_over(&[1, 1]);
    let (_, update) = it.step(handles[0]);
    let rate = it.read(handles[1]);
    let decayed = it.b.op(1, &[(rate, Plain)]);
    let shown = it.b.op(0, &[(decayed, Plain)]);
    it.b.input((decayed, 0), update, 2, Plain);
    it.b.after(shown, update);
    it.finish(update);
    let plan = it.check(Style::Robust);
    assert_eq!(plan.calls.len(), 2);
    assert!(plan.ways.contains(&Way::Relay) && !plan.ways.contains(&Way::Slot));
}

#[test]
fn a_branch_in_a_loop_has_calls_of_its_own() {
    for style in STYLES {
        let (mut it, handles) = loop_over(&[1]);
        let decision = it.input(0);
        let switched = it.b.node(Kind::Switch, 1, &[(handles[0], Resource), (decision, Plain)]);
        let value = it.b.node(Kind::Switch, 0, &[(it.body, Plain), (decision, Plain)]);
        let update = it.b.op(1, &[]);
        it.b.nodes[update as usize].stateful = true;
        it.b.input((switched, 1), update, 0, Resource);
        it.b.input((value, 1), update, 1, Plain);
        let done = it.b.op(0, &[]);
        it.b.after(update, done);
        let other = it.b.op(0, &[]);
        it.b.input((value, 0), other, 0, Plain);
        let merge = it.b.node(Kind::Merge, 0, &[(done, Plain), (other, Plain)]);
        it.finish(merge);
        let plan = it.check(style);
        assert_eq!((plan.calls.len(), plan.places[update as usize]), (1, Place::Called));
        assert_eq!(plan.calls[0].predicates.len(), 2);
    }
}

#[test]
fn a_merge_of_whatever_comes_first_waits_for_nothing() {
    let (mut it, handles) = loop_over(&[1]);
    let (_, update) = it.step(handles[0]);
    let done = it.b.op(0, &[]);
    it.b.after(update, done);
    let early = it.input(0);
    let merge = it.b.node(Kind::Merge, 0, &[(done, Plain), (early, Plain)]);
    it.b.nodes[merge as usize].detail = crate::simulate::AMBIGUOUS;
    it.finish(merge);
    assert_eq!(it.check(Style::Robust).calls.len(), 0);
}

#[test]
fn only_the_outermost_loop_has_calls() {
    let (mut it, handles) = loop_over(&[1]);
    let (_, update) = it.step(handles[0]);
    it.finish(update);
    // Inside: a loop that turns as often, with a read.
    let (outer, next) = (it.frame, it.next);
    let passed = it.b.node(Kind::Identity, 1, &[(handles[0], Resource)]);
    it.b.after(it.body, passed);
    it.finish(passed);
    let mut inner = Turning::new(it.b, outer + 1);
    // Its start is in the outer loop.
    let start = inner.b.edges.iter().find(|edge| inner.b.nodes[edge.dst as usize].detail == outer + 1).unwrap().src;
    inner.b.input((it.body, 0), start, 0, Plain);
    let handle = inner.enter(passed);
    let (read, inner_update) = inner.step(handle);
    inner.finish(inner_update);
    let exit = inner.b.nodes.iter().rposition(|node| node.kind == Kind::Exit).unwrap() as u32;
    inner.b.after(exit, next);
    let plan = inner.check(Style::Robust);
    assert_eq!(plan.places[read as usize], Place::Left(Reason::Loop));
    assert_eq!((plan.calls.len(), plan.places[update as usize]), (2, Place::Called));
}

#[test]
fn machinery_of_loops_moves_to_the_worker() {
    // A value of a server, which is passed from turn to turn.
    let (mut it, handles) = loop_over(&[1]);
    let (_, update) = it.step(handles[0]);
    it.finish(update);
    let value = it.b.variable(1);
    let first = it.b.read(value);
    let enter = it.b.node(Kind::Enter, 1, &[(first, Plain)]);
    it.b.nodes[enter as usize].detail = it.frame;
    let header = it.b.node(Kind::Merge, 1, &[(enter, Plain)]);
    let condition = it.b.nodes.iter().position(|node| node.kind == Kind::LoopCond).unwrap() as u32;
    let switch = it.b.node(Kind::Switch, 1, &[(header, Plain), (condition, Plain)]);
    let next = it.b.node(Kind::NextIteration, 1, &[]);
    it.b.input((switch, 1), next, 0, Plain);
    it.b.input((next, 0), header, 1, Plain);
    it.b.after(update, next);
    let exit = it.b.node(Kind::Exit, 1, &[(switch, Plain)]);
    let plan = it.check(Style::Robust);
    for node in [enter, header, switch, next, exit] {
        assert_eq!(plan.places[node as usize], Place::Moved);
    }
}

/// In TensorFlow 2, a loop counts its turns apart from the variables of its body, and either may decide.
#[test]
fn only_what_the_condition_waits_for_ends_a_turn() {
    for (decides, calls) in [(true, 2), (false, 0)] {
        let (mut it, handles) = loop_over(&[1]);
        // Passed from turn to turn, beside the counter.
        let start = it.b.op(0, &[]);
        let enter = it.b.node(Kind::Enter, 0, &[(start, Plain)]);
        it.b.nodes[enter as usize].detail = it.frame;
        let header = it.b.node(Kind::Merge, 0, &[(enter, Plain)]);
        let condition = it.b.nodes.iter().position(|node| node.kind == Kind::LoopCond).unwrap() as u32;
        let switch = it.b.node(Kind::Switch, 0, &[(header, Plain), (condition, Plain)]);
        let next = it.b.node(Kind::NextIteration, 0, &[]);
        it.b.input((switch, 1), next, 0, Plain);
        it.b.input((next, 0), header, 1, Plain);
        let (_, update) = it.step(handles[0]);
        it.b.after(update, if decides { it.next } else { next });
        assert_eq!(it.check(Style::Robust).calls.len(), calls);
    }
}

/// TensorFlow tells a server about the next turn only if something in the loop goes there.
#[test]
fn a_server_that_sends_in_a_loop_is_told_about_its_turns() {
    for style in STYLES {
        for told in [true, false] {
            let (mut it, handles) = loop_over(&[1]);
            let (_, update) = it.step(handles[0]);
            it.finish(update);
            let value = it.b.op(1, &[]);
            let enter = it.b.node(Kind::Enter, 1, &[(value, Plain)]);
            (it.b.nodes[enter as usize].detail, it.b.nodes[enter as usize].invariant) = (it.frame, true);
            let sends = it.b.op(1, &[(enter, Plain)]);
            for node in [enter, sends] {
                it.b.nodes[node as usize].unknown = true;
            }
            let takes = it.b.op(0, &[(sends, Plain)]);
            it.finish(takes);
            if told {
                it.b.after(it.body, sends);
            }
            let place = if told { Place::Called } else { Place::Left(Reason::Loop) };
            assert_eq!(it.check(style).places[update as usize], place);
        }
    }
}
