//! `--cells`: divides places into training and test places by cells, so that the test places lie evenly over the area
//! that the list covers.
//!
//! One place in each cell is a test place. In cells that are held out, all other places are unused, so no training
//! place is in the same cell as such a test place. Which places are test places and which cells are held out depends on
//! hashes of the cells, their size and the coordinates alone, not on a seed or on the order of the places. The parts of
//! the same list and cell size, simulated with any seeds, therefore never share a place. With another cell size, most
//! cells that have many places have another test place.

use std::collections::{HashMap, HashSet};

use locdiff_core::geo::{Place, cell_of};
use locdiff_core::protocol::{CellPart, CellSplit};
use locdiff_core::random::{SPLITMIX_INCREMENT, splitmix};

/// Returns the places of the part `split.part`. Training places keep their order and may repeat. Each test place occurs
/// once. Their order is that of the hashes of their cells, so the first test places are as good as a random choice. The
/// hashes of the places themselves would not do: the lowest hash of many is low, so places of full cells would come
/// first.
pub fn places_of_part(places: &[Place], split: &CellSplit) -> Vec<Place> {
    let cell = |place: &Place| cell_of(*place, split.degrees);
    let is_held_out = |cell: u64| fraction(hash(&[cell])) < split.held_out;
    // In each cell, the place with the lowest hash is the test place.
    let mut kept: HashMap<u64, (u64, Place)> = HashMap::new();
    let place_hash = |place: &Place| place_hash(*place, split.degrees);
    for place in places {
        let candidate = (place_hash(place), *place);
        let best = kept.entry(cell(place)).or_insert(candidate);
        if candidate.0 < best.0 {
            *best = candidate;
        }
    }
    if split.part == CellPart::Train {
        let kept: HashSet<u64> = kept.into_values().map(|(hash, _)| hash).collect();
        let is_used = |place: &Place| !is_held_out(cell(place)) && !kept.contains(&place_hash(place));
        return places.iter().copied().filter(is_used).collect();
    }
    kept.retain(|cell, _| is_held_out(*cell) == (split.part == CellPart::HeldOut));
    let mut kept: Vec<(u64, Place)> = kept.into_iter().map(|(cell, (_, place))| (hash(&[cell]), place)).collect();
    kept.sort_unstable_by_key(|(cell_hash, _)| *cell_hash);
    kept.into_iter().map(|(_, place)| place).collect()
}

/// A hash of coordinates and of the cell size. Rows with the same coordinates are the same place.
fn place_hash(place: Place, cell_degrees: f64) -> u64 {
    // Adding 0 turns -0 into 0, which is the same coordinate.
    hash(&[cell_degrees, place.latitude().0, place.longitude().0].map(|degrees| (degrees + 0.0).to_bits()))
}

fn hash(words: &[u64]) -> u64 {
    words.iter().fold(0, |hash, word| splitmix((hash ^ word).wrapping_add(SPLITMIX_INCREMENT)))
}

/// Maps a hash to a number from 0 to just below 1.
fn fraction(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1_u64 << 53) as f64
}
