//! Recurrent layers, unrolled: one product multiplies the inputs of all time steps by the input weights, then
//! a few nodes compute each time step. The two directions of a bidirectional layer run as one batch if they
//! have the same activations.

use super::activation::hard;
use super::{Row, row};
use crate::onnx::build::{Builder, Range, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

const ATTRS: &[&str] = &[
    "activation_alpha",
    "activation_beta",
    "activations",
    "clip",
    "direction",
    "hidden_size",
    "input_forget",
    "layout",
    "linear_before_reset",
    // An attribute of opset versions below 7 that says whether result 0 is wanted. It is ignored, because
    // results that nothing uses are never computed.
    "output_sequence",
];

pub(super) const ROWS: &[Row] = &[
    row("GRU", 1, ATTRS, |b, c| layer(b, c, Kind::Gru)),
    row("LSTM", 1, ATTRS, |b, c| layer(b, c, Kind::Lstm)),
    row("RNN", 1, ATTRS, |b, c| layer(b, c, Kind::Rnn)),
];

/// Limit on the number of time steps, each of which adds nodes to the graph.
const STEPS: usize = 8192;

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Rnn,
    Gru,
    Lstm,
}

impl Kind {
    fn gates(self) -> usize {
        match self {
            Kind::Rnn => 1,
            Kind::Gru => 3,
            Kind::Lstm => 4,
        }
    }

    fn activations(self) -> &'static [&'static str] {
        match self {
            Kind::Rnn => &["Tanh"],
            Kind::Gru => &["Sigmoid", "Tanh"],
            Kind::Lstm => &["Sigmoid", "Tanh", "Tanh"],
        }
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Activation {
    Affine(f32, f32),
    Elu(f32),
    HardSigmoid(f32, f32),
    LeakyRelu(f32),
    Relu,
    ScaledTanh(f32, f32),
    Sigmoid,
    Softplus,
    Softsign,
    Tanh,
    ThresholdedRelu(f32),
}

impl Activation {
    /// Takes the activation's parameters from the front of `alpha` and `beta`. Once these are used up, the
    /// activation's defaults apply. `ScaledTanh` has no defaults, so its missing parameters are NaN. `None`
    /// for an unknown name.
    fn parse(
        name: &str,
        alpha: &mut impl Iterator<Item = f32>,
        beta: &mut impl Iterator<Item = f32>,
    ) -> Option<Activation> {
        let mut a = |d: f32| alpha.next().unwrap_or(d);
        let mut b = |d: f32| beta.next().unwrap_or(d);
        Some(match name.to_ascii_lowercase().as_str() {
            "affine" => Activation::Affine(a(1.0), b(0.0)),
            "elu" => Activation::Elu(a(1.0)),
            "hardsigmoid" => Activation::HardSigmoid(a(0.2), b(0.5)),
            "leakyrelu" => Activation::LeakyRelu(a(0.01)),
            "relu" => Activation::Relu,
            "scaledtanh" => Activation::ScaledTanh(a(f32::NAN), b(f32::NAN)),
            "sigmoid" => Activation::Sigmoid,
            "softplus" => Activation::Softplus,
            "softsign" => Activation::Softsign,
            "tanh" => Activation::Tanh,
            "thresholdedrelu" => Activation::ThresholdedRelu(a(1.0)),
            _ => return None,
        })
    }

    fn apply(self, b: &mut Builder, x: &Value) -> Result<Value> {
        let zero = b.lit(x, 0.0);
        let scaled = |b: &mut Builder, x: &Value, k: f32| {
            let k = b.lit(x, k);
            b.scalar(S::Mul, &[x, &k])
        };
        match self {
            Activation::Relu => b.scalar(S::Relu, &[x]),
            Activation::Tanh => b.scalar(S::Tanh, &[x]),
            Activation::Sigmoid => b.scalar(S::Sigmoid, &[x]),
            Activation::HardSigmoid(a, d) => hard(b, x, a.into(), d.into()),
            Activation::Affine(a, d) => {
                let (y, d) = (scaled(b, x, a)?, b.lit(x, d));
                b.scalar(S::Add, &[&y, &d])
            }
            Activation::ScaledTanh(a, d) => {
                let y = scaled(b, x, d)?;
                let y = b.scalar(S::Tanh, &[&y])?;
                scaled(b, &y, a)
            }
            Activation::LeakyRelu(a) => {
                let low = scaled(b, x, a)?;
                let below = b.scalar(S::Lt, &[x, &zero])?;
                b.scalar(S::Select, &[&below, &low, x])
            }
            Activation::Elu(a) => {
                let e = b.scalar(S::Expm1, &[x])?;
                let low = scaled(b, &e, a)?;
                let below = b.scalar(S::Lt, &[x, &zero])?;
                b.scalar(S::Select, &[&below, &low, x])
            }
            Activation::ThresholdedRelu(a) => {
                let a = b.lit(x, a);
                let above = b.scalar(S::Ge, &[x, &a])?;
                b.scalar(S::Select, &[&above, x, &zero])
            }
            Activation::Softsign => {
                let (a, top) = (b.scalar(S::Abs, &[x])?, b.lit(x, 1.0));
                let d = b.scalar(S::Add, &[&a, &top])?;
                b.scalar(S::Div, &[x, &d])
            }
            // max(x, 0) + log1p(exp(-|x|)), which does not overflow.
            Activation::Softplus => {
                let a = b.scalar(S::Abs, &[x])?;
                let n = b.scalar(S::Neg, &[&a])?;
                let e = b.scalar(S::Exp, &[&n])?;
                let l = b.scalar(S::Log1p, &[&e])?;
                let p = b.scalar(S::Relu, &[x])?;
                b.scalar(S::Add, &[&p, &l])
            }
        }
    }
}

/// The operands that all time steps share, in the compute type. `d` is the number of directions.
struct Layer {
    kind: Kind,
    acts: Vec<Activation>,
    clip: Option<f32>,
    input_forget: bool,
    linear_before_reset: bool,
    hidden: Dim,
    /// Transposed recurrent weights, `[d, h, gates * h]`, where `h` is the hidden size.
    r: Value,
    /// Recurrent bias of the hidden gate, `[d, 1, h]`, if the reset gate multiplies it.
    rb: Option<Value>,
    /// Peephole weights, `[d, 1, 3 * h]`.
    p: Option<Value>,
}

/// The hidden state and, for LSTM, the cell state of a layer, `[d, b, h]`, with the batch size `b`.
type State = (Value, Option<Value>);

/// Returns the part of `x` that belongs to `n` gates from gate `at` on, along the last axis.
fn gates(b: &mut Builder, x: &Value, at: usize, n: usize, hidden: Dim) -> Result<Value> {
    b.narrow(x, x.rank() - 1, hidden.mul(Dim::from(at)), hidden.mul(Dim::from(n)))
}

fn matmul(b: &mut Builder, x: &Value, w: &Value) -> Result<Value> {
    let ids = b.ids(&[x, w])?;
    let id = b.g.matmul(ids[0], ids[1])?;
    Ok(b.value(id))
}

fn add(b: &mut Builder, x: &Value, y: &Value) -> Result<Value> {
    b.scalar(S::Add, &[x, y])
}

fn mul(b: &mut Builder, x: &Value, y: &Value) -> Result<Value> {
    b.scalar(S::Mul, &[x, y])
}

impl Layer {
    /// Applies activation `i` to the clipped operand.
    fn activate(&self, b: &mut Builder, i: usize, x: &Value) -> Result<Value> {
        let x = match self.clip {
            Some(t) => {
                let (lo, hi) = (b.lit(x, -t), b.lit(x, t));
                let y = b.scalar(S::Max, &[x, &lo])?;
                b.scalar(S::Min, &[&y, &hi])?
            }
            None => x.clone(),
        };
        self.acts[i % self.acts.len()].apply(b, &x)
    }

    /// Returns `x + p * c`, where `p` are the weights of peephole `i`.
    fn peep(&self, b: &mut Builder, x: &Value, i: usize, c: &Value) -> Result<Value> {
        let Some(p) = &self.p else { return Ok(x.clone()) };
        let p = gates(b, p, i, 1, self.hidden)?;
        let pc = mul(b, &p, c)?;
        add(b, x, &pc)
    }

    /// Computes one time step. `x` is the input times the input weights, plus the bias, `[d, b, gates * h]`.
    fn step(&self, b: &mut Builder, x: &Value, (h, cell): &State) -> Result<State> {
        match (self.kind, cell) {
            (Kind::Lstm, Some(cell)) => self.lstm(b, x, h, cell),
            (Kind::Gru, _) => self.gru(b, x, h),
            _ => {
                let hr = matmul(b, h, &self.r)?;
                let s = add(b, x, &hr)?;
                Ok((self.activate(b, 0, &s)?, None))
            }
        }
    }

    /// `h' = (1 - z) g + z h`, with the update gate z and the candidate g, which depends on h through the
    /// reset gate r.
    fn gru(&self, b: &mut Builder, x: &Value, h: &Value) -> Result<State> {
        let n = self.hidden;
        let (xg, xh) = (gates(b, x, 0, 2, n)?, gates(b, x, 2, 1, n)?);
        let (hg, linear) = if self.linear_before_reset {
            let hr = matmul(b, h, &self.r)?;
            (gates(b, &hr, 0, 2, n)?, Some(gates(b, &hr, 2, 1, n)?))
        } else {
            let r = gates(b, &self.r, 0, 2, n)?;
            (matmul(b, h, &r)?, None)
        };
        let s = add(b, &xg, &hg)?;
        let s = self.activate(b, 0, &s)?;
        let (z, r) = (gates(b, &s, 0, 1, n)?, gates(b, &s, 1, 1, n)?);
        let hh = match linear {
            Some(mut hh) => {
                if let Some(rb) = &self.rb {
                    hh = add(b, &hh, rb)?;
                }
                mul(b, &r, &hh)?
            }
            None => {
                let (rh, w) = (mul(b, &r, h)?, gates(b, &self.r, 2, 1, n)?);
                matmul(b, &rh, &w)?
            }
        };
        let s = add(b, &xh, &hh)?;
        let g = self.activate(b, 1, &s)?;
        let top = b.lit(&z, 1.0);
        let keep = b.scalar(S::Sub, &[&top, &z])?;
        let (new, old) = (mul(b, &keep, &g)?, mul(b, &z, h)?);
        Ok((add(b, &new, &old)?, None))
    }

    /// `c' = f c + i g`, `h' = o act(c')`, with the input gate i, output gate o, forget gate f and candidate
    /// g.
    fn lstm(&self, b: &mut Builder, x: &Value, h: &Value, cell: &Value) -> Result<State> {
        let n = self.hidden;
        let hr = matmul(b, h, &self.r)?;
        let s = add(b, x, &hr)?;
        let (i, o) = (gates(b, &s, 0, 1, n)?, gates(b, &s, 1, 1, n)?);
        let (f, g) = (gates(b, &s, 2, 1, n)?, gates(b, &s, 3, 1, n)?);
        let i = self.peep(b, &i, 0, cell)?;
        let i = self.activate(b, 0, &i)?;
        let f = if self.input_forget {
            let top = b.lit(&i, 1.0);
            b.scalar(S::Sub, &[&top, &i])?
        } else {
            let f = self.peep(b, &f, 2, cell)?;
            self.activate(b, 0, &f)?
        };
        let g = self.activate(b, 1, &g)?;
        let (old, new) = (mul(b, &f, cell)?, mul(b, &i, &g)?);
        let cell = add(b, &old, &new)?;
        let o = self.peep(b, &o, 1, &cell)?;
        let o = self.activate(b, 0, &o)?;
        let y = self.acts[2 % self.acts.len()].apply(b, &cell)?;
        Ok((mul(b, &o, &y)?, Some(cell)))
    }
}

/// The activations of each direction.
fn activations(c: &Call<'_>, kind: Kind, dirs: usize) -> Result<Vec<Vec<Activation>>> {
    let each = kind.activations();
    let names = match c.strings("activations")? {
        Some(n) => n,
        None => each.repeat(dirs).into_iter().map(String::from).collect(),
    };
    if names.len() != each.len() * dirs {
        return Err(c.invalid(format!("{} activations, {} expected", names.len(), each.len() * dirs)));
    }
    let mut alpha = c.floats("activation_alpha")?.unwrap_or(&[]).iter().copied();
    let mut beta = c.floats("activation_beta")?.unwrap_or(&[]).iter().copied();
    let all = names
        .iter()
        .map(|n| {
            Activation::parse(n, &mut alpha, &mut beta)
                .ok_or_else(|| c.invalid(format!("activation '{n}' is not known")))
        })
        .collect::<Result<Vec<Activation>>>()?;
    if all.iter().any(|a| matches!(a, Activation::ScaledTanh(a, b) if a.is_nan() || b.is_nan())) {
        return Err(c.unsupported(
            "the activation ScaledTanh without its factors alpha and beta",
            "Give activation_alpha and activation_beta",
        ));
    }
    Ok(all.chunks(each.len()).map(<[Activation]>::to_vec).collect())
}

fn backwards(b: &mut Builder, x: &Value, axis: usize) -> Result<Value> {
    let mut r: Vec<Range> =
        x.shape().iter().map(|&len| Range { start: Dim::from(0), step: 1, len }).collect();
    r[axis] = Range { start: x.shape()[axis].offset(-1), step: -1, len: x.shape()[axis] };
    b.slice(x, &r)
}

/// Returns the part of `x` for `n` directions from direction `at` on, along axis 0.
fn directions(b: &mut Builder, x: &Value, at: usize, n: usize) -> Result<Value> {
    b.narrow(x, 0, Dim::from(at), Dim::from(n))
}

/// Sizes and directions of a layer.
struct Sizes {
    steps: usize,
    batch: Dim,
    hidden: Dim,
    /// Whether each direction runs backwards.
    back: Vec<bool>,
}

/// Checks that operand `i` has the shape `want` and the dtype of `like`, and casts it to the compute type.
fn operand(b: &mut Builder, c: &Call<'_>, i: usize, like: &Value, want: &[Dim]) -> Result<Option<Value>> {
    let Some(v) = c.opt(i) else { return Ok(None) };
    if v.shape() != &Shape::from(want) || v.dtype() != like.dtype() {
        return Err(c.invalid(format!(
            "operand {i} is {}, expected {}{}",
            v.ty,
            like.dtype(),
            Shape::from(want)
        )));
    }
    b.cast(v, like.dtype().compute()).map(Some)
}

fn layer(b: &mut Builder, c: &Call<'_>, kind: Kind) -> Result<Vec<Value>> {
    let (x, r) = (c.arg(0)?, c.arg(2)?);
    if x.rank() != 3 || r.rank() != 3 || !x.dtype().is_float() {
        return Err(c.invalid(format!("the input X is {} and the recurrent weights R are {}; both must have rank 3, and X must be a float", x.ty, r.ty)));
    }
    let batch_first = c.int("layout", 0)? != 0;
    let back = backward_directions(c)?;
    let dirs = Dim::from(back.len());
    let (time, batch) = if batch_first { (1, 0) } else { (0, 1) };
    let steps = x.shape()[time].known();
    let steps = steps
        .ok_or_else(|| c.unsupported("a symbolic number of time steps", "Give concrete input shapes"))?;
    if steps > STEPS {
        return Err(c.unsupported(
            &format!("a sequence of {steps} time steps"),
            "Split it; at most 8192 are unrolled",
        ));
    }
    // Limits the number of nodes of the whole graph, as for unrolled loops, because a model may have many
    // long layers.
    let nodes = b.node_count();
    b.pace(&[], nodes)?;
    let (hidden, wide) = (r.shape()[2], r.shape()[2].mul(Dim::from(kind.gates())));
    if c.opt_int("hidden_size")?.is_some_and(|h| hidden.known().is_some_and(|n| i64::try_from(n) != Ok(h))) {
        return Err(
            c.invalid(format!("hidden_size is not the last dimension of the recurrent weights R, {}", r.ty))
        );
    }
    let s = Sizes { steps, batch: x.shape()[batch], hidden, back };
    let need = |v: Option<Value>, i: usize| v.ok_or_else(|| c.invalid(format!("operand {i} is missing")));
    let w = operand(b, c, 1, x, &[dirs, wide, x.shape()[2]])?;
    let w = need(w, 1)?;
    let r = operand(b, c, 2, x, &[dirs, wide, hidden])?;
    let r = need(r, 2)?;
    let bias = operand(b, c, 3, x, &[dirs, wide.mul(Dim::from(2))])?;
    let lens = c.opt(4);
    if let Some(v) = lens
        && (v.rank() != 1 || v.shape()[0] != s.batch || !v.dtype().is_int())
    {
        return Err(
            c.invalid(format!("sequence_lens is {}, expected a vector of {} integers", v.ty, s.batch))
        );
    }
    let state = if batch_first { [s.batch, dirs, hidden] } else { [dirs, s.batch, hidden] };
    let initial = |b: &mut Builder, i: usize| -> Result<Value> {
        let v = match operand(b, c, i, x, &state)? {
            Some(v) if batch_first => b.permute(&v, &[1, 0, 2])?,
            Some(v) => v,
            None => b.full(x.dtype().compute(), &[dirs, s.batch, hidden].into(), Scalar::F(0.0)),
        };
        Ok(v)
    };
    let h0 = initial(b, 5)?;
    let c0 = if kind == Kind::Lstm { Some(initial(b, 6)?) } else { None };
    let p = match kind {
        Kind::Lstm => operand(b, c, 7, x, &[dirs, hidden.mul(Dim::from(3))])?,
        _ => None,
    };
    let linear_before_reset = kind == Kind::Gru && c.flag("linear_before_reset", false)?;

    let (xb, rb) = match &bias {
        Some(v) => biases(b, v, dirs, hidden, wide, linear_before_reset)?,
        None => (None, None),
    };
    let xs = project(b, x, &w, xb.as_ref(), batch_first, &s)?;
    let masks = lens.map(|v| masks(b, v, &s)).transpose()?;
    let p = p.map(|p| b.reshape(&p, [dirs, Dim::from(1), hidden.mul(Dim::from(3))])).transpose()?;
    let rt = b.permute(&r, &[0, 2, 1])?;
    let clip = c.opt_float("clip")?;
    if clip.is_some_and(|t| t.is_nan() || t < 0.0) {
        return Err(c.invalid("clip is negative or NaN"));
    }

    let acts = activations(c, kind, s.back.len())?;
    let groups = match &acts[..] {
        [f, g] if f != g => vec![(0, 1), (1, 1)],
        all => vec![(0, all.len())],
    };
    let mut parts: Vec<[Option<Value>; 3]> = vec![];
    for (at, n) in groups {
        let cut =
            |b: &mut Builder, v: &Option<Value>| v.as_ref().map(|v| directions(b, v, at, n)).transpose();
        let l = Layer {
            kind,
            acts: acts[at].clone(),
            clip,
            input_forget: kind == Kind::Lstm && c.flag("input_forget", false)?,
            linear_before_reset,
            hidden,
            r: directions(b, &rt, at, n)?,
            rb: cut(b, &rb)?,
            p: cut(b, &p)?,
        };
        let (xs, masks) = (directions(b, &xs, at, n)?, cut(b, &masks)?);
        let state = (directions(b, &h0, at, n)?, cut(b, &c0)?);
        let steps = Steps { xs: &xs, masks: masks.as_ref(), dirs: at..at + n, sequence: c.is_result_used(0) };
        parts.push(unroll(b, &l, steps, state, &s)?);
    }
    let results = if kind == Kind::Lstm { 3 } else { 2 };
    joined(b, &parts, results, &h0, batch_first, x.dtype())
}

/// For each direction, whether it runs backwards.
fn backward_directions(c: &Call<'_>) -> Result<Vec<bool>> {
    match c.string("direction", "forward")? {
        // The default in the first version of the specification has a typo.
        "forward" | "foward" => Ok(vec![false]),
        "reverse" => Ok(vec![true]),
        "bidirectional" => Ok(vec![false, true]),
        other => Err(c.invalid(format!("direction '{other}' is not known"))),
    }
}

/// Returns the bias that is added to the projected input, and the recurrent bias that a reset gate
/// multiplies. The first result is the sum of the input bias and the recurrent bias. With
/// `linear_before_reset`, it leaves out the part of the recurrent bias that is the second result.
fn biases(
    b: &mut Builder,
    v: &Value,
    dirs: Dim,
    hidden: Dim,
    wide: Dim,
    linear_before_reset: bool,
) -> Result<(Option<Value>, Option<Value>)> {
    let (w, r) = (gates(b, v, 0, 1, wide)?, gates(b, v, 1, 1, wide)?);
    if !linear_before_reset {
        return Ok((Some(add(b, &w, &r)?), None));
    }
    let (first, last) = (gates(b, &r, 0, 2, hidden)?, gates(b, &r, 2, 1, hidden)?);
    let last = b.reshape(&last, [dirs, Dim::from(1), hidden])?;
    let (w0, w1) = (gates(b, &w, 0, 2, hidden)?, gates(b, &w, 2, 1, hidden)?);
    let sum = add(b, &w0, &first)?;
    Ok((Some(b.concat(&[&sum, &w1], 1)?), Some(last)))
}

/// Joins the results of the directions, and converts them to the layout of the layer's input and to `dtype`.
/// `unused` takes the place of a result that nothing uses.
fn joined(
    b: &mut Builder,
    parts: &[[Option<Value>; 3]],
    results: usize,
    unused: &Value,
    batch_first: bool,
    dtype: DType,
) -> Result<Vec<Value>> {
    let mut out = vec![];
    for k in 0..results {
        let all: Option<Vec<&Value>> = parts.iter().map(|p| p[k].as_ref()).collect();
        let y = match all.as_deref() {
            None => None,
            Some([y]) => Some((*y).clone()),
            Some(all) => Some(b.concat(all, 0)?),
        };
        let Some(y) = y else {
            out.push(unused.clone());
            continue;
        };
        let y = match (k, batch_first) {
            (0, true) => b.permute(&y, &[2, 1, 0, 3])?,
            (0, false) => b.permute(&y, &[1, 0, 2, 3])?,
            (_, true) => b.permute(&y, &[1, 0, 2])?,
            (_, false) => y,
        };
        out.push(b.cast(&y, dtype)?);
    }
    Ok(out)
}

/// Returns the inputs of all time steps times the input weights, plus the bias: `[d, t, b, gates * h]`. The
/// time steps of each direction are in the order in which that direction processes them.
fn project(
    b: &mut Builder,
    x: &Value,
    w: &Value,
    bias: Option<&Value>,
    batch_first: bool,
    s: &Sizes,
) -> Result<Value> {
    let (dirs, wide, n) = (w.shape()[0], w.shape()[1], w.shape()[2]);
    let x = if batch_first { b.permute(x, &[1, 0, 2])? } else { x.clone() };
    let x = b.cast(&x, w.dtype())?;
    let t = Dim::from(s.steps);
    let x = b.reshape(&x, [t.mul(s.batch), n])?;
    let w = b.reshape(w, [dirs.mul(wide), n])?;
    let w = b.permute(&w, &[1, 0])?;
    let mut y = matmul(b, &x, &w)?;
    if let Some(v) = bias {
        let v = b.reshape(v, [dirs.mul(wide)])?;
        y = add(b, &y, &v)?;
    }
    let y = b.reshape(&y, [t, s.batch, dirs, wide])?;
    let y = b.permute(&y, &[2, 0, 1, 3])?;
    in_step_order(b, &y, 1, s)
}

/// Reverses `axis` of `x`, the time, for the directions that run backwards. Axis 0 of `x` is the direction.
fn in_step_order(b: &mut Builder, x: &Value, axis: usize, s: &Sizes) -> Result<Value> {
    if s.steps < 2 || !s.back.contains(&true) {
        return Ok(x.clone());
    }
    reverse_time(b, x, axis, &s.back)
}

fn reverse_time(b: &mut Builder, x: &Value, axis: usize, back: &[bool]) -> Result<Value> {
    if back.iter().all(|r| *r) {
        return backwards(b, x, axis);
    }
    let mut parts = vec![];
    for (d, &r) in back.iter().enumerate() {
        let p = directions(b, x, d, 1)?;
        parts.push(if r { backwards(b, &p, axis)? } else { p });
    }
    let parts: Vec<&Value> = parts.iter().collect();
    if parts.len() == 1 { Ok(parts[0].clone()) } else { b.concat(&parts, 0) }
}

/// For each time step of each direction, whether it lies within each sequence: `[d, t, b, 1]`.
fn masks(b: &mut Builder, lens: &Value, s: &Sizes) -> Result<Value> {
    let lens = b.cast(lens, DType::I64)?;
    let lens = b.reshape(&lens, [s.batch, Dim::from(1)])?;
    let i = super::index::along(b, Dim::from(s.steps), 1, 4)?;
    let i =
        b.expand(&i, &[Dim::from(s.back.len()), Dim::from(s.steps), Dim::from(1), Dim::from(1)].into())?;
    let i = in_step_order(b, &i, 1, s)?;
    b.scalar(S::Lt, &[&i, &lens])
}

/// What the time steps of some directions read: the inputs, the masks of sequences that end early, and the
/// numbers of the directions.
struct Steps<'a> {
    xs: &'a Value,
    masks: Option<&'a Value>,
    dirs: std::ops::Range<usize>,
    /// Whether the outputs of all time steps are used.
    sequence: bool,
}

/// Returns the outputs of all time steps (`[d, t, b, h]` in the order of time, if they are used) and the
/// final states.
fn unroll(
    b: &mut Builder,
    l: &Layer,
    steps: Steps<'_>,
    mut state: State,
    s: &Sizes,
) -> Result<[Option<Value>; 3]> {
    let Steps { xs, masks, dirs, sequence } = steps;
    let n = Dim::from(dirs.len());
    let row = [n, Dim::from(1), s.batch, s.hidden];
    let zero = Scalar::F(0.0);
    let mut ys = vec![];
    for t in 0..s.steps {
        let x = b.narrow(xs, 1, Dim::from(t), Dim::from(1))?;
        let x = b.reshape(&x, [n, s.batch, xs.shape()[3]])?;
        let (mut h, mut cell) = l.step(b, &x, &state)?;
        let mut y = h.clone();
        if let Some(m) = masks {
            // After the end of a sequence, its state does not change and its outputs are zero.
            let m = b.narrow(m, 1, Dim::from(t), Dim::from(1))?;
            let m = b.reshape(&m, [n, s.batch, Dim::from(1)])?;
            let none = b.lit(&h, zero);
            y = b.scalar(S::Select, &[&m, &h, &none])?;
            h = b.scalar(S::Select, &[&m, &h, &state.0])?;
            if let (Some(new), Some(old)) = (&cell, &state.1) {
                cell = Some(b.scalar(S::Select, &[&m, new, old])?);
            }
        }
        state = (h, cell);
        if sequence {
            ys.push(b.reshape(&y, row)?);
        }
    }
    let y = match ys.len() {
        _ if !sequence => None,
        0 => Some(b.full(xs.dtype(), &[n, Dim::from(0), s.batch, s.hidden].into(), zero)),
        1 => ys.pop(),
        _ => {
            let all = b.concat(&ys.iter().collect::<Vec<_>>(), 1)?;
            let back = &s.back[dirs];
            Some(if back.contains(&true) { reverse_time(b, &all, 1, back)? } else { all })
        }
    };
    Ok([y, Some(state.0), state.1])
}
