//! Reads the scalars of a run back from its event files, for curves outside of TensorBoard.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use prost::Message;

use super::error::BoardError;
use super::event::{Event, EventContent, Payload};
use super::record::{Next, RecordReader};
use super::resume::event_files;
use crate::files::FileError;

/// The values of each tag by step.
pub type ScalarCurves = BTreeMap<String, BTreeMap<u64, f64>>;

/// Reads the scalars in all event files of `folder`. If a step has two values, the later one counts. An incomplete record
/// at the end of a file is ignored, because the run may still be writing it. In a damaged file, the records before the
/// damage are read, and a warning is logged.
pub fn read_scalars(folder: &Path) -> Result<ScalarCurves, BoardError> {
    let mut curves = ScalarCurves::new();
    for path in event_files(folder)? {
        let mut reader = File::open(&path).and_then(RecordReader::new).map_err(FileError::at(&path))?;
        loop {
            let damage = match reader.next().map_err(FileError::at(&path))? {
                Next::Record(data) => match Event::decode(data.as_slice()) {
                    Ok(event) => {
                        add(&mut curves, event);
                        continue;
                    }
                    Err(error) => error.to_string(),
                },
                Next::End | Next::Torn => break,
                Next::Damaged(reason) => reason.to_owned(),
            };
            tracing::warn!("{}: byte {}: {damage}; the rest of the file is not read", path.display(), reader.offset());
            break;
        }
    }
    Ok(curves)
}

fn add(curves: &mut ScalarCurves, event: Event) {
    let (Ok(step), Some(EventContent::Summary(summary))) = (u64::try_from(event.step), event.content) else { return };
    for value in summary.value {
        if let Some(Payload::Simple(number)) = value.payload {
            curves.entry(value.tag).or_default().insert(step, f64::from(number));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::tensorboard::Board;

    #[test]
    fn scalars_of_all_files_are_read_up_to_a_torn_or_damaged_record() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let mut board = Board::open(folder.path(), None).expect("the event file can be created");
        for step in 1..=3 {
            board.scalars(step, &[("loss", 1.0 / step as f64), ("rate", 0.5)]).expect("the event file can be written");
        }
        board.text(3, "config", "text").expect("the event file can be written");
        let mut later = Board::open_additional(folder.path(), 3).expect("the event file can be created");
        later.scalars(3, &[("loss", 0.25), ("test/score", f64::INFINITY)]).expect("the event file can be written");
        let read = || read_scalars(folder.path()).expect("the folder can be read");
        let want = [(1, 1.0), (2, 0.5), (3, 0.25)];
        assert_eq!(read()["loss"], BTreeMap::from(want));
        assert_eq!(read().keys().collect::<Vec<_>>(), ["loss", "rate", "test/score"]);
        let append = |path: &Path, bytes: &[u8]| {
            let mut file = File::options().append(true).open(path).expect("the event file exists");
            file.write_all(bytes).expect("the event file can be written");
        };
        append(board.path(), &[7, 0, 0]);
        append(later.path(), &[9; 64]);
        assert_eq!(read()["loss"], BTreeMap::from(want), "a torn or damaged record hides the records before it");
    }
}
