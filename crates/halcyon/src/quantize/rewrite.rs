//! Replaces layers of a graph by quantised layers.

use super::calibrate::Range;
use super::layers::{Kind, Layer};
use super::weights::{activation_limit, int4, int8, int16};
use super::{QuantizeOptions, WeightType};
use halcyon_ir::error::{Error, Result};
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::passes::rebuild::{Rebuild, prune};
use halcyon_ir::{ConstData, DType, Graph, NodeId, Op, Scalar};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Largest finite number of f8e4m3fn.
const MAX_F8: f64 = 448.0;

/// The quantised operands of layers. Layers of the same kind and type that read the same value share one
/// quantised operand.
type Operands = HashMap<(NodeId, bool, WeightType), NodeId>;

/// The quantised weights of all layers. Each layer's weights are rounded only once.
#[derive(Clone, Debug, Default)]
pub(super) struct Rounded(HashMap<(NodeId, WeightType), Vec<ConstData>>);

impl Rounded {
    /// Returns the rounded weights of a layer, and rounds them at the first call.
    fn of(&mut self, layer: &Layer, to: WeightType, options: &QuantizeOptions) -> Result<&[ConstData]> {
        match self.0.entry((layer.node, to)) {
            Entry::Occupied(e) => Ok(e.into_mut()),
            Entry::Vacant(e) => Ok(e.insert(round(layer, to, options)?)),
        }
    }

    /// Bytes of a layer's rounded weights; `None` before they are rounded.
    pub(super) fn bytes(&self, layer: &Layer, to: WeightType) -> Option<u64> {
        self.0.get(&(layer.node, to)).map(|p| p.iter().map(|c| c.bytes().len() as u64).sum())
    }
}

/// The rounded weights of a layer: codes, scales, and minima if the type has them.
fn round(layer: &Layer, to: WeightType, options: &QuantizeOptions) -> Result<Vec<ConstData>> {
    let values = layer.values();
    match to {
        WeightType::Int16 => {
            let [k, n] = [layer.dims[0], layer.dims[1]];
            let w = int16(&values, [k, n], activation_limit(k))?;
            Ok(vec![w.codes, w.scales])
        }
        WeightType::Bf16 => {
            let rounded = values.iter().map(|v| Scalar::F(f64::from(*v)));
            Ok(vec![ConstData::from_scalars(DType::BF16, &layer.dims, rounded)?])
        }
        WeightType::Int8 => {
            let (axis, bits) = match layer.kind {
                Kind::Conv => (0, options.weight_bits.unwrap_or(8)),
                Kind::Product => (1, 8),
            };
            let w = int8(&values, &layer.dims, axis, bits)?;
            Ok(vec![w.codes, w.scales])
        }
        WeightType::Int4 | WeightType::Int4Min => {
            let minimum = to == WeightType::Int4Min;
            let w = int4(&values, [layer.dims[0], layer.dims[1]], minimum)?;
            Ok([w.codes, w.scales].into_iter().chain(w.minima).collect())
        }
        WeightType::F8 => {
            let top = values.iter().fold(0f32, |a, v| a.max(v.abs()));
            let scale = if top > 0.0 { f64::from(top) / MAX_F8 } else { 1.0 };
            let scaled = values.iter().map(|v| Scalar::F(f64::from(*v) / scale));
            Ok(vec![
                ConstData::from_scalars(DType::F8E4M3FN, &layer.dims, scaled)?,
                ConstData::from_slice(&[1], &[scale as f32])?,
            ])
        }
    }
}

/// The graph with the given layers quantised. For activations without a range in `ranges`, the scales are
/// computed at run time.
pub(super) fn rewrite(
    graph: &Graph,
    layers: &[(&Layer, WeightType)],
    ranges: &HashMap<NodeId, Range>,
    rounded: &mut Rounded,
    options: &QuantizeOptions,
) -> Result<Graph> {
    let by_node: HashMap<NodeId, (&Layer, WeightType)> = layers.iter().map(|l| (l.0.node, *l)).collect();
    let live = Rebuild::live(graph);
    let (mut r, mut seen) = (Rebuild::new(graph), Operands::new());
    for id in graph.ids().filter(|i| live[i.index()]) {
        let Some(&(layer, to)) = by_node.get(&id) else {
            r.copy(id)?;
            continue;
        };
        r.new.span = graph.node(id).span.clone();
        let parts: Vec<ConstData> = rounded.of(layer, to, options)?.to_vec();
        let x = operand(&mut r, (layer, to), ranges.get(&layer.x).copied(), &mut seen)?;
        let y = match to {
            WeightType::Int8 | WeightType::Int16 => bytes(&mut r.new, graph, layer, x, parts)?,
            WeightType::Int4 | WeightType::Int4Min => four_bits(&mut r.new, x, parts)?,
            WeightType::F8 => small_floats(&mut r.new, x, parts)?,
            WeightType::Bf16 => halves(&mut r.new, graph, layer, x, parts)?,
        };
        let (new, old) = (r.new.ty(y).clone(), graph.ty(id));
        if new != *old {
            return Err(Error::internal(format!("a layer of {old} became one of {new}")));
        }
        r.set(id, y);
    }
    prune(&r.finish()?.0)
}

/// The operand of a layer: quantised and dequantised, or cast to bf16 for weights in bf16, or unchanged for
/// weights of 4 bits.
fn operand(
    r: &mut Rebuild<'_>,
    (layer, to): (&Layer, WeightType),
    range: Option<Range>,
    seen: &mut Operands,
) -> Result<NodeId> {
    let key = (layer.x, layer.kind == Kind::Conv, to);
    if let Some(x) = seen.get(&key) {
        return Ok(*x);
    }
    let x = r.get(layer.x)?;
    let g = &mut r.new;
    let y = match (to, range) {
        (WeightType::Int4 | WeightType::Int4Min, _) => x,
        (WeightType::Bf16, _) => g.cast(x, DType::BF16)?,
        (WeightType::Int16, range) => {
            let limit = activation_limit(layer.dims[0]);
            let s = match range {
                Some(r) => {
                    let top = r.high.max(-r.low);
                    let s = if top > 0.0 { (top / limit as f32).max(f32::MIN_POSITIVE) } else { 1.0 };
                    g.constant(ConstData::from_slice(&[], &[s])?)
                }
                None => scale_at_run_time(g, x, layer.kind, limit as f64)?,
            };
            let q = g.quantize_within(x, s, limit)?;
            g.dequantize(q, s, None, None)?
        }
        (WeightType::Int8, Some(range)) => {
            let (scale, zero, d) = range.bytes(layer.kind);
            let s = g.constant(ConstData::from_slice(&[], &[scale])?);
            // A zero point of 0 is left out.
            let z = match zero {
                0 => None,
                z => Some(g.constant(ConstData::splat(d, &[], Scalar::I(z))?)),
            };
            let q = g.quantize(x, s, z, d, None)?;
            g.dequantize(q, s, z, None)?
        }
        (WeightType::Int8, None) => {
            let s = scale_at_run_time(g, x, layer.kind, 127.0)?;
            let q = g.quantize(x, s, None, DType::I8, None)?;
            g.dequantize(q, s, None, None)?
        }
        (WeightType::F8, range) => {
            let s = match range {
                Some(r) => {
                    let top = r.high.max(-r.low);
                    let s = if top > 0.0 { f64::from(top) / MAX_F8 } else { 1.0 };
                    g.constant(ConstData::from_slice(&[1], &[s as f32])?)
                }
                None => scale_of_all(g, x, MAX_F8)?,
            };
            let q = g.div(x, s)?;
            let q = g.cast_saturating(q, DType::F8E4M3FN)?;
            let q = g.cast(q, DType::F32)?;
            g.mul(q, s)?
        }
    };
    seen.insert(key, y);
    Ok(y)
}

/// The scale that maps the largest magnitude to `steps`: one scale per row of a product's operand, or one
/// scale for the whole operand of a convolution.
fn scale_at_run_time(g: &mut Graph, x: NodeId, kind: Kind, steps: f64) -> Result<NodeId> {
    match (kind, g.shape(x).rank()) {
        (Kind::Conv, _) | (_, 0) => scale_of_all(g, x, steps),
        (Kind::Product, rank) => scale_over(g, x, &[rank - 1], steps),
    }
}

fn scale_of_all(g: &mut Graph, x: NodeId, steps: f64) -> Result<NodeId> {
    let axes: Vec<usize> = (0..g.shape(x).rank()).collect();
    let s = scale_over(g, x, &axes, steps)?;
    g.reshape(s, [1usize])
}

fn scale_over(g: &mut Graph, x: NodeId, axes: &[usize], steps: f64) -> Result<NodeId> {
    let a = g.abs(x)?;
    let top = g.reduce(ReduceKind::Max, a, axes, true)?;
    let (by, least) = (g.lit(top, 1.0 / steps), g.lit(top, f64::from(f32::MIN_POSITIVE)));
    let s = g.mul(top, by)?;
    // The scale must not be 0. For a row of zeros any other scale is right.
    g.max(s, least)
}

/// The layer with dequantised operands. A pass turns it into a layer of integers.
fn bytes(g: &mut Graph, old: &Graph, layer: &Layer, x: NodeId, parts: Vec<ConstData>) -> Result<NodeId> {
    let axis = if layer.kind == Kind::Conv { 0 } else { 1 };
    let [codes, scales] = two(parts)?;
    let (codes, scales) = (g.constant(codes), g.constant(scales));
    let w = g.dequantize(codes, scales, None, Some(axis))?;
    match &old.node(layer.node).op {
        Op::Conv(attrs) => g.conv(x, w, attrs.clone()),
        _ => g.matmul(x, w),
    }
}

/// The layer on operands of bf16. Its result is rounded to bf16 only where a device stores it.
fn halves(g: &mut Graph, old: &Graph, layer: &Layer, x: NodeId, parts: Vec<ConstData>) -> Result<NodeId> {
    let [w] =
        <[ConstData; 1]>::try_from(parts).map_err(|_| Error::internal("weights of bf16 are one array"))?;
    let w = g.constant(w);
    let y = match &old.node(layer.node).op {
        Op::Conv(attrs) => g.conv(x, w, attrs.clone())?,
        _ => g.matmul(x, w)?,
    };
    g.cast(y, DType::F32)
}

fn four_bits(g: &mut Graph, x: NodeId, parts: Vec<ConstData>) -> Result<NodeId> {
    let mut parts = parts.into_iter();
    let (Some(codes), Some(scales)) = (parts.next(), parts.next()) else {
        return Err(Error::internal("weights of 4 bits have codes and scales"));
    };
    let (codes, scales) = (g.constant(codes), g.constant(scales));
    let minima = parts.next().map(|m| g.constant(m));
    g.quantized_matmul(x, codes, scales, minima)
}

fn small_floats(g: &mut Graph, x: NodeId, parts: Vec<ConstData>) -> Result<NodeId> {
    let [codes, scale] = two(parts)?;
    let (codes, scale) = (g.constant(codes), g.constant(scale));
    let w = g.cast(codes, DType::F32)?;
    let w = g.mul(w, scale)?;
    g.matmul(x, w)
}

fn two(parts: Vec<ConstData>) -> Result<[ConstData; 2]> {
    parts.try_into().map_err(|_| Error::internal("weights have codes and scales"))
}
