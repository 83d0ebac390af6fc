//! `[supervise]`: patience with workers.

use crate::config::errors::Checker;

section! {
    /// How long to wait for workers, and how often to start them again.
    pub struct SuperviseConfig {
        /// Until every worker has reported after its start, seconds.
        pub start_timeout_s: f64 = 60.0,
        /// Until every worker has joined the process group, seconds.
        pub rendezvous_timeout_s: f64 = 120.0,
        /// Until a collective operation has ended, seconds.
        pub collective_timeout_s: f64 = 300.0,
        /// Between asking workers to end and killing them, seconds.
        pub stop_timeout_s: f64 = 5.0,
        /// How often workers that failed are started again from the newest checkpoint (`--max-restarts`).
        pub max_restarts: u32 = 3,
    }
}

impl SuperviseConfig {
    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        const DAY_S: f64 = 86_400.0;
        checker.within("supervise.start_timeout_s", self.start_timeout_s, 0.1..=DAY_S);
        checker.within("supervise.rendezvous_timeout_s", self.rendezvous_timeout_s, 0.1..=DAY_S);
        checker.within("supervise.collective_timeout_s", self.collective_timeout_s, 0.1..=DAY_S);
        checker.within("supervise.stop_timeout_s", self.stop_timeout_s, 0.0..=DAY_S);
    }
}
