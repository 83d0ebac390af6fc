//! What Slurm, Kubernetes or torchrun says about the nodes of a command, in environment variables. A configuration file
//! is weaker than these variables, and `--set` and flags are stronger.

use locdiff_core::config::Layer;
use toml::Value;

/// The port of node 0 under Slurm is this number plus the last four digits of the job's id.
const SLURM_FIRST_PORT: u64 = 20_000;

/// The layers of the configuration for the variables that `variable` finds.
pub(super) fn layers(variable: impl Fn(&str) -> Option<String>) -> Vec<Layer> {
    let mut layers = Vec::new();
    let mut set = |flag: &'static str, key: &'static str, value: Value| layers.push(Layer::Flag { flag, key, value });
    // Text that is not a number is passed on as it is: the configuration refuses it and names the variable.
    let number = |text: &str| text.parse().map_or_else(|_| Value::String(text.to_owned()), Value::Integer);

    // Outside of a job step, such as in the batch script, there is only one process, whatever the number of nodes.
    if variable("SLURM_STEP_ID").is_some() {
        if let Some(nodes) = variable("SLURM_STEP_NUM_NODES").or_else(|| variable("SLURM_NNODES")) {
            set("SLURM_STEP_NUM_NODES", "parallel.nodes", number(&nodes));
        }
        if let Some(node) = variable("SLURM_NODEID") {
            set("SLURM_NODEID", "parallel.node_rank", number(&node));
        }
        let hosts = variable("SLURM_STEP_NODELIST").or_else(|| variable("SLURM_JOB_NODELIST"));
        let job = variable("SLURM_JOB_ID").and_then(|job| job.parse::<u64>().ok());
        if let (Some(hosts), Some(job)) = (hosts, job) {
            let address = format!("{}:{}", first_host(&hosts), SLURM_FIRST_PORT + job % 10_000);
            set("SLURM_STEP_NODELIST", "network.rendezvous", Value::String(address));
        }
    }
    if let Some(node) = variable("JOB_COMPLETION_INDEX") {
        set("JOB_COMPLETION_INDEX", "parallel.node_rank", number(&node));
    }
    if let Some(nodes) = variable("PET_NNODES") {
        let (fewest, most) = nodes.split_once(':').map_or((None, nodes.as_str()), |(low, high)| (Some(low), high));
        set("PET_NNODES", "parallel.nodes", number(most));
        if let Some(fewest) = fewest {
            set("PET_NNODES", "parallel.nodes_min", number(fewest));
        }
    }
    if let Some(node) = variable("PET_NODE_RANK") {
        set("PET_NODE_RANK", "parallel.node_rank", number(&node));
    }
    if let (Some(host), Some(port)) = (variable("PET_MASTER_ADDR"), variable("PET_MASTER_PORT")) {
        set("PET_MASTER_ADDR", "network.rendezvous", Value::String(format!("{host}:{port}")));
    }
    if let Some(address) = variable("PET_RDZV_ENDPOINT").filter(|address| !address.is_empty()) {
        set("PET_RDZV_ENDPOINT", "network.rendezvous", Value::String(address));
    }
    layers
}

/// The first host of a list such as `gpu[03-05,9],login1`.
fn first_host(hosts: &str) -> String {
    let (mut host, mut rest) = (String::new(), hosts);
    loop {
        let end = rest.find([',', '[']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        let Some((numbers, after)) = rest[end..].strip_prefix('[').and_then(|inside| inside.split_once(']')) else {
            return host;
        };
        host.push_str(numbers.split([',', '-']).next().unwrap_or_default());
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)]) -> Vec<String> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, text)| (*text).to_owned());
        let text = |layer: Layer| match layer {
            Layer::Flag { flag, key, value } => format!("{flag}: {key} = {value}"),
            other => panic!("{other:?} is not from a variable"),
        };
        layers(find).into_iter().map(text).collect()
    }

    #[test]
    fn first_host_of_a_list_is_expanded() {
        for (hosts, first) in [
            ("one", "one"),
            ("one,two", "one"),
            ("gpu[03-05,9],login1", "gpu03"),
            ("gpu[7,3]", "gpu7"),
            ("r[1-2]c[08-09]-ib.example,x", "r1c08-ib.example"),
            ("", ""),
        ] {
            assert_eq!(first_host(hosts), first, "{hosts}");
        }
    }

    #[test]
    fn variables_count_only_where_they_describe_the_processes_of_the_command() {
        let mut job = vec![("SLURM_NNODES", "2"), ("SLURM_NODEID", "0"), ("SLURM_JOB_ID", "31234")];
        job.push(("SLURM_JOB_NODELIST", "n[1-2]"));
        assert!(found(&job).is_empty(), "a batch script is no job step");
        job.extend([("SLURM_STEP_ID", "0"), ("SLURM_NODEID", "1")]);
        assert_eq!(
            found(&job),
            [
                "SLURM_STEP_NUM_NODES: parallel.nodes = 2",
                "SLURM_NODEID: parallel.node_rank = 0",
                "SLURM_STEP_NODELIST: network.rendezvous = \"n1:21234\"",
            ]
        );
        assert_eq!(found(&[("JOB_COMPLETION_INDEX", "3")]), ["JOB_COMPLETION_INDEX: parallel.node_rank = 3"]);
        let torchrun =
            [("PET_NNODES", "2:4"), ("PET_NODE_RANK", "x"), ("PET_MASTER_ADDR", "a"), ("PET_MASTER_PORT", "29500")];
        assert_eq!(
            found(&torchrun),
            [
                "PET_NNODES: parallel.nodes = 4",
                "PET_NNODES: parallel.nodes_min = 2",
                "PET_NODE_RANK: parallel.node_rank = \"x\"",
                "PET_MASTER_ADDR: network.rendezvous = \"a:29500\"",
            ]
        );
    }
}
