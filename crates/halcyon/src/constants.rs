//! Constants of plans on the device. Plans share them: a constant is uploaded or packed once.

#[cfg(not(target_arch = "wasm32"))]
mod disk;

use crate::fit::offsets;
use crate::stats::Stats;
use crate::sync::lock;
#[cfg(not(target_arch = "wasm32"))]
pub(crate) use disk::PackedCache;
use halcyon_hal::{Buffer, BufferRef, Device, Tag};
use halcyon_ir::ConstData;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::plan::{PackedConst, Plan};
use halcyon_ir::target::Packing;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

/// Caches no packed constants on disk, for a machine without a disk.
#[cfg(target_arch = "wasm32")]
#[derive(Debug)]
pub(crate) enum PackedCache {}

/// The identity of a constant's bytes on the host.
type HostKey = (usize, usize);
/// A buffer on the device, and the constant that it was made of. The buffer lives as long as a plan uses it.
/// The constant keeps the host's bytes alive, so no other constant can get their address while the entry
/// exists.
type Shared = (Weak<dyn Buffer>, ConstData);

/// The constants on one device.
#[derive(Debug, Default)]
pub(crate) struct Constants {
    plain: Mutex<HashMap<HostKey, Shared>>,
    packed: Mutex<HashMap<(HostKey, Packing), Shared>>,
    /// The disk cache of packed constants; `None` if they are not cached.
    disk: Option<PackedCache>,
}

impl Constants {
    pub(crate) fn new(disk: Option<PackedCache>) -> Constants {
        Constants { disk, ..Constants::default() }
    }

    /// The device buffer of a constant: imported without a copy if the device can, else uploaded.
    pub(crate) fn plain(&self, d: &dyn Device, c: &ConstData) -> Result<BufferRef> {
        let mut m = lock(&self.plain);
        if let Some((w, _)) = m.get(&c.key())
            && let Some(b) = w.upgrade()
        {
            return Ok(b);
        }
        let b = match d.import(c.owner()) {
            Some(b) => b,
            None => {
                let b = d.alloc(c.bytes().len(), Tag::Weights)?;
                d.write(&b, 0, c.bytes())?;
                b
            }
        };
        m.retain(|_, (w, _)| w.strong_count() > 0);
        m.insert(c.key(), (Arc::downgrade(&b), c.clone()));
        Ok(b)
    }

    /// Device buffers of a plan's packed constants. The constants that are not on the device yet are placed
    /// in one allocation if the device supports parts of buffers.
    pub(crate) fn packed(&self, d: &dyn Device, plan: &Plan, stats: &Stats) -> Result<Vec<BufferRef>> {
        let mut m = lock(&self.packed);
        let mut buffers = vec![None; plan.packed.len()];
        let mut new = vec![];
        for (i, p) in plan.packed.iter().enumerate() {
            let packing =
                p.kernel.packing().ok_or_else(|| Error::internal("a packed constant without a packing"))?;
            let key = (p.data.key(), packing.clone());
            match m.get(&key).and_then(|(w, _)| w.upgrade()) {
                Some(b) => buffers[i] = Some(b),
                None => new.push((i, p, key)),
            }
        }
        if !new.is_empty() {
            let sizes: Vec<usize> = new.iter().map(|(_, _, key)| key.1.bytes).collect();
            let constants: Vec<&PackedConst> = new.iter().map(|(_, p, _)| *p).collect();
            let made = self.pack(d, &constants, &sizes, stats)?;
            m.retain(|_, (w, _)| w.strong_count() > 0);
            for ((i, p, key), b) in new.into_iter().zip(made) {
                m.insert(key, (Arc::downgrade(&b), p.data.clone()));
                buffers[i] = Some(b);
            }
        }
        buffers.into_iter().map(|b| b.ok_or_else(|| Error::internal("a constant was not packed"))).collect()
    }

    fn pack(
        &self,
        d: &dyn Device,
        constants: &[&PackedConst],
        sizes: &[usize],
        stats: &Stats,
    ) -> Result<Vec<BufferRef>> {
        let fill = |to: &[BufferRef]| {
            let jobs: Vec<_> =
                constants.iter().zip(to).map(|(p, b)| (&*p.kernel, p.data.bytes(), b)).collect();
            d.pack_host(&jobs)
        };
        let Some(align) = d.as_target().part_alignment() else {
            let each: Vec<BufferRef> =
                sizes.iter().map(|n| d.alloc(*n, Tag::Weights)).collect::<Result<_>>()?;
            fill(&each)?;
            return Ok(each);
        };
        let (offsets, total) = offsets(sizes, align);
        let parts = |block: &BufferRef| -> Result<Vec<BufferRef>> {
            offsets.iter().zip(sizes).map(|(at, n)| d.part(block, *at, *n)).collect()
        };
        #[cfg(target_arch = "wasm32")]
        let _ = (stats, &self.disk);
        #[cfg(not(target_arch = "wasm32"))]
        let cached = self.disk.as_ref().map(|k| disk::Block::new(d, k, constants, total));
        #[cfg(not(target_arch = "wasm32"))]
        if let Some(block) = cached.as_ref().and_then(|k| k.load()) {
            stats.packed_loads.fetch_add(constants.len() as u64, std::sync::atomic::Ordering::Relaxed);
            return parts(&block);
        }
        let block = d.alloc(total, Tag::Weights)?;
        let made = parts(&block)?;
        #[cfg(not(target_arch = "wasm32"))]
        let start = std::time::Instant::now();
        fill(&made)?;
        #[cfg(not(target_arch = "wasm32"))]
        if let Some(k) = cached {
            k.save_if_slow(&block, start.elapsed())?;
        }
        Ok(made)
    }
}
