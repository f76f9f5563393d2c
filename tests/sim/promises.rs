//! One test for each promise of `docs/protocol.md`.

use std::time::Duration;

use crate::owner::{Ended, Request};
use crate::pair::Pair;
use crate::random::bytes_of;

const KEY: &[u8] = b"/job:ps/replica:0/task:0/device:CPU:0;0001;/job:worker/replica:0/task:0/device:CPU:0;edge_1_w";

#[test]
fn requests_and_replies_travel() {
    let mut pair = Pair::ready();
    let recv = pair.recv(KEY);
    let small = vec![bytes_of(1, 100), Vec::new(), bytes_of(2, 8000)];
    let large = vec![bytes_of(3, 8192), bytes_of(4, 5), bytes_of(5, 9_000_001), Vec::new()];
    let first = pair.call(3, b"meta", Some(small.clone()), None);
    let second = pair.call(4, b"", Some(large.clone()), Some(Duration::from_millis(1500)));
    pair.run();
    assert_eq!(pair.client.error, None);
    assert_eq!(pair.server.error, None);
    let recv_request = Request::Recv { id: recv, step: 7, prefix: KEY.to_vec(), frame: 0, iter: 0 };
    assert!(pair.server.owner.requests.contains(&recv_request));
    let (meta, parts) = (b"meta".to_vec(), small.clone());
    let call = Request::Call { id: first, method: 3, deadline_ms: 0, meta, parts };
    assert!(pair.server.owner.requests.contains(&call));
    let call = Request::Call { id: second, method: 4, deadline_ms: 1500, meta: Vec::new(), parts: large.clone() };
    assert!(pair.server.owner.requests.contains(&call));
    assert_eq!(pair.client.payloads.get(), 0);

    pair.reply(recv, 0, b"dtype", Some(large.clone()));
    pair.reply(first, 0, b"", None);
    pair.reply(second, 9, b"not now", Some(vec![bytes_of(9, 10_000)]));
    pair.run();
    let ended = &pair.client.owner.ended;
    assert_eq!(ended[&recv], Ended::Ok { meta: b"dtype".to_vec(), parts: large });
    assert_eq!(ended[&first], Ended::Ok { meta: Vec::new(), parts: Vec::new() });
    let details = bytes_of(9, 10_000);
    assert_eq!(ended[&second], Ended::Peer { code: 9, message: "not now".to_owned(), details });
    assert_eq!(pair.server.payloads.get(), 0);
    assert!(pair.client.connection.is_idle() && pair.server.connection.is_idle());
}
