//! Tests of shards at `s3://` locations. A server that often fails gives the same rows as the disk. The cache stays
//! within its bound, and damaged entries are fetched again. Error messages name the cause and contain no secret.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use half::f16;
use locdiff::shards::{
    Batch, BatchOptions, Batches, BlockRows, Blocks, Cache, DataLayout, Dataset, DatasetIndex, ImageHead, Mask, Plan,
    PlanOptions, S3Options, ShardWriter, ShardsError, Share, Survey, WriterOptions, WriterRows,
};
use locdiff_core::config::ShardsConfig;
use locdiff_core::exit_code::{ExitCode, FailureKind, HasExitCode};
use object_store::BackoffConfig;
use tch::{Device, Kind};

use crate::shards::s3_server::{BUCKET, Faults, SECRET_KEY, Server};
use crate::shards::support::problems;

/// The shape of a data set. [`SMALL`] has several files and row groups. [`LARGE`] has a row group that takes several
/// requests.
struct Shape {
    rows: usize,
    width: usize,
    views: usize,
    rows_per_group: u32,
    rows_per_file: u64,
}

const SMALL: Shape = Shape { rows: 700, width: 48, views: 2, rows_per_group: 64, rows_per_file: 256 };
const LARGE: Shape = Shape { rows: 9000, width: 512, views: 1, rows_per_group: 9000, rows_per_file: 9000 };

fn write_shards(out: &Path, shape: &Shape) {
    let Shape { rows, width, views, rows_per_group, rows_per_file } = *shape;
    let options = WriterOptions::new(width as u32, views as u32, "test", ImageHead::None);
    let mut writer = ShardWriter::create(out, WriterOptions { rows_per_group, rows_per_file, ..options })
        .expect("the output folder does not exist");
    let ids: Vec<String> = (0..rows).map(|row| format!("photo-{row}")).collect();
    let latitudes: Vec<f64> = (0..rows).map(|row| (row as f64 * 0.731) % 180.0 - 90.0).collect();
    let longitudes: Vec<f64> = (0..rows).map(|row| (row as f64 * 1.377) % 360.0 - 180.0).collect();
    let number = |index: usize| f16::from_f32((index.wrapping_mul(2_654_435_761) % 2048) as f32 / 1024.0 - 1.0);
    let embeddings: Vec<Vec<f16>> =
        (0..views).map(|view| (0..rows * width).map(|index| number(index * 3 + view)).collect()).collect();
    writer.push(&WriterRows { ids, latitudes, longitudes, views: embeddings }).expect("the rows are valid");
    writer.finish().expect("the shards can be written");
}

/// A temporary folder, and an S3 server whose bucket is in this folder.
struct Stage {
    folder: tempfile::TempDir,
    server: Server,
}

impl Stage {
    /// Starts the server. Its bucket has two folders: `ours` has shards with a manifest, and `theirs` has the same
    /// Parquet files without a manifest.
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let server = Server::start(&folder.path().join("root"));
        write_shards(&server.path("ours"), &SMALL);
        fs::create_dir(server.path("theirs")).expect("the folder can be created");
        for entry in fs::read_dir(server.path("ours")).expect("the folder exists") {
            let path = entry.expect("the folder can be listed").path();
            if path.extension().is_some_and(|extension| extension == "parquet") {
                fs::copy(&path, server.path("theirs").join(path.file_name().expect("the file has a name")))
                    .expect("the file can be copied");
            }
        }
        Self { folder, server }
    }

    fn config(&self) -> ShardsConfig {
        ShardsConfig { cache_dir: self.cache().display().to_string(), ..ShardsConfig::default() }
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    /// Options for a client of the server, with short waits between tries and without a cache.
    fn options(&self) -> S3Options {
        with_cache(0, self.with_variable("AWS_REGION", "us-east-1"))
    }

    fn with_variable(&self, name: &str, value: &str) -> S3Options {
        let mut variables = self.server.variables();
        variables.retain(|(other, _)| other != name);
        variables.push((name.to_owned(), value.to_owned()));
        with_tries(24, S3Options::from_variables(variables, &self.config()))
    }

    fn open(&self, key: &str, options: &S3Options) -> Result<Dataset, ShardsError> {
        let index = DatasetIndex::read_s3(&format!("s3://{BUCKET}/{key}"), options)?;
        Dataset::from_index_s3(&index, options, &self.config())
    }

    fn local(&self, key: &str) -> Dataset {
        Dataset::open(&self.server.path(key).display().to_string(), &self.config()).expect("the shards are valid")
    }
}

fn all_rows(dataset: &Dataset) -> Vec<BlockRows> {
    let mut all = Vec::new();
    for block in 0..dataset.block_rows().len() as u32 {
        for view in 0..dataset.views() {
            let mut rows = BlockRows::default();
            dataset.read(block, view, &mut rows).expect("the blocks are valid");
            all.push(rows);
        }
    }
    all
}

/// Returns the same rows as [`all_rows`], but reads them with several threads.
fn all_rows_by(threads: usize, dataset: &Dataset) -> Vec<BlockRows> {
    let reads = dataset.block_rows().len() as u32 * dataset.views();
    let next = AtomicU32::new(0);
    let mut read: Vec<(u32, BlockRows)> = std::thread::scope(|scope| {
        let reader = || {
            let mut read = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= reads {
                    return read;
                }
                let mut rows = BlockRows::default();
                dataset
                    .read(number / dataset.views(), number % dataset.views(), &mut rows)
                    .expect("the blocks are valid");
                read.push((number, rows));
            }
        };
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(reader)).collect();
        readers.into_iter().flat_map(|reader| reader.join().expect("the reader did not panic")).collect()
    });
    read.sort_by_key(|(number, _)| *number);
    read.into_iter().map(|(_, rows)| rows).collect()
}

/// The options with at most `tries_max` tries and short waits between them.
fn with_tries(tries_max: usize, mut options: S3Options) -> S3Options {
    let wait = Duration::from_millis(1);
    options.retry.max_retries = tries_max - 1;
    options.retry.backoff = BackoffConfig { init_backoff: wait, max_backoff: 4 * wait, base: 2.0 };
    options
}

/// Limits the cache to `bytes_max` bytes.
fn with_cache(bytes_max: u64, mut options: S3Options) -> S3Options {
    options.cache_bytes_max = bytes_max;
    options
}

fn assert_same(got: &Dataset, want: &Dataset, threads: usize) {
    assert_eq!((got.fingerprint(), got.width(), got.views()), (want.fingerprint(), want.width(), want.views()));
    assert_eq!(got.block_rows(), want.block_rows());
    let statistics =
        |of: &Dataset| Survey::begin(of, &ShardsConfig::default()).expect("the data can be read").statistics;
    assert_eq!(statistics(got), statistics(want));
    assert!(all_rows_by(threads, got) == all_rows(want), "the rows differ");
}

/// The batches of two epochs, read as training reads them. A batch is returned as the bits of its embeddings and its
/// coordinates.
fn batches(dataset: Dataset, threads: u32) -> Vec<(Vec<i16>, Vec<f64>)> {
    let config = ShardsConfig { shuffle_row_groups: 3, ..ShardsConfig::default() };
    let plan =
        Plan::new(DataLayout::of(&dataset), Mask::none(), PlanOptions::new(&config, 3, 90)).expect("the plan is valid");
    let options =
        BatchOptions { reader_threads: threads, prefetch_batches: 2, cache: Cache::None, device: Device::Cpu };
    let mut made = Batches::new(Arc::new(dataset), plan.clone(), plan.start(), Share::WHOLE, &options)
        .expect("the options are valid");
    let batch = |batch: Batch| {
        let bits = Vec::<i16>::try_from(batch.embeddings.view_dtype(Kind::Int16).view(-1))
            .expect("the tensor holds 16-bit numbers");
        (bits, [batch.latitudes.clone(), batch.longitudes.clone()].concat())
    };
    (0..2 * plan.steps()).map(|_| batch(made.next().expect("the blocks are valid"))).collect()
}

/// Reads batches as training does. A row from S3 is copied from a column chunk that is wholly in memory. A row from
/// disk is copied straight from the file into the batch.
#[test]
fn batches_from_a_failing_s3_server_equal_those_from_disk() {
    let stage = Stage::new();
    let options = stage.options();
    let want = batches(stage.local("ours"), 1);
    stage.server.fail(Faults::Mixed);
    for key in ["ours", "theirs"] {
        assert!(batches(stage.open(key, &options).expect("the shards are valid"), 3) == want, "{key}: batches differ");
    }
    let failed = stage.server.counts.failed();
    assert!(failed > 5, "only {failed} requests failed, wanted more than 5");
    // Without a manifest, the recorded checksums of objects and of the same files on disk are equal. Only the recorded
    // versions (ETag, or inode and ctime) differ.
    let remote = stage.open("theirs", &options).expect("the shards are valid");
    let contents = remote.scan().expect("the blocks are valid").contents;
    assert_eq!(remote.check_contents(&contents).expect("the data has not changed"), contents);
    let moved = stage.local("theirs").check_contents(&contents).expect("the bytes have not changed");
    assert_ne!(moved, contents);
}

#[test]
fn rows_from_a_failing_s3_server_equal_those_from_disk() {
    let stage = Stage::new();
    write_shards(&stage.server.path("large"), &LARGE);
    let options = stage.options();
    stage.server.fail(Faults::Mixed);
    for (key, local, threads) in [
        ("ours", "ours", 1),
        ("ours/", "ours", 4),
        ("theirs", "theirs", 4),
        ("theirs/*.parquet", "theirs", 1),
        ("**/part-00001.parquet", "*/part-00001.parquet", 4),
        ("theirs/part-00001.parquet", "theirs/part-00001.parquet", 1),
        ("large", "large", 4),
    ] {
        let remote = stage.open(key, &options).unwrap_or_else(|error| panic!("{key} cannot be opened: {error}"));
        assert_same(&remote, &stage.local(local), threads);
    }
    let ours = stage.open("ours", &options).expect("the shards are valid");
    assert!(problems(&ours).is_empty(), "verify found problems");
    let counts = &stage.server.counts;
    println!("{} of {} requests failed", counts.failed(), counts.all());
    assert!(counts.failed() > 50, "only {} requests failed, wanted more than 50", counts.failed());

    // Inside an asynchronous runtime, reading the data set and dropping it neither panics nor deadlocks.
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime can be started");
    runtime.block_on(async { drop((all_rows(&ours), ours)) });
}

/// Bytes of all files in the subfolders of `folder`, or `None` if two consecutive listings differ. While other threads
/// add and remove files, a single listing may include files that never existed at the same time.
fn cache_bytes(folder: &Path) -> Option<u64> {
    let entries = |folder: &Path| -> Vec<PathBuf> {
        fs::read_dir(folder).map_or_else(|_| Vec::new(), |found| found.flatten().map(|entry| entry.path()).collect())
    };
    let list = || -> BTreeMap<PathBuf, u64> {
        let files = entries(folder).into_iter().filter(|path| path.is_dir()).flat_map(|path| entries(&path));
        files.filter_map(|path| path.metadata().ok().map(|found| (path, found.len()))).collect()
    };
    let first = list();
    (first == list()).then(|| first.values().sum())
}

fn is_unfinished(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

fn cache_files(folder: &Path) -> Vec<PathBuf> {
    let pattern = folder.join("*/*").display().to_string();
    glob::glob(&pattern).expect("the glob is valid").flatten().filter(|path| path.is_file()).collect()
}

#[test]
fn warm_cache_sends_no_requests_and_repairs_damage() {
    let stage = Stage::new();
    let options = with_cache(1 << 30, stage.options());
    let counts = &stage.server.counts;
    let want = stage.local("ours");
    let first = stage.open("ours", &options).expect("the shards are valid");
    assert_same(&first, &want, 4);
    let cold = counts.gets();
    assert!(cold > 20, "only {cold} requests were sent, wanted more than 20");
    assert_same(&first, &want, 4);
    assert_same(&stage.open("ours", &options).expect("the shards are valid"), &want, 1);
    assert_eq!(counts.gets(), cold, "requests were sent when the data set was opened or read again");

    // Each entry of the cache gets one of five kinds of damage: a flipped bit, truncation, an extra byte, a wrong
    // header, or no bytes at all.
    let files = cache_files(&stage.cache());
    for (number, path) in files.iter().enumerate() {
        let mut bytes = fs::read(path).expect("the entry can be read");
        let middle = bytes.len() / 2;
        match number % 5 {
            0 => bytes[middle] ^= 1,
            1 => bytes.truncate(middle),
            2 => bytes.push(0),
            3 => bytes[3] ^= 1,
            _ => bytes.clear(),
        }
        fs::write(path, bytes).expect("the entry can be written");
    }
    assert_same(&stage.open("ours", &options).expect("the shards are valid"), &want, 4);
    let repaired = counts.gets() - cold;
    assert!(repaired >= files.len(), "only {repaired} requests were sent for {} damaged entries", files.len());
    assert_same(&stage.open("ours", &options).expect("the shards are valid"), &want, 1);
    assert_eq!(counts.gets(), cold + repaired, "the damaged entries were not repaired");

    // Reading works when the cache folder is removed, and also when a file takes its place.
    fs::remove_dir_all(stage.cache()).expect("the folder exists");
    assert_same(&first, &want, 4);
    fs::remove_dir_all(stage.cache()).expect("the cache created the folder again");
    fs::write(stage.cache(), "a file").expect("the file can be written");
    assert_same(&first, &want, 4);
    assert_same(&stage.open("ours", &options).expect("the shards are valid"), &want, 1);

    // An object is replaced before the data set is opened again. The new object has another version, so no cache entry
    // of the old version is used.
    fs::remove_file(stage.cache()).expect("the file exists");
    drop(stage.open("theirs", &options).map(|theirs| all_rows(&theirs)));
    let path = stage.server.path("theirs/part-00000.parquet");
    fs::copy(stage.server.path("theirs/part-00001.parquet"), &path).expect("the file can be copied");
    assert_same(&stage.open("theirs", &options).expect("the shards are valid"), &stage.local("theirs"), 1);
}

#[test]
fn cache_stays_within_its_bound_with_several_workers() {
    let stage = Stage::new();
    let bytes_max = 60_000;
    let options = with_cache(bytes_max, stage.options());
    let foreign = stage.cache().join("holiday/photo.jpg");
    fs::create_dir_all(foreign.parent().expect("the path has a parent")).expect("the folder can be created");
    fs::write(&foreign, vec![0; 100_000]).expect("the file can be written");
    let (want, done) = (stage.local("ours"), AtomicBool::new(false));
    let workers = 3;
    let most = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut most = 0;
            while !done.load(Ordering::Relaxed) {
                most = most.max(cache_bytes(&stage.cache()).unwrap_or(0));
                std::thread::yield_now();
            }
            most
        });
        let read = || assert_same(&stage.open("ours", &options).expect("the shards are valid"), &want, 2);
        let readers: Vec<_> = (0..workers).map(|_| scope.spawn(read)).collect();
        readers.into_iter().for_each(|reader| reader.join().expect("the worker did not panic"));
        done.store(true, Ordering::Relaxed);
        watch.join().expect("the watching thread did not panic")
    });
    // On a busy machine the watching thread may have missed the largest size, so the final size is included.
    let most = most.max(cache_bytes(&stage.cache()).expect("all workers have ended")) - 100_000;
    println!("the cache held up to {most} of {bytes_max} bytes");
    assert!(
        most <= bytes_max && most > bytes_max / 2,
        "the cache held up to {most} bytes, wanted at most {bytes_max} bytes and more than half of this limit"
    );
    assert!(foreign.exists(), "a file that the cache did not write was removed");
    let entries = cache_files(&stage.cache());
    assert!(entries.iter().all(|path| !is_unfinished(path)), "an unfinished file is left");
}

/// Opens a location, reads a block, and returns the error of the step that fails. Asserts that the error came within
/// 5 s and contains no secret.
fn failure(stage: &Stage, location: &str, options: &S3Options) -> (String, ExitCode) {
    let began = Instant::now();
    let read = DatasetIndex::read_s3(location, options).and_then(|index| {
        let dataset = Dataset::from_index_s3(&index, options, &stage.config())?;
        dataset.read(0, 0, &mut BlockRows::default())
    });
    let error = read.expect_err("the server or the location fails");
    let text = error.to_string();
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "the error took {:?}, wanted less than 5 s: {text}",
        began.elapsed()
    );
    assert!(
        !text.contains(SECRET_KEY) && !text.contains("hunter2") && !format!("{error:?}").contains("hunter2"),
        "the error contains a secret: {text}"
    );
    println!("{text}");
    (text, error.exit_code())
}

#[test]
fn s3_failures_are_reported_quickly_and_without_secrets() {
    let stage = Stage::new();
    let quick = with_tries(4, stage.options());
    let fails = |location: &str, options: &S3Options, wanted: &[&str], code: ExitCode| {
        let (text, got) = failure(&stage, location, options);
        assert!(wanted.iter().all(|part| text.contains(part)), "a part of {wanted:?} is missing in: {text}");
        assert_eq!(got, code, "wrong exit code for: {text}");
    };
    fails("s3://bucket/nowhere", &quick, &["s3://bucket/nowhere", "neither an object nor a folder"], ExitCode::NoData);
    fails("s3://bucket/ours/x.parquet", &quick, &["ours/x.parquet"], ExitCode::NoData);
    fails("s3://bucket/no*", &quick, &["the glob matches nothing"], ExitCode::NoData);
    fails("s3://no-bucket/x", &quick, &["s3://no-bucket/x", "404", "NoSuchBucket", "AWS_ENDPOINT"], ExitCode::NoData);
    let wrong = with_cache(0, stage.with_variable("AWS_SECRET_ACCESS_KEY", "hunter2-but-wrong"));
    fails("s3://bucket/ours", &wrong, &["403", "SignatureDoesNotMatch", "AWS_ACCESS_KEY_ID"], ExitCode::Io);
    let none = stage.with_variable("AWS_ACCESS_KEY_ID", "");
    fails("s3://bucket/ours", &none, &["no credentials", "AWS_SECRET_ACCESS_KEY"], ExitCode::Io);
    let closed = with_tries(3, stage.with_variable("AWS_ENDPOINT", "http://127.0.0.1:1"));
    fails("s3://bucket/ours", &closed, &["listing", "3 tries", "refused"], ExitCode::Io);
    let endpoint = format!("https://{}", stage.server.address);
    let tls = with_tries(2, stage.with_variable("AWS_ENDPOINT", &endpoint));
    fails("s3://bucket/ours", &tls, &["listing", "2 tries"], ExitCode::Io);
    fails("s3://key:hunter2@bucket/ours", &quick, &["credentials"], ExitCode::Usage);

    stage.server.fail(Faults::Always503);
    fails("s3://bucket/ours", &quick, &["listing: gave up after 4 tries: 503", "SlowDown", "***"], ExitCode::Io);
    stage.server.fail(Faults::AlwaysReset);
    fails("s3://bucket/ours", &quick, &["s3://bucket/ours", "listing"], ExitCode::Io);

    // If a read fails, the error names the byte range, the number of tries and the server's response.
    stage.server.fail(Faults::None);
    let dataset = stage.open("ours", &quick).expect("the shards are valid");
    let assert_read_fails = |wanted: &[&str], code: ExitCode| {
        let error = dataset.read(1, 0, &mut BlockRows::default()).expect_err("the server fails or the file changed");
        let text = error.to_string();
        println!("{text}");
        assert!(wanted.iter().all(|part| text.contains(part)), "a part of {wanted:?} is missing in: {text}");
        assert_eq!(
            (error.exit_code(), text.contains("hunter2")),
            (code, false),
            "wrong exit code, or a secret in: {text}"
        );
        // If the retries of the client fail as well, the failure is an outage, after which the launcher restarts the
        // workers.
        let is_outage = error.failure_kind() == FailureKind::Outage;
        assert_eq!(is_outage, code == ExitCode::Io, "wrong kind of failure: {text}");
    };
    stage.server.fail(Faults::Always503);
    let requests = stage.server.counts.all();
    assert_read_fails(&["s3://bucket/ours/part-00000.parquet", "bytes ", "after 4 tries: 503"], ExitCode::Io);
    assert_eq!(
        stage.server.counts.all() - requests,
        4,
        "the error says 4 tries, but the server got another number of requests"
    );
    stage.server.fail(Faults::AlwaysReset);
    assert_read_fails(&["s3://bucket/ours/part-00000.parquet", "bytes "], ExitCode::Io);
    stage.server.fail(Faults::None);
    let path = stage.server.path("ours/part-00000.parquet");
    let whole = fs::read(&path).expect("the file can be read");
    let mut flipped = whole.clone();
    flipped[100] ^= 1;
    fs::write(&path, &flipped).expect("the file can be written");
    assert_read_fails(&["s3://bucket/ours/part-00000.parquet", "the data has changed", "ETag"], ExitCode::DataChanged);
    fs::write(&path, &whole[..50]).expect("the file can be written");
    assert_read_fails(&["s3://bucket/ours/part-00000.parquet", "the data has changed"], ExitCode::DataChanged);
    fs::remove_file(&path).expect("the file exists");
    assert_read_fails(&["s3://bucket/ours/part-00000.parquet", "404"], ExitCode::NoData);
    fails("s3://bucket/ours", &quick, &["manifest lists part-00000.parquet, which does not exist"], ExitCode::NoData);
}

/// The middle of a large page is not part of the fingerprint of data without a manifest.
#[test]
fn version_of_data_changes_with_any_byte_on_s3_and_on_disk() {
    let stage = Stage::new();
    write_shards(&stage.server.path("large"), &LARGE);
    let path = stage.server.path("large/part-00000.parquet");
    let facts = |dataset: &Dataset| (dataset.fingerprint(), dataset.version().expect("the files exist"));
    let options = stage.options();
    let remote = || facts(&stage.open("large", &options).expect("the shards are valid"));
    let local = || facts(&stage.local("large"));
    let (with_manifest, again) = (remote(), local());
    assert_eq!(with_manifest, again, "with a manifest, the version depends on more than the fingerprint");
    fs::remove_file(stage.server.path("large/manifest.json")).expect("the manifest exists");
    let before = [remote(), local()];
    assert_eq!(before, [remote(), local()]);
    let mut bytes = fs::read(&path).expect("the file can be read");
    bytes[5_000_000] ^= 1;
    fs::write(&path, &bytes).expect("the file can be written");
    let later = std::time::SystemTime::now() + Duration::from_secs(10);
    fs::File::options().append(true).open(&path).and_then(|file| file.set_modified(later)).expect("the file exists");
    for (before, after) in before.into_iter().zip([remote(), local()]) {
        assert_eq!(before.0, after.0, "the fingerprint covers the changed byte");
        assert_ne!(before.1, after.1);
    }
}

#[test]
fn dataset_from_an_index_requests_only_rows() {
    let stage = Stage::new();
    let (options, counts) = (stage.options(), &stage.server.counts);
    for key in ["ours", "theirs"] {
        let index = DatasetIndex::read_s3(&format!("s3://{BUCKET}/{key}"), &options).expect("the shards are valid");
        let bytes = index.to_bytes().expect("the index can be written as JSON");
        let (requests, lists) = (counts.all(), counts.lists());
        let received = DatasetIndex::from_bytes(&bytes).expect("the bytes are undamaged");
        assert_eq!(received, index);
        let dataset = Dataset::from_index_s3(&received, &options, &stage.config()).expect("the shards are valid");
        assert_eq!(counts.all(), requests, "requests were sent to open the data set from its index");
        assert_same(&dataset, &stage.local(key), 1);
        assert_eq!(counts.lists(), lists);

        let mut damaged = bytes.clone();
        damaged[bytes.len() / 2] ^= 1;
        for wrong in [&damaged[..], &bytes[..bytes.len() - 1], b""] {
            let error = DatasetIndex::from_bytes(wrong).expect_err("the index is damaged");
            assert_eq!(error.exit_code(), ExitCode::Corrupt, "wrong exit code for: {error}");
        }
        let local = DatasetIndex::read(&stage.server.path(key).display().to_string(), &stage.config())
            .expect("the shards are valid");
        let local = DatasetIndex::from_bytes(&local.to_bytes().expect("the index can be written as JSON"))
            .expect("the bytes are undamaged");
        assert_same(&Dataset::from_index(&local, &stage.config()).expect("the shards are valid"), &stage.local(key), 1);
    }
}

/// The environment variable through which the next test gives the location to its child process.
const CHILD: &str = "LOCDIFF_TEST_S3_LOCATION";

#[test]
fn credentials_and_cache_come_from_the_environment() {
    if let Ok(location) = std::env::var(CHILD) {
        let dataset = Dataset::open(&location, &ShardsConfig::default()).expect("the shards are valid");
        println!("fingerprint {:016x}", dataset.fingerprint());
        all_rows(&dataset);
        return;
    }
    let stage = Stage::new();
    let child = |variables: Vec<(String, String)>| {
        let mut child = std::process::Command::new(std::env::current_exe().expect("the program has a path"));
        child.args(["--exact", "shards::s3::credentials_and_cache_come_from_the_environment", "--nocapture"]);
        child.env_remove("AWS_ACCESS_KEY_ID").envs(variables).env(CHILD, format!("s3://{BUCKET}/ours"));
        let output =
            child.env("XDG_CACHE_HOME", stage.folder.path()).output().expect("the child process can be started");
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    };
    let text = child(stage.server.variables());
    assert!(
        text.contains(&format!("fingerprint {:016x}", stage.local("ours").fingerprint())),
        "the child did not print the right fingerprint: {text}"
    );
    assert!(!cache_files(&stage.folder.path().join("locdiff/s3")).is_empty(), "the cache is empty");
    let mut variables = stage.server.variables();
    variables.retain(|(name, _)| name != "AWS_ACCESS_KEY_ID");
    let text = child(variables);
    assert!(text.contains("no credentials"), "the child did not report missing credentials: {text}");
}
