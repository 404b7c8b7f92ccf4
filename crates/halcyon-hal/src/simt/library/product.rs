//! A matrix product as BLAS libraries take it: column-major matrices with a leading dimension, and batches by
//! a stride.
//!
//! Row-major C = A B is column-major Cᵀ = Bᵀ Aᵀ, so the call's right operand is the library's first one.

use crate::{Declined, LibraryCall};
use halcyon_ir::DType;
use halcyon_ir::layout::{View, collapse};
use halcyon_ir::op::Op;
use halcyon_ir::passes::bytes;
use halcyon_ir::target::Work;

/// Multiply-adds below which a product is a generated kernel: a launch costs as much, and choosing an
/// algorithm more.
const TINY: usize = 1 << 15;
/// Calls that one product may be made of, where its batch has no single stride.
const MANY: usize = 16;

/// One operand, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    pub offset: isize,
    /// Its rows (in the row-major sense) follow each other; otherwise its columns do.
    pub by_rows: bool,
    /// Elements from row to row, or from column to column.
    pub ld: usize,
    /// Elements to the next one of the batch.
    pub step: isize,
}

/// `c[i] = a[i] b[i]` with `a` m by k and `b` k by n, all row-major in the names of the call.
#[derive(Clone, Debug)]
pub struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Matrix,
    pub b: Matrix,
    pub batch: usize,
    /// Elements of the result to the next one of the batch.
    pub step: isize,
    /// Offsets of a, b and c, in elements, of each call.
    pub calls: Vec<[isize; 3]>,
    /// Of the factors, and of the product.
    pub factors: [DType; 2],
    pub result: DType,
    /// What the product is multiplied by: one f32 of an operand.
    pub scale: Option<Scale>,
}

/// One number on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    /// Place among the call's inputs.
    pub input: usize,
    /// Bytes to it.
    pub offset: isize,
}

/// The types of bytes that a call of [`bytes::BYTE_MATMUL`] multiplies.
pub fn of_bytes(call: &LibraryCall<'_>) -> Option<[DType; 2]> {
    match call.work {
        Work::Op(Op::Composite(c)) => bytes::formats(c),
        _ => None,
    }
}

/// Results of products of 8-bit floats.
const OF_EIGHT_BITS: &[DType] = &[DType::F32, DType::F16, DType::BF16];

/// Type pairs that there are kernels for, where both factors have one.
const TYPES: &[(DType, DType)] = &[
    (DType::F32, DType::F32),
    (DType::F64, DType::F64),
    (DType::F16, DType::F16),
    (DType::BF16, DType::BF16),
    (DType::BF16, DType::F32),
    (DType::I8, DType::I32),
];

/// How a matrix of these sizes and strides lies, if a leading dimension says it: whether by rows, and the
/// dimension.
fn lies(rows: usize, cols: usize, rs: isize, cs: isize) -> Option<(bool, usize)> {
    let at_least = |stride: isize, n: usize| stride >= n as isize;
    if (cs == 1 || cols == 1) && (rows == 1 || at_least(rs, cols)) {
        return Some((true, if rows == 1 { cols } else { rs as usize }));
    }
    if (rs == 1 || rows == 1) && (cols == 1 || at_least(cs, rows)) {
        return Some((false, if cols == 1 { rows } else { cs as usize }));
    }
    None
}

impl Product {
    pub fn of(call: &LibraryCall<'_>) -> Result<Product, Declined> {
        let [a, b, ..] = call.inputs else {
            return Err(Declined::because("two operands are needed"));
        };
        let rank = a.view.rank();
        if rank < 2 || rank != b.view.rank() {
            return Err(Declined::because("operands of one rank, at least 2, are needed"));
        }
        let bytes = of_bytes(call);
        let mut b_view = b.view.clone();
        if bytes.is_some() {
            // Its rows are the product's columns.
            b_view.shape.swap(rank - 2, rank - 1);
            b_view.strides.swap(rank - 2, rank - 1);
        }
        // With a chain on top, the call's output is the chain's.
        let result = match &call.epilogue {
            None => Some(call.outputs[0].dtype),
            Some(e) => e.fused.loads.iter().find(|l| l.input == e.product).map(|l| l.dtype),
        };
        let factors = bytes.unwrap_or([a.dtype, b.dtype]);
        let known = result.filter(|r| match factors {
            [a, b] if !a.is_native() && !b.is_native() => OF_EIGHT_BITS.contains(r),
            [a, b] => a == b && TYPES.contains(&(a, *r)),
        });
        let Some(result) = known else {
            return Err(Declined::because(format!(
                "no product of {} and {} into {}",
                factors[0], factors[1], call.outputs[0].dtype
            )));
        };
        let own = match call.work {
            Work::Op(Op::Composite(c)) => c.body.inputs().len(),
            _ => 2,
        };
        let scale = call.inputs[..own].get(2).map(|s| {
            let offset = s.view.offset * s.dtype.size() as isize;
            Scale { input: 2, offset }
        });
        let (mut m, k, n) = (a.view.shape[rank - 2], a.view.shape[rank - 1], b_view.shape[rank - 1]);
        let strides = |v: &View| (v.strides[rank - 2], v.strides[rank - 1]);
        let head = |v: &View| View {
            shape: v.shape[..rank - 2].into(),
            strides: v.strides[..rank - 2].into(),
            offset: 0,
            mask: None,
        };
        let mut c = head(&View::dense(&[&a.view.shape[..rank - 2], &[m, n][..]].concat()));
        let total = c.shape.iter().product::<usize>();
        if m * n * k * total == 0 {
            return Err(Declined::because("an empty product"));
        }
        let (mut ba, mut bb) = (head(&a.view), head(&b_view));
        collapse(&mut [&mut ba, &mut bb, &mut c], rank - 2);
        // Sizes, and strides of a, b and c; the longest axis is the library's.
        let mut axes: Vec<(usize, [isize; 3])> =
            (0..c.rank()).map(|i| (ba.shape[i], [ba.strides[i], bb.strides[i], c.strides[i]])).collect();
        axes.sort_by_key(|(n, _)| *n);
        let (mut batch, [sa, sb, sc]) = axes.pop().unwrap_or((1, [0; 3]));
        let (ra, ca) = strides(&a.view);
        let (rb, cb) = strides(&b_view);
        // One right factor for a whole batch whose rows follow each other: one product with more rows.
        if batch > 1 && sb == 0 && sc == (m * n) as isize && sa == m as isize * ra && (ca == 1 || k == 1) {
            m *= batch;
            batch = 1;
        }
        if m == 1 || n == 1 {
            return Err(Declined::because(
                "a product with one row or one column is bound by memory: generated kernels read the matrix once",
            ));
        }
        if m.saturating_mul(n).saturating_mul(k).saturating_mul(total) < TINY {
            return Err(Declined::because(format!(
                "fewer than {TINY} multiply-adds are a generated kernel's work"
            )));
        }
        let matrix = |which: usize, rows, cols, (rs, cs), step| match lies(rows, cols, rs, cs) {
            Some((by_rows, ld)) if step >= 0 => {
                Ok(Matrix { offset: call.inputs[which].view.offset, by_rows, ld, step })
            }
            _ => Err(Declined::needs_dense([which])),
        };
        let (a_matrix, b_matrix) = (matrix(0, m, k, (ra, ca), sa)?, matrix(1, k, n, (rb, cb), sb)?);
        let most = i32::MAX as usize;
        if [m, n, k, a_matrix.ld, b_matrix.ld, batch].iter().any(|d| *d > most) {
            return Err(Declined::because("a dimension is past 2³¹"));
        }
        let count: usize = axes.iter().map(|(n, _)| n).product();
        if count > MANY {
            return Err(Declined::because(format!("its batch would take {count} calls")));
        }
        let calls = (0..count)
            .map(|i| {
                let (mut left, mut at) = (i, [a_matrix.offset, b_matrix.offset, 0]);
                for (n, s) in axes.iter().rev() {
                    let here = (left % n) as isize;
                    left /= n;
                    (0..3).for_each(|x| at[x] += here * s[x]);
                }
                at
            })
            .collect();
        Ok(Product { m, n, k, a: a_matrix, b: b_matrix, batch, step: sc, calls, factors, result, scale })
    }

    /// Bytes of an element of a, b and c.
    pub fn sizes(&self) -> [isize; 3] {
        let [a, b] = self.factors;
        [a, b, self.result].map(|d| d.size() as isize)
    }

    /// What every call's a, b and c begin at a multiple of, in bytes, in buffers that begin at a multiple of
    /// `most`.
    pub fn alignment(&self, most: usize) -> [u32; 3] {
        let sizes = self.sizes();
        std::array::from_fn(|x| {
            let one = |at: &[isize; 3]| alignment(at[x] * sizes[x], most);
            self.calls.iter().map(one).min().unwrap_or(1)
        })
    }
}

/// The largest power of two up to `most` that divides an offset in bytes.
pub fn alignment(bytes: isize, most: usize) -> u32 {
    match bytes {
        0 => most as u32,
        b => (1u32 << b.trailing_zeros().min(31)).min(most as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Operand;
    use halcyon_ir::op::Op;
    use halcyon_ir::target::Work;

    fn of(a: View, b: View, types: (DType, DType)) -> Result<Product, Declined> {
        let shape = [&a.shape[..a.rank() - 1], &b.shape[b.rank() - 1..]].concat();
        let inputs = [a, b].map(|view| Operand { dtype: types.0, view });
        let outputs = [Operand { dtype: types.1, view: View::dense(&shape) }];
        Product::of(&LibraryCall::new(Work::Op(&Op::Matmul), &inputs, &outputs))
    }

    const F32: (DType, DType) = (DType::F32, DType::F32);

    #[test]
    fn views_become_leading_dimensions_strides_and_calls() {
        let p = of(View::dense(&[64, 48]), View::dense(&[80, 48]).permute(&[1, 0]), F32).unwrap();
        assert_eq!((p.m, p.n, p.k, p.batch, p.calls.len()), (64, 80, 48, 1, 1));
        assert_eq!((p.a.by_rows, p.a.ld, p.b.by_rows, p.b.ld), (true, 48, false, 48));
        // A window of a larger matrix: the alignment is the offset's.
        let window = View::dense(&[100, 100]).slice(&[3, 6], &[1, 1], &[64, 48]);
        let p = of(window, View::dense(&[48, 80]), F32).unwrap();
        assert_eq!((p.a.ld, p.a.offset, p.alignment(256)), (100, 306, [8, 256, 256]));
        // One weight for a batch is one product; a broadcast left factor is not.
        let p = of(View::dense(&[4, 32, 48]), View::dense(&[48, 80]).expand(&[4, 48, 80]), F32).unwrap();
        assert_eq!((p.m, p.batch), (128, 1));
        let p = of(View::dense(&[32, 48]).expand(&[4, 32, 48]), View::dense(&[4, 48, 80]), F32).unwrap();
        assert_eq!((p.m, p.batch, p.a.step, p.b.step, p.step), (32, 4, 0, 3840, 2560));
        // Heads between the rows: one call for each of the batch.
        let heads = View::dense(&[2, 32, 8, 16]).permute(&[0, 2, 1, 3]);
        let p = of(heads.clone(), heads.permute(&[0, 1, 3, 2]), F32).unwrap();
        assert_eq!((p.batch, p.a.step, p.a.ld, p.calls.len()), (8, 16, 128, 2));
        assert_eq!(p.calls[1], [32 * 8 * 16, 32 * 8 * 16, 8 * 32 * 32]);
    }

    #[test]
    fn what_is_declined_says_why() {
        let square = || View::dense(&[64, 64]);
        for (a, b, types, why) in [
            (View::dense(&[1, 4096]), View::dense(&[4096, 64]), F32, "one row or one column"),
            (View::dense(&[8, 8]), View::dense(&[8, 8]), F32, "multiply-adds"),
            (square(), square(), (DType::U8, DType::I32), "no product of u8"),
            (square(), square(), (DType::I8, DType::I8), "into i8"),
        ] {
            let d = of(a, b, types).unwrap_err();
            assert!(d.reason.contains(why) && d.dense.is_empty(), "{d:?}");
        }
        let spread = View::dense(&[64, 128]).slice(&[0, 0], &[1, 2], &[64, 64]);
        assert_eq!(of(square(), spread, F32).unwrap_err().dense, [1]);
        assert_eq!(of(View::dense(&[64]).expand(&[64, 64]), square(), F32).unwrap_err().dense, [0]);
    }
}
