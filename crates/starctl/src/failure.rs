//! Why a command has no result.

#[cfg_attr(test, derive(Debug, PartialEq, Eq))]
pub enum Failure {
    /// The command line is wrong. Exit status 2, as for what clap finds.
    Usage(String),
    /// Exit status 1.
    Failed(String),
    /// Nobody reads any more what the command prints.
    Unread,
}

impl Failure {
    /// What to say, and the exit status. None: nothing, and success.
    pub fn report(self) -> Option<(String, u8)> {
        match self {
            Self::Usage(message) => Some((message, 2)),
            Self::Failed(message) => Some((message, 1)),
            Self::Unread => None,
        }
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}
