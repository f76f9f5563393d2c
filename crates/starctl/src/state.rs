//! `starctl state`: what a parameter server keeps in its folder, and a checkpoint of it.

mod bundle;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message;
use starwire_state::{Changes, Snapshot, has_state, lock_folder};

use self::bundle::{Index, Tensor};
use crate::failure::Failure;
use crate::graph_def::NodeDef;
use crate::output::{say, unless_unread};

/// Show, or export, the variables that parameter servers keep (STARWIRE_STATE), also while they run
#[derive(clap::Subcommand)]
pub enum Command {
    /// List the variables of the folders
    Show {
        /// Of servers: ps-0 and so on in STARWIRE_STATE
        #[arg(required = true, value_name = "FOLDER")]
        folders: Vec<PathBuf>,
    },
    /// Let a standby take over: the owner of the state has ended, and will not be started again
    #[command(after_help = "\
Two servers with one state lose updates. Use this only if the owner's process cannot come back:
its host is gone, or its supervisor was told not to start it again.")]
    Promote {
        /// Of the standby: ps-0 and so on in its STARWIRE_STATE
        #[arg(value_name = "FOLDER")]
        folder: PathBuf,
    },
    /// Write the variables of the folders as one checkpoint, which tf.compat.v1.train.Saver restores
    #[command(after_help = "\
Each server's variables are those of its last flush; training goes on meanwhile.

  starctl state export --to /models/ctr/full /var/lib/starwire/ps-*
  starctl state export --to /models/ctr/more --since /models/ctr/full /var/lib/starwire/ps-*

With --since: of a variable with some changed rows NAME/changed_rows, their numbers, and
NAME/changed_values; one of which all rows have changed as a whole.")]
    Export {
        /// Writes PREFIX.index, PREFIX.data-00000-of-00001 and PREFIX.flushes
        #[arg(long, value_name = "PREFIX")]
        to: PathBuf,
        /// Only what has changed since this export
        #[arg(long, value_name = "PREFIX")]
        since: Option<PathBuf>,
        /// Of servers: ps-0 and so on in STARWIRE_STATE
        #[arg(required = true, value_name = "FOLDER")]
        folders: Vec<PathBuf>,
    },
}

/// A variable of a server.
struct Variable {
    id: u32,
    name: String,
    dtype: i32,
    dims: Vec<u64>,
    rows: u64,
    bytes: u64,
}

pub fn run(command: &Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Show { folders } => folders.iter().try_for_each(|folder| show(folder))?,
        Command::Promote { folder } => {
            let what = match starwire_state::promote(folder)? {
                true => "the standby takes over, unless the server answers it",
                false => "a server that starts with it has the state",
            };
            unless_unread(say(format_args!("{}: {what}", folder.display())))?;
        }
        Command::Export { to, since, folders } => export(to, since.as_deref(), folders)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn variables(folder: &Path, snapshot: &Snapshot) -> Result<Vec<Variable>, Failure> {
    let read = |(id, definition): (u32, &starwire_state::Definition)| {
        let unreadable = || format!("{}: the definition of variable {id} cannot be read", folder.display());
        let node = NodeDef::decode(&definition.bytes[..]).map_err(|_| Failure::Failed(unreadable()))?;
        let dtype = node.attr.get("dtype").map_or(0, |attribute| attribute.dtype);
        let bytes = definition.size().unwrap_or_default();
        Ok(Variable { id, name: node.name, dtype, dims: definition.dims.clone(), rows: definition.rows, bytes })
    };
    let mut variables = snapshot.variables().map(read).collect::<Result<Vec<_>, Failure>>()?;
    variables.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(variables)
}

fn summary(snapshot: &Snapshot, variables: &[Variable]) -> String {
    let (flush, time) = snapshot.last_flush();
    let age = SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_millis(time)).unwrap_or_default();
    let bytes: u64 = variables.iter().map(|variable| variable.bytes).sum();
    let count = variables.len();
    format!("{}: {count} variables, {bytes} bytes, flush {flush} of {:.1} s ago", snapshot.task(), age.as_secs_f64())
}

fn show(folder: &Path) -> Result<(), Failure> {
    let snapshot = Snapshot::open(folder)?;
    let variables = variables(folder, &snapshot)?;
    say(summary(&snapshot, &variables))?;
    for Variable { name, dims, bytes, .. } in &variables {
        say(format_args!("  {name} {dims:?} {bytes}"))?;
    }
    Ok(())
}

/// A checkpoint that is being written.
struct Checkpoint {
    to: PathBuf,
    path: PathBuf,
    file: File,
    end: u64,
    tensors: BTreeMap<String, Tensor>,
    /// The folder that has a variable.
    of: BTreeMap<String, PathBuf>,
    /// By task.
    flushes: BTreeMap<String, Flush>,
    /// Where it is. It is locked: another export would write to the same files.
    folder: File,
}

/// The last flush of a task: when it began tells it from one of the same number, if the state has gone back to an older
/// copy meanwhile, and the incarnations of the devices from one of a state that began anew.
struct Flush {
    number: u64,
    /// Not in files of older versions.
    time: Option<u64>,
    incarnations: Vec<u64>,
}

impl Flush {
    fn last_of(snapshot: &Snapshot) -> Self {
        let ((number, time), incarnations) = (snapshot.last_flush(), snapshot.incarnations().to_vec());
        Self { number, time: Some(time), incarnations }
    }

    /// Its number, and what has changed after it. None: the state does not say.
    fn changes(&self, snapshot: &Snapshot) -> Result<Option<(u64, Changes)>, Failure> {
        let Some(time) = self.time.filter(|_| self.incarnations == snapshot.incarnations()) else { return Ok(None) };
        Ok(snapshot.changes((self.number, time))?.map(|changes| (self.number, changes)))
    }

    fn json(&self) -> serde_json::Value {
        serde_json::json!({"flush": self.number, "time": self.time, "incarnations": self.incarnations})
    }

    fn read(json: &serde_json::Value) -> Option<Self> {
        let numbers = json["incarnations"].as_array()?.iter().map(serde_json::Value::as_u64);
        let incarnations = numbers.collect::<Option<_>>()?;
        Some(Self { number: json["flush"].as_u64()?, time: json["time"].as_u64(), incarnations })
    }
}

fn failed(path: &Path, error: impl std::fmt::Display) -> Failure {
    Failure::Failed(format!("{}: {error}", path.display()))
}

/// The files of a checkpoint have its prefix.
fn with(prefix: &Path, ending: &str) -> PathBuf {
    let mut path = prefix.as_os_str().to_owned();
    path.push(ending);
    path.into()
}

fn folder_of(prefix: &Path) -> &Path {
    prefix.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn is_same(one: &Path, other: &Path) -> bool {
    fs::canonicalize(one).is_ok_and(|one| fs::canonicalize(other).is_ok_and(|other| one == other))
}

fn export(to: &Path, since: Option<&Path>, folders: &[PathBuf]) -> Result<(), Failure> {
    let earlier = since.map(read_flushes).transpose()?;
    // The files would be `.index` and so on, in that folder.
    let name = to.as_os_str().as_encoded_bytes().rsplit(|byte| *byte == b'/').next();
    if name.is_none_or(|name| [&b""[..], b".", b".."].contains(&name)) {
        return Err(failed(to, "a checkpoint needs a name in its folder"));
    }
    if has_state(folder_of(to)) || folders.iter().any(|folder| is_same(folder, folder_of(to))) {
        return Err(failed(to, "a checkpoint cannot be in the folder of a state"));
    }
    if since.is_some_and(|since| is_same(&with(since, ".index"), &with(to, ".index"))) {
        return Err(failed(to, "what has changed since a checkpoint cannot take its place"));
    }
    let mut checkpoint = Checkpoint::create(to)?;
    for folder in folders {
        let snapshot = Snapshot::open(folder)?;
        let variables = variables(folder, &snapshot)?;
        for Variable { name, .. } in &variables {
            if let Some(other) = checkpoint.of.insert(name.clone(), folder.clone()) {
                let folders = [&other, folder].map(|folder| folder.display().to_string()).join(" and ");
                return Err(Failure::Failed(format!("{folders} both have a variable {name}")));
            }
        }
        match &earlier {
            None => checkpoint.add(&snapshot, &variables)?,
            Some(flushes) => {
                let task = snapshot.task();
                let changes = flushes.get(task).map(|flush| flush.changes(&snapshot)).transpose()?.flatten();
                let Some((flush, changes)) = changes else {
                    let why = "the state does not say what has changed since: export everything";
                    return Err(Failure::Failed(format!("{}: {task}: {why}", folder.display())));
                };
                checkpoint.add_changes(&snapshot, &variables, flush, &changes)?;
            }
        }
        unless_unread(say(summary(&snapshot, &variables)))?;
        checkpoint.flushes.insert(snapshot.task().into(), Flush::last_of(&snapshot));
    }
    checkpoint.finish(earlier.is_none())
}

fn read_flushes(prefix: &Path) -> Result<BTreeMap<String, Flush>, Failure> {
    let path = with(prefix, ".flushes");
    let content = fs::read_to_string(&path).map_err(|error| failed(&path, error))?;
    let read = || {
        let json: serde_json::Value = serde_json::from_str(&content).ok()?;
        let flushes = json.as_object()?.iter().map(|(task, one)| Some((task.clone(), Flush::read(one)?)));
        flushes.collect::<Option<_>>()
    };
    read().ok_or_else(|| failed(&path, "it is not what starctl writes"))
}

impl Checkpoint {
    fn create(to: &Path) -> Result<Self, Failure> {
        let path = with(to, ".data.new");
        let folder = lock_folder(folder_of(to))?;
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(true);
        let file = options.open(&path).map_err(|error| failed(&path, error))?;
        let (tensors, of, flushes) = Default::default();
        Ok(Self { to: to.into(), path, file, end: 0, tensors, of, flushes, folder })
    }

    /// Makes room. Returns where it is.
    fn reserve(&mut self, bytes: u64) -> Result<u64, Failure> {
        let start = self.end;
        self.end += bytes;
        self.file.set_len(self.end).map_err(|error| failed(&self.path, error))?;
        Ok(start)
    }

    /// A tensor that is in the file.
    fn name(&mut self, name: String, dtype: i32, dims: Vec<u64>, offset: u64, size: u64) -> Result<(), Failure> {
        let crc32c = checksum(&self.file, offset, size).map_err(|error| failed(&self.path, error))?;
        self.tensors.insert(name, Tensor { dtype, dims, offset, size, crc32c });
        Ok(())
    }

    fn add(&mut self, snapshot: &Snapshot, variables: &[Variable]) -> Result<(), Failure> {
        let mut places = BTreeMap::new();
        for variable in variables {
            places.insert(variable.id, self.reserve(variable.bytes)?);
        }
        snapshot.copy(&places, &self.file, &self.path)?;
        for Variable { id, name, dtype, dims, bytes, .. } in variables {
            self.name(name.clone(), *dtype, dims.clone(), places[id], *bytes)?;
        }
        Ok(())
    }

    /// The rows that have changed, and their numbers; a variable of which all have is there as a whole.
    fn add_changes(
        &mut self,
        snapshot: &Snapshot,
        variables: &[Variable],
        since: u64,
        changes: &Changes,
    ) -> Result<(), Failure> {
        const DT_INT64: i32 = 9;
        let (mut places, mut changed) = (BTreeMap::new(), Vec::new());
        for variable in variables {
            let Some(rows) = changes.rows(variable.id) else { continue };
            let (all, count) = (variable.rows, rows.len() as u64);
            let bytes = variable.bytes.checked_div(all).unwrap_or_default() * count;
            places.insert(variable.id, self.reserve(bytes)?);
            changed.push((variable, rows, bytes));
        }
        snapshot.copy_changes(since, changes, &places, &self.file, &self.path)?;
        for (Variable { id, name, dtype, dims, rows: all, .. }, rows, bytes) in changed {
            let (count, place) = (rows.len() as u64, places[id]);
            if count == *all {
                self.name(name.clone(), *dtype, dims.clone(), place, bytes)?;
                continue;
            }
            let numbers: Vec<u8> = rows.iter().flat_map(|row| row.to_le_bytes()).collect();
            let at = self.reserve(numbers.len() as u64)?;
            self.file.write_all_at(&numbers, at).map_err(|error| failed(&self.path, error))?;
            self.name(format!("{name}/changed_rows"), DT_INT64, vec![count], at, numbers.len() as u64)?;
            let dims = [&[count], dims.get(1..).unwrap_or_default()].concat();
            self.name(format!("{name}/changed_values"), *dtype, dims, place, bytes)?;
        }
        Ok(())
    }

    fn finish(self, is_whole: bool) -> Result<(), Failure> {
        let mut table = Index::default();
        self.tensors.iter().for_each(|(name, tensor)| table.add(name, tensor));
        if is_whole {
            partitioned(&self.tensors).iter().for_each(|(name, parts)| table.add_parts(name, parts));
        }
        self.file.sync_all().map_err(|error| failed(&self.path, error))?;
        let flushes = self.flushes.iter().map(|(task, flush)| (task.clone(), flush.json()));
        let flushes = serde_json::Value::Object(flushes.collect()).to_string();
        self.write_new(".flushes", flushes.as_bytes())?;
        self.write_new(".index", &table.table())?;
        // Whoever sees the index finds the data, also after a loss of power.
        for (from, to) in [(".data", ".data-00000-of-00001"), (".flushes", ".flushes"), (".index", ".index")] {
            let to = with(&self.to, to);
            fs::rename(with(&self.to, &format!("{from}.new")), &to).map_err(|error| failed(&to, error))?;
            match self.folder.sync_all() {
                // Some file systems cannot do that with folders.
                Err(error) if error.kind() != ErrorKind::InvalidInput => return Err(failed(folder_of(&to), error)),
                _ => {}
            }
        }
        unless_unread(say(format_args!("{}: {} tensors, {} bytes", self.to.display(), self.tensors.len(), self.end)))
    }

    /// A file that has no name yet.
    fn write_new(&self, ending: &str, content: &[u8]) -> Result<(), Failure> {
        let path = with(&self.to, &format!("{ending}.new"));
        let write = |mut file: File| file.write_all(content).and_then(|()| file.sync_all());
        File::create(&path).and_then(write).map_err(|error| failed(&path, error))
    }
}

impl Drop for Checkpoint {
    /// What an export that has failed leaves would keep the disk full. One that has ended leaves nothing.
    fn drop(&mut self) {
        for ending in [".data.new", ".flushes.new", ".index.new"] {
            let _ = fs::remove_file(with(&self.to, ending));
        }
    }
}

fn checksum(file: &File, mut at: u64, bytes: u64) -> std::io::Result<u32> {
    let (mut crc, end) = (0, at + bytes);
    while at < end {
        let mut chunk = vec![0; usize::try_from((end - at).min(1 << 20)).unwrap_or(1 << 20)];
        file.read_exact_at(&mut chunk, at)?;
        crc = crc32c::crc32c_append(crc, &chunk);
        at += chunk.len() as u64;
    }
    Ok(crc)
}

/// Variables in parts (`NAME/part_0` and so on, with whatever follows), which a Saver knows as one: the parts in order.
/// Only if all parts are there, and differ in nothing but the first dimension.
fn partitioned(tensors: &BTreeMap<String, Tensor>) -> BTreeMap<String, Vec<Tensor>> {
    let mut found: BTreeMap<String, BTreeMap<usize, Tensor>> = BTreeMap::new();
    for (name, tensor) in tensors {
        if let Some((whole, part)) = part_of(name) {
            found.entry(whole).or_default().insert(part, tensor.clone());
        }
    }
    let are_parts = |whole: &String, parts: &BTreeMap<usize, Tensor>| {
        let Some(first) = parts.get(&0).filter(|first| !first.dims.is_empty()) else { return false };
        let is_like = |part: &Tensor| part.dtype == first.dtype && part.dims.get(1..) == first.dims.get(1..);
        parts.keys().copied().eq(0..parts.len()) && parts.values().all(is_like) && !tensors.contains_key(whole)
    };
    found.retain(|whole, parts| are_parts(whole, parts));
    found.into_iter().map(|(whole, parts)| (whole, parts.into_values().collect())).collect()
}

/// `a/part_3/Adagrad` is part 3 of `a/Adagrad`.
fn part_of(name: &str) -> Option<(String, usize)> {
    let parts: Vec<&str> = name.split('/').collect();
    let at = parts.iter().rposition(|part| part.starts_with("part_"))?;
    let number = parts[at].strip_prefix("part_")?.parse().ok()?;
    let whole: Vec<&str> = parts.iter().enumerate().filter(|(index, _)| *index != at).map(|(_, part)| *part).collect();
    (at > 0).then(|| (whole.join("/"), number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_one_variable_if_all_are_there_and_fit() {
        let tensor = |dims: &[u64]| Tensor { dtype: 1, dims: dims.to_vec(), offset: 0, size: 0, crc32c: 0 };
        let of = |list: &[(&str, &[u64])]| {
            let tensors = list.iter().map(|(name, dims)| ((*name).into(), tensor(dims))).collect();
            partitioned(&tensors).into_iter().map(|(name, parts)| (name, parts.len())).collect::<Vec<_>>()
        };
        let two: [(&str, &[u64]); 2] = [("a/part_0", &[3, 2]), ("a/part_1", &[2, 2])];
        assert_eq!(of(&two), [("a".to_owned(), 2)]);
        assert_eq!(of(&[("a/part_0/Adam", &[3]), ("a/part_1/Adam", &[3])]), [("a/Adam".to_owned(), 2)]);
        assert_eq!(of(&two[1..]), [], "the first is missing");
        assert_eq!(of(&[two[0], ("a/part_1", &[3, 1])]), [], "parts of another dimension");
        assert_eq!(of(&[two[0], two[1], ("a", &[1])]), [], "another variable has the name");
        assert_eq!(of(&[("part_0", &[1]), ("b/party", &[1]), ("c/part_0", &[])]), []);
    }
}
