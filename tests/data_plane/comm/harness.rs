//! Runs the body of a test in several real processes. The test binary starts itself once more for each rank and passes
//! the name of the calling test, so that each child process runs only that test.
//!
//! The parent holds the keys through which the ranks find each other, and answers their questions on a Unix socket. A
//! child is killed when its parent dies. At the deadline, the parent kills the children that are still running.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use locdiff::comm::{Backend, Communicator, Layout, RemoteKeys, Rendezvous};
use locdiff_core::protocol::{KeyValues, StoreReply, StoreRequest, read_message, write_message};
use tempfile::TempDir;

const RANK: &str = "LOCDIFF_TEST_RANK";
const WORLD: &str = "LOCDIFF_TEST_WORLD";
const SOCKET: &str = "LOCDIFF_TEST_SOCKET";
/// Marks the lines on standard output with which a child process reports to its parent. All other lines come from
/// libtest.
const MARK: &str = "@report ";
/// How long a test with all its processes may take. This is enough even if there are more processes than cores.
const DEADLINE: Duration = Duration::from_secs(240);
/// Timeout of collectives that should succeed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Rank, world size and rendezvous of a child process.
pub(crate) struct Rank {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    keys: Arc<RemoteKeys>,
}

/// How a child ended.
pub(crate) struct Outcome {
    pub(crate) status: ExitStatus,
    /// The lines that the child reported.
    pub(crate) reports: Vec<String>,
    stderr: String,
}

/// Runs `body` in `world` processes, all of which must succeed. Returns the lines that each process reported.
pub(crate) fn run_ranks<F: Fn()>(test: F, world: u32, body: impl FnOnce(&Rank)) -> Vec<Vec<String>> {
    let outcomes = run_ranks_with_losses(test, world, &[], body);
    let failed = outcomes.iter().enumerate().filter(|(_, outcome)| !outcome.status.success());
    let report: Vec<_> =
        failed.map(|(rank, outcome)| format!("rank {rank}: {}\n{}", outcome.status, outcome.stderr)).collect();
    assert!(report.is_empty(), "failures among {world} ranks:\n{}", report.join("\n"));
    outcomes.into_iter().map(|outcome| outcome.reports).collect()
}

/// Runs `body` in `world` processes and returns how each of them ended. The ranks in `lost` need not exit: they are
/// killed when all other ranks have exited.
pub(crate) fn run_ranks_with_losses<F: Fn()>(
    test: F,
    world: u32,
    lost: &[u32],
    body: impl FnOnce(&Rank),
) -> Vec<Outcome> {
    if let Ok(rank) = std::env::var(RANK) {
        run_as_rank(&rank, body);
    }
    let deadline = Instant::now() + DEADLINE;
    let name = test_name(&test);
    let mut fleet =
        Fleet { children: Vec::new(), folder: tempfile::tempdir().expect("a temporary folder can be created") };
    let listener = UnixListener::bind(fleet.socket()).expect("the folder is writable");
    std::thread::spawn(move || serve_keys(&listener, world));
    for rank in 0..world {
        fleet.spawn(name, rank, world);
    }
    fleet.wait(lost, deadline)
}

/// Answers the questions of all ranks. Each connection begins with the rank of the child.
fn serve_keys(listener: &UnixListener, world: u32) {
    type Clients = Mutex<Vec<Option<UnixStream>>>;
    let clients: Arc<Clients> = Arc::new(Mutex::new((0..world).map(|_| None).collect()));
    let keys = Arc::new(Mutex::new(KeyValues::default()));
    for mut stream in listener.incoming().map_while(Result::ok) {
        let (clients, keys) = (Arc::clone(&clients), Arc::clone(&keys));
        std::thread::spawn(move || {
            let mut rank = [0];
            stream.read_exact(&mut rank).expect("a child sends its rank");
            let rank = u32::from(rank[0]);
            clients.lock().expect("no panic")[rank as usize] = stream.try_clone().ok();
            while let Ok(Some(request)) = read_message::<StoreRequest>(&mut stream) {
                let replies = keys.lock().expect("no panic").handle(rank, request);
                let mut clients = clients.lock().expect("no panic");
                for (rank, reply) in replies {
                    // A child that has died does not need its reply.
                    let _ = clients[rank as usize].as_mut().map(|client| write_message(client, &reply));
                }
            }
        });
    }
}

/// The name that libtest gives to a test function: the path of the function without the name of the crate.
fn test_name<F: Fn()>(_test: &F) -> &'static str {
    let path = std::any::type_name::<F>();
    path.split_once("::").map_or(path, |(_, name)| name)
}

fn run_as_rank(rank: &str, body: impl FnOnce(&Rank)) -> ! {
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).expect("SIGKILL is a valid signal");
    tch::set_num_threads(1);
    let number = |name: &str| {
        std::env::var(name).expect("the parent sets this variable").parse::<u32>().expect("the parent passes a number")
    };
    let rank: u32 = rank.parse().expect("the parent passes a number");
    let path = std::env::var_os(SOCKET).expect("the parent sets this variable");
    let me = Rank { rank, world: number(WORLD), keys: connect_to_parent(rank, Path::new(&path)) };
    let outcome = catch_unwind(AssertUnwindSafe(|| body(&me)));
    std::process::exit(if outcome.is_ok() { 0 } else { 101 })
}

fn connect_to_parent(rank: u32, path: &Path) -> Arc<RemoteKeys> {
    let mut stream = UnixStream::connect(path).expect("the parent listens");
    stream.write_all(&[u8::try_from(rank).expect("there are few ranks")]).expect("the parent reads the socket");
    let sending = Mutex::new(stream.try_clone().expect("a socket can be cloned"));
    let keys = Arc::new(RemoteKeys::new(move |request| {
        write_message(&mut *sending.lock().expect("no panic"), &request).map_err(|error| error.to_string())
    }));
    let receiving = Arc::clone(&keys);
    std::thread::spawn(move || {
        while let Ok(Some(reply)) = read_message::<StoreReply>(&mut stream) {
            receiving.deliver(reply);
        }
    });
    keys
}

impl Rank {
    /// Sends a line to the parent.
    pub(crate) fn report(&self, text: &str) {
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{MARK}{text}").expect("the parent reads stdout");
        stdout.flush().expect("the parent reads stdout");
    }

    pub(crate) fn rendezvous(&self, tensor_parallel: u32) -> Rendezvous {
        Rendezvous {
            rank: self.rank,
            layout: Layout::new(self.world, tensor_parallel).expect("the world size is a multiple of tensor_parallel"),
            keys: Arc::<RemoteKeys>::clone(&self.keys),
            backend: Backend::Gloo("127.0.0.1".to_owned()),
            connect_timeout: PATIENCE,
            collective_timeout: PATIENCE,
        }
    }

    /// Connects over NCCL with every rank on the first GPU. NCCL refuses to put two ranks of one host on the same
    /// GPU, so [`Fleet::spawn`] gives each rank a separate `NCCL_HOSTID`.
    pub(crate) fn connect_on_one_gpu(&self, tensor_parallel: u32, collective_timeout: Duration) -> Communicator {
        let backend = Backend::Nccl { device: 0 };
        let rendezvous = Rendezvous { backend, collective_timeout, ..self.rendezvous(tensor_parallel) };
        Communicator::connect(rendezvous).expect("all ranks connect")
    }

    pub(crate) fn connect(&self, tensor_parallel: u32) -> Communicator {
        Communicator::connect(self.rendezvous(tensor_parallel)).expect("all ranks connect")
    }
}

struct Running {
    child: Child,
    /// The thread that collects the reported lines, and the thread that collects standard error. Each thread ends when
    /// its stream ends.
    readers: Option<(JoinHandle<Vec<String>>, JoinHandle<String>)>,
}

struct Fleet {
    children: Vec<Running>,
    /// Contains the socket on which the parent answers questions.
    folder: TempDir,
}

impl Fleet {
    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn spawn(&mut self, name: &str, rank: u32, world: u32) {
        let mut child = Command::new(std::env::current_exe().expect("Linux knows the path of the binary"))
            .args(["--exact", name, "--nocapture", "--include-ignored", "--test-threads=1"])
            .env(RANK, rank.to_string())
            .env(WORLD, world.to_string())
            .env(SOCKET, self.socket())
            .env("OMP_NUM_THREADS", "1")
            .env("NCCL_HOSTID", format!("locdiff-test-{rank}"))
            .env("NCCL_SOCKET_IFNAME", "lo")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the test binary can be started");
        let stdout = child.stdout.take().expect("the stream is piped");
        let mut stderr = child.stderr.take().expect("the stream is piped");
        let reports = std::thread::spawn(move || read_reports(BufReader::new(stdout)));
        let errors = std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stderr.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        self.children.push(Running { child, readers: Some((reports, errors)) });
    }

    fn wait(mut self, lost: &[u32], deadline: Instant) -> Vec<Outcome> {
        let kept = (0..self.children.len()).filter(|rank| !lost.contains(&(*rank as u32)));
        for rank in kept.collect::<Vec<_>>() {
            self.children[rank].wait(deadline);
        }
        for rank in lost {
            // If the rank has already died, `kill` fails and the exit status does not change.
            let _ = self.children[*rank as usize].child.kill();
        }
        self.children.iter_mut().map(Running::outcome).collect()
    }
}

impl Running {
    /// Waits until the child exits, or kills it at the deadline. A separate thread waits for the exit, so this thread
    /// need not poll.
    fn wait(&mut self, deadline: Instant) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.child.id()).expect("a pid fits into 32 bits"));
        let (sender, receiver) = channel();
        std::thread::scope(|scope| {
            let child = &mut self.child;
            scope.spawn(move || {
                let _ = child.wait();
                let _ = sender.send(());
            });
            if receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_err() {
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            }
        });
    }

    fn outcome(&mut self) -> Outcome {
        let status = self.child.wait().expect("the child was started");
        let (reports, errors) = self.readers.take().expect("the readers are taken only once");
        Outcome {
            status,
            reports: reports.join().expect("the reader does not panic"),
            stderr: errors.join().expect("the reader does not panic"),
        }
    }
}

impl Outcome {
    /// The signal that killed the process. `None` if the process exited.
    pub(crate) fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    pub(crate) fn assert_success(&self, rank: usize) {
        assert!(self.status.success(), "rank {rank} failed with {}:\n{}", self.status, self.stderr);
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for running in &mut self.children {
            let _ = running.child.kill();
            let _ = running.child.wait();
        }
    }
}

fn read_reports(stdout: impl BufRead) -> Vec<String> {
    let mut reports = Vec::new();
    for line in stdout.lines().map_while(Result::ok) {
        // The mark need not be at the start of the line, because libtest may have written to the same line before.
        if let Some((_, text)) = line.split_once(MARK) {
            println!("{text}");
            reports.push(text.to_owned());
        }
    }
    reports
}
