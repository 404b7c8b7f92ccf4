//! The memory that a model needs on a backend, from its plan.

use super::model::{OnnxModel, host_data};
use crate::backend::Backend;
use crate::calls::Work;
use crate::errors::exception;
use halcyon::ir::lower::lower;
use halcyon::onnx::{Outcome, PortType};
use halcyon::{ConstData, Error, Fit, Shape};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::HashMap;

/// The memory that the model needs for inputs of these sizes: bytes by kind, the free memory, and whether the
/// model fits. `values` are inputs whose values determine shapes.
#[pyfunction]
pub(crate) fn fit_onnx<'py>(
    py: Python<'py>,
    model: &OnnxModel,
    backend: &Backend,
    sizes: HashMap<String, Vec<usize>>,
    values: HashMap<String, Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let values = values.iter().map(|(n, v)| Ok((n.as_str(), host_data(v)?)));
    let values = values.collect::<PyResult<Vec<(&str, ConstData)>>>()?;
    let backend = &backend.0;
    let made = py.work(|| planned(model, backend, &sizes, &values))?;
    let d = PyDict::new(py);
    match made {
        Err(why) => {
            let what = format!("the memory of a model that is not one graph: {why}");
            return Err(exception(Error::unsupported(what, "Give the sizes and values of its inputs")));
        }
        Ok((fit, free, total)) => {
            let parts = PyDict::new(py);
            fit.parts().iter().try_for_each(|(name, n)| parts.set_item(name, n))?;
            d.set_item("parts", parts)?;
            d.set_item("device", fit.device())?;
            d.set_item("total", fit.total())?;
            d.set_item("free", free)?;
            d.set_item("device_memory", total)?;
            d.set_item("fits", free.is_none_or(|free| fit.device() <= free))?;
        }
    }
    Ok(d)
}

/// The need of the plan, the free memory of the device and its whole memory; or why the model is not one
/// graph.
type Planned = std::result::Result<(Fit, Option<u64>, Option<u64>), String>;

fn planned(
    model: &OnnxModel,
    backend: &halcyon::Backend,
    sizes: &HashMap<String, Vec<usize>>,
    values: &[(&str, ConstData)],
) -> halcyon::Result<Planned> {
    model.file.check(backend.info().backend.id())?;
    // Planning itself takes memory, so the free memory is measured before.
    let device = backend.device();
    let free = device.available();
    let total = device.memory().limit.or(device.info().total_memory);
    let ports = model.file.inputs()?;
    if let Some(name) = sizes.keys().find(|n| !ports.iter().any(|p| p.name == **n)) {
        let all: Vec<&str> = ports.iter().map(|p| p.name.as_str()).collect();
        let what = format!("the model has no input \"{name}\"; its inputs are {}", all.join(", "));
        return Err(Error::argument("fit", what));
    }
    let mut shapes: Vec<(&str, Shape)> = vec![];
    for p in &ports {
        let PortType::Tensor { shape, .. } = &p.ty else {
            return Ok(Err(format!("'{}' is {}", p.name, p.ty.kind())));
        };
        let known = shape.as_ref().and_then(|s| s.known());
        match sizes.get(&p.name).map(Vec::as_slice).or(known.as_deref()) {
            Some(dims) => shapes.push((&p.name, dims.into())),
            None => {
                let what = format!("the sizes of the input \"{}\" ({}) are missing", p.name, p.ty);
                return Err(Error::argument("fit", what));
            }
        }
    }
    let graph = match model.file.outcome(&shapes, values)? {
        Outcome::Staged(why) => return Ok(Err(why)),
        Outcome::Graph(g) => g.graph,
    };
    let all: Vec<Shape> = shapes.iter().map(|(_, s)| s.clone()).collect();
    let graph = graph.bind(&graph.solve(&all)?)?;
    let mut bytes = vec![];
    for (p, s) in ports.iter().zip(&all) {
        bytes.push(p.dtype()?.bytes(s.dims()?.iter().product()));
    }
    let plan = match backend.lower_to_fit(&graph, &bytes) {
        // If no plan fits the free memory, the fastest plan is reported.
        Err(Error::OutOfMemory { .. }) => lower(&graph, device.as_target(), &backend.lower_options())?,
        other => other?,
    };
    Ok(Ok((Fit::of(&**device, &plan, &bytes), free, total)))
}
