//! The sending half: messages with bytes and offers, and those that only report.

use super::{RESERVE, SIGNAL_EACH, SLOT, Stream};
use crate::transport::verbs::error::VerbsError;
use crate::transport::verbs::ledger::Due;
use crate::transport::verbs::registrations::Purpose;
use crate::transport::verbs::wire::{Head, Offer};

impl Stream {
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

    pub(super) fn go_on_sending(&mut self) -> Result<(), VerbsError> {
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
            && self.free.len() > usize::from(RESERVE)
            && self.has_room_for_message()
    }

    pub(super) fn has_room_for_message(&self) -> bool {
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
        let bytes = slot_bytes(at - Head::LEN - usize::from(offers) * Offer::LEN);
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
        let len = slot_bytes(len);
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
}

fn slot_bytes(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("a slot has SLOT_BYTES")
}
