//! The variable behind a reference or handle.

use std::collections::HashMap;

use super::flow::{Flow, Visit, forward_ins, is_header};
use super::graph::{Class, Edge, Graph, Kind, index};

pub struct Roots {
    /// By node: the variable that its references lead to, if that is certain.
    of: Vec<Option<u32>>,
    /// By node: whether it is a Switch; all its outputs are then the same reference.
    switches: Vec<bool>,
    /// By node: the first of the variables with its name.
    same: Vec<u32>,
}

impl Roots {
    pub fn new(graph: &Graph, flow: &Flow) -> Self {
        let switches = graph.nodes().iter().map(|node| node.kind == Kind::Switch).collect();
        let mut first = HashMap::new();
        let same = |node: u32| match graph.node(node) {
            it if it.cloneable && it.detail != 0 => *first.entry((it.device, it.detail)).or_insert(node),
            _ => node,
        };
        let same = graph.ids().map(same).collect();
        let mut all = Self { of: vec![None; graph.len()], switches, same };
        for step in &flow.order {
            if let Visit::Node(node) = *step {
                all.of[index(node)] = all.find(graph, node);
            }
        }
        all
    }

    /// The variable behind what an edge carries.
    pub fn of(&self, edge: &Edge) -> Option<u32> {
        if edge.src_output == 0 || (edge.src_output > 0 && self.switches[index(edge.src)]) {
            self.of[index(edge.src)]
        } else {
            None
        }
    }

    /// Like [`Self::of`], but equal for two nodes that are the same variable.
    pub fn variable(&self, edge: &Edge) -> Option<u32> {
        self.of(edge).map(|node| self.same[index(node)])
    }

    /// The variable that a node's output 0 refers to.
    pub fn of_output(&self, node: u32) -> Option<u32> {
        self.of[index(node)]
    }

    fn find(&self, graph: &Graph, node: u32) -> Option<u32> {
        let it = graph.node(node);
        if it.cloneable && graph.ins(node).next().is_none() {
            return Some(node);
        }
        let mut data = forward_ins(graph, node).filter(|edge| !edge.is_control());
        if it.kind == Kind::Merge {
            // In a loop it may be a different one in each iteration.
            let first = data.next().filter(|edge| passes(edge) && !is_header(graph, node))?;
            let root = self.of(first)?;
            return data.all(|edge| passes(edge) && self.of(edge) == Some(root)).then_some(root);
        }
        let input = data.find(|edge| edge.dst_input == 0).filter(|edge| passes(edge))?;
        let enters = it.kind == Kind::Enter && it.invariant && input.class == Class::Resource;
        let forwards = enters || it.forwards_ref || matches!(it.kind, Kind::Identity | Kind::Switch);
        if forwards { self.of(input) } else { None }
    }
}

/// The consumer takes the reference itself.
fn passes(edge: &Edge) -> bool {
    matches!(edge.class, Class::Ref | Class::Resource)
}

/// May change the variable behind a reference or handle: every consumer that takes one, unless it only reads it or
/// passes it on.
pub fn may_change(graph: &Graph, edge: &Edge) -> bool {
    let it = graph.node(edge.dst);
    let passes_on = matches!(it.kind, Kind::Identity | Kind::Switch | Kind::Merge | Kind::Enter | Kind::Exit)
        || it.kind == Kind::NextIteration;
    passes(edge) && !passes_on && !it.pure_read
}
