//! The data port speaks starwire and HTTP: the first bytes decide.

/// The first bytes of each block.
pub const MAGIC: [u8; 4] = *b"SWB1";
/// The version of the wire format, which follows.
pub const VERSION: u8 = 3;

/// The protocol of a connection, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sniff {
    Starwire,
    Http2,
    Http1,
    /// The handshake of TLS. Nothing in this crate speaks it.
    Tls,
    /// Too short to tell.
    NeedMore,
    Garbage,
}

impl std::fmt::Display for Sniff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Sniff::Starwire => "starwire",
            Sniff::Http2 => "HTTP/2",
            Sniff::Http1 => "HTTP/1",
            Sniff::Tls => "TLS, for which this task has no certificate: set STARWIRE_TLS_CERT, or in no task",
            Sniff::NeedMore => "too few bytes to tell",
            Sniff::Garbage => "unknown protocol",
        })
    }
}

const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// A handshake record, of any version so far.
const TLS_HANDSHAKE: &[u8] = &[0x16, 3];
const HTTP1_METHODS: [&[u8]; 7] = [b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH "];

/// Recognises the protocol of a connection by its first bytes; at most 24 of them.
pub fn sniff(first: &[u8]) -> Sniff {
    let agrees = |pattern: &[u8]| first.iter().zip(pattern).all(|(a, b)| a == b);
    let has = |pattern: &[u8]| first.len() >= pattern.len() && agrees(pattern);
    if has(&MAGIC) {
        Sniff::Starwire
    } else if has(HTTP2_PREFACE) {
        Sniff::Http2
    } else if HTTP1_METHODS.iter().any(|method| has(method)) {
        Sniff::Http1
    } else if has(TLS_HANDSHAKE) {
        Sniff::Tls
    } else if agrees(&MAGIC)
        || agrees(TLS_HANDSHAKE)
        || agrees(HTTP2_PREFACE)
        || HTTP1_METHODS.iter().any(|method| agrees(method))
    {
        Sniff::NeedMore
    } else {
        Sniff::Garbage
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_starwire_http_and_garbage_apart() {
        assert_eq!(sniff(b"SWB1\x01"), Sniff::Starwire);
        assert_eq!(sniff(HTTP2_PREFACE), Sniff::Http2);
        assert_eq!(sniff(b"GET /metrics HTTP/1.1\r\n"), Sniff::Http1);
        assert_eq!(sniff(b"POST / HTTP/1.1\r\n"), Sniff::Http1);
        for beginning in [&b""[..], b"S", b"SWB", b"P", b"PRI * HT", b"GE", b"\x16"] {
            assert_eq!(sniff(beginning), Sniff::NeedMore, "{beginning:?}");
        }
        assert_eq!(sniff(b"\x16\x03\x01"), Sniff::Tls);
        for other in [&b"\x16\x05\x01"[..], b"SWB2", b"PRI * HTTP/3", b"SSH-2.0", b"\0"] {
            assert_eq!(sniff(other), Sniff::Garbage, "{other:?}");
        }
    }

    #[test]
    fn what_came_instead_is_named() {
        let all = [Sniff::Starwire, Sniff::Http2, Sniff::Http1, Sniff::NeedMore, Sniff::Garbage];
        let names = all.map(|sniff| sniff.to_string());
        assert_eq!(names, ["starwire", "HTTP/2", "HTTP/1", "too few bytes to tell", "unknown protocol"]);
        assert!(Sniff::Tls.to_string().contains("STARWIRE_TLS_CERT"));
    }
}
