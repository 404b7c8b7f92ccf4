//! Attention over the paged cache.

use super::load::{Loader, Rotations};
use super::weights::{Matrix, NormWeights};
use super::{CacheLayout, Rows};
use crate::rope::{Layout, Scaling};
use crate::spec::*;
use halcyon::ir::error::{Error, Result};
use halcyon::{Cache, CachedAttention, DType, ScatterKind, Tensor};

#[derive(Debug)]
pub(super) struct AttentionWeights {
    pub(super) q: Matrix,
    pub(super) k: Matrix,
    pub(super) v: Matrix,
    pub(super) o: Matrix,
    pub(super) q_norm: Option<NormWeights>,
    pub(super) k_norm: Option<NormWeights>,
    pub(super) sinks: Option<Tensor>,
    /// The number of the rotation.
    pub(super) rotation: Option<usize>,
}

impl Loader<'_> {
    pub(super) fn attention(
        &self,
        i: usize,
        a: &Attention,
        ropes: &mut Rotations,
    ) -> Result<AttentionWeights> {
        let (h, p) = (self.spec.hidden, format!("blk.{i}"));
        let qk = |stem: &str, heads: usize| -> Result<Option<NormWeights>> {
            let Some(n) = a.qk_norm else { return Ok(None) };
            let size = if n.by_head { a.key } else { heads * a.key };
            self.norm(&format!("{p}.{stem}"), size, n.norm).map(Some)
        };
        let rotation = match &a.rope {
            Some(r) if r.size > 0 => {
                let mut r = r.clone();
                let factors = |name: &str| -> Result<Option<Vec<f64>>> {
                    let Some(w) = self.find(name)? else { return Ok(None) };
                    Ok(Some(self.floats(&w)?.into_iter().map(f64::from).collect()))
                };
                r.factors = factors("rope_freqs.weight")?.unwrap_or_default();
                if let Scaling::Long { short, long, .. } = &mut r.scaling
                    && short.is_empty()
                {
                    let need = |v: Option<Vec<f64>>| {
                        v.ok_or_else(|| {
                            Error::argument("load", "the model has no rope_factors_short and _long")
                        })
                    };
                    *short = need(factors("rope_factors_short.weight")?)?;
                    *long = need(factors("rope_factors_long.weight")?)?;
                }
                Some(ropes.add(&r))
            }
            _ => None,
        };
        let sinks =
            match a.sinks {
                true => {
                    let name = format!("{p}.attn_sinks.weight");
                    let found = self.vector(&name, &[a.heads])?;
                    Some(found.ok_or_else(|| {
                        Error::argument("load", format!("the model has no tensor '{name}'"))
                    })?)
                }
                false => None,
            };
        Ok(AttentionWeights {
            q: self.matrix(&format!("{p}.attn_q"), &[a.heads * a.key, h])?,
            k: self.matrix(&format!("{p}.attn_k"), &[a.shared * a.key, h])?,
            v: self.matrix(&format!("{p}.attn_v"), &[a.shared * a.value, h])?,
            o: self.matrix(&format!("{p}.attn_output"), &[h, a.heads * a.value])?,
            q_norm: qk("attn_q_norm", a.heads)?,
            k_norm: qk("attn_k_norm", a.shared)?,
            sinks,
            rotation,
        })
    }
}

pub(super) struct AttentionStep<'a> {
    pub(super) a: &'a Attention,
    pub(super) w: &'a AttentionWeights,
    pub(super) rows: Rows<'a>,
    pub(super) layout: CacheLayout,
}

impl AttentionStep<'_> {
    pub(super) fn run(&self, x: &Tensor, keys: &Tensor, values: &Tensor) -> (Tensor, Tensor, Tensor) {
        let (a, w) = (self.a, self.w);
        let q = self.heads(w.q.apply(x), a.heads, &w.q_norm);
        let k = self.heads(w.k.apply(x), a.shared, &w.k_norm);
        let n = self.count();
        let v = w.v.apply(x).reshape([n, a.shared, a.value]);
        let (keys, values) = (self.write(keys, &k, a.key), self.write(values, &v, a.value));
        let CacheLayout { pages, page, .. } = self.layout;
        let cache = Cache {
            keys: &keys.reshape([pages, a.shared, page, a.key]),
            values: &values.reshape([pages, a.shared, page, a.value]),
            table: self.rows.table,
            sequence: self.rows.sequence,
            position: self.rows.position,
            sinks: w.sinks.as_ref(),
        };
        let options = CachedAttention { scale: a.scale, softcap: a.softcap, window: a.window };
        let y = q.cached_attention(cache, options).reshape([n, a.heads * a.value]);
        (w.o.apply(&y), keys, values)
    }

    fn count(&self) -> usize {
        self.rows.tokens.dims().map_or(0, |d| d[0])
    }

    /// Queries or keys `[rows, heads, size]`, normed and rotated.
    fn heads(&self, x: Tensor, heads: usize, norm: &Option<NormWeights>) -> Tensor {
        let (n, size) = (self.count(), self.a.key);
        let qk = self.a.qk_norm;
        let norms = |x: Tensor, after: bool| match (qk, norm) {
            (Some(q), Some(w)) if q.after_rope == after => match q.by_head {
                true => w.apply(&x),
                false => w.apply(&x.reshape([n, heads * size])).reshape([n, heads, size]),
            },
            _ => x,
        };
        let x = norms(x.reshape([n, heads, size]), false);
        norms(self.rotate(x, heads), true)
    }

    fn rotate(&self, x: Tensor, heads: usize) -> Tensor {
        let (Some(rope), Some(number)) = (&self.a.rope, self.w.rotation) else { return x };
        let (n, half) = (self.count(), rope.size / 2);
        let [cos, sin] = &self.rows.rotations[2 * number..][..2] else { return x };
        let turned = match rope.layout {
            Layout::Half => {
                let [cos, sin] = [cos, sin].map(|t| t.reshape([n, 1, half]));
                let (lo, hi) = (x.narrow(-1, 0, half), x.narrow(-1, half, half));
                Tensor::cat(&[&(&lo * &cos - &hi * &sin), &(&hi * &cos + &lo * &sin)], 2)
            }
            Layout::Pairs => {
                let [cos, sin] = [cos, sin].map(|t| t.reshape([n, 1, half, 1]));
                let pairs = x.narrow(-1, 0, rope.size).reshape([n, heads, half, 2]);
                let (a, b) = (pairs.narrow(-1, 0, 1), pairs.narrow(-1, 1, 1));
                let both = Tensor::cat(&[&(&a * &cos - &b * &sin), &(&b * &cos + &a * &sin)], 3);
                both.reshape([n, heads, rope.size])
            }
        };
        match rope.size == self.a.key {
            true => turned,
            false => Tensor::cat(&[&turned, &x.narrow(-1, rope.size, self.a.key - rope.size)], 2),
        }
    }

    /// The cache `[pages * heads * page, size]` with `new` `[rows, heads, size]` in its slots.
    fn write(&self, cache: &Tensor, new: &Tensor, size: usize) -> Tensor {
        let (n, heads, page) = (self.count(), self.a.shared, self.layout.page);
        let b = cache.backend();
        let int = |v: usize| Tensor::scalar(b, v as i64, DType::I32);
        let slot = self.rows.slot.reshape([n, 1]);
        let which = &slot / &int(page);
        let offset = &slot - &(&which * &int(page));
        let head = Tensor::arange(b, heads, DType::I32).reshape([1, heads]);
        let at = (which * int(heads) + head) * int(page) + offset;
        let rows = new.reshape([n * heads, size]).cast(self.layout.dtype);
        cache.scatter_rows(&at.reshape([n * heads]), &rows, 0, ScatterKind::Set)
    }
}
