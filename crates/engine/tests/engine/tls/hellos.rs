//! The first bytes of TLS clients.

use starwire_engine::tls::{ClientKind, Session};

use super::http::{config, credentials};
use super::*;

/// The first flight of a client with these application protocols.
pub fn hello(identity: &Identity, alpn: &[&[u8]]) -> Vec<u8> {
    let name = std::net::IpAddr::from([127, 0, 0, 1]).into();
    let mut client = rustls::ClientConnection::new(config(identity, alpn), name).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    hello
}

/// What a server says after each byte, until it knows.
fn byte_by_byte(server: &mut Session, bytes: &[u8]) -> (usize, Result<ClientKind, String>) {
    for (at, byte) in bytes.iter().enumerate() {
        server.room()[0] = *byte;
        server.arrived(1);
        let kind = server.client_kind();
        if kind != Ok(ClientKind::Unknown) {
            return (at + 1, kind);
        }
    }
    (bytes.len(), Ok(ClientKind::Unknown))
}

#[test]
fn a_hello_is_read_once_it_is_complete() {
    let files = Authority::new("test").identity(PS_NAME);
    let server = || Session::server(credentials(&files).server.clone());
    for (alpn, kind) in [(&[&b"starwire/2"[..]][..], ClientKind::Hello), (&[&b"h2"[..]], ClientKind::Http)] {
        let hello = hello(&files, alpn);
        assert_eq!(byte_by_byte(&mut server(), &hello), (hello.len(), Ok(kind)));
        // In records of one byte, each of which would have to be joined with all before it.
        let records: Vec<u8> = hello[5..].iter().flat_map(|byte| [0x16, 3, 1, 0, 1, *byte]).collect();
        let (at, end) = byte_by_byte(&mut server(), &records);
        assert!(at <= 6, "{at}: {end:?}");
        assert!(end.unwrap_err().contains("is not in one record"));
        // In two, at any place.
        for split in [5, 8, 20, hello.len() - 6] {
            let part = |part: &[u8]| [&[0x16, 3, 1, 0, 0][..], part].concat();
            let mut records = [part(&hello[5..5 + split]), part(&hello[5 + split..])];
            for record in &mut records {
                let length = u16::try_from(record.len() - 5).unwrap();
                record[3..5].copy_from_slice(&length.to_be_bytes());
            }
            let (at, end) = byte_by_byte(&mut server(), &records.concat());
            assert!(at <= 9, "{at}: {end:?}");
            assert!(end.unwrap_err().contains("is not in one record"));
        }
    }
    let (at, end) = byte_by_byte(&mut server(), &[0x16, 3, 1, 0x40, 1, 1]);
    assert!(at == 5 && end.unwrap_err().contains("is too long"));
}
