use super::random::check;
use crate::generate::Case;
use starwire_planner::graph::{Class, Edge, Kind, Memory, Node};
use starwire_planner::star::{StarPlan, Style};

/// Task 0 is the worker; 1 and 2 are servers.
#[derive(Default)]
pub(super) struct Build {
    pub(super) nodes: Vec<Node>,
    pub(super) edges: Vec<Edge>,
    /// Reference variables: a read takes no reference, and an update passes its reference on.
    pub(super) references: bool,
}

impl Build {
    pub(super) fn op(&mut self, task: u32, inputs: &[(u32, Class)]) -> u32 {
        let node = self.nodes.len() as u32;
        self.nodes.push(Node::plain(task));
        for (place, (src, class)) in (0..).zip(inputs) {
            self.input((*src, 0), node, place, *class);
        }
        node
    }

    pub(super) fn node(&mut self, kind: Kind, task: u32, inputs: &[(u32, Class)]) -> u32 {
        let node = self.op(task, inputs);
        self.nodes[node as usize].kind = kind;
        node
    }

    pub(super) fn input(&mut self, (src, src_output): (u32, i32), dst: u32, dst_input: i32, class: Class) {
        self.edges.push(Edge { src, src_output, dst, dst_input, class, memory: Memory::Host, bytes: None });
    }

    pub(super) fn after(&mut self, src: u32, dst: u32) {
        self.input((src, -1), dst, -1, Class::Control);
    }

    pub(super) fn variable(&mut self, task: u32) -> u32 {
        let node = self.op(task, &[]);
        (self.nodes[node as usize].cloneable, self.nodes[node as usize].stateful) = (true, true);
        node
    }

    pub(super) fn constant(&mut self, task: u32) -> u32 {
        let node = self.op(task, &[]);
        self.nodes[node as usize].cloneable = true;
        node
    }

    pub(super) fn read(&mut self, variable: u32) -> u32 {
        let class = if self.references { Class::Deref } else { Class::Resource };
        let node = self.op(self.nodes[variable as usize].task, &[(variable, class)]);
        let it = &mut self.nodes[node as usize];
        // As in TensorFlow, where ReadVariableOp is stateful.
        (it.pure_read, it.stateful) = (true, !self.references);
        it.kind = if self.references { Kind::Identity } else { Kind::Plain };
        node
    }

    pub(super) fn update(&mut self, variable: u32, inputs: &[u32]) -> u32 {
        let mut all = vec![(variable, if self.references { Class::Ref } else { Class::Resource })];
        all.extend(inputs.iter().map(|input| (*input, Class::Plain)));
        let node = self.op(self.nodes[variable as usize].task, &all);
        let it = &mut self.nodes[node as usize];
        (it.stateful, it.forwards_ref) = (!self.references, self.references);
        node
    }

    pub(super) fn check(self, style: Style) -> StarPlan {
        check(&Case { nodes: self.nodes, edges: self.edges, hidden: Vec::new() }, style)
    }
}
