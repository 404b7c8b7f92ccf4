//! Level O3: graphs that `halcyon::quantize` rewrote, compared with level O0.

use halcyon::ir::graph::NodeId;
use halcyon::ir::ops::Conv;
use halcyon::ir::passes::{BLOCKED, QUANTIZED, RECOGNITION};
use halcyon::ir::{Graph, TensorType};
use halcyon::prelude::*;
use halcyon::quantize::{Activations, QuantizeOptions, WeightType, WiderType, error, quantize};
use halcyon::{ConstData, Error, Session};
use halcyon_formats::onnx::export::{ExportOptions, export};
use halcyon_formats::onnx::tensor::External;
use halcyon_formats::onnx::{Model, ops::LATEST};
use halcyon_test::Rng;
use halcyon_test::devices::devices;
use std::path::Path;

fn cpu(level: Level, without: &[&str]) -> Backend {
    let b = Backend::builder().backend_type(BackendType::Cpu).level(level).num_threads(2);
    without.iter().fold(b, |b, w| b.without(w)).build().unwrap()
}

fn data(rng: &mut Rng, dims: &[usize], by: f32) -> ConstData {
    let n: usize = dims.iter().product();
    let v: Vec<f32> = rng.f32s(n).iter().map(|v| v * by).collect();
    ConstData::from_slice(dims, &v).unwrap()
}

/// A small network on images: four convolutions with channels in whole blocks, a residual connection, the
/// mean over the image, and a product.
fn images(rng: &mut Rng) -> Graph {
    let mut g = Graph::new();
    let x = g.input("image", TensorType::new(DType::F32, [2, 64, 9, 7]));
    let conv = |g: &mut Graph, rng: &mut Rng, x: NodeId, [i, o, k]: [usize; 3], stride: usize| {
        let w = g.constant(data(rng, &[o, i, k, k], (2.0 / (i * k * k) as f32).sqrt() * 1.7));
        let mut attrs = Conv::new(2);
        attrs.stride = [stride, stride].as_slice().into();
        attrs.pad = [(k as i64 / 2, k as i64 / 2); 2].as_slice().into();
        let y = g.conv(x, w, attrs).unwrap();
        let b = g.constant(data(rng, &[1, o, 1, 1], 0.1));
        g.add(y, b).unwrap()
    };
    let a = conv(&mut g, rng, x, [64, 64, 1], 1);
    let a = g.relu(a).unwrap();
    let b = conv(&mut g, rng, a, [64, 64, 3], 1);
    let b = g.relu(b).unwrap();
    let c = conv(&mut g, rng, b, [64, 64, 1], 1);
    let c = g.add(c, a).unwrap();
    let c = g.relu(c).unwrap();
    let d = conv(&mut g, rng, c, [64, 128, 3], 2);
    let d = g.relu(d).unwrap();
    let d = g.mean(d, &[2, 3], false).unwrap();
    let w = g.constant(data(rng, &[128, 40], 0.15));
    let y = g.matmul(d, w).unwrap();
    g.output("y", y);
    g
}

/// Rows of 64 values through two products.
fn rows(rng: &mut Rng) -> Graph {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [6, 64]));
    let w = g.constant(data(rng, &[64, 96], 0.2));
    let y = g.matmul(x, w).unwrap();
    let y = g.gelu(y).unwrap();
    let w = g.constant(data(rng, &[96, 32], 0.2));
    let y = g.matmul(y, w).unwrap();
    g.output("y", y);
    g
}

fn samples(rng: &mut Rng, g: &Graph, n: usize) -> Vec<Vec<ConstData>> {
    samples_up_to(1.0, rng, g, n)
}

fn samples_up_to(top: f32, rng: &mut Rng, g: &Graph, n: usize) -> Vec<Vec<ConstData>> {
    let dims = g.shape(g.inputs()[0].node).dims().unwrap();
    (0..n).map(|_| vec![data(rng, &dims, top)]).collect()
}

fn within(max_error: f64) -> QuantizeOptions {
    QuantizeOptions { max_error, ..QuantizeOptions::default() }
}

/// The lines of a graph's printed plan, which name the kernels.
fn kernels(b: &Backend, g: &Graph, x: &[ConstData]) -> Vec<String> {
    let e = Session::new(b, g.clone()).prepare(x).unwrap();
    e.plan().to_string().lines().map(str::to_string).collect()
}

#[test]
fn quantised_graphs_stay_within_the_bound_on_every_device() {
    if halcyon_test::left_out("quantised_graphs_stay_within_the_bound_on_every_device") {
        return;
    }
    let mut rng = Rng::fresh("quantised graphs");
    for g in [images(&mut rng), rows(&mut rng)] {
        // Values inside of the network that exceed those of the calibration are clipped, and the error of
        // that has no bound. Smaller inputs stay within the ranges.
        let (calibration, held) = (samples(&mut rng, &g, 4), samples_up_to(0.6, &mut rng, &g, 2));
        let zero = Session::new(&cpu(Level::O0, &[]), g.clone());
        let want: Vec<_> = held.iter().map(|s| zero.run(s).unwrap()).collect();
        for b in devices("quantize", Level::O3) {
            for activations in [Activations::MinMax, Activations::Dynamic, Activations::Percentile(99.9)] {
                let o = QuantizeOptions { activations, ..within(0.15) };
                let ranges = if activations == Activations::Dynamic { &[] } else { &calibration[..] };
                let q = quantize(&b, &g, ranges, &held, &o).unwrap();
                assert!(q.changed() && q.report.error <= 0.15, "{}: {}", b.id(), q.report);
                // The reported error is the error of a run.
                let s = Session::new(&b, q.graph.clone());
                let got: Vec<_> = held.iter().map(|x| s.run(x).unwrap()).collect();
                let measured = error(&got, &want);
                assert!((measured - q.report.error).abs() <= 0.01, "{measured} for {}", q.report);
                assert!(measured > 1e-4, "nothing was quantised: {measured}");
            }
        }
    }
}

#[test]
fn convolutions_of_bytes_run_in_blocks_with_their_epilogues() {
    let mut rng = Rng::fresh("convolutions of bytes");
    let g = images(&mut rng);
    let (calibration, held) = (samples(&mut rng, &g, 2), samples(&mut rng, &g, 1));
    let b = cpu(Level::O3, &[]);
    let q = quantize(&b, &g, &calibration, &held, &within(0.5)).unwrap();
    assert_eq!(q.report.quantized(), 5, "{}", q.report);
    let plan = kernels(&b, &q.graph, &held[0]);
    if plan.iter().any(|l| l.contains("conv_blocked8")) {
        let n = plan.iter().filter(|l| l.contains("conv_blocked8") && l.contains(".packed")).count();
        assert_eq!(n, 4, "{plan:#?}");
    } else {
        println!("skipped: this processor has no kernel for convolutions of bytes");
    }
    // Without the pass or the layout the same graph runs in f32.
    let want = Session::new(&b, q.graph.clone()).run(&held[0]).unwrap();
    for off in [RECOGNITION, BLOCKED] {
        let b = cpu(Level::O3, &[off]);
        let plan = kernels(&b, &q.graph, &held[0]);
        assert!(!plan.iter().any(|l| l.contains("conv_blocked8")), "{off}: {plan:#?}");
        let got = Session::new(&b, q.graph.clone()).run(&held[0]).unwrap();
        // A value in the middle between two codes may round to either code.
        let e = error(&[got], std::slice::from_ref(&want));
        assert!(e < 0.05, "{off}: {e}");
    }
}

#[test]
fn a_bound_that_cannot_be_met_is_refused_with_the_measured_error() {
    let mut rng = Rng::fresh("a bound that cannot be met");
    let (g, b) = (rows(&mut rng), cpu(Level::O3, &[]));
    let (calibration, held) = (samples(&mut rng, &g, 2), samples(&mut rng, &g, 1));
    let e = quantize(&b, &g, &calibration, &held, &within(1e-6)).unwrap_err();
    assert!(matches!(e, Error::Unsupported { .. }), "{e}");
    let text = e.to_string();
    assert!(text.contains("1e-6") && text.contains("measured error is"), "{text}");
    assert!(text.contains("with only one"), "{text}");
}

#[test]
fn layers_return_to_f32_until_the_bound_is_met() {
    let mut rng = Rng::fresh("layers return to f32");
    let (g, b) = (images(&mut rng), cpu(Level::O3, &[]));
    let (calibration, held) = (samples(&mut rng, &g, 2), samples(&mut rng, &g, 2));
    let all = quantize(&b, &g, &calibration, &held, &within(0.9)).unwrap().report;
    assert_eq!(all.quantized(), all.layers.len());
    let bound = all.error * 0.8;
    let options = QuantizeOptions { wider_type: WiderType::F32, ..within(bound) };
    match quantize(&b, &g, &calibration, &held, &options) {
        Ok(q) => {
            assert!(q.report.error <= bound && q.report.quantized() < all.layers.len(), "{}", q.report);
            assert!(q.report.quantized() > 0 && q.report.error_of_all > bound);
            let back = q.report.layers.iter().find(|l| l.to.is_none()).unwrap();
            assert!(back.reason.is_some() && back.error.is_some(), "{back:?}");
        }
        Err(e) => panic!("no layer within {bound}: {e}"),
    }
}

/// Layers of 16 bits have far smaller errors than layers of 8 bits, and the integer kernels give the results
/// of O0.
#[test]
fn layers_of_16_bits_are_more_accurate_on_every_device() {
    let mut rng = Rng::fresh("layers of 16 bits");
    let g = rows(&mut rng);
    let held = samples(&mut rng, &g, 2);
    let zero = cpu(Level::O0, &[]);
    for b in devices("quantize", Level::O3) {
        let of = |weights, calibration: &[Vec<ConstData>]| {
            let o = QuantizeOptions { weights, ..within(0.9) };
            quantize(&b, &g, calibration, &held, &o).unwrap()
        };
        let eight = of(WeightType::Int8, &[]).report.error;
        let q = of(WeightType::Int16, &[]);
        assert_eq!(q.report.of_type(WeightType::Int16), 2, "{}", q.report);
        assert!(q.report.error < eight / 8.0 && q.report.error > 0.0, "{}: {eight}", q.report);
        let (ours, theirs) = (Session::new(&b, q.graph.clone()), Session::new(&zero, q.graph.clone()));
        for x in &held {
            let (y, want) = (ours.run(x).unwrap(), theirs.run(x).unwrap());
            assert!(error(&[y], &[want]) < 1e-4, "{}", b.id());
        }
        // The ranges come from the same samples, so no value saturates.
        let calibrated = of(WeightType::Int16, &held).report.error;
        assert!(calibrated < eight / 8.0, "{calibrated} {eight}");
        let halves = of(WeightType::Bf16, &[]).report;
        assert!(
            halves.of_type(WeightType::Bf16) == 2 && halves.error < eight && halves.error > 0.0,
            "{halves}"
        );
        let ran = kernels(&b, &q.graph, &held[0]).iter().filter(|l| l.contains("gemm_i16")).count();
        // The kernel of the reduction computes the magnitudes of a row. They are not stored.
        let plan = kernels(&b, &q.graph, &held[0]);
        assert!(!plan.iter().any(|l| l.split_whitespace().nth(1) == Some("abs")), "{plan:#?}");
        let vectors = b.info().properties.get("simd").is_some_and(|s| s.contains("avx"));
        assert_eq!(ran > 0, b.id().starts_with("cpu") && vectors, "{}", b.id());
    }
}

/// Layers of 16 bits stay products of integers when the model is written and read.
#[test]
fn layers_of_16_bits_survive_a_file() {
    let mut rng = Rng::fresh("layers of 16 bits in a file");
    let (g, b) = (rows(&mut rng), cpu(Level::O3, &[]));
    let held = samples(&mut rng, &g, 1);
    let o = QuantizeOptions { weights: WeightType::Int16, ..within(0.9) };
    let q = quantize(&b, &g, &[], &held, &o).unwrap();
    let options = ExportOptions { opset: LATEST, external_data: false };
    let file = export(&q.graph, &options).unwrap();
    let model = Model::new(file, External::in_folder_of(Path::new("m.onnx")), "m.onnx").unwrap();
    let back = model.import(&[]).unwrap().graph;
    let integers = |g: &Graph| kernels(&b, g, &held[0]).iter().filter(|l| l.contains("gemm_i16")).count();
    assert_eq!(integers(&back), integers(&q.graph));
    let [ours, theirs] = [back, q.graph.clone()].map(|g| Session::new(&b, g).run(&held[0]).unwrap());
    assert!(error(&[ours], &[theirs]) < 1e-6);
    // If the plan has no kernel for a type, `types_without_kernels` names it.
    let vectors = b.info().properties.get("simd").is_some_and(|s| s.contains("avx"));
    let missing = if vectors { &[][..] } else { &[WeightType::Int16] };
    assert_eq!(q.types_without_kernels(&b, &held[0]).unwrap(), missing);
    let off = cpu(Level::O3, &[RECOGNITION]);
    assert_eq!(q.types_without_kernels(&off, &held[0]).unwrap(), [WeightType::Int16]);
}

/// A value that is 0 in all calibration samples still has a scale.
#[test]
fn ranges_of_zeros_do_not_make_outputs_zero() {
    let mut rng = Rng::fresh("ranges of zeros");
    let (g, b) = (rows(&mut rng), cpu(Level::O3, &[]));
    let held = samples(&mut rng, &g, 1);
    let zeros: Vec<ConstData> =
        held[0].iter().map(|x| ConstData::splat(x.dtype, &x.dims, Scalar::F(0.0)).unwrap()).collect();
    for weights in [WeightType::Int8, WeightType::Int16] {
        let o = QuantizeOptions { weights, wider_type: WiderType::F32, ..within(100.0) };
        let q = quantize(&b, &g, std::slice::from_ref(&zeros), &held, &o).unwrap();
        let y = Session::new(&b, q.graph).run(&held[0]).unwrap();
        assert!(y[0].to_vec::<f32>().iter().any(|v| v.abs() > 1e-3), "{weights}");
    }
}

/// Layers that exceed the bound in 8 bits get the wider type of 16 bits.
#[test]
fn layers_return_to_16_bits_until_the_bound_is_met() {
    let mut rng = Rng::fresh("layers return to 16 bits");
    let (g, b) = (rows(&mut rng), cpu(Level::O3, &[]));
    let held = samples(&mut rng, &g, 2);
    let all = quantize(&b, &g, &[], &held, &within(0.9)).unwrap().report.error;
    for wider_type in [WiderType::Int16, WiderType::F32] {
        let q = quantize(&b, &g, &[], &held, &QuantizeOptions { wider_type, ..within(all / 1.05) }).unwrap();
        let (eight, wide) = (q.report.of_type(WeightType::Int8), q.report.of_type(WeightType::Int16));
        assert!(eight < 2 && q.report.error <= all / 1.05, "{}", q.report);
        assert_eq!(wide, if wider_type == WiderType::Int16 { 2 - eight } else { 0 }, "{}", q.report);
        assert_eq!(q.report.options.wider_type, wider_type);
    }
    let auto = quantize(&b, &g, &[], &held, &within(0.9)).unwrap().report.options.wider_type;
    assert_ne!(auto, WiderType::Auto, "the report has the choice that was made");
    assert!("int32".parse::<WiderType>().is_err());
    assert_eq!("bf16".parse::<WiderType>().unwrap(), WiderType::Bf16);
}

#[test]
fn weights_of_4_bits_run_on_every_device() {
    let mut rng = Rng::fresh("weights of 4 bits");
    let g = rows(&mut rng);
    let held = samples(&mut rng, &g, 2);
    for b in devices("quantize", Level::O3) {
        let mut errors = vec![];
        for weights in [WeightType::Int4, WeightType::Int4Min] {
            let o = QuantizeOptions { weights, ..within(2.0) };
            let q = quantize(&b, &g, &[], &held, &o).unwrap();
            assert_eq!(q.report.quantized(), 2, "{}", q.report);
            // Codes take an eighth of the bytes. Each 32 weights also have a scale, or a scale and a minimum.
            let (before, after) = q.report.bytes;
            assert!(after * 8 <= before * 2 + 8, "{before} {after}");
            errors.push(q.report.error);
        }
        assert!(errors.iter().all(|e| *e > 1e-3 && *e < 1.0), "{}: {errors:?}", b.id());
    }
}

#[test]
fn small_floats_need_a_device_that_multiplies_them() {
    let mut rng = Rng::fresh("small floats");
    let g = rows(&mut rng);
    let held = samples(&mut rng, &g, 1);
    let o = QuantizeOptions { weights: WeightType::F8, ..within(0.5) };
    let e = quantize(&cpu(Level::O3, &[]), &g, &[], &held, &o).unwrap_err();
    assert!(matches!(&e, Error::Unsupported { what, .. } if what.contains("8-bit floats")), "{e}");
}

#[test]
fn switched_off_the_quantisation_changes_nothing() {
    let mut rng = Rng::fresh("switched off");
    let g = rows(&mut rng);
    let held = samples(&mut rng, &g, 1);
    let b = cpu(Level::O3, &[QUANTIZED]);
    let q = quantize(&b, &g, &[], &held, &within(1e-9)).unwrap();
    assert!(!q.changed() && q.report.error == 0.0);
    let want = Session::new(&cpu(Level::O2, &[]), g.clone()).run(&held[0]).unwrap();
    assert_eq!(Session::new(&b, q.graph).run(&held[0]).unwrap(), want);
    assert!(!kernels(&b, &g, &held[0]).iter().any(|l| l.contains("gemm_i8")));
    let on = cpu(Level::O3, &[]);
    let q = quantize(&on, &g, &[], &held, &within(0.5)).unwrap();
    assert!(kernels(&on, &q.graph, &held[0]).iter().any(|l| l.contains("gemm_i8")));
    let r = q.receipt(&on, &held[0], 1).unwrap();
    assert_eq!((r.transformation.as_str(), r.count), (QUANTIZED, 2));
    assert!(r.gain.is_some_and(|g| g > 0.0) && r.error == Some(q.report.error));
}

#[test]
fn bad_options_and_graphs_are_refused() {
    let mut rng = Rng::fresh("bad options");
    let (g, b) = (rows(&mut rng), cpu(Level::O3, &[]));
    let held = samples(&mut rng, &g, 1);
    let refused =
        |g: &Graph, calibration: &[Vec<ConstData>], held: &[Vec<ConstData>], o: &QuantizeOptions| {
            let e = quantize(&b, g, calibration, held, o).unwrap_err();
            assert!(matches!(e, Error::Argument { .. }), "{e}");
            e.to_string()
        };
    assert!(refused(&g, &[], &[], &within(0.5)).contains("samples"));
    assert!(refused(&g, &[], &held, &within(f64::NAN)).contains("max_error"));
    let o = QuantizeOptions { activations: Activations::MinMax, ..within(0.5) };
    assert!(refused(&g, &[], &held, &o).contains("calibration"));
    let o = QuantizeOptions { activations: Activations::Percentile(10.0), ..within(0.5) };
    assert!(refused(&g, &held, &held, &o).contains("percentile"));
    for activations in [Activations::MinMax, Activations::Dynamic] {
        let o = QuantizeOptions { activations, weights: WeightType::Int4, ..within(2.0) };
        assert!(refused(&g, &held, &held, &o).contains("no effect with int4 weights"));
    }
    let o = QuantizeOptions { weight_bits: Some(6), ..within(0.5) };
    assert!(refused(&g, &[], &held, &o).contains("weight_bits"));
    let o = QuantizeOptions { weight_bits: Some(7), weights: WeightType::Int4, ..within(2.0) };
    assert!(refused(&g, &[], &held, &o).contains("no effect with int4 weights"));
    for (weights, wider_type) in [(WeightType::Int16, WiderType::Int16), (WeightType::Bf16, WiderType::Bf16)]
    {
        let o = QuantizeOptions { weights, wider_type, ..within(0.5) };
        assert!(refused(&g, &[], &held, &o).contains("is the type of the weights"));
        let auto = quantize(&b, &g, &[], &held, &QuantizeOptions { weights, ..within(0.9) }).unwrap();
        assert_eq!(auto.report.options.wider_type, WiderType::F32);
    }
    let o = QuantizeOptions { activations: Activations::Dynamic, ..within(0.5) };
    assert!(refused(&g, &held, &held, &o).contains("no effect"));
    let mut none = Graph::new();
    let x = none.input("x", TensorType::new(DType::F32, [6, 64]));
    let y = none.exp(x).unwrap();
    none.output("y", y);
    assert!(refused(&none, &[], &held, &within(0.5)).contains("no product or convolution"));
}
