//! The shared secret of a cluster, and the keys that a connection derives from it.
//!
//! With a secret, both sides first exchange a challenge (fresh random bytes). The secret and both challenges determine
//! two keys, one for each direction, and every later block ends with a code that only the holder of its direction's key
//! can compute. Neither a block of another connection, nor one of the other direction, nor one that was changed or
//! moved has the right code.

use std::sync::Arc;

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

use super::limits::{CHALLENGE, TAG};
use super::role::Role;

/// Makes each guess of a weak secret cost as much.
const ROUNDS: u32 = 200_000;
const SALT: &[u8] = b"starwire 2 secret";

/// A shared secret, stretched. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<[u8; 32]>);

impl Secret {
    /// Takes some milliseconds: once for each server, not for each connection.
    pub fn new(bytes: &[u8]) -> Self {
        Secret(Arc::new(stretch(bytes, SALT, ROUNDS)))
    }

    /// The key of the blocks that `sender` sends on the connection with these challenges.
    pub(super) fn key(&self, sender: Role, client: &[u8; CHALLENGE], server: &[u8; CHALLENGE]) -> BlockKey {
        let label: &[u8] = match sender {
            Role::Client => b"starwire 2 client\0",
            Role::Server => b"starwire 2 server\0",
        };
        BlockKey(hmac(
            &hmac(&*self.0).chain_update(label).chain_update(client).chain_update(server).finalize().into_bytes(),
        ))
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The key of one direction of one connection.
pub struct BlockKey(Hmac<Sha256>);

impl BlockKey {
    /// Fills in the code at the end of a control section. `block` is the header, whose checksum is left out, and the
    /// control section.
    pub fn sign(&self, block: &mut [u8]) {
        let at = block.len().saturating_sub(TAG);
        let code = self.code(&block[..at]).finalize().into_bytes();
        block[at..].copy_from_slice(&code[..TAG]);
    }

    /// Whether the code is right; compares in constant time. False also for a block without room for it.
    pub fn verify(&self, block: &[u8]) -> bool {
        match block.split_last_chunk::<TAG>() {
            Some((signed, code)) if signed.len() >= 16 => self.code(signed).verify_truncated_left(code).is_ok(),
            _ => false,
        }
    }

    fn code(&self, signed: &[u8]) -> Hmac<Sha256> {
        self.0.clone().chain_update(&signed[..12]).chain_update(&signed[16..])
    }
}

fn hmac(key: &[u8]) -> Hmac<Sha256> {
    // A block of SHA-256: keys that are longer are hashed, as HMAC prescribes.
    let mut block = [0; 64];
    match block.get_mut(..key.len()) {
        Some(beginning) => beginning.copy_from_slice(key),
        None => block[..32].copy_from_slice(&Sha256::digest(key)),
    }
    <Hmac<Sha256> as Mac>::new(&block.into())
}

/// PBKDF2 with HMAC-SHA256.
fn stretch(secret: &[u8], salt: &[u8], rounds: u32) -> [u8; 32] {
    let keyed = hmac(secret);
    let mut last: [u8; 32] =
        keyed.clone().chain_update(salt).chain_update(1u32.to_be_bytes()).finalize().into_bytes().into();
    let mut all = last;
    for _ in 1..rounds {
        last = keyed.clone().chain_update(last).finalize().into_bytes().into();
        all.iter_mut().zip(last).for_each(|(all, last)| *all ^= last);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn secrets_are_stretched_as_rfc_7914_has_it() {
        let once = stretch(b"passwd", b"salt", 1);
        assert_eq!(hex(&once), "55ac046e56e3089fec1691c22544b605f94185216dde0465e68b9d57c20dacbc");
        let often = stretch(b"Password", b"NaCl", 80_000);
        assert_eq!(hex(&often), "4ddcd8f60b98be21830cee5ef22701f9641a4418d04c0414aeff08876b34ab56");
        let long = [7; 65];
        assert_eq!(stretch(&long, SALT, 2), stretch(&Sha256::digest(long), SALT, 2));
    }

    #[test]
    fn keys_differ_by_secret_challenge_and_direction() {
        let secrets = [Secret::new(b"0123456789abcdef"), Secret::new(b"0123456789abcdeF")];
        let mut codes = Vec::new();
        for secret in &secrets {
            for (client, server) in [([1; 32], [1; 32]), ([2; 32], [1; 32]), ([1; 32], [2; 32])] {
                for role in [Role::Client, Role::Server] {
                    let mut block = [0; 64];
                    secret.key(role, &client, &server).sign(&mut block);
                    codes.push(block);
                }
            }
        }
        let count = codes.len();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), count);
    }

    #[test]
    fn a_code_covers_every_byte_but_the_checksum() {
        let key = Secret::new(b"0123456789abcdef").key(Role::Client, &[1; 32], &[2; 32]);
        let mut block: Vec<u8> = (0..72).collect();
        key.sign(&mut block);
        assert!(key.verify(&block));
        for at in 0..block.len() {
            block[at] ^= 1;
            assert_eq!(key.verify(&block), (12..16).contains(&at), "{at}");
            block[at] ^= 1;
        }
        assert!(!key.verify(&block[..40]) && !key.verify(&[]));
        assert!(!key.verify(&block[..20]), "no room for a header");
    }
}
