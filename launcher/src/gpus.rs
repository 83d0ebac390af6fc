//! Lists the GPUs of this machine with NVML, without a CUDA context and without libtorch.
//!
//! `CUDA_VISIBLE_DEVICES` has the same meaning as in CUDA: the first entry that matches no GPU, and all entries after
//! it, are ignored. An entry `MIG-UUID` names an instance of a divided GPU (multi-instance GPU).

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use serde::Serialize;

/// One GPU, or one instance of a GPU, that a worker can use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Index among all GPUs of the machine, ignoring `CUDA_VISIBLE_DEVICES`. A MIG instance has its GPU's index.
    pub index: u32,
    /// Unique identifier, `GPU-...` or `MIG-...`.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// Total memory, bytes.
    pub memory_total_bytes: u64,
    /// Free memory, bytes.
    pub memory_free_bytes: u64,
}

/// The GPUs and the driver of this machine, as NVML reports them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Inventory {
    /// Visible GPUs, in the order in which CUDA numbers them.
    pub gpus: Vec<Gpu>,
    /// Version of the NVIDIA driver. `None` if NVML cannot be queried.
    pub driver: Option<String>,
    /// The reason why `gpus` is empty. `None` if there are GPUs.
    pub absent_because: Option<String>,
}

/// Queries NVML. A machine without an NVIDIA driver has an inventory without GPUs. This is not an error.
pub fn inventory() -> Inventory {
    let found = Nvml::init().and_then(|nvml| {
        let driver = nvml.sys_driver_version()?;
        let one = |index| describe(&nvml.device_by_index(index)?, index);
        let all = (0..nvml.device_count()?).map(one).collect::<Result<Vec<_>, _>>()?;
        let instance = |uuid: &str| {
            let device = nvml.device_by_uuid(uuid).ok()?;
            describe(&device, device.mig_parent_device().and_then(|parent| parent.index()).unwrap_or(0)).ok()
        };
        let gpus = visible(&all, instance, selection().as_deref());
        Ok((driver, all, gpus))
    });
    match found {
        Ok((driver, all, gpus)) => {
            let selection = selection();
            let absent_because = match (&selection, gpus.is_empty()) {
                (Some(list), true) => {
                    Some(format!("CUDA_VISIBLE_DEVICES={list} hides all {} GPUs of this machine", all.len()))
                }
                (None, true) => Some("the driver reports no GPU".to_owned()),
                _ => None,
            };
            Inventory { gpus, driver: Some(driver), absent_because }
        }
        Err(NvmlError::LibloadingError(_)) => absent("no NVIDIA driver is installed"),
        Err(error) => absent(&format!("cannot query the NVIDIA driver: {error}")),
    }
}

fn absent(reason: &str) -> Inventory {
    Inventory { absent_because: Some(reason.to_owned()), ..Inventory::default() }
}

fn selection() -> Option<String> {
    std::env::var("CUDA_VISIBLE_DEVICES").ok()
}

/// If the list in `CUDA_VISIBLE_DEVICES` contains MIG instances (slices of a GPU), returns entry number `gpu` of the
/// list. CUDA shows a process only the first instance of a list. A worker must therefore get a list that contains only
/// its own entry, which is then its GPU 0. Returns `None` if the list contains no instances; a worker can then get the
/// whole list.
pub fn own_instance(gpu: u32) -> Option<String> {
    instance_in(&selection()?, gpu)
}

fn instance_in(selection: &str, gpu: u32) -> Option<String> {
    let entries: Vec<&str> = selection.split(',').map(str::trim).collect();
    let has_instances = entries.iter().any(|entry| entry.starts_with("MIG-"));
    entries.get(gpu as usize).filter(|_| has_instances).map(|entry| (*entry).to_owned())
}

fn describe(device: &Device<'_>, index: u32) -> Result<Gpu, NvmlError> {
    let memory = device.memory_info()?;
    Ok(Gpu {
        index,
        uuid: device.uuid()?,
        name: device.name()?,
        memory_total_bytes: memory.total,
        memory_free_bytes: memory.free,
    })
}

/// Finds the GPUs and MIG instances that are visible. `selection` is the value of `CUDA_VISIBLE_DEVICES`, a list. If it
/// is `None`, all GPUs are visible. Each entry of the list is the index of a GPU, the beginning of a GPU's UUID, or the
/// UUID of a MIG instance. `instance` finds a MIG instance by its UUID. The first entry that matches nothing, and all
/// entries after it, are ignored.
fn visible(all: &[Gpu], instance: impl Fn(&str) -> Option<Gpu>, selection: Option<&str>) -> Vec<Gpu> {
    let Some(selection) = selection else { return all.to_vec() };
    let find = |entry: &str| match entry.parse::<usize>() {
        Ok(index) => all.get(index).cloned(),
        Err(_) if entry.starts_with("GPU-") => all.iter().find(|gpu| gpu.uuid.starts_with(entry)).cloned(),
        Err(_) if entry.starts_with("MIG-") => instance(entry),
        Err(_) => None,
    };
    selection.split(',').map(str::trim).map_while(find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: u32) -> Gpu {
        Gpu {
            index,
            uuid: format!("GPU-{index}abc"),
            name: "test".into(),
            memory_total_bytes: 1 << 30,
            memory_free_bytes: 1 << 30,
        }
    }

    #[test]
    fn visible_devices_follow_cudas_rules() {
        let all = [gpu(0), gpu(1), gpu(2)];
        let instance = |uuid: &str| (uuid == "MIG-abc").then(|| Gpu { uuid: uuid.to_owned(), ..gpu(1) });
        let indices = |selection| visible(&all, instance, selection).iter().map(|gpu| gpu.index).collect::<Vec<_>>();
        assert_eq!(indices(None), [0, 1, 2]);
        assert_eq!(indices(Some("2, 0")), [2, 0]);
        assert_eq!(indices(Some("GPU-1a")), [1]);
        assert_eq!(indices(Some("1,7,0")), [1], "used an entry that follows an unknown GPU");
        assert!(indices(Some("")).is_empty());
        assert!(indices(Some("-1")).is_empty());
        assert_eq!(indices(Some("MIG-abc,GPU-2a")), [1, 2]);
        assert_eq!(indices(Some("MIG-abc,MIG-unknown,0")), [1], "used an entry that follows an unknown instance");
    }

    #[test]
    fn worker_of_an_instance_is_given_this_instance_alone() {
        assert_eq!(instance_in("MIG-a, MIG-b", 1).as_deref(), Some("MIG-b"));
        assert_eq!(instance_in("MIG-a,3", 1).as_deref(), Some("3"));
        assert_eq!(instance_in("0,1", 1), None);
        assert_eq!(instance_in("GPU-a", 0), None);
    }
}
