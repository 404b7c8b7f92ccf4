//! Random tensors in every memory layout, and comparison.
#![allow(unreachable_pub, reason = "public for the test files that include this one")]
#![allow(dead_code)]

use halcyon_ir::kernel::MatrixOp;
use halcyon_ir::layout::View;
use halcyon_ir::target::{Caps, Operand};
use halcyon_ir::{DType, Scalar};

pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
    pub fn real(&mut self) -> f64 {
        self.next() as f64 / (1u64 << 31) as f64 * 4.0 - 2.0
    }
}

/// A tensor: its bytes, the view of them, and its elements in row-major order.
#[derive(Clone)]
pub struct Tensor {
    pub operand: Operand,
    pub bytes: Vec<u8>,
    pub values: Vec<f64>,
}

pub fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
    let n: usize = shape.iter().product();
    (0..n)
        .map(|i| {
            let (mut r, mut v) = (i, vec![0; shape.len()]);
            for k in (0..shape.len()).rev() {
                v[k] = r % shape[k];
                r /= shape[k];
            }
            v
        })
        .collect()
}

pub fn linear(shape: &[usize], idx: &[usize]) -> usize {
    shape.iter().zip(idx).fold(0, |a, (n, i)| a * n + i)
}

impl Tensor {
    /// Elements `f(i)` rounded to the type. In memory they are dense, transposed or part of a larger tensor.
    pub fn new(d: DType, shape: &[usize], layout: usize, mut f: impl FnMut(usize) -> f64) -> Tensor {
        let r = shape.len();
        let view = match layout % 3 {
            1 if r >= 2 => {
                let mut s = shape.to_vec();
                s.swap(r - 1, r - 2);
                let mut p: Vec<usize> = (0..r).collect();
                p.swap(r - 1, r - 2);
                View::dense(&s).permute(&p)
            }
            2 if r >= 1 => {
                let big: Vec<usize> = shape.iter().map(|n| n + 2).collect();
                View::dense(&big).slice(&vec![1; r], &vec![1; r], shape)
            }
            _ => View::dense(shape),
        };
        let n: usize = shape.iter().product();
        let values: Vec<f64> = (0..n).map(|i| Scalar::F(f(i)).cast(d).as_f64()).collect();
        let end = view.range().map_or(0, |r| r.1 as usize + 1);
        let mut bytes = vec![0xAB; end * d.size()];
        for (i, idx) in indices(shape).into_iter().enumerate() {
            let at = view.at(&idx).unwrap() as usize * d.size();
            bytes[at..at + d.size()].copy_from_slice(&Scalar::F(values[i]).to_bytes(d)[..d.size()]);
        }
        Tensor { operand: Operand { dtype: d, view }, bytes, values }
    }

    pub fn random(d: DType, shape: &[usize], layout: usize, g: &mut Rng) -> Tensor {
        Tensor::new(d, shape, layout, |_| if d.is_float() { g.real() } else { (g.below(9)) as f64 })
    }

    pub fn shape(&self) -> &[usize] {
        &self.operand.view.shape
    }

    /// The same elements, row-major.
    pub fn dense(&self) -> Tensor {
        Tensor::new(self.operand.dtype, self.shape(), 0, |i| self.values[i])
    }

    pub fn get(&self, idx: &[usize]) -> f64 {
        self.values[linear(self.shape(), idx)]
    }
}

pub fn close(name: &str, got: &[f64], want: &[f64], d: DType, tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{name}");
    let eps = match d {
        DType::F64 => 1e-13,
        DType::F32 => 2e-6,
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        _ => 0.0,
    };
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let ok = (g.is_nan() && w.is_nan()) || g == w || (g - w).abs() <= tolerance * eps * w.abs().max(1.0);
        assert!(ok, "{name} {d} element {i}: {g}, expected {w}");
    }
}

pub fn caps() -> Caps {
    Caps::generous()
}

/// A GPU with the matrix units in `ops` whose subgroups have `width` work-items.
pub fn with_matrix_units(ops: &[MatrixOp], width: u32) -> Caps {
    let matrix = ops.iter().filter(|o| o.width as u32 == width).copied().collect();
    Caps {
        matrix,
        subgroup: Some(width),
        max_workgroup: 1024,
        workgroup_memory: 48 << 10,
        compute_units: Some(4),
        ..Caps::generous()
    }
}

pub const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
