//! The recurrent part of a layer between its projections: a causal convolution and a scan, computed by chunks
//! of positions. The crate that has the layers builds the body; the contract of kernels is here.

use super::composite::{CompositeGradient, CompositeRow};
use super::count;
use crate::composite::{Attr, Attrs, Composite, attrs, float};
use crate::dtype::DType;
use crate::target::Operand;

const NAME: &str = "chunk_scan";

pub(super) static CHUNK_SCAN: CompositeRow = CompositeRow {
    name: NAME,
    has_builder: false,
    has_kernels: true,
    packs: false,
    summed: None,
    half: None,
    template: None,
    flops,
    gradient: CompositeGradient::Body,
};

/// The products with matrices: of each row's query, and of what a chunk adds to the matrices.
fn flops(c: &Composite, inputs: &[Operand], output: &Operand) -> u64 {
    let Some(s) = c.chunk_scan_sizes(inputs, std::slice::from_ref(output)) else { return 0 };
    let matrix = count(&[s.scan.heads, s.scan.key, s.scan.value]).saturating_mul(2);
    let reads = if s.scan.delta { 2 } else { 1 };
    let chunks = count(&[s.kept, s.chunk]);
    matrix.saturating_mul((s.rows as u64).saturating_mul(reads).saturating_add(chunks))
}

/// The options of a composite `chunk_scan`.
///
/// The rows of a step are arranged in chunks of `size` positions, `depth` chunks of each of `width`
/// sequences: chunk `d * width + w`. The operands, f32 unless another type is given, are in this order:
///
/// | operand | shape | |
/// |---|---|---|
/// | input | `[rows, channels + extras]` | the inputs of the convolution, then the extras |
/// | ring | `[slots * ring, channels + extras]` | earlier inputs |
/// | matrices | `[matrices, heads * key * value]` | |
/// | taps | `[kernel, channels]` | factors of the convolution, from the oldest position on |
/// | rate, step bias | `[heads]` each | |
/// | sequences | i32 `[width]` | the slot of each sequence in the ring |
/// | window | i32 `[chunks * (size + kernel - 1)]` | where the inputs of the places are |
/// | valid | `[chunks, size]` | 1 for places that have a row, else 0 |
/// | full | `[depth, width]` | 1 for chunks that change the matrices, else 0 |
/// | start | i32 `[width]` | the matrices before the first chunk |
/// | kept | i32 `[kept]` | chunks after which the matrices are a result |
/// | back | i32 `[rows]` | the place `chunk * size + i` of each row |
/// | skip | `[heads, 1]` | only in Mamba 2 |
/// | bias | `[channels]` | only with [`ChunkScan::bias`] |
///
/// Further operands are constants of the body, which kernels do not read.
///
/// The extras are for each head the strength, only in DeltaNet, and then for each head the step. The window
/// has for each place of a chunk, and for those before it that the convolution sees, a row of: the rings of
/// the sequences, the input, a row of zeros.
///
/// `silu(convolution) * valid` is divided into queries `q`, keys `k` and values `v`. A head has a matrix `S`
/// of `[key, value]`. In both kinds, `S` is multiplied by `exp(step * rate)` at each position, where
/// `step = softplus(x + step bias) * valid`. Then Mamba 2 adds `k v step` to `S`, with `step` limited to
/// [`ChunkScan::limit`] before. DeltaNet divides queries and keys by their lengths and queries by the root of
/// `key`, and adds `k (v - k S) sigmoid(strength) valid`. The row's result is `q S`, in Mamba 2 plus
/// `skip * v`.
///
/// The result is `[rows * heads * value + kept * heads * key * value]`: the rows, then the matrices.
///
/// Kernels are batch-invariant: the bits of a row depend on the inputs of its chunk up to its place, on the
/// matrices before the chunk and on nothing else.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ChunkScan {
    /// Whether this is a gated DeltaNet; otherwise Mamba 2.
    pub delta: bool,
    /// Heads of values, a multiple of `shared`.
    pub heads: usize,
    /// Heads of queries and keys.
    pub shared: usize,
    /// Size of a query or key, and of a value.
    pub key: usize,
    pub value: usize,
    /// Whether value head `h` has the key head `h % shared`, else `h / (heads / shared)`.
    pub tiled: bool,
    /// Rows of the ring of a sequence.
    pub ring: usize,
    /// The range of a step in Mamba 2.
    pub limit: Option<(f64, f64)>,
    /// Whether the convolution has a bias.
    pub bias: bool,
}

impl ChunkScan {
    /// Channels of the convolution. In DeltaNet these are queries, keys and values, in Mamba 2 values, keys
    /// and queries. `None` on overflow.
    pub fn channels(&self) -> Option<usize> {
        let keys = self.shared.checked_mul(self.key)?.checked_mul(2)?;
        keys.checked_add(self.inner()?)
    }

    /// Inputs of a row besides the channels.
    pub fn extras(&self) -> usize {
        if self.delta { self.heads.saturating_mul(2) } else { self.heads }
    }

    /// Values of a row's result. `None` on overflow.
    pub fn inner(&self) -> Option<usize> {
        self.heads.checked_mul(self.value)
    }

    /// The attributes of the composite.
    pub fn attrs(&self) -> Attrs {
        let int = |n: usize| Attr::Int(n as i64);
        let mut all = attrs([
            ("delta", Attr::Bool(self.delta)),
            ("heads", int(self.heads)),
            ("shared", int(self.shared)),
            ("key", int(self.key)),
            ("value", int(self.value)),
            ("tiled", Attr::Bool(self.tiled)),
            ("ring", int(self.ring)),
            ("bias", Attr::Bool(self.bias)),
        ]);
        if let Some((low, high)) = self.limit {
            all.extend([("low".into(), float(low)), ("high".into(), float(high))]);
        }
        all
    }
}

/// The sizes of a call of the composite `chunk_scan`, with the names of [`ChunkScan`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ChunkScanSizes {
    pub scan: ChunkScan,
    pub rows: usize,
    /// Sequences of which the ring operand has inputs.
    pub slots: usize,
    /// Rows of the operand of matrices.
    pub matrices: usize,
    /// Chunks of a sequence, and sequences.
    pub depth: usize,
    pub width: usize,
    /// Positions of a chunk.
    pub chunk: usize,
    /// Positions that the convolution sees.
    pub kernel: usize,
    /// Chunks after which the matrices are a result.
    pub kept: usize,
}

/// The number of operands before the skip and the bias.
const OPERANDS: usize = 13;

impl Composite {
    /// The options of a composite `chunk_scan`.
    pub fn chunk_scan(&self) -> Option<ChunkScan> {
        let size = |name: &str| self.int(name).and_then(|n| usize::try_from(n).ok());
        Some(ChunkScan {
            delta: self.flag("delta"),
            heads: size("heads")?,
            shared: size("shared")?,
            key: size("key")?,
            value: size("value")?,
            tiled: self.flag("tiled"),
            ring: size("ring")?,
            limit: self.float("low").zip(self.float("high")),
            bias: self.flag("bias"),
        })
    }

    /// The sizes of a call of `chunk_scan`. `None` if the operands do not have the types and shapes of
    /// [`ChunkScan`]: a composite of this name can be built with any body, so kernels check them here.
    pub fn chunk_scan_sizes(&self, inputs: &[Operand], outputs: &[Operand]) -> Option<ChunkScanSizes> {
        let scan = self.chunk_scan()?;
        let [y] = outputs else { return None };
        let is = |o: Option<&Operand>, dtype: DType, shape: &[usize]| {
            o.is_some_and(|o| o.dtype == dtype && o.view.shape[..] == *shape)
        };
        let shape = |i: usize| inputs.get(i).map(|o| &o.view.shape[..]);
        let (channels, inner) = (scan.channels()?, scan.inner()?);
        let (size, matrix) = (channels.checked_add(scan.extras())?, inner.checked_mul(scan.key)?);
        let (&[rows, _], &[ring, _], &[matrices, _], &[kernel, _]) =
            (shape(0)?, shape(1)?, shape(2)?, shape(3)?)
        else {
            return None;
        };
        let (&[chunks, chunk], &[depth, width], &[kept]) = (shape(8)?, shape(9)?, shape(11)?) else {
            return None;
        };
        let window = chunks.checked_mul(chunk.checked_add(kernel)?.checked_sub(1)?)?;
        let result = rows.checked_mul(inner)?.checked_add(kept.checked_mul(matrix)?)?;
        let f = |i: usize, shape: &[usize]| is(inputs.get(i), DType::F32, shape);
        let i = |i: usize, shape: &[usize]| is(inputs.get(i), DType::I32, shape);
        let rest = OPERANDS + usize::from(!scan.delta);
        let positive = [scan.heads, scan.shared, scan.key, scan.value, scan.ring, kernel, chunk];
        let fits = positive.iter().all(|n| *n > 0)
            && scan.heads.is_multiple_of(scan.shared)
            && ring.is_multiple_of(scan.ring)
            && depth.checked_mul(width) == Some(chunks)
            && f(0, &[rows, size])
            && f(1, &[ring, size])
            && f(2, &[matrices, matrix])
            && f(3, &[kernel, channels])
            && f(4, &[scan.heads])
            && f(5, &[scan.heads])
            && i(6, &[width])
            && i(7, &[window])
            && f(8, &[chunks, chunk])
            && f(9, &[depth, width])
            && i(10, &[width])
            && i(11, &[kept])
            && i(12, &[rows])
            && (scan.delta || f(OPERANDS, &[scan.heads, 1]))
            && (!scan.bias || f(rest, &[channels]))
            && is(Some(y), DType::F32, &[result]);
        let slots = ring / scan.ring.max(1);
        fits.then_some(ChunkScanSizes { scan, rows, slots, matrices, depth, width, chunk, kernel, kept })
    }
}
