//! The conditions under which a node runs: the set of (predicate, branch) that must hold, computed forwards.
//!
//! Equal sets mean equal fate: two nodes with the same set both run or neither does (in each iteration of their loop).
//! This is exact, because everything that is not understood becomes its own fact ("this node's output is alive"):
//!
//! * a node needs all its inputs alive, control inputs included: the union of their sets; a Switch's output adds
//!   (predicate, branch);
//! * a Merge needs one: if its inputs are all the branches of one predicate, their intersection; if one input is alive
//!   whenever any is, that one's set; else its own fact;
//! * a loop's header and exits have the set of the loop's inputs, if the loop is one that ends (`regular`); else their
//!   own fact.
//!
//! Each read of a reference variable is a predicate of its own. What it leaves is the variable's memory: if the graph
//! changes the variable, each Switch may see something else.

use std::collections::{HashMap, HashSet};

use super::flow::{Flow, FrameId, ROOT, Visit, forward_ins, is_header};
use super::graph::{Class, Edge, Graph, Kind, index};
use super::roots::{Roots, may_change};
use super::sets::{SetId, Sets};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fact {
    /// The value of `output` of `node` selects `branch` out of `ways`.
    Branch { node: u32, output: i32, branch: u32, ways: u32 },
    /// The outputs of this node are alive.
    Alive(u32),
    /// All facts of another set.
    All(SetId),
}

pub struct Predicates {
    sets: Sets<Fact>,
    nodes: Vec<SetId>,
    /// The outputs of Switch nodes.
    branches: HashMap<(u32, i32), SetId>,
    /// By frame: the set of what runs in each turn of a regular loop.
    turns: Vec<Option<SetId>>,
    /// By node: a Merge of which one input is alive whenever it is.
    exclusive: Vec<bool>,
}

/// A loop of the usual form.
struct Form {
    /// When it is entered.
    entered: SetId,
    /// … and turns.
    turns: SetId,
    condition: u32,
}

/// The nodes of a loop that matter for its form.
#[derive(Default)]
struct Loop {
    enters: Vec<u32>,
    conditions: Vec<u32>,
    headers: Vec<u32>,
    nexts: Vec<u32>,
}

impl Predicates {
    pub fn of(graph: &Graph, flow: &Flow) -> Self {
        let mut all = Self {
            sets: Sets::new(Fact::All),
            nodes: vec![SetId::EMPTY; graph.len()],
            branches: HashMap::new(),
            turns: vec![None; flow.parents.len()],
            exclusive: vec![false; graph.len()],
        };
        let mut loops: Vec<Loop> = flow.parents.iter().map(|_| Loop::default()).collect();
        let mut sources = Sources::new(graph, flow);
        for step in &flow.order {
            match *step {
                Visit::Node(node) => {
                    let set = all.node_set(graph, flow, &loops, node);
                    all.nodes[index(node)] = set;
                    all.add_branches(graph, &sources, node);
                    sources.add(graph, node);
                    let kind = graph.node(node).kind;
                    let inside = &mut loops[index(flow.outputs(node))];
                    match kind {
                        Kind::Enter => inside.enters.push(node),
                        Kind::LoopCond => inside.conditions.push(node),
                        Kind::NextIteration => inside.nexts.push(node),
                        Kind::Merge if is_header(graph, node) => inside.headers.push(node),
                        _ => {}
                    }
                }
                Visit::End(frame) => {
                    let form = all.usual_form(&loops[index(frame)]);
                    // What an Enter gives to the first iteration only is for the loop's headers.
                    let once = |enter: &&u32| !graph.node(**enter).invariant;
                    let to_header = |edge: &Edge| is_header(graph, edge.dst);
                    let mut entered = loops[index(frame)].enters.iter().filter(once);
                    if entered.all(|enter| graph.outs(*enter).all(to_header)) {
                        all.turns[index(frame)] = form.map(|form| form.turns);
                    }
                }
            }
        }
        for (frame, parent) in flow.parents.iter().enumerate() {
            // Frames are numbered from the outermost inwards.
            if !all.is_regular(*parent) {
                all.turns[frame] = None;
            }
        }
        all
    }

    /// When a node runs (and its control outputs are alive).
    pub fn node(&self, node: u32) -> SetId {
        self.nodes[index(node)]
    }

    /// When an output is alive. Negative: control.
    pub fn output(&self, node: u32, output: i32) -> SetId {
        self.branches.get(&(node, output)).copied().unwrap_or(self.node(node))
    }

    pub fn facts(&self, set: SetId) -> &[Fact] {
        self.sets.of(set)
    }

    /// Nodes of this frame that have the same set run equally often. Outside of loops everything runs once.
    pub fn is_regular(&self, frame: FrameId) -> bool {
        frame == ROOT || self.turns(frame).is_some()
    }

    /// What runs in each turn of a regular loop.
    pub fn turns(&self, frame: FrameId) -> Option<SetId> {
        self.turns[index(frame)]
    }

    /// Of a Merge: exactly one of its inputs is alive if it is, so it waits for that one.
    pub fn waits_for_all(&self, merge: u32) -> bool {
        self.exclusive[index(merge)]
    }

    /// Whether what needs only `less` runs whenever what needs `more` does.
    pub fn implies(&self, more: SetId, less: SetId) -> bool {
        let known = self.facts(more);
        self.facts(less).iter().all(|fact| known.binary_search(fact).is_ok())
    }

    fn node_set(&mut self, graph: &Graph, flow: &Flow, loops: &[Loop], node: u32) -> SetId {
        match graph.node(node).kind {
            Kind::ControlTrigger => SetId::EMPTY,
            Kind::Receive => self.sets.intern(vec![Fact::Alive(node)]),
            Kind::Merge => self.merge_set(graph, node),
            Kind::Exit => self.exit_set(graph, &loops[index(flow.inside(node))], node),
            _ => {
                let mut set = SetId::EMPTY;
                for edge in forward_ins(graph, node) {
                    let input = self.output(edge.src, edge.src_output);
                    set = self.sets.union(set, input);
                }
                set
            }
        }
    }

    /// Dead control inputs do not make a Merge dead.
    fn merge_set(&mut self, graph: &Graph, node: u32) -> SetId {
        let data = forward_ins(graph, node).filter(|edge| !edge.is_control());
        let inputs: Vec<SetId> = data.map(|edge| self.output(edge.src, edge.src_output)).collect();
        let common = self.sets.intersection(&inputs);
        let one_is_enough = !inputs.is_empty() && inputs.contains(&common);
        let all_branches = self.are_all_branches(&inputs, common);
        let distinct: HashSet<SetId> = inputs.iter().copied().collect();
        self.exclusive[index(node)] = inputs.len() == 1 || (all_branches && distinct.len() == inputs.len());
        if one_is_enough || all_branches {
            return common;
        }
        self.sets.intern(vec![Fact::Alive(node)])
    }

    /// Besides the common facts, each input needs one branch of the same predicate, and no branch is missing.
    fn are_all_branches(&self, inputs: &[SetId], common: SetId) -> bool {
        let common = self.sets.of(common);
        let mut predicate = None;
        let mut seen = Vec::new();
        for set in inputs {
            let mut own = self.sets.of(*set).iter().filter(|fact| common.binary_search(fact).is_err());
            let (Some(Fact::Branch { node, output, branch, ways }), None) = (own.next(), own.next()) else {
                return false;
            };
            if *predicate.get_or_insert((*node, *output, *ways)) != (*node, *output, *ways) {
                return false;
            }
            seen.push(*branch);
        }
        seen.sort_unstable();
        seen.dedup();
        predicate.is_some_and(|(_, _, ways)| (0..ways).eq(seen))
    }

    fn add_branches(&mut self, graph: &Graph, sources: &Sources, node: u32) {
        if graph.node(node).kind != Kind::Switch {
            return;
        }
        let predicate = graph.ins(node).find(|edge| edge.dst_input == 1);
        // Without a predicate, all that is known is that the outputs differ.
        let (of, output) = predicate.and_then(|edge| sources.of(edge)).unwrap_or((node, -1));
        for edge in graph.outs(node) {
            let Ok(branch) = u32::try_from(edge.src_output) else { continue };
            let fact = Fact::Branch { node: of, output, branch, ways: ways(graph, node) };
            let set = self.sets.with(self.node(node), fact);
            self.branches.insert((node, edge.src_output), set);
        }
    }

    /// A value that leaves a regular loop is alive if the loop's inputs were.
    fn exit_set(&mut self, graph: &Graph, inside: &Loop, node: u32) -> SetId {
        let input = forward_ins(graph, node).find(|edge| !edge.is_control());
        if let (Some(input), Some(Form { entered, condition, .. })) = (input, self.usual_form(inside)) {
            let leaves = self.sets.with(entered, Fact::Branch { node: condition, output: 0, branch: 0, ways: 2 });
            let controls = forward_ins(graph, node).any(Edge::is_control);
            if !controls && self.output(input.src, input.src_output) == leaves {
                return entered;
            }
        }
        self.sets.intern(vec![Fact::Alive(node)])
    }

    /// One condition; all inputs have the same set; every loop variable iterates exactly while the condition holds.
    fn usual_form(&mut self, inside: &Loop) -> Option<Form> {
        let (first, [condition]) = (inside.enters.first()?, inside.conditions.as_slice()) else { return None };
        let entered = self.node(*first);
        let turns = self.sets.with(entered, Fact::Branch { node: *condition, output: 0, branch: 1, ways: 2 });
        let usual =
            inside.enters.iter().chain(&inside.headers).chain([condition]).all(|node| self.node(*node) == entered)
                && inside.nexts.iter().all(|node| self.node(*node) == turns);
        usual.then_some(Form { entered, turns, condition: *condition })
    }
}

fn ways(graph: &Graph, switch: u32) -> u32 {
    match graph.node(switch).detail {
        0 => 2,
        outputs => outputs,
    }
}

/// The origin of a value: an Identity has its input's value.
struct Sources {
    of: Vec<(u32, i32)>,
    /// By node: its outputs may be the memory of a variable that the graph changes.
    changes: Vec<bool>,
    changed: Changed,
}

/// The reference variables that a graph changes.
struct Changed {
    roots: Roots,
    variables: HashSet<u32>,
    /// … and others.
    unknown: bool,
}

impl Changed {
    fn new(graph: &Graph, flow: &Flow) -> Self {
        let roots = Roots::new(graph, flow);
        let changing = graph.edges().iter().filter(|edge| edge.class == Class::Ref && may_change(graph, edge));
        let found: Vec<Option<u32>> = changing.map(|edge| roots.variable(edge)).collect();
        let (variables, unknown) = (found.iter().copied().flatten().collect(), found.contains(&None));
        Self { roots, variables, unknown }
    }

    fn is_any(&self) -> bool {
        self.unknown || !self.variables.is_empty()
    }

    /// Whether the variable is, whose value an edge carries.
    fn has(&self, edge: &Edge) -> bool {
        self.unknown || self.roots.variable(edge).is_none_or(|variable| self.variables.contains(&variable))
    }
}

impl Sources {
    fn new(graph: &Graph, flow: &Flow) -> Self {
        let changed = Changed::new(graph, flow);
        Self { of: graph.ids().map(|node| (node, 0)).collect(), changes: vec![false; graph.len()], changed }
    }

    /// None: each consumer may see another value.
    fn of(&self, edge: &Edge) -> Option<(u32, i32)> {
        match (edge.class, edge.src_output) {
            (Class::Ref | Class::Deref, _) => None,
            _ if self.changes[index(edge.src)] => None,
            (_, 0) => Some(self.of[index(edge.src)]),
            (_, output) => Some((edge.src, output)),
        }
    }

    fn add(&mut self, graph: &Graph, node: u32) {
        let kind = graph.node(node).kind;
        let passes_on = kind.is_loop_plumbing() || matches!(kind, Kind::Identity | Kind::Switch | Kind::Merge);
        if !passes_on {
            return;
        }
        let carries = |edge: &Edge| match edge.class {
            Class::Ref | Class::Deref => self.changed.has(edge),
            _ => self.changes[index(edge.src)],
        };
        // What comes back to a header has not been visited.
        let comes_back = kind == Kind::Merge && is_header(graph, node) && self.changed.is_any();
        let mut data = graph.ins(node).filter(|edge| !edge.is_control());
        self.changes[index(node)] = comes_back || data.clone().any(|edge| carries(edge) && !graph.crosses(edge));
        if let (Kind::Identity, Some(edge)) = (kind, data.next()) {
            self.of[index(node)] = self.of(edge).unwrap_or((node, 0));
        }
    }
}
