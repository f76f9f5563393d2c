//! Makes TensorFlow's symbols weak in the shim's objects.
//!
//! A libstarwire.so built for one TensorFlow may be loaded into another that lacks some of its symbols. With strong
//! references, the dynamic loader fails with a mangled symbol name before any of our code runs; with weak ones, our
//! constructor runs, compares the versions and reports a readable error. Only symbols that TensorFlow's libraries
//! define are weakened, so the linker still catches typos.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

const SHT_SYMTAB: u32 = 2;
const SHT_DYNSYM: u32 = 11;
const SHN_UNDEF: u16 = 0;
const STB_GLOBAL: u8 = 1;
const STB_WEAK: u8 = 2;
const SYMBOL_SIZE: usize = 24;

/// A symbol table and its strings, read from a little-endian ELF64 file.
struct Symbols {
    table: Vec<u8>,
    table_offset: usize,
    strings: Vec<u8>,
}

impl Symbols {
    fn read(file: &mut File, kind: u32) -> Option<Symbols> {
        let header = read_at(file, 0, 64)?;
        if header.get(..6)? != b"\x7fELF\x02\x01" {
            return None;
        }
        let (offset, size, count) = (u64_at(&header, 40)?, u16_at(&header, 58)?, u16_at(&header, 60)?);
        let sections = read_at(file, offset, usize::from(size) * usize::from(count))?;
        let section = |index: usize| sections.get(index * usize::from(size)..(index + 1) * usize::from(size));
        let symbols = (0..usize::from(count)).filter_map(section).find(|bytes| u32_at(bytes, 4) == Some(kind))?;
        let strings = section(usize::try_from(u32_at(symbols, 40)?).ok()?)?;
        let mut load = |bytes: &[u8]| read_at(file, u64_at(bytes, 24)?, usize::try_from(u64_at(bytes, 32)?).ok()?);
        Some(Symbols {
            table: load(symbols)?,
            strings: load(strings)?,
            table_offset: usize::try_from(u64_at(symbols, 24)?).ok()?,
        })
    }

    /// Yields (offset in the table, name, binding, defined here).
    fn iter(&self) -> impl Iterator<Item = (usize, &[u8], u8, bool)> {
        self.table.chunks_exact(SYMBOL_SIZE).enumerate().filter_map(|(index, symbol)| {
            let start = usize::try_from(u32_at(symbol, 0)?).ok()?;
            let name = self.strings.get(start..)?.split(|byte| *byte == 0).next()?;
            Some((index * SYMBOL_SIZE, name, symbol.get(4)? >> 4, u16_at(symbol, 6)? != SHN_UNDEF))
        })
    }
}

/// The strong undefined symbols of an object file.
pub fn undefined(object: &Path) -> Result<Vec<Vec<u8>>, String> {
    let symbols = open(object, SHT_SYMTAB)?;
    Ok(symbols
        .iter()
        .filter(|(_, _, binding, defined)| *binding == STB_GLOBAL && !defined)
        .map(|s| s.1.to_vec())
        .collect())
}

/// Returns the symbols in `wanted` that the shared library defines.
pub fn defined_in(library: &Path, wanted: &HashSet<Vec<u8>>) -> Result<HashSet<Vec<u8>>, String> {
    let symbols = open(library, SHT_DYNSYM)?;
    Ok(symbols
        .iter()
        .filter(|(_, name, _, defined)| *defined && wanted.contains(*name))
        .map(|s| s.1.to_vec())
        .collect())
}

/// Returns the bytes of `object` with the undefined symbols in `names` made weak.
pub fn weaken(object: &Path, names: &HashSet<Vec<u8>>) -> Result<Vec<u8>, String> {
    let symbols = open(object, SHT_SYMTAB)?;
    let mut bytes = std::fs::read(object).map_err(|error| format!("{}: {error}", object.display()))?;
    for (position, name, binding, defined) in symbols.iter() {
        if binding == STB_GLOBAL && !defined && names.contains(name) {
            let info = &mut bytes[symbols.table_offset + position + 4];
            *info = (*info & 0x0f) | (STB_WEAK << 4);
        }
    }
    Ok(bytes)
}

fn open(path: &Path, kind: u32) -> Result<Symbols, String> {
    let mut file = File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Symbols::read(&mut file, kind)
        .ok_or_else(|| format!("{}: not a 64-bit little-endian ELF file with symbols", path.display()))
}

fn read_at(file: &mut File, offset: u64, len: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    file.seek(SeekFrom::Start(offset)).ok()?;
    file.read_exact(&mut bytes).ok()?;
    Some(bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}
