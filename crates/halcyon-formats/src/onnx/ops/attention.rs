//! Multi-head attention and rotary position embedding.

use super::{Row, one, row, row_in};
use crate::onnx::build::{Builder, Range, Value};
use crate::onnx::host::{Host, Num, symbolic};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::ReduceKind as R;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

const ATTENTION: &[&str] = &[
    "is_causal",
    "kv_num_heads",
    "left_window_size",
    "q_num_heads",
    "qk_matmul_output_mode",
    "right_window_size",
    "scale",
    "softcap",
    "softmax_precision",
];

pub(super) const ROWS: &[Row] = &[
    row("Attention", 23, ATTENTION, attention),
    row_in(
        "ai.onnx.preview",
        "FlexAttention",
        1,
        &["prob_mod", "scale", "score_mod", "softmax_precision"],
        flex,
    ),
    row("RotaryEmbedding", 23, &["interleaved", "num_heads", "rotary_embedding_dim"], rotary),
];

pub(super) fn matmul(b: &mut Builder, x: &Value, y: &Value) -> Result<Value> {
    let ids = b.ids(&[x, y])?;
    let n = b.g.matmul(ids[0], ids[1])?;
    Ok(b.value(n))
}

/// Softmax over the last axis.
pub(super) fn softmax(b: &mut Builder, x: &Value) -> Result<Value> {
    let id = b.id(x)?;
    let n = b.g.softmax(id, x.rank().saturating_sub(1))?;
    Ok(b.value(n))
}

/// A head count from an attribute. It must divide `hidden`.
fn heads(c: &Call<'_>, name: &str, hidden: Dim) -> Result<usize> {
    let n = c.opt_int(name)?.ok_or_else(|| c.invalid(format!("attribute '{name}' is missing")))?;
    let n = usize::try_from(n).ok().filter(|n| *n > 0);
    let n = n.ok_or_else(|| c.invalid(format!("attribute '{name}' must be positive")))?;
    let size = hidden.known().ok_or_else(|| symbolic(hidden))?;
    if size % n != 0 {
        return Err(c.invalid(format!("the last axis of size {size} cannot be divided into {n} heads")));
    }
    Ok(n)
}

/// `[b, s, n * d]` to `[b, n, s, d]`.
pub(super) fn unpack(b: &mut Builder, c: &Call<'_>, x: &Value, attr: &str) -> Result<Value> {
    let [batch, s, hidden] = x.shape()[..] else {
        return Err(c.invalid(format!("an operand is {}, expected [batch, sequence, heads * size]", x.ty)));
    };
    let n = heads(c, attr, hidden)?;
    let x = b.reshape(x, [batch, s, n.into(), hidden.div(n.into())?])?;
    b.permute(&x, &[0, 2, 1, 3])
}

/// `[b, n, s, d]` to `[b, s, n * d]`.
pub(super) fn pack(b: &mut Builder, x: &Value) -> Result<Value> {
    let x = b.permute(x, &[0, 2, 1, 3])?;
    let s = x.shape().clone();
    b.reshape(&x, [s[0], s[1], s[2].mul(s[3])])
}

/// Products of the matrices `[b, h, m, k]` and `[b, hk, k, n]`. Groups of `h / hk` consecutive heads share a
/// right-hand matrix; each group is computed as one product.
pub(super) fn shared(b: &mut Builder, x: &Value, y: &Value) -> Result<Value> {
    let (sx, sy) = (x.shape().clone(), y.shape().clone());
    if sx[1] == sy[1] {
        return matmul(b, x, y);
    }
    let rows = sx[1].div(sy[1])?.mul(sx[2]);
    let x = b.reshape(x, [sx[0], sy[1], rows, sx[3]])?;
    let z = matmul(b, &x, y)?;
    b.reshape(&z, [sx[0], sx[1], sx[2], sy[3]])
}

/// Checks `q [b, h, s, d]`, `k [b, hk, t, d]` and `v [b, hk, t, dv]`, where `hk` divides `h`.
fn check_heads(c: &Call<'_>, q: &Value, k: &Value, v: &Value) -> Result<()> {
    let float = |x: &Value| x.dtype().is_float();
    let (sq, sk, sv) = (q.shape(), k.shape(), v.shape());
    let fits = [q, k, v].iter().all(|x| x.rank() == 4 && float(x))
        && q.dtype() == k.dtype()
        && sq[0] == sk[0]
        && sk[..3] == sv[..3]
        && sq[3] == sk[3]
        && (sq[1] == sk[1]
            || matches!((sq[1].known(), sk[1].known()), (Some(h), Some(n)) if n > 0 && h % n == 0));
    if fits {
        Ok(())
    } else {
        Err(c.invalid(format!("the types or shapes of q {}, k {} and v {} do not match", q.ty, k.ty, v.ty)))
    }
}

/// The attribute `scale`, by default one over the square root of the head size.
fn scale_of(c: &Call<'_>, size: Dim) -> Result<f64> {
    match c.opt_float("scale")? {
        Some(s) => Ok(s.into()),
        None => Ok(1.0 / (size.known().ok_or_else(|| symbolic(size))? as f64).sqrt()),
    }
}

/// `(q √scale)(k √scale)ᵀ` in the operands' dtype, as the operator's definition requires.
fn scores(b: &mut Builder, q: &Value, k: &Value, scale: f64) -> Result<Value> {
    let root = scale.abs().sqrt();
    let (l, r) = (b.lit(q, root.copysign(scale)), b.lit(k, root));
    let q = b.scalar(S::Mul, &[q, &l])?;
    let k = b.scalar(S::Mul, &[k, &r])?;
    let k = b.permute(&k, &[0, 1, 3, 2])?;
    shared(b, &q, &k)
}

/// Builds the attention composite, for which devices have kernels.
fn whole(
    b: &mut Builder,
    q: &Value,
    k: &Value,
    v: &Value,
    mask: Option<&Value>,
    causal: bool,
    scale: f64,
) -> Result<Value> {
    let ids = b.ids(&[q, k, v])?;
    let mask = mask.map(|m| b.id(m)).transpose()?;
    let n = b.g.attention(ids[0], ids[1], ids[2], mask, causal, scale)?;
    Ok(b.value(n))
}

/// The keys that each query attends to.
#[derive(Debug, Default)]
struct Visible {
    /// True for keys that are attended to; broadcasts to the scores.
    allowed: Option<Value>,
    /// Added to the scores; -inf for masked keys.
    bias: Option<Value>,
}

impl Visible {
    fn and(&mut self, b: &mut Builder, more: Value) -> Result<()> {
        self.allowed = Some(match self.allowed.take() {
            Some(a) => b.scalar(S::And, &[&a, &more])?,
            None => more,
        });
        Ok(())
    }

    /// Returns the bias to add to the scores, in `dtype` (-inf for masked keys), and a mask of the rows in
    /// which every key is masked. `None` if there is nothing to add.
    fn finish(self, b: &mut Builder, dtype: DType) -> Result<Option<(Value, Value)>> {
        let bias = match (self.allowed, self.bias) {
            (None, None) => return Ok(None),
            (None, Some(v)) => v,
            (Some(a), v) => {
                let low: Value = Host::scalar(dtype, f64::NEG_INFINITY).into();
                let v = v.unwrap_or_else(|| Host::scalar(dtype, 0.0).into());
                b.scalar(S::Select, &[&a, &v, &low])?
            }
        };
        let top = b.reduce(R::Max, &bias, &[bias.rank().saturating_sub(1)], true)?;
        let low = b.lit(&top, f64::NEG_INFINITY);
        let empty = b.scalar(S::Eq, &[&top, &low])?;
        Ok(Some((bias, empty)))
    }
}

/// The numbers `0, 1, …` along `axis` of two axes. The other axis has size 1.
fn positions(b: &mut Builder, n: Dim, axis: usize) -> Result<Value> {
    let i = b.iota(DType::I32, n)?;
    b.reshape(&i, if axis == 0 { [n, 1.into()] } else { [1.into(), n] })
}

/// Reads the mask operand for scores of shape `to`.
fn mask(b: &mut Builder, c: &Call<'_>, m: &Value, dtype: DType, to: &Shape, see: &mut Visible) -> Result<()> {
    let bool = m.dtype() == DType::Bool;
    let mut m = if bool { m.clone() } else { b.cast(m, dtype)? };
    let total = to[3];
    if let Some(&last) = m.shape().last()
        && last != total
        && !(c.opset < 24 && last.is(1))
    {
        // A mask that covers only the first keys masks the others.
        let (Some(n), Some(t)) = (last.known(), total.known()) else {
            return Err(symbolic(if last.known().is_some() { total } else { last }));
        };
        if n < t {
            let mut hi = vec![0; m.rank()];
            hi[m.rank() - 1] = t - n;
            let none = if bool { Scalar::Bool(false) } else { Scalar::F(f64::NEG_INFINITY) };
            let id = b.id(&m)?;
            let id = b.g.pad(id, &vec![0; m.rank()], &hi, none)?;
            m = b.value(id);
        }
    }
    if m.rank() == 0 || m.shape().broadcast(to).ok().as_ref() != Some(to) {
        return Err(c.invalid(format!("mask {} does not broadcast to {to}", m.ty)));
    }
    if bool {
        return see.and(b, m);
    }
    see.bias = Some(m);
    Ok(())
}

/// Restricts `see` to the keys that are in the window, that do not come after the query (if `causal`), and
/// that are within the cache lengths. `past` is the number of tokens in the operator's own cache, and `valid`
/// has the lengths of a cache outside the operator.
fn structure(
    b: &mut Builder,
    c: &Call<'_>,
    causal: bool,
    past: Dim,
    valid: Option<&Value>,
    to: &Shape,
    see: &mut Visible,
) -> Result<()> {
    let window = |name: &str| -> Result<Option<i32>> {
        match c.int(name, -1)? {
            -1 => Ok(None),
            n if n < -1 => Err(c.invalid(format!("attribute '{name}' is {n}, expected at least -1"))),
            // No sequence is longer than this.
            n => Ok(Some(n.min(i64::from(i32::MAX / 2)) as i32)),
        }
    };
    let (left, right) = (window("left_window_size")?, window("right_window_size")?);
    let moving = causal || left.is_some() || right.is_some();
    if !moving && valid.is_none() {
        return Ok(());
    }
    let (s, t) = (to[2], to[3]);
    let j = positions(b, t, 1)?;
    let valid = match valid {
        Some(v) => {
            if v.rank() != 1 || v.shape()[0] != to[0] || !v.dtype().is_int() {
                return Err(c.invalid(format!(
                    "nonpad_kv_seqlen is {}, expected one integer for each batch entry",
                    v.ty
                )));
            }
            let v = b.reshape(v, [to[0], 1.into(), 1.into(), 1.into()])?;
            let zero = b.lit(&v, 0);
            let v = b.scalar(S::Max, &[&v, &zero])?;
            let top: Value = Host { dtype: v.dtype(), dims: vec![], vals: vec![Num::size(t)] }.into();
            let v = b.scalar(S::Min, &[&v, &top])?;
            let v = b.cast(&v, DType::I32)?;
            let inside = b.scalar(S::Lt, &[&j, &v])?;
            see.and(b, inside)?;
            Some(v)
        }
        None => None,
    };
    if !moving {
        return Ok(());
    }
    let size =
        |d: Dim| -> Value { Host { dtype: DType::I32, dims: vec![], vals: vec![Num::size(d)] }.into() };
    let offset = match valid {
        Some(v) => b.scalar(S::Sub, &[&v, &size(s)])?,
        None => size(past),
    };
    let i = positions(b, s, 0)?;
    let p = b.scalar(S::Add, &[&i, &offset])?;
    if causal || right.is_some() {
        let reach = if causal { 0 } else { right.unwrap_or(0) };
        let reach = b.lit(&p, reach);
        let last = b.scalar(S::Add, &[&p, &reach])?;
        let ok = b.scalar(S::Le, &[&j, &last])?;
        see.and(b, ok)?;
    }
    if let Some(left) = left {
        let reach = b.lit(&p, left);
        let first = b.scalar(S::Sub, &[&p, &reach])?;
        let ok = b.scalar(S::Ge, &[&j, &first])?;
        see.and(b, ok)?;
    }
    Ok(())
}

/// Appends keys and values to those of the cache. Also returns the number of tokens in the cache.
fn behind_cache(b: &mut Builder, c: &Call<'_>, k: Value, v: Value) -> Result<(Value, Value, Dim)> {
    match (c.opt(4), c.opt(5)) {
        (Some(pk), Some(pv)) => {
            if c.opt(6).is_some() {
                return Err(c.invalid(
                    "nonpad_kv_seqlen (a cache outside the operator) excludes past_key (a cache inside it)",
                ));
            }
            let past = pk.shape().get(2).copied();
            let past = past.ok_or_else(|| c.invalid(format!("past_key is {}, expected four axes", pk.ty)))?;
            Ok((b.concat(&[pk, &k], 2)?, b.concat(&[pv, &v], 2)?, past))
        }
        (None, None) => Ok((k, v, Dim::from(0))),
        _ => Err(c.invalid("only one of past_key and past_value is present")),
    }
}

fn attention(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (q, k, v) = (c.arg(0)?, c.arg(1)?, c.arg(2)?);
    let packed = q.rank() == 3;
    let (q, k, v) = if packed {
        (unpack(b, c, q, "q_num_heads")?, unpack(b, c, k, "kv_num_heads")?, unpack(b, c, v, "kv_num_heads")?)
    } else {
        (q.clone(), k.clone(), v.clone())
    };
    let (k, v, past) = behind_cache(b, c, k, v)?;
    check_heads(c, &q, &k, &v)?;
    let dtype = q.dtype();
    let present = [k.clone(), v.clone()];
    let v = b.cast(&v, dtype)?;
    let (sq, sk) = (q.shape().clone(), k.shape().clone());
    let to = Shape::from([sq[0], sq[1], sq[2], sk[2]]);

    let causal = c.flag("is_causal", false)?;
    let scale = scale_of(c, sq[3])?;
    let cap = c.float("softcap", 0.0)?;
    let inner = c.dtype("softmax_precision")?.unwrap_or(dtype);
    let mode = c.int("qk_matmul_output_mode", 0)?;
    if !inner.is_float() || !(0..=3).contains(&mode) {
        return Err(c.invalid(format!(
            "softmax_precision is {inner} (a float is required), qk_matmul_output_mode is {mode} (0 to 3)"
        )));
    }
    let windowed = c.int("left_window_size", -1)? != -1 || c.int("right_window_size", -1)? != -1;

    // With half types, the definition rounds after every op, which an attention kernel does not.
    let simple = cap <= 0.0
        && !c.is_result_used(3)
        && inner == dtype
        && matches!(dtype, DType::F32 | DType::F64)
        && [sq[1], sk[1]].iter().all(|d| d.known().is_some())
        && !sk[2].is(0);
    let plain = c.opt(3).is_none() && c.opt(6).is_none() && !windowed;
    let lengths = sq[2].known().is_some() && sk[2].known().is_some();
    let aligned = !causal || (lengths && sq[2].add(past) == sk[2]);
    let pack_up = |b: &mut Builder, y: Value| if packed { pack(b, &y) } else { Ok(y) };
    if simple && plain && aligned {
        let y = whole(b, &q, &k, &v, None, causal, scale)?;
        let [k, v] = present;
        return Ok(vec![pack_up(b, y)?, k, v]);
    }

    let mut see = Visible::default();
    if let Some(m) = c.opt(3) {
        mask(b, c, m, dtype, &to, &mut see)?;
    }
    structure(b, c, causal, past, c.opt(6), &to, &mut see)?;
    let see = see.finish(b, dtype)?;
    let guard = |b: &mut Builder, x: Value| -> Result<Value> {
        match &see {
            Some((_, empty)) => {
                let zero = b.lit(&x, 0.0);
                b.scalar(S::Select, &[empty, &zero, &x])
            }
            None => Ok(x),
        }
    };
    let [pk, pv] = present;
    if simple {
        let y = whole(b, &q, &k, &v, see.as_ref().map(|s| &s.0), false, scale)?;
        let y = guard(b, y)?;
        return Ok(vec![pack_up(b, y)?, pk, pv]);
    }
    let raw = scores(b, &q, &k, scale)?;
    let capped = if cap > 0.0 {
        let cap = b.lit(&raw, cap);
        let x = b.scalar(S::Div, &[&raw, &cap])?;
        let x = b.scalar(S::Tanh, &[&x])?;
        b.scalar(S::Mul, &[&x, &cap])?
    } else {
        raw.clone()
    };
    let biased = match &see {
        Some((bias, _)) => b.scalar(S::Add, &[&capped, bias])?,
        None => capped.clone(),
    };
    let x = b.cast(&biased, inner)?;
    let p = softmax(b, &x)?;
    let p = guard(b, p)?;
    let p = b.cast(&p, dtype)?;
    let y = shared(b, &p, &v)?;
    let shown = [raw, capped, biased, p].into_iter().nth(mode as usize);
    Ok([pack_up(b, y)?, pk, pv].into_iter().chain(shown).collect())
}

/// Applies the graph attribute `name` to `x` if the node has it. The graph must keep the dtype.
fn modified(b: &mut Builder, c: &Call<'_>, name: &str, x: Value) -> Result<Value> {
    let Some(g) = c.graph(name)? else { return Ok(x) };
    let ty = x.ty.clone();
    let out = c.inline(b, g, vec![x.into()])?;
    match out.first().and_then(|v| v.tensor()) {
        Some(v) if out.len() == 1 && v.ty == ty => Ok(v.clone()),
        _ => Err(c.invalid(format!("graph '{name}' must give one {ty}"))),
    }
}

/// Attention whose scores and probabilities can be modified by subgraphs of the model.
fn flex(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (q, k, v) = (c.arg(0)?, c.arg(1)?, c.arg(2)?);
    check_heads(c, q, k, v)?;
    let dtype = q.dtype();
    let inner = c.dtype("softmax_precision")?.unwrap_or(dtype.compute());
    if !inner.is_float() || v.dtype() != dtype {
        return Err(c.invalid(format!(
            "softmax_precision is {inner} (a float is required), v is {} ({dtype} is required)",
            v.dtype()
        )));
    }
    let scale = scale_of(c, q.shape()[3])?;
    let plain = c.graph("score_mod")?.is_none() && c.graph("prob_mod")?.is_none();
    let sized = [q, k].iter().all(|x| x.shape()[1].known().is_some()) && !k.shape()[2].is(0);
    if plain && sized && inner == dtype && matches!(dtype, DType::F32 | DType::F64) {
        return one(whole(b, q, k, v, None, false, scale)?);
    }
    let s = scores(b, q, k, scale)?;
    let s = b.cast(&s, inner)?;
    let s = modified(b, c, "score_mod", s)?;
    let p = softmax(b, &s)?;
    let p = modified(b, c, "prob_mod", p)?;
    let v = b.cast(v, inner)?;
    let y = shared(b, &p, &v)?;
    one(b.cast(&y, dtype)?)
}

/// Rotates pairs of features by angles that depend on the position (Su et al., "RoFormer", 2021). Pairs are
/// neighbouring features (`interleaved`), or features half the rotated size apart.
fn rotary(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let packed = x.rank() == 3;
    // [b, h, s, d]
    let y = match x.rank() {
        3 => unpack(b, c, x, "num_heads")?,
        4 => x.clone(),
        _ => return Err(c.invalid(format!("the input is {}, expected three or four axes", x.ty))),
    };
    let s = y.shape().clone();
    let size = s[3].known().ok_or_else(|| symbolic(s[3]))?;
    let turned = match c.int("rotary_embedding_dim", 0)? {
        0 => size,
        n => usize::try_from(n)
            .ok()
            .filter(|n| *n <= size)
            .ok_or_else(|| c.invalid(format!("rotary_embedding_dim is {n}, expected 0 to {size}")))?,
    };
    if turned % 2 != 0 {
        return Err(c.invalid(format!("{turned} features cannot be divided into pairs")));
    }
    let half = turned / 2;
    let cache = |b: &mut Builder, i: usize| -> Result<Value> {
        let mut v = c.arg(i)?.clone();
        if let Some(p) = c.opt(3) {
            v = b.gather(&v, p, 0)?;
        }
        let [n, len, last] = v.shape()[..] else {
            return Err(c.invalid(format!("operand {i} is {}, expected a value per position and pair", v.ty)));
        };
        if !last.is(half) || v.dtype() != x.dtype() {
            return Err(c.invalid(format!(
                "operand {i} is {}, expected {half} values of {} for each position",
                v.ty,
                x.dtype()
            )));
        }
        b.reshape(&v, [n, 1.into(), len, last])
    };
    let (cos, sin) = (cache(b, 1)?, cache(b, 2)?);
    let interleaved = c.flag("interleaved", false)?;
    let part = |b: &mut Builder, k: usize| {
        let mut r: Vec<Range> = s.iter().map(|&len| Range { start: 0.into(), step: 1, len }).collect();
        r[3] = match interleaved {
            true => Range { start: k.into(), step: 2, len: half.into() },
            false => Range { start: (k * half).into(), step: 1, len: half.into() },
        };
        b.slice(&y, &r)
    };
    let (x1, x2) = (part(b, 0)?, part(b, 1)?);
    let mul = |b: &mut Builder, p: &Value, q: &Value| b.scalar(S::Mul, &[p, q]);
    let (c1, s2, s1, c2) = (mul(b, &cos, &x1)?, mul(b, &sin, &x2)?, mul(b, &sin, &x1)?, mul(b, &cos, &x2)?);
    let mut real = b.scalar(S::Sub, &[&c1, &s2])?;
    let mut imag = b.scalar(S::Add, &[&s1, &c2])?;
    if real.shape() != x1.shape() {
        return Err(c.invalid(format!("the cosines and sines {} do not fit the input {}", cos.ty, x.ty)));
    }
    let mut done = if interleaved {
        let pair = [s[0], s[1], s[2], half.into(), 1.into()];
        (real, imag) = (b.reshape(&real, pair)?, b.reshape(&imag, pair)?);
        let both = b.concat(&[&real, &imag], 4)?;
        b.reshape(&both, [s[0], s[1], s[2], turned.into()])?
    } else {
        b.concat(&[&real, &imag], 3)?
    };
    if turned < size {
        let rest = b.narrow(&y, 3, turned.into(), (size - turned).into())?;
        done = b.concat(&[&done, &rest], 3)?;
    }
    one(if packed { pack(b, &done)? } else { done })
}

#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;
