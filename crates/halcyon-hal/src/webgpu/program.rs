//! Programs: kernels that are rendered to WGSL and compiled to pipelines.

use super::sys;
use crate::cache::{self, DiskCache};
use crate::commands::{Compiled, HasOwner};
use crate::validate::Signature;
use crate::{Counts, Error, Program, Result};
use halcyon_ir::kernel::Kernel;
use halcyon_ir::render::wgsl;
use smallvec::SmallVec;
use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The binding index of each buffer of a launch. Buffers with the same memory share an index, because a
/// dispatch may bind a range of memory only once.
pub type Bindings = SmallVec<[usize; 16]>;

/// Unroll factor of loops that may be long, on devices that abort long loops.
const UNROLL: u32 = 8;

/// A pipeline for one pattern of bindings.
#[derive(Debug)]
pub struct Variant {
    pub pipeline: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
}

/// A compiled kernel with its signature.
#[derive(Debug)]
pub struct WgProgram {
    pub signature: Signature,
    /// Byte offset of each parameter in its struct, and the struct's size.
    pub params: (Vec<u32>, u32),
    kernel: Kernel,
    source: String,
    builder: Arc<Builder>,
    /// Pipelines by their bindings and by whether loops may be long. The pipeline with distinct bindings and
    /// short loops is compiled with the program, the others at their first use.
    variants: Mutex<HashMap<(Bindings, bool), Arc<Variant>>>,
    /// Id of the device that it belongs to.
    pub owner: u64,
}

impl HasOwner for WgProgram {
    fn owner(&self) -> u64 {
        self.owner
    }
}

impl Compiled for WgProgram {
    fn signature(&self) -> &Signature {
        &self.signature
    }
}

impl Program for WgProgram {
    fn name(&self) -> &str {
        &self.signature.name
    }

    fn source(&self) -> Option<&str> {
        Some(&self.source)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Builds programs of one device.
#[derive(Debug)]
pub struct Builder {
    pub device: wgpu::Device,
    pub id: String,
    pub options: wgsl::Options,
    /// The bind group layout of parameters, the same for all programs.
    pub params: wgpu::BindGroupLayout,
    pub counts: Arc<Counts>,
    pub kept: Option<PipelineCache>,
    /// Kernel names by the number that their aborted loops write.
    pub marks: Mutex<HashMap<u32, String>>,
}

/// Pipelines on disk, in the driver's format.
#[derive(Debug)]
pub struct PipelineCache {
    disk: DiskCache,
    /// Identifies the adapter and its driver.
    adapter: String,
    /// Size in bytes of a cache without pipelines. Caches of this size are not written to disk, because the
    /// driver stores nothing in them (llvmpipe).
    empty: usize,
}

impl PipelineCache {
    /// `None` if the device does not support pipeline caches (only Vulkan does).
    pub fn new(device: &wgpu::Device, disk: DiskCache, adapter: String) -> Option<PipelineCache> {
        // SAFETY: the condition of `pipeline_cache` concerns only the data, and no data is passed.
        let cache = unsafe { pipeline_cache(device, None) }?;
        Some(PipelineCache { disk, adapter, empty: cache.get_data()?.len() })
    }

    fn key(&self, source: &str) -> u128 {
        let version = env!("CARGO_PKG_VERSION");
        cache::digest(&[source.as_bytes(), self.adapter.as_bytes(), version.as_bytes()])
    }
}

/// A pipeline cache, empty or from stored data; `None` if the device does not accept it.
///
/// # Safety
/// `data` must come from `get_data` of a cache of the same adapter and driver.
unsafe fn pipeline_cache(device: &wgpu::Device, data: Option<&[u8]>) -> Option<wgpu::PipelineCache> {
    if !device.features().contains(wgpu::Features::PIPELINE_CACHE) {
        return None;
    }
    let d = wgpu::PipelineCacheDescriptor { label: None, data, fallback: false };
    // SAFETY: `pipeline_cache` requires that the data comes from a cache of the same adapter and driver.
    sys::scoped(device, || unsafe { device.create_pipeline_cache(&d) }).ok()
}

/// Maximum bytes of a kernel's parameters: a launch binds this much of the buffer of parameters.
pub const PARAM_BYTES: u32 = 4096;

impl Builder {
    /// Compiles a verified kernel.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a kernel that WGSL cannot express, or with more than [`PARAM_BYTES`] of
    /// parameters; [`Error::Compile`] with the compiler's log; [`Error::Driver`] if memory runs out.
    pub fn program(self: &Arc<Self>, kernel: &Kernel, owner: u64) -> Result<WgProgram> {
        let signature = Signature::of(kernel)?;
        let params = wgsl::param_layout(kernel.params.iter().map(|p| p.ty));
        if params.1 > PARAM_BYTES {
            return Err(Error::unsupported(
                format!(
                    "kernel {}: {} bytes of parameters, at most {PARAM_BYTES} are supported",
                    kernel.name, params.1
                ),
                "Use a graph with fewer arguments per op",
            ));
        }
        let plain: Bindings = (0..kernel.buffers.len()).collect();
        let (variant, source) = self.variant(kernel, &plain, false)?;
        Ok(WgProgram {
            signature,
            params,
            kernel: kernel.clone(),
            source,
            builder: self.clone(),
            variants: Mutex::new(HashMap::from([((plain, false), Arc::new(variant))])),
            owner,
        })
    }

    fn variant(&self, kernel: &Kernel, bindings: &Bindings, long: bool) -> Result<(Variant, String)> {
        let start = std::time::Instant::now();
        let unroll = if long { UNROLL } else { 1 };
        let mark = cache::digest(&[kernel.name.as_bytes()]) as u32 | 1;
        let options = wgsl::Options { bindings: bindings.to_vec(), unroll, mark, ..self.options.clone() };
        let source = wgsl::render(kernel, &options)?;
        let entry =
            source.entries.first().ok_or_else(|| Error::internal("a rendered kernel without an entry"))?;
        let many = bindings.iter().map(|b| b + 1).max().unwrap_or(0);
        let entries: Vec<wgpu::BindGroupLayoutEntry> = (0..many as u32).map(storage).collect();
        let d = &self.device;
        let key = self.kept.as_ref().map(|k| (k, k.key(&source.text)));
        let before = key.and_then(|(k, key)| {
            // SAFETY: the data comes from `get_data`: it was stored under a key of the adapter, the driver
            // and the program, with a digest that `get` checks.
            let cache = unsafe { pipeline_cache(d, Some(&k.disk.get(key)?)) };
            if cache.is_none() {
                tracing::warn!(
                    kernel = kernel.name,
                    "the driver refuses a cached pipeline; it is built again"
                );
                k.disk.remove(key);
            }
            cache
        });
        let hit = before.is_some();
        let cache = before.or_else(|| {
            // SAFETY: the condition of `pipeline_cache` concerns only the data, and no data is passed.
            key.and_then(|_| unsafe { pipeline_cache(d, None) })
        });
        let built = sys::scoped(d, || {
            let module = d.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(&kernel.name),
                source: wgpu::ShaderSource::Wgsl(source.text.as_str().into()),
            });
            let layout = d.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                label: None,
                entries: &entries,
            });
            let whole = d.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: None,
                bind_group_layouts: &[Some(&layout), Some(&self.params)],
                immediate_size: 0,
            });
            let pipeline = d.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(&kernel.name),
                layout: Some(&whole),
                module: &module,
                entry_point: Some(entry),
                compilation_options: wgpu::PipelineCompilationOptions {
                    // Kernels write workgroup memory before they read it; the interpreter checks this.
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: cache.as_ref(),
            });
            Variant { pipeline, layout }
        });
        let v = built.map_err(|e| match e {
            wgpu::Error::OutOfMemory { .. } => {
                sys::driver_error(&self.id, "createComputePipeline", sys::text(&e))
            }
            e => Error::Compile { device: self.id.clone(), kernel: kernel.name.clone(), log: sys::text(&e) },
        })?;
        if self.options.short_loops {
            let mut marks = self.marks.lock().unwrap_or_else(|e| e.into_inner());
            marks.entry(mark).or_insert_with(|| kernel.name.clone());
        }
        if hit {
            Counts::add(&self.counts.compile_cache_hits, 1);
            return Ok((v, source.text));
        }
        Counts::add(&self.counts.compiles, 1);
        if let Some((k, key)) = key
            && let Some(data) = cache.and_then(|c| c.get_data())
            && data.len() > k.empty
        {
            k.disk.put(key, &data);
        }
        tracing::debug!(kernel = kernel.name, device = self.id, elapsed = ?start.elapsed(), "compiled");
        Ok((v, source.text))
    }
}

impl WgProgram {
    /// The pipeline for a pattern of bindings, compiled on first use. `long` says whether a loop may exceed
    /// the device's iteration limit.
    pub fn bound(&self, bindings: &Bindings, long: bool) -> Result<Arc<Variant>> {
        let key = (bindings.clone(), long && self.builder.options.short_loops);
        let mut v = self.variants.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(v) = v.get(&key) {
            return Ok(v.clone());
        }
        let new = Arc::new(self.builder.variant(&self.kernel, bindings, key.1)?.0);
        v.insert(key, new.clone());
        Ok(new)
    }
}

/// The layout entry of a storage buffer. All buffers are bound read-write, even if the kernel only reads
/// them, because two kinds of use of one buffer in a dispatch would conflict.
pub fn storage(binding: u32) -> wgpu::BindGroupLayoutEntry {
    wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty: wgpu::BufferBindingType::Storage { read_only: false },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: None,
    }
}
