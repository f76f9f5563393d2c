//! Properties of the codec: what is put comes out again, and no bytes at all make it panic.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::limits::MAX_INLINE;
use crate::owner::Payload;

struct Lengths(Vec<u64>);

impl Lengths {
    fn byte(part: usize) -> u8 {
        part as u8 ^ 0x5a
    }
}

impl Payload for Lengths {
    fn part_count(&self) -> usize {
        self.0.len()
    }
    fn part_len(&self, part: usize) -> u64 {
        self.0[part]
    }
    fn copy_part(&self, part: usize, out: &mut Vec<u8>) {
        out.resize(out.len() + self.0[part] as usize, Lengths::byte(part));
    }
}

#[derive(Clone, Debug)]
enum Sent {
    Key { key: u64, forget: bool, prefix: Vec<u8> },
    Recv { id: u64, step: i64, key: u64, frame: u64, iter: u64 },
    Call { id: u64, method: u16, deadline_ms: u32, meta: Vec<u8>, lens: Option<Vec<u64>> },
    Reply { id: u64, code: i32, meta: Vec<u8>, lens: Option<Vec<u64>> },
    Data { id: u64, len: u64 },
    Cancel { id: u64, code: i32 },
    Lend { witness: Witness, pieces: Vec<(u64, u64)> },
    Taken { blocks: u64 },
    Move { code: i32, meta: Vec<u8> },
    Ping { nonce: u64 },
    Pong { nonce: u64 },
    Refuse { code: i32, reason: String },
    Goodbye { reason: String },
}

fn lens() -> impl Strategy<Value = Option<Vec<u64>>> {
    let len = prop_oneof![Just(0), 0..100u64, 8185..8200u64, 1..(1u64 << 40)];
    proptest::option::of(prop_oneof![vec(len, 0..20), Just(vec![8000; 150])])
}

fn sent() -> impl Strategy<Value = Sent> {
    let meta = || vec(any::<u8>(), 0..200);
    prop_oneof![
        (any::<u64>(), any::<bool>(), meta()).prop_map(|(key, forget, prefix)| Sent::Key { key, forget, prefix }),
        (any::<u64>(), any::<i64>(), any::<u64>(), 0..3u64, 0..3u64)
            .prop_map(|(id, step, key, frame, iter)| Sent::Recv { id, step, key, frame, iter }),
        (any::<u64>(), 1..u16::MAX, any::<u32>(), meta(), lens())
            .prop_map(|(id, method, deadline_ms, meta, lens)| Sent::Call { id, method, deadline_ms, meta, lens }),
        (any::<u64>(), 0..20i32, meta(), lens()).prop_map(|(id, code, meta, lens)| Sent::Reply {
            id,
            code,
            meta,
            lens
        }),
        (any::<u64>(), any::<u64>()).prop_map(|(id, len)| Sent::Data { id, len }),
        (any::<u64>(), 1..20i32).prop_map(|(id, code)| Sent::Cancel { id, code }),
        (any::<u64>(), any::<u64>(), vec(any::<(u64, u64)>(), 0..9))
            .prop_map(|(address, value, pieces)| Sent::Lend { witness: Witness { address, value }, pieces }),
        any::<u64>().prop_map(|blocks| Sent::Taken { blocks }),
        (0..20i32, vec(any::<u8>(), 0..2 * MAX_REASON)).prop_map(|(code, meta)| Sent::Move { code, meta }),
        any::<u64>().prop_map(|nonce| Sent::Ping { nonce }),
        any::<u64>().prop_map(|nonce| Sent::Pong { nonce }),
        (1..20i32, ".{0,400}").prop_map(|(code, reason)| Sent::Refuse { code, reason }),
        ".{0,400}".prop_map(|reason| Sent::Goodbye { reason }),
    ]
}

fn role() -> impl Strategy<Value = Role> {
    prop_oneof![Just(Role::Client), Just(Role::Server)]
}

/// Fewer than `max` frames that a side with this role may send.
fn section(max: usize) -> impl Strategy<Value = (Role, Vec<Sent>)> {
    (role(), vec(sent(), 0..max)).prop_map(|(role, mut all)| {
        all.retain(|sent| match sent {
            Sent::Key { .. } | Sent::Recv { .. } | Sent::Call { .. } | Sent::Cancel { .. } => role == Role::Client,
            Sent::Reply { .. } => role == Role::Server,
            _ => true,
        });
        (role, all)
    })
}

fn encode(sent: &Sent, out: &mut Vec<u8>) {
    let payload = |lens: &Option<Vec<u64>>| lens.clone().map(Lengths);
    match sent {
        Sent::Key { key, forget, prefix } => put::key(out, *key, *forget, prefix),
        Sent::Recv { id, step, key, frame, iter } => {
            put::recv(out, &RecvFrame { id: *id, step: *step, key: *key, frame: *frame, iter: *iter });
        }
        Sent::Call { id, method, deadline_ms, meta, lens } => {
            put::call(out, *id, *method, *deadline_ms, meta, payload(lens).as_ref());
        }
        Sent::Reply { id, code, meta, lens } => put::reply(out, *id, *code, meta, payload(lens).as_ref()),
        Sent::Data { id, len } => put::data(out, *id, *len),
        Sent::Cancel { id, code } => put::cancel(out, *id, *code),
        Sent::Lend { witness, pieces } => put::lend(out, *witness, pieces),
        Sent::Taken { blocks } => put::taken(out, *blocks),
        Sent::Move { code, meta } => put::migrate(out, *code, meta),
        Sent::Ping { nonce } => put::ping(out, *nonce),
        Sent::Pong { nonce } => put::pong(out, *nonce),
        Sent::Refuse { code, reason } => put::refuse(out, *code, reason),
        Sent::Goodbye { reason } => put::goodbye(out, reason),
    }
}

fn assert_parts(parts: Parts<'_>, lens: &Option<Vec<u64>>) {
    let lens = lens.clone().unwrap_or_default();
    assert_eq!(parts.count(), lens.len());
    assert_eq!(parts.total(), lens.iter().sum::<u64>());
    let mut layout = PartLayout::default();
    let mut bulk = 0;
    for (number, (part, len)) in parts.iter().zip(&lens).enumerate() {
        assert_eq!(part.len, *len);
        match part.inline {
            Some(bytes) => {
                assert!(!layout.is_bulk(*len));
                assert_eq!(bytes, vec![Lengths::byte(number); *len as usize]);
            }
            None => {
                assert!(layout.is_bulk(*len));
                bulk += len;
            }
        }
    }
    assert_eq!(parts.bulk(), bulk);
}

fn assert_same(frame: Frame<'_>, sent: &Sent) {
    match (frame, sent) {
        (Frame::Key { key, forget, prefix }, Sent::Key { key: k, forget: f, prefix: p }) => {
            assert_eq!((key, forget, prefix), (*k, *f, &p[..]));
        }
        (Frame::Recv(recv), Sent::Recv { id, step, key, frame, iter }) => {
            assert_eq!(recv, RecvFrame { id: *id, step: *step, key: *key, frame: *frame, iter: *iter });
        }
        (
            Frame::Call(CallFrame { id, method, deadline_ms, meta, parts }),
            Sent::Call { id: i, method: m, deadline_ms: d, meta: t, lens },
        ) => {
            assert_eq!((id, method, deadline_ms, meta), (*i, *m, *d, &t[..]));
            assert_parts(parts, lens);
        }
        (Frame::Reply(ReplyFrame { id, code, meta, parts }), Sent::Reply { id: i, code: c, meta: t, lens }) => {
            assert_eq!((id, code, meta), (*i, *c, &t[..]));
            assert_parts(parts, lens);
        }
        (Frame::Data { id, len, abort }, Sent::Data { id: i, len: l }) => {
            assert_eq!((id, len, abort), (*i, *l, *l == 0));
        }
        (Frame::Cancel { id, code }, Sent::Cancel { id: i, code: c }) => assert_eq!((id, code), (*i, *c)),
        (Frame::Lend { witness, pieces }, Sent::Lend { witness: w, pieces: p }) => {
            let bytes = p.iter().flat_map(|(address, len)| [address.to_le_bytes(), len.to_le_bytes()]);
            assert_eq!((witness, pieces), (*w, &bytes.flatten().collect::<Vec<_>>()[..]));
        }
        (Frame::Taken { blocks }, Sent::Taken { blocks: b }) => assert_eq!(blocks, *b),
        (Frame::Move { code, meta }, Sent::Move { code: c, meta: m }) => {
            assert_eq!((code, meta), (*c, &m[..m.len().min(MAX_REASON)]));
        }
        (Frame::Ping { nonce }, Sent::Ping { nonce: n }) | (Frame::Pong { nonce }, Sent::Pong { nonce: n }) => {
            assert_eq!(nonce, *n);
        }
        (Frame::Refuse { code, reason }, Sent::Refuse { code: c, reason: r }) => {
            assert_eq!(code, *c);
            assert!(r.as_bytes().starts_with(reason) && (reason.len() == r.len() || r.len() > MAX_REASON));
        }
        (Frame::Goodbye { reason }, Sent::Goodbye { reason: r }) => {
            assert!(r.as_bytes().starts_with(reason) && (reason.len() == r.len() || r.len() > MAX_REASON));
        }
        (frame, sent) => panic!("{frame:?} is not {sent:?}"),
    }
}

#[test]
fn a_loan_is_as_long_as_was_said() {
    for count in [1, 2, 5, 512] {
        let mut out = Vec::new();
        put::lend(&mut out, Witness { address: 1, value: 2 }, &vec![(3, 4); count]);
        assert_eq!(out.len(), put::lend_len(count));
    }
}

#[test]
fn each_kind_of_frame_has_its_senders() {
    for layout in LAYOUTS {
        let senders = [Role::Client, Role::Server].map(|role| layout.sender.includes(role));
        let expected = match layout.sender {
            Sender::Client => [true, false],
            Sender::Server => [false, true],
            Sender::Both => [true, true],
        };
        assert_eq!(senders, expected, "{}", layout.name);
    }
}

#[test]
fn what_is_wrong_with_a_head_is_said() {
    let why = |kind: u8, flags: u8, code: u8| {
        let mut section = vec![kind, flags, code];
        section.resize(24, 0);
        let mut frames = Frames::new(&section, Role::Client);
        let error = frames.next().unwrap_err();
        error.to_string()
    };
    assert_eq!(why(15, 1, 0), "malformed CANCEL frame: unknown flags");
    assert_eq!(why(20, 0, 5), "malformed PING frame: the code must be 0");
    assert_eq!(why(10, 1, 5), "malformed KEY frame: the code must be 0");
}

#[test]
fn inline_parts_have_a_limit_together() {
    let read = |lens: &[usize]| {
        // CALL with method 1; no metadata.
        let mut section = vec![12, 0, 1, 0];
        section.resize(20, 0);
        section.extend_from_slice(&(lens.len() as u32).to_le_bytes());
        lens.iter().for_each(|len| section.extend_from_slice(&(*len as u64).to_le_bytes()));
        section.resize(section.len() + lens.iter().map(|len| pad8(*len)).sum::<usize>(), 0);
        let mut frames = Frames::new(&section, Role::Client);
        let result = frames.next();
        result.map(|_| ()).map_err(|error| error.to_string())
    };
    for fits in [&[MAX_INLINE][..], &[MAX_INLINE - 7], &[MAX_INLINE - 8, 8], &[8, MAX_INLINE - 8, 0]] {
        assert_eq!(read(fits), Ok(()), "{fits:?}");
    }
    let too_long = Err("malformed CALL frame: its inline parts are too long".to_owned());
    for wrong in [&[MAX_INLINE + 8][..], &[MAX_INLINE + 1], &[MAX_INLINE, 1], &[8, MAX_INLINE - 7]] {
        assert_eq!(read(wrong), too_long, "{wrong:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn frames_come_out_as_they_were_put((from, all) in section(12), padding in 0..64usize) {
        let mut section = Vec::new();
        for sent in &all {
            encode(sent, &mut section);
            prop_assert_eq!(section.len() % 8, 0);
        }
        section.resize(section.len() + 8 * padding, 0);
        let mut frames = Frames::new(&section, from);
        for sent in &all {
            let frame = frames.next().expect("a good frame").expect("a frame");
            assert_same(frame, sent);
        }
        prop_assert_eq!(frames.next(), Ok(None));
    }

    #[test]
    fn a_cut_section_is_an_error_or_a_shorter_section((from, all) in section(6), cut in any::<prop::sample::Index>()) {
        let mut section = Vec::new();
        prop_assume!(!all.is_empty());
        all.iter().for_each(|sent| encode(sent, &mut section));
        section.truncate(cut.index(section.len()));
        let mut frames = Frames::new(&section, from);
        let mut seen = 0;
        while let Ok(Some(frame)) = frames.next() {
            assert_same(frame, &all[seen]);
            seen += 1;
        }
        prop_assert!(seen < all.len());
    }

    #[test]
    fn any_bytes_are_frames_or_an_error(kind in prop_oneof![0..6u8, 10..18u8, 20..23u8], bytes in vec(any::<u8>(), 0..300), zeros in 0..300usize, from in role()) {
        let mut section = bytes;
        section.insert(0, kind);
        // Small numbers are more interesting than random ones.
        section.resize(section.len() + zeros, 0);
        for at in [1, 5, 6, 7, 18, 19, 21, 22, 23] {
            if let Some(byte) = section.get_mut(at) {
                *byte = 0;
            }
        }
        let mut frames = Frames::new(&section, from);
        while let Ok(Some(frame)) = frames.next() {
            if let Frame::Call(CallFrame { parts, .. }) | Frame::Reply(ReplyFrame { parts, .. }) = frame {
                let inline: usize = parts.iter().filter_map(|part| part.inline).map(<[u8]>::len).sum();
                prop_assert!(inline <= section.len());
                prop_assert_eq!(parts.iter().count(), parts.count());
            }
        }
    }
}
