//! The commands.

pub mod conformance;
pub mod devices;
pub mod probe;
pub mod run;
pub mod trace;

use crate::args::{BackendArgs, InputArgs};
use crate::report;
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
        times: LoadTimes { load: decode + check + start.elapsed(), open, inputs: read },
    })
}

/// The model's graph for inputs of these shapes. Where an input steers a shape, the graph holds for its value.
pub fn import(model: &Model, inputs: &[Input]) -> Result<Imported> {
    let shapes: Vec<(&str, Shape)> =
        inputs.iter().map(|i| (i.name.as_str(), Shape::from(&i.data.dims))).collect();
    let values: Vec<(&str, ConstData)> = inputs.iter().map(|i| (i.name.as_str(), i.data.clone())).collect();
    model.import_with(&shapes, &values)
}

impl Loaded {
    pub fn data(&self) -> Vec<ConstData> {
        self.inputs.iter().map(|i| i.data.clone()).collect()
    }

    /// A line for each input.
    pub fn input_text(&self) -> String {
        let mut out = String::new();
        for i in &self.inputs {
            let fixed = match self.imported.fixed.contains(&i.name) {
                true => " (steers a shape: the plan holds for this value)",
                false => "",
            };
            out += &format!(
                "input    {} {}{:?} from {}{fixed}\n",
                i.name,
                i.data.dtype,
                i.data.dims.as_slice(),
                i.source
            );
        }
        out
    }

    pub fn input_json(&self) -> Value {
        let one = |i: &Input| {
            json!({
                "name": i.name,
                "dtype": i.data.dtype,
                "shape": i.data.dims.as_slice(),
                "source": i.source,
                "steers_shape": self.imported.fixed.contains(&i.name),
            })
        };
        self.inputs.iter().map(one).collect()
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

/// Why a device was chosen, and a line for every reason that others were not.
pub fn backend_text(b: &Backend) -> String {
    let s = b.selection();
    let mut out = format!("backend  {} ({}): {}\n", b.id(), b.info().name, s.rule);
    let mut reasons: Vec<(String, Vec<&str>)> = vec![];
    for c in &s.candidates {
        let Some(why) = &c.rejected else { continue };
        let why = report::reason(c.backend, why);
        let who = c.device.as_deref().unwrap_or(c.backend.id());
        match reasons.iter_mut().find(|(r, _)| *r == why) {
            Some((_, v)) => v.push(who),
            None => reasons.push((why, vec![who])),
        }
    }
    for (why, who) in reasons {
        out += &format!("         not {}: {}\n", who.join(", "), why.replace('\n', " "));
    }
    out
}
