//! Where the other nodes come in: each connection must prove that it knows the token, and each node that it fits and
//! sees the same files as node 0.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use locdiff_core::exit_code::{ExitCode, FailureKind, HasExitCode as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

use super::state::{Hub, NodeRefusal};
use crate::cluster::agreement;
use crate::cluster::channel::{Receiver, Sender, accept};
use crate::cluster::messages::{ALIVE_EVERY, FromNode, NodeFacts, NodeHello, ToNode};
use crate::cluster::token::random;
use crate::error::{LaunchError, reported};
use crate::run_folder::exact_unix_s;

/// How long a stranger may take to prove that it knows the token, and a node to say what it is.
const GREETING_LIMIT: Duration = Duration::from_secs(5);

/// How long a node may take to read a file of the common folder. File systems on a network may show new files late.
const PROOF_LIMIT: Duration = Duration::from_secs(60);

/// Number of connections that may be in the middle of their greeting. If there are more, the oldest one ends, but not
/// before it has had [`GREETING_LEAST`].
const GREETINGS_MAX: usize = 256;

/// How long a greeting may take at least, so that many nodes that connect at the same moment do not end each other's.
const GREETING_LEAST: Duration = Duration::from_millis(500);

/// If this many connections were rejected within a second, the next ones wait for each other, so that strangers cannot
/// keep node 0 busy.
pub(super) const REJECTIONS_PER_SECOND: u32 = 200;

/// How long a connection then waits for the one before it.
const WAIT_AFTER_REJECTIONS: Duration = Duration::from_millis(5);

/// How often rejected connections are reported.
const REPORT_EVERY: Duration = Duration::from_secs(10);

impl Hub {
    /// Whether the node may take part.
    fn judge(&self, hello: NodeHello) -> Result<NodeFacts, NodeRefusal> {
        let mut facts = agreement::facts(hello).map_err(NodeRefusal::of)?;
        facts.ahead_s = facts.unix_s - exact_unix_s(SystemTime::now());
        agreement::check(&self.settings.own, &facts, self.settings.nodes).map_err(NodeRefusal::of)?;
        let state = self.lock();
        if let Some(reason) = state.left_out.get(&facts.process) {
            let (exit_code, reason) = (ExitCode::WorkerFailed, reason.clone());
            return Err(NodeRefusal { exit_code, reason, is_temporary: false, of_run: false });
        }
        if let Some(pause) = state.pauses.get(&facts.node).filter(|pause| pause.began.elapsed() < pause.length) {
            let (node, length_s) = (facts.node, pause.length.as_secs());
            let reason = format!("node {node} was left out; another launcher may take its place {length_s} s later");
            return Err(NodeRefusal { exit_code: ExitCode::RunHeld, reason, is_temporary: true, of_run: false });
        }
        state.refuse_second(&facts)?;
        Ok(facts)
    }
}

/// Lets nodes in, for as long as this process lives.
pub(super) async fn listen(listener: TcpListener, shared: &Arc<Hub>) {
    let mut greetings: VecDeque<(Instant, SocketAddr, AbortHandle)> = VecDeque::new();
    let rejections = Arc::new(Rejections::default());
    loop {
        if rejections.are_many() {
            tokio::time::sleep(WAIT_AFTER_REJECTIONS).await;
        }
        let Ok((stream, peer)) = listener.accept().await else {
            // Too many open files, for example.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        greetings.retain(|(_, _, greeting)| !greeting.is_finished());
        while greetings.len() >= GREETINGS_MAX {
            if greetings.front().is_some_and(|(began, ..)| began.elapsed() >= GREETING_LEAST)
                && let Some((_, stranger, oldest)) = greetings.pop_front()
            {
                oldest.abort();
                rejections
                    .add(stranger, "it was the oldest of too many connections that had not proved to know the token");
            } else {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            greetings.retain(|(_, _, greeting)| !greeting.is_finished());
        }
        let (shared, rejections) = (Arc::clone(shared), Arc::clone(&rejections));
        let greeting = tokio::spawn(async move {
            match tokio::time::timeout(GREETING_LIMIT, greet(stream, &shared)).await {
                Ok(Ok((sender, receiver, hello))) => {
                    // A task of its own: from here on, the connection is no greeting any more.
                    let (started, has_started) = oneshot::channel();
                    let connection = tokio::spawn(async move {
                        if let Ok(own) = has_started.await {
                            serve_node(sender, receiver, hello, &shared, own).await;
                        }
                    });
                    let _ = started.send(connection.abort_handle());
                }
                Ok(Err(error)) => rejections.add(peer, &error.to_string()),
                Err(_) => rejections.add(peer, "it did not prove in time that it knows the token"),
            }
        });
        greetings.push_back((Instant::now(), peer, greeting.abort_handle()));
    }
}

/// Connections that were rejected.
#[derive(Debug, Default)]
struct Rejections(Mutex<RejectionCounts>);

#[derive(Debug, Default)]
struct RejectionCounts {
    since_report: u64,
    reported_at: Option<Instant>,
    this_second: u32,
    second_began: Option<Instant>,
}

impl Rejections {
    fn lock(&self) -> MutexGuard<'_, RejectionCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, peer: SocketAddr, reason: &str) {
        let mut counts = self.lock();
        counts.since_report += 1;
        if counts.second_began.is_none_or(|began| began.elapsed() >= Duration::from_secs(1)) {
            (counts.this_second, counts.second_began) = (0, Some(Instant::now()));
        }
        counts.this_second += 1;
        if counts.reported_at.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
            let count = std::mem::take(&mut counts.since_report);
            counts.reported_at = Some(Instant::now());
            let peer = peer.ip();
            tracing::warn!("rejected {count} connection(s) to the coordinator, the last from {peer}: {reason}");
        }
    }

    /// Whether there were so many in the current second that the next connections must wait.
    fn are_many(&self) -> bool {
        let counts = self.lock();
        let is_current = counts.second_began.is_some_and(|began| began.elapsed() < Duration::from_secs(1));
        is_current && counts.this_second >= REJECTIONS_PER_SECOND
    }
}

async fn greet(stream: TcpStream, shared: &Hub) -> io::Result<(Sender, Receiver, NodeHello)> {
    let (sender, mut receiver) = accept(stream, &shared.settings.token, &shared.seen).await?;
    let hello = receiver.receive().await?;
    let hello = hello.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection"))?;
    Ok((sender, receiver, hello))
}

async fn serve_node(
    mut sender: Sender,
    mut receiver: Receiver,
    hello: NodeHello,
    shared: &Arc<Hub>,
    connection: AbortHandle,
) {
    let facts = match admit(&mut sender, &mut receiver, hello, shared).await {
        Ok(Ok(facts)) => facts,
        Ok(Err(refusal)) => return refuse(&mut sender, refusal, shared).await,
        Err(error) => return tracing::warn!("a node was lost before it took part: {error}"),
    };
    let (outbox, mut messages) = mpsc::unbounded_channel();
    let (node, host) = (facts.node, facts.host.clone());
    let number = match shared.join(facts, outbox, connection) {
        Ok(number) => number,
        Err(refusal) => return refuse(&mut sender, refusal, shared).await,
    };
    tracing::info!("node {node} ({host}) has joined");
    receiver.accept_long_messages();
    let transmit = async {
        loop {
            let message = match tokio::time::timeout(ALIVE_EVERY, messages.recv()).await {
                Ok(Some(message)) => message,
                Ok(None) => return "its connection was replaced".to_owned(),
                Err(_) => ToNode::Alive,
            };
            let is_last = matches!(message, ToNode::End { .. } | ToNode::Refused { .. });
            if let Err(error) = sender.send(&message).await {
                return error.to_string();
            }
            if is_last {
                let _ = sender.close().await;
                // The node closes the connection when it has read everything.
                std::future::pending::<()>().await;
            }
        }
    };
    let limit = shared.settings.silence_limit;
    let receive = async {
        loop {
            match tokio::time::timeout(limit, receiver.receive::<FromNode>()).await {
                Ok(Ok(Some(message))) => shared.report(node, message).await,
                Ok(Ok(None)) => return "it closed the connection".to_owned(),
                Ok(Err(error)) => return error.to_string(),
                Err(_) => {
                    return format!("it has said nothing for {:.1} s (supervise.node_timeout_s)", limit.as_secs_f64());
                }
            }
        }
    };
    let reason = tokio::select! { reason = transmit => reason, reason = receive => reason };
    shared.leave(node, number, &reason).await;
}

/// Tells a node why it may not take part.
async fn refuse(sender: &mut Sender, refusal: NodeRefusal, shared: &Hub) {
    let NodeRefusal { exit_code, reason, is_temporary, of_run } = refusal;
    {
        let mut state = shared.lock();
        if state.logged != reason {
            // A node that tries again and again is logged once.
            tracing::warn!("refused a node: {reason}");
            state.logged.clone_from(&reason);
        }
        if of_run && shared.settings.is_survey {
            state.refusals.push(reason.clone());
        } else if of_run && !state.has_begun {
            state.refusal = Some((exit_code, reason.clone()));
        }
    }
    shared.changed();
    let _ = sender.send(&ToNode::Refused { reason, exit_code: exit_code.code(), is_temporary }).await;
}

/// Checks whether a node may take part, and whether it sees the common folder.
async fn admit(
    sender: &mut Sender,
    receiver: &mut Receiver,
    hello: NodeHello,
    shared: &Arc<Hub>,
) -> io::Result<Result<NodeFacts, NodeRefusal>> {
    let facts = match shared.judge(hello) {
        Ok(facts) => facts,
        Err(refusal) => return Ok(Err(refusal)),
    };
    if let Some(folder) = shared.settings.common_folder.clone() {
        let written = tokio::task::spawn_blocking(move || Proof::write(&folder)).await.map_err(io::Error::other)?;
        let has_joined = shared.lock().joined.contains_key(&facts.process);
        // The launcher has taken part before, or may do so when the file server works again.
        let refuse = |error: LaunchError| {
            let is_temporary = has_joined || error.failure_kind() == FailureKind::Outage;
            Ok(Err(NodeRefusal { is_temporary, of_run: !is_temporary, ..NodeRefusal::of(error) }))
        };
        let proof = match written {
            Ok(proof) => proof,
            Err(error) => return refuse(error),
        };
        let name = proof.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let must_write = shared.settings.must_write;
        sender.send(&ToNode::Prove { name, must_write }).await?;
        let (text, not_written) = proof_of(facts.node, sender, receiver, shared).await?;
        let (node, host, folder) = (facts.node, &facts.host, proof.path.parent().unwrap_or(Path::new("")));
        if text.as_ref() != Some(&proof.text) {
            return refuse(reported!(
                Config,
                "node {node} ({host}) does not see the files of node 0 in {}: this folder must be shared by all nodes",
                folder.display()
            ));
        }
        if let Some(error) = not_written {
            return refuse(reported!(
                Config,
                "node {node} ({host}) cannot write in {}, where the workers of all nodes write: {error}",
                folder.display()
            ));
        }
    }
    Ok(Ok(facts))
}

/// What the node reads in the file that it was asked for (`None` if it cannot read it), and why it cannot write there
/// (`None` if it can).
async fn proof_of(
    node: u32,
    sender: &mut Sender,
    receiver: &mut Receiver,
    shared: &Hub,
) -> io::Result<(Option<String>, Option<String>)> {
    let answer = async {
        loop {
            match receiver.receive::<FromNode>().await? {
                Some(FromNode::Proof { text, not_written }) => return Ok((text, not_written)),
                Some(message) => shared.report(node, message).await,
                None => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
            }
        }
    };
    let mut answer = std::pin::pin!(answer);
    let until = Instant::now() + PROOF_LIMIT;
    loop {
        tokio::select! {
            answer = &mut answer => return answer,
            () = tokio::time::sleep(ALIVE_EVERY) => {
                if Instant::now() >= until {
                    return Err(io::Error::other("it did not answer in time"));
                }
                sender.send(&ToNode::Alive).await?;
            }
        }
    }
}

/// A file with a random text, which another node must read.
struct Proof {
    path: PathBuf,
    text: String,
}

impl Proof {
    fn write(folder: &Path) -> Result<Self, LaunchError> {
        let mut bytes = [0; 16];
        random(&mut bytes)?;
        let text = format!("{:032x}", u128::from_be_bytes(bytes));
        let path = folder.join(format!(".node-{}", &text[..16]));
        std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, &text)).map_err(LaunchError::at(&path))?;
        Ok(Self { path, text })
    }
}

impl Drop for Proof {
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.path);
        // On another thread: a file server that does not respond must not stop the thread that talks to the nodes.
        tokio::task::spawn_blocking(move || drop(std::fs::remove_file(path)));
    }
}
