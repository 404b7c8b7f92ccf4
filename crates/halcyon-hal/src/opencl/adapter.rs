//! Platforms and devices, and their properties.

use super::sys::{self, Api, Handle};
use crate::{BackendType, Caps, DeviceInfo, Error, Result};
use std::ffi::c_void;
use std::sync::Mutex;

/// One device of one platform.
#[derive(Clone, Copy, Debug)]
pub(super) struct Adapter {
    pub(super) api: &'static Api,
    pub(super) platform: Handle,
    pub(super) device: Handle,
    /// The backend that lists the device. `index` is the device's number in that backend.
    pub backend: BackendType,
    pub index: usize,
}

// SAFETY: platform and device handles are opaque, valid as long as the library is loaded, and may be queried
// from any thread (OpenCL 1.2, appendix A.2).
unsafe impl Send for Adapter {}
// SAFETY: queries do not modify the handles and are thread-safe (OpenCL 1.2, appendix A.2).
unsafe impl Sync for Adapter {}

/// The result of a query of variable size: calls `query(size, value, size_ret)` for the size, then for the
/// bytes.
pub(super) fn query_bytes(
    query: impl Fn(usize, *mut c_void, *mut usize) -> i32,
) -> std::result::Result<Vec<u8>, i32> {
    let mut n = 0usize;
    match query(0, std::ptr::null_mut(), &mut n) {
        sys::SUCCESS => {}
        c => return Err(c),
    }
    let mut out = vec![0u8; n];
    if n == 0 {
        return Ok(out);
    }
    match query(n, out.as_mut_ptr().cast(), std::ptr::null_mut()) {
        sys::SUCCESS => Ok(out),
        c => Err(c),
    }
}

/// Text up to its NUL terminator.
pub(super) fn text(mut b: Vec<u8>) -> String {
    if let Some(n) = b.iter().position(|&c| c == 0) {
        b.truncate(n);
    }
    String::from_utf8_lossy(&b).trim().to_string()
}

fn unavailable(api: &Api, tried: Vec<String>, reason: String) -> Error {
    let mut t = vec![api.library.clone()];
    t.extend(tried);
    Error::Unavailable { backend: "opencl".into(), tried: t, reason, fix: sys::fix() }
}

impl Adapter {
    /// Every device of every platform of the library. Platforms without devices are skipped.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there is no usable device, with the reason for each platform or device.
    pub(super) fn all(api: &'static Api) -> Result<Vec<Adapter>> {
        // Drivers initialise at the first query. PoCL 3.1 does not synchronise its initialisation: another
        // thread that queries meanwhile finds no device or a partly initialised one.
        static FIRST: Mutex<()> = Mutex::new(());
        let _one_at_a_time = FIRST.lock().unwrap_or_else(|e| e.into_inner());
        let mut n = 0u32;
        // SAFETY: the list is null and has no entries, so the call writes only the count, to `n`.
        let code = unsafe { (api.clGetPlatformIDs)(0, std::ptr::null_mut(), &mut n) };
        if code != sys::SUCCESS && code != sys::PLATFORM_NOT_FOUND_KHR {
            return Err(unavailable(
                api,
                vec![],
                format!("clGetPlatformIDs returned {}", sys::code_name(code)),
            ));
        }
        if code == sys::PLATFORM_NOT_FOUND_KHR || n == 0 {
            return Err(unavailable(
                api,
                vec![],
                "the library is present, but no driver is registered with it".into(),
            ));
        }
        let mut platforms: Vec<Handle> = vec![std::ptr::null_mut(); n as usize];
        // SAFETY: `platforms` has room for `n` entries.
        let code = unsafe { (api.clGetPlatformIDs)(n, platforms.as_mut_ptr(), &mut n) };
        if code != sys::SUCCESS {
            return Err(unavailable(
                api,
                vec![],
                format!("clGetPlatformIDs returned {}", sys::code_name(code)),
            ));
        }
        platforms.truncate(n as usize);
        let mut out = vec![];
        let mut said = vec![];
        for platform in platforms {
            let mut n = 0u32;
            // SAFETY: `platform` comes from the library. The list is null and has no entries, so the call
            // writes only the count, to `n`.
            let code = unsafe {
                (api.clGetDeviceIDs)(platform, sys::DEVICE_TYPE_ALL, 0, std::ptr::null_mut(), &mut n)
            };
            let mut devices: Vec<Handle> = vec![std::ptr::null_mut(); n as usize];
            let code = match code {
                sys::SUCCESS if n > 0 => {
                    // SAFETY: `devices` has room for `n` entries.
                    unsafe {
                        (api.clGetDeviceIDs)(platform, sys::DEVICE_TYPE_ALL, n, devices.as_mut_ptr(), &mut n)
                    }
                }
                sys::SUCCESS => sys::DEVICE_NOT_FOUND,
                c => c,
            };
            if code != sys::SUCCESS {
                said.push(format!(
                    "platform {}: {}",
                    platform_text(api, platform, sys::PLATFORM_NAME),
                    sys::code_name(code)
                ));
                continue;
            }
            devices.truncate(n as usize);
            for device in devices {
                let a = Adapter { api, platform, device, backend: BackendType::OpenCl, index: out.len() };
                let off = [
                    (sys::DEVICE_AVAILABLE, "it is not available"),
                    (sys::DEVICE_COMPILER_AVAILABLE, "it has no compiler"),
                ];
                match off.iter().find(|(p, _)| a.bool(*p) == Some(false)) {
                    Some((_, why)) => {
                        said.push(format!("{}: {why}", a.string(sys::DEVICE_NAME).unwrap_or_default()))
                    }
                    None => out.push(a),
                }
            }
        }
        if out.is_empty() {
            Err(unavailable(api, said, "no platform has a usable device".into()))
        } else {
            Ok(out)
        }
    }

    pub(super) fn id(&self) -> String {
        format!("{}:{}", self.backend, self.index)
    }

    fn bytes(&self, param: u32) -> Option<Vec<u8>> {
        // SAFETY: the device comes from the library, and `query_bytes` passes a buffer of `n` bytes.
        query_bytes(|n, p, r| unsafe { (self.api.clGetDeviceInfo)(self.device, param, n, p, r) }).ok()
    }

    fn string(&self, param: u32) -> Option<String> {
        self.bytes(param).map(text).filter(|s| !s.is_empty())
    }

    /// The version of an extension, as `cl_version`; `None` if the device does not list the extension, or
    /// reports no versions.
    pub(super) fn extension_version(&self, extension: &str) -> Option<u32> {
        let all = self.bytes(sys::DEVICE_EXTENSIONS_WITH_VERSION)?;
        all.chunks_exact(sys::NAME_VERSION).find_map(|one| {
            let (version, name) = one.split_at(4);
            let name = name.split(|c| *c == 0).next()?;
            (name == extension.as_bytes()).then(|| version.try_into().ok().map(u32::from_ne_bytes))?
        })
    }

    /// Whether the device lists an extension.
    pub(super) fn has_extension(&self, extension: &str) -> bool {
        self.string(sys::DEVICE_EXTENSIONS).is_some_and(|e| e.split_whitespace().any(|x| x == extension))
    }

    /// An integer property of 4 or 8 bytes.
    pub(super) fn number(&self, param: u32) -> Option<u64> {
        let b = self.bytes(param)?;
        match b.len() {
            4 => Some(u32::from_ne_bytes(b.try_into().ok()?) as u64),
            n if n >= 8 => Some(u64::from_ne_bytes(b[..8].try_into().ok()?)),
            _ => None,
        }
    }

    fn bool(&self, param: u32) -> Option<bool> {
        self.number(param).map(|n| n != 0)
    }

    /// Free device memory in bytes: the host's free memory for devices that share it, otherwise the value of
    /// AMD's attribute. OpenCL itself has no such query.
    pub(super) fn free_memory(&self) -> Option<u64> {
        let total = self.number(sys::DEVICE_GLOBAL_MEM_SIZE);
        if self.is_cpu() || self.bool(sys::DEVICE_HOST_UNIFIED_MEMORY) == Some(true) {
            return crate::host_memory(total);
        }
        let amd = self.string(sys::DEVICE_EXTENSIONS).is_some_and(|e| e.contains(sys::AMD_ATTRIBUTES));
        // The attribute has two numbers, in KiB: the free memory and the largest free block.
        let free = amd.then(|| self.number(sys::DEVICE_GLOBAL_FREE_MEMORY_AMD)).flatten()?;
        Some((free << 10).min(total.unwrap_or(u64::MAX)))
    }

    /// The properties that the driver reports.
    pub(super) fn info(&self) -> DeviceInfo {
        let extensions = self.string(sys::DEVICE_EXTENSIONS).unwrap_or_default();
        let has = |e: &str| extensions.split_whitespace().any(|x| x == e);
        let kind = self.number(sys::DEVICE_TYPE).unwrap_or(0);
        let kinds = [
            (sys::DEVICE_TYPE_CPU, "CPU"),
            (sys::DEVICE_TYPE_GPU, "GPU"),
            (sys::DEVICE_TYPE_ACCELERATOR, "accelerator"),
        ];
        let kind_names: Vec<&str> = kinds.iter().filter(|k| kind & k.0 != 0).map(|k| k.1).collect();
        let texts = [
            ("type", Some(kind_names.join(", "))),
            ("platform", Some(platform_text(self.api, self.platform, sys::PLATFORM_NAME))),
            ("platform_version", Some(platform_text(self.api, self.platform, sys::PLATFORM_VERSION))),
            ("version", self.string(sys::DEVICE_VERSION)),
            ("opencl_c_version", self.string(sys::DEVICE_OPENCL_C_VERSION)),
            ("profile", self.string(sys::DEVICE_PROFILE)),
            ("max_clock_mhz", self.number(sys::DEVICE_MAX_CLOCK_FREQUENCY).map(|n| n.to_string())),
            ("max_allocation_bytes", self.number(sys::DEVICE_MAX_MEM_ALLOC_SIZE).map(|n| n.to_string())),
            ("library", Some(self.api.library.clone())),
            ("extensions", Some(extensions.clone())),
        ];
        let nv = has("cl_nv_device_attribute_query");
        let compute_capability = || {
            let major = self.number(sys::DEVICE_COMPUTE_CAPABILITY_MAJOR_NV)?;
            let minor = self.number(sys::DEVICE_COMPUTE_CAPABILITY_MINOR_NV)?;
            Some(format!("{major}.{minor}"))
        };
        DeviceInfo {
            backend: self.backend,
            id: self.id(),
            index: self.index,
            name: self.string(sys::DEVICE_NAME).unwrap_or_else(|| "unnamed OpenCL device".into()),
            vendor: self.string(sys::DEVICE_VENDOR).unwrap_or_default(),
            driver_version: self.string(sys::DRIVER_VERSION),
            total_memory: self.number(sys::DEVICE_GLOBAL_MEM_SIZE),
            free_memory: self.free_memory(),
            compute_capability: if nv { compute_capability() } else { None },
            compute_units: self.number(sys::DEVICE_MAX_COMPUTE_UNITS).map(|n| n as u32),
            unified_memory: self.bool(sys::DEVICE_HOST_UNIFIED_MEMORY).unwrap_or(false),
            software: kind & sys::DEVICE_TYPE_CPU != 0,
            properties: texts
                .into_iter()
                .filter_map(|(k, v)| v.filter(|v| !v.is_empty()).map(|v| (k.to_string(), v)))
                .collect(),
        }
    }

    /// Compiler options. None of them relaxes arithmetic. Division and square root are correctly rounded, as
    /// in IEEE 754, if the device supports this.
    pub(super) fn build_options(&self) -> &'static str {
        let config = self.number(sys::DEVICE_SINGLE_FP_CONFIG).unwrap_or(0);
        if config & sys::FP_CORRECTLY_ROUNDED_DIVIDE_SQRT != 0 {
            "-cl-std=CL1.2 -cl-fp32-correctly-rounded-divide-sqrt"
        } else {
            "-cl-std=CL1.2"
        }
    }

    /// Alignment of sub-buffers in bytes: at least that of the largest vector type.
    pub(super) fn alignment(&self) -> usize {
        self.number(sys::DEVICE_MEM_BASE_ADDR_ALIGN).map_or(128, |bits| (bits / 8).clamp(1, 1 << 20) as usize)
    }

    /// Whether the device is a processor.
    pub(super) fn is_cpu(&self) -> bool {
        self.number(sys::DEVICE_TYPE).unwrap_or(0) & sys::DEVICE_TYPE_CPU != 0
    }

    /// Limits and features; a value that the driver does not report is set to the minimum of OpenCL 1.2.
    pub(super) fn caps(&self) -> Caps {
        let u32_of = |p: u32, least: u64| self.number(p).unwrap_or(least).min(u32::MAX as u64) as u32;
        let full = self.string(sys::DEVICE_PROFILE).is_none_or(|p| p == "FULL_PROFILE");
        let extensions = self.string(sys::DEVICE_EXTENSIONS).unwrap_or_default();
        let i64 = full || extensions.split_whitespace().any(|e| e == "cles_khr_int64");
        let f64 = self.number(sys::DEVICE_DOUBLE_FP_CONFIG).unwrap_or(0) != 0;
        // The size of all arguments together. Half of it is reserved for scalars.
        let arguments = u32_of(sys::DEVICE_MAX_PARAMETER_SIZE, 1024);
        Caps {
            storage: Caps::storage_of(f64, i64),
            f64,
            i64,
            f16_arithmetic: extensions.split_whitespace().any(|e| e == "cl_khr_fp16"),
            // OpenCL has no such types.
            f8_products: Some(false),
            // Sub-groups are an extension whose width is known only per kernel.
            subgroup: None,
            max_workgroup: u32_of(sys::DEVICE_MAX_WORK_GROUP_SIZE, 1),
            workgroup_memory: u32_of(sys::DEVICE_LOCAL_MEM_SIZE, 32 << 10),
            max_bindings: arguments / 2 / size_of::<Handle>() as u32,
            max_argument_bytes: arguments,
            max_binding_bytes: self.number(sys::DEVICE_MAX_MEM_ALLOC_SIZE).unwrap_or(128 << 20),
            // OpenCL has no limit on the number of workgroups, but workgroup indices are i32 in kernels. This
            // is the smallest limit that the conformance suite permits.
            max_groups: 65_535,
            offset_alignment: 1,
            compute_units: self.number(sys::DEVICE_MAX_COMPUTE_UNITS).map(|n| n as u32),
            is_cpu: self.is_cpu(),
            matrix: vec![],
        }
    }
}

fn platform_text(api: &Api, platform: Handle, param: u32) -> String {
    // SAFETY: the platform comes from the library, and `query_bytes` passes a buffer of `n` bytes.
    query_bytes(|n, p, r| unsafe { (api.clGetPlatformInfo)(platform, param, n, p, r) })
        .map(text)
        .unwrap_or_default()
}
