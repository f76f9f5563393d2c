//! A stream's statistics, for the metrics.

/// Totals since the stream was created.
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
    /// Adds the difference between two snapshots.
    pub fn add(&mut self, now: &VerbsStats, then: &VerbsStats) {
        self.messages_sent += now.messages_sent - then.messages_sent;
        self.messages_received += now.messages_received - then.messages_received;
        self.completions += now.completions - then.completions;
        self.copied += now.copied - then.copied;
        self.reads += now.reads - then.reads;
        self.read_bytes += now.read_bytes - then.read_bytes;
        self.bounced += now.bounced - then.bounced;
        self.offered_bytes += now.offered_bytes - then.offered_bytes;
        self.registrations += now.registrations - then.registrations;
        self.registrations_reused += now.registrations_reused - then.registrations_reused;
        self.registration_failures += now.registration_failures - then.registration_failures;
    }
}
