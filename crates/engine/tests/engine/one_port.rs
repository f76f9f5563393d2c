//! Tasks with one port: data, HTTP and TensorFlow's gRPC on the port of the ClusterSpec.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::harness::*;
use super::{PS, WORKER, pattern};

const ONE: (&str, &str) = ("STARWIRE_PORTS", "one");
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The first frame of gRPC's C core: its own setting, and nothing else.
pub const CORE_SETTINGS: &[u8] = &[0, 0, 6, 4, 0, 0, 0, 0, 0, 0xfe, 3, 0, 0, 0, 1];

pub struct OnePort {
    pub task: Task,
    pub address: SocketAddr,
    /// The connections of TensorFlow's server.
    grpc: mpsc::Receiver<UnixStream>,
    grpc_path: String,
}

pub fn try_start(name: &str, env: &[(&str, &str)], at: &str) -> Result<OnePort, String> {
    try_start_with(name, env, [at, ELSEWHERE])
}

/// With these addresses of its own and of the parameter server in the ClusterSpec.
pub fn try_start_with(name: &str, env: &[(&str, &str)], addresses: [&str; 2]) -> Result<OnePort, String> {
    let (sender, grpc) = mpsc::channel();
    let (mut number, mut grpc_path) = (0, String::new());
    let task = Task::start_behind(name, "grpc++", 1, &[&[ONE], env].concat(), addresses, |port| {
        number = port.number();
        grpc_path = port.grpc_address().strip_prefix("unix:").unwrap().to_owned();
        let listener = UnixListener::bind(&grpc_path).unwrap();
        std::thread::spawn(move || listener.incoming().map_while(Result::ok).all(|stream| sender.send(stream).is_ok()));
    });
    let host = addresses[0].rsplit_once(':').unwrap().0.replace("localhost", "127.0.0.1");
    let address = format!("{host}:{number}").parse().unwrap();
    task.map(|task| OnePort { task, address, grpc, grpc_path }).map_err(|error| error.to_string())
}

fn start(name: &str, env: &[(&str, &str)]) -> OnePort {
    try_start(name, env, "127.0.0.1:0").unwrap()
}

impl OnePort {
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    pub fn accepted(&self) -> UnixStream {
        let stream = self.grpc.recv_timeout(PATIENCE).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// A client of TensorFlow's gRPC, and the server's end.
    fn passed_on(&self) -> (TcpStream, UnixStream) {
        let mut client = self.connect();
        client.write_all(&[PREFACE, CORE_SETTINGS].concat()).unwrap();
        let mut server = self.accepted();
        let mut first = vec![0; PREFACE.len() + CORE_SETTINGS.len()];
        server.read_exact(&mut first).unwrap();
        assert_eq!(first, [PREFACE, CORE_SETTINGS].concat());
        (client, server)
    }
}

#[test]
fn the_cluster_spec_has_the_data_address() {
    for (at, unix) in [("127.0.0.1:0", "auto"), ("127.0.0.1:0", "off"), ("[::1]:0", "auto"), ("0.0.0.0:0", "auto")] {
        let ps = try_start(PS, &[("STARWIRE_UNIX", unix)], at).unwrap();
        let worker = start(WORKER, &[("STARWIRE_UNIX", unix)]);
        let reached_at = ps.address.to_string().replace("0.0.0.0", "127.0.0.1");
        let channel = worker.task.engine().channel(PS, &reached_at).unwrap();
        let end = call(&channel, ECHO, b"hello", None);
        assert_eq!((end.code, &end.meta[..]), (0, &b"hello"[..]), "{}", end.message);
        assert_eq!(ps.task.logged("whoever can reach 0.0.0.0:"), usize::from(at.starts_with("0.0.0.0")));
        // Tasks of one host still meet over a unix socket.
        let expected = if unix == "off" { 0 } else { 2 };
        assert_eq!(unix_sockets(&ps.task), expected, "{at}: the listener and the accepted connection");
    }
}

#[test]
fn a_peer_with_two_ports_or_none_of_ours_is_named() {
    let worker = start(WORKER, &[]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // gRPC's server speaks first.
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(CORE_SETTINGS).unwrap();
        let _ = stream.read(&mut [0; 1000]);
    });
    let end = call(&worker.task.engine().channel(PS, &address).unwrap(), ECHO, b"", None);
    assert_eq!(end.code, 9, "{}", end.message);
    assert!(end.message.contains(&address) && end.message.contains("one port"), "{}", end.message);
    other.join().unwrap();
}

#[test]
fn clients_of_tensorflow_are_passed_on_in_both_directions() {
    let ps = start(PS, &[]);
    let (mut client, mut server) = ps.passed_on();
    let bytes = pattern(5 << 20, 3);
    for _ in 0..2 {
        let (to_server, to_client) = (bytes.clone(), bytes.clone());
        let (mut writer, mut answerer) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        let threads = [
            std::thread::spawn(move || writer.write_all(&to_server).unwrap()),
            std::thread::spawn(move || answerer.write_all(&to_client).unwrap()),
        ];
        let mut seen = vec![0; bytes.len()];
        server.read_exact(&mut seen).unwrap();
        assert!(seen == bytes);
        client.read_exact(&mut seen).unwrap();
        assert!(seen == bytes);
        for thread in threads {
            thread.join().unwrap();
        }
    }
    // Each side learns that the other has ended.
    drop(client);
    assert_eq!(server.read(&mut [0; 1]).unwrap(), 0);
    let (mut client, server) = ps.passed_on();
    drop(server);
    assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
    let metrics = ps.task.engine().metrics_text();
    assert!(
        metrics.lines().any(|l| l.starts_with("starwire_grpc_connections_total") && l.ends_with(" 2")),
        "{metrics}"
    );
}

#[test]
fn bytes_that_come_one_by_one_are_sorted_as_well() {
    let ps = start(PS, &[]);
    let mut client = ps.connect();
    client.set_nodelay(true).unwrap();
    for byte in [PREFACE, CORE_SETTINGS].concat() {
        client.write_all(&[byte]).unwrap();
        std::thread::sleep(Duration::from_micros(300));
    }
    ps.accepted();
}

#[test]
fn a_slow_reader_stops_its_writer() {
    let ps = start(PS, &[]);
    let (client, mut server) = ps.passed_on();
    server.set_nonblocking(true).unwrap();
    // What fits into the buffers of both sockets, and no more than 64 KB besides.
    let (mut sent, chunk) = (0u64, vec![0; 1 << 16]);
    let mut quiet = 0;
    while quiet < 20 {
        match server.write(&chunk) {
            Ok(n) => (sent, quiet) = (sent + n as u64, 0),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                quiet += 1;
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => panic!("{error}"),
        }
        assert!(sent < 64 << 20, "nothing holds the writer back");
    }
    drop(client);
}

#[test]
fn the_control_service_has_the_other_clients() {
    let ps = start(PS, &[]);
    let mut client = ps.connect();
    client.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("ok\n"), "{answer}");
    // HTTP/2 without gRPC's setting: the control service answers with its own settings.
    let mut client = ps.connect();
    client.write_all(&[PREFACE, &[0, 0, 0, 4, 0, 0, 0, 0, 0]].concat()).unwrap();
    let mut header = [0; 9];
    client.read_exact(&mut header).unwrap();
    assert_eq!(header[3], 4);
    assert!(ps.grpc.try_recv().is_err());
}

#[test]
fn with_a_secret_grpc_is_refused_unless_it_is_allowed() {
    let secret = ("STARWIRE_SECRET", "a secret of some length");
    for (env, is_open) in [
        (vec![secret], false),
        (vec![secret, ("STARWIRE_GRPC", "on")], true),
        (vec![("STARWIRE_GRPC", "off")], false),
        (vec![], true),
    ] {
        let ps = start(PS, &env);
        if is_open {
            ps.passed_on();
            continue;
        }
        let mut client = ps.connect();
        client.write_all(&[PREFACE, CORE_SETTINGS].concat()).unwrap();
        client.write_all(&[0, 0, 1, 1, 4, 0, 0, 0, 1, 0x82]).unwrap();
        let mut answer = Vec::new();
        while !String::from_utf8_lossy(&answer).contains("STARWIRE_GRPC=on opens it") {
            let mut some = [0; 1000];
            let n = client.read(&mut some).unwrap();
            assert!(n > 0, "{answer:?}");
            answer.extend_from_slice(&some[..n]);
        }
        assert!(ps.grpc.try_recv().is_err());
        eventually("the log line", || ps.task.logged("TensorFlow's gRPC is closed on this port") == 1);
    }
}

#[test]
fn no_name_leads_to_tensorflows_socket() {
    let ps = start(PS, &[]);
    assert_eq!(UnixStream::connect(&ps.grpc_path).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(!std::path::Path::new(&ps.grpc_path).parent().unwrap().exists());
    ps.passed_on();
}

#[test]
fn a_stop_ends_what_is_passed_on_and_frees_the_port() {
    let mut ps = start(PS, &[]);
    let (mut client, _server) = ps.passed_on();
    ps.task.stop();
    assert_eq!(client.read(&mut [0; 1]).unwrap_or(0), 0);
    let again = try_start(PS, &[], &ps.address.to_string()).unwrap();
    again.passed_on();
}

#[test]
fn another_port_than_the_only_one_is_an_error() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let error = try_start(PS, &[], &address).err().unwrap();
    assert!(error.contains(&address) && error.contains("another process") && error.contains("ClusterSpec"), "{error}");
    let error = try_start(PS, &[("STARWIRE_BIND", "127.0.0.1:7")], "127.0.0.1:8").err().unwrap();
    assert!(error.contains("STARWIRE_PORTS and STARWIRE_BIND conflict: port 7 was chosen"), "{error}");
}

/// Its name can be guessed, so a process of another user may have it.
#[test]
fn a_socket_that_another_process_has_is_done_without() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = free.local_addr().unwrap().to_string();
    let name = format!("starwire-{at}");
    let _taken = UnixListener::bind_addr(&UnixAddr::from_abstract_name(&name).unwrap()).unwrap();
    drop(free);
    let ps = try_start(PS, &[("STARWIRE_UNIX", "auto")], &at).unwrap();
    let line = format!("tasks on this host will connect over TCP: cannot listen on unix:@{name}: ");
    assert_eq!(ps.task.logged(&line), 1);
}

/// Where an address belongs to several hosts, the unix socket derived from it may be another server's.
#[test]
fn a_unix_socket_of_another_server_is_passed_over() {
    for env in [&[("STARWIRE_UNIX", "auto")][..], &[("STARWIRE_UNIX", "auto"), ("STARWIRE_SECRET", "0123456789abcdef")]]
    {
        let other = start("/job:ps/replica:0/task:1", env);
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = free.local_addr().unwrap().to_string();
        let name = UnixAddr::from_abstract_name(format!("starwire-{at}")).unwrap();
        let taken = UnixListener::bind_addr(&name).unwrap();
        let (to, count) = (other.address, Arc::new(AtomicUsize::new(0)));
        let counted = count.clone();
        std::thread::spawn(move || {
            for client in taken.incoming().map_while(Result::ok) {
                counted.fetch_add(1, Ordering::Relaxed);
                let server = TcpStream::connect(to).unwrap();
                let (mut from, mut back) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut from, &mut &server).map(drop));
                std::thread::spawn(move || std::io::copy(&mut back, &mut &client).map(drop));
            }
        });
        drop(free);
        let ps = try_start(PS, env, &at).unwrap();
        let worker = start(WORKER, env);
        let channel = worker.task.engine().channel(PS, &at).unwrap();
        let end = call(&channel, ECHO, b"is it you", None);
        assert_eq!(end.meta, b"is it you", "{}", end.message);
        assert_eq!(count.load(Ordering::Relaxed), 1, "the socket was tried");
        assert_eq!(crate::count(&ps.task, "starwire_connections_in"), 1);
        assert_eq!(crate::count(&other.task, "starwire_connections_in"), 0);
    }
}
