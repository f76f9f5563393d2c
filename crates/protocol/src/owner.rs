//! What the owner of a connection provides: its types, and memory for payloads that arrive.

/// The owner of a connection, and the types that it gives to the connection.
pub trait Owner {
    /// The owner's part of a request: given to `Connection::recv` or `call`, returned by `Event::ReplyDone`.
    type Op: ReplyBuffer;
    /// A payload to send.
    type Payload: Payload;
    /// The payload of an incoming call. Delivered by `Event::CallReady`, or dropped if the call is cancelled or the
    /// connection ends before the payload is complete.
    type Body: CallBuffer;

    /// Memory for a call. An error refuses the call; its payload is then read and dropped.
    fn call_memory(&mut self, call: &CallHead<'_>) -> Result<Self::Body, Failure>;
}

/// An incoming call before its payload has arrived.
#[derive(Clone, Copy, Debug)]
pub struct CallHead<'a> {
    pub id: u64,
    pub method: u16,
    pub meta: &'a [u8],
    /// Length of each part.
    pub lens: &'a [u64],
}

/// Memory for the parts of a call. Inline parts are written here, bulk parts through `Target::Call`.
pub trait CallBuffer {
    fn write(&mut self, part: usize, bytes: &[u8]);
}

/// For owners that refuse every call.
impl CallBuffer for () {
    fn write(&mut self, _part: usize, _bytes: &[u8]) {}
}

/// Memory for the parts of a reply. Inline parts are written here, bulk parts through `Target::Reply`.
pub trait ReplyBuffer {
    /// Allocates for parts of these lengths; not called for a reply without parts. An error ends the request with it,
    /// and the payload is read and dropped.
    fn alloc(&mut self, meta: &[u8], lens: &[u64]) -> Result<(), Failure>;
    fn write(&mut self, part: usize, bytes: &[u8]);
}

/// A payload to send. Dropped when its last byte was written, or will never be.
pub trait Payload {
    fn part_count(&self) -> usize;
    fn part_len(&self, part: usize) -> u64;
    /// Appends the whole part; used for inline parts only.
    fn copy_part(&self, part: usize, out: &mut Vec<u8>);
    /// The address of a bulk part from `offset` on, in a process whose memory the peer may be able to read. None: it
    /// cannot be lent.
    fn address(&self, _part: usize, _offset: u64) -> Option<u64> {
        None
    }
}

/// Why the owner refuses something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub code: i32,
    pub message: String,
}
