//! The device: runs commands immediately, one after another.

use crate::memory::{HostMemory, InterpreterBuffer, lock};
use crate::program::InterpreterProgram;
use halcyon_hal::host;
use halcyon_hal::pool::Pool;
use halcyon_hal::{
    Accounts, BufferRef, Caps, Command, Counters, Counts, Declined, Defragmented, Device, DeviceInfo, Error,
    LibraryCall, LibraryKernel, Options, Program, Result, Tag, Target, Timing, validate,
};
use halcyon_ir::kernel::Kernel;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// A device instance.
#[derive(Debug)]
pub struct Interpreter {
    info: DeviceInfo,
    caps: Caps,
    pool: Arc<Pool<HostMemory>>,
    counts: Arc<Counts>,
    profile: bool,
    queue: Mutex<Queue>,
    /// Identifies this device instance; buffers and programs of another instance are rejected.
    number: u64,
}

/// The state behind the queue lock. Holding the lock gives exclusive use of the device.
#[derive(Debug, Default)]
struct Queue {
    programs: HashMap<u128, Arc<InterpreterProgram>>,
    /// The first fault that was not reported yet, or 0.
    fault: u32,
    timings: Vec<Timing>,
}

impl Interpreter {
    /// # Errors
    /// Invalid settings of the memory pool.
    pub(crate) fn new(info: DeviceInfo, options: &Options) -> Result<Interpreter> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let counts = Arc::new(Counts::default());
        Ok(Interpreter {
            pool: Pool::new(HostMemory, info.id.clone(), options, info.total_memory, counts.clone())?,
            info,
            caps: Caps::generous(),
            counts,
            profile: options.profile,
            queue: Mutex::default(),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
        })
    }

    fn lock_queue(&self) -> MutexGuard<'_, Queue> {
        // A panic while the lock was held may leave a partially written buffer, but not an inconsistent
        // queue.
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn buffer<'a>(&self, call: &str, b: &'a BufferRef) -> Result<&'a InterpreterBuffer> {
        InterpreterBuffer::of(call, b, self.number)
    }

    fn run(&self, queue: &mut Queue, command: &Command<'_>) -> Result<()> {
        match command {
            Command::Launch { program, groups, buffers, params, fault } => {
                let p = program.as_any().downcast_ref::<InterpreterProgram>();
                let p = p.filter(|p| p.owner == self.number).ok_or_else(|| {
                    Error::argument("launch", format!("{} was compiled for another device", program.name()))
                })?;
                let own = buffers.iter().map(|b| self.buffer("launch", b)).collect::<Result<Vec<_>>>()?;
                let found = p.run(*groups, &own, params, *fault)?;
                if queue.fault == 0 {
                    queue.fault = found;
                }
                if !groups.contains(&0) {
                    Counts::add(&self.counts.launches, 1);
                }
                Ok(())
            }
            Command::Copy { src, src_offset, dst, dst_offset, bytes } => {
                let (from, to) = (self.buffer("copy", src)?, self.buffer("copy", dst)?);
                let same = std::ptr::eq(from, to);
                validate::copy([src.bytes(), *src_offset], [dst.bytes(), *dst_offset], *bytes, same)?;
                if *bytes == 0 {
                    return Ok(());
                }
                let (s, d) = (*src_offset..src_offset + bytes, *dst_offset..dst_offset + bytes);
                let data = from.with(|bytes| bytes[s].to_vec());
                to.with(|bytes| bytes[d].copy_from_slice(&data));
                Counts::add(&self.counts.device_copies, 1);
                Ok(())
            }
            Command::Library { kernel, .. } => Err(Error::argument(
                "submit",
                format!("{} is a library kernel of another device", kernel.name()),
            )),
        }
    }
}

impl Target for Interpreter {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn library(&self, _: &LibraryCall<'_>) -> std::result::Result<Arc<dyn LibraryKernel>, Declined> {
        Err(Declined::because("this device has no library kernels"))
    }
}

impl Device for Interpreter {
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
        host::memory().map(|(free, _)| free)
    }

    fn alloc(&self, bytes: usize, tag: Tag) -> Result<BufferRef> {
        let block = self.pool.alloc(bytes, tag, &|| self.defragment())?;
        Ok(Arc::new(InterpreterBuffer::new(block, self.number)))
    }

    fn defragment(&self) -> Result<Defragmented> {
        // No command runs while the lock is held, and each command looks up the locations of its buffers when
        // it runs.
        let _turn = self.lock_queue();
        self.pool.defragment(&mut |m| {
            let data = lock(m.from.0)[m.from.1..m.from.1 + m.bytes].to_vec();
            lock(m.to.0)[m.to.1..m.to.1 + m.bytes].copy_from_slice(&data);
            Ok(())
        })
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()> {
        let _turn = self.lock_queue();
        let b = self.buffer("write", dst)?;
        validate::range("write", dst.bytes(), offset, src.len())?;
        b.with(|bytes| bytes[offset..offset + src.len()].copy_from_slice(src));
        Counts::add(&self.counts.uploads, 1);
        Counts::add(&self.counts.uploaded_bytes, src.len() as u64);
        Ok(())
    }

    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()> {
        let _turn = self.lock_queue();
        let b = self.buffer("read", src)?;
        validate::range("read", src.bytes(), offset, dst.len())?;
        b.with(|bytes| dst.copy_from_slice(&bytes[offset..offset + dst.len()]));
        Counts::add(&self.counts.downloads, 1);
        Counts::add(&self.counts.downloaded_bytes, dst.len() as u64);
        Ok(())
    }

    fn compile(&self, kernel: &Kernel) -> Result<Arc<dyn Program>> {
        let mut queue = self.lock_queue();
        if let Some(p) = queue.programs.get(&kernel.key()) {
            return Ok(p.clone());
        }
        let p = Arc::new(InterpreterProgram::new(kernel, &self.caps, self.number)?);
        queue.programs.insert(kernel.key(), p.clone());
        Counts::add(&self.counts.compiles, 1);
        Ok(p)
    }

    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        let mut queue = self.lock_queue();
        for c in commands {
            let start = Instant::now();
            self.run(&mut queue, c)?;
            if self.profile {
                queue.timings.push(Timing { nanoseconds: start.elapsed().as_nanos() as u64 });
            }
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        drop(self.lock_queue());
        Ok(())
    }

    fn take_fault(&self) -> Result<Option<u32>> {
        let fault = std::mem::take(&mut self.lock_queue().fault);
        Ok(Some(fault).filter(|f| *f != 0))
    }

    fn take_timings(&self) -> Result<Vec<Timing>> {
        Ok(std::mem::take(&mut self.lock_queue().timings))
    }

    fn as_target(&self) -> &dyn Target {
        self
    }
}
