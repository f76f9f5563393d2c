//! A byte stream over a queue pair, with the semantics of a socket: one receive and one send at a time, short counts
//! are normal.
//!
//! Short pieces are copied into messages. Longer ones are *offered*: the message carries their address, the receiver
//! reads them straight into the memory of its receive, and the send ends when the receiver reports that it has
//! finished. Messages with data need a credit; each side reserves two more buffers for messages without data (credits,
//! ends of reads), so that these always get through. `docs/verbs.md` has the rules.

mod receiving;
mod sending;

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use super::abi::WC_SUCCESS;
use super::buffers::Slots;
use super::error::VerbsError;
use super::ledger::Ledger;
use super::ops::{Item, ReceiveOp, SendOp};
use super::queue::{CompletionChannel, Done, QueuePair};
use super::registrations::Registrations;
use super::stats::VerbsStats;
use super::wire::Endpoint;
use crate::transport::IoPart;
use crate::transport::verbs::VerbsConfig;

const SLOT_BYTES: u32 = 16 << 10;
const SLOT: usize = SLOT_BYTES as usize;
/// Buffers for messages without data: news, and the confirmation of news.
const RESERVE: u16 = 2;
/// One in this many messages requests a completion, which covers those before it.
const SIGNAL_EACH: u32 = 4;
const BOUNCE: usize = 64 << 10;
/// Bit in a work request's id: it is a receive; the rest is its slot.
const RECEIVE: u64 = 1 << 63;

pub struct Stream {
    /// `None` after a failure: the device no longer accesses any memory.
    pair: Option<QueuePair>,
    config: Rc<VerbsConfig>,
    incoming: Slots,
    outgoing: Slots,
    bounce: Slots,
    registrations: Registrations,
    endpoint: Endpoint,
    peer: Option<Endpoint>,

    free: Vec<usize>,
    /// Send and READ requests that the device holds, by number, and the slot that each uses.
    posted: VecDeque<(u64, Option<usize>)>,
    next_request: u64,
    unsignaled: u32,
    ledger: Ledger,

    items: VecDeque<Item>,
    receive: Option<ReceiveOp>,
    send: Option<SendOp>,
    received: Option<io::Result<usize>>,
    sent: Option<io::Result<usize>>,
    ended: bool,
    /// Nothing more will be sent.
    finishing: bool,
    failure: Option<String>,
    done: Vec<Done>,
    stats: VerbsStats,
}

impl Stream {
    /// With buffers posted, but not connected. `key` identifies it in the channel's events.
    pub fn new(channel: &Rc<CompletionChannel>, config: &Rc<VerbsConfig>, key: u64) -> Result<Self, VerbsError> {
        let wanted = (config.buffer_bytes / u64::from(SLOT_BYTES)).clamp(4, 4000) as u16;
        let pair = QueuePair::new(channel, config, u32::from(wanted + RESERVE), key)?;
        let most = pair.max_receives.saturating_sub(RESERVE.into());
        let slots = u16::try_from(most).map_or(wanted, |most| most.min(wanted));
        let incoming = Slots::new(&pair.domain, usize::from(slots + RESERVE), SLOT)?;
        // A third of the queue for messages, the rest for READs.
        let messages = usize::from(slots).min(pair.max_sends as usize / 3);
        let outgoing = Slots::new(&pair.domain, messages + usize::from(RESERVE) + SIGNAL_EACH as usize, SLOT)?;
        let bounce = Slots::new(&pair.domain, 1, BOUNCE)?;
        for slot in 0..incoming.count() {
            // SAFETY: the slot is in the region of the key and is not accessed until its completion.
            unsafe { pair.receive(RECEIVE | slot as u64, incoming.pointer(slot), SLOT_BYTES, incoming.key())? };
        }
        let endpoint = pair.endpoint(slots, SLOT_BYTES);
        Ok(Stream {
            free: (0..outgoing.count()).collect(),
            registrations: Registrations::new(&pair.domain),
            pair: Some(pair),
            config: config.clone(),
            incoming,
            outgoing,
            bounce,
            endpoint,
            peer: None,
            posted: VecDeque::new(),
            next_request: 0,
            unsignaled: 0,
            ledger: Ledger::default(),
            items: VecDeque::new(),
            receive: None,
            send: None,
            received: None,
            sent: None,
            ended: false,
            finishing: false,
            failure: None,
            done: Vec::new(),
            stats: VerbsStats::default(),
        })
    }

    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub fn connect(&mut self, peer: Endpoint) -> Result<(), VerbsError> {
        if let Some(pair) = &self.pair {
            pair.connect(&peer, &self.config)?;
        }
        self.peer = Some(peer);
        Ok(())
    }

    /// The statistics since the last call.
    pub fn take_stats(&mut self) -> VerbsStats {
        std::mem::take(&mut self.stats)
    }

    pub fn is_meant_by(&self, element: u64) -> bool {
        self.pair.as_ref().is_some_and(|pair| pair.is_meant_by(element))
    }

    /// Releases registrations that it keeps for later. True: there were some.
    pub fn make_room(&mut self) -> bool {
        self.registrations.make_room()
    }

    pub fn is_over(&self) -> bool {
        self.failure.is_some()
    }

    pub fn is_receiving(&self) -> bool {
        self.receive.is_some() || self.received.is_some()
    }

    pub fn is_sending(&self) -> bool {
        self.send.is_some() || self.sent.is_some()
    }

    /// # Safety
    /// As for `Driver::recv`, until the result is taken or the stream is dropped.
    pub unsafe fn start_receive(&mut self, parts: &[IoPart]) {
        let parts = parts.iter().filter(|part| part.len > 0).copied().collect();
        self.receive = Some(ReceiveOp { parts, part: 0, offset: 0, filled: 0, read: None });
        self.go_on();
    }

    /// # Safety
    /// As for `Driver::send`, until the result is taken or the stream is dropped.
    pub unsafe fn start_send(&mut self, parts: &[IoPart]) {
        let parts = parts.iter().filter(|part| part.len > 0).copied().collect();
        let offers = VecDeque::new();
        self.send = Some(SendOp { parts, part: 0, offset: 0, taken: 0, offers, copy_part: None });
        self.go_on();
    }

    pub fn take_received(&mut self) -> Option<io::Result<usize>> {
        self.received.take()
    }

    pub fn take_sent(&mut self) -> Option<io::Result<usize>> {
        self.sent.take()
    }

    /// The peer's socket has ended, and its queue pair with it: received data can still be read; nothing more will
    /// arrive or be answered.
    pub fn end(&mut self) {
        self.ended = true;
        self.go_on();
    }

    /// Nothing more will be sent: `is_delivered` reports when the peer's device has all of it. Only while no send is in
    /// flight.
    pub fn finish(&mut self) {
        self.finishing = true;
    }

    /// Everything sent before `finish` has arrived, or never will.
    pub fn is_delivered(&self) -> bool {
        self.finishing && (self.pair.is_none() || self.posted.is_empty())
    }

    /// Aborts everything. Afterwards the device accesses no memory of this stream or of its operations.
    pub fn fail(&mut self, error: &VerbsError) {
        self.failure.get_or_insert_with(|| error.to_string());
        self.give_up();
    }

    fn give_up(&mut self) {
        self.pair = None;
        let Some(failure) = &self.failure else { return };
        let error = || io::Error::other(failure.clone());
        if self.receive.take().is_some() {
            self.received = Some(Err(error()));
        }
        if self.send.take().is_some() {
            self.sent = Some(Err(error()));
        }
    }

    /// Processes the device's completions. `rearm`: an event was taken, so the next one must be requested.
    pub fn poll(&mut self, rearm: bool) {
        if let Err(error) = self.try_poll(rearm) {
            self.fail(&error);
        }
        self.go_on();
    }

    fn try_poll(&mut self, rearm: bool) -> Result<(), VerbsError> {
        if let Some(pair) = self.pair.as_ref().filter(|_| rearm) {
            // Before the queue is checked: later completions raise an event.
            pair.arm()?;
        }
        loop {
            let Some(pair) = &self.pair else { return Ok(()) };
            let mut done = std::mem::take(&mut self.done);
            done.clear();
            let found = pair.poll(&mut done)?;
            for one in &done {
                self.stats.completions += 1;
                self.completed(*one)?;
            }
            self.done = done;
            if !found {
                return Ok(());
            }
        }
    }

    fn completed(&mut self, done: Done) -> Result<(), VerbsError> {
        if done.status != WC_SUCCESS {
            let operation = match (done.id & RECEIVE != 0, self.is_read(done.id)) {
                (true, _) => "a receive",
                (false, true) => "reading from the peer's memory",
                (false, false) => "a send",
            };
            return Err(VerbsError::Completion { operation, status: done.status });
        }
        if done.id & RECEIVE != 0 {
            return self.arrived((done.id & !RECEIVE) as usize, done.bytes as usize);
        }
        // It covers all requests before it.
        while let Some(&(id, slot)) = self.posted.front().filter(|(id, _)| *id <= done.id) {
            self.posted.pop_front();
            self.free.extend(slot);
            self.read_completed(id);
        }
        Ok(())
    }

    fn is_read(&self, id: u64) -> bool {
        self.posted.iter().any(|(posted, slot)| *posted == id && slot.is_none())
    }

    /// Makes as much progress as possible.
    fn go_on(&mut self) {
        let result = self.go_on_receiving().and_then(|()| self.go_on_sending());
        if let Err(error) = result {
            self.fail(&error);
        } else if self.failure.is_some() {
            self.give_up();
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Before the regions and buffers: afterwards the device uses none of them.
        self.pair = None;
    }
}
