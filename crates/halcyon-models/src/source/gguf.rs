//! Tensors of GGUF files, also of those that store several matrices in one tensor.

use super::Weights;
use crate::spec::{Mixer, Order, ScanKind, Spec};
use bytes::Bytes;
use halcyon::ir::blocks::LoadOnly;
use halcyon::ir::error::{Error, Result};
use halcyon::{BlockType, ConstData, DType};
use halcyon_formats::gguf::{GgmlType, Gguf, Tensor};
use std::ops::Range;

/// The tensor with a canonical name.
pub(super) fn find(file: &Gguf, spec: &Spec, name: &str) -> Result<Option<Weights>> {
    // LFM 2 calls its last norm so.
    let name = match name {
        "output_norm.weight" if spec.family == "lfm2" && file.find(name).is_none() => {
            "token_embd_norm.weight"
        }
        name => name,
    };
    if let Some(t) = file.find(name) {
        return whole(t).map(Some);
    }
    if let Some(found) = of_experts(file, name)? {
        return Ok(Some(found));
    }
    if let Some((tensor, sizes, parts)) = grouped(spec, name) {
        return file.find(&tensor).map(|t| groups(whole(t)?, &sizes, parts)).transpose();
    }
    let Some((tensor, first, count)) = part(file, spec, name) else { return Ok(None) };
    let Some(t) = file.find(&tensor) else { return Ok(None) };
    rows(whole(t)?, first, count).map(Some)
}

/// The tensor of the file that has the matrix with the canonical name `stem`, and the rows of the matrix in
/// it; `None` for all of them.
pub(crate) fn place(file: &Gguf, spec: &Spec, stem: &str) -> Option<(String, Option<Vec<usize>>)> {
    let name = format!("{stem}.weight");
    let count = |name: &str| file.find(name)?.shape().first().copied();
    if let Some(all) = count(&name) {
        let inner =
            || spec.layer(stem.strip_prefix("blk.")?.strip_suffix(".ffn_up")?.parse().ok()?).map(|l| l.inner);
        // Phi-3: the up projection is the second half.
        let half = inner().filter(|n| *n > 0 && 2 * n == all);
        return Some((name, half.map(|n| (n..all).collect())));
    }
    if let Some((tensor, sizes, parts)) = grouped(spec, &name)
        && let Some(all) = count(&tensor)
    {
        let numbers: Vec<f32> = (0..all).map(|i| i as f32).collect();
        let numbers = Weights { data: ConstData::from_slice(&[all, 1], &numbers).ok()?, blocks: None };
        let rows = groups(numbers, &sizes, parts).ok()?.floats().ok()?;
        return Some((tensor, Some(rows.into_iter().map(|i| i as usize).collect())));
    }
    let (tensor, first, n) = part(file, spec, &name)?;
    let all = count(&tensor)?;
    (n > 0 && first + n <= all).then(|| (tensor, Some((first..first + n).collect())))
}

/// Where a tensor is that the file has as a part of another one: the other one's name, and its rows.
fn part(file: &Gguf, spec: &Spec, name: &str) -> Option<(String, usize, usize)> {
    let (stem, kind) = name.rsplit_once('.')?;
    let (i, own) = stem.strip_prefix("blk.")?.split_once('.')?;
    let layer = spec.layer(i.parse::<usize>().ok()?)?;
    let (q, k, v) = match &layer.mixer {
        Mixer::Attention(a) => {
            (a.heads * a.key * if a.gate { 2 } else { 1 }, a.shared * a.key, a.shared * a.value)
        }
        Mixer::Recurrent(_) => (0, 0, 0),
    };
    let other = |name: &str| format!("blk.{i}.{name}.{kind}");
    let rows = |name: &str| file.find(&other(name)).and_then(|t| t.shape().first().copied());
    Some(match own {
        "attn_q" => (other("attn_qkv"), 0, q),
        "attn_k" => (other("attn_qkv"), q, k),
        "attn_v" => (other("attn_qkv"), q + k, v),
        // Phi-3: the gate is the first half.
        "ffn_gate" if rows("ffn_up")? == 2 * layer.inner => (other("ffn_up"), 0, layer.inner),
        // gpt-oss and GLM-4 name the norm before the feed-forward part like this.
        "ffn_norm" if layer.order == Order::Before => {
            (other("post_attention_norm"), 0, rows("post_attention_norm")?)
        }
        _ => return None,
    })
}

/// The gates or the up projections of experts whose file has both in one tensor `[experts, 2 inner, inputs]`.
fn of_experts(file: &Gguf, name: &str) -> Result<Option<Weights>> {
    let (stem, which) =
        match (name.strip_suffix(".ffn_gate_exps.weight"), name.strip_suffix(".ffn_up_exps.weight")) {
            (Some(stem), _) => (stem, 0),
            (_, Some(stem)) => (stem, 1),
            _ => return Ok(None),
        };
    let Some(t) = file.find(&format!("{stem}.ffn_gate_up_exps.weight")) else { return Ok(None) };
    let w = whole(t)?;
    let mut dims = w.data.dims.to_vec();
    let &[experts, both, _] = &dims[..] else {
        return Err(Error::shape("load", format!("'{}' has {} axes: expected 3", t.name(), dims.len())));
    };
    let (all, inner) = (w.data.bytes(), both / 2);
    let one = all.len() / (experts * both).max(1);
    let start = |e: usize| (e * both + which * inner) * one;
    let parts: Vec<&[u8]> = (0..experts).map(|e| &all[start(e)..start(e) + inner * one]).collect();
    dims[1] = inner;
    let data = halcyon_formats::data::from_bytes(w.data.dtype, &dims, Bytes::from(parts.concat()))?;
    Ok(Some(Weights { data, blocks: w.blocks }))
}

/// Where a projection of DeltaNet is that the file has joined with others: the tensor's name, the rows of
/// each projection for one key head, and the projections that are meant.
fn grouped(spec: &Spec, name: &str) -> Option<(String, Vec<usize>, Range<usize>)> {
    let (i, own) = name.strip_suffix(".weight")?.strip_prefix("blk.")?.split_once('.')?;
    let Mixer::Recurrent(r) = &spec.layer(i.parse::<usize>().ok()?)?.mixer else { return None };
    let s = r.scan.filter(|s| s.kind == ScanKind::Delta)?;
    let each = s.heads / s.shared;
    let (joined, sizes) = match own {
        "attn_qkv" | "attn_gate" => ("ssm_in", vec![s.key, s.key, each * s.value, each * s.value]),
        "ssm_beta" | "ssm_alpha" => ("ssm_ba", vec![each, each]),
        _ => return None,
    };
    let parts = match own {
        "attn_qkv" => 0..3,
        "attn_gate" => 3..4,
        "ssm_beta" => 0..1,
        _ => 1..2,
    };
    Some((format!("blk.{i}.{joined}.weight"), sizes, parts))
}

/// The rows of some parts of each group, part by part.
fn groups(w: Weights, sizes: &[usize], parts: Range<usize>) -> Result<Weights> {
    let mut dims = w.data.dims.to_vec();
    let (all, group) = (dims.first().copied().unwrap_or(0), sizes.iter().sum::<usize>());
    if group == 0 || all % group != 0 {
        return Err(Error::shape("load", format!("{all} rows are not groups of {group}")));
    }
    let width = w.data.bytes().len() / all.max(1);
    dims[0] = sizes[parts.clone()].iter().sum::<usize>() * (all / group);
    let mut bytes = Vec::with_capacity(dims[0] * width);
    for part in parts {
        let first: usize = sizes[..part].iter().sum();
        for g in 0..all / group {
            let row = g * group + first;
            bytes.extend_from_slice(&w.data.bytes()[row * width..(row + sizes[part]) * width]);
        }
    }
    let data = halcyon_formats::data::from_bytes(w.data.dtype, &dims, Bytes::from(bytes))?;
    Ok(Weights { data, blocks: w.blocks })
}

/// The second half of a joined gate and up projection, or the whole tensor.
pub(crate) fn up_of_joined(w: Weights, inner: usize) -> Result<Weights> {
    match w.dims().first() {
        Some(n) if *n == 2 * inner => rows(w, inner, inner),
        _ => Ok(w),
    }
}

fn rows(w: Weights, first: usize, count: usize) -> Result<Weights> {
    let mut dims = w.data.dims.to_vec();
    let all = dims.first().copied().unwrap_or(0);
    if first + count > all {
        let what = format!("rows {first} to {} of a tensor with {all} rows", first + count);
        return Err(Error::shape("load", what));
    }
    let width = w.data.bytes().len() / all.max(1);
    dims[0] = count;
    let bytes = Bytes::copy_from_slice(&w.data.bytes()[first * width..(first + count) * width]);
    Ok(Weights { data: halcyon_formats::data::from_bytes(w.data.dtype, &dims, bytes)?, blocks: w.blocks })
}

fn whole(t: &Tensor) -> Result<Weights> {
    match t.ty() {
        GgmlType::Plain(_) => Ok(Weights { data: t.to_const()?, blocks: None }),
        GgmlType::Block(b) => Ok(Weights { data: t.to_const()?, blocks: Some(b) }),
        GgmlType::LoadOnly(format) => {
            let mut v = vec![0f32; t.shape().iter().product()];
            format.decode(&t.data, &mut v);
            Ok(Weights { data: ConstData::from_slice(t.shape(), &v)?, blocks: None })
        }
        GgmlType::Listed(_) => {
            let kept: Vec<&str> = BlockType::ALL.iter().map(|b| b.name()).collect();
            let read: Vec<&str> = LoadOnly::ALL.iter().map(|b| b.name()).collect();
            Err(Error::unsupported(
                format!("'{}' of type {}", t.name(), t.ty()),
                format!(
                    "Use a file whose tensors have these types: f32, f16, bf16, {}, {}",
                    kept.join(", "),
                    read.join(", ")
                ),
            ))
        }
    }
}

/// Warnings about tensors that are decoded when the model is loaded.
pub(crate) fn warnings(file: &Gguf) -> Vec<String> {
    let of = |format: &LoadOnly| {
        let all = file.tensors().iter().filter(|t| t.ty() == GgmlType::LoadOnly(*format));
        let (mut count, mut stored, mut loaded) = (0usize, 0usize, 0usize);
        for t in all {
            count += 1;
            stored += t.data.len();
            loaded += t.shape().iter().product::<usize>() * DType::F32.size();
        }
        let mib = |n: usize| n as f64 / f64::from(1 << 20);
        (count > 0).then(|| {
            format!(
                "{count} tensors of type {} are decoded to f32 when they are loaded: {:.1} MiB become {:.1} MiB",
                format.name(),
                mib(stored),
                mib(loaded)
            )
        })
    };
    LoadOnly::ALL.iter().filter_map(of).collect()
}
