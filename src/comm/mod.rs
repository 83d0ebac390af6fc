//! Communication between ranks: the groups of ranks, and the collectives that they run.
//!
//! In reading order:
//! - [`Layout`]: divides the ranks into data-parallel replicas, each of one or more tensor-parallel ranks. Does no I/O.
//! - [`Communicator`]: finds the other ranks through the shared keys ([`RemoteKeys`]) and connects the groups of this rank.
//! - [`Group`]: runs collectives with timeouts. Their errors name the operation, the group and the rank.
//! - [`differentiable`]: collectives with a backward pass, for layers that are split across ranks.
//! - [`Buckets`]: keeps gradients in flat buffers and averages them over ranks while backward is still running.
//!
//! Within this crate, this module depends only on [`crate::native`].

mod buckets;
mod communicator;
pub mod differentiable;
mod error;
mod group;
mod layout;
pub(crate) mod remote_keys;

pub use buckets::Buckets;
pub use communicator::{AbortHandle, Backend, Communicator, Rendezvous};
pub use error::{CollectiveFailure, CommError};
pub use group::{Group, Pending};
pub use layout::{Layout, LayoutPosition};
pub use remote_keys::RemoteKeys;

pub use crate::native::c10d::ReduceOp;
