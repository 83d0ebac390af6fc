//! The presets in `configs/`, compiled into the binary so that `--config l47` works from any folder.

/// A named configuration.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    /// Name of the preset, as given to `--config`.
    pub name: &'static str,
    /// Contents of the TOML file of the preset.
    pub toml: &'static str,
}

macro_rules! presets {
    ($($name:literal),*) => {
        /// All presets, smallest model first.
        pub const PRESETS: &[Preset] =
            &[$(Preset { name: $name, toml: include_str!(concat!("../../../configs/", $name, ".toml")) }),*];
    };
}

presets!("demo", "l23", "l47", "paper-l47", "l95", "geoclip");

/// Looks up a preset by name.
pub fn preset(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name)
}
