//! Properties of the diffusion process: schedules, forward noising, sampling chains, random draws.

use locdiff::diffusion::{
    CODE_SCALE, ChainNoise, DiffusionError, Forward, NoiseSchedule, Sampler, TrainingDraws, guided,
};
use locdiff::native::random::Step;
use locdiff_core::config::{AutoOr, DiffusionConfig, ModelConfig, Schedule};
use locdiff_core::random::Philox;
use tch::{Device, Kind, Tensor};

use crate::model::support::{assert_close, normals, relative};

const CPU: Device = Device::Cpu;

fn schedule(schedule: Schedule, timesteps: u32) -> NoiseSchedule {
    NoiseSchedule::new(&DiffusionConfig { timesteps, schedule, ..DiffusionConfig::default() }, &ModelConfig::default())
}

fn shifted(shift: AutoOr<f64>, degree: u32, low_pass_dims: u32) -> NoiseSchedule {
    let config = DiffusionConfig { schedule: Schedule::ShiftedCosine, shift, ..DiffusionConfig::default() };
    NoiseSchedule::new(&config, &ModelConfig { degree, low_pass_dims, ..ModelConfig::default() })
}

fn draws(first_sample: u64, samples: usize) -> TrainingDraws<'static> {
    TrainingDraws { philox: Philox::new(7), step: Step::At(3), first_sample, samples, device: CPU }
}

fn chain_noise(seeds: &[u64], samples: usize) -> ChainNoise {
    ChainNoise { seeds: seeds.to_vec(), samples, dims: 257, kind: Kind::Double, device: CPU }
}

#[test]
fn signal_falls_from_almost_one_to_almost_zero() {
    for (kind, clean) in [(Schedule::Cosine, 0.99), (Schedule::Linear, 0.99), (Schedule::ShiftedCosine, 0.8)] {
        for timesteps in [50, 200, 1000] {
            let schedule = schedule(kind, timesteps);
            let alphas_bar = schedule.alphas_bar();
            assert!(
                alphas_bar.windows(2).all(|pair| pair[1] < pair[0]),
                "{kind:?}, {timesteps} timesteps: alpha_bar is not strictly decreasing"
            );
            assert!(
                alphas_bar[0] > clean && alphas_bar[0] < 1.0,
                "{kind:?}, {timesteps} timesteps: alpha_bar starts at {}, wanted {clean} to 1",
                alphas_bar[0]
            );
            let last = alphas_bar[timesteps as usize - 1];
            assert!(
                last > 0.0 && last < 1e-4,
                "{kind:?}, {timesteps} timesteps: alpha_bar ends at {last:e}, wanted 0 to 1e-4"
            );
        }
    }
}

/// Equation 3 of "simple diffusion" (Hoogeboom and others): the shift adds 2 log(shift) to the logarithm of the
/// signal-to-noise ratio at every timestep.
#[test]
fn shift_scales_the_signal_to_noise_ratio_by_its_square() {
    let ratio = |schedule: &NoiseSchedule, t| {
        let alpha_bar = schedule.alpha_bar(t).expect("the timestep is in the schedule");
        alpha_bar / (1.0 - alpha_bar)
    };
    let plain = schedule(Schedule::Cosine, 200);
    for (shift, want) in [
        (shifted(AutoOr::Value(0.3), 47, 0), 0.09),
        (shifted(AutoOr::Auto, 47, 0), 23.0 / 2304.0),
        (shifted(AutoOr::Auto, 47, 576), 23.0 / 576.0),
        (shifted(AutoOr::Auto, 2, 0), 1.0),
    ] {
        for t in [0, 1, 57, 198, 199] {
            let got = ratio(&shift, t) / ratio(&plain, t);
            assert!((got / want - 1.0).abs() < 1e-9, "timestep {t}: the SNR changes by factor {got}, wanted {want}");
        }
    }
}

#[test]
fn shifted_signal_falls_strictly_for_extreme_settings() {
    for timesteps in [2, 10_000] {
        for (shift, degree) in [(AutoOr::Value(1e-4), 47), (AutoOr::Auto, 255)] {
            let config = DiffusionConfig { timesteps, shift, ..DiffusionConfig::default() };
            let schedule = NoiseSchedule::new(&config, &ModelConfig { degree, ..ModelConfig::default() });
            let alphas_bar = schedule.alphas_bar();
            assert!(
                alphas_bar.windows(2).all(|pair| pair[1] < pair[0]),
                "{timesteps} timesteps, shift {shift:?}: the signal is not strictly decreasing"
            );
            assert!(alphas_bar.iter().all(|alpha_bar| (0.0..1.0).contains(alpha_bar) && *alpha_bar > 0.0));
            let signal = Tensor::from_slice(alphas_bar).sqrt().to_kind(Kind::Float);
            assert!(
                signal.min().double_value(&[]) > 0.0,
                "{timesteps} timesteps, shift {shift:?}: the signal is 0 in f32"
            );
        }
    }
}

/// In DDPM, β grows linearly from 1e-4 to 0.02 over 1000 steps. A schedule with fewer steps multiplies each β by
/// 1000 / steps.
#[test]
fn linear_schedule_matches_ddpm_for_any_number_of_steps() {
    let whole = schedule(Schedule::Linear, 1000);
    let beta = |t: i32| 1e-4 + f64::from(t) * (0.02 - 1e-4) / 999.0;
    for last in [0, 1, 499, 999] {
        let want: f64 = (0..=last).map(|t| 1.0 - beta(t)).product();
        let got = whole.alpha_bar(last as usize).expect("the timestep is in the schedule");
        assert!((got / want - 1.0).abs() < 1e-12, "after step {last}, alpha_bar is {got:e}, wanted {want:e}");
    }
    let fewer = schedule(Schedule::Linear, 200);
    assert!((fewer.alpha_bar(0).expect("the timestep is in the schedule") - (1.0 - 5e-4)).abs() < 1e-15);
    let step = 1.0
        - fewer.alpha_bar(199).expect("the timestep is in the schedule")
            / fewer.alpha_bar(198).expect("the timestep is in the schedule");
    assert!((step - 0.1).abs() < 1e-12, "the last beta is {step}, wanted 0.1");
}

#[test]
fn last_timestep_is_nearly_pure_noise_and_the_first_nearly_clean() {
    let schedule = schedule(Schedule::Cosine, 200);
    let forward = Forward::new(&schedule, Kind::Double, CPU).expect("the schedule is valid");
    let (x0, noise) = (normals(1, &[4, 64], Kind::Double) / CODE_SCALE, normals(2, &[4, 64], Kind::Double));
    let at = |t: i64| forward.noised(&x0, &Tensor::from_slice(&[t; 4]), &noise).expect("the shapes match");
    assert_close(&at(199), &noise, 1e-2, "t = T - 1");
    assert_close(&at(0), &(&x0 * CODE_SCALE), 0.05, "t = 0");
}

#[test]
fn every_chain_returns_the_output_of_a_perfect_predictor() {
    let schedule = schedule(Schedule::ShiftedCosine, 200);
    let x0 = normals(1, &[5, 257], Kind::Double);
    let chains = [(200, 1.0), (20, 1.0), (1, 0.0)].map(|(steps, eta)| Sampler::few_steps(&schedule, steps, eta));
    for sampler in chains {
        let noise = |draw| chain_noise(&[7], 5).draw(draw);
        let result =
            sampler.expect("the chain is valid").run_with(noise, |_, _| Ok::<_, DiffusionError>(x0.shallow_clone()));
        assert!(result.expect("the predictor cannot fail").equal(&x0));
    }
}

/// At every timestep, the network's input in a sampling chain has the distribution of the forward process: its mean is
/// √ᾱ·x₀, and its variance is 1 − ᾱ.
#[test]
fn every_chain_keeps_the_forward_marginals() {
    let x0 = normals(1, &[128, 257], Kind::Double);
    let chains = [(200, 1.0), (20, 1.0), (20, 0.5), (20, 0.0)];
    let kinds = [Schedule::Cosine, Schedule::ShiftedCosine];
    for (kind, (steps, eta)) in kinds.into_iter().flat_map(|kind| chains.map(|chain| (kind, chain))) {
        let schedule = schedule(kind, 200);
        let sampler = Sampler::few_steps(&schedule, steps, eta).expect("the chain is valid");
        let mut seen = Vec::new();
        let noise = |draw| chain_noise(&[7, 8], 64).draw(draw);
        let result = sampler.run_with(noise, |x, t| {
            let alpha_bar = schedule.alpha_bar(t)?;
            let deviation = (x - &x0 * alpha_bar.sqrt()).std(true).double_value(&[]);
            seen.push(deviation / (1.0 - alpha_bar).sqrt());
            Ok::<_, DiffusionError>(x0.shallow_clone())
        });
        assert_eq!(result.expect("the predictor cannot fail").size(), x0.size());
        assert_eq!(seen.len(), steps);
        // Each standard deviation is estimated from 32,896 numbers, with an error of about 0.4 %. The largest error
        // among 200 estimates may be four times as large.
        assert!(
            seen.iter().all(|ratio| (ratio - 1.0).abs() < 0.02),
            "eta {eta}: the standard deviations relative to the forward process are {seen:?}, wanted 1"
        );
    }
}

#[test]
fn random_numbers_do_not_depend_on_the_layout() {
    let schedule = schedule(Schedule::Cosine, 200);
    let all = |draws: TrainingDraws<'_>| {
        let [t, noise, kept] = [draws.timesteps(&schedule), draws.noise(65), draws.kept_conditions(0.3)]
            .map(|drawn| drawn.expect("the draw is in range"));
        [t.unsqueeze(1), noise, kept]
    };
    let (whole, first, second) = (all(draws(100, 8)), all(draws(100, 3)), all(draws(103, 5)));
    for ((whole, first), second) in whole.iter().zip(&first).zip(&second) {
        assert!(Tensor::cat(&[first, second], 0).equal(whole));
    }
    for draw in [0, 4] {
        let drawn = |seeds: &[u64], samples| chain_noise(seeds, samples).draw(draw).expect("the draw is in range");
        let [whole, first, second] = [&[3, 9][..], &[3], &[9]].map(|seeds| drawn(seeds, 4));
        assert!(Tensor::cat(&[&first, &second], 0).equal(&whole));
        assert!(!first.equal(&second));
        // More chains do not change the first ones.
        assert!(drawn(&[3], 6).narrow(0, 0, 4).equal(&first));
    }
    let [start, step] = [0, 1].map(|draw| chain_noise(&[7], 8).draw(draw).expect("the draw is in range"));
    assert!(!start.equal(&step));
}

#[test]
fn conditions_are_dropped_with_the_given_probability() {
    let kept =
        draws(0, 20_000).kept_conditions(0.1).expect("the draw is in range").to_kind(Kind::Double).mean(Kind::Double);
    // The share of kept conditions may differ from 0.9 by four standard errors.
    assert!((kept.double_value(&[]) - 0.9).abs() < 4.0 * (0.09_f64 / 20_000.0).sqrt());
    assert!(draws(0, 100).kept_conditions(0.0).expect("the draw is in range").all().int64_value(&[]) == 1);
}

#[test]
fn guidance_0_is_no_guidance_and_more_extrapolates() {
    let (conditional, unconditional) = (normals(1, &[3, 16], Kind::Double), normals(2, &[3, 16], Kind::Double));
    assert!(guided(&conditional, &unconditional, 0.0).expect("the shapes match").equal(&conditional));
    let want = &unconditional + (&conditional - &unconditional) * 2.5;
    assert!(relative(&guided(&conditional, &unconditional, 1.5).expect("the shapes match"), &want) < 1e-14);
}

#[test]
fn impossible_chains_are_refused() {
    let schedule = schedule(Schedule::Linear, 200);
    let error = |steps, eta| Sampler::few_steps(&schedule, steps, eta).expect_err("the chain is invalid").to_string();
    assert_eq!(error(0, 1.0), "the chain has 0 steps, wanted 1 to 200 (the schedule's timesteps)");
    assert_eq!(error(201, 1.0), "the chain has 201 steps, wanted 1 to 200 (the schedule's timesteps)");
    assert_eq!(error(20, f64::NAN), "eta is NaN, wanted 0 to 1");
    let outside = schedule.alpha_bar(200).expect_err("the last timestep is 199").to_string();
    assert_eq!(outside, "timestep is 200, wanted below 200");
}
