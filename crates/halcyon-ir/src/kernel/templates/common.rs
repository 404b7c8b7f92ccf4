//! Helpers shared by the templates: index types, stride parameters, launches, matrix units.

use crate::dtype::{DType, Scalar};
use crate::error::Error;
use crate::kernel::ir::{Kernel, MatrixOp, Ty};
use crate::kernel::lower::Lowered;
use crate::kernel::{Builder, E, Launch, verify_for};
use crate::target::{Caps, Declined, Operand};

pub(super) fn declined(e: Error) -> Declined {
    Declined::because(e.to_string())
}

/// Fails unless the number of inputs is in `takes` and there is one output.
pub(super) fn arity(
    op: &str,
    inputs: &[Operand],
    outputs: &[Operand],
    takes: std::ops::RangeInclusive<usize>,
) -> Result<(), Declined> {
    if takes.contains(&inputs.len()) && outputs.len() == 1 {
        return Ok(());
    }
    Err(Declined::because(format!(
        "{op}: {} operands and {} results are not supported",
        inputs.len(),
        outputs.len()
    )))
}

/// Fails unless the result has the shape and type of `x`. The body of a composite decides what the result is,
/// and these kernels write one element for each element of `x`.
pub(super) fn like(op: &str, x: &Operand, outputs: &[Operand]) -> Result<(), Declined> {
    match outputs {
        [y] if y.dtype == x.dtype && y.view.shape == x.view.shape && y.view.has_dense_strides() => Ok(()),
        _ => Err(Declined::because(format!("{op}: the result has another shape or type than the operand"))),
    }
}

/// Requests dense copies of inputs whose views have masks, because these kernels do not apply masks.
pub(super) fn unmasked(inputs: &[Operand]) -> Result<(), Declined> {
    let masked: Vec<usize> = (0..inputs.len()).filter(|&i| inputs[i].view.mask.is_some()).collect();
    if masked.is_empty() { Ok(()) } else { Err(Declined::needs_dense(masked)) }
}

/// Requests dense copies of the inputs in `which` that are not row-major. Any offset is accepted.
pub(super) fn row_major(inputs: &[Operand], which: impl IntoIterator<Item = usize>) -> Result<(), Declined> {
    let bad: Vec<usize> = which.into_iter().filter(|&i| !inputs[i].view.has_dense_strides()).collect();
    if bad.is_empty() { Ok(()) } else { Err(Declined::needs_dense(bad)) }
}

/// The index type that can address every element of the operands: i32, with room for guarded reads of tiles
/// that extend past the end, or i64.
pub(super) fn index_type(inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Ty, Declined> {
    let far = inputs.iter().chain(outputs).any(|o| {
        let (lo, hi) = o.view.range().unwrap_or((0, 0));
        o.view.numel() >= 1 << 30 || hi >= 1 << 30 || hi - lo >= 1 << 30
    });
    match (far, caps.i64) {
        (false, _) => Ok(Ty::I32),
        (true, true) => Ok(Ty::I64),
        (true, false) => Err(Declined::because(
            "an operand of more than 2^30 elements on a device without 64-bit integers",
        )),
    }
}

/// Values of a kernel's parameters, by name.
#[derive(Debug, Default)]
pub(super) struct Args(Vec<(String, Scalar)>);

impl Args {
    /// Starts with the offsets of the buffers, inputs before outputs.
    pub(super) fn of(inputs: &[Operand], outputs: &[Operand]) -> Args {
        let offsets = inputs
            .iter()
            .chain(outputs)
            .enumerate()
            .map(|(i, o)| (format!("o{i}"), Scalar::I(o.view.offset as i64)));
        Args(offsets.collect())
    }

    pub(super) fn int(&mut self, name: impl Into<String>, v: impl TryInto<i64>) -> &mut Args {
        // Sizes and strides fit i64 by construction. If one does not, `i64::MAX` makes `Launch::bind` fail.
        self.0.push((name.into(), Scalar::I(v.try_into().unwrap_or(i64::MAX))));
        self
    }

    /// Value `i` is named `name` followed by `i`.
    pub(super) fn ints<T: TryInto<i64>>(&mut self, name: &str, v: impl IntoIterator<Item = T>) -> &mut Args {
        for (i, v) in v.into_iter().enumerate() {
            self.int(format!("{name}{i}"), v);
        }
        self
    }

    pub(super) fn float(&mut self, name: &str, v: f64) -> &mut Args {
        self.0.push((name.into(), Scalar::F(v)));
        self
    }
}

/// Declares `name0`, `name1`, … as parameters of the index type.
pub(super) fn sizes<'a>(b: &'a Builder, name: &str, n: usize) -> Vec<E<'a>> {
    (0..n).map(|i| b.size(&format!("{name}{i}"))).collect()
}

/// Finishes a kernel, checks it against the device and binds its launch with at least `groups` workgroups.
/// Its buffers are the op's inputs followed by its output.
pub(super) fn single(b: Builder, args: &Args, groups: usize, caps: &Caps) -> Result<Lowered, Declined> {
    let k = b.finish().map_err(declined)?;
    verify_for(&k, caps).map_err(declined)?;
    let buffers = (0..k.buffers.len()).collect();
    let launch = bind(&k, args, groups, caps)?;
    Ok(Lowered { steps: vec![(k, launch, buffers)], temps: vec![] })
}

fn bind(k: &Kernel, args: &Args, groups: usize, caps: &Caps) -> Result<Launch, Declined> {
    let max = caps.max_groups.clamp(1, 65_535) as u64;
    if groups as u64 > max * max {
        return Err(Declined::because(format!(
            "{}: {groups} workgroups are needed, but the device allows {max} by {max}",
            k.name
        )));
    }
    let values: Vec<(&str, Scalar)> = args.0.iter().map(|(n, v)| (n.as_str(), *v)).collect();
    Launch::bind(k, Launch::fold(groups as u64, caps.max_groups), &values).map_err(declined)
}

/// Workgroup size of a kernel without workgroup memory: `want`, limited to the device's maximum.
pub(super) fn items(want: u32, caps: &Caps) -> u32 {
    want.min(caps.max_workgroup).max(1)
}

/// Splits a linear index into coordinates. The last axis of `dims` varies fastest.
pub(super) fn unravel<'a>(b: &'a Builder, index: E<'a>, dims: &[E<'a>]) -> Vec<E<'a>> {
    let mut rest = index;
    let mut out = vec![];
    for (i, d) in dims.iter().enumerate().rev() {
        if i == 0 {
            out.push(rest);
        } else {
            out.push(b.let_(rest.imod(*d)));
            rest = b.let_(rest.idiv(*d));
        }
    }
    out.reverse();
    out
}

/// `v` padded in front with `with` to three entries, because kernels have three spatial axes.
pub(super) fn three<T: Copy>(v: impl IntoIterator<Item = T>, with: T) -> [T; 3] {
    let mut out = [with; 3];
    let v: Vec<T> = v.into_iter().take(3).collect();
    let lead = 3 - v.len();
    for (i, x) in v.into_iter().enumerate() {
        out[lead + i] = x;
    }
    out
}

/// The device's matrix op for operands of a type, if it has one.
pub(super) fn matrix_unit(dtype: DType, caps: &Caps) -> Option<MatrixOp> {
    let fits = |o: &&MatrixOp| o.operand.storage() == dtype && caps.subgroup == Some(o.width as u32);
    caps.matrix.iter().find(fits).copied()
}

/// Packs elements into a 16-byte vector.
pub(super) fn words<'a>(b: &'a Builder, d: DType, x: &[E<'a>]) -> E<'a> {
    let per = x.len() / 4;
    b.words(std::array::from_fn(|w| match per {
        1 => x[w].bitcast(Ty::U32),
        _ => b.pack(d, &x[w * per..(w + 1) * per]),
    }))
}
