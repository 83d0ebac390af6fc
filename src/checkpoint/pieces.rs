//! Joins the pieces of one part of a checkpoint. Each tensor-parallel rank wrote one piece.
//!
//! In the metadata of every piece, the key [`DIVISIONS`] lists the tensors that were split, and how each was divided. A
//! tensor that is not listed under this key is whole, and only the first piece contains it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tch::Tensor;

/// Key in the metadata of every piece. The value is a JSON object that maps tensor names to [`Division`]s.
pub const DIVISIONS: &str = "divisions";

/// How a tensor was divided. Dimension `dim` of the whole tensor consists of `sections` sections of equal length. Each
/// section is cut into equal pieces, one per rank, in the order of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Division {
    /// The dimension that is cut.
    pub dim: i64,
    /// The number of sections of dimension `dim`. Each section is cut separately.
    pub sections: i64,
}

/// The metadata of a piece. `divisions` maps the name of each split tensor to its division.
pub fn divisions_metadata(divisions: &BTreeMap<String, Division>) -> BTreeMap<String, String> {
    let text = serde_json::to_string(divisions).expect("a map of strings to numbers is always valid JSON");
    BTreeMap::from([(DIVISIONS.to_owned(), text)])
}

/// Tensors with their names, in file order.
pub type NamedTensors = Vec<(String, Tensor)>;

/// Joins all pieces into whole tensors and returns them in the order of the first piece. The error names the piece or
/// the tensor that does not match.
pub(super) fn join(metadata: &[BTreeMap<String, String>], pieces: Vec<NamedTensors>) -> Result<NamedTensors, String> {
    let first = metadata.first().and_then(|metadata| metadata.get(DIVISIONS));
    let text = first.ok_or_else(|| format!("the metadata has no `{DIVISIONS}`"))?;
    if let Some(piece) = metadata.iter().position(|metadata| metadata.get(DIVISIONS) != first) {
        return Err(format!("`{DIVISIONS}` of piece {piece} differs from `{DIVISIONS}` of piece 0"));
    }
    let divisions: BTreeMap<String, Division> =
        serde_json::from_str(text).map_err(|error| format!("cannot parse `{DIVISIONS}`: {error}"))?;
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
            own.push(other.remove(&name).ok_or_else(|| format!("piece {piece} has no tensor `{name}`"))?);
        }
        let joined = division.join(&own).map_err(|reason| format!("tensor {name}: {reason}"))?;
        whole.push((name, joined));
    }
    let stray = (1..).zip(&others).find_map(|(piece, other)| Some((piece, other.keys().next()?)));
    if let Some((piece, name)) = stray {
        return Err(format!("piece {piece} has a tensor `{name}`, which is not a split tensor of piece 0"));
    }
    Ok(whole)
}

impl Division {
    fn join(self, pieces: &[Tensor]) -> Result<Tensor, String> {
        let shape = pieces[0].size();
        let length = usize::try_from(self.dim).ok().and_then(|dim| shape.get(dim)).copied().unwrap_or(0);
        if self.sections < 1 || length == 0 || length % self.sections != 0 {
            let Self { dim, sections } = self;
            return Err(format!(
                "a piece of shape {shape:?} cannot be divided into {sections} sections along dimension {dim}"
            ));
        }
        if let Some(other) = pieces.iter().find(|piece| piece.size() != shape || piece.kind() != pieces[0].kind()) {
            return Err(format!(
                "all pieces must have one shape and one type; got shapes {shape:?} and {:?}, types {:?} and {:?}",
                other.size(),
                pieces[0].kind(),
                other.kind()
            ));
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

    fn named(tensors: &[(&str, &Tensor)]) -> NamedTensors {
        tensors.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.copy())).collect()
    }

    /// One tensor divided by rows, one by columns, and one by rows in two sections.
    fn divisions() -> BTreeMap<String, Division> {
        let division = |dim, sections| Division { dim, sections };
        let all = [("rows", division(0, 1)), ("columns", division(1, 1)), ("halves", division(0, 2))];
        all.into_iter().map(|(name, division)| (name.to_owned(), division)).collect()
    }

    #[test]
    fn joined_pieces_equal_the_whole_tensors() {
        let whole = Tensor::arange(24, (tch::Kind::Float, tch::Device::Cpu)).view([8, 3]).tr().contiguous();
        let whole = Tensor::cat(&[&whole, &(&whole + 100.0)], 0).view([6, 8]);
        let rows = |first: i64| whole.narrow(0, first, 3);
        let columns = |first: i64| whole.narrow(1, first, 4);
        let wide = Tensor::cat(&[&whole, &whole, &whole, &whole], 0);
        // `wide` has 24 rows in two halves. The first piece has the first six rows of each half: 0..6 and 12..18.
        let halves = |first: i64| Tensor::cat(&[wide.narrow(0, first, 6), wide.narrow(0, 12 + first, 6)], 0);
        let bias = Tensor::from_slice(&[1.0_f32]);
        let (first, second) = (
            named(&[("rows", &rows(0)), ("columns", &columns(0)), ("bias", &bias), ("halves", &halves(0))]),
            named(&[("rows", &rows(3)), ("columns", &columns(4)), ("halves", &halves(6))]),
        );
        let metadata = divisions_metadata(&divisions());
        let joined = join(&[metadata.clone(), metadata], vec![first, second]).expect("the pieces match");
        let names: Vec<&str> = joined.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["rows", "columns", "bias", "halves"]);
        for ((name, got), want) in joined.iter().zip([&whole, &whole, &bias, &wide]) {
            assert!(got.equal(want), "tensor {name} differs after joining");
        }
    }

    #[test]
    fn errors_name_the_piece_that_does_not_fit() {
        let square = Tensor::zeros([2, 2], (tch::Kind::Float, tch::Device::Cpu));
        let metadata = [divisions_metadata(&divisions()), divisions_metadata(&divisions())];
        let error = |pieces: Vec<NamedTensors>| join(&metadata, pieces).expect_err("the pieces do not match");
        let (rows, halves) = (named(&[("rows", &square)]), named(&[("halves", &square.narrow(0, 0, 1))]));
        assert_eq!(error(vec![rows.clone_all(), vec![]]), "piece 1 has no tensor `rows`");
        assert!(error(vec![halves.clone_all(), halves]).contains("cannot be divided into 2 sections"));
        assert!(error(vec![vec![], rows.clone_all()]).contains("piece 1 has a tensor `rows`"));
        let narrow = named(&[("rows", &square.narrow(1, 0, 1))]);
        assert!(error(vec![rows, narrow]).contains("shapes [2, 2] and [2, 1]"));
        assert!(join(&[BTreeMap::new()], vec![]).expect_err("the metadata is empty").contains("no `divisions`"));
        let other = [metadata[0].clone(), BTreeMap::new()];
        let error = join(&other, vec![vec![], vec![]]).expect_err("the metadata differs");
        assert_eq!(error, "`divisions` of piece 1 differs from `divisions` of piece 0");
    }

    trait CloneAll {
        fn clone_all(&self) -> NamedTensors;
    }

    impl CloneAll for NamedTensors {
        fn clone_all(&self) -> NamedTensors {
            self.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
        }
    }
}
