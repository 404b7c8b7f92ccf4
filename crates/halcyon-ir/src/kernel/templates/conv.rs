//! Direct convolution. By default each work-item computes up to four output channels at one position, or, on
//! CPUs and if the result is wide enough, at eight consecutive positions. Kernels have three spatial axes;
//! axes that the op does not have get size 1. A pointwise convolution is computed as a matrix product.

use super::common::*;
use crate::dtype::DType;
use crate::kernel::ir::Ty;
use crate::kernel::lower::Lowered;
use crate::kernel::tune::{Choices, Tolerance, Variant, class};
use crate::kernel::{Builder, E};
use crate::layout::View;
use crate::ops::{Conv, Op};
use crate::target::{Caps, Declined, Operand};

/// Kernels for [`Op::Conv`]: input `[n, c, i…]` and weight `[o, c/groups, k…]` of one float type, with one to
/// three spatial axes.
///
/// # Errors
/// Declines with `needs_dense` unless both operands are row-major. Declines more than three spatial axes.
pub fn lower(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Lowered, Declined> {
    match call(op, inputs, outputs, caps)? {
        Call::Product(p) => swap_operands(super::matmul::lower(&Op::Matmul, &p.0, &[p.1], caps)?),
        Call::Direct(p) => direct(&p, p.default(caps), Args::of(inputs, outputs), caps),
    }
}

/// Like [`lower`], for one of the variants in [`choices`].
///
/// # Errors
/// The errors of [`lower`], and an error for a variant of another template.
pub fn lower_as(
    op: &Op,
    inputs: &[Operand],
    outputs: &[Operand],
    caps: &Caps,
    v: &Variant,
) -> Result<Lowered, Declined> {
    match call(op, inputs, outputs, caps)? {
        Call::Product(p) => swap_operands(super::matmul::lower_as(&Op::Matmul, &p.0, &[p.1], caps, v)?),
        Call::Direct(p) => direct(&p, KernelVariant::of(v)?, Args::of(inputs, outputs), caps),
    }
}

/// The kernels that the device can run for a convolution. A pointwise convolution is tuned as a matrix
/// product.
///
/// # Errors
/// The errors of [`lower`].
pub fn choices(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Choices, Declined> {
    let p = match call(op, inputs, outputs, caps)? {
        Call::Product(p) => return super::matmul::choices(&Op::Matmul, &p.0, &[p.1], caps),
        Call::Direct(p) => p,
    };
    let forms =
        p.forms(caps).into_iter().filter(|f| f.items <= caps.max_workgroup).map(KernelVariant::variant);
    let terms = p.cg * p.k.iter().product::<usize>();
    Ok(Choices::new(p.key(), p.default(caps).variant(), forms, Tolerance::Products(terms)))
}

/// How a convolution is computed: as a matrix product, or by the direct kernel.
enum Call {
    Product(Box<([Operand; 2], Operand)>),
    Direct(Problem),
}

fn call(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Call, Declined> {
    let Op::Conv(c) = op else {
        return Err(Declined::because(format!("conv: expected a convolution, found {}", op.name())));
    };
    arity("conv", inputs, outputs, 2..=2)?;
    let spatial = c.stride.len();
    if !(1..=3).contains(&spatial) || [0, 1].iter().any(|&i| inputs[i].view.rank() != spatial + 2) {
        return Err(Declined::because(format!(
            "conv: {spatial} spatial axes, expected 1 to 3 and operands with two more axes"
        )));
    }
    row_major(inputs, 0..2)?;
    if pointwise(c, &inputs[1].view) {
        return Ok(Call::Product(Box::new(as_product(inputs, outputs))));
    }
    Ok(Call::Direct(Problem::new(c, inputs, outputs, index_type(inputs, outputs, caps)?)))
}

/// A variant: output channels and consecutive positions per work-item, and work-items per workgroup.
#[derive(Clone, Copy, PartialEq, Debug)]
struct KernelVariant {
    channels: u32,
    run: u32,
    items: u32,
}

impl KernelVariant {
    fn variant(self) -> Variant {
        let KernelVariant { channels, run, items } = self;
        Variant::new("direct", &[("channels", channels), ("run", run), ("items", items)])
    }

    fn of(v: &Variant) -> Result<KernelVariant, Declined> {
        if v.kernel != "direct" {
            return Err(v.unknown("conv"));
        }
        Ok(KernelVariant {
            channels: v.number("channels")?,
            run: v.number("run")?,
            items: v.number("items")?,
        })
    }
}

/// Whether the convolution is one matrix product per image, `y[n] = w x[n]`.
fn pointwise(c: &Conv, w: &View) -> bool {
    let ones = |v: &[usize]| v.iter().all(|&s| s == 1);
    c.groups == 1
        && ones(&w.shape[2..])
        && ones(&c.stride)
        && ones(&c.input_dilation)
        && c.pad.iter().all(|&p| p == (0, 0))
}

fn as_product(inputs: &[Operand], outputs: &[Operand]) -> ([Operand; 2], Operand) {
    let (x, w, y) = (&inputs[0], &inputs[1], &outputs[0]);
    let (n, c, o) = (x.view.shape[0], x.view.shape[1], w.view.shape[0]);
    let place = |view: &View, shape: &[usize]| View { offset: view.offset, ..View::dense(shape) };
    let s: usize = x.view.shape[2..].iter().product();
    let operand = |view| Operand { dtype: x.dtype, view };
    let a = operand(place(&w.view, &[1, o, c]).expand(&[n, o, c]));
    let b = operand(place(&x.view, &[n, c, s]));
    ([a, b], operand(place(&y.view, &[n, o, s])))
}

/// Swaps the operand buffers: the weight is the product's left operand but the convolution's right one.
fn swap_operands(mut low: Lowered) -> Result<Lowered, Declined> {
    for (_, _, buffers) in &mut low.steps {
        for i in buffers.iter_mut().filter(|i| **i < 2) {
            *i = 1 - *i;
        }
    }
    Ok(low)
}

struct Problem {
    dtype: DType,
    ix: Ty,
    n: usize,
    groups: usize,
    /// Output channels (`og`) and input channels (`cg`) per group.
    og: usize,
    cg: usize,
    /// Spatial sizes of the output (`y`), the weight (`k`) and the input (`i`).
    y: [usize; 3],
    k: [usize; 3],
    i: [usize; 3],
    stride: [usize; 3],
    dilation: [usize; 3],
    /// Padding before the first element of each axis.
    lo: [i64; 3],
    input_dilation: [usize; 3],
}

impl Problem {
    fn new(c: &Conv, inputs: &[Operand], outputs: &[Operand], ix: Ty) -> Problem {
        let (x, w, y) = (&inputs[0].view.shape, &inputs[1].view.shape, &outputs[0].view.shape);
        Problem {
            dtype: inputs[0].dtype,
            ix,
            n: x[0],
            groups: c.groups,
            og: w[0] / c.groups.max(1),
            cg: w[1],
            y: three(y[2..].iter().copied(), 1),
            k: three(w[2..].iter().copied(), 1),
            i: three(x[2..].iter().copied(), 1),
            stride: three(c.stride.iter().copied(), 1),
            dilation: three(c.dilation.iter().copied(), 1),
            lo: three(c.pad.iter().map(|p| p.0), 0),
            input_dilation: three(c.input_dilation.iter().copied(), 1),
        }
    }

    fn is_input_dilated(&self) -> bool {
        self.input_dilation != [1; 3]
    }

    fn default(&self, caps: &Caps) -> KernelVariant {
        KernelVariant {
            channels: if self.og == 1 { 1 } else { 4 },
            run: if caps.is_cpu && self.y[2] >= 8 { 8 } else { 1 },
            items: items(if caps.is_cpu { 8 } else { 64 }, caps),
        }
    }

    /// Candidates for measurement, not all legal on the device.
    fn forms(&self, caps: &Caps) -> Vec<KernelVariant> {
        let plain = self.default(caps);
        let most = self.og.next_power_of_two();
        let (runs, groups): (&[u32], &[u32]) = match caps.is_cpu {
            true => (&[4, 8, 16, 32], &[1, 2, 4, 16]),
            false => (&[1, 2, 4], &[32, 128, 256]),
        };
        let mut all = vec![];
        for channels in [1, 2, 4, 8].into_iter().filter(|c| *c as usize <= most) {
            let runs = runs.iter().filter(|r| **r as usize <= self.y[2].next_power_of_two());
            all.extend(runs.map(|&run| KernelVariant { channels, run, ..plain }));
        }
        all.extend(groups.iter().map(|&items| KernelVariant { items, ..plain }));
        all
    }

    fn key(&self) -> String {
        format!(
            "conv {} {} n{} groups{} og{} cg{} y{}x{} k{:?} stride{:?} dilation{:?}{}",
            self.dtype,
            self.ix.name(),
            class(self.n),
            class(self.groups),
            class(self.og),
            class(self.cg),
            class(self.y[0] * self.y[1]),
            class(self.y[2]),
            self.k,
            self.stride,
            self.dilation,
            if self.is_input_dilated() { " spread" } else { "" },
        )
    }
}

/// The input element at a position of the dilated input along one axis: its index, and whether it exists.
fn input_position<'a>(place: E<'a>, size: E<'a>, input_dilation: Option<E<'a>>) -> (E<'a>, E<'a>) {
    match input_dilation {
        None => (place, place.ge(0).and(place.lt(size))),
        Some(d) => {
            let p = place.max(0);
            let q = p.idiv(d);
            (q, place.ge(0).and(p.imod(d).equals(0)).and(q.lt(size)))
        }
    }
}

fn direct(p: &Problem, form: KernelVariant, mut args: Args, caps: &Caps) -> Result<Lowered, Declined> {
    let KernelVariant { channels, run, items: wg } = form;
    let (dtype, ix, spread) = (p.dtype, p.ix, p.is_input_dilated());
    let acc_ty = Ty::of(dtype);

    let b = Builder::with_index("conv_direct", [wg, 1, 1], ix);
    let (x, w, y) = (b.input(dtype), b.input(dtype), b.output(dtype));
    let (n, groups, og, cg) = (b.size("n"), b.size("groups"), b.size("og"), b.size("cg"));
    let [ys, ks, is, ss, ds, ls] = ["y", "k", "i", "s", "d", "l"].map(|n| sizes(&b, n, 3));
    let spread_by = if spread { sizes(&b, "e", 3) } else { vec![] };
    let acc = b.private(acc_ty, channels * run);
    let at = b.linear_id();
    let blocks = b.let_(og.div_ceil(channels));
    let runs = b.let_(ys[2].div_ceil(run));
    b.if_(at.lt(n * groups * blocks * ys[0] * ys[1] * runs), || {
        let c = unravel(&b, at, &[n, groups, blocks, ys[0], ys[1], runs]);
        let (image, group, oz, oy) = (c[0], c[1], c[3], c[4]);
        let (o0, ox0) = (b.let_(c[2] * channels), b.let_(c[5] * run));
        // Channels past the end recompute the last channel; their stores are skipped.
        let taps = b.let_(ks[0] * ks[1] * ks[2]);
        let rows: Vec<E<'_>> =
            (0..channels).map(|r| b.let_((group * og + (o0 + r).min(og - 1)) * cg * taps)).collect();
        b.for_(0, channels * run, 1, |q| acc.store(q, 0));
        b.for_(0, cg, 1, |ic| {
            let plane = b.let_((image * groups + group) * cg + ic);
            b.for_(0, ks[0], 1, |kz| {
                let dil = |a: usize| spread_by.get(a).copied();
                let (z, in_z) = input_position(oz * ss[0] + kz * ds[0] - ls[0], is[0], dil(0));
                b.for_(0, ks[1], 1, |ky| {
                    let (yy, in_y) = input_position(oy * ss[1] + ky * ds[1] - ls[1], is[1], dil(1));
                    b.if_(in_z.and(in_y), || {
                        let line = b.let_(((plane * is[0] + z) * is[1] + yy) * is[2]);
                        let tap = b.let_(((ic * ks[0] + kz) * ks[1] + ky) * ks[2]);
                        b.for_(0, ks[2], 1, |kx| {
                            let f: Vec<E<'_>> = rows.iter().map(|r| b.load(w, *r + tap + kx)).collect();
                            let first = b.let_(ox0 * ss[2] + kx * ds[2] - ls[2]);
                            let add = |s: E<'_>, v: E<'_>| {
                                for (r, f) in f.iter().enumerate() {
                                    let at = s + r as u32 * run;
                                    acc.store(at, f.mul_add(v, acc.load(at)));
                                }
                            };
                            let guarded = || {
                                b.for_(0, run, 1, |s| {
                                    let (q, inside) = input_position(first + s * ss[2], is[2], dil(2));
                                    add(s, b.load_if(x, line + q, inside));
                                })
                            };
                            if run == 1 || spread {
                                return guarded();
                            }
                            // If the stride is 1, a run that lies inside the input is read without checks.
                            let inside = first.ge(0).and((first + ss[2] * (run - 1)).lt(is[2]));
                            let from = b.let_(line + first);
                            b.if_else(
                                inside.and(ss[2].equals(1)),
                                || b.for_(0, run, 1, |s| add(s, b.load(x, from + s))),
                                guarded,
                            );
                        });
                    });
                });
            });
        });
        let line = |r: u32| ((((image * groups + group) * og + o0 + r) * ys[0] + oz) * ys[1] + oy) * ys[2];
        for r in 0..channels {
            b.if_((o0 + r).lt(og), || {
                let to = b.let_(line(r) + ox0);
                b.for_(0, run, 1, |s| {
                    b.if_((ox0 + s).lt(ys[2]), || b.store(y, to + s, acc.load(s + r * run)));
                });
            });
        }
    });
    args.int("n", p.n as i64).int("groups", p.groups as i64);
    args.int("og", p.og as i64).int("cg", p.cg as i64);
    args.ints("y", p.y.map(|v| v as i64)).ints("k", p.k.map(|v| v as i64));
    args.ints("i", p.i.map(|v| v as i64)).ints("s", p.stride.map(|v| v as i64));
    args.ints("d", p.dilation.map(|v| v as i64)).ints("l", p.lo);
    if spread {
        args.ints("e", p.input_dilation.map(|v| v as i64));
    }
    let total =
        p.n * p.groups * p.og.div_ceil(channels as usize) * p.y[0] * p.y[1] * p.y[2].div_ceil(run as usize);
    single(b, &args, total.div_ceil(wg as usize), caps)
}
