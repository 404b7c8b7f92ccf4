//! Pooling and its gradient: one work-item per result.

use super::conv::nest;
use super::template::{Access, GROUP, Template};
use super::{E, Kernel, Launch, Ty};
use crate::error::Result;
use crate::op::{Pool, PoolKind, ReduceKind};
use crate::target::{Caps, Operand};

struct Window<'a> {
    taps: Vec<E<'a>>,
    stride: Vec<E<'a>>,
    dilation: Vec<E<'a>>,
    lo: Vec<E<'a>>,
    /// Input sizes.
    size: Vec<E<'a>>,
}

impl<'a> Window<'a> {
    fn declare(t: &'a Template, p: &Pool, input: &[usize]) -> Window<'a> {
        Window {
            taps: t.sizes("k", &p.kernel),
            stride: t.sizes("st", &p.stride),
            dilation: t.sizes("dl", &p.dilation),
            lo: p
                .pad
                .iter()
                .enumerate()
                .map(|(i, p)| t.size(&format!("lo{i}"), p.0))
                .collect(),
            size: t.sizes("i", &input[2..]),
        }
    }

    /// Input index of a tap of the window at `y`, and whether it is inside.
    fn tap(&self, y: &[E<'a>], at: &[E<'a>]) -> (Vec<E<'a>>, E<'a>) {
        let mut idx = vec![y[0], y[1]];
        let mut inside: Option<E<'a>> = None;
        for k in 0..at.len() {
            let p = y[2 + k] * self.stride[k] - self.lo[k] + at[k] * self.dilation[k];
            let ok = p.ge(0).and(p.lt(self.size[k]));
            inside = Some(inside.map_or(ok, |i| i.and(ok)));
            idx.push(p);
        }
        // Pools have at least one spatial axis.
        let inside = inside.unwrap_or_else(|| y[0].ge(0));
        (idx, inside)
    }
}

pub(super) fn build(p: &Pool, x: &Operand, out: &Operand, caps: &Caps) -> Result<(Kernel, Launch)> {
    let name = if p.kind == PoolKind::Max {
        "max_pool"
    } else {
        "avg_pool"
    };
    let t = Template::new(name, GROUP, &[x, out]);
    let (ax, ao) = (t.input(x), t.output(out));
    let b = &t.b;
    let w = Window::declare(&t, p, &x.view.shape);
    let ty = Ty::of(x.dtype);
    let groups = t.points(&out.view.shape, |_, idx| {
        match p.kind {
            PoolKind::Max => {
                let best = b.var_of(ty, ReduceKind::Max.identity(x.dtype));
                nest(b, &w.taps, &mut vec![], &mut |at: &[E<'_>]| {
                    let (i, inside) = w.tap(idx, at);
                    b.if_(inside, || best.set(best.get().max(ax.load(b, &i))));
                });
                ao.store(b, idx, best.get());
            }
            PoolKind::Avg { count_include_pad } => {
                let (sum, n) = (b.var_of(ty, 0.0), b.var_of(ty, 0.0));
                nest(b, &w.taps, &mut vec![], &mut |at: &[E<'_>]| {
                    let (i, inside) = w.tap(idx, at);
                    b.if_(inside, || sum.set(sum.get() + ax.load(b, &i)));
                    if count_include_pad {
                        n.set(n.get() + 1.0);
                    } else {
                        b.if_(inside, || n.set(n.get() + 1.0));
                    }
                });
                ao.store(b, idx, sum.get() / n.get());
            }
        };
    });
    t.finish(groups, caps.max_groups)
}

/// Gradient of a pool at `x`: each element asks the windows it is in.
pub(super) fn gradient(
    p: &Pool,
    x: &Operand,
    y: &Operand,
    dy: &Operand,
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    let name = if p.kind == PoolKind::Max {
        "max_pool_grad"
    } else {
        "avg_pool_grad"
    };
    let t = Template::new(name, GROUP, &[x, y, dy, out]);
    let (ax, ay, ad, ao) = (t.input(x), t.input(y), t.input(dy), t.output(out));
    let b = &t.b;
    let w = Window::declare(&t, p, &x.view.shape);
    let outs = t.sizes("y", &y.view.shape[2..]);
    let ty = Ty::of(x.dtype);
    let axes = p.kernel.len();
    let groups = t.points(&out.view.shape, |_, idx| {
        let sum = b.var_of(ty, 0.0);
        let mine = ax.load(b, idx);
        nest(b, &w.taps, &mut vec![], &mut |at: &[E<'_>]| {
            // The window in which this element is tap `at`.
            let mut yi = vec![idx[0], idx[1]];
            let mut ok: Option<E<'_>> = None;
            for k in 0..axes {
                let s = idx[2 + k] + w.lo[k] - at[k] * w.dilation[k];
                let q = s.max(0);
                let here = s
                    .ge(0)
                    .and(q.imod(w.stride[k]).equals(0))
                    .and(q.idiv(w.stride[k]).lt(outs[k]));
                ok = Some(ok.map_or(here, |o| o.and(here)));
                yi.push(q.idiv(w.stride[k]));
            }
            b.if_(ok.unwrap_or_else(|| idx[0].ge(0)), || match p.kind {
                PoolKind::Max => {
                    let top = ay.load(b, &yi);
                    b.if_(same(mine, top), || {
                        let first = b.var_of(Ty::U32, 1u32);
                        earlier(&t, &w, &ax, &yi, at, |v| {
                            b.if_(same(v, top), || first.set(0u32));
                        });
                        b.if_(first.get().differs(0u32), || sum.set(sum.get() + ad.load(b, &yi)));
                    });
                }
                PoolKind::Avg { count_include_pad } => {
                    let n = b.var_of(ty, 0.0);
                    nest(b, &w.taps, &mut vec![], &mut |at: &[E<'_>]| {
                        if count_include_pad {
                            n.set(n.get() + 1.0);
                        } else {
                            b.if_(w.tap(&yi, at).1, || n.set(n.get() + 1.0));
                        }
                    });
                    sum.set(sum.get() + ad.load(b, &yi) / n.get());
                }
            });
        });
        ao.store(b, idx, sum.get());
    });
    t.finish(groups, caps.max_groups)
}

/// Equal, or both NaN.
fn same<'a>(a: E<'a>, b: E<'a>) -> E<'a> {
    if a.ty().is_float() {
        a.equals(b).or(a.is_nan().and(b.is_nan()))
    } else {
        a.equals(b)
    }
}

/// Calls `f` on the elements of the window at `y` that come before tap `at`.
fn earlier<'a>(
    t: &'a Template,
    w: &Window<'a>,
    x: &Access<'a>,
    y: &[E<'a>],
    at: &[E<'a>],
    f: impl Fn(E<'a>),
) {
    let b = &t.b;
    nest(b, &w.taps, &mut vec![], &mut |e: &[E<'a>]| {
        // Row-major order: the first axis that differs decides.
        let mut before = b.constant(Ty::Bool, false);
        for k in (0..e.len()).rev() {
            before = e[k].lt(at[k]).or(e[k].equals(at[k]).and(before));
        }
        let (i, inside) = w.tap(y, e);
        b.if_(before.and(inside), || f(x.load(b, &i)));
    });
}
