//! The guarantees of [`star`](starwire_planner::star).

/// Builds graphs by hand.
mod build;
/// Calls in each turn of a loop.
mod loops;
/// Calls split into parts because they carry much.
mod parts;
/// On any graph, the split one does what the whole one does.
mod random;
mod references;
/// The calls that a training step becomes.
mod steps;
/// Reads and updates that no edge orders.
mod unordered;

use starwire_planner::graph::Graph;
use starwire_planner::placement::Roles;
use starwire_planner::star::Style;

const STYLES: [Style; 2] = [Style::Robust, Style::Lite];

/// Task 0 is the worker.
fn roles(graph: &Graph) -> Roles {
    let tasks = graph.nodes().iter().map(|node| node.task).max().unwrap_or(0);
    Roles { servers: (0..=tasks).map(|task| task != 0).collect() }
}
