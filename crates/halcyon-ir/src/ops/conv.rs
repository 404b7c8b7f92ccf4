//! Convolutions.

use super::{
    Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, RatedWork, Rewrite, Rounding, Rules, Types,
    checked_count, count, sizes,
};
use crate::dtype::DType;
use crate::error::Result;
use crate::grad::{Backward, Gradient, conv as gradients};
use crate::kernel::lower::{KernelCall, Lowered, Template};
use crate::kernel::templates;
use crate::layout::Restride;
use crate::reference::{Eval, Tensor, Vals, mixed, window};
use crate::shape::{Dim, Shape, TensorType};
use crate::target::{Declined, Operand};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Convolution of input `[n, c, i…]` with weight `[o, c/groups, k…]`. The result is `[n, o, y…]` with `y =
/// (((i-1)*input_dilation+1) + lo + hi - ((k-1)*dilation+1)) / stride + 1`. The padding before and after each
/// axis is `lo` and `hi` zeros; negative padding crops. The operation is a cross-correlation, as in ONNX
/// `Conv`. Each vector has one entry per spatial axis.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Conv {
    pub stride: SmallVec<[usize; 3]>,
    pub pad: SmallVec<[(i64, i64); 3]>,
    pub dilation: SmallVec<[usize; 3]>,
    /// One plus the number of zeros inserted between input elements (1 = none). Values above 1 give the
    /// transposed convolution.
    pub input_dilation: SmallVec<[usize; 3]>,
    pub groups: usize,
}

impl Conv {
    /// A convolution over `spatial` axes with stride and dilation 1, no padding and one group.
    pub fn new(spatial: usize) -> Conv {
        Conv {
            stride: SmallVec::from_elem(1, spatial),
            pad: SmallVec::from_elem((0, 0), spatial),
            dilation: SmallVec::from_elem(1, spatial),
            input_dilation: SmallVec::from_elem(1, spatial),
            groups: 1,
        }
    }

    /// Sets the stride, one entry per spatial axis: `Conv::new(2).stride([2, 2]).padding([1, 1]).groups(4)`.
    pub fn stride(mut self, stride: impl AsRef<[usize]>) -> Conv {
        self.stride = stride.as_ref().into();
        self
    }

    /// Sets the zero padding, the same on both sides of each spatial axis.
    pub fn padding(mut self, padding: impl AsRef<[usize]>) -> Conv {
        let both = |n: &usize| i64::try_from(*n).unwrap_or(i64::MAX);
        self.pad = padding.as_ref().iter().map(|n| (both(n), both(n))).collect();
        self
    }

    /// Sets the zero padding `(before, after)` of each spatial axis. Negative values crop.
    pub fn padding_each(mut self, padding: impl AsRef<[(i64, i64)]>) -> Conv {
        self.pad = padding.as_ref().into();
        self
    }

    /// Sets the distance between the weight's elements along each spatial axis.
    pub fn dilation(mut self, dilation: impl AsRef<[usize]>) -> Conv {
        self.dilation = dilation.as_ref().into();
        self
    }

    /// Sets the number of groups. Each group of output channels reads only its own group of input channels.
    pub fn groups(mut self, groups: usize) -> Conv {
        self.groups = groups;
        self
    }
}

/// One spatial axis of a convolution or pool.
pub(super) struct Window {
    pub kernel: usize,
    pub pad: (i64, i64),
    pub stride: usize,
    pub dilation: usize,
    pub input_dilation: usize,
}

impl Window {
    /// The number of windows along an axis of size `i`.
    pub(super) fn count(&self, t: &Types<'_>, i: Dim) -> Result<Dim> {
        let (k, (lo, hi)) = (self.kernel, self.pad);
        if self.stride == 0 || self.dilation == 0 || self.input_dilation == 0 || k == 0 {
            return Err(t.argument("kernel, stride and dilation must be at least 1"));
        }
        // In i128, products of two 64-bit numbers and sums of a few of them cannot overflow.
        let wide = |n: usize| n as i128;
        let reach = (wide(k) - 1) * wide(self.dilation) + 1;
        let (lo, hi) = (i128::from(lo), i128::from(hi));
        let far = || t.shape("kernel, stride, dilation or padding is out of range");
        match i.known() {
            Some(0) => Err(t.shape("a spatial dimension is empty")),
            Some(n) => {
                let have = (wide(n) - 1) * wide(self.input_dilation) + 1 + lo + hi;
                if have < reach {
                    return Err(t.shape(format!(
                        "a window of {reach} does not fit into {have} (input {n}, padding {lo} and {hi})"
                    )));
                }
                let n = (have - reach) / wide(self.stride) + 1;
                usize::try_from(n).map(Dim::from).map_err(|_| far())
            }
            None => Ok(i
                .offset(-1)
                .mul(Dim::from(self.input_dilation))
                .offset(i64::try_from(1 + lo + hi - reach).map_err(|_| far())?)
                .div(Dim::from(self.stride))?
                .offset(1)),
        }
    }
}

const TEMPLATE: Template = tuned_template!(conv);

/// The FLOPs of a convolution with weights `[o, c / groups, k…]`: two for each multiply-add.
pub(super) fn flops(inputs: &[Operand], output: &Operand) -> u64 {
    let k = inputs.get(1).map_or(0, |w| count(w.view.shape.get(1..).unwrap_or(&[])));
    (output.view.numel() as u64).saturating_mul(k).saturating_mul(2)
}

impl Rules for Conv {
    fn name(&self) -> String {
        "conv".into()
    }
    fn attributes(&self) -> String {
        format!(
            "stride {:?}, pad {:?}, dilation {:?}, input dilation {:?}, groups {}",
            self.stride, self.pad, self.dilation, self.input_dilation, self.groups
        )
    }
    fn facts(&self) -> Facts {
        Facts {
            lowering: Lowering::Step,
            moves: Moves::Nothing,
            identity: None,
            packs: true,
            in_place: false,
            summed: None,
            template: Some(&TEMPLATE),
        }
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(2)?;
        let (i, w, d) = (&t.x[0].shape, &t.x[1].shape, t.x[0].dtype);
        let n = self.stride.len();
        if d != t.x[1].dtype {
            return Err(t.dtype(t.x[1].dtype, format!("the input is {d}")));
        }
        if !d.is_float() {
            return Err(t.dtype(d, "a float type is needed"));
        }
        let lengths = [self.pad.len(), self.dilation.len(), self.input_dilation.len()];
        if i.rank() != n + 2 || w.rank() != n + 2 || lengths != [n; 3] {
            let what = format!(
                "input {i} and weight {w}: expected 2 + {n} axes each, and {n} strides, paddings and dilations"
            );
            return Err(t.shape(what));
        }
        let reads = w[1].mul(Dim::from(self.groups));
        if self.groups == 0 || reads != i[1] {
            let groups = self.groups;
            return Err(t.shape(format!(
                "input {i} has {} channels, weight {w} with {groups} groups takes {reads}",
                i[1]
            )));
        }
        if w[0].known().is_some_and(|o| o % self.groups != 0) {
            let groups = self.groups;
            return Err(t.shape(format!("{} output channels do not divide into {groups} groups", w[0])));
        }
        let mut shape = Shape::from(vec![i[0], w[0]]);
        for k in 0..n {
            let kernel = w[k + 2].known();
            let window = Window {
                kernel: kernel.ok_or_else(|| t.shape(format!("weight {w} has symbolic kernel sizes")))?,
                pad: self.pad[k],
                stride: self.stride[k],
                dilation: self.dilation[k],
                input_dilation: self.input_dilation[k],
            };
            shape.0.push(window.count(t, i[k + 2])?);
        }
        Ok(TensorType { dtype: d, shape })
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Conv(self.clone()))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        e.made(direct(self, e.x[0], e.x[1], &e.dims)?)
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let mut out = b.no_grads();
        if b.needs_grad(0) {
            out[0] = Some(gradients::input(b.g, b.node, self, b.dy)?);
        }
        if b.needs_grad(1) {
            out[1] = Some(gradients::weight(b.g, b.node, self, b.dy)?);
        }
        Ok(Gradient::Of(out))
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        Cost::reading_all(flops(inputs, output), inputs, output)
    }
    fn terms(&self, x: &[&[usize]]) -> Option<usize> {
        checked_count(x.get(1)?.get(1..)?)
    }
    fn index_range(&self, _: &[Operand]) -> Option<IndexRange> {
        None
    }
    fn rounding(&self, x: &[&TensorType], y: &TensorType) -> Rounding {
        match y.dtype.is_float() {
            true => Rounding::Linear { terms: sizes(x.get(1)).iter().skip(1).product() },
            false => Rounding::Exact,
        }
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        MixedRole::Product(RatedWork::Convolutions)
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, call: &KernelCall<'_>) -> Result<Lowered, Declined> {
        Err(call.no_template())
    }
}

/// The convolution by its definition.
fn direct(c: &Conv, x: &Tensor, w: &Tensor, out: &[usize]) -> Result<Vals> {
    let (Vals::F(xv), Vals::F(wv)) = (&x.v, &w.v) else {
        return Err(mixed());
    };
    let axes: Vec<window::Axis> = (0..c.stride.len())
        .map(|k| window::Axis {
            i: x.dims[k + 2],
            k: w.dims[k + 2],
            y: out[k + 2],
            stride: c.stride[k],
            dilation: c.dilation[k],
            input_dilation: c.input_dilation[k],
            lo: c.pad[k].0,
        })
        .collect();
    let t = window::Taps::new(&axes);
    let (ci, wi, o) = (x.dims[1], w.dims[1], out[1]);
    let (si, sk): (usize, usize) = (x.dims[2..].iter().product(), w.dims[2..].iter().product());
    let per = o / c.groups;
    let mut y = vec![0.0; out.iter().product()];
    for n in 0..out[0] {
        for oc in 0..o {
            let acc = &mut y[(n * o + oc) * t.out..][..t.out];
            for ic in 0..wi {
                let xs = &xv[(n * ci + oc / per.max(1) * wi + ic) * si..][..si];
                for k in 0..sk.min(t.kernels()) {
                    let f = wv[(oc * wi + ic) * sk + k];
                    for (a, p) in acc.iter_mut().zip(t.kernel(k)) {
                        if let Some(p) = p {
                            *a += f * xs[*p];
                        }
                    }
                }
            }
        }
    }
    Ok(Vals::float(x.dtype, y))
}
