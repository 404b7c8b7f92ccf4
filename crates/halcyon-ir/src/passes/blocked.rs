//! Layout propagation: keeps images in the blocked layout `[N, C / B, H, W, B]` between convolutions that
//! read and write it.
//!
//! The graph keeps its meaning. A blocked image is a tensor of five axes. A convolution over blocked images
//! is a composite whose body defines it by the plain convolution. Ops without a blocked form get the plain
//! image `[N, C, H, W]` as views of the blocked one. Element-wise ops, pooling, the gradient of max pooling,
//! reductions over the image or over all images, and concatenation also work on blocked images, so a
//! convolutional network usually changes layout only at its inputs and outputs.
//!
//! The device chooses the number of channels per block for each dtype (images of bytes always have blocks of
//! 64), so images with different block sizes can occur in one graph. An element-wise op or a concatenation
//! uses the block size of its first blocked operand and rearranges operands that have another block size. A
//! bf16 convolution that the target does not run in blocks of bf16 is computed in f32 and rounded, which
//! gives the same result; the f32 kernels support all geometries.

use super::byte_conv::{self, BLOCK as BYTE_BLOCK};
use super::rebuild::{DROPPED, Rebuild};
use crate::composite::{Attrs, Composite, CompositeKind};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId};
use crate::ops::quantize::byte_conv_body;
use crate::ops::{Conv, Op};
use crate::shape::{Dim, Shape, TensorType};
use std::collections::HashMap;

/// Channels per block for images of a dtype: [`crate::target::Target::channel_block`].
pub type Blocks<'a> = &'a dyn Fn(DType) -> Option<usize>;

/// Rewrites convolutions over two spatial axes for which the target has a blocked form. Returns the graph and
/// the number of convolutions that are now blocked or were widened from bf16.
pub fn run(g: &Graph, blocks: Blocks<'_>, claims: &dyn Fn(&Composite) -> bool) -> Result<(Graph, usize)> {
    let mut p = Pass {
        g,
        r: Rebuild::new(g),
        blocked: HashMap::new(),
        others: HashMap::new(),
        plain: vec![DROPPED; g.nodes().len()],
        blocks,
        claims,
        convs: 0,
        widened: 0,
        plain_bytes: false,
    };
    let live = Rebuild::live(g);
    for id in g.ids().filter(|i| live[i.index()]) {
        p.node(id)?;
    }
    for o in g.outputs() {
        p.plain(o.node)?;
    }
    let (n, widened, plain_bytes) = (p.convs, p.widened, p.plain_bytes);
    let g = super::rebuild::prune(&p.r.finish()?.0)?;
    // Fold the casts of the weights, so that they are not computed in every run.
    let g = if widened > 0 || plain_bytes { super::fold::run(&g)?.0 } else { g };
    Ok((g, n + widened))
}

/// A blocked node and its number of channels per block.
type Made = (NodeId, usize);

struct Pass<'a> {
    g: &'a Graph,
    r: Rebuild<'a>,
    /// Blocked forms of old nodes, with their block sizes.
    blocked: HashMap<NodeId, Made>,
    /// Further blocked forms of an old node, by block size.
    others: HashMap<(NodeId, usize), NodeId>,
    /// Plain forms of old nodes.
    plain: Vec<NodeId>,
    blocks: Blocks<'a>,
    claims: &'a dyn Fn(&Composite) -> bool,
    convs: usize,
    /// Number of bf16 convolutions that are computed in f32.
    widened: usize,
    /// Whether a convolution of bytes became one of f32.
    plain_bytes: bool,
}

/// The composite of a convolution of bytes in the blocked layout, for an image and weights of these types.
///
/// # Errors
/// Sizes that do not belong together.
pub(super) fn byte_conv([x, w]: [&TensorType; 2], attrs: &Conv) -> Result<Composite> {
    let mut g = Graph::new();
    let d = x.shape.dims()?;
    let blocks = shape_of(&[d[0], d[1] / BYTE_BLOCK, d[2], d[3], BYTE_BLOCK]);
    let x0 = g.input("x0", TensorType { dtype: x.dtype, shape: blocks });
    let x1 = g.input("x1", w.clone());
    let y = g.permute(x0, &[0, 1, 4, 2, 3])?;
    let y = g.reshape(y, x.shape.clone())?;
    let y = byte_conv_body(&mut g, y, x1, attrs.clone())?;
    let d = g.shape(y).dims()?;
    let y = split(&mut g, y, [d[0], d[1], d[2], d[3]], BYTE_BLOCK)?;
    g.output("y", y);
    Ok(Composite { kind: CompositeKind::BlockedConv, attrs: Attrs::new(), body: g })
}

fn shape_of(d: &[usize]) -> Shape {
    d.iter().map(|d| Dim::from(*d)).collect()
}

/// Converts `[N, C, H, W]` to the blocked layout.
fn split(g: &mut Graph, x: NodeId, [n, c, h, w]: [usize; 4], block: usize) -> Result<NodeId> {
    let x = g.reshape(x, shape_of(&[n, c / block, block, h, w]))?;
    g.permute(x, &[0, 1, 3, 4, 2])
}

impl Pass<'_> {
    /// Sizes of an old node that has four axes and a multiple of `block` channels.
    fn image(&self, id: NodeId, block: usize) -> Option<[usize; 4]> {
        let d: [usize; 4] = self.g.shape(id).known()?[..].try_into().ok()?;
        (d[1] > 0 && d[1].is_multiple_of(block)).then_some(d)
    }

    /// The block size of the first blocked operand.
    fn block_of(&self, n: &Node) -> Option<usize> {
        n.inputs.iter().find_map(|i| self.blocked.get(i).map(|b| b.1))
    }

    fn node(&mut self, id: NodeId) -> Result<()> {
        let n = self.g.node(id);
        self.r.new.span = n.span.clone();
        let made = match &n.op {
            Op::Conv(_) => self.conv(id, n)?,
            Op::Composite(c) if c.kind == CompositeKind::ByteConv => self.conv_of_bytes(id, n, c)?,
            Op::Scalar(_) | Op::Cast => self.element_wise(id, n)?,
            Op::Pool(_) => self.pool(n)?,
            Op::PoolGrad(_) => self.pool_grad(n)?,
            Op::Concat { axis } => self.concat(id, n, *axis)?,
            Op::Reduce { axes, keep, .. } if matches!(axes[..], [2, 3] | [0, 2, 3]) => {
                self.reduce(id, n, *keep)?
            }
            _ => None,
        };
        match made {
            Some(y) => {
                self.blocked.insert(id, y);
            }
            None if self.plain[id.index()] == DROPPED => {
                for i in &n.inputs {
                    self.plain(*i)?;
                }
                self.plain[id.index()] = self.r.copy(id)?;
            }
            None => {}
        }
        Ok(())
    }

    /// The plain form of an old node that was visited.
    fn plain(&mut self, id: NodeId) -> Result<NodeId> {
        if self.plain[id.index()] != DROPPED {
            return Ok(self.plain[id.index()]);
        }
        let x = self.blocked.get(&id).map(|b| b.0);
        let x = x.ok_or_else(|| Error::internal("a layout pass lost a node that is still used"))?;
        let g = &mut self.r.new;
        let y = g.permute(x, &[0, 1, 4, 2, 3])?;
        let y = g.reshape(y, self.g.shape(id).clone())?;
        self.plain[id.index()] = y;
        self.r.set(id, y);
        Ok(y)
    }

    /// The blocked form of an old image that was visited.
    fn blocked_form(&mut self, id: NodeId, d: [usize; 4], block: usize) -> Result<NodeId> {
        if let Some(x) = self.blocked.get(&id).filter(|b| b.1 == block) {
            return Ok(x.0);
        }
        if let Some(x) = self.others.get(&(id, block)) {
            return Ok(*x);
        }
        let shape = shape_of(&[d[0], d[1] / block, d[2], d[3], block]);
        let n = self.g.node(id);
        let x = match &n.op {
            // Rearranges blocks of another size, if one size is a multiple of the other. Only channels move,
            // pixels do not.
            _ if let Some((x, from)) = self.blocked.get(&id).copied()
                && from.max(block).is_multiple_of(from.min(block)) =>
            {
                let [n, c, h, w] = d;
                let g = &mut self.r.new;
                let x = if from > block {
                    let x = g.reshape(x, shape_of(&[n, c / from, h, w, from / block, block]))?;
                    g.permute(x, &[0, 1, 4, 2, 3, 5])?
                } else {
                    let x = g.reshape(x, shape_of(&[n, c / block, block / from, h, w, from]))?;
                    g.permute(x, &[0, 1, 3, 4, 2, 5])?
                };
                g.reshape(x, shape.clone())?
            }
            Op::Full(v) => self.r.new.full(n.ty.dtype, shape, *v),
            Op::Expand => {
                let i = n.inputs[0];
                let from = self.g.shape(i).dims()?;
                // Broadcasting adds leading axes.
                let mut f = [1; 4];
                f[4 - from.len()..].copy_from_slice(&from);
                let whole = match self.image(i, block) {
                    Some(f) => Some(self.blocked_form(i, f, block)?),
                    None => None,
                };
                let x = match whole {
                    Some(x) => x,
                    None => {
                        let x = self.plain(i)?;
                        let b = if f[1] == 1 { 1 } else { block };
                        split(&mut self.r.new, x, f, b)?
                    }
                };
                self.r.new.expand(x, &shape)?
            }
            _ => {
                let x = self.plain(id)?;
                split(&mut self.r.new, x, d, block)?
            }
        };
        self.others.insert((id, block), x);
        Ok(x)
    }

    /// A composite of this kind over blocked images, if the target claims it. The first operands are blocked,
    /// and `body` gets them in these plain shapes.
    fn composite(
        &mut self,
        kind: CompositeKind,
        x: &[NodeId],
        plain: &[&Shape],
        block: usize,
        body: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId>,
    ) -> Result<Option<NodeId>> {
        let before = self.r.new.nodes().len();
        let y = self.r.new.composite(kind, Attrs::new(), x, |g, x| {
            let mut x = x.to_vec();
            for (x, shape) in x.iter_mut().zip(plain) {
                *x = g.permute(*x, &[0, 1, 4, 2, 3])?;
                *x = g.reshape(*x, (*shape).clone())?;
            }
            let y = body(g, &x)?;
            let d = g.shape(y).dims()?;
            split(g, y, [d[0], d[1], d[2], d[3]], block)
        })?;
        debug_assert_eq!(self.r.new.nodes().len(), before + 1);
        let taken = matches!(&self.r.new.node(y).op, Op::Composite(c) if (self.claims)(c));
        // If the target does not claim it, the node is dead and will be pruned.
        Ok(taken.then_some(y))
    }

    fn conv(&mut self, id: NodeId, n: &Node) -> Result<Option<Made>> {
        let Op::Conv(attrs) = &n.op else { return Ok(None) };
        let [x, w] = n.inputs[..] else { return Ok(None) };
        let dtype = n.ty.dtype;
        let same = [x, w].iter().all(|i| self.g.dtype(*i) == dtype);
        if !same || !matches!(dtype, DType::F32 | DType::BF16) || self.g.shape(x).rank() != 4 {
            return Ok(None);
        }
        if let Some(block) = (self.blocks)(dtype)
            && let Some(y) = self.conv_in(id, n, attrs, dtype, block)?
        {
            self.convs += 1;
            return Ok(Some((y, block)));
        }
        let Some(block) = (self.blocks)(DType::F32).filter(|_| dtype == DType::BF16) else { return Ok(None) };
        self.widened += 1;
        if let Some(y) = self.conv_in(id, n, attrs, DType::F32, block)? {
            let y = self.r.new.cast(y, dtype)?;
            return Ok(Some((y, block)));
        }
        let [x, w] = [self.plain(x)?, self.plain(w)?];
        let g = &mut self.r.new;
        let [x, w] = [g.cast(x, DType::F32)?, g.cast(w, DType::F32)?];
        let y = g.conv(x, w, attrs.clone())?;
        let y = g.cast(y, dtype)?;
        self.plain[id.index()] = y;
        self.r.set(id, y);
        Ok(None)
    }

    /// The convolution of bytes on a blocked image. If the target has declined it, the bytes are cast to f32,
    /// and a plain convolution takes its place.
    fn conv_of_bytes(&mut self, id: NodeId, n: &Node, c: &Composite) -> Result<Option<Made>> {
        let lost = || Error::internal("a convolution of bytes has no convolution in its body");
        let attrs = byte_conv::inner(c).ok_or_else(lost)?.clone();
        let [x, w] = n.inputs[..] else { return Err(lost()) };
        let weights = self.plain(w)?;
        if let (Some(d), Some(_)) = (self.image(x, BYTE_BLOCK), self.image(id, BYTE_BLOCK)) {
            let (shape, image) = (self.g.shape(x).clone(), self.blocked_form(x, d, BYTE_BLOCK)?);
            let kind = CompositeKind::BlockedConv;
            let made = self.composite(kind, &[image, weights], &[&shape], BYTE_BLOCK, |g, x| {
                byte_conv_body(g, x[0], x[1], attrs.clone())
            })?;
            if let Some(y) = made {
                self.convs += 1;
                return Ok(Some((y, BYTE_BLOCK)));
            }
        }
        let x = self.plain(x)?;
        let y = byte_conv_body(&mut self.r.new, x, weights, attrs)?;
        self.plain_bytes = true;
        self.plain[id.index()] = y;
        self.r.set(id, y);
        Ok(None)
    }

    /// The convolution computed in `dtype` with a blocked result, if the target claims it.
    fn conv_in(
        &mut self,
        id: NodeId,
        n: &Node,
        attrs: &Conv,
        dtype: DType,
        block: usize,
    ) -> Result<Option<NodeId>> {
        let [x, w] = n.inputs[..] else { return Ok(None) };
        if self.image(id, block).is_none() {
            return Ok(None);
        }
        let weights = self.plain(w)?;
        let shape = self.g.shape(x).clone();
        let (operand, plain) = match self.image(x, block) {
            Some(d) => (self.blocked_form(x, d, block)?, &[&shape][..]),
            None => (self.plain(x)?, &[][..]),
        };
        let mut operands = [operand, weights];
        if n.ty.dtype != dtype {
            for x in &mut operands {
                *x = self.r.new.cast(*x, dtype)?;
            }
        }
        self.composite(CompositeKind::BlockedConv, &operands, plain, block, |g, x| {
            g.conv(x[0], x[1], attrs.clone())
        })
    }

    fn pool(&mut self, n: &Node) -> Result<Option<Made>> {
        let (Op::Pool(attrs), Some((x, block))) = (&n.op, self.blocked.get(&n.inputs[0]).copied()) else {
            return Ok(None);
        };
        let shape = self.g.shape(n.inputs[0]).clone();
        let y = self.composite(CompositeKind::BlockedPool, &[x], &[&shape], block, |g, x| {
            g.pool(x[0], attrs.clone())
        })?;
        Ok(y.map(|y| (y, block)))
    }

    /// The gradient of a pool whose input is blocked.
    fn pool_grad(&mut self, n: &Node) -> Result<Option<Made>> {
        let Some((_, block)) = self.blocked.get(&n.inputs[0]).copied() else { return Ok(None) };
        let Some(images) = n.inputs.iter().map(|i| self.image(*i, block)).collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let all = n.inputs.iter().zip(images);
        let x = all.map(|(i, d)| self.blocked_form(*i, d, block)).collect::<Result<Vec<_>>>()?;
        let shapes: Vec<Shape> = n.inputs.iter().map(|i| self.g.shape(*i).clone()).collect();
        let plain: Vec<&Shape> = shapes.iter().collect();
        let y = self
            .composite(CompositeKind::BlockedPool, &x, &plain, block, |g, x| g.push(n.op.clone(), x, None))?;
        Ok(y.map(|y| (y, block)))
    }

    /// The op on blocked images, if one of its operands is blocked.
    fn element_wise(&mut self, id: NodeId, n: &Node) -> Result<Option<Made>> {
        let Some(block) = self.block_of(n) else { return Ok(None) };
        let Some(d) = self.image(id, block) else { return Ok(None) };
        let x = n.inputs.iter().map(|i| self.blocked_form(*i, d, block)).collect::<Result<Vec<_>>>()?;
        let g = &mut self.r.new;
        let y = match &n.op {
            Op::Scalar(s) => g.scalar(*s, &x)?,
            _ => g.cast(x[0], n.ty.dtype)?,
        };
        Ok(Some((y, block)))
    }

    fn concat(&mut self, id: NodeId, n: &Node, axis: usize) -> Result<Option<Made>> {
        let Some(block) = self.block_of(n) else { return Ok(None) };
        let images: Option<Vec<[usize; 4]>> = n.inputs.iter().map(|i| self.image(*i, block)).collect();
        let (Some(d), Some(_)) = (images, self.image(id, block)) else { return Ok(None) };
        let parts = n.inputs.iter().zip(d);
        let x = parts.map(|(i, d)| self.blocked_form(*i, d, block)).collect::<Result<Vec<_>>>()?;
        Ok(Some((self.r.new.concat(&x, axis)?, block)))
    }

    /// A reduction over the whole image, or over all images. It leaves one pixel (`keep`) or no spatial axes.
    fn reduce(&mut self, id: NodeId, n: &Node, keep: bool) -> Result<Option<Made>> {
        let (Op::Reduce { kind, axes, .. }, Some((x, block))) =
            (&n.op, self.blocked.get(&n.inputs[0]).copied())
        else {
            return Ok(None);
        };
        let y = self.r.new.reduce(*kind, x, axes, keep)?;
        if keep {
            return Ok(Some((y, block)));
        }
        let y = self.r.new.reshape(y, self.g.shape(id).clone())?;
        self.plain[id.index()] = y;
        self.r.set(id, y);
        Ok(None)
    }
}
