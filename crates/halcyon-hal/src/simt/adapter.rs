//! The devices that CUDA's or HIP's driver library reports, and their properties.

use super::sys::{self, Api, Code, Context};
use crate::{Caps, DeviceInfo, Error, Result};
use std::ffi::{c_char, c_int};

/// One device of a driver library.
#[derive(Clone, Copy, Debug)]
pub struct Adapter {
    pub(super) api: &'static Api,
    /// The driver library's number of the device.
    pub(super) device: c_int,
    pub index: usize,
}

impl Adapter {
    /// Every device of the driver library.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there is none, with the error code if a call failed.
    pub fn all(api: &'static Api) -> Result<Vec<Adapter>> {
        let family = api.family;
        let none = |reason: String| Error::Unavailable {
            backend: family.kind.id().into(),
            tried: vec![api.library.clone()],
            reason,
            fix: family.fix.into(),
        };
        // SAFETY: `init` may be called any number of times; no flags are defined.
        let code = unsafe { (api.f.init)(0) };
        let mut n = 0;
        let (call, code) = match code {
            // SAFETY: the driver library writes one number, to `n`.
            sys::SUCCESS => ("counting the devices", unsafe { (api.f.device_count)(&mut n) }),
            c => ("initialising", c),
        };
        if sys::NONE.contains(&code) || (code == sys::SUCCESS && n == 0) {
            return Err(Error::Unavailable {
                backend: family.kind.id().into(),
                tried: vec![api.library.clone()],
                reason: "the library is present, but finds no device".into(),
                fix: family.no_device.into(),
            });
        }
        if code != sys::SUCCESS {
            return Err(none(format!("{call} failed: {}", sys::code_name(family, code))));
        }
        let mut all = vec![];
        for index in 0..n {
            let mut device = 0;
            // SAFETY: the driver library writes one number, to `device`. `index` is below the number of
            // devices.
            let code = unsafe { (api.f.device)(&mut device, index) };
            if code != sys::SUCCESS {
                return Err(none(format!("getting device {index} failed: {}", sys::code_name(family, code))));
            }
            all.push(Adapter { api, device, index: index as usize });
        }
        Ok(all)
    }

    pub fn id(&self) -> String {
        format!("{}:{}", self.api.family.kind, self.index)
    }

    /// A numeric attribute of the device; `None` if the driver library does not report it.
    pub fn number(&self, attribute: c_int) -> Option<i32> {
        let mut v = 0;
        // SAFETY: the driver library writes one number, to `v`. It returned the number `self.device` itself.
        let code = unsafe { (self.api.f.device_attribute)(&mut v, attribute, self.device) };
        (code == sys::SUCCESS).then_some(v)
    }

    fn positive(&self, attribute: c_int) -> Option<u32> {
        self.number(attribute).and_then(|v| u32::try_from(v).ok()).filter(|v| *v > 0)
    }

    fn text(&self, f: unsafe extern "system" fn(*mut c_char, c_int, c_int) -> Code) -> Option<String> {
        let mut text = [0u8; 256];
        // SAFETY: `f` writes at most `text.len()` bytes to `text`. The driver library returned the number
        // `self.device` itself.
        let code = unsafe { f(text.as_mut_ptr().cast(), text.len() as c_int, self.device) };
        let end = text.iter().position(|c| *c == 0).unwrap_or(text.len());
        let text = String::from_utf8_lossy(&text[..end]).trim().to_string();
        (code == sys::SUCCESS && !text.is_empty()).then_some(text)
    }

    /// The PCI address, such as `0000:65:00.0`.
    pub fn bus(&self) -> Option<String> {
        self.text(self.api.f.device_bus)
    }

    /// Whether kernels of two streams can run concurrently.
    pub fn concurrent(&self) -> bool {
        self.positive(self.api.family.attributes.concurrent).is_some()
    }

    /// Major and minor compute capability.
    pub fn capability(&self) -> Option<(u32, u32)> {
        let a = self.api.family.attributes;
        let minor = self.number(a.minor).and_then(|v| u32::try_from(v).ok())?;
        Some((self.positive(a.major)?, minor))
    }

    pub fn architecture(&self) -> Option<String> {
        (self.api.family.architecture)(self)
    }

    /// Version of the driver's API, such as `12.4`.
    fn driver_version(&self) -> Option<String> {
        let mut v = 0;
        // SAFETY: the driver library writes one number, to `v`.
        let code = unsafe { (self.api.f.driver_version)(&mut v) };
        if code != sys::SUCCESS || v <= 0 {
            return None;
        }
        Some(match self.api.family.side {
            sys::Side::Cuda => format!("{}.{}", v / 1000, v % 1000 / 10),
            sys::Side::Hip => format!("{}.{}.{}", v / 10_000_000, v / 100_000 % 100, v % 100_000),
        })
    }

    /// Free memory of a device that is not open: the result of `Context::free_memory` in a new context. The
    /// context is created on a separate thread, so that the current device of the calling thread does not
    /// change.
    pub fn free_memory(&self) -> Option<u64> {
        let unified = self.positive(self.api.family.attributes.integrated).is_some();
        let ask = || Context::new(self.api, self.device, self.id()).ok()?.free_memory(unified);
        std::thread::scope(|s| s.spawn(ask).join().ok().flatten())
    }

    /// The properties that the driver reports, without free memory, which needs a context
    /// ([`Adapter::free_memory`]).
    pub fn info(&self) -> DeviceInfo {
        let (family, a) = (self.api.family, self.api.family.attributes);
        let mut total = 0usize;
        // SAFETY: the driver library writes one number, to `total`. It returned the number `self.device`
        // itself.
        let code = unsafe { (self.api.f.device_memory)(&mut total, self.device) };
        let number = |attribute| self.positive(attribute).map(|n| n.to_string());
        let texts = [
            ("architecture", self.architecture()),
            ("pci_bus_id", self.bus()),
            ("subgroup", number(a.subgroup)),
            ("clock_khz", number(a.clock_khz)),
            ("memory_clock_khz", number(a.memory_clock_khz)),
            ("memory_bus_bits", number(a.memory_bits)),
            ("l2_bytes", number(a.l2_bytes)),
            ("library", Some(self.api.library.clone())),
        ];
        DeviceInfo {
            backend: family.kind,
            id: self.id(),
            index: self.index,
            name: self
                .text(self.api.f.device_name)
                .unwrap_or_else(|| format!("unnamed {} device", family.title)),
            vendor: family.vendor.into(),
            driver_version: self.driver_version(),
            total_memory: (code == sys::SUCCESS && total > 0).then_some(total as u64),
            free_memory: None,
            compute_capability: self.capability().map(|(major, minor)| format!("{major}.{minor}")),
            compute_units: self.positive(a.compute_units),
            unified_memory: self.positive(a.integrated).is_some(),
            software: false,
            properties: texts.into_iter().filter_map(|(k, v)| Some((k.to_string(), v?))).collect(),
        }
    }

    /// Limits and features. A limit that the driver does not report is set to a value that every device of
    /// the family supports.
    pub fn caps(&self) -> Caps {
        let a = self.api.family.attributes;
        let halves = (self.api.family.halves)(self.capability(), self.architecture().as_deref());
        Caps {
            storage: Caps::storage_of(true, true),
            // Every device of both families supports these.
            f64: true,
            i64: true,
            f16_arithmetic: halves.f16,
            f8_products: halves.f8,
            subgroup: self.positive(a.subgroup).filter(|n| [32, 64].contains(n)),
            max_workgroup: self.positive(a.max_workgroup).unwrap_or(256),
            workgroup_memory: self.positive(a.workgroup_memory).unwrap_or(32 << 10),
            // The arguments of a kernel share 4 KiB. Half of it is for pointers of 8 bytes, half for scalars.
            max_bindings: 2048 / 8,
            // A captured launch takes one more argument.
            max_argument_bytes: 4096 - 8,
            max_binding_bytes: u64::MAX,
            // The limit of the second and third dimension. The limit of the first is higher.
            max_groups: 65_535,
            offset_alignment: 1,
            compute_units: self.positive(a.compute_units),
            is_cpu: false,
            matrix: (self.api.family.matrix)(self.architecture().as_deref()),
        }
    }
}
