//! A model that ONNX Runtime has loaded.

use crate::library::Runtime;
use crate::value::{self, OutputType};
use crate::{NAME, failed};
use halcyon_formats::onnx::Datum;
use halcyon_formats::onnx::proto::{
    GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorType, TypeProto, TypeValue, ValueInfoProto,
};
use halcyon_ir::{DType, Error, Result};
use ort::ep::{self, ExecutionProvider};
use ort::session::builder::SessionBuilder;
use ort::session::{HasSelectedOutputs, OutputSelector, RunOptions, SessionOutputs};
use ort::value::DynValue;
use prost::Message;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How a model is loaded.
#[derive(Clone, Debug, Default)]
pub struct SessionOptions {
    /// Execution providers in the order of preference. The CPU's need not be listed.
    pub providers: Vec<String>,
    /// Number of the device of the first provider, and of others that have several.
    pub device: Option<usize>,
    /// Threads of the CPU provider; ONNX Runtime's own choice if `None`.
    pub threads: Option<usize>,
}

/// A model in ONNX Runtime.
pub struct Session {
    inner: ort::session::Session,
    runtime: Arc<Runtime>,
    model: String,
    inputs: Vec<String>,
    outputs: Vec<String>,
    /// Outputs that are not requested, because their type cannot be read, with the reason.
    left_out: Vec<(String, String)>,
    selected: Option<RunOptions<HasSelectedOutputs>>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("model", &self.model)
            .field("outputs", &self.outputs)
            .finish_non_exhaustive()
    }
}

/// Values for the inputs of a model, in ONNX Runtime's memory.
#[derive(Debug)]
pub struct Inputs(Vec<(String, DynValue)>);

impl Inputs {
    /// Copies values, each with the name of a model's input. The library must be open.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for values that ONNX Runtime or the crate `ort` cannot hold.
    pub fn new<'a>(
        _: &Arc<Runtime>,
        values: impl IntoIterator<Item = (&'a str, &'a Datum)>,
    ) -> Result<Inputs> {
        let one = |(name, d): (&str, &Datum)| Ok((name.to_string(), value::to_ort(name, d)?));
        Ok(Inputs(values.into_iter().map(one).collect::<Result<_>>()?))
    }
}

impl Session {
    /// Checks that the providers of `options` can be used, by loading a model of one node with them. ONNX
    /// Runtime loads the libraries of a provider when it is added, and opens its device for a model.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with ONNX Runtime's reason; [`Error::Argument`] for the number of a device.
    pub fn check_providers(runtime: &Arc<Runtime>, options: &SessionOptions) -> Result<()> {
        let first = options.providers.first().map_or(ep::CPU::NAME, String::as_str);
        let made = builder(runtime, options)?.commit_from_memory(&smallest_model().encode_to_vec());
        made.map(|_| ()).map_err(|e| unusable(first, e.message()))
    }

    /// Loads a model file. External data is read from its folder.
    ///
    /// # Errors
    /// [`Error::Format`] and [`Error::Unsupported`] for models that ONNX Runtime does not load;
    /// [`Error::Unavailable`] for a provider that cannot be used; [`Error::Driver`].
    pub fn from_file(runtime: &Arc<Runtime>, path: &Path, options: &SessionOptions) -> Result<Session> {
        let model = path.display().to_string();
        let made = builder(runtime, options)?.commit_from_file(path);
        Session::finish(runtime, model.clone(), made.map_err(|e| failed(&model, &e))?)
    }

    /// Loads a model from memory. External data is read from `folder`, from ONNX Runtime 1.19 on.
    ///
    /// # Errors
    /// The errors of [`Session::from_file`].
    pub fn from_bytes(
        runtime: &Arc<Runtime>,
        bytes: &[u8],
        folder: &Path,
        model: &str,
        options: &SessionOptions,
    ) -> Result<Session> {
        const FOLDER: &str = "session.model_external_initializers_file_folder_path";
        let mut b = builder(runtime, options)?;
        // Its options are text.
        if let Some(folder) = folder.to_str().filter(|f| !f.is_empty()) {
            b = b.with_config_entry(FOLDER, folder).map_err(|e| failed(FOLDER, &e))?;
        }
        let made = b.commit_from_memory(bytes);
        Session::finish(runtime, model.into(), made.map_err(|e| failed(model, &e))?)
    }

    fn finish(runtime: &Arc<Runtime>, model: String, inner: ort::session::Session) -> Result<Session> {
        let (mut outputs, mut left_out) = (vec![], vec![]);
        for o in inner.outputs() {
            match value::output_type(o.dtype()) {
                OutputType::Readable => outputs.push(o.name().to_string()),
                OutputType::Unreadable(why) => left_out.push((o.name().to_string(), why)),
            }
        }
        let selected = match left_out.is_empty() {
            true => None,
            false => Some(selection(&outputs).map_err(|e| failed("selecting outputs", &e))?),
        };
        let inputs = inner.inputs().iter().map(|i| i.name().to_string()).collect();
        Ok(Session { inner, runtime: runtime.clone(), model, inputs, outputs, left_out, selected })
    }

    /// The library that the model was loaded with.
    pub fn runtime(&self) -> &Arc<Runtime> {
        &self.runtime
    }

    /// Names of the inputs, in the model's order.
    pub fn inputs(&self) -> &[String] {
        &self.inputs
    }

    /// Names of the outputs that a run returns, in the model's order.
    pub fn outputs(&self) -> &[String] {
        &self.outputs
    }

    /// Outputs whose type cannot be read, with the reason. A run does not return them.
    pub fn left_out(&self) -> &[(String, String)] {
        &self.left_out
    }

    /// Runs the model and copies its outputs, in the order of [`Session::outputs`].
    ///
    /// # Errors
    /// [`Error::Driver`] with ONNX Runtime's message; [`Error::Unsupported`] for values that cannot be read.
    pub fn run(&mut self, inputs: &Inputs) -> Result<Vec<Datum>> {
        Ok(self.run_timed(inputs)?.0)
    }

    /// Like [`Session::run`], with the time of the run. The time does not include copying the inputs to ONNX
    /// Runtime's memory and the outputs from it.
    ///
    /// # Errors
    /// The errors of [`Session::run`].
    pub fn run_timed(&mut self, inputs: &Inputs) -> Result<(Vec<Datum>, Duration)> {
        let model = &self.model;
        let feeds: Vec<(&str, &DynValue)> = inputs.0.iter().map(|(n, v)| (n.as_str(), v)).collect();
        let start = Instant::now();
        let done = match &self.selected {
            None => self.inner.run(feeds),
            Some(s) => self.inner.run_with_options(feeds, s),
        };
        let time = start.elapsed();
        Ok((read(done.map_err(|e| failed(&format!("running {model}"), &e))?)?, time))
    }
}

fn read(outputs: SessionOutputs<'_>) -> Result<Vec<Datum>> {
    outputs.into_iter().map(|(name, v)| value::from_ort(name, v)).collect()
}

fn selection(names: &[String]) -> ort::Result<RunOptions<HasSelectedOutputs>> {
    let all = names.iter().fold(OutputSelector::no_default(), |s, n| s.with(n));
    Ok(RunOptions::new()?.with_outputs(all))
}

fn builder(runtime: &Runtime, options: &SessionOptions) -> Result<SessionBuilder> {
    let new = ort::session::Session::builder(&runtime.environment);
    let mut b = new.map_err(|e| failed("its session options", &e))?;
    if let Some(n) = options.threads {
        b = b.with_intra_threads(n).map_err(|e| failed("the number of its threads", &e))?;
    }
    for (i, name) in options.providers.iter().enumerate() {
        register(&mut b, name, device_number(name, i == 0, options.device)?)?;
    }
    Ok(b)
}

/// The number that a provider gets for its device.
fn device_number(name: &str, first: bool, device: Option<usize>) -> Result<i32> {
    let n = device.unwrap_or(0);
    match name {
        // Behind another provider the CPU runs what that one lacks, and the number is not meant for it.
        ep::CPU::NAME if !first => Ok(0),
        ep::CPU::NAME | ep::CoreML::NAME if n != 0 => {
            Err(Error::argument("--device", format!("{name} has one device, and its number is not {n}")))
        }
        _ => i32::try_from(n).map_err(|_| Error::argument("--device", format!("{name} has no device {n}"))),
    }
}

/// Adds an execution provider to a session's options.
fn register(b: &mut SessionBuilder, name: &str, number: i32) -> Result<()> {
    let added = match name {
        ep::CPU::NAME => return Ok(()),
        ep::CUDA::NAME => ep::CUDA::default().with_device_id(number).register(b),
        ep::ROCm::NAME => ep::ROCm::default().with_device_id(number).register(b),
        ep::MIGraphX::NAME => ep::MIGraphX::default().with_device_id(number).register(b),
        ep::CoreML::NAME => ep::CoreML::default().register(b),
        other => {
            let what = format!("the execution provider {other} of {NAME}");
            return Err(Error::unsupported(
                what,
                "Use the provider of CUDA, ROCm, MIGraphX, CoreML or the CPU",
            ));
        }
    };
    added.map_err(|e| unusable(name, e.message()))
}

/// The error for a provider that ONNX Runtime has but cannot use, with its reason.
fn unusable(name: &str, reason: &str) -> Error {
    Error::Unavailable {
        backend: name.into(),
        tried: vec![],
        reason: reason.trim().into(),
        fix: "Install what the provider needs (its documentation lists the libraries), or use --backend cpu"
            .into(),
    }
}

/// A model that every provider and every version of the library loads: it adds a number to itself.
fn smallest_model() -> ModelProto {
    let scalar = TensorType { elem_type: DType::F32.row().onnx, shape: None };
    let port = |name: &str| ValueInfoProto {
        name: name.into(),
        r#type: Some(TypeProto { value: Some(TypeValue::Tensor(scalar.clone())) }),
    };
    let node = NodeProto {
        op_type: "Add".into(),
        input: vec!["x".into(), "x".into()],
        output: vec!["y".into()],
        ..Default::default()
    };
    let graph = GraphProto {
        name: "check".into(),
        node: vec![node],
        input: vec![port("x")],
        output: vec![port("y")],
        ..Default::default()
    };
    ModelProto {
        ir_version: 8,
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 17 }],
        graph: Some(graph),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_device_is_for_the_first_provider() {
        let all = [ep::CUDA::NAME, ep::CPU::NAME];
        let numbers = |device| -> Result<Vec<i32>> {
            all.iter().enumerate().map(|(i, name)| device_number(name, i == 0, device)).collect()
        };
        assert_eq!(numbers(Some(1)).unwrap(), [1, 0]);
        assert_eq!(numbers(None).unwrap(), [0, 0]);
        assert_eq!(device_number(ep::CPU::NAME, true, Some(0)).unwrap(), 0);
        for (name, n) in [(ep::CPU::NAME, 1), (ep::CoreML::NAME, 1), (ep::CUDA::NAME, usize::MAX)] {
            let e = device_number(name, true, Some(n)).unwrap_err();
            assert!(e.exit_code() == 2 && e.to_string().contains(name), "{e}");
        }
    }
}
