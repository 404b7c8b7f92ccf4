//! Control flow: If, Loop and Scan.
//!
//! Branches, and the bodies of short loops of constant length, are built into the surrounding graph. The body
//! of any other loop is compiled once, and a staged run repeats it ([`crate::onnx::trace`],
//! [`crate::onnx::body`]). If a body cannot be compiled, its iterations are built one by one, and the run's
//! report gives the reason. If the model must become one graph, every loop is unrolled into it.

use super::{Row, item_row};
use crate::onnx::body::{LoopState, RunContext};
use crate::onnx::build::{Builder, Range, Value};
use crate::onnx::host::Host;
use crate::onnx::item::Item;
use crate::onnx::node::Call;
use crate::onnx::proto::GraphProto;
use crate::onnx::trace::{self, Bounds, CompiledLoop, Loop, Reason, Sequences};
use halcyon_ir::{DType, Dim, Result, Scalar, Shape, TensorType};

/// In a staged run, a loop of constant length is unrolled into the surrounding graph if its iterations
/// together visit at most this many nodes of the model; in an import, if they add at most this many nodes to
/// the graph. For longer loops, planning the unrolled graph takes more time than the unrolled graph saves
/// when it runs.
const MAX_UNROLLED_NODES: usize = 512;
/// After its iterations have visited this many nodes of the model, a loop that adds few nodes to the graph is
/// treated as long.
const LONG_AFTER_NODES: usize = 1 << 14;
/// Number of sets of shapes for which a loop keeps compiled bodies.
const MAX_BODIES: usize = 64;

pub(super) const ROWS: &[Row] = &[
    item_row("If", 1, &["then_branch", "else_branch"], branch),
    item_row("Loop", 1, &["body"], repeat),
    item_row(
        "Scan",
        8,
        &[
            "body",
            "num_scan_inputs",
            "directions",
            "scan_input_axes",
            "scan_input_directions",
            "scan_output_axes",
            "scan_output_directions",
        ],
        scan,
    ),
];

fn branch(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let cond = c.arg(0)?;
    if b.controls.is_some() && cond.host().is_none() {
        match trace::branch(b, c)? {
            Ok(items) => return Ok(items),
            Err(why) => b.refused = Some(format!("{}: {why}", c.name)),
        }
    }
    let taken = b.known_scalar(cond, "the condition of If")?.as_bool();
    let name = if taken { "then_branch" } else { "else_branch" };
    let g = c.graph(name)?.ok_or_else(|| c.invalid(format!("attribute '{name}' is missing")))?;
    c.inline(b, g, vec![])
}

/// Joins parts of a scanned result, which have the iterations as first axis, into one tensor with the
/// iterations along `axis`.
fn stack(b: &mut Builder, c: &Call<'_>, parts: &[Value], axis: usize) -> Result<Value> {
    let first = &parts[0];
    let row = |v: &Value| TensorType::new(v.dtype(), v.shape()[1..].to_vec());
    if let Some(v) = parts.iter().find(|v| row(v) != row(first)) {
        let (a, z) = (row(first), row(v));
        return Err(c.invalid(format!("a scanned result is {a} in one iteration and {z} in another")));
    }
    let rank = first.rank();
    if axis >= rank {
        return Err(c.invalid(format!(
            "axis {axis} is out of range for a scanned result whose rows are {}",
            row(first)
        )));
    }
    let all = match parts {
        [one] => one.clone(),
        parts => b.concat(&parts.iter().collect::<Vec<_>>(), 0)?,
    };
    if axis == 0 {
        return Ok(all);
    }
    let perm: Vec<usize> = (1..=axis).chain([0]).chain(axis + 1..rank).collect();
    b.permute(&all, &perm)
}

/// Returns `v` as one row of a scanned result.
fn row(b: &mut Builder, v: &Value) -> Result<Value> {
    let mut shape = v.shape().clone();
    shape.0.insert(0, Dim::from(1));
    b.reshape(v, shape)
}

fn tensor(c: &Call<'_>, i: &Item, what: &str) -> Result<Value> {
    i.tensor().cloned().ok_or_else(|| c.invalid(format!("{what} is {}, not a tensor", i.kind())))
}

/// A scanned result of a loop without iterations: the declared type, with no rows.
fn empty(
    b: &mut Builder,
    c: &Call<'_>,
    v: &crate::onnx::proto::ValueInfoProto,
    axis: usize,
) -> Result<Value> {
    use crate::onnx::proto::{DimValue, TypeValue};
    let Some(TypeValue::Tensor(t)) = v.r#type.as_ref().and_then(|t| t.value.as_ref()) else {
        return Err(c.unsupported(
            &format!("result '{}' of a loop without iterations, which has no declared type", v.name),
            "Declare its type in the body",
        ));
    };
    let dtype = crate::onnx::tensor::dtype(t.elem_type, &v.name)?;
    let mut dims: Vec<usize> = t
        .shape
        .iter()
        .flat_map(|s| &s.dim)
        .map(|d| match d.value {
            Some(DimValue::Value(n)) => usize::try_from(n).unwrap_or(0),
            _ => 0,
        })
        .collect();
    dims.insert(axis.min(dims.len()), 0);
    Ok(b.full(dtype, &Shape::from(&dims[..]), Scalar::I(0)))
}

/// The progress of a loop.
struct Progress {
    state: Vec<Item>,
    /// Iterations done.
    i: i64,
    on: bool,
    /// For each scanned result the parts so far, each with the iterations as first axis.
    rows: Vec<Vec<Value>>,
}

impl Progress {
    fn new(state: Vec<Item>, on: bool, scanned: usize) -> Progress {
        Progress { state, i: 0, on, rows: vec![vec![]; scanned] }
    }
}

/// Number of nodes of a graph, including its subgraphs.
fn weight(g: &GraphProto) -> usize {
    let inner = |g: &GraphProto| {
        let all = g.node.iter().flat_map(|n| &n.attribute).filter_map(|a| a.g.as_deref());
        all.map(weight).fold(0, usize::saturating_add)
    };
    g.node.len().saturating_add(inner(g)).max(1)
}

fn is_short(g: &GraphProto, limit: i64) -> bool {
    usize::try_from(limit).is_ok_and(|n| n.saturating_mul(weight(g)) <= MAX_UNROLLED_NODES)
}

/// Whether the graph is imported to be run, so that parts that cannot be in one graph may run in stages.
fn is_run(b: &Builder) -> bool {
    b.stage.is_none() && b.controls.is_none() && !b.limits.whole && !b.differentiates
}

/// The value of a trip count or condition. If the value is not known during import, the model runs in stages,
/// because a single graph would be valid for one value only.
fn control_value(b: &mut Builder, v: &Value, what: &str) -> Result<Scalar> {
    if is_run(b) && v.host().is_none() {
        return Err(b.no_engine(what));
    }
    b.known_scalar(v, what)
}

fn repeat(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let g = c.graph("body")?.ok_or_else(|| c.invalid("attribute 'body' is missing"))?;
    let carried = c.inputs.len().saturating_sub(2);
    let fits = g.input.len() == 2 + carried;
    let scanned = g.output.len().checked_sub(1 + carried).filter(|_| fits).ok_or_else(|| {
        c.invalid(format!(
            "the body has {} inputs and {} outputs for {carried} carried values",
            g.input.len(),
            g.output.len()
        ))
    })?;
    let steers = |i: usize| c.opt_item(i).map(|_| c.arg(i)).transpose();
    let (trip, cond) = (steers(0)?, steers(1)?);
    let state: Vec<Item> = (0..carried).map(|i| c.item(i + 2).cloned()).collect::<Result<_>>()?;
    let l = Loop { g, carried, scan: None };
    if b.controls.is_some() && [trip, cond].into_iter().flatten().any(|v| v.host().is_none()) {
        match open_loop(b, c, &l, trip, cond, &state)? {
            Ok(items) => return Ok(items),
            Err(why) => b.refused = Some(format!("{}: {why}", c.name)),
        }
    }
    let constant = [trip, cond].into_iter().flatten().all(Value::is_constant);
    let limit = match trip {
        None => i64::MAX,
        Some(v) => control_value(b, v, "the trip count of Loop")?.as_i64(),
    };
    let on = match cond {
        None => true,
        Some(v) => control_value(b, v, "the condition of Loop")?.as_bool(),
    };
    let mut p = Progress::new(state, on, scanned);
    if let Some(items) = run_loop(b, c, &l, limit, constant && is_short(g, limit), &mut p)? {
        return Ok(items);
    }
    let mut out = p.state;
    for (k, rows) in p.rows.iter().enumerate() {
        out.push(match rows.is_empty() {
            true => empty(b, c, &g.output[1 + carried + k], 0)?.into(),
            false => stack(b, c, rows, 0)?.into(),
        });
    }
    Ok(out)
}

/// Compiles a loop inside a compiled body. The loop's trip count or condition is known only at run time.
fn open_loop(
    b: &mut Builder,
    c: &Call<'_>,
    l: &Loop<'_>,
    trip: Option<&Value>,
    cond: Option<&Value>,
    state: &[Item],
) -> Result<std::result::Result<Vec<Item>, Reason>> {
    let (state, types) = match tensors(state) {
        Ok(s) => s,
        Err(why) => return Ok(Err(why)),
    };
    let limit = match trip {
        None => Err(i64::MAX),
        Some(v) if v.host().is_none() => Ok(v),
        Some(v) => Err(b.known_scalar(v, "the trip count of Loop")?.as_i64()),
    };
    match trace::repeat(b, c, l, &types)? {
        Ok(body) => trace::nested(b, body, &Bounds { limit, on: cond }, &state),
        Err(why) => Ok(Err(why)),
    }
}

/// The tensors of a state, and their types.
fn tensors(state: &[Item]) -> std::result::Result<(Vec<Value>, Vec<TensorType>), Reason> {
    let one = |i: &Item| i.tensor().cloned().ok_or_else(|| format!("a carried value is {}", i.kind()));
    let state = state.iter().map(one).collect::<std::result::Result<Vec<_>, _>>()?;
    let types = state.iter().map(|v| v.ty.clone()).collect();
    Ok((state, types))
}

/// Runs a loop to its end. Inside a body that is being compiled, the loop may become part of that body. In
/// this case its results are returned; otherwise they are in `p`.
fn run_loop(
    b: &mut Builder,
    c: &Call<'_>,
    l: &Loop<'_>,
    limit: i64,
    short: bool,
    p: &mut Progress,
) -> Result<Option<Vec<Item>>> {
    if p.on && limit > 0 && !b.differentiates {
        if b.controls.is_some() {
            let refused = match nest_in_body(b, c, l, limit, short, p)? {
                Ok(Some(items)) => return Ok(Some(items)),
                Ok(None) => None,
                Err(why) => Some(format!("{}: {why}", c.name)),
            };
            let unrolled = unroll(b, c, l, limit, p);
            if unrolled.is_err() {
                b.refused = refused.or(b.refused.take());
            }
            return unrolled.map(|()| None);
        }
        if b.stage.is_some() {
            run_compiled(b, c, l, limit, short, p)?;
        }
    }
    unroll(b, c, l, limit, p).map(|()| None)
}

/// Compiles a loop as part of the body that is being compiled. `None` for a short loop that is better
/// unrolled.
fn nest_in_body(
    b: &mut Builder,
    c: &Call<'_>,
    l: &Loop<'_>,
    limit: i64,
    short: bool,
    p: &Progress,
) -> Result<std::result::Result<Option<Vec<Item>>, Reason>> {
    let (state, types) = match tensors(&p.state) {
        Ok(s) => s,
        Err(why) => return Ok(Err(why)),
    };
    let body = match trace::repeat(b, c, l, &types)? {
        Ok(body) if short && body.repeat.on.is_some() => return Ok(Ok(None)),
        Ok(body) => body,
        Err(why) => return Ok(Err(why)),
    };
    Ok(trace::nested(b, body, &Bounds { limit: Err(limit), on: None }, &state)?.map(Some))
}

/// Runs as many iterations of a loop as possible with a compiled body. Runs none if the loop is short and
/// better unrolled, or if its body cannot be compiled.
fn run_compiled(
    b: &mut Builder,
    c: &Call<'_>,
    l: &Loop<'_>,
    limit: i64,
    short: bool,
    p: &mut Progress,
) -> Result<()> {
    let (state, mut types) = match tensors(&p.state) {
        Ok(s) => s,
        Err(why) => {
            b.warn(uncompiled_warning(c, &why));
            return Ok(());
        }
    };
    // Ordered by last use, most recent last.
    let mut bodies: Vec<(Vec<TensorType>, CompiledLoop)> = vec![];
    let mut made = 0;
    let mut ran: Option<LoopState> = None;
    let limits = b.limits.clone();
    while ran.as_ref().is_none_or(|r| r.on && r.i < limit) {
        match bodies.iter().position(|(t, _)| *t == types) {
            Some(k) => bodies[k..].rotate_left(1),
            None => match trace::repeat(b, c, l, &types)? {
                Ok(body) if ran.is_none() && short && body.repeat.on.is_some() => return Ok(()),
                Ok(body) => {
                    made += 1;
                    if bodies.len() == MAX_BODIES {
                        bodies.remove(0);
                    }
                    bodies.push((types.clone(), body));
                }
                Err(why) => {
                    b.warn(uncompiled_warning(c, &why));
                    break;
                }
            },
        }
        let Some((_, body)) = bodies.last_mut() else { break };
        let r = match &mut ran {
            Some(r) => r,
            None => ran.insert(LoopState { state: b.handles(&state)?, i: p.i, on: p.on, rows: vec![] }),
        };
        let captured = b.handles(&body.captured)?;
        body.repeat.run(&mut RunContext { engine: b.engine()?, limits: &limits }, &captured, limit, r)?;
        types.clone_from(&body.repeat.after);
    }
    let Some(ran) = ran else { return Ok(()) };
    if made > 1 {
        b.warn(format!(
            "{}: its carried values change their shape, so its body was compiled for {made} sets of shapes",
            c.name
        ));
    }
    b.record_iterations(c.name, (ran.i - p.i) as u64, made);
    (p.i, p.on) = (ran.i, ran.on);
    p.state = ran.state.into_iter().zip(types).map(|(h, t)| b.computed(h, t).into()).collect();
    for (k, rows) in ran.rows.into_iter().enumerate() {
        let ty = rows.ty();
        let all = rows.finish(&mut RunContext { engine: b.engine()?, limits: &limits })?;
        p.rows[k].push(b.computed(all, ty));
    }
    Ok(())
}

fn uncompiled_warning(c: &Call<'_>, why: &str) -> String {
    format!("{}: its body cannot be compiled, so its iterations are built one by one: {why}", c.name)
}

/// Unrolls the remaining iterations of a loop into the graph.
fn unroll(b: &mut Builder, c: &Call<'_>, l: &Loop<'_>, limit: i64, p: &mut Progress) -> Result<()> {
    let (start, first, each) = (b.node_count(), p.i, weight(l.g));
    let limits = b.limits.clone();
    let alone = is_run(b);
    while p.on && p.i < limit {
        limits.iteration(c.name, p.i as u64)?;
        let mut args = vec![];
        if l.scan.is_none() {
            args.push(Value::from(Host::scalar(DType::I64, p.i)).into());
            args.push(Value::from(Host::scalar(DType::Bool, true)).into());
        }
        args.append(&mut p.state);
        if let Some(s) = &l.scan {
            for k in 0..s.values.len() {
                let i = p.i as usize;
                let i = if s.reverse[k] { s.n - 1 - i } else { i };
                args.push(at(b, c, &s.values[k], s.axes[k], i)?.into());
            }
        }
        let mut out = c.inline(b, l.g, args)?.into_iter();
        let next = match l.scan {
            None => Some(out.next().ok_or_else(|| c.invalid("the body returns no condition"))?),
            Some(_) => None,
        };
        p.state = out.by_ref().take(l.carried).collect();
        for (rows, v) in p.rows.iter_mut().zip(out) {
            let v = tensor(c, &v, "a scanned result")?;
            rows.push(row(b, &v)?);
        }
        p.i += 1;
        // The condition after the last iteration is not needed.
        if let Some(next) = next
            && p.i < limit
        {
            let go = tensor(c, &next, "the condition of the body")?;
            p.on = control_value(b, &go, "the condition of Loop")?.as_bool();
        }
        let walked = usize::try_from(p.i - first).unwrap_or(usize::MAX).saturating_mul(each);
        if alone && p.i < limit && (b.node_count() - start > MAX_UNROLLED_NODES || walked > LONG_AFTER_NODES)
        {
            return Err(b.no_engine("a long loop"));
        }
        b.pace(&p.state, start)?;
    }
    Ok(())
}

/// The slice of a tensor at index `i` of an axis; the axis is removed.
fn at(b: &mut Builder, c: &Call<'_>, v: &Value, axis: usize, i: usize) -> Result<Value> {
    let mut shape = v.shape().clone();
    if axis >= shape.rank() {
        return Err(c.invalid(format!("axis {axis} is out of range for {}", v.ty)));
    }
    shape.0.remove(axis);
    let row = b.narrow(v, axis, Dim::from(i), Dim::from(1))?;
    b.reshape(&row, shape)
}

struct Scan<'a> {
    g: &'a GraphProto,
    inputs: usize,
    axes: Vec<i64>,
    reverse: Vec<bool>,
    out_axes: Vec<i64>,
    out_reverse: Vec<bool>,
}

fn directions(c: &Call<'_>, name: &str, n: usize) -> Result<Vec<bool>> {
    let v = c.ints(name)?.map_or(vec![0; n], <[i64]>::to_vec);
    if v.len() != n || v.iter().any(|d| !(0..=1).contains(d)) {
        return Err(c.invalid(format!("attribute '{name}' is {v:?}, expected {n} times 0 or 1")));
    }
    Ok(v.iter().map(|d| *d == 1).collect())
}

fn scan(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let g = c.graph("body")?.ok_or_else(|| c.invalid("attribute 'body' is missing"))?;
    let n = usize::try_from(c.int("num_scan_inputs", 0)?)
        .ok()
        .filter(|n| (1..=g.input.len()).contains(n))
        .ok_or_else(|| c.invalid("attribute 'num_scan_inputs' does not fit the body"))?;
    let carried = g.input.len() - n;
    let first = usize::from(c.opset < 9);
    if c.inputs.len() != first + carried + n || g.output.len() < carried {
        return Err(c.invalid(format!(
            "it has {} operands, but its body has {} inputs and {} outputs",
            c.inputs.len(),
            g.input.len(),
            g.output.len()
        )));
    }
    let scanned = g.output.len() - carried;
    let axes = |name: &str, n: usize| -> Result<Vec<i64>> {
        let v = c.ints(name)?.map_or(vec![0; n], <[i64]>::to_vec);
        if v.len() == n {
            Ok(v)
        } else {
            Err(c.invalid(format!("attribute '{name}' has {} entries, not {n}", v.len())))
        }
    };
    let old = c.opset < 9;
    let s = Scan {
        g,
        inputs: n,
        axes: axes("scan_input_axes", n)?,
        reverse: directions(c, if old { "directions" } else { "scan_input_directions" }, n)?,
        out_axes: axes("scan_output_axes", scanned)?,
        out_reverse: directions(c, "scan_output_directions", scanned)?,
    };
    let args: Vec<Value> = (first..c.inputs.len()).map(|i| c.arg(i).cloned()).collect::<Result<_>>()?;
    if !old {
        return Ok(scan_slices(b, c, &s, &args, None)?.into_iter().map(Item::from).collect());
    }
    // In version 8 every operand has a leading batch axis, and each entry of the batch may have its own
    // length.
    let batch = args[0]
        .shape()
        .first()
        .and_then(|d| d.known())
        .ok_or_else(|| c.unsupported("a batch of unknown size", "Give concrete input shapes"))?;
    let lens = match c.opt(0) {
        None => None,
        Some(v) => Some(b.known_ints(v, "the lengths of Scan")?),
    };
    let mut all: Vec<Vec<Value>> = vec![vec![]; g.output.len()];
    let start = b.node_count();
    for k in 0..batch {
        let one = args.iter().map(|v| at(b, c, v, 0, k)).collect::<Result<Vec<_>>>()?;
        let len = match &lens {
            None => None,
            Some(l) => Some(
                l.get(k)
                    .and_then(|l| usize::try_from(*l).ok())
                    .ok_or_else(|| c.invalid("a length for each batch entry is needed"))?,
            ),
        };
        for (all, v) in all.iter_mut().zip(scan_slices(b, c, &s, &one, len)?) {
            all.push(row(b, &v)?);
        }
        b.pace(&[], start)?;
    }
    if batch == 0 {
        return Err(c.unsupported("an empty batch", "Give at least one entry"));
    }
    all.iter().map(|rows| stack(b, c, rows, 0).map(Item::from)).collect()
}

/// Scans all slices of the inputs, or the first `len` slices. `args` are the carried values, followed by the
/// inputs.
fn scan_slices(
    b: &mut Builder,
    c: &Call<'_>,
    s: &Scan<'_>,
    args: &[Value],
    len: Option<usize>,
) -> Result<Vec<Value>> {
    let carried = args.len() - s.inputs;
    let (state, inputs) = args.split_at(carried);
    let axes = inputs.iter().zip(&s.axes).map(|(v, a)| c.axis(*a, v.rank())).collect::<Result<Vec<_>>>()?;
    let mut n = None;
    for (v, &a) in inputs.iter().zip(&axes) {
        let d = v.shape()[a]
            .known()
            .ok_or_else(|| c.unsupported("a scan over an unknown size", "Give concrete input shapes"))?;
        if *n.get_or_insert(d) != d {
            return Err(c.invalid("the scanned inputs differ in length"));
        }
    }
    let total = n.unwrap_or(0);
    let n = len.unwrap_or(total);
    if n > total {
        return Err(c.invalid(format!("length {n} exceeds the length of the sequence, {total}")));
    }
    let sequences = Sequences { values: inputs.to_vec(), axes, reverse: s.reverse.clone(), n };
    let l = Loop { g: s.g, carried, scan: Some(sequences) };
    let scanned = s.g.output.len() - carried;
    let mut p = Progress::new(state.iter().cloned().map(Item::from).collect(), true, scanned);
    let limit = i64::try_from(n).unwrap_or(i64::MAX);
    if let Some(items) = run_loop(b, c, &l, limit, is_short(s.g, limit), &mut p)? {
        p.rows.iter_mut().zip(&items[carried..]).for_each(|(rows, i)| rows.extend(i.tensor().cloned()));
        p.state = items[..carried].to_vec();
    }
    let mut out = p.state.iter().map(|i| tensor(c, i, "a carried value")).collect::<Result<Vec<_>>>()?;
    for (k, rows) in p.rows.iter().enumerate() {
        if rows.is_empty() {
            let axis = c.axis(s.out_axes[k], 1).unwrap_or(0);
            out.push(empty(b, c, &s.g.output[carried + k], axis)?);
            continue;
        }
        let axis = c.axis(s.out_axes[k], rows[0].rank())?;
        let mut y = stack(b, c, rows, axis)?;
        if s.out_reverse[k] {
            y = reverse_axis(b, &y, axis)?;
        }
        if n < total {
            // Pad the result with zeros.
            let mut shape = y.shape().clone();
            shape.0[axis] = Dim::from(total - n);
            let rest = b.full(y.dtype(), &shape, Scalar::I(0));
            y = b.concat(&[&y, &rest], axis)?;
        }
        out.push(y);
    }
    Ok(out)
}

/// Reverses an axis.
fn reverse_axis(b: &mut Builder, v: &Value, axis: usize) -> Result<Value> {
    let mut all: Vec<Range> =
        v.shape().iter().map(|&len| Range { start: Dim::from(0), step: 1, len }).collect();
    let last = all[axis].len.offset(-1);
    (all[axis].start, all[axis].step) = (last, -1);
    b.slice(v, &all)
}
