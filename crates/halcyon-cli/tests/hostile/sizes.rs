//! Sizes, nesting and lengths that no machine has room or time for.

use super::*;

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
            // If the loader itself fails, the exit code is 127.
            assert!([0, 5, 127].contains(&done.code), "{args:?} with {mib} MiB: {done:?}");
            match (done.code, json) {
                // `fit` may have just enough memory for the answer that the model does not fit.
                (5, true) => {
                    let v = done.json();
                    assert!(v["exit_code"] == 5 || v["fits"] == false, "{done:?}");
                }
                (5, false) => assert!(done.err.contains("out of memory"), "{done:?}"),
                _ => {}
            }
        }
        assert!(worked > 0, "{args:?}");
    }
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
    // A function that calls itself, two that call each other, a chain of ten thousand, and forty functions,
    // each of which calls the next one twice.
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
    save(&model(17, seed_models::nested_if(30)), &path);
    halcyon(&["run", text(&path), "--backend", "cpu", "--input", "ones", "--input", "ones"]).ok();
    // Deeply nested optionals.
    let mut n = vec![node("Optional", &["x"], &["o0"])];
    n.extend((0..20_000).map(|k| node("Optional", &[&format!("o{k}")], &[&format!("o{}", k + 1)])));
    n.push(node("OptionalGetElement", &["o20000"], &["y"]));
    a.graph(
        graph(n, vec![port("x", 1, &[2])], vec![port("y", 1, &[2])], vec![]),
        3,
        &["sequences nested deeper than"],
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
    a.bytes(&bomb, &[], 1, &["bytes of memory, too much for"]);
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
    // CPU time of this thread, so that other load does not count. If the system does not report it, the check
    // is skipped.
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
    a.graph(shaped(pad(), &[i64::MAX, i64::MAX]), 1, &["of less than 2^31"]);
    a.graph(shaped(node("Reshape", &["x", "s"], &["y"]), &[i64::MAX, 0, i64::MAX]), 1, &["has no size"]);
    a.graph(shaped(node("Reshape", &["x", "s"], &["y"]), &[i64::MAX, i64::MAX]), 1, &["too large"]);
    let range = |to: i64| {
        let v = |name: &str, n| scalar(ints(name, &[n]));
        op(node("Range", &["from", "to", "by"], &["y"]), vec![v("from", 0), v("to", to), v("by", 1)])
    };
    a.graph(range(1 << 30), 5, &["out of memory"]);
    a.graph(range(i64::MAX), 1, &["the range is infinite or too long"]);
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
