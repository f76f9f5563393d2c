//! Mutual TLS 1.3 on a server's port: credentials from files, whom a certificate speaks for, and sessions.
//!
//! rustls does the cryptography and the handshake. Certificates are believed if a CA of `STARWIRE_TLS_CA` has issued
//! them and they are valid when a connection begins; [`Names`] then decides which task they speak for.

mod credentials;
mod explain;
mod names;
mod session;

use rustls::AlertDescription;

pub use credentials::{Credentials, File, Files, Tls, Unusable};
pub use explain::handshake as explain;
pub use names::{Names, Subject};
pub use session::{ClientKind, HANDSHAKE, Opened, Session};

/// The alert that a server without TLS sends to a client with.
const NO_TLS_HERE: AlertDescription = AlertDescription::ProtocolVersion;

/// The same as a record: an alert, TLS 1.2 (as every record of TLS 1.3 says), two bytes, fatal.
pub const NO_TLS: [u8; 7] = [0x15, 3, 3, 0, 2, 2, 70];
