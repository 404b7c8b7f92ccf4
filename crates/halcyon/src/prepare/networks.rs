//! Small networks on which the gains of transformations are measured. The networks have patterns that most
//! transformations change.

use halcyon_ir::error::{Error, Result};
use halcyon_ir::graph::NodeId;
use halcyon_ir::ops::Conv;
use halcyon_ir::{ConstData, DType, Graph, ScalarOp, TensorType};

/// A graph with an input.
pub(super) struct Network {
    pub(super) graph: Graph,
    pub(super) input: ConstData,
}

/// Builds a graph with weights that are the same in every run.
struct Builder {
    g: Graph,
    weights: usize,
}

/// Positive and negative numbers between `-scale` and `scale`.
fn numbers(dims: &[usize], seed: usize, scale: f32) -> Result<ConstData> {
    let n: usize = dims.iter().product();
    let at = |i: usize| (((i + 31 * seed) * 7919 % 257) as f32 / 128.0 - 1.0) * scale;
    ConstData::from_slice(dims, &(0..n).map(at).collect::<Vec<f32>>())
        .map_err(|e| Error::internal(e.to_string()))
}

impl Builder {
    fn new(dims: &[usize]) -> (Builder, NodeId) {
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, dims));
        (Builder { g, weights: 0 }, x)
    }

    fn weight(&mut self, dims: &[usize], scale: f32) -> Result<NodeId> {
        self.weights += 1;
        let data = numbers(dims, self.weights, scale)?;
        Ok(self.g.constant(data))
    }

    fn finish(mut self, y: NodeId, input: &[usize]) -> Result<Network> {
        self.g.output("y", y);
        Ok(Network { graph: self.g, input: numbers(input, 0, 1.0)? })
    }

    /// A convolution, batch normalisation as four ops, and ReLU.
    fn conv_block(&mut self, x: NodeId, from: usize, to: usize) -> Result<NodeId> {
        let w = self.weight(&[to, from, 3, 3], 0.1)?;
        let mut y = self.g.conv(x, w, Conv::new(2).padding([1, 1]))?;
        for op in [ScalarOp::Sub, ScalarOp::Mul, ScalarOp::Mul, ScalarOp::Add] {
            let k = self.weight(&[to, 1, 1], 0.5)?;
            y = self.g.scalar(op, &[y, k])?;
        }
        self.g.relu(y)
    }

    /// A layer norm over the last axis, written as separate ops.
    fn layer_norm(&mut self, x: NodeId, size: usize) -> Result<NodeId> {
        let m = self.g.mean(x, &[1], true)?;
        let d = self.g.sub(x, m)?;
        let two = self.g.lit(d, 2.0);
        let q = self.g.scalar(ScalarOp::Pow, &[d, two])?;
        let v = self.g.mean(q, &[1], true)?;
        let eps = self.g.lit(v, 1e-5);
        let v = self.g.add(v, eps)?;
        let r = self.g.scalar(ScalarOp::Sqrt, &[v])?;
        let n = self.g.div(d, r)?;
        let (scale, bias) = (self.weight(&[size], 1.0)?, self.weight(&[size], 1.0)?);
        let n = self.g.mul(n, scale)?;
        self.g.add(n, bias)
    }

    fn linear(&mut self, x: NodeId, from: usize, to: usize) -> Result<NodeId> {
        let (w, b) = (self.weight(&[from, to], 0.1)?, self.weight(&[to], 0.5)?);
        let y = self.g.matmul(x, w)?;
        self.g.add(y, b)
    }
}

/// Images `[1, 3, 32, 32]` through three convolutions and a product.
fn images() -> Result<Network> {
    let dims = [1, 3, 32, 32];
    let (mut b, x) = Builder::new(&dims);
    let y = b.conv_block(x, 3, 32)?;
    let y = b.conv_block(y, 32, 32)?;
    let y = b.conv_block(y, 32, 32)?;
    let y = b.g.mean(y, &[2, 3], false)?;
    let y = b.linear(y, 32, 10)?;
    let y = b.g.softmax(y, 1)?;
    b.finish(y, &dims)
}

/// Rows `[64, 128]` through a block of a transformer with one head. As in the files of exporters, some parts
/// depend only on weights, one factor is 1, and one part is computed twice.
fn rows() -> Result<Network> {
    const D: usize = 128;
    let dims = [64, D];
    let (mut b, x) = Builder::new(&dims);
    let n = b.layer_norm(x, D)?;
    let (q, v) = (b.linear(n, D, D)?, b.linear(n, D, D)?);
    // The weights that project the keys are computed from two constants.
    let (w, k) = (b.weight(&[D, D], 0.1)?, b.weight(&[D, D], 0.1)?);
    let w = b.g.mul(w, k)?;
    let w = b.g.scalar(ScalarOp::Tanh, &[w])?;
    let k = b.g.matmul(n, w)?;
    let k = b.g.permute(k, &[1, 0])?;
    let scores = b.g.matmul(q, k)?;
    let one = b.g.lit(scores, 1.0);
    let scores = b.g.mul(scores, one)?;
    let (weights, again) = (b.g.softmax(scores, 1)?, b.g.softmax(scores, 1)?);
    let weights = b.g.mul(weights, again)?;
    let a = b.g.matmul(weights, v)?;
    let y = b.g.add(x, a)?;
    let h = b.linear(y, D, 2 * D)?;
    let h = b.g.scalar(ScalarOp::Gelu, &[h])?;
    let h = b.linear(h, 2 * D, D)?;
    let y = b.g.add(y, h)?;
    b.finish(y, &dims)
}

/// A table `[1024, 64]`. One row is replaced.
fn table() -> Result<Network> {
    let dims = [1024, 64];
    let (mut b, x) = Builder::new(&dims);
    let t = b.g.softmax(x, 1)?;
    let row = b.weight(&[1, 64], 1.0)?;
    let at = b.g.full(DType::I64, [] as [usize; 0], 3i64);
    let y = b.g.update_slice(t, row, at, 0)?;
    b.finish(y, &dims)
}

pub(super) fn all() -> Result<[Network; 3]> {
    Ok([images()?, rows()?, table()?])
}
