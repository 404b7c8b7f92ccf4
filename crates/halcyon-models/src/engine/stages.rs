//! The stages of a step: one compiled function for each, and what they hand to each other.

use super::inputs::{StepRows, split};
use super::{Engine, EngineOptions};
use crate::decoder::run::{Handed, StageStates};
use crate::decoder::{CacheLayout, CacheShape, Decoder};
use crate::device_sample;
use halcyon::ir::error::{Error, Result};
use halcyon::{Compiled, State, Tensor};
use std::ops::Range;
use std::sync::Arc;

pub(super) type StepFn = Box<dyn Fn(&[Tensor]) -> Vec<Tensor> + Send + Sync>;

/// What the last stage of a step gives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Want {
    pub(crate) kind: Kind,
    /// Whether the activations of all rows after the last norm are given too.
    pub(crate) activations: bool,
}

impl Want {
    /// Nothing beside this.
    pub(crate) fn only(kind: Kind) -> Want {
        Want { kind, activations: false }
    }
}

/// The results for the rows that are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Logits,
    /// The activations after the last norm.
    Activations,
    /// Both.
    Ahead,
    /// The numbers and values of the largest logits, and how many of each row.
    Largest(usize),
}

/// A stage that runs.
pub(super) struct Runner {
    pub(super) step: Compiled<StepFn>,
    pub(super) states: Vec<State>,
}

/// The inputs of a stage before the rows: what the stage before hands over.
fn handed_count(model: &Decoder, stage: usize) -> usize {
    match stage {
        0 => 0,
        _ => 1 + usize::from(takes_inputs(model, stage)),
    }
}

/// Whether the stage reads the layers' own inputs, which the first stage makes.
fn takes_inputs(model: &Decoder, stage: usize) -> bool {
    let layers = model.spec.layers.len();
    stage > 0 && model.spec.per_layer.is_some() && model.stages[stage].has_feed_forward(layers)
}

/// Whether only the head is computed after this stage, or in it: then it gets the wanted rows only, unless
/// the activations of all rows are wanted.
fn head_only(model: &Decoder, stage: usize, want: Want) -> bool {
    !want.activations
        && model.stages.get(stage).is_some_and(|s| s.parts.len() == 1 && !s.has_embedding())
        && stage + 1 == model.stages.len()
}

/// The states of the layers that a stage shares with earlier ones.
pub(crate) fn shared_shapes(model: &Decoder, stage: usize, layout: CacheLayout) -> Vec<CacheShape> {
    let of = |k: &usize| model.layer_shapes(&model.spec.layers[*k], layout);
    model.stages[stage].shared.iter().flat_map(of).collect()
}

/// The states of a stage among those of all layers.
pub(crate) fn own_states(model: &Decoder, stage: usize, layout: CacheLayout) -> Range<usize> {
    let count = |layers: Range<usize>| {
        model.spec.layers[layers].iter().map(|l| model.layer_shapes(l, layout).len()).sum::<usize>()
    };
    let mixers = model.stages[stage].mixers.clone();
    let first = count(0..mixers.start);
    first..first + count(mixers)
}

/// Dimensions of the tensors, all f32, that a stage gets from earlier ones in a step of `rows` rows of which
/// `wanted` are wanted.
pub(crate) fn handed_shapes(
    model: &Decoder,
    stage: usize,
    (rows, wanted): (usize, usize),
    want: Want,
) -> Vec<Vec<usize>> {
    let n = if head_only(model, stage, want) { wanted } else { rows };
    let x = (stage > 0).then(|| vec![n, model.spec.hidden]);
    let own = model.spec.per_layer.filter(|_| takes_inputs(model, stage));
    x.into_iter().chain(own.map(|p| vec![rows, model.spec.layers.len(), p.size])).collect()
}

/// The results of a stage: what it hands over, or the results of the step, and new states. `x` are what the
/// stage before handed over, the rows, the states that the stage shares, and its own.
pub(crate) fn stage_results(
    model: &Decoder,
    stage: usize,
    layout: CacheLayout,
    want: Want,
    x: &[Tensor],
) -> Vec<Tensor> {
    let (handed, x) = x.split_at(handed_count(model, stage));
    let handed = handed.first().map(|x| Handed { x: x.clone(), inputs: handed.get(1).cloned() });
    let Some((rows, states)) = split(x, model) else { return vec![] };
    let (shared, own) = states.split_at(shared_shapes(model, stage, layout).len());
    let (made, new) = model.run(stage, handed, rows, StageStates { own, shared, layout });
    let mut out = vec![];
    if stage + 1 < model.stages.len() {
        out.push(if head_only(model, stage + 1, want) { made.x.gather(rows.wanted, 0) } else { made.x });
        if stage == 0 {
            out.extend(made.inputs);
        }
        out.extend(new);
        return out;
    }
    let all = model.finished(&made.x);
    let x = if head_only(model, stage, want) { all.clone() } else { all.gather(rows.wanted, 0) };
    match want.kind {
        Kind::Activations => out.push(x),
        Kind::Logits => out.push(model.logits(&x)),
        Kind::Ahead => out.extend([model.logits(&x), x]),
        Kind::Largest(k) => {
            let rows = x.dims().map_or(0, |d| d[0]);
            out.extend(device_sample::largest(&model.logits(&x), [rows, model.spec.vocabulary], k));
        }
    }
    if want.activations {
        out.push(all);
    }
    out.extend(new);
    out
}

/// Compiles a stage.
pub(super) fn compile(
    model: &Arc<Decoder>,
    stage: usize,
    layout: CacheLayout,
    want: Want,
) -> Compiled<StepFn> {
    let backend = model.placement.devices[model.stages[stage].device].clone();
    let model = model.clone();
    let f: StepFn = Box::new(move |x: &[Tensor]| stage_results(&model, stage, layout, want, x));
    backend.compile(f)
}

/// The stages of a decoder, with empty caches.
pub(super) fn runners(model: &Arc<Decoder>, options: EngineOptions, want: Want) -> Result<Vec<Runner>> {
    let layout = options.layout();
    let shapes = model.cache_shapes(layout);
    let mut all = vec![];
    for (n, stage) in model.stages.iter().enumerate() {
        let backend = &model.placement.devices[stage.device];
        let mut states = vec![];
        for shape in &shapes[own_states(model, n, layout)] {
            states.push(State::zeros(backend, shape.dims, shape.dtype)?);
        }
        all.push(Runner { step: compile(model, n, layout, want), states });
    }
    Ok(all)
}

impl Engine {
    /// Computes a step. `last` replaces the compiled function of the last stage.
    pub(super) fn run(&self, rows: &StepRows, last: Option<&Compiled<StepFn>>) -> Result<Vec<Tensor>> {
        let model = &*self.decoder;
        let devices = &model.placement.devices;
        // The rows on each device that has a stage.
        let mut inputs: Vec<Option<Vec<Tensor>>> = vec![None; devices.len()];
        for d in model.stages.iter().map(|s| s.device) {
            if inputs[d].is_none() {
                inputs[d] = Some(self.inputs(&devices[d], rows)?);
            }
        }
        let missing = || Error::internal("a stage lacks a result");
        // The activations, and the layers' own inputs on each device that needs them.
        let mut x: Option<Tensor> = None;
        let mut own: Vec<Option<Tensor>> = vec![None; devices.len()];
        for (n, (stage, runner)) in model.stages.iter().zip(&self.stages).enumerate() {
            let backend = &devices[stage.device];
            let handed = x.take().map(|x| x.to(backend)).transpose()?;
            if takes_inputs(model, n) && own[stage.device].is_none() {
                let made = own.iter().flatten().next().ok_or_else(missing)?;
                own[stage.device] = Some(made.to(backend)?);
            }
            let inner = own[stage.device].as_ref().filter(|_| takes_inputs(model, n));
            let shared = self.shared_states(n);
            let all = handed.iter().chain(inner);
            let all = all.chain(inputs[stage.device].iter().flatten()).chain(&shared);
            let all: Vec<&Tensor> = all.collect();
            let states: Vec<&State> = runner.states.iter().collect();
            let end = n + 1 == model.stages.len();
            let step = last.filter(|_| end).unwrap_or(&runner.step);
            let mut out = step.call_updating(&all, &states, &[])?;
            if end {
                let states = || self.stages.iter().flat_map(|s| &s.states);
                self.supply.get_or_init(|| State::supply(states()));
                return Ok(out);
            }
            if n == 0 && model.spec.per_layer.is_some() {
                own[stage.device] = Some(out.pop().ok_or_else(missing)?);
            }
            x = Some(out.pop().ok_or_else(missing)?);
        }
        Err(missing())
    }

    /// The states of the layers that a stage shares with earlier ones.
    fn shared_states(&self, stage: usize) -> Vec<Tensor> {
        let (model, layout) = (&*self.decoder, self.options.layout());
        let find = |k: &usize| {
            let owner = model.stages.iter().position(|s| s.mixers.contains(k));
            let Some(owner) = owner else { return vec![] };
            let count = |l: Range<usize>| {
                model.spec.layers[l].iter().map(|l| model.layer_shapes(l, layout).len()).sum::<usize>()
            };
            let first = count(model.stages[owner].mixers.start..*k);
            let states = &self.stages[owner].states[first..first + count(*k..*k + 1)];
            states.iter().map(State::value).collect()
        };
        model.stages[stage].shared.iter().flat_map(find).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Feed;
    use crate::placement::Placement;
    use crate::source::Source;
    use halcyon::{Backend, BackendType, DType};
    use std::path::Path;

    #[test]
    fn activations_cross_devices() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/smollm3");
        let source = Source::open(&dir).unwrap();
        let spec = crate::family::spec(&source).unwrap();
        let [a, b] = [(); 2].map(|()| Backend::new(BackendType::Cpu).unwrap());
        let hidden = |p: Placement| {
            let decoder = Decoder::load_on(p, &source, spec.clone(), 64).unwrap();
            let o = EngineOptions {
                positions: 64,
                cache: DType::F32.into(),
                chunk: 4,
                ..EngineOptions::default()
            };
            let mut e = Engine::of_activations(Arc::new(decoder), o).unwrap();
            e.feed(&[Feed { sequence: 0, tokens: &[1, 2, 3, 4, 5, 6], all: true }]).unwrap().remove(0)
        };
        let one = hidden(Placement::single(&a, 4));
        assert_eq!(one.len(), 6 * spec.hidden);
        assert_eq!(hidden(Placement::last_layers(&a, &b, 2, &spec).unwrap()), one);
        let last = Placement { head: 1, ..Placement::last_layers(&a, &b, 2, &spec).unwrap() };
        assert_eq!(hidden(last), one);
    }
}
