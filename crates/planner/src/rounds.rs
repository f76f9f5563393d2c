//! Assigns nodes to rounds. All nodes of one class in one round form one call, so rounds never decrease along a
//! dependency and increase where a call is entered from outside its class: then no path leads out of a call and back
//! into it.

use std::collections::BTreeSet;

use super::aliases::Aliases;
use super::classes::ClassId;
use super::flow::{Flow, Visit, forward_ins};
use super::graph::{Edge, Graph, Kind, index};
use super::parts::is_shared;
use super::placement::{Place, Placement, is_reference};
use super::reads::Reads;

pub struct Rounds<'a> {
    graph: &'a Graph<'a>,
    flow: &'a Flow,
    placement: &'a Placement<'a>,
    aliases: &'a Aliases<'a>,
    /// In these classes, a value that several nodes share is made early and kept for them: made in their call, it would
    /// hold them together.
    apart: &'a BTreeSet<ClassId>,
}

impl<'a> Rounds<'a> {
    pub fn new(
        graph: &'a Graph<'a>,
        flow: &'a Flow,
        placement: &'a Placement<'a>,
        aliases: &'a Aliases<'a>,
        apart: &'a BTreeSet<ClassId>,
    ) -> Self {
        Self { graph, flow, placement, aliases, apart }
    }

    /// As early as possible.
    pub fn robust(&self) -> Vec<u32> {
        self.sink(self.earliest())
    }

    /// As few calls as possible: nodes with slack go where their class has a call anyway.
    pub fn lite(&self) -> Vec<u32> {
        let earliest = self.earliest();
        let latest = self.latest(earliest.iter().copied().max().unwrap_or(0));
        let classes = self.graph.ids().map(|node| self.class(node)).max().map_or(0, |class| index(class) + 1);
        let mut open: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); classes];
        for node in self.graph.ids().filter(|node| self.is_called(*node)) {
            if earliest[index(node)] == latest[index(node)] {
                open[index(self.class(node))].insert(earliest[index(node)]);
            }
        }
        let rounds = self.forwards(|node, earliest| {
            if !self.is_called(node) {
                return earliest;
            }
            let rounds = &mut open[index(self.class(node))];
            let known = rounds.range(earliest..=latest[index(node)].max(earliest)).next().copied();
            known.unwrap_or_else(|| {
                rounds.insert(earliest);
                earliest
            })
        });
        self.sink(rounds)
    }

    /// Moves nodes that only later calls of their class need into those calls, so that their values do not travel.
    fn sink(&self, mut rounds: Vec<u32>) -> Vec<u32> {
        let reads = Reads::new(self.graph, self.placement, self.aliases);
        for step in self.flow.order.iter().rev() {
            let Visit::Node(node) = *step else { continue };
            if let Some(later) = self.where_needed(&rounds, &reads, node) {
                rounds[index(node)] = later;
            }
        }
        rounds
    }

    fn earliest(&self) -> Vec<u32> {
        self.forwards(|_, earliest| earliest)
    }

    /// Gives each node a round not earlier than its inputs allow.
    fn forwards(&self, mut choose: impl FnMut(u32, u32) -> u32) -> Vec<u32> {
        let mut rounds = vec![0; self.graph.len()];
        let mut ends = vec![0; self.flow.parents.len()];
        for step in &self.flow.order {
            let (round, frame) = match *step {
                Visit::Node(node) => {
                    let mut earliest = u32::from(self.is_called(node));
                    if self.graph.node(node).kind == Kind::Exit {
                        earliest = earliest.max(ends[index(self.flow.inside(node))]);
                    }
                    for edge in forward_ins(self.graph, node) {
                        if let Some(apart) = self.apart(edge) {
                            earliest = earliest.max(rounds[index(edge.src)] + apart);
                        }
                    }
                    rounds[index(node)] = choose(node, earliest);
                    (rounds[index(node)], self.flow.outputs(node))
                }
                Visit::End(frame) => (ends[index(frame)], self.flow.parents[index(frame)]),
            };
            ends[index(frame)] = ends[index(frame)].max(round);
        }
        rounds
    }

    /// The latest round of each node if there are `last` rounds.
    fn latest(&self, last: u32) -> Vec<u32> {
        let mut rounds = vec![last; self.graph.len()];
        let mut ends = vec![last; self.flow.parents.len()];
        for step in self.flow.order.iter().rev() {
            match *step {
                Visit::Node(node) => {
                    let mut latest = ends[index(self.flow.outputs(node))];
                    for edge in self.graph.outs(node) {
                        let back = self.graph.node(node).kind == Kind::NextIteration;
                        if let (false, Some(apart)) = (back, self.apart(edge)) {
                            latest = latest.min(rounds[index(edge.dst)] - apart);
                        }
                    }
                    rounds[index(node)] = latest;
                    if self.graph.node(node).kind == Kind::Exit {
                        let end = &mut ends[index(self.flow.inside(node))];
                        *end = (*end).min(latest);
                    }
                }
                Visit::End(frame) => {
                    let parent = ends[index(self.flow.parents[index(frame)])];
                    ends[index(frame)] = ends[index(frame)].min(parent);
                }
            }
        }
        rounds
    }

    /// How many rounds must lie between an edge's ends; None: they do not depend on each other.
    fn apart(&self, edge: &Edge) -> Option<u32> {
        if self.placement.is_copied(self.graph, edge) {
            return None;
        }
        let together = self.is_called(edge.src) && self.class(edge.src) == self.class(edge.dst);
        Some(u32::from(self.is_called(edge.dst) && !together))
    }

    fn is_called(&self, node: u32) -> bool {
        self.placement.is_called(node)
    }

    fn class(&self, node: u32) -> ClassId {
        self.placement.class(node)
    }

    /// A later round of its class, if only that class needs the node's outputs and moving it adds no more transfers
    /// than it saves.
    fn where_needed(&self, rounds: &[u32], reads: &Reads, node: u32) -> Option<u32> {
        let it = self.graph.node(node);
        let own = rounds[index(node)];
        if self.placement.place(node) != Place::Called || it.blocking || (it.stateful && !it.pure_read) {
            return None;
        }
        if self.apart.contains(&self.class(node)) && is_shared(self.graph, self.placement, node) {
            return None;
        }
        let mut later = u32::MAX;
        let mut outputs = BTreeSet::new();
        for edge in self.graph.outs(node) {
            let kin = self.placement.place(edge.dst) == Place::Called && self.class(edge.dst) == self.class(node);
            if !kin || is_reference(edge) {
                return None;
            }
            later = later.min(rounds[index(edge.dst)]);
            outputs.insert(edge.src_output);
        }
        let mut inputs = BTreeSet::new();
        for edge in self.graph.ins(node) {
            if is_reference(edge) && !(it.pure_read && self.placement.place(edge.src) == Place::Copied) {
                return None;
            }
            let kin = self.placement.place(edge.src) == Place::Called && self.class(edge.src) == self.class(node);
            if kin && rounds[index(edge.src)] == own && !edge.is_control() {
                inputs.insert((edge.src, edge.src_output));
            }
        }
        let better = later != u32::MAX && later > own && inputs.len() <= outputs.len();
        (better && reads.may_wait(node)).then_some(later)
    }
}
