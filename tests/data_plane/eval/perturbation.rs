//! `eval --suite perturbation`: the drift does not depend on the number of workers, and `theory_km` follows its
//! formula. `tests/control_plane/perturbation.rs` compares the drift with the theory.

use locdiff::eval::perturbation::{BLOCK_POINTS, SEARCHED_PER_BLOCK, run_degree, theory_km};
use locdiff_core::protocol::WorkerSlot;

#[test]
fn perturbation_theory_matches_its_formula() {
    // At degree 47 the formula gives sqrt(pi / 2) * 0.1 * 6371 / sqrt(47 * 48² * 49 / (16 pi)) = 2.46 km.
    assert!((theory_km(47) - 2.46).abs() < 0.005, "theory_km(47) is {}, wanted 2.46", theory_km(47));
}

#[test]
fn perturbation_does_not_depend_on_the_number_of_workers() {
    let points = 2 * BLOCK_POINTS + 7;
    let share = |rank, world| {
        let worker = WorkerSlot { rank, world, node: 0, local_rank: rank, gpu: None, threads: world };
        run_degree(15, points, &worker).expect("the search converges")
    };
    let alone = share(0, 1);
    let mut together = [share(0, 2), share(1, 2)].concat();
    together.sort_by_key(|block| block.block);
    assert_eq!(alone, together);
    assert!(alone.iter().all(|block| block.searched == SEARCHED_PER_BLOCK));
}
