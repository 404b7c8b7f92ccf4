//! Tests of `halcyon bench`: figures, reports, comparisons and rejected arguments.

use crate::common::*;
use halcyon_ir::DType;
use serde_json::{Value, json};

const DIGITS: &str = "models/digits.onnx";

fn bench(args: &[&str]) -> Done {
    halcyon(&[&["bench"], args].concat())
}

fn row<'v>(v: &'v Value, name: &str) -> &'v Value {
    let all = v["rows"].as_array().expect("rows");
    all.iter().find(|r| r["name"] == name).unwrap_or_else(|| panic!("no {name} in {v}"))
}

fn number(v: &Value) -> f64 {
    v.as_f64().unwrap_or_else(|| panic!("{v} is not a number"))
}

/// Checks the order of minimum, quartiles, median and maximum.
#[track_caller]
fn ordered(s: &Value, runs: u64) {
    let f = |k: &str| number(&s[k]);
    assert!(f("min") > 0.0, "{s}");
    assert!(f("min") <= f("low_quartile") && f("low_quartile") <= f("median"), "{s}");
    assert!(f("median") <= f("high_quartile") && f("high_quartile") <= f("max"), "{s}");
    assert_eq!(s["runs"], runs, "{s}");
}

/// Like [`ordered`], for at least a dozen bursts.
#[track_caller]
fn bursts(s: &Value) {
    let n = s["runs"].as_u64().expect("a count");
    assert!(n >= 12, "{s}");
    ordered(s, n);
}

#[test]
fn peaks_are_measured_on_one_thread_and_on_all() {
    if halcyon_test::left_out("peaks_are_measured_on_one_thread_and_on_all") {
        return;
    }
    let v = bench(&["peak", "--backend", "cpu", "--threads", "2", "--json"]).ok().json();
    assert_eq!((&v["report"], &v["settings"]["threads"]), (&json!("bench peak"), &json!(2)));
    let rate = |name: &str| {
        let r = row(&v, name);
        bursts(&r["rate"]);
        number(&r["rate"]["max"])
    };
    assert!(rate("multiply-add f32, 1 thread") > 0.0);
    assert_eq!(row(&v, "multiply-add f32, all threads")["unit"], "operations/s");
    for narrow in ["bf16", "int8"] {
        let r = row(&v, &format!("multiply-add {narrow}, all threads"));
        // The row has either a rate or the reason why there is none.
        match r["absent"].as_str() {
            Some(why) => assert!(r["rate"].is_null() && why.contains(narrow), "{r}"),
            None => bursts(&r["rate"]),
        }
    }
    for place in ["L2", "DRAM"] {
        for stream in ["read", "triad"] {
            assert!(rate(&format!("{stream} {place}, 1 thread")) > 0.0);
            assert_eq!(row(&v, &format!("{stream} {place}, all threads"))["unit"], "bytes/s");
        }
    }
    // A second thread adds its own second-level cache.
    let l2 = |t: &str| row(&v, &format!("read L2, {t}"))["what"].as_str().map(String::from);
    assert_ne!(l2("1 thread"), l2("all threads"));
    let job = row(&v, "starting a job, all threads");
    ordered(&job["time_ms"], 2000);
    assert!(row(&v, "starting a job, 1 thread")["absent"].as_str().is_some());
    assert!(v["machine"]["l2"].as_u64() > Some(0));
}

#[test]
fn peaks_of_other_devices_are_not_supported_and_say_so() {
    bench(&["peak", "--backend", "noop"]).fails(3, &["peaks of noop:0", "--backend cpu"]);
    bench(&["peak", "--backend", "cudaa"]).fails(2, &["cudaa"]);
    bench(&["peak", "--threads", "0", "--backend", "cpu"]).fails(2, &["thread"]);
}

#[test]
fn works_have_times_rates_and_shares() {
    let args = ["ops", "--only", "gemm-512", "--only", "sort", "--only", "conv-3x3-512"];
    let more = ["--repeat", "3", "--backend", "cpu", "--threads", "1"];
    let d = bench(&[&args[..], &more[..], &["--json"]].concat()).ok();
    assert!(d.err.contains("operation 3/3"), "{}", d.err);
    let v = d.json();
    assert_eq!((&v["report"], &v["settings"]["level"]), (&json!("bench ops"), &json!("O2")));
    assert_eq!(v["rows"].as_array().map(Vec::len), Some(3));
    for r in v["rows"].as_array().expect("rows") {
        ordered(&r["time_ms"], 3);
        let (t, flops) = (number(&r["time_ms"]["median"]) / 1e3, number(&r["flops"]));
        assert!((number(&r["gflops"]) - flops / t / 1e9).abs() < 1e-6 * number(&r["gflops"]), "{r}");
        let (peak, share) = (&r["peak"], number(&r["share_of_peak"]));
        let compute = flops / number(&peak["gflops"]) / 1e9;
        let memory = number(&r["bytes"]) / number(&peak["gbytes_per_s"]) / 1e9;
        assert!((share - compute.max(memory) / t).abs() < 1e-6 * share, "{r}");
        assert_eq!(r["bound"], if compute >= memory { "compute" } else { "memory" });
        // The share may exceed 1 if other programs used the machine while its peak was measured.
        assert!(share > 0.0 && share.is_finite(), "{r}");
    }
    assert_eq!(row(&v, "gemm-512")["flops"], 2u64 << 27);
    assert_eq!(row(&v, "gemm-512")["bound"], "compute");
    let text = bench(&[&args[..], &more[..]].concat()).ok().out;
    for part in ["gemm-512", "f32 [512, 512] x [512, 512]", "GFLOP/s", "% of compute", "spread"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn devices_without_a_peak_have_times_alone() {
    let args = ["ops", "--only", "gemm-512", "--repeat", "3", "--backend", "noop"];
    let v = bench(&[&args[..], &["--json"]].concat()).ok().json();
    let r = row(&v, "gemm-512");
    ordered(&r["time_ms"], 3);
    assert!(r["share_of_peak"].is_null() && r["peak"].is_null(), "{r}");
    assert!(v["no_shares"].as_str().is_some_and(|w| w.contains("noop:0")), "{v}");
    let text = bench(&args).ok().out;
    assert!(text.contains("no shares of a peak"), "{text}");
}

#[test]
fn reports_compare_with_earlier_ones() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |n: &str| dir.path().join(n);
    let args = ["ops", "--only", "gemm-512", "--repeat", "5", "--backend", "cpu", "--threads", "1"];
    let first = bench(&[&args[..], &["--json"]].concat()).ok();
    std::fs::write(at("before.json"), &first.out).expect("written");
    let before = first.json();
    let compared = |file: &str| {
        let file = at(file);
        bench(&[&args[..], &["--json", "--compare", text(&file)]].concat()).ok().json()
    };
    let v = compared("before.json");
    let (r, old) = (row(&v, "gemm-512"), row(&before, "gemm-512"));
    let ratio = number(&r["compare"]["ratio"]);
    let want = number(&old["time_ms"]["median"]) / number(&r["time_ms"]["median"]);
    assert!((ratio - want).abs() < 1e-6 * want, "{r}");
    assert_eq!(v["compare"]["settings_differ"], json!([]));

    // An earlier report of a machine a hundred million times slower (so that noise cannot hide it), with more
    // threads and a row that the new report lacks.
    let mut slow = before.clone();
    slow["settings"]["threads"] = json!(64);
    for k in ["median", "min", "max", "low_quartile", "high_quartile"] {
        slow["rows"][0]["time_ms"][k] = json!(number(&slow["rows"][0]["time_ms"][k]) * 1e8);
    }
    let mut gone = slow["rows"][0].clone();
    gone["name"] = json!("gone");
    slow["rows"].as_array_mut().expect("rows").push(gone);
    std::fs::write(at("slow.json"), slow.to_string()).expect("written");
    let v = compared("slow.json");
    let c = &row(&v, "gemm-512")["compare"];
    assert!(number(&c["ratio"]) > 1e3 && c["beyond_spread"] == true, "{c}");
    assert_eq!(v["compare"]["only_before"], json!(["gone"]));
    assert_eq!(v["compare"]["settings_differ"], json!(["threads: 64 before, 1 now"]));
    let d = bench(&[&args[..], &["--compare", text(&at("slow.json"))]].concat()).ok();
    assert!(d.out.lines().any(|l| l.contains("gemm-512") && l.ends_with('*')), "{}", d.out);
    assert!(d.err.contains("threads: 64 before, 1 now"), "{}", d.err);
}

#[test]
fn wrong_input_is_refused_before_anything_is_measured() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |n: &str| text(&dir.path().join(n)).to_string();
    bench(&["ops", "--only", "luck"]).fails(2, &["luck", "gemm-512", "attention-causal", "top-k"]);
    bench(&["ops", "--repeat", "0"]).fails(2, &["--repeat"]);
    bench(&["ops", "--level", "fast"]).fails(2, &["fast"]);
    bench(&["walk"]).fails(2, &["walk"]);
    let write = |n: &str, t: &str| std::fs::write(at(n), t).expect("written");
    write("model.json", r#"{ "report": "bench model", "rows": [] }"#);
    write("other.json", r#"{ "rows": [] }"#);
    write("text.json", "no JSON");
    write("broken.json", r#"{ "report": "bench ops", "rows": [{ "name": "a", "time_ms": {} }] }"#);
    let compare = |n: &str| bench(&["ops", "--only", "gemm-512", "--compare", &at(n)]);
    compare("model.json").fails(1, &["model.json", "bench model", "bench ops"]);
    compare("other.json").fails(1, &["not a report of `halcyon bench ops --json`"]);
    compare("text.json").fails(1, &["not JSON"]);
    compare("broken.json").fails(1, &["\"a\"", "time_ms"]);
    compare("missing.json").fails(1, &["missing.json"]);
    bench(&["model", DIGITS, "--compare", &at("broken.json")]).fails(1, &["bench ops", "bench model"]);
    bench(&["peak", "--compare", &at("model.json")]).fails(1, &["bench model", "bench peak"]);
    bench(&["model", "gone.onnx"]).fails(1, &["gone.onnx"]);
}

#[test]
fn a_models_time_is_reported_by_kind_and_by_step() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |n: &str| dir.path().join(n);
    let picture = at("where.svg");
    let args = ["model", DIGITS, "--repeat", "9", "--backend", "cpu", "--threads", "1"];
    let d = bench(&[&args[..], &["--json", "--picture", text(&picture)]].concat()).ok();
    let v = d.json();
    assert_eq!(v["report"], "bench model");
    let whole = row(&v, "end to end");
    ordered(&whole["time_ms"], 9);
    let steps = v["steps"].as_array().expect("steps");
    let (mut kinds, mut flops, mut sum) = (0, 0, 0.0);
    for k in v["rows"].as_array().expect("rows").iter().filter(|r| r["name"] != "end to end") {
        ordered(&k["time_ms"], 9);
        kinds += k["steps"].as_u64().expect("a count");
        flops += k["flops"].as_u64().expect("a count");
        sum += number(&k["time_ms"]["median"]);
        assert!(number(&k["share_of_peak"]) > 0.0, "{k}");
        let share = number(&k["time_ms"]["median"]) / number(&whole["time_ms"]["median"]);
        assert!((number(&k["share_of_time"]) - share).abs() < 1e-9, "{k}");
    }
    assert_eq!((kinds, Some(flops)), (steps.len() as u64, whole["flops"].as_u64()));
    assert!(sum > 0.0 && number(&v["outside_of_steps_ms"]) >= 0.0);
    // The model has two convolutions.
    assert_eq!(steps.iter().filter(|s| s["name"].as_str().is_some_and(|n| n.contains("conv"))).count(), 2);
    assert!(steps.iter().any(|s| s["span"] == "conv2"), "{steps:?}");

    let svg = std::fs::read_to_string(&picture).expect("drawn");
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
    assert!(svg.contains("digits.onnx") && svg.contains("conv2"), "{svg}");
    // A bar for each step and kind, one for the rest, and the background.
    let kinds = v["rows"].as_array().map_or(0, Vec::len) - 1;
    assert_eq!(svg.matches("<rect").count(), steps.len() + kinds + 2);

    std::fs::write(at("before.json"), &d.out).expect("written");
    let d = bench(&[&args[..], &["--compare", text(&at("before.json")), "--top", "2"]].concat()).ok();
    for part in ["by kind", "slowest steps, 2 of", "of the run", "compared with", "end to end"] {
        assert!(d.out.contains(part), "{part}: {}", d.out);
    }
    assert!(!d.err.contains("measured with other settings"), "{}", d.err);
    // A report with other inputs counts as measured with other settings.
    let file = at("before.json");
    let more = ["--input", "random:4x1x8x8", "--compare", text(&file), "--json"];
    let v = bench(&[&args[..], &more].concat()).ok().json();
    let differ = v["compare"]["settings_differ"].as_array().expect("a list");
    assert!(differ.len() == 1 && differ[0].as_str().is_some_and(|d| d.starts_with("inputs: ")), "{differ:?}");
    assert!(number(&row(&v, "end to end")["compare"]["ratio"]) > 0.0);
}

#[test]
fn a_model_in_stages_has_times_of_whole_runs() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.onnx");
    let output = port("y", DType::I64, &[Ok(1), Err("m")]);
    save(&model("NonZero", "", vec![port("x", DType::F32, &[Ok(5)])], output), &path);
    let args = ["model", text(&path), "--backend", "cpu", "--repeat", "3"];
    let v = bench(&[&args[..], &["--json"]].concat()).ok().json();
    assert_eq!(v["rows"].as_array().map(Vec::len), Some(1));
    ordered(&row(&v, "end to end")["time_ms"], 3);
    assert!(
        v["steps"].is_null() && v["no_steps"].as_str().is_some_and(|w| w.contains("not a single graph")),
        "{v}"
    );
    let picture = dir.path().join("p.svg");
    bench(&[&args[..], &["--picture", text(&picture)]].concat())
        .fails(3, &["a picture", "not a single graph"]);
    assert!(!picture.exists());
}

#[test]
fn receipts_report_the_gain_of_each_transformation_and_repeat() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("first.json");
    let args = ["receipts", DIGITS, "--backend", "cpu", "--threads", "1", "--repeat", "4"];
    let run = |more: &[&str]| bench(&[&args[..], more].concat());
    let keep = |v: &Value| std::fs::write(&file, v.to_string()).expect("written");
    let first = run(&["--json"]).ok().json();
    let all = row(&first, "everything on");
    let rows: Vec<&Value> = first["rows"].as_array().expect("rows").iter().skip(1).collect();
    let mut pairs = 0;
    for r in &rows {
        let n = r["gain"]["runs"].as_u64().expect("a count");
        assert!((4..=16).contains(&n), "{r}");
        ordered(&r["gain"], n);
        ordered(&r["time_ms"], n);
        pairs += n;
        assert!(r["applied"].as_u64() > Some(0), "{r}");
        assert!(number(&r["error"]) < 1e-5 && number(&all["error"]) < 1e-5, "{r}");
    }
    ordered(&all["time_ms"], pairs);
    // Figures other than times: these transformations save steps and buffers, and weights are packed.
    let plan = |name: &str, what: &str| row(&first, name)["plan"][what].as_u64().expect("a count");
    for name in ["fusion", "epilogues", "whole composites"] {
        assert!(plan(name, "steps") > plan("everything on", "steps"), "{name}: {first:#}");
        assert!(plan(name, "intermediates") > plan("everything on", "intermediates"), "{name}: {first:#}");
    }
    assert!(plan("packed constants", "packed") == 0 && plan("everything on", "packed") > 0);

    // A second run: figures other than times must be equal. Times of microseconds are unreliable on a busy
    // machine; `cargo xtask test --only receipts` checks the times of a larger model.
    keep(&first);
    let d = run(&["--json", "--compare", text(&file), "--within", "15"]);
    let v = d.json();
    let c = v["compare"]["receipts"].as_array().expect("a list");
    assert_eq!(c.len(), rows.len() + 1);
    assert!(c.iter().all(|r| r["differs"] == json!([])), "{c:?}");
    let bad = c.iter().filter(|r| r["not_within"] == true).count();
    assert_eq!(d.code, i32::from(bad > 0), "{d:?}");

    // A disabled transformation has no receipt and no gain.
    let off = run(&["--json", "--without", "epilogues"]).ok().json();
    let names =
        |v: &Value| v["rows"].as_array().expect("rows").iter().map(|r| r["name"].clone()).collect::<Vec<_>>();
    assert!(names(&first).contains(&json!("epilogues")) && !names(&off).contains(&json!("epilogues")));
    assert_eq!(row(&off, "everything on")["plan"], row(&first, "epilogues")["plan"]);

    // Changed figures are reported, whatever the times are.
    let mut other = first.clone();
    other["rows"][0]["plan"]["steps"] = json!(1);
    other["rows"][1]["name"] = json!("luck");
    keep(&other);
    let d = run(&["--compare", text(&file), "--within", "1e9"]);
    assert_eq!(d.code, 1, "{d:?}");
    for part in ["steps: 1 before", "luck: not in this run", "not in the earlier report", "against earlier"] {
        assert!(d.out.contains(part), "{part}: {}", d.out);
    }
    assert!(d.err.contains("3 receipts are not within"), "{}", d.err);
    run(&["--within", "15"]).fails(2, &["--compare"]);
}
