//! `[checkpoint]`: where runs are kept.

use crate::config::errors::Checker;

section! {
    /// Where runs are kept and how many checkpoints of each.
    pub struct CheckpointConfig {
        /// Folder of all runs; nodes share it.
        pub dir: String = "checkpoints".into(),
        /// Name of the run, a folder below `dir`; "": made from the preset and the time, or the newest run where one is read.
        pub run: String = String::new(),
        /// Steps between two checkpoints.
        pub every: u64 = 1000,
        /// Checkpoints that are kept beside the best one.
        pub keep: u32 = 3,
    }
}

impl CheckpointConfig {
    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        if self.dir.is_empty() {
            checker.push("checkpoint.dir", "is empty");
        }
        if self.run.starts_with('.') || self.run.contains(['/', '\0']) {
            checker.push("checkpoint.run", format!("is \"{}\", wanted a plain folder name", self.run));
        }
        checker.within("checkpoint.every", self.every, 1..=u64::MAX);
        checker.within("checkpoint.keep", self.keep, 1..=100_000);
    }
}
