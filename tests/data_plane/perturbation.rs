//! `eval --suite perturbation`: the drift that theory says, whoever computes it.

use locdiff::eval::perturbation::{BLOCK_POINTS, SEARCHED_PER_BLOCK, Share, run_degree, theory_km};

#[test]
fn perturbation_theory_is_the_recipe() {
    // sqrt(pi/2) * 0.1 * 6371 / sqrt(47 * 48² * 49 / 16 pi)
    assert!((theory_km(47) - 2.46).abs() < 0.005, "{}", theory_km(47));
}

#[test]
fn perturbation_drift_is_what_theory_says() {
    for degree in [23, 47] {
        let points = 1000;
        let blocks = run_degree(degree, points, Share { rank: 0, world: 1, threads: 2 }).expect("measured");
        let count: u32 = blocks.iter().map(|block| block.points).sum();
        assert_eq!(count, points);
        assert!(blocks.iter().all(|block| block.searched == SEARCHED_PER_BLOCK));
        let mean = blocks.iter().map(|block| block.drift_km_sum).sum::<f64>() / f64::from(points);
        // A Rayleigh variable's standard deviation is 0.523 of its mean: 1.65 % for 1000 points; four of them.
        let off = mean / theory_km(degree) - 1.0;
        println!("degree {degree}: {mean:.3} km, {:+.2} % from theory", off * 100.0);
        assert!(off.abs() < 4.0 * 0.523 / f64::from(points).sqrt(), "degree {degree}: {mean} km");
    }
}

#[test]
fn perturbation_does_not_depend_on_who_computes_it() {
    let points = 2 * BLOCK_POINTS + 7;
    let alone = run_degree(15, points, Share { rank: 0, world: 1, threads: 1 }).expect("measured");
    let share = |rank| run_degree(15, points, Share { rank, world: 2, threads: 2 }).expect("measured");
    let mut together = [share(0), share(1)].concat();
    together.sort_by_key(|block| block.block);
    assert_eq!(alone, together);
}
