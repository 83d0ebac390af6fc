//! The command line, as clap sees it. Flags are sugar for `--set`; [`Global::layers`] says what each stands for.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use locdiff_core::config::{Layer, preset};
use toml::Value;

/// Train, evaluate and run LocDiff, a diffusion model that finds where on Earth a photo was taken.
#[derive(Debug, Parser)]
#[command(name = "locdiff-launch", disable_version_flag = true, arg_required_else_help = true)]
#[command(after_help = "Global flags may stand before or after the verb. Exit codes: docs/OPERATIONS.md.")]
pub struct Cli {
    /// What every verb takes.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub verb: Option<Verb>,
    /// Print version, git revision, libtorch, CUDA and NCCL.
    #[arg(short = 'V', long)]
    pub version: bool,
}

/// Flags of every verb.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Global flags")]
pub struct Global {
    /// Workers on this node, one GPU each.
    #[arg(long, global = true, value_name = "N", conflicts_with = "workers")]
    pub gpus: Option<u32>,
    /// Workers on this node, on whatever device.
    #[arg(long, global = true, value_name = "N")]
    pub workers: Option<u32>,
    /// Where workers compute.
    #[arg(long, global = true, value_parser = ["auto", "cpu", "cuda"])]
    pub device: Option<String>,
    /// Let several workers share a GPU (for tests).
    #[arg(long, global = true)]
    pub share_gpu: bool,
    /// Workers that one replica of the model is split over.
    #[arg(long, global = true, value_name = "N")]
    pub tensor_parallel: Option<u32>,
    /// A preset (demo, l23, l47, paper-l47, l95) or a TOML file. Default: l47 on CUDA, demo on the CPU.
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Set one field of the configuration; may be repeated.
    #[arg(long, global = true, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Name of the run.
    #[arg(long, global = true, value_name = "NAME")]
    pub run: Option<String>,
    /// Nodes of the run.
    #[arg(long, global = true, value_name = "N")]
    pub nnodes: Option<u32>,
    /// Which node this is, from 0.
    #[arg(long, global = true, value_name = "K")]
    pub node_rank: Option<u32>,
    /// The first node's coordinator.
    #[arg(long, global = true, value_name = "HOST:PORT")]
    pub rendezvous: Option<String>,
    /// How often a gang that failed is started again.
    #[arg(long, global = true, value_name = "N")]
    pub max_restarts: Option<u32>,
    /// File with the run's token.
    #[arg(long, global = true, value_name = "FILE")]
    pub token_file: Option<String>,
    /// The result as one JSON object on the last line of stdout; everything for people goes to stderr.
    #[arg(long, global = true)]
    pub json: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Train a model from shards; on an existing run, resume it.
    Train {
        /// Break something on purpose, once, such as kill@rank=1,step=7; may be repeated.
        #[arg(long, value_name = "FAULT")]
        inject: Vec<String>,
    },
    /// Score a run, or anybody's predictions.
    Eval(EvalRequest),
    /// Locate the rows of IN.
    Predict {
        /// Shards or Parquet with embeddings.
        input: PathBuf,
        /// Where the answers go.
        #[arg(long, value_name = "OUT")]
        out: PathBuf,
        /// Replace OUT if it exists.
        #[arg(long)]
        overwrite: bool,
    },
    /// Make, check and look at shards of embeddings.
    #[command(subcommand)]
    Shards(ShardsVerb),
    /// List, check and export checkpoints.
    #[command(subcommand)]
    Checkpoint(CheckpointVerb),
    /// Measure speed.
    #[command(subcommand)]
    Bench(BenchVerb),
    /// GeoCLIP's weights.
    #[command(subcommand)]
    Geoclip(GeoclipVerb),
    /// The main job, small enough for two CPU cores.
    Demo,
    /// Start every worker and let it check that libtorch computes right.
    #[command(hide = true)]
    SelfCheck,
    /// Could training start here? Says what is missing.
    Doctor,
    /// What the runs on this machine are doing.
    Status,
    /// Look at the configuration.
    #[command(subcommand)]
    Config(ConfigVerb),
    /// Completions for a shell, on stdout.
    Completions {
        /// Which shell.
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
}

/// What `eval` is asked for.
#[derive(Debug, Args)]
pub struct EvalRequest {
    /// Run the retrieval phase of LocDiff-H too.
    #[arg(long)]
    pub hybrid: bool,
    /// A table of the paper: main or perturbation.
    #[arg(long, value_name = "NAME")]
    pub suite: Option<String>,
    /// Score these predictions instead of a run.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["hybrid", "suite", "tune"])]
    pub predictions: Option<PathBuf>,
    /// Choose the hybrid's settings on the validation split first.
    #[arg(long)]
    pub tune: bool,
}

/// `shards ...`
#[derive(Debug, Clone, Subcommand)]
pub enum ShardsVerb {
    /// Simulate embeddings of photos at real places.
    Simulate {
        /// How many photos; default: one per place.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        rows: Option<u64>,
        /// Seed of everything random.
        #[arg(long, value_name = "S", default_value_t = 0)]
        seed: u64,
        /// Folder to make.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Views per photo.
        #[arg(long, value_name = "V", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
        views: u32,
        /// Places to take instead of GeoCLIP's gallery: a CSV with lat and lon, or an N x 2 .npy.
        #[arg(long, value_name = "CSV_OR_NPY")]
        coordinates: Option<PathBuf>,
        /// Replace DIR if it exists.
        #[arg(long)]
        overwrite: bool,
    },
    /// Build shards from coordinates and embeddings of one's own.
    Build {
        /// CSV or Parquet with ids and coordinates.
        #[arg(long, value_name = "FILE")]
        table: PathBuf,
        /// .npy or safetensors with embeddings; once for each view.
        #[arg(long, value_name = "FILE", required = true)]
        embeddings: Vec<PathBuf>,
        /// Folder to make.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Replace DIR if it exists.
        #[arg(long)]
        overwrite: bool,
    },
    /// Embed photos with CLIP into shards.
    Embed {
        /// Folder of photos.
        photos: PathBuf,
        /// Folder to make.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Replace DIR if it exists.
        #[arg(long)]
        overwrite: bool,
    },
    /// Check checksums, schema and values; with --epochs, that each row comes once per epoch.
    Verify {
        /// Folder of shards.
        dir: PathBuf,
        /// Replay the plan over so many epochs.
        #[arg(long, value_name = "E")]
        epochs: Option<u32>,
        /// For so many workers each.
        #[arg(long, value_name = "1,3,4", value_delimiter = ',', requires = "epochs")]
        world_sizes: Vec<u32>,
    },
    /// Rows, ranges, statistics and a map.
    Inspect {
        /// Folder or file.
        path: PathBuf,
    },
}

/// `checkpoint ...`
#[derive(Debug, Subcommand)]
pub enum CheckpointVerb {
    /// Checkpoints of a run.
    List {
        /// Folder or name of the run; default: the newest.
        run_dir: Option<PathBuf>,
    },
    /// Check every checksum of a run.
    Verify {
        /// Folder or name of the run; default: the newest.
        run_dir: Option<PathBuf>,
    },
    /// One safetensors file of averaged weights and configuration.
    Export {
        /// Folder or name of the run, for its newest whole checkpoint; or folder of a checkpoint.
        run_dir: PathBuf,
        /// Where it goes.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Replace FILE if it exists.
        #[arg(long)]
        overwrite: bool,
    },
}

/// `bench ...`
#[derive(Debug, Clone, Subcommand)]
pub enum BenchVerb {
    /// Training steps.
    Train,
    /// Sampling.
    Sample {
        /// How many images.
        #[arg(long, value_name = "N", default_value_t = 512)]
        images: u32,
    },
    /// Reading shards, on one core, beside pyarrow.
    Shards {
        /// Python that has pyarrow; without it, python3 on the PATH.
        #[arg(long, value_name = "PATH")]
        python: Option<PathBuf>,
    },
    /// Collective operations between workers.
    Collectives {
        /// Largest tensor, bytes.
        #[arg(long, value_name = "N", default_value_t = 64 << 20, value_parser = clap::value_parser!(u64).range(1024..))]
        max_bytes: u64,
    },
    /// Spherical harmonics.
    Shdd,
}

/// `geoclip ...`
#[derive(Debug, Subcommand)]
pub enum GeoclipVerb {
    /// Fetch GeoCLIP's weights and gallery from its Python package.
    Import {
        /// The package's wheel; default: the one that `make setup` fetched, else from PyPI through pip.
        #[arg(long, value_name = "FILE")]
        wheel: Option<PathBuf>,
        /// Folder to make; default: retrieval.geoclip.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Replace DIR if it exists.
        #[arg(long)]
        overwrite: bool,
    },
}

/// `config ...`
#[derive(Debug, Subcommand)]
pub enum ConfigVerb {
    /// The resolved file, with the origin of each value.
    Show,
    /// Say whether it is valid.
    Check,
    /// JSON schema of a configuration file.
    Schema {
        /// The reference page instead.
        #[arg(long)]
        markdown: bool,
    },
}

impl Cli {
    /// What clap's own rules cannot say.
    pub fn consistent(self) -> Result<Self, clap::Error> {
        let fail = |kind, text: &str| Err(Self::command().error(kind, text));
        if self.global.gpus.is_some() && self.global.device.as_deref() == Some("cpu") {
            return fail(
                ErrorKind::ArgumentConflict,
                "--gpus asks for GPUs, --device cpu for none; say --workers N --device cpu",
            );
        }
        if self.verb.is_none() && !self.version {
            return fail(ErrorKind::MissingSubcommand, "a verb is missing; --help lists them");
        }
        Ok(self)
    }
}

impl Global {
    /// The layers of configuration that the flags stand for, weakest first. `fallback` is the preset without `--config`.
    pub fn layers(&self, fallback: &str) -> Vec<Layer> {
        let base = match &self.config {
            None => Layer::Preset(fallback.to_owned()),
            Some(path) => match path.to_str().filter(|name| preset(name).is_some()) {
                Some(name) => Layer::Preset(name.to_owned()),
                None => Layer::File(path.clone()),
            },
        };
        self.layers_over(base)
    }

    /// The same on top of another layer than a preset or `--config`: that of a run.
    pub fn layers_over(&self, base: Layer) -> Vec<Layer> {
        let mut layers = vec![base];
        layers.extend(self.set.iter().cloned().map(Layer::Set));
        let mut flag = |flag, key, value: Option<Value>| {
            layers.extend(value.map(|value| Layer::Flag { flag, key, value }));
        };
        let integer = |value: Option<u32>| value.map(|value| Value::Integer(value.into()));
        flag("--gpus", "parallel.workers", integer(self.gpus));
        flag("--gpus", "parallel.device", self.gpus.map(|_| Value::String("cuda".into())));
        flag("--workers", "parallel.workers", integer(self.workers));
        flag("--device", "parallel.device", self.device.clone().map(Value::String));
        flag("--share-gpu", "parallel.share_gpu", self.share_gpu.then_some(Value::Boolean(true)));
        flag("--tensor-parallel", "parallel.tensor", integer(self.tensor_parallel));
        flag("--run", "checkpoint.run", self.run.clone().map(Value::String));
        flag("--nnodes", "parallel.nodes", integer(self.nnodes));
        flag("--node-rank", "parallel.node_rank", integer(self.node_rank));
        flag("--max-restarts", "supervise.max_restarts", integer(self.max_restarts));
        layers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_may_stand_on_both_sides_of_the_verb() {
        for line in ["x --workers 2 demo", "x demo --workers 2"] {
            let cli = Cli::try_parse_from(line.split(' ')).expect("parses");
            assert_eq!(cli.global.workers, Some(2), "{line}");
        }
        assert!(Cli::try_parse_from("x --gpus 1 --workers 2 demo".split(' ')).is_err());
    }

    #[test]
    fn gpus_on_the_cpu_are_a_contradiction() {
        let line = "x --gpus 2 --device cpu demo";
        let cli = Cli::try_parse_from(line.split(' ')).expect("each flag alone is fine");
        assert!(cli.consistent().is_err());
        let cli = Cli::try_parse_from("x --gpus 2 --device cuda demo".split(' ')).expect("parses");
        assert!(cli.consistent().is_ok());
    }
}
