//! cuBLASLt and hipBLASLt: products with an algorithm chosen by the library, a bias and an activation.
//! hipBLASLt has cuBLASLt's API, with other names and other values of constants. (Sources: `cublasLt.h` of
//! the CUDA toolkit 12; `hipblaslt.h` and `hipblas-common.h` of ROCm 6.)

use super::epilogue::{Bias, VendorEpilogue};
use super::product::{Matrix, Product, Scale, alignment};
use super::search::{Algorithm, Searcher};
use super::tensile::Kernels;
use super::{KernelCall, MAX_ALGORITHMS, SimtKernel, WORKSPACE, WORKSPACE_ALIGNMENT, failed};
use crate::cache;
use crate::library_call::CallForm;
use crate::simt::VendorLibrary;
use crate::simt::sys::{Address, Code, Context, Handle, SUCCESS, Side, functions};
use crate::tune::ALGORITHM;
use crate::{Declined, Error, Result};
use halcyon_ir::kernel::tune::Variant;
use halcyon_ir::target::MatmulPrecision;
use halcyon_ir::{DType, ScalarOp};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};

functions! {
    /// Functions of the library.
    Functions {
        create: "cublasLtCreate", "hipblasLtCreate", (*mut Handle);
        destroy: "cublasLtDestroy", "hipblasLtDestroy", (Handle);
        desc_create: "cublasLtMatmulDescCreate", "hipblasLtMatmulDescCreate", (*mut Handle, c_int, c_int);
        desc_destroy: "cublasLtMatmulDescDestroy", "hipblasLtMatmulDescDestroy", (Handle);
        desc_set: "cublasLtMatmulDescSetAttribute", "hipblasLtMatmulDescSetAttribute", (Handle, c_int, *const c_void, usize);
        layout_create: "cublasLtMatrixLayoutCreate", "hipblasLtMatrixLayoutCreate", (*mut Handle, c_int, u64, u64, i64);
        layout_destroy: "cublasLtMatrixLayoutDestroy", "hipblasLtMatrixLayoutDestroy", (Handle);
        layout_set: "cublasLtMatrixLayoutSetAttribute", "hipblasLtMatrixLayoutSetAttribute",
            (Handle, c_int, *const c_void, usize);
        preference_create: "cublasLtMatmulPreferenceCreate", "hipblasLtMatmulPreferenceCreate", (*mut Handle);
        preference_destroy: "cublasLtMatmulPreferenceDestroy", "hipblasLtMatmulPreferenceDestroy", (Handle);
        preference_set: "cublasLtMatmulPreferenceSetAttribute", "hipblasLtMatmulPreferenceSetAttribute",
            (Handle, c_int, *const c_void, usize);
        heuristic: "cublasLtMatmulAlgoGetHeuristic", "hipblasLtMatmulAlgoGetHeuristic",
            (Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut u64, *mut c_int);
        matmul: "cublasLtMatmul", "hipblasLtMatmul",
            (Handle, Handle, *const c_void, Address, Handle, Address, Handle, *const c_void, Address, Handle, Address, Handle,
             *const u64, Address, usize, Handle);
    }
}

/// The location of hipBLASLt's kernels.
const KERNELS: Kernels =
    Kernels { title: "hipBLASLt", folder: "hipblaslt", variable: "HIPBLASLT_TENSILE_LIBPATH" };

/// How to query the library's version.
#[derive(Clone, Copy)]
enum Version {
    /// Major, minor and patch in separate calls.
    Property(unsafe extern "system" fn(c_int, *mut c_int) -> Code),
    /// One number, queried from a handle.
    Number(unsafe extern "system" fn(Handle, *mut c_int) -> Code),
}

/// The loaded library.
pub(super) struct Api {
    f: Functions,
    version: Version,
    numbers: &'static Numbers,
    library: String,
}

/// Values of constants that differ between the two libraries. (Most element types have the same value in
/// both.)
struct Numbers {
    /// Compute types: f32, f64, i32.
    f32: c_int,
    f64: c_int,
    i32: c_int,
    /// Not transposed, transposed.
    operations: [c_int; 2],
    /// Attributes of a product: transposes, epilogue, bias.
    transposes: [c_int; 2],
    epilogue: c_int,
    bias: c_int,
    /// Attribute: pointer to the scale of the first factor.
    scale: c_int,
    /// Attributes of a layout: batch count, stride of the batch.
    batch: [c_int; 2],
    /// Attributes of a preference: alignments of a, b, c and d; permitted reductions of partial products.
    alignments: Option<[c_int; 4]>,
    reductions: Option<c_int>,
    /// Number of 64-bit words of an algorithm in the heuristic's result.
    algorithm: usize,
}

static CUDA: Numbers = Numbers {
    f32: 68,
    f64: 70,
    i32: 72,
    operations: [0, 1],
    transposes: [3, 4],
    epilogue: 7,
    bias: 8,
    scale: 17,
    batch: [5, 6],
    alignments: Some([5, 6, 7, 8]),
    reductions: Some(3),
    algorithm: 8,
};

static HIP: Numbers = Numbers {
    f32: 2,
    f64: 7,
    i32: 9,
    operations: [111, 112],
    transposes: [0, 1],
    epilogue: 2,
    bias: 3,
    scale: 5,
    batch: [0, 1],
    alignments: None,
    reductions: None,
    algorithm: 3,
};

/// cuBLASLt's compute type for f32 products in TF32.
const TF32: c_int = 77;
/// Bytes of the widest load.
const WIDEST_LOAD: u32 = 16;
/// Attribute of a preference: maximum bytes of workspace.
const MAX_WORKSPACE: c_int = 1;
/// Reduction: partial products are summed in the compute type, never in the result's type.
const IN_COMPUTE_TYPE: u32 = 2;
/// Epilogues: `DEFAULT` is none. The others are flags; `BIAS` can be combined with one of the two
/// activations.
const DEFAULT: u32 = 1;
const RELU: u32 = 2;
const BIAS: u32 = 4;
const GELU: u32 = 32;
/// Minimum version of hipBLASLt (0.6.0). Older versions use other numbers for types (`hipblasDatatype_t`).
const OLDEST_HIP: i32 = 600;

/// `cudaDataType` and `hipDataType`; the last two exist only in HIP.
fn type_number(side: Side, d: DType) -> Option<c_int> {
    Some(match d {
        DType::F32 => 0,
        DType::F64 => 1,
        DType::F16 => 2,
        DType::I8 => 3,
        DType::I32 => 10,
        DType::BF16 => 14,
        DType::F8E4M3FN => 28,
        DType::F8E5M2 => 29,
        DType::F8E4M3FNUZ if side == Side::Hip => 1000,
        DType::F8E5M2FNUZ if side == Side::Hip => 1001,
        _ => return None,
    })
}

/// `cublasStatus_t` and `hipblasStatus_t`.
fn status(side: Side, code: Code) -> &'static str {
    match (side, code) {
        (_, 1) => "not initialised",
        (Side::Cuda, 3) | (Side::Hip, 2) => "out of memory",
        (Side::Cuda, 7) | (Side::Hip, 3 | 10) => "an invalid value",
        (_, 8) => "not for this architecture",
        (Side::Cuda, 13) | (Side::Hip, 5) => "the kernel failed",
        (Side::Cuda, 14) | (Side::Hip, 6) => "internal error",
        (Side::Cuda, 15) | (Side::Hip, 7) => "not supported",
        _ => "see the library's documentation",
    }
}

/// In products of 8-bit floats, N and K (in elements), leading dimensions, strides and alignments (in bytes)
/// must be multiples of this.
const FP8_MULTIPLE: usize = 16;

/// The requirements of FP8 kernels according to `cublasLtMatmul`: both factors are contiguous along the
/// summed dimension (the library's first factor is transposed, the second is not), and pointers, N, K,
/// leading dimensions and strides are multiples of 16 bytes. M may have any value.
fn eight_bits_fit(p: &Product) -> Result<(), Declined> {
    let [a, b, c] = p.alignment(WORKSPACE_ALIGNMENT).map(|a| a as usize);
    if !p.k.is_multiple_of(FP8_MULTIPLE) || !p.n.is_multiple_of(FP8_MULTIPLE) || c < FP8_MULTIPLE {
        return Err(Declined::because(format!(
            "products of 8-bit floats need sizes in multiples of {FP8_MULTIPLE}, not {} by {}",
            p.k, p.n
        )));
    }
    let fits = |m: &Matrix, by_rows: bool, alignment: usize| {
        m.by_rows == by_rows
            && m.ld.is_multiple_of(FP8_MULTIPLE)
            && m.step % FP8_MULTIPLE as isize == 0
            && alignment >= FP8_MULTIPLE
    };
    let copied: Vec<usize> = [fits(&p.a, true, a), fits(&p.b, false, b)]
        .iter()
        .enumerate()
        .filter_map(|(i, fits)| (!fits).then_some(i))
        .collect();
    if copied.is_empty() { Ok(()) } else { Err(Declined::needs_dense(copied)) }
}

/// A handle of the library on one device.
pub(super) struct Lt {
    api: &'static Api,
    handle: Handle,
    version: String,
    context: Arc<Context>,
}

// SAFETY: `handle` is an opaque handle of the library, whose functions may be called from any thread.
unsafe impl Send for Lt {}
// SAFETY: the library's documentation permits concurrent calls with one handle; no field is modified after
// construction.
unsafe impl Sync for Lt {}

impl std::fmt::Debug for Lt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lt({} {})", self.api.library, self.version)
    }
}

impl Lt {
    /// Loads the library and opens it for a device.
    ///
    /// # Safety
    /// The contract of [`Family::first`](super::super::Family::first), for the library `l`.
    pub(super) unsafe fn open(
        context: &Arc<Context>,
        l: &'static VendorLibrary,
        names: &[String],
    ) -> Result<Lt> {
        static LOADED: Mutex<BTreeMap<String, &'static Api>> = Mutex::new(BTreeMap::new());
        let family = context.api.family;
        let resolve = |lib: &libloading::Library, name: &str| {
            let f = Functions::resolve(lib, family.side)?;
            macro_rules! get {
                ($kind:path, $name:literal, ($($argument:ty),*)) => {{
                    // SAFETY: the library declares the function with this type.
                    let f = unsafe { lib.get::<unsafe extern "system" fn($($argument),*) -> Code>($name.as_bytes()) };
                    $kind(*f.map_err(|_| $name)?)
                }};
            }
            let (version, numbers) = match family.side {
                Side::Cuda => (get!(Version::Property, "cublasLtGetProperty", (c_int, *mut c_int)), &CUDA),
                Side::Hip => (get!(Version::Number, "hipblasLtGetVersion", (Handle, *mut c_int)), &HIP),
            };
            Ok(Api { f, version, numbers, library: name.into() })
        };
        // SAFETY: `open` requires names of the library `l`, whose functions `resolve` gets with their types.
        let api = unsafe { family.first(&LOADED, names, l.title, l.fix, &resolve) }?;
        let mut lt = Lt { api, handle: ptr::null_mut(), version: String::new(), context: context.clone() };
        KERNELS.check(context, api.f.matmul as usize)?;
        // SAFETY: the library writes one handle; the thread has a current context.
        let code = unsafe { (api.f.create)(&mut lt.handle) };
        lt.check("creating a handle", code)?;
        lt.version = match api.version {
            Version::Property(f) => {
                let mut v = [0; 3];
                for (which, v) in v.iter_mut().enumerate() {
                    // SAFETY: the library writes one number to `v`.
                    lt.check("querying the version", unsafe { f(which as c_int, v) })?;
                }
                format!("{}.{}.{}", v[0], v[1], v[2])
            }
            Version::Number(f) => {
                let mut v = 0;
                // SAFETY: the library writes one number to `v`; the handle was created above.
                lt.check("querying the version", unsafe { f(lt.handle, &mut v) })?;
                if v < OLDEST_HIP {
                    return Err(Error::unsupported(
                        format!("{} of version {}.{}", l.title, v / 100_000, v / 100 % 1000),
                        "Update ROCm to 6 or later",
                    ));
                }
                format!("{}.{}.{}", v / 100_000, v / 100 % 1000, v % 100)
            }
        };
        Ok(lt)
    }

    pub(super) fn describe(&self) -> String {
        format!("{} {}", self.api.library, self.version)
    }

    fn title(&self) -> &'static str {
        self.context.api.family.products.title
    }

    fn check(&self, call: &str, code: Code) -> Result<()> {
        match code {
            SUCCESS => Ok(()),
            _ => {
                let text = status(self.context.api.family.side, code);
                Err(failed(&self.context, self.title(), call, code, text))
            }
        }
    }

    /// A kernel for a product with the call's epilogue.
    pub(super) fn kernel(
        self: &Arc<Lt>,
        owner: u64,
        call: &CallForm<'_>,
        p: &Product,
        searcher: Option<Searcher<'_>>,
    ) -> Result<SimtKernel, Declined> {
        let n = self.api.numbers;
        let hip = self.context.api.family.side == Side::Hip;
        let epilogue = VendorEpilogue::of(call, &[p.m * p.batch * p.calls.len(), p.n], 1)?;
        if !epilogue.of_type(call, &[DType::F32, DType::F16, DType::BF16]) {
            return Err(Declined::because("epilogues are supported for f32, f16 and bf16"));
        }
        let mut code = match epilogue.activation {
            None => 0,
            Some(ScalarOp::Relu) => RELU,
            Some(ScalarOp::GeluTanh) => GELU,
            Some(_) => return Err(Declined::because("the library's gelu is the approximation by tanh")),
        };
        code |= if epilogue.bias.is_some() { BIAS } else { 0 };
        if !p.factors[0].is_native() {
            eight_bits_fit(p)?;
            if p.result == DType::F32 && call.precision == MatmulPrecision::Highest {
                return Err(Declined::because(
                    "products of 8-bit floats are summed with fewer digits than f32 has; the precision \"high\" allows that, and so do results in f16 or bf16",
                ));
            }
            if p.result == DType::F32 && epilogue.bias.is_some() {
                return Err(Declined::because(
                    "a product of 8-bit floats with a bias as epilogue needs a result in f16 or bf16",
                ));
            }
        }
        if p.factors[0] == DType::I8 && !hip {
            // The requirements of IMMA kernels with regular data ordering, according to `cublasLtMatmul`.
            let [a, b, c] = p.alignment(WORKSPACE_ALIGNMENT);
            let four = [p.n, p.k, p.a.ld, p.b.ld].iter().all(|d| d % 4 == 0) && a.min(b).min(c) >= 4;
            let steps = [p.a.step, p.b.step].iter().all(|s| s % 4 == 0);
            if !(p.a.by_rows && !p.b.by_rows && four && steps) {
                return Err(Declined::because(
                    "products of 8-bit integers need a row-major left factor, a column-major right one, and sizes in multiples of four",
                ));
            }
        }
        // hipBLASLt neither reports what alignment its algorithms require nor accepts alignments as
        // preferences, so every operand must permit the widest load.
        let bias =
            epilogue.bias.map_or(WORKSPACE_ALIGNMENT as u32, |b| alignment(b.offset, WORKSPACE_ALIGNMENT));
        if hip && p.alignment(WORKSPACE_ALIGNMENT).into_iter().chain([bias]).any(|a| a < WIDEST_LOAD) {
            return Err(Declined::because(format!(
                "operands that begin at multiples of {WIDEST_LOAD} bytes are needed"
            )));
        }
        // AMD's devices multiply f32 in full precision. Few have a faster mode, so it is not requested.
        let factors = p.factors[0];
        let loose = !hip && factors == DType::F32 && call.precision > MatmulPrecision::Highest;
        // On devices without TF32 the next compute type is used.
        let computes: &[(c_int, &str)] = match factors {
            DType::F64 => &[(n.f64, "f64")],
            DType::I8 => &[(n.i32, "i8")],
            DType::F32 if loose => &[(TF32, "tf32"), (n.f32, "f32")],
            d => &[(n.f32, if d == DType::F32 { "f32" } else { d.name() })],
        };
        self.context.enter().map_err(|e| Declined::because(e.to_string()))?;
        let most = if searcher.is_some() { MAX_ALGORITHMS } else { 1 };
        let mut reason = String::new();
        for (compute, name) in computes {
            let request = Request { product: p, compute: *compute, epilogue: code, bias: epilogue.bias };
            let plans = match Plan::all(self, &request, call.inputs.len(), most) {
                Ok(plans) => plans,
                Err(e) => {
                    reason = e;
                    continue;
                }
            };
            let on_top = match code {
                0 => "",
                e if e == BIAS => ".bias",
                e if e & RELU != 0 => ".relu",
                _ => ".gelu",
            };
            let title = self.title().to_lowercase();
            let name = format!("{title}.{name}{on_top}");
            let all = plans.into_iter().map(|plan| {
                let variant = Variant::new(&title, &plan.values());
                Ok(Algorithm {
                    variant,
                    kernel: SimtKernel::new(name.clone(), owner, call, plan.workspace, plan)?,
                })
            });
            let mut all = all.collect::<Result<Vec<_>, Declined>>()?;
            return Ok(match searcher {
                Some(s) => s.fastest(&request.key(&name), &self.version, all),
                None => all.swap_remove(0).kernel,
            });
        }
        Err(Declined::because(format!("{}: {reason}", self.title())))
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        if self.handle.is_null() {
            return;
        }
        let code = match self.context.visit() {
            // SAFETY: `open` created the handle, and only this call destroys it. Kernels keep this value
            // alive, so no kernel is left that uses the handle.
            Ok(_visit) => unsafe { (self.api.f.destroy)(self.handle) },
            Err(e) => {
                return tracing::warn!(
                    device = self.context.id,
                    "a library's handle could not be destroyed: {e}"
                );
            }
        };
        if code != SUCCESS {
            tracing::warn!(device = self.context.id, code, "a library's handle could not be destroyed");
        }
    }
}

/// Sets an attribute of one kind of descriptor.
type Set = unsafe extern "system" fn(Handle, c_int, *const c_void, usize) -> Code;

/// A descriptor of the library with its destructor and its setter.
struct Descriptor {
    raw: Handle,
    destroy: unsafe extern "system" fn(Handle) -> Code,
    set: Set,
}

// SAFETY: descriptors are plain data of the library, not bound to a thread.
unsafe impl Send for Descriptor {}
// SAFETY: descriptors are only read through `&self`; `set` takes `&mut self`.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    /// The descriptor that a call created, or the reason why it failed.
    fn made(
        side: Side,
        code: Code,
        raw: Handle,
        destroy: unsafe extern "system" fn(Handle) -> Code,
        set: Set,
    ) -> Result<Descriptor, String> {
        match code {
            SUCCESS => Ok(Descriptor { raw, destroy, set }),
            c => Err(format!("creating a descriptor gave status {c} ({})", status(side, c))),
        }
    }

    /// Sets an attribute. If the value is an address, it is only stored here; runs dereference it later.
    fn set<T: Copy>(&mut self, attribute: c_int, value: T) -> Result<(), String> {
        // SAFETY: `raw` is a live descriptor, and `set` the function for its kind, which checks the size of
        // the attribute. The `size_of::<T>()` bytes of `value` are read during the call.
        let code = unsafe { (self.set)(self.raw, attribute, ptr::from_ref(&value).cast(), size_of::<T>()) };
        if code == SUCCESS {
            Ok(())
        } else {
            Err(format!("setting attribute {attribute} gave status {code}"))
        }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the library created `raw` once, with a function whose counterpart is `destroy`.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// A product with its algorithm.
struct Plan {
    lt: Arc<Lt>,
    /// Locked, because each run sets its pointers to the bias and the scale.
    desc: Mutex<Descriptor>,
    /// The library's first factor, second factor and result.
    layouts: [Descriptor; 3],
    algorithm: Vec<u64>,
    workspace: usize,
    /// Number of inputs. They are followed by the result and the workspace in the list of buffers.
    inputs: usize,
    bias: Option<Bias>,
    scale: Option<Scale>,
    /// The bits of 1 in the scalar type, by which the product is multiplied. (The previous content of the
    /// result is multiplied by 0.)
    one: u64,
    /// Offsets in bytes of a, b and c, for each call.
    calls: Vec<[isize; 3]>,
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan")
            .field("workspace", &self.workspace)
            .field("calls", &self.calls)
            .finish_non_exhaustive()
    }
}

/// What the library is asked for.
struct Request<'a> {
    product: &'a Product,
    compute: c_int,
    epilogue: u32,
    bias: Option<Bias>,
}

impl Request<'_> {
    /// What the time of the product by the kernel `name` depends on.
    fn key(&self, name: &str) -> String {
        let p = self.product;
        let matrix = |m: &Matrix| {
            let order = if m.by_rows { "rows" } else { "columns" };
            format!("{order} {} step {}", m.ld, m.step)
        };
        let [a, b, c] = p.alignment(WORKSPACE_ALIGNMENT);
        let bias = self.bias.map_or(WORKSPACE_ALIGNMENT as u32, |b| alignment(b.offset, WORKSPACE_ALIGNMENT));
        format!(
            "{ALGORITHM}{name} to {}, {}x{}x{}, batch {}, {} calls, left by {}, right by {}, step {}, aligned to {a}, {b}, {c} and {bias}{}",
            p.result.name(),
            p.m,
            p.k,
            p.n,
            p.batch,
            p.calls.len(),
            matrix(&p.a),
            matrix(&p.b),
            p.step,
            if p.scale.is_some() { ", scaled" } else { "" },
        )
    }
}

/// The descriptors of a product.
struct Described {
    desc: Descriptor,
    /// The library's first factor, second factor and result.
    layouts: [Descriptor; 3],
}

impl Described {
    fn new(lt: &Lt, r: &Request<'_>) -> Result<Described, String> {
        let (f, n, side) = (&lt.api.f, lt.api.numbers, lt.context.api.family.side);
        let p = r.product;
        let number = |d: DType| type_number(side, d).ok_or_else(|| format!("it has no element type {d}"));
        let made =
            |code: Code, raw: Handle, destroy, set: Set| Descriptor::made(side, code, raw, destroy, set);
        // Products are scaled in the compute type.
        let scale = match p.factors[0] {
            DType::F64 => DType::F64,
            DType::I8 => DType::I32,
            _ => DType::F32,
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the library writes one handle to `raw`.
        let code = unsafe { (f.desc_create)(&mut raw, r.compute, number(scale)?) };
        let mut desc = made(code, raw, f.desc_destroy, f.desc_set)?;
        // The library is column-major, so the right factor comes first, and the rows of a row-major factor
        // are the library's columns.
        for (attribute, m) in n.transposes.into_iter().zip([&p.b, &p.a]) {
            desc.set(attribute, n.operations[usize::from(!m.by_rows)])?;
        }
        // The flags of an epilogue replace `DEFAULT`; they are not combined with it.
        desc.set(n.epilogue, if r.epilogue != 0 { r.epilogue } else { DEFAULT })?;
        if let Some(b) = r.bias {
            // The algorithm depends on the alignment of the bias pointer. The pointer is not dereferenced
            // here, so any address of the right alignment will do.
            desc.set(n.bias, u64::from(alignment(b.offset, WORKSPACE_ALIGNMENT)))?;
        }
        if p.scale.is_some() {
            // For the choice of the algorithm, only the presence of a scale matters. The pointer is not
            // dereferenced here.
            desc.set(n.scale, WORKSPACE_ALIGNMENT as u64)?;
        }
        let layout =
            |d: DType, rows: usize, cols: usize, ld: usize, step: isize| -> Result<Descriptor, String> {
                let mut raw = ptr::null_mut();
                // SAFETY: the library writes one handle to `raw`.
                let code =
                    unsafe { (f.layout_create)(&mut raw, number(d)?, rows as u64, cols as u64, ld as i64) };
                let mut layout = made(code, raw, f.layout_destroy, f.layout_set)?;
                if p.batch > 1 {
                    layout.set(n.batch[0], p.batch as i32)?;
                    layout.set(n.batch[1], step as i64)?;
                }
                Ok(layout)
            };
        // Describe a factor as it lies in memory: its contiguous axis is the library's rows.
        let factor = |d: DType, m: &Matrix, rows: usize, cols: usize| {
            let (x, y) = if m.by_rows { (cols, rows) } else { (rows, cols) };
            layout(d, x, y, m.ld, m.step)
        };
        let [da, db] = p.factors;
        let layouts = [
            factor(db, &p.b, p.k, p.n)?,
            factor(da, &p.a, p.m, p.k)?,
            layout(p.result, p.n, p.m, p.n, p.step)?,
        ];
        Ok(Described { desc, layouts })
    }

    /// The words and the workspace of at most `most` algorithms, the library's first choice first. There is
    /// at least one; if there is none, the error is the reason.
    fn algorithms(&self, lt: &Lt, p: &Product, most: usize) -> Result<Vec<(Vec<u64>, usize)>, String> {
        let (f, n, side) = (&lt.api.f, lt.api.numbers, lt.context.api.family.side);
        let mut raw = ptr::null_mut();
        // SAFETY: the library writes one handle to `raw`.
        let code = unsafe { (f.preference_create)(&mut raw) };
        let mut preference = Descriptor::made(side, code, raw, f.preference_destroy, f.preference_set)?;
        preference.set(MAX_WORKSPACE, WORKSPACE as u64)?;
        if let Some(alignments) = n.alignments {
            let [a, b, c] = p.alignment(WORKSPACE_ALIGNMENT);
            for (attribute, bytes) in alignments.into_iter().zip([b, a, c, c]) {
                preference.set(attribute, bytes)?;
            }
        }
        if let Some(attribute) = n.reductions {
            preference.set(attribute, IN_COMPUTE_TYPE)?;
        }
        // A result holds the algorithm, the size of the workspace (64 bits), the status and the share of the
        // device (32 bits each), and four unused 32-bit numbers.
        let size = n.algorithm + 4;
        let (mut answer, mut found) = (vec![0u64; size * most], 0);
        let [first, second, product] = &self.layouts;
        // SAFETY: the library writes at most `most` results of `size` words each to `answer`, and one number
        // to `found`. All descriptors are live.
        let code = unsafe {
            (f.heuristic)(
                lt.handle,
                self.desc.raw,
                first.raw,
                second.raw,
                product.raw,
                product.raw,
                preference.raw,
                most as c_int,
                answer.as_mut_ptr(),
                &mut found,
            )
        };
        let state = |r: &[u64]| (r[n.algorithm + 1] & u64::from(u32::MAX)) as Code;
        let found = usize::try_from(found).unwrap_or(0).min(most);
        let results = answer.chunks_exact(size).take(found);
        let failed = results.clone().map(state).find(|s| *s != SUCCESS);
        let good: Vec<(Vec<u64>, usize)> = results
            .filter(|r| state(r) == SUCCESS && r[n.algorithm] <= WORKSPACE as u64)
            .map(|r| (r[..n.algorithm].to_vec(), r[n.algorithm] as usize))
            .collect();
        match (code, good.is_empty()) {
            (SUCCESS, false) => Ok(good),
            (code, _) => {
                let c = if code == SUCCESS { failed.unwrap_or(code) } else { code };
                Err(format!("no algorithm for this product (status {c}, {})", status(side, c)))
            }
        }
    }
}

impl Plan {
    /// Plans for at most `most` algorithms, the library's first choice first. There is at least one; if there
    /// is none, the error is the reason.
    fn all(lt: &Arc<Lt>, r: &Request<'_>, inputs: usize, most: usize) -> Result<Vec<Plan>, String> {
        let p = r.product;
        let described = Described::new(lt, r)?;
        let algorithms = described.algorithms(lt, p, most)?;
        let mut unused = Some(described);
        // Products are scaled in the compute type.
        let one = match p.factors[0] {
            DType::F64 => 1f64.to_bits(),
            DType::I8 => 1,
            _ => u64::from(1f32.to_bits()),
        };
        let sizes = p.sizes();
        let calls: Vec<[isize; 3]> =
            p.calls.iter().map(|at| std::array::from_fn(|x| at[x] * sizes[x])).collect();
        let mut plans: Vec<Plan> = vec![];
        for (algorithm, workspace) in algorithms {
            let Described { desc, layouts } = match unused.take() {
                Some(d) => d,
                None => Described::new(lt, r)?,
            };
            plans.push(Plan {
                lt: lt.clone(),
                desc: Mutex::new(desc),
                layouts,
                algorithm,
                workspace,
                inputs,
                bias: r.bias,
                scale: p.scale,
                one,
                calls: calls.clone(),
            });
        }
        Ok(plans)
    }

    /// The algorithm as numbers that name it in the tuning cache: a digest of its words, and its workspace.
    fn values(&self) -> [(&'static str, u32); 3] {
        let bytes: Vec<u8> = self.algorithm.iter().flat_map(|w| w.to_le_bytes()).collect();
        let digest = cache::digest(&[&bytes]);
        [("algorithm", digest as u32), ("more", (digest >> 32) as u32), ("workspace", self.workspace as u32)]
    }
}

impl KernelCall for Plan {
    unsafe fn enqueue(&self, stream: Handle, at: &[Address]) -> Result<()> {
        let (lt, f) = (&self.lt, &self.lt.api.f);
        let [first, second, product] = &self.layouts;
        let zero = 0u64;
        let (a, b, c) = (at[0], at[1], at[self.inputs]);
        let workspace = at.get(self.inputs + 1).copied().unwrap_or(0);
        let mut desc = self.desc.lock().unwrap_or_else(|e| e.into_inner());
        let numbers = lt.api.numbers;
        let bias = self.bias.map(|b| (numbers.bias, b.input, b.offset));
        let scale = self.scale.map(|s| (numbers.scale, s.input, s.offset));
        for (attribute, input, offset) in bias.into_iter().chain(scale) {
            let pointer = at[input].wrapping_add_signed(offset as i64);
            desc.set(attribute, pointer).map_err(|why| Error::internal(format!("{}: {why}", lt.title())))?;
        }
        for [x, y, z] in &self.calls {
            let (a, b) = (a.wrapping_add_signed(*x as i64), b.wrapping_add_signed(*y as i64));
            let c = c.wrapping_add_signed(*z as i64);
            // SAFETY: the descriptors are live. `enqueue` requires a live stream and buffers that passed
            // `SimtKernel::check`: the views lie in them, and the result overlaps with no other buffer. The
            // library reads the scalars before the call returns.
            let code = unsafe {
                (f.matmul)(
                    lt.handle,
                    desc.raw,
                    ptr::from_ref(&self.one).cast(),
                    b,
                    first.raw,
                    a,
                    second.raw,
                    ptr::from_ref(&zero).cast(),
                    c,
                    product.raw,
                    c,
                    product.raw,
                    self.algorithm.as_ptr(),
                    workspace,
                    self.workspace,
                    stream,
                )
            };
            lt.check("a product", code)?;
        }
        Ok(())
    }
}
