//! Multi-head latent attention: the cache has one vector per position, from which the keys and values of all
//! heads follow.

use super::attention::AttentionStep;
use super::load::{Loader, Rotations, expect};
use super::weights::{Matrix, NormWeights};
use crate::source::Weights;
use crate::spec::*;
use halcyon::ir::error::Result;
use halcyon::{ConstData, DType, Tensor};

#[derive(Debug)]
pub(super) struct LatentWeights {
    /// The product before that of the queries, and its norm.
    before: Option<(Matrix, NormWeights)>,
    q: Matrix,
    /// Makes the vector and the rotated part of the key.
    kv: Matrix,
    kv_norm: NormWeights,
    /// `[heads, rank, plain]`: turns a query so that its products with vectors are those with keys.
    k: Matrix,
    /// `[heads, value, rank]`: makes a head's values of vectors.
    v: Matrix,
    o: Matrix,
    rotation: Option<usize>,
}

impl Loader<'_> {
    pub(super) fn latent(
        &self,
        i: usize,
        a: &Attention,
        l: &Latent,
        ropes: &mut Rotations,
    ) -> Result<LatentWeights> {
        let (h, name) = (self.spec.hidden, |n: &str| format!("blk.{i}.attn_{n}"));
        let queries = a.heads * (l.plain + a.key - l.rank);
        let (before, q) = match l.queries {
            Some(n) => {
                let before = (self.matrix(&name("q_a"), &[n, h])?, self.norm(&name("q_a_norm"), n, l.norm)?);
                (Some(before), self.matrix(&name("q_b"), &[queries, n])?)
            }
            None => (None, self.matrix(&name("q"), &[queries, h])?),
        };
        let (k, v) = self.expansion(&name, a.heads, l)?;
        Ok(LatentWeights {
            before,
            q,
            kv: self.matrix(&name("kv_a_mqa"), &[a.key, h])?,
            kv_norm: self.norm(&name("kv_a_norm"), l.rank, l.norm)?,
            k,
            v,
            o: self.matrix(&name("output"), &[h, a.heads * l.value])?,
            rotation: self.rotation(a, ropes)?,
        })
    }

    /// The matrices of keys and of values. Folders and old files have both in one: for each head the rows of
    /// the key, then those of the value.
    fn expansion(&self, name: &dyn Fn(&str) -> String, heads: usize, l: &Latent) -> Result<(Matrix, Matrix)> {
        let (k, v) = ([heads, l.rank, l.plain], [heads, l.value, l.rank]);
        let joined = format!("{}.weight", name("kv_b"));
        let Some(w) = self.find(&joined)? else {
            return Ok((self.matrix(&name("k_b"), &k)?, self.matrix(&name("v_b"), &v)?));
        };
        let rows = l.plain + l.value;
        expect(&joined, &w.dims(), &[heads * rows, l.rank])?;
        let data = self.unblocked(w)?;
        let at = |i: usize, [_, m, n]: [usize; 3]| (i / (m * n), i / n % m, i % n);
        let keys = data.picked(&k, &|i| {
            let (head, column, row) = at(i, k);
            (head * rows + row) * l.rank + column
        })?;
        let values = data.picked(&v, &|i| {
            let (head, row, column) = at(i, v);
            (head * rows + l.plain + row) * l.rank + column
        })?;
        let matrix = |w: Weights| Matrix::new(Tensor::constant(self.backend, &w.data), None);
        Ok((matrix(keys), matrix(values)))
    }

    /// Weights whose blocks are decoded, of a type that products read.
    fn unblocked(&self, w: Weights) -> Result<Weights> {
        let kept = matches!(w.data.dtype, DType::F32 | DType::F16 | DType::BF16);
        if w.blocks.is_none() && kept {
            self.count(w.data.dtype, &w.data.dims);
            return Ok(w);
        }
        Ok(Weights { data: ConstData::from_slice(&w.dims(), &self.floats(&w)?)?, blocks: None })
    }
}

impl AttentionStep<'_> {
    pub(super) fn latent(&self, w: &LatentWeights, x: &Tensor, states: &[Tensor]) -> (Tensor, Vec<Tensor>) {
        let (a, n) = (self.a, self.count());
        let (Some(l), Some(state)) = (&a.latent, states.first()) else { return (x.clone(), vec![]) };
        let (heads, turned) = (a.heads, a.key - l.rank);
        let input = w.before.as_ref().map_or_else(|| x.clone(), |(m, norm)| norm.apply(&m.apply(x)));
        let q = w.q.apply(&input).reshape([n, heads, l.plain + turned]);
        let which = Tensor::arange(x.backend(), heads, DType::I32).reshape([1, heads]);
        let which = which.expand([n, heads]).reshape([n * heads]);
        let plain = q.narrow(-1, 0, l.plain).reshape([n * heads, l.plain]);
        let plain = w.k.apply_which(&plain, &which).reshape([n, heads, l.rank]);
        let rest = self.rotate(q.narrow(-1, l.plain, turned), heads, turned, w.rotation);
        let q = Tensor::cat(&[&plain, &rest], 2);

        let both = w.kv.apply(x);
        let vector = w.kv_norm.apply(&both.narrow(-1, 0, l.rank)).reshape([n, 1, l.rank]);
        let rest = both.narrow(-1, l.rank, turned).reshape([n, 1, turned]);
        let rest = self.rotate(rest, 1, turned, w.rotation);
        let keys = self.write(state, &Tensor::cat(&[&vector, &rest], 2), a.key, self.layout.types.keys);
        // Keys serve as values, so that there is one state. The rotated part of the result has no meaning.
        let y = self.attend(&q, &keys, &keys, None).narrow(-1, 0, l.rank);
        let y = w.v.apply_which(&y.reshape([n * heads, l.rank]), &which).reshape([n, heads * l.value]);
        (w.o.apply(&y), vec![keys])
    }
}
