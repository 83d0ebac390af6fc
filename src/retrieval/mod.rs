//! Retrieval answers with a gallery point that is similar to the photo. LocDiff-H combines retrieval with LocDiff's
//! samples.
//!
//! In reading order:
//! - `gallery`: places and their embeddings.
//! - `head`: turns stored embeddings into queries, and checks whether a head can be used with the data.
//! - `retriever`: scores queries against the whole gallery, in tiles.
//! - `surroundings`: what is known about the surroundings of each gallery point.
//! - `hybrid`: LocDiff-H, which chooses the gallery point, if any, that replaces LocDiff's answer.
//! - `pool`: the vote of LocDiff-H and of retrieval with consensus.
//! - `locate`: runs all of these steps for a batch of photos.
//!
//! Invariant: the answers for a photo depend only on the photo, LocDiff's output for it, the gallery, the training
//! places and the settings. They do not depend on other photos, or on the number of workers or threads.
//!
//! Source: the paper's "LocDiff-H"; Vivanco Cepeda et al., "GeoCLIP", NeurIPS 2023.

mod error;
mod gallery;
mod head;
mod hybrid;
mod locate;
mod pool;
mod retriever;
mod surroundings;

pub use error::RetrievalError;
pub use gallery::Gallery;
pub use head::{DataFacts, DataHead, QueryHead, check_head};
pub use hybrid::{Hybrid, ImageSamples};
pub use locate::{LocatedPlaces, RetrievedPlaces, Voters, knn_place, locate, locate_alone, try_settings};
pub use retriever::{Exclusion, Retriever, Scored};
pub use surroundings::Surroundings;
