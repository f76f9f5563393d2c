//! Bulk bytes have no authentication code. Who can change them can spoil numbers, but must not choose what a request
//! asks a server to do: with a secret, the metadata of such a call ends with a digest of its payload, and the code of
//! the block covers it.

use sha2::{Digest, Sha256};

use super::limits::BULK_MIN;
use super::star::is_star;

/// Requests of this side have digests, and so must the peer's. A side with a secret requires it.
pub const FEATURE_DIGESTS: u64 = 4;
/// Bytes of a digest.
pub const DIGEST: usize = 32;

/// Whether calls of this method have one, if some of their payload may be bulk bytes. A star call's payload are values,
/// whose types and sizes are in its metadata, as is the digest of a plan that is registered.
pub fn has_digest(method: u16) -> bool {
    !is_star(method)
}

/// Of the payload with these parts; `None`: it is so short that no byte of it is a bulk byte.
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
    fn of_the_bytes_not_of_their_parts() {
        let bytes = [7; 8192];
        let whole = digest([&bytes[..]].into_iter());
        assert_eq!(whole, digest([&bytes[..1], b"", &bytes[1..]].into_iter()));
        assert!(whole.is_some() && whole != digest([&[8; 8192][..]].into_iter()));
        assert_eq!((digest([].into_iter()), digest([&bytes[1..]].into_iter())), (None, None));
        assert!(has_digest(4) && has_digest(20) && !has_digest(16) && !has_digest(17));
    }
}
