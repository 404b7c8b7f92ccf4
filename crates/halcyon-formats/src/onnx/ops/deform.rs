//! Operators related to convolution: DeformConv, ConvTranspose and Col2Im.

use super::calc::{along, bin, index_type, indices, known, nth, trailing, with};
use super::pool::window;
use super::sample::{Rows, linear_or_zero, sum};
use super::{Row, one, row};
use crate::onnx::build::{Builder, Range, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::{Conv, ReduceKind};
use halcyon_ir::{Dim, Result, Scalar, Shape};

pub(super) const ROWS: &[Row] = &[
    row("Col2Im", 18, &["dilations", "pads", "strides"], col2im),
    row(
        "ConvTranspose",
        1,
        &[
            "auto_pad",
            "dilations",
            "group",
            "kernel_shape",
            "output_padding",
            "output_shape",
            "pads",
            "strides",
        ],
        conv_transpose,
    ),
    row(
        "DeformConv",
        19,
        &["dilations", "group", "kernel_shape", "offset_group", "pads", "strides"],
        deform_conv,
    ),
];

/// Limit on the entries of an index table that is computed during import.
const MAX_TABLE: usize = 1 << 25;

/// Kernel sizes of a weight. The attribute must agree if present.
fn kernel(c: &Call<'_>, x: &Value, w: &Value) -> Result<Vec<usize>> {
    if x.rank() < 3 || w.rank() != x.rank() {
        return Err(
            c.invalid(format!("input {} and weight {} must have the same rank, at least 3", x.ty, w.ty))
        );
    }
    let k = known(&w.shape()[2..])?;
    if k.contains(&0) || (c.ints("kernel_shape")?.is_some() && c.sizes("kernel_shape", k.len(), 0)? != k) {
        return Err(c.invalid(format!("the kernel of weight {} is empty or differs from kernel_shape", w.ty)));
    }
    Ok(k)
}

/// Group count from an attribute. It must divide all the numbers in `channels`.
fn groups(c: &Call<'_>, name: &str, channels: &[usize]) -> Result<usize> {
    let g = usize::try_from(c.int(name, 1)?).ok().filter(|g| *g > 0 && channels.iter().all(|n| n % g == 0));
    g.ok_or_else(|| c.invalid(format!("attribute '{name}' does not divide the channels {channels:?}")))
}

fn add_bias(b: &mut Builder, c: &Call<'_>, y: Value, bias: Option<&Value>) -> Result<Value> {
    let Some(v) = bias else { return Ok(y) };
    if v.rank() != 1 || v.shape()[0] != y.shape()[1] {
        return Err(c.invalid(format!("the bias is {}, expected one element per channel of {}", v.ty, y.ty)));
    }
    let v = b.cast(v, y.dtype())?;
    let v = along(b, &v, 1, y.rank())?;
    bin(b, S::Add, &y, &v)
}

/// The transposed convolution. It is a convolution with the flipped weight over the input, where `stride - 1`
/// zeros are inserted between the elements of the input.
fn conv_transpose(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, w) = (c.arg(0)?, c.arg(1)?);
    let k = kernel(c, x, w)?;
    let n = k.len();
    let (stride, dilation) = (c.sizes("strides", n, 1)?, c.sizes("dilations", n, 1)?);
    if stride.iter().chain(&dilation).any(|&v| v == 0) {
        return Err(c.invalid("stride and dilation must be at least 1"));
    }
    let channels = known(&w.shape()[..2])?;
    let g = groups(c, "group", &channels[..1])?;
    let (per, out) = (channels[0] / g, channels[1]);
    let extra = c.sizes("output_padding", n, 0)?;
    let pads = c.sizes("pads", 2 * n, 0)?;
    let auto = c.string("auto_pad", "NOTSET")?;
    let same = match auto {
        "SAME_UPPER" | "SAME_LOWER" => true,
        "NOTSET" | "" | "VALID" => false,
        other => return Err(c.invalid(format!("auto_pad '{other}' is not known"))),
    };
    // In some models, `output_shape` also contains the batch and channel sizes.
    let asked = match c.ints("output_shape")? {
        Some(v) => {
            let whole = v.len() == n + 2;
            let v = if whole { &v[2..] } else { v };
            let fits = v.len() == n && v.iter().all(|s| (1..=i32::MAX as i64).contains(s));
            Some(if fits {
                v
            } else {
                return Err(c.invalid(format!("output_shape is {v:?}, expected {n} positive sizes")));
            })
        }
        None => None,
    };
    // Whether the odd element of the padding is at the start. From opset version 11 on, it is at the end for
    // SAME_UPPER and at the start otherwise. Before, the rule was the opposite.
    let at_start = (auto == "SAME_UPPER") == (c.opset < 11);
    let mut attrs = Conv::new(n);
    attrs.groups = g;
    attrs.dilation = dilation.iter().copied().collect();
    attrs.input_dilation = stride.iter().copied().collect();
    for i in 0..n {
        let too_large = || c.invalid("the sizes of the result are too large");
        let reach = (k[i] as i64 - 1)
            .checked_mul(dilation[i] as i64)
            .and_then(|v| v.checked_add(1))
            .filter(|v| *v <= i32::MAX.into())
            .ok_or_else(too_large)?;
        let (mut lo, mut hi) = match auto {
            "VALID" => (0, 0),
            _ => (pads[i] as i64, pads[n + i] as i64),
        };
        if asked.is_some() || same {
            let d = x.shape()[2 + i];
            let d = d.known().ok_or_else(|| {
                c.unsupported(
                    &format!("padding that depends on the symbolic size {d}"),
                    "Give concrete input shapes",
                )
            })? as i64;
            let natural = d
                .checked_sub(1)
                .and_then(|v| v.checked_mul(stride[i] as i64))
                .and_then(|v| v.checked_add(extra[i] as i64 + reach))
                .ok_or_else(too_large)?;
            let want = match asked {
                Some(v) => v[i],
                None => d.checked_mul(stride[i] as i64).ok_or_else(too_large)?,
            };
            let total = natural - want;
            let (small, large) = (total / 2, total - total / 2);
            // If `want` is larger than the natural size, elements are added at the end.
            (lo, hi) = if total < 0 {
                (0, total)
            } else if at_start {
                (large, small)
            } else {
                (small, large)
            };
        }
        attrs.pad[i] = (reach - 1 - lo, reach - 1 - hi + extra[i] as i64);
    }
    // [c, m/g, k…] to [m, c/g, k…], with every kernel flipped.
    let spatial = || k.iter().map(|&n| Dim::from(n));
    let dims = |v: &[usize]| v.iter().map(|&n| Dim::from(n)).collect::<Vec<_>>();
    let v = b.reshape(w, dims(&[g, per, out]).into_iter().chain(spatial()).collect::<Shape>())?;
    let perm: Vec<usize> = [0, 2, 1].into_iter().chain(3..3 + n).collect();
    let v = b.permute(&v, &perm)?;
    let v = b.reshape(&v, dims(&[g * out, per]).into_iter().chain(spatial()).collect::<Shape>())?;
    let turn: Vec<Range> = (0..n + 2)
        .map(|i| match i {
            0 | 1 => Range { start: Dim::from(0), step: 1, len: v.shape()[i] },
            _ => Range { start: Dim::from(k[i - 2] - 1), step: -1, len: Dim::from(k[i - 2]) },
        })
        .collect();
    let v = b.slice(&v, &turn)?;
    let ids = b.ids(&[x, &v])?;
    let y = b.g.conv(ids[0], ids[1], attrs)?;
    let y = b.value(y);
    one(add_bias(b, c, y, c.opt(2))?)
}

/// The product of the weight and a matrix whose columns are linear samples of the input at offset positions.
/// See Dai et al., "Deformable Convolutional Networks" (2017); the mask is from Zhu et al. (2018).
fn deform_conv(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, w, offset) = (c.arg(0)?, c.arg(1)?, c.arg(2)?);
    let k = kernel(c, x, w)?;
    let n = k.len();
    let win = window(c, &x.shape()[2..], &k)?;
    let sizes = known(&x.shape()[2..])?;
    let channels = known(&[x.shape()[1], w.shape()[0], w.shape()[1]])?;
    let (channels, outputs, per) = (channels[0], channels[1], channels[2]);
    let g = groups(c, "group", &[channels, outputs])?;
    let og = groups(c, "offset_group", &[channels])?;
    if per.checked_mul(g) != Some(channels) {
        return Err(c.invalid(format!("weight {} with {g} groups does not match input {}", w.ty, x.ty)));
    }
    let taps = k.iter().try_fold(1usize, |n, &k| n.checked_mul(k)).filter(|n| *n <= MAX_TABLE);
    let taps = taps.ok_or_else(|| c.invalid("the kernel is too large"))?;
    let mut out = vec![];
    for i in 0..n {
        let have = sizes[i] as i64 + win.pad[i].0 + win.pad[i].1;
        let reach = (k[i] as i64 - 1).checked_mul(win.dilation[i] as i64).map(|v| v + 1);
        let room = reach.and_then(|r| have.checked_sub(r)).filter(|r| *r >= 0 && sizes[i] > 0);
        let room = room.ok_or_else(|| {
            c.invalid(format!("a kernel of size {} is larger than the padded input, {have}", k[i]))
        })?;
        out.push(Dim::from(room as usize / win.stride[i] + 1));
    }
    let batch = x.shape()[0];
    let expected = |per: usize| -> Shape {
        [batch, Dim::from(og).mul(Dim::from(per))].into_iter().chain(out.iter().copied()).collect()
    };
    if *offset.shape() != expected(taps.saturating_mul(n)) {
        return Err(c.invalid(format!("the offset is {}, expected shape {}", offset.ty, expected(taps * n))));
    }
    let to = x.dtype();
    let compute = to.compute();
    let d = |v: usize| Dim::from(v);
    // [n, og, taps, axes, o…]
    let split: Shape = [batch, d(og), d(taps), d(n)].into_iter().chain(out.iter().copied()).collect();
    let offset = b.cast(offset, compute)?;
    let offset = b.reshape(&offset, split)?;
    let rank = 3 + n;
    let mut lines = vec![];
    let (mut inner, mut outer) = (taps, 1);
    for i in 0..n {
        inner /= k[i];
        let shift = nth(b, &offset, 3, i)?;
        // The position of each tap of an undeformed kernel, for each output position.
        let o = b.iota(compute, out[i])?;
        let o = with(b, S::Mul, &o, win.stride[i] as f64)?;
        let o = with(b, S::Sub, &o, win.pad[i].0 as f64)?;
        let o = along(b, &o, 3 + i, rank)?;
        let t = b.iota(compute, d(k[i]))?;
        let t = with(b, S::Mul, &t, win.dilation[i] as f64)?;
        let t = along(b, &t, 1, 3)?;
        let t = b.expand(&t, &Shape::from([outer, k[i], inner]))?;
        let t = b.reshape(&t, Shape::from([taps]))?;
        let t = along(b, &t, 2, rank)?;
        outer *= k[i];
        let at = bin(b, S::Add, &o, &t)?;
        let at = bin(b, S::Add, &at, &shift)?;
        lines.push(linear_or_zero(b, &at, sizes[i])?);
    }
    // Each offset group samples its own channels.
    let each: Shape =
        [batch.mul(d(og)), d(channels / og)].into_iter().chain(x.shape()[2..].iter().copied()).collect();
    let v = b.cast(x, compute)?;
    let v = b.reshape(&v, each)?;
    let mut rows = Rows::new(b, &v, &sizes)?;
    let first = b.reshape(&rows.first, [batch, d(og)])?;
    rows.first = trailing(b, &first, rank - 2)?;
    let terms = rows.terms(b, c, &lines)?;
    let mut cols = sum(b, c, terms)?;
    if let Some(m) = c.opt(4) {
        if *m.shape() != expected(taps) {
            return Err(c.invalid(format!("the mask is {}, expected shape {}", m.ty, expected(taps))));
        }
        let m = b.cast(m, compute)?;
        let s: Shape = [batch, d(og), d(taps)].into_iter().chain(out.iter().copied()).chain([d(1)]).collect();
        let m = b.reshape(&m, s)?;
        cols = bin(b, S::Mul, &cols, &m)?;
    }
    // From [n, og, taps, o…, c/og] to [n, g, c/g * taps, places].
    let places = Shape::from(&out[..]).numel();
    let cols = b.reshape(&cols, [batch, d(og), d(taps), places, d(channels / og)])?;
    let cols = b.permute(&cols, &[0, 1, 4, 2, 3])?;
    let cols = b.reshape(&cols, [batch, d(g), d(per).mul(d(taps)), places])?;
    let weight = b.cast(w, compute)?;
    let weight = b.reshape(&weight, [d(1), d(g), d(outputs / g), d(per).mul(d(taps))])?;
    let ids = b.ids(&[&weight, &cols])?;
    let y = b.g.matmul(ids[0], ids[1])?;
    let y = b.value(y);
    let shape: Shape = [batch, d(outputs)].into_iter().chain(out.iter().copied()).collect();
    let y = b.reshape(&y, shape)?;
    let y = add_bias(b, c, y, c.opt(3))?;
    one(b.cast(&y, to)?)
}

/// Adds overlapping blocks to an image, one axis at a time. Each position of the image is the sum of the
/// block elements that fall on it.
fn col2im(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let image = b.known_ints(c.arg(1)?, "the image shape of Col2Im")?;
    let block = b.known_ints(c.arg(2)?, "the block shape of Col2Im")?;
    let n = image.len();
    let sizes = |v: &[i64]| -> Result<Vec<usize>> {
        let one = |s: &i64| usize::try_from(*s).ok().filter(|s| (1..=MAX_TABLE).contains(s));
        v.iter()
            .map(one)
            .collect::<Option<_>>()
            .ok_or_else(|| c.invalid(format!("sizes {v:?} are not all 1 to {MAX_TABLE}")))
    };
    let (image, block) = (sizes(&image)?, sizes(&block)?);
    if n == 0 || block.len() != n || x.rank() != 3 {
        return Err(c.invalid(format!(
            "input {}, image {image:?}, block {block:?}: expected an input of rank 3, and equal ranks of image \
             and block",
            x.ty
        )));
    }
    let dims: Vec<Dim> = image.iter().map(|&n| Dim::from(n)).collect();
    let w = window(c, &dims, &block)?;
    let mut counts = vec![];
    for i in 0..n {
        let have = image[i] + (w.pad[i].0 + w.pad[i].1) as usize;
        let reach = (block[i] - 1).checked_mul(w.dilation[i]).and_then(|v| v.checked_add(1));
        let room = reach.and_then(|r| have.checked_sub(r));
        let room = room.ok_or_else(|| {
            c.invalid(format!("a block of size {} is larger than the padded image, {have}", block[i]))
        })?;
        counts.push(room / w.stride[i] + 1);
    }
    let total = |v: &[usize]| v.iter().try_fold(1usize, |n, &k| n.checked_mul(k));
    let taps = total(&block).ok_or_else(|| c.invalid("the block is too large"))?;
    let channels = known(&x.shape()[1..2])?[0];
    if !total(&counts).is_some_and(|l| x.shape()[2].is(l)) || channels % taps != 0 {
        return Err(
            c.invalid(format!("input {} does not consist of {counts:?} blocks of shape {block:?}", x.ty))
        );
    }
    let lead = x.shape()[0].mul(Dim::from(channels / taps));
    let d = |v: usize| Dim::from(v);
    // The shape is [n * c, k1, k2…, l1, l2…], where k are the sizes of a block and l the numbers of blocks.
    // Each iteration merges one k and one l to an axis of the image, which becomes the last axis.
    let split: Shape = [lead].into_iter().chain(block.iter().chain(&counts).map(|&n| d(n))).collect();
    let mut y = b.reshape(x, split)?;
    for i in 0..n {
        let left = n - i;
        // Moves the first remaining k and l to the end.
        let (ka, la) = (1, 1 + left);
        let perm: Vec<usize> = (0..y.rank()).filter(|a| *a != ka && *a != la).chain([ka, la]).collect();
        y = b.permute(&y, &perm)?;
        let last = y.rank() - 2;
        let flat: Shape = y.shape()[..last].iter().copied().chain([d(block[i]).mul(d(counts[i]))]).collect();
        y = b.reshape(&y, flat)?;
        y = merge(
            b,
            c,
            &y,
            image[i],
            block[i],
            counts[i],
            (w.stride[i], w.dilation[i], w.pad[i].0 as usize),
        )?;
    }
    let shape: Shape = [x.shape()[0], d(channels / taps)].into_iter().chain(dims).collect();
    one(b.reshape(&y, shape)?)
}

/// Turns the last axis, of `k` block elements times `l` blocks, into an axis of `n` positions of the image.
/// `how` has the stride, the dilation and the padding.
fn merge(
    b: &mut Builder,
    c: &Call<'_>,
    x: &Value,
    n: usize,
    k: usize,
    l: usize,
    how: (usize, usize, usize),
) -> Result<Value> {
    let (stride, dilation, pad) = how;
    let mut places: Vec<Vec<i32>> = vec![vec![]; n];
    let pairs = k.checked_mul(l).filter(|p| *p <= MAX_TABLE);
    let pairs = pairs.ok_or_else(|| c.unsupported("blocks of this size", "Use smaller blocks"))?;
    for p in 0..pairs {
        let at = (p % l * stride + p / l * dilation).checked_sub(pad);
        if let Some(v) = at.and_then(|at| places.get_mut(at)) {
            v.push(p as i32);
        }
    }
    let most = places.iter().map(Vec::len).max().unwrap_or(0).max(1);
    if n.checked_mul(most).is_none_or(|n| n > MAX_TABLE) {
        return Err(c.unsupported("blocks that overlap this often", "Use larger strides"));
    }
    // Unused entries point to a zero that is appended after the last pair.
    let mut table = vec![pairs as i32; n * most];
    for (i, v) in places.iter().enumerate() {
        table[i * most..i * most + v.len()].copy_from_slice(v);
    }
    let (rank, axis) = (x.rank(), x.rank() - 1);
    let (lo, mut hi) = (vec![0; rank], vec![0; rank]);
    hi[axis] = 1;
    let id = b.id(x)?;
    let padded = b.g.pad(id, &lo, &hi, Scalar::I(0))?;
    let padded = b.value(padded);
    let at = indices(&[n, most], &table)?;
    let at = b.cast(&at, index_type(Dim::from(pairs)))?;
    let parts = b.gather(&padded, &at, axis)?;
    b.reduce(ReduceKind::Sum, &parts, &[axis + 1], false)
}
