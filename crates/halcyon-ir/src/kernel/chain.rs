//! The kernels of fused chains: element-wise code over strided views, with an optional reduction at the end.

use super::access::{Template, index_type, reduction, typed};
use super::tune::{Choices, Tolerance, Variant, class, digest_chain};
use super::{Buf, Builder, E, Kernel, Launch, Local, Ty, Var};
use crate::dtype::{Class, DType, Scalar};
use crate::error::{Error, Result};
use crate::fused::{Fused, InstrKind, Out, Param};
use crate::layout::View;
use crate::ops::element_wise::ScalarOp;
use crate::target::{Caps, Declined};

/// Number of elements that a work-item reduces before it combines the partial result with its total, if it
/// reduces all elements of a result. Partial sums make rounding errors grow more slowly with the number of
/// elements.
const RUN: i64 = 64;

/// How results are assigned to work-items.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Form {
    /// One work-item per result; the number is the workgroup size.
    Item(u32),
    /// `each` consecutive results per work-item, `items` work-items per workgroup.
    Vector { items: u32, each: u32 },
    /// One workgroup per result. The number is its size, a power of two; its work-items share the reduction.
    Group(u32),
}

impl Form {
    fn variant(self) -> Variant {
        match self {
            Form::Item(n) => Variant::new("item", &[("items", n)]),
            Form::Group(n) => Variant::new("group", &[("items", n)]),
            Form::Vector { items, each } => Variant::new("vector", &[("items", items), ("each", each)]),
        }
    }

    fn of(v: &Variant) -> Result<Form, Declined> {
        match &*v.kernel {
            "item" => Ok(Form::Item(v.number("items")?)),
            "group" => Ok(Form::Group(v.number("items")?)),
            "vector" => Ok(Form::Vector { items: v.number("items")?, each: v.number("each")? }),
            _ => Err(v.unknown("chain")),
        }
    }

    fn items(self) -> u32 {
        match self {
            Form::Item(items) | Form::Group(items) | Form::Vector { items, .. } => items,
        }
    }

    /// The form that is used without tuning. Without a reduction, a work-item computes several neighbours if
    /// possible. With a reduction, there is one work-item per result if there are many results or little to
    /// reduce, and one workgroup per result otherwise. If the input can be read in runs (several contiguous
    /// elements at a time), many results also get one workgroup each.
    fn default(f: &Fused, caps: &Caps) -> Form {
        let each = neighbours(f, caps);
        if let Some(each) = each.filter(|_| f.reduced == 0) {
            return Form::Vector { items: 256.min(caps.max_workgroup), each };
        }
        let outer: usize = f.outer().iter().product();
        let inner: usize = f.inner().iter().product();
        // The reads must occupy at least 32 work-items.
        let runs = each.map(|e| inner / e as usize).filter(|n| *n >= 32 && caps.max_workgroup >= 128);
        let many = outer >= 1 << 16 && runs.is_none();
        let alone = f.reduced == 0 || inner <= 32 || (caps.is_cpu && outer >= 64) || many;
        match runs {
            _ if alone => Form::Item(256.min(caps.max_workgroup)),
            Some(n) => Form::Group(n.min(128).next_power_of_two() as u32),
            // Short rows: a work-item reads several elements of a row at a time.
            None if each.is_some_and(|e| inner / e as usize <= 32) => Form::Group(32.min(caps.max_workgroup)),
            None => Form::Group(128),
        }
    }
}

/// How a work-item loads several neighbours along the last axis.
#[derive(Clone, Copy, PartialEq)]
enum Reach {
    /// With loads of words or vectors, because the neighbours are contiguous.
    Run,
    /// With one load, because all neighbours are the same element.
    Same,
    /// With one load each.
    Each,
}

/// Whether `each` neighbours along the last axis are contiguous and start at a multiple of `each`, without a
/// mask and in a type of at most 4 bytes.
fn runs(v: &View, dtype: DType, each: u32) -> bool {
    let whole = |n: isize| n % each as isize == 0;
    let Some((last, others)) = v.strides.split_last() else { return false };
    let placed = others.iter().zip(&v.shape).all(|(s, n)| *n == 1 || whole(*s));
    *last == 1 && v.mask.is_none() && dtype.size() <= 4 && whole(v.offset) && placed
}

fn reach(v: &View, dtype: DType, each: u32) -> Reach {
    match v.strides.last() {
        Some(1) if runs(v, dtype, each) => Reach::Run,
        Some(0) if v.mask.is_none() => Reach::Same,
        _ => Reach::Each,
    }
}

/// How many neighbours along the last axis a work-item processes at a time on a GPU; `None` if it processes
/// single elements. The number is the largest of 16, 8 and 4 that divides the last axis and for which three
/// conditions hold. The neighbours fill at most 16 bytes in the narrowest type that is read or written in
/// runs. The code does not become too long (with 4 it never does). All outputs are written in runs; in a
/// reduction, at least one load reads in runs instead.
fn neighbours(f: &Fused, caps: &Caps) -> Option<u32> {
    if caps.is_cpu {
        return None;
    }
    let last = *f.space.last()?;
    let in_runs = |each: u32| f.loads.iter().filter(move |l| reach(&l.view, l.dtype, each) == Reach::Run);
    let written = f.outs.iter().filter(|_| f.reduced == 0);
    let sizes = in_runs(1).map(|l| l.dtype.size()).chain(written.clone().map(|o| o.dtype.size()));
    let narrowest = sizes.min()?;
    [16, 8, 4].into_iter().find(|each| {
        *each as usize * narrowest <= 16
            && (*each as usize * f.body.len() <= 256 || *each == 4)
            && last % *each as usize == 0
            && written.clone().all(|o| runs(&o.view, o.dtype, *each))
            && (f.reduced == 0 || in_runs(*each).next().is_some())
    })
}

fn index(f: &Fused) -> Ty {
    let views = f.loads.iter().map(|l| &l.view).chain(f.outs.iter().map(|o| &o.view));
    index_type(views.chain([&View::dense(&f.space)]))
}

/// The variants of a fused chain's kernel that the device can run.
pub fn fused_choices(f: &Fused, caps: &Caps) -> Choices {
    let (outer, inner) = (f.outer().iter().product(), f.inner().iter().product());
    let each = neighbours(f, caps);
    let mut all: Vec<Form> = vec![];
    if let Some(each) = each.filter(|_| f.reduced == 0) {
        all.extend([64, 128, 256, 512].map(|items| Form::Vector { items, each }));
    }
    all.extend([16, 32, 64, 128, 256, 512].map(Form::Item));
    if f.reduced > 0 {
        all.extend([32, 64, 128, 256].map(Form::Group));
    }
    // Workgroup memory must hold the widest accumulator of each output.
    let fits = |n: u32| n as usize * f.outs.len() * 8 <= caps.workgroup_memory as usize;
    let legal = all.into_iter().filter(|c| c.items() <= caps.max_workgroup);
    let legal = legal.filter(|c| !matches!(c, Form::Group(_)) || fits(c.items())).map(Form::variant);
    let key = format!(
        "chain {:032x} {} n{} r{}{}",
        digest_chain(f),
        index(f).name(),
        class(outer),
        if f.reduced > 0 { class(inner) } else { 0 },
        each.map_or(String::new(), |e| format!(" v{e}"))
    );
    Choices::new(key, Form::default(f, caps).variant(), legal, Tolerance::Sums(inner))
}

/// Like [`lower_fused`], for one of the variants in [`fused_choices`].
///
/// # Errors
/// The errors of [`lower_fused`]. [`Error::Unsupported`] if `v` is not one of these variants.
pub fn lower_fused_as(f: &Fused, caps: &Caps, v: &Variant) -> Result<(Kernel, Launch)> {
    let form = Form::of(v).ok().filter(|_| fused_choices(f, caps).has(v));
    let form = form.ok_or_else(|| {
        Error::unsupported(
            format!("a fused chain as \"{v}\""),
            "Choose one of the variants that `fused_choices` lists",
        )
    })?;
    build(f, caps, form)
}

/// One kernel for a fused chain. Its buffers are the sources (`Load::input`) in order, then the outputs in
/// order.
///
/// The kernel's text depends on the variant, the ranks, the types (also that of indexes), the body, which
/// strides are 0, whether the innermost stride is 1, and which axes are masked. Sizes, strides, offsets, mask
/// bounds and literals are parameters. Kernels with the same [`Kernel::key`] share a program.
///
/// # Errors
/// The errors of the verifier. [`Error::Unsupported`] if the device does not allow the size of the workgroup,
/// and [`Error::Internal`] for a malformed chain.
pub fn lower_fused(f: &Fused, caps: &Caps) -> Result<(Kernel, Launch)> {
    build(f, caps, Form::default(f, caps))
}

fn build(f: &Fused, caps: &Caps, form: Form) -> Result<(Kernel, Launch)> {
    let ix = index(f);
    let outer: usize = f.outer().iter().product();
    let (group, alone) = (form.items(), !matches!(form, Form::Group(_)));
    let each = match form {
        Form::Vector { each, .. } => each,
        Form::Group(_) => neighbours(f, caps).unwrap_or(1),
        Form::Item(_) => 1,
    };
    let name = match (f.reduced > 0, alone) {
        (false, _) if each > 1 => "chain_vector",
        (false, _) => "chain",
        (true, true) => "chain_reduce",
        (true, false) if each > 1 => "chain_reduce_vector",
        (true, false) => "chain_reduce_group",
    };
    let t = Template::with_index(name, group, ix);
    if group > caps.max_workgroup {
        return Err(Error::unsupported("a workgroup of this size", "Choose another variant or device"));
    }
    if f.reduced == 0 {
        t.b.may_alias();
    }
    let w = Chain::declare(&t, f, each)?;
    let b = &t.b;
    let groups = if alone {
        let i = b.linear_id();
        b.if_(i.lt(w.count), || {
            let idx = t.split(b.let_(i), &w.outer);
            if each > 1 {
                match w.vector(b, idx, each) {
                    Ok((first, results)) => w.write_runs(b, &first, &results),
                    Err(e) => w.fail(e),
                }
                return;
            }
            if f.reduced == 0 {
                let v = w.body(b, &idx, &[]);
                match v {
                    Ok(v) => {
                        w.write(b, &idx, &f.outs.iter().map(|o| v[o.value as usize]).collect::<Vec<_>>())
                    }
                    Err(e) => w.fail(e),
                }
                return;
            }
            let total = w.accumulators(b);
            b.for_(0, w.reduced, RUN, |start| {
                let part = w.accumulators(b);
                b.for_(start, (start + RUN).min(w.reduced), 1, |r| w.step(&t, &idx, r, &part));
                w.combine(b, &total, &part.iter().map(|p| p.get()).collect::<Vec<_>>());
            });
            w.write(b, &idx, &total.iter().map(|v| v.get()).collect::<Vec<_>>());
        });
        (outer as u64 / each as u64).div_ceil(group as u64)
    } else {
        let row = b.let_(b.linear_group());
        let todo = t.work(w.count, w.reduced);
        let idx = t.split(row, &w.outer);
        let total = w.accumulators(b);
        b.for_(b.local_id(0), todo, group, |r| w.steps(&t, &idx, r, each, &total));
        let mut scratch: Vec<(Ty, Local<'_>)> = vec![];
        let sums: Vec<E<'_>> = total
            .iter()
            .zip(&f.outs)
            .map(|(v, o)| {
                let v = v.get();
                let l = match scratch.iter().find(|(ty, _)| *ty == v.ty()) {
                    Some((_, l)) => *l,
                    None => {
                        let l = b.local(v.ty(), group);
                        scratch.push((v.ty(), l));
                        l
                    }
                };
                b.group_reduce(o.reduce.map_or(super::Reduce::Add, reduction), v, l)
            })
            .collect();
        b.if_(b.local_id(0).equals(0).and(row.lt(w.count)), || w.write(b, &idx, &sums));

        outer as u64
    };
    let error = w.error.take();
    drop(w);
    match error {
        Some(e) => Err(e),
        None => t.finish(groups, caps.max_groups),
    }
}

/// Like [`lower_fused`], for a chain over one axis. Each operand must be dense or have the same element at
/// all points. Chains that differ only in the length of the axis have the same kernel: a work-item processes
/// several neighbours, and each of the points that remain has its own work-item. `None` for other chains, and
/// for chains with a dense operand or a result of 8-byte elements.
///
/// # Errors
/// The errors of [`lower_fused`].
pub(crate) fn lower_any_length(f: &Fused, caps: &Caps) -> Result<Option<(Kernel, Launch)>> {
    let [n] = f.space[..] else { return Ok(None) };
    let plain = |v: &View| v.mask.is_none() && (v.strides[0] == 0 || v.strides[0] == 1 && v.offset == 0);
    let whole = |o: &Out| o.reduce.is_none() && o.view.strides[0] == 1;
    let views = || f.loads.iter().map(|l| &l.view).chain(f.outs.iter().map(|o| &o.view));
    if f.reduced > 0 || !views().all(plain) || !f.outs.iter().all(whole) {
        return Ok(None);
    }
    let dense = f.loads.iter().filter(|l| l.view.strides[0] == 1).map(|l| l.dtype.size());
    let sizes: Vec<usize> = dense.chain(f.outs.iter().map(|o| o.dtype.size())).collect();
    let narrowest = sizes.iter().copied().min().unwrap_or(1);
    let fits =
        |each: &u32| *each as usize * narrowest <= 16 && (*each as usize * f.body.len() <= 256 || *each == 4);
    // A run has elements of at most 4 bytes.
    let runs = sizes.iter().all(|s| *s <= 4);
    let Some(each) = [16, 8, 4].into_iter().filter(|_| runs).find(fits) else { return Ok(None) };
    let items = 256.min(caps.max_workgroup);
    let t = Template::with_index("chain_any_length", items, index(f));
    t.b.may_alias();
    let w = Chain::declare(&t, f, each)?;
    let all = t.size("all", n);
    let b = &t.b;
    let i = b.let_(b.linear_id());
    b.if_(i.lt(w.count), || match w.vector(b, vec![i], each) {
        Ok((first, results)) => w.write_runs(b, &first, &results),
        Err(e) => w.fail(e),
    });
    let rest = b.let_(i - w.count + w.count * each);
    b.if_(i.ge(w.count).and(rest.lt(all)), || match w.body(b, &[rest], &[]) {
        Ok(v) => w.write(b, &[rest], &f.outs.iter().map(|o| v[o.value as usize]).collect::<Vec<_>>()),
        Err(e) => w.fail(e),
    });
    let error = w.error.take();
    drop(w);
    if let Some(e) = error {
        return Err(e);
    }
    let each = each as usize;
    let count = n / each + n % each;
    t.finish((count as u64).div_ceil(items as u64).max(1), caps.max_groups).map(Some)
}

/// The index in [`Fused::params`] of parameter `k` of a kernel made by [`lower_fused`].
pub fn fused_param(kernel: &Kernel, k: usize) -> Option<usize> {
    kernel.params.get(k)?.name.strip_prefix('a')?.parse().ok()
}

struct Source<'a> {
    buf: Buf,
    offset: E<'a>,
    strides: Vec<Option<E<'a>>>,
    /// Axis and bounds of each masked axis.
    mask: Vec<(usize, E<'a>, E<'a>)>,
}

struct Chain<'a> {
    f: &'a Fused,
    loads: Vec<Source<'a>>,
    outs: Vec<Source<'a>>,
    params: Vec<E<'a>>,
    /// Number of points outside the reduction (`count`) and inside it (`reduced`).
    count: E<'a>,
    reduced: E<'a>,
    outer: Vec<E<'a>>,
    inner: Vec<E<'a>>,
    error: std::cell::Cell<Option<Error>>,
}

/// A point, and for each output the values at the point and its neighbours.
type Neighbours<'a> = (Vec<E<'a>>, Vec<Vec<E<'a>>>);

impl<'a> Chain<'a> {
    /// Declares the kernel's buffers and parameters. If `each` is above 1, a work-item processes that many
    /// neighbours along the last axis at a time, and the parameters count groups of `each` neighbours.
    fn declare(t: &'a Template, f: &'a Fused, each: u32) -> Result<Chain<'a>> {
        let b = &t.b;
        let inputs = f.loads.iter().map(|l| l.input + 1).max().unwrap_or(0);
        let mut bufs = vec![];
        for i in 0..inputs {
            let mut types = f.loads.iter().filter(|l| l.input == i).map(|l| l.dtype);
            let d = types.next().unwrap_or(DType::U8);
            if types.any(|t| t != d) {
                return Err(Error::internal("a fused kernel reads one buffer as two types"));
            }
            bufs.push(b.raw_buffer(d, false));
        }
        let outs: Vec<Buf> = f.outs.iter().map(|o| b.raw_buffer(o.dtype, true)).collect();
        let [by_count, by_reduced] = if f.reduced == 0 { [each as usize, 1] } else { [1, each as usize] };
        let count = t.size("n", f.outer().iter().product::<usize>() / by_count);
        let reduced = t.size("r", f.inner().iter().product::<usize>() / by_reduced);
        let border = f.space.len() - f.reduced;
        // Splitting an index uses neither the size of the first outer axis nor the size of the first inner
        // axis. The numbers of outer and inner points take their places.
        let dims: Vec<E<'a>> = (0..f.space.len())
            .map(|k| {
                if k == 0 {
                    count
                } else if k == border {
                    reduced
                } else {
                    let by = if k + 1 == f.space.len() { each as usize } else { 1 };
                    t.size(&format!("d{k}"), f.space[k] / by)
                }
            })
            .collect();
        let mut params = vec![];
        for (i, (d, v)) in f.params.iter().enumerate() {
            let (name, ty) = (format!("a{i}"), Ty::of(*d));
            let value = match v {
                Param::Literal(s) => s.cast(*d),
                // The plan sets the value at submission.
                Param::Arg(_) => Scalar::I(0),
            };
            params.push(if ty == Ty::Bool {
                t.value(&name, Scalar::U(value.as_bool() as u64));
                b.param(&name, Ty::U32).differs(0u32)
            } else {
                t.value(&name, value.cast(ty.dtype()));
                b.param(&name, ty)
            });
        }
        let loads = f.loads.iter().enumerate();
        let loads =
            loads.map(|(i, l)| source(t, &format!("l{i}"), bufs[l.input as usize], &l.view)).collect();
        let outs = f.outs.iter().zip(outs).enumerate();
        let outs = outs.map(|(i, (o, buf))| source(t, &format!("w{i}"), buf, &o.view)).collect();
        let (outer, inner) = (dims[..border].to_vec(), dims[border..].to_vec());
        Ok(Chain { f, loads, outs, params, count, reduced, outer, inner, error: Default::default() })
    }

    fn fail(&self, e: Error) {
        let old = self.error.take();
        self.error.set(Some(old.unwrap_or(e)));
    }

    /// Returns the index of the first of `each` neighbours and the results of all neighbours. On entry `idx`
    /// counts groups of neighbours along the last axis. Loads use runs where possible.
    fn vector(&self, b: &'a Builder, mut idx: Vec<E<'a>>, each: u32) -> Result<Neighbours<'a>> {
        let Some(last) = idx.len().checked_sub(1) else {
            return Err(Error::internal("a scalar has no neighbours"));
        };
        idx[last] = b.let_(idx[last] * each);
        let first = idx.clone();
        let loaded: Vec<Vec<E<'a>>> = self
            .f
            .loads
            .iter()
            .enumerate()
            .map(|(i, l)| match reach(&l.view, l.dtype, each) {
                Reach::Run => b.load_run(self.loads[i].buf, self.loads[i].at(&first), each),
                Reach::Same => vec![self.load(b, i, &first); each as usize],
                Reach::Each => vec![],
            })
            .collect();
        let mut results = vec![vec![]; self.f.outs.len()];
        for e in 0..each as usize {
            idx[last] = first[last] + e;
            let given: Vec<Option<E<'a>>> = loaded.iter().map(|l| l.get(e).copied()).collect();
            let v = self.body(b, &idx, &given)?;
            for (r, o) in results.iter_mut().zip(&self.f.outs) {
                r.push(v[o.value as usize]);
            }
        }
        Ok((first, results))
    }

    fn write_runs(&self, b: &'a Builder, first: &[E<'a>], results: &[Vec<E<'a>>]) {
        for (s, r) in self.outs.iter().zip(results) {
            b.store_run(s.buf, s.at(first), r);
        }
    }

    /// Values of all instructions at a point. `given` holds the values of loads that were already done.
    fn body(&self, b: &'a Builder, idx: &[E<'a>], given: &[Option<E<'a>>]) -> Result<Vec<E<'a>>> {
        let f = self.f;
        let mut v: Vec<E<'a>> = Vec::with_capacity(f.body.len());
        for i in &f.body {
            let arg = |k: usize| v[i.args[k] as usize];
            let from = || f.body[i.args[0] as usize].dtype;
            let e = match i.kind {
                InstrKind::Load(l) => match given.get(l as usize) {
                    Some(Some(v)) => *v,
                    _ => self.load(b, l as usize, idx),
                },
                InstrKind::Iota(axis) => idx[axis as usize].cast(i.dtype),
                InstrKind::Param(p) => self.params[p as usize],
                InstrKind::Op(op) => {
                    let x: Vec<E<'a>> = (0..i.args.len()).map(arg).collect();
                    let data = f.body[i.args[if op == ScalarOp::Select { 1 } else { 0 }] as usize].dtype;
                    typed(b, op, data, &x)
                }
                InstrKind::Cast if from() == i.dtype && !i.dtype.widens() => arg(0),
                InstrKind::Cast => arg(0).cast(i.dtype),
                InstrKind::Bitcast => bitcast(from(), i.dtype, arg(0))?,
            };
            v.push(e);
        }
        Ok(v)
    }

    fn load(&self, b: &'a Builder, l: usize, idx: &[E<'a>]) -> E<'a> {
        let s = &self.loads[l];
        let at = s.at(idx);
        let inside =
            s.mask.iter().map(|(k, lo, hi)| idx[*k].ge(*lo).and(idx[*k].lt(*hi))).reduce(|x, y| x.and(y));
        match inside {
            None => b.load(s.buf, at),
            Some(g) => {
                let v = b.load_if(s.buf, at, g);
                match self.f.loads[l].fill {
                    Some(p) => g.select(v, self.params[p as usize]),
                    None => v,
                }
            }
        }
    }

    fn write(&self, b: &'a Builder, idx: &[E<'a>], v: &[E<'a>]) {
        for (s, v) in self.outs.iter().zip(v) {
            b.store(s.buf, s.at(idx), *v);
        }
    }

    fn accumulators(&self, b: &'a Builder) -> Vec<Var<'a>> {
        let outs = self.f.outs.iter();
        outs.map(|o| {
            let d = self.f.body[o.value as usize].dtype.compute();
            b.var_of(
                Ty::of(d),
                o.reduce.map_or(Scalar::I(0), |k| k.identity(self.f.body[o.value as usize].dtype)),
            )
        })
        .collect()
    }

    fn combine(&self, b: &'a Builder, acc: &[Var<'a>], v: &[E<'a>]) {
        for ((o, a), v) in self.f.outs.iter().zip(acc).zip(v) {
            let d = self.f.body[o.value as usize].dtype.compute();
            if let Some(k) = o.reduce {
                a.set(typed(b, k.op(d), d, &[a.get(), *v]));
            }
        }
    }

    /// Accumulates `each` neighbours. `r` is their linear reduced index, which counts groups of neighbours.
    fn steps(&self, t: &'a Template, idx: &[E<'a>], r: E<'a>, each: u32, acc: &[Var<'a>]) {
        if each == 1 {
            return self.step(t, idx, r, acc);
        }
        let mut full = idx.to_vec();
        full.extend(t.split(r, &self.inner));
        match self.vector(&t.b, full, each) {
            Ok((_, results)) => {
                for e in 0..each as usize {
                    self.combine(&t.b, acc, &results.iter().map(|r| r[e]).collect::<Vec<_>>());
                }
            }
            Err(e) => self.fail(e),
        }
    }

    /// Accumulates the point with outer index `idx` and linear reduced index `r`.
    fn step(&self, t: &'a Template, idx: &[E<'a>], r: E<'a>, acc: &[Var<'a>]) {
        let mut full = idx.to_vec();
        full.extend(t.split(r, &self.inner));
        match self.body(&t.b, &full, &[]) {
            Ok(v) => {
                self.combine(&t.b, acc, &self.f.outs.iter().map(|o| v[o.value as usize]).collect::<Vec<_>>())
            }
            Err(e) => self.fail(e),
        }
    }
}

impl<'a> Source<'a> {
    fn at(&self, idx: &[E<'a>]) -> E<'a> {
        let terms = idx.iter().zip(&self.strides).filter_map(|(i, s)| s.map(|s| *i * s));
        terms.fold(self.offset, |a, t| a + t)
    }
}

fn source<'a>(t: &'a Template, name: &str, buf: Buf, v: &View) -> Source<'a> {
    let last = v.rank().wrapping_sub(1);
    let offset = t.size(&format!("{name}o"), v.offset as i64);
    let strides = v.strides.iter().enumerate().map(|(k, &s)| match s {
        0 => None,
        1 if k == last => Some(t.b.index(1)),
        s => Some(t.size(&format!("{name}s{k}"), s as i64)),
    });
    let strides = strides.collect();
    let mask = v.mask.iter().flatten().enumerate().filter(|(k, m)| **m != (0, v.shape[*k]));
    let mask =
        mask.map(|(k, m)| (k, t.size(&format!("{name}m{k}"), m.0), t.size(&format!("{name}h{k}"), m.1)));
    let mask = mask.collect();
    Source { buf, offset, strides, mask }
}

/// Converts an f32 that holds an f16 value to the bits of the f16. Every NaN becomes the quiet NaN.
fn f16_bits(v: E<'_>) -> E<'_> {
    let bits = v.bitcast(Ty::U32);
    let (sign, rest) = (bits.shr(16u32).and(0x8000u32), bits.and(0x7FFF_FFFFu32));
    let normal = (rest - 0x3800_0000u32).shr(13u32);
    // Below 2^-14 the significand counts multiples of 2^-24.
    let small = (rest.bitcast(Ty::F32) * 16_777_216.0).to(Ty::U32);
    let special = rest.gt(0x7F80_0000u32).to(Ty::U32).shl(9u32).or(0x7C00u32);
    let finite = rest.lt(0x3880_0000u32).select(small, normal);
    rest.lt(0x7F80_0000u32).select(finite, special).or(sign)
}

/// Converts the bits of an f16 (in a u32) to f32.
fn of_f16_bits(h: E<'_>) -> E<'_> {
    let (sign, rest) = (h.and(0x8000u32).shl(16u32), h.and(0x7FFFu32));
    let normal = rest.shl(13u32) + 0x3800_0000u32;
    let special = rest.shl(13u32).or(0x7F80_0000u32);
    let small = (rest.to(Ty::F32) * (1.0 / 16_777_216.0)).bitcast(Ty::U32);
    let large = rest.lt(0x7C00u32).select(normal, special);
    rest.lt(0x400u32).select(small, large).or(sign).bitcast(Ty::F32)
}

fn bitcast(from: DType, to: DType, v: E<'_>) -> Result<E<'_>> {
    Ok(match (from, to) {
        (a, b) if a == b => v,
        (DType::BF16, DType::U16 | DType::I16) => v.bitcast(Ty::U32).shr(16u32).cast(to),
        (DType::U16 | DType::I16, DType::BF16) => v.cast(DType::U16).shl(16u32).bitcast(Ty::F32),
        (DType::F16, _) => bitcast(DType::U16, to, f16_bits(v))?,
        (_, DType::F16) => of_f16_bits(bitcast(from, DType::U16, v)?),
        (a, b) if a.bits() >= 32 => {
            let _ = a;
            v.bitcast(Ty::of(b))
        }
        (a, b) if a.class() == Class::Float || b.class() == Class::Float => {
            return Err(Error::internal(format!("bit cast from {a} to {b}")));
        }
        // Both are integers of the same width below 32 bits. A cast between them wraps, which keeps the bits.
        (_, b) => v.cast(b),
    })
}
