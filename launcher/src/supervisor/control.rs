//! The pipes and the socket of a worker. The supervisor gets a notice of each line and each message that the worker
//! writes.

use std::io::ErrorKind;

use futures::{SinkExt, StreamExt};
use locdiff_core::protocol::{FRAME_BYTES_MAX, ToWorker};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_util::bytes::Bytes;
use tokio_util::codec::LengthDelimitedCodec;

use crate::coordinator::GangEvent;

/// Capacity of the queue of lines and messages from the workers.
pub(super) const NOTICES_MAX: usize = 1024;

/// Largest length of a line of a worker's output, bytes. Longer lines are split.
const LINE_BYTES_MAX: u64 = 8 << 10;

/// A notice to the supervisor from a task that watches a worker.
pub(super) enum Notice {
    Line { rank: usize, line: String },
    OutputEnded { rank: usize },
    Connected { rank: usize, replies: mpsc::UnboundedSender<ToWorker> },
    Happened(GangEvent),
}

/// Sends each line of a pipe to the supervisor.
pub(super) async fn read_lines(rank: usize, pipe: impl AsyncRead + Unpin, events: mpsc::Sender<Notice>) {
    let mut pipe = BufReader::new(pipe);
    let mut bytes = Vec::new();
    // Read bytes instead of `lines()`, because a crashing library may write invalid UTF-8. `take` splits lines that are
    // too long.
    while matches!((&mut pipe).take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes).await, Ok(count) if count > 0) {
        let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        let _ = events.send(Notice::Line { rank, line }).await;
        bytes.clear();
    }
    let _ = events.send(Notice::OutputEnded { rank }).await;
}

/// Identifies the worker at the other end of `stream` by the process id that the kernel reports, and starts a task that
/// exchanges messages with the worker. `workers` has the process id and the rank of each worker. Rejects a process that
/// is not a worker.
pub(super) fn accept_worker(stream: UnixStream, workers: &[(u32, usize)], events: &mpsc::Sender<Notice>) {
    let pid = stream.peer_cred().ok().and_then(|credentials| credentials.pid());
    match workers.iter().find(|(worker, _)| i32::try_from(*worker).ok() == pid).map(|(_, rank)| *rank) {
        Some(rank) => drop(tokio::spawn(serve_worker(rank, stream, events.clone()))),
        None => {
            let pid = pid.unwrap_or(0);
            tracing::warn!("rejected a connection to the control socket from pid {pid}, which is not a worker");
        }
    }
}

/// Exchanges messages with a worker until its socket closes.
async fn serve_worker(rank: usize, stream: UnixStream, events: mpsc::Sender<Notice>) {
    let codec = *LengthDelimitedCodec::builder().max_frame_length(FRAME_BYTES_MAX);
    let (reader, writer) = stream.into_split();
    let (mut source, mut sink) = (codec.new_read(reader), codec.new_write(writer));
    let (replies, mut outbox) = mpsc::unbounded_channel::<ToWorker>();
    let _ = events.send(Notice::Connected { rank, replies }).await;
    let rank = rank as u32;
    let receive = async {
        while let Some(frame) = source.next().await {
            let event = match frame {
                Ok(bytes) => match serde_json::from_slice(&bytes) {
                    Ok(message) => GangEvent::Message { rank, message },
                    Err(error) => GangEvent::Garbled { rank, reason: format!("it sent an invalid message: {error}") },
                },
                Err(error) if error.kind() == ErrorKind::InvalidData => {
                    GangEvent::Garbled { rank, reason: error.to_string() }
                }
                // A broken socket counts as closed. The worker's exit status will show the reason.
                Err(_) => break,
            };
            let _ = events.send(Notice::Happened(event)).await;
        }
        let _ = events.send(Notice::Happened(GangEvent::Closed(rank))).await;
    };
    let transmit = async {
        while let Some(message) = outbox.recv().await {
            let bytes = serde_json::to_vec(&message).expect("messages to workers are plain data");
            if sink.send(Bytes::from(bytes)).await.is_err() {
                // The worker has closed its socket. Its exit status will show the reason.
                break;
            }
        }
        // Keep the socket open. If it closed, the worker would assume that the launcher has died.
        std::future::pending::<()>().await;
    };
    tokio::select! { () = receive => {}, () = transmit => {} }
}
