//! The contents of the handshake: names and limits.

use super::digest::FEATURE_DIGESTS;
use super::error::{ConnectionError, ProtocolError, code};
use super::limits::{Limits, MAX_HELLO_STRING};
use super::role::Role;
use super::settings::{PeerInfo, Settings};

/// Feature bit: this side can move connections to RDMA queue pairs.
pub const FEATURE_QUEUE_PAIRS: u64 = 1;
/// Feature bit: this side understands loans. A side lends only to a peer that announced that it can read
/// (`allow_lending`).
pub const FEATURE_LENDING: u64 = 2;

mod tag {
    pub const PROTOCOL: u16 = 1;
    pub const TASK: u16 = 2;
    pub const INCARNATION: u16 = 3;
    pub const EXPECTED_TASK: u16 = 4;
    pub const CLUSTER: u16 = 5;
    // 6 was a nonce, 7 and 8 were the host and the process.
    pub const LIMITS: u16 = 9;
    pub const REQUIRED_FEATURES: u16 = 10;
    // 11 said that there is a secret.
    pub const ADDRESS: u16 = 12;
    pub const MOVED_TO: u16 = 13;
}

/// The contents of a HELLO or WELCOME.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub features: u64,
    pub required_features: u64,
    pub protocol: String,
    pub task: String,
    pub incarnation: u64,
    pub expected_task: Option<String>,
    pub cluster_id: String,
    /// Of the client; may be empty.
    pub address: String,
    /// Of the server: another process has its task now. May be empty.
    pub moved_to: String,
    pub limits: Limits,
}

impl Hello {
    /// Our own. `features` are those that we offer (HELLO) or that both sides have (WELCOME).
    pub fn ours(settings: &Settings, features: u64) -> Hello {
        Hello {
            features,
            required_features: settings.required_features,
            protocol: settings.protocol.clone(),
            task: settings.task.clone(),
            incarnation: settings.incarnation,
            expected_task: settings.expected_task.clone(),
            cluster_id: settings.cluster_id.clone(),
            address: settings.address.clone(),
            moved_to: settings.moved_to.clone(),
            limits: settings.limits,
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(512);
        let mut field = |tag: u16, bytes: &[u8]| {
            // Strings are cut to the peer's limit, so that it refuses such `Settings` with a clear message instead of a
            // protocol error.
            let bytes = &bytes[..bytes.len().min(MAX_HELLO_STRING)];
            out.extend_from_slice(&tag.to_le_bytes());
            let len = u16::try_from(bytes.len()).expect("MAX_HELLO_STRING fits");
            out.extend_from_slice(&len.to_le_bytes());
            out.extend_from_slice(bytes);
        };
        field(tag::PROTOCOL, self.protocol.as_bytes());
        field(tag::TASK, self.task.as_bytes());
        field(tag::INCARNATION, &self.incarnation.to_le_bytes());
        if let Some(task) = &self.expected_task {
            field(tag::EXPECTED_TASK, task.as_bytes());
        }
        if !self.cluster_id.is_empty() {
            field(tag::CLUSTER, self.cluster_id.as_bytes());
        }
        if !self.address.is_empty() {
            field(tag::ADDRESS, self.address.as_bytes());
        }
        if !self.moved_to.is_empty() {
            field(tag::MOVED_TO, self.moved_to.as_bytes());
        }
        field(tag::LIMITS, &encode_limits(&self.limits));
        if self.required_features != 0 {
            field(tag::REQUIRED_FEATURES, &self.required_features.to_le_bytes());
        }
        out
    }

    /// Reads the fields; `frame` is for messages. Unknown fields are skipped, so that later versions may add some.
    pub fn decode(frame: &'static str, features: u64, fields: &[u8]) -> Result<Hello, ProtocolError> {
        let error = |why| ProtocolError::Frame { frame, why };
        let mut found = Fields::default();
        let mut rest = fields;
        let mut seen = 0u64;
        while !rest.is_empty() {
            let (head, after) = rest.split_at_checked(4).ok_or_else(|| error("a field is truncated"))?;
            let tag = u16::from_le_bytes([head[0], head[1]]);
            let len = usize::from(u16::from_le_bytes([head[2], head[3]]));
            if len > MAX_HELLO_STRING {
                let (value, limit) = (len as u64, MAX_HELLO_STRING as u64);
                return Err(ProtocolError::TooLarge { what: "length of a handshake field", value, limit });
            }
            let (value, after) = after.split_at_checked(len).ok_or_else(|| error("a field is truncated"))?;
            rest = after;
            if tag < 64 {
                if seen & (1 << tag) != 0 {
                    return Err(error("a field is duplicated"));
                }
                seen |= 1 << tag;
            }
            let wrong = || error("a field has the wrong length or is not text");
            let text = || printable(value).ok_or_else(wrong);
            match tag {
                tag::PROTOCOL => found.protocol = Some(text()?),
                tag::TASK => found.task = Some(text()?),
                tag::INCARNATION => found.incarnation = Some(number(value).ok_or_else(wrong)?),
                tag::EXPECTED_TASK => found.expected_task = Some(text()?),
                tag::CLUSTER => found.cluster_id = text()?,
                tag::ADDRESS => found.address = text()?,
                tag::MOVED_TO => found.moved_to = text()?,
                tag::LIMITS => found.limits = Some(decode_limits(value).ok_or_else(wrong)?),
                tag::REQUIRED_FEATURES => found.required_features = number(value).ok_or_else(wrong)?,
                _ => {}
            }
        }
        let missing = || error("a required field is missing");
        Ok(Hello {
            features,
            required_features: found.required_features,
            protocol: found.protocol.ok_or_else(missing)?,
            task: found.task.ok_or_else(missing)?,
            incarnation: found.incarnation.ok_or_else(missing)?,
            expected_task: found.expected_task,
            cluster_id: found.cluster_id,
            address: found.address,
            moved_to: found.moved_to,
            limits: found.limits.ok_or_else(missing)?,
        })
    }

    /// The peer as the owner of the connection sees it.
    pub fn into_peer(self, features: u64, authenticated: bool) -> PeerInfo {
        PeerInfo {
            task: self.task,
            protocol: self.protocol,
            incarnation: self.incarnation,
            cluster_id: self.cluster_id,
            features,
            limits: self.limits,
            moved_to: self.moved_to,
            authenticated,
        }
    }
}

#[derive(Default)]
struct Fields {
    protocol: Option<String>,
    task: Option<String>,
    incarnation: Option<u64>,
    expected_task: Option<String>,
    cluster_id: String,
    address: String,
    moved_to: String,
    limits: Option<Limits>,
    required_features: u64,
}

/// Text that may go into a log line.
fn printable(bytes: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(bytes).ok()?;
    text.chars().all(|c| !c.is_control()).then(|| text.to_owned())
}

fn number(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

fn encode_limits(limits: &Limits) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[0..4].copy_from_slice(&limits.max_recvs.to_le_bytes());
    bytes[4..8].copy_from_slice(&limits.max_calls.to_le_bytes());
    bytes[8..16].copy_from_slice(&limits.max_call_bytes.to_le_bytes());
    bytes[16..20].copy_from_slice(&limits.max_keys.to_le_bytes());
    bytes[20..24].copy_from_slice(&limits.max_key_bytes.to_le_bytes());
    bytes[24..32].copy_from_slice(&limits.max_payload.to_le_bytes());
    bytes
}

fn decode_limits(bytes: &[u8]) -> Option<Limits> {
    let bytes: &[u8; 32] = bytes.try_into().ok()?;
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let double = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    Some(Limits {
        max_recvs: word(0),
        max_calls: word(4),
        max_call_bytes: double(8),
        max_keys: word(16),
        max_key_bytes: word(20),
        max_payload: double(24),
    })
}

/// Compares the peer's fields with our settings. The error goes into both sides' logs, so it names both values.
pub fn check(role: Role, settings: &Settings, peer: &Hello) -> Result<(), ConnectionError> {
    let precondition = |message| Err(ConnectionError::Refused { code: code::FAILED_PRECONDITION, message });
    let (ours, theirs) = (&settings.task, &peer.task);
    if peer.protocol != settings.protocol {
        return precondition(format!(
            "{ours} runs protocol \"{}\", {theirs} runs \"{}\": all tasks of a cluster must use the same protocol",
            settings.protocol, peer.protocol
        ));
    }
    if !settings.cluster_id.is_empty() && !peer.cluster_id.is_empty() && settings.cluster_id != peer.cluster_id {
        return precondition(format!(
            "{ours} belongs to cluster \"{}\", {theirs} to cluster \"{}\": check STARWIRE_CLUSTER_ID",
            settings.cluster_id, peer.cluster_id
        ));
    }
    let (expected, found) = match role {
        Role::Client => (settings.expected_task.as_ref(), theirs),
        Role::Server => (peer.expected_task.as_ref(), ours),
    };
    if let Some(expected) = expected.filter(|expected| *expected != found) {
        return precondition(format!(
            "expected {expected} at this address but found {found}: with a secret or TLS, a task must have the name that the ClusterSpec gives it"
        ));
    }
    let (lacks_ours, lacks_theirs) =
        (settings.required_features & !peer.features, peer.required_features & !settings.features);
    if lacks_ours != 0 {
        return precondition(format!("{ours} needs {}, which {theirs} does not have", features(lacks_ours)));
    }
    if lacks_theirs != 0 {
        return precondition(format!("{theirs} needs {}, which {ours} does not have", features(lacks_theirs)));
    }
    if !peer.limits.is_usable() {
        return precondition(format!("the limits of {theirs} are too low: {:?}", peer.limits));
    }
    Ok(())
}

fn features(bits: u64) -> String {
    match bits {
        FEATURE_QUEUE_PAIRS => "RDMA (STARWIRE_TRANSPORT=verbs)".to_owned(),
        FEATURE_DIGESTS => "digests of requests (another release of starwire)".to_owned(),
        _ => format!("features {bits:#x}"),
    }
}
