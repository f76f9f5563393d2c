//! Every metric of starwire.

use super::cells::{Counter, Gauge, Histogram};
use super::{Description, Kind};

/// A cell of a [`Cells`], of any kind.
pub(super) enum Cell<'a> {
    Counter(&'a Counter),
    Gauge(&'a Gauge),
    Histogram(&'a Histogram),
}

macro_rules! metrics {
    ($($kind:ident $field:ident $name:literal $help:literal;)*) => {
        /// The cells of one writer.
        #[derive(Debug, Default)]
        pub struct Cells {
            $(#[doc = $help] pub $field: $kind,)*
        }

        impl Cells {
            /// In the order of [`LIST`].
            pub(super) fn each(&self) -> impl Iterator<Item = Cell<'_>> {
                [$(Cell::$kind(&self.$field)),*].into_iter()
            }
        }

        pub const LIST: &[Description] = &[$(Description { name: $name, kind: Kind::$kind, help: $help }),*];
    };
}

metrics! {
    Counter connects "starwire_connects_total" "Connections to peers that completed the handshake.";
    Counter connect_failures "starwire_connect_failures_total" "Failed attempts to connect to a peer.";
    Counter accepts "starwire_accepts_total" "Connections from peers that completed the handshake.";
    Counter refusals "starwire_refusals_total" "Connections refused: not starwire, another version, another cluster, or no proof of the secret.";
    Counter tls_handshakes "starwire_tls_handshakes_total" "TLS handshakes with verified certificates, in both directions, between tasks.";
    Counter tls_handshakes_delayed "starwire_tls_handshakes_delayed_total" "TLS handshakes of other tasks, HTTP clients or unauthenticated ones that had to wait because handshakes had used up their part of a thread's time.";
    Counter tls_failures "starwire_tls_failures_total" "TLS connections between tasks that ended with an error: a certificate that is not valid, or damaged records.";
    Counter unauthenticated_dropped "starwire_unauthenticated_dropped_total" "Connections dropped before they completed the handshake: too slow, or too many at a time.";
    Counter losses "starwire_losses_total" "Established connections that ended without a GOODBYE.";
    Counter keepalive_losses "starwire_keepalive_losses_total" "Of these, connections whose peer did not answer in time.";
    Counter tasks_joined "starwire_tasks_joined_total" "Tasks that joined: they are not in the ClusterSpec, and STARWIRE_JOIN allows them.";
    Counter tasks_left "starwire_tasks_left_total" "Of these, tasks that left.";
    Gauge connections_out "starwire_connections_out" "Established connections that this task opened.";
    Gauge connections_in "starwire_connections_in" "Established connections that peers opened.";

    Counter calls_sent "starwire_calls_sent_total" "Method calls sent.";
    Counter calls_received "starwire_calls_received_total" "Method calls received.";
    Counter tensors_requested "starwire_tensors_requested_total" "Rendezvous requests sent.";
    Counter tensor_requests_received "starwire_tensor_requests_received_total" "Rendezvous requests received.";
    Counter replies_sent "starwire_replies_sent_total" "Replies sent.";
    Counter replies_received "starwire_replies_received_total" "Replies received.";
    Counter error_replies_received "starwire_error_replies_received_total" "Of these, replies that carry an error.";
    Counter ended_locally "starwire_ended_locally_total" "Requests of this task that ended without a reply: connection lost, no connection in time, or shutdown.";
    Counter cancels_sent "starwire_cancels_sent_total" "Requests of this task that were cancelled.";
    Counter cancels_received "starwire_cancels_received_total" "Requests of peers that were cancelled before this task replied.";
    Counter deadlines_exceeded "starwire_deadlines_exceeded_total" "Requests of this task whose deadline passed.";
    Gauge requests_in_flight "starwire_requests_in_flight" "Requests of this task that wait for a reply.";
    Gauge requests_unanswered "starwire_requests_unanswered" "Requests of peers that this task has not answered yet.";

    Counter bytes_sent "starwire_bytes_sent_total" "Bytes sent over sockets and queue pairs.";
    Counter bytes_received "starwire_bytes_received_total" "Bytes received over sockets and queue pairs.";
    Counter payload_bytes_sent "starwire_payload_bytes_sent_total" "Payload bytes (tensors) sent, lent ones included.";
    Counter payload_bytes_received "starwire_payload_bytes_received_total" "Payload bytes (tensors) received, borrowed ones included.";
    Counter copied_bytes_sent "starwire_copied_bytes_sent_total" "Payload bytes copied within this process before sending: small parts only.";
    Counter copied_bytes_received "starwire_copied_bytes_received_total" "Payload bytes copied within this process after arrival: small parts only.";
    Counter lent_bytes "starwire_lent_bytes_total" "Of the payload bytes sent, those that peers on this host copy from this process's memory.";
    Counter borrowed_bytes "starwire_borrowed_bytes_total" "Of the payload bytes received, those copied from the memory of a peer on this host.";
    Counter fused_messages_sent "starwire_fused_messages_sent_total" "Of the replies sent, those that carry several tensors as one (tensor_fuse).";
    Counter fused_tensors_sent "starwire_fused_tensors_sent_total" "Tensors in these replies.";
    Counter fused_messages_received "starwire_fused_messages_received_total" "Of the replies received, those that carry several tensors as one.";
    Counter fused_tensors_received "starwire_fused_tensors_received_total" "Tensors in these replies.";
    Counter blocks_sent "starwire_blocks_sent_total" "Blocks sent; requests and replies per block measure coalescing.";
    Counter blocks_received "starwire_blocks_received_total" "Blocks received.";
    Counter keys_interned "starwire_keys_interned_total" "Rendezvous keys sent in full, on their first use on a connection.";

    Counter star_calls "starwire_star_calls_total" "Star calls from workers.";
    Counter star_plan_hits "starwire_star_plan_hits_total" "Of these, calls whose plan was known.";
    Counter star_calls_inline "starwire_star_calls_inline_total" "Of these, calls that ran on the reactor that received them.";
    Counter star_calls_repeated "starwire_star_calls_repeated_total" "Star calls that came again over a new connection, and got the reply of their first run.";
    Counter star_registrations "starwire_star_registrations_total" "Star plans compiled.";
    Counter star_evictions "starwire_star_evictions_total" "Star plans evicted because they were idle or room was needed.";
    Gauge star_plans "starwire_star_plans" "Star plans of workers.";
    Gauge star_slots "starwire_star_slots" "Values kept between the star calls of a step.";
    Counter star_bytes_received "starwire_star_bytes_received_total" "Bytes of feeds received in star calls.";
    Counter star_bytes_sent "starwire_star_bytes_sent_total" "Bytes of fetches sent in replies to star calls.";

    Counter state_flushes "starwire_state_flushes_total" "Flushes of this server's state to its folder (STARWIRE_STATE).";
    Counter state_failures "starwire_state_failures_total" "Flushes that failed: the state in the folder stays as old as it is.";
    Counter state_bytes "starwire_state_bytes_total" "Bytes of flushes.";
    Gauge state_copies "starwire_state_copies" "Processes that keep a copy of the state, and have everything up to the last flush or so.";

    Counter verbs_connections "starwire_verbs_connections_total" "Connections moved to an RDMA queue pair, opened by this task or by peers.";
    Counter verbs_fallbacks "starwire_verbs_fallbacks_total" "Fallbacks to TCP because RDMA did not work.";
    Counter verbs_messages_sent "starwire_verbs_messages_sent_total" "RDMA messages sent.";
    Counter verbs_messages_received "starwire_verbs_messages_received_total" "RDMA messages received.";
    Counter verbs_reads "starwire_verbs_reads_total" "RDMA READ requests.";
    Counter verbs_read_bytes "starwire_verbs_read_bytes_total" "Bytes that the device read from a peer's memory straight into their destination.";
    Counter verbs_offered_bytes "starwire_verbs_offered_bytes_total" "Bytes offered to peers for reading in place.";
    Counter verbs_copied_bytes "starwire_verbs_copied_bytes_total" "Bytes copied into or out of RDMA messages and buffers.";
    Counter verbs_completions "starwire_verbs_completions_total" "Completions of RDMA requests.";
    Counter verbs_registrations "starwire_verbs_registrations_total" "Memory registrations, for one transfer or kept for later ones.";
    Counter verbs_registrations_reused "starwire_verbs_registrations_reused_total" "Transfers whose memory was already registered.";
    Counter verbs_registration_failures "starwire_verbs_registration_failures_total" "Registrations that the kernel refused; the bytes were copied instead.";

    Counter waits "starwire_waits_total" "Times a reactor polled the kernel for events.";
    Counter sleeps "starwire_sleeps_total" "Of these, times it was prepared to sleep.";
    Counter wakes "starwire_wakes_total" "Times another thread of this process woke a sleeping reactor.";
    Counter mailbox_messages "starwire_mailbox_messages_total" "Messages from other threads to a reactor.";
    Counter grpc_connections "starwire_grpc_connections_total" "Clients passed on to TensorFlow's gRPC, if the server has one port: connections of their own and streams inside those of tasks.";
    Counter control_connections "starwire_control_connections_total" "Connections to the control service.";

    Histogram call_time "starwire_call_seconds" "From the start of a method call to its end.";
    Histogram tensor_time "starwire_tensor_seconds" "From the start of a rendezvous request to the last byte of the tensor, including the wait until the peer has produced it.";
    Histogram star_queue_time "starwire_star_queue_seconds" "From the arrival of a star call to its first kernel.";
    Histogram star_run_time "starwire_star_run_seconds" "From the first kernel of a star call to its reply.";
    Histogram state_pause_time "starwire_state_pause_seconds" "For how long a flush of the state kept calls that change something from running.";
    Histogram connect_time "starwire_connect_seconds" "From the first attempt to connect to a peer to the end of the handshake.";
}

/// Its value is always 1; the facts are its labels.
pub const BUILD_INFO: Description = Description {
    name: "starwire_build_info",
    kind: Kind::Gauge,
    help: "Always 1; the labels `version`, `wire_version` and `profile` (`release` or `debug`) describe the library.",
};

/// Of tasks with TLS.
pub const TLS_EXPIRY: Description = Description {
    name: "starwire_tls_certificate_expiry_seconds",
    kind: Kind::Gauge,
    help: "With TLS: when the certificate of this task, or that of an intermediate CA in its file, ends, in Unix time.",
};

/// Series of a peer, each with the label `peer`; at most as many as `MAX_PEERS` says, and one for the others.
pub const OF_PEERS: [Description; 4] = [
    Description {
        name: "starwire_peer_bytes_received_total",
        kind: Kind::Counter,
        help: "Bytes received from a peer over sockets and queue pairs (label `peer`: its task, or `other` for all but the first 64).",
    },
    Description {
        name: "starwire_peer_bytes_sent_total",
        kind: Kind::Counter,
        help: "Bytes sent to a peer over sockets and queue pairs (label `peer`).",
    },
    Description {
        name: "starwire_peer_connections",
        kind: Kind::Gauge,
        help: "Open connections with a peer, in both directions (label `peer`).",
    },
    Description {
        name: "starwire_peer_requests_in_flight",
        kind: Kind::Gauge,
        help: "Requests that wait for a reply of a peer (label `peer`).",
    },
];
