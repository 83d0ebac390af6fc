//! Runs a verb on several nodes: node 0 runs the verb, and all other nodes start workers for it.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use locdiff_core::config::{RunConfig, ValueOrigin};
use locdiff_core::exit_code::ExitCode;
use locdiff_core::files::parent;
use serde_json::Value;

use super::doctor;
use super::train::RESUME_HINT;
use crate::cli::{BenchVerb, Cli, Global, ShardsVerb, Verb};
use crate::cluster::{Cluster, HubSettings, NodeFacts, Token, interface_of, random};
use crate::error::{LaunchError, exit_code_of, refuse, reported};
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::{NodeWorkers, cores};
use crate::run_folder::host;
use crate::supervisor::{NodeSettings, Supervisor, hold_signals, run_node};

/// How long to wait before the name of node 0 is looked up again.
const RESOLVE_AGAIN: Duration = Duration::from_secs(2);

/// Runs the verb of a command line with several nodes. `None` if there is only one node.
pub(super) fn run(verb: &Verb, cli: &Cli, output: Output) -> anyhow::Result<Option<Value>> {
    let global = &cli.global;
    let Some(name) = name_on_nodes(verb) else {
        let is_about_flags = matches!(verb, Verb::Config(_));
        if global.nnodes.is_some_and(|count| count.most > 1) && !is_about_flags {
            refuse!(
                Usage,
                "--nnodes: only train, eval of a run, predict, doctor, self-check, bench collectives and shards \
                 simulate run on several nodes"
            );
        }
        return Ok(None);
    };
    let found = super::resolve_for(global, &["parallel"])?;
    let is_task_of_slurm = *found.origin("parallel.node_rank") == ValueOrigin::Flag("SLURM_NODEID");
    let parallel = found.config.parallel;
    if parallel.nodes == 1 {
        if global.node_rank.is_some_and(|node| node > 0) {
            refuse!(Usage, "--node-rank: give the number of nodes with --nnodes");
        }
        return Ok(None);
    }
    if is_task_of_slurm {
        refuse_second_task()?;
    }
    hold_signals()?;
    let resolved = super::resolve_with_run(global)?;
    let config = &resolved.config;
    let own = facts(name, verb, config)?;
    let token = Token::of_run(&config.network.token_file)?;
    let rendezvous = config.network.rendezvous.clone();
    if rendezvous.is_empty() {
        refuse!(Usage, "--nnodes {}: give the address of node 0 with --rendezvous HOST:PORT", parallel.nodes);
    }
    let seconds = Duration::from_secs_f64;
    let (silence_limit, gather_limit) =
        (seconds(config.supervise.node_timeout_s), seconds(config.supervise.rendezvous_timeout_s));
    let common_folder = common_folder(verb, config);
    if parallel.node_rank > 0 {
        let preempt_limit = seconds(config.supervise.preempt_timeout_s);
        let settings =
            NodeSettings { rendezvous, token, facts: own, silence_limit, gather_limit, preempt_limit, common_folder };
        return run_node(&settings).map(Some);
    }
    let address = own_address(&rendezvous, gather_limit)?;
    let interface = match config.network.interface.as_str() {
        "" => interface_of(address.ip()).unwrap_or_default(),
        named => named.to_owned(),
    };
    let own = NodeFacts { interface, ..own };
    let nodes = parallel.nodes;
    let (nodes_needed, patience) = (parallel.nodes_needed(), seconds(config.supervise.node_patience_s));
    let is_survey = matches!(verb, Verb::Doctor);
    let (nodes_needed, patience) = match verb {
        Verb::Train { .. } | Verb::Eval(_) | Verb::Predict(_) | Verb::Shards(_) => (nodes_needed, patience),
        Verb::Doctor => (1, gather_limit),
        _ => (nodes, patience),
    };
    let settings = HubSettings {
        address,
        token,
        own,
        nodes,
        nodes_needed,
        patience,
        silence_limit,
        gather_limit,
        is_survey,
        common_folder,
        must_write: !matches!(verb, Verb::Eval(_)),
    };
    let cluster = Cluster::open(settings)?;
    let global = Global { cluster: Some(Arc::clone(&cluster)), ..global.clone() };
    let result = super::run_verb(verb, &global, output);
    match &result {
        Ok(_) => cluster.end(ExitCode::Success, ""),
        Err(error) => cluster.end(exit_code_of(error), &without_resume_hint(&format!("{error:#}"))),
    }
    result.map(Some)
}

/// An error without the command that resumes the run, which is for node 0.
fn without_resume_hint(error: &str) -> String {
    error.lines().filter(|line| !line.starts_with(RESUME_HINT)).collect::<Vec<_>>().join("\n")
}

/// The name of a verb that several nodes can run together.
fn name_on_nodes(verb: &Verb) -> Option<&'static str> {
    match verb {
        Verb::Train { .. } => Some("train"),
        Verb::Eval(arguments) if arguments.scores_run() => Some("eval"),
        Verb::Predict(_) => Some("predict"),
        Verb::SelfCheck => Some("self-check"),
        Verb::Doctor => Some("doctor"),
        Verb::Bench(BenchVerb::Collectives { .. }) => Some("bench collectives"),
        Verb::Shards(ShardsVerb::Simulate { .. }) => Some("shards simulate"),
        _ => None,
    }
}

/// The folder that all nodes must share. `None` if there is none.
fn common_folder(verb: &Verb, config: &RunConfig) -> Option<PathBuf> {
    match verb {
        Verb::Train { .. } | Verb::Eval(_) | Verb::Doctor => Some(PathBuf::from(&config.checkpoint.dir)),
        Verb::Shards(ShardsVerb::Simulate { out, .. }) => Some(parent(out).to_owned()),
        _ => None,
    }
}

/// Fails if Slurm has started several launchers on this node, so that they have the same number.
fn refuse_second_task() -> Result<(), LaunchError> {
    let task = std::env::var("SLURM_LOCALID").unwrap_or_default();
    if !matches!(task.as_str(), "" | "0") {
        refuse!(
            Usage,
            "SLURM_LOCALID is {task}: Slurm has started several launchers on this node; start one per node with \
             `srun --ntasks-per-node=1`, which starts the workers of the node"
        );
    }
    Ok(())
}

/// What this node says about itself.
fn facts(name: &str, verb: &Verb, config: &RunConfig) -> Result<NodeFacts, LaunchError> {
    let (inventory, is_doctor) = (gpus::inventory(), matches!(verb, Verb::Doctor));
    let (slots, share_gpu) = match NodeWorkers::plan(config, &inventory) {
        Ok(own) => (own.slots, own.share_gpu),
        // It is one of the things that `doctor` reports.
        Err(_) if is_doctor => (Vec::new(), false),
        Err(error) => return Err(error),
    };
    let mut bytes = [0; 8];
    random(&mut bytes)?;
    Ok(NodeFacts {
        node: config.parallel.node_rank,
        host: host(),
        pid: std::process::id(),
        process: u64::from_be_bytes(bytes),
        verb: name.to_owned(),
        config: Box::new(config.clone()),
        slots,
        share_gpu,
        cores: cores(),
        interface: config.network.interface.clone(),
        report: if is_doctor { doctor::report(config, &inventory) } else { Value::Null },
        unix_s: 0.0,
        ahead_s: 0.0,
    })
}

/// The address of node 0, which must be this machine. Waits until its name is known and has this address: a scheduler
/// may start a process before the name of its machine, and the name may still belong to a machine that was replaced.
fn own_address(rendezvous: &str, patience: Duration) -> Result<SocketAddr, LaunchError> {
    let mut supervisor = Supervisor::new().map_err(|error| reported!(Internal, "{error:#}"))?;
    let begun = Instant::now();
    let mut last = String::new();
    loop {
        let error = match rendezvous.to_socket_addrs().map(Vec::from_iter) {
            Ok(addresses) => match addresses.iter().find(|address| interface_of(address.ip()).is_some()) {
                Some(own) => return Ok(*own),
                None => not_here(rendezvous, &addresses),
            },
            Err(error) => LaunchError::at(rendezvous)(error).about("--rendezvous"),
        };
        // The address of a name may change.
        let is_name = rendezvous.parse::<SocketAddr>().is_err();
        if !is_name || begun.elapsed() >= patience {
            return Err(error);
        }
        let text = error.to_string();
        if text != last {
            tracing::warn!("{text}; trying again");
            last = text;
        }
        supervisor.pause(RESOLVE_AGAIN)?;
    }
}

fn not_here(rendezvous: &str, addresses: &[SocketAddr]) -> LaunchError {
    let found: Vec<String> = addresses.iter().map(|address| address.ip().to_string()).collect();
    reported!(
        Device,
        "--rendezvous: {rendezvous} has the address {}, but no network interface of node 0 has it",
        found.join(", ")
    )
}
