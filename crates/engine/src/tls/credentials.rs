//! Certificate, key and CAs of a task, from files that may change while it runs.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, OtherError, RootCertStore, ServerConfig,
    SignatureScheme,
};
use webpki::{EndEntityCert, KeyUsage};

use super::explain;
use super::names::{Names, Subject};
use crate::api::Level;

/// Of connections between tasks, in the ClientHello.
pub const ALPN: &[u8] = b"starwire/2";
/// Time between two looks at the files.
const PAUSE: Duration = Duration::from_secs(1);
/// Most certificates of intermediate CAs. webpki tries every order of those that have one name: with ten, which anybody
/// can make, it is busy for a fraction of a second, with four it looks at 64 orders.
const LONGEST_CHAIN: usize = 4;
/// The end of the year 9999, by which certificates without an end are dated.
const LATE: u64 = 253_402_300_799;

/// The files that a task proves its identity with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The task's certificate, then those of intermediate CAs.
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// Certificates of the CAs that issue those of peers.
    pub authorities: PathBuf,
}

/// Which file does not do, and why.
#[derive(Debug)]
pub struct Unusable {
    pub file: File,
    pub path: PathBuf,
    pub reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum File {
    Certificate,
    Key,
    Authorities,
}

/// The TLS of a task: its credentials, and whom it believes.
pub struct Tls {
    files: Files,
    names: Names,
    state: Mutex<State>,
}

struct State {
    current: Arc<Credentials>,
    /// This task and its address, once the certificate was found to speak for it: so must later ones.
    own: Option<(String, Option<String>)>,
    /// Of the files that `current` was read from.
    seen: Stamps,
    /// Of files that were unusable, as was said.
    refused: Option<Stamps>,
    looked: Instant,
}

/// Of each file, what changes when it is written or replaced; None: it is not there.
#[derive(PartialEq, Eq)]
struct Stamps([Option<Stamp>; 3]);

/// Device, number and size, and the seconds and nanoseconds of two times.
type Stamp = ([u64; 3], [i64; 4]);

/// What connections need that begin now.
pub struct Credentials {
    /// Between tasks: to a server …
    pub client: Arc<ClientConfig>,
    /// … and from a client.
    pub server: Arc<ServerConfig>,
    /// HTTP: from a client …
    pub http: Arc<ServerConfig>,
    /// … and to a server.
    pub http_client: Arc<ClientConfig>,
    /// The first certificate of the file.
    own: CertificateDer<'static>,
    /// When the first of the file's certificates ends, in seconds of Unix time; None: never.
    pub ends: Option<u64>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).field("names", &self.names).finish_non_exhaustive()
    }
}

impl Tls {
    pub fn load(files: Files, names: Names) -> Result<Self, Unusable> {
        // Before they are read: a change in between is found later.
        let seen = Stamps::of(&files);
        let current = Arc::new(Credentials::read(&files)?);
        Ok(Self {
            files,
            names,
            state: Mutex::new(State { current, own: None, seen, refused: None, looked: Instant::now() }),
        })
    }

    /// The credentials for a new connection. Looks at the files, at most once a second; files that are unusable change
    /// nothing.
    pub fn current(&self, log: impl FnOnce(Level, &str)) -> Arc<Credentials> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.looked.elapsed() < PAUSE {
            return state.current.clone();
        }
        let seen = Stamps::of(&self.files);
        if seen != state.seen {
            let read = Credentials::read(&self.files).and_then(|read| match &state.own {
                Some((task, address)) => {
                    self.check_own(&read, &Subject { task, address: address.as_deref() }).map(|()| read)
                }
                None => Ok(read),
            });
            match read {
                Ok(read) => {
                    state.current = Arc::new(read);
                    (state.seen, state.refused) = (seen, None);
                    log(
                        Level::Info,
                        "starwire: the TLS certificate, key or CAs have changed; new connections use them",
                    );
                }
                Err(Unusable { path, reason, .. }) => {
                    let path = path.display();
                    let line = format!(
                        "starwire: the TLS files have changed, but {path} cannot be used ({reason}); still using what they contained before"
                    );
                    // The cause may pass without a change of the files: no descriptor was left, or it is not valid yet.
                    if state.refused.as_ref() != Some(&seen) {
                        log(Level::Error, &line);
                        state.refused = Some(seen);
                    }
                }
            }
        }
        state.looked = Instant::now();
        state.current.clone()
    }

    /// Whether a certificate that was verified speaks for the task; otherwise, why not.
    pub fn speaks_for(&self, certificate: Option<&CertificateDer<'_>>, subject: &Subject<'_>) -> Result<(), String> {
        match certificate {
            Some(certificate) => self.names.check(certificate, subject),
            None => Err("it presented no certificate".to_owned()),
        }
    }

    /// Whether peers will believe this task's own name; from then on, also with files that replace these.
    pub fn speaks_for_itself(&self, subject: &Subject<'_>) -> Result<(), Unusable> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_own(&state.current, subject)?;
        state.own = Some((subject.task.to_owned(), subject.address.map(str::to_owned)));
        Ok(())
    }

    fn check_own(&self, credentials: &Credentials, subject: &Subject<'_>) -> Result<(), Unusable> {
        let path = self.files.certificate.clone();
        let checked = self.names.check(&credentials.own, subject);
        checked.map_err(|reason| Unusable { file: File::Certificate, path, reason })
    }
}

impl Stamps {
    fn of(files: &Files) -> Self {
        Self([&files.certificate, &files.key, &files.authorities].map(|path| {
            let found = std::fs::metadata(path).ok()?;
            let times = [found.ctime(), found.ctime_nsec(), found.mtime(), found.mtime_nsec()];
            Some(([found.dev(), found.ino(), found.size()], times))
        }))
    }
}

impl Credentials {
    fn read(files: &Files) -> Result<Self, Unusable> {
        let unusable = |file, path: &Path, reason| Unusable { file, path: path.to_owned(), reason };
        let bad_certificate = |reason| unusable(File::Certificate, &files.certificate, reason);
        let chain = certificates(&files.certificate).map_err(bad_certificate)?;
        let key = PrivateKeyDer::from_pem_file(&files.key);
        let key = key.map_err(|error| unusable(File::Key, &files.key, explain_pem(error, "private key")))?;
        let bad_authorities = |reason| unusable(File::Authorities, &files.authorities, reason);
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&files.authorities).map_err(bad_authorities)? {
            roots
                .add(certificate)
                .map_err(|error| bad_authorities(format!("it has an invalid certificate: {error}")))?;
        }
        let Some((own, intermediates)) = chain.split_first() else {
            return Err(bad_certificate("it has no certificate".to_owned()));
        };
        let (own, provider) = (own.clone(), Arc::new(provider()));
        // A certificate that every peer refuses is better refused here.
        verify(&own, intermediates, &roots, &provider).map_err(bad_certificate)?;
        let ends = chain.iter().filter_map(end).min();
        let roots = Arc::new(roots);
        let client = client(&chain, &key, &roots, &provider);
        let server = server(&chain, &key, &roots, &provider);
        let (client, server) = match (client, server) {
            (Ok(client), Ok(server)) => (client, server),
            (Err(error), _) | (_, Err(error)) => {
                let file = files.certificate.display();
                return Err(unusable(File::Key, &files.key, format!("with the certificate in {file}: {error}")));
            }
        };
        let with = |protocols: &[&[u8]]| protocols.iter().map(|name| name.to_vec()).collect::<Vec<_>>();
        let client_of = |protocols| {
            let mut config = client.clone();
            config.alpn_protocols = protocols;
            Arc::new(config)
        };
        let server_of = |protocols| {
            let mut config = server.clone();
            config.alpn_protocols = protocols;
            Arc::new(config)
        };
        Ok(Self {
            client: client_of(with(&[ALPN])),
            server: server_of(with(&[ALPN])),
            http: server_of(with(&[b"h2", b"http/1.1"])),
            http_client: client_of(with(&[b"h2"])),
            own,
            ends,
        })
    }
}

/// AES with the shorter key first: tensors need no more, and it is faster.
fn provider() -> CryptoProvider {
    use ring::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256};
    let cipher_suites = vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256];
    CryptoProvider { cipher_suites, ..ring::default_provider() }
}

type Chain = [CertificateDer<'static>];

fn client(
    chain: &Chain,
    key: &PrivateKeyDer<'static>,
    roots: &Arc<RootCertStore>,
    provider: &Arc<CryptoProvider>,
) -> Result<ClientConfig, rustls::Error> {
    let verifier = Arc::new(ChainVerifier { roots: roots.clone(), provider: provider.clone() });
    let mut config = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_auth_cert(chain.to_vec(), key.clone_key())?;
    // Each connection proves everything anew: certificates expire and are replaced.
    config.resumption = rustls::client::Resumption::disabled();
    config.enable_sni = false;
    Ok(config)
}

fn server(
    chain: &Chain,
    key: &PrivateKeyDer<'static>,
    roots: &Arc<RootCertStore>,
    provider: &Arc<CryptoProvider>,
) -> Result<ServerConfig, rustls::Error> {
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
        // Unauthenticated peers need not know who the CAs are.
        .clear_root_hint_subjects()
        .build()
        .map_err(|error| rustls::Error::General(error.to_string()))?;
    let verifier = Arc::new(ClientChainVerifier(verifier));
    let mut config = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain.to_vec(), key.clone_key())?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Checks the own certificate as peers will, in both roles.
fn verify(
    own: &CertificateDer<'static>,
    intermediates: &Chain,
    roots: &RootCertStore,
    provider: &CryptoProvider,
) -> Result<(), String> {
    let parsed = EndEntityCert::try_from(own).map_err(|error| format!("it cannot be read: {error}"))?;
    bounded(intermediates).map_err(|error| error.to_string())?;
    let algorithms = provider.signature_verification_algorithms.all;
    for usage in [KeyUsage::server_auth(), KeyUsage::client_auth()] {
        parsed
            .verify_for_usage(algorithms, &roots.roots, intermediates, UnixTime::now(), usage, None, None)
            .map_err(|error| explain::own(&error))?;
    }
    Ok(())
}

/// When a certificate ends, in seconds of Unix time.
fn end(certificate: &CertificateDer<'_>) -> Option<u64> {
    let parsed = EndEntityCert::try_from(certificate).ok()?;
    let late = UnixTime::since_unix_epoch(Duration::from_secs(LATE));
    match parsed.verify_for_usage(&[], &[], &[], late, KeyUsage::server_auth(), None, None) {
        Err(webpki::Error::CertExpired { not_after, .. }) => Some(not_after.as_secs()),
        _ => None,
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let explained = |error| explain_pem(error, "certificate");
    let read: Vec<_> =
        CertificateDer::pem_file_iter(path).map_err(explained)?.collect::<Result<_, _>>().map_err(explained)?;
    if read.is_empty() { Err(explained(PemError::NoItemsFound)) } else { Ok(read) }
}

fn explain_pem(error: PemError, what: &str) -> String {
    match error {
        PemError::Io(error) if error.kind() == io::ErrorKind::NotFound => "it does not exist".to_owned(),
        PemError::Io(error) => format!("it cannot be read: {error}"),
        PemError::NoItemsFound => format!("it has no {what} in PEM format"),
        other => format!("it is not valid PEM: {other}"),
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{0} certificates of intermediate CAs come with it, and at most {most} are allowed", most = LONGEST_CHAIN)]
struct LongChain(usize);

impl From<LongChain> for rustls::Error {
    fn from(error: LongChain) -> Self {
        CertificateError::Other(OtherError(Arc::new(error))).into()
    }
}

/// Before anything is tried with certificates that an unauthenticated peer has chosen.
fn bounded(intermediates: &[CertificateDer<'_>]) -> Result<(), LongChain> {
    if intermediates.len() > LONGEST_CHAIN { Err(LongChain(intermediates.len())) } else { Ok(()) }
}

/// Accepts a server whose certificate a CA has issued. Its name is checked where the task is known.
#[derive(Debug)]
struct ChainVerifier {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for ChainVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        bounded(intermediates)?;
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        rustls::client::verify_server_cert_signed_by_trust_anchor(
            &certificate,
            &self.roots,
            intermediates,
            now,
            algorithms,
        )?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Accepts a client whose certificate a CA has issued, if the chain is short.
#[derive(Debug)]
struct ClientChainVerifier(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for ClientChainVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        bounded(intermediates)?;
        self.0.verify_client_cert(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
