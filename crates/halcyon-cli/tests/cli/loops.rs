//! Tests of loops through the command: the limit on iterations, Ctrl-C, and the warning if one plan cannot
//! serve all iterations of a body.

use crate::common::*;
use halcyon_formats::onnx::proto::*;
use halcyon_test::seed_models::{body, floats, graph, int, ints, model, node, port, scalar};
use std::path::PathBuf;

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir().unwrap())
    }

    /// Saves a model with the input `x: f32[2]`, these nodes and the output `y`.
    fn model(&self, nodes: Vec<NodeProto>, weights: Vec<TensorProto>) -> PathBuf {
        let path = self.0.path().join("m.onnx");
        let g = graph(nodes, vec![port("x", 1, &[2])], vec![port("y", 1, &[-1])], weights);
        save(&model(17, g), &path);
        path
    }
}

/// A loop that adds `x` to its value until the largest element reaches `limit`. Without `limit`, the loop's
/// condition is always true.
fn adding(trip: &str, limit: Option<f32>) -> (NodeProto, Vec<TensorProto>) {
    let step = graph(
        vec![
            node("Add", &["s", "x"], &["t"]),
            int(node("ReduceMax", &["t"], &["m"]), "keepdims", 0),
            match limit {
                Some(_) => node("Less", &["m", "limit"], &["on"]),
                None => node("Equal", &["m", "m"], &["on"]),
            },
        ],
        vec![port("i", 7, &[]), port("go", 9, &[]), port("s", 1, &[2])],
        vec![port("on", 9, &[]), port("t", 1, &[2])],
        vec![],
    );
    let w = limit.map(|l| scalar(floats("limit", &[1], &[l]))).into_iter().collect();
    (body(node("Loop", &[trip, "", "x"], &["y"]), "body", step), w)
}

#[test]
fn a_loop_that_a_condition_ends_runs_and_says_how_often() {
    let f = Files::new();
    let (n, w) = adding("", Some(3000.0));
    let path = f.model(vec![n], w);
    let v = halcyon(&["run", text(&path), "--backend", "cpu", "--input", "ones", "--json"]).ok().json();
    let loops = &v["placement"]["loops"][0];
    assert_eq!(loops["node"], "Loop#0", "{v}");
    assert_eq!((loops["iterations"].as_u64(), loops["bodies"].as_u64()), (Some(2999), Some(1)));
    assert_eq!(v["warnings"].as_array().map(Vec::len), Some(0));
    // One plan for the body, not one per iteration.
    assert!(v["caches"]["plans_built"].as_u64().is_some_and(|n| n <= 2), "{}", v["caches"]);
    let out = halcyon(&["run", text(&path), "--backend", "cpu", "--input", "ones", "-v"]).ok().out;
    assert!(out.contains("Loop#0: 2999 iterations, its body compiled once"), "{out}");
}

#[test]
fn an_endless_loop_ends_at_its_bound() {
    let f = Files::new();
    let (n, w) = adding("", None);
    let path = f.model(vec![n], w);
    let at = |n: &'static str| {
        vec!["run", text(&path), "--backend", "cpu", "--input", "ones", "--max-iterations", n]
    };
    halcyon(&at("1000")).fails(1, &["Loop#0 has not ended after 1000 iterations", "--max-iterations"]);
    halcyon(&at("0")).fails(2, &["--max-iterations"]);
    let v = halcyon(&[&at("77")[..], &["--json"]].concat());
    assert_eq!(v.json()["error"]["facts"]["iterations"].as_u64(), Some(77));
    // A limit equal to the model's trip count is enough; a limit that is smaller by one is an error. This
    // also holds for loops that are unrolled.
    for trips in [20, 900] {
        let (n, mut w) = adding("n", None);
        w.push(scalar(ints("n", &[trips])));
        let path = f.model(vec![n], w);
        let run = |most: i64| {
            let most = most.to_string();
            halcyon(&["run", text(&path), "--backend", "cpu", "--input", "ones", "--max-iterations", &most])
        };
        run(trips).ok();
        run(trips - 1).fails(1, &[&format!("has not ended after {} iterations", trips - 1)]);
    }
}

#[test]
fn what_is_not_compiled_once_is_a_warning() {
    let f = Files::new();
    // The body takes a slice that starts at the iteration number.
    let step = graph(
        vec![
            node("Unsqueeze", &["i", "zero"], &["k"]),
            node("Add", &["k", "one"], &["l"]),
            node("Slice", &["t", "k", "l"], &["e"]),
            node("Add", &["s", "e"], &["u"]),
        ],
        vec![port("i", 7, &[]), port("go", 9, &[]), port("s", 1, &[2])],
        vec![port("go", 9, &[]), port("u", 1, &[2])],
        vec![],
    );
    let n = 700i64;
    let w = vec![
        ints("zero", &[0]),
        ints("one", &[1]),
        floats("t", &[n], &vec![1.0; n as usize]),
        scalar(ints("n", &[n])),
    ];
    let path = f.model(vec![body(node("Loop", &["n", "", "x"], &["y"]), "body", step)], w);
    let v = halcyon(&["run", text(&path), "--backend", "cpu", "--input", "ones", "--json"]).ok().json();
    let w = v["warnings"].to_string();
    assert!(w.contains("Loop#0") && w.contains("cannot be compiled") && w.contains("Slice"), "{w}");
}

#[test]
fn a_long_loop_is_one_graph_where_one_is_wanted() {
    let f = Files::new();
    let step = graph(
        vec![node("Sub", &["x", "s"], &["t"])],
        vec![port("i", 7, &[]), port("go", 9, &[]), port("s", 1, &[2])],
        vec![port("go", 9, &[]), port("t", 1, &[2])],
        vec![],
    );
    let loops = body(node("Loop", &["n", "", "x"], &["y"]), "body", step);
    let path = f.model(vec![loops], vec![scalar(ints("n", &[601]))]);
    let to = f.0.path().join("one.onnx");
    halcyon(&["export", text(&path), "-o", text(&to)]).ok();
    let run = |p| {
        let v = halcyon(&["run", text(p), "--backend", "cpu", "--input", "ones", "--json"]).ok().json();
        (v["staged"].is_string(), v["outputs"][0]["values"].to_string())
    };
    assert_eq!((run(&path), run(&to)), ((true, "[0.0,0.0]".into()), (false, "[0.0,0.0]".into())));
    halcyon(&["run", text(&path), "--backend", "cpu", "--input", "ones", "--receipts"]).ok();
    halcyon(&["inspect", text(&path)]).ok();
    halcyon(&["fit", text(&path), "--backend", "cpu"]).ok();
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_a_loop_and_leaves_no_output() {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Stdio;
    let f = Files::new();
    let (n, w) = adding("", None);
    let path = f.model(vec![n], w);
    let out = f.0.path().join("out.npy");
    let most = u64::MAX.to_string();
    let args =
        ["run", text(&path), "--backend", "cpu", "-i", "ones", "--max-iterations", &most, "-o", text(&out)];
    let mut child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id().to_string();
    // Until the command has set its handler, the signal would kill it directly. So wait for the handler
    // before sending the signal.
    let caught = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let mask = status.lines().find_map(|l| l.strip_prefix("SigCgt:").map(str::trim).map(String::from));
        mask.and_then(|m| u64::from_str_radix(&m, 16).ok()).is_none_or(|m| m & 0b10 != 0)
    };
    while !caught() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    if !std::path::Path::new("/proc/self/status").exists() {
        std::thread::sleep(std::time::Duration::from_secs(2));
    }
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let done = child.wait_with_output().unwrap();
    assert_eq!((done.status.code(), done.status.signal()), (Some(130), None), "{done:?}");
    let left: Vec<_> = std::fs::read_dir(f.0.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["m.onnx"]);
}
