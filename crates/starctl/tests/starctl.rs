//! End-to-end tests of the starctl binary.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test may panic, and its numbers are small")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use starwire_state::{Definition, Store};

#[path = "../../engine/tests/verbs/library.rs"]
mod fake_library;

fn starctl(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_starctl"));
    // The surrounding environment must not influence a test.
    command.args(arguments).env_clear().current_dir(std::env::temp_dir()).output().unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A process that is killed in the end.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running server, `starctl bench --serve`, and the address of its data port.
fn serve(mut starctl: Command) -> (Server, String) {
    let mut server = Server(starctl.env("STARWIRE_BIND", "127.0.0.1").stdout(Stdio::piped()).spawn().unwrap());
    let lines = BufReader::new(server.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let address = lines.filter_map(|line| Some(line.strip_prefix("starctl bench --to ")?.to_owned())).next().unwrap();
    (server, address)
}

fn server() -> (Server, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_starctl"));
    command.args(["bench", "--serve"]).env_clear();
    serve(command)
}

#[test]
fn every_command_explains_itself() {
    let overview = out(&starctl(&["--help"]));
    for command in ["doctor", "top", "health", "endpoint-map", "secret", "plan", "state", "bench", "completions"] {
        assert!(overview.contains(&format!("\n  {command} ")), "{overview}");
        let help = starctl(&[command, "--help"]);
        assert!(help.status.success());
        assert!(out(&help).contains(&format!("Usage: starctl {command} ")), "{}", out(&help));
    }
}

#[test]
fn a_secret_is_written_for_its_owner_only_and_never_overwritten() {
    use std::os::unix::fs::PermissionsExt;
    let printed = out(&starctl(&["secret"]));
    assert!(printed.len() == 65 && printed.trim_end().bytes().all(|b| b.is_ascii_hexdigit()), "{printed}");
    let path = std::env::temp_dir().join(format!("starctl-secret-{}", std::process::id()));
    let file = path.to_str().unwrap();
    assert!(starctl(&["secret", "--file", file]).status.success());
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let secret = std::fs::read_to_string(&path).unwrap();
    let again = starctl(&["secret", "--file", file]);
    let after = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(err(&again).contains(&format!("cannot write {file}")), "{}", err(&again));
    assert!(secret.len() == 65 && secret == after && secret != printed);
}

#[test]
fn invalid_command_lines_exit_with_2_and_a_reason() {
    for (arguments, reason) in [
        (&["nonsense"][..], "unrecognized subcommand 'nonsense'"),
        (&["health"], "no server: give addresses or --cluster, or set TF_CONFIG"),
        (&["health", "x"], "invalid value 'x' for '[ADDRESS]...': the port is missing (host:port)"),
        (&["health", "x:0"], "invalid value 'x:0' for '[ADDRESS]...': the port is 0"),
        (&["top", "a:1", "--interval-ms", "x"], "invalid value 'x' for '--interval-ms <N>'"),
        (&["top", "a:1", "--interval-ms", "49"], "49 is not in 50..=3600000"),
        (&["top", "a:1", "--cluster", "ps=a:1"], "'[ADDRESS]...' cannot be used with '--cluster <JOB=HOST:PORT,...>'"),
        (&["endpoint-map"], "no cluster: give --cluster or set TF_CONFIG"),
        (&["plan"], "<GRAPH.pb>"),
        (&["plan", "--as", "grpc", "x"], "[possible values: star_server, star_server_lite, tensor_fuse]"),
        (&["plan", "--worker", "worker:0", "x"], "invalid value 'worker:0' for '--worker <TASK>'"),
        (&["doctor", "--frob"], "unexpected argument '--frob' found"),
        (
            &["doctor", "--cluster", "ps=a:1", "--job", "worker"],
            "the cluster has no job \"worker\"; choose one with --job",
        ),
        (&["doctor", "--protocol", "grpc+"], "invalid value 'grpc+' for '--protocol <NAME>'"),
        (&["bench", "--serve", "--to", "a:1"], "'--serve' cannot be used with '--to <ADDRESS>'"),
        (&["bench", "--count", "3"], "--size <BYTES>"),
        (&["bench", "--size", "1073741825"], "1073741825 is not in 0..=1073741824"),
        (&["bench", "now"], "unexpected argument 'now' found"),
        (&["completions"], "<SHELL>"),
        (&["completions", "tcsh"], "invalid value 'tcsh' for '<SHELL>'"),
    ] {
        let output = starctl(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(err(&output).contains(reason), "{arguments:?}: {}", err(&output));
    }
    assert_eq!(starctl(&[]).status.code(), Some(2));
}

#[test]
fn health_of_present_and_absent_servers() {
    let (_server, address) = server();
    let output = starctl(&["health", "--timeout-ms", "60000", &address]);
    assert!(output.status.success());
    assert_eq!(out(&output), format!("{address} SERVING\n"));

    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let output = starctl(&["health", "--timeout-ms", "60000", &address, &closed]);
    assert_eq!(output.status.code(), Some(1));
    assert!(out(&output).contains(&format!("{closed} UNREACHABLE (Connection refused")), "{}", out(&output));

    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let output = starctl(&["health", "--timeout-ms", "200", &address]);
    assert_eq!(out(&output), format!("{address} UNREACHABLE (no answer in time)\n"));
}

/// Answers an HTTP/2 request with headers, and says nothing more.
fn answer_without_an_end(mut client: TcpStream) -> std::io::Result<TcpStream> {
    client.read_exact(&mut [0; 24])?;
    loop {
        let mut head = [0; 9];
        client.read_exact(&mut head)?;
        client.read_exact(&mut vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize])?;
        if head[3] == 1 {
            break;
        }
    }
    // SETTINGS; HEADERS of stream 1: status 200, content-type application/grpc.
    client.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0])?;
    client.write_all(&[0, 0, 20, 1, 4, 0, 0, 0, 1, 0x88, 0x0f, 0x10, 16])?;
    client.write_all(b"application/grpc")?;
    Ok(client)
}

#[test]
fn servers_that_hang_while_they_answer_are_unreachable() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // A client that has waited for long enough is gone.
    let server = std::thread::spawn(move || [(), ()].map(|()| answer_without_an_end(listener.accept()?.0)));
    // Both at once.
    let output = starctl(&["health", "--timeout-ms", "2000", &address, &address]);
    let line = format!("{address} UNREACHABLE (no answer in time)\n");
    assert_eq!(out(&output), line.repeat(2));
    drop(server.join().unwrap());
}

#[test]
fn top_shows_a_line_per_server() {
    let (_server, address) = server();
    let output = starctl(&["top", "--once", "--interval-ms", "50", "--connections", &address]);
    assert!(output.status.success(), "{}", err(&output));
    assert!(out(&output).contains("\n/job:starctl/replica:0/task:0 grpc++ "), "{}", out(&output));
}

#[test]
fn servers_are_found_by_their_address_in_the_cluster_spec() {
    let (_server, data) = server();
    let (host, port) = data.rsplit_once(':').unwrap();
    let port: u16 = port.parse().unwrap();
    let grpc = format!("{host}:{}", port - 7);
    let run = |words: &[&str], offset: u16| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_starctl"));
        command.args(words).env_clear().current_dir(std::env::temp_dir());
        command.env("STARWIRE_PORTS", "two").env("STARWIRE_PORT_OFFSET", offset.to_string()).output().unwrap()
    };
    assert_eq!(out(&run(&["health", "--timeout-ms", "60000", &grpc], 7)), format!("{grpc} SERVING\n"));
    let top = run(&["top", "--once", "--interval-ms", "50", "--cluster", &format!("ps={grpc}")], 7);
    assert!(out(&top).contains("\n/job:starctl/replica:0/task:0 grpc++ "), "{}", out(&top));
    let doctor = run(&["doctor", "--connect", "--cluster", &format!("ps={grpc}")], 7);
    assert!(out(&doctor).contains("1 reachable"), "{}", out(&doctor));

    // With the data port instead, each message says how to use it. Nobody listens at the last port.
    let wrong = run(&["health", &data], u16::MAX - port);
    assert_eq!(wrong.status.code(), Some(1));
    let expected = format!(
        "{data} UNREACHABLE (Connection refused (os error 111) (data port {host}:65535); \
         if {data} is the data port itself, set STARWIRE_PORTS=one)\n"
    );
    assert_eq!(out(&wrong), expected);
    let remedy = format!("; if {data} is the data port itself, set STARWIRE_PORTS=one\n");
    let top = run(&["top", "--once", "--interval-ms", "50", &data], u16::MAX - port);
    assert!(out(&top).contains(&remedy), "{}", out(&top));
    let beyond = run(&["health", &data], u16::MAX - 1);
    assert!(err(&beyond).ends_with(&remedy), "{}", err(&beyond));
}

#[test]
fn a_checkpoint_is_not_written_into_the_folder_of_a_state() {
    let folder = std::env::temp_dir().join(format!("starctl-export-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let text = folder.to_str().unwrap();
    let inside = "a checkpoint cannot be in the folder of a state";
    let refused = |to: &str, state: &str, why: &str| {
        let output = starctl(&["state", "export", "--to", &format!("{text}/{to}"), state]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(why), "{error}");
    };
    refused("out", text, inside);
    // Of a state that is not to be exported.
    std::fs::write(folder.join("journal-1"), "").unwrap();
    refused("out", "/somewhere", inside);
    for to in ["", ".", "..", "out/"] {
        refused(to, "/somewhere", "a checkpoint needs a name in its folder");
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// A folder for a test, which is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("starctl-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn names(&self) -> Vec<String> {
        let names = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A flush of the state of a server in this folder: a row of its only variable, which the first one makes.
fn flush(folder: &str, task: u32, row: u64) {
    let mut store = Store::open(Path::new(folder), &format!("/job:ps/replica:0/task:{task}"), &[1]).unwrap();
    let mut flush = store.begin().unwrap();
    if flush.is_empty() && row == 0 {
        // A NodeDef with a name.
        let bytes = format!("\n\x02v{task}").into_bytes();
        let id = flush.variable(Definition { bytes, dims: vec![4, 2], rows: 4, row_bytes: 8 });
        flush.rows(id, 0, &[1; 32]);
    } else {
        flush.rows(1, row, &[2; 8]);
    }
    flush.commit(b"").unwrap();
}

#[test]
fn an_export_that_has_failed_leaves_nothing() {
    let all = Folder::new("failed");
    let [ps, to] = ["ps-0", "out"].map(|name| all.path(name));
    flush(&ps, 0, 0);
    let output = starctl(&["state", "export", "--to", &to, &ps, &ps]);
    assert!(err(&output).contains("both have a variable v0"), "{}", err(&output));
    assert_eq!(all.names(), ["ps-0"]);
    // The last step fails.
    fs::create_dir(all.path("out.index")).unwrap();
    assert!(!starctl(&["state", "export", "--to", &to, &ps]).status.success());
    assert!(all.names().iter().all(|name| !name.ends_with(".new")), "{:?}", all.names());
    fs::remove_dir(all.path("out.index")).unwrap();
    assert!(starctl(&["state", "export", "--to", &to, &ps]).status.success());
    assert_eq!(all.names(), ["out.data-00000-of-00001", "out.flushes", "out.index", "ps-0"]);
}

#[test]
fn what_has_changed_is_exported_unless_the_state_went_back() {
    let all = Folder::new("since");
    let [ps, copy, full, more] = ["ps-0", "copy", "full", "more"].map(|name| all.path(name));
    let export =
        |to: &str, since: &str, folder: &str| starctl(&["state", "export", "--to", to, "--since", since, folder]);
    flush(&ps, 0, 0);
    fs::create_dir(&copy).unwrap();
    for file in fs::read_dir(&ps).unwrap().map(|file| file.unwrap().path()) {
        fs::copy(&file, Path::new(&copy).join(file.file_name().unwrap())).unwrap();
    }
    assert!(starctl(&["state", "export", "--to", &all.path("common"), &ps]).status.success());
    flush(&ps, 0, 1);
    assert!(starctl(&["state", "export", "--to", &full, &ps]).status.success());
    // The copy lacks that flush; its own has the same number, and another row.
    std::thread::sleep(Duration::from_millis(3));
    (2..4).for_each(|row| flush(&copy, 0, row));
    let output = export(&more, &full, &copy);
    let why = "/job:ps/replica:0/task:0: the state does not say what has changed since: export everything";
    assert!(!output.status.success() && err(&output).contains(why), "{}", err(&output));
    for (since, folder) in [(&full, &ps), (&all.path("common"), &copy)] {
        let output = export(&more, since, folder);
        assert!(output.status.success(), "{}", err(&output));
    }
    assert!(out(&export(&more, &all.path("common"), &copy)).contains(": 2 tensors, 32 bytes"), "two rows");
    let (before, output) = (fs::read(format!("{full}.index")).unwrap(), export(&full, &full, &ps));
    assert!(!output.status.success() && err(&output).contains("cannot take its place"), "{}", err(&output));
    assert_eq!(fs::read(format!("{full}.index")).unwrap(), before);
    // Older versions did not write when the flush began.
    let flushes = r#"{"/job:ps/replica:0/task:0":{"flush":2,"incarnations":[1]}}"#;
    fs::write(format!("{full}.flushes"), flushes).unwrap();
    let output = export(&more, &full, &ps);
    assert!(!output.status.success() && err(&output).contains(why), "{}", err(&output));
}

/// A command whose standard output nobody reads. Returns its exit status, and what it says to standard error.
fn unread(arguments: &[&str], environment: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut reader = Command::new("true").stdin(Stdio::piped()).spawn().unwrap();
    let writer = reader.stdin.take().unwrap();
    reader.wait().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_starctl"));
    command.args(arguments).env_clear().envs(environment.iter().copied());
    command.current_dir(std::env::temp_dir()).stdout(writer);
    let output = command.output().unwrap();
    (output.status.code(), err(&output))
}

#[test]
fn a_command_ends_quietly_if_nobody_reads_what_it_prints() {
    let all = Folder::new("unread");
    let ps = all.path("ps-0");
    flush(&ps, 0, 0);
    for arguments in [
        &["--help"][..],
        &["secret"],
        &["completions", "bash"],
        &["endpoint-map", "--cluster", "ps=a:1"],
        &["state", "show", &ps],
        &["bench", "--seconds", "1", "--size", "1"],
    ] {
        assert_eq!(unread(arguments, &[]), (Some(0), String::new()), "{arguments:?}");
    }
    // What has been found is in the exit status.
    assert_eq!(unread(&["health", "127.0.0.1:1"], &[]), (Some(1), String::new()));
    let doctor = ["doctor", "--cluster", "ps=localhost:1"];
    assert_eq!(unread(&doctor, &[("STARWIRE_UNIX", "perhaps")]), (Some(1), String::new()));
    // The disk is full: nobody gets what a command says.
    let mut command = Command::new(env!("CARGO_BIN_EXE_starctl"));
    let output = command.arg("secret").stdout(fs::File::create("/dev/full").unwrap()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(err(&output).starts_with("error: cannot write to standard output: No space left"), "{}", err(&output));
}

#[test]
fn an_export_goes_on_if_nobody_reads_what_it_prints() {
    let all = Folder::new("unread-export");
    let [first, second, to] = ["ps-0", "ps-1", "out"].map(|name| all.path(name));
    flush(&first, 0, 0);
    flush(&second, 1, 0);
    assert_eq!(unread(&["state", "export", "--to", &to, &first, &second], &[]), (Some(0), String::new()));
    assert_eq!(all.names(), ["out.data-00000-of-00001", "out.flushes", "out.index", "ps-0", "ps-1"]);
    assert_eq!(fs::metadata(all.path("out.data-00000-of-00001")).unwrap().len(), 64);
}

#[test]
fn doctor_finds_what_is_wrong() {
    let output = starctl(&["doctor"]);
    assert!(output.status.success(), "{}", out(&output));
    let mut command = Command::new(env!("CARGO_BIN_EXE_starctl"));
    command.args(["doctor", "--cluster", "ps=localhost:1"]).env_clear().env("STARWIRE_UNIX", "perhaps");
    let output = command.current_dir(std::env::temp_dir()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let reason = "STARWIRE_UNIX=\"perhaps\" is invalid: it must be one of auto, socket, off\n";
    assert!(out(&output).contains(reason), "{}", out(&output));
}

/// It takes the protocol from the environment; without a cluster, only a parameter server can have a state.
#[test]
fn doctor_finds_nothing_wrong_with_a_standby() {
    for cluster in [&[][..], &["--cluster", "ps=localhost:1,localhost:2;worker=localhost:3"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_starctl"));
        command.arg("doctor").args(cluster).env_clear().current_dir(std::env::temp_dir());
        command.env("STARWIRE_STATE", "/somewhere").env("STARWIRE_STATE_FROM", "standby=elsewhere:1");
        let output = command.env("STARWIRE_PROTOCOL", "starwire+star_server").output().unwrap();
        assert!(output.status.success() && out(&output).contains("STARWIRE_STATE_FROM=standby="), "{}", out(&output));
        let output = command.args(["--protocol", "grpc++"]).output().unwrap();
        assert!(out(&output).contains("it is no parameter server"), "{}", out(&output));
    }
}

#[test]
fn an_endpoint_map_is_written() {
    let output = starctl(&["endpoint-map", "--cluster", "ps=a:1,a:2", "--port", "9"]);
    let lines = "a:1=a:9  # /job:ps/replica:0/task:0\na:2=a:10  # /job:ps/replica:0/task:1\n";
    assert!(out(&output).ends_with(lines), "{}", out(&output));
}

#[test]
fn bench_measures() {
    let output = starctl(&["bench", "--seconds", "1", "--size", "100", "--count", "10"]);
    assert!(output.status.success(), "{}", err(&output));
    assert_eq!(out(&output).matches("\n10 × 100 B ").count(), 2, "{}", out(&output));
}

/// A command that uses the fake libibverbs with these devices.
fn with_rdma(args: &[&str], devices: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_starctl"));
    command.args(args).env_clear().env("STARWIRE_VERBS_LIBRARY", fake_library::path()).env("FAKE_VERBS", devices);
    command
}

#[test]
fn bench_compares_rdma_with_tcp() {
    let mut command = with_rdma(&["bench", "--seconds", "1", "--size", "100000", "--count", "3"], "fake0");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    let text = out(&output);
    assert_eq!(text.matches("\n3 × 100000 B ").count(), 3, "{text}");
    assert!(text.contains("\nRDMA, both ends on this host's device\n"), "{text}");
}

/// In two processes, as between two hosts.
#[test]
fn bench_measures_between_peers_over_tcp_and_rdma() {
    for (transport, way) in [("tcp", "(epoll,"), ("verbs", "with RDMA (fake0 port 1, GID 1 (::ffff:10.77.0.1)")] {
        let env = [
            ("STARWIRE_TRANSPORT", transport),
            ("STARWIRE_VERBS_FALLBACK", "false"),
            ("STARWIRE_UNIX", "off"),
            ("STARWIRE_DRIVER", "epoll"),
        ];
        let mut command = with_rdma(&["bench", "--serve"], "fake0");
        command.envs(env);
        let (_server, address) = serve(command);
        let mut ask = with_rdma(&["bench", "--to", &address, "--seconds", "1", "--size", "200000"], "fake0");
        let output = ask.envs(env).env("STARWIRE_BIND", "127.0.0.1").output().unwrap();
        assert!(output.status.success(), "{transport}: {}", err(&output));
        assert!(out(&output).contains(way) && out(&output).contains("\n1 × 200000 B "), "{}", out(&output));
        let mut metrics = TcpStream::connect(&address).unwrap();
        metrics.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        metrics.read_to_string(&mut text).unwrap();
        let offered = text.lines().find(|line| line.starts_with("starwire_verbs_offered_bytes_total")).unwrap();
        let offered: u64 = offered.trim().rsplit(' ').next().unwrap().parse().unwrap();
        assert_eq!(offered >= 200_000, transport == "verbs", "{transport}: {offered} bytes");
    }
}

#[test]
fn doctor_examines_rdma() {
    let doctor = ["doctor", "--protocol", "grpc+verbs"];
    let output = with_rdma(&doctor, "good0:mtu=5;cut0:down;bare0:nogid;shut0:open_device@1+=13").output().unwrap();
    let text = out(&output);
    for part in [
        "1 ::ffff:10.77.0.1",
        "it cannot be used",
        "assign an IP address to its network interface",
        "cannot open device shut0",
        "connections would use good0 port 1",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let output = with_rdma(&doctor, ";").output().unwrap();
    assert!(out(&output).contains("no RDMA device"), "{}", out(&output));
    let output = with_rdma(&doctor, "good0").env("STARWIRE_VERBS_LIBRARY", "/nonexistent.so").output().unwrap();
    assert!(out(&output).contains("cannot load /nonexistent.so"), "{}", out(&output));
    // Lower the limit only in the child: it cannot be raised again.
    let script = "ulimit -l 64 && exec \"$0\" doctor --protocol grpc+verbs";
    let mut command = Command::new("bash");
    command.args(["-c", script, env!("CARGO_BIN_EXE_starctl")]).env("STARWIRE_VERBS_LIBRARY", fake_library::path());
    let output = command.output().unwrap();
    assert!(out(&output).contains("64 KiB: RDMA pins buffers"), "{}", out(&output));
}

#[test]
fn programs_get_json() {
    let (_server, address) = server();
    let health = starctl(&["health", "--timeout-ms", "60000", "--json", &address, "127.0.0.1:1"]);
    let parsed: serde_json::Value = serde_json::from_str(&out(&health)).unwrap();
    assert_eq!(parsed[0], serde_json::json!({"address": address, "status": "SERVING", "reason": null}));
    assert_eq!(parsed[1]["status"], "UNREACHABLE");
    assert!(parsed[1]["reason"].as_str().unwrap().contains("refused"), "{parsed}");
    assert_eq!(health.status.code(), Some(1));

    let top = starctl(&["top", "--json", "--once", "--interval-ms", "50", &address, "127.0.0.1:1"]);
    let text = out(&top);
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((lines.len(), &lines[0]["task"]), (2, &serde_json::json!("/job:starctl/replica:0/task:0")));
    assert!(lines[0]["metrics"]["starwire_waits_total"].as_u64().unwrap() > 0, "{text}");
    assert_eq!(lines[0]["metrics"]["starwire_call_seconds"]["count"], 0);
    assert!(lines[1]["error"].as_str().unwrap().contains("refused"), "{text}");

    let doctor: serde_json::Value = serde_json::from_str(&out(&starctl(&["doctor", "--json"]))).unwrap();
    assert!(doctor.as_array().unwrap().iter().any(|finding| finding["verdict"] == "ok"), "{doctor}");
}

/// bash completes commands, and options of the command.
#[test]
fn a_shell_completes_command_lines() {
    let complete = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let script = format!(
            "eval \"$('{}' completions bash)\"; COMP_WORDS=({line}); COMP_CWORD={}; _starctl starctl '{}'; echo \"${{COMPREPLY[*]}}\"",
            env!("CARGO_BIN_EXE_starctl"),
            words.len() - 1,
            words[words.len() - 1],
        );
        let output = Command::new("bash").args(["--norc", "-c", &script]).output().unwrap();
        assert!(output.status.success(), "{}", err(&output));
        out(&output).trim().to_owned()
    };
    assert_eq!(complete("starctl hea"), "health");
    assert_eq!(complete("starctl health --t"), "--timeout-ms");
    assert_eq!(complete("starctl top --"), "--cluster --interval-ms --once --connections --json --help");
    for shell in ["zsh", "fish"] {
        let script = out(&starctl(&["completions", shell]));
        assert!(script.contains("timeout-ms") && script.contains("endpoint-map"), "{script}");
    }
}
