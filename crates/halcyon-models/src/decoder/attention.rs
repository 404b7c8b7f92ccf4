//! Attention over the paged cache.

use super::cache::{columns, encoded};
use super::latent::LatentWeights;
use super::load::{Loader, Rotations};
use super::weights::{Matrix, NormWeights};
use super::{CacheLayout, CacheShape, Rows};
use crate::rope::{Layout, Scaling};
use crate::spec::*;
use halcyon::ir::error::{Error, Result};
use halcyon::{Cache, CachedAttention, DType, ScatterKind, Tensor};

#[derive(Debug)]
pub(super) enum AttentionWeights {
    Heads(Box<HeadWeights>),
    Latent(Box<LatentWeights>),
}

#[derive(Debug)]
pub(super) struct HeadWeights {
    q: Matrix,
    /// `None`: those of another layer.
    kv: Option<KeyValues>,
    o: Matrix,
    q_norm: Option<NormWeights>,
    sinks: Option<Tensor>,
    /// The number of the rotation.
    rotation: Option<usize>,
}

#[derive(Debug)]
struct KeyValues {
    k: Matrix,
    /// `None`: the products of `k` are values too.
    v: Option<Matrix>,
    k_norm: Option<NormWeights>,
    v_norm: Option<NormWeights>,
}

/// The states of a layer: keys and values, each `[pages * heads * page, size]`, or bytes in place of the size
/// if the cache is in blocks.
pub(super) fn cache_shapes(a: &Attention, c: CacheLayout) -> Vec<CacheShape> {
    let rows = c.pages * a.shared * c.page;
    let of = |size: usize, dtype: DType| CacheShape { dims: [rows, columns(dtype, size)], dtype };
    match (a.keys_of, &a.latent) {
        (Some(_), _) => vec![],
        // The vector is the first part of the key, so keys and values are one state.
        (None, Some(_)) => vec![of(a.key, c.types.keys)],
        (None, None) => vec![of(a.key, c.types.keys), of(a.value, c.types.values)],
    }
}

impl Loader<'_> {
    pub(super) fn attention(
        &self,
        i: usize,
        a: &Attention,
        ropes: &mut Rotations,
    ) -> Result<AttentionWeights> {
        if let Some(l) = &a.latent {
            return Ok(AttentionWeights::Latent(Box::new(self.latent(i, a, l, ropes)?)));
        }
        let (h, p) = (self.spec.hidden, format!("blk.{i}"));
        let qk = |stem: &str, heads: usize| -> Result<Option<NormWeights>> {
            let Some(n) = a.qk_norm else { return Ok(None) };
            let size = if n.by_head { a.key } else { heads * a.key };
            self.norm(&format!("{p}.{stem}"), size, n.norm).map(Some)
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
        let kv = || -> Result<KeyValues> {
            let v = || self.matrix(&format!("{p}.attn_v"), &[a.shared * a.value, h]);
            Ok(KeyValues {
                k: self.matrix(&format!("{p}.attn_k"), &[a.shared * a.key, h])?,
                v: (!a.values_of_keys).then(v).transpose()?,
                k_norm: qk("attn_k_norm", a.shared)?,
                v_norm: a.value_norm.map(|spec| NormWeights { weight: None, bias: None, spec }),
            })
        };
        Ok(AttentionWeights::Heads(Box::new(HeadWeights {
            q: self.matrix(&format!("{p}.attn_q"), &[a.heads * a.key * if a.gate { 2 } else { 1 }, h])?,
            kv: a.keys_of.is_none().then(kv).transpose()?,
            o: self.matrix(&format!("{p}.attn_output"), &[h, a.heads * a.value])?,
            q_norm: qk("attn_q_norm", a.heads)?,
            sinks,
            rotation: self.rotation(a, ropes)?,
        })))
    }

    /// The number of the rotation. Factors of a file become a part of it.
    pub(super) fn rotation(&self, a: &Attention, ropes: &mut Rotations) -> Result<Option<usize>> {
        let Some(r) = a.rope.as_ref().filter(|r| r.size > 0) else { return Ok(None) };
        let mut r = r.clone();
        let factors = |name: &str| -> Result<Option<Vec<f64>>> {
            let Some(w) = self.find(name)? else { return Ok(None) };
            Ok(Some(self.floats(&w)?.into_iter().map(f64::from).collect()))
        };
        if r.factors.is_none() {
            r.factors = factors("rope_freqs.weight")?;
        }
        if let Scaling::Long { short, long, .. } = &mut r.scaling
            && short.is_empty()
        {
            let need = |v: Option<Vec<f64>>| {
                v.ok_or_else(|| Error::argument("load", "the model has no rope_factors_short and _long"))
            };
            *short = need(factors("rope_factors_short.weight")?)?;
            *long = need(factors("rope_factors_long.weight")?)?;
        }
        Ok(Some(ropes.add(&r)))
    }
}

pub(super) struct AttentionStep<'a> {
    pub(super) a: &'a Attention,
    pub(super) w: &'a AttentionWeights,
    pub(super) rows: Rows<'a>,
    pub(super) layout: CacheLayout,
}

impl AttentionStep<'_> {
    /// The result for the normed activations `x`, and the new states of the layer. `states` are those of
    /// [`cache_shapes`]; if the layer reads the keys and values of another layer, they are the new states of
    /// that one.
    pub(super) fn run(&self, x: &Tensor, states: &[Tensor]) -> (Tensor, Vec<Tensor>) {
        match self.w {
            AttentionWeights::Heads(w) => self.by_head(w, x, states),
            AttentionWeights::Latent(w) => self.latent(w, x, states),
        }
    }

    fn by_head(&self, w: &HeadWeights, x: &Tensor, states: &[Tensor]) -> (Tensor, Vec<Tensor>) {
        let (a, n) = (self.a, self.count());
        let mut q = w.q.apply(x);
        let mut gate = None;
        if a.gate {
            let both = q.reshape([n, a.heads, 2 * a.key]);
            gate = Some(both.narrow(2, a.key, a.key).reshape([n, a.heads * a.key]));
            q = both.narrow(2, 0, a.key);
        }
        let q = self.heads(q, a.heads, &w.q_norm, w.rotation);
        let new = match (&w.kv, states) {
            (Some(kv), [keys, values, ..]) => {
                let k = kv.k.apply(x);
                let v = kv.v.as_ref().map_or_else(|| k.clone(), |v| v.apply(x));
                let v = v.reshape([n, a.shared, a.value]);
                let v = kv.v_norm.as_ref().map_or_else(|| v.clone(), |norm| norm.apply(&v));
                let k = self.heads(k, a.shared, &kv.k_norm, w.rotation);
                let c = self.layout.types;
                vec![self.write(keys, &k, a.key, c.keys), self.write(values, &v, a.value, c.values)]
            }
            _ => vec![],
        };
        let [keys, values] = (if new.is_empty() { states } else { &new[..] }) else { return (q, new) };
        let y = self.attend(&q, keys, values, w.sinks.as_ref()).reshape([n, a.heads * a.value]);
        let y = gate.map_or_else(|| y.clone(), |g| &y * &g.sigmoid());
        (w.o.apply(&y), new)
    }

    /// Attention of the queries `[rows, heads, size]` over the cache.
    pub(super) fn attend(
        &self,
        q: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        sinks: Option<&Tensor>,
    ) -> Tensor {
        if self.is_whole() {
            return self.attend_whole(q, keys, values, sinks);
        }
        let (a, CacheLayout { pages, page, .. }) = (self.a, self.layout);
        let paged = |state: &Tensor| {
            let columns = state.dims().map_or(0, |d| d[1]);
            state.reshape([pages, a.shared, page, columns])
        };
        let cache = Cache {
            keys: &paged(keys),
            values: &paged(values),
            table: self.rows.table,
            sequence: self.rows.sequence,
            position: self.rows.position,
            sinks,
        };
        let options = CachedAttention { scale: a.scale, softcap: a.softcap, window: a.window };
        q.cached_attention(cache, options)
    }

    pub(super) fn count(&self) -> usize {
        self.rows.tokens.dims().map_or(0, |d| d[0])
    }

    /// Queries or keys `[rows, heads, size]`, normed and rotated.
    fn heads(&self, x: Tensor, heads: usize, norm: &Option<NormWeights>, rotation: Option<usize>) -> Tensor {
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
        norms(self.rotate(x, heads, size, rotation), true)
    }

    /// Rotates `[rows, heads, size]`.
    pub(super) fn rotate(&self, x: Tensor, heads: usize, size: usize, rotation: Option<usize>) -> Tensor {
        let (Some(rope), Some(number)) = (&self.a.rope, rotation) else { return x };
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
        match rope.size == size {
            true => turned,
            false => Tensor::cat(&[&turned, &x.narrow(-1, rope.size, size - rope.size)], 2),
        }
    }

    /// The cache `[pages * heads * page, size]` of type `dtype` with `new` `[rows, heads, size]` in its
    /// slots. Without a cache, `new` itself, `[rows * heads, size]`.
    pub(super) fn write(&self, cache: &Tensor, new: &Tensor, size: usize, dtype: DType) -> Tensor {
        if self.is_whole() {
            return new.reshape([self.count() * self.a.shared, size]);
        }
        let (n, heads, page) = (self.count(), self.a.shared, self.layout.page);
        let b = cache.backend();
        let int = |v: usize| Tensor::scalar(b, v as i64, DType::I32);
        let slot = self.rows.slot.reshape([n, 1]);
        let which = &slot / &int(page);
        let offset = &slot - &(&which * &int(page));
        let head = Tensor::arange(b, heads, DType::I32).reshape([1, heads]);
        let at = (which * int(heads) + head) * int(page) + offset;
        let rows = new.reshape([n * heads, size]);
        let rows = match dtype {
            DType::U8 => encoded(&rows, n * heads, size),
            other => rows.cast(other),
        };
        cache.scatter_rows(&at.reshape([n * heads]), &rows, 0, ScatterKind::Set)
    }
}
