//! `eval --suite perturbation`: the same drift, whoever computes it. That it is what theory says is shown through the launcher, in
//! `tests/control_plane/perturbation.rs`.

use locdiff::eval::perturbation::{BLOCK_POINTS, SEARCHED_PER_BLOCK, Share, run_degree, theory_km};

#[test]
fn perturbation_theory_is_the_recipe() {
    // sqrt(pi/2) * 0.1 * 6371 / sqrt(47 * 48² * 49 / 16 pi)
    assert!((theory_km(47) - 2.46).abs() < 0.005, "{}", theory_km(47));
}

#[test]
fn perturbation_does_not_depend_on_who_computes_it() {
    let points = 2 * BLOCK_POINTS + 7;
    let alone = run_degree(15, points, Share { rank: 0, world: 1, threads: 1 }).expect("measured");
    let share = |rank| run_degree(15, points, Share { rank, world: 2, threads: 2 }).expect("measured");
    let mut together = [share(0), share(1)].concat();
    together.sort_by_key(|block| block.block);
    assert_eq!(alone, together);
    assert!(alone.iter().all(|block| block.searched == SEARCHED_PER_BLOCK));
}
