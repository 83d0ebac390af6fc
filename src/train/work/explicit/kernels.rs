//! The kernels of `native/kernels/step.cu`, and the sizes of their grids.

use std::collections::HashMap;

use tch::{Kind, Tensor};

use crate::native::NativeError;
use crate::native::nvrtc::{Arg, Kernel};
use crate::native::random::quad_options;

const SOURCE: &str = concat!(
    include_str!("../../../native/kernels/philox.cu"),
    include_str!("../../../native/kernels/quads.cu"),
    include_str!("../../../native/kernels/step.cu")
);
const NAMES: [&str; 22] = [
    "noised",
    "standardise",
    "modulate",
    "sine",
    "cosine",
    "column_sums",
    "row_group_sums",
    "modulate_backward",
    "table_biases",
    "silu",
    "silu_backward",
    "distances",
    "divergence",
    "add_losses",
    "squares",
    "squares_of_sums",
    "accumulate",
    "prepare_update",
    "update",
    "update_from_sums",
    "unit_vectors",
    "uniform_points",
];
/// Threads of a block.
const THREADS: u32 = 256;
/// Columns that a thread processes.
const COLUMNS: u32 = 4;
// These numbers must equal LANES, GROUPS_MAX and ROWS_PER_SUM of step.cu.
const LANES: u32 = 32;
const GROUPS_MAX: u32 = 32;
const ROWS_PER_SUM: u32 = 64;
/// Number of rows that a block sums at the same time.
const GROUPS: u32 = 8;
/// Kernels with only one sum for each column. They have few blocks, so each block sums [`GROUPS_MAX`] rows at the same
/// time.
const WITH_ONE_SUM: [&str; 3] = ["column_sums", "table_biases", "silu_backward"];
/// Must equal ELEMENTS_PER_SUM of step.cu.
const ELEMENTS_PER_SUM: i64 = 16_384;

/// The kernels, compiled for the current device and one type of activations.
#[derive(Debug)]
pub(super) struct Kernels(HashMap<&'static str, Kernel>);

impl Kernels {
    /// Compiles the kernels for activations of type `kind` (bf16 or f32). If all `widths` are multiples of four, the
    /// kernels read four numbers at once.
    pub(super) fn compile(kind: Kind, widths: impl IntoIterator<Item = i64>) -> Result<Self, NativeError> {
        let options = quad_options(kind, widths);
        let compile = |name| Ok::<_, NativeError>((name, Kernel::compile(name, SOURCE, &options)?));
        Ok(Self(NAMES.into_iter().map(compile).collect::<Result<_, _>>()?))
    }

    fn launch(&self, name: &str, grid: [u32; 2], block: [u32; 2], arguments: &[Arg<'_>]) -> Result<(), NativeError> {
        let unknown = || NativeError { operation: "kernel launch", text: format!("there is no kernel `{name}`") };
        let kernel = self.0.get(name).ok_or_else(unknown)?;
        kernel.launch([grid[0], grid[1], 1], [block[0], block[1], 1], arguments)
    }

    /// Launches a kernel in which each thread processes four adjacent columns of a row. The last two arguments of the
    /// kernel are the number of rows and the number of columns.
    pub(super) fn per_quad(&self, name: &str, [rows, width]: [i64; 2], mut arguments: Vec<Arg<'_>>) -> LaunchResult {
        arguments.extend([rows, width].map(|size| Arg::U32(size as u32)));
        let quads = rows as u32 * (width as u32).div_ceil(COLUMNS);
        self.launch(name, [quads.div_ceil(THREADS), 1], [THREADS, 1], &arguments)
    }

    /// Launches a kernel that sums over rows, separately for each column. It computes `sums` sums per column, for
    /// example one per group of rows.
    pub(super) fn per_column(&self, name: &str, width: i64, sums: u32, arguments: &[Arg<'_>]) -> LaunchResult {
        let blocks = (width as u32).div_ceil(COLUMNS * LANES);
        let groups = if WITH_ONE_SUM.contains(&name) { GROUPS_MAX } else { GROUPS };
        self.launch(name, [blocks, sums], [LANES, groups], arguments)
    }

    /// Launches a kernel with one block per row, or with a single block for `rows` = 1.
    pub(super) fn per_row(&self, name: &str, rows: i64, arguments: &[Arg<'_>]) -> LaunchResult {
        self.launch(name, [rows as u32, 1], [THREADS, 1], arguments)
    }

    /// Launches a kernel with one thread per item.
    pub(super) fn per_item(&self, name: &str, items: i64, arguments: &[Arg<'_>]) -> LaunchResult {
        self.launch(name, [(items as u32).div_ceil(THREADS), 1], [THREADS, 1], arguments)
    }
}

/// The result of a launch.
pub(super) type LaunchResult = Result<(), NativeError>;

/// Number of groups of rows that the kernel `cosine` sums.
pub(super) fn row_groups(rows: i64) -> u32 {
    (rows as u32).div_ceil(ROWS_PER_SUM)
}

/// Number of blocks of the kernel `squares`, each with one sum.
pub(super) fn square_sums(elements: i64) -> i64 {
    elements.cast_unsigned().div_ceil(ELEMENTS_PER_SUM.cast_unsigned()).cast_signed()
}

/// Number of elements between the beginnings of two rows.
pub(super) fn stride(matrix: &Tensor) -> Arg<'static> {
    Arg::U32(matrix.stride()[0] as u32)
}
