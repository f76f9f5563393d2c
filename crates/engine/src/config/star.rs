//! Limits of star calls on a parameter server.

use std::time::Duration;

use super::error::ConfigError;
use super::reader::Reader;
use super::variables;

/// Limits of the plans on a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanLimits {
    /// Of one peer: the plans that it was the first to register.
    pub plans: u64,
    pub bytes: u64,
    /// Bytes of all peers together.
    pub all_bytes: u64,
    /// Plans that were not used for this long are dropped, unless they have a session's state.
    pub plan_idle: Duration,
    /// After this long without use of a session, the server asks whether it still exists.
    pub session_idle: Duration,
}

/// Limits of what steps leave on a server between two calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Of one peer, over all its connections.
    pub values: u64,
    pub bytes: u64,
    pub calls: u64,
    /// Bytes of all peers together.
    pub all_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StarConfig {
    pub plans: PlanLimits,
    pub steps: StepLimits,
    /// Plans whose kernels take at most this long run on the reactor.
    pub inline: Duration,
    /// A call that would carry twice as much is split. Checked with the rest; sessions read it again when they need it.
    pub split_bytes: Option<u64>,
}

/// Of the machine's memory, or of what its container may use.
pub(super) fn half_of_memory() -> u64 {
    const UNKNOWN: u64 = 16 << 30;
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let installed = read("/proc/meminfo");
    let installed =
        installed.lines().find_map(|line| line.strip_prefix("MemTotal:")?.strip_suffix("kB")?.trim().parse().ok());
    let installed: u64 = installed.map_or(UNKNOWN, |kib: u64| kib << 10);
    let allowed = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let allowed = allowed.into_iter().filter_map(|path| read(path).trim().parse().ok());
    allowed.fold(installed, u64::min).max(1 << 30) / 2
}

impl StarConfig {
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, ConfigError> {
        let [plans, plan_bytes, values, value_bytes, calls, plan_idle, session_idle, inline] =
            reader.get(&variables::STAR_LIMITS)?;
        let all_bytes = reader.get(&variables::STAR_MAX_TOTAL_BYTES)?;
        Ok(Self {
            plans: PlanLimits {
                plans,
                bytes: plan_bytes,
                all_bytes,
                plan_idle: Duration::from_secs(plan_idle),
                session_idle: Duration::from_secs(session_idle),
            },
            steps: StepLimits { values, bytes: value_bytes, calls, all_bytes },
            inline: Duration::from_micros(inline),
            split_bytes: reader.get(&variables::STAR_SPLIT_BYTES)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::env::MapEnv;
    use super::super::protocol::Protocol;
    use super::*;

    fn read(env: &MapEnv) -> Result<StarConfig, ConfigError> {
        StarConfig::read(&mut Reader::new(env, Protocol::StarServer))
    }

    #[test]
    fn every_limit_has_its_place() {
        let limits = "plans=1,plan_bytes=2M,plan_idle_s=3,session_idle_s=4,values=5,value_bytes=6,calls=7,inline_us=9";
        let env = MapEnv::new("/")
            .set("STARWIRE_STAR_LIMITS", limits)
            .set("STARWIRE_STAR_SPLIT_BYTES", "10K")
            .set("STARWIRE_STAR_MAX_TOTAL_BYTES", "11M");
        let seconds = Duration::from_secs;
        let expected = StarConfig {
            plans: PlanLimits {
                plans: 1,
                bytes: 2 << 20,
                all_bytes: 11 << 20,
                plan_idle: seconds(3),
                session_idle: seconds(4),
            },
            steps: StepLimits { values: 5, bytes: 6, calls: 7, all_bytes: 11 << 20 },
            inline: Duration::from_micros(9),
            split_bytes: Some(10 << 10),
        };
        assert_eq!(read(&env).unwrap(), expected);
        assert!(read(&MapEnv::new("/").set("STARWIRE_STAR_LIMITS", "calls=0")).is_err());
    }

    #[test]
    fn limits_that_are_not_set_keep_their_defaults() {
        let default = read(&MapEnv::new("/")).unwrap();
        assert_eq!((default.plans.plans, default.steps.calls, default.split_bytes), (4_096, 1_024, None));
        let some = read(&MapEnv::new("/").set("STARWIRE_STAR_LIMITS", "calls=7")).unwrap();
        assert_eq!(some, StarConfig { steps: StepLimits { calls: 7, ..default.steps }, ..default });
    }
}
