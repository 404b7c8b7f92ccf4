//! Tests of `halcyon run`: the short answer, values in files, many inputs.

use crate::common::*;
use halcyon_formats::npz::Npz;
use halcyon_formats::{npy, npz};
use halcyon_ir::{ConstData, DType};
use serde_json::Value;
use std::path::Path;

const DIGITS: &str = "models/digits.onnx";
const SEVEN: &str = "models/digit-7.png";
const LABELS: &str = "models/digits-labels.txt";

/// Runs on the CPU, so that the output is the same on every machine.
fn run(args: &[&str]) -> Done {
    halcyon(&[&["run"], args, &["--backend", "cpu"]].concat())
}

fn f32s(dims: &[usize], v: &[f32]) -> ConstData {
    ConstData::from_slice(dims, v).expect("values fill the shape")
}

/// Writes three copies of the sample image (`p1.png`, `p2.png`, `p10.png`), a `.png` file that is not an
/// image, and a text file.
fn pictures(dir: &Path) {
    let png = std::fs::read(root().join(SEVEN)).expect("the sample");
    for n in ["p10.png", "p2.png", "p1.png"] {
        std::fs::write(dir.join(n), &png).expect("written");
    }
    std::fs::write(dir.join("p3.png"), "no picture").expect("written");
    std::fs::write(dir.join("notes.txt"), "passed over").expect("written");
}

#[test]
fn the_answer_comes_first_and_one_line_says_where() {
    let d = run(&[DIGITS, "--input", SEVEN, "--top-k", "3"]).ok();
    let lines: Vec<&str> = d.out.lines().collect();
    assert_eq!(lines.len(), 4, "{}", d.out);
    assert!(lines[0].trim_start().starts_with("1.  7"), "{}", d.out);
    assert!(lines[3].starts_with("on cpu (requested), ") && lines[3].ends_with('s'), "{}", d.out);
    assert!(lines.iter().all(|l| l.chars().count() <= 80) && d.err.is_empty(), "{d:?}");
    // -q prints only the answer, -v everything.
    let q = run(&[DIGITS, "--input", SEVEN, "--top-k", "3", "-q"]).ok();
    assert_eq!(q.out.lines().collect::<Vec<_>>(), lines[..3]);
    let v = run(&[DIGITS, "--input", SEVEN, "--top-k", "3", "-v"]).ok();
    for part in ["model  ", "backend  cpu:0", "input    image", "times  ", "memory  "] {
        assert!(v.out.contains(part), "{part}: {}", v.out);
    }
    assert!(!d.out.contains("composites") && !d.err.contains("composites"), "{d:?}");
    run(&[DIGITS, "--input", SEVEN, "-q", "-v"]).code_is(2, "cannot be used with");
    // With --json, stdout contains only the JSON object.
    assert!(run(&[DIGITS, "--input", SEVEN, "--json", "-v"]).ok().json()["outputs"].is_array());
}

#[test]
fn the_line_says_why_the_cpu_was_taken() {
    let with = |f: &dyn Fn(&mut std::process::Command), more: &[&str]| {
        let mut c = command(&[&["run", DIGITS, "-i", SEVEN, "--top-k", "1"], more].concat());
        c.env("HALCYON_CONFIG", "off").env_remove("HALCYON_BACKENDS");
        f(&mut c);
        finish(&mut c).ok().out.lines().last().unwrap_or_default().to_string()
    };
    let by = with(
        &|c| {
            c.env("HALCYON_BACKENDS", "cpu,cuda");
        },
        &[],
    );
    assert!(by.starts_with("on cpu: it is first in HALCYON_BACKENDS, "), "{by}");
    let by = with(&|_| (), &["--backends", "cpu,cuda"]);
    assert!(by.starts_with("on cpu: it is first in --backends, "), "{by}");
    // The reason given on a machine without a GPU.
    let v = halcyon(&["devices", "--json"]).ok().json();
    let gpu = |d: &Value| d["software"] == false && d["backend"] != "cpu";
    let any = v
        .as_array()
        .expect("backends")
        .iter()
        .any(|b| b["devices"].as_array().is_some_and(|d| d.iter().any(gpu)));
    let line = with(&|_| (), &[]);
    match any {
        true => assert!(!line.starts_with("on cpu: no GPU"), "{line}"),
        false => assert!(
            line.starts_with("on cpu: no GPU was found (for the reasons: halcyon devices), ")
                || line.starts_with("on cpu: this build has no GPU backend, "),
            "{line}"
        ),
    }
}

#[test]
fn outputs_are_shown_in_short_and_whole() {
    let d = run(&[DIGITS, "--input", SEVEN]).ok();
    assert!(d.out.starts_with("probabilities f32[1, 10]\n  ["), "{}", d.out);
    let many = run(&[DIGITS, "--input", "random:20x1x8x8"]).ok();
    assert!(many.out.contains("… 12 more rows") && many.out.lines().count() == 11, "{}", many.out);
    let all = run(&[DIGITS, "--input", "random:20x1x8x8", "--print", "all"]).ok();
    let values = all.out.split(['[', ']', ',', '\n']).filter(|t| t.trim().parse::<f32>().is_ok()).count();
    // The values, and the sizes of the shape.
    assert!(values >= 200 && !all.out.contains('…'), "{values}: {}", all.out);
}

#[test]
fn values_go_to_files_in_every_format() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |n: &str| dir.path().join(n);
    let path = |n: &str| text(&at(n)).to_string();
    let (y, z, j, c) = (path("y.npy"), path("y.npz"), path("y.json"), path("y.csv"));
    let d = run(&[DIGITS, "--input", SEVEN, "-o", &y, "-o", &z, "-o", &j, "--output", &c]).ok();
    assert!(d.out.contains("saved ") && !d.out.contains("probabilities"), "{}", d.out);
    let want = npy::read(&at("y.npy")).expect("an array");
    assert_eq!((want.dtype, want.dims.as_slice()), (DType::F32, &[1, 10][..]));
    let z = Npz::open(&at("y.npz")).expect("an archive");
    assert_eq!(z.get("probabilities").expect("the output"), want);
    let j: Value = serde_json::from_slice(&std::fs::read(at("y.json")).expect("a file")).expect("JSON");
    let o = &j["outputs"][0];
    assert_eq!(
        (&o["name"], &o["dtype"], &o["shape"]),
        (&"probabilities".into(), &"f32".into(), &serde_json::json!([1, 10]))
    );
    let values = |v: &Value| -> Vec<f32> {
        v.as_array().expect("values").iter().map(|v| v.as_f64().expect("a number") as f32).collect()
    };
    assert_eq!(values(&o["values"]), want.to_vec::<f32>());
    let c = std::fs::read_to_string(at("y.csv")).expect("a file");
    let lines: Vec<&str> = c.lines().collect();
    assert!(lines.len() == 2 && lines[0].starts_with("probabilities.0,probabilities.1,"), "{c}");
    let cells: Vec<f32> = lines[1].split(',').map(|v| v.parse().expect("a number")).collect();
    assert_eq!(cells, want.to_vec::<f32>());
    // --json contains every value too, however many.
    let v = run(&[DIGITS, "--input", "random:30x1x8x8", "--json"]).ok().json();
    assert_eq!(v["outputs"][0]["values"].as_array().map(Vec::len), Some(300));
    // With values on standard output, nothing else is printed there.
    let d = run(&[DIGITS, "--input", SEVEN, "-o", "-"]).ok();
    assert_eq!(values(&d.json()["outputs"][0]["values"]), want.to_vec::<f32>());
    assert!(d.err.starts_with("on cpu"), "{d:?}");
    let d = run(&[DIGITS, "--input", SEVEN, "-o", "-", "--format", "csv", "-q"]).ok();
    assert!(d.out == c && d.err.is_empty(), "{d:?}");
    // The classes as a table.
    let d =
        run(&[DIGITS, "-i", SEVEN, "--top-k", "2", "--labels", LABELS, "-o", "-", "--format", "csv"]).ok();
    assert!(
        d.out.starts_with("class_1,label_1,probability_1,class_2,label_2,probability_2\n7,seven,0.9"),
        "{}",
        d.out
    );
}

#[test]
fn files_that_cannot_hold_the_outputs_are_refused_before_anything_runs() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |n: &str| text(&dir.path().join(n)).to_string();
    let one = [DIGITS, "--input", SEVEN];
    let with = |more: &[&str]| run(&[&one[..], more].concat());
    with(&["--output-dir", &at("out.npy")]).fails(2, &["looks like a file", "--output"]);
    assert!(!Path::new(&at("out.npy")).exists());
    std::fs::write(dir.path().join("file"), "kept").expect("written");
    with(&["--output-dir", &at("file")]).fails(2, &["is a file"]);
    with(&["-o", &at("out.xyz")]).fails(2, &["--format"]);
    with(&["-o", "-", "--json"]).code_is(2, "standard output");
    with(&["-o", &at("a.npy"), "-o", &at("a.npy")]).fails(2, &["twice"]);
    with(&["-o", "probability=a.npy"])
        .fails(2, &["no output 'probability'", "Did you mean probabilities=a.npy"]);
    with(&["--format", "csv"]).code_is(2, "--output");
    with(&["--batch", "0"]).code_is(2, "--batch");
    // With two outputs, a file gets one of them or all.
    let mut m = add(DType::F32);
    let g = m.graph.as_mut().expect("a graph");
    let mut second = g.node[0].clone();
    (second.op_type, second.output, second.name) = ("Sub".into(), vec!["difference".into()], "second".into());
    g.node.push(second);
    g.output.push(port("difference", DType::F32, &[Err("n"), Ok(3)]));
    let model = dir.path().join("two.onnx");
    save(&m, &model);
    let two = [text(&model), "-i", "[[5, 6, 7]]", "-i", "[1, 2, 3]"];
    let with = |more: &[&str]| run(&[&two[..], more].concat());
    with(&["-o", &at("x.npy")]).fails(2, &["sum, difference", "--output sum=", ".npz"]);
    assert!(!Path::new(&at("x.npy")).exists());
    let (named, all) = (format!("difference={}", at("d.npy")), at("all.npz"));
    with(&["-o", &named, "-o", &all]).ok();
    assert_eq!(npy::read(Path::new(&at("d.npy"))).expect("saved").to_vec::<f32>(), [4., 4., 4.]);
    let z = Npz::open(Path::new(&all)).expect("an archive");
    assert_eq!(z.names().collect::<Vec<_>>(), ["sum", "difference"]);
}

#[test]
fn a_folder_of_pictures_gives_a_row_each() {
    let dir = tempfile::tempdir().expect("a folder");
    pictures(dir.path());
    let folder = text(dir.path()).to_string();
    let csv = text(&dir.path().join("out.csv")).to_string();
    let d = run(&[DIGITS, "-i", &folder, "--labels", LABELS, "-o", &csv]);
    // One file is not an image. The error names it, and the other files have results.
    assert_eq!(d.code, 1, "{d:?}");
    assert!(d.err.contains("p3.png") && d.err.contains("error: "), "{d:?}");
    assert!(d.out.contains("3 of 4 files"), "{d:?}");
    let table = std::fs::read_to_string(&csv).expect("the table");
    let rows: Vec<Vec<&str>> = table.lines().map(|l| l.split(',').collect()).collect();
    assert_eq!(rows[0], ["file", "class", "label", "probability"]);
    let names: Vec<&str> =
        rows[1..].iter().map(|r| r[0].rsplit(['/', '\\']).next().expect("a name")).collect();
    assert_eq!(names, ["p1.png", "p2.png", "p3.png", "p10.png"]);
    assert_eq!(rows[1][1..3], ["7", "seven"]);
    assert!(rows[1][3].parse::<f32>().is_ok_and(|p| p > 0.9), "{table}");
    assert_eq!(rows[3][1..], ["", "", ""]);

    // Patterns, repeated inputs, and patterns expanded by the shell.
    let pattern = text(&dir.path().join("p1*.png")).to_string();
    let v = run(&[DIGITS, "-i", &pattern, "--top-k", "2", "--json", "--batch", "8"]).ok().json();
    let rows = v["rows"].as_array().expect("rows");
    assert_eq!((rows.len(), &v["failed"], &v["times_ms"]["run"]["runs"]), (2, &0.into(), &1.into()), "{v:#}");
    assert!(rows[0]["file"].as_str().is_some_and(|f| f.ends_with("p1.png")), "{v:#}");
    assert_eq!(rows[1]["top_k"]["rows"][0][0]["index"], 7);
    assert_eq!(rows[1]["outputs"][0]["shape"], serde_json::json!([1, 10]));
    let (one, ten) =
        (text(&dir.path().join("p1.png")).to_string(), text(&dir.path().join("p10.png")).to_string());
    let d = run(&[DIGITS, "-i", &ten, &one, "--top-k", "1", "-q"]).ok();
    let lines: Vec<&str> = d.out.lines().collect();
    assert!(lines.len() == 2 && lines[0].contains("p10.png") && lines[1].contains("p1.png"), "{}", d.out);
    // One tensor with all rows.
    let (all, each) = (dir.path().join("all.npy"), dir.path().join("each.npy"));
    run(&[DIGITS, "-i", &pattern, "-o", text(&all), "--batch", "2"]).ok();
    run(&[DIGITS, "-i", &pattern, "-o", text(&each)]).ok();
    let (all, each) = (npy::read(&all).expect("saved"), npy::read(&each).expect("saved"));
    assert_eq!(all.dims.as_slice(), [2, 10]);
    for (a, b) in all.to_vec::<f32>().iter().zip(each.to_vec::<f32>()) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
    let none = text(&dir.path().join("*.jpg")).to_string();
    run(&[DIGITS, "-i", &none]).fails(2, &["no file matches"]);
    run(&[DIGITS, "-i", &folder, "--repeat", "3"]).fails(2, &["--repeat", "one input"]);
    let v = run(&[DIGITS, "-i", &folder, "--top-k", "1", "--json"]);
    assert_eq!((v.code, &v.json()["failed"]), (1, &1.into()));
    assert!(v.json()["rows"][2]["error"]["message"].is_string(), "{v:?}");
}

/// The last batch of a model with a fixed batch of four is padded. A model with a batch of one gets single
/// rows.
#[test]
fn a_fixed_batch_is_filled_up() {
    let dir = tempfile::tempdir().expect("a folder");
    for n in 0..6 {
        let x = f32s(&[1, 1, 2, 2], &[n as f32; 4]);
        npy::write(&dir.path().join(format!("x{n}.npy")), &x).expect("written");
    }
    let pattern = text(&dir.path().join("x*.npy")).to_string();
    for (size, runs) in [(4, 2), (1, 6)] {
        let of = |n: &str| port(n, DType::F32, &[Ok(size), Ok(1), Ok(2), Ok(2)]);
        let path = dir.path().join(format!("neg{size}.onnx"));
        save(&model("Neg", "", vec![of("x")], of("y")), &path);
        let d = run(&[text(&path), "-i", &pattern, "--json", "--batch", "3"]).ok();
        assert!(d.err.contains("--batch 3 has no effect"), "{d:?}");
        let v = d.json();
        assert_eq!(v["times_ms"]["run"]["runs"], runs, "{v:#}");
        let first: Vec<f64> = v["rows"]
            .as_array()
            .expect("rows")
            .iter()
            .map(|r| r["outputs"][0]["values"][0].as_f64().expect("a number"))
            .collect();
        assert_eq!(first, [0., -1., -2., -3., -4., -5.]);
    }
}

#[test]
fn numbers_are_taken_from_the_command_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let model = dir.path().join("add.onnx");
    save(&add(DType::F32), &model);
    let m = text(&model);
    let v = run(&[m, "-i", "[1, 2, 3]", "-i", "b=[[10, 20, 30]]", "--json"]).ok().json();
    assert_eq!(v["outputs"][0]["values"], serde_json::json!([11.0, 22.0, 33.0]));
    let d = run(&[m, "-i", "[1, 2, 3]", "-i", "[1, 2, \"Infinity\"]", "--json"]).ok();
    assert_eq!(d.json()["outputs"][0]["values"], serde_json::json!([2.0, 4.0, "Infinity"]));
    let d = run(&[m, "-i", "[1, 2, 3]", "-i", "[1, \"NaN\", 3]"]).ok();
    assert!(
        d.err.contains("warning: output 'sum' has 1 NaN among its 3 values, the first at [0, 1]"),
        "{d:?}"
    );
    assert_eq!(run(&[m, "-i", "[1, 2, 3]", "-i", "[1, \"NaN\", 3]", "-q"]).ok().err, "");
    let file = dir.path().join("a.json");
    std::fs::write(&file, "[[1, 1, 1], [2, 2, 2]]").expect("written");
    let v = run(&[m, "-i", text(&file), "-i", "ones:2x3", "--json"]).ok().json();
    assert_eq!(v["outputs"][0]["values"], serde_json::json!([2.0, 2.0, 2.0, 3.0, 3.0, 3.0]));
    run(&[m, "-i", "[1, 2", "-i", "ones"]).fails(2, &["begins like JSON"]);
    run(&[m, "-i", "a=[1, \"x\", 3]", "-i", "ones"]).fails(2, &["'a'", "\"x\" is not a value of type f32"]);
    let archive = dir.path().join("in.npz");
    npz::write(&archive, &[("a", &f32s(&[1, 3], &[0.; 3])), ("b", &f32s(&[1, 3], &[1.; 3]))])
        .expect("written");
    run(&[m, text(&archive)]).ok();
}

/// Writes a model of one layer with the input `x`.
fn one_layer(
    path: &Path,
    x: &[usize],
    w: &[usize],
    layer: impl FnOnce(&mut halcyon_ir::Graph, [halcyon_ir::NodeId; 2]) -> halcyon_ir::NodeId,
) {
    use halcyon_formats::onnx::export::{ExportOptions, write};
    let mut g = halcyon_ir::Graph::new();
    let x = g.input("x", halcyon_ir::TensorType::new(DType::F32, x));
    let n = w.iter().product::<usize>();
    let weights: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 100.0).collect();
    let w = g.constant(f32s(w, &weights));
    let y = layer(&mut g, [x, w]);
    g.output("y", y);
    write(&g, path, &ExportOptions::default()).expect("written");
}

/// A model whose only layer is a product with 64 × 32 weights.
fn product(dir: &Path) -> std::path::PathBuf {
    let path = dir.join("product.onnx");
    one_layer(&path, &[4, 64], &[64, 32], |g, [x, w]| g.matmul(x, w).expect("fits"));
    path
}

/// With whole composites switched off, the plan has no kernels for quantised weights, as on a device that
/// lacks these kernels.
#[test]
fn level_o3_warns_without_kernels_for_bytes() {
    let dir = tempfile::tempdir().expect("a folder");
    let (path, out) = (product(dir.path()), dir.path().join("q.onnx"));
    let with = |args: &[&str], more: &[&str]| {
        let common = ["-i", "random", "--max-error", "0.9", "--backend", "cpu"];
        halcyon(&[args, &common[..], more].concat()).ok().err
    };
    let run = ["run", text(&path), "--level", "O3"];
    let (none, four) = (["--without", "whole composites"], ["--weights", "int4"]);
    let want = "warning: the plan for cpu:0 has no kernel with int8 weights: 1 quantised layer runs in f32";
    let said = with(&run, &none);
    assert_eq!(said.matches("has no kernel").count(), 1, "{said}");
    assert!(said.contains(want), "{said}");
    assert!(!with(&run, &[]).contains("has no kernel"));
    assert!(!with(&run, &four).contains("has no kernel"));
    let conv = dir.path().join("conv.onnx");
    let attrs = halcyon_ir::ops::Conv::new(2);
    one_layer(&conv, &[1, 64, 8, 8], &[64, 64, 3, 3], |g, [x, w]| g.conv(x, w, attrs).expect("fits"));
    assert!(!with(&["run", text(&conv), "--level", "O3"], &[]).contains("has no kernel"));
    assert!(with(&run, &[&four[..], &none[..]].concat()).contains("has no kernel with int4 weights"));
    // Without --receipts, `optimize` does not warn, because the written model may be for another device.
    let optimize = ["optimize", text(&path), "-o", text(&out)];
    assert!(!with(&optimize, &none).contains("has no kernel"));
    assert!(with(&optimize, &["--receipts", "--without", "whole composites"]).contains(want));
}

/// With weights of 4 bits, activations need no ranges from samples, so all samples measure the error.
#[test]
fn all_samples_measure_weights_of_4_bits() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = product(dir.path());
    let samples = dir.path().join("x.npz");
    let x: Vec<f32> = (0..3 * 4 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
    npz::write(&samples, &[("x", &f32s(&[3, 4, 64], &x))]).expect("written");
    let args = ["-i", "random", "--level", "O3", "--weights", "int4", "--max-error", "2", "--calibrate"];
    let d = run(&[&[text(&path)], &args[..], &[text(&samples)]].concat()).ok();
    assert!(d.err.contains("the error is measured on 4 samples"), "{d:?}");
}
