//! NVIDIA GPUs through the driver library (libcuda) and the run-time compiler (NVRTC), both loaded at run
//! time. No toolkit and no headers are needed. See [`crate::simt`] for the code shared with ROCm.

use crate::BackendType;
use crate::probe::{ProbeDependencies, ProbeSpec, State};
use crate::simt::adapter::Adapter;
use crate::simt::{Attributes, Family, Halves, Side, SimtDriver, VendorLibrary};
use halcyon_ir::kernel::MatrixOp;
use halcyon_ir::render::{Language, MATRIX_CUDA};
use std::sync::Mutex;

/// The driver of every CUDA device.
pub const DRIVER: SimtDriver = SimtDriver::new(&CUDA);

/// Names, numbers and flags of CUDA.
pub static CUDA: Family = Family {
    kind: BackendType::Cuda,
    side: Side::Cuda,
    title: "CUDA",
    runtime: "NVIDIA driver",
    vendor: "NVIDIA",
    language: Language::Cuda,
    libraries: if cfg!(target_os = "windows") { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] },
    library_variable: "HALCYON_CUDA_LIBRARY",
    fix: "On a machine with an NVIDIA GPU install NVIDIA's driver, or name libcuda in HALCYON_CUDA_LIBRARY",
    no_device: "On a machine without an NVIDIA GPU use another backend. With one, check that `nvidia-smi` lists it and that \
                CUDA_VISIBLE_DEVICES does not hide it",
    compilers: if cfg!(target_os = "windows") {
        &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll", "nvrtc64_112_0.dll"]
    } else {
        &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"]
    },
    compiler_variable: "HALCYON_NVRTC_LIBRARY",
    compiler_fix: "Install NVRTC of the driver's major version (pip install nvidia-cuda-nvrtc-cu12, for drivers of CUDA 13 \
                   nvidia-cuda-nvrtc, or the CUDA toolkit), or name it in HALCYON_NVRTC_LIBRARY; without it the card can be used by \
                   --backend webgpu",
    toolkit_variables: &["CUDA_HOME", "CUDA_PATH"],
    toolkits: &["/usr/local/cuda", "/opt/cuda"],
    packages: if cfg!(target_os = "windows") {
        &["nvidia/cu13/bin/x86_64", "nvidia/cuda_nvrtc/bin"]
    } else {
        &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"]
    },
    // CUdevice_attribute.
    attributes: Attributes {
        max_workgroup: 1,
        workgroup_memory: 8,
        subgroup: 10,
        clock_khz: 13,
        concurrent: 31,
        compute_units: 16,
        integrated: 18,
        memory_clock_khz: 36,
        memory_bits: 37,
        l2_bytes: 38,
        major: 75,
        minor: 76,
    },
    products: VendorLibrary {
        title: "cuBLASLt",
        names: if cfg!(target_os = "windows") {
            &["cublasLt64_13.dll", "cublasLt64_12.dll", "cublasLt64_11.dll"]
        } else {
            &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11", "libcublasLt.so"]
        },
        variable: "HALCYON_CUBLASLT_LIBRARY",
        packages: if cfg!(target_os = "windows") {
            &["nvidia/cu13/bin/x86_64", "nvidia/cublas/bin"]
        } else {
            &["nvidia/cu13/lib", "nvidia/cublas/lib"]
        },
        with_driver: true,
        fix: "Install cuBLAS (pip install nvidia-cublas-cu12, or the CUDA toolkit), or name libcublasLt in HALCYON_CUBLASLT_LIBRARY; \
              without it products use generated kernels",
    },
    plain_products: None,
    convolutions: Some(VendorLibrary {
        title: "cuDNN",
        names: if cfg!(target_os = "windows") {
            &["cudnn64_9.dll", "cudnn64_8.dll"]
        } else {
            &["libcudnn.so.9", "libcudnn.so.8", "libcudnn.so"]
        },
        variable: "HALCYON_CUDNN_LIBRARY",
        packages: &[if cfg!(target_os = "windows") { "nvidia/cudnn/bin" } else { "nvidia/cudnn/lib" }],
        with_driver: false,
        fix: "Install cuDNN (pip install nvidia-cudnn-cu12), or name libcudnn in HALCYON_CUDNN_LIBRARY; without it convolutions and \
              attention use generated kernels",
    }),
    architecture,
    flags,
    matrix,
    halves,
    probe: &PROBE,
};

/// The probe of CUDA's devices. It first runs in a child process, because a library that does not match the
/// kernel module can crash the process.
pub static PROBE: ProbeSpec = ProbeSpec {
    backend: BackendType::Cuda,
    list: || {
        // SAFETY: the candidates are names of the vendor's library, or the library that the user named in its
        // place. Its functions have the types that the vendor declares.
        let api = unsafe { CUDA.load(&CUDA.candidates()) }?;
        Ok(Adapter::all(api)?.iter().map(Adapter::info).collect())
    },
    repeat: true,
    depends: |_| ProbeDependencies {
        libraries: CUDA.candidates(),
        later: CUDA.later(),
        manifests: vec![],
        variables: &[
            "CUDA_",
            "NVIDIA_",
            "VIRTUAL_ENV",
            "HALCYON_CUDA_",
            "HALCYON_NVRTC_",
            "HALCYON_CUBLASLT_",
            "HALCYON_CUDNN_",
        ],
    },
    fix: "Reinstall the driver that matches the kernel module, or name a working libcuda in HALCYON_CUDA_LIBRARY",
    state: Mutex::new(State::new()),
};

fn architecture(a: &Adapter) -> Option<String> {
    a.capability().map(|(major, minor)| format!("sm_{major}{minor}"))
}

/// `mma.sync` supports bf16 and TF32 from sm_80 (Ampere) on.
fn matrix(architecture: Option<&str>) -> Vec<MatrixOp> {
    let number = architecture.and_then(|a| a.strip_prefix("sm_")?.parse::<u32>().ok());
    if number.is_some_and(|n| n >= 80) { MATRIX_CUDA.to_vec() } else { vec![] }
}

/// Arithmetic in f16 requires compute capability 5.3; products of 8-bit floats require 8.9.
fn halves(capability: Option<(u32, u32)>, _: Option<&str>) -> Halves {
    Halves { f16: capability.is_some_and(|c| c >= (5, 3)), f8: capability.map(|c| c >= (8, 9)) }
}

/// Flags of the compiler. None of them relaxes the arithmetic. With `--fmad=false` the compiler does not fuse
/// a product and a sum, so only a multiply-add that the kernel itself spells as one is rounded once.
fn flags(architecture: Option<&str>) -> Option<Vec<String>> {
    let architecture = format!("--gpu-architecture={}", architecture?);
    Some([architecture.as_str(), "--std=c++17", "--fmad=false"].map(String::from).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_row_names_every_kernel_library() {
        let variables: Vec<&str> = CUDA.kernel_libraries().map(|l| l.variable).collect();
        assert_eq!(BackendType::Cuda.built_in().unwrap().libraries, variables);
    }

    #[test]
    fn narrow_floats_by_capability() {
        for (capability, f16, f8) in [
            (None, false, None),
            (Some((5, 2)), false, Some(false)),
            (Some((5, 3)), true, Some(false)),
            (Some((8, 6)), true, Some(false)),
            (Some((8, 9)), true, Some(true)),
            (Some((9, 0)), true, Some(true)),
            (Some((12, 0)), true, Some(true)),
        ] {
            assert_eq!(halves(capability, None), Halves { f16, f8 }, "{capability:?}");
        }
    }

    #[test]
    fn matrix_units_by_architecture() {
        for (architecture, many) in [(None, 0), (Some("sm_75"), 0), (Some("sm_80"), 3), (Some("sm_120"), 3)] {
            assert_eq!(matrix(architecture).len(), many, "{architecture:?}");
        }
    }
}
