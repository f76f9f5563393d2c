//! Digests of requests. Bulk bytes have no authentication code: an attacker on the path can change numbers, but must
//! not change what a request asks a server to do. With a secret, the metadata of a call therefore ends with a digest of
//! its payload; the authentication code of the block covers the metadata.

use sha2::{Digest, Sha256};

use super::limits::BULK_MIN;
use super::star::is_star;

/// Feature bit: requests have digests. A side with a secret requires the bit of its peer.
pub const FEATURE_DIGESTS: u64 = 4;
/// Bytes of a digest.
pub const DIGEST: usize = 32;

/// Returns whether calls of this method have a digest if their payload may be bulk bytes. Star calls have none: their
/// payload is values, whose types and sizes are in the metadata, or a plan that the metadata names by its hash.
pub fn has_digest(method: u16) -> bool {
    !is_star(method)
}

/// Returns the digest of a payload with these parts, or `None` if the payload is too short to have bulk bytes.
pub fn digest<'a>(parts: impl Iterator<Item = &'a [u8]> + Clone) -> Option<[u8; DIGEST]> {
    let bytes: u64 = parts.clone().map(|part| part.len() as u64).sum();
    if bytes < BULK_MIN {
        return None;
    }
    let mut hash = Sha256::new();
    parts.for_each(|part| hash.update(part));
    Some(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_depends_on_bytes_and_not_on_parts() {
        let bytes = [7; 8192];
        let whole = digest([&bytes[..]].into_iter());
        assert_eq!(whole, digest([&bytes[..1], b"", &bytes[1..]].into_iter()));
        assert!(whole.is_some() && whole != digest([&[8; 8192][..]].into_iter()));
        assert_eq!((digest([].into_iter()), digest([&bytes[1..]].into_iter())), (None, None));
        assert!(has_digest(4) && has_digest(20) && !has_digest(16) && !has_digest(17));
    }
}
