//! `read_usable` and `read_usable_coordinates` return the rows of a block that the mask does not skip, in order.

use std::collections::BTreeMap;

use locdiff::shards::{BlockRows, Blocks, Dataset, Mask};
use locdiff_core::config::ShardsConfig;

use super::support::{WIDTH, write};

#[test]
fn usable_rows_are_those_that_the_mask_keeps() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let folder = scratch.path().join("shards");
    write(&folder);
    let dataset = Dataset::open(&folder.display().to_string(), &ShardsConfig::default()).expect("the shards are valid");
    let rows = dataset.block_rows().to_vec();
    assert_eq!(rows, [24, 24, 16]);
    let skipped = BTreeMap::from([(0, vec![0, 5, 6, 23]), (2, (0..16).collect())]);
    for mask in [Mask::none(), Mask::new(skipped, &rows).expect("the rows are ascending")] {
        let (mut all, mut left, mut places) = (BlockRows::default(), BlockRows::default(), BlockRows::default());
        for (block, view) in (0..3).flat_map(|block| [(block, 0), (block, 1)]) {
            dataset.read(block, view, &mut all).expect("the blocks are valid");
            dataset.read_usable(&mask, block, view, &mut left).expect("the blocks are valid");
            dataset.read_usable_coordinates(&mask, block, &mut places).expect("the blocks are valid");
            let kept: Vec<usize> = mask.usable_rows(block, rows[block as usize]).map(|row| row as usize).collect();
            assert_eq!(kept.len(), rows[block as usize] as usize - mask.skipped(block).len());
            let of_row = |row: &usize| all.embeddings[row * WIDTH * 2..(row + 1) * WIDTH * 2].to_vec();
            let want = BlockRows {
                latitudes: kept.iter().map(|row| all.latitudes[*row]).collect(),
                longitudes: kept.iter().map(|row| all.longitudes[*row]).collect(),
                embeddings: kept.iter().flat_map(of_row).collect(),
            };
            assert_eq!(left, want, "wrong rows in block {block}, view {view}");
            assert_eq!(places, BlockRows { embeddings: Vec::new(), ..want }, "wrong coordinates in block {block}");
        }
    }
}
