//! Builds programs from source text or from the driver's binaries, and creates their kernels.

use super::adapter::{self, Adapter};
use super::sys::{self, Api, Context, Handle, Kernel, Owned, Program as Object};
use crate::commands::{Compiled, HasOwner};
use crate::validate::Signature;
use crate::{Error, Program, Result};
use halcyon_ir::kernel::Kernel as Ir;
use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Arc, Mutex};

/// A compiled kernel with its signature.
#[derive(Debug)]
// An associated type of a public trait cannot be less public.
#[allow(unreachable_pub)]
pub struct ClProgram {
    pub signature: Signature,
    pub workgroup: [u32; 3],
    /// The arguments of its kernel object are set under the lock of the only queue or, with streams, of all
    /// queues.
    pub(super) entry: Arc<Entry>,
    pub source: String,
    pub(super) ir: Ir,
    /// The entry points that read these parameters from an argument buffer, for captures.
    pub(super) indirect: Mutex<Vec<(Vec<usize>, Arc<Entry>)>>,
    /// Id of the device that it belongs to.
    pub owner: u64,
}

/// An entry point of a built program.
#[derive(Debug)]
pub(super) struct Entry {
    program: Owned<Object>,
    name: CString,
    pub kernel: Owned<Kernel>,
}

impl Entry {
    /// Another kernel object of the entry point, with its own arguments.
    pub(super) fn instance(&self, api: &Api, id: &str) -> Result<Owned<Kernel>> {
        instance(api, &self.program, &self.name, id)
    }
}

fn instance(api: &Api, program: &Owned<Object>, name: &CStr, id: &str) -> Result<Owned<Kernel>> {
    let mut code = 0;
    // SAFETY: the program is built, and `name` is NUL-terminated.
    let raw = unsafe { (api.clCreateKernel)(program.raw(), name.as_ptr(), &mut code) };
    // SAFETY: `clCreateKernel` returned this kernel with one reference.
    unsafe { Owned::new(raw, code, api.clReleaseKernel) }
        .map_err(|c| sys::driver_error(id, &format!("clCreateKernel({})", name.to_string_lossy()), c))
}

impl HasOwner for ClProgram {
    fn owner(&self) -> u64 {
        self.owner
    }
}

impl Compiled for ClProgram {
    fn signature(&self) -> &Signature {
        &self.signature
    }
}

impl Program for ClProgram {
    fn name(&self) -> &str {
        &self.signature.name
    }

    fn source(&self) -> Option<&str> {
        Some(&self.source)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Builds programs of one device.
#[derive(Debug)]
pub(super) struct Builder<'a> {
    pub adapter: &'a Adapter,
    pub context: &'a Owned<Context>,
    pub id: &'a str,
    pub options: &'a str,
}

impl Builder<'_> {
    /// Compiles source text.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log.
    pub(super) fn compile(&self, name: &str, text: &str) -> Result<Owned<Object>> {
        let api = self.adapter.api;
        let (pointer, length) = (text.as_ptr().cast::<c_char>(), text.len());
        let mut code = 0;
        // SAFETY: one string is passed with its length; the library copies it.
        let raw =
            unsafe { (api.clCreateProgramWithSource)(self.context.raw(), 1, &pointer, &length, &mut code) };
        // SAFETY: `clCreateProgramWithSource` returned this program with one reference.
        let program = unsafe { Owned::new(raw, code, api.clReleaseProgram) }
            .map_err(|c| sys::driver_error(self.id, "clCreateProgramWithSource", c))?;
        match self.build(&program)? {
            sys::SUCCESS => Ok(program),
            sys::BUILD_PROGRAM_FAILURE => {
                let log = self.log(&program);
                Err(Error::Compile { device: self.id.into(), kernel: name.into(), log })
            }
            c => Err(sys::driver_error(self.id, "clBuildProgram", c)),
        }
    }

    /// A program from the result of [`Builder::binary`]; `None` if the driver rejects it, for instance after
    /// an update.
    pub(super) fn load(&self, binary: &[u8]) -> Option<Owned<Object>> {
        let api = self.adapter.api;
        let (pointer, length) = (binary.as_ptr(), binary.len());
        let (mut status, mut code) = (0, 0);
        let device = self.adapter.device;
        // SAFETY: one device and one binary with its length are passed; the library copies and validates the
        // binary.
        let raw = unsafe {
            (api.clCreateProgramWithBinary)(
                self.context.raw(),
                1,
                &device,
                &length,
                &pointer,
                &mut status,
                &mut code,
            )
        };
        // SAFETY: `clCreateProgramWithBinary` returned this program with one reference.
        let program = unsafe { Owned::new(raw, code, api.clReleaseProgram) }.ok()?;
        (status == sys::SUCCESS && self.build(&program).ok()? == sys::SUCCESS).then_some(program)
    }

    fn build(&self, program: &Owned<Object>) -> Result<i32> {
        let options = CString::new(self.options).map_err(|e| Error::internal(e.to_string()))?;
        let device: Handle = self.adapter.device;
        // SAFETY: the program and the device are live, and `options` is NUL-terminated. Without a callback
        // the call blocks.
        Ok(unsafe {
            (self.adapter.api.clBuildProgram)(
                program.raw(),
                1,
                &device,
                options.as_ptr(),
                None,
                std::ptr::null_mut(),
            )
        })
    }

    fn log(&self, program: &Owned<Object>) -> String {
        let api = self.adapter.api;
        let query = |n: usize, p: *mut c_void, r: *mut usize| {
            // SAFETY: `query_bytes` passes a buffer of `n` bytes; the program and the device are live.
            unsafe {
                (api.clGetProgramBuildInfo)(
                    program.raw(),
                    self.adapter.device,
                    sys::PROGRAM_BUILD_LOG,
                    n,
                    p,
                    r,
                )
            }
        };
        let log = adapter::query_bytes(query).map(adapter::text).unwrap_or_default();
        if log.is_empty() { "the compiler gave no log".into() } else { log }
    }

    /// The driver's binary of a built program; `None` if it provides none.
    pub(super) fn binary(&self, program: &Owned<Object>) -> Option<Vec<u8>> {
        let api = self.adapter.api;
        let mut size = 0usize;
        let word = size_of::<usize>();
        // SAFETY: the program has one device, so the result is one size.
        let code = unsafe {
            (api.clGetProgramInfo)(
                program.raw(),
                sys::PROGRAM_BINARY_SIZES,
                word,
                (&raw mut size).cast(),
                std::ptr::null_mut(),
            )
        };
        if code != sys::SUCCESS || size == 0 {
            return None;
        }
        let mut out = vec![0u8; size];
        let mut pointer = out.as_mut_ptr();
        // SAFETY: the program has one device, so one pointer is read, to a buffer of the size that the driver
        // reported.
        let code = unsafe {
            (api.clGetProgramInfo)(
                program.raw(),
                sys::PROGRAM_BINARIES,
                size_of::<*mut u8>(),
                (&raw mut pointer).cast(),
                std::ptr::null_mut(),
            )
        };
        (code == sys::SUCCESS).then_some(out)
    }

    /// The entry point of a built program. Fails unless it supports workgroups of `items` work-items.
    pub(super) fn entry(&self, program: Owned<Object>, entry: &str, items: u32) -> Result<Entry> {
        let api = self.adapter.api;
        let name = CString::new(entry).map_err(|e| Error::internal(e.to_string()))?;
        let kernel = instance(api, &program, &name, self.id)?;
        let mut limit = 0usize;
        let word = size_of::<usize>();
        // SAFETY: the kernel and the device are live, and the result is one size.
        let code = unsafe {
            (api.clGetKernelWorkGroupInfo)(
                kernel.raw(),
                self.adapter.device,
                sys::KERNEL_WORK_GROUP_SIZE,
                word,
                (&raw mut limit).cast(),
                std::ptr::null_mut(),
            )
        };
        sys::check(self.id, "clGetKernelWorkGroupInfo", code)?;
        if limit < items as usize {
            return Err(Error::unsupported(
                format!(
                    "kernel {entry} on {}: its workgroups have {items} work-items, but the driver allows {limit}",
                    self.id
                ),
                "Choose another device",
            ));
        }
        Ok(Entry { program, name, kernel })
    }
}
