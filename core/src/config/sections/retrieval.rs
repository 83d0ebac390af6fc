//! `[retrieval]`: the retrieval step of LocDiff-H.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::config::errors::Checker;

/// How a stored embedding becomes a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RetrievalHead {
    /// If `run` is set: "trained". Otherwise, if GeoCLIP's weights exist: "linear" for photos simulated in world 1,
    /// "geoclip" for photos whose places GeoCLIP recognises. In all other cases: "knn".
    Auto,
    /// GeoCLIP's image head, for CLIP ViT-L/14 features.
    Geoclip,
    /// The transpose of the projection that made the embeddings, for photos simulated in world 1.
    Linear,
    /// Nearest neighbours among the training photos, for embeddings of any other kind.
    Knn,
    /// The image head trained by the run that `run` names.
    Trained,
}

impl RetrievalHead {
    /// Name of the head in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Geoclip => "geoclip",
            Self::Linear => "linear",
            Self::Knn => "knn",
            Self::Trained => "trained",
        }
    }
}

/// Which gallery points LocDiff-H considers, and how it chooses one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum HybridMode {
    /// Of the points within the radius of any sample, the point most similar to the photo wins. The paper's method.
    AnySample,
    /// Of the points within the radius of LocDiff's answer, the point most similar to the photo wins.
    Aggregate,
    /// Of the points within the radius of LocDiff's answer, the point with the highest score wins. The score is the
    /// similarity plus the weighted log density of the samples.
    Fusion,
    /// Considers the same points as "fusion". The points with the highest scores vote for each other, more strongly if
    /// they are close, and the point with the most votes wins.
    Consensus,
}

section! {
    /// The retrieval step of LocDiff-H.
    pub struct RetrievalConfig {
        /// Folder with GeoCLIP's weights and gallery, made by `geoclip import`.
        pub geoclip: String = "shards/geoclip".into(),
        /// CSV, Parquet or .npy file of gallery points. "": the 100,000 points of GeoCLIP, or the locations of the
        /// training photos if head = "knn".
        pub gallery: String = String::new(),
        /// Search radius, km.
        pub radius_km: f64 = 200.0,
        /// How a stored embedding becomes a query.
        pub head: RetrievalHead = RetrievalHead::Auto,
        /// With head = "trained" or "auto": folder of a run or checkpoint that was trained with train.method =
        /// "geoclip". A name without a slash is a run in `checkpoint.dir`.
        pub run: String = String::new(),
        /// Which gallery points LocDiff-H considers, and how it chooses one.
        pub mode: HybridMode = HybridMode::Fusion,
        /// Weight of the samples' log density in the score of "fusion" and "consensus".
        pub density_weight: f64 = 3.0,
        /// Width of the kernel with which the density of the samples is estimated, km.
        pub density_km: f64 = 25.0,
        /// For retrieval with consensus, a row of its own in the table: number of most similar gallery points that vote
        /// on the answer.
        pub consensus_points: u32 = 1000,
        /// For retrieval with consensus: factor that multiplies the similarities in the vote. The smaller it is, the
        /// more points have a say.
        pub consensus_scale: f64 = 0.5,
        /// With head = "knn": number of nearest training photos to use. 1: the location of the nearest photo is the
        /// answer. More: the photos vote on the answer, as the gallery points do in mode = "consensus".
        pub knn_neighbours: u32 = 1,
        /// With head = "knn": factor that multiplies the cosine similarities of photos. GeoCLIP's own factor is 39.7.
        pub knn_scale: f64 = 40.0,
    }
}

impl RetrievalConfig {
    /// Whether the folder of GeoCLIP's weights has a manifest.
    pub fn has_geoclip(&self) -> bool {
        Path::new(&self.geoclip).join("manifest.json").exists()
    }

    /// The configured head. "auto" counts as "trained" if `run` is set.
    pub fn wanted_head(&self) -> RetrievalHead {
        match self.head {
            RetrievalHead::Auto if !self.run.is_empty() => RetrievalHead::Trained,
            head => head,
        }
    }

    /// Whether the head may need GeoCLIP's weights. The head "auto" uses them only if they exist.
    pub fn may_need_geoclip(&self) -> bool {
        match self.wanted_head() {
            RetrievalHead::Auto => self.has_geoclip(),
            RetrievalHead::Geoclip | RetrievalHead::Linear | RetrievalHead::Trained => true,
            RetrievalHead::Knn => false,
        }
    }

    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        if self.geoclip.is_empty() {
            checker.push("retrieval.geoclip", "is empty, wanted a folder");
        }
        if self.head == RetrievalHead::Trained && self.run.is_empty() {
            checker.push(
                "retrieval.run",
                "is empty, but retrieval.head = \"trained\" needs the run that trained the head",
            );
        }
        checker.within("retrieval.radius_km", self.radius_km, 0.001..=20_040.0);
        checker.not_negative("retrieval.density_weight", self.density_weight);
        checker.positive("retrieval.density_km", self.density_km);
        checker.within("retrieval.consensus_points", self.consensus_points, 1..=2000);
        checker.positive("retrieval.consensus_scale", self.consensus_scale);
        checker.within("retrieval.knn_neighbours", self.knn_neighbours, 1..=1024);
        checker.positive("retrieval.knn_scale", self.knn_scale);
    }
}
