//! Rendezvous of the workers. They find each other through the keys that the launcher holds.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::{Context as _, bail};
use locdiff_core::protocol::{Meeting, WorkerSlot};
use locdiff_core::pulse::{self, WorkPhase};

use super::control::Control;
use super::error::JobError;
use crate::comm::{Backend, Communicator, Layout, Rendezvous};

/// Connects this worker with all other workers.
pub(super) fn connect(control: &Control, slot: &WorkerSlot, meeting: &Meeting) -> anyhow::Result<Communicator> {
    let _phase = pulse::enter(WorkPhase::Rendezvous);
    let backend = match slot.gpu {
        Some(device) => Backend::Nccl { device },
        None => Backend::Gloo(interface_address(&meeting.interface)?.to_string()),
    };
    let rendezvous = Rendezvous {
        rank: slot.rank,
        layout: Layout::new(slot.world, meeting.tensor_parallel).map_err(JobError::from)?,
        keys: control.keys(),
        backend,
        connect_timeout: Duration::from_secs_f64(meeting.rendezvous_timeout_s),
        collective_timeout: Duration::from_secs_f64(meeting.collective_timeout_s),
    };
    Ok(Communicator::connect(rendezvous).map_err(JobError::from)?)
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
