//! The planners' graph, made of a GraphDef. What an operation does is guessed from its name: there is no TensorFlow
//! here to ask.

use std::collections::{HashMap, HashSet};

use starwire_planner::graph::{Class, Edge, Kind, Memory, Node};
use starwire_planner::ops;

use super::sizes;
use crate::graph_def::{GraphDef, is_ref_variable};

/// What the planners take, with the names for people.
#[derive(Debug)]
pub struct Planned {
    pub nodes: Vec<Node>,
    pub edges: Vec<Edge>,
    pub names: Vec<String>,
    /// By number: "/job:ps/task:0".
    pub tasks: Vec<String>,
}

/// `fetches`: "name:output" is fetched, "name" only has to run; none: the whole graph. `worker`: where nodes without a
/// device are, and what fetches; none: the first task that has a device and is not of a job of `servers`.
pub fn convert(
    graph: &GraphDef,
    fetches: &[String],
    servers: &[String],
    worker: Option<&str>,
) -> Result<Planned, String> {
    let by_name: HashMap<&str, usize> =
        graph.node.iter().enumerate().map(|(at, node)| (node.name.as_str(), at)).collect();
    let find = |input: &str| -> Result<(usize, i32), String> {
        let (name, output) = split(input);
        by_name.get(name).map(|at| (*at, output)).ok_or_else(|| format!("the graph has no node {name:?}"))
    };
    let inputs: Vec<Vec<(usize, i32)>> =
        graph.node.iter().map(|node| node.input.iter().map(|input| find(input)).collect()).collect::<Result<_, _>>()?;
    let wanted = wanted(graph.node.len(), &inputs, fetches, find)?;
    let mut tasks = Tasks::new(graph, &by_name, &inputs, servers, worker);
    let mut planned = Planned { nodes: Vec::new(), edges: Vec::new(), names: Vec::new(), tasks: Vec::new() };
    let mut numbers: HashMap<usize, u32> = HashMap::new();
    let mut frames: HashMap<&[u8], u32> = HashMap::new();
    let number = |count: usize| u32::try_from(count).map_err(|_| "the graph has too many nodes".to_string());
    for (at, node) in graph.node.iter().enumerate().filter(|(at, _)| wanted.contains(at)) {
        numbers.insert(at, number(planned.nodes.len())?);
        let task = tasks.number(at, 0);
        let frame = node.attr.get("frame_name").map_or(&[][..], |value| &value.s);
        let next = number(frames.len())?;
        let detail = if matches!(kind(&node.op), Kind::Enter) { *frames.entry(frame).or_insert(next) } else { 0 };
        let reads_variable = inputs[at].first().is_some_and(|(src, _)| is_ref_variable(&graph.node[*src].op));
        planned.nodes.push(Node { detail, ..describe(&node.op, task, reads_variable) });
        planned.names.push(node.name.clone());
    }
    let handles = Handles::new(graph, &inputs);
    for (at, node) in graph.node.iter().enumerate() {
        let Some(dst) = numbers.get(&at) else { continue };
        let mut place = 0;
        for (src, output) in &inputs[at] {
            let class = if *output < 0 { Class::Control } else { handles.class(*src, &node.op, place) };
            let dst_input = if *output < 0 { -1 } else { place };
            place += i32::from(*output >= 0);
            let from = *src;
            let Some(src) = numbers.get(src) else { continue };
            let mut edge = edge((*src, *output), (*dst, dst_input), class);
            let of = |node: &u32| planned.nodes.get(*node as usize).map(|node| node.task);
            let reference = *output == 0 && yields_ref(&graph.node[from].op);
            if class == Class::Plain && reference && of(src) == of(dst) {
                edge.class = Class::Deref;
            }
            if class == Class::Plain {
                edge.bytes = sizes::bytes(graph, &inputs, (from, *output), (at, dst_input));
            }
            planned.edges.push(edge);
        }
    }
    for fetch in fetches.iter().filter(|fetch| fetch.contains(':')) {
        let (src, output) = find(fetch)?;
        let Some(src) = numbers.get(&src).copied() else { continue };
        let dst = number(planned.nodes.len())?;
        let task = tasks.of_worker();
        planned.nodes.push(Node::of(Kind::Fetch, task));
        planned.names.push(format!("fetch of {fetch}"));
        planned.edges.push(edge((src, output), (dst, 0), Class::Plain));
    }
    planned.tasks = tasks.names;
    Ok(planned)
}

fn edge((src, src_output): (u32, i32), (dst, dst_input): (u32, i32), class: Class) -> Edge {
    Edge { src, src_output, dst, dst_input, class, memory: Memory::Host, bytes: None }
}

/// "^name", "name", "name:1"
fn split(input: &str) -> (&str, i32) {
    if let Some(name) = input.strip_prefix('^') {
        return (name, -1);
    }
    match input.rsplit_once(':').map(|(name, output)| (name, output.parse())) {
        Some((name, Ok(output))) => (name, output),
        _ => (input, 0),
    }
}

/// What the fetches need.
fn wanted(
    count: usize,
    inputs: &[Vec<(usize, i32)>],
    fetches: &[String],
    find: impl Fn(&str) -> Result<(usize, i32), String>,
) -> Result<HashSet<usize>, String> {
    if fetches.is_empty() {
        return Ok((0..count).collect());
    }
    let mut next: Vec<usize> = fetches.iter().map(|fetch| find(fetch).map(|(at, _)| at)).collect::<Result<_, _>>()?;
    let mut wanted = HashSet::new();
    while let Some(at) = next.pop() {
        if wanted.insert(at) {
            next.extend(inputs[at].iter().map(|(src, _)| *src));
        }
    }
    Ok(wanted)
}

/// Which task each node is on: that of its variable, whatever its own device says (so does TensorFlow's placer), else
/// its device's, else that of what it is colocated with, else the worker.
struct Tasks<'a> {
    graph: &'a GraphDef,
    by_name: &'a HashMap<&'a str, usize>,
    inputs: &'a [Vec<(usize, i32)>],
    names: Vec<String>,
    worker: String,
}

impl<'a> Tasks<'a> {
    fn new(
        graph: &'a GraphDef,
        by_name: &'a HashMap<&'a str, usize>,
        inputs: &'a [Vec<(usize, i32)>],
        servers: &[String],
        worker: Option<&str>,
    ) -> Self {
        let mut devices = graph.node.iter().filter_map(|node| task_of(&node.device));
        let elsewhere = devices.find(|task| !is_server(task, servers));
        let worker = worker.map(str::to_owned).or(elsewhere).unwrap_or_else(|| "/job:worker/task:0".to_string());
        Self { graph, by_name, inputs, names: Vec::new(), worker }
    }

    fn number(&mut self, at: usize, depth: usize) -> u32 {
        let node = &self.graph.node[at];
        let tied = self.inputs[at].first().map(|(src, _)| *src).filter(|src| {
            let op = &self.graph.node[*src].op;
            makes_handle(op) || (is_ref_variable(op) && takes_ref(&node.op))
        });
        if let (None, Some(task)) = (tied, task_of(&node.device)) {
            return self.intern(task);
        }
        let colocated =
            node.attr.get("_class").and_then(|value| value.list.as_ref()).into_iter().flat_map(|list| &list.s);
        let mut with = colocated.filter_map(|name| std::str::from_utf8(name).ok()?.strip_prefix("loc:@"));
        let other = with.find_map(|name| self.by_name.get(name)).copied();
        match tied.or(other).filter(|other| *other != at && depth < 100) {
            Some(other) => self.number(other, depth + 1),
            None => self.of_worker(),
        }
    }

    fn of_worker(&mut self) -> u32 {
        self.intern(self.worker.clone())
    }

    fn intern(&mut self, task: String) -> u32 {
        let at = self.names.iter().position(|name| *name == task).unwrap_or_else(|| {
            self.names.push(task);
            self.names.len() - 1
        });
        u32::try_from(at).expect("2^32 tasks do not fit into memory")
    }
}

/// "/job:ps/replica:0/task:1/device:CPU:0" and "/job:ps/task:1" are one task.
pub fn task_of(device: &str) -> Option<String> {
    let part = |name: &str| device.split('/').find_map(|part| part.strip_prefix(name)?.strip_prefix(':'));
    Some(format!("/job:{}/task:{}", part("job")?, part("task").unwrap_or("0")))
}

/// Whether the task is of one of these jobs.
pub fn is_server(task: &str, jobs: &[String]) -> bool {
    jobs.iter()
        .any(|job| task.strip_prefix("/job:").and_then(|rest| rest.strip_prefix(job)?.strip_prefix('/')).is_some())
}

/// Which outputs are handles or variants.
struct Handles(Vec<Option<Class>>);

impl Handles {
    fn new(graph: &GraphDef, inputs: &[Vec<(usize, i32)>]) -> Self {
        let own = |op: &str| {
            let variant = op.starts_with("TensorList") || op.ends_with("Dataset") || op.ends_with("DatasetV2");
            if makes_handle(op) { Some(Class::Resource) } else { variant.then_some(Class::Variant) }
        };
        let passes = |op: &str| matches!(op, "Identity" | "Switch" | "Merge" | "Enter" | "Exit" | "NextIteration");
        let first = |at: usize| {
            // Through a chain of nodes that pass it on.
            let mut at = at;
            for _ in 0..100 {
                match (own(&graph.node[at].op), inputs[at].first()) {
                    (None, Some((src, output))) if passes(&graph.node[at].op) && *output >= 0 => at = *src,
                    (class, _) => return class,
                }
            }
            None
        };
        Self((0..graph.node.len()).map(first).collect())
    }

    fn class(&self, src: usize, consumer: &str, input: i32) -> Class {
        match self.0[src] {
            Some(class) => class,
            None if input == 0 && takes_ref(consumer) => Class::Ref,
            None => Class::Plain,
        }
    }
}

fn kind(op: &str) -> Kind {
    match op {
        "Switch" | "RefSwitch" => Kind::Switch,
        "Merge" | "RefMerge" => Kind::Merge,
        "Enter" | "RefEnter" => Kind::Enter,
        "Exit" | "RefExit" => Kind::Exit,
        "NextIteration" | "RefNextIteration" => Kind::NextIteration,
        "LoopCond" => Kind::LoopCond,
        "ControlTrigger" => Kind::ControlTrigger,
        "Identity" | "RefIdentity" => Kind::Identity,
        _ => Kind::Plain,
    }
}

fn describe(op: &str, task: u32, reads_variable: bool) -> Node {
    let Some(known) = ops::knowledge(op) else {
        return Node { unknown: true, stateful: true, blocking: true, ..Node::of(kind(op), task) };
    };
    Node {
        stateful: !known.is_pure(),
        blocking: known.waits,
        cloneable: known.named,
        forwards_ref: known.forwards,
        pure_read: known.reads || (op == "Identity" && reads_variable),
        ..Node::of(kind(op), task)
    }
}

fn makes_handle(op: &str) -> bool {
    let named = ops::knowledge(op).is_some_and(|known| known.named && !known.constant && !is_ref_variable(op));
    named
        || op.ends_with("HandleOp")
        || op.ends_with("TableV2")
        || matches!(op, "TensorArrayV3" | "StackV2" | "OneShotIterator")
}

/// Output 0 is a reference.
fn yields_ref(op: &str) -> bool {
    is_ref_variable(op) || (takes_ref(op) && ops::knowledge(op).is_some_and(|known| known.forwards))
}

fn takes_ref(op: &str) -> bool {
    let changes = op.starts_with("Apply") || op.starts_with("SparseApply") || op.starts_with("Scatter");
    let assigns = matches!(op, "Assign" | "AssignAdd" | "AssignSub" | "CountUpTo" | "IsVariableInitialized");
    let accumulates = op.starts_with("Accumulator") || op.starts_with("SparseAccumulator");
    // ScatterNd makes a tensor of its own.
    assigns || accumulates || (changes && op != "ScatterNd") || matches!(op, "RefSwitch" | "RefIdentity" | "RefEnter")
}

#[cfg(test)]
pub mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::graph_def::{AttrValue, ListValue, NodeDef};

    pub fn node(name: &str, op: &str, device: &str, input: &[&str]) -> NodeDef {
        let input = input.iter().map(|name| name.to_string()).collect();
        NodeDef { name: name.to_string(), op: op.to_string(), input, device: device.to_string(), attr: BTreeMap::new() }
    }

    pub fn servers() -> Vec<String> {
        vec!["ps".to_owned()]
    }

    #[test]
    fn nodes_without_a_device_are_on_no_server() {
        let nodes = [
            node("v", "VarHandleOp", "/job:parameter/task:0", &[]),
            node("read", "ReadVariableOp", "/job:parameter/task:0", &["v"]),
            node("gradient", "Neg", "", &["read"]),
            node("far", "Neg", "/job:trainer/task:2", &[]),
        ];
        let of_gradient = |count: usize, worker| {
            let graph = GraphDef { node: nodes[..count].to_vec() };
            let planned = convert(&graph, &[], &["parameter".to_owned()], worker).unwrap();
            planned.tasks[planned.nodes[2].task as usize].clone()
        };
        assert_eq!(of_gradient(3, None), "/job:worker/task:0");
        assert_eq!(of_gradient(4, None), "/job:trainer/task:2");
        assert_eq!(of_gradient(4, Some("/job:other/task:1")), "/job:other/task:1");
    }

    #[test]
    fn an_accumulator_is_found_by_its_name() {
        let nodes = vec![
            node("sum", "ConditionalAccumulator", "/job:ps/task:0", &[]),
            node("gradient", "Neg", "/job:worker/task:0", &[]),
            node("add", "AccumulatorApplyGradient", "/job:worker/task:0", &["sum", "gradient"]),
        ];
        let planned = convert(&GraphDef { node: nodes }, &[], &servers(), None).unwrap();
        assert!(planned.nodes[0].cloneable && planned.nodes[2].stateful && !planned.nodes[2].forwards_ref);
        assert_eq!(planned.nodes[2].task, planned.nodes[0].task);
        assert_eq!(planned.edges[0].class, Class::Resource);
    }

    #[test]
    fn nodes_are_where_their_device_their_variable_or_their_colocation_says() {
        let mut beside = node("beside", "Add", "", &["read", "read:0"]);
        let class = ListValue { s: vec![b"loc:@v".to_vec()], ..ListValue::default() };
        beside.attr.insert("_class".to_string(), AttrValue { list: Some(class), ..AttrValue::default() });
        let ps = "/job:ps/replica:0/task:1/device:CPU:0";
        let nodes = vec![
            node("v", "VarHandleOp", ps, &[]),
            node("read", "ReadVariableOp", "/job:worker/task:0", &["v"]),
            node("far", "Neg", "", &["read", "^beside"]),
            beside,
        ];
        let graph = GraphDef { node: nodes };
        let planned = convert(&graph, &["far:0".to_string()], &servers(), None).unwrap();
        let task = |at: usize| planned.tasks[planned.nodes[at].task as usize].as_str();
        assert_eq!(
            [task(0), task(1), task(2), task(3)],
            ["/job:ps/task:1", "/job:ps/task:1", "/job:worker/task:0", "/job:ps/task:1"]
        );
        assert!(planned.nodes[0].cloneable && planned.nodes[1].pure_read);
        assert_eq!(planned.edges.iter().filter(|edge| edge.class == Class::Resource).count(), 1);
        assert_eq!(planned.edges.iter().filter(|edge| edge.is_control()).count(), 1);
        assert_eq!((planned.nodes.len(), planned.nodes[4].kind), (5, Kind::Fetch));
        // Only what is needed.
        assert_eq!(convert(&graph, &["read".to_string()], &servers(), None).unwrap().nodes.len(), 2);
        let error = convert(&graph, &["other".to_string()], &servers(), None).unwrap_err();
        assert_eq!(error, "the graph has no node \"other\"");
    }
}
