//! Rendered CUDA and HIP through the vendors' run-time compilers, in batches and without a GPU.
//! A missing compiler skips with a message, and fails where HALCYON_REQUIRE_LANES=1.

mod common;
#[path = "common/vendors.rs"]
mod vendors;

use halcyon_ir::render::{Language, to_batch};
use vendors::compile;

#[test]
fn cuda_compiles_under_nvrtc() {
    compile(Language::Cuda, "nvrtc_compile.py", "sm_80,sm_90", &common::everything_for(true));
}

#[test]
fn hip_compiles_under_hiprtc() {
    compile(Language::Hip, "hiprtc_compile.py", "gfx90a,gfx1030", &common::everything_for(true));
}

#[test]
fn every_kernel_renders_in_every_language() {
    for l in Language::ALL {
        let kernels = common::everything_for(l != Language::Metal);
        let s = to_batch(&kernels.iter().collect::<Vec<_>>(), l).unwrap();
        assert_eq!(s.entries.len(), kernels.len());
    }
}
