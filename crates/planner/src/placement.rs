//! Decides what becomes of each node when the parameter servers' part of a graph is turned into calls: the first step
//! of the star planners.

use super::classes::{ClassId, Classes};
use super::flow::{Flow, ROOT, Visit};
use super::graph::{Class, Edge, Graph, Kind, index};
use super::loops::Loops;
use super::predicates::Predicates;
use super::roots::Roots;

#[derive(Debug, Clone)]
pub struct Roles {
    /// By task: whether it is a parameter server.
    pub servers: Vec<bool>,
}

impl Roles {
    pub fn is_server(&self, task: u32) -> bool {
        self.servers.get(index(task)).copied().unwrap_or(false)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// Not on a parameter server.
    Stays,
    /// Moved to the worker: it decides which nodes are dead, which a call cannot, or only waits for calls.
    Moved,
    /// A Switch of a variable's handle, or its Enter into a loop: the variable is cloned where it is needed, and the
    /// worker keeps only the choice of the branch, or the entry.
    Pivot,
    /// Copied to wherever it is needed.
    Copied,
    /// On the parameter server, reached by send and receive.
    Left(Reason),
    /// Part of a call.
    Called,
}

/// The reason why a node is left to send and receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// In a loop in which no calls are made, or part of its machinery.
    Loop,
    Untouchable,
    /// Nothing is known about its operation.
    Unknown,
    /// A value that is a variable's own memory, whose changes may have to be visible.
    Alias,
    /// A node with more inputs or outputs than a call can carry.
    Many,
    /// A reference would have to leave its call.
    Reference,
    Resource,
    Variant,
    /// Sends, receives, feeds or fetches.
    Transfer,
    /// A Switch or Merge of references or resources.
    Branching,
    /// A Switch or Merge of a large value for nodes of its own server, or such a value's producer or consumer.
    Large,
    /// No edge connects the calls to the rest of the graph: calls would save nothing.
    NothingCrosses,
}

impl Reason {
    pub fn text(self) -> &'static str {
        match self {
            Reason::Loop => "in a loop",
            Reason::Untouchable => "functions, and nodes not on the first CPU",
            Reason::Unknown => "an operation that starwire does not know",
            Reason::Alias => "a value that changes with its variable",
            Reason::Many => "more values than a call can carry",
            Reason::Reference => "a reference would leave its call",
            Reason::Resource => "a handle would leave its call",
            Reason::Variant => "an object would leave its call",
            Reason::Transfer => "sends, receives, feeds and fetches",
            Reason::Branching => "a branch of references",
            Reason::Large => "a branch of a large value",
            Reason::NothingCrosses => "calls would save nothing",
        }
    }
}

/// Values from this size on do not go to the worker because a node between their producer and their consumer does.
pub const LARGE_BYTES: u64 = 256 << 10;

/// The nodes on servers that are left to send and receive because the worker would otherwise get a large value of
/// which it may need nothing: each Switch or Merge of one whose consumers are all beside it, and all that large values
/// connect with it.
pub fn large_branches(graph: &Graph, roles: &Roles) -> Vec<Option<Reason>> {
    let mut left = vec![None; graph.len()];
    let is_large = |edge: &Edge| is_large_here(graph, edge);
    let decides = |node: &u32| matches!(graph.node(*node).kind, Kind::Switch | Kind::Merge);
    let in_task = |edge: &Edge| edge.is_control() || !graph.crosses(edge);
    let begins = |node: &u32| {
        let on_server = roles.is_server(graph.node(*node).task);
        decides(node) && on_server && graph.ins(*node).any(is_large) && graph.outs(*node).all(in_task)
    };
    let mut open: Vec<u32> = graph.ids().filter(begins).collect();
    while let Some(node) = open.pop() {
        if left[index(node)].replace(Reason::Large).is_none() {
            open.extend(graph.ins(node).filter(|edge| is_large(edge)).map(|edge| edge.src));
            open.extend(graph.outs(node).filter(|edge| is_large(edge)).map(|edge| edge.dst));
        }
    }
    left
}

/// Whether an edge carries a large value within its task. That of a constant does not count: it is copied.
fn is_large_here(graph: &Graph, edge: &Edge) -> bool {
    let is_large = edge.bytes.is_some_and(|bytes| bytes >= LARGE_BYTES);
    is_large && edge.class == Class::Plain && !graph.crosses(edge) && !graph.node(edge.src).cloneable
}

pub struct Placement<'a> {
    pub places: Vec<Place>,
    roots: &'a Roots,
    /// By node: copied, but its value is needed where no copy can be.
    fetched: Vec<bool>,
    /// By node.
    classes: Vec<ClassId>,
}

impl<'a> Placement<'a> {
    /// `left`: nodes that are left alone in any case. `copy_reads`: by node, reads of variables that may be copied like
    /// the variables.
    #[allow(clippy::too_many_arguments)]
    pub fn of(
        graph: &Graph,
        flow: &Flow,
        predicates: &Predicates,
        loops: &Loops,
        classes: &Classes,
        roles: &Roles,
        roots: &'a Roots,
        left: &[Option<Reason>],
        copy_reads: &[bool],
    ) -> Self {
        let mut all =
            Self { places: vec![Place::Stays; graph.len()], roots, fetched: Vec::new(), classes: classes.of.clone() };
        for step in &flow.order {
            let Visit::Node(node) = *step else { continue };
            if roles.is_server(graph.node(node).task) {
                let place = match left[index(node)] {
                    Some(reason) => Place::Left(reason),
                    None => all.place_on_server(graph, flow, predicates, loops, node, copy_reads[index(node)]),
                };
                all.places[index(node)] = place;
            }
        }
        all.keep_with_consumers(graph, flow, loops, classes);
        all.wait_on_worker(graph, flow, loops, roles);
        let needed = |edge: &Edge| !all.is_copied(graph, edge);
        let fetched = |node: u32| all.place(node) == Place::Copied && graph.outs(node).any(needed);
        all.fetched = graph.ids().map(fetched).collect();
        all
    }

    pub fn place(&self, node: u32) -> Place {
        self.places[index(node)]
    }

    /// Meaningful for called nodes only.
    pub fn class(&self, node: u32) -> ClassId {
        self.classes[index(node)]
    }

    /// The variable behind a reference or handle.
    pub fn root(&self, edge: &Edge) -> Option<u32> {
        self.roots.of(edge)
    }

    /// Like [`Self::root`], but equal for two nodes that are the same variable.
    pub fn variable(&self, edge: &Edge) -> Option<u32> {
        self.roots.variable(edge)
    }

    /// The consumer has a copy of the producer wherever it runs (or the producer itself stays in the graph for it), so
    /// it waits for nothing.
    pub fn is_copied(&self, graph: &Graph, edge: &Edge) -> bool {
        if self.place(edge.src) != Place::Copied {
            return false;
        }
        // Running it has no effect, and a reference cannot travel.
        if !is_variable(graph, edge.src) || edge.is_control() || is_reference(edge) {
            return true;
        }
        match self.place(edge.dst) {
            Place::Left(_) => true,
            Place::Called | Place::Copied => !graph.crosses(edge),
            Place::Stays | Place::Moved | Place::Pivot => false,
        }
    }

    /// Needs the variable itself, on its server. This includes a value that came through a Switch of the variable: only
    /// the variable exists.
    pub fn is_tied(&self, edge: &Edge) -> bool {
        is_reference(edge) || (self.place(edge.src) == Place::Pivot && !edge.is_control())
    }

    /// Part of a call; this includes a copied node whose value is needed outside of calls.
    pub fn is_called(&self, node: u32) -> bool {
        match self.place(node) {
            Place::Called => true,
            Place::Copied => self.fetched[index(node)],
            _ => false,
        }
    }

    /// Puts a node that could run anywhere into the only call that needs it. There it costs nothing, whereas a node
    /// between two parts of a call would tear them apart: conditional nodes of the server, and the no-ops by which a
    /// worker joins the work of several servers.
    fn keep_with_consumers(&mut self, graph: &Graph, flow: &Flow, loops: &Loops, classes: &Classes) {
        for step in flow.order.iter().rev() {
            let Visit::Node(node) = *step else { continue };
            let Some(first) = graph.outs(node).next() else { continue };
            let (own, class) = (self.class(node), self.class(first.dst));
            let kin = |node: u32| self.place(node) == Place::Called && self.class(node) == class;
            let fits = match self.place(node) {
                Place::Moved => {
                    let kind = graph.node(node).kind;
                    let decides = matches!(kind, Kind::Switch | Kind::Merge | Kind::ControlTrigger);
                    !decides && !kind.is_loop_plumbing() && own == class
                }
                Place::Stays => {
                    let there = |node: u32| matches!(self.place(node), Place::Called | Place::Moved);
                    let mut sources = graph.ins(node).map(|edge| edge.src);
                    let between = sources.any(|source| there(source) && self.class(source) == class);
                    // It may be all that tells its task about the iterations of a loop.
                    let frame = flow.inside(node);
                    let spare = frame == ROOT || loops.has_condition(frame, graph.node(node).task);
                    between && spare && is_no_op(graph, flow, loops, node) && classes.differ_in_task_only(own, class)
                }
                _ => false,
            };
            if fits && graph.outs(node).all(|edge| kin(edge.dst)) {
                self.places[index(node)] = Place::Called;
                self.classes[index(node)] = class;
            }
        }
    }

    /// Moves to the worker the no-ops that wait for calls if nothing else in their call waits for them: to wait for the
    /// parts of a call, or for another server's call, would take a call and a round trip. Those that had joined them
    /// from the worker go back.
    fn wait_on_worker(&mut self, graph: &Graph, flow: &Flow, loops: &Loops, roles: &Roles) {
        for step in flow.order.iter().rev() {
            let Visit::Node(node) = *step else { continue };
            if self.place(node) != Place::Called || !is_no_op(graph, flow, loops, node) {
                continue;
            }
            let waits = graph.ins(node).any(|edge| self.place(edge.src) == Place::Called);
            let free = graph.outs(node).all(|edge| match self.place(edge.dst) {
                Place::Stays | Place::Moved => true,
                Place::Called => self.class(edge.dst) != self.class(node),
                Place::Pivot | Place::Copied | Place::Left(_) => false,
            });
            if waits && free {
                let from_server = roles.is_server(graph.node(node).task);
                self.places[index(node)] = if from_server { Place::Moved } else { Place::Stays };
            }
        }
    }

    fn place_on_server(
        &self,
        graph: &Graph,
        flow: &Flow,
        predicates: &Predicates,
        loops: &Loops,
        node: u32,
        copy_read: bool,
    ) -> Place {
        let it = graph.node(node);
        if !loops.admits(node) {
            return Place::Left(Reason::Loop);
        }
        if it.untouchable {
            return Place::Left(Reason::Untouchable);
        }
        if it.unknown {
            return Place::Left(Reason::Unknown);
        }
        if matches!(it.kind, Kind::Feed | Kind::Fetch | Kind::Receive) {
            return Place::Left(Reason::Transfer);
        }
        let mut ins = graph.ins(node);
        let copied = |edge: &Edge| !edge.is_control() && self.place(edge.src) == Place::Copied && !graph.crosses(edge);
        if (it.cloneable && graph.ins(node).next().is_none()) || (copy_read && it.pure_read && ins.all(copied)) {
            return Place::Copied;
        }
        let there = |node: u32| matches!(self.place(node), Place::Called | Place::Copied);
        let tied = graph.edges_of(node).any(|edge| self.is_tied(edge) || edge.class == Class::Variant);
        match it.kind {
            Kind::Switch | Kind::Enter if self.roots.of_output(node).is_some() => Place::Pivot,
            Kind::Switch | Kind::Merge if tied => Place::Left(Reason::Branching),
            Kind::Switch | Kind::Merge | Kind::ControlTrigger => Place::Moved,
            kind if kind.is_loop_plumbing() && tied => Place::Left(Reason::Loop),
            kind if kind.is_loop_plumbing() => Place::Moved,
            _ if it.stateful || it.blocking || tied => Place::Called,
            _ if predicates.node(node) == loops.usual(flow.inside(node)) => Place::Called,
            _ if graph.ins(node).any(|edge| is_large_here(graph, edge) && there(edge.src)) => Place::Called,
            _ => Place::Moved,
        }
    }
}

/// Passes on completion and does nothing else: it is the same wherever it runs.
fn is_no_op(graph: &Graph, flow: &Flow, loops: &Loops, node: u32) -> bool {
    let it = graph.node(node);
    let plain = it.kind == Kind::Plain && !(it.stateful || it.blocking || it.untouchable);
    let frame = flow.inside(node);
    plain && (frame == ROOT || loops.is_orderly(frame)) && graph.edges_of(node).all(Edge::is_control)
}

/// Cannot leave its task.
pub fn is_reference(edge: &Edge) -> bool {
    matches!(edge.class, Class::Ref | Class::Deref | Class::Resource)
}

/// A copied node whose value changes: a variable, or a read of one.
pub fn is_variable(graph: &Graph, node: u32) -> bool {
    graph.node(node).stateful || graph.node(node).pure_read
}
