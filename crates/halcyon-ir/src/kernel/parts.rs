//! Long reductions with few results. One workgroup per result would leave most of a GPU idle, so one kernel
//! reduces parts of the input, and a second kernel reduces the results of the parts.

use crate::dtype::Class;
use crate::fused::{Fused, Instr, InstrKind, Load, MAX_RANK, Out};
use crate::layout::View;
use crate::target::Caps;

/// Minimum number of points per part.
const MIN_POINTS: usize = 4096;

/// Splits a reduction into two kernels: the first reduces each part of one axis, the second the results of
/// the parts. These results are stored in the reduction's compute type. `None` if a single kernel has enough
/// workgroups, if no number of parts divides the axis evenly, or if the kernel cannot be split.
pub fn reduction_in_parts(f: &Fused, caps: &Caps) -> Option<[Fused; 2]> {
    let [out] = &f.outs[..] else { return None };
    if caps.is_cpu || f.reduced == 0 || f.space.len() >= MAX_RANK {
        return None;
    }
    let (outer, inner): (usize, usize) = (f.outer().iter().product(), f.inner().iter().product());
    let units = caps.units();
    if outer == 0 || outer >= 2 * units {
        return None;
    }
    let value = f.body.get(out.value as usize)?.dtype.compute();
    if value.class() == Class::Bool || !caps.storage.contains(&value) {
        return None;
    }
    let border = f.space.len() - f.reduced;
    let axis = (border..f.space.len()).max_by_key(|k| f.space[*k])?;
    let n = f.space[axis];
    // Cut at multiples of 16 elements if possible, so that every part is aligned to 16 bytes if the axis is.
    let unit = if n.is_multiple_of(16) { 16 } else { 1 };
    let most = (4 * units).div_ceil(outer).min(inner / MIN_POINTS);
    let parts = (2..=most).rev().find(|p| (n / unit).is_multiple_of(*p))?;
    // The value of an `Iota` along the axis would also depend on the index of the part.
    if f.body.iter().any(|i| i.kind == InstrKind::Iota(axis as u32)) {
        return None;
    }
    let chunk = n / parts;
    let mut first = f.clone();
    first.space.insert(border, parts);
    first.space[axis + 1] = chunk;
    for l in &mut first.loads {
        let v = &mut l.view;
        if let Some(mask) = &mut v.mask {
            if mask[axis] != (0, n) {
                return None;
            }
            mask[axis] = (0, chunk);
            mask.insert(border, (0, parts));
        }
        let step = v.strides[axis];
        v.shape[axis] = chunk;
        v.shape.insert(border, parts);
        v.strides.insert(border, step * chunk as isize);
    }
    for i in &mut first.body {
        if let InstrKind::Iota(k) = &mut i.kind
            && *k as usize >= border
        {
            *k += 1;
        }
    }
    let between: Vec<usize> = f.outer().iter().copied().chain([parts]).collect();
    let view = View::dense(&between);
    first.outs = vec![Out { dtype: value, view: view.clone(), ..out.clone() }];
    let last = Fused {
        space: between.as_slice().into(),
        reduced: 1,
        loads: vec![Load { input: 0, dtype: value, view, fill: None }],
        params: vec![],
        body: vec![Instr { kind: InstrKind::Load(0), dtype: value, args: Default::default() }],
        outs: vec![Out { value: 0, ..out.clone() }],
    };
    Some([first, last])
}
