//! Weights on a backend: matrices and norms.

use crate::lora::Adapter;
use crate::spec::*;
use halcyon::ir::error::Error;
use halcyon::{BlockType, DType, RowMatmul, Tensor};

/// A matrix of weights `[outputs, inputs]`, or several of them.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    pub(crate) data: Tensor,
    pub(crate) blocks: Option<BlockType>,
    /// Whether activations keep 15 bits in products with blocks ([`RowMatmul::fine`]).
    pub(crate) fine: bool,
    /// f32 `[outputs]`, or `[matrices, outputs]`.
    pub(crate) bias: Option<Tensor>,
    pub(crate) adapter: Option<Adapter>,
}

impl Matrix {
    pub(crate) fn new(data: Tensor, blocks: Option<BlockType>) -> Matrix {
        Matrix { data, blocks, fine: false, bias: None, adapter: None }
    }

    /// Bytes of the stored elements.
    pub(crate) fn bytes(&self) -> u64 {
        let size = |t: &Tensor| Ok::<_, Error>(t.dtype()?.bytes(t.dims()?.iter().product()) as u64);
        size(&self.data).unwrap_or(0)
    }

    fn options(&self) -> RowMatmul {
        RowMatmul { blocks: self.blocks, fine: self.fine }
    }

    pub(crate) fn apply(&self, x: &Tensor) -> Tensor {
        let y = x.row_matmul(&self.data, self.options(), None);
        let y = match &self.adapter {
            Some(a) => y + a.apply(x),
            None => y,
        };
        match &self.bias {
            Some(b) => y + b,
            None => y,
        }
    }

    /// Multiplies each row by its own matrix.
    pub(crate) fn apply_which(&self, x: &Tensor, which: &Tensor) -> Tensor {
        let y = x.row_matmul(&self.data, self.options(), Some(which));
        let y = match &self.adapter {
            Some(a) => y + a.apply_which(x, which),
            None => y,
        };
        match &self.bias {
            Some(b) => y + b.gather(which, 0),
            None => y,
        }
    }

    /// The rows with these numbers, in f32.
    pub(crate) fn rows(&self, which: &Tensor) -> Tensor {
        let rows = self.data.gather(which, 0);
        match self.blocks {
            Some(b) => rows.decode_blocks(b),
            None => rows.cast(DType::F32),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct NormWeights {
    pub(crate) weight: Option<Tensor>,
    pub(crate) bias: Option<Tensor>,
    pub(crate) spec: Norm,
}

impl NormWeights {
    pub(crate) fn apply(&self, x: &Tensor) -> Tensor {
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
