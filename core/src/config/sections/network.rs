//! `[network]`: what the workers talk over. c10d's store, Gloo and NCCL have no access control: name a trusted interface.

use serde::{Deserialize, Serialize};

use crate::config::errors::Checker;

/// Which network the workers talk over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct NetworkConfig {
    /// Interface that workers bind to, such as "eth0"; "": the loopback interface, which one node needs.
    pub interface: String,
    /// HOST:PORT of the first node's coordinator (`--rendezvous`); "": this node alone. Not in this version yet.
    pub rendezvous: String,
    /// File with the run's token, which every node must hold (`--token-file`); "": this node alone. Not in this version yet.
    pub token_file: String,
}

impl NetworkConfig {
    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        for (key, value) in [("network.rendezvous", &self.rendezvous), ("network.token_file", &self.token_file)] {
            if !value.is_empty() {
                checker.push(key, format!("is \"{value}\", wanted \"\": this version has runs on one node alone"));
            }
        }
    }
}
