//! What a parameter server keeps for star calls.

use sha2::{Digest, Sha256};

use super::guard;
use super::types::sw_bytes;

/// SHA-256 of `bytes`: the name of a plan.
///
/// # Safety
/// `bytes` is readable; `out` has room for 32 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_sha256(bytes: sw_bytes, out: *mut u8) {
    // SAFETY: the caller's promise.
    let bytes = unsafe { bytes.as_slice() };
    let digest = guard([0; 32], || Sha256::digest(bytes).into());
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(digest.as_ptr(), out, digest.len()) }
}
