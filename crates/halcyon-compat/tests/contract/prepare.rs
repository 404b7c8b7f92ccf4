//! Rows S0, S2 and S4: preparing models, optimisation results, strategies, deprecated names, examples.

#[path = "../../../../examples/08_compare_backends.rs"]
mod compare_backends;
#[path = "../../../../examples/07_cross_platform.rs"]
mod cross_platform;
#[path = "../../../../examples/09_inference_pipeline.rs"]
mod inference_pipeline;

use crate::machine;
use halcyon::ir::{Graph, TensorType, passes};
use halcyon::prelude::*;
use halcyon::{AmpPolicy, BackendType as B, ConstData, Error, OnnxSession, Session};
use halcyon_compat::factory::*;
use halcyon_compat::training::{resolve_amp_config, resolve_device};
use halcyon_nn::{
    Activation, Adam, Linear, LoadWeights, ModuleExt, Optimizer as Update, Sequential, Strictness, TrainStep,
};
use halcyon_test::{Rng, devices::devices, root};

/// A small network with the same weights on every backend.
fn net(b: &Backend) -> Sequential {
    b.manual_seed(3);
    Sequential::new()
        .then(Linear::new(b, 8, 16).unwrap())
        .then(Activation::Tanh)
        .then(Linear::new(b, 16, 4).unwrap())
}

fn values(name: &str, n: usize) -> Vec<f32> {
    Rng::fresh(name).f32s(n)
}

/// exp(x) + sqrt(x + 2), which fuses.
fn graph() -> (Graph, [ConstData; 1]) {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [8, 16]));
    let (e, two) = (g.exp(x).unwrap(), g.lit(x, 2.0));
    let y = g.add(x, two).unwrap();
    let y = g.sqrt(y).unwrap();
    let y = g.add(e, y).unwrap();
    g.output("y", y);
    (g, [ConstData::from_slice(&[8, 16], &values("graph", 128)).unwrap()])
}

fn close(a: &[f64], b: &[f64], most: f64) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= most)
}

#[test]
fn s0_05_the_policy_can_be_applied() {
    let _m = machine::with(&[(B::Cuda, 1)]);
    let b = get_backend(Some("cpu"), None).unwrap();
    let of = |name: &str| resolve_amp_config(&resolve_device(name).unwrap()).dtype;
    // No mixed precision on the CPU.
    let plain = b.optimize_for_training(net(&b), (), of("cpu")).unwrap();
    assert_eq!((of("cpu"), plain.amp()), (None, AmpPolicy::None));
    // A GPU's policy is f16. A backend applies it, or returns an error that names f16 if its plans cannot use
    // f16. The device of this test computes on the CPU, which keeps f32 with a warning if f16 is slower.
    let gpu = BackendFactory::create("cuda", None).unwrap();
    match gpu.optimize_for_training(net(&gpu), (), of("cuda")) {
        Ok(mixed) => {
            let told = mixed.backend().warnings().iter().any(|w| w.contains("f16"));
            assert!(mixed.amp() == AmpPolicy::F16 || told, "{:?}", mixed.backend().warnings());
        }
        Err(e) => {
            assert!(matches!(&e, Error::Unsupported { .. }) && e.to_string().contains("f16"), "{e}")
        }
    }
}

#[test]
fn s2_01_every_backend_prepares_models_of_every_kind() {
    let test = "s2_01_every_backend_prepares_models_of_every_kind";
    let image = ConstData::from_slice(&[1, 1, 8, 8], &values(test, 64)).unwrap();
    for b in devices(test, Level::O2) {
        let x = Tensor::from_slice(&b, [3, 8], &values(test, 24)).unwrap();
        let module = net(&b);
        let want = module.forward(&x).to_vec::<f64>().unwrap();
        let module = b.prepare_model(module, Level::O1).unwrap();
        assert_eq!((module.level(), module.backend().id()), (Level::O1, b.id()));
        assert!(close(&module.forward(&x).to_vec::<f64>().unwrap(), &want, 1e-5), "{}", b.id());

        let (g, sample) = graph();
        let cpu = Backend::cpu().unwrap();
        let model = Session::new(&cpu, g);
        let want = model.run(&sample).unwrap()[0].to_vec::<f64>();
        let model = b.prepare_model(model, "conservative").unwrap();
        assert_eq!((model.backend().level(), model.backend().id()), (Level::O1, b.id()));
        assert!(close(&model.run(&sample).unwrap()[0].to_vec::<f64>(), &want, 1e-5), "{}", b.id());

        let model = OnnxSession::open(&cpu, root().join("models/digits.onnx")).unwrap();
        let run = |m: &OnnxSession| m.run([("image", &image)]).unwrap()[0].to_vec::<f64>().unwrap();
        let want = run(&model);
        let model = b.prepare_model(model, None).unwrap();
        assert_eq!((model.backend().level(), model.backend().id()), (Level::O2, b.id()));
        assert!(close(&run(&model), &want, 1e-5), "{}", b.id());
    }
}

#[test]
fn s2_03_models_run_at_the_level_of_their_backend_or_their_own() {
    let m = machine::with(&[(B::Cuda, 1)]);
    let b = CpuBackend::new("O1").unwrap();
    assert_eq!((b.level(), b.backend_name()), (Level::O1, "cpu"));
    let nvidia =
        NvidiaBackend::with_config(BackendConfig { level: Level::O0, ..Default::default() }).unwrap();
    assert_eq!((nvidia.level(), nvidia.selection().device.id.as_str()), (Level::O0, "cuda:0"));
    assert_eq!(NvidiaBackend::new(None).unwrap().level(), Level::O2);
    drop(m);
    let _m = machine::with(&[]);
    assert_eq!(NvidiaBackend::new("O2").unwrap_err().exit_code(), 4);
    assert_eq!(AmdBackend::new("O2").unwrap_err().exit_code(), 4);
    assert_eq!(IntelBackend::new(Level::O2).unwrap_err().exit_code(), 4);
    assert!(TpuBackend::new(Level::O2).is_err());
    assert_eq!(CpuBackend::new("fast").unwrap_err().exit_code(), 2);
    let (g, sample) = graph();
    let steps = |level: Option<Level>| {
        let model = b.prepare_model(Session::new(&b, g.clone()), level).unwrap();
        let exe = model.prepare(&sample).unwrap();
        (model.backend().level(), exe.plan().steps.len())
    };
    assert_eq!(steps(None).0, Level::O1);
    let ((_, single), (_, fused)) = (steps(Some(Level::O0)), steps(Some(Level::O2)));
    assert!(single > 1 && fused == 1, "{single} {fused}");
}

#[test]
fn s2_06_the_name_alone_switches_a_prepared_model() {
    let test = "s2_06_the_name_alone_switches_a_prepared_model";
    let x = values(test, 40);
    let answer = |name: &str| {
        let backend = BackendFactory::create(name, None).unwrap();
        let model = backend.prepare_model(net(&backend), "O2").unwrap();
        let inputs = Tensor::from_slice(&backend, [5, 8], &x).unwrap();
        (backend.id().to_string(), model.forward(&inputs).to_vec::<f64>().unwrap())
    };
    let (_, want) = answer("cpu");
    for b in devices(test, Level::O2) {
        let (id, got) = answer(b.info().backend.id());
        assert_eq!(id, b.id());
        assert!(close(&got, &want, 1e-4), "{id}: {got:?} {want:?}");
    }
}

#[test]
fn s2_07_weights_move_between_backends_bit_for_bit() {
    let test = "s2_07_weights_move_between_backends_bit_for_bit";
    let dir = tempfile::tempdir().unwrap();
    let all = devices(test, Level::O2);
    let first = net(&all[0]);
    let bits = |m: &Sequential| -> Vec<(String, Vec<u8>)> {
        let dict = m.state_dict().unwrap();
        dict.into_iter().map(|(n, d)| (n, d.bytes().to_vec())).collect()
    };
    let want = bits(&first);
    // From each device to the next, and back to the first.
    let mut path = dir.path().join("0.safetensors");
    first.save(&path).unwrap();
    for (i, b) in all.iter().chain(&all[..1]).enumerate() {
        let m = net(b);
        m.map(|_, t| Ok(t * 0.0)).unwrap();
        m.load(&path, Strictness::Strict).unwrap();
        assert!(m.slots().iter().all(|(_, s)| s.value().backend().id() == b.id()));
        assert_eq!(bits(&m), want, "{}", b.id());
        path = dir.path().join(format!("{}.safetensors", i + 1));
        m.save(&path).unwrap();
        // The dtype is converted to that of the model that loads.
        let half = net(b);
        half.to_dtype(DType::BF16).unwrap();
        half.load(&path, Strictness::Strict).unwrap();
        for ((_, h), (_, f)) in half.parameters().iter().zip(m.parameters()) {
            let rounded = f.value().cast(DType::BF16).to_vec::<f32>().unwrap();
            assert_eq!(
                (h.value().dtype().unwrap(), h.value().to_vec::<f32>().unwrap()),
                (DType::BF16, rounded)
            );
        }
    }
}

/// Inference and training through the interface, on one backend.
fn infers_and_trains(b: &Backend, test: &str) {
    let x = Tensor::from_slice(b, [6, 8], &values(test, 48)).unwrap();
    let module = net(b);
    let want = module.forward(&x).to_vec::<f64>().unwrap();
    let prepared = b.prepare_model(module.clone(), Level::O1).unwrap();
    // With a sample, the first call plans nothing. A prepared module keeps its level.
    let fast = b.optimize_for_inference(prepared, Some(&x), None).unwrap();
    assert_eq!((fast.plans(), fast.backend().level()), (1, Level::O1));
    let built = b.cache_stats().plans_built;
    let got = fast.forward(&x).unwrap().to_vec::<f64>().unwrap();
    assert!(close(&got, &want, 1e-4), "{}: {got:?} {want:?}", b.id());
    assert_eq!(b.cache_stats().plans_built, built, "{}", b.id());
    // Without a sample, the first call plans; a module that is not prepared gets the backend's level.
    let lazy = b.optimize_for_inference(module.clone(), None, None).unwrap();
    assert_eq!((lazy.plans(), lazy.backend().level()), (0, b.level()));
    lazy.forward(&x).unwrap();
    let e = b.optimize_for_inference(module.clone(), None, Some(DType::I32)).unwrap_err();
    assert_eq!(e.exit_code(), 2, "{e}");

    let (g, sample) = graph();
    let model = b.optimize_for_inference(Session::new(b, g), Some(&sample[..]), None).unwrap();
    let built = b.cache_stats().plans_built;
    model.run(&sample).unwrap();
    assert_eq!(b.cache_stats().plans_built, built);

    // With an optimizer, the call returns the module and the optimizer, and training goes on.
    let optimizer = Update::new(&module, Adam::new().rate(0.01)).unwrap();
    let (model, optimizer) = b.optimize_for_training(module, optimizer, None).unwrap();
    let mut step = TrainStep::new(&*model, optimizer, |m: &&Sequential, x: &[Tensor]| {
        Ok(vec![m.forward(&x[0]).sqr().mean(..)])
    })
    .unwrap();
    let losses: Vec<f64> = (0..5).map(|_| step.run(&[&x]).unwrap()[0].item().unwrap()).collect();
    assert!(losses[4] < losses[0], "{}: {losses:?}", b.id());
    let module = net(b);
    let alone: Prepared<Sequential> = b.optimize_for_training(module, (), None).unwrap();
    assert_eq!(alone.parameters().len(), 4);
}

#[test]
fn s4_03_models_are_optimised_for_inference_and_training() {
    let test = "s4_03_models_are_optimised_for_inference_and_training";
    for b in devices(test, Level::O2) {
        infers_and_trains(&b, test);
    }
}

/// The same over the drivers of CUDA and ROCm, with stand-ins for the vendors' libraries.
#[test]
#[cfg(all(unix, feature = "cuda", feature = "rocm"))]
fn s4_03_over_the_drivers() {
    use halcyon::hal::Driver;
    machine::alone("prepare::s4_03_over_the_drivers", || {
        for s in halcyon_test::standins::all() {
            halcyon::hal::registry::register(s.driver.clone()).unwrap();
            let name = s.driver.kind().vendor();
            infers_and_trains(&BackendFactory::create(name, None).unwrap(), "s4_03_over_the_drivers");
        }
    });
}

#[test]
fn s4_04_modules_move_as_a_whole_and_a_scope_cleans_up() {
    let test = "s4_04_modules_move_as_a_whole_and_a_scope_cleans_up";
    let cpu = Backend::cpu().unwrap();
    for b in devices(test, Level::O2) {
        let module = net(&cpu);
        b.to_device(&module).unwrap();
        assert!(module.slots().iter().all(|(_, s)| s.value().backend().id() == b.id()));
        let x = b.to_device(&Tensor::ones(&cpu, [2, 8], DType::F32)).unwrap();
        assert_eq!(x.backend().id(), b.id());
        module.forward(&x).eval().unwrap();
        drop(x);
        {
            let scope = b.scope();
            let model = scope.prepare_model(net(&scope), "O2").unwrap();
            model.forward(&Tensor::ones(&scope, [64, 8], DType::F32)).eval().unwrap();
        }
        assert_eq!((b.memory().cached, b.cache_stats().programs), (0, 0), "{}", b.id());
    }
}

#[test]
fn s4_05_levels_have_aliases_in_any_case() {
    for (name, level) in [
        ("O0", Level::O0),
        ("none", Level::O0),
        ("Debug", Level::O0),
        ("o1", Level::O1),
        ("CONSERVATIVE", Level::O1),
        ("Balanced", Level::O2),
        ("O2", Level::O2),
    ] {
        assert_eq!(name.parse::<OptimizationLevel>().unwrap(), level, "{name}");
        let b = CpuBackend::new(name).unwrap();
        assert_eq!(b.level(), level, "{name}");
    }
    // O3 and its alias are one level, whether this version supports it or not.
    let of = |name: &str| name.parse::<OptimizationLevel>().map_err(|e| e.exit_code());
    assert_eq!(of("O3"), of("Aggressive"));
    assert_eq!(levels().len(), 3 + usize::from(of("O3").is_ok()));
    let e = CpuBackend::new("turbo").unwrap_err();
    assert!(
        e.exit_code() == 2 && e.to_string().contains("turbo") && e.to_string().contains("balanced"),
        "{e}"
    );
}

#[test]
fn s4_07_optimisers_return_the_model_and_a_result() {
    let test = "s4_07_optimisers_return_the_model_and_a_result";
    let (g, sample) = graph();
    for b in devices(test, Level::O2) {
        let optimizer = get_optimizer(Some(b.info().backend.id())).unwrap();
        let model = Session::new(optimizer.backend(), g.clone());
        let (model, result) = optimizer.optimize(model, OptimizationLevel::O2, &sample).unwrap();
        assert!(result.success && result.level == Level::O2, "{result}");
        let plan = model.prepare(&sample).unwrap();
        let changed: Vec<&str> = plan.plan().receipts.iter().map(|r| r.transformation.as_str()).collect();
        assert_eq!(result.optimizations_applied, changed, "only what changed the executable");
        assert!(changed.contains(&passes::FUSION));
        let dict = result.to_dict().unwrap();
        assert_eq!((&dict["success"], &dict["level"]), (&true.into(), &"O2".into()));
        for key in ["optimizations_applied", "warnings", "metrics"] {
            assert!(!dict[key].is_null(), "{key}");
        }
        assert!(dict["metrics"]["time_after_ms"].as_f64().unwrap() > 0.0);
        // A module gives its compiled inference.
        let x = Tensor::from_slice(&b, [4, 8], &values(test, 32)).unwrap();
        let module = net(&b);
        let want = module.forward(&x).to_vec::<f64>().unwrap();
        let (inference, result) = optimizer.optimize_module(module, "balanced", &x).unwrap();
        assert!(result.success, "{result}");
        let x = optimizer.backend().to_device(&x).unwrap();
        let got = inference.forward(&x).unwrap().to_vec::<f64>().unwrap();
        assert!(close(&got, &want, 1e-4), "{}", b.id());
    }
    let _m = machine::with(&[(B::Rocm, 1)]);
    assert_eq!(get_optimizer(None).unwrap().backend().selection().device.id, "rocm:0");
    assert_eq!(get_optimizer(Some("amdd")).unwrap_err().exit_code(), 2);
}

#[test]
fn s4_08_strategies_have_measured_speed_ups_or_none() {
    let strategies = get_optimizer(Some("cpu")).unwrap().get_available_strategies();
    for s in &strategies {
        println!("{}: {:?}", s.name, s.speedup_estimate);
        assert!(!s.name.is_empty() && !s.description.is_empty());
        assert!(s.applicable_levels.contains(&Level::O3) && !s.applicable_levels.contains(&Level::O0));
        assert!(s.speedup_estimate.is_none_or(|g| g.is_finite() && g > 0.0), "{s:?}");
        assert_eq!(s.to_dict().unwrap()["name"], s.name.as_str());
    }
    let of = |name: &str| strategies.iter().find(|s| s.name == name).unwrap();
    assert!(of(passes::FUSION).speedup_estimate.is_some());
    assert_eq!(of(passes::TUNED).speedup_estimate, None, "nothing is tuned on the CPU");
    assert_eq!(of(passes::FUSION).applicable_levels[0], Level::O1);
    assert_eq!(of(passes::EPILOGUES).applicable_levels[0], Level::O2);
    // The estimates are kept: a second request measures nothing.
    assert_eq!(get_optimizer(Some("cpu")).unwrap().get_available_strategies(), strategies);
}

#[test]
#[allow(deprecated)]
fn s4_09_old_names_still_work() {
    let _m = machine::with(&[]);
    let b = CpuBackend::new("O2").unwrap();
    let dict = b.get_device_info_dict(None).unwrap();
    let info = b.get_device_info(None).unwrap();
    assert_eq!((&dict["device_name"], &dict["backend"]), (&info.device_name.as_str().into(), &"cpu".into()));
    let (g, sample) = graph();
    let optimizer = get_optimizer(Some("cpu")).unwrap();
    let model = Session::new(optimizer.backend(), g);
    let want = model.run(&sample).unwrap()[0].to_vec::<f64>();
    let model = optimizer.optimize_legacy(model, "O1", &sample).unwrap();
    assert_eq!(model.backend().level(), Level::O1);
    assert!(close(&model.run(&sample).unwrap()[0].to_vec::<f64>(), &want, 1e-5));
}

#[test]
fn s4_10_the_examples_run_on_every_backend() {
    let test = "s4_10_the_examples_run_on_every_backend";
    for b in devices(test, Level::O2) {
        let name = b.info().backend.id();
        let run = cross_platform::train(Some(name), 12).unwrap();
        assert!(run.losses[11] < run.losses[0] / 2.0 && run.accuracy > 0.9, "{name}: {run:?}");
        assert_eq!(cross_platform::cpu_warning(&b).is_some(), name == "cpu", "{name}");

        let (ms, device, runs) = compare_backends::measure(b.info().backend).unwrap();
        println!("{name}: {ms:.3} ms per iteration on {device}");
        assert!(ms > 0.0 && device == b.info().name);
        assert_eq!(runs, compare_backends::ITERATIONS as u64, "every iteration runs on the device");

        let x = Tensor::from_slice(&Backend::cpu().unwrap(), [3, 8], &values(test, 24)).unwrap();
        let make = |b: &Backend| Ok(net(b));
        let (predict, info) =
            inference_pipeline::create_inference_pipeline(Some(name), make, Some(&x)).unwrap();
        let want = net(&b).forward(&x.to(&b).unwrap()).to_vec::<f64>().unwrap();
        assert!(close(&predict(&x).unwrap().to_vec::<f64>().unwrap(), &want, 1e-4), "{name}");
        assert_eq!(info.device_name, b.info().name);
    }
    assert_eq!(compare_backends::WARM_UPS, 3);
}
