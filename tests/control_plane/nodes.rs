//! Several nodes on this machine: launchers that have a folder in common and share a token.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Child;

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;

use crate::stage::{Stage, eventually, has_begun, signal, wait, workers_of};

/// Nodes that share a token and the address of node 0.
pub(crate) struct Nodes<'a> {
    pub(crate) stage: &'a Stage,
    pub(crate) port: u16,
    pub(crate) nodes: &'a str,
}

impl<'a> Nodes<'a> {
    pub(crate) fn new(stage: &'a Stage, nodes: &'a str) -> Self {
        let token = stage.run("token").stdout;
        write_token(stage, "token", &token);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let port = listener.local_addr().expect("the listener is bound").port();
        Self { stage, port, nodes }
    }

    /// Starts the launcher of a node. Its output goes to the file `NAME.log`.
    pub(crate) fn start(&self, node: u32, name: &str, line: &str) -> Child {
        self.start_with(node, name, "token", line)
    }

    pub(crate) fn start_with(&self, node: u32, name: &str, token: &str, line: &str) -> Child {
        self.spawn(self.stage, node, name, token, line)
    }

    /// Starts the launcher of another stage as node 1, in the folder of this stage.
    pub(crate) fn start_from(&self, other: &Stage, line: &str) -> Child {
        self.spawn(other, 1, "node-1", "token", line)
    }

    fn spawn(&self, stage: &Stage, node: u32, name: &str, token: &str, line: &str) -> Child {
        let (port, nodes) = (self.port, self.nodes);
        let mut command = stage.command(&format!(
            "--nnodes {nodes} --node-rank {node} --rendezvous 127.0.0.1:{port} --token-file {token} \
             --set supervise.node_timeout_s=3 {line}"
        ));
        let file = |kind: &str| {
            let path = self.stage.path().join(format!("{name}.{kind}"));
            std::fs::File::create(path).expect("the test folder is writable")
        };
        command.current_dir(self.stage.path()).stdout(file("out")).stderr(file("log"));
        command.spawn().expect("the launcher can be started")
    }

    /// Starts all nodes with the same command line.
    pub(crate) fn start_all(&self, line: &str) -> Vec<Child> {
        (0..self.nodes.parse().expect("it is a number"))
            .map(|node| self.start(node, &format!("node-{node}"), line))
            .collect()
    }

    /// Runs all nodes with the same command line, and checks that each of them ends with `code`.
    #[track_caller]
    pub(crate) fn run_all(&self, line: &str, code: ExitCode) {
        let mut launchers = self.start_all(line);
        self.end(&mut launchers, code);
    }

    #[track_caller]
    pub(crate) fn end(&self, launchers: &mut [Child], code: ExitCode) {
        for (node, launcher) in launchers.iter_mut().enumerate() {
            let ended = wait(launcher);
            assert_eq!(ended, Some(code.code().into()), "node {node}: {}", self.log(&format!("node-{node}")));
        }
    }

    /// What the launcher of a node printed to stdout.
    pub(crate) fn stdout(&self, name: &str) -> String {
        std::fs::read_to_string(self.stage.path().join(format!("{name}.out"))).expect("the node has an output file")
    }

    pub(crate) fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.stage.path().join(format!("{name}.log"))).expect("the node has a log")
    }
}

pub(crate) fn write_token(stage: &Stage, name: &str, token: &str) {
    let path = stage.path().join(name);
    std::fs::write(&path, token).expect("the test folder is writable");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("the test owns the file");
}

/// The bytes of all files in a folder, except those that tell when or where they were made.
pub(crate) fn bytes(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).expect("the folder exists").flatten();
    let files = entries.filter(|entry| entry.path().is_file()).map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        (name, std::fs::read(entry.path()).expect("the file can be read"))
    });
    files.filter(|(name, _)| name.ends_with(".csv") || name.ends_with(".parquet")).collect()
}

/// Runs a command on two nodes. Kills node 1 before its worker has done its share, when the worker of node 0 has done
/// its own, and starts node 1 again if it `comes_back`. Returns the log of node 0.
#[track_caller]
pub(crate) fn with_a_killed_node(stage: &Stage, line: &str, comes_back: bool) -> String {
    let nodes = Nodes::new(stage, if comes_back { "2" } else { "1:2" });
    let mut launchers: Vec<Child> = (0..2).map(|node| nodes.start(node, &format!("node-{node}"), line)).collect();
    eventually("the worker of node 1 has begun", || workers_of(launchers[1].id()).into_iter().any(has_begun));
    workers_of(launchers[1].id()).into_iter().for_each(|worker| signal(worker, Signal::SIGSTOP));
    eventually("the worker of node 0 is done", || workers_of(launchers[0].id()).is_empty());
    signal(launchers[1].id(), Signal::SIGKILL);
    wait(&mut launchers[1]);
    eventually("node 0 notices the loss", || nodes.log("node-0").contains("was lost"));
    if comes_back {
        launchers[1] = nodes.start(1, "node-1", line);
        nodes.end(&mut launchers, ExitCode::Success);
    } else {
        nodes.end(&mut launchers[..1], ExitCode::Success);
    }
    let log = nodes.log("node-0");
    assert!(log.contains("was lost") && log.contains("starting again"), "the command ended before the kill: {log}");
    log
}
