//! Text formats written by people and peers: `.endpoint_map`, advertisements, addresses.

use std::path::Path;

use starwire_engine::config::{Advertisement, EndpointMap, HostPort};

/// The first byte selects the format. Accepted input must survive a round trip through its text form.
pub fn text(data: &[u8]) {
    let (kind, data) = data.split_first().unwrap_or((&0, &[]));
    match kind % 3 {
        0 => map(data),
        1 => advertisement(&String::from_utf8_lossy(data)),
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

fn advertisement(text: &str) {
    let Ok(advertisement) = text.parse::<Advertisement>() else { return };
    let again = advertisement.to_string();
    // Escaping turns some bytes into three.
    if again.len() <= 8192 {
        assert_eq!(again.parse(), Ok(advertisement));
    }
}

fn address(text: &str) {
    let Ok(address) = text.parse::<HostPort>() else { return };
    assert_eq!(address.to_string().parse(), Ok(address));
}
