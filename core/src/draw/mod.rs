//! Maps of the world as PNG: where answers lie, and how the density of a sample gathers.
//!
//! In reading order:
//! - [`answers`]: predictions against the truth.
//! - [`density`]: one sample along the denoising steps.
//! - `world`: the projection, land, lines that may cross the 180th meridian.
//! - `glyphs`: a few letters.
//! - [`png`]: pixels into a file.
//!
//! Pure: from points to bytes, without files, fonts or clocks; the same input gives the same bytes. Maps are equirectangular,
//! north up, Greenwich in the middle. Land is Natural Earth's (`coastline.txt` says where it comes from).

pub mod answers;
pub mod density;
mod glyphs;
pub mod png;
mod world;

pub use answers::{ANSWERS_MAX, Answer, answers_map};
pub use density::{Frame, density_strip, field_points};
pub use png::Picture;
