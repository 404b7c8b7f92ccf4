//! Preparing graphs and ONNX models: levels of one open device, results, reports, strategies.

use halcyon::ir::ops::Conv;
use halcyon::ir::passes::{self, PassOptions};
use halcyon::ir::{Graph, ScalarOp, TensorType};
use halcyon::prelude::*;
use halcyon::prepare::{
    ModelOptimizer, OptimizationReport, OptimizationResult, ReportOptions, get_optimizer, levels,
    optimize_for_inference, prepare_model, report_html,
};
use halcyon::receipts::Effort;
use halcyon::{AmpPolicy, ConstData, Error, Session};
use halcyon_test::{Rng, devices::devices};
use std::time::Duration;

fn data(rng: &mut Rng, dims: &[usize]) -> ConstData {
    ConstData::from_slice(dims, &rng.f32s(dims.iter().product())).unwrap()
}

/// A convolution with batch normalisation as separate ops, ReLU, and a product.
fn network(rng: &mut Rng) -> (Graph, [ConstData; 1]) {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [2, 4, 12, 12]));
    let w = g.constant(data(rng, &[8, 4, 3, 3]));
    let mut y = g.conv(x, w, Conv::new(2).padding([1, 1])).unwrap();
    for op in [ScalarOp::Mul, ScalarOp::Mul, ScalarOp::Add] {
        let k = g.constant(data(rng, &[8, 1, 1]));
        y = g.scalar(op, &[y, k]).unwrap();
    }
    let y = g.relu(y).unwrap();
    let y = g.mean(y, &[2, 3], false).unwrap();
    let w = g.constant(data(rng, &[8, 5]));
    let y = g.matmul(y, w).unwrap();
    let s = g.softmax(y, 1).unwrap();
    g.output("scores", y);
    g.output("<shares> & \"more\"", s);
    (g, [data(rng, &[2, 4, 12, 12])])
}

fn quick() -> Effort {
    Effort { pairs: 3, interval: f64::INFINITY, burst: Duration::from_millis(1) }
}

#[test]
fn handles_of_one_device_have_their_own_levels_and_share_memory() {
    let test = "handles_of_one_device_have_their_own_levels_and_share_memory";
    for b in devices(test, Level::O2) {
        let plain = b.with_level(Level::O0).unwrap();
        let v = Rng::fresh(test).f32s(64);
        let x = Tensor::from_slice(&b, [8, 8], &v).unwrap();
        let before = b.memory().allocated;
        let same = x.to(&plain).unwrap();
        assert_eq!((b.memory().allocated, same.backend().level()), (before, Level::O0), "{}", b.id());
        let run = |x: &Tensor| {
            let steps = b.cache_stats().steps;
            let y = ((x + 1.0) * 3.0).relu().to_vec::<f32>().unwrap();
            (y, b.cache_stats().steps - steps)
        };
        let ((a, fused), (c, single)) = (run(&x), run(&same));
        assert!(a.iter().zip(&c).all(|(a, c)| (a - c).abs() <= 1e-6 * a.abs().max(1.0)));
        assert!(fused < single, "{}: {fused} {single}", b.id());
        // The handle of the first operand plans an operation on tensors of both handles.
        assert_eq!((&same + &x).backend().level(), Level::O0);
        assert_eq!((&x + &same).backend().level(), Level::O2);
        // A donation through one handle does not overwrite memory that a tensor of the other handle reads.
        let y = (x.donate() + 1.0).to_vec::<f32>().unwrap();
        assert_eq!(y[3], v[3] + 1.0);
        assert_eq!(same.to_vec::<f32>().unwrap(), v);
        // Both handles share the streams, seeds and counters of the device.
        plain.manual_seed(7);
        assert_eq!(b.next_seed(), 7);
        let other = Backend::builder().backend_type(b.info().backend).build().unwrap();
        assert!(matches!(
            (&x + &Tensor::from_slice(&other, [8, 8], &v).unwrap()).check(),
            Err(Error::MixedDevices { .. })
        ));
        let off = b.with_transformation_off(passes::FUSION).unwrap();
        let moved = same.to(&off).unwrap();
        assert!(run(&moved).1 > fused, "{}", b.id());
        let e = b.with_transformation_off("luck").unwrap_err();
        assert!(e.to_string().contains("luck") && e.to_string().contains(passes::FOLD), "{e}");
    }
}

#[test]
fn an_optimised_graph_reports_what_changed_it() {
    let test = "an_optimised_graph_reports_what_changed_it";
    for b in devices(test, Level::O2) {
        let (g, sample) = network(&mut Rng::fresh(test));
        let model = Session::new(&b, g);
        let optimizer = ModelOptimizer::new(&b);
        let (o0, result) = optimizer.optimize(&model, Level::O0, &sample).unwrap();
        assert!(result.success && result.optimizations_applied.is_empty(), "{result}");
        assert_eq!(result.metrics.error, Some(0.0));
        let (o2, result) = optimizer.optimize(&model, Level::O2, &sample).unwrap();
        assert_eq!((o0.backend().level(), o2.backend().level()), (Level::O0, Level::O2));
        let plan = o2.prepare(&sample).unwrap();
        let applied: Vec<&str> = plan.plan().receipts.iter().map(|r| r.transformation.as_str()).collect();
        assert_eq!(result.optimizations_applied, applied);
        assert!(applied.contains(&passes::AFFINE), "{}: {applied:?}", b.id());
        // Every transformation changed the executable, or a warning gives the reason why not.
        for name in passes::ALL.iter().filter(|n| PassOptions::at(Level::O2).does(n)) {
            let told = result.warnings.iter().any(|w| w.starts_with(&format!("{name}: ")));
            assert!(applied.contains(name) != told, "{}: {name}: {:?}", b.id(), result.warnings);
        }
        let m = &result.metrics;
        assert!(m.time_before_ms > 0.0 && m.time_after_ms > 0.0 && m.speedup > 0.0, "{m:?}");
        assert!(m.speedup_interval[0] <= m.speedup && m.speedup <= m.speedup_interval[1]);
        assert!(m.steps_before > m.steps_after && m.steps_after == plan.plan().steps.len());
        assert!(m.memory_before_bytes > 0 && m.memory_after_bytes > 0);
        assert_eq!(m.outputs.len(), 2);
        assert!(m.outputs.iter().all(|o| o.relative.is_some_and(|e| e < 1e-4)), "{m:?}");
        assert!(m.error.is_some_and(|e| e < 1e-4), "{m:?}");
        // The result survives serialisation.
        let text = serde_json::to_string(&result).unwrap();
        let again = serde_json::from_str::<OptimizationResult>(&text).unwrap();
        assert_eq!(
            (&again.optimizations_applied, again.level),
            (&result.optimizations_applied, result.level)
        );
        assert!((again.metrics.speedup / m.speedup - 1.0).abs() < 1e-12 && again.warnings == result.warnings);
        assert!(result.to_string().contains("level    O2"), "{result}");
    }
}

#[test]
fn a_switched_off_transformation_is_not_applied() {
    let (g, sample) = network(&mut Rng::fresh("a_switched_off_transformation_is_not_applied"));
    let b = Backend::builder().backend_type(BackendType::Cpu).without(passes::AFFINE).build().unwrap();
    let model = Session::new(&b, g);
    let (_, result) = ModelOptimizer::new(&b).optimize(&model, Level::O2, &sample).unwrap();
    assert!(!result.optimizations_applied.iter().any(|n| n == passes::AFFINE));
    assert!(result.warnings.contains(&"affine chains: switched off".to_string()), "{result}");
}

#[test]
fn results_that_do_not_compare_keep_the_model_at_o0() {
    // At O2 two factors are merged into one that f32 cannot hold. At O0 the image is multiplied by one factor
    // after the other, and stays finite.
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [1, 2, 4, 4]));
    let w = g.constant(ConstData::from_slice(&[2, 2, 1, 1], &[1e-30f32; 4]).unwrap());
    let mut y = g.conv(x, w, Conv::new(2)).unwrap();
    for _ in 0..2 {
        let k = g.constant(ConstData::from_slice(&[2, 1, 1], &[1e25f32; 2]).unwrap());
        y = g.mul(y, k).unwrap();
    }
    g.output("y", y);
    let sample = [ConstData::from_slice(&[1, 2, 4, 4], &[1.0f32; 32]).unwrap()];
    let b = Backend::cpu().unwrap();
    let model = Session::new(&b, g);
    let (kept, result) = ModelOptimizer::new(&b).optimize(&model, Level::O2, &sample).unwrap();
    let finite = |s: &Session| s.run(&sample).unwrap()[0].to_vec::<f32>().iter().all(|v| v.is_finite());
    assert!(finite(&kept));
    let o2 = prepare_model(&b, &model, Level::O2).unwrap();
    println!("success: {}", result.success);
    assert_eq!(result.success, finite(&o2), "{result}");
    assert_eq!(kept.backend().level() == Level::O0, !result.success);
    if !result.success {
        assert!(result.optimizations_applied.is_empty() && result.metrics.error.is_none());
        assert!(result.warnings.iter().any(|w| w.contains("output \"y\"")), "{result}");
        assert!(serde_json::to_string(&result).unwrap().contains("\"error\":null"));
    }
}

#[test]
fn a_page_has_everything_and_escapes_names() {
    let test = "a_page_has_everything_and_escapes_names";
    for b in devices(test, Level::O2) {
        let (g, sample) = network(&mut Rng::fresh(test));
        let model = Session::new(&b, g);
        let name = "<script>alert(1)</script>\u{202e}".to_string();
        let options = ReportOptions { name, effort: quick(), ..ReportOptions::default() };
        let (_, report) = ModelOptimizer::new(&b).report(&model, Level::O2, &sample, &options).unwrap();
        assert!(report.receipts.iter().all(|r| r.gain.is_some_and(|g| g > 0.0)), "{report}");
        let (old, new) = (report.ops_before.as_ref().unwrap(), report.ops_after.as_ref().unwrap());
        let steps = |ops: &[halcyon::prepare::OpTime]| ops.iter().map(|o| o.steps).sum::<usize>();
        let m = &report.result.metrics;
        assert_eq!((steps(old), steps(new)), (m.steps_before, m.steps_after), "{}", b.id());
        assert!(new.iter().all(|o| o.time_ms >= 0.0) && new.iter().any(|o| o.time_ms > 0.0));
        let sum: u64 =
            report.memory.iter().filter(|p| p.name != "weights read in place").map(|p| p.after).sum();
        assert_eq!(sum, m.memory_after_bytes);
        let html = report_html(&report);
        assert!(html.starts_with("<!DOCTYPE html>") && html.trim_end().ends_with("</html>"));
        assert!(!html.contains("<script") && !html.contains('\u{202e}') && !html.contains("http:"));
        assert!(html.contains("&lt;script&gt;") && html.contains("&lt;shares&gt; &amp; &quot;more&quot;"));
        for tag in ["svg", "table", "h2", "text", "tr", "ul"] {
            let (open, close) = (format!("<{tag}"), format!("</{tag}>"));
            assert_eq!(html.matches(&open).count(), html.matches(&close).count(), "{tag}");
        }
        for title in ["Time of a run", "Time by op", "Difference from O0", "Memory of a run"] {
            assert!(html.contains(title), "{title}");
        }
        // One bar for each time, gain, op, output and kind of memory.
        let ops = old.len().min(15) + new.len().min(15);
        let bars = 2 + report.receipts.len() + ops + 2 + 2 * (1 + report.memory.len());
        assert_eq!(html.matches("<rect").count(), bars);
        let text = serde_json::to_string(&report).unwrap();
        let again = serde_json::from_str::<OptimizationReport>(&text).unwrap();
        assert_eq!((again.memory, again.receipts.len()), (report.memory, report.receipts.len()));
        assert_eq!(again.result.metrics.outputs[1].name, "<shares> & \"more\"");
    }
}

#[test]
fn speed_ups_are_measured_once_and_kept_on_disk() {
    if halcyon_test::left_out("speed_ups_are_measured_once_and_kept_on_disk") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let open = |threads| {
        let b = Backend::builder().backend_type(BackendType::Cpu).cache_dir(dir.path());
        b.num_threads(threads).build().unwrap()
    };
    let files = || std::fs::read_dir(dir.path().join("gains")).map_or(0, Iterator::count);
    let all = ModelOptimizer::new(&open(1)).strategies();
    assert_eq!((files(), all.len()), (1, passes::ALL.len()));
    println!("{all:#?}");
    for s in &all {
        assert!(!s.description.is_empty() && s.speedup_estimate.is_none_or(|g| g > 0.0), "{s:?}");
        let lowest = match s.name.as_str() {
            passes::FOLD | passes::FUSION => 1,
            passes::QUANTIZED => 3,
            _ => 2,
        };
        assert!(s.applicable_levels.contains(&levels()[lowest]), "{s:?}");
        assert!(!s.applicable_levels.contains(&Level::O0), "{s:?}");
    }
    let of = |name: &str| all.iter().find(|s| s.name == name).unwrap().speedup_estimate;
    for name in [passes::FOLD, passes::CSE, passes::FUSION, passes::COMPOSITES, passes::PACKED] {
        assert!(of(name).is_some(), "{name} was not measured");
    }
    assert_eq!(of(passes::TUNED), None, "the CPU has no tuned kernels");
    // The second call uses the measurement of the first call. With another number of threads, the speed-ups
    // are measured again.
    assert_eq!(ModelOptimizer::new(&open(1)).strategies(), all);
    assert_eq!(files(), 1);
    ModelOptimizer::new(&open(2)).strategies();
    assert_eq!(files(), 2);
}

#[test]
fn inference_in_bf16_needs_o2_and_a_policy() {
    let (g, sample) = network(&mut Rng::fresh("inference_in_bf16_needs_o2_and_a_policy"));
    let b = Backend::builder().backend_type(BackendType::Cpu).amp(AmpPolicy::Bf16).force_amp(true);
    let b = b.build().unwrap();
    let model = Session::new(&b, g);
    let exact = optimize_for_inference(&model, Some(&sample), Some(DType::F32)).unwrap();
    assert_eq!(exact.backend().amp(), AmpPolicy::None);
    let mixed = optimize_for_inference(&model, Some(&sample), Some(DType::BF16)).unwrap();
    let built = b.cache_stats().plans_built;
    let (want, got) = (exact.run(&sample).unwrap(), mixed.run(&sample).unwrap());
    assert_eq!(b.cache_stats().plans_built, built, "the sample made the plans");
    let d = halcyon::session::difference(&got, &want);
    assert!(d > 0.0 && d < 5e-2, "{d}");
    let receipts = &mixed.prepare(&sample).unwrap().plan().receipts.clone();
    assert!(receipts.iter().any(|r| r.transformation == passes::MIXED), "{receipts:?}");
    let e = optimize_for_inference(&model, None, Some(DType::I8)).unwrap_err();
    assert!(matches!(e, Error::Argument { .. }) && e.to_string().contains("bf16"), "{e}");
    let low = prepare_model(&b, &model, Level::O1).unwrap();
    let e = optimize_for_inference(&low, None, Some(DType::BF16)).unwrap_err();
    assert!(e.to_string().contains("needs level O2"), "{e}");
}

#[cfg(feature = "onnx")]
#[test]
fn an_onnx_model_is_prepared_like_a_graph() {
    use halcyon::OnnxSession;
    let path = halcyon_test::root().join("models/digits.onnx");
    let test = "an_onnx_model_is_prepared_like_a_graph";
    let sample = [data(&mut Rng::fresh(test), &[1, 1, 8, 8])];
    for b in devices(test, Level::O2) {
        let model = OnnxSession::open(&b, &path).unwrap();
        let plain = prepare_model(&b, &model, Level::O0).unwrap();
        let (fast, result) = ModelOptimizer::new(&b).optimize(&model, Level::O2, &sample).unwrap();
        assert!(result.success && !result.optimizations_applied.is_empty(), "{result}");
        assert_eq!(result.metrics.outputs[0].name, model.output_names()[0]);
        let run = |m: &OnnxSession| {
            let x = Tensor::from_data(&b, &sample[0]).unwrap();
            let steps = b.cache_stats().steps;
            let y = m.run([("image", &x)]).unwrap()[0].to_vec::<f64>().unwrap();
            (y, b.cache_stats().steps - steps)
        };
        let ((a, many), (c, few)) = (run(&plain), run(&fast));
        assert!(a.iter().zip(&c).all(|(a, c)| (a - c).abs() < 1e-5) && many > few, "{}", b.id());
        let warm = optimize_for_inference(&fast, Some(&sample), None).unwrap();
        let built = b.cache_stats().plans_built;
        run(&warm);
        assert_eq!(b.cache_stats().plans_built, built);
    }
    let e = get_optimizer(Some("no such device")).unwrap_err();
    assert_eq!(e.exit_code(), 2, "{e}");
    assert_eq!(get_optimizer(Some("cpu:0")).unwrap().backend().id(), "cpu:0");
}
