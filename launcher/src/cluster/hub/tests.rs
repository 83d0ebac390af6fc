//! Tests of node 0's listener with many nodes, and with peers that send nonsense.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use locdiff_core::config::RunConfig;
use locdiff_core::protocol::WorkerSlot;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::door::REJECTIONS_PER_SECOND;
use super::*;
use crate::cluster::messages::ALIVE_EVERY;
use crate::cluster::token::Token;
use crate::cluster::{agreement, open_channel};

fn token() -> Token {
    Token::of(b"a token of a test, which is long")
}

fn facts(node: u32) -> NodeFacts {
    let slot = WorkerSlot { rank: 0, world: 1, node: 0, local_rank: 0, gpu: None, threads: 1 };
    NodeFacts {
        node,
        host: format!("host-{node}"),
        pid: 1,
        process: node.into(),
        verb: "train".into(),
        config: Box::new(RunConfig::default()),
        slots: vec![slot],
        share_gpu: false,
        cores: 1,
        interface: String::new(),
        report: serde_json::Value::Null,
        unix_s: 0.0,
        ahead_s: 0.0,
    }
}

/// A listener for `nodes` nodes, and its address.
fn cluster(nodes: u32) -> (Arc<Cluster>, SocketAddr) {
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = free.local_addr().expect("the listener is bound");
    drop(free);
    let settings = HubSettings {
        address,
        token: token(),
        own: facts(0),
        nodes,
        nodes_needed: nodes,
        patience: Duration::ZERO,
        silence_limit: Duration::from_secs(10),
        gather_limit: Duration::from_secs(60),
        is_survey: false,
        common_folder: None,
        must_write: false,
    };
    (Cluster::open(settings).expect("the port is free"), address)
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
    runtime.block_on(work)
}

/// Processor time of this process's thread `nodes`, seconds.
fn seconds_of_hub() -> f64 {
    let threads = std::fs::read_dir("/proc/self/task").expect("the process has threads").flatten();
    let read = |thread: &std::fs::DirEntry, file: &str| std::fs::read_to_string(thread.path().join(file)).ok();
    let mut named = threads.filter(|thread| read(thread, "comm").is_some_and(|comm| comm.trim() == "nodes"));
    let stat = named.next().and_then(|thread| read(&thread, "stat")).expect("the hub has a thread");
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    fields[11..13].iter().map(|ticks| ticks.parse::<f64>().expect("ticks are numbers")).sum::<f64>() / 100.0
}

/// The measured numbers are in docs/OPERATIONS.md.
#[test]
#[allow(clippy::print_stdout, reason = "the test prints what it measured")]
fn a_thousand_nodes_join_and_cost_little() {
    let nodes = 1025;
    allow_connections(nodes);
    let (cluster, address) = cluster(nodes);
    block_on(async {
        let (began, mut others) = (Instant::now(), Vec::new());
        for node in 1..nodes {
            others.push(tokio::spawn(async move {
                let stream = TcpStream::connect(address).await.expect("the hub accepts");
                let (mut sender, mut receiver) = open_channel(stream, &token(), &facts(node)).await.expect("a channel");
                loop {
                    sender.send(&FromNode::Alive { gang: 0, beats: Vec::new() }).await.expect("the hub reads");
                    let until = Instant::now() + ALIVE_EVERY;
                    while let Ok(received) = tokio::time::timeout_at(until.into(), receiver.receive::<ToNode>()).await {
                        received.expect("the hub sends whole messages").expect("the connection is open");
                    }
                }
            }));
        }
        let found = cluster.gather().await.expect("all nodes join");
        assert!(found.iter().map(|facts| facts.node).eq(0..nodes));
        let (joined_s, before, began) = (began.elapsed().as_secs_f64(), seconds_of_hub(), Instant::now());
        tokio::time::sleep(Duration::from_secs(3)).await;
        let share = (seconds_of_hub() - before) / began.elapsed().as_secs_f64();
        println!("{} nodes joined after {joined_s:.1} s; then {:.1} % of a core", nodes - 1, 100.0 * share);
        assert!(share < 0.5, "the hub needs {:.1} % of a core", 100.0 * share);
        others.iter().for_each(tokio::task::JoinHandle::abort);
    });
}

#[test]
fn newcomers_are_announced_to_a_gang_and_latecomers_are_told_the_end() {
    let (cluster, address) = cluster(3);
    block_on(async {
        let join = async |node| {
            let stream = TcpStream::connect(address).await.expect("the hub accepts");
            let (sender, mut receiver) = open_channel(stream, &token(), &facts(node)).await.expect("a channel");
            assert_eq!(receiver.receive().await.expect("a whole message"), Some(ToNode::Welcome));
            (sender, receiver)
        };
        let _first = join(1).await;
        let (events, mut news) = mpsc::channel(8);
        cluster.attach(Vec::new(), events);
        assert!(matches!(news.recv().await, Some(FromCluster::Joined(1))));
        let _second = join(2).await;
        assert!(matches!(news.recv().await, Some(FromCluster::Joined(2))));
        // Both nodes are lost just before the end.
        drop((_first, _second));
        while !cluster.shared.lock().links.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let ended = Arc::clone(&cluster);
        let ending = tokio::task::spawn_blocking(move || ended.end(ExitCode::NoData, "no shards"));
        while cluster.shared.lock().end.is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        for node in [1, 2] {
            assert!(!ending.is_finished(), "node {node} was not told the end");
            let mut late = join(node).await;
            let end = ToNode::End { exit_code: ExitCode::NoData.code(), error: "no shards".to_owned() };
            assert_eq!(late.1.receive().await.expect("a whole message"), Some(end));
        }
        ending.await.expect("the hub ends");
    });
}

#[test]
fn request_to_stop_reaches_a_gang_that_begins_later() {
    let (cluster, address) = cluster(2);
    block_on(async {
        let stream = TcpStream::connect(address).await.expect("the hub accepts");
        let (mut sender, _receiver) = open_channel(stream, &token(), &facts(1)).await.expect("a channel");
        let code = ExitCode::Preempted.code();
        sender.send(&FromNode::Interrupted(code)).await.expect("the hub reads");
        while cluster.shared.lock().interrupted.is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let (events, mut news) = mpsc::channel(8);
        cluster.attach(vec![1], events);
        let got = news.recv().await;
        assert!(matches!(got, Some(FromCluster::Event((_, FromNode::Interrupted(found)))) if found == code), "{got:?}");
    });
}

#[test]
fn node_of_another_build_is_refused_and_strangers_in_a_hurry_must_wait() {
    let (_cluster, address) = cluster(3);
    block_on(async {
        for (field, other) in [("revision", serde_json::json!("0000000")), ("link_version", serde_json::json!(0))] {
            let mut hello = serde_json::to_value(agreement::hello(&facts(1))).expect("a hello is JSON");
            hello[field] = other;
            let answer = say(address, &hello).await;
            let Some(ToNode::Refused { reason, exit_code, is_temporary: false }) = answer else {
                panic!("{field}: {answer:?}")
            };
            assert!(reason.contains("node 1 (host-1) has version"), "{reason}");
            assert!(reason.contains("install the same build on all nodes"), "{reason}");
            assert_eq!(exit_code, ExitCode::WorkerIncompatible.code());
        }
        let mut hello = serde_json::to_value(agreement::hello(&facts(1))).expect("a hello is JSON");
        hello["config"]["train"]["steps"] = serde_json::json!(u64::MAX);
        let answer = say(address, &hello).await;
        assert!(matches!(answer, Some(ToNode::Refused { is_temporary: false, .. })), "{answer:?}");
        let began = Instant::now();
        for _ in 0..2 * REJECTIONS_PER_SECOND {
            let mut stream = TcpStream::connect(address).await.expect("the hub accepts");
            stream.write_all(&[7; 48]).await.expect("the kernel takes the bytes");
            // The hub closes the connection.
            let _ = stream.read(&mut [0; 1]).await;
        }
        // Without the wait, they would take some milliseconds.
        assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
        let hello = serde_json::to_value(agreement::hello(&facts(1))).expect("a hello is JSON");
        assert_eq!(say(address, &hello).await, Some(ToNode::Welcome));
    });
}

/// Numbers that look random; the same for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % limit
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.below(256) as u8).collect()
    }
}

/// A peer that knows the token, and sends `text` as its message.
async fn say(address: SocketAddr, text: &serde_json::Value) -> Option<ToNode> {
    let stream = TcpStream::connect(address).await.ok()?;
    let (mut sender, mut receiver) = super::super::channel::open(stream, &token()).await.ok()?;
    sender.send(text).await.ok()?;
    let answer = tokio::time::timeout(Duration::from_millis(200), receiver.receive::<ToNode>()).await;
    answer.ok()?.ok()?
}

/// Changes a few values of a message.
fn mutate(value: &mut serde_json::Value, random: &mut Random) {
    use serde_json::{Value, json};
    match value {
        Value::Object(fields) if !fields.is_empty() && random.below(8) > 0 => {
            let at = random.below(fields.len());
            let key = fields.keys().nth(at).cloned().unwrap_or_default();
            mutate(&mut fields[&key], random);
        }
        Value::Array(items) if !items.is_empty() && random.below(4) > 0 => {
            let at = random.below(items.len());
            mutate(&mut items[at], random);
        }
        other => {
            *other = match random.below(8) {
                0 => Value::Null,
                1 => json!(u64::MAX),
                2 => json!(-1),
                3 => json!("x".repeat(random.below(3000))),
                4 => json!([]),
                5 => json!({}),
                6 => json!(1e300),
                _ => json!(random.below(5)),
            };
        }
    }
}

/// Sends nonsense for a second, or for `LOCDIFF_FUZZ_S` seconds: random bytes, connections that end early, encrypted
/// messages with changed values. In between, nodes must be able to join. No connection may panic, although a panic would
/// end only this connection.
#[test]
#[allow(clippy::print_stdout, reason = "the test prints what it did")]
fn nonsense_from_strangers_and_from_peers_does_no_harm() {
    let seconds = std::env::var("LOCDIFF_FUZZ_S").ok().and_then(|text| text.parse().ok()).unwrap_or(1.0);
    let seed = std::env::var("LOCDIFF_FUZZ_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    static HAS_PANICKED: AtomicBool = AtomicBool::new(false);
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let is_of_hub = std::thread::current().name() == Some("nodes");
        HAS_PANICKED.fetch_or(is_of_hub, Ordering::Relaxed);
        print(panic);
    }));
    let (cluster, address) = cluster(3);
    let hello = serde_json::to_value(agreement::hello(&facts(1))).expect("a hello is JSON");
    let alive = serde_json::to_value(FromNode::Alive { gang: 1, beats: Vec::new() }).expect("a message is JSON");
    block_on(async {
        let (began, mut random, mut counts) = (Instant::now(), Random(seed), BTreeMap::<&str, u64>::new());
        while began.elapsed().as_secs_f64() < seconds {
            for _ in 0..50 {
                let kind = ["bytes", "hello", "later message", "cut"][random.below(4)];
                *counts.entry(kind).or_default() += 1;
                match kind {
                    "bytes" => {
                        let length = [0, 1, 47, 48, 49, 70_000][random.below(6)];
                        let bytes = random.bytes(length);
                        let Ok(mut stream) = TcpStream::connect(address).await else { continue };
                        let _ = stream.write_all(&bytes).await;
                        let mut answer = [0; 1];
                        let heard = tokio::time::timeout(Duration::from_millis(5), stream.read(&mut answer)).await;
                        assert!(!matches!(heard, Ok(Ok(1..))), "a stranger got an answer");
                    }
                    "hello" => {
                        let mut changed = hello.clone();
                        for _ in 0..=random.below(3) {
                            mutate(&mut changed, &mut random);
                        }
                        drop(say(address, &changed).await);
                    }
                    "later message" => {
                        let stream = TcpStream::connect(address).await.expect("the hub accepts");
                        let Ok((mut sender, receiver)) = open_channel(stream, &token(), &facts(1)).await else {
                            continue;
                        };
                        let mut changed = alive.clone();
                        mutate(&mut changed, &mut random);
                        let _ = sender.send(&changed).await;
                        drop((sender, receiver));
                    }
                    _ => {
                        let Ok(stream) = TcpStream::connect(address).await else { continue };
                        let (mut input, mut out) = stream.into_split();
                        let length = random.below(49);
                        let bytes = random.bytes(length);
                        let _ = out.write_all(&bytes).await;
                        drop(out);
                        let mut answer = [0; 1];
                        let heard = tokio::time::timeout(Duration::from_millis(5), input.read(&mut answer)).await;
                        assert!(!matches!(heard, Ok(Ok(1..))), "a stranger got an answer");
                    }
                }
            }
            let joined = say(address, &serde_json::to_value(agreement::hello(&facts(2))).expect("JSON")).await;
            assert_eq!(joined, Some(ToNode::Welcome), "a node cannot join any more");
            assert!(!HAS_PANICKED.load(Ordering::Relaxed), "a connection has panicked");
        }
        println!("{counts:?} in {:.0} s, seed {seed}", began.elapsed().as_secs_f64());
        cluster.end(ExitCode::Success, "");
    });
}
