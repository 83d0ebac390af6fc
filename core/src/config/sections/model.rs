//! `[model]`: the size of the CS-UNet and the preparation of its input.

use crate::config::AutoOr;
use crate::config::errors::Checker;

section! {
    /// The denoising network (CS-UNet) and the encoding of locations.
    pub struct ModelConfig {
        /// Degree L of the spherical harmonics, 1 to 255. A location is encoded in (L + 1)² dimensions.
        pub degree: u32 = 47,
        /// Width of the image embeddings. "auto": the width in the shards.
        pub embedding_width: AutoOr<u32> = AutoOr::Auto,
        /// Dropout probability in training, at least 0 and below 1.
        pub dropout: f64 = 0.0,
        /// Hidden width of every C-Siren module. 0: the module's output width.
        pub bottleneck: u32 = 0,
        /// Scales the widths of the CS-UNet's modules.
        pub width_factor: f64 = 1.0,
        /// Standardise embeddings with the mean and standard deviation of the training shards.
        pub standardise: bool = true,
        /// Keep only this many dimensions of the code: those with the largest variance over the training data. 0: all.
        pub low_pass_dims: u32 = 0,
    }
}

impl ModelConfig {
    /// Dimensions of an unfiltered code: (L + 1)².
    pub fn dims(&self) -> u64 {
        (u64::from(self.degree) + 1).saturating_pow(2)
    }

    /// Dimensions of the code that the network sees, after the low-pass filter.
    pub fn kept_dims(&self) -> u64 {
        if self.low_pass_dims > 0 { u64::from(self.low_pass_dims) } else { self.dims() }
    }

    /// Widths of the CS-UNet's three levels, widest first.
    pub fn widths(&self) -> [u64; 3] {
        [1, 2, 4].map(|divisor| ((self.kept_dims() / divisor) as f64 * self.width_factor).round() as u64)
    }

    /// Widths that tensor parallelism splits over ranks: the hidden layers of the three levels, and the input of the
    /// head.
    pub fn split_widths(&self) -> [u64; 4] {
        let hidden = self.widths().map(|width| if self.bottleneck > 0 { u64::from(self.bottleneck) } else { width });
        [hidden[0], hidden[1], hidden[2], 2 * self.widths()[0]]
    }

    /// Number of parameters of the CS-UNet for image embeddings of a given width.
    pub fn parameters(&self, embedding_width: u64) -> u64 {
        /// Width of the sinusoidal time embedding.
        const TIME: u64 = 200;
        let dims = self.kept_dims();
        let [a, b, c] = self.widths();
        let module = |input: u64, output: u64| {
            let width = if self.bottleneck > 0 { u64::from(self.bottleneck) } else { output };
            let linear = |from: u64, to: u64| from * to + to;
            linear(input, width)
                + linear(embedding_width, width)
                + linear(width, output)
                + linear(TIME, width)
                + linear(width, 2 * width)
        };
        let modules = [(dims, a), (a, b), (b, c), (c, c), (2 * c, b), (2 * b, a)];
        modules.into_iter().map(|(input, output)| module(input, output)).sum::<u64>() + 2 * a * dims + dims
    }

    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        checker.within("model.degree", self.degree, 1..=255);
        if let Some(width) = self.embedding_width.value() {
            checker.within("model.embedding_width", width, 1..=65_536);
        }
        checker.within("model.dropout", self.dropout, 0.0..1.0);
        checker.within("model.bottleneck", self.bottleneck, 0..=65_536);
        checker.within("model.width_factor", self.width_factor, 0.01..=16.0);
        checker.within("model.low_pass_dims", u64::from(self.low_pass_dims), 0..=self.dims());
        self.check_narrowest(checker);
    }

    /// Refuses a network with a module of 0 units. Such a module would pass on no signal, and the scale of its initial
    /// weights would be undefined.
    fn check_narrowest(&self, checker: &mut Checker) {
        let units = self.kept_dims() / 4;
        if (1..4).contains(&self.low_pass_dims) {
            let message = format!(
                "is {}, too few: the narrowest module gets a quarter of these dimensions; wanted 0 or at least 4",
                self.low_pass_dims
            );
            checker.push("model.low_pass_dims", message);
        } else if units > 0 && (units as f64 * self.width_factor).round() < 1.0 {
            let message = format!(
                "is {}, which scales the narrowest module from {units} units to 0, wanted at least {}",
                self.width_factor,
                0.5 / units as f64
            );
            checker.push("model.width_factor", message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Layer, load};

    #[test]
    fn network_with_an_empty_module_is_refused() {
        let set = |texts: &[&str]| load(&texts.iter().map(|text| Layer::Set((*text).into())).collect::<Vec<_>>());
        let error_text = |texts: &[&str]| set(texts).expect_err("the configuration is invalid").to_string();
        let text = error_text(&["model.low_pass_dims=3"]);
        assert!(text.contains("model.low_pass_dims: is 3, too few"), "{text}");
        assert!(set(&["model.low_pass_dims=4"]).is_ok());
        let text = error_text(&["model.degree=3", "model.width_factor=0.1"]);
        let want =
            "model.width_factor: is 0.1, which scales the narrowest module from 4 units to 0, wanted at least 0.125";
        assert!(text.contains(want), "{text}");
        assert!(set(&["model.degree=3", "model.width_factor=0.125"]).is_ok());
    }

    #[test]
    fn parameter_count_equals_the_reference_network() {
        let count = |degree| ModelConfig { degree, ..ModelConfig::default() }.parameters(768);
        assert_eq!(count(47), 75_870_720);
        assert_eq!(count(23), 6_215_040);
    }
}
