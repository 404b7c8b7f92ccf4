//! Gradients compared with central finite differences of the graph in f64.

use super::check::{Tally, has};
use crate::{Rng, one_in};
use halcyon::ir::graph::Graph;
use halcyon::ir::reference;
use halcyon::optable::case::{Case, Fill, OperandSpec, Row};
use halcyon::{Backend, BackendType, ConstData, DType, Error, Result, Tensor, value_and_grad};

/// Maximum number of elements of an operand whose derivative is checked; larger operands are sampled.
const SAMPLES: usize = 24;

/// The graph of `Σ y·w`, whose last input is `w`.
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

/// The derivative of the loss with respect to some elements of input `k`, as (element, value). Two step sizes
/// must agree: if not, the op switches between two values within the step, and there is no derivative to
/// compare with. Such elements are left out; it is an error if they are more than half.
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
        // Written so that NaN is kept, and compared.
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
) -> std::result::Result<(), String> {
    let float: Vec<usize> = want.iter().map(|w| w.0).collect();
    let got = gradients(b, c, inputs, &float).map_err(|e| e.to_string())?;
    let tol = if d == DType::F64 { 1e-6 } else { 2e-4 };
    for ((k, diffs), g) in want.iter().zip(got) {
        let g = g.to_data().map_err(|e| e.to_string())?;
        if g.dims != inputs[*k].dims || g.dtype != d {
            return Err(format!("the gradient of operand {k} is {g:?}"));
        }
        let v: Vec<f64> = g.to_vec();
        let top = diffs.iter().map(|d| d.1.abs()).fold(0.0, f64::max);
        for (i, w) in diffs {
            // Written so that NaN counts as wrong.
            let near = (v[*i] - w).abs() <= tol * (top + w.abs()) + tol * 1e-2;
            if !near {
                return Err(format!("operand {k} element {i}: {}, finite difference {w}", v[*i]));
            }
        }
    }
    Ok(())
}

/// On devices that build programs for each case, one gradient in this many is checked.
const SAMPLE: usize = 4;

/// Checks the gradients of every case with `Case::grad`, in f32 and f64: all on the CPU, on other devices a
/// sample, or all with `HALCYON_CASES=all` or `HALCYON_ROW`. `HALCYON_CASES=N` checks one in N on every
/// device.
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
                            if let Err(e) = check(b, c, d, &inputs, &want) {
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
