//! `[supervise]`: timeouts and restarts of workers.

use crate::config::errors::Checker;

section! {
    /// Timeouts for workers, and how many times failed workers are restarted.
    pub struct SuperviseConfig {
        /// Time limit for all workers to start and connect to the launcher, seconds.
        pub start_timeout_s: f64 = 60.0,
        /// Time between two heartbeats of a worker, seconds. Must be shorter than the timeout of every phase.
        pub heartbeat_s: f64 = 0.25,
        /// Time limit for all workers to join the process group, for all nodes to join node 0, and for node 0 to come
        /// back, seconds.
        pub rendezvous_timeout_s: f64 = 120.0,
        /// Time limit of a collective operation, seconds. Also limits how long one worker may keep the others waiting,
        /// even if the phase of that worker has a longer limit.
        pub collective_timeout_s: f64 = 300.0,
        /// Longest allowed time without progress while a worker opens data, scans data or waits for data, seconds.
        /// Reading a block is progress.
        pub data_timeout_s: f64 = 600.0,
        /// Longest allowed time without progress in a training step or another computation, seconds. Must exceed
        /// `collective_timeout_s`.
        pub step_timeout_s: f64 = 900.0,
        /// Longest allowed time without progress while a worker waits for a checkpoint to be written, seconds. Writing
        /// a part of a file is progress. Also the longest time that the background write of a checkpoint may take.
        pub checkpoint_timeout_s: f64 = 1800.0,
        /// Longest allowed time without progress in an evaluation, seconds.
        pub evaluation_timeout_s: f64 = 900.0,
        /// Longest time that a worker may take to exit after it has sent its result, seconds. A worker that takes
        /// longer is killed.
        pub stop_timeout_s: f64 = 5.0,
        /// Longest time that workers may take to finish their step and write a checkpoint after SIGTERM, SIGUSR1 or
        /// Ctrl-C, seconds. Workers that take longer are killed.
        pub preempt_timeout_s: f64 = 25.0,
        /// A node from which nothing was heard for this time is lost, and so is node 0 for the other nodes, seconds.
        pub node_timeout_s: f64 = 10.0,
        /// How long the command waits for a lost node before it goes on with fewer nodes, if `--nnodes MIN:MAX` allows
        /// it, seconds.
        pub node_patience_s: f64 = 120.0,
        /// Largest number of restarts in a row without a new checkpoint (`--max-restarts`). 0: never restart.
        pub max_restarts: u32 = 3,
        /// How long an outage of storage or network may last before the command gives up, seconds. Restarts during an
        /// outage do not count towards `max_restarts`.
        pub outage_patience_s: f64 = 1800.0,
        /// Size limit of the log file of each worker in each attempt, bytes. The middle of a longer log is removed.
        pub log_bytes_max: u64 = 64 << 20,
    }
}

impl SuperviseConfig {
    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        const DAY_S: f64 = 86_400.0;
        checker.within("supervise.start_timeout_s", self.start_timeout_s, 0.1..=DAY_S);
        checker.within("supervise.rendezvous_timeout_s", self.rendezvous_timeout_s, 0.1..=DAY_S);
        checker.within("supervise.collective_timeout_s", self.collective_timeout_s, 0.1..=DAY_S);
        checker.within("supervise.data_timeout_s", self.data_timeout_s, 0.1..=DAY_S);
        checker.within("supervise.step_timeout_s", self.step_timeout_s, 0.1..=DAY_S);
        checker.within("supervise.checkpoint_timeout_s", self.checkpoint_timeout_s, 0.1..=DAY_S);
        checker.within("supervise.evaluation_timeout_s", self.evaluation_timeout_s, 0.1..=DAY_S);
        checker.within("supervise.stop_timeout_s", self.stop_timeout_s, 0.0..=DAY_S);
        checker.within("supervise.preempt_timeout_s", self.preempt_timeout_s, 0.0..=DAY_S);
        checker.within("supervise.node_timeout_s", self.node_timeout_s, 2.0..=3600.0);
        checker.within("supervise.node_patience_s", self.node_patience_s, 0.0..=DAY_S);
        checker.within("supervise.outage_patience_s", self.outage_patience_s, 0.0..=30.0 * DAY_S);
        checker.within("supervise.log_bytes_max", self.log_bytes_max, 1 << 12..=1 << 40);
        checker.within("supervise.heartbeat_s", self.heartbeat_s, 0.01..=60.0);
        let phases_s = [
            self.start_timeout_s,
            self.rendezvous_timeout_s,
            self.collective_timeout_s,
            self.data_timeout_s,
            self.step_timeout_s,
            self.checkpoint_timeout_s,
            self.evaluation_timeout_s,
        ];
        let shortest_s = phases_s.into_iter().fold(f64::INFINITY, f64::min);
        if self.heartbeat_s >= shortest_s {
            let wanted = format!("is {}, wanted less than the shortest phase timeout ({shortest_s})", self.heartbeat_s);
            checker.push("supervise.heartbeat_s", wanted);
        }
        if self.step_timeout_s <= self.collective_timeout_s {
            // A training step contains collective operations, so the limit of a step must be longer than the limit of
            // one operation.
            let wanted = format!("is {}, wanted more than supervise.collective_timeout_s", self.step_timeout_s);
            checker.push("supervise.step_timeout_s", format!("{wanted} ({})", self.collective_timeout_s));
        }
    }
}
