//! The protocols that a task can run, by the name that TensorFlow's `ServerDef` has for them. Text only at the border:
//! in the C ABI, on the command line and on the wire.

use std::fmt;
use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TensorFlow's own. There is no starwire server; graphs may still be fused.
    Grpc,
    GrpcPlusPlus,
    GrpcVerbs,
    StarServer,
    StarServerLite,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("starwire: protocol {0:?} must be one of grpc, grpc++, grpc+verbs, star_server, star_server_lite")]
pub struct UnknownProtocol(pub String);

impl Protocol {
    pub const ALL: [Self; 5] =
        [Self::Grpc, Self::GrpcPlusPlus, Self::GrpcVerbs, Self::StarServer, Self::StarServerLite];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::GrpcPlusPlus => "grpc++",
            Self::GrpcVerbs => "grpc+verbs",
            Self::StarServer => "star_server",
            Self::StarServerLite => "star_server_lite",
        }
    }

    /// Whether workers make star calls.
    pub const fn is_star(self) -> bool {
        matches!(self, Self::StarServer | Self::StarServerLite)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Protocol {
    type Err = UnknownProtocol;

    fn from_str(name: &str) -> Result<Self, UnknownProtocol> {
        Self::ALL.into_iter().find(|known| known.name() == name).ok_or_else(|| UnknownProtocol(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_protocols_and_errors_list_them() {
        for protocol in Protocol::ALL {
            assert_eq!(protocol.name().parse(), Ok(protocol));
            assert_eq!(protocol.to_string(), protocol.name());
        }
        let error = "GRPC++".parse::<Protocol>().unwrap_err().to_string();
        let names = Protocol::ALL.map(Protocol::name).join(", ");
        assert_eq!(error, format!("starwire: protocol \"GRPC++\" must be one of {names}"));
    }
}
