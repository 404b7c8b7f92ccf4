//! Tests of specific attacks. For any file contents, the command must end with one clear error and the
//! documented exit code, within limits on time and memory. It must not panic or run into the system's own
//! limits.
//!
//! Attacks with many cases run in this process; exit codes, messages and memory are tested on the command.

mod common;
#[path = "../../halcyon-formats/tests/support/models.rs"]
#[allow(dead_code)]
mod models;
#[path = "../../halcyon-formats/tests/support/mutate.rs"]
#[allow(dead_code)]
mod mutate;

use bytes::Bytes;
use common::*;
use halcyon::{Backend, BackendType, ConstData, Error, Level, OnnxSession, Replay, Result, Session};
use halcyon_formats::onnx::proto::*;
use halcyon_formats::onnx::tensor::{self, External};
use halcyon_formats::onnx::{Datum, Model, PortType, RunOptions};
use halcyon_formats::{npy, npz, safetensors};
use halcyon_ir::{Bindings, DType, Graph, TensorType};
use models::{body, floats, graph, int, ints, list, model, node, port, scalar, with};
use prost::Message;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Limits on the command's resident memory in any attack, and on its address space, which includes threads
/// and mapped files.
const RESIDENT: u64 = 400 << 20;
const ADDRESSES: u64 = 8 << 30;

static DIGITS: LazyLock<Bytes> =
    LazyLock::new(|| std::fs::read(root().join("models/digits.onnx")).expect("the model").into());

/// The CPU with a small memory limit.
static CPU: LazyLock<Backend> = LazyLock::new(|| {
    let b = Backend::builder().backend_type(BackendType::Cpu).num_threads(1).memory_limit(256 << 20);
    b.build().expect("the CPU is a device")
});

/// Values for a model's inputs, if they are small.
fn inputs(m: &Model) -> Result<Option<Vec<Datum>>> {
    let one = |t: &PortType| {
        let PortType::Tensor { dtype, shape: Some(s) } = t else { return None };
        let mut names = BTreeSet::new();
        s.iter().for_each(|d| d.symbols(&mut names));
        let dims = s.bind(&names.into_iter().map(|n| (n, 1)).collect::<Bindings>()).ok()?.known()?;
        let n = dims.iter().try_fold(1usize, |a, b| a.checked_mul(*b)).filter(|n| *n <= 65_536)?;
        ConstData::new(*dtype, &dims, std::sync::Arc::new(vec![0u8; dtype.bytes(n)])).ok().map(Datum::Tensor)
    };
    Ok(m.inputs()?.iter().map(|p| one(&p.ty)).collect())
}

/// Does everything that running a model involves.
fn run(file: Bytes) -> Result<()> {
    let m = Model::parse(file, External::none(), "m.onnx")?;
    m.check("cpu")?;
    if let Some(x) = inputs(&m)? {
        let options = RunOptions { max_iterations: 1000, ..RunOptions::default() };
        OnnxSession::new(&CPU, m)?.with_options(options).run_data(&x)?;
    }
    Ok(())
}

/// Checks that `f` does not panic, and that an error is not internal and has an exit code from 1 to 5.
#[track_caller]
fn returns<T>(what: &str, f: impl FnOnce() -> Result<T>) -> bool {
    match catch_unwind(AssertUnwindSafe(f)) {
        Err(_) => panic!("{what}: a panic"),
        Ok(Err(e)) => {
            assert!(!matches!(e, Error::Internal(_)), "{what}: {e}");
            assert!((1..=5).contains(&e.exit_code()), "{what}: {e}");
            false
        }
        Ok(Ok(_)) => true,
    }
}

/// Runs the command with limited address space. Returns its output, how it ended, and its peak memory.
fn attack(args: &[&str]) -> (Done, Option<u64>) {
    let mut c = if cfg!(target_os = "linux") {
        let mut c = Command::new("sh");
        let script = format!("ulimit -v {}; exec \"$0\" \"$@\"", ADDRESSES >> 10);
        c.args(["-c", &script, env!("CARGO_BIN_EXE_halcyon")]);
        c
    } else {
        Command::new(env!("CARGO_BIN_EXE_halcyon"))
    };
    c.args(args).current_dir(root()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = c.spawn().expect("the command starts");
    let status = format!("/proc/{}/status", child.id());
    let mut peak = None;
    let start = Instant::now();
    loop {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:")?.trim().strip_suffix("kB"));
        peak = line.and_then(|n| n.trim().parse::<u64>().ok()).map(|k| k << 10).or(peak);
        if child.try_wait().expect("the command can be waited for").is_some() {
            break;
        }
        if start.elapsed() > Duration::from_secs(300) {
            let _ = child.kill();
            panic!("{args:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let o = child.wait_with_output().expect("the command ended");
    let text = |b| String::from_utf8(b).expect("text");
    (Done { code: o.status.code().unwrap_or(-1), out: text(o.stdout), err: text(o.stderr) }, peak)
}

/// Checks that the command fails with this code, that one line contains all of these parts, and that it used
/// little memory.
#[track_caller]
fn refused(args: &[&str], code: i32, parts: &[&str]) {
    let (done, peak) = attack(args);
    assert!(!done.err.contains("panicked") && !done.err.contains("internal error"), "{args:?}: {done:?}");
    assert!(peak.is_none_or(|p| p < RESIDENT), "{args:?}: {peak:?} bytes, {done:?}");
    let text = done.err.trim_end().to_string();
    done.fails(code, parts);
    assert!(text.lines().count() == 1 && text.len() < 5000, "{text}");
}

/// A folder for model files, which are run with inputs of ones and half a gigabyte.
struct Attacks {
    dir: tempfile::TempDir,
    count: usize,
}

impl Attacks {
    fn new() -> Attacks {
        Attacks { dir: tempfile::tempdir().expect("a folder"), count: 0 }
    }

    #[track_caller]
    fn bytes(&mut self, file: &[u8], more: &[&str], code: i32, parts: &[&str]) {
        self.count += 1;
        let path = self.dir.path().join(format!("m{}.onnx", self.count));
        std::fs::write(&path, file).expect("the model is written");
        let mut args = vec!["run", text(&path), "--backend", "cpu", "--memory-limit", "512M"];
        args.extend(more);
        refused(&args, code, parts);
    }

    #[track_caller]
    fn model(&mut self, m: &ModelProto, more: &[&str], code: i32, parts: &[&str]) {
        self.bytes(&m.encode_to_vec(), more, code, parts);
    }

    #[track_caller]
    fn graph(&mut self, g: GraphProto, code: i32, parts: &[&str]) {
        let given: Vec<String> = g.input.iter().map(|_| "ones".to_string()).collect();
        let more: Vec<&str> = given.iter().flat_map(|s| ["--input", s]).collect();
        self.model(&model(17, g), &more, code, parts);
    }
}

/// `y = op(x, w…)` with `x` of two floats.
fn op(n: NodeProto, weights: Vec<TensorProto>) -> GraphProto {
    graph(vec![n], vec![port("x", 1, &[2])], vec![port("y", 1, &[])], weights)
}

#[test]
fn truncated_files() {
    // Every prefix of a message is either a message or truncated.
    let mut whole = 0;
    for n in (0..DIGITS.len()).step_by(64) {
        whole += usize::from(returns(&format!("cut at {n}"), || run(DIGITS.slice(..n))));
    }
    assert!(whole < 3, "{whole} prefixes of the model run");
    let mut a = Attacks::new();
    for n in [0, 1, 64, 6400, DIGITS.len() - 1] {
        let parts: &[&str] =
            if n > 1 { &["not an ONNX model: it is cut short or damaged at byte"] } else { &[] };
        a.bytes(&DIGITS[..n], &["--input", "ones"], 1, parts);
    }
    // Tensors and images.
    let t = ConstData::from_slice(&[1, 1, 8, 8], &[0.5f32; 64]).expect("a tensor");
    let png = std::fs::read(root().join("models/digit-7.png")).expect("the picture");
    let files = [
        ("npy", npy::encode(&t).expect("an array")),
        ("npz", npz::encode(&[("image", &t)]).expect("an archive")),
        ("pb", tensor::encode(&t, "image").encode_to_vec()),
        ("png", png),
    ];
    for (kind, file) in files {
        // The last bytes of a PNG only mark its end.
        let most = file.len() - if kind == "png" { 40 } else { 1 };
        for n in [file.len() / 2, most] {
            let path = a.dir.path().join(format!("cut.{kind}"));
            std::fs::write(&path, &file[..n]).expect("the file is written");
            refused(
                &["run", "models/digits.onnx", "--backend", "cpu", "--input", text(&path)],
                1,
                &[text(&path)],
            );
        }
    }
}

#[test]
fn flipped_bits_of_a_model() {
    let mut r = mutate::Rng(7);
    let mut ran = 0;
    for k in 0..400 {
        let mut f = DIGITS.to_vec();
        // Mutates bytes before and between the weights, where the structure is.
        for _ in 0..1 + r.below(3) {
            let at = if r.once_in(2) { r.below(1200.min(f.len())) } else { r.below(f.len()) };
            f[at] ^= 1 << r.below(8);
        }
        ran += usize::from(returns(&format!("flip {k}"), || run(f.into())));
    }
    // Most flips hit a weight or a name that nothing uses.
    assert!(ran > 20 && ran < 400, "{ran} of 400 ran");
}

#[test]
fn flipped_bits_of_tensors() {
    let t = ConstData::from_slice(&[2, 3, 4], &[0.5f32; 24]).expect("a tensor");
    let header = r#"{"a":{"dtype":"F32","shape":[2,3,4],"data_offsets":[0,96]}}"#;
    let mut st = (header.len() as u64).to_le_bytes().to_vec();
    st.extend(header.as_bytes());
    st.extend(t.bytes());
    let files = [
        npy::encode(&t).expect("an array"),
        npz::encode(&[("a", &t)]).expect("an archive"),
        tensor::encode(&t, "a").encode_to_vec(),
        st,
    ];
    let mut r = mutate::Rng(8);
    for (kind, file) in files.iter().enumerate() {
        for k in 0..500 {
            let mut f = file.clone();
            let at = r.below(f.len());
            f[at] ^= 1 << r.below(8);
            let f = Bytes::from(f);
            returns(&format!("file {kind}, flip {k}"), || match kind {
                0 => npy::parse(f, "t").map(drop),
                1 => npz::Npz::parse(f, "t").and_then(|z| z.get("a")).map(drop),
                2 => tensor::parse_pb(f, &External::none(), "t").map(drop),
                _ => safetensors::SafeTensors::parse(f, "t").and_then(|s| s.get("a")).map(drop),
            });
        }
    }
}

#[test]
fn flipped_bits_of_a_replay_file() {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [3usize, 4]));
    let w = g.constant(ConstData::from_slice(&[4, 2], &[0.5f32; 8]).expect("a tensor"));
    let y = g.matmul(x, w).and_then(|y| g.softmax(y, 1)).expect("a graph");
    g.output("y", y);
    let x = [ConstData::from_slice(&[3, 4], &[0.25f32; 12]).expect("a tensor")];
    let session = Session::new(&CPU, g);
    let replay = session.replay_of(&x, &Error::unsupported("nothing", "It is a test")).expect("a replay");
    let file = replay.to_bytes().expect("a file");
    let small = Backend::builder().backend_type(BackendType::Cpu).num_threads(1).memory_limit(256 << 20);
    let reference = small.level(Level::O0).build().expect("the CPU is a device");
    let mut r = mutate::Rng(9);
    let mut ran = 0;
    for k in 0..600 {
        let mut f = file.clone();
        for _ in 0..1 + r.below(2) {
            let at = r.below(f.len());
            f[at] ^= 1 << r.below(8);
        }
        ran += usize::from(returns(&format!("flip {k}"), || {
            let replay = Replay::from_bytes(&f, "flipped.replay")?;
            replay.run(&CPU, &reference).map(drop)
        }));
    }
    assert!(ran > 20 && ran < 600, "{ran} of 600 ran");
}

#[test]
fn changed_models_run_or_are_refused() {
    let mut ran = 0;
    // Excluded, because a mutated loop may legitimately run forever.
    for (name, m) in models::all().into_iter().filter(|(name, _)| *name != "loop") {
        for k in 0..20u64 {
            let start = Instant::now();
            let mut m = m.clone();
            mutate::model(&mut m, &mut mutate::Rng(k << 8 | 0x11));
            ran += usize::from(returns(&format!("{name}, change {k}"), || run(m.encode_to_vec().into())));
            let took = start.elapsed();
            if took > Duration::from_secs(2) {
                println!("{name}, change {k}: {took:?}");
            }
        }
    }
    assert!(ran > 3, "{ran}");
}

#[test]
fn a_faulty_model_is_no_usage_error() {
    let mut a = Attacks::new();
    let scalars = |op: &str, of: &[f32]| {
        let names: Vec<String> = (0..of.len()).map(|k| format!("s{k}")).collect();
        let w: Vec<TensorProto> = names.iter().zip(of).map(|(n, v)| scalar(floats(n, &[1], &[*v]))).collect();
        let ins: Vec<&str> = names.iter().map(String::as_str).collect();
        (node(op, &ins, &["z"]), w)
    };
    let (n, w) = scalars("Range", &[0.0, 1.0, 0.0]);
    let mut g = op(node("Neg", &["x"], &["y"]), w);
    g.node.push(n);
    g.output = vec![port("z", 1, &[])];
    a.graph(g, 1, &["Range"]);
    let two = vec![ints("s", &[3, 5])];
    a.graph(op(node("Reshape", &["x", "s"], &["y"]), two), 1, &["Reshape"]);
    let top = int(node("TopK", &["x", "k"], &["y", "i"]), "axis", 7);
    a.graph(op(top, vec![ints("k", &[1])]), 1, &["TopK"]);
    let sum = with(node("Einsum", &["x"], &["y"]), "equation", |a| {
        (a.r#type, a.s) = (attribute::STRING, b"ij,jk->ik".to_vec().into())
    });
    a.graph(op(sum, vec![]), 1, &["Einsum"]);
    let still = list(node("Conv", &["x", "w"], &["y"]), "strides", &[0]);
    let w = floats("w", &[1, 1, 2], &[1.0, 2.0]);
    let g = graph(vec![still], vec![port("x", 1, &[1, 1, 4])], vec![port("y", 1, &[])], vec![w]);
    a.graph(g, 1, &["stride"]);
}

/// A deflated archive of one array of zeros whose header and directory contain the given claims.
fn bomb(name: &str, floats: usize, claimed: usize) -> Vec<u8> {
    let mut head = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({claimed},), }}");
    while (10 + head.len() + 1) % 64 != 0 {
        head.push(' ');
    }
    head.push('\n');
    let mut body = b"\x93NUMPY\x01\x00".to_vec();
    body.extend((head.len() as u16).to_le_bytes());
    body.extend(head.as_bytes());
    let size = body.len() + 4 * claimed;
    let mut z = flate2::write::DeflateEncoder::new(vec![], flate2::Compression::best());
    std::io::Write::write_all(&mut z, &body).expect("packed");
    let zeros = vec![0u8; 1 << 20];
    let mut left = 4 * floats;
    while left > 0 {
        let n = left.min(zeros.len());
        std::io::Write::write_all(&mut z, &zeros[..n]).expect("packed");
        left -= n;
    }
    let packed = z.finish().expect("packed");
    let file = format!("{name}.npy");
    let mut common = vec![];
    common.extend([45u8, 0, 0, 8, 8, 0, 0, 0, 0x21, 0]);
    common.extend(0u32.to_le_bytes());
    common.extend([0xff; 8]);
    common.extend((file.len() as u16).to_le_bytes());
    let extra: Vec<u8> = [1u16.to_le_bytes(), 16u16.to_le_bytes()]
        .concat()
        .into_iter()
        .chain((size as u64).to_le_bytes())
        .chain((packed.len() as u64).to_le_bytes())
        .collect();
    common.extend((extra.len() as u16).to_le_bytes());
    let mut out = b"PK\x03\x04".to_vec();
    out.extend(&common);
    out.extend(file.as_bytes());
    out.extend(&extra);
    out.extend(&packed);
    let at = out.len() as u32;
    out.extend(b"PK\x01\x02\x2d\x00");
    out.extend(&common);
    out.extend([0; 10]);
    out.extend(0u32.to_le_bytes());
    out.extend(file.as_bytes());
    out.extend(&extra);
    let len = out.len() as u32 - at;
    out.extend(b"PK\x05\x06\0\0\0\0\x01\0\x01\0");
    out.extend(len.to_le_bytes());
    out.extend(at.to_le_bytes());
    out.extend([0, 0]);
    out
}

#[test]
fn archives_that_unpack_to_more_than_there_is() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("bomb.npz");
    let open = dir.path().join("open.onnx");
    let n = vec![node("ReduceMax", &["image"], &["y"])];
    let mut g = graph(n, vec![port("image", 1, &[1])], vec![port("y", 1, &[])], vec![]);
    g.input = vec![common::port("image", DType::F32, &[Err("n")])];
    save(&model(17, g), &open);
    // One gigabyte of zeros in one megabyte. `inspect` reads only the header, and a model with an input of 64
    // numbers does not unpack it.
    let count = 256 << 20;
    std::fs::write(&path, bomb("image", count, count)).expect("a file");
    let (done, peak) = attack(&["inspect", text(&path), "--json"]);
    let v = done.ok().json();
    assert_eq!(v["tensors"][0]["shape"], serde_json::json!([count]), "{v}");
    assert!(peak.is_none_or(|p| p < 150 << 20), "{peak:?}");
    refused(
        &["run", "models/digits.onnx", "--backend", "cpu", "--input", text(&path)],
        2,
        &["'image'", "[268435456]"],
    );
    // If the model accepts any size, memory is the limit, and is checked before it is allocated.
    let given = ["run", text(&open), "--backend", "cpu", "--input", text(&path)];
    if cfg!(target_os = "linux") {
        let mut c = Command::new("sh");
        let script = "ulimit -v 1000000; exec \"$0\" \"$@\"";
        c.args(["-c", script, env!("CARGO_BIN_EXE_halcyon")]).args(given).current_dir(root());
        finish(&mut c).fails(5, &["out of memory on the host", "image"]);
    }
    // A claim of twenty gigabytes that do not exist; the directory and header are not trusted.
    std::fs::write(&path, bomb("image", 256 << 20, 5 << 30)).expect("a file");
    let (done, peak) = attack(&given);
    assert!([1, 5].contains(&done.code) && done.err.lines().count() == 1, "{done:?}");
    assert!(peak.is_none_or(|p| p < (1 << 30) + RESIDENT), "{peak:?}");
    let (done, _) = attack(&["inspect", text(&path)]);
    // Such a compression ratio is impossible, and `inspect` reports that about the member.
    assert!(done.code == 0 && done.out.contains("more than deflate can hold"), "{done:?}");
    // Header and directory disagree.
    let mut lies = bomb("image", 16, 16);
    let at = lies.windows(4).rposition(|w| w == [1, 0, 16, 0]).expect("sizes");
    lies[at + 4..at + 12].copy_from_slice(&(1u64 << 14).to_le_bytes());
    std::fs::write(&path, lies).expect("a file");
    refused(&given, 1, &["takes 64 bytes"]);
}

/// With any limit on address space, the command either runs or reports that memory is short.
#[cfg(target_os = "linux")]
#[test]
fn little_address_space_is_out_of_memory() {
    let digits = ["models/digits.onnx", "--backend", "cpu"];
    let run: Vec<&str> = ["run"].into_iter().chain(digits).chain(["--input", "ones"]).collect();
    let fit: Vec<&str> = ["fit"].into_iter().chain(digits).chain(["--batch", "500"]).collect();
    let inspect = vec!["inspect", "models/digits.onnx", "--backend", "cpu"];
    for (args, json) in [(run.clone(), false), (run, true), (fit, true), (inspect, true)] {
        let mut worked = 0;
        for mib in [100, 150, 200, 250, 300, 400, 600, 1000, 2000, 4000] {
            let mut c = Command::new("sh");
            let script = format!("ulimit -v {}; exec \"$0\" \"$@\"", mib << 10);
            c.args(["-c", &script, env!("CARGO_BIN_EXE_halcyon")]).args(&args).current_dir(root());
            if json {
                c.arg("--json");
            }
            let done = finish(&mut c);
            worked += usize::from(done.code == 0);
            // The loader itself fails with 127 before the command starts.
            assert!([0, 5, 127].contains(&done.code), "{args:?} with {mib} MiB: {done:?}");
            match (done.code, json) {
                (5, true) => assert_eq!(done.json()["exit_code"], 5, "{done:?}"),
                (5, false) => assert!(done.err.contains("out of memory"), "{done:?}"),
                _ => {}
            }
        }
        assert!(worked > 0, "{args:?}");
    }
}

#[test]
fn graphs_that_are_none() {
    let mut a = Attacks::new();
    let y = || vec![port("y", 1, &[2])];
    let x = || vec![port("x", 1, &[2])];
    let cycle =
        vec![node("Add", &["x", "b"], &["a"]), node("Neg", &["a"], &["b"]), node("Abs", &["b"], &["y"])];
    a.graph(graph(cycle, x(), y(), vec![]), 1, &["cycle", "Add#0, Neg#1"]);
    a.graph(graph(vec![node("Add", &["x", "y"], &["y"])], x(), y(), vec![]), 1, &["cycle", "Add#0"]);
    a.graph(op(node("Neg", &["nothing"], &["y"]), vec![]), 1, &["reads 'nothing'"]);
    a.graph(graph(vec![], x(), y(), vec![]), 1, &["output 'y' is not computed"]);
    let twice = vec![node("Neg", &["x"], &["y"]), node("Abs", &["x"], &["y"])];
    a.graph(graph(twice, x(), y(), vec![]), 1, &["'y', a result of Abs#1, has another source"]);
    a.graph(
        graph(vec![node("Neg", &["x"], &["x"])], x(), vec![port("x", 1, &[2])], vec![]),
        1,
        &["another source"],
    );
    let two = vec![port("x", 1, &[2]), port("x", 1, &[2])];
    let g = graph(vec![node("Neg", &["x"], &["y"])], two, y(), vec![]);
    a.model(&model(17, g), &["--input", "x=ones"], 1, &["input 'x' is declared twice"]);
    let w = || floats("w", &[2], &[1.0, 2.0]);
    a.graph(op(node("Add", &["x", "w"], &["y"]), vec![w(), w()]), 1, &["initializer 'w' is declared twice"]);
    a.bytes(b"", &[], 1, &["an empty file"]);
    a.bytes(b"hello, this is not a model", &[], 1, &["not an ONNX model"]);
    let mut m = model(17, op(node("Neg", &["x"], &["y"]), vec![]));
    m.opset_import = vec![m.opset_import[0].clone(); 5000];
    a.model(&m, &["--input", "ones"], 1, &["5000 operator sets"]);
}

#[test]
fn functions_that_expand_without_end() {
    let set = |d: &str, version| OperatorSetIdProto { domain: d.into(), version };
    let function = |name: &str, calls: Vec<NodeProto>| FunctionProto {
        name: name.into(),
        domain: "own".into(),
        input: vec!["a".into()],
        output: vec!["b".into()],
        node: calls,
        opset_import: vec![set("", 17), set("own", 1)],
        ..Default::default()
    };
    let call = |name: &str, i: &str, o: &str| {
        let mut n = node(name, &[i], &[o]);
        n.domain = "own".into();
        n
    };
    let with_functions = |functions: Vec<FunctionProto>| {
        let mut m = model(
            17,
            graph(vec![call("f0", "x", "y")], vec![port("x", 1, &[2])], vec![port("y", 1, &[2])], vec![]),
        );
        m.opset_import.push(set("own", 1));
        m.functions = functions;
        m
    };
    let mut a = Attacks::new();
    let one = &["--input", "ones"];
    // Recursive functions: calling itself, calling each other, a chain of ten thousand, and one that doubles
    // at each of forty levels.
    a.model(
        &with_functions(vec![function("f0", vec![call("f0", "a", "b")])]),
        one,
        1,
        &["nested deeper than 64"],
    );
    let pair = vec![function("f0", vec![call("f1", "a", "b")]), function("f1", vec![call("f0", "a", "b")])];
    a.model(&with_functions(pair), one, 1, &["nested deeper than 64"]);
    let chain = (0..10_000).map(|k| function(&format!("f{k}"), vec![call(&format!("f{}", k + 1), "a", "b")]));
    let mut chain: Vec<FunctionProto> = chain.collect();
    chain.push(function("f10000", vec![node("Neg", &["a"], &["b"])]));
    a.model(&with_functions(chain), one, 1, &["nested deeper than 64"]);
    let double = |k: usize| {
        let next = format!("f{}", k + 1);
        function(&format!("f{k}"), vec![call(&next, "a", "m"), call(&next, "m", "b")])
    };
    let mut laughs: Vec<FunctionProto> = (0..40).map(double).collect();
    laughs.push(function("f40", vec![node("Identity", &["a"], &["b"])]));
    a.model(&with_functions(laughs), one, 3, &["nodes"]);
}

/// Nests an encoded graph in `levels` `If` nodes.
fn wrapped(levels: usize) -> Vec<u8> {
    let field = |number: u64, body: &[u8]| {
        let mut v = vec![];
        prost::encoding::encode_varint(number << 3 | 2, &mut v);
        prost::encoding::encode_varint(body.len() as u64, &mut v);
        v.extend(body);
        v
    };
    let mut g =
        graph(vec![node("Neg", &["x"], &["y"])], vec![], vec![port("y", 1, &[2])], vec![]).encode_to_vec();
    for _ in 0..levels {
        let mut attr = field(1, b"then_branch");
        attr.extend(field(6, &g));
        attr.extend([0xa0, 0x01, 5]);
        let mut n = node("If", &["c"], &["y"]).encode_to_vec();
        n.extend(field(5, &attr));
        g = field(1, &n);
        g.extend(field(12, &port("y", 1, &[2]).encode_to_vec()));
    }
    let mut m = ModelProto { ir_version: 8, ..model(17, GraphProto::default()) };
    m.graph = None;
    let mut out = m.encode_to_vec();
    out.extend(field(7, &g));
    out
}

#[test]
fn nesting_and_length() {
    let mut a = Attacks::new();
    for levels in [34, 1000, 10_000] {
        a.bytes(&wrapped(levels), &[], 1, &["nested deeper than 100 at byte"]);
    }
    // Shallower nesting works.
    let path = a.dir.path().join("nested.onnx");
    save(&model(17, models::nested_if(30)), &path);
    halcyon(&["run", text(&path), "--backend", "cpu", "--input", "ones", "--input", "ones"]).ok();
    // Deeply nested optionals.
    let mut n = vec![node("Optional", &["x"], &["o0"])];
    n.extend((0..20_000).map(|k| node("Optional", &[&format!("o{k}")], &[&format!("o{}", k + 1)])));
    n.push(node("OptionalGetElement", &["o20000"], &["y"]));
    a.graph(
        graph(n, vec![port("x", 1, &[2])], vec![port("y", 1, &[2])], vec![]),
        3,
        &["sequences in each other"],
    );
    // An empty loop with nine quintillion iterations.
    let nothing = graph(
        vec![node("Identity", &["go"], &["on"]), node("Identity", &["s"], &["t"])],
        vec![port("i", 7, &[]), port("go", 9, &[]), port("s", 1, &[2])],
        vec![port("on", 9, &[]), port("t", 1, &[2])],
        vec![],
    );
    let n = body(node("Loop", &["n", "", "x"], &["y"]), "body", nothing);
    a.graph(
        op(n, vec![scalar(ints("n", &[i64::MAX]))]),
        1,
        &["Loop#0 has not ended after 10000000 iterations", "--max-iterations"],
    );
    // Two million empty messages of two bytes each.
    let mut bomb = model(17, GraphProto::default()).encode_to_vec();
    let empty = [0x2a, 0x00].repeat(2_000_000);
    let mut n = vec![0x0a];
    prost::encoding::encode_varint(empty.len() as u64, &mut n);
    n.extend(empty);
    bomb.push(0x3a);
    prost::encoding::encode_varint(n.len() as u64, &mut bomb);
    bomb.extend(n);
    a.bytes(&bomb, &[], 1, &["bytes of memory, more than"]);
}

/// A chain of nodes over `x` of shape `[2, 3]`.
fn chain(n: usize, one: impl Fn(usize, &str, &str) -> NodeProto) -> ModelProto {
    let name = |k: usize| if k == n { "y".to_string() } else { format!("v{k}") };
    let mut nodes: Vec<NodeProto> = (1..=n).map(|k| one(k, &name(k - 1), &name(k))).collect();
    nodes[0].input[0] = "x".into();
    model(17, graph(nodes, vec![port("x", 1, &[2, 3])], vec![port("y", 1, &[])], vec![]))
}

#[test]
fn long_chains_do_not_recurse_or_take_quadratic_time() {
    let views = |k: usize, i: &str, o: &str| match k % 2 {
        0 => node("Transpose", &[i], &[o]),
        _ => int(node("Flatten", &[i], &[o]), "axis", 1 - (k as i64 / 2) % 2),
    };
    type Make = fn(usize) -> ModelProto;
    let makes: [(&str, Make); 4] = [
        ("element-wise", |n| chain(n, |_, i, o| node("Neg", &[i], &[o]))),
        ("alternating", |n| {
            chain(n, |k, i, o| node(if k % 2 == 0 { "Transpose" } else { "Exp" }, &[i], &[o]))
        }),
        ("reductions", |n| {
            chain(n, |_, i, o| {
                with(node("Softmax", &[i], &[o]), "axis", |a| (a.r#type, a.i) = (attribute::INT, 1))
            })
        }),
        ("outputs", |n| {
            let mut m = chain(n, |_, i, o| node("Neg", &[i], &[o]));
            if let Some(g) = &mut m.graph {
                g.output = (1..n).map(|k| port(&format!("v{k}"), 1, &[])).collect();
            }
            m
        }),
    ];
    // CPU time of this thread, so that other load does not count. Systems that do not report it disable the
    // check.
    let busy = || -> Option<Duration> {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        Some(Duration::from_nanos(text.split_whitespace().next()?.parse().ok()?))
    };
    let time = |m: &ModelProto| {
        let file = Bytes::from(m.encode_to_vec());
        let before = busy();
        run(file).expect("the chain runs");
        busy().zip(before).map(|(after, before)| after - before)
    };
    for (name, make) in makes {
        let (short, long) = (time(&make(2000)), time(&make(10_000)));
        println!("{name}: {short:?}, five times as long {long:?}");
        if let (Some(short), Some(long)) = (short, long) {
            assert!(long < short * 15 + Duration::from_secs(2), "{name}: {short:?}, then {long:?}");
        }
    }
    let long = chain(10_000, views);
    println!("views: {:?}", time(&long));
}

#[test]
fn sizes_that_no_machine_has() {
    let mut a = Attacks::new();
    let raw = |dims: &[i64]| TensorProto { dims: dims.to_vec(), ..floats("w", &[], &[1.0, 2.0]) };
    for dims in [&[i64::MAX][..], &[1 << 40], &[1 << 32, 1 << 32], &[i64::MAX, i64::MAX, 0], &[3]] {
        a.graph(op(node("Add", &["x", "w"], &["y"]), vec![raw(dims)]), 1, &["tensor 'w'"]);
    }
    a.graph(op(node("Add", &["x", "w"], &["y"]), vec![raw(&[-1])]), 1, &["negative size"]);
    // Inputs.
    let big = |dims: &[i64]| {
        graph(vec![node("Neg", &["x"], &["y"])], vec![port("x", 1, dims)], vec![port("y", 1, &[])], vec![])
    };
    a.graph(big(&[i64::MAX, i64::MAX]), 2, &["too large to address"]);
    a.graph(big(&[1 << 40]), 5, &["out of memory"]);
    let small = model(17, big(&[-1]));
    a.model(&small, &["--input", "x=zeros:99999999999999999999"], 2, &["is not a shape"]);
    a.model(&small, &["--input", "x=zeros:9223372036854775807x9"], 2, &["too large"]);
    // Results. The device may use half a gigabyte.
    let shaped = |n: NodeProto, shape: &[i64]| op(n, vec![ints("s", shape)]);
    let full = || node("ConstantOfShape", &["s"], &["y"]);
    a.graph(shaped(full(), &[1 << 30]), 5, &["out of memory", "ConstantOfShape"]);
    a.graph(shaped(full(), &[1 << 46]), 1, &["too large to address"]);
    a.graph(shaped(full(), &[i64::MAX, 2]), 1, &["too large"]);
    a.graph(shaped(full(), &[-1]), 1, &["negative"]);
    let expand = || node("Expand", &["x", "s"], &["y"]);
    a.graph(shaped(expand(), &[1 << 28, 2]), 5, &["out of memory"]);
    a.graph(shaped(expand(), &[1 << 62, 2]), 1, &["too large"]);
    let tile = || node("Tile", &["x", "s"], &["y"]);
    a.graph(shaped(tile(), &[1 << 30]), 5, &["out of memory"]);
    a.graph(shaped(tile(), &[i64::MAX]), 1, &["too large"]);
    let pad = || node("Pad", &["x", "s"], &["y"]);
    a.graph(shaped(pad(), &[0, 1 << 30]), 5, &["out of memory"]);
    a.graph(shaped(pad(), &[i64::MAX, i64::MAX]), 1, &["out of range"]);
    a.graph(shaped(node("Reshape", &["x", "s"], &["y"]), &[i64::MAX, 0, i64::MAX]), 1, &["has no size"]);
    a.graph(shaped(node("Reshape", &["x", "s"], &["y"]), &[i64::MAX, i64::MAX]), 1, &["too large"]);
    let range = |to: i64| {
        let v = |name: &str, n| scalar(ints(name, &[n]));
        op(node("Range", &["from", "to", "by"], &["y"]), vec![v("from", 0), v("to", to), v("by", 1)])
    };
    a.graph(range(1 << 30), 5, &["out of memory"]);
    a.graph(range(i64::MAX), 1, &["no end"]);
    // Large intermediates, and a chain that multiplies its size at every step.
    let n = vec![
        node("ConstantOfShape", &["s"], &["b"]),
        node("Softmax", &["b"], &["c"]),
        node("ReduceMax", &["c"], &["y"]),
    ];
    a.graph(
        graph(n, vec![], vec![port("y", 1, &[])], vec![ints("s", &[1 << 15, 1 << 15])]),
        5,
        &["out of memory"],
    );
    let grow = |k: usize| {
        int(node("Concat", &[&format!("v{k}"), &format!("v{k}")], &[&format!("v{}", k + 1)]), "axis", 0)
    };
    let mut n = vec![node("Neg", &["x"], &["v0"])];
    n.extend((0..60).map(grow));
    a.graph(graph(n, vec![port("x", 1, &[2])], vec![port("v60", 1, &[])], vec![]), 1, &["too large"]);
    // More axes than supported.
    let axes: Vec<i64> = (0..4000).collect();
    a.graph(op(node("Unsqueeze", &["x", "a"], &["y"]), vec![ints("a", &axes)]), 1, &["axes"]);
    // Numbers of parts.
    let n = int(node("Split", &["x"], &["y"]), "num_outputs", 65_536);
    a.model(&model(18, op(n, vec![])), &["--input", "ones"], 1, &["parts"]);
    let n = vec![
        node("Expand", &["x", "s"], &["b"]),
        node("SplitToSequence", &["b"], &["q"]),
        node("SequenceLength", &["q"], &["y"]),
    ];
    let g = graph(n, vec![port("x", 1, &[1])], vec![port("y", 7, &[])], vec![ints("s", &[1 << 40])]);
    a.graph(g, 3, &["parts"]);
    // Window attributes.
    for (name, v) in [
        ("pads", [i32::MAX as i64; 2]),
        ("dilations", [i32::MAX as i64; 2]),
        ("strides", [0; 2]),
        ("pads", [i64::MIN; 2]),
    ] {
        let v = if name == "pads" { &v[..] } else { &v[..1] };
        let n = list(node("Conv", &["x", "w"], &["y"]), name, v);
        let w = floats("w", &[1, 1, 2], &[1.0, 2.0]);
        let g = graph(vec![n], vec![port("x", 1, &[1, 1, 4])], vec![port("y", 1, &[])], vec![w]);
        let (done, peak) = {
            let path = a.dir.path().join("window.onnx");
            save(&model(17, g), &path);
            attack(&["run", text(&path), "--backend", "cpu", "--memory-limit", "512M", "--input", "ones"])
        };
        assert!([1, 5].contains(&done.code) && done.err.lines().count() == 1, "{name} {v:?}: {done:?}");
        assert!(peak.is_none_or(|p| p < RESIDENT), "{name}: {peak:?}");
    }
}

#[test]
fn wrong_types_and_missing_parts() {
    let mut a = Attacks::new();
    let two = |n: NodeProto, b: ValueInfoProto| {
        graph(vec![n], vec![port("x", 1, &[2]), b], vec![port("y", 1, &[])], vec![])
    };
    a.graph(two(node("Add", &["x", "b"], &["y"]), port("b", 7, &[2])), 1, &["i64"]);
    a.graph(two(node("Add", &["x", "b"], &["y"]), port("b", 1, &[3])), 1, &["[2]", "[3]"]);
    a.graph(two(node("MatMul", &["x", "b"], &["y"]), port("b", 1, &[3, 2])), 1, &["matmul"]);
    a.graph(op(node("Add", &["x"], &["y"]), vec![]), 1, &["takes 2 operands"]);
    a.graph(op(node("Reshape", &["x"], &["y"]), vec![]), 1, &["operand 1 is missing"]);
    a.graph(op(node("Concat", &["x"], &["y"]), vec![]), 1, &["'axis' is missing"]);
    let wrong = with(node("Concat", &["x"], &["y"]), "axis", |a| (a.r#type, a.f) = (attribute::FLOAT, 0.0));
    a.graph(op(wrong, vec![]), 1, &["attribute 'axis' has type 1"]);
    a.graph(op(int(node("Concat", &["x"], &["y"]), "axis", i64::MIN), vec![]), 1, &["axis"]);
    // Invalid type codes in a weight and in an input; strings where numbers are needed.
    let odd = |code| TensorProto { data_type: code, ..floats("w", &[2], &[1.0, 2.0]) };
    a.graph(op(node("Add", &["x", "w"], &["y"]), vec![odd(0)]), 1, &["tensor 'w'"]);
    a.graph(op(node("Add", &["x", "w"], &["y"]), vec![odd(99)]), 1, &["tensor 'w'"]);
    a.graph(two(node("Add", &["x", "b"], &["y"]), port("b", -1, &[2])), 1, &["'b'"]);
    let words = vec!["a".into(), "b".into()];
    let text = TensorProto {
        name: "w".into(),
        dims: vec![2],
        data_type: 8,
        string_data: words,
        ..Default::default()
    };
    a.graph(op(node("Add", &["x", "w"], &["y"]), vec![text.clone()]), 3, &["strings"]);
    let few = TensorProto { dims: vec![1 << 40], ..text };
    a.graph(op(node("Add", &["x", "w"], &["y"]), vec![few]), 1, &["do not fill"]);
    // Inputs that are missing, of another shape, or of another dtype.
    let m = model(17, two(node("Add", &["x", "b"], &["y"]), port("b", 1, &[2])));
    let path = a.dir.path().join("two.onnx");
    save(&m, &path);
    let path = self::text(&path).to_string();
    let done = halcyon(&["run", &path, "--backend", "cpu", "--input", "ones"]);
    done.fails(2, &["not given", "b f32[2]"]);
    refused(&["run", &path, "--backend", "cpu", "--input", "ones", "--input", "zeros:3"], 2, &["'b'", "[3]"]);
    let npy_path = a.dir.path().join("i.npy");
    npy::write(&npy_path, &ConstData::from_slice(&[2], &[1i64, 2]).expect("a tensor")).expect("a file");
    let given = format!("b={}", self::text(&npy_path));
    refused(
        &["run", &path, "--backend", "cpu", "--input", "x=ones", "--input", &given],
        2,
        &["i64", "the model takes f32"],
    );
}

#[test]
fn sparse_weights() {
    let mut a = Attacks::new();
    let g = |dims: &[i64], at: TensorProto| {
        let mut g = op(node("Add", &["x", "w"], &["y"]), vec![]);
        let values = Some(floats("w", &[2], &[1.0, 2.0]));
        g.sparse_initializer = vec![SparseTensorProto { values, indices: Some(at), dims: dims.to_vec() }];
        g
    };
    a.graph(g(&[2], ints("", &[0, 2])), 1, &["sparse tensor 'w'", "outside"]);
    a.graph(g(&[2], ints("", &[-1, 1])), 1, &["outside"]);
    a.graph(g(&[2], ints("", &[1, 0])), 1, &["does not come after"]);
    a.graph(g(&[i64::MAX], ints("", &[0, 1])), 1, &["too large"]);
    // Nothing of this size is allocated before the device's limit is checked.
    a.graph(g(&[1 << 40], ints("", &[0, 1])), 1, &["[2]"]);
    let mut huge = g(&[1 << 30], ints("", &[0, 1]));
    huge.node = vec![node("Neg", &["w"], &["y"])];
    a.graph(huge, 5, &["out of memory"]);
    // A valid sparse tensor works.
    let path = a.dir.path().join("sparse.onnx");
    save(&model(17, g(&[2], ints("", &[0, 1]))), &path);
    let out = a.dir.path().join("out");
    let args = ["run", text(&path), "--backend", "cpu", "--input", "ones", "--output-dir", text(&out)];
    halcyon(&args).ok();
    assert_eq!(npy::read(&out.join("y.npy")).expect("an output").to_vec::<f32>(), [2.0, 3.0]);
}

#[test]
fn external_data_outside_the_folder() {
    let a = Attacks::new();
    let secret = a.dir.path().join("secret");
    std::fs::write(&secret, [0u8; 64]).expect("a file");
    let below = a.dir.path().join("below");
    std::fs::create_dir(&below).expect("a folder");
    let w = |location: &str, more: &[(&str, &str)]| {
        let entry = |k: &str, v: &str| StringStringEntryProto { key: k.into(), value: v.into() };
        let mut external_data = vec![entry("location", location)];
        external_data.extend(more.iter().map(|(k, v)| entry(k, v)));
        let t =
            TensorProto { raw_data: None, data_location: EXTERNAL, external_data, ..floats("w", &[2], &[]) };
        model(17, op(node("Add", &["x", "w"], &["y"]), vec![t]))
    };
    let try_one = |m: &ModelProto, parts: &[&str]| {
        let path = below.join("m.onnx");
        save(m, &path);
        refused(&["run", text(&path), "--backend", "cpu", "--input", "ones"], 1, parts);
    };
    let absolute = text(&secret).to_string();
    for location in ["../secret", "x/../../secret", &absolute, "..\\secret", "C:secret", "", "a\0b"] {
        try_one(&w(location, &[]), &["leaves the model's folder"]);
    }
    std::fs::write(below.join("data"), [0u8; 16]).expect("a file");
    try_one(&w("none", &[]), &["none"]);
    try_one(&w(".", &[]), &["not a regular file"]);
    for (k, v) in [
        ("offset", "9"),
        ("offset", "18446744073709551615"),
        ("length", "9"),
        ("offset", "-1"),
        ("length", "1e9"),
    ] {
        try_one(&w("data", &[(k, v)]), &["external"]);
    }
    // Symbolic links must stay in the folder, be allowed explicitly, or belong to a Hugging Face cache.
    #[cfg(unix)]
    {
        use std::os::unix::fs::symlink;
        symlink("data", below.join("near")).expect("a link");
        let path = below.join("m.onnx");
        save(&w("near", &[("length", "8")]), &path);
        let run = |path: &std::path::Path, more: &[&str]| {
            halcyon(&[&["run", text(path), "--backend", "cpu", "--input", "ones"], more].concat())
        };
        run(&path, &[]).ok();
        symlink("../secret", below.join("far")).expect("a link");
        let far = w("far", &[("length", "8")]);
        try_one(&far, &["is a link to", "outside of the model's folder", "--allow-external-links"]);
        for command in ["inspect", "fit", "select", "trace"] {
            let done = halcyon(&[command, text(&path), "--backend", "cpu"]);
            assert!(
                done.code == 1 && format!("{}{}", done.out, done.err).contains("is a link to"),
                "{command}: {done:?}"
            );
        }
        run(&path, &["--allow-external-links"]).ok();
        symlink("..", below.join("up")).expect("a link");
        try_one(&w("up/secret", &[("length", "8")]), &["is a link to"]);
        let repo = a.dir.path().join("models--a--b");
        let snapshot = repo.join("snapshots/0123");
        std::fs::create_dir_all(&snapshot).expect("a folder");
        std::fs::create_dir(repo.join("blobs")).expect("a folder");
        std::fs::write(repo.join("blobs/m"), w("w.bin", &[]).encode_to_vec()).expect("a file");
        std::fs::write(repo.join("blobs/w"), [0u8; 8]).expect("a file");
        symlink("../../blobs/m", snapshot.join("m.onnx")).expect("a link");
        symlink("../../blobs/w", snapshot.join("w.bin")).expect("a link");
        run(&snapshot.join("m.onnx"), &[]).ok();
        std::fs::remove_file(snapshot.join("w.bin")).expect("a link");
        symlink(&secret, snapshot.join("w.bin")).expect("a link");
        run(&snapshot.join("m.onnx"), &[]).fails(1, &["is a link to"]);
    }
    let t = TensorProto { raw_data: None, data_location: EXTERNAL, ..floats("w", &[2], &[]) };
    let nowhere = model(17, op(node("Add", &["x", "w"], &["y"]), vec![t]));
    try_one(&nowhere, &["external data without a location"]);
}

#[test]
fn names_cannot_write_to_the_terminal() {
    let mut a = Attacks::new();
    a.graph(op(node("Neg", &["\u{1b}[31mred\u{7}"], &["y"]), vec![]), 1, &["\\u{1b}[31mred\\u{7}"]);
    let long = "n".repeat(10 << 20);
    a.graph(op(node("Neg", &[&long], &["y"]), vec![]), 1, &["more bytes"]);
    let many: Vec<NodeProto> =
        (0..5000).map(|k| node("Neg", &[&format!("v{}", (k + 1) % 5000)], &[&format!("v{k}")])).collect();
    a.graph(graph(many, vec![], vec![port("v0", 1, &[])], vec![]), 1, &["cycle", "and 4992 more"]);
}
