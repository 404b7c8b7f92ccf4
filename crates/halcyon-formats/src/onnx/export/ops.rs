//! Exports primitives as ONNX operators.

use super::composite;
use super::emit::{Emitter, Val, int, text};
use super::scalar::{self, Types, within};
use super::{quantized, window};
use DType::{BF16, Bool, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
use halcyon_ir::composite::CompositeKind;
use halcyon_ir::ops::{ReduceKind, ScatterKind, SliceAxis};
use halcyon_ir::{DType, Dim, Error, NodeId, Op, Result, Scalar, Shape, TensorType};

/// Element types of products and sums.
const PRODUCT_TYPES: Types = &[(1, &[U32, U64, I32, I64, F16, F32, F64, BF16])];
const MIN_MAX_TYPES: Types = &[(1, &[U8, I8, U32, U64, I32, I64, F16, F32, F64, BF16, Bool])];
const NUMBERS: Types = &[(1, &[U8, U16, U32, U64, I8, I16, I32, I64, F16, F32, F64, BF16])];
const SORTED: Types = &[(1, &[U8, U16, U32, U64, I8, I16, I32, I64, F16, F32, F64]), (24, &[BF16])];

/// Writes the nodes for one graph node and returns its result. Few operators accept small types, so these are
/// computed in the next wider type.
pub(super) fn node(e: &mut Emitter<'_>, id: NodeId) -> Result<Val> {
    let n = e.g.node(id);
    if let Op::Composite(c) = &n.op
        && c.kind == CompositeKind::QuantizedMatmul
    {
        // The weights are written in another shape.
        let x = e.operand(id, 0)?;
        return quantized::matmul(e, id, &x, n.ty.clone());
    }
    let x = if matches!(n.op, Op::Full(_)) { vec![] } else { e.operands(id)? };
    let plain =
        matches!(n.op, Op::Input(_) | Op::Const(_) | Op::Cast | Op::Bitcast | Op::Reshape | Op::Permute(_));
    let small = |d: DType| !d.is_native();
    if plain || !small(n.ty.dtype) && !x.iter().any(|v| small(v.dtype())) {
        return op(e, &n.op, x, n.ty.clone());
    }
    let wide = |d: DType| if small(d) { scalar::wider(d).unwrap_or(d) } else { d };
    let x = x.iter().map(|v| cast(e, v, wide(v.dtype()))).collect::<Result<_>>()?;
    let y = op(e, &n.op, x, TensorType { dtype: wide(n.ty.dtype), shape: n.ty.shape.clone() })?;
    cast(e, &y, n.ty.dtype)
}

fn op(e: &mut Emitter<'_>, op: &Op, x: Vec<Val>, ty: TensorType) -> Result<Val> {
    match op {
        Op::Input(_) | Op::Arg(_) => {
            Err(Error::internal("an input or argument was exported as an ONNX node"))
        }
        Op::Const(c) => Ok(e.weight(c)),
        // `Recompute` only keeps the passes of this library from merging values.
        Op::Recompute => Ok(x[0].clone()),
        Op::Full(v) => e.full(&ty, *v),
        Op::Iota { axis } => iota(e, &ty, *axis),
        Op::Scalar(op) => {
            let y = scalar::scalar(e, *op, &x)?;
            e.expand(&y, &ty.shape)
        }
        Op::Cast => cast(e, &x[0], ty.dtype),
        Op::Bitcast => bitcast(e, &x[0], &ty),
        Op::Reduce { kind, axes, keep } => reduce(e, *kind, &x, axes, *keep, ty),
        Op::ArgReduce { max, axis, keep, last } => {
            let name = if *max { "ArgMax" } else { "ArgMin" };
            within(e, name, NUMBERS, &x, false, |e, x| {
                let attrs = vec![
                    int("axis", *axis as i64),
                    int("keepdims", (*keep).into()),
                    int("select_last_index", (*last).into()),
                ];
                Ok(e.node(name, &[&x[0]], attrs, ty))
            })
        }
        Op::Matmul => within(e, "MatMul", PRODUCT_TYPES, &x, true, |e, x| {
            let t = TensorType { dtype: x[0].dtype(), shape: ty.shape };
            Ok(e.node("MatMul", &[&x[0], &x[1]], vec![], t))
        }),
        Op::Conv(c) => window::conv(e, c, &x[0], &x[1], &ty.shape),
        Op::Pool(p) => window::pool(e, p, &x[0], &ty.shape),
        Op::PoolGrad(p) => window::pool_grad(e, p, &x[0], &x[2]),
        Op::Gather { axis } => {
            let i = index(e, &x[1]);
            Ok(e.node("Gather", &[&x[0], &i], vec![int("axis", *axis as i64)], ty))
        }
        Op::GatherElements { axis } => {
            let i = index(e, &x[1]);
            Ok(e.node("GatherElements", &[&x[0], &i], vec![int("axis", *axis as i64)], ty))
        }
        Op::ScatterElements { axis, kind } => {
            let i = index(e, &x[1]);
            let attrs = vec![int("axis", *axis as i64), text("reduction", reduction(*kind))];
            Ok(e.node("ScatterElements", &[&x[0], &i, &x[2]], attrs, ty))
        }
        Op::ScatterRows { axis, kind } => scatter_rows(e, &x[0], &x[1], &x[2], *axis, *kind),
        Op::UpdateSlice { axis } => {
            let places = range(e, x[1].shape()[*axis])?;
            let at = e.cast(&x[2], I64);
            let places = e.calc("Add", &[&places, &at])?;
            scatter_rows(e, &x[0], &places, &x[1], *axis, ScatterKind::Set)
        }
        Op::ClassIndex { ignore, .. } => {
            // The model does not check the range. The software that runs it does: the indexing operator (such
            // as GatherElements) that reads the result rejects indices that are too large.
            let i = e.cast(&x[0], I64);
            match ignore {
                None => Ok(i),
                Some(v) => {
                    let (v, zero) = (e.lit(I64, *v)?, e.lit(I64, 0i64)?);
                    let skipped = e.test("Equal", &i, &v)?;
                    e.calc("Where", &[&skipped, &zero, &i])
                }
            }
        }
        Op::DecodeBlocks(t) => Err(Error::unsupported(
            format!("weights in blocks of {t} in an ONNX model"),
            "Decode them to f32 first",
        )),
        Op::ArgSort { axis, descending } => argsort(e, &x[0], *axis, *descending),
        Op::Scan { kind, axis, exclusive, reverse } => scan(e, *kind, &x[0], *axis, *exclusive, *reverse),
        Op::Reshape => e.reshape(&x[0], &ty.shape),
        Op::Permute(p) => Ok(e.transpose(&x[0], p)),
        Op::Expand => e.expand(&x[0], &ty.shape),
        Op::Slice(axes) => slice(e, &x[0], axes, &ty.shape),
        Op::Pad { lo, hi, value } => {
            let s = |v: &[usize]| v.iter().map(|&n| n as i64).collect::<Vec<_>>();
            e.pad(&x[0], &s(lo), &s(hi), *value)
        }
        Op::Concat { axis } => {
            Ok(e.node("Concat", &x.iter().collect::<Vec<_>>(), vec![int("axis", *axis as i64)], ty))
        }
        Op::Composite(c) => composite::node(e, c, &x, ty),
        Op::Custom(c) => Err(Error::unsupported(
            format!("the custom op {} in an ONNX model", c.op().name()),
            "Write it as other ops",
        )),
    }
}

fn reduce(
    e: &mut Emitter<'_>,
    kind: ReduceKind,
    x: &[Val],
    axes: &[usize],
    keep: bool,
    ty: TensorType,
) -> Result<Val> {
    let (name, types) = match kind {
        ReduceKind::Sum => ("ReduceSum", PRODUCT_TYPES),
        ReduceKind::Prod => ("ReduceProd", PRODUCT_TYPES),
        ReduceKind::Max => ("ReduceMax", MIN_MAX_TYPES),
        ReduceKind::Min => ("ReduceMin", MIN_MAX_TYPES),
    };
    // A maximum or minimum over no elements is the limit of the element type. `within` may compute in a wider
    // type, which has another limit, so the identity of `ty.dtype` is written as a constant.
    if axes.iter().any(|&a| x[0].shape()[a].is(0)) {
        return e.full(&ty, kind.identity(ty.dtype));
    }
    let axes: Vec<i64> = axes.iter().map(|&a| a as i64).collect();
    within(e, name, types, x, true, |e, x| {
        let axes = e.ints(&axes)?;
        let t = TensorType { dtype: x[0].dtype(), shape: ty.shape.clone() };
        Ok(e.node(name, &[&x[0], &axes], vec![int("keepdims", keep.into())], t))
    })
}

/// Casts as Halcyon defines it, as far as ONNX can express it. A float saturates at the range of an integer
/// type of 8 or 16 bits. For other integer types, a float out of range is left to ONNX's `Cast`, and the
/// software that runs the model decides the result: floats cannot represent all limits of 32- and 64-bit
/// integers, and ONNX does not specify that 2- and 4-bit integers keep the low bits. NaN is left to `Cast`
/// for every integer type, because `Clip` passes it on.
fn cast(e: &mut Emitter<'_>, x: &Val, to: DType) -> Result<Val> {
    let mut x = x.clone();
    if x.dtype() == to {
        return Ok(x);
    }
    if x.dtype().is_float() && to.is_int() && (8..=16).contains(&to.bits()) {
        // Half types cannot represent the limits of 16-bit integers.
        if x.dtype() != F64 {
            x = e.cast(&x, F32);
        }
        let (lo, hi) = to.range();
        let (lo, hi) = (e.scalar_like(&x, lo)?, e.scalar_like(&x, hi)?);
        x = e.node_of_first_type("Clip", &[&x, &lo, &hi], vec![]);
    }
    Ok(e.cast(&x, to))
}

fn reduction(k: ScatterKind) -> &'static str {
    match k {
        ScatterKind::Set => "none",
        ScatterKind::Add => "add",
        ScatterKind::Mul => "mul",
        ScatterKind::Max => "max",
        ScatterKind::Min => "min",
    }
}

/// Casts an index to i64 if it is not i32 or i64, which are the types that index operators accept.
fn index(e: &mut Emitter<'_>, x: &Val) -> Val {
    if matches!(x.dtype(), I32 | I64) { x.clone() } else { e.cast(x, I64) }
}

/// Returns the numbers from 0 to `n - 1` as i64.
fn range(e: &mut Emitter<'_>, n: Dim) -> Result<Val> {
    let (zero, end, one) = (e.lit(I64, 0i64)?, e.dim_scalar(n)?, e.lit(I64, 1i64)?);
    Ok(e.node("Range", &[&zero, &end, &one], vec![], TensorType::new(I64, [n])))
}

fn iota(e: &mut Emitter<'_>, ty: &TensorType, axis: usize) -> Result<Val> {
    let n = ty.shape[axis];
    let v = range(e, n)?;
    let v = e.cast(&v, ty.dtype);
    let mut s = vec![Dim::from(1); ty.shape.rank()];
    s[axis] = n;
    let v = e.reshape(&v, &s.into())?;
    e.expand(&v, &ty.shape)
}

fn bitcast(e: &mut Emitter<'_>, x: &Val, ty: &TensorType) -> Result<Val> {
    if e.opset < 26 && x.dtype().is_int() && ty.dtype.is_int() {
        // A cast between integers of the same width keeps the bits.
        return Ok(e.cast(x, ty.dtype));
    }
    e.require_opset("a bitcast between types other than integers", 26)?;
    Ok(e.node("BitCast", &[x], vec![int("to", ty.dtype.row().onnx.into())], ty.clone()))
}

/// Scatter of whole rows, as ScatterND with the axis moved to the front.
fn scatter_rows(
    e: &mut Emitter<'_>,
    base: &Val,
    at: &Val,
    updates: &Val,
    axis: usize,
    kind: ScatterKind,
) -> Result<Val> {
    let (r, q) = (base.rank(), at.rank());
    let front: Vec<usize> = (axis..axis + 1).chain(0..axis).chain(axis + 1..r).collect();
    let rows: Vec<usize> = (axis..axis + q).chain(0..axis).chain(axis + q..r - 1 + q).collect();
    let b = e.transpose(base, &front);
    let u = e.transpose(updates, &rows);
    let i = e.cast(at, I64);
    let mut s = i.shape().clone();
    s.0.push(Dim::from(1));
    let last = e.ints(&[-1])?;
    let i = e.node("Unsqueeze", &[&i, &last], vec![], TensorType { dtype: I64, shape: s });
    let y = e.node_of_first_type("ScatterND", &[&b, &i, &u], vec![text("reduction", reduction(kind))]);
    let mut back = vec![0; r];
    front.iter().enumerate().for_each(|(k, &p)| back[p] = k);
    Ok(e.transpose(&y, &back))
}

/// All indices in sorted order, by TopK. It orders equal values as Halcyon does: the lower index comes first,
/// in both directions.
fn argsort(e: &mut Emitter<'_>, x: &Val, axis: usize, descending: bool) -> Result<Val> {
    let index = TensorType { dtype: I64, shape: x.shape().clone() };
    if x.shape().iter().any(|d| d.is(0)) {
        return e.full(&index, Scalar::I(0));
    }
    within(e, "TopK", SORTED, std::slice::from_ref(x), false, |e, x| {
        let k = e.dim(x[0].shape()[axis])?;
        let attrs = vec![int("axis", axis as i64), int("largest", descending.into()), int("sorted", 1)];
        Ok(e.node_of("TopK", &[&x[0], &k], attrs, vec![x[0].ty.clone(), index]).swap_remove(1))
    })
}

/// A running sum is CumSum and a running product CumProd. Other kinds, and products in older operator sets,
/// combine each element with those 1, 2, 4, … positions before it (Hillis and Steele 1986).
fn scan(
    e: &mut Emitter<'_>,
    kind: ReduceKind,
    x: &Val,
    axis: usize,
    exclusive: bool,
    reverse: bool,
) -> Result<Val> {
    let direct = match kind {
        ReduceKind::Sum => Some("CumSum"),
        ReduceKind::Prod if e.opset >= 26 => Some("CumProd"),
        _ => None,
    };
    if let Some(name) = direct {
        return within(e, name, PRODUCT_TYPES, std::slice::from_ref(x), true, |e, x| {
            let axis = e.lit(I64, axis as i64)?;
            let attrs = vec![int("exclusive", exclusive.into()), int("reverse", reverse.into())];
            Ok(e.node_of_first_type(name, &[&x[0], &axis], attrs))
        });
    }
    let n = x.shape()[axis].known().ok_or_else(|| {
        Error::unsupported(
            format!("scan_{} over the symbolic size {}", kind.name(), x.shape()[axis]),
            "Give concrete sizes before exporting",
        )
    })?;
    let d = x.dtype();
    let first = kind.identity(d);
    let shift = |e: &mut Emitter<'_>, v: &Val, by: i64| {
        let (mut lo, mut hi) = (vec![0; v.rank()], vec![0; v.rank()]);
        (lo[axis], hi[axis]) = if reverse { (-by, by) } else { (by, -by) };
        e.pad(v, &lo, &hi, first.cast(v.dtype()))
    };
    // Half types are rounded once, at the end.
    let mut y = if d.is_float() { e.cast(x, d.compute()) } else { x.clone() };
    if exclusive && n > 0 {
        y = shift(e, &y, 1)?;
    }
    let mut by = 1;
    while by < n {
        let before = shift(e, &y, by as i64)?;
        y = scalar::scalar(e, kind.op(d), &[before, y])?;
        by *= 2;
    }
    Ok(e.cast(&y, d))
}

/// The end of a slice that goes down to the first element and includes it.
const TO_FIRST: i64 = i64::MIN;

/// The bounds of one axis of a slice.
enum Bounds {
    Whole,
    Known(i64, i64),
    Computed(Dim, Dim),
}

fn bounds(size: Dim, a: &SliceAxis, len: Dim) -> Result<Bounds> {
    if a.start.is(0) && a.step == 1 && len == size {
        return Ok(Bounds::Whole);
    }
    if let (Some(start), Some(len)) = (a.start.known(), len.known()) {
        let start = start as i64;
        let last = start + (len as i64 - 1) * a.step;
        return Ok(match len {
            0 => Bounds::Known(0, 0),
            _ if a.step > 0 => Bounds::Known(start, last + 1),
            _ => Bounds::Known(start, if last == 0 { TO_FIRST } else { last - 1 }),
        });
    }
    if a.step < 0 {
        // A full reversal is always expressible. Other downward slices may have negative bounds, which ONNX
        // would count from the end.
        if a.step == -1 && a.start == size.offset(-1) && len == size {
            return Ok(Bounds::Known(-1, TO_FIRST));
        }
        let what = format!("a slice by {} from {} over a symbolic size", a.step, a.start);
        return Err(Error::unsupported(what, "Give concrete sizes before exporting"));
    }
    let step = Dim::from(a.step.unsigned_abs() as usize);
    let end = a.start.add(len.offset(-1).mul(step)).offset(1);
    if a.step == 1
        && end == size
        && let Some(start) = a.start.known()
    {
        return Ok(Bounds::Known(start as i64, i64::MAX));
    }
    Ok(Bounds::Computed(a.start, end))
}

fn slice(e: &mut Emitter<'_>, x: &Val, axes: &[SliceAxis], to: &Shape) -> Result<Val> {
    let (mut starts, mut ends, mut which, mut steps) = (vec![], vec![], vec![], vec![]);
    for (k, a) in axes.iter().enumerate() {
        let (start, end) = match bounds(x.shape()[k], a, to[k])? {
            Bounds::Whole => continue,
            Bounds::Known(s, t) => (e.ints(&[s])?, e.ints(&[t])?),
            Bounds::Computed(s, t) => (e.dim(s)?, e.dim(t)?),
        };
        starts.push(start);
        ends.push(end);
        which.push(k as i64);
        steps.push(a.step);
    }
    if which.is_empty() {
        return Ok(x.clone());
    }
    let (starts, ends) = (e.concat(&starts)?, e.concat(&ends)?);
    let (which, steps) = (e.ints(&which)?, e.ints(&steps)?);
    let ty = TensorType { dtype: x.dtype(), shape: to.clone() };
    Ok(e.node("Slice", &[x, &starts, &ends, &which, &steps], vec![], ty))
}

/// Reverses the order of the elements along each of `axes`.
pub(super) fn flip(e: &mut Emitter<'_>, x: &Val, axes: &[usize]) -> Result<Val> {
    let pick = |k: usize| axes.contains(&k) && !x.shape()[k].is(0) && !x.shape()[k].is(1);
    let all: Vec<SliceAxis> = (0..x.rank())
        .map(|k| match pick(k) {
            true => SliceAxis { start: x.shape()[k].offset(-1), step: -1 },
            false => SliceAxis { start: Dim::from(0), step: 1 },
        })
        .collect();
    slice(e, x, &all, &x.shape().clone())
}

/// Takes `len` elements from `start` with stride `step` along one axis. The range must be in bounds.
pub(super) fn narrow(
    e: &mut Emitter<'_>,
    x: &Val,
    axis: usize,
    start: usize,
    step: usize,
    len: Dim,
) -> Result<Val> {
    let mut all = vec![SliceAxis { start: Dim::from(0), step: 1 }; x.rank()];
    all[axis] = SliceAxis { start: Dim::from(start), step: step as i64 };
    let mut to = x.shape().clone();
    to.0[axis] = len;
    slice(e, x, &all, &to)
}
