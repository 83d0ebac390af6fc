//! The last lines that `train` prints: commands that the user may run next.

use locdiff_core::config::{RunConfig, TrainMethod};

use super::record::quoted;

/// The commands to run next after training, each on a line of its own.
pub(super) fn next_commands(run: &str, config: &RunConfig, is_evaluated: bool) -> String {
    let dir = &config.checkpoint.dir;
    let place = match *dir == RunConfig::default().checkpoint.dir {
        true => String::new(),
        false => format!(" --set {}", quoted(&format!("checkpoint.dir={dir}"))),
    };
    let verb = match is_evaluated {
        true => format!("--set train.steps={} train", 2 * config.train.steps),
        false if config.train.method == TrainMethod::Geoclip => "eval".to_owned(),
        false => "eval --hybrid".to_owned(),
    };
    let run = quoted(run);
    format!("to go on:\n  locdiff-launch --run {run}{place} {verb}\n  tensorboard --logdir {}", quoted(dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_find_the_run_and_fit_what_was_done() {
        let mut config = RunConfig::default();
        config.train.steps = 500;
        let found = next_commands("mine", &config, false);
        assert_eq!(found, "to go on:\n  locdiff-launch --run mine eval --hybrid\n  tensorboard --logdir checkpoints");
        config.checkpoint.dir = "/data/my runs".to_owned();
        let found = next_commands("mine", &config, true);
        let train = "  locdiff-launch --run mine --set 'checkpoint.dir=/data/my runs' --set train.steps=1000 train\n";
        assert!(found.contains(train) && found.ends_with("  tensorboard --logdir '/data/my runs'"), "{found}");
    }
}
