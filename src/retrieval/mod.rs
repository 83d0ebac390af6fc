//! Retrieval: finds the gallery point most similar to a photo, alone or combined with LocDiff (LocDiff-H).
//!
//! In reading order: `gallery` (places and their embeddings), `head` (from stored embeddings to queries, and which head
//! fits which data), `retriever` (scores queries against the whole gallery, in tiles), `hybrid` (LocDiff-H: which
//! gallery point, if any, replaces LocDiff's answer), `tune` (the error of LocDiff-H under every candidate setting),
//! `locate` (all of this for a batch of photos).
//!
//! Invariant: the answers for a photo depend only on the photo, its samples and the gallery, not on other photos,
//! workers or threads. Source: the paper's "LocDiff-H"; Vivanco Cepeda et al., "GeoCLIP", NeurIPS 2023.

mod error;
mod gallery;
mod head;
mod hybrid;
mod locate;
mod retriever;
mod tune;

pub use error::RetrievalError;
pub use gallery::Gallery;
pub use head::{DataFacts, DataHead, QueryHead, check_head};
pub use hybrid::{Hybrid, ImageSamples};
pub use locate::{LocatedPlaces, knn_place, locate, try_settings};
pub use retriever::{Retriever, Scored};
pub use tune::Grid;
