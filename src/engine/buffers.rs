//! Memory that crosses the border: payloads on their way out, replies on their way in, bodies of incoming calls. The
//! only place of the engine that dereferences what C++ handed over.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::time::Instant;

use super::owner::{FreeBody, Owner};
use super::slabs::{self, Slab};
use crate::ffi::types::{sw_bytes, sw_code, sw_op_vtable, sw_part, sw_payload, sw_result};
use starwire_protocol::{Failure, Outcome, Payload};

/// A payload of C++'s on its way out; tells its owner when it is no longer needed.
pub struct OutPayload {
    parts: Parts,
    owner: *mut c_void,
    release: Option<unsafe extern "C" fn(*mut c_void)>,
}

/// Most payloads have one part: no allocation for those.
enum Parts {
    One([sw_part; 1]),
    Many(Vec<sw_part>),
}

// SAFETY: sw_payload's contract says that the memory is readable and the release function callable from any thread.
unsafe impl Send for OutPayload {}

impl OutPayload {
    /// # Safety
    /// `payload` obeys the contract written at `sw_payload`: `n_parts` readable parts whose memory stays valid and
    /// unchanged until released.
    pub unsafe fn take(payload: &sw_payload) -> Self {
        let given = if payload.n_parts == 0 || payload.parts.is_null() {
            &[][..]
        } else {
            // SAFETY: the caller's promise: parts points at n_parts parts.
            unsafe { std::slice::from_raw_parts(payload.parts, payload.n_parts) }
        };
        let parts = match given {
            [one] => Parts::One([*one]),
            many => Parts::Many(many.to_vec()),
        };
        Self { parts, owner: payload.owner, release: payload.release }
    }

    fn parts(&self) -> &[sw_part] {
        match &self.parts {
            Parts::One(one) => one,
            Parts::Many(many) => many,
        }
    }

    /// Where `part` lies, for the kernel to read. Null for a part that does not exist.
    pub fn pointer(&self, part: usize, offset: u64, len: u64) -> *mut u8 {
        match self.parts().get(part) {
            Some(p) if offset.checked_add(len).is_some_and(|end| end <= p.len as u64) => {
                p.data.cast::<u8>().cast_mut().wrapping_add(usize::try_from(offset).unwrap_or(0))
            }
            _ => ptr::null_mut(),
        }
    }
}

impl Payload for OutPayload {
    fn address(&self, part: usize, offset: u64) -> Option<u64> {
        let pointer = self.pointer(part, offset, 1);
        (!pointer.is_null()).then_some(pointer as u64)
    }

    fn part_count(&self) -> usize {
        self.parts().len()
    }

    fn part_len(&self, part: usize) -> u64 {
        self.parts().get(part).map_or(0, |p| p.len as u64)
    }

    fn copy_part(&self, part: usize, out: &mut Vec<u8>) {
        if let Some(p) = self.parts().get(part).filter(|p| p.len > 0) {
            // SAFETY: the memory of every part is readable until release, which only Drop calls.
            out.extend_from_slice(unsafe { std::slice::from_raw_parts(p.data.cast::<u8>(), p.len) });
        }
    }
}

impl Drop for OutPayload {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: called once, here; sw_payload's contract allows any thread.
            unsafe { release(self.owner) }
        }
    }
}

/// One outgoing call of C++'s, until its `done` was called.
pub struct ClientOp {
    vtable: &'static sw_op_vtable,
    op: *mut c_void,
    buffers: Buffers,
    finished: bool,
    /// When its shard took it, and whether it asks for a tensor: for the metrics.
    pub(super) started: Option<Instant>,
    pub(super) is_tensor: bool,
}

enum Buffers {
    None,
    One(*mut u8, u64),
    Many(Vec<(*mut u8, u64)>),
}

// SAFETY: sw_op_vtable's contract says that its functions run on any reactor thread; the op pointer is only handed
// back.
unsafe impl Send for ClientOp {}

impl ClientOp {
    /// # Safety
    /// `vtable` is valid for ever and its functions accept `op` until `done` was called.
    pub unsafe fn new(vtable: *const sw_op_vtable, op: *mut c_void) -> Self {
        // SAFETY: the caller's promise.
        let vtable = unsafe { &*vtable };
        Self { vtable, op, buffers: Buffers::None, finished: false, started: None, is_tensor: false }
    }

    /// Asks the owner for memory for a reply's parts.
    pub fn alloc(&mut self, meta: &[u8], lens: &[u64]) -> Result<(), Failure> {
        let Some(alloc) = self.vtable.alloc else {
            return Err(Failure { code: 13, message: "the caller takes no payload".into() });
        };
        let mut one = [ptr::null_mut::<c_void>(); 1];
        let mut many = Vec::new();
        let bufs: &mut [*mut c_void] = if lens.len() == 1 {
            &mut one
        } else {
            many.resize(lens.len(), ptr::null_mut());
            &mut many
        };
        // SAFETY: the op is alive (done was not called); lens and bufs have lens.len() elements.
        let code = unsafe { alloc(self.op, sw_bytes::of(meta), lens.len(), lens.as_ptr(), bufs.as_mut_ptr()) };
        if code != 0 {
            return Err(Failure { code, message: "the reply was refused by its receiver".into() });
        }
        if bufs.iter().zip(lens).any(|(b, l)| b.is_null() && *l > 0) {
            return Err(Failure { code: 8, message: "no memory for the reply".into() });
        }
        self.buffers = match (bufs, lens) {
            ([buf], [len]) => Buffers::One(buf.cast(), *len),
            (bufs, lens) => Buffers::Many(bufs.iter().zip(lens).map(|(b, l)| (b.cast(), *l)).collect()),
        };
        Ok(())
    }

    /// Where `offset..offset+len` of a part goes, for the kernel to write. Null if that is not inside a buffer.
    pub fn pointer(&self, part: usize, offset: u64, len: u64) -> *mut u8 {
        let (base, size) = match &self.buffers {
            Buffers::One(base, size) if part == 0 => (*base, *size),
            Buffers::Many(all) => all.get(part).copied().unwrap_or((ptr::null_mut(), 0)),
            _ => (ptr::null_mut(), 0),
        };
        place(base, size, offset, len)
    }

    /// Copies a small part into its buffer.
    pub fn write(&mut self, part: usize, bytes: &[u8]) {
        let to = self.pointer(part, 0, bytes.len() as u64);
        if !to.is_null() {
            // SAFETY: `pointer` checked that the range lies in the buffer that `alloc` returned, valid until `done`.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
        }
    }

    pub fn done(self, outcome: &Outcome<'_>) {
        match outcome {
            Outcome::Ok { meta } => self.finish(0, b"", meta, 1),
            Outcome::PeerError { code, message, details } => self.finish(*code, message.as_bytes(), details, 1),
            Outcome::Local { code, message } => self.finish(*code, message.as_bytes(), b"", 0),
        }
    }

    fn finish(mut self, code: sw_code, message: &[u8], meta: &[u8], from_peer: u32) {
        self.end(code, message, meta, from_peer);
    }

    fn end(&mut self, code: sw_code, message: &[u8], meta: &[u8], from_peer: u32) {
        if std::mem::replace(&mut self.finished, true) {
            return;
        }
        let result = sw_result { code, message: sw_bytes::of(message), meta: sw_bytes::of(meta), from_peer };
        if let Some(done) = self.vtable.done {
            // SAFETY: first and only call (guarded by `finished`); the op is alive until it.
            unsafe { done(self.op, &result) }
        }
    }
}

impl Drop for ClientOp {
    /// An op that is dropped on some path nobody thought of must still end.
    fn drop(&mut self) {
        self.end(14, b"starwire: the call was dropped", b"", 0);
    }
}

/// Part alignment of incoming bodies: what TensorFlow's kernels expect of a tensor buffer.
const ALIGN: usize = 64;

/// Metadata and payload of an incoming call in one piece of memory, until `sw_body_release`.
pub struct InBody {
    memory: Memory,
    parts: Vec<sw_part>,
    meta: Box<[u8]>,
    /// The peer's answer to "who sent this" for errors in handlers.
    pub method: u16,
}

// SAFETY: the memory is owned; nothing in InBody is tied to a thread.
unsafe impl Send for InBody {}

/// Where a payload lies.
enum Memory {
    None,
    Heap(NonNull<u8>, Layout),
    Slab(Slab),
    Owner(NonNull<u8>, FreeBody),
}

impl Memory {
    /// None: there is not so much.
    fn new(len: usize, owner: &Owner) -> Option<Self> {
        if len == 0 {
            return Some(Self::None);
        }
        if let Some((start, free)) = owner.body_alloc(len) {
            return Some(Self::Owner(start, free));
        }
        match len {
            slabs::MIN..=slabs::MAX => Slab::take(len).ok().map(Self::Slab),
            len => {
                let layout = Layout::from_size_align(len, ALIGN).ok()?;
                // SAFETY: the layout has a size above 0.
                NonNull::new(unsafe { alloc(layout) }).map(|start| Self::Heap(start, layout))
            }
        }
    }

    fn start(&self) -> *mut u8 {
        match self {
            Self::None => ptr::null_mut(),
            Self::Heap(start, _) | Self::Owner(start, _) => start.as_ptr(),
            Self::Slab(slab) => slab.start().as_ptr(),
        }
    }
}

impl InBody {
    pub fn new(owner: &Owner, method: u16, meta: &[u8], lens: &[u64]) -> Result<Self, Failure> {
        let refuse = || Failure { code: 8, message: "no memory for the call's payload".into() };
        let mut offsets = Vec::with_capacity(lens.len());
        let mut total = 0usize;
        for len in lens {
            offsets.push(total);
            let len = usize::try_from(*len).map_err(|_| refuse())?;
            let padded = len.checked_add(ALIGN - 1).ok_or_else(refuse)? & !(ALIGN - 1);
            total = total.checked_add(padded).ok_or_else(refuse)?;
        }
        let memory = Memory::new(total, owner).ok_or_else(refuse)?;
        let base = memory.start();
        let parts = offsets
            .iter()
            .zip(lens)
            .map(|(at, len)| sw_part {
                data: base.wrapping_add(*at).cast_const().cast(),
                len: usize::try_from(*len).unwrap_or(0),
            })
            .collect();
        Ok(Self { memory, parts, meta: meta.into(), method })
    }

    pub fn pointer(&self, part: usize, offset: u64, len: u64) -> *mut u8 {
        self.parts
            .get(part)
            .map_or(ptr::null_mut(), |p| place(p.data.cast::<u8>().cast_mut(), p.len as u64, offset, len))
    }

    pub fn write(&mut self, part: usize, bytes: &[u8]) {
        let to = self.pointer(part, 0, bytes.len() as u64);
        if !to.is_null() {
            // SAFETY: `pointer` checked that the range lies in this body's memory.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
        }
    }

    pub fn parts(&self) -> &[sw_part] {
        &self.parts
    }

    pub fn meta(&self) -> &[u8] {
        &self.meta
    }
}

impl Drop for InBody {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.memory, Memory::None) {
            Memory::None => {}
            // SAFETY: allocated in `Memory::new` with this layout, freed only here.
            Memory::Heap(start, layout) => unsafe { dealloc(start.as_ptr(), layout) },
            Memory::Slab(slab) => slab.give_back(),
            // SAFETY: it came with this memory from `Owner::body_alloc`; called once, here.
            Memory::Owner(start, free) => unsafe { free(start.as_ptr().cast()) },
        }
    }
}

fn place(base: *mut u8, size: u64, offset: u64, len: u64) -> *mut u8 {
    if base.is_null() || offset.checked_add(len).is_none_or(|end| end > size) {
        return ptr::null_mut();
    }
    base.wrapping_add(usize::try_from(offset).unwrap_or(0))
}
