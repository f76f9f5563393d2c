//! `starctl plan`: what would cross between tasks, and in which calls or groups.

mod convert;

mod sizes;

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use prost::Message;
use starwire_engine::config::{Config, Fusion, ProcessEnv};
use starwire_planner::graph::Graph;
use starwire_planner::parts::UNMEASURED_BYTES;
use starwire_planner::placement::Roles;
use starwire_planner::star::Style;
use starwire_planner::{fuse, star, unordered};

use self::convert::{Planned, convert, is_server};
use crate::failure::Failure;
use crate::graph_def::GraphDef;
use crate::output::print;

/// Show how a graph is split: calls, rounds, groups, and what stays unchanged and why
#[derive(clap::Args)]
#[command(after_help = "\
tf.io.write_graph(graph, \".\", \"graph.pb\", as_text=False) writes such a file. The plan knows
operations by name only: it is a close estimate of the plan that a server makes with TensorFlow.

  starctl plan --as star_server_lite --fetch train_op,loss:0 graph.pb")]
pub struct Args {
    /// A binary GraphDef with devices
    #[arg(value_name = "GRAPH.pb")]
    file: PathBuf,
    /// The protocol or the fusion that splits it
    #[arg(long = "as", value_enum, default_value_t = Planner::StarServer)]
    planner: Planner,
    /// Nodes that a step runs (a) and fetches (a:0); without: the whole graph
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    fetch: Vec<String>,
    /// Jobs of parameter servers
    #[arg(long, value_name = "JOBS", value_delimiter = ',', default_value = "ps")]
    servers: Vec<String>,
    /// Bytes that justify a separate call; 0: none do [default: STARWIRE_STAR_SPLIT_BYTES, else 1048576]
    #[arg(long, value_name = "BYTES")]
    split: Option<u64>,
    /// Task of nodes without a device [default: the first one in the graph that is no parameter server,
    /// else /job:worker/task:0]
    #[arg(long, value_name = "TASK", value_parser = task)]
    worker: Option<String>,
}

fn task(text: &str) -> Result<String, String> {
    convert::task_of(text).ok_or_else(|| "a task is /job:worker/task:0, for example".to_owned())
}

#[derive(Clone, Copy, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum Planner {
    StarServer,
    StarServerLite,
    TensorFuse,
}

pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let failed = |reason: String| Failure::Failed(format!("{}: {reason}", args.file.display()));
    if let Some(added) = Config::operations_from_env(&ProcessEnv)? {
        added.install()?;
    }
    let bytes = std::fs::read(&args.file).map_err(|error| failed(error.to_string()))?;
    let graph = GraphDef::decode(bytes.as_slice()).map_err(|error| failed(format!("not a GraphDef: {error}")))?;
    if graph.node.is_empty() {
        return Err(failed("not a GraphDef, or one without nodes".to_owned()));
    }
    let planned = convert(&graph, &args.fetch, &args.servers, args.worker.as_deref()).map_err(failed)?;
    let split = match args.split {
        Some(bytes) => bytes,
        None => Config::star_split_bytes_from_env(&ProcessEnv)?.unwrap_or(UNMEASURED_BYTES),
    };
    let style = match args.planner {
        Planner::StarServer => Some(Style::Robust),
        Planner::StarServerLite => Some(Style::Lite),
        Planner::TensorFuse => None,
    };
    print(show(planned, &args.servers, style, split).map_err(failed)?)?;
    Ok(ExitCode::SUCCESS)
}

/// `style`: of star calls; none: groups of tensors.
fn show(planned: Planned, servers: &[String], style: Option<Style>, split: u64) -> Result<String, String> {
    let Planned { mut nodes, mut edges, names, tasks } = planned;
    let name = |node: u32| names.get(usize::try_from(node).ok()?).cloned();
    let roles = Roles { servers: tasks.iter().map(|task| is_server(task, servers)).collect() };
    if style.is_some() {
        let graph = Graph::new(nodes.clone(), edges.clone(), Some(&name)).map_err(|error| error.to_string())?;
        let orders = unordered::orders(&graph).map_err(|error| error.to_string())?;
        unordered::apply(&mut nodes, &mut edges, &orders);
    }
    let graph = Graph::new(nodes, edges, Some(&name)).map_err(|error| error.to_string())?;
    let mut text = String::new();
    for (number, task) in tasks.iter().enumerate() {
        let _ = writeln!(text, "task {number}: {task}");
    }
    let Some(style) = style else {
        let plan = fuse::plan(&graph, &Fusion::default().limits).map_err(|error| error.to_string())?;
        return Ok(text + &plan.describe(&graph).to_string());
    };
    let plan = star::plan(&graph, &roles, style, split).map_err(|error| error.to_string())?;
    Ok(text + &plan.describe(&graph, &tasks).to_string())
}

#[cfg(test)]
mod tests {
    use super::convert::tests::{node, servers};
    use super::*;
    use crate::graph_def::{AttrValue, Dim, ListValue, Shape};

    fn training() -> GraphDef {
        let ps = "/job:ps/task:0";
        let nodes = vec![
            node("v", "VarHandleOp", ps, &[]),
            node("v/read", "ReadVariableOp", ps, &["v"]),
            node("gradient", "Neg", "/job:worker/task:0", &["v/read"]),
            node("rate", "Const", ps, &[]),
            node("update", "ResourceApplyGradientDescent", "", &["v", "rate", "gradient"]),
            node("loop", "Enter", ps, &["gradient"]),
            node("out", "Exit", ps, &["loop"]),
        ];
        GraphDef { node: nodes }
    }

    fn plan(fetches: &[&str], style: Option<Style>) -> String {
        let fetches: Vec<String> = fetches.iter().map(|fetch| fetch.to_string()).collect();
        show(convert(&training(), &fetches, &servers(), None).unwrap(), &servers(), style, 1 << 20).unwrap()
    }

    /// Two variables of 2 MB, one of which the graph was written with.
    fn large() -> GraphDef {
        let ps = "/job:ps/task:0";
        let shape = Shape { dim: vec![Dim { size: 1024 }, Dim { size: 512 }], unknown_rank: false };
        let float = || AttrValue { dtype: 1, ..AttrValue::default() };
        let mut nodes = Vec::new();
        for name in ["a", "b"] {
            let mut variable = node(name, "VariableV2", ps, &[]);
            variable.attr.insert("shape".to_owned(), AttrValue { shape: Some(shape.clone()), ..AttrValue::default() });
            variable.attr.insert("dtype".to_owned(), float());
            let mut gradient =
                node(&format!("{name}/gradient"), "Neg", "/job:worker/task:0", &[&format!("{name}/read")]);
            if name == "a" {
                let list = ListValue { shape: vec![shape.clone()], ..ListValue::default() };
                gradient
                    .attr
                    .insert("_output_shapes".to_owned(), AttrValue { list: Some(list), ..AttrValue::default() });
                gradient.attr.insert("T".to_owned(), float());
            }
            nodes.extend([
                variable,
                node(&format!("{name}/read"), "Identity", ps, &[name]),
                gradient,
                node(&format!("{name}/update"), "AssignSub", ps, &[name, &format!("{name}/gradient")]),
            ]);
        }
        GraphDef { node: nodes }
    }

    #[test]
    fn what_is_large_has_calls_of_its_own() {
        let calls = |split: u64| {
            let planned = convert(&large(), &[], &servers(), None).unwrap();
            show(planned, &["ps".to_owned()], Some(Style::Robust), split).unwrap()
        };
        assert!(calls(0).contains("2 calls in 2 rounds run 4 of 8 nodes"), "{}", calls(0));
        assert!(calls(1 << 20).contains("4 calls in 2 rounds run 4 of 8 nodes"), "{}", calls(1 << 20));
        assert!(calls(1 << 22).contains("2 calls in 2 rounds"), "{}", calls(1 << 22));
    }

    #[test]
    fn a_pull_and_a_push() {
        let expected = "\
task 0: /job:ps/task:0
task 1: /job:worker/task:0
2 calls in 2 rounds run 2 of 5 nodes
call 0, round 1, to /job:ps/task:0
  runs      \"v/read\"
  copies    \"v\"
  brings    \"v/read\":0
call 1, round 2, to /job:ps/task:0
  runs      \"update\"
  copies    \"v\", \"rate\"
  takes     \"gradient\":0
";
        assert_eq!(plan(&["update"], Some(Style::Robust)), expected);
    }

    #[test]
    fn what_stays_says_why() {
        let whole = plan(&[], Some(Style::Lite));
        assert!(whole.ends_with("left to send and receive (in a loop): \"loop\", \"out\"\n"), "{whole}");
        let fused = plan(&["update"], None);
        assert!(fused.contains("\"gradient\":0 to task 0 alone: NoCompany"), "{fused}");
    }
}
