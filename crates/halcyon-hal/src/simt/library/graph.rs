//! cuDNN's backend interface (`cudnn_graph.h`): graphs of operations.
//!
//! A description is made, gets attributes and is finished; it does not change afterwards. Operations that are
//! connected by tensors without memory are a graph. The library proposes engines for it, best first, and an
//! engine gives a plan, which is run with a pack of addresses.

use super::dnn::status;
use super::functions_of_one;
use crate::simt::sys::{Code, Handle, SUCCESS, Side};
use std::ffi::{c_char, c_int, c_void};
use std::{fmt, ptr};

functions_of_one! {
    /// The interface.
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

/// The interface of a library.
pub struct Graphs {
    f: Functions,
    /// From version 9 on.
    last_error: Option<LastError>,
}

/// A kind of description, and its name in messages.
#[derive(Clone, Copy)]
struct Kind(c_int, &'static str);

const POINTWISE: Kind = Kind(0, "an element-wise function");
const ENGINE: Kind = Kind(2, "an engine");
const CONFIG: Kind = Kind(3, "an engine's configuration");
const HEURISTICS: Kind = Kind(4, "the choice of engines");
const PLAN: Kind = Kind(5, "a plan");
const OPERATION_POINTWISE: Kind = Kind(13, "an element-wise operation");
const GRAPH: Kind = Kind(15, "a graph");
const PACK: Kind = Kind(16, "a pack of addresses");
const TENSOR: Kind = Kind(17, "a tensor");
const MATMUL: Kind = Kind(18, "a product");
const OPERATION_MATMUL: Kind = Kind(19, "a product's operation");
const REDUCTION: Kind = Kind(21, "a reduction");
const OPERATION_REDUCTION: Kind = Kind(22, "a reduction's operation");

/// Types of attributes (`cudnnBackendAttributeType_t`).
mod is {
    use std::ffi::c_int;
    pub const HANDLE: c_int = 0;
    pub const DATA_TYPE: c_int = 1;
    pub const BOOLEAN: c_int = 2;
    pub const INT64: c_int = 3;
    pub const POINTER: c_int = 6;
    pub const HEURISTIC_MODE: c_int = 8;
    pub const NUMERICAL_NOTE: c_int = 11;
    pub const POINTWISE_MODE: c_int = 14;
    pub const DESCRIPTION: c_int = 15;
    pub const REDUCTION_OPERATOR: c_int = 18;
}

/// Names of attributes (`cudnnBackendAttributeName_t`).
mod at {
    use std::ffi::c_int;
    pub const POINTWISE_MODE: c_int = 0;
    pub const POINTWISE_PRECISION: c_int = 1;
    pub const POINTWISE_AXIS: c_int = 9;
    pub const HEURISTICS_MODE: c_int = 200;
    pub const HEURISTICS_GRAPH: c_int = 201;
    pub const HEURISTICS_RESULTS: c_int = 202;
    pub const CONFIG_ENGINE: c_int = 300;
    pub const PLAN_HANDLE: c_int = 400;
    pub const PLAN_CONFIG: c_int = 401;
    pub const PLAN_WORKSPACE: c_int = 402;
    pub const OPERATION_POINTWISE: c_int = 750;
    pub const OPERATION_POINTWISE_X: c_int = 751;
    pub const OPERATION_POINTWISE_B: c_int = 752;
    pub const OPERATION_POINTWISE_Y: c_int = 753;
    pub const OPERATION_POINTWISE_T: c_int = 758;
    pub const GRAPH_HANDLE: c_int = 800;
    pub const GRAPH_OPERATIONS: c_int = 801;
    pub const TENSOR_ALIGNMENT: c_int = 900;
    pub const TENSOR_TYPE: c_int = 901;
    pub const TENSOR_SHAPE: c_int = 902;
    pub const TENSOR_STRIDES: c_int = 903;
    pub const TENSOR_ID: c_int = 906;
    pub const TENSOR_IS_VIRTUAL: c_int = 907;
    pub const TENSOR_IS_VALUE: c_int = 908;
    pub const PACK_IDS: c_int = 1000;
    pub const PACK_POINTERS: c_int = 1001;
    pub const PACK_WORKSPACE: c_int = 1003;
    pub const ENGINE_NOTES: c_int = 1303;
    pub const MATMUL_PRECISION: c_int = 1500;
    pub const OPERATION_MATMUL_A: c_int = 1520;
    pub const OPERATION_MATMUL_B: c_int = 1521;
    pub const OPERATION_MATMUL_C: c_int = 1522;
    pub const OPERATION_MATMUL: c_int = 1523;
    pub const REDUCTION_OPERATOR: c_int = 1600;
    pub const REDUCTION_PRECISION: c_int = 1601;
    pub const OPERATION_REDUCTION_X: c_int = 1610;
    pub const OPERATION_REDUCTION_Y: c_int = 1611;
    pub const OPERATION_REDUCTION: c_int = 1612;
}

/// `cudnnPointwiseMode_t`.
#[derive(Clone, Copy)]
pub enum Pointwise {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    GreaterOrEqual = 303,
    /// Numbers along an axis.
    Index = 501,
    /// The first operand where the third is true, else the second.
    Select = 601,
}

/// `cudnnReduceTensorOp_t`.
#[derive(Clone, Copy)]
pub enum Reduce {
    Add = 0,
    Max = 3,
}

/// `cudnnDataType_t`.
pub const F32: c_int = 0;
pub const I32: c_int = 4;
pub const BOOLEAN: c_int = 11;

/// The heuristics by decision trees.
const MODE_A: c_int = 3;
/// Of an engine's notes: results may differ from run to run.
const NONDETERMINISTIC: c_int = 4;
/// What the address of a tensor is a multiple of.
pub const ALIGNMENT: i64 = 16;
const MOST_ENGINES: usize = 16;
const MOST_NOTES: usize = 32;
/// Text of an error that is kept.
const MOST_TEXT: usize = 256;

/// A call that the library did not do.
#[derive(Debug)]
pub struct Refused {
    pub call: String,
    pub code: Code,
    pub text: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} gave status {} ({})", self.call, self.code, self.text)
    }
}

impl From<Refused> for String {
    fn from(r: Refused) -> String {
        r.to_string()
    }
}

impl Graphs {
    /// The interface of a library, or the name of the function that it lacks.
    pub fn resolve(lib: &libloading::Library, side: Side) -> Result<Graphs, &'static str> {
        let f = Functions::resolve(lib, side)?;
        // SAFETY: the type is the header's. The library stays loaded for as long as the table is used.
        let last_error = unsafe { lib.get::<LastError>(b"cudnnGetLastErrorString") }.ok().map(|f| *f);
        Ok(Graphs { f, last_error })
    }

    fn check(&self, code: Code, call: impl FnOnce() -> String) -> Result<(), Refused> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut text = status(code).to_string();
        if let Some(last_error) = self.last_error {
            let mut said = [0u8; MOST_TEXT];
            // SAFETY: at most as many bytes are written as there are.
            unsafe { last_error(said.as_mut_ptr().cast(), said.len()) };
            let end = said.iter().position(|c| *c == 0).unwrap_or(said.len());
            let said = String::from_utf8_lossy(&said[..end]);
            if let Some(line) = said.lines().map(str::trim).find(|l| !l.is_empty()) {
                text = format!("{text}: {line}");
            }
        }
        Err(Refused { call: call(), code, text })
    }
}

/// What an attribute gets.
#[derive(Clone, Copy)]
enum Value<'a> {
    Handle(&'a Handle),
    Descriptions(&'a [Handle]),
    Numbers(&'a [i64]),
    Pointers(&'a [*mut c_void]),
    Yes,
    /// The type of the attribute, which is an enumeration, and its number.
    Choice(c_int, &'a c_int),
}

impl Value<'_> {
    /// The type, how many there are, and where.
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

/// A description of the library's.
struct Description {
    api: &'static Graphs,
    kind: Kind,
    raw: Handle,
}

// SAFETY: descriptions are data of the library that nothing changes after they are finished.
unsafe impl Send for Description {}
// SAFETY: as above.
unsafe impl Sync for Description {}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created once by the library; what refers to it went before.
        unsafe { (self.api.f.destroy)(self.raw) };
    }
}

impl Description {
    /// One without attributes.
    fn empty(api: &'static Graphs, kind: Kind) -> Result<Description, Refused> {
        let mut raw = ptr::null_mut();
        // SAFETY: one handle is written.
        let code = unsafe { (api.f.create)(kind.0, &mut raw) };
        api.check(code, || format!("creating {}", kind.1))?;
        Ok(Description { api, kind, raw })
    }

    /// One that is finished.
    fn new(
        api: &'static Graphs,
        kind: Kind,
        attributes: &[(c_int, Value<'_>)],
    ) -> Result<Description, Refused> {
        let made = Description::empty(api, kind)?;
        for (name, value) in attributes {
            let (of, n, from) = value.parts();
            // SAFETY: so many values of this type lie there; they are copied before the call returns.
            // Descriptions among them are live.
            let code = unsafe { (api.f.set)(made.raw, *name, of, n as i64, from) };
            api.check(code, || format!("attribute {name} of {}", kind.1))?;
        }
        // SAFETY: the description is live, and so are those that it refers to.
        let code = unsafe { (api.f.finalize)(made.raw) };
        api.check(code, || format!("finishing {}", kind.1))?;
        Ok(made)
    }

    /// Reads at most `n` values of an attribute, and gives how many there are.
    ///
    /// # Safety
    /// `n` values of this type have room at `to`, which may be null for none.
    unsafe fn get(&self, name: c_int, of: c_int, n: usize, to: *mut c_void) -> Result<usize, Refused> {
        let mut found = 0;
        // SAFETY: the caller's; the description is live, and one number is written.
        let code = unsafe { (self.api.f.get)(self.raw, name, of, n as i64, &mut found, to) };
        self.api.check(code, || format!("reading attribute {name} of {}", self.kind.1))?;
        Ok(usize::try_from(found).unwrap_or(0))
    }
}

/// Descriptions, of which later ones refer to earlier ones: they go in the reverse order.
#[derive(Default)]
struct Parts(Vec<Description>);

impl Drop for Parts {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

/// Where the elements of a tensor are.
pub enum Place {
    /// In memory, with these strides.
    Memory([i64; 4]),
    /// Nowhere: an operation's result that others read.
    Virtual,
    /// One element, in the host's memory.
    Value,
}

/// A tensor of a graph.
#[derive(Clone, Copy)]
pub struct Tensor {
    raw: Handle,
    pub id: i64,
    shape: [i64; 4],
}

/// A graph under construction.
pub struct Builder {
    api: &'static Graphs,
    parts: Parts,
    operations: Vec<Handle>,
    tensors: i64,
}

impl Builder {
    pub fn new(api: &'static Graphs) -> Builder {
        Builder { api, parts: Parts::default(), operations: vec![], tensors: 0 }
    }

    fn keep(&mut self, kind: Kind, attributes: &[(c_int, Value<'_>)]) -> Result<Handle, Refused> {
        let made = Description::new(self.api, kind, attributes)?;
        let raw = made.raw;
        self.parts.0.push(made);
        Ok(raw)
    }

    pub fn tensor(&mut self, of: c_int, shape: [i64; 4], place: Place) -> Result<Tensor, Refused> {
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
    pub fn matmul(&mut self, a: Tensor, b: Tensor, out: Tensor) -> Result<(), Refused> {
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

    /// A function of up to three operands, computed in a type, into `out`. An index has the axis that it
    /// counts along.
    pub fn pointwise_into(
        &mut self,
        mode: Pointwise,
        precision: c_int,
        axis: Option<i64>,
        operands: &[Tensor],
        out: Tensor,
    ) -> Result<(), Refused> {
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

    /// [`Builder::pointwise_into`] a tensor without memory, of this type and of the first operand's shape.
    pub fn pointwise(
        &mut self,
        mode: Pointwise,
        precision: c_int,
        operands: &[Tensor],
        of: c_int,
    ) -> Result<Tensor, Refused> {
        let out = self.tensor(of, operands[0].shape, Place::Virtual)?;
        self.pointwise_into(mode, precision, None, operands, out)?;
        Ok(out)
    }

    /// Numbers along an axis of `like`.
    pub fn index(&mut self, like: Tensor, axis: i64) -> Result<Tensor, Refused> {
        let out = self.tensor(I32, like.shape, Place::Virtual)?;
        self.pointwise_into(Pointwise::Index, F32, Some(axis), &[like], out)?;
        Ok(out)
    }

    /// Along the last axis, in f32.
    pub fn reduce(&mut self, how: Reduce, x: Tensor) -> Result<Tensor, Refused> {
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

    /// The plan of the first engine that the library proposes, gives the same result in each run, and is
    /// content with a workspace of so many bytes. `handle` is used by no other thread meanwhile.
    pub fn plan(mut self, handle: Handle, most: usize) -> Result<Plan, String> {
        let operations = std::mem::take(&mut self.operations);
        let graph = self.keep(
            GRAPH,
            &[
                (at::GRAPH_OPERATIONS, Value::Descriptions(&operations)),
                (at::GRAPH_HANDLE, Value::Handle(&handle)),
            ],
        )?;
        let heuristics = Description::new(
            self.api,
            HEURISTICS,
            &[
                (at::HEURISTICS_GRAPH, Value::Descriptions(&[graph])),
                (at::HEURISTICS_MODE, Value::Choice(is::HEURISTIC_MODE, &MODE_A)),
            ],
        )?;
        // SAFETY: nothing is read but how many there are.
        let found = unsafe { heuristics.get(at::HEURISTICS_RESULTS, is::DESCRIPTION, 0, ptr::null_mut()) }?;
        let made = (0..found.min(MOST_ENGINES)).map(|_| Description::empty(self.api, CONFIG));
        let configs = made.collect::<Result<Vec<_>, _>>()?;
        let mut raw: Vec<Handle> = configs.iter().map(|c| c.raw).collect();
        if raw.is_empty() {
            return Err("it has no engine for this shape".into());
        }
        // SAFETY: so many descriptions lie there, which the library fills in.
        let found = unsafe {
            heuristics.get(at::HEURISTICS_RESULTS, is::DESCRIPTION, raw.len(), raw.as_mut_ptr().cast())
        }?;
        drop(heuristics);
        let mut why = None;
        for config in configs.into_iter().take(found) {
            match self.try_engine(&config, handle, most) {
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

    fn try_engine(
        &self,
        config: &Description,
        handle: Handle,
        most: usize,
    ) -> Result<(Description, usize), String> {
        let engine = Description::empty(self.api, ENGINE)?;
        let mut raw = engine.raw;
        // SAFETY: one description lies there, which the library fills in.
        unsafe { config.get(at::CONFIG_ENGINE, is::DESCRIPTION, 1, ptr::from_mut(&mut raw).cast()) }?;
        let mut notes = [0 as c_int; MOST_NOTES];
        // SAFETY: so many numbers have room.
        let n = unsafe {
            engine.get(at::ENGINE_NOTES, is::NUMERICAL_NOTE, MOST_NOTES, notes.as_mut_ptr().cast())
        }?;
        if notes[..n.min(MOST_NOTES)].contains(&NONDETERMINISTIC) {
            return Err("its engine is not deterministic".into());
        }
        let plan = Description::new(
            self.api,
            PLAN,
            &[
                (at::PLAN_HANDLE, Value::Handle(&handle)),
                (at::PLAN_CONFIG, Value::Descriptions(&[config.raw])),
            ],
        )?;
        let mut bytes = 0i64;
        // SAFETY: one number has room.
        unsafe { plan.get(at::PLAN_WORKSPACE, is::INT64, 1, ptr::from_mut(&mut bytes).cast()) }?;
        match usize::try_from(bytes) {
            Ok(bytes) if bytes <= most => Ok((plan, bytes)),
            _ => Err(format!("its engine asks for {bytes} bytes of workspace")),
        }
    }
}

/// A graph with the engine that computes it.
pub struct Plan {
    /// First, so that it goes before what it was made of.
    plan: Description,
    _parts: Parts,
    pub workspace: usize,
}

impl Plan {
    /// Enqueues a run in the handle's stream. Each tensor that is not virtual has its address, in the
    /// device's memory or, for values, the host's.
    ///
    /// # Safety
    /// The memory at the addresses is as large as the tensors say, and so is the workspace; the results' is
    /// shared with nothing. It stays until the work has run, and the plan for as long as a captured graph
    /// with the work is launched. `handle` made the plan; no other thread uses it, and its stream is live.
    pub unsafe fn execute(
        &self,
        handle: Handle,
        ids: &[i64],
        addresses: &[*mut c_void],
        workspace: *mut c_void,
    ) -> Result<(), Refused> {
        let plan = &self.plan;
        let pack = Description::new(
            plan.api,
            PACK,
            &[
                (at::PACK_IDS, Value::Numbers(ids)),
                (at::PACK_POINTERS, Value::Pointers(addresses)),
                (at::PACK_WORKSPACE, Value::Pointers(&[workspace])),
            ],
        )?;
        // SAFETY: the descriptions are live; the rest is the caller's.
        let code = unsafe { (plan.api.f.execute)(handle, plan.raw, pack.raw) };
        plan.api.check(code, || "running a plan".into())
    }
}
