//! The abstract graph: which node runs on which task, and what flows between them. Of an operation it knows only the
//! properties listed in [`Node`].

/// A node's role in control flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Plain,
    /// Passes its only data input on unchanged.
    Identity,
    /// Passes input 0 to the output that input 1 selects; its other outputs are dead.
    Switch,
    /// Passes on its first live data input.
    Merge,
    Enter,
    Exit,
    NextIteration,
    LoopCond,
    /// Runs even if its inputs are dead.
    ControlTrigger,
    /// Brings in a value from the client.
    Feed,
    /// Brings in a value, dead or alive, that a send elsewhere delivers.
    Receive,
    /// Hands a value to the client.
    Fetch,
}

impl Kind {
    /// Part of a loop's mechanism rather than of its computation.
    pub fn is_loop_plumbing(self) -> bool {
        matches!(self, Kind::Enter | Kind::Exit | Kind::NextIteration | Kind::LoopCond)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node {
    pub kind: Kind,
    /// Equal numbers mean the same task.
    pub task: u32,
    pub device: u32,
    /// Has effects beyond its outputs, or is not known to have none.
    pub stateful: bool,
    /// Nothing is known about its operation: it stays where it is, may wait, and may change anything that it can reach.
    pub unknown: bool,
    /// May wait for something that is not an edge of this graph: a queue, a collective, a receive that the user wrote,
    /// a client that feeds later (partial runs).
    pub blocking: bool,
    /// Nothing may be inserted between it and its neighbours.
    pub untouchable: bool,
    /// A constant, or a variable found by name: a copy of the node is equivalent to it.
    pub cloneable: bool,
    /// Output 0 is the same reference as input 0.
    pub forwards_ref: bool,
    /// Reads a variable and does nothing else.
    pub pure_read: bool,
    /// Enter: its value is the same in every iteration of the loop, not only in the first.
    pub invariant: bool,
    /// Enter: the number of its frame's name. Switch: its number of outputs (0: two). Variable: the number of its name
    /// (0: a name that no other node has).
    pub detail: u32,
    /// Its run time, if known.
    pub cost_us: Option<u32>,
}

impl Node {
    pub fn plain(task: u32) -> Self {
        Self::of(Kind::Plain, task)
    }

    pub fn of(kind: Kind, task: u32) -> Self {
        Node {
            kind,
            task,
            device: task,
            stateful: false,
            unknown: false,
            blocking: false,
            untouchable: false,
            cloneable: false,
            forwards_ref: false,
            pure_read: false,
            invariant: false,
            detail: 0,
            cost_us: None,
        }
    }
}

/// The kind of payload on an edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// A tensor with a plain byte representation.
    Plain,
    String,
    Variant,
    /// A reference into the producer: not a value.
    Ref,
    /// The value behind a reference, which the consumer reads when it starts: the value of that moment.
    Deref,
    Resource,
    /// Completion only.
    Control,
}

/// The memory in which the producer leaves the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Memory {
    Host,
    Device,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edge {
    pub src: u32,
    /// Negative: control.
    pub src_output: i32,
    pub dst: u32,
    /// Negative: control.
    pub dst_input: i32,
    pub class: Class,
    pub memory: Memory,
    /// The size of what it carries, if known.
    pub bytes: Option<u64>,
}

impl Edge {
    pub fn is_control(&self) -> bool {
        self.class == Class::Control
    }
}

/// Looks up a node's name, for messages.
pub type Names<'a> = &'a dyn Fn(u32) -> Option<String>;

/// The reason why a graph cannot be planned. It may still be run as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("planner: edge {edge} names node {node}, but the graph has only {nodes} nodes")]
    NoSuchNode { edge: usize, node: u32, nodes: usize },
    #[error("planner: the graph is too large: {count} {what}")]
    TooMany { what: &'static str, count: usize },
    #[error("planner: unknown {what} {value} at index {at}")]
    Unknown { what: &'static str, at: usize, value: u32 },
    #[error("planner: edge {edge} is a control edge at one end only")]
    HalfControl { edge: usize },
    #[error("planner: {node} depends on itself without a NextIteration")]
    Cycle { node: String },
    #[error("planner: the inputs of {node} come from different loop frames")]
    MixedFrames { node: String },
    #[error("planner: {node} exits a loop that was never entered")]
    NotInALoop { node: String },
}

/// A graph whose edges refer only to existing nodes.
pub struct Graph<'a> {
    nodes: Vec<Node>,
    edges: Vec<Edge>,
    ins: Adjacency,
    outs: Adjacency,
    names: Option<Names<'a>>,
}

impl<'a> Graph<'a> {
    pub fn new(nodes: Vec<Node>, edges: Vec<Edge>, names: Option<Names<'a>>) -> Result<Self, PlanError> {
        // One number is reserved for "none".
        let numbered = |what, count: usize| match u32::try_from(count) {
            Ok(number) if number < u32::MAX / 2 => Ok(()),
            _ => Err(PlanError::TooMany { what, count }),
        };
        numbered("nodes", nodes.len())?;
        numbered("edges", edges.len())?;
        for (at, edge) in edges.iter().enumerate() {
            if let Some(node) = [edge.src, edge.dst].into_iter().find(|node| index(*node) >= nodes.len()) {
                return Err(PlanError::NoSuchNode { edge: at, node, nodes: nodes.len() });
            }
        }
        let ins = Adjacency::new(nodes.len(), edges.iter().map(|edge| edge.dst));
        let outs = Adjacency::new(nodes.len(), edges.iter().map(|edge| edge.src));
        Ok(Self { nodes, edges, ins, outs, names })
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    pub fn node(&self, node: u32) -> &Node {
        &self.nodes[index(node)]
    }

    pub fn edge(&self, edge: u32) -> &Edge {
        &self.edges[index(edge)]
    }

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// The edges that end at a node.
    pub fn ins(&self, node: u32) -> impl Iterator<Item = &Edge> + Clone {
        self.ins.of(node).iter().map(move |edge| self.edge(*edge))
    }

    /// The edges that begin at a node.
    pub fn outs(&self, node: u32) -> impl Iterator<Item = &Edge> + Clone {
        self.outs.of(node).iter().map(move |edge| self.edge(*edge))
    }

    /// Both.
    pub fn edges_of(&self, node: u32) -> impl Iterator<Item = &Edge> + Clone {
        self.ins(node).chain(self.outs(node))
    }

    pub fn ids(&self) -> impl Iterator<Item = u32> + use<> {
        0..number(self.nodes.len())
    }

    /// Begins and ends on different tasks.
    pub fn crosses(&self, edge: &Edge) -> bool {
        self.node(edge.src).task != self.node(edge.dst).task
    }

    /// For messages: its name if known, else its number.
    pub fn describe(&self, node: u32) -> String {
        match self.names.and_then(|names| names(node)) {
            Some(name) => format!("{name:?}"),
            None => format!("node {node}"),
        }
    }
}

/// The number of a node, an edge, or something else of which there is at most one per node or edge. `Graph::new` has
/// checked that these fit; one that does not is a panic, and planning fails, instead of a wrong number.
pub(super) fn number(count: usize) -> u32 {
    u32::try_from(count).expect("Graph::new limits nodes and edges")
}

/// A node or edge number as an index: u32 always fits.
pub(super) fn index(number: u32) -> usize {
    number as usize
}

/// The edges of each node, in two arrays.
struct Adjacency {
    begins: Vec<u32>,
    edges: Vec<u32>,
}

impl Adjacency {
    /// `ends` has one node per edge, in edge order.
    fn new(nodes: usize, ends: impl Iterator<Item = u32> + Clone) -> Self {
        let mut begins = vec![0u32; nodes + 1];
        for node in ends.clone() {
            begins[index(node) + 1] += 1;
        }
        for at in 0..nodes {
            begins[at + 1] += begins[at];
        }
        let mut next = begins.clone();
        let mut edges = vec![0u32; index(begins[nodes])];
        for (edge, node) in (0u32..).zip(ends) {
            edges[index(next[index(node)])] = edge;
            next[index(node)] += 1;
        }
        Self { begins, edges }
    }

    fn of(&self, node: u32) -> &[u32] {
        &self.edges[index(self.begins[index(node)])..index(self.begins[index(node) + 1])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(src: u32, dst: u32) -> Edge {
        Edge { src, src_output: 0, dst, dst_input: 0, class: Class::Plain, memory: Memory::Host, bytes: None }
    }

    #[test]
    fn edges_are_found_at_both_ends() {
        let graph = Graph::new(vec![Node::plain(0); 3], vec![edge(0, 2), edge(1, 2), edge(0, 1)], None).unwrap();
        let (ins, outs): (Vec<_>, Vec<_>) = (graph.ins(2).collect(), graph.outs(0).collect());
        assert_eq!((ins, outs), (vec![&edge(0, 2), &edge(1, 2)], vec![&edge(0, 2), &edge(0, 1)]));
        assert_eq!(graph.ins(0).next(), None);
    }

    #[test]
    fn an_edge_to_nowhere_is_refused() {
        let error = Graph::new(vec![Node::plain(0)], vec![edge(0, 1)], None).err();
        assert_eq!(error, Some(PlanError::NoSuchNode { edge: 0, node: 1, nodes: 1 }));
    }
}
