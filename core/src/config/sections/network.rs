//! `[network]`: the network between workers.
//!
//! Gloo and NCCL have no access control: use a trusted interface. The connections between launchers are encrypted.

use serde::{Deserialize, Serialize};

use crate::config::errors::Checker;

/// The network that the workers communicate over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct NetworkConfig {
    /// Network interface that workers bind to, such as "eth0". "": loopback with one node, and the interface that leads
    /// to node 0 with several.
    pub interface: String,
    /// HOST:PORT of node 0 (`--rendezvous`), where the launchers of the other nodes connect.
    pub rendezvous: String,
    /// Where `train` serves numbers for Prometheus: PORT, which stands for a port on the loopback interface, or HOST:PORT.
    /// "": nowhere.
    pub metrics: String,
    /// File with the token that all nodes share (`--token-file`). "": the environment variable LOCDIFF_TOKEN.
    pub token_file: String,
}

impl NetworkConfig {
    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        let port = self.rendezvous.rsplit_once(':').map(|(host, port)| (!host.is_empty(), port.parse::<u16>()));
        if !self.rendezvous.is_empty() && !matches!(port, Some((true, Ok(1..)))) {
            checker.push("network.rendezvous", format!("is \"{}\", wanted HOST:PORT", self.rendezvous));
        }
    }
}
