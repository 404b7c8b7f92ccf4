//! `halcyon select`: which device a model would run on and why, how much memory it needs there, and where
//! each op would run.

use super::run::answer::placement_text;
use super::{backend_json, level_text, rejected_text, split};
use crate::args::SelectArgs;
use crate::report::{self, short, size, wrap};
use crate::source::{self, Input};
use halcyon::split::Placement;
use halcyon::{Backend, ConstData, Fit, Result, Shape};
use halcyon_formats::onnx::{Model, Outcome};
use serde_json::{Value, json};
use std::fmt::Write;

pub(crate) fn main(a: &SelectArgs) -> Result<u8> {
    a.backend.check()?;
    split::check(&a.split)?;
    let model = super::open(&a.model)?;
    let ports = model.inputs()?;
    let inputs = source::resolve(&ports, &super::with_tokenizer(&a.model, &a.input), true)?;
    let outcome = graph(&model, &inputs)?;
    let args = split::first(&a.split, &a.backend)?;
    let builder = args.builder(args.level()?, None, false)?;
    let bytes: Vec<usize> = inputs.iter().filter_map(|i| i.data.tensor()).map(|t| t.bytes().len()).collect();
    let several = a.split.split.is_some() || a.split.may_leave.is_some();
    let backend = match &outcome {
        // A split model is not planned for one device; its ops are assigned below.
        Outcome::Graph(_) if several => builder.build()?,
        Outcome::Graph(g) => builder.build_for(&g.graph, &bytes)?,
        // The stages are known only at run time.
        Outcome::Staged(_) => builder.build()?,
    };
    crate::args::print_warnings(&backend);
    model.check(backend.info().backend.id())?;
    let planned = match &outcome {
        Outcome::Graph(g) => {
            let needs = match several {
                true => None,
                false => {
                    let plan = backend.lower_to_fit(&g.graph, &bytes)?;
                    Some(Fit::of(&**backend.device(), &plan, &bytes))
                }
            };
            let x = split::assign(&a.split, &a.backend, &backend, &g.graph)?;
            Ok((needs, Placement::of(&x.backends, &g.graph, &x.of, &x.why)?, x.backends))
        }
        Outcome::Staged(why) => Err(why.as_str()),
    };
    let done = Report { a, backend: &backend, inputs: &inputs, planned };
    match a.json {
        true => report::print_json(&done.json())?,
        false => report::print(&done.text())?,
    }
    Ok(0)
}

/// A text such as `46.4 KiB of 22.7 GiB free: weights 20.4 KiB (read in place), activations 5.5 KiB, ...`.
fn needs_text(f: &Fit, free: Option<u64>, caveat: &str) -> String {
    let free = free.map_or("free memory unknown".into(), |b| format!("of {} free{caveat}", size(b)));
    let parts: Vec<String> =
        f.parts().iter().filter(|(_, n)| *n > 0).map(|(what, n)| format!("{what} {}", size(*n))).collect();
    format!("{} {free}: {}", size(f.total()), parts.join(", "))
}

/// Imports the model for these inputs.
fn graph(model: &Model, inputs: &[Input]) -> Result<Outcome> {
    let tensors: Option<Vec<(&str, &ConstData)>> =
        inputs.iter().map(|i| Some((i.name.as_str(), i.data.tensor()?))).collect();
    let Some(tensors) = tensors else {
        return Ok(Outcome::Staged("an input is not a tensor".into()));
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

/// Why a device was selected: the reason that `run` prints, or if it prints none, the rule of the selection.
fn why(b: &Backend) -> String {
    let place = placement_text(b);
    match place.split_once(": ") {
        // This report contains the reasons, so the reference to `halcyon devices` is removed.
        Some((_, why)) => why.trim_end_matches(" (for the reasons: halcyon devices)").to_string(),
        None => b.selection().rule.clone(),
    }
}

struct Report<'a> {
    a: &'a SelectArgs,
    backend: &'a Backend,
    inputs: &'a [Input],
    /// Memory (for one device), placement and devices; or the reason why the model is not a single graph.
    planned: std::result::Result<(Option<Fit>, Placement, Vec<Backend>), &'a str>,
}

impl Report<'_> {
    /// The devices, the memory needed and the placement of ops; then why no other device was selected.
    fn text(&self) -> String {
        let mut out = String::new();
        let one = std::slice::from_ref(self.backend);
        let all = match &self.planned {
            Ok((_, _, all)) if all.len() > 1 => &all[..],
            _ => one,
        };
        // Writing to a string cannot fail.
        for b in all {
            let _ =
                writeln!(out, "{} ({}), {}: {}", b.id(), short(&b.info().name, 60), level_text(b), why(b));
        }
        if report::quiet() {
            return out;
        }
        match &self.planned {
            Err(why) => {
                let why = report::name(why);
                let why = format!("not known before a run, since the model is not a single graph: {why}");
                out += &wrap(&why, "placement  ", "           ");
            }
            Ok((needs, placement, _)) => {
                if let Some(f) = needs {
                    let device = self.backend.device();
                    out += &wrap(
                        &needs_text(f, device.available(), device.unknown_free()),
                        "needs      ",
                        "           ",
                    );
                }
                out += &split::text(placement);
            }
        }
        for i in self.inputs.iter().filter(|_| report::verbose()) {
            let _ = writeln!(out, "input      {} {} from {}", i.name, i.data.describe(), i.source);
        }
        all.iter().for_each(|b| out += &rejected_text(b, ""));
        out
    }

    fn json(&self) -> Value {
        let inputs: Vec<Value> = self
            .inputs
            .iter()
            .map(|i| json!({ "name": i.name, "type": i.data.describe(), "source": i.source }))
            .collect();
        let mut v = json!({ "model": report::path(&self.a.model), "inputs": inputs, "backend": backend_json(self.backend) });
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
                    v["needs"]["total"] = json!(f.total());
                    v["needs"]["free"] = json!(self.backend.device().available());
                }
            }
        }
        v
    }
}
