//! The drivers of the reactors, over the simulated network.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::net::{Net, inode};
use starwire_net::reactor::driver::{Completion, Driver, Token};
use starwire_net::transport::{IoPart, SocketAddress};

/// What a reactor does between its turns.
#[derive(Clone, Copy)]
pub enum Wait {
    /// It has more to do.
    Runs,
    /// Nothing, until this time, if nothing happens.
    Sleeps(Option<Instant>),
}

/// A driver of a task.
pub struct SimDriver {
    net: Rc<RefCell<Net>>,
    pub number: usize,
    wake: (UnixStream, UnixStream),
}

impl SimDriver {
    pub fn new(net: &Rc<RefCell<Net>>, task: usize) -> Self {
        let number = {
            let mut net = net.borrow_mut();
            net.tasks.push(task);
            net.of_drivers.push(Vec::new());
            net.waits.push(Wait::Runs);
            net.tasks.len() - 1
        };
        let wake = UnixStream::pair().unwrap();
        for fd in [&wake.0, &wake.1] {
            let inode = inode(&fd.as_fd().try_clone_to_owned().unwrap());
            net.borrow_mut().inodes.insert(inode);
        }
        wake.0.set_nonblocking(true).unwrap();
        Self { net: net.clone(), number, wake }
    }
}

impl Driver for SimDriver {
    fn name(&self) -> &str {
        "simulated"
    }

    fn register(&mut self, fd: OwnedFd) -> io::Result<Token> {
        Ok(self.net.borrow_mut().register(self.number, fd))
    }

    fn accept(&mut self, listener: Token) -> io::Result<()> {
        let mut net = self.net.borrow_mut();
        let inode = net.ends[listener.0 as usize].fd.as_ref().map(inode).unwrap();
        let address = net.addresses.remove(&inode).unwrap();
        net.listeners.insert(address, (self.number, listener.0 as usize));
        Ok(())
    }

    fn connect(&mut self, token: Token, address: &SocketAddress) -> io::Result<()> {
        let mut net = self.net.borrow_mut();
        if net.fails_as("a host is unreachable", 50) {
            return Err(io::Error::from_raw_os_error(libc::ENETUNREACH));
        }
        if net.is_dying(self.number) {
            return Ok(());
        }
        let SocketAddress::Inet(address) = address else { unreachable!("unix sockets are off") };
        net.connect(token.0 as usize, *address);
        Ok(())
    }

    unsafe fn recv(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()> {
        let end = &mut self.net.borrow_mut().ends[token.0 as usize];
        assert!(end.recv.is_none() && end.closes_at.is_none(), "one receive at a time");
        end.recv = Some(parts.to_vec());
        Ok(())
    }

    unsafe fn send(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()> {
        let mut net = self.net.borrow_mut();
        if net.fails_as("no memory to send", 500) {
            return Err(io::Error::from_raw_os_error(libc::ENOBUFS));
        }
        let end = &mut net.ends[token.0 as usize];
        assert!(end.send.is_none() && end.closes_at.is_none(), "one send at a time");
        end.send = Some(parts.to_vec());
        Ok(())
    }

    fn watch(&mut self, _fd: OwnedFd) -> io::Result<Token> {
        unreachable!("only sockets")
    }

    fn finish(&mut self, token: Token) {
        self.net.borrow_mut().ends[token.0 as usize].finishes = true;
    }

    fn close(&mut self, token: Token) {
        let mut net = self.net.borrow_mut();
        let at = token.0 as usize;
        if net.ends[at].closes_at.is_some() || net.ends[at].is_closed {
            return;
        }
        let after = Duration::from_micros(net.below(20_000));
        net.ends[at].closes_at = Some(net.now + after);
        if net.is_dying(self.number) {
            return;
        }
        // Unread bytes turn the end into a reset.
        let is_reset = net.ends[at].arriving > 0;
        net.gone(at, is_reset);
        net.listeners.retain(|_, (_, listener)| *listener != at);
    }

    fn release(&mut self, token: Token) -> io::Result<OwnedFd> {
        let mut net = self.net.borrow_mut();
        if net.below(3) == 0 {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        let at = token.0 as usize;
        let fd = net.ends[at].fd.take();
        net.forget(at);
        Ok(fd.unwrap())
    }

    fn quiesce(&mut self, _patience: Duration) -> bool {
        let mut net = self.net.borrow_mut();
        let net = &mut *net;
        for at in net.of_drivers[self.number].clone() {
            net.forget(at);
        }
        true
    }

    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()> {
        let mut net = self.net.borrow_mut();
        net.progress(self.number, out);
        let sleeps = timeout != Some(Duration::ZERO) && out.is_empty();
        let until = timeout.map(|timeout| net.now + timeout);
        net.waits[self.number] = if sleeps { Wait::Sleeps(until) } else { Wait::Runs };
        Ok(())
    }

    fn wake_fd(&self) -> RawFd {
        self.wake.0.as_raw_fd()
    }
}
