//! The planners: plain arrays in, groups out.

use std::ffi::c_void;

use super::error::sw_error;
use super::handle::{self, Failure, array, borrow, numbered, other_structs, require};
use super::types::{sw_bytes, sw_code};
use starwire_engine::config::{Fusion, ProcessEnv};
use starwire_planner::fuse::{self, FusePlan};
use starwire_planner::graph::{Class, Edge, Graph, Kind, Memory, Node, PlanError};
use starwire_protocol::code;

/// What a node means for control flow (sw_plan_node.kind).
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum sw_node {
    Plain,
    /// Passes its only data input on unchanged (Identity).
    Identity,
    /// Switch, RefSwitch, _SwitchN: input 1 is the predicate; detail: the number of outputs (0: two).
    Switch,
    Merge,
    /// detail: a number for its frame_name, the same for the same name.
    Enter,
    Exit,
    NextIteration,
    LoopCond,
    ControlTrigger,
    /// Brings in a value from the client (a client-terminated _Recv).
    Feed,
    /// Hands a value to the client (a client-terminated _Send).
    Fetch,
    /// A _Recv that is already in the graph and is not the client's: set SW_NODE_IS_BLOCKING as well.
    Receive,
}

/// sw_plan_node.flags: has effects beyond its outputs, or is not known to have none.
pub const SW_NODE_IS_STATEFUL: u32 = 1;
/// sw_plan_node.flags: may wait for something other than an edge of this graph (a queue, a collective, a receive; a
/// feed of a partial run).
pub const SW_NODE_IS_BLOCKING: u32 = 2;
/// sw_plan_node.flags: nothing may be inserted between it and its neighbours.
pub const SW_NODE_IS_UNTOUCHABLE: u32 = 4;
/// sw_plan_node.flags: a constant, or a variable that is found by name (no inputs): a copy of it is the same object.
pub const SW_NODE_IS_CLONEABLE: u32 = 8;
/// sw_plan_node.flags: output 0 is the same reference as input 0 (Assign, ApplyX, ScatterX, RefSwitch ...).
pub const SW_NODE_FORWARDS_REF: u32 = 16;
/// sw_plan_node.flags: reads a variable and does nothing else (ReadVariableOp, Identity of a reference).
pub const SW_NODE_IS_READ: u32 = 32;
/// sw_plan_node.flags: nothing is known about its operation (sw_op_knowledge). Set SW_NODE_IS_STATEFUL and
/// SW_NODE_IS_BLOCKING as well.
pub const SW_NODE_IS_UNKNOWN: u32 = 64;
/// sw_plan_node.flags: an Enter whose value is the same in every iteration of the loop (is_constant).
pub const SW_NODE_IS_INVARIANT: u32 = 128;

/// What an edge carries (sw_plan_edge.type_class).
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum sw_edge {
    /// A tensor that consists of its bytes only.
    Plain,
    String,
    Variant,
    /// The consumer takes a reference, not a value.
    Ref,
    Resource,
    Control,
    /// The producer has a reference, and the consumer takes the value behind it when it starts.
    Deref,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_plan_node {
    /// Equal numbers: the same task.
    pub task: u32,
    /// Equal numbers: the same device.
    pub device: u32,
    /// SW_NODE_PLAIN ...
    pub kind: u32,
    /// SW_NODE_IS_... flags.
    pub flags: u32,
    /// See the kinds.
    pub detail: u32,
    /// How long it runs, in microseconds; negative: unknown.
    pub cost_us: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_plan_edge {
    pub src: u32,
    /// -1: control.
    pub src_output: i32,
    pub dst: u32,
    /// -1: control.
    pub dst_input: i32,
    /// SW_EDGE_PLAIN ...
    pub type_class: u32,
    /// 1: the producer's output lies in the memory of an accelerator.
    pub on_device: u32,
    /// How much it carries; negative: unknown.
    pub bytes: i64,
}

/// A graph, borrowed for the duration of a call. Leave SOURCE and SINK out; nodes are numbered by their place in
/// `nodes`.
#[repr(C)]
pub struct sw_plan_graph {
    pub struct_size: usize,
    pub nodes: *const sw_plan_node,
    pub n_nodes: usize,
    pub edges: *const sw_plan_edge,
    pub n_edges: usize,
    /// May be NULL. A node's name, for messages: the bytes stay valid until the next call of it.
    pub name: Option<unsafe extern "C" fn(ctx: *mut c_void, node: u32) -> sw_bytes>,
    pub name_ctx: *mut c_void,
}

/// One output of one node, with all its consumers in one task. Borrowed from the plan.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_fuse_item {
    pub src: u32,
    /// -1: control edges, which carry no data: control edges into the group's first node and out of its last one
    /// replace them.
    pub src_output: i32,
    /// Indices into sw_plan_graph.edges, at least one.
    pub edges: *const u32,
    pub n_edges: usize,
}

/// Items that cross together, at least two. Borrowed from the plan.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_fuse_group {
    pub src_task: u32,
    pub dst_task: u32,
    pub items: *const sw_fuse_item,
    pub n_items: usize,
}

/// What crosses together. Free with sw_fuse_plan_free.
pub struct sw_fuse_plan {
    groups: Vec<sw_fuse_group>,
    items: usize,
    text: String,
    // `groups` point into these.
    _items: Vec<Vec<sw_fuse_item>>,
    _plan: FusePlan,
}

/// Reads the STARWIRE_TENSOR_FUSE variables: whether tensors are fused in sessions and functions without their own
/// setting: 1, 0, or -1 if the environment does not say. An error names the variable and its valid values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_fuse_settings(enabled: *mut i32, error: *mut *mut sw_error) -> sw_code {
    // SAFETY: the caller's promise.
    unsafe {
        handle::answer("reading settings", enabled, error, || settings().map(|fusion| fusion.on.map_or(-1, i32::from)))
    }
}

fn settings() -> Result<Fusion, Failure> {
    Fusion::from_env(&ProcessEnv).map_err(|error| (code::INVALID_ARGUMENT, error.to_string()))
}

/// Decides which tensors cross from task to task together. The same graph and environment give the same plan. An error
/// says why the graph cannot be planned; it can still be run unchanged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_fuse_plan_new(
    graph: *const sw_plan_graph,
    out: *mut *mut sw_fuse_plan,
    error: *mut *mut sw_error,
) -> sw_code {
    let make = || {
        // SAFETY: the caller's promise.
        let graph = unsafe { require(graph, "graph")? };
        let limits = settings()?.limits;
        let plan = |graph: &Graph| {
            let plan = fuse::plan(graph, &limits)?;
            let text = plan.describe(graph).to_string();
            Ok(sw_fuse_plan::new(plan, text))
        };
        // SAFETY: the caller's promise.
        unsafe { with_graph(graph, plan) }
    };
    // SAFETY: the caller's promise.
    unsafe { handle::create("planning", out, error, make) }
}

/// The groups, in a fixed order. Valid as long as the plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_fuse_plan_groups(plan: *const sw_fuse_plan, n: *mut usize) -> *const sw_fuse_group {
    // SAFETY: the caller's promise.
    let groups = unsafe { borrow(plan) }.map_or(&[][..], |plan| &plan.groups);
    // SAFETY: the caller's promise.
    unsafe { *n = groups.len() }
    groups.as_ptr()
}

/// How many tensors (and control tokens) cross from task to task, grouped or not: the messages of an unfused step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_fuse_plan_crossings(plan: *const sw_fuse_plan) -> usize {
    // SAFETY: the caller's promise.
    unsafe { borrow(plan) }.map_or(0, |plan| plan.items)
}

/// The plan as text: groups, tensors that travel alone, and why. Valid as long as the plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_fuse_plan_text(plan: *const sw_fuse_plan) -> sw_bytes {
    // SAFETY: the caller's promise.
    unsafe { borrow(plan) }.map_or(sw_bytes::EMPTY, |plan| sw_bytes::of(plan.text.as_bytes()))
}

/// Frees the plan and its lists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_fuse_plan_free(plan: *mut sw_fuse_plan) {
    // SAFETY: the caller's promise.
    unsafe { handle::free(plan) }
}

impl sw_fuse_plan {
    fn new(plan: FusePlan, text: String) -> Self {
        // The pointers point to the heap, and the data there is not modified again: moving the plan does not move it.
        let item = |number: &u32| {
            let item = &plan.items[*number as usize];
            sw_fuse_item {
                src: item.src,
                src_output: item.output,
                edges: item.edges.as_ptr(),
                n_edges: item.edges.len(),
            }
        };
        let items: Vec<Vec<sw_fuse_item>> =
            plan.groups.iter().map(|group| group.items.iter().map(item).collect()).collect();
        let group = |(group, items): (&fuse::Group, &Vec<sw_fuse_item>)| sw_fuse_group {
            src_task: group.src_task,
            dst_task: group.dst_task,
            items: items.as_ptr(),
            n_items: items.len(),
        };
        let groups = plan.groups.iter().zip(&items).map(group).collect();
        Self { groups, items: plan.items.len(), text, _items: items, _plan: plan }
    }
}

/// Checks a graph and passes it to `plan`.
///
/// # Safety
/// What `graph` points at is readable during the call.
pub(super) unsafe fn with_graph<T>(
    graph: &sw_plan_graph,
    plan: impl FnOnce(&Graph) -> Result<T, PlanError>,
) -> Result<T, Failure> {
    if graph.struct_size != size_of::<sw_plan_graph>() {
        return Err(other_structs());
    }
    let invalid = |error: PlanError| (code::INVALID_ARGUMENT, error.to_string());
    let names = |node: u32| {
        let name = graph.name?;
        // SAFETY: the caller's promise: the bytes are valid until the next call.
        let bytes = unsafe { name(graph.name_ctx, node) };
        // SAFETY: as above.
        Some(String::from_utf8_lossy(unsafe { bytes.as_slice() }).into_owned())
    };
    // SAFETY: the caller's promise.
    let (nodes, edges) = unsafe { (array(graph.nodes, graph.n_nodes), array(graph.edges, graph.n_edges)) };
    let nodes = (0..).zip(nodes).map(|(at, node)| accept_node(at, node)).collect::<Result<_, _>>();
    let edges = (0..).zip(edges).map(|(at, edge)| accept_edge(at, edge)).collect::<Result<_, _>>();
    let names: Option<starwire_planner::graph::Names> = Some(&names);
    let graph = Graph::new(nodes.map_err(invalid)?, edges.map_err(invalid)?, names).map_err(invalid)?;
    plan(&graph).map_err(invalid)
}

/// In the order of sw_node.
const KINDS: [Kind; 12] = [
    Kind::Plain,
    Kind::Identity,
    Kind::Switch,
    Kind::Merge,
    Kind::Enter,
    Kind::Exit,
    Kind::NextIteration,
    Kind::LoopCond,
    Kind::ControlTrigger,
    Kind::Feed,
    Kind::Fetch,
    Kind::Receive,
];
const _: () = assert!(sw_node::Receive as usize + 1 == KINDS.len());

/// In the order of sw_edge.
const CLASSES: [Class; 7] =
    [Class::Plain, Class::String, Class::Variant, Class::Ref, Class::Resource, Class::Control, Class::Deref];
const _: () = assert!(sw_edge::Deref as usize + 1 == CLASSES.len());

fn accept_node(at: usize, node: &sw_plan_node) -> Result<Node, PlanError> {
    let kind = numbered(&KINDS, node.kind).ok_or(PlanError::Unknown { what: "node kind", at, value: node.kind })?;
    Ok(Node {
        kind,
        task: node.task,
        device: node.device,
        unknown: node.flags & SW_NODE_IS_UNKNOWN != 0,
        stateful: node.flags & SW_NODE_IS_STATEFUL != 0,
        blocking: node.flags & SW_NODE_IS_BLOCKING != 0,
        untouchable: node.flags & SW_NODE_IS_UNTOUCHABLE != 0,
        cloneable: node.flags & SW_NODE_IS_CLONEABLE != 0,
        forwards_ref: node.flags & SW_NODE_FORWARDS_REF != 0,
        pure_read: node.flags & SW_NODE_IS_READ != 0,
        invariant: node.flags & SW_NODE_IS_INVARIANT != 0,
        detail: node.detail,
        cost_us: u32::try_from(node.cost_us).ok(),
    })
}

fn accept_edge(at: usize, edge: &sw_plan_edge) -> Result<Edge, PlanError> {
    let unknown = |what, value| PlanError::Unknown { what, at, value };
    let class = numbered(&CLASSES, edge.type_class).ok_or(unknown("edge type class", edge.type_class))?;
    if (class == Class::Control) != (edge.src_output < 0) || (class == Class::Control) != (edge.dst_input < 0) {
        return Err(PlanError::HalfControl { edge: at });
    }
    Ok(Edge {
        src: edge.src,
        src_output: edge.src_output,
        dst: edge.dst,
        dst_input: edge.dst_input,
        class,
        memory: if edge.on_device == 0 { Memory::Host } else { Memory::Device },
        bytes: u64::try_from(edge.bytes).ok(),
    })
}
