//! The content of a folder: its weights with GGUF's names, shapes and order of rows.
//!
//! Where GGUF's architecture computes in another way than the folder's model, the weights make up for it: the
//! factor `1 + weight` of norms is stored, rows of queries and keys are arranged for the other layout of the
//! rotation, and another scale of the scores becomes a factor of the queries. Then the metadata is read as
//! any file's is. If that means another computation than the folder's, the file is refused.

use super::content::{Content, Entry, header};
use super::keys::{self, attention};
use super::mixture;
use crate::family::{self, Meta};
use crate::rope::{Layout, Rope, Scaling};
use crate::source::{Folder, Source, Weights};
use crate::spec::{Ffn, Mixer, NormKind, Order, Spec};
use bytes::Bytes;
use halcyon::ir::error::{Error, Result};
use halcyon::{BlockType, ConstData};
use halcyon_formats::gguf::{GgmlType, TensorInfo, Value};
use std::collections::BTreeMap;
use std::fmt::Debug;

/// The families whose tensors [`names`] has.
const WRITTEN: &[&str] = &[
    "llama",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "mixtral",
    "phi3",
    "glm4moe",
    "olmo2",
    "granite",
    "smollm3",
    "cohere2",
    "starcoder2",
    "gpt2",
    "falcon",
];

/// The content of a folder as a GGUF file. Matrices keep their type; vectors become f32.
pub(super) fn content<'a>(source: &'a Source, folder: &'a Folder) -> Result<Content<'a>> {
    let spec = family::spec(source)?;
    if !WRITTEN.contains(&spec.family) {
        return Err(Error::unsupported(
            format!("folders of the architecture {} as GGUF files", spec.family),
            format!("Architectures that are written: {}", WRITTEN.join(", ")),
        ));
    }
    // Mixtral's files have Llama's architecture.
    let arch = if spec.family == "mixtral" { "llama" } else { spec.family };
    let name = folder.path().canonicalize().ok();
    let name = name.as_deref().unwrap_or(folder.path()).file_name().unwrap_or_default().to_string_lossy();
    let mut metadata: Vec<(String, Value)> = vec![
        ("general.architecture".into(), arch.into()),
        ("general.type".into(), "model".into()),
        ("general.name".into(), name.as_ref().into()),
    ];
    metadata.extend(keys::of_spec(&spec, arch));
    let mut found = BTreeMap::new();
    for name in names(&spec) {
        // Experts may be copied together here, so only their type is kept.
        if let Some(w) = source.find(&spec, &name)? {
            found.insert(name, (w.dims(), stored_type(&w)));
        }
    }
    let factors = factors(&spec);
    let read = {
        let has = |n: &str| found.contains_key(n) || factors.iter().any(|f| f.0 == n);
        family::from_metadata(&Meta::of(header(&metadata)?.metadata(), arch, spec.vocabulary, &has))?
    };
    let changes = Changes::between(&spec, &read, arch)?;
    let tensors_found = found.into_iter();
    let mut tensors: Vec<Entry<'_>> =
        tensors_found.map(|(name, (dims, ty))| changes.entry(source, &spec, name, &dims, ty)).collect();
    for (name, values) in factors {
        let info = TensorInfo::new(name, &[values.len()], GgmlType::F32);
        let bytes: Vec<u8> = values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect();
        tensors.push(Entry::made(info, move || Ok(Bytes::from(bytes.clone()))));
    }
    let (vocabulary, warning) = super::vocabulary::of_folder(folder, &spec)?;
    metadata.extend(vocabulary);
    let mut content = Content::new(metadata, tensors);
    content.warnings.extend(warning);
    let window = spec.layers.iter().filter_map(|l| attention(l)?.window).find(|w| *w < spec.context);
    if let (Some(w), "llama") = (window, arch) {
        content.warnings.push(format!(
            "the model's layers see {w} positions; llama.cpp ignores that in files of the architecture llama"
        ));
    }
    let types: Vec<GgmlType> = content.tensors.iter().map(|t| t.info.ty).collect();
    let file = [(GgmlType::F16, 1u32), (GgmlType::BF16, 32)].into_iter().find(|(t, _)| types.contains(t));
    content.set("general.file_type", file.map_or(0, |(_, n)| n).into());
    Ok(content)
}

/// The tensors that a model may have.
pub(super) fn names(spec: &Spec) -> Vec<String> {
    let top = ["token_embd", "position_embd", "token_embd_norm", "output_norm", "output"];
    let mut all: Vec<String> = top.map(String::from).to_vec();
    for (i, l) in spec.layers.iter().enumerate() {
        let norms: &[&str] = match l.order {
            Order::Before => &["attn_norm", "ffn_norm"],
            Order::After => &["post_attention_norm", "post_ffw_norm"],
            Order::Both => &["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"],
            Order::Parallel => &["attn_norm"],
            Order::ParallelTwo => &["attn_norm", "attn_norm_2"],
        };
        let mixer = ["attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm", "attn_sinks"];
        let ffn: &[&str] = match &l.ffn {
            Ffn::Gated(_) => &["ffn_gate", "ffn_up", "ffn_down"],
            Ffn::Plain(_) => &["ffn_up", "ffn_down"],
            Ffn::Experts(_) => &[
                "ffn_gate_inp",
                "ffn_gate_exps",
                "ffn_up_exps",
                "ffn_down_exps",
                "exp_probs_b",
                "ffn_gate_shexp",
                "ffn_up_shexp",
                "ffn_down_shexp",
                "ffn_gate_inp_shexp",
            ],
            // Of families that are not written.
            Ffn::Beside(..) => &[],
        };
        all.extend(norms.iter().chain(&mixer).chain(ffn).map(|n| format!("blk.{i}.{n}")));
    }
    // Sinks are called a weight, and the bias of the experts' choice has no weight.
    let parts = |n: String| match n {
        n if n.ends_with("attn_sinks") => vec![format!("{n}.weight")],
        n if n.ends_with("exp_probs_b") => vec![format!("{n}.bias")],
        n => vec![format!("{n}.weight"), format!("{n}.bias")],
    };
    all.into_iter().flat_map(parts).collect()
}

/// Tensors with factors of the rotation.
fn factors(spec: &Spec) -> Vec<(&'static str, Vec<f64>)> {
    let ropes = || spec.layers.iter().filter_map(|l| attention(l)?.rope.as_ref());
    let Some(r) = ropes().find(|r| r.scaling != Scaling::None) else { return vec![] };
    match &r.scaling {
        Scaling::Long { short, long, .. } => {
            vec![("rope_factors_short.weight", short.clone()), ("rope_factors_long.weight", long.clone())]
        }
        Scaling::Llama3 { .. } => {
            let plain = Rope { scaling: Scaling::None, ..r.clone() };
            let ((f, _), (g, _)) = (plain.frequencies(0), r.frequencies(0));
            vec![("rope_freqs.weight", f.iter().zip(g).map(|(f, g)| f / g).collect())]
        }
        _ => vec![],
    }
}

/// How weights change because the file's architecture computes in another way.
struct Changes {
    /// Whether norms store `1 + weight`.
    shift: bool,
    layers: Vec<LayerChange>,
    arch: String,
}

#[derive(Default)]
struct LayerChange {
    /// Queries are multiplied by this.
    scale: f64,
    /// The order of the rows of queries and keys.
    turn: Option<Turn>,
    /// Whether the norm of queries takes the factor.
    normed: bool,
}

impl Changes {
    /// The changes that make `read`, the computation that the file's metadata mean, equal to `spec`.
    fn between(spec: &Spec, read: &Spec, arch: &str) -> Result<Changes> {
        let mut want = spec.clone();
        want.family = read.family;
        let shift = spec.final_norm.kind == NormKind::RmsPlusOne && read.final_norm.kind == NormKind::Rms;
        let mut layers = vec![];
        for (l, r) in want.layers.iter_mut().zip(&read.layers) {
            let mut change = LayerChange { scale: 1.0, ..LayerChange::default() };
            let Some(b) = attention(r) else { continue };
            if let Mixer::Attention(a) = &mut l.mixer {
                if a.latent.is_some() {
                    let next = "Use the folder, or a GGUF file of the model";
                    return Err(Error::unsupported("writing latent attention as a GGUF file", next));
                }
                change.normed = a.qk_norm.is_some();
                if b.scale > 0.0 {
                    change.scale = a.scale / b.scale;
                    a.scale = b.scale;
                }
                if let (Some(x), Some(y)) = (&mut a.rope, &b.rope) {
                    if (x.layout, y.layout) == (Layout::Half, Layout::Pairs) {
                        change.turn = Some(Turn { key: a.key, size: x.size, back: false });
                        x.layout = y.layout;
                    }
                    match &mut x.scaling {
                        s @ Scaling::Llama3 { .. } => *s = Scaling::None,
                        Scaling::Long { short, long, .. } => (short.clear(), long.clear()).0,
                        _ => {}
                    }
                }
            }
            layers.push(change);
        }
        let place = |i: usize| format!("layer {i}");
        let pairs = want.layers.iter().zip(&read.layers).enumerate();
        let mut different = pairs.filter_map(|(i, (a, b))| Some((place(i), difference(a, b, shift)?)));
        let found = different.next().or_else(|| {
            (want.layers, want.context) = (read.layers.clone(), read.context);
            Some(("the model".into(), difference(&want, read, shift)?))
        });
        match found {
            None => Ok(Changes { shift, layers, arch: arch.into() }),
            Some((place, (a, b))) => Err(Error::unsupported(
                format!(
                    "this model as a GGUF file: {place} has `{a}`, but in a file of the architecture {arch} \
                     it is `{b}`"
                ),
                "Use the folder",
            )),
        }
    }

    /// The entry of a tensor with a canonical name.
    fn entry<'a>(
        &self,
        source: &'a Source,
        spec: &Spec,
        name: String,
        dims: &[usize],
        stored: GgmlType,
    ) -> Entry<'a> {
        let change = mixture::layer(&name).and_then(|i| self.layers.get(i));
        let stem = name.rsplit_once('.').map_or("", |(s, _)| s).rsplit('.').next().unwrap_or("");
        let is_norm = name.ends_with("norm.weight");
        let (shift, mut scale, mut turn) = (self.shift && is_norm, 1.0, None);
        if let Some(c) = change {
            let scaled = if c.normed { "attn_q_norm" } else { "attn_q" };
            scale = if stem == scaled { c.scale } else { 1.0 };
            turn = c
                .turn
                .clone()
                .filter(|_| matches!(stem, "attn_q" | "attn_k" | "attn_q_norm" | "attn_k_norm"));
        }
        let mut info = TensorInfo::new(self.renamed(&name, spec), dims, stored);
        let kept = matches!(stored, GgmlType::Block(_) | GgmlType::F32 | GgmlType::F16 | GgmlType::BF16);
        let exact = (scale - 1.0).abs() < 1e-9;
        if !kept || shift || !exact || !mixture::is_quantised(&info) {
            info.ty = GgmlType::F32;
        }
        let (ty, spec, dims) = (info.ty, spec.clone(), dims.to_vec());
        Entry::made(info, move || {
            let missing = || Error::internal(format!("'{name}' has gone"));
            let w = source.find(&spec, &name)?.ok_or_else(missing)?;
            let rows = dims.first().copied().unwrap_or(0);
            let mut bytes = match ty == stored && !shift && exact {
                true => Bytes::from_owner(Shared(w.data)),
                false => {
                    let mut v = in_f32(&w)?;
                    v.iter_mut().for_each(|v| {
                        *v = ((f64::from(*v) + f64::from(u8::from(shift))) * scale) as f32;
                    });
                    v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>().into()
                }
            };
            if let Some(turn) = &turn {
                bytes = turned_bytes(&bytes, rows, turn);
            }
            Ok(bytes)
        })
    }

    /// The name of a tensor in files of the architecture.
    fn renamed(&self, name: &str, spec: &Spec) -> String {
        let before = spec.layers.first().is_some_and(|l| l.order == Order::Before);
        match self.arch.as_str() {
            "gpt-oss" | "glm4moe" if before => name.replace(".ffn_norm.", ".post_attention_norm."),
            _ => name.into(),
        }
    }
}

/// The bytes of a tensor.
struct Shared(ConstData);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

fn stored_type(w: &Weights) -> GgmlType {
    match w.blocks {
        Some(b) => GgmlType::Block(b),
        None => GgmlType::Plain(w.data.dtype),
    }
}

pub(super) fn in_f32(w: &Weights) -> Result<Vec<f32>> {
    let Some(b): Option<BlockType> = w.blocks else { return crate::source::floats(&w.data) };
    let mut v = vec![0f32; w.dims().iter().product()];
    b.decode(w.data.bytes(), &mut v);
    Ok(v)
}

/// Another order of the rows of heads of `key` rows, of which the first `size` are rotated: rows `i` and
/// `i + size / 2` become neighbours, or neighbours become these.
#[derive(Clone, Debug)]
pub(super) struct Turn {
    pub(super) key: usize,
    pub(super) size: usize,
    pub(super) back: bool,
}

impl Turn {
    /// Where a row comes from.
    fn source(&self, row: usize) -> usize {
        let (head, i, half) = (row / self.key, row % self.key, self.size / 2);
        let from = match (i < self.size, self.back) {
            (false, _) => i,
            (true, false) => i % 2 * half + i / 2,
            (true, true) => i % half * 2 + i / half,
        };
        head * self.key + from
    }
}

fn turned_bytes(bytes: &Bytes, rows: usize, turn: &Turn) -> Bytes {
    turned(bytes, rows, turn).into()
}

/// The rows of a tensor in the other order.
pub(super) fn turned<T: Copy>(v: &[T], rows: usize, turn: &Turn) -> Vec<T> {
    let width = v.len() / rows.max(1);
    let row = |r: usize| &v[turn.source(r) * width..(turn.source(r) + 1) * width];
    (0..rows).flat_map(|r| row(r).iter().copied()).collect()
}

/// The first field that differs, as it is printed in both. Numbers may differ by the rounding to f32.
pub(super) fn difference(a: &impl Debug, b: &impl Debug, shift: bool) -> Option<(String, String)> {
    let mut a = format!("{a:#?}");
    if shift {
        a = a.replace("RmsPlusOne", "Rms");
    }
    let b = format!("{b:#?}");
    let number = |line: &str| {
        let (key, v) = line.trim_end_matches(',').rsplit_once(' ')?;
        Some((key.to_string(), v.parse::<f64>().ok()?))
    };
    let same = |a: &str, b: &str| {
        a == b
            || number(a)
                .zip(number(b))
                .is_some_and(|((ka, a), (kb, b))| ka == kb && (a - b).abs() <= 1e-6 * a.abs().max(b.abs()))
    };
    let text = |l: &str| l.trim().trim_end_matches([',', ' ', '(', '{', '[']).to_string();
    let mut lines = a.lines().zip(b.lines());
    let found = lines.find(|(a, b)| !same(a, b)).map(|(a, b)| (text(a), text(b)));
    found.or_else(|| (a.lines().count() != b.lines().count()).then(|| ("more".into(), "less".into())))
}
