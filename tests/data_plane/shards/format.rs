//! Tests of shards that this program writes. Rows are read back as they were written, reading damaged bytes gives an
//! error, and a failed write leaves no files. `mean` tests means over views.

mod mean;

use std::fs;
use std::path::{Path, PathBuf};

use half::f16;
use locdiff::shards::{
    Blocks, Dataset, ImageHead, MANIFEST_NAME, Manifest, ShardWriter, ShardsError, WriterOptions, WriterRows,
};
use locdiff_core::config::ShardsConfig;
use locdiff_core::exit_code::{ExitCode, HasExitCode};

use crate::shards::support::{ROWS, WIDTH, expected, options, problems, read_all, write, write_with};

fn open(path: &Path) -> Result<Dataset, ShardsError> {
    Dataset::open(&path.display().to_string(), &ShardsConfig::default())
}

#[track_caller]
fn assert_refused(result: Result<Dataset, ShardsError>, code: ExitCode, parts: &[&str]) {
    let error = result.err().expect("the result is not an error");
    for part in parts {
        assert!(error.to_string().contains(part), "{part:?} is missing in: {error}");
    }
    assert_eq!(error.exit_code(), code, "wrong exit code for: {error}");
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("the folder exists");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("the folder can be listed").file_name().into_string().expect("the name is UTF-8"))
        .collect();
    names.sort();
    names
}

#[test]
fn shards_are_read_back_and_equal_rows_make_equal_files() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    let manifest = write(&one);
    assert_eq!(names(&one), [MANIFEST_NAME, "part-00000.parquet", "part-00001.parquet"]);
    let dataset = open(&one).expect("the shards are valid");
    assert_eq!((dataset.width(), dataset.views(), dataset.block_rows()), (WIDTH, 2, &[24, 24, 16][..]));
    assert_eq!(dataset.manifest(), Some(&manifest));
    assert_eq!(dataset.fingerprint(), manifest.fingerprint.0);
    for view in 0..2 {
        assert_eq!(
            read_all(&dataset, view).expect("the blocks are valid"),
            expected(view as usize),
            "wrong rows in view {view}"
        );
    }
    assert!(problems(&dataset).is_empty());
    let mean: f64 = (0..ROWS).map(|row| crate::shards::support::value(row, 3, 0).to_f64()).sum::<f64>() / ROWS as f64;
    assert!((manifest.mean[3] - mean).abs() < 1e-8, "the manifest has the mean {}, wanted {mean}", manifest.mean[3]);
    assert_eq!(dataset.scan().expect("the blocks can be read").statistics, manifest.statistics());
    // Writing the same rows again gives the same bytes. The second folder can also be read after its manifest is
    // removed.
    assert_eq!(write(&two).fingerprint, manifest.fingerprint);
    for name in names(&one) {
        assert_eq!(
            fs::read(one.join(&name)).expect("the file can be read"),
            fs::read(two.join(&name)).expect("the file can be read"),
            "the two copies of {name} differ"
        );
    }
    fs::remove_file(two.join(MANIFEST_NAME)).expect("the file exists");
    let bare = open(&two).expect("the Parquet files are valid");
    assert_eq!(read_all(&bare, 1).expect("the blocks are valid"), expected(1));
    assert_eq!(bare.scan().expect("the blocks can be read").statistics, manifest.statistics());
    let found = locdiff::shards::inspect(&dataset, &ShardsConfig::default()).expect("the shards are valid");
    assert_eq!((found.rows, found.row_groups, found.latitudes), (64, 3, (-80.0, 77.5)));
    assert_eq!(found.source.as_deref(), Some("sixty-four rows"));
}

#[test]
fn flipped_or_missing_bytes_are_always_detected() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let out = folder.path().join("out");
    write(&out);
    let path = out.join("part-00000.parquet");
    let whole = fs::read(&path).expect("the file can be read");
    let mut in_pages = 0;
    for at in (0..whole.len()).step_by(7).chain([4, whole.len() - 1]) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        fs::write(&path, &damaged).expect("the file can be written");
        let outcome = open(&out).and_then(|dataset| {
            let problems = problems(&dataset);
            assert!(!problems.is_empty(), "byte {at}: verify found no problem");
            assert_eq!(problems[0].exit_code, ExitCode::Corrupt.code(), "byte {at}: wrong exit code for {problems:?}");
            read_all(&dataset, 0).and_then(|_| read_all(&dataset, 1))
        });
        match outcome {
            // Reading succeeds only if the flipped bit is in a part that batches do not use: the identifiers or the
            // first four bytes of the file. Even then `problems` reports the damage, as the assertions above have
            // checked.
            Ok(rows) => assert_eq!(rows, expected(1), "byte {at}: wrong rows"),
            Err(error) => {
                assert_eq!(error.exit_code(), ExitCode::Corrupt, "byte {at}: wrong exit code for: {error}");
                let text = error.to_string();
                assert!(text.contains("part-00000.parquet"), "byte {at}: the file is not named in: {text}");
                if text.contains("column `embedding`") {
                    assert!(
                        text.contains("row group") && text.contains("the manifest says"),
                        "byte {at}: wrong error: {text}"
                    );
                    in_pages += 1;
                }
            }
        }
    }
    assert!(in_pages > 50, "only {in_pages} flips hit an embedding, wanted more than 50");
    // A truncated file is refused, whatever its length.
    for length in [0, 3, 4, 11, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..length]).expect("the file can be written");
        let error = open(&out).err().unwrap_or_else(|| panic!("a file of {length} bytes was opened"));
        assert!(error.to_string().contains("part-00000.parquet"), "the file is not named in: {error}");
        let code = if length < 4 { ExitCode::BadData } else { ExitCode::Corrupt };
        assert_eq!(error.exit_code(), code, "{length} bytes: wrong exit code for: {error}");
    }
    // If a file is truncated while it is open, reading gives an error and does not end the process with SIGBUS.
    fs::write(&path, &whole).expect("the file can be written");
    let dataset = open(&out).expect("the file is complete again");
    fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .expect("the file can be opened")
        .set_len(600)
        .expect("the file can be truncated");
    let error = read_all(&dataset, 0).expect_err("the file was cut short");
    assert_eq!(error.exit_code(), ExitCode::Corrupt);
    assert!(error.to_string().contains("row group") && error.to_string().contains("cut short"), "wrong error: {error}");
}

#[test]
fn non_finite_number_is_named_by_row() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    for (name, bits, text) in [("nan", f16::NAN, "NaN"), ("infinite", f16::NEG_INFINITY, "-inf")] {
        let out = folder.path().join(name);
        write(&out);
        let path = out.join("part-00001.parquet");
        let mut bytes = fs::read(&path).expect("the file can be read");
        let row = &expected(0).embeddings[(48 + 9) * WIDTH * 2..][..WIDTH * 2];
        let at = bytes.windows(row.len()).position(|window| window == row).expect("the file has the row");
        bytes[at + 10..at + 12].copy_from_slice(&bits.to_le_bytes());
        fs::write(&path, &bytes).expect("the file can be written");
        let damaged = read_all(&open(&out).expect("the shards are valid"), 0).expect_err("the checksum does not match");
        assert_eq!(damaged.exit_code(), ExitCode::Corrupt, "wrong exit code for: {damaged}");
        // Without a manifest, there is no checksum. The reader must then refuse the damaged number, because it is not
        // finite.
        fs::remove_file(out.join(MANIFEST_NAME)).expect("the file exists");
        let bare = open(&out).expect("the Parquet files are valid");
        let error = read_all(&bare, 0).expect_err(name);
        assert_eq!(error.exit_code(), ExitCode::BadData, "wrong exit code for: {error}");
        for part in ["part-00001.parquet", "row group 0: column `embedding`: row 9: ", text] {
            assert!(error.to_string().contains(part), "missing {part:?} in: {error}");
        }
        assert_eq!(bare.bad_rows(2).expect("the blocks can be read"), [9]);
        assert_eq!(read_all(&bare, 1).expect("the other view is undamaged"), expected(1));
    }
}

#[test]
fn locations_without_valid_shards_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let at = |name: &str| folder.path().join(name);
    let location = at("nothing").display().to_string();
    assert_refused(open(&at("nothing")), ExitCode::NoData, &["it does not exist", &location]);
    fs::create_dir(at("empty")).expect("the folder can be created");
    assert_refused(open(&at("empty")), ExitCode::NoData, &["neither a manifest.json nor a *.parquet file"]);
    assert_refused(open(&at("*.parquet")), ExitCode::NoData, &["the glob matches nothing"]);
    fs::write(at("notes.parquet"), "these are notes").expect("the file can be written");
    assert_refused(open(&at("notes.parquet")), ExitCode::BadData, &["notes.parquet: is not a Parquet file"]);
    // A file that cannot be read gives an I/O error. Here a folder takes the place of the file, because root can read a
    // file even without read permission.
    fs::create_dir_all(at("odd/part.parquet")).expect("the folder can be created");
    assert_refused(open(&at("odd")), ExitCode::Io, &["part.parquet"]);
    assert_refused(Dataset::open("ftp://host/x", &ShardsConfig::default()), ExitCode::Usage, &["ftp://"]);

    let change = |name: &str, edit: &dyn Fn(&mut Manifest)| -> PathBuf {
        let mut manifest = write(&at(name));
        edit(&mut manifest);
        manifest.fingerprint = manifest.compute_fingerprint();
        fs::write(at(name).join(MANIFEST_NAME), manifest.to_json().expect("the value can be written as JSON"))
            .expect("the file can be written");
        at(name)
    };
    let later = change("later", &|manifest| manifest.schema_version = 3);
    assert_refused(open(&later), ExitCode::BadData, &["manifest.json", "schema version 3", "reads up to 2"]);
    let wide = change("wide", &|manifest| {
        manifest.width = 9;
        manifest.mean.push(0.0);
        manifest.standard_deviation.push(0.0);
    });
    assert_refused(open(&wide), ExitCode::BadData, &["row group 0: column `embedding`", "width 8, wanted 9"]);
    let views = change("views", &|manifest| manifest.views = 3);
    assert_refused(open(&views), ExitCode::BadData, &["has 2 views, wanted 3"]);
    let outside = change("outside", &|manifest| manifest.files[0].name = "../other.parquet".into());
    assert_refused(open(&outside), ExitCode::Corrupt, &["wanted a file name without a path"]);
    let short = change("short", &|manifest| manifest.rows = 63);
    assert_refused(open(&short), ExitCode::Corrupt, &["64 rows, wanted 63"]);
    let lost = change("lost", &|_| {});
    fs::remove_file(lost.join("part-00001.parquet")).expect("the file exists");
    assert_refused(open(&lost), ExitCode::NoData, &["manifest lists", "part-00001.parquet", "does not exist"]);
    let edited = change("edited", &|_| {});
    let text = fs::read_to_string(edited.join(MANIFEST_NAME)).expect("the manifest is UTF-8");
    fs::write(edited.join(MANIFEST_NAME), text.replace("sixty-four", "sixty-five")).expect("the file can be written");
    assert_refused(open(&edited), ExitCode::Corrupt, &["manifest.json", "fingerprint"]);
    fs::write(edited.join(MANIFEST_NAME), "{").expect("the file can be written");
    assert_refused(open(&edited), ExitCode::Corrupt, &["is not a manifest"]);
    // Verifying finds a duplicate identifier. A folder whose embeddings have different widths cannot be opened.
    let narrow = WriterOptions::new(4, 1, "narrow", ImageHead::None);
    let mut writer = ShardWriter::create(&at("mixed"), narrow).expect("the output folder does not exist");
    let (ids, zeros) = (vec!["a".to_owned(), "a".to_owned()], vec![f16::ONE; 8]);
    let first = ids[..1].to_vec();
    let rows = WriterRows { ids, latitudes: vec![1.0, 2.0], longitudes: vec![3.0, 4.0], views: vec![zeros.clone()] };
    writer.push(&rows).expect("the rows are valid");
    writer.finish().expect("the shards can be written");
    let problems = problems(&open(&at("mixed")).expect("the shards are valid"));
    assert_eq!(problems.len(), 1, "wanted one problem, got {problems:?}");
    assert!(
        problems[0].message.contains("column `id`: row 1: duplicate identifier \"a\""),
        "wrong problem: {problems:?}"
    );
    let wide = WriterOptions { views: 1, ..options() };
    let mut writer = ShardWriter::create(&at("other"), wide).expect("the output folder does not exist");
    let rows = WriterRows { ids: first, latitudes: vec![1.0], longitudes: vec![3.0], views: vec![zeros] };
    writer.push(&rows).expect("the rows are valid");
    writer.finish().expect("the shards can be written");
    fs::copy(at("other/part-00000.parquet"), at("mixed/part-00001.parquet")).expect("the file can be copied");
    fs::remove_file(at("mixed").join(MANIFEST_NAME)).expect("the file exists");
    assert_refused(open(&at("mixed")), ExitCode::BadData, &["part-00001.parquet", "width 8, wanted 4"]);
}

#[test]
fn writer_refuses_bad_rows_and_leaves_no_partial_folder() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let out = folder.path().join("out");
    let nan = write_with(&out, options(), |_, _, values| values[50 * WIDTH + 2] = f16::NAN)
        .expect_err("an embedding contains NaN");
    assert_eq!(nan.exit_code(), ExitCode::BadData);
    assert!(nan.to_string().contains("column `embedding`: row 2: NaN, wanted a finite number"), "wrong error: {nan}");
    assert!(nan.to_string().contains("part-00001.parquet: row group 0"), "the file is not named in: {nan}");
    let high = write_with(&out, options(), |latitudes, _, _| latitudes[0] = 91.0).expect_err("a latitude is 91");
    assert!(
        high.to_string().contains("row group 0: column `lat`: row 0: latitude 91, wanted -90 to 90"),
        "wrong error: {high}"
    );
    let far = write_with(&out, options(), |_, longitudes, _| longitudes[3] = f64::NAN).expect_err("a longitude is NaN");
    assert!(far.to_string().contains("column `lon`: row 3: longitude NaN"), "wrong error: {far}");
    let none = ShardWriter::create(&out, options())
        .expect("the output folder does not exist")
        .finish()
        .expect_err("there are no rows");
    assert_eq!(none.exit_code(), ExitCode::Usage);
    assert!(names(folder.path()).is_empty(), "failures left files: {:?}", names(folder.path()));

    write(&out);
    let before = fs::read(out.join(MANIFEST_NAME)).expect("the folder has a manifest");
    let exists = ShardWriter::create(&out, options()).err().expect("an existing folder was accepted");
    assert_eq!(exists.exit_code(), ExitCode::Exists);
    assert!(exists.to_string().contains("--overwrite"), "wrong error: {exists}");
    let other = folder.path().join("weights");
    fs::create_dir(&other).expect("the folder can be created");
    fs::write(other.join(MANIFEST_NAME), r#"{"version": 1, "source": "elsewhere", "files": {}}"#)
        .expect("the file can be written");
    let refused = write_with(&other, WriterOptions { overwrite: true, ..options() }, |_, _, _| {})
        .expect_err("the folder has no shards");
    assert!(refused.to_string().contains("is not a folder of shards"), "wrong error: {refused}");
    assert!(other.join(MANIFEST_NAME).exists(), "a folder without shards was removed");
    fs::remove_dir_all(&other).expect("the folder exists");
    let over = || WriterOptions { overwrite: true, source: "second".into(), ..options() };
    let bad = write_with(&out, over(), |latitudes, _, _| latitudes[0] = 91.0);
    assert!(bad.is_err());
    assert_eq!(
        fs::read(out.join(MANIFEST_NAME)).expect("the folder has a manifest"),
        before,
        "a failed overwrite changed the manifest"
    );
    write_with(&out, over(), |_, _, _| {}).expect("the folder may be replaced");
    assert_eq!(
        open(&out).expect("the shards are valid").manifest().expect("the folder has a manifest").source,
        "second"
    );
    assert_eq!(names(folder.path()), ["out"], "the overwrite left extra files");
    // With `--overwrite`, a folder that does not hold shards is not replaced.
    let notes = folder.path().join("notes");
    fs::create_dir(&notes).expect("the folder can be created");
    fs::write(notes.join("diary.txt"), "dear diary").expect("the file can be written");
    let error = ShardWriter::create(&notes, over()).err().expect("a folder without shards was replaced");
    assert!(error.to_string().contains("is not a folder of shards"), "wrong error: {error}");
    let wrong = ShardWriter::create(&folder.path().join("wrong"), options()).and_then(|mut writer| {
        let views = vec![vec![f16::ONE; 7], vec![f16::ONE; 8]];
        writer.push(&WriterRows { ids: vec!["a".to_owned()], latitudes: vec![0.0], longitudes: vec![0.0], views })
    });
    assert!(
        wrong
            .expect_err("an embedding has 7 numbers, not 8")
            .to_string()
            .contains("view 0 has 7 numbers, wanted 8 (1 rows of 8)")
    );
}

/// Tests that read much more data than the process may hold in memory.
mod long {
    use std::sync::Arc;
    use std::time::Instant;

    use locdiff::shards::{BatchOptions, Batches, BlockRows, Cache, DataLayout, Mask, Plan, PlanOptions, Share};

    use super::*;

    /// Anonymous resident memory of this process in bytes (`RssAnon`). Mapped files are not counted.
    fn anonymous_bytes() -> u64 {
        let text = fs::read_to_string("/proc/self/status").expect("Linux has /proc");
        let line = text.lines().find(|line| line.starts_with("RssAnon:")).expect("Linux reports `RssAnon`");
        line.split_whitespace()
            .nth(1)
            .expect("the line has a second field")
            .parse::<u64>()
            .expect("the field is a number")
            * 1024
    }

    /// CPU time of this thread in seconds.
    fn core_seconds() -> f64 {
        let text = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux has /proc");
        text.split_whitespace().next().expect("the file has a field").parse::<f64>().expect("the field is a number")
            / 1e9
    }

    const WIDTH: u32 = 768;

    /// How much data to read, in GB: the value of the environment variable `LOCDIFF_STREAM_GB`, or 2.
    fn gigabytes() -> f64 {
        std::env::var("LOCDIFF_STREAM_GB").map_or(2.0, |text| text.parse().expect("LOCDIFF_STREAM_GB is a number"))
    }

    /// Limit on the growth of memory use, in bytes. The requirement is 1 GB for 20 GB of data. For less data the limit
    /// is 128 MB, so that the test with the default of 2 GB also detects a reader whose memory grows with the data.
    fn growth_max() -> u64 {
        if gigabytes() < 20.0 { 128_000_000 } else { 1_000_000_000 }
    }

    /// Writes one file of 100 MB, creates hard links to it under many names, and lists all names in the manifest.
    fn write_many(out: &Path) {
        let mut options = WriterOptions::new(WIDTH, 1, "one file", ImageHead::None);
        options.rows_per_file = 65_536;
        let mut writer = ShardWriter::create(out, options).expect("the output folder does not exist");
        let values: Vec<f16> = (0..4096 * WIDTH).map(|at| f16::from_bits(at as u16 & 0xbbff)).collect();
        for part in 0..16 {
            let ids: Vec<String> = (0..4096).map(|row| format!("{}", part * 4096 + row)).collect();
            let degrees = vec![f64::from(part); 4096];
            let views = vec![values.clone()];
            let rows = WriterRows { ids, latitudes: degrees.clone(), longitudes: degrees, views };
            writer.push(&rows).expect("the rows are valid");
        }
        let mut manifest = writer.finish().expect("the shards can be written");
        let file = manifest.files[0].clone();
        let embedding_bytes = manifest.rows as f64 * f64::from(WIDTH) * 2.0;
        let copies = (gigabytes() * 1e9 / embedding_bytes).ceil() as usize;
        for copy in 1..copies {
            let name = format!("part-{copy:05}.parquet");
            fs::hard_link(out.join(&file.name), out.join(&name)).expect("the file can be linked");
            manifest.files.push(locdiff::shards::ManifestFile { name, ..file.clone() });
        }
        manifest.rows *= copies as u64;
        manifest.fingerprint = manifest.compute_fingerprint();
        fs::write(out.join(MANIFEST_NAME), manifest.to_json().expect("the value can be written as JSON"))
            .expect("the file can be written");
    }

    #[test]
    fn shards_stream_in_bounded_memory() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let out = folder.path().join("out");
        write_many(&out);
        for with_manifest in [true, false] {
            if !with_manifest {
                fs::remove_file(out.join(MANIFEST_NAME)).expect("the file exists");
            }
            let before = anonymous_bytes();
            let (start, on_core) = (Instant::now(), core_seconds());
            let dataset = open(&out).expect("the shards are valid");
            let mut block_rows = vec![BlockRows::default(); 16];
            let (mut bytes, mut most) = (0_usize, 0);
            for block in 0..dataset.block_rows().len() {
                let into = &mut block_rows[block % 16];
                dataset.read(block as u32, 0, into).expect("the blocks are valid");
                bytes += into.embeddings.len();
                if block % 256 == 0 {
                    most = most.max(anonymous_bytes());
                }
            }
            let growth = most.max(anonymous_bytes()).saturating_sub(before);
            println!(
                "{:.1} GB, manifest {with_manifest}: memory grew by {} MB, {:.2} GB/s, {:.2} GB per CPU second",
                bytes as f64 / 1e9,
                growth / 1_000_000,
                bytes as f64 / 1e9 / start.elapsed().as_secs_f64(),
                bytes as f64 / 1e9 / (core_seconds() - on_core),
            );
            assert!(bytes as f64 >= gigabytes() * 0.99e9, "only {bytes} bytes were read");
            assert!(growth < growth_max(), "memory grew by {growth} bytes, wanted less than {}", growth_max());
        }
    }

    /// For any amount of data, memory holds only two windows of 25 MB, four batches of 6 MB and the buffers of the
    /// readers.
    #[test]
    fn batches_stream_in_bounded_memory() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let out = folder.path().join("out");
        write_many(&out);
        let before = anonymous_bytes();
        let (dataset, config) = (open(&out).expect("the shards are valid"), ShardsConfig::default());
        let plan = Plan::new(DataLayout::of(&dataset), Mask::none(), PlanOptions::new(&config, 1, 4096))
            .expect("the plan is valid");
        let device = tch::Device::Cpu;
        let options = BatchOptions { reader_threads: 2, prefetch_batches: 2, cache: Cache::None, device };
        let start = Instant::now();
        let mut batches = Batches::new(Arc::new(dataset), plan.clone(), plan.start(), Share::WHOLE, &options)
            .expect("the options are valid");
        let (mut bytes, mut most) = (0, 0);
        for step in 0..plan.steps() {
            bytes += batches.next().expect("the blocks are valid").embeddings.numel() * 2;
            if step % 16 == 0 {
                most = most.max(anonymous_bytes());
            }
        }
        let growth = most.max(anonymous_bytes()).saturating_sub(before);
        let speed = bytes as f64 / 1e9 / start.elapsed().as_secs_f64();
        println!("{:.1} GB in batches: memory grew by {} MB, {speed:.2} GB/s", bytes as f64 / 1e9, growth / 1_000_000);
        assert!(bytes as f64 >= gigabytes() * 0.99e9, "only {bytes} bytes were read");
        assert!(growth < growth_max(), "memory grew by {growth} bytes, wanted less than {}", growth_max());
    }
}
