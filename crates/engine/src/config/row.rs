//! A row of the table of variables.

use std::borrow::Cow;

use super::kinds::Kind;
use super::protocol::Protocol;

/// All that starwire knows about one environment variable.
pub struct Row<K> {
    pub name: &'static str,
    pub kind: K,
    pub default: Initial,
    pub read_by: ReadBy,
    /// In Markdown.
    pub meaning: &'static str,
}

/// The value of a variable that is not set.
pub enum Initial {
    /// As an operator would write it.
    Is(&'static str),
    /// None; the text describes what starwire does instead.
    Unset(&'static str),
    Star {
        star: &'static str,
        others: &'static str,
    },
    Verbs {
        verbs: &'static str,
        others: &'static str,
    },
    /// A number that depends on the machine, and its description.
    Machine(fn() -> u64, &'static str),
}

/// The processes in which a variable has an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadBy {
    Servers,
    ParameterServers,
    /// The process that hosts the session's master and therefore partitions graphs.
    Masters,
    ServersAndMasters,
    /// The Python package, before the library is loaded.
    Python,
}

/// Where the name comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// GRPC++ and StarServer have the same variable.
    DeepRec,
    /// The verbs module of TensorFlow 1 has the same variable.
    TensorFlowVerbs,
    Starwire,
}

/// A [`Row`] without its type.
pub trait Variable: Sync {
    fn name(&self) -> &'static str;
    fn read_by(&self) -> ReadBy;
    fn is_secret(&self) -> bool;
    /// What the value may be, in Markdown.
    fn values(&self) -> String;
    /// The default, in Markdown.
    fn default(&self) -> String;
    fn meaning(&self) -> &'static str;
}

impl<K: Kind> Variable for Row<K> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn read_by(&self) -> ReadBy {
        self.read_by
    }

    fn is_secret(&self) -> bool {
        self.kind.is_secret()
    }

    fn values(&self) -> String {
        self.kind.describe()
    }

    fn default(&self) -> String {
        match self.default {
            Initial::Is(text) => format!("`{}`", text.replace(',', ",`<br>`")),
            Initial::Unset("") => "–".to_owned(),
            Initial::Unset(text) | Initial::Machine(_, text) => text.to_owned(),
            Initial::Star { star, others } => format!("`{others}` (star protocols: `{star}`)"),
            Initial::Verbs { verbs, others } => format!("`{others}` (`grpc+verbs`: `{verbs}`)"),
        }
    }

    fn meaning(&self) -> &'static str {
        self.meaning
    }
}

impl Initial {
    /// As an operator would write it; `None`: there is no default.
    pub fn text(&self, protocol: Protocol) -> Option<Cow<'static, str>> {
        let text = match *self {
            Self::Unset(_) => return None,
            Self::Machine(find, _) => return Some(find().to_string().into()),
            Self::Is(text) => text,
            Self::Star { star, others } => {
                if protocol.is_star() {
                    star
                } else {
                    others
                }
            }
            Self::Verbs { verbs, others } => {
                if protocol == Protocol::GrpcVerbs {
                    verbs
                } else {
                    others
                }
            }
        };
        Some(text.into())
    }
}

impl ReadBy {
    fn describe(self) -> &'static str {
        match self {
            Self::Servers => "servers",
            Self::ParameterServers => "parameter servers",
            Self::Masters => "masters",
            Self::ServersAndMasters => "servers, masters",
            Self::Python => "`import starwire`",
        }
    }
}

impl Origin {
    pub fn of(name: &str) -> Self {
        match name {
            _ if name.starts_with("STARWIRE_") => Self::Starwire,
            _ if name.starts_with("RDMA_") => Self::TensorFlowVerbs,
            _ => Self::DeepRec,
        }
    }

    fn describe(self) -> &'static str {
        match self {
            Self::DeepRec => "DeepRec",
            Self::TensorFlowVerbs => "TensorFlow 1",
            Self::Starwire => "starwire",
        }
    }
}

/// The table of `docs/configuration.md`.
pub fn markdown(variables: &[&dyn Variable]) -> String {
    let mut out =
        String::from("| variable | from | values | default | read by | meaning |\n|---|---|---|---|---|---|\n");
    for v in variables {
        let (name, origin, read_by) = (v.name(), Origin::of(v.name()).describe(), v.read_by().describe());
        out += &format!("| `{name}` | {origin} | {} | {} | {read_by} | {} |\n", v.values(), v.default(), v.meaning());
    }
    out
}
