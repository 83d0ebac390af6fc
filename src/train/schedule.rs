//! The learning rate of each step, and the decay of the moving average after each update. All functions are pure.

use locdiff_core::config::{LearningRateSchedule, TrainConfig};

/// The learning rate of step `step`, counted from 0: a linear warm-up, then the configured schedule until step
/// `train.steps`.
pub(super) fn learning_rate(config: &TrainConfig, step: u64) -> f64 {
    let (peak, warmup) = (config.learning_rate, config.warmup_steps());
    if step < warmup {
        return peak * (step + 1) as f64 / warmup as f64;
    }
    match config.schedule {
        LearningRateSchedule::Constant => peak,
        LearningRateSchedule::Cosine => {
            let passed = (step - warmup) as f64 / (config.steps - warmup).max(1) as f64;
            0.5 * peak * (1.0 + (std::f64::consts::PI * passed.min(1.0)).cos())
        }
    }
}

/// The decay of the moving average after update number `update`, counted from 0. It is the smaller of `ema_decay` and
/// (update + 1) / (update + 10). It starts low, so that the random initial weights soon vanish from the average.
pub(super) fn ema_decay(config: &TrainConfig, update: u64) -> f64 {
    config.ema_decay.min((update + 1) as f64 / (update + 10) as f64)
}

#[cfg(test)]
mod tests {
    use locdiff_core::config::AutoOr;

    use super::*;

    #[test]
    fn learning_rate_warms_up_to_its_peak_and_decays_to_almost_zero() {
        let config = TrainConfig { steps: 100, learning_rate: 2.0, ..TrainConfig::default() };
        let rate = |step| learning_rate(&config, step);
        assert_eq!([rate(0), rate(4), rate(9), rate(10)], [0.2, 1.0, 2.0, 2.0]);
        assert!((rate(55) - 1.0).abs() < 1e-12, "the rate halfway through the decay is {}, wanted 1", rate(55));
        assert!(rate(99) > 0.0 && rate(99) < 1e-3, "the last rate is {}, wanted above 0 and below 1e-3", rate(99));
        assert!((10..99).all(|step| rate(step + 1) < rate(step)));
        let constant =
            TrainConfig { schedule: LearningRateSchedule::Constant, warmup_steps: AutoOr::Value(0), ..config };
        assert_eq!([0, 50, 99].map(|step| learning_rate(&constant, step)), [2.0; 3]);
    }

    #[test]
    fn ema_decay_starts_low_and_reaches_the_configured_value() {
        let config = TrainConfig { ema_decay: 0.999, ..TrainConfig::default() };
        assert_eq!(ema_decay(&config, 0), 0.1);
        assert_eq!(ema_decay(&config, 100_000), 0.999);
    }
}
