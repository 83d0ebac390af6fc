//! Lists the GPUs of this machine with NVML, without a CUDA context and without libtorch.
//!
//! `CUDA_VISIBLE_DEVICES` has the same meaning as in CUDA: the first entry that matches no GPU, and all entries after
//! it, are ignored.

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use serde::Serialize;

/// One GPU that a worker can use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Index among all GPUs of the machine, ignoring `CUDA_VISIBLE_DEVICES`.
    pub index: u32,
    /// Unique identifier, `GPU-...`.
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
        let gpus = (0..nvml.device_count()?).map(|index| describe(&nvml, index)).collect::<Result<Vec<_>, _>>()?;
        Ok((driver, gpus))
    });
    match found {
        Ok((driver, all)) => {
            let selection = std::env::var("CUDA_VISIBLE_DEVICES").ok();
            let gpus = visible(&all, selection.as_deref());
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

fn describe(nvml: &Nvml, index: u32) -> Result<Gpu, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let memory = device.memory_info()?;
    Ok(Gpu {
        index,
        uuid: device.uuid()?,
        name: device.name()?,
        memory_total_bytes: memory.total,
        memory_free_bytes: memory.free,
    })
}

/// The GPUs that `selection`, the value of `CUDA_VISIBLE_DEVICES`, names by index or by the beginning of their UUID.
/// The first entry that matches no GPU, and all entries after it, are ignored. Without a value, all GPUs are visible.
fn visible(all: &[Gpu], selection: Option<&str>) -> Vec<Gpu> {
    let Some(selection) = selection else { return all.to_vec() };
    let find = |entry: &str| match entry.parse::<usize>() {
        Ok(index) => all.get(index),
        Err(_) if entry.starts_with("GPU-") => all.iter().find(|gpu| gpu.uuid.starts_with(entry)),
        Err(_) => None,
    };
    selection.split(',').map(str::trim).map_while(|entry| find(entry).cloned()).collect()
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
        let indices = |selection| visible(&all, selection).iter().map(|gpu| gpu.index).collect::<Vec<_>>();
        assert_eq!(indices(None), [0, 1, 2]);
        assert_eq!(indices(Some("2, 0")), [2, 0]);
        assert_eq!(indices(Some("GPU-1a")), [1]);
        assert_eq!(indices(Some("1,7,0")), [1], "an entry after an unknown GPU was used");
        assert!(indices(Some("")).is_empty());
        assert!(indices(Some("-1")).is_empty());
    }
}
