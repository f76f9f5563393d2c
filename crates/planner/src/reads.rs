//! Finds the reads of variables that can be deferred because nothing can overtake them.
//!
//! A read that only a later call needs is cheapest there. But an update that is not ordered with respect to the read
//! nearly always runs after it if the read is made at once, and could run before it if the read is deferred. Nothing
//! guarantees the former, but results should not change. So every node that may change the variable must depend on the
//! read, or the read on it. An operation on a value that may be a variable's memory is a read as well.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use super::aliases::{Aliases, Owner};
use super::graph::{Class, Edge, Graph, Kind, index};
use super::placement::{Place, Placement, is_reference, is_variable};
use super::roots::{Roots, may_change};

/// Edge budget, in each direction, for finding what is ordered with a read. Beyond it, the read is not deferred.
const FAR: usize = 256;

pub struct Reads<'a> {
    graph: &'a Graph<'a>,
    placement: &'a Placement<'a>,
    aliases: &'a Aliases<'a>,
    /// By variable: the nodes that may change it.
    changers: HashMap<u32, BTreeSet<u32>>,
    /// Tasks on which a node changes something that could not be determined.
    unclear: HashSet<u32>,
}

impl<'a> Reads<'a> {
    pub fn new(graph: &'a Graph<'a>, placement: &'a Placement<'a>, aliases: &'a Aliases<'a>) -> Self {
        let mut all = Self { graph, placement, aliases, changers: HashMap::new(), unclear: HashSet::new() };
        for edge in graph.edges().iter().filter(|edge| placement.is_tied(edge)) {
            let passes_on = matches!(placement.place(edge.dst), Place::Pivot | Place::Copied);
            match placement.variable(edge) {
                _ if passes_on || graph.node(edge.dst).pure_read => {}
                Some(variable) => {
                    all.changers.entry(variable).or_default().insert(edge.dst);
                }
                None => {
                    all.unclear.insert(graph.node(edge.dst).task);
                }
            }
        }
        all
    }

    pub fn may_wait(&self, node: u32) -> bool {
        let none = BTreeSet::new();
        let changers = |variable: u32| self.changers.get(&variable).unwrap_or(&none);
        let mut open = BTreeSet::new();
        for edge in self.graph.ins(node).filter(|edge| self.is_of_variable(edge)) {
            match self.placement.variable(edge) {
                Some(variable) => open.extend(changers(variable)),
                None => return false,
            }
        }
        let mut reads = self.graph.node(node).pure_read;
        // All users of a read that is copied come before the updates: see `repeatable`.
        for edge in self.graph.ins(node).filter(|edge| !self.placement.is_copied(self.graph, edge)) {
            for owner in self.aliases.carried(edge) {
                reads = true;
                match owner {
                    Owner::Variable(variable) => open.extend(changers(variable)),
                    Owner::Any(_) => return false,
                }
            }
        }
        if !reads {
            return true;
        }
        if self.unclear.contains(&self.graph.node(node).task) {
            return false;
        }
        self.strike(&mut open, node, |at| self.graph.outs(at).map(|edge| edge.dst));
        self.strike(&mut open, node, |at| self.graph.ins(at).map(|edge| edge.src));
        open.is_empty()
    }

    fn is_of_variable(&self, edge: &Edge) -> bool {
        is_reference(edge)
            || (!edge.is_control()
                && self.placement.place(edge.src) == Place::Copied
                && is_variable(self.graph, edge.src))
    }

    /// Removes the nodes that are reachable in one direction.
    fn strike<I: Iterator<Item = u32>>(&self, open: &mut BTreeSet<u32>, from: u32, step: impl Fn(u32) -> I) {
        let (mut seen, mut next, mut looked) = (HashSet::from([from]), VecDeque::from([from]), 0);
        while let (false, Some(at)) = (open.is_empty(), next.pop_front()) {
            for end in step(at) {
                looked += 1;
                if looked > FAR {
                    return;
                }
                // A Merge does not wait for all of its inputs, and a back edge of a loop orders nothing.
                let orders = !matches!(self.graph.node(end).kind, Kind::Merge | Kind::NextIteration);
                if orders && seen.insert(end) {
                    open.remove(&end);
                    next.push_back(end);
                }
            }
        }
    }
}

/// Edge budgets, per read and in total, for finding what the users of a read lead to.
const FAR_FOR_ONE: usize = 1 << 16;
const FAR_FOR_ALL: usize = 1 << 23;

/// By node: reads that may be repeated in later calls of the step.
///
/// Whether a repeated read sees what other workers wrote in between does not matter. The step's own writes must be
/// visible exactly where the graph orders them: every user of the value must come before every update of the variable,
/// so that each repetition does.
pub fn repeatable(graph: &Graph, roots: &Roots) -> Vec<bool> {
    let mut updates: HashMap<u32, Vec<u32>> = HashMap::new();
    let mut unclear: HashSet<u32> = HashSet::new();
    for edge in graph.edges().iter().filter(|edge| may_change(graph, edge)) {
        match roots.variable(edge) {
            Some(variable) => updates.entry(variable).or_default().push(edge.dst),
            None => {
                unclear.insert(graph.node(edge.dst).task);
            }
        }
    }
    let mut looked = 0;
    let mut is_repeatable = |node: u32| {
        let it = graph.node(node);
        if !it.pure_read || unclear.contains(&it.task) {
            return false;
        }
        if graph.outs(node).any(Edge::is_control) {
            return false;
        }
        let mut changers: BTreeSet<u32> = BTreeSet::new();
        for edge in graph.ins(node) {
            match (edge.class, roots.variable(edge)) {
                (Class::Ref | Class::Deref | Class::Resource, None) => return false,
                (_, Some(variable)) => changers.extend(updates.get(&variable).into_iter().flatten()),
                _ => {}
            }
        }
        changers.is_empty() || graph.outs(node).all(|edge| leads_to(graph, edge.dst, &changers, &mut looked))
    };
    graph.ids().map(&mut is_repeatable).collect()
}

/// Whether a node is one of the others or comes before each of them. A Merge may run without it.
fn leads_to(graph: &Graph, from: u32, all: &BTreeSet<u32>, looked: &mut usize) -> bool {
    let end = (*looked + FAR_FOR_ONE).min(FAR_FOR_ALL);
    let mut missing = all.clone();
    let mut seen = vec![false; graph.len()];
    let mut open = vec![from];
    missing.remove(&from);
    seen[index(from)] = true;
    while let (false, Some(at)) = (missing.is_empty(), open.pop()) {
        for edge in graph.outs(at) {
            *looked += 1;
            if *looked > end {
                return false;
            }
            let next = edge.dst;
            let orders = !matches!(graph.node(next).kind, Kind::Merge | Kind::NextIteration);
            if orders && !std::mem::replace(&mut seen[index(next)], true) {
                missing.remove(&next);
                open.push(next);
            }
        }
    }
    missing.is_empty()
}
