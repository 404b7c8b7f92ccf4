//! The products of language models: activations times weights that are stored by rows, perhaps in blocks, and
//! perhaps chosen among several matrices.

use super::composite::{CompositeGradient, CompositeKind, CompositeRow};
use super::count;
use crate::blocks::BlockType;
use crate::composite::{Attr, Composite, attrs};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::kernel::templates::linear::TEMPLATE;
use crate::shape::Shape;
use crate::target::Operand;

const NAME: &str = "row_matmul";
/// The attribute with the number of the format of the weights in GGUF files. Weights without it are floats.
const BLOCKS: &str = "blocks";
/// The attribute of products whose activations keep at least 15 bits.
const FINE: &str = "fine";

/// How weights are stored, and how exact a product with them is: the options of [`Graph::row_matmul`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RowMatmul {
    /// The format of the weights. `None`: floats.
    pub blocks: Option<BlockType>,
    /// If the weights have blocks, kernels may round activations and decoded weights to 8 bits; with `fine`,
    /// to 15 bits. A kernel takes up to three times the time then.
    pub fine: bool,
}

impl From<Option<BlockType>> for RowMatmul {
    fn from(blocks: Option<BlockType>) -> RowMatmul {
        RowMatmul { blocks, fine: false }
    }
}

pub(super) static ROW_MATMUL: CompositeRow = CompositeRow {
    name: NAME,
    has_builder: true,
    has_kernels: true,
    packs: true,
    summed: Some((0, 0)),
    half: None,
    template: Some(&TEMPLATE),
    flops: product_flops,
    gradient: CompositeGradient::Body,
};

/// Two FLOPs for each multiply-add.
fn product_flops(_: &Composite, inputs: &[Operand], output: &Operand) -> u64 {
    let k = inputs.first().map_or(0, |x| count(x.view.shape.last().map(std::slice::from_ref).unwrap_or(&[])));
    (output.view.numel() as u64).saturating_mul(k).saturating_mul(2)
}

/// The sizes of a call of the composite `row_matmul`, with the names of [`Graph::row_matmul`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowMatmulSizes {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Matrices of weights: 1 unless each row chooses one.
    pub matrices: usize,
}

impl Composite {
    /// The sizes of a call of `row_matmul`. `None` if the operands do not have the types and shapes of
    /// [`Graph::row_matmul`]: a composite of this name can be built with any body, so kernels check them
    /// here.
    pub fn row_matmul_sizes(&self, inputs: &[Operand], outputs: &[Operand]) -> Option<RowMatmulSizes> {
        let ([x, w, which @ ..], [y]) = (inputs, outputs) else { return None };
        let (&[m, k], &[.., n, width]) = (&x.view.shape[..], &w.view.shape[..]) else { return None };
        let width = match (self.weight_blocks(), w.dtype) {
            (Some(b), DType::U8) => b.elements_of(width)?,
            (None, DType::F32 | DType::F16 | DType::BF16) => width,
            _ => return None,
        };
        let matrices = match which {
            [] if w.view.rank() == 2 => 1,
            [i] if w.view.rank() == 3 && i.view.shape[..] == [m] && i.dtype.is_int() => w.view.shape[0],
            _ => return None,
        };
        let floats = x.dtype == DType::F32 && y.dtype == DType::F32;
        let fits = floats && width == k && y.view.shape[..] == [m, n];
        fits.then_some(RowMatmulSizes { m, n, k, matrices })
    }

    /// The format of the weights of a composite `row_matmul`; `None` if they are floats.
    pub fn weight_blocks(&self) -> Option<BlockType> {
        self.int(BLOCKS).and_then(|n| u32::try_from(n).ok()).and_then(BlockType::from_ggml)
    }

    /// Whether activations of a composite `row_matmul` keep at least 15 bits ([`RowMatmul::fine`]).
    pub fn fine_activations(&self) -> bool {
        self.int(FINE).is_some()
    }
}

impl Graph {
    /// `x` `[m, k]` in f32 times the transpose of a matrix of weights `[n, k]`: `[m, n]` in f32. The weights
    /// are f32, f16 or bf16, or with [`RowMatmul::blocks`] the bytes of block-quantised weights,
    /// u8 `[n, bytes]`.
    ///
    /// With `which`, integers `[m]`, the weights have a further axis in front, and row `i` is multiplied by
    /// matrix `which[i]` (a mixture of experts).
    ///
    /// Kernels of this composite are batch-invariant: the bits of a row of the result depend on that row of
    /// `x`, on its matrix and on nothing else. If the weights have blocks, a kernel may round the activations
    /// of a row in groups of at most 32, and decoded weights one by one, to 8 bits or to 15
    /// ([`RowMatmul::fine`]).
    ///
    /// # Errors
    /// [`Error::DType`] unless `x` is f32 and the weights are floats or bytes; [`Error::Shape`] if the shapes
    /// do not match.
    pub fn row_matmul(
        &mut self,
        x: NodeId,
        w: NodeId,
        options: impl Into<RowMatmul>,
        which: Option<NodeId>,
    ) -> Result<NodeId> {
        let RowMatmul { blocks, fine } = options.into();
        let dtype_error = |g: &Graph, dtype: DType, want: &str| Error::DType {
            op: NAME.into(),
            dtype,
            want: want.into(),
            at: g.span.clone(),
        };
        if self.dtype(x) != DType::F32 {
            return Err(dtype_error(self, self.dtype(x), "activations are f32"));
        }
        match (blocks, self.dtype(w)) {
            (Some(_), DType::U8) | (None, DType::F32 | DType::F16 | DType::BF16) => {}
            (Some(_), d) => return Err(dtype_error(self, d, "weights in blocks are bytes (u8)")),
            (None, d) => return Err(dtype_error(self, d, "weights are f32, f16 or bf16")),
        }
        let (xs, ws) = (self.shape(x).clone(), self.shape(w).clone());
        let k = ws.last().and_then(|d| d.known()).and_then(|n| match blocks {
            Some(b) => b.elements_of(n),
            None => Some(n),
        });
        let rank = if which.is_some() { 3 } else { 2 };
        let rows = which.is_none_or(|i| *self.shape(i) == Shape::from([xs[0]]));
        if xs.rank() != 2 || ws.rank() != rank || k.is_none_or(|k| !xs[1].is(k)) || !rows {
            let format = blocks.map_or("floats".to_string(), |b| format!("blocks of {b}"));
            let what = format!(
                "x {xs}, weights {ws} of {format}: expected [m, k] and weights [n, k]{}",
                if which.is_some() {
                    " with an axis of matrices in front, and [m] numbers of matrices"
                } else {
                    ""
                }
            );
            return Err(Error::shape(NAME, what).at(&self.span));
        }
        let mut own = attrs([]);
        if let Some(b) = blocks {
            own.insert(BLOCKS.into(), Attr::Int(i64::from(b.row().ggml)));
            if fine {
                own.insert(FINE.into(), Attr::Int(1));
            }
        }
        let operands: Vec<NodeId> = [x, w].into_iter().chain(which).collect();
        self.composite(CompositeKind::RowMatmul, own, &operands, |g, x| {
            let Some(which) = x.get(2) else {
                let w = widened(g, x[1], blocks)?;
                let w = g.transpose(w, 0, 1)?;
                return g.matmul(x[0], w);
            };
            let w = g.gather(x[1], *which, 0)?;
            let w = widened(g, w, blocks)?;
            let w = g.transpose(w, 1, 2)?;
            let rows = g.unsqueeze(x[0], 1)?;
            let y = g.matmul(rows, w)?;
            g.squeeze(y, 1)
        })
    }
}

/// The weights in f32.
fn widened(g: &mut Graph, w: NodeId, blocks: Option<BlockType>) -> Result<NodeId> {
    match blocks {
        Some(b) => g.decode_blocks(w, b),
        None => g.cast(w, DType::F32),
    }
}
