//! Every environment variable that starwire reads, each with its default, in one place.

use std::net::IpAddr;

use starwire_net::transport::verbs::{Arena, TransportChoice};

use super::kinds::{
    Amount, Amounts, BIND_ADDRESS, Bytes, CERTIFICATE_NAMES, CLUSTER_NAME, Choice, Flag, Hidden, JOBS, JOINABLE,
    Number, Optional, Parsed, STATE_FROM as FROM, text,
};
use super::row::Initial::{Is, Machine, Star, Unset, Verbs};
use super::row::{ReadBy, Row, Variable};
use super::{ControlAccess, DriverChoice, GrpcAccess, Joinable, PortsChoice, StateFrom, StateMode, UnixSockets, star};
use crate::tls::Names;

macro_rules! variables {
    ($($row:ident: $kind:ty = $name:literal, $value:expr, $default:expr, $read_by:ident, $meaning:literal;)*) => {
        $(
            #[doc = $meaning]
            pub static $row: Row<$kind> =
                Row { name: $name, kind: $value, default: $default, read_by: ReadBy::$read_by, meaning: $meaning };
        )*

        pub static VARIABLES: &[&dyn Variable] = &[$(&$row),*];
    };
}

variables! {
    WORKER_POLLING: Flag = "WORKER_ENABLE_POLLING", Flag, Is("false"), Servers,
        "Reactors of jobs `worker` and `chief` poll instead of sleeping. Costs a core per reactor; reactors back off when threads outnumber cores.";
    PS_POLLING: Flag = "PS_ENABLE_POLLING", Flag, Is("false"), Servers,
        "The same for every other job.";
    WORKER_CORES: Number<usize> = "NETWORK_WORKER_CORE_NUMBER", Number(1..=256), Star { star: "2", others: "16" }, Servers,
        "Maximum number of reactor threads in jobs `worker` and `chief`. There are never more reactors than tasks in the cluster, nor more than CPUs that the process may use.";
    PS_CORES: Number<usize> = "NETWORK_PS_CORE_NUMBER", Number(1..=256), Star { star: "8", others: "16" }, Servers,
        "The same for the jobs of `STARWIRE_PS_JOBS` (job `ps`, if unset). Other jobs have 16.";
    WORKER_UNPINNED: Flag = "WORKER_DISABLE_PIN_CORES", Flag, Is("true"), Servers,
        "`false` pins each reactor of jobs `worker` and `chief` to its own CPU, among those that the process may use.";
    PS_UNPINNED: Flag = "PS_DISABLE_PIN_CORES", Flag, Is("true"), Servers,
        "The same for every other job.";
    CONNECT_TIMEOUT_MS: Number<u64> = "NETWORK_MAX_CONNECTION_TIMEOUT", Number(1..=86_400_000), Is("120000"), Servers,
        "Timeout in milliseconds of the look-up of a peer, and of the attempt at each of its addresses; more than 10000 counts as 10000. A request ends with `Unavailable` when the attempt that it waits for fails. The creation of a session retries until it succeeds, as over `grpc`, and logs the peers that it waits for.";
    ENDPOINT_MAP_FOLDER: Optional<Parsed<String>> = "TF_SEASTAR_ENDPOINT_MAP_PATH", Optional(text("directory")), Unset(""), Servers,
        "Directory of `.endpoint_map`. If set, the file must exist.";
    ENDPOINT_MAP: Optional<Parsed<String>> = "STARWIRE_ENDPOINT_MAP", Optional(text("file")), Unset("`./.endpoint_map`, if it exists"), Servers,
        "The endpoint map, under any file name, if `TF_SEASTAR_ENDPOINT_MAP_PATH` is unset. If set, the file must exist.";
    PORTS: Choice<PortsChoice> = "STARWIRE_PORTS",
        Choice(&[("auto", PortsChoice::Auto), ("one", PortsChoice::One), ("two", PortsChoice::Two)]), Is("auto"), Servers,
        "`one`: the port of the ClusterSpec serves everything ([ports.md](ports.md)). `two`: TensorFlow's gRPC has that port, and the data port is another. `auto`: `one`, unless the endpoint map gives this task another port, or TensorFlow is 1.15. All tasks need the same.";
    PORT_OFFSET: Number<u16> = "STARWIRE_PORT_OFFSET", Number(1..=65_534), Is("1000"), Servers,
        "With two ports and without an endpoint map: a task's data port is its port of the ClusterSpec plus this number. All tasks need the same.";
    GRPC: Choice<GrpcAccess> = "STARWIRE_GRPC",
        Choice(&[("auto", GrpcAccess::Auto), ("on", GrpcAccess::Everybody), ("off", GrpcAccess::Nobody)]), Is("auto"), Servers,
        "With one port: whether clients of TensorFlow's gRPC (sessions by `grpc://`, eager contexts, the coordination service) are passed on to it. `auto`: unless the cluster has a secret or TLS; then only tasks of the cluster ([ports.md](ports.md#with-a-secret)).";
    BIND: Optional<Parsed<(IpAddr, Option<u16>)>> = "STARWIRE_BIND", Optional(BIND_ADDRESS), Unset("from the server's ClusterSpec entry"), Servers,
        "Address to listen on: `0.0.0.0`, `[::]:7000`. Without a port: the one at which peers look for the task ([ports.md](ports.md)). Another port needs an endpoint map.";
    REACTORS: Optional<Number<usize>> = "STARWIRE_REACTORS", Optional(Number(1..=256)), Unset("`NETWORK_…_CORE_NUMBER`"), Servers,
        "Exact number of reactor threads in every job, whatever the size of the cluster and of the machine.";
    DRIVER: Choice<DriverChoice> = "STARWIRE_DRIVER",
        Choice(&[("auto", DriverChoice::Auto), ("epoll", DriverChoice::Epoll), ("io_uring", DriverChoice::IoUring)]), Is("auto"), Servers,
        "The reactors' interface to the kernel. `auto` is epoll. `io_uring` fails at start where the kernel lacks it or a container forbids it, and uses less CPU for large tensors over TCP.";
    KEEPALIVE: Amounts<2> = "STARWIRE_KEEPALIVE",
        Amounts([Amount::number("after_ms", 10..=3_600_000), Amount::number("timeout_ms", 10..=3_600_000)]),
        Is("after_ms=5000,timeout_ms=15000"), Servers,
        "After `after_ms` milliseconds of silence, a server sends a keep-alive question to the peer. After `timeout_ms` more, the connection counts as lost, and its requests end with `Unavailable`.";
    SECRET: Optional<Hidden> = "STARWIRE_SECRET", Optional(Hidden), Unset(""), Servers,
        "Secret of the cluster, the same in every task. Both sides of a connection prove that they know it (HMAC-SHA256) without sending it.";
    SECRET_FILE: Optional<Parsed<String>> = "STARWIRE_SECRET_FILE", Optional(text("file")), Unset(""), Servers,
        "A file that contains the secret; one trailing newline is not part of it.";
    TLS_CERT: Optional<Parsed<String>> = "STARWIRE_TLS_CERT", Optional(text("file")), Unset(""), Servers,
        "The task's certificate in PEM format, followed by those of intermediate CAs. With it, `STARWIRE_TLS_KEY` and `STARWIRE_TLS_CA`, everything on the port uses mutual TLS 1.3 ([tls.md](tls.md)); needs `STARWIRE_PORTS=one`. The files are read again when they change.";
    TLS_KEY: Optional<Parsed<String>> = "STARWIRE_TLS_KEY", Optional(text("file")), Unset(""), Servers,
        "The private key of the certificate, in PEM format, without a passphrase.";
    TLS_CA: Optional<Parsed<String>> = "STARWIRE_TLS_CA", Optional(text("file")), Unset(""), Servers,
        "The CAs that issue the certificates of the cluster's tasks, in PEM format.";
    TLS_PEERS: Parsed<Names> = "STARWIRE_TLS_PEERS", CERTIFICATE_NAMES, Is("{host}"), Servers,
        "The names that a task's certificate must have, one of them as a subject alternative name: `{host}` is the host of the task's ClusterSpec address, `{job}` its job, `{task}` its number ([tls.md](tls.md#who-may-be-which-task)).";
    TLS_ALLOW_RDMA: Flag = "STARWIRE_TLS_ALLOW_RDMA", Flag, Is("false"), Servers,
        "`true`: RDMA may be used with TLS, although what it carries is neither encrypted nor authenticated.";
    REQUIRE_AUTH: Flag = "STARWIRE_REQUIRE_AUTH", Flag, Is("false"), Servers,
        "`true`: a server that would answer other hosts without proof of the secret or a certificate does not start. It needs a secret or TLS, `STARWIRE_PORTS=one`, `STARWIRE_GRPC` not `on`, and `STARWIRE_CONTROL` not `on`.";
    CLUSTER_ID: Optional<Parsed<String>> = "STARWIRE_CLUSTER_ID", Optional(CLUSTER_NAME), Unset(""), Servers,
        "Name of the cluster. Peers with another one are refused, so that two jobs cannot mix.";
    JOIN: Optional<Parsed<Joinable>> = "STARWIRE_JOIN", Optional(JOINABLE), Unset(""), Servers,
        "Tasks that may join a running job although they are not in this server's ClusterSpec ([elastic.md](elastic.md)): `worker:8` means tasks 0 to 7 of job `worker`. Every other task that is not in the ClusterSpec is then refused. Without the variable such tasks may connect, but the server connects to none of them.";
    UNIX: Choice<UnixSockets> = "STARWIRE_UNIX",
        Choice(&[("auto", UnixSockets::Auto), ("socket", UnixSockets::Socket), ("off", UnixSockets::Off)]), Is("auto"), Servers,
        "`auto`: tasks on one host connect over unix sockets, and large payloads are copied directly from the sender's memory where the kernel allows it ([architecture.md](architecture.md#between-tasks-of-one-host)). `socket`: they go through the socket. `off`: always TCP.";
    TRANSPORT: Choice<TransportChoice> = "STARWIRE_TRANSPORT",
        Choice(&[("tcp", TransportChoice::Tcp), ("verbs", TransportChoice::Verbs)]), Verbs { verbs: "verbs", others: "tcp" }, Servers,
        "Transport of the data between hosts, for any protocol: `tcp`, or `verbs` (RDMA, see [verbs.md](verbs.md)). All tasks need the same.";
    VERBS_FALLBACK: Flag = "STARWIRE_VERBS_FALLBACK", Flag, Is("true"), Servers,
        "`true`: if RDMA does not work, starwire uses TCP and logs the reason. `false`: a server without RDMA does not start, and peers without it are refused.";
    VERBS_LIBRARY: Parsed<String> = "STARWIRE_VERBS_LIBRARY", text("name or path"), Is("libibverbs.so.1"), Servers,
        "The libibverbs to load.";
    VERBS_LIMITS: Amounts<2> = "STARWIRE_VERBS_LIMITS",
        Amounts([Amount::bytes("direct_min", 4 << 10..=1 << 30), Amount::bytes("buffers", 128 << 10..=64 << 20)]),
        Is("direct_min=64K,buffers=512K"), Servers,
        "Pieces of tensors of at least `direct_min` bytes are read in place by the peer's device; shorter ones are copied into messages. `buffers`: bytes of message buffers for each direction of an RDMA connection; locked memory.";
    VERBS_ARENA: Bytes = "STARWIRE_VERBS_ARENA", Bytes(0..=1 << 46), Machine(Arena::default_bytes, "the machine's memory"), Servers,
        "Bytes of the arena: tensors of at least `direct_min` bytes lie there, and their registrations are kept. Tensors that do not fit are registered for each transfer; 0: all of them.";
    RDMA_DEVICE: Optional<Parsed<String>> = "RDMA_DEVICE", Optional(text("name")), Unset("the first with an active port"), Servers,
        "The RDMA device, as `ibv_devices` lists it.";
    RDMA_PORT: Optional<Number<u8>> = "RDMA_DEVICE_PORT", Optional(Number(1..=254)), Unset("the first active one"), Servers,
        "Port of the device.";
    RDMA_GID_INDEX: Optional<Number<u32>> = "RDMA_GID_INDEX", Optional(Number(0..=65_535)), Unset("found"), Servers,
        "Row of the port's GID table. If unset: on Ethernet the first RoCE v2 address, IPv4 before IPv6; on InfiniBand row 0.";
    RDMA_PKEY_INDEX: Number<u16> = "RDMA_QP_PKEY_INDEX", Number(0..=65_535), Is("0"), Servers,
        "Row of the port's partition key table.";
    RDMA_QUEUE_DEPTH: Number<u32> = "RDMA_QP_QUEUE_DEPTH", Number(64..=32_768), Is("1024"), Servers,
        "Work requests that a queue pair holds; fewer if the device has fewer.";
    RDMA_TIMEOUT: Number<u8> = "RDMA_QP_TIMEOUT", Number(1..=31), Is("14"), Servers,
        "A packet without an acknowledgement is sent again after 4.096 µs · 2^n (14 is 67 ms).";
    RDMA_RETRY_COUNT: Number<u8> = "RDMA_QP_RETRY_COUNT", Number(0..=7), Is("7"), Servers,
        "Number of times a packet is sent again before the connection counts as lost.";
    RDMA_SERVICE_LEVEL: Number<u8> = "RDMA_QP_SL", Number(0..=15), Is("0"), Servers,
        "Service level: on RoCE the priority.";
    RDMA_MTU: Choice<Option<u32>> = "RDMA_QP_MTU",
        Choice(&[("256", Some(256)), ("512", Some(512)), ("1024", Some(1024)), ("2048", Some(2048)), ("4096", Some(4096)), ("port", None)]), Is("port"), Servers,
        "Bytes of payload per packet; `port`: the port's own. The smaller one of both sides is used.";
    RDMA_TRAFFIC_CLASS: Number<u8> = "RDMA_TRAFFIC_CLASS", Number(0..=255), Is("0"), Servers,
        "Traffic class of the GRH: on RoCE v2 the IP header's DSCP and ECN bits.";
    PS_JOBS: Parsed<Vec<String>> = "STARWIRE_PS_JOBS", JOBS, Is("ps"), ServersAndMasters,
        "The jobs that are parameter servers. If unset, the star protocols also find them by other means ([star_server.md](star_server.md)).";
    MAX_CALL_BYTES: Bytes = "STARWIRE_MAX_CALL_BYTES", Bytes(1 << 20..=1 << 40), Is("16G"), Servers,
        "Maximum payload of one incoming call; larger ones are refused with `ResourceExhausted` before memory is allocated.";
    CONTROL: Choice<Option<ControlAccess>> = "STARWIRE_CONTROL",
        Choice(&[("auto", None), ("on", Some(ControlAccess::Everybody)), ("off", Some(ControlAccess::Nobody)), ("loopback", Some(ControlAccess::Loopback))]), Is("auto"), Servers,
        "Access to the control service (health, statistics, `/metrics`) on the data port, which asks for no secret: from everywhere, from nowhere, or from this host only. `auto`: from everywhere, but only from this host if the cluster has a secret or TLS. With TLS and a certificate of its CAs, `auto` answers from everywhere.";
    ROW_UPDATES: Flag = "STARWIRE_ROW_UPDATES", Flag, Is("true"), Servers,
        "Sparse updates of variables and gathers of rows in star calls have starwire's kernels, with the results of TensorFlow's ([executor.md](executor.md#sparse-updates)). `false`: TensorFlow's, to find out whether one of them is to blame.";
    OPS: Optional<Parsed<String>> = "STARWIRE_OPS", Optional(text("file")), Unset(""), ServersAndMasters,
        "A table of your own operations, in addition to starwire's ([operations.md](operations.md#your-own-operations)). All tasks need the same.";
    STAR_LIMITS: Amounts<8> = "STARWIRE_STAR_LIMITS",
        Amounts([
            Amount::number("plans", 1..=1 << 24),
            Amount::bytes("plan_bytes", 1 << 20..=1 << 40),
            Amount::number("values", 0..=1 << 24),
            Amount::bytes("value_bytes", 0..=1 << 40),
            Amount::number("calls", 1..=1 << 24),
            Amount::number("plan_idle_s", 1..=31_536_000),
            Amount::number("session_idle_s", 1..=31_536_000),
            Amount::number("inline_us", 0..=1_000_000),
        ]),
        Is("plans=4096,plan_bytes=1G,values=65536,value_bytes=4G,calls=1024,plan_idle_s=3600,session_idle_s=86400,inline_us=250"), ParameterServers,
        "Limits of one worker on this parameter server ([star_server.md](star_server.md)), in part or as a whole: `plans` and their `plan_bytes` as registered, `values` and `value_bytes` kept between the star calls of a step, `calls` in flight. After `plan_idle_s` seconds without use a plan is evicted (its users register it again). A session whose task has had no connection for `session_idle_s` is deleted; those that were closed unnoticed are looked for as often. Plans whose kernels take at most `inline_us` microseconds run on the reactor that received the star call, the others on TensorFlow's pool.";
    STAR_MAX_TOTAL_BYTES: Bytes = "STARWIRE_STAR_MAX_TOTAL_BYTES", Bytes(1 << 20..=1 << 50), Machine(star::half_of_memory, "half of the memory"), ParameterServers,
        "Limit of all workers together on this parameter server, for the bytes of values and again for those of plans. A worker can take at most what is left over, so that there is always room for another; plans of the worker that has most are evicted first.";
    STATE: Optional<Parsed<String>> = "STARWIRE_STATE", Optional(text("directory")), Unset(""), ParameterServers,
        "Directory in which a parameter server of a star protocol keeps its variables, in a folder of its own, so that they outlive its process ([elastic.md](elastic.md#servers-that-come-back)). Other tasks ignore it.";
    STATE_MODE: Choice<StateMode> = "STARWIRE_STATE_MODE", Choice(&[("async", StateMode::Async), ("sync", StateMode::Sync)]), Is("async"), ParameterServers,
        "`async`: the state is written every second. `sync`: a call that changes something is answered when the changes are on the disk ([elastic.md](elastic.md#servers-that-come-back)).";
    STATE_FROM: Optional<Parsed<StateFrom>> = "STARWIRE_STATE_FROM", Optional(FROM), Unset(""), ParameterServers,
        "Another process of this task, at this address, whose state the server takes over before it begins to serve ([elastic.md](elastic.md#servers-that-move)): `move`, as soon as it has copied it; `standby`, when that process stops, or has ended.";
    RECOVER_S: Number<u64> = "STARWIRE_RECOVER_S", Number(0..=3600), Is("0"), Masters,
        "Seconds for which a star call, or a session that is opened, waits for a parameter server that is down ([elastic.md](elastic.md#servers-that-come-back)). 0: a call that has lost its connection waits 10 s, any other one fails at once.";
    STAR_SPLIT_BYTES: Optional<Bytes> = "STARWIRE_STAR_SPLIT_BYTES", Optional(Bytes(0..=1 << 40)), Unset("measured when a graph is planned: `32K` to `1M`"), Masters,
        "A star call that would carry at least twice this many bytes is split into parts of about this size, where the parts are independent ([star_server.md](star_server.md)). 0: never.";
    TENSOR_FUSE: Optional<Flag> = "STARWIRE_TENSOR_FUSE", Optional(Flag), Unset("`true` for functions of a star protocol's servers, else `false`"), Masters,
        "Fuse tensors in sessions and functions whose configuration does not decide it ([tensor_fuse.md](tensor_fuse.md)). Over `grpc` as well, if every process has loaded the library.";
    TENSOR_FUSE_LIMITS: Amounts<5> = "STARWIRE_TENSOR_FUSE_LIMITS",
        Amounts([
            Amount::bytes("small", 0..=1 << 30),
            Amount::bytes("large", 0..=1 << 30),
            Amount::bytes("group", 0..=1 << 30),
            Amount::number("wait_us", 0..=60_000_000),
            Amount::number("message_us", 1..=1_000_000),
        ]),
        Is("small=16K,large=256K,group=1M,wait_us=500,message_us=100"), Masters,
        "Limits of tensor_fuse, in part or as a whole. Tensors up to `small` bytes are grouped with each other, and so are those above up to `large`; larger ones travel alone. A group carries at most `group` bytes. No tensor waits longer than `wait_us` microseconds for others (estimated when the graph is planned), and all the waiting of a group is at most `message_us` for each message that it saves.";
    LIBRARY: Optional<Parsed<String>> = "STARWIRE_LIBRARY", Optional(text("file")), Unset("found by version"), Python,
        "Path of the shared library that `import starwire` loads.";
    PROTOCOL: Optional<Parsed<String>> = "STARWIRE_PROTOCOL", Optional(text("protocol")), Unset(""), Python,
        "The protocol that whatever asks for `grpc` gets ([run.md](run.md)); `grpc` changes nothing.";
}
