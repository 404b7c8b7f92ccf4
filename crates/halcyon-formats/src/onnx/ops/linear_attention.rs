//! Linear attention: a state matrix per head that each token decays, corrects and updates.

use super::attention::{matmul, pack, unpack};
use super::{Row, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::host::{Host, symbolic};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::ReduceKind as R;
use halcyon_ir::{DType, Dim, Result, Shape};

pub(super) const ROWS: &[Row] = &[row(
    "LinearAttention",
    27,
    &["chunk_size", "kv_num_heads", "q_num_heads", "scale", "update_rule"],
    linear_attention,
)];

/// Number of tokens that are computed together, by matrix products.
const CHUNK: usize = 64;
/// Like [`CHUNK`], if every feature has its own decay. It is smaller because an intermediate result then has
/// a value for every pair of tokens and every feature.
const CHUNK_BY_FEATURE: usize = 16;
/// Limit on the parts that a sequence is split into; each adds about twenty nodes to the graph.
const MAX_PARTS: usize = 2048;
/// Decays are logarithms. Lower (stronger) decays are raised to this value, whose exponential is 0 in f32.
/// Without the clamp, differences of sums of very strong decays would lose their digits or be NaN.
const STRONGEST: f64 = -104.0;

/// Operands by head, in the compute type: `q [b, hk, h / hk, t, dk]`, `k [b, hk, 1, t, dk]`, `v [b, hk, 1, t,
/// dv]`, `decay [b, hk, 1, t, dk or 1]`, `beta [b, hk or 1, 1, t, 1]`.
struct Operands {
    q: Value,
    k: Value,
    v: Value,
    decay: Option<Value>,
    beta: Option<Value>,
    scale: f64,
}

/// The update rule, and whether it has decays and `beta`.
fn rule<'a>(c: &Call<'a>) -> Result<(&'a str, bool, bool)> {
    let rule = c.string("update_rule", "gated_delta")?;
    let (gated, delta) = match rule {
        "linear" => (false, false),
        "gated" => (true, false),
        "delta" => (false, true),
        "gated_delta" => (true, true),
        other => return Err(c.invalid(format!("update_rule '{other}' is not known"))),
    };
    for (i, name, wanted) in [(4, "decay", gated), (5, "beta", delta)] {
        if c.opt(i).is_some() != wanted {
            return Err(c.invalid(format!(
                "update_rule '{rule}' {} operand '{name}'",
                if wanted { "needs" } else { "takes no" }
            )));
        }
    }
    Ok((rule, gated, delta))
}

fn linear_attention(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (rule, _, delta) = rule(c)?;
    let to = c.arg(0)?.dtype();
    if !to.is_float() {
        return Err(c.invalid(format!("{to} is not a float type")));
    }
    let wide = to.compute();
    let q = unpack(b, c, c.arg(0)?, "q_num_heads")?;
    let k = unpack(b, c, c.arg(1)?, "kv_num_heads")?;
    let v = unpack(b, c, c.arg(2)?, "kv_num_heads")?;
    let (sq, sk) = (q.shape().clone(), k.shape().clone());
    let (h, hk) = (known(sq[1])?, known(sk[1])?);
    if h % hk != 0 || sq[0] != sk[0] || sq[2..] != sk[2..] || v.shape()[..3] != sk[..3] {
        return Err(c.invalid(format!(
            "the shapes per head do not match: q is {}, k is {} and v is {}",
            q.ty, k.ty, v.ty
        )));
    }
    let (t, dk, dv) = (known(sq[2])?, sq[3], v.shape()[3]);
    let scale = match c.float("scale", 0.0)? {
        0.0 => 1.0 / (known(dk)?.max(1) as f64).sqrt(),
        s => s.into(),
    };
    let state_shape = Shape::from([sk[0], sk[1], 1.into(), dk, dv]);
    let (kept, state) = match c.opt(3) {
        Some(s) => {
            if s.shape()[..] != [sk[0], sk[1], dk, dv] || !s.dtype().is_float() {
                return Err(c.invalid(format!(
                    "past_state is {}, expected one {dk} by {dv} matrix of floats per head",
                    s.ty
                )));
            }
            let w = b.cast(s, wide)?;
            (s.dtype(), b.reshape(&w, &state_shape)?)
        }
        None => (to, b.full(wide, &state_shape, 0.0.into())),
    };

    let split = |b: &mut Builder, x: &Value, group: usize| -> Result<Value> {
        let x = b.cast(x, wide)?;
        let s = x.shape().clone();
        b.reshape(&x, [s[0], s[1].div(group.into())?, group.into(), s[2], s[3]])
    };
    // One value per token, per token and head, or per token, head and feature.
    let gate = |b: &mut Builder, x: &Value, ok: &[Dim]| -> Result<Value> {
        let s = x.shape().clone();
        if s.rank() != 3 || s[..2] != [sk[0], sk[2]] || !ok.contains(&s[2]) {
            return Err(
                c.invalid(format!("{} does not fit k, which is {} after the split into heads", x.ty, k.ty))
            );
        }
        let x = b.cast(x, wide)?;
        let n = if s[2].is(1) { Dim::from(1) } else { sk[1] };
        let x = b.reshape(&x, [s[0], s[1], n, s[2].div(n)?])?;
        let x = b.permute(&x, &[0, 2, 1, 3])?;
        let s = x.shape().clone();
        b.reshape(&x, [s[0], s[1], 1.into(), s[2], s[3]])
    };
    let decay = match c.opt(4) {
        Some(x) => {
            let g = gate(b, x, &[sk[1], sk[1].mul(dk)])?;
            let least = b.lit(&g, STRONGEST);
            Some(b.scalar(S::Max, &[&g, &least])?)
        }
        None => None,
    };
    let x = Operands {
        q: split(b, &q, h / hk)?,
        k: split(b, &k, 1)?,
        v: split(b, &v, 1)?,
        decay,
        beta: c.opt(5).map(|x| gate(b, x, &[sk[1], 1.into()])).transpose()?,
        scale,
    };

    let by_feature = x.decay.as_ref().is_some_and(|g| !g.shape()[4].is(1));
    let part = match (delta, by_feature) {
        (true, _) => 1,
        (false, true) => CHUNK_BY_FEATURE,
        (false, false) => CHUNK,
    };
    if t.div_ceil(part) > MAX_PARTS {
        return Err(c.unsupported(
            &format!("a sequence of {t} with update_rule '{rule}'"),
            "Run the sequence in parts, and pass the final state of each part as past_state of the next",
        ));
    }
    let (mut state, mut out) = (state, Vec::with_capacity(t.div_ceil(part)));
    for start in (0..t).step_by(part) {
        let y;
        (y, state) = advance(b, &x, &state, start, part.min(t - start))?;
        out.push(y);
    }
    let y = match &out[..] {
        [] => b.full(wide, &[sk[0], sk[1], (h / hk).into(), 0.into(), dv].into(), 0.0.into()),
        all => b.concat(&all.iter().collect::<Vec<_>>(), 3)?,
    };
    let y = b.reshape(&y, [sq[0], sq[1], sq[2], dv])?;
    let y = b.cast(&y, to)?;
    let state = b.reshape(&state, [sk[0], sk[1], dk, dv])?;
    Ok(vec![pack(b, &y)?, b.cast(&state, kept)?])
}

fn known(d: Dim) -> Result<usize> {
    d.known().ok_or_else(|| symbolic(d))
}

/// Computes the results of `n` tokens from `start`, and the state after them.
///
/// With the sum `g` of the log decays since the start of the part, token `i` weighs the value of token `j` by
/// `(q_i exp(g_i - g_j)) · k_j`, and the earlier state by `q_i exp(g_i)` (Yang et al., "Gated linear
/// attention transformers with hardware-efficient training", 2024). Update rules that depend on the contents
/// of the state are computed token by token.
fn advance(b: &mut Builder, x: &Operands, state: &Value, start: usize, n: usize) -> Result<(Value, Value)> {
    let part = |b: &mut Builder, v: &Value| b.narrow(v, 3, start.into(), n.into());
    let (q, k, mut v) = (part(b, &x.q)?, part(b, &x.k)?, part(b, &x.v)?);
    let kt = b.permute(&k, &[0, 1, 2, 4, 3])?;
    let g = match &x.decay {
        Some(g) => {
            let g = part(b, g)?;
            let id = b.id(&g)?;
            let id = b.g.scan(R::Sum, id, 3, false, false)?;
            Some(b.value(id))
        }
        None => None,
    };
    let mul = |b: &mut Builder, x: &Value, y: &Value| b.scalar(S::Mul, &[x, y]);
    let exp = |b: &mut Builder, x: &Value| b.scalar(S::Exp, &[x]);

    if let Some(beta) = &x.beta {
        // A single token: v becomes beta (v - k · decayed state).
        let state = match &g {
            Some(g) => {
                let g = b.permute(g, &[0, 1, 2, 4, 3])?;
                let e = exp(b, &g)?;
                mul(b, state, &e)?
            }
            None => state.clone(),
        };
        let held = matmul(b, &k, &state)?;
        let d = b.scalar(S::Sub, &[&v, &held])?;
        let beta = part(b, beta)?;
        v = mul(b, &beta, &d)?;
        let add = mul(b, &kt, &v)?;
        let state = b.scalar(S::Add, &[&state, &add])?;
        let y = matmul(b, &q, &state)?;
        let scale = b.lit(&y, x.scale);
        return Ok((mul(b, &y, &scale)?, state));
    }

    let i = b.iota(DType::I32, n.into())?;
    let (i, j) = (b.reshape(&i, [n, 1])?, b.reshape(&i, [1, n])?);
    let before = b.scalar(S::Ge, &[&i, &j])?;
    let low: Value = Host::scalar(q.dtype(), f64::NEG_INFINITY).into();
    let weights = match &g {
        None => {
            let w = matmul(b, &q, &kt)?;
            let zero = b.lit(&w, 0.0);
            b.scalar(S::Select, &[&before, &w, &zero])?
        }
        Some(g) if g.shape()[4].is(1) => {
            let w = matmul(b, &q, &kt)?;
            let gt = b.permute(g, &[0, 1, 2, 4, 3])?;
            let d = b.scalar(S::Sub, &[g, &gt])?;
            let d = b.scalar(S::Select, &[&before, &d, &low])?;
            let e = exp(b, &d)?;
            mul(b, &w, &e)?
        }
        Some(g) => {
            let spread = |b: &mut Builder, v: &Value, axis: usize| {
                let mut s = v.shape().to_vec();
                s.insert(axis, 1.into());
                b.reshape(v, s)
            };
            let (gi, gj) = (spread(b, g, 4)?, spread(b, g, 3)?);
            let d = b.scalar(S::Sub, &[&gi, &gj])?;
            let before = b.reshape(&before, [n, n, 1])?;
            let d = b.scalar(S::Select, &[&before, &d, &low])?;
            let e = exp(b, &d)?;
            let (qi, kj) = (spread(b, &q, 4)?, spread(b, &k, 3)?);
            let w = mul(b, &qi, &e)?;
            let w = mul(b, &w, &kj)?;
            b.reduce(R::Sum, &w, &[5], false)?
        }
    };
    let inner = matmul(b, &weights, &v)?;
    // The contribution of the earlier state to the results, and what remains of that state after this part.
    let (outer, state, kt) = match &g {
        None => (matmul(b, &q, state)?, state.clone(), kt),
        Some(g) => {
            let e = exp(b, g)?;
            let seen = mul(b, &q, &e)?;
            let last = b.narrow(g, 3, (n - 1).into(), 1.into())?;
            let rest = b.scalar(S::Sub, &[&last, g])?;
            let rest = exp(b, &rest)?;
            let k = mul(b, &k, &rest)?;
            let last = b.permute(&last, &[0, 1, 2, 4, 3])?;
            let left = exp(b, &last)?;
            let outer = matmul(b, &seen, state)?;
            (outer, mul(b, state, &left)?, b.permute(&k, &[0, 1, 2, 4, 3])?)
        }
    };
    let y = b.scalar(S::Add, &[&inner, &outer])?;
    let scale = b.lit(&y, x.scale);
    let y = mul(b, &y, &scale)?;
    let add = matmul(b, &kt, &v)?;
    Ok((y, b.scalar(S::Add, &[&state, &add])?))
}
