//! Which nodes could share a call.

use std::collections::HashMap;

use super::flow::{Flow, FrameId};
use super::graph::{Graph, number};
use super::predicates::Predicates;
use super::schedule::Schedule;
use super::sets::SetId;

/// Nodes of one class may share a call: same server, same loop, same conditions, behind the same blockers.
pub type ClassId = u32;

pub struct Classes {
    /// By node.
    pub of: Vec<ClassId>,
    /// By class.
    keys: Vec<(u32, FrameId, SetId, SetId)>,
}

impl Classes {
    pub fn new(graph: &Graph, flow: &Flow, predicates: &Predicates, schedule: &Schedule) -> Self {
        let mut known = HashMap::new();
        let mut keys = Vec::new();
        let class = |node: u32| {
            let it = graph.node(node);
            let key = (it.task, flow.inside(node), predicates.node(node), schedule.node(node).blockers);
            *known.entry(key).or_insert_with(|| {
                keys.push(key);
                number(keys.len() - 1)
            })
        };
        let of = graph.ids().map(class).collect();
        Self { of, keys }
    }

    pub fn task(&self, class: ClassId) -> u32 {
        self.keys[super::graph::index(class)].0
    }

    pub fn differ_in_task_only(&self, a: ClassId, b: ClassId) -> bool {
        let conditions = |class: ClassId| {
            let (_, frame, predicates, blockers) = self.keys[super::graph::index(class)];
            (frame, predicates, blockers)
        };
        conditions(a) == conditions(b)
    }
}
