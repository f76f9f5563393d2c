//! Values that share a variable's memory.
//!
//! TensorFlow reads a reference variable without copying: the value lives in the variable's memory and changes with it.
//! On the variable's task, `v/read` shows an update that runs before its consumer does; once sent to another task it is
//! a copy and no longer changes. So a value that stayed on its task in the original graph may travel in the rewritten
//! one only if the difference is unobservable: no consumer can run after an update that the copy missed, and none keeps
//! the value for later.
//!
//! Any operation may return its input's memory as its output (Reshape, Identity, a no-op Transpose), so all are assumed
//! to.

use std::collections::{BTreeMap, BTreeSet};

use super::flow::{Flow, Visit};
use super::graph::{Class, Edge, Graph, index};
use super::placement::{Place, Placement, Reason};
use super::roots::{Roots, may_change};

/// Edge budget for finding the nodes downstream of updates. Beyond it, every user counts as downstream.
const FAR: usize = 20_000_000;

/// The variable whose memory a value may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    Variable(u32),
    /// Some variable of this task.
    Any(u32),
}

pub struct Aliases<'a> {
    graph: &'a Graph<'a>,
    roots: &'a Roots,
    /// By node: the possible owners of its outputs' memory.
    of: Vec<BTreeSet<Owner>>,
    /// Edges that carry, as a value, memory that may belong to an owner.
    shown: ByOwner,
    /// Edges to nodes that may change the variable.
    changed: ByOwner,
}

/// Numbers of edges by task and variable. That of any variable of the task has none.
type ByOwner = BTreeMap<(u32, Option<u32>), Vec<usize>>;

/// More owners than this collapse into [`Owner::Any`].
const MOST: usize = 16;

impl<'a> Aliases<'a> {
    pub fn new(graph: &'a Graph<'a>, flow: &Flow, roots: &'a Roots) -> Self {
        let (shown, changed) = (ByOwner::new(), ByOwner::new());
        let mut all = Self { graph, roots, of: vec![BTreeSet::new(); graph.len()], shown, changed };
        // In loops, owners flow back to nodes already visited: iterate to a fixed point.
        loop {
            let mut changed = false;
            for step in &flow.order {
                let Visit::Node(node) = *step else { continue };
                let any = Owner::Any(graph.node(node).task);
                let known = &all.of[index(node)];
                if known.contains(&any) && known.len() == 1 {
                    continue;
                }
                let mut owners: BTreeSet<Owner> = graph.ins(node).flat_map(|edge| all.carried(edge)).collect();
                if owners.len() > MOST {
                    owners = BTreeSet::from([any]);
                }
                if owners != *known {
                    all.of[index(node)] = owners;
                    changed = true;
                }
            }
            if !changed || flow.parents.len() == 1 {
                break;
            }
        }
        all.sort_edges();
        all
    }

    fn sort_edges(&mut self) {
        for (number, edge) in self.graph.edges().iter().enumerate() {
            if edge.class != Class::Ref {
                for owner in self.carried(edge) {
                    self.shown.entry(self.key(owner)).or_default().push(number);
                }
            } else if may_change(self.graph, edge) {
                self.changed.entry(self.key(self.owner_of_reference(edge))).or_default().push(number);
            }
        }
    }

    fn owner_of_reference(&self, edge: &Edge) -> Owner {
        let owner = self.roots.variable(edge).map(Owner::Variable);
        owner.unwrap_or(Owner::Any(self.graph.node(edge.src).task))
    }

    fn key(&self, owner: Owner) -> (u32, Option<u32>) {
        match owner {
            Owner::Variable(node) => (self.graph.node(node).task, Some(node)),
            Owner::Any(task) => (task, None),
        }
    }

    /// The possible owners of the memory of a node's outputs.
    pub fn of(&self, node: u32) -> &BTreeSet<Owner> {
        &self.of[index(node)]
    }

    /// The owners of the memory behind an edge. None if it crosses to another task: a copy arrives there.
    pub fn carried(&self, edge: &Edge) -> Vec<Owner> {
        if self.graph.crosses(edge) {
            return Vec::new();
        }
        match edge.class {
            Class::Control | Class::Resource => Vec::new(),
            Class::Ref | Class::Deref => vec![self.owner_of_reference(edge)],
            Class::Plain | Class::String | Class::Variant => self.of[index(edge.src)].iter().copied().collect(),
        }
    }

    /// Nodes that must be left alone because a value would no longer show an update that it has to show.
    pub fn broken(&self, placement: &Placement) -> Vec<(u32, Reason)> {
        let mut at_stake = BTreeSet::new();
        for edge in self.graph.edges().iter().filter(|edge| travels(placement, edge)) {
            at_stake.extend(self.carried(edge));
        }
        let mut torn = Vec::new();
        for owner in at_stake.into_iter().filter(|owner| self.can_tell(*owner)) {
            for edge in self.of_owner(&self.shown, owner) {
                let ends = [edge.src, edge.dst].into_iter();
                let called = |node: &u32| matches!(placement.place(*node), Place::Called | Place::Moved | Place::Pivot);
                torn.extend(ends.filter(called).map(|node| (node, Reason::Alias)));
            }
        }
        torn
    }

    /// Nodes that must be left alone because they would see an update of the worker's that the copy on their server
    /// missed. In the original graph one copy, sent when the value is there, serves all nodes of a server. In the
    /// rewritten one each call reads the value again, and so does a node that was moved to the worker.
    pub fn late(&self, placement: &Placement, calls_of: &[Option<u32>]) -> Vec<(u32, Reason)> {
        let mut copies: BTreeMap<(u32, i32, u32), BTreeSet<u32>> = BTreeMap::new();
        for edge in self.graph.edges().iter().filter(|edge| !edge.is_control() && self.graph.crosses(edge)) {
            let from_worker = matches!(placement.place(edge.src), Place::Stays);
            if from_worker && !self.of[index(edge.src)].is_empty() {
                let copy = (edge.src, edge.src_output, self.graph.node(edge.dst).task);
                copies.entry(copy).or_default().insert(edge.dst);
            }
        }
        let mut torn = Vec::new();
        for ((src, ..), users) in copies {
            let here = |node: &u32| matches!(placement.place(*node), Place::Moved | Place::Pivot);
            let calls: BTreeSet<u32> = users.iter().filter_map(|node| calls_of[index(*node)]).collect();
            let again = calls.len() > 1 || users.iter().any(here);
            if again && self.leads_to_change(&users, &self.of[index(src)]) {
                let called = users.iter().filter(|node| here(node) || calls_of[index(**node)].is_some());
                torn.extend(called.map(|node| (*node, Reason::Alias)));
            }
        }
        torn
    }

    /// Whether a change of one of these variables comes after one of the nodes.
    fn leads_to_change(&self, nodes: &BTreeSet<u32>, owners: &BTreeSet<Owner>) -> bool {
        let changes: BTreeSet<u32> = owners.iter().flat_map(|owner| self.changes(*owner)).collect();
        self.leads(nodes.iter().copied().collect(), &changes)
    }

    /// Whether edges lead from one of these nodes to one of those; yes, if that takes too long to find out.
    fn leads(&self, mut open: Vec<u32>, to: &BTreeSet<u32>) -> bool {
        let mut seen: BTreeSet<u32> = BTreeSet::new();
        let mut looked = 0;
        while let (false, Some(node)) = (to.is_empty(), open.pop()) {
            for edge in self.graph.outs(node) {
                looked += 1;
                if looked > FAR || to.contains(&edge.dst) {
                    return true;
                }
                if seen.insert(edge.dst) {
                    open.push(edge.dst);
                }
            }
        }
        false
    }

    /// The nodes that may change the variable.
    fn changes(&self, owner: Owner) -> impl Iterator<Item = u32> {
        self.of_owner(&self.changed, owner).map(|edge| edge.dst)
    }

    /// The edges whose owner may be this one.
    fn of_owner<'s>(&'s self, edges: &'s ByOwner, owner: Owner) -> impl Iterator<Item = &'s Edge> {
        let (task, variable) = self.key(owner);
        let of_any = edges.get(&(task, None));
        let last = variable.unwrap_or(u32::MAX);
        let of_one = edges.range((task, Some(variable.unwrap_or(0)))..=(task, Some(last)));
        of_any
            .into_iter()
            .chain(of_one.map(|(_, numbers)| numbers))
            .flatten()
            .filter_map(|number| self.graph.edges().get(*number))
    }

    /// Whether a user of such a value may run after a change of the variable, or keeps the value.
    fn can_tell(&self, owner: Owner) -> bool {
        let users: BTreeSet<u32> = self.of_owner(&self.shown, owner).map(|edge| edge.dst).collect();
        let keeps = |node: &u32| {
            let it = self.graph.node(*node);
            it.unknown || (it.stateful && !it.pure_read && !it.forwards_ref)
        };
        if users.iter().any(keeps) {
            return true;
        }
        self.leads(self.changes(owner).collect(), &users)
    }
}

/// Stayed on its task in the original graph, but does not in the rewritten one.
fn travels(placement: &Placement, edge: &Edge) -> bool {
    #[derive(PartialEq)]
    enum Where {
        Server,
        Graph,
        Worker,
    }
    let place = |node: u32| match placement.place(node) {
        Place::Called | Place::Copied => Where::Server,
        Place::Left(_) => Where::Graph,
        Place::Moved | Place::Pivot | Place::Stays => Where::Worker,
    };
    match (placement.place(edge.src), place(edge.dst)) {
        // The server has a copy wherever one is needed, and so does the graph.
        (Place::Copied, Where::Server | Where::Graph) => false,
        _ => place(edge.src) != place(edge.dst),
    }
}
