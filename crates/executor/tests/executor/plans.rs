//! The graphs that a plan refuses, and the lifetimes that it computes.

use starwire_executor::{CONTROL, Edge, Node, Plan, PlanError, kind};

fn node(kind: u32, inputs: u32, outputs: u32) -> Node {
    Node { kind, inputs, outputs, cost_ns: 0 }
}

fn edge(src: u32, output: u32, dst: u32, input: u32) -> Edge {
    Edge { src, output, dst, input }
}

fn refused(nodes: &[Node], edges: &[Edge]) -> PlanError {
    Plan::new(nodes, edges).err().expect("refused")
}

#[test]
fn nonsense_is_refused() {
    let pair = [node(0, 0, 1), node(0, 1, 0)];
    assert_eq!(refused(&pair, &[]), PlanError::NotFedOnce(1, 0, 0));
    assert_eq!(refused(&pair, &[edge(0, 0, 1, 0), edge(0, 0, 1, 0)]), PlanError::NotFedOnce(1, 0, 2));
    for bad in [edge(0, 1, 1, 0), edge(0, 0, 1, 1), edge(2, 0, 1, 0), edge(0, 0, 2, 0), edge(0, CONTROL, 1, 0)] {
        assert_eq!(refused(&pair, &[bad]), PlanError::NoSuchEnd(bad.src, bad.output, bad.dst, bad.input));
    }
    assert_eq!(refused(&[node(1 << 20, 0, 0)], &[]), PlanError::UnknownKind(0, 1 << 20));
    let nothing = [node(0, 0, 1), node(kind::NOTHING, 1, 0)];
    assert_eq!(refused(&nothing, &[edge(0, 0, 1, 0)]), PlanError::NothingToRun(1));
    let ring = [node(0, 0, 0), node(0, 0, 0), node(0, 0, 0)];
    let around = [edge(1, CONTROL, 2, CONTROL), edge(2, CONTROL, 1, CONTROL)];
    assert_eq!(refused(&ring, &around), PlanError::Cycle(1));
    assert_eq!(refused(&[node(0, 0, u32::MAX), node(0, 0, 9)], &[]), PlanError::TooLarge(u32::MAX as usize + 9));
}

#[test]
fn only_plain_nodes_run_straight() {
    for (bits, straight) in [(0, true), (kind::NOTHING, true), (kind::CHEAP, true), (kind::ASYNC, false)] {
        let plan = Plan::new(&[node(bits, 0, 1)], &[]).unwrap();
        assert_eq!(plan.is_straight(), straight, "{bits}");
    }
}

#[test]
fn values_are_released_by_their_last_reader() {
    // 0 is read by 1 and, twice, by 2; 3 is static.
    let nodes = [node(0, 0, 1), node(0, 1, 0), node(0, 2, 0), node(kind::STATIC | kind::NOTHING, 0, 1), node(0, 2, 0)];
    let edges = [
        edge(0, 0, 1, 0),
        edge(0, 0, 2, 0),
        edge(0, 0, 2, 1),
        edge(3, 0, 4, 0),
        edge(0, 0, 4, 1),
        edge(2, CONTROL, 4, CONTROL),
    ];
    let plan = Plan::new(&nodes, &edges).unwrap();
    assert_eq!((plan.nodes(), plan.slots()), (5, 2));
    assert_eq!(plan.lists(), [0, 0], "the last reader gets slot 0 for itself, and releases it");
}
