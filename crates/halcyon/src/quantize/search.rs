//! Measures errors, and finds the layers that can be quantised within the bound.

use super::calibrate::Range;
use super::layers::Layer;
use super::report::{LayerReport, QuantizeReport};
use super::rewrite::{Rounded, rewrite};
use super::{QuantizeOptions, WeightType};
use crate::backend::Backend;
use crate::session::Session;
use halcyon_ir::composite::CompositeKind;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::{ConstData, Graph, NodeId};
use std::collections::HashMap;

/// The error of results. The error of one output is the largest difference from the reference, divided by the
/// standard deviation of the reference, both over all samples. If an output is nearly constant in the
/// reference, its largest magnitude takes the place of the standard deviation. The result is the largest
/// error over all outputs. The error is infinite if shapes or dtypes differ, or if a value that is not finite
/// differs from the reference.
///
/// Each item holds the outputs for one sample.
pub fn error(got: &[Vec<ConstData>], reference: &[Vec<ConstData>]) -> f64 {
    let outputs = reference.first().map_or(0, Vec::len);
    (0..outputs).map(|k| one_output(got, reference, k)).fold(0.0, f64::max)
}

fn one_output(got: &[Vec<ConstData>], reference: &[Vec<ConstData>], k: usize) -> f64 {
    let (mut worst, mut n, mut mean, mut squares, mut top) = (0f64, 0f64, 0f64, 0f64, 0f64);
    if got.len() != reference.len() {
        return f64::INFINITY;
    }
    for (g, r) in got.iter().zip(reference) {
        let (Some(g), Some(r)) = (g.get(k), r.get(k)) else { return f64::INFINITY };
        if g.dims != r.dims || g.dtype != r.dtype {
            return f64::INFINITY;
        }
        for (a, b) in g.scalars().zip(r.scalars()) {
            let (a, b) = (a.as_f64(), b.as_f64());
            if !a.is_finite() || !b.is_finite() {
                if a != b && !(a.is_nan() && b.is_nan()) {
                    return f64::INFINITY;
                }
                continue;
            }
            worst = worst.max((a - b).abs());
            top = top.max(b.abs());
            // Welford's method, which avoids cancellation.
            n += 1.0;
            let d = b - mean;
            mean += d / n;
            squares += d * (b - mean);
        }
    }
    if worst == 0.0 {
        return 0.0;
    }
    let deviation = (squares / n.max(1.0)).sqrt();
    worst / if deviation > 1e-6 * top { deviation } else { top.max(f64::MIN_POSITIVE) }
}

/// The graphs and layers of a search.
pub(super) struct Trial<'a> {
    pub backend: &'a Backend,
    pub reference: &'a Backend,
    pub original: &'a Graph,
    pub layers: &'a [Layer],
}

/// The state of a search.
struct Search<'a> {
    trial: &'a Trial<'a>,
    ranges: &'a HashMap<NodeId, Range>,
    samples: &'a [Vec<ConstData>],
    want: Vec<Vec<ConstData>>,
    options: &'a QuantizeOptions,
    rounded: Rounded,
    trials: usize,
}

impl Trial<'_> {
    /// Quantises as many layers as the bound allows.
    pub(super) fn search(
        &self,
        ranges: &HashMap<NodeId, Range>,
        samples: &[Vec<ConstData>],
        options: &QuantizeOptions,
    ) -> Result<(Graph, QuantizeReport)> {
        let session = Session::new(self.reference, self.original.clone());
        let want = samples.iter().map(|s| session.run(s)).collect::<Result<Vec<_>>>()?;
        let rounded = Rounded::default();
        Search { trial: self, ranges, samples, want, options, rounded, trials: 0 }.run()
    }
}

/// The type of each layer's weights; `None` if the layer is not quantised.
type Types = Vec<Option<WeightType>>;

/// A graph with layers of these types, and its error.
struct Tried {
    types: Types,
    graph: Graph,
    error: f64,
}

/// The result of a search for the largest number of layers of a type.
#[derive(Default)]
struct Most {
    /// The best graph within the bound.
    best: Option<Tried>,
    /// The error of each layer by itself, on the first sample.
    alone: HashMap<usize, f64>,
    /// The layer with the least error by itself, and the error on all samples if only this layer is changed.
    /// `None` if this was not measured.
    least: Option<(usize, f64)>,
}

impl Search<'_> {
    fn run(mut self) -> Result<(Graph, QuantizeReport)> {
        let weights = self.options.weights;
        let none: Types = vec![None; self.trial.layers.len()];
        let all = self.measure(self.with(&none, weights, None), usize::MAX)?;
        if weights == WeightType::F8 {
            self.need_products_of_f8(&all.graph)?;
        }
        if all.error <= self.options.max_error {
            let error = all.error;
            return self.report(all, error, &HashMap::new());
        }
        // First change as many layers as possible to the wider type. Then change as many of these layers as
        // possible to the requested type.
        let wide = match self.options.wider_type.weights().filter(|w| *w != weights) {
            Some(wide) => {
                let every = self.measure(self.with(&none, wide, None), usize::MAX)?;
                match every.error <= self.options.max_error {
                    true => Some(every),
                    false => self.most(&none, wide, &none)?.best,
                }
            }
            None => None,
        };
        let base = wide.as_ref().map_or(&none, |w| &w.types).clone();
        let found = self.most(&base, weights, &none)?;
        match found.best.or(wide) {
            Some(best) => self.report(best, all.error, &found.alone),
            None => Err(self.refusal(all.error, found.least)),
        }
    }

    /// `base` with the given layers in the type `to`. If `which` is `None`, every layer that can have the
    /// type gets it.
    fn with(&self, base: &Types, to: WeightType, which: Option<&[usize]>) -> Types {
        let mut types = base.clone();
        for k in which.map_or_else(|| self.able(to), <[usize]>::to_vec) {
            types[k] = Some(to);
        }
        types
    }

    /// The layers that can have the type.
    fn able(&self, to: WeightType) -> Vec<usize> {
        let layers = self.trial.layers;
        (0..layers.len()).filter(|k| layers[*k].quantizable(to).is_ok()).collect()
    }

    /// Changes as many layers of `base` to the type as the bound allows. `none` holds the types without any
    /// quantised layer.
    fn most(&mut self, base: &Types, to: WeightType, none: &Types) -> Result<Most> {
        // The error of each layer by itself only determines the order of the layers.
        let (mut found, mut order) = (Most::default(), self.able(to));
        for &k in &order {
            let types = self.with(none, to, Some(&[k]));
            found.alone.insert(k, self.measure(types, 1)?.error);
        }
        let of = |k: &usize| found.alone.get(k).copied().unwrap_or(f64::INFINITY);
        order.sort_by(|a, b| of(a).total_cmp(&of(b)));
        // A bisection for the largest number of layers, in the order of their errors, that meet the bound
        // together.
        let (mut low, mut high) = (0, order.len());
        while high - low > 1 || found.best.is_none() && low == 0 {
            let n = (low + high).div_ceil(2).min(high.max(2) - 1).max(1);
            let Some(first) = order.get(..n) else { break };
            let tried = self.measure(self.with(base, to, Some(first)), usize::MAX)?;
            if n == 1 {
                found.least = Some((order[0], tried.error));
            }
            if tried.error <= self.options.max_error {
                (low, found.best) = (n, Some(tried));
            } else if n == 1 {
                break;
            } else {
                high = n;
            }
        }
        Ok(found)
    }

    fn refusal(&self, all: f64, least: Option<(usize, f64)>) -> Error {
        let o = self.options;
        let one = match least {
            Some((k, e)) => {
                let l = &self.trial.layers[k];
                format!(", and {e:.3e} with only one layer, {} {:?}", l.op(), l.dims)
            }
            None => String::new(),
        };
        // The factor ensures that the bound is not below the error after rounding to two digits.
        let enough = least.map_or(all, |(_, e)| e.min(all)) * 1.05;
        let next = match enough.is_finite() {
            true => format!("Raise the bound to {enough:.1e} or more, or use level O2"),
            false => "Use level O2".to_string(),
        };
        Error::unsupported(
            format!(
                "quantisation to {} within {:e}: the measured error is {all:.3e} with all layers{one}",
                o.weights, o.max_error
            ),
            next,
        )
    }

    /// The graph with layers of these types, and its error on the first `most` samples.
    fn measure(&mut self, types: Types, most: usize) -> Result<Tried> {
        let t = self.trial;
        let layers: Vec<(&Layer, WeightType)> =
            t.layers.iter().zip(&types).filter_map(|(l, to)| Some((l, (*to)?))).collect();
        let graph = rewrite(t.original, &layers, self.ranges, &mut self.rounded, self.options)?;
        let session = Session::new(t.backend, graph.clone());
        let n = self.samples.len().min(most);
        let got = self.samples[..n].iter().map(|s| session.run(s)).collect::<Result<Vec<_>>>()?;
        self.trials += 1;
        let error = error(&got, &self.want[..n]);
        tracing::debug!(layers = layers.len(), error, "quantised");
        Ok(Tried { types, graph, error })
    }

    /// Returns an error for f8 on a device without products of f8.
    fn need_products_of_f8(&self, graph: &Graph) -> Result<()> {
        let session = Session::new(self.trial.backend, graph.clone());
        let exe = session.prepare(&self.samples[0])?;
        let name = CompositeKind::ByteMatmul.to_string();
        if exe.plan().steps.iter().any(|s| s.op.starts_with(&name)) {
            return Ok(());
        }
        Err(Error::unsupported(
            format!("products of 8-bit floats on {}", self.trial.backend.id()),
            "Use int8 or int4; NVIDIA devices from sm_89 and AMD devices from gfx940 multiply 8-bit floats",
        ))
    }

    fn report(
        self,
        tried: Tried,
        error_of_all: f64,
        alone: &HashMap<usize, f64>,
    ) -> Result<(Graph, QuantizeReport)> {
        let (mut before, mut after) = (0, 0);
        let row = |(k, l): (usize, &Layer)| {
            let to = tried.types[k];
            let bytes = l.data.bytes().len() as u64;
            before += bytes;
            after += to.and_then(|to| self.rounded.bytes(l, to)).unwrap_or(bytes);
            let reason = match l.quantizable(self.options.weights) {
                _ if to == Some(self.options.weights) => None,
                Err(why) => Some(why),
                Ok(()) => Some("the error would exceed the bound".to_string()),
            };
            let (name, op) = (l.name.clone(), l.op().to_string());
            LayerReport { name, op, weights: l.dims.clone(), to, reason, error: alone.get(&k).copied() }
        };
        let layers: Vec<LayerReport> = self.trial.layers.iter().enumerate().map(row).collect();
        let report = QuantizeReport {
            options: self.options.clone(),
            error: tried.error,
            error_of_all,
            trials: self.trials,
            bytes: (before, after),
            layers,
        };
        Ok((tried.graph, report))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(v: &[f32]) -> Vec<ConstData> {
        vec![ConstData::from_slice(&[v.len()], v).unwrap()]
    }

    #[test]
    fn errors_are_differences_over_the_deviation() {
        // The standard deviation of 1, 3, 1, 3 over both samples is 1.
        let want = [data(&[1.0, 3.0]), data(&[1.0, 3.0])];
        assert_eq!(error(&[data(&[1.0, 3.0]), data(&[1.25, 3.0])], &want), 0.25);
        assert_eq!(error(&want, &want), 0.0);
        // For a constant output, the difference is divided by its magnitude.
        assert_eq!(error(&[data(&[4.0, 5.0])], &[data(&[4.0, 4.0])]), 0.25);
        assert_eq!(error(&[data(&[f32::NAN, 1.0])], &[data(&[f32::NAN, 1.0])]), 0.0);
        assert_eq!(error(&[data(&[f32::NAN, 1.0])], &[data(&[2.0, 1.0])]), f64::INFINITY);
        assert_eq!(error(&[data(&[1.0])], &[data(&[2.0, 1.0])]), f64::INFINITY);
    }
}
