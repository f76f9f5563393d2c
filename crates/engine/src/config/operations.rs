//! Operations that a file adds to the op table.

use std::fs;
use std::io;

use starwire_planner::ops::Added;

use super::error::ConfigError;
use super::reader::Reader;
use super::variables;

const MAX_LEN: u64 = 16 << 20;

pub(super) fn read(reader: &mut Reader<'_>) -> Result<Option<Added>, ConfigError> {
    let name = variables::OPS.name;
    let Some(path) = reader.get(&variables::OPS)? else { return Ok(None) };
    let text = contents(&path).map_err(|source| ConfigError::File { name, path: path.clone().into(), source })?;
    Added::parse(&path, &text).map(Some).map_err(|source| ConfigError::Operations { name, source })
}

/// A pipe or a device could block the process, or never end.
fn contents(path: &str) -> io::Result<String> {
    let of = fs::metadata(path)?;
    if !of.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    if of.len() > MAX_LEN {
        return Err(io::Error::other("it has more than 16 MiB"));
    }
    fs::read_to_string(path)
}

#[cfg(test)]
mod tests {
    use super::super::env::MapEnv;
    use super::super::protocol::Protocol;
    use super::super::testing::TempDir;
    use super::*;

    fn read(path: &std::path::Path) -> Result<Option<Added>, String> {
        let env = MapEnv::new("/").set("STARWIRE_OPS", path);
        super::read(&mut Reader::new(&env, Protocol::StarServer)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_table_is_read_or_refused_with_its_file() {
        let unset = super::read(&mut Reader::new(&MapEnv::new("/"), Protocol::StarServer));
        assert_eq!(unset.unwrap(), None);
        let dir = TempDir::new("operations");
        let path = dir.path().join("ops.txt");
        let named = |end: &str| format!("STARWIRE_OPS names {}, which cannot be read: {end}", path.display());
        assert!(read(&path).unwrap_err().starts_with(&named("No such file")));
        fs::write(&path, "[files]\nOurs\n").unwrap();
        assert!(read(&path).unwrap().is_some());
        fs::write(&path, "[files]\nOurs Ours\n").unwrap();
        let place = path.display();
        assert_eq!(read(&path).unwrap_err(), format!("STARWIRE_OPS: {place}:2: Ours is also at {place}:2"));
        fs::write(&path, [0xff]).unwrap();
        assert_eq!(read(&path).unwrap_err(), named("stream did not contain valid UTF-8"));
        assert!(read(dir.path()).unwrap_err().ends_with("it is not a regular file"));
    }
}
