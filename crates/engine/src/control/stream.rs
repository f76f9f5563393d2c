//! A connection that was handed over: the bytes read so far come first, and silence ends it.

use std::future::Future;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, Sleep, sleep};
use tokio_rustls::server::TlsStream;

use crate::admission::Source;

/// A socket before it belongs to a runtime.
pub enum Socket {
    Tcp(std::net::TcpStream),
    Unix(std::os::unix::net::UnixStream),
}

impl Socket {
    /// Determines the kind of the socket. Fails if the peer has gone.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let tcp = std::net::TcpStream::from(fd);
        // Required below: a blocking read or write would hold up a reactor.
        tcp.set_nonblocking(true)?;
        match tcp.peer_addr() {
            Ok(_) => Ok(Self::Tcp(tcp)),
            // Not an internet address.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(Self::Unix(OwnedFd::from(tcp).into())),
            Err(error) => Err(error),
        }
    }

    /// Whether the peer is on this host.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(tcp) => tcp.peer_addr().is_ok_and(|peer| peer.ip().to_canonical().is_loopback()),
            Self::Unix(_) => true,
        }
    }

    /// The peer's address, for messages.
    pub fn name(&self) -> String {
        match self {
            Self::Tcp(tcp) => {
                tcp.peer_addr().map_or_else(|_| "a peer that is gone".to_owned(), |peer| peer.to_string())
            }
            Self::Unix(_) => "a local process".to_owned(),
        }
    }

    pub fn source(&self) -> Source {
        match self {
            Self::Tcp(tcp) => tcp.peer_addr().map_or(Source::Unknown, |peer| Source::of_ip(peer.ip())),
            Self::Unix(_) => Source::Unknown,
        }
    }

    /// Sends as much as fits into the socket's buffer, at once, and closes it.
    pub fn close_with(self, last_words: &[u8]) {
        // If the peer has gone, it does not need the message.
        let _ = match self {
            Self::Tcp(tcp) => send_goodbyes(&tcp, last_words, || tcp.shutdown(Shutdown::Write)),
            Self::Unix(unix) => send_goodbyes(&unix, last_words, || unix.shutdown(Shutdown::Write)),
        };
    }
}

fn send_goodbyes<S>(mut socket: S, words: &[u8], shutdown: impl FnOnce() -> io::Result<()>) -> io::Result<()>
where
    S: Read + Write,
{
    socket.write_all(words)?;
    shutdown()?;
    // Unread bytes would turn the close into a reset, which can overtake the message.
    let mut unread = [0; 4096];
    for _ in 0..16 {
        if socket.read(&mut unread)? == 0 {
            break;
        }
    }
    Ok(())
}

enum Inner {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream<Replayed>>),
}

/// The stream that HTTP is served on.
pub struct Replayed {
    first: Vec<u8>,
    replayed: usize,
    inner: Inner,
    /// `None`: silence does not end it.
    idle: Option<Duration>,
    deadline: Pin<Box<Sleep>>,
}

impl Replayed {
    /// Must run on the runtime that will serve the stream.
    pub fn new(socket: Socket, first: Vec<u8>, idle: Duration) -> io::Result<Self> {
        let inner = match socket {
            Socket::Tcp(tcp) => Inner::Tcp(TcpStream::from_std(tcp)?),
            Socket::Unix(unix) => Inner::Unix(UnixStream::from_std(unix)?),
        };
        Ok(Self { first, replayed: 0, inner, idle: Some(idle), deadline: Box::pin(sleep(idle)) })
    }

    /// What comes out of a TLS stream.
    pub fn over_tls(stream: TlsStream<Replayed>, idle: Duration) -> Self {
        let inner = Inner::Tls(Box::new(stream));
        Self { first: Vec::new(), replayed: 0, inner, idle: Some(idle), deadline: Box::pin(sleep(idle)) }
    }

    /// The same stream, which begins with these bytes again. All bytes were read.
    pub fn replay(self, first: Vec<u8>) -> Self {
        Self { first, replayed: 0, ..self }
    }

    /// The same stream, which may be silent as long as it likes.
    pub fn patient(mut self) -> Self {
        if let Inner::Tls(tls) = &mut self.inner {
            tls.get_mut().0.idle = None;
        }
        Self { idle: None, ..self }
    }

    fn progress<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        let Some(idle) = self.idle else { return result };
        if result.is_ready() {
            self.deadline.as_mut().reset(Instant::now() + idle);
            return result;
        }
        ready!(self.deadline.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the connection was idle for too long")))
    }
}

impl AsyncRead for Replayed {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if let Some(left) = this.first.get(this.replayed..).filter(|left| !left.is_empty()) {
            let n = left.len().min(buf.remaining());
            buf.put_slice(&left[..n]);
            this.replayed += n;
            if this.replayed == this.first.len() {
                this.first = Vec::new();
                this.replayed = 0;
            }
            return Poll::Ready(Ok(()));
        }
        let result = match &mut this.inner {
            Inner::Tcp(tcp) => Pin::new(tcp).poll_read(cx, buf),
            Inner::Unix(unix) => Pin::new(unix).poll_read(cx, buf),
            Inner::Tls(tls) => Pin::new(tls).poll_read(cx, buf),
        };
        this.progress(cx, result)
    }
}

impl AsyncWrite for Replayed {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let result = match &mut this.inner {
            Inner::Tcp(tcp) => Pin::new(tcp).poll_write(cx, buf),
            Inner::Unix(unix) => Pin::new(unix).poll_write(cx, buf),
            Inner::Tls(tls) => Pin::new(tls).poll_write(cx, buf),
        };
        this.progress(cx, result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.inner {
            Inner::Tcp(tcp) => Pin::new(tcp).poll_flush(cx),
            Inner::Unix(unix) => Pin::new(unix).poll_flush(cx),
            Inner::Tls(tls) => Pin::new(tls).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.inner {
            Inner::Tcp(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Inner::Unix(unix) => Pin::new(unix).poll_shutdown(cx),
            Inner::Tls(tls) => Pin::new(tls).poll_shutdown(cx),
        }
    }
}
