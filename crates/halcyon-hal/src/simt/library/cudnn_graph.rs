//! cuDNN's backend API (`cudnn_graph.h`): graphs of operations.
//!
//! A descriptor is created, given attributes and finalised. It does not change afterwards. Operations
//! connected by virtual tensors form a graph. The library proposes engines (implementations) of the graph,
//! best first. It makes an execution plan of an engine. In this file, a plan is such an execution plan; it
//! runs with a pack of addresses.

use super::cudnn::status;
use super::functions_of_one;
use crate::simt::sys::{Code, Handle, SUCCESS, Side};
use std::ffi::{c_char, c_int, c_void};
use std::{fmt, ptr};

functions_of_one! {
    /// Functions of the API.
    Functions {
        create: "cudnnBackendCreateDescriptor", (c_int, *mut Handle);
        destroy: "cudnnBackendDestroyDescriptor", (Handle);
        finalize: "cudnnBackendFinalize", (Handle);
        set: "cudnnBackendSetAttribute", (Handle, c_int, c_int, i64, *const c_void);
        get: "cudnnBackendGetAttribute", (Handle, c_int, c_int, i64, *mut i64, *mut c_void);
        execute: "cudnnBackendExecute", (Handle, Handle, Handle);
    }
}

type LastError = unsafe extern "system" fn(*mut c_char, usize);

/// The loaded API.
pub(super) struct Graphs {
    f: Functions,
    /// cuDNN has this function since version 9.
    last_error: Option<LastError>,
}

/// A type of descriptor, and its name in messages.
#[derive(Clone, Copy)]
struct Kind(c_int, &'static str);

const POINTWISE: Kind = Kind(0, "the settings of an element-wise operation");
const ENGINE: Kind = Kind(2, "an engine");
const CONFIG: Kind = Kind(3, "an engine's configuration");
const HEURISTICS: Kind = Kind(4, "the choice of engines");
const PLAN: Kind = Kind(5, "a plan");
const OPERATION_POINTWISE: Kind = Kind(13, "an element-wise operation");
const GRAPH: Kind = Kind(15, "a graph");
const PACK: Kind = Kind(16, "a pack of addresses");
const TENSOR: Kind = Kind(17, "a tensor");
const MATMUL: Kind = Kind(18, "the settings of a product");
const OPERATION_MATMUL: Kind = Kind(19, "a product");
const REDUCTION: Kind = Kind(21, "the settings of a reduction");
const OPERATION_REDUCTION: Kind = Kind(22, "a reduction");

/// Types of attributes (`cudnnBackendAttributeType_t`).
mod is {
    use std::ffi::c_int;
    pub(super) const HANDLE: c_int = 0;
    pub(super) const DATA_TYPE: c_int = 1;
    pub(super) const BOOLEAN: c_int = 2;
    pub(super) const INT64: c_int = 3;
    pub(super) const POINTER: c_int = 6;
    pub(super) const HEURISTIC_MODE: c_int = 8;
    pub(super) const NUMERICAL_NOTE: c_int = 11;
    pub(super) const POINTWISE_MODE: c_int = 14;
    pub(super) const DESCRIPTION: c_int = 15;
    pub(super) const REDUCTION_OPERATOR: c_int = 18;
}

/// Names of attributes (`cudnnBackendAttributeName_t`).
mod at {
    use std::ffi::c_int;
    pub(super) const POINTWISE_MODE: c_int = 0;
    pub(super) const POINTWISE_PRECISION: c_int = 1;
    pub(super) const POINTWISE_AXIS: c_int = 9;
    pub(super) const HEURISTICS_MODE: c_int = 200;
    pub(super) const HEURISTICS_GRAPH: c_int = 201;
    pub(super) const HEURISTICS_RESULTS: c_int = 202;
    pub(super) const CONFIG_ENGINE: c_int = 300;
    pub(super) const PLAN_HANDLE: c_int = 400;
    pub(super) const PLAN_CONFIG: c_int = 401;
    pub(super) const PLAN_WORKSPACE: c_int = 402;
    pub(super) const OPERATION_POINTWISE: c_int = 750;
    pub(super) const OPERATION_POINTWISE_X: c_int = 751;
    pub(super) const OPERATION_POINTWISE_B: c_int = 752;
    pub(super) const OPERATION_POINTWISE_Y: c_int = 753;
    pub(super) const OPERATION_POINTWISE_T: c_int = 758;
    pub(super) const GRAPH_HANDLE: c_int = 800;
    pub(super) const GRAPH_OPERATIONS: c_int = 801;
    pub(super) const TENSOR_ALIGNMENT: c_int = 900;
    pub(super) const TENSOR_TYPE: c_int = 901;
    pub(super) const TENSOR_SHAPE: c_int = 902;
    pub(super) const TENSOR_STRIDES: c_int = 903;
    pub(super) const TENSOR_ID: c_int = 906;
    pub(super) const TENSOR_IS_VIRTUAL: c_int = 907;
    pub(super) const TENSOR_IS_VALUE: c_int = 908;
    pub(super) const PACK_IDS: c_int = 1000;
    pub(super) const PACK_POINTERS: c_int = 1001;
    pub(super) const PACK_WORKSPACE: c_int = 1003;
    pub(super) const ENGINE_NOTES: c_int = 1303;
    pub(super) const MATMUL_PRECISION: c_int = 1500;
    pub(super) const OPERATION_MATMUL_A: c_int = 1520;
    pub(super) const OPERATION_MATMUL_B: c_int = 1521;
    pub(super) const OPERATION_MATMUL_C: c_int = 1522;
    pub(super) const OPERATION_MATMUL: c_int = 1523;
    pub(super) const REDUCTION_OPERATOR: c_int = 1600;
    pub(super) const REDUCTION_PRECISION: c_int = 1601;
    pub(super) const OPERATION_REDUCTION_X: c_int = 1610;
    pub(super) const OPERATION_REDUCTION_Y: c_int = 1611;
    pub(super) const OPERATION_REDUCTION: c_int = 1612;
}

/// `cudnnPointwiseMode_t`.
#[derive(Clone, Copy)]
pub(super) enum Pointwise {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    GreaterOrEqual = 303,
    /// Indices along an axis.
    Index = 501,
    /// The first operand if the third is true, else the second.
    Select = 601,
}

/// `cudnnReduceTensorOp_t`.
#[derive(Clone, Copy)]
pub(super) enum Reduce {
    Add = 0,
    Max = 3,
}

/// `cudnnDataType_t`.
pub(super) const F32: c_int = 0;
pub(super) const I32: c_int = 4;
pub(super) const BOOLEAN: c_int = 11;

/// Heuristics by decision trees.
const MODE_A: c_int = 3;
/// Numerical note of an engine: results may differ between runs.
const NONDETERMINISTIC: c_int = 4;
/// Alignment of a tensor's address in bytes.
pub(super) const ALIGNMENT: i64 = 16;
const MAX_ENGINES: usize = 16;
const MAX_NOTES: usize = 32;
/// Maximum length of an error text.
const MAX_TEXT: usize = 256;

/// A call that failed. Either the library rejected it, or [`Builder::keep`] did not make it (code -1),
/// because an attribute refers to something outside of the graph.
#[derive(Debug)]
pub struct CallError {
    pub call: String,
    pub code: Code,
    pub text: String,
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} gave status {} ({})", self.call, self.code, self.text)
    }
}

impl From<CallError> for String {
    fn from(r: CallError) -> String {
        r.to_string()
    }
}

impl Graphs {
    /// Resolves the API in a library; the error is the name of a missing function.
    pub(super) fn resolve(lib: &libloading::Library, side: Side) -> Result<Graphs, &'static str> {
        let f = Functions::resolve(lib, side)?;
        // SAFETY: the header declares the function with this type. The library is never unloaded.
        let last_error = unsafe { lib.get::<LastError>(b"cudnnGetLastErrorString") }.ok().map(|f| *f);
        Ok(Graphs { f, last_error })
    }

    fn check(&self, code: Code, call: impl FnOnce() -> String) -> Result<(), CallError> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut text = status(code).to_string();
        if let Some(last_error) = self.last_error {
            let mut said = [0u8; MAX_TEXT];
            // SAFETY: the library writes at most `said.len()` bytes to `said`.
            unsafe { last_error(said.as_mut_ptr().cast(), said.len()) };
            let end = said.iter().position(|c| *c == 0).unwrap_or(said.len());
            let said = String::from_utf8_lossy(&said[..end]);
            if let Some(line) = said.lines().map(str::trim).find(|l| !l.is_empty()) {
                text = format!("{text}: {line}");
            }
        }
        Err(CallError { call: call(), code, text })
    }
}

/// The value of an attribute.
#[derive(Clone, Copy)]
enum Value<'a> {
    Handle(&'a Handle),
    Descriptions(&'a [Handle]),
    Numbers(&'a [i64]),
    Pointers(&'a [*mut c_void]),
    Yes,
    /// An enumeration: the attribute's type and the number.
    Choice(c_int, &'a c_int),
}

impl Value<'_> {
    /// The type, the number of elements, and their address.
    fn parts(&self) -> (c_int, usize, *const c_void) {
        static TRUE: bool = true;
        match *self {
            Value::Handle(h) => (is::HANDLE, 1, ptr::from_ref(h).cast()),
            Value::Descriptions(d) => (is::DESCRIPTION, d.len(), d.as_ptr().cast()),
            Value::Numbers(n) => (is::INT64, n.len(), n.as_ptr().cast()),
            Value::Pointers(p) => (is::POINTER, p.len(), p.as_ptr().cast()),
            Value::Yes => (is::BOOLEAN, 1, ptr::from_ref(&TRUE).cast()),
            Value::Choice(of, n) => (of, 1, ptr::from_ref(n).cast()),
        }
    }
}

/// A descriptor of the library.
struct Description {
    api: &'static Graphs,
    kind: Kind,
    raw: Handle,
}

// SAFETY: descriptors are plain data of the library, not modified once finalised.
unsafe impl Send for Description {}
// SAFETY: finalised descriptors are not modified, so concurrent reads are safe.
unsafe impl Sync for Description {}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: the library created `raw` once. Descriptors that refer to it were dropped before it.
        unsafe { (self.api.f.destroy)(self.raw) };
    }
}

impl Description {
    /// A descriptor without attributes, not finalised.
    fn empty(api: &'static Graphs, kind: Kind) -> Result<Description, CallError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the library writes one handle to `raw`.
        let code = unsafe { (api.f.create)(kind.0, &mut raw) };
        api.check(code, || format!("creating {}", kind.1))?;
        Ok(Description { api, kind, raw })
    }

    /// A finalised descriptor.
    ///
    /// # Safety
    /// The handle and the descriptors among the attributes must be live, and the descriptors must outlive
    /// this one. Addresses must be null or of memory that is valid as long as this descriptor is used.
    unsafe fn new(
        api: &'static Graphs,
        kind: Kind,
        attributes: &[(c_int, Value<'_>)],
    ) -> Result<Description, CallError> {
        let made = Description::empty(api, kind)?;
        for (name, value) in attributes {
            let (of, n, from) = value.parts();
            // SAFETY: `parts` returns a pointer to `n` values of this type, which are copied before the call
            // returns. Descriptors among them are live, which `new` requires.
            let code = unsafe { (api.f.set)(made.raw, *name, of, n as i64, from) };
            api.check(code, || format!("attribute {name} of {}", kind.1))?;
        }
        // SAFETY: the descriptor and all descriptors that it refers to are live.
        let code = unsafe { (api.f.finalize)(made.raw) };
        api.check(code, || format!("finishing {}", kind.1))?;
        Ok(made)
    }

    /// Reads at most `n` values of an attribute; returns how many exist.
    ///
    /// # Safety
    /// `to` must have room for `n` values of this type. It may be null if `n` is 0.
    unsafe fn get(&self, name: c_int, of: c_int, n: usize, to: *mut c_void) -> Result<usize, CallError> {
        let mut found = 0;
        // SAFETY: `get` requires room for `n` values at `to`; the descriptor is live, and one number is
        // written to `found`.
        let code = unsafe { (self.api.f.get)(self.raw, name, of, n as i64, &mut found, to) };
        self.api.check(code, || format!("reading attribute {name} of {}", self.kind.1))?;
        Ok(usize::try_from(found).unwrap_or(0))
    }
}

/// Descriptors. Later ones refer to earlier ones, so they are dropped in reverse order.
#[derive(Default)]
struct Parts(Vec<Description>);

impl Drop for Parts {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

/// The storage of a tensor.
pub(super) enum Place {
    /// Device memory, with these strides.
    Memory([i64; 4]),
    /// No memory. The tensor is the result of an operation, and other operations read it.
    Virtual,
    /// One element in host memory.
    Value,
}

/// A tensor of a graph.
#[derive(Clone, Copy)]
pub(super) struct Tensor {
    raw: Handle,
    pub id: i64,
    shape: [i64; 4],
}

/// A graph under construction.
pub(super) struct Builder {
    api: &'static Graphs,
    parts: Parts,
    operations: Vec<Handle>,
    tensors: i64,
}

impl Builder {
    pub(super) fn new(api: &'static Graphs) -> Builder {
        Builder { api, parts: Parts::default(), operations: vec![], tensors: 0 }
    }

    /// Adds a descriptor whose attributes are numbers and earlier descriptors of this builder.
    fn keep(&mut self, kind: Kind, attributes: &[(c_int, Value<'_>)]) -> Result<Handle, CallError> {
        let own = |d: &Handle| self.parts.0.iter().any(|p| p.raw == *d);
        let known = attributes.iter().all(|(_, value)| match value {
            Value::Descriptions(d) => d.iter().all(own),
            Value::Handle(_) | Value::Pointers(_) => false,
            Value::Numbers(_) | Value::Yes | Value::Choice(..) => true,
        });
        if !known {
            let text = "it refers to something outside of its graph".into();
            return Err(CallError { call: format!("making {}", kind.1), code: -1, text });
        }
        // SAFETY: the check above ensures that the attributes hold no handle or address, and that every
        // descriptor among them is in `parts`, which drops the new descriptor before them.
        let made = unsafe { Description::new(self.api, kind, attributes) }?;
        let raw = made.raw;
        self.parts.0.push(made);
        Ok(raw)
    }

    pub(super) fn tensor(&mut self, of: c_int, shape: [i64; 4], place: Place) -> Result<Tensor, CallError> {
        self.tensors += 1;
        let id = self.tensors;
        let mut strides = [1; 4];
        (0..3).rev().for_each(|i| strides[i] = strides[i + 1] * shape[i + 1]);
        if let Place::Memory(s) = place {
            strides = s;
        }
        let mut attributes = vec![
            (at::TENSOR_TYPE, Value::Choice(is::DATA_TYPE, &of)),
            (at::TENSOR_SHAPE, Value::Numbers(&shape)),
            (at::TENSOR_STRIDES, Value::Numbers(&strides)),
            (at::TENSOR_ID, Value::Numbers(std::slice::from_ref(&id))),
            (at::TENSOR_ALIGNMENT, Value::Numbers(&[ALIGNMENT])),
        ];
        match place {
            Place::Memory(_) => {}
            Place::Virtual => attributes.push((at::TENSOR_IS_VIRTUAL, Value::Yes)),
            Place::Value => attributes.push((at::TENSOR_IS_VALUE, Value::Yes)),
        }
        Ok(Tensor { raw: self.keep(TENSOR, &attributes)?, id, shape })
    }

    /// `out = a · b`, summed in f32.
    pub(super) fn matmul(&mut self, a: Tensor, b: Tensor, out: Tensor) -> Result<(), CallError> {
        let how = self.keep(MATMUL, &[(at::MATMUL_PRECISION, Value::Choice(is::DATA_TYPE, &F32))])?;
        let operation = self.keep(
            OPERATION_MATMUL,
            &[
                (at::OPERATION_MATMUL_A, Value::Descriptions(&[a.raw])),
                (at::OPERATION_MATMUL_B, Value::Descriptions(&[b.raw])),
                (at::OPERATION_MATMUL_C, Value::Descriptions(&[out.raw])),
                (at::OPERATION_MATMUL, Value::Descriptions(&[how])),
            ],
        )?;
        self.operations.push(operation);
        Ok(())
    }

    /// Applies a function to up to three operands, computed in type `precision`, and stores to `out`. `axis`
    /// is the axis along which [`Pointwise::Index`] counts, and `None` for other functions.
    pub(super) fn pointwise_into(
        &mut self,
        mode: Pointwise,
        precision: c_int,
        axis: Option<i64>,
        operands: &[Tensor],
        out: Tensor,
    ) -> Result<(), CallError> {
        let mode = mode as c_int;
        let mut how = vec![
            (at::POINTWISE_MODE, Value::Choice(is::POINTWISE_MODE, &mode)),
            (at::POINTWISE_PRECISION, Value::Choice(is::DATA_TYPE, &precision)),
        ];
        if let Some(axis) = &axis {
            how.push((at::POINTWISE_AXIS, Value::Numbers(std::slice::from_ref(axis))));
        }
        let how = [self.keep(POINTWISE, &how)?];
        let mut attributes = vec![(at::OPERATION_POINTWISE, Value::Descriptions(&how))];
        let places = [at::OPERATION_POINTWISE_X, at::OPERATION_POINTWISE_B, at::OPERATION_POINTWISE_T];
        let sources = places.iter().zip(operands);
        attributes
            .extend(sources.map(|(place, t)| (*place, Value::Descriptions(std::slice::from_ref(&t.raw)))));
        attributes.push((at::OPERATION_POINTWISE_Y, Value::Descriptions(std::slice::from_ref(&out.raw))));
        let operation = self.keep(OPERATION_POINTWISE, &attributes)?;
        self.operations.push(operation);
        Ok(())
    }

    /// Like [`Builder::pointwise_into`]; the result is a new virtual tensor of type `of` with the first
    /// operand's shape.
    pub(super) fn pointwise(
        &mut self,
        mode: Pointwise,
        precision: c_int,
        operands: &[Tensor],
        of: c_int,
    ) -> Result<Tensor, CallError> {
        let out = self.tensor(of, operands[0].shape, Place::Virtual)?;
        self.pointwise_into(mode, precision, None, operands, out)?;
        Ok(out)
    }

    /// Indices along an axis of `like`.
    pub(super) fn index(&mut self, like: Tensor, axis: i64) -> Result<Tensor, CallError> {
        let out = self.tensor(I32, like.shape, Place::Virtual)?;
        self.pointwise_into(Pointwise::Index, F32, Some(axis), &[like], out)?;
        Ok(out)
    }

    /// Reduces along the last axis, in f32.
    pub(super) fn reduce(&mut self, how: Reduce, x: Tensor) -> Result<Tensor, CallError> {
        let [b, h, rows, _] = x.shape;
        let out = self.tensor(F32, [b, h, rows, 1], Place::Virtual)?;
        let how = how as c_int;
        let how = self.keep(
            REDUCTION,
            &[
                (at::REDUCTION_OPERATOR, Value::Choice(is::REDUCTION_OPERATOR, &how)),
                (at::REDUCTION_PRECISION, Value::Choice(is::DATA_TYPE, &F32)),
            ],
        )?;
        let operation = self.keep(
            OPERATION_REDUCTION,
            &[
                (at::OPERATION_REDUCTION, Value::Descriptions(&[how])),
                (at::OPERATION_REDUCTION_X, Value::Descriptions(&[x.raw])),
                (at::OPERATION_REDUCTION_Y, Value::Descriptions(&[out.raw])),
            ],
        )?;
        self.operations.push(operation);
        Ok(out)
    }

    /// The plan of the first proposed engine that is deterministic and needs at most `most` bytes of
    /// workspace.
    ///
    /// # Safety
    /// `handle` must be a live handle of the library, which no other thread uses during the call. It must
    /// outlive the plan.
    pub(super) unsafe fn plan(mut self, handle: Handle, most: usize) -> Result<Plan, String> {
        let operations = std::mem::take(&mut self.operations);
        let attributes = [
            (at::GRAPH_OPERATIONS, Value::Descriptions(&operations)),
            (at::GRAPH_HANDLE, Value::Handle(&handle)),
        ];
        // SAFETY: `plan` requires a live handle. `keep` put the operations into `parts`, which drops the
        // graph before them.
        let graph = unsafe { Description::new(self.api, GRAPH, &attributes) }?;
        let attributes = [
            (at::HEURISTICS_GRAPH, Value::Descriptions(&[graph.raw])),
            (at::HEURISTICS_MODE, Value::Choice(is::HEURISTIC_MODE, &MODE_A)),
        ];
        // SAFETY: the graph is live and outlives the descriptor, which is dropped below.
        let heuristics = unsafe { Description::new(self.api, HEURISTICS, &attributes) };
        self.parts.0.push(graph);
        let heuristics = heuristics?;
        // SAFETY: `n` is 0, so only the number of results is written.
        let found = unsafe { heuristics.get(at::HEURISTICS_RESULTS, is::DESCRIPTION, 0, ptr::null_mut()) }?;
        let made = (0..found.min(MAX_ENGINES)).map(|_| Description::empty(self.api, CONFIG));
        let configs = made.collect::<Result<Vec<_>, _>>()?;
        let mut raw: Vec<Handle> = configs.iter().map(|c| c.raw).collect();
        if raw.is_empty() {
            return Err("it has no engine for this shape".into());
        }
        // SAFETY: `raw` holds `raw.len()` live descriptors, which the library fills in.
        let found = unsafe {
            heuristics.get(at::HEURISTICS_RESULTS, is::DESCRIPTION, raw.len(), raw.as_mut_ptr().cast())
        }?;
        drop(heuristics);
        let mut why = None;
        for config in configs.into_iter().take(found) {
            // SAFETY: `plan` requires a live handle that outlives the plan.
            match unsafe { self.try_engine(&config, handle, most) } {
                Ok((plan, workspace)) => {
                    self.parts.0.push(config);
                    return Ok(Plan { plan, _parts: self.parts, workspace });
                }
                Err(e) => {
                    why.get_or_insert(e);
                }
            }
        }
        Err(why.unwrap_or_else(|| "it has no engine for this shape".into()))
    }

    /// The plan of one engine, and the size of its workspace.
    ///
    /// # Safety
    /// The contract of `Builder::plan`. The configuration must also outlive the plan.
    unsafe fn try_engine(
        &self,
        config: &Description,
        handle: Handle,
        most: usize,
    ) -> Result<(Description, usize), String> {
        let engine = Description::empty(self.api, ENGINE)?;
        let mut raw = engine.raw;
        // SAFETY: `raw` is one live descriptor, which the library fills in.
        unsafe { config.get(at::CONFIG_ENGINE, is::DESCRIPTION, 1, ptr::from_mut(&mut raw).cast()) }?;
        let mut notes = [0 as c_int; MAX_NOTES];
        // SAFETY: `notes` has room for `MAX_NOTES` numbers.
        let n = unsafe {
            engine.get(at::ENGINE_NOTES, is::NUMERICAL_NOTE, MAX_NOTES, notes.as_mut_ptr().cast())
        }?;
        if notes[..n.min(MAX_NOTES)].contains(&NONDETERMINISTIC) {
            return Err("its engine is not deterministic".into());
        }
        let attributes = [
            (at::PLAN_HANDLE, Value::Handle(&handle)),
            (at::PLAN_CONFIG, Value::Descriptions(&[config.raw])),
        ];
        // SAFETY: `try_engine` requires a live handle, and a configuration that outlives the plan.
        let plan = unsafe { Description::new(self.api, PLAN, &attributes) }?;
        let mut bytes = 0i64;
        // SAFETY: `bytes` has room for one number.
        unsafe { plan.get(at::PLAN_WORKSPACE, is::INT64, 1, ptr::from_mut(&mut bytes).cast()) }?;
        match usize::try_from(bytes) {
            Ok(bytes) if bytes <= most => Ok((plan, bytes)),
            _ => Err(format!("its engine needs {bytes} bytes of workspace, but at most {most} are allowed")),
        }
    }
}

/// A graph with the engine that computes it.
pub(super) struct Plan {
    /// This field is first, so that the plan is dropped before the parts that it was made of.
    plan: Description,
    _parts: Parts,
    pub workspace: usize,
}

impl Plan {
    /// Enqueues a run in the handle's stream. `addresses` holds the address of each tensor in `ids`, i.e. of
    /// every tensor that is not virtual: in device memory or, for scalars, in host memory.
    ///
    /// # Safety
    /// The memory at each address and the workspace must be as large as the tensors and the plan require, and
    /// results must not overlap with other memory. The memory must stay valid until the work has run. The
    /// plan must stay valid as long as a capture with the work can be launched. `handle` must be the handle
    /// that made the plan, it must have a live stream, and no other thread may use it.
    pub(super) unsafe fn execute(
        &self,
        handle: Handle,
        ids: &[i64],
        addresses: &[*mut c_void],
        workspace: *mut c_void,
    ) -> Result<(), CallError> {
        let plan = &self.plan;
        let attributes = [
            (at::PACK_IDS, Value::Numbers(ids)),
            (at::PACK_POINTERS, Value::Pointers(addresses)),
            (at::PACK_WORKSPACE, Value::Pointers(&[workspace])),
        ];
        // SAFETY: `execute` requires valid addresses.
        let pack = unsafe { Description::new(plan.api, PACK, &attributes) }?;
        // SAFETY: both descriptors are live; `execute` requires a usable handle and valid addresses.
        let code = unsafe { (plan.api.f.execute)(handle, plan.raw, pack.raw) };
        plan.api.check(code, || "running a plan".into())
    }
}
