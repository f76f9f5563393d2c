//! Finds the data port of servers: a task answers GetStatus on TensorFlow's gRPC port, and a starwire server adds its
//! advertisement to the reply.

use std::time::Duration;

use prost::Message;
use starwire_engine::config::{Advertisement, HostPort};
use tonic::Code;
use tonic::codegen::http::uri::PathAndQuery;
use tonic_prost::ProstCodec;

use crate::args::{Args, Failure, Opt};
use crate::cluster::{self, Cluster};
use crate::remote;

const GET_STATUS: &str = "/tensorflow.WorkerService/GetStatus";
/// Around the advertisement in the description of a device (`cc/worker/advertisement.cc`).
const OPEN: &str = "starwire{";
const CLOSE: char = '}';

pub const CLUSTER: Opt = cluster::CLUSTER;

#[derive(Clone, PartialEq, Message)]
struct GetStatusRequest {}

#[derive(Clone, PartialEq, Message)]
struct GetStatusResponse {
    #[prost(message, repeated, tag = "1")]
    device_attributes: Vec<DeviceAttributes>,
}

#[derive(Clone, PartialEq, Message)]
struct DeviceAttributes {
    #[prost(string, tag = "7")]
    physical_device_desc: String,
}

/// A server that the command line names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Of the ClusterSpec or of a data port, as it was given.
    pub address: HostPort,
    /// If it comes from a cluster: the job and the number of the task.
    pub task: Option<(String, usize)>,
}

/// The servers that are meant: the addresses, else the cluster's tasks.
pub fn targets(args: &Args) -> Result<Vec<Target>, Failure> {
    from(args, std::env::var("TF_CONFIG").ok().as_deref())
}

fn from(args: &Args, tf_config: Option<&str>) -> Result<Vec<Target>, Failure> {
    if !args.positional.is_empty() {
        if args.has(CLUSTER.name) {
            return Err(Failure::Usage("addresses and --cluster exclude each other".to_owned()));
        }
        let addresses = args.positional.iter().map(|text| remote::parse_address(text));
        return addresses.map(|address| Ok(Target { address: address?, task: None })).collect();
    }
    let none = || Failure::Usage("no server: give addresses or --cluster, or set TF_CONFIG".to_owned());
    let cluster = Cluster::from_args(args, tf_config)?.ok_or_else(none)?;
    let tasks = cluster.tasks.iter();
    tasks
        .map(|task| {
            Ok(Target { address: remote::parse_address(&task.address)?, task: Some((task.job.clone(), task.index)) })
        })
        .collect()
}

/// The data port of the server at an address, which may be the data port itself.
pub async fn data_port(address: &HostPort, timeout: Duration) -> Result<HostPort, String> {
    match status(address, timeout).await {
        Ok(reply) => {
            let said = advertisement(&reply).ok_or_else(|| {
                format!("{address} is a TensorFlow server without a data port: it runs stock grpc, or is stopping")
            })?;
            let parsed: Advertisement =
                said.parse().map_err(|e| format!("{address} advertises a data port that cannot be read: {e}"))?;
            parsed.data.into_iter().next().ok_or_else(|| format!("{address} advertises no data address"))
        }
        // Only TensorFlow's port knows the method.
        Err(status) if status.code() == Code::Unimplemented => Ok(address.clone()),
        Err(status) => Err(remote::explain(&status)),
    }
}

async fn status(address: &HostPort, timeout: Duration) -> Result<GetStatusResponse, tonic::Status> {
    let channel = remote::channel(address, timeout).map_err(|e| tonic::Status::invalid_argument(e.to_string()))?;
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.map_err(|e| tonic::Status::from_error(e.into()))?;
    let codec = ProstCodec::<GetStatusRequest, GetStatusResponse>::default();
    let path = PathAndQuery::from_static(GET_STATUS);
    Ok(client.unary(tonic::Request::new(GetStatusRequest {}), path, codec).await?.into_inner())
}

fn advertisement(reply: &GetStatusResponse) -> Option<&str> {
    let texts = reply.device_attributes.iter().map(|device| device.physical_device_desc.as_str());
    texts.filter_map(|text| Some(text.split_once(OPEN)?.1.split_once(CLOSE)?.0)).next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Parsed, parse};

    fn from(words: &[&str], tf_config: Option<&str>) -> Result<Vec<Target>, String> {
        let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
        let Ok(Parsed::Run(args)) = parse(&crate::health::COMMAND, &words) else { panic!("bad words") };
        super::from(&args, tf_config).map_err(|e| e.to_string())
    }

    fn names(found: &[Target]) -> Vec<String> {
        found.iter().map(|t| format!("{} {:?}", t.address, t.task)).collect()
    }

    #[test]
    fn addresses_come_before_the_cluster() {
        let config = r#"{"cluster": {"ps": ["a:1"], "worker": ["b:2"]}}"#;
        assert_eq!(names(&from(&["c:3"], Some(config)).unwrap()), ["c:3 None"]);
        assert_eq!(names(&from(&[], Some(config)).unwrap()), ["a:1 Some((\"ps\", 0))", "b:2 Some((\"worker\", 0))"]);
        assert_eq!(names(&from(&["--cluster", "ps=x:1,y:1"], Some(config)).unwrap()).len(), 2);
        assert_eq!(from(&[], None).unwrap_err(), "no server: give addresses or --cluster, or set TF_CONFIG");
        let both = from(&["c:3", "--cluster", "ps=x:1"], None);
        assert_eq!(both.unwrap_err(), "addresses and --cluster exclude each other");
    }

    #[test]
    fn the_advertisement_is_found_behind_other_words() {
        let device = |text: &str| DeviceAttributes { physical_device_desc: text.to_owned() };
        let reply = |texts: &[&str]| GetStatusResponse { device_attributes: texts.iter().map(|t| device(t)).collect() };
        assert_eq!(advertisement(&reply(&["GPU", "cpu starwire{abc} x"])), Some("abc"));
        assert_eq!(advertisement(&reply(&["starwire{abc", ""])), None);
        assert_eq!(advertisement(&reply(&[])), None);
    }
}
