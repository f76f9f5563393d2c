//! `sw_channel`: an engine's handle to a peer.

use super::engine::sw_engine;
use super::error::sw_error;
use super::guard;
use super::handle::{self, borrow, require};
use super::host::CChannel;
use super::types::{sw_bytes, sw_code};
use starwire_protocol::code;

/// An engine's handle to a peer. It reconnects by itself; calls made while there is no connection wait or fail, as
/// requested.
pub struct sw_channel {
    pub(super) channel: CChannel,
}

/// Opens a channel to a task, without connecting yet. The data address is the one of .endpoint_map, if there is one;
/// otherwise it follows from grpc_address (docs/ports.md). Channels to the same (task, grpc_address) share one
/// connection. Without a grpc_address: to a task that has joined (docs/elastic.md); NotFound if it has not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_channel_open(
    engine: *mut sw_engine,
    task: sw_bytes,
    grpc_address: sw_bytes,
    out: *mut *mut sw_channel,
    error: *mut *mut sw_error,
) -> sw_code {
    // SAFETY: the caller's promise.
    let (engine, task, address) = unsafe { (require(engine, "an engine"), task.as_slice(), grpc_address.as_slice()) };
    let make = || {
        let engine = engine?;
        let text = |b: &[u8]| {
            String::from_utf8(b.to_vec())
                .map_err(|_| (code::INVALID_ARGUMENT, "starwire: a task's name is not UTF-8".to_string()))
        };
        let (task, address) = (text(task)?, text(address)?);
        let opened = match address.is_empty() {
            true => engine.engine.channel_to_joined(&task),
            false => engine.engine.channel(&task, &address),
        };
        opened.map_err(|e| (e.code(), e.to_string()))
    };
    // SAFETY: the caller's promise.
    unsafe { handle::create("opening a channel", out, error, || make().map(|channel| sw_channel { channel })) }
}

/// For the metrics: counts a reply over this channel that carries `tensors` tensors as one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_channel_count_fused(channel: *mut sw_channel, tensors: u64) {
    // SAFETY: the caller's promise.
    let channel = unsafe { borrow(channel) };
    guard((), || channel.map_or((), |channel| channel.channel.count_fused(tensors)));
}

/// Takes a lane for a star call to this channel's task, and stores the call's number (sw_star_call_head).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_channel_lane_take(channel: *mut sw_channel, number: *mut u64) -> u32 {
    // SAFETY: the caller's promise.
    let (channel, number) = unsafe { (borrow(channel), number.as_mut()) };
    let (Some(channel), Some(number)) = (channel, number) else { return 0 };
    let (lane, call) = guard((0, None), || {
        let (lane, call) = channel.channel.take_lane();
        (lane, Some(call))
    });
    *number = call.map_or(0, std::num::NonZeroU64::get);
    lane
}

/// Gives a lane back: nobody waits for its call any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_channel_lane_give(channel: *mut sw_channel, lane: u32) {
    // SAFETY: the caller's promise.
    let channel = unsafe { borrow(channel) };
    guard((), || channel.map_or((), |channel| channel.channel.give_lane(lane)));
}

/// # Safety
/// `channel` came from sw_channel_open and is not used afterwards. Calls in flight continue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sw_channel_free(channel: *mut sw_channel) {
    // SAFETY: the caller's promise.
    unsafe { handle::free(channel) }
}
