//! The report of a quantisation.

use super::{QuantizeOptions, WeightType};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A product or convolution with constant weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// The name of the layer's node in the model.
    pub name: String,
    /// `matmul` or `conv`.
    pub op: String,
    /// The shape of the layer's weights.
    pub weights: Vec<usize>,
    /// The type of the quantised weights; `None` if the layer is not quantised.
    pub to: Option<WeightType>,
    /// The reason why the weights do not have the requested type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The error of the graph with only this layer quantised, on the first sample, if it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<f64>,
}

/// The result of a quantisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuantizeReport {
    /// The options. Automatic choices are replaced by the chosen values.
    pub options: QuantizeOptions,
    /// The measured error: the largest difference from O0, divided by the standard deviation of O0's output.
    pub error: f64,
    /// The error of the graph with the requested type for every layer that can have it.
    pub error_of_all: f64,
    /// Number of graphs whose error was measured.
    pub trials: usize,
    /// Bytes of the layers' weights before and after.
    pub bytes: (u64, u64),
    /// The layers, in the order of the model.
    pub layers: Vec<LayerReport>,
}

impl QuantizeReport {
    /// The report if the transformation is switched off.
    pub(super) fn off(options: QuantizeOptions) -> QuantizeReport {
        QuantizeReport { options, error: 0.0, error_of_all: 0.0, trials: 0, bytes: (0, 0), layers: vec![] }
    }

    /// Number of layers whose weights have this type.
    pub fn of_type(&self, to: WeightType) -> usize {
        self.layers.iter().filter(|l| l.to == Some(to)).count()
    }

    /// Number of quantised layers.
    pub fn quantized(&self) -> usize {
        self.layers.iter().filter(|l| l.to.is_some()).count()
    }

    /// The number of bytes by which the weights became smaller; `None` if they did not.
    pub fn bytes_saved(&self) -> Option<u64> {
        self.bytes.0.checked_sub(self.bytes.1).filter(|n| *n > 0)
    }
}

impl fmt::Display for QuantizeReport {
    /// `33 of 36 layers in int8, 2 in int16, error 2.100e-2 (bound 5.000e-2; 6.000e-2 with all in int8)`,
    /// then one line for each layer that stays in f32.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (weights, all) = (self.options.weights, self.layers.len());
        write!(f, "{} of {all} layers in {weights}, ", self.of_type(weights))?;
        for w in WeightType::ALL.iter().filter(|w| **w != weights && self.of_type(**w) > 0) {
            write!(f, "{} in {w}, ", self.of_type(*w))?;
        }
        write!(f, "error {:.3e} (bound {:.3e}", self.error, self.options.max_error)?;
        if self.error_of_all != self.error {
            write!(f, "; {:.3e} with all in {weights}", self.error_of_all)?;
        }
        write!(f, ")")?;
        for l in self.layers.iter().filter(|l| l.to.is_none()) {
            let reason = l.reason.as_deref().unwrap_or("not quantised");
            write!(f, "\n  {} {:?} stays in f32: {reason}", l.op, l.weights)?;
            if !l.name.is_empty() {
                write!(f, " ({})", halcyon_ir::error::one_line(&l.name))?;
            }
        }
        Ok(())
    }
}
