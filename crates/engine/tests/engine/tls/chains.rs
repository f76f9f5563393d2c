//! Chains of certificates that are made to be slow to verify.

use std::sync::atomic::AtomicUsize;

use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
use rustls::pki_types::{
    AlgorithmIdentifier, CertificateDer, InvalidSignature, PrivateKeyDer, PrivatePkcs8KeyDer,
    SignatureVerificationAlgorithm, UnixTime,
};
use rustls::server::{NoClientAuth, ServerConnection};
use rustls::{ClientConfig, ClientConnection, ServerConfig};

use super::*;

/// Certificates of CAs that all have one name, as both subject and issuer, and different keys.
fn namesakes(number: usize) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(rcgen::DnType::CommonName, "nobody");
    let own = KeyPair::generate().unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(own.serialize_der()));
    let mut chain = vec![params.self_signed(&own).unwrap().der().clone()];
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    for _ in 0..number {
        chain.push(params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone());
    }
    (chain, key)
}

/// The client of this identity, with another chain.
fn client_with(
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
    of: &ClientConfig,
) -> Arc<ClientConfig> {
    let key = of.crypto_provider().key_provider.load_private_key(key.clone_key()).unwrap();
    let certified = rustls::sign::CertifiedKey::new(chain.to_vec(), key);
    let mut config = of.clone();
    config.client_auth_cert_resolver = Arc::new(rustls::sign::SingleCertAndKey::from(certified));
    Arc::new(config)
}

/// How the handshake ends for a client.
fn refusal(config: Arc<ClientConfig>, at: &OnePort) -> String {
    let name = std::net::IpAddr::from([127, 0, 0, 1]).into();
    let mut client = ClientConnection::new(config, name).unwrap();
    let mut raw = at.connect();
    while client.is_handshaking() {
        client.complete_io(&mut raw).unwrap();
    }
    client.complete_io(&mut raw).map_or_else(|error| error.to_string(), |_| "accepted".to_owned())
}

#[test]
fn a_chain_that_is_slow_to_verify_is_refused_at_once() {
    let (chain, key) = namesakes(10);
    for (alpn, line) in
        [(&b"starwire/2"[..], "dropped a connection"), (b"h2", "the TLS handshake of an HTTP client failed")]
    {
        let (ps, worker, files) = pair(&[("STARWIRE_REACTORS", "2")]);
        let open = channel(&worker, &ps);
        assert_eq!(call(&open, ECHO, b"hello", None).meta, b"hello");
        let config = client_with(&chain, &key, &http::config(&files[1], &[alpn]));
        for _ in 0..8 {
            let end = refusal(config.clone(), &ps);
            assert!(end.contains("CertificateUnknown"), "{end}");
            assert_eq!(call(&open, ECHO, b"hello", None).meta, b"hello");
        }
        let why = "the peer's certificate is refused: 10 certificates of intermediate CAs come with it";
        eventually("the line in the log", || ps.task.logged(why) > 0);
        assert_eq!(ps.task.logged(line), 1);
        let newcomer = start(WORKER, &files[1], &[TCP, NAMES]);
        assert_eq!(call(&channel(&newcomer, &ps), ECHO, b"let me in", None).meta, b"let me in");
    }
}

#[test]
fn chains_may_have_four_intermediate_authorities() {
    let authority = Authority::new("test");
    for (number, refused) in [(4, false), (5, true)] {
        let (certificate, key) = authority.issue(PS_NAME, LONG);
        // Those that do not belong to it count as well.
        let extra = (0..number).map(|_| Authority::new("other").pem());
        let files = Identity::of(&(certificate + &extra.collect::<String>()), &key, &authority.pem());
        let why = try_start(PS, &files.env(&[TCP, NAMES]), "127.0.0.1:0").err().unwrap_or_default();
        assert_eq!(why.contains("5 certificates of intermediate CAs come with it, and at most 4"), refused, "{why}");
        assert_eq!(why.is_empty(), !refused, "{why}");
    }
}

/// Counts the signatures that are checked.
#[derive(Debug)]
struct Counting(AtomicUsize);

impl SignatureVerificationAlgorithm for Counting {
    fn verify_signature(&self, key: &[u8], message: &[u8], signature: &[u8]) -> Result<(), InvalidSignature> {
        self.0.fetch_add(1, Ordering::Relaxed);
        webpki::ring::ECDSA_P256_SHA256.verify_signature(key, message, signature)
    }

    fn public_key_alg_id(&self) -> AlgorithmIdentifier {
        webpki::ring::ECDSA_P256_SHA256.public_key_alg_id()
    }

    fn signature_alg_id(&self) -> AlgorithmIdentifier {
        webpki::ring::ECDSA_P256_SHA256.signature_alg_id()
    }
}

/// The slowest chain that is not refused at once: every order of its CAs is tried, and the root has their name, too.
#[test]
fn a_chain_that_is_slow_to_verify_costs_at_most_65_checks() {
    let (root, _) = namesakes(1);
    let anchor = webpki::anchor_from_trusted_cert(&root[1]).unwrap();
    let checks = |number| {
        let (chain, _) = namesakes(number);
        let counting = Counting(AtomicUsize::new(0));
        let own = webpki::EndEntityCert::try_from(&chain[0]).unwrap();
        let usage = webpki::KeyUsage::client_auth();
        let (roots, now) = (std::slice::from_ref(&anchor), UnixTime::now());
        own.verify_for_usage(&[&counting], roots, &chain[1..], now, usage, None, None).map(drop).unwrap_err();
        counting.0.into_inner()
    };
    assert_eq!([checks(0), checks(1), checks(4)], [1, 2, 65]);
    assert!(checks(5) > 65);
}

#[test]
fn a_false_servers_chain_is_refused_at_once() {
    let authority = Authority::new("test");
    let files = authority.identity(WORKER_NAME);
    let worker = start(WORKER, &files, &[TCP, NAMES]);
    let (chain, key) = namesakes(10);
    let provider = http::config(&files, &[]).crypto_provider().clone();
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_client_cert_verifier(Arc::new(NoClientAuth))
        .with_single_cert(chain, key)
        .unwrap();
    config.alpn_protocols = vec![b"starwire/2".to_vec()];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let config = Arc::new(config);
    std::thread::spawn(move || {
        for mut raw in listener.incoming().map_while(Result::ok) {
            let mut server = ServerConnection::new(config.clone()).unwrap();
            while server.is_handshaking() && server.complete_io(&mut raw).is_ok() {}
        }
    });
    let end = call(&worker.task.engine().channel(PS, &address).unwrap(), ECHO, b"", None);
    let why = "the peer's certificate is refused: 10 certificates of intermediate CAs come with it";
    assert!(end.code == 16 && end.message.contains(why), "{end:?}");
}
