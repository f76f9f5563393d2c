//! `starctl state`: what a parameter server keeps in its folder, and a checkpoint of it.

mod bundle;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message;
use starwire_state::Snapshot;

use self::bundle::{Index, Tensor};
use crate::failure::Failure;
use crate::graph_def::NodeDef;

/// Show, or export, the variables that parameter servers keep (STARWIRE_STATE), also while they run
#[derive(clap::Subcommand)]
pub enum Command {
    /// List the variables of the folders
    Show {
        /// Of servers: ps-0 and so on in STARWIRE_STATE
        #[arg(required = true, value_name = "FOLDER")]
        folders: Vec<PathBuf>,
    },
    /// Write the variables of the folders as one checkpoint, which tf.compat.v1.train.Saver restores
    #[command(after_help = "\
Each server's variables are those of its last flush; training goes on meanwhile.

  starctl state export --to /models/ctr/now /var/lib/starwire/ps-*")]
    Export {
        /// Writes PREFIX.index and PREFIX.data-00000-of-00001
        #[arg(long, value_name = "PREFIX")]
        to: PathBuf,
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
    bytes: u64,
}

pub fn run(command: &Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Show { folders } => folders.iter().try_for_each(|folder| show(folder))?,
        Command::Export { to, folders } => export(to, folders)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn variables(folder: &Path, snapshot: &Snapshot) -> Result<Vec<Variable>, Failure> {
    let read = |(id, definition): (u32, &starwire_state::Definition)| {
        let unreadable = || format!("{}: the definition of variable {id} cannot be read", folder.display());
        let node = NodeDef::decode(&definition.bytes[..]).map_err(|_| Failure::Failed(unreadable()))?;
        let dtype = node.attr.get("dtype").map_or(0, |attribute| attribute.dtype);
        let bytes = definition.size().unwrap_or_default();
        Ok(Variable { id, name: node.name, dtype, dims: definition.dims.clone(), bytes })
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
    println!("{}", summary(&snapshot, &variables));
    for Variable { name, dims, bytes, .. } in &variables {
        println!("  {name} {dims:?} {bytes}");
    }
    Ok(())
}

fn export(to: &Path, folders: &[PathBuf]) -> Result<(), Failure> {
    let with = |ending: &str| {
        let mut path = to.as_os_str().to_owned();
        path.push(ending);
        PathBuf::from(path)
    };
    let (data, index) = (with(".data-00000-of-00001"), with(".index"));
    let (new_data, new_index) = (with(".data.new"), with(".index.new"));
    let failed = |path: &Path, error: std::io::Error| Failure::Failed(format!("{}: {error}", path.display()));
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).truncate(true);
    let file = options.open(&new_data).map_err(|error| failed(&new_data, error))?;
    let (mut tensors, mut of): (BTreeMap<String, Tensor>, BTreeMap<String, &Path>) = Default::default();
    let mut end = 0;
    for folder in folders {
        let snapshot = Snapshot::open(folder)?;
        let variables = variables(folder, &snapshot)?;
        let (mut places, start) = (BTreeMap::new(), end);
        for variable in &variables {
            places.insert(variable.id, end);
            end += variable.bytes;
        }
        file.set_len(end).map_err(|error| failed(&new_data, error))?;
        snapshot.copy(&places, &file, &new_data)?;
        println!("{}", summary(&snapshot, &variables));
        let mut offset = start;
        for Variable { name, dtype, dims, bytes, .. } in variables {
            if let Some(other) = of.insert(name.clone(), folder) {
                let folders = [other, folder].map(|folder| folder.display().to_string()).join(" and ");
                return Err(Failure::Failed(format!("{folders} both have a variable {name}")));
            }
            let crc32c = checksum(&file, offset, bytes).map_err(|error| failed(&new_data, error))?;
            tensors.insert(name, Tensor { dtype, dims, offset, size: bytes, crc32c });
            offset += bytes;
        }
    }
    let mut table = Index::default();
    tensors.iter().for_each(|(name, tensor)| {
        table.add(name, tensor);
    });
    for (name, parts) in partitioned(&tensors) {
        table.add_parts(&name, &parts);
    }
    file.sync_all().map_err(|error| failed(&new_data, error))?;
    fs::write(&new_index, table.table()).map_err(|error| failed(&new_index, error))?;
    // Whoever sees the index finds the data.
    fs::rename(&new_data, &data).map_err(|error| failed(&data, error))?;
    fs::rename(&new_index, &index).map_err(|error| failed(&index, error))?;
    println!("{}: {} variables, {end} bytes", to.display(), tensors.len());
    Ok(())
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
