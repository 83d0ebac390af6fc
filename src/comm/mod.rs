//! Communication between ranks: which groups there are, and what they exchange.
//!
//! In reading order:
//! - [`Layout`]: world = data parallel × tensor parallel, and the groups that follow from it. Pure.
//! - [`Communicator`]: finds the other ranks through the store and connects the groups.
//! - [`Group`]: collectives with timeouts, whose errors name operation, group and rank.
//! - [`differentiable`]: collectives with a backward pass, for layers that are split across ranks.
//! - [`Buckets`]: gradients in flat buffers that are reduced while backward is still running.
//!
//! Of this crate it imports only [`crate::native`].

mod buckets;
mod communicator;
pub mod differentiable;
mod error;
mod group;
mod layout;

pub use buckets::Buckets;
pub use communicator::{AbortHandle, Backend, Communicator, Rendezvous, StoreEnd};
pub use error::{CollectiveFailure, CommError};
pub use group::{Group, Pending};
pub use layout::{Layout, LayoutPosition};

pub use crate::native::c10d::ReduceOp;
