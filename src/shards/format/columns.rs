//! The element size of embeddings, and the column names of views.

/// Bytes per number of an embedding in memory (float16).
pub const ELEMENT_BYTES: usize = 2;

/// Column name of a view: NAME, NAME_1, NAME_2, ...
pub(super) fn view_column(name: &str, view: usize) -> String {
    if view == 0 { name.to_owned() } else { format!("{name}_{view}") }
}
