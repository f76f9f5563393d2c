//! Text formats written by people and peers: `.endpoint_map`, addresses.

use std::path::Path;

use starwire_engine::config::{EndpointMap, HostPort};

/// The first byte selects the format. Accepted input must survive a round trip through its text form.
pub fn text(data: &[u8]) {
    let (kind, data) = data.split_first().unwrap_or((&0, &[]));
    match kind % 2 {
        0 => map(data),
        _ => address(&String::from_utf8_lossy(data)),
    }
}

fn map(data: &[u8]) {
    let path = Path::new(".endpoint_map");
    let Ok(map) = EndpointMap::parse(path, data) else { return };
    let lines = map.addresses().map(|grpc| {
        let data = map.get(grpc).expect("an address of the map");
        format!("{grpc}={data}\n")
    });
    let again = EndpointMap::parse(path, lines.collect::<String>().as_bytes()).expect("a map that was understood");
    assert_eq!(again.len(), map.len());
    assert!(map.addresses().all(|grpc| again.get(grpc) == map.get(grpc)));
}

fn address(text: &str) {
    let Ok(address) = text.parse::<HostPort>() else { return };
    assert_eq!(address.to_string().parse(), Ok(address));
}
