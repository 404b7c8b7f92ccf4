//! ONNX models: their inputs and outputs, runs, and the memory that they need.

use crate::HALCYON_UNKNOWN;
use crate::backend::HalcyonBackend;
use crate::guard::{Failure, HalcyonStatus, c_text, guard, value};
use crate::pointer::{Out, free, get, slice, text};
use crate::tensor::{HalcyonDtype, HalcyonTensor};
use halcyon::formats::onnx::tensor::External;
use halcyon::formats::onnx::{Datum, Model, Outcome, Port, PortType};
use halcyon::ir::lower::lower;
use halcyon::{Error, Fit, OnnxSession, Shape};
use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::ptr::null;

/// The kind of the value of an input or output.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalcyonPortKind {
    /// Nothing: the port is NULL.
    None = 0,
    /// A tensor of numbers or text, which is the only kind that the C library can pass.
    Tensor = 1,
    /// A sequence of values.
    Sequence = 2,
    /// A value or nothing.
    Optional = 3,
    /// A map from integers or text to values.
    Map = 4,
    /// The model does not declare the type of the output, and it follows only in a run: from the sizes or the
    /// values of its inputs. The element type is `HALCYON_DTYPE_NONE` and the rank -1.
    Unknown = 5,
}

/// An input or output of a model. It belongs to the model.
#[derive(Debug)]
pub struct HalcyonPort {
    name: CString,
    description: CString,
    kind: HalcyonPortKind,
    dtype: i32,
    /// The sizes with their text; `None` if the rank is open. A size that is not fixed is -1.
    dims: Option<Vec<(i64, CString)>>,
}

impl HalcyonPort {
    fn of(port: &Port) -> HalcyonPort {
        let (kind, dtype) = match &port.ty {
            PortType::Tensor { dtype, .. } => (HalcyonPortKind::Tensor, HalcyonDtype::of(*dtype)),
            PortType::Text { .. } => (HalcyonPortKind::Tensor, HalcyonDtype::String as i32),
            PortType::Sequence(_) => (HalcyonPortKind::Sequence, HalcyonDtype::None as i32),
            PortType::Optional(_) => (HalcyonPortKind::Optional, HalcyonDtype::None as i32),
            PortType::Map(_) => (HalcyonPortKind::Map, HalcyonDtype::None as i32),
        };
        let size = |d: &halcyon::Dim| {
            (d.known().and_then(|n| i64::try_from(n).ok()).unwrap_or(-1), c_text(&d.to_string()))
        };
        HalcyonPort {
            name: c_text(&port.name),
            description: c_text(&port.ty.to_string()),
            kind,
            dtype,
            dims: port.shape().map(|s| s.iter().map(size).collect()),
        }
    }

    /// An output whose type is not known before a run.
    fn unknown(name: &str) -> HalcyonPort {
        HalcyonPort {
            name: c_text(name),
            description: c_text("unknown before a run"),
            kind: HalcyonPortKind::Unknown,
            dtype: HalcyonDtype::None as i32,
            dims: None,
        }
    }
}

/// A model on a backend. Any number of threads may use a handle of this type at the same time; their runs
/// share the weights.
#[derive(Debug)]
pub struct HalcyonModel {
    session: OnnxSession,
    inputs: Vec<HalcyonPort>,
    outputs: Vec<HalcyonPort>,
}

impl HalcyonModel {
    fn new(backend: &HalcyonBackend, model: Model) -> Result<HalcyonModel, Error> {
        let session = OnnxSession::new(&backend.backend, model)?;
        let inputs = session.ports().iter().map(HalcyonPort::of).collect();
        let output = |(name, port): (String, Option<Port>)| match port {
            Some(port) => HalcyonPort::of(&port),
            None => HalcyonPort::unknown(&name),
        };
        let outputs = session.model().known_outputs()?.into_iter().map(output).collect();
        Ok(HalcyonModel { session, inputs, outputs })
    }

    /// The given tensors in the order of the model's inputs. Without names, they are in this order already.
    fn ordered(&self, names: Option<&[&str]>, given: &[&HalcyonTensor]) -> Result<Vec<Datum>, Failure> {
        let ports = self.session.ports();
        let bad = |what: String| {
            let all: Vec<String> = ports.iter().map(|p| format!("\"{}\" ({})", p.name, p.ty)).collect();
            let known = if all.is_empty() { "none".into() } else { all.join(", ") };
            Failure::argument(format!("{what}; the inputs of the model are: {known}"))
        };
        let mut values: Vec<Option<Datum>> = vec![None; ports.len()];
        match names {
            None if given.len() != ports.len() => {
                return Err(bad(format!("{} inputs were given", given.len())));
            }
            None => values = given.iter().map(|t| Some(t.datum())).collect(),
            Some(names) => {
                for (name, tensor) in names.iter().zip(given) {
                    let k = ports.iter().position(|p| p.name == *name);
                    let k = k.ok_or_else(|| bad(format!("the model has no input \"{name}\"")))?;
                    if values[k].replace(tensor.datum()).is_some() {
                        return Err(bad(format!("the input \"{name}\" is given twice")));
                    }
                }
            }
        }
        if let Some(k) = values.iter().position(Option::is_none) {
            return Err(bad(format!("the input \"{}\" is missing", ports[k].name)));
        }
        let values: Vec<Datum> = values.into_iter().flatten().collect();
        ports.iter().zip(&values).try_for_each(|(port, v)| accepts(port, v))?;
        Ok(values)
    }
}

/// Checks the element type of an input, and the sizes that the model fixes. A run checks the other sizes.
fn accepts(port: &Port, v: &Datum) -> Result<(), Failure> {
    let wrong = |status| {
        let text = format!("input \"{}\": the model takes {}, not {}", port.name, port.ty, v.describe());
        Err(Failure { status, text })
    };
    let (dims, shape): (&[usize], _) = match (&port.ty, v) {
        (PortType::Tensor { dtype, shape }, Datum::Tensor(t)) if t.dtype == *dtype => (&t.dims, shape),
        (PortType::Text { shape }, Datum::Text(t)) => (&t.dims, shape),
        (PortType::Tensor { .. } | PortType::Text { .. }, _) => return wrong(HalcyonStatus::Dtype),
        // A run says what an input of another kind takes.
        _ => return Ok(()),
    };
    let fits = |s: &Shape| {
        s.rank() == dims.len() && s.iter().zip(dims).all(|(want, n)| want.known().is_none_or(|w| w == *n))
    };
    match shape {
        Some(s) if !fits(s) => wrong(HalcyonStatus::Shape),
        _ => Ok(()),
    }
}

/// Opens an ONNX file. Weights in other files are read from the folder of the file. Nothing is compiled
/// before the first run. The caller frees `*out` with `halcyon_model_free`.
///
/// # Safety
/// `backend` is a backend, `path` is a string, `out` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_model_open(
    backend: *const HalcyonBackend,
    path: *const c_char,
    out: *mut *mut HalcyonModel,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees memory for a pointer, a backend and a string.
        let (out, backend, path) =
            unsafe { (Out::handle(out)?, get(backend, "backend")?, text(path, "path")?) };
        out.give(HalcyonModel::new(backend, Model::open(Path::new(path))?)?);
        Ok(())
    })
}

/// Reads an ONNX model from memory, which is copied. The weights must be part of the model. The caller frees
/// `*out` with `halcyon_model_free`.
///
/// # Safety
/// `backend` is a backend, `data` points to `bytes` bytes, `out` to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_model_from_bytes(
    backend: *const HalcyonBackend,
    data: *const c_void,
    bytes: usize,
    out: *mut *mut HalcyonModel,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees memory for a pointer, a backend and `bytes` bytes.
        let (out, backend, data) = unsafe {
            (Out::handle(out)?, get(backend, "backend")?, slice(data.cast::<u8>(), bytes, "data")?)
        };
        let model = Model::parse(data.to_vec().into(), External::none(), "the model in memory")?;
        out.give(HalcyonModel::new(backend, model)?);
        Ok(())
    })
}

/// Frees a model. NULL is allowed.
///
/// # Safety
/// `model` is NULL or a model that was not freed yet, and nothing uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_model_free(model: *mut HalcyonModel) {
    // SAFETY: the caller guarantees that this is the last use of the handle.
    unsafe { free(model) }
}

/// The number of inputs; 0 if `model` is NULL.
///
/// # Safety
/// `model` is NULL or a model.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_model_input_count(model: *const HalcyonModel) -> usize {
    // SAFETY: the caller guarantees a model or NULL.
    value(0, || Ok(unsafe { get(model, "model") }?.inputs.len()))
}

/// The number of outputs; 0 if `model` is NULL.
///
/// # Safety
/// `model` is NULL or a model.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_model_output_count(model: *const HalcyonModel) -> usize {
    // SAFETY: the caller guarantees a model or NULL.
    value(0, || Ok(unsafe { get(model, "model") }?.outputs.len()))
}

/// A port at an index.
fn port(all: &[HalcyonPort], index: usize, what: &str) -> Result<*const HalcyonPort, Failure> {
    let none = || Failure::argument(format!("`index` is {index}, and the model has {} {what}", all.len()));
    Ok(all.get(index).ok_or_else(none)? as *const HalcyonPort)
}

/// The input at an index, in the model's order. It belongs to the model and is valid as long as the model.
/// NULL if `model` is NULL or `index` is not less than the number of inputs.
///
/// # Safety
/// `model` is NULL or a model.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_model_input(model: *const HalcyonModel, index: usize) -> *const HalcyonPort {
    // SAFETY: the caller guarantees a model or NULL.
    value(null(), || port(&unsafe { get(model, "model") }?.inputs, index, "inputs"))
}

/// The output at an index, in the model's order. It belongs to the model and is valid as long as the model.
/// NULL if `model` is NULL or `index` is not less than the number of outputs.
///
/// # Safety
/// `model` is NULL or a model.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_model_output(
    model: *const HalcyonModel,
    index: usize,
) -> *const HalcyonPort {
    // SAFETY: the caller guarantees a model or NULL.
    value(null(), || port(&unsafe { get(model, "model") }?.outputs, index, "outputs"))
}

/// The name of an input or output. The string belongs to the model. NULL if `port` is NULL.
///
/// # Safety
/// `port` is NULL or a port of a model that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_port_name(port: *const HalcyonPort) -> *const c_char {
    // SAFETY: the caller guarantees a port or NULL.
    value(null(), || Ok(unsafe { get(port, "port") }?.name.as_ptr()))
}

/// The type of an input or output as text, such as `f32[batch, 3, 224, 224]` or `unknown before a run`. The
/// string belongs to the model. NULL if `port` is NULL.
///
/// # Safety
/// `port` is NULL or a port of a model that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_port_description(port: *const HalcyonPort) -> *const c_char {
    // SAFETY: the caller guarantees a port or NULL.
    value(null(), || Ok(unsafe { get(port, "port") }?.description.as_ptr()))
}

/// The kind of the value; `HALCYON_PORT_KIND_NONE` if `port` is NULL.
///
/// # Safety
/// `port` is NULL or a port of a model that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_port_kind(port: *const HalcyonPort) -> HalcyonPortKind {
    // SAFETY: the caller guarantees a port or NULL.
    value(HalcyonPortKind::None, || Ok(unsafe { get(port, "port") }?.kind))
}

/// The element type (`HalcyonDtype`) of a tensor; `HALCYON_DTYPE_NONE` if the value is no tensor, if its type
/// is not known before a run, or if `port` is NULL.
///
/// # Safety
/// `port` is NULL or a port of a model that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_port_dtype(port: *const HalcyonPort) -> i32 {
    // SAFETY: the caller guarantees a port or NULL.
    value(HalcyonDtype::None as i32, || Ok(unsafe { get(port, "port") }?.dtype))
}

/// The number of dimensions; -1 if the model leaves it open, if the value is no tensor, if its type is not
/// known before a run, or if `port` is NULL.
///
/// # Safety
/// `port` is NULL or a port of a model that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_port_rank(port: *const HalcyonPort) -> i64 {
    // SAFETY: the caller guarantees a port or NULL.
    value(-1, || Ok(unsafe { get(port, "port") }?.dims.as_ref().map_or(-1, |d| d.len() as i64)))
}

/// A dimension of a port.
fn dim(port: &HalcyonPort, axis: usize) -> Result<&(i64, CString), Failure> {
    let dims = port.dims.as_deref().unwrap_or_default();
    dims.get(axis).ok_or_else(|| {
        let (name, n) = (port.name.to_string_lossy(), dims.len());
        Failure::argument(format!("`axis` is {axis}, and \"{name}\" has {n} known dimensions"))
    })
}

/// The size of a dimension; -1 if it is not fixed (`halcyon_port_dim_name`), if `port` is NULL, or if there
/// is no such dimension.
///
/// # Safety
/// `port` is NULL or a port of a model that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_port_dim(port: *const HalcyonPort, axis: usize) -> i64 {
    // SAFETY: the caller guarantees a port or NULL.
    value(-1, || Ok(dim(unsafe { get(port, "port") }?, axis)?.0))
}

/// The text of a dimension: its size, or the symbol that stands for a size that is not fixed. Inputs in which
/// the same symbol occurs are meant to have the same size there. Other sizes are an error of a run only where
/// an operator needs them to be equal. The string belongs to the model. NULL if `port` is NULL, or if there
/// is no such dimension.
///
/// # Safety
/// `port` is NULL or a port of a model that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_port_dim_name(port: *const HalcyonPort, axis: usize) -> *const c_char {
    // SAFETY: the caller guarantees a port or NULL.
    value(null(), || Ok(dim(unsafe { get(port, "port") }?, axis)?.1.as_ptr()))
}

/// The inputs that a caller gives, in the model's order.
///
/// # Safety
/// `names` is NULL or points to `count` strings, `inputs` points to `count` tensors.
unsafe fn given(
    model: &HalcyonModel,
    names: *const *const c_char,
    inputs: *const *const HalcyonTensor,
    count: usize,
) -> Result<Vec<Datum>, Failure> {
    // SAFETY: the caller guarantees `count` pointers.
    let inputs = unsafe { slice(inputs, count, "inputs") }?;
    // SAFETY: the caller guarantees that each pointer is a tensor.
    let tensor = |(i, p): (usize, &*const HalcyonTensor)| unsafe { get(*p, &format!("inputs[{i}]")) };
    let tensors = inputs.iter().enumerate().map(tensor).collect::<Result<Vec<_>, _>>()?;
    if names.is_null() {
        return model.ordered(None, &tensors);
    }
    // SAFETY: the caller guarantees `count` pointers.
    let names = unsafe { slice(names, count, "names") }?;
    // SAFETY: the caller guarantees that each pointer is a string.
    let name = |(i, p): (usize, &*const c_char)| unsafe { text(*p, &format!("names[{i}]")) };
    let names = names.iter().enumerate().map(name).collect::<Result<Vec<_>, _>>()?;
    model.ordered(Some(&names), &tensors)
}

/// Runs a model and waits for its results. `inputs` has `count` tensors. `names` has their names in the same
/// order; if it is NULL, the tensors are in the model's order. `outputs` has room for `output_count` tensors,
/// which must be the number of the model's outputs; the results are in the model's order. The caller frees
/// each of them with `halcyon_tensor_free`. If the call fails, all of them are NULL.
///
/// The first run with new sizes of inputs compiles the model for these sizes.
///
/// # Safety
/// `model` is a model, `names` is NULL or points to `count` strings, `inputs` points to `count` tensors, and
/// `outputs` to `output_count` pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_model_run(
    model: *const HalcyonModel,
    names: *const *const c_char,
    inputs: *const *const HalcyonTensor,
    count: usize,
    outputs: *mut *mut HalcyonTensor,
    output_count: usize,
) -> HalcyonStatus {
    guard(|| {
        let mut places = vec![];
        // The places are checked like a slice, but they need not be initialised.
        // SAFETY: the caller guarantees `output_count` pointers; none of them is read.
        unsafe {
            slice(outputs.cast::<std::mem::MaybeUninit<*mut HalcyonTensor>>(), output_count, "outputs")
        }?;
        for i in 0..output_count {
            // SAFETY: the place is one of `output_count`, which lie within the address space.
            places.push(unsafe { Out::handle(outputs.add(i)) }?);
        }
        // SAFETY: the caller guarantees a model.
        let model = unsafe { get(model, "model") }?;
        if output_count != model.outputs.len() {
            let (n, names) = (model.outputs.len(), model.session.output_names().join("\", \""));
            return Err(Failure::argument(format!(
                "`output_count` is {output_count}, and the model has {n} outputs: \"{names}\""
            )));
        }
        // SAFETY: the caller guarantees `count` names, or none, and `count` tensors.
        let inputs = unsafe { given(model, names, inputs, count) }?;
        let made = model.session.run_data(&inputs)?.outputs.into_iter();
        let handle = |(name, v): (&String, Datum)| HalcyonTensor::of(v, &format!("the output \"{name}\""));
        let made =
            model.session.output_names().iter().zip(made).map(handle).collect::<Result<Vec<_>, _>>()?;
        if made.len() != places.len() {
            let text = format!("internal error: {} of {output_count} outputs", made.len());
            return Err(Failure { status: HalcyonStatus::Internal, text });
        }
        places.iter().zip(made).for_each(|(place, tensor)| place.give(tensor));
        Ok(())
    })
}

/// The memory that a run needs, in bytes, computed without running or allocating anything.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HalcyonFit {
    /// Weights on the device.
    pub weights: u64,
    /// Weights that the device reads from host memory without a copy. They are not part of `device`.
    pub weights_in_place: u64,
    /// Weights in the layout of the device's kernels.
    pub packed_weights: u64,
    /// Intermediate results.
    pub activations: u64,
    /// Memory that kernels need besides.
    pub workspace: u64,
    /// The inputs on the device.
    pub inputs: u64,
    /// The outputs on the device.
    pub outputs: u64,
    /// The sum on the device: the peak if the device does nothing else.
    pub device: u64,
    /// The free memory of the device; `HALCYON_UNKNOWN` if its driver does not report it and no limit is set.
    pub free: u64,
    /// Whether `device` is at most `free`. True if `free` is unknown.
    pub fits: bool,
}

/// Computes the memory that a run with these inputs needs. The arguments are those of `halcyon_model_run`. A
/// model that runs in stages, because computed values control it, is `HALCYON_STATUS_UNSUPPORTED`: the
/// memory of the later stages depends on values that only a run computes.
///
/// # Safety
/// `model` is a model, `names` is NULL or points to `count` strings, `inputs` points to `count` tensors,
/// `out` to a `HalcyonFit`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_model_fit(
    model: *const HalcyonModel,
    names: *const *const c_char,
    inputs: *const *const HalcyonTensor,
    count: usize,
    out: *mut HalcyonFit,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees memory for the result, and a model.
        let (out, model) = unsafe { (Out::new(out, "out")?, get(model, "model")?) };
        // SAFETY: the caller guarantees `count` names, or none, and `count` tensors.
        let inputs = unsafe { given(model, names, inputs, count) }?;
        out.set(fit(&model.session, &inputs)?);
        Ok(())
    })
}

fn fit(session: &OnnxSession, inputs: &[Datum]) -> Result<HalcyonFit, Failure> {
    let imported = match session.graph(inputs)? {
        Outcome::Graph(g) => g,
        Outcome::Staged(why) => {
            let what = format!("the memory of a model that runs in stages: {why}");
            return Err(Error::unsupported(what, "Run the model with a memory limit").into());
        }
    };
    let tensors: Vec<_> = inputs.iter().filter_map(Datum::tensor).collect();
    let shapes: Vec<Shape> = tensors.iter().map(|t| Shape::from(&t.dims)).collect();
    let bytes: Vec<usize> = tensors.iter().map(|t| t.bytes().len()).collect();
    let graph = imported.graph.bind(&imported.graph.solve(&shapes)?)?;
    let backend = session.backend();
    let device = &**backend.device();
    // Read before planning, because constants that planning computes take memory too.
    let free = device.available();
    let plan = match backend.lower_to_fit(&graph, &bytes) {
        // No plan fits, so the result is that of the fastest one.
        Err(Error::OutOfMemory { .. }) => lower(&graph, device.as_target(), &backend.lower_options())?,
        plan => plan?,
    };
    let fit = Fit::of(device, &plan, &bytes);
    let need = fit.device();
    Ok(HalcyonFit {
        weights: fit.weights,
        weights_in_place: fit.weights_in_place,
        packed_weights: fit.packed,
        activations: fit.activations,
        workspace: fit.workspace,
        inputs: fit.inputs,
        outputs: fit.outputs,
        device: need,
        free: free.unwrap_or(HALCYON_UNKNOWN),
        fits: free.is_none_or(|free| need <= free),
    })
}
