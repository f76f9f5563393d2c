//! Calls that carry a stream of bytes to TensorFlow's gRPC server of a task and back. `docs/protocol.md`, "gRPC inside
//! a connection", is the specification.

/// The method.
pub const TUNNEL: u16 = 24;
/// The most bytes of a stream that one call or reply carries.
pub const MOST_CARRIED: usize = 16 << 10;

const NUMBER: usize = size_of::<u64>();
const OPEN: u8 = 0;
const SEND: u8 = 1;
const END: u8 = 2;
const RECEIVE: u8 = 3;
const CLOSE: u8 = 4;

/// What a call asks of its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Connects it to the server.
    Open,
    /// Sends these bytes to the server, at least one.
    Send(&'a [u8]),
    /// Tells the server that no more follow.
    End,
    /// Asks for the server's next bytes; the reply has none once the server has ended its side.
    Receive,
    Close,
}

/// The metadata of a call. The caller numbers its streams as it likes, but does not use a number again.
pub fn write(stream: u64, request: Request<'_>) -> Vec<u8> {
    let (kind, bytes): (u8, &[u8]) = match request {
        Request::Open => (OPEN, &[]),
        Request::Send(bytes) => (SEND, bytes),
        Request::End => (END, &[]),
        Request::Receive => (RECEIVE, &[]),
        Request::Close => (CLOSE, &[]),
    };
    [&stream.to_le_bytes()[..], &[kind], bytes].concat()
}

/// The stream and the request; `None`: the metadata are not those of this method.
pub fn read(meta: &[u8]) -> Option<(u64, Request<'_>)> {
    let (number, rest) = meta.split_first_chunk::<NUMBER>()?;
    let request = match rest.split_first()? {
        (&SEND, bytes) if (1..=MOST_CARRIED).contains(&bytes.len()) => Request::Send(bytes),
        (&OPEN, []) => Request::Open,
        (&END, []) => Request::End,
        (&RECEIVE, []) => Request::Receive,
        (&CLOSE, []) => Request::Close,
        _ => return None,
    };
    Some((u64::from_le_bytes(*number), request))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let long = vec![7; MOST_CARRIED];
        let all = [Request::Open, Request::Send(b"x"), Request::Send(&long), Request::End, Request::Receive];
        for request in all.into_iter().chain([Request::Close]) {
            assert_eq!(read(&write(u64::MAX - 1, request)), Some((u64::MAX - 1, request)));
        }
    }

    #[test]
    fn anything_else_is_refused() {
        let too_long = vec![7; MOST_CARRIED + 1];
        for request in [Request::Send(&too_long), Request::Send(b"")] {
            assert_eq!(read(&write(1, request)), None);
        }
        let whole = write(1, Request::Open);
        for n in 0..whole.len() {
            assert_eq!(read(&whole[..n]), None);
        }
        for kind in [OPEN, END, RECEIVE, CLOSE] {
            assert_eq!(read(&[&[0; NUMBER][..], &[kind, 0]].concat()), None);
        }
        assert_eq!(read(&[&[0; NUMBER][..], &[CLOSE + 1]].concat()), None);
    }
}
