//! If the anchors are split over ranks, the KL divergence has the same value and gradient as on one rank.
//!
//! The letters after the last underscore of a tensor's name are its dimensions: b for the batch, a for the anchors, and
//! d for the dimensions of a code.

use locdiff::loss::{Inputs, Loss};
use locdiff_core::config::{AutoOr, KlDirection, LossConfig, Precision};
use tch::{Kind, Tensor};

use crate::comm::harness::run_ranks;
use crate::model::support::{assert_close, normals};

const BATCH: i64 = 6;
const DIMS: i64 = 16;
/// Number of anchors. It is divisible neither by 2 nor by 4, so the last rank has more anchors than the others.
const ANCHORS: i64 = 37;

/// The harmonics of this rank's anchors.
fn own(basis_ad: &Tensor, rank: u32, world: u32) -> Tensor {
    let (rank, length) = (i64::from(rank), ANCHORS / i64::from(world));
    let last = rank + 1 == i64::from(world);
    basis_ad.narrow(0, rank * length, if last { ANCHORS - rank * length } else { length })
}

#[test]
fn anchors_split_over_ranks_give_the_whole_loss() {
    for world in [2, 4] {
        run_ranks(anchors_split_over_ranks_give_the_whole_loss, world, |me| {
            let communicator = me.connect(me.world);
            // In f32, logits of about 50 have an error of 3e-6, and so do log q and log p. The tolerance for f32 allows
            // for these errors.
            for (kind, tolerance) in [(Kind::Double, 1e-10), (Kind::Float, 2e-4)] {
                // With logits of about 50, the ranks' sums of exponentials differ by many powers of ten.
                let (truth_bd, basis_ad) =
                    (normals(1, &[BATCH, DIMS], kind) * 4.0, normals(2, &[ANCHORS, DIMS], kind) * 3.0);
                let start_bd = normals(3, &[BATCH, DIMS], kind) * 14.0;
                for kl in [KlDirection::Reverse, KlDirection::Forward] {
                    let config = LossConfig { kl, kl_weight: AutoOr::Value(0.3), ..LossConfig::default() };
                    let loss = Loss::new(&config, 3, Precision::F32);
                    let run = |basis_ad: &Tensor, anchors_split| {
                        let predicted_bd = start_bd.copy().set_requires_grad(true);
                        let inputs =
                            Inputs { predicted_bd: &predicted_bd, truth_bd: &truth_bd, basis_ad, anchors_split };
                        let losses = loss.compute(inputs).expect("all ranks take part");
                        losses.total.backward();
                        (
                            losses.kl.expect("the weight of the KL divergence is not 0"),
                            losses.total,
                            predicted_bd.grad(),
                        )
                    };
                    let whole = run(&basis_ad, None);
                    let split = run(&own(&basis_ad, me.rank, me.world), Some(communicator.tensor()));
                    assert_close(&split.0, &whole.0, tolerance, "KL");
                    assert_close(&split.1, &whole.1, tolerance, "total");
                    assert_close(&split.2, &whole.2, tolerance, "gradient");
                }
            }
        });
    }
}
