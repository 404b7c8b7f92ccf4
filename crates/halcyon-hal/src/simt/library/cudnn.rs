//! cuDNN: convolutions, with the API that versions 8 and 9 share (`cudnn_ops.h`, `cudnn_cnn.h`).

use super::attention::{AttentionPlan, GENERATION, Key, SINCE};
use super::cudnn_graph::Graphs;
use super::epilogue::{Bias, VendorEpilogue};
use super::product::alignment;
use super::search::{Algorithm, Searcher};
use super::{
    KernelCall, MAX_ALGORITHMS, SimtKernel, WORKSPACE, WORKSPACE_ALIGNMENT, failed, functions_of_one,
};
use crate::library_call::CallForm;
use crate::simt::VendorLibrary;
use crate::simt::sys::{Address, Code, Context, Handle, SUCCESS};
use crate::tune::ALGORITHM;
use crate::{Declined, Result};
use halcyon_ir::kernel::tune::Variant;
use halcyon_ir::layout::dense_strides;
use halcyon_ir::ops;
use halcyon_ir::target::MatmulPrecision;
use halcyon_ir::{DType, ScalarOp};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};

functions_of_one! {
    /// Functions of the library.
    Functions {
        property: "cudnnGetProperty", (c_int, *mut c_int);
        create: "cudnnCreate", (*mut Handle);
        destroy: "cudnnDestroy", (Handle);
        set_stream: "cudnnSetStream", (Handle, Handle);
        tensor_create: "cudnnCreateTensorDescriptor", (*mut Handle);
        tensor_destroy: "cudnnDestroyTensorDescriptor", (Handle);
        tensor_set: "cudnnSetTensorNdDescriptor", (Handle, c_int, c_int, *const c_int, *const c_int);
        filter_create: "cudnnCreateFilterDescriptor", (*mut Handle);
        filter_destroy: "cudnnDestroyFilterDescriptor", (Handle);
        filter_set: "cudnnSetFilterNdDescriptor", (Handle, c_int, c_int, c_int, *const c_int);
        conv_create: "cudnnCreateConvolutionDescriptor", (*mut Handle);
        conv_destroy: "cudnnDestroyConvolutionDescriptor", (Handle);
        conv_set: "cudnnSetConvolutionNdDescriptor",
            (Handle, c_int, *const c_int, *const c_int, *const c_int, c_int, c_int);
        conv_groups: "cudnnSetConvolutionGroupCount", (Handle, c_int);
        conv_math: "cudnnSetConvolutionMathType", (Handle, c_int);
        activation_create: "cudnnCreateActivationDescriptor", (*mut Handle);
        activation_destroy: "cudnnDestroyActivationDescriptor", (Handle);
        activation_set: "cudnnSetActivationDescriptor", (Handle, c_int, c_int, f64);
        algorithms: "cudnnGetConvolutionForwardAlgorithm_v7",
            (Handle, Handle, Handle, Handle, Handle, c_int, *mut c_int, *mut Performance);
        workspace: "cudnnGetConvolutionForwardWorkspaceSize",
            (Handle, Handle, Handle, Handle, Handle, c_int, *mut usize);
        forward: "cudnnConvolutionForward",
            (Handle, *const c_void, Handle, Address, Handle, Address, Handle, c_int, Address, usize, *const c_void, Handle, Address);
        forward_ending: "cudnnConvolutionBiasActivationForward",
            (Handle, *const c_void, Handle, Address, Handle, Address, Handle, c_int, Address, usize, *const c_void, Handle, Address,
             Handle, Address, Handle, Handle, Address);
    }
}

/// `cudnnConvolutionFwdAlgoPerf_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Performance {
    algorithm: c_int,
    status: c_int,
    time: f32,
    memory: usize,
    deterministic: c_int,
    math: c_int,
    reserved: [c_int; 3],
}

/// The library's name in messages.
pub(super) const TITLE: &str = "cuDNN";
/// Layout of filters: channels before spatial axes.
const NCHW: c_int = 0;
const CROSS_CORRELATION: c_int = 1;
const DETERMINISTIC: c_int = 1;
/// Math modes: the data type's default (TF32 for f32), tensor cores, exact f32.
const DEFAULT_MATH: c_int = 0;
const TENSOR_MATH: c_int = 1;
const FMA_MATH: c_int = 3;
const RELU: c_int = 1;
const IDENTITY: c_int = 5;
const PROPAGATE_NAN: c_int = 1;
/// Algorithms that compute a convolution as a matrix product: implicitly (0, 1) and explicitly (2). The
/// others transform the image, which loses precision.
const PRODUCTS: [c_int; 3] = [0, 1, 2];
/// The only algorithm that supports a bias without an activation.
const PRECOMPUTED: c_int = 1;
/// Convolutions with fewer multiply-adds use a generated kernel.
const MIN_MULTIPLY_ADDS: usize = 1 << 15;

pub(super) fn type_number(d: DType) -> Option<c_int> {
    Some(match d {
        DType::F32 => 0,
        DType::F64 => 1,
        DType::F16 => 2,
        DType::BF16 => 9,
        _ => return None,
    })
}

/// Status codes of version 9 (the thousands give the category) and of version 8 (below 1000).
pub(super) fn status(code: Code) -> &'static str {
    match code {
        1 | 1001 => "not initialised",
        2 | 4003 | 4004 => "out of memory",
        3 | 5 | 2000..3000 => "an invalid parameter",
        6 | 3007 => "not for this architecture",
        8 | 5000..6000 => "the kernel failed",
        9 | 3000..4000 => "not supported",
        1000..2000 => "the library's parts do not match",
        _ => "internal error",
    }
}

/// The loaded library.
pub(super) struct Api {
    f: Functions,
    /// Functions for graphs of operations; the error is the name of a missing one.
    graphs: Result<Graphs, &'static str>,
    library: String,
}

/// The handle, used by one thread at a time because it is bound to a stream.
pub(super) struct Raw(pub Handle);
// SAFETY: an opaque handle of the library; its mutex lets one thread use it at a time.
unsafe impl Send for Raw {}

/// A handle of the library on one device.
pub(super) struct Dnn {
    api: &'static Api,
    pub(super) handle: Mutex<Raw>,
    version: [c_int; 3],
    pub(super) context: Arc<Context>,
    /// Plans of attention, sorted by last use, most recent last. Plans hold no reference to this value.
    pub(super) plans: Mutex<Vec<(Key, Arc<AttentionPlan>)>>,
}

impl std::fmt::Debug for Dnn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Dnn({} {})", self.api.library, self.version())
    }
}

type Dims = SmallVec<[c_int; 5]>;

/// The parameters of a convolution, with at least two spatial axes.
#[derive(Clone, Debug)]
pub(super) struct Conv {
    x: Dims,
    w: Dims,
    y: Dims,
    pad: Dims,
    stride: Dims,
    dilation: Dims,
    groups: c_int,
    dtype: DType,
    /// Offsets in bytes of the first elements of x and w.
    offsets: [isize; 2],
    /// The result's shape for the epilogue: batch, channels, and elements per channel.
    planes: [usize; 3],
}

impl Conv {
    pub(super) fn of(call: &CallForm<'_>, c: &ops::Conv) -> Result<Conv, Declined> {
        let no = |why: &str| Err(Declined::because(why));
        let [x, w, ..] = call.inputs else { return no("two operands are needed") };
        let spread: SmallVec<[usize; 2]> =
            (0..2).filter(|i| !call.inputs[*i].view.has_dense_strides()).collect();
        if !spread.is_empty() {
            return Err(Declined::needs_dense(spread));
        }
        if x.dtype != w.dtype || type_number(x.dtype).is_none() || call.outputs[0].dtype != x.dtype {
            return no("cuDNN's convolutions take f32, f64, f16 and bf16");
        }
        let spatial = c.stride.len();
        if !(1..=3).contains(&spatial) {
            return no("cuDNN takes one to three spatial axes");
        }
        if c.input_dilation.iter().any(|d| *d != 1) {
            return no("a transposed convolution uses a generated kernel");
        }
        if c.pad.iter().any(|(lo, hi)| lo != hi || *lo < 0) {
            return no("cuDNN takes equal padding at both ends");
        }
        let (xs, ws) = (&x.view.shape, &w.view.shape);
        let mut out = vec![xs[0], ws[0]];
        for i in 0..spatial {
            let room = xs[2 + i] + 2 * c.pad[i].0 as usize;
            let reach = c.dilation[i] * (ws[2 + i].max(1) - 1) + 1;
            if ws[2 + i] == 0 || room < reach {
                return no("the window is larger than the image");
            }
            out.push((room - reach) / c.stride[i] + 1);
        }
        let size = out.iter().product::<usize>();
        if size != call.outputs[0].view.numel() {
            return no("the output buffer does not have the size of the result");
        }
        let work = size.saturating_mul(ws[1..].iter().product());
        if work < MIN_MULTIPLY_ADDS {
            return Err(Declined::because(format!(
                "a call of fewer than {MIN_MULTIPLY_ADDS} multiply-adds uses a generated kernel"
            )));
        }
        // The library requires at least two spatial axes. If there is one, another of size 1 is put before
        // it.
        let wide = |head: &[usize], rest: &[usize], fill: usize| -> Option<Dims> {
            let fill = [fill].into_iter().filter(|_| spatial == 1);
            let all = head.iter().copied().chain(fill).chain(rest.iter().copied());
            all.map(|d| c_int::try_from(d).ok()).collect()
        };
        let pads: Vec<usize> = c.pad.iter().map(|p| p.0 as usize).collect();
        let sizes = (
            wide(&xs[..2], &xs[2..], 1),
            wide(&ws[..2], &ws[2..], 1),
            wide(&out[..2], &out[2..], 1),
            wide(&[], &pads, 0),
            wide(&[], &c.stride, 1),
            wide(&[], &c.dilation, 1),
        );
        let (Some(x_dims), Some(w_dims), Some(y), Some(pad), Some(stride), Some(dilation)) = sizes else {
            return no("a dimension is 2³¹ or more");
        };
        if [&x.view, &w.view, &call.outputs[0].view].iter().any(|v| v.numel() > i32::MAX as usize) {
            return no("a tensor has 2³¹ elements or more");
        }
        let size = x.dtype.size() as isize;
        Ok(Conv {
            x: x_dims,
            w: w_dims,
            y,
            pad,
            stride,
            dilation,
            groups: c.groups as c_int,
            dtype: x.dtype,
            offsets: [x.view.offset * size, w.view.offset * size],
            planes: [out[0], out[1], out[2..].iter().product()],
        })
    }
}

impl Conv {
    /// What the time of the convolution by the kernel `name` depends on.
    fn key(&self, name: &str) -> String {
        let join = |d: &Dims| d.iter().map(|n| n.to_string()).collect::<Vec<_>>().join("x");
        let at = self.offsets.map(|o| alignment(o, WORKSPACE_ALIGNMENT));
        format!(
            "{ALGORITHM}{name}, image {}, filters {}, padding {}, stride {}, dilation {}, {} groups, aligned to {} and {}",
            join(&self.x),
            join(&self.w),
            join(&self.pad),
            join(&self.stride),
            join(&self.dilation),
            self.groups,
            at[0],
            at[1]
        )
    }
}

impl Dnn {
    /// Loads the library and opens it for a device.
    ///
    /// # Safety
    /// The contract of [`Family::first`](super::super::Family::first), for the library `l`.
    pub(super) unsafe fn open(
        context: &Arc<Context>,
        l: &'static VendorLibrary,
        names: &[String],
    ) -> Result<Dnn> {
        static LOADED: Mutex<BTreeMap<String, &'static Api>> = Mutex::new(BTreeMap::new());
        let family = context.api.family;
        let resolve = |lib: &libloading::Library, name: &str| {
            let f = Functions::resolve(lib, family.side)?;
            Ok(Api { f, graphs: Graphs::resolve(lib, family.side), library: name.into() })
        };
        // SAFETY: `open` requires names of the library `l`, whose functions `resolve` gets with their types.
        let api = unsafe { family.first(&LOADED, names, l.title, l.fix, &resolve) }?;
        let mut version = [0; 3];
        for (which, v) in version.iter_mut().enumerate() {
            // SAFETY: the library writes one number to `v`.
            let code = unsafe { (api.f.property)(which as c_int, v) };
            check(context, "querying the version", code)?;
        }
        let mut raw = ptr::null_mut();
        // SAFETY: the library writes one handle to `raw`; the thread has a current context.
        check(context, "creating a handle", unsafe { (api.f.create)(&mut raw) })?;
        let (handle, plans) = (Mutex::new(Raw(raw)), Mutex::default());
        Ok(Dnn { api, handle, version, context: context.clone(), plans })
    }

    fn version(&self) -> String {
        let [major, minor, patch] = self.version;
        format!("{major}.{minor}.{patch}")
    }

    pub(super) fn describe(&self) -> String {
        let attention =
            self.graphs().map_or_else(|why| format!("no attention: {why}"), |_| "with attention".into());
        format!("{} {}, {attention}", self.api.library, self.version())
    }

    /// Functions for graphs of operations, or why they cannot be used.
    pub(super) fn graphs(&self) -> Result<&'static Graphs, String> {
        let graphs = self.api.graphs.as_ref().map_err(|f| format!("the library has no function {f}"))?;
        if self.version < SINCE {
            return Err(format!("cuDNN {} is older than 9.10.2", self.version()));
        }
        let (mut generation, device) = (0, &self.context);
        let major = device.api.family.attributes.major;
        // SAFETY: CUDA writes one number to `generation`, and listed the device number.
        let code = unsafe { (device.api.f.device_attribute)(&mut generation, major, device.device) };
        match code == SUCCESS && generation >= GENERATION {
            true => Ok(graphs),
            false => Err(format!("sm_{GENERATION}0 or later is needed")),
        }
    }

    /// Locks the handle and binds it to a stream.
    ///
    /// # Safety
    /// `stream` must be a live stream of this library's device, until the guard is dropped.
    pub(super) unsafe fn bind(&self, stream: Handle) -> Result<MutexGuard<'_, Raw>> {
        let handle = self.handle.lock().unwrap_or_else(|e| e.into_inner());
        // SAFETY: `handle` is live and locked; `bind` requires a live stream.
        check(&self.context, "choosing a stream", unsafe { (self.api.f.set_stream)(handle.0, stream) })?;
        Ok(handle)
    }

    pub(super) fn kernel(
        self: &Arc<Dnn>,
        owner: u64,
        call: &CallForm<'_>,
        conv: Conv,
        searcher: Option<Searcher<'_>>,
    ) -> Result<SimtKernel, Declined> {
        let epilogue = VendorEpilogue::of(call, &conv.planes, 1)?;
        // For other types, the library does not report before a run whether it supports a bias.
        if !epilogue.of_type(call, &[DType::F32, DType::F16]) {
            return Err(Declined::because("epilogues are supported for f32 and f16"));
        }
        let activation = match (epilogue.activation, epilogue.bias) {
            (None, _) => IDENTITY,
            (Some(ScalarOp::Relu), Some(_)) => RELU,
            _ => return Err(Declined::because("cuDNN's epilogue is a bias, or a bias and relu")),
        };
        let bias = epilogue.bias.map(|b| (b, activation));
        let loose = call.precision > MatmulPrecision::Highest;
        self.context.enter().map_err(|e| Declined::because(e.to_string()))?;
        let most = if searcher.is_some() { MAX_ALGORITHMS } else { 1 };
        let plans = Plan::all(self, &conv, bias, loose, most)
            .map_err(|why| Declined::because(format!("cuDNN: {why}")))?;
        let on_top = match bias {
            None => "",
            Some((_, RELU)) => ".relu",
            Some(_) => ".bias",
        };
        let types = if conv.dtype == DType::F32 && loose { "tf32" } else { conv.dtype.name() };
        let name = format!("cudnn.conv.{types}{on_top}");
        let all = plans.into_iter().map(|plan| {
            let values = [("algorithm", plan.algorithm as u32), ("math", plan.math as u32)];
            let kernel = SimtKernel::new(name.clone(), owner, call, plan.workspace, plan)?;
            Ok(Algorithm { variant: Variant::new("cudnn", &values), kernel })
        });
        let mut all = all.collect::<Result<Vec<_>, Declined>>()?;
        Ok(match searcher {
            Some(s) => s.fastest(&conv.key(&name), &self.version(), all),
            None => all.swap_remove(0).kernel,
        })
    }
}

fn check(context: &Context, call: &str, code: Code) -> Result<()> {
    match code {
        SUCCESS => Ok(()),
        _ => Err(failed(context, TITLE, call, code, status(code))),
    }
}

impl Drop for Dnn {
    fn drop(&mut self) {
        let raw = self.handle.lock().unwrap_or_else(|e| e.into_inner()).0;
        let visit = self.context.visit();
        // Plans must be dropped before the handle.
        self.plans.lock().unwrap_or_else(|e| e.into_inner()).clear();
        if visit.is_err() {
            return;
        }
        // SAFETY: `open` created the handle, and only this call destroys it. Kernels hold this value, so no
        // kernel is left that uses the handle.
        let code = unsafe { (self.api.f.destroy)(raw) };
        if code != SUCCESS {
            tracing::warn!(device = self.context.id, code, "a library's handle could not be destroyed");
        }
    }
}

/// A descriptor of the library.
struct Descriptor {
    raw: Handle,
    destroy: unsafe extern "system" fn(Handle) -> Code,
}

// SAFETY: descriptors are plain data of the library, not modified after construction.
unsafe impl Send for Descriptor {}
// SAFETY: descriptors are not modified after construction, so concurrent reads are safe.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    /// # Safety
    /// `create` must be a function of the library that only writes a handle, and `destroy` its counterpart.
    unsafe fn new(
        create: unsafe extern "system" fn(*mut Handle) -> Code,
        destroy: unsafe extern "system" fn(Handle) -> Code,
        set: impl FnOnce(Handle) -> Code,
    ) -> Result<Descriptor, String> {
        let mut raw = ptr::null_mut();
        // SAFETY: `new` requires a function that writes one handle to `raw`.
        let code = unsafe { create(&mut raw) };
        if code != SUCCESS {
            return Err(format!("creating a descriptor gave status {code} ({})", status(code)));
        }
        let made = Descriptor { raw, destroy };
        match set(raw) {
            SUCCESS => Ok(made),
            code => Err(format!("setting a descriptor gave status {code} ({})", status(code))),
        }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the library created `raw` once, with a function whose counterpart is `destroy`.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// The epilogue: a bias and an activation.
struct DnnEpilogue {
    bias: Bias,
    shape: Descriptor,
    activation: Descriptor,
}

/// A convolution with its algorithm.
struct Plan {
    dnn: Arc<Dnn>,
    d: Described,
    algorithm: c_int,
    math: c_int,
    workspace: usize,
    offsets: [isize; 2],
    /// The bits of the number 1 in the type of the scalars.
    one: u64,
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan")
            .field("algorithm", &self.algorithm)
            .field("workspace", &self.workspace)
            .finish_non_exhaustive()
    }
}

fn strides(dims: &[c_int]) -> Dims {
    let sizes: Vec<usize> = dims.iter().map(|d| *d as usize).collect();
    dense_strides(&sizes).iter().map(|s| *s as c_int).collect()
}

/// The descriptors of a convolution.
struct Described {
    x: Descriptor,
    w: Descriptor,
    y: Descriptor,
    conv: Descriptor,
    on_top: Option<DnnEpilogue>,
}

impl Described {
    fn new(f: &Functions, c: &Conv, bias: Option<(Bias, c_int)>, math: c_int) -> Result<Described, String> {
        let number = type_number(c.dtype).ok_or_else(|| format!("it has no element type {}", c.dtype))?;
        let tensor = |dims: &[c_int]| {
            let steps = strides(dims);
            let set = |t| {
                // SAFETY: `dims` and `steps` both have `dims.len()` numbers.
                unsafe { (f.tensor_set)(t, number, dims.len() as c_int, dims.as_ptr(), steps.as_ptr()) }
            };
            // SAFETY: `tensor_create` only writes a handle, and `tensor_destroy` is its counterpart.
            unsafe { Descriptor::new(f.tensor_create, f.tensor_destroy, set) }
        };
        let (x, y) = (tensor(&c.x)?, tensor(&c.y)?);
        let set = |w| {
            // SAFETY: `c.w` has `c.w.len()` numbers.
            unsafe { (f.filter_set)(w, number, NCHW, c.w.len() as c_int, c.w.as_ptr()) }
        };
        // SAFETY: `filter_create` only writes a handle, and `filter_destroy` is its counterpart.
        let w = unsafe { Descriptor::new(f.filter_create, f.filter_destroy, set) }?;
        // 16-bit floats are summed in f32.
        let sums = if c.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let sums = type_number(sums).unwrap_or_default();
        let set = |conv| {
            let (pad, stride, dilation) = (c.pad.as_ptr(), c.stride.as_ptr(), c.dilation.as_ptr());
            // SAFETY: the three lists each have `c.pad.len()` numbers.
            let steps = [
                unsafe {
                    (f.conv_set)(conv, c.pad.len() as c_int, pad, stride, dilation, CROSS_CORRELATION, sums)
                },
                // SAFETY: `conv` is the live descriptor that `Descriptor::new` passes.
                unsafe { (f.conv_groups)(conv, c.groups) },
                // SAFETY: `conv` is the live descriptor that `Descriptor::new` passes.
                unsafe { (f.conv_math)(conv, math) },
            ];
            steps.into_iter().find(|code| *code != SUCCESS).unwrap_or(SUCCESS)
        };
        // SAFETY: `conv_create` only writes a handle, and `conv_destroy` is its counterpart.
        let conv = unsafe { Descriptor::new(f.conv_create, f.conv_destroy, set) }?;
        let on_top = match bias {
            None => None,
            Some((bias, activation)) => {
                let mut dims: Dims = c.y.iter().map(|_| 1).collect();
                dims[1] = c.y[1];
                let set = |a| {
                    // SAFETY: `a` is the live descriptor that `Descriptor::new` passes.
                    unsafe { (f.activation_set)(a, activation, PROPAGATE_NAN, 0.0) }
                };
                // SAFETY: `activation_create` only writes a handle, and `activation_destroy` is its
                // counterpart.
                let activation = unsafe { Descriptor::new(f.activation_create, f.activation_destroy, set) }?;
                Some(DnnEpilogue { bias, shape: tensor(&dims)?, activation })
            }
        };
        Ok(Described { x, w, y, conv, on_top })
    }
}

impl Plan {
    /// Plans for at most `most` algorithms, the library's first choice first. There is at least one; if there
    /// is none, the error is the reason.
    fn all(
        dnn: &Arc<Dnn>,
        c: &Conv,
        bias: Option<(Bias, c_int)>,
        loose: bool,
        most: usize,
    ) -> Result<Vec<Plan>, String> {
        let f = &dnn.api.f;
        // Only f32 may be rounded (to TF32), and only if the precision allows it.
        let exact = !loose || c.dtype != DType::F32;
        let plain = c.dtype == DType::F32 && exact;
        let math = match c.dtype {
            DType::F16 | DType::BF16 => TENSOR_MATH,
            DType::F32 if plain => FMA_MATH,
            _ => DEFAULT_MATH,
        };
        let d = Described::new(f, c, bias, math)?;
        let alone = bias.is_some_and(|(_, a)| a == IDENTITY);
        let (mut found, mut all) = (0, [Performance::default(); MAX_ALGORITHMS]);
        let handle = dnn.handle.lock().unwrap_or_else(|e| e.into_inner());
        // SAFETY: the library writes at most `MAX_ALGORITHMS` entries to `all`, and one number to `found`.
        // The handle and all descriptors are live.
        let code = unsafe {
            (f.algorithms)(
                handle.0,
                d.x.raw,
                d.w.raw,
                d.conv.raw,
                d.y.raw,
                MAX_ALGORITHMS as c_int,
                &mut found,
                all.as_mut_ptr(),
            )
        };
        drop(handle);
        if code != SUCCESS {
            return Err(format!("no algorithm for this convolution (status {code}, {})", status(code)));
        }
        let fits = |p: &&Performance| {
            p.status == SUCCESS
                && p.deterministic == DETERMINISTIC
                && p.memory <= WORKSPACE
                && (!exact || PRODUCTS.contains(&p.algorithm))
                && (!alone || p.algorithm == PRECOMPUTED)
        };
        let found = usize::try_from(found).unwrap_or(0).min(MAX_ALGORITHMS);
        let mut plans: Vec<Plan> = vec![];
        let mut first = None;
        let mut unused = Some(d);
        for p in all[..found].iter().filter(fits).take(most) {
            let math = if plain { FMA_MATH } else { p.math };
            let same = |q: &Plan| q.algorithm == p.algorithm && q.math == math;
            if plans.iter().any(same) {
                continue;
            }
            let made = match unused.take() {
                Some(d) => Ok(d),
                None => Described::new(f, c, bias, math),
            };
            match made.and_then(|d| Plan::new(dnn, c, d, p.algorithm, math)) {
                Ok(plan) => plans.push(plan),
                Err(why) => first = first.or(Some(why)),
            }
        }
        match (plans.is_empty(), first) {
            (false, _) => Ok(plans),
            (true, Some(why)) => Err(why),
            (true, None) => Err(format!(
                "none of {found} algorithms is deterministic, exact enough and within {WORKSPACE} bytes of workspace"
            )),
        }
    }

    /// A plan for one algorithm.
    fn new(dnn: &Arc<Dnn>, c: &Conv, d: Described, algorithm: c_int, math: c_int) -> Result<Plan, String> {
        let f = &dnn.api.f;
        let mut workspace = 0;
        let handle = dnn.handle.lock().unwrap_or_else(|e| e.into_inner());
        // SAFETY: the library writes one number to `workspace`. The handle is locked, and all descriptors are
        // live.
        let steps = [unsafe { (f.conv_math)(d.conv.raw, math) }, unsafe {
            (f.workspace)(handle.0, d.x.raw, d.w.raw, d.conv.raw, d.y.raw, algorithm, &mut workspace)
        }];
        drop(handle);
        if let Some(code) = steps.into_iter().find(|code| *code != SUCCESS) {
            return Err(format!("algorithm {algorithm} gave status {code} ({})", status(code)));
        }
        if workspace > WORKSPACE {
            return Err(format!("it needs {workspace} bytes of workspace"));
        }
        let one = if c.dtype == DType::F64 { 1f64.to_bits() } else { u64::from(1f32.to_bits()) };
        Ok(Plan { dnn: dnn.clone(), d, algorithm, math, workspace, offsets: c.offsets, one })
    }
}

impl KernelCall for Plan {
    unsafe fn enqueue(&self, stream: Handle, at: &[Address]) -> Result<()> {
        let (dnn, f) = (&self.dnn, &self.dnn.api.f);
        let inputs = 2 + usize::from(self.d.on_top.is_some());
        let place = |i: usize, by: isize| at[i].wrapping_add_signed(by as i64);
        let (x, w, y) = (place(0, self.offsets[0]), place(1, self.offsets[1]), at[inputs]);
        let room = at.get(inputs + 1).copied().unwrap_or(0);
        let (one, zero): (*const c_void, _) = (ptr::from_ref(&self.one).cast(), 0u64);
        let zero: *const c_void = ptr::from_ref(&zero).cast();
        // SAFETY: `enqueue` requires a live stream of this device.
        let handle = unsafe { dnn.bind(stream) }?;
        // SAFETY: the descriptors are live. `enqueue` requires buffers that passed `SimtKernel::check`: the
        // operands lie in them, and the result overlaps with no other buffer. The library reads the scalars
        // before the call returns.
        let code = unsafe {
            match &self.d.on_top {
                None => (f.forward)(
                    handle.0,
                    one,
                    self.d.x.raw,
                    x,
                    self.d.w.raw,
                    w,
                    self.d.conv.raw,
                    self.algorithm,
                    room,
                    self.workspace,
                    zero,
                    self.d.y.raw,
                    y,
                ),
                Some(o) => (f.forward_ending)(
                    handle.0,
                    one,
                    self.d.x.raw,
                    x,
                    self.d.w.raw,
                    w,
                    self.d.conv.raw,
                    self.algorithm,
                    room,
                    self.workspace,
                    zero,
                    self.d.y.raw,
                    y,
                    o.shape.raw,
                    place(o.bias.input, o.bias.offset),
                    o.activation.raw,
                    self.d.y.raw,
                    y,
                ),
            }
        };
        check(&dnn.context, "a convolution", code)
    }
}
