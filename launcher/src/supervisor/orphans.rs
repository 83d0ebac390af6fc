//! Collects orphans: processes that lost their parent and became children of the launcher. This happens if the launcher
//! is the first process of a container (PID 1) or a subreaper. An orphan that has ended keeps its process id until the
//! launcher collects its exit status.

use std::path::Path;

use nix::sys::prctl;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

/// Whether processes that lose their parent become children of this process.
pub(super) fn adopts_orphans() -> bool {
    std::process::id() == 1 || prctl::get_child_subreaper().unwrap_or(false)
}

/// Collects the exit statuses of all children of this process that have ended, except those in `workers`. The exit
/// status of a worker is left for the task that waits for the worker.
pub(super) fn collect(workers: &[u32]) {
    for pid in ended_children(Path::new("/proc"), std::process::id()).into_iter().filter(|pid| !workers.contains(pid)) {
        if let Ok(pid) = i32::try_from(pid) {
            let _ = waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG));
        }
    }
}

/// The process ids of zombies whose parent is `parent`.
fn ended_children(proc: &Path, parent: u32) -> Vec<u32> {
    let entries = std::fs::read_dir(proc).into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_wanted = |pid: &u32| {
        // The format is `PID (NAME) STATE PARENT ...`. The name may contain `) `, so split at the last `) `.
        let stat = std::fs::read_to_string(proc.join(pid.to_string()).join("stat")).unwrap_or_default();
        let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        fields.next() == Some("Z") && fields.next().and_then(|field| field.parse().ok()) == Some(parent)
    };
    pids.filter(is_wanted).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    #[test]
    fn orphans_are_collected_and_workers_are_left_alone() {
        prctl::set_child_subreaper(true).expect("Linux supports subreapers");
        assert!(adopts_orphans());
        let own = std::process::id();
        let mut worker = Command::new("true").spawn().expect("`true` can be started");
        // The shell ends before its child, which then becomes a child of this process.
        let output = Command::new("sh").args(["-c", "sleep 0.1 >/dev/null & echo $!"]).output().expect("sh runs");
        let orphan: u32 = String::from_utf8_lossy(&output.stdout).trim().parse().expect("sh prints a process id");
        let ended = || ended_children(Path::new("/proc"), own);
        while !(ended().contains(&orphan) && ended().contains(&worker.id())) {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Other tests in this process may also have children that have ended. Pass these children as workers, so that
        // only the orphan is collected.
        let others: Vec<u32> = ended().into_iter().filter(|pid| *pid != orphan).collect();
        collect(&others);
        assert!(!ended().contains(&orphan), "the orphan is still a zombie");
        assert!(worker.wait().expect("the worker's exit status is still available").success());
    }
}
