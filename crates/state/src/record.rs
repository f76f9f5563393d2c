//! The records of a journal: length, CRC32C and kind, then the content. Numbers are little-endian.

use std::ops::Range;

use crate::codec::{Reader, put_bytes, put_numbers, put_u64};

pub const VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"swstate\n";
/// Length, CRC32C of everything else, kind.
pub const HEAD: usize = 13;
/// Rows are collected until a record is this long. One with a single row may be longer.
pub const FULL: usize = 1 << 20;

/// A variable. The bytes are its owner's, and say how to create it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    pub bytes: Vec<u8>,
    pub dims: Vec<u64>,
    pub rows: u64,
    pub row_bytes: u64,
}

impl Definition {
    /// Of all rows; None if there cannot be so many.
    pub fn size(&self) -> Option<u64> {
        self.rows.checked_mul(self.row_bytes).filter(|bytes| i64::try_from(*bytes).is_ok())
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// The first one of a journal.
    Header {
        task: &'a str,
        incarnations: Vec<u64>,
    },
    Variable {
        id: u32,
        definition: Definition,
    },
    /// Runs of rows, and their content.
    Rows {
        id: u32,
        runs: Vec<(u64, u64)>,
        content: &'a [u8],
    },
    /// The variable does not exist any more.
    Gone {
        id: u32,
    },
    /// The calls that were applied, as their owner writes them.
    Calls(&'a [u8]),
    /// Everything before it is valid. `time`: milliseconds of Unix time.
    Commit {
        flush: u64,
        time: u64,
    },
}

/// A version that this code does not know.
#[derive(Debug, PartialEq, Eq)]
pub enum Unreadable {
    Version(u32),
    Content(&'static str),
}

impl Record<'_> {
    /// Appends the record.
    pub fn write(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; HEAD]);
        let kind = match self {
            Self::Header { task, incarnations } => {
                out.extend(MAGIC);
                out.extend(VERSION.to_le_bytes());
                put_bytes(out, task.as_bytes());
                put_numbers(out, incarnations);
                0
            }
            Self::Variable { id, definition } => {
                out.extend(id.to_le_bytes());
                put_bytes(out, &definition.bytes);
                put_numbers(out, &definition.dims);
                put_numbers(out, &[definition.rows, definition.row_bytes]);
                1
            }
            Self::Rows { id, runs, content } => {
                out.extend(id.to_le_bytes());
                put_u64(out, runs.len() as u64);
                for (first, count) in runs {
                    out.extend(first.to_le_bytes());
                    out.extend(count.to_le_bytes());
                }
                out.extend(*content);
                2
            }
            Self::Gone { id } => {
                out.extend(id.to_le_bytes());
                3
            }
            Self::Calls(calls) => {
                out.extend(*calls);
                4
            }
            Self::Commit { flush, time } => {
                out.extend(flush.to_le_bytes());
                out.extend(time.to_le_bytes());
                5
            }
        };
        let length = (out.len() - start - HEAD) as u64;
        out[start..start + 8].copy_from_slice(&length.to_le_bytes());
        out[start + 12] = kind;
        let checksum = checksum(&out[start..start + 8], &out[start + 12..]);
        out[start + 8..start + 12].copy_from_slice(&checksum.to_le_bytes());
    }
}

/// The length of a record's content, from its head.
pub fn length(head: &[u8; HEAD]) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|at| head[at]))
}

/// Whether head and content belong together.
pub fn is_whole(head: &[u8; HEAD], content: &[u8]) -> bool {
    let stored = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
    stored == crc32c::crc32c_append(checksum(&head[..8], &head[12..]), content)
}

fn checksum(length: &[u8], rest: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(length), rest)
}

/// Reads a whole record.
pub fn read(kind: u8, content: &[u8]) -> Result<Record<'_>, Unreadable> {
    let short = || Unreadable::Content("a record is too short");
    let mut rest = Reader(content);
    let record = match kind {
        0 => {
            if rest.take(MAGIC.len()) != Some(MAGIC) {
                return Err(Unreadable::Content("this is no journal of starwire's"));
            }
            let version = rest.u32().ok_or_else(short)?;
            if version != VERSION {
                return Err(Unreadable::Version(version));
            }
            let task = std::str::from_utf8(rest.bytes().ok_or_else(short)?);
            let task = task.map_err(|_| Unreadable::Content("the task is not UTF-8"))?;
            rest.numbers().map(|incarnations| Record::Header { task, incarnations })
        }
        1 => read_variable(&mut rest),
        2 => {
            let runs = read_runs(&mut rest).ok_or_else(short)?;
            return Ok(Record::Rows { id: runs.0, runs: runs.1, content: rest.0 });
        }
        3 => rest.u32().map(|id| Record::Gone { id }),
        4 => return Ok(Record::Calls(content)),
        5 => rest.u64().zip(rest.u64()).map(|(flush, time)| Record::Commit { flush, time }),
        _ => return Err(Unreadable::Content("it has a record of an unknown kind")),
    };
    record.filter(|_| rest.0.is_empty()).ok_or(Unreadable::Content("a record has a wrong length"))
}

fn read_variable<'a>(rest: &mut Reader<'a>) -> Option<Record<'a>> {
    let (id, bytes, dims, size) = (rest.u32()?, rest.bytes()?.to_vec(), rest.numbers()?, rest.numbers()?);
    let [rows, row_bytes] = size[..] else { return None };
    let definition = Definition { bytes, dims, rows, row_bytes };
    definition.size().map(|_| Record::Variable { id, definition })
}

fn read_runs(rest: &mut Reader<'_>) -> Option<(u32, Vec<(u64, u64)>)> {
    let (id, count) = (rest.u32()?, rest.count(16)?);
    let runs = (0..count).map(|_| rest.u64().zip(rest.u64())).collect::<Option<_>>()?;
    Some((id, runs))
}

/// Of rows that are in memory.
pub fn size(rows: u64, row_bytes: u64) -> usize {
    usize::try_from(rows * row_bytes).unwrap_or(usize::MAX)
}

/// The part of `content` that these rows take, which begin at `from`; None if they are not all there.
pub fn part(from: u64, rows: u64, row_bytes: u64, content: &[u8]) -> Option<Range<usize>> {
    let (start, bytes) = (usize::try_from(from).ok()?, usize::try_from(rows.checked_mul(row_bytes)?).ok()?);
    let end = start.checked_add(bytes).filter(|end| *end <= content.len())?;
    Some(start..end)
}
