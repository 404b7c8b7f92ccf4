//! Archives that claim more data than they contain, and external data outside of the model's folder.

use super::*;

/// A deflated archive of one array with `floats` zeros. Its header and directory claim `claimed` zeros.
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
    // The directory and the header claim twenty gigabytes that the file does not have. Neither is trusted.
    std::fs::write(&path, bomb("image", 256 << 20, 5 << 30)).expect("a file");
    let (done, peak) = attack(&given);
    assert!([1, 5].contains(&done.code) && done.err.lines().count() == 1, "{done:?}");
    assert!(peak.is_none_or(|p| p < (1 << 30) + RESIDENT), "{peak:?}");
    let (done, _) = attack(&["inspect", text(&path)]);
    // Deflate cannot reach this compression ratio. `inspect` reports this for the member of the archive.
    assert!(done.code == 0 && done.out.contains("larger than deflate can unpack"), "{done:?}");
    // Header and directory disagree.
    let mut lies = bomb("image", 16, 16);
    let at = lies.windows(4).rposition(|w| w == [1, 0, 16, 0]).expect("sizes");
    lies[at + 4..at + 12].copy_from_slice(&(1u64 << 14).to_le_bytes());
    std::fs::write(&path, lies).expect("a file");
    refused(&given, 1, &["takes 64 bytes"]);
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
    try_one(&nowhere, &["the tensor is external, but has no location"]);
}
