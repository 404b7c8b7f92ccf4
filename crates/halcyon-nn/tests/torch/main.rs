//! Layers, losses, optimizers, schedules and training runs compared with stored results of PyTorch.

mod layers;
mod optimizers;
mod runs;

use halcyon::ConstData;
use halcyon::prelude::*;
use halcyon_formats::npz::Npz;
use serde_json::Value;
use std::path::PathBuf;

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn json(name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(file(name)).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn arrays(name: &str) -> Npz {
    Npz::open(&file(name)).unwrap()
}

/// One field of a configuration.
fn int(c: &Value, key: &str) -> usize {
    c[key].as_u64().unwrap_or_else(|| panic!("{key} in {c}")) as usize
}

fn float(c: &Value, key: &str) -> f64 {
    c[key].as_f64().unwrap_or_else(|| panic!("{key} in {c}"))
}

fn flag(c: &Value, key: &str) -> bool {
    c[key].as_bool().unwrap_or_else(|| panic!("{key} in {c}"))
}

fn ints(c: &Value, key: &str) -> Vec<usize> {
    let list = c[key].as_array().unwrap_or_else(|| panic!("{key} in {c}"));
    list.iter().map(|v| v.as_u64().unwrap() as usize).collect()
}

/// The largest difference, relative to the larger of 1 and the largest finite wanted value. Infinities must
/// be equal. The difference from a NaN is infinite.
fn difference(got: &Tensor, want: &ConstData) -> f64 {
    let got_dims = got.dims().unwrap();
    assert_eq!(&got_dims[..], &want.dims[..], "shape");
    let (got, want) = (got.to_vec::<f64>().unwrap(), want.to_vec::<f64>());
    let most = want.iter().filter(|v| v.is_finite()).fold(1.0f64, |m, v| m.max(v.abs()));
    let one = |(a, b): (&f64, &f64)| match a == b {
        true => 0.0,
        false if a.is_nan() || b.is_nan() || a.is_infinite() || b.is_infinite() => f64::INFINITY,
        false => (a - b).abs() / most,
    };
    got.iter().zip(&want).map(one).fold(0.0, f64::max)
}
