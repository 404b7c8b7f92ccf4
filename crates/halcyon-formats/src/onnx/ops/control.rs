//! Control flow: If, Loop and Scan. Their bodies are built into the graph around them, once for each time they run; a
//! condition that only a run gives is computed by a stage.

use super::{Row, item_row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::host::Host;
use crate::onnx::item::Item;
use crate::onnx::node::Call;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

pub const ROWS: &[Row] = &[
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
    let taken = b.known_scalar(c.arg(0)?, "the condition of If")?.as_bool();
    let name = if taken { "then_branch" } else { "else_branch" };
    let g = c.graph(name)?.ok_or_else(|| c.invalid(format!("attribute '{name}' is missing")))?;
    c.inline(b, g, vec![])
}

/// Results of every iteration, stacked along a new axis. `like` gives type and shape where there is no iteration.
fn stack(b: &mut Builder, c: &Call<'_>, rows: &[Value], axis: usize) -> Result<Value> {
    let mut parts = Vec::with_capacity(rows.len());
    for v in rows {
        let first = &rows[0];
        if v.ty != first.ty {
            return Err(c.invalid(format!(
                "a scanned result is {} in one iteration and {} in another",
                first.ty, v.ty
            )));
        }
        let mut shape = v.shape().clone();
        if axis > shape.rank() {
            return Err(c.invalid(format!("axis {axis} of a scanned result {}", v.ty)));
        }
        shape.0.insert(axis, Dim::from(1));
        parts.push(b.reshape(v, shape)?);
    }
    b.concat(&parts.iter().collect::<Vec<_>>(), axis)
}

fn tensor(c: &Call<'_>, i: &Item, what: &str) -> Result<Value> {
    i.tensor().cloned().ok_or_else(|| c.invalid(format!("{what} is {}, not a tensor", i.kind())))
}

/// The declared type of a result that no iteration gave, with no rows.
fn empty(
    b: &mut Builder,
    c: &Call<'_>,
    v: &crate::onnx::proto::ValueInfoProto,
    axis: usize,
) -> Result<Value> {
    use crate::onnx::proto::{DimValue, TypeValue};
    let Some(TypeValue::Tensor(t)) = v.r#type.as_ref().and_then(|t| t.value.as_ref()) else {
        return Err(c.unsupported(
            &format!("result '{}' of no iterations and no declared type", v.name),
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

fn repeat(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let g = c.graph("body")?.ok_or_else(|| c.invalid("attribute 'body' is missing"))?;
    let carried = c.inputs.len().saturating_sub(2);
    let scanned =
        g.output.len().checked_sub(1 + carried).filter(|_| g.input.len() == 2 + carried).ok_or_else(
            || {
                c.invalid(format!(
                    "the body has {} inputs and {} outputs for {carried} carried values",
                    g.input.len(),
                    g.output.len()
                ))
            },
        )?;
    let limit = match c.opt_item(0) {
        None => i64::MAX,
        Some(_) => b.known_scalar(c.arg(0)?, "the trip count of Loop")?.as_i64(),
    };
    let mut on = match c.opt_item(1) {
        None => true,
        Some(_) => b.known_scalar(c.arg(1)?, "the condition of Loop")?.as_bool(),
    };
    let mut state: Vec<Item> = (0..carried).map(|i| c.item(i + 2).cloned()).collect::<Result<_>>()?;
    let mut rows: Vec<Vec<Value>> = vec![vec![]; scanned];
    let (mut i, start) = (0i64, b.g.nodes().len());
    while on && i < limit {
        let mut args: Vec<Item> = vec![
            Value::from(Host::scalar(DType::I64, i)).into(),
            Value::from(Host::scalar(DType::Bool, true)).into(),
        ];
        args.append(&mut state);
        let mut out = c.inline(b, g, args)?.into_iter();
        let next = out.next().ok_or_else(|| c.invalid("the body gives no condition"))?;
        state = out.by_ref().take(carried).collect();
        for (rows, v) in rows.iter_mut().zip(out) {
            rows.push(tensor(c, &v, "a scanned result")?);
        }
        i += 1;
        // Nobody asks whether to go on after the last one.
        if i < limit {
            let go = tensor(c, &next, "the condition of the body")?;
            on = b.known_scalar(&go, "the condition of Loop")?.as_bool();
        }
        b.pace(&state, start)?;
    }
    let mut out = state;
    for (k, rows) in rows.iter().enumerate() {
        out.push(match rows.is_empty() {
            true => empty(b, c, &g.output[1 + carried + k], 0)?.into(),
            false => stack(b, c, rows, 0)?.into(),
        });
    }
    Ok(out)
}

/// One step of a tensor along an axis, without that axis.
fn at(b: &mut Builder, c: &Call<'_>, v: &Value, axis: usize, i: usize) -> Result<Value> {
    let mut shape = v.shape().clone();
    if axis >= shape.rank() {
        return Err(c.invalid(format!("axis {axis} of {}", v.ty)));
    }
    shape.0.remove(axis);
    let row = b.narrow(v, axis, Dim::from(i), Dim::from(1))?;
    b.reshape(&row, shape)
}

struct Scan {
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
            "{} operands for a body of {} inputs and {} outputs",
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
        inputs: n,
        axes: axes("scan_input_axes", n)?,
        reverse: directions(c, if old { "directions" } else { "scan_input_directions" }, n)?,
        out_axes: axes("scan_output_axes", scanned)?,
        out_reverse: directions(c, "scan_output_directions", scanned)?,
    };
    let args: Vec<Value> = (first..c.inputs.len()).map(|i| c.arg(i).cloned()).collect::<Result<_>>()?;
    if !old {
        return Ok(steps(b, c, &s, &args, None)?.into_iter().map(Item::from).collect());
    }
    // Version 8 has a batch in front of everything, each with a length of its own.
    let batch = args[0]
        .shape()
        .first()
        .and_then(|d| d.known())
        .ok_or_else(|| c.unsupported("a batch of open size", "Give concrete input shapes"))?;
    let lens = match c.opt(0) {
        None => None,
        Some(v) => Some(b.known_ints(v, "the lengths of Scan")?),
    };
    let mut all: Vec<Vec<Value>> = vec![vec![]; g.output.len()];
    let start = b.g.nodes().len();
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
        for (all, v) in all.iter_mut().zip(steps(b, c, &s, &one, len)?) {
            all.push(v);
        }
        b.pace(&[], start)?;
    }
    if batch == 0 {
        return Err(c.unsupported("an empty batch", "Give at least one entry"));
    }
    all.iter().map(|rows| stack(b, c, rows, 0).map(Item::from)).collect()
}

fn steps(b: &mut Builder, c: &Call<'_>, s: &Scan, args: &[Value], len: Option<usize>) -> Result<Vec<Value>> {
    let g = c.graph("body")?.ok_or_else(|| c.invalid("attribute 'body' is missing"))?;
    let carried = args.len() - s.inputs;
    let (state, inputs) = args.split_at(carried);
    let mut state: Vec<Item> = state.iter().cloned().map(Item::from).collect();
    let axes = inputs.iter().zip(&s.axes).map(|(v, a)| c.axis(*a, v.rank())).collect::<Result<Vec<_>>>()?;
    let mut n = None;
    for (v, &a) in inputs.iter().zip(&axes) {
        let d = v.shape()[a]
            .known()
            .ok_or_else(|| c.unsupported("a scan over an open size", "Give concrete input shapes"))?;
        if *n.get_or_insert(d) != d {
            return Err(c.invalid("the scanned inputs differ in length"));
        }
    }
    let total = n.unwrap_or(0);
    let n = len.unwrap_or(total);
    if n > total {
        return Err(c.invalid(format!("a length of {n} in a sequence of {total}")));
    }
    let mut rows: Vec<Vec<Value>> = vec![vec![]; g.output.len() - carried];
    let start = b.g.nodes().len();
    for i in 0..n {
        let mut args = std::mem::take(&mut state);
        for ((v, &a), &back) in inputs.iter().zip(&axes).zip(&s.reverse) {
            args.push(at(b, c, v, a, if back { n - 1 - i } else { i })?.into());
        }
        let mut out = c.inline(b, g, args)?.into_iter();
        state = out.by_ref().take(carried).collect();
        for (rows, v) in rows.iter_mut().zip(out) {
            rows.push(tensor(c, &v, "a scanned result")?);
        }
        b.pace(&state, start)?;
    }
    let mut out = state.iter().map(|i| tensor(c, i, "a carried value")).collect::<Result<Vec<_>>>()?;
    for (k, rows) in rows.iter_mut().enumerate() {
        if rows.is_empty() {
            let axis = c.axis(s.out_axes[k], 1).unwrap_or(0);
            out.push(empty(b, c, &g.output[carried + k], axis)?);
            continue;
        }
        if s.out_reverse[k] {
            rows.reverse();
        }
        let axis = c.axis(s.out_axes[k], rows[0].rank() + 1)?;
        let mut y = stack(b, c, rows, axis)?;
        if n < total {
            // The rest is zeros.
            let mut shape = y.shape().clone();
            shape.0[axis] = Dim::from(total - n);
            let rest = b.full(y.dtype(), &shape, Scalar::I(0));
            y = b.concat(&[&y, &rest], axis)?;
        }
        out.push(y);
    }
    Ok(out)
}
