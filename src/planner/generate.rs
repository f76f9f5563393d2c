//! Random graphs of the kind that TensorFlow accepts: conditions, loops, several tasks, values that escape from their branch, nodes that wait
//! for others without an edge.

use super::graph::{Class, Edge, Graph, Kind, Memory, Node};
use super::simulate::{AMBIGUOUS, hash};

pub struct Case {
    pub nodes: Vec<Node>,
    pub edges: Vec<Edge>,
    pub hidden: Vec<(u32, u32)>,
}

impl Case {
    pub fn graph(&self) -> Graph<'static> {
        Graph::new(self.nodes.clone(), self.edges.clone(), None).unwrap()
    }
}

/// About `size` nodes.
pub fn case(seed: u64, size: usize) -> Case {
    let mut builder = Builder {
        random: Random(hash(seed, 1)),
        tasks: 0,
        case: Case { nodes: Vec::new(), edges: Vec::new(), hidden: Vec::new() },
        frames: 0,
        size,
        outside: Vec::new(),
    };
    builder.tasks = 2 + builder.random.below(3) as u32;
    let mut scope = Scope { values: Vec::new(), depth: 0, looping: false };
    for _ in 0..3 {
        builder.plain(&mut scope, 0);
    }
    while builder.case.nodes.len() < size {
        builder.something(&mut scope);
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
}

struct Scope {
    values: Vec<Value>,
    depth: usize,
    looping: bool,
}

struct Builder {
    random: Random,
    tasks: u32,
    case: Case,
    frames: u32,
    size: usize,
    /// What runs exactly once, and can be waited for.
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
        self.case.nodes.push(node);
        self.case.nodes.len() as u32 - 1
    }

    fn data(&mut self, from: Value, dst: u32, dst_input: i32) {
        let class = match self.random.below(40) {
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
            // Control edges come from a node, which is alive even if one of its outputs is not.
            let value = earlier[self.random.below(earlier.len())];
            solid &= value.solid;
            self.control(value.node, node);
        }
        if self.random.chance(6) && !self.outside.is_empty() {
            let awaited = self.outside[self.random.below(self.outside.len())];
            self.case.nodes[node as usize].blocking = true;
            self.case.hidden.push((awaited, node));
        }
        if scope.depth == 0 {
            self.outside.push(node);
        }
        for output in 0..1 + self.random.below(2) as i32 {
            scope.values.push(Value { node, output, solid });
        }
    }

    fn identity(&mut self, scope: &mut Scope) {
        let value = self.pick(scope);
        let node = self.node(Kind::Identity);
        self.data(value, node, 0);
        scope.values.push(Value { node, output: 0, solid: value.solid });
    }

    fn trigger(&mut self, scope: &mut Scope) {
        let value = self.pick(scope);
        let trigger = self.node(Kind::ControlTrigger);
        self.control(value.node, trigger);
        let input = self.pick(scope);
        let node = self.node(Kind::Plain);
        self.control(trigger, node);
        self.data(input, node, 0);
        scope.values.push(Value { node, output: 0, solid: input.solid });
    }

    fn odd_one(&mut self, scope: &mut Scope) {
        match self.random.below(3) {
            0 => {
                let node = self.node(Kind::Feed);
                scope.values.push(Value { node, output: 0, solid: true });
            }
            1 => {
                let value = self.pick(scope);
                let node = self.node(Kind::Fetch);
                self.data(value, node, 0);
            }
            _ => {
                let node = self.node(Kind::Receive);
                self.case.nodes[node as usize].blocking = true;
                scope.values.push(Value { node, output: 0, solid: false });
            }
        }
    }

    fn strange_merge(&mut self, scope: &mut Scope) {
        let values = [self.pick(scope), self.pick(scope)];
        let node = self.node(Kind::Merge);
        self.case.nodes[node as usize].detail = AMBIGUOUS;
        for (place, value) in (0..).zip(values) {
            self.data(value, node, place);
        }
        scope.values.push(Value { node, output: 0, solid: values.iter().any(|value| value.solid) });
    }

    fn condition(&mut self, scope: &mut Scope) {
        let ways = if self.random.chance(20) { 3 } else { 2 };
        let mut predicate = self.pick(scope);
        if self.random.chance(60) {
            let node = self.node(Kind::Identity);
            self.data(predicate, node, 0);
            predicate = Value { node, output: 0, ..predicate };
        }
        let captured: Vec<Value> = (0..1 + self.random.below(3)).map(|_| self.pick(scope)).collect();
        let whole = predicate.solid && captured.iter().all(|value| value.solid);
        let mut switches = Vec::new();
        for value in captured {
            let switch = self.node(Kind::Switch);
            self.case.nodes[switch as usize].detail = if ways == 2 { 0 } else { ways };
            self.data(value, switch, 0);
            self.data(predicate, switch, 1);
            switches.push((switch, value.solid && predicate.solid));
        }
        let mut results: Vec<Vec<Value>> = Vec::new();
        for way in 0..ways as i32 {
            let values = switches.iter().map(|(node, solid)| Value { node: *node, output: way, solid: *solid });
            let mut branch = Scope { values: values.collect(), depth: scope.depth + 1, looping: scope.looping };
            for _ in 0..self.random.below(5) {
                if self.case.nodes.len() < self.size * 2 {
                    self.something(&mut branch);
                }
            }
            // Some escape without a Merge.
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
            scope.values.push(Value { node: merge, output: 0, solid });
        }
    }

    fn repetition(&mut self, scope: &mut Scope) {
        if !scope.values.iter().any(|value| value.solid) {
            return;
        }
        self.frames += 1;
        let frame = self.frames;
        let variables = 1 + self.random.below(2);
        let mut inner = Scope { values: Vec::new(), depth: scope.depth + 1, looping: true };
        let mut headers = Vec::new();
        for _ in 0..variables {
            // What enters one loop has the same fate, but for strange graphs.
            let value = if self.random.chance(90) { self.solid(scope) } else { self.pick(scope) };
            let enter = self.node(Kind::Enter);
            self.case.nodes[enter as usize].detail = frame;
            self.data(value, enter, 0);
            let header = self.node(Kind::Merge);
            self.data(Value { node: enter, output: 0, solid: true }, header, 0);
            headers.push(header);
            inner.values.push(Value { node: header, output: 0, solid: true });
        }
        let mut constants = Vec::new();
        for _ in 0..self.random.below(3) {
            let value = self.solid(scope);
            let enter = self.node(Kind::Enter);
            self.case.nodes[enter as usize].detail = frame;
            self.case.nodes[enter as usize].stateful = true;
            self.data(value, enter, 0);
            constants.push(Value { node: enter, output: 0, solid: true });
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
        let mut body = Scope { values: constants, depth: scope.depth + 1, looping: true };
        let mut exits = Vec::new();
        for header in &headers {
            let switch = self.node(Kind::Switch);
            self.data(Value { node: *header, output: 0, solid: true }, switch, 0);
            self.data(Value { node: condition, output: 0, solid: true }, switch, 1);
            body.values.push(Value { node: switch, output: 1, solid: true });
            exits.push(switch);
        }
        // Constants of the body are only usable there together with something that ends with the loop.
        let turning = body.values[body.values.len() - 1];
        for _ in 0..1 + self.random.below(6) {
            if self.case.nodes.len() < self.size * 2 {
                self.something(&mut body);
            }
        }
        for header in headers {
            // Goes round only while the condition holds; in strange graphs, not even always then.
            let value = if self.random.chance(90) { self.solid(&body) } else { self.pick(&body) };
            let both = self.node(Kind::Plain);
            self.data(value, both, 0);
            self.data(turning, both, 1);
            let next = self.node(Kind::NextIteration);
            self.data(Value { node: both, output: 0, solid: true }, next, 0);
            self.data(Value { node: next, output: 0, solid: true }, header, 1);
        }
        for switch in exits {
            let mut last = Value { node: switch, output: 0, solid: true };
            if self.random.chance(10) {
                // Leaves only under a condition of its own.
                let node = self.node(Kind::Switch);
                self.data(last, node, 0);
                self.data(decision, node, 1);
                last = Value { node, output: 1, solid: false };
            }
            let exit = self.node(Kind::Exit);
            self.data(last, exit, 0);
            scope.values.push(Value { node: exit, output: 0, solid: last.solid });
        }
    }
}
