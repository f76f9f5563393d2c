//! With one port, clients of TensorFlow's gRPC arrive beside those of the control service, and are passed on.
//!
//! Both speak HTTP/2, and gRPC's clients send no request before they have seen the server's settings, so the paths of
//! requests come too late. But the first frame of every client built on gRPC's C core, as each of TensorFlow's is, has
//! a setting that no other HTTP/2 client sends.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

use crate::port::Hidden;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEADER: usize = 9;
/// The longest frame, as neither side announces another.
const MAX_FRAME: usize = 16 << 10;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const SETTING: usize = 6;
/// No client has so many settings.
const MAX_SETTINGS: usize = 1024;
/// GRPC_ALLOW_TRUE_BINARY_METADATA
const OF_GRPC_CORE: [u8; 2] = [0xfe, 0x03];

/// An idle connection has a buffer of this size in each direction …
const IDLE_BUFFER: usize = 2 << 10;
/// … and a busy one of this size.
const BUSY_BUFFER: usize = 64 << 10;
/// While TensorFlow's queue of new connections is full: time until the next attempt, and for all of them.
const PAUSE: Duration = Duration::from_millis(20);
const PATIENCE: Duration = Duration::from_secs(10);

/// The recipient of an HTTP/2 connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipient {
    TensorFlow,
    ControlService,
}

/// The recipient of a connection that began with these bytes; `None`: they are too few to tell.
pub fn recipient(first: &[u8]) -> Option<Recipient> {
    let after = first.get(PREFACE.len()..)?;
    let header = after.first_chunk::<FRAME_HEADER>()?;
    let length = usize::from(header[0]) << 16 | usize::from(header[1]) << 8 | usize::from(header[2]);
    if header[3] != SETTINGS || length > MAX_SETTINGS {
        // Not HTTP/2, which the control service will find out.
        return Some(Recipient::ControlService);
    }
    let settings = after.get(FRAME_HEADER..FRAME_HEADER + length)?;
    let is_core = settings.chunks(SETTING).any(|setting| setting.starts_with(&OF_GRPC_CORE));
    Some(if is_core { Recipient::TensorFlow } else { Recipient::ControlService })
}

/// Reads until the recipient is known.
pub async fn sort(client: &mut (impl AsyncRead + Unpin), first: &mut Vec<u8>) -> io::Result<Recipient> {
    loop {
        if let Some(recipient) = recipient(first) {
            return Ok(recipient);
        }
        let mut buffer = [0; 512];
        match client.read(&mut buffer).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => first.extend_from_slice(&buffer[..n]),
        }
    }
}

/// Connects a client to TensorFlow's gRPC server until both have ended their sides, or one of them is gone.
pub async fn proxy(client: impl AsyncRead + AsyncWrite, to: &Hidden) -> io::Result<()> {
    let (from_server, to_server) = connect(to).await?.into_split();
    let (from_client, to_client) = tokio::io::split(client);
    tokio::try_join!(flow(from_client, to_server), flow(from_server, to_client)).map(drop)
}

/// A connection to TensorFlow's gRPC server.
pub async fn connect(to: &Hidden) -> io::Result<UnixStream> {
    let attempts = async {
        loop {
            match UnixStream::connect(to.path()).await {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(PAUSE).await,
                result => return result,
            }
        }
    };
    timeout(PATIENCE, attempts).await?
}

async fn flow(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> io::Result<()> {
    let mut buffer = vec![0; IDLE_BUFFER];
    loop {
        let n = from.read(&mut buffer).await?;
        if n == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..n]).await?;
        // TLS may keep what the socket did not take.
        to.flush().await?;
        if n == buffer.len() {
            buffer.resize(BUSY_BUFFER, 0);
        } else if n < IDLE_BUFFER && buffer.len() > IDLE_BUFFER {
            buffer = vec![0; IDLE_BUFFER];
        }
    }
}

/// Denies a client, until it has had the connection for long enough: then it may connect again.
pub async fn deny_for(enough: Duration, client: impl AsyncRead + AsyncWrite + Unpin, reason: &str) -> io::Result<()> {
    timeout(enough, deny(client, reason)).await?
}

/// Answers each request of a client that is not passed on with PERMISSION_DENIED and the reason, until the client ends
/// the connection. TensorFlow's clients connect again and again to a server that only closes it.
pub async fn deny(mut client: impl AsyncRead + AsyncWrite + Unpin, reason: &str) -> io::Result<()> {
    client.read_exact(&mut [0; PREFACE.len()]).await?;
    client.write_all(&frame(SETTINGS, 0, [0; 4], &[])).await?;
    let mut payload = vec![0; MAX_FRAME];
    loop {
        let mut header = [0; FRAME_HEADER];
        client.read_exact(&mut header).await?;
        let [a, b, c, kind, flags, stream @ ..] = header;
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        let payload = payload.get_mut(..length).ok_or(io::ErrorKind::InvalidData)?;
        client.read_exact(payload).await?;
        let answer = match kind {
            SETTINGS | PING if flags & ACK != 0 => continue,
            SETTINGS => frame(SETTINGS, ACK, stream, &[]),
            PING => frame(PING, ACK, stream, payload),
            HEADERS => {
                // The rest of the request is not wanted.
                let end = frame(RST_STREAM, 0, stream, &[0; 4]);
                [frame(HEADERS, END_STREAM | END_HEADERS, stream, &denial(reason)), end].concat()
            }
            GOAWAY => return client.shutdown().await,
            _ => continue,
        };
        client.write_all(&answer).await?;
    }
}

fn frame(kind: u8, flags: u8, stream: [u8; 4], payload: &[u8]) -> Vec<u8> {
    let [a, b, c] = match u32::try_from(payload.len()).unwrap_or_default().to_be_bytes() {
        [_, rest @ ..] => rest,
    };
    [&[a, b, c, kind, flags], &stream[..], payload].concat()
}

/// The header block of a gRPC response without a message.
fn denial(reason: &str) -> Vec<u8> {
    const STATUS_200: u8 = 0x88;
    const PERMISSION_DENIED: &str = "7";
    // Literal, not indexed, not compressed; longer texts would have longer lengths.
    let text = |text: &str| {
        let bytes = &text.as_bytes()[..text.len().min(126)];
        [&[u8::try_from(bytes.len()).unwrap_or_default()], bytes].concat()
    };
    let mut block = vec![STATUS_200];
    let fields = [("content-type", "application/grpc"), ("grpc-status", PERMISSION_DENIED), ("grpc-message", reason)];
    for (name, value) in fields {
        block.push(0);
        block.extend(text(name));
        block.extend(text(value));
    }
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As gRPC's C core 1.75 begins.
    fn core() -> Vec<u8> {
        let settings: &[(u16, u32)] = &[(2, 0), (3, 0), (4, 65535), (5, 16384), (6, 16384), (0xfe03, 1)];
        beginning(settings)
    }

    fn beginning(settings: &[(u16, u32)]) -> Vec<u8> {
        let body: Vec<u8> =
            settings.iter().flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat()).collect();
        let length = u8::try_from(body.len()).unwrap();
        [PREFACE, &[0, 0, length, SETTINGS, 0, 0, 0, 0, 0], &body].concat()
    }

    #[test]
    fn the_first_settings_name_the_recipient() {
        assert_eq!(recipient(&core()), Some(Recipient::TensorFlow));
        for settings in [&[][..], &[(4, 65535), (5, 16384)], &[(0xfe, 0x0300_0000)]] {
            assert_eq!(recipient(&beginning(settings)), Some(Recipient::ControlService));
        }
        for n in 0..core().len() {
            assert_eq!(recipient(&core()[..n]), None, "{n}");
        }
        let mut strange = core();
        strange[PREFACE.len() + 3] = 1;
        assert_eq!(recipient(&strange), Some(Recipient::ControlService));
        strange[PREFACE.len()..][..4].copy_from_slice(&[0xff, 0xff, 0xff, SETTINGS]);
        assert_eq!(recipient(&strange), Some(Recipient::ControlService));
    }

    async fn expect(client: &mut tokio::io::DuplexStream, wanted: &[u8]) {
        let mut seen = vec![0; wanted.len()];
        client.read_exact(&mut seen).await.unwrap();
        assert_eq!(seen, wanted);
    }

    #[tokio::test]
    async fn each_request_is_denied_with_the_reason() {
        let (mut client, server) = tokio::io::duplex(1 << 16);
        let denied = tokio::spawn(async move { deny(server, "no").await.map_err(|error| error.kind()) });
        client.write_all(&core()).await.unwrap();
        expect(&mut client, &frame(SETTINGS, 0, [0; 4], &[])).await;
        expect(&mut client, &frame(SETTINGS, ACK, [0; 4], &[])).await;
        client.write_all(&frame(SETTINGS, ACK, [0; 4], &[])).await.unwrap();
        client.write_all(&frame(PING, 0, [0; 4], b"12345678")).await.unwrap();
        expect(&mut client, &frame(PING, ACK, [0; 4], b"12345678")).await;
        for stream in [1, 3] {
            let id = [0, 0, 0, stream];
            client.write_all(&frame(HEADERS, END_HEADERS, id, b"whatever")).await.unwrap();
            client.write_all(&frame(0, END_STREAM, id, &[0; 100])).await.unwrap();
            let answer = b"\x88\0\x0ccontent-type\x10application/grpc\0\x0bgrpc-status\x017\0\x0cgrpc-message\x02no";
            expect(&mut client, &frame(HEADERS, END_STREAM | END_HEADERS, id, answer)).await;
            expect(&mut client, &frame(RST_STREAM, 0, id, &[0; 4])).await;
        }
        client.write_all(&frame(GOAWAY, 0, [0; 4], &[0; 8])).await.unwrap();
        assert_eq!(denied.await.unwrap(), Ok(()));
    }

    #[tokio::test]
    async fn a_frame_that_is_too_long_ends_the_connection() {
        let (mut client, server) = tokio::io::duplex(1 << 16);
        client.write_all(&[PREFACE, &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat()).await.unwrap();
        assert_eq!(deny(server, "no").await.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn a_client_that_goes_on_and_on_is_denied_no_more() {
        let (mut client, server) = tokio::io::duplex(1 << 16);
        let (mut answers, mut requests) = tokio::io::split(&mut client);
        let endless = async {
            requests.write_all(&core()).await.unwrap();
            while requests.write_all(&frame(PING, 0, [0; 4], b"12345678")).await.is_ok() {
                let _ = answers.read(&mut [0; 1000]).await;
            }
        };
        let denied = async { deny_for(Duration::from_millis(1), server, "no").await.map_err(|error| error.kind()) };
        let (ended, ()) = timeout(PATIENCE, async { tokio::join!(denied, endless) }).await.unwrap();
        assert_eq!(ended, Err(io::ErrorKind::TimedOut));
    }
}
