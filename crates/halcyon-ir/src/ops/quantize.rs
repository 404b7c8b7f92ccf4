//! Quantisation: composites that convert between floats and integers of 8 or 16 bits, convolutions of bytes,
//! and products with weights of 4 bits.

use super::Conv;
use super::composite::{CompositeGradient, CompositeKind, CompositeRow, some_per_element};
use super::{conv, count};
use crate::composite::{Attr, Composite, attrs};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::shape::{Dim, Shape};
use crate::target::Operand;

/// Number of weights that share a scale in [`Graph::quantized_matmul`].
pub const WEIGHT_BLOCK: usize = 32;
/// The code of the weight 0 in a product of 4-bit weights without minima.
pub const MIDDLE: i64 = 8;

/// The attribute of the composite `quantize` that limits the magnitude of its codes.
pub const LIMIT: &str = "limit";

/// The row of a composite without kernels, which only passes and exporters recognise.
const fn plain(has_builder: bool) -> CompositeRow {
    CompositeRow {
        name: "",
        has_builder,
        has_kernels: false,
        packs: false,
        summed: None,
        half: None,
        template: None,
        flops: some_per_element,
        gradient: CompositeGradient::Body,
    }
}

pub(super) static QUANTIZE: CompositeRow = CompositeRow { name: "quantize", ..plain(true) };

pub(super) static DEQUANTIZE: CompositeRow = CompositeRow { name: "dequantize", ..plain(true) };

pub(super) static BYTE_CONV: CompositeRow = CompositeRow {
    name: "byte_conv",
    packs: true,
    flops: |_, inputs, output| conv::flops(inputs, output),
    ..plain(false)
};

pub(super) static QUANTIZED_MATMUL: CompositeRow = CompositeRow {
    name: "quantized_matmul",
    // The CPU has a kernel that reads the codes as they are.
    has_kernels: true,
    flops: product_flops,
    ..plain(true)
};

/// Two FLOPs for each multiply-add. Each element of the result sums `k` products, where `k` is the last
/// dimension of `x`.
fn product_flops(_: &Composite, inputs: &[Operand], output: &Operand) -> u64 {
    let k = inputs.first().map_or(0, |x| count(x.view.shape.last().map(std::slice::from_ref).unwrap_or(&[])));
    (output.view.numel() as u64).saturating_mul(k).saturating_mul(2)
}

/// Reshapes `v`, a single number or a vector along `axis`, so that it broadcasts to `rank` axes. Any other
/// `v` is returned unchanged.
fn along(g: &mut Graph, v: NodeId, axis: Option<usize>, rank: usize) -> Result<NodeId> {
    if g.shape(v).numel().is(1) {
        return g.reshape(v, Shape::scalar());
    }
    let Some(axis) = axis.filter(|a| *a < rank && g.shape(v).rank() == 1) else { return Ok(v) };
    let mut s = vec![Dim::from(1); rank];
    s[axis] = g.shape(v)[0];
    g.reshape(v, s)
}

fn own_attributes(dtype: Option<DType>, axis: Option<usize>) -> crate::composite::Attrs {
    let mut a = attrs([]);
    if let Some(d) = dtype {
        a.insert("dtype".into(), Attr::DType(d));
    }
    if let Some(axis) = axis {
        a.insert("axis".into(), Attr::Int(axis as i64));
    }
    a
}

impl Graph {
    /// Quantises f32 to integers of 8 or 16 bits: `saturate(round(x / scale) + zero)`, rounded to nearest,
    /// ties to even (the definition of ONNX's QuantizeLinear). `scale` is f32: one number, a vector along
    /// `axis`, or any shape that broadcasts to `x`. `zero` has the type `dtype` and the shape of `scale`; the
    /// default is 0.
    ///
    /// # Errors
    /// [`Error::DType`] unless `x` and `scale` are f32; [`Error::Argument`] unless `dtype` is i8, u8 or i16;
    /// [`Error::Shape`] if the shapes do not broadcast.
    pub fn quantize(
        &mut self,
        x: NodeId,
        scale: NodeId,
        zero: Option<NodeId>,
        dtype: DType,
        axis: Option<usize>,
    ) -> Result<NodeId> {
        if !matches!(dtype, DType::I8 | DType::U8 | DType::I16) {
            return Err(Error::argument("quantize", format!("to {dtype}: expected i8, u8 or i16")));
        }
        self.need_f32("quantize", x)?;
        self.need_f32("quantize", scale)?;
        let rank = self.shape(x).rank();
        let operands: Vec<NodeId> = [x, scale].into_iter().chain(zero).collect();
        self.composite(CompositeKind::Quantize, own_attributes(Some(dtype), axis), &operands, |g, x| {
            let s = along(g, x[1], axis, rank)?;
            let mut q = g.div(x[0], s)?;
            q = g.round(q)?;
            if let Some(z) = x.get(2) {
                let z = g.cast(*z, DType::F32)?;
                let z = along(g, z, axis, rank)?;
                q = g.add(q, z)?;
            }
            g.cast_saturating(q, dtype)
        })
    }

    /// Like [`Graph::quantize`] to i16 without a zero point, but limits the magnitude of the codes to
    /// `limit`. With a small enough limit, the sums of a product of such codes are known to fit i32.
    ///
    /// # Errors
    /// Those of [`Graph::quantize`]; [`Error::Argument`] unless `limit` is in 1..=32767.
    pub fn quantize_within(&mut self, x: NodeId, scale: NodeId, limit: i64) -> Result<NodeId> {
        if !(1..=i64::from(i16::MAX)).contains(&limit) {
            return Err(Error::argument("quantize", format!("limit {limit}: expected 1 to 32767")));
        }
        self.need_f32("quantize", x)?;
        self.need_f32("quantize", scale)?;
        let rank = self.shape(x).rank();
        let mut own = own_attributes(Some(DType::I16), None);
        own.insert(LIMIT.into(), Attr::Int(limit));
        self.composite(CompositeKind::Quantize, own, &[x, scale], |g, x| {
            let s = along(g, x[1], None, rank)?;
            let q = g.div(x[0], s)?;
            let q = g.round(q)?;
            let (low, high) = (g.lit(q, -limit as f64), g.lit(q, limit as f64));
            let q = g.max(q, low)?;
            let q = g.min(q, high)?;
            g.cast(q, DType::I16)
        })
    }

    /// The inverse of [`Graph::quantize`]: `(codes - zero) * scale` in f32, where `codes` are integers of 8
    /// or 16 bits.
    ///
    /// # Errors
    /// [`Error::DType`] unless `scale` is f32; [`Error::Argument`] unless `codes` are i8, u8 or i16;
    /// [`Error::Shape`] if the shapes do not broadcast.
    pub fn dequantize(
        &mut self,
        codes: NodeId,
        scale: NodeId,
        zero: Option<NodeId>,
        axis: Option<usize>,
    ) -> Result<NodeId> {
        if !matches!(self.dtype(codes), DType::I8 | DType::U8 | DType::I16) {
            let what = format!("codes of {}: expected i8, u8 or i16", self.dtype(codes));
            return Err(Error::argument("dequantize", what));
        }
        self.need_f32("dequantize", scale)?;
        let rank = self.shape(codes).rank();
        let operands: Vec<NodeId> = [codes, scale].into_iter().chain(zero).collect();
        self.composite(CompositeKind::Dequantize, own_attributes(None, axis), &operands, |g, x| {
            let mut y = x[0];
            if let Some(z) = x.get(2) {
                let z = g.cast(*z, DType::I32)?;
                let z = along(g, z, axis, rank)?;
                y = g.cast(y, DType::I32)?;
                y = g.sub(y, z)?;
            }
            y = g.cast(y, DType::F32)?;
            let s = along(g, x[1], axis, rank)?;
            g.mul(y, s)
        })
    }

    /// `x` `[…, m, k]` in f32 times the transpose of a matrix `[n, k]` whose weights have 4 bits:
    /// `[…, m, n]`. `codes` is u8 `[n, k / 2]`; a byte holds two weights, the first in its low bits. Each 32
    /// consecutive weights of a row are a block with one scale of `scales`, f32 `[n, k / 32]`. A weight is
    /// `(code - 8) * scale`, or `code * scale + minimum` with `minima`, f32 `[n, k / 32]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the shapes do not match, if a size of the matrix is not known, or if `k` is not a
    /// positive multiple of 32; [`Error::DType`] unless `x` and `scales` are f32; [`Error::Argument`] unless
    /// `codes` are u8.
    pub fn quantized_matmul(
        &mut self,
        x: NodeId,
        codes: NodeId,
        scales: NodeId,
        minima: Option<NodeId>,
    ) -> Result<NodeId> {
        const NAME: &str = "quantized_matmul";
        self.need_f32(NAME, x)?;
        self.need_f32(NAME, scales)?;
        let (xs, cs) = (self.shape(x).clone(), self.shape(codes).clone());
        let sizes = (xs.last().and_then(|d| d.known()), cs.known());
        let (Some(k), Some(&[n, half])) = (sizes.0, sizes.1.as_deref()) else {
            return Err(Error::shape(
                NAME,
                format!("operand {xs} and codes {cs}: expected […, k], [n, k / 2]"),
            ));
        };
        let blocks = [n, k / WEIGHT_BLOCK];
        let parts = [Some(scales), minima].into_iter().flatten();
        let fits = parts.into_iter().all(|p| self.shape(p).known().is_some_and(|s| s[..] == blocks));
        if half * 2 != k || !k.is_multiple_of(WEIGHT_BLOCK) || k == 0 || !fits || xs.rank() < 2 {
            let what = format!(
                "operand {xs}, codes {cs}, scales {}: expected […, m, k], [n, k / 2], [n, k / 32], k a multiple of 32",
                self.shape(scales)
            );
            return Err(Error::shape(NAME, what).at(&self.span));
        }
        if self.dtype(codes) != DType::U8 {
            let what = format!("codes of {}: expected u8", self.dtype(codes));
            return Err(Error::argument(NAME, what));
        }
        let operands: Vec<NodeId> = [x, codes, scales].into_iter().chain(minima).collect();
        self.composite(CompositeKind::QuantizedMatmul, attrs([]), &operands, |g, x| {
            let w = dequantized(g, [n, k], x[1], x[2], x.get(3).copied())?;
            let w = g.transpose(w, 0, 1)?;
            g.matmul(x[0], w)
        })
    }

    fn need_f32(&self, op: &str, x: NodeId) -> Result<()> {
        match self.dtype(x) {
            DType::F32 => Ok(()),
            dtype => Err(Error::DType {
                op: op.into(),
                dtype,
                want: "f32 is needed".into(),
                at: self.span.clone(),
            }),
        }
    }

    /// Convolution of 8-bit integers: `x` `[n, c, i…]` (i8 or u8) with `w` (i8), as [`Graph::conv`]. The
    /// result is f32. The body sums in f32; kernels sum exactly in i32 and round once.
    pub(crate) fn byte_conv(&mut self, x: NodeId, w: NodeId, attrs: Conv) -> Result<NodeId> {
        self.composite(CompositeKind::ByteConv, Default::default(), &[x, w], |g, x| {
            byte_conv_body(g, x[0], x[1], attrs)
        })
    }
}

/// The convolution of bytes, written as a convolution of floats.
pub(crate) fn byte_conv_body(g: &mut Graph, x: NodeId, w: NodeId, attrs: Conv) -> Result<NodeId> {
    let (x, w) = (g.cast(x, DType::F32)?, g.cast(w, DType::F32)?);
    g.conv(x, w, attrs)
}

/// The weights `[n, k]` in f32.
fn dequantized(
    g: &mut Graph,
    [n, k]: [usize; 2],
    codes: NodeId,
    scales: NodeId,
    minima: Option<NodeId>,
) -> Result<NodeId> {
    let (mask, four) = (g.lit(codes, 15), g.lit(codes, 4));
    let low = g.and(codes, mask)?;
    let high = g.shr(codes, four)?;
    let pair = [n, k / 2, 1];
    let (low, high) = (g.reshape(low, pair)?, g.reshape(high, pair)?);
    let q = g.concat(&[low, high], 2)?;
    let q = g.reshape(q, [n, k / WEIGHT_BLOCK, WEIGHT_BLOCK])?;
    let mut q = g.cast(q, DType::F32)?;
    let scales = g.unsqueeze(scales, 2)?;
    if minima.is_none() {
        let middle = g.lit(q, MIDDLE as f64);
        q = g.sub(q, middle)?;
    }
    let mut w = g.mul(q, scales)?;
    if let Some(m) = minima {
        let m = g.unsqueeze(m, 2)?;
        w = g.add(w, m)?;
    }
    g.reshape(w, [n, k])
}
