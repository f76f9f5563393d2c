//! RDMA: the library, devices, ports, GIDs, MTU, locked memory.

use starwire_engine::config::{TransportChoice, VerbsConfig};
use starwire_net::transport::verbs::{Device, Library, PortFacts, memlock, survey};

use super::Finding;

/// Below this, some hundred connections or one large tensor run into the limit.
const LITTLE_MEMLOCK: u64 = 256 << 20;
/// GIDs that one line lists.
const LISTED: usize = 6;

pub fn examine(config: &VerbsConfig) -> Vec<Finding> {
    const SUBJECT: &str = "RDMA";
    let wanted = config.transport == TransportChoice::Verbs;
    let lacking = |text: String| match (wanted, config.fallback) {
        (false, _) => {
            Finding::ok(SUBJECT, format!("none ({text}); only grpc+verbs and STARWIRE_TRANSPORT=verbs need it"))
        }
        (true, true) => Finding::note(SUBJECT, format!("{text}; TCP will be used")),
        (true, false) => Finding::bad(SUBJECT, text),
    };
    let ports = Library::load(&config.library).and_then(survey);
    let ports = match ports {
        Ok(ports) if ports.is_empty() => return vec![lacking("this host has no RDMA device".to_owned())],
        Ok(ports) => ports,
        Err(error) => return vec![lacking(error.to_string())],
    };
    let mut findings: Vec<Finding> = ports
        .iter()
        .map(|found| match found {
            Ok(port) => describe(port),
            Err(error) => Finding::note(SUBJECT, error.to_string()),
        })
        .collect();
    let device = Library::load(&config.library).and_then(|library| Device::open(library, config));
    findings.push(match device {
        Ok(device) => Finding::ok(SUBJECT, format!("connections would use {}", device.describe())),
        Err(error) => lacking(error.to_string()),
    });
    if let Some(bytes) = memlock().filter(|bytes| *bytes < LITTLE_MEMLOCK) {
        let text = format!(
            "{} KiB: RDMA pins buffers (1.25 MB for each connection) and the tensors in flight; the rest is copied. Raise it with ulimit -l, LimitMEMLOCK= or the container's memlock",
            bytes >> 10
        );
        findings.push(Finding::note("locked memory for RDMA", text));
    }
    findings
}

fn describe(port: &PortFacts) -> Finding {
    let subject = format!("{} port {}", port.device, port.port);
    let link = if port.is_ethernet { "Ethernet (RoCE)".to_owned() } else { format!("InfiniBand, LID {}", port.lid) };
    let gids = port.gids.iter().filter(|gid| gid.is_roce_v2 || !port.is_ethernet);
    let mut gids: Vec<String> = gids.map(|gid| format!("{} {}", gid.index, gid.gid)).collect();
    let more = gids.len().saturating_sub(LISTED);
    gids.truncate(LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let kind = if port.is_ethernet { "RoCE v2 GIDs" } else { "GIDs" };
    let text =
        format!("{}, {link}, MTU {} of {}, {kind}: {}{more}", port.state, port.mtu, port.max_mtu, gids.join(", "));
    if !port.is_active {
        return Finding::note(subject, format!("{text}; it cannot be used"));
    }
    if port.is_ethernet && gids.is_empty() {
        return Finding::note(subject, format!("{text}none; assign an IP address to its network interface"));
    }
    if port.mtu < port.max_mtu && port.mtu < 4096 {
        let hint = "a larger MTU of the network interface (4200 for RDMA packets of 4096) costs fewer packets";
        return Finding::note(subject, format!("{text}; {hint}"));
    }
    Finding::ok(subject, text)
}

#[cfg(test)]
mod tests {
    use starwire_engine::config::{MapEnv, Protocol, verbs_config};
    use starwire_net::transport::verbs::GidFacts;

    use super::super::Verdict;
    use super::*;

    fn port() -> PortFacts {
        PortFacts {
            device: "mlx5_0".to_owned(),
            port: 1,
            state: "active",
            is_active: true,
            is_ethernet: true,
            lid: 0,
            mtu: 4096,
            max_mtu: 4096,
            gids: vec![
                GidFacts { index: 2, gid: "::ffff:10.0.0.7".parse().unwrap(), is_roce_v2: false },
                GidFacts { index: 3, gid: "::ffff:10.0.0.7".parse().unwrap(), is_roce_v2: true },
            ],
        }
    }

    #[test]
    fn a_port_is_described_with_what_is_wrong_with_it() {
        let fine = describe(&port());
        assert_eq!((fine.verdict, fine.subject.as_str()), (Verdict::Ok, "mlx5_0 port 1"));
        assert_eq!(fine.text, "active, Ethernet (RoCE), MTU 4096 of 4096, RoCE v2 GIDs: 3 ::ffff:10.0.0.7");
        let verdict = |change: fn(&mut PortFacts)| {
            let mut changed = port();
            change(&mut changed);
            describe(&changed).verdict
        };
        assert_eq!(verdict(|p| p.is_active = false), Verdict::Note);
        assert_eq!(verdict(|p| p.gids.truncate(1)), Verdict::Note);
        assert_eq!(verdict(|p| p.mtu = 1024), Verdict::Note);
    }

    #[test]
    fn a_host_without_rdma_is_fine_unless_rdma_is_wanted() {
        let library = "/nonexistent/libibverbs.so".to_owned();
        let verdict = |transport, fallback| {
            let defaults = verbs_config(&MapEnv::new("/"), Protocol::GrpcPlusPlus).unwrap();
            examine(&VerbsConfig { transport, fallback, library: library.clone(), ..defaults })[0].verdict
        };
        assert_eq!(verdict(TransportChoice::Tcp, true), Verdict::Ok);
        assert_eq!(verdict(TransportChoice::Verbs, true), Verdict::Note);
        assert_eq!(verdict(TransportChoice::Verbs, false), Verdict::Bad);
    }
}
