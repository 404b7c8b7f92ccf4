//! Random graphs of element-wise ops, views, reductions, products and a few others, for comparing fused
//! chains with the reference.

use super::check::run;
use crate::Rng;
use halcyon::ir::ScalarOp;
use halcyon::ir::graph::{Graph, NodeId};
use halcyon::ir::ops::ReduceKind;
use halcyon::ir::reference;
use halcyon::ir::shape::{Shape, TensorType};
use halcyon::optable::views::slice;
use halcyon::{Backend, ConstData, DType, Result};

/// The largest number of elements of a value that further ops may read.
const MAX_ELEMENTS: usize = 6000;

/// Ops with derivatives of at most about one, so that rounding errors stay small in long chains.
const UNARY: &[ScalarOp] = &[
    ScalarOp::Neg,
    ScalarOp::Abs,
    ScalarOp::Tanh,
    ScalarOp::Sigmoid,
    ScalarOp::Sin,
    ScalarOp::Cos,
    ScalarOp::Silu,
    ScalarOp::Relu,
    ScalarOp::Erf,
    ScalarOp::Atan,
    ScalarOp::Gelu,
    ScalarOp::GeluTanh,
    ScalarOp::Asinh,
];
const BINARY: &[ScalarOp] = &[ScalarOp::Add, ScalarOp::Sub, ScalarOp::Mul, ScalarOp::Max, ScalarOp::Min];

struct Maker<'a> {
    g: Graph,
    rng: &'a mut Rng,
    values: Vec<NodeId>,
    inputs: Vec<NodeId>,
}

/// A graph of about `nodes` ops, and its inputs.
pub fn graph(nodes: usize, rng: &mut Rng) -> Result<(Graph, Vec<ConstData>)> {
    let mut m = Maker { g: Graph::new(), rng, values: vec![], inputs: vec![] };
    let sizes = [1, 2, 3, 5, 7, 8, 16, 33];
    let shape: Vec<usize> = (0..1 + m.rng.below(3)).map(|_| sizes[m.rng.below(sizes.len())]).collect();
    for k in 0..2 + m.rng.below(3) {
        // Some operands broadcast against the others.
        let dims: Vec<usize> = shape.iter().map(|d| if m.rng.below(5) == 0 { 1 } else { *d }).collect();
        let id = m.g.input(&format!("x{k}"), TensorType::new(DType::F32, dims.as_slice()));
        m.inputs.push(id);
        m.values.push(id);
    }
    while m.g.nodes().len() < nodes + m.inputs.len() {
        let id = m.step()?;
        if m.size(id) <= MAX_ELEMENTS && m.g.shape(id).rank() <= 5 {
            m.values.push(id);
        }
    }
    // Values that nothing reads are outputs, so that little is optimised away; some inner values are outputs
    // too. A graph has at most six outputs.
    let mut read = vec![false; m.g.nodes().len()];
    m.g.nodes().iter().for_each(|n| n.inputs.iter().for_each(|i| read[i.index()] = true));
    let outs: Vec<NodeId> =
        m.values.clone().into_iter().filter(|v| !read[v.index()] || m.rng.below(8) == 0).take(6).collect();
    for (k, o) in outs.iter().enumerate() {
        m.g.output(&format!("y{k}"), *o);
    }
    let data = m
        .inputs
        .iter()
        .map(|i| {
            let dims = m.g.shape(*i).dims()?;
            ConstData::from_slice(&dims, &m.rng.f32s(dims.iter().product()))
        })
        .collect::<Result<_>>()?;
    Ok((m.g, data))
}

impl Maker<'_> {
    fn size(&self, id: NodeId) -> usize {
        self.dims(id).iter().product()
    }

    fn dims(&self, id: NodeId) -> Vec<usize> {
        self.g.shape(id).known().map(|d| d.to_vec()).unwrap_or_default()
    }

    /// Picks a value, preferring recent ones, so that chains grow.
    fn pick(&mut self) -> NodeId {
        let n = self.values.len();
        let back = self.rng.below(n).min(self.rng.below(n));
        self.values[n - 1 - back]
    }

    /// Picks a value that broadcasts against `x`; `x` itself if eight tries find none.
    fn partner(&mut self, x: NodeId) -> NodeId {
        for _ in 0..8 {
            let y = self.pick();
            let small = |s: Shape| s.known().is_some_and(|d| d.iter().product::<usize>() <= MAX_ELEMENTS);
            if self.g.shape(x).broadcast(self.g.shape(y)).is_ok_and(small) {
                return y;
            }
        }
        x
    }

    fn step(&mut self) -> Result<NodeId> {
        let x = self.pick();
        let d = self.dims(x);
        let axis = self.rng.below(d.len().max(1));
        match self.rng.below(14) {
            0..=3 => {
                let op = UNARY[self.rng.below(UNARY.len())];
                self.g.scalar(op, &[x])
            }
            4..=6 => {
                let (y, op) = (self.partner(x), BINARY[self.rng.below(BINARY.len())]);
                let z = self.g.scalar(op, &[x, y])?;
                // `tanh` of a product keeps values small, so that repeated products do not grow.
                if op == ScalarOp::Mul { self.g.tanh(z) } else { Ok(z) }
            }
            7 => {
                let k = self.rng.uniform(-1.0, 1.0);
                let c = self.g.lit(x, k);
                self.g.mul(x, c)
            }
            8 => {
                // The condition compares inputs, which are exact, so that rounding cannot flip it.
                let i = self.inputs[self.rng.below(self.inputs.len())];
                let z = self.g.lit(i, 0.1);
                let c = self.g.lt(i, z)?;
                let y = self.partner(x);
                match self.g.shape(c).broadcast(self.g.shape(x)).and_then(|s| s.broadcast(self.g.shape(y))) {
                    Ok(_) => self.g.select(c, x, y),
                    Err(_) => self.g.abs(x),
                }
            }
            9 if !d.is_empty() => self.view(x, &d, axis),
            10 if !d.is_empty() => self.view(x, &d, axis),
            11 if !d.is_empty() => {
                let keep = self.rng.below(2) == 0;
                match self.rng.below(4) {
                    0 => self.g.reduce(ReduceKind::Max, x, &[axis], keep),
                    1 => self.g.reduce(ReduceKind::Min, x, &[axis], keep),
                    _ => self.g.mean(x, &[axis], keep),
                }
            }
            12 if d.len() >= 2 => {
                let k = d[d.len() - 1];
                let t = self.g.transpose(x, d.len() - 2, d.len() - 1)?;
                let p = self.g.matmul(x, t)?;
                let c = self.g.lit(p, 1.0 / k as f64);
                self.g.mul(p, c)
            }
            13 if !d.is_empty() => match self.rng.below(3) {
                0 => self.g.softmax(x, axis),
                1 => self.g.concat(&[x, x], axis),
                _ => {
                    let c = self.g.cast(x, DType::F64)?;
                    self.g.cast(c, DType::F32)
                }
            },
            _ => self.g.tanh(x),
        }
    }

    fn view(&mut self, x: NodeId, d: &[usize], axis: usize) -> Result<NodeId> {
        match self.rng.below(7) {
            0 => {
                let mut p: Vec<usize> = (0..d.len()).collect();
                let k = self.rng.below(d.len());
                p.rotate_left(k);
                self.g.permute(x, &p)
            }
            1 => self.g.flip(x, &[axis]),
            2 => {
                let (step, len) = (1 + self.rng.below(2), d[axis]);
                let start = self.rng.below(len);
                let n = (len - start).div_ceil(step);
                let mut s = vec![0; d.len()];
                let (mut t, mut l) = (vec![1; d.len()], d.to_vec());
                (s[axis], t[axis], l[axis]) = (start, step as i64, n);
                slice(&mut self.g, x, &s, &t, &l)
            }
            3 => {
                let (mut lo, mut hi) = (vec![0; d.len()], vec![0; d.len()]);
                (lo[axis], hi[axis]) = (self.rng.below(3), self.rng.below(3));
                let v = self.rng.uniform(-1.0, 1.0);
                self.g.pad(x, &lo, &hi, v)
            }
            4 => {
                let u = self.g.unsqueeze(x, axis)?;
                let mut s = d.to_vec();
                s.insert(axis, 1 + self.rng.below(3));
                self.g.expand(u, &Shape::from(s))
            }
            5 => {
                let n: usize = d.iter().product();
                self.g.reshape(x, [n])
            }
            _ => {
                let n: usize = d.iter().product();
                let k = [2, 3, 4, 5, 7].into_iter().find(|k| n.is_multiple_of(*k)).unwrap_or(1);
                self.g.reshape(x, [k, n / k])
            }
        }
    }
}

/// The largest error of any output, relative to the largest absolute value of the same output, or to 0.1 if
/// that is larger.
fn error(b: &Backend, g: &Graph, inputs: &[ConstData]) -> std::result::Result<f64, String> {
    let want = reference::eval_f64(g, inputs, &[]).map_err(|e| format!("reference: {e}"))?;
    let got = run(b, g, inputs, &[]).map_err(|e| e.to_string())?;
    let mut worst = 0f64;
    for (y, w) in got.iter().zip(&want) {
        if y.dims != w.dims {
            return Err(format!("an output is {:?} instead of {:?}", y.dims, w.dims));
        }
        let w: Vec<f64> = w.to_vec();
        let top = w.iter().fold(0.1f64, |a, v| a.max(v.abs()));
        for (a, b) in y.to_vec::<f64>().iter().zip(&w) {
            let e = (a - b).abs() / top;
            worst = worst.max(if e.is_nan() { f64::INFINITY } else { e });
        }
    }
    Ok(worst)
}

/// Runs one graph on backends and compares its outputs with the reference. A failure reports the first node
/// whose value is wrong when it is the only output, with the nodes that it needs.
pub fn check(seed: u64, backends: &[Backend]) -> std::result::Result<(), String> {
    let mut rng = Rng::new(seed);
    let nodes = 5 + rng.below(36);
    let (g, inputs) = graph(nodes, &mut rng).map_err(|e| format!("graph {seed}: {e}"))?;
    for b in backends {
        let wrong = |g: &Graph| match error(b, g, &inputs) {
            Ok(e) if e <= 2e-5 => None,
            Ok(e) => Some(format!("off by {e:.1e}")),
            Err(e) => Some(e),
        };
        let Some(what) = wrong(&g) else { continue };
        let part = g.ids().filter(|n| n.index() >= inputs.len()).find_map(|n| {
            let mut one = g.clone();
            one.set_outputs(vec![]);
            one.output("y", n);
            let what = wrong(&one)?;
            let live = one.live(&[n]);
            let text = one.to_string();
            let lines = text.lines().enumerate().filter(|(i, _)| live.get(*i).is_none_or(|l| *l));
            Some(format!(
                "{what} with only this part:\n{}",
                lines.map(|l| l.1).collect::<Vec<_>>().join("\n")
            ))
        });
        let part = part.unwrap_or_else(|| format!("only the whole graph fails:\n{g}"));
        return Err(format!("graph {seed} on {} {}: {what}; {part}", b.id(), b.level()));
    }
    Ok(())
}
