//! STARWIRE_STATE, STARWIRE_STATE_MODE.

use super::error::ConfigError;
use super::reader::Reader;
use super::variables;

/// How a parameter server keeps its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateConfig {
    /// Each task has a folder of its own in it.
    pub folder: String,
    pub mode: StateMode,
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
        let mode = reader.get(&variables::STATE_MODE)?;
        Ok(reader.get(&variables::STATE)?.map(|folder| Self { folder, mode }))
    }
}
