//! star_server's planner: a graph in, calls out.

use std::ptr::null;
use std::time::Duration;

use super::error::sw_error;
use super::handle::{self, array, borrow, other_structs, require};
use super::plan::{sw_plan_graph, with_graph};
use super::types::{sw_bytes, sw_code};
use starwire_engine::config::{Config, ProcessEnv};
use starwire_planner::parts::{LEAST_BYTES, UNMEASURED_BYTES, worthwhile_bytes};
use starwire_planner::placement::{Place, Roles};
use starwire_planner::roles::{self, Task};
use starwire_planner::star::{self, Call, StarPlan, Style, Way};
use starwire_planner::unordered::{self, Order};
use starwire_protocol::code;

/// Where a node goes.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum sw_place {
    /// Unchanged: it is not on a parameter server.
    Stays,
    /// To the worker's CPU.
    Moved,
    /// To the worker's CPU as Switch(predicate, predicate): its data input was a variable, which is copied where it is
    /// needed.
    Pivot,
    /// Copied, with the same name, to wherever it is needed.
    Copied,
    /// Part of a call.
    Called,
    /// Left to send and receive.
    Left,
}

/// How an edge is served.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum sw_way {
    /// Unchanged.
    Untouched,
    /// Within one call.
    Inside,
    /// The consumer (in a call, or on the worker) has a copy of the producer.
    Copy,
    /// The consumer takes the reference from a copy of sw_star_way.root; the call waits for the producer.
    CopyOf,
    /// Into a call: one of its feeds.
    Feed,
    /// Out of a call: one of its fetches.
    Fetch,
    /// From a call to a later one of the same server, where the value may stay.
    Slot,
    /// From a call to a later one of another server; it may be sent to it directly: both run or neither.
    Direct,
    /// From a call to a later one of another server, through the worker.
    Relay,
    /// A control edge: between calls it is in sw_star_call.after, into a call in its controls.
    Order,
    /// Nothing is needed.
    Dropped,
}

#[repr(C)]
pub struct sw_star_options {
    pub struct_size: usize,
    /// 1: star_server_lite, with fewer calls.
    pub lite: u32,
    /// By task: 1 if it is a parameter server.
    pub servers: *const u8,
    pub n_tasks: usize,
    /// A call that would carry at least twice this many bytes is split into parts of about this size if possible. 0:
    /// never.
    pub split_bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_star_way {
    pub way: sw_way,
    pub root: u32,
}

/// A node's output; -1: the node, as a control edge.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_star_output {
    pub src: u32,
    pub src_output: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_star_feed {
    pub src: u32,
    pub src_output: i32,
    /// SW_WAY_FEED, SW_WAY_SLOT, SW_WAY_DIRECT or SW_WAY_RELAY. All of them can also go through the worker.
    pub way: sw_way,
}

/// One call to one parameter server. All lists are borrowed from the plan, in a fixed order, without duplicates.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_star_call {
    pub task: u32,
    pub round: u32,
    /// The nodes that it runs: nodes of this task, and no-ops of others (Plain, with nothing but control edges).
    pub nodes: *const u32,
    pub n_nodes: usize,
    /// Copied nodes that these need as well.
    pub copies: *const u32,
    pub n_copies: usize,
    pub feeds: *const sw_star_feed,
    pub n_feeds: usize,
    /// The values that it returns to the worker.
    pub fetches: *const sw_star_output,
    pub n_fetches: usize,
    /// Calls (as indices into the list) that must be done before, and not dead.
    pub after: *const u32,
    pub n_after: usize,
    /// Nodes outside calls that must be done and not dead; with an output: that output of a pivot.
    pub controls: *const sw_star_output,
    pub n_controls: usize,
}

/// What a plan consists of.
#[repr(C)]
pub struct sw_star_lists {
    /// By round.
    pub calls: *const sw_star_call,
    pub n_calls: usize,
    /// By node: SW_PLACE_STAYS ...
    pub places: *const u32,
    /// By node: the index of its call, or UINT32_MAX. Copied nodes have one if their value is fetched.
    pub calls_of: *const u32,
    pub n_nodes: usize,
    /// Copied nodes that the graph keeps as well, because an untouched edge needs them.
    pub kept: *const u32,
    pub n_kept: usize,
    /// By edge: how it is served.
    pub ways: *const sw_star_way,
    pub n_ways: usize,
}

impl sw_star_lists {
    const NONE: Self = Self {
        calls: null(),
        n_calls: 0,
        places: null(),
        calls_of: null(),
        n_nodes: 0,
        kept: null(),
        n_kept: 0,
        ways: null(),
        n_ways: 0,
    };
}

/// An edge that sw_star_orders_new adds.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_star_order {
    pub src: u32,
    /// Negative: `dst` waits for `src`. Else other tasks take this output from a copy, and `dst` waits for the copy.
    pub src_output: i32,
    pub dst: u32,
}

/// What to add to a graph before it is split. Free with sw_star_orders_free.
pub struct sw_star_orders {
    orders: Vec<sw_star_order>,
}

/// A graph, split into calls. Free with sw_star_plan_free.
pub struct sw_star_plan {
    places: Vec<u32>,
    calls_of: Vec<u32>,
    ways: Vec<sw_star_way>,
    calls: Vec<sw_star_call>,
    text: String,
    summary: String,
    // `calls` points into these.
    _lists: Vec<Lists>,
    plan: StarPlan,
}

struct Lists {
    feeds: Vec<sw_star_feed>,
    fetches: Vec<sw_star_output>,
    controls: Vec<sw_star_output>,
}

/// A task of the cluster.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_star_task {
    /// "/job:ps/replica:0/task:0"
    pub name: sw_bytes,
    /// Not 0 if it holds a variable of the graph.
    pub holds_variables: u32,
}

/// Which tasks are parameter servers for the task `own`, which makes the calls: those of the jobs in STARWIRE_PS_JOBS,
/// else those of jobs with a usual name, else those that hold variables. `servers` is as long as `tasks`. An error
/// names the variable and its valid values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_servers(
    tasks: *const sw_star_task,
    n_tasks: usize,
    own: u32,
    servers: *mut u8,
    error: *mut *mut sw_error,
) -> sw_code {
    let read = || {
        let named =
            Config::ps_jobs_from_env(&ProcessEnv).map_err(|error| (code::INVALID_ARGUMENT, error.to_string()))?;
        // SAFETY: the caller's promise.
        let tasks = unsafe { array(tasks, n_tasks) };
        let tasks: Result<Vec<Task>, _> = tasks
            .iter()
            .map(|task| {
                // SAFETY: the caller's promise.
                let name = std::str::from_utf8(unsafe { task.name.as_slice() });
                name.map(|name| Task { name, holds_variables: task.holds_variables != 0 })
            })
            .collect();
        let tasks = tasks.map_err(|_| (code::INVALID_ARGUMENT, "planner: a task's name is not UTF-8".to_string()))?;
        for (at, server) in roles::roles(&tasks, own, named.as_deref()).servers.iter().enumerate() {
            // SAFETY: there are as many as tasks; the caller's promise.
            unsafe { *servers.add(at) = u8::from(*server) }
        }
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { handle::answer("planning", &mut (), error, read) }
}

/// For sw_star_split_bytes: the environment does not set it.
pub const SW_SPLIT_MEASURED: u64 = u64::MAX;

/// Nothing that carries less than this is worth splitting, on any path.
pub const SW_SPLIT_LEAST: u64 = 65_536;

// Two parts.
const _: () = assert!(SW_SPLIT_LEAST == 2 * LEAST_BYTES);

/// sw_star_options.split_bytes for a path to a server that carries so many bytes per second, with this round trip. 0
/// bytes per second: not measured, or within this host.
#[unsafe(no_mangle)]
pub extern "C" fn sw_star_worthwhile_bytes(bytes_per_s: u64, round_trip_ns: u64) -> u64 {
    match bytes_per_s {
        0 => UNMEASURED_BYTES,
        _ => worthwhile_bytes(bytes_per_s, Duration::from_nanos(round_trip_ns)),
    }
}

/// sw_star_options.split_bytes as the environment sets it, else SW_SPLIT_MEASURED. An error names the variable and its
/// valid values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_split_bytes(bytes: *mut u64, error: *mut *mut sw_error) -> sw_code {
    let read =
        || Config::star_split_bytes_from_env(&ProcessEnv).map_err(|error| (code::INVALID_ARGUMENT, error.to_string()));
    // SAFETY: the caller's promise.
    unsafe { handle::answer("planning", bytes, error, || read().map(|read| read.unwrap_or(SW_SPLIT_MEASURED))) }
}

/// Stores for how many seconds a star call waits for a server that is down (STARWIRE_RECOVER_S). An error names the
/// variable and its valid values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_recover_s(seconds: *mut u64, error: *mut *mut sw_error) -> sw_code {
    let read = || Config::recover_s_from_env(&ProcessEnv).map_err(|error| (code::INVALID_ARGUMENT, error.to_string()));
    // SAFETY: the caller's promise.
    unsafe { handle::answer("planning", seconds, error, read) }
}

/// The order of reads and updates of one variable that no edge orders, as TensorFlow would most likely run them. Add it
/// to the graph before sw_star_plan_new.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_orders_new(
    graph: *const sw_plan_graph,
    out: *mut *mut sw_star_orders,
    error: *mut *mut sw_error,
) -> sw_code {
    let make = || {
        // SAFETY: the caller's promise.
        let graph = unsafe { require(graph, "graph")? };
        let order = |it: &Order| sw_star_order { src: it.src, src_output: it.src_output, dst: it.dst };
        let find = |graph: &starwire_planner::graph::Graph| {
            let orders = unordered::orders(graph)?;
            Ok(sw_star_orders { orders: orders.iter().map(order).collect() })
        };
        // SAFETY: the caller's promise.
        unsafe { with_graph(graph, find) }
    };
    // SAFETY: the caller's promise.
    unsafe { handle::create("planning", out, error, make) }
}

/// In a fixed order. Valid as long as `orders`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_orders_list(orders: *const sw_star_orders, n: *mut usize) -> *const sw_star_order {
    // SAFETY: the caller's promise.
    let list = unsafe { borrow(orders) }.map_or(&[][..], |orders| &orders.orders);
    // SAFETY: the caller's promise.
    unsafe { *n = list.len() }
    list.as_ptr()
}

/// Frees the list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_orders_free(orders: *mut sw_star_orders) {
    // SAFETY: the caller's promise.
    unsafe { handle::free(orders) }
}

/// Splits a graph into calls to parameter servers and the nodes that stay. The same graph gives the same plan. An error
/// says why the graph cannot be planned; it can still be run unchanged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_plan_new(
    graph: *const sw_plan_graph,
    options: *const sw_star_options,
    out: *mut *mut sw_star_plan,
    error: *mut *mut sw_error,
) -> sw_code {
    let make = || {
        // SAFETY: the caller's promise.
        let (graph, options) = unsafe { (require(graph, "graph")?, require(options, "options")?) };
        if options.struct_size != size_of::<sw_star_options>() {
            return Err(other_structs());
        }
        let style = if options.lite == 0 { Style::Robust } else { Style::Lite };
        // SAFETY: the caller's promise.
        let servers = unsafe { array(options.servers, options.n_tasks) }.iter().map(|server| *server != 0).collect();
        let plan = |graph: &starwire_planner::graph::Graph| {
            let plan = star::plan(graph, &Roles { servers }, style, options.split_bytes)?;
            let text = plan.describe(graph, &[]).to_string();
            Ok(sw_star_plan::new(plan, text))
        };
        // SAFETY: the caller's promise.
        unsafe { with_graph(graph, plan) }
    };
    // SAFETY: the caller's promise.
    unsafe { handle::create("planning", out, error, make) }
}

/// Valid as long as the plan. Of no plan: all empty.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_plan_lists(plan: *const sw_star_plan) -> sw_star_lists {
    // SAFETY: the caller's promise.
    let Some(plan) = (unsafe { borrow(plan) }) else { return sw_star_lists::NONE };
    sw_star_lists {
        calls: plan.calls.as_ptr(),
        n_calls: plan.calls.len(),
        places: plan.places.as_ptr(),
        calls_of: plan.calls_of.as_ptr(),
        n_nodes: plan.places.len(),
        kept: plan.plan.kept.as_ptr(),
        n_kept: plan.plan.kept.len(),
        ways: plan.ways.as_ptr(),
        n_ways: plan.ways.len(),
    }
}

/// The plan as text: calls, nodes that stay with send and receive, and why. Valid as long as the plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_plan_text(plan: *const sw_star_plan) -> sw_bytes {
    // SAFETY: the caller's promise.
    unsafe { borrow(plan) }.map_or(sw_bytes::EMPTY, |plan| sw_bytes::of(plan.text.as_bytes()))
}

/// The same in one line, for the log. Valid as long as the plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_plan_summary(plan: *const sw_star_plan) -> sw_bytes {
    // SAFETY: the caller's promise.
    unsafe { borrow(plan) }.map_or(sw_bytes::EMPTY, |plan| sw_bytes::of(plan.summary.as_bytes()))
}

/// Frees the plan and its lists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_star_plan_free(plan: *mut sw_star_plan) {
    // SAFETY: the caller's promise.
    unsafe { handle::free(plan) }
}

impl sw_star_plan {
    fn new(plan: StarPlan, text: String) -> Self {
        let output = |(src, src_output): &(u32, i32)| sw_star_output { src: *src, src_output: *src_output };
        let lists = |call: &Call| Lists {
            feeds: call
                .feeds
                .iter()
                .map(|(src, src_output, by)| sw_star_feed { src: *src, src_output: *src_output, way: way(*by).way })
                .collect(),
            fetches: call.fetches.iter().map(output).collect(),
            controls: call.controls.iter().map(output).collect(),
        };
        let lists: Vec<Lists> = plan.calls.iter().map(lists).collect();
        // The pointers point to the heap, and the data there is not modified again: moving the plan does not move it.
        let call = |(call, lists): (&Call, &Lists)| sw_star_call {
            task: call.task,
            round: call.round,
            nodes: call.nodes.as_ptr(),
            n_nodes: call.nodes.len(),
            copies: call.copies.as_ptr(),
            n_copies: call.copies.len(),
            feeds: lists.feeds.as_ptr(),
            n_feeds: lists.feeds.len(),
            fetches: lists.fetches.as_ptr(),
            n_fetches: lists.fetches.len(),
            after: call.after.as_ptr(),
            n_after: call.after.len(),
            controls: lists.controls.as_ptr(),
            n_controls: lists.controls.len(),
        };
        Self {
            places: plan.places.iter().map(|it| place(*it) as u32).collect(),
            calls_of: plan.calls_of.iter().map(|call| call.unwrap_or(u32::MAX)).collect(),
            ways: plan.ways.iter().map(|by| way(*by)).collect(),
            calls: plan.calls.iter().zip(&lists).map(call).collect(),
            text,
            summary: plan.summary(),
            _lists: lists,
            plan,
        }
    }
}

fn place(place: Place) -> sw_place {
    match place {
        Place::Stays => sw_place::Stays,
        Place::Moved => sw_place::Moved,
        Place::Pivot => sw_place::Pivot,
        Place::Copied => sw_place::Copied,
        Place::Called => sw_place::Called,
        Place::Left(_) => sw_place::Left,
    }
}

fn way(way: Way) -> sw_star_way {
    let number = match way {
        Way::Untouched => sw_way::Untouched,
        Way::Inside => sw_way::Inside,
        Way::Copy => sw_way::Copy,
        Way::CopyOf(_) => sw_way::CopyOf,
        Way::Feed => sw_way::Feed,
        Way::Fetch => sw_way::Fetch,
        Way::Slot => sw_way::Slot,
        Way::Direct => sw_way::Direct,
        Way::Relay => sw_way::Relay,
        Way::Order => sw_way::Order,
        Way::Dropped => sw_way::Dropped,
    };
    sw_star_way { way: number, root: if let Way::CopyOf(root) = way { root } else { u32::MAX } }
}
