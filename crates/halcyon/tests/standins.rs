//! The op table on CUDA and ROCm, whose drivers run over libraries that stand in for the vendors': kernels as a GPU gets them, with
//! subgroups of 32 and 64, compiled as C++.
#![cfg(all(unix, feature = "cuda", feature = "rocm"))]

mod common;
mod optable;
#[path = "../../halcyon-hal/tests/common/standin.rs"]
mod standin;

use common::Rng;
use halcyon::hal::registry;
use halcyon::prelude::*;
use optable::check::{Tally, check_rows};
use optable::{random, rows};

/// A backend over the stand-in; `None` where it could not be built.
fn backend(kind: BackendType, level: Level) -> Option<Backend> {
    use halcyon::hal::Driver;
    let s = standin::all().into_iter().find(|s| s.driver.kind() == kind)?;
    registry::register(s.driver.clone()).unwrap();
    Some(Backend::builder().backend_type(kind).level(level).build().unwrap())
}

fn op_table(kind: BackendType) {
    let what = format!("op table on {kind} over its stand-in");
    let Some(b) = backend(kind, Level::O1) else { return };
    check_rows(&what, &rows(), std::slice::from_ref(&b), &mut Rng::fresh(&what)).finish(&what);
    let failures = (1..=20).filter_map(|seed| random::check(seed, std::slice::from_ref(&b)).err()).collect();
    Tally { cases: 20, failures, ..Tally::default() }.finish(&what);
}

#[test]
fn op_table_on_cuda() {
    op_table(BackendType::Cuda);
}

#[test]
fn op_table_on_rocm() {
    op_table(BackendType::Rocm);
}

/// A layer of a network: a product with a weight and a bias, an activation, a product of views, and on CUDA a convolution.
fn layers(b: &Backend, x: &Tensor, image: &Tensor) -> Vec<Tensor> {
    let mut rng = Rng::new(11);
    let mut tensor = |dims: &[usize]| b.tensor(&rng.f32s(dims.iter().product()), dims);
    let (w, bias, v) = (tensor(&[96, 64]), tensor(&[64]), tensor(&[64, 64]));
    let (k, kb) = (tensor(&[8, 4, 3, 3]), tensor(&[1, 8, 1, 1]));
    let y = (x.matmul(&w) + &bias).relu();
    let z = y.matmul(&v.transpose(0, 1)).gelu_tanh();
    let c = (image.conv2d(&k, ConvConfig::default()) + &kb).relu();
    vec![y, z, c]
}
