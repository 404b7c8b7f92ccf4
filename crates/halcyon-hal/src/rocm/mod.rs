//! AMD GPUs through the HIP runtime (libamdhip64) and its run-time compiler (hipRTC), both loaded at run
//! time. See [`crate::simt`] for the code shared with CUDA.

use crate::BackendType;
use crate::probe::{self, ProbeDependencies, ProbeSpec, State};
use crate::simt::adapter::Adapter;
use crate::simt::{Attributes, Family, Halves, Side, SimtDriver, VendorLibrary};
use halcyon_ir::kernel::MatrixOp;
use halcyon_ir::render::{Language, MATRIX_HIP};
use std::path::Path;
use std::sync::Mutex;

/// The driver of every AMD device of the HIP runtime.
pub const DRIVER: SimtDriver = SimtDriver::new(&ROCM);

/// Names, numbers and flags of HIP.
pub static ROCM: Family = Family {
    kind: BackendType::Rocm,
    side: Side::Hip,
    title: "ROCm",
    runtime: "ROCm runtime",
    vendor: "AMD",
    language: Language::Hip,
    libraries: if cfg!(target_os = "windows") {
        &["amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll"]
    } else {
        &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"]
    },
    library_variable: "HALCYON_HIP_LIBRARY",
    fix: "On a machine with an AMD GPU install ROCm's HIP runtime (on Debian: libamdhip64-5), or name libamdhip64 in HALCYON_HIP_LIBRARY",
    no_device: "On a machine without an AMD GPU use another backend. With one, check that the kernel's module amdgpu is loaded, that this \
                user may open /dev/kfd and /dev/dri (groups render and video), and that HIP_VISIBLE_DEVICES does not hide it",
    compilers: if cfg!(target_os = "windows") {
        &["hiprtc0701.dll", "hiprtc0604.dll", "hiprtc0507.dll"]
    } else {
        // Before ROCm 6, the library of the HIP runtime also contains the compiler's functions.
        &["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libhiprtc.so", "libamdhip64.so.5"]
    },
    compiler_variable: "HALCYON_HIPRTC_LIBRARY",
    compiler_fix: "Install hipRTC (on Debian: libhiprtc-builtins5 and rocm-device-libs), or name it in HALCYON_HIPRTC_LIBRARY; without it \
                   the card can be used by --backend webgpu or opencl",
    toolkit_variables: &["ROCM_PATH", "HIP_PATH"],
    toolkits: &["/opt/rocm"],
    packages: &[],
    // hipDeviceAttribute_t, stable since HIP 5. The structure of device properties is not used because its
    // layout changed between versions.
    attributes: Attributes {
        max_workgroup: 56,
        workgroup_memory: 74,
        subgroup: 87,
        clock_khz: 5,
        concurrent: 8,
        compute_units: 63,
        integrated: 16,
        memory_clock_khz: 60,
        memory_bits: 59,
        l2_bytes: 19,
        major: 23,
        minor: 61,
    },
    products: VendorLibrary {
        title: "hipBLASLt",
        names: if cfg!(target_os = "windows") {
            &["libhipblaslt.dll", "hipblaslt.dll"]
        } else {
            &["libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"]
        },
        variable: "HALCYON_HIPBLASLT_LIBRARY",
        packages: &[],
        with_driver: false,
        fix: "Install hipBLASLt of ROCm 6 or later, or give its path in HALCYON_HIPBLASLT_LIBRARY; without it products run in rocBLAS",
    },
    plain_products: Some(VendorLibrary {
        title: "rocBLAS",
        names: if cfg!(target_os = "windows") {
            &["rocblas.dll"]
        } else {
            &["librocblas.so.5", "librocblas.so.4", "librocblas.so.3", "librocblas.so.0", "librocblas.so"]
        },
        variable: "HALCYON_ROCBLAS_LIBRARY",
        packages: &[],
        with_driver: false,
        fix: "Install rocBLAS of ROCm, or name it in HALCYON_ROCBLAS_LIBRARY; without it products use generated kernels",
    }),
    convolutions: None,
    architecture: |a| architecture(a.bus()?.as_str(), Path::new("/"), &|name| std::env::var(name).ok()),
    flags,
    matrix,
    halves,
    probe: &PROBE,
};

/// The probe of ROCm's devices. It first runs in a child process, because an old library can crash the
/// process.
pub static PROBE: ProbeSpec = ProbeSpec {
    backend: BackendType::Rocm,
    list: || {
        // SAFETY: the candidates are the names of the vendor's library, whose functions have the types that
        // the vendor declares, or the library that the user named in its place.
        let api = unsafe { ROCM.load(&ROCM.candidates()) }?;
        Ok(Adapter::all(api)?.iter().map(Adapter::info).collect())
    },
    repeat: true,
    depends: |_| ProbeDependencies {
        libraries: ROCM.candidates(),
        later: ROCM.later(),
        manifests: vec![],
        variables: &[
            "HIP_",
            "ROCR_",
            "GPU_",
            "HSA_",
            "ROCM_",
            "HALCYON_HIP_",
            "HALCYON_HIPRTC_",
            "HALCYON_HIPBLASLT_",
            "HALCYON_ROCBLAS_",
        ],
    },
    fix: "Install ROCm again, or name a working libamdhip64 in HALCYON_HIP_LIBRARY",
    state: Mutex::new(State::new()),
};

/// The compiler's name of the device at a PCI address (`0000:65:00.0`), from the kernel driver's files below
/// a root directory. These files give the name as the number `gfx_target_version`. The last two decimal
/// digits of the number are the stepping, the two before them the minor version, and the rest is the major
/// version. The name has minor version and stepping in hexadecimal, so 90010 is gfx90a. As in HIP, the
/// environment variable `HSA_OVERRIDE_GFX_VERSION` overrides the version for all devices, and
/// `HSA_OVERRIDE_GFX_VERSION_N` for node N.
fn architecture(bus: &str, root: &Path, variable: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let mut numbers = bus.split([':', '.']).map(|n| u32::from_str_radix(n, 16));
    let mut next = || numbers.next()?.ok();
    let (domain, bus, device, function) = (next()?, next()?, next()?, next()?);
    let place = (bus << 8) | (device << 3) | function;
    for node in probe::entries(&root.join("sys/class/kfd/kfd/topology/nodes")) {
        let Ok(text) = std::fs::read_to_string(node.join("properties")) else { continue };
        let value = |name: &str| -> Option<u32> {
            let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' '))?;
            line.trim().parse().ok()
        };
        if value("location_id") != Some(place) || value("domain").unwrap_or(0) != domain {
            continue;
        }
        if let Some(v) = value("gfx_target_version").filter(|v| *v > 0) {
            let number = node.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let other = variable(&format!("HSA_OVERRIDE_GFX_VERSION_{number}"))
                .or_else(|| variable("HSA_OVERRIDE_GFX_VERSION"))
                .and_then(|text| three(&text));
            let [major, minor, step] = other.unwrap_or([v / 10_000, v / 100 % 100, v % 100]);
            return Some(format!("gfx{major}{minor:x}{step:x}"));
        }
    }
    None
}

/// Parses `10.3.0`.
fn three(text: &str) -> Option<[u32; 3]> {
    let all: Option<Vec<u32>> = text.split('.').map(|n| n.parse().ok()).collect();
    all?.try_into().ok()
}

/// The compiler's flags. No flag relaxes the arithmetic. Contraction is off, so only a multiply-add that the
/// kernel itself spells as one is rounded once. Without an architecture, hipRTC compiles for the thread's
/// current device.
fn flags(architecture: Option<&str>) -> Option<Vec<String>> {
    let architecture = architecture.map(|a| format!("--offload-arch={a}"));
    Some(architecture.into_iter().chain(["-std=c++17", "-ffp-contract=off"].map(String::from)).collect())
}

/// Architectures with a supported matrix unit, and their subgroup sizes. The unit is MFMA with the later bf16
/// instructions (CDNA 2 and 3) or WMMA (RDNA 3).
const MATRIX: [(&str, u8); 8] = [
    ("gfx90a", 64),
    ("gfx940", 64),
    ("gfx941", 64),
    ("gfx942", 64),
    ("gfx1100", 32),
    ("gfx1101", 32),
    ("gfx1102", 32),
    ("gfx1103", 32),
];

/// All architectures from gfx8 on have f16 arithmetic. CDNA 3, CDNA 4 and RDNA 4 have products of 8-bit
/// floats.
fn halves(_: Option<(u32, u32)>, architecture: Option<&str>) -> Halves {
    let Some(name) = architecture.and_then(|a| a.split(':').next()) else { return Halves::default() };
    let f8 = ["gfx940", "gfx941", "gfx942", "gfx950"].contains(&name) || name.starts_with("gfx12");
    Halves { f16: !["gfx6", "gfx7"].iter().any(|old| name.starts_with(old)), f8: Some(f8) }
}

fn matrix(architecture: Option<&str>) -> Vec<MatrixOp> {
    // A colon separates feature flags (`gfx90a:xnack-`).
    let name = architecture.and_then(|a| a.split(':').next());
    let width = MATRIX.iter().find(|(n, _)| Some(*n) == name).map(|(_, w)| *w);
    MATRIX_HIP.into_iter().filter(|o| Some(o.width) == width).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_row_names_every_kernel_library() {
        let variables: Vec<&str> = ROCM.kernel_libraries().map(|l| l.variable).collect();
        assert_eq!(BackendType::Rocm.built_in().unwrap().libraries, variables);
    }

    #[test]
    fn narrow_floats_by_architecture() {
        for (architecture, f16, f8) in [
            (None, false, None),
            (Some("gfx700"), false, Some(false)),
            (Some("gfx90a:sramecc+:xnack-"), true, Some(false)),
            (Some("gfx942:sramecc+"), true, Some(true)),
            (Some("gfx950"), true, Some(true)),
            (Some("gfx1100"), true, Some(false)),
            (Some("gfx1201"), true, Some(true)),
        ] {
            assert_eq!(halves(Some((9, 0)), architecture), Halves { f16, f8 }, "{architecture:?}");
        }
    }

    #[test]
    fn matrix_units_by_architecture() {
        for (architecture, width) in [
            (None, None),
            (Some("gfx1036"), None),
            (Some("gfx908"), None),
            (Some("gfx90a:sramecc+:xnack-"), Some(64)),
            (Some("gfx942"), Some(64)),
            (Some("gfx1100"), Some(32)),
        ] {
            let found = matrix(architecture);
            assert_eq!(found.first().map(|o| o.width), width, "{architecture:?}");
            assert_eq!(found.len(), if width.is_some() { 2 } else { 0 });
        }
    }

    #[test]
    fn architectures_are_read_from_the_kernels_topology() {
        let dir = tempfile::tempdir().unwrap();
        let node = |n: u32, text: &str| {
            let dir = dir.path().join(format!("sys/class/kfd/kfd/topology/nodes/{n}"));
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join("properties"), text).unwrap();
        };
        node(0, "cpu_cores_count 64\nlocation_id 0\ndomain 0\ngfx_target_version 0\n");
        node(1, "simd_count 440\nlocation_id 25856\ndomain 0\ngfx_target_version 90010\n");
        node(2, "location_id 25856\ndomain 1\ngfx_target_version 110000\n");
        node(3, "location_id 512\ndomain 0\ngfx_target_version 100306\n");
        node(4, "location_id 768\ndomain 0\ngfx_target_version 90402\n");
        for (bus, want) in [
            ("0000:65:00.0", Some("gfx90a")),
            ("0001:65:00.0", Some("gfx1100")),
            ("0000:02:00.0", Some("gfx1036")),
            ("0000:03:00.0", Some("gfx942")),
            ("0000:00:00.0", None),
            ("0000:66:00.0", None),
            ("nothing", None),
        ] {
            assert_eq!(architecture(bus, dir.path(), &|_| None).as_deref(), want, "{bus}");
        }
        // Node 3 has its own override; a malformed version is ignored.
        let variable = |name: &str| match name {
            "HSA_OVERRIDE_GFX_VERSION_3" => Some("10.3.0".to_string()),
            "HSA_OVERRIDE_GFX_VERSION_1" => Some("9".to_string()),
            "HSA_OVERRIDE_GFX_VERSION" => Some("9.0.10".to_string()),
            _ => None,
        };
        for (bus, want) in
            [("0000:02:00.0", "gfx1030"), ("0000:03:00.0", "gfx90a"), ("0000:65:00.0", "gfx90a")]
        {
            assert_eq!(architecture(bus, dir.path(), &variable).as_deref(), Some(want), "{bus}");
        }
    }
}
