//! A byte stream over a queue pair, with the semantics of a socket: one receive and one send at a time, short counts
//! are normal.
//!
//! Short pieces are copied into messages. Longer ones are *offered*: the message carries their address, the receiver
//! reads them straight into the memory of its receive, and the send ends when the receiver reports that it has
//! finished. Messages with data need a credit; each side reserves two more buffers for messages without data (credits,
//! ends of reads), so that these always get through. `docs/verbs.md` has the rules.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use super::abi::WC_SUCCESS;
use super::buffers::Slots;
use super::error::VerbsError;
use super::ledger::{Due, Ledger};
use super::ops::{Item, Reading, ReceiveOp, SendOp};
use super::queue::{CompletionChannel, Done, QueuePair};
use super::registrations::{Purpose, Registrations};
use super::stats::VerbsStats;
use super::wire::{Endpoint, Head, Offer};
use crate::reactor::driver::IoPart;
use crate::transport::verbs::VerbsConfig;

const SLOT: usize = 16 << 10;
/// Buffers for messages without data: news, and the confirmation of news.
const RESERVE: usize = 2;
/// One in this many messages requests a completion, which covers those before it.
const SIGNAL_EACH: u32 = 4;
/// Pieces shorter than this are read into a buffer and copied: registering memory would cost more.
const BOUNCE_BELOW: usize = 4 << 10;
const BOUNCE: usize = 64 << 10;
/// Longest single READ, whatever the device allows.
const MAX_READ: u64 = 1 << 30;
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
        let wanted = (config.buffer_bytes / SLOT as u64).clamp(4, 4000) as usize;
        let pair = QueuePair::new(channel, config, (wanted + RESERVE) as u32, key)?;
        let slots = (pair.max_receives as usize).saturating_sub(RESERVE).min(wanted);
        let incoming = Slots::new(&pair.domain, slots + RESERVE, SLOT)?;
        // A third of the queue for messages, the rest for READs.
        let messages = slots.min(pair.max_sends as usize / 3);
        let outgoing = Slots::new(&pair.domain, messages + RESERVE + SIGNAL_EACH as usize, SLOT)?;
        let bounce = Slots::new(&pair.domain, 1, BOUNCE)?;
        for slot in 0..incoming.count() {
            // SAFETY: the slot is in the region of the key and is not accessed until its completion.
            unsafe { pair.receive(RECEIVE | slot as u64, incoming.pointer(slot), SLOT as u32, incoming.key())? };
        }
        let endpoint = pair.endpoint(slots as u16, SLOT as u32);
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

    pub fn stats(&self) -> VerbsStats {
        self.stats
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

    /// A message has arrived in a slot.
    fn arrived(&mut self, slot: usize, len: usize) -> Result<(), VerbsError> {
        if slot >= self.incoming.count() || len > SLOT {
            return Err(VerbsError::Peer("an unsolicited message"));
        }
        self.stats.messages_received += 1;
        // SAFETY: the device has completed the receive into this slot, and it is not posted now.
        let message = unsafe { self.incoming.bytes(slot, len) };
        let head = Head::decode(message).map_err(VerbsError::Peer)?;
        let start = Head::LEN + head.bytes as usize;
        let mut offers = Vec::with_capacity(usize::from(head.offers));
        for bytes in message[start..].chunks_exact(Offer::LEN) {
            let bytes = bytes.first_chunk().ok_or(VerbsError::Peer("a truncated offer"))?;
            offers.push(Offer::decode(bytes).map_err(VerbsError::Peer)?);
        }
        let finished = self.ledger.hear(&head)? as usize;
        if let Some(send) = &mut self.send {
            send.offers.drain(..finished.min(send.offers.len()));
        }
        if !head.is_data {
            return self.repost(slot);
        }
        if head.bytes == 0 {
            self.ledger.worked_off();
            self.repost(slot)?;
        } else {
            self.items.push_back(Item::Bytes { slot, range: Head::LEN..start });
        }
        self.items.extend(offers.into_iter().map(Item::Offer));
        Ok(())
    }

    fn repost(&mut self, slot: usize) -> Result<(), VerbsError> {
        let Some(pair) = &self.pair else { return Ok(()) };
        // SAFETY: the slot is in the region of the key; its content was processed.
        unsafe { pair.receive(RECEIVE | slot as u64, self.incoming.pointer(slot), SLOT as u32, self.incoming.key()) }
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

    fn go_on_receiving(&mut self) -> Result<(), VerbsError> {
        loop {
            let Some(op) = self.receive.as_mut() else { return Ok(()) };
            if op.read.is_some() {
                if self.ended {
                    self.stop_reading();
                }
                return Ok(());
            }
            let is_full = op.part == op.parts.len();
            match self.items.front_mut() {
                Some(Item::Bytes { slot, range }) if range.start >= range.end => {
                    let slot = *slot;
                    self.items.pop_front();
                    self.ledger.worked_off();
                    self.repost(slot)?;
                }
                Some(Item::Bytes { slot, range }) if !is_full => {
                    let part = op.parts[op.part];
                    let len = range.len().min(part.len - op.offset);
                    // SAFETY: the slot holds a received message and is not posted; the caller of `start_receive` keeps
                    // the part writable, and it cannot overlap with a slot, which this stream owns.
                    unsafe {
                        let from = self.incoming.pointer(*slot).add(range.start);
                        std::ptr::copy_nonoverlapping(from, part.ptr.add(op.offset), len);
                    }
                    range.start += len;
                    op.advance(len);
                    op.filled += len;
                    self.stats.copied += len as u64;
                }
                Some(Item::Offer(_)) if op.filled == 0 && !self.ended && self.pair.is_some() => {
                    return self.start_reading();
                }
                // There is an offer, but the peer or the queue pair to read it is gone.
                Some(Item::Offer(_)) | None if op.filled == 0 => {
                    if self.ended {
                        self.receive = None;
                        self.received = Some(Ok(0));
                    }
                    return Ok(());
                }
                _ => {
                    self.received = Some(Ok(op.filled));
                    self.receive = None;
                    return Ok(());
                }
            }
        }
    }

    /// Ends a receive whose READ will not be answered. The device's retries would notice only after a while, and on
    /// some devices never.
    fn stop_reading(&mut self) {
        // Before the receive: afterwards the device does not access its memory.
        self.pair = None;
        self.receive = None;
        self.received = Some(Ok(0));
    }

    /// Requests that fit into the send queue beside those that messages may need.
    fn room_for_reads(&self) -> usize {
        let Some(pair) = &self.pair else { return 0 };
        (pair.max_sends as usize).saturating_sub(self.outgoing.count() + 1)
    }

    /// Reads the offers at the front into the parts of the receive.
    fn start_reading(&mut self) -> Result<(), VerbsError> {
        let most = self.room_for_reads().saturating_sub(self.posted.len());
        let Self { pair: Some(pair), receive: Some(op), items, registrations, stats, .. } = self else { return Ok(()) };
        if most == 0 {
            return Ok(());
        }
        let longest = u64::from(pair.max_message()).min(MAX_READ);
        let mut plan: Vec<(u64, *mut u8, u32, u32, u32)> = Vec::new();
        let mut reading = Reading { last: 0, bytes: 0, finished_offers: 0, bounced: false, leases: Vec::new() };
        while plan.len() < most && !reading.bounced {
            let Some(Item::Offer(offer)) = items.front_mut() else { break };
            let Some(part) = op.parts.get(op.part) else { break };
            let rest = part.len - op.offset;
            let len = offer.len.min(rest as u64);
            // SAFETY: inside the part.
            let to = unsafe { part.ptr.add(op.offset) };
            let is_short = usize::try_from(len).is_ok_and(|len| len < BOUNCE_BELOW);
            let lease = if is_short {
                None
            } else {
                let size = usize::try_from(len).unwrap_or(rest);
                // SAFETY: the part is valid until the receive is over, and its leases are dropped before that.
                unsafe { registrations.lease(to, size, Purpose::Fill, stats) }.ok()
            };
            let (to, key, len) = match &lease {
                Some(lease) => (to, lease.local_key(), len),
                // The bounce buffer holds one piece at a time.
                None if plan.is_empty() => {
                    stats.registration_failures += u64::from(!is_short);
                    reading.bounced = true;
                    (self.bounce.pointer(0), self.bounce.key(), len.min(BOUNCE as u64))
                }
                None => break,
            };
            let mut at = 0;
            while at < len && plan.len() < most {
                let piece = (len - at).min(longest);
                // SAFETY: inside the piece.
                let to = unsafe { to.add(at as usize) };
                plan.push((offer.addr + at, to, piece as u32, key, offer.rkey));
                at += piece;
            }
            reading.leases.extend(lease);
            let moved = at as usize;
            reading.bytes += moved;
            offer.addr += at;
            offer.len -= at;
            if offer.len == 0 {
                items.pop_front();
                reading.finished_offers += 1;
            }
            if !reading.bounced {
                op.advance(moved);
            }
        }
        let count = plan.len();
        for (index, (from, to, len, key, rkey)) in plan.into_iter().enumerate() {
            let id = self.next_request;
            let is_last = index + 1 == count;
            // SAFETY: registered above and valid until the receive is over; a failure drops the queue pair first.
            unsafe { pair.read(id, to, len, key, (from, rkey), is_last)? };
            self.next_request += 1;
            self.posted.push_back((id, None));
            reading.last = id;
            self.unsignaled = 0;
        }
        self.stats.reads += count as u64;
        op.read = Some(reading);
        Ok(())
    }

    /// The request with this number is done; if it was the last READ of the receive, its bytes have arrived.
    fn read_completed(&mut self, id: u64) {
        let Some(op) = &mut self.receive else { return };
        let Some(reading) = op.read.take_if(|reading| reading.last == id) else { return };
        self.ledger.read_offers(reading.finished_offers);
        if reading.bounced {
            let part = op.parts[op.part];
            // SAFETY: the device has filled the bounce buffer and is done with it; the READ was limited to the room in
            // the part.
            unsafe {
                std::ptr::copy_nonoverlapping(self.bounce.pointer(0), part.ptr.add(op.offset), reading.bytes);
            }
            op.advance(reading.bytes);
            self.stats.bounced += reading.bytes as u64;
        } else {
            self.stats.read_bytes += reading.bytes as u64;
        }
        op.filled += reading.bytes;
        self.received = Some(Ok(op.filled));
        self.receive = None;
    }

    fn go_on_sending(&mut self) -> Result<(), VerbsError> {
        while self.send.as_ref().is_some_and(|op| op.part < op.parts.len()) && self.may_send_data() {
            self.send_data()?;
        }
        if let Some(op) = self.send.as_ref().filter(|op| op.part == op.parts.len() && op.offers.is_empty()) {
            self.sent = Some(Ok(op.taken));
            self.send = None;
        }
        Ok(())
    }

    fn may_send_data(&self) -> bool {
        let Some(peer) = &self.peer else { return false };
        self.pair.is_some()
            && self.ledger.has_credit(peer.slots)
            && self.free.len() > RESERVE
            && self.has_room_for_message()
    }

    fn has_room_for_message(&self) -> bool {
        self.pair.as_ref().is_some_and(|pair| self.posted.len() < pair.max_sends as usize)
    }

    /// Sends one message: bytes, then offers.
    fn send_data(&mut self) -> Result<(), VerbsError> {
        let Some(slot) = self.free.pop() else { return Ok(()) };
        let room = SLOT.min(self.peer.as_ref().map_or(0, |peer| peer.slot_bytes as usize));
        let Self { pair: Some(_), send: Some(op), outgoing, registrations, stats, .. } = self else { return Ok(()) };
        // SAFETY: the slot was free, so the device does not hold it and no other view of it exists.
        let buffer = unsafe { outgoing.bytes_mut(slot) };
        let mut at = Head::LEN;
        let mut offers = 0u16;
        while let Some(part) = op.parts.get(op.part) {
            let left = part.len - op.offset;
            let is_direct = op.offset == 0 && left as u64 >= self.config.direct_min && op.copy_part != Some(op.part);
            if is_direct {
                if at + Offer::LEN > room {
                    break;
                }
                // SAFETY: the part is valid until the send is over, and its offers are dropped before that.
                match unsafe { registrations.lease(part.ptr, part.len, Purpose::Offer, stats) } {
                    Ok(lease) => {
                        let offer = Offer { addr: part.ptr as u64, len: part.len as u64, rkey: lease.remote_key() };
                        if let Some(place) = buffer[at..].first_chunk_mut() {
                            offer.encode(place);
                        }
                        at += Offer::LEN;
                        offers += 1;
                        op.offers.push_back(lease);
                        op.taken += part.len;
                        op.part += 1;
                        stats.offered_bytes += offer.len;
                    }
                    Err(_) => {
                        stats.registration_failures += 1;
                        op.copy_part = Some(op.part);
                    }
                }
                continue;
            }
            if offers > 0 || at == room {
                break;
            }
            let len = left.min(room - at);
            // SAFETY: the caller of `start_send` keeps the part readable; the slot is ours and has room.
            unsafe { std::ptr::copy_nonoverlapping(part.ptr.add(op.offset), buffer[at..].as_mut_ptr(), len) };
            at += len;
            op.offset += len;
            op.taken += len;
            stats.copied += len as u64;
            if op.offset == part.len {
                op.part += 1;
                op.offset = 0;
            }
        }
        let bytes = (at - Head::LEN - usize::from(offers) * Offer::LEN) as u32;
        self.ledger.sent_data(offers);
        self.post(slot, at, Head { is_data: true, bytes, offers, ..Head::default() })
    }

    /// Completes the head and posts the message.
    fn post(&mut self, slot: usize, len: usize, head: Head) -> Result<(), VerbsError> {
        let Some(pair) = &self.pair else { return Ok(()) };
        let head = self.ledger.tell(head);
        // SAFETY: the slot is ours until it is posted below.
        if let Some(place) = unsafe { self.outgoing.bytes_mut(slot) }.first_chunk_mut() {
            head.encode(place);
        }
        self.unsignaled += 1;
        let signaled = self.unsignaled >= SIGNAL_EACH || !head.is_data;
        let id = self.next_request;
        let len = len as u32;
        // SAFETY: the slot lies in the region of the key, and returns to `free` only when the request is done.
        unsafe { pair.send(id, self.outgoing.pointer(slot), len, self.outgoing.key(), signaled)? };
        if signaled {
            self.unsignaled = 0;
        }
        self.next_request += 1;
        self.posted.push_back((id, Some(slot)));
        self.stats.messages_sent += 1;
        Ok(())
    }

    /// Sends the peer the counters that it waits for, unless a message with data has carried them. To be called at the
    /// end of each round.
    pub fn flush(&mut self) {
        if self.ended && self.send.is_some() && !self.is_receiving() {
            // The peer will not take it, and no receive is waiting that would report the end of the stream.
            return self.fail(&VerbsError::Gone);
        }
        if self.pair.is_none() || self.peer.is_none() || !self.has_room_for_message() {
            return;
        }
        // The completion of news covers the messages before it, too.
        let last_news = self.finishing && self.unsignaled > 0 && self.ledger.may_tell_news();
        let due = self.ledger.due(self.endpoint.slots).or(last_news.then_some(Due::News));
        let Some(due) = due else { return };
        let Some(slot) = self.free.pop() else { return };
        let is_news = due == Due::News;
        if let Err(error) = self.post(slot, Head::LEN, Head { is_news, ..Head::default() }) {
            self.fail(&error);
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Before the regions and buffers: afterwards the device uses none of them.
        self.pair = None;
    }
}
