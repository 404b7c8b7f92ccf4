//! The extension `cl_khr_command_buffer`: commands that are recorded once and enqueued by one call.
//!
//! The extension is provisional, so its versions differ in what this driver uses. From 0.9.5 on, copies take
//! a list of properties. Before 0.9.8, a buffer needs a flag to be enqueued while an earlier launch of it is
//! pending; from then on, an in-order queue is enough. Other versions than those known here are not used.

use super::adapter::Adapter;
use super::sys::{self, CommandBuffer, CommandQueue, Handle, Kernel, Memory, Owned};
use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};

/// The name of the extension.
const NAME: &str = "cl_khr_command_buffer";

/// Environment variable: `on` uses command buffers on every device that has them, `off` on none. If it is not
/// set, they are used on devices that are not processors: PoCL enqueues the commands of a command buffer one
/// by one, which gains nothing (docs/cuda-rocm.md has the times).
const VARIABLE: &str = "HALCYON_OPENCL_COMMAND_BUFFERS";

/// The first and the last version that this module knows.
const KNOWN: [(u32, u32, u32); 2] = [(0, 9, 0), (0, 9, 8)];

type Create = unsafe extern "system" fn(u32, *const Handle, *const u64, *mut i32) -> Handle;
type OfBuffer = unsafe extern "system" fn(Handle) -> i32;
type Enqueue = unsafe extern "system" fn(u32, *const Handle, Handle, u32, *const Handle, *mut Handle) -> i32;
type Launch = unsafe extern "system" fn(
    Handle,
    Handle,
    *const u64,
    Handle,
    u32,
    *const usize,
    *const usize,
    *const usize,
    u32,
    *const u32,
    *mut u32,
    *mut Handle,
) -> i32;
type Copy = unsafe extern "system" fn(
    Handle,
    Handle,
    Handle,
    Handle,
    usize,
    usize,
    usize,
    u32,
    *const u32,
    *mut u32,
    *mut Handle,
) -> i32;
type CopyWithProperties = unsafe extern "system" fn(
    Handle,
    Handle,
    *const u64,
    Handle,
    Handle,
    usize,
    usize,
    usize,
    u32,
    *const u32,
    *mut u32,
    *mut Handle,
) -> i32;

#[derive(Clone, Copy, Debug)]
enum CopyBuffer {
    Before0_9_5(Copy),
    Since0_9_5(CopyWithProperties),
}

/// The functions of the extension on one device.
#[derive(Debug)]
pub(super) struct CommandBuffers {
    create: Create,
    release: OfBuffer,
    finalize: OfBuffer,
    enqueue: Enqueue,
    launch: Launch,
    copy: CopyBuffer,
    /// The properties of a new command buffer.
    properties: &'static [u64],
}

/// A version as `cl_version`, in parts.
fn parts(version: u32) -> (u32, u32, u32) {
    (version >> 22, version >> 12 & 0x3FF, version & 0xFFF)
}

/// What a version of the extension needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rules {
    copies_take_properties: bool,
    /// Whether a buffer needs a flag to be enqueued while an earlier launch of it is pending.
    simultaneous_use_is_a_flag: bool,
}

impl Rules {
    /// The rules of a version, or why it is not used.
    fn of(version: Option<u32>) -> Result<Rules, String> {
        let Some(v) = version.map(parts) else {
            return Err(format!("the driver does not report the version of {NAME}"));
        };
        let text = |(a, b, c): (u32, u32, u32)| format!("{a}.{b}.{c}");
        if v < KNOWN[0] || v > KNOWN[1] {
            let [first, last] = KNOWN.map(text);
            return Err(format!("version {} of {NAME} is not one of {first} to {last}", text(v)));
        }
        Ok(Rules { copies_take_properties: v >= (0, 9, 5), simultaneous_use_is_a_flag: v < (0, 9, 8) })
    }
}

/// Whether command buffers are used, by the value of [`VARIABLE`] and the kind of the device; the error is
/// the reason why they are not.
fn wanted(set: Option<&str>, is_cpu: bool) -> Result<(), String> {
    match set.map(str::trim).filter(|s| !s.is_empty()) {
        Some("on") => Ok(()),
        Some("off") => Err(format!("{VARIABLE} is off")),
        Some(other) => Err(format!("{VARIABLE} is \"{other}\" and not on or off")),
        None if is_cpu => Err(format!(
            "drivers for processors launch the commands of {NAME} one by one; {VARIABLE}=on uses it anyway"
        )),
        None => Ok(()),
    }
}

/// A function of the extension.
///
/// # Safety
/// The extension must declare the function `name` with the type `F`, a function pointer.
unsafe fn function<F: std::marker::Copy>(a: &Adapter, name: &str) -> Result<F, String> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let named = CString::new(name).map_err(|e| e.to_string())?;
    // SAFETY: the platform comes from the library, and the name is NUL-terminated.
    let at = unsafe { (a.api.clGetExtensionFunctionAddressForPlatform)(a.platform, named.as_ptr()) };
    match at.is_null() {
        true => Err(format!("the driver has no function {name}")),
        // SAFETY: the address is not null, and `function` requires that it is one of a function of type `F`.
        false => Ok(unsafe { std::mem::transmute_copy(&at) }),
    }
}

impl CommandBuffers {
    /// Finds the functions of a device; the error is the reason why command buffers are not used.
    pub(super) fn of(a: &Adapter) -> Result<CommandBuffers, String> {
        if !a.has_extension(NAME) {
            return Err(format!("the driver has no {NAME}"));
        }
        wanted(std::env::var(VARIABLE).ok().as_deref(), a.is_cpu())?;
        let rules = Rules::of(a.extension_version(NAME))?;
        match a.number(sys::DEVICE_COMMAND_BUFFER_REQUIRED_QUEUE_PROPERTIES) {
            Some(0) => {}
            Some(p) => return Err(format!("{NAME} needs queues with the properties {p:#x}")),
            None => return Err(format!("the driver does not report which queues {NAME} needs")),
        }
        let abilities = a.number(sys::DEVICE_COMMAND_BUFFER_CAPABILITIES).unwrap_or(0);
        let properties: &[u64] = match rules.simultaneous_use_is_a_flag {
            true if abilities & sys::COMMAND_BUFFER_CAPABILITY_SIMULTANEOUS_USE == 0 => {
                return Err(format!("{NAME} launches no buffer again before its last launch has ended"));
            }
            true => &[sys::COMMAND_BUFFER_FLAGS, sys::COMMAND_BUFFER_SIMULTANEOUS_USE, 0],
            false => &[0],
        };
        // SAFETY: the extension declares these functions with these types, in the versions that `Rules`
        // knows.
        unsafe {
            Ok(CommandBuffers {
                create: function(a, "clCreateCommandBufferKHR")?,
                release: function(a, "clReleaseCommandBufferKHR")?,
                finalize: function(a, "clFinalizeCommandBufferKHR")?,
                enqueue: function(a, "clEnqueueCommandBufferKHR")?,
                launch: function(a, "clCommandNDRangeKernelKHR")?,
                copy: match rules.copies_take_properties {
                    true => CopyBuffer::Since0_9_5(function(a, "clCommandCopyBufferKHR")?),
                    false => CopyBuffer::Before0_9_5(function(a, "clCommandCopyBufferKHR")?),
                },
                properties,
            })
        }
    }

    /// Enqueues a command buffer in the queue that it was made for; returns the code.
    ///
    /// # Safety
    /// `buffer` must be a finished command buffer of this device. The objects that its commands use must live
    /// until they have run.
    pub(super) unsafe fn enqueue(&self, buffer: &Owned<CommandBuffer>) -> i32 {
        // SAFETY: `enqueue` requires a finished command buffer. Without a list of queues, the one that it was
        // made for is used; the command buffer keeps it alive.
        unsafe { (self.enqueue)(0, null(), buffer.raw(), 0, null(), null_mut()) }
    }
}

/// A failed call, and its code.
pub(super) type Failed = (&'static str, i32);

fn done(call: &'static str, code: i32) -> Result<(), Failed> {
    if code == sys::SUCCESS { Ok(()) } else { Err((call, code)) }
}

/// A command buffer that is being recorded. Each command waits for the one before it.
#[derive(Debug)]
pub(super) struct Recorder<'a> {
    f: &'a CommandBuffers,
    raw: Owned<CommandBuffer>,
    last: Option<u32>,
}

impl<'a> Recorder<'a> {
    /// A command buffer for launches in one queue.
    pub(super) fn new(f: &'a CommandBuffers, queue: &Owned<CommandQueue>) -> Result<Recorder<'a>, Failed> {
        let (queue, mut code) = (queue.raw(), 0);
        // SAFETY: the queue is live, and the properties end with 0.
        let raw = unsafe { (f.create)(1, &queue, f.properties.as_ptr(), &mut code) };
        // SAFETY: `create` returned this command buffer with one reference, which `release` releases.
        let raw = unsafe { Owned::new(raw, code, f.release) };
        Ok(Recorder { f, raw: raw.map_err(|c| ("clCreateCommandBufferKHR", c))?, last: None })
    }

    /// Records a command. `f` is given the number and the list of commands to wait for, and where to write
    /// the number of the new command.
    fn then(
        &mut self,
        call: &'static str,
        f: impl FnOnce(u32, *const u32, *mut u32) -> i32,
    ) -> Result<(), Failed> {
        let mut next = 0;
        let (n, before) = self.last.as_ref().map_or((0, null()), |l| (1, std::ptr::from_ref(l)));
        done(call, f(n, before, &mut next))?;
        self.last = Some(next);
        Ok(())
    }

    /// Records a launch.
    ///
    /// # Safety
    /// All arguments of the kernel must be set. The buffers among them must be large enough for its work, and
    /// live until the command buffer is released and its launches have run.
    pub(super) unsafe fn launch(
        &mut self,
        kernel: &Owned<Kernel>,
        global: &[usize; 3],
        local: &[usize; 3],
    ) -> Result<(), Failed> {
        let (f, raw) = (self.f.launch, self.raw.raw());
        self.then("clCommandNDRangeKernelKHR", |n, before, next| {
            let (global, local) = (global.as_ptr(), local.as_ptr());
            // SAFETY: the command buffer and the kernel are live, the sizes have three dimensions, and
            // `launch` requires that the arguments are set. `before` has `n` numbers of this buffer.
            unsafe {
                f(
                    raw,
                    null_mut(),
                    null(),
                    kernel.raw(),
                    3,
                    null(),
                    global,
                    local,
                    n,
                    before,
                    next,
                    null_mut(),
                )
            }
        })
    }

    /// Records a copy of `bytes` bytes between (object, offset) and (object, offset).
    ///
    /// # Safety
    /// Both ranges must lie in their objects and not overlap. The objects must live until the command buffer
    /// is released and its launches have run.
    pub(super) unsafe fn copy(
        &mut self,
        src: (&Owned<Memory>, usize),
        dst: (&Owned<Memory>, usize),
        bytes: usize,
    ) -> Result<(), Failed> {
        let (f, raw, (from, to)) = (self.f.copy, self.raw.raw(), (src.0.raw(), dst.0.raw()));
        self.then("clCommandCopyBufferKHR", |n, before, next| {
            // SAFETY: the command buffer and the objects are live, and `copy` requires ranges inside of them.
            // `before` has `n` numbers of this buffer.
            unsafe {
                match f {
                    CopyBuffer::Before0_9_5(f) => {
                        f(raw, null_mut(), from, to, src.1, dst.1, bytes, n, before, next, null_mut())
                    }
                    CopyBuffer::Since0_9_5(f) => {
                        f(raw, null_mut(), null(), from, to, src.1, dst.1, bytes, n, before, next, null_mut())
                    }
                }
            }
        })
    }

    /// Ends the recording.
    pub(super) fn end(self) -> Result<Owned<CommandBuffer>, Failed> {
        // SAFETY: the command buffer is live.
        done("clFinalizeCommandBufferKHR", unsafe { (self.f.finalize)(self.raw.raw()) })?;
        Ok(self.raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(a: u32, b: u32, c: u32) -> Option<u32> {
        Some(a << 22 | b << 12 | c)
    }

    #[test]
    fn processors_need_the_variable() {
        assert_eq!(wanted(None, false), Ok(()));
        assert!(wanted(None, true).unwrap_err().contains("=on uses it anyway"));
        assert_eq!((wanted(Some("on"), true), wanted(Some(" on "), false)), (Ok(()), Ok(())));
        assert!(wanted(Some("off"), false).unwrap_err().ends_with("is off"));
        assert!(wanted(Some("yes"), false).unwrap_err().contains("\"yes\" and not on or off"));
        assert_eq!(wanted(Some(""), false), Ok(()));
    }

    #[test]
    fn versions_that_are_not_known_are_not_used() {
        let rules = |copies_take_properties, simultaneous_use_is_a_flag| {
            Ok(Rules { copies_take_properties, simultaneous_use_is_a_flag })
        };
        assert_eq!(Rules::of(version(0, 9, 0)), rules(false, true));
        assert_eq!(Rules::of(version(0, 9, 4)), rules(false, true));
        assert_eq!(Rules::of(version(0, 9, 5)), rules(true, true));
        assert_eq!(Rules::of(version(0, 9, 7)), rules(true, true));
        assert_eq!(Rules::of(version(0, 9, 8)), rules(true, false));
        for v in [version(0, 9, 9), version(0, 8, 9), version(1, 0, 0)] {
            assert!(Rules::of(v).unwrap_err().contains("is not one of 0.9.0 to 0.9.8"), "{v:?}");
        }
        assert!(Rules::of(None).unwrap_err().contains("does not report the version"));
    }
}
