//! The ranges of activations over calibration samples.

use super::layers::{Kind, Layer};
use super::{Activations, QuantizeOptions, WeightType};
use crate::backend::Backend;
use crate::session::Session;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::{ConstData, DType, Graph, NodeId};
use std::collections::HashMap;

/// The least and the largest value of a tensor. The range always includes 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Range {
    pub low: f32,
    pub high: f32,
}

impl Range {
    const EMPTY: Range = Range { low: 0.0, high: 0.0 };

    fn widened(self, low: f32, high: f32) -> Range {
        Range { low: self.low.min(low), high: self.high.max(high) }
    }

    /// The scale, zero point and dtype that map the range to bytes. The zero point of an image is 0, because
    /// padding adds zeros.
    pub(super) fn bytes(self, kind: Kind) -> (f32, i64, DType) {
        let scale =
            |span: f32, steps: f32| if span > 0.0 { (span / steps).max(f32::MIN_POSITIVE) } else { 1.0 };
        match (self.low < 0.0, kind) {
            (false, _) => (scale(self.high, 255.0), 0, DType::U8),
            (true, Kind::Conv) => (scale(self.high.max(-self.low), 127.0), 0, DType::I8),
            (true, Kind::Product) => {
                let s = scale(self.high - self.low, 255.0);
                let zero = (-self.low / s).round_ties_even().clamp(0.0, 255.0);
                (s, zero as i64, DType::U8)
            }
        }
    }
}

/// The range of each layer's operand. The map is empty if activations are not calibrated.
pub(super) fn ranges(
    reference: &Backend,
    graph: &Graph,
    layers: &[Layer],
    samples: &[Vec<ConstData>],
    options: &QuantizeOptions,
) -> Result<HashMap<NodeId, Range>> {
    let percentile = match options.activations {
        Activations::Auto | Activations::Dynamic => return Ok(HashMap::new()),
        Activations::MinMax => None,
        Activations::Percentile(p) => Some(p).filter(|p| *p < 100.0),
    };
    let calibrated = |w: &WeightType| matches!(w, WeightType::Int8 | WeightType::Int16 | WeightType::F8);
    let types: Vec<WeightType> = [Some(options.weights), options.wider_type.weights()]
        .into_iter()
        .flatten()
        .filter(calibrated)
        .collect();
    if types.is_empty() {
        return Ok(HashMap::new());
    }
    if samples.is_empty() {
        return Err(Error::argument(
            "calibration",
            "no samples are given; calibrated activations need samples, dynamic activations do not",
        ));
    }
    let mut values: Vec<NodeId> =
        layers.iter().filter(|l| types.iter().any(|w| l.quantizable(*w).is_ok())).map(|l| l.x).collect();
    values.sort();
    values.dedup();
    let session = Session::new(reference, observed(graph, &values, percentile.is_some())?);
    let mut found: HashMap<NodeId, Range> = values.iter().map(|v| (*v, Range::EMPTY)).collect();
    for sample in samples {
        let out = session.run(sample)?;
        match percentile {
            None => {
                for (v, pair) in values.iter().zip(out.chunks_exact(2)) {
                    let [high, low] = [0, 1].map(|k| pair[k].to_vec::<f32>().first().copied().unwrap_or(0.0));
                    widen(&mut found, *v, low, high, graph)?;
                }
            }
            Some(p) => {
                for (v, data) in values.iter().zip(&out) {
                    let (low, high) = within(data.to_vec(), p);
                    widen(&mut found, *v, low, high, graph)?;
                }
            }
        }
    }
    Ok(found)
}

fn widen(all: &mut HashMap<NodeId, Range>, v: NodeId, low: f32, high: f32, g: &Graph) -> Result<()> {
    if !low.is_finite() || !high.is_finite() {
        let what =
            format!("a calibration sample gives {low} to {high} at {}, which is not finite", g.node(v).span);
        return Err(Error::argument("calibration", what));
    }
    let r = all.entry(v).or_insert(Range::EMPTY);
    *r = r.widened(low, high);
    Ok(())
}

/// A copy of the graph whose outputs are the largest and the least element of each value, or, if `whole` is
/// true, the values themselves.
fn observed(graph: &Graph, values: &[NodeId], whole: bool) -> Result<Graph> {
    let mut g = graph.clone();
    g.set_outputs(vec![]);
    let mut states = 0;
    for &v in values {
        if whole {
            g.output(&format!("v{states}"), v);
            states += 1;
            continue;
        }
        let axes: Vec<usize> = (0..g.shape(v).rank()).collect();
        for kind in [ReduceKind::Max, ReduceKind::Min] {
            let y = g.reduce(kind, v, &axes, false)?;
            g.output(&format!("v{states}"), y);
            states += 1;
        }
    }
    Ok(g)
}

/// The interval from the percentile `100 - percentile` of the values to the percentile `percentile`.
fn within(mut v: Vec<f32>, percentile: f64) -> (f32, f32) {
    if v.is_empty() {
        return (0.0, 0.0);
    }
    if v.iter().any(|x| x.is_nan()) {
        return (f32::NAN, f32::NAN);
    }
    let last = v.len() - 1;
    let place = |p: f64| ((last as f64 * p / 100.0).round() as usize).min(last);
    let (low, high) = (place(100.0 - percentile), place(percentile));
    let at = |v: &mut Vec<f32>, k: usize| *v.select_nth_unstable_by(k, f32::total_cmp).1;
    (at(&mut v, low), at(&mut v, high))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_map_to_bytes() {
        let r = Range { low: 0.0, high: 51.0 };
        assert_eq!(r.bytes(Kind::Conv), (0.2, 0, DType::U8));
        let r = Range { low: -1.0, high: 4.0 };
        let (s, zero, d) = r.bytes(Kind::Product);
        assert_eq!((zero, d), (51, DType::U8));
        assert!((s - 5.0 / 255.0).abs() < 1e-8);
        assert_eq!(r.bytes(Kind::Conv), (4.0 / 127.0, 0, DType::I8));
        assert_eq!(Range::EMPTY.bytes(Kind::Product), (1.0, 0, DType::U8));
    }

    #[test]
    fn percentiles_leave_out_the_ends() {
        let v: Vec<f32> = (0..=100).rev().map(|i| i as f32).collect();
        assert_eq!(within(v.clone(), 100.0), (0.0, 100.0));
        assert_eq!(within(v, 99.0), (1.0, 99.0));
        assert_eq!(within(vec![], 99.0), (0.0, 0.0));
        assert!(within(vec![f32::NAN, 1.0], 99.0).0.is_nan());
    }
}
