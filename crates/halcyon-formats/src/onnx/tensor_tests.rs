use super::super::proto::{Segment, StringStringEntryProto};
use super::*;

fn read(t: &TensorProto) -> Result<ConstData> {
    decode(t, &External::none(), "t")
}

fn refused(t: &TensorProto) {
    let r = read(t);
    assert!(matches!(r, Err(Error::Format { .. })), "{r:?}");
}

#[test]
fn every_type_round_trips_through_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let p = dir.path().join("t.pb");
    for d in DType::all() {
        for dims in [vec![], vec![2, 3], vec![0, 2]] {
            let n = dims.iter().product::<usize>();
            let t = crate::data::from_scalars(d, &dims, (0..n).map(|i| (i as f64 - 1.0).into())).unwrap();
            match write_pb(&p, "x", &t) {
                Ok(()) => assert_eq!(read_pb(&p).unwrap(), ("x".into(), t)),
                Err(e) => assert!(d.row().onnx == 0 && matches!(e, Error::Unsupported { .. }), "{d}: {e}"),
            }
        }
    }
}

#[test]
fn typed_fields_of_every_type() {
    for d in DType::all().filter(|d| d.row().onnx != 0) {
        let mut t = TensorProto { dims: vec![2], data_type: d.row().onnx, ..Default::default() };
        match d {
            DType::F32 => t.float_data = vec![0.0, 1.0],
            DType::F64 => t.double_data = vec![0.0, 1.0],
            DType::I64 => t.int64_data = vec![0, 1],
            DType::U32 | DType::U64 => t.uint64_data = vec![0, 1],
            DType::F16 => t.int32_data = vec![0, 0x3c00],
            DType::BF16 => t.int32_data = vec![0, 0x3f80],
            // Both elements are packed into one number. Bits after the second element are ignored.
            DType::U2 | DType::I2 => t.int32_data = vec![0b0100],
            DType::U4 | DType::I4 => t.int32_data = vec![0x10],
            DType::F4E2M1 => t.int32_data = vec![0x20],
            DType::F8E4M3FN => t.int32_data = vec![0, 0x38],
            DType::F8E4M3FNUZ => t.int32_data = vec![0, 0x40],
            DType::F8E5M2 => t.int32_data = vec![0, 0x3c],
            DType::F8E5M2FNUZ => t.int32_data = vec![0, 0x40],
            DType::F8E8M0 => t.int32_data = vec![0, 0x7f],
            d if d.is_float() => t.int32_data = vec![0, halcyon_ir::minifloat::encode(d, 1.0).into()],
            _ => t.int32_data = vec![0, 1],
        }
        let got: Vec<f64> = read(&t).unwrap().scalars().map(|s| s.as_f64()).collect();
        // f8e8m0 has no zero; its smallest power of two is used instead.
        let zero = if d == DType::F8E8M0 { 2f64.powi(-127) } else { 0.0 };
        assert_eq!(got, [zero, 1.0], "{d}");
        t.dims = vec![5];
        refused(&t);
    }
    let signed =
        TensorProto { dims: vec![2], data_type: 3, int32_data: vec![-128, 127], ..Default::default() };
    assert_eq!(read(&signed).unwrap().to_vec::<i8>(), [-128, 127]);
    for (code, v) in [(2, -1), (2, 256), (3, 128), (9, 2), (10, 65536), (16, -1), (17, 256), (22, -1)] {
        refused(&TensorProto { dims: vec![1], data_type: code, int32_data: vec![v], ..Default::default() });
    }
    refused(&TensorProto { dims: vec![1], data_type: 12, uint64_data: vec![1 << 32], ..Default::default() });
}

#[test]
fn raw_data_is_a_slice_of_the_file() {
    let t = ConstData::from_slice(&[4], &[1f32, 2.0, 3.0, 4.0]).unwrap();
    let f = Bytes::from(encode(&t, "weight").encode_to_vec());
    let (_, back) = parse_pb(f.clone(), &External::none(), "t").unwrap();
    assert!(f.as_ptr_range().contains(&back.bytes().as_ptr()));
}

#[test]
fn hostile_sizes_are_refused_before_allocation() {
    let raw = |dims: Vec<i64>| TensorProto {
        dims,
        data_type: 1,
        raw_data: Some(Bytes::from_static(&[0; 4])),
        ..Default::default()
    };
    assert!(read(&raw(vec![1])).is_ok());
    for dims in [
        vec![-1],
        vec![i64::MIN],
        vec![i64::MAX],
        vec![1 << 32, 1 << 32],
        vec![0, 1 << 40, 1 << 40],
        vec![2],
        vec![0],
    ] {
        refused(&raw(dims));
    }
}

#[test]
fn types_are_named_or_refused() {
    let of = |code| TensorProto { dims: vec![0], data_type: code, ..Default::default() };
    for (code, name) in OTHER_TYPES {
        match read(&of(*code)) {
            Err(Error::Unsupported { what, .. }) => assert!(what.contains(name), "{what}"),
            r => panic!("{r:?}"),
        }
    }
    for code in [0, -1, 99] {
        refused(&of(code));
    }
    let t = TensorProto { segment: Some(Segment { begin: 0, end: 0 }), ..of(1) };
    assert!(matches!(read(&t), Err(Error::Unsupported { .. })));
}

fn external(entries: &[(&str, &str)]) -> TensorProto {
    TensorProto {
        dims: vec![2],
        data_type: 1,
        data_location: EXTERNAL,
        external_data: entries
            .iter()
            .map(|(k, v)| StringStringEntryProto { key: k.to_string(), value: v.to_string() })
            .collect(),
        ..Default::default()
    }
}

#[test]
fn external_data_is_found_beside_the_model() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    let body: Vec<u8> = [9f32, 1.0, 2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    std::fs::write(dir.path().join("w.bin"), &body).unwrap();
    std::fs::write(dir.path().join("sub/w.bin"), &body).unwrap();
    let ext = External::in_folder_of(&dir.path().join("m.onnx"));
    for location in ["w.bin", "./w.bin", "sub/w.bin"] {
        let t = external(&[("location", location), ("offset", "4"), ("length", "8")]);
        assert_eq!(decode(&t, &ext, "m").unwrap().to_vec::<f32>(), [1.0, 2.0]);
    }
    // Without offset and length, the data starts at the start of the file.
    let t = decode(&external(&[("location", "w.bin")]), &ext, "m").unwrap();
    assert_eq!(t.to_vec::<f32>(), [9.0, 1.0]);
}

#[test]
fn external_data_in_memory_takes_the_place_of_a_file() {
    let body: Vec<u8> = [9f32, 1.0, 2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let at = |location| external(&[("location", location), ("offset", "4")]);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("w.bin"), [0; 12]).unwrap();
    for ext in [External::none(), External::in_folder_of(&dir.path().join("m.onnx"))] {
        let ext = ext.with_file("w.bin", body.clone().into());
        for ext in [ext.clone(), ext] {
            assert_eq!(decode(&at("w.bin"), &ext, "m").unwrap().to_vec::<f32>(), [1.0, 2.0]);
        }
    }
    // A model without a folder still reads no other file, and no location leaves the folder.
    let ext = External::none().with_file("w.bin", body.clone().into()).with_file("../w.bin", body.into());
    for location in ["other.bin", "../w.bin"] {
        let r = decode(&at(location), &ext, "m");
        assert!(matches!(r, Err(Error::Format { .. })), "{location}: {r:?}");
    }
}

#[test]
fn external_attacks_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m/m.onnx");
    std::fs::create_dir(dir.path().join("m")).unwrap();
    std::fs::write(dir.path().join("secret"), [0; 8]).unwrap();
    std::fs::write(dir.path().join("m/w"), [0; 8]).unwrap();
    let ext = External::in_folder_of(&model);
    let absolute = dir.path().join("secret").display().to_string();
    for location in
        ["../secret", "x/../../secret", "/etc/passwd", &absolute, "", "..", "..\\secret", "C:\\w", "w\0"]
    {
        let r = decode(&external(&[("location", location)]), &ext, "m");
        assert!(matches!(r, Err(Error::Format { .. })), "{location}: {r:?}");
    }
    for (offset, length) in [
        ("1", "8"),
        ("8", "8"),
        ("9", "8"),
        ("18446744073709551615", "8"),
        ("18446744073709551616", "8"),
        ("-1", "8"),
        ("0", "4"),
        ("0", "18446744073709551615"),
        ("x", "8"),
    ] {
        let r = decode(&external(&[("location", "w"), ("offset", offset), ("length", length)]), &ext, "m");
        assert!(matches!(r, Err(Error::Format { .. })), "{offset} {length}: {r:?}");
    }
    assert!(matches!(decode(&external(&[("location", "none")]), &ext, "m"), Err(Error::Io { .. })));
    assert!(matches!(decode(&external(&[("location", ".")]), &ext, "m"), Err(Error::Io { .. })));
    assert!(matches!(decode(&external(&[]), &ext, "m"), Err(Error::Format { .. })));
    let r = decode(&external(&[("location", "w")]), &External::none(), "m");
    assert!(matches!(r, Err(Error::Format { .. })));
}

#[test]
fn truncated_messages_are_refused() {
    let t = ConstData::from_slice(&[4], &[1f32, 2.0, 3.0, 4.0]).unwrap();
    let f = Bytes::from(encode(&t, "w").encode_to_vec());
    for n in 0..f.len() {
        assert!(parse_pb(f.slice(..n), &External::none(), "t").is_err(), "cut at {n}");
    }
}

proptest::proptest! {
    #[test]
    fn random_bytes_never_panic(v in proptest::collection::vec(0u8.., 0..300)) {
        let _ = parse_pb(v.into(), &External::none(), "t");
    }
}
