//! The presets in `configs/`, built into the launcher so that `--config l47` works from any folder.

/// A named configuration.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    /// What `--config` takes.
    pub name: &'static str,
    /// Its text.
    pub toml: &'static str,
}

macro_rules! presets {
    ($($name:literal),*) => {
        /// All presets, smallest model first.
        pub const PRESETS: &[Preset] =
            &[$(Preset { name: $name, toml: include_str!(concat!("../../../configs/", $name, ".toml")) }),*];
    };
}

presets!("demo", "l23", "l47", "paper-l47", "l95");

/// The preset of that name.
pub fn preset(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name)
}
