//! The driver contract, tested on every driver.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test may panic, and its numbers are small")]

mod connections;
mod lifecycle;
mod rig;
mod transfers;

use std::io::{self, Write};

use connections::*;
use lifecycle::*;
use rig::Rig;
use starwire_net::reactor::DriverError;
use starwire_net::reactor::driver::Driver;
use starwire_net::reactor::epoll::EpollDriver;
use starwire_net::reactor::uring::UringDriver;
use transfers::*;

fn epoll() -> Option<Box<dyn Driver>> {
    Some(Box::new(EpollDriver::new().expect("epoll is part of every kernel")))
}

/// `None`, with a warning, where the kernel refuses. STARWIRE_REQUIRE_IO_URING=1 makes that a failure.
fn uring() -> Option<Box<dyn Driver>> {
    unless_refused(UringDriver::new())
}

/// Queues so small that they are nearly always full.
fn small_uring() -> Option<Box<dyn Driver>> {
    unless_refused(UringDriver::with_queues(2, 4))
}

fn unless_refused(result: Result<UringDriver, DriverError>) -> Option<Box<dyn Driver>> {
    match result {
        Ok(driver) => Some(Box::new(driver)),
        Err(error) => {
            assert!(std::env::var_os("STARWIRE_REQUIRE_IO_URING").is_none(), "{error}");
            // Not print!: the test harness hides its output for tests that pass.
            let _ = writeln!(io::stderr(), "SKIPPED, NOT TESTED: {error}");
            None
        }
    }
}

macro_rules! conformance {
    ($($test:ident),* $(,)?) => {
        mod on_epoll {
            $(#[test] fn $test() { if let Some(driver) = super::epoll() { super::$test(super::Rig::new(driver, module_path!())) } })*
        }
        mod on_io_uring {
            $(#[test] fn $test() { if let Some(driver) = super::uring() { super::$test(super::Rig::new(driver, module_path!())) } })*
        }
        mod on_io_uring_with_small_queues {
            $(#[test] fn $test() { if let Some(driver) = super::small_uring() { super::$test(super::Rig::new(driver, module_path!())) } })*
        }
    };
}

conformance!(
    echo_over_tcp,
    echo_over_unix,
    nothing_is_reported_twice,
    partial_writes_lose_nothing,
    close_ends_a_receive_in_flight,
    close_ends_a_send_in_flight,
    close_reports_nothing_else,
    connect_refused_is_an_error,
    connect_to_a_missing_unix_name_is_an_error,
    a_closed_connect_reports_closed,
    many_connections_are_accepted,
    a_stream_that_ended_before_its_connection_was_reported_ends,
    accepting_goes_on_after_the_descriptor_limit,
    a_closed_listener_accepts_no_more,
    another_thread_wakes_a_wait,
    a_wake_up_before_the_wait_counts,
    timeouts_are_kept,
    a_peers_reset_is_an_error,
    half_close_ends_one_direction_only,
    data_before_the_end_of_stream_arrives,
    two_hundred_connections,
    many_parts,
    a_large_transfer,
    both_directions_at_once,
    stale_tokens_are_refused,
    released_descriptors_work_on,
    one_operation_per_direction,
    operations_on_no_bytes_are_refused,
    everything_can_be_ended_at_once,
    dropping_the_driver_with_operations_in_flight_is_safe,
);
