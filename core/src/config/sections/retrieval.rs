//! `[retrieval]`: GeoCLIP's part in LocDiff-H.

use serde::{Deserialize, Serialize};

use crate::config::errors::Checker;

/// What turns a stored embedding into a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RetrievalHead {
    /// GeoCLIP's own head, for CLIP ViT-L/14 features.
    Geoclip,
    /// The transposed projection of simulated shards.
    Linear,
    /// Nearest neighbours among the training shards, for any other embedding.
    Knn,
}

/// Where retrieval may look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum HybridMode {
    /// Within the radius of any sample, the paper's form.
    AnySample,
    /// Within the radius of the aggregated sample.
    Aggregate,
    /// Within the radius of the aggregate, with the samples' density added to the score.
    Fusion,
    /// As fusion, but the place with the most weight near it instead of the one with the most weight.
    Consensus,
}

section! {
    /// The retrieval phase of LocDiff-H.
    pub struct RetrievalConfig {
        /// Folder with GeoCLIP's weights and gallery, which `geoclip import` makes.
        pub geoclip: String = "shards/geoclip".into(),
        /// CSV or Parquet of gallery points; "": the 100,000 points that come with GeoCLIP.
        pub gallery: String = String::new(),
        /// Radius around LocDiff's answer within which retrieval looks, km.
        pub radius_km: f64 = 200.0,
        /// What turns a stored embedding into a query.
        pub head: RetrievalHead = RetrievalHead::Geoclip,
        /// Where retrieval may look.
        pub mode: HybridMode = HybridMode::Fusion,
        /// Weight of the samples' log density in the fused score.
        pub density_weight: f64 = 3.0,
        /// Width of the kernel of that density, km.
        pub density_km: f64 = 25.0,
        /// With head = "knn": training photos that are asked; 1 takes the place of the nearest, more the place with the most of them near it.
        pub knn_neighbours: u32 = 1,
        /// With head = "knn": what cosines of photos are multiplied by, as GeoCLIP's own are by 39.7.
        pub knn_scale: f64 = 40.0,
    }
}

impl RetrievalConfig {
    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        if self.geoclip.is_empty() {
            checker.push("retrieval.geoclip", "is empty");
        }
        checker.within("retrieval.radius_km", self.radius_km, 0.001..=20_040.0);
        checker.not_negative("retrieval.density_weight", self.density_weight);
        checker.positive("retrieval.density_km", self.density_km);
        checker.within("retrieval.knn_neighbours", self.knn_neighbours, 1..=1024);
        checker.positive("retrieval.knn_scale", self.knn_scale);
    }
}
