//! RDMA: the variables of TensorFlow's old verbs module, and a few new ones.

use starwire_net::transport::verbs::VerbsConfig;

use super::env::Env;
use super::error::ConfigError;
use super::protocol::Protocol;
use super::reader::Reader;
use super::variables;

/// Only this part of the environment, before there is a server.
pub fn verbs_config(env: &dyn Env, protocol: Protocol) -> Result<VerbsConfig, ConfigError> {
    read(&mut Reader::new(env, protocol))
}

pub(super) fn read(reader: &mut Reader<'_>) -> Result<VerbsConfig, ConfigError> {
    let [direct_min, buffer_bytes] = reader.get(&variables::VERBS_LIMITS)?;
    Ok(VerbsConfig {
        transport: reader.get(&variables::TRANSPORT)?,
        fallback: reader.get(&variables::VERBS_FALLBACK)?,
        library: reader.get(&variables::VERBS_LIBRARY)?,
        device: reader.get(&variables::RDMA_DEVICE)?,
        port: reader.get(&variables::RDMA_PORT)?,
        gid_index: reader.get(&variables::RDMA_GID_INDEX)?,
        pkey_index: reader.get(&variables::RDMA_PKEY_INDEX)?,
        queue_depth: reader.get(&variables::RDMA_QUEUE_DEPTH)?,
        timeout: reader.get(&variables::RDMA_TIMEOUT)?,
        retry_count: reader.get(&variables::RDMA_RETRY_COUNT)?,
        service_level: reader.get(&variables::RDMA_SERVICE_LEVEL)?,
        mtu: reader.get(&variables::RDMA_MTU)?,
        traffic_class: reader.get(&variables::RDMA_TRAFFIC_CLASS)?,
        direct_min,
        buffer_bytes,
        arena_bytes: reader.get(&variables::VERBS_ARENA)?,
    })
}

#[cfg(test)]
mod tests {
    use starwire_net::transport::verbs::TransportChoice;

    use super::super::env::MapEnv;
    use super::*;

    fn read_with(protocol: Protocol, vars: &[(&str, &str)]) -> Result<VerbsConfig, ConfigError> {
        let env = vars.iter().fold(MapEnv::new("/"), |env, (name, value)| env.set(name, *value));
        verbs_config(&env, protocol)
    }

    #[test]
    fn the_protocol_chooses_the_transport_unless_the_environment_does() {
        assert_eq!(read_with(Protocol::GrpcPlusPlus, &[]).unwrap().transport, TransportChoice::Tcp);
        assert_eq!(read_with(Protocol::GrpcVerbs, &[]).unwrap().transport, TransportChoice::Verbs);
        let tcp = read_with(Protocol::GrpcVerbs, &[("STARWIRE_TRANSPORT", "tcp")]).unwrap();
        assert_eq!(tcp.transport, TransportChoice::Tcp);
        let verbs = read_with(Protocol::GrpcPlusPlus, &[("STARWIRE_TRANSPORT", "verbs")]).unwrap();
        assert_eq!(verbs.transport, TransportChoice::Verbs);
    }

    #[test]
    fn the_old_modules_variables_mean_what_they_meant() {
        let config = read_with(
            Protocol::GrpcVerbs,
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
    fn every_variable_of_our_own_has_its_place() {
        let config = read_with(
            Protocol::GrpcPlusPlus,
            &[
                ("STARWIRE_VERBS_FALLBACK", "false"),
                ("STARWIRE_VERBS_LIBRARY", "/libibverbs.so"),
                ("STARWIRE_VERBS_LIMITS", "direct_min=8K,buffers=1M"),
                ("STARWIRE_VERBS_ARENA", "0"),
            ],
        )
        .unwrap();
        assert_eq!((config.fallback, config.library.as_str()), (false, "/libibverbs.so"));
        assert_eq!((config.direct_min, config.buffer_bytes, config.arena_bytes), (8 << 10, 1 << 20, 0));
        let default = read_with(Protocol::GrpcPlusPlus, &[]).unwrap();
        assert_eq!((default.direct_min, default.buffer_bytes), (64 << 10, 512 << 10));
        assert_eq!(default.arena_bytes, starwire_net::transport::verbs::Arena::default_bytes());
    }

    #[test]
    fn values_that_cannot_be_are_refused() {
        for (name, value) in [("RDMA_QP_MTU", "1500"), ("RDMA_QP_RETRY_COUNT", "8"), ("RDMA_QP_TIMEOUT", "0")] {
            let error = read_with(Protocol::GrpcVerbs, &[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
