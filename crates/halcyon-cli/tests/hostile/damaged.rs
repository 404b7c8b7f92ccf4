//! Files that are cut short, have flipped bits, or are models with small changes.

use super::*;

#[test]
fn truncated_files() {
    // A prefix of a message is a valid message only if it ends between two fields.
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
        // Half of the flips hit the first 1200 bytes, which hold the nodes. Most other bytes are weights.
        for _ in 0..1 + r.below(3) {
            let at = if r.once_in(2) { r.below(1200.min(f.len())) } else { r.below(f.len()) };
            f[at] ^= 1 << r.below(8);
        }
        ran += usize::from(returns(&format!("flip {k}"), || run(f.into())));
    }
    // A model in which only weights or unused names changed still runs.
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
        gguf::encode(
            &[("general.alignment".into(), 8u32.into())],
            &[(gguf::TensorInfo::new("a", &[2, 3, 4], gguf::GgmlType::F32), t.bytes())],
        )
        .expect("a file"),
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
                4 => gguf::Gguf::parse(f, "t")
                    .and_then(|g| g.tensor("a").and_then(gguf::Tensor::to_const))
                    .map(drop),
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
    // The model "loop" is excluded, because a mutated loop may legitimately run forever.
    for (name, m) in seed_models::all().into_iter().filter(|(name, _)| *name != "loop") {
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
