//! Named inputs and outputs of [`OnnxSession::run`].

use super::{OnnxSession, PreparedModel, Run, RunOptions, cancellable};
use crate::backend::Backend;
use crate::tensor::{Tensor, mixed};
use halcyon_formats::onnx::{Datum, Port};
use halcyon_hal::{BufferRef, Tag};
use halcyon_ir::error::{Error, Result, Span};
use halcyon_ir::shape::{Shape, TensorType};
use halcyon_ir::{ConstData, Element};
use std::collections::BTreeMap;
use std::ops::Index;

/// The value of an input: a [`Tensor`], which stays on the device; or host data, as [`ConstData`], as
/// [`Datum`], or as a shape with values, `([1, 3], &values)`.
#[derive(Clone, Debug)]
pub struct Input(Value);

#[derive(Clone, Debug)]
enum Value {
    Device(Tensor),
    Host(ConstData),
    /// A sequence, strings or another value that is not a tensor.
    Other(Datum),
    /// The number of values does not match the shape; reported by `run`.
    Wrong(Error),
}

impl From<&Tensor> for Input {
    fn from(t: &Tensor) -> Input {
        Input(Value::Device(t.clone()))
    }
}
impl From<Tensor> for Input {
    fn from(t: Tensor) -> Input {
        Input(Value::Device(t))
    }
}
impl From<ConstData> for Input {
    fn from(d: ConstData) -> Input {
        Input(Value::Host(d))
    }
}
impl From<&ConstData> for Input {
    fn from(d: &ConstData) -> Input {
        Input(Value::Host(d.clone()))
    }
}
impl From<Datum> for Input {
    fn from(d: Datum) -> Input {
        match d {
            Datum::Tensor(t) => Input(Value::Host(t)),
            d => Input(Value::Other(d)),
        }
    }
}
impl From<&Input> for Input {
    fn from(i: &Input) -> Input {
        i.clone()
    }
}

fn filled<T: Element>(shape: impl Into<Shape>, values: &[T]) -> Input {
    let data = shape.into().dims().and_then(|d| ConstData::from_slice(&d, values));
    Input(data.map_or_else(Value::Wrong, Value::Host))
}

impl<S: Into<Shape>, T: Element> From<(S, &[T])> for Input {
    fn from((shape, values): (S, &[T])) -> Input {
        filled(shape, values)
    }
}
impl<S: Into<Shape>, T: Element> From<(S, Vec<T>)> for Input {
    fn from((shape, values): (S, Vec<T>)) -> Input {
        filled(shape, &values)
    }
}
impl<S: Into<Shape>, T: Element> From<(S, &Vec<T>)> for Input {
    fn from((shape, values): (S, &Vec<T>)) -> Input {
        filled(shape, values)
    }
}
impl<S: Into<Shape>, T: Element, const N: usize> From<(S, [T; N])> for Input {
    fn from((shape, values): (S, [T; N])) -> Input {
        filled(shape, &values)
    }
}
impl<S: Into<Shape>, T: Element, const N: usize> From<(S, &[T; N])> for Input {
    fn from((shape, values): (S, &[T; N])) -> Input {
        filled(shape, values)
    }
}

#[cfg(feature = "ndarray")]
impl<T: Element, S: ndarray::Data<Elem = T>, D: ndarray::Dimension> From<&ndarray::ArrayBase<S, D>>
    for Input
{
    fn from(a: &ndarray::ArrayBase<S, D>) -> Input {
        filled(a.shape(), &a.iter().copied().collect::<Vec<T>>())
    }
}

/// The results of [`OnnxSession::run`], in the order of the model's outputs. They stay on the device until
/// they are read. They can be indexed by name or number.
#[derive(Clone, Debug)]
pub struct Outputs {
    tensors: Vec<(String, Tensor)>,
    staged: Option<String>,
}

impl Outputs {
    /// The output with this name.
    ///
    /// # Errors
    /// [`Error::Argument`], with the existing names, if there is no such output.
    #[track_caller]
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.tensors.iter().find(|(n, _)| n == name).map(|(_, t)| t).ok_or_else(|| {
            let what = format!("the model has no output \"{name}\"; its outputs are {}", self.listed());
            Error::argument("outputs", what).at(&Span::caller())
        })
    }

    fn listed(&self) -> String {
        let names: Vec<String> = self.names().map(|n| format!("\"{n}\"")).collect();
        names.join(", ")
    }

    /// Names in the model's order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|(n, _)| n.as_str())
    }

    /// Names and tensors in the model's order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(n, t)| (n.as_str(), t))
    }

    /// Number of outputs.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether the model has no outputs.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The outputs by name.
    pub fn into_map(self) -> BTreeMap<String, Tensor> {
        self.tensors.into_iter().collect()
    }

    /// Why the model ran in stages, so that values passed through the host; `None` if it ran as one graph.
    pub fn staged(&self) -> Option<&str> {
        self.staged.as_deref()
    }
}

impl IntoIterator for Outputs {
    type Item = (String, Tensor);
    type IntoIter = std::vec::IntoIter<(String, Tensor)>;
    fn into_iter(self) -> Self::IntoIter {
        self.tensors.into_iter()
    }
}

impl Index<&str> for Outputs {
    type Output = Tensor;
    /// # Panics
    /// If there is no such output; [`Outputs::get`] returns an error instead.
    #[track_caller]
    fn index(&self, name: &str) -> &Tensor {
        match self.get(name) {
            Ok(t) => t,
            Err(e) => panic!("{e}"),
        }
    }
}

impl Index<usize> for Outputs {
    type Output = Tensor;
    /// # Panics
    /// If the model has fewer outputs.
    #[track_caller]
    fn index(&self, i: usize) -> &Tensor {
        match self.tensors.get(i) {
            Some((_, t)) => t,
            None => panic!("there is no output {i}; the model has {} ({})", self.len(), self.listed()),
        }
    }
}

/// The results of [`OnnxSession::run_with`].
#[derive(Debug)]
pub enum Results {
    /// The model ran as one graph.
    Device(Outputs),
    /// The model ran in stages.
    Host(Run),
}

fn listed(ports: &[Port]) -> String {
    match ports.is_empty() {
        true => "the model has no inputs".into(),
        false => {
            let all: Vec<String> = ports.iter().map(|p| format!("\"{}\" ({})", p.name, p.ty)).collect();
            format!("its inputs are {}", all.join(", "))
        }
    }
}

impl OnnxSession {
    /// Runs the model on inputs given by name, in any order. Tensors stay on the device, both inputs and
    /// results. But a model that runs in stages ([`Outputs::staged`]) reads and returns its values through
    /// the host.
    ///
    /// ```
    /// use halcyon::{OnnxSession, prelude::*};
    /// # fn main() -> halcyon::Result<()> {
    /// let backend = Backend::cpu()?;
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/digits.onnx");
    /// let session = OnnxSession::open(&backend, path)?;
    /// let image = Tensor::zeros(&backend, [1, 1, 8, 8], DType::F32);
    /// let outputs = session.run([("image", &image)])?;
    /// assert_eq!(outputs["probabilities"].dims()?.as_slice(), [1, 10]);
    /// // Host data: a shape and values.
    /// let outputs = session.run([("image", ([1, 1, 8, 8], vec![0.5f32; 64]))])?;
    /// assert_eq!(outputs[0].argmax(-1).to_vec::<i64>()?.len(), 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Argument`], with the model's inputs, for a name that is missing, unknown or given twice;
    /// [`Error::DType`], [`Error::Shape`] for a value that the model does not take; [`Error::MixedDevices`]
    /// for a tensor of another backend; [`Error::Unsupported`] for an output that is not a tensor: use
    /// [`OnnxSession::run_data`] for such models.
    #[track_caller]
    pub fn run<N: AsRef<str>, V: Into<Input>>(
        &self,
        inputs: impl IntoIterator<Item = (N, V)>,
    ) -> Result<Outputs> {
        let at = Span::caller();
        let given = inputs.into_iter().map(|(n, v)| (n.as_ref().to_string(), v.into().0)).collect();
        let done = self.run_named(given, &self.options, &at).and_then(|r| match r {
            Results::Device(outputs) => Ok(outputs),
            Results::Host(run) => self.on_device(run, &at),
        });
        done.map_err(|e| e.at(&at))
    }

    /// Like [`OnnxSession::run`], with values of every kind and options of this run. The results of a model
    /// that runs in stages stay on the host. Loops that are part of the graph have the iteration limit of the
    /// session.
    ///
    /// # Errors
    /// The errors of [`OnnxSession::run`] and [`OnnxSession::run_data`]; [`Error::Interrupted`] if the run
    /// was cancelled.
    #[track_caller]
    pub fn run_with<N: AsRef<str>, V: Into<Input>>(
        &self,
        inputs: impl IntoIterator<Item = (N, V)>,
        options: &RunOptions,
    ) -> Result<Results> {
        let at = Span::caller();
        let given = inputs.into_iter().map(|(n, v)| (n.as_ref().to_string(), v.into().0)).collect();
        self.run_named(given, options, &at).map_err(|e| e.at(&at))
    }

    fn run_named(&self, given: Vec<(String, Value)>, options: &RunOptions, at: &Span) -> Result<Results> {
        let inputs = self.ordered(given)?;
        if inputs.iter().any(|v| matches!(v, Value::Other(_))) {
            return self.run_on_host(&inputs, options);
        }
        let mut types = vec![];
        for (port, v) in self.ports().iter().zip(&inputs) {
            types.push(match v {
                Value::Device(t) if !t.backend().is_same(self.backend()) => {
                    return Err(mixed(&format!("input \"{}\"", port.name), self.backend(), t.backend()));
                }
                Value::Device(t) => TensorType::new(t.dtype()?, t.shape()?),
                Value::Host(d) => TensorType::new(d.dtype, &d.dims),
                Value::Other(_) | Value::Wrong(_) => {
                    return Err(Error::internal("an input is neither a tensor nor host data"));
                }
            });
        }
        let host: Vec<Option<ConstData>> = inputs
            .iter()
            .map(|v| match v {
                Value::Host(d) => Some(d.clone()),
                _ => None,
            })
            .collect();
        let read = |k: usize| match &inputs[k] {
            Value::Device(t) => t.to_data(),
            _ => Err(Error::internal("the device was asked for an input that is on the host")),
        };
        match &*self.made_for(&types, &host, &read, options)? {
            PreparedModel::Staged { .. } => self.run_on_host(&inputs, options),
            PreparedModel::Graph(g) => {
                let buffers: Vec<BufferRef> =
                    inputs.iter().map(|v| buffer(self.backend(), v)).collect::<Result<_>>()?;
                let exe = g.0.prepare_with(&types, Some(&buffers))?;
                let running = self.backend().running();
                let on = self.backend().runtime().queues.current();
                let ran = cancellable(options, || exe.run_on(&buffers, &[], on.as_deref()));
                let (made, event) = ran.map_err(|f| f.error)?;
                drop(running);
                let names = self.output_names().iter().cloned();
                let one = |((name, b), o): ((String, BufferRef), &halcyon_ir::plan::PlanOutput)| {
                    let ty = TensorType::new(o.dtype, &o.dims);
                    let t = Tensor::at(self.backend(), ty, b, at.clone());
                    t.set_completion(event.clone());
                    (name, t)
                };
                let tensors = names.zip(made).zip(&exe.plan().outputs).map(one).collect();
                Ok(Results::Device(Outputs { tensors, staged: None }))
            }
        }
    }

    /// Runs the model with host data.
    fn run_on_host(&self, inputs: &[Value], options: &RunOptions) -> Result<Results> {
        let data: Vec<Datum> = inputs
            .iter()
            .map(|v| match v {
                Value::Device(t) => t.to_data().map(Datum::Tensor),
                Value::Host(d) => Ok(Datum::Tensor(d.clone())),
                Value::Other(d) => Ok(d.clone()),
                Value::Wrong(e) => Err(e.clone()),
            })
            .collect::<Result<_>>()?;
        self.run_data_with(&data, options).map(Results::Host)
    }

    /// Copies the results of a run in stages to the device.
    fn on_device(&self, run: Run, at: &Span) -> Result<Outputs> {
        let one = |(name, d): (&String, Datum)| match d {
            Datum::Tensor(t) => {
                let t = Tensor::from_data(self.backend(), &t)?;
                Ok((name.clone(), Tensor::at(self.backend(), t.0.ty.clone(), t.buffer()?, at.clone())))
            }
            d => Err(Error::unsupported(
                format!("the output \"{name}\", {}, as a tensor", d.describe()),
                "Run the model with run_data(), which gives values of every kind",
            )),
        };
        let tensors = self.output_names().iter().zip(run.outputs).map(one).collect::<Result<_>>()?;
        Ok(Outputs { tensors, staged: Some(run.staged.unwrap_or_default()) })
    }

    /// The given values in the order of the model's inputs.
    fn ordered(&self, given: Vec<(String, Value)>) -> Result<Vec<Value>> {
        let bad = |what: String| Error::argument("inputs", format!("{what}; {}", listed(self.ports())));
        let mut values: Vec<Option<Value>> = vec![None; self.ports().len()];
        for (name, v) in given {
            let k = self.ports().iter().position(|p| p.name == name);
            let k = k.ok_or_else(|| bad(format!("the model has no input \"{name}\"")))?;
            if let Value::Wrong(e) = v {
                return Err(match e {
                    Error::Shape { what, at, .. } => {
                        Error::Shape { op: format!("input \"{name}\""), what, at }
                    }
                    e => e,
                });
            }
            if values[k].replace(v).is_some() {
                return Err(bad(format!("the input \"{name}\" is given twice")));
            }
        }
        let missing: Vec<String> = (self.ports().iter().zip(&values))
            .filter(|(_, v)| v.is_none())
            .map(|(p, _)| format!("\"{}\"", p.name))
            .collect();
        match missing.len() {
            0 => Ok(values.into_iter().flatten().collect()),
            1 => Err(bad(format!("the input {} is missing", missing[0]))),
            _ => Err(bad(format!("the inputs {} are missing", missing.join(", ")))),
        }
    }
}

fn buffer(backend: &Backend, v: &Value) -> Result<BufferRef> {
    match v {
        Value::Device(t) => t.buffer(),
        Value::Host(d) => {
            let b = backend.device().alloc(d.bytes().len(), Tag::Io)?;
            backend.device().write(&b, 0, d.bytes())?;
            Ok(b)
        }
        _ => Err(Error::internal("an input of a graph is not a tensor")),
    }
}
