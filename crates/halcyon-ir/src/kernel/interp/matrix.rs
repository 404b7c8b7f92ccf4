//! The instructions on fragments, which all work-items of a subgroup execute together, and the access to
//! single elements.

use super::code::{Ins, Reg};
use super::{Fault, Memory, Run, Space, scalar};
use crate::dtype::DType;
use crate::kernel::ir::*;

impl<M: Memory + ?Sized> Run<'_, M> {
    /// Executes a matrix instruction for the subgroup whose first work-item is `first`.
    pub(super) fn matrix(&mut self, first: usize, pc: usize) {
        (self.item, self.base) = (first, first);
        let place = |f: u32, r: &Self| first / r.subgroup as usize * r.kernel.fragments.len() + f as usize;
        match self.code.ins[pc] {
            Ins::Fill { dst, value } => {
                let v = self.uniform_value(value, pc);
                let [rows, columns] = self.kernel.fragments[dst as usize].shape();
                let at = place(dst, self);
                self.matrices[at] = Some(vec![f32::from_bits(v as u32); rows * columns]);
            }
            Ins::LoadMatrix { matrix, arr, at, column_major } => {
                let d = self.kernel.fragments[matrix as usize];
                let places = self.places(matrix, arr, at, column_major, pc);
                let v = places.into_iter().map(|p| {
                    let Some((word, shift)) = p else { return 0.0 };
                    self.record_access(arr, word, false, pc);
                    let raw = self.locals[word] as u32 >> shift;
                    match d.op.operand {
                        MatrixType::Tf32 => tf32(f32::from_bits(raw)),
                        _ => f32::from_bits(scalar::load(d.storage(), (raw & 0xffff) as u64) as u32),
                    }
                });
                let v = v.collect();
                let to = place(matrix, self);
                self.matrices[to] = Some(v);
            }
            Ins::StoreMatrix { matrix, arr, at } => {
                let v = self.fragment_values(matrix, place(matrix, self), pc);
                let places = self.places(matrix, arr, at, false, pc);
                for (p, v) in places.into_iter().zip(v) {
                    if let Some((word, _)) = p {
                        self.record_access(arr, word, true, pc);
                        self.locals[word] = v.to_bits() as u64;
                    }
                }
            }
            Ins::Mma { sum, a, b } => {
                let [m, n, k] = {
                    let op = self.kernel.fragments[sum as usize].op;
                    [op.m, op.n, op.k].map(usize::from)
                };
                let x = self.fragment_values(a, place(a, self), pc);
                let y = self.fragment_values(b, place(b, self), pc);
                let mut c = self.fragment_values(sum, place(sum, self), pc);
                for i in 0..m {
                    for j in 0..n {
                        let dot = (0..k).fold(c[i * n + j], |s, l| x[i * k + l].mul_add(y[l * n + j], s));
                        c[i * n + j] = dot;
                    }
                }
                let to = place(sum, self);
                self.matrices[to] = Some(c);
            }
            Ins::ReduceMatrix { dst, src, op } => {
                let x = self.fragment_values(src, place(src, self), pc);
                let mut rows = self.fragment_values(dst, place(dst, self), pc);
                let both = |a: f32, b: &f32| {
                    let v = scalar::eval(op.op(), Ty::F32, [a.to_bits() as u64, b.to_bits() as u64, 0]);
                    f32::from_bits(v as u32)
                };
                let columns = x.len() / rows.len();
                for (r, x) in rows.iter_mut().zip(x.chunks(columns)) {
                    *r = x.iter().fold(*r, both);
                }
                let to = place(dst, self);
                self.matrices[to] = Some(rows);
            }
            Ins::ConvertMatrix { dst, src, column, arr, at } => {
                let x = self.fragment_values(src, place(src, self), pc);
                let d = self.kernel.fragments[dst as usize];
                let round = |v: f32| match d.op.operand {
                    MatrixType::Tf32 => tf32(v),
                    _ => {
                        let raw = scalar::store(d.storage(), v.to_bits() as u64);
                        f32::from_bits(scalar::load(d.storage(), raw) as u32)
                    }
                };
                let (n, k) = (d.op.n as usize, d.op.k as usize);
                let v = x.chunks(n).flat_map(|r| r[column as usize..][..k].iter().map(|v| round(*v)));
                let to = place(dst, self);
                self.matrices[to] = Some(v.collect());
                // A device that converts through memory stores all of the sums, so the rows must not overlap.
                let stride = self.uniform_value(at[1], pc) as i64;
                if stride < n as i64 {
                    self.report(Fault::Race, Space::Local(LocalId(arr)), stride, None, pc);
                }
                let passed = self.span(d.storage(), [d.op.m as i64, n as i64], arr, at, false, pc);
                for (word, _) in passed.into_iter().flatten() {
                    self.record_access(arr, word, true, pc);
                    if let Some(s) = &mut self.shadow {
                        s.forget_local(word);
                    }
                }
            }
            _ => {}
        }
    }

    /// The value of a register, which must be equal for all work-items of the subgroup.
    fn uniform_value(&mut self, r: Reg, pc: usize) -> u64 {
        let v = self.get(r);
        let end = (self.item + self.subgroup as usize).min(self.kernel.items() as usize);
        if (self.item..end).any(|i| self.regs[i * self.code.regs + r as usize] != v) {
            self.report(Fault::Divergent, Space::None, v as i64, None, pc);
        }
        v
    }

    /// The element of the subgroup's fragment at the current row and column of a map; for row fragments, the
    /// element of the row. Reports a fault and returns `None` if the fragment was never set.
    pub(super) fn element(&mut self, f: u32, at: [Reg; 2], pc: usize) -> Option<&mut f32> {
        let [row, column] = at.map(|r| self.get(r) as usize);
        let [_, columns] = self.kernel.fragments[f as usize].shape();
        let place = if columns == 1 { row } else { row * columns + column };
        let held = self.item / self.subgroup as usize * self.kernel.fragments.len() + f as usize;
        if self.matrices[held].is_none() {
            self.report(Fault::Uninitialised, Space::Matrix(FragmentId(f)), place as i64, None, pc);
        }
        self.matrices[held].as_mut()?.get_mut(place)
    }

    /// The elements of a fragment. If it was never set, reports a fault and returns zeros.
    fn fragment_values(&mut self, f: u32, at: usize, pc: usize) -> Vec<f32> {
        if let Some(v) = &self.matrices[at] {
            return v.clone();
        }
        self.report(Fault::Uninitialised, Space::Matrix(FragmentId(f)), 0, None, pc);
        let [rows, columns] = self.kernel.fragments[f as usize].shape();
        vec![0.0; rows * columns]
    }

    /// Word and first bit of each element, row by row; `None` if out of bounds.
    fn places(
        &mut self,
        f: u32,
        arr: u32,
        at: [Reg; 2],
        column_major: bool,
        pc: usize,
    ) -> Vec<Option<(usize, u32)>> {
        let d = self.kernel.fragments[f as usize];
        self.span(d.storage(), d.shape().map(|n| n as i64), arr, at, column_major, pc)
    }

    fn span(
        &mut self,
        dtype: DType,
        [rows, columns]: [i64; 2],
        arr: u32,
        at: [Reg; 2],
        column_major: bool,
        pc: usize,
    ) -> Vec<Option<(usize, u32)>> {
        let [offset, stride] = at.map(|r| self.uniform_value(r, pc) as i64);
        let per = if dtype == DType::F32 { 1 } else { 2 };
        for v in [offset, stride] {
            if v % (4 * per) != 0 {
                self.report(Fault::Misaligned, Space::Local(LocalId(arr)), v, None, pc);
            }
        }
        let words = self.kernel.locals[arr as usize].len as i64 * 4;
        let mut out = Vec::with_capacity((rows * columns) as usize);
        for i in 0..rows {
            for j in 0..columns {
                let e = offset + if column_major { j * stride + i } else { i * stride + j };
                let w = e.div_euclid(per);
                out.push(if (0..words).contains(&w) {
                    Some((self.code.locals[arr as usize] + w as usize, (e.rem_euclid(per) * 16) as u32))
                } else {
                    self.report(Fault::OutOfBounds, Space::Local(LocalId(arr)), w / 4, None, pc);
                    None
                });
            }
        }
        out
    }

    /// Records an access by the subgroup's first work-item in the shadow memory.
    fn record_access(&mut self, arr: u32, word: usize, write: bool, pc: usize) {
        let item = self.item as u32;
        let found = match &mut self.shadow {
            Some(s) if write => s.write_local(word, 1, item),
            Some(s) => s.read_local(word, 1, item),
            None => None,
        };
        if let Some((fault, other)) = found {
            let index = (word - self.code.locals[arr as usize]) as i64 / 4;
            self.report(fault, Space::Local(LocalId(arr)), index, other, pc);
        }
    }
}

/// Rounds to 10 fraction bits: to nearest, ties away from zero. Infinities and NaN are unchanged.
fn tf32(x: f32) -> f32 {
    if x.is_finite() { f32::from_bits(x.to_bits().wrapping_add(0x1000) & !0x1fff) } else { x }
}
