//! Buffers and where the pool gets them.

use super::sys;
use crate::Buffer;
use crate::pool::{Block, Source};
use std::any::Any;
use std::fmt;

/// The pool's source: buffers of one device.
#[derive(Debug)]
pub struct WgSource {
    pub device: wgpu::Device,
    /// Most bytes of one buffer: a kernel binds it whole.
    pub max: u64,
}

impl Source for WgSource {
    type Raw = wgpu::Buffer;

    fn allocate(&self, bytes: usize) -> Result<wgpu::Buffer, String> {
        if bytes as u64 > self.max {
            return Err(format!("the device allows {} bytes in one buffer", self.max));
        }
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        buffer(&self.device, bytes as u64, usage).map_err(|e| sys::text(&e))
    }
}

/// A buffer of its own, outside the pool. `bytes` is a multiple of 4.
pub fn buffer(
    device: &wgpu::Device,
    bytes: u64,
    usage: wgpu::BufferUsages,
) -> Result<wgpu::Buffer, wgpu::Error> {
    let d = wgpu::BufferDescriptor { label: None, size: bytes, usage, mapped_at_creation: false };
    sys::scoped(device, || device.create_buffer(&d))
}

/// Device memory on loan from the pool.
pub struct WgBuffer {
    pub block: Block<WgSource>,
    /// Number of the device that it belongs to.
    pub owner: u64,
}

impl Buffer for WgBuffer {
    fn bytes(&self) -> usize {
        self.block.bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for WgBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.block.fmt(f)
    }
}
