//! How the columns are called, and what an embedding is made of.

use locdiff_core::config::ShardsConfig;

/// Bytes of one number of an embedding in memory.
pub const ELEMENT_BYTES: usize = 2;

/// How the columns are called.
#[derive(Debug, Clone)]
pub(crate) struct ColumnNames {
    pub(crate) id: String,
    pub(crate) latitude: String,
    pub(crate) longitude: String,
    pub(crate) embedding: String,
}

impl ColumnNames {
    /// Those of the format, which are the configuration's defaults.
    pub(crate) fn own() -> Self {
        Self::of(&ShardsConfig::default())
    }

    pub(crate) fn of(config: &ShardsConfig) -> Self {
        Self {
            id: config.id_column.clone(),
            latitude: config.latitude_column.clone(),
            longitude: config.longitude_column.clone(),
            embedding: config.embedding_column.clone(),
        }
    }
}

/// Name of a view's column.
pub(super) fn view_column(name: &str, view: usize) -> String {
    if view == 0 { name.to_owned() } else { format!("{name}_{view}") }
}
