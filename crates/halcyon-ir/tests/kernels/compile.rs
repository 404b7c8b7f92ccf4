//! Compiles rendered CUDA and HIP with the vendors' run-time compilers, in batches and without a GPU. If a
//! compiler is missing, the test is skipped with a message, or fails if HALCYON_REQUIRE_ALL=1.

use crate::{common, tensor};
use halcyon_ir::Error;
use halcyon_ir::kernel::Kernel;
use halcyon_ir::render::{Language, MATRIX_CUDA, MATRIX_HIP, to_batch};

/// One kernel in this many is compiled, unless all cases run.
const SAMPLE: usize = 8;

/// Compiles kernels, or a sample of them, with a script of `xtask/scripts` for every architecture in `archs`.
fn compile(test: &str, l: Language, script: &str, archs: &str, kernels: &[Kernel]) {
    // A short list has at least one kernel in the sample.
    let sample = SAMPLE.min(kernels.len());
    let (every, first) = match halcyon_test_host::drawn(&format!("kernels of {test} with {script}"), sample) {
        Some(first) => (sample.max(1), first),
        None => (1, 0),
    };
    let sample: Vec<&Kernel> = kernels.iter().skip(first).step_by(every).collect();
    assert!(!sample.is_empty(), "{test} has {} kernels", kernels.len());
    let batch = |k: &[&Kernel]| to_batch(k, l).unwrap().text;
    let texts: Vec<String> = sample.chunks(100).map(batch).collect();
    halcyon_test_host::vendors::compile(test, script, archs, l.extension(), &texts);
}

#[test]
fn cuda_compiles_under_nvrtc() {
    compile(
        "cuda_compiles_under_nvrtc",
        Language::Cuda,
        "nvrtc_compile.py",
        "sm_80,sm_90",
        &common::everything_for(true),
    );
}

#[test]
fn hip_compiles_under_hiprtc() {
    compile(
        "hip_compiles_under_hiprtc",
        Language::Hip,
        "hiprtc_compile.py",
        "gfx90a,gfx1030",
        &common::everything_for(true),
    );
}

#[test]
fn hip_compiles_under_clang() {
    compile(
        "hip_compiles_under_clang",
        Language::Hip,
        "clang_compile.py",
        "gfx942,gfx1100",
        &common::everything_for(true),
    );
}

#[test]
fn products_on_matrix_units_compile() {
    let test = "products_on_matrix_units_compile";
    let cuda = common::matrix_products(&tensor::with_matrix_units(&MATRIX_CUDA, 32));
    compile(test, Language::Cuda, "nvrtc_compile.py", "sm_80,sm_90", &cuda);
    let hip = common::matrix_products(&tensor::with_matrix_units(&MATRIX_HIP, 64));
    compile(test, Language::Hip, "hiprtc_compile.py", "gfx90a", &hip);
    compile(test, Language::Hip, "clang_compile.py", "gfx942", &hip);
    let narrow = common::matrix_products(&tensor::with_matrix_units(&MATRIX_HIP, 32));
    compile(test, Language::Hip, "clang_compile.py", "gfx1100", &narrow);
    // The last kernel multiplies TF32 matrices, which only CUDA can express. The other languages return
    // [`Error::Unsupported`].
    let last = cuda.last().unwrap();
    for l in Language::ALL {
        let found = to_batch(&[last], l);
        match l {
            Language::Cuda => assert!(found.unwrap().text.contains("mma.sync")),
            _ => assert!(matches!(found, Err(Error::Unsupported { .. })), "{}", l.name()),
        }
    }
}

#[test]
fn products_of_language_models_on_matrix_units_compile() {
    let test = "products_of_language_models_on_matrix_units_compile";
    let cuda = common::matrix_language_products(&tensor::with_matrix_units(&MATRIX_CUDA, 32));
    compile(test, Language::Cuda, "nvrtc_compile.py", "sm_80,sm_90", &cuda);
    let hip = common::matrix_language_products(&tensor::with_matrix_units(&MATRIX_HIP, 64));
    compile(test, Language::Hip, "hiprtc_compile.py", "gfx90a", &hip);
    compile(test, Language::Hip, "clang_compile.py", "gfx942", &hip);
    let narrow = common::matrix_language_products(&tensor::with_matrix_units(&MATRIX_HIP, 32));
    compile(test, Language::Hip, "clang_compile.py", "gfx1100", &narrow);
}

#[test]
fn attention_on_matrix_units_compiles() {
    let test = "attention_on_matrix_units_compiles";
    let cuda = common::matrix_attention(&tensor::with_matrix_units(&MATRIX_CUDA, 32));
    compile(test, Language::Cuda, "nvrtc_compile.py", "sm_80,sm_90", &cuda);
    let hip = common::matrix_attention(&tensor::with_matrix_units(&MATRIX_HIP, 64));
    compile(test, Language::Hip, "hiprtc_compile.py", "gfx90a", &hip);
    compile(test, Language::Hip, "clang_compile.py", "gfx942", &hip);
    let narrow = common::matrix_attention(&tensor::with_matrix_units(&MATRIX_HIP, 32));
    compile(test, Language::Hip, "clang_compile.py", "gfx1100", &narrow);
}

#[test]
fn every_kernel_renders_in_every_language() {
    for l in Language::ALL {
        let kernels = common::everything_for(l != Language::Metal);
        let s = to_batch(&kernels.iter().collect::<Vec<_>>(), l).unwrap();
        assert_eq!(s.entries.len(), kernels.len());
    }
}

/// Runs every kernel through naga's front end and validator three times: plain; with f16, 16-bit integers,
/// fused multiply-adds and subgroups; with short loops.
#[test]
fn wgsl_passes_naga() {
    use halcyon_ir::render::wgsl::{self, Options};
    let extended = Options { f16: true, int16: true, fused: true, subgroups: true, ..Options::default() };
    let careful = Options { short_loops: true, unroll: 8, ..Options::default() };
    let kernels = common::everything_for(true);
    let mut failures = vec![];
    for k in &kernels {
        for o in [&Options::default(), &extended, &careful] {
            let text = wgsl::render(k, o).unwrap_or_else(|e| panic!("{}: {e}", k.name)).text;
            if let Err(e) = common::naga_validates(&text) {
                failures.push(format!("{}: {e}\n{text}", k.name));
            }
        }
    }
    assert!(failures.is_empty(), "{} of {} fail; the first:\n{}", failures.len(), kernels.len(), failures[0]);
}
