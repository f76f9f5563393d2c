//! A star plan in readable form: rounds, calls, what was left to send and receive, and why.

use std::collections::BTreeMap;
use std::fmt;

use super::graph::{Graph, index};
use super::placement::Place;
use super::predicates::Fact;
use super::star::{Call, StarPlan, Way};

impl StarPlan {
    /// The plan as text, with the names of nodes and tasks.
    pub fn describe<'a>(&'a self, graph: &'a Graph<'a>, tasks: &'a [String]) -> impl fmt::Display + 'a {
        Description { plan: self, graph, tasks }
    }
}

impl StarPlan {
    pub fn summary(&self) -> String {
        let rounds = self.calls.iter().map(|call| call.round).max().unwrap_or(0);
        let called: usize = self.calls.iter().map(|call| call.nodes.len()).sum();
        let mut text =
            format!("{} calls in {rounds} rounds run {called} of {} nodes", self.calls.len(), self.places.len());
        let mut left: BTreeMap<&str, usize> = BTreeMap::new();
        let mut moved = 0;
        for place in &self.places {
            match place {
                Place::Moved | Place::Pivot => moved += 1,
                Place::Left(reason) => *left.entry(reason.text()).or_default() += 1,
                Place::Stays | Place::Called | Place::Copied => {}
            }
        }
        if moved != 0 {
            text += &format!(", {moved} are moved to the worker");
        }
        if !left.is_empty() {
            let reasons = left.iter().map(|(reason, count)| format!("{reason}: {count}"));
            text += &format!(", left to send and receive: {}", left.values().sum::<usize>());
            text += &format!(" ({})", list(reasons));
        }
        text
    }
}

struct Description<'a> {
    plan: &'a StarPlan,
    graph: &'a Graph<'a>,
    tasks: &'a [String],
}

impl Description<'_> {
    fn task(&self, task: u32) -> String {
        self.tasks.get(index(task)).cloned().unwrap_or_else(|| format!("task {task}"))
    }

    fn output(&self, (node, output): (u32, i32)) -> String {
        let name = self.graph.describe(node);
        if output < 0 { name } else { format!("{name}:{output}") }
    }

    fn nodes(&self, nodes: &[u32]) -> String {
        list(nodes.iter().map(|node| self.graph.describe(*node)))
    }

    fn fact(&self, fact: &Fact) -> String {
        match *fact {
            Fact::Branch { node, output, branch, .. } => format!("{} is {branch}", self.output((node, output))),
            Fact::Alive(node) => format!("{} is alive", self.graph.describe(node)),
            Fact::All(_) => "many more conditions".to_string(),
        }
    }

    fn call(&self, f: &mut fmt::Formatter<'_>, number: usize, call: &Call) -> fmt::Result {
        write!(f, "call {number}, round {}, to {}", call.round, self.task(call.task))?;
        if !call.predicates.is_empty() {
            write!(f, ", if {}", list(call.predicates.iter().map(|fact| self.fact(fact))))?;
        }
        writeln!(f)?;
        writeln!(f, "  runs      {}", self.nodes(&call.nodes))?;
        let ways = [(Way::Feed, "takes"), (Way::Relay, "is passed"), (Way::Slot, "finds"), (Way::Direct, "is sent")];
        let mut lines: Vec<(&str, String)> = vec![("copies", self.nodes(&call.copies))];
        for (way, what) in ways {
            let feeds = call.feeds.iter().filter(|(.., by)| *by == way);
            lines.push((what, list(feeds.map(|(node, output, _)| self.output((*node, *output))))));
        }
        lines.push(("brings", list(call.fetches.iter().map(|fetch| self.output(*fetch)))));
        let after = call.after.iter().map(|before| format!("call {before}"));
        lines.push(("after", list(after.chain(call.controls.iter().map(|control| self.output(*control))))));
        for (what, which) in lines.iter().filter(|(_, which)| !which.is_empty()) {
            writeln!(f, "  {what:<10}{which}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Description<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StarPlan { calls, places, .. } = self.plan;
        writeln!(f, "{}", self.plan.summary())?;
        for (number, call) in calls.iter().enumerate() {
            self.call(f, number, call)?;
        }
        let mut others: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for (node, place) in self.graph.ids().zip(places) {
            let group = match place {
                Place::Left(reason) => format!("left to send and receive ({})", reason.text()),
                Place::Moved => "moved to the worker".to_string(),
                Place::Pivot => "moved to the worker, without its variable".to_string(),
                Place::Stays | Place::Called | Place::Copied => continue,
            };
            others.entry(group).or_default().push(node);
        }
        for (group, nodes) in others {
            writeln!(f, "{group}: {}", self.nodes(&nodes))?;
        }
        Ok(())
    }
}

fn list(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}
