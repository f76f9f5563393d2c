//! Star calls as docs/protocol.md has them: what of their metadata differs from worker to worker.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

/// Method numbers: cc/base/methods.h.
pub const CALL: u16 = 16;
pub const REGISTER: u16 = 17;

const VERSION: u8 = 1;
const CALL_HEAD: usize = 72;
const CALL_HANDLE_LEN: Range<usize> = 4..6;
const CALL_STEP: Range<usize> = 16..24;
const CALL_INCARNATION: Range<usize> = 24..32;
const REGISTER_HEAD: usize = 48;
const REGISTER_HANDLE_LEN: Range<usize> = 2..4;
const REGISTER_INCARNATION: Range<usize> = 8..16;
const REGISTER_PLAN: Range<usize> = 16..48;
const REPLY_HEAD: usize = 32;
const REPLY_UNKNOWN_PLAN: u8 = 1;

/// SHA-256 of a plan.
pub type PlanName = [u8; 32];

/// A recorded call.
pub struct StarCall {
    pub plan: PlanName,
    /// The head as it was sent, without the session's handle.
    head: Bytes,
    /// Kept values and the table of feeds.
    rest: Bytes,
    /// The feeds' content.
    pub parts: Arc<[Bytes]>,
    /// What the fetches' content has to be in the end.
    pub bytes: u64,
    pub feeds: u64,
    pub fetches: u64,
}

/// Who calls.
pub struct Caller<'a> {
    pub session: &'a [u8],
    /// Of the parameter server's device.
    pub incarnation: u64,
}

impl StarCall {
    pub fn new(
        plan: PlanName,
        meta: &Bytes,
        parts: Vec<Bytes>,
        bytes: u64,
        [feeds, fetches]: [u64; 2],
    ) -> Option<Self> {
        let head = meta.get(..CALL_HEAD).filter(|head| head[0] == VERSION)?;
        let handle = u16::from_le_bytes(head[CALL_HANDLE_LEN].try_into().ok()?);
        let rest = CALL_HEAD + usize::from(handle);
        if meta.len() < rest {
            return None;
        }
        let (head, rest) = (meta.slice(..CALL_HEAD), meta.slice(rest..));
        Some(Self { plan, head, rest, parts: parts.into(), bytes, feeds, fetches })
    }

    pub fn meta(&self, caller: &Caller<'_>, step: u64) -> Vec<u8> {
        let mut meta = Vec::with_capacity(CALL_HEAD + caller.session.len() + self.rest.len());
        meta.extend_from_slice(&self.head);
        meta[CALL_HANDLE_LEN].copy_from_slice(&handle_len(caller.session));
        meta[CALL_STEP].copy_from_slice(&step.to_le_bytes());
        meta[CALL_INCARNATION].copy_from_slice(&caller.incarnation.to_le_bytes());
        meta.extend_from_slice(caller.session);
        meta.extend_from_slice(&self.rest);
        meta
    }
}

/// The metadata of a registration.
pub fn register_meta(plan: &PlanName, caller: &Caller<'_>) -> Vec<u8> {
    let mut meta = vec![0; REGISTER_HEAD];
    meta[0] = VERSION;
    meta[REGISTER_HANDLE_LEN].copy_from_slice(&handle_len(caller.session));
    meta[REGISTER_INCARNATION].copy_from_slice(&caller.incarnation.to_le_bytes());
    meta[REGISTER_PLAN].copy_from_slice(plan);
    meta.extend_from_slice(caller.session);
    meta
}

/// Whether the answer to a call asks for its plan. None: it is no such answer.
pub fn asks_for_plan(meta: &[u8]) -> Option<bool> {
    let head = meta.get(..REPLY_HEAD).filter(|head| head[0] == VERSION)?;
    Some(head[1] & REPLY_UNKNOWN_PLAN != 0)
}

/// Handles of simulated workers are a few bytes.
fn handle_len(session: &[u8]) -> [u8; 2] {
    u16::try_from(session.len()).unwrap_or(u16::MAX).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLER: Caller<'_> = Caller { session: b"mine", incarnation: 0x0102 };

    fn recorded() -> Bytes {
        let mut meta = vec![9; CALL_HEAD];
        (meta[0], meta[4], meta[5]) = (VERSION, 6, 0);
        meta.extend_from_slice(b"theirstable");
        meta.into()
    }

    #[test]
    fn a_call_is_the_recorded_one_by_somebody_else() {
        let call = StarCall::new([9; 32], &recorded(), Vec::new(), 0, [0, 0]).unwrap();
        let meta = call.meta(&CALLER, 0x0A0B);
        assert_eq!(meta[..8], [1, 9, 9, 9, 4, 0, 9, 9]);
        assert_eq!(meta[16..32], [0x0B, 0x0A, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(meta[32..CALL_HEAD], [9; 40]);
        assert_eq!(&meta[CALL_HEAD..], b"minetable");
    }

    #[test]
    fn what_is_no_call_is_refused() {
        let meta = recorded();
        let made = |meta: Bytes| StarCall::new([0; 32], &meta, Vec::new(), 0, [0, 0]).is_some();
        assert!(made(meta.slice(..CALL_HEAD + 6)));
        assert!(!made(meta.slice(..CALL_HEAD + 5)));
        assert!(!made(meta.slice(..CALL_HEAD - 1)));
        assert!(!made(Bytes::from(vec![2; 100])));
    }

    #[test]
    fn registrations_name_plan_and_session() {
        let meta = register_meta(&[7; 32], &CALLER);
        assert_eq!(meta[..16], [1, 0, 4, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(meta[16..48], [7; 32]);
        assert_eq!(&meta[48..], b"mine");
    }

    #[test]
    fn answers_say_whether_the_plan_is_wanted() {
        let mut reply = vec![0; REPLY_HEAD];
        reply[0] = VERSION;
        assert_eq!(asks_for_plan(&reply), Some(false));
        reply[1] = 1;
        assert_eq!(asks_for_plan(&reply), Some(true));
        assert_eq!(asks_for_plan(&reply[1..]), None);
        assert_eq!(asks_for_plan(b""), None);
    }
}
