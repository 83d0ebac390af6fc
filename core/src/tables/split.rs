//! Cuts a table of photos into parts that share neither a place nor an author.
//!
//! The Earth is divided into cells. A hash of the seed and the cell decides which part gets all rows of the cell, so
//! the result does not depend on the order of rows. If the table has an author column, each author stays only in the
//! part in which the author has the most rows (the first such part in a tie). The author's other rows are dropped. To
//! keep them, all photos that are connected by a chain of shared cells and authors would have to be in the same part,
//! and such chains connect nearly all photos.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use serde::Serialize;
use twox_hash::XxHash3_64;

use super::error::TableError;
use super::names::{AUTHOR_NAMES, ColumnNames, columns_named};
use super::reader::TableReader;
use crate::geo::{Place, cell_of};

/// A part of a table, and how much of the table it gets.
#[derive(Debug, Clone, PartialEq)]
pub struct PartShare {
    /// Name of the part.
    pub name: String,
    /// Share of all cells, above 0. The shares of all parts add up to 1.
    pub share: f64,
}

/// How to cut a table.
#[derive(Debug, Clone, PartialEq)]
pub struct TableCut {
    /// The parts.
    pub parts: Vec<PartShare>,
    /// Height of a cell, degrees of latitude.
    pub cell_degrees: f64,
    /// Decides which cells belong to which part.
    pub seed: u64,
    /// Name of the author column. `None`: the column with one of [`AUTHOR_NAMES`], if there is one.
    pub author_column: Option<String>,
}

/// The size of a part.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PartCounts {
    /// Name of the part.
    pub name: String,
    /// Number of rows.
    pub rows: usize,
    /// Number of different places (pairs of latitude and longitude).
    pub places: usize,
    /// Number of different authors; `None` if the table has no author column.
    pub authors: Option<usize>,
}

/// A table that was cut.
#[derive(Debug, Clone, PartialEq)]
pub struct CutTable {
    /// For each row of the table, the index of its part; `None` if the row was dropped.
    pub part_of_row: Vec<Option<usize>>,
    /// The parts.
    pub parts: Vec<PartCounts>,
    /// The author column that was used.
    pub author_column: Option<String>,
}

impl TableCut {
    /// Reads the table and assigns its rows to parts. It is an error if a part gets no rows.
    pub fn cut(&self, path: &Path) -> Result<CutTable, TableError> {
        let header = TableReader::open(path, ColumnNames::default(), false)?.header().to_vec();
        let author_column = self.author_column(path, &header)?;
        let names = ColumnNames { id: author_column.as_deref(), ..ColumnNames::default() };
        let (mut places, mut authors) = (Vec::new(), Vec::new());
        let mut numbers: HashMap<String, u32> = HashMap::new();
        for (row, number) in TableReader::open(path, names, author_column.is_some())?.zip(0..) {
            let row = row?;
            places.extend(row.place);
            if let Some(author) = row.id {
                if author.is_empty() {
                    let column = author_column.unwrap_or_default();
                    return Err(TableError::row(path, number, format!("`{column}` is empty, wanted an author")));
                }
                let next = numbers.len() as u32;
                authors.push(*numbers.entry(author).or_insert(next));
            }
        }
        if places.is_empty() {
            return Err(TableError::file(path, "has no rows"));
        }
        let part_of_row = self.part_of_rows(&places, &authors);
        let parts = self.counts(&part_of_row, &places, author_column.is_some().then_some(&authors));
        if let Some(empty) = parts.iter().find(|part| part.rows == 0) {
            let reason = format!(
                "part `{}` gets none of the {} rows; use smaller cells (--cell-degrees), a larger share or another \
                 --seed",
                empty.name,
                places.len()
            );
            return Err(TableError::file(path, reason));
        }
        Ok(CutTable { part_of_row, parts, author_column })
    }

    fn author_column(&self, path: &Path, header: &[String]) -> Result<Option<String>, TableError> {
        match &self.author_column {
            Some(name) if !header.contains(name) => {
                let found = header.join(", ");
                Err(TableError::file(path, format!("no column `{name}` for the author; found: {found}")))
            }
            Some(name) => Ok(Some(name.clone())),
            None => Ok(columns_named(header, AUTHOR_NAMES, None).first().map(|column| header[*column].clone())),
        }
    }

    /// Assigns rows to parts. `authors` is empty, or has the number of the author of each row.
    fn part_of_rows(&self, places: &[Place], authors: &[u32]) -> Vec<Option<usize>> {
        let by_cell: Vec<usize> = places.iter().map(|place| self.part_of_cell(*place)).collect();
        let mut rows_of_author: HashMap<u32, Vec<usize>> = HashMap::new();
        for (author, part) in authors.iter().zip(&by_cell) {
            rows_of_author.entry(*author).or_insert_with(|| vec![0; self.parts.len()])[*part] += 1;
        }
        let best = |rows: &Vec<usize>| (0..rows.len()).rev().max_by_key(|part| rows[*part]).unwrap_or(0);
        let part_of_author: HashMap<u32, usize> =
            rows_of_author.iter().map(|(author, rows)| (*author, best(rows))).collect();
        let stays = |row: usize, part: usize| authors.get(row).is_none_or(|author| part_of_author[author] == part);
        by_cell.into_iter().enumerate().map(|(row, part)| stays(row, part).then_some(part)).collect()
    }

    fn part_of_cell(&self, place: Place) -> usize {
        let hash = XxHash3_64::oneshot_with_seed(self.seed, &cell_of(place, self.cell_degrees).to_le_bytes());
        let at = hash as f64 / 2.0_f64.powi(64);
        let ends = self.parts.iter().scan(0.0, |sum, part| {
            *sum += part.share;
            Some(*sum)
        });
        ends.take_while(|end| *end <= at).count().min(self.parts.len() - 1)
    }

    fn counts(&self, part_of_row: &[Option<usize>], places: &[Place], authors: Option<&Vec<u32>>) -> Vec<PartCounts> {
        let of_part = |(part, PartShare { name, .. }): (usize, &PartShare)| {
            let rows = || (0..places.len()).filter(move |row| part_of_row[*row] == Some(part));
            let bits = |place: Place| (place.latitude().0.to_bits(), place.longitude().0.to_bits());
            let places: HashSet<(u64, u64)> = rows().map(|row| bits(places[row])).collect();
            let authors = authors.map(|authors| rows().map(|row| authors[row]).collect::<HashSet<u32>>().len());
            PartCounts { name: name.clone(), rows: rows().count(), places: places.len(), authors }
        };
        self.parts.iter().enumerate().map(of_part).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn cut(author_column: Option<&str>) -> TableCut {
        let part = |name: &str, share| PartShare { name: name.to_owned(), share };
        TableCut {
            parts: vec![part("train", 0.8), part("validation", 0.1), part("test", 0.1)],
            cell_degrees: 0.5,
            seed: 3,
            author_column: author_column.map(str::to_owned),
        }
    }

    /// 4000 photos of 800 authors. Each author has four photos near one place and one photo elsewhere.
    fn lines() -> Vec<String> {
        let line = |row: usize| {
            let author = row / 5;
            let near = if row % 5 < 4 { author } else { row * 7919 };
            let (latitude, longitude, minute) = (near * 7 % 60, near * 13 % 90, row * 29 % 5);
            format!("{row},{latitude}.{minute},{longitude}.{minute},u{author}")
        };
        (0..4000).map(line).collect()
    }

    fn write(lines: &[String]) -> tempfile::TempPath {
        let file = tempfile::Builder::new().suffix(".csv").tempfile().expect("a temporary file can be created");
        let text = format!("id,lat,lon,user_id\n{}\n", lines.join("\n"));
        std::fs::write(file.path(), text).expect("the file is writable");
        file.into_temp_path()
    }

    /// The part of each line.
    fn parts(cut: &TableCut, lines: &[String]) -> BTreeMap<String, Option<usize>> {
        let found = cut.cut(&write(lines)).expect("the table is valid");
        lines.iter().cloned().zip(found.part_of_row).collect()
    }

    #[test]
    fn parts_share_neither_cells_nor_authors_whatever_the_order_of_rows() {
        let mut lines = lines();
        let found = cut(None).cut(&write(&lines)).expect("the table is valid");
        assert_eq!(found.author_column.as_deref(), Some("user_id"));
        let (mut part_of_cell, mut part_of_author) = (HashMap::new(), HashMap::new());
        for (line, part) in lines.iter().zip(&found.part_of_row) {
            let Some(part) = part else { continue };
            let cells: Vec<&str> = line.split(',').collect();
            let degrees = |text: &str| crate::geo::Degrees(text.parse().expect("the text is a number"));
            let place = Place::new(degrees(cells[1]), degrees(cells[2])).expect("the place is valid");
            assert_eq!(part_of_cell.entry(cell_of(place, 0.5)).or_insert(part), &part, "a cell is in two parts");
            assert_eq!(part_of_author.entry(cells[3].to_owned()).or_insert(part), &part, "an author is in two parts");
        }
        let kept: usize = found.parts.iter().map(|part| part.rows).sum();
        assert_eq!(kept, found.part_of_row.iter().flatten().count());
        assert!(kept > 3400 && kept < 3950, "{kept} rows are kept: {:?}", found.parts);
        assert_eq!(found.parts.iter().filter_map(|part| part.authors).sum::<usize>(), part_of_author.len());
        let all = parts(&cut(None), &lines);
        lines.reverse();
        lines.rotate_left(1234);
        assert_eq!(parts(&cut(None), &lines), all, "the order of rows changes the parts");
        assert_ne!(parts(&TableCut { seed: 4, ..cut(None) }, &lines), all, "the seed does not change the parts");
    }

    #[test]
    fn shares_are_right_and_no_row_is_dropped_without_authors() {
        // One row per cell.
        let lines: Vec<String> = (0..4000).map(|row| format!("{row},{},{},u", row / 80, row % 80)).collect();
        let file = write(&lines);
        let text = std::fs::read_to_string(&file).expect("the file was just written").replace("user_id", "camera");
        std::fs::write(&file, text).expect("the file is writable");
        let found = cut(None).cut(&file).expect("the table is valid");
        assert_eq!((found.author_column, found.parts[0].authors), (None, None));
        let rows: Vec<usize> = found.parts.iter().map(|part| part.rows).collect();
        assert_eq!(rows.iter().sum::<usize>(), 4000);
        // Three standard deviations of a binomial distribution are 76 and 57 rows.
        assert!(rows[0].abs_diff(3200) < 76 && rows[1].abs_diff(400) < 57 && rows[2].abs_diff(400) < 57, "{rows:?}");
        // All rows have the same author, who is then in one part only.
        let found = cut(Some("camera")).cut(&file).expect_err("only one part gets rows").to_string();
        assert!(found.contains("part `validation` gets none of the 4000 rows"), "{found}");
    }

    #[test]
    fn author_stays_where_most_of_the_rows_are() {
        let cut = &cut(None);
        let degrees = |number: usize| crate::geo::Degrees(number as f64);
        let place = |at: usize| Place::new(degrees(at % 80), degrees(at / 80)).expect("the place is valid");
        // One author with the given number of rows in each part, all in different cells.
        let kept = |rows: [usize; 3]| -> Vec<usize> {
            let of_part =
                |part| (0..).map(place).filter(move |place| cut.part_of_cell(*place) == part).take(rows[part]);
            let places: Vec<Place> = (0..3).flat_map(of_part).collect();
            cut.part_of_rows(&places, &vec![7; places.len()]).into_iter().flatten().collect()
        };
        assert_eq!(kept([2, 3, 1]), [1; 3]);
        assert_eq!(kept([1, 2, 2]), [1; 2], "a tie goes to the first part");
    }

    #[test]
    fn bad_tables_are_refused_with_a_reason() {
        let error = |lines: &[&str], cut: TableCut| {
            let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
            cut.cut(&write(&lines)).expect_err("the table is invalid").to_string()
        };
        assert!(error(&[], cut(None)).ends_with("has no rows"));
        assert!(error(&["1,2,3,"], cut(None)).ends_with("row 0: `user_id` is empty, wanted an author"));
        assert!(error(&["1,91,3,u"], cut(None)).contains("row 0: latitude is 91"));
        let missing = error(&["1,2,3,u"], cut(Some("owner")));
        assert!(missing.ends_with("no column `owner` for the author; found: id, lat, lon, user_id"), "{missing}");
    }
}
