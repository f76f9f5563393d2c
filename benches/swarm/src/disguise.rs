//! One simulated worker's names: what it puts into recorded requests instead of the recorded worker's.

use std::cell::Cell;

use crate::recording::{Call, Recording, Taken, Variable};
use crate::star::{self, Caller, PlanName, StarCall};
use crate::wire::{self, Malformed, Value};
use starwire_protocol::star::StarError;

// tensorflow/core/framework: graph.proto, node_def.proto, attr_value.proto, device_attributes.proto.
const GRAPH_NODE: u32 = 1;
const NODE_DEVICE: u32 = 4;
const NODE_ATTR: u32 = 5;
const ENTRY_KEY: u32 = 1;
const ENTRY_VALUE: u32 = 2;
const ATTR_S: u32 = 2;
const ATTR_I: u32 = 3;
const DEVICE_NAME: u32 = 1;
const DEVICE_INCARNATION: u32 = 6;

pub struct Disguise {
    index: usize,
    /// Own task.
    pub task: String,
    session: String,
    recorded_task: String,
    recorded_incarnation: Option<u64>,
    ps: String,
    incarnation: u64,
    graph: Vec<u8>,
    requests: Cell<u64>,
}

impl Disguise {
    pub fn new(index: usize, recording: &Recording) -> Self {
        let job = recording.worker.rsplit_once(':').map_or(recording.worker.as_str(), |(job, _)| job);
        Self {
            index,
            task: format!("{job}:{index}"),
            // A server ends the sessions of a process that is gone, by name and a little later.
            session: format!("starwire-swarm-{}-{index}", std::process::id()),
            recorded_task: recording.worker.clone(),
            recorded_incarnation: recording.incarnation,
            ps: recording.ps.clone(),
            incarnation: 0,
            graph: Vec::new(),
            requests: Cell::new(0),
        }
    }

    /// TensorFlow draws step ids with this bit set.
    pub fn step_id(&self, number: u64) -> u64 {
        1 << 56 | (self.index as u64) << 32 | number & 0xFFFF_FFFF
    }

    pub fn call(&self, call: &Call, step: u64) -> Result<Vec<u8>, Malformed> {
        self.request(&call.request, &call.set, call.graph, step, "")
    }

    /// The metadata of a star call.
    pub fn star_call(&self, call: &StarCall, step: i64) -> Result<Vec<u8>, StarError> {
        call.meta(&self.caller(), step)
    }

    /// The metadata of a plan's registration.
    pub fn star_register(&self, plan: &PlanName) -> Result<Vec<u8>, StarError> {
        star::register_meta(plan, &self.caller())
    }

    fn caller(&self) -> Caller<'_> {
        Caller { session: self.session.as_bytes(), incarnation: self.incarnation }
    }

    /// A recorded request with what differs put in.
    pub fn request(
        &self,
        recorded: &[u8],
        set: &[(u32, Variable)],
        graph: Option<u32>,
        step: u64,
        key: &str,
    ) -> Result<Vec<u8>, Malformed> {
        let mut out = Vec::with_capacity(recorded.len() + 64);
        for field in wire::fields(recorded) {
            let field = field?;
            match field.value {
                Value::Bytes(bytes) if Some(field.number) == graph => {
                    wire::put(&mut out, field.number, Value::Bytes(&self.graph(bytes)?));
                }
                _ if set.iter().any(|(number, _)| *number == field.number) => {}
                _ => out.extend_from_slice(field.raw),
            }
        }
        for (number, variable) in set {
            let value = match variable {
                Variable::Session => Value::Bytes(self.session.as_bytes()),
                Variable::Task => Value::Bytes(self.task.as_bytes()),
                Variable::Graph => Value::Bytes(&self.graph),
                Variable::Key => Value::Bytes(key.as_bytes()),
                Variable::Step => Value::Varint(step),
                Variable::Unique => Value::Varint(self.unique()),
            };
            wire::put(&mut out, *number, value);
        }
        Ok(out)
    }

    /// The rendezvous key of a recorded one.
    pub fn key(&self, recorded: &str) -> String {
        let mut parts: Vec<String> = recorded.split(';').map(str::to_owned).collect();
        for part in &mut parts {
            if let Some(renamed) = self.rename(part.as_bytes()) {
                *part = renamed;
            }
        }
        if let Some(incarnation) = parts.get_mut(1) {
            if self.recorded_incarnation.is_some_and(|recorded| u64::from_str_radix(incarnation, 16) == Ok(recorded)) {
                *incarnation = format!("{:016x}", self.incarnation);
            }
        }
        parts.join(";")
    }

    /// Remembers what later requests need of an answer.
    pub fn take(&mut self, call: &Call, reply: &[u8]) -> Result<(), String> {
        for (taken, number) in &call.take {
            let found = match taken {
                Taken::Graph => match wire::find(reply, *number) {
                    Ok(Some(Value::Bytes(handle))) => {
                        self.graph = handle.to_vec();
                        true
                    }
                    _ => false,
                },
                Taken::Incarnation => {
                    let found = self.device_incarnation(reply, *number);
                    self.incarnation = found.unwrap_or(self.incarnation);
                    found.is_some()
                }
            };
            if !found {
                return Err(format!("the answer to {} lacks the expected fields ({taken:?})", call.name));
            }
        }
        Ok(())
    }

    /// The incarnation of the parameter server's first device.
    fn device_incarnation(&self, reply: &[u8], number: u32) -> Option<u64> {
        wire::fields(reply).filter_map(Result::ok).filter(|f| f.number == number).find_map(|field| {
            let Value::Bytes(device) = field.value else { return None };
            match (wire::find(device, DEVICE_NAME), wire::find(device, DEVICE_INCARNATION)) {
                (Ok(Some(Value::Bytes(name))), Ok(Some(Value::Fixed64(n)))) if name.starts_with(self.ps.as_bytes()) => {
                    Some(n)
                }
                _ => None,
            }
        })
    }

    fn unique(&self) -> u64 {
        let number = self.requests.get();
        self.requests.set(number + 1);
        (self.index as u64 + 1) << 40 | number
    }

    /// The recorded worker's name, or that of a device of it, as this worker's.
    fn rename(&self, name: &[u8]) -> Option<String> {
        let rest = name.strip_prefix(self.recorded_task.as_bytes())?;
        if !matches!(rest.first(), None | Some(b'/')) {
            return None;
        }
        Some(format!("{}{}", self.task, std::str::from_utf8(rest).ok()?))
    }

    fn graph(&self, graph: &[u8]) -> Result<Vec<u8>, Malformed> {
        map(graph, |field| match field.value {
            Value::Bytes(node) if field.number == GRAPH_NODE => self.node(node).map(Some),
            _ => Ok(None),
        })
    }

    fn node(&self, node: &[u8]) -> Result<Vec<u8>, Malformed> {
        map(node, |field| match field.value {
            Value::Bytes(device) if field.number == NODE_DEVICE => Ok(self.rename(device).map(String::into_bytes)),
            Value::Bytes(entry) if field.number == NODE_ATTR => self.attribute(entry).map(Some),
            _ => Ok(None),
        })
    }

    fn attribute(&self, entry: &[u8]) -> Result<Vec<u8>, Malformed> {
        let incarnation = wire::find(entry, ENTRY_KEY)? == Some(Value::Bytes(b"send_device_incarnation"));
        map(entry, |field| match field.value {
            Value::Bytes(value) if field.number == ENTRY_VALUE => {
                let recorded = self.recorded_incarnation.filter(|_| incarnation).map(Value::Varint);
                if recorded.is_some() && wire::find(value, ATTR_I)? == recorded {
                    let mut changed = Vec::new();
                    wire::put(&mut changed, ATTR_I, Value::Varint(self.incarnation));
                    return Ok(Some(changed));
                }
                let renamed = map(value, |field| match field.value {
                    Value::Bytes(text) if field.number == ATTR_S => Ok(self.rename(text).map(String::into_bytes)),
                    _ => Ok(None),
                });
                renamed.map(Some)
            }
            _ => Ok(None),
        })
    }
}

/// A message with some of its nested parts replaced.
fn map(
    message: &[u8],
    mut change: impl FnMut(wire::Field<'_>) -> Result<Option<Vec<u8>>, Malformed>,
) -> Result<Vec<u8>, Malformed> {
    let mut out = Vec::with_capacity(message.len() + 16);
    for field in wire::fields(message) {
        let field = field?;
        match change(field)? {
            Some(changed) => wire::put(&mut out, field.number, Value::Bytes(&changed)),
            None => out.extend_from_slice(field.raw),
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PS: &str = "/job:ps/replica:0/task:0";
    const WORKER: &str = "/job:worker/replica:0/task:0";

    fn disguise(index: usize) -> Disguise {
        let recording = Recording {
            model: String::new(),
            ps: PS.to_owned(),
            worker: WORKER.to_owned(),
            incarnation: Some(0xAB),
            setup: Vec::new(),
            plans: Default::default(),
            steps: Vec::new(),
        };
        Disguise { incarnation: 0xCD, ..Disguise::new(index, &recording) }
    }

    fn message(fields: &[(u32, Value<'_>)]) -> Vec<u8> {
        let mut out = Vec::new();
        fields.iter().for_each(|(number, value)| wire::put(&mut out, *number, *value));
        out
    }

    fn attribute(name: &str, value: &[(u32, Value<'_>)]) -> Vec<u8> {
        message(&[(1, Value::Bytes(name.as_bytes())), (2, Value::Bytes(&message(value)))])
    }

    fn node(task: &str, incarnation: u64) -> Vec<u8> {
        let device = format!("{task}/device:CPU:0");
        let name = attribute("send_device", &[(2, Value::Bytes(device.as_bytes()))]);
        let number = attribute("send_device_incarnation", &[(3, Value::Varint(incarnation))]);
        let parts = [(1, Value::Bytes(b"n")), (5, Value::Bytes(&name)), (5, Value::Bytes(&number))];
        message(&[(4, Value::Varint(7)), (1, Value::Bytes(&message(&parts)))])
    }

    #[test]
    fn names_are_changed_wherever_they_stand() {
        let disguise = disguise(12);
        let other = "/job:worker/replica:0/task:12";
        for (from, to) in [
            (node(WORKER, 5), node(other, 5)),
            (node(PS, 0xAB), node(PS, 0xCD)),
            // Another task whose name only begins like it.
            (node("/job:worker/replica:0/task:01", 5), node("/job:worker/replica:0/task:01", 5)),
        ] {
            assert_eq!(disguise.graph(&from), Ok(to));
        }
        let key = format!("{PS}/device:CPU:0;00000000000000ab;{WORKER}/device:CPU:0;edge_1_x;0:0");
        assert_eq!(disguise.key(&key), format!("{PS}/device:CPU:0;00000000000000cd;{other}/device:CPU:0;edge_1_x;0:0"));
    }

    #[test]
    fn requests_keep_what_nobody_changes() {
        let disguise = disguise(3);
        let recorded = message(&[(1, Value::Bytes(b"old")), (9, Value::Varint(4)), (2, Value::Varint(1))]);
        let set = [(1, Variable::Session), (2, Variable::Step), (11, Variable::Unique)];
        let first = disguise.request(&recorded, &set, None, 77, "").unwrap();
        let want = [
            (9, Value::Varint(4)),
            (1, Value::Bytes(disguise.session.as_bytes())),
            (2, Value::Varint(77)),
            (11, Value::Varint(4 << 40)),
        ];
        assert_eq!(first, message(&want));
        assert_ne!(disguise.request(&recorded, &set, None, 77, "").unwrap(), first);
        assert_eq!(disguise.request(b"\xff", &set, None, 0, ""), Err(Malformed));
    }

    #[test]
    fn answers_are_remembered() {
        let mut disguise = disguise(0);
        let device = |name: &str, n| message(&[(1, Value::Bytes(name.as_bytes())), (6, Value::Fixed64(n))]);
        let (theirs, ours) = (device("/job:x/device:CPU:0", 1), device(&format!("{PS}/device:CPU:0"), 9));
        let reply = message(&[(1, Value::Bytes(&theirs)), (1, Value::Bytes(&ours))]);
        let call = |taken| Call {
            name: "GetStatus".to_owned(),
            method: 1,
            request: Default::default(),
            set: Vec::new(),
            graph: None,
            take: vec![(taken, 1)],
        };
        disguise.take(&call(Taken::Incarnation), &reply).unwrap();
        assert_eq!(disguise.incarnation, 9);
        assert!(disguise.take(&call(Taken::Incarnation), b"").is_err());
        disguise.take(&call(Taken::Graph), &message(&[(1, Value::Bytes(b"handle"))])).unwrap();
        assert_eq!(disguise.graph, b"handle");
    }
}
