//! Which rank runs where: workers of this node, their devices, and whether the model can be split over them.

use crate::config::{AutoOr, RunConfig};
use crate::error::LaunchError;
use crate::exit_code::ExitCode;
use crate::gpus::Inventory;
use crate::protocol::Place;

/// The workers of a run on this node.
#[derive(Debug, Clone, PartialEq)]
pub struct World {
    /// One entry per worker, in the order of their ranks.
    pub places: Vec<Place>,
    /// Several workers share a GPU: each must pose as a host of its own, or NCCL refuses.
    pub share_gpu: bool,
}

impl World {
    /// Lays out the workers that the configuration asks for on the GPUs that there are.
    pub fn plan(config: &RunConfig, inventory: &Inventory) -> Result<Self, LaunchError> {
        let parallel = &config.parallel;
        if parallel.nodes > 1 {
            return Err(LaunchError::NotYet("--nnodes above 1".into()));
        }
        let gpus = u32::try_from(inventory.gpus.len()).unwrap_or(u32::MAX);
        let on_cuda = parallel.device.on_cuda(gpus > 0);
        let workers = parallel.workers.value().unwrap_or(if on_cuda { gpus.max(1) } else { 1 });
        if on_cuda {
            enough_gpus(workers, gpus, parallel.share_gpu, inventory)?;
        }
        splits(workers, parallel.tensor)?;
        interface_is_there(&config.network.interface)?;
        let place = |rank| Place {
            rank,
            world: workers,
            local_rank: rank,
            gpu: on_cuda.then(|| rank % gpus),
            threads: config.train.threads,
        };
        Ok(Self { places: (0..workers).map(place).collect(), share_gpu: on_cuda && workers > gpus })
    }

    /// That a batch can be shared by the replicas, and the model and its anchors by the ranks of one; else what could.
    pub fn divides(&self, config: &RunConfig) -> Result<(), LaunchError> {
        let (workers, tensor) = (self.places.len() as u64, u64::from(config.parallel.tensor));
        let refused = |text: String| Err(LaunchError::Reported { text, code: ExitCode::Config });
        let could = |of: u64| {
            let split = |size: &u64| workers.is_multiple_of(*size) && of.is_multiple_of(*size);
            (1..=workers).filter(split).map(|size| size.to_string()).collect::<Vec<_>>().join(", ")
        };
        let (replicas, batch) = (workers / tensor, u64::from(config.train.global_batch));
        if !batch.is_multiple_of(replicas) {
            let data = (1..=replicas).filter(|size| batch.is_multiple_of(*size)).max().unwrap_or(1);
            return refused(format!(
                "train.global_batch: is {batch}, which {replicas} data-parallel ranks cannot share; wanted {}, or {} workers",
                multiples(batch, replicas),
                data * tensor
            ));
        }
        let shared = config.model.split_widths();
        let common = shared.iter().copied().fold(0, greatest_common_divisor);
        if !common.is_multiple_of(tensor) {
            return refused(format!(
                "parallel.tensor: is {tensor}, but the model has layers of widths {}; with {workers} workers --tensor-parallel \
                 can be {}",
                shared.map(|width| width.to_string()).join(", "),
                could(common)
            ));
        }
        let anchors = u64::from(config.loss.anchors);
        if config.loss.kl_weight != AutoOr::Value(0.0) && !anchors.is_multiple_of(tensor) {
            return refused(format!(
                "loss.anchors: is {anchors}, which {tensor} tensor-parallel ranks cannot share; wanted {}, or \
                 --tensor-parallel {}",
                multiples(anchors, tensor),
                could(greatest_common_divisor(anchors, common))
            ));
        }
        Ok(())
    }
}

/// The multiples of `of` next to `near`.
fn multiples(near: u64, of: u64) -> String {
    match near / of * of {
        0 => of.to_string(),
        below => format!("{below} or {}", below + of),
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

fn enough_gpus(workers: u32, gpus: u32, share: bool, inventory: &Inventory) -> Result<(), LaunchError> {
    let why = inventory.absent_because.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
    if gpus == 0 {
        return Err(LaunchError::Device(format!(
            "{workers} GPU(s) asked for, this machine shows none{why}; to train on the CPU say `--workers {workers} --device cpu`"
        )));
    }
    if workers > gpus && !share {
        return Err(LaunchError::Device(format!(
            "{workers} GPUs asked for, this machine shows {gpus}; take `--gpus {gpus}`, or `--share-gpu` for a test, or \
             `--workers {workers} --device cpu`"
        )));
    }
    Ok(())
}

fn splits(workers: u32, tensor: u32) -> Result<(), LaunchError> {
    if workers.is_multiple_of(tensor) {
        return Ok(());
    }
    let fits: Vec<String> =
        (1..=workers).filter(|size| workers.is_multiple_of(*size)).map(|size| size.to_string()).collect();
    Err(LaunchError::Device(format!(
        "{workers} workers cannot be split into tensor-parallel groups of {tensor}; with {workers} workers, \
         --tensor-parallel can be {}",
        fits.join(", ")
    )))
}

/// The workers look up its address themselves; a name that no interface has is found before any of them starts.
fn interface_is_there(name: &str) -> Result<(), LaunchError> {
    if name.is_empty() {
        return Ok(());
    }
    let found = nix::ifaddrs::getifaddrs()
        .map_err(|error| LaunchError::Device(format!("the network interfaces cannot be listed: {error}")))?;
    let mut names: Vec<String> = found.map(|interface| interface.interface_name).collect();
    names.sort();
    names.dedup();
    match names.iter().any(|known| known == name) {
        true => Ok(()),
        false => Err(LaunchError::Device(format!(
            "network.interface is \"{name}\", which this machine does not have; there are {}",
            names.join(", ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DeviceKind;
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
        let world = World::plan(&config(None, DeviceKind::Auto), &inventory(3)).expect("fits");
        assert_eq!(world.places.iter().map(|place| place.gpu).collect::<Vec<_>>(), [Some(0), Some(1), Some(2)]);
        let world = World::plan(&config(None, DeviceKind::Auto), &inventory(0)).expect("fits");
        assert_eq!(world.places.iter().map(|place| place.gpu).collect::<Vec<_>>(), [None]);
    }

    #[test]
    fn too_few_gpus_name_the_way_out() {
        let error = World::plan(&config(Some(4), DeviceKind::Cuda), &inventory(0)).expect_err("none").to_string();
        assert!(error.contains("`--workers 4 --device cpu`"), "{error}");
        let error = World::plan(&config(Some(4), DeviceKind::Cuda), &inventory(2)).expect_err("two").to_string();
        assert!(error.contains("`--gpus 2`") && error.contains("--share-gpu"), "{error}");
    }

    #[test]
    fn shared_gpus_are_dealt_round() {
        let mut config = config(Some(3), DeviceKind::Cuda);
        config.parallel.share_gpu = true;
        let world = World::plan(&config, &inventory(2)).expect("shared");
        assert_eq!(world.places.iter().map(|place| place.gpu).collect::<Vec<_>>(), [Some(0), Some(1), Some(0)]);
        assert!(world.share_gpu);
    }

    #[test]
    fn an_interface_that_is_not_there_is_found_before_any_worker_starts() {
        let mut config = config(Some(2), DeviceKind::Cpu);
        config.network.interface = "lo".into();
        World::plan(&config, &inventory(0)).expect("every machine has it");
        config.network.interface = "nonsense0".into();
        let error = World::plan(&config, &inventory(0)).expect_err("unknown");
        assert_eq!(error.exit_code(), crate::exit_code::ExitCode::Device);
        assert!(error.to_string().contains("nonsense0") && error.to_string().contains("lo"), "{error}");
    }

    #[test]
    fn a_split_that_does_not_divide_lists_what_would() {
        let mut config = config(Some(6), DeviceKind::Cpu);
        config.parallel.tensor = 4;
        let error = World::plan(&config, &inventory(0)).expect_err("6 / 4").to_string();
        assert!(error.contains("can be 1, 2, 3, 6"), "{error}");
    }

    #[test]
    fn what_ranks_cannot_share_is_refused_with_what_they_could() {
        let refused = |workers, tensor, change: &dyn Fn(&mut RunConfig)| {
            let mut config = config(Some(workers), DeviceKind::Cpu);
            config.parallel.tensor = tensor;
            change(&mut config);
            let world = World::plan(&config, &inventory(0)).expect("tensor divides workers");
            world.divides(&config).err().map(|error| error.to_string())
        };
        assert_eq!(refused(8, 4, &|_| ()), None, "widths of degree 47 are multiples of 576");
        let text = refused(3, 1, &|_| ()).expect("4096 rows");
        assert!(text.contains("3 data-parallel ranks") && text.contains("4095 or 4098, or 2 workers"), "{text}");
        let text = refused(2, 1, &|config| config.train.global_batch = 1).expect("one row");
        assert!(text.contains("wanted 2, or 1 workers"), "{text}");
        let text = refused(10, 5, &|config| config.train.global_batch = 10).expect("2304, 1152, 576");
        assert!(text.contains("2304, 1152, 576, 4608") && text.contains("can be 1, 2"), "{text}");
        let text = refused(4, 4, &|config| config.loss.anchors = 2050).expect("2050 anchors");
        assert!(text.contains("2048 or 2052") && text.contains("--tensor-parallel 1, 2"), "{text}");
        assert_eq!(
            refused(4, 4, &|config| {
                config.loss.anchors = 2050;
                config.loss.kl_weight = AutoOr::Value(0.0);
            }),
            None,
            "no KL, no anchors"
        );
    }
}
