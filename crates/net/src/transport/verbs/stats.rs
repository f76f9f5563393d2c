//! What a stream has done, for the metrics.

/// What happened since the stream was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerbsStats {
    pub messages_sent: u64,
    pub messages_received: u64,
    pub completions: u64,
    /// Bytes that were copied into and out of messages.
    pub copied: u64,
    pub reads: u64,
    /// Bytes that the device read straight into their place …
    pub read_bytes: u64,
    /// … or into a buffer first, because their place could not be registered or was short.
    pub bounced: u64,
    pub offered_bytes: u64,
    pub registrations: u64,
    /// Transfers whose memory was registered from before.
    pub registrations_reused: u64,
    pub registration_failures: u64,
}

impl VerbsStats {
    /// Adds what happened between two looks.
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
