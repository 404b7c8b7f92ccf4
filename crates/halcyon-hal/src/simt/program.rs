//! Programs. Kernels are rendered to source text, then compiled at run time or loaded from the disk cache.

use super::sys::{self, Code, Compiler, Context, Handle};
use super::toolchain::BuildError;
use crate::commands::{Compiled, HasOwner};
use crate::validate::Signature;
use crate::{Error, Program, Result};
use halcyon_ir::kernel::Kernel;
use halcyon_ir::render::Indirect;
use std::any::Any;
use std::ffi::{CString, c_char};
use std::sync::{Arc, Mutex};

/// `CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK`; the same number in HIP.
const MAX_THREADS: i32 = 0;

/// A compiled kernel with its signature.
#[derive(Debug)]
pub(crate) struct SimtProgram {
    pub signature: Signature,
    pub workgroup: [u32; 3],
    pub function: Function,
    pub source: String,
    /// The kernel IR that it was compiled from.
    pub kernel: Kernel,
    /// The entry points made so far that read arguments from a buffer.
    pub indirect: Mutex<Vec<(Indirect, Arc<Function>)>>,
    /// Id of the device that it belongs to.
    pub owner: u64,
}

impl HasOwner for SimtProgram {
    fn owner(&self) -> u64 {
        self.owner
    }
}

impl Compiled for SimtProgram {
    fn signature(&self) -> &Signature {
        &self.signature
    }
}

impl Program for SimtProgram {
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

/// An entry point of a loaded module.
#[derive(Debug)]
pub(crate) struct Function {
    context: Arc<Context>,
    module: Handle,
    raw: Handle,
}

// SAFETY: the fields are opaque handles of CUDA or HIP, whose functions may be called from any thread.
unsafe impl Send for Function {}
// SAFETY: the handles are never modified after loading, and the functions of CUDA and HIP are thread-safe.
unsafe impl Sync for Function {}

impl Function {
    pub(crate) fn raw(&self) -> Handle {
        self.raw
    }

    /// Loads the entry point of a binary, or of NUL-terminated PTX. Fails if the entry point does not support
    /// workgroups of `items` work-items.
    ///
    /// # Safety
    /// `binary` must be a whole image, because CUDA and HIP take no length: either the unchanged output of a
    /// compiler, which contains its own size, or text that ends in NUL.
    pub(crate) unsafe fn load(
        context: &Arc<Context>,
        binary: &[u8],
        entry: &str,
        items: u32,
    ) -> Result<Function, BuildError> {
        context.enter()?;
        let f = &context.api.f;
        let mut module: Handle = std::ptr::null_mut();
        // SAFETY: `binary` is a whole image, as `load` requires, so CUDA or HIP finds its end. The module is
        // a copy of the image.
        let code = unsafe { (f.module_load)(&mut module, binary.as_ptr().cast()) };
        let loaded = context.check(&format!("loading the module of {entry}"), code);
        loaded.map_err(|e| BuildError::of(code, e))?;
        let mut function = Function { context: context.clone(), module, raw: std::ptr::null_mut() };
        let name = CString::new(entry).map_err(|e| Error::internal(e.to_string()))?;
        // SAFETY: the module is loaded, and `name` is NUL-terminated.
        let code = unsafe { (f.module_function)(&mut function.raw, module, name.as_ptr()) };
        context.check(&format!("looking for {entry} in its module"), code)?;
        let mut limit = 0;
        // SAFETY: the function is loaded, and the call writes one number to `limit`.
        let code = unsafe { (f.function_attribute)(&mut limit, MAX_THREADS, function.raw) };
        context.check(&format!("querying the limits of {entry}"), code)?;
        if (limit as i64) < items as i64 {
            return Err(BuildError::Other(Error::unsupported(
                format!(
                    "kernel {entry} on {}: its groups have {items} work-items, its limit is {limit}",
                    context.id
                ),
                "Choose another device",
            )));
        }
        Ok(function)
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        let code = match self.context.visit() {
            // SAFETY: `load` loaded the module, and only this call unloads it. Unloading waits for pending
            // launches.
            Ok(_visit) => unsafe { (self.context.api.f.module_unload)(self.module) },
            Err(_) => return,
        };
        if code != sys::SUCCESS {
            let code = sys::code_name(self.context.api.family, code);
            tracing::warn!(device = self.context.id, %code, "a module could not be unloaded");
        }
    }
}

/// The format that the run-time compiler produces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Output {
    /// Code for one architecture.
    Binary,
    /// NVIDIA's intermediate language as text, which the driver compiles when it loads the module.
    Ptx,
}

impl Output {
    /// Whether CUDA or HIP can find the end of the image: a binary contains its size, PTX must end in NUL.
    pub fn is_whole(self, made: &[u8]) -> bool {
        self == Output::Binary || made.last() == Some(&0)
    }
}

/// A program object of the run-time compiler.
struct CompileUnit<'a> {
    compiler: &'a Compiler,
    raw: Handle,
}

impl Drop for CompileUnit<'_> {
    fn drop(&mut self) {
        // SAFETY: the compiler created `raw`, and only this call destroys it.
        unsafe { (self.compiler.f.destroy)(&mut self.raw) };
    }
}

impl Compiler {
    /// Compiles source text to a binary, or to NUL-terminated PTX.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log, or with the call that failed. [`Error::Internal`] for text
    /// that contains NUL, or if the compiler cannot make PTX.
    pub fn compile(
        &self,
        device: &str,
        name: &str,
        text: &str,
        flags: &[String],
        output: Output,
    ) -> Result<Vec<u8>> {
        let failed = |call: &str, code: Code| Error::Compile {
            device: device.into(),
            kernel: name.into(),
            log: format!("{call} with {} failed with code {code}", self.library),
        };
        let c_text = |s: &str| CString::new(s).map_err(|e| Error::internal(e.to_string()));
        let (text, file) = (c_text(text)?, c_text(name)?);
        let flags = flags.iter().map(|f| c_text(f)).collect::<Result<Vec<_>>>()?;
        let flags: Vec<*const c_char> = flags.iter().map(|f| f.as_ptr()).collect();
        let mut unit = CompileUnit { compiler: self, raw: std::ptr::null_mut() };
        // SAFETY: both texts are NUL-terminated and there are no headers; the compiler copies them.
        let code = unsafe {
            (self.f.create)(
                &mut unit.raw,
                text.as_ptr(),
                file.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        if code != sys::SUCCESS {
            // The compiler created no program, so there is nothing to destroy.
            std::mem::forget(unit);
            return Err(failed("creating a program", code));
        }
        // SAFETY: `flags` has `flags.len()` pointers to NUL-terminated strings that live until the call
        // returns.
        let code = unsafe { (self.f.compile)(unit.raw, flags.len() as i32, flags.as_ptr()) };
        if code != sys::SUCCESS {
            let log = self.log(&unit).filter(|l| !l.trim().is_empty());
            let log = log.unwrap_or_else(|| format!("{} failed with code {code} and no log", self.library));
            return Err(Error::Compile { device: device.into(), kernel: name.into(), log });
        }
        let (size_of, take) = match (output, &self.ptx) {
            (Output::Binary, _) => (self.f.code_size, self.f.code),
            (Output::Ptx, Some(ptx)) => (ptx.size, ptx.text),
            (Output::Ptx, None) => {
                return Err(Error::internal(format!("{} does not compile to PTX", self.library)));
            }
        };
        let mut size = 0usize;
        // SAFETY: the compiler writes one number to `size`; the program was compiled.
        let code = unsafe { size_of(unit.raw, &mut size) };
        if code != sys::SUCCESS || size == 0 {
            return Err(failed("querying the size of the compiled program", code));
        }
        let mut made = vec![0u8; size];
        // SAFETY: `made` has the size that the compiler reported.
        match unsafe { take(unit.raw, made.as_mut_ptr().cast()) } {
            sys::SUCCESS if output.is_whole(&made) => Ok(made),
            code => Err(failed("copying the compiled program", code)),
        }
    }

    fn log(&self, unit: &CompileUnit<'_>) -> Option<String> {
        let mut size = 0usize;
        // SAFETY: the compiler writes one number to `size`.
        if unsafe { (self.f.log_size)(unit.raw, &mut size) } != sys::SUCCESS || size == 0 {
            return None;
        }
        let mut log = vec![0u8; size];
        // SAFETY: `log` has the size that the compiler reported.
        if unsafe { (self.f.log)(unit.raw, log.as_mut_ptr().cast()) } != sys::SUCCESS {
            return None;
        }
        let end = log.iter().position(|c| *c == 0).unwrap_or(log.len());
        Some(String::from_utf8_lossy(&log[..end]).trim().to_string())
    }
}
