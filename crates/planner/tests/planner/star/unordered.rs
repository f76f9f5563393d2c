//! Reads go before updates that no edge orders with them: what [`unordered`](starwire_planner::unordered) promises,
//! written down a second time and without regard to speed.

use std::collections::{BTreeMap, BTreeSet};

use crate::generate::Case;
use crate::simulate::Outcome;
use starwire_planner::flow::{Flow, ROOT, Visit, forward_ins};
use starwire_planner::graph::{Class, Edge, Graph, Kind};
use starwire_planner::predicates::Predicates;
use starwire_planner::schedule::{Costs, Schedule};

/// What has to hold in every run.
#[derive(Default)]
pub(super) struct Rule {
    /// Those with higher numbers are copies.
    pub(super) nodes: u32,
    /// Nodes, of which the first has to run before the second.
    pub(super) pairs: Vec<(u32, u32)>,
    /// Values that have to be copied for other tasks before this node runs.
    pub(super) copies: Vec<((u32, i32), u32)>,
}

struct Facts<'a> {
    graph: &'a Graph<'a>,
    flow: Flow,
    /// By node: the variable that its reference is.
    variables: BTreeMap<u32, u32>,
    /// By node: the variables whose memory its outputs may be.
    memory: BTreeMap<u32, BTreeSet<u32>>,
    /// By node: those that are done before it in any case.
    before: BTreeMap<u32, BTreeSet<u32>>,
    /// By node: changes of task before it, and updates since the last one.
    moments: BTreeMap<u32, (u32, u32)>,
}

fn is_passed_on(kind: Kind) -> bool {
    let loops = matches!(kind, Kind::Enter | Kind::Exit | Kind::NextIteration);
    loops || matches!(kind, Kind::Identity | Kind::Switch | Kind::Merge)
}

fn is_taken(graph: &Graph, edge: &Edge) -> bool {
    graph.crosses(edge) && matches!(edge.class, Class::Plain | Class::String | Class::Variant)
}

impl Facts<'_> {
    fn is_update(&self, edge: &Edge) -> bool {
        let it = self.graph.node(edge.dst);
        matches!(edge.class, Class::Ref | Class::Resource) && !is_passed_on(it.kind) && !it.pure_read
    }

    fn is_updating(&self, node: u32) -> bool {
        self.graph.ins(node).any(|edge| self.is_update(edge))
    }

    fn variable(&self, edge: &Edge) -> Option<u32> {
        let whole = edge.src_output == 0 || (edge.src_output > 0 && self.graph.node(edge.src).kind == Kind::Switch);
        self.variables.get(&edge.src).copied().filter(|_| whole)
    }

    /// The variables whose memory the consumer takes as a value.
    fn taken(&self, edge: &Edge) -> BTreeSet<u32> {
        match edge.class {
            _ if self.graph.crosses(edge) => BTreeSet::new(),
            Class::Control | Class::Resource => BTreeSet::new(),
            Class::Ref | Class::Deref => self.variable(edge).into_iter().collect(),
            _ => self.memory.get(&edge.src).cloned().unwrap_or_default(),
        }
    }

    /// These nodes, and those that come after one of them, whichever value a Merge gets.
    fn after_any(&self, nodes: &BTreeSet<u32>) -> BTreeSet<u32> {
        let mut after = BTreeSet::new();
        for step in &self.flow.order {
            let Visit::Node(node) = *step else { continue };
            let one_of = self.graph.node(node).kind == Kind::Merge;
            let (values, rest): (Vec<_>, Vec<_>) =
                forward_ins(self.graph, node).partition(|edge| one_of && !edge.is_control());
            let is_after = |edge: &&Edge| after.contains(&edge.src);
            let by_values = !values.is_empty() && values.iter().all(is_after);
            if nodes.contains(&node) || by_values || rest.iter().any(is_after) {
                after.insert(node);
            }
        }
        after
    }

    fn find(&mut self) {
        let mut ends: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        for step in self.flow.order.clone() {
            let node = match step {
                Visit::Node(node) => node,
                Visit::End(frame) => {
                    let end = ends.get(&frame).copied().unwrap_or_default();
                    let parent = ends.entry(self.flow.parents[frame as usize]).or_default();
                    *parent = end.max(*parent);
                    continue;
                }
            };
            let it = self.graph.node(node);
            if it.cloneable && self.graph.ins(node).next().is_none() {
                self.variables.insert(node, node);
            }
            let first = self.graph.ins(node).find(|edge| edge.dst_input == 0);
            let first = first.filter(|edge| matches!(edge.class, Class::Ref | Class::Resource));
            let forwards = it.forwards_ref || matches!(it.kind, Kind::Identity | Kind::Switch);
            if let Some(variable) = first.filter(|_| forwards).and_then(|edge| self.variable(edge)) {
                self.variables.insert(node, variable);
            }
            let memory = self.graph.ins(node).flat_map(|edge| self.taken(edge)).collect();
            self.memory.insert(node, memory);
            let one_of = it.kind == Kind::Merge;
            let (mut all, mut common): (BTreeSet<u32>, Option<BTreeSet<u32>>) = (BTreeSet::new(), None);
            let mut moment = (0, 0);
            if it.kind == Kind::Exit {
                moment = ends.get(&self.flow.inside(node)).copied().unwrap_or_default();
            }
            for edge in forward_ins(self.graph, node) {
                let mut before = self.before[&edge.src].clone();
                before.insert(edge.src);
                if one_of && !edge.is_control() {
                    common = Some(common.map_or(before.clone(), |common| &common & &before));
                } else {
                    all.extend(before);
                }
                let (level, updates) = self.moments[&edge.src];
                moment = moment.max(match self.graph.crosses(edge) {
                    true => (level + 1, 0),
                    false => (level, updates + u32::from(self.is_updating(edge.src))),
                });
            }
            all.extend(common.unwrap_or_default());
            self.before.insert(node, all);
            self.moments.insert(node, moment);
            let after = (moment.0, moment.1 + u32::from(self.is_updating(node)));
            let end = ends.entry(self.flow.outputs(node)).or_default();
            *end = after.max(*end);
        }
    }
}

pub(super) fn rule(case: &Case) -> Rule {
    let graph = case.graph();
    let flow = Flow::of(&graph).unwrap();
    // For larger graphs, this would take too long.
    if graph.len() > 1000 {
        return Rule::default();
    }
    let predicates = Predicates::of(&graph, &flow);
    let schedule = Schedule::alone(&graph, &flow, Costs { node_us: 0, message_us: 0, bytes_per_us: 1 });
    let mut facts = Facts {
        graph: &graph,
        flow,
        variables: BTreeMap::new(),
        memory: BTreeMap::new(),
        before: BTreeMap::new(),
        moments: BTreeMap::new(),
    };
    facts.find();
    let mut reads: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    let mut updates: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for edge in graph.edges() {
        let it = graph.node(edge.dst);
        let by_handle = matches!(edge.class, Class::Ref | Class::Resource);
        if graph.crosses(edge) || facts.flow.inside(edge.dst) != ROOT || facts.flow.outputs(edge.dst) != ROOT {
            continue;
        }
        if facts.is_update(edge) {
            facts.variable(edge).into_iter().for_each(|of| _ = updates.entry(of).or_default().insert(edge.dst));
        } else if by_handle && it.pure_read {
            facts.variable(edge).into_iter().for_each(|of| _ = reads.entry(of).or_default().insert(edge.dst));
        }
        if !by_handle && it.kind != Kind::Fetch {
            facts.taken(edge).into_iter().for_each(|of| _ = reads.entry(of).or_default().insert(edge.dst));
        }
    }
    let may_wait = |node: u32, (other, output): (u32, i32)| {
        predicates.implies(predicates.node(node), predicates.output(other, output))
            && schedule.waits_as_well(node, other)
    };
    let mut found = Rule { nodes: graph.len() as u32, ..Rule::default() };
    let none = BTreeSet::new();
    let place = |node: u32| facts.flow.order.iter().position(|step| *step == Visit::Node(node));
    let read_is_first = |read: u32, update: u32| match facts.moments[&read].cmp(&facts.moments[&update]) {
        std::cmp::Ordering::Equal => !facts.is_updating(read) || place(read) < place(update),
        order => order.is_lt(),
    };
    for (variable, updates) in &updates {
        for (read, update) in
            reads.get(variable).unwrap_or(&none).iter().flat_map(|r| updates.iter().map(move |u| (*r, *u)))
        {
            let ordered = facts.before[&read].contains(&update) || facts.before[&update].contains(&read);
            if read == update || ordered {
                continue;
            }
            let pair = if read_is_first(read, update) { (read, update) } else { (update, read) };
            if may_wait(pair.1, (pair.0, -1)) {
                found.pairs.push(pair);
            }
        }
        for edge in graph.edges().iter().filter(|edge| is_taken(&graph, edge)) {
            let value = (edge.src, edge.src_output);
            let outside = facts.flow.inside(edge.src) == ROOT && facts.flow.outputs(edge.src) == ROOT;
            let shares = outside && facts.memory[&edge.src].contains(variable);
            // Whoever shares the message.
            let place = |node: u32| (graph.node(node).task, graph.node(node).device);
            let takers = graph.outs(edge.src).filter(|other| {
                other.src_output == value.1 && is_taken(&graph, other) && place(other.dst) == place(edge.dst)
            });
            let after = facts.after_any(&takers.map(|other| other.dst).collect());
            for update in updates.iter().filter(|update| shares && **update != edge.src) {
                if !after.contains(update) && read_is_first(edge.src, *update) && may_wait(*update, value) {
                    found.copies.push((value, *update));
                }
            }
        }
    }
    found
}

impl Rule {
    /// `ordered`: the graph that was split, with copies.
    pub(super) fn holds(&self, ordered: &Graph, outcome: &Outcome, is_alive: impl Fn(u32) -> bool) {
        let times = |node: u32| {
            let copies = outcome.copy_times.get(&node).into_iter().flatten();
            outcome.times.get(&node).into_iter().chain(copies).copied()
        };
        let is_before = |first: u32, second: u32| {
            let both = is_alive(first) && is_alive(second);
            !both || times(first).max() < times(second).min()
        };
        for (first, second) in &self.pairs {
            assert!(is_before(*first, *second), "{first} must be before {second}, which no edge orders with it");
        }
        for ((src, output), update) in &self.copies {
            let taken = ordered.outs(*src).filter(|edge| edge.src_output == *output);
            let copy = taken.clone().map(|edge| edge.dst).find(|node| *node >= self.nodes);
            let copy = copy.filter(|_| !taken.clone().any(|edge| is_taken(ordered, edge)));
            assert!(copy.is_some_and(|copy| is_before(copy, *update)), "{src} is not copied before {update}");
        }
    }
}
