//! The entries of a plan's arrays.

/// Properties of a node, as bits.
pub mod kind {
    /// Completes through a later report, on any thread.
    pub const ASYNC: u32 = 1;
    /// Has no kernel: only passes on its completion.
    pub const NOTHING: u32 = 2;
    /// Its output values do not belong to the run and are never released.
    pub const STATIC: u32 = 4;
    /// Never worth another core: not measured.
    pub const CHEAP: u32 = 8;
    pub const ALL: u32 = 15;
}

/// A node to run, as passed to [`Kernels`](crate::Kernels).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Task {
    pub node: u32,
    /// Index into the lists. From there: slots that only this node still reads, although several nodes did; then slots
    /// to release after it.
    pub first: u32,
    pub unshared: u32,
    pub released: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Compiled {
    pub kind: u32,
    /// Into `targets`; they end at the next node's.
    pub targets: u32,
    /// Into `sources`: the slot of each input.
    pub sources: u32,
    /// Its first output's slot.
    pub slots: u32,
    /// Arrivals until it runs: its edges.
    pub pending: u32,
    /// Of an asynchronous kernel: its number among them.
    pub report: u32,
}

pub(super) fn between<'a, T>(all: &'a [T], nodes: &[Compiled], node: u32, at: fn(&Compiled) -> u32) -> &'a [T] {
    let node = node as usize;
    &all[at(&nodes[node]) as usize..at(&nodes[node + 1]) as usize]
}

/// The number of nodes, edges, slots or inputs. `Plan::new` has limited them to `MOST`; one that does not fit is a
/// panic instead of a wrong number.
pub(super) fn counted(count: usize) -> u32 {
    u32::try_from(count).expect("Plan::new limits the size of a plan")
}
