//! What changes in the weights of a folder because the file's architecture computes in another way.

use super::outputs::{Edit, Part, Pick};
use crate::rope::{Layout, Scaling};
use crate::spec::{Attention, Layer, Mixer, NormKind, Order, Scan, ScanKind, Spec};
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::GgmlType;
use std::fmt::Debug;

/// How weights change.
pub(super) struct Changes {
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
    /// The order of the rows of keys, if it differs from that of queries.
    key_turn: Option<Turn>,
    /// Whether the norm of queries takes the factor.
    normed: bool,
    /// Whether the value heads of this scan get the order of files.
    tiled: bool,
}

impl Changes {
    /// The changes that make `read`, the computation that the file's metadata mean, equal to `spec`.
    pub(super) fn between(spec: &Spec, read: &Spec, arch: &str) -> Result<Changes> {
        let (mut want, read) = (spec.listed(), &read.listed());
        want.family = read.family;
        if want.layers.len() != read.layers.len() {
            let counts = [&want, read].map(|s| format!("{} layers", s.layers.len()));
            return Err(refused(arch, "the model", &counts.into()));
        }
        let shift = spec.final_norm.kind == NormKind::RmsPlusOne && read.final_norm.kind == NormKind::Rms;
        let pairs = want.layers.iter_mut().zip(&read.layers);
        let layers: Vec<LayerChange> = pairs.map(|(l, r)| layer_change(l, r)).collect();
        let place = |i: usize| format!("layer {i}");
        let pairs = want.layers.iter().zip(&read.layers).enumerate();
        let mut different = pairs.filter_map(|(i, (a, b))| Some((place(i), difference(a, b, shift)?)));
        let found = different.next().or_else(|| {
            (want.layers, want.context) = (read.layers.clone(), read.context);
            Some(("the model".into(), difference(&want, read, shift)?))
        });
        match found {
            None => Ok(Changes { shift, layers, arch: arch.into() }),
            Some((place, found)) => Err(refused(arch, &place, &found)),
        }
    }

    /// The parts of the file that are made of a tensor with a canonical name.
    pub(super) fn parts(&self, spec: &Spec, name: &str, dims: &[usize], stored: GgmlType) -> Vec<Part> {
        let mut part = Part::whole(name, dims, stored);
        let Some(i) = super::mixture::layer(name) else {
            part.edit.shift = self.shift && name.ends_with("norm.weight");
            return vec![part];
        };
        let (Some(layer), Some(change)) = (spec.layer(i), self.layers.get(i)) else { return vec![part] };
        let own = name.splitn(3, '.').nth(2).unwrap_or("");
        match &layer.mixer {
            Mixer::Recurrent(r) => {
                if let Some(s) = &r.scan {
                    scan(&mut part, s, own, change.tiled);
                }
                if own.ends_with("conv.weight") || own == "ssm_conv1d.weight" {
                    // Folders have an axis of size 1 between channels and positions.
                    part.dims.retain(|n| *n != 1);
                }
            }
            Mixer::Attention(a) => {
                if own == "attn_kv_b.weight" {
                    return expansion(part, a);
                }
                attend(&mut part, change, own);
            }
        }
        part.edit.shift = self.shift && own.ends_with("norm.weight") && own != "ssm_norm.weight";
        vec![part]
    }

    /// The name of a tensor in files of the architecture, its number among the parts that are stored
    /// together, and the number of groups in which these follow each other.
    pub(super) fn place(&self, spec: &Spec, name: &str) -> (String, usize, usize) {
        let alone = |name: String| (name, 0, 1);
        if (self.arch.as_str(), name) == ("lfm2", "output_norm.weight") {
            return alone("token_embd_norm.weight".into());
        }
        let layer = super::mixture::layer(name).and_then(|i| spec.layer(i));
        let (Some(layer), Some((stem, kind))) = (layer, name.rsplit_once('.')) else {
            return alone(name.into());
        };
        let own = stem.splitn(3, '.').nth(2).unwrap_or("");
        let other = |to: &str, number, groups| (name.replace(&format!(".{own}."), to), number, groups);
        let number = match own {
            "attn_q" | "ffn_gate" | "ffn_gate_exps" | "ssm_beta" => 0,
            "attn_k" | "ffn_up" | "ffn_up_exps" | "ssm_alpha" => 1,
            _ => 2,
        };
        match (self.arch.as_str(), own) {
            ("phi3" | "gpt2" | "falcon" | "modern-bert", "attn_q" | "attn_k" | "attn_v") => {
                other(".attn_qkv.", number, 1)
            }
            ("phi3" | "modern-bert", "ffn_gate" | "ffn_up") => other(".ffn_up.", number, 1),
            ("gemma4", "ffn_gate_exps" | "ffn_up_exps") if kind == "weight" => {
                let experts = layer.experts().map_or(1, |(e, _)| e.count);
                other(".ffn_gate_up_exps.", number, experts)
            }
            ("qwen3next", "ssm_beta" | "ssm_alpha") => {
                let heads = match &layer.mixer {
                    Mixer::Recurrent(r) => r.scan.map_or(1, |s| s.shared),
                    Mixer::Attention(_) => 1,
                };
                other(".ssm_ba.", number, heads)
            }
            ("gpt-oss" | "glm4moe" | "qwen3next" | "qwen35" | "qwen35moe", "ffn_norm")
                if layer.order == Order::Before =>
            {
                other(".post_attention_norm.", 0, 1)
            }
            _ => alone(name.into()),
        }
    }
}

pub(super) fn refused(arch: &str, place: &str, (a, b): &(String, String)) -> Error {
    Error::unsupported(
        format!(
            "this model as a GGUF file: {place} has `{a}`, but in a file of the architecture {arch} it is \
             `{b}`"
        ),
        "Use the folder",
    )
}

/// What changes in a layer `r`, as the file means it, to be `l`. Makes equal what the change makes equal.
fn layer_change(l: &mut Layer, r: &Layer) -> LayerChange {
    let mut change = LayerChange { scale: 1.0, ..LayerChange::default() };
    match (&mut l.mixer, &r.mixer) {
        (Mixer::Attention(a), Mixer::Attention(b)) => attention_change(&mut change, a, b),
        (Mixer::Recurrent(x), Mixer::Recurrent(y)) => {
            if let (Some(s), Some(t)) = (&mut x.scan, &y.scan) {
                change.tiled = t.tiled && !s.tiled;
                s.tiled = t.tiled;
            }
        }
        _ => {}
    }
    change
}

fn attention_change(change: &mut LayerChange, a: &mut Attention, b: &Attention) {
    change.normed = a.qk_norm.is_some();
    if b.scale > 0.0 {
        change.scale = a.scale / b.scale;
        a.scale = b.scale;
    }
    let (Some(x), Some(y)) = (&mut a.rope, &b.rope) else { return };
    if (x.layout, y.layout) == (Layout::Half, Layout::Pairs) {
        let turn = |key, first| Turn { key, first, size: x.size, back: false };
        match &a.latent {
            // Only the last part of a head is rotated.
            Some(l) => {
                change.turn = Some(turn(l.plain + x.size, l.plain));
                change.key_turn = Some(turn(a.key, l.rank));
            }
            None => {
                change.turn = Some(turn(a.key, 0));
                change.key_turn = Some(turn(a.key, 0));
            }
        }
        x.layout = y.layout;
    }
    x.factors.clone_from(&y.factors);
    match &mut x.scaling {
        s @ (Scaling::Llama3 { .. } | Scaling::Proportional { .. }) => *s = Scaling::None,
        Scaling::Long { .. } => {
            let same = (x.frequencies(0).1 - y.frequencies(0).1).abs() < 1e-6;
            if let (Scaling::Long { short, long, factor, attention, .. }, true) = (&mut x.scaling, same) {
                short.clear();
                long.clear();
                if let Scaling::Long { factor: f, attention: a, .. } = &y.scaling {
                    (*factor, *attention) = (*f, *a);
                }
            }
        }
        Scaling::Yarn(y) if a.latent.is_some() => {
            let own = y.factor_of_rotations();
            let file = b.rope.as_ref().and_then(|r| match &r.scaling {
                Scaling::Yarn(z) => z.attention,
                _ => None,
            });
            if file.is_some_and(|f| (f - own).abs() < 1e-6 * own) {
                (y.attention, y.mscale) = (file, None);
            }
        }
        _ => {}
    }
}

/// The change of a tensor of an attention layer.
fn attend(part: &mut Part, change: &LayerChange, own: &str) {
    let stem = own.rsplit_once('.').map_or(own, |(s, _)| s);
    let scaled = matches!((change.normed, stem), (true, "attn_q_norm") | (false, "attn_q" | "attn_q_b"));
    if scaled {
        part.edit.scale = change.scale;
    }
    let turn = match stem {
        "attn_q" | "attn_q_b" | "attn_q_norm" => &change.turn,
        "attn_k" | "attn_kv_a_mqa" | "attn_k_norm" => &change.key_turn,
        _ => &None,
    };
    if let Some(turn) = turn {
        part.edit.pick = Pick::Rows(turn.rows(part.dims.first().copied().unwrap_or(0)));
    }
}

/// The matrices of keys and of values, of one that has both.
fn expansion(part: Part, a: &Attention) -> Vec<Part> {
    let Some(l) = &a.latent else { return vec![part] };
    let all = l.plain + l.value;
    let of = |target: &str, dims: [usize; 3], pick| Part {
        target: part.name.replace("attn_kv_b", target),
        dims: dims.to_vec(),
        edit: Edit { pick, ..Edit::default() },
        ..part.clone()
    };
    let values = (0..a.heads).flat_map(|h| (0..l.value).map(move |r| h * all + l.plain + r)).collect();
    vec![
        of("attn_k_b", [a.heads, l.rank, l.plain], Pick::Transposed { all, first: 0, count: l.plain }),
        of("attn_v_b", [a.heads, l.value, l.rank], Pick::Rows(values)),
    ]
}

/// The change of a tensor of a scan.
fn scan(part: &mut Part, s: &Scan, own: &str, tiled: bool) {
    if let ScanKind::Mamba { .. } = s.kind {
        match own {
            "ssm_a" | "ssm_d" => part.dims = vec![s.heads, 1],
            "ssm_norm.weight" => part.dims = vec![s.shared, s.heads * s.value / s.shared],
            _ => {}
        }
    }
    if tiled {
        part.edit.pick = tiled_pick(s, own.strip_suffix(".weight").unwrap_or(own));
    }
}

/// The order that a matrix or vector of a scan gets where value head `t` belongs to key head `t % shared`.
pub(crate) fn tiled_pick(s: &Scan, own: &str) -> Pick {
    let order: Vec<usize> =
        (0..s.heads).map(|t| t % s.shared * (s.heads / s.shared) + t / s.shared).collect();
    let rows = |first: usize, unit: usize| {
        let moved = order.iter().flat_map(move |h| (0..unit).map(move |r| first + h * unit + r));
        Pick::Rows((0..first).chain(moved).collect())
    };
    match own {
        "attn_qkv" | "ssm_conv1d" => rows(2 * s.shared * s.key, s.value),
        "attn_gate" => rows(0, s.value),
        "ssm_beta" | "ssm_alpha" | "ssm_a" | "ssm_dt.bias" => rows(0, 1),
        "ssm_out" => Pick::Columns { unit: s.value, order },
        _ => Pick::All,
    }
}

/// Another order of the rows of heads of `key` rows, of which `size` from `first` on are rotated: rows `i`
/// and `i + size / 2` of these become neighbours, or neighbours become these.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    pub(crate) key: usize,
    pub(crate) first: usize,
    pub(crate) size: usize,
    pub(crate) back: bool,
}

impl Turn {
    /// Where a row comes from.
    fn source(&self, row: usize) -> usize {
        let (head, half) = (row / self.key, self.size / 2);
        let from = match (row % self.key).checked_sub(self.first).filter(|i| *i < self.size) {
            None => row % self.key,
            Some(i) if self.back => self.first + i % half * 2 + i / half,
            Some(i) => self.first + i % 2 * half + i / 2,
        };
        head * self.key + from
    }

    /// Where each of `rows` rows comes from.
    pub(crate) fn rows(&self, rows: usize) -> Vec<usize> {
        (0..rows).map(|r| self.source(r)).collect()
    }
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
