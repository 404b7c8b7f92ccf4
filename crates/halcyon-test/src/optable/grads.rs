//! Compares gradients with central finite differences of the graph in f64. The gradients are those of the
//! cases as they are, of cases whose operands are read through views or broadcast, of cases in checkpoints
//! and in mixed precision, and second gradients.

use super::check::{Tally, has};
use crate::{Rng, one_in};
use halcyon::ir::graph::{Graph, NodeId};
use halcyon::ir::{grad, reference};
use halcyon::optable::case::{Case, Fill, OperandSpec, Row};
use halcyon::{Backend, BackendType, ConstData, DType, Dim, Error, Result, Tensor, value_and_grad};
use std::sync::Arc;

/// The largest number of elements of one operand for which derivatives are checked. If an operand has more
/// elements, this many are drawn.
const SAMPLES: usize = 24;

/// The graph of `Σ y·w` for the result `y` of a case, with `w` as the last input; and the sizes of `w`.
fn loss(c: &Case, d: DType) -> Result<(Graph, Vec<usize>)> {
    let mut g = c.graph(d)?;
    let y = g.outputs()[0].node;
    let dims = g.shape(y).dims()?;
    let w = g.input("w", g.ty(y).clone());
    let p = g.mul(y, w)?;
    let axes: Vec<usize> = (0..dims.len()).collect();
    let s = g.sum(p, &axes, false)?;
    g.set_outputs(vec![]);
    g.output("loss", s);
    Ok((g, dims.to_vec()))
}

/// The derivative of the loss with respect to some elements of input `k`, as (element, value). The
/// differences for two step sizes must agree. If they do not, the op has a jump or a kink near this element,
/// and there is no derivative to compare with. Such elements are left out; if they are more than half, that
/// is an error.
fn differences(g: &Graph, at: &[ConstData], k: usize, rng: &mut Rng) -> Result<Vec<(usize, f64)>> {
    let n = at[k].numel();
    let picked: Vec<usize> =
        if n <= SAMPLES { (0..n).collect() } else { (0..SAMPLES).map(|_| rng.below(n)).collect() };
    let mut x = at.to_vec();
    let base: Vec<f64> = at[k].to_vec();
    let all = picked.len();
    let mut kept = vec![];
    for i in picked {
        let mut value = |v: f64| -> Result<f64> {
            let mut moved = base.clone();
            moved[i] = v;
            x[k] = ConstData::from_slice(&at[k].dims, &moved)?;
            Ok(reference::eval(g, &x, &[])?[0].get(0).map_or(f64::NAN, |s| s.as_f64()))
        };
        let h = 1e-5 * base[i].abs().max(0.1);
        let mut slope = |h: f64| Ok::<f64, Error>((value(base[i] + h)? - value(base[i] - h)?) / (2.0 * h));
        let (long, short) = (slope(h)?, slope(h / 4.0)?);
        // If a slope is NaN, `apart` is false, so the element is kept and compared.
        let apart = (long - short).abs() > 1e-5 * (1.0 + long.abs());
        if !apart {
            kept.push((i, long));
        }
    }
    match 2 * kept.len() >= all {
        true => Ok(kept),
        false => {
            Err(Error::internal(format!("{} of {all} differences depend on the step", all - kept.len())))
        }
    }
}

fn widen(c: &ConstData) -> Result<ConstData> {
    if c.dtype.is_float() { ConstData::from_slice(&c.dims, &c.to_vec::<f64>()) } else { Ok(c.clone()) }
}

fn gradients(b: &Backend, c: &Case, inputs: &[ConstData], float: &[usize]) -> Result<Vec<Tensor>> {
    let leaves: Vec<Tensor> = inputs.iter().map(|x| Tensor::from_data(b, x)).collect::<Result<_>>()?;
    let params: Vec<Tensor> = float.iter().map(|k| leaves[*k].requires_grad()).collect::<Result<_>>()?;
    let (_, grads) = value_and_grad(&params, |p| {
        let mut x: Vec<&Tensor> = leaves.iter().collect();
        for (p, k) in p.iter().zip(float) {
            x[*k] = p;
        }
        let (w, x) = x.split_last().expect("the weights are the last input");
        let y = Tensor::build(x, |g, ids| (c.build)(g, ids));
        Ok((&y * *w).sum(..))
    })?;
    halcyon::eval(&grads)?;
    Ok(grads)
}

fn check(
    b: &Backend,
    c: &Case,
    d: DType,
    inputs: &[ConstData],
    want: &[(usize, Vec<(usize, f64)>)],
    tolerance: Option<f64>,
) -> std::result::Result<(), String> {
    let float: Vec<usize> = want.iter().map(|w| w.0).collect();
    let got = gradients(b, c, inputs, &float).map_err(|e| e.to_string())?;
    compare(got, d, inputs, want, tolerance)
}

/// Compares gradients with finite differences.
fn compare(
    got: Vec<Tensor>,
    d: DType,
    inputs: &[ConstData],
    want: &[(usize, Vec<(usize, f64)>)],
    tolerance: Option<f64>,
) -> std::result::Result<(), String> {
    let tol = tolerance.unwrap_or(if d == DType::F64 { 1e-6 } else { 2e-4 });
    for ((k, diffs), g) in want.iter().zip(got) {
        let g = g.to_data().map_err(|e| e.to_string())?;
        if g.dims != inputs[*k].dims || g.dtype != d {
            return Err(format!("the gradient of operand {k} is {g:?}"));
        }
        let v: Vec<f64> = g.to_vec();
        // In mixed precision, terms are rounded before they are summed, and may cancel each other. So the
        // tolerance follows from all of the gradient and not only from the elements that are compared.
        let all = if tolerance.is_some() { &v[..] } else { &[] };
        let all = all.iter().filter(|v| v.is_finite());
        let top = diffs.iter().map(|d| &d.1).chain(all).map(|v| v.abs()).fold(0.0, f64::max);
        for (i, w) in diffs {
            // If a value is NaN, `near` is false, so it counts as wrong.
            let near = (v[*i] - w).abs() <= tol * (top + w.abs()) + tol * 1e-2;
            if !near {
                return Err(format!("operand {k} element {i}: {}, finite difference {w}", v[*i]));
            }
        }
    }
    Ok(())
}

/// How a case is changed before its gradient is checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Through {
    /// Each float operand is a permuted slice of a leaf.
    Views,
    /// Each float operand is broadcast along one axis.
    Broadcast,
    /// The op is in a checkpoint, so its gradient computes it again.
    Checkpoint,
}

/// The leaf from which [`view`] makes a float operand.
fn seen_through(o: &OperandSpec, how: Through) -> OperandSpec {
    let mut dims = o.dims.clone();
    match how {
        Through::Checkpoint => {}
        Through::Views => {
            dims.reverse();
            match dims.first_mut() {
                Some(n) => *n += 1,
                None => dims.push(2),
            }
        }
        Through::Broadcast => {
            // The first axis that is longer than 1 is broadcast, not the last one, because the gradient of a
            // norm over equal elements is not stable.
            if let Some(n) = dims.iter_mut().find(|n| **n > 1) {
                *n = 1;
            }
        }
    }
    OperandSpec { dims, ..o.clone() }
}

/// The operand of sizes `to`, from a leaf that [`seen_through`] made.
fn view(g: &mut Graph, x: NodeId, to: &[usize], how: Through) -> Result<NodeId> {
    match how {
        Through::Checkpoint => Ok(x),
        Through::Broadcast => g.expand(x, &to.into()),
        Through::Views => {
            let mut from: Vec<usize> = to.iter().rev().copied().collect();
            if from.is_empty() {
                from.push(1);
            }
            let start: Vec<Dim> = (0..from.len()).map(|k| Dim::from(usize::from(k == 0))).collect();
            let len: Vec<Dim> = from.iter().map(|n| Dim::from(*n)).collect();
            let part = g.slice(x, &start, &vec![1; from.len()], &len[..])?;
            let back: Vec<usize> = (0..to.len()).rev().collect();
            if to.is_empty() { g.reshape(part, to) } else { g.permute(part, &back) }
        }
    }
}

/// The case with its operands or its op changed.
fn changed(c: &Case, how: Through) -> Case {
    let float = |o: &OperandSpec| o.dtype.is_none_or(|d| d.is_float());
    let ins = c.ins.iter().map(|o| if float(o) { seen_through(o, how) } else { o.clone() }).collect();
    let (build, old) = (c.build.clone(), c.ins.clone());
    let build = move |g: &mut Graph, x: &[NodeId]| match how {
        Through::Checkpoint => g.checkpoint(x, |g, x| build(g, x)),
        _ => {
            let one = |g: &mut Graph, (x, o): (&NodeId, &OperandSpec)| match float(o) {
                true => view(g, *x, &o.dims, how),
                false => Ok(*x),
            };
            let x = x.iter().zip(&old).map(|pair| one(g, pair)).collect::<Result<Vec<_>>>()?;
            build(g, &x)
        }
    };
    Case { ins, build: Arc::new(build), label: format!("{}, {how:?}", c.label), ..c.clone() }
}

/// Whether a case is drawn: about one in 6 on the CPU and one in 24 on another device, one in N with
/// `HALCYON_CASES=N`, and every case with `HALCYON_ROW`.
fn drawn(b: &Backend, rng: &mut Rng) -> bool {
    let cpu = b.info().backend == BackendType::Cpu;
    let every = if std::env::var_os("HALCYON_ROW").is_some() { 1 } else { one_in(if cpu { 6 } else { 24 }) };
    rng.below(every) == 0
}

/// The values of the inputs; and for each checked input its number and some of its elements, each with its
/// derivative as a finite difference.
type Values = (Vec<ConstData>, Vec<(usize, Vec<(usize, f64)>)>);

/// The values of the loss's inputs, and the finite differences of the loss for the float operands among the
/// first `n`; `None` if there is no derivative to compare with.
fn prepared(g: &Graph, inputs: Vec<ConstData>, n: usize, rng: &mut Rng) -> Result<Option<Values>> {
    let wide: Vec<ConstData> = inputs.iter().map(widen).collect::<Result<_>>()?;
    let p = reference::promote(g)?;
    let mut want = vec![];
    for k in (0..n).filter(|k| inputs[*k].dtype.is_float()) {
        match differences(&p, &wide, k, rng) {
            Ok(d) => want.push((k, d)),
            // For example, a maximum of equal elements has no derivative.
            Err(Error::Internal(_)) => return Ok(None),
            Err(e) => return Err(e),
        }
    }
    Ok(Some((inputs, want)))
}

fn graded(rows: &[Row]) -> impl Iterator<Item = (&Row, &Case)> {
    let pick = std::env::var("HALCYON_ROW").unwrap_or_default();
    let rows = rows.iter().filter(move |r| r.name.contains(&pick));
    rows.flat_map(|r| r.cases.iter().filter(|c| c.grad).map(move |c| (r, c)))
}

/// Checks the gradients of a sample of the cases with `Case::grad` on each device. The cases are changed as
/// `how` says. Rows that do not take f32 are left out.
pub fn check_through(rows: &[Row], how: Through, backends: &[Backend], rng: &mut Rng) -> Tally {
    let mut t = Tally::default();
    for (row, c) in graded(rows).filter(|(r, _)| r.dtypes.contains(&DType::F32)) {
        let d = if rng.below(4) == 0 && row.dtypes.contains(&DType::F64) { DType::F64 } else { DType::F32 };
        let c = changed(c, how);
        let on: Vec<&Backend> =
            backends.iter().filter(|b| c.takes(d) && has(b, d) && drawn(b, rng)).collect();
        if on.is_empty() {
            continue;
        }
        let at = format!("gradient of {} {d} [{}]", row.name, c.label);
        let of = |rng: &mut Rng| {
            let (g, dims) = loss(&c, d)?;
            let mut inputs = c.inputs(d, rng)?;
            inputs.push(OperandSpec { dims, dtype: None, fill: Fill::Range(0.5, 2.0) }.data(d, rng)?);
            let n = inputs.len() - 1;
            prepared(&g, inputs, n, rng)
        };
        match of(rng) {
            Err(e) => t.failures.push(format!("{at}: reference: {e}")),
            Ok(None) => {}
            Ok(Some((inputs, want))) => {
                for b in on {
                    t.cases += 1;
                    if let Err(e) = check(b, &c, d, &inputs, &want, None) {
                        t.failures.push(format!("{at} {}: {e}", b.id()));
                    }
                }
            }
        }
    }
    t
}

/// Checks the gradients of products, convolutions and attention on backends in mixed precision: every case on
/// the CPU, and a sample on other devices. `tolerance` is relative to the largest derivative.
pub fn check_mixed(rows: &[Row], tolerance: f64, backends: &[Backend], rng: &mut Rng) -> Tally {
    let mut t = Tally::default();
    let d = DType::F32;
    for (row, c) in graded(rows).filter(|(r, c)| r.dtypes.contains(&d) && c.takes(d)) {
        let at = format!("gradient of {} in mixed precision [{}]", row.name, c.label);
        let of = |rng: &mut Rng| {
            let (g, dims) = loss(c, d)?;
            if !g.nodes().iter().any(|n| n.op.rated().is_some()) {
                return Ok(None);
            }
            let mut inputs = c.inputs(d, rng)?;
            inputs.push(OperandSpec { dims, dtype: None, fill: Fill::Range(0.5, 2.0) }.data(d, rng)?);
            let n = inputs.len() - 1;
            prepared(&g, inputs, n, rng)
        };
        match of(rng) {
            Err(e) => t.failures.push(format!("{at}: reference: {e}")),
            Ok(None) => {}
            Ok(Some((inputs, want))) => {
                for b in backends.iter().filter(|b| has(b, d)) {
                    if !drawn(b, rng) && b.info().backend != BackendType::Cpu {
                        continue;
                    }
                    t.cases += 1;
                    if let Err(e) = check(b, c, d, &inputs, &want, Some(tolerance)) {
                        t.failures.push(format!("{at} {}: {e}", b.id()));
                    }
                }
            }
        }
    }
    t
}

/// The graph of `Σ v·(d Σ y·w / d x)`, whose inputs are those of the loss, then one `v` for each float
/// operand; `None` if an op has no second derivative.
fn second_loss(c: &Case, d: DType, float: &[usize]) -> Result<Option<Graph>> {
    let (mut g, _) = loss(c, d)?;
    let root = g.outputs()[0].node;
    g.set_outputs(vec![]);
    let x: Vec<NodeId> = float.iter().map(|k| g.inputs()[*k].node).collect();
    let first = grad::gradients(&mut g, root, &x, None)?;
    let mut sum = g.full(d, halcyon::Shape::scalar(), 0.0);
    for (k, dx) in x.iter().zip(first) {
        let v = g.input("v", g.ty(*k).clone());
        if let Some(dx) = dx {
            let p = g.mul(dx, v)?;
            let axes: Vec<usize> = (0..g.shape(p).rank()).collect();
            let s = g.sum(p, &axes, false)?;
            sum = g.add(sum, s)?;
        }
    }
    g.output("loss", sum);
    // Differentiate once more, to find out whether every op has a second derivative.
    match grad::gradients(&mut g.clone(), sum, &x, None) {
        Ok(_) => Ok(Some(g)),
        Err(Error::Unsupported { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}

/// The gradients of `Σ v·(d Σ y·w / d x)` on a backend.
fn second(b: &Backend, c: &Case, inputs: &[ConstData], float: &[usize]) -> Result<Vec<Tensor>> {
    let leaves: Vec<Tensor> = inputs.iter().map(|x| Tensor::from_data(b, x)).collect::<Result<_>>()?;
    let params: Vec<Tensor> = float.iter().map(|k| leaves[*k].requires_grad()).collect::<Result<_>>()?;
    let n = c.ins.len();
    let (_, grads) = value_and_grad(&params, |p| {
        let (_, first) = value_and_grad(p, |p| {
            let mut x: Vec<&Tensor> = leaves[..n].iter().collect();
            p.iter().zip(float).for_each(|(p, k)| x[*k] = p);
            let y = Tensor::build(&x, |g, ids| (c.build)(g, ids));
            Ok((&y * &leaves[n]).sum(..))
        })?;
        let sums = first.iter().zip(&leaves[n + 1..]).map(|(g, v)| (g * v).sum(..));
        sums.reduce(|a, b| a + b).ok_or_else(|| Error::internal("no operand is a float"))
    })?;
    halcyon::eval(&grads)?;
    Ok(grads)
}

/// Checks second gradients, of a sample of the cases. Also returns how many of the drawn cases have none, or
/// no finite differences to compare with.
pub fn check_second(rows: &[Row], backends: &[Backend], rng: &mut Rng) -> (Tally, usize) {
    let (mut t, mut without) = (Tally::default(), 0);
    for (row, c) in graded(rows) {
        let d = match () {
            () if row.dtypes.contains(&DType::F64) && rng.below(2) == 0 => DType::F64,
            () => DType::F32,
        };
        let on: Vec<&Backend> =
            backends.iter().filter(|b| c.takes(d) && has(b, d) && drawn(b, rng)).collect();
        if on.is_empty() || !row.dtypes.contains(&d) {
            continue;
        }
        let at = format!("second gradient of {} {d} [{}]", row.name, c.label);
        let of = |rng: &mut Rng| -> Result<Option<(Values, Vec<usize>)>> {
            let mut inputs = c.inputs(d, rng)?;
            let n = inputs.len();
            let float: Vec<usize> = (0..n).filter(|k| inputs[*k].dtype.is_float()).collect();
            let Some(g) = second_loss(c, d, &float)? else { return Ok(None) };
            for i in &g.inputs()[n..] {
                let dims = g.shape(i.node).dims()?.to_vec();
                inputs.push(OperandSpec { dims, dtype: None, fill: Fill::Range(0.5, 2.0) }.data(d, rng)?);
            }
            Ok(prepared(&g, inputs, n, rng)?.map(|p| (p, float)))
        };
        match of(rng) {
            Err(e) => t.failures.push(format!("{at}: reference: {e}")),
            Ok(None) => without += 1,
            Ok(Some(((inputs, want), float))) => {
                for b in on {
                    t.cases += 1;
                    let got = second(b, c, &inputs, &float).map_err(|e| e.to_string());
                    if let Err(e) = got.and_then(|got| compare(got, d, &inputs, &want, None)) {
                        t.failures.push(format!("{at} {}: {e}", b.id()));
                    }
                }
            }
        }
    }
    (t, without)
}

/// On devices that build programs for each case, one gradient in this many is checked.
const SAMPLE: usize = 24;

/// Checks the gradients of the cases with `Case::grad`, in f32 and f64: every case on the CPU, and a sample
/// on other devices. `HALCYON_CASES=N` checks one case in N on every device. `HALCYON_CASES=all` and
/// `HALCYON_ROW` check every case on every device.
pub fn check_rows(rows: &[Row], backends: &[Backend], rng: &mut Rng) -> Tally {
    let pick = std::env::var("HALCYON_ROW").unwrap_or_default();
    let mut t = Tally::default();
    for row in rows.iter().filter(|r| r.name.contains(&pick)) {
        for d in [DType::F32, DType::F64].into_iter().filter(|d| row.dtypes.contains(d)) {
            for c in row.cases.iter().filter(|c| c.grad && c.takes(d)) {
                let at = format!("gradient of {} {d} [{}]", row.name, c.label);
                let prepared = loss(c, d).and_then(|(g, dims)| {
                    let mut inputs = c.inputs(d, rng)?;
                    inputs.push(OperandSpec { dims, dtype: None, fill: Fill::Range(0.5, 2.0) }.data(d, rng)?);
                    let wide: Vec<ConstData> = inputs.iter().map(widen).collect::<Result<_>>()?;
                    let p = reference::promote(&g)?;
                    let last = inputs.len() - 1;
                    let want = (0..last)
                        .filter(|k| inputs[*k].dtype.is_float())
                        .map(|k| Ok((k, differences(&p, &wide, k, rng)?)))
                        .collect::<Result<Vec<_>>>()?;
                    Ok((inputs, want))
                });
                match prepared {
                    Err(e) => t.failures.push(format!("{at}: reference: {e}")),
                    Ok((inputs, want)) => {
                        for b in backends.iter().filter(|b| has(b, d)) {
                            let cpu = b.device().info().backend == BackendType::Cpu;
                            let usual = if cpu { 1 } else { SAMPLE };
                            let every = if pick.is_empty() { one_in(usual) } else { 1 };
                            if rng.below(every) != 0 {
                                continue;
                            }
                            t.cases += 1;
                            if let Err(e) = check(b, c, d, &inputs, &want, None) {
                                t.failures.push(format!("{at} {}: {e}", b.id()));
                            }
                        }
                    }
                }
            }
        }
    }
    t
}
