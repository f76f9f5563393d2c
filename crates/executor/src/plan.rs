//! A sub-graph, checked and compiled into arrays. Immutable: shared by all runs on all cores.
//!
//! Nodes are numbers. Each output of each node has a *slot*, numbered consecutively in node order; the implementor of
//! [`Kernels`](crate::Kernels) keeps the values in them.

use super::compiled::{Compiled, between, counted};
pub use super::compiled::{Task, kind};
use super::cost::Costs;
use super::lives;

/// In place of the number of an output or input: a control edge.
pub const CONTROL: u32 = u32::MAX;
/// The most nodes, values or edges of a sub-graph: their sums fit into 31 bits, as the queue's entries need.
const MOST: usize = 1 << 29;

#[derive(Clone, Copy, Debug, Default)]
pub struct Node {
    /// Bits of [`kind`].
    pub kind: u32,
    pub inputs: u32,
    pub outputs: u32,
    /// Its estimated cost; 0: not known.
    pub cost_ns: u32,
}

#[derive(Clone, Copy, Debug)]
pub struct Edge {
    pub src: u32,
    /// Or [`CONTROL`]; `input` is then, too.
    pub output: u32,
    pub dst: u32,
    pub input: u32,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("starwire: a sub-graph of {0} nodes, values or edges is too large for the executor")]
    TooLarge(usize),
    #[error("starwire: bug: node {0} of a sub-graph has unknown kind {1:#x}")]
    UnknownKind(u32, u32),
    #[error("starwire: bug: edge {0}:{1} -> {2}:{3} of a sub-graph has an end that does not exist")]
    NoSuchEnd(u32, u32, u32, u32),
    #[error("starwire: bug: input {1} of node {0} of a sub-graph has {2} edges instead of one")]
    NotFedOnce(u32, u32, u32),
    #[error("starwire: bug: node {0} of a sub-graph has inputs but no kernel")]
    NothingToRun(u32),
    #[error("starwire: a sub-graph has a cycle through node {0}: this executor does not run loops")]
    Cycle(u32),
}

pub struct Plan {
    /// One more than there are nodes: the last entry ends the last node's ranges.
    pub(super) nodes: Box<[Compiled]>,
    /// The node at the end of each edge.
    pub(super) targets: Box<[u32]>,
    pub(super) sources: Box<[u32]>,
    /// By slot: the number of inputs that read it; 0 for slots of [`kind::STATIC`] nodes.
    pub(super) readers: Box<[u32]>,
    pub(super) roots: Box<[u32]>,
    pub(super) asyncs: u32,
    /// Nodes with a kernel, in an order that satisfies all edges, for straight runs.
    pub(super) ordered: Box<[Task]>,
    /// By node, for the other runs.
    pub(super) tasks: Box<[Task]>,
    pub(super) lists: Box<[u32]>,
    pub(super) costs: Costs,
}

impl Plan {
    pub fn new(nodes: &[Node], edges: &[Edge]) -> Result<Self, PlanError> {
        let sum = |f: fn(&Node) -> u32| nodes.iter().map(|node| f(node) as usize).sum::<usize>();
        let largest = nodes.len().max(edges.len()).max(sum(|n| n.inputs)).max(sum(|n| n.outputs));
        if largest >= MOST {
            return Err(PlanError::TooLarge(largest));
        }
        check_nodes(nodes)?;
        let mut compiled = number(nodes);
        let (sources, readers) = connect(nodes, edges, &mut compiled)?;
        let targets = targets(edges, &mut compiled);
        let order = order(&compiled, &targets)?;
        let lives = lives::Lives::new(&compiled, &sources, &readers, &order);
        Ok(Plan {
            roots: roots(&compiled).into(),
            asyncs: compiled[nodes.len()].report,
            costs: Costs::new(nodes.iter().map(|n| n.cost_ns)),
            nodes: compiled.into(),
            targets: targets.into(),
            sources: sources.into(),
            readers: readers.into(),
            ordered: lives.ordered.into(),
            tasks: lives.tasks.into(),
            lists: lives.lists.into(),
        })
    }

    pub fn nodes(&self) -> usize {
        self.tasks.len()
    }

    pub fn slots(&self) -> usize {
        self.readers.len()
    }

    /// Whether runs can use the fixed order: no asynchronous kernels.
    pub fn is_straight(&self) -> bool {
        self.asyncs == 0
    }

    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// The array that [`Task::first`] indexes.
    pub fn lists(&self) -> &[u32] {
        &self.lists
    }

    pub(super) fn targets_of(&self, node: u32) -> &[u32] {
        between(&self.targets, &self.nodes, node, |c| c.targets)
    }

    pub(super) fn sources_of(&self, node: u32) -> &[u32] {
        between(&self.sources, &self.nodes, node, |c| c.sources)
    }
}

fn check_nodes(nodes: &[Node]) -> Result<(), PlanError> {
    for (at, node) in (0u32..).zip(nodes) {
        if node.kind & !kind::ALL != 0 {
            return Err(PlanError::UnknownKind(at, node.kind));
        }
        if node.kind & kind::NOTHING != 0 && (node.inputs != 0 || node.kind & kind::ASYNC != 0) {
            return Err(PlanError::NothingToRun(at));
        }
    }
    Ok(())
}

/// Numbers the inputs, slots and asynchronous kernels. `MOST` keeps the sums in range.
fn number(nodes: &[Node]) -> Vec<Compiled> {
    let mut next = Compiled { kind: 0, targets: 0, sources: 0, slots: 0, pending: 0, report: 0 };
    let mut compiled = Vec::with_capacity(nodes.len() + 1);
    for node in nodes {
        compiled.push(Compiled { kind: node.kind, ..next });
        next.sources += node.inputs;
        next.slots += node.outputs;
        next.report += u32::from(node.kind & kind::ASYNC != 0);
    }
    compiled.push(next);
    compiled
}

/// Finds the slot of each input and the readers of each slot, and counts what each node waits for.
fn connect(nodes: &[Node], edges: &[Edge], compiled: &mut [Compiled]) -> Result<(Vec<u32>, Vec<u32>), PlanError> {
    let ends = compiled[nodes.len()];
    let mut sources = vec![u32::MAX; ends.sources as usize];
    let mut readers = vec![0u32; ends.slots as usize];
    let mut fed = vec![0u32; ends.sources as usize];
    for edge in edges {
        let &Edge { src, output, dst, input } = edge;
        let (Some(from), Some(to)) = (nodes.get(src as usize), nodes.get(dst as usize)) else {
            return Err(PlanError::NoSuchEnd(src, output, dst, input));
        };
        if output == CONTROL && input == CONTROL {
            compiled[dst as usize].pending += 1;
            continue;
        }
        if output >= from.outputs || input >= to.inputs {
            return Err(PlanError::NoSuchEnd(src, output, dst, input));
        }
        let slot = compiled[src as usize].slots + output;
        let at = (compiled[dst as usize].sources + input) as usize;
        sources[at] = slot;
        fed[at] += 1;
        if from.kind & kind::STATIC == 0 {
            readers[slot as usize] += 1;
        }
        compiled[dst as usize].pending += 1;
    }
    for (node, (at, spec)) in (0u32..).zip(compiled.iter().zip(nodes)) {
        for input in 0..spec.inputs {
            let edges = fed[(at.sources + input) as usize];
            if edges != 1 {
                return Err(PlanError::NotFedOnce(node, input, edges));
            }
        }
    }
    Ok((sources, readers))
}

/// The ends of the edges, grouped by source.
fn targets(edges: &[Edge], compiled: &mut [Compiled]) -> Vec<u32> {
    let mut sorted: Vec<&Edge> = edges.iter().collect();
    sorted.sort_by_key(|edge| edge.src);
    let mut sorted = sorted.into_iter().peekable();
    let mut targets = Vec::with_capacity(edges.len());
    for (node, at) in (0u32..).zip(compiled) {
        at.targets = counted(targets.len());
        while let Some(edge) = sorted.next_if(|edge| edge.src == node) {
            targets.push(edge.dst);
        }
    }
    targets
}

/// The nodes that wait for nothing. Arguments, and all that has no kernel, are last: what needs no argument goes before
/// what needs one, as if the argument were still on its way.
fn roots(compiled: &[Compiled]) -> Vec<u32> {
    let nodes = (0u32..).zip(&compiled[..compiled.len() - 1]).filter(|(_, node)| node.pending == 0);
    let (last, mut roots): (Vec<_>, Vec<_>) = nodes.partition(|(_, node)| is_argument(node.kind));
    roots.extend(last);
    roots.into_iter().map(|(node, _)| node).collect()
}

fn is_argument(kind: u32) -> bool {
    kind & (kind::NOTHING | kind::STATIC) == kind::NOTHING
}

/// An order that satisfies all edges and runs a node soon after the one that made it ready, while its values are in the
/// cache.
fn order(compiled: &[Compiled], targets: &[u32]) -> Result<Vec<u32>, PlanError> {
    let nodes = &compiled[..compiled.len() - 1];
    let mut waits = vec![0u32; nodes.len()];
    targets.iter().for_each(|target| waits[*target as usize] += 1);
    let mut ready = roots(compiled);
    ready.reverse();
    let mut order = Vec::with_capacity(nodes.len());
    while let Some(node) = ready.pop() {
        order.push(node);
        for &target in between(targets, compiled, node, |c| c.targets) {
            waits[target as usize] -= 1;
            if waits[target as usize] == 0 {
                ready.push(target);
            }
        }
    }
    match (0u32..).zip(&waits).find(|(_, waits)| **waits != 0) {
        Some((node, _)) => Err(PlanError::Cycle(node)),
        None => Ok(order),
    }
}
