//! Direct convolution: one work-item per result. Any number of spatial axes, groups, strides, dilations, padding, and
//! input dilation (the transposed convolution).

use super::template::{GROUP, Template};
use super::{E, Kernel, Launch, Ty};
use crate::error::Result;
use crate::op::Conv;
use crate::target::{Caps, Operand};

pub(super) fn build(
    c: &Conv,
    x: &Operand,
    w: &Operand,
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    let axes = c.stride.len();
    let t = Template::new("conv", GROUP, &[x, w, out]);
    let (ax, aw, ao) = (t.input(x), t.input(w), t.output(out));
    let b = &t.b;
    let kernel = &w.view.shape[2..];
    let size = t.sizes("i", &x.view.shape[2..]);
    let taps = t.sizes("k", kernel);
    let stride = t.sizes("st", &c.stride);
    let dilation = t.sizes("dl", &c.dilation);
    let lo: Vec<E<'_>> = c
        .pad
        .iter()
        .enumerate()
        .map(|(i, p)| t.size(&format!("lo{i}"), p.0))
        .collect();
    // Holes in the input take a division per tap, so kernels without them are their own class.
    let holes: Option<Vec<E<'_>>> = c
        .input_dilation
        .iter()
        .any(|&d| d != 1)
        .then(|| t.sizes("id", &c.input_dilation));
    let per_group = t.size("cg", w.view.shape[1]);
    let out_per_group = t.size("og", w.view.shape[0] / c.groups);
    let groups = t.points(&out.view.shape, |_, idx| {
        let (image, channel) = (idx[0], idx[1]);
        let first = b.let_(channel.idiv(out_per_group) * per_group);
        let acc = b.var_of(Ty::of(out.dtype), 0);
        let start: Vec<E<'_>> = (0..axes)
            .map(|k| b.let_(idx[2 + k] * stride[k] - lo[k]))
            .collect();
        b.for_(0, per_group, 1, |ci| {
            let mut at = vec![];
            nest(b, &taps, &mut at, &mut |at: &[E<'_>]| {
                let mut inside: Option<E<'_>> = None;
                let mut xi = vec![image, first + ci];
                for k in 0..axes {
                    let mut p = start[k] + at[k] * dilation[k];
                    let mut ok = p.ge(0);
                    if let Some(h) = &holes {
                        let q = p.max(0);
                        ok = ok.and(q.imod(h[k]).equals(0));
                        p = q.idiv(h[k]);
                    }
                    ok = ok.and(p.lt(size[k]));
                    inside = Some(inside.map_or(ok, |i| i.and(ok)));
                    xi.push(p);
                }
                let mut wi = vec![channel, ci];
                wi.extend(at);
                let v = match inside {
                    Some(g) => ax.load_if(b, &xi, g),
                    None => ax.load(b, &xi),
                };
                acc.set(v.fma(aw.load(b, &wi), acc.get()));
            });
        });
        ao.store(b, idx, acc.get());
    });
    t.finish(groups, caps.max_groups)
}

/// Nested loops over all of `dims`.
pub(super) fn nest<'a>(
    b: &'a super::Builder,
    dims: &[E<'a>],
    at: &mut Vec<E<'a>>,
    f: &mut dyn FnMut(&[E<'a>]),
) {
    match dims.get(at.len()) {
        None => f(at),
        Some(&d) => b.for_(0, d, 1, |i| {
            at.push(i);
            nest(b, dims, at, f);
            at.pop();
        }),
    }
}
