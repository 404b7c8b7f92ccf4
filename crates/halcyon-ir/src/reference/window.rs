//! Matrix product, convolution and pooling.

use super::{Tensor, Vals, mixed, order, wrap};
use crate::error::Result;
use crate::op::{Conv, Pool, PoolKind, ReduceKind};
use std::cmp::Ordering;

pub(super) fn matmul(a: &Tensor, b: &Tensor) -> Result<Vals> {
    let r = a.dims.len();
    let (m, k, n) = (a.dims[r - 2], a.dims[r - 1], b.dims[r - 1]);
    let batch: usize = a.dims[..r - 2].iter().product();
    fn product<T: Copy>(
        (batch, m, k, n): (usize, usize, usize, usize),
        a: &[T],
        b: &[T],
        zero: T,
        f: impl Fn(T, T, T) -> T,
    ) -> Vec<T> {
        let mut y = vec![zero; batch * m * n];
        for i in 0..batch * m {
            let base = i / m.max(1) * k * n;
            for p in 0..k {
                let x = a[i * k + p];
                let row = &b[base + p * n..base + (p + 1) * n];
                let out = &mut y[i * n..(i + 1) * n];
                out.iter_mut().zip(row).for_each(|(o, w)| *o = f(*o, x, *w));
            }
        }
        y
    }
    let size = (batch, m, k, n);
    Ok(match (&a.v, &b.v) {
        (Vals::F(x), Vals::F(w)) => Vals::float(a.dtype, product(size, x, w, 0.0, |s, x, w| s + x * w)),
        (Vals::I(x), Vals::I(w)) => {
            let f = |s: i64, x: i64, w: i64| wrap(a.dtype, s.wrapping_add(x.wrapping_mul(w)));
            Vals::I(product(size, x, w, 0, f))
        }
        _ => return Err(mixed()),
    })
}

/// For every kernel element (row) and output element: the input element it reads, or `None` in the padding.
struct Taps {
    out: usize,
    at: Vec<Option<usize>>,
}

/// One spatial axis: sizes of input, kernel and output, then stride, dilation, input dilation and low
/// padding.
struct Axis {
    i: usize,
    k: usize,
    y: usize,
    stride: usize,
    dilation: usize,
    input_dilation: usize,
    lo: i64,
}

impl Taps {
    fn new(axes: &[Axis]) -> Taps {
        let mut t = Taps { out: 1, at: vec![Some(0)] };
        for a in axes {
            let kernels = t.at.len() / t.out.max(1);
            let mut at = Vec::with_capacity(t.at.len() * a.k * a.y);
            for kk in 0..kernels {
                for k in 0..a.k {
                    for o in 0..t.out {
                        let outer = t.at[kk * t.out + o];
                        for y in 0..a.y {
                            let p = (y * a.stride + k * a.dilation) as i64 - a.lo;
                            let inside = p >= 0
                                && p % a.input_dilation as i64 == 0
                                && p / (a.input_dilation as i64) < a.i as i64;
                            let q = p / a.input_dilation as i64;
                            at.push(outer.filter(|_| inside).map(|b| b * a.i + q as usize));
                        }
                    }
                }
            }
            t = Taps { out: t.out * a.y, at };
        }
        t
    }

    fn kernel(&self, k: usize) -> &[Option<usize>] {
        &self.at[k * self.out..(k + 1) * self.out]
    }

    fn kernels(&self) -> usize {
        self.at.len() / self.out.max(1)
    }
}

pub(super) fn conv(c: &Conv, x: &Tensor, w: &Tensor, out: &[usize]) -> Result<Vals> {
    let (Vals::F(xv), Vals::F(wv)) = (&x.v, &w.v) else {
        return Err(mixed());
    };
    let axes: Vec<Axis> = (0..c.stride.len())
        .map(|k| Axis {
            i: x.dims[k + 2],
            k: w.dims[k + 2],
            y: out[k + 2],
            stride: c.stride[k],
            dilation: c.dilation[k],
            input_dilation: c.input_dilation[k],
            lo: c.pad[k].0,
        })
        .collect();
    let t = Taps::new(&axes);
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

fn taps(p: &Pool, i: &[usize], y: &[usize]) -> Taps {
    let axes: Vec<Axis> = (0..p.kernel.len())
        .map(|k| Axis {
            i: i[k + 2],
            k: p.kernel[k],
            y: y[k + 2],
            stride: p.stride[k],
            dilation: p.dilation[k],
            input_dilation: 1,
            lo: p.pad[k].0 as i64,
        })
        .collect();
    Taps::new(&axes)
}

/// Number of elements that each window averages over.
fn counts(t: &Taps, include_pad: bool) -> Vec<f64> {
    (0..t.out)
        .map(|o| (0..t.kernels()).filter(|k| include_pad || t.kernel(*k)[o].is_some()).count().max(1) as f64)
        .collect()
}

pub(super) fn pool(p: &Pool, x: &Tensor, out: &[usize]) -> Vals {
    let t = taps(p, &x.dims, out);
    let planes = out[0] * out[1];
    let size: usize = x.dims[2..].iter().product();
    fn fold<T: Copy>(
        t: &Taps,
        planes: usize,
        size: usize,
        x: &[T],
        first: T,
        f: impl Fn(T, T) -> T,
    ) -> Vec<T> {
        let mut y = vec![first; planes * t.out];
        for n in 0..planes {
            for k in 0..t.kernels() {
                for (o, q) in t.kernel(k).iter().enumerate() {
                    if let Some(q) = q {
                        let y = &mut y[n * t.out + o];
                        *y = f(*y, x[n * size + q]);
                    }
                }
            }
        }
        y
    }
    let first = ReduceKind::Max.identity(x.dtype);
    match (&x.v, p.kind) {
        (Vals::F(v), PoolKind::Max) => {
            Vals::F(fold(&t, planes, size, v, first.as_f64(), super::fold_f(ReduceKind::Max)))
        }
        (Vals::I(v), _) => Vals::I(fold(
            &t,
            planes,
            size,
            v,
            super::of_scalar(first),
            super::fold_i(ReduceKind::Max, x.dtype),
        )),
        (Vals::F(v), PoolKind::Avg { count_include_pad }) => {
            let c = counts(&t, count_include_pad);
            let mut y = fold(&t, planes, size, v, 0.0, |a, b| a + b);
            y.iter_mut().enumerate().for_each(|(i, y)| *y /= c[i % t.out]);
            Vals::float(x.dtype, y)
        }
    }
}

pub(super) fn pool_grad(p: &Pool, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Vals> {
    let Vals::F(g) = &dy.v else {
        return Err(mixed());
    };
    let t = taps(p, &x.dims, &y.dims);
    let size: usize = x.dims[2..].iter().product();
    let mut dx = vec![0.0; x.dims.iter().product()];
    let cmp = order(x);
    match p.kind {
        PoolKind::Avg { count_include_pad } => {
            let c = counts(&t, count_include_pad);
            for (i, g) in g.iter().enumerate() {
                for k in 0..t.kernels() {
                    if let Some(q) = t.kernel(k)[i % t.out] {
                        dx[i / t.out * size + q] += g / c[i % t.out];
                    }
                }
            }
        }
        PoolKind::Max => {
            for (i, g) in g.iter().enumerate() {
                // The first of the largest elements; NaN counts as the largest.
                let best = (0..t.kernels())
                    .filter_map(|k| t.kernel(k)[i % t.out])
                    .map(|q| i / t.out * size + q)
                    .reduce(|a, b| if cmp(b, a) == Ordering::Greater { b } else { a });
                if let Some(b) = best {
                    dx[b] += g;
                }
            }
        }
    }
    Ok(Vals::float(x.dtype, dx))
}
