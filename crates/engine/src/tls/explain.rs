//! What went wrong with certificates and handshakes, for operators.

use std::time::Duration;

use rustls::{AlertDescription, CertificateError, PeerIncompatible};

const SPAN: [(u64, &str); 4] = [(86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds")];

/// A duration in its largest unit.
fn span(seconds: u64) -> String {
    let (unit, name) = SPAN.into_iter().find(|(unit, _)| seconds >= 2 * unit).unwrap_or((1, "seconds"));
    format!("{} {name}", seconds / unit)
}

fn expired(now: Duration, not_after: Duration) -> String {
    format!("it expired {} ago (by this machine's clock)", span(now.saturating_sub(not_after).as_secs()))
}

fn too_early(now: Duration, not_before: Duration) -> String {
    format!("it becomes valid in {} (by this machine's clock)", span(not_before.saturating_sub(now).as_secs()))
}

const FOREIGN: &str = "it was not issued by a CA of STARWIRE_TLS_CA";
const PURPOSE: &str = "its extended key usage lacks serverAuth or clientAuth: every task is both";

/// Why a certificate does not do: "it …".
pub fn own(error: &webpki::Error) -> String {
    use webpki::Error as E;
    let seconds = |time: &rustls::pki_types::UnixTime| Duration::from_secs(time.as_secs());
    match error {
        E::CertExpired { time, not_after } => expired(seconds(time), seconds(not_after)),
        E::CertNotValidYet { time, not_before } => too_early(seconds(time), seconds(not_before)),
        E::UnknownIssuer | E::InvalidSignatureForPublicKey => FOREIGN.to_owned(),
        E::RequiredEkuNotFoundContext(_) => PURPOSE.to_owned(),
        E::CaUsedAsEndEntity => "it is the certificate of a CA, not of a task".to_owned(),
        other => format!("it is not valid: {other}"),
    }
}

/// Why a handshake failed, with the other side as "the peer".
pub fn handshake(error: &rustls::Error) -> String {
    use rustls::Error as E;
    match error {
        E::InvalidCertificate(error) => format!("the peer's certificate is refused: {}", foreign(error)),
        E::NoCertificatesPresented => "the peer presented no certificate".to_owned(),
        E::AlertReceived(alert) => refused_with(*alert),
        E::PeerIncompatible(PeerIncompatible::Tls12NotOffered | PeerIncompatible::Tls13RequiredForQuic)
        | E::PeerIncompatible(PeerIncompatible::SupportedVersionsExtensionRequired) => {
            "the peer does not speak TLS 1.3".to_owned()
        }
        E::InvalidMessage(_) | E::InappropriateMessage { .. } => {
            format!("the peer does not speak TLS here ({error}): is it a starwire task with STARWIRE_TLS_CERT?")
        }
        E::DecryptError => "received bytes that the peer did not send: they were changed on their way".to_owned(),
        other => format!("the TLS handshake failed: {other}"),
    }
}

fn foreign(error: &CertificateError) -> String {
    let seconds = |time: &rustls::pki_types::UnixTime| Duration::from_secs(time.as_secs());
    match error {
        CertificateError::ExpiredContext { time, not_after } => expired(seconds(time), seconds(not_after)),
        CertificateError::NotValidYetContext { time, not_before } => too_early(seconds(time), seconds(not_before)),
        CertificateError::UnknownIssuer | CertificateError::BadSignature => FOREIGN.to_owned(),
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => PURPOSE.to_owned(),
        // A reason of this module's own.
        CertificateError::Other(why) => why.to_string(),
        other => format!("{other}"),
    }
}

/// The peer ended the handshake, or the connection, with this alert.
fn refused_with(alert: AlertDescription) -> String {
    let why = match alert {
        super::NO_TLS_HERE => {
            return "the peer does not use TLS: set STARWIRE_TLS_CERT, STARWIRE_TLS_KEY and STARWIRE_TLS_CA for all tasks of the cluster".to_owned();
        }
        AlertDescription::CertificateExpired => "has expired by the peer's clock",
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "was not issued by a CA of the peer's STARWIRE_TLS_CA"
        }
        AlertDescription::CertificateRequired => "was not presented",
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateRevoked
        | AlertDescription::CertificateUnknown
        | AlertDescription::AccessDenied => "is not valid for the peer",
        other => return format!("the peer ended the TLS connection ({other:?})"),
    };
    format!("the peer refused this task's certificate, which {why}; the peer's log has the reason")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_a_readable_unit() {
        let read = [0, 1, 59, 119, 120, 7199, 7200, 86_400, 172_800, 1 << 30].map(span);
        assert_eq!(
            read,
            [
                "0 seconds",
                "1 seconds",
                "59 seconds",
                "119 seconds",
                "2 minutes",
                "119 minutes",
                "2 hours",
                "24 hours",
                "2 days",
                "12427 days"
            ]
        );
    }
}
