//! When each value is released: computed once, with the plan.
//!
//! In a straight run the last reader of each value is known. In other runs it is known only for values with one reader;
//! for the rest the run counts readers.

use super::compiled::{Compiled, Task, between, counted, kind};

pub(super) struct Lives {
    pub ordered: Vec<Task>,
    pub tasks: Vec<Task>,
    pub lists: Vec<u32>,
}

impl Lives {
    pub fn new(nodes: &[Compiled], sources: &[u32], readers: &[u32], order: &[u32]) -> Self {
        let inputs = |node: u32| between(sources, nodes, node, |it| it.sources);
        let mut lives = Lives { ordered: Vec::new(), tasks: Vec::new(), lists: Vec::new() };
        let mut left = readers.to_vec();
        for &node in order {
            if nodes[node as usize].kind & kind::NOTHING != 0 {
                continue;
            }
            let read = distinct(inputs(node));
            // Slots that this node reads once, as the last of several readers.
            let sole = read.iter().filter(|(slot, times)| {
                let slot = *slot as usize;
                *times == 1 && left[slot] == 1 && readers[slot] > 1
            });
            let unshared = sole.map(|(slot, _)| *slot).collect::<Vec<_>>();
            let mut released = Vec::new();
            for (slot, times) in read {
                let left = &mut left[slot as usize];
                // Static slots have no readers.
                if *left == 0 {
                    continue;
                }
                *left -= times;
                if *left == 0 {
                    released.push(slot);
                }
            }
            let task = lives.task(node, &unshared, &released);
            lives.ordered.push(task);
        }
        for node in (0u32..).take(nodes.len() - 1) {
            let single = |slot: &u32| readers[*slot as usize] == 1;
            let released: Vec<u32> = inputs(node).iter().copied().filter(single).collect();
            let task = lives.task(node, &[], &released);
            lives.tasks.push(task);
        }
        lives
    }

    fn task(&mut self, node: u32, unshared: &[u32], released: &[u32]) -> Task {
        let task = Task {
            node,
            first: counted(self.lists.len()),
            unshared: counted(unshared.len()),
            released: counted(released.len()),
        };
        self.lists.extend_from_slice(unshared);
        self.lists.extend_from_slice(released);
        task
    }
}

/// Each distinct slot with the number of its occurrences.
fn distinct(slots: &[u32]) -> Vec<(u32, u32)> {
    let mut sorted = slots.to_vec();
    sorted.sort_unstable();
    sorted.chunk_by(|a, b| a == b).map(|same| (same[0], same.iter().map(|_| 1).sum())).collect()
}
