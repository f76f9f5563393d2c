//! tensor_fuse as the environment wants it. Read by the process that hosts a session's master, with or without a
//! starwire server in it.

use super::env::{Env, MapEnv};
use super::error::ConfigError;
use super::protocol::Protocol;
use super::reader::Reader;
use super::variables;
use starwire_planner::fuse::FuseLimits;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fusion {
    /// Whether tensors are fused where no configuration decides it, if the environment says so.
    pub on: Option<bool>,
    pub limits: FuseLimits,
}

impl Default for Fusion {
    /// Without any variable.
    fn default() -> Self {
        Self::from_env(&MapEnv::default()).expect("the table's defaults are valid")
    }
}

impl Fusion {
    pub fn from_env(env: &dyn Env) -> Result<Self, ConfigError> {
        Self::read(&mut Reader::new(env, Protocol::Grpc))
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, ConfigError> {
        let on = reader.get(&variables::TENSOR_FUSE)?;
        let [small_bytes, large_bytes, group_bytes, wait_us, message_us] =
            reader.get(&variables::TENSOR_FUSE_LIMITS)?;
        if small_bytes > large_bytes {
            let reason = format!("small={small_bytes} is more than large={large_bytes}");
            return Err(ConfigError::Contradiction { name: variables::TENSOR_FUSE_LIMITS.name, reason });
        }
        let [wait_us, message_us] =
            [wait_us, message_us].map(|us| u32::try_from(us).expect("the table's ranges end far below"));
        Ok(Self {
            on,
            limits: FuseLimits { small_bytes, large_bytes, group_bytes, wait_us, message_us, ..FuseLimits::FIXED },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn undecided_by_default() {
        let limits = FuseLimits {
            small_bytes: 16 << 10,
            large_bytes: 256 << 10,
            group_bytes: 1 << 20,
            wait_us: 500,
            message_us: 100,
            ..FuseLimits::FIXED
        };
        assert_eq!(Fusion::default(), Fusion { on: None, limits });
    }

    #[test]
    fn every_limit_has_its_place() {
        let limits = "small=1K,large=2K,group=3M,wait_us=5,message_us=6";
        let env = MapEnv::new("/").set("STARWIRE_TENSOR_FUSE", "TRUE").set("STARWIRE_TENSOR_FUSE_LIMITS", limits);
        let limits = FuseLimits {
            small_bytes: 1 << 10,
            large_bytes: 2 << 10,
            group_bytes: 3 << 20,
            wait_us: 5,
            message_us: 6,
            ..FuseLimits::FIXED
        };
        assert_eq!(Fusion::from_env(&env).unwrap(), Fusion { on: Some(true), limits });
    }

    #[test]
    fn off_is_not_the_same_as_undecided() {
        let env = MapEnv::new("/").set("STARWIRE_TENSOR_FUSE", "0");
        assert_eq!(Fusion::from_env(&env).unwrap().on, Some(false));
    }

    #[test]
    fn nonsense_is_refused() {
        let error = |name, value| Fusion::from_env(&MapEnv::new("/").set(name, value)).unwrap_err().to_string();
        assert_eq!(
            error("STARWIRE_TENSOR_FUSE", "on"),
            "STARWIRE_TENSOR_FUSE=\"on\" is invalid: it must be true, false, 1 or 0"
        );
        assert!(error("STARWIRE_TENSOR_FUSE_LIMITS", "message_us=0").contains("message_us=1 to 1000000"));
        assert_eq!(
            error("STARWIRE_TENSOR_FUSE_LIMITS", "small=1M"),
            "STARWIRE_TENSOR_FUSE_LIMITS is inconsistent: small=1048576 is more than large=262144"
        );
    }
}
