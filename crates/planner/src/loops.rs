//! Loops in which calls can be made: those whose iterations follow each other.
//!
//! TensorFlow may begin an iteration before the one before it has ended. A node *closes* its iteration if the loop's
//! condition waits for it before the next one: then everything that depends on the condition comes after it. If that
//! holds for all nodes that may wait for something outside the graph, the loop is *orderly*: nothing that depends on
//! the condition can be what an earlier iteration waits for, so that what happens together may be decided for one
//! iteration alone. In an orderly loop, nodes that close their iterations and depend on the condition can be part of
//! calls, and take the same turns there as in the graph.
//!
//! TensorFlow tells a task that has no LoopCond of its own about the next iteration only where something in the loop
//! crosses to it. So what is left on a server must not send from a loop that it is no longer told about.
//!
//! Loops that TensorFlow makes of those of `tf.function` are orderly, because the next iteration waits for all effects
//! of the body. Of nested loops, only the outermost can be orderly here.

use std::collections::{BTreeMap, BTreeSet};

use super::flow::{Flow, FrameId, ROOT, forward_ins, is_back_edge, is_header};
use super::graph::{Class, Graph, Kind, index, number};
use super::predicates::Predicates;
use super::schedule::Schedule;
use super::sets::SetId;

/// Edge budget. Beyond it, no loop is orderly.
const FAR: usize = 50_000_000;

pub struct Loops {
    /// By frame.
    orderly: Vec<bool>,
    /// The tasks that have the condition of a loop.
    conditions: BTreeSet<(FrameId, u32)>,
    /// By node: it may be part of a call, or move to the worker.
    open: Vec<bool>,
    /// By frame: when most of its nodes run.
    usual: Vec<SetId>,
}

impl Loops {
    /// `matters`: whether somebody will ask about this node.
    pub fn of(
        graph: &Graph,
        flow: &Flow,
        predicates: &Predicates,
        schedule: &Schedule,
        matters: impl Fn(u32) -> bool,
    ) -> Self {
        let open = graph.ids().map(|node| flow.inside(node) == ROOT && flow.outputs(node) == ROOT).collect();
        let turns = |frame: usize| predicates.turns(number(frame)).unwrap_or(SetId::EMPTY);
        let frames = flow.parents.len();
        let conditions = graph.ids().filter(|node| graph.node(*node).kind == Kind::LoopCond);
        let mut all = Self {
            orderly: vec![false; frames],
            conditions: conditions.map(|node| (flow.inside(node), graph.node(node).task)).collect(),
            open,
            usual: (0..frames).map(turns).collect(),
        };
        let mut nodes: Vec<Vec<u32>> = vec![Vec::new(); frames];
        for node in graph.ids().filter(|_| frames > 1) {
            nodes[index(flow.inside(node).max(flow.outputs(node)))].push(node);
        }
        let mut budget = FAR;
        for (frame, nodes) in (ROOT..).zip(&nodes).skip(1) {
            let waits_within = (ROOT..).zip(&flow.parents).skip(1).any(|(inner, parent)| {
                // Frames are numbered from the outermost inwards.
                *parent == frame && schedule.may_block(inner)
            });
            if flow.parents[index(frame)] == ROOT && !waits_within && predicates.turns(frame).is_some() {
                let it = Loop { graph, flow, predicates, frame, nodes };
                let closing = it.closing(|node| matters(node) || graph.node(node).blocking, &mut budget);
                let waits = |node: &u32| it.is_own(*node) && graph.node(*node).blocking;
                all.orderly[index(frame)] =
                    budget > 0 && nodes.iter().all(|node| !waits(node) || closing.contains(node));
                if all.is_orderly(frame) {
                    nodes.iter().for_each(|node| all.open[index(*node)] = it.opens(*node, &closing));
                }
            }
        }
        all
    }

    /// Whether a node may be part of a call, or move to the worker.
    pub fn admits(&self, node: u32) -> bool {
        self.open[index(node)]
    }

    pub fn is_orderly(&self, frame: FrameId) -> bool {
        self.orderly[index(frame)]
    }

    pub fn has_condition(&self, frame: FrameId, task: u32) -> bool {
        self.conditions.contains(&(frame, task))
    }

    /// What has these conditions always runs: in a loop, as long as it turns, and after the loop's condition.
    pub fn usual(&self, frame: FrameId) -> SetId {
        self.usual[index(frame)]
    }
}

struct Loop<'a> {
    graph: &'a Graph<'a>,
    flow: &'a Flow,
    predicates: &'a Predicates,
    frame: FrameId,
    /// The loop's, with its Enters and Exits, and those of the loops in it.
    nodes: &'a [u32],
}

impl Loop<'_> {
    /// Part of what is repeated, not of the machinery.
    fn is_own(&self, node: u32) -> bool {
        self.flow.inside(node) == self.frame && !self.graph.node(node).kind.is_loop_plumbing()
    }

    /// The nodes that close their iterations, of those that are asked for.
    fn closing(&self, asked: impl Fn(u32) -> bool, budget: &mut usize) -> BTreeSet<u32> {
        let nodes = || self.nodes.iter().copied();
        let nexts = self.decisive(budget);
        let mut by_set: BTreeMap<SetId, BTreeSet<u32>> = BTreeMap::new();
        for node in nodes().filter(|node| self.is_own(*node) && asked(*node)) {
            by_set.entry(self.predicates.node(node)).or_default().insert(node);
        }
        let mut closing = BTreeSet::new();
        for (set, asked) in by_set {
            for next in &nexts {
                let before = self.waited_for(set, *next, budget);
                closing.extend(asked.intersection(&before));
            }
        }
        closing
    }

    /// The NextIterations that the condition waits for.
    fn decisive(&self, budget: &mut usize) -> Vec<u32> {
        let condition = self.nodes.iter().find(|node| self.graph.node(**node).kind == Kind::LoopCond);
        let before = condition.map(|node| self.waited_for(self.predicates.node(*node), *node, budget));
        let ins = before.iter().flatten().flat_map(|node| self.graph.ins(*node));
        ins.filter(|edge| is_back_edge(self.graph, edge)).map(|edge| edge.src).collect()
    }

    /// Depends on the loop's condition.
    fn turns(&self, node: u32) -> bool {
        let turns = self.predicates.turns(self.frame);
        turns.is_some_and(|turns| self.predicates.implies(self.predicates.node(node), turns))
    }

    fn opens(&self, node: u32, closing: &BTreeSet<u32>) -> bool {
        let it = self.graph.node(node);
        // A reference may lead to another variable in each iteration, and its value may change between them.
        if self.graph.edges_of(node).any(|edge| matches!(edge.class, Class::Ref | Class::Deref)) {
            return false;
        }
        let (inside, outputs) = (self.flow.inside(node), self.flow.outputs(node));
        match it.kind {
            Kind::Switch | Kind::Merge | Kind::ControlTrigger => true,
            // Those of the loops in it are not this loop's.
            kind if kind.is_loop_plumbing() => inside == outputs || inside == ROOT || outputs == ROOT,
            _ => closing.contains(&node) && self.turns(node),
        }
    }

    /// The nodes of this iteration that a node waits for whenever these conditions hold. A dead input is waited for
    /// like any other, except by a Merge: it waits for its live input, which has to be the one that comes from such a
    /// node.
    fn waited_for(&self, set: SetId, node: u32, budget: &mut usize) -> BTreeSet<u32> {
        let (graph, predicates) = (self.graph, self.predicates);
        let mut before = BTreeSet::new();
        let mut open = vec![node];
        while let Some(at) = open.pop() {
            let merges = graph.node(at).kind == Kind::Merge;
            let is_header = is_header(graph, at);
            for edge in forward_ins(graph, at) {
                *budget = budget.saturating_sub(1);
                let alive = || predicates.implies(set, predicates.output(edge.src, edge.src_output));
                let passes = !merges || edge.is_control() || (!is_header && predicates.waits_for_all(at) && alive());
                let own = self.flow.outputs(edge.src) == self.frame;
                if passes && own && *budget > 0 && before.insert(edge.src) {
                    open.push(edge.src);
                }
            }
        }
        before
    }
}
