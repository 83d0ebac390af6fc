//! `eval --suite generalizability`: evaluates a run with its gallery, and with even grids in place of the gallery.
//!
//! As in the paper, the same points are the gallery of GeoCLIP's retrieval and the anchors to which LocDiff decodes its
//! samples. Decoded samples are not refined, because a refined sample hardly depends on the anchors.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use locdiff_core::config::{DecodeAnchors, EvalConfig, RetrievalHead};
use locdiff_core::geo::{Place, fibonacci_grid};
use locdiff_core::metrics::{Bootstrap, NamedIntervals, PlaceGroups, Within, compare};
use locdiff_core::protocol::{EvalSummary, HybridRequest, Method};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::cli::{EvalRequest, Global, Suite};
use crate::error::LaunchError;
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::NodeWorkers;
use crate::supervisor::{Supervisor, hold_signals};
use crate::terminal::{width, wrapped};
use crate::verbs::eval::evaluation::{Evaluation, Rated};
use crate::verbs::eval::published;
use crate::verbs::eval::score::MethodScore;
use crate::verbs::eval::table::{self, Computed, Row};
use crate::verbs::eval::target;

/// The paper's numbers of grid points.
const GRIDS: [u32; 4] = [21_000, 100_000, 500_000, 1_000_000];
/// The paper's finding is about this distance and larger ones, km.
const FAR_KM: f64 = 200.0;

/// The scores of one method with one gallery.
struct GalleryScore {
    /// Number of points of the grid; `None`: the gallery of the run.
    grid: Option<u32>,
    /// Number of points of the gallery or grid.
    points: u64,
    /// Name of the method in the text.
    system: String,
    scored: MethodScore,
}

impl GalleryScore {
    /// Name of the row in the text.
    fn name(&self) -> String {
        format!("{}, {} of {}", self.system, self.gallery(), self.points)
    }

    fn gallery(&self) -> &'static str {
        if self.grid.is_some() { "grid" } else { "gallery" }
    }
}

/// The scores of all methods with all galleries.
struct GalleryScores {
    rows: Vec<GalleryScore>,
    /// The summary of the evaluation with the gallery of the run.
    summary: EvalSummary,
    places: PlaceGroups,
    /// Whether retrieval compares photos with places. If not, it compares them with training photos.
    has_places: bool,
}

/// The scores of a method with a grid minus its scores with the gallery.
#[derive(Debug, Serialize)]
struct GridDifference {
    method: &'static str,
    points: u64,
    less: &'static str,
    #[serde(flatten)]
    numbers: NamedIntervals,
    #[serde(skip)]
    system: String,
    #[serde(skip)]
    within: Vec<Within>,
}

impl GridDifference {
    /// Name of the row in the text.
    fn name(&self) -> String {
        format!("{}, grid of {}", self.system, self.points)
    }
}

/// Evaluates the run with each gallery and prints the table.
pub(super) fn run(request: &EvalRequest, global: &Global, output: Output) -> anyhow::Result<Value> {
    let mut global = global.clone();
    global.set.extend(request.exclude_km.map(|km| format!("eval.exclude_km={km:?}")));
    hold_signals()?;
    let (run, checkpoint, _use, mut resolved) = target::find(&global, false, output)?;
    (resolved.config.eval.anchors, resolved.config.eval.refine) = (DecodeAnchors::Gallery, false);
    let config = resolved.config.clone();
    let world = NodeWorkers::plan(&config, &gpus::inventory())?.with_all_cores();
    let (mut supervisor, is_held) = (Supervisor::new()?, false);
    let (run, checkpoint) = (&run, &checkpoint);
    let evaluation = Evaluation { supervisor: &mut supervisor, resolved, world, run, checkpoint, is_held, output };
    let grids = if request.grids.is_empty() { &GRIDS[..] } else { &request.grids };
    let GalleryScores { rows, summary, places, has_places } = rate_all(evaluation, grids, output)?;
    let bootstrap = Bootstrap { seed: config.train.seed, ..Bootstrap::default() };
    let (photo_places, thresholds_km) = (places.count(), config.eval.thresholds_km.clone());
    let (rows, differences) = supervisor.compute(move || {
        let differences = differences(&rows, &places, &thresholds_km, &bootstrap)?;
        Ok((rows, differences))
    })?;
    let thresholds_km = &config.eval.thresholds_km;
    let mut rows: Vec<Row> = rows.into_iter().map(|row| computed(row, &summary, &config.shards.test)).collect();
    rows.extend(published::rows_for(Suite::Generalizability, thresholds_km).into_iter().map(Row::Published));
    // The number of places that LocDiff chooses among is in the names of the rows.
    let shown = EvalConfig { anchors: DecodeAnchors::Grid, ..config.eval.clone() };
    let data = table::data_summary(&summary, photo_places, &shown);
    output.print(&table::text(&data, thresholds_km, &rows, width()));
    print_differences(&differences, has_places, output);
    Ok(json!({
        "ok": true, "run": run, "checkpoint": checkpoint.path, "data": summary,
        "exclude_km": table::exclude_km(&summary, &config.eval), "rows": rows, "differences": differences,
    }))
}

/// Evaluates the run with its gallery, and then with each of `grids`.
fn rate_all(mut evaluation: Evaluation<'_>, grids: &[u32], output: Output) -> anyhow::Result<GalleryScores> {
    let folder = tempfile::tempdir().map_err(LaunchError::at(std::env::temp_dir()))?;
    let request = |has_places| if has_places { HybridRequest::Wanted } else { HybridRequest::No };
    let wanted = evaluation.resolved.config.retrieval.wanted_head();
    let first = evaluation.rate(request(wanted != RetrievalHead::Knn))?;
    let (summary, places) = (first.summary.clone(), first.places.clone());
    // The head "auto" may become "knn".
    let has_places = summary.head.is_some_and(|head| head != RetrievalHead::Knn);
    let mut rows = scores(None, first, has_places);
    for grid in grids {
        output.print(&format!("a grid of {grid} points instead of the gallery"));
        let file = write_grid(folder.path(), *grid)?;
        evaluation.resolved.config.retrieval.gallery = file.display().to_string();
        rows.extend(scores(Some(*grid), evaluation.rate(request(has_places))?, has_places));
    }
    rows.sort_by_key(|row| row.scored.method);
    Ok(GalleryScores { rows, summary, places, has_places })
}

/// Writes the points of an even grid to a file.
fn write_grid(folder: &Path, points: u32) -> Result<PathBuf, LaunchError> {
    let mut text = String::from("lat,lon\n");
    for place in fibonacci_grid(points as usize).into_iter().map(Place::from) {
        // Six decimal places are precise to 11 cm.
        let _ = writeln!(text, "{:.6},{:.6}", place.latitude().0, place.longitude().0);
    }
    let path = folder.join(format!("grid-{points}.csv"));
    std::fs::write(&path, text).map_err(LaunchError::at(&path))?;
    Ok(path)
}

/// The scores of GeoCLIP's retrieval and of LocDiff. Retrieval is left out unless its gallery `has_places`.
fn scores(grid: Option<u32>, rated: Rated, has_places: bool) -> Vec<GalleryScore> {
    let Rated { scores, summary, .. } = rated;
    let points = grid.map_or(summary.gallery_points.filter(|_| has_places).unwrap_or(summary.anchors), u64::from);
    let wanted = |scored: &MethodScore| match scored.method {
        Method::Retrieval => has_places,
        Method::Locdiff => true,
        Method::RetrievalConsensus | Method::LocdiffH => false,
    };
    let row = |scored: MethodScore| {
        let system = table::name(scored.method, &summary);
        GalleryScore { grid, points, system, scored }
    };
    scores.into_iter().filter(wanted).map(row).collect()
}

/// Prints the differences between grids and the gallery, and the largest losses.
fn print_differences(differences: &[GridDifference], has_places: bool, output: Output) {
    let names: Vec<String> = differences.iter().map(GridDifference::name).collect();
    let within: Vec<&[Within]> = differences.iter().map(|difference| difference.within.as_slice()).collect();
    output.print(table::paired("grid minus gallery", &names, &within, width()).trim_end());
    let alone = "retrieval compares photos with training photos (head knn), which no grid can replace, so the table has \
                 LocDiff alone";
    for line in finding(differences).into_iter().chain((!has_places).then(|| alone.to_owned())) {
        output.print(&format!("\n{}", wrapped(&line, 2, width())));
    }
}

/// Compares each grid with the gallery, for each method.
fn differences(
    found: &[GalleryScore],
    places: &PlaceGroups,
    thresholds_km: &[f64],
    bootstrap: &Bootstrap,
) -> anyhow::Result<Vec<GridDifference>> {
    let mut differences = Vec::new();
    for gallery in found.iter().filter(|row| row.grid.is_none()) {
        let method = gallery.scored.method;
        for grid in found.iter().filter(|row| row.grid.is_some() && row.scored.method == method) {
            let (one, other) = (&grid.scored.errors_km, &gallery.scored.errors_km);
            let scores = compare(one, other, places, thresholds_km, bootstrap)?;
            let (system, points) = (grid.system.clone(), grid.points);
            let (numbers, within) = (scores.named(), scores.within);
            differences.push(GridDifference {
                method: method.name(),
                points,
                less: "gallery",
                numbers,
                system,
                within,
            });
        }
    }
    Ok(differences)
}

/// The largest loss of each method from the gallery to a grid, at [`FAR_KM`] and larger distances. `None` if there is no
/// such distance.
fn finding(differences: &[GridDifference]) -> Option<String> {
    let of_method = |same: &[GridDifference]| {
        let far = same.iter().flat_map(|difference| &difference.within).filter(|at| at.km >= FAR_KM);
        let least = far.map(|at| at.percent.value).min_by(f64::total_cmp)?;
        Some(format!("{} loses at most {:.1} points", same[0].system, (-least).max(0.0)))
    };
    let found: Option<Vec<String>> =
        differences.chunk_by(|one, next| one.method == next.method).map(of_method).collect();
    let found = found.filter(|found| !found.is_empty())?;
    Some(format!("from the gallery to a grid, at {FAR_KM} km and more: {}", found.join(", ")))
}

fn computed(row: GalleryScore, summary: &EvalSummary, dataset: &str) -> Row {
    let (name, gallery) = (row.name(), row.gallery());
    let degree = (row.scored.method == Method::Locdiff).then(|| ("degree", json!(summary.degree)));
    let labels = [("gallery", json!(gallery)), ("points", json!(row.points))].into_iter().chain(degree);
    Row::Computed(Computed {
        method: row.scored.method.name().to_owned(),
        rating: row.scored.rating,
        name: Some(name),
        dataset: dataset.to_owned(),
        simulated: summary.is_simulated,
        source: "computed",
        out_of_range: None,
        labels: labels.map(|(name, value)| (name.to_owned(), value)).collect::<Map<_, _>>(),
    })
}
