//! Operators that gather or scatter by index, and those built from comparisons with an index.

use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::host::{Host, Num};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::ScatterKind;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

pub(super) const ROWS: &[Row] = &[
    row("EyeLike", 9, &["dtype", "k"], eye_like),
    row("GatherElements", 11, &["axis"], gather_elements),
    row("GatherND", 11, &["batch_dims"], gather_nd),
    row("OneHot", 9, &["axis"], one_hot),
    row("ReverseSequence", 10, &["batch_axis", "time_axis"], reverse_sequence),
    row("Scatter", 9, &["axis"], scatter_elements),
    row("ScatterElements", 11, &["axis", "reduction"], scatter_elements),
    row("ScatterND", 11, &["reduction"], scatter_nd),
    row("TopK", 1, &["axis", "k", "largest", "sorted"], top_k),
];

/// A size as an i64 scalar.
pub(super) fn size(d: Dim) -> Value {
    Host { dtype: DType::I64, dims: vec![], vals: vec![Num::size(d)] }.into()
}

/// The numbers 0 to `n - 1` along `axis` of a tensor of rank `rank`, whose other axes have size 1.
pub(super) fn along(b: &mut Builder, n: Dim, axis: usize, rank: usize) -> Result<Value> {
    let i = b.iota(DType::I64, n)?;
    let mut s = vec![Dim::from(1); rank];
    if let Some(d) = s.get_mut(axis) {
        *d = n;
    }
    b.reshape(&i, s)
}

/// Ones at elements whose column is the row plus `k`.
fn eye_like(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    if x.rank() != 2 {
        return Err(c.invalid(format!("expected a matrix, found {}", x.ty)));
    }
    let to = c.dtype("dtype")?.unwrap_or(x.dtype());
    // The limits keep sums with `k` within 64 bits. No matrix is that large.
    let k = c.int("k", 0)?.clamp(-(1 << 60), 1 << 60);
    let (rows, columns) = (along(b, x.shape()[0], 0, 2)?, along(b, x.shape()[1], 1, 2)?);
    let k = b.lit(&rows, k);
    let rows = b.scalar(S::Add, &[&rows, &k])?;
    let eye = b.scalar(S::Eq, &[&rows, &columns])?;
    one(b.cast(&eye, to)?)
}

fn gather_elements(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let axis = c.axis(c.int("axis", 0)?, x.rank())?;
    let ids = b.ids(&[x, c.arg(1)?])?;
    let n = b.g.gather_elements(ids[0], ids[1], axis)?;
    one(b.value(n))
}

/// The last axis of `index` holds tuples of indices into axes of sizes `dims`. Returns the row-major offset
/// of each tuple. A tuple with a component out of range gives an offset past the end, so that the device
/// reports it.
fn places(b: &mut Builder, index: &Value, dims: &[Dim]) -> Result<Value> {
    let last = index.rank() - 1;
    let index = b.cast(index, DType::I64)?;
    let to = Shape::from(&index.shape()[..last]);
    let (mut place, mut inside): (Option<Value>, Option<Value>) = (None, None);
    for (j, &n) in dims.iter().enumerate() {
        let part = b.narrow(&index, last, Dim::from(j), Dim::from(1))?;
        let part = b.reshape(&part, &to)?;
        let (zero, n) = (b.lit(&part, 0), size(n));
        let below = b.scalar(S::Lt, &[&part, &zero])?;
        let up = b.scalar(S::Add, &[&part, &n])?;
        let part = b.scalar(S::Select, &[&below, &up, &part])?;
        for ok in [b.scalar(S::Ge, &[&part, &zero])?, b.scalar(S::Lt, &[&part, &n])?] {
            inside = Some(match inside {
                Some(i) => b.scalar(S::And, &[&i, &ok])?,
                None => ok,
            });
        }
        place = Some(match place {
            Some(p) => {
                let p = b.scalar(S::Mul, &[&p, &n])?;
                b.scalar(S::Add, &[&p, &part])?
            }
            None => part,
        });
    }
    let zero = b.full(DType::I64, &to, Scalar::I(0));
    let (Some(place), Some(inside)) = (place, inside) else { return Ok(zero) };
    let past = b.lit(&place, i64::MAX >> 1);
    b.scalar(S::Select, &[&inside, &place, &past])
}

/// The number of axes of `data`, after the first `batch`, that a tuple of `index` covers.
fn tuple(c: &Call<'_>, data: &Value, index: &Value, batch: usize) -> Result<usize> {
    let k = index.shape().last().and_then(|d| d.known());
    match k {
        Some(k) if k >= 1 && k <= data.rank().saturating_sub(batch) => Ok(k),
        Some(_) => Err(c.invalid(format!(
            "the last axis of {} has 0 elements, or more than {} has axes after {batch} batch axes",
            index.ty, data.ty
        ))),
        None => Err(c.unsupported("tuples of unknown length", "Give concrete shapes")),
    }
}

fn gather_nd(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, index) = (c.arg(0)?, c.arg(1)?);
    let batch = usize::try_from(c.int("batch_dims", 0)?).ok();
    let batch = batch
        .filter(|n| *n < x.rank().min(index.rank()) && x.shape()[..*n] == index.shape()[..*n])
        .ok_or_else(|| {
        c.invalid(format!(
            "batch_dims is out of range, or the batch axes of {} and {} differ",
            x.ty, index.ty
        ))
    })?;
    let k = tuple(c, x, index, batch)?;
    let s = x.shape();
    let numel = |d: &[Dim]| Shape::from(d).numel();
    let cover = &s[batch..batch + k];
    let mut at = if k == 1 && batch == 0 {
        let to = Shape::from(&index.shape()[..index.rank() - 1]);
        b.reshape(index, to)?
    } else {
        places(b, index, cover)?
    };
    if batch > 0 {
        let first = b.iota(DType::I64, numel(&s[..batch]))?;
        let each = size(numel(cover));
        let first = b.scalar(S::Mul, &[&first, &each])?;
        let lead: Shape = (0..at.rank()).map(|a| if a < batch { s[a] } else { Dim::from(1) }).collect();
        let first = b.reshape(&first, lead)?;
        at = b.scalar(S::Add, &[&at, &first])?;
    }
    let flat: Shape = [numel(&s[..batch + k])].iter().chain(&s[batch + k..]).copied().collect();
    let flat = b.reshape(x, flat)?;
    one(b.gather(&flat, &at, 0)?)
}

/// `values[1]` where the index along the new axis equals the operand, `values[0]` elsewhere.
fn one_hot(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, values) = (c.arg(0)?, c.arg(2)?);
    let depth = b.known_scalar(c.arg(1)?, "the depth of OneHot")?.as_i64();
    let n =
        usize::try_from(depth).map_err(|_| c.invalid(format!("depth is {depth}, expected at least 0")))?;
    if values.rank() != 1 || !values.shape()[0].is(2) {
        return Err(c.invalid(format!("values are [off, on], not {}", values.ty)));
    }
    let rank = x.rank() + 1;
    let axis = c.axis(c.int("axis", -1)?, rank)?;
    let signed = !matches!(x.dtype().class(), halcyon_ir::dtype::Class::Uint);
    let mut i = b.cast(x, DType::I64)?;
    // Negative indices count from the end. Indices that are negative even then, and indices that do not fit
    // i64, match nothing.
    if signed {
        let (zero, depth) = (b.lit(&i, 0), b.lit(&i, depth));
        let below = b.scalar(S::Lt, &[&i, &zero])?;
        let up = b.scalar(S::Add, &[&i, &depth])?;
        i = b.scalar(S::Select, &[&below, &up, &i])?;
    }
    let mut s: Vec<Dim> = i.shape().to_vec();
    s.insert(axis, Dim::from(1));
    let i = b.reshape(&i, s)?;
    let class = along(b, Dim::from(n), axis, rank)?;
    let hot = b.scalar(S::Eq, &[&i, &class])?;
    let mut value = |k: usize| -> Result<Value> {
        let v = b.narrow(values, 0, Dim::from(k), Dim::from(1))?;
        b.reshape(&v, Shape::scalar())
    };
    let (off, on) = (value(0)?, value(1)?);
    one(b.scalar(S::Select, &[&hot, &on, &off])?)
}

/// Reverses the first `sequence_lens` time steps of each sequence and keeps the others.
fn reverse_sequence(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, lens) = (c.arg(0)?, c.arg(1)?);
    let (batch, time) = match (c.int("batch_axis", 1)?, c.int("time_axis", 0)?) {
        (0, 1) => (0, 1),
        (1, 0) => (1, 0),
        (a, t) => {
            return Err(c.invalid(format!("batch axis is {a}, time axis {t}; expected 0 and 1, or 1 and 0")));
        }
    };
    if x.rank() < 2 || lens.rank() != 1 || lens.shape()[0] != x.shape()[batch] {
        return Err(
            c.invalid(format!("sequence_lens is {}, expected one for each sequence of {}", lens.ty, x.ty))
        );
    }
    let (n, steps) = (x.shape()[batch], x.shape()[time]);
    let mut s = [Dim::from(1); 2];
    s[batch] = n;
    let lens = b.cast(lens, DType::I64)?;
    let lens = b.reshape(&lens, s)?;
    let t = along(b, steps, time, 2)?;
    let one_less = b.lit(&t, 1);
    let last = b.scalar(S::Sub, &[&lens, &one_less])?;
    let back = b.scalar(S::Sub, &[&last, &t])?;
    let inside = b.scalar(S::Lt, &[&t, &lens])?;
    let from = b.scalar(S::Select, &[&inside, &back, &t])?;
    // Gathers rows of the merged batch and time axes. A length past the end gives a row past the end, which
    // the device reports.
    let which = along(b, n, batch, 2)?;
    let (outer, inner, size_in) = if batch == 0 { (&which, &from, steps) } else { (&from, &which, n) };
    let at = b.scalar(S::Mul, &[outer, &size(size_in)])?;
    let at = b.scalar(S::Add, &[&at, inner])?;
    let (limit, past) = (size(steps), b.lit(&at, i64::MAX >> 1));
    let ok = b.scalar(S::Lt, &[&from, &limit])?;
    let at = b.scalar(S::Select, &[&ok, &at, &past])?;
    let flat: Shape = [n.mul(steps)].iter().chain(&x.shape()[2..]).copied().collect();
    let flat = b.reshape(x, flat)?;
    one(b.gather(&flat, &at, 0)?)
}

/// How updates of the same element are combined.
fn reduction(c: &Call<'_>) -> Result<ScatterKind> {
    Ok(match c.string("reduction", "none")? {
        "none" => ScatterKind::Set,
        "add" => ScatterKind::Add,
        "mul" => ScatterKind::Mul,
        "max" => ScatterKind::Max,
        "min" => ScatterKind::Min,
        other => return Err(c.invalid(format!("reduction '{other}' is not known"))),
    })
}

/// Scatters with `f(builder, base, updates, kind)`. Bools are computed as numbers: a sum is "any", a product
/// "all".
fn scatter(
    b: &mut Builder,
    c: &Call<'_>,
    base: &Value,
    updates: &Value,
    f: impl FnOnce(&mut Builder, &Value, &Value, ScatterKind) -> Result<Value>,
) -> Result<Vec<Value>> {
    let kind = reduction(c)?;
    if base.dtype() != DType::Bool || kind == ScatterKind::Set {
        return one(f(b, base, updates, kind)?);
    }
    let kind = match kind {
        ScatterKind::Add => ScatterKind::Max,
        ScatterKind::Mul => ScatterKind::Min,
        k => k,
    };
    let (base, updates) = (b.cast(base, DType::U8)?, b.cast(updates, DType::U8)?);
    let y = f(b, &base, &updates, kind)?;
    one(b.cast(&y, DType::Bool)?)
}

fn scatter_elements(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, index, updates) = (c.arg(0)?, c.arg(1)?, c.arg(2)?);
    let axis = c.axis(c.int("axis", 0)?, x.rank())?;
    scatter(b, c, x, updates, |b, x, u, kind| {
        let ids = b.ids(&[x, index, u])?;
        let n = b.g.scatter_elements(ids[0], ids[1], ids[2], axis, kind)?;
        Ok(b.value(n))
    })
}

fn scatter_nd(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, index, updates) = (c.arg(0)?, c.arg(1)?, c.arg(2)?);
    let k = tuple(c, x, index, 0)?;
    let s = x.shape();
    let lead = &index.shape()[..index.rank() - 1];
    let want: Shape = lead.iter().chain(&s[k..]).copied().collect();
    if *updates.shape() != want {
        return Err(c.invalid(format!("updates {} must be {want}", updates.ty)));
    }
    let at = if k == 1 { b.reshape(index, Shape::from(lead))? } else { places(b, index, &s[..k])? };
    let flat: Shape = [Shape::from(&s[..k]).numel()].iter().chain(&s[k..]).copied().collect();
    scatter(b, c, x, updates, |b, x, u, kind| {
        let flat = b.reshape(x, flat)?;
        let ids = b.ids(&[&flat, &at, u])?;
        let n = b.g.scatter_rows(ids[0], ids[1], ids[2], 0, kind)?;
        let y = b.value(n);
        b.reshape(&y, s)
    })
}

/// Returns values and indices. They are always sorted, because `sorted = 0` permits any order. Before version
/// 10, the count is an attribute.
fn top_k(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let axis = c.axis(c.int("axis", -1)?, x.rank())?;
    let k = match c.opset {
        10.. => b.known_scalar(c.arg(1)?, "K of TopK")?.as_i64(),
        _ => c.opt_int("k")?.ok_or_else(|| c.invalid("attribute 'k' is missing"))?,
    };
    let k = usize::try_from(k).map_err(|_| c.invalid(format!("K is {k}, expected at least 0")))?;
    if x.shape()[axis].known().is_some_and(|n| k > n) {
        return Err(c.invalid(format!("K is {k}, but axis {axis} of {} is shorter", x.ty)));
    }
    let id = b.id(x)?;
    let order = b.g.argsort(id, axis, c.flag("largest", true)?)?;
    let index = b.g.narrow(order, axis, 0, k)?;
    let y = b.g.gather_elements(id, index, axis)?;
    Ok(vec![b.value(y), b.value(index)])
}
