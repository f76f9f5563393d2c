//! The receiving half: messages that arrive, and offers that are read.

use super::{BOUNCE, RECEIVE, SLOT, SLOT_BYTES, Stream};
use crate::transport::verbs::error::VerbsError;
use crate::transport::verbs::ops::{Item, Reading};
use crate::transport::verbs::registrations::Purpose;
use crate::transport::verbs::wire::{Head, Offer};

/// Pieces shorter than this are read into a buffer and copied: registering memory would cost more.
const BOUNCE_BELOW: usize = 4 << 10;
/// Longest single READ, whatever the device allows.
const MAX_READ: u32 = 1 << 30;
/// Offers that wait to be read. An honest peer has one send under way, whose parts are about half as many.
const MAX_WAITING: usize = 2048;

impl Stream {
    /// A message has arrived in a slot.
    pub(super) fn arrived(&mut self, slot: usize, len: usize) -> Result<(), VerbsError> {
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
        // Each message with bytes occupies a slot.
        if self.items.len() + offers.len() > MAX_WAITING + self.incoming.count() {
            return Err(VerbsError::Peer("it offers more than one send has"));
        }
        self.items.extend(offers.into_iter().map(Item::Offer));
        Ok(())
    }

    fn repost(&mut self, slot: usize) -> Result<(), VerbsError> {
        let Some(pair) = &self.pair else { return Ok(()) };
        // SAFETY: the slot is in the region of the key; its content was processed.
        unsafe { pair.receive(RECEIVE | slot as u64, self.incoming.pointer(slot), SLOT_BYTES, self.incoming.key()) }
    }

    pub(super) fn go_on_receiving(&mut self) -> Result<(), VerbsError> {
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
    pub(super) fn stop_reading(&mut self) {
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
        let longest = pair.max_message().min(MAX_READ);
        let mut plan: Vec<(u64, *mut u8, u32, u32, u32)> = Vec::new();
        let mut reading = Reading { last: 0, bytes: 0, finished_offers: 0, bounced: false, leases: Vec::new() };
        while plan.len() < most && !reading.bounced {
            let Some(Item::Offer(offer)) = items.front_mut() else { break };
            let Some(part) = op.parts.get(op.part) else { break };
            let rest = part.len - op.offset;
            let len = usize::try_from(offer.len).map_or(rest, |len| len.min(rest));
            // SAFETY: inside the part.
            let to = unsafe { part.ptr.add(op.offset) };
            let is_short = len < BOUNCE_BELOW;
            let lease = if is_short {
                None
            } else {
                // SAFETY: the part is valid until the receive is over, and its leases are dropped before that.
                unsafe { registrations.lease(to, len, Purpose::Fill, stats) }.ok()
            };
            let (to, key, len) = match &lease {
                Some(lease) => (to, lease.local_key(), len),
                // The bounce buffer holds one piece at a time.
                None if plan.is_empty() => {
                    stats.registration_failures += u64::from(!is_short);
                    reading.bounced = true;
                    (self.bounce.pointer(0), self.bounce.key(), len.min(BOUNCE))
                }
                None => break,
            };
            let mut at = 0;
            while at < len && plan.len() < most {
                let piece = u32::try_from(len - at).map_or(longest, |left| left.min(longest));
                // SAFETY: inside the piece.
                let to = unsafe { to.add(at) };
                plan.push((offer.addr + at as u64, to, piece, key, offer.rkey));
                at += piece as usize;
            }
            reading.leases.extend(lease);
            reading.bytes += at;
            offer.addr += at as u64;
            offer.len -= at as u64;
            if offer.len == 0 {
                items.pop_front();
                reading.finished_offers += 1;
            }
            if !reading.bounced {
                op.advance(at);
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
    pub(super) fn read_completed(&mut self, id: u64) {
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
}
