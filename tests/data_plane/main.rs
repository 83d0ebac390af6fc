//! What the data plane must hold, through its public face and between real processes.

mod comm;
