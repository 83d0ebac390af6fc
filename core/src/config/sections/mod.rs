//! The sections of the configuration, one file each, with fields, units, defaults and limits.
//!
//! The doc comments of sections, fields and enum variants are user documentation. They appear in `config schema` and in
//! `configs/README.md`.

/// Defines a section: each field with its documentation, type and default.
macro_rules! section {
    ($(#[$about:meta])* pub struct $name:ident { $($(#[$meaning:meta])* pub $field:ident: $type:ty = $default:expr,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$meaning])* pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
}

mod checkpoint;
mod diffusion;
mod eval;
mod loss;
mod model;
mod network;
mod parallel;
mod retrieval;
mod shards;
mod supervise;
mod train;

pub use checkpoint::CheckpointConfig;
pub use diffusion::{DiffusionConfig, Schedule};
pub use eval::{Aggregator, CheckpointChoice, DecodeAnchors, EvalConfig, Prior, REPORT_PHOTOS_MAX, grid_points_min};
pub use loss::{KlDirection, LossConfig};
pub use model::ModelConfig;
pub use network::NetworkConfig;
pub use parallel::{DeviceKind, ParallelConfig};
pub use retrieval::{HybridMode, RetrievalConfig, RetrievalHead};
pub use shards::{CacheMode, OnBadRows, ShardsConfig, Tail};
pub use supervise::SuperviseConfig;
pub use train::{LearningRateSchedule, Precision, TrainConfig, TrainMethod};
