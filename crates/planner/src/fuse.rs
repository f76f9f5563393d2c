//! tensor_fuse: which tensors cross from task to task together.
//!
//! An *item* is one output of one node, sent to one task for all its consumers there (TensorFlow sends it once), or,
//! for control edges, the node's completion (for which TensorFlow sends an empty tensor). A *group* is a set of items
//! that become one message: the first consumer gets its item only when the last producer is done. So a group must be
//! both correct and worthwhile.
//!
//! # Correct
//!
//! All items of a group have the same
//!
//! * source task, destination task, and memory (an accelerator's outputs are staged, host memory is not);
//! * loop frame, which must be a regular loop: then the items occur equally often. If something in it may block, it
//!   must be an [orderly](super::loops) one, and the items must depend on its condition;
//! * [predicates](super::predicates): they are alive together or dead together, so the group's message can be dead as a
//!   whole;
//! * [level](super::schedule::Moment): the number of task changes on the longest path to the producer, where a loop's
//!   exits come after all of the loop. A consumer's level is above its producer's and levels never decrease, so no path
//!   leads from an item of a level to a producer of the same level, through any groups. Grouping within a level
//!   therefore cannot create a cycle;
//! * blockers: the nodes on the path that may wait for something other than an edge (a queue, a collective). An item
//!   that has passed a blocker is never tied to one whose consumer could be what the blocker waits for.
//!
//! References, resources, variants, feeds and fetches of the client, loop machinery, and anything the caller excludes
//! are left alone.
//!
//! # Worthwhile
//!
//! Among the items that could be grouped correctly, sorted by when they are ready (an estimate: costs and sizes where
//! the caller knows them, else a constant per node), a group grows as long as
//!
//! * the total waiting that it causes does not exceed the messages that it saves, counted as [`FuseLimits::message_us`]
//!   each;
//! * no item waits longer than [`FuseLimits::wait_us`];
//! * it stays within [`FuseLimits::group_bytes`] and [`FuseLimits::group_items`].
//!
//! A small item would also wait for a large one's bytes, so items are separated by size: up to
//! [`FuseLimits::small_bytes`] (with the control items); up to [`FuseLimits::large_bytes`]; unknown. Larger ones travel
//! alone: one more message is nothing against their bytes.

use std::collections::HashMap;
use std::fmt;

use super::flow::{Flow, FrameId, ROOT};
use super::graph::{Class, Edge, Graph, Kind, Memory, PlanError, index, number};
use super::loops::Loops;
use super::predicates::Predicates;
use super::schedule::{Costs, Moment, Schedule};
use super::sets::SetId;

/// Cost model and bounds for grouping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FuseLimits {
    /// Cost of a message, both ends together.
    pub message_us: u32,
    /// Transfer rate.
    pub bytes_per_us: u32,
    /// Cost of a node whose cost is unknown.
    pub node_us: u32,
    /// The longest that an item may wait for others.
    pub wait_us: u32,
    pub small_bytes: u64,
    pub large_bytes: u64,
    pub group_bytes: u64,
    pub group_items: u32,
}

impl FuseLimits {
    /// FuseLimits without a variable have their value, those with one (see the engine's configuration) are zero.
    pub const FIXED: Self = Self {
        message_us: 0,
        bytes_per_us: 1_000,
        node_us: 5,
        wait_us: 0,
        small_bytes: 0,
        large_bytes: 0,
        group_bytes: 0,
        group_items: 1_024,
    };
}

/// One output of one node, to one task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    pub src: u32,
    /// Negative: the node's completion (control).
    pub output: i32,
    /// The destination.
    pub task: u32,
    /// The edges that it stands for, ordered by destination.
    pub edges: Vec<u32>,
    pub fate: Fate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// In the group with this number.
    Grouped(u32),
    Alone(Reason),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Nothing else crosses at this level, in this direction, under these conditions.
    NoCompany,
    /// It would wait for the others, or they for it, longer than it saves.
    NotWorthWaiting,
    Large,
    Reference,
    Resource,
    Variant,
    /// The client feeds or fetches it.
    Client,
    LoopMachinery,
    /// Its loop is not regular, or not orderly although something in it may block; or fusing in loops is off.
    Loop,
    Untouchable,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    pub src_task: u32,
    pub dst_task: u32,
    pub memory: Memory,
    pub level: u32,
    /// Indices into the plan's items; at least two.
    pub items: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FusePlan {
    /// Everything that crosses, by producer, output and destination.
    pub items: Vec<Item>,
    pub groups: Vec<Group>,
}

pub fn plan(graph: &Graph, limits: &FuseLimits) -> Result<FusePlan, PlanError> {
    let mut items = items(graph);
    let mut groups = Vec::new();
    if items.len() > 1 {
        let flow = Flow::of(graph)?;
        let predicates = Predicates::of(graph, &flow);
        let costs = Costs { node_us: limits.node_us, message_us: limits.message_us, bytes_per_us: limits.bytes_per_us };
        let schedule = Schedule::of(graph, &flow, costs);
        let loops = Loops::of(graph, &flow, &predicates, &schedule, |_| false);
        for (kin, mut members) in families(graph, limits, &flow, &predicates, &schedule, &loops, &mut items) {
            members.sort_by_key(|member| (member.ready_us, member.item));
            split(limits, &members, |group| {
                let [_, _, ..] = group else {
                    let reason = if members.len() > 1 { Reason::NotWorthWaiting } else { Reason::NoCompany };
                    group.iter().for_each(|member| items[index(member.item)].fate = Fate::Alone(reason));
                    return;
                };
                let own = number(groups.len());
                let mut numbers: Vec<u32> = group.iter().map(|member| member.item).collect();
                numbers.sort_unstable();
                numbers.iter().for_each(|item| items[index(*item)].fate = Fate::Grouped(own));
                groups.push(Group {
                    src_task: kin.src_task,
                    dst_task: kin.dst_task,
                    memory: kin.memory,
                    level: kin.level,
                    items: numbers,
                });
            });
        }
    }
    Ok(FusePlan { items, groups })
}

/// Everything that the items of a group have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Kin {
    src_task: u32,
    dst_task: u32,
    memory: Memory,
    /// The accelerator, if `memory` is one's.
    device: u32,
    frame: FrameId,
    predicates: SetId,
    level: u32,
    blockers: SetId,
    size: Size,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Size {
    Small,
    Middle,
    Unknown,
}

struct Member {
    item: u32,
    ready_us: u64,
    bytes: u64,
}

/// Everything that crosses, in a deterministic order.
fn items(graph: &Graph) -> Vec<Item> {
    let mut crossing: Vec<u32> =
        (0u32..).zip(graph.edges()).filter(|(_, e)| graph.crosses(e)).map(|(at, _)| at).collect();
    let place = |edge: u32| {
        let e = graph.edge(edge);
        // All control outputs of a node are one.
        (e.src, e.src_output.max(-1), graph.node(e.dst).task, e.dst, e.dst_input, edge)
    };
    crossing.sort_unstable_by_key(|edge| place(*edge));
    let mut items: Vec<Item> = Vec::new();
    for edge in crossing {
        let (src, output, task, ..) = place(edge);
        match items.last_mut() {
            Some(last) if (last.src, last.output, last.task) == (src, output, task) => last.edges.push(edge),
            _ => items.push(Item { src, output, task, edges: vec![edge], fate: Fate::Alone(Reason::NoCompany) }),
        }
    }
    items
}

/// The items that could be grouped, by common properties, in order of their first items. The others get their reason.
fn families(
    graph: &Graph,
    limits: &FuseLimits,
    flow: &Flow,
    predicates: &Predicates,
    schedule: &Schedule,
    loops: &Loops,
    items: &mut [Item],
) -> Vec<(Kin, Vec<Member>)> {
    let mut families: Vec<(Kin, Vec<Member>)> = Vec::new();
    let mut known: HashMap<Kin, usize> = HashMap::new();
    for (number, item) in (0u32..).zip(items) {
        let edges = item.edges.iter().map(|edge| graph.edge(*edge));
        let frame = flow.outputs(item.src);
        let looping = frame != ROOT;
        let barred = edges.clone().find_map(|edge| barred(graph, edge, looping));
        let set = predicates.output(item.src, item.output);
        let turns = loops.is_orderly(frame) && predicates.implies(set, loops.usual(frame));
        let steady = turns || !schedule.may_block(frame);
        let strange = looping && !(predicates.is_regular(frame) && steady);
        let bytes = edges.clone().filter_map(|edge| edge.bytes).max();
        let is_control = item.output < 0;
        let large = !is_control && bytes.is_some_and(|bytes| bytes > limits.large_bytes);
        let alone = barred.or(strange.then_some(Reason::Loop)).or(large.then_some(Reason::Large));
        if let Some(reason) = alone {
            item.fate = Fate::Alone(reason);
            continue;
        }
        let size = match bytes {
            _ if is_control => Size::Small,
            Some(bytes) if bytes > limits.small_bytes => Size::Middle,
            Some(_) => Size::Small,
            None => Size::Unknown,
        };
        let source = graph.node(item.src);
        let staged = edges.clone().any(|edge| edge.memory == Memory::Device && !edge.is_control());
        let Moment { level, ready_us, blockers } = schedule.node(item.src);
        let kin = Kin {
            src_task: source.task,
            dst_task: item.task,
            memory: if staged { Memory::Device } else { Memory::Host },
            device: if staged { source.device } else { 0 },
            frame,
            predicates: set,
            level,
            blockers,
            size,
        };
        let at = *known.entry(kin).or_insert_with(|| {
            families.push((kin, Vec::new()));
            families.len() - 1
        });
        families[at].1.push(Member { item: number, ready_us, bytes: bytes.unwrap_or(0) });
    }
    families
}

/// The reason why an edge's item cannot be in a group.
fn barred(graph: &Graph, edge: &Edge, looping: bool) -> Option<Reason> {
    let (src, dst) = (graph.node(edge.src), graph.node(edge.dst));
    let client = |kind: Kind| matches!(kind, Kind::Feed | Kind::Fetch);
    match edge.class {
        Class::Ref => Some(Reason::Reference),
        Class::Resource => Some(Reason::Resource),
        Class::Variant => Some(Reason::Variant),
        _ if src.untouchable || dst.untouchable => Some(Reason::Untouchable),
        _ if client(src.kind) || client(dst.kind) => Some(Reason::Client),
        // An Exit's outputs are outside the loop, and so are an Enter's inputs.
        _ if looping && src.kind.is_loop_plumbing() && src.kind != Kind::Exit => Some(Reason::LoopMachinery),
        _ if looping && (dst.kind.is_loop_plumbing() && dst.kind != Kind::Enter || dst.kind == Kind::Merge) => {
            Some(Reason::LoopMachinery)
        }
        _ => None,
    }
}

/// Cuts a time-ordered family into groups that are worthwhile.
fn split(limits: &FuseLimits, members: &[Member], mut group: impl FnMut(&[Member])) {
    let (mut begin, mut waited, mut bytes) = (0, 0u64, 0u64);
    for (at, member) in members.iter().enumerate() {
        let size = at - begin;
        if size > 0 {
            let later = member.ready_us - members[at - 1].ready_us;
            let all_wait = waited.saturating_add(later.saturating_mul(size as u64));
            let saved = u64::from(limits.message_us).saturating_mul(size as u64);
            let worth_it = all_wait <= saved
                && member.ready_us - members[begin].ready_us <= u64::from(limits.wait_us)
                && bytes.saturating_add(member.bytes) <= limits.group_bytes
                && size < index(limits.group_items);
            if worth_it {
                waited = all_wait;
            } else {
                group(&members[begin..at]);
                (begin, waited, bytes) = (at, 0, 0);
            }
        }
        bytes = bytes.saturating_add(member.bytes);
    }
    if begin < members.len() {
        group(&members[begin..]);
    }
}

impl FusePlan {
    /// The number of messages saved.
    pub fn saved(&self) -> usize {
        self.groups.iter().map(|group| group.items.len() - 1).sum()
    }

    /// The plan as text, with node names.
    pub fn describe<'a>(&'a self, graph: &'a Graph<'a>) -> impl fmt::Display + 'a {
        Description { plan: self, graph }
    }
}

struct Description<'a> {
    plan: &'a FusePlan,
    graph: &'a Graph<'a>,
}

impl fmt::Display for Description<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FusePlan { items, groups } = self.plan;
        writeln!(f, "{} items cross, {} messages fewer", items.len(), self.plan.saved())?;
        let line = |f: &mut fmt::Formatter<'_>, item: &Item| {
            let name = self.graph.describe(item.src);
            if item.output < 0 { write!(f, "  {name} (control)") } else { write!(f, "  {name}:{}", item.output) }
        };
        for (number, group) in groups.iter().enumerate() {
            let Group { src_task, dst_task, level, memory, .. } = group;
            writeln!(f, "group {number}: task {src_task} to task {dst_task}, level {level}, {memory:?} memory")?;
            for item in &group.items {
                line(f, &items[index(*item)])?;
                writeln!(f)?;
            }
        }
        for item in items {
            if let Fate::Alone(reason) = item.fate {
                line(f, item)?;
                writeln!(f, " to task {} alone: {reason:?}", item.task)?;
            }
        }
        Ok(())
    }
}
