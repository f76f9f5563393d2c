//! The answer to a peer that measures the path to this task.

use crate::api::OutPayload;
use crate::command::Meta;
use crate::star::Answer;
use starwire_protocol::code;
use starwire_protocol::measure::{MOST_MEASURED, SAME_HOST, read};

static ZEROS: [u8; MOST_MEASURED] = [0; MOST_MEASURED];

pub fn answer(id: u64, meta: &[u8], on_this_host: bool) -> Answer {
    let Some(bytes) = read(meta) else {
        let message =
            format!("starwire: malformed measurement: four bytes that ask for at most {MOST_MEASURED} expected");
        return Answer { id, code: code::INVALID_ARGUMENT, meta: Meta::of(message.as_bytes()), payload: None };
    };
    let flags = if on_this_host { SAME_HOST } else { 0 };
    let payload = ZEROS.get(..bytes).filter(|zeros| !zeros.is_empty()).map(|zeros| OutPayload::of(vec![zeros]));
    Answer { id, code: 0, meta: Meta::of(&[flags]), payload }
}
