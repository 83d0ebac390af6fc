//! Tests of training on several nodes, which are launchers on this machine.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::support::{BASE, assert_close, events, last_trace, run_dir, stage, tensors, trace, train};
use crate::nodes::{Nodes, write_token};
use crate::stage::{Ran, Stage, Worker, eventually, is_alive, signal, wait, workers_of};

/// A number of rows that neither 4 nor 6 divides.
const BATCH: &str = "--set train.global_batch=250";

/// Waits until the run has made `steps` steps.
#[track_caller]
pub(super) fn has_made(stage: &Stage, run: &str, steps: usize) {
    let path = run_dir(stage, run).join("events.jsonl");
    eventually("the run has made enough steps", || path.exists() && events(stage, run, "progress").len() >= steps);
}

#[test]
fn three_nodes_give_the_bits_of_one_node_with_as_many_workers() {
    let stage = stage();
    train(&stage, "one", &format!("{BATCH} --workers 6 --set train.steps=20")).exits_with(ExitCode::Success);
    let nodes = Nodes::new(&stage, "3");
    // The number of workers, the threads and the cache folder may differ.
    let line = format!("{BASE} {BATCH} --run three --set train.steps=20");
    let mut launchers: Vec<Child> = ["--workers 1", "--workers 2 --set shards.cache_dir=cache", "--workers 3"]
        .into_iter()
        .zip(0..)
        .map(|(own, node)| nodes.start(node, &format!("node-{node}"), &format!("{line} {own} train")))
        .collect();
    nodes.end(&mut launchers, ExitCode::Success);
    assert_eq!(trace(&stage, "three"), trace(&stage, "one"));
    assert_eq!(tensors(&run_dir(&stage, "three")), tensors(&run_dir(&stage, "one")));
    let logs = run_dir(&stage, "three").join("logs/0");
    assert_eq!(std::fs::read_dir(logs).expect("the attempt has logs").count(), 6, "wanted a log of each worker");
}

#[test]
fn lost_nodes_come_back_and_change_no_number() {
    let stage = stage();
    let settings =
        format!("{BASE} {BATCH} --set model.degree=7 --workers 2 --set train.steps=30 --set checkpoint.every=4");
    let nodes = Nodes::new(&stage, "2");
    nodes.run_all(&format!("{settings} --run whole train"), ExitCode::Success);

    // A spare for node 1 is refused as long as node 1 is there. The launcher of node 1 is killed, and its workers with
    // it. Then the spare takes its place. The steps before are slow, so that they do not end earlier.
    let line = format!("{settings} --run spare train --inject slow@rank=0,step=7,ms=400");
    let mut launchers = nodes.start_all(&line);
    has_made(&stage, "spare", 6);
    let spare = nodes.start(1, "spare", &line);
    let reason = format!("node 1 is running: it is the process {} on", launchers[1].id());
    eventually("the spare is refused", || nodes.log("spare").contains(&reason));
    let workers = workers_of(launchers[1].id());
    assert_eq!(workers.len(), 2);
    signal(launchers[1].id(), Signal::SIGKILL);
    wait(&mut launchers[1]);
    eventually("the workers of a killed launcher end", || workers.iter().all(|pid| !is_alive(*pid)));
    eventually("node 0 notices the loss", || nodes.log("node-0").contains("was lost"));
    launchers[1] = spare;
    nodes.end(&mut launchers, ExitCode::Success);
    assert!(nodes.log("spare").contains("has joined node 0"), "{}", nodes.log("spare"));
    assert_eq!(trace(&stage, "spare"), trace(&stage, "whole"));
    assert_eq!(tensors(&run_dir(&stage, "spare")), tensors(&run_dir(&stage, "whole")));

    // The launcher of node 0 is killed. Node 1 waits until it is back.
    let line = format!("{settings} --run again train");
    let mut launchers = nodes.start_all(&line);
    has_made(&stage, "again", 6);
    signal(launchers[0].id(), Signal::SIGKILL);
    wait(&mut launchers[0]);
    eventually("node 1 notices the loss", || nodes.log("node-1").contains("trying again"));
    launchers[0] = nodes.start(0, "node-0", &line);
    nodes.end(&mut launchers, ExitCode::Success);
    assert_eq!(trace(&stage, "again"), trace(&stage, "whole"));

    // Node 1 is stopped for longer than `supervise.node_timeout_s`. When it wakes up, its old workers must not disturb.
    let mut launchers = nodes.start_all(&format!("{settings} --run stopped train"));
    has_made(&stage, "stopped", 6);
    signal(launchers[1].id(), Signal::SIGSTOP);
    eventually("node 0 gives up node 1", || nodes.log("node-0").contains("it has said nothing for 3.0 s"));
    signal(launchers[1].id(), Signal::SIGCONT);
    nodes.end(&mut launchers, ExitCode::Success);
    assert_eq!(trace(&stage, "stopped"), trace(&stage, "whole"));
    assert_eq!(stage.leftover_sockets(), 0, "a launcher did not remove its sockets");
}

/// Number of workers of each attempt.
pub(super) fn workers_of_attempts(stage: &Stage, run: &str) -> Vec<u64> {
    events(stage, run, "attempt").iter().map(|attempt| attempt["workers"].as_u64().expect("it is a number")).collect()
}

#[test]
fn training_goes_on_with_fewer_nodes_and_grows_back() {
    let stage = stage();
    // A small model, so that the steps take little time.
    let small = "--set model.degree=7";
    train(&stage, "one", &format!("{BATCH} {small} --workers 1 --set train.steps=120")).exits_with(ExitCode::Success);
    let nodes = Nodes { nodes: "2:3", ..Nodes::new(&stage, "3") };
    let settings = format!("{BASE} {BATCH} {small} --workers 2 --set train.steps=120 --set checkpoint.every=4");
    let line = format!("{settings} --set supervise.node_patience_s=1 --run grown train");
    let mut launchers: Vec<Child> = (0..3).map(|node| nodes.start(node, &format!("node-{node}"), &line)).collect();
    has_made(&stage, "grown", 6);
    signal(launchers[2].id(), Signal::SIGKILL);
    wait(&mut launchers[2]);
    eventually("training goes on with two nodes", || workers_of_attempts(&stage, "grown") == [6, 4]);
    let made = events(&stage, "grown", "progress").len();
    has_made(&stage, "grown", made + 3);
    let status = stage.run("--run grown status");
    // The line of the last failure names node 2. Lines are wrapped anywhere.
    let text = status.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    let workers = text.split("last failure").next().unwrap_or_default();
    let shown = [0, 1, 2].map(|node| workers.contains(&format!("node {node} (")));
    assert_eq!(shown, [true, true, false], "{}", status.stdout);
    // A launcher that does not belong here is refused, and training goes on.
    let other = line.replace("train.learning_rate=5e-4", "train.learning_rate=1e-3");
    let refused = wait(&mut nodes.start(2, "node-2", &other));
    assert_eq!(refused, Some(ExitCode::Config.code().into()), "{}", nodes.log("node-2"));
    launchers[2] = nodes.start(2, "node-2", &line);
    nodes.end(&mut launchers, ExitCode::Success);
    assert_eq!(workers_of_attempts(&stage, "grown"), [6, 4, 6]);
    let log = nodes.log("node-0");
    assert!(log.contains("so that node(s) 2 can take part"), "{log}");
    // The last attempt goes on where the one before ended.
    let attempts = events(&stage, "grown", "attempt");
    let last = attempts[2]["step"].as_u64().expect("a step is a number");
    let made = events(&stage, "grown", "progress");
    let repeated = made.windows(2).filter(|pair| pair[1]["step"].as_u64() <= pair[0]["step"].as_u64());
    let repeated: Vec<u64> = repeated.filter_map(|pair| pair[1]["step"].as_u64()).collect();
    assert!(repeated.len() == 1 && repeated[0] < last, "steps were repeated when the node came back: {repeated:?}");
    let (grown, one) = (last_trace(&stage, "grown"), trace(&stage, "one"));
    assert_close(
        &grown.range(..=50).map(|(step, found)| (*step, *found)).collect(),
        &one.range(..=50).map(|(step, found)| (*step, *found)).collect(),
        1e-5,
        "6, 4, 6 workers",
    );
    assert_close(&grown, &one, 1e-3, "6, 4, 6 workers, all steps");
}

#[test]
fn node_whose_workers_keep_failing_is_named_and_left_out() {
    let stage = stage();
    let nodes = Nodes { nodes: "1:2", ..Nodes::new(&stage, "2") };
    // The same crash at the same step, as of a broken GPU. Alone, it would end the run, and so would a second restart.
    let faults = "--inject panic@rank=1,step=3 --inject exit@rank=1,step=3,code=101";
    let line = format!("{BASE} --workers 1 --set train.steps=40 --max-restarts 1 --run failing train {faults}");
    let mut launchers = [nodes.start(0, "node-0", &line), nodes.start(1, "node-1", &line)];
    assert_eq!(wait(&mut launchers[0]), Some(0), "{}", nodes.log("node-0"));
    assert_eq!(wait(&mut launchers[1]), Some(ExitCode::WorkerFailed.code().into()), "{}", nodes.log("node-1"));
    assert_eq!(workers_of_attempts(&stage, "failing"), [2, 2, 1]);
    for node in ["node-0", "node-1"] {
        let log = nodes.log(node);
        assert!(log.contains("the workers of node 1 (") && log.contains("failed in two attempts in a row"), "{log}");
    }
}

#[test]
fn node_that_cannot_start_its_workers_does_not_end_a_run_that_trains_without_it() {
    let stage = stage();
    let nodes = Nodes { nodes: "1:2", ..Nodes::new(&stage, "2") };
    let line =
        format!("{BASE} --workers 1 --set supervise.node_patience_s=1 --set train.steps=100000 --run healthy train");
    let mut first = nodes.start(0, "node-0", &line);
    has_made(&stage, "healthy", 3);
    let mut broken = nodes.start_from(&Stage::new(Worker::None), &line);
    assert_eq!(wait(&mut broken), Some(ExitCode::WorkerFailed.code().into()), "{}", nodes.log("node-1"));
    for node in ["node-0", "node-1"] {
        let log = nodes.log(node);
        assert!(log.contains("cannot train, but others can") && log.contains("locdiff-worker"), "{node}: {log}");
    }
    // Another launcher has to wait.
    let mut next = nodes.start(1, "node-1-again", &line);
    eventually("it is refused", || nodes.log("node-1-again").contains("may take its place 30 s later"));
    let made = events(&stage, "healthy", "progress").len();
    has_made(&stage, "healthy", made + 3);
    assert_eq!(workers_of_attempts(&stage, "healthy"), [1, 2, 1]);
    signal(next.id(), Signal::SIGTERM);
    assert_eq!(wait(&mut next), Some(ExitCode::Preempted.code().into()), "{}", nodes.log("node-1-again"));
    signal(first.id(), Signal::SIGTERM);
    assert_eq!(wait(&mut first), Some(ExitCode::Preempted.code().into()), "{}", nodes.log("node-0"));
}

#[test]
fn every_node_ends_with_the_same_code_and_cause() {
    let stage = stage();
    let nodes = Nodes::new(&stage, "2");
    // A signal to any node stops all nodes with a checkpoint.
    let settings = format!("{BASE} --workers 1 --set train.steps=4000");
    let line = format!("{settings} --run stopped train");
    for (number, stopped) in [&[1][..], &[0], &[0, 1], &[1, 0]].into_iter().enumerate() {
        let before = if number > 0 { events(&stage, "stopped", "progress").len() } else { 0 };
        let mut launchers = nodes.start_all(&line);
        has_made(&stage, "stopped", before + 3);
        for node in stopped {
            signal(launchers[*node].id(), Signal::SIGTERM);
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        nodes.end(&mut launchers, ExitCode::Preempted);
        let last = events(&stage, "stopped", "progress").last().expect("steps were made")["step"].clone();
        let newest = std::fs::read_to_string(run_dir(&stage, "stopped").join("latest")).expect("it was saved");
        assert_eq!(newest.trim(), format!("step-{:08}", last.as_u64().expect("a step is a number")));
    }
    // A worker of node 1 fails for good.
    let line = format!("{settings} --run failed --max-restarts 0 train --inject panic@rank=1,step=3");
    nodes.run_all(&line, ExitCode::WorkerFailed);
    for node in ["node-0", "node-1"] {
        let log = nodes.log(node);
        assert!(log.contains("worker rank 1") && log.contains("panic"), "{node}: {log}");
    }
}

#[test]
fn nodes_that_do_not_belong_together_are_refused_with_the_reason() {
    let stage = stage();
    let nodes = Nodes::new(&stage, "2");
    let settings = format!("{BASE} --workers 1 --set train.steps=4 --set supervise.rendezvous_timeout_s=5");
    let refused = |zero: &str, one: &str, token: &str, code: ExitCode| {
        let mut launchers = [nodes.start(0, "node-0", zero), nodes.start_with(1, "node-1", token, one)];
        nodes.end(&mut launchers, code);
        nodes.log("node-1")
    };
    let line = format!("{settings} --run a train");
    let other = format!("{settings} --run a --set train.learning_rate=1e-3 train");
    let log = refused(&line, &other, "token", ExitCode::Config);
    assert!(log.contains("train.learning_rate is 0.001, but 0.0005 on node 0"), "{log}");
    let log = refused(&line, &format!("{settings} --run a self-check"), "token", ExitCode::Config);
    assert!(log.contains("node 1 (") && log.contains("runs `self-check`, but node 0 runs `train`"), "{log}");
    let log = refused(&line, &format!("{settings} --run a --set checkpoint.dir=/tmp train"), "token", ExitCode::Config);
    assert!(log.contains("checkpoint.dir"), "{log}");

    // A stranger does not learn why, and both give up when nobody else comes.
    write_token(&stage, "other", &stage.run("token").stdout);
    let log = refused(&line, &line, "other", ExitCode::Timeout);
    assert!(log.contains("do both nodes have the same token?"), "{log}");
    assert!(nodes.log("node-0").contains("node(s) 1 did not join"), "{}", nodes.log("node-0"));
    assert!(!run_dir(&stage, "a").exists(), "a run was created without all nodes");
}

#[test]
fn token_is_required_private_and_long() {
    let stage = stage();
    let line = "--device cpu --nnodes 2 --node-rank 0 --rendezvous 127.0.0.1:1 self-check";
    stage.run(line).exits_with(ExitCode::Usage).stderr_has("locdiff-launch token");
    let token = stage.run("token");
    assert_eq!(token.exits_with(ExitCode::Success).stdout.trim().len(), 43);
    std::fs::write(stage.path().join("open"), &token.stdout).expect("the test folder is writable");
    stage.run(&format!("{line} --token-file open")).exits_with(ExitCode::Usage).stderr_has("chmod 600");
    write_token(&stage, "short", "secret");
    stage.run(&format!("{line} --token-file short")).exits_with(ExitCode::Usage).stderr_has("at least 43");
    let ran = stage.command(line).env("LOCDIFF_TOKEN", "secret").output().expect("the launcher can be started");
    Ran::from(ran).exits_with(ExitCode::Usage).stderr_has("LOCDIFF_TOKEN");
    // Slurm has started two launchers on one node.
    let mut second = stage.command("--token-file token --device cpu train");
    for (name, value) in [("STEP_ID", "0"), ("NNODES", "2"), ("NODEID", "0"), ("LOCALID", "1"), ("JOB_ID", "7")] {
        second.env(format!("SLURM_{name}"), value);
    }
    let ran = second.env("SLURM_JOB_NODELIST", "n[0-1]").output().expect("the launcher can be started");
    Ran::from(ran).exits_with(ExitCode::Usage).stderr_has("--ntasks-per-node=1");
}

/// Whether a file has these bytes somewhere. A file that has just disappeared has none.
fn has_bytes(path: &Path, wanted: &[u8]) -> bool {
    std::fs::read(path).is_ok_and(|bytes| bytes.windows(wanted.len()).any(|window| window == wanted))
}

#[test]
fn token_is_in_no_argument_environment_of_a_worker_log_or_file_of_the_run() {
    let stage = stage();
    let nodes = Nodes::new(&stage, "2");
    let token = std::fs::read_to_string(stage.path().join("token")).expect("it was written");
    let line = format!("{BASE} --workers 1 --set train.steps=4000 --run secret train");
    // Node 1 gets the token in its environment.
    let mut by_variable = stage.command(&format!(
        "--nnodes 2 --node-rank 1 --rendezvous 127.0.0.1:{} --set supervise.node_timeout_s=3 {line}",
        nodes.port
    ));
    let log = std::fs::File::create(stage.path().join("node-1.log")).expect("the test folder is writable");
    by_variable.env("LOCDIFF_TOKEN", token.trim()).stdout(Stdio::null()).stderr(log);
    let mut launchers = [nodes.start(0, "node-0", &line), by_variable.spawn().expect("the launcher can be started")];
    has_made(&stage, "secret", 3);
    for launcher in &launchers {
        let workers = workers_of(launcher.id());
        assert_eq!(workers.len(), 1);
        let processes = workers.iter().map(|pid| ("cmdline", *pid)).chain([("cmdline", launcher.id())]);
        for (file, pid) in processes.chain(workers.iter().map(|pid| ("environ", *pid))) {
            let path = format!("/proc/{pid}/{file}");
            assert!(!std::fs::read(&path).expect("the process runs").is_empty());
            assert!(!has_bytes(Path::new(&path), token.trim().as_bytes()), "{path} has the token");
        }
    }
    signal(launchers[1].id(), Signal::SIGTERM);
    nodes.end(&mut launchers, ExitCode::Preempted);
    let mut folders = vec![stage.path().to_owned()];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("the folder exists").flatten() {
            let kind = entry.file_type().expect("the file exists");
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() && entry.file_name() != "token" {
                files += 1;
                assert!(!has_bytes(&entry.path(), token.trim().as_bytes()), "{} has it", entry.path().display());
            }
        }
    }
    assert!(files > 10, "only {files} files were searched");
}

/// Node 1 sees another folder under the same path, as on machines without a common file system. Then it sees the same
/// folder, but may only read it.
#[test]
#[allow(clippy::print_stderr, reason = "the test says why it is skipped")]
fn node_that_does_not_share_the_folder_of_node_0_is_refused() {
    let probe = Command::new("unshare").args(["--mount", "mount", "-t", "tmpfs", "none", "/tmp"]).status();
    if !probe.is_ok_and(|status| status.success()) {
        eprintln!("skipped: a folder cannot be mounted in a namespace of its own");
        return;
    }
    let stage = stage();
    let nodes = Nodes::new(&stage, "2");
    let folder = stage.path().join("checkpoints");
    std::fs::create_dir_all(&folder).expect("the test folder is writable");
    let line =
        format!("{BASE} --workers 1 --set train.steps=4 --set supervise.rendezvous_timeout_s=8 --run elsewhere train");
    let command = stage.command(&format!(
        "--nnodes 2 --node-rank 1 --rendezvous 127.0.0.1:{} --token-file token --set supervise.node_timeout_s=3 {line}",
        nodes.port
    ));
    for (mount, reason) in [
        ("mount -t tmpfs none checkpoints", "this folder must be shared by all nodes"),
        ("mount --bind -o ro checkpoints checkpoints", "cannot write in checkpoints"),
    ] {
        let mut elsewhere = Command::new("unshare");
        elsewhere.args(["--mount", "sh", "-c", &format!("{mount} && exec \"$0\" \"$@\"")]);
        elsewhere.arg(command.get_program()).args(command.get_args()).current_dir(stage.path());
        let log = std::fs::File::create(stage.path().join("node-1.log")).expect("the test folder is writable");
        let other = elsewhere.stdout(Stdio::null()).stderr(log).spawn().expect("unshare can be started");
        nodes.end(&mut [nodes.start(0, "node-0", &line), other], ExitCode::Config);
        for node in ["node-0", "node-1"] {
            let log = nodes.log(node);
            assert!(log.contains(reason), "{node}: {log}");
        }
    }
}

#[test]
fn fewer_nodes_do_not_process_more_rows_at_once() {
    let data = stage();
    let shards = data.path().join("shards/small");
    let stage = Stage::new(Worker::Fake("good"));
    let rows_at_once = |micro_batch: u32, others: u32| {
        let line = &format!(
            "{BASE} --workers 2 --set shards.train={} --set train.steps=4 --set supervise.node_patience_s=1 \
             --set train.micro_batch={micro_batch} --set eval.after_train=false --max-restarts 0 train",
            shards.display()
        );
        let nodes = Nodes { nodes: "1:2", ..Nodes::new(&stage, "2") };
        let mut launchers: Vec<Child> =
            (0..=others).map(|node| nodes.start(node, &format!("node-{node}"), line)).collect();
        for launcher in &mut launchers {
            wait(launcher);
        }
        let rows = stage.path().join("pids.rows");
        let text = std::fs::read_to_string(&rows).unwrap_or_else(|_| panic!("no worker: {}", nodes.log("node-0")));
        std::fs::remove_file(rows).expect("the file exists");
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    // The batch has 240 rows, so each of four workers gets 60.
    assert_eq!(rows_at_once(0, 1), ["0"; 4]);
    assert_eq!(rows_at_once(0, 0), ["60"; 2]);
    assert_eq!(rows_at_once(25, 0), ["25"; 2]);
}

#[test]
fn same_command_without_a_name_resumes_the_run() {
    let stage = stage();
    let line =
        format!("{BASE} --workers 1 --set train.steps=3 --set checkpoint.every=1 --set eval.after_train=false train");
    let nodes = Nodes::new(&stage, "2");
    let mut launchers = nodes.start_all(&line.replace("train.steps=3", "train.steps=4000"));
    let runs = || {
        std::fs::read_dir(stage.path().join("checkpoints"))
            .map_or(0, |entries| entries.flatten().filter(|entry| entry.path().is_dir()).count())
    };
    eventually("the run has a checkpoint", || nodes.log("node-0").contains("committed checkpoint"));
    signal(launchers[0].id(), Signal::SIGTERM);
    nodes.end(&mut launchers, ExitCode::Preempted);
    let mut launchers = nodes.start_all(&line.replace("train.steps=3", "train.steps=4000"));
    eventually("the run is resumed", || nodes.log("node-0").contains("resuming from"));
    signal(launchers[1].id(), Signal::SIGTERM);
    nodes.end(&mut launchers, ExitCode::Preempted);
    assert_eq!(runs(), 1);
}

#[test]
fn doctor_checks_every_node_in_one_table() {
    let stage = stage();
    let nodes = Nodes::new(&stage, "2");
    nodes.run_all("--device cpu --json --set shards.train=shards/small doctor", ExitCode::Success);
    let result: Value = serde_json::from_str(nodes.stdout("node-0").trim()).expect("the result is JSON");
    let checks = result["checks"].as_array().expect("the result has checks").iter();
    let names: Vec<&str> = checks.filter_map(|check| check["name"].as_str()).collect();
    for name in
        ["node 0 worker", "node 1 worker", "node 1 clock", "node 1 network", "node 1 disk", "node 1 shared folder"]
    {
        assert!(names.contains(&name), "no {name} in {names:?}");
    }
    // Node 1 has no worker.
    let alone = Stage::new(Worker::None);
    let mut launchers =
        [nodes.start(0, "node-0", "--device cpu doctor"), nodes.start_from(&alone, "--device cpu doctor")];
    nodes.end(&mut launchers, ExitCode::NotReady);
    assert!(nodes.log("node-0").contains("training cannot start here: node 1 worker"), "{}", nodes.log("node-0"));
    // Node 1 is missing, or has another configuration.
    let line = "--device cpu --set supervise.rendezvous_timeout_s=3 doctor";
    nodes.end(&mut [nodes.start(0, "node-0", line)], ExitCode::NotReady);
    assert!(nodes.stdout("node-0").contains("1 did not join"), "{}", nodes.stdout("node-0"));
    let other = format!("--set train.seed=1 {line}");
    let mut launchers = [nodes.start(0, "node-0", line), nodes.start(1, "node-1", &other)];
    assert_eq!(wait(&mut launchers[0]), Some(ExitCode::NotReady.code().into()), "{}", nodes.log("node-0"));
    assert_eq!(wait(&mut launchers[1]), Some(ExitCode::Config.code().into()), "{}", nodes.log("node-1"));
    assert!(nodes.stdout("node-0").contains("train.seed is 1, but 0 on node 0"), "{}", nodes.stdout("node-0"));
}
