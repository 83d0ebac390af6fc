//! How ranks work together: who is in which group, and what they exchange.
//!
//! In reading order:
//! - [`Layout`]: world = data parallel × tensor parallel, and the groups that follow from it. Pure.
//! - [`Communicator`]: finds the other ranks through the store and connects the groups.
//! - [`Group`]: collectives, each with a timeout, whose errors name operation, group and rank.
//! - [`differentiable`]: collectives that backward passes through, for layers split across ranks.
//! - [`Buckets`]: gradients in flat buffers that are reduced while backward still runs.
//!
//! Imports [`crate::native`] and nothing else of the crate.

mod buckets;
mod communicator;
pub mod differentiable;
mod error;
mod group;
mod layout;

pub use buckets::Buckets;
pub use communicator::{AbortHandle, Backend, Communicator, Rendezvous, StoreEnd};
pub use error::{CommError, Failure};
pub use group::{Group, Pending};
pub use layout::{Layout, Place};

pub use crate::native::c10d::ReduceOp;
