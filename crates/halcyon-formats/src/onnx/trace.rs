//! Traces a body of control flow into a [`CompiledBody`]. The importer walks the body's nodes with graph
//! inputs of the operands' types in place of values.
//!
//! Values captured from outside the body become inputs of the compiled body, unless they are constants. If
//! the import of the body needs such a value (for example the axes of a reduction), the value is fetched, and
//! the body is traced again with this value as a constant. If the import needs a value that the body itself
//! computes, or a part of the loop's state, the body cannot be compiled. The tracer then returns the reason,
//! and the caller builds the iterations one by one.

use super::body::{CompiledBody, Control, ControlKind, Repeat};
use super::build::{Builder, Value};
use super::host::Host;
use super::item::Item;
use super::node::Call;
use super::order;
use super::proto::GraphProto;
use halcyon_ir::{ConstData, DType, Error, NodeId, Result, Scalar, ScalarOp, TensorType};
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

/// Why a body cannot be compiled.
pub(super) type Reason = String;

/// A traced body: a graph with inputs.
struct TracedBody {
    b: Builder,
    /// Values captured from outside, each with the number of its input.
    captured: Vec<(usize, Value)>,
    results: Vec<Item>,
}

/// Walks a body: takes the builder, the operands and the outer names, returns the results.
type Walk<'a> = &'a mut dyn FnMut(&mut Builder, &[Value], HashMap<String, Item>) -> Result<Vec<Item>>;

/// Rebuilds an item, replacing each of its tensors by the result of `one`.
fn map_tensors(i: &Item, one: &mut dyn FnMut(&Value) -> Result<Value>) -> Result<Item> {
    Ok(match i {
        Item::Tensor(v) => Item::Tensor(one(v)?),
        Item::Text(_) | Item::Optional(None) => i.clone(),
        Item::Sequence(s) => {
            Item::sequence(s.iter().map(|i| map_tensors(i, one)).collect::<Result<Vec<_>>>()?)
        }
        Item::Optional(Some(i)) => Item::Optional(Some(Rc::new(map_tensors(i, one)?))),
        Item::Map(m) => Item::Map(Rc::new((m.0.clone(), map_tensors(&m.1, one)?))),
    })
}

/// Traces a body for operands of these types. Returns the reason if the body cannot be compiled.
fn trace_body(
    b: &mut Builder,
    c: &Call<'_>,
    g: &GraphProto,
    types: &[TensorType],
    walk: Walk<'_>,
) -> Result<std::result::Result<TracedBody, Reason>> {
    let mut fixed: HashMap<NodeId, ConstData> = HashMap::new();
    loop {
        let mut inner = b.nested();
        inner.g.span = b.g.span.clone();
        let operands: Vec<Value> = types
            .iter()
            .map(|t| {
                let n = inner.g.input("", t.clone());
                inner.value(n)
            })
            .collect();
        let mut captured: Vec<(usize, Value)> = vec![];
        let mut of: HashMap<NodeId, Value> = HashMap::new();
        let mut vars = HashMap::new();
        for name in order::free_names(g) {
            let Some(item) = c.outer_value(name) else { continue };
            let item = map_tensors(item, &mut |v| {
                if v.is_constant() {
                    return Ok(v.clone());
                }
                let id = b.id(v)?;
                if let Some(d) = fixed.get(&id) {
                    return Ok(Value::table(d.clone()));
                }
                if let Some(v) = of.get(&id) {
                    return Ok(v.clone());
                }
                captured.push((inner.g.inputs().len(), v.clone()));
                let n = inner.g.input("", v.ty.clone());
                let new = inner.value(n);
                of.insert(id, new.clone());
                Ok(new)
            })?;
            vars.insert(name.to_string(), item);
        }
        let e = match walk(&mut inner, &operands, vars) {
            Ok(_) if !inner.draws.is_empty() => {
                return Ok(Err("it draws random numbers, which differ in every iteration".into()));
            }
            Ok(results) => return Ok(Ok(TracedBody { b: inner, captured, results })),
            Err(e @ Error::Interrupted { .. }) => return Err(e),
            Err(e) => e,
        };
        let Some(needs) = inner.needs_engine else { return Ok(Err(e.to_string())) };
        let reason = inner.refused.unwrap_or_else(|| format!("it needs {needs} before it runs"));
        // Values from outside the body can be fetched.
        let missing: Option<Vec<&Value>> = inner
            .missing
            .iter()
            .map(|k| captured.iter().find(|(i, _)| *i == *k as usize).map(|(_, v)| v))
            .collect();
        let Some(missing) = missing.filter(|m| !m.is_empty()) else { return Ok(Err(reason)) };
        let before = fixed.len();
        for v in missing {
            let data = match b.known(v, &needs) {
                Ok(h) => h.data()?,
                // To fetch the value, the enclosing bodies must be traced again, so the error is passed to
                // them.
                Err(e) if b.controls.is_some() => return Err(e),
                Err(_) => return Ok(Err(reason)),
            };
            fixed.insert(b.id(v)?, data);
        }
        if fixed.len() == before {
            return Ok(Err(reason));
        }
    }
}

/// The tensors of results. Fails if a result is not a tensor.
fn tensors(items: &[Item]) -> std::result::Result<Vec<Value>, Reason> {
    let one = |i: &Item| i.tensor().cloned().ok_or_else(|| format!("one of its results is {}", i.kind()));
    items.iter().map(one).collect()
}

impl TracedBody {
    /// The body that computes `outputs`. Its inputs are the operands, followed by the captured values.
    fn body(mut self, outputs: &[Value]) -> Result<CompiledBody> {
        let ids = self.b.ids(&outputs.iter().collect::<Vec<_>>())?;
        let controls = self.b.controls.take().unwrap_or_default();
        let made: BTreeSet<NodeId> = controls.iter().flat_map(|c| &c.outputs).copied().collect();
        // The inputs for operands and captured values precede those for results of control flow.
        let inputs = self.b.g.inputs().iter().take_while(|i| !made.contains(&i.node)).count();
        CompiledBody::new(&self.b.g, controls, inputs, &ids)
    }
}

/// Traces a branch of If. Returns its compiled body, the values it takes, and the types of its results.
fn trace_branch(
    b: &mut Builder,
    c: &Call<'_>,
    name: &str,
) -> Result<std::result::Result<(CompiledBody, Vec<Value>, Vec<TensorType>), Reason>> {
    let g = c.graph(name)?.ok_or_else(|| c.invalid(format!("attribute '{name}' is missing")))?;
    let t = match trace_body(b, c, g, &[], &mut |b, _, vars| c.inline_in(b, g, vec![], vars))? {
        Ok(t) => t,
        Err(why) => return Ok(Err(why)),
    };
    let outputs = match tensors(&t.results) {
        Ok(v) => v,
        Err(why) => return Ok(Err(why)),
    };
    let types = outputs.iter().map(|v| v.ty.clone()).collect();
    let captured = t.captured.iter().map(|(_, v)| v.clone()).collect();
    Ok(Ok((t.body(&outputs)?, captured, types)))
}

/// Compiles an If with a run-time condition inside a body. Both branches are compiled, and each run takes one
/// of them.
pub(super) fn branch(b: &mut Builder, c: &Call<'_>) -> Result<std::result::Result<Vec<Item>, Reason>> {
    let cond = b.id(c.arg(0)?)?;
    let mut sides = vec![];
    for name in ["else_branch", "then_branch"] {
        match trace_branch(b, c, name)? {
            Ok(s) => sides.push(s),
            Err(why) => return Ok(Err(why)),
        }
    }
    let (Some(then), Some(other)) = (sides.pop(), sides.pop()) else {
        return Err(Error::internal("a branch of an If is missing"));
    };
    if then.2 != other.2 {
        let show = |t: &[TensorType]| t.iter().map(|t| t.to_string()).collect::<Vec<_>>().join(", ");
        return Ok(Err(format!(
            "the branches have results of different types, {} and {}",
            show(&then.2),
            show(&other.2)
        )));
    }
    let types = then.2;
    let mut ids = |v: Vec<Value>| v.iter().map(|v| b.id(v)).collect::<Result<Vec<_>>>();
    let branches = [(other.0, ids(other.1)?), (then.0, ids(then.1)?)];
    Ok(Ok(control(b, ControlKind::If(cond, branches), &types)))
}

/// Records control flow, whose results become inputs of the graph.
fn control(b: &mut Builder, work: ControlKind, types: &[TensorType]) -> Vec<Item> {
    let outputs: Vec<NodeId> = types.iter().map(|t| b.g.input("", t.clone())).collect();
    if let Some(all) = &mut b.controls {
        all.push(Control { work, outputs: outputs.clone() });
    }
    outputs.into_iter().map(|n| b.value(n).into()).collect()
}

/// A Loop or Scan node. The body of Loop takes the iteration number and a condition before its state, and
/// returns a condition before the new state. The body of Scan takes slices of the sequences after its state.
pub(super) struct Loop<'a> {
    pub(super) g: &'a GraphProto,
    pub(super) carried: usize,
    pub(super) scan: Option<Sequences>,
}

/// The sequences that Scan iterates over.
pub(super) struct Sequences {
    pub(super) values: Vec<Value>,
    pub(super) axes: Vec<usize>,
    pub(super) reverse: Vec<bool>,
    /// Number of iterations.
    pub(super) n: usize,
}

/// A compiled loop body with the values it captures.
pub(super) struct CompiledLoop {
    pub(super) repeat: Repeat,
    pub(super) captured: Vec<Value>,
}

/// Compiles the body of Loop or Scan for a state of these types.
pub(super) fn repeat(
    b: &mut Builder,
    c: &Call<'_>,
    s: &Loop<'_>,
    types: &[TensorType],
) -> Result<std::result::Result<CompiledLoop, Reason>> {
    let carried = s.carried;
    // The inputs: state, sequences of Scan, iteration number.
    let sequences: &[Value] = s.scan.as_ref().map_or(&[], |i| &i.values);
    let mut inputs = types.to_vec();
    inputs.extend(sequences.iter().map(|v| v.ty.clone()));
    inputs.push(TensorType::new(DType::I64, halcyon_ir::Shape::scalar()));
    let walked = trace_body(b, c, s.g, &inputs, &mut |b, x, vars| {
        let (state, rest) = x.split_at(carried);
        let i = &rest[rest.len() - 1];
        let state = state.iter().cloned().map(Item::from);
        let args = match &s.scan {
            None => {
                let go = Value::from(Host::scalar(DType::Bool, true));
                [Item::from(i.clone()), go.into()].into_iter().chain(state).collect()
            }
            Some(scan) => {
                let mut args: Vec<Item> = state.collect();
                for (k, v) in rest[..rest.len() - 1].iter().enumerate() {
                    args.push(scan.row(b, k, v, i)?.into());
                }
                args
            }
        };
        c.inline_in(b, s.g, args, vars)
    })?;
    let mut t = match walked {
        Ok(t) => t,
        Err(why) => return Ok(Err(why)),
    };
    let results = match tensors(&t.results) {
        Ok(v) => v,
        Err(why) => return Ok(Err(why)),
    };
    let (cond, results) = match s.scan {
        None => results.split_first().map(|(c, r)| (Some(c.clone()), r.to_vec())).unwrap_or_default(),
        Some(_) => (None, results),
    };
    if results.len() < carried {
        return Err(c.invalid("the body has too few results"));
    }
    let rows: Vec<TensorType> = results[carried..].iter().map(|v| v.ty.clone()).collect();
    for r in &rows {
        let n: usize = r.shape.known().map_or(1, |d| d.iter().product());
        if !(n * r.dtype.bits() as usize).is_multiple_of(8) {
            return Ok(Err(format!("rows of type {r} are not whole bytes")));
        }
    }
    let after: Vec<TensorType> = results[..carried].iter().map(|v| v.ty.clone()).collect();
    let on = match &cond {
        None => Some(true),
        Some(v) => match v.host() {
            Some(_) => Some(t.b.known_scalar(v, "the condition of the body")?.as_bool()),
            None if v.ty.shape.known().is_some_and(|d| d.iter().product::<usize>() == 1) => None,
            None => {
                return Err(c.invalid(format!("the condition of the body is {}, expected one element", v.ty)));
            }
        },
    };
    let i = t.b.g.inputs()[inputs.len() - 1].node;
    let mut outputs = results;
    // The iteration number is computed only if something reads it.
    let mut roots =
        t.b.ids(&outputs.iter().chain(cond.as_ref().filter(|_| on.is_none())).collect::<Vec<_>>())?;
    roots.extend(t.b.controls.iter().flatten().flat_map(|c| c.work.inputs()));
    let counts = t.b.g.live(&roots)[i.index()];
    if counts {
        let (i, one) = (t.b.value(i), Value::from(Host::scalar(DType::I64, 1i64)));
        outputs.push(t.b.scalar(ScalarOp::Add, &[&i, &one])?);
    }
    outputs.extend(cond.filter(|_| on.is_none()));
    let places = (carried..inputs.len() - 1).chain(t.captured.iter().map(|(i, _)| *i)).collect();
    let captured = sequences.iter().chain(t.captured.iter().map(|(_, v)| v)).cloned().collect();
    let stable = after == types;
    let repeat = Repeat {
        name: c.name.into(),
        body: t.body(&outputs)?,
        carried,
        captured: places,
        counter: counts.then_some(inputs.len() - 1),
        rows,
        on,
        after,
        stable,
    };
    Ok(Ok(CompiledLoop { repeat, captured }))
}

impl Sequences {
    /// The slice of sequence `k` for iteration `i`.
    fn row(&self, b: &mut Builder, k: usize, v: &Value, i: &Value) -> Result<Value> {
        if !self.reverse[k] {
            return b.gather(v, i, self.axes[k]);
        }
        let last = b.lit(i, Scalar::from(self.n.saturating_sub(1)));
        let i = b.scalar(ScalarOp::Sub, &[&last, i])?;
        b.gather(v, &i, self.axes[k])
    }
}

/// Bounds of a loop inside a body: a trip count (a value, or a known number), and the condition before the
/// first iteration.
pub(super) struct Bounds<'a> {
    pub(super) limit: std::result::Result<&'a Value, i64>,
    pub(super) on: Option<&'a Value>,
}

/// Compiles a loop inside a traced body as part of that body. The types of its results must be known.
pub(super) fn nested(
    b: &mut Builder,
    body: CompiledLoop,
    at: &Bounds<'_>,
    state: &[Value],
) -> Result<std::result::Result<Vec<Item>, Reason>> {
    if !body.repeat.stable {
        return Ok(Err("its carried values change their shape".into()));
    }
    let mut results: Vec<TensorType> = state.iter().map(|v| v.ty.clone()).collect();
    if !body.repeat.rows.is_empty() {
        let (Err(n), None, Some(true)) = (at.limit, at.on, body.repeat.on) else {
            return Ok(Err("the number of its rows is not known".into()));
        };
        let n = usize::try_from(n).unwrap_or(0);
        for r in &body.repeat.rows {
            let mut shape = r.shape.clone();
            shape.0.insert(0, n.into());
            results.push(TensorType { dtype: r.dtype, shape });
        }
    }
    let mut ids = |v: &[Value]| v.iter().map(|v| b.id(v)).collect::<Result<Vec<_>>>();
    let (state, captured) = (ids(state)?, ids(&body.captured)?);
    let limit = match at.limit {
        Ok(v) => Ok(b.id(v)?),
        Err(n) => Err(n),
    };
    let on = at.on.map(|v| b.id(v)).transpose()?;
    let work = ControlKind::Loop { body: Box::new(body.repeat), limit, on, state, captured };
    Ok(Ok(control(b, work, &results)))
}
