//! Rendezvous of the workers. The workers find each other through a store (libtorch's `TCPStore`). Rank 0 binds the
//! socket of the store on the configured interface and sends the address to the launcher. The launcher forwards the
//! address to the other ranks, which connect to the store.
//!
//! The socket is bound before the address is sent, and the store takes over the bound socket. No other process can
//! therefore take the port in between.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use anyhow::{Context as _, bail};
use locdiff_core::protocol::{Meeting, ToLauncher, ToWorker, WorkerSlot};
use locdiff_core::pulse::{self, WorkPhase};

use super::control::Control;
use super::error::JobError;
use crate::comm::{Backend, Communicator, Layout, Rendezvous, StoreEnd};

/// Connects this worker with all other workers.
pub(super) fn connect(
    control: &mut Control,
    messages: &Receiver<ToWorker>,
    slot: &WorkerSlot,
    meeting: &Meeting,
) -> anyhow::Result<Communicator> {
    let _phase = pulse::enter(WorkPhase::Rendezvous);
    let connect_timeout = Duration::from_secs_f64(meeting.rendezvous_timeout_s);
    let address = interface_address(&meeting.interface)?;
    let store = if slot.rank == 0 {
        let listener =
            TcpListener::bind((address, 0)).with_context(|| format!("cannot bind the store to {address}"))?;
        let address = listener.local_addr().context("cannot read the address of the store")?.to_string();
        control.send(&ToLauncher::Listening { address })?;
        StoreEnd::Serve(listener)
    } else {
        let address = wait_for_store(messages, connect_timeout)?;
        StoreEnd::Join { host: address.ip().to_string(), port: address.port() }
    };
    let backend = match slot.gpu {
        Some(device) => Backend::Nccl { device },
        None => Backend::Gloo(address.to_string()),
    };
    let rendezvous = Rendezvous {
        rank: slot.rank,
        layout: Layout::new(slot.world, meeting.tensor_parallel).map_err(JobError::from)?,
        attempt: meeting.attempt,
        store,
        backend,
        connect_timeout,
        collective_timeout: Duration::from_secs_f64(meeting.collective_timeout_s),
    };
    Ok(Communicator::connect(rendezvous).map_err(JobError::from)?)
}

fn wait_for_store(messages: &Receiver<ToWorker>, timeout: Duration) -> anyhow::Result<SocketAddr> {
    match messages.recv_timeout(timeout) {
        Ok(ToWorker::Rendezvous { address }) => {
            address.parse().with_context(|| format!("the launcher sent an invalid address of the store: {address}"))
        }
        Ok(other) => bail!("the launcher sent {other:?} before the address of the store"),
        Err(_) => bail!(
            "rank 0 did not open the store within {:.1} s (supervise.rendezvous_timeout_s)",
            timeout.as_secs_f64()
        ),
    }
}

/// The first IPv4 address of the interface `name`, or its first IPv6 address if it has no IPv4 address. If `name` is
/// empty, the loopback address.
fn interface_address(name: &str) -> anyhow::Result<IpAddr> {
    if name.is_empty() {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    let mut addresses = Vec::new();
    let mut names = Vec::new();
    for interface in nix::ifaddrs::getifaddrs().context("cannot list the network interfaces")? {
        if !names.contains(&interface.interface_name) {
            names.push(interface.interface_name.clone());
        }
        if interface.interface_name == name
            && let Some(address) = interface.address
        {
            addresses.extend(address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip())));
            addresses.extend(address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())));
        }
    }
    addresses.sort_by_key(IpAddr::is_ipv6);
    match addresses.first() {
        Some(address) => Ok(*address),
        None => bail!(
            "network.interface is \"{name}\", but this machine has no address for it; interfaces found: {}",
            names.join(", ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_the_default_and_the_error_lists_the_interfaces() {
        assert_eq!(interface_address("").expect("the default needs no interface"), IpAddr::V4(Ipv4Addr::LOCALHOST));
        assert_eq!(
            interface_address("lo").expect("every machine has a loopback interface"),
            IpAddr::V4(Ipv4Addr::LOCALHOST)
        );
        let error = interface_address("nonsense0").expect_err("no interface has this name").to_string();
        assert!(error.contains("nonsense0") && error.contains("lo"), "{error}");
    }
}
