//! `halcyon select`: which device a model would run on and why, what it needs there, and which op would run where.

use super::{backend_json, backend_text, level_text, split};
use crate::args::SelectArgs;
use crate::report::{self, size};
use crate::source::{self, Input};
use halcyon::split::Placement;
use halcyon::{Backend, ConstData, Fit, Result, Shape};
use halcyon_formats::onnx::{Model, Outcome};
use serde_json::{Value, json};
use std::fmt::Write;

pub fn main(a: &SelectArgs) -> Result<u8> {
    a.backend.check()?;
    split::check(&a.split)?;
    let model = Model::open(&a.model)?;
    let ports = model.inputs()?;
    let inputs = source::resolve(&ports, &a.input, true)?;
    let outcome = graph(&model, &inputs)?;
    let args = split::first(&a.split, &a.backend)?;
    let builder = args.builder(args.level()?, None, false)?;
    let bytes: Vec<usize> = inputs.iter().filter_map(|i| i.data.tensor()).map(|t| t.bytes().len()).collect();
    let several = a.split.split.is_some() || a.split.may_leave.is_some();
    let backend = match &outcome {
        // Parts of it are planned below.
        Outcome::Graph(_) if several => builder.build()?,
        Outcome::Graph(g) => builder.build_for(&g.graph, &bytes)?,
        // Its stages are known when it runs.
        Outcome::Staged(_) => builder.build()?,
    };
    model.check(backend.info().backend.id())?;
    let planned = match &outcome {
        Outcome::Graph(g) => {
            let needs = match several {
                true => None,
                false => {
                    let plan = backend.lower_to_fit(&g.graph, &bytes)?;
                    Some(Fit::of(&backend, &plan, &bytes))
                }
            };
            let x = split::assign(&a.split, &a.backend, &backend, &g.graph)?;
            Ok((needs, Placement::of(&x.backends, &g.graph, &x.of, &x.why)?, x.backends))
        }
        Outcome::Staged(why) => Err(why.as_str()),
    };
    let done = Done { a, backend: &backend, inputs: &inputs, planned };
    match a.json {
        true => report::print_json(&done.json())?,
        false => report::print(&done.text())?,
    }
    Ok(0)
}

/// The model for these inputs.
fn graph(model: &Model, inputs: &[Input]) -> Result<Outcome> {
    let tensors: Option<Vec<(&str, &ConstData)>> =
        inputs.iter().map(|i| Some((i.name.as_str(), i.data.tensor()?))).collect();
    let Some(tensors) = tensors else {
        return Ok(Outcome::Staged("an input is no tensor".into()));
    };
    let shapes: Vec<(&str, Shape)> = tensors.iter().map(|(n, t)| (*n, Shape::from(&t.dims))).collect();
    let values: Vec<(&str, ConstData)> = tensors.iter().map(|(n, t)| (*n, (*t).clone())).collect();
    Ok(match model.outcome(&shapes, &values)? {
        Outcome::Graph(mut g) => {
            let sizes: Vec<Shape> = shapes.into_iter().map(|(_, s)| s).collect();
            g.graph = g.graph.bind(&g.graph.solve(&sizes)?)?;
            Outcome::Graph(g)
        }
        staged => staged,
    })
}

struct Done<'a> {
    a: &'a SelectArgs,
    backend: &'a Backend,
    inputs: &'a [Input],
    /// Memory (of one device), placement and the devices; or why the model is no single graph.
    planned: std::result::Result<(Option<Fit>, Placement, Vec<Backend>), &'a str>,
}

impl Done<'_> {
    fn text(&self) -> String {
        let mut out = format!("model    {}\n", self.a.model.display());
        // Writing to a string does not fail.
        for i in self.inputs {
            let _ = writeln!(out, "input    {} {} from {}", i.name, i.data.describe(), i.source);
        }
        match &self.planned {
            Ok((_, _, all)) if all.len() > 1 => all.iter().for_each(|b| out += &backend_text(b)),
            _ => out += &backend_text(self.backend),
        }
        let _ = writeln!(out, "level    {}", level_text(self.backend));
        match &self.planned {
            Err(why) => {
                let _ = writeln!(
                    out,
                    "placement not known before a run, since the model is no single graph: {why}"
                );
            }
            Ok((needs, placement, _)) => {
                if let Some(f) = needs {
                    let free = self.backend.device().available();
                    let _ = writeln!(
                        out,
                        "needs    {} on the device{} (weights {}, packed {}, activations {}, inputs and outputs {})",
                        size(f.device()),
                        free.map_or(String::new(), |b| format!(", of {} free", size(b))),
                        size(f.weights),
                        size(f.packed),
                        size(f.activations + f.workspace),
                        size(f.inputs + f.outputs)
                    );
                }
                out += &split::text(placement);
            }
        }
        out
    }

    fn json(&self) -> Value {
        let inputs: Vec<Value> = self
            .inputs
            .iter()
            .map(|i| json!({ "name": i.name, "type": i.data.describe(), "source": i.source }))
            .collect();
        let mut v = json!({ "model": self.a.model, "inputs": inputs, "backend": backend_json(self.backend) });
        match &self.planned {
            Err(why) => v["staged"] = json!(why),
            Ok((needs, placement, all)) => {
                v["backends"] = all.iter().map(backend_json).collect();
                v["placement"] = json!(placement);
                v["placement"]["between_bytes"] = json!(placement.between());
                v["placement"]["flops_elsewhere"] = json!(placement.flops_elsewhere());
                if let Some(f) = needs {
                    v["needs"] = json!(f);
                    v["needs"]["device"] = json!(f.device());
                    v["needs"]["free"] = json!(self.backend.device().available());
                }
            }
        }
        v
    }
}
