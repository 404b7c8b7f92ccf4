//! Weights on a backend: matrices and norms.

use crate::spec::*;
use halcyon::{BlockType, DType, Tensor};

/// A matrix of weights `[outputs, inputs]`, or several of them.
#[derive(Debug)]
pub(super) struct Matrix {
    pub(super) data: Tensor,
    pub(super) blocks: Option<BlockType>,
    /// f32 `[outputs]`, or `[matrices, outputs]`.
    pub(super) bias: Option<Tensor>,
}

impl Matrix {
    pub(super) fn apply(&self, x: &Tensor) -> Tensor {
        let y = x.row_matmul(&self.data, self.blocks, None);
        match &self.bias {
            Some(b) => y + b,
            None => y,
        }
    }

    /// Multiplies each row by its own matrix.
    pub(super) fn apply_which(&self, x: &Tensor, which: &Tensor) -> Tensor {
        let y = x.row_matmul(&self.data, self.blocks, Some(which));
        match &self.bias {
            Some(b) => y + b.gather(which, 0),
            None => y,
        }
    }

    /// The rows with these numbers, in f32.
    pub(super) fn rows(&self, which: &Tensor) -> Tensor {
        let rows = self.data.gather(which, 0);
        match self.blocks {
            Some(b) => rows.decode_blocks(b),
            None => rows.cast(DType::F32),
        }
    }
}

#[derive(Debug)]
pub(super) struct NormWeights {
    pub(super) weight: Option<Tensor>,
    pub(super) bias: Option<Tensor>,
    pub(super) spec: Norm,
}

impl NormWeights {
    pub(super) fn apply(&self, x: &Tensor) -> Tensor {
        let eps = self.spec.eps;
        let Some(w) = &self.weight else {
            let size = x.dims().ok().and_then(|d| d.last().copied()).unwrap_or(1);
            let ones = Tensor::ones(x.backend(), [size], DType::F32);
            return x.rms_norm(&ones, eps);
        };
        match self.spec.kind {
            NormKind::Layer => x.layer_norm(w, self.bias.as_ref(), -1, eps),
            NormKind::Rms | NormKind::RmsPlusOne => x.rms_norm(w, eps),
        }
    }
}
