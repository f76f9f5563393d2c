//! Runs an abstract graph token by token, by the rules of TensorFlow's executor: dead tokens, frames, iterations, nodes
//! that wait for something outside the graph. An invariant Enter holds for every iteration of its loop. Shares no
//! code with the planners, so that it can check their guarantees.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::generate::Random;
use starwire_planner::fuse::FusePlan;
use starwire_planner::graph::{Class, Edge, Graph, Kind};

/// Pairs of nodes, of which the second waits for the first without an edge.
pub type Hidden = [(u32, u32)];

/// A node, with the iterations of its enclosing loops, to its result; None is dead.
pub type Trace = BTreeMap<(u32, Vec<u32>), Option<u64>>;

/// Merges with this `detail` may have several live inputs: their value does not depend on which comes first.
pub const AMBIGUOUS: u32 = 77;

/// The variation between runs.
#[derive(Clone, Copy, Debug)]
pub struct Luck {
    /// Seeds the values of nodes, and so the branches of Switches.
    pub values: u64,
    /// Seeds the choice among ready nodes.
    pub order: u64,
}

/// Everything that runs. Nodes that deadlock are missing.
pub fn run(graph: &Graph, hidden: &Hidden, plan: Option<&FusePlan>, luck: Luck) -> Trace {
    let net = match plan {
        Some(plan) => Net::fused(graph, plan),
        None => Net::plain(graph),
    };
    net.run(hidden, luck).trace
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    Node(Kind),
    /// Passes input k to output k once all inputs have arrived.
    Bundle,
}

#[derive(Clone, Copy)]
pub struct Wire {
    pub output: i32,
    pub dst: u32,
    pub input: i32,
    /// Carries no value.
    pub reference: bool,
}

/// The graph to run: nodes by number, the original graph's first.
pub struct Net {
    pub ops: Vec<Op>,
    details: Vec<u32>,
    constants: Vec<bool>,
    /// The node that it is, or is a copy of.
    origins: Vec<u32>,
    pub wires: Vec<Vec<Wire>>,
    /// Nodes of the original graph that no longer exist.
    pub gone: BTreeSet<u32>,
}

pub struct Outcome {
    pub trace: Trace,
    /// The results of copies: for one node, all are the same.
    pub copies: BTreeMap<u32, BTreeSet<Option<u64>>>,
    /// Outside of loops: when each node ran.
    pub times: HashMap<u32, usize>,
    /// Outside of loops: when each copy of a node ran.
    pub copy_times: HashMap<u32, Vec<usize>>,
}

impl Net {
    /// The graph's nodes, without wires.
    pub fn nodes(graph: &Graph) -> Self {
        Net {
            ops: graph.nodes().iter().map(|node| Op::Node(node.kind)).collect(),
            details: graph.nodes().iter().map(|node| node.detail).collect(),
            constants: graph.nodes().iter().map(|node| node.invariant).collect(),
            origins: graph.ids().collect(),
            wires: vec![Vec::new(); graph.len()],
            gone: BTreeSet::new(),
        }
    }

    fn plain(graph: &Graph) -> Self {
        let mut net = Self::nodes(graph);
        for edge in graph.edges() {
            net.keep(graph, edge);
        }
        net
    }

    fn fused(graph: &Graph, plan: &FusePlan) -> Self {
        let mut net = Self::nodes(graph);
        let mut moved = BTreeSet::new();
        for group in &plan.groups {
            let bundle = net.add(Op::Bundle, 0);
            for (place, number) in (0..).zip(&group.items) {
                let item = &plan.items[*number as usize];
                let place = if item.output < 0 { -1 } else { place };
                net.wire((item.src, item.output), (bundle, place), false);
                for edge in &item.edges {
                    assert!(moved.insert(*edge), "edge {edge} is in two groups");
                    let edge = graph.edge(*edge);
                    net.wire((bundle, place), (edge.dst, edge.dst_input), false);
                }
            }
        }
        for (_, edge) in (0u32..).zip(graph.edges()).filter(|(number, _)| !moved.contains(number)) {
            net.keep(graph, edge);
        }
        net
    }

    pub fn add(&mut self, op: Op, origin: u32) -> u32 {
        self.ops.push(op);
        self.details.push(0);
        self.constants.push(false);
        self.origins.push(origin);
        self.wires.push(Vec::new());
        self.ops.len() as u32 - 1
    }

    pub fn wire(&mut self, (src, output): (u32, i32), (dst, input): (u32, i32), reference: bool) {
        self.wires[src as usize].push(Wire { output, dst, input, reference });
    }

    /// Keeps one of the graph's edges as it is.
    pub fn keep(&mut self, graph: &Graph, edge: &Edge) {
        let reference = carries_a_reference(graph, edge);
        self.wire((edge.src, edge.src_output), (edge.dst, edge.dst_input), reference);
    }

    pub fn run(self, hidden: &Hidden, luck: Luck) -> Outcome {
        let mut machine = Machine::new(self, hidden, luck);
        machine.run();
        machine.outcome
    }
}

/// References have no value, nor does the output of a Switch of one.
pub fn carries_a_reference(graph: &Graph, edge: &Edge) -> bool {
    let reference = |class: Class| matches!(class, Class::Ref | Class::Deref | Class::Resource);
    let of_one = |edge: &Edge| edge.dst_input == 0 && reference(edge.class);
    let switched = graph.node(edge.src).kind == Kind::Switch && graph.ins(edge.src).any(of_one);
    reference(edge.class) || (switched && !edge.is_control())
}

type Tag = (usize, u32);

struct Instance {
    /// The destination of its exits.
    parent: Option<Tag>,
    path: Vec<u32>,
    started: u32,
    constants: Vec<(u32, Option<u64>)>,
    entered: usize,
    expected: usize,
    dead_exits: BTreeSet<u32>,
    live_exits: BTreeSet<u32>,
}

#[derive(Default)]
struct Slot {
    control: usize,
    data: usize,
    dead: bool,
    dead_data: usize,
    dead_enter: bool,
    values: BTreeMap<i32, u64>,
    first_live: Option<u64>,
    fired: bool,
}

struct Machine {
    net: Net,
    control_ins: Vec<usize>,
    data_ins: Vec<usize>,
    hidden: HashMap<u32, Vec<u32>>,
    seed: u64,
    order: Random,
    instances: Vec<Instance>,
    children: HashMap<(usize, u32, u32), usize>,
    slots: HashMap<(u32, Tag), Slot>,
    ready: Vec<(u32, Tag)>,
    blocked: Vec<(u32, Tag)>,
    ran: BTreeSet<u32>,
    now: usize,
    outcome: Outcome,
}

impl Machine {
    fn new(net: Net, hidden: &Hidden, luck: Luck) -> Self {
        let (mut control_ins, mut data_ins) = (vec![0; net.ops.len()], vec![0; net.ops.len()]);
        for wire in net.wires.iter().flatten() {
            let ins = if wire.input < 0 { &mut control_ins } else { &mut data_ins };
            ins[wire.dst as usize] += 1;
        }
        let mut waits: HashMap<u32, Vec<u32>> = HashMap::new();
        for (awaited, waiter) in hidden {
            waits.entry(*waiter).or_default().push(*awaited);
        }
        let root = Instance {
            parent: None,
            path: Vec::new(),
            started: 0,
            constants: Vec::new(),
            entered: 0,
            expected: 0,
            dead_exits: BTreeSet::new(),
            live_exits: BTreeSet::new(),
        };
        Machine {
            net,
            control_ins,
            data_ins,
            hidden: waits,
            seed: luck.values,
            order: Random(luck.order),
            instances: vec![root],
            children: HashMap::new(),
            slots: HashMap::new(),
            ready: Vec::new(),
            blocked: Vec::new(),
            ran: BTreeSet::new(),
            now: 0,
            outcome: Outcome {
                trace: Trace::new(),
                copies: BTreeMap::new(),
                times: HashMap::new(),
                copy_times: HashMap::new(),
            },
        }
    }

    fn run(&mut self) {
        for node in 0..self.net.ops.len() as u32 {
            let nothing = self.control_ins[node as usize] + self.data_ins[node as usize] == 0;
            if nothing && !self.net.gone.contains(&node) {
                self.ready.push((node, (0, 0)));
            }
        }
        loop {
            while !self.ready.is_empty() {
                let (node, tag) = self.ready.swap_remove(self.order.below(self.ready.len()));
                let open = self.hidden.get(&node).is_some_and(|all| all.iter().any(|n| !self.ran.contains(n)));
                if open {
                    self.blocked.push((node, tag));
                    continue;
                }
                self.fire(node, tag);
                if self.ran.insert(node) {
                    self.ready.append(&mut self.blocked);
                }
            }
            if !self.finish_a_loop() {
                return;
            }
        }
    }

    /// Exits that never were alive end dead, once nothing in the loop can run any more.
    fn finish_a_loop(&mut self) -> bool {
        for at in (1..self.instances.len()).rev() {
            let instance = &self.instances[at];
            let busy = self.blocked.iter().any(|(_, (inside, _))| self.is_within(*inside, at));
            if instance.dead_exits.is_empty() || instance.entered < instance.expected || busy {
                continue;
            }
            let parent = instance.parent.unwrap();
            let dead: Vec<u32> = instance.dead_exits.difference(&instance.live_exits).copied().collect();
            self.instances[at].dead_exits.clear();
            for exit in dead.iter().copied() {
                self.send(exit, parent, |_| None);
            }
            if !dead.is_empty() {
                return true;
            }
        }
        false
    }

    fn is_within(&self, mut inside: usize, outer: usize) -> bool {
        while inside != outer {
            match self.instances[inside].parent {
                Some((parent, _)) => inside = parent,
                None => return false,
            }
        }
        true
    }

    fn path(&self, (instance, iteration): Tag) -> Vec<u32> {
        let mut path = self.instances[instance].path.clone();
        if instance != 0 {
            path.push(iteration);
        }
        path
    }

    fn fire(&mut self, node: u32, tag: Tag) {
        let slot = self.slots.entry((node, tag)).or_default();
        slot.fired = true;
        let (dead, values, first) = (slot.dead, slot.values.clone(), slot.first_live);
        let input = |number: i32| values.get(&number).copied().unwrap_or(0);
        let kind = match self.net.ops[node as usize] {
            Op::Bundle => {
                return self.send(node, tag, |output| (!dead).then(|| input(output)));
            }
            Op::Node(kind) => kind,
        };
        let path = self.path(tag);
        let origin = self.net.origins[node as usize];
        let seed = self.seed;
        let alive = |value: u64| (!dead).then_some(value);
        let own = || values.iter().fold(hash(seed, u64::from(origin)), |h, (n, v)| hash(hash(h, *n as u64), *v));
        let result = match kind {
            Kind::Identity | Kind::Switch | Kind::Enter | Kind::Exit | Kind::NextIteration => alive(input(0)),
            Kind::Merge if self.net.details[node as usize] == AMBIGUOUS => first.map(|_| hash(seed, u64::from(origin))),
            Kind::Merge => first,
            Kind::ControlTrigger => Some(0),
            Kind::LoopCond => {
                let around =
                    path[..path.len() - 1].iter().fold(hash(seed, u64::from(origin)), |h, i| hash(h, u64::from(*i)));
                alive(u64::from(u64::from(tag.1) < around % 4))
            }
            // Delivers a dead token half of the time.
            Kind::Receive => Some(own()).filter(|value| value % 2 == 0),
            Kind::Plain | Kind::Feed | Kind::Fetch => alive(own()),
        };
        self.now += 1;
        if node != origin {
            if path.is_empty() {
                self.outcome.copy_times.entry(origin).or_default().push(self.now);
            }
            self.outcome.copies.entry(origin).or_default().insert(result);
        } else {
            if path.is_empty() {
                self.outcome.times.insert(node, self.now);
            }
            assert!(self.outcome.trace.insert((node, path), result).is_none(), "node {node} ran twice");
        }
        match kind {
            Kind::Switch => {
                let ways = self.net.details[node as usize].max(2);
                let way = (input(1) % u64::from(ways)) as i32;
                self.send(node, tag, |output| result.filter(|_| output < 0 || output == way));
            }
            Kind::Enter => self.enter(node, tag, result),
            Kind::Exit if result.is_some() => {
                self.instances[tag.0].live_exits.insert(node);
                let parent = self.instances[tag.0].parent.unwrap();
                self.send(node, parent, |_| result);
            }
            Kind::Exit => {
                self.instances[tag.0].dead_exits.insert(node);
            }
            Kind::NextIteration if result.is_some() => {
                let next = tag.1 + 1;
                if self.instances[tag.0].started < next {
                    self.instances[tag.0].started = next;
                    for (constant, value) in self.instances[tag.0].constants.clone() {
                        self.send(constant, (tag.0, next), |_| value);
                    }
                }
                self.send(node, (tag.0, next), |_| result);
            }
            Kind::NextIteration => {}
            Kind::Plain | Kind::Feed | Kind::Receive => {
                self.send(node, tag, |output| {
                    result.map(|value| if output > 0 { hash(value, output as u64) } else { value })
                });
            }
            _ => self.send(node, tag, |_| result),
        }
    }

    fn enter(&mut self, node: u32, (outer, iteration): Tag, value: Option<u64>) {
        let name = self.net.details[node as usize];
        let inner = match self.children.get(&(outer, iteration, name)) {
            Some(known) => *known,
            None => {
                let is_it = |n: &usize| self.net.ops[*n] == Op::Node(Kind::Enter) && self.net.details[*n] == name;
                self.instances.push(Instance {
                    parent: Some((outer, iteration)),
                    path: self.path((outer, iteration)),
                    started: 0,
                    constants: Vec::new(),
                    entered: 0,
                    expected: (0..self.net.ops.len()).filter(is_it).count(),
                    dead_exits: BTreeSet::new(),
                    live_exits: BTreeSet::new(),
                });
                self.children.insert((outer, iteration, name), self.instances.len() - 1);
                self.instances.len() - 1
            }
        };
        self.instances[inner].entered += 1;
        if self.net.constants[node as usize] {
            self.instances[inner].constants.push((node, value));
            for iteration in 0..=self.instances[inner].started {
                self.send(node, (inner, iteration), |_| value);
            }
        } else {
            self.send(node, (inner, 0), |_| value);
        }
    }

    /// `what`: by output, the value; for -1, whether the node was alive.
    fn send(&mut self, node: u32, tag: Tag, what: impl Fn(i32) -> Option<u64>) {
        let from_enter = self.net.ops[node as usize] == Op::Node(Kind::Enter);
        for Wire { output, dst, input, reference } in self.net.wires[node as usize].clone() {
            let token = if reference { what(output).map(|_| 0) } else { what(output) };
            let (control, data) = (self.control_ins[dst as usize], self.data_ins[dst as usize]);
            let op = self.net.ops[dst as usize];
            let slot = self.slots.entry((dst, tag)).or_default();
            if input < 0 {
                slot.control += 1;
            } else {
                slot.data += 1;
            }
            let ready = if op == Op::Node(Kind::Merge) {
                match (input < 0, token) {
                    (true, _) => {}
                    (false, Some(value)) => slot.first_live = slot.first_live.or(Some(value)),
                    (false, None) => {
                        slot.dead_data += 1;
                        slot.dead_enter |= from_enter;
                    }
                }
                let decided = slot.first_live.is_some() || slot.dead_data == data || slot.dead_enter;
                slot.control == control && decided
            } else {
                slot.dead |= token.is_none() && op != Op::Node(Kind::ControlTrigger);
                if let (true, Some(value)) = (input >= 0, token) {
                    slot.values.insert(input, value);
                }
                slot.control == control && slot.data == data
            };
            if ready && !slot.fired {
                slot.fired = true;
                self.ready.push((dst, tag));
            }
        }
    }
}

pub fn hash(a: u64, b: u64) -> u64 {
    let mut x = a.rotate_left(23) ^ b.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::generate::{Case, case, training_case};
    use starwire_planner::graph::{Memory, Node};

    /// Whether the result is the same in this many orders.
    fn is_deterministic(case: &Case, orders: u64) -> bool {
        let graph = case.graph();
        let trace = |values, order| run(&graph, &case.hidden, None, Luck { values, order });
        (0..3).all(|values| (1..orders).all(|order| trace(values, 0) == trace(values, order)))
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

        /// Otherwise there would be no defined result to compare a planned graph with.
        #[test]
        fn random_graphs_are_deterministic(seed: u64, size in 10usize..150) {
            prop_assert!(is_deterministic(&case(seed, size), 4));
            prop_assert!(is_deterministic(&training_case(seed, size), 4));
        }
    }

    #[test]
    fn a_merge_of_a_dead_enter_and_a_live_value_is_ambiguous() {
        for (seed, size) in [(10426696931242409343, 40), (13442, 28)] {
            assert!(is_deterministic(&training_case(seed, size), 4), "such graphs are not made any more");
        }
        use Kind::{Enter, Merge, Plain, Switch};
        // 3 is one of 2's outputs, one of which is dead; 4 enters the same loop alive.
        let build = |between: Kind| {
            let kinds = [Plain, Plain, Switch, Enter, Enter, between, Merge];
            let nodes: Vec<Node> = kinds.iter().map(|kind| Node::of(*kind, 0)).collect();
            let ends = [(0, 2, 0), (1, 2, 1), (2, 3, 0), (0, 4, 0), (3, 5, 0), (5, 6, 0), (4, 6, 1)];
            let edge = |(src, dst, dst_input)| Edge {
                src,
                src_output: 0,
                dst,
                dst_input,
                class: Class::Plain,
                memory: Memory::Host,
                bytes: None,
            };
            let mut edges = ends.map(edge).to_vec();
            if between == Enter {
                // The Merge takes it directly.
                edges[5].src = 3;
            }
            Case { nodes, edges, hidden: Vec::new() }
        };
        assert!(!is_deterministic(&build(Enter), 50));
        assert!(is_deterministic(&build(Kind::Identity), 50));
    }
}
