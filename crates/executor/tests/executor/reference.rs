//! The reference interpreter: evaluates a graph node by node, in creation order.

use crate::graph::Graph;
use starwire_executor::kind;

/// The value that kernels compute: any mix-up changes it.
pub fn value(seed: u64, node: u32, output: u32, inputs: &[u64]) -> u64 {
    let mut hash = seed ^ u64::from(node).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(output).rotate_left(40);
    for input in inputs {
        hash = (hash.rotate_left(7) ^ input).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^= hash >> 33;
    }
    hash
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Whether each node's kernel runs.
    pub ran: Vec<bool>,
    /// By slot.
    pub values: Vec<u64>,
}

pub fn evaluate(graph: &Graph, seed: u64) -> Expected {
    let mut expected = Expected::default();
    for (at, node) in (0u32..).zip(&graph.nodes) {
        let inputs = graph.inputs(at);
        let read: Vec<u64> = inputs.iter().map(|(src, output)| expected.values[graph.slot(*src, *output)]).collect();
        expected.values.extend((0..node.outputs).map(|output| value(seed, at, output, &read)));
        expected.ran.push(node.kind & kind::NOTHING == 0);
    }
    expected
}
