//! Exports convolutions, pools and their gradients.

use super::emit::{Emitter, Val, int, ints};
use super::ops::{flip, narrow};
use super::scalar::{FLOATS_22, Types, lowest, scalar, within};
use DType::{F16, F32, F64, I8, I64, U8};
use halcyon_ir::ops::{Conv, Pool, PoolKind};
use halcyon_ir::{DType, Dim, Error, Result, Scalar, ScalarOp, Shape, TensorType};

const MAX: Types = &[(1, &[F16, F32, F64, I8, U8]), (22, &[DType::BF16])];

fn sizes(name: &str, v: impl IntoIterator<Item = usize>) -> super::super::proto::AttributeProto {
    ints(name, &v.into_iter().map(|n| n as i64).collect::<Vec<_>>())
}

fn pads(v: impl IntoIterator<Item = (i64, i64)> + Clone) -> super::super::proto::AttributeProto {
    let (lo, hi): (Vec<i64>, Vec<i64>) = v.into_iter().unzip();
    ints("pads", &[lo, hi].concat())
}

/// A convolution. With input dilation it becomes a ConvTranspose if that operator can express it; otherwise
/// zeros are inserted into the input of a Conv. A Pad node before the Conv applies negative padding.
pub(super) fn conv(e: &mut Emitter<'_>, c: &Conv, x: &Val, w: &Val, to: &Shape) -> Result<Val> {
    let n = c.stride.len();
    if n == 0 {
        return Err(Error::unsupported("a convolution without spatial axes in ONNX", "Use a matrix product"));
    }
    let kernel = kernel(w)?;
    let two = [x.clone(), w.clone()];
    within(e, "Conv", FLOATS_22, &two, true, |e, v| {
        let (mut x, w) = (v[0].clone(), v[1].clone());
        let ty = TensorType { dtype: x.dtype(), shape: to.clone() };
        if c.input_dilation.iter().any(|&d| d != 1) {
            if let Some(y) = transposed(e, c, &x, &w, &kernel, &ty)? {
                return Ok(y);
            }
            for k in 0..n {
                x = insert_zeros(e, &x, k + 2, c.input_dilation[k])?;
            }
        }
        if c.pad.iter().any(|p| p.0 < 0 || p.1 < 0) {
            let cut = |f: fn(&(i64, i64)) -> i64| -> Vec<i64> {
                [0, 0].into_iter().chain(c.pad.iter().map(|p| f(p).min(0))).collect()
            };
            x = e.pad(&x, &cut(|p| p.0), &cut(|p| p.1), Scalar::F(0.0))?;
        }
        let attrs = vec![
            sizes("kernel_shape", kernel),
            sizes("strides", c.stride.iter().copied()),
            pads(c.pad.iter().map(|p| (p.0.max(0), p.1.max(0)))),
            sizes("dilations", c.dilation.iter().copied()),
            int("group", c.groups as i64),
        ];
        Ok(e.node("Conv", &[&x, &w], attrs, ty))
    })
}

fn kernel(w: &Val) -> Result<Vec<usize>> {
    let known = w.shape()[2..].iter().map(|d| d.known()).collect::<Option<_>>();
    known.ok_or_else(|| Error::internal("a kernel of symbolic size"))
}

/// Inserts `d - 1` zeros after every element but the last along an axis.
fn insert_zeros(e: &mut Emitter<'_>, x: &Val, axis: usize, d: usize) -> Result<Val> {
    if d == 1 {
        return Ok(x.clone());
    }
    let n = x.shape()[axis];
    let mut apart = x.shape().clone();
    apart.0.insert(axis + 1, Dim::from(1));
    let y = e.reshape(x, &apart)?;
    let (lo, mut hi) = (vec![0; apart.rank()], vec![0; apart.rank()]);
    hi[axis + 1] = d as i64 - 1;
    let y = e.pad(&y, &lo, &hi, Scalar::F(0.0))?;
    let mut long = x.shape().clone();
    long.0[axis] = n.mul(Dim::from(d));
    let y = e.reshape(&y, &long)?;
    narrow(e, &y, axis, 0, 1, long[axis].offset(1 - d as i64))
}

/// Exports a ConvTranspose, or returns `None` if ConvTranspose cannot express the convolution. The kernel of
/// the ConvTranspose is `w`, reversed along the spatial axes and with swapped channel axes. The padding of a
/// ConvTranspose is the number of elements that it cuts off from the full result.
fn transposed(
    e: &mut Emitter<'_>,
    c: &Conv,
    x: &Val,
    w: &Val,
    kernel: &[usize],
    ty: &TensorType,
) -> Result<Option<Val>> {
    let (mut off, mut more) = (vec![], vec![]);
    for k in 0..kernel.len() {
        let edge = ((kernel[k] - 1) * c.dilation[k]) as i64;
        let (lo, hi) = (edge - c.pad[k].0, edge - c.pad[k].1);
        let fits = -hi < c.input_dilation[k].max(c.dilation[k]) as i64;
        if c.stride[k] != 1 || lo < 0 || !fits {
            return Ok(None);
        }
        off.push((lo, hi.max(0)));
        more.push((-hi).max(0));
    }
    let Some(out) = w.shape()[0].known() else { return Ok(None) };
    let (g, s) = (c.groups, w.shape().clone());
    let split = |a: Dim, b: Dim| -> Shape {
        [Dim::from(g), a, b].into_iter().chain(s[2..].iter().copied()).collect()
    };
    let per = Dim::from(out / g);
    let v = e.reshape(w, &split(per, s[1]))?;
    let perm: Vec<usize> = [0, 2, 1].into_iter().chain(3..v.rank()).collect();
    let v = e.transpose(&v, &perm);
    let joined: Shape = [s[1].mul(Dim::from(g)), per].into_iter().chain(s[2..].iter().copied()).collect();
    let v = e.reshape(&v, &joined)?;
    let v = flip(e, &v, &(2..s.rank()).collect::<Vec<_>>())?;
    let attrs = vec![
        sizes("kernel_shape", kernel.iter().copied()),
        sizes("strides", c.input_dilation.iter().copied()),
        pads(off),
        sizes("dilations", c.dilation.iter().copied()),
        ints("output_padding", &more),
        int("group", g as i64),
    ];
    Ok(Some(e.node("ConvTranspose", &[x, &v], attrs, ty.clone())))
}

/// Whether the padding on some side is at least as wide as the kernel. Other ONNX software rejects such a
/// padding.
fn wide(p: &Pool) -> bool {
    p.pad.iter().zip(&p.kernel).any(|(p, k)| p.0 >= *k || p.1 >= *k)
}

fn attributes(p: &Pool) -> Vec<super::super::proto::AttributeProto> {
    let pad = p.pad.iter().map(|p| (p.0 as i64, p.1 as i64));
    let mut out = vec![
        sizes("kernel_shape", p.kernel.iter().copied()),
        sizes("strides", p.stride.iter().copied()),
        pads(pad),
        sizes("dilations", p.dilation.iter().copied()),
    ];
    if let PoolKind::Avg { count_include_pad } = p.kind {
        out.push(int("count_include_pad", count_include_pad.into()));
    }
    out
}

/// The operand with the pool's padding added explicitly.
fn padded(e: &mut Emitter<'_>, p: &Pool, x: &Val, value: Scalar) -> Result<Val> {
    let side = |f: fn(&(usize, usize)) -> usize| -> Vec<i64> {
        [0, 0].into_iter().chain(p.pad.iter().map(|p| f(p) as i64)).collect()
    };
    e.pad(x, &side(|p| p.0), &side(|p| p.1), value)
}

fn without_padding(p: &Pool) -> Pool {
    Pool { pad: p.pad.iter().map(|_| (0, 0)).collect(), ..p.clone() }
}

pub(super) fn pool(e: &mut Emitter<'_>, p: &Pool, x: &Val, to: &Shape) -> Result<Val> {
    if p.kernel.is_empty() {
        return Ok(x.clone());
    }
    let max = p.kind == PoolKind::Max;
    let d = x.dtype();
    // f64 represents every integer of up to 32 bits, but not every integer of 64 bits.
    if max && d.is_int() && !matches!(d, I8 | U8) {
        if d.bits() == 64 {
            return windows(e, p, x, to);
        }
        let v = e.cast(x, F64);
        let y = pool(e, p, &v, to)?;
        return Ok(e.cast(&y, d));
    }
    let one = std::slice::from_ref(x);
    within(
        e,
        if max { "MaxPool" } else { "AveragePool" },
        if max { MAX } else { FLOATS_22 },
        one,
        true,
        |e, x| {
            let ty = TensorType { dtype: x[0].dtype(), shape: to.clone() };
            let (x, p) = match p.kind {
                _ if !wide(p) => (x[0].clone(), p.clone()),
                PoolKind::Max => (padded(e, p, &x[0], lowest(x[0].dtype()))?, without_padding(p)),
                PoolKind::Avg { count_include_pad: true } => {
                    (padded(e, p, &x[0], Scalar::F(0.0))?, without_padding(p))
                }
                PoolKind::Avg { .. } => {
                    return Err(Error::unsupported(
                        "an average pool that does not count padding, with padding as wide as its kernel",
                        "Use less padding",
                    ));
                }
            };
            let name = if max { "MaxPool" } else { "AveragePool" };
            Ok(e.node(name, &[&x], attributes(&p), ty))
        },
    )
}

/// A maximum pool as the maximum of strided slices, one for each position in the kernel.
fn windows(e: &mut Emitter<'_>, p: &Pool, x: &Val, to: &Shape) -> Result<Val> {
    let x = padded(e, p, x, lowest(x.dtype()))?;
    let mut parts = vec![x];
    for k in 0..p.kernel.len() {
        let mut next = vec![];
        for v in &parts {
            for i in 0..p.kernel[k] {
                next.push(narrow(e, v, k + 2, i * p.dilation[k], p.stride[k], to[k + 2])?);
            }
        }
        parts = vec![next.remove(0)];
        for v in next {
            let m = scalar(e, ScalarOp::Max, &[parts.remove(0), v])?;
            parts.push(m);
        }
    }
    Ok(parts.remove(0))
}

/// Scatters the gradient `dy` of a pool's result to the positions of the input.
pub(super) fn pool_grad(e: &mut Emitter<'_>, p: &Pool, x: &Val, dy: &Val) -> Result<Val> {
    if p.kernel.is_empty() {
        return Ok(dy.clone());
    }
    match p.kind {
        PoolKind::Max => max_grad(e, p, x, dy),
        PoolKind::Avg { count_include_pad } => avg_grad(e, p, x, dy, count_include_pad),
    }
}

/// Adds each gradient at the position of its window's maximum, or of the first of several equal maxima. The
/// positions are MaxPool's second result.
fn max_grad(e: &mut Emitter<'_>, p: &Pool, x: &Val, dy: &Val) -> Result<Val> {
    if wide(p) {
        return Err(Error::unsupported(
            "the gradient of a pool whose padding is as wide as its kernel",
            "Use less padding",
        ));
    }
    let index = within(e, "MaxPool", MAX, std::slice::from_ref(x), false, |e, x| {
        let y = TensorType { dtype: x[0].dtype(), shape: dy.shape().clone() };
        let at = TensorType { dtype: I64, shape: dy.shape().clone() };
        Ok(e.node_of("MaxPool", &[&x[0]], attributes(p), vec![y, at]).swap_remove(1))
    })?;
    let flat = |v: &Val| Shape::from([v.shape().numel()]);
    let (index, upd) = (e.reshape(&index, &flat(dy))?, e.reshape(dy, &flat(dy))?);
    let zeros = e.full(&TensorType { dtype: dy.dtype(), shape: flat(x) }, Scalar::F(0.0))?;
    let y = e.node_of_first_type(
        "ScatterElements",
        &[&zeros, &index, &upd],
        vec![super::emit::text("reduction", "add")],
    );
    e.reshape(&y, x.shape())
}

/// Divides the gradient by the number of elements in each window, then applies a transposed depthwise
/// convolution with ones.
fn avg_grad(e: &mut Emitter<'_>, p: &Pool, x: &Val, dy: &Val, all: bool) -> Result<Val> {
    let (d, n) = (dy.dtype(), p.kernel.len());
    let wide = e.cast(dy, d.compute());
    let d1 = wide.dtype();
    let mut c = Conv::new(n);
    let mut shape = vec![1, 1];
    shape.extend_from_slice(&p.kernel);
    let ones = e.full(&TensorType::new(d1, &shape[..]), Scalar::F(1.0))?;
    let count = if all {
        e.lit(d1, p.kernel.iter().product::<usize>() as f64)?
    } else {
        let one: Shape = [Dim::from(1); 2].into_iter().chain(x.shape()[2..].iter().copied()).collect();
        let inside = e.full(&TensorType { dtype: d1, shape: one }, Scalar::F(1.0))?;
        c.stride = p.stride.clone();
        c.dilation = p.dilation.clone();
        c.pad = p.pad.iter().map(|p| (p.0 as i64, p.1 as i64)).collect();
        let to: Shape = [Dim::from(1); 2].into_iter().chain(dy.shape()[2..].iter().copied()).collect();
        let count = conv(e, &c, &inside, &ones, &to)?;
        let least = e.lit(d1, 1.0)?;
        e.calc("Max", &[&count, &least])?
    };
    let share = e.calc("Div", &[&wide, &count])?;
    let rows = x.shape()[0].mul(x.shape()[1]);
    let apart =
        |s: &Shape| -> Shape { [rows, Dim::from(1)].into_iter().chain(s[2..].iter().copied()).collect() };
    let share = e.reshape(&share, &apart(dy.shape()))?;
    let mut c = Conv::new(n);
    c.dilation = p.dilation.clone();
    c.input_dilation = p.stride.clone();
    for k in 0..n {
        let sizes = (x.shape()[k + 2].known(), dy.shape()[k + 2].known());
        let (Some(size), Some(out)) = sizes else {
            return Err(Error::unsupported(
                "the gradient of an average over symbolic sizes",
                "Give concrete sizes before exporting",
            ));
        };
        let edge = ((p.kernel[k] - 1) * p.dilation[k]) as i64;
        let lo = edge - p.pad[k].0 as i64;
        let full = (out.max(1) as i64 - 1) * p.stride[k] as i64 + 1;
        c.pad[k] = (lo, size as i64 + edge - full - lo);
    }
    let to = apart(x.shape());
    let y = conv(e, &c, &share, &ones, &to)?;
    let y = e.reshape(&y, x.shape())?;
    Ok(e.cast(&y, d))
}
