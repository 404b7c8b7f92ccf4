//! Layout propagation: images whose channels lie in blocks, `[N, C / B, H, W, B]`, between convolutions that read and write them so.
//!
//! The graph keeps its meaning: a blocked image is a tensor of five axes, a convolution over blocked images is a composite whose body
//! says what it is in terms of the plain one, and what has no blocked form gets the plain image, as views of the blocked one.
//! Element-wise ops, pooling, reductions over the image and concatenation go along, so that a network of convolutions changes layout
//! where its images come in and go out.

use super::rebuild::{DROPPED, Rebuild};
use crate::composite::{Attrs, Composite};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId};
use crate::op::Op;
use crate::shape::{Dim, Shape};
use std::collections::HashMap;

/// Operands: an image in blocks (or plain `[N, C, H, W]`), weights `[O, C / groups, KH, KW]`. Result: an image in blocks.
pub const BLOCKED_CONV: &str = "blocked_conv";
/// Operand and result: images in blocks.
pub const BLOCKED_POOL: &str = "blocked_pool";

/// Rewrites f32 convolutions over two spatial axes where the device takes the blocked form, for blocks of `block` channels. Returns
/// the graph and how many convolutions there are in it now that were plain.
pub fn run(g: &Graph, block: usize, claims: &dyn Fn(&Composite) -> bool) -> Result<(Graph, usize)> {
    let mut p = Pass {
        g,
        r: Rebuild::new(g),
        blocked: HashMap::new(),
        plain: vec![DROPPED; g.nodes().len()],
        block,
        claims,
        convs: 0,
    };
    let live = Rebuild::live(g);
    for id in g.ids().filter(|i| live[i.index()]) {
        p.node(id)?;
    }
    for o in g.outputs() {
        p.plain(o.node)?;
    }
    let n = p.convs;
    let g = p.r.finish()?.0;
    Ok((super::rebuild::prune(&g)?, n))
}

struct Pass<'a> {
    g: &'a Graph,
    r: Rebuild<'a>,
    /// Blocked forms of old nodes.
    blocked: HashMap<NodeId, NodeId>,
    /// Plain forms of old nodes.
    plain: Vec<NodeId>,
    block: usize,
    claims: &'a dyn Fn(&Composite) -> bool,
    convs: usize,
}

impl Pass<'_> {
    /// Sizes of an old node that has four axes and whole blocks of channels.
    fn image(&self, id: NodeId) -> Option<[usize; 4]> {
        let d: [usize; 4] = self.g.shape(id).known()?[..].try_into().ok()?;
        (d[1] > 0 && d[1].is_multiple_of(self.block)).then_some(d)
    }

    fn in_blocks(&self, [n, c, h, w]: [usize; 4]) -> Shape {
        [n, c / self.block, h, w, self.block].iter().map(|d| Dim::from(*d)).collect()
    }

    fn node(&mut self, id: NodeId) -> Result<()> {
        let n = self.g.node(id);
        self.r.new.span = n.span.clone();
        let made = match &n.op {
            Op::Conv(_) => self.conv(id, n)?,
            Op::Scalar(_) | Op::Cast => self.element_wise(id, n)?,
            Op::Pool(_) => self.pool(n)?,
            Op::Concat { axis } => self.concat(id, n, *axis)?,
            Op::Reduce { axes, keep, .. } if axes[..] == [2, 3] => self.reduce(id, n, *keep)?,
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
        let x = self.blocked.get(&id).copied();
        let x = x.ok_or_else(|| Error::internal("a layout pass lost a node that is still used"))?;
        let g = &mut self.r.new;
        let y = g.permute(x, &[0, 1, 4, 2, 3])?;
        let y = g.reshape(y, self.g.shape(id).clone())?;
        self.plain[id.index()] = y;
        self.r.set(id, y);
        Ok(y)
    }

    /// The blocked form of an old image that was visited.
    fn blocked_form(&mut self, id: NodeId, d: [usize; 4]) -> Result<NodeId> {
        if let Some(x) = self.blocked.get(&id) {
            return Ok(*x);
        }
        let shape = self.in_blocks(d);
        let n = self.g.node(id);
        let x = match &n.op {
            Op::Full(v) => self.r.new.full(n.ty.dtype, shape, *v),
            Op::Expand => {
                let i = n.inputs[0];
                let from = self.g.shape(i).dims()?;
                // Broadcasting adds axes in front.
                let mut f = [1; 4];
                f[4 - from.len()..].copy_from_slice(&from);
                let whole = match self.image(i) {
                    Some(f) => Some(self.blocked_form(i, f)?),
                    None => None,
                };
                let x = match whole {
                    Some(x) => x,
                    None => {
                        let x = self.plain(i)?;
                        let b = if f[1] == 1 { 1 } else { self.block };
                        let g = &mut self.r.new;
                        let split = [f[0], f[1] / b, b, f[2], f[3]];
                        let x = g.reshape(x, split.iter().map(|d| Dim::from(*d)).collect::<Shape>())?;
                        g.permute(x, &[0, 1, 3, 4, 2])?
                    }
                };
                self.r.new.expand(x, &shape)?
            }
            _ => {
                let x = self.plain(id)?;
                let split = [d[0], d[1] / self.block, self.block, d[2], d[3]];
                let g = &mut self.r.new;
                let x = g.reshape(x, split.iter().map(|d| Dim::from(*d)).collect::<Shape>())?;
                g.permute(x, &[0, 1, 3, 4, 2])?
            }
        };
        self.blocked.insert(id, x);
        Ok(x)
    }

    /// A composite of this name over blocked images if the device takes it; `body` gets the first operand as it is plain.
    fn composite(
        &mut self,
        name: &str,
        x: &[NodeId],
        plain: Option<&Shape>,
        body: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId>,
    ) -> Result<Option<NodeId>> {
        let block = self.block;
        let before = self.r.new.nodes().len();
        let y = self.r.new.composite(name, Attrs::new(), x, |g, x| {
            let mut x = x.to_vec();
            if let Some(shape) = plain {
                x[0] = g.permute(x[0], &[0, 1, 4, 2, 3])?;
                x[0] = g.reshape(x[0], shape.clone())?;
            }
            let y = body(g, &x)?;
            let d = g.shape(y).dims()?;
            let split = [d[0], d[1] / block, block, d[2], d[3]];
            let y = g.reshape(y, split.iter().map(|d| Dim::from(*d)).collect::<Shape>())?;
            g.permute(y, &[0, 1, 3, 4, 2])
        })?;
        debug_assert_eq!(self.r.new.nodes().len(), before + 1);
        let taken = matches!(&self.r.new.node(y).op, Op::Composite(c) if (self.claims)(c));
        // What is not taken is dead, and pruned.
        Ok(taken.then_some(y))
    }

    fn conv(&mut self, id: NodeId, n: &Node) -> Result<Option<NodeId>> {
        let Op::Conv(attrs) = &n.op else { return Ok(None) };
        let [x, w] = n.inputs[..] else { return Ok(None) };
        let f32s = [x, w, id].iter().all(|i| self.g.dtype(*i) == DType::F32);
        if !f32s || self.image(id).is_none() || self.g.shape(x).rank() != 4 {
            return Ok(None);
        }
        let weights = self.plain(w)?;
        let shape = self.g.shape(x).clone();
        let (operand, plain) = match self.image(x) {
            Some(d) => (self.blocked_form(x, d)?, Some(&shape)),
            None => (self.plain(x)?, None),
        };
        let y = self
            .composite(BLOCKED_CONV, &[operand, weights], plain, |g, x| g.conv(x[0], x[1], attrs.clone()))?;
        self.convs += usize::from(y.is_some());
        Ok(y)
    }

    fn pool(&mut self, n: &Node) -> Result<Option<NodeId>> {
        let (Op::Pool(attrs), Some(x)) = (&n.op, self.blocked.get(&n.inputs[0]).copied()) else {
            return Ok(None);
        };
        let shape = self.g.shape(n.inputs[0]).clone();
        self.composite(BLOCKED_POOL, &[x], Some(&shape), |g, x| g.pool(x[0], attrs.clone()))
    }

    /// Blocked if an operand is.
    fn element_wise(&mut self, id: NodeId, n: &Node) -> Result<Option<NodeId>> {
        let Some(d) = self.image(id).filter(|_| n.inputs.iter().any(|i| self.blocked.contains_key(i))) else {
            return Ok(None);
        };
        let x = n.inputs.iter().map(|i| self.blocked_form(*i, d)).collect::<Result<Vec<_>>>()?;
        let g = &mut self.r.new;
        match &n.op {
            Op::Scalar(s) => g.scalar(*s, &x).map(Some),
            _ => g.cast(x[0], n.ty.dtype).map(Some),
        }
    }

    fn concat(&mut self, id: NodeId, n: &Node, axis: usize) -> Result<Option<NodeId>> {
        let images: Option<Vec<[usize; 4]>> = n.inputs.iter().map(|i| self.image(*i)).collect();
        let (Some(d), Some(_)) = (images, self.image(id)) else { return Ok(None) };
        if !n.inputs.iter().any(|i| self.blocked.contains_key(i)) {
            return Ok(None);
        }
        let parts = n.inputs.iter().zip(d);
        let x = parts.map(|(i, d)| self.blocked_form(*i, d)).collect::<Result<Vec<_>>>()?;
        self.r.new.concat(&x, axis).map(Some)
    }

    /// Over the whole image: one pixel of it is left, or no image.
    fn reduce(&mut self, id: NodeId, n: &Node, keep: bool) -> Result<Option<NodeId>> {
        let (Op::Reduce { kind, .. }, Some(x)) = (&n.op, self.blocked.get(&n.inputs[0]).copied()) else {
            return Ok(None);
        };
        let y = self.r.new.reduce(*kind, x, &[2, 3], keep)?;
        if keep {
            return Ok(Some(y));
        }
        let y = self.r.new.reshape(y, self.g.shape(id).clone())?;
        self.plain[id.index()] = y;
        self.r.set(id, y);
        Ok(None)
    }
}
