//! TensorFlow's gRPC inside the connections of tasks that have a secret or TLS.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

use starwire_protocol::tunnel::{MOST_CARRIED, Request, TUNNEL, write};

use super::harness::*;
use super::one_port::{CORE_SETTINGS, OnePort, PREFACE, try_start, try_start_with};
use super::tls::neighbours;
use super::{PS, WORKER, count, pattern};

const SECRET: (&str, &str) = ("STARWIRE_SECRET", "a-secret-of-enough-length");

fn pair(env: &[(&str, &str)]) -> (OnePort, OnePort) {
    let env = [&[SECRET], env].concat();
    let ps = try_start(PS, &env, "127.0.0.1:0").unwrap();
    let worker = try_start_with(WORKER, &env, ["127.0.0.1:0", &ps.address.to_string()]).unwrap();
    (ps, worker)
}

fn tunnel_address(from: &OnePort, to: &OnePort) -> SocketAddr {
    from.task.engine().tunnel_address(&to.address.to_string()).unwrap().unwrap()
}

fn connect(at: SocketAddr) -> TcpStream {
    let client = TcpStream::connect(at).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client
}

/// Bytes in both directions at once, then both ends.
fn talk(mut client: TcpStream, mut server: UnixStream) {
    let bytes = pattern(3 << 20, 3);
    let (mut up, mut down) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| up.write_all(&bytes).unwrap());
        scope.spawn(|| down.write_all(&bytes).unwrap());
        let mut seen = vec![0; bytes.len()];
        server.read_exact(&mut seen).unwrap();
        assert!(seen == bytes);
        client.read_exact(&mut seen).unwrap();
        assert!(seen == bytes);
    });
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(server.read(&mut [0; 1]).unwrap(), 0, "the server learns that no more follows");
    server.write_all(b"the last word").unwrap();
    drop((server, down));
    let mut last = Vec::new();
    client.read_to_end(&mut last).unwrap();
    assert_eq!(last, b"the last word");
}

#[test]
fn streams_reach_tensorflows_server() {
    for unix in ["auto", "off"] {
        let (ps, worker) = pair(&[("STARWIRE_UNIX", unix)]);
        let at = tunnel_address(&worker, &ps);
        assert!(at.ip().is_loopback());
        assert_eq!(tunnel_address(&worker, &ps), at, "one for each task");
        let clients: Vec<_> = (0..3).map(|_| (connect(at), ps.accepted())).collect();
        for (client, server) in clients {
            talk(client, server);
        }
        assert_eq!(count(&ps.task, "starwire_grpc_connections_total"), 3);
    }
}

#[test]
fn and_over_tls() {
    let (ps, worker, _files) = neighbours();
    talk(connect(tunnel_address(&worker, &ps)), ps.accepted());
}

#[test]
fn the_own_server_is_reached_directly() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ps = try_start(PS, &[SECRET], &format!("127.0.0.1:{free}")).unwrap();
    for name in ["127.0.0.1", "localhost"] {
        let at = ps.task.engine().tunnel_address(&format!("{name}:{free}")).unwrap().unwrap();
        talk(connect(at), ps.accepted());
    }
}

#[test]
fn without_proof_or_unauthenticated_there_is_no_tunnel() {
    let ps = try_start(PS, &[], "127.0.0.1:0").unwrap();
    let worker = try_start_with(WORKER, &[], ["127.0.0.1:0", &ps.address.to_string()]).unwrap();
    assert_eq!(worker.task.engine().tunnel_address(&ps.address.to_string()).unwrap(), None);
    let (_ps, worker) = pair(&[]);
    assert_eq!(worker.task.engine().tunnel_address("127.0.0.1:9").unwrap(), None);
}

#[test]
fn a_closed_server_says_so_to_the_client() {
    let (ps, worker) = pair(&[("STARWIRE_GRPC", "off")]);
    let mut client = connect(tunnel_address(&worker, &ps));
    client.write_all(&[PREFACE, CORE_SETTINGS, &[0, 0, 1, 1, 4, 0, 0, 0, 1, b'x']].concat()).unwrap();
    let mut seen = Vec::new();
    while !seen.windows(13).any(|window| window == b"STARWIRE_GRPC") {
        let mut more = [0; 500];
        let n = client.read(&mut more).unwrap();
        assert_ne!(n, 0, "{}", String::from_utf8_lossy(&seen));
        seen.extend(&more[..n]);
    }
}

#[test]
fn an_end_of_either_task_ends_its_streams() {
    let (mut ps, mut worker) = pair(&[]);
    let at = tunnel_address(&worker, &ps);
    let (client, mut server) = (connect(at), ps.accepted());
    worker.task.stop();
    assert_eq!(server.read(&mut [0; 1]).unwrap(), 0);
    drop(client);
    assert_eq!(TcpStream::connect(at).unwrap_err().kind(), ErrorKind::ConnectionRefused);

    worker = try_start_with(WORKER, &[SECRET], ["127.0.0.1:0", &ps.address.to_string()]).unwrap();
    let (mut client, _server) = (connect(tunnel_address(&worker, &ps)), ps.accepted());
    ps.task.stop();
    assert_eq!(client.read(&mut [0; 1]).unwrap_or(0), 0);
    // The next ends at once: a client of gRPC tries again.
    assert_eq!(connect(tunnel_address(&worker, &ps)).read(&mut [0; 1]).unwrap_or(0), 0);
}

#[test]
fn a_client_that_goes_away_takes_its_stream_with_it() {
    let (ps, worker) = pair(&[]);
    for _ in 0..50 {
        let (client, mut server) = (connect(tunnel_address(&worker, &ps)), ps.accepted());
        drop(client);
        assert_eq!(server.read(&mut [0; 1]).unwrap(), 0);
    }
}

#[test]
fn nonsense_is_refused() {
    let (ps, worker) = pair(&[]);
    let channel = worker.task.engine().channel(PS, &ps.address.to_string()).unwrap();
    let ask = |number, request| call(&channel, TUNNEL, &write(number, request), None);
    let server = |number| {
        assert_eq!(ask(number, Request::Open).code, 0);
        ps.accepted()
    };
    assert_eq!(call(&channel, TUNNEL, b"nonsense", None).code, 3);
    assert_eq!(ask(1, Request::Receive).code, 14, "it was not opened");
    let first = server(1);
    assert_eq!(ask(1, Request::Open).code, 3, "it is open");
    // Of what comes before the last was answered, the stream keeps a little.
    let open = write(1, Request::Receive);
    let waiters: Vec<_> = (0..4).map(|_| call_with(&channel, TUNNEL, &open, None, &Options::default()).1).collect();
    for waiter in waiters {
        assert_eq!(waiter.wait().code, 14);
    }
    drop(first);
    // A server that does not read holds up nobody else.
    let _idle = server(2);
    let bytes = vec![7; MOST_CARRIED];
    let send = write(2, Request::Send(&bytes));
    let waiters: Vec<_> = (0..100).map(|_| call_with(&channel, TUNNEL, &send, None, &Options::default()).1).collect();
    assert!(waiters.iter().filter(|waiter| waiter.wait().code == 14).count() > 50);
    let many: Vec<_> = (3..67).map(server).collect();
    assert_eq!(ask(100, Request::Open).code, 8);
    assert_eq!(ask(3, Request::Close).code, 0);
    drop(server(101));
    drop(many);
    assert_eq!(call(&channel, ECHO, b"still here", None).meta, b"still here");
}
