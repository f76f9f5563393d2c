//! The heads of star calls: accepted input is written out and must give the same bytes.

use starwire_protocol::star::{CallHead, EndHead, RegisterHead, ReplyHead};

/// The first byte selects the head.
pub fn star(data: &[u8]) {
    let (kind, meta) = data.split_first().unwrap_or((&0, &[]));
    let mut again = Vec::new();
    match kind % 4 {
        0 => {
            let Ok((call, table)) = CallHead::read(meta) else { return };
            call.write(&mut again).expect("a head that was accepted");
            again.extend_from_slice(&meta[table..]);
        }
        1 => {
            let Ok(reply) = ReplyHead::read(meta) else { return };
            again.extend_from_slice(&reply.bytes());
            again.extend_from_slice(&meta[again.len()..]);
        }
        2 => {
            let Ok(register) = RegisterHead::read(meta) else { return };
            register.write(&mut again).expect("a head that was accepted");
        }
        _ => {
            let Ok(end) = EndHead::read(meta) else { return };
            end.write(&mut again).expect("a head that was accepted");
        }
    }
    assert_eq!(again, meta);
}
