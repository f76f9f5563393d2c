//! The block header: the lengths of the sections that follow, and a checksum over header and control section.

use super::error::ProtocolError;
use super::limits::{FIRST_READ, HEADER, MAX_BULK, TAG};
use super::secret::BlockKey;
use super::sniff::{MAGIC, VERSION};

/// The checked fields of a block header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHeader {
    pub control: usize,
    pub bulk: u64,
    pub checksum: u32,
    pub sequence: u64,
}

impl BlockHeader {
    /// Reads a header. `sequence` is the number that the block must have, `max_control` the limit at this point of the
    /// connection.
    pub fn parse(bytes: &[u8; HEADER], sequence: u64, max_control: usize) -> Result<BlockHeader, ProtocolError> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let double = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if bytes[..4] != MAGIC {
            return Err(ProtocolError::Magic { block: sequence });
        }
        if bytes[4] != VERSION {
            return Err(ProtocolError::Version { block: sequence, found: bytes[4] });
        }
        if bytes[5..8] != [0; 3] {
            return Err(ProtocolError::Reserved { block: sequence });
        }
        let control = word(8) as usize;
        let bulk = double(16);
        if control > max_control {
            let (value, limit) = (control as u64, max_control as u64);
            return Err(ProtocolError::TooLarge { what: "length of a control section", value, limit });
        }
        if bulk > MAX_BULK {
            return Err(ProtocolError::TooLarge { what: "length of a bulk section", value: bulk, limit: MAX_BULK });
        }
        if control % 8 != 0 {
            return Err(ProtocolError::Frame { frame: "block header", why: "control length is not a multiple of 8" });
        }
        if bulk != 0 && HEADER + control < FIRST_READ {
            return Err(ProtocolError::Frame {
                frame: "block header",
                why: "bulk bytes after a control section that is too short",
            });
        }
        if double(24) != sequence {
            return Err(ProtocolError::Sequence { block: sequence, found: double(24) });
        }
        Ok(BlockHeader { control, bulk, checksum: word(12), sequence })
    }

    /// Checks a header and its control section against the header's checksum.
    pub fn verify(&self, block: &[u8]) -> Result<(), ProtocolError> {
        if checksum(block) == self.checksum { Ok(()) } else { Err(ProtocolError::Checksum { block: self.sequence }) }
    }
}

/// Fills in the header of a block: `block` is room for the header and the control section (a multiple of 8 long), which
/// is padded if a bulk section follows. With a key, a code is appended.
pub fn seal(block: &mut Vec<u8>, bulk: u64, sequence: u64, key: Option<&BlockKey>) {
    debug_assert!(block.len() >= HEADER && block.len() % 8 == 0);
    let tag = if key.is_some() { TAG } else { 0 };
    let len = if bulk == 0 { block.len() } else { block.len().max(FIRST_READ - tag) };
    block.resize(len + tag, 0);
    let control = u32::try_from(block.len() - HEADER).expect("a control section has at most MAX_CONTROL bytes");
    block[..4].copy_from_slice(&MAGIC);
    block[4..8].copy_from_slice(&[VERSION, 0, 0, 0]);
    block[8..12].copy_from_slice(&control.to_le_bytes());
    block[16..24].copy_from_slice(&bulk.to_le_bytes());
    block[24..32].copy_from_slice(&sequence.to_le_bytes());
    if let Some(key) = key {
        key.sign(block);
    }
    let sum = checksum(block);
    block[12..16].copy_from_slice(&sum.to_le_bytes());
}

fn checksum(block: &[u8]) -> u32 {
    let sum = crc32c::crc32c(&block[..12]);
    let sum = crc32c::crc32c_append(sum, &[0; 4]);
    crc32c::crc32c_append(sum, &block[16..])
}
