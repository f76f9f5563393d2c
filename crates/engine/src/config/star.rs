//! Limits of star calls on a parameter server, and how a session splits its calls.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::error::ConfigError;
use super::variables::Reader;
use crate::star::{PlanLimits, StepLimits};
use starwire_planner::star::SPLIT_BYTES;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StarConfig {
    pub plans: PlanLimits,
    pub steps: StepLimits,
    /// Plans whose kernels take at most this long run on the reactor.
    pub inline: Duration,
    /// A call that would carry twice as much is split. Checked with the rest; sessions read it again when they need it.
    pub split_bytes: u64,
}

/// Read by the process that builds a session's graphs.
pub(super) fn split_bytes(reader: &mut Reader<'_>) -> Result<u64, ConfigError> {
    reader.bytes("STARWIRE_STAR_SPLIT_BYTES", SPLIT_BYTES, 0..=1 << 40)
}

/// Memory of the machine, or of its container if that has less.
fn memory() -> u64 {
    const UNKNOWN: u64 = 16 << 30;
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let installed = read("/proc/meminfo");
    let installed =
        installed.lines().find_map(|line| line.strip_prefix("MemTotal:")?.strip_suffix("kB")?.trim().parse().ok());
    let installed: u64 = installed.map_or(UNKNOWN, |kib: u64| kib << 10);
    let allowed = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let allowed = allowed.into_iter().filter_map(|path| read(path).trim().parse().ok());
    allowed.fold(installed, u64::min).max(1 << 30)
}

impl StarConfig {
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, ConfigError> {
        let mut seconds =
            |name, default, range: RangeInclusive<u64>| reader.number(name, default, range).map(Duration::from_secs);
        let plan_idle = seconds("STARWIRE_STAR_PLAN_IDLE_S", 3_600, 1..=31_536_000)?;
        let session_idle = seconds("STARWIRE_STAR_SESSION_IDLE_S", 86_400, 1..=31_536_000)?;
        let idle = seconds("STARWIRE_STAR_STEP_IDLE_S", 600, 1..=31_536_000)?;
        let all_bytes = reader.bytes("STARWIRE_STAR_MAX_TOTAL_BYTES", memory() / 2, 1 << 20..=1 << 50)?;
        Ok(Self {
            plans: PlanLimits {
                plans: reader.number("STARWIRE_STAR_MAX_PLANS", 4_096, 1..=1 << 24)?,
                bytes: reader.bytes("STARWIRE_STAR_MAX_PLAN_BYTES", 1 << 30, 1 << 20..=1 << 40)?,
                all_bytes,
                plan_idle,
                session_idle,
            },
            steps: StepLimits {
                values: reader.number("STARWIRE_STAR_MAX_SLOTS", 65_536, 0..=1 << 24)?,
                bytes: reader.bytes("STARWIRE_STAR_MAX_SLOT_BYTES", 4 << 30, 0..=1 << 40)?,
                calls: reader.number("STARWIRE_STAR_MAX_CALLS", 1_024, 1..=1 << 24)?,
                all_bytes,
                idle,
            },
            inline: Duration::from_micros(reader.number("STARWIRE_STAR_INLINE_US", 250, 0..=1_000_000)?),
            split_bytes: split_bytes(reader)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::env::MapEnv;
    use super::*;

    fn read(env: &MapEnv) -> Result<StarConfig, ConfigError> {
        StarConfig::read(&mut Reader::new(env))
    }

    #[test]
    fn the_documented_defaults_are_those_in_force() {
        let is_ours = |name: &str| name.contains("STARWIRE_STAR_") && name != "STARWIRE_STAR_MAX_TOTAL_BYTES";
        let documented = super::super::VARIABLES.iter().filter(|variable| is_ours(variable.name));
        let env = documented.fold(MapEnv::new("/"), |env, variable| env.set(variable.name, variable.default));
        assert_eq!(read(&env).unwrap(), read(&MapEnv::new("/")).unwrap());
    }

    #[test]
    fn every_variable_is_heard() {
        let env = MapEnv::new("/")
            .set("STARWIRE_STAR_MAX_PLANS", "1")
            .set("STARWIRE_STAR_MAX_PLAN_BYTES", "2M")
            .set("STARWIRE_STAR_PLAN_IDLE_S", "3")
            .set("STARWIRE_STAR_SESSION_IDLE_S", "4")
            .set("STARWIRE_STAR_MAX_SLOTS", "5")
            .set("STARWIRE_STAR_MAX_SLOT_BYTES", "6")
            .set("STARWIRE_STAR_MAX_CALLS", "7")
            .set("STARWIRE_STAR_STEP_IDLE_S", "8")
            .set("STARWIRE_STAR_INLINE_US", "9")
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
            steps: StepLimits { values: 5, bytes: 6, calls: 7, all_bytes: 11 << 20, idle: seconds(8) },
            inline: Duration::from_micros(9),
            split_bytes: 10 << 10,
        };
        assert_eq!(read(&env).unwrap(), expected);
        assert!(read(&MapEnv::new("/").set("STARWIRE_STAR_MAX_CALLS", "0")).is_err());
    }
}
