//! Rows as they come from the workers, put in the order of the data.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use locdiff_core::geo::{Degrees, Place, UnitVector};
use locdiff_core::protocol::{LocatedRow, ToLauncher, TuningErrors};

use crate::error::{LaunchError, reported};
use crate::supervisor::Observer;

/// Time between two lines about progress.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// What has been located so far.
#[derive(Debug)]
pub(super) struct Gather {
    rows: BTreeMap<u64, LocatedRow>,
    /// A row that was told twice.
    twice: Option<u64>,
    said: Instant,
}

impl Default for Gather {
    fn default() -> Self {
        Self { rows: BTreeMap::new(), twice: None, said: Instant::now() }
    }
}

impl Gather {
    /// The rows, in order.
    pub(super) fn rows(&self) -> impl ExactSizeIterator<Item = &LocatedRow> {
        self.rows.values()
    }

    /// The rows with the errors that settings are chosen by.
    pub(super) fn tuning(self) -> anyhow::Result<Vec<(UnitVector, TuningErrors)>> {
        let one = |row: LocatedRow| {
            let [latitude, longitude] = row.truth.map(Degrees);
            let errors = row.tuning.with_context(|| format!("row {} was not tried with any setting", row.index))?;
            Ok((Place::new(latitude, longitude)?.into(), errors))
        };
        self.rows.into_values().map(one).collect()
    }

    /// An error unless each of so many rows has come once, with the same methods as the others.
    pub(super) fn check(&self, count: u64) -> Result<(), LaunchError> {
        let got = self.rows.len() as u64;
        let is_dense = self.rows.last_key_value().is_none_or(|(last, _)| last + 1 == got);
        let methods = |row: &LocatedRow| row.answers.iter().map(|(method, _)| *method).collect::<Vec<_>>();
        let first = self.rows.values().next().map(methods);
        let is_even = self.rows.values().all(|row| Some(methods(row)) == first);
        if got == count && is_dense && is_even && self.twice.is_none() {
            return Ok(());
        }
        let twice = self.twice.map_or_else(String::new, |row| format!(", row {row} twice"));
        Err(reported!(WorkerFailed, "{got} of {count} rows were located{twice}: this is a bug"))
    }
}

impl Observer for Gather {
    fn report(&mut self, message: ToLauncher) {
        let ToLauncher::Located(located) = message else { return };
        for row in located.rows {
            let index = row.index;
            if self.rows.insert(index, row).is_some() {
                self.twice = Some(index);
            }
        }
        if self.said.elapsed() >= SAY_EVERY {
            self.said = Instant::now();
            tracing::info!("{} of {} rows located", self.rows.len(), located.of_rows);
        }
    }
}

#[cfg(test)]
mod tests {
    use locdiff_core::protocol::{Located, Method};

    use super::*;

    fn row(index: u64) -> LocatedRow {
        let answers = vec![(Method::Locdiff, [1.0, 2.0])];
        LocatedRow {
            index,
            id: index.to_string(),
            truth: [1.0, 2.0],
            answers,
            sample: [1.0, 2.0],
            out_of_range: false,
            tuning: None,
        }
    }

    fn told(indices: &[u64]) -> Gather {
        let mut gather = Gather::default();
        let rows = indices.iter().map(|index| row(*index)).collect();
        gather.report(ToLauncher::Located(Located { of_rows: 4, rows }));
        gather
    }

    #[test]
    fn every_row_comes_once_in_any_order_or_it_is_an_error() {
        let gather = told(&[2, 3, 0, 1]);
        gather.check(4).expect("whole");
        assert_eq!(gather.rows().map(|row| row.index).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(told(&[0, 1, 3]).check(4).is_err());
        assert!(told(&[0, 1, 2, 4]).check(4).is_err());
        let error = told(&[0, 1, 2, 3, 1]).check(4).expect_err("twice").to_string();
        assert!(error.contains("row 1 twice"), "{error}");
    }
}
