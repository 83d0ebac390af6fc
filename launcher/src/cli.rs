//! The command line, defined with clap. Most global flags are shorthand for `--set`. [`Global::layers`] maps these
//! flags to fields of the configuration.

mod numbers;
mod schedulers;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::builder::NonEmptyStringValueParser;
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use locdiff_core::config::{Layer, preset};
use locdiff_core::geo::CELL_DEGREES_RANGE;
use locdiff_core::protocol::{CellPart, SimulatedWorld};
use locdiff_core::tables::{PartShare, PlacesPresent};
use numbers::{NodeCount, U32_MAX, U64_MAX, decimal, node_count, number, part_share};
use toml::Value;

use crate::cluster::Cluster;

/// Train, evaluate and run LocDiff, a diffusion model that finds where on Earth a photo was taken.
#[derive(Debug, Parser)]
#[command(name = "locdiff-launch", disable_version_flag = true, arg_required_else_help = true)]
#[command(after_help = after_help())]
pub struct Cli {
    /// Flags that every verb accepts.
    #[command(flatten)]
    pub global: Global,
    /// The verb to run.
    #[command(subcommand)]
    pub verb: Option<Verb>,
    /// Print the version, the git revision, and the versions of libtorch, CUDA and NCCL.
    #[arg(short = 'V', long)]
    pub version: bool,
}

/// Flags that every verb accepts.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Global flags")]
pub struct Global {
    /// Number of workers on this node; each worker uses one GPU.
    #[arg(long, global = true, value_name = "N", conflicts_with = "workers", value_parser = number::<u32>(0, U32_MAX))]
    pub gpus: Option<u32>,
    /// Number of workers on this node, on CPU or GPU.
    #[arg(long, global = true, value_name = "N", value_parser = number::<u32>(0, U32_MAX))]
    pub workers: Option<u32>,
    /// Device that workers compute on.
    #[arg(long, global = true, value_parser = ["auto", "cpu", "cuda"])]
    pub device: Option<String>,
    /// Let several workers share a GPU (for tests).
    #[arg(long, global = true)]
    pub share_gpu: bool,
    /// Number of workers that share one replica of the model.
    #[arg(long, global = true, value_name = "N", value_parser = number::<u32>(0, U32_MAX))]
    pub tensor_parallel: Option<u32>,
    /// Preset (demo, l23, l47, paper-l47, l95, geoclip) or TOML file; may be repeated, and later values win. Default: the
    /// configuration of the run, if the run exists; else l47 on CUDA and demo on the CPU (for the verb `demo`: always
    /// demo).
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Vec<PathBuf>,
    /// Set one field of the configuration; may be repeated.
    #[arg(long, global = true, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Name of the run.
    #[arg(long, global = true, value_name = "NAME")]
    pub run: Option<String>,
    /// Number of nodes that run this command together. With MIN:MAX, the command goes on with MIN nodes or more if others
    /// are lost.
    #[arg(long, global = true, value_name = "N|MIN:MAX", value_parser = node_count)]
    pub nnodes: Option<NodeCount>,
    /// Number of this node, from 0. Node 0 coordinates.
    #[arg(long, global = true, value_name = "K", value_parser = number::<u32>(0, U32_MAX))]
    pub node_rank: Option<u32>,
    /// Address of node 0, the same on every node.
    #[arg(long, global = true, value_name = "HOST:PORT")]
    pub rendezvous: Option<String>,
    /// Largest number of restarts in a row without a new checkpoint.
    #[arg(long, global = true, value_name = "N", value_parser = number::<u32>(0, U32_MAX))]
    pub max_restarts: Option<u32>,
    /// File with the token of the run, which all nodes share (see `token`). With `serve`: the token that clients must
    /// send.
    #[arg(long, global = true, value_name = "FILE")]
    pub token_file: Option<String>,
    /// The other nodes, if this is node 0 of several.
    #[arg(skip)]
    pub cluster: Option<Arc<Cluster>>,
    /// Print the result as one JSON object on the last line of stdout; all other output goes to stderr.
    #[arg(long, global = true)]
    pub json: bool,
}

/// The verb to run.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Train a model from shards. Repeating the command resumes the newest unfinished run of the same configuration.
    Train {
        /// Start a new run, even if there is an unfinished one with the same configuration.
        #[arg(long)]
        new: bool,
        /// Inject a fault once, such as kill@rank=1,step=7; may be repeated.
        #[arg(long, value_name = "FAULT")]
        inject: Vec<String>,
    },
    /// Score a run, or a file of predictions.
    Eval(EvalRequest),
    /// Find the places of photos from their embeddings. Repeat an interrupted command with --out to resume it.
    Predict(PredictRequest),
    /// Answer over HTTP as `predict` does, and show the answers on a page.
    Serve(ServeRequest),
    /// Write the report of an evaluated run again, or compare several runs: Markdown, JSON, and one HTML page.
    Report(ReportRequest),
    /// Create, check and inspect shards of embeddings.
    #[command(subcommand)]
    Shards(ShardsVerb),
    /// List, check and export checkpoints.
    #[command(subcommand)]
    Checkpoint(CheckpointVerb),
    /// Run benchmarks.
    #[command(subcommand)]
    Bench(BenchVerb),
    /// Import GeoCLIP's weights.
    #[command(subcommand)]
    Geoclip(GeoclipVerb),
    /// Run everything from data to evaluation, with a model that is small enough for two CPU cores.
    Demo,
    /// Start all workers and check that libtorch computes correctly in each.
    #[command(hide = true)]
    SelfCheck,
    /// Check whether training can start on this machine, and report what is missing.
    Doctor,
    /// Show what all runs in checkpoint.dir are doing, or only the run that --run names.
    Status,
    /// List the runs in checkpoint.dir: name, step, best GeoScore, state and age.
    Runs,
    /// Make a token, the secret that the nodes of a run share.
    Token,
    /// Show or check the configuration.
    #[command(subcommand)]
    Config(ConfigVerb),
    /// Print shell completions to stdout.
    Completions {
        /// Shell to generate completions for.
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
}

/// Arguments of `predict`.
#[derive(Debug, Args)]
pub struct PredictRequest {
    /// Embeddings, with or without coordinates: shards, a Parquet, CSV, .npy or safetensors file, or - for stdin, with
    /// one embedding per line.
    pub input: String,
    /// File to write: .parquet, .csv or .geojson. Default: one JSON object per line on stdout.
    #[arg(long, value_name = "OUT")]
    pub out: Option<PathBuf>,
    /// Exported file to use instead of a run (see `checkpoint export`).
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Also use retrieval: write the answers of LocDiff-H.
    #[arg(long)]
    pub hybrid: bool,
    /// Also write all samples of each photo.
    #[arg(long)]
    pub samples: bool,
    /// What is known about the places, as GeoJSON: polygons, or points and lines with a width. The answers lie there.
    #[arg(long, value_name = "FILE")]
    pub prior: Option<PathBuf>,
    /// Also write the density of each photo to this Parquet file: probabilities of HEALPix cells. The model must be
    /// calibrated.
    #[arg(long, value_name = "FILE", requires = "out")]
    pub density: Option<PathBuf>,
    /// Replace OUT. An interrupted prediction of OUT goes on if it was the same prediction, and starts again otherwise.
    #[arg(long)]
    pub overwrite: bool,
}

/// Arguments of `report`.
#[derive(Debug, Args)]
pub struct ReportRequest {
    /// Folders or names of evaluated runs; default: the run that --run names, else the newest run with a checkpoint.
    /// All runs are compared with the first.
    #[arg(value_name = "RUN")]
    pub runs: Vec<PathBuf>,
    /// Folder to create for the report; default: RUN/eval for one run, else `report`.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Also show the result of an experiment: a file with the output of `eval --suite NAME --json`. May be repeated.
    #[arg(long = "experiment", value_name = "FILE")]
    pub experiments: Vec<PathBuf>,
    /// Replace the files of the report in DIR if DIR exists.
    #[arg(long)]
    pub overwrite: bool,
}

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub struct ServeRequest {
    /// Address to listen at; port 0 chooses a free port. Any other address than a loopback address needs --token-file.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8787")]
    pub bind: SocketAddr,
    /// Exported file to use instead of a run (see `checkpoint export`).
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Also use retrieval: give the answers of LocDiff-H.
    #[arg(long)]
    pub hybrid: bool,
}

/// Arguments of `eval`.
#[derive(Debug, Args)]
pub struct EvalRequest {
    /// Also evaluate retrieval, and LocDiff-H, which combines retrieval with LocDiff.
    #[arg(long)]
    pub hybrid: bool,
    /// Experiment of the paper to repeat. Published results are printed beside the computed ones.
    #[arg(long, value_name = "NAME", value_enum)]
    pub suite: Option<Suite>,
    /// With --suite losses or degree: the runs to compare.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', requires = "suite")]
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub runs: Vec<String>,
    /// With --suite generalizability: numbers of points of the grids; default: 21000,100000,500000,1000000.
    #[arg(long, value_name = "N,...", value_delimiter = ',', requires = "suite")]
    #[arg(value_parser = number::<u32>(100, 10_000_000))]
    pub grids: Vec<u32>,
    /// Score this file of predictions instead of a run.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["hybrid", "suite", "tune", "exclude_km"])]
    pub predictions: Option<PathBuf>,
    /// Refused, with the way to score the answers of an exported file.
    #[arg(long, value_name = "FILE", hide = true)]
    pub model: Option<PathBuf>,
    /// Choose the settings of LocDiff-H on the validation rows; with --hybrid, or with --suite main or generative,
    /// evaluate afterwards.
    #[arg(long)]
    pub tune: bool,
    /// Measure, on the validation photos, the radii that `predict` writes; with --hybrid, those of LocDiff-H.
    #[arg(long, conflicts_with_all = ["suite", "tune", "exclude_km", "predictions"])]
    pub calibrate: bool,
    /// Leave out gallery points within KM km of each photo's true place; the same as --set eval.exclude_km=KM.
    #[arg(long, value_name = "KM")]
    pub exclude_km: Option<f64>,
}

impl EvalRequest {
    /// Whether photos are located with the run of `--run`. Other evaluations take little time, or compare several runs.
    pub fn scores_run(&self) -> bool {
        self.predictions.is_none() && matches!(self.suite, None | Some(Suite::Main | Suite::Generative))
    }
}

/// An experiment of the paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// Accuracy of a run, beside the paper's methods and newer ones.
    Main,
    /// Density and coverage of a run's samples, beside other generative methods.
    Generative,
    /// Accuracy of a run with its gallery and with even grids.
    Generalizability,
    /// Number of gallery points near the test places.
    GalleryBias,
    /// Drift of a noisy code.
    Perturbation,
    /// Accuracy of runs with different training losses.
    Losses,
    /// Accuracy of runs with different degrees.
    Degree,
    /// Time to locate an image, by the number of steps.
    Time,
}

impl Suite {
    /// Name of the suite on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Generative => "generative",
            Self::Generalizability => "generalizability",
            Self::GalleryBias => "gallery-bias",
            Self::Perturbation => "perturbation",
            Self::Losses => "losses",
            Self::Degree => "degree",
            Self::Time => "time",
        }
    }
}

/// Verbs of `shards`.
#[derive(Debug, Clone, Subcommand)]
pub enum ShardsVerb {
    /// Simulate embeddings of photos at real places.
    Simulate {
        /// Rule by which photos are simulated: 1, which favours trained models, or 2, in which GeoCLIP with a trained
        /// head is about as accurate as on real photos.
        #[arg(long, value_name = "1|2", default_value_t = SimulatedWorld::One)]
        world: SimulatedWorld,
        /// Number of photos; default: one per place.
        #[arg(long, value_name = "N", value_parser = number::<u64>(1, U64_MAX))]
        rows: Option<u64>,
        /// Random seed.
        #[arg(long, value_name = "S", default_value_t = 0, value_parser = number::<u64>(0, U64_MAX))]
        seed: u64,
        /// Folder to create.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Number of views per photo.
        #[arg(long, value_name = "V", default_value_t = 1, value_parser = number::<u32>(1, 256))]
        views: u32,
        /// Places to use instead of GeoCLIP's gallery: a CSV or Parquet table, or an N x 2 .npy file.
        #[arg(long, value_name = "FILE")]
        coordinates: Option<PathBuf>,
        /// Divide the places into training and test places, and use one part. The Earth is divided into cells with
        /// sides of this many degrees, and one place in each cell is a test place.
        #[arg(long, value_name = "DEGREES", requires = "part", value_parser = decimal(0.01, 90.0))]
        cells: Option<f64>,
        /// Share of the cells that are held out: training uses none of their places.
        #[arg(long, value_name = "SHARE", requires = "cells", default_value_t = 0.0, value_parser = decimal(0.0, 0.9))]
        held_out: f64,
        /// Part to use: train, thinned (the test places in cells that are not held out) or held-out (the test places in
        /// cells that are held out).
        #[arg(long, value_name = "PART", requires = "cells")]
        part: Option<CellPart>,
        /// Number of rows per file, rounded down to whole row groups of 1024 rows; default: files of about 512 MiB. With
        /// several nodes or GPUs, each file is simulated by one worker.
        #[arg(long, value_name = "N", value_parser = number::<u64>(1, U64_MAX))]
        rows_per_file: Option<u64>,
        /// Replace DIR if it exists.
        #[arg(long)]
        overwrite: bool,
    },
    /// Write a gallery file: the places of a list, and an even grid of points on land.
    Grid {
        /// Distance between neighbouring points of the grid, in km.
        #[arg(long, value_name = "KM", default_value_t = 25.0, value_parser = decimal(5.0, 1000.0))]
        spacing_km: f64,
        /// Places to use instead of GeoCLIP's gallery: a CSV or Parquet table, or an N x 2 .npy file.
        #[arg(long, value_name = "FILE")]
        coordinates: Option<PathBuf>,
        /// CSV file to write.
        #[arg(long, value_name = "OUT")]
        out: PathBuf,
        /// Replace OUT if it exists.
        #[arg(long)]
        overwrite: bool,
    },
    /// Build shards from your own embeddings, with or without coordinates.
    Build {
        /// CSV or Parquet file with ids and coordinates. Without it, the ids are the numbers of the rows.
        #[arg(long, value_name = "FILE")]
        table: Option<PathBuf>,
        /// Which rows of the table have coordinates: all, some or none. Only `predict` can use rows without
        /// coordinates. Default: all with --table, else none.
        #[arg(long, value_name = "ROWS")]
        places: Option<PlacesPresent>,
        /// .npy or safetensors file with embeddings; repeat for each view.
        #[arg(long, value_name = "FILE", required = true)]
        embeddings: Vec<PathBuf>,
        /// Folder to create.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Replace DIR if it exists.
        #[arg(long)]
        overwrite: bool,
    },
    /// Cut a table of photos into parts, such as training and test rows, that share neither a place nor an author.
    Split {
        /// Table with coordinates: a CSV or Parquet file, or an N x 2 .npy file.
        table: PathBuf,
        /// Folder for the parts. Each part is a file in the format of the table.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Names of the parts and their shares, which must add up to 1.
        #[arg(long, value_name = "NAME=SHARE,...", value_delimiter = ',', value_parser = part_share)]
        #[arg(default_value = "train=0.9,validation=0.05,test=0.05")]
        parts: Vec<PartShare>,
        /// Height of the cells whose photos stay together, degrees of latitude. Cells are about as wide as they are
        /// high.
        #[arg(long, value_name = "DEGREES", default_value_t = 0.1, value_parser = decimal(*CELL_DEGREES_RANGE.start(), *CELL_DEGREES_RANGE.end()))]
        cell_degrees: f64,
        /// Random seed.
        #[arg(long, value_name = "N", default_value_t = 0, value_parser = number::<u64>(0, U64_MAX))]
        seed: u64,
        /// Column that names the author; default: a column `author`, `user`, `userid`, `user_id` or `owner`, if any.
        #[arg(long, value_name = "NAME")]
        author_column: Option<String>,
        /// Replace existing files of parts.
        #[arg(long)]
        overwrite: bool,
    },
    /// Embed photos with CLIP and write them as shards (not implemented yet).
    #[command(hide = true)]
    Embed {
        /// Folder of photos.
        photos: PathBuf,
        /// Folder to create.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Replace DIR if it exists.
        #[arg(long)]
        overwrite: bool,
    },
    /// Check checksums, schema and values; with --epochs, also check how often each row occurs in an epoch.
    Verify {
        /// Folder of shards.
        dir: PathBuf,
        /// Replay the order of training rows for this many epochs.
        #[arg(long, value_name = "E", value_parser = number::<u32>(0, U32_MAX))]
        epochs: Option<u32>,
        /// Replay the order of training rows for each of these numbers of workers; default: 1.
        #[arg(long, value_name = "1,3,4", value_delimiter = ',', requires = "epochs")]
        #[arg(value_parser = number::<u32>(0, U32_MAX))]
        world_sizes: Vec<u32>,
    },
    /// Show row counts, ranges, statistics and a map.
    Inspect {
        /// Folder or file of shards.
        path: PathBuf,
    },
}

/// Verbs of `checkpoint`.
#[derive(Debug, Subcommand)]
pub enum CheckpointVerb {
    /// List the checkpoints of a run.
    List {
        /// Folder or name of the run; default: the run that --run names, else the newest run with a
        /// checkpoint.
        run_dir: Option<PathBuf>,
    },
    /// Check the checksums of all checkpoints of a run.
    Verify {
        /// Folder or name of the run; default: the run that --run names, else the newest run with a
        /// checkpoint.
        run_dir: Option<PathBuf>,
    },
    /// Export a trained model as one safetensors file, with which `predict` and `serve` can work instead of the run.
    Export {
        /// Folder or name of a run (exports its newest whole checkpoint), or folder of a checkpoint; default: the run
        /// that --run names, else the newest run with a checkpoint.
        run_dir: Option<PathBuf>,
        /// File to write.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Replace FILE if it exists.
        #[arg(long)]
        overwrite: bool,
    },
}

/// Verbs of `bench`.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchVerb {
    /// Benchmark training steps on random rows.
    Train(TrainBenchRequest),
    /// Benchmark the location of images: sampling, decoding and aggregation.
    Sample {
        /// Number of images.
        #[arg(long, value_name = "N", default_value_t = 2997, value_parser = number::<u32>(1, U32_MAX))]
        images: u32,
        /// Also print the time of each operator (CPU) or kernel (GPU).
        #[arg(long)]
        profile: bool,
    },
    /// Benchmark reading shards on one core, compared with pyarrow.
    Shards {
        /// Python interpreter that has pyarrow; default: python3 on the PATH.
        #[arg(long, value_name = "PATH")]
        python: Option<PathBuf>,
    },
    /// Benchmark collective operations between workers.
    Collectives {
        /// Size of the largest tensor, in bytes.
        #[arg(long, value_name = "N", default_value_t = 64 << 20, value_parser = number::<u64>(1024, U64_MAX))]
        max_bytes: u64,
    },
    /// Benchmark spherical harmonics.
    Shdd,
}

/// Arguments of `bench train`.
#[derive(Debug, Clone, Copy, Args)]
pub struct TrainBenchRequest {
    /// Number of steps to time.
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = number::<u32>(1, U32_MAX))]
    pub steps: u32,
    /// Also time a training on shards.train.
    #[arg(long)]
    pub end_to_end: bool,
    /// Also print the time of each operator (CPU) or kernel (GPU).
    #[arg(long)]
    pub profile: bool,
}

/// Verbs of `geoclip`.
#[derive(Debug, Subcommand)]
pub enum GeoclipVerb {
    /// Import GeoCLIP's weights and gallery from its Python package.
    Import {
        /// Wheel of the package; default: the wheel that `make setup` fetched, else a wheel downloaded from PyPI with
        /// pip.
        #[arg(long, value_name = "FILE")]
        wheel: Option<PathBuf>,
        /// Folder to create; default: the value of retrieval.geoclip.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Replace DIR if it exists.
        #[arg(long)]
        overwrite: bool,
    },
}

/// Verbs of `config`.
#[derive(Debug, Subcommand)]
pub enum ConfigVerb {
    /// Print the resolved configuration with the origin of each value.
    Show,
    /// Check that the configuration is valid.
    Check,
    /// Print the JSON schema of a configuration file.
    Schema {
        /// Print the reference page in Markdown instead of the schema.
        #[arg(long)]
        markdown: bool,
    },
}

/// The last lines of the help. If the program was installed with `make install`, they name the installed manual.
fn after_help() -> String {
    let program = std::env::current_exe().ok();
    let prefix = program.as_deref().and_then(Path::parent).and_then(Path::parent);
    let installed = prefix.map(|prefix| prefix.join("share/doc/locdiff-launch/OPERATIONS.md"));
    let manual = installed.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from("docs/OPERATIONS.md"));
    format!("Global flags may come before or after the verb. Exit codes are listed in {}.", manual.display())
}

impl Cli {
    /// Rejects combinations of arguments that clap's own rules cannot express. `arguments` are the words of the command
    /// line.
    pub fn validate(self, arguments: impl Iterator<Item = String>) -> Result<Self, clap::Error> {
        let fail = |kind, text: &str| Err(Self::command().error(kind, text));
        if self.global.gpus.is_some() && self.global.device.as_deref() == Some("cpu") {
            return fail(
                ErrorKind::ArgumentConflict,
                "--gpus cannot be combined with --device cpu; use --workers N --device cpu",
            );
        }
        // If a repeatable flag is given before and after the verb, clap drops the values that came before the verb.
        let given = arguments.filter(|word| matches!(word.split('=').next(), Some("--set" | "--config"))).count();
        if given > self.global.set.len() + self.global.config.len() {
            return fail(
                ErrorKind::ArgumentConflict,
                "give all --set and --config on the same side of the verb: before it or after it",
            );
        }
        if self.verb.is_none() && !self.version {
            return fail(ErrorKind::MissingSubcommand, "no verb given; --help lists the verbs");
        }
        Ok(self)
    }
}

impl Global {
    /// The layers of the configuration, lowest precedence first: `--config`, `--set`, and the other flags. Without
    /// `--config`, the first layer is the preset `fallback`. If the first `--config` is a file that names no preset, it
    /// builds on `fallback` too.
    pub fn layers(&self, fallback: &str) -> Vec<Layer> {
        let mut layers = Vec::new();
        for path in &self.config {
            layers.push(match path.to_str().filter(|name| preset(name).is_some()) {
                Some(name) => Layer::Preset(name.to_owned()),
                None if layers.is_empty() => Layer::FileOver(path.clone(), fallback.to_owned()),
                None => Layer::File(path.clone()),
            });
        }
        if layers.is_empty() {
            layers.push(Layer::Preset(fallback.to_owned()));
        }
        self.add_flags(layers)
    }

    /// The layers of the configuration, lowest precedence first: `base` (such as the configuration file of a run),
    /// `--set`, and the other flags.
    pub fn layers_over(&self, base: Layer) -> Vec<Layer> {
        self.add_flags(vec![base])
    }

    fn add_flags(&self, mut layers: Vec<Layer>) -> Vec<Layer> {
        layers.extend(schedulers::layers(|name| std::env::var(name).ok()));
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
        flag("--nnodes", "parallel.nodes", integer(self.nnodes.map(|count| count.most)));
        flag("--nnodes", "parallel.nodes_min", integer(self.nnodes.and_then(|count| count.fewest)));
        flag("--node-rank", "parallel.node_rank", integer(self.node_rank));
        flag("--rendezvous", "network.rendezvous", self.rendezvous.clone().map(Value::String));
        flag("--token-file", "network.token_file", self.token_file.clone().map(Value::String));
        flag("--max-restarts", "supervise.max_restarts", integer(self.max_restarts));
        layers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_passes_the_debug_checks_of_clap() {
        Cli::command().debug_assert();
    }

    #[test]
    fn global_flags_work_before_and_after_the_verb() {
        for line in ["x --workers 2 demo", "x demo --workers 2"] {
            let cli = Cli::try_parse_from(line.split(' ')).expect("the arguments are valid");
            assert_eq!(cli.global.workers, Some(2), "{line}");
        }
        assert!(Cli::try_parse_from("x --gpus 1 --workers 2 demo".split(' ')).is_err());
    }

    #[test]
    fn repeatable_flags_on_both_sides_of_the_verb_are_refused() {
        for (line, is_valid) in [
            ("x --set a.b=1 train --set c.d=2", false),
            ("x --config demo train --config mine.toml", false),
            ("x --set a.b=1 --set c.d=2 --config demo train", true),
            ("x train --set a.b=1 --set=c.d=2", true),
        ] {
            let cli = Cli::try_parse_from(line.split(' ')).expect("clap accepts each flag");
            assert_eq!(cli.validate(line.split(' ').map(str::to_owned)).is_ok(), is_valid, "{line}");
        }
    }

    #[test]
    fn gpus_flag_conflicts_with_device_cpu() {
        let line = "x --gpus 2 --device cpu demo";
        let cli = Cli::try_parse_from(line.split(' ')).expect("clap accepts each flag");
        assert!(cli.validate(line.split(' ').map(str::to_owned)).is_err());
        let cli = Cli::try_parse_from("x --gpus 2 --device cuda demo".split(' ')).expect("the arguments are valid");
        assert!(cli.validate(std::iter::empty()).is_ok());
    }
}
