//! Appends frames to a control section that is a multiple of 8 long, and keeps it so.

use super::{BULK_BIT, FLAG_ABORT, FLAG_FORGET, FLAG_LOOP, FRAME_HEADER, PartLayout, RecvFrame, Witness, kind, pad8};
use crate::limits::{CHALLENGE, MAX_REASON};
use crate::owner::Payload;

fn head(out: &mut Vec<u8>, kind: u8, flags: u8, code: u16, meta_len: usize, id: u64) {
    let mut bytes = [0u8; FRAME_HEADER];
    bytes[0] = kind;
    bytes[1] = flags;
    bytes[2..4].copy_from_slice(&code.to_le_bytes());
    let meta_len = u32::try_from(meta_len).expect("callers keep metadata below MAX_META");
    bytes[4..8].copy_from_slice(&meta_len.to_le_bytes());
    bytes[8..16].copy_from_slice(&id.to_le_bytes());
    out.extend_from_slice(&bytes);
}

fn padded(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(bytes);
    out.resize(pad8(out.len()), 0);
}

pub fn hello(out: &mut Vec<u8>, features: u64, fields: &[u8]) {
    head(out, kind::HELLO, 0, 0, fields.len(), features);
    padded(out, fields);
}

pub fn welcome(out: &mut Vec<u8>, features: u64, fields: &[u8]) {
    head(out, kind::WELCOME, 0, 0, fields.len(), features);
    padded(out, fields);
}

pub fn challenge(out: &mut Vec<u8>, random: &[u8; CHALLENGE]) {
    head(out, kind::CHALLENGE, 0, 0, random.len(), 0);
    padded(out, random);
}

pub fn refuse(out: &mut Vec<u8>, code: i32, reason: &str) {
    let reason = cut(reason, MAX_REASON);
    head(out, kind::REFUSE, 0, wire_code(code), reason.len(), 0);
    padded(out, reason.as_bytes());
}

/// `code` 0: `meta` is an endpoint; otherwise it is the reason, cut to its limit.
pub fn migrate(out: &mut Vec<u8>, code: i32, meta: &[u8]) {
    let meta = &meta[..meta.len().min(MAX_REASON)];
    head(out, kind::MOVE, 0, if code == 0 { 0 } else { wire_code(code) }, meta.len(), 0);
    padded(out, meta);
}

pub fn goodbye(out: &mut Vec<u8>, reason: &str) {
    let reason = cut(reason, MAX_REASON);
    head(out, kind::GOODBYE, 0, 0, reason.len(), 0);
    padded(out, reason.as_bytes());
}

pub fn key(out: &mut Vec<u8>, key: u64, forget: bool, prefix: &[u8]) {
    head(out, kind::KEY, if forget { FLAG_FORGET } else { 0 }, 0, prefix.len(), key);
    padded(out, prefix);
}

pub fn recv(out: &mut Vec<u8>, recv: &RecvFrame) {
    let RecvFrame { id, step, key, frame, iter } = *recv;
    let mut bytes = [0u8; 48];
    bytes[0] = kind::RECV;
    bytes[8..16].copy_from_slice(&id.to_le_bytes());
    bytes[16..24].copy_from_slice(&step.to_le_bytes());
    bytes[24..32].copy_from_slice(&key.to_le_bytes());
    if frame == 0 && iter == 0 {
        out.extend_from_slice(&bytes[..32]);
    } else {
        bytes[1] = FLAG_LOOP;
        bytes[32..40].copy_from_slice(&frame.to_le_bytes());
        bytes[40..48].copy_from_slice(&iter.to_le_bytes());
        out.extend_from_slice(&bytes);
    }
}

pub fn cancel(out: &mut Vec<u8>, id: u64, code: i32) {
    head(out, kind::CANCEL, 0, wire_code(code), 0, id);
}

/// Length of a LEND frame.
pub fn lend_len(pieces: usize) -> usize {
    FRAME_HEADER + 16 + 16 * pieces
}

pub fn lend(out: &mut Vec<u8>, witness: Witness, pieces: &[(u64, u64)]) {
    head(out, kind::LEND, 0, 0, 0, witness.value);
    out.extend_from_slice(&witness.address.to_le_bytes());
    out.extend_from_slice(&(pieces.len() as u64).to_le_bytes());
    for (address, len) in pieces {
        out.extend_from_slice(&address.to_le_bytes());
        out.extend_from_slice(&len.to_le_bytes());
    }
}

pub fn taken(out: &mut Vec<u8>, blocks: u64) {
    head(out, kind::TAKEN, 0, 0, 0, blocks);
}

pub fn data(out: &mut Vec<u8>, id: u64, len: u64) {
    head(out, kind::DATA, if len == 0 { FLAG_ABORT } else { 0 }, 0, 0, id);
    out.extend_from_slice(&len.to_le_bytes());
}

pub fn ping(out: &mut Vec<u8>, nonce: u64) {
    head(out, kind::PING, 0, 0, 0, nonce);
}

pub fn pong(out: &mut Vec<u8>, nonce: u64) {
    head(out, kind::PONG, 0, 0, 0, nonce);
}

pub fn call<P: Payload>(out: &mut Vec<u8>, id: u64, method: u16, deadline_ms: u32, meta: &[u8], payload: Option<&P>) {
    head(out, kind::CALL, 0, method, meta.len(), id);
    out.extend_from_slice(&deadline_ms.to_le_bytes());
    append_payload(out, payload, meta, false);
}

pub fn reply<P: Payload>(out: &mut Vec<u8>, id: u64, code: i32, meta: &[u8], payload: Option<&P>) {
    let code = if code == 0 { 0 } else { wire_code(code) };
    head(out, kind::REPLY, 0, code, meta.len(), id);
    append_payload(out, payload, meta, true);
}

/// Part count (and reserved bits), part lengths, metadata, inline parts.
fn append_payload<P: Payload>(out: &mut Vec<u8>, payload: Option<&P>, meta: &[u8], reserved: bool) {
    let count = payload.map_or(0, Payload::part_count);
    out.extend_from_slice(&u32::try_from(count).expect("callers keep the parts below MAX_PARTS").to_le_bytes());
    if reserved {
        out.extend_from_slice(&[0; 4]);
    }
    let Some(payload) = payload else { return padded(out, meta) };
    let mut layout = PartLayout::default();
    for part in 0..count {
        let len = payload.part_len(part);
        let word = if layout.is_bulk(len) { len | BULK_BIT } else { len };
        out.extend_from_slice(&word.to_le_bytes());
    }
    padded(out, meta);
    let mut layout = PartLayout::default();
    for part in 0..count {
        if let Some(len) = layout.inline(payload.part_len(part)) {
            let end = out.len() + len;
            payload.copy_part(part, out);
            debug_assert_eq!(out.len(), end, "a payload copied a length other than it announced");
            // The frame stays well-formed in any case.
            out.resize(end, 0);
            out.resize(pad8(end), 0);
        }
    }
}

/// At most `max` bytes of a text, cut between characters.
pub fn cut(text: &str, max: usize) -> &str {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Status codes are small positive numbers; anything else is an error of the caller and becomes Unknown.
fn wire_code(code: i32) -> u16 {
    u16::try_from(code).ok().filter(|&code| code != 0).unwrap_or(2)
}
