use super::*;
use proptest::prelude::*;

/// The bytes of the specification, written out by hand.
#[test]
fn heads_are_those_of_the_specification() {
    let keeps = vec![Keep { fetch: 1, slot: 5, flags: 0 }, Keep { fetch: 2, slot: 6, flags: ALSO_RETURNED }];
    let call = CallHead { flags: LAST, step: -2, incarnation: 7, plan: [9; 32], call_id: None, session: b"ab", keeps };
    let mut meta = vec![0xEE];
    call.write(&mut meta).unwrap();
    assert_eq!(meta[..17], [0xEE, 2, 1, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0], "it is appended");
    assert_eq!(meta[17..33], [0xFE, 255, 255, 255, 255, 255, 255, 255, 7, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(meta[33..81], [[9; 32].as_slice(), &[0; 16]].concat());
    assert_eq!(
        meta[81..],
        [b"ab".as_slice(), &[1, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 6, 0, 0, 0, 1, 0, 0, 0]].concat()
    );
    assert_eq!(CallHead::read(&meta[1..]).unwrap(), (call.clone(), meta.len() - 1));

    let call_id = Some(CallId { lane: 3, attempt: 4, number: NonZeroU64::new(5).unwrap() });
    let call = CallHead { call_id, keeps: Vec::new(), ..call };
    let mut meta = Vec::new();
    call.write(&mut meta).unwrap();
    assert_eq!(meta[64..80], [3, 0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(CallHead::read(&meta).unwrap(), (call, meta.len()));

    let reply = ReplyHead { flags: UNKNOWN_PLAN, queue_micros: 2, run_micros: 3, stats_bytes: 4 };
    let bytes = reply.bytes();
    assert_eq!(bytes[..16], [1, 1, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]);
    assert_eq!((bytes[16..].iter().all(|b| *b == 0), ReplyHead::read(&bytes)), (true, Ok(reply)));

    let register = RegisterHead { incarnation: 2, plan: [7; 32], session: b"mine" };
    let mut meta = Vec::new();
    register.write(&mut meta).unwrap();
    assert_eq!(meta, [&[1, 0, 4, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0], [7; 32].as_slice(), b"mine"].concat());
    assert_eq!(RegisterHead::read(&meta), Ok(register));

    let end = EndHead { step: 11, session: b"s" };
    let mut meta = Vec::new();
    end.write(&mut meta).unwrap();
    assert_eq!(meta, [1, 0, 1, 0, 0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0, b's']);
    assert_eq!(EndHead::read(&meta), Ok(end));
}

fn call_meta() -> Vec<u8> {
    let keeps = vec![Keep { fetch: 1, slot: 2, flags: 1 }];
    let call = CallHead { flags: TRACE, step: 1, incarnation: 1, plan: [1; 32], call_id: None, session: b"abc", keeps };
    let mut meta = Vec::new();
    call.write(&mut meta).unwrap();
    meta
}

#[test]
fn malformed_heads_are_refused() {
    let why = |at: usize, byte: u8| {
        let mut meta = call_meta();
        meta[at] = byte;
        CallHead::read(&meta).map(|_| ()).unwrap_err().to_string()
    };
    assert_eq!(why(0, 1), "starwire: malformed star call: version 1, expected 2");
    assert_eq!(why(1, 4), "starwire: malformed star call: unknown flags 4");
    assert_eq!(why(4, 255), "starwire: malformed star call: a session handle of 255 bytes");
    assert_eq!(why(5, 0x11), "starwire: malformed star call: a session handle of 4355 bytes");
    assert_eq!(why(8, 9), "starwire: malformed star call: 9 kept values in 95 bytes");
    assert_eq!(why(11, 0xFF), "starwire: malformed star call: 4278190081 kept values in 95 bytes");
    assert_eq!(why(91, 6), "starwire: malformed star call: unknown flags 6 of a kept value");
    assert_eq!(why(64, 1), "starwire: malformed star call: a lane without a number");
    assert_eq!(why(68, 1), "starwire: malformed star call: a lane without a number");
    assert_eq!(why(72, 1), "starwire: malformed star call: a call that may come again keeps values");
    for reserved in [6, 7, 12, 15] {
        assert_eq!(why(reserved, 1), "starwire: malformed star call: reserved bytes are not zero", "{reserved}");
    }
    for len in 0..CALL_BYTES {
        assert!(CallHead::read(&call_meta()[..len]).is_err(), "{len}");
        assert!(len >= REPLY_BYTES || ReplyHead::read(&ReplyHead::default().bytes()[..len]).is_err(), "{len}");
    }
    let mut longer = Vec::new();
    RegisterHead { incarnation: 0, plan: [0; 32], session: b"x" }.write(&mut longer).unwrap();
    longer.push(0);
    assert_eq!(
        RegisterHead::read(&longer).unwrap_err().to_string(),
        "starwire: malformed plan registration: bytes after its end"
    );
    let mut longer = Vec::new();
    EndHead { step: 0, session: b"x" }.write(&mut longer).unwrap();
    longer.push(0);
    assert_eq!(EndHead::read(&longer).unwrap_err().to_string(), "starwire: malformed step end: bytes after its end");
}

#[test]
fn heads_that_do_not_fit_are_not_written() {
    let long = vec![0; MAX_SESSION + 1];
    let many = vec![Keep { fetch: 0, slot: 0, flags: 0 }; MAX_META / KEEP_BYTES];
    let call = |session, keeps| {
        CallHead { flags: 0, step: 0, incarnation: 0, plan: [0; 32], call_id: None, session, keeps }
            .write(&mut Vec::new())
    };
    assert!(call(&long[1..], Vec::new()).is_ok());
    assert_eq!(call(&long, Vec::new()), Err(StarError::TooLong { session: MAX_SESSION + 1, keeps: 0 }));
    assert!(call(b"", many).is_err());
    assert!(RegisterHead { incarnation: 0, plan: [0; 32], session: &long }.write(&mut Vec::new()).is_err());
    assert!(EndHead { step: 0, session: &long }.write(&mut Vec::new()).is_err());
}

#[test]
fn a_plan_is_named_by_its_sha_256() {
    let hash = plan_hash(b"abc");
    assert_eq!((&hash[..4], &hash[28..]), (&[0xba, 0x78, 0x16, 0xbf][..], &[0xf2, 0x00, 0x15, 0xad][..]));
}

#[test]
fn session_handles_are_complete_and_have_a_limit() {
    let handle = vec![b'h'; MAX_SESSION];
    let mut meta = Vec::new();
    EndHead { step: 1, session: &handle }.write(&mut meta).unwrap();
    assert_eq!(EndHead::read(&meta), Ok(EndHead { step: 1, session: &handle }));
    // One byte more than allowed; it is there.
    meta.push(b'h');
    meta[2..4].copy_from_slice(&(MAX_SESSION as u16 + 1).to_le_bytes());
    let why = |meta: &[u8]| EndHead::read(meta).map(|_| ()).unwrap_err().to_string();
    assert_eq!(why(&meta), "starwire: malformed step end: a session handle of 4097 bytes");
    let mut cut = Vec::new();
    EndHead { step: 1, session: b"abc" }.write(&mut cut).unwrap();
    cut.pop();
    assert_eq!(why(&cut), "starwire: malformed step end: a session handle of 3 bytes");
}

#[test]
fn a_call_may_keep_thousands_of_values() {
    let keeps = vec![Keep { fetch: 0, slot: 0, flags: 0 }; 2000];
    let call = CallHead { flags: 0, step: 0, incarnation: 0, plan: [0; 32], call_id: None, session: b"", keeps };
    let mut meta = Vec::new();
    call.write(&mut meta).unwrap();
    assert_eq!(CallHead::read(&meta), Ok((call, 80 + 2000 * 12)));
}

proptest! {
    /// Whatever is accepted is written the same way again.
    #[test]
    fn any_bytes_are_refused_or_round_trip(
        start in proptest::sample::select(vec![call_meta(), ReplyHead::default().bytes().to_vec(), vec![1; 64], vec![2; 90]]),
        changes in proptest::collection::vec((0usize..120, any::<u8>()), 0..6),
        len in 0usize..120,
    ) {
        let mut meta = start;
        meta.resize(len.max(meta.len() * usize::from(len % 2 == 0)), 0);
        for (at, byte) in changes {
            if let Some(place) = meta.get_mut(at) {
                *place = byte;
            }
        }
        if let Ok((call, table)) = CallHead::read(&meta) {
            let mut again = Vec::new();
            call.write(&mut again).unwrap();
            prop_assert_eq!(&again[..], &meta[..table]);
        }
        if let Ok(reply) = ReplyHead::read(&meta) {
            prop_assert_eq!(&reply.bytes()[..], &meta[..REPLY_BYTES]);
        }
        if let Ok(register) = RegisterHead::read(&meta) {
            let mut again = Vec::new();
            register.write(&mut again).unwrap();
            prop_assert_eq!(&again, &meta);
        }
        if let Ok(end) = EndHead::read(&meta) {
            let mut again = Vec::new();
            end.write(&mut again).unwrap();
            prop_assert_eq!(&again, &meta);
        }
    }
}
