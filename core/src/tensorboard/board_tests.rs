//! Tests of the event file writer. They read files back with a reader that shares only the message types with the
//! writer.

use std::collections::BTreeSet;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::exit_code::HasExitCode;

/// Masked CRC-32C, computed bit by bit.
fn masked(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        }
    }
    (!crc).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().expect("a CRC has four bytes"))
}

/// The events of all records of a file. Panics if a record is incomplete or damaged.
fn read_back(mut bytes: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    while !bytes.is_empty() {
        let length = u64::from_le_bytes(bytes[..8].try_into().expect("a length has eight bytes")) as usize;
        assert_eq!(number(&bytes[8..12]), masked(&bytes[..8]), "the checksum of a length is wrong");
        let data = &bytes[12..12 + length];
        assert_eq!(number(&bytes[12 + length..16 + length]), masked(data), "the checksum of a record is wrong");
        events.push(Event::decode(data).expect("the record is an event"));
        bytes = &bytes[16 + length..];
    }
    assert!(matches!(&events[0].content, Some(EventContent::FileVersion(version)) if version == "brain.Event:2"));
    events
}

/// Step and tag of every value in the folder, in the order in which TensorBoard reads them. Panics if the same step and
/// tag occur twice or if steps decrease.
fn all_values(folder: &Path) -> Vec<(i64, String)> {
    let mut values = Vec::new();
    for path in event_files(folder).expect("the folder can be read") {
        for event in read_back(&std::fs::read(path).expect("the file can be read")) {
            if let Some(EventContent::Summary(summary)) = event.content {
                values.extend(summary.value.into_iter().map(|value| (event.step, value.tag)));
            }
        }
    }
    assert_eq!(values.iter().collect::<BTreeSet<_>>().len(), values.len(), "recorded twice: {values:?}");
    assert!(values.is_sorted_by_key(|(step, _)| *step), "steps decrease: {values:?}");
    values
}

fn open(folder: &TempDir, resume_step: Option<u64>) -> Board {
    Board::open(folder.path(), resume_step).expect("the event file can be created")
}

fn write_steps(board: &mut Board, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        board.scalars(step, &[("loss", step as f64), ("rate", 0.5)]).expect("the event file is writable");
    }
}

fn steps(folder: &TempDir) -> Vec<i64> {
    all_values(folder.path()).into_iter().filter(|(_, tag)| tag == "loss").map(|(step, _)| step).collect()
}

#[test]
fn values_are_read_back_unchanged() {
    let folder = TempDir::new().expect("a temporary folder can be created");
    let mut board = open(&folder, None);
    board.text(0, "config", "**L** = 47").expect("the event file is writable");
    let scalars = [("loss", 0.1), ("norm", f64::NAN), ("best", f64::INFINITY)];
    board.scalars(7, &scalars).expect("the event file is writable");
    let events = read_back(&std::fs::read(board.path()).expect("the file can be read"));
    let [_, text, scalars] = events.as_slice() else { panic!("{events:?}") };
    let Some(EventContent::Summary(text)) = &text.content else { panic!("{text:?}") };
    assert_eq!(text.value, [summary_value("config", Value::Text("**L** = 47"))]);
    assert_eq!(scalars.step, 7);
    assert!((scalars.wall_time - since_1970().as_secs_f64()).abs() < 60.0);
    let Some(EventContent::Summary(scalars)) = &scalars.content else { panic!("{scalars:?}") };
    let numbers: Vec<u32> = scalars
        .value
        .iter()
        .map(|value| match value.payload {
            Some(Payload::Simple(number)) => number.to_bits(),
            ref other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(numbers, [0.1_f32, f32::NAN, f32::INFINITY].map(f32::to_bits));
}

#[test]
fn a_resumed_run_tells_a_running_tensorboard_which_steps_to_forget() {
    let folder = TempDir::new().expect("a temporary folder can be created");
    write_steps(&mut open(&folder, None), 1..=9);
    let board = open(&folder, Some(4));
    assert_eq!(board.step(), 5);
    let events = read_back(&std::fs::read(board.path()).expect("the file can be read"));
    assert_eq!(events[1].step, 5);
    assert_eq!(events[1].content, Some(EventContent::SessionLog(SessionLog { status: SESSION_START })));
    assert_eq!(steps(&folder), [1, 2, 3, 4]);
}

#[test]
fn values_added_to_a_step_later_leave_earlier_values_in_place() {
    let folder = TempDir::new().expect("a temporary folder can be created");
    write_steps(&mut open(&folder, None), 1..=9);
    let mut additional = Board::open_additional(folder.path(), 9).expect("the event file can be created");
    additional.scalars(9, &[("test", 1.0)]).expect("the event file is writable");
    assert!(additional.scalars(8, &[("test", 1.0)]).is_err(), "an earlier step was accepted");
    let has_test = |folder: &TempDir| all_values(folder.path()).contains(&(9, "test".to_owned()));
    assert_eq!((steps(&folder), has_test(&folder)), ((1..=9).collect(), true));
    drop(open(&folder, Some(9)));
    assert!(has_test(&folder), "a run resumed from step 9 lost the value of step 9");
    drop(open(&folder, Some(8)));
    assert!(!has_test(&folder), "a run that repeats step 9 kept the old value");
}

#[test]
fn a_file_truncated_anywhere_keeps_its_whole_records() {
    let folder = TempDir::new().expect("a temporary folder can be created");
    let mut board = open(&folder, None);
    write_steps(&mut board, 1..=4);
    let path = board.path().to_owned();
    let whole = std::fs::read(&path).expect("the file can be read");
    let lengths: Vec<usize> = read_back(&whole).iter().map(|event| frame(&event.encode_to_vec()).len()).collect();
    for cut in 0..=whole.len() {
        for zeros in [0, 1, 5, 300] {
            let mut bytes = whole[..cut].to_vec();
            bytes.resize(cut + zeros, 0);
            std::fs::write(&path, bytes).expect("the folder is writable");
            // Number of whole records before the cut, not counting the first record.
            let ends = lengths.iter().scan(0, |end, length| Some(std::mem::replace(end, *end + length) + length));
            let survived = ends.skip(1).filter(|end| *end <= cut).count() as i64;
            drop(open(&folder, Some(3)));
            assert_eq!(
                steps(&folder),
                (1..=survived.min(3)).collect::<Vec<_>>(),
                "wrong steps in a file that is cut at byte {cut} and followed by {zeros} zeros"
            );
            for file in event_files(folder.path()).expect("the folder can be read") {
                std::fs::remove_file(file).expect("the event file exists");
            }
        }
    }
}

#[test]
fn damaged_and_foreign_files_are_renamed() {
    let folder = TempDir::new().expect("a temporary folder can be created");
    let mut board = open(&folder, None);
    write_steps(&mut board, 1..=4);
    let good = std::fs::read(board.path()).expect("the file can be read");
    let last_bytes = frame(&read_back(&good)[4].encode_to_vec()).len();
    let mut changed = good.clone();
    changed[30] ^= 1;
    let mut last = good.clone();
    *last.last_mut().expect("the file is not empty") ^= 1;
    let mut other = frame(&Event { wall_time: 1.0, step: 3, content: None }.encode_to_vec());
    other.extend_from_slice(&good);
    let cases: [(&[u8], &str); 6] = [
        (b"hello", "not a TensorBoard event file"),
        (b"a much longer text than one header", "not a TensorBoard event file"),
        (&changed, "not a TensorBoard event file"),
        (&other, "not a TensorBoard event file"),
        (&last, "a record does not match its checksum"),
        (
            &[&good[..good.len() - last_bytes], b"twelve bytes and more"].concat(),
            "the length of a record does not match its checksum",
        ),
    ];
    let foreign = folder.path().join("events.out.tfevents.0000000001.foreign");
    let aside = folder.path().join("events.out.damaged.0000000001.foreign");
    for (bytes, reason) in cases {
        std::fs::write(&foreign, bytes).expect("the folder is writable");
        let error = trim(std::slice::from_ref(&foreign), Some(9)).err();
        assert!(error.is_none(), "a damaged file failed the run: {error:?}");
        assert!(!foreign.exists());
        assert_eq!(std::fs::read(&aside).expect("the file was renamed"), bytes, "the contents changed ({reason})");
    }
    // `Board::open` also renames a damaged file, and does not change an intact file in the same folder.
    std::fs::write(&foreign, b"hello").expect("the folder is writable");
    let before = std::fs::read(board.path()).expect("the event file exists");
    drop(Board::open(folder.path(), Some(4)).expect("the event file can be created"));
    assert_eq!(std::fs::read(board.path()).expect("the event file was not renamed"), before);
    assert!(!foreign.exists() && aside.exists());
}

#[test]
fn a_decreasing_step_is_reported_as_a_bug() {
    let folder = TempDir::new().expect("a temporary folder can be created");
    let mut board = open(&folder, Some(10));
    let error = board.scalars(10, &[("loss", 1.0)]).expect_err("step 10 must not be written again");
    assert!(error.to_string().contains("step is 10, wanted at least 11; this is a bug"), "{error}");
    board.scalars(12, &[("loss", 1.0)]).expect("a later step may be written");
    board.scalars(12, &[("score", 1.0)]).expect("more values of step 12 may be written");
    assert!(board.scalars(11, &[("loss", 1.0)]).is_err());
}

#[test]
fn a_folder_that_cannot_be_created_is_named_in_the_error() {
    let folder = TempDir::new().expect("a temporary folder can be created");
    let file = folder.path().join("file");
    std::fs::write(&file, "").expect("the folder is writable");
    let error = Board::open(&file.join("tensorboard"), None).expect_err("a file is in the way");
    assert_eq!(error.exit_code().code(), 16);
    assert!(error.to_string().contains("file/tensorboard: "), "{error}");
}

#[test]
fn a_later_file_sorts_after_earlier_ones_even_if_the_clock_goes_back() {
    let folder = TempDir::new().expect("a temporary folder can be created");
    let mut board = open(&folder, None);
    write_steps(&mut board, 1..=1);
    let ahead = folder.path().join(format!("{PREFIX}9999999990.host.1.0"));
    std::fs::rename(board.path(), &ahead).expect("the event file exists");
    let second = open(&folder, Some(1));
    assert!(second.path() > ahead.as_path(), "{}", second.path().display());
    let third = open(&folder, Some(1));
    assert!(third.path() > second.path(), "{}", third.path().display());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    /// Each attempt starts from the last checkpoint, or from the beginning if there is no checkpoint yet, and dies in
    /// the middle of a record.
    #[test]
    fn no_step_is_recorded_twice(attempts in prop::collection::vec((1_u64..12, 0_u64..12, 0_usize..60), 1..6)) {
        let folder = TempDir::new().expect("a temporary folder can be created");
        let (mut checkpoint, mut last) = (None, 0);
        for (more, back, half) in attempts {
            let mut board = open(&folder, checkpoint);
            board.text(board.step(), "config", "text").expect("the event file is writable");
            let first = checkpoint.unwrap_or(0) + 1;
            last = first + more;
            write_steps(&mut board, first..=last);
            let mut bytes = std::fs::read(board.path()).expect("the file can be read");
            bytes.extend_from_slice(&frame(&[7; 60])[..half]);
            std::fs::write(board.path(), bytes).expect("the folder is writable");
            checkpoint = Some(last.saturating_sub(back).max(checkpoint.unwrap_or(0))).filter(|step| *step > 0);
        }
        drop(open(&folder, checkpoint));
        let kept = checkpoint.map_or(0, |step| step.min(last)) as i64;
        prop_assert_eq!(steps(&folder), (1..=kept).collect::<Vec<_>>());
    }
}
