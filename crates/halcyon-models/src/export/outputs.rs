//! How the tensors of a file are made of those of a folder: joined, with other rows, or by other values.

use super::content::Entry;
use super::folder::in_f32;
use super::mixture;
use crate::source::{Source, Weights};
use crate::spec::Spec;
use bytes::Bytes;
use halcyon::ConstData;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::{GgmlType, TensorInfo};
use std::collections::BTreeMap;

/// A tensor of the file.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) name: String,
    /// Its parts, whose rows follow each other in each of `groups` groups.
    pub(super) parts: Vec<Part>,
    pub(super) groups: usize,
}

/// A tensor with a canonical name, and what changes in it.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) name: String,
    /// The canonical name of what it becomes.
    pub(super) target: String,
    /// The sizes after the change.
    pub(super) dims: Vec<usize>,
    /// The type before it.
    pub(super) stored: GgmlType,
    pub(super) edit: Edit,
}

#[derive(Clone, Debug)]
pub(super) struct Edit {
    /// Whether 1 is added.
    pub(super) shift: bool,
    /// The values are multiplied by this.
    pub(super) scale: f64,
    pub(super) pick: Pick,
}

impl Default for Edit {
    fn default() -> Edit {
        Edit { shift: false, scale: 1.0, pick: Pick::All }
    }
}

/// The elements that are kept, in their order.
#[derive(Clone, Debug)]
pub(crate) enum Pick {
    All,
    /// These rows; of a vector these elements.
    Rows(Vec<usize>),
    /// Of each row these pieces of `unit` elements.
    Columns {
        unit: usize,
        order: Vec<usize>,
    },
    /// Rows `first..first + count` of each of some heads of `all` rows, and each head's transposed.
    Transposed {
        all: usize,
        first: usize,
        count: usize,
    },
}

impl Part {
    /// A tensor as it is.
    pub(super) fn whole(name: &str, dims: &[usize], stored: GgmlType) -> Part {
        Part { name: name.into(), target: name.into(), dims: dims.into(), stored, edit: Edit::default() }
    }

    fn is_exact(&self) -> bool {
        !self.edit.shift && (self.edit.scale - 1.0).abs() < 1e-9
    }

    /// The type that the change keeps.
    fn kept(&self) -> Option<GgmlType> {
        let ty = self.stored;
        let known = matches!(ty, GgmlType::Block(_) | GgmlType::F32 | GgmlType::F16 | GgmlType::BF16);
        let whole = match &self.edit.pick {
            Pick::All | Pick::Rows(_) => true,
            Pick::Columns { unit, .. } => unit.is_multiple_of(ty.elements()),
            Pick::Transposed { .. } => ty.elements() == 1,
        };
        Some(ty).filter(|_| known && whole && self.is_exact())
    }

    /// Puts the values of the file into `out`, the tensor of `dims` of which the part is made.
    pub(super) fn undo(&self, values: &[f32], dims: &[usize], out: &mut [f32]) {
        let sub = f64::from(u8::from(self.edit.shift));
        let one = |v: f32| (f64::from(v) / self.edit.scale - sub) as f32;
        let width = match dims {
            [_] => 1,
            _ => dims.last().copied().unwrap_or(1).max(1),
        };
        let from: Box<dyn Fn(usize) -> usize> = match &self.edit.pick {
            Pick::All => Box::new(|i| i),
            Pick::Rows(order) => {
                Box::new(move |i| order.get(i / width).map_or(usize::MAX, |r| r * width + i % width))
            }
            Pick::Columns { unit, order } => Box::new(move |i| {
                let piece = order.get(i % width / unit).copied().unwrap_or(0);
                i / width * width + piece * unit + i % unit
            }),
            Pick::Transposed { all, first, count } => Box::new(move |i| {
                let (head, column, row) = (i / (width * count), i / count % width, i % count);
                (head * all + first + row) * width + column
            }),
        };
        for (i, v) in values.iter().enumerate() {
            if let Some(o) = out.get_mut(from(i)) {
                *o = one(*v);
            }
        }
    }

    /// The values in `ty`, which is the kept type or f32.
    fn bytes(&self, w: Weights, ty: GgmlType) -> Result<Bytes> {
        let dims = w.dims();
        let bytes = match ty == self.stored && self.is_exact() {
            true => Bytes::from_owner(Shared(w.data)),
            false => {
                let add = f64::from(u8::from(self.edit.shift));
                let one = |v: f32| ((f64::from(v) + add) * self.edit.scale) as f32;
                in_f32(&w)?.into_iter().flat_map(|v| one(v).to_le_bytes()).collect::<Vec<u8>>().into()
            }
        };
        let rows: usize = match &dims[..] {
            [n] => *n,
            [rows @ .., _] => rows.iter().product(),
            [] => 1,
        };
        let width = bytes.len() / rows.max(1);
        let piece = |at: usize, len: usize| {
            let missing = || Error::internal(format!("'{}' has fewer rows than its metadata", self.name));
            bytes.get(at..at + len).ok_or_else(missing)
        };
        let mut out = Vec::with_capacity(bytes.len());
        match &self.edit.pick {
            Pick::All => return Ok(bytes),
            Pick::Rows(order) => {
                for r in order {
                    out.extend_from_slice(piece(r * width, width)?);
                }
            }
            Pick::Columns { unit, order } => {
                let size = width / order.len().max(1);
                debug_assert_eq!(dims.last().map(|n| n / order.len().max(1)), Some(*unit));
                for row in 0..rows {
                    for c in order {
                        out.extend_from_slice(piece(row * width + c * size, size)?);
                    }
                }
            }
            Pick::Transposed { all, first, count } => {
                let size = ty.bytes();
                for head in 0..rows / (*all).max(1) {
                    for column in 0..width / size {
                        for row in *first..first + count {
                            out.extend_from_slice(piece((head * all + row) * width + column * size, size)?);
                        }
                    }
                }
            }
        }
        Ok(out.into())
    }
}

/// The bytes of a tensor.
struct Shared(ConstData);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl Output {
    /// The tensors of parts that `place` gives a name, a number among the parts, and a number of groups.
    pub(super) fn all(
        parts: impl IntoIterator<Item = Part>,
        place: &dyn Fn(&str) -> (String, usize, usize),
    ) -> Vec<Output> {
        let mut all: BTreeMap<String, (usize, BTreeMap<usize, Part>)> = BTreeMap::new();
        for p in parts {
            let (name, number, groups) = place(&p.target);
            all.entry(name).or_insert_with(|| (groups, BTreeMap::new())).1.insert(number, p);
        }
        let one = |(name, (groups, parts)): (String, (usize, BTreeMap<usize, Part>))| Output {
            name,
            parts: parts.into_values().collect(),
            groups,
        };
        all.into_iter().map(one).collect()
    }

    /// The entry of the file. Matrices keep their type, if all parts have the same; others become f32.
    pub(super) fn entry<'a>(self, source: &'a Source, spec: &Spec) -> Entry<'a> {
        let mut dims = self.parts.first().map(|p| p.dims.clone()).unwrap_or_default();
        let axis = usize::from(dims.len() == 3);
        if let Some(n) = dims.get_mut(axis).filter(|_| self.parts.len() > 1) {
            *n = self.parts.iter().filter_map(|p| p.dims.get(axis)).sum();
        }
        let mut info = TensorInfo::new(self.name.clone(), &dims, GgmlType::F32);
        let kept: Vec<Option<GgmlType>> = self.parts.iter().map(Part::kept).collect();
        if let [Some(first), ..] = kept[..]
            && kept.iter().all(|k| *k == Some(first))
            && mixture::is_quantised(&info)
        {
            info.ty = first;
        }
        let (ty, spec) = (info.ty, spec.clone());
        Entry::made(info, move || self.bytes(source, &spec, ty))
    }

    fn bytes(&self, source: &Source, spec: &Spec, ty: GgmlType) -> Result<Bytes> {
        let one = |p: &Part| {
            let missing = || Error::internal(format!("'{}' has gone", p.name));
            p.bytes(source.find(spec, &p.name)?.ok_or_else(missing)?, ty)
        };
        let mut parts = self.parts.iter().map(one).collect::<Result<Vec<_>>>()?;
        if parts.len() == 1 {
            return Ok(parts.remove(0));
        }
        let group = |g: usize| {
            parts.iter().map(move |p| {
                let n = p.len() / self.groups.max(1);
                &p[g * n..(g + 1) * n]
            })
        };
        Ok((0..self.groups).flat_map(group).collect::<Vec<&[u8]>>().concat().into())
    }
}
