//! The file of a variable.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::{StateError, at};
use crate::files::variable_path;
use crate::record::{self, Definition};

pub struct Variable {
    pub definition: Definition,
    pub path: PathBuf,
    pub file: File,
}

impl Variable {
    pub fn open(folder: &Path, id: u32, definition: Definition, must_exist: bool) -> Result<Self, StateError> {
        let path = variable_path(folder, id);
        // `Record::read` has checked it.
        let expected = definition.size().unwrap_or_default();
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(!must_exist).open(&path).map_err(at(&path, "open"))?;
        let bytes = file.metadata().map_err(at(&path, "examine"))?.len();
        if must_exist && bytes != expected {
            return Err(StateError::Length { path, bytes, expected });
        }
        file.set_len(expected).map_err(at(&path, "lengthen"))?;
        Ok(Self { definition, path, file })
    }

    /// Writes those rows that were not written yet. None: they are not all rows of this variable.
    pub fn write(&self, runs: &[(u64, u64)], content: &[u8], written: &mut Rows) -> Result<Option<()>, StateError> {
        let Definition { rows, row_bytes, .. } = self.definition;
        let mut window = Window { variable: self, first: 0, patches: Vec::new(), content };
        let mut from = 0;
        for (first, count) in runs {
            if first.checked_add(*count).is_none_or(|end| end > rows) {
                return Ok(None);
            }
            let Some(part) = record::part(from, *count, row_bytes, content) else { return Ok(None) };
            from += part.len() as u64;
            let mut row = *first;
            while row < first + count {
                let is_old = written.has(row);
                let same = (row..first + count).take_while(|row| written.has(*row) == is_old).count() as u64;
                if !is_old {
                    (row..row + same).for_each(|row| written.add(row));
                    let start = part.start + record::size(row - first, row_bytes);
                    window.add(row * row_bytes, start..start + record::size(same, row_bytes))?;
                }
                row += same;
            }
        }
        window.write()?;
        Ok(Some(()))
    }
}

/// Some rows of a variable, a bit for each.
pub struct Rows(Vec<u64>);

impl Rows {
    pub fn none_of(rows: u64) -> Self {
        // As many words as memory allows: the rows are in a file of this machine.
        Self(vec![0; usize::try_from(rows.div_ceil(64)).unwrap_or(usize::MAX)])
    }

    fn place(row: u64) -> (usize, u64) {
        (usize::try_from(row / 64).unwrap_or(usize::MAX), 1 << (row % 64))
    }

    fn has(&self, row: u64) -> bool {
        let (word, bit) = Self::place(row);
        self.0.get(word).is_some_and(|word| word & bit != 0)
    }

    fn add(&mut self, row: u64) {
        let (word, bit) = Self::place(row);
        self.0[word] |= bit;
    }
}

/// Rows that lie close to each other in the file. If they are dense, all between the first and the last is read and
/// written at once.
struct Window<'a> {
    variable: &'a Variable,
    first: u64,
    /// Places in the file, and in the content.
    patches: Vec<(u64, Range<usize>)>,
    content: &'a [u8],
}

impl Window<'_> {
    const LONGEST: u64 = 1 << 20;
    /// A row in each page.
    const DENSE: u64 = 4096;

    fn add(&mut self, place: u64, part: Range<usize>) -> Result<(), StateError> {
        if self.patches.is_empty() || place + part.len() as u64 > self.first + Self::LONGEST {
            self.write()?;
            self.first = place;
        }
        self.patches.push((place, part));
        Ok(())
    }

    fn write(&mut self) -> Result<(), StateError> {
        let Variable { file, path, .. } = self.variable;
        let patches = std::mem::take(&mut self.patches);
        let Some((last, part)) = patches.last() else { return Ok(()) };
        let length = last + part.len() as u64 - self.first;
        if patches.len() == 1 || length / patches.len() as u64 > Self::DENSE {
            let write = |(place, part): (u64, Range<usize>)| file.write_all_at(&self.content[part], place);
            return patches.into_iter().try_for_each(write).map_err(at(path, "write"));
        }
        let mut all = vec![0; usize::try_from(length).unwrap_or_default()];
        file.read_exact_at(&mut all, self.first).map_err(at(path, "read"))?;
        for (place, part) in patches {
            let start = usize::try_from(place - self.first).unwrap_or_default();
            all[start..start + part.len()].copy_from_slice(&self.content[part]);
        }
        file.write_all_at(&all, self.first).map_err(at(path, "write"))
    }
}
