//! A stream's statistics, for the metrics.

/// Totals since they were last taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerbsStats {
    pub messages_sent: u64,
    pub messages_received: u64,
    pub completions: u64,
    /// Bytes copied into and out of messages.
    pub copied: u64,
    pub reads: u64,
    /// Bytes that the device read straight to their destination …
    pub read_bytes: u64,
    /// … or into a buffer first, because the destination could not be registered or was short.
    pub bounced: u64,
    pub offered_bytes: u64,
    pub registrations: u64,
    /// Transfers whose memory was already registered.
    pub registrations_reused: u64,
    pub registration_failures: u64,
}

impl VerbsStats {
    pub fn add(&mut self, more: &VerbsStats) {
        self.messages_sent += more.messages_sent;
        self.messages_received += more.messages_received;
        self.completions += more.completions;
        self.copied += more.copied;
        self.reads += more.reads;
        self.read_bytes += more.read_bytes;
        self.bounced += more.bounced;
        self.offered_bytes += more.offered_bytes;
        self.registrations += more.registrations;
        self.registrations_reused += more.registrations_reused;
        self.registration_failures += more.registration_failures;
    }
}
