//! Bytes that tell whose they are.

/// Mixes the bits of a number, so that neighbours have nothing in common.
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A number for a sequence of numbers: another sequence has another one.
pub fn number_of(parts: impl IntoIterator<Item = u64>) -> u64 {
    parts.into_iter().fold(0, |number, part| mix(number ^ mix(part)))
}

/// So many bytes of this number. Another number has others, and so has each place.
pub fn bytes_of(number: u64, len: usize) -> Vec<u8> {
    let (first, step) = (mix(number), mix(!number) | 1);
    let words = (0..len.div_ceil(8) as u64).map(|at| first.wrapping_add(step.wrapping_mul(at)).to_le_bytes());
    let mut bytes = words.collect::<Vec<_>>().into_flattened();
    bytes.truncate(len);
    bytes
}
