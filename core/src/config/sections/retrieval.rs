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

/// The retrieval phase of LocDiff-H.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RetrievalConfig {
    /// Folder with GeoCLIP's weights and gallery, which `geoclip import` makes.
    pub geoclip: String,
    /// CSV or Parquet of gallery points; "": the 100,000 points that come with GeoCLIP.
    pub gallery: String,
    /// Radius around LocDiff's answer within which retrieval looks, km.
    pub radius_km: f64,
    /// What turns a stored embedding into a query.
    pub head: RetrievalHead,
    /// Where retrieval may look.
    pub mode: HybridMode,
    /// Weight of the samples' log density in the fused score.
    pub density_weight: f64,
    /// Width of the kernel of that density, km.
    pub density_km: f64,
    /// With head = "knn": training photos that are asked; 1 takes the place of the nearest, more the place with the most of them near it.
    pub knn_neighbours: u32,
    /// With head = "knn": what cosines of photos are multiplied by, as GeoCLIP's own are by 39.7.
    pub knn_scale: f64,
}

impl Default for RetrievalConfig {
    fn default() -> Self {
        Self {
            geoclip: "shards/geoclip".into(),
            gallery: String::new(),
            radius_km: 200.0,
            head: RetrievalHead::Geoclip,
            mode: HybridMode::Fusion,
            density_weight: 3.0,
            density_km: 25.0,
            knn_neighbours: 1,
            knn_scale: 40.0,
        }
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
