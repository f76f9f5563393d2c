//! Unpredictable bytes.

/// For handshakes.
pub fn bytes() -> [u8; 32] {
    let mut bytes = [0; 32];
    // SAFETY: the buffer has the given length; up to 256 bytes are delivered whole once the kernel's pool is ready.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != 32 {
        // For kernels without the call; the file has the same source.
        if let Ok(mut file) = std::fs::File::open("/dev/urandom") {
            let _ = std::io::Read::read_exact(&mut file, &mut bytes);
        }
    }
    bytes
}
