//! `[checkpoint]`: where runs are stored.

use crate::config::errors::Checker;

section! {
    /// Where runs are stored, and how many checkpoints are kept.
    pub struct CheckpointConfig {
        /// Folder of all runs. All nodes must share it.
        pub dir: String = "checkpoints".into(),
        /// Name of the run: a folder in `dir`. "": `train` resumes the newest unfinished run of the same configuration,
        /// or names a new run after the preset and the time. Other commands use the newest run with a checkpoint.
        pub run: String = String::new(),
        /// Steps between checkpoints.
        pub every: u64 = 1000,
        /// Number of latest checkpoints to keep. The checkpoint with the best validation score is always kept.
        pub keep: u32 = 3,
    }
}

impl CheckpointConfig {
    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        if self.dir.is_empty() {
            checker.push("checkpoint.dir", "is empty, wanted a folder");
        }
        if self.run.starts_with('.') || self.run.contains(['/', '\0']) {
            let message = "wanted a name without slashes or a leading dot; checkpoint.dir names the folder of all runs";
            checker.push("checkpoint.run", format!("is \"{}\", {message}", self.run));
        }
        checker.within("checkpoint.every", self.every, 1..);
        checker.within("checkpoint.keep", self.keep, 1..=100_000);
    }
}
