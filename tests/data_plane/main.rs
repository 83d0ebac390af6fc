//! The data plane as others see it: real workers, real libtorch.

mod layers;
mod worker;
