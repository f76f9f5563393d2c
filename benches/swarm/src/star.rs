//! Recorded star calls, as another worker makes them.

use std::sync::Arc;

use bytes::Bytes;
use starwire_protocol::star::{CallHead, Keep, RegisterHead, ReplyHead, StarError, UNKNOWN_PLAN};

pub use starwire_protocol::star::{CALL, PlanHash as PlanName, REGISTER};

/// A recorded call.
pub struct StarCall {
    pub plan: PlanName,
    flags: u8,
    keeps: Vec<Keep>,
    /// The table of feeds.
    table: Bytes,
    /// The feeds' content.
    pub parts: Arc<[Bytes]>,
    /// What the fetches' content has to be in the end.
    pub bytes: u64,
    pub feeds: u64,
    pub fetches: u64,
}

/// The worker that calls.
pub struct Caller<'a> {
    pub session: &'a [u8],
    /// Of the parameter server's device.
    pub incarnation: u64,
}

impl StarCall {
    pub fn new(meta: &Bytes, parts: Vec<Bytes>, bytes: u64, [feeds, fetches]: [u64; 2]) -> Result<Self, StarError> {
        let (head, table) = CallHead::read(meta)?;
        let CallHead { flags, plan, keeps, .. } = head;
        Ok(Self { plan, flags, keeps, table: meta.slice(table..), parts: parts.into(), bytes, feeds, fetches })
    }

    pub fn meta(&self, caller: &Caller<'_>, step: i64) -> Result<Vec<u8>, StarError> {
        let (session, incarnation, keeps) = (caller.session, caller.incarnation, self.keeps.clone());
        let (flags, plan) = (self.flags, self.plan);
        let mut meta = Vec::with_capacity(128 + self.table.len());
        CallHead { flags, step, incarnation, plan, call_id: None, session, keeps }.write(&mut meta)?;
        meta.extend_from_slice(&self.table);
        Ok(meta)
    }
}

/// The metadata of a registration.
pub fn register_meta(plan: &PlanName, caller: &Caller<'_>) -> Result<Vec<u8>, StarError> {
    let mut meta = Vec::new();
    RegisterHead { incarnation: caller.incarnation, plan: *plan, session: caller.session }.write(&mut meta)?;
    Ok(meta)
}

/// Whether the reply to a call asks for its plan. None: it is no such reply.
pub fn asks_for_plan(meta: &[u8]) -> Option<bool> {
    ReplyHead::read(meta).ok().map(|head| head.flags & UNKNOWN_PLAN != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLER: Caller<'_> = Caller { session: b"mine", incarnation: 0x0102 };

    #[test]
    fn a_recorded_call_is_made_by_another_worker() {
        let keeps = vec![Keep { fetch: 1, slot: 2, flags: 0 }];
        let recorded =
            CallHead { call_id: None, flags: 1, step: 4, incarnation: 5, plan: [6; 32], session: b"theirs", keeps };
        let mut meta = Vec::new();
        recorded.write(&mut meta).unwrap();
        meta.extend_from_slice(b"table");
        let call = StarCall::new(&meta.into(), Vec::new(), 0, [0, 0]).unwrap();
        assert_eq!(call.plan, [6; 32]);
        let meta = call.meta(&CALLER, 9).unwrap();
        let (head, table) = CallHead::read(&meta).unwrap();
        assert_eq!(head, CallHead { step: 9, incarnation: 0x0102, session: b"mine", ..recorded });
        assert_eq!(&meta[table..], b"table");
        assert!(StarCall::new(&Bytes::from(vec![2; 100]), Vec::new(), 0, [0, 0]).is_err());
    }

    #[test]
    fn replies_say_whether_the_plan_is_wanted() {
        let reply = |flags| ReplyHead { flags, ..ReplyHead::default() }.bytes();
        assert_eq!(asks_for_plan(&reply(0)), Some(false));
        assert_eq!(asks_for_plan(&reply(UNKNOWN_PLAN)), Some(true));
        assert_eq!(asks_for_plan(b""), None);
    }
}
