//! Workloads whose results are compared bit for bit, with and without failures of the device.

use crate::Rng;
use halcyon::ir::Graph;
use halcyon::prelude::*;
use halcyon::{ConstData, Session};
use halcyon_formats::onnx::Model;
use std::sync::OnceLock;

/// A workload; returns the bits of its results.
pub type Work = fn(&Backend) -> Result<Vec<u32>>;

pub fn bits(t: &ConstData) -> Vec<u32> {
    t.to_vec::<f32>().into_iter().map(f32::to_bits).collect()
}

/// The digits model from its file, on an image of noise.
fn digits(b: &Backend) -> Result<Vec<u32>> {
    static GRAPH: OnceLock<Graph> = OnceLock::new();
    let graph = GRAPH.get_or_init(|| {
        let path = crate::root().join("models/digits.onnx");
        let shapes = [("image", Shape::from([1usize, 1, 8, 8]))];
        Model::open(&path).unwrap().import(&shapes).unwrap().graph
    });
    let x: Vec<f32> = (0..64).map(|i| (i * 37 % 64) as f32 / 63.0).collect();
    let s = Session::new(b, graph.clone());
    let x = ConstData::from_slice(&[1, 1, 8, 8], &x)?;
    s.run(std::slice::from_ref(&x))?;
    // Run again, with the cached plan.
    Ok(bits(&s.run(&[x])?[0]))
}

/// A perceptron with its data, for training.
#[derive(Debug)]
pub struct Mlp {
    pub params: Vec<State>,
    x: Tensor,
    labels: Tensor,
}

impl Mlp {
    pub fn new(b: &Backend) -> Result<Mlp> {
        let mut r = Rng::new(7);
        let mut t = |dims: &[usize]| {
            Tensor::from_data(b, &ConstData::from_slice(dims, &r.f32s(dims.iter().product()))?)
        };
        let params = [t(&[12, 8])?, t(&[8])?, t(&[8, 5])?, t(&[5])?].into_iter().map(State::new).collect();
        let x = t(&[6, 12])?;
        let labels = Tensor::from_slice(b, [6], &[0i32, 1, 2, 3, 4, 0])?;
        Ok(Mlp { params, x, labels })
    }

    /// The pending results of a step of gradient descent: the loss, then the new parameters.
    pub fn step(&self) -> Result<Vec<Tensor>> {
        let leaves: Vec<Tensor> =
            self.params.iter().map(|p| p.value().requires_grad()).collect::<Result<_>>()?;
        let (loss, grads) = value_and_grad(&leaves, |w| {
            let hidden = (self.x.matmul(&w[0]) + &w[1]).relu();
            Ok((hidden.matmul(&w[2]) + &w[3]).cross_entropy(&self.labels))
        })?;
        let mut wanted = vec![loss];
        for ((p, w), g) in self.params.iter().zip(&leaves).zip(&grads) {
            p.write(w - g * 0.5)?;
            wanted.push(p.value());
        }
        Ok(wanted)
    }
}

/// Three steps of training; returns the losses and the last layer's bias.
fn training(b: &Backend) -> Result<Vec<u32>> {
    let mlp = Mlp::new(b)?;
    let mut out = vec![];
    for _ in 0..3 {
        let wanted = mlp.step()?;
        eval(&wanted)?;
        out.extend(bits(&wanted[0].to_data()?));
    }
    out.extend(bits(&mlp.params[3].value().to_data()?));
    Ok(out)
}

/// Launches a captured graph with the inputs of its capture, and then with an input that the first launch
/// returned.
pub fn captured(b: &Backend) -> Result<Vec<u32>> {
    let x = Tensor::from_slice(b, [3, 3], &[1.0f32, -2.0, 3.0, 4.0, 5.0, -6.0, 7.0, 8.0, 9.0])?;
    let g = b.capture_graph(|| [x.matmul(&x), x.relu() * 2.0])?;
    let first = b.launch_graph(&g, &[])?;
    let again = b.launch_graph(&g, &[&first[1]])?;
    let mut out = bits(&again[0].to_data()?);
    out.extend(bits(&first[0].to_data()?));
    Ok(out)
}

pub const WORK: &[(&str, Work)] = &[("digits", digits), ("training", training), ("captured", captured)];
