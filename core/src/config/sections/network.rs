//! `[network]`: the network between workers.
//!
//! c10d's store, Gloo and NCCL have no access control: use a trusted interface.

use serde::{Deserialize, Serialize};

use crate::config::errors::Checker;

/// The network that the workers communicate over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct NetworkConfig {
    /// Network interface that workers bind to, such as "eth0". "": loopback, which is enough for one node.
    pub interface: String,
    /// HOST:PORT of the first node's coordinator (`--rendezvous`). Must be "" (a single node), because several nodes
    /// are not implemented.
    pub rendezvous: String,
    /// File with a secret token shared by all nodes (`--token-file`). Must be "" (a single node), because several nodes
    /// are not implemented.
    pub token_file: String,
}

impl NetworkConfig {
    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        for (key, value) in [("network.rendezvous", &self.rendezvous), ("network.token_file", &self.token_file)] {
            if !value.is_empty() {
                checker.push(key, format!("is \"{value}\", wanted \"\": this version runs on a single node only"));
            }
        }
    }
}
