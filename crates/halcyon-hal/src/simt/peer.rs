//! Copies between two devices of one driver (two CUDA devices, or two ROCm devices), or between two openings
//! of one device.

use super::device::SimtDevice;
use super::sys::Peers;
use crate::commands::{Actions, DeviceInstance};
use crate::queues::Fenced;
use crate::{BufferRef, Command, Counts, Device, Error, Result, validate};
use std::sync::{Arc, Mutex};

/// Held during a copy. A copy locks the queues of both devices, so without this lock two copies in opposite
/// directions could deadlock.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

impl SimtDevice {
    /// The other opening and how memory is copied from it; `None` if both are openings of one device.
    fn peer<'a>(&self, from: &'a dyn Device) -> Result<(&'a SimtDevice, Option<Peers>)> {
        let (here, api) = (&self.shared.context, self.shared.context.api);
        let refused = |why: String, next: &str| {
            Err(Error::unsupported(format!("copies from {} to {}: {why}", from.info().id, here.id), next))
        };
        let next = "Copy through the host";
        let other = from.as_peer().and_then(|p| p.downcast_ref::<SimtDevice>());
        let Some(other) = other.filter(|o| std::ptr::eq(o.shared.context.api, api)) else {
            return refused("they belong to different drivers".into(), next);
        };
        if other.shared.context.device == here.device {
            return Ok((other, None));
        }
        let peers = match api.peers {
            Ok(p) => p,
            Err(f) => {
                return refused(format!("{} has no function {f}", api.library), "Update the GPU's driver");
            }
        };
        let mut known = self.shared.peers.lock().unwrap_or_else(|e| e.into_inner());
        let there = other.shared.context.device;
        let reaches = match known.get(&there) {
            Some(r) => *r,
            None => {
                let reaches = here.reaches(peers, &other.shared.context)?;
                if reaches {
                    here.enter()?;
                    here.reach(peers, &other.shared.context)?;
                }
                known.insert(there, reaches);
                reaches
            }
        };
        // Without direct access, CUDA and HIP would silently copy through the host, so the copy is refused.
        match reaches {
            true => Ok((other, Some(peers))),
            false => refused("one device cannot access the other's memory".into(), next),
        }
    }

    /// # Errors
    /// The errors of [`Device::can_copy_from`].
    pub(super) fn reaches(&self, from: &dyn Device) -> Result<()> {
        self.peer(from).map(drop)
    }

    /// # Errors
    /// The errors of [`Device::copy_from_peer`].
    pub(super) fn copy_peer(
        &self,
        from: &dyn Device,
        (src, src_offset): (&BufferRef, usize),
        (dst, dst_offset): (&BufferRef, usize),
        bytes: usize,
    ) -> Result<()> {
        let (other, peers) = self.peer(from)?;
        let (s, d) = (other.shared.buffer("copy", src)?, self.shared.writable("copy", dst)?);
        validate::range("copy", src.bytes(), src_offset, bytes)?;
        validate::range("copy", dst.bytes(), dst_offset, bytes)?;
        if Arc::ptr_eq(&self.shared, &other.shared) {
            return self.submit(&[Command::Copy { src, src_offset, dst, dst_offset, bytes }]);
        }
        if bytes == 0 {
            return Ok(());
        }
        let _one = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
        let there = &other.shared.context;
        let copy = |before| {
            let mut q = self.queue.begin()?;
            self.queue.wait_for_marks(&[Arc::new(before)])?;
            match peers {
                // SAFETY: `buffer` checked the owners, and the ranges were validated. The other device's
                // queue waits for the copy before it runs or moves anything.
                Some(p) => unsafe { q.copy_peer(p, (d, dst_offset), (there, s, src_offset), bytes) },
                // SAFETY: `buffer` checked the owners, and the ranges were validated. Both openings are of
                // one device, and their buffers are separate memory. The other opening's queue waits for the
                // copy before it runs or moves anything.
                None => unsafe { q.copy((s, src_offset), (d, dst_offset), bytes) },
            }
        };
        let both = || {
            // While this guard is held, nothing can be submitted to the other device's queue. All work that
            // is submitted to it later runs after the copy.
            let _still = other.queue.begin()?;
            let before = other.queue.mark()?;
            let copied = self.ordered_own(|| d.writing(), || copy(before));
            // The other device's queue waits until its memory has been read.
            there.enter()?;
            other.queue.wait_for_marks(&[copied?.0])
        };
        other.ordered_own(|| s.reading(), both)?;
        Counts::add(&self.shared.counts.peer_bytes, bytes as u64);
        Ok(())
    }
}
