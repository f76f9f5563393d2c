//! The swarm's command line. tests/swarm plays it against real servers.

#![allow(clippy::unwrap_used, reason = "a test may panic, and its numbers are small")]

use std::process::{Command, Output};

fn swarm(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_swarm")).args(arguments).output().unwrap()
}

#[test]
fn help_is_printed() {
    let output = swarm(&["--help"]);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("usage: swarm [OPTIONS]\n"), "{output:?}");
}

#[test]
fn invalid_command_lines_exit_with_2_and_a_reason() {
    for (arguments, reason) in [
        (&[][..], "swarm: --protocol is missing"),
        (&["--frob"], "unknown option --frob"),
        (&["--protocol", "http"], "--protocol \"http\" must be one of grpc, grpc++, star_server, star_server_lite"),
        (&["--protocol", "grpc", "--server", "x"], "--server \"x\" is not an address"),
        (
            &["--protocol", "grpc", "--server", "127.0.0.1:1", "--first-worker", "::1"],
            "--first-worker \"::1\" is not an IPv4 address with a port",
        ),
    ] {
        let output = swarm(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(reason), "{output:?}");
    }
}

#[test]
fn a_missing_recording_exits_with_1() {
    let arguments =
        ["--protocol=grpc", "--server=127.0.0.1:1", "--first-worker=127.0.0.1:1", "--recording=/nonexistent"];
    let output = swarm(&arguments);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("swarm: /nonexistent: "), "{output:?}");
}
