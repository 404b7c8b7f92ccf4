//! `halcyon compare`: runs a model with two programs and compares outputs, times and memory. If an output
//! differs, finds the first node whose result differs.

pub(super) mod memory;
mod nodes;
mod report;
mod side;

use super::bounds;
use super::difference::{Difference, Tolerance};
use super::verify::EXIT_DIFFERS;
use crate::args::{CompareArgs, Runtime};
use crate::cmd::with_tokenizer;
use crate::report::{self as tell, Progress};
use crate::source::{self, Input};
use halcyon::onnx::MAX_ITERATIONS;
use halcyon::{Error, Result};
use halcyon_formats::onnx::{Datum, Model};
use nodes::Search;
use report::Report;
use side::Side;
use std::path::Path;
use std::time::Duration;

/// Runs of each program that are not timed.
const WARM_UP: u32 = 2;
/// Smallest relative tolerance for f16, four units in the last place: Halcyon rounds after every operation,
/// and other programs also after fewer.
const RTOL_F16: f64 = 1.0 / 256.0;

/// The comparison of one output.
#[derive(Debug)]
struct Output {
    name: String,
    /// Type and shape, from the reference.
    ty: String,
    difference: Difference,
}

/// The programs, each with its model's file.
fn sides(a: &CompareArgs) -> Result<[(Runtime, &Path); 2]> {
    let [first, second] = a.runtimes[..] else {
        let n = a.runtimes.len();
        return Err(Error::argument("--runtimes", format!("two programs are compared, and {n} are given")));
    };
    if first == second && a.against.is_none() {
        let what = "both programs are the same; name another program, or another model with --against";
        return Err(Error::argument("--runtimes", what));
    }
    Ok([(first, &a.model), (second, a.against.as_deref().unwrap_or(&a.model))])
}

/// The inputs of both models.
fn inputs(a: &CompareArgs, model: &Model, other: Option<&Model>) -> Result<Vec<Input>> {
    let ports = model.inputs()?;
    if let Some(other) = other {
        let names =
            |m: &Model| -> Result<Vec<String>> { Ok(m.inputs()?.into_iter().map(|p| p.name).collect()) };
        let (mine, theirs) = (names(model)?, names(other)?);
        if mine != theirs {
            let what = format!("the models have other inputs: {} and {}", mine.join(", "), theirs.join(", "));
            return Err(Error::argument("--against", what));
        }
    }
    source::resolve(&ports, &with_tokenizer(&a.model, &a.input), true)
}

pub(crate) fn main(a: &CompareArgs) -> Result<u8> {
    let [(first, path), (second, other_path)] = sides(a)?;
    if [first, second].contains(&Runtime::Halcyon) {
        a.backend.check()?;
    }
    bounds::set(MAX_ITERATIONS);
    let model = super::open(path)?;
    let other = a.against.as_deref().map(super::open).transpose()?;
    let inputs = inputs(a, &model, other.as_ref())?;
    let draws = model.draws();

    let mut left = Side::open(a, first, path, &inputs, None)?;
    let mut right = Side::open(a, second, other_path, &inputs, Some(&left))?;
    let tolerance = Tolerance { rtol: a.rtol, atol: a.atol, rtol_f16: RTOL_F16 };
    let compare = |got: &Datum, want: &Datum| match draws {
        true => Difference::of_types(got, want),
        false => Difference::between(got, want, &tolerance),
    };
    let outputs = compared_outputs(&mut left, &mut right, &compare)?;
    let times = timed(a, &mut left, &mut right)?;
    let differs = outputs.iter().any(|o| !o.difference.agrees());
    let search = match differs && !draws {
        true => Some(search(&model, other.as_ref(), [&left, &right], &inputs, &compare)?),
        false => None,
    };
    let memory = [0, 1].map(|side| memory::measure(a, side));
    let done = Report {
        a,
        sides: [&left, &right],
        inputs: &inputs,
        draws,
        outputs: &outputs,
        search: search.as_ref(),
        times,
        memory,
    };
    match a.json {
        true => tell::print_json(&done.json())?,
        false => tell::print(&done.text())?,
    }
    if !a.json && !tell::verbose() {
        done.warnings();
    }
    Ok(if differs { EXIT_DIFFERS } else { 0 })
}

/// Compares the outputs of a run of each program, by name.
fn compared_outputs(
    left: &mut Side,
    right: &mut Side,
    compare: &dyn Fn(&Datum, &Datum) -> Difference,
) -> Result<Vec<Output>> {
    let (got, want) = (left.run()?.0, right.run()?.0);
    let missing = |name: &str| {
        Error::argument("--against", format!("only one of the two models has the output '{name}'"))
    };
    if let Some((name, _)) = want.iter().find(|(n, _)| got.iter().all(|(g, _)| g != n)) {
        return Err(missing(name));
    }
    got.iter()
        .map(|(name, g)| {
            let (_, w) = want.iter().find(|(n, _)| n == name).ok_or_else(|| missing(name))?;
            Ok(Output { name: name.clone(), ty: w.describe(), difference: compare(g, w) })
        })
        .collect()
}

/// The times of runs that alternate between the programs.
fn timed(a: &CompareArgs, left: &mut Side, right: &mut Side) -> Result<[Vec<Duration>; 2]> {
    let mut times = [vec![], vec![]];
    let mut progress = Progress::bar("run", u64::from(a.repeat));
    // The comparison of the outputs was the first run.
    for i in 1..WARM_UP + a.repeat {
        let both = [left.run()?.1, right.run()?.1];
        if i >= WARM_UP {
            times.iter_mut().zip(both).for_each(|(all, t)| all.push(t));
            progress.step();
        }
    }
    progress.finish();
    Ok(times)
}

/// Searches the nodes of the first model, as far as the second one has values of the same names.
fn search(
    model: &Model,
    other: Option<&Model>,
    sides: [&Side; 2],
    inputs: &[Input],
    compare: &dyn Fn(&Datum, &Datum) -> Difference,
) -> Result<Search> {
    tell::note("an output differs; comparing the values between the nodes");
    let nodes = model.main_nodes()?;
    let theirs = other.map(Model::main_nodes).transpose()?;
    let outputs: Vec<String> = model.output_names()?;
    let mut values = |names: &[String]| -> Result<Vec<(String, Difference)>> {
        let [left, right] = sides;
        let got = left.exposing(names, inputs)?.run()?.0;
        let want = right.exposing(names, inputs)?.run()?.0;
        // A side leaves out values that it cannot return.
        let pair = |(name, g): &(String, Datum)| {
            let (_, w) = want.iter().find(|(n, _)| n == name)?;
            Some((name.clone(), compare(g, w)))
        };
        Ok(got.iter().filter_map(pair).collect())
    };
    nodes::search(&nodes, theirs.as_deref(), &outputs, &mut values)
}
