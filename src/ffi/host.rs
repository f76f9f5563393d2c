//! The engine's owner and its requests' owners as C callers give them: tables of functions and a context.

use std::ffi::c_void;
use std::mem::offset_of;
use std::ptr::{self, NonNull};

use super::handle;
use super::star_server::CStar;
use super::types::{
    sw_body, sw_bytes, sw_call_request, sw_handlers, sw_op_vtable, sw_part, sw_payload, sw_recv_request, sw_result,
    sw_ticket,
};
use starwire_engine::{
    Buffers, ForeignMemory, Host, IncomingCall, Level, Op, OutPayload, PendingOp, Piece, RecvRequest, Ticket,
};
use starwire_marks::fail_point;
use starwire_protocol::{Failure, Outcome, code};

pub type CEngine = starwire_engine::Engine<CHost>;
pub type CChannel = starwire_engine::Channel<CHost>;

/// A struct of the ABI and the engine's own are the same memory.
macro_rules! same {
    ($ours:ty, $theirs:ty: $($our:ident = $their:ident),+) => {
        const _: () = {
            assert!(size_of::<$ours>() == size_of::<$theirs>() && align_of::<$ours>() == align_of::<$theirs>());
            $(assert!(offset_of!($ours, $our) == offset_of!($theirs, $their));)+
        };
    };
}
same!(sw_ticket, Ticket: conn = conn, id = id);
same!(sw_part, Piece: data = start, len = len);
same!(sw_recv_request, RecvRequest<CKey>: ticket = ticket, step_id = step, key = key, frame_id = frame, iter_id = iter);

impl From<sw_ticket> for Ticket {
    fn from(ticket: sw_ticket) -> Self {
        Self { conn: ticket.conn, id: ticket.id }
    }
}

impl From<Ticket> for sw_ticket {
    fn from(ticket: Ticket) -> Self {
        Self { conn: ticket.conn, id: ticket.id }
    }
}

/// What key_new returned, not null; only handed back.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct CKey(*mut c_void);

// SAFETY: sw_handlers' contract: keys are accepted on every reactor thread.
unsafe impl Send for CKey {}

/// sw_handlers and their context.
pub struct CHost {
    handlers: sw_handlers,
    ctx: *mut c_void,
    star: Option<CStar>,
}

// SAFETY: sw_handlers' contract: every function may be called from every reactor thread with this ctx.
unsafe impl Send for CHost {}
// SAFETY: as above.
unsafe impl Sync for CHost {}

impl CHost {
    /// # Safety
    /// The functions in `handlers` accept `ctx` from any thread until the engine was stopped; so do those of
    /// `handlers.star` with theirs.
    pub unsafe fn new(handlers: sw_handlers, ctx: *mut c_void) -> Result<Self, handle::Failure> {
        // SAFETY: the caller's promise.
        let star = unsafe { CStar::new(handlers.star, handlers.star_ctx)? };
        Ok(Self { handlers, ctx, star })
    }
}

// In each method: the functions accept the ctx (`CHost::new`), and what they are given is valid during the call.
impl Host for CHost {
    type Key = CKey;
    type Op = COp;
    type Star = CStar;

    fn key(&self, prefix: &[u8]) -> Option<CKey> {
        // SAFETY: see the impl.
        let key = unsafe { self.handlers.key_new?(self.ctx, sw_bytes::of(prefix)) };
        (!key.is_null()).then_some(CKey(key))
    }

    fn key_gone(&self, key: CKey) {
        if let Some(key_free) = self.handlers.key_free {
            // SAFETY: see the impl; the key came from key_new, and the engine gives it back once.
            unsafe { key_free(self.ctx, key.0) }
        }
    }

    fn recv(&self, requests: &[RecvRequest<CKey>]) {
        if let Some(on_recv) = self.handlers.on_recv {
            // SAFETY: see the impl; `same!` has compared the two structs.
            unsafe { on_recv(self.ctx, requests.as_ptr().cast(), requests.len()) }
        }
    }

    fn takes_calls(&self) -> bool {
        self.handlers.on_call.is_some()
    }

    fn call_memory(&self, len: usize) -> Option<ForeignMemory> {
        let free = self.handlers.body_free?;
        // SAFETY: see the impl.
        let start = unsafe { self.handlers.body_alloc?(self.ctx, len) };
        // SAFETY: body_alloc's contract: so much memory, until body_free.
        NonNull::new(start.cast()).map(|start| unsafe { ForeignMemory::new(start, free) })
    }

    fn call(&self, call: IncomingCall) {
        let Some(on_call) = self.handlers.on_call else { return };
        fail_point!("a worker method is read, and does not run yet");
        let (meta, parts) = (sw_bytes::of(call.body.meta()), call.body.pieces());
        // They lie in the body, which stays where it is until sw_body_free.
        let (parts, n_parts) = (parts.as_ptr().cast(), parts.len());
        let call = sw_call_request {
            ticket: call.ticket.into(),
            method: call.method.into(),
            deadline_ms: call.deadline_ms,
            meta,
            parts,
            n_parts,
            body: handle::give(sw_body(call.body)),
        };
        // SAFETY: see the impl; the handler owns the body from here.
        unsafe { on_call(self.ctx, &call) }
    }

    fn star(&self) -> Option<&CStar> {
        self.star.as_ref()
    }

    fn cancelled(&self, ticket: Ticket, method: u16, tag: i64, peer_gone: bool) {
        if let Some(on_cancel) = self.handlers.on_cancel {
            // SAFETY: see the impl.
            unsafe { on_cancel(self.ctx, ticket.into(), method.into(), tag, peer_gone.into()) }
        }
    }

    fn peer_came(&self, conn: u64, task: &str, incarnation: u64) {
        if let Some(on_peer_came) = self.handlers.on_peer_came {
            // SAFETY: see the impl.
            unsafe { on_peer_came(self.ctx, conn, sw_bytes::of(task.as_bytes()), incarnation) }
        }
    }

    fn peer_gone(&self, conn: u64) {
        if let Some(on_peer_gone) = self.handlers.on_peer_gone {
            // SAFETY: see the impl.
            unsafe { on_peer_gone(self.ctx, conn) }
        }
    }

    fn round_end(&self) {
        if let Some(round_end) = self.handlers.round_end {
            // SAFETY: see the impl.
            unsafe { round_end(self.ctx) }
        }
    }

    fn lends(&self) -> bool {
        self.handlers.private_payloads == 0
    }

    fn log(&self, level: Level, line: &str) {
        if let Some(log) = self.handlers.log {
            // SAFETY: see the impl.
            unsafe { log(self.ctx, level as i32, sw_bytes::of(line.as_bytes())) }
        }
    }
}

/// sw_op_vtable and its op.
pub struct COp {
    vtable: &'static sw_op_vtable,
    op: *mut c_void,
}

// SAFETY: sw_op_vtable's contract: its functions run on any reactor thread; the op is only handed back.
unsafe impl Send for COp {}

/// # Safety
/// `vtable` is valid for ever, and its functions accept `op` until `done` was called.
pub unsafe fn pending(vtable: *const sw_op_vtable, op: *mut c_void) -> PendingOp<COp> {
    // SAFETY: the caller's promise.
    PendingOp::new(COp { vtable: unsafe { &*vtable }, op })
}

impl Op for COp {
    fn alloc(&mut self, meta: &[u8], lens: &[u64]) -> Result<Buffers, Failure> {
        let Some(alloc) = self.vtable.alloc else {
            return Err(Failure { code: code::INTERNAL, message: "the caller accepts no payload".into() });
        };
        let mut one = [ptr::null_mut::<c_void>(); 1];
        let mut many = Vec::new();
        let starts: &mut [*mut c_void] = if lens.len() == 1 {
            &mut one
        } else {
            many.resize(lens.len(), ptr::null_mut());
            &mut many
        };
        // SAFETY: the op is alive (`done` was not called); both arrays have lens.len() elements.
        let code = unsafe { alloc(self.op, sw_bytes::of(meta), lens.len(), lens.as_ptr(), starts.as_mut_ptr()) };
        if code != 0 {
            return Err(Failure { code, message: "the receiver refused the reply".into() });
        }
        let pieces = |(start, len): (&*mut c_void, &u64)| {
            let len = usize::try_from(*len).ok().filter(|len| *len == 0 || !start.is_null());
            let piece = len.map(|len| Piece { start: start.cast(), len });
            piece.ok_or_else(|| Failure {
                code: code::RESOURCE_EXHAUSTED,
                message: "out of memory for the reply".into(),
            })
        };
        // SAFETY: alloc's contract: the buffers stay valid until `done`.
        let foreign = |pieces: &[Piece]| unsafe { Buffers::foreign(pieces) };
        match (&*starts, lens) {
            ([start], [len]) => Ok(foreign(&[pieces((start, len))?])),
            (starts, lens) => Ok(foreign(&starts.iter().zip(lens).map(pieces).collect::<Result<Vec<_>, _>>()?)),
        }
    }

    fn done(self, outcome: &Outcome<'_>, _buffers: Buffers) {
        let Some(done) = self.vtable.done else { return };
        let (code, message, meta, from_peer, lost) = match outcome {
            Outcome::Ok { meta } => (0, "", *meta, 1, 0),
            Outcome::PeerError { code, message, details } => (*code, *message, *details, 1, 0),
            Outcome::Local { code, message } => (*code, *message, &b""[..], 0, 0),
            Outcome::Lost { code, message } => (*code, *message, &b""[..], 0, 1),
        };
        let (message, meta) = (sw_bytes::of(message.as_bytes()), sw_bytes::of(meta));
        let result = sw_result { code, message, meta, from_peer, lost };
        // SAFETY: the engine calls `done` once; the op is alive until it.
        unsafe { done(self.op, &result) }
    }
}

/// # Safety
/// `payload` is null or obeys sw_payload's contract.
pub unsafe fn payload(payload: *const sw_payload) -> Option<OutPayload> {
    // SAFETY: the caller's promise.
    let payload = unsafe { payload.as_ref()? };
    let pieces = if payload.n_parts == 0 || payload.parts.is_null() {
        &[][..]
    } else {
        // SAFETY: the caller's promise: parts points at n_parts parts; `same!` has compared the two structs.
        unsafe { std::slice::from_raw_parts(payload.parts.cast::<Piece>(), payload.n_parts) }
    };
    // SAFETY: sw_payload's contract.
    Some(unsafe { OutPayload::foreign(pieces, payload.owner, payload.release) })
}
