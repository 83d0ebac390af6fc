//! The faults that `train --inject` requests: planned faults, which occur at a given rank and step, and faults at
//! random times.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use locdiff_core::protocol::{FaultKind, InjectedFault};
use locdiff_core::pulse::WorkPhase;
use locdiff_core::random::{Draw, Philox, Stream};

use crate::error::{LaunchError, reported};

/// The faults that `--inject` accepts.
const USAGE: &str = "KIND@rank=R,step=S or random@mtbf=SECONDS,seed=N; KIND is kill, stop, hang, segfault, panic, \
    exit, slow, oom, cuda-error, gpu-memory, eio, enospc, slow-disk, flip, corrupt-checkpoint or tensorboard-eio; more \
    fields: hang `,phase=data|step|collective|checkpoint|evaluation`, exit `,code=N`, slow `,ms=N`, slow-disk \
    `,seconds=N`, flip `,in=weight|gradient`";

/// What `--inject` requests.
#[derive(Debug, Clone, PartialEq)]
pub enum Injection {
    /// A fault at a given rank and step.
    Planned(InjectedFault),
    /// Faults at random ranks and times.
    Random(RandomFaults),
}

/// Parses a fault such as `kill@rank=1,step=7`, for a run with `workers` workers.
pub fn parse(text: &str, workers: usize) -> Result<Injection, LaunchError> {
    let usage = |reason: &str| reported!(Usage, "--inject {text}: {reason}, wanted {USAGE}");
    let (name, fields) = text.split_once('@').ok_or_else(|| usage("no `@`"))?;
    let mut fields = Fields { rest: fields.split(',').collect() };
    let number = |value: Option<&str>, field: &str| match value.map(str::parse::<u64>) {
        Some(Ok(number)) => Ok(number),
        _ => Err(usage(&format!("{field} is missing or not a number"))),
    };
    let found = if name == "random" {
        let (mtbf, seed) = (fields.take("mtbf"), fields.take("seed"));
        let mtbf_s = mtbf.and_then(|text| text.parse::<f64>().ok()).filter(|seconds| *seconds > 0.0);
        let mtbf_s = mtbf_s.ok_or_else(|| usage("mtbf is missing or not a positive number"))?;
        Injection::Random(RandomFaults::new(mtbf_s, number(seed, "seed")?))
    } else {
        let (rank, step) = (number(fields.take("rank"), "rank")?, number(fields.take("step"), "step")?);
        let kind = match name {
            "kill" => FaultKind::Kill,
            "stop" => FaultKind::Stop,
            "hang" => FaultKind::Hang { phase: phase(fields.take("phase")).ok_or_else(|| usage("unknown phase"))? },
            "segfault" => FaultKind::Segfault,
            "panic" => FaultKind::Panic,
            "exit" => {
                let code = fields.take("code").unwrap_or("1");
                FaultKind::Exit { code: code.parse().map_err(|_| usage("code is not a number"))? }
            }
            "slow" => FaultKind::Slow { milliseconds: number(fields.take("ms"), "ms")? },
            "oom" => FaultKind::Oom,
            "cuda-error" => FaultKind::CudaError,
            "gpu-memory" => FaultKind::GpuMemory,
            "eio" => FaultKind::Eio,
            "enospc" => FaultKind::Enospc,
            "slow-disk" => FaultKind::SlowDisk { seconds: number(fields.take("seconds"), "seconds")? },
            "flip" => match fields.take("in") {
                Some("weight") => FaultKind::FlipWeight,
                Some("gradient") => FaultKind::FlipGradient,
                _ => return Err(usage("`in` is neither weight nor gradient")),
            },
            "corrupt-checkpoint" => FaultKind::CorruptCheckpoint,
            "tensorboard-eio" => FaultKind::TensorboardEio,
            _ => return Err(usage("unknown fault")),
        };
        if rank >= workers as u64 || step == 0 {
            return Err(usage(&format!("ranks are 0 to {} and steps count from 1", workers - 1)));
        }
        Injection::Planned(InjectedFault { kind, rank: rank as u32, step })
    };
    match fields.rest.first() {
        Some(field) => Err(usage(&format!("unknown field \"{field}\""))),
        None => Ok(found),
    }
}

/// The fields of a fault, such as `rank=1`, that have not been parsed yet.
struct Fields<'a> {
    rest: Vec<&'a str>,
}

impl<'a> Fields<'a> {
    fn take(&mut self, name: &str) -> Option<&'a str> {
        let value_of = |field: &&'a str| field.strip_prefix(name)?.strip_prefix('=');
        let index = self.rest.iter().position(|field| value_of(field).is_some())?;
        let field = self.rest.remove(index);
        value_of(&field)
    }
}

/// The phase in which a rank hangs. The default is `step`.
fn phase(name: Option<&str>) -> Option<WorkPhase> {
    match name {
        None | Some("step") => Some(WorkPhase::Step),
        Some("data") => Some(WorkPhase::Data),
        Some("collective") => Some(WorkPhase::Collective),
        Some("checkpoint") => Some(WorkPhase::Checkpoint),
        Some("evaluation") => Some(WorkPhase::Evaluation),
        Some(_) => None,
    }
}

/// The kinds of random faults. A run recovers from each of them by itself.
const RANDOM_KINDS: [FaultKind; 8] = [
    FaultKind::Kill,
    FaultKind::Stop,
    FaultKind::Hang { phase: WorkPhase::Data },
    FaultKind::Hang { phase: WorkPhase::Step },
    FaultKind::Segfault,
    FaultKind::Panic,
    FaultKind::Eio,
    FaultKind::FlipWeight,
];

/// Faults at random ranks and times, with a given mean time between two faults.
#[derive(Debug, Clone, PartialEq)]
pub struct RandomFaults {
    mtbf_s: f64,
    philox: Philox,
    drawn: u64,
    next_at: Instant,
    /// Ranks that already got the fault "flip a weight". A second corruption of the same rank would end the run.
    flipped: BTreeSet<u32>,
}

impl RandomFaults {
    /// Creates faults with a mean time of `mtbf_s` seconds between two faults.
    pub fn new(mtbf_s: f64, seed: u64) -> Self {
        let (philox, flipped) = (Philox::new(seed), BTreeSet::new());
        let mut faults = Self { mtbf_s, philox, drawn: 0, next_at: Instant::now(), flipped };
        faults.plan_next();
        faults
    }

    /// A fault for one of `workers` workers; `None` if no fault is due yet.
    pub fn due(&mut self, workers: usize) -> Option<InjectedFault> {
        if Instant::now() < self.next_at {
            return None;
        }
        let draw = |below: usize, uniform: f64| ((uniform * below as f64) as usize).min(below - 1);
        let (rank, kind) = (draw(workers, self.uniform()), draw(RANDOM_KINDS.len(), self.uniform()));
        self.plan_next();
        let (rank, mut kind) = (rank as u32, RANDOM_KINDS[kind]);
        if kind == FaultKind::FlipWeight && !self.flipped.insert(rank) {
            kind = FaultKind::Kill;
        }
        Some(InjectedFault { kind, rank, step: 0 })
    }

    /// The next random number, at least 0 and less than 1.
    fn uniform(&mut self) -> f64 {
        let draw = Draw { stream: Stream::Test(0), step: self.drawn, first_sample: 0, elements: 1 };
        self.drawn += 1;
        let mut number = [0.0_f32];
        self.philox.fill_uniform(draw, &mut number).expect("the counter of draws stays far below its limit");
        number[0].into()
    }

    fn plan_next(&mut self) {
        let wait_s = -self.mtbf_s * (1.0 - self.uniform()).max(f64::MIN_POSITIVE).ln();
        self.next_at = Instant::now() + Duration::from_secs_f64(wait_s);
    }
}

#[cfg(test)]
mod tests {
    use locdiff_core::exit_code::{ExitCode, HasExitCode};

    use super::*;

    #[test]
    fn faults_are_parsed_or_refused_with_a_reason() {
        let planned = |kind, rank, step| Injection::Planned(InjectedFault { kind, rank, step });
        for (text, wanted) in [
            ("kill@rank=1,step=7", planned(FaultKind::Kill, 1, 7)),
            ("hang@phase=data,rank=0,step=63", planned(FaultKind::Hang { phase: WorkPhase::Data }, 0, 63)),
            ("exit@rank=1,step=7,code=3", planned(FaultKind::Exit { code: 3 }, 1, 7)),
            ("slow-disk@rank=1,step=7,seconds=9", planned(FaultKind::SlowDisk { seconds: 9 }, 1, 7)),
            ("flip@rank=1,step=7,in=gradient", planned(FaultKind::FlipGradient, 1, 7)),
        ] {
            assert_eq!(parse(text, 2).expect(text), wanted);
        }
        for (text, reason) in [
            ("burn@rank=1,step=7", "unknown fault"),
            ("hang@rank=1,step=7,phase=lunch", "unknown phase"),
            ("kill", "no `@`"),
            ("kill@rank=2,step=7", "ranks are 0 to 1"),
            ("kill@rank=1,step=0", "steps count from 1"),
            ("kill@rank=1", "step is missing"),
            ("kill@rank=1,step=7,when=7", "unknown field \"when=7\""),
            ("kill@rank=1,step=7,phase=data", "unknown field \"phase=data\""),
            ("flip@rank=1,step=7", "neither weight nor gradient"),
            ("random@mtbf=0,seed=1", "mtbf is missing or not a positive number"),
        ] {
            let error = parse(text, 2).expect_err(text);
            assert_eq!(error.exit_code(), ExitCode::Usage);
            assert!(error.to_string().contains(reason), "{error}");
        }
    }

    #[test]
    fn random_faults_come_in_the_order_of_their_seed() {
        let draw = |seed| {
            let mut faults = RandomFaults::new(1e-9, seed);
            let next = |_| loop {
                if let Some(fault) = faults.due(4) {
                    break fault;
                }
            };
            (0..50).map(next).collect::<Vec<_>>()
        };
        let faults = draw(1);
        assert_eq!(faults, draw(1));
        assert_ne!(faults, draw(2));
        for rank in 0..4 {
            let of_rank = || faults.iter().filter(|fault| fault.rank == rank);
            assert!(of_rank().count() > 0, "{faults:?}");
            let flips = of_rank().filter(|fault| fault.kind == FaultKind::FlipWeight).count();
            assert!(flips <= 1, "a second flip would end the run: {faults:?}");
        }
    }
}
