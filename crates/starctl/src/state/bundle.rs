//! The index of a checkpoint as TensorFlow's Saver reads it (a tensor bundle): a sorted table from names to the places
//! of tensors in the data file, in the format of LevelDB's tables.

use std::collections::BTreeMap;

use prost::Message;

use crate::graph_def::{Dim, Shape};

/// A table's block may be as long as this; only one key is longer.
const BLOCK: usize = 16 << 10;
/// Every so many entries, a reader can begin.
const RESTART: usize = 16;
const MAGIC: u64 = 0xdb47_7524_8b80_fb57;
const FOOTER: usize = 48;

#[derive(Clone, PartialEq, Message)]
struct Header {
    #[prost(int32, tag = "1")]
    num_shards: i32,
    #[prost(message, optional, tag = "3")]
    version: Option<Version>,
}

#[derive(Clone, PartialEq, Message)]
struct Version {
    #[prost(int32, tag = "1")]
    producer: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Entry {
    #[prost(int32, tag = "1")]
    dtype: i32,
    #[prost(message, optional, tag = "2")]
    shape: Option<Shape>,
    #[prost(int64, tag = "4")]
    offset: i64,
    #[prost(int64, tag = "5")]
    size: i64,
    #[prost(fixed32, tag = "6")]
    crc32c: u32,
    #[prost(message, repeated, tag = "7")]
    slices: Vec<Slice>,
}

#[derive(Clone, PartialEq, Message)]
struct Slice {
    #[prost(message, repeated, tag = "1")]
    extent: Vec<Extent>,
}

#[derive(Clone, PartialEq, Message)]
struct Extent {
    #[prost(int64, tag = "1")]
    start: i64,
    /// Of a oneof, so that 0 is written as well.
    #[prost(int64, optional, tag = "2")]
    length: Option<i64>,
}

/// A tensor in the data file.
#[derive(Clone)]
pub struct Tensor {
    pub dtype: i32,
    pub dims: Vec<u64>,
    pub offset: u64,
    pub size: u64,
    pub crc32c: u32,
}

/// The index of one data file.
#[derive(Default)]
pub struct Index {
    entries: BTreeMap<Vec<u8>, Entry>,
}

impl Index {
    pub fn add(&mut self, name: &str, tensor: &Tensor) {
        self.entries.insert(name.into(), entry(tensor));
    }

    /// A tensor whose parts follow each other in the first dimension.
    pub fn add_parts(&mut self, name: &str, parts: &[Tensor]) {
        let Some(first) = parts.first() else { return };
        let (mut rows, mut slices) = (0, Vec::new());
        for part in parts {
            let starts = part.dims.iter().enumerate().map(|(at, size)| (if at == 0 { rows } else { 0 }, number(*size)));
            let extents: Vec<(i64, i64)> = starts.collect();
            self.entries.insert(slice_key(name, &extents), entry(part));
            let extent =
                extents.iter().map(|(start, length)| Extent { start: *start, length: Some(*length) }).collect();
            slices.push(Slice { extent });
            rows += extents.first().map_or(0, |(_, length)| *length);
        }
        let mut shape = shape(&first.dims);
        shape.dim[0].size = rows;
        let whole = Entry { dtype: first.dtype, shape: Some(shape), slices, ..Entry::default() };
        self.entries.insert(name.into(), whole);
    }

    /// The content of the file.
    pub fn table(&self) -> Vec<u8> {
        let header = Header { num_shards: 1, version: Some(Version { producer: 1 }) };
        let entries = self.entries.iter().map(|(key, entry)| (key.clone(), entry.encode_to_vec()));
        let (mut table, mut blocks, mut block) = (Vec::new(), Block::default(), Block::default());
        let mut last = Vec::new();
        for (key, value) in std::iter::once((Vec::new(), header.encode_to_vec())).chain(entries) {
            if block.bytes.len() + key.len() + value.len() > BLOCK && block.count > 0 {
                blocks.add(&last, &std::mem::take(&mut block).write(&mut table));
            }
            block.add(&key, &value);
            last = key;
        }
        blocks.add(&last, &block.write(&mut table));
        let mut footer = Block::default().write(&mut table);
        footer.extend(blocks.write(&mut table));
        footer.resize(FOOTER - 8, 0);
        table.extend(footer);
        table.extend(MAGIC.to_le_bytes());
        table
    }
}

/// A checksum as it is stored: of data that contain checksums, too.
pub fn masked(crc32c: u32) -> u32 {
    crc32c.rotate_right(15).wrapping_add(0xa282_ead8)
}

fn number(size: u64) -> i64 {
    // Nothing in memory is longer.
    i64::try_from(size).unwrap_or(i64::MAX)
}

fn shape(dims: &[u64]) -> Shape {
    let dim = dims.iter().map(|size| Dim { size: number(*size) }).collect();
    Shape { dim, unknown_rank: false }
}

fn entry(tensor: &Tensor) -> Entry {
    Entry {
        dtype: tensor.dtype,
        shape: Some(shape(&tensor.dims)),
        offset: number(tensor.offset),
        size: number(tensor.size),
        crc32c: masked(tensor.crc32c),
        slices: Vec::new(),
    }
}

/// Under which the part of a tensor is found: TensorFlow's ordered code of 0, the name, and each dimension's extent.
fn slice_key(name: &str, extents: &[(i64, i64)]) -> Vec<u8> {
    let mut key = Vec::new();
    put_unsigned(&mut key, 0);
    for byte in name.bytes() {
        match byte {
            0 => key.extend([0, 0xff]),
            0xff => key.extend([0xff, 0]),
            byte => key.push(byte),
        }
    }
    key.extend([0, 1]);
    put_unsigned(&mut key, extents.len() as u64);
    for (start, length) in extents {
        put_signed(&mut key, *start);
        put_signed(&mut key, *length);
    }
    key
}

fn put_unsigned(key: &mut Vec<u8>, number: u64) {
    let bytes = number.to_be_bytes();
    let used = &bytes[number.leading_zeros() as usize / 8..];
    // At most 8.
    key.push(used.len().to_le_bytes()[0]);
    key.extend(used);
}

/// As many leading ones as there are bytes, then the number with its sign.
fn put_signed(key: &mut Vec<u8>, number: i64) {
    let magnitude = (if number < 0 { !number } else { number }).unsigned_abs();
    let bits = u64::BITS - magnitude.leading_zeros();
    let length = bits / 7 + 1;
    let sign = if number < 0 { 0xff } else { 0 };
    let mut bytes = [sign; 10];
    bytes[2..].copy_from_slice(&number.to_be_bytes());
    let used = &mut bytes[10 - length as usize..];
    let header = !(u16::MAX >> length);
    used.iter_mut().zip(header.to_be_bytes()).for_each(|(byte, ones)| *byte ^= ones);
    key.extend(&*used);
}

#[derive(Default)]
struct Block {
    bytes: Vec<u8>,
    restarts: Vec<usize>,
    count: usize,
}

impl Block {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        if self.count % RESTART == 0 {
            self.restarts.push(self.bytes.len());
        }
        self.count += 1;
        // Nothing is shared with the key before.
        [0, key.len(), value.len()].iter().for_each(|number| put_varint(&mut self.bytes, *number as u64));
        self.bytes.extend(key);
        self.bytes.extend(value);
    }

    /// Appends the block, and returns where it is, as tables say it.
    fn write(mut self, table: &mut Vec<u8>) -> Vec<u8> {
        if self.restarts.is_empty() {
            self.restarts.push(0);
        }
        self.restarts.push(self.restarts.len());
        // Blocks are short.
        self.restarts.iter().for_each(|number| self.bytes.extend(&number.to_le_bytes()[..4]));
        let mut handle = Vec::new();
        put_varint(&mut handle, table.len() as u64);
        put_varint(&mut handle, self.bytes.len() as u64);
        const NOT_COMPRESSED: u8 = 0;
        self.bytes.push(NOT_COMPRESSED);
        table.extend(&self.bytes);
        table.extend(masked(crc32c::crc32c(&self.bytes)).to_le_bytes());
        handle
    }
}

fn put_varint(out: &mut Vec<u8>, number: u64) {
    prost::encoding::encode_varint(number, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_keys_are_ordered_and_have_tensorflows_bytes() {
        let signed = |number| {
            let mut key = Vec::new();
            put_signed(&mut key, number);
            key
        };
        assert_eq!(signed(0), [0x80]);
        assert_eq!(signed(63), [0xbf]);
        assert_eq!(signed(-1), [0x7f]);
        assert_eq!(signed(64), [0xc0, 0x40]);
        assert_eq!(signed(8191), [0xdf, 0xff]);
        assert_eq!(signed(8192), [0xe0, 0x20, 0x00]);
        let numbers = [i64::MIN, -1 << 40, -8193, -8192, -65, -64, -1, 0, 1, 63, 64, 8191, 8192, 1 << 40, i64::MAX];
        assert!(numbers.windows(2).all(|pair| signed(pair[0]) < signed(pair[1])));
        let mut key = Vec::new();
        [0, 1, 255, 256].iter().for_each(|number| put_unsigned(&mut key, *number));
        assert_eq!(key, [0, 1, 1, 1, 255, 2, 1, 0]);
    }
}
