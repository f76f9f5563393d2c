//! The control service and TensorFlow's gRPC over TLS.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustls::{ClientConfig, ClientConnection, StreamOwned};
use starwire_engine::tls::{Credentials, Files, Names, Tls};

use super::*;
use crate::one_port::{CORE_SETTINGS, PREFACE};

const METRICS: &str = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

pub fn credentials(identity: &Identity) -> Arc<Credentials> {
    let file = |name: &str| identity.folder().join(name);
    let files = Files { certificate: file("cert.pem"), key: file("key.pem"), authorities: file("ca.pem") };
    let tls = Tls::load(files, Names::parse("{host}").unwrap()).unwrap();
    tls.current(|_, _| {})
}

pub fn config(identity: &Identity, alpn: &[&[u8]]) -> Arc<ClientConfig> {
    let mut config = (*credentials(identity).http_client).clone();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    Arc::new(config)
}

fn open(config: Arc<ClientConfig>, to: &OnePort) -> StreamOwned<ClientConnection, TcpStream> {
    let connection = ClientConnection::new(config, std::net::IpAddr::from([127, 0, 0, 1]).into()).unwrap();
    StreamOwned::new(connection, to.connect())
}

/// The answer, or why there is none.
fn get(config: Arc<ClientConfig>, to: &OnePort, request: &str) -> Result<String, String> {
    let mut stream = open(config, to);
    stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if answer.is_empty() => Err(error.to_string()),
        _ => Ok(String::from_utf8_lossy(&answer).into_owned()),
    }
}

fn plain(to: &OnePort, request: &str) -> String {
    let mut stream = to.connect();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// No certificate of its own.
fn anonymous(of: &Identity) -> Arc<ClientConfig> {
    let mut config = (*config(of, &[b"http/1.1"])).clone();
    config.client_auth_cert_resolver = Arc::new(Nothing);
    Arc::new(config)
}

#[derive(Debug)]
struct Nothing;

impl rustls::client::ResolvesClientCert for Nothing {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<rustls::sign::CertifiedKey>> {
        None
    }
    fn has_certs(&self) -> bool {
        false
    }
}

#[test]
fn metrics_are_for_those_with_a_certificate() {
    let authority = Authority::new("test");
    let (own, scraper) = (authority.identity(PS_NAME), authority.identity("prometheus.example"));
    for (control, by_tls, by_plain) in
        [("auto", "HTTP/1.1 200", "HTTP/1.1 200"), ("on", "HTTP/1.1 200", "HTTP/1.1 200"), ("off", "", "HTTP/1.1 403")]
    {
        let ps = start(PS, &own, &[NAMES, ("STARWIRE_CONTROL", control)]);
        for alpn in [&[&b"http/1.1"[..]][..], &[&b"h2"[..], b"http/1.1"][1..], &[]] {
            let answer = get(config(&scraper, alpn), &ps, METRICS).unwrap_or_default();
            assert!(answer.starts_with(by_tls), "{control}: {answer}");
            assert_eq!(
                answer.contains("starwire_uptime") || answer.contains("starwire_build_info"),
                !by_tls.is_empty()
            );
        }
        let answer = plain(&ps, METRICS);
        let ends = answer
            .lines()
            .find_map(|line| line.strip_prefix("starwire_tls_certificate_expiry_seconds{")?.split(' ').nth(1));
        let left = |at: u64| at.abs_diff(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs());
        assert_eq!(ends.is_some(), control != "off");
        assert!(ends.is_none_or(|at| left(at.parse().unwrap()).abs_diff(3600) < 100), "{ends:?}");
        assert!(answer.starts_with(by_plain), "{control}: {answer}");
        let error = get(anonymous(&own), &ps, METRICS).unwrap_err();
        assert!(error.contains("CertificateRequired"), "{error}");
        // One line for each host.
        let line = "the TLS handshake of an HTTP client failed: the peer presented no certificate";
        let expected = usize::from(control != "off");
        eventually("the line in the log", || ps.task.logged(line) >= expected);
        let lines = ps.task.seen.lines.lock().unwrap().clone();
        assert_eq!(ps.task.logged(line), expected, "{lines:?}");
    }
}

#[test]
fn only_tasks_reach_tensorflow() {
    let authority = Authority::new("test");
    let (own, other) = (authority.identity(PS_NAME), authority.identity("prometheus.example"));
    let hello = [PREFACE, CORE_SETTINGS].concat();
    for (grpc, member, foreign, without) in
        [("auto", true, false, false), ("on", true, true, true), ("off", false, false, false)]
    {
        let ps = start(PS, &own, &[NAMES, ("STARWIRE_GRPC", grpc)]);
        // In a test, the answer of TensorFlow's server; else frames that deny the request.
        let check = |stream: &mut dyn ReadWrite, passes: bool, who: &str| {
            stream.write_all(&hello).unwrap();
            if passes {
                let mut server = ps.accepted();
                let mut first = vec![0; hello.len()];
                server.read_exact(&mut first).unwrap();
                assert_eq!(first, hello);
                server.write_all(b"answer").unwrap();
                let mut answer = [0; 6];
                stream.read_exact(&mut answer).unwrap();
                assert_eq!(&answer, b"answer", "{who}, {grpc}");
                let bytes = pattern(3 << 20, 9);
                let echo = bytes.clone();
                let reader = std::thread::spawn(move || {
                    let mut seen = vec![0; echo.len()];
                    server.read_exact(&mut seen).unwrap();
                    assert!(seen == echo);
                });
                stream.write_all(&bytes).unwrap();
                stream.flush().unwrap();
                reader.join().unwrap();
            } else {
                // A request with an empty block of headers.
                stream.write_all(&[0, 0, 0, 1, 5, 0, 0, 0, 1]).unwrap();
                let mut seen = Vec::new();
                let mut buffer = [0; 1000];
                while !String::from_utf8_lossy(&seen).contains("TensorFlow's gRPC is") {
                    let n = stream.read(&mut buffer).unwrap();
                    assert!(n > 0, "{who}, {grpc}: {seen:?}");
                    seen.extend_from_slice(&buffer[..n]);
                }
            }
        };
        check(&mut open(config(&own, &[b"h2"]), &ps), member, "a task");
        check(&mut open(config(&other, &[b"h2"]), &ps), foreign, "another certificate");
        check(&mut ps.connect(), without, "no TLS");
    }
}

trait ReadWrite: Read + Write {}
impl<T: Read + Write> ReadWrite for T {}

#[test]
fn hellos_of_http_clients_get_a_part_of_the_time() {
    let authority = Authority::new("test");
    let (own, scraper) = (authority.identity(PS_NAME), authority.identity("prometheus.example"));
    let ps = start(PS, &own, &[NAMES]);
    let hello = hellos::hello(&scraper, &[b"h2"]);
    eventually("waiting", || {
        let mut raw = ps.connect();
        raw.write_all(&hello).unwrap();
        // Each gets its answer, and ends there.
        assert!(matches!(raw.read(&mut [0; 64]), Ok(1..)));
        count(&ps.task, "starwire_tls_handshakes_delayed_total") > 0
    });
    let answer = get(config(&scraper, &[b"http/1.1"]), &ps, METRICS).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}
