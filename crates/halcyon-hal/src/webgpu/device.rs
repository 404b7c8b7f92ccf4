//! An open WebGPU device.

use super::adapter::Adapter;
use super::memory::{WgBuffer, WgSource};
use super::program::{Builder, Kept, PARAM_BYTES, WgProgram, storage};
use super::queue::Queue;
use super::sys;
use crate::cache::{self, DiskCache};
use crate::pool::Pool;
use crate::validate;
use crate::{
    BufferRef, Caps, Command, Counters, Counts, Declined, Device, DeviceInfo, Error, LibraryCall,
    LibraryKernel, MemoryStats, Options, Program, Result, Tag, Target, Timing,
};
use halcyon_ir::kernel::{Kernel, verify_for};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Programs kept in memory; beyond it those that nothing else holds are dropped.
const MANY_PROGRAMS: usize = 2048;

/// One device, queue and pool.
#[derive(Debug)]
pub struct WebGpuDevice {
    info: DeviceInfo,
    caps: Caps,
    counts: Arc<Counts>,
    queue: Queue,
    pool: Arc<Pool<WgSource>>,
    builder: Arc<Builder>,
    programs: Mutex<HashMap<u128, Arc<WgProgram>>>,
    /// Tells its buffers and programs from those of other devices.
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
        let source = WgSource { device: device.clone(), max: caps.max_binding_bytes };
        let limit = options.memory_limit.or(info.total_memory);
        let pool = Pool::new(source, info.id.clone(), limit, counts.clone());
        let dir = options.cache_dir.clone().or_else(cache::user_dir).map(|d| d.join("webgpu"));
        let builder = Arc::new(Builder {
            device: device.clone(),
            id: info.id.clone(),
            options: modules,
            params,
            counts: counts.clone(),
            kept: dir.and_then(|d| {
                Kept::new(&device, DiskCache::new(d, cache::DEFAULT_LIMIT), adapter.identity())
            }),
            marks: Mutex::default(),
        });
        let queue = Queue::new(device, raw, stray, builder.clone(), pool.clone(), options.profile)?;
        Ok(WebGpuDevice {
            info,
            caps,
            counts,
            queue,
            pool,
            builder,
            programs: Mutex::default(),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
        })
    }

    fn buffer<'a>(&self, call: &str, b: &'a BufferRef) -> Result<&'a WgBuffer> {
        b.as_any().downcast_ref::<WgBuffer>().filter(|b| b.owner == self.number).ok_or_else(|| {
            Error::argument(call, format!("{b:?} does not belong to this opening of {}", self.info.id))
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

    fn memory(&self) -> MemoryStats {
        self.pool.stats()
    }

    fn available(&self) -> Option<u64> {
        let m = self.memory();
        match self.info.unified_memory {
            true => crate::pool::left_on_host(&m),
            false => m.limit.map(|l| l.saturating_sub(m.allocated)),
        }
    }

    fn alloc(&self, bytes: usize, tag: Tag) -> Result<BufferRef> {
        let most = self.caps.max_binding_bytes;
        if bytes as u64 > most && self.available().is_none_or(|free| bytes as u64 <= free) {
            // A kernel binds a buffer whole: there is memory, and freeing more would not help.
            return Err(Error::unsupported(
                format!(
                    "{bytes} bytes in one buffer ({tag:?}) on {}, which binds at most {most}",
                    self.info.id
                ),
                "Use a smaller batch, or a backend that binds more: cpu and opencl have no such limit, `halcyon devices --json` \
                 tells each adapter's (max_binding_bytes)",
            ));
        }
        Ok(Arc::new(WgBuffer { block: self.pool.alloc(bytes, tag)?, owner: self.number }))
    }

    fn footprint(&self, bytes: usize, tag: Tag) -> usize {
        crate::pool::footprint(bytes, tag)
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()> {
        let b = self.buffer("write", dst)?;
        validate::range("write", dst.bytes(), offset, src.len())?;
        self.queue.write(b, offset, src)?;
        Counts::add(&self.counts.uploads, 1);
        Counts::add(&self.counts.uploaded_bytes, src.len() as u64);
        Ok(())
    }

    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()> {
        let b = self.buffer("read", src)?;
        validate::range("read", src.bytes(), offset, dst.len())?;
        self.queue.read(b, offset, dst)?;
        Counts::add(&self.counts.downloads, 1);
        Counts::add(&self.counts.downloaded_bytes, dst.len() as u64);
        Ok(())
    }

    fn compile(&self, kernel: &Kernel) -> Result<Arc<dyn Program>> {
        let key = kernel.key();
        // The lock is held while compiling, so that two threads do not build one kernel twice.
        let mut programs = self.programs.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(p) = programs.get(&key) {
            return Ok(p.clone());
        }
        verify_for(kernel, &self.caps)?;
        let program = Arc::new(self.builder.program(kernel, self.number)?);
        if programs.len() >= MANY_PROGRAMS {
            programs.retain(|_, p| Arc::strong_count(p) > 1);
        }
        programs.insert(key, program.clone());
        Ok(program)
    }

    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        self.queue.run(|s| {
            for c in commands {
                match c {
                    Command::Launch { program, groups, buffers, params, fault } => {
                        let p =
                            program.as_any().downcast_ref::<WgProgram>().filter(|p| p.owner == self.number);
                        let p = p.ok_or_else(|| {
                            let what = format!("{} was compiled for another device", program.name());
                            Error::argument("launch", what)
                        })?;
                        let arguments = p.signature.arguments(buffers.len(), params, *fault)?;
                        let own = |b| self.buffer("launch", b);
                        let buffers =
                            buffers.iter().map(own).collect::<Result<smallvec::SmallVec<[_; 16]>>>()?;
                        s.launch(p, *groups, &buffers, &arguments)?;
                        if !groups.contains(&0) {
                            Counts::add(&self.counts.launches, 1);
                        }
                    }
                    Command::Copy { src, src_offset, dst, dst_offset, bytes } => {
                        let (from, to) = (self.buffer("copy", src)?, self.buffer("copy", dst)?);
                        let same = std::ptr::eq(from, to);
                        validate::copy([src.bytes(), *src_offset], [dst.bytes(), *dst_offset], *bytes, same)?;
                        s.copy(from, *src_offset, to, *dst_offset, *bytes)?;
                        Counts::add(&self.counts.device_copies, (*bytes > 0) as u64);
                    }
                    Command::Library { kernel, .. } => {
                        return Err(Error::argument(
                            "submit",
                            format!("{} is another device's kernel", kernel.name()),
                        ));
                    }
                }
            }
            Ok(())
        })
    }

    fn synchronize(&self) -> Result<()> {
        self.queue.finish()
    }

    fn take_fault(&self) -> Result<Option<u32>> {
        self.queue.take_fault()
    }

    fn take_timings(&self) -> Result<Vec<Timing>> {
        self.queue.take_timings()
    }

    fn empty_cache(&self) -> u64 {
        self.pool.trim()
    }

    fn as_target(&self) -> &dyn Target {
        self
    }
}
