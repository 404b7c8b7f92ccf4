//! `halcyon fit --train`: the memory that the training of a model takes, with and without recomputing
//! activations, and the largest batch that fits.

use crate::report::{size, table};
use halcyon::hal::Tag;
use halcyon::ir::grad::gradients;
use halcyon::ir::graph::NodeId;
use halcyon::ir::lower::{LowerOptions, lower};
use halcyon::ir::passes::rebuild::Rebuild;
use halcyon::ir::{Graph, Op};
use halcyon::{Backend, DType, Error, Fit, Result, Shape};
use serde_json::{Value, json};
use std::fmt::Write;

/// The numbers of parts into which the forward is divided. The report has the number that needs the least
/// memory.
const PARTS: [usize; 6] = [2, 4, 8, 16, 32, 64];
/// The largest batch that the search tries.
const MAX_BATCH: usize = 1 << 24;

/// The memory that one training step needs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TrainFit {
    pub(crate) parameters: u64,
    pub(crate) gradients: u64,
    /// Whether the scratch of the plan is smaller than all gradients together.
    pub(crate) gradients_share: bool,
    /// The two moments of Adam for each parameter.
    pub(crate) optimizer: u64,
    /// Scratch without gradients.
    pub(crate) activations: u64,
    /// The batch, the results and the constants.
    pub(crate) others: u64,
    /// The number of parts into which the forward is divided; 1 if nothing is computed twice.
    pub(crate) parts: usize,
}

impl TrainFit {
    pub(crate) fn total(&self) -> u64 {
        let all = [self.parameters, self.gradients, self.optimizer, self.activations, self.others];
        all.into_iter().fold(0, u64::saturating_add)
    }

    fn json(&self) -> Value {
        json!({
            "activations": self.activations, "others": self.others, "total": self.total(), "parts": self.parts,
        })
    }
}

/// The memory that a batch needs: without and with recomputing activations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    pub(crate) plain: TrainFit,
    pub(crate) recomputed: TrainFit,
}

/// The largest batch that fits; `None` if not even 1 fits.
pub(crate) type Largest = Option<usize>;

/// The result of `fit --train`.
pub(crate) struct Report {
    pub(crate) backend: String,
    pub(crate) count: u64,
    pub(crate) batch: Option<usize>,
    pub(crate) needs: Needs,
    pub(crate) free: Option<u64>,
    /// The largest batches without and with recomputing activations; `Err` gives the reason why they were not
    /// searched.
    pub(crate) largest: Result<[Largest; 2], String>,
}

/// A constant becomes a parameter if it is a float of a native dtype and has more than one element.
fn trained(op: &Op) -> bool {
    matches!(op, Op::Const(c) if c.dtype.is_float() && c.dtype.is_native() && c.numel() > 1)
}

/// Turns the parameters of the graph into additional inputs, and adds a scalar loss: the sum of the means of
/// the float outputs.
fn with_loss(g: &Graph) -> Result<(Graph, Vec<NodeId>, NodeId)> {
    let live = Rebuild::live(g);
    let mut r = Rebuild::new(g);
    let mut params = vec![];
    for id in g.ids().filter(|i| live[i.index()]) {
        let n = g.node(id);
        match trained(&n.op) {
            true => {
                r.new.span = n.span.clone();
                let p = r.new.input("", n.ty.clone());
                r.set(id, p);
                params.push(p);
            }
            false => {
                r.copy(id)?;
            }
        }
    }
    if params.is_empty() {
        let what = "training a model without parameters";
        return Err(Error::unsupported(
            what,
            "Its float initialisers with more than one element are trained",
        ));
    }
    let (mut new, _) = r.finish()?;
    let outputs: Vec<NodeId> = new.outputs().iter().map(|o| o.node).collect();
    let mut loss: Option<NodeId> = None;
    for y in outputs {
        if !new.dtype(y).is_float() {
            continue;
        }
        let wide = new.cast(y, DType::F32)?;
        let axes: Vec<usize> = (0..new.shape(wide).rank()).collect();
        let mean = new.mean(wide, &axes, false)?;
        loss = Some(match loss {
            Some(sum) => new.add(sum, mean)?,
            None => mean,
        });
    }
    let loss = loss.ok_or_else(|| {
        Error::unsupported("training a model without a float output", "Choose a model with one")
    })?;
    Ok((new, params, loss))
}

/// The training step of a graph. The forward is divided into `parts` parts. The outputs are the loss, and the
/// new parameters and moments of Adam. Also returns which inputs the step may overwrite.
fn step(forward: &Graph, params: &[NodeId], loss: NodeId, parts: usize) -> Result<(Graph, Vec<bool>)> {
    let mut g = forward.clone();
    g.set_outputs(vec![]);
    g.output("loss", loss);
    let (mut g, new) = match parts {
        1 => (g.clone(), g.ids().collect()),
        _ => g.checkpoint_ranges(&g.even_ranges(parts))?,
    };
    let own: Vec<NodeId> = params.iter().map(|p| new[p.index()]).collect();
    let loss = new[loss.index()];
    let inputs = g.inputs().len();
    let mut donated = vec![false; inputs];
    for p in &own {
        if let Op::Input(k) = g.node(*p).op {
            donated[k as usize] = true;
        }
    }
    let grads = gradients(&mut g, loss, &own, None)?;
    let rate = g.arg(DType::F32);
    let mut results = vec![];
    for (p, grad) in own.iter().zip(grads) {
        // Parameters that the loss does not depend on are not updated.
        let Some(grad) = grad else { continue };
        let ty = g.ty(*p).clone();
        let (m, v) = (g.input("m", ty.clone()), g.input("v", ty.clone()));
        donated.extend([true, true]);
        let blend = |g: &mut Graph, old: NodeId, new: NodeId, by: f64| -> Result<NodeId> {
            let (d, k) = (g.sub(new, old)?, g.lit(old, by));
            let d = g.mul(d, k)?;
            g.add(old, d)
        };
        let m = blend(&mut g, m, grad, 0.1)?;
        let square = g.mul(grad, grad)?;
        let v = blend(&mut g, v, square, 0.001)?;
        let root = g.sqrt(v)?;
        let eps = g.lit(root, 1e-8);
        let divisor = g.add(root, eps)?;
        let by = g.div(m, divisor)?;
        let rate = g.cast(rate, ty.dtype)?;
        let by = g.mul(by, rate)?;
        results.extend([g.sub(*p, by)?, m, v]);
    }
    for r in results {
        g.output("", r);
    }
    Ok((g, donated))
}

/// The memory that the training of a graph without symbols needs. Also returns the number of elements of all
/// parameters.
pub(crate) fn needs(b: &Backend, graph: &Graph, input_bytes: &[usize]) -> Result<(Needs, u64)> {
    let (forward, params, loss) = with_loss(graph)?;
    let bytes: Vec<usize> = params
        .iter()
        .map(|p| Ok(forward.dtype(*p).bytes(numel(forward.shape(*p))?)))
        .collect::<Result<_>>()?;
    let count = params.iter().map(|p| Ok(numel(forward.shape(*p))? as u64)).sum::<Result<u64>>()?;
    let d = &**b.device();
    let stored: u64 = bytes.iter().map(|n| d.footprint(*n, Tag::Weights) as u64).fold(0, u64::saturating_add);
    let gradients: u64 = bytes.iter().fold(0, |n, b| n.saturating_add(*b as u64));
    let of = |parts: usize| -> Result<TrainFit> {
        let (g, donated) = step(&forward, &params, loss, parts)?;
        let plan = lower(&g, d.as_target(), &LowerOptions { donated, ..b.lower_options() })?;
        let fit = Fit::of(d, &plan, input_bytes);
        let scratch = fit.activations.saturating_add(fit.workspace);
        let others = [fit.inputs, fit.outputs, fit.weights, fit.packed, fit.weights_in_place];
        Ok(TrainFit {
            parameters: stored,
            gradients: gradients.min(scratch),
            gradients_share: scratch < gradients,
            optimizer: stored.saturating_mul(2),
            activations: scratch.saturating_sub(gradients),
            others: others.into_iter().fold(0, u64::saturating_add),
            parts,
        })
    };
    let plain = of(1)?;
    let mut recomputed = plain;
    for parts in PARTS {
        let now = of(parts)?;
        if now.total() < recomputed.total() {
            recomputed = now;
        }
    }
    Ok((Needs { plain, recomputed }, count))
}

fn numel(s: &Shape) -> Result<usize> {
    Ok(s.dims()?.iter().product())
}

/// The largest batches that need at most `free` bytes, without and with recomputing activations. `of` returns
/// the needs of a batch. Assumes that if a batch does not fit, no larger batch fits.
pub(crate) fn largest(free: u64, of: &dyn Fn(usize) -> Result<Needs>) -> Result<[Largest; 2]> {
    let one = |total: fn(&Needs) -> u64| -> Result<Largest> {
        let fits = |n: usize| Ok::<bool, Error>(total(&of(n)?) <= free);
        let (mut low, mut high) = (0, 1);
        while high <= MAX_BATCH && fits(high)? {
            (low, high) = (high, if high == MAX_BATCH { MAX_BATCH + 1 } else { high * 2 });
        }
        while high - low > 1 {
            let mid = low + (high - low) / 2;
            if fits(mid)? { low = mid } else { high = mid }
        }
        Ok((low > 0).then_some(low))
    };
    Ok([one(|n| n.plain.total())?, one(|n| n.recomputed.total())?])
}

impl Report {
    pub(crate) fn text(&self) -> String {
        let (p, r) = (&self.needs.plain, &self.needs.recomputed);
        let mut out = String::new();
        // Writing to a string cannot fail.
        if let Some(n) = self.batch {
            let _ = writeln!(out, "batch    {n}");
        }
        let row = |what: &str, bytes: u64, note: String| vec![what.to_string(), size(bytes), note];
        let again = match r.parts {
            1 => "recomputing them needs no less memory".to_string(),
            n => format!("and {} if {n} parts of the forward are computed again", size(r.activations)),
        };
        let gradients = match p.gradients_share {
            true => "of which not all are in memory at once".to_string(),
            false => "as large as the parameters".into(),
        };
        out += &table(&[
            row("parameters", p.parameters, format!("{} numbers", self.count)),
            row("gradients", p.gradients, gradients),
            row("optimizer", p.optimizer, "Adam: two moments for each parameter".into()),
            row("activations", p.activations, again),
            row("others", p.others, "the batch, the results and constants".into()),
            row(
                "total",
                p.total(),
                format!("on {}, {} with parts computed again", self.backend, size(r.total())),
            ),
        ]);
        match &self.largest {
            Err(why) => {
                let _ = writeln!(out, "largest batch: not searched, since {why}");
            }
            Ok(found) => {
                for (what, n) in ["", " with parts computed again"].into_iter().zip(found) {
                    let _ = match n {
                        Some(n) => writeln!(out, "largest batch{what}: {n}"),
                        None => writeln!(out, "largest batch{what}: not even 1 fits"),
                    };
                }
            }
        }
        out
    }

    pub(crate) fn json(&self) -> Value {
        let (p, r) = (&self.needs.plain, &self.needs.recomputed);
        let mut v = json!({
            "parameters": { "count": self.count, "bytes": p.parameters },
            "gradients": p.gradients,
            "optimizer": { "name": "adam", "bytes": p.optimizer },
            "plain": p.json(),
            "recomputed": r.json(),
            "batch": self.batch,
            "free": self.free,
        });
        match &self.largest {
            Ok([plain, recomputed]) => {
                v["largest_batch"] = json!({ "plain": plain, "recomputed": recomputed });
            }
            Err(why) => v["no_largest_batch_because"] = json!(why),
        }
        v
    }
}
