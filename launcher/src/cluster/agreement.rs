//! Whether two nodes can work together: the same build, the same command, the same configuration.

use locdiff_core::config::{AutoOr, RunConfig};
use locdiff_core::{REVISION, VERSION};

use super::messages::{LINK_VERSION, NodeFacts, NodeHello};
use crate::error::{LaunchError, refuse, reported};
use crate::run_folder::different_fields;

/// The first message of a node that says `facts` about itself.
pub(super) fn hello(facts: &NodeFacts) -> NodeHello {
    NodeHello {
        link_version: LINK_VERSION,
        version: VERSION.to_owned(),
        revision: REVISION.to_owned(),
        rest: serde_json::to_value(facts).expect("facts are plain data"),
    }
}

/// What a node says about itself. Fails if the node is of another version.
pub(super) fn facts(hello: NodeHello) -> Result<NodeFacts, LaunchError> {
    let NodeHello { link_version, version, revision, rest } = hello;
    if (link_version, version.as_str(), revision.as_str()) != (LINK_VERSION, VERSION, REVISION) {
        // In any version, these two fields probably have these names.
        let name = match (rest["node"].as_u64(), rest["host"].as_str()) {
            (Some(node), Some(host)) => format!("node {node} ({host})"),
            _ => "a node".to_owned(),
        };
        refuse!(
            WorkerIncompatible,
            "{name} has version {version} ({revision}), protocol {link_version}, but node 0 has version {VERSION} \
             ({REVISION}), protocol {LINK_VERSION}; install the same build on all nodes"
        );
    }
    let unknown = |error: &dyn std::fmt::Display| {
        reported!(WorkerIncompatible, "a node says something unknown about itself: {error}")
    };
    let facts: NodeFacts = serde_json::from_value(rest).map_err(|error| unknown(&error))?;
    // TOML has no numbers above 2^63, and so no valid configuration has one.
    toml::Table::try_from(&facts.config).map_err(|error| unknown(&error))?;
    Ok(facts)
}

/// Checks that `other` can work with node 0, which says `own` about itself.
pub(super) fn check(own: &NodeFacts, other: &NodeFacts, nodes: u32) -> Result<(), LaunchError> {
    let (node, host) = (other.node, &other.host);
    if !(1..nodes).contains(&node) {
        refuse!(Config, "{host} has --node-rank {node}, wanted 1 to {} with --nnodes {nodes}", nodes - 1);
    }
    if own.verb != other.verb {
        refuse!(Config, "node {node} ({host}) runs `{}`, but node 0 runs `{}`", other.verb, own.verb);
    }
    let differences = different_fields(&without_own_fields(&own.config), &without_own_fields(&other.config));
    if !differences.is_empty() {
        let lines: Vec<String> =
            differences.iter().map(|(key, own, other)| format!("{key} is {other}, but {own} on node 0")).collect();
        refuse!(
            Config,
            "the configuration of node {node} ({host}) differs from that of node 0:\n  {}",
            lines.join("\n  ")
        );
    }
    let device = |facts: &NodeFacts| if facts.slots.iter().any(|slot| slot.gpu.is_some()) { "GPUs" } else { "the CPU" };
    // `doctor` also runs on a node that has no workers.
    if !own.slots.is_empty() && !other.slots.is_empty() && device(own) != device(other) {
        refuse!(
            Config,
            "the workers of node {node} ({host}) use {}, but those of node 0 use {}; choose one with --device",
            device(other),
            device(own)
        );
    }
    Ok(())
}

/// The configuration without the fields that belong to a node.
fn without_own_fields(config: &RunConfig) -> RunConfig {
    let mut config = config.clone();
    config.parallel.node_rank = 0;
    config.parallel.workers = AutoOr::Auto;
    config.train.threads = AutoOr::Auto;
    config.network = locdiff_core::config::NetworkConfig::default();
    config.shards.cache_dir.clear();
    config
}
