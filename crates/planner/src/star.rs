//! star_server: turns the parameter servers' part of a graph into calls.
//!
//! The worker sends a *call* to one parameter server: it takes along everything that its nodes need (feeds) and brings
//! back everything that others need (fetches). A message each way replaces one message per tensor or control edge.
//!
//! 1. [`placement`](super::placement): what becomes of each node. Constants and variables are copied wherever they are
//!    needed (a variable is found by name). Conditional nodes that decide which nodes are dead, or that could run
//!    anywhere, move to the worker, because a call's outputs are all alive or all dead. Exceptions: a node needed by
//!    only one call under the same conditions stays in it, and a no-op of the worker that only connects such nodes
//!    joins them. Nodes that cannot be separated from their neighbours, and loops of an unusual form
//!    ([`loops`](super::loops)), are left to send and receive.
//! 2. [`classes`](super::classes): called nodes of a class have the same server, loop and
//!    [predicates](super::predicates), and are behind the same blockers.
//! 3. [`rounds`](super::rounds): each node gets a round; rounds never decrease along a dependency, and increase where a
//!    class is entered. One class in one round is one call, so calls never wait for each other in a cycle. Values that
//!    only a later call of the class needs are made there.
//! 4. [`parts`](super::parts): a call that would carry much is split into independent parts.
//! 5. A reference that would have to leave its call is taken from a copy of its variable, if that is known. If not,
//!    both ends are left to send and receive, and planning starts again without them.
//!
//! [`Style::Robust`] runs each node as early as possible, and once. [`Style::Lite`] makes fewer calls: nodes with slack
//! go where their class has a call anyway, and reads of variables are repeated where they are needed.

use std::collections::{BTreeMap, BTreeSet};

use super::aliases::Aliases;
use super::classes::{ClassId, Classes};
use super::flow::{Flow, ROOT};
use super::graph::{Class, Edge, Graph, Kind, PlanError, index};
use super::loops::Loops;
use super::parts::{Part, Parts};
use super::placement::{Place, Placement, Reason, Roles, is_reference, large_branches};
use super::predicates::{Fact, Predicates};
use super::reads::repeatable;
use super::roots::Roots;
use super::rounds::Rounds;
use super::schedule::{Costs, Schedule};
use super::sets::SetId;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// `star_server`
    Robust,
    /// `star_server_lite`
    Lite,
}

/// How an edge is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Way {
    /// As before: neither end is in a call.
    Untouched,
    /// Within one call.
    Inside,
    /// The consumer has a copy of the producer.
    Copy,
    /// The consumer takes the reference from a copy of this variable, once the producer is done.
    CopyOf(u32),
    /// From outside all calls into one.
    Feed,
    /// Out of a call.
    Fetch,
    /// From a call to a later one to the same server, where the value stays in between.
    Slot,
    /// From a call to a later one to another server, which may receive it directly: both run or neither.
    Direct,
    /// From a call to a later one to another server, or in a loop, through the worker.
    Relay,
    /// A control edge or a choice of branch: only order and liveness.
    Order,
    /// No longer needed.
    Dropped,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub task: u32,
    pub round: u32,
    /// The conditions under which it is made.
    pub predicates: Vec<Fact>,
    pub nodes: Vec<u32>,
    /// Copies that its nodes need.
    pub copies: Vec<u32>,
    /// Values that it takes along or finds on the server: producer, output and way.
    pub feeds: Vec<(u32, i32, Way)>,
    /// Values that it brings back to the worker.
    pub fetches: Vec<(u32, i32)>,
    /// Earlier calls that must be done.
    pub after: Vec<u32>,
    /// Nodes outside of calls that must be done and alive: control edges, with the output for pivots (else -1).
    pub controls: Vec<(u32, i32)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StarPlan {
    /// By node.
    pub places: Vec<Place>,
    /// By node: its call. Copied nodes have one if their value is fetched.
    pub calls_of: Vec<Option<u32>>,
    /// Copied nodes that the graph keeps as well, because a node that was left needs them.
    pub kept: Vec<u32>,
    /// By edge.
    pub ways: Vec<Way>,
    /// By round, then by server.
    pub calls: Vec<Call>,
}

/// The number of attempts that leave out single nodes, before everything tied together is left out.
const PATIENCE: usize = 8;

/// `split_bytes`: a call that would carry at least twice as much is split into parts of about this size, if possible.
/// 0: never.
pub fn plan(graph: &Graph, roles: &Roles, style: Style, split_bytes: u64) -> Result<StarPlan, PlanError> {
    let flow = Flow::of(graph)?;
    let predicates = Predicates::of(graph, &flow);
    let costs = Costs { node_us: 0, message_us: 0, bytes_per_us: 1 };
    let schedule = Schedule::of(graph, &flow, costs);
    let loops = Loops::of(graph, &flow, &predicates, &schedule, |node| roles.is_server(graph.node(node).task));
    let classes = Classes::new(graph, &flow, &predicates, &schedule);
    let known = Roots::new(graph, &flow);
    let aliases = Aliases::new(graph, &flow, &known);
    let repeatable = match style {
        Style::Robust => vec![false; graph.len()],
        Style::Lite => repeatable(graph, &known),
    };
    let mut left = large_branches(graph, roles);
    let mut attempts = 0;
    loop {
        let placement = Placement::of(graph, &flow, &predicates, &loops, &classes, roles, &known, &left, &repeatable);
        let make = |apart: &BTreeSet<ClassId>| {
            let rounds = Rounds::new(graph, &flow, &placement, &aliases, apart);
            match style {
                Style::Robust => rounds.robust(),
                Style::Lite => rounds.lite(),
            }
        };
        let mut rounds = make(&BTreeSet::new());
        let large = Parts::new(graph, &placement, &rounds, split_bytes).large_classes();
        if !large.is_empty() {
            rounds = make(&large);
        }
        let splitter = Parts::new(graph, &placement, &rounds, split_bytes);
        let parts = splitter.find();
        let numbers = number_calls(graph, &placement, &classes, &rounds, &parts);
        let split = Split { graph, flow: &flow, placement: &placement, calls_of: &numbers.calls_of };
        let mut torn = split.torn(attempts >= PATIENCE);
        torn.extend(split.untold());
        torn.extend(split.parted());
        torn.extend(aliases.broken(&placement));
        torn.extend(aliases.late(&placement, &numbers.calls_of));
        torn.extend(splitter.overfull(&parts));
        if torn.is_empty() {
            let worth_it = !numbers.keys.is_empty() && split.anything_crosses();
            if worth_it || !leave_all(graph, &placement, &mut left) {
                return Ok(split.plan(&numbers, &predicates));
            }
            continue;
        }
        // Terminates: each attempt leaves out more nodes.
        torn.into_iter().for_each(|(node, reason)| left[index(node)] = Some(reason));
        attempts += 1;
    }
}

struct Numbers {
    calls_of: Vec<Option<u32>>,
    /// By call.
    keys: Vec<Key>,
    /// By call.
    rounds: Vec<u32>,
}

/// Ordered like the calls.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    round: u32,
    level: u32,
    task: u32,
    class: ClassId,
    part: u32,
}

fn number_calls(graph: &Graph, placement: &Placement, classes: &Classes, rounds: &[u32], parts: &[Part]) -> Numbers {
    let key = |node: u32| {
        let class = placement.class(node);
        let (level, part) = parts[index(node)];
        Key { round: rounds[index(node)], level, task: classes.task(class), class, part }
    };
    let called = || graph.ids().filter(|node| placement.is_called(*node));
    let keys: BTreeSet<_> = called().map(key).collect();
    let keys: Vec<_> = keys.into_iter().collect();
    let numbers: BTreeMap<_, u32> = keys.iter().copied().zip(0..).collect();
    let mut calls_of = vec![None; graph.len()];
    for node in called() {
        calls_of[index(node)] = numbers.get(&key(node)).copied();
    }
    // To everything else, a level counts as a round.
    let moments: BTreeSet<_> = keys.iter().map(|key| (key.round, key.level)).collect();
    let moments: BTreeMap<_, u32> = moments.into_iter().zip(1..).collect();
    let rounds = keys.iter().map(|key| moments.get(&(key.round, key.level)).copied().unwrap_or(0)).collect();
    Numbers { calls_of, keys, rounds }
}

/// Returns whether there was anything to leave out.
fn leave_all(graph: &Graph, placement: &Placement, left: &mut [Option<Reason>]) -> bool {
    let mut any = false;
    for node in graph.ids() {
        if !matches!(placement.place(node), Place::Stays | Place::Left(_)) {
            left[index(node)] = Some(Reason::NothingCrosses);
            any = true;
        }
    }
    any
}

struct Split<'a> {
    graph: &'a Graph<'a>,
    flow: &'a Flow,
    placement: &'a Placement<'a>,
    calls_of: &'a [Option<u32>],
}

impl Split<'_> {
    fn call(&self, node: u32) -> Option<u32> {
        self.calls_of[index(node)]
    }

    fn place(&self, node: u32) -> Place {
        self.placement.place(node)
    }

    /// Nodes whose references would have to leave their call. `all`: every node on a server that touches something that
    /// cannot leave it.
    fn torn(&self, all: bool) -> Vec<(u32, Reason)> {
        let mut torn = Vec::new();
        let called = |node: u32| matches!(self.place(node), Place::Called | Place::Pivot);
        for edge in self.graph.edges() {
            let reason = match edge.class {
                Class::Resource => Reason::Resource,
                Class::Variant => Reason::Variant,
                _ if self.placement.is_tied(edge) => Reason::Reference,
                _ => continue,
            };
            if (all && self.place(edge.src) != Place::Copied) || !self.is_served(edge) {
                let ends = [edge.src, edge.dst];
                torn.extend(ends.into_iter().filter(|node| called(*node)).map(|node| (node, reason)));
            }
        }
        torn
    }

    /// Nodes that would have to send or receive what only one iteration of their loop has: the value that enters the
    /// loop, or one that is passed on to the next iteration. TensorFlow receives in every iteration, so the others
    /// would wait for ever.
    fn parted(&self) -> Vec<(u32, Reason)> {
        let left = |node: u32| matches!(self.place(node), Place::Left(_));
        let mut parted = Vec::new();
        for edge in self.graph.edges().iter().filter(|edge| !self.graph.crosses(edge)) {
            let it = self.graph.node(edge.src);
            let of_one = it.kind == Kind::NextIteration || (it.kind == Kind::Enter && !it.invariant);
            if of_one && left(edge.src) != left(edge.dst) {
                let kept = if left(edge.src) { edge.dst } else { edge.src };
                parted.push((kept, Reason::Loop));
            }
        }
        parted
    }

    /// Nodes of loops without which their server would send from iterations about which nothing tells it.
    fn untold(&self) -> Vec<(u32, Reason)> {
        let on =
            |node: u32| matches!(self.place(node), Place::Stays | Place::Left(_)).then(|| self.graph.node(node).task);
        let conditions = self.graph.ids().filter(|node| self.graph.node(*node).kind == Kind::LoopCond);
        let mut told: BTreeSet<_> = conditions.filter_map(|node| Some((self.flow.inside(node), on(node)?))).collect();
        let mut tell = BTreeSet::new();
        for edge in self.graph.edges() {
            let frame = self.flow.outputs(edge.src);
            let crosses = frame == self.flow.inside(edge.dst) && on(edge.src) != on(edge.dst);
            if frame == ROOT || !crosses || self.place(edge.src) == Place::Copied {
                continue;
            }
            told.extend(on(edge.dst).map(|task| (frame, task)));
            tell.extend(on(edge.src).map(|task| (frame, task)));
        }
        let is_there = |node: u32| {
            let at = (self.flow.inside(node).max(self.flow.outputs(node)), self.graph.node(node).task);
            tell.contains(&at) && !told.contains(&at)
        };
        let replaced = self.graph.ids().filter(|node| on(*node).is_none() && is_there(*node));
        replaced.map(|node| (node, Reason::Loop)).collect()
    }

    /// Whether a value that cannot travel gets from one end to the other.
    fn is_served(&self, edge: &Edge) -> bool {
        let (from, to) = (self.call(edge.src), self.call(edge.dst));
        let inside = from.is_some() && from == to;
        let server = !self.graph.crosses(edge);
        let tied = self.placement.is_tied(edge);
        let known = tied && self.placement.root(edge).is_some() && server;
        match (self.place(edge.src), self.place(edge.dst)) {
            (Place::Called, Place::Called) => inside || known,
            // A variable itself cannot decide: the decision is made on the client.
            (Place::Copied, Place::Pivot) => server && !(edge.dst_input == 1 && is_reference(edge)),
            (Place::Copied, Place::Called | Place::Copied) => server,
            (Place::Pivot, Place::Called | Place::Pivot) | (Place::Called, Place::Pivot) => known,
            // A Switch selects a branch; a control edge from a node that was left does not.
            (Place::Left(_), Place::Called | Place::Pivot) => {
                known && self.graph.node(edge.src).kind != Kind::Switch && edge.class != Class::Variant
            }
            (Place::Called | Place::Pivot, _) | (_, Place::Called | Place::Pivot) => !tied && !server,
            _ => true,
        }
    }

    /// Calls that nothing outside depends on save nothing.
    fn anything_crosses(&self) -> bool {
        let stays = |node: u32| self.place(node) == Place::Stays;
        let replaced = |node: u32| !matches!(self.place(node), Place::Stays | Place::Left(_));
        let mut edges = self.graph.edges().iter().filter(|edge| !self.placement.is_copied(self.graph, edge));
        edges.any(|edge| stays(edge.src) && replaced(edge.dst) || stays(edge.dst) && replaced(edge.src))
    }

    fn way(&self, edge: &Edge, same_fate: impl Fn(u32, u32) -> bool) -> Way {
        let (src, dst) = (self.place(edge.src), self.place(edge.dst));
        if self.placement.is_copied(self.graph, edge) {
            return match dst {
                Place::Left(_) => Way::Untouched,
                Place::Pivot if edge.dst_input != 1 => Way::Dropped,
                _ if edge.is_control() => Way::Dropped,
                _ if is_reference(edge) && self.graph.crosses(edge) => Way::Untouched,
                _ => Way::Copy,
            };
        }
        let (from, to) = (self.call(edge.src), self.call(edge.dst));
        if from.is_some() && from == to {
            return Way::Inside;
        }
        let travels = !(edge.is_control() || src == Place::Pivot);
        match (from, to) {
            // A Pivot's data input is no longer needed; its liveness is.
            _ if dst == Place::Pivot && edge.dst_input == 0 => Way::Order,
            (None, None) => Way::Untouched,
            (_, Some(_)) if self.placement.is_tied(edge) => match self.placement.root(edge) {
                Some(root) => Way::CopyOf(root),
                None => Way::Untouched,
            },
            _ if !travels => Way::Order,
            (None, Some(_)) => Way::Feed,
            (Some(_), None) => Way::Fetch,
            (Some(from), Some(to)) => {
                // A slot is there for one value in a step.
                if !self.graph.crosses(edge) && self.flow.inside(edge.src) == ROOT {
                    Way::Slot
                } else if self.graph.crosses(edge) && same_fate(from, to) {
                    Way::Direct
                } else {
                    Way::Relay
                }
            }
        }
    }

    fn plan(&self, numbers: &Numbers, predicates: &Predicates) -> StarPlan {
        let mut conditions = vec![SetId::EMPTY; numbers.keys.len()];
        for node in self.graph.ids() {
            if let Some(call) = self.call(node) {
                conditions[index(call)] = predicates.node(node);
            }
        }
        let same_fate = |a: u32, b: u32| conditions[index(a)] == conditions[index(b)];
        let ways: Vec<Way> = self.graph.edges().iter().map(|edge| self.way(edge, same_fate)).collect();
        let empty = |(at, key): (usize, &Key)| Call {
            task: key.task,
            round: numbers.rounds[at],
            predicates: predicates.facts(conditions[at]).to_vec(),
            nodes: Vec::new(),
            copies: Vec::new(),
            feeds: Vec::new(),
            fetches: Vec::new(),
            after: Vec::new(),
            controls: Vec::new(),
        };
        let mut calls: Vec<Call> = numbers.keys.iter().enumerate().map(empty).collect();
        for node in self.graph.ids() {
            if let Some(call) = self.call(node) {
                calls[index(call)].nodes.push(node);
            }
        }
        let mut kept = Vec::new();
        for (edge, way) in self.graph.edges().iter().zip(&ways) {
            self.serve(edge, *way, &mut calls);
            if *way == Way::Untouched && self.place(edge.src) == Place::Copied {
                kept.push(edge.src);
            }
        }
        let kept = self.with_their_variables(kept, &[]);
        for call in &mut calls {
            call.copies = self.with_their_variables(std::mem::take(&mut call.copies), &call.nodes);
            sort(&mut call.feeds);
            sort(&mut call.fetches);
            sort(&mut call.after);
            sort(&mut call.controls);
        }
        StarPlan { places: self.placement.places.clone(), calls_of: self.calls_of.to_vec(), kept, ways, calls }
    }

    /// Adds an edge to the calls at its ends.
    fn serve(&self, edge: &Edge, way: Way, calls: &mut [Call]) {
        let (from, to) = (self.call(edge.src), self.call(edge.dst));
        let what = (edge.src, edge.src_output);
        match way {
            Way::Copy | Way::CopyOf(_) => {
                if let Some(to) = to {
                    let copy = if let Way::CopyOf(root) = way { root } else { edge.src };
                    if self.call(copy) != Some(to) {
                        calls[index(to)].copies.push(copy);
                    }
                }
            }
            Way::Feed | Way::Slot | Way::Direct | Way::Relay => {
                if let Some(to) = to {
                    calls[index(to)].feeds.push((edge.src, edge.src_output, way));
                }
            }
            _ => {}
        }
        if let (Some(from), Way::Fetch | Way::Relay) = (from, way) {
            calls[index(from)].fetches.push(what);
        }
        let orders = matches!(way, Way::Order | Way::CopyOf(_) | Way::Slot | Way::Direct | Way::Relay);
        match (orders, from, to) {
            (true, Some(from), Some(to)) => calls[index(to)].after.push(from),
            (true, None, Some(to)) => {
                let output = if self.place(edge.src) == Place::Pivot { edge.src_output } else { -1 };
                calls[index(to)].controls.push((edge.src, output));
            }
            _ => {}
        }
    }

    /// A copied read needs a copy of its variable, unless the variable is already there.
    fn with_their_variables(&self, mut copies: Vec<u32>, there: &[u32]) -> Vec<u32> {
        let mut all = BTreeSet::new();
        while let Some(copy) = copies.pop() {
            if there.binary_search(&copy).is_err() && all.insert(copy) {
                copies.extend(self.graph.ins(copy).map(|edge| edge.src));
            }
        }
        all.into_iter().collect()
    }
}

fn sort<T: Ord>(list: &mut Vec<T>) {
    list.sort_unstable();
    list.dedup();
}
