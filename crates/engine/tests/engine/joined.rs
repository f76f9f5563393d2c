//! Tasks that are not in a server's ClusterSpec: they join, are reached, leave, and cannot take another's name.

use super::harness::*;
use super::secret::Relay;
use super::{PS, count};

const JOIN: (&str, &str) = ("STARWIRE_JOIN", "worker:3,ps:9");
const TCP: (&str, &str) = ("STARWIRE_UNIX", "off");
const SECRET: (&str, &str) = ("STARWIRE_SECRET", "a-secret-of-enough-length");

type Env = [(&'static str, &'static str)];

fn server(env: &Env) -> Task {
    Task::start(PS, &[&[JOIN], env].concat())
}

fn worker(number: u32) -> String {
    format!("/job:worker/replica:0/task:{number}")
}

/// A task that knows the server, which has only its word for where it is.
fn newcomer(name: &str, incarnation: u64, env: &Env, ps: &Task) -> Task {
    // Somebody else may take the port meanwhile.
    let start = || Task::try_start_at(name, incarnation, env, &format!("127.0.0.1:{}", free_port()));
    let task = (0..10).find_map(|_| start().ok()).expect("one of ten ports is free");
    task.knows(PS, ps);
    task
}

/// Connects to the server.
fn joins(task: &Task) -> End {
    call(&task.channel(PS), ECHO, b"", None)
}

fn reaches(ps: &Task, name: &str) -> End {
    call(&ps.engine().channel_to_joined(name).unwrap(), ECHO, b"back", None)
}

fn is_known(ps: &Task, name: &str) -> bool {
    ps.engine().channel_to_joined(name).is_ok()
}

#[test]
fn a_server_reaches_a_task_until_it_leaves() {
    for env in [&[][..], &[TCP], &[SECRET], &[SECRET, TCP]] {
        let ps = server(env);
        // Each time at another address.
        for incarnation in 1..4 {
            assert!(!is_known(&ps, &worker(1)));
            let task = newcomer(&worker(1), incarnation, env, &ps);
            assert_eq!(joins(&task).code, 0);
            let channel = ps.engine().channel_to_joined(&worker(1)).unwrap();
            assert_eq!(call(&channel, ECHO, b"back", None).meta, b"back");
            // A request that it never answers ends with it.
            let waits = call_with(&channel, NEVER, b"", None, &Options::default()).1;
            eventually("the request", || task.seen.never.lock().unwrap().len() == 1);
            drop(task);
            assert_eq!(waits.wait().code, 14);
            eventually("the end", || !is_known(&ps, &worker(1)));
            assert_eq!(call(&channel, ECHO, b"", None).code, 14);
        }
        assert_eq!(count(&ps, "starwire_tasks_joined_total"), 3);
        assert_eq!(count(&ps, "starwire_tasks_left_total"), 3);
        assert_eq!((ps.logged("task:1 at 127.0.0.1:"), ps.logged(" left (")), (2, 1), "once a minute");
    }
}

#[test]
fn a_task_that_comes_back_is_reached_as_before() {
    let ps = server(&[TCP]);
    let relay = Relay::new(ps.address());
    let task = newcomer(&worker(1), 1, &[TCP], &ps);
    task.finds(PS, format!("127.0.0.1:{}", relay.port));
    assert_eq!(joins(&task).code, 0);
    let channel = ps.engine().channel_to_joined(&worker(1)).unwrap();
    // Its connections are cut.
    relay.set(None);
    eventually("the end", || !is_known(&ps, &worker(1)));
    eventually("the task notices", || count(&task, "starwire_losses_total") == 1);
    assert_eq!(joins(&task).code, 0);
    assert_eq!(call(&channel, ECHO, b"back", None).meta, b"back");
    drop(task);
    eventually("the end", || !is_known(&ps, &worker(1)));
    // At another address.
    let task = newcomer(&worker(1), 2, &[TCP], &ps);
    assert_eq!(joins(&task).code, 0);
    assert_eq!(reaches(&ps, &worker(1)).meta, b"back");
    let end = call(&channel, ECHO, b"", None);
    assert!(end.code == 14 && end.message.contains("the task has left"), "{end:?}");
}

#[test]
fn only_names_on_the_list_join() {
    let ps = server(&[]);
    for name in [&worker(3), "/job:evaluator/replica:0/task:0", "/job:worker/replica:0/task:01"] {
        let end = joins(&newcomer(name, 1, &[], &ps));
        assert_eq!(end.code, 9, "{end:?}");
        let why =
            format!("{name} cannot join: it is not in the ClusterSpec of {PS}, whose STARWIRE_JOIN is worker:3,ps:9");
        assert!(end.message.contains(&why), "{end:?}");
        assert!(!is_known(&ps, name));
    }
    assert_eq!(count(&ps, "starwire_tasks_joined_total"), 0);
    // Without the list, tasks connect, but nobody connects to them.
    let ps = Task::start(PS, &[]);
    let task = newcomer(&worker(1), 1, &[], &ps);
    assert_eq!(joins(&task).code, 0);
    assert!(!is_known(&ps, &worker(1)));
}

#[test]
fn nobody_replaces_a_task() {
    let ps = server(&[]);
    let first = newcomer(&worker(1), 1, &[], &ps);
    assert_eq!(joins(&first).code, 0);
    let second = newcomer(&worker(1), 2, &[], &ps);
    let end = joins(&second);
    assert!(end.code == 9 && end.message.contains("has joined and is still connected"), "{end:?}");
    assert_eq!(reaches(&ps, &worker(1)).meta, b"back");
    // The name of a task of the ClusterSpec is no use either, even if it is on the list.
    let false_ps = newcomer(PS, 3, &[], &ps);
    assert_eq!(joins(&false_ps).code, 0);
    assert!(!is_known(&ps, PS));
    drop(first);
    eventually("the end", || joins(&second).code == 0);
    assert_eq!(reaches(&ps, &worker(1)).meta, b"back");
}

#[test]
fn an_address_leads_only_to_the_task_that_gave_it() {
    for env in [&[TCP][..], &[TCP, SECRET]] {
        let ps = server(env);
        let at = |address| [env, &[("STARWIRE_BIND", address)]].concat();
        let honest = newcomer(&worker(0), 1, &at("127.0.0.1"), &ps);
        assert_eq!(joins(&honest).code, 0);
        // It listens elsewhere, and says that it is where the other one is.
        let liar = Task::start_at(&worker(1), 2, &at("127.0.0.2"), &honest.address());
        liar.knows(PS, &ps);
        assert_eq!(joins(&liar).code, 0);
        let end = reaches(&ps, &worker(1));
        assert!(end.code == 9 && end.message.contains(&format!("but found {}", worker(0))), "{end:?}");
        assert_eq!(reaches(&ps, &worker(0)).meta, b"back");
    }
    let ps = server(&[]);
    let nowhere = Task::start_at(&worker(1), 1, &[], "127.0.0.1:0");
    nowhere.knows(PS, &ps);
    let end = joins(&nowhere);
    assert!(end.code == 9 && end.message.contains("nobody can connect to its address, 127.0.0.1:0"), "{end:?}");
}
