//! The commands.

pub mod conformance;
pub mod devices;
pub mod probe;
pub mod run;
pub mod trace;

use crate::args::{BackendArgs, InputArgs};
use crate::source::{self, Input};
use halcyon::{Backend, ConstData, Result, Shape};
use halcyon_formats::onnx::{Imported, Model};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// A model with a device and inputs, not compiled yet.
#[derive(Debug)]
pub struct Loaded {
    pub backend: Backend,
    pub inputs: Vec<Input>,
    pub imported: Imported,
    pub times: LoadTimes,
}

#[derive(Debug)]
pub struct LoadTimes {
    /// Mapping and decoding the model, checking it, building its graph.
    pub load: Duration,
    /// Choosing and opening the device.
    pub open: Duration,
    /// Reading the inputs.
    pub inputs: Duration,
}

/// Opens a model and a device. What the model lacks support for is found before a weight or an input is read.
pub fn load(path: &Path, a: &InputArgs, b: &BackendArgs, fill: bool, profile: bool) -> Result<Loaded> {
    b.check()?;
    let start = Instant::now();
    let model = Model::open(path)?;
    let decode = start.elapsed();

    let start = Instant::now();
    let backend = b.open(profile)?;
    let open = start.elapsed();

    let start = Instant::now();
    model.check(backend.info().backend.id())?;
    let ports = model.inputs()?;
    let check = start.elapsed();

    let start = Instant::now();
    let inputs = source::resolve(&ports, a, fill)?;
    let read = start.elapsed();

    let start = Instant::now();
    let imported = import(&model, &inputs)?;
    Ok(Loaded {
        backend,
        inputs,
        imported,
        times: LoadTimes {
            load: decode + check + start.elapsed(),
            open,
            inputs: read,
        },
    })
}

/// The model's graph for inputs of these shapes.
pub fn import(model: &Model, inputs: &[Input]) -> Result<Imported> {
    let shapes: Vec<(&str, Shape)> = inputs
        .iter()
        .map(|i| (i.name.as_str(), Shape::from(&i.data.dims)))
        .collect();
    model.import(&shapes)
}

impl Loaded {
    pub fn data(&self) -> Vec<ConstData> {
        self.inputs.iter().map(|i| i.data.clone()).collect()
    }

    pub fn input_json(&self) -> Value {
        self.inputs
            .iter()
            .map(|i| json!({ "name": i.name, "dtype": i.data.dtype, "shape": i.data.dims.as_slice(), "source": i.source }))
            .collect()
    }
}

/// The device that was chosen, and why, as JSON.
pub fn backend_json(b: &Backend) -> Value {
    let s = b.selection();
    json!({
        "id": b.id(),
        "name": b.info().name,
        "requested": s.requested,
        "rule": s.rule,
        "candidates": s.candidates,
        "device": s.device,
        "level": b.level(),
    })
}

/// Why a device was chosen, one line and one more for each that was not.
pub fn backend_text(b: &Backend) -> String {
    format!(
        "backend  {}\n",
        b.selection().to_string().replace('\n', "\n       ")
    )
}
