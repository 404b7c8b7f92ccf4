//! Buffers and the pool's source of device memory.

use super::sys;
use crate::Buffer;
use crate::commands::HasOwner;
use crate::pool::{Block, Source};
use std::any::Any;
use std::fmt;
use std::sync::RwLock;

/// The pool's source: buffers of one device.
#[derive(Debug)]
pub struct WgSource {
    pub device: wgpu::Device,
    /// Maximum bytes of one buffer of the pool. This is the size of the largest binding, because kernels bind
    /// these buffers whole.
    pub max: u64,
    /// Alignment of bindings in bytes.
    pub alignment: usize,
}

/// A wgpu buffer, or a range of one. All storage is bound read-write, so several disjoint ranges of one wgpu
/// buffer may be bound in one dispatch: WebGPU only forbids mixing read-only and read-write ranges.
#[derive(Clone, Debug, PartialEq)]
pub struct Slice {
    pub buffer: wgpu::Buffer,
    /// A multiple of the binding alignment.
    pub offset: u64,
    /// A multiple of 4.
    pub bytes: u64,
}

impl Slice {
    pub fn whole(buffer: &wgpu::Buffer) -> Slice {
        Slice { buffer: buffer.clone(), offset: 0, bytes: buffer.size() }
    }

    pub fn binding(&self) -> wgpu::BindingResource<'_> {
        wgpu::BindingResource::Buffer(wgpu::BufferBinding {
            buffer: &self.buffer,
            offset: self.offset,
            size: wgpu::BufferSize::new(self.bytes),
        })
    }
}

impl Source for WgSource {
    type Raw = wgpu::Buffer;
    type Place = RwLock<Slice>;

    fn allocate(&self, bytes: usize) -> Result<wgpu::Buffer, String> {
        if bytes as u64 > self.max {
            return Err(format!("the device allows {} bytes in one buffer", self.max));
        }
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        buffer(&self.device, bytes as u64, usage).map_err(|e| sys::text(&e))
    }

    fn place(&self, raw: &wgpu::Buffer, range: Option<(usize, usize)>) -> Result<Self::Place, String> {
        Ok(RwLock::new(match range {
            None => Slice::whole(raw),
            Some((offset, bytes)) => {
                Slice { buffer: raw.clone(), offset: offset as u64, bytes: bytes as u64 }
            }
        }))
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn most(&self) -> u64 {
        self.max
    }
}

/// Creates a wgpu buffer. `bytes` must be a multiple of 4.
pub fn buffer(
    device: &wgpu::Device,
    bytes: u64,
    usage: wgpu::BufferUsages,
) -> Result<wgpu::Buffer, wgpu::Error> {
    let d = wgpu::BufferDescriptor { label: None, size: bytes, usage, mapped_at_creation: false };
    sys::scoped(device, || device.create_buffer(&d))
}

/// Device memory borrowed from the pool.
pub struct WgBuffer {
    pub block: Block<WgSource>,
    /// Id of the device that the buffer belongs to.
    pub owner: u64,
}

impl WgBuffer {
    /// The current location. It cannot change while the queue's lock is held.
    pub fn slice(&self) -> Slice {
        self.block.place().read().unwrap_or_else(|e| e.into_inner()).clone()
    }
}

impl HasOwner for WgBuffer {
    fn owner(&self) -> u64 {
        self.owner
    }
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
