//! A driver with queue pairs: wraps another driver, some of whose sockets have moved their bytes to RDMA.
//!
//! Completions of all queue pairs arrive through one completion channel, whose descriptor the inner driver watches; an
//! idle connection costs no polling. While the reactor polls (`wait` with a zero timeout), the queues are checked
//! directly.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::rc::Rc;
use std::time::Duration;

use super::driver::{Completion, Driver, IoPart, Offload, Token};
use super::sys;
use crate::transport::SocketAddress;
use crate::transport::verbs::VerbsConfig;
use crate::transport::verbs::{CompletionChannel, Device, Endpoint, Library, Stream, VerbsError, VerbsStats};

/// How long dropping the driver waits for the kernel to release the links' last bytes.
const DRAIN: Duration = Duration::from_secs(5);

pub struct VerbsDriver {
    /// Before the channel and the device, so that queue pairs are dropped first.
    links: HashMap<u64, Link>,
    inner: Box<dyn Driver>,
    channel: Rc<CompletionChannel>,
    channel_token: Token,
    device: Rc<Device>,
    event_token: Token,
    config: Rc<VerbsConfig>,
    /// Checks the queues in each `wait` that does not sleep.
    polls: bool,
    name: String,
    ready: VecDeque<Completion>,
    /// Links with activity since their last flush.
    touched: Vec<u64>,
    found: Vec<Completion>,
    stats: VerbsStats,
    /// The device's shortages that all links have reacted to.
    shortages: u64,
}

struct Link {
    /// `None` once the connection is being closed.
    stream: Option<Stream>,
    receives: bool,
    sends: bool,
    touched: bool,
    /// Its socket is shut down once the peer's device has everything that was sent.
    finishing: bool,
    /// Buffer of the receive that watches the socket, once only its end is expected.
    last_byte: Box<[u8; 1]>,
}

impl Link {
    fn stream(&mut self) -> io::Result<&mut Stream> {
        self.stream.as_mut().ok_or_else(sys::stale_token)
    }
}

impl VerbsDriver {
    /// Opens the device that the configuration names; to be called on the thread that uses the driver.
    pub fn new(
        mut inner: Box<dyn Driver>,
        config: &VerbsConfig,
        polls: bool,
    ) -> Result<Self, (VerbsError, Box<dyn Driver>)> {
        match Self::open(&mut *inner, config) {
            Ok((device, channel, channel_token, event_token)) => Ok(Self {
                links: HashMap::new(),
                name: format!("{} with RDMA ({})", inner.name(), device.describe()),
                shortages: device.shortages.count(),
                inner,
                channel,
                channel_token,
                device,
                event_token,
                config: Rc::new(config.clone()),
                polls,
                ready: VecDeque::new(),
                touched: Vec::new(),
                found: Vec::new(),
                stats: VerbsStats::default(),
            }),
            Err(error) => Err((error, inner)),
        }
    }

    fn open(
        inner: &mut dyn Driver,
        config: &VerbsConfig,
    ) -> Result<(Rc<Device>, Rc<CompletionChannel>, Token, Token), VerbsError> {
        let device = Rc::new(Device::open(Library::load(&config.library)?, config)?);
        let channel = CompletionChannel::new(&device)?;
        let watch = |source| VerbsError::Resource { device: device.name.clone(), what: "event descriptor", source };
        let channel_token = channel.descriptor().and_then(|fd| inner.watch(fd)).map_err(watch)?;
        let event_token = device.descriptor().and_then(|fd| inner.watch(fd)).map_err(watch)?;
        Ok((device, channel, channel_token, event_token))
    }

    /// Reports the results of a link's operations.
    fn collect(&mut self, token: u64) {
        let Some(link) = self.links.get_mut(&token) else { return };
        if !std::mem::replace(&mut link.touched, true) {
            self.touched.push(token);
        }
        let Some(stream) = link.stream.as_mut() else { return };
        let token = Token(token);
        if link.finishing && stream.is_delivered() {
            link.finishing = false;
            self.inner.finish(token);
        }
        if let Some(result) = stream.take_received() {
            self.ready.push_back(Completion::Recv { token, result });
        }
        if let Some(result) = stream.take_sent() {
            self.ready.push_back(Completion::Send { token, result });
        }
    }

    fn with_stream(&mut self, token: u64, act: impl FnOnce(&mut Stream)) {
        if let Some(stream) = self.links.get_mut(&token).and_then(|link| link.stream.as_mut()) {
            act(stream);
            self.collect(token);
        }
    }

    fn on_channel(&mut self) {
        while let Some(key) = self.channel.next_event() {
            self.with_stream(key, |stream| stream.poll(true));
        }
    }

    fn on_device(&mut self) {
        while let Some(event) = self.device.next_event() {
            let keys: Vec<u64> = self.links.keys().copied().collect();
            for key in keys {
                self.with_stream(key, |stream| {
                    if event.element.is_none_or(|element| stream.is_meant_by(element)) {
                        stream.fail(&VerbsError::Event { device: String::from("the device"), what: event.what });
                    }
                });
            }
        }
    }

    /// An event on the socket of a link that has moved: only its end is expected.
    fn on_socket(&mut self, token: Token, result: io::Result<usize>) {
        self.with_stream(token.0, |stream| {
            stream.poll(false);
            match result {
                Ok(0) | Err(_) => stream.end(),
                Ok(_) => stream.fail(&VerbsError::Peer("it sent bytes over the socket after the move to RDMA")),
            }
        });
    }

    fn translate(&mut self, completion: Completion, out: &mut Vec<Completion>) {
        match completion {
            Completion::Readable { token } if token == self.channel_token => self.on_channel(),
            Completion::Readable { token } if token == self.event_token => self.on_device(),
            Completion::Recv { token, result } if self.links.get(&token.0).is_some_and(|link| link.receives) => {
                self.on_socket(token, result);
            }
            Completion::Closed { token } => {
                self.links.remove(&token.0);
                out.push(completion);
            }
            other => out.push(other),
        }
    }

    /// If any connection of the process ran short of memory, all links release the registrations that they keep for
    /// later. True: there were some.
    fn make_room(&mut self) -> bool {
        let shortages = self.device.shortages.count();
        if std::mem::replace(&mut self.shortages, shortages) == shortages {
            return false;
        }
        let streams = self.links.values_mut().filter_map(|link| link.stream.as_mut());
        streams.fold(false, |any, stream| stream.make_room() | any)
    }

    fn flush(&mut self) {
        self.make_room();
        let mut touched = std::mem::take(&mut self.touched);
        for token in touched.drain(..) {
            let Some(link) = self.links.get_mut(&token) else { continue };
            link.touched = false;
            let Some(stream) = link.stream.as_mut() else { continue };
            stream.flush();
            self.stats.add(&stream.take_stats());
            // A failure while flushing ends operations.
            if stream.is_over() {
                self.collect(token);
            }
        }
        // `collect` may have touched some again; they are flushed next time.
        touched.append(&mut self.touched);
        self.touched = touched;
    }
}

impl Offload for VerbsDriver {
    fn prepare(&mut self, token: Token) -> Result<Vec<u8>, VerbsError> {
        let stream = Stream::new(&self.channel, &self.config, token.0).or_else(|error| {
            self.device.shortages.report();
            if self.make_room() { Stream::new(&self.channel, &self.config, token.0) } else { Err(error) }
        })?;
        let endpoint = stream.endpoint().encode().to_vec();
        let link = Link {
            stream: Some(stream),
            receives: false,
            sends: false,
            touched: false,
            finishing: false,
            last_byte: Box::new([0]),
        };
        self.links.insert(token.0, link);
        Ok(endpoint)
    }

    fn connect_pair(&mut self, token: Token, peer: &[u8]) -> Result<(), VerbsError> {
        let none = VerbsError::Peer("it sent an answer without a question");
        let Some(link) = self.links.get_mut(&token.0) else { return Err(none) };
        let Some(stream) = link.stream.as_mut() else { return Err(none) };
        stream.connect(Endpoint::decode(peer).map_err(VerbsError::PeerEndpoint)?)?;
        let part = IoPart { ptr: link.last_byte.as_mut_ptr(), len: 1 };
        // SAFETY: the byte is boxed and lives as long as the link, which is removed only after the socket's `Closed`.
        let watched = unsafe { self.inner.recv(token, &[part]) };
        watched.map_err(|source| VerbsError::Post { what: "a receive on its socket", source })?;
        link.receives = true;
        Ok(())
    }

    fn move_sends(&mut self, token: Token) {
        if let Some(link) = self.links.get_mut(&token.0) {
            link.sends = true;
        }
    }

    fn abandon(&mut self, token: Token) {
        if self.links.get(&token.0).is_some_and(|link| !link.receives) {
            self.links.remove(&token.0);
        }
    }

    fn take_stats(&mut self) -> VerbsStats {
        std::mem::take(&mut self.stats)
    }
}

impl Driver for VerbsDriver {
    fn name(&self) -> &str {
        &self.name
    }

    fn register(&mut self, fd: OwnedFd) -> io::Result<Token> {
        self.inner.register(fd)
    }

    fn accept(&mut self, listener: Token) -> io::Result<()> {
        self.inner.accept(listener)
    }

    fn connect(&mut self, token: Token, address: &SocketAddress) -> io::Result<()> {
        self.inner.connect(token, address)
    }

    unsafe fn recv(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()> {
        let Some(link) = self.links.get_mut(&token.0).filter(|link| link.receives) else {
            // SAFETY: the caller upholds the contract of `recv`.
            return unsafe { self.inner.recv(token, parts) };
        };
        let stream = link.stream()?;
        if stream.is_receiving() {
            return Err(sys::already("recv"));
        }
        sys::check_parts(parts)?;
        // SAFETY: the caller upholds the contract of `recv`; `close` drops the stream, and with it the device's access,
        // before `Closed` is reported.
        unsafe { stream.start_receive(parts) };
        self.collect(token.0);
        Ok(())
    }

    unsafe fn send(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()> {
        let Some(link) = self.links.get_mut(&token.0).filter(|link| link.sends) else {
            // SAFETY: the caller upholds the contract of `send`.
            return unsafe { self.inner.send(token, parts) };
        };
        let stream = link.stream()?;
        if stream.is_sending() {
            return Err(sys::already("send"));
        }
        sys::check_parts(parts)?;
        // SAFETY: the caller upholds the contract of `send`; `close` drops the stream, and with it the device's access,
        // before `Closed` is reported.
        unsafe { stream.start_send(parts) };
        self.collect(token.0);
        Ok(())
    }

    fn watch(&mut self, fd: OwnedFd) -> io::Result<Token> {
        self.inner.watch(fd)
    }

    fn offload(&mut self) -> Option<&mut dyn Offload> {
        Some(self)
    }

    fn finish(&mut self, token: Token) {
        let Some(link) = self.links.get_mut(&token.0).filter(|link| link.sends) else {
            return self.inner.finish(token);
        };
        // A queue pair cannot signal its end: the socket's end tells the peer that nothing more comes through the queue
        // pair either, so it must not arrive first.
        if let Some(stream) = link.stream.as_mut() {
            stream.finish();
            link.finishing = true;
            self.collect(token.0);
        }
    }

    fn is_finishing(&self) -> bool {
        self.links.values().any(|link| link.finishing && link.stream.is_some())
    }

    fn close(&mut self, token: Token) {
        if let Some(link) = self.links.get_mut(&token.0) {
            // Once it is dropped, the device no longer uses the operations' memory.
            if let Some(mut stream) = link.stream.take() {
                self.stats.add(&stream.take_stats());
            }
            // Undelivered completions are not reported after `close`.
            self.ready.retain(|completion| completion.token() != token);
        }
        self.inner.close(token);
    }

    fn release(&mut self, token: Token) -> io::Result<OwnedFd> {
        if self.links.contains_key(&token.0) {
            return Err(sys::busy());
        }
        self.inner.release(token)
    }

    fn quiesce(&mut self, patience: Duration) -> bool {
        for link in self.links.values_mut() {
            link.stream = None;
        }
        let done = self.inner.quiesce(patience);
        let links = std::mem::take(&mut self.links);
        if !done {
            // The kernel may still write to the links' last bytes.
            std::mem::forget(links);
        }
        done
    }

    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()> {
        self.flush();
        let polls = self.polls && timeout.is_some_and(|timeout| timeout.is_zero());
        let timeout = if self.ready.is_empty() { timeout } else { Some(Duration::ZERO) };
        let mut found = std::mem::take(&mut self.found);
        let result = self.inner.wait(timeout, &mut found);
        for completion in found.drain(..) {
            self.translate(completion, out);
        }
        self.found = found;
        if polls {
            let keys: Vec<u64> = self.links.keys().copied().collect();
            for key in keys {
                self.with_stream(key, |stream| stream.poll(false));
            }
        }
        out.extend(self.ready.drain(..));
        result
    }

    fn wake_fd(&self) -> RawFd {
        self.inner.wake_fd()
    }
}

impl Drop for VerbsDriver {
    /// The links go before the inner driver, which may still receive into their last bytes.
    fn drop(&mut self) {
        if !self.links.is_empty() {
            // Leaks them if the kernel does not let go.
            let _ = self.quiesce(DRAIN);
        }
    }
}
