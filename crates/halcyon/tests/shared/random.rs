//! Tests that the random numbers of imported models are the same on every device.

use halcyon::prelude::*;
use halcyon::{ConstData, Session};
use halcyon_formats::onnx::Builder;
use halcyon_test::devices::devices;

/// Large enough that nothing is folded at import, and that threads share the work.
const SHAPE: [usize; 2] = [300, 101];

fn draws() -> halcyon::ir::Graph {
    let (mut b, s) = (Builder::default(), SHAPE.into());
    let v = [
        b.random_bits(&s, 5, 0).unwrap(),
        b.random_uniform(DType::F32, &s, (0.0, 1.0), 5, 0).unwrap(),
        b.random_uniform(DType::F16, &s, (-1.0, 3.0), 5, 1).unwrap(),
        b.random_normal(DType::F32, &s, (1.0, 2.0), 5, 2).unwrap(),
    ];
    for (k, v) in v.iter().enumerate() {
        let id = b.id(v).unwrap();
        b.g.output(&k.to_string(), id);
    }
    std::mem::take(&mut b.g)
}

#[test]
fn every_device_draws_the_same_numbers() {
    let run = |b: &Backend| -> Vec<ConstData> { Session::new(b, draws()).run(&[]).unwrap() };
    let all: Vec<_> =
        devices("random numbers", Level::O1).iter().map(|b| (b.id().to_string(), run(b))).collect();
    let Some((_, first)) = all.first() else { return };
    let bits = first[0].to_vec::<u32>();
    assert_eq!(bits.len(), SHAPE[0] * SHAPE[1]);
    assert_ne!(bits[0], bits[1]);
    for (id, v) in &all {
        assert_eq!(v[0].to_vec::<u32>(), bits, "{id}");
        let unit: Vec<f32> = bits.iter().map(|b| (b >> 8) as f32 / (1 << 24) as f32).collect();
        assert_eq!(v[1].to_vec::<f32>(), unit, "{id}");
        for k in [2, 3] {
            for (a, b) in v[k].to_vec::<f64>().iter().zip(first[k].to_vec::<f64>()) {
                // Some devices round a multiply-add once, others twice.
                let eps = if k == 2 { 2e-3 } else { 2e-6 };
                assert!((a - b).abs() <= eps * b.abs().max(1.0), "{id}: {a} {b}");
            }
        }
    }
}

#[test]
fn runs_repeat_themselves() {
    for b in devices("random numbers again", Level::O0) {
        let s = Session::new(&b, draws());
        let (x, y) = (s.run(&[]).unwrap(), s.run(&[]).unwrap());
        assert_eq!(x[3].to_vec::<f32>(), y[3].to_vec::<f32>());
    }
}
