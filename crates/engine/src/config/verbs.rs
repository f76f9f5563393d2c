//! RDMA: the variables of TensorFlow's old verbs module, and a few new ones.

use starwire_net::transport::verbs::{TransportChoice, VerbsConfig};

use super::env::Env;
use super::error::ConfigError;
use super::variables::Reader;

/// Reads only this part of the environment, before there is a server.
pub fn verbs_config(env: &dyn Env, protocol: &str) -> Result<VerbsConfig, ConfigError> {
    read(&mut Reader::new(env), protocol)
}

pub(super) fn read(reader: &mut Reader<'_>, protocol: &str) -> Result<VerbsConfig, ConfigError> {
    let defaults = VerbsConfig::default();
    let over_verbs = protocol.ends_with("+verbs");
    let choices = [("tcp", TransportChoice::Tcp), ("verbs", TransportChoice::Verbs)];
    let transport = reader.choice("STARWIRE_TRANSPORT", &choices, if over_verbs { "verbs" } else { "tcp" })?;
    let fallback = reader.boolean("STARWIRE_VERBS_FALLBACK", defaults.fallback)?;
    let library = reader.text("STARWIRE_VERBS_LIBRARY")?.unwrap_or(defaults.library);
    let device = reader.text("RDMA_DEVICE")?;
    let port = reader.optional_number("RDMA_DEVICE_PORT", 1..=254)?;
    let gid_index = reader.optional_number("RDMA_GID_INDEX", 0..=65_535)?;
    let pkey_index = reader.number("RDMA_QP_PKEY_INDEX", 0, 0..=65_535)?;
    let queue_depth = reader.number("RDMA_QP_QUEUE_DEPTH", defaults.queue_depth, 64..=32_768)?;
    let timeout = reader.number("RDMA_QP_TIMEOUT", defaults.timeout, 1..=31)?;
    let retry_count = reader.number("RDMA_QP_RETRY_COUNT", defaults.retry_count, 0..=7)?;
    let service_level = reader.number("RDMA_QP_SL", 0, 0..=15)?;
    let mtus = [("256", 256), ("512", 512), ("1024", 1024), ("2048", 2048), ("4096", 4096), ("port", 0)];
    let mtu = reader.choice("RDMA_QP_MTU", &mtus, "port")?;
    let traffic_class = reader.number("RDMA_TRAFFIC_CLASS", 0, 0..=255)?;
    let direct_min = reader.bytes("STARWIRE_VERBS_DIRECT_MIN", defaults.direct_min, 4 << 10..=1 << 30)?;
    let buffer_bytes = reader.bytes("STARWIRE_VERBS_BUFFERS", defaults.buffer_bytes, 128 << 10..=64 << 20)?;
    let arena_bytes = reader.bytes("STARWIRE_VERBS_ARENA", defaults.arena_bytes, 0..=1 << 46)?;
    Ok(VerbsConfig {
        transport,
        fallback,
        library,
        device,
        port,
        gid_index,
        pkey_index,
        queue_depth,
        timeout,
        retry_count,
        service_level,
        mtu: (mtu != 0).then_some(mtu),
        traffic_class,
        direct_min,
        buffer_bytes,
        arena_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::super::env::MapEnv;
    use super::*;

    fn read_with(protocol: &str, vars: &[(&str, &str)]) -> Result<VerbsConfig, ConfigError> {
        let env = vars.iter().fold(MapEnv::new("/"), |env, (name, value)| env.set(name, *value));
        read(&mut Reader::new(&env), protocol)
    }

    #[test]
    fn the_protocol_chooses_the_transport_unless_the_environment_does() {
        assert_eq!(read_with("grpc++", &[]).unwrap(), VerbsConfig::default());
        assert_eq!(read_with("grpc+verbs", &[]).unwrap().transport, TransportChoice::Verbs);
        let tcp = read_with("grpc+verbs", &[("STARWIRE_TRANSPORT", "tcp")]).unwrap();
        assert_eq!(tcp.transport, TransportChoice::Tcp);
        let verbs = read_with("grpc++", &[("STARWIRE_TRANSPORT", "verbs")]).unwrap();
        assert_eq!(verbs.transport, TransportChoice::Verbs);
    }

    #[test]
    fn the_old_modules_variables_mean_what_they_meant() {
        let config = read_with(
            "grpc+verbs",
            &[
                ("RDMA_DEVICE", "mlx5_1"),
                ("RDMA_DEVICE_PORT", "2"),
                ("RDMA_GID_INDEX", "3"),
                ("RDMA_QP_PKEY_INDEX", "1"),
                ("RDMA_QP_QUEUE_DEPTH", "256"),
                ("RDMA_QP_TIMEOUT", "18"),
                ("RDMA_QP_RETRY_COUNT", "5"),
                ("RDMA_QP_SL", "4"),
                ("RDMA_QP_MTU", "2048"),
                ("RDMA_TRAFFIC_CLASS", "106"),
            ],
        )
        .unwrap();
        assert_eq!((config.device.as_deref(), config.port, config.gid_index), (Some("mlx5_1"), Some(2), Some(3)));
        assert_eq!((config.pkey_index, config.queue_depth, config.timeout), (1, 256, 18));
        assert_eq!(
            (config.retry_count, config.service_level, config.mtu, config.traffic_class),
            (5, 4, Some(2048), 106)
        );
    }

    #[test]
    fn values_that_cannot_be_are_refused() {
        for (name, value) in [("RDMA_QP_MTU", "1500"), ("RDMA_QP_RETRY_COUNT", "8"), ("RDMA_QP_TIMEOUT", "0")] {
            let error = read_with("grpc+verbs", &[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
