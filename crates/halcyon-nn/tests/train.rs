//! Whole trainings: the example on digits, loss scaling, files of weights.

#[path = "../../../examples/05_digits_cnn.rs"]
mod digits;

use halcyon::prelude::*;
use halcyon_nn::*;
use std::path::Path;

#[test]
fn digits_reach_97_percent() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/digits.npz");
    let accuracy = digits::train(&Backend::cpu().unwrap(), &data, 8, 18).unwrap();
    assert!(accuracy >= 0.97, "{accuracy}");
}

/// A step on `w · g` with the gradient `g`, in f16, and a loss scaler.
#[test]
fn an_overflow_skips_its_step_and_halves_the_scale() {
    for b in halcyon_test::devices::devices("an_overflow_skips_its_step_and_halves_the_scale", Level::O2) {
        let w = Param::new(Tensor::ones(&b, [4], DType::F32));
        let optimizer = Optimizer::new(&w, Adam::new().rate(0.1)).unwrap();
        let scaler = LossScaler { initial: 1024.0, interval: 3, ..LossScaler::default() };
        let mut step = TrainStep::with_scaler(&w, optimizer, scaler, |w: &&Param, g: &[Tensor]| {
            Ok(vec![(w.value() * &g[0]).sum(..)])
        })
        .unwrap();
        let gradient = |v: f32| Tensor::from_slice(&b, [4], &[v, 0.5, -0.25, 1.0]).unwrap();
        let mut scales = vec![];
        let mut values = vec![];
        for v in [1.0, 2.0, f32::INFINITY, 1.0, 1.0, 1.0, f32::NAN, 1.0] {
            step.run(&[&gradient(v)]).unwrap();
            scales.push(step.scale().unwrap().unwrap());
            values.push(w.value().to_vec::<f64>().unwrap());
        }
        let want = [
            (1024.0, 0),
            (1024.0, 0),
            (512.0, 1),
            (512.0, 1),
            (512.0, 1),
            (1024.0, 1),
            (512.0, 2),
            (512.0, 2),
        ];
        assert_eq!(scales, want, "{}", b.id());
        assert_eq!(values[1], values[2], "the parameters stay in a skipped step");
        assert_eq!(values[5], values[6], "the parameters stay in a skipped step");
        // Skipped steps do not count: the others equal those of a run without them.
        let plain = Param::new(Tensor::ones(&b, [4], DType::F32));
        let optimizer = Optimizer::new(&plain, Adam::new().rate(0.1)).unwrap();
        let mut step = TrainStep::new(&plain, optimizer, |w: &&Param, g: &[Tensor]| {
            Ok(vec![(w.value() * &g[0]).sum(..)])
        })
        .unwrap();
        for v in [1.0, 2.0, 1.0, 1.0, 1.0, 1.0] {
            step.run(&[&gradient(v)]).unwrap();
        }
        for (a, p) in values[7].iter().zip(plain.value().to_vec::<f64>().unwrap()) {
            assert!((a - p).abs() <= 2e-6, "{}: {a}, {p}", b.id());
        }
    }
}

#[derive(Module)]
struct Mixed {
    first: Linear,
    rest: Vec<Linear>,
    tied: Param,
    #[module(skip)]
    _note: std::cell::Cell<u8>,
}

fn mixed(b: &Backend) -> Mixed {
    let first = Linear::new(b, 3, 3).unwrap();
    let tied = first.weight.clone();
    let rest = vec![Linear::new(b, 3, 2).unwrap(), Linear::new(b, 2, 1).unwrap()];
    Mixed { first, rest, tied, _note: Default::default() }
}

#[test]
fn modules_are_visited_by_path_and_shared_parameters_once() {
    let b = Backend::cpu().unwrap();
    let m = mixed(&b);
    let names: Vec<String> = m.parameters().into_iter().map(|(n, _)| n).collect();
    let want = ["first.weight", "first.bias", "rest.0.weight", "rest.0.bias", "rest.1.weight", "rest.1.bias"];
    assert_eq!(names, want);
    assert_eq!(m.parameter_count().unwrap(), 9 + 3 + 6 + 2 + 2 + 1);
    assert_eq!(m.freeze("rest.*.bias").unwrap(), 2);
    assert_eq!(m.freeze("first").unwrap(), 2);
    assert_eq!(m.trainable().len(), 2);
    assert!(m.freeze("nothing*").is_err());
    let summary = m.summary().unwrap();
    assert!(summary.contains("23 parameters, 8 trainable") && summary.contains("Linear"), "{summary}");
    let e = m.slot("rest.0.wieght").unwrap_err().to_string();
    assert!(e.contains("rest.0.weight"), "{e}");
}

#[test]
fn weights_survive_a_file_and_wrong_files_are_errors() {
    let b = Backend::cpu().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    let (m, n) = (mixed(&b), mixed(&b));
    m.save(&path).unwrap();
    n.load(&path, Strictness::Strict).unwrap();
    assert_eq!(m.state_dict().unwrap().len(), 7);
    for ((name, a), (_, c)) in m.state_dict().unwrap().iter().zip(n.state_dict().unwrap()) {
        assert_eq!(a.bytes(), c.bytes(), "{name}");
    }
    let other = Linear::new(&b, 3, 3).unwrap();
    let e = other.load(&path, Strictness::Strict).unwrap_err().to_string();
    assert!(e.contains("lacks") && e.contains("`weight`"), "{e}");
    let unmatched = other.load(&path, Strictness::Lenient).unwrap();
    assert_eq!(unmatched.missing, ["weight", "bias"]);
    let wrong = Linear::new(&b, 4, 3).unwrap();
    wrong.save(&path).unwrap();
    let e = other.load(&path, Strictness::Strict).unwrap_err().to_string();
    assert!(e.contains("weight") && e.contains("[3, 4]") && e.contains("[3, 3]"), "{e}");
}

#[test]
fn a_wrong_shape_names_the_module_the_shapes_and_the_line() {
    let b = Backend::cpu().unwrap();
    let m = mixed(&b);
    m.parameters();
    let e = m.rest[0].forward(&Tensor::ones(&b, [2, 5], DType::F32)).to_vec::<f32>().unwrap_err();
    let text = e.to_string();
    assert!(text.contains("rest.0") && text.contains("matmul") && text.contains("train.rs:"), "{text}");
}

#[test]
fn dropout_draws_anew_in_each_step_and_repeats_with_the_seed() {
    let b = Backend::cpu().unwrap();
    let run = |seed: u64| {
        let w = Param::new(Tensor::ones(&b, [64], DType::F32));
        let optimizer = Optimizer::new(&w, Sgd::new().rate(0.0)).unwrap();
        let d = Dropout::new(0.5).unwrap();
        let mut step = TrainStep::new(&w, optimizer, move |w: &&Param, _: &[Tensor]| {
            let y = d.forward(&w.value());
            Ok(vec![y.sum(..), y.clone(), d.forward(&w.value())])
        })
        .unwrap()
        .seed(seed);
        let one = |step: &mut TrainStep<'_>| {
            let made = step.run(&[]).unwrap();
            [made[1].to_vec::<f32>().unwrap(), made[2].to_vec::<f32>().unwrap()]
        };
        [one(&mut step), one(&mut step)]
    };
    let (a, again, other) = (run(1), run(1), run(2));
    assert_eq!(a, again);
    assert!(a != other && a[0] != a[1] && a[0][0] != a[0][1]);
    let kept = a[0][0].iter().filter(|v| **v == 2.0).count();
    assert!((10..=54).contains(&kept) && a[0][0].iter().all(|v| *v == 0.0 || *v == 2.0), "{kept}");
}
