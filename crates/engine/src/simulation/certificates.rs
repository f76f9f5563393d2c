//! One certificate for all tasks. Its signatures all have the same length, so that a seed does the same each time.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use rcgen::{CertificateParams, KeyPair, PKCS_ED25519, SanType};

use super::{MOST_TASKS, address, names};

/// The folder with the files. Removed when it is dropped.
pub struct Certificates(PathBuf);

impl Certificates {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("starwire-simulation-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        for task in 0..MOST_TASKS {
            let name = names::of(task).split_once(':').unwrap().0.to_owned();
            params.subject_alt_names.push(SanType::DnsName(name.try_into().unwrap()));
            params.subject_alt_names.push(SanType::IpAddress(address(task).ip()));
        }
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let certificate = params.self_signed(&key).unwrap().pem();
        for (name, text) in [("cert.pem", &certificate), ("ca.pem", &certificate), ("key.pem", &key.serialize_pem())] {
            std::fs::write(folder.join(name), text).unwrap();
        }
        Self(folder)
    }

    pub fn settings(&self) -> [(&'static str, String); 3] {
        let path = |name: &str| self.0.join(name).display().to_string();
        [
            ("STARWIRE_TLS_CERT", path("cert.pem")),
            ("STARWIRE_TLS_KEY", path("key.pem")),
            ("STARWIRE_TLS_CA", path("ca.pem")),
        ]
    }
}

impl Drop for Certificates {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
