use super::*;
use halcyon_ir::blocks::BlockType;
use halcyon_test::{models, models_dir};

const DIR: &str = "stories260k";

fn entry(key: &str, v: impl Into<Value>) -> (String, Value) {
    (key.into(), v.into())
}

fn parse(bytes: Vec<u8>) -> Result<Gguf> {
    Gguf::parse(bytes.into(), "t.gguf")
}

/// The message of the error that `bytes` give. It must be an error about the file.
#[track_caller]
fn refused(bytes: Vec<u8>, parts: &[&str]) {
    let e = parse(bytes).expect_err("a malformed file");
    assert!(matches!(e, Error::Format { .. }), "{e:?}");
    let text = e.to_string();
    parts.iter().for_each(|p| assert!(text.contains(p), "{p}: {text}"));
}

/// A file with these entries and this table, in which a tensor is name, reversed shape, type and offset.
fn raw(metadata: &[(String, Value)], table: &[(&str, &[u64], u32, u64)], data: usize) -> Vec<u8> {
    let mut b = encode(metadata, &[]).expect("a file");
    // The padding of the file without tensors is replaced.
    let keys: usize = metadata
        .iter()
        .map(|(k, v)| {
            let mut own = vec![];
            v.encode(&mut own);
            12 + k.len() + own.len()
        })
        .sum();
    b.truncate(24 + keys);
    b[8..16].copy_from_slice(&(table.len() as u64).to_le_bytes());
    for (name, shape, ty, offset) in table {
        value::string(name.as_bytes(), &mut b);
        b.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|d| b.extend(d.to_le_bytes()));
        b.extend(ty.to_le_bytes());
        b.extend(offset.to_le_bytes());
    }
    b.resize(b.len().next_multiple_of(32) + data, 7);
    b
}

/// Every kind of value.
fn all_values() -> Vec<(String, Value)> {
    let nested =
        Array::Array(vec![Array::U8(vec![1, 2]), Array::String(vec!["x".into()]), Array::Array(vec![])]);
    vec![
        entry("z.u8", 200u8),
        entry("i8", -3i8),
        entry("u16", 60_000u16),
        entry("i16", -300i16),
        entry("u32", 4_000_000_000u32),
        entry("i32", -70_000i32),
        entry("f32", 0.1f32),
        entry("u64", u64::MAX),
        entry("i64", i64::MIN),
        entry("f64", 0.1f64),
        entry("bool", true),
        entry("text", "grüße"),
        ("raw".into(), Value::Bytes(vec![0xff, 0x00])),
        entry("u8s", vec![1u8, 2]),
        entry("i32s", vec![-1i32, 2]),
        entry("f32s", vec![0.5f32, -1.5]),
        entry("strings", vec!["a".to_string(), String::new()]),
        ("bytes".into(), Value::Array(Array::Bytes(vec![b"ok".to_vec(), vec![0xc0]]))),
        ("bools".into(), Value::Array(Array::Bool(vec![true, false]))),
        entry("none", Vec::<u64>::new()),
        ("nested".into(), Value::Array(nested)),
        entry("a.last", 1u8),
    ]
}

#[test]
fn all_values_survive_in_order() {
    let all = all_values();
    let f = parse(encode(&all, &[]).unwrap()).unwrap();
    assert_eq!(f.metadata().entries(), all);
    assert_eq!((f.version(), f.alignment(), f.tensors().len()), (3, 32, 0));
    let mut v2 = encode(&all, &[]).unwrap();
    v2[4] = 2;
    assert_eq!(parse(v2).unwrap().version(), 2);
}

#[test]
fn values_are_read_by_their_kind() {
    let f = parse(encode(&all_values(), &[]).unwrap()).unwrap();
    let m = f.metadata();
    assert_eq!(
        (m.u64("z.u8").unwrap(), m.u64("u64").unwrap(), m.i64("i64").unwrap()),
        (200, u64::MAX, i64::MIN)
    );
    assert_eq!(
        (m.f64("f64").unwrap(), m.f64("i8").unwrap(), m.f64("f32").unwrap()),
        (0.1, -3.0, 0.1f32.into())
    );
    assert!(m.bool("bool").unwrap());
    assert_eq!(m.str("text").unwrap(), "grüße");
    assert_eq!(m.strings("strings").unwrap(), ["a", ""]);
    assert_eq!((m.floats("f32s").unwrap(), m.floats("i32s").unwrap()), (vec![0.5, -1.5], vec![-1.0, 2.0]));
    assert_eq!((m.ints("u8s").unwrap(), m.ints("none").unwrap()), (vec![1, 2], vec![]));
    assert!(m.strings("none").unwrap().is_empty());
    assert_eq!(m.maybe("absent", Metadata::u64).unwrap(), None);
    assert_eq!(m.maybe("u16", Metadata::u64).unwrap(), Some(60_000));
    let fails = |r: Result<()>, parts: &[&str]| {
        let text = r.expect_err("an error").to_string();
        parts.iter().for_each(|p| assert!(text.contains(p), "{p}: {text}"));
    };
    fails(m.u64("absent").map(drop), &["t.gguf", "no metadata 'absent'"]);
    fails(m.u64("text").map(drop), &["t.gguf", "'text' must be an integer", "of type string"]);
    fails(m.u64("i8").map(drop), &["must not be negative: -3"]);
    fails(m.i64("u64").map(drop), &["18446744073709551615"]);
    fails(m.str("raw").map(drop), &["a string that is not UTF-8"]);
    fails(m.strings("bytes").map(drop), &["index 1 is not UTF-8"]);
    fails(m.ints("f32s").map(drop), &["an array of integers", "f32[2]"]);
    fails(m.maybe("f32", Metadata::bool).map(drop), &["a bool", "f32"]);
    fails(m.floats("f32").map(drop), &["an array of numbers"]);
    assert_eq!(m.get("nested").unwrap().type_name(), "array[3]");
}

#[test]
fn types_have_the_sizes_of_ggml() {
    let all: Vec<GgmlType> = GgmlType::all().collect();
    for t in &all {
        assert_eq!(GgmlType::from_number(t.number().unwrap()), Some(*t));
        assert_eq!(GgmlType::from_name(&t.name().to_uppercase()), Some(*t));
    }
    assert_eq!(all.len(), 34);
    assert_eq!(GgmlType::from_number(4), None);
    assert_eq!(GgmlType::Plain(DType::Bool).number(), None);
    let q4_k = GgmlType::Block(BlockType::Q4_K);
    assert_eq!((q4_k.row_bytes(512), q4_k.row_bytes(100), q4_k.row_bytes(0)), (Some(288), None, Some(0)));
    assert_eq!(GgmlType::F32.row_bytes(usize::MAX), None);
    assert_eq!(GgmlType::from_name("iq2_xs").unwrap().row_bytes(256), Some(74));
}

#[test]
fn tensors_of_every_type_survive() {
    let mut tensors: Vec<(TensorInfo, Vec<u8>)> = vec![];
    for t in GgmlType::all() {
        let k = 2 * t.elements();
        let data = (0..3 * 2 * t.bytes()).map(|i| i as u8).collect();
        tensors.push((TensorInfo::new(format!("of {t}"), &[3, k], t), data));
    }
    tensors.push((TensorInfo::new("scalar", &[], GgmlType::F32), vec![1, 2, 3, 4]));
    tensors.push((TensorInfo::new("empty", &[2, 0, 3], GgmlType::F16), vec![]));
    tensors.push((TensorInfo::new("last", &[1, 1, 1, 5], GgmlType::from_name("i8").unwrap()), vec![9; 5]));
    let borrowed: Vec<(TensorInfo, &[u8])> = tensors.iter().map(|(t, b)| (t.clone(), &b[..])).collect();
    let bytes = Bytes::from(encode(&[], &borrowed).unwrap());
    let f = Gguf::parse(bytes.clone(), "t").unwrap();
    for ((info, data), t) in tensors.iter().zip(f.tensors()) {
        assert_eq!((&t.info, &t.data[..]), (info, &data[..]));
        assert!(t.data.is_empty() || bytes.as_ptr_range().contains(&t.data.as_ptr()), "a copy");
        let c = t.to_const().unwrap();
        assert_eq!(c.bytes(), data);
        match t.ty() {
            GgmlType::Plain(d) => assert_eq!((c.dtype, &c.dims), (d, &info.shape)),
            ty => assert_eq!((c.dtype, &c.dims[..]), (DType::U8, &[3, 2 * ty.bytes()][..])),
        }
    }
    assert_eq!(f.tensor("of q4_k").unwrap().shape(), [3, 512]);
    assert!(matches!(f.tensor("absent"), Err(Error::Argument { .. })));
    // The writer that streams makes the same file.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.gguf");
    assert_eq!(write(&path, &[], &borrowed).unwrap(), bytes.len() as u64);
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    let g = Gguf::open(&path).unwrap();
    assert_eq!(
        (g.file_bytes(), g.paths(), g.tensors().len()),
        (bytes.len() as u64, &[path][..], tensors.len())
    );
}

#[test]
fn another_alignment_is_kept() {
    let t = |n: &str| TensorInfo::new(n, &[3], GgmlType::F32);
    for a in [8u32, 64, 4096] {
        let b = encode(&[entry("general.alignment", a)], &[(t("a"), &[1; 12]), (t("b"), &[2; 12])]).unwrap();
        assert_eq!(b.len() % a as usize, 0);
        let f = parse(b).unwrap();
        assert_eq!((f.alignment(), &f.tensor("b").unwrap().data[..]), (a.into(), &[2; 12][..]));
    }
    for v in [Value::from(0u32), 3u32.into(), (1u32 << 25).into(), "32".into()] {
        let e = encode(&[("general.alignment".into(), v)], &[]).unwrap_err();
        assert!(e.to_string().contains("general.alignment"), "{e}");
    }
    let mut b = encode(&[entry("general.alignment", 32u32)], &[]).unwrap();
    let at = b.windows(4).position(|w| w == 32u32.to_le_bytes()).unwrap();
    b[at] = 33;
    refused(b, &["general.alignment", "power of two"]);
}

#[test]
fn a_writer_takes_pieces_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.gguf");
    let t = |n: &str, k| TensorInfo::new(n, &[k], GgmlType::F32);
    let new = || GgufWriter::create(&path, &[], vec![t("none", 0), t("a", 2), t("b", 1)]).unwrap();
    let mut w = new();
    w.append("a", &[1; 3]).unwrap();
    assert!(w.append("b", &[0]).unwrap_err().to_string().contains("'a' come next"));
    assert!(w.append("a", &[0; 6]).unwrap_err().to_string().contains("after 3 of its 8"));
    w.append("a", &[2; 5]).unwrap();
    w.append("none", &[]).unwrap();
    assert!(w.finish().unwrap_err().to_string().contains("'b' has only 0 of its 4"));
    assert!(!path.exists());
    let mut w = new();
    w.append("a", &[1; 8]).unwrap();
    w.append("b", &[2; 4]).unwrap();
    assert!(w.append("b", &[0]).is_err());
    w.finish().unwrap();
    assert_eq!(&Gguf::open(&path).unwrap().tensor("b").unwrap().data[..], [2; 4]);
}

#[test]
fn what_the_format_lacks_is_not_written() {
    let deep = (0..MAX_DEPTH).fold(Array::U8(vec![]), |a, _| Array::Array(vec![a]));
    let q = GgmlType::Block(BlockType::Q8_0);
    for (metadata, info, part) in [
        (vec![("deep".into(), Value::Array(deep))], None, "levels"),
        (vec![entry("k", 1u8), entry("k", 2u8)], None, "twice"),
        (vec![entry(&"k".repeat(70_000), 1u8)], None, "70000 bytes"),
        (vec![], Some(TensorInfo::new("t", &[1; 5], GgmlType::F32)), "5 axes"),
        (vec![], Some(TensorInfo::new("t", &[33], q)), "whole blocks"),
        (vec![], Some(TensorInfo::new("t", &[], q)), "whole blocks"),
        (vec![], Some(TensorInfo::new("t", &[1], GgmlType::Plain(DType::Bool))), "no type bool"),
        (vec![], Some(TensorInfo::new("t", &[1 << 40, 1 << 40], GgmlType::F32)), "too large"),
    ] {
        let t: Vec<_> = info.into_iter().map(|t| (t, &[][..])).collect();
        let e = encode(&metadata, &t).unwrap_err();
        assert!(matches!(e, Error::Argument { .. }) && e.to_string().contains(part), "{part}: {e}");
    }
}

// Models in several files.

/// Writes the parts of a model with a tensor in each, and returns their paths.
fn split(dir: &Path, parts: &[(u16, u16)], count: usize) -> Vec<PathBuf> {
    let all = parts.iter().enumerate().map(|(k, (no, of))| {
        let path = dir.join(format!("m-{:05}-of-{count:05}.gguf", k + 1));
        let mut m = vec![entry("split.no", *no), entry("split.count", *of)];
        m.push(entry("split.tensors.count", parts.len() as i32));
        if k == 0 {
            m.push(entry("general.architecture", "llama"));
        }
        let t = TensorInfo::new(format!("t{k}"), &[1], GgmlType::F32);
        write(&path, &m, &[(t, &[k as u8; 4])]).unwrap();
        path
    });
    all.collect()
}

#[test]
fn parts_of_a_model_are_opened_together() {
    let dir = tempfile::tempdir().unwrap();
    let paths = split(dir.path(), &[(0, 3), (1, 3), (2, 3)], 3);
    for p in &paths {
        let f = Gguf::open(p).unwrap();
        assert_eq!(f.metadata().str("general.architecture").unwrap(), "llama");
        assert_eq!(f.tensors().iter().map(Tensor::name).collect::<Vec<_>>(), ["t0", "t1", "t2"]);
        assert_eq!((&f.tensor("t2").unwrap().data[..], f.paths()), (&[2; 4][..], &paths[..]));
    }
    let bytes = std::fs::read(&paths[0]).unwrap();
    assert!(matches!(parse(bytes), Err(Error::Unsupported { .. })));
    std::fs::remove_file(&paths[1]).unwrap();
    let e = Gguf::open(&paths[2]).unwrap_err();
    let text = e.to_string();
    assert!(matches!(e, Error::Io { .. }) && text.contains("m-00002-of-00003.gguf: no such file"), "{text}");
}

#[test]
fn parts_that_do_not_belong_together() {
    let dir = tempfile::tempdir().unwrap();
    let fails = |p: &Path, part: &str| {
        let e = Gguf::open(p).unwrap_err();
        assert!(matches!(e, Error::Format { .. }) && e.to_string().contains(part), "{e}");
    };
    let paths = split(dir.path(), &[(0, 2), (0, 2)], 2);
    fails(&paths[0], "belongs to another model");
    fails(&paths[1], "does not end in -00001-of-00002.gguf");
    let paths = split(dir.path(), &[(0, 2), (1, 3)], 2);
    fails(&paths[0], "belongs to another model");
    let paths = split(dir.path(), &[(2, 2)], 2);
    fails(&paths[0], "part 2, counted from 0, of 2");
    // A part with another number of tensors, and one whose tensor has the name of another.
    let paths = split(dir.path(), &[(0, 2), (1, 2)], 2);
    let m = [entry("split.no", 1u16), entry("split.count", 2u16)];
    write(&paths[1], &m, &[]).unwrap();
    fails(&paths[0], "has 2 tensors, but its 2 files have 1");
    write(&paths[1], &m, &[(TensorInfo::new("t0", &[1], GgmlType::F32), &[0; 4])]).unwrap();
    fails(&paths[0], "two tensors are called 't0'");
}

// Malformed files.

#[test]
fn other_versions_are_named() {
    let fails = |head: [u8; 4], part: &str| {
        let mut b = encode(&[], &[]).unwrap();
        b[4..8].copy_from_slice(&head);
        let e = parse(b).unwrap_err();
        assert!(matches!(e, Error::Unsupported { .. }) && e.to_string().contains(part), "{e}");
    };
    fails([0, 0, 0, 3], "big-endian GGUF file (version 3)");
    fails([0, 0, 0, 0], "version 0 of GGUF");
    fails([1, 0, 0, 0], "version 1 of GGUF");
    fails([4, 0, 0, 0], "version 4 of GGUF");
    refused(b"GGML\x03\0\0\0".to_vec(), &["does not begin with the letters GGUF"]);
    refused(vec![], &["has 4 bytes"]);
}

#[test]
fn attack_counts_beyond_the_file() {
    for at in [8, 16] {
        for n in [1u64, 2, 1 << 24, 1 << 40, u64::MAX, u64::MAX / 24 + 1] {
            let mut b = encode(&[], &[]).unwrap();
            b.truncate(24);
            b[at..at + 8].copy_from_slice(&n.to_le_bytes());
            refused(b, &["the number of", "only"]);
        }
    }
    // Lengths of strings and arrays of every type, in a value and in an array in an array.
    for n in [5u64, 1 << 40, u64::MAX, u64::MAX / 2 + 1, u64::MAX / 8 + 1] {
        for code in 0..14u32 {
            for levels in 0..3 {
                let mut b = b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0k".to_vec();
                let types = if code == 8 && levels == 0 { vec![] } else { vec![9u32; levels + 1] };
                types.iter().enumerate().for_each(|(k, t)| {
                    b.extend(t.to_le_bytes());
                    if k > 0 {
                        b.extend(1u64.to_le_bytes());
                    }
                });
                b.extend(code.to_le_bytes());
                b.extend(n.to_le_bytes());
                refused(b, &["'k'"]);
            }
        }
    }
    // A name longer than the file, a name that is too long, and one that is not UTF-8.
    let mut b = raw(&[], &[("t", &[1], 0, 0)], 4);
    b[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
    refused(b, &["the name of a tensor"]);
    refused(raw(&[], &[(&"t".repeat(65_536), &[1], 0, 0)], 4), &["65536 bytes"]);
    let mut b = raw(&[], &[("t", &[1], 0, 0)], 4);
    b[32] = 0xff;
    refused(b, &["not UTF-8"]);
}

#[test]
fn attack_deep_nesting() {
    let nest = |levels: usize| {
        let mut b = b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0k\x09\0\0\0".to_vec();
        (1..levels).for_each(|_| b.extend(b"\x09\0\0\0\x01\0\0\0\0\0\0\0"));
        b.extend([0; 12]);
        b
    };
    assert!(parse(nest(MAX_DEPTH)).is_ok());
    refused(nest(MAX_DEPTH + 1), &["levels"]);
    refused(nest(100_000), &["levels"]);
}

#[test]
fn attack_tensors_outside_of_the_file() {
    let ok = raw(&[], &[("a", &[8], 0, 0), ("b", &[8], 0, 32)], 64);
    assert_eq!(parse(ok).unwrap().tensors().len(), 2);
    // Holes and tensors in another order are fine.
    assert!(parse(raw(&[], &[("b", &[8], 0, 64), ("a", &[8], 0, 0)], 96)).is_ok());
    for (shape, offset) in
        [(&[9u64][..], 0), (&[8], 32), (&[1], u64::MAX - 31), (&[1], 1 << 63), (&[1 << 40], 0)]
    {
        refused(
            raw(&[], &[("t", shape, 0, offset)], 32),
            &["tensor 't'", "beyond the end", "fetch it again"],
        );
    }
    // The bits of the last two would need 65 bits to count.
    let large: [&[u64]; 7] = [
        &[u64::MAX],
        &[1 << 62, 4],
        &[1 << 32, 1 << 32],
        &[0, 1 << 40, 1 << 40],
        &[1 << 61, 0],
        &[1 << 30, 0, 1 << 29],
        &[0, 0, 5 << 57],
    ];
    for shape in large {
        refused(raw(&[], &[("t", shape, 0, 0)], 32), &["tensor 't'", "too large"]);
    }
    refused(raw(&[], &[("t", &[1], 0, 4)], 32), &["not a multiple of the alignment 32"]);
    refused(raw(&[], &[("a", &[9], 0, 0), ("b", &[8], 0, 32)], 64), &["'a' and 'b' overlap"]);
    refused(raw(&[], &[("a", &[8], 0, 0), ("b", &[8], 0, 0)], 64), &["overlap"]);
    refused(raw(&[], &[("t", &[1; 5], 0, 0)], 32), &["5 axes"]);
    refused(raw(&[], &[("t", &[33], 8, 0)], 64), &["33 elements", "blocks of q8_0"]);
    refused(raw(&[], &[("t", &[], 8, 0)], 64), &["blocks of q8_0"]);
    let e = parse(raw(&[], &[("t", &[1], 99, 0)], 32)).unwrap_err();
    assert!(matches!(e, Error::Unsupported { .. }), "{e:?}");
    assert!(e.to_string().contains("tensor 't'") && e.to_string().contains("number 99"), "{e}");
    // Tensors without bytes do not overlap, and may be at the end of a file without padding.
    let empty = parse(raw(&[], &[("a", &[0], 0, 0), ("b", &[4, 0], 0, 1 << 40)], 0)).unwrap();
    assert!(empty.tensors().iter().all(|t| t.to_const().unwrap().bytes().is_empty()));
}

#[test]
fn attack_names_twice_and_odd_values() {
    refused(raw(&[], &[("t", &[1], 0, 0), ("t", &[1], 0, 32)], 64), &["two tensors are called 't'"]);
    let twice = encode(&[entry("aa", 1u8), entry("ab", 2u8)], &[]).unwrap();
    let at = twice.windows(2).position(|w| w == b"ab").unwrap();
    let mut b = twice;
    b[at + 1] = b'a';
    refused(b, &["'aa' appears twice"]);
    let mut b = raw(&[entry("k", true)], &[], 0);
    b[37] = 2;
    refused(b.clone(), &["neither 0 nor 1, but 2"]);
    b[33..37].copy_from_slice(&13u32.to_le_bytes());
    refused(b, &["'k'", "unknown type 13"]);
}

/// A small file with values and tensors of many kinds.
fn sample() -> Vec<u8> {
    let q = GgmlType::Block(BlockType::Q4_0);
    let tensors = [
        (TensorInfo::new("a", &[2, 3], GgmlType::F16), &[1; 12][..]),
        (TensorInfo::new("b", &[2, 32], q), &[2; 36]),
        (TensorInfo::new("c", &[], GgmlType::F32), &[3; 4]),
    ];
    let mut m = all_values();
    m.push(entry("general.alignment", 8u32));
    encode(&m, &tensors).unwrap()
}

/// Uses everything of a file that opens. What was read must survive writing.
fn use_all(bytes: &[u8]) -> bool {
    let Ok(f) = parse(bytes.to_vec()) else { return false };
    let m = f.metadata();
    for (k, v) in m.entries() {
        let _ = (m.str(k), m.u64(k), m.i64(k), m.f64(k), m.bool(k), m.strings(k), m.floats(k), m.ints(k));
        assert!(!v.type_name().is_empty());
    }
    let tensors: Vec<_> = f.tensors().iter().map(|t| (t.info.clone(), &t.data[..])).collect();
    f.tensors().iter().for_each(|t| assert_eq!(t.to_const().unwrap().bytes(), &t.data[..]));
    let once = encode(m.entries(), &tensors).unwrap();
    let g = parse(once.clone()).unwrap();
    let tensors: Vec<_> = g.tensors().iter().map(|t| (t.info.clone(), &t.data[..])).collect();
    // The bytes are compared, because a NaN differs from itself.
    assert_eq!(encode(g.metadata().entries(), &tensors).unwrap(), once);
    true
}

#[test]
fn changed_files_never_panic() {
    let good = sample();
    assert!(use_all(&good));
    // Padding is the only thing that may be missing.
    let least = good.len() - 4;
    for n in 0..good.len() {
        assert_eq!(use_all(&good[..n]), n >= least, "cut at {n}");
    }
    let mut opened = 0;
    for i in 0..good.len() {
        for change in [1, 2, 4, 8, 16, 32, 64, 128, 0xff] {
            let mut b = good.clone();
            b[i] ^= change;
            opened += usize::from(use_all(&b));
        }
    }
    assert!(opened > 500, "{opened}");
}

proptest::proptest! {
    #[test]
    fn random_bytes_never_panic(
        v in proptest::collection::vec(0u8.., 0..200),
        tensors in 0u8..3,
        keys in 0u8..3,
    ) {
        use_all(&v);
        let counts = [u64::from(tensors), keys.into()].map(u64::to_le_bytes).concat();
        use_all(&[&b"GGUF\x03\0\0\0"[..], &counts, &v].concat());
    }

    #[test]
    fn several_changes_never_panic(changes in proptest::collection::vec((0usize..700, 0u8..), 1..6)) {
        let mut b = sample();
        for (at, v) in changes {
            let n = b.len();
            b[at % n] = v;
        }
        use_all(&b);
    }

    #[test]
    fn tensors_of_any_shape_survive(
        shape in proptest::collection::vec(0usize..5, 0..5),
        k in 0usize..34,
        text in ".*",
        floats in proptest::collection::vec(proptest::num::f32::NORMAL, 0..9),
    ) {
        let ty = GgmlType::all().nth(k).unwrap();
        let mut info = TensorInfo::new(text.clone(), &shape, ty);
        match info.shape.last_mut() {
            Some(last) => *last *= ty.elements(),
            None if ty.elements() > 1 => info.shape.push(ty.elements()),
            None => {}
        }
        let data = vec![5; info.byte_len().unwrap()];
        let m = [entry(&text, text.as_str()), entry("floats of it", floats)];
        let f = parse(encode(&m, &[(info.clone(), &data)]).unwrap()).unwrap();
        assert_eq!(f.metadata().entries(), m);
        assert_eq!((&f.tensors()[0].info, &f.tensors()[0].data[..]), (&info, &data[..]));
        assert_eq!(f.find(&text).unwrap().info.elements(), info.shape.iter().product::<usize>());
    }
}

// Files of llama.cpp.

#[test]
fn a_model_of_llama_cpp_is_read() {
    let test = "a_model_of_llama_cpp_is_read";
    let Some(dir) = models(test, DIR).filter(|d| d.join("stories260k-f32.gguf").exists()) else { return };
    let st =
        crate::safetensors::SafeTensors::open(&models_dir().join(DIR).join("model.safetensors")).unwrap();
    let f = Gguf::open(&dir.join("stories260k-f32.gguf")).unwrap();
    let m = f.metadata();
    assert_eq!((m.str("general.architecture").unwrap(), m.u64("llama.block_count").unwrap()), ("llama", 5));
    assert_eq!(m.strings("tokenizer.ggml.tokens").unwrap().len(), 512);
    assert_eq!(m.floats("tokenizer.ggml.scores").unwrap().len(), 512);
    assert_eq!(m.f64("llama.attention.layer_norm_rms_epsilon").unwrap() as f32, 1e-5);
    // The shape is that of the same matrix in the safetensors file.
    let w = f.tensor("blk.0.ffn_down.weight").unwrap();
    let names: Vec<&str> = st.names().filter(|n| n.contains("0.") && n.contains("down")).collect();
    if let [name] = names[..] {
        assert_eq!(st.get(name).unwrap().dims[..], *w.shape());
        assert_eq!(st.get(name).unwrap().bytes(), &w.data[..]);
    }
    for kind in ["f16", "q4_0", "q8_0"] {
        let g = Gguf::open(&dir.join(format!("stories260k-{kind}.gguf"))).unwrap();
        assert_eq!(g.tensors().len(), f.tensors().len());
        assert!(g.tensors().iter().any(|t| t.ty().name() == kind), "{kind}");
        for t in g.tensors() {
            assert_eq!(t.shape(), f.tensor(t.name()).unwrap().shape());
            assert_eq!(t.to_const().unwrap().bytes(), &t.data[..]);
        }
        // Written again, it has the same bytes.
        let all: Vec<_> = g.tensors().iter().map(|t| (t.info.clone(), &t.data[..])).collect();
        let again = encode(g.metadata().entries(), &all).unwrap();
        assert!(again == std::fs::read(&g.paths()[0]).unwrap(), "{kind}");
    }
}
