//! Random graphs of the kind that TensorFlow accepts: conditions, loops, several tasks, values that escape their
//! branch, nodes that wait for others without an edge.

use crate::simulate::{AMBIGUOUS, hash};
use starwire_planner::graph::{Class, Edge, Graph, Kind, Memory, Node};
use starwire_planner::unordered;

pub struct Case {
    pub nodes: Vec<Node>,
    pub edges: Vec<Edge>,
    pub hidden: Vec<(u32, u32)>,
}

impl Case {
    pub fn graph(&self) -> Graph<'static> {
        Graph::new(self.nodes.clone(), self.edges.clone(), None).unwrap()
    }

    /// With the order of reads and updates that no edge orders, as what is planned always has it.
    pub fn ordered(&self) -> Case {
        let orders = unordered::orders(&self.graph()).unwrap();
        let (mut nodes, mut edges) = (self.nodes.clone(), self.edges.clone());
        unordered::apply(&mut nodes, &mut edges, &orders);
        Case { nodes, edges, hidden: self.hidden.clone() }
    }
}

/// A graph of about `size` nodes.
pub fn case(seed: u64, size: usize) -> Case {
    build(seed, size, false)
}

/// The same for a worker (task 0) and parameter servers with variables, constants and effects.
pub fn training_case(seed: u64, size: usize) -> Case {
    build(seed, size, true)
}

fn build(seed: u64, size: usize, training: bool) -> Case {
    let mut builder = Builder {
        random: Random(hash(seed, 1)),
        training,
        tasks: 0,
        case: Case { nodes: Vec::new(), edges: Vec::new(), hidden: Vec::new() },
        frames: 0,
        size,
        outside: Vec::new(),
    };
    builder.tasks = 2 + builder.random.below(3) as u32;
    let mut scope = Scope { values: Vec::new(), depth: 0, pivot: None };
    for _ in 0..3 {
        builder.plain(&mut scope, 0);
    }
    for _ in 0..if training { 2 + size / 20 } else { 0 } {
        builder.variable(&mut scope);
    }
    while builder.case.nodes.len() < size {
        builder.something(&mut scope);
    }
    if training {
        builder.random = Random(hash(seed, 2));
        builder.no_ops();
    }
    builder.case
}

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        hash(self.0, 7)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

#[derive(Clone, Copy)]
struct Value {
    node: u32,
    output: i32,
    /// Alive whenever the scope is.
    solid: bool,
    /// Output 0 of this node refers to a variable.
    refers: bool,
}

impl Value {
    fn of(node: u32, output: i32, solid: bool) -> Self {
        Value { node, output, solid, refers: false }
    }
}

struct Scope {
    values: Vec<Value>,
    depth: usize,
    /// In a loop's body: runs in each of its iterations.
    pivot: Option<u32>,
}

struct Builder {
    random: Random,
    training: bool,
    tasks: u32,
    case: Case,
    frames: u32,
    size: usize,
    /// Nodes that run exactly once, so that others can wait for them.
    outside: Vec<u32>,
}

impl Builder {
    fn something(&mut self, scope: &mut Scope) {
        match self.random.below(20) {
            0 | 1 if scope.depth < 3 => self.condition(scope),
            2 if scope.depth < 3 => self.repetition(scope),
            3 => self.strange_merge(scope),
            4 => self.identity(scope),
            5 => self.trigger(scope),
            6 if scope.depth == 0 => self.odd_one(scope),
            7..=11 if self.training => self.variable_user(scope),
            _ => {
                let inputs = 1 + self.random.below(3);
                self.plain(scope, inputs);
            }
        }
    }

    fn node(&mut self, kind: Kind) -> u32 {
        let task = self.random.below(self.tasks as usize) as u32;
        let mut node = Node::of(kind, task);
        node.device = task * 2 + self.random.below(2) as u32;
        node.cost_us = self.random.chance(50).then(|| self.random.below(300) as u32);
        node.untouchable = self.random.chance(2);
        if self.training && kind == Kind::Plain && self.random.chance(2) {
            (node.unknown, node.stateful, node.blocking) = (true, true, true);
        }
        self.case.nodes.push(node);
        self.case.nodes.len() as u32 - 1
    }

    fn data(&mut self, from: Value, dst: u32, dst_input: i32) {
        let class = match self.random.below(if self.training { 400 } else { 40 }) {
            // The simulation gives these no value, so they cannot be predicates.
            0 | 1 if matches!(self.case.nodes[dst as usize].kind, Kind::Identity | Kind::Switch) => Class::Plain,
            0 => Class::Ref,
            1 => Class::Resource,
            2 => Class::Variant,
            3 => Class::String,
            _ => Class::Plain,
        };
        let memory = if hash(u64::from(from.node), 3) % 8 == 0 { Memory::Device } else { Memory::Host };
        let bytes = match hash(u64::from(from.node), 5) % 6 {
            0 => None,
            1 => Some(1 << 15),
            2 => Some(1 << 20),
            _ => Some(1 << 10),
        };
        let (src, src_output) = (from.node, from.output);
        self.case.edges.push(Edge { src, src_output, dst, dst_input, class, memory, bytes });
    }

    /// The consumer takes the reference, so it runs on the variable's task.
    fn reference(&mut self, from: Value, dst: u32) {
        self.data(from, dst, 0);
        if let Some(edge) = self.case.edges.last_mut() {
            edge.class = if hash(u64::from(from.node), 9) % 2 == 0 { Class::Ref } else { Class::Resource };
        }
        let task = self.case.nodes[from.node as usize].task;
        self.case.nodes[dst as usize].task = task;
    }

    fn variable(&mut self, scope: &mut Scope) {
        let node = self.node(Kind::Plain);
        let refers = self.random.chance(75);
        let task = self.random.below(self.tasks as usize) as u32;
        let it = &mut self.case.nodes[node as usize];
        (it.task, it.cloneable, it.stateful, it.untouchable) = (task, true, refers, false);
        (it.unknown, it.blocking) = (false, false);
        scope.values.push(Value { refers, ..Value::of(node, 0, true) });
    }

    /// Reads a variable, or has an effect on it.
    fn variable_user(&mut self, scope: &mut Scope) {
        let variables: Vec<Value> = scope.values.iter().copied().filter(|value| value.refers).collect();
        if variables.is_empty() {
            return self.plain(scope, 2);
        }
        let variable = variables[self.random.below(variables.len())];
        let other = self.pick(scope);
        let node = self.node(Kind::Plain);
        self.reference(variable, node);
        if let Some(pivot) = scope.pivot.filter(|_| hash(u64::from(node), 15) % 4 != 0) {
            self.control(pivot, node);
        }
        if self.random.chance(40) {
            self.case.nodes[node as usize].pure_read = true;
            let handle = self.case.edges.iter_mut().rfind(|edge| (edge.dst, edge.dst_input) == (node, 0));
            if let Some(edge) = handle.filter(|edge| edge.class == Class::Ref) {
                edge.class = Class::Deref;
            }
            scope.values.push(Value::of(node, 0, variable.solid));
            return;
        }
        let forwards = self.random.chance(50);
        let it = &mut self.case.nodes[node as usize];
        (it.stateful, it.forwards_ref) = (true, forwards);
        self.data(other, node, 1);
        if self.random.chance(30) {
            let first = self.pick(scope);
            self.control(first.node, node);
            scope
                .values
                .push(Value { refers: forwards, ..Value::of(node, 0, variable.solid && other.solid && first.solid) });
        } else {
            scope.values.push(Value { refers: forwards, ..Value::of(node, 0, variable.solid && other.solid) });
        }
    }

    fn control(&mut self, src: u32, dst: u32) {
        let (class, memory) = (Class::Control, Memory::Host);
        self.case.edges.push(Edge { src, src_output: -1, dst, dst_input: -1, class, memory, bytes: None });
    }

    fn pick(&mut self, scope: &Scope) -> Value {
        scope.values[self.random.below(scope.values.len())]
    }

    fn solid(&mut self, scope: &Scope) -> Value {
        let solid: Vec<Value> = scope.values.iter().copied().filter(|value| value.solid).collect();
        solid[self.random.below(solid.len())]
    }

    fn plain(&mut self, scope: &mut Scope, inputs: usize) {
        let from: Vec<Value> = (0..inputs).map(|_| self.pick(scope)).collect();
        let earlier = scope.values.clone();
        let node = self.node(Kind::Plain);
        let mut solid = true;
        for (place, value) in (0..).zip(from) {
            solid &= value.solid;
            self.data(value, node, place);
        }
        if self.random.chance(15) && !earlier.is_empty() {
            // Control edges come from a node, which is alive even if one of its outputs is dead.
            let value = earlier[self.random.below(earlier.len())];
            solid &= value.solid;
            self.control(value.node, node);
        }
        self.case.nodes[node as usize].stateful |= self.training && self.random.chance(25);
        if self.random.chance(6) && !self.outside.is_empty() {
            let awaited = self.outside[self.random.below(self.outside.len())];
            self.case.nodes[node as usize].blocking = true;
            self.case.nodes[awaited as usize].stateful = true;
            self.case.hidden.push((awaited, node));
        }
        if scope.depth == 0 {
            self.outside.push(node);
        }
        for output in 0..1 + self.random.below(2) as i32 {
            scope.values.push(Value::of(node, output, solid));
        }
    }

    /// Reroutes control edges through a node of the worker, which may wait for others as well.
    fn no_ops(&mut self) {
        for edge in 0..self.case.edges.len() {
            let Edge { src, dst, class, .. } = self.case.edges[edge];
            if class != Class::Control || !self.random.chance(60) {
                continue;
            }
            let node = self.node(Kind::Plain);
            self.case.nodes[node as usize].task = 0;
            self.case.edges[edge].dst = node;
            self.control(node, dst);
            // In the graph's order, so that nothing waits in a circle.
            let earlier: Vec<u32> =
                self.outside.iter().copied().filter(|other| *other < dst && *other != src).collect();
            if self.outside.contains(&dst) && !earlier.is_empty() {
                for _ in 0..self.random.below(4) {
                    let other = earlier[self.random.below(earlier.len())];
                    self.control(other, node);
                }
            }
        }
    }

    fn identity(&mut self, scope: &mut Scope) {
        let value = self.pick(scope);
        let node = self.node(Kind::Identity);
        self.data(value, node, 0);
        scope.values.push(Value::of(node, 0, value.solid));
    }

    fn trigger(&mut self, scope: &mut Scope) {
        let value = self.pick(scope);
        let trigger = self.node(Kind::ControlTrigger);
        self.control(value.node, trigger);
        let input = self.pick(scope);
        let node = self.node(Kind::Plain);
        self.control(trigger, node);
        self.data(input, node, 0);
        scope.values.push(Value::of(node, 0, input.solid));
    }

    fn odd_one(&mut self, scope: &mut Scope) {
        match self.random.below(3) {
            0 => {
                let node = self.node(Kind::Feed);
                scope.values.push(Value::of(node, 0, true));
            }
            1 => {
                let value = self.pick(scope);
                let node = self.node(Kind::Fetch);
                self.data(value, node, 0);
            }
            _ => {
                let node = self.node(Kind::Receive);
                self.case.nodes[node as usize].blocking = true;
                scope.values.push(Value::of(node, 0, false));
            }
        }
    }

    fn strange_merge(&mut self, scope: &mut Scope) {
        let values = [self.pick(scope), self.pick(scope)].map(|value| self.entered(value));
        let node = self.node(Kind::Merge);
        self.case.nodes[node as usize].detail = AMBIGUOUS;
        for (place, value) in (0..).zip(values) {
            self.data(value, node, place);
        }
        scope.values.push(Value::of(node, 0, values.iter().any(|value| value.solid)));
    }

    /// A value that a Merge may take. A dead Enter makes a Merge dead at once, even if another input is alive; in
    /// TensorFlow, too, the result would depend on which comes first. There, only loop headers take an Enter, and they
    /// get one input per iteration.
    fn entered(&mut self, value: Value) -> Value {
        if self.case.nodes[value.node as usize].kind != Kind::Enter {
            return value;
        }
        let node = self.node(Kind::Identity);
        self.data(value, node, 0);
        Value::of(node, 0, value.solid)
    }

    fn condition(&mut self, scope: &mut Scope) {
        let ways = if self.random.chance(20) { 3 } else { 2 };
        let mut predicate = self.pick(scope);
        if self.random.chance(60) {
            let node = self.node(Kind::Identity);
            self.data(predicate, node, 0);
            predicate = Value::of(node, 0, predicate.solid);
        }
        let mut captured: Vec<Value> = (0..1 + self.random.below(3)).map(|_| self.pick(scope)).collect();
        captured.extend(scope.values.iter().filter(|value| value.refers).take(usize::from(self.training)).copied());
        let whole = predicate.solid && captured.iter().all(|value| value.solid);
        let mut switches = Vec::new();
        for value in captured {
            let switch = self.node(Kind::Switch);
            self.case.nodes[switch as usize].detail = if ways == 2 { 0 } else { ways };
            if value.refers && self.random.chance(80) {
                self.reference(value, switch);
            } else {
                self.data(value, switch, 0);
            }
            self.data(predicate, switch, 1);
            let taken = self.case.edges[self.case.edges.len() - 2].class;
            let refers = value.refers && matches!(taken, Class::Ref | Class::Resource);
            switches.push(Value { refers, ..Value::of(switch, 0, value.solid && predicate.solid) });
        }
        let mut results: Vec<Vec<Value>> = Vec::new();
        for way in 0..ways as i32 {
            let values = switches.iter().map(|switch| Value { output: way, ..*switch });
            let mut branch = Scope { values: values.collect(), depth: scope.depth + 1, pivot: scope.pivot };
            for _ in 0..self.random.below(5) {
                if self.case.nodes.len() < self.size * 2 {
                    self.something(&mut branch);
                }
            }
            // Some values escape without a Merge.
            if self.random.chance(25) {
                let value = self.pick(&branch);
                scope.values.push(Value { solid: false, ..value });
            }
            results.push((0..2).map(|_| branch.values[self.random.below(branch.values.len())]).collect());
        }
        let complete = !self.random.chance(15);
        for variable in 0..1 + self.random.below(2) {
            let merge = self.node(Kind::Merge);
            let inputs: Vec<Value> = results.iter().map(|result| result[variable]).collect();
            let used = if complete { inputs.len() } else { inputs.len() - 1 };
            for (place, value) in (0..).zip(&inputs[..used]) {
                self.data(*value, merge, place);
            }
            let solid = complete && whole && inputs.iter().all(|value| value.solid);
            scope.values.push(Value::of(merge, 0, solid));
        }
    }

    fn repetition(&mut self, scope: &mut Scope) {
        if !scope.values.iter().any(|value| value.solid) {
            return;
        }
        self.frames += 1;
        let frame = self.frames;
        let variables = 1 + self.random.below(2);
        let mut inner = Scope { values: Vec::new(), depth: scope.depth + 1, pivot: None };
        let mut headers = Vec::new();
        for _ in 0..variables {
            // Values that enter one loop have the same fate, except in strange graphs.
            let value = if self.random.chance(90) { self.solid(scope) } else { self.pick(scope) };
            let enter = self.node(Kind::Enter);
            self.case.nodes[enter as usize].detail = frame;
            self.data(value, enter, 0);
            let header = self.node(Kind::Merge);
            self.data(Value::of(enter, 0, true), header, 0);
            headers.push(header);
            inner.values.push(Value::of(header, 0, true));
        }
        let mut constants = Vec::new();
        let handles = scope.values.iter().copied().filter(|value| value.refers && value.solid);
        let handles: Vec<Value> = handles.take(if self.training { 2 } else { 0 }).collect();
        for number in 0..handles.len() + self.random.below(3) {
            let value = handles.get(number).copied().unwrap_or_else(|| self.solid(scope));
            let enter = self.node(Kind::Enter);
            self.case.nodes[enter as usize].detail = frame;
            self.case.nodes[enter as usize].invariant = true;
            self.data(value, enter, 0);
            let handle = value.refers && hash(u64::from(enter), 11) % 4 != 0;
            if let Some(edge) = self.case.edges.last_mut().filter(|_| handle) {
                edge.class = Class::Resource;
                self.case.nodes[enter as usize].task = self.case.nodes[value.node as usize].task;
            }
            constants.push(Value { refers: handle, ..Value::of(enter, 0, true) });
        }
        if self.random.chance(50) {
            inner.values.extend(&constants);
        }
        for _ in 0..self.random.below(3) {
            self.plain(&mut inner, 1);
        }
        let decision = self.solid(&inner);
        let condition = self.node(Kind::LoopCond);
        self.data(decision, condition, 0);
        let mut body = Scope { values: constants, depth: scope.depth + 1, pivot: None };
        let mut exits = Vec::new();
        for header in &headers {
            let switch = self.node(Kind::Switch);
            self.data(Value::of(*header, 0, true), switch, 0);
            self.data(Value::of(condition, 0, true), switch, 1);
            body.values.push(Value::of(switch, 1, true));
            exits.push(switch);
        }
        // Constants of the body are only usable there together with something that ends with the loop.
        let turning = body.values[body.values.len() - 1];
        if self.training {
            let pivot = self.node(Kind::Identity);
            self.data(turning, pivot, 0);
            body.pivot = Some(pivot);
        }
        for _ in 0..1 + self.random.below(6) {
            if self.case.nodes.len() < self.size * 2 {
                self.something(&mut body);
            }
        }
        // Most loops of TensorFlow 2 wait for all effects of an iteration before the next.
        let effects: Vec<u32> = match hash(u64::from(condition), 13) % 2 {
            0 if self.training => body.values.iter().filter(|value| value.solid).map(|value| value.node).collect(),
            _ => Vec::new(),
        };
        for header in headers {
            // Iterates only while the condition holds; in strange graphs, sometimes not even then.
            let value = if self.random.chance(90) { self.solid(&body) } else { self.pick(&body) };
            let both = self.node(Kind::Plain);
            self.data(value, both, 0);
            self.data(turning, both, 1);
            let next = self.node(Kind::NextIteration);
            self.data(Value::of(both, 0, true), next, 0);
            effects.iter().for_each(|effect| self.control(*effect, next));
            self.data(Value::of(next, 0, true), header, 1);
        }
        for switch in exits {
            let mut last = Value::of(switch, 0, true);
            if self.random.chance(10) {
                // Leaves only under its own condition.
                let node = self.node(Kind::Switch);
                self.data(last, node, 0);
                self.data(decision, node, 1);
                last = Value::of(node, 1, false);
            }
            let exit = self.node(Kind::Exit);
            self.data(last, exit, 0);
            scope.values.push(Value::of(exit, 0, last.solid));
        }
    }
}
