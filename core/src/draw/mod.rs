//! World maps as PNG: predictions compared with the truth, and the density of one sample at successive denoising steps.
//! Also plots as SVG.
//!
//! The modules in reading order:
//! - [`answers`]: predictions compared with the truth.
//! - [`density`]: the density of one sample at successive denoising steps.
//! - [`curves`]: accuracy over the distance to the nearest training photo.
//! - [`calibration`]: how often radii hold the true place.
//! - [`spread`]: the choice of some of many positions.
//! - `world`: the map projection, land, and lines that may cross the 180th meridian.
//! - `glyphs`: a tiny bitmap font.
//! - [`png`]: the PNG encoder.
//!
//! The code is pure: it uses no files, fonts or clocks, and the same input always gives the same bytes. Maps are
//! equirectangular, with north up and Greenwich in the middle. Land comes from Natural Earth (the header of
//! `coastline.txt` names the source).

pub mod answers;
pub mod calibration;
pub mod curves;
pub mod density;
mod glyphs;
pub mod png;
mod spread;
mod world;

pub use answers::{ANSWERS_MAX, Answer, answers_map};
pub use calibration::calibration_plot;
pub use curves::distance_curves;
pub use density::{Frame, density_strip, field_points};
pub use png::Picture;
pub use spread::spread;
pub use world::{is_land, land_outlines};
