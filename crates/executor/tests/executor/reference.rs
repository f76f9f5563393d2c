//! The reference interpreter: evaluates a graph node by node, in creation order.

use crate::graph::{Behaviour, Graph};
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

/// Whether this output of a live node of this behaviour is dead.
pub fn dies(behaviour: Behaviour, hash: u64, output: u32) -> bool {
    match behaviour {
        Behaviour::Switch => hash >> 20 & 1 == u64::from(output),
        Behaviour::Receive => hash >> 20 & 3 == 0,
        _ => false,
    }
}

/// Stands for a dead input in the value that a transfer node computes.
pub const DEAD_INPUT: u64 = 0xdead;

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Whether each node's kernel runs.
    pub ran: Vec<bool>,
    /// By slot; `None` if dead.
    pub values: Vec<Option<u64>>,
}

pub fn evaluate(graph: &Graph, seed: u64) -> Expected {
    let mut expected = Expected::default();
    let mut dead: Vec<bool> = Vec::new();
    for (at, node) in (0u32..).zip(&graph.nodes) {
        let behaviour = graph.behaviours[at as usize];
        let inputs: Vec<Option<u64>> =
            graph.inputs(at).iter().map(|(src, output)| expected.values[graph.slot(*src, *output)]).collect();
        let dead_control = graph.controls(at).iter().any(|src| dead[*src as usize]);
        let is_dead = match behaviour {
            Behaviour::Merge => inputs.iter().all(Option::is_none),
            _ if node.kind & kind::NEVER_DEAD != 0 => false,
            _ => dead_control || inputs.iter().any(Option::is_none),
        };
        let runs = behaviour != Behaviour::Nothing && (!is_dead || behaviour == Behaviour::Transfer);
        let read: Vec<u64> = match behaviour {
            // The order of several live inputs is not defined, so it must not matter here.
            Behaviour::Merge => Vec::new(),
            _ => inputs.iter().map(|input| input.unwrap_or(DEAD_INPUT)).collect(),
        };
        let decides = value(seed, at, 0, &read);
        for output in 0..node.outputs {
            let live = runs && !dies(behaviour, decides, output);
            expected.values.push(live.then(|| value(seed, at, output, &read)));
        }
        expected.ran.push(runs);
        // A control edge carries whether the node was dead, not whether its outputs are.
        dead.push(is_dead && !runs);
    }
    expected
}
