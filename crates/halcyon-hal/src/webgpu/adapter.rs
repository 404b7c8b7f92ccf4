//! Adapters and their properties.

use super::{budget, probe, sys};
use crate::{BackendType, Caps, DeviceInfo, Error, Result};
use halcyon_ir::render::wgsl;
use std::sync::Mutex;

/// One adapter, with its index in its backend.
#[derive(Clone, Debug)]
pub struct Adapter {
    pub raw: wgpu::Adapter,
    pub kind: BackendType,
    pub index: usize,
}

/// Features that kernels and this driver use if the adapter has them. No other features are requested, so
/// that an adapter's limits do not depend on other features.
const FEATURES: wgpu::Features = wgpu::Features::SHADER_F16
    .union(wgpu::Features::SHADER_I16)
    .union(wgpu::Features::SHADER_F64)
    .union(wgpu::Features::SHADER_INT64)
    .union(wgpu::Features::PIPELINE_CACHE)
    .union(wgpu::Features::TIMESTAMP_QUERY)
    .union(wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS);

impl Adapter {
    /// Every adapter of a backend with compute shaders: discrete ones first, software adapters last.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there is none.
    pub fn all(kind: BackendType) -> Result<Vec<Adapter>> {
        // Drivers initialise at the first query, not all of them thread-safely. The result is kept, because a
        // repeated query is as slow as the first.
        static FOUND: Mutex<Vec<Adapter>> = Mutex::new(vec![]);
        if kind == BackendType::Metal && !cfg!(target_vendor = "apple") {
            return Err(unavailable(kind, "Metal exists on Apple's systems only", vec![]));
        }
        let mut known = FOUND.lock().unwrap_or_else(|e| e.into_inner());
        let before: Vec<Adapter> = known.iter().filter(|a| a.kind == kind).cloned().collect();
        if !before.is_empty() {
            return Ok(before);
        }
        if probe::VULKAN
            // SAFETY: `wgpu` loads the same library by the same name below, and keeps it.
            && let Err(why) = unsafe { probe::library(probe::LIBRARY) }
        {
            let tried = vec![format!("{}: {why}", probe::LIBRARY)];
            let reason = crate::loader::not_loaded("Vulkan library", &tried);
            return Err(unavailable(kind, &reason, tried));
        }
        let found = sys::ready(sys::instance(kind).enumerate_adapters(sys::backends(kind)));
        let mut tried = vec![];
        let mut all: Vec<wgpu::Adapter> = vec![];
        for a in found {
            let i = a.get_info();
            let able = a.get_downlevel_capabilities().flags.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS);
            if able {
                all.push(a);
            } else {
                tried.push(format!("{} ({:?}): no compute shaders", i.name, i.backend));
            }
        }
        all.sort_by_key(|a| {
            let i = a.get_info();
            let place = |order: &[wgpu::DeviceType]| order.iter().position(|t| *t == i.device_type);
            use wgpu::DeviceType::*;
            let system = [wgpu::Backend::Vulkan, wgpu::Backend::Metal, wgpu::Backend::Dx12];
            (
                place(&[DiscreteGpu, IntegratedGpu, VirtualGpu, Other, Cpu]),
                system.iter().position(|b| *b == i.backend),
            )
        });
        if all.is_empty() {
            tried.extend(probe::driver_reasons());
            let reason = match tried.is_empty() && probe::VULKAN {
                true => "the Vulkan library is present, but no driver is registered with it",
                false => "no adapter with compute shaders was found",
            };
            return Err(unavailable(kind, reason, tried));
        }
        let all: Vec<Adapter> =
            all.into_iter().enumerate().map(|(index, raw)| Adapter { raw, kind, index }).collect();
        known.extend(all.iter().cloned());
        Ok(all)
    }

    pub fn id(&self) -> String {
        format!("{}:{}", self.kind.id(), self.index)
    }

    pub fn features(&self) -> wgpu::Features {
        self.raw.features() & FEATURES
    }

    /// The properties that compiled pipelines depend on besides their source.
    pub fn identity(&self) -> String {
        let i = self.raw.get_info();
        let of = (i.backend, i.vendor, i.device, i.name, i.driver, i.driver_info, self.features());
        format!("{of:?}")
    }

    /// The optional features that rendered modules may use.
    pub fn options(&self) -> wgsl::Options {
        let f = self.features();
        wgsl::Options {
            f16: f.contains(wgpu::Features::SHADER_F16),
            int16: f.contains(wgpu::Features::SHADER_I16),
            fused: !self.is_cpu(),
            short_loops: self.is_cpu(),
            ..Default::default()
        }
    }

    fn is_cpu(&self) -> bool {
        self.raw.get_info().device_type == wgpu::DeviceType::Cpu
    }

    /// Free memory of the adapter in bytes: the host's free memory for adapters that share the host's memory,
    /// else the value of the API under WebGPU.
    pub fn free_memory(&self) -> Option<u64> {
        let info = self.raw.get_info();
        let unified = matches!(info.device_type, wgpu::DeviceType::Cpu | wgpu::DeviceType::IntegratedGpu);
        match unified {
            true => crate::host_memory(None),
            false => budget::of(&self.raw).free,
        }
    }

    /// The properties that `wgpu` reports, and the memory that the API under WebGPU reports.
    pub fn info(&self) -> DeviceInfo {
        let i = self.raw.get_info();
        let l = self.raw.limits();
        let software = self.is_cpu();
        let texts = [
            ("type", format!("{:?}", i.device_type)),
            ("interface", i.backend.to_str().to_string()),
            ("driver", i.driver.clone()),
            ("pci_bus", i.device_pci_bus_id.clone()),
            ("subgroup", format!("{}..{}", i.subgroup_min_size, i.subgroup_max_size)),
            ("max_binding_bytes", l.max_storage_buffer_binding_size.to_string()),
            ("max_buffer_bytes", l.max_buffer_size.to_string()),
            ("features", names(self.features())),
        ];
        let vendor = match i.vendor {
            0x10de => "NVIDIA".into(),
            0x1002 => "AMD".into(),
            0x8086 => "Intel".into(),
            0x106b => "Apple".into(),
            0x13b5 => "Arm".into(),
            0x5143 => "Qualcomm".into(),
            0x1_0005 => "Mesa".into(),
            0x1414 => "Microsoft".into(),
            n => format!("{n:#06x}"),
        };
        let total = match software {
            true => halcyon_host::memory().map(|m| m.1),
            false => budget::of(&self.raw).total,
        };
        DeviceInfo {
            backend: self.kind,
            id: self.id(),
            index: self.index,
            name: if i.name.is_empty() { "unnamed adapter".into() } else { i.name },
            vendor,
            driver_version: Some(i.driver_info).filter(|v| !v.is_empty()),
            total_memory: total,
            free_memory: self.free_memory().map(|f| f.min(total.unwrap_or(u64::MAX))),
            compute_capability: None,
            compute_units: None,
            unified_memory: software || i.device_type == wgpu::DeviceType::IntegratedGpu,
            software,
            properties: texts
                .into_iter()
                .filter(|(_, v)| !v.is_empty())
                .map(|(k, v)| (k.to_string(), v))
                .collect(),
        }
    }

    /// Limits and features. Subgroup operations are replaced by workgroup memory: WGSL guarantees neither a
    /// subgroup size nor that a subgroup is a contiguous range of local indices.
    pub fn caps(&self) -> Caps {
        let (l, f) = (self.raw.limits(), self.features());
        let i64 = f.contains(wgpu::Features::SHADER_INT64);
        // Decomposing f64 values uses 64-bit integers.
        let f64 = i64 && f.contains(wgpu::Features::SHADER_F64);
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        Caps {
            storage: Caps::storage_of(f64, i64),
            f64,
            i64,
            f16_arithmetic: f.contains(wgpu::Features::SHADER_F16),
            // WGSL has no 8-bit floats.
            f8_products: Some(false),
            subgroup: None,
            max_workgroup: l.max_compute_invocations_per_workgroup.min(l.max_compute_workgroup_size_x),
            workgroup_memory: l.max_compute_workgroup_storage_size,
            // On software adapters, one binding is reserved for the word that reports aborted loops.
            max_bindings: l.max_storage_buffers_per_shader_stage.saturating_sub(self.is_cpu() as u32),
            // A launch that runs several kernels chooses among pointers to buffers, which WGSL lacks.
            max_argument_bytes: 0,
            max_binding_bytes: l.max_storage_buffer_binding_size.min(l.max_buffer_size),
            max_groups: l.max_compute_workgroups_per_dimension,
            // Whole buffers are bound; offsets are arguments.
            offset_alignment: 1,
            // WebGPU does not report this number. A software adapter uses the machine's cores.
            compute_units: self.is_cpu().then(cores),
            is_cpu: self.is_cpu(),
            matrix: vec![],
        }
    }

    /// Opens the device with the features that kernels use and the adapter's maximum limits.
    pub fn request(&self) -> Result<(wgpu::Device, wgpu::Queue)> {
        let d = wgpu::DeviceDescriptor {
            label: Some("halcyon"),
            required_features: self.features(),
            required_limits: self.raw.limits(),
            experimental_features: wgpu::ExperimentalFeatures::disabled(),
            memory_hints: wgpu::MemoryHints::Performance,
            trace: wgpu::Trace::Off,
        };
        sys::ready(self.raw.request_device(&d))
            .map_err(|e| sys::driver_error(&self.id(), "requestDevice", sys::text(&e)))
    }
}

fn names(f: wgpu::Features) -> String {
    f.iter_names().map(|(n, _)| n.to_ascii_lowercase()).collect::<Vec<_>>().join(" ")
}

fn unavailable(kind: BackendType, reason: &str, tried: Vec<String>) -> Error {
    let fix = if kind == BackendType::Metal && !cfg!(target_vendor = "apple") {
        "Leave the backend out, or choose auto, to use a device of this machine"
    } else if probe::VULKAN {
        "Install your GPU's Vulkan driver (Debian: apt-get install libvulkan1 mesa-vulkan-drivers)"
    } else {
        "Install or update your GPU's driver"
    };
    Error::Unavailable { backend: kind.id().into(), tried, reason: reason.into(), fix: fix.into() }
}
