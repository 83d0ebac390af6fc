//! Chooses some of many positions to show.

/// Selects `wanted` of `count` positions, evenly spaced from the first to the last. If `count` is smaller than
/// `wanted`, selects all positions.
pub fn spread(count: usize, wanted: usize) -> impl Iterator<Item = usize> {
    let wanted = wanted.min(count);
    (0..wanted).map(move |index| if wanted == 1 { count - 1 } else { index * (count - 1) / (wanted - 1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_includes_the_first_and_the_last_position() {
        assert_eq!(spread(20, 8).collect::<Vec<_>>(), [0, 2, 5, 8, 10, 13, 16, 19]);
        assert_eq!(spread(3, 8).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(spread(1, 8).collect::<Vec<_>>(), [0]);
        assert_eq!(spread(0, 8).count(), 0);
    }
}
