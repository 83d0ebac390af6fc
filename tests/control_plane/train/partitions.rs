//! Tests of nodes in network namespaces, which are connected by a bridge as machines are by a switch: links that break,
//! and strangers that try to disturb. The tests are skipped with a message where namespaces cannot be made, for example
//! without root.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;

use super::nodes::{has_made, workers_of_attempts};
use super::support::{BASE, assert_close, events, last_trace, run_dir, stage, trace, train};
use crate::nodes::write_token;
use crate::stage::{Stage, eventually, signal, wait, workers_of};

/// Port of node 0. Nobody else is in its namespace.
const PORT: u16 = 29_400;

/// Namespaces with the addresses 10.77.0.1, 10.77.0.2, ..., and one more with the bridge between them.
struct Network {
    prefix: String,
    members: usize,
}

impl Network {
    /// Returns `None` after printing a message if namespaces cannot be made.
    #[allow(clippy::print_stderr, reason = "the test says why it is skipped")]
    fn new(members: usize) -> Option<Self> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let network = Self { prefix: format!("ld{}-{number}-", std::process::id()), members };
        match network.set_up() {
            Ok(()) => Some(network),
            Err(reason) => {
                eprintln!("skipped: network namespaces cannot be made: {reason}");
                None
            }
        }
    }

    fn set_up(&self) -> Result<(), String> {
        let switch = self.name("switch");
        ip(&format!("netns add {switch}"))?;
        ip(&format!("-n {switch} link add br0 type bridge"))?;
        ip(&format!("-n {switch} link set br0 up"))?;
        for member in 0..self.members {
            let (name, address) = (self.name(&member.to_string()), Self::address(member));
            ip(&format!("netns add {name}"))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link add eth0 type veth peer name port{member} netns {switch}"))?;
            ip(&format!("-n {name} address add {address}/24 dev eth0"))?;
            ip(&format!("-n {name} link set eth0 up"))?;
            ip(&format!("-n {switch} link set port{member} master br0 up"))?;
        }
        Ok(())
    }

    fn name(&self, part: &str) -> String {
        format!("{}{part}", self.prefix)
    }

    fn address(member: usize) -> String {
        format!("10.77.0.{}", member + 1)
    }

    /// Breaks or mends the link of a member.
    fn set_link(&self, member: usize, state: &str) {
        ip(&format!("-n {} link set port{member} {state}", self.name("switch"))).expect("the link exists");
    }

    /// A command that runs in the namespace of a member.
    fn inside(&self, member: usize, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &self.name(&member.to_string())]).arg(command.get_program());
        inside.args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside.current_dir(command.get_current_dir().expect("the command has a folder"));
        inside
    }

    /// Starts the launcher of a node in its namespace. Its output is appended to the file `node-K.log`.
    fn start(&self, stage: &Stage, node: usize, nodes: &str, line: &str) -> Child {
        let rendezvous = format!("--nnodes {nodes} --rendezvous {}:{PORT}", Self::address(0));
        self.start_at(node, stage, node, &format!("{rendezvous} {line}"))
    }

    /// Starts the launcher of a node in the namespace of a member.
    fn start_at(&self, member: usize, stage: &Stage, node: usize, line: &str) -> Child {
        let command = stage.command(&format!("--node-rank {node} --token-file token {line}"));
        let path = stage.path().join(format!("node-{member}.log"));
        let log = std::fs::File::options().append(true).create(true).open(path).expect("the folder is writable");
        let mut command = self.inside(member, &command);
        command.stdout(Stdio::null()).stderr(log).spawn().expect("the launcher can be started")
    }

    /// Tells a member which address has the name `node-zero`. `ip netns exec` shows each namespace a file `/etc/hosts` of
    /// its own.
    fn set_name(&self, member: usize, address: &str) {
        let folder = self.own_files(member);
        std::fs::create_dir_all(&folder).expect("root may write there");
        std::fs::write(folder.join("hosts"), format!("127.0.0.1 localhost\n{address} node-zero\n")).expect("likewise");
    }

    fn own_files(&self, member: usize) -> PathBuf {
        PathBuf::from("/etc/netns").join(self.name(&member.to_string()))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for member in 0..self.members {
            let _ = ip(&format!("netns delete {}", self.name(&member.to_string())));
            let _ = std::fs::remove_dir_all(self.own_files(member));
        }
        let _ = ip(&format!("netns delete {}", self.name("switch")));
    }
}

fn ip(line: &str) -> Result<(), String> {
    let output = Command::new("ip").args(line.split(' ')).output().map_err(|error| format!("ip: {error}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {line}: {}", stderr.trim())) }
}

fn log(stage: &Stage, node: usize) -> String {
    std::fs::read_to_string(stage.path().join(format!("node-{node}.log"))).expect("the node has a log")
}

/// Waits until a new attempt with `workers` workers has made some steps.
#[track_caller]
fn goes_on(stage: &Stage, attempts: usize, workers: u64) {
    eventually(&format!("attempt {attempts} begins with {workers} workers"), || {
        let has_begun = run_dir(stage, "run").join("events.jsonl").exists();
        let found = if has_begun { workers_of_attempts(stage, "run") } else { Vec::new() };
        found.len() >= attempts && found[attempts - 1] == workers
    });
    let made = events(stage, "run", "progress").len();
    has_made(stage, "run", made + 5);
}

#[test]
fn three_nodes_survive_broken_links_and_lost_nodes() {
    let Some(network) = Network::new(3) else { return };
    let stage = stage();
    write_token(&stage, "token", &stage.run("token").stdout);
    // Neither 4 nor 6 divides the batch.
    let settings = format!("{BASE} --set train.global_batch=250 --workers 2 --set checkpoint.every=10");
    let limits = "--set supervise.node_timeout_s=2 --set supervise.node_patience_s=7 --max-restarts 9";
    let line = format!("{settings} {limits} --set train.steps=100000 --run run train");
    let start = |node| network.start(&stage, node, "2:3", &line);
    let mut launchers: Vec<Child> = (0..3).map(start).collect();
    goes_on(&stage, 1, 6);

    network.set_link(2, "down");
    eventually("node 0 loses node 2", || log(&stage, 0).contains("node 2 ("));
    eventually("node 2 loses node 0", || log(&stage, 2).contains("node 0 has said nothing for 2.0 s"));
    assert!(workers_of(launchers[2].id()).is_empty(), "workers of a node that is cut off are left");
    network.set_link(2, "up");
    goes_on(&stage, 2, 6);

    signal(launchers[1].id(), Signal::SIGKILL);
    wait(&mut launchers[1]);
    launchers[1] = start(1);
    goes_on(&stage, 3, 6);

    signal(launchers[0].id(), Signal::SIGKILL);
    wait(&mut launchers[0]);
    launchers[0] = start(0);
    goes_on(&stage, 4, 6);

    signal(launchers[2].id(), Signal::SIGKILL);
    wait(&mut launchers[2]);
    goes_on(&stage, 5, 4);
    let shrunk_at = events(&stage, "run", "attempt")[4]["step"].as_u64().expect("a step is a number");
    eventually("fifty steps with two nodes", || last_step(&stage) >= shrunk_at + 50);

    launchers[2] = start(2);
    goes_on(&stage, 6, 6);
    let grown_at = events(&stage, "run", "attempt")[5]["step"].as_u64().expect("a step is a number");
    signal(launchers[1].id(), Signal::SIGTERM);
    for (node, launcher) in launchers.iter_mut().enumerate() {
        assert_eq!(wait(launcher), Some(ExitCode::Preempted.code().into()), "node {node}: {}", log(&stage, node));
    }
    assert_eq!(stage.leftover_sockets(), 0, "a launcher did not remove its sockets");

    // The same steps on one node: equal bits with the same layout, and 1e-5 afterwards.
    let reference = format!("--set train.global_batch=250 --workers 6 --set train.steps={}", shrunk_at + 50);
    train(&stage, "one", &reference).exits_with(ExitCode::Success);
    let (run, one) = (last_trace(&stage, "run"), trace(&stage, "one"));
    assert!(run.range(..=shrunk_at).eq(one.range(..=shrunk_at)), "the losses before step {shrunk_at} differ");
    let run_until = run.range(..=shrunk_at + 50).map(|(step, found)| (*step, *found)).collect();
    assert_close(&run_until, &one, 1e-5, "4 workers");
    // No step is missing, and none was repeated when the node came back.
    assert!(run.keys().copied().eq(1..=*run.keys().last().expect("steps were made")));
    let saved = events(&stage, "run", "checkpoint").iter().any(|saved| saved["step"] == grown_at);
    assert!(saved, "the run did not grow at a checkpoint: step {grown_at}");
    let audit = format!("{BASE} --set train.global_batch=250 --workers 1 shards verify shards/small --epochs 20");
    stage.run(&format!("{audit} --world-sizes 4,6")).exits_with(ExitCode::Success);
}

/// Node 0 is cut off and goes on alone. A spare takes its place, and the others find the spare under the name of node 0.
/// Then the link is mended while the old node 0 still trains.
#[test]
fn node_0_that_comes_back_after_a_spare_took_its_place_changes_nothing() {
    let Some(network) = Network::new(4) else { return };
    let stage = stage();
    write_token(&stage, "token", &stage.run("token").stdout);
    (0..3).for_each(|member| network.set_name(member, &Network::address(0)));
    let settings = format!("{BASE} --set train.global_batch=250 --workers 1 --set checkpoint.every=10");
    let limits = "--set supervise.node_timeout_s=2 --set supervise.node_patience_s=7 --max-restarts 9";
    let line = format!(
        "--nnodes 1:3 --rendezvous node-zero:{PORT} {settings} {limits} --set train.steps=100000 --run run train"
    );
    // A fault occurs once. The old node 0 needs at least 15 s for ten steps, from the second checkpoint on.
    let slow: String = (1..10).map(|tens| format!(" --inject slow@rank=0,step={},ms=1500", 10 * tens + 1)).collect();
    let slow = format!("{line}{slow}");
    let mut old = network.start_at(0, &stage, 0, &slow);
    let mut launchers: Vec<Child> = (1..3).map(|node| network.start_at(node, &stage, node, &line)).collect();
    goes_on(&stage, 1, 3);

    network.set_link(0, "down");
    goes_on(&stage, 2, 1);
    // The file server gives the lock of a silent machine to another one.
    std::fs::remove_file(run_dir(&stage, "run").join("lock")).expect("the old node 0 has made it");
    // For a while, the name of node 0 still has the old address.
    network.set_name(3, &Network::address(0));
    let count = workers_of_attempts(&stage, "run").len();
    launchers.push(network.start_at(3, &stage, 0, &line));
    eventually("the spare waits for its name", || log(&stage, 3).contains("has the address 10.77.0.1, but no network"));
    (1..4).for_each(|member| network.set_name(member, &Network::address(3)));
    eventually("all nodes train with the spare", || workers_of_attempts(&stage, "run")[count..].ends_with(&[3]));
    assert_eq!(old.try_wait().expect("it is a child"), None, "the old node 0 has ended too early: {}", log(&stage, 0));
    network.set_link(0, "up");
    let ended = wait(&mut old);
    assert_eq!(ended, Some(ExitCode::RunHeld.code().into()), "{}", log(&stage, 0));
    assert!(log(&stage, 0).contains("another launcher has begun attempt"), "{}", log(&stage, 0));

    let made = events(&stage, "run", "progress").len();
    has_made(&stage, "run", made + 50);
    assert_eq!(workers_of_attempts(&stage, "run").last(), Some(&3), "training was disturbed: {}", log(&stage, 3));
    signal(launchers[2].id(), Signal::SIGTERM);
    for (launcher, member) in launchers.iter_mut().zip(1..) {
        assert_eq!(wait(launcher), Some(ExitCode::Preempted.code().into()), "{}", log(&stage, member));
    }
    // What the spare trained is what one node trains, and its newest checkpoint is the one to resume from.
    let run = last_trace(&stage, "run");
    let last = *run.keys().last().expect("steps were made");
    assert!(run.keys().copied().eq(1..=last));
    let reference = format!("--set train.global_batch=250 --workers 3 --set train.steps={}", last.min(50));
    train(&stage, "one", &reference).exits_with(ExitCode::Success);
    let one = trace(&stage, "one");
    assert_close(&run.into_iter().filter(|(step, _)| *step <= 50).collect(), &one, 1e-5, "with a spare");
    let resumed = format!("{line} --workers 1").replace("100000", &(last + 2).to_string());
    let alone = resumed.replace("--nnodes 1:3", "--nnodes 1").replace(&format!("--rendezvous node-zero:{PORT}"), "");
    stage
        .run(&alone)
        .exits_with(ExitCode::Success)
        .stderr_has(&format!("resuming from checkpoints/run/step-{last:08}"));
}

fn last_step(stage: &Stage) -> u64 {
    events(stage, "run", "progress").last().and_then(|last| last["step"].as_u64()).unwrap_or(0)
}

/// Scans the ports of two hosts, and then disturbs what listens there: sends nothing and reads, sends random bytes, opens
/// a thousand connections that stay idle. Prints a line of JSON after each of three parts; the last line has the open ports
/// of both hosts, and how many bytes came back.
const STRANGER: &str = r"
import json, os, random, socket, sys, threading, time
hosts, port0, seconds = sys.argv[1].split(','), int(sys.argv[2]), float(sys.argv[3])
found = {}
for host in hosts:
    for port in range(1, 65536):
        probe = socket.socket()
        probe.settimeout(1)
        if probe.connect_ex((host, port)) == 0:
            found.setdefault(host, []).append(port)
        probe.close()
answers = 0
def hear(connection):
    global answers
    try:
        answers += len(connection.recv(1000))
    except OSError:
        pass
for host, ports in found.items():
    for port in ports:
        silent = socket.create_connection((host, port))
        silent.settimeout(0.3)
        hear(silent)
        loud = socket.create_connection((host, port))
        loud.settimeout(0.3)
        loud.sendall(b'GET / HTTP/1.1\r\n\r\n' + os.urandom(4000))
        hear(loud)
print(json.dumps('scanned'), flush=True)
idle = []
for _ in range(1000):
    idle.append(socket.create_connection((hosts[0], port0)))
time.sleep(seconds)
print(json.dumps('idle connections'), flush=True)
end, tries = time.time() + seconds, 0
def disturb():
    global tries
    while time.time() < end:
        try:
            loud = socket.create_connection((hosts[0], port0), timeout=1)
            loud.settimeout(0.05)
            loud.sendall(os.urandom(random.choice([1, 47, 48, 49, 5000])))
            hear(loud)
            loud.close()
        except OSError:
            pass
        tries += 1
        time.sleep(0.01)
crowd = [threading.Thread(target=disturb) for _ in range(8)]
[one.start() for one in crowd]
[one.join() for one in crowd]
print(json.dumps({'found': found, 'answers': answers, 'tries': tries}))
";

/// Processor time of the launcher's thread that talks to other nodes, seconds.
fn seconds_of_thread(pid: u32, name: &str) -> f64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the launcher runs").flatten();
    let read = |thread: &std::fs::DirEntry, file: &str| std::fs::read_to_string(thread.path().join(file)).ok();
    let mut named = threads.filter(|thread| read(thread, "comm").is_some_and(|comm| comm.trim() == name));
    let stat = named.next().and_then(|thread| read(&thread, "stat")).expect("the launcher has such a thread");
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    let ticks: f64 = fields[11..13].iter().map(|field| field.parse::<f64>().expect("ticks are numbers")).sum();
    ticks / 100.0
}

#[test]
fn strangers_learn_nothing_and_disturb_nobody() {
    let Some(network) = Network::new(3) else { return };
    let stage = stage();
    write_token(&stage, "token", &stage.run("token").stdout);
    let line = format!("{BASE} --workers 1 --set supervise.node_timeout_s=2 --set train.steps=100000 --run run train");
    let mut launchers: Vec<Child> = (0..2).map(|node| network.start(&stage, node, "2", &line)).collect();
    has_made(&stage, "run", 3);
    let mut stranger = Command::new("python3");
    let hosts = [Network::address(0), Network::address(1)].join(",");
    stranger.args(["-c", STRANGER, &hosts, &PORT.to_string(), "2"]).current_dir(stage.path());
    let mut stranger = network.inside(2, &stranger).stdout(Stdio::piped()).spawn().expect("the machine has Python");
    let (mut found, mut parts) = (serde_json::Value::Null, 0);
    let (mut before, mut began) = (seconds_of_thread(launchers[0].id(), "nodes"), Instant::now());
    for line in BufReader::new(stranger.stdout.take().expect("it is piped")).lines() {
        found = serde_json::from_str(&line.expect("it prints text")).expect("the stranger prints JSON");
        let now = seconds_of_thread(launchers[0].id(), "nodes");
        let share = (now - before) / began.elapsed().as_secs_f64();
        assert!(share < 0.1, "the thread needed {:.1} % of a core until {found}", 100.0 * share);
        (before, began, parts) = (now, Instant::now(), parts + 1);
    }
    assert_eq!((parts, wait(&mut stranger)), (3, Some(0)));
    assert_eq!(found["answers"], 0, "{found}");
    assert!(found["tries"].as_u64() > Some(60), "{found}");
    // The coordinator, and for each worker one listener of Gloo per process group.
    let ports = |node: usize| found["found"][Network::address(node)].as_array().map_or(0, Vec::len);
    assert_eq!((ports(0), ports(1)), (3, 2), "{found}");
    assert!(found["found"][Network::address(0)].as_array().is_some_and(|ports| ports.contains(&PORT.into())));

    let made = events(&stage, "run", "progress").len();
    has_made(&stage, "run", made + 5);
    std::thread::sleep(Duration::from_millis(100));
    signal(launchers[0].id(), Signal::SIGTERM);
    for (node, launcher) in launchers.iter_mut().enumerate() {
        assert_eq!(wait(launcher), Some(ExitCode::Preempted.code().into()), "node {node}: {}", log(&stage, node));
    }
    assert_eq!(workers_of_attempts(&stage, "run"), [2], "training was disturbed: {}", log(&stage, 0));
    assert!(log(&stage, 0).contains("rejected"), "{}", log(&stage, 0));
    let steps = last_trace(&stage, "run").len();
    train(&stage, "one", &format!("--workers 2 --set train.steps={}", steps.min(50))).exits_with(ExitCode::Success);
    let (run, one) = (trace(&stage, "run"), trace(&stage, "one"));
    assert!(one.iter().all(|(step, found)| run[step] == *found), "the losses differ");
}
