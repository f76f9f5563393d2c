//! Why a command has no result.

#[cfg_attr(test, derive(Debug, PartialEq, Eq))]
pub enum Failure {
    /// The command line is wrong. Exit status 2, as for what clap finds.
    Usage(String),
    /// Exit status 1.
    Failed(String),
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}
