//! The rows that workers have located so far. They outlive a failed attempt, so that the next attempt locates only the
//! pieces that are not complete.

use std::collections::BTreeMap;
use std::ops::Range;

use locdiff_core::protocol::piece_rows;

use crate::error::{LaunchError, refuse, reported};
use crate::terminal::Display;

/// The rows so far, by their index in the data.
#[derive(Debug)]
pub(in crate::verbs::eval) struct KeptRows<Row> {
    rows: BTreeMap<u64, Row>,
    /// The number of all rows and what identifies the data; `None` before the first message.
    data: Option<(u64, String)>,
    /// Shows how many rows have been located.
    display: Display,
}

impl<Row> Default for KeptRows<Row> {
    fn default() -> Self {
        Self { rows: BTreeMap::new(), data: None, display: Display::new() }
    }
}

impl<Row> KeptRows<Row> {
    /// Adds rows of a message, with their indices. `data` identifies the data. Fails if the data has changed since the
    /// first message, or if a row is there already.
    pub(in crate::verbs::eval) fn add(
        &mut self,
        of_rows: u64,
        data: String,
        rows: impl IntoIterator<Item = (u64, Row)>,
    ) -> Result<(), LaunchError> {
        self.check_data(of_rows, data)?;
        for (index, row) in rows {
            if self.rows.insert(index, row).is_some() {
                return Err(reported!(WorkerFailed, "row {index} was received twice: this is a bug"));
            }
        }
        self.display.count("photos located", self.rows.len() as u64, of_rows);
        Ok(())
    }

    /// Fails if the data is not that of the first message.
    pub(in crate::verbs::eval) fn check_data(&mut self, of_rows: u64, data: String) -> Result<(), LaunchError> {
        let data = (of_rows, data);
        if self.data.get_or_insert_with(|| data.clone()) != &data {
            refuse!(DataChanged, "the data has changed while its photos were located; repeat the command");
        }
        Ok(())
    }

    /// Begins an attempt. Keeps the pieces whose rows are all there, if `is_whole` is true for them too, and drops all
    /// other rows. Returns the numbers of the kept pieces, ascending.
    pub(in crate::verbs::eval) fn begin(&mut self, is_whole: impl Fn(&Range<u64>) -> bool) -> Vec<u64> {
        self.display = Display::new();
        let Some((count, _)) = self.data else { return Vec::new() };
        let size = piece_rows(count);
        let indices = |piece: u64| piece * size..count.min((piece + 1) * size);
        let is_kept = |piece: &u64| {
            let rows = indices(*piece);
            self.rows.range(rows.clone()).count() as u64 == rows.end - rows.start && is_whole(&rows)
        };
        let kept: Vec<u64> = (0..count.div_ceil(size)).filter(is_kept).collect();
        self.rows.retain(|index, _| kept.binary_search(&(index / size)).is_ok());
        if !kept.is_empty() {
            tracing::info!("{} of {count} photos are located already", self.rows.len());
        }
        kept
    }

    /// Ends an attempt: removes the progress bar.
    pub(in crate::verbs::eval) fn end(&mut self) {
        self.display.finish();
    }

    /// The number of all rows; `None` before the first message.
    pub(in crate::verbs::eval) fn count(&self) -> Option<u64> {
        self.data.as_ref().map(|(count, _)| *count)
    }

    /// The rows in the order of the data.
    pub(in crate::verbs::eval) fn rows(&self) -> impl ExactSizeIterator<Item = &Row> {
        self.rows.values()
    }

    /// The rows in the order of the data.
    pub(in crate::verbs::eval) fn into_rows(self) -> impl Iterator<Item = Row> {
        self.rows.into_values()
    }

    /// Whether exactly the first `count` rows are there.
    pub(in crate::verbs::eval) fn has_all(&self, count: u64) -> bool {
        self.rows.len() as u64 == count && self.rows.last_key_value().is_none_or(|(last, _)| last + 1 == count)
    }
}

#[cfg(test)]
mod tests {
    use locdiff_core::exit_code::{ExitCode, HasExitCode as _};

    use super::*;

    const COUNT: u64 = 600;

    fn add(kept: &mut KeptRows<u64>, rows: impl IntoIterator<Item = u64>) -> Result<(), LaunchError> {
        kept.add(COUNT, "v".into(), rows.into_iter().map(|index| (index, index)))
    }

    #[test]
    fn only_whole_pieces_outlive_a_failed_attempt() {
        let mut kept = KeptRows::default();
        assert_eq!(kept.begin(|_| true), [0; 0]);
        // Two workers: one has done a piece and a half, the other one all of its rows.
        add(&mut kept, (0..300).chain(512..COUNT)).expect("no row comes twice");
        assert_eq!(kept.begin(|_| true), [0, 2]);
        assert_eq!(kept.rows().count(), 256 + 88);
        add(&mut kept, 256..512).expect("the rows of the incomplete piece were dropped");
        assert!(kept.has_all(COUNT) && kept.into_rows().eq(0..COUNT));
    }

    #[test]
    fn piece_that_the_caller_rejects_is_located_again() {
        let mut kept = KeptRows::default();
        add(&mut kept, 0..COUNT).expect("no row comes twice");
        assert_eq!(kept.begin(|rows| !rows.contains(&300)), [0, 2]);
        assert!(!kept.has_all(COUNT));
    }

    #[test]
    fn changed_data_and_repeated_rows_are_refused() {
        let mut kept = KeptRows::default();
        add(&mut kept, 0..10).expect("no row comes twice");
        let changed = kept.add(COUNT, "w".into(), [(10, 10)]).expect_err("the version differs");
        assert_eq!(changed.exit_code(), ExitCode::DataChanged);
        let twice = add(&mut kept, [4]).expect_err("row 4 is there").to_string();
        assert!(twice.contains("row 4 was received twice"), "{twice}");
    }
}
