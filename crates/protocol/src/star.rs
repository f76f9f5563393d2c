//! The heads of star calls, which are method calls between a worker and a parameter server. `docs/protocol.md`, "Star
//! calls", is their specification; the tables of tensors behind the heads belong to TensorFlow's side.

use std::num::NonZeroU64;

use sha2::{Digest, Sha256};

use crate::state::STATE;

/// Methods.
pub const CALL: u16 = 16;
pub const REGISTER: u16 = 17;
pub const END: u16 = 18;

/// [`CallHead::flags`]: no later call of the step needs a slot on this server.
pub const LAST: u8 = 1;
/// [`CallHead::flags`]: the reply carries the statistics of the kernels.
pub const TRACE: u8 = 2;
/// [`Keep::flags`]: the value is in the reply as well.
pub const ALSO_RETURNED: u32 = 1;
/// [`ReplyHead::flags`]: the server does not know the plan and has done nothing.
pub const UNKNOWN_PLAN: u8 = 1;

pub const MAX_META: usize = 1 << 20;
pub const MAX_SESSION: usize = 4096;

const VERSION: u8 = 1;
const CALL_VERSION: u8 = 2;
pub const CALL_BYTES: usize = 80;
const KEEP_BYTES: usize = 12;
/// Where the session's handle begins in the metadata of a call.
pub const SESSION_AT: usize = CALL_BYTES;
pub const REPLY_BYTES: usize = 32;
const REGISTER_BYTES: usize = 48;
const END_BYTES: usize = 16;

/// SHA-256 of a plan: its name.
pub type PlanHash = [u8; 32];

pub fn plan_hash(plan: &[u8]) -> PlanHash {
    Sha256::digest(plan).into()
}

/// Whether the method is one of star calls, or about the state that they change.
pub fn is_star(method: u16) -> bool {
    (CALL..=END).contains(&method) || method == STATE
}

/// A fetch that stays on the server for a later call of the step.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    pub fetch: u32,
    pub slot: u32,
    pub flags: u32,
}

/// Identifies a call among all that a worker process makes to a server, so that the server recognises it when it comes
/// again over another connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallId {
    /// A lane has one call at a time: the next one means that nobody waits for the one before.
    pub lane: u32,
    /// How often the call was sent before.
    pub attempt: u32,
    /// Higher than those of all calls that the process numbered before.
    pub number: NonZeroU64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallHead<'a> {
    pub flags: u8,
    pub step: i64,
    /// The incarnation of the plan's device as the worker knows it; 0: any.
    pub incarnation: u64,
    pub plan: PlanHash,
    /// None: the call is not sent again.
    pub call_id: Option<CallId>,
    /// The session's handle.
    pub session: &'a [u8],
    pub keeps: Vec<Keep>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplyHead {
    pub flags: u8,
    /// From the call's last byte to the first kernel, and from there to the reply.
    pub queue_micros: u32,
    pub run_micros: u32,
    /// The payload's last part, unless this is 0: a serialised StepStats of so many bytes.
    pub stats_bytes: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegisterHead<'a> {
    pub incarnation: u64,
    pub plan: PlanHash,
    pub session: &'a [u8],
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndHead<'a> {
    pub step: i64,
    pub session: &'a [u8],
}

/// A head that breaks the specification, or cannot be written by it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StarError {
    #[error("starwire: malformed {head}: {why}")]
    Malformed { head: &'static str, why: String },
    #[error("starwire: a star call with a session handle of {session} bytes and {keeps} kept values is too long")]
    TooLong { session: usize, keeps: usize },
}

/// Reads the fields of a head, in order.
struct Fields<'a> {
    head: &'static str,
    meta: &'a [u8],
    at: usize,
}

impl<'a> Fields<'a> {
    /// A head of this version with at least the `fixed` bytes of its fields.
    fn of(meta: &'a [u8], fixed: usize, version: u8, head: &'static str) -> Result<Self, StarError> {
        let mut fields = Self { head, meta, at: 0 };
        if meta.len() < fixed {
            return Err(fields.malformed(format!("{} bytes, at least {fixed} expected", meta.len())));
        }
        match fields.u8()? {
            found if found == version => Ok(fields),
            other => Err(fields.malformed(format!("version {other}, expected {version}"))),
        }
    }

    fn malformed(&self, why: String) -> StarError {
        StarError::Malformed { head: self.head, why }
    }

    fn bytes(&mut self, len: usize) -> Result<&'a [u8], StarError> {
        let bytes = self.at.checked_add(len).and_then(|end| self.meta.get(self.at..end));
        let bytes = bytes.ok_or_else(|| self.malformed(format!("{} bytes end within a field", self.meta.len())))?;
        self.at += len;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], StarError> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    fn u8(&mut self) -> Result<u8, StarError> {
        Ok(self.array::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16, StarError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, StarError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, StarError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn i64(&mut self) -> Result<i64, StarError> {
        Ok(i64::from_le_bytes(self.array()?))
    }

    fn call_id(&mut self) -> Result<Option<CallId>, StarError> {
        let (lane, attempt, number) = (self.u32()?, self.u32()?, self.u64()?);
        match NonZeroU64::new(number) {
            Some(number) => Ok(Some(CallId { lane, attempt, number })),
            None if (lane, attempt) == (0, 0) => Ok(None),
            None => Err(self.malformed("a lane without a number".into())),
        }
    }

    fn zeros(&mut self, len: usize) -> Result<(), StarError> {
        match self.bytes(len)?.iter().all(|byte| *byte == 0) {
            true => Ok(()),
            false => Err(self.malformed("reserved bytes are not zero".into())),
        }
    }

    fn flags(&mut self, known: u8) -> Result<u8, StarError> {
        match self.u8()? {
            flags if flags & !known == 0 => Ok(flags),
            flags => Err(self.malformed(format!("unknown flags {flags}"))),
        }
    }

    fn session(&mut self, len: u16) -> Result<&'a [u8], StarError> {
        let len = usize::from(len);
        if len > MAX_SESSION || self.meta.len() - self.at < len {
            return Err(self.malformed(format!("a session handle of {len} bytes")));
        }
        self.bytes(len)
    }

    fn rest(&self) -> usize {
        self.meta.len() - self.at
    }

    fn end(&self) -> Result<(), StarError> {
        match self.rest() {
            0 => Ok(()),
            _ => Err(self.malformed("bytes after its end".into())),
        }
    }
}

impl<'a> CallHead<'a> {
    /// The head, and where the table of feeds begins.
    pub fn read(meta: &'a [u8]) -> Result<(Self, usize), StarError> {
        let mut fields = Fields::of(meta, CALL_BYTES, CALL_VERSION, "star call")?;
        let flags = fields.flags(LAST | TRACE)?;
        fields.zeros(2)?;
        let session = fields.u16()?;
        fields.zeros(2)?;
        let keeps = fields.u32()?;
        fields.zeros(4)?;
        let step = fields.i64()?;
        let incarnation = fields.u64()?;
        let plan = fields.array()?;
        let call_id = fields.call_id()?;
        let session = fields.session(session)?;
        if u64::from(keeps) > (fields.rest() / KEEP_BYTES) as u64 {
            return Err(fields.malformed(format!("{keeps} kept values in {} bytes", meta.len())));
        }
        let keeps = (0..keeps).map(|_| {
            let keep = Keep { fetch: fields.u32()?, slot: fields.u32()?, flags: fields.u32()? };
            match keep.flags & !ALSO_RETURNED {
                0 => Ok(keep),
                _ => Err(fields.malformed(format!("unknown flags {} of a kept value", keep.flags))),
            }
        });
        let keeps: Vec<_> = keeps.collect::<Result<_, _>>()?;
        if call_id.is_some() && !keeps.is_empty() {
            return Err(fields.malformed("a call that may come again keeps values".into()));
        }
        Ok((Self { flags, step, incarnation, plan, call_id, session, keeps }, fields.at))
    }

    /// Appends the head.
    pub fn write(&self, meta: &mut Vec<u8>) -> Result<(), StarError> {
        let too_long = StarError::TooLong { session: self.session.len(), keeps: self.keeps.len() };
        let bytes = CALL_BYTES + self.session.len() + KEEP_BYTES * self.keeps.len();
        let session = u16::try_from(self.session.len()).ok().filter(|len| usize::from(*len) <= MAX_SESSION);
        let keeps = u32::try_from(self.keeps.len()).ok().filter(|_| bytes <= MAX_META);
        let (Some(session), Some(keeps)) = (session, keeps) else { return Err(too_long) };
        meta.reserve(bytes);
        let (lane, attempt, number) =
            self.call_id.map_or((0, 0, 0), |call_id| (call_id.lane, call_id.attempt, call_id.number.get()));
        meta.extend_from_slice(&[CALL_VERSION, self.flags, 0, 0]);
        meta.extend_from_slice(&session.to_le_bytes());
        meta.extend_from_slice(&[0; 2]);
        meta.extend_from_slice(&keeps.to_le_bytes());
        meta.extend_from_slice(&[0; 4]);
        meta.extend_from_slice(&self.step.to_le_bytes());
        meta.extend_from_slice(&self.incarnation.to_le_bytes());
        meta.extend_from_slice(&self.plan);
        meta.extend_from_slice(&lane.to_le_bytes());
        meta.extend_from_slice(&attempt.to_le_bytes());
        meta.extend_from_slice(&number.to_le_bytes());
        meta.extend_from_slice(self.session);
        for keep in &self.keeps {
            for field in [keep.fetch, keep.slot, keep.flags] {
                meta.extend_from_slice(&field.to_le_bytes());
            }
        }
        Ok(())
    }
}

impl ReplyHead {
    /// The head; the table of fetches begins at [`REPLY_BYTES`].
    pub fn read(meta: &[u8]) -> Result<Self, StarError> {
        let mut fields = Fields::of(meta, REPLY_BYTES, VERSION, "star call reply")?;
        let flags = fields.flags(UNKNOWN_PLAN)?;
        fields.zeros(2)?;
        let (queue_micros, run_micros, stats_bytes) = (fields.u32()?, fields.u32()?, fields.u32()?);
        fields.zeros(16)?;
        Ok(Self { flags, queue_micros, run_micros, stats_bytes })
    }

    pub fn bytes(&self) -> [u8; REPLY_BYTES] {
        let mut bytes = [0; REPLY_BYTES];
        bytes[0] = VERSION;
        bytes[1] = self.flags;
        bytes[4..8].copy_from_slice(&self.queue_micros.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.run_micros.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.stats_bytes.to_le_bytes());
        bytes
    }
}

impl<'a> RegisterHead<'a> {
    pub fn read(meta: &'a [u8]) -> Result<Self, StarError> {
        let mut fields = Fields::of(meta, REGISTER_BYTES, VERSION, "plan registration")?;
        fields.zeros(1)?;
        let session = fields.u16()?;
        fields.zeros(4)?;
        let (incarnation, plan) = (fields.u64()?, fields.array()?);
        let session = fields.session(session)?;
        fields.end()?;
        Ok(Self { incarnation, plan, session })
    }

    /// Appends the head.
    pub fn write(&self, meta: &mut Vec<u8>) -> Result<(), StarError> {
        meta.extend_from_slice(&[VERSION, 0]);
        meta.extend_from_slice(&session_len(self.session)?);
        meta.extend_from_slice(&[0; 4]);
        meta.extend_from_slice(&self.incarnation.to_le_bytes());
        meta.extend_from_slice(&self.plan);
        meta.extend_from_slice(self.session);
        Ok(())
    }
}

impl<'a> EndHead<'a> {
    pub fn read(meta: &'a [u8]) -> Result<Self, StarError> {
        let mut fields = Fields::of(meta, END_BYTES, VERSION, "step end")?;
        fields.zeros(1)?;
        let session = fields.u16()?;
        fields.zeros(4)?;
        let step = fields.i64()?;
        let session = fields.session(session)?;
        fields.end()?;
        Ok(Self { step, session })
    }

    /// Appends the head.
    pub fn write(&self, meta: &mut Vec<u8>) -> Result<(), StarError> {
        meta.extend_from_slice(&[VERSION, 0]);
        meta.extend_from_slice(&session_len(self.session)?);
        meta.extend_from_slice(&[0; 4]);
        meta.extend_from_slice(&self.step.to_le_bytes());
        meta.extend_from_slice(self.session);
        Ok(())
    }
}

fn session_len(session: &[u8]) -> Result<[u8; 2], StarError> {
    let len = u16::try_from(session.len()).ok().filter(|len| usize::from(*len) <= MAX_SESSION);
    len.map(u16::to_le_bytes).ok_or(StarError::TooLong { session: session.len(), keeps: 0 })
}

#[cfg(test)]
#[path = "star_tests.rs"]
mod tests;
