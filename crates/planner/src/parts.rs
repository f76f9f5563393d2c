//! Splits large calls into parts. A call returns nothing until it has everything, and runs nothing until everything has
//! arrived: large values travel faster in several calls in flight at the same time.
//!
//! A *component* of a call is a set of nodes connected by values. Control edges between components become an order of
//! calls, so one round may get several levels. Components that carry next to nothing share one call per level; the
//! others are collected, in name order, until they carry enough. Many small components count as much as few large ones.
//! A call with more values than fit into its table is split in the same way, by number of values.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use super::classes::ClassId;
use super::graph::{Edge, Graph, index};
use super::placement::{Place, Placement, Reason};
use starwire_marks::mark;

/// The most parts that one call is split into. More would not be faster, and the number of calls that a worker may have
/// in flight is limited.
const MOST: u64 = 64;
/// A component that carries less than this fraction of `enough` is not worth a part …
const LIGHT: u64 = 16;
/// … unless all of them together are. Those with fewer bytes than this, such as counters and rates, never are.
const TINY: u64 = 256;
/// A value that several components need is fed to each of their calls if it is at most this fraction of `enough`.
const SHARED: u64 = 64;

/// The number of bytes that is worth a separate call within one host, or where the path was not measured.
pub const UNMEASURED_BYTES: u64 = 1 << 20;
/// The smallest one: below it, calls cost more than the wait for their bytes.
pub const LEAST_BYTES: u64 = 32 << 10;
/// A part should take about this long on the wire: some ten times what a call costs …
const PART: Duration = Duration::from_micros(250);
/// … or this fraction of a round trip, if that is longer.
const ROUND_TRIP_PARTS: u32 = 8;

/// The number of bytes that is worth a separate call on a path with this rate and round trip: 32 KiB, or four or
/// sixteen times as much, or [`UNMEASURED_BYTES`]. So few, because workers whose measurements differ a little should
/// still have the same plans.
pub fn worthwhile_bytes(bytes_per_s: u64, round_trip: Duration) -> u64 {
    let part = PART.max(round_trip / ROUND_TRIP_PARTS);
    let micros = u64::try_from(part.as_micros()).unwrap_or(u64::MAX);
    let bytes = bytes_per_s.saturating_mul(micros) / 1_000_000;
    let mut found = LEAST_BYTES;
    // Twice is the middle between one and four times.
    while bytes > found * 2 && found < UNMEASURED_BYTES {
        found *= 4;
    }
    found.min(UNMEASURED_BYTES)
}

/// The most feeds, and the most fetches, of a call: its table, with up to 14 dimensions each, has to fit into a
/// message's metadata.
pub const MOST_VALUES: usize = 8192;

/// All nodes of one class in one round: one call, unless it carries too much.
type Group = (u32, ClassId);

/// A node's position within its group: level and part.
pub type Part = (u32, u32);

pub struct Parts<'a> {
    graph: &'a Graph<'a>,
    placement: &'a Placement<'a>,
    rounds: &'a [u32],
    /// The number of bytes that is worth a separate call; 0: none is.
    enough: u64,
    /// The groups to look at: their bytes and their nodes.
    large: BTreeMap<Group, (u64, Vec<u32>)>,
    /// Groups with too many values.
    crowded: BTreeSet<Group>,
}

#[derive(Clone, Copy, Default)]
struct Load {
    bytes: u64,
    feeds: usize,
    fetches: usize,
}

impl<'a> Parts<'a> {
    pub fn new(graph: &'a Graph<'a>, placement: &'a Placement<'a>, rounds: &'a [u32], enough: u64) -> Self {
        let (large, crowded) = (BTreeMap::new(), BTreeSet::new());
        let mut all = Self { graph, placement, rounds, enough, large, crowded };
        let mut carried: HashMap<Group, u64> = HashMap::new();
        let mut seen = BTreeSet::new();
        for edge in graph.edges().iter().filter(|_| enough != 0) {
            for (at, is_feed) in all.loads(edge) {
                let group = all.group(at);
                if seen.insert((group, is_feed, edge.src, edge.src_output)) {
                    let sum = carried.entry(group).or_default();
                    *sum = sum.saturating_add(edge.bytes.unwrap_or(0));
                }
            }
        }
        all.crowded = all.with_too_many_values(|node| (all.group(node), (0, 0))).into_iter().map(|of| of.0).collect();
        carried.retain(|group, bytes| *bytes >= enough.saturating_mul(2) || all.crowded.contains(group));
        all.crowded.iter().for_each(|group| {
            carried.entry(*group).or_default();
        });
        all.large = carried.into_iter().map(|(group, bytes)| (group, (bytes, Vec::new()))).collect();
        if !all.large.is_empty() {
            for node in graph.ids().filter(|node| placement.is_called(*node)) {
                if let Some((_, nodes)) = all.large.get_mut(&(rounds[index(node)], placement.class(node))) {
                    nodes.push(node);
                }
            }
        }
        all
    }

    /// Of the calls that `call` assigns nodes to, those with too many values.
    fn with_too_many_values(&self, call: impl Fn(u32) -> (Group, Part)) -> BTreeSet<(Group, Part)> {
        let mut counts: HashMap<((Group, Part), bool), usize> = HashMap::new();
        let mut seen = HashSet::new();
        // No call has more values than the graph has edges.
        let edges = if self.graph.edges().len() > MOST_VALUES { self.graph.edges() } else { &[] };
        for edge in edges.iter().filter(|edge| self.is_value(edge)) {
            let (from, to) = (self.is_called(edge.src), self.is_called(edge.dst));
            if from && to && call(edge.src) == call(edge.dst) {
                continue;
            }
            for (node, is_feed) in [(edge.src, false), (edge.dst, true)] {
                let counts_here = if is_feed { to } else { from };
                if counts_here && seen.insert((call(node), is_feed, edge.src, edge.src_output)) {
                    *counts.entry((call(node), is_feed)).or_default() += 1;
                }
            }
        }
        counts.into_iter().filter(|(_, count)| *count > MOST_VALUES).map(|((call, _), _)| call).collect()
    }

    /// The nodes with the most values, of calls that have too many values even in parts.
    pub fn overfull(&self, parts: &[Part]) -> Vec<(u32, Reason)> {
        if self.crowded.is_empty() {
            return Vec::new();
        }
        let call = |node: u32| (self.group(node), parts[index(node)]);
        let overfull = self.with_too_many_values(call);
        let mut left = Vec::new();
        for full in &overfull {
            let values = |node: &u32| self.graph.edges_of(*node).filter(|edge| self.is_value(edge)).count();
            let called = |node: &u32| self.placement.place(*node) == Place::Called && call(*node) == *full;
            let mut nodes: Vec<u32> = self.graph.ids().filter(called).collect();
            nodes.sort_by_key(|node| std::cmp::Reverse(values(node)));
            let mut rest: usize = nodes.iter().map(values).sum();
            for node in nodes {
                left.push((node, Reason::Many));
                rest -= values(&node);
                if rest <= MOST_VALUES {
                    break;
                }
            }
        }
        left
    }

    /// May have to be a feed or a fetch.
    fn is_value(&self, edge: &Edge) -> bool {
        !edge.is_control() && !self.placement.is_copied(self.graph, edge) && !self.placement.is_tied(edge)
    }

    /// The classes that have a call to be split.
    pub fn large_classes(&self) -> BTreeSet<ClassId> {
        self.large.keys().map(|(_, class)| *class).collect()
    }

    /// By node; all zero where a call stays whole.
    pub fn find(&self) -> Vec<Part> {
        let mut parts = vec![(0, 0); self.graph.len()];
        for (group, (bytes, nodes)) in &self.large {
            self.split(*group, *bytes, nodes, &mut parts);
        }
        parts
    }

    fn group(&self, node: u32) -> Group {
        (self.rounds[index(node)], self.placement.class(node))
    }

    fn is_called(&self, node: u32) -> bool {
        self.placement.is_called(node)
    }

    /// Both ends are in one group, and not because of a copy.
    fn is_inside(&self, edge: &Edge) -> bool {
        !self.placement.is_copied(self.graph, edge)
            && self.is_called(edge.src)
            && self.is_called(edge.dst)
            && self.group(edge.src) == self.group(edge.dst)
    }

    /// The ends for whose call this edge is a feed (true) or a fetch (false).
    fn loads(&self, edge: &Edge) -> impl Iterator<Item = (u32, bool)> + use<> {
        let travels = self.is_value(edge) && !self.is_inside(edge);
        let (from, to) = (self.is_called(edge.src), self.is_called(edge.dst));
        // Between calls to the same server, the value stays there.
        let travels = travels && !(from && to && !self.graph.crosses(edge));
        let ends = [(edge.src, false, from), (edge.dst, true, to)];
        ends.into_iter().filter(move |(.., called)| travels && *called).map(|(node, is_feed, _)| (node, is_feed))
    }

    fn split(&self, group: Group, bytes: u64, nodes: &[u32], parts: &mut [Part]) {
        let numbers: HashMap<u32, usize> = nodes.iter().copied().zip(0..).collect();
        let of = self.components(group, nodes, &numbers);
        let loads = self.load(group, nodes, &of);
        let crowded = self.crowded.contains(&group);
        let light = self.light(&loads);
        let heavy = |component: usize| crowded || loads[component].bytes > light;
        let Some(levels) = self.levels(nodes, &numbers, &of, &heavy) else {
            mark!("parts would wait for each other");
            return;
        };
        let enough = if self.enough == 0 { u64::MAX } else { self.enough.max(bytes / MOST) };
        let mut names: BTreeMap<usize, String> = BTreeMap::new();
        for (node, component) in nodes.iter().zip(&of).filter(|(_, component)| heavy(**component)) {
            let name = self.graph.describe(*node);
            let known = names.entry(*component).or_insert_with(|| name.clone());
            if name < *known {
                *known = name;
            }
        }
        // By level, then by name: all workers have the same names.
        let heavy: BTreeSet<(u32, String, usize)> =
            names.into_iter().map(|(component, name)| (levels[component], name, component)).collect();
        let mut part_of = vec![0; nodes.len()];
        let (mut last, mut part, mut full, mut most) = (0, 0, Load::default(), 0);
        for (level, _, component) in heavy {
            if level != last {
                (last, part) = (level, 0);
            }
            let load = loads[component];
            let (feeds, fetches) = (full.feeds + load.feeds, full.fetches + load.fetches);
            if part == 0 || full.bytes >= enough || feeds > MOST_VALUES || fetches > MOST_VALUES {
                (part, full) = (part + 1, Load::default());
            }
            full.bytes = full.bytes.saturating_add(load.bytes);
            (full.feeds, full.fetches) = (full.feeds + load.feeds, full.fetches + load.fetches);
            part_of[component] = part;
            most = most.max(part);
        }
        // Parts that run one after the other gain nothing.
        if most < 2 && !crowded {
            mark!("parts would run one after the other");
            return;
        }
        mark!("a call is split");
        for (node, component) in nodes.iter().zip(&of) {
            parts[index(*node)] = (levels[*component], part_of[*component]);
        }
    }

    /// Components with at most this many bytes share a call.
    fn light(&self, loads: &[Load]) -> u64 {
        let light = self.enough / LIGHT;
        let shared = loads.iter().map(|load| load.bytes).filter(|bytes| *bytes <= light);
        if shared.fold(0, u64::saturating_add) < self.enough.saturating_mul(2) { light } else { light.min(TINY) }
    }

    /// By position in `nodes`: the position of its component's representative.
    fn components(&self, group: Group, nodes: &[u32], numbers: &HashMap<u32, usize>) -> Vec<usize> {
        let mut union = Union::new(nodes.len());
        let mut first: HashMap<(u32, i32), usize> = HashMap::new();
        for (place, node) in nodes.iter().enumerate() {
            for edge in self.graph.ins(*node).filter(|edge| !edge.is_control()) {
                if self.is_inside(edge) {
                    union.join(numbers[&edge.src], place);
                    continue;
                }
                let taken = self.loads(edge).any(|(end, is_feed)| is_feed && self.group(end) == group);
                if taken && edge.bytes.is_none_or(|bytes| bytes > self.enough / SHARED) {
                    let other = *first.entry((edge.src, edge.src_output)).or_insert(place);
                    union.join(other, place);
                }
            }
        }
        (0..nodes.len()).map(|place| union.find(place)).collect()
    }

    /// By component: its feeds and fetches.
    fn load(&self, group: Group, nodes: &[u32], of: &[usize]) -> Vec<Load> {
        let mut loads = vec![Load::default(); nodes.len()];
        let (mut seen, mut counted) = (BTreeSet::new(), HashSet::new());
        for (node, component) in nodes.iter().zip(of) {
            for edge in self.graph.edges_of(*node) {
                for (end, is_feed) in self.loads(edge).filter(|(end, _)| end == node) {
                    debug_assert_eq!(self.group(end), group);
                    if seen.insert((*component, is_feed, edge.src, edge.src_output)) {
                        let load = &mut loads[*component];
                        load.bytes = load.bytes.saturating_add(edge.bytes.unwrap_or(0));
                    }
                }
                // A value that stays on the server has a table entry as well.
                let is_feed = edge.dst == *node;
                if self.is_value(edge)
                    && !self.is_inside(edge)
                    && counted.insert((*component, is_feed, edge.src, edge.src_output))
                {
                    let load = &mut loads[*component];
                    let count = if is_feed { &mut load.feeds } else { &mut load.fetches };
                    *count += 1;
                }
            }
        }
        loads
    }

    /// By component: the number of calls of its group that precede it. None: components depend on each other in a cycle
    /// and cannot be separated.
    fn levels(
        &self,
        nodes: &[u32],
        numbers: &HashMap<u32, usize>,
        of: &[usize],
        heavy: &dyn Fn(usize) -> bool,
    ) -> Option<Vec<u32>> {
        let mut before: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); nodes.len()];
        let mut waiting = vec![0usize; nodes.len()];
        for (place, node) in nodes.iter().enumerate() {
            for edge in self.graph.ins(*node).filter(|edge| self.is_inside(edge)) {
                let source = of[numbers[&edge.src]];
                if source != of[place] && before[source].insert(of[place]) {
                    waiting[of[place]] += 1;
                }
            }
        }
        let components: BTreeSet<usize> = of.iter().copied().collect();
        let mut ready: Vec<usize> = components.iter().copied().filter(|component| waiting[*component] == 0).collect();
        let (mut levels, mut done) = (vec![0; nodes.len()], 0);
        while let Some(component) = ready.pop() {
            done += 1;
            for next in std::mem::take(&mut before[component]) {
                let together = !heavy(component) && !heavy(next);
                levels[next] = levels[next].max(levels[component] + u32::from(!together));
                waiting[next] -= 1;
                if waiting[next] == 0 {
                    ready.push(next);
                }
            }
        }
        (done == components.len()).then_some(levels)
    }
}

/// Whether several nodes of its call need this node's outputs.
pub fn is_shared(graph: &Graph, placement: &Placement, node: u32) -> bool {
    let mut users = graph.outs(node).filter(|edge| !edge.is_control());
    let first = users.next().map(|edge| edge.dst);
    placement.place(node) == Place::Called && users.any(|edge| Some(edge.dst) != first)
}

/// Union-find.
struct Union {
    parents: Vec<usize>,
}

impl Union {
    fn new(len: usize) -> Self {
        Self { parents: (0..len).collect() }
    }

    fn find(&mut self, mut at: usize) -> usize {
        while self.parents[at] != at {
            self.parents[at] = self.parents[self.parents[at]];
            at = self.parents[at];
        }
        at
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.find(a), self.find(b));
        // The lower number leads, so that the result does not depend on the order.
        let (low, high) = (a.min(b), a.max(b));
        self.parents[high] = low;
    }
}
