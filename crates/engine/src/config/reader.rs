//! The only reader of the environment.

use super::env::Env;
use super::error::ConfigError;
use super::kinds::Kind;
use super::protocol::Protocol;
use super::row::Row;

/// A variable as it is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    pub name: &'static str,
    pub value: String,
    pub is_default: bool,
}

/// Reads variables and remembers their values.
pub(super) struct Reader<'a> {
    env: &'a dyn Env,
    /// Some defaults depend on it.
    protocol: Protocol,
    pub settings: Vec<Setting>,
}

impl<'a> Reader<'a> {
    pub fn new(env: &'a dyn Env, protocol: Protocol) -> Self {
        Self { env, protocol, settings: Vec::new() }
    }

    pub fn get<K: Kind>(&mut self, row: &Row<K>) -> Result<K::Value, ConfigError> {
        let default = row.default.text(self.protocol);
        let set = self.raw(row)?.filter(|text| !(text.is_empty() && row.kind.empty_is_unset()));
        let value = match (&set, &default) {
            (Some(text), default) => row.kind.parse(text, default.as_deref().unwrap_or_default()),
            (None, Some(default)) => row.kind.parse(default, default),
            (None, None) => row.kind.unset(),
        };
        let value = value.map_err(|allowed| refuse(row, set.clone().unwrap_or_default(), allowed))?;
        self.settings.retain(|setting| setting.name != row.name);
        self.settings.push(Setting { name: row.name, value: row.kind.show(&value), is_default: set.is_none() });
        Ok(value)
    }

    pub fn get_if_set<K: Kind>(&mut self, row: &Row<K>) -> Result<Option<K::Value>, ConfigError> {
        let value = self.get(row)?;
        Ok(self.settings.last().filter(|setting| !setting.is_default).map(|_| value))
    }

    fn raw<K: Kind>(&self, row: &Row<K>) -> Result<Option<String>, ConfigError> {
        let found = if row.kind.is_secret() { self.env.secret(row.name) } else { self.env.var(row.name) };
        let raw = found.map(std::ffi::OsString::into_string).transpose();
        raw.map_err(|raw| match row.kind.is_secret() {
            true => ConfigError::Secret { name: row.name, reason: "it is not UTF-8 text".to_owned() },
            false => {
                let value = raw.to_string_lossy().into_owned();
                ConfigError::Value { name: row.name, value, allowed: "UTF-8 text".to_owned() }
            }
        })
    }
}

/// For a secret, `allowed` is the whole reason.
fn refuse<K: Kind>(row: &Row<K>, value: String, allowed: String) -> ConfigError {
    match row.kind.is_secret() {
        true => ConfigError::Secret { name: row.name, reason: allowed },
        false => ConfigError::Value { name: row.name, value, allowed },
    }
}

#[cfg(test)]
mod tests {
    use super::super::env::MapEnv;
    use super::super::row::Initial;
    use super::super::variables::{self, VARIABLES};
    use super::*;

    fn read<K: Kind>(row: &Row<K>, value: &str) -> Result<K::Value, String> {
        let env = MapEnv::new("/").set(row.name, value);
        Reader::new(&env, Protocol::GrpcPlusPlus).get(row).map_err(|error| error.to_string())
    }

    #[test]
    fn errors_name_the_variable_the_value_and_what_is_allowed() {
        assert_eq!(
            read(&variables::DRIVER, "kqueue").unwrap_err(),
            "STARWIRE_DRIVER=\"kqueue\" is invalid: it must be one of auto, epoll, io_uring"
        );
        assert_eq!(
            read(&variables::PS_POLLING, "").unwrap_err(),
            "PS_ENABLE_POLLING=\"\" is invalid: it must be true, false, 1 or 0"
        );
    }

    #[test]
    fn empty_text_is_the_same_as_unset() {
        assert_eq!(read(&variables::CLUSTER_ID, ""), Ok(None));
        assert_eq!(read(&variables::VERBS_LIBRARY, ""), Ok("libibverbs.so.1".to_owned()));
        assert!(read(&variables::REACTORS, "").is_err());
    }

    #[test]
    fn text_that_is_not_utf8_is_an_error() {
        use std::os::unix::ffi::OsStringExt;
        for (name, end) in [("STARWIRE_DRIVER", "it must be UTF-8 text"), ("STARWIRE_SECRET", "it is not UTF-8 text")] {
            let env = MapEnv::new("/").set(name, std::ffi::OsString::from_vec(vec![0xff]));
            let reader = &mut Reader::new(&env, Protocol::GrpcPlusPlus);
            let error = reader.get(&variables::DRIVER).map(drop).and(reader.get(&variables::SECRET).map(drop));
            assert!(error.unwrap_err().to_string().ends_with(end), "{name}");
        }
    }

    #[test]
    fn settings_have_the_value_in_force() {
        let env = MapEnv::new("/").set("STARWIRE_VERBS_ARENA", "1M").set("STARWIRE_SECRET", "0123456789abcdef");
        let reader = &mut Reader::new(&env, Protocol::StarServer);
        reader.get(&variables::VERBS_ARENA).unwrap();
        reader.get(&variables::SECRET).unwrap();
        reader.get(&variables::PS_CORES).unwrap();
        reader.get(&variables::REACTORS).unwrap();
        let settings = reader.settings.iter().map(|s| (s.name, s.value.as_str(), s.is_default));
        assert_eq!(
            settings.collect::<Vec<_>>(),
            [
                ("STARWIRE_VERBS_ARENA", "1048576", false),
                ("STARWIRE_SECRET", "set", false),
                ("NETWORK_PS_CORE_NUMBER", "8", true),
                ("STARWIRE_REACTORS", "", true),
            ]
        );
    }

    #[test]
    fn names_are_unique_and_secrets_are_known() {
        let of_our_own = VARIABLES.iter().filter(|variable| variable.name().starts_with("STARWIRE_")).count();
        assert!(of_our_own <= 40, "{of_our_own} variables of starwire's own: which one can go?");
        for (at, variable) in VARIABLES.iter().enumerate() {
            assert!(VARIABLES[..at].iter().all(|other| other.name() != variable.name()), "{}", variable.name());
            assert_eq!(variable.is_secret(), variable.name() == "STARWIRE_SECRET");
        }
        assert!(matches!(variables::SECRET.default, Initial::Unset(_)));
    }
}
