//! Finds the layers of a graph: products and convolutions with constant weights.

use super::WeightType;
use halcyon_ir::ops::quantize::WEIGHT_BLOCK;
use halcyon_ir::passes::byte_conv::BLOCK;
use halcyon_ir::{ConstData, DType, Graph, NodeId, Op};

/// Layers with fewer weights than this are not quantised, because they would not become faster.
const MIN_WEIGHTS: usize = 1024;

/// The kind of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Product,
    Conv,
}

/// A product or convolution with constant weights.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub node: NodeId,
    pub kind: Kind,
    pub name: String,
    /// The operand that is not constant.
    pub x: NodeId,
    /// The shape of the weights: `[k, n]` for a product, `[O, C / groups, kernel…]` for a convolution.
    pub dims: Vec<usize>,
    pub data: ConstData,
    /// Whether `data` is the transpose of the product's weights.
    pub turned: bool,
    groups: usize,
}

impl Layer {
    pub(super) fn op(&self) -> &'static str {
        match self.kind {
            Kind::Product => "matmul",
            Kind::Conv => "conv",
        }
    }

    /// `Ok` if the layer's weights can be quantised to the type; otherwise the reason.
    pub(super) fn quantizable(&self, to: WeightType) -> Result<(), String> {
        let weights: usize = self.dims.iter().product();
        match (to, self.kind) {
            (WeightType::Int8 | WeightType::Bf16, Kind::Conv) if self.groups > 1 => {
                return Err(format!("a convolution of {} groups is not faster in {to}", self.groups));
            }
            (WeightType::Int8, Kind::Conv) => {
                let (o, i) = (self.dims[0], self.dims[1]);
                if !o.is_multiple_of(BLOCK) || !i.is_multiple_of(BLOCK) || self.dims.len() != 4 {
                    let what = format!(
                        "{i} to {o} channels do not fill blocks of {BLOCK}, so no kernel takes bytes"
                    );
                    return Err(what);
                }
            }
            (WeightType::Int8 | WeightType::Bf16, _) => {}
            (_, Kind::Conv) => {
                return Err(format!("convolutions cannot be in {to}, only in int8 or bf16"));
            }
            (WeightType::Int4 | WeightType::Int4Min, Kind::Product) => {
                if !self.dims[0].is_multiple_of(WEIGHT_BLOCK) {
                    let what = format!("{} rows do not divide into blocks of {WEIGHT_BLOCK}", self.dims[0]);
                    return Err(what);
                }
            }
            (WeightType::F8 | WeightType::Int16, Kind::Product) => {}
        }
        if weights < MIN_WEIGHTS {
            return Err(format!("{weights} weights are too few to gain anything"));
        }
        if !self.data.to_vec::<f32>().iter().all(|v| v.is_finite()) {
            return Err("a weight is not finite".into());
        }
        Ok(())
    }

    /// The weights in row-major order, with the shape `dims`.
    pub(super) fn values(&self) -> Vec<f32> {
        let v = self.data.to_vec::<f32>();
        let (&[k, n], true) = (&self.dims[..], self.turned) else { return v };
        let mut out = vec![0.0; v.len()];
        for (j, row) in v.chunks_exact(k).enumerate() {
            row.iter().enumerate().for_each(|(i, x)| out[i * n + j] = *x);
        }
        out
    }
}

/// The constant matrix of a product's right operand, and whether it is transposed. The operand may repeat the
/// matrix along batch axes.
fn matrix(g: &Graph, mut id: NodeId) -> Option<(&ConstData, bool)> {
    let mut turned = false;
    for _ in 0..4 {
        let n = g.node(id);
        match &n.op {
            Op::Const(c) if c.dims.len() == 2 => return Some((c, turned)),
            Op::Permute(p) if p[..] == [1, 0] => turned = !turned,
            // A broadcast of a matrix, or a reshape that adds axes of size 1.
            Op::Expand | Op::Reshape => {
                let own = |s: &halcyon_ir::Shape| s.iter().rev().take(2).copied().collect::<Vec<_>>();
                let (from, to) = (g.shape(n.inputs[0]), &n.ty.shape);
                let same = from.rank() >= 2 && own(from) == own(to);
                let ones = n.op == Op::Expand || to.iter().rev().skip(2).all(|d| d.is(1));
                if !same || !ones {
                    return None;
                }
            }
            _ => return None,
        }
        id = n.inputs[0];
    }
    None
}

/// The layers of a graph, in its order.
pub(super) fn find(g: &Graph) -> Vec<Layer> {
    let live = g.live(&g.outputs().iter().map(|o| o.node).collect::<Vec<_>>());
    let of = |id: NodeId| -> Option<Layer> {
        let n = g.node(id);
        let &[x, w] = &n.inputs[..] else { return None };
        let floats = [id, x, w].iter().all(|i| g.dtype(*i) == DType::F32);
        let (data, turned, kind, groups) = match &n.op {
            Op::Matmul => {
                let (c, turned) = matrix(g, w)?;
                (c, turned, Kind::Product, 1)
            }
            Op::Conv(attrs) => match &g.node(w).op {
                Op::Const(c) if attrs.input_dilation.iter().all(|d| *d == 1) => {
                    (c, false, Kind::Conv, attrs.groups)
                }
                _ => return None,
            },
            _ => return None,
        };
        let constant = matches!(g.node(x).op, Op::Const(_) | Op::Full(_));
        if !floats || constant {
            return None;
        }
        let mut dims = data.dims.to_vec();
        if turned {
            dims.reverse();
        }
        let name = n.span.text().into_owned();
        Some(Layer { node: id, kind, name, x, dims, data: data.clone(), turned, groups })
    };
    g.ids().filter(|i| live[i.index()]).filter_map(of).collect()
}
