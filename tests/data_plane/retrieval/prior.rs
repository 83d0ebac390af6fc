//! Tests of retrieval and LocDiff-H with a prior of the user.

use locdiff::retrieval::{
    Gallery, Hybrid, ImageSamples, QueryHead, Retriever, Surroundings, Voters, locate, locate_alone,
};
use locdiff_core::config::{HybridMode, Prior};
use locdiff_core::geo::{Degrees, Km, UnitVector};
use tch::Device;

use super::{WIDTH, normals, points};

const POINTS: usize = 300;

fn gallery() -> Gallery {
    let embeddings = normals(11, &[POINTS as i64, WIDTH as i64]);
    Gallery::of_embeddings("test".into(), points(POINTS), embeddings).expect("the gallery is valid")
}

/// A gallery of some points has the logits of the whole one, and knows no other points.
#[test]
fn restricted_galleries_answer_with_their_best_own_point() {
    let kept: Vec<u32> = (0..POINTS as u32).filter(|at| at % 7 == 3).collect();
    let (whole, some) = (gallery(), gallery().restricted(&kept).expect("the rows exist").expect("points are left"));
    assert_eq!(some.points().len(), kept.len());
    let queries = QueryHead::knn(8.0, Device::Cpu).queries(&normals(12, &[20, 1, WIDTH as i64]));
    let queries = queries.expect("the embeddings are valid");
    let [all, few] = [&whole, &some].map(|gallery| {
        let retriever = Retriever::new(gallery, Device::Cpu, 1).expect("the gallery fits in memory");
        retriever.score(&queries, &vec![Vec::new(); 20], gallery.points().len(), None).expect("the inputs are valid")
    });
    for (all, few) in all.iter().zip(&few) {
        let wanted: Vec<u32> = all.best.iter().map(|(at, _)| *at).filter(|at| at % 7 == 3).collect();
        let found: Vec<u32> = few.best.iter().map(|(at, _)| kept[*at as usize]).collect();
        assert_eq!(found, wanted);
    }
    assert!(gallery().restricted(&[]).expect("nothing is read").is_none());
}

/// In both modes of LocDiff-H, and in retrieval with consensus, a point that the prior makes much likelier wins.
#[test]
fn prior_of_a_point_counts_like_its_logit() {
    let gallery = gallery();
    let retriever = Retriever::new(&gallery, Device::Cpu, 1).expect("the gallery fits in memory");
    let queries = QueryHead::knn(8.0, Device::Cpu).queries(&normals(12, &[20, 1, WIDTH as i64]));
    let queries = queries.expect("the embeddings are valid");
    let place = points(POINTS)[0];
    let image = ImageSamples { aggregate: place, samples: vec![place], weights: Vec::new(), expected: Vec::new() };
    let images = vec![image; 20];
    let surroundings =
        |log_prior: Vec<f32>| Surroundings::new(gallery.index(), Prior::Training, None, 1).with_log_prior(log_prior);
    let favoured = 42;
    let log_prior: Vec<f32> = (0..POINTS).map(|at| if at == favoured { 0.0 } else { -200.0 }).collect();
    let (plain, favouring) = (surroundings(Vec::new()), surroundings(log_prior));
    let consensus = Hybrid::without_locdiff(20_000.0, 1.0, 1.0);
    let voters = Voters { neighbours: 1, points: POINTS, consensus };
    for mode in [HybridMode::AnySample, HybridMode::Consensus] {
        let hybrid = Hybrid { mode, top_margin: 0.5, ..Hybrid::without_locdiff(20_100.0, 1.0, 1.0) };
        let answers = |surroundings: &Surroundings| {
            locate((&retriever, surroundings), &queries, &images, &hybrid, voters, None).expect("the inputs are valid")
        };
        for (without, with) in answers(&plain).iter().zip(answers(&favouring)) {
            assert_eq!((with.hybrid, with.consensus), (Some(gallery.points()[favoured]), gallery.points()[favoured]));
            assert_eq!(with.retrieval, without.retrieval);
        }
        let moved = answers(&plain).iter().filter(|found| found.hybrid != Some(gallery.points()[favoured])).count();
        assert!(moved >= 15, "the favoured point wins anyway");
    }
    let alone = locate_alone((&retriever, &favouring), &queries, voters, None).expect("the inputs are valid");
    assert!(alone.iter().all(|found| found.consensus == gallery.points()[favoured]));
}

/// Samples with small weights hardly count in the density of the samples.
#[test]
fn light_samples_do_not_attract_votes() {
    let [one, other] = [points(POINTS)[0], points(POINTS)[0].antipode()];
    let embeddings = normals(11, &[1, WIDTH as i64]).repeat([2, 1]);
    let gallery = Gallery::of_embeddings("test".into(), vec![one, other], embeddings).expect("the gallery is valid");
    let retriever = Retriever::new(&gallery, Device::Cpu, 1).expect("the gallery fits in memory");
    let queries = QueryHead::knn(8.0, Device::Cpu).queries(&normals(12, &[1, 1, WIDTH as i64]));
    let queries = queries.expect("the embeddings are valid");
    let near = |place: UnitVector| place.displace(Degrees(0.0), Km(10.0)).expect("the distance is finite");
    let samples = vec![near(one), near(one), near(other)];
    let hybrid = Hybrid { samples_weight: 1.0, ..Hybrid::without_locdiff(150.0, 1.0, 1.0) };
    let voters = Voters { neighbours: 1, points: 2, consensus: Hybrid::without_locdiff(150.0, 1.0, 1.0) };
    for (weights, wanted) in [(vec![], one), (vec![1.0; 3], one), (vec![0.01, 0.01, 1.0], other)] {
        let image = ImageSamples { aggregate: one, samples: samples.clone(), weights, expected: Vec::new() };
        let found = locate((&retriever, &Surroundings::default()), &queries, &[image], &hybrid, voters, None);
        assert_eq!(found.expect("the inputs are valid")[0].hybrid, Some(wanted));
    }
}
