//! Compares rendered kernels with snapshots, whose changes are reviewed as diffs. `UPDATE_SNAPSHOTS=1 cargo
//! test -p halcyon-ir --test kernels snapshots` rewrites the snapshots.

use crate::common;
use halcyon_ir::kernel::Kernel;
use halcyon_ir::render::{Indirect, Language, MATRIX_CUDA, Source, render, render_indirect, to_batch};
use halcyon_ir::{DType, Error, Result, ScalarOp};
use std::path::PathBuf;

fn check(name: &str, k: &Kernel) {
    check_as(name, |l| render(k, l));
}

fn check_as(name: &str, render: impl Fn(Language) -> Result<Source>) {
    for l in Language::ALL {
        let text = match render(l) {
            Ok(s) => s.text,
            Err(Error::Unsupported { .. }) => continue,
            Err(e) => panic!("{name} in {}: {e}", l.name()),
        };
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("tests/snapshots")
            .join(format!("{name}.{}", l.extension()));
        if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let want = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(want == text, "{} differs; review it with UPDATE_SNAPSHOTS=1\n{text}", path.display());
        if l == Language::Wgsl {
            common::naga_validates(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    }
}

#[test]
fn rendered_text_is_as_reviewed() {
    check("axpy_f32", &common::axpy(DType::F32));
    check("axpy_bf16", &common::axpy(DType::BF16));
    check("cast_f64_f16", &common::cast(DType::F64, DType::F16));
    check("cast_f32_u8", &common::cast(DType::F32, DType::U8));
    check("row_sum_f16", &common::row_sum(DType::F16));
    check("subgroup_f32", &common::subgroup(DType::F32));
    check("everything", &common::everything());
    check("constants", &common::constants());
    check("matrices", &common::matrices(&MATRIX_CUDA[..2]));
    check("matrices_tf32", &common::matrices(&MATRIX_CUDA[2..]));
    check("words", &common::matrices(&[]));
    check("gelu_f32", &common::scalar(ScalarOp::Gelu, DType::F32));
    check("mod_i32", &common::scalar(ScalarOp::Mod, DType::I32));
    check("threefry_u32", &common::scalar(ScalarOp::Threefry, DType::U32));
}

/// Parameters of every size and the fault word are read from an argument buffer.
#[test]
fn arguments_in_a_buffer_are_as_reviewed() {
    let k = common::everything();
    let faults = k.params.iter().any(|p| p.name == "fault");
    let params = (0..k.params.len()).filter(|p| k.params[*p].name != "fault").collect();
    let indirect = Indirect { fault: faults, params };
    assert!(faults && indirect.params.len() > 1, "{:?}", k.params);
    let refused = |l, i| matches!(render_indirect(&k, l, i), Err(Error::Unsupported { .. }));
    // In OpenCL C, the fault word is an argument of the launch.
    assert!(refused(Language::OpenCl, &indirect) && refused(Language::Metal, &indirect));
    check_as("everything_indirect", |l| {
        render_indirect(&k, l, &Indirect { fault: faults && l != Language::OpenCl, ..indirect.clone() })
    });
    let one = Indirect { params: vec![1], ..Indirect::default() };
    check_as("axpy_f32_indirect", |l| render_indirect(&common::axpy(DType::F32), l, &one));
}

#[test]
fn a_batch_has_each_kernel_and_helper_once() {
    let k = [
        common::scalar(ScalarOp::Max, DType::F32),
        common::row_sum(DType::F32),
        common::scalar(ScalarOp::Max, DType::F32),
    ];
    let s = to_batch(&k.iter().collect::<Vec<_>>(), Language::Cuda).unwrap();
    assert_eq!(s.entries[0], s.entries[2]);
    assert_ne!(s.entries[0], s.entries[1]);
    assert_eq!(s.text.matches("__global__").count(), 2);
    assert_eq!(s.text.matches("float h_max_f32(").count(), 1);
}

#[test]
fn metal_has_no_f64_and_says_so() {
    let e = render(&common::axpy(DType::F64), Language::Metal).unwrap_err();
    assert!(
        matches!(&e, Error::Unsupported { what, .. } if what.contains("f64") && what.contains("Metal")),
        "{e}"
    );
}
