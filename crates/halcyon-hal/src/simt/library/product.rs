//! Describes a matrix product in BLAS terms: column-major matrices with a leading dimension, and batches with
//! a stride.
//!
//! Row-major C = A B is column-major Cᵀ = Bᵀ Aᵀ, so the call's right operand is the library's first factor.

use crate::Declined;
use crate::library_call::CallForm;
use halcyon_ir::DType;
use halcyon_ir::layout::{View, collapse};
use halcyon_ir::ops::Op;
use halcyon_ir::passes::bytes;
use halcyon_ir::target::Work;

/// Products of fewer multiply-adds use a generated kernel. For such a product, the launch of a library kernel
/// takes as long as the product, and the choice of its algorithm takes longer.
const MIN_MULTIPLY_ADDS: usize = 1 << 15;
/// Maximum number of library calls for one product whose batch has no single stride.
const MAX_CALLS: usize = 16;

/// One operand, in units of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    pub offset: isize,
    /// Whether the matrix is row-major: the elements of a row are contiguous. Otherwise the elements of a
    /// column are contiguous.
    pub by_rows: bool,
    /// The leading dimension: the distance in elements between rows, or between columns if the matrix is
    /// column-major.
    pub ld: usize,
    /// Distance in elements between batch items.
    pub step: isize,
}

/// `c[i] = a[i] b[i]` with `a` m by k and `b` k by n, in the call's terms (not those of the transposed
/// product that the library computes). The result is row-major.
#[derive(Clone, Debug)]
pub(super) struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Matrix,
    pub b: Matrix,
    pub batch: usize,
    /// Distance in elements between batch items of the result.
    pub step: isize,
    /// Offsets of a, b and c in elements, for each library call.
    pub calls: Vec<[isize; 3]>,
    /// Types of the factors.
    pub factors: [DType; 2],
    /// Type of the product.
    pub result: DType,
    /// The number by which the product is multiplied, if any: an f32 in an operand.
    pub scale: Option<Scale>,
}

/// One number in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scale {
    /// Index among the call's inputs.
    pub input: usize,
    /// Offset in bytes.
    pub offset: isize,
}

/// The small float types that a call of [`halcyon_ir::composite::CompositeKind::ByteMatmul`] multiplies;
/// `None` for other calls.
pub(super) fn of_bytes(call: &CallForm<'_>) -> Option<[DType; 2]> {
    match call.work {
        Work::Op(Op::Composite(c)) => bytes::formats(c),
        _ => None,
    }
}

/// Result types of products of 8-bit floats.
const FP8_RESULTS: &[DType] = &[DType::F32, DType::F16, DType::BF16];

/// Supported pairs of factor and result type, if both factors have the same type.
const TYPES: &[(DType, DType)] = &[
    (DType::F32, DType::F32),
    (DType::F64, DType::F64),
    (DType::F16, DType::F16),
    (DType::BF16, DType::BF16),
    (DType::BF16, DType::F32),
    (DType::I8, DType::I32),
];

/// The layout of a matrix with these sizes and strides: whether it is row-major, and its leading dimension.
/// `None` if BLAS cannot express the layout.
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
    pub(super) fn of(call: &CallForm<'_>) -> Result<Product, Declined> {
        let [a, b, ..] = call.inputs else {
            return Err(Declined::because("two operands are needed"));
        };
        let rank = a.view.rank();
        if rank < 2 || rank != b.view.rank() {
            return Err(Declined::because("operands of the same rank, at least 2, are needed"));
        }
        let bytes = of_bytes(call);
        let mut b_view = b.view.clone();
        if bytes.is_some() {
            // The operand is stored transposed: its rows are the columns of the product.
            b_view.shape.swap(rank - 2, rank - 1);
            b_view.strides.swap(rank - 2, rank - 1);
        }
        let (lead, last) = (rank - 2, rank - 1);
        let (left, right) = (&a.view.shape, &b_view.shape);
        if left[..lead] != right[..lead] || left[last] != right[lead] {
            return Err(Declined::because("the factors have other sizes than those of a product"));
        }
        if let Some(types) = bytes
            && [a, b].iter().zip(types).any(|(x, t)| x.dtype.bits() != t.bits())
        {
            return Err(Declined::because("the factors have other types than the composite names"));
        }
        let written = left[..last].iter().product::<usize>() * right[last];
        if call.outputs[0].view.numel() != written {
            return Err(Declined::because("the result has another size than the product"));
        }
        if call
            .epilogue
            .as_ref()
            .is_some_and(|e| !matches!(&e.fused.outs[..], [o] if o.dtype == call.outputs[0].dtype))
        {
            return Err(Declined::because("the epilogue gives another type than the result has"));
        }
        let scale = match &call.inputs[2..call.own.max(2)] {
            [] => None,
            [s] if bytes.is_some() && s.dtype == DType::F32 && s.view.numel() == 1 => {
                Some(Scale { input: 2, offset: s.view.offset * s.dtype.size() as isize })
            }
            _ => return Err(Declined::because("a product has two factors, and of bytes one scale in f32")),
        };
        // If there is an epilogue, the call's output is the result of the epilogue, not of the product.
        let result = match &call.epilogue {
            None => Some(call.outputs[0].dtype),
            Some(e) => e.fused.loads.iter().find(|l| l.input == e.product).map(|l| l.dtype),
        };
        let factors = bytes.unwrap_or([a.dtype, b.dtype]);
        let known = result.filter(|r| match factors {
            [a, b] if !a.is_native() && !b.is_native() => FP8_RESULTS.contains(r),
            [a, b] => a == b && TYPES.contains(&(a, *r)),
        });
        let Some(result) = known else {
            return Err(Declined::because(format!(
                "no product of {} and {} into {}",
                factors[0], factors[1], call.outputs[0].dtype
            )));
        };
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
        if [m, n, k, total].contains(&0) {
            return Err(Declined::because("the product is empty"));
        }
        let (mut ba, mut bb) = (head(&a.view), head(&b_view));
        collapse(&mut [&mut ba, &mut bb, &mut c], rank - 2);
        // For each axis of the batch: its size, and its strides in a, b and c. The longest axis becomes the
        // library's batch.
        let mut axes: Vec<(usize, [isize; 3])> =
            (0..c.rank()).map(|i| (ba.shape[i], [ba.strides[i], bb.strides[i], c.strides[i]])).collect();
        axes.sort_by_key(|(n, _)| *n);
        let (mut batch, [sa, sb, sc]) = axes.pop().unwrap_or((1, [0; 3]));
        let (ra, ca) = strides(&a.view);
        let (rb, cb) = strides(&b_view);
        // If all products of the batch share one right factor, and the rows of the left factors and of the
        // results lie at constant distances over the whole batch, the batch is one product with more rows.
        if batch > 1 && sb == 0 && sc == (m * n) as isize && sa == m as isize * ra && (ca == 1 || k == 1) {
            m *= batch;
            batch = 1;
        }
        if m == 1 || n == 1 {
            return Err(Declined::because(
                "a product with one row or one column is bound by memory: generated kernels read the matrix once",
            ));
        }
        if m.saturating_mul(n).saturating_mul(k).saturating_mul(total) < MIN_MULTIPLY_ADDS {
            return Err(Declined::because(format!(
                "a call of fewer than {MIN_MULTIPLY_ADDS} multiply-adds uses a generated kernel"
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
            return Err(Declined::because("a dimension is 2³¹ or more"));
        }
        let count: usize = axes.iter().map(|(n, _)| n).product();
        if count > MAX_CALLS {
            return Err(Declined::because(format!("the batch would take {count} library calls")));
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

    /// Bytes per element of a, b and c.
    pub(super) fn sizes(&self) -> [isize; 3] {
        let [a, b] = self.factors;
        [a, b, self.result].map(|d| d.size() as isize)
    }

    /// Alignment in bytes of every call's a, b and c, if their buffers are aligned to `most`.
    pub(super) fn alignment(&self, most: usize) -> [u32; 3] {
        let sizes = self.sizes();
        std::array::from_fn(|x| {
            let one = |at: &[isize; 3]| alignment(at[x] * sizes[x], most);
            self.calls.iter().map(one).min().unwrap_or(1)
        })
    }
}

/// The largest power of two up to `most` that divides an offset in bytes.
pub(super) fn alignment(bytes: isize, most: usize) -> u32 {
    match bytes {
        0 => most as u32,
        b => (1u32 << b.trailing_zeros().min(31)).min(most as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LibraryCall, Operand};
    use halcyon_ir::composite::{Attr, Composite, CompositeKind};
    use halcyon_ir::ops::Op;
    use halcyon_ir::target::Work;
    use halcyon_ir::{Graph, TensorType};
    use std::sync::Arc;

    fn of(a: View, b: View, types: (DType, DType)) -> Result<Product, Declined> {
        let shape = [&a.shape[..a.rank() - 1], &b.shape[b.rank() - 1..]].concat();
        let inputs = [a, b].map(|view| Operand { dtype: types.0, view });
        let outputs = [Operand { dtype: types.1, view: View::dense(&shape) }];
        Product::of(&CallForm::plain(&LibraryCall::new(Work::Op(&Op::Matmul), &inputs, &outputs)))
    }

    const F32: (DType, DType) = (DType::F32, DType::F32);

    #[test]
    fn views_become_leading_dimensions_strides_and_calls() {
        let p = of(View::dense(&[64, 48]), View::dense(&[80, 48]).permute(&[1, 0]), F32).unwrap();
        assert_eq!((p.m, p.n, p.k, p.batch, p.calls.len()), (64, 80, 48, 1, 1));
        assert_eq!((p.a.by_rows, p.a.ld, p.b.by_rows, p.b.ld), (true, 48, false, 48));
        // A window of a larger matrix: the offset determines the alignment.
        let window = View::dense(&[100, 100]).slice(&[3, 6], &[1, 1], &[64, 48]);
        let p = of(window, View::dense(&[48, 80]), F32).unwrap();
        assert_eq!((p.a.ld, p.a.offset, p.alignment(256)), (100, 306, [8, 256, 256]));
        // A batch with one weight is one product; a broadcast left factor is not.
        let p = of(View::dense(&[4, 32, 48]), View::dense(&[48, 80]).expand(&[4, 48, 80]), F32).unwrap();
        assert_eq!((p.m, p.batch), (128, 1));
        let p = of(View::dense(&[32, 48]).expand(&[4, 32, 48]), View::dense(&[4, 48, 80]), F32).unwrap();
        assert_eq!((p.m, p.batch, p.a.step, p.b.step, p.step), (32, 4, 0, 3840, 2560));
        // In memory, the axis of the heads lies inside the rows, so the two batch axes have no common stride.
        // The heads become the library's batch, and each item of the outer batch axis is a call.
        let heads = View::dense(&[2, 32, 8, 16]).permute(&[0, 2, 1, 3]);
        let p = of(heads.clone(), heads.permute(&[0, 1, 3, 2]), F32).unwrap();
        assert_eq!((p.batch, p.a.step, p.a.ld, p.calls.len()), (8, 16, 128, 2));
        assert_eq!(p.calls[1], [32 * 8 * 16, 32 * 8 * 16, 8 * 32 * 32]);
    }

    /// Safe code may name a composite as it likes, and give it any operands and any body.
    #[test]
    fn products_of_bytes_have_the_sizes_and_types_of_a_product() {
        let of =
            |left: DType, shapes: [&[usize]; 2], dtype: DType, result: &[usize], scale: Option<usize>| {
                let attrs = [("left", left), ("right", left)].map(|(k, d)| (k.to_string(), Attr::DType(d)));
                let mut body = Graph::new();
                let x = body.input("x", TensorType::new(DType::F32, [1usize]));
                body.output("y", x);
                let kind = CompositeKind::ByteMatmul;
                let op = Op::Composite(Arc::new(Composite { kind, attrs: attrs.into(), body }));
                let dense = |dtype, shape: &[usize]| Operand { dtype, view: View::dense(shape) };
                let mut inputs: Vec<Operand> = shapes.iter().map(|s| dense(dtype, s)).collect();
                inputs.extend(scale.map(|n| dense(DType::F32, &[n])));
                let outputs = [dense(DType::F32, result)];
                Product::of(&CallForm::plain(&LibraryCall::new(Work::Op(&op), &inputs, &outputs)))
            };
        let (f8, square) = (DType::F8E4M3FN, [&[512, 512][..], &[512, 512]]);
        of(f8, square, DType::U8, &[512, 512], None).unwrap();
        of(f8, square, DType::U8, &[512, 512], Some(1)).unwrap();
        for (left, shapes, dtype, result, scale, why) in [
            (DType::F32, square, DType::U8, &[512, 512][..], None, "other types"),
            (f8, square, DType::U8, &[1], None, "another size"),
            (f8, [&[512, 512], &[512, 256]], DType::U8, &[512, 512], None, "other sizes"),
            (f8, [&[8, 128, 512], &[1, 128, 512]], DType::U8, &[8, 128, 128], None, "other sizes"),
            (f8, square, DType::U8, &[512, 512], Some(2), "one scale"),
        ] {
            let d = of(left, shapes, dtype, result, scale).unwrap_err();
            assert!(d.reason.contains(why), "{why}: {d:?}");
        }
    }

    #[test]
    fn declined_calls_have_a_reason() {
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
