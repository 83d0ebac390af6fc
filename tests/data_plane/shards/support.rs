//! Small shards for tests. Float16, float32 and float64 can all represent the numbers in the embeddings exactly.

use std::path::Path;

use half::f16;
use locdiff::shards::{
    BlockRows, Blocks, Dataset, ImageHead, Manifest, Mask, ShardWriter, ShardsError, WriterOptions, WriterRows, verify,
};
use locdiff_core::config::OnBadRows;
use locdiff_core::protocol::Problem;

pub(crate) const ROWS: usize = 64;
pub(crate) const WIDTH: usize = 8;

/// Element `index` of an embedding. `value` in `tests/golden/shards/make_fixtures.py` uses the same formula.
pub(crate) fn value(row: usize, index: usize, view: usize) -> f16 {
    f16::from_f64((((row * 37 + index * 11 + view * 5) % 512) as f64 - 256.0) / 32.0)
}

pub(crate) fn latitude(row: usize) -> f64 {
    row as f64 * 2.5 - 80.0
}

pub(crate) fn longitude(row: usize) -> f64 {
    row as f64 * 5.0 - 170.0
}

pub(crate) fn embeddings(view: usize) -> Vec<f16> {
    (0..ROWS * WIDTH).map(|at| value(at / WIDTH, at % WIDTH, view)).collect()
}

pub(crate) fn options() -> WriterOptions {
    let options = WriterOptions::new(WIDTH as u32, 2, "sixty-four rows", ImageHead::Linear);
    WriterOptions { rows_per_group: 24, rows_per_file: 48, ..options }
}

/// Writes shards of sixty-four rows. `change` may first modify the latitudes, the longitudes and the first view.
pub(crate) fn write_with(
    out: &Path,
    options: WriterOptions,
    change: impl FnOnce(&mut Vec<f64>, &mut Vec<f64>, &mut Vec<f16>),
) -> Result<Manifest, ShardsError> {
    let ids: Vec<String> = (0..ROWS).map(|row| format!("photo-{row}")).collect();
    let mut latitudes: Vec<f64> = (0..ROWS).map(latitude).collect();
    let mut longitudes: Vec<f64> = (0..ROWS).map(longitude).collect();
    let (mut first, second) = (embeddings(0), embeddings(1));
    change(&mut latitudes, &mut longitudes, &mut first);
    let mut writer = ShardWriter::create(out, options)?;
    // The writer must accept pieces of any size, so the pieces pushed here differ from the row groups.
    for (start, end) in [(0, 5), (5, 60), (60, ROWS)] {
        let values = |view: &'_ [f16]| view[start * WIDTH..end * WIDTH].to_vec();
        writer.push(&WriterRows {
            ids: ids[start..end].to_vec(),
            latitudes: latitudes[start..end].to_vec(),
            longitudes: longitudes[start..end].to_vec(),
            views: vec![values(&first), values(&second)],
        })?;
    }
    writer.finish()
}

/// All problems that [`verify`] finds in a data set. Bad rows count as problems and are not skipped.
pub(crate) fn problems(dataset: &Dataset) -> Vec<Problem> {
    let (problems, mask) = verify(dataset, OnBadRows::Error).expect("the files can be read");
    assert_eq!(mask, Mask::none(), "rows were skipped");
    problems
}

pub(crate) fn write(out: &Path) -> Manifest {
    write_with(out, options(), |_, _, _| {}).expect("the rows are valid")
}

/// All rows of a view in the order in which the files store them.
pub(crate) fn read_all(blocks: &dyn Blocks, view: u32) -> Result<BlockRows, ShardsError> {
    let (mut whole, mut part) = (BlockRows::default(), BlockRows::default());
    for block in 0..blocks.block_rows().len() as u32 {
        blocks.read(block, view, &mut part)?;
        assert_eq!(
            part.latitudes.len(),
            blocks.block_rows()[block as usize] as usize,
            "wrong number of rows in block {block}"
        );
        whole.latitudes.extend_from_slice(&part.latitudes);
        whole.longitudes.extend_from_slice(&part.longitudes);
        whole.embeddings.extend_from_slice(&part.embeddings);
    }
    Ok(whole)
}

/// The sixty-four rows as every reader must return them.
pub(crate) fn expected(view: usize) -> BlockRows {
    BlockRows {
        latitudes: (0..ROWS).map(latitude).collect(),
        longitudes: (0..ROWS).map(longitude).collect(),
        embeddings: embeddings(view).iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}
