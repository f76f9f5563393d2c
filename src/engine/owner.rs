//! The engine's owner as safe Rust: the handlers C++ gave us.

use std::ffi::c_void;
use std::ptr::NonNull;

use super::buffers::InBody;
use crate::ffi::types::{sw_bytes, sw_call_request, sw_handlers, sw_recv_request, sw_ticket};

/// sw_handlers::body_free.
pub type FreeBody = unsafe extern "C" fn(*mut c_void);

#[derive(Clone, Copy)]
pub struct Owner {
    handlers: sw_handlers,
    ctx: *mut c_void,
}

// SAFETY: sw_handlers' contract: every function may be called from every reactor thread with this ctx.
unsafe impl Send for Owner {}
// SAFETY: as above.
unsafe impl Sync for Owner {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Info = 0,
    Warning = 1,
    Error = 2,
}

impl Owner {
    /// # Safety
    /// The functions in `handlers` accept `ctx` from any thread until the engine was stopped.
    pub unsafe fn new(handlers: sw_handlers, ctx: *mut c_void) -> Self {
        Self { handlers, ctx }
    }

    pub fn resolves(&self) -> bool {
        self.handlers.resolve.is_some()
    }

    pub fn resolve(&self, task: &str, grpc_address: &str, token: u64) {
        if let Some(f) = self.handlers.resolve {
            // SAFETY: `new`'s contract; the bytes live through the call. The same holds for each call below.
            unsafe { f(self.ctx, sw_bytes::of(task.as_bytes()), sw_bytes::of(grpc_address.as_bytes()), token) }
        }
    }

    pub fn on_recv(&self, requests: &[sw_recv_request]) {
        if let Some(f) = self.handlers.on_recv {
            // SAFETY: see `resolve`.
            unsafe { f(self.ctx, requests.as_ptr(), requests.len()) }
        }
    }

    /// Whether peers may copy payloads from this process's memory.
    pub fn lends(&self) -> bool {
        self.handlers.private_payloads == 0
    }

    pub fn takes_calls(&self) -> bool {
        self.handlers.on_call.is_some()
    }

    /// Memory of the owner's for the payload of a call, and how it is given back. None: it offers none.
    pub fn body_alloc(&self, len: usize) -> Option<(NonNull<u8>, FreeBody)> {
        let free = self.handlers.body_free?;
        // SAFETY: see `resolve`.
        let memory = unsafe { self.handlers.body_alloc?(self.ctx, len) };
        Some((NonNull::new(memory.cast())?, free))
    }

    pub fn on_call(&self, ticket: sw_ticket, deadline_ms: u32, body: Box<InBody>) {
        let Some(f) = self.handlers.on_call else { return };
        let body = Box::into_raw(body);
        // SAFETY: just made from a box; the handler owns it from here and frees it by sw_body_release.
        let (meta, parts, method) = unsafe {
            let b = &*body;
            (sw_bytes::of(b.meta()), b.parts(), b.method)
        };
        let call = sw_call_request {
            ticket,
            method: u32::from(method),
            deadline_ms,
            meta,
            parts: parts.as_ptr(),
            n_parts: parts.len(),
            body: body.cast(),
        };
        // SAFETY: see `resolve`.
        unsafe { f(self.ctx, &call) }
    }

    pub fn on_cancel(&self, ticket: sw_ticket, method: u32, tag: i64, peer_gone: bool) {
        if let Some(f) = self.handlers.on_cancel {
            // SAFETY: see `resolve`.
            unsafe { f(self.ctx, ticket, method, tag, u32::from(peer_gone)) }
        }
    }

    pub fn on_peer_came(&self, conn: u64, task: &str, incarnation: u64) {
        if let Some(f) = self.handlers.on_peer_came {
            // SAFETY: see `resolve`.
            unsafe { f(self.ctx, conn, sw_bytes::of(task.as_bytes()), incarnation) }
        }
    }

    pub fn on_peer_gone(&self, conn: u64) {
        if let Some(f) = self.handlers.on_peer_gone {
            // SAFETY: see `resolve`.
            unsafe { f(self.ctx, conn) }
        }
    }

    pub fn key_new(&self, prefix: &[u8]) -> *mut c_void {
        match self.handlers.key_new {
            // SAFETY: see `resolve`.
            Some(f) => unsafe { f(self.ctx, sw_bytes::of(prefix)) },
            None => std::ptr::null_mut(),
        }
    }

    /// # Safety
    /// `key` came from `key_new` and is given back once.
    pub unsafe fn key_free(&self, key: *mut c_void) {
        if let Some(f) = self.handlers.key_free {
            // SAFETY: see `resolve`; for the key, the caller's promise.
            unsafe { f(self.ctx, key) }
        }
    }

    pub fn round_end(&self) {
        if let Some(f) = self.handlers.round_end {
            // SAFETY: see `resolve`.
            unsafe { f(self.ctx) }
        }
    }

    pub fn log(&self, level: Level, line: &str) {
        if let Some(f) = self.handlers.log {
            // SAFETY: see `resolve`.
            unsafe { f(self.ctx, level as i32, sw_bytes::of(line.as_bytes())) }
        }
    }
}
