//! What a step consists of: the file that benches/swarm/record.py writes.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value as Json;

use crate::star::{PlanName, StarCall};
use crate::tensor::Tensor;

const FORMAT: u64 = 1;
/// Operations of a step: their index shares a number with the step's.
pub const MAX_OPERATIONS: usize = 1 << 16;

pub struct Recording {
    pub model: String,
    /// The task of the parameter server, and of the worker that was recorded.
    pub ps: String,
    pub worker: String,
    /// The incarnation that the parameter server's device had. None: no step pulls from it.
    pub incarnation: Option<u64>,
    /// One after the other, before the first step.
    pub setup: Vec<Call>,
    /// What star calls run, by name.
    pub plans: HashMap<PlanName, Arc<[Bytes]>>,
    /// Workers make them in turn.
    pub steps: Vec<Step>,
}

pub struct Step {
    pub operations: Vec<Operation>,
    /// Which operation answers the request for the tensor of this name.
    pub pushes: HashMap<String, usize>,
    /// Operations that have to end before the step does.
    pub waited: usize,
}

pub struct Operation {
    pub what: What,
    /// How many others it waits for, and who waits for it.
    pub needs: usize,
    pub followers: Vec<usize>,
    /// The step ends only after it.
    pub wait: bool,
}

pub enum What {
    Call(Call),
    Pull(Pull),
    Push(Arc<Tensor>),
    Star(StarCall),
}

/// A method call to the parameter server.
pub struct Call {
    pub name: String,
    pub method: u16,
    pub request: Bytes,
    pub set: Vec<(u32, Variable)>,
    /// The field that holds a graph in which names and incarnations are to be changed.
    pub graph: Option<u32>,
    pub take: Vec<(Taken, u32)>,
}

/// A tensor that the worker asks for.
pub struct Pull {
    pub key: String,
    /// For protocols that ask with a message.
    pub request: Bytes,
    pub set: Vec<(u32, Variable)>,
    pub bytes: u64,
}

/// What differs from worker to worker, or from step to step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variable {
    Session,
    Task,
    Graph,
    Step,
    Key,
    /// A number that no other request has.
    Unique,
}

/// What is remembered of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    Incarnation,
    Graph,
}

impl Recording {
    pub fn load(path: &Path) -> Result<Self, String> {
        let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Self::parse(bytes.into())
            .map_err(|why| format!("{} is not a recording of benches/swarm/record.py: {why}", path.display()))
    }

    pub fn parse(file: Bytes) -> Result<Self, String> {
        let end = file.iter().position(|b| *b == b'\n').ok_or("the first line is missing")?;
        let json: Json = serde_json::from_slice(&file[..end]).map_err(|error| error.to_string())?;
        let blob = file.slice(end + 1..);
        if number(&json, "starwire_swarm")? != FORMAT {
            return Err(format!("the format is not {FORMAT}"));
        }
        let setup = list(&json, "setup")?.iter().map(|call| parse_call(call, &blob)).collect::<Result<_, _>>()?;
        let plans = parse_plans(&json, &blob)?;
        let steps: Vec<Step> =
            list(&json, "steps")?.iter().map(|step| parse_step(step, &blob)).collect::<Result<_, _>>()?;
        if steps.is_empty() {
            return Err("the steps are missing".to_owned());
        }
        for operation in steps.iter().flat_map(|step| &step.operations) {
            if matches!(&operation.what, What::Star(call) if !plans.contains_key(&call.plan)) {
                return Err("a star call's plan is missing".to_owned());
            }
        }
        Ok(Self {
            model: text(&json, "model")?,
            ps: text(&json, "ps")?,
            worker: text(&json, "worker")?,
            incarnation: incarnation(&steps),
            setup,
            plans,
            steps,
        })
    }

    /// Only star protocols have these calls.
    pub fn has_star_calls(&self) -> bool {
        self.steps.iter().flat_map(|step| &step.operations).any(|operation| matches!(operation.what, What::Star(_)))
    }
}

/// A pull's key begins with its source: the parameter server's device, and its incarnation.
fn incarnation(steps: &[Step]) -> Option<u64> {
    let pulls = steps.iter().flat_map(|step| &step.operations).find_map(|operation| match &operation.what {
        What::Pull(pull) => Some(pull),
        _ => None,
    })?;
    u64::from_str_radix(pulls.key.split(';').nth(1)?, 16).ok()
}

fn parse_step(json: &Json, blob: &Bytes) -> Result<Step, String> {
    let listed = list(json, "operations")?;
    if listed.is_empty() || listed.len() > MAX_OPERATIONS {
        return Err(format!("a step has {} operations", listed.len()));
    }
    let mut operations = Vec::with_capacity(listed.len());
    let mut pushes = HashMap::new();
    for (index, entry) in listed.iter().enumerate() {
        let what = if entry.get("call").is_some() {
            What::Call(parse_call(entry, blob)?)
        } else if entry.get("pull").is_some() {
            let (request, set) = (place(entry, "request", blob)?, parse_set(entry)?);
            What::Pull(Pull { key: text(entry, "pull")?, request, set, bytes: number(entry, "bytes")? })
        } else if entry.get("star").is_some() {
            What::Star(parse_star(entry, blob)?)
        } else {
            let key = text(entry, "push")?;
            let edge = key.split(';').nth(3).ok_or_else(|| format!("{key:?} is not a rendezvous key"))?;
            pushes.insert(edge.to_owned(), index);
            What::Push(Arc::new(parse_tensor(entry, blob)?))
        };
        let wait = entry.get("wait").is_none_or(|wait| wait.as_bool() != Some(false));
        operations.push(Operation { what, needs: 0, followers: Vec::new(), wait });
    }
    for (index, entry) in listed.iter().enumerate() {
        for before in list(entry, "after")? {
            let before = before.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n < listed.len());
            let before = before.ok_or("an operation waits for one that does not exist")?;
            operations[before].followers.push(index);
            operations[index].needs += 1;
        }
    }
    let waited = operations.iter().filter(|operation| operation.wait).count();
    Ok(Step { operations, pushes, waited })
}

fn parse_call(json: &Json, blob: &Bytes) -> Result<Call, String> {
    let mut take = Vec::new();
    for (name, field) in json.get("take").and_then(Json::as_object).into_iter().flatten() {
        let taken = match name.as_str() {
            "incarnation" => Taken::Incarnation,
            "graph" => Taken::Graph,
            other => return Err(format!("cannot take {other:?} from an answer")),
        };
        take.push((taken, small(field).ok_or("a field is not a number")?));
    }
    let method = u16::try_from(number(json, "method")?).map_err(|_| "a method's number is too large")?;
    Ok(Call {
        name: text(json, "call")?,
        method,
        request: place(json, "request", blob)?,
        set: parse_set(json)?,
        graph: json.get("graph").and_then(small),
        take,
    })
}

fn parse_star(json: &Json, blob: &Bytes) -> Result<StarCall, String> {
    let parts = list(json, "parts")?.iter().map(|part| place_of(part, "parts", blob)).collect::<Result<_, _>>()?;
    let tensors = [number(json, "feeds")?, number(json, "fetches")?];
    let meta = place(json, "meta", blob)?;
    StarCall::new(&meta, parts, number(json, "bytes")?, tensors).map_err(|error| error.to_string())
}

fn parse_plans(json: &Json, blob: &Bytes) -> Result<HashMap<PlanName, Arc<[Bytes]>>, String> {
    let listed = json.get("plans").and_then(Json::as_object).into_iter().flatten();
    listed.map(|(name, at)| Ok((plan_name(name)?, Arc::from([place_of(at, "plans", blob)?])))).collect()
}

/// In hexadecimal.
fn plan_name(text: &str) -> Result<PlanName, String> {
    let bad = || format!("{text:?} is not the name of a plan");
    let mut name = PlanName::default();
    if text.len() != 2 * name.len() {
        return Err(bad());
    }
    for (index, byte) in name.iter_mut().enumerate() {
        let digits = text.get(2 * index..2 * index + 2).ok_or_else(bad)?;
        *byte = u8::from_str_radix(digits, 16).map_err(|_| bad())?;
    }
    Ok(name)
}

fn parse_set(json: &Json) -> Result<Vec<(u32, Variable)>, String> {
    let given = json.get("set").and_then(Json::as_object).ok_or("\"set\" is missing")?;
    let one = |(field, variable): (&String, &Json)| {
        let variable = match variable.as_str() {
            Some("session") => Variable::Session,
            Some("task") => Variable::Task,
            Some("graph") => Variable::Graph,
            Some("step") => Variable::Step,
            Some("key") => Variable::Key,
            Some("unique") => Variable::Unique,
            _ => return Err(format!("unknown variable {variable}")),
        };
        Ok((field.parse().map_err(|_| format!("{field:?} is not a field's number"))?, variable))
    };
    given.iter().map(one).collect()
}

fn parse_tensor(json: &Json, blob: &Bytes) -> Result<Tensor, String> {
    let dtype = u16::try_from(number(json, "dtype")?).map_err(|_| "a type's number is too large")?;
    let dims: Option<Vec<u64>> = list(json, "dims")?.iter().map(Json::as_u64).collect();
    let content = place(json, "content", blob)?;
    Tensor::new(dtype, &dims.ok_or("a dimension is not a number")?, content).ok_or("too many dimensions".to_owned())
}

fn place(json: &Json, name: &str, blob: &Bytes) -> Result<Bytes, String> {
    place_of(json.get(name).unwrap_or(&Json::Null), name, blob)
}

fn place_of(json: &Json, name: &str, blob: &Bytes) -> Result<Bytes, String> {
    let Some([offset, len]) = json.as_array().map(Vec::as_slice) else {
        return Err(format!("{name:?} is not a place in the file"));
    };
    let number = |n: &Json| n.as_u64().and_then(|n| usize::try_from(n).ok());
    let range = number(offset).zip(number(len)).and_then(|(from, len)| Some(from..from.checked_add(len)?));
    range
        .filter(|r| r.end <= blob.len())
        .map(|r| blob.slice(r))
        .ok_or_else(|| format!("{name:?} lies outside the file"))
}

fn list<'a>(json: &'a Json, name: &str) -> Result<&'a [Json], String> {
    json.get(name).and_then(Json::as_array).map(Vec::as_slice).ok_or_else(|| format!("{name:?} is missing"))
}

fn text(json: &Json, name: &str) -> Result<String, String> {
    json.get(name).and_then(Json::as_str).map(str::to_owned).ok_or_else(|| format!("{name:?} is missing"))
}

fn number(json: &Json, name: &str) -> Result<u64, String> {
    json.get(name).and_then(Json::as_u64).ok_or_else(|| format!("{name:?} is missing"))
}

fn small(json: &Json) -> Option<u32> {
    json.as_u64().and_then(|n| u32::try_from(n).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{"starwire_swarm":1,"model":"m","ps":"/job:ps/replica:0/task:0","worker":"w","setup":[{"call":"GetStatus","method":1,"request":[0,0],"set":{},"take":{"incarnation":1}}],"steps":[{"operations":[{"call":"RunGraph","method":6,"request":[0,2],"set":{"2":"step"},"after":[]},{"pull":"/job:ps/replica:0/task:0/device:CPU:0;00000000000000ff;w;e1;0:0","request":[2,2],"set":{"1":"step"},"bytes":4,"after":[]},{"push":"w;1;ps;e2;0:0","dtype":1,"dims":[1],"content":[4,4],"after":[1]},{"call":"CleanupGraph","method":7,"request":[0,0],"set":{},"after":[0,1,2],"wait":false}]}]}
aabbcccc"#;

    fn parse(text: &str) -> Result<Recording, String> {
        Recording::parse(Bytes::copy_from_slice(text.as_bytes()))
    }

    #[test]
    fn a_step_is_what_was_written_down() {
        let recording = parse(FILE).unwrap();
        assert_eq!(recording.incarnation, Some(0xff));
        let step = &recording.steps[0];
        assert_eq!(step.waited, 3);
        assert_eq!(step.operations.iter().map(|o| o.needs).collect::<Vec<_>>(), [0, 0, 1, 3]);
        assert_eq!(step.operations[1].followers, [2, 3]);
        assert_eq!(step.pushes["e2"], 2);
        let What::Pull(pull) = &step.operations[1].what else { panic!("a pull") };
        assert_eq!(&pull.request[..], b"bb");
        assert_eq!(recording.setup[0].take, [(Taken::Incarnation, 1)]);
    }

    #[test]
    fn other_files_are_refused() {
        for (from, to, why) in [
            ("\"starwire_swarm\":1", "\"starwire_swarm\":2", "the format is not 1"),
            ("[4,4]", "[4,5]", "\"content\" lies outside the file"),
            ("\"after\":[1]", "\"after\":[9]", "waits for one that does not exist"),
            ("{\"2\":\"step\"}", "{\"2\":\"stop\"}", "unknown variable \"stop\""),
            ("\"model\":\"m\",", "", "\"model\" is missing"),
        ] {
            assert!(FILE.contains(from));
            let error = parse(&FILE.replace(from, to)).err().unwrap_or_default();
            assert!(error.contains(why), "{error}");
        }
        assert!(parse("").is_err());
        assert!(parse("no\n").is_err());
    }
}
