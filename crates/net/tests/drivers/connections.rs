//! Connecting and accepting.

use std::io::{self, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use starwire_net::reactor::driver::Completion;
use starwire_net::transport::{SocketAddress, tcp};

use crate::rig::{PATIENCE, Rig, listen_unix};

pub fn connect_refused_is_an_error(mut rig: Rig) {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let token = rig.start_connect(&free.into());
    assert_eq!(rig.connected(token).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    rig.driver.close(token);
    rig.closed(token);
}

pub fn connect_to_a_missing_unix_name_is_an_error(mut rig: Rig) {
    let (listener, address) = listen_unix();
    drop(listener);
    let token = rig.start_connect(&address);
    assert_eq!(rig.connected(token).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
}

pub fn a_closed_connect_reports_closed(mut rig: Rig) {
    let (_, address) = rig.listen_tcp();
    let token = rig.start_connect(&address);
    rig.driver.close(token);
    rig.closed(token);
}

pub fn a_stream_that_ended_before_its_connection_was_reported_ends(mut rig: Rig) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let token = rig.start_connect(&listener.local_addr().unwrap().into());
    listener.set_nonblocking(true).unwrap();
    let mut peer = loop {
        match listener.accept() {
            Ok((peer, _)) => break peer,
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
        // io_uring starts it here.
        rig.driver.wait(Some(Duration::ZERO), &mut rig.pending).unwrap();
    };
    peer.write_all(b"end").unwrap();
    peer.shutdown(Shutdown::Write).unwrap();
    rig.connected(token).unwrap();
    let mut buffer = [0; 64];
    assert_eq!(rig.recv(token, &mut buffer).unwrap(), 3);
    assert_eq!(rig.recv(token, &mut buffer).unwrap(), 0);
}

pub fn many_connections_are_accepted(mut rig: Rig) {
    let (listener, address) = rig.listen_tcp();
    let SocketAddress::Inet(inet) = address else { unreachable!() };
    let mut clients: Vec<_> = (0..150).map(|_| TcpStream::connect(inet).unwrap()).collect();
    let mut ports = std::collections::HashSet::new();
    for _ in 0..clients.len() {
        let fd = rig.accepted(listener).unwrap();
        // SAFETY: F_GETFD and F_GETFL take no pointers.
        let flags = unsafe { (libc::fcntl(fd.as_raw_fd(), libc::F_GETFD), libc::fcntl(fd.as_raw_fd(), libc::F_GETFL)) };
        assert_ne!(flags.0 & libc::FD_CLOEXEC, 0);
        assert_ne!(flags.1 & libc::O_NONBLOCK, 0);
        ports.insert(tcp::peer_address(fd.as_fd()).unwrap().unwrap());
    }
    assert_eq!(ports.len(), clients.len());
    clients.clear();
    TcpStream::connect(inet).unwrap();
    rig.accepted(listener).unwrap();
}

/// Runs in a child process, because the limit applies to all threads.
pub fn accepting_goes_on_after_the_descriptor_limit(mut rig: Rig) {
    const CHILD: &str = "STARWIRE_TEST_DESCRIPTOR_LIMIT";
    let name = format!("{}::accepting_goes_on_after_the_descriptor_limit", rig.module);
    if std::env::var_os(CHILD).is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", &name, "--nocapture"]).env(CHILD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        return;
    }
    let (listener, address) = rig.listen_tcp();
    let SocketAddress::Inet(inet) = address else { unreachable!() };
    let _first = TcpStream::connect(inet).unwrap();
    let _second = TcpStream::connect(inet).unwrap();
    let highest = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u64>().ok())
        .max()
        .unwrap();
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for both calls.
    let set = |limit: &mut libc::rlimit, current| unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, limit), 0);
        limit.rlim_cur = current;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, limit), 0);
    };
    let old = {
        // SAFETY: as above.
        unsafe { assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0) };
        limit.rlim_cur
    };
    // Fill every gap below the limit.
    set(&mut limit, highest + 1);
    let mut fillers = Vec::new();
    while let Ok(filler) = std::fs::File::open("/dev/null") {
        fillers.push(filler);
    }
    // The error is reported ten times a second, not in a busy loop: there are pauses, and few waits between them.
    const REPORTS: usize = 4;
    let start = Instant::now();
    let (mut waits, mut reports) = (0, 0);
    while reports < REPORTS {
        rig.driver.wait(Some(PATIENCE), &mut rig.pending).unwrap();
        waits += 1;
        for completion in rig.pending.drain(..) {
            let Completion::Accepted { result: Err(error), .. } = completion else { panic!("an error is expected") };
            assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
            reports += 1;
        }
    }
    assert!(start.elapsed() > Duration::from_millis(250), "{REPORTS} reports in {:?}", start.elapsed());
    assert!(waits <= 4 * REPORTS, "{waits} waits for {REPORTS} reports");
    set(&mut limit, old);
    let mut accepted = 0;
    while accepted < 2 {
        accepted += usize::from(rig.accepted(listener).is_ok());
    }
}

pub fn a_closed_listener_accepts_no_more(mut rig: Rig) {
    let (listener, address) = rig.listen_tcp();
    rig.driver.close(listener);
    rig.closed(listener);
    let SocketAddress::Inet(inet) = address else { unreachable!() };
    assert_eq!(TcpStream::connect(inet).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    rig.quiet(Duration::from_millis(10));
}
