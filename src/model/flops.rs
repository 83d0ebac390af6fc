//! The number of floating-point operations of a training step. Only matrix products are counted, and a multiply-add
//! counts as two operations.
//!
//! A layer needs one product in the forward pass and two in the backward pass: the gradient of its weights and the
//! gradient of its input. If the input needs no gradient (the noised code, the image, the time embedding), only the
//! gradient of the weights is computed. The KL divergence needs three products: the logits of the truth, the logits of
//! the prediction, and the gradient of the prediction. Sines, norms, the optimiser and the harmonics of the anchors are
//! not counted, as is usual, because memory bandwidth and not computation limits their speed.

use super::architecture::{Architecture, ModuleShape};

/// Number of operations per multiply-add.
const OPERATIONS: f64 = 2.0;
/// Number of matrix products of the KL divergence, forward and backward.
const KL_PRODUCTS: f64 = 3.0;

impl Architecture {
    /// Number of operations of one training step on `rows` rows with `anchors` anchors. `anchors` is 0 if the loss has
    /// no KL divergence.
    pub fn step_flops(&self, rows: u64, anchors: u64) -> f64 {
        let rows = rows as f64;
        let layers: f64 = self
            .specs()
            .iter()
            .filter(|spec| spec.shape.len() == 2)
            .map(|spec| {
                let samples = if spec.name.contains(".time.") { self.timesteps as f64 } else { rows };
                samples * products(&spec.name) * spec.shape.iter().product::<i64>() as f64
            })
            .sum();
        OPERATIONS * (layers + KL_PRODUCTS * rows * anchors as f64 * self.dims as f64)
    }

    /// Number of operations of one sampler step of one denoising chain, without the time and image layers. `collapsed`
    /// says whether the two products of each module are collapsed to one.
    pub fn sampler_step_flops(&self, collapsed: bool) -> f64 {
        let products = |shape: &ModuleShape| {
            if collapsed { shape.input * shape.output } else { shape.hidden * (shape.input + shape.output) }
        };
        let modules = self.modules();
        let head = 2 * modules[0].output * self.dims;
        OPERATIONS * (modules.iter().map(products).sum::<i64>() + head) as f64
    }
}

/// Number of matrix products of a layer per training step. `weight` is the name of the layer's weight.
fn products(weight: &str) -> f64 {
    let input_has_no_gradient = weight.ends_with(".image.weight") || weight.ends_with(".time.0.weight");
    if input_has_no_gradient || weight == "down1.x.weight" { 2.0 } else { 3.0 }
}

#[cfg(test)]
mod tests {
    use locdiff_core::config::ModelConfig;

    use super::*;

    #[test]
    fn operations_are_the_sum_over_the_layers() {
        // Degree 3 gives codes of 16 dimensions and layers of widths 16, 8 and 4.
        let architecture = Architecture::new(&ModelConfig { degree: 3, ..ModelConfig::default() }, 6, 10);
        let modules = [(16, 16), (16, 8), (8, 4), (4, 4), (8, 8), (16, 16)];
        let per_row: i64 = modules.iter().map(|(input, output)| 3 * output * (input + output) + 2 * 6 * output).sum();
        // The input of `down1` needs no gradient, which saves one product. The head has 32 inputs and 16 outputs.
        let per_row = per_row - 16 * 16 + 3 * 32 * 16;
        let per_timestep: i64 = modules.iter().map(|(_, hidden)| 2 * 200 * hidden + 3 * 2 * hidden * hidden).sum();
        let want = |rows: i64, anchors: i64| 2 * (rows * per_row + 10 * per_timestep + 3 * rows * anchors * 16);
        for (rows, anchors) in [(1, 0), (5, 7), (512, 64)] {
            assert_eq!(architecture.step_flops(rows, anchors), want(rows as i64, anchors as i64) as f64);
        }
        let head = 32 * 16;
        let collapsed: i64 = modules.iter().map(|(input, output)| input * output).sum();
        let whole: i64 = modules.iter().map(|(input, output)| output * (input + output)).sum();
        let got = [true, false].map(|collapsed| architecture.sampler_step_flops(collapsed));
        assert_eq!(got, [collapsed, whole].map(|products| 2.0 * (products + head) as f64));
    }

    #[test]
    fn large_steps_are_about_six_operations_per_weight_and_row() {
        let architecture = Architecture::new(&ModelConfig { degree: 47, ..ModelConfig::default() }, 768, 200);
        let usual = 6.0 * architecture.parameter_count() as f64 * 4096.0;
        let share = architecture.step_flops(4096, 0) / usual;
        // The share is below 1, because the time layers hold 40 % of the weights but process only 200 timesteps, not
        // 4096 rows.
        assert!(
            (0.5..0.7).contains(&share),
            "a step takes {share} of the usual six operations per weight and row, wanted 0.5 to 0.7"
        );
    }
}
