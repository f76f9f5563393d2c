//! Whom a certificate may speak for.
//!
//! `STARWIRE_TLS_PEERS` is a list of names. `{host}`, `{job}` and `{task}` in them stand for the host of a task's
//! ClusterSpec address, its job and its number in the job. A certificate speaks for a task if one of its subject
//! alternative names is one of the names of this task. The common name counts for nothing.

use std::fmt;

use rustls::pki_types::{CertificateDer, ServerName};
use webpki::EndEntityCert;

/// The placeholders of a name.
const PLACEHOLDERS: [&str; 3] = ["{host}", "{job}", "{task}"];
/// Most names of a certificate that a message lists.
const MOST_LISTED: usize = 8;

/// Names of the certificates of a cluster's tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names(Vec<String>);

/// A task, as far as it matters for its certificate.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// `/job:ps/replica:0/task:0`
    pub task: &'a str,
    /// Its address in the ClusterSpec, if it is there.
    pub address: Option<&'a str>,
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(","))
    }
}

impl Names {
    /// The error is what the text must be.
    pub fn parse(text: &str) -> Result<Self, String> {
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        if names.iter().all(|name| is_name(name)) {
            return Ok(Self(names));
        }
        Err("names separated by commas: DNS names, IP addresses or URIs, in which {host}, {job} and {task} are replaced".to_owned())
    }

    /// Whether the certificate speaks for the task; otherwise, why not.
    pub fn check(&self, certificate: &CertificateDer<'_>, subject: &Subject<'_>) -> Result<(), String> {
        let parsed = EndEntityCert::try_from(certificate).map_err(|error| format!("it cannot be read: {error}"))?;
        let Some(wanted) = self.of(subject) else {
            return Err(format!("{:?} is not the name of a task", subject.task));
        };
        if wanted.iter().any(|name| has_name(&parsed, name)) {
            return Ok(());
        }
        let names = match wanted.is_empty() {
            true => format!(
                "no certificate can: its address is not in this task's ClusterSpec, and STARWIRE_TLS_PEERS is {self}"
            ),
            false => format!("it must name {}", wanted.join(" or ")),
        };
        Err(format!("its certificate names {}, so it does not speak for {}: {names}", listed(&parsed), subject.task))
    }

    /// The names of a task. None: that is not a task.
    fn of(&self, subject: &Subject<'_>) -> Option<Vec<String>> {
        let (job, task) = job_and_number(subject.task)?;
        let host = subject.address.and_then(host_of);
        let names = self.0.iter().filter(|name| host.is_some() || !name.contains("{host}"));
        let host = host.unwrap_or_default();
        Some(names.map(|name| name.replace("{host}", host).replace("{job}", job).replace("{task}", task)).collect())
    }
}

/// A DNS name, an IP address or a URI once the placeholders are replaced.
fn is_name(name: &str) -> bool {
    let example = PLACEHOLDERS.iter().fold(name.to_owned(), |name, placeholder| name.replace(placeholder, "a"));
    if example.contains("://") {
        return example.bytes().all(|b| b.is_ascii_graphic() && b != b'{' && b != b'}');
    }
    ServerName::try_from(example.as_str()).is_ok()
}

/// Of `/job:ps/replica:0/task:3`: `ps` and `3`.
fn job_and_number(task: &str) -> Option<(&str, &str)> {
    let (job, rest) = task.strip_prefix("/job:")?.split_once("/replica:")?;
    let (replica, number) = rest.split_once("/task:")?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let is_job = !job.is_empty() && job.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    (is_job && is_number(replica) && is_number(number)).then_some((job, number))
}

/// The host of `host:port`, without the brackets of an IPv6 address.
fn host_of(address: &str) -> Option<&str> {
    let host = address.rsplit_once(':')?.0;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    Some(host).filter(|host| !host.is_empty())
}

fn has_name(certificate: &EndEntityCert<'_>, name: &str) -> bool {
    if name.contains("://") {
        return certificate.valid_uri_names().any(|uri| uri == name);
    }
    // Wildcards of the certificate count as in RFC 9525.
    ServerName::try_from(name).is_ok_and(|name| certificate.verify_is_valid_for_subject_name(&name).is_ok())
}

/// The names of a certificate, for messages. Addresses are not listed.
fn listed(certificate: &EndEntityCert<'_>) -> String {
    let names = certificate.valid_dns_names().chain(certificate.valid_uri_names()).take(MOST_LISTED);
    let names: Vec<String> =
        names.map(|name| name.chars().map(|c| if c.is_control() { ' ' } else { c }).take(256).collect()).collect();
    if names.is_empty() { "no DNS name and no URI".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair, SanType};

    fn certificate(dns: &[&str], uris: &[&str], ips: &[&str]) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(dns.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>()).unwrap();
        params.subject_alt_names.extend(uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())));
        params.subject_alt_names.extend(ips.iter().map(|ip| SanType::IpAddress(ip.parse().unwrap())));
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    fn check(names: &str, certificate: &CertificateDer<'_>, task: &str, address: Option<&str>) -> Result<(), String> {
        Names::parse(names).unwrap().check(certificate, &Subject { task, address })
    }

    const PS: &str = "/job:ps/replica:0/task:3";

    #[test]
    fn a_host_is_a_name_or_an_address() {
        let named = certificate(&["ps-3.ps.train.svc", "*.ps2.train.svc"], &[], &["10.0.0.7", "fd00::7"]);
        for address in
            ["ps-3.ps.train.svc:2222", "PS-3.ps.train.svc:1", "x.ps2.train.svc:1", "10.0.0.7:1", "[fd00::7]:1"]
        {
            assert_eq!(check("{host}", &named, PS, Some(address)), Ok(()), "{address}");
        }
        for address in
            ["ps-4.ps.train.svc:2222", "ps2.train.svc:1", "a.b.ps2.train.svc:1", "10.0.0.8:1", ":1", "10.0.0.7"]
        {
            assert!(check("{host}", &named, PS, Some(address)).is_err(), "{address}");
        }
        let why = check("{host}", &named, PS, Some("other:1")).unwrap_err();
        assert_eq!(
            why,
            "its certificate names ps-3.ps.train.svc, *.ps2.train.svc, so it does not speak for /job:ps/replica:0/task:3: it must name other"
        );
        let why = check("{host}", &named, PS, None).unwrap_err();
        assert!(why.contains("no certificate can: its address is not in this task's ClusterSpec"), "{why}");
    }

    #[test]
    fn a_uri_is_compared_as_a_whole() {
        let named = certificate(&[], &["spiffe://train.example/ps/3"], &[]);
        assert_eq!(check("spiffe://train.example/{job}/{task}", &named, PS, None), Ok(()));
        assert_eq!(check("{host}, spiffe://train.example/{job}/{task}", &named, PS, None), Ok(()));
        assert_eq!(check("spiffe://train.example/ps/3", &named, "/job:worker/replica:0/task:0", None), Ok(()));
        for (names, task) in [
            ("spiffe://train.example/{job}/{task}", "/job:ps/replica:0/task:33"),
            ("spiffe://train.example/{job}/{task}", "/job:worker/replica:0/task:3"),
            ("spiffe://train.example/{job}", PS),
            ("spiffe://TRAIN.example/{job}/{task}", PS),
            ("train.example", PS),
        ] {
            assert!(check(names, &named, task, None).is_err(), "{names} {task}");
        }
    }

    #[test]
    fn a_claimed_name_cannot_smuggle_in_parts_of_a_uri() {
        let named = certificate(&[], &["spiffe://x/a/ps/3"], &[]);
        for task in [
            "/job:a/ps/replica:0/task:3",
            "/job:a/replica:0/task:ps/3",
            "ps",
            "",
            "/job:ps/task:3",
            "/job:/replica:0/task:1",
        ] {
            let why = check("spiffe://x/{job}/{task}", &named, task, None).unwrap_err();
            assert!(why.contains("is not the name of a task"), "{why}");
        }
    }

    #[test]
    fn only_names_are_accepted() {
        for good in
            ["{host}", "a.example", "10.0.0.1", "{job}-{task}.train.svc", "spiffe://a/{job}/{task}", "a,starwire://b"]
        {
            assert_eq!(Names::parse(good).unwrap().to_string(), good);
        }
        for bad in ["", "a,", "{cluster}", "spiffe://a/{jobs}", "two words", "a/b", "*.example"] {
            assert!(Names::parse(bad).is_err(), "{bad}");
        }
    }
}
