//! Encrypted connections between nodes. Both ends prove that they know the token of the run (Noise, pattern NNpsk0). What
//! is recorded of one connection is useless for another.
//!
//! The end that connects sends the first handshake message, which only the token can make. Until it has arrived and is valid,
//! the other end sends nothing. Afterwards, each message is cut into pieces, and each piece is preceded by its length in
//! two big-endian bytes. Every piece has a number, so that none can be left out, repeated or moved.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;
use snow::{Builder, HandshakeState, StatelessTransportState};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::token::Token;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";

/// Both ends must agree on this text. It changes with the format of handshake and pieces.
const PROLOGUE: &[u8] = b"locdiff-launch nodes 1";

/// Bytes that encryption adds to a piece.
const TAG_BYTES: usize = 16;

/// Length of both messages of the handshake: a public key and a tag.
const HANDSHAKE_BYTES: usize = 32 + TAG_BYTES;

/// Largest number of a message's bytes in a piece. Another byte says whether more pieces follow.
const PIECE_BYTES_MAX: usize = 65_535 - TAG_BYTES - 1;

/// Size limit of a message.
pub(super) const MESSAGE_BYTES_MAX: usize = 32 << 20;

/// Size limit of the messages of a node that has not been accepted yet.
pub(super) const HELLO_BYTES_MAX: usize = 256 << 10;

/// How many first messages are remembered, so that a recorded one is not answered.
const SEEN_MAX: usize = 1 << 16;

/// The end of a connection that sends.
pub(crate) struct Sender<W = OwnedWriteHalf> {
    state: Arc<StatelessTransportState>,
    pieces: u64,
    out: W,
}

/// The end of a connection that receives.
pub(crate) struct Receiver<R = OwnedReadHalf> {
    state: Arc<StatelessTransportState>,
    pieces: u64,
    input: R,
    bytes_max: usize,
}

/// The first messages that have arrived at this process. A stranger may record a first message and send it again.
#[derive(Debug, Default)]
pub(super) struct SeenHandshakes(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    keys: HashSet<[u8; 32]>,
    /// The same keys, the oldest first.
    order: VecDeque<[u8; 32]>,
}

impl SeenHandshakes {
    /// Returns whether `key` is new, and remembers it.
    fn is_new(&self, key: [u8; 32]) -> bool {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !seen.keys.insert(key) {
            return false;
        }
        seen.order.push_back(key);
        if seen.order.len() > SEEN_MAX
            && let Some(oldest) = seen.order.pop_front()
        {
            seen.keys.remove(&oldest);
        }
        true
    }
}

/// Begins an encrypted connection over `stream`, which this end has opened.
pub(super) async fn open(stream: TcpStream, token: &Token) -> io::Result<(Sender, Receiver)> {
    stream.set_nodelay(true)?;
    let (mut input, mut out) = stream.into_split();
    let mut handshake = builder(token)?.build_initiator().map_err(invalid)?;
    let mut message = [0; HANDSHAKE_BYTES];
    handshake.write_message(&[], &mut message).map_err(invalid)?;
    out.write_all(&message).await?;
    input.read_exact(&mut message).await?;
    handshake.read_message(&message, &mut []).map_err(invalid)?;
    halves(handshake, input, out)
}

/// Accepts an encrypted connection over `stream`, which the other end has opened. The other end has proved that it knows
/// the token only when its first message has arrived, because a stranger may repeat a recorded handshake.
pub(super) async fn accept(stream: TcpStream, token: &Token, seen: &SeenHandshakes) -> io::Result<(Sender, Receiver)> {
    stream.set_nodelay(true)?;
    let (mut input, mut out) = stream.into_split();
    let mut handshake = builder(token)?.build_responder().map_err(invalid)?;
    let mut message = [0; HANDSHAKE_BYTES];
    input.read_exact(&mut message).await?;
    handshake.read_message(&message, &mut []).map_err(invalid)?;
    let mut key = [0; 32];
    key.copy_from_slice(&message[..32]);
    if !seen.is_new(key) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the handshake is a repetition"));
    }
    handshake.write_message(&[], &mut message).map_err(invalid)?;
    out.write_all(&message).await?;
    halves(handshake, input, out)
}

fn builder(token: &Token) -> io::Result<Builder<'_>> {
    let pattern = PATTERN.parse().map_err(invalid)?;
    Builder::new(pattern).prologue(PROLOGUE).and_then(|builder| builder.psk(0, token.key())).map_err(invalid)
}

fn halves<R, W>(handshake: HandshakeState, input: R, out: W) -> io::Result<(Sender<W>, Receiver<R>)> {
    let state = Arc::new(handshake.into_stateless_transport_mode().map_err(invalid)?);
    let sender = Sender { state: Arc::clone(&state), pieces: 0, out };
    Ok((sender, Receiver { state, pieces: 0, input, bytes_max: HELLO_BYTES_MAX }))
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl<W: AsyncWrite + Unpin> Sender<W> {
    /// Sends a message.
    pub(crate) async fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(invalid(format!("a message of {} bytes is too long", bytes.len())));
        }
        let mut wire = Vec::with_capacity(bytes.len() + 64);
        let mut pieces = bytes.chunks(PIECE_BYTES_MAX).peekable();
        while let Some(piece) = pieces.next() {
            let mut plain = vec![u8::from(pieces.peek().is_some())];
            plain.extend_from_slice(piece);
            let mut sealed = vec![0; plain.len() + TAG_BYTES];
            let length = self.state.write_message(self.pieces, &plain, &mut sealed).map_err(invalid)?;
            self.pieces += 1;
            wire.extend_from_slice(&u16::try_from(length).map_err(invalid)?.to_be_bytes());
            wire.extend_from_slice(&sealed[..length]);
        }
        self.out.write_all(&wire).await
    }

    /// Tells the other end that nothing more comes.
    pub(super) async fn close(&mut self) -> io::Result<()> {
        self.out.shutdown().await
    }
}

impl<R: AsyncRead + Unpin> Receiver<R> {
    /// Receives a message; `None` if the connection is closed.
    ///
    /// A call that was dropped before it ended may have taken part of a message. So call this function only where the
    /// connection is given up otherwise.
    pub(crate) async fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut message = Vec::new();
        loop {
            let mut length = [0; 2];
            match self.input.read_exact(&mut length).await {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && message.is_empty() => return Ok(None),
                read => read?,
            };
            let length = usize::from(u16::from_be_bytes(length));
            if message.len() + length > self.bytes_max + TAG_BYTES + 1 {
                return Err(invalid(format!("a message exceeds {} bytes", self.bytes_max)));
            }
            let mut sealed = vec![0; length];
            self.input.read_exact(&mut sealed).await?;
            let mut plain = vec![0; length];
            let length = self.state.read_message(self.pieces, &sealed, &mut plain).map_err(invalid)?;
            self.pieces += 1;
            let [more, piece @ ..] = &plain[..length] else { return Err(invalid("an empty piece")) };
            message.extend_from_slice(piece);
            if *more == 0 {
                return Ok(Some(serde_json::from_slice(&message)?));
            }
        }
    }

    /// Accepts messages up to [`MESSAGE_BYTES_MAX`].
    pub(crate) fn accept_long_messages(&mut self) {
        self.bytes_max = MESSAGE_BYTES_MAX;
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    fn token() -> Token {
        Token::of(b"a token of a test, which is long")
    }

    /// Runs `test` with a listener and its address.
    fn with_listener<T>(test: impl AsyncFnOnce(TcpListener) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
            test(listener).await
        })
    }

    async fn connect(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let address = listener.local_addr().expect("the listener is bound");
        let (client, server) = tokio::join!(TcpStream::connect(address), listener.accept());
        (client.expect("the listener accepts"), server.expect("a client connects").0)
    }

    #[test]
    fn messages_of_all_lengths_arrive_in_both_directions() {
        with_listener(async |listener| {
            let (client, server) = connect(&listener).await;
            let (own, seen) = (token(), SeenHandshakes::default());
            let (opened, accepted) = tokio::join!(open(client, &own), accept(server, &own, &seen));
            let (mut to_server, mut from_server) = opened.expect("both know the token");
            let (mut to_client, mut from_client) = accepted.expect("both know the token");
            from_client.accept_long_messages();
            for length in [0, 1, PIECE_BYTES_MAX - 2, PIECE_BYTES_MAX - 1, 3 * PIECE_BYTES_MAX, 5 << 20] {
                let text = "x".repeat(length);
                let (sent, received) = tokio::join!(to_server.send(&text), from_client.receive::<String>());
                sent.expect("the server reads");
                assert_eq!(received.expect("the message is whole"), Some(text));
            }
            to_client.send(&7).await.expect("the client reads");
            assert_eq!(from_server.receive::<u32>().await.expect("the message is whole"), Some(7));
            to_client.send(&"x".repeat(HELLO_BYTES_MAX)).await.expect("the kernel takes the bytes");
            assert!(from_server.receive::<String>().await.is_err(), "a long message of a new peer was accepted");
            drop((to_server, from_server));
            assert_eq!(from_client.receive::<u32>().await.expect("the end is orderly"), None);
        });
    }

    #[test]
    fn wrong_token_and_random_bytes_get_no_answer() {
        with_listener(async |listener| {
            let (own, seen) = (token(), SeenHandshakes::default());
            for is_random in [false, true] {
                let (mut client, server) = connect(&listener).await;
                let stranger = Token::of(b"another token");
                let mut handshake = builder(&stranger).expect("valid").build_initiator().expect("valid");
                let mut message = [9; HANDSHAKE_BYTES];
                if !is_random {
                    handshake.write_message(&[], &mut message).expect("the message has room");
                }
                client.write_all(&message).await.expect("the kernel takes the bytes");
                assert!(accept(server, &own, &seen).await.is_err());
                let mut answer = Vec::new();
                client.read_to_end(&mut answer).await.expect("the connection is closed");
                assert!(answer.is_empty(), "a stranger got {} bytes", answer.len());
            }
        });
    }

    /// A client that has shaken hands: its socket, what it sent first, its sealed message 1, and the receiver of the server.
    async fn sealed_message(
        listener: &TcpListener,
        own: &Token,
        seen: &SeenHandshakes,
    ) -> (TcpStream, [u8; HANDSHAKE_BYTES], Vec<u8>, Receiver<OwnedReadHalf>) {
        let mut first = [0; HANDSHAKE_BYTES];
        let mut handshake = builder(own).expect("valid").build_initiator().expect("valid");
        handshake.write_message(&[], &mut first).expect("the message has room");
        let (mut client, server) = connect(listener).await;
        client.write_all(&first).await.expect("the kernel takes the bytes");
        let (_, from_client) = accept(server, own, seen).await.expect("the token is right");
        let mut answer = [0; HANDSHAKE_BYTES];
        client.read_exact(&mut answer).await.expect("the server answers");
        handshake.read_message(&answer, &mut []).expect("the token is right");
        let mut wire = Vec::new();
        let (mut to_server, _) = halves(handshake, (), &mut wire).expect("the handshake is complete");
        to_server.send(&1).await.expect("a Vec takes all bytes");
        (client, first, wire, from_client)
    }

    #[test]
    fn recorded_handshake_is_not_answered_and_repeated_pieces_end_the_connection() {
        with_listener(async |listener| {
            let (own, seen) = (token(), SeenHandshakes::default());
            let (mut client, first, wire, mut from_client) = sealed_message(&listener, &own, &seen).await;
            client.write_all(&wire).await.expect("the kernel takes the bytes");
            assert_eq!(from_client.receive::<u32>().await.expect("the piece is whole"), Some(1));
            client.write_all(&wire).await.expect("the kernel takes the bytes");
            assert!(from_client.receive::<u32>().await.is_err(), "a repeated piece was accepted");

            let (mut client, server) = connect(&listener).await;
            client.write_all(&first).await.expect("the kernel takes the bytes");
            assert!(accept(server, &own, &seen).await.is_err());
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).await.expect("the connection is closed");
            assert!(answer.is_empty(), "a recorded handshake got {} bytes", answer.len());
        });
    }

    #[test]
    fn truncated_and_changed_messages_are_not_received() {
        with_listener(async |listener| {
            let (own, seen) = (token(), SeenHandshakes::default());
            for at in 0.. {
                let (mut client, _, mut wire, mut from_client) = sealed_message(&listener, &own, &seen).await;
                if at == wire.len() {
                    break;
                }
                wire[at] ^= 1;
                client.write_all(&wire).await.expect("the kernel takes the bytes");
                client.shutdown().await.expect("the connection is open");
                assert!(from_client.receive::<u32>().await.is_err(), "byte {at} was changed");
                if at > 0 {
                    let (mut client, _, wire, mut from_client) = sealed_message(&listener, &own, &seen).await;
                    client.write_all(&wire[..at]).await.expect("the kernel takes the bytes");
                    client.shutdown().await.expect("the connection is open");
                    let received = from_client.receive::<u32>().await;
                    assert!(!matches!(received, Ok(Some(_))), "a message of {at} bytes was received");
                }
            }
        });
    }
}
