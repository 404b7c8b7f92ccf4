//! The devices of the machine.

use crate::HALCYON_UNKNOWN;
use crate::guard::{Failure, HalcyonStatus, c_text, guard, value};
use crate::pointer::{Out, free, get};
use halcyon::DeviceInfo;
use halcyon::hal::{probe, select};
use std::ffi::{CString, c_char};
use std::path::Path;
use std::ptr::null;
use std::sync::Mutex;

/// The devices that were found, and the backends without a device.
#[derive(Debug)]
pub struct HalcyonDevices {
    all: Vec<HalcyonDevice>,
    json: CString,
}

/// A device of a `HalcyonDevices`.
#[derive(Debug)]
pub struct HalcyonDevice {
    id: CString,
    name: CString,
    vendor: CString,
    backend: CString,
    total: u64,
    free: u64,
    software: bool,
}

impl HalcyonDevice {
    fn of(d: &DeviceInfo) -> HalcyonDevice {
        HalcyonDevice {
            id: c_text(&d.id),
            name: c_text(&d.name),
            vendor: c_text(&d.vendor),
            backend: c_text(d.backend.id()),
            total: d.total_memory.unwrap_or(HALCYON_UNKNOWN),
            free: d.free_memory.unwrap_or(HALCYON_UNKNOWN),
            software: d.software,
        }
    }
}

/// Sets the program that probes drivers.
///
/// # Errors
/// The program was set to another path before, or there is no such file.
pub(crate) fn set_probe_program(path: &str) -> Result<(), String> {
    static PATH: Mutex<Option<String>> = Mutex::new(None);
    let mut known = PATH.lock().unwrap_or_else(|e| e.into_inner());
    match &*known {
        Some(p) if p == path => return Ok(()),
        Some(p) => return Err(format!("the program that probes drivers is \"{p}\" already")),
        None => {}
    }
    if !Path::new(path).is_file() {
        return Err(format!("`path`: there is no file \"{path}\"; give the path of the command halcyon"));
    }
    probe::set_executable(path.into());
    *known = Some(path.into());
    Ok(())
}

/// Looks for the devices of this machine. It may load drivers, which can take some tenths of a second. The
/// caller frees `*out` with `halcyon_devices_free`.
///
/// # Safety
/// `out` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_devices_find(out: *mut *mut HalcyonDevices) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees memory for a pointer.
        let out = unsafe { Out::handle(out) }?;
        let found = select::discover();
        let json = serde_json::to_string(&found);
        let json = json.map_err(|e| Failure { status: HalcyonStatus::Internal, text: e.to_string() })?;
        let all = found.iter().flat_map(|r| &r.devices).map(HalcyonDevice::of).collect();
        out.give(HalcyonDevices { all, json: c_text(&json) });
        Ok(())
    })
}

/// Frees a list of devices and its devices. NULL is allowed.
///
/// # Safety
/// `devices` is NULL or a list that was not freed yet, and nothing uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_devices_free(devices: *mut HalcyonDevices) {
    // SAFETY: the caller guarantees that this is the last use of the handle.
    unsafe { free(devices) }
}

/// The number of devices; 0 if `devices` is NULL.
///
/// # Safety
/// `devices` is NULL or a list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_devices_count(devices: *const HalcyonDevices) -> usize {
    // SAFETY: the caller guarantees a list or NULL.
    value(0, || Ok(unsafe { get(devices, "devices") }?.all.len()))
}

/// The device at an index. It belongs to the list and is valid as long as the list. NULL if `devices` is NULL
/// or `index` is not less than the number of devices.
///
/// # Safety
/// `devices` is NULL or a list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_devices_get(
    devices: *const HalcyonDevices,
    index: usize,
) -> *const HalcyonDevice {
    value(null(), || {
        // SAFETY: the caller guarantees a list or NULL.
        let all = &unsafe { get(devices, "devices") }?.all;
        let device = all.get(index);
        let none = || Failure::argument(format!("`index` is {index}, and there are {} devices", all.len()));
        Ok(device.ok_or_else(none)? as *const HalcyonDevice)
    })
}

/// All backends as a JSON array: the output of `halcyon devices --json`. A backend without a device has the
/// reason, what was tried, and what to do about it. The string belongs to the list. NULL if `devices` is
/// NULL.
///
/// # Safety
/// `devices` is NULL or a list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_devices_json(devices: *const HalcyonDevices) -> *const c_char {
    // SAFETY: the caller guarantees a list or NULL.
    value(null(), || Ok(unsafe { get(devices, "devices") }?.json.as_ptr()))
}

/// The name that opens the device, such as `cuda:0` (`halcyon_backend_open`). The string belongs to the list
/// of devices. NULL if `device` is NULL.
///
/// # Safety
/// `device` is NULL or a device of a list that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_device_id(device: *const HalcyonDevice) -> *const c_char {
    // SAFETY: the caller guarantees a device or NULL.
    value(null(), || Ok(unsafe { get(device, "device") }?.id.as_ptr()))
}

/// The name of the hardware, as its driver reports it. The string belongs to the list of devices. NULL if
/// `device` is NULL.
///
/// # Safety
/// `device` is NULL or a device of a list that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_device_name(device: *const HalcyonDevice) -> *const c_char {
    // SAFETY: the caller guarantees a device or NULL.
    value(null(), || Ok(unsafe { get(device, "device") }?.name.as_ptr()))
}

/// The vendor of the hardware; empty if the driver does not report it. The string belongs to the list of
/// devices. NULL if `device` is NULL.
///
/// # Safety
/// `device` is NULL or a device of a list that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_device_vendor(device: *const HalcyonDevice) -> *const c_char {
    // SAFETY: the caller guarantees a device or NULL.
    value(null(), || Ok(unsafe { get(device, "device") }?.vendor.as_ptr()))
}

/// The kind of the device, which is the name of its backend: `cpu`, `cuda`, `rocm`, `opencl`, `webgpu`. The
/// string belongs to the list of devices. NULL if `device` is NULL.
///
/// # Safety
/// `device` is NULL or a device of a list that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_device_backend(device: *const HalcyonDevice) -> *const c_char {
    // SAFETY: the caller guarantees a device or NULL.
    value(null(), || Ok(unsafe { get(device, "device") }?.backend.as_ptr()))
}

/// The memory of the device in bytes; `HALCYON_UNKNOWN` if the driver does not report it, or if `device` is
/// NULL.
///
/// # Safety
/// `device` is NULL or a device of a list that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_device_total_memory(device: *const HalcyonDevice) -> u64 {
    // SAFETY: the caller guarantees a device or NULL.
    value(HALCYON_UNKNOWN, || Ok(unsafe { get(device, "device") }?.total))
}

/// The memory in bytes that was free when the device was found; `HALCYON_UNKNOWN` if the driver does not
/// report it, or if `device` is NULL.
///
/// # Safety
/// `device` is NULL or a device of a list that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_device_free_memory(device: *const HalcyonDevice) -> u64 {
    // SAFETY: the caller guarantees a device or NULL.
    value(HALCYON_UNKNOWN, || Ok(unsafe { get(device, "device") }?.free))
}

/// Whether the device is software that runs on the CPU (PoCL, lavapipe). `auto` tries such devices last.
/// False if `device` is NULL.
///
/// # Safety
/// `device` is NULL or a device of a list that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_device_is_software(device: *const HalcyonDevice) -> bool {
    // SAFETY: the caller guarantees a device or NULL.
    value(false, || Ok(unsafe { get(device, "device") }?.software))
}
