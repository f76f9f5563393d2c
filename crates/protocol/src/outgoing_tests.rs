use super::*;

/// Parts of these lengths.
struct Lengths(Vec<u64>);

impl Payload for Lengths {
    fn part_count(&self) -> usize {
        self.0.len()
    }
    fn part_len(&self, part: usize) -> u64 {
        self.0[part]
    }
    fn copy_part(&self, part: usize, out: &mut Vec<u8>) {
        out.resize(out.len() + self.0[part] as usize, 7);
    }
}

fn outgoing() -> Outgoing<Lengths> {
    Outgoing::new(IdHash::new())
}

fn transfer(out: &mut Outgoing<Lengths>, id: u64, meta: usize, lens: &[u64]) {
    let payload = Lengths(lens.to_vec());
    let measure = Measure::of(Some(&payload)).unwrap();
    out.transfer(id, Head::Call { method: 1, meta: vec![2; meta], deadline: None }, payload, measure);
}

/// Control bytes, bulk bytes and segments of the next block.
fn poll(out: &mut Outgoing<Lengths>) -> Option<(usize, u64, usize)> {
    let (mut stats, mut segments) = (Stats::default(), Vec::new());
    let (len, _) = out.poll(Instant::now(), &mut stats, &mut segments);
    let control = segments.first()?.len();
    assert_eq!(segments.iter().map(Segment::len).sum::<u64>(), len);
    Some((control as usize, len - control, segments.len()))
}

/// Control bytes up to this length of the block.
fn fill_up(out: &mut Outgoing<Lengths>, len: usize) {
    out.frame(Answers::default(), |bytes| bytes.resize(len, 0));
}

#[test]
fn lengths_have_62_bits() {
    let measure = |lens: &[u64]| Measure::of(Some(&Lengths(lens.to_vec())));
    let most = (1 << 62) - 1;
    assert_eq!(measure(&[most]), Some(Measure { count: 1, inline: 0, bulk: most }));
    assert_eq!((measure(&[1 << 62]), measure(&[1 << 61, 1 << 61])), (None, None));
}

#[test]
fn dropped_payloads_leave_nothing_behind() {
    let mut out = outgoing();
    (0..100).for_each(|id| transfer(&mut out, id, 0, &[10_000]));
    (0..100).for_each(|id| assert!(out.drop_transfer(id).is_some()));
    for id in 100..1000 {
        transfer(&mut out, id, 0, &[10_000]);
        assert!(out.express.len() <= 64 + 2, "{} entries", out.express.len());
        assert_eq!(out.express.back().map(|(last, _)| *last), Some(id));
        assert!(out.drop_transfer(id).is_some());
    }
    assert_eq!(out.waiting, 0);
    out.slim();
    assert_eq!(out.transfers.capacity(), 0);
    assert!(poll(&mut out).is_none());
}

#[test]
fn a_lender_may_have_more_waiting() {
    let mut out = outgoing();
    transfer(&mut out, 1, 0, &[300 << 20]);
    assert!(out.is_full());
    out.lender.taken(0).unwrap();
    assert!(!out.is_full());
}

#[test]
fn blocks_are_appended_and_counted() {
    let now = Instant::now();
    let (mut out, mut stats, mut segments) = (outgoing(), Stats::default(), Vec::new());
    fill_up(&mut out, HEADER + 1000);
    out.cut_alone();
    fill_up(&mut out, HEADER + 2000);
    assert_eq!(out.queued, 3000);
    assert_eq!(out.poll(now, &mut stats, &mut segments).0, 1032);
    assert_eq!(out.queued, 2000);
    assert_eq!(out.poll(now, &mut stats, &mut segments).0, 2032);
    assert_eq!((out.queued, stats.blocks_out, stats.bytes_out, segments.len()), (0, 2, 3064, 2));
    // What is there already does not count against a block.
    transfer(&mut out, 1, 0, &[8192; 1200]);
    for count in [MAX_SEGMENTS, MAX_SEGMENTS, 1200 - 2 * (MAX_SEGMENTS - 1) + 1] {
        let before = segments.len();
        assert_ne!(out.poll(now, &mut stats, &mut segments).0, 0);
        assert_eq!(segments.len() - before, count);
    }
    // Inline parts are copied.
    let before = stats;
    (2..4).for_each(|id| transfer(&mut out, id, 0, &[100, 10_000]));
    out.poll(now, &mut stats, &mut segments);
    let more = (stats.payload_out - before.payload_out, stats.copied_out - before.copied_out);
    assert_eq!((more, out.is_empty()), ((20_200, 200), true));
}

/// The second frame has 8 bytes less than `head_size` allows for; both have as many inline bytes as may be.
#[test]
fn a_head_that_may_not_fit_waits_for_the_next_block() {
    for (meta, blocks) in [(1_046_424, 1), (1_046_432, 2)] {
        let mut out = outgoing();
        let inline = Lengths(vec![8191; 128]);
        out.frame(Answers::default(), |bytes| put::call(bytes, 1, 1, 0, &vec![1; meta], Some(&inline)));
        transfer(&mut out, 2, 1 << 20, &[&[8191u64; 128][..], &[10_000]].concat());
        let all: Vec<_> = std::iter::from_fn(|| poll(&mut out)).collect();
        assert_eq!(all.len(), blocks, "{all:?}");
        assert!(all.iter().all(|(control, ..)| *control <= MAX_FRAMES));
    }
}

#[test]
fn a_payload_goes_on_behind_frames_as_long_as_there_is_room() {
    let mut out = outgoing();
    transfer(&mut out, 1, 0, &[40 << 20]);
    assert!(poll(&mut out).is_some());
    for (len, bulk) in [(200_000, BULK_SOFT), (MAX_FRAMES - DATA_FRAME, BULK_SOFT), (MAX_FRAMES - 16, 0)] {
        fill_up(&mut out, len);
        let (control, sent, _) = poll(&mut out).unwrap();
        assert_eq!((control, sent), (if bulk == 0 { len } else { len + DATA_FRAME }, bulk), "{len}");
    }
}

#[test]
fn a_block_takes_no_further_heads_once_it_is_long() {
    let mut out = outgoing();
    (0..10).for_each(|id| transfer(&mut out, id, 100_000, &[10_000]));
    let all: Vec<_> = std::iter::from_fn(|| poll(&mut out)).collect();
    assert!(all.iter().all(|(control, ..)| *control < CONTROL_SOFT + 101_000), "{all:?}");
    assert_eq!(all.iter().map(|(_, bulk, _)| bulk).sum::<u64>(), 100_000);
}
