//! The launcher's request to stop early. A thread that reads the control socket records the request, and the working
//! thread looks for it between two pieces of work.

use std::sync::atomic::{AtomicBool, Ordering};

static IS_REQUESTED: AtomicBool = AtomicBool::new(false);

/// Records that the launcher asked this worker to stop.
pub fn request() {
    IS_REQUESTED.store(true, Ordering::Relaxed);
}

/// Whether the launcher asked this worker to stop.
pub fn is_requested() -> bool {
    IS_REQUESTED.load(Ordering::Relaxed)
}
