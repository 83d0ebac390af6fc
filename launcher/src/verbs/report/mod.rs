//! The report of an evaluation: Markdown, JSON, and one HTML page that needs no network. `eval` writes the report of its
//! run, and `report` writes it again or compares several runs.
//!
//! - `verb`: the verb `report`, and the files of a report.
//! - `source`: reads an evaluated run from its folder.
//! - `photos`: single photos with their samples and densities.
//! - `systems`: the methods of a run with their error curves, and the photos that are shown.
//! - `content`: the content of a report, computed from the runs. It is also the JSON file.
//! - `experiments`: the results of the paper's experiments.
//! - `tables`: the tables for people.
//! - `markdown`, `page`: the two documents. They escape all text that comes from files.
//! - `page/`: the script and the style of the page. `serve` builds on the map and the style.

mod content;
mod experiments;
mod markdown;
mod page;
mod photos;
mod source;
mod systems;
mod tables;
mod verb;

pub(super) use page::{MAP_SCRIPT, MAP_STYLE, land_json, source_hash};
pub(super) use photos::{FILE as PHOTOS_FILE, PhotosFile};
pub(super) use verb::{run, write_beside};
