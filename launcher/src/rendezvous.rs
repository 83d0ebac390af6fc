//! Assigns ranks to nodes and devices, and checks that the batch and the model can be divided among the workers.

use std::sync::Arc;

use locdiff_core::config::{AutoOr, RunConfig};
use locdiff_core::protocol::WorkerSlot;

use crate::cluster::{Cluster, NodeFacts};
use crate::error::{LaunchError, refuse, reported};
use crate::gpus::Inventory;
use crate::run_folder::host;

/// The workers of a run, on one node or on several.
#[derive(Debug, Clone)]
pub struct NodeWorkers {
    /// One entry per worker, in rank order.
    pub slots: Vec<WorkerSlot>,
    /// Whether several workers share a GPU. NCCL allows this only if each worker claims to be on a different host.
    pub share_gpu: bool,
    /// The nodes in order; empty if there is only this one.
    pub nodes: Vec<RunNode>,
    /// The connections to the other nodes; `None` if there is only this one.
    pub cluster: Option<Arc<Cluster>>,
}

/// A node of a run with several nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunNode {
    /// Number of the node, from 0.
    pub number: u32,
    /// Name of the machine.
    pub host: String,
    /// A random number of the launcher process.
    pub process: u64,
    /// Number of cores.
    pub cores: u32,
    /// The network interface over which the node's workers reach the others; "": loopback.
    pub interface: String,
}

impl NodeWorkers {
    /// Assigns the configured workers of this node to its GPUs, or to the CPU. If `train.threads` is "auto", workers on
    /// the CPU share the cores, and a worker with a GPU has one thread.
    pub fn plan(config: &RunConfig, inventory: &Inventory) -> Result<Self, LaunchError> {
        let parallel = &config.parallel;
        let gpus = u32::try_from(inventory.gpus.len()).unwrap_or(u32::MAX);
        let on_cuda = parallel.device.on_cuda(gpus > 0);
        let workers = parallel.workers.value().unwrap_or(if on_cuda { gpus.max(1) } else { 1 });
        if on_cuda {
            check_gpu_count(workers, gpus, parallel.share_gpu, inventory)?;
        }
        check_tensor_split(workers, parallel.tensor, parallel.nodes)?;
        check_interface(&config.network.interface)?;
        let threads_auto = if on_cuda { 1 } else { (cores() / workers).clamp(1, 1024) };
        let threads = config.train.threads.value().unwrap_or(threads_auto);
        let slot = |rank| WorkerSlot {
            rank,
            world: workers,
            node: 0,
            local_rank: rank,
            gpu: on_cuda.then(|| rank % gpus),
            threads,
        };
        // Several nodes that share GPUs are launchers on one machine.
        let share_gpu = on_cuda && (workers > gpus || parallel.share_gpu && parallel.nodes > 1);
        Ok(Self { slots: (0..workers).map(slot).collect(), share_gpu, nodes: Vec::new(), cluster: None })
    }

    /// The workers of all nodes, as the nodes describe them. Node 0 has the first ranks.
    pub(crate) fn of_nodes(&self, facts: &[NodeFacts]) -> Self {
        let mut slots: Vec<WorkerSlot> = Vec::new();
        for node in facts {
            slots.extend(node.slots.iter().map(|slot| WorkerSlot { node: node.node, ..slot.clone() }));
        }
        let world = u32::try_from(slots.len()).unwrap_or(u32::MAX);
        for (rank, slot) in (0..).zip(&mut slots) {
            (slot.rank, slot.world) = (rank, world);
        }
        let nodes = facts.iter().map(|facts| RunNode {
            number: facts.node,
            host: facts.host.clone(),
            process: facts.process,
            cores: facts.cores,
            interface: facts.interface.clone(),
        });
        let share_gpu = facts.iter().any(|facts| facts.share_gpu);
        let found = Self { slots, share_gpu, nodes: nodes.collect(), cluster: self.cluster.clone() };
        found.with_threads(self.threads())
    }

    /// Whether the workers of this node are the ones that `facts` describes.
    pub(crate) fn has_workers_of(&self, facts: &NodeFacts) -> bool {
        let own = self.slots.iter().filter(|slot| slot.node == facts.node);
        own.zip(&facts.slots).all(|(own, other)| (own.local_rank, own.gpu) == (other.local_rank, other.gpu))
            && self.slots.iter().filter(|slot| slot.node == facts.node).count() <= facts.slots.len()
    }

    /// Number of workers if all nodes are there, and the missing ones have as many as node 0.
    pub fn workers_expected(&self) -> usize {
        let own = self.slots.iter().filter(|slot| slot.node == 0).count();
        let nodes = self.cluster.as_ref().map_or(0, |cluster| cluster.nodes() as usize);
        self.slots.len() + own * nodes.saturating_sub(self.nodes.len())
    }

    /// The other nodes with workers.
    pub fn other_nodes(&self) -> impl Iterator<Item = &RunNode> {
        let has_workers = |node: &&RunNode| self.slots.iter().any(|slot| slot.node == node.number);
        self.nodes.iter().filter(|node| node.number > 0).filter(has_workers)
    }

    /// The node with this number; `None` if there is only one node.
    pub fn node(&self, number: u32) -> Option<&RunNode> {
        self.nodes.iter().find(|node| node.number == number)
    }

    /// The network interface of a worker; `None` if there is only one node.
    pub fn interface_of(&self, slot: &WorkerSlot) -> Option<&str> {
        self.node(slot.node).map(|node| node.interface.as_str())
    }

    /// For each worker, the number and the machine of its node.
    pub fn places(&self) -> Vec<(u32, String)> {
        let place = |slot: &WorkerSlot| (slot.node, self.node(slot.node).map_or_else(host, |node| node.host.clone()));
        self.slots.iter().map(place).collect()
    }

    /// Number of CPU threads of each worker.
    pub fn threads(&self) -> u32 {
        self.slots.first().map_or(1, |slot| slot.threads)
    }

    /// Gives each worker `threads` threads.
    pub fn with_threads(mut self, threads: u32) -> Self {
        self.slots.iter_mut().for_each(|slot| slot.threads = threads);
        self
    }

    /// Returns a single worker on the CPU with `threads` threads.
    pub fn one_cpu_worker(threads: u32) -> Self {
        let slot = WorkerSlot { rank: 0, world: 1, node: 0, local_rank: 0, gpu: None, threads };
        Self { slots: vec![slot], share_gpu: false, nodes: Vec::new(), cluster: None }
    }

    /// Keeps only the first worker and gives it `threads` threads.
    pub fn first_worker_only(mut self, threads: u32) -> Self {
        self.slots.truncate(1);
        self.slots.iter_mut().for_each(|slot| (slot.world, slot.threads) = (1, threads));
        Self { share_gpu: false, ..self }
    }

    /// Divides the cores of each node among its workers that use a GPU. Workers on the CPU keep their number of
    /// threads, because their results depend on it.
    pub fn with_all_cores(mut self) -> Self {
        let before = self.slots.clone();
        for slot in self.slots.iter_mut().filter(|slot| slot.gpu.is_some()) {
            let workers = before.iter().filter(|other| other.node == slot.node).count();
            let cores = self.nodes.iter().find(|node| node.number == slot.node).map_or_else(cores, |node| node.cores);
            slot.threads = (cores / u32::try_from(workers).unwrap_or(u32::MAX)).max(1);
        }
        self
    }

    /// Checks that each replica gets a row of every batch, and that the model and the anchors can be divided evenly
    /// among the ranks of a replica. The error names values that would work.
    pub fn check_division(&self, config: &RunConfig) -> Result<(), LaunchError> {
        let (workers, tensor) = (self.slots.len() as u64, u64::from(config.parallel.tensor));
        let (replicas, batch) = (workers / tensor, u64::from(config.train.global_batch));
        let alternatives = possible_layouts(config, workers);
        if batch < replicas {
            refuse!(
                Config,
                "train.global_batch: is {batch}, which is too few for {replicas} data-parallel ranks; \
                 wanted {replicas} or more, or {alternatives}"
            );
        }
        let widths = config.model.split_widths();
        if widths.iter().any(|width| !width.is_multiple_of(tensor)) {
            let widths = widths.map(|width| width.to_string()).join(", ");
            refuse!(
                Config,
                "parallel.tensor: is {tensor}, which does not divide the layer widths {widths}; wanted {alternatives}"
            );
        }
        let anchors = shared_anchors(config);
        if !anchors.is_multiple_of(tensor) {
            let near = nearest_multiples(anchors, tensor);
            refuse!(
                Config,
                "loss.anchors: is {anchors}, which cannot be divided among {tensor} tensor-parallel ranks; \
                 wanted {near}, or {alternatives}"
            );
        }
        Ok(())
    }
}

/// Number of cores that this process may use. Respects the CPU affinity and the quota of the process's control group.
pub fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX))
}

/// Number of anchors to divide among the tensor-parallel ranks. The number is 0 without the KL loss, because only this
/// loss uses anchors.
fn shared_anchors(config: &RunConfig) -> u64 {
    if config.loss.kl_weight == AutoOr::Value(0.0) { 0 } else { u64::from(config.loss.anchors) }
}

/// Names the values of `--tensor-parallel` that work with `workers` workers. If no value works, names the nearest
/// numbers of workers for which some value works.
fn possible_layouts(config: &RunConfig, workers: u64) -> String {
    let splits = |workers: u64| -> Vec<String> {
        let batch = u64::from(config.train.global_batch);
        let works = |tensor: &u64| {
            workers.is_multiple_of(*tensor)
                && config.model.split_widths().iter().all(|width| width.is_multiple_of(*tensor))
                && shared_anchors(config).is_multiple_of(*tensor)
                && batch >= workers / tensor
        };
        (1..=workers).filter(works).map(|tensor| tensor.to_string()).collect()
    };
    let fits = splits(workers);
    if !fits.is_empty() {
        return format!("--tensor-parallel {} with {workers} workers", fits.join(" or "));
    }
    let below = (1..workers).rev().find(|fewer| !splits(*fewer).is_empty());
    let above = (workers + 1..=2 * workers).find(|more| !splits(*more).is_empty());
    let near: Vec<String> = [below, above].into_iter().flatten().map(|number| number.to_string()).collect();
    format!("{} workers", near.join(" or "))
}

/// Names the multiples of `of` that are nearest to `near`, which is not a multiple itself.
fn nearest_multiples(near: u64, of: u64) -> String {
    match near / of * of {
        0 => of.to_string(),
        below => format!("{below} or {}", below + of),
    }
}

fn check_gpu_count(workers: u32, gpus: u32, share: bool, inventory: &Inventory) -> Result<(), LaunchError> {
    let why = inventory.absent_because.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
    if gpus == 0 {
        refuse!(
            Device,
            "{workers} GPU(s) requested, but none is available{why}; to train on the CPU, use \
             `--workers {workers} --device cpu`"
        );
    }
    if workers > gpus && !share {
        refuse!(
            Device,
            "{workers} GPUs requested, but only {gpus} available; use `--gpus {gpus}`, or `--share-gpu` for a test, or \
             `--workers {workers} --device cpu`"
        );
    }
    Ok(())
}

fn check_tensor_split(workers: u32, tensor: u32, nodes: u32) -> Result<(), LaunchError> {
    if workers.is_multiple_of(tensor) {
        return Ok(());
    }
    let fits: Vec<String> =
        (1..=workers).filter(|size| workers.is_multiple_of(*size)).map(|size| size.to_string()).collect();
    let within = if nodes > 1 { ", because a replica stays on one node" } else { "" };
    refuse!(
        Config,
        "parallel.tensor: is {tensor}, but {workers} workers cannot be split into groups of {tensor}{within}; wanted one \
         of {}",
        fits.join(", ")
    )
}

/// Refuses a network interface that this machine does not have, before any worker starts. The workers look up the
/// address of the interface themselves.
fn check_interface(name: &str) -> Result<(), LaunchError> {
    if name.is_empty() {
        return Ok(());
    }
    let found =
        nix::ifaddrs::getifaddrs().map_err(|error| reported!(Device, "cannot list the network interfaces: {error}"))?;
    let mut names: Vec<String> = found.map(|interface| interface.interface_name).collect();
    names.sort();
    names.dedup();
    if !names.iter().any(|known| known == name) {
        let names = names.join(", ");
        refuse!(Device, "network.interface: is \"{name}\", but this machine has only {names}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use locdiff_core::config::DeviceKind;
    use locdiff_core::exit_code::HasExitCode;

    use super::*;
    use crate::gpus::Gpu;

    fn inventory(gpus: u32) -> Inventory {
        let gpu = |index| Gpu {
            index,
            uuid: format!("GPU-{index}"),
            name: "test".into(),
            memory_total_bytes: 0,
            memory_free_bytes: 0,
        };
        Inventory { gpus: (0..gpus).map(gpu).collect(), driver: None, absent_because: None }
    }

    fn config(workers: Option<u32>, device: DeviceKind) -> RunConfig {
        let mut config = RunConfig::default();
        config.parallel.workers = workers.map_or(AutoOr::Auto, AutoOr::Value);
        config.parallel.device = device;
        config
    }

    #[test]
    fn bare_command_takes_every_gpu_else_one_cpu_worker() {
        let world =
            NodeWorkers::plan(&config(None, DeviceKind::Auto), &inventory(3)).expect("one worker runs on each GPU");
        assert_eq!(world.slots.iter().map(|slot| slot.gpu).collect::<Vec<_>>(), [Some(0), Some(1), Some(2)]);
        let world =
            NodeWorkers::plan(&config(None, DeviceKind::Auto), &inventory(0)).expect("one worker runs on the CPU");
        assert_eq!(world.slots.iter().map(|slot| slot.gpu).collect::<Vec<_>>(), [None]);
    }

    #[test]
    fn automatic_threads_share_the_cores_on_the_cpu_only() {
        let threads = |workers, device, gpus| {
            NodeWorkers::plan(&config(workers, device), &inventory(gpus)).expect("the workers have devices").threads()
        };
        assert_eq!(threads(None, DeviceKind::Cpu, 0), cores());
        assert_eq!(threads(Some(2), DeviceKind::Cpu, 0), (cores() / 2).max(1));
        assert_eq!(threads(Some(1024), DeviceKind::Cpu, 0), (cores() / 1024).max(1));
        assert_eq!(threads(None, DeviceKind::Cuda, 2), 1);
        let mut config = config(Some(2), DeviceKind::Cpu);
        config.train.threads = AutoOr::Value(5);
        let world = NodeWorkers::plan(&config, &inventory(0)).expect("two workers run on the CPU");
        assert_eq!(world.slots.iter().map(|slot| slot.threads).collect::<Vec<_>>(), [5, 5]);
    }

    #[test]
    fn too_few_gpus_is_an_error_that_suggests_flags() {
        let config = config(Some(4), DeviceKind::Cuda);
        let error = NodeWorkers::plan(&config, &inventory(0)).expect_err("there are no GPUs").to_string();
        assert!(error.contains("`--workers 4 --device cpu`"), "{error}");
        let error = NodeWorkers::plan(&config, &inventory(2)).expect_err("two GPUs are too few").to_string();
        assert!(error.contains("`--gpus 2`") && error.contains("--share-gpu"), "{error}");
    }

    #[test]
    fn shared_gpus_are_assigned_round_robin() {
        let mut config = config(Some(3), DeviceKind::Cuda);
        config.parallel.share_gpu = true;
        let world = NodeWorkers::plan(&config, &inventory(2)).expect("workers may share a GPU");
        assert_eq!(world.slots.iter().map(|slot| slot.gpu).collect::<Vec<_>>(), [Some(0), Some(1), Some(0)]);
        assert!(world.share_gpu);
        config.parallel.workers = AutoOr::Value(2);
        assert!(!NodeWorkers::plan(&config, &inventory(2)).expect("each worker has a GPU").share_gpu);
        config.parallel.nodes = 2;
        assert!(NodeWorkers::plan(&config, &inventory(2)).expect("each worker has a GPU").share_gpu);
    }

    #[test]
    fn unknown_interface_is_found_before_any_worker_starts() {
        let mut config = config(Some(2), DeviceKind::Cpu);
        config.network.interface = "lo".into();
        NodeWorkers::plan(&config, &inventory(0)).expect("every machine has a loopback interface");
        config.network.interface = "nonsense0".into();
        let error = NodeWorkers::plan(&config, &inventory(0)).expect_err("the interface does not exist");
        assert_eq!(error.exit_code(), locdiff_core::exit_code::ExitCode::Device);
        assert!(error.to_string().contains("nonsense0") && error.to_string().contains("lo"), "{error}");
    }

    #[test]
    fn impossible_tensor_split_lists_the_possible_ones() {
        let mut config = config(Some(6), DeviceKind::Cpu);
        config.parallel.tensor = 4;
        let error = NodeWorkers::plan(&config, &inventory(0)).expect_err("6 is not a multiple of 4").to_string();
        assert!(error.ends_with("groups of 4; wanted one of 1, 2, 3, 6"), "{error}");
    }

    #[test]
    fn indivisible_batch_model_or_anchors_is_refused_with_values_that_work() {
        let refused = |workers, tensor, change: &dyn Fn(&mut RunConfig)| {
            let mut config = config(Some(workers), DeviceKind::Cpu);
            config.parallel.tensor = tensor;
            change(&mut config);
            let world = NodeWorkers::plan(&config, &inventory(0)).expect("the workers can be split into groups");
            world.check_division(&config).err().map(|error| error.to_string())
        };
        let same = |got: Option<String>, want: &str| assert_eq!(got.as_deref(), Some(want));
        assert_eq!(refused(8, 4, &|_| ()), None, "refused 4, which divides all layer widths at degree 47");
        assert_eq!(refused(3, 1, &|_| ()), None, "refused 3 replicas, whose shares of 4096 rows differ by a row");
        same(
            refused(7, 1, &|config| config.train.global_batch = 6),
            "train.global_batch: is 6, which is too few for 7 data-parallel ranks; wanted 7 or more, or 6 or 8 workers",
        );
        same(
            refused(10, 5, &|config| config.train.global_batch = 10),
            "parallel.tensor: is 5, which does not divide the layer widths 2304, 1152, 576, 4608; wanted \
             --tensor-parallel 1 or 2 with 10 workers",
        );
        same(
            refused(4, 4, &|config| config.loss.anchors = 2050),
            "loss.anchors: is 2050, which cannot be divided among 4 tensor-parallel ranks; wanted 2048 or 2052, or \
             --tensor-parallel 1 or 2 with 4 workers",
        );
        assert_eq!(
            refused(4, 4, &|config| {
                config.loss.anchors = 2050;
                config.loss.kl_weight = AutoOr::Value(0.0);
            }),
            None,
            "anchors were divided, although there is no KL loss"
        );
    }
}
