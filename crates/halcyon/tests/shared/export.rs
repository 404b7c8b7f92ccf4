//! Exports the cases of the op table, except for large ones, as ONNX models, imports each model again and
//! evaluates it with the reference.
//!
//! If `HALCYON_EXPORTED` names a folder, the models are written there, with their inputs and the reference's
//! results, in the layout of the ONNX backend tests. `xtask/scripts/check_export.py` runs them in
//! onnxruntime. `HALCYON_ROW` selects rows by a part of their name.

use halcyon::ir::{Graph, reference};
use halcyon::{ConstData, DType, Error, Result, Scalar};
use halcyon_formats::onnx::export::{ExportOptions, export, to_bytes};
use halcyon_formats::onnx::tensor::{External, write_pb};
use halcyon_formats::onnx::{Model, ops::LATEST};
use halcyon_test::Rng;
use halcyon_test::optable::case::{Case, ONE_PER_CLASS, Row};
use halcyon_test::optable::check::{Expected, Tally, expect};
use halcyon_test::optable::rows;
use std::path::Path;

/// Maximum number of operand elements of a case. Larger cases of the op table are there to test kernels.
const LARGEST: usize = 3000;

/// The graph, its inputs (then its run-time arguments) and its expected result.
fn sample(row: &Row, c: &Case, d: DType, rng: &mut Rng) -> Result<(Graph, Vec<ConstData>, Expected)> {
    let g = c.graph(d)?;
    let mut inputs = c.inputs(d, rng)?;
    let args: Vec<Scalar> = c.args.iter().map(|a| Scalar::F(rng.uniform(-9.0, 9.0)).cast(*a)).collect();
    let want = expect(&g, &inputs, &args, c.tol.unwrap_or(row.tol))?;
    for (d, v) in c.args.iter().zip(args) {
        inputs.push(ConstData::splat(*d, &[], v)?);
    }
    Ok((g, inputs, want))
}

fn back(g: &Graph, opset: i64) -> Result<Graph> {
    let m = export(g, &ExportOptions { opset, ..Default::default() })?;
    Ok(Model::new(m, External::none(), "exported")?.import(&[])?.graph)
}

/// Writes the case into its own folder.
fn keep(dir: &Path, g: &Graph, opset: i64, inputs: &[ConstData], results: &[ConstData]) -> Result<()> {
    let io = |e: std::io::Error| Error::Io { path: dir.display().to_string(), what: e.to_string() };
    let data = dir.join("test_data_set_0");
    std::fs::create_dir_all(&data).map_err(io)?;
    std::fs::write(dir.join("model.onnx"), to_bytes(g, &ExportOptions { opset, ..Default::default() })?)
        .map_err(io)?;
    for (kind, all) in [("input", inputs), ("output", results)] {
        for (i, c) in all.iter().enumerate() {
            write_pb(&data.join(format!("{kind}_{i}.pb")), "", c)?;
        }
    }
    Ok(())
}

fn round_trips(what: &str, opset: i64, types: &dyn Fn(DType) -> bool) {
    let (mut rng, mut t) = (Rng::fresh(what), Tally::default());
    let out = std::env::var_os("HALCYON_EXPORTED").map(std::path::PathBuf::from);
    let part = std::env::var("HALCYON_ROW").unwrap_or_default();
    for row in rows().iter().filter(|r| r.name.contains(&part)) {
        for c in &row.cases {
            if c.ins.iter().map(|i| i.dims.iter().product::<usize>()).sum::<usize>() > LARGEST {
                continue;
            }
            // The exported product may overflow before the addition, because it is not fused.
            if row.name == "fma" && c.label == "special" {
                continue;
            }
            for d in row.dtypes.iter().copied().filter(|d| c.takes(*d) && d.is_native() && types(*d)) {
                let at = format!("{} {d} [{}] at {opset}", row.name, c.label);
                let result = sample(row, c, d, &mut rng).and_then(|(g, inputs, want)| {
                    if out_of_reach(&g, opset) {
                        let e = back(&g, opset).err();
                        assert!(matches!(e, Some(Error::Unsupported { .. })), "{at}: {e:?}");
                        return Ok(None);
                    }
                    if let Some(out) = out.as_ref().filter(|_| settled(row, c, d, opset)) {
                        let (inputs, args) = inputs.split_at(g.inputs().len());
                        let args: Vec<Scalar> = args.iter().filter_map(|a| a.get(0)).collect();
                        let want = reference::eval(&g, inputs, &args)?;
                        let name = at.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
                        keep(&out.join(name), &g, opset, inputs, &want)?;
                    }
                    let y = reference::eval(&back(&g, opset)?, &inputs, &[])?;
                    Ok(Some(want.compare(&y[0])))
                });
                match result {
                    Ok(None) => continue,
                    Ok(Some(Ok(()))) => {}
                    Ok(Some(Err(e))) => t.failures.push(format!("{at}: {e}")),
                    Err(e) => t.failures.push(format!("{at}: {e}")),
                }
                t.cases += 1;
            }
        }
    }
    t.finish(what);
}

/// Whether the ONNX operators of a case define its result, so that other software must compute the same: no
/// integer division by zero, no integer overflow, no cast to an integer dtype that cannot represent the
/// value, no NaN to order, no two updates of one element.
fn settled(row: &Row, c: &Case, d: DType, opset: i64) -> bool {
    let whole =
        !d.is_float() && ["div", "rem", "mod", "pow", "shl", "shr", "abs", "neg"].contains(&&*row.name);
    let open = ["special", "ends", "duplicates", "one place", "any"].iter().any(|l| c.label.contains(l));
    // Integer overflow, which Halcyon wraps and onnxruntime clamps.
    let long = !d.is_float() && ["reduce_sum", "reduce_prod"].iter().any(|n| row.name.starts_with(n));
    // Numbers that the dtype cannot represent, such as negative numbers in `f8e8m0`, which has only powers of
    // two.
    let narrow = row.name == "cast to a small type"
        && ["u2", "i2", "u4", "i4", "f8e8m0"].iter().any(|t| c.label.starts_with(t));
    let unsettled = whole || long || narrow || open && row.name != "const";
    // The newest operator set that onnxruntime loads.
    opset <= 26 && !unsettled && c.args.is_empty()
}

/// Whether the operator set cannot express a graph. Export must reject such a graph.
fn out_of_reach(g: &Graph, opset: i64) -> bool {
    use halcyon::ir::Op;
    g.nodes().iter().any(|n| match &n.op {
        _ if n.ty.dtype.row().onnx == 0 || opset < n.ty.dtype.row().onnx_since => true,
        Op::Custom(_) | Op::DecodeBlocks(_) => true,
        Op::Composite(c) => c.weight_blocks().is_some(),
        Op::Bitcast => opset < 26 && !(n.ty.dtype.is_int() && g.dtype(n.inputs[0]).is_int()),
        _ => false,
    })
}

#[test]
fn every_case_survives_the_default_operator_set() {
    if halcyon_test::left_out("every_case_survives_the_default_operator_set") {
        return;
    }
    round_trips("export", ExportOptions::default().opset, &|_| true);
}

#[test]
fn and_the_newer_ones() {
    if halcyon_test::left_out("and_the_newer_ones") {
        return;
    }
    for opset in [24, LATEST] {
        let few = |d| ONE_PER_CLASS.contains(&d) || d == DType::Bool;
        round_trips(&format!("export at operator set {opset}"), opset, &few);
    }
}
