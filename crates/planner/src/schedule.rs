//! When things happen, as far as the graph tells: levels, estimated times, and which nodes may wait for something
//! outside the graph.

use std::collections::BTreeMap;

use super::flow::{Flow, FrameId, ROOT, Visit, forward_ins};
use super::graph::{Class, Edge, Graph, Kind, index};
use super::sets::{SetId, Sets};

/// Parameters of the time estimates.
#[derive(Debug, Clone, Copy)]
pub struct Costs {
    /// Cost of a node whose cost is unknown.
    pub node_us: u32,
    /// Cost of a message between tasks.
    pub message_us: u32,
    /// Transfer rate.
    pub bytes_per_us: u32,
}

/// A node's outputs; a node is behind everything that its inputs are behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// The most task changes on any path to here. Never decreases along a dependency and grows where the task changes:
    /// two things at one level never depend on each other across tasks.
    pub level: u32,
    /// Estimated time from the start of the step (in a loop: as if it ran once).
    pub ready_us: u64,
    /// Blockers (nodes that may wait for something that is not an edge) that every effect of these outputs is behind
    /// anyway, so these outputs may wait for them. Includes at least the blockers that the node itself is behind.
    pub blockers: SetId,
}

pub struct Schedule {
    moments: Vec<Moment>,
    sets: Sets<Blocker>,
    /// By frame: whether a node in it, or in a nested loop, may wait for something that is not an edge.
    blocking: Vec<bool>,
    /// By blocker: the blockers that it is behind.
    before: BTreeMap<u32, SetId>,
}

impl Schedule {
    pub fn of(graph: &Graph, flow: &Flow, costs: Costs) -> Self {
        let mut all = Self::alone(graph, flow, costs);
        all.keep_company(graph, flow);
        all
    }

    /// Without the blockers that a node may as well wait for.
    pub fn alone(graph: &Graph, flow: &Flow, costs: Costs) -> Self {
        let start = Moment { level: 0, ready_us: 0, blockers: SetId::EMPTY };
        let mut moments = vec![start; graph.len()];
        let mut ends = vec![start; flow.parents.len()];
        let mut blocking = vec![false; flow.parents.len()];
        let mut sets = Sets::new(Blocker::All);
        let mut before = BTreeMap::new();
        for step in &flow.order {
            let (moment, frame) = match *step {
                Visit::Node(node) => {
                    let it = graph.node(node);
                    let mut moment = start;
                    if flow.outputs(node) != flow.inside(node) && it.kind == Kind::Exit {
                        moment = ends[index(flow.inside(node))];
                    }
                    for edge in forward_ins(graph, node) {
                        let source = moments[index(edge.src)];
                        let (crosses, way_us) = if graph.crosses(edge) { (1, costs.way_us(edge)) } else { (0, 0) };
                        let arrived = Moment {
                            level: source.level + crosses,
                            ready_us: source.ready_us.saturating_add(way_us),
                            ..source
                        };
                        moment = latest(&mut sets, moment, arrived);
                    }
                    moment.ready_us = moment.ready_us.saturating_add(u64::from(it.cost_us.unwrap_or(costs.node_us)));
                    if it.blocking {
                        before.insert(node, moment.blockers);
                        moment.blockers = sets.with(moment.blockers, Blocker::Node(node));
                        blocking[index(flow.inside(node))] = true;
                    }
                    moments[index(node)] = moment;
                    (moment, flow.outputs(node))
                }
                Visit::End(frame) => {
                    let parent = flow.parents[index(frame)];
                    blocking[index(parent)] |= blocking[index(frame)];
                    (ends[index(frame)], parent)
                }
            };
            if frame != ROOT {
                ends[index(frame)] = latest(&mut sets, ends[index(frame)], moment);
            }
        }
        Self { moments, sets, blocking, before }
    }

    /// Whether a node is behind every blocker that the other is behind.
    pub fn waits_as_well(&self, node: u32, other: u32) -> bool {
        let own = self.sets.of(self.node(node).blockers);
        self.sets.of(self.node(other).blockers).iter().all(|blocker| own.binary_search(blocker).is_ok())
    }

    /// A node with no effect except through nodes behind a blocker may as well wait for it: the pull of a variable for
    /// the input pipeline, for example.
    fn keep_company(&mut self, graph: &Graph, flow: &Flow) {
        let Self { moments, sets, before, .. } = self;
        for step in flow.order.iter().rev() {
            let Visit::Node(node) = *step else { continue };
            if has_effects(graph, node) {
                continue;
            }
            // On a back edge, this is only what the consumer itself is behind: fewer than it could be. A blocker is
            // behind itself for others, not for what it waits for.
            let behind = |node: u32| before.get(&node).copied().unwrap_or(moments[index(node)].blockers);
            let consumers = graph.outs(node).map(|edge| behind(edge.dst));
            let Some(common) = consumers.reduce(|a, b| sets.both(a, b)) else { continue };
            let own = &mut moments[index(node)].blockers;
            *own = sets.union(*own, common);
        }
    }

    pub fn node(&self, node: u32) -> Moment {
        self.moments[index(node)]
    }

    pub fn may_block(&self, frame: FrameId) -> bool {
        self.blocking[index(frame)]
    }
}

/// May be what a blocker waits for.
fn has_effects(graph: &Graph, node: u32) -> bool {
    let it = graph.node(node);
    let changes = graph.ins(node).any(|edge| edge.class == Class::Ref);
    let delivers = it.blocking || it.untouchable || matches!(it.kind, Kind::Fetch | Kind::Receive);
    delivers || ((it.stateful || changes) && !it.pure_read && !it.cloneable)
}

impl Costs {
    fn way_us(&self, edge: &Edge) -> u64 {
        let bytes_us = edge.bytes.unwrap_or(0) / u64::from(self.bytes_per_us.max(1));
        bytes_us.saturating_add(u64::from(self.message_us))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Blocker {
    Node(u32),
    All(SetId),
}

fn latest(sets: &mut Sets<Blocker>, a: Moment, b: Moment) -> Moment {
    Moment {
        level: a.level.max(b.level),
        ready_us: a.ready_us.max(b.ready_us),
        blockers: sets.union(a.blockers, b.blockers),
    }
}
