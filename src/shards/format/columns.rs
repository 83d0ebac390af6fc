//! What an embedding is made of, and how the columns of further views are called.

/// Bytes of one number of an embedding in memory.
pub const ELEMENT_BYTES: usize = 2;

/// Name of a view's column.
pub(super) fn view_column(name: &str, view: usize) -> String {
    if view == 0 { name.to_owned() } else { format!("{name}_{view}") }
}
