//! The structs of the C ABI. cbindgen turns this file's doc comments into `include/starwire.h`.

use std::ffi::c_void;

use super::port::sw_port;
use super::star_server::sw_star_handlers;
use starwire_engine::InBody;

/// Same numbers as tensorflow::error::Code; 0 is OK.
pub type sw_code = i32;

/// Borrowed bytes: valid during the call they are passed to.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_bytes {
    pub data: *const u8,
    pub len: usize,
}

impl sw_bytes {
    pub fn of(bytes: &[u8]) -> Self {
        Self { data: bytes.as_ptr(), len: bytes.len() }
    }

    pub const EMPTY: Self = Self { data: std::ptr::null(), len: 0 };

    /// # Safety
    /// `data` points at `len` readable bytes that outlive `'a`, or `len` is 0.
    pub unsafe fn as_slice<'a>(&self) -> &'a [u8] {
        if self.data.is_null() || self.len == 0 {
            return &[];
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }
}

/// One contiguous piece of a payload.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_part {
    pub data: *const c_void,
    pub len: usize,
}

/// A scattered payload that is sent in place. `parts` is copied by the call that takes the payload; the memory that the
/// parts point at stays valid and unchanged until `release(owner)` is called, which happens exactly once, from any
/// thread, on success and on failure alike, and not before: a call may be over while its payload is still being sent.
/// `release` is NULL for memory that is never freed.
#[repr(C)]
pub struct sw_payload {
    pub parts: *const sw_part,
    pub n_parts: usize,
    pub owner: *mut c_void,
    pub release: Option<unsafe extern "C" fn(owner: *mut c_void)>,
}

/// The outcome of a call. Everything in it is borrowed for the duration of `done`.
#[repr(C)]
pub struct sw_result {
    pub code: sw_code,
    /// The reason when code != 0.
    pub message: sw_bytes,
    /// The peer's reply metadata when code == 0; error details when code != 0.
    pub meta: sw_bytes,
    /// 1: the peer's answer. 0: starwire itself ended the call (connection lost, cancelled, deadline ...).
    pub from_peer: u32,
    /// 1: the connection was lost, or the peer leaves it. It may have run the call.
    pub lost: u32,
}

/// Callbacks to the owner of an outgoing call. All run on a reactor thread (or on the thread that starts or stops
/// something, when a call fails at once), must not block, and must not throw.
#[repr(C)]
pub struct sw_op_vtable {
    pub struct_size: usize,
    /// The reply has `n` payload parts of lens[i] bytes: set bufs[i] (may be NULL where lens[i] is 0). They stay valid
    /// until `done`. Anything but 0 ends the call with that code; the payload is read and dropped. Not called for a
    /// reply without payload parts.
    pub alloc: Option<
        unsafe extern "C" fn(
            op: *mut c_void,
            meta: sw_bytes,
            n: usize,
            lens: *const u64,
            bufs: *mut *mut c_void,
        ) -> sw_code,
    >,
    /// Exactly once per call, and last: buffers are no longer touched afterwards.
    pub done: Option<unsafe extern "C" fn(op: *mut c_void, result: *const sw_result)>,
}

/// Identifies an incoming call until it is answered. Plain data: copy it freely; answering twice, or after the
/// connection has ended, is harmless.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct sw_ticket {
    pub conn: u64,
    pub id: u64,
}

/// One rendezvous request of a peer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_recv_request {
    pub ticket: sw_ticket,
    pub step_id: i64,
    /// What key_new returned for the key's prefix: everything before the last ';'.
    pub key: *mut c_void,
    /// The two numbers after the last ';' of a rendezvous key.
    pub frame_id: u64,
    pub iter_id: u64,
}

/// Metadata and payload of an incoming call. Free with sw_body_free.
pub struct sw_body(
    #[allow(dead_code, reason = "what C callers see of it lies in sw_call_request")] pub(super) Box<InBody>,
);

/// One incoming method call.
#[repr(C)]
pub struct sw_call_request {
    pub ticket: sw_ticket,
    /// The caller assigns the numbers: the shim's are in cc/base/methods.h.
    pub method: u32,
    /// 0: none.
    pub deadline_ms: u32,
    pub meta: sw_bytes,
    /// The payload, each part 64-byte aligned.
    pub parts: *const sw_part,
    pub n_parts: usize,
    /// Owns `parts` and `meta`: they stay valid until sw_body_free(body), which must be called exactly once, at any
    /// time, from any thread.
    pub body: *mut sw_body,
}

/// Callbacks from the engine to its owner. All run on reactor threads and must not block or throw; answers may come
/// later from any thread.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sw_handlers {
    pub struct_size: usize,
    /// A batch of rendezvous requests; each is answered by sw_engine_reply.
    pub on_recv: Option<unsafe extern "C" fn(ctx: *mut c_void, requests: *const sw_recv_request, n: usize)>,
    pub on_call: Option<unsafe extern "C" fn(ctx: *mut c_void, call: *const sw_call_request)>,
    /// Optional: allocates memory, 64-byte aligned, for the payload of a call, before on_call. NULL: the engine uses
    /// its own memory.
    pub body_alloc: Option<unsafe extern "C" fn(ctx: *mut c_void, len: usize) -> *mut c_void>,
    /// Frees what body_alloc returned, once, from any thread. It gets no ctx because bodies may outlive the engine. Not
    /// null if body_alloc is not.
    pub body_free: Option<unsafe extern "C" fn(memory: *mut c_void)>,
    /// The caller of an unanswered request gave up, or its connection ended (peer_gone = 1). method 0 is a rendezvous
    /// request, `tag` its step id; else tag is 0. An answer is still allowed (and dropped).
    pub on_cancel:
        Option<unsafe extern "C" fn(ctx: *mut c_void, ticket: sw_ticket, method: u32, tag: i64, peer_gone: u32)>,
    /// A connection was established, in either direction: the first call for it. `conn` is that of its tickets,
    /// `incarnation` the peer's.
    pub on_peer_came: Option<unsafe extern "C" fn(ctx: *mut c_void, conn: u64, task: sw_bytes, incarnation: u64)>,
    /// The connection ended: the last call for it. Its number is not used again.
    pub on_peer_gone: Option<unsafe extern "C" fn(ctx: *mut c_void, conn: u64)>,
    /// Interning of rendezvous keys, per connection. key_new gets the prefix; NULL means the key is malformed: requests
    /// that use it are refused. key_free is called when no request that uses it can be delivered any more (answers of
    /// delivered ones must not rely on it).
    pub key_new: Option<unsafe extern "C" fn(ctx: *mut c_void, prefix: sw_bytes) -> *mut c_void>,
    pub key_free: Option<unsafe extern "C" fn(ctx: *mut c_void, key: *mut c_void)>,
    /// The end of a reactor's round: all its calls to the handlers have been made. For batching completions
    /// (thread-local on the reactor's thread). Also called once at the start of each reactor's thread.
    pub round_end: Option<unsafe extern "C" fn(ctx: *mut c_void)>,
    /// Not 0: payloads may lie in memory that other processes cannot read (that of an accelerator's driver). Then
    /// nothing is lent.
    pub private_payloads: u32,
    /// level: 0 info, 1 warning, 2 error.
    pub log: Option<unsafe extern "C" fn(ctx: *mut c_void, level: i32, line: sw_bytes)>,
    /// If this task serves star calls, else NULL. Copied. `star_ctx` is the context of its functions.
    pub star: *const sw_star_handlers,
    pub star_ctx: *mut c_void,
}

#[repr(C)]
pub struct sw_engine_options {
    pub struct_size: usize,
    /// "grpc++" ...
    pub protocol: sw_bytes,
    /// "/job:ps/replica:0/task:0"
    pub task: sw_bytes,
    /// "ps"
    pub job: sw_bytes,
    /// Own entry of the ClusterSpec, "host:port"; the port may be 0.
    pub grpc_address: sw_bytes,
    /// Not 0: TensorFlow's gRPC server can listen behind the port of the ClusterSpec (sw_port_grpc_address).
    pub grpc_gives_way: u32,
    /// A random number that identifies this start of the server.
    pub incarnation: u64,
    /// Number of tasks in the ClusterSpec, and length of the two arrays.
    pub cluster_tasks: u32,
    /// Every task's ClusterSpec address: all must be in .endpoint_map, if there is one.
    pub cluster_addresses: *const sw_bytes,
    /// The task names they belong to, for messages.
    pub cluster_names: *const sw_bytes,
    /// From sw_port_bind, or NULL. The engine takes its content over; the caller still frees it.
    pub port: *const sw_port,
}

/// Bytes that starwire allocated: free with sw_string_free.
#[repr(C)]
pub struct sw_string {
    pub data: *mut u8,
    pub len: usize,
    pub cap: usize,
}

/// For sw_channel_call: keep trying to connect until the deadline instead of failing at the first failed attempt.
pub const SW_CALL_WAIT_FOR_READY: u32 = 1;

/// For sw_channel_call: the deadline is over once there is a connection.
pub const SW_CALL_DEADLINE_TO_CONNECT: u32 = 2;
