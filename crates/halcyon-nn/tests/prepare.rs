//! Prepared modules, compiled inference, training on a prepared module.

use halcyon::Error;
use halcyon::ir::TensorType;
use halcyon::ir::passes;
use halcyon::prelude::*;
use halcyon_nn::*;
use halcyon_test::{Rng, devices::devices};

fn net(b: &Backend) -> Sequential {
    Sequential::new()
        .then(Linear::new(b, 16, 32).unwrap())
        .then(Activation::Relu)
        .then(Dropout::new(0.5).unwrap())
        .then(BatchNorm::new(b, 32).unwrap())
        .then(Linear::new(b, 32, 4).unwrap())
}

fn input(b: &Backend, name: &str, rows: usize) -> Tensor {
    Tensor::from_slice(b, [rows, 16], &Rng::fresh(name).f32s(rows * 16)).unwrap()
}

fn close(a: &[f64], b: &[f64], most: f64) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= most)
}

#[test]
fn a_prepared_module_runs_at_its_level() {
    let test = "a_prepared_module_runs_at_its_level";
    for b in devices(test, Level::O2) {
        let model = net(&b);
        let x = input(&b, test, 5);
        let want = model.forward(&x).to_vec::<f64>().unwrap();
        let mut steps = vec![];
        for level in [Level::O0, Level::O2] {
            let p = prepare::prepare_model(&b, model.clone(), level).unwrap();
            assert_eq!((p.level(), p.parameters().len()), (level, model.parameters().len()));
            assert!(p.slots().iter().all(|(_, s)| s.value().backend().level() == level));
            let before = b.cache_stats().steps;
            // The input is on a handle of another level.
            let y = p.forward(&x);
            assert!(close(&y.to_vec::<f64>().unwrap(), &want, 1e-4), "{} at {level}", b.id());
            steps.push(b.cache_stats().steps - before);
        }
        assert!(steps[0] > steps[1] && steps[1] > 0, "{}: {steps:?}", b.id());
        // Converting a tensor between handles of one device copies nothing.
        let uploaded = b.counters().uploaded_bytes;
        let p = prepare::prepare_model(&b, model, Level::O1).unwrap();
        assert_eq!(b.counters().uploaded_bytes, uploaded, "{}", b.id());
        let wrong = Tensor::ones(&b, [2, 3], DType::F32);
        assert!(p.forward(&wrong).check().is_err());
    }
}

#[test]
fn compiled_inference_has_its_weights_as_constants() {
    let test = "compiled_inference_has_its_weights_as_constants";
    for b in devices(test, Level::O2) {
        let p = prepare::prepare_model(&b, net(&b), Level::O2).unwrap();
        let x = input(&b, test, 6);
        let want = p.forward(&x).to_vec::<f64>().unwrap();
        let weights = p.clone();
        let inference = prepare::optimize_for_inference(p, Some(&x), None).unwrap();
        assert_eq!(inference.plans(), 1, "the sample made the plan");
        let built = b.cache_stats().plans_built;
        let uploaded = b.counters().uploaded_bytes;
        let y = inference.forward(&x).unwrap().to_vec::<f64>().unwrap();
        assert!(close(&y, &want, 1e-4), "{}: {y:?} {want:?}", b.id());
        let now = (b.cache_stats().plans_built, b.counters().uploaded_bytes);
        assert_eq!(now, (built, uploaded), "{}: a warm run plans and uploads nothing", b.id());
        // Inputs of another size need another plan, which shares the weights on the device.
        let more = inference.forward(&input(&b, test, 7)).unwrap();
        assert_eq!((more.dims().unwrap().as_slice(), inference.plans()), (&[7, 4][..], 2));
        // Because the weights are constants, batch normalisation is folded into the neighbouring products.
        let session = inference.session(&[TensorType::new(DType::F32, [6, 16])]).unwrap();
        let host = [x.to_data().unwrap()];
        let exe = session.prepare(&host).unwrap();
        let applied: Vec<&str> = exe.plan().receipts.iter().map(|r| r.transformation.as_str()).collect();
        assert!(applied.contains(&passes::FOLD), "{}: {applied:?}", b.id());
        assert!(!exe.plan().consts.is_empty() || !exe.plan().packed.is_empty());
        let y = session.run(&host).unwrap()[0].to_vec::<f64>();
        assert!(close(&y, &want, 1e-4));
        // Later changes of the module have no effect on the inference.
        weights.slot("0.bias").unwrap().set(Tensor::full(weights.backend(), [32], 9.0, DType::F32)).unwrap();
        assert!(close(&inference.forward(&x).unwrap().to_vec::<f64>().unwrap(), &want, 1e-4));
        assert!(!close(&weights.forward(&x).to_vec::<f64>().unwrap(), &want, 1e-2));
    }
}

#[test]
fn optimising_a_module_reports_what_changed() {
    let test = "optimising_a_module_reports_what_changed";
    let b = Backend::cpu().unwrap();
    let (model, x) = (net(&b), input(&b, test, 32));
    let want = model.forward(&x).to_vec::<f64>().unwrap();
    let f = |m: &&Sequential, x: &[Tensor]| Ok(vec![m.forward(&x[0])]);
    let (inference, result) = prepare::optimize(&b, &model, Level::O2, &[&x], f).unwrap();
    assert!(result.success && result.level == Level::O2, "{result}");
    assert!(result.optimizations_applied.iter().any(|n| n == passes::FOLD), "{result}");
    assert_eq!(result.metrics.outputs[0].name, "output0");
    assert!(result.metrics.error.is_some_and(|e| e < 1e-5));
    assert_eq!(inference.backend().level(), Level::O2);
    assert!(close(&inference.forward(&x).unwrap().to_vec::<f64>().unwrap(), &want, 1e-4));
}

#[test]
fn training_goes_on_on_another_device() {
    let test = "training_goes_on_on_another_device";
    let data: Vec<f32> = Rng::fresh(test).f32s(12 * 16);
    let cpu = Backend::cpu().unwrap();
    let step = |m: &Sequential, o: &mut Optimizer| -> f64 {
        let b = m.slot("0.weight").unwrap().value().backend().clone();
        let x = Tensor::from_slice(&b, [12, 16], &data).unwrap();
        // In evaluation mode there is no dropout, so that all runs compute the same.
        let (loss, grads) = loss_and_grads(m, |m| Ok(evaluation(|| m.forward(&x)).sqr().mean(..))).unwrap();
        o.step(&grads).unwrap();
        loss.item::<f64>().unwrap()
    };
    // All runs start from these weights.
    let start = net(&cpu).state_dict().unwrap();
    let names: Vec<String> = start.iter().map(|(n, _)| n.clone()).collect();
    let fresh = || {
        let m = net(&cpu);
        let get = |name: &str| start.iter().find(|(n, _)| n == name).map(|(_, d)| Ok(d.clone()));
        m.load_state_dict(&get, &names, Strictness::Strict).unwrap();
        let o = Optimizer::new(&m, Adam::new().rate(0.01)).unwrap();
        (m, o)
    };
    let (m, mut o) = fresh();
    let want: Vec<f64> = (0..6).map(|_| step(&m, &mut o)).collect();
    for b in devices(test, Level::O2) {
        let (m, mut o) = fresh();
        let mut losses: Vec<f64> = (0..3).map(|_| step(&m, &mut o)).collect();
        let m = prepare::prepare_model(&b, m, Level::O2).unwrap();
        let (m, mut o) = prepare::optimize_for_training(m, o, None).unwrap();
        assert!(o.state().iter().all(|(_, t)| t.backend().id() == b.id()));
        losses.extend((0..3).map(|_| step(&m, &mut o)));
        assert!(losses[5] < losses[0] && close(&losses, &want, 1e-4), "{}: {losses:?} {want:?}", b.id());
    }
}

/// A step traces the forward of a prepared module. That forward converts the step's placeholders to the
/// module's handle.
#[test]
fn a_step_of_a_prepared_module_runs_at_its_level() {
    let test = "a_step_of_a_prepared_module_runs_at_its_level";
    for b in devices(test, Level::O2) {
        let x = input(&b, test, 6);
        let mut steps = vec![];
        let mut losses = vec![];
        for level in [Level::O0, Level::O2] {
            b.manual_seed(11);
            let layers = Sequential::new()
                .then(Linear::new(&b, 16, 8).unwrap())
                .then(Activation::Tanh)
                .then(Linear::new(&b, 8, 1).unwrap());
            let m = prepare::prepare_model(&b, layers, level).unwrap();
            let o = Optimizer::new(&m, Adam::new().rate(0.01)).unwrap();
            let (m, o) = prepare::optimize_for_training(m, o, None).unwrap();
            let f = |m: &&Prepared<Sequential>, x: &[Tensor]| Ok(vec![m.forward(&x[0]).sqr().mean(..)]);
            let mut step = TrainStep::new(&m, o, f).unwrap();
            // The batch is on another handle of the device than the module.
            let run = |step: &mut TrainStep<'_>| step.run(&[&x]).unwrap()[0].item::<f64>().unwrap();
            run(&mut step);
            let before = b.cache_stats().steps;
            losses.push(run(&mut step));
            steps.push(b.cache_stats().steps - before);
            // Gradients flow through a tensor that moves to another handle.
            let (_, grads) = loss_and_grads(&m, |m| Ok(m.forward(&x).sqr().mean(..))).unwrap();
            let g = grads.get("0.weight").unwrap().to_vec::<f32>().unwrap();
            assert!(g.iter().any(|v| *v != 0.0), "{}", b.id());
        }
        assert!(steps[0] > steps[1], "{}: {steps:?}", b.id());
        assert!((losses[0] - losses[1]).abs() < 1e-5, "{}: {losses:?}", b.id());
        let x = x.requires_grad().unwrap();
        let plain = b.with_level(Level::O0).unwrap();
        let y = (x.to(&plain).unwrap() * 3.0).sum(..);
        let grads = y.backward().unwrap();
        assert!(grads.get(&x).unwrap().to_vec::<f32>().unwrap().iter().all(|g| *g == 3.0));
    }
}

#[test]
fn a_dtype_without_a_policy_is_refused() {
    let b = Backend::cpu().unwrap();
    let of = |b: &Backend, d| {
        let prepared = prepare::prepare_model(b, net(b), b.level()).unwrap();
        prepare::optimize_for_training(prepared, (), Some(d))
    };
    let e = of(&b, DType::I32).unwrap_err();
    assert!(matches!(e, Error::Argument { .. }) && e.to_string().contains("bf16"), "{e}");
    let e = of(&b.with_level(Level::O1).unwrap(), DType::BF16).unwrap_err();
    assert!(e.to_string().contains("needs level O2"), "{e}");
    // Mixed precision is forced, so that it also applies on processors that are slower in bf16.
    let forced = Backend::builder().backend_type(BackendType::Cpu).amp(halcyon::AmpPolicy::Bf16);
    let forced = forced.force_amp(true).build().unwrap();
    assert_eq!(of(&forced, DType::BF16).unwrap().amp(), halcyon::AmpPolicy::Bf16);
    assert_eq!(of(&forced, DType::F32).unwrap().amp(), halcyon::AmpPolicy::None);
}

#[test]
fn a_forward_that_writes_buffers_is_refused_for_inference() {
    #[derive(Module)]
    struct Counter {
        seen: Buffer,
    }
    let b = Backend::cpu().unwrap();
    let counter = Counter { seen: Buffer::new(Tensor::zeros(&b, [1], DType::F32)) };
    counter.slots();
    let inference = Inference::new(&b, &counter, |c: &&Counter, x: &[Tensor]| {
        c.seen.write(c.seen.value() + 1.0)?;
        Ok(vec![x[0].relu()])
    })
    .unwrap();
    let e = inference.forward(&Tensor::ones(&b, [1], DType::F32)).unwrap_err();
    assert!(matches!(&e, Error::Unsupported { .. }) && e.to_string().contains("`seen`"), "{e}");
    assert_eq!(counter.seen.value().to_vec::<f32>().unwrap(), [0.0]);
    let none = Inference::new(&b, &counter, |_: &&Counter, _: &[Tensor]| Ok(vec![])).unwrap();
    assert!(none.forward(&Tensor::ones(&b, [1], DType::F32)).is_err());
}
