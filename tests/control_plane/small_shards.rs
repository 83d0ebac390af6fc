//! Small shards whose embeddings encode the location of each row, built with `shards build`.

use std::fmt::Write as _;
use std::ops::Range;

use locdiff_core::exit_code::ExitCode;

use crate::stage::Stage;

/// Length of an embedding, unless a test asks for another length.
pub(crate) const WIDTH: usize = 12;

/// Latitude and longitude of row `row`, degrees. All small shards use these places.
pub(crate) fn place(row: usize) -> (f64, f64) {
    (((row * 37) % 170) as f64 - 85.0, ((row * 101) % 359) as f64 - 179.0)
}

/// Builds the shards `shards/{name}` with the rows `rows`. If `views_differ` is false, all views of a row are equal.
#[track_caller]
pub(crate) fn build(stage: &Stage, name: &str, rows: Range<usize>, views: usize, views_differ: bool) {
    build_of_width(stage, name, rows, (views, views_differ), WIDTH);
}

/// Like [`build`], but with embeddings of length `width`.
#[track_caller]
pub(crate) fn build_of_width(
    stage: &Stage,
    name: &str,
    rows: Range<usize>,
    (views, views_differ): (usize, bool),
    width: usize,
) {
    let mut table = String::from("id,lat,lon\n");
    for row in rows.clone() {
        let (latitude, longitude) = place(row);
        writeln!(table, "photo-{row},{latitude},{longitude}").expect("writing to a string cannot fail");
    }
    std::fs::write(stage.path().join("table.csv"), table).expect("the test folder is writable");
    let mut line = format!("--device cpu shards build --table table.csv --out shards/{name}");
    for view in 0..views {
        let file = if view == 0 { "embeddings.npy".to_owned() } else { format!("embeddings_{view}.npy") };
        let seed = if views_differ { view } else { 0 };
        let numbers: Vec<f32> = rows.clone().flat_map(|row| embedding_of_width(row, seed, width)).collect();
        std::fs::write(stage.path().join(&file), npy(&numbers, width)).expect("the test folder is writable");
        write!(line, " --embeddings {file}").expect("writing to a string cannot fail");
    }
    stage.run(&line).exits_with(ExitCode::Success);
}

/// The embedding of a row in a view.
pub(crate) fn embedding(row: usize, view: usize) -> impl Iterator<Item = f32> {
    embedding_of_width(row, view, WIDTH)
}

fn embedding_of_width(row: usize, view: usize, width: usize) -> impl Iterator<Item = f32> {
    let (latitude, longitude) = place(row);
    let (phi, lambda) = (latitude.to_radians(), longitude.to_radians());
    let direction = [phi.cos() * lambda.cos(), phi.cos() * lambda.sin(), phi.sin()];
    let noise = move |index: usize| (((row * 7919 + index * 104_729 + view * 31) % 1000) as f64 / 1000.0 - 0.5) * 0.1;
    (0..width).map(move |index| (direction[index % 3] * (1.0 + index as f64 * 0.1) + noise(index)) as f32)
}

/// An f32 matrix with rows of length `width` as a NumPy file, format version 1.
pub(crate) fn npy(numbers: &[f32], width: usize) -> Vec<u8> {
    let shape = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}, {width}), }}", numbers.len() / width);
    let length = (10 + shape.len() + 1).next_multiple_of(64) - 10;
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend(u16::try_from(length).expect("the header is shorter than 64 KiB").to_le_bytes());
    bytes.extend(format!("{shape:<filled$}\n", filled = length - 1).bytes());
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    bytes
}
