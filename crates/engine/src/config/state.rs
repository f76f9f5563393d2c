//! STARWIRE_STATE, STARWIRE_STATE_MODE, STARWIRE_STATE_FROM.

use std::fmt;

use super::address::HostPort;
use super::error::ConfigError;
use super::reader::Reader;
use super::variables;

/// How a parameter server keeps its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateConfig {
    /// Each task has a folder of its own in it.
    pub folder: String,
    pub mode: StateMode,
    pub from: Option<StateFrom>,
}

/// Another process of the task, whose state this one takes over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateFrom {
    /// As in a ClusterSpec.
    pub address: HostPort,
    pub when: TakeOver,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeOver {
    /// As soon as the state has been copied.
    Now,
    /// When the other process stops, or somebody says that it has ended.
    AtItsEnd,
}

impl StateFrom {
    pub(super) const FORMS: &'static str = "move=host:port or standby=host:port";

    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let parts = text.split_once('=').and_then(|(when, address)| {
            let when = match when.trim() {
                "move" => TakeOver::Now,
                "standby" => TakeOver::AtItsEnd,
                _ => return None,
            };
            Some(Self { address: address.trim().parse().ok()?, when })
        });
        parts.ok_or_else(|| Self::FORMS.to_owned())
    }
}

impl fmt::Display for StateFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let when = if self.when == TakeOver::Now { "move" } else { "standby" };
        write!(f, "{when}={}", self.address)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateMode {
    /// Every second.
    Async,
    /// Before the answer.
    Sync,
}

impl StateConfig {
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Option<Self>, ConfigError> {
        let (mode, from) = (reader.get(&variables::STATE_MODE)?, reader.get(&variables::STATE_FROM)?);
        let folder = reader.get(&variables::STATE)?;
        if folder.is_none() && from.is_some() {
            // It would begin without the state, beside the server that has it.
            let (first, second) = (variables::STATE_FROM.name, variables::STATE.name);
            let reason = "the state needs a folder: set both, or none".to_owned();
            return Err(ConfigError::Conflict { first, second, reason });
        }
        Ok(folder.map(|folder| Self { folder, mode, from }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_the_state_comes_from() {
        for text in ["move=ps-0a:2222", "standby=[::1]:2222"] {
            assert_eq!(StateFrom::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(StateFrom::parse("standby = a:1").unwrap().when, TakeOver::AtItsEnd);
        for wrong in ["ps-0a:2222", "copy=a:1", "move=a", "move=", "=a:1"] {
            assert_eq!(StateFrom::parse(wrong), Err(StateFrom::FORMS.to_owned()), "{wrong}");
        }
    }
}
