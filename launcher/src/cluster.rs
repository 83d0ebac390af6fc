//! Several nodes that run one command. Node 0 coordinates: its supervisor controls the workers of all nodes. The
//! launchers of the other nodes start workers for it ([`crate::supervisor`]).
//!
//! - `token`: the secret that all nodes share.
//! - `channel`: encrypted connections between those who know it.
//! - `messages`: what nodes tell each other.
//! - `agreement`: whether two nodes can work together.
//! - `hub`: the end of node 0.

mod agreement;
mod channel;
mod hub;
mod messages;
mod token;

use std::io;
use std::net::IpAddr;

use tokio::net::TcpStream;

pub(crate) use channel::{Receiver, Sender};
pub use hub::Cluster;
pub(crate) use hub::{FromCluster, HubSettings, NodeLoss};
pub(crate) use messages::{ALIVE_EVERY, FromNode, NodeFacts, ToNode, WorkerEvent, WorkerSignal};
pub(crate) use token::random;
pub use token::{TOKEN_VARIABLE, Token, new_token};

/// Opens an encrypted connection to node 0 over `stream`, and says `facts` about this node.
pub(crate) async fn open_channel(
    stream: TcpStream,
    token: &Token,
    facts: &NodeFacts,
) -> io::Result<(Sender, Receiver)> {
    let opened = channel::open(stream, token).await;
    let (mut sender, receiver) = opened.map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            io::Error::new(error.kind(), "it closed the connection; do both nodes have the same token?")
        }
        _ => error,
    })?;
    sender.send(&agreement::hello(facts)).await?;
    Ok((sender, receiver))
}

/// The network interface that has this address.
pub(crate) fn interface_of(address: IpAddr) -> Option<String> {
    let mut interfaces = nix::ifaddrs::getifaddrs().ok()?;
    let has_address = |interface: &nix::ifaddrs::InterfaceAddress| {
        let found = interface.address.as_ref();
        let v4 = found.and_then(|found| found.as_sockaddr_in()).map(|found| IpAddr::V4(found.ip()));
        let v6 = found.and_then(|found| found.as_sockaddr_in6()).map(|found| IpAddr::V6(found.ip()));
        v4.or(v6) == Some(address)
    };
    interfaces.find(has_address).map(|interface| interface.interface_name)
}
