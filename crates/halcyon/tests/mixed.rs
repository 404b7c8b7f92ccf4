//! Mixed precision: products of the op table in bf16 compared with float64, and whole networks compared with
//! their f32 plans.

use halcyon::ir::lower::lower;
use halcyon::ir::ops::{Conv, Op};
use halcyon::ir::passes::{MIXED, RECOGNITION};
use halcyon::ir::plan::{Plan, StepWork};
use halcyon::ir::reference::{self, eval_f64};
use halcyon::ir::{Graph, TensorType};
use halcyon::prelude::*;
use halcyon::{AmpPolicy, ConstData, Session, session};
use halcyon_formats::onnx::{Model, Outcome};
use halcyon_test::devices::{devices, open, test_backends};
use halcyon_test::optable::check::{Tally, has, run};
use halcyon_test::optable::rows;
use halcyon_test::{Rng, one_in, testdata};

/// Maximum relative rounding error of bf16.
const ROUNDING: f64 = 1.0 / 256.0;

fn with(b: &Backend, amp: AmpPolicy, without: &[&str]) -> Backend {
    let n = Backend::builder().backend_type(b.info().backend).level(Level::O2).amp(amp);
    // Mixed precision is forced, because only the results matter here. Some processors are slower in bf16.
    let n = n.force_amp(amp != AmpPolicy::None);
    without.iter().fold(n, |n, w| n.without(w)).build().unwrap()
}

fn plan(b: &Backend, g: &Graph) -> Plan {
    lower(g, b.device().as_target(), &b.lower_options()).unwrap()
}

fn mixed(p: &Plan) -> Option<&halcyon::ir::plan::Receipt> {
    p.receipts.iter().find(|r| r.transformation == MIXED)
}

/// Whether bf16 can represent all of the numbers without overflow.
fn fits(c: &ConstData) -> bool {
    c.scalars().all(|s| !s.as_f64().is_finite() || s.cast(DType::BF16).as_f64().is_finite())
}

/// The allowed differences of the elements of a result. Both factors of a product and its result are rounded.
/// Results of composites, which contain exponentials, are judged by their largest value.
fn slack(g: &Graph, inputs: &[ConstData], want: &ConstData) -> halcyon::Result<Vec<f64>> {
    if g.nodes().iter().any(|n| matches!(n.op, Op::Composite(_))) {
        let top = want.scalars().map(|s| s.as_f64().abs()).filter(|v| v.is_finite()).fold(0.0, f64::max);
        return Ok(vec![8.0 * ROUNDING * top; want.numel()]);
    }
    let sizes: Vec<ConstData> = inputs
        .iter()
        .map(|c| match c.dtype.is_float() {
            true => {
                ConstData::from_scalars(c.dtype, &c.dims, c.scalars().map(|s| Scalar::F(s.as_f64().abs())))
            }
            false => Ok(c.clone()),
        })
        .collect::<halcyon::Result<_>>()?;
    Ok(eval_f64(g, &sizes, &[])?[0].scalars().map(|s| 3.2 * ROUNDING * s.as_f64().abs() + 1e-30).collect())
}

#[test]
fn the_op_table_in_bf16_follows_float64() {
    let what = "the op table in bf16";
    let pairs: Vec<(Backend, Backend)> = devices(what, Level::O2)
        .iter()
        .map(|b| (with(b, AmpPolicy::Bf16, &[]), with(b, AmpPolicy::None, &[])))
        .collect();
    let mut rng = Rng::fresh(what);
    let (mut t, mut rounded, every) = (Tally::default(), 0, one_in(3));
    for row in rows().iter().filter(|r| r.dtypes.contains(&DType::F32)) {
        for case in row.cases.iter().filter(|c| c.takes(DType::F32) && c.args.is_empty()) {
            if rng.below(every) != 0 {
                continue;
            }
            let g = case.graph(DType::F32).unwrap();
            let inputs = case.inputs(DType::F32, &mut rng).unwrap();
            for (low, full) in pairs.iter().filter(|(b, _)| has(b, DType::F32)) {
                let at = format!("{} [{}] {}", row.name, case.label, low.id());
                if mixed(&plan(low, &g)).is_none() {
                    // The policy changes nothing in this plan.
                    let (a, b) = (plan(low, &g), plan(full, &g));
                    assert_eq!(a.steps.len(), b.steps.len(), "{at}");
                    continue;
                }
                if !inputs.iter().all(fits) {
                    continue;
                }
                (t.cases, rounded) = (t.cases + 1, rounded + 1);
                let y = match run(low, &g, &inputs, &[]) {
                    Ok(y) => y,
                    Err(e) => {
                        t.failures.push(format!("{at}: {e}"));
                        continue;
                    }
                };
                let want = &eval_f64(&g, &inputs, &[]).unwrap()[0];
                let off = slack(&g, &inputs, want).unwrap();
                for ((a, w), s) in y[0].scalars().zip(want.scalars()).zip(off) {
                    let (a, w) = (a.as_f64(), w.as_f64());
                    let ok =
                        if w.is_finite() { (a - w).abs() <= s } else { a == w || a.is_nan() && w.is_nan() };
                    if !ok {
                        t.failures.push(format!("{at}: {a:e} for {w:e} ± {s:.1e}"));
                        break;
                    }
                }
            }
        }
    }
    assert!(rounded > 0 || pairs.is_empty());
    t.finish(what);
}

/// Position of the largest value.
fn top(c: &ConstData) -> usize {
    let v = c.to_vec::<f32>();
    (0..v.len()).fold(0, |best, i| if v[i] > v[best] { i } else { best })
}

/// Allowed difference of the light models' outputs from f32, relative to the largest value.
const MODELS: f64 = 0.03;

/// The classifier's graph without its softmax, which would hide all differences behind one large score.
fn scores(mut g: Graph) -> Graph {
    let mut outputs = g.outputs().to_vec();
    let mut at = outputs[0].node;
    loop {
        let n = g.node(at);
        match &n.op {
            Op::Composite(c) if c.name() == "softmax" => {
                at = n.inputs[0];
                break;
            }
            op if op.is_view() => at = n.inputs[0],
            _ => return g,
        }
    }
    outputs[0].node = at;
    g.set_outputs(outputs);
    g
}

fn light_models(test: &str, kind: BackendType) {
    let Some(dir) = testdata(test, "models/random") else { return };
    if !test_backends().contains(&kind) {
        return;
    }
    let Some(b) = open(test, kind, Level::O2) else { return };
    let (low, full) = (with(&b, AmpPolicy::Bf16, &[]), with(&b, AmpPolicy::None, &[]));
    let mut names: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    names.sort();
    names.retain(|p| p.join("model.onnx").exists());
    let mut rng = Rng::fresh(test);
    let (sure, every) = (rng.below(names.len()), one_in(3));
    for (i, dir) in names.iter().enumerate() {
        if i != sure && rng.below(every) != 0 {
            continue;
        }
        let model = Model::open(&dir.join("model.onnx")).unwrap();
        let (_, x) = halcyon_formats::onnx::tensor::read_pb(&dir.join("test_data_set_0/input_0.pb")).unwrap();
        let port = model.inputs().unwrap().remove(0);
        let shapes = [(port.name.as_str(), halcyon::Shape::from(&x.dims))];
        let Outcome::Graph(g) = model.outcome(&shapes, &[]).unwrap() else { panic!("{}", dir.display()) };
        let graph = scores(g.graph);
        let one = |b: &Backend| {
            let s = Session::new(b, graph.clone());
            let receipt = mixed(s.prepare(std::slice::from_ref(&x)).unwrap().plan()).cloned();
            (s.run(std::slice::from_ref(&x)).unwrap(), receipt)
        };
        let ((got, r), (want, none)) = (one(&low), one(&full));
        let (r, e) = (r.unwrap(), session::difference(&got, &want));
        println!("{}: {} ops, error {e:.1e}", dir.file_name().unwrap().to_string_lossy(), r.count);
        assert!(none.is_none() && r.count > 5 && r.bytes.is_some_and(|b| b > 1 << 20));
        assert_eq!(got[0].dtype, DType::F32);
        assert_eq!(top(&got[0]), top(&want[0]), "{}: error {e:.1e}", dir.display());
        assert!(e > 0.0 && e < MODELS, "{}: {e:.1e}", dir.display());
    }
}

#[test]
fn the_light_models_keep_their_answer_on_cpu() {
    light_models("the light models in bf16 on cpu", BackendType::Cpu);
}

#[test]
fn the_light_models_keep_their_answer_on_opencl() {
    if halcyon_test::left_out("the_light_models_keep_their_answer_on_opencl") {
        return;
    }
    light_models("the light models in bf16 on opencl", BackendType::OpenCl);
}

/// Two convolutions with a residual, and a classifier.
fn network(rng: &mut Rng) -> (Graph, Vec<ConstData>) {
    let mut g = Graph::new();
    let weight = |g: &mut Graph, rng: &mut Rng, dims: &[usize]| {
        let n = dims.iter().product();
        let fan = (n / dims[0]) as f32;
        let v: Vec<f32> = rng.f32s(n).iter().map(|v| v / fan.sqrt()).collect();
        g.constant(ConstData::from_slice(dims, &v).unwrap())
    };
    let x = g.input("x", TensorType::new(DType::F32, [2usize, 32, 9, 9]));
    let mut attrs = Conv::new(2);
    attrs.pad = [(1, 1), (1, 1)].into_iter().collect();
    let mut y = x;
    for _ in 0..2 {
        let (w, b) = (weight(&mut g, rng, &[32, 32, 3, 3]), weight(&mut g, rng, &[1, 32, 1, 1]));
        let c = g.conv(y, w, attrs.clone()).unwrap();
        let c = g.add(c, b).unwrap();
        let s = g.add(c, y).unwrap();
        y = g.relu(s).unwrap();
    }
    let m = g.mean(y, &[2, 3], false).unwrap();
    let w = weight(&mut g, rng, &[32, 10]);
    let y = g.matmul(m, w).unwrap();
    g.output("y", y);
    let n = 2 * 32 * 81;
    (g, vec![ConstData::from_slice(&[2, 32, 9, 9], &rng.f32s(n)).unwrap()])
}

#[test]
fn it_is_asked_for_has_a_receipt_and_can_be_switched_off() {
    let what = "mixed precision, receipts";
    for b in devices(what, Level::O2) {
        let (g, inputs) = network(&mut Rng::fresh(what));
        let want = reference::eval(&g, &inputs, &[]).unwrap();
        let run = |b: &Backend| Session::new(b, g.clone()).run(&inputs).unwrap();
        let (low, full) = (with(&b, AmpPolicy::Bf16, &[]), with(&b, AmpPolicy::None, &[]));
        let off = with(&b, AmpPolicy::Bf16, &[MIXED]);
        assert_eq!((low.amp(), full.amp()), (AmpPolicy::Bf16, AmpPolicy::None));
        let r = mixed(&plan(&low, &g)).cloned().unwrap();
        // Half of the bytes of the weights of three ops.
        assert_eq!((r.count, r.bytes), (3, Some(2 * (2 * 32 * 32 * 9 + 320))));
        assert!(mixed(&plan(&full, &g)).is_none() && mixed(&plan(&off, &g)).is_none());
        let exact = run(&full);
        assert_eq!(session::difference(&run(&off), &exact), 0.0);
        let e = session::difference(&run(&low), &want);
        assert!(e > 1e-6 && e < 0.02, "{}: {e}", b.id());
        assert!(session::difference(&exact, &want) < 1e-5);
        // Runs are reproducible, and measured receipts report the error of the result.
        assert_eq!(session::difference(&run(&low), &run(&low)), 0.0);
        let s = Session::new(&low, g.clone());
        let all = s
            .measure_receipts(&inputs, 2, |w| {
                let n = Backend::builder().backend_type(b.info().backend);
                Ok(match w {
                    None => n.level(Level::O0).build()?,
                    Some(w) => n.level(Level::O2).amp(AmpPolicy::Bf16).force_amp(true).without(w).build()?,
                })
            })
            .unwrap();
        let r = all.iter().find(|r| r.transformation == MIXED).unwrap();
        assert!(r.gain.is_some_and(|g| g > 0.0) && r.error.is_some_and(|e| e > 0.0 && e < 0.02), "{r:?}");
        // At O1 a warning says that the policy has no effect.
        let o1 = Backend::builder()
            .backend_type(b.info().backend)
            .level(Level::O1)
            .amp(AmpPolicy::Bf16)
            .force_amp(true);
        let p = plan(&o1.build().unwrap(), &g);
        assert!(mixed(&p).is_none() && p.warnings.iter().any(|w| w.starts_with(MIXED)), "{:?}", p.warnings);
    }
}

/// f16 is used where the values of the first run fit into its range with a margin; a warning names the other
/// ops.
#[test]
fn f16_follows_the_range_of_the_first_run() {
    let what = "f16_follows_the_range_of_the_first_run";
    let mut rng = Rng::fresh(what);
    for b in devices(what, Level::O2) {
        let low = with(&b, AmpPolicy::F16, &[]);
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, [4usize, 8]));
        let w = g.input("w", TensorType::new(DType::F32, [8usize, 8]));
        let small = g.matmul(x, w).unwrap();
        let scale = g.lit(small, 3000.0);
        let large = g.mul(small, scale).unwrap();
        let large = g.matmul(large, w).unwrap();
        g.output("small", small);
        g.output("large", large);
        let draw = |rng: &mut Rng, dims: [usize; 2]| {
            let v: Vec<f32> = (0..dims[0] * dims[1]).map(|_| rng.uniform(0.5, 2.0) as f32).collect();
            ConstData::from_slice(&dims, &v).unwrap()
        };
        let inputs = [draw(&mut rng, [4, 8]), draw(&mut rng, [8, 8])];
        let s = Session::new(&low, g.clone());
        let exe = s.prepare(&inputs).unwrap();
        let said = &exe.plan().warnings;
        assert_eq!(mixed(exe.plan()).map(|r| r.count), Some(1), "{}: {said:?}", b.id());
        assert!(said.iter().any(|w| w.contains("matmul") && w.contains("stays in f32")), "{said:?}");
        let got = s.run(&inputs).unwrap();
        let want = eval_f64(&g, &inputs, &[]).unwrap();
        for (y, w) in got.iter().zip(&want) {
            let off = session::difference(
                std::slice::from_ref(y),
                &[w.clone()].map(|w| ConstData::from_slice(&w.dims, &w.to_vec::<f32>()).unwrap()),
            );
            assert!(off < 4e-3, "{}: {off}", b.id());
        }
        // The same graph without values is planned in f32, and a warning gives the reason.
        let p = lower(&g, low.device().as_target(), &low.lower_options()).unwrap();
        assert!(mixed(&p).is_none() && p.warnings.iter().any(|w| w.contains("sample")), "{:?}", p.warnings);
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let (g, inputs) = network(&mut Rng::fresh("mixed precision, threads"));
    let run = |threads: usize| {
        let b = Backend::builder().backend_type(BackendType::Cpu).level(Level::O2).amp(AmpPolicy::Bf16);
        let b = b.force_amp(true);
        Session::new(&b.num_threads(threads).build().unwrap(), g.clone()).run(&inputs).unwrap()
    };
    let one = run(1);
    for n in [2, 3] {
        assert_eq!(session::difference(&run(n), &one), 0.0);
    }
}

#[test]
fn training_keeps_f32_parameters_and_learns() {
    let what = "mixed precision, training";
    for b in devices(what, Level::O2) {
        let mut rng = Rng::fresh(what);
        let (x, hidden, start) = (rng.f32s(64 * 8), rng.f32s(8 * 16), rng.f32s(16));
        let losses = |amp: AmpPolicy| {
            let b = with(&b, amp, &[]);
            let x = Tensor::from_slice(&b, [64, 8], &x).unwrap();
            // The value to learn is the first feature.
            let target = x.narrow(1, 0, 1);
            let mut w = [
                Tensor::from_slice(&b, [8, 16], &hidden).unwrap() * 0.3,
                Tensor::from_slice(&b, [16, 1], &start).unwrap() * 0.3,
            ];
            let mut losses = vec![];
            for _ in 0..60 {
                let (loss, grads) = value_and_grad(&w, |w: &[Tensor]| {
                    let d = x.matmul(&w[0]).tanh().matmul(&w[1]) - &target;
                    Ok((&d * &d).mean([0, 1]))
                })
                .unwrap();
                losses.push(loss.to_vec::<f32>().unwrap()[0]);
                for (w, g) in w.iter_mut().zip(grads) {
                    assert_eq!((w.dtype().unwrap(), g.dtype().unwrap()), (DType::F32, DType::F32));
                    *w = Tensor::from_data(&b, &(&*w - g * 0.3).to_data().unwrap()).unwrap();
                }
            }
            losses
        };
        let (low, full) = (losses(AmpPolicy::Bf16), losses(AmpPolicy::None));
        println!("{}: {} to {}, f32 {}", b.id(), low[0], low[59], full[59]);
        assert!(low[59] < 0.3 * low[0] && full[59] < 0.3 * full[0], "{low:?} {full:?}");
        assert!(low != full && (low[0] - full[0]).abs() < 0.05 * full[0]);
    }
}

#[test]
fn norms_and_softmax_between_products_follow_float64() {
    let what = "mixed precision, norms";
    for b in devices(what, Level::O2) {
        // Without this, the softmax between two products would be recognised as attention.
        let low = with(&b, AmpPolicy::Bf16, &[RECOGNITION]);
        let mut rng = Rng::fresh(what);
        let mut g = Graph::new();
        let mut weight = |g: &mut Graph, dims: &[usize]| {
            let n = dims.iter().product();
            let v: Vec<f32> = rng.f32s(n).iter().map(|v| v * 0.2).collect();
            g.constant(ConstData::from_slice(dims, &v).unwrap())
        };
        let x = g.input("x", TensorType::new(DType::F32, [3usize, 7, 48]));
        let w: Vec<_> = (0..3).map(|_| weight(&mut g, &[3, 48, 48])).collect();
        let (s, c) = (weight(&mut g, &[48]), weight(&mut g, &[48]));
        let y = g.matmul(x, w[0]).unwrap();
        let y = g.layer_norm(y, s, Some(c), 2, 1e-5).unwrap();
        let y = g.matmul(y, w[1]).unwrap();
        let y = g.rms_norm(y, s, 1e-5).unwrap();
        let y = g.matmul(y, w[2]).unwrap();
        // Even if the softmax ran in f32, its operand would be rounded as the result of a product, and its
        // result as a factor of the next product.
        let y = g.softmax(y, 2).unwrap();
        let y = g.matmul(y, w[0]).unwrap();
        g.output("y", y);
        let p = plan(&low, &g);
        let names: Vec<&str> = p
            .steps
            .iter()
            .filter_map(|s| match &s.work {
                StepWork::Library(k) => Some(k.name()),
                _ => None,
            })
            .collect();
        assert_eq!(mixed(&p).map(|r| r.count), Some(7), "{names:?}");
        if b.info().backend == BackendType::Cpu {
            assert!(names.iter().any(|n| n.starts_with("cpu.layer_norm")), "{names:?}");
            assert!(names.iter().any(|n| n.starts_with("cpu.rms_norm")), "{names:?}");
        }
        let x = ConstData::from_slice(&[3, 7, 48], &rng.f32s(3 * 7 * 48)).unwrap();
        let want = eval_f64(&g, std::slice::from_ref(&x), &[]).unwrap();
        // Compare in f32.
        let want = [ConstData::from_scalars(DType::F32, &want[0].dims, want[0].scalars()).unwrap()];
        let e = session::difference(&Session::new(&low, g.clone()).run(&[x]).unwrap(), &want);
        println!("{}: {e:.1e}", b.id());
        assert!(e > 0.0 && e < 0.05, "{}: {e}", b.id());
    }
}

/// A mask stays f32, so that the lowest f32 number still masks keys. The other operands are bf16. The CPU's
/// attention kernel for 16-bit types needs tile registers; without them the plan keeps f32, because no other
/// kernel of the CPU is faster in bf16.
#[test]
fn attention_with_a_mask_reads_halves() {
    let what = "mixed precision, a mask";
    for b in devices(what, Level::O2) {
        let low = with(&b, AmpPolicy::Bf16, &[]);
        let mut rng = Rng::fresh(what);
        let mut g = Graph::new();
        let mut inputs: Vec<ConstData> =
            (0..3).map(|_| ConstData::from_slice(&[1, 2, 20, 16], &rng.f32s(640)).unwrap()).collect();
        let mask: Vec<f32> = (0..400).map(|i| if i < 20 || i % 20 > 12 { f32::MIN } else { 0.5 }).collect();
        inputs.push(ConstData::from_slice(&[20, 20], &mask).unwrap());
        let x: Vec<_> = inputs.iter().map(|c| g.input("x", TensorType::new(DType::F32, &c.dims))).collect();
        let y = g.attention(x[0], x[1], x[2], Some(x[3]), false, 0.25).unwrap();
        g.output("y", y);
        let p = plan(&low, &g);
        for s in p.steps.iter().filter(|s| s.op == "attention") {
            if let StepWork::Kernel { kernel, .. } = &s.work {
                let types: Vec<DType> = kernel.buffers[..4].iter().map(|b| b.dtype).collect();
                assert_eq!(types, [DType::BF16, DType::BF16, DType::BF16, DType::F32], "{}", b.id());
            }
        }
        let tiles = b.info().properties.get("instruction_set").is_some_and(|s| s == "amx");
        let halves = b.info().backend != BackendType::Cpu || tiles;
        assert_eq!(mixed(&p).is_some(), halves, "{}", b.id());
        if !halves {
            let kernels =
                |p: &Plan| p.steps.iter().map(|s| s.work.kernel_name().to_string()).collect::<Vec<_>>();
            assert_eq!(kernels(&p), kernels(&plan(&with(&b, AmpPolicy::None, &[]), &g)), "{}", b.id());
        }
        let near = if halves { 0.03 } else { 1e-5 };
        let want = eval_f64(&g, &inputs, &[]).unwrap()[0].to_vec::<f64>();
        let got = Session::new(&low, g).run(&inputs).unwrap()[0].to_vec::<f64>();
        for (g, w) in got.iter().zip(&want) {
            assert!((g - w).abs() < near, "{}: {g} instead of {w}", b.id());
        }
    }
}
