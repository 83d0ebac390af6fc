//! Retrieval: the gallery point that looks most like the photo, alone and together with LocDiff (LocDiff-H).
//!
//! In reading order: `gallery` (places and their embeddings), `head` (a stored embedding into a query; which head fits which
//! data), `retriever` (queries against all of a gallery, in tiles), `hybrid` (LocDiff-H: which gallery point, if any, replaces
//! LocDiff's answer), `tune` (its error under every setting that there is to choose), `locate` (all of it for some photos).
//!
//! Invariant: a photo's answers depend on the photo, its samples and the gallery: not on the photos beside it, nor on workers
//! or threads. Source: the paper's "LocDiff-H"; Vivanco Cepeda et al., "GeoCLIP", NeurIPS 2023.

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
pub use hybrid::{Hybrid, Samples};
pub use locate::{Located, knn_place, locate, try_settings};
pub use retriever::{Retriever, Scored};
pub use tune::Grid;
