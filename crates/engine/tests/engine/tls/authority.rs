//! A CA, and the files of its certificates.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};

pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A directory with certificate, key and CAs of a task. Removed when it is dropped.
pub struct Identity {
    folder: PathBuf,
    variables: Vec<(&'static str, String)>,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
    }

    pub fn pem(&self) -> String {
        AsRef::<rcgen::Certificate>::as_ref(&self.issuer).pem()
    }

    /// Certificate and key with this name, until so long from now.
    pub fn issue(&self, name: &str, lasts: Duration) -> (String, String) {
        self.issue_until(name, SystemTime::now() + lasts)
    }

    /// The same, until an hour ago.
    pub fn issue_expired(&self, name: &str) -> (String, String) {
        self.issue_until(name, SystemTime::now() - Duration::from_secs(3600))
    }

    /// The same, from a time that may be yet to come.
    pub fn issue_from(&self, name: &str, from: SystemTime) -> (String, String) {
        self.issue_between(name, from, from + Duration::from_secs(3600))
    }

    fn issue_until(&self, name: &str, until: SystemTime) -> (String, String) {
        self.issue_between(name, UNIX_EPOCH + Duration::from_secs(1_600_000_000), until)
    }

    fn issue_between(&self, name: &str, from: SystemTime, until: SystemTime) -> (String, String) {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names.push(match name.parse() {
            Ok(ip) => SanType::IpAddress(ip),
            Err(_) if name.contains("://") => SanType::URI(name.try_into().unwrap()),
            Err(_) => SanType::DnsName(name.try_into().unwrap()),
        });
        let date = |time: SystemTime| rcgen::date_time_ymd(1970, 1, 1) + time.duration_since(UNIX_EPOCH).unwrap();
        (params.not_before, params.not_after) = (date(from), date(until));
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    /// The files of a certificate that lasts.
    pub fn identity(&self, name: &str) -> Identity {
        let (certificate, key) = self.issue(name, Duration::from_secs(3600));
        Identity::of(&certificate, &key, &self.pem())
    }
}

impl Identity {
    pub fn of(certificate: &str, key: &str, authorities: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("starwire-tls-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = |name: &str| folder.join(name).display().to_string();
        let variables = vec![
            ("STARWIRE_TLS_CERT", path("cert.pem")),
            ("STARWIRE_TLS_KEY", path("key.pem")),
            ("STARWIRE_TLS_CA", path("ca.pem")),
        ];
        let made = Self { folder, variables };
        made.replace(certificate, key, authorities);
        made
    }

    /// The same files with other contents, each at once.
    pub fn replace(&self, certificate: &str, key: &str, authorities: &str) {
        for (name, text) in [("cert.pem", certificate), ("key.pem", key), ("ca.pem", authorities)] {
            std::fs::write(self.folder.join("new"), text).unwrap();
            std::fs::rename(self.folder.join("new"), self.folder.join(name)).unwrap();
        }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The environment of its task.
    pub fn env<'a>(&'a self, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        let files = self.variables.iter().map(|(name, value)| (*name, value.as_str()));
        let allow = ("STARWIRE_TLS_ALLOW_RDMA", "true");
        files.chain([allow]).chain(more.iter().copied()).collect()
    }
}

impl Drop for Identity {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
