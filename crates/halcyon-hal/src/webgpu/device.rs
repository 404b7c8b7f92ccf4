//! An open WebGPU device.

use super::adapter::Adapter;
use super::memory::{WgBuffer, WgSource};
use super::program::{Builder, PARAM_BYTES, PipelineCache, WgProgram, storage};
use super::queue::Queue;
use super::stream::{Core, WgStream};
use super::sys;
use crate::cache::{self, DiskCache};
use crate::commands::DeviceInstance;
use crate::fork::Origin;
use crate::pool::Pool;
use crate::validate;
use crate::{
    Accounts, BufferRef, Caps, Command, Counters, Counts, Declined, Defragmented, Device, DeviceInfo, Error,
    LibraryCall, LibraryKernel, Options, Program, Result, Stream, StreamOptions, Tag, Target, Timing,
};
use halcyon_ir::kernel::{Kernel, verify_for};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Number of programs kept in memory. Once it is reached, programs that nothing else uses are dropped.
const MAX_PROGRAMS: usize = 2048;

/// An open device, its queue and its pool.
#[derive(Debug)]
pub struct WebGpuDevice {
    adapter: Adapter,
    info: DeviceInfo,
    caps: Caps,
    counts: Arc<Counts>,
    core: Arc<Core>,
    pool: Arc<Pool<WgSource>>,
    builder: Arc<Builder>,
    programs: Mutex<HashMap<u128, Arc<WgProgram>>>,
    /// The process that opened the device.
    origin: Origin,
    /// Identifies this opening of the device; buffers and programs of another opening are rejected.
    number: u64,
}

impl WebGpuDevice {
    pub fn open(adapter: &Adapter, options: &Options) -> Result<WebGpuDevice> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let (info, caps) = (adapter.info(), adapter.caps());
        let (device, raw) = adapter.request()?;
        let stray = sys::watch(&device);
        let counts = Arc::new(Counts::default());
        let uniform = wgpu::BindGroupLayoutEntry {
            binding: 0,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Uniform,
                has_dynamic_offset: true,
                min_binding_size: wgpu::BufferSize::new(PARAM_BYTES as u64),
            },
            count: None,
        };
        let modules = adapter.options();
        let mut entries = vec![uniform];
        if modules.short_loops {
            entries.push(storage(1));
        }
        let params = sys::scoped(&device, || {
            device
                .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries })
        })
        .map_err(|e| sys::driver_error(&info.id, "createBindGroupLayout", sys::text(&e)))?;
        let alignment = device.limits().min_storage_buffer_offset_alignment as usize;
        let source = WgSource { device: device.clone(), max: caps.max_binding_bytes, alignment };
        let pool = Pool::new(source, info.id.clone(), options, info.total_memory, counts.clone())?;
        let dir = options.cache_dir.clone().or_else(cache::user_dir).map(|d| d.join("webgpu"));
        let builder = Arc::new(Builder {
            device: device.clone(),
            id: info.id.clone(),
            options: modules,
            params,
            counts: counts.clone(),
            kept: dir.and_then(|d| {
                PipelineCache::new(&device, DiskCache::new(d, cache::DEFAULT_LIMIT), adapter.identity())
            }),
            marks: Mutex::default(),
        });
        let queue = Queue::new(device, raw, stray, builder.clone(), pool.clone(), options.profile)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let core = Arc::new(Core::new(queue, counts.clone(), info.id.clone(), number));
        let adapter = adapter.clone();
        Ok(WebGpuDevice {
            adapter,
            info,
            caps,
            counts,
            core,
            pool,
            builder,
            programs: Mutex::default(),
            origin: Origin::here(),
            number,
        })
    }
}

impl Target for WebGpuDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn library(&self, _: &LibraryCall<'_>) -> std::result::Result<Arc<dyn LibraryKernel>, Declined> {
        Err(Declined::because("WebGPU has no vendor library; kernels are generated"))
    }
}

impl Device for WebGpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn counters(&self) -> Counters {
        self.counts.snapshot()
    }

    fn pool(&self) -> &dyn Accounts {
        &*self.pool
    }

    fn free_memory(&self) -> Option<u64> {
        self.adapter.free_memory()
    }

    fn alloc(&self, bytes: usize, tag: Tag) -> Result<BufferRef> {
        self.origin.check(self.info.backend, &self.info.id)?;
        let most = self.caps.max_binding_bytes;
        if bytes as u64 > most && self.available().is_none_or(|free| bytes as u64 <= free) {
            // A kernel binds whole buffers, so one buffer cannot be larger than a binding. Freeing memory
            // would not help.
            return Err(Error::unsupported(
                format!(
                    "{bytes} bytes in one buffer ({tag:?}) on {}, which binds at most {most}",
                    self.info.id
                ),
                "Use a smaller batch, or a backend that binds more: cpu and opencl have no such limit; `halcyon devices --json` \
                 lists each adapter's limit (max_binding_bytes)",
            ));
        }
        let block = self.pool.alloc(bytes, tag, &|| self.defragment())?;
        Ok(Arc::new(WgBuffer { block, owner: self.number }))
    }

    fn defragment(&self) -> Result<Defragmented> {
        self.origin.check(self.info.backend, &self.info.id)?;
        self.core.queue.defragment()
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()> {
        self.origin.check(self.info.backend, &self.info.id)?;
        let b = self.core.buffer("write", dst)?;
        validate::range("write", dst.bytes(), offset, src.len())?;
        self.core.queue.write(b, offset, src)?;
        Counts::add(&self.counts.uploads, 1);
        Counts::add(&self.counts.uploaded_bytes, src.len() as u64);
        Ok(())
    }

    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()> {
        self.origin.check(self.info.backend, &self.info.id)?;
        let b = self.core.buffer("read", src)?;
        validate::range("read", src.bytes(), offset, dst.len())?;
        self.core.queue.read(b, offset, dst)?;
        Counts::add(&self.counts.downloads, 1);
        Counts::add(&self.counts.downloaded_bytes, dst.len() as u64);
        Ok(())
    }

    fn compile(&self, kernel: &Kernel) -> Result<Arc<dyn Program>> {
        self.origin.check(self.info.backend, &self.info.id)?;
        let key = kernel.key();
        // The lock is held while compiling, so that two threads do not build the same kernel.
        let mut programs = self.programs.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(p) = programs.get(&key) {
            return Ok(p.clone());
        }
        verify_for(kernel, &self.caps)?;
        let _driver = crate::driver_output::capture("webgpu");
        let program = Arc::new(self.builder.program(kernel, self.number)?);
        if programs.len() >= MAX_PROGRAMS {
            programs.retain(|_, p| Arc::strong_count(p) > 1);
        }
        programs.insert(key, program.clone());
        Ok(program)
    }

    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        self.origin.check(self.info.backend, &self.info.id)?;
        self.core.queue.run(|s| self.core.enqueue(s, commands))
    }

    /// All streams share the only queue of `wgpu`, so their commands run in the order in which they are
    /// submitted.
    fn create_stream(&self, _: &StreamOptions) -> Result<Arc<dyn Stream>> {
        self.origin.check(self.info.backend, &self.info.id)?;
        Ok(Arc::new(WgStream::new(&self.core)?))
    }

    fn synchronize(&self) -> Result<()> {
        self.origin.check(self.info.backend, &self.info.id)?;
        self.core.queue.finish()
    }

    fn take_fault(&self) -> Result<Option<u32>> {
        self.core.queue.take_fault()
    }

    fn take_timings(&self) -> Result<Vec<Timing>> {
        self.core.queue.take_timings()
    }

    fn as_target(&self) -> &dyn Target {
        self
    }
}
