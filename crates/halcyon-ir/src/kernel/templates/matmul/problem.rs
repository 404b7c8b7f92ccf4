//! A product's sizes and strides, and the kernel parameters that hold them.

use super::super::common::*;
use crate::kernel::{Builder, E};
use crate::layout::{View, collapse};

/// The sizes and strides of a product with up to four batch dimensions.
#[derive(Clone, Debug)]
pub(super) struct Problem {
    pub batch: Vec<usize>,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Strides of the left operand (batch, row, K), then of the right operand (batch, K, column).
    pub ab: Vec<isize>,
    pub am: isize,
    pub ak: isize,
    pub bb: Vec<isize>,
    pub bk: isize,
    pub bn: isize,
    /// Strides of the result (row, column).
    pub ym: isize,
    pub yn: isize,
}

impl Problem {
    pub(super) fn new(a: &View, w: &View) -> Problem {
        let r = a.rank();
        let (m, k, n) = (a.shape[r - 2], a.shape[r - 1], w.shape[r - 1]);
        let batch = |v: &View| View {
            shape: v.shape[..r - 2].into(),
            strides: v.strides[..r - 2].into(),
            offset: 0,
            mask: None,
        };
        let (mut va, mut vb) = (batch(a), batch(w));
        collapse(&mut [&mut va, &mut vb], r - 2);
        let mut p = Problem {
            batch: va.shape.to_vec(),
            m,
            n,
            k,
            ab: va.strides.to_vec(),
            am: a.strides[r - 2],
            ak: a.strides[r - 1],
            bb: vb.strides.to_vec(),
            bk: w.strides[r - 2],
            bn: w.strides[r - 1],
            ym: n as isize,
            yn: 1,
        };
        // If the whole batch has one right operand, fold the batch into the rows.
        if let ([d], [sa], [0]) = (&p.batch[..], &p.ab[..], &p.bb[..])
            && (m == 1 || *sa == m as isize * p.am)
        {
            if m == 1 {
                p.am = *sa;
            }
            p.m = m * d;
            (p.batch, p.ab, p.bb) = (vec![], vec![], vec![]);
        }
        p
    }

    pub(super) fn batches(&self) -> usize {
        self.batch.iter().product()
    }

    /// The product of the transposes, `wᵀ aᵀ`, which writes the transposed result.
    pub(super) fn transposed(&self) -> Problem {
        Problem {
            batch: self.batch.clone(),
            m: self.n,
            n: self.m,
            k: self.k,
            ab: self.bb.clone(),
            am: self.bn,
            ak: self.bk,
            bb: self.ab.clone(),
            bk: self.ak,
            bn: self.am,
            ym: self.yn,
            yn: self.ym,
        }
    }

    /// Number of batch dimensions that the kernel is built for: one or four.
    pub(super) fn rank_class(&self) -> usize {
        if self.batch.len() <= 1 { 1 } else { 4 }
    }
}

/// The parameters that all kernels have.
pub(super) struct Shape<'a> {
    pub m: E<'a>,
    pub n: E<'a>,
    pub k: E<'a>,
    pub batch: Vec<E<'a>>,
    pub ab: Vec<E<'a>>,
    pub bb: Vec<E<'a>>,
    pub am: E<'a>,
    pub ak: E<'a>,
    pub bk: E<'a>,
    pub bn: E<'a>,
}

impl<'a> Shape<'a> {
    pub(super) fn declare(b: &'a Builder, class: usize) -> Shape<'a> {
        Shape {
            m: b.size("m"),
            n: b.size("n"),
            k: b.size("k"),
            batch: sizes(b, "d", class),
            ab: sizes(b, "ab", class),
            bb: sizes(b, "bb", class),
            am: b.size("am"),
            ak: b.size("ak"),
            bk: b.size("bk"),
            bn: b.size("bn"),
        }
    }

    /// Number of batches.
    pub(super) fn batches(&self) -> E<'a> {
        self.batch[1..].iter().fold(self.batch[0], |p, d| p * *d)
    }

    /// Offsets of batch `i` in both operands.
    pub(super) fn starts(&self, b: &'a Builder, i: E<'a>) -> (E<'a>, E<'a>) {
        let (mut rest, mut x, mut w) = (i, b.index(0), b.index(0));
        for d in (0..self.batch.len()).rev() {
            let at = if d == 0 { rest } else { b.let_(rest.imod(self.batch[d])) };
            x = x + at * self.ab[d];
            w = w + at * self.bb[d];
            if d > 0 {
                rest = b.let_(rest.idiv(self.batch[d]));
            }
        }
        (b.let_(x), b.let_(w))
    }
}

pub(super) fn fill(args: &mut Args, p: &Problem, class: usize) {
    let pad = |v: &[isize]| {
        let mut v = v.to_vec();
        v.resize(class, 0);
        v
    };
    let mut d = p.batch.clone();
    d.resize(class, 1);
    args.int("m", p.m as i64).int("n", p.n as i64).int("k", p.k as i64);
    args.ints("d", d.iter().map(|&d| d as i64));
    args.ints("ab", pad(&p.ab).iter().map(|&s| s as i64));
    args.ints("bb", pad(&p.bb).iter().map(|&s| s as i64));
    args.int("am", p.am as i64).int("ak", p.ak as i64);
    args.int("bk", p.bk as i64).int("bn", p.bn as i64);
}
