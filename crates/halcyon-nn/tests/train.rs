//! Tests of training as a whole and of modules: loss scaling, weight files, failed steps, the derive,
//! parameter groups, initial values, LoRA, dropout, moves between devices.

use halcyon::ops::Attention;
use halcyon::prelude::*;
use halcyon_nn::*;
use std::path::Path;

/// Steps with a loss scaler. The loss is the sum of `w · g`, so the gradient of `w` is the input `g`, which
/// overflows if it holds an infinity or NaN.
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
        assert_eq!(values[1], values[2], "a skipped step leaves the parameters unchanged");
        assert_eq!(values[5], values[6], "a skipped step leaves the parameters unchanged");
        // Skipped steps do not count: the other steps give the same values as a run without the skipped
        // steps.
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

/// Parameters in lists and maps.
#[derive(Module)]
struct Lists {
    scales: Vec<Param>,
    named: std::collections::BTreeMap<String, Param>,
}

#[test]
fn parameters_in_lists_are_in_the_summary_and_replaced_all_or_none() {
    let b = Backend::cpu().unwrap();
    let ones = |n: usize| Param::new(Tensor::ones(&b, [n], DType::F32));
    let m = Lists { scales: vec![ones(2), ones(3)], named: [("a".to_string(), ones(4))].into() };
    let summary = m.summary().unwrap();
    assert!(summary.contains("9 parameters"), "{summary}");
    for part in ["scales.0 [2]", "scales.1 [3]", "named.a [4]"] {
        assert!(summary.contains(part), "{part}: {summary}");
    }
    let e = m.map(|path, t| Ok(if path == "scales.1" { t.narrow(0, 0, 1) } else { t + 1.0 })).unwrap_err();
    assert!(e.to_string().contains("scales.1"), "{e}");
    assert_eq!(m.scales[0].value().to_vec::<f32>().unwrap(), [1.0, 1.0]);
    m.map(|_, t| Ok(t + 1.0)).unwrap();
    assert_eq!(m.scales[0].value().to_vec::<f32>().unwrap(), [2.0, 2.0]);
}

/// A graph with a symbolic batch size gives the same results as the layer for a known size.
#[test]
fn layers_take_symbolic_sizes() {
    let b = Backend::cpu().unwrap();
    b.manual_seed(5);
    let mut rng = halcyon_test::Rng::fresh("layers_take_symbolic_sizes");
    let norm = GroupNorm::new(&b, 2, 4).unwrap();
    let pool = AdaptiveAvgPool([2, 3]);
    let attention = MultiHeadAttention::new(&b, 8, 2).unwrap();
    type Forward<'a> = (&'a str, Vec<usize>, Box<dyn Fn(&Tensor) -> Tensor + 'a>);
    let layers: [Forward<'_>; 3] = [
        ("GroupNorm", vec![3, 4, 5, 6], Box::new(|x| norm.forward(x))),
        ("AdaptiveAvgPool", vec![3, 4, 5, 6], Box::new(|x| pool.forward(x))),
        (
            "MultiHeadAttention",
            vec![3, 5, 8],
            Box::new(|x| attention.forward(x, x, x, halcyon::Attention::default())),
        ),
    ];
    for (name, dims, forward) in layers {
        let data = rng.f32s(dims.iter().product());
        let x = Tensor::from_slice(&b, dims.clone(), &data).unwrap();
        let want = forward(&x).to_vec::<f32>().unwrap();
        let symbolic: Vec<halcyon::Dim> = dims
            .iter()
            .enumerate()
            .map(|(i, d)| if i == 0 { halcyon::Dim::sym("n") } else { (*d).into() })
            .collect();
        let x = Tensor::placeholder(&b, DType::F32, symbolic);
        let graph = Tensor::trace(&[("x", &x)], &[("y", &forward(&x))]).unwrap();
        let input = halcyon::ConstData::from_slice(&dims, &data).unwrap();
        let got = halcyon::Session::new(&b, graph).run(&[input]).unwrap()[0].to_vec::<f32>();
        assert_eq!(got.len(), want.len(), "{name}");
        assert!(got.iter().zip(&want).all(|(a, c)| (a - c).abs() < 1e-5), "{name}");
    }
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
    let x = Tensor::ones(&b, [2, 5], DType::F32);
    // The second module gets the error of the first and does not add its own name.
    let e = m.rest[1].forward(&m.rest[0].forward(&x)).to_vec::<f32>().unwrap_err();
    let text = e.to_string();
    assert!(text.contains("rest.0: matmul") && text.contains("train.rs:"), "{text}");
    assert!(text.contains('5') && text.contains('3') && !text.contains("rest.1"), "{text}");
    let lstm = Lstm::new(&b, 4, 2).unwrap();
    let wrong = LstmState {
        hidden: Tensor::zeros(&b, [1, 9, 2], DType::F32),
        cell: Tensor::zeros(&b, [1, 9, 2], DType::F32),
    };
    #[derive(Module)]
    struct Outer {
        inner: Lstm,
    }
    let outer = Outer { inner: lstm };
    outer.parameters();
    let x = Tensor::ones(&b, [3, 2, 4], DType::F32);
    let e = outer.inner.forward(&x, Some(&wrong)).unwrap_err().to_string();
    assert!(e.contains("inner: ") && e.contains("[1, 2, 2]") && e.contains("[1, 9, 2]"), "{e}");
}

/// A step that fails before it runs changes nothing. If the caller holds a parameter's value, a step does not
/// overwrite the memory of that value.
#[test]
fn failed_steps_and_held_values_lose_nothing() {
    for b in halcyon_test::devices::devices("failed_steps_and_held_values_lose_nothing", Level::O2) {
        let layer = Linear::new(&b, 3, 2).unwrap();
        let norm = BatchNorm::new(&b, 2).unwrap();
        let model = (layer, norm);
        let optimizer = Optimizer::new(&model, Adam::new()).unwrap();
        let mut step = TrainStep::new(&model, optimizer, |m: &&(Linear, BatchNorm), x: &[Tensor]| {
            Ok(vec![m.1.forward(&m.0.forward(&x[0])).sqr().mean(..)])
        })
        .unwrap();
        let x = b.randn([6, 3], DType::F32);
        let initial = model.0.weight.value();
        let values = initial.to_vec::<f32>().unwrap();
        step.run(&[&x]).unwrap();
        assert_eq!(
            initial.to_vec::<f32>().unwrap(),
            values,
            "{}: a value to which the test holds a handle",
            b.id()
        );
        drop(initial);
        step.run(&[&x]).unwrap();
        let after = model.0.weight.value().to_vec::<f32>().unwrap();
        assert_ne!(after, values);
        let e = step.run(&[&b.randn([6, 4], DType::F32)]).unwrap_err().to_string();
        assert!(e.contains("0: matmul"), "{e}");
        assert_eq!(model.0.weight.value().to_vec::<f32>().unwrap(), after, "{}", b.id());
        step.run(&[&x]).unwrap();
        assert_eq!(model.1.num_batches_tracked.value().item::<i64>().unwrap(), 3);
        // The first step has its own plan, because it must not overwrite the weight that the test holds. The
        // later steps share a plan that overwrites every old value.
        assert_eq!(step.plans(), 2);
        let before = b.cache_stats();
        step.run(&[&x]).unwrap();
        let now = b.cache_stats();
        assert_eq!((now.plans_built, now.copies), (before.plans_built, before.copies), "{}", b.id());
    }
}

#[derive(Module)]
struct Generic<M, const N: usize> {
    #[module(flatten)]
    inner: M,
    #[module(rename = "many")]
    list: [Linear; N],
    choice: Choice,
    r#type: Unit,
    none: Option<Linear>,
}

#[derive(Module)]
enum Choice {
    Deep(Linear),
    #[allow(dead_code)]
    Flat {
        bias: Param,
    },
}

#[derive(Module)]
struct Unit;

#[test]
fn the_derive_follows_its_attributes() {
    let b = Backend::cpu().unwrap();
    let linear = || Linear::new(&b, 1, 1).unwrap();
    let g = Generic {
        inner: linear(),
        list: [linear(), linear()],
        choice: Choice::Deep(linear()),
        r#type: Unit,
        none: None,
    };
    let names: Vec<String> = g.parameters().into_iter().map(|(n, _)| n).collect();
    let want = [
        "weight",
        "bias",
        "many.0.weight",
        "many.0.bias",
        "many.1.weight",
        "many.1.bias",
        "choice.0.weight",
        "choice.0.bias",
    ];
    assert_eq!(names, want);
    assert_eq!(g.kind(), "Generic");
}

#[test]
fn groups_have_their_own_rule_rate_and_decay() {
    let b = Backend::cpu().unwrap();
    let m = Linear::new(&b, 2, 2).unwrap();
    let own = GroupOptions {
        rule: Some(std::sync::Arc::new(Sgd::new().rate(0.5))),
        schedule: Some(Schedule::Exponential { gamma: 0.5 }),
        ..GroupOptions::default()
    };
    let mut o = Optimizer::builder(Muon::new().rate(0.1)).group("bias", own.clone()).build(&m).unwrap();
    assert_eq!((o.rate("weight").unwrap(), o.rate("bias").unwrap()), (0.1, 0.5));
    let old = m.bias.as_ref().unwrap().value().to_vec::<f32>().unwrap();
    let x = Tensor::ones(&b, [1, 2], DType::F32);
    let (_, grads) = loss_and_grads(&m, |m| Ok(m.forward(&x).sum(..))).unwrap();
    o.step(&grads).unwrap();
    let new = m.bias.as_ref().unwrap().value().to_vec::<f32>().unwrap();
    assert!(old.iter().zip(&new).all(|(o, n)| (o - n - 0.5).abs() < 1e-6), "{old:?} {new:?}");
    assert_eq!((o.steps(), o.rate("bias").unwrap()), (1, 0.25));
    let names: Vec<String> = o.state().into_iter().map(|(n, _)| n).collect();
    assert_eq!(names, ["weight.momentum_buffer"]);
    // Without the group, Muon returns an error for the vector. The error says what to do.
    let e = Optimizer::new(&m, Muon::new()).unwrap_err().to_string();
    assert!(e.contains("bias: muon") && e.contains("group"), "{e}");
    let e = Optimizer::builder(Sgd::new()).group("nothing", own).build(&m).unwrap_err().to_string();
    assert!(e.contains("nothing"), "{e}");
    assert!(Optimizer::new(&m, Sgd::new().rate(-1.0)).is_err());
    m.freeze("*").unwrap();
    assert!(Optimizer::new(&m, Sgd::new()).is_err());
}

/// Parameters in f64 are updated in f64. Parameters in bf16 and f16 are updated through a copy in f32.
#[test]
fn parameters_of_every_float_type_are_updated() {
    let b = Backend::cpu().unwrap();
    for (dtype, tolerance) in [(DType::F64, 1e-6), (DType::BF16, 1e-2), (DType::F16, 1e-3)] {
        let w = Param::new(Tensor::ones(&b, [8], dtype));
        let rule = Optimizer::builder(Adam::w().rate(1e-3)).clip(Clip::Norm(1.0));
        let optimizer = rule.build(&w).unwrap();
        let mut step =
            TrainStep::new(&w, optimizer, |w: &&Param, _: &[Tensor]| Ok(vec![w.value().sum(..)])).unwrap();
        for _ in 0..100 {
            step.run(&[]).unwrap();
        }
        assert_eq!(w.value().dtype().unwrap(), dtype);
        // Each step subtracts the rate. The weight decay subtracts 1e-5 of the value.
        let (mut want, rate) = (1.0f64, 1e-3);
        for _ in 0..100 {
            want = want * (1.0 - rate * 0.01) - rate;
        }
        for v in w.value().to_vec::<f64>().unwrap() {
            assert!((v - want).abs() <= tolerance, "{dtype}: {v}, {want}");
        }
    }
}

#[test]
fn initial_values_have_their_distribution() {
    let b = Backend::cpu().unwrap();
    b.manual_seed(halcyon_test::seed("initial_values_have_their_distribution"));
    let of = |i: Init, dims: &[usize]| i.tensor(&b, dims, DType::F32).unwrap().to_vec::<f64>().unwrap();
    let moments = |v: &[f64]| {
        let n = v.len() as f64;
        let mean = v.iter().sum::<f64>() / n;
        (mean, (v.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n).sqrt())
    };
    let dims = [200, 50, 2];
    let (fan_in, fan_out) = (100.0, 400.0);
    let std_of_uniform = |bound: f64| bound / 3f64.sqrt();
    for (init, mean, std) in [
        (Init::Uniform { low: -1.0, high: 3.0 }, 1.0, std_of_uniform(2.0)),
        (Init::Normal { mean: 2.0, std: 0.5 }, 2.0, 0.5),
        (Init::XavierUniform { gain: 2.0 }, 0.0, 2.0 * (2.0f64 / (fan_in + fan_out)).sqrt()),
        (Init::XavierNormal { gain: 1.0 }, 0.0, (2.0f64 / (fan_in + fan_out)).sqrt()),
        (Init::KaimingUniform { gain: 1.5, fan: Fan::In }, 0.0, 1.5 / fan_in.sqrt()),
        (Init::KaimingNormal { gain: 1.0, fan: Fan::Out }, 0.0, 1.0 / fan_out.sqrt()),
        // A standard normal truncated to [-1, 1] has the variance 0.2911, so the standard deviation 0.5396.
        (Init::TruncNormal { mean: 0.0, std: 1.0, low: -1.0, high: 1.0 }, 0.0, 0.5396),
    ] {
        let (m, s) = moments(&of(init, &dims));
        // Six standard errors of 20,000 values.
        let error = 6.0 * std / 20_000f64.sqrt();
        assert!((m - mean).abs() <= error && (s - std).abs() <= error, "{init:?}: {m}, {s}");
    }
    for (rows, cols) in [(5, 9), (9, 5)] {
        let q = of(Init::Orthogonal { gain: 2.0 }, &[rows, cols]);
        let at = |r: usize, c: usize| q[r * cols + c];
        for i in 0..5 {
            for j in 0..5 {
                let dot: f64 = match rows < cols {
                    true => (0..cols).map(|k| at(i, k) * at(j, k)).sum(),
                    false => (0..rows).map(|k| at(k, i) * at(k, j)).sum(),
                };
                let want = if i == j { 4.0 } else { 0.0 };
                assert!((dot - want).abs() < 1e-5, "{rows}×{cols}: {dot}");
            }
        }
    }
    assert_eq!(of(Init::Eye, &[2, 3]), [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
    assert_eq!(of(Init::Constant(0.5), &[2]), [0.5; 2]);
    for bad in [Init::XavierNormal { gain: 1.0 }, Init::Orthogonal { gain: 1.0 }, Init::Eye] {
        assert!(bad.tensor(&b, &[4], DType::F32).is_err(), "{bad:?}");
    }
    assert!(Init::Uniform { low: 1.0, high: 0.0 }.tensor(&b, &[4], DType::F32).is_err());
}

#[test]
fn lora_starts_as_its_base_trains_alone_and_merges() {
    let b = Backend::cpu().unwrap();
    let (base, x) = (Linear::new(&b, 6, 4).unwrap(), b.randn([3, 6], DType::F32));
    let before = base.forward(&x).to_vec::<f32>().unwrap();
    let lora = Lora::new(base, LoraOptions { rank: 2, alpha: 4.0 }).unwrap();
    assert_eq!(lora.forward(&x).to_vec::<f32>().unwrap(), before);
    let names: Vec<String> = lora.trainable().into_iter().map(|(n, _)| n).collect();
    assert_eq!(names, ["lora_A", "lora_B"]);
    let optimizer = Optimizer::new(&lora, Adam::new().rate(0.05)).unwrap();
    let mut step =
        TrainStep::new(&lora, optimizer, |l: &&Lora, x: &[Tensor]| Ok(vec![l.forward(&x[0]).sqr().mean(..)]))
            .unwrap();
    for _ in 0..10 {
        step.run(&[&x]).unwrap();
    }
    let (y, merged) = (lora.forward(&x), lora.merged().unwrap().forward(&x));
    let (y, merged) = (y.to_vec::<f32>().unwrap(), merged.to_vec::<f32>().unwrap());
    assert!(y.iter().zip(&merged).all(|(a, m)| (a - m).abs() < 1e-5) && y != before);
    assert!(Lora::new(Linear::new(&b, 2, 4).unwrap(), LoraOptions { rank: 3, alpha: 1.0 }).is_err());
}

#[test]
fn dropout_draws_anew_in_each_step_and_is_the_same_on_every_device() {
    let b = Backend::cpu().unwrap();
    let run = |b: &Backend, seed: u64| {
        let w = Param::new(Tensor::ones(b, [64], DType::F32));
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
    let (a, other) = (run(&b, 1), run(&b, 2));
    let name = "dropout_draws_anew_in_each_step_and_is_the_same_on_every_device";
    for d in halcyon_test::devices::devices(name, Level::O2) {
        assert_eq!(a, run(&d, 1), "{}", d.id());
    }
    assert!(a != other && a[0] != a[1] && a[0][0] != a[0][1]);
    let kept = a[0][0].iter().filter(|v| **v == 2.0).count();
    assert!((10..=54).contains(&kept) && a[0][0].iter().all(|v| *v == 0.0 || *v == 2.0), "{kept}");
}

/// Attention with dropout computes in the layer's dtype. Causal attention hides later keys with dropout too.
#[test]
fn attention_with_dropout_takes_every_float_type_and_hides_later_keys() {
    let b = Backend::cpu().unwrap();
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let o = MultiHeadAttentionOptions {
            dropout: 0.5,
            batch_first: true,
            dtype,
            ..MultiHeadAttentionOptions::default()
        };
        let layer = MultiHeadAttention::with(&b, 4, 2, o).unwrap();
        // The results of two steps on a sequence whose last vector is filled with `last`.
        let run = |last: f32| {
            let optimizer = Optimizer::new(&layer, Sgd::new().rate(0.0)).unwrap();
            let mut step = TrainStep::new(&layer, optimizer, |l: &&MultiHeadAttention, x: &[Tensor]| {
                let y = l.forward(&x[0], &x[0], &x[0], Attention { causal: true, ..Attention::default() });
                Ok(vec![y.cast(DType::F32).sum(..), y])
            })
            .unwrap()
            .seed(3);
            let mut v: Vec<f32> = (0..12).map(|i| (i as f32 * 0.7).sin()).collect();
            v[8..].fill(last);
            let x = Tensor::from_slice(&b, [1, 3, 4], &v).unwrap().cast(dtype);
            [(); 2].map(|()| step.run(&[&x]).unwrap()[1].to_vec::<f64>().unwrap())
        };
        let ([a, next], [c, _]) = (run(1.0), run(-2.0));
        assert!(a != next, "{dtype}: each step draws anew");
        assert!(a[..8] == c[..8] && a[8..] != c[8..], "{dtype}: {a:?} {c:?}");
    }
}

/// PyTorch's files load by the same names, also from inside of a checkpoint.
#[test]
fn weights_load_from_pytorch_files() {
    #[derive(Module)]
    struct Net {
        fc1: Linear,
        norm: BatchNorm,
        fc2: Linear,
    }
    let b = Backend::cpu().unwrap();
    let net = || Net {
        fc1: Linear::new(&b, 4, 3).unwrap(),
        norm: BatchNorm::new(&b, 3).unwrap(),
        fc2: Linear::new(&b, 3, 2).unwrap(),
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../halcyon-formats/tests/data/torch");
    let want = halcyon_formats::npz::Npz::open(&folder.join("state.npz")).unwrap();
    for file in ["state.pt", "checkpoint.pt"] {
        let net = net();
        net.load_torch(&folder.join(file), Strictness::Strict).unwrap();
        for (name, data) in net.state_dict().unwrap() {
            assert_eq!(data.to_vec::<f64>(), want.get(&name).unwrap().to_vec::<f64>(), "{file}: {name}");
        }
    }
    let e = Linear::new(&b, 4, 3).unwrap().load_torch(&folder.join("module.pt"), Strictness::Strict);
    assert!(e.unwrap_err().to_string().contains("__main__.Net"));
    let e = net().fc1.load_torch(&folder.join("types.pt"), Strictness::Strict).unwrap_err().to_string();
    assert!(e.contains("lacks") && e.contains("`weight`"), "{e}");
}

/// A run continues on other devices. All state moves, and every bit of the state stays the same.
#[test]
fn a_training_step_moves_between_devices() {
    let devices = halcyon_test::devices::devices("a_training_step_moves_between_devices", Level::O2);
    let cpu = Backend::cpu().unwrap();
    let layer = Linear::new(&cpu, 3, 2).unwrap();
    let optimizer = Optimizer::new(&layer, Adam::new()).unwrap();
    let scaler = LossScaler { initial: 8.0, ..LossScaler::default() };
    let mut step = TrainStep::with_scaler(&layer, optimizer, scaler, |m: &&Linear, x: &[Tensor]| {
        Ok(vec![m.forward(&x[0]).sqr().mean(..)])
    })
    .unwrap();
    let x: Vec<f32> = (0..12).map(|i| (i as f32 * 0.7).sin()).collect();
    let on = |b: &Backend| Tensor::from_slice(b, [4, 3], &x).unwrap();
    let bits = |step: &TrainStep<'_>| -> Vec<Vec<u8>> {
        let own = [&layer.weight, layer.bias.as_ref().unwrap()].map(|p| p.value());
        own.into_iter()
            .chain(step.state().into_iter().map(|(_, t)| t))
            .map(|t| t.to_data().unwrap().bytes().to_vec())
            .collect()
    };
    let mut last = f64::INFINITY;
    for b in devices.into_iter().chain([cpu]) {
        let before = bits(&step);
        step.to_device(&b).unwrap();
        assert_eq!(bits(&step), before, "{}", b.id());
        let loss = step.run(&[&on(&b)]).unwrap()[0].item::<f64>().unwrap();
        assert!(loss < last, "{}: {loss}, {last}", b.id());
        last = loss;
        assert_eq!(step.backend().id(), b.id());
    }
    // Unknown names and wrong shapes are refused. A saved state can be loaded again.
    let saved: Vec<(String, Tensor)> = step.state();
    step.run(&[&on(step.backend())]).unwrap();
    assert!(step.load_state(vec![("weight.nothing".into(), on(step.backend()))]).is_err());
    assert!(step.load_state(vec![("weight.exp_avg".into(), on(step.backend()))]).is_err());
    let names: Vec<String> = saved.iter().map(|(n, _)| n.clone()).collect();
    assert!(names.contains(&"weight.exp_avg".to_string()) && names.contains(&"scaler.scale".to_string()));
    step.load_state(saved).unwrap();
}

#[test]
fn a_step_is_a_graph_with_named_inputs() {
    let b = Backend::cpu().unwrap();
    let layer = Linear::new(&b, 3, 2).unwrap();
    let optimizer = Optimizer::new(&layer, Adam::new()).unwrap();
    let mut step = TrainStep::new(&layer, optimizer, |m: &&Linear, x: &[Tensor]| {
        Ok(vec![m.forward(&x[0]).sqr().mean(..)])
    })
    .unwrap();
    let x = b.randn([4, 3], DType::F32);
    let g = step.graph(&[&x]).unwrap();
    let names: Vec<&str> = g.graph.inputs().iter().map(|i| &*i.name).collect();
    assert_eq!(names[..3], ["batch.0", "weight", "weight.exp_avg"]);
    let data: Vec<_> = g.inputs.iter().map(|(_, t)| t.to_data().unwrap()).collect();
    let want = halcyon::ir::reference::eval(&g.graph, &data, &g.args).unwrap();
    let loss = step.run(&[&x]).unwrap()[0].item::<f64>().unwrap();
    assert!((want[0].to_vec::<f64>()[0] - loss).abs() < 1e-6);
    for (a, b) in want[1].to_vec::<f64>().iter().zip(layer.weight.value().to_vec::<f64>().unwrap()) {
        assert!((a - b).abs() < 1e-6);
    }
}
