//! The messages between two queue pairs: their addresses (over the connection that both already trust), and the heads
//! of their messages.

use super::abi::Gid;

/// Address and capacity of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub gid: Gid,
    pub lid: u16,
    pub is_global: bool,
    pub number: u32,
    /// Of the first packet that it sends. Random, so that packets of an earlier queue pair are rejected.
    pub psn: u32,
    /// As `enum ibv_mtu`.
    pub mtu: u8,
    /// The number of READs that it serves at once.
    pub reads: u8,
    /// Buffers for messages with data, and their size.
    pub slots: u16,
    pub slot_bytes: u32,
}

const VERSION: u8 = 1;

impl Endpoint {
    pub const LEN: usize = 40;

    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0] = VERSION;
        out[1] = u8::from(self.is_global);
        out[2..4].copy_from_slice(&self.lid.to_le_bytes());
        out[4..20].copy_from_slice(&self.gid);
        out[20..24].copy_from_slice(&self.number.to_le_bytes());
        out[24..28].copy_from_slice(&self.psn.to_le_bytes());
        out[28] = self.mtu;
        out[29] = self.reads;
        out[30..32].copy_from_slice(&self.slots.to_le_bytes());
        out[32..36].copy_from_slice(&self.slot_bytes.to_le_bytes());
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Endpoint, &'static str> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().map_err(|_| "it has the wrong length")?;
        if bytes[0] != VERSION {
            return Err("it has another version: use the same starwire release on all tasks");
        }
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[4..20]);
        let found = Endpoint {
            gid,
            lid: half(2),
            is_global: bytes[1] & 1 != 0,
            number: word(20),
            psn: word(24),
            mtu: bytes[28],
            reads: bytes[29],
            slots: half(30),
            slot_bytes: word(32),
        };
        let fits = found.number < 1 << 24
            && found.psn < 1 << 24
            && (1..=5).contains(&found.mtu)
            && found.reads > 0
            && (2..=4096).contains(&found.slots)
            && (1024..=1 << 20).contains(&found.slot_bytes);
        if fits { Ok(found) } else { Err("it has a number out of range") }
    }
}

/// Precedes every message. All counters count from the start of the connection and wrap around.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// It occupies one of the receiver's data buffers; else a reserved one.
    pub is_data: bool,
    /// Carries no data, and is to be confirmed.
    pub is_news: bool,
    /// Bytes of the stream that follow the head …
    pub bytes: u32,
    /// … and offers that follow those: they come next in the stream.
    pub offers: u16,
    /// Data messages that the sender of this one has processed.
    pub credits: u32,
    /// Offers that it has read.
    pub done: u32,
    /// News that it has seen.
    pub confirmed: u32,
}

impl Head {
    pub const LEN: usize = 24;

    pub fn encode(&self, out: &mut [u8; Self::LEN]) {
        out[0] = VERSION;
        out[1] = u8::from(self.is_data) | u8::from(self.is_news) << 1;
        out[2..4].copy_from_slice(&self.offers.to_le_bytes());
        out[4..8].copy_from_slice(&self.bytes.to_le_bytes());
        out[8..12].copy_from_slice(&self.credits.to_le_bytes());
        out[12..16].copy_from_slice(&self.done.to_le_bytes());
        out[16..20].copy_from_slice(&self.confirmed.to_le_bytes());
        out[20..24].fill(0);
    }

    /// Checks the head against the message's length.
    pub fn decode(message: &[u8]) -> Result<Head, &'static str> {
        let bytes = message.first_chunk::<{ Self::LEN }>().ok_or("a message without a header")?;
        if bytes[0] != VERSION || bytes[1] > 2 || bytes[20..24] != [0; 4] {
            return Err("a message with an unknown header");
        }
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let head = Head {
            is_data: bytes[1] & 1 != 0,
            is_news: bytes[1] & 2 != 0,
            offers: u16::from_le_bytes([bytes[2], bytes[3]]),
            bytes: word(4),
            credits: word(8),
            done: word(12),
            confirmed: word(16),
        };
        let content = head.bytes as usize + usize::from(head.offers) * Offer::LEN;
        if message.len() - Self::LEN != content {
            return Err("a message whose length does not match its header");
        }
        if !head.is_data && content != 0 {
            return Err("data in a message that carries none");
        }
        Ok(head)
    }
}

/// Bytes of the stream that the receiver reads from the sender's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    pub addr: u64,
    pub len: u64,
    pub rkey: u32,
}

impl Offer {
    pub const LEN: usize = 20;

    pub fn encode(&self, out: &mut [u8; Self::LEN]) {
        out[0..8].copy_from_slice(&self.addr.to_le_bytes());
        out[8..16].copy_from_slice(&self.len.to_le_bytes());
        out[16..20].copy_from_slice(&self.rkey.to_le_bytes());
    }

    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Offer, &'static str> {
        let double = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let rkey = u32::from_le_bytes([bytes[16], bytes[17], bytes[18], bytes[19]]);
        let offer = Offer { addr: double(0), len: double(8), rkey };
        if offer.len == 0 || offer.addr.checked_add(offer.len).is_none() {
            return Err("an offer of zero bytes, or beyond the address space");
        }
        Ok(offer)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn endpoint() -> Endpoint {
        Endpoint {
            gid: *b"0123456789abcdef",
            lid: 7,
            is_global: true,
            number: 0xabcdef,
            psn: 0x123456,
            mtu: 5,
            reads: 16,
            slots: 32,
            slot_bytes: 16384,
        }
    }

    #[test]
    fn endpoints_survive_a_round_trip() {
        assert_eq!(Endpoint::decode(&endpoint().encode()), Ok(endpoint()));
        for (at, value) in [(0, 2), (23, 1), (27, 1), (28, 6), (28, 0), (29, 0), (30, 1)] {
            let mut bytes = endpoint().encode();
            bytes[at] = value;
            if at == 30 {
                bytes[31] = 0;
            }
            assert!(Endpoint::decode(&bytes).is_err(), "byte {at} = {value}");
        }
        assert!(Endpoint::decode(&[0; 39]).is_err());
    }

    #[test]
    fn a_head_must_fit_its_message() {
        let head =
            Head { is_data: true, bytes: 3, offers: 1, credits: 9, done: u32::MAX, confirmed: 1, is_news: false };
        let mut message = vec![0; Head::LEN + 3 + Offer::LEN];
        head.encode(message.first_chunk_mut().unwrap());
        assert_eq!(Head::decode(&message), Ok(head));
        message.push(0);
        assert!(Head::decode(&message).is_err());
        assert!(Head::decode(&message[..Head::LEN - 1]).is_err());
        let mut control = vec![0; Head::LEN + 1];
        Head { bytes: 1, ..Head::default() }.encode(control.first_chunk_mut().unwrap());
        assert!(Head::decode(&control).is_err(), "data needs a place for data");
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Head::decode(&bytes);
            let _ = Endpoint::decode(&bytes);
            if let Some(bytes) = bytes.first_chunk() {
                let _ = Offer::decode(bytes);
            }
        }
    }
}
