//! The data plane as others see it: real libtorch, real workers, real processes that talk to each other.

mod comm;
mod layers;
mod worker;
