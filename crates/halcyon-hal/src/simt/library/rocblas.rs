//! rocBLAS, for products without epilogues if hipBLASLt is missing or does not support the product. The
//! numbers and signatures are those of `rocblas-types.h` and `rocblas-functions.h`, unchanged since ROCm 4.

use super::product::Product;
use super::tensile::Kernels;
use super::{KernelCall, SimtKernel, WORKSPACE, failed, functions_of_one};
use crate::library_call::CallForm;
use crate::simt::VendorLibrary;
use crate::simt::memory::Memory;
use crate::simt::sys::{Address, Code, Context, Handle, SUCCESS};
use crate::{Declined, Error, Result};
use halcyon_ir::DType;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};

functions_of_one! {
    /// Functions of the library.
    Functions {
        version: "rocblas_get_version_string", (*mut c_char, usize);
        create: "rocblas_create_handle", (*mut Handle);
        destroy: "rocblas_destroy_handle", (Handle);
        set_stream: "rocblas_set_stream", (Handle, Handle);
        set_workspace: "rocblas_set_workspace", (Handle, Address, usize);
        set_atomics: "rocblas_set_atomics_mode", (Handle, c_int);
        start_query: "rocblas_start_device_memory_size_query", (Handle);
        stop_query: "rocblas_stop_device_memory_size_query", (Handle, *mut usize);
        gemm: "rocblas_gemm_strided_batched_ex",
            (Handle, c_int, c_int, c_int, c_int, c_int, *const c_void, Address, c_int, c_int, i64, Address, c_int, c_int, i64,
             *const c_void, Address, c_int, c_int, i64, Address, c_int, c_int, i64, c_int, c_int, c_int, i32, u32);
    }
}

/// In a memory query, a supported call returns one of these codes (the required size increased, or did not
/// change) or `SUCCESS`.
const INCREASED: Code = 9;
const UNCHANGED: Code = 10;
/// `rocblas_operation_none` and `rocblas_operation_transpose`.
const OPERATIONS: [c_int; 2] = [111, 112];
/// Size in bytes of the workspace that is set for products that need none. Without a workspace, the library
/// would allocate one.
const MIN_WORKSPACE: usize = 256;

fn type_number(d: DType) -> Option<c_int> {
    Some(match d {
        DType::F16 => 150,
        DType::F32 => 151,
        DType::F64 => 152,
        DType::I8 => 160,
        DType::I32 => 162,
        DType::BF16 => 168,
        _ => return None,
    })
}

fn status(code: Code) -> &'static str {
    match code {
        1 => "invalid handle",
        2 => "not implemented",
        3 => "invalid pointer",
        4 => "invalid size",
        5 => "out of memory",
        6 => "internal error",
        11 => "invalid value",
        14 => "left out of this build",
        15 => "not for this architecture",
        _ => "see the library's documentation",
    }
}

/// The loaded library.
pub(super) struct Api {
    f: Functions,
    library: String,
}

/// The location of rocBLAS's kernels.
const KERNELS: Kernels = Kernels { title: "rocBLAS", folder: "rocblas", variable: "ROCBLAS_TENSILE_LIBPATH" };

/// Handles of the library on one device. Their workspace is set before each product is enqueued.
pub(super) struct RocBlas {
    api: &'static Api,
    handles: Mutex<Handles>,
    version: String,
    context: Arc<Context>,
    /// The workspace of `MIN_WORKSPACE` bytes. It is dropped after the handles that use it.
    own: Memory,
}

/// The handles, which are not thread-safe.
struct Handles {
    /// The handle for work outside of captures. Its stream is set before each product is enqueued.
    usual: Handle,
    /// The handle for captures, and the only stream that it is used with. Setting a stream queries the
    /// stream's state, which ROCm before 6.2 forbids during captures (rocBLAS #1432, #1438), so the stream is
    /// set before a capture begins.
    capturing: Option<(Handle, Handle)>,
}
// SAFETY: the fields are opaque handles of the library; a mutex lets one thread use them at a time.
unsafe impl Send for Handles {}

impl std::fmt::Debug for RocBlas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RocBlas({} {})", self.api.library, self.version)
    }
}

impl RocBlas {
    /// Loads the library and opens it for a device.
    ///
    /// # Safety
    /// The contract of [`Family::first`](super::super::Family::first), for the library `l`.
    pub(super) unsafe fn open(
        context: &Arc<Context>,
        l: &'static VendorLibrary,
        names: &[String],
    ) -> Result<RocBlas> {
        static LOADED: Mutex<BTreeMap<String, &'static Api>> = Mutex::new(BTreeMap::new());
        let family = context.api.family;
        let resolve = |lib: &libloading::Library, name: &str| {
            Ok(Api { f: Functions::resolve(lib, family.side)?, library: name.into() })
        };
        // SAFETY: `open` requires that `names` are names of the library `l` and that loading them is sound.
        // `resolve` gives each function the type that the library declares.
        let api = unsafe { family.first(&LOADED, names, l.title, l.fix, &resolve) }?;
        KERNELS.check(context, api.f.gemm as usize)?;
        let own = Memory::new(context, MIN_WORKSPACE).map_err(|code| Error::Driver {
            device: context.id.clone(),
            call: format!("allocating {MIN_WORKSPACE} bytes for {}", l.title),
            code,
            next: "Free memory on the device".into(),
        })?;
        let mut text = [0u8; 64];
        // SAFETY: the library writes at most `text.len()` bytes to `text`.
        unsafe { (api.f.version)(text.as_mut_ptr().cast(), text.len()) };
        let end = text.iter().position(|c| *c == 0).unwrap_or(text.len());
        let version = String::from_utf8_lossy(&text[..end]).into_owned();
        let handles = Mutex::new(Handles { usual: ptr::null_mut(), capturing: None });
        let blas = RocBlas { api, handles, version, context: context.clone(), own };
        let usual = blas.create()?;
        blas.lock().usual = usual;
        Ok(blas)
    }

    fn lock(&self) -> MutexGuard<'_, Handles> {
        // A panic leaves the handles valid, so a poisoned lock is safe to use.
        self.handles.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Creates a handle. The thread must have entered the context.
    fn create(&self) -> Result<Handle> {
        let f = &self.api.f;
        let mut raw = ptr::null_mut();
        // SAFETY: the library writes one handle to `raw`; the thread has a current device.
        self.check("creating a handle", unsafe { (f.create)(&mut raw) })?;
        // Without atomics, sums are computed in the same order in every run.
        // SAFETY: the library created the handle above; `self.own` has `MIN_WORKSPACE` bytes and lives longer
        // than the handle.
        let steps =
            unsafe { [(f.set_atomics)(raw, 0), (f.set_workspace)(raw, self.own.at(), MIN_WORKSPACE)] };
        let set = steps.into_iter().try_for_each(|code| self.check("preparing a handle", code));
        if let Err(e) = set {
            // SAFETY: the handle was created above and is not returned.
            unsafe { self.destroy(raw) };
            return Err(e);
        }
        Ok(raw)
    }

    /// Destroys a handle. The thread must have entered the context.
    ///
    /// # Safety
    /// `raw` must be a handle from `create`, which nothing uses afterwards.
    unsafe fn destroy(&self, raw: Handle) {
        // SAFETY: `destroy` requires a live handle of the library.
        let code = unsafe { (self.api.f.destroy)(raw) };
        if code != SUCCESS {
            tracing::warn!(device = self.context.id, code, "a library's handle could not be destroyed");
        }
    }

    pub(super) fn describe(&self) -> String {
        format!("{} {}", self.api.library, self.version)
    }

    fn check(&self, call: &str, code: Code) -> Result<()> {
        match code {
            SUCCESS => Ok(()),
            _ => Err(failed(&self.context, "rocBLAS", call, code, status(code))),
        }
    }

    pub(super) fn kernel(
        self: &Arc<RocBlas>,
        owner: u64,
        call: &CallForm<'_>,
        p: &Product,
    ) -> Result<SimtKernel, Declined> {
        if call.epilogue.is_some() {
            return Err(Declined::because("rocBLAS has no epilogues"));
        }
        let number = |d| type_number(d).ok_or_else(|| Declined::because(format!("rocBLAS has no {d}")));
        let (compute, one) = match p.factors[0] {
            DType::F64 => (DType::F64, 1f64.to_bits()),
            DType::I8 => (DType::I32, 1),
            _ => (DType::F32, u64::from(1f32.to_bits())),
        };
        let sizes = p.sizes();
        let mut plan = Plan {
            blas: self.clone(),
            product: p.clone(),
            types: [number(p.factors[0])?, number(p.result)?, number(compute)?],
            one,
            workspace: 0,
            calls: p.calls.iter().map(|at| std::array::from_fn(|x| at[x] * sizes[x])).collect(),
        };
        plan.workspace = plan.room().map_err(|e| Declined::because(e.to_string()))?;
        if plan.workspace > WORKSPACE {
            return Err(Declined::because(format!("rocBLAS needs {} bytes of workspace", plan.workspace)));
        }
        let name = format!("rocblas.{}", p.factors[0].name());
        SimtKernel::new(name, owner, call, plan.workspace, plan)
    }
}

impl Drop for RocBlas {
    fn drop(&mut self) {
        let Ok(_visit) = self.context.visit() else { return };
        // Kernels hold a reference to this value, so no kernel is left.
        let Handles { usual, capturing } = &*self.lock();
        for raw in [*usual].into_iter().chain(capturing.map(|c| c.0)).filter(|h| !h.is_null()) {
            // SAFETY: `create` made both handles, and nothing uses them after this value.
            unsafe { self.destroy(raw) };
        }
    }
}

/// A product as arguments of the library.
#[derive(Debug)]
struct Plan {
    blas: Arc<RocBlas>,
    product: Product,
    /// Types of the factors, the result and the computation.
    types: [c_int; 3],
    /// The bits of the number 1 in the type of the computation.
    one: u64,
    workspace: usize,
    /// Offsets in bytes of a, b and c, for each call.
    calls: Vec<[isize; 3]>,
}

impl Plan {
    /// # Safety
    /// `handle` must be live. The addresses must be those of matrices that the product describes, or the
    /// handle must be in a memory query, which does not access them.
    unsafe fn call(&self, handle: Handle, a: Address, b: Address, c: Address) -> Code {
        let (p, zero) = (&self.product, 0u64);
        let [factors, result, compute] = self.types;
        let operation = |by_rows: bool| OPERATIONS[usize::from(!by_rows)];
        // SAFETY: `call` requires a live handle and valid addresses. When the product was made, a check
        // ensured that its dimensions fit the library's integers. The library reads the scalars before the
        // call returns.
        unsafe {
            (self.blas.api.f.gemm)(
                handle,
                operation(p.b.by_rows),
                operation(p.a.by_rows),
                p.n as c_int,
                p.m as c_int,
                p.k as c_int,
                ptr::from_ref(&self.one).cast(),
                b,
                factors,
                p.b.ld as c_int,
                p.b.step as i64,
                a,
                factors,
                p.a.ld as c_int,
                p.a.step as i64,
                ptr::from_ref(&zero).cast(),
                c,
                result,
                p.n as c_int,
                p.step as i64,
                c,
                result,
                p.n as c_int,
                p.step as i64,
                p.batch as c_int,
                compute,
                0,
                0,
                0,
            )
        }
    }

    /// Bytes of workspace that the library needs.
    fn room(&self) -> Result<usize> {
        let (blas, f) = (&self.blas, &self.blas.api.f);
        blas.context.enter()?;
        let handles = blas.lock();
        let handle = handles.usual;
        let mut bytes = 0;
        // SAFETY: the handle is live, because `blas` destroys it only in `drop`. During a memory query the
        // library accesses no matrix.
        let (start, asked, stop) = unsafe {
            let start = (f.start_query)(handle);
            let own = blas.own.at();
            (start, self.call(handle, own, own, own), (f.stop_query)(handle, &mut bytes))
        };
        blas.check("querying the workspace size", start)?;
        match asked {
            INCREASED | UNCHANGED => {}
            code => blas.check("this product", code)?,
        }
        blas.check("querying the workspace size", stop)?;
        Ok(bytes)
    }
}

impl KernelCall for Plan {
    unsafe fn enqueue(&self, stream: Handle, at: &[Address]) -> Result<()> {
        let (blas, f) = (&self.blas, &self.blas.api.f);
        let (room, bytes) = match at.get(3) {
            Some(own) => (*own, self.workspace),
            None => (blas.own.at(), MIN_WORKSPACE),
        };
        let handles = blas.lock();
        let handle = match handles.capturing {
            Some((handle, own)) if own == stream => handle,
            _ => {
                // SAFETY: `create` made the handle, which is locked; `enqueue` requires a live stream.
                let code = unsafe { (f.set_stream)(handles.usual, stream) };
                blas.check("choosing a stream", code)?;
                handles.usual
            }
        };
        // SAFETY: `blas` keeps the handle alive. `room` has `bytes` bytes: it is the kernel's workspace,
        // which passed `SimtKernel::check`, or `blas.own`. The library allocated neither the old nor the new
        // workspace, so it frees nothing.
        let code = unsafe { (f.set_workspace)(handle, room, bytes) };
        blas.check("preparing a product", code)?;
        for [x, y, z] in &self.calls {
            let place = |base: Address, by: &isize| base.wrapping_add_signed(*by as i64);
            // SAFETY: `enqueue` requires buffers that passed `SimtKernel::check`: each view lies in its
            // buffer, and the result does not overlap with any other buffer. The handle is locked and live.
            let code = unsafe { self.call(handle, place(at[0], x), place(at[1], y), place(at[2], z)) };
            blas.check("a product", code)?;
        }
        Ok(())
    }

    unsafe fn prepare(&self, stream: Handle) -> Result<()> {
        let blas = &self.blas;
        blas.context.enter()?;
        let mut handles = blas.lock();
        let handle = match handles.capturing {
            Some((handle, _)) => handle,
            None => blas.create()?,
        };
        // The handle has no stream until a stream is set successfully.
        handles.capturing = Some((handle, ptr::null_mut()));
        // SAFETY: `create` made the handle, which is locked; `prepare` requires a live stream.
        blas.check("choosing a stream", unsafe { (blas.api.f.set_stream)(handle, stream) })?;
        handles.capturing = Some((handle, stream));
        Ok(())
    }
}
