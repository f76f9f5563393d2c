//! Numbers and texts of records and of the table of calls. Little-endian.

pub fn put_u64(out: &mut Vec<u8>, number: u64) {
    out.extend(number.to_le_bytes());
}

pub fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_u64(out, bytes.len() as u64);
    out.extend(bytes);
}

pub fn put_numbers(out: &mut Vec<u8>, numbers: &[u64]) {
    put_u64(out, numbers.len() as u64);
    numbers.iter().for_each(|number| put_u64(out, *number));
}

/// What has not been read yet. Each method returns None if less is left.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    pub fn u32(&mut self) -> Option<u32> {
        let bytes = self.take(4)?;
        Some(u32::from_le_bytes(std::array::from_fn(|at| bytes[at])))
    }

    pub fn u64(&mut self) -> Option<u64> {
        let bytes = self.take(8)?;
        Some(u64::from_le_bytes(std::array::from_fn(|at| bytes[at])))
    }

    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.u64()?).ok()?;
        self.take(length)
    }

    /// How many things follow that take at least so many bytes each.
    pub fn count(&mut self, least: usize) -> Option<u64> {
        self.u64().filter(|count| *count <= (self.0.len() / least) as u64)
    }

    pub fn numbers(&mut self) -> Option<Vec<u64>> {
        (0..self.count(8)?).map(|_| self.u64()).collect()
    }
}
