use crate::{arrays, float, json};
use halcyon::prelude::*;
use halcyon_nn::*;
use serde_json::Value;

/// Parameters whose gradients the script `torch_cases.py` defines.
#[derive(Module)]
struct Params {
    p: Vec<Param>,
}

/// The same values as `start` of `torch_cases.py`.
fn start(k: usize, n: usize) -> Vec<f32> {
    (0..n).map(|j| (0.9 * j as f64 + k as f64).cos() as f32).collect()
}

/// The same values as `gradient` of `torch_cases.py`.
fn gradient(step: usize, k: usize, n: usize) -> Vec<f32> {
    let (s, k) = (step as f64, k as f64);
    let one = |j: usize| {
        let j = j as f64;
        (0.7 * s + 0.31 * j + 1.7 * k).sin() * (0.1 + 0.9 * (0.05 * s + 0.2 * j).cos().abs())
    };
    (0..n).map(|j| one(j) as f32).collect()
}

fn builder(c: &Value) -> OptimizerBuilder {
    let (kind, o) = (c["kind"].as_str().unwrap(), &c["config"]);
    let or = |key: &str, default: f64| o[key].as_f64().unwrap_or(default);
    let betas = |i: usize, default: f64| o["betas"][i].as_f64().unwrap_or(default);
    let rate = float(o, "lr");
    let b = match kind {
        "sgd" => Optimizer::builder(
            Sgd::new()
                .rate(rate)
                .momentum(or("momentum", 0.0))
                .dampening(or("dampening", 0.0))
                .weight_decay(or("weight_decay", 0.0))
                .nesterov(o["nesterov"].as_bool().unwrap_or(false)),
        ),
        "adam" | "adamw" => {
            let a = if kind == "adam" { Adam::new() } else { Adam::w() };
            Optimizer::builder(
                a.rate(rate)
                    .beta1(betas(0, 0.9))
                    .beta2(betas(1, 0.999))
                    .eps(or("eps", 1e-8))
                    .weight_decay(or("weight_decay", if kind == "adam" { 0.0 } else { 0.01 }))
                    .amsgrad(o["amsgrad"].as_bool().unwrap_or(false)),
            )
        }
        "adagrad" => Optimizer::builder(
            AdaGrad::new()
                .rate(rate)
                .rate_decay(or("lr_decay", 0.0))
                .weight_decay(or("weight_decay", 0.0))
                .initial(or("initial_accumulator_value", 0.0)),
        ),
        "rmsprop" => Optimizer::builder(
            RmsProp::new()
                .rate(rate)
                .alpha(or("alpha", 0.99))
                .momentum(or("momentum", 0.0))
                .weight_decay(or("weight_decay", 0.0))
                .centered(o["centered"].as_bool().unwrap_or(false)),
        ),
        "adafactor" => Optimizer::builder(
            Adafactor::new().rate(rate).clip(or("d", 1.0)).weight_decay(or("weight_decay", 0.0)),
        ),
        "lion" => Optimizer::builder(
            Lion::new()
                .rate(rate)
                .beta1(betas(0, 0.9))
                .beta2(betas(1, 0.99))
                .weight_decay(or("weight_decay", 0.0)),
        ),
        _ => Optimizer::builder(
            Muon::new()
                .rate(rate)
                .momentum(or("momentum", 0.95))
                .nesterov(o["nesterov"].as_bool().unwrap_or(true))
                .weight_decay(or("weight_decay", 0.1)),
        ),
    };
    match (c["more"]["clip_norm"].as_f64(), c["more"]["clip_value"].as_f64()) {
        (Some(n), _) => b.clip(Clip::Norm(n)),
        (_, Some(v)) => b.clip(Clip::Value(v)),
        _ => b,
    }
}

fn shapes(c: &Value) -> Vec<Vec<usize>> {
    serde_json::from_value(c["shapes"].clone()).unwrap()
}

/// The largest difference from the stored parameters after 1, 10 and 100 steps, relative to the largest
/// element of the same parameter.
fn follow(b: &Backend, case: usize, c: &Value, data: &halcyon_formats::npz::Npz) -> Result<f64> {
    let shapes = shapes(c);
    let count = |s: &[usize]| s.iter().product::<usize>();
    let p = shapes
        .iter()
        .enumerate()
        .map(|(k, s)| Ok(Param::new(Tensor::from_slice(b, s.as_slice(), &start(k, count(s)))?)));
    let module = Params { p: p.collect::<Result<_>>()? };
    // The loss Σ p · g has the gradient g.
    let optimizer = builder(c).build(&module)?;
    let mut step = TrainStep::new(&module, optimizer, |m: &&Params, g: &[Tensor]| {
        let terms = m.p.iter().zip(g).map(|(p, g)| (p.value() * g).sum(..));
        Ok(terms.reduce(|a, b| a + b).into_iter().collect())
    })?;
    let mut worst = 0.0f64;
    for s in 1..=100 {
        let g = shapes
            .iter()
            .enumerate()
            .map(|(k, d)| Tensor::from_slice(b, d.as_slice(), &gradient(s, k, count(d))));
        let g = g.collect::<Result<Vec<_>>>()?;
        step.run(&g.iter().collect::<Vec<_>>())?;
        if ![1, 10, 100].contains(&s) {
            continue;
        }
        for (k, p) in module.p.iter().enumerate() {
            let want = data.get(&format!("{case}.{s}.{k}"))?.to_vec::<f64>();
            let got = p.value().to_vec::<f64>()?;
            let most = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            let off = got.iter().zip(&want).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
            worst = worst.max(off / most);
        }
    }
    assert_eq!(step.plans(), 1);
    Ok(worst)
}

#[test]
fn optimizers_follow_torch_and_the_papers() {
    let (cases, data, mut failed) = (json("optimizers.json"), arrays("optimizers.npz"), vec![]);
    for b in halcyon_test::devices::devices("optimizers_follow_torch_and_the_papers", Level::O2) {
        let every = if b.id().starts_with("cpu") { 1 } else { halcyon_test::one_in(8) };
        let first = halcyon_test::drawn(&format!("optimizers {}", b.id()), every).unwrap_or(0);
        for (i, c) in cases.iter().enumerate().skip(first).step_by(every) {
            let most = match (c["kind"].as_str(), c["by"].as_str()) {
                // PyTorch's Muon computes the Newton-Schulz iteration in bf16.
                (Some("muon"), Some("torch")) => 2e-2,
                (Some("muon"), _) => 1e-4,
                _ if b.id().starts_with("cpu") => 1e-6,
                // Other devices round a product and a sum once (FMA). PyTorch rounds both.
                _ => 2e-6,
            };
            match follow(&b, i, c, &data) {
                Ok(off) if off <= most => {}
                Ok(off) => failed.push(format!("{}: {off:.2e} of {most:.0e}: {c}", b.id())),
                Err(e) => failed.push(format!("{}: {e}: {c}", b.id())),
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn schedules_follow_torch() {
    for c in json("schedules.json") {
        let s: Schedule = serde_json::from_value(c["schedule"].clone()).unwrap();
        let rate = float(&c, "rate");
        for (k, want) in c["rates"].as_array().unwrap().iter().enumerate() {
            let (got, want) = (s.rate(rate, k as u64), want.as_f64().unwrap());
            assert!(
                (got - want).abs() <= 1e-9 * want.abs().max(1e-3),
                "{}: step {k}: {got}, {want}",
                c["schedule"]
            );
        }
    }
}

#[test]
fn an_eager_step_equals_a_compiled_one() {
    let b = Backend::cpu().unwrap();
    let make = || Linear::new(&b, 3, 2).unwrap();
    let (x, y) = (b.randn([5, 3], DType::F32), b.randn([5, 2], DType::F32));
    let (one, other) = (make(), make());
    other
        .load_state_dict(
            &|n| Some(one.slot(n).unwrap().value().to_data()),
            &["weight".into(), "bias".into()],
            Strictness::Strict,
        )
        .unwrap();
    let rule = || Optimizer::builder(Adam::w().rate(0.05)).clip(Clip::Norm(0.5));
    let mut eager = rule().build(&one).unwrap();
    let compiled = rule().build(&other).unwrap();
    let mut step = TrainStep::new(&other, compiled, |m: &&Linear, t: &[Tensor]| {
        Ok(vec![mse_loss(&m.forward(&t[0]), &t[1], Reduction::Mean)])
    })
    .unwrap();
    for k in 0..20 {
        let (loss, grads) =
            loss_and_grads(&one, |m| Ok(mse_loss(&m.forward(&x), &y, Reduction::Mean))).unwrap();
        eager.step(&grads).unwrap();
        let made = step.run(&[&x, &y]).unwrap();
        let (a, b) = (loss.item::<f64>().unwrap(), made[0].item::<f64>().unwrap());
        assert!((a - b).abs() <= 1e-6 * a, "step {k}: {a}, {b}");
    }
    assert_eq!(step.plans(), 1);
}
