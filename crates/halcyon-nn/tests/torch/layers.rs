use crate::{arrays, difference, flag, float, int, ints, json};
use halcyon::Attention;
use halcyon::prelude::*;
use halcyon_formats::npz::Npz;
use halcyon_nn::*;
use serde_json::Value;

/// A layer of a case, and its forward.
struct Case {
    module: Box<dyn Module>,
    forward: Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>>>,
}

/// A case with a module that maps one tensor to one.
fn simple<M: Forward + Clone + 'static>(module: M) -> Case {
    let m = module.clone();
    Case { module: Box::new(module), forward: Box::new(move |x| Ok(vec![m.forward(&x[0])])) }
}

fn function(f: impl Fn(&[Tensor]) -> Result<Tensor> + 'static) -> Case {
    Case { module: Box::new(()), forward: Box::new(move |x| Ok(vec![f(x)?])) }
}

fn array<const N: usize>(c: &Value, key: &str) -> [usize; N] {
    ints(c, key).try_into().unwrap()
}

macro_rules! by_axes {
    ($c:expr, $make:ident) => {
        match int($c, "n") {
            1 => $make::<1>($c),
            2 => $make::<2>($c),
            _ => $make::<3>($c),
        }
    };
}

fn conv_options<const N: usize>(c: &Value) -> ConvOptions<N> {
    ConvOptions {
        stride: array(c, "stride"),
        padding: array(c, "padding"),
        dilation: array(c, "dilation"),
        groups: int(c, "groups"),
        bias: flag(c, "bias"),
        output_padding: if c["output_padding"].is_array() { array(c, "output_padding") } else { [0; N] },
        ..ConvOptions::default()
    }
}

fn conv(b: &Backend, c: &Value, transposed: bool) -> Result<Case> {
    let (i, o) = (int(c, "inputs"), int(c, "outputs"));
    Ok(match (int(c, "n"), transposed) {
        (1, false) => simple(Conv1d::with(b, i, o, array(c, "kernel"), conv_options(c))?),
        (2, false) => simple(Conv2d::with(b, i, o, array(c, "kernel"), conv_options(c))?),
        (_, false) => simple(Conv3d::with(b, i, o, array(c, "kernel"), conv_options(c))?),
        (1, true) => simple(ConvTranspose1d::with(b, i, o, array(c, "kernel"), conv_options(c))?),
        (2, true) => simple(ConvTranspose2d::with(b, i, o, array(c, "kernel"), conv_options(c))?),
        (_, true) => simple(ConvTranspose3d::with(b, i, o, array(c, "kernel"), conv_options(c))?),
    })
}

fn pool_options<const N: usize>(c: &Value) -> PoolOptions<N> {
    PoolOptions {
        kernel: array(c, "kernel"),
        stride: array(c, "stride"),
        padding: array(c, "padding"),
        dilation: if c["dilation"].is_array() { array(c, "dilation") } else { [1; N] },
        count_include_pad: c["count_include_pad"].as_bool().unwrap_or(true),
    }
}

fn max_pool<const N: usize>(c: &Value) -> Result<Case> {
    let p = MaxPool::<N>::new(pool_options(c))?;
    Ok(function(move |x| Ok(p.forward(&x[0]))))
}

fn avg_pool<const N: usize>(c: &Value) -> Result<Case> {
    let p = AvgPool::<N>::new(pool_options(c))?;
    Ok(function(move |x| Ok(p.forward(&x[0]))))
}

fn adaptive_avg_pool<const N: usize>(c: &Value) -> Result<Case> {
    let p = AdaptiveAvgPool::<N>(array(c, "kernel"));
    Ok(function(move |x| Ok(p.forward(&x[0]))))
}

fn norm(c: &Value) -> NormOptions {
    NormOptions {
        eps: float(c, "eps"),
        affine: flag(c, "affine"),
        bias: c["bias"].as_bool().unwrap_or(true),
        ..NormOptions::default()
    }
}

fn recurrent(c: &Value) -> RecurrentOptions {
    RecurrentOptions {
        layers: int(c, "layers"),
        bias: flag(c, "bias"),
        batch_first: flag(c, "batch_first"),
        bidirectional: flag(c, "bidirectional"),
        ..RecurrentOptions::default()
    }
}

fn activation(c: &Value) -> Activation {
    let (p, axis) = (float(c, "parameter"), c["axis"].as_i64().unwrap());
    match c["name"].as_str().unwrap() {
        "relu" => Activation::Relu,
        "leaky_relu" => Activation::LeakyRelu(p),
        "elu" => Activation::Elu(p),
        "gelu" => Activation::Gelu(Gelu::Exact),
        "gelu_tanh" => Activation::Gelu(Gelu::Tanh),
        "silu" => Activation::Silu,
        "sigmoid" => Activation::Sigmoid,
        "tanh" => Activation::Tanh,
        "softplus" => Activation::Softplus,
        "mish" => Activation::Mish,
        "hardswish" => Activation::HardSwish,
        "softmax" => Activation::Softmax(axis),
        _ => Activation::LogSoftmax(axis),
    }
}

fn reduction(c: &Value) -> Reduction {
    match c["reduction"].as_str() {
        Some("sum") => Reduction::Sum,
        Some("none") => Reduction::None,
        _ => Reduction::Mean,
    }
}

fn loss(kind: &str, c: &Value) -> Case {
    let (r, c, kind) = (reduction(c), c.clone(), kind.to_string());
    function(move |x| {
        let p = c["parameter"].as_f64().unwrap_or(1.0);
        let options = || CrossEntropyOptions {
            weight: flag(&c, "weight").then(|| &x[2]),
            ignore_index: c["ignore"].as_i64(),
            label_smoothing: float(&c, "smoothing"),
            reduction: r,
        };
        Ok(match kind.as_str() {
            "mse_loss" => mse_loss(&x[0], &x[1], r),
            "l1_loss" => l1_loss(&x[0], &x[1], r),
            "huber_loss" => huber_loss(&x[0], &x[1], p, r),
            "smooth_l1_loss" => smooth_l1_loss(&x[0], &x[1], p, r),
            "kl_div" => kl_div(&x[0], &x[1], r),
            "binary_cross_entropy" => binary_cross_entropy(&x[0], &x[1], r),
            "binary_cross_entropy_with_logits" => {
                let weight = flag(&c, "weight").then(|| &x[2]);
                let pos_weight = flag(&c, "pos_weight").then(|| &x[2 + usize::from(weight.is_some())]);
                binary_cross_entropy_with_logits(
                    &x[0],
                    &x[1],
                    BceOptions { weight, pos_weight, reduction: r },
                )
            }
            "cross_entropy" => cross_entropy(&x[0], &x[1], options()),
            "nll_loss" => nll_loss(&x[0], &x[1], options()),
            _ => {
                let o = CtcOptions {
                    blank: int(&c, "blank"),
                    reduction: r,
                    zero_infinity: flag(&c, "zero_infinity"),
                };
                ctc_loss(
                    &x[0].log_softmax(2),
                    &x[1],
                    &ints(&c, "input_lengths"),
                    &ints(&c, "target_lengths"),
                    o,
                )?
            }
        })
    })
}

fn case(b: &Backend, c: &Value) -> Result<Case> {
    let kind = c["kind"].as_str().unwrap();
    Ok(match kind {
        "linear" => {
            let o = LinearOptions { bias: flag(c, "bias"), ..LinearOptions::default() };
            simple(Linear::with(b, int(c, "inputs"), int(c, "outputs"), o)?)
        }
        k if k.starts_with("conv") => conv(b, c, k.contains("transpose"))?,
        "embedding" => {
            let padding_index = c["padding_index"].as_u64().map(|p| p as usize);
            let o = EmbeddingOptions { padding_index, ..EmbeddingOptions::default() };
            simple(Embedding::with(b, int(c, "count"), int(c, "size"), o)?)
        }
        "layer_norm" => simple(LayerNorm::with(b, ints(c, "dims"), norm(c))?),
        "rms_norm" => simple(RmsNorm::with(b, ints(c, "dims")[0], norm(c))?),
        "group_norm" => simple(GroupNorm::with(b, int(c, "groups"), int(c, "channels"), norm(c))?),
        "batch_norm" => {
            let o = BatchNormOptions {
                eps: float(c, "eps"),
                momentum: float(c, "momentum"),
                affine: flag(c, "affine"),
                ..BatchNormOptions::default()
            };
            let m = BatchNorm::with(b, int(c, "channels"), o)?;
            let (training_mode, n) = (flag(c, "training"), m.clone());
            let forward = move |x: &[Tensor]| {
                // Inside of `loss_and_grads`, modules behave as in training.
                Ok(vec![if training_mode { n.forward(&x[0]) } else { evaluation(|| n.forward(&x[0])) }])
            };
            Case { module: Box::new(m), forward: Box::new(forward) }
        }
        "attention" => {
            let o = MultiHeadAttentionOptions {
                bias: flag(c, "bias"),
                batch_first: flag(c, "batch_first"),
                ..MultiHeadAttentionOptions::default()
            };
            let m = MultiHeadAttention::with(b, int(c, "size"), int(c, "heads"), o)?;
            let (a, causal, masked) = (m.clone(), flag(c, "causal"), flag(c, "mask"));
            let forward = move |x: &[Tensor]| {
                let o = Attention { mask: masked.then(|| &x[3]), causal, scale: None };
                Ok(vec![a.forward(&x[0], &x[1], &x[2], o)])
            };
            Case { module: Box::new(m), forward: Box::new(forward) }
        }
        "lstm" => {
            let m = Lstm::with(b, int(c, "inputs"), int(c, "hidden"), recurrent(c))?;
            let l = m.clone();
            let forward = move |x: &[Tensor]| {
                let state = x.get(1).map(|h| LstmState { hidden: h.clone(), cell: x[2].clone() });
                let (y, s) = l.forward(&x[0], state.as_ref())?;
                Ok(vec![y, s.hidden, s.cell])
            };
            Case { module: Box::new(m), forward: Box::new(forward) }
        }
        "gru" => {
            let m = Gru::with(b, int(c, "inputs"), int(c, "hidden"), recurrent(c))?;
            let g = m.clone();
            let forward = move |x: &[Tensor]| {
                let (y, h) = g.forward(&x[0], x.get(1))?;
                Ok(vec![y, h])
            };
            Case { module: Box::new(m), forward: Box::new(forward) }
        }
        "max_pool" => by_axes!(c, max_pool)?,
        "avg_pool" => by_axes!(c, avg_pool)?,
        "adaptive_avg_pool" => by_axes!(c, adaptive_avg_pool)?,
        "activation" => {
            let a = activation(c);
            function(move |x| Ok(a.forward(&x[0])))
        }
        other => loss(other, c),
    })
}

/// A module whose parameters include the inputs, so that gradients with respect to the inputs are computed
/// too.
struct WithInputs<'c> {
    module: &'c dyn Module,
    inputs: Vec<Option<Param>>,
}

impl Module for WithInputs<'_> {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit.child("p", self.module);
        for (i, x) in self.inputs.iter().enumerate() {
            visit.child(&format!("x{i}"), x);
        }
    }
}

/// Checks one case. Returns the largest difference of the results and buffers, and that of the gradients.
fn check(b: &Backend, name: &str, c: &Value, data: &Npz, has: &dyn Fn(&str) -> bool) -> Result<(f64, f64)> {
    let get = |key: &str| data.get(&format!("{name}.{key}"));
    let case = case(b, c)?;
    let weights: Vec<String> =
        c["weights"].as_array().unwrap().iter().map(|w| w.as_str().unwrap().to_string()).collect();
    let known = |n: &str| weights.iter().any(|w| w == n).then(|| get(&format!("p.{n}")));
    case.module.load_state_dict(&known, &weights, Strictness::Strict)?;
    let inputs = (0..int(c, "inputs_count"))
        .map(|i| Tensor::from_data(b, &get(&format!("x{i}"))?))
        .collect::<Result<Vec<_>>>()?;
    let as_params = inputs.iter().map(|x| Ok(x.dtype()?.is_float().then(|| Param::new(x.clone()))));
    let all = WithInputs { module: &*case.module, inputs: as_params.collect::<Result<_>>()? };
    let mut out = vec![];
    let (_, grads) = loss_and_grads(&all, |m| {
        let given: Vec<Tensor> = m
            .inputs
            .iter()
            .zip(&inputs)
            .map(|(p, x)| p.as_ref().map_or_else(|| x.clone(), Param::value))
            .collect();
        out = (case.forward)(&given)?;
        let mut total = Tensor::zeros(b, [0usize; 0], DType::F32);
        for (i, y) in out.iter().enumerate() {
            total = total + (y * Tensor::from_data(b, &get(&format!("w{i}"))?)?).sum(..);
        }
        Ok(total.sum(..))
    })?;
    let mut worst = (0.0f64, 0.0f64);
    for (i, y) in out.iter().enumerate() {
        worst.0 = worst.0.max(difference(y, &get(&format!("y{i}"))?));
    }
    for (path, g) in grads.iter() {
        let key = format!("d{path}");
        if has(&format!("{name}.{key}")) {
            worst.1 = worst.1.max(difference(g, &get(&key)?));
        }
    }
    for (path, slot) in case.module.buffers() {
        worst.0 = worst.0.max(difference(&slot.value(), &get(&format!("b.{path}"))?));
    }
    Ok(worst)
}

#[test]
fn layers_and_losses_follow_torch() {
    let (cases, data) = (json("layers.json"), arrays("layers.npz"));
    let names: std::collections::HashSet<&str> = data.names().collect();
    let has = |n: &str| names.contains(n);
    let mut compared = 0;
    for b in halcyon_test::devices::devices("layers_and_losses_follow_torch", Level::O2) {
        // A sample. On devices other than the CPU every case compiles programs, so it is smaller.
        let every = halcyon_test::one_in(if b.id().starts_with("cpu") { 3 } else { 20 });
        let first = halcyon_test::drawn(b.id(), every).unwrap_or(0);
        let mut failed = vec![];
        for (i, c) in cases.iter().enumerate().skip(first).step_by(every) {
            match check(&b, &i.to_string(), c, &data, &has) {
                Ok((y, g)) if y <= 2e-5 && g <= 5e-5 => compared += 1,
                Ok((y, g)) => {
                    failed.push(format!("{i}: results differ by {y:.1e}, gradients by {g:.1e}: {c}"))
                }
                Err(e) => failed.push(format!("{i}: {e}: {c}")),
            }
        }
        assert!(failed.is_empty(), "{}: {} cases\n{}", b.id(), failed.len(), failed.join("\n"));
    }
    assert!(compared >= 500 / halcyon_test::one_in(3), "{compared} cases");
}
