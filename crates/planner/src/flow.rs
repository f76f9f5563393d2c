//! Loop frames, and an order in which the graph can run.
//!
//! The order ignores the edges out of each NextIteration and puts **all of a loop before its exits**: a value that
//! leaves a loop can depend on everything inside it, through iterations that the plain edges do not show.

use super::graph::{Edge, Graph, Kind, PlanError, index, number};

/// A loop frame; 0 is outside all loops.
pub type FrameId = u32;

pub const ROOT: FrameId = 0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visit {
    Node(u32),
    /// Every node of the frame, and of the frames nested in it, has run.
    End(FrameId),
}

pub struct Flow {
    pub order: Vec<Visit>,
    /// By frame: the one that it is in.
    pub parents: Vec<FrameId>,
    /// By node: the frame that it runs in (Enter: the outer one).
    inside: Vec<FrameId>,
    /// By node: the frame that its outputs are in.
    outputs: Vec<FrameId>,
}

impl Flow {
    pub fn of(graph: &Graph) -> Result<Self, PlanError> {
        let mut flow = Self {
            order: Vec::new(),
            parents: vec![ROOT],
            inside: vec![ROOT; graph.len()],
            outputs: vec![ROOT; graph.len()],
        };
        flow.order = sort(graph, &[], &[])?;
        flow.find_frames(graph)?;
        if flow.parents.len() > 1 {
            flow.order = sort(graph, &flow.parents, &flow.outputs)?;
        }
        Ok(flow)
    }

    pub fn inside(&self, node: u32) -> FrameId {
        self.inside[index(node)]
    }

    pub fn outputs(&self, node: u32) -> FrameId {
        self.outputs[index(node)]
    }

    fn find_frames(&mut self, graph: &Graph) -> Result<(), PlanError> {
        let mut entered = std::collections::HashMap::new();
        for at in 0..self.order.len() {
            let Visit::Node(node) = self.order[at] else { continue };
            let mut inputs = forward_ins(graph, node).map(|edge| self.outputs(edge.src));
            let frame = inputs.next().unwrap_or(ROOT);
            if inputs.any(|other| other != frame) {
                return Err(PlanError::MixedFrames { node: graph.describe(node) });
            }
            let outputs = match graph.node(node).kind {
                Kind::Enter => {
                    let name = graph.node(node).detail;
                    let next = number(self.parents.len());
                    *entered.entry((frame, name)).or_insert_with(|| {
                        self.parents.push(frame);
                        next
                    })
                }
                Kind::Exit | Kind::NextIteration if frame == ROOT => {
                    return Err(PlanError::NotInALoop { node: graph.describe(node) });
                }
                Kind::Exit => self.parents[index(frame)],
                _ => frame,
            };
            self.inside[index(node)] = frame;
            self.outputs[index(node)] = outputs;
        }
        Ok(())
    }
}

/// Closes a loop: leaves a NextIteration.
pub fn is_back_edge(graph: &Graph, edge: &Edge) -> bool {
    graph.node(edge.src).kind == Kind::NextIteration
}

/// Begins an iteration of a loop.
pub fn is_header(graph: &Graph, node: u32) -> bool {
    graph.ins(node).any(|edge| is_back_edge(graph, edge))
}

/// A node's inputs without the back edges of loops.
pub fn forward_ins<'a>(graph: &'a Graph, node: u32) -> impl Iterator<Item = &'a Edge> + Clone {
    graph.ins(node).filter(move |edge| !is_back_edge(graph, edge))
}

/// Kahn's algorithm. With `parents`: every node comes before the end of the frame that its outputs are in, and every
/// frame ends before its parent does and before its own exits.
fn sort(graph: &Graph, parents: &[FrameId], outputs: &[FrameId]) -> Result<Vec<Visit>, PlanError> {
    let inner = |frame: FrameId| frame != ROOT && !parents.is_empty();
    let mut waits: Vec<u32> = graph.ids().map(|node| number(forward_ins(graph, node).count())).collect();
    let mut end_waits = vec![0u32; parents.len()];
    let mut exits: Vec<Vec<u32>> = vec![Vec::new(); parents.len()];
    if !parents.is_empty() {
        for node in graph.ids() {
            let frame = outputs[index(node)];
            if inner(frame) {
                end_waits[index(frame)] += 1;
            }
            if graph.node(node).kind == Kind::Exit {
                // The frame of its inputs; `find_frames` has checked that there is one.
                if let Some(edge) = forward_ins(graph, node).next() {
                    exits[index(outputs[index(edge.src)])].push(node);
                    waits[index(node)] += 1;
                }
            }
        }
        for parent in parents.iter().filter(|parent| **parent != ROOT) {
            end_waits[index(*parent)] += 1;
        }
    }
    let mut order: Vec<Visit> = Vec::with_capacity(graph.len() + parents.len());
    order.extend(graph.ids().filter(|node| waits[index(*node)] == 0).map(Visit::Node));
    let mut at = 0;
    while at < order.len() {
        let (ready_nodes, frame): (&mut dyn Iterator<Item = u32>, FrameId) = match order[at] {
            Visit::Node(node) => {
                let frame = outputs.get(index(node)).copied().unwrap_or(ROOT);
                (&mut graph.outs(node).filter(|edge| !is_back_edge(graph, edge)).map(|edge| edge.dst), frame)
            }
            Visit::End(frame) => (&mut exits[index(frame)].iter().copied(), parents[index(frame)]),
        };
        for node in ready_nodes {
            waits[index(node)] -= 1;
            if waits[index(node)] == 0 {
                order.push(Visit::Node(node));
            }
        }
        if inner(frame) {
            end_waits[index(frame)] -= 1;
            if end_waits[index(frame)] == 0 {
                order.push(Visit::End(frame));
            }
        }
        at += 1;
    }
    let nodes = order.iter().filter(|step| matches!(step, Visit::Node(_))).count();
    if nodes == graph.len() {
        return Ok(order);
    }
    Err(PlanError::Cycle { node: graph.describe(on_a_cycle(graph, &waits)) })
}

/// Walks back from a node that never became ready until a node repeats; returns the lowest node of that cycle.
fn on_a_cycle(graph: &Graph, waits: &[u32]) -> u32 {
    let stuck = |node: &u32| waits[index(*node)] > 0;
    // None if it waits for the end of a loop that it precedes.
    let back = |node: u32| forward_ins(graph, node).map(|edge| edge.src).find(stuck);
    let start = graph.ids().find(stuck).unwrap_or(0);
    let walk = std::iter::successors(Some(start), |node| back(*node));
    let on_it = walk.take(graph.len() + 1).last().unwrap_or(start);
    let circle = std::iter::successors(Some(on_it), |node| back(*node).filter(|next| *next != on_it));
    circle.min().unwrap_or(on_it)
}

#[cfg(test)]
mod tests {
    use super::super::graph::{Class, Memory, Node};
    use super::*;

    fn graph(kinds: &[Kind], edges: &[(u32, u32)]) -> Graph<'static> {
        let nodes = kinds.iter().map(|kind| Node::of(*kind, 0)).collect();
        let edge = |(src, dst): &(u32, u32)| Edge {
            src: *src,
            src_output: 0,
            dst: *dst,
            dst_input: 0,
            class: Class::Plain,
            memory: Memory::Host,
            bytes: None,
        };
        Graph::new(nodes, edges.iter().map(edge).collect(), None).unwrap()
    }

    #[test]
    fn all_of_a_loop_comes_before_its_exit() {
        use Kind::{Enter, Exit, LoopCond, Merge, NextIteration, Plain, Switch};
        // 0 enter → 1 merge → 2 cond → 3 switch → (4 exit | 5 body → 6 next → 1), 7: plain after the exit
        let kinds = [Enter, Merge, LoopCond, Switch, Exit, Plain, NextIteration, Plain];
        let edges = [(0, 1), (6, 1), (1, 2), (2, 3), (1, 3), (3, 4), (3, 5), (5, 6), (4, 7)];
        let flow = Flow::of(&graph(&kinds, &edges)).unwrap();
        let place = |step: Visit| flow.order.iter().position(|s| *s == step).unwrap();
        assert!(place(Visit::Node(6)) < place(Visit::End(1)));
        assert!(place(Visit::End(1)) < place(Visit::Node(4)));
        assert_eq!((flow.inside(0), flow.outputs(0), flow.inside(5)), (ROOT, 1, 1));
        assert_eq!((flow.inside(4), flow.outputs(4), flow.inside(7)), (1, ROOT, ROOT));
    }

    #[test]
    fn malformed_graphs_are_refused() {
        use Kind::{Enter, Exit, Plain};
        let error = |kinds: &[Kind], edges: &[(u32, u32)]| Flow::of(&graph(kinds, edges)).err();
        let name = |node: u32| format!("node {node}");
        assert_eq!(error(&[Plain; 3], &[(2, 0), (0, 1), (1, 0)]), Some(PlanError::Cycle { node: name(0) }));
        assert_eq!(error(&[Plain, Exit], &[(0, 1)]), Some(PlanError::NotInALoop { node: name(1) }));
        let mixed = error(&[Plain, Enter, Plain], &[(0, 1), (1, 2), (0, 2)]);
        assert_eq!(mixed, Some(PlanError::MixedFrames { node: name(2) }));
        // The input of a loop cannot come from its own exit.
        let kinds = [Enter, Exit, Enter, Plain];
        assert!(matches!(error(&kinds, &[(0, 1), (1, 2), (2, 3)]), Some(PlanError::Cycle { .. })));
    }
}
