//! Options of training steps: checkpoints, memory budgets, accumulation, moving averages, mixed precision,
//! loss scaling.

mod gpt;

use gpt::{Gpt, Sizes, batch};
use halcyon::prelude::*;
use halcyon::{AmpPolicy, MixedPrecision};
use halcyon_nn::*;
use halcyon_test::devices::devices;

const SMALL: Sizes = Sizes { layers: 4, width: 32, heads: 2, context: 16, vocabulary: 40, dropout: 0.1 };

/// Rows of a batch. With so many rows, activations take most of the memory.
const ROWS: usize = 24;

/// Trains a language model with weights from seed 1 for `steps` steps. Returns the scratch memory of a step
/// in bytes, the losses, and the bytes of the trained parameters.
fn trained(b: &Backend, s: Sizes, checkpointed: bool, steps: usize) -> (u64, Vec<f32>, Vec<Vec<u8>>) {
    b.manual_seed(1);
    let model = Gpt::new(b, s, checkpointed).unwrap();
    let optimizer = Optimizer::new(&model, Sgd::new().rate(0.1)).unwrap();
    let mut step =
        TrainStep::new(&model, optimizer, |m: &&Gpt, x: &[Tensor]| Ok(vec![m.loss(&x[0], &x[1])?]))
            .unwrap()
            .seed(7);
    let first = batch(b, s, ROWS, 1).unwrap();
    let fit = step.fit(&[&first[0], &first[1]]).unwrap();
    let mut losses = vec![];
    for k in 0..steps as u64 {
        let [x, y] = batch(b, s, ROWS, k + 1).unwrap();
        losses.push(step.run(&[&x, &y]).unwrap()[0].item().unwrap());
    }
    let params =
        model.parameters().iter().map(|(_, p)| p.value().to_data().unwrap().bytes().to_vec()).collect();
    (fit.activations + fit.workspace, losses, params)
}

/// The model has dropout: the second computation of a checkpoint must draw the same random numbers as the
/// first.
#[test]
fn checkpoints_change_no_bit_and_take_less_memory() {
    let what = "checkpoints_change_no_bit_and_take_less_memory";
    if halcyon_test::left_out(what) {
        return;
    }
    for b in devices(what, Level::O1) {
        let (_, losses, params) = trained(&b, SMALL, false, 3);
        let (_, other, same) = trained(&b, SMALL, true, 3);
        assert_eq!(losses, other, "{}", b.id());
        assert!(params == same, "{}", b.id());
    }
    // From level O2 on, the bits may differ, because an epilogue may save one rounding of a product's sums.
    for b in devices(what, Level::O2) {
        let (kept, losses, _) = trained(&b, SMALL, false, 3);
        let (again, other, _) = trained(&b, SMALL, true, 3);
        assert!(
            losses.iter().zip(&other).all(|(a, o)| (a - o).abs() < 1e-5),
            "{}: {losses:?} {other:?}",
            b.id()
        );
        assert!(2 * again <= kept, "{}: {again} bytes with checkpoints, {kept} without", b.id());
    }
}

#[test]
fn a_memory_budget_is_kept_or_refused() {
    let b = Backend::cpu().unwrap();
    let sizes = Sizes { layers: 6, ..SMALL };
    let run = |budget: Option<u64>| {
        b.manual_seed(1);
        let model = Gpt::new(&b, sizes, false).unwrap();
        let optimizer = Optimizer::new(&model, Sgd::new().rate(0.1)).unwrap();
        let f = |m: &&Gpt, x: &[Tensor]| Ok(vec![m.loss(&x[0], &x[1])?]);
        let mut step = TrainStep::new(&model, optimizer, f).unwrap().seed(7);
        if let Some(bytes) = budget {
            step = step.memory_budget(MemoryBudget(bytes));
        }
        let [x, y] = batch(&b, sizes, ROWS, 1).unwrap();
        let fit = step.fit(&[&x, &y])?;
        let loss: f32 = step.run(&[&x, &y])?[0].item()?;
        let second: f32 = step.run(&[&x, &y])?[0].item()?;
        Ok::<_, halcyon::Error>((fit.activations + fit.workspace, loss, second, step.recomputed_parts()))
    };
    let plain = run(None).unwrap();
    assert_eq!(plain.3, 1);
    assert_eq!(run(Some(plain.0)).unwrap().3, 1);
    let half = run(Some(plain.0 / 2)).unwrap();
    assert!(half.0 <= plain.0 / 2 && half.3 > 1, "{half:?}, {plain:?}");
    assert!((half.1 - plain.1).abs() < 1e-5 && (half.2 - plain.2).abs() < 1e-4, "{half:?}, {plain:?}");
    let e = run(Some(1000)).unwrap_err();
    assert!(matches!(&e, halcyon::Error::OutOfMemory { free: 1000, .. }), "{e}");
    assert!(e.to_string().contains("Raise the memory budget"), "{e}");
}

/// Running statistics are written once, although the forward is computed twice.
#[test]
fn buffers_in_a_checkpoint_are_written_once() {
    for b in devices("buffers_in_a_checkpoint_are_written_once", Level::O2) {
        let run = |again: bool| {
            b.manual_seed(3);
            let model = (Linear::new(&b, 4, 3).unwrap(), BatchNorm::new(&b, 3).unwrap());
            let forward = |m: &(Linear, BatchNorm), x: &Tensor| m.1.forward(&m.0.forward(x)).tanh();
            let optimizer = Optimizer::new(&model, Sgd::new().rate(0.1)).unwrap();
            let f = move |m: &&(Linear, BatchNorm), x: &[Tensor]| {
                let y = match again {
                    true => checkpoint(&x[0], |x| forward(m, x)),
                    false => forward(m, &x[0]),
                };
                Ok(vec![y.sqr().sum(..)])
            };
            let mut step = TrainStep::new(&model, optimizer, f).unwrap();
            let x = b.randn([8, 4], DType::F32);
            (0..3).for_each(|_| drop(step.run(&[&x]).unwrap()));
            let all: Vec<Vec<f32>> = model.slots().iter().map(|(_, s)| s.value().to_vec().unwrap()).collect();
            // Outside of a training step, running statistics are written once too.
            let (_, grads) = loss_and_grads(&model, |m| {
                Ok(if again { checkpoint(&x, |x| forward(m, x)) } else { forward(m, &x) }.sum(..))
            })
            .unwrap();
            let g = grads.get("0.weight").unwrap().to_vec::<f32>().unwrap();
            let count = model.1.num_batches_tracked.value().item::<i64>().unwrap();
            (all, g, count)
        };
        let (plain, again) = (run(false), run(true));
        let pairs =
            plain.0.concat().into_iter().zip(again.0.concat()).chain(plain.1.into_iter().zip(again.1));
        for (a, c) in pairs {
            assert!((a - c).abs() < 1e-5, "{}: {a}, {c}", b.id());
        }
        assert_eq!((plain.2, again.2), (4, 4));
    }
}

#[test]
fn an_error_in_a_checkpoint_names_its_op() {
    let b = Backend::cpu().unwrap();
    let x = Tensor::ones(&b, [2, 3], DType::F32);
    let y = checkpoint(&x, |x| x.matmul(x));
    assert!(y.to_vec::<f32>().unwrap_err().to_string().contains("matmul"));
    assert!(checkpoint_many(&[], |_| Ok(vec![])).is_err());
}

/// `n` micro-batches and one update give the same parameters as one step with the whole batch.
#[test]
fn accumulated_gradients_are_those_of_the_whole_batch() {
    for b in devices("accumulated_gradients_are_those_of_the_whole_batch", Level::O2) {
        let x = b.randn([12, 5], DType::F32);
        let y = b.randn([12, 2], DType::F32);
        let run = |n: usize| {
            b.manual_seed(5);
            let m = Linear::new(&b, 5, 2).unwrap();
            let optimizer = Optimizer::builder(Adam::w().rate(0.01)).clip(Clip::Norm(0.5)).build(&m).unwrap();
            let mut step = TrainStep::new(&m, optimizer, |m: &&Linear, x: &[Tensor]| {
                Ok(vec![(m.forward(&x[0]) - &x[1]).sqr().mean(..)])
            })
            .unwrap()
            .accumulate(n as u64)
            .unwrap();
            let size = 12 / n;
            let mut before = m.weight.value().to_vec::<f32>().unwrap();
            for _ in 0..4 {
                for k in 0..n {
                    let part = |t: &Tensor| t.narrow(0, k * size, size);
                    step.run(&[&part(&x), &part(&y)]).unwrap();
                    let now = m.weight.value().to_vec::<f32>().unwrap();
                    // Only the last micro-batch changes the parameters.
                    assert_eq!(now != before, k + 1 == n, "{} {k} of {n}", b.id());
                    assert_eq!(step.accumulated() as usize, (k + 1) % n);
                    before = now;
                }
            }
            assert_eq!(step.with_optimizer(|o| o.steps()), 4);
            assert_eq!(step.plans(), if n == 1 { 1 } else { 2 });
            before
        };
        let whole = run(1);
        for n in [2, 3, 12] {
            for (a, w) in run(n).iter().zip(&whole) {
                assert!((a - w).abs() <= 2e-6 * w.abs().max(1.0), "{}: {a}, {w} with {n}", b.id());
            }
        }
    }
    let b = Backend::cpu().unwrap();
    let m = Linear::new(&b, 1, 1).unwrap();
    let step = TrainStep::new(&m, Optimizer::new(&m, Sgd::new()).unwrap(), |_: &&Linear, x: &[Tensor]| {
        Ok(x.to_vec())
    });
    assert!(step.unwrap().accumulate(0).is_err());
}

#[test]
fn moving_averages_follow_their_formula() {
    for b in devices("moving_averages_follow_their_formula", Level::O2) {
        let w = Param::new(Tensor::from_slice(&b, [2], &[1.0f32, -3.0]).unwrap());
        let optimizer = Optimizer::new(&w, Sgd::new().rate(0.5)).unwrap();
        let f = |w: &&Param, g: &[Tensor]| Ok(vec![(w.value() * &g[0]).sum(..)]);
        let mut step = TrainStep::new(&w, optimizer, f).unwrap().ema(0.9).unwrap();
        let (mut want, mut param) = ([1.0f64, -3.0], [1.0f64, -3.0]);
        for k in 0..5 {
            let g = [0.25 * k as f32, -1.0];
            step.run(&[&Tensor::from_slice(&b, [2], &g).unwrap()]).unwrap();
            for i in 0..2 {
                param[i] -= 0.5 * f64::from(g[i]);
                want[i] += 0.1 * (param[i] - want[i]);
            }
        }
        let near = |t: &Tensor, want: &[f64]| {
            let got = t.to_vec::<f64>().unwrap();
            assert!(got.iter().zip(want).all(|(a, w)| (a - w).abs() < 1e-5), "{}: {got:?} {want:?}", b.id());
        };
        let ema = step.averages().unwrap();
        near(&ema.state()[0].1, &want);
        near(&w.value(), &param);
        near(&ema.evaluate(|| w.value()), &want);
        assert!(ema.evaluate(|| !is_training()));
        near(&w.value(), &param);
        let kept = Tensor::from_slice(&b, [2], &[9.0f32, 8.0]).unwrap();
        let path = ema.state()[0].0.clone();
        ema.set_state(&path, kept).unwrap();
        assert!(ema.set_state("nothing", w.value()).is_err());
        ema.apply().unwrap();
        near(&w.value(), &[9.0, 8.0]);
        // The next step starts from the applied values.
        step.run(&[&Tensor::ones(&b, [2], DType::F32)]).unwrap();
        near(&w.value(), &[8.5, 7.5]);
    }
    let b = Backend::cpu().unwrap();
    let w = Param::new(Tensor::ones(&b, [1], DType::F32));
    let step =
        TrainStep::new(
            &w,
            Optimizer::new(&w, Sgd::new()).unwrap(),
            |_: &&Param, x: &[Tensor]| Ok(x.to_vec()),
        );
    assert!(step.unwrap().ema(1.0).is_err());
}

/// The new parameters and moments are written over the old ones.
#[test]
fn an_update_is_in_place() {
    for b in devices("an_update_is_in_place", Level::O2) {
        let layer = Linear::new(&b, 256, 256).unwrap();
        let f = |m: &&Linear, x: &[Tensor]| Ok(vec![m.forward(&x[0]).sqr().mean(..)]);
        let mut step = TrainStep::new(&layer, Optimizer::new(&layer, Adam::w()).unwrap(), f).unwrap();
        let x = b.randn([4, 256], DType::F32);
        let fit = step.fit(&[&x]).unwrap();
        // The outputs are only the loss, and not the three tensors of 256 KiB.
        assert!(fit.outputs < 1 << 16, "{}: {fit:?}", b.id());
        for _ in 0..3 {
            step.run(&[&x]).unwrap();
        }
        assert_eq!(step.with_optimizer(|o| o.steps()), 3);
    }
}

/// The losses of 60 training steps of a classifier with three layers, and the number of skipped steps.
fn losses(
    b: &Backend,
    policy: AmpPolicy,
    more: impl Fn(MixedPrecision) -> MixedPrecision,
) -> (Vec<f64>, u64) {
    b.manual_seed(11);
    let net =
        (Linear::new(b, 16, 64).unwrap(), Linear::new(b, 64, 64).unwrap(), Linear::new(b, 64, 4).unwrap());
    type Net = (Linear, Linear, Linear);
    let optimizer = Optimizer::new(&net, Adam::w().rate(3e-3)).unwrap();
    let f = |m: &&Net, x: &[Tensor]| {
        let y = m.2.forward(&m.1.forward(&m.0.forward(&x[0]).relu()).relu());
        Ok(vec![cross_entropy(&y, &x[1], CrossEntropyOptions::default())])
    };
    // Mixed precision is forced, because only the results matter here: the test also runs on processors that
    // are slower in the half type.
    let mixed = MixedPrecision { force: true, ..policy.into() };
    let mut step = TrainStep::new(&net, optimizer, f).unwrap().amp(more(mixed)).unwrap();
    let x = b.randn([128, 16], DType::F32);
    let labels = x.narrow(1, 0, 4usize).argmax(1);
    let all = (0..60).map(|_| step.run(&[&x, &labels]).unwrap()[0].item::<f64>().unwrap()).collect();
    (all, step.scale().unwrap().map_or(0, |s| s.1))
}

#[test]
fn half_types_end_within_two_percent_of_f32() {
    if halcyon_test::left_out("half_types_end_within_two_percent_of_f32") {
        return;
    }
    for b in devices("half_types_end_within_two_percent_of_f32", Level::O2) {
        let (full, _) = losses(&b, AmpPolicy::None, |m| m);
        assert!(full[59] < 0.6 * full[0], "{}: {full:?}", b.id());
        for policy in [AmpPolicy::Bf16, AmpPolicy::F16] {
            let (half, skipped) = losses(&b, policy, |m| m);
            let off = (half[59] - full[59]).abs() / full[59];
            assert!(off < 0.02, "{} {policy}: {} after {}", b.id(), half[59], full[59]);
            assert!(half != full, "{} {policy}: nothing was rounded", b.id());
            assert!(skipped < 5, "{} {policy}: {skipped} steps were skipped", b.id());
            // If only ops that the model does not have are allowed, or all products are excepted, the step
            // computes in f32.
            if policy == AmpPolicy::Bf16 {
                let none = losses(&b, policy, |m| MixedPrecision { only: Some(vec!["conv".into()]), ..m });
                assert_eq!(none.0, full, "{}", b.id());
                let none = losses(&b, policy, |m| MixedPrecision { f32: vec!["matmul".into()], ..m });
                assert_eq!(none.0, full, "{}", b.id());
            }
        }
    }
}

/// In one step, the product of the parameter and the batch overflows f16.
#[test]
fn a_planted_overflow_skips_exactly_its_step() {
    for b in devices("a_planted_overflow_skips_exactly_its_step", Level::O2) {
        let layer = Linear::new(&b, 8, 8).unwrap();
        let optimizer = Optimizer::new(&layer, Adam::new().rate(0.01)).unwrap();
        let f = |m: &&Linear, x: &[Tensor]| Ok(vec![m.forward(&x[0]).sqr().mean(..)]);
        let mixed = MixedPrecision { force: true, ..AmpPolicy::F16.into() };
        let mut step = TrainStep::new(&layer, optimizer, f).unwrap().amp(mixed).unwrap();
        step = step.loss_scaler(Some(LossScaler { initial: 256.0, ..LossScaler::default() })).unwrap();
        step = step.ema(0.5).unwrap();
        let mut before = layer.weight.value().to_vec::<f32>().unwrap();
        for k in 0..6 {
            let size = if k == 3 { 3e5 } else { 1.0 };
            let x = b.randn([4, 8], DType::F32) * size;
            step.run(&[&x]).unwrap();
            let now = layer.weight.value().to_vec::<f32>().unwrap();
            assert_eq!(now == before, k == 3, "{}: step {k}", b.id());
            let want = if k < 3 { (256.0, 0) } else { (128.0, 1) };
            assert_eq!(step.scale().unwrap(), Some(want), "{}: step {k}", b.id());
            before = now;
        }
        assert!(
            step.averages()
                .unwrap()
                .state()
                .iter()
                .all(|(_, t)| { t.to_vec::<f32>().unwrap().iter().all(|v| v.is_finite()) })
        );
    }
}

/// A step that moves to a backend with f16 gets the same mixed precision and the same loss scaler as a step
/// that is made on that backend.
#[test]
fn a_step_that_moves_to_f16_gets_a_loss_scaler() {
    let cpu = || Backend::builder().backend_type(BackendType::Cpu);
    let f16 = || cpu().amp(AmpPolicy::F16).force_amp(true);
    let plain = cpu().build().unwrap();
    let half = f16().build().unwrap();
    let scaled = f16().loss_scale(64.0).build().unwrap();
    let f = |m: &&Linear, x: &[Tensor]| Ok(vec![m.forward(&x[0]).sqr().mean(..)]);
    for (to, initial) in [(&half, 65536.0), (&scaled, 64.0)] {
        let layer = Linear::new(&plain, 8, 8).unwrap();
        let mut step = TrainStep::new(&layer, Optimizer::new(&layer, Adam::new()).unwrap(), f).unwrap();
        let x = |b: &Backend| Tensor::ones(b, [4, 8], DType::F32);
        step.run(&[&x(&plain)]).unwrap();
        assert_eq!(step.scale().unwrap(), None);
        step.to_device(to).unwrap();
        assert_eq!(step.scale().unwrap(), Some((initial, 0)));
        assert_eq!(step.mixed_precision().unwrap().policy, AmpPolicy::F16);
        // The second step overflows and is skipped. The third step runs.
        step.run(&[&(x(to) * f32::INFINITY)]).unwrap();
        step.run(&[&x(to)]).unwrap();
        assert_eq!(step.scale().unwrap(), Some((initial / 2.0, 1)));
        assert!(layer.weight.value().to_vec::<f32>().unwrap().iter().all(|v| v.is_finite()));
        // If the step already has a scaler, the scaler keeps its state.
        step.to_device(&scaled).unwrap();
        assert_eq!(step.scale().unwrap(), Some((initial / 2.0, 1)));
    }
    // Settings that the step took from one backend are replaced by the settings of the next backend.
    let layer = Linear::new(&half, 8, 8).unwrap();
    let mut step = TrainStep::new(&layer, Optimizer::new(&layer, Adam::new()).unwrap(), f).unwrap();
    step.to_device(&plain).unwrap();
    assert!(step.scale().unwrap().is_none() && step.mixed_precision().is_none());
    // A scaler must not be added or removed between the batches of one update.
    let mut step = step.accumulate(2).unwrap();
    let x = Tensor::ones(&plain, [4, 8], DType::F32);
    step.run(&[&x]).unwrap();
    let e = step.to_device(&half).unwrap_err();
    assert!(
        matches!(e, halcyon::Error::Argument { .. }) && e.to_string().contains("finish the update"),
        "{e}"
    );
    assert_eq!(step.backend().id(), plain.id());
    step.run(&[&x]).unwrap();
    step.to_device(&half).unwrap();
    assert_eq!(step.scale().unwrap(), Some((65536.0, 0)));
    step.to_device(&plain).unwrap();
    assert!(step.scale().unwrap().is_none() && step.mixed_precision().is_none());
    // A new scaler in the middle of an update is refused too.
    step.run(&[&x]).unwrap();
    let e = step.loss_scaler(Some(LossScaler::default())).unwrap_err();
    assert!(e.to_string().contains("finish the update"), "{e}");
    // A step with its own policy keeps this policy.
    let layer = Linear::new(&plain, 8, 8).unwrap();
    let step = TrainStep::new(&layer, Optimizer::new(&layer, Adam::new()).unwrap(), f).unwrap();
    let mut step = step.amp(AmpPolicy::Bf16).unwrap();
    step.to_device(&half).unwrap();
    assert_eq!((step.scale().unwrap(), step.mixed_precision().unwrap().policy), (None, AmpPolicy::Bf16));
}

/// Every op of a step that reads a parameter twice and accumulates several batches has a span. The ops that
/// sum gradients have the line that makes the graph of the step.
#[test]
fn sums_of_gradients_name_the_line_of_the_step() {
    let b = Backend::cpu().unwrap();
    let layer = Linear::new(&b, 4, 4).unwrap();
    let f = |m: &&Linear, x: &[Tensor]| Ok(vec![m.forward(&m.forward(&x[0])).sqr().mean(..)]);
    let step = TrainStep::new(&layer, Optimizer::new(&layer, Sgd::new()).unwrap(), f).unwrap();
    let step = step.accumulate(2).unwrap();
    let x = Tensor::ones(&b, [3, 4], DType::F32);
    let line = line!() + 1;
    let graph = step.graph(&[&x]).unwrap().graph;
    let text = graph.to_string();
    assert!(graph.nodes().iter().all(|n| n.span.is_known()), "{text}");
    let place = format!("{}:{line}", file!());
    let adds = graph.nodes().iter().filter(|n| n.op.name() == "add" && n.span.text() == place);
    assert!(adds.count() >= 4, "the sums of two gradients and of two batches, of each parameter: {text}");
}

/// The scale and the parameter after each step equal those of PyTorch's GradScaler.
#[test]
fn the_scale_follows_pytorch() {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/scaler.json");
    let cases: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    for b in devices("the_scale_follows_pytorch", Level::O2) {
        for c in cases.as_array().unwrap() {
            let number = |k: &str| c[k].as_f64().unwrap();
            let scaler = LossScaler {
                initial: number("initial"),
                growth: number("growth"),
                backoff: number("backoff"),
                interval: number("interval") as u32,
            };
            let w = Param::new(Tensor::ones(&b, [3], DType::F32));
            let optimizer = Optimizer::new(&w, Sgd::new().rate(0.5)).unwrap();
            let f = |w: &&Param, g: &[Tensor]| Ok(vec![(w.value() * &g[0]).sum(..)]);
            let mut step = TrainStep::with_scaler(&w, optimizer, scaler, f).unwrap();
            let rows = |k: &str| c[k].as_array().unwrap().clone();
            for (k, ((g, scale), value)) in
                rows("gradients").iter().zip(rows("scales")).zip(rows("values")).enumerate()
            {
                let g: Vec<f32> =
                    g.as_array().unwrap().iter().map(|v| v.as_str().unwrap().parse().unwrap()).collect();
                step.run(&[&Tensor::from_slice(&b, [3], &g).unwrap()]).unwrap();
                assert_eq!(step.scale().unwrap().unwrap().0, scale.as_f64().unwrap(), "{} step {k}", b.id());
                let got = w.value().to_vec::<f64>().unwrap();
                for (a, v) in got.iter().zip(value.as_array().unwrap()) {
                    assert!((a - v.as_f64().unwrap()).abs() < 1e-6, "{} step {k}: {got:?}", b.id());
                }
            }
        }
    }
}

/// Scratch memory and time of a language model with and without checkpoints. Prints figures; run it by name.
#[test]
#[ignore = "measures a large model"]
fn gpt_mini_with_and_without_checkpoints() {
    let b = Backend::cpu().unwrap();
    let s = Sizes { layers: 6, width: 384, heads: 6, context: 256, vocabulary: 65, dropout: 0.0 };
    let mut results = vec![];
    for (checkpointed, budget) in [(false, None), (true, None), (false, Some(1u64 << 28))] {
        b.manual_seed(1);
        let model = Gpt::new(&b, s, checkpointed).unwrap();
        let optimizer = Optimizer::new(&model, Adam::w().rate(1e-3)).unwrap();
        let mut step =
            TrainStep::new(&model, optimizer, |m: &&Gpt, x: &[Tensor]| Ok(vec![m.loss(&x[0], &x[1])?]))
                .unwrap();
        if let Some(bytes) = budget {
            step = step.memory_budget(MemoryBudget(bytes));
        }
        let [x, y] = batch(&b, s, 16, 1).unwrap();
        let fit = step.fit(&[&x, &y]).unwrap();
        step.run(&[&x, &y]).unwrap()[0].item::<f32>().unwrap();
        let mut times = vec![];
        for _ in 0..3 {
            let start = std::time::Instant::now();
            step.run(&[&x, &y]).unwrap()[0].item::<f32>().unwrap();
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        println!(
            "checkpointed {checkpointed}, budget {budget:?}: scratch {} MiB, {:.2} s, {} parts",
            (fit.activations + fit.workspace) >> 20,
            times[1],
            step.recomputed_parts()
        );
        results.push((fit.activations + fit.workspace, times[1]));
    }
    assert!(2 * results[1].0 <= results[0].0 && results[1].1 < 1.4 * results[0].1, "{results:?}");
}

/// Steps and time of an update of 60 parameters. Prints figures; run it by name.
#[test]
#[ignore = "measures"]
fn an_update_of_60_parameters() {
    for kind in [BackendType::Cpu, BackendType::OpenCl] {
        for without in ["", "in-place updates"] {
            let b = Backend::builder().backend_type(kind);
            let b = if without.is_empty() { b } else { b.without(without) };
            let Ok(b) = b.build() else { continue };
            let params: Vec<Param> =
                (0..60).map(|_| Param::new(Tensor::ones(&b, [384, 384], DType::F32))).collect();
            let optimizer = Optimizer::new(&params, Adam::w()).unwrap();
            let mut step = TrainStep::new(&params, optimizer, |p: &&Vec<Param>, _: &[Tensor]| {
                let sums: Vec<Tensor> = p.iter().map(|p| p.value().sqr().sum(..)).collect();
                Ok(vec![sums.into_iter().reduce(|a, c| a + c).unwrap()])
            })
            .unwrap();
            step.run(&[]).unwrap()[0].item::<f32>().unwrap();
            let before = b.cache_stats().steps;
            let mut times = vec![];
            for _ in 0..20 {
                let start = std::time::Instant::now();
                step.run(&[]).unwrap()[0].item::<f32>().unwrap();
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
            times.sort_by(f64::total_cmp);
            let steps = (b.cache_stats().steps - before) / 20;
            println!(
                "{} without {without:?}: {steps} steps, {:.1} ms, {:?}",
                b.id(),
                times[10],
                step.fit(&[]).unwrap()
            );
        }
    }
}
