//! Servers on faulty devices: a clear error, or TCP with one log line, and never a hang.

use crate::harness::*;

pub const PS: &str = "/job:ps/replica:0/task:0";
const WORKER: &str = "/job:worker/replica:0/task:0";

pub fn task(name: &str, device: &str, more: &[(&str, &str)]) -> Result<Task, String> {
    let mut env = vec![
        ("STARWIRE_TRANSPORT", "verbs"),
        ("STARWIRE_UNIX", "off"),
        ("STARWIRE_VERBS_LIBRARY", fake_library::path()),
        ("RDMA_DEVICE", device),
        ("RDMA_QP_TIMEOUT", "12"),
        ("RDMA_QP_RETRY_COUNT", "2"),
        ("STARWIRE_VERBS_FALLBACK", "true"),
    ];
    env.extend(more);
    Task::try_start(name, "grpc++", 1, &env).map_err(|error| error.to_string())
}

/// A parameter server and a worker, each on a device with the given faults.
fn cluster(name: &str, ps_faults: &str, worker_faults: &str) -> (Task, Task) {
    let (ps_device, worker_device) = (format!("{name}-ps"), format!("{name}-worker"));
    fake_library::device(&ps_device, ps_faults);
    fake_library::device(&worker_device, worker_faults);
    let (ps, worker) = (task(PS, &ps_device, &[]).unwrap(), task(WORKER, &worker_device, &[]).unwrap());
    worker.knows(PS, &ps);
    (ps, worker)
}

fn metric(task: &Task, name: &str) -> u64 {
    let text = task.engine().metrics_text();
    let line = text.lines().find(|line| line.starts_with(&format!("starwire_{name}"))).expect(name);
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

fn ask(worker: &Task, size: usize) -> End {
    call(&worker.channel(PS), SEND_MUCH, size.to_string().as_bytes(), None)
}

fn assert_answered(end: &End, size: usize) {
    assert_eq!((end.code, end.message.as_str()), (0, ""));
    assert!(end.parts.concat() == vec![7u8; size]);
}

#[test]
fn a_healthy_pair_of_tasks_talks_over_queue_pairs() {
    let (ps, worker) = cluster("healthy", "", "");
    assert_answered(&ask(&worker, 3 << 20), 3 << 20);
    assert_eq!(metric(&worker, "verbs_connections_total"), 1);
    assert_eq!(metric(&worker, "verbs_fallbacks_total"), 0);
    eventually("the bytes are counted", || metric(&worker, "verbs_read_bytes_total") == 3 << 20);
    eventually("the bytes are counted", || metric(&ps, "verbs_offered_bytes_total") == 3 << 20);
    assert_eq!(metric(&worker, "copied_bytes_received_total"), 0);
}

#[test]
fn a_host_without_rdma_logs_it_and_uses_tcp_or_does_not_start() {
    for (spec, sentence) in [
        ("down", "is not active (state down)"),
        ("nogid", "has no RoCE v2 GID"),
        ("open_device@1+=1", "cannot open device"),
        ("create_comp_channel@1+=12", "ulimit -l"),
    ] {
        let device = format!("absent {spec}");
        fake_library::device(&device, spec);
        let refused = task(PS, &device, &[("STARWIRE_VERBS_FALLBACK", "false")]).err().unwrap();
        assert!(refused.contains(sentence) && refused.contains("STARWIRE_VERBS_FALLBACK"), "{refused}");
        let (ps, worker) = (task(PS, &device, &[]).unwrap(), task(WORKER, &device, &[]).unwrap());
        assert_eq!((ps.logged(sentence), ps.logged("using TCP")), (1, 1), "{spec}");
        worker.knows(PS, &ps);
        assert_answered(&ask(&worker, 100_000), 100_000);
        assert_eq!(metric(&worker, "verbs_connections_total"), 0);
    }
    let unknown = task(PS, "no such device", &[("STARWIRE_VERBS_FALLBACK", "false")]).err().unwrap();
    assert!(unknown.contains("no device no such device (RDMA_DEVICE), only fake0"), "{unknown}");
    let more = [("STARWIRE_VERBS_FALLBACK", "false"), ("STARWIRE_VERBS_LIBRARY", "/nonexistent.so")];
    let library = task(PS, "fake0", &more).err().unwrap();
    assert!(library.contains("cannot load /nonexistent.so"), "{library}");
    let more = [("STARWIRE_VERBS_FALLBACK", "false"), ("RDMA_GID_INDEX", "3")];
    let gid = task(PS, "fake0", &more).err().unwrap();
    assert!(gid.contains("has no GID 3 (RDMA_GID_INDEX)"), "{gid}");
    let more = [("STARWIRE_VERBS_FALLBACK", "false"), ("RDMA_DEVICE_PORT", "2")];
    let port = task(PS, "fake0", &more).err().unwrap();
    assert!(port.contains("has no port 2 (RDMA_DEVICE_PORT)"), "{port}");
}

#[test]
fn failures_while_connecting_fall_back_to_tcp() {
    let _reached = ["a connection falls back from RDMA to TCP", "a connection is made again without RDMA"]
        .map(starwire_marks::expect);
    for (name, ps_faults, worker_faults) in [
        ("no queue pair at the client", "", "create_qp@1+=12"),
        ("no queue pair at the server", "create_qp@1+=12", ""),
        ("no memory at the client", "", "reg_mr@1+=12"),
        ("no memory at the server", "reg_mr@1+=12", ""),
        ("no completion queue", "create_cq@1+=12", ""),
        ("no protection domain", "", "alloc_pd@1+=12"),
        ("the client cannot connect", "", "rtr@1+=110"),
        ("the server cannot connect", "rtr@1+=110", ""),
        ("the client cannot start", "", "rts@1+=22"),
        ("no buffers are taken", "", "post_recv@1+=12"),
        ("packets get lost", "", "unreachable"),
        ("answers get lost", "unreachable", ""),
        ("the first send fails", "", "send@1=12"),
    ] {
        let (ps, worker) = cluster(name, ps_faults, worker_faults);
        for _ in 0..3 {
            assert_answered(&ask(&worker, 300_000), 300_000);
        }
        assert_eq!(worker.logged("no RDMA to /job:ps/replica:0/task:0"), 1, "{name}");
        assert_eq!(metric(&worker, "verbs_read_bytes_total"), 0, "{name}");
        drop((ps, worker));
        assert_eq!(fake_library::alive(&format!("{name}-ps")), 0, "{name}");
        assert_eq!(fake_library::alive(&format!("{name}-worker")), 0, "{name}");
    }
}

#[test]
fn the_environment_sets_marking_mtu_and_retries() {
    let asked = [
        ("STARWIRE_VERBS_FALLBACK", "false"),
        ("RDMA_QP_PKEY_INDEX", "3"),
        ("RDMA_QP_SL", "5"),
        ("RDMA_TRAFFIC_CLASS", "106"),
        ("RDMA_QP_MTU", "512"),
        ("RDMA_QP_TIMEOUT", "13"),
        ("RDMA_QP_RETRY_COUNT", "4"),
    ];
    let wanted = "want-pkey=3,want-sl=5,want-class=106,want-mtu=2,want-timeout=13,want-retries=4";
    for (name, spec, works) in [
        ("as asked", wanted.to_owned(), true),
        ("no such key", wanted.replace("pkey=3", "pkey=0"), false),
        ("another level", wanted.replace("sl=5", "sl=0"), false),
        ("another class", wanted.replace("class=106", "class=0"), false),
        ("longer packets", wanted.replace("mtu=2", "mtu=3"), false),
        ("another patience", wanted.replace("timeout=13", "timeout=14"), false),
        ("more retries", wanted.replace("retries=4", "retries=7"), false),
    ] {
        fake_library::device(name, &spec);
        let (ps, worker) = (task(PS, name, &asked).unwrap(), task(WORKER, name, &asked).unwrap());
        worker.knows(PS, &ps);
        let end = ask(&worker, 100_000);
        assert_eq!(end.code == 0, works, "{name}: {}", end.message);
        assert!(works || end.message.contains("RDMA: the queue pair cannot"), "{name}: {}", end.message);
    }
}

#[test]
fn a_peer_without_rdma_gets_tcp_or_an_error() {
    fake_library::device("one-sided", "");
    let ps = Task::start(PS, &[("STARWIRE_UNIX", "off"), ("STARWIRE_TRANSPORT", "tcp")]);
    let worker = task(WORKER, "one-sided", &[]).unwrap();
    worker.knows(PS, &ps);
    assert_answered(&ask(&worker, 1000), 1000);
    assert_eq!(worker.logged("no RDMA to /job:ps/replica:0/task:0: /job:ps/replica:0/task:0 has none; using TCP"), 1);
    let strict = task(WORKER, "one-sided", &[("STARWIRE_VERBS_FALLBACK", "false")]).unwrap();
    strict.knows(PS, &ps);
    let end = ask(&strict, 1000);
    assert_eq!(end.code, 9, "{}", end.message);
    assert!(end.message.contains("RDMA"), "{}", end.message);
}

#[test]
fn memory_that_cannot_be_registered_costs_a_copy_and_nothing_else() {
    let (ps, worker) = cluster("late memlock", "reg_mr@4+=12", "reg_mr@4+=12");
    assert_answered(&ask(&worker, 3 << 20), 3 << 20);
    assert!(metric(&ps, "verbs_registration_failures_total") > 0);
    assert_eq!(metric(&worker, "verbs_connections_total"), 1);
}

/// Even if the device would retry the READ of the peer's offer without end.
#[test]
fn a_peer_that_dies_during_a_read_is_noticed() {
    let (mut ps, worker) = cluster("gone", "", "lost@1");
    let (_, waiter) = call_with(&worker.channel(PS), SEND_MUCH, b"300000", None, &Options::default());
    eventually("the READ is under way", || metric(&worker, "verbs_reads_total") == 1);
    assert!(!waiter.is_done());
    ps.stop();
    let end = waiter.wait();
    assert_eq!(end.code, 14, "{}", end.message);
}

#[test]
fn a_failed_queue_pair_ends_its_calls_and_is_replaced() {
    for (name, ps_faults, worker_faults) in [
        ("a read is refused", "", "read@1=10"),
        ("the peer does not answer", "send@2=12", ""),
        ("the queue overflows", "cq_err@3=1", ""),
        ("the buffer is too short", "", "send@3=9"),
        ("no buffer is posted", "", "send@3=13"),
        ("no work request is taken", "", "post_send@3=12"),
        ("the device fails", "", "fatal@3=1"),
    ] {
        let (_ps, worker) = cluster(name, ps_faults, worker_faults);
        let first = ask(&worker, 300_000);
        if first.code != 0 {
            assert_eq!(first.code, 14, "{name}: {}", first.message);
            assert!(first.message.contains("lost the connection to"), "{name}: {}", first.message);
        }
        eventually(name, || ask(&worker, 300_000).code == 0);
        assert!(metric(&worker, "losses_total") >= 1, "{name}");
        assert!(metric(&worker, "verbs_connections_total") >= 2, "{name}: back on a queue pair");
    }
}
