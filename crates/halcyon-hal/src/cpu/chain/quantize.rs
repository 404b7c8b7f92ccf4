//! Kernels for two chains of quantisation, each with one loop over a row: the magnitude `max |x|`, and the
//! codes `cast(clamp(round(x / s)))`, where `s` has one value for each row or one for all rows.
//!
//! Cost. Each code takes one division, a read of 4 bytes and a write of 1 or 2 bytes. The general executor
//! reads a block once for each instruction, computes `s` for every element, and needs five instructions for a
//! minimum or maximum, because it propagates NaN and orders zeros. The kernel for codes need not order zeros,
//! because both zeros become the code 0. It tests for NaN once, after the limits.

use super::flush::FlushToZero;
use super::ops;
use crate::Declined;
use crate::cpu::library::{CpuKernel, Run};
use crate::cpu::sys::dispatch;
use crate::cpu::team::{SharedConst, SharedMut};
use crate::library_call::CallForm;
use halcyon_ir::fused::{Fused, InstrKind, Param};
use halcyon_ir::layout::{View, collapse};
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::{DType, ScalarOp};

/// Rows whose scales are computed together.
const ROWS: usize = 64;
/// Maximum number of columns that are converted together. A longer row is divided.
const COLS: usize = 4096;
/// Shorter rows are left to the general executor, because a call for each row would take too long.
const FEWEST_COLS: usize = 16;
/// Maxima of fewer rows are left to the general executor, because it can divide a row among threads.
const FEWEST_ROWS: usize = 32;
/// Minimum number of elements in a part of the work. A smaller part would cost more than it saves.
const GRAIN: usize = 32 << 10;
/// Longer chains are left to the general executor, so that the depth of recursion is bounded. Chains of
/// quantisation are shorter.
const MAX_BODY: usize = 64;
/// Values that a row may have besides its elements: loads, parameters and results.
const MAX_VALUES: usize = 8;

/// The place of an operand that has one element for each row, or one for all rows.
#[derive(Clone, Copy, Debug)]
struct PerRow {
    input: usize,
    offset: isize,
    stride: isize,
}

/// How a value that is the same for a whole row is computed.
#[derive(Clone, Copy, Debug)]
enum Value {
    Read(PerRow),
    Literal(f32),
    Op(ScalarOp, [usize; 3]),
}

/// A matrix whose rows follow each other without gaps.
#[derive(Clone, Copy, Debug)]
struct Rows {
    input: usize,
    offset: isize,
    rows: usize,
    cols: usize,
}

#[derive(Debug)]
struct Codes {
    x: Rows,
    /// The last value is the scale.
    values: Vec<Value>,
    low: f32,
    high: f32,
    to: DType,
    inputs: usize,
    out: isize,
}

/// A kernel for the chain, if it is one of the two. `Plan::new` must have accepted the chain. Then every
/// instruction uses only earlier ones and has the operands that its op takes, and every view lies in its
/// operand.
pub(super) fn kernel(f: &Fused, call: &CallForm<'_>) -> Result<Option<CpuKernel>, Declined> {
    if call.in_place > 0 || f.outs.len() != 1 || f.body.len() > MAX_BODY {
        return Ok(None);
    }
    if let Some(c) = codes(f, call.inputs.len()) {
        // SAFETY: `Plan::new` accepted the chain and its views; `CpuKernel::run` has checked the buffers.
        return CpuKernel::new("cpu.quantize", call, move |r| unsafe { run_codes(&c, r) }).map(Some);
    }
    if let Some((x, out)) = magnitude(f) {
        let inputs = call.inputs.len();
        // SAFETY: `Plan::new` accepted the chain and its views; `CpuKernel::run` has checked the buffers.
        let run = move |r: &Run<'_>| unsafe { run_magnitude(x, inputs, out, r) };
        return CpuKernel::new("cpu.magnitude", call, run).map(Some);
    }
    Ok(None)
}

/// The views of the loads and of the result, over `[rows, columns]`. `None` if their axes cannot be merged to
/// these two, rows are too short, or a view has a mask.
fn views(f: &Fused) -> Option<(Vec<View>, usize, usize)> {
    let rank = f.space.len();
    let mut all: Vec<View> = f.loads.iter().map(|l| l.view.clone()).collect();
    let mut out = f.outs[0].view.clone();
    out.shape = f.space.clone();
    out.strides.resize(rank, 0);
    all.push(out);
    let mut refs: Vec<&mut View> = all.iter_mut().collect();
    let border = collapse(&mut refs, rank - f.reduced);
    let (rows, cols) = match (&all[0].shape[..], border, f.reduced) {
        (&[cols], 1, 0) | (&[cols], 0, 1..) => (1, cols),
        (&[rows, cols], 2, 0) | (&[rows, cols], 1, 1..) => (rows, cols),
        _ => return None,
    };
    if rows == 0 || cols < FEWEST_COLS || all.iter().any(|v| v.mask.is_some()) {
        return None;
    }
    Some((all, rows, cols))
}

/// The strides of a view along rows and columns.
fn strides(v: &View) -> (isize, isize) {
    match v.strides[..] {
        [row, col] => (row, col),
        [col] => (0, col),
        _ => (0, 0),
    }
}

/// Whether the rows of a view follow each other.
fn is_whole(v: &View, rows: usize, cols: usize) -> bool {
    let (row, col) = strides(v);
    col == 1 && (rows == 1 || row == cols as isize)
}

/// If the chain is a maximum of magnitudes: its operand, and the offset of the results.
fn magnitude(f: &Fused) -> Option<(Rows, isize)> {
    let out = &f.outs[0];
    if out.reduce != Some(ReduceKind::Max) || out.dtype != DType::F32 {
        return None;
    }
    let abs = &f.body[out.value as usize];
    let [x] = abs.args[..] else { return None };
    let InstrKind::Load(l) = f.body[x as usize].kind else { return None };
    let load = f.loads.get(l as usize)?;
    if abs.kind != InstrKind::Op(ScalarOp::Abs) || load.dtype != DType::F32 {
        return None;
    }
    let (views, rows, cols) = views(f)?;
    let v = &views[l as usize];
    let dense = strides(views.last()?).0 == 1;
    (rows >= FEWEST_ROWS && dense && is_whole(v, rows, cols))
        .then_some((Rows { input: load.input as usize, offset: v.offset, rows, cols }, out.view.offset))
}

/// If the chain computes codes: its description.
fn codes(f: &Fused, inputs: usize) -> Option<Codes> {
    let out = &f.outs[0];
    if out.reduce.is_some() || !matches!(out.dtype, DType::I8 | DType::U8 | DType::I16 | DType::U16) {
        return None;
    }
    let op = |reg: u32, op: ScalarOp| {
        let i = &f.body[reg as usize];
        (i.kind == InstrKind::Op(op) && i.dtype == DType::F32).then_some(&i.args[..])
    };
    let cast = &f.body[out.value as usize];
    let &[mut at] = &cast.args[..] else { return None };
    if cast.kind != InstrKind::Cast || f.body[at as usize].dtype != DType::F32 {
        return None;
    }
    // Go from the last limit to the first. Together they are one interval. If it is not empty, their order
    // does not matter.
    let (low, high) = out.dtype.range();
    let (mut low, mut high) = (low as f32, high as f32);
    loop {
        let (limit, most) = match (op(at, ScalarOp::Min), op(at, ScalarOp::Max)) {
            (Some(&[x, y]), _) => (literal(f, y).map(|c| (x, c)).or(literal(f, x).map(|c| (y, c))), true),
            (_, Some(&[x, y])) => (literal(f, y).map(|c| (x, c)).or(literal(f, x).map(|c| (y, c))), false),
            _ => break,
        };
        let (x, c) = limit.filter(|l| !l.1.is_nan())?;
        at = x;
        if most {
            high = high.min(c);
        } else {
            low = low.max(c);
        }
    }
    let &[divided] = op(at, ScalarOp::Round)? else { return None };
    let &[x, scale] = op(divided, ScalarOp::Div)? else { return None };
    let (views, rows, cols) = views(f)?;
    let InstrKind::Load(l) = f.body[x as usize].kind else { return None };
    let (load, v) = (f.loads.get(l as usize)?, &views[l as usize]);
    let whole = is_whole(v, rows, cols) && is_whole(views.last()?, rows, cols);
    // The cast would round a limit that is not an integer.
    let whole_limits = low <= high && low == low.trunc() && high == high.trunc();
    if load.dtype != DType::F32 || !whole || !whole_limits {
        return None;
    }
    let mut values = vec![];
    per_row(f, &views, scale, &mut values)?;
    let x = Rows { input: load.input as usize, offset: v.offset, rows, cols };
    Some(Codes { x, values, low, high, to: out.dtype, inputs, out: out.view.offset })
}

fn literal(f: &Fused, reg: u32) -> Option<f32> {
    match (&f.body[reg as usize].kind, f.body[reg as usize].dtype) {
        (InstrKind::Param(i), DType::F32) => match f.params.get(*i as usize)?.1 {
            Param::Literal(s) => Some(s.as_f64() as f32),
            Param::Arg(_) => None,
        },
        _ => None,
    }
}

/// Appends a value that is the same for a whole row, after the values from which it is computed. Returns its
/// index.
fn per_row(f: &Fused, views: &[View], reg: u32, values: &mut Vec<Value>) -> Option<usize> {
    let i = &f.body[reg as usize];
    if i.dtype != DType::F32 || values.len() == MAX_VALUES {
        return None;
    }
    let value = match i.kind {
        InstrKind::Load(l) => {
            let (load, v) = (f.loads.get(l as usize)?, &views[l as usize]);
            let (stride, col) = strides(v);
            if load.dtype != DType::F32 || col != 0 {
                return None;
            }
            Value::Read(PerRow { input: load.input as usize, offset: v.offset, stride })
        }
        InstrKind::Param(_) => Value::Literal(literal(f, reg)?),
        InstrKind::Op(op) => {
            let mut args = [0; 3];
            for (to, from) in args.iter_mut().zip(&i.args) {
                *to = per_row(f, views, *from, values)?;
            }
            Value::Op(op, args)
        }
        _ => return None,
    };
    if values.len() == MAX_VALUES {
        return None;
    }
    values.push(value);
    Some(values.len() - 1)
}

/// The scales of rows `from..from + n`.
///
/// # Safety
/// The buffers of `r` hold the operands of the call that `c` was made for; `n <= ROWS`; row `from + n - 1`
/// exists.
unsafe fn scales(c: &Codes, r: &Run<'_>, from: usize, n: usize) -> [f32; ROWS] {
    let mut all = [[0f32; ROWS]; MAX_VALUES];
    for (k, value) in c.values.iter().enumerate() {
        let (before, rest) = all.split_at_mut(k);
        let to = &mut rest[0];
        match *value {
            Value::Literal(v) => *to = [v; ROWS],
            Value::Read(p) => {
                let x = r.bufs[p.input].ptr as *const f32;
                for (i, o) in to[..n].iter_mut().enumerate() {
                    // SAFETY: the view reads this element for row `from + i`, which exists.
                    *o = unsafe { *x.offset(p.offset + (from + i) as isize * p.stride) };
                }
            }
            Value::Op(op, args) => {
                let arg = |a: usize| before.get(a).map_or(std::ptr::null(), |b| b.as_ptr().cast::<u8>());
                // For an operand that the op does not have, this passes value 0, which the op does not read.
                let x = args.map(arg);
                // SAFETY: `per_row` appended the operands, which are f32, before the op, so each has been
                // written and holds `ROWS` floats. The destination is another value. The device of the run
                // supports `r.isa`.
                unsafe { ops::apply(r.isa, op, DType::F32, n, to.as_mut_ptr().cast(), x) };
            }
        }
    }
    all[c.values.len() - 1]
}

/// # Safety
/// The buffers of `r` hold the operands of the call that `c` was made for, and the output overlaps no input.
unsafe fn run_codes(c: &Codes, r: &Run<'_>) {
    let piece = c.x.cols.min(COLS);
    let pieces = c.x.cols.div_ceil(piece);
    let x = SharedConst(r.bufs[c.x.input].ptr as *const f32);
    let out = SharedMut(r.bufs[c.inputs].ptr);
    r.team.ranges(c.x.rows * pieces, (GRAIN / piece).max(1), &|a, b| {
        let _flush = FlushToZero::new();
        let mut scale = ([0f32; ROWS], usize::MAX);
        for unit in a..b {
            let (row, first) = (unit / pieces, unit % pieces * piece);
            let group = row / ROWS * ROWS;
            if scale.1 != group {
                // SAFETY: `scales` is called for rows that exist, at most `ROWS` of them.
                scale = (unsafe { scales(c, r, group, ROWS.min(c.x.rows - group)) }, group);
            }
            let n = piece.min(c.x.cols - first);
            let at = (row * c.x.cols + first) as isize;
            let limits = (scale.0[row - group], c.low, c.high);
            // SAFETY: the views are whole, so these elements of row `row` lie in the operands; each unit
            // writes its own elements, and the output overlaps no input.
            unsafe {
                let x = std::slice::from_raw_parts(x.get().offset(c.x.offset + at), n);
                macro_rules! to {
                    ($t:ty) => {{
                        let to = (out.get() as *mut $t).offset(c.out + at);
                        row_of::<$t>(r.isa, x, limits, std::slice::from_raw_parts_mut(to, n))
                    }};
                }
                match c.to {
                    DType::I8 => to!(i8),
                    DType::U8 => to!(u8),
                    DType::I16 => to!(i16),
                    _ => to!(u16),
                }
            }
        }
    });
}

/// Integers of 8 or 16 bits.
trait Code: Copy {
    fn of(x: i32) -> Self;
}
macro_rules! code {
    ($($t:ty)*) => {$(
        impl Code for $t {
            #[inline(always)]
            fn of(x: i32) -> $t {
                x as $t
            }
        }
    )*};
}
code!(i8 u8 i16 u16);

#[inline(always)]
fn row_body<const FMA: bool, T: Code>(x: &[f32], (scale, low, high): (f32, f32, f32), to: &mut [T]) {
    for (o, &v) in to.iter_mut().zip(x) {
        let q = (v / scale).round_ties_even();
        let q = if q < low { low } else { q };
        let q = if q > high { high } else { q };
        // NaN passes the limits. Like every cast, this one makes it 0, even if the limits exclude 0.
        let q = if q.is_nan() { 0.0 } else { q };
        // SAFETY: `codes` made sure that `low <= high` lie in the range of an integer of 16 bits or fewer,
        // so `q`, which is no NaN, fits i32.
        *o = T::of(unsafe { q.to_int_unchecked() });
    }
}
dispatch! {
    fn row_of [T: Code] [T] (isa, x: &[f32], limits: (f32, f32, f32), to: &mut [T]) = row_body
}

/// # Safety
/// The buffers of `r` hold the operands of the call that the chain was made for, and the output overlaps no
/// input.
unsafe fn run_magnitude(m: Rows, inputs: usize, out: isize, r: &Run<'_>) {
    let x = SharedConst(r.bufs[m.input].ptr as *const f32);
    let to = SharedMut(r.bufs[inputs].ptr as *mut f32);
    r.team.ranges(m.rows, (GRAIN / m.cols).max(1), &|a, b| {
        for row in a..b {
            // SAFETY: the rows of the operand follow each other and lie in it; each row has its own result,
            // and no other part has this row.
            unsafe {
                let x = x.get().offset(m.offset + (row * m.cols) as isize);
                *to.get().offset(out + row as isize) = largest(r.isa, std::slice::from_raw_parts(x, m.cols));
            }
        }
    });
}

/// The largest magnitude, or NaN if an element is NaN. The function compares bits: larger magnitudes have
/// larger bits, and the bits of NaN are larger than those of any number.
#[inline(always)]
fn largest_body<const FMA: bool>(x: &[f32]) -> f32 {
    const W: usize = 32;
    let bits = |v: f32| v.to_bits() & (u32::MAX >> 1);
    let mut most = [0u32; W];
    let (whole, rest) = x.as_chunks::<W>();
    for c in whole {
        for (m, v) in most.iter_mut().zip(c) {
            *m = bits(*v).max(*m);
        }
    }
    for (m, v) in most.iter_mut().zip(rest) {
        *m = bits(*v).max(*m);
    }
    f32::from_bits(most.into_iter().fold(0, u32::max))
}
dispatch! {
    fn largest [] [] (isa, x: &[f32]) -> f32 = largest_body
}
