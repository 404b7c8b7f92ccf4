//! Reads values of configurations, and the parts that most families share.

use crate::rope::{Layout, Rope, Scaling, Yarn};
use crate::spec::*;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::{Array, Gguf, Metadata, Value};
use serde_json::Value as Json;
use std::path::Path;

/// `config.json` of a folder.
pub(crate) struct Hf<'a> {
    json: &'a Json,
    file: String,
}

impl<'a> Hf<'a> {
    pub(crate) fn new(json: &'a Json, folder: &Path) -> Hf<'a> {
        Hf { json, file: folder.join("config.json").display().to_string() }
    }

    pub(crate) fn bad(&self, what: impl Into<String>) -> Error {
        Error::Format { file: self.file.clone(), what: what.into() }
    }

    /// A value that is there and not null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Json> {
        self.json.get(key).filter(|v| !v.is_null())
    }

    fn need(&self, key: &str) -> Result<&'a Json> {
        self.get(key).ok_or_else(|| self.bad(format!("it has no '{key}'")))
    }

    pub(crate) fn str(&self, key: &str) -> Result<&'a str> {
        self.need(key)?.as_str().ok_or_else(|| self.bad(format!("'{key}' must be a string")))
    }

    fn to_usize(&self, key: &str, v: &Json) -> Result<usize> {
        let n = v.as_u64().and_then(|n| usize::try_from(n).ok());
        n.ok_or_else(|| self.bad(format!("'{key}' must be a number that is not negative, but it is {v}")))
    }

    pub(crate) fn usize(&self, key: &str) -> Result<usize> {
        self.to_usize(key, self.need(key)?)
    }

    pub(crate) fn maybe_usize(&self, key: &str) -> Result<Option<usize>> {
        self.get(key).map(|v| self.to_usize(key, v)).transpose()
    }

    /// The first of these keys that is there.
    pub(crate) fn usize_of(&self, keys: &[&str]) -> Result<usize> {
        let found = keys.iter().find(|k| self.get(k).is_some()).unwrap_or(&keys[0]);
        self.usize(found)
    }

    pub(crate) fn maybe_f64(&self, key: &str) -> Result<Option<f64>> {
        let number = |v: &Json| v.as_f64().ok_or_else(|| self.bad(format!("'{key}' must be a number")));
        self.get(key).map(number).transpose()
    }

    pub(crate) fn f64(&self, key: &str) -> Result<f64> {
        self.maybe_f64(key)?.ok_or_else(|| self.bad(format!("it has no '{key}'")))
    }

    /// `false` if the key is absent.
    pub(crate) fn flag(&self, key: &str) -> bool {
        self.get(key).and_then(Json::as_bool).unwrap_or(false)
    }

    fn floats(&self, at: &Json, key: &str) -> Result<Vec<f64>> {
        let list = at.get(key).and_then(Json::as_array);
        let list = list.ok_or_else(|| self.bad(format!("the rope parameters have no list '{key}'")))?;
        let all: Option<Vec<f64>> = list.iter().map(Json::as_f64).collect();
        all.ok_or_else(|| self.bad(format!("'{key}' must be a list of numbers")))
    }

    /// Whether layer `i` attends to a window only, by `layer_types`.
    pub(crate) fn slides(&self, i: usize) -> Option<bool> {
        let types = self.get("layer_types")?.as_array()?;
        Some(types.get(i)?.as_str()? == "sliding_attention")
    }

    /// Whether layer `i` is one of `kind`, by `layer_types`.
    pub(crate) fn layer_is(&self, i: usize, kinds: &[&str]) -> Option<bool> {
        let types = self.get("layer_types").or(self.get("layers_block_type"))?.as_array()?;
        Some(kinds.contains(&types.get(i)?.as_str()?))
    }

    /// The activation of the feed-forward part.
    pub(crate) fn activation(&self, key: &str) -> Result<Activation> {
        Ok(match self.str(key)? {
            "silu" | "swish" => Activation::Silu,
            "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Activation::GeluTanh,
            "gelu" | "gelu_python" => Activation::Gelu,
            "relu" => Activation::Relu,
            "relu2" => Activation::ReluSquared,
            other => {
                return Err(Error::unsupported(
                    format!("the activation '{other}' ({key})"),
                    "Use a model with silu, gelu, gelu_pytorch_tanh, relu or relu2",
                ));
            }
        })
    }

    /// The rotation for heads of `size` elements. `kind` is the kind of layer, if they differ.
    pub(crate) fn rope(&self, size: usize, kind: Option<&str>) -> Result<Rope> {
        self.rope_of(size, kind, 1.0)
    }

    /// The same, where `part` of each head is rotated if the configuration does not say how much.
    pub(crate) fn rope_of(&self, size: usize, kind: Option<&str>, part_if_absent: f64) -> Result<Rope> {
        let empty = Json::Null;
        let mut p = self.get("rope_parameters").unwrap_or(&empty);
        if let Some(own) = kind.and_then(|k| p.get(k)) {
            p = own;
        }
        // Before transformers 5, the base was apart from the scaling.
        let scaling = if p.is_null() { self.get("rope_scaling").unwrap_or(&empty) } else { p };
        let number = |v: &Json, key: &str| v.get(key).and_then(Json::as_f64);
        let base = number(p, "rope_theta").or(self.maybe_f64("rope_theta")?).unwrap_or(10_000.0);
        let part = number(p, "partial_rotary_factor").or(self.maybe_f64("partial_rotary_factor")?);
        let part = part.or(Some(part_if_absent).filter(|p| *p != 1.0));
        let kind = scaling.get("rope_type").or(scaling.get("type")).and_then(Json::as_str);
        // Proportional: the frequencies are those of a whole head, but only a part of them is used.
        let proportional = kind == Some("proportional");
        let head = size;
        let size = part.filter(|_| !proportional).map_or(head, |part| (head as f64 * part) as usize);
        // Transformers rotates pairs, so it rounds an odd size up, but divides the exponents of the base by
        // the odd size. This base gives the same frequencies.
        let (size, base) = match size % 2 {
            1 if size < head && kind != Some("dynamic") => {
                (size + 1, base.powf((size + 1) as f64 / size as f64))
            }
            _ => (size, base),
        };
        let context = self.maybe_usize("max_position_embeddings")?.unwrap_or(2048);
        let original = number(scaling, "original_max_position_embeddings")
            .or(self.maybe_f64("original_max_position_embeddings")?)
            .map_or(context, |n| n as usize);
        let factor =
            || number(scaling, "factor").ok_or_else(|| self.bad("the rope parameters have no 'factor'"));
        let scaling = match kind.unwrap_or("default") {
            "default" => Scaling::None,
            "proportional" => Scaling::Proportional {
                part: part.unwrap_or(1.0),
                factor: number(scaling, "factor").unwrap_or(1.0),
            },
            "linear" => Scaling::Linear { factor: factor()? },
            // The context counts here, whatever the original one was.
            "dynamic" => Scaling::Dynamic { factor: factor()?, original: context },
            "yarn" => Scaling::Yarn(Yarn {
                factor: number(scaling, "factor").unwrap_or(context as f64 / original.max(1) as f64),
                original,
                beta_fast: number(scaling, "beta_fast").unwrap_or(32.0),
                beta_slow: number(scaling, "beta_slow").unwrap_or(1.0),
                attention: number(scaling, "attention_factor"),
                // Both must be there; 0 counts as absent.
                mscale: number(scaling, "mscale")
                    .zip(number(scaling, "mscale_all_dim"))
                    .filter(|(m, all)| *m != 0.0 && *all != 0.0),
                truncate: scaling.get("truncate").and_then(Json::as_bool).unwrap_or(true),
            }),
            "llama3" => Scaling::Llama3 {
                factor: factor()?,
                low: number(scaling, "low_freq_factor").unwrap_or(1.0),
                high: number(scaling, "high_freq_factor").unwrap_or(4.0),
                original,
            },
            "longrope" | "su" => Scaling::Long {
                short: self.floats(scaling, "short_factor")?,
                long: self.floats(scaling, "long_factor")?,
                original,
                factor: number(scaling, "factor").unwrap_or(context as f64 / original as f64),
                attention: number(scaling, "attention_factor"),
            },
            other => {
                return Err(Error::unsupported(
                    format!("the rope type '{other}' of {}", self.file),
                    "Use a model with default, linear, dynamic, yarn, llama3, longrope or proportional",
                ));
            }
        };
        Ok(Rope { base, size, layout: Layout::Half, scaling, factors: None })
    }
}

/// Metadata of a GGUF file. Keys lack the architecture's name.
pub(crate) struct Meta<'a> {
    data: &'a Metadata,
    pub(crate) arch: &'a str,
    /// Rows of the embeddings.
    vocabulary: usize,
    has: Box<dyn Fn(&str) -> bool + 'a>,
}

impl<'a> Meta<'a> {
    pub(crate) fn new(file: &'a Gguf, arch: &'a str) -> Result<Meta<'a>> {
        let vocabulary = file.tensor("token_embd.weight")?.shape().first().copied().unwrap_or(0);
        let has = Box::new(move |name: &str| file.find(name).is_some());
        Ok(Meta { data: file.metadata(), arch, vocabulary, has })
    }

    /// The metadata of a file that has not been written, with the tensors that `has` names.
    pub(crate) fn of(
        data: &'a Metadata,
        arch: &'a str,
        vocabulary: usize,
        has: &'a dyn Fn(&str) -> bool,
    ) -> Meta<'a> {
        Meta { data, arch, vocabulary, has: Box::new(has) }
    }

    /// Whether the file has a tensor.
    pub(crate) fn has(&self, tensor: &str) -> bool {
        (self.has)(tensor)
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    pub(crate) fn usize(&self, key: &str) -> Result<usize> {
        let n = self.data.u64(&self.key(key))?;
        usize::try_from(n).map_err(|_| Error::argument("configuration", format!("{key} = {n} is too large")))
    }

    pub(crate) fn maybe_usize(&self, key: &str) -> Result<Option<usize>> {
        if self.data.get(&self.key(key)).is_none() { Ok(None) } else { self.usize(key).map(Some) }
    }

    pub(crate) fn maybe_f64(&self, key: &str) -> Result<Option<f64>> {
        self.data.maybe(&self.key(key), Metadata::f64)
    }

    pub(crate) fn maybe_str(&self, key: &str) -> Result<Option<&str>> {
        self.data.maybe(&self.key(key), |m, k| m.str(k))
    }

    pub(crate) fn f64(&self, key: &str) -> Result<f64> {
        self.data.f64(&self.key(key))
    }

    pub(crate) fn flag(&self, key: &str) -> Result<bool> {
        Ok(self.maybe_flag(key)?.unwrap_or(false))
    }

    pub(crate) fn maybe_flag(&self, key: &str) -> Result<Option<bool>> {
        self.data.maybe(&self.key(key), Metadata::bool)
    }

    /// Numbers per layer, if the key holds an array.
    pub(crate) fn list(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let key = self.key(key);
        match self.data.get(&key) {
            Some(Value::Array(_)) => {
                Ok(Some(self.data.ints(&key)?.into_iter().map(|n| usize::try_from(n).unwrap_or(0)).collect()))
            }
            _ => Ok(None),
        }
    }

    /// The value of layer `i` of a key that holds one number for all layers, or an array.
    pub(crate) fn of_layer(&self, key: &str, i: usize) -> Result<Option<usize>> {
        let Some(Value::Array(_)) = self.data.get(&self.key(key)) else { return self.maybe_usize(key) };
        let all = self.data.ints(&self.key(key))?;
        let own = all.get(i).and_then(|n| usize::try_from(*n).ok());
        let bad = || Error::argument("configuration", format!("{key} has no number for layer {i}"));
        own.ok_or_else(bad).map(Some)
    }

    /// Bools per layer, if the key holds an array.
    pub(crate) fn pattern(&self, key: &str) -> Option<Vec<bool>> {
        match self.data.get(&self.key(key)) {
            Some(Value::Array(Array::Bool(v))) => Some(v.clone()),
            _ => None,
        }
    }

    /// The rotation for heads of `size` elements.
    pub(crate) fn rope(&self, size: usize, layout: Layout) -> Result<Rope> {
        let base = self.maybe_f64("rope.freq_base")?.unwrap_or(10_000.0);
        let size = self.maybe_usize("rope.dimension_count")?.unwrap_or(size);
        let context = self.usize("context_length")?;
        let original = self.maybe_usize("rope.scaling.original_context_length")?.unwrap_or(context);
        let factor = self.maybe_f64("rope.scaling.factor")?.filter(|f| *f != 0.0);
        let own = match self.maybe_f64("rope.scaling.yarn_attn_factor")? {
            Some(a) => Some(a),
            None => self.maybe_f64("rope.scaling.attn_factor")?,
        };
        let kind = self.data.maybe(&self.key("rope.scaling.type"), |m, k| m.str(k))?;
        let scaling = match (kind.unwrap_or("none"), factor) {
            ("none", _) => Scaling::None,
            // The factors are tensors of the file.
            ("longrope", factor) => Scaling::Long {
                short: vec![],
                long: vec![],
                original,
                factor: factor.unwrap_or(context as f64 / original as f64),
                attention: self.maybe_f64("rope.scaling.attn_factor")?,
            },
            (_, None) => Scaling::None,
            ("linear", Some(factor)) => Scaling::Linear { factor },
            ("yarn", Some(factor)) => Scaling::Yarn(Yarn {
                factor,
                original,
                beta_fast: self.maybe_f64("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: self.maybe_f64("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                // The file's factor is on top of the paper's.
                attention: own.map(|a| a * crate::rope::yarn_attention(factor, 1.0)),
                mscale: None,
                truncate: true,
            }),
            (other, _) => {
                let what = format!("the rope scaling '{other}' is not supported");
                return Err(Error::argument("configuration", what));
            }
        };
        Ok(Rope { base, size, layout, scaling, factors: None })
    }
}

/// The sizes that most families have in common.
#[derive(Clone, Debug)]
pub(crate) struct Base {
    pub family: &'static str,
    pub vocabulary: usize,
    pub hidden: usize,
    pub context: usize,
    pub layers: usize,
    pub heads: usize,
    pub shared: usize,
    pub head: usize,
    pub inner: usize,
    pub eps: f64,
    /// Of the feed-forward part.
    pub activation: Activation,
    pub rope: Option<Rope>,
}

impl Base {
    /// The names of Llama's configuration.
    pub(crate) fn hf(family: &'static str, c: &Hf<'_>) -> Result<Base> {
        if c.get("use_bidirectional_attention").is_some_and(|v| v == true || v == "all") {
            return Err(Error::unsupported(
                format!("a {family} model with attention to later positions"),
                "Use a model without it",
            ));
        }
        let (hidden, heads) = (c.usize("hidden_size")?, c.usize("num_attention_heads")?);
        let head = match c.maybe_usize("head_dim")? {
            Some(n) => n,
            None if heads > 0 => hidden / heads,
            None => return Err(c.bad("'num_attention_heads' is 0")),
        };
        let eps = ["rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps"];
        let eps = eps.iter().find(|k| c.get(k).is_some()).unwrap_or(&eps[0]);
        Ok(Base {
            family,
            vocabulary: c.usize("vocab_size")?,
            hidden,
            context: c.usize("max_position_embeddings")?,
            layers: c.usize("num_hidden_layers")?,
            heads,
            shared: c.maybe_usize("num_key_value_heads")?.unwrap_or(heads),
            head,
            inner: c.usize_of(&["intermediate_size", "moe_intermediate_size"])?,
            eps: c.f64(eps)?,
            activation: match c.get("hidden_act") {
                Some(_) => c.activation("hidden_act")?,
                None => Activation::Silu,
            },
            rope: Some(c.rope(head, None)?),
        })
    }

    pub(crate) fn gguf(family: &'static str, m: &Meta<'_>, layout: Layout) -> Result<Base> {
        let (hidden, heads) = (m.usize("embedding_length")?, m.usize("attention.head_count")?);
        let head = match m.maybe_usize("attention.key_length")? {
            Some(n) => n,
            None if heads > 0 => hidden / heads,
            None => return Err(Error::argument("configuration", "attention.head_count is 0")),
        };
        let eps = match m.maybe_f64("attention.layer_norm_rms_epsilon")? {
            Some(e) => e,
            None => m.f64("attention.layer_norm_epsilon")?,
        };
        Ok(Base {
            family,
            vocabulary: m.vocabulary,
            hidden,
            context: m.usize("context_length")?,
            layers: m.usize("block_count")?,
            heads,
            // Layers without attention have no key heads.
            shared: match m.list("attention.head_count_kv")? {
                Some(all) => all.into_iter().max().filter(|n| *n > 0).unwrap_or(heads),
                None => m.maybe_usize("attention.head_count_kv")?.unwrap_or(heads),
            },
            head,
            inner: match m.of_layer("feed_forward_length", 0)? {
                Some(n) => n,
                None => m.usize("expert_feed_forward_length")?,
            },
            eps,
            activation: Activation::Silu,
            rope: Some(m.rope(head, layout)?),
        })
    }

    /// Adds layers that predict further tokens, which `config.json` counts apart. Returns their number.
    pub(crate) fn add_ahead(&mut self, count: Option<usize>) -> usize {
        // A hostile count is refused before memory is taken for it.
        let count = count.unwrap_or(0).min(4097);
        self.layers = self.layers.min(4097) + count;
        count
    }

    pub(crate) fn rms(&self) -> Norm {
        Norm { kind: NormKind::Rms, eps: self.eps }
    }

    pub(crate) fn layer_norm(&self) -> Norm {
        Norm { kind: NormKind::Layer, eps: self.eps }
    }

    /// Llama's layers: norms before, attention, a gated feed-forward part. Families change what differs.
    pub(crate) fn spec(&self) -> Spec {
        let attention = Attention {
            heads: self.heads,
            shared: self.shared,
            key: self.head,
            value: self.head,
            scale: 1.0 / (self.head.max(1) as f64).sqrt(),
            rope: self.rope.clone(),
            window: None,
            softcap: None,
            sinks: false,
            gate: false,
            qk_norm: None,
            value_norm: None,
            values_of_keys: false,
            keys_of: None,
            latent: None,
        };
        let layer = Layer {
            order: Order::Before,
            norm: self.rms(),
            mixer: Mixer::Attention(Box::new(attention)),
            ffn: Ffn::Gated(self.activation),
            inner: self.inner,
            residual_scale: None,
        };
        Spec {
            family: self.family,
            vocabulary: self.vocabulary,
            hidden: self.hidden,
            context: self.context,
            embedding_scale: None,
            learned_positions: false,
            embedding_norm: None,
            per_layer: None,
            // A hostile count is refused before memory is taken for it.
            layers: vec![layer; self.layers.min(2 * 4097)],
            ahead: vec![],
            final_norm: self.rms(),
            logit_scale: None,
            logit_cap: None,
        }
    }
}

impl Spec {
    /// Changes the attention of every layer that has one. The function gets the number of the layer.
    pub(crate) fn each_attention(&mut self, f: impl Fn(usize, &mut Attention)) {
        for (i, l) in self.layers.iter_mut().enumerate() {
            if let Mixer::Attention(a) = &mut l.mixer {
                f(i, a);
            }
        }
    }

    /// Norms of queries and keys over each head, before the rotation.
    pub(crate) fn norm_heads(&mut self, norm: Norm) {
        self.each_attention(|_, a| a.qk_norm = Some(QkNorm { norm, by_head: true, after_rope: false }));
    }
}
