use super::*;
use crate::npz::Npz;
use std::path::PathBuf;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/torch")
}

fn open(name: &str) -> Result<TorchFile> {
    TorchFile::open(&folder().join(name))
}

fn values(t: &ConstData) -> Vec<f64> {
    t.scalars().map(|s| s.as_f64()).collect()
}

/// Checks that every tensor has PyTorch's values. The `.npz` has f32 in place of the types that NumPy lacks.
fn same_as_numpy(file: &TorchFile, prefix: &str, arrays: &str) {
    let want = Npz::open(&folder().join(arrays)).unwrap();
    for name in want.names() {
        let (got, want) = (file.get(&format!("{prefix}{name}")).unwrap(), want.get(name).unwrap());
        assert_eq!((&got.dims, values(&got)), (&want.dims, values(&want)), "{name}");
    }
}

#[test]
fn every_type_and_every_stride() {
    let f = open("types.pt").unwrap();
    same_as_numpy(&f, "", "types.npz");
    assert_eq!(f.names().count(), 17);
    let dtypes = [
        ("bf16", DType::BF16),
        ("f16", DType::F16),
        ("scalar", DType::F64),
        ("i64", DType::I64),
        ("bool", DType::Bool),
        ("u16", DType::U16),
        ("f8", DType::F8E4M3FN),
        ("transposed", DType::F32),
    ];
    for (name, dtype) in dtypes {
        assert_eq!(f.get(name).unwrap().dtype, dtype, "{name}");
    }
    assert!(matches!(f.get("nothing"), Err(Error::Argument { .. })));
}

#[test]
fn contiguous_tensors_are_slices_of_the_file() {
    let bytes = Bytes::from(std::fs::read(folder().join("types.pt")).unwrap());
    let f = TorchFile::parse(bytes.clone(), "t").unwrap();
    let inside = |name: &str| bytes.as_ptr_range().contains(&f.get(name).unwrap().bytes().as_ptr());
    assert!(inside("f32") && inside("i64") && !inside("transposed"));
}

#[test]
fn nested_dicts_have_joined_names() {
    let f = open("checkpoint.pt").unwrap();
    same_as_numpy(&f, "model.", "state.npz");
    assert_eq!(f.get("optimizer.state.0.exp_avg").unwrap().dims[..], [3, 4]);
    same_as_numpy(&open("state.pt").unwrap(), "", "state.npz");
    assert_eq!(values(&open("parameter.pt").unwrap().get("w").unwrap()), [1.0, 1.0]);
    assert_eq!(values(&open("nocrc.pt").unwrap().get("w").unwrap()), [0.0, 1.0, 2.0]);
}

#[test]
fn objects_and_old_files_are_errors_that_name_them() {
    let e = open("module.pt").unwrap_err();
    assert!(matches!(e, Error::Format { .. }) && e.to_string().contains("__main__.Net"), "{e}");
    let e = open("legacy.pt").unwrap_err();
    assert!(matches!(e, Error::Unsupported { .. }) && e.to_string().contains("1.6"), "{e}");
}

/// A copy of an archive in which `edit` has changed the bytes of some members. All members are stored
/// uncompressed and without checksums.
fn edited(name: &str, edit: impl Fn(&str, &mut Vec<u8>)) -> Result<TorchFile> {
    let bytes = Bytes::from(std::fs::read(folder().join(name)).unwrap());
    let mut f = TorchFile::parse(bytes, "t").unwrap();
    let mut raw: Vec<(String, Vec<u8>)> = vec![];
    for m in &f.archive.members {
        let mut body = f.archive.body(m).unwrap().to_vec();
        edit(&m.name, &mut body);
        raw.push((m.name.clone(), body));
    }
    f.checked = false;
    TorchFile::parse(zip(&raw).into(), "t")
}

/// An archive of uncompressed members without checksums. It is written from the definition of the zip format
/// and not with the code under test.
fn zip(members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut out, mut central) = (vec![], vec![]);
    for (name, body) in members {
        let at = out.len() as u32;
        let mut common = [20u16.to_le_bytes(), [0; 2], [0; 2], [0; 2], [0x21, 0]].concat();
        common.extend(0u32.to_le_bytes());
        common.extend((body.len() as u32).to_le_bytes());
        common.extend((body.len() as u32).to_le_bytes());
        common.extend((name.len() as u16).to_le_bytes());
        common.extend([0; 2]);
        out.extend(b"PK\x03\x04");
        out.extend(&common);
        out.extend(name.as_bytes());
        out.extend(body);
        central.extend(b"PK\x01\x02\x14\0");
        central.extend(&common);
        central.extend([0; 10]);
        central.extend(at.to_le_bytes());
        central.extend(name.as_bytes());
    }
    let (at, len, n) = (out.len() as u32, central.len() as u32, (members.len() as u16).to_le_bytes());
    out.extend(central);
    out.extend(b"PK\x05\x06\0\0\0\0");
    out.extend([n, n].concat());
    out.extend(len.to_le_bytes());
    out.extend(at.to_le_bytes());
    out.extend([0; 2]);
    out
}

#[test]
fn big_endian_files_are_swapped() {
    let f = edited("state.pt", |name, body| match name {
        "state/byteorder" => *body = b"big".to_vec(),
        n if n.contains("/data/") => {
            // The only integer tensor is `num_batches_tracked`.
            let size = if body.len() == 8 && body[1..] == [0; 7] { 8 } else { 4 };
            body.chunks_exact_mut(size).for_each(<[u8]>::reverse);
        }
        _ => {}
    });
    same_as_numpy(&f.unwrap(), "", "state.npz");
    assert!(
        edited("state.pt", |n, b| if n.ends_with("byteorder") {
            b[0] = b'x'
        })
        .is_err()
    );
}

#[test]
fn attack_storages_of_other_sizes() {
    for change in [-4i64, 4] {
        let e = edited("state.pt", |name, body| {
            if name == "state/data/0" {
                body.resize((body.len() as i64 + change) as usize, 0);
            }
        });
        assert!(matches!(e, Err(Error::Format { .. })), "{change}: {e:?}");
    }
    let f = edited("state.pt", |n, b| {
        if n.ends_with("data.pkl") {
            b.truncate(b.len() / 2)
        }
    });
    assert!(matches!(f, Err(Error::Format { .. })));
}

/// A file with one tensor over a storage of 4 floats.
fn one_tensor(pickle_tail: &[u8]) -> Result<TorchFile> {
    let mut p =
        b"\x80\x02}X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\n".to_vec();
    p.extend(b"FloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ");
    p.extend(pickle_tail);
    p.extend(b"\x89NtRs.");
    let members = [("a/data.pkl".to_string(), p), ("a/data/0".to_string(), vec![0; 16])];
    TorchFile::parse(zip(&members).into(), "t")
}

#[test]
fn attack_views_beyond_the_storage() {
    // Offset, sizes, strides.
    assert_eq!(one_tensor(b"K\x00K\x02K\x02\x86K\x02K\x01\x86").unwrap().get("w").unwrap().dims[..], [2, 2]);
    assert_eq!(one_tensor(b"K\x01K\x03\x85K\x01\x85").unwrap().get("w").unwrap().dims[..], [3]);
    for tail in [
        &b"K\x01K\x04\x85K\x01\x85"[..],
        b"K\x04K\x01\x85K\x01\x85",
        b"K\x00K\x02\x85K\x04\x85",
        b"J\xff\xff\xff\xffK\x01\x85K\x01\x85",
        b"K\x00J\xff\xff\xff\xff\x85K\x01\x85",
        b"K\x00K\x02\x85J\xff\xff\xff\xff\x85",
        b"K\x00K\x02\x85K\x01K\x01\x86",
        // Sizes whose product overflows, and an axis of many elements with stride 0.
        b"K\x00\x8a\x08\0\0\0\0\0\0\0\x40\x8a\x08\0\0\0\0\0\0\0\x40\x86K\0K\0\x86",
        b"K\x00\x8a\x05\0\0\0\0\x01\x85K\0\x85",
        b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\x02\x85K\x01\x85",
    ] {
        assert!(matches!(one_tensor(tail), Err(Error::Format { .. })), "{tail:?}");
    }
    // The stride of an axis of size 1 has no effect.
    let wide = b"K\x00K\x02K\x01\x86K\x02\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x86";
    assert_eq!(one_tensor(wide).unwrap().get("w").unwrap().dims[..], [2, 1]);
}

/// A list that contains itself, and a chain of tuples, each of which contains the previous tuple twice.
#[test]
fn attack_cycles_and_doubling() {
    let file = |pickle: &[u8]| TorchFile::parse(zip(&[("a/data.pkl".into(), pickle.to_vec())]).into(), "t");
    assert!(matches!(file(b"\x80\x02]q\0h\0a."), Err(Error::Format { .. })));
    let mut p = b"\x80\x02]q\0".to_vec();
    for k in 1..60u8 {
        p.extend([b'h', k - 1, b'h', k - 1, 0x86, b'q', k]);
    }
    p.push(b'.');
    assert!(matches!(file(&p), Err(Error::Format { .. })));
    // A list of 65,536 pairs that 17 OrderedDicts copy: more than 2^20 entries.
    let mut p = b"\x80\x02ccollections\nOrderedDict\nq\0](".to_vec();
    (0..1 << 16).for_each(|_| p.extend(b"K\x01K\x02\x86"));
    p.extend(b"eq\x01");
    (0..17).for_each(|_| p.extend(b"h\0h\x01\x85R0"));
    p.push(b'.');
    let e = file(&p).unwrap_err().to_string();
    assert!(e.contains("entries of OrderedDicts"), "{e}");
    // A storage with a long name, which each reference would copy.
    let mut p = b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\nX\0\x02\0\0".to_vec();
    p.extend([b'7'; 512]);
    p.extend(b"X\x03\0\0\0cpuK\x01tQ.");
    let e = file(&p).unwrap_err().to_string();
    assert!(e.contains("name of 512 bytes"), "{e}");
}

#[test]
fn changed_files_never_panic() {
    for name in ["types.pt", "checkpoint.pt", "parameter.pt"] {
        let good = std::fs::read(folder().join(name)).unwrap();
        let cuts = (0..good.len()).step_by(7).map(|n| good[..n].to_vec());
        let flips = (0..good.len()).map(|i| {
            let mut b = good.clone();
            b[i] ^= 1 << (i % 8);
            b
        });
        for bytes in cuts.chain(flips) {
            if let Ok(f) = TorchFile::parse(bytes.into(), "t") {
                f.names().for_each(|n| drop(f.get(n)));
            }
        }
        // The checksums are removed, so that changed bytes reach the pickle machine.
        let f = TorchFile::parse(good.into(), "t").unwrap();
        let raw: Vec<(String, Vec<u8>)> =
            f.archive.members.iter().map(|m| (m.name.clone(), f.archive.body(m).unwrap().to_vec())).collect();
        let pickle = raw.iter().position(|(n, _)| n.ends_with("data.pkl")).unwrap();
        for i in 0..raw[pickle].1.len() * 3 {
            let mut raw = raw.clone();
            let n = raw[pickle].1.len();
            raw[pickle].1[i % n] = raw[pickle].1[i % n].wrapping_add([1, 0x80, 0xff][i / n]);
            if let Ok(f) = TorchFile::parse(zip(&raw).into(), "t") {
                f.names().for_each(|n| drop(f.get(n)));
            }
        }
    }
}
