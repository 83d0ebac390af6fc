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

/// How LocDiff-H chooses a gallery point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum HybridMode {
    /// Of the points within the radius of any sample, the point most similar to the photo wins. The paper's method.
    AnySample,
    /// The most similar points, and the points near LocDiff's answer, vote in two rounds. The first round finds the
    /// region, and the second round finds the point in this region. The vote of a point has more weight if the point is
    /// similar to the photo, and if LocDiff considers it likely.
    // Older runs have one of the other names.
    #[serde(alias = "aggregate", alias = "fusion", alias = "nearby")]
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
        /// How a stored embedding becomes a query.
        pub head: RetrievalHead = RetrievalHead::Auto,
        /// With head = "trained" or "auto": folder of a run or checkpoint that was trained with train.method =
        /// "geoclip", or its exported file, a path that ends in .safetensors. Any other name without a slash is a run in
        /// `checkpoint.dir`.
        pub run: String = String::new(),
        /// How LocDiff-H chooses a gallery point.
        pub mode: HybridMode = HybridMode::Consensus,
        /// Radius in km. mode = "any-sample": search radius around each sample. mode = "consensus": radius of the second
        /// round around the winner of the first round. Retrieval with consensus always has the radius of the second
        /// round.
        pub radius_km: f64 = 150.0,
        /// First round of LocDiff-H: factor that multiplies the similarities. The smaller it is, the more points have a
        /// say.
        pub scale: f64 = 1.0,
        /// First round of LocDiff-H: weight of the log density that LocDiff predicts before it draws samples.
        pub density_weight: f64 = 1.0,
        /// First round of LocDiff-H: weight of the log density of LocDiff's samples.
        pub samples_weight: f64 = 0.0,
        /// Second round of LocDiff-H: factor that multiplies the similarities.
        pub fine_scale: f64 = 2.0,
        /// Second round of LocDiff-H: weight of the log density of LocDiff's samples.
        pub fine_samples_weight: f64 = 0.0,
        /// Second round of LocDiff-H: width of the kernel with which the density of the samples is estimated, km.
        pub density_km: f64 = 25.0,
        /// With retrieval.mode = "consensus", LocDiff-H answers with the most similar point if its logit, plus the log
        /// density that LocDiff predicts there, is at least this much higher than at the winner of the vote; 0: never.
        pub top_margin: f64 = 0.0,
        /// Number of most similar gallery points that vote, in LocDiff-H and in retrieval with consensus.
        pub consensus_points: u32 = 1000,
        /// Retrieval with consensus: factor that multiplies the similarities in the first round.
        pub consensus_scale: f64 = 1.0,
        /// Retrieval with consensus: factor that multiplies the similarities in the second round.
        pub consensus_fine_scale: f64 = 2.0,
        /// With head = "knn": number of nearest training photos to use. 1: the location of the nearest photo is the
        /// answer. More: the photos vote on the answer, as in retrieval with consensus.
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
        checker.positive("retrieval.scale", self.scale);
        checker.not_negative("retrieval.density_weight", self.density_weight);
        checker.not_negative("retrieval.samples_weight", self.samples_weight);
        checker.positive("retrieval.fine_scale", self.fine_scale);
        checker.not_negative("retrieval.fine_samples_weight", self.fine_samples_weight);
        checker.positive("retrieval.density_km", self.density_km);
        checker.not_negative("retrieval.top_margin", self.top_margin);
        checker.within("retrieval.consensus_points", self.consensus_points, 1..=2000);
        checker.positive("retrieval.consensus_scale", self.consensus_scale);
        checker.positive("retrieval.consensus_fine_scale", self.consensus_fine_scale);
        checker.within("retrieval.knn_neighbours", self.knn_neighbours, 1..=1024);
        checker.positive("retrieval.knn_scale", self.knn_scale);
    }
}

#[cfg(test)]
mod tests {
    use super::HybridMode;
    use crate::config::{Layer, load};

    #[test]
    fn modes_of_older_runs_mean_consensus() {
        for (name, want) in [
            ("any-sample", HybridMode::AnySample),
            ("consensus", HybridMode::Consensus),
            ("nearby", HybridMode::Consensus),
            ("aggregate", HybridMode::Consensus),
            ("fusion", HybridMode::Consensus),
        ] {
            let layer = Layer::Set(format!("retrieval.mode={name}"));
            assert_eq!(load(&[layer]).expect("the mode is valid").config.retrieval.mode, want, "{name}");
        }
    }
}
