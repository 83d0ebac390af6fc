//! The memory limits of Linux control groups (cgroups), version 2 and version 1.
//!
//! Groups are nested, and the kernel enforces the limits of all of them, so the functions here walk from this process's
//! own group up to the root. Each function takes the root of the file system, which is `/` except in tests. Limits on
//! CPU cores need no code here, because `std::thread::available_parallelism` respects them.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// The memory controller of one cgroup version: the folder of its groups, and the names of its files and fields.
struct Controller {
    folder: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// Name of the field in `memory.stat` that counts the memory of cached files. The kernel frees this memory when the
    /// group reaches its limit.
    reclaimable: &'static str,
}

const VERSION_2: Controller =
    Controller { folder: "sys/fs/cgroup", limit: "memory.max", usage: "memory.current", reclaimable: "inactive_file" };

const VERSION_1: Controller = Controller {
    folder: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};

/// Main memory that is available without swapping and within the limits of all groups, in bytes. 0 if it is unknown.
pub fn memory_available_bytes(root: &Path) -> u64 {
    let meminfo = read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let kibibytes = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let groups = [&VERSION_2, &VERSION_1].into_iter().flat_map(|controller| {
        groups(root, controller).into_iter().filter_map(|group| memory_left_bytes(&group, controller))
    });
    groups.chain([kibibytes.unwrap_or(0) * 1024]).min().unwrap_or(0)
}

/// Number of processes that the kernel has killed because memory ran out, in this process's group and the groups below
/// it. `None` if the kernel does not count such kills, as in cgroup version 1.
pub fn oom_kills(root: &Path) -> Option<u64> {
    let own = groups(root, &VERSION_2).into_iter().find(|group| group.join("memory.events").exists())?;
    oom_kills_in(&own.join("memory.events"))
}

/// The number of out-of-memory kills that one `memory.events` file reports.
pub fn oom_kills_in(events: &Path) -> Option<u64> {
    field(events, "oom_kill")
}

/// The memory that one control group may still use, in bytes. `None` if the group has no limit.
fn memory_left_bytes(group: &Path, controller: &Controller) -> Option<u64> {
    let number = |name: &str| read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, used) = (number(controller.limit)?, number(controller.usage).unwrap_or(0));
    let reclaimable = field(&group.join("memory.stat"), controller.reclaimable).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

/// The folders of this process's group and of all groups that contain it, innermost first. In a container, the path in
/// `/proc/self/cgroup` may not exist below the mounted folder. If so, the mounted folder is the container's group.
fn groups(root: &Path, controller: &Controller) -> Vec<PathBuf> {
    let table = read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    // Each line is NUMBER:CONTROLLERS:PATH. In the line of version 2, CONTROLLERS is empty.
    let path = table.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let is_version_2 = controllers.is_empty();
        let is_wanted = if controller.limit == VERSION_2.limit {
            is_version_2
        } else {
            controllers.split(',').any(|one| one == "memory")
        };
        is_wanted.then(|| Path::new(path.trim_start_matches('/')))
    });
    let top = root.join(controller.folder);
    path.map_or_else(Vec::new, |path| path.ancestors().map(|group| top.join(group)).collect())
}

/// The number after `name` in a file with lines of the form `NAME NUMBER`.
fn field(path: &Path, name: &str) -> Option<u64> {
    let text = read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A temporary folder that contains `files` and takes the place of `/`.
    fn machine(files: &[(&str, String)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a temporary folder can be created");
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().expect("the file is in a folder")).expect("the folder is writable");
            std::fs::write(path, text).expect("the temporary folder is writable");
        }
        root
    }

    fn meminfo(mib: u64) -> (&'static str, String) {
        ("proc/meminfo", format!("MemTotal: 99999999 kB\nMemAvailable:   {} kB\n", mib * 1024))
    }

    #[test]
    fn tightest_of_the_nested_limits_counts() {
        let own = ("proc/self/cgroup", "0::/job.slice/step.scope\n".to_owned());
        let root = machine(&[
            meminfo(8000),
            own.clone(),
            ("sys/fs/cgroup/job.slice/memory.max", (1000 * MIB).to_string()),
            ("sys/fs/cgroup/job.slice/memory.current", (600 * MIB).to_string()),
            ("sys/fs/cgroup/job.slice/memory.stat", format!("anon 5\ninactive_file {}\n", 100 * MIB)),
            ("sys/fs/cgroup/job.slice/step.scope/memory.max", "max\n".to_owned()),
            ("sys/fs/cgroup/job.slice/step.scope/memory.current", (600 * MIB).to_string()),
        ]);
        assert_eq!(memory_available_bytes(root.path()), 500 * MIB);
        let unlimited = machine(&[meminfo(8000), own]);
        assert_eq!(memory_available_bytes(unlimited.path()), 8000 * MIB);
        assert_eq!(memory_available_bytes(Path::new("/nowhere")), 0);
    }

    #[test]
    fn limits_of_version_1_and_of_a_container_count() {
        let version_1 = machine(&[
            meminfo(8000),
            ("proc/self/cgroup", "7:cpu,cpuacct:/\n4:memory:/docker/abc\n".to_owned()),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", (300 * MIB).to_string()),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", (100 * MIB).to_string()),
        ]);
        assert_eq!(memory_available_bytes(version_1.path()), 200 * MIB);
        let container = machine(&[
            meminfo(8000),
            ("proc/self/cgroup", "0::/\n".to_owned()),
            ("sys/fs/cgroup/memory.max", (300 * MIB).to_string()),
        ]);
        assert_eq!(memory_available_bytes(container.path()), 300 * MIB);
    }

    #[test]
    fn kills_of_the_own_group_are_counted() {
        let events = |kills: u64| format!("low 0\nmax 7\noom 3\noom_kill {kills}\noom_group_kill 0\n");
        let root = machine(&[
            ("proc/self/cgroup", "0::/job/step\n".to_owned()),
            ("sys/fs/cgroup/job/memory.events", events(9)),
            ("sys/fs/cgroup/job/step/memory.events", events(2)),
        ]);
        assert_eq!(oom_kills(root.path()), Some(2));
        assert_eq!(oom_kills(Path::new("/nowhere")), None);
    }
}
