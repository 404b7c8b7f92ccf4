//! `Runtime`: an open device, with everything that plans share on it.

use crate::constants::{Constants, PackedCache};
use crate::faults::{FaultTable, Unreported};
use crate::lru::Lru;
use crate::queue::Queues;
use crate::stats::Stats;
use crate::sync::lock;
use halcyon_hal::{BufferRef, Device, Program};
use halcyon_ir::ConstData;
use halcyon_ir::error::Result;
use halcyon_ir::kernel::Kernel;
use halcyon_ir::plan::Plan;
use std::sync::{Arc, Mutex};

/// Maximum number of programs that a runtime caches.
const PROGRAM_CACHE: usize = 1024;

/// An open device with its programs, constants, queues, faults and counters. Executables share the runtime.
/// It does not depend on tensors or on the settings of a [`crate::Backend`].
#[derive(Debug)]
pub(crate) struct Runtime {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) queues: Queues,
    pub(crate) faults: FaultTable,
    pub(crate) unreported: Unreported,
    pub(crate) stats: Stats,
    programs: Mutex<Lru<u128, Arc<dyn Program>>>,
    constants: Constants,
}

impl Runtime {
    /// A runtime of a device. `packed` is the disk cache of packed constants, if they are cached.
    pub(crate) fn new(device: Arc<dyn Device>, packed: Option<PackedCache>) -> Runtime {
        Runtime {
            device,
            queues: Queues::default(),
            faults: FaultTable::default(),
            unreported: Unreported::default(),
            stats: Stats::default(),
            programs: Mutex::new(Lru::new(PROGRAM_CACHE)),
            constants: Constants::new(packed),
        }
    }

    /// The program of a kernel, compiled at its first use.
    pub(crate) fn program(&self, k: &Kernel) -> Result<Arc<dyn Program>> {
        let key = k.key();
        if let Some(p) = lock(&self.programs).get(&key) {
            return Ok(p);
        }
        let p = self.device.compile(k)?;
        lock(&self.programs).put(key, p.clone());
        Ok(p)
    }

    /// Number of cached programs.
    pub(crate) fn programs(&self) -> usize {
        lock(&self.programs).len()
    }

    pub(crate) fn forget_programs(&self) {
        lock(&self.programs).clear();
    }

    /// The device buffer of a constant, shared by its users.
    pub(crate) fn constant(&self, c: &ConstData) -> Result<BufferRef> {
        self.constants.plain(&*self.device, c)
    }

    /// The device buffers of a plan's packed constants, shared with other plans.
    pub(crate) fn packed(&self, plan: &Plan) -> Result<Vec<BufferRef>> {
        self.constants.packed(&*self.device, plan, &self.stats)
    }
}
