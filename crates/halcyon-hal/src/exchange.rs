//! Memory that is shared with code outside of Halcyon.

use crate::BackendType;
use std::any::Any;
use std::fmt;

/// Host memory of a buffer ([`crate::Device::export`]). It stays in place and allocated until this value is
/// dropped. Its contents may change while commands that write to the buffer run.
pub struct Exported {
    // An address, because the value is sent between threads, and only unsafe code of the caller reads it.
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) read_only: bool,
    pub(crate) _keep: Box<dyn Any + Send + Sync>,
}

impl Exported {
    /// The first byte. Nothing else about it is guaranteed for a buffer of 0 bytes.
    pub fn as_ptr(&self) -> *const u8 {
        std::ptr::with_exposed_provenance(self.address)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether the memory was imported, so that its owner forbids writes.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }
}

impl fmt::Debug for Exported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exported({} bytes)", self.bytes)
    }
}

/// Memory of a device by its address there, for exchange with other libraries that use the same device
/// ([`crate::Device::export_device`], [`crate::Device::import_device`]). It stays allocated and in place
/// until this value is dropped.
pub struct DeviceMemory {
    pub(crate) device: (BackendType, usize),
    pub(crate) address: u64,
    pub(crate) bytes: usize,
    pub(crate) read_only: bool,
    pub(crate) _keep: Box<dyn Any + Send + Sync>,
}

impl DeviceMemory {
    /// The `bytes` bytes at `address` of the device with this backend and index. `owner` keeps them.
    ///
    /// # Safety
    /// Until `owner` is dropped, they must be memory of this device that this process may access from every
    /// thread, and nothing may write them.
    pub unsafe fn new(
        device: (BackendType, usize),
        address: u64,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> DeviceMemory {
        DeviceMemory { device, address, bytes, read_only: true, _keep: owner }
    }

    /// The backend and the index of the device.
    pub fn device(&self) -> (BackendType, usize) {
        self.device
    }

    /// The address of the first byte on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether the memory was imported, so that its owner forbids writes.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (backend, index) = self.device;
        write!(f, "DeviceMemory({} bytes at {:#x} of {}:{index})", self.bytes, self.address, backend.id())
    }
}
