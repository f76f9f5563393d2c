//! `sw_exec`: a sub-graph for the executor, and `sw_run`: one run of it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ffi::c_void;
use std::ptr::NonNull;

use super::error::sw_error;
use super::guard;
use super::handle::{self, array, borrow, numbered, other_structs, require};
use super::types::sw_code;
use starwire_engine::config::{Config, ProcessEnv};
use starwire_executor::arena::Arena;
use starwire_executor::{
    CONTROL, Call, Edge, Executor, Helper, KernelResult, Kernels, Node, Plan, Run, RunRef, Task, kind,
};
use starwire_protocol::code;

/// The node's kernel ends through sw_run_report, on any thread.
pub const SW_EXEC_ASYNC: u32 = 1;
/// Has no kernel, and no inputs.
pub const SW_EXEC_NOTHING: u32 = 2;
/// Its outputs do not belong to the run and are never released.
pub const SW_EXEC_STATIC: u32 = 4;
/// Too cheap to be moved to another core.
pub const SW_EXEC_CHEAP: u32 = 8;
/// In place of the number of an output or input: a control edge.
pub const SW_EXEC_CONTROL: u32 = u32::MAX;

/// The result of sw_kernels.run.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum sw_outcome {
    Done,
    /// sw_run_report will follow, or has already been called.
    Pending,
    Failed,
}

/// In the order of sw_outcome.
const KERNEL_RESULTS: [KernelResult; 3] = [KernelResult::Done, KernelResult::Pending, KernelResult::Failed];

/// For sw_run_go: gives no work to other threads.
pub const SW_EXEC_ALONE: u32 = 1;

const _: () = assert!(
    SW_EXEC_ASYNC == kind::ASYNC
        && SW_EXEC_NOTHING == kind::NOTHING
        && SW_EXEC_STATIC == kind::STATIC
        && SW_EXEC_CHEAP == kind::CHEAP
        && SW_EXEC_CONTROL == CONTROL
);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_exec_node {
    /// SW_EXEC_* bits.
    pub kind: u32,
    pub inputs: u32,
    pub outputs: u32,
    /// The estimated time of the kernel; 0: not known. It is measured in any case.
    pub cost_ns: u32,
}

/// From output `output` of node `src` to input `input` of node `dst`; both are SW_EXEC_CONTROL for a control edge.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_exec_edge {
    pub src: u32,
    pub output: u32,
    pub dst: u32,
    pub input: u32,
}

/// A sub-graph. Outputs have slots, numbered consecutively in the order of the nodes.
#[repr(C)]
pub struct sw_exec_spec {
    pub struct_size: usize,
    pub nodes: *const sw_exec_node,
    pub n_nodes: usize,
    pub edges: *const sw_exec_edge,
    pub n_edges: usize,
    /// How many threads may work on one run: 1 to 64.
    pub lanes: u32,
}

/// One execution of a node. Its slot numbers are in sw_exec_lists, starting at `first`: `unshared` slots whose only
/// remaining reader is this node, then `released` slots that run() releases when the kernel has ended, even if it
/// failed.
#[repr(C)]
pub struct sw_task {
    pub node: u32,
    pub first: u32,
    pub unshared: u32,
    pub released: u32,
}

const _: () = assert!(size_of::<sw_task>() == size_of::<Task>());

/// The owner of the kernels and the values. `scratch` is the memory for the values of one run; successive runs reuse
/// it. None of these functions may throw.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_kernels {
    pub struct_size: usize,
    pub scratch_size: usize,
    /// A power of two.
    pub scratch_align: usize,
    /// Makes a scratch of zeroed memory, when more runs are in progress than ever before.
    pub open: Option<unsafe extern "C" fn(owner: *mut c_void, scratch: *mut c_void)>,
    /// Undoes `open`. May be called after sw_exec_free.
    pub close: Option<unsafe extern "C" fn(owner: *mut c_void, scratch: *mut c_void)>,
    /// Runs a kernel and returns SW_OUTCOME_*. No other thread uses this lane of this run at the same time. `run` is
    /// for the one sw_run_report of an asynchronous kernel; null for others.
    pub run:
        Option<unsafe extern "C" fn(scratch: *mut c_void, run: *mut sw_run, task: *const sw_task, lane: u32) -> u32>,
    /// The slot has no more readers in this run. It may be empty.
    pub release: Option<unsafe extern "C" fn(scratch: *mut c_void, slot: u32)>,
    /// The slot has one reader left, which runs next and reads it once.
    pub unshare: Option<unsafe extern "C" fn(scratch: *mut c_void, slot: u32)>,
    /// The run is over: the last call for it. If it failed, slots may still be full.
    pub finished: Option<unsafe extern "C" fn(scratch: *mut c_void, failed: u32)>,
    /// There is expensive work for another thread: have a thread call sw_run_help(helper), exactly once, at any time.
    pub invite: Option<unsafe extern "C" fn(scratch: *mut c_void, helper: *mut sw_run)>,
}

/// A compiled sub-graph. Shared by all threads.
pub struct sw_exec {
    executor: Executor<Foreign>,
}

/// One run of a plan.
pub struct sw_run {
    _opaque: [u8; 0],
}

/// Kernels on the other side of the C ABI.
struct Foreign {
    run: unsafe extern "C" fn(*mut c_void, *mut sw_run, *const sw_task, u32) -> u32,
    release: unsafe extern "C" fn(*mut c_void, u32),
    unshare: unsafe extern "C" fn(*mut c_void, u32),
    finished: unsafe extern "C" fn(*mut c_void, u32),
    invite: unsafe extern "C" fn(*mut c_void, *mut sw_run),
    open: unsafe extern "C" fn(*mut c_void, *mut c_void),
    close: unsafe extern "C" fn(*mut c_void, *mut c_void),
    layout: Layout,
    owner: *mut c_void,
}

// SAFETY: the contract of sw_kernels: `owner` is used from any thread.
unsafe impl Send for Foreign {}
// SAFETY: as above.
unsafe impl Sync for Foreign {}

impl Foreign {
    /// `None` if a function is missing or the scratch is not a layout.
    fn new(kernels: &sw_kernels, owner: *mut c_void) -> Option<Self> {
        let size = kernels.scratch_size.max(1);
        Some(Foreign {
            run: kernels.run?,
            release: kernels.release?,
            unshare: kernels.unshare?,
            finished: kernels.finished?,
            invite: kernels.invite?,
            open: kernels.open?,
            close: kernels.close?,
            layout: Layout::from_size_align(size, kernels.scratch_align).ok()?,
            owner,
        })
    }
}

struct Scratch {
    memory: NonNull<u8>,
    layout: Layout,
    owner: *mut c_void,
    close: unsafe extern "C" fn(*mut c_void, *mut c_void),
}

// SAFETY: the contract of sw_kernels: what lies there is used from any thread, as the executor orders it.
unsafe impl Send for Scratch {}
// SAFETY: as above.
unsafe impl Sync for Scratch {}

impl Scratch {
    fn pointer(&self) -> *mut c_void {
        self.memory.as_ptr().cast()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: opened in Foreign::open, and closed here only; then the memory goes, with the layout that it came
        // with.
        unsafe {
            (self.close)(self.owner, self.pointer());
            dealloc(self.memory.as_ptr(), self.layout);
        }
    }
}

fn lend(run: RunRef<Foreign>) -> *mut sw_run {
    run.into_raw().cast_mut().cast()
}

/// # Safety
/// `run` is null, or came from `lend`, once.
unsafe fn reference(run: *mut sw_run) -> Option<RunRef<Foreign>> {
    // SAFETY: the caller's promise.
    unsafe { RunRef::from_raw(run.cast::<Arena<Foreign>>()) }
}

impl Kernels for Foreign {
    type Scratch = Scratch;

    fn open(&self) -> Scratch {
        // SAFETY: the layout is not of size 0.
        let memory = unsafe { alloc_zeroed(self.layout) };
        let Some(memory) = NonNull::new(memory) else { handle_alloc_error(self.layout) };
        let scratch = Scratch { memory, layout: self.layout, owner: self.owner, close: self.close };
        // SAFETY: the contract of sw_kernels.
        unsafe { (self.open)(self.owner, scratch.pointer()) };
        scratch
    }

    fn run(&self, call: Call<'_, Self>) -> KernelResult {
        let task = std::ptr::from_ref(call.task).cast::<sw_task>();
        let run = if call.asynchronous { lend(call.run().clone()) } else { std::ptr::null_mut() };
        // SAFETY: the contract of sw_kernels; Task and sw_task are the same.
        let outcome = unsafe { (self.run)(call.scratch.pointer(), run, task, call.lane) };
        let outcome = numbered(&KERNEL_RESULTS, outcome).unwrap_or(KernelResult::Failed);
        if call.asynchronous && !matches!(outcome, KernelResult::Pending) {
            // SAFETY: from `lend` above; there will be no report.
            drop(unsafe { reference(run) });
        }
        outcome
    }

    fn release(&self, scratch: &Scratch, slot: u32) {
        // SAFETY: the contract of sw_kernels.
        unsafe { (self.release)(scratch.pointer(), slot) }
    }

    fn unshare(&self, scratch: &Scratch, slot: u32) {
        // SAFETY: the contract of sw_kernels.
        unsafe { (self.unshare)(scratch.pointer(), slot) }
    }

    fn finished(&self, scratch: &Scratch, failed: bool) {
        // SAFETY: the contract of sw_kernels.
        unsafe { (self.finished)(scratch.pointer(), u32::from(failed)) }
    }

    fn invite(&self, scratch: &Scratch, helper: Helper<Self>) {
        // SAFETY: the contract of sw_kernels.
        unsafe { (self.invite)(scratch.pointer(), lend(helper.into_ref())) }
    }
}

/// Compiles a sub-graph. `spec` and `kernels` are copied.
///
/// # Safety
/// `spec` and `kernels` are readable and the arrays as long as they say; `kernels` keeps to its contract, with `owner`,
/// until each scratch is closed; `out` is writable, `error` writable or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_exec_new(
    spec: *const sw_exec_spec,
    kernels: *const sw_kernels,
    owner: *mut c_void,
    out: *mut *mut sw_exec,
    error: *mut *mut sw_error,
) -> sw_code {
    let make = || {
        // SAFETY: the caller's promise.
        let (spec, kernels) = unsafe { (require(spec, "spec")?, require(kernels, "kernels")?) };
        if spec.struct_size != size_of::<sw_exec_spec>() || kernels.struct_size != size_of::<sw_kernels>() {
            return Err(other_structs());
        }
        let foreign = Foreign::new(kernels, owner);
        let foreign = foreign
            .ok_or((code::INVALID_ARGUMENT, "starwire: bug: the kernels of a sub-graph lack a function".to_string()))?;
        // SAFETY: the caller's promise.
        let (nodes, edges) = unsafe { (array(spec.nodes, spec.n_nodes), array(spec.edges, spec.n_edges)) };
        let node = |n: &sw_exec_node| Node { kind: n.kind, inputs: n.inputs, outputs: n.outputs, cost_ns: n.cost_ns };
        let edge = |e: &sw_exec_edge| Edge { src: e.src, output: e.output, dst: e.dst, input: e.input };
        let nodes: Vec<Node> = nodes.iter().map(node).collect();
        let edges: Vec<Edge> = edges.iter().map(edge).collect();
        let plan = Plan::new(&nodes, &edges).map_err(|e| (code::INVALID_ARGUMENT, e.to_string()))?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Executor::new(plan, foreign, spec.lanes, cores))
    };
    // SAFETY: the caller's promise.
    unsafe { handle::create("compiling a sub-graph", out, error, || make().map(|executor| sw_exec { executor })) }
}

/// Frees a plan. Runs in progress end normally; each scratch is closed when its run has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_exec_free(plan: *mut sw_exec) {
    // SAFETY: the caller's promise.
    unsafe { handle::free(plan) }
}

/// The array that sw_task.first is an index into. Valid as long as the plan or a run of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_exec_lists(plan: *const sw_exec) -> *const u32 {
    // SAFETY: the caller's promise.
    unsafe { borrow(plan) }.map_or(std::ptr::null(), |plan| plan.executor.plan().lists().as_ptr())
}

/// The total time of all kernels when last measured; 0: not known yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_exec_cost_ns(plan: *const sw_exec) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { borrow(plan) }.map_or(0, |plan| plan.executor.plan().costs().total_ns())
}

/// Takes a scratch for a run; values of nodes without kernels may be put there before sw_run_go.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_exec_begin(plan: *const sw_exec, scratch: *mut *mut c_void) -> *mut sw_run {
    // SAFETY: the caller's promise.
    let Some(plan) = (unsafe { borrow(plan) }) else { return std::ptr::null_mut() };
    guard(std::ptr::null_mut(), || {
        let run = plan.executor.begin();
        // SAFETY: the caller's promise.
        unsafe { *scratch = run.scratch().pointer() };
        lend(run.into_ref())
    })
}

/// Runs as far as possible on this thread. sw_kernels.finished is called exactly once: before this returns, or on the
/// thread of the last report. `flags`: SW_EXEC_ALONE.
///
/// # Safety
/// `run` is from sw_exec_begin, and not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_run_go(run: *mut sw_run, flags: u32) {
    // SAFETY: the caller's promise.
    if let Some(run) = unsafe { reference(run) } {
        guard((), || Run::from_ref(run).go(flags & SW_EXEC_ALONE != 0));
    }
}

/// Instead of sw_run_go: drops the run. sw_kernels.finished is not called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_run_abandon(run: *mut sw_run) {
    // SAFETY: the caller's promise.
    let run = unsafe { reference(run) };
    guard((), || drop(run));
}

/// The asynchronous kernel of this node has ended. Continues the run on this thread unless another thread does.
///
/// # Safety
/// `run` is what sw_kernels.run got for this node, which returned or will return SW_OUTCOME_PENDING; once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_run_report(run: *mut sw_run, node: u32, failed: u32) {
    // SAFETY: the caller's promise.
    if let Some(run) = unsafe { reference(run) } {
        guard((), || run.report(node, failed != 0));
    }
}

/// Helps with a run, which may be over.
///
/// # Safety
/// `helper` is from sw_kernels.invite; once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_run_help(helper: *mut sw_run) {
    // SAFETY: the caller's promise.
    if let Some(run) = unsafe { reference(helper) } {
        guard((), || Helper::from_ref(run).help());
    }
}

/// Reads STARWIRE_ROW_UPDATES: 1 if sparse updates have our kernels, else 0. An error names the variable and its valid
/// values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_row_updates(on: *mut u32, error: *mut *mut sw_error) -> sw_code {
    let read =
        || Config::row_updates_from_env(&ProcessEnv).map_err(|error| (code::INVALID_ARGUMENT, error.to_string()));
    // SAFETY: the caller's promise.
    unsafe { handle::answer("reading settings", on, error, || read().map(|read| read.into())) }
}
