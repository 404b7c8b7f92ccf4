//! Pooling and its gradient, one output element per work-item. The gradient is a gather: each input element
//! sums the gradients of the windows in which it is the first maximum, or, for an average, its shares of the
//! gradients of the windows that contain it. No element is written twice, and the order of the sums is fixed.

use super::common::*;
use crate::kernel::ir::Ty;
use crate::kernel::lower::Lowered;
use crate::kernel::{Buf, Builder, E};
use crate::ops::{Op, Pool, PoolKind, ReduceKind};
use crate::target::{Caps, Declined, Operand};

/// Kernels for [`Op::Pool`] (`[n, c, i…]`; number types for the maximum, floats for the average) and
/// [`Op::PoolGrad`] (operands x, y and dy of one float type). One to three spatial axes.
///
/// # Errors
/// Declines with `needs_dense` unless the operands that the kernel reads are row-major. Declines more than
/// three spatial axes.
pub fn lower(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Lowered, Declined> {
    match op {
        Op::Pool(p) => {
            arity("pool", inputs, outputs, 1..=1)?;
            let g = Geometry::new(p, &inputs[0], &outputs[0])?;
            row_major(inputs, 0..1)?;
            forward(p, &g, inputs, outputs, caps)
        }
        Op::PoolGrad(p) => {
            arity("pool_grad", inputs, outputs, 3..=3)?;
            let g = Geometry::new(p, &inputs[0], &inputs[2])?;
            match p.kind {
                PoolKind::Max => {
                    row_major(inputs, 0..3)?;
                    max_grad(&g, inputs, outputs, caps)
                }
                PoolKind::Avg { count_include_pad } => {
                    row_major(inputs, 2..3)?;
                    avg_grad(count_include_pad, &g, inputs, outputs, caps)
                }
            }
        }
        _ => Err(Declined::because(format!("pool: expected a pool or its gradient, found {}", op.name()))),
    }
}

/// Sizes, always with three spatial axes.
struct Geometry {
    planes: usize,
    /// Spatial sizes of the output (`y`), the window (`k`) and the input (`i`).
    y: [usize; 3],
    k: [usize; 3],
    i: [usize; 3],
    stride: [usize; 3],
    dilation: [usize; 3],
    /// Padding before the first element of each axis.
    lo: [usize; 3],
}

impl Geometry {
    fn new(p: &Pool, x: &Operand, y: &Operand) -> Result<Geometry, Declined> {
        let n = p.kernel.len();
        if !(1..=3).contains(&n) || x.view.rank() != n + 2 || y.view.rank() != n + 2 {
            return Err(Declined::because(format!(
                "pool: {n} spatial axes, expected 1 to 3 and operands with two more axes"
            )));
        }
        Ok(Geometry {
            planes: x.view.shape[0] * x.view.shape[1],
            y: three(y.view.shape[2..].iter().copied(), 1),
            k: three(p.kernel.iter().copied(), 1),
            i: three(x.view.shape[2..].iter().copied(), 1),
            stride: three(p.stride.iter().copied(), 1),
            dilation: three(p.dilation.iter().copied(), 1),
            lo: three(p.pad.iter().map(|p| p.0), 0),
        })
    }

    fn fill(&self, args: &mut Args) {
        args.int("planes", self.planes as i64);
        args.ints("y", self.y.map(|v| v as i64)).ints("k", self.k.map(|v| v as i64));
        args.ints("i", self.i.map(|v| v as i64)).ints("s", self.stride.map(|v| v as i64));
        args.ints("d", self.dilation.map(|v| v as i64)).ints("l", self.lo.map(|v| v as i64));
    }
}

/// The fields of [`Geometry`] as parameters.
struct Sizes<'a> {
    planes: E<'a>,
    y: Vec<E<'a>>,
    k: Vec<E<'a>>,
    i: Vec<E<'a>>,
    s: Vec<E<'a>>,
    d: Vec<E<'a>>,
    l: Vec<E<'a>>,
}

impl<'a> Sizes<'a> {
    fn declare(b: &'a Builder) -> Sizes<'a> {
        let planes = b.size("planes");
        let [y, k, i, s, d, l] = ["y", "k", "i", "s", "d", "l"].map(|n| sizes(b, n, 3));
        Sizes { planes, y, k, i, s, d, l }
    }

    /// Runs `f` for each element of the window at `o` that lies inside the input, in order. `f` gets the
    /// element's index within the plane.
    fn window(&self, b: &'a Builder, o: &[E<'a>], f: impl FnOnce(E<'a>)) {
        let place = |a: usize, k: E<'a>| b.let_(o[a] * self.s[a] + k * self.d[a] - self.l[a]);
        let inside = |a: usize, p: E<'a>| p.ge(0).and(p.lt(self.i[a]));
        b.for_(0, self.k[0], 1, |kz| {
            let z = place(0, kz);
            b.for_(0, self.k[1], 1, |ky| {
                let y = place(1, ky);
                let line = b.let_((z * self.i[1] + y) * self.i[2]);
                b.if_(inside(0, z).and(inside(1, y)), || {
                    b.for_(0, self.k[2], 1, |kx| {
                        let x = place(2, kx);
                        b.if_(inside(2, x), || f(line + x));
                    });
                });
            });
        });
    }

    /// Runs `f` with the coordinates of each window that covers input element `i`, in the order of the
    /// window's elements that lie on `i`.
    fn covering(&self, b: &'a Builder, i: &[E<'a>], f: impl FnOnce(&[E<'a>])) {
        // Element `k` of the window at `o` lies on `i` if `o * stride = i + lo - k * dilation`.
        let at = |a: usize, k: E<'a>| {
            let from = b.let_(i[a] + self.l[a] - k * self.d[a]);
            let p = b.let_(from.max(0));
            let o = b.let_(p.idiv(self.s[a]));
            (o, from.ge(0).and(p.imod(self.s[a]).equals(0)).and(o.lt(self.y[a])))
        };
        b.for_(0, self.k[0], 1, |kz| {
            let (oz, in_z) = at(0, kz);
            b.if_(in_z, || {
                b.for_(0, self.k[1], 1, |ky| {
                    let (oy, in_y) = at(1, ky);
                    b.if_(in_y, || {
                        b.for_(0, self.k[2], 1, |kx| {
                            let (ox, in_x) = at(2, kx);
                            b.if_(in_x, || f(&[oz, oy, ox]));
                        });
                    });
                });
            });
        });
    }

    /// Divisor of the average over the window at `o`; at least 1.
    fn count(&self, b: &'a Builder, o: &[E<'a>], include_pad: bool) -> E<'a> {
        let along = |a: usize| {
            if include_pad {
                return self.k[a];
            }
            // The numbers of the window's elements before the start, and before the end, of the input.
            let start = o[a] * self.s[a] - self.l[a];
            let before = (-start).max(0).div_ceil(self.d[a]).min(self.k[a]);
            let until = (self.i[a] - start).max(0).div_ceil(self.d[a]).min(self.k[a]);
            (until - before).max(0)
        };
        b.let_((along(0) * along(1) * along(2)).max(1))
    }

    fn result(&self, plane: E<'a>, o: &[E<'a>]) -> E<'a> {
        ((plane * self.y[0] + o[0]) * self.y[1] + o[1]) * self.y[2] + o[2]
    }
}

fn forward(
    p: &Pool,
    g: &Geometry,
    inputs: &[Operand],
    outputs: &[Operand],
    caps: &Caps,
) -> Result<Lowered, Declined> {
    let dtype = inputs[0].dtype;
    let wg = items(64, caps);
    let b = Builder::with_index("pool", [wg, 1, 1], index_type(inputs, outputs, caps)?);
    let (x, y) = (b.input(dtype), b.output(dtype));
    let s = Sizes::declare(&b);
    let at = b.linear_id();
    b.if_(at.lt(s.planes * s.y[0] * s.y[1] * s.y[2]), || {
        let c = unravel(&b, at, &[s.planes, s.y[0], s.y[1], s.y[2]]);
        let o = &c[1..];
        let plane = b.let_(c[0] * s.i[0] * s.i[1] * s.i[2]);
        match p.kind {
            PoolKind::Max => {
                let acc = b.var_of(Ty::of(dtype), ReduceKind::Max.identity(dtype));
                s.window(&b, o, |i| acc.set(acc.get().max(b.load(x, plane + i))));
                b.store(y, at, acc.get());
            }
            PoolKind::Avg { count_include_pad } => {
                let acc = b.var_of(Ty::of(dtype), 0);
                s.window(&b, o, |i| acc.set(acc.get() + b.load(x, plane + i)));
                let n = s.count(&b, o, count_include_pad).to(Ty::of(dtype));
                b.store(y, at, acc.get() / n);
            }
        }
    });
    let mut args = Args::of(inputs, outputs);
    g.fill(&mut args);
    let total = g.planes * g.y.iter().product::<usize>();
    single(b, &args, total.div_ceil(wg as usize), caps)
}

/// Builds a gradient with one input element per work-item. `buffers` are the operands that the kernel reads.
/// `f` receives the plane, the element's coordinates and the variable for the sum.
fn gradient(
    g: &Geometry,
    buffers: Vec<usize>,
    all: (&[Operand], &[Operand]),
    caps: &Caps,
    f: impl for<'a> FnOnce(&'a Builder, &Sizes<'a>, &[Buf], E<'a>, &[E<'a>], crate::kernel::Var<'a>),
) -> Result<Lowered, Declined> {
    let dtype = all.0[0].dtype;
    let wg = items(64, caps);
    let b = Builder::with_index("pool_grad", [wg, 1, 1], index_type(all.0, all.1, caps)?);
    let bufs: Vec<Buf> = buffers.iter().map(|_| b.input(dtype)).collect();
    let dx = b.output(dtype);
    {
        let s = Sizes::declare(&b);
        let at = b.linear_id();
        b.if_(at.lt(s.planes * s.i[0] * s.i[1] * s.i[2]), || {
            let c = unravel(&b, at, &[s.planes, s.i[0], s.i[1], s.i[2]]);
            let acc = b.var_of(Ty::of(dtype), 0);
            f(&b, &s, &bufs, c[0], &c[1..], acc);
            b.store(dx, at, acc.get());
        });
    }
    let read: Vec<Operand> = buffers.iter().map(|&i| all.0[i].clone()).collect();
    let mut args = Args::of(&read, all.1);
    g.fill(&mut args);
    let total = g.planes * g.i.iter().product::<usize>();
    let mut low = single(b, &args, total.div_ceil(wg as usize), caps)?;
    for (_, _, places) in &mut low.steps {
        *places = buffers.iter().copied().chain([3]).collect();
    }
    Ok(low)
}

fn avg_grad(
    include_pad: bool,
    g: &Geometry,
    inputs: &[Operand],
    outputs: &[Operand],
    caps: &Caps,
) -> Result<Lowered, Declined> {
    gradient(g, vec![2], (inputs, outputs), caps, |b, s, bufs, plane, i, acc| {
        s.covering(b, i, |o| {
            let d = b.load(bufs[0], s.result(plane, o));
            let n = s.count(b, o, include_pad).to(d.ty());
            acc.set(acc.get() + d / n);
        });
    })
}

fn max_grad(g: &Geometry, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Lowered, Declined> {
    gradient(g, vec![0, 1, 2], (inputs, outputs), caps, |b, s, bufs, plane, i, acc| {
        let base = b.let_(plane * s.i[0] * s.i[1] * s.i[2]);
        let me = b.let_((i[0] * s.i[1] + i[1]) * s.i[2] + i[2]);
        let mine = b.load(bufs[0], base + me);
        s.covering(b, i, |o| {
            let to = b.let_(s.result(plane, o));
            let top = b.load(bufs[1], to);
            b.if_(wins(mine, top), || {
                // Only the first maximum of a window gets the gradient. Input indices increase along a
                // window, so a maximum with a smaller index comes first.
                let first = b.var_of(Ty::I32, 1);
                s.window(b, o, |at| {
                    b.if_(at.lt(me), || {
                        let v = b.load(bufs[0], base + at);
                        b.if_(wins(v, top), || first.set(0));
                    });
                });
                b.if_(first.get().equals(1), || acc.set(acc.get() + b.load(bufs[2], to)));
            });
        });
    })
}

/// Whether an element is its window's maximum. NaN counts as the largest value.
fn wins<'a>(v: E<'a>, top: E<'a>) -> E<'a> {
    v.equals(top).or(v.is_nan().and(top.is_nan()))
}
