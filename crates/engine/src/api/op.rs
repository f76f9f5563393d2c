//! The owner of an outgoing request, with a guarantee: `done` is called exactly once on every path.

use std::time::Instant;

use super::host::Op;
use super::memory::Buffers;
use starwire_protocol::{Failure, Outcome, ReplyBuffer, code};

/// Whose request it is.
enum Owner<O> {
    Host(O),
    /// A call of the engine itself, whose replies have no payload.
    Engine(Box<dyn FnOnce(&Outcome<'_>) + Send>),
}

/// One outgoing request until its `done` was called.
pub struct PendingOp<O: Op> {
    op: Option<Owner<O>>,
    buffers: Buffers,
    /// When its shard took it, and whether it is a recv: for the metrics.
    pub(crate) started: Option<Instant>,
    pub(crate) is_tensor: bool,
}

impl<O: Op> PendingOp<O> {
    pub fn new(op: O) -> Self {
        Self::of(Owner::Host(op))
    }

    /// A call of the engine itself: its end is told to `done`.
    pub(crate) fn of_engine(done: impl FnOnce(&Outcome<'_>) + Send + 'static) -> Self {
        Self::of(Owner::Engine(Box::new(done)))
    }

    fn of(op: Owner<O>) -> Self {
        Self { op: Some(op), buffers: Buffers::none(), started: None, is_tensor: false }
    }

    /// The address of `offset..offset+len` of a part for the kernel; null if that is not inside a buffer.
    pub(crate) fn pointer(&self, part: usize, offset: u64, len: u64) -> *mut u8 {
        self.buffers.pointer(part, offset, len)
    }

    pub(crate) fn done(mut self, outcome: &Outcome<'_>) {
        self.end(outcome);
    }

    fn end(&mut self, outcome: &Outcome<'_>) {
        match self.op.take() {
            Some(Owner::Host(op)) => op.done(outcome, std::mem::take(&mut self.buffers)),
            Some(Owner::Engine(done)) => done(outcome),
            None => {}
        }
    }
}

impl<O: Op> ReplyBuffer for PendingOp<O> {
    fn alloc(&mut self, meta: &[u8], lens: &[u64]) -> Result<(), Failure> {
        let buffers = match &mut self.op {
            Some(Owner::Host(op)) => op.alloc(meta, lens)?,
            Some(Owner::Engine(_)) => return Err(failure("the reply to a call of the engine has a payload")),
            None => return Err(failure("the request has ended")),
        };
        if !buffers.fit(lens) {
            return Err(failure("the buffers for a reply do not fit its parts"));
        }
        self.buffers = buffers;
        Ok(())
    }

    fn write(&mut self, part: usize, bytes: &[u8]) {
        self.buffers.write(part, bytes);
    }
}

impl<O: Op> Drop for PendingOp<O> {
    /// A request that is dropped on an unforeseen path must still end.
    fn drop(&mut self) {
        self.end(&Outcome::Local {
            code: code::UNAVAILABLE,
            message: "starwire: the call was dropped without a reply",
        });
    }
}

fn failure(message: &str) -> Failure {
    Failure { code: code::INTERNAL, message: message.into() }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct Told(mpsc::Sender<(i32, Vec<Vec<u8>>)>, Vec<usize>);

    impl Op for Told {
        fn alloc(&mut self, _meta: &[u8], _lens: &[u64]) -> Result<Buffers, Failure> {
            Ok(Buffers::owned(self.1.iter().map(|len| vec![0; *len]).collect()))
        }

        fn done(self, outcome: &Outcome<'_>, buffers: Buffers) {
            let code = match outcome {
                Outcome::Ok { .. } => 0,
                Outcome::PeerError { code, .. } | Outcome::Local { code, .. } | Outcome::Lost { code, .. } => *code,
            };
            self.0.send((code, buffers.into_owned())).unwrap();
        }
    }

    #[test]
    fn a_request_ends_once_with_its_buffers_or_when_it_is_dropped() {
        let (tell, told) = mpsc::channel();
        let mut op = PendingOp::new(Told(tell.clone(), vec![3, 0]));
        op.alloc(b"", &[3, 0]).unwrap();
        op.write(0, b"abc");
        op.done(&Outcome::Ok { meta: b"" });
        assert_eq!(told.recv().unwrap(), (0, vec![b"abc".to_vec(), Vec::new()]));
        drop(PendingOp::new(Told(tell, Vec::new())));
        assert_eq!(told.recv().unwrap().0, code::UNAVAILABLE);
        assert!(told.recv().is_err(), "nothing else is said");
    }

    #[test]
    fn buffers_that_do_not_fit_are_refused() {
        let (tell, _told) = mpsc::channel();
        for wrong in [&[3][..], &[3, 5], &[2, 4], &[]] {
            let mut op = PendingOp::new(Told(tell.clone(), wrong.to_vec()));
            assert!(op.alloc(b"", &[3, 4]).unwrap_err().message.contains("do not fit"), "{wrong:?}");
            assert!(op.pointer(0, 0, 1).is_null(), "{wrong:?}");
        }
    }
}
