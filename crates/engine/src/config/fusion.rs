//! tensor_fuse's variables. Read by the process that builds a session's graphs, with or without a starwire server in
//! it.

use super::env::Env;
use super::error::ConfigError;
use super::variables::Reader;
use starwire_planner::fuse::Limits;

const MOST_BYTES: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fusion {
    /// Whether tensors are fused in sessions that do not specify it.
    pub on: bool,
    pub limits: Limits,
}

impl Fusion {
    pub fn from_env(env: &dyn Env) -> Result<Self, ConfigError> {
        Self::read(&mut Reader::new(env))
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, ConfigError> {
        let default = Limits::default();
        let on = reader.boolean("STARWIRE_TENSOR_FUSE", false)?;
        let small_bytes = reader.bytes("STARWIRE_TENSOR_FUSE_SMALL_BYTES", default.small_bytes, 0..=MOST_BYTES)?;
        let large_bytes = reader.bytes("STARWIRE_TENSOR_FUSE_LARGE_BYTES", default.large_bytes, 0..=MOST_BYTES)?;
        let group_bytes = reader.bytes("STARWIRE_TENSOR_FUSE_GROUP_BYTES", default.group_bytes, 0..=MOST_BYTES)?;
        let group_items = reader.number("STARWIRE_TENSOR_FUSE_GROUP_ITEMS", default.group_items, 2..=16_384)?;
        let wait_us = reader.number("STARWIRE_TENSOR_FUSE_WAIT_US", default.wait_us, 0..=60_000_000)?;
        let message_us = reader.number("STARWIRE_TENSOR_FUSE_MESSAGE_US", default.message_us, 1..=1_000_000)?;
        let fuse_control = reader.boolean("STARWIRE_TENSOR_FUSE_CONTROL", default.fuse_control)?;
        let fuse_loops = reader.boolean("STARWIRE_TENSOR_FUSE_LOOPS", default.fuse_loops)?;
        if small_bytes > large_bytes {
            let reason = format!("{small_bytes} is more than {large_bytes}");
            let (first, second) = ("STARWIRE_TENSOR_FUSE_SMALL_BYTES", "STARWIRE_TENSOR_FUSE_LARGE_BYTES");
            return Err(ConfigError::Conflict { first, second, reason });
        }
        let limits = Limits {
            small_bytes,
            large_bytes,
            group_bytes,
            group_items,
            wait_us,
            message_us,
            fuse_control,
            fuse_loops,
            ..default
        };
        Ok(Self { on, limits })
    }
}

#[cfg(test)]
mod tests {
    use super::super::env::MapEnv;
    use super::*;

    #[test]
    fn off_and_the_planners_limits_by_default() {
        let fusion = Fusion::from_env(&MapEnv::new("/")).unwrap();
        assert_eq!(fusion, Fusion { on: false, limits: Limits::default() });
    }

    #[test]
    fn the_documented_defaults_are_those_in_force() {
        let documented = super::super::VARIABLES.iter().filter(|variable| variable.name.contains("TENSOR_FUSE"));
        let env = documented.fold(MapEnv::new("/"), |env, variable| env.set(variable.name, variable.default));
        assert_eq!(Fusion::from_env(&env).unwrap(), Fusion { on: false, limits: Limits::default() });
    }

    #[test]
    fn every_variable_is_heard() {
        let env = MapEnv::new("/")
            .set("STARWIRE_TENSOR_FUSE", "TRUE")
            .set("STARWIRE_TENSOR_FUSE_SMALL_BYTES", "1K")
            .set("STARWIRE_TENSOR_FUSE_LARGE_BYTES", "2K")
            .set("STARWIRE_TENSOR_FUSE_GROUP_BYTES", "3M")
            .set("STARWIRE_TENSOR_FUSE_GROUP_ITEMS", "4")
            .set("STARWIRE_TENSOR_FUSE_WAIT_US", "5")
            .set("STARWIRE_TENSOR_FUSE_MESSAGE_US", "6")
            .set("STARWIRE_TENSOR_FUSE_CONTROL", "0")
            .set("STARWIRE_TENSOR_FUSE_LOOPS", "false");
        let limits = Limits {
            small_bytes: 1 << 10,
            large_bytes: 2 << 10,
            group_bytes: 3 << 20,
            group_items: 4,
            wait_us: 5,
            message_us: 6,
            fuse_control: false,
            fuse_loops: false,
            ..Limits::default()
        };
        assert_eq!(Fusion::from_env(&env).unwrap(), Fusion { on: true, limits });
    }

    #[test]
    fn nonsense_is_refused() {
        let error = |name, value| Fusion::from_env(&MapEnv::new("/").set(name, value)).unwrap_err().to_string();
        assert_eq!(
            error("STARWIRE_TENSOR_FUSE", "on"),
            "STARWIRE_TENSOR_FUSE=\"on\" is invalid: it must be true, false, 1 or 0"
        );
        assert!(error("STARWIRE_TENSOR_FUSE_GROUP_ITEMS", "1").contains("from 2 to 16384"));
        assert_eq!(
            error("STARWIRE_TENSOR_FUSE_SMALL_BYTES", "1M"),
            "STARWIRE_TENSOR_FUSE_SMALL_BYTES and STARWIRE_TENSOR_FUSE_LARGE_BYTES conflict: 1048576 is more than 262144"
        );
    }
}
