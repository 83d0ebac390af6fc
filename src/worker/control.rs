//! The worker's end of the control socket.

use std::os::unix::net::UnixStream;
use std::panic::PanicHookInfo;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context as _, bail};
use locdiff_core::exit_code::{ExitCode, FailureKind};
use locdiff_core::protocol::{
    CONTROL_VARIABLE, Failure, Hello, LAUNCHER_PID_VARIABLE, PROTOCOL_VERSION, ProtocolError, ToLauncher, ToWorker,
    read_message,
};
use locdiff_core::{pulse, stop};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};

use super::outbox::Outbox;
use crate::comm::RemoteKeys;
use crate::native::Versions;

/// The connection to the launcher.
pub(super) struct Control {
    reader: UnixStream,
    /// Shared with the thread that sends heartbeats.
    outbox: Arc<Outbox>,
    /// The keys that the launcher holds.
    keys: Arc<RemoteKeys>,
    rank: u32,
}

impl Control {
    /// Connects to the launcher that started this process.
    pub(super) fn connect() -> anyhow::Result<Self> {
        let path = std::env::var_os(CONTROL_VARIABLE).with_context(|| {
            format!("{CONTROL_VARIABLE} is not set; do not start a worker by hand: `locdiff-launch` starts it")
        })?;
        ignore_signals_of_schedulers()?;
        die_with_launcher()?;
        let rank =
            std::env::var("RANK").context("cannot read the variable RANK")?.parse().context("RANK is not a number")?;
        let reader = UnixStream::connect(&path)
            .with_context(|| format!("cannot connect to the control socket {}", path.display()))?;
        let writer = reader.try_clone().context("cannot duplicate the control socket")?;
        let outbox = Outbox::start(writer).context("cannot start a thread")?;
        if let Some(folder) = Path::new(&path).parent() {
            pulse::write_steps(folder, rank).with_context(|| format!("cannot write to {}", folder.display()))?;
        }
        report_panics(&outbox);
        let questions = Arc::clone(&outbox);
        let ask = move |request| questions.send(&ToLauncher::Store(request)).map_err(|error| error.to_string());
        Ok(Self { reader, outbox, keys: Arc::new(RemoteKeys::new(ask)), rank })
    }

    /// Sends the first message, which contains the rank, the process id and the versions.
    pub(super) fn send_hello(&mut self, versions: &Versions) -> anyhow::Result<()> {
        let hello = Hello {
            protocol: PROTOCOL_VERSION,
            rank: self.rank,
            pid: std::process::id(),
            version: locdiff_core::VERSION.to_owned(),
            revision: locdiff_core::REVISION.to_owned(),
            libtorch_built: versions.libtorch_built.clone(),
            libtorch_loaded: versions.libtorch_loaded.clone(),
            cuda: versions.cuda.clone(),
            nccl: versions.nccl.clone(),
        };
        Ok(self.send(&ToLauncher::Hello(hello))?)
    }

    pub(super) fn send(&mut self, message: &ToLauncher) -> Result<(), ProtocolError> {
        self.outbox.send(message)
    }

    /// The keys that the launcher holds. They can be used once [`Control::watch_launcher`] was called.
    pub(super) fn keys(&self) -> Arc<RemoteKeys> {
        Arc::clone(&self.keys)
    }

    /// Waits until all messages are written to the control socket, or until writing fails.
    pub(super) fn flush(&self) {
        self.outbox.flush();
    }

    /// Waits for the next message from the launcher.
    pub(super) fn receive(&mut self) -> anyhow::Result<ToWorker> {
        match read_message(&mut self.reader)? {
            Some(message) => Ok(message),
            None => bail!("the launcher closed the control socket"),
        }
    }

    /// Starts a thread that reads the control socket and forwards the messages to the returned receiver. The thread
    /// ends this process as soon as the socket closes, even if the main thread hangs, because a worker must not outlive
    /// its launcher.
    pub(super) fn watch_launcher(&self) -> anyhow::Result<Receiver<ToWorker>> {
        let mut socket = self.reader.try_clone().context("cannot duplicate the control socket")?;
        let (inbox, messages) = channel();
        let keys = Arc::clone(&self.keys);
        std::thread::Builder::new().name("control".into()).spawn(move || {
            while let Ok(Some(message)) = read_message::<ToWorker>(&mut socket) {
                match message {
                    ToWorker::Stop => stop::request(),
                    ToWorker::Stored(reply) => keys.deliver(reply),
                    // A send fails if the receiver was dropped. This is no error: once the workers are connected,
                    // only training jobs and `serve` read messages.
                    message => drop(inbox.send(message)),
                }
            }
            std::process::exit(ExitCode::Interrupted.code().into());
        })?;
        Ok(messages)
    }
}

impl Control {
    /// Starts a thread that sends a heartbeat at every interval.
    pub(super) fn start_heartbeats(&self, interval: Duration) -> anyhow::Result<()> {
        let outbox = Arc::clone(&self.outbox);
        std::thread::Builder::new().name("heartbeat".into()).spawn(move || {
            // A send fails if the socket is closed. Then the thread `control` ends the process.
            while outbox.send_beat(&ToLauncher::Beat(pulse::beat())).is_ok() {
                std::thread::sleep(interval);
            }
        })?;
        Ok(())
    }
}

/// Blocks the signals that a scheduler or a terminal sends to every process of a job. Only the launcher reacts to them,
/// and asks the workers to stop. Threads that are started later inherit the mask.
fn ignore_signals_of_schedulers() -> anyhow::Result<()> {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGUSR1]);
    signals.thread_block().context("cannot block signals")
}

/// Reports a panic of the main thread to the launcher at once, because the process may exit much later. By then, other
/// workers may have reported errors that are only consequences of the panic.
fn report_panics(outbox: &Arc<Outbox>) {
    let outbox = Arc::clone(outbox);
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic: &PanicHookInfo<'_>| {
        if std::thread::current().name() == Some("main") {
            let payload = panic.payload();
            let text = payload.downcast_ref::<&str>().copied();
            let text =
                text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown reason");
            let place = panic.location().map_or_else(String::new, |place| format!(" at {place}"));
            let message = format!("panicked{place}: {text}");
            let exit_code = ExitCode::WorkerFailed.code();
            let failure = Failure { message, of_peer: false, exit_code, kind: FailureKind::Crash };
            let _ = outbox.send(&ToLauncher::Failed(failure));
            outbox.flush();
        }
        print(panic);
    }));
}

/// Asks the kernel to kill this worker when the launcher dies. Fails if the launcher is already gone.
fn die_with_launcher() -> anyhow::Result<()> {
    set_pdeathsig(Signal::SIGKILL).context("cannot request the parent-death signal")?;
    let launcher = std::env::var(LAUNCHER_PID_VARIABLE).unwrap_or_default();
    if launcher != nix::unistd::getppid().to_string() {
        bail!("the launcher (pid {launcher}) is gone");
    }
    Ok(())
}
