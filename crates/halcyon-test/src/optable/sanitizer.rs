//! A device without library kernels: everything runs as kernel IR on the interpreter, which checks every
//! access.

use halcyon::hal::{
    Accounts, BackendType, Buffer, BufferRef, Caps, Command, Counters, Declined, Device, DeviceInfo,
    LibraryCall, LibraryKernel, MemoryStats, Program, Tag, Target, select::Selection,
};
use halcyon::ir::kernel::interp::{Interp, Memory, Options};
use halcyon::ir::kernel::{BufId, Kernel, Launch};
use halcyon::{Backend, Error, Level, Result, Scalar};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Content of a fresh buffer: not a plausible number in any dtype.
const GARBAGE: u8 = 0xA7;

#[derive(Debug)]
struct HostBuffer {
    data: Mutex<Vec<u8>>,
    bytes: usize,
    /// Whether the buffer was written since its allocation.
    written: AtomicBool,
}

impl Buffer for HostBuffer {
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn host(b: &BufferRef) -> Result<&HostBuffer> {
    b.as_any().downcast_ref().ok_or_else(|| Error::internal("a buffer of another device"))
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

#[derive(Debug)]
struct Checked {
    kernel: Kernel,
    interp: Interp,
    faults: bool,
}

impl Program for Checked {
    fn name(&self) -> &str {
        &self.kernel.name
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Buffers of a launch; two bindings may refer to one buffer.
struct Bound {
    store: Vec<Vec<u8>>,
    which: Vec<usize>,
}

impl Memory for Bound {
    fn len(&self, buf: usize) -> usize {
        self.store[self.which[buf]].len()
    }
    fn load(&self, buf: usize, at: usize, bytes: usize) -> u64 {
        let mut w = [0; 8];
        w[..bytes].copy_from_slice(&self.store[self.which[buf]][at..at + bytes]);
        u64::from_le_bytes(w)
    }
    fn store(&mut self, buf: usize, at: usize, bytes: usize, value: u64) {
        self.store[self.which[buf]][at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
    }
}

/// The sanitizer device.
#[derive(Debug)]
pub struct Sanitizer {
    info: DeviceInfo,
    caps: Caps,
    subgroup: u32,
    seed: AtomicU64,
    fault: AtomicU32,
    launches: AtomicU64,
    reports: Mutex<Vec<String>>,
    /// Every kernel that was compiled, by program key.
    kernels: Mutex<BTreeMap<u128, Kernel>>,
}

impl Sanitizer {
    fn new(subgroup: u32, is_cpu: bool, seed: u64) -> Sanitizer {
        Sanitizer {
            info: DeviceInfo {
                backend: BackendType::Noop,
                id: format!("sanitizer:{subgroup}"),
                index: 0,
                name: "interpreter".into(),
                vendor: String::new(),
                driver_version: None,
                total_memory: None,
                free_memory: None,
                compute_capability: None,
                compute_units: None,
                unified_memory: true,
                software: true,
                properties: Default::default(),
            },
            caps: Caps { subgroup: Some(subgroup), is_cpu, ..Caps::generous() },
            subgroup,
            seed: AtomicU64::new(seed),
            fault: AtomicU32::new(0),
            launches: AtomicU64::new(0),
            reports: Mutex::default(),
            kernels: Mutex::default(),
        }
    }

    /// Number of kernels run so far.
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }

    /// Every kernel that was compiled, each once.
    pub fn kernels(&self) -> Vec<Kernel> {
        lock(&self.kernels).values().cloned().collect()
    }

    /// Takes the interpreter's reports about the launches so far.
    pub fn take_reports(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.reports))
    }

    fn launch(
        &self,
        p: &Checked,
        groups: [u32; 3],
        buffers: &[BufferRef],
        params: &[Scalar],
        fault: u32,
    ) -> Result<()> {
        let hosts: Vec<&HostBuffer> = buffers.iter().map(host).collect::<Result<_>>()?;
        let mut distinct: Vec<&HostBuffer> = vec![];
        let mut which = vec![];
        for h in &hosts {
            let at = distinct.iter().position(|d| std::ptr::eq(*d, *h));
            which.push(at.unwrap_or(distinct.len()));
            if at.is_none() {
                distinct.push(h);
            }
        }
        let twice = (0..hosts.len()).any(|i| {
            p.kernel.buffers[i].write && hosts.iter().filter(|h| std::ptr::eq(**h, hosts[i])).count() > 1
        });
        if twice && p.kernel.noalias {
            lock(&self.reports)
                .push(format!("{} requires distinct buffers, but one is bound twice", p.kernel.name));
        }
        let poisoned = (0..hosts.len())
            .filter(|i| !hosts[*i].written.load(Ordering::Relaxed))
            .map(|i| BufId(i as u32))
            .collect();
        let mut m = Bound { store: distinct.iter().map(|d| lock(&d.data).clone()).collect(), which };
        let mut params = params.to_vec();
        if p.faults {
            m.which.push(m.store.len());
            m.store.push(vec![0; 4]);
            if let Some(k) = p.kernel.params.iter().position(|q| q.name == "fault") {
                params[k] = Scalar::U(fault as u64);
            }
        }
        let o = Options {
            subgroup: self.subgroup,
            seed: Some(self.seed.fetch_add(0x9E37_79B9, Ordering::Relaxed)),
            sanitize: true,
            poisoned,
            max_reports: 4,
        };
        let out = p.interp.run(&Launch { groups, params }, &mut m, &o)?;
        self.launches.fetch_add(1, Ordering::Relaxed);
        if out.faults > 0 {
            let mut r = lock(&self.reports);
            for report in &out.reports {
                r.push(format!(
                    "{} in groups {groups:?}, subgroups of {}: {report}",
                    p.kernel.name, self.subgroup
                ));
            }
        }
        if p.faults
            && let Some(word) = m.store.pop()
        {
            let id = word.iter().rev().fold(0u32, |a, b| a << 8 | *b as u32);
            if id != 0 {
                let _ = self.fault.compare_exchange(0, id, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
        for (d, v) in distinct.iter().zip(m.store) {
            *lock(&d.data) = v;
        }
        for (h, decl) in hosts.iter().zip(&p.kernel.buffers) {
            if decl.write {
                h.written.store(true, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

impl Target for Sanitizer {
    fn caps(&self) -> &Caps {
        &self.caps
    }
    fn library(&self, _: &LibraryCall<'_>) -> Result<Arc<dyn LibraryKernel>, Declined> {
        Err(Declined::because("the sanitizer has no library kernels"))
    }
}

/// The sanitizer has no pool: every buffer is an allocation.
impl Accounts for Sanitizer {
    fn stats(&self) -> MemoryStats {
        MemoryStats::default()
    }
    fn footprint(&self, bytes: usize, _: Tag) -> usize {
        bytes
    }
    fn trim(&self) -> u64 {
        0
    }
}

impl Device for Sanitizer {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn counters(&self) -> Counters {
        Counters { launches: self.launches.load(Ordering::Relaxed), ..Counters::default() }
    }
    fn pool(&self) -> &dyn Accounts {
        self
    }
    fn alloc(&self, bytes: usize, _: Tag) -> Result<BufferRef> {
        Ok(Arc::new(HostBuffer {
            data: Mutex::new(vec![GARBAGE; bytes]),
            bytes,
            written: AtomicBool::new(false),
        }))
    }
    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()> {
        let h = host(dst)?;
        h.written.store(true, Ordering::Relaxed);
        lock(&h.data)[offset..offset + src.len()].copy_from_slice(src);
        Ok(())
    }
    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()> {
        dst.copy_from_slice(&lock(&host(src)?.data)[offset..offset + dst.len()]);
        Ok(())
    }
    fn compile(&self, kernel: &Kernel) -> Result<Arc<dyn Program>> {
        lock(&self.kernels).entry(kernel.key()).or_insert_with(|| kernel.clone());
        let faults = kernel.params.iter().any(|p| p.name == "fault");
        Ok(Arc::new(Checked { interp: Interp::new(kernel)?, kernel: kernel.clone(), faults }))
    }
    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        for c in commands {
            match c {
                Command::Launch { program, groups, buffers, params, fault } => {
                    let p: &Checked = program
                        .as_any()
                        .downcast_ref()
                        .ok_or_else(|| Error::internal("a program of another device"))?;
                    self.launch(p, *groups, buffers, params, *fault)?;
                }
                Command::Copy { src, src_offset, dst, dst_offset, bytes } => {
                    let mut b = vec![0; *bytes];
                    self.read(src, *src_offset, &mut b)?;
                    self.write(dst, *dst_offset, &b)?;
                }
                Command::Library { .. } => {
                    return Err(Error::internal("the sanitizer has no library kernels"));
                }
            }
        }
        Ok(())
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn take_fault(&self) -> Result<Option<u32>> {
        Ok(Some(self.fault.swap(0, Ordering::Relaxed)).filter(|f| *f != 0))
    }
    fn as_target(&self) -> &dyn Target {
        self
    }
}

/// A backend whose device is a sanitizer, and this device.
pub fn backend(subgroup: u32, is_cpu: bool, seed: u64, level: Level) -> (Backend, Arc<Sanitizer>) {
    let s = Arc::new(Sanitizer::new(subgroup, is_cpu, seed));
    let selection = Selection::given(s.info().clone());
    (Backend::from_device(s.clone(), selection, level), s)
}
