//! Random graphs, built from small random choices so that a failing one shrinks.

use proptest::prelude::*;
use starwire_executor::{CONTROL, Edge, Node, kind};

/// Expensive enough to be shared among threads.
const EXPENSIVE: u32 = 1 << 24;

#[derive(Clone, Debug)]
pub struct Graph {
    pub nodes: Vec<Node>,
    pub edges: Vec<Edge>,
}

impl Graph {
    /// The source of each of a node's inputs, in order.
    pub fn inputs(&self, node: u32) -> Vec<(u32, u32)> {
        let mut inputs: Vec<&Edge> = self.edges.iter().filter(|e| e.dst == node && e.input != CONTROL).collect();
        inputs.sort_by_key(|edge| edge.input);
        inputs.into_iter().map(|edge| (edge.src, edge.output)).collect()
    }

    pub fn slot(&self, node: u32, output: u32) -> usize {
        (self.nodes[..node as usize].iter().map(|node| node.outputs).sum::<u32>() + output) as usize
    }
}

#[derive(Clone, Debug)]
struct Choice {
    nothing: bool,
    asynchronous: bool,
    expensive: bool,
    outputs: u32,
    inputs: Vec<(u16, u16)>,
    controls: Vec<u16>,
}

/// The kinds of nodes that a graph may have.
#[derive(Clone, Copy, Debug)]
pub struct Menu {
    pub asynchronous: bool,
    pub expensive: bool,
}

pub fn graphs(menu: Menu) -> impl Strategy<Value = Graph> {
    let choice = (
        prop::bool::weighted(0.1),
        any::<bool>(),
        any::<bool>(),
        1u32..4,
        prop::collection::vec(any::<(u16, u16)>(), 0..4),
        prop::collection::vec(any::<u16>(), 0..3),
    );
    let choice = choice.prop_map(|(nothing, asynchronous, expensive, outputs, inputs, controls)| Choice {
        nothing,
        asynchronous,
        expensive,
        outputs,
        inputs,
        controls,
    });
    prop::collection::vec(choice, 0..40).prop_map(move |choices| build(&choices, menu))
}

fn build(choices: &[Choice], menu: Menu) -> Graph {
    let mut graph = Graph { nodes: Vec::new(), edges: Vec::new() };
    // Every output so far; later nodes can read them.
    let mut values: Vec<(u32, u32)> = Vec::new();
    for (at, choice) in (0u32..).zip(choices) {
        let pick = |from: u16| values.get(usize::from(from) % values.len().max(1)).copied();
        let mut sources: Vec<(u32, u32)> = choice.inputs.iter().filter_map(|(pick_from, _)| pick(*pick_from)).collect();
        let (mut bits, mut outputs) = (0, choice.outputs);
        if choice.nothing {
            (bits, outputs) = (kind::NOTHING, 0);
            sources.clear();
        } else if menu.asynchronous && choice.asynchronous {
            bits = kind::ASYNC;
        }
        let cost_ns = if menu.expensive && choice.expensive { EXPENSIVE } else { 0 };
        for (input, (src, output)) in (0u32..).zip(&sources) {
            graph.edges.push(Edge { src: *src, output: *output, dst: at, input });
        }
        for from in &choice.controls {
            if at > 0 {
                graph.edges.push(Edge { src: u32::from(*from) % at, output: CONTROL, dst: at, input: CONTROL });
            }
        }
        let inputs = u32::try_from(sources.len()).unwrap();
        graph.nodes.push(Node { kind: bits, inputs, outputs, cost_ns });
        values.extend((0..outputs).map(|output| (at, output)));
    }
    // The order of the edges must not matter.
    graph.edges.sort_by_key(|edge| edge.dst.wrapping_mul(0x9e37_79b9) ^ edge.src.wrapping_mul(0x85eb_ca6b));
    graph
}
