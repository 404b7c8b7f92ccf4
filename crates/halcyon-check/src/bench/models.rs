//! ResNet-50 and MiniLM with generated weights, compared with eager and compiled PyTorch.

use super::{Bench, FigureError, note, part, time};
use crate::bench::gemm::kernels;
use crate::child_section::SectionArgs;
use halcyon::prelude::*;
use halcyon::{ConstData, Error, MatmulPrecision, OnnxSession, Session};
use halcyon_formats::onnx::{Datum, Model, Outcome};
use serde_json::json;
use std::path::Path;

/// PyTorch's modes: the name, whether it compiles, and the target. Halcyon must be at least as fast as eager
/// PyTorch, and take at most 1.2 times the time of compiled PyTorch.
const MODES: &[(&str, bool, f64)] = &[("eager", false, 1.0), ("compiled", true, 1.0 / 1.2)];

/// File, the model's name in the PyTorch script, batch size, and number of tokens (0 for images).
const MODELS: &[(&str, &str, usize, usize)] = &[
    ("seeded/light_resnet50/model.onnx", "resnet50", 1, 0),
    ("seeded/minilm/model.onnx", "minilm", 1, 128),
    ("seeded/minilm/model.onnx", "minilm", 32, 128),
];
/// The models of a rehearsal on other backends than the CPU. Larger models take too long on a stand-in.
const STAND_IN_MODELS: &[(&str, &str, usize, usize)] = &[("mnist/mnist.onnx", "mnist", 1, 0)];
/// The models of a rehearsal on the CPU.
const TINY_CPU: &[(&str, &str, usize, usize)] = &[("seeded/light_resnet50/model.onnx", "resnet50", 1, 0)];

pub(crate) fn main(o: &SectionArgs) -> Result<()> {
    let mut bench = Bench::new(o);
    let models = match o.tiny {
        false => MODELS,
        true if o.kind == BackendType::Cpu => TINY_CPU,
        true => STAND_IN_MODELS,
    };
    // The mode that compiles longest comes last.
    for &(mode, compile, target) in MODES {
        for &(file, theirs, batch, length) in models {
            let path = o.data.join(file);
            let of =
                if length > 0 { format!("batch {batch}, {length} tokens") } else { format!("batch {batch}") };
            let name = format!("{theirs} f32, TF32 on, {of}, against {mode}");
            if !path.is_file() {
                note(format!("{name}: not measured: the data folder has no {file}"));
                continue;
            }
            part(o, &name, || {
                let what = json!({ "do": "model", "name": theirs, "compile": compile, "batch": batch, "length": length });
                let there = bench.prepare(&what);
                if !there && compile {
                    return Ok(());
                }
                let b = Backend::builder().backend_type(o.kind).level(Level::O2);
                let b = b.precision(MatmulPrecision::High).build()?;
                let (s, inputs) = session(&b, &path, batch, length)?;
                let first = s.run(&inputs)?;
                let g = s.capture(&inputs)?;
                let t = bench.time_capture(there, &b, &g)?;
                compare_results(&g.outputs()?, &first)?;
                let against = format!("{} {mode}", bench.theirs());
                let steps = format!("{} steps: {}", g.executable().plan().steps.len(), kernels(&g));
                time(&name, ("ms", 1e-3), t, &against, Some(target), &steps);
                Ok(())
            });
        }
    }
    Ok(())
}

/// Compares the results of a captured run with those of a run without a capture, whose plan may use other
/// kernels.
fn compare_results(captured: &[Tensor], submitted: &[ConstData]) -> Result<(), FigureError> {
    if captured.len() != submitted.len() || captured.is_empty() {
        return Err(FigureError::Wrong(format!("{} results instead of {}", captured.len(), submitted.len())));
    }
    for (i, (a, b)) in captured.iter().zip(submitted).enumerate() {
        let (a, b) = (a.to_vec::<f64>()?, b.to_vec::<f64>());
        let most = b.iter().fold(0f64, |m, v| m.max(v.abs()));
        let off = a.iter().zip(&b).map(|(a, b)| (a - b).abs());
        let off = off.fold(0f64, |m, d| if d.is_nan() { f64::INFINITY } else { m.max(d) });
        if a.len() != b.len() || off > 2e-3 * most || most == 0.0 {
            return Err(FigureError::Wrong(format!(
                "result {i} of a capture is off by {off}, where the largest value is {most}"
            )));
        }
    }
    Ok(())
}

/// A model as one graph, with its inputs: pseudorandom values for an image; tokens and a mask of ones for
/// text.
fn session(b: &Backend, path: &Path, batch: usize, length: usize) -> Result<(Session, Vec<ConstData>)> {
    let s = OnnxSession::new(b, Model::open(path)?)?;
    let inputs = if length > 0 {
        let ids: Vec<i64> = (0..batch * length).map(|i| 1000 + (i * 7919 % 20000) as i64).collect();
        let dims = [batch, length];
        vec![ConstData::from_slice(&dims, &ids)?, ConstData::from_slice(&dims, &vec![1i64; batch * length])?]
    } else {
        let dims = if path.ends_with("mnist.onnx") { [batch, 1, 28, 28] } else { [batch, 3, 224, 224] };
        let x: Vec<f32> =
            (0..dims.iter().product()).map(|i| (i * 7919 % 1009) as f32 / 504.5 - 1.0).collect();
        vec![ConstData::from_slice(&dims, &x)?]
    };
    let values: Vec<Datum> = inputs.iter().cloned().map(Datum::Tensor).collect();
    match s.graph(&values)? {
        Outcome::Graph(i) => Ok((Session::new(b, i.graph.clone()), inputs)),
        Outcome::Staged(why) => {
            Err(Error::unsupported(format!("timing a model in stages: {why}"), "Export it as one graph"))
        }
    }
}
