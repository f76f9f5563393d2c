//! Calls that measure the path to a task: they bring back as many bytes as they ask for. `docs/protocol.md`, "Measuring
//! the path", is the specification.

/// The method.
pub const MEASURE: u16 = 22;
/// The most bytes that one call brings back.
pub const MOST_MEASURED: usize = 1 << 20;
/// In the reply's metadata: both tasks are on one host, and nothing that they exchange crosses a network.
pub const SAME_HOST: u8 = 1;

/// The number of bytes that a call asks for; `None`: its metadata are not those of this method.
pub fn read(meta: &[u8]) -> Option<usize> {
    let bytes = usize::try_from(u32::from_le_bytes(meta.try_into().ok()?)).ok()?;
    (bytes <= MOST_MEASURED).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_four_bytes_and_ask_for_a_limited_number() {
        assert_eq!(read(&0u32.to_le_bytes()), Some(0));
        assert_eq!(read(&(1u32 << 20).to_le_bytes()), Some(MOST_MEASURED));
        assert_eq!(read(&((1u32 << 20) + 1).to_le_bytes()), None);
        assert_eq!(read(&[0; 3]), None);
        assert_eq!(read(&[0; 5]), None);
    }
}
