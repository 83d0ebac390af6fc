//! The size of a number in an embedding, and the column names of views.

/// Bytes of one number of an embedding in memory (float16).
pub const ELEMENT_BYTES: usize = 2;

/// Column name of a view: `name` for view 0, `name_1` for view 1, and so on.
pub(super) fn view_column(name: &str, view: usize) -> String {
    if view == 0 { name.to_owned() } else { format!("{name}_{view}") }
}
