//! Reads and updates of one variable that no path orders.
//!
//! TensorFlow runs them when they are ready: a read that needs nothing when the step begins, the update once a worker
//! has sent a value. In a call, all values arrive together, so that this order would be lost. It is therefore made a
//! part of the graph before that is split into calls. Of a read and an update of one variable,
//!
//! 1. the one goes first that fewer changes of task precede, on the longest path to it: a message takes longer than
//!    what runs in between;
//! 2. of two with as many, the one that fewer updates precede, on any path since the last change of task;
//! 3. else the read. If it is itself an update, of another variable, the place in the graph decides.
//!
//! A *read* is every use of the variable's memory ([`aliases`](super::aliases)). No circle can arise: neither number
//! ever decreases along an edge, the second grows behind each update, and at equal numbers only the third rule leads
//! out of an update, always forwards.
//!
//! Two are left as they are if one of them would have to wait for more than it did: for something that is not an edge
//! (a queue, a feed that the client holds back), or for a branch that it does not belong to; and so are those in loops.

use std::collections::{BTreeMap, BTreeSet};

use super::aliases::{Aliases, Owner};
use super::flow::{Flow, ROOT, Visit, forward_ins};
use super::graph::{Class, Edge, Graph, Kind, Memory, Node, PlanError, index, number};
use super::placement::is_reference;
use super::predicates::Predicates;
use super::roots::{Roots, may_change};
use super::schedule::{Costs, Schedule};
use starwire_marks::mark;

/// An edge to add.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Order {
    pub src: u32,
    /// Negative: `dst` waits for `src`. Else other tasks take this output from a copy, for which `dst` waits: what they
    /// would get is the memory that `dst` changes.
    pub src_output: i32,
    pub dst: u32,
}

/// What to add to a graph so that reads go before updates, in a fixed order.
pub fn orders(graph: &Graph) -> Result<Vec<Order>, PlanError> {
    let flow = Flow::of(graph)?;
    let roots = Roots::new(graph, &flow);
    let aliases = Aliases::new(graph, &flow, &roots);
    let variables = variables(graph, &roots, &aliases);
    if variables.is_empty() {
        return Ok(Vec::new());
    }
    let predicates = Predicates::of(graph, &flow);
    let schedule = Schedule::alone(graph, &flow, Costs { node_us: 0, message_us: 0, bytes_per_us: 1 });
    let ready = Ready::new(graph, &flow);
    let all = Unordered { graph, flow: &flow, predicates: &predicates, schedule: &schedule, ready: &ready };
    let mut found = Vec::new();
    all.reads_first(&variables, &mut found);
    all.updates_first(&variables, &mut found);
    all.copies_first(&variables, &mut found);
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Adds these orders to a graph.
pub fn apply(nodes: &mut Vec<Node>, edges: &mut Vec<Edge>, orders: &[Order]) {
    let mut copies: BTreeMap<(u32, i32), u32> = BTreeMap::new();
    for order in orders {
        let mut src = order.src;
        if order.src_output >= 0 {
            src = *copies.entry((order.src, order.src_output)).or_insert_with(|| {
                mark!("a value is copied before an update");
                let original = nodes[index(order.src)];
                nodes.push(Node { device: original.device, ..Node::of(Kind::Identity, original.task) });
                number(nodes.len() - 1)
            });
        }
        edges.push(control(src, order.dst));
    }
    for ((src, src_output), copy) in copies {
        let task = nodes[index(src)].task;
        let mut taken = None;
        for edge in edges.iter_mut().filter(|edge| (edge.src, edge.src_output) == (src, src_output)) {
            if nodes[index(edge.dst)].task != task && !is_reference(edge) {
                taken = Some(*edge);
                (edge.src, edge.src_output) = (copy, 0);
            }
        }
        edges.extend(taken.map(|edge| Edge { src, src_output, dst: copy, dst_input: 0, ..edge }));
    }
}

fn control(src: u32, dst: u32) -> Edge {
    let (class, memory) = (Class::Control, Memory::Host);
    Edge { src, src_output: -1, dst, dst_input: -1, class, memory, bytes: None }
}

/// A variable that is updated, and also read.
#[derive(Default)]
struct Variable {
    reads: BTreeSet<u32>,
    updates: BTreeSet<u32>,
    /// Values that may be its memory and that other tasks take.
    taken: BTreeSet<(u32, i32)>,
}

fn variables(graph: &Graph, roots: &Roots, aliases: &Aliases) -> BTreeMap<u32, Variable> {
    let mut all: BTreeMap<u32, Variable> = BTreeMap::new();
    let updates = graph.edges().iter().filter(|edge| may_change(graph, edge) && !graph.crosses(edge));
    for edge in updates {
        if let Some(variable) = roots.variable(edge) {
            all.entry(variable).or_default().updates.insert(edge.dst);
        }
    }
    let mut of_task: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for variable in all.keys() {
        of_task.entry(graph.node(*variable).task).or_default().push(*variable);
    }
    let owned = |owner: Owner| match owner {
        Owner::Variable(variable) => vec![variable],
        Owner::Any(task) => of_task.get(&task).cloned().unwrap_or_default(),
    };
    for edge in graph.edges().iter().filter(|edge| !edge.is_control()) {
        let by_handle = matches!(edge.class, Class::Ref | Class::Resource);
        let read = if !by_handle {
            aliases.carried(edge).into_iter().flat_map(owned).collect()
        } else if graph.node(edge.dst).pure_read && !graph.crosses(edge) {
            roots.variable(edge).into_iter().collect()
        } else {
            Vec::new()
        };
        // What the client fetches from a server is the variable's memory until the step ends.
        let is_fetch = graph.node(edge.dst).kind == Kind::Fetch;
        for variable in read.iter().filter(|_| !is_fetch) {
            all.entry(*variable).or_default().reads.insert(edge.dst);
        }
        if is_taken(graph, edge) {
            for variable in aliases.of(edge.src).iter().copied().flat_map(owned) {
                all.entry(variable).or_default().taken.insert((edge.src, edge.src_output));
            }
        }
    }
    all.retain(|_, it| {
        let is_read = !it.reads.is_empty() || !it.taken.is_empty();
        is_read && !it.updates.is_empty()
    });
    all
}

/// Another task takes the value.
fn is_taken(graph: &Graph, edge: &Edge) -> bool {
    graph.crosses(edge) && !edge.is_control() && !is_reference(edge)
}

/// How early a node can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Moment {
    /// Changes of task on any path to here.
    level: u32,
    /// Updates on any path to here within this level.
    updates: u32,
}

struct Ready {
    /// By node.
    moments: Vec<Moment>,
    is_update: Vec<bool>,
    /// By node: its place in an order in which the graph can run.
    places: Vec<u32>,
}

impl Ready {
    fn new(graph: &Graph, flow: &Flow) -> Self {
        let mut is_update = vec![false; graph.len()];
        for edge in graph.edges().iter().filter(|edge| may_change(graph, edge)) {
            is_update[index(edge.dst)] = true;
        }
        let mut all = Self { moments: vec![Moment::default(); graph.len()], is_update, places: vec![0; graph.len()] };
        let mut ends = vec![Moment::default(); flow.parents.len()];
        for (place, step) in (0..).zip(&flow.order) {
            let (moment, frame) = match *step {
                Visit::Node(node) => {
                    let mut moment = Moment::default();
                    if graph.node(node).kind == Kind::Exit {
                        moment = ends[index(flow.inside(node))];
                    }
                    for edge in forward_ins(graph, node) {
                        moment = moment.max(all.after(edge.src, u32::from(graph.crosses(edge))));
                    }
                    all.moments[index(node)] = moment;
                    all.places[index(node)] = place;
                    (all.after(node, 0), flow.outputs(node))
                }
                Visit::End(frame) => (ends[index(frame)], flow.parents[index(frame)]),
            };
            ends[index(frame)] = ends[index(frame)].max(moment);
        }
        all
    }

    fn after(&self, node: u32, crossings: u32) -> Moment {
        let Moment { level, updates } = self.moments[index(node)];
        match crossings {
            0 => Moment { level, updates: updates + u32::from(self.is_update[index(node)]) },
            _ => Moment { level: level + crossings, updates: 0 },
        }
    }

    /// Whether the read goes before the update, by the rules above.
    fn reads_first(&self, read: u32, update: u32) -> bool {
        let by_place = || !self.is_update[index(read)] || self.places[index(read)] < self.places[index(update)];
        match self.moments[index(read)].cmp(&self.moments[index(update)]) {
            std::cmp::Ordering::Less => true,
            std::cmp::Ordering::Equal => by_place(),
            std::cmp::Ordering::Greater => false,
        }
    }
}

/// Sources whose successors are found together.
const AT_ONCE: usize = 64;

struct Unordered<'a> {
    graph: &'a Graph<'a>,
    flow: &'a Flow,
    predicates: &'a Predicates,
    schedule: &'a Schedule,
    ready: &'a Ready,
}

impl Unordered<'_> {
    fn reads_first(&self, variables: &BTreeMap<u32, Variable>, found: &mut Vec<Order>) {
        let pairs = variables.values().map(|variable| (&variable.reads, &variable.updates));
        self.order(pairs, |read, update| self.ready.reads_first(read, update), found);
    }

    fn updates_first(&self, variables: &BTreeMap<u32, Variable>, found: &mut Vec<Order>) {
        let pairs = variables.values().map(|variable| (&variable.updates, &variable.reads));
        self.order(pairs, |update, read| !self.ready.reads_first(read, update), found);
    }

    /// Orders each of the first nodes before each of the second that it `leads`, unless a path does. Of first nodes
    /// that follow each other, only the last needs an edge.
    fn order<'s>(
        &self,
        pairs: impl Iterator<Item = (&'s BTreeSet<u32>, &'s BTreeSet<u32>)>,
        leads: impl Fn(u32, u32) -> bool,
        found: &mut Vec<Order>,
    ) {
        let pairs: Vec<_> = pairs.flat_map(|(first, second)| first.iter().map(move |node| (*node, second))).collect();
        for chunk in pairs.chunks(AT_ONCE) {
            let before = self.before(chunk.iter().map(|(node, _)| vec![*node]));
            let mut open: BTreeMap<u32, u64> = BTreeMap::new();
            for (bit, (node, others)) in chunk.iter().enumerate() {
                let is_open = |other: &&u32| {
                    *other != node
                        && before[index(**other)] >> bit & 1 == 0
                        && leads(*node, **other)
                        && self.may_wait(**other, (*node, -1))
                };
                for other in others.iter().filter(is_open) {
                    *open.entry(*other).or_default() |= 1 << bit;
                }
            }
            let same = |node: u32| bits(chunk.iter().map(|(other, _)| *other == node));
            let sooner: Vec<u64> = chunk.iter().map(|(node, _)| before[index(*node)] & !same(*node)).collect();
            for (dst, open) in open {
                let of_open = |bit: usize| if open >> bit & 1 != 0 { sooner[bit] } else { 0 };
                let followed = (0..chunk.len()).fold(0, |all, bit| all | of_open(bit));
                let last = chunk.iter().enumerate().filter(|(bit, _)| (open & !followed) >> bit & 1 != 0);
                found.extend(last.map(|(_, (src, _))| Order { src: *src, src_output: -1, dst }));
            }
        }
    }

    /// An update waits until a value that is the variable's memory is copied for other tasks, unless it waits for each
    /// of these anyway. Each fetches the value for itself.
    fn copies_first(&self, variables: &BTreeMap<u32, Variable>, found: &mut Vec<Order>) {
        let mut taken = Vec::new();
        for it in variables.values() {
            for value in &it.taken {
                let takers = self.takers(*value);
                taken.extend(takers.into_values().map(|takers| (*value, takers, &it.updates)));
            }
        }
        for chunk in taken.chunks(AT_ONCE) {
            let before = self.before(chunk.iter().map(|(_, takers, _)| takers.clone()));
            for (bit, ((src, src_output), _, updates)) in chunk.iter().enumerate() {
                let waits = |update: &&u32| {
                    *update != src
                        && before[index(**update)] >> bit & 1 == 0
                        && self.ready.reads_first(*src, **update)
                        && self.may_wait(**update, (*src, *src_output))
                };
                let orders = updates.iter().filter(waits);
                found.extend(orders.map(|dst| Order { src: *src, src_output: *src_output, dst: *dst }));
            }
        }
    }

    /// The nodes of other tasks that take a value, by device.
    fn takers(&self, (src, output): (u32, i32)) -> BTreeMap<(u32, u32), Vec<u32>> {
        let mut takers: BTreeMap<_, Vec<u32>> = BTreeMap::new();
        let taken = self.graph.outs(src).filter(|edge| edge.src_output == output && is_taken(self.graph, edge));
        for edge in taken {
            let it = self.graph.node(edge.dst);
            takers.entry((it.task, it.device)).or_default().push(edge.dst);
        }
        takers
    }

    /// Whether a node can wait for an output without waiting for anything else than it does, and is not skipped with
    /// it.
    fn may_wait(&self, node: u32, (other, output): (u32, i32)) -> bool {
        let outside = |node: u32| self.flow.inside(node) == ROOT && self.flow.outputs(node) == ROOT;
        outside(node)
            && outside(other)
            && self.predicates.implies(self.predicates.node(node), self.predicates.output(other, output))
            && self.schedule.waits_as_well(node, other)
    }

    /// By node: which of the sources it is, or comes after in every step that runs it.
    fn before(&self, sources: impl Iterator<Item = Vec<u32>>) -> Vec<u64> {
        let mut before = vec![0u64; self.graph.len()];
        for (bit, nodes) in sources.enumerate() {
            nodes.iter().for_each(|node| before[index(*node)] |= 1 << bit);
        }
        for step in &self.flow.order {
            let Visit::Node(node) = *step else { continue };
            // A Merge waits for one of its values only: a dead one may come from a node that runs later.
            let one_of = self.graph.node(node).kind == Kind::Merge;
            let (mut all, mut common) = (0, u64::MAX);
            for edge in forward_ins(self.graph, node) {
                if one_of && !edge.is_control() {
                    common &= before[index(edge.src)];
                } else {
                    all |= before[index(edge.src)];
                }
            }
            before[index(node)] |= if one_of { all | common } else { all };
        }
        before
    }
}

fn bits(set: impl Iterator<Item = bool>) -> u64 {
    set.enumerate().fold(0, |all, (bit, is_set)| all | u64::from(is_set) << bit)
}
