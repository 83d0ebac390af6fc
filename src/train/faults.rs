//! Injects the faults that `train --inject` requests, to test how a run recovers.

use std::io;
use std::path::Path;
use std::time::Duration;

use locdiff_core::files::FileError;
use locdiff_core::protocol::{FaultKind, InjectedFault, MEMORY_EVENTS_VARIABLE, ToLauncher};
use locdiff_core::pulse::{self, WorkPhase};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tch::{Device, Kind, Tensor};

use super::error::TrainError;
use super::observe::Launcher;
use crate::native::nvrtc::Kernel;
use crate::shards::ShardsError;

/// The faults of one rank that have not occurred yet.
#[derive(Debug)]
pub(super) struct RankFaults {
    planned: Vec<InjectedFault>,
    rank: u32,
    sleep: Duration,
}

impl RankFaults {
    pub(super) fn new(planned: &[InjectedFault], rank: u32) -> Self {
        Self {
            planned: planned.iter().copied().filter(|fault| fault.rank == rank).collect(),
            rank,
            sleep: Duration::ZERO,
        }
    }

    /// Injects the faults that are due before step `step`, where the first step is 1. Returns the faults that the
    /// training loop itself must carry out. Notifies the launcher before each fault, so that the fault is not repeated
    /// after a restart.
    pub(super) fn inject(&mut self, step: u64, launcher: &mut Launcher<'_>) -> Result<Vec<FaultKind>, TrainError> {
        while let Some(fault) = (launcher.next_fault)() {
            self.planned.extend((fault.rank == self.rank).then_some(InjectedFault { step, ..fault }));
        }
        let mut rest = Vec::new();
        for fault in self.planned.extract_if(.., |fault| fault.step == step) {
            (launcher.send)(ToLauncher::Breaking(fault))?;
            match fault.kind {
                FaultKind::Slow { milliseconds } => self.sleep = Duration::from_millis(milliseconds),
                kind => rest.extend(occur(kind, step)),
            }
        }
        std::thread::sleep(self.sleep);
        Ok(rest)
    }
}

/// Carries out a fault that makes this process die, stop or hang, except a hang in the data phase. Returns every other
/// fault, because the training loop must carry it out.
fn occur(kind: FaultKind, step: u64) -> Option<FaultKind> {
    let signal_self = |signal| kill(Pid::this(), signal).expect("a process may signal itself");
    match kind {
        FaultKind::Kill => signal_self(Signal::SIGKILL),
        FaultKind::Stop => signal_self(Signal::SIGSTOP),
        FaultKind::Segfault => {
            // Send the signal twice: Rust's handler for stack overflows catches the first signal and only removes
            // itself.
            signal_self(Signal::SIGSEGV);
            signal_self(Signal::SIGSEGV);
        }
        FaultKind::Panic => panic!("injected panic before step {step}"),
        FaultKind::Exit { code } => std::process::exit(code),
        FaultKind::Oom => {
            if let Some(path) = std::env::var_os(MEMORY_EVENTS_VARIABLE) {
                let _ = count_oom_kill(Path::new(&path));
            }
            signal_self(Signal::SIGKILL);
        }
        // The training loop carries out this fault by waiting for a batch that never comes.
        FaultKind::Hang { phase: WorkPhase::Data } => return Some(kind),
        FaultKind::Hang { phase } => {
            let _phase = pulse::enter(phase);
            loop {
                std::thread::park();
            }
        }
        other => return Some(other),
    }
    None
}

fn count_oom_kill(path: &Path) -> io::Result<()> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok()).unwrap_or(0);
    std::fs::write(path, format!("oom_kill {}\n", count + 1))
}

/// The error for a shard that cannot be read because of an injected fault.
pub(super) fn read_error(location: &str) -> TrainError {
    ShardsError::Io(file_error(location, Errno::EIO)).into()
}

pub(super) fn file_error(path: impl AsRef<Path>, errno: Errno) -> FileError {
    FileError { path: path.as_ref().to_owned(), error: errno.into() }
}

/// Runs a kernel that fails, so that CUDA reports an error.
pub(super) fn break_cuda(device: Device) -> Result<(), TrainError> {
    let kernel = Kernel::compile("fail", "extern \"C\" __global__ void fail() { asm(\"trap;\"); }", &[])?;
    kernel.launch([1, 1, 1], [1, 1, 1], &[])?;
    Tensor::f_zeros([1], (Kind::Float, device))?.f_to_device(Device::Cpu).map(drop)?;
    Ok(())
}

/// Requests a pebibyte of memory on the device, so that the allocation fails.
pub(super) fn exhaust_memory(device: Device) -> Result<(), TrainError> {
    Tensor::f_empty([1 << 50], (Kind::Uint8, device)).map(drop)?;
    Ok(())
}
