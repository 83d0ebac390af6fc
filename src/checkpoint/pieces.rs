//! A part that several ranks wrote, each its piece of a split model, put together again.
//!
//! Every piece says, in its metadata under [`DIVISIONS`], how each split tensor was divided; what is not named there is whole in the
//! first piece and in no other.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tch::Tensor;

/// Key of the metadata of a piece: a JSON object from names of tensors to [`Division`]s.
pub const DIVISIONS: &str = "divisions";

/// How a tensor was divided among pieces: each of `sections` equal parts of dimension `dim` into equal pieces, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Division {
    /// Along which dimension.
    pub dim: i64,
    /// Parts of it that were divided each on its own.
    pub sections: i64,
}

/// The divisions as metadata of a piece.
pub fn divisions_metadata(divisions: &BTreeMap<String, Division>) -> BTreeMap<String, String> {
    let text = serde_json::to_string(divisions).expect("names and small numbers are JSON");
    BTreeMap::from([(DIVISIONS.to_owned(), text)])
}

/// Tensors with their names, in the order of the file.
pub(super) type Named = Vec<(String, Tensor)>;

/// The whole tensors of all pieces, in order; or what does not fit.
pub(super) fn join(metadata: &[BTreeMap<String, String>], pieces: Vec<Named>) -> Result<Named, String> {
    let first = metadata.first().and_then(|metadata| metadata.get(DIVISIONS));
    let text = first.ok_or_else(|| format!("its metadata has no `{DIVISIONS}`"))?;
    if let Some(piece) = metadata.iter().position(|metadata| metadata.get(DIVISIONS) != first) {
        return Err(format!("piece {piece} has other `{DIVISIONS}`"));
    }
    let divisions: BTreeMap<String, Division> =
        serde_json::from_str(text).map_err(|error| format!("`{DIVISIONS}` cannot be understood: {error}"))?;
    let mut others: Vec<BTreeMap<String, Tensor>> = Vec::new();
    let mut pieces = pieces.into_iter();
    let first = pieces.next().unwrap_or_default();
    others.extend(pieces.map(|piece| piece.into_iter().collect()));
    let mut whole = Vec::with_capacity(first.len());
    for (name, tensor) in first {
        let Some(division) = divisions.get(&name) else {
            whole.push((name, tensor));
            continue;
        };
        let mut own = vec![tensor];
        for (piece, other) in (1..).zip(&mut others) {
            own.push(other.remove(&name).ok_or_else(|| format!("piece {piece} has no tensor {name}"))?);
        }
        let joined = division.join(&own).map_err(|reason| format!("tensor {name}: {reason}"))?;
        whole.push((name, joined));
    }
    let stray = (1..).zip(&others).find_map(|(piece, other)| Some((piece, other.keys().next()?)));
    if let Some((piece, name)) = stray {
        return Err(format!("tensor {name} of piece {piece} is not one that the first piece divides"));
    }
    Ok(whole)
}

impl Division {
    fn join(self, pieces: &[Tensor]) -> Result<Tensor, String> {
        let shape = pieces[0].size();
        let length = usize::try_from(self.dim).ok().and_then(|dim| shape.get(dim)).copied().unwrap_or(0);
        if self.sections < 1 || length == 0 || length % self.sections != 0 {
            return Err(format!("{shape:?} cannot be a piece of {} sections of dimension {}", self.sections, self.dim));
        }
        if let Some(other) = pieces.iter().find(|piece| piece.size() != shape || piece.kind() != pieces[0].kind()) {
            return Err(format!("pieces of shapes {shape:?} and {:?}", other.size()));
        }
        let length = length / self.sections;
        let sections = (0..self.sections).flat_map(|section| pieces.iter().map(move |piece| (section, piece)));
        let parts: Result<Vec<Tensor>, _> =
            sections.map(|(section, piece)| piece.f_narrow(self.dim, section * length, length)).collect();
        parts.and_then(|parts| Tensor::f_cat(&parts, self.dim)).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(tensors: &[(&str, &Tensor)]) -> Named {
        tensors.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.copy())).collect()
    }

    /// Rows, columns, halves of rows, and one that is whole.
    fn divisions() -> BTreeMap<String, Division> {
        let division = |dim, sections| Division { dim, sections };
        let all = [("rows", division(0, 1)), ("columns", division(1, 1)), ("halves", division(0, 2))];
        all.into_iter().map(|(name, division)| (name.to_owned(), division)).collect()
    }

    #[test]
    fn pieces_make_the_whole_again() {
        let whole = Tensor::arange(24, (tch::Kind::Float, tch::Device::Cpu)).view([8, 3]).tr().contiguous();
        let whole = Tensor::cat(&[&whole, &(&whole + 100.0)], 0).view([6, 8]);
        let rows = |first: i64| whole.narrow(0, first, 3);
        let columns = |first: i64| whole.narrow(1, first, 4);
        let wide = Tensor::cat(&[&whole, &whole, &whole, &whole], 0);
        // Halves of 12 rows: rows 0..6 and 12..18 are the first piece's.
        let halves = |first: i64| Tensor::cat(&[wide.narrow(0, first, 6), wide.narrow(0, 12 + first, 6)], 0);
        let bias = Tensor::from_slice(&[1.0_f32]);
        let (first, second) = (
            named(&[("rows", &rows(0)), ("columns", &columns(0)), ("bias", &bias), ("halves", &halves(0))]),
            named(&[("rows", &rows(3)), ("columns", &columns(4)), ("halves", &halves(6))]),
        );
        let metadata = divisions_metadata(&divisions());
        let joined = join(&[metadata.clone(), metadata], vec![first, second]).expect("fits");
        let names: Vec<&str> = joined.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["rows", "columns", "bias", "halves"]);
        for ((name, got), want) in joined.iter().zip([&whole, &whole, &bias, &wide]) {
            assert!(got.equal(want), "{name}");
        }
    }

    #[test]
    fn pieces_that_do_not_fit_are_named() {
        let square = Tensor::zeros([2, 2], (tch::Kind::Float, tch::Device::Cpu));
        let metadata = [divisions_metadata(&divisions()), divisions_metadata(&divisions())];
        let error = |pieces: Vec<Named>| join(&metadata, pieces).expect_err("does not fit");
        let (rows, halves) = (named(&[("rows", &square)]), named(&[("halves", &square.narrow(0, 0, 1))]));
        assert_eq!(error(vec![rows.clone_all(), vec![]]), "piece 1 has no tensor rows");
        assert!(error(vec![halves.clone_all(), halves]).contains("cannot be a piece of 2 sections"));
        assert!(error(vec![vec![], rows.clone_all()]).contains("tensor rows of piece 1"));
        let narrow = named(&[("rows", &square.narrow(1, 0, 1))]);
        assert!(error(vec![rows, narrow]).contains("pieces of shapes [2, 2] and [2, 1]"));
        assert!(join(&[BTreeMap::new()], vec![]).expect_err("no metadata").contains("no `divisions`"));
        let other = [metadata[0].clone(), BTreeMap::new()];
        assert_eq!(join(&other, vec![vec![], vec![]]).expect_err("other metadata"), "piece 1 has other `divisions`");
    }

    trait CloneAll {
        fn clone_all(&self) -> Named;
    }

    impl CloneAll for Named {
        fn clone_all(&self) -> Named {
            self.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
        }
    }
}
