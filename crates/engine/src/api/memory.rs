//! Memory shared by the engine and its owner: outgoing payloads, buffers for replies, bodies of incoming calls. Only
//! this file and `links/conn.rs`, which hands the memory to the kernel, use pointers to it.

use std::alloc::{Layout, alloc, dealloc};
use std::any::Any;
use std::ffi::c_void;
use std::ptr::{self, NonNull};

use super::host::Host;
use crate::system::slabs::{self, Slab};
use starwire_protocol::{CallBuffer, Failure, Payload, code, digest};

/// A contiguous piece of memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub start: *mut u8,
    pub len: usize,
}

impl Piece {
    /// The address of `offset..offset+len`; null if that is not inside.
    fn pointer(&self, offset: u64, len: u64) -> *mut u8 {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len as u64);
        match usize::try_from(offset) {
            Ok(offset) if inside && !self.start.is_null() => self.start.wrapping_add(offset),
            _ => ptr::null_mut(),
        }
    }
}

/// Most payloads have one part, which needs no allocation.
enum Pieces {
    None,
    One(Piece),
    Many(Vec<Piece>),
}

impl Pieces {
    fn of(pieces: &[Piece]) -> Self {
        match pieces {
            [] => Self::None,
            [one] => Self::One(*one),
            many => Self::Many(many.to_vec()),
        }
    }

    fn as_slice(&self) -> &[Piece] {
        match self {
            Self::None => &[],
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }

    fn pointer(&self, part: usize, offset: u64, len: u64) -> *mut u8 {
        self.as_slice().get(part).map_or(ptr::null_mut(), |piece| piece.pointer(offset, len))
    }
}

/// An outgoing payload. It keeps its memory alive, readable and unchanged until it is dropped.
pub struct OutPayload {
    parts: Pieces,
    _owner: PayloadOwner,
}

#[allow(dead_code, reason = "only dropped")]
enum PayloadOwner {
    Foreign(Foreign),
    Rust(Box<dyn Any + Send>),
}

/// Tells a foreign owner that its memory is no longer needed.
struct Foreign {
    owner: *mut c_void,
    release: Option<unsafe extern "C" fn(*mut c_void)>,
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: `OutPayload::foreign`'s contract: any thread may call it; here it is called once.
            unsafe { release(self.owner) }
        }
    }
}

// SAFETY: the memory is only read, and a foreign owner's release may run on any thread (`OutPayload::foreign`).
unsafe impl Send for OutPayload {}

impl OutPayload {
    /// A payload with these parts, which drops them when it is no longer needed.
    pub fn of<B: AsRef<[u8]> + Send + 'static>(parts: Vec<B>) -> Self {
        // A part may contain its bytes itself: the vector's memory stays in place, and the parts are neither moved nor
        // borrowed mutably until they are dropped.
        let pieces: Vec<Piece> = parts
            .iter()
            .map(|part| part.as_ref())
            .map(|bytes| Piece { start: bytes.as_ptr().cast_mut(), len: bytes.len() })
            .collect();
        Self { parts: Pieces::of(&pieces), _owner: PayloadOwner::Rust(Box::new(parts)) }
    }

    /// A payload in foreign memory.
    ///
    /// # Safety
    /// The pieces are readable and unchanged until `release(owner)` is called, which happens once, on any thread.
    pub unsafe fn foreign(
        pieces: &[Piece],
        owner: *mut c_void,
        release: Option<unsafe extern "C" fn(*mut c_void)>,
    ) -> Self {
        Self { parts: Pieces::of(pieces), _owner: PayloadOwner::Foreign(Foreign { owner, release }) }
    }

    /// The address of a part for the kernel; null if it does not exist.
    pub(crate) fn pointer(&self, part: usize, offset: u64, len: u64) -> *mut u8 {
        self.parts.pointer(part, offset, len)
    }

    pub(crate) fn parts(&self) -> impl Iterator<Item = &[u8]> + Clone {
        self.parts.as_slice().iter().map(|piece| self.bytes(piece))
    }

    /// `piece`: one of the payload's.
    fn bytes(&self, piece: &Piece) -> &[u8] {
        match piece.len {
            0 => &[],
            // SAFETY: every piece is readable until the owner is released, which only Drop does.
            len => unsafe { std::slice::from_raw_parts(piece.start, len) },
        }
    }
}

impl Payload for OutPayload {
    fn address(&self, part: usize, offset: u64) -> Option<u64> {
        let pointer = self.pointer(part, offset, 1);
        (!pointer.is_null()).then_some(pointer as u64)
    }

    fn part_count(&self) -> usize {
        self.parts.as_slice().len()
    }

    fn part_len(&self, part: usize) -> u64 {
        self.parts.as_slice().get(part).map_or(0, |piece| piece.len as u64)
    }

    fn copy_part(&self, part: usize, out: &mut Vec<u8>) {
        if let Some(piece) = self.parts.as_slice().get(part) {
            out.extend_from_slice(self.bytes(piece));
        }
    }
}

/// Memory for the parts of a reply, from `Op::alloc` to `Op::done`.
pub struct Buffers {
    pieces: Pieces,
    owned: Vec<Vec<u8>>,
}

// SAFETY: the memory is the op's (`Buffers::foreign`) or owned; nothing of it is tied to a thread.
unsafe impl Send for Buffers {}

impl Default for Buffers {
    fn default() -> Self {
        Self::none()
    }
}

impl Buffers {
    pub fn none() -> Self {
        Self { pieces: Pieces::None, owned: Vec::new() }
    }

    /// One buffer per part. They are returned by `Op::done`.
    pub fn owned(mut buffers: Vec<Vec<u8>>) -> Self {
        let pieces: Vec<Piece> =
            buffers.iter_mut().map(|buffer| Piece { start: buffer.as_mut_ptr(), len: buffer.len() }).collect();
        Self { pieces: Pieces::of(&pieces), owned: buffers }
    }

    /// # Safety
    /// The pieces are writable, and used by no other code, until the op's `done` is called.
    pub unsafe fn foreign(pieces: &[Piece]) -> Self {
        Self { pieces: Pieces::of(pieces), owned: Vec::new() }
    }

    /// The buffers that `owned` took.
    pub fn into_owned(self) -> Vec<Vec<u8>> {
        self.owned
    }

    pub(crate) fn fit(&self, lens: &[u64]) -> bool {
        self.pieces.as_slice().iter().map(|piece| piece.len as u64).eq(lens.iter().copied())
    }

    pub(crate) fn pointer(&self, part: usize, offset: u64, len: u64) -> *mut u8 {
        self.pieces.pointer(part, offset, len)
    }

    pub(crate) fn write(&mut self, part: usize, bytes: &[u8]) {
        let to = self.pointer(part, 0, bytes.len() as u64);
        if !to.is_null() {
            // SAFETY: the range lies in a piece that is writable and ours until `done`.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
        }
    }
}

/// Memory that the engine's owner lends for a call's payload.
pub struct ForeignMemory {
    start: NonNull<u8>,
    free: unsafe extern "C" fn(*mut c_void),
}

impl ForeignMemory {
    /// # Safety
    /// From `start` on there are as many writable bytes as `Host::call_memory` was asked for, until `free(start)`,
    /// which is called once, on any thread.
    pub unsafe fn new(start: NonNull<u8>, free: unsafe extern "C" fn(*mut c_void)) -> Self {
        Self { start, free }
    }
}

/// Alignment of an incoming payload's parts, as TensorFlow's kernels expect it.
const ALIGN: usize = 64;

/// Metadata and payload of an incoming call. The payload is complete when the owner gets it.
pub struct InBody {
    memory: Memory,
    pieces: Vec<Piece>,
    meta: Box<[u8]>,
}

// SAFETY: the memory is owned; nothing in InBody is tied to a thread.
unsafe impl Send for InBody {}

/// The memory of a payload.
enum Memory {
    None,
    Heap(NonNull<u8>, Layout),
    Slab(Slab),
    Foreign(ForeignMemory),
}

impl Memory {
    /// None: out of memory.
    fn new(len: usize, host: &impl Host) -> Option<Self> {
        if len == 0 {
            return Some(Self::None);
        }
        if let Some(memory) = host.call_memory(len) {
            return Some(Self::Foreign(memory));
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
            Self::Heap(start, _) => start.as_ptr(),
            Self::Foreign(memory) => memory.start.as_ptr(),
            Self::Slab(slab) => slab.start().as_ptr(),
        }
    }
}

/// A call may have so many parts, and one more for each `BYTES_PER_PART`: each takes memory that its length does not
/// say.
const FREE_PARTS: u64 = 1024;
const BYTES_PER_PART: u64 = 64;

fn check_parts(lens: &[u64]) -> Result<(), Failure> {
    let bytes = lens.iter().fold(0u64, |sum, len| sum.saturating_add(*len));
    let parts = lens.len() as u64;
    if parts <= FREE_PARTS + bytes / BYTES_PER_PART {
        return Ok(());
    }
    let message = format!("starwire: a call of {parts} parts with {bytes} bytes together: they are too small");
    Err(Failure { code: code::RESOURCE_EXHAUSTED, message })
}

impl InBody {
    pub(crate) fn new(host: &impl Host, meta: &[u8], lens: &[u64]) -> Result<Self, Failure> {
        check_parts(lens)?;
        let refuse =
            || Failure { code: code::RESOURCE_EXHAUSTED, message: "out of memory for the call's payload".into() };
        let mut places = Vec::with_capacity(lens.len());
        let mut total = 0usize;
        for len in lens {
            let len = usize::try_from(*len).map_err(|_| refuse())?;
            places.push((total, len));
            let padded = len.checked_add(ALIGN - 1).ok_or_else(refuse)? & !(ALIGN - 1);
            total = total.checked_add(padded).ok_or_else(refuse)?;
        }
        let memory = Memory::new(total, host).ok_or_else(refuse)?;
        let base = memory.start();
        let pieces = places.into_iter().map(|(at, len)| Piece { start: base.wrapping_add(at), len }).collect();
        Ok(Self { memory, pieces, meta: meta.into() })
    }

    pub(crate) fn pointer(&self, part: usize, offset: u64, len: u64) -> *mut u8 {
        self.pieces.get(part).map_or(ptr::null_mut(), |piece| piece.pointer(offset, len))
    }

    pub fn meta(&self) -> &[u8] {
        &self.meta
    }

    /// Removes the payload's digest from the metadata. Returns false if the digest does not match the payload.
    pub(crate) fn is_authentic(&mut self) -> bool {
        let Some(digest) = digest::digest(self.parts()) else { return true };
        match self.meta.split_last_chunk() {
            Some((meta, claimed)) if *claimed == digest => {
                self.meta = meta.into();
                true
            }
            _ => false,
        }
    }

    /// The payload's parts, each 64-byte aligned.
    pub fn parts(&self) -> impl Iterator<Item = &[u8]> + Clone {
        self.pieces.iter().map(|piece| match piece.len {
            0 => &[][..],
            // SAFETY: the piece lies in this body's memory, and all of it was written before the owner got the body.
            len => unsafe { std::slice::from_raw_parts(piece.start, len) },
        })
    }

    /// The same as addresses, for owners that are not written in Rust.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }
}

impl CallBuffer for Box<InBody> {
    fn write(&mut self, part: usize, bytes: &[u8]) {
        let to = self.pointer(part, 0, bytes.len() as u64);
        if !to.is_null() {
            // SAFETY: `pointer` checked that the range lies in this body's memory.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
        }
    }
}

impl Drop for InBody {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.memory, Memory::None) {
            Memory::None => {}
            // SAFETY: allocated in `Memory::new` with this layout, freed only here.
            Memory::Heap(start, layout) => unsafe { dealloc(start.as_ptr(), layout) },
            Memory::Slab(slab) => slab.give_back(),
            // SAFETY: `ForeignMemory::new`'s contract; called once, here.
            Memory::Foreign(memory) => unsafe { (memory.free)(memory.start.as_ptr().cast()) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_only_found_inside() {
        let mut bytes = [0u8; 4];
        let piece = Piece { start: bytes.as_mut_ptr(), len: 4 };
        assert_eq!(piece.pointer(1, 3), bytes.as_mut_ptr().wrapping_add(1));
        assert_eq!(piece.pointer(4, 0), bytes.as_mut_ptr().wrapping_add(4));
        assert!(piece.pointer(2, 3).is_null() && piece.pointer(u64::MAX, 2).is_null());
        assert!(Piece { start: ptr::null_mut(), len: 4 }.pointer(0, 1).is_null());
    }

    #[test]
    fn parts_have_a_size_that_is_worth_their_memory() {
        assert!(check_parts(&[]).is_ok() && check_parts(&[1; 1024]).is_ok() && check_parts(&[64; 65_536]).is_ok());
        assert!(check_parts(&[1 << 40]).is_ok() && check_parts(&[u64::MAX, u64::MAX]).is_ok());
        let refused = check_parts(&[1; 65_536]).unwrap_err();
        assert_eq!(refused.code, code::RESOURCE_EXHAUSTED);
        assert!(refused.message.contains("65536 parts with 65536 bytes"), "{}", refused.message);
    }

    #[test]
    fn a_payload_keeps_parts_that_hold_their_bytes_themselves() {
        let payload = OutPayload::of(vec![[1u8, 2], [3, 4]]);
        let moved = Box::new(payload);
        let mut out = Vec::new();
        (0..moved.part_count()).for_each(|part| moved.copy_part(part, &mut out));
        assert_eq!(out, [1, 2, 3, 4]);
        assert_eq!((moved.part_len(1), moved.part_len(2)), (2, 0));
        assert!(moved.address(1, 1).is_some() && moved.address(1, 2).is_none());
    }
}
