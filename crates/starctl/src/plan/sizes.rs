//! How many bytes travel along an edge, as far as a GraphDef tells: of variables, of what is read of them and of what
//! is applied to them as a whole; and of everything, if the graph was written with its shapes.

use std::collections::BTreeMap;

use crate::graph_def::{AttrValue, GraphDef, NodeDef, Shape, is_ref_variable};

/// What output `output` of node `src` carries to input `place` of node `dst`.
pub fn bytes(
    graph: &GraphDef,
    inputs: &[Vec<(usize, i32)>],
    (src, output): (usize, i32),
    (dst, place): (usize, i32),
) -> Option<u64> {
    let variable = |at: usize| {
        let (source, _) = inputs[at].first()?;
        let it = &graph.node[*source];
        (it.op == "VarHandleOp" || is_ref_variable(&it.op)).then(|| declared(it)).flatten()
    };
    let read = || matches!(graph.node[src].op.as_str(), "ReadVariableOp" | "Identity").then(|| variable(src)).flatten();
    let applied = || if whole(&graph.node[dst].op) == Some(place) { variable(dst) } else { None };
    inferred(&graph.node[src], output).or_else(read).or_else(applied)
}

/// Which input of an update is as large as its variable.
fn whole(op: &str) -> Option<i32> {
    let op = op.strip_prefix("Resource").unwrap_or(op);
    match op {
        "Assign" | "AssignAdd" | "AssignSub" => Some(1),
        "AssignVariableOp" | "AssignAddVariableOp" | "AssignSubVariableOp" => Some(1),
        "ApplyGradientDescent" => Some(2),
        "ApplyMomentum" | "ApplyKerasMomentum" | "ApplyAdagrad" | "ApplyFtrl" => Some(3),
        "ApplyAdagradV2" => Some(4),
        "ApplyAdadelta" => Some(6),
        "ApplyRMSProp" => Some(7),
        "ApplyAdam" => Some(9),
        _ => None,
    }
}

fn declared(variable: &NodeDef) -> Option<u64> {
    size(variable.attr.get("shape")?.shape.as_ref()?, &variable.attr)
}

fn inferred(node: &NodeDef, output: i32) -> Option<u64> {
    let shapes = &node.attr.get("_output_shapes")?.list.as_ref()?.shape;
    size(shapes.get(usize::try_from(output).ok()?)?, &node.attr)
}

fn size(shape: &Shape, attr: &BTreeMap<String, AttrValue>) -> Option<u64> {
    let dtype = attr.get("dtype").or_else(|| attr.get("T"))?.dtype;
    // The numbers of DataType, where an element has a size.
    let element = match dtype {
        4 | 6 | 10 => 1,
        5 | 14 | 17 | 19 => 2,
        1 | 3 | 22 => 4,
        2 | 8 | 9 | 23 => 8,
        18 => 16,
        _ => return None,
    };
    if shape.unknown_rank {
        return None;
    }
    shape.dim.iter().try_fold(element, |bytes: u64, dim| bytes.checked_mul(u64::try_from(dim.size).ok()?))
}
