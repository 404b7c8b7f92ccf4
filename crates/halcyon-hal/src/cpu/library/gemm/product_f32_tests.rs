//! Tests of matrix products against f64 for the instruction sets of this processor, most of them with
//! operands between guard pages.

use super::product_f32::*;
use crate::cpu::library::gemm::matrix::{Batch, Gemm};
use crate::cpu::library::testing::*;
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, Team};
use half::{bf16, f16};

/// How a test matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Rows,
    Cols,
    /// Row-major with a gap after each row.
    Padded,
    /// Neither stride is 1.
    Strided,
}

fn strides(l: Layout, rows: usize, cols: usize) -> (usize, usize, usize) {
    let (rs, cs) = match l {
        Layout::Rows => (cols, 1),
        Layout::Cols => (1, rows),
        Layout::Padded => (cols + 3, 1),
        Layout::Strided => (2 * cols + 1, 2),
    };
    let len = if rows * cols == 0 { 0 } else { (rows - 1) * rs + (cols - 1) * cs + 1 };
    (rs, cs, len)
}

fn fill<T: Copy>(rng: &mut Rng, len: usize, f: fn(f32) -> T) -> Vec<T> {
    (0..len).map(|_| f(rng.f32())).collect()
}

struct Case {
    m: usize,
    n: usize,
    k: usize,
    la: Layout,
    lb: Layout,
    lc: Layout,
    alpha: f32,
    beta: f32,
    bias: (bool, bool),
    relu: bool,
    side: Side,
}

/// Compares one product of elements `T` with the product in f64, with plain and with packed operands.
fn check<T: PackElem>(
    team: &Team,
    isa: Isa,
    rng: &mut Rng,
    c: &Case,
    conv: fn(f32) -> T,
    wide: fn(T) -> f32,
) {
    let what = (isa, c.m, c.n, c.k, c.la, c.lb, c.lc, (c.alpha, c.beta, c.bias, c.relu, c.side));
    let (m, n, k) = (c.m, c.n, c.k);
    let (ars, acs, alen) = strides(c.la, m, k);
    let (brs, bcs, blen) = strides(c.lb, k, n);
    let (crs, ccs, clen) = strides(c.lc, m, n);
    let a = Guarded::new(&fill(rng, alen, conv), c.side);
    let b = Guarded::new(&fill(rng, blen, conv), c.side);
    // With beta 0, C must not be read, so fill it with NaN.
    let old: Vec<f32> = (0..clen).map(|_| if c.beta == 0.0 { f32::NAN } else { rng.f32() }).collect();
    let out = Guarded::new(&old, c.side);
    let rows = Guarded::new(&rng.vec(m), c.side);
    let cols = Guarded::new(&rng.vec(n), c.side);
    let null = SharedConst(std::ptr::null());
    let epi = Epilogue {
        alpha: c.alpha,
        beta: c.beta,
        bias_row: if c.bias.0 { SharedConst(rows.ptr()) } else { null },
        bias_col: if c.bias.1 { SharedConst(cols.ptr()) } else { null },
        relu: c.relu,
        ..Epilogue::default()
    };
    let am = Mat { ptr: a.ptr(), rs: ars as isize, cs: acs as isize };
    let bm = Mat { ptr: b.ptr(), rs: brs as isize, cs: bcs as isize };
    let cm = MatMut { ptr: out.mut_ptr(), rs: crs as isize, cs: ccs as isize };
    // SAFETY: the guarded vectors hold the elements that the strides reach; `out` is separate memory.
    unsafe { gemm(team, isa, &Gemm::new((m, n, k), am, bm, cm).with(epi)) };
    let verify = |got: &[f32]| {
        let mut touched = vec![false; clen];
        for i in 0..m {
            for j in 0..n {
                let (mut s, mut mag) = (0f64, 1f64);
                for q in 0..k {
                    let p =
                        wide(a.slice()[i * ars + q * acs]) as f64 * wide(b.slice()[q * brs + j * bcs]) as f64;
                    s += p;
                    mag += p.abs();
                }
                let at = i * crs + j * ccs;
                touched[at] = true;
                let mut w = c.alpha as f64 * s;
                let kept = if c.beta != 0.0 { c.beta as f64 * old[at] as f64 } else { 0.0 };
                let row = if c.bias.0 { rows.slice()[i] as f64 } else { 0.0 };
                let col = if c.bias.1 { cols.slice()[j] as f64 } else { 0.0 };
                w += kept + row + col;
                mag += kept.abs() + row.abs() + col.abs();
                if c.relu {
                    w = w.max(0.0);
                }
                close(got[at], w, mag, sum_tolerance(k), &(what, i, j));
            }
        }
        for (at, t) in touched.iter().enumerate() {
            assert!(*t || got[at].to_bits() == old[at].to_bits(), "wrote between the rows: {what:?}");
        }
    };
    verify(out.slice());

    // Packed operands give results within the same tolerance.
    // SAFETY: the guarded vectors hold the elements that the strides reach; `kept` has the floats that each
    // shape needs and lives until the product is done.
    unsafe {
        let shape = PackShape::b(isa, k, n);
        let mut kept = vec![f32::NAN; shape.floats()];
        shape.pack_b(Some(team), bm, kept.as_mut_ptr());
        let pb = Packed::new(shape, kept.as_ptr());
        let out = Guarded::new(&old, c.side);
        let to = MatMut { ptr: out.mut_ptr(), ..cm };
        gemm_packed(team, &Gemm::new((m, n, k), am, &pb, to).with(epi));
        verify(out.slice());
        let shape = PackShape::a(isa, m, k);
        let mut kept = vec![f32::NAN; shape.floats()];
        shape.pack_a(None, am, kept.as_mut_ptr());
        let pa = Packed::new(shape, kept.as_ptr());
        let out = Guarded::new(&old, c.side);
        let to = MatMut { ptr: out.mut_ptr(), ..cm };
        gemm_packed_a(team, &Gemm::new((m, n, k), &pa, bm, to).with(epi));
        verify(out.slice());
    }
}

const LAYOUTS: [Layout; 4] = [Layout::Rows, Layout::Cols, Layout::Padded, Layout::Strided];

fn random_case(rng: &mut Rng, max: usize) -> Case {
    const SIZES: [usize; 22] =
        [0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 17, 23, 31, 32, 33, 37, 64, 67, 97];
    let mut size = || {
        let s = SIZES[rng.below(SIZES.len())];
        if s > max { max } else { s }
    };
    let (m, n, k) = (size(), size(), size());
    Case {
        m,
        n,
        k,
        la: LAYOUTS[rng.below(4)],
        lb: LAYOUTS[rng.below(4)],
        lc: LAYOUTS[rng.below(4)],
        alpha: [1.0, 1.0, -0.5][rng.below(3)],
        beta: [0.0, 0.0, 1.0, 0.25][rng.below(4)],
        bias: (rng.below(3) == 0, rng.below(3) == 0),
        relu: rng.below(3) == 0,
        side: [Side::Start, Side::End][rng.below(2)],
    }
}

#[test]
fn products_follow_f64_between_guard_pages() {
    let mut rng = Rng::new();
    for threads in [1, 3] {
        let team = Team::new(threads);
        for isa in Isa::available() {
            for _ in 0..250 {
                let c = random_case(&mut rng, 97);
                check::<f32>(&team, isa, &mut rng, &c, |x| x, |x| x);
                let c = random_case(&mut rng, 40);
                check::<f16>(&team, isa, &mut rng, &c, f16::from_f32, f16::to_f32);
                let c = random_case(&mut rng, 40);
                check::<bf16>(&team, isa, &mut rng, &c, bf16::from_f32, bf16::to_f32);
            }
        }
    }
}

#[test]
fn larger_products_cross_every_blocking() {
    if halcyon_test_host::left_out("larger_products_cross_every_blocking") {
        return;
    }
    let mut rng = Rng::new();
    let team = Team::new(2);
    let isa = Isa::best();
    for (m, n, k) in [
        (1, 700, 1500),
        (7, 530, 1031),
        (530, 3, 1031),
        (200, 40, 1100),
        (90, 601, 1537),
        (601, 20, 520),
        (601, 520, 520),
    ]
    .into_iter()
    .filter(|&(m, n, k)| bearable(m, n, k))
    {
        for (la, lb) in
            [(Layout::Rows, Layout::Rows), (Layout::Rows, Layout::Cols), (Layout::Cols, Layout::Padded)]
        {
            let mut c = random_case(&mut rng, 1);
            (c.m, c.n, c.k, c.la, c.lb, c.lc) = (m, n, k, la, lb, Layout::Rows);
            check::<f32>(&team, isa, &mut rng, &c, |x| x, |x| x);
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let mut rng = Rng::new();
    let teams: Vec<Team> = [1, 2, 3, 5].map(Team::new).into();
    for isa in Isa::available() {
        for (m, n, k) in
            [(1, 999, 400), (5, 400, 700), (130, 170, 1300), (700, 33, 300), (64, 2000, 64), (301, 5, 640)]
        {
            let (a, b) = (rng.vec(m * k), rng.vec(k * n));
            for lb in [Mat::rows(b.as_ptr(), n), Mat::rows(b.as_ptr(), k).t()] {
                let runs: Vec<Vec<f32>> = teams
                    .iter()
                    .map(|t| {
                        let mut c = vec![f32::NAN; m * n];
                        let cm = MatMut::rows(c.as_mut_ptr(), n);
                        // SAFETY: the vectors hold the matrices; `c` is separate memory.
                        unsafe { gemm(t, isa, &Gemm::new((m, n, k), Mat::rows(a.as_ptr(), k), lb, cm)) };
                        c
                    })
                    .collect();
                for r in &runs[1..] {
                    assert!(runs[0] == *r, "{isa:?} {m} {n} {k}");
                }
            }
        }
    }
}

#[test]
fn batches_follow_single_products() {
    let mut rng = Rng::new();
    let team = Team::new(2);
    for isa in Isa::available() {
        for (batch, m, n, k) in
            [(0, 3, 4, 5), (1, 17, 19, 23), (7, 33, 40, 21), (12, 64, 64, 64), (5, 1, 30, 64)]
        {
            let (a, b) = (rng.vec(batch * m * k), rng.vec(k * n));
            let mut c = vec![f32::NAN; batch * m * n];
            // All items share B.
            // SAFETY: the vectors hold the matrices of all items; `c` is separate memory.
            unsafe {
                let (am, bm) = (Mat::rows(a.as_ptr(), k), Mat::rows(b.as_ptr(), n));
                let g = Gemm::new((m, n, k), am, bm, MatMut::rows(c.as_mut_ptr(), n));
                let steps = Batch { count: batch, a: (m * k) as isize, b: 0, c: (m * n) as isize };
                gemm_batched(&team, isa, steps, &g);
            }
            for i in 0..batch * m {
                for j in 0..n {
                    let w: f64 = (0..k).map(|q| a[i * k + q] as f64 * b[q * n + j] as f64).sum();
                    close(c[i * n + j], w, 1.0 + k as f64 * 0.3, sum_tolerance(k), &(isa, batch, m, n, k));
                }
            }
        }
    }
}

#[test]
fn batches_do_not_depend_on_the_number_of_threads() {
    let mut rng = Rng::new();
    let teams: Vec<Team> = [1, 2, 5].map(Team::new).into();
    // Four products: five threads share each product; with fewer threads, one thread computes each product.
    for (m, n, k) in [(1, 300, 70), (40, 2, 90), (33, 70, 600)] {
        let (a, b) = (rng.vec(4 * m * k), rng.vec(4 * k * n));
        let runs: Vec<Vec<f32>> = teams
            .iter()
            .map(|t| {
                let mut c = vec![f32::NAN; 4 * m * n];
                // SAFETY: the vectors hold the matrices; `c` is separate memory.
                unsafe {
                    let (am, bm) = (Mat::rows(a.as_ptr(), k), Mat::rows(b.as_ptr(), n));
                    let g = Gemm::new((m, n, k), am, bm, MatMut::rows(c.as_mut_ptr(), n));
                    let [a, b, c] = [m * k, k * n, m * n].map(|s| s as isize);
                    gemm_batched(t, Isa::best(), Batch { count: 4, a, b, c }, &g);
                }
                c
            })
            .collect();
        assert!(runs[0] == runs[1] && runs[0] == runs[2], "{m} {n} {k}");
    }
}

#[test]
fn a_warm_product_reuses_its_scratch() {
    let team = Team::new(2);
    let (a, b) = (vec![1f32; 128 * 128], vec![1f32; 128 * 128]);
    let mut c = vec![0f32; 128 * 128];
    let mut run = || {
        // SAFETY: the vectors hold the matrices; `c` is separate memory.
        unsafe {
            let cm = MatMut::rows(c.as_mut_ptr(), 128);
            let (am, bm) = (Mat::rows(a.as_ptr(), 128), Mat::rows(b.as_ptr(), 128));
            gemm(&team, Isa::best(), &Gemm::new((128, 128, 128), am, bm, cm));
        }
        team.scratch_made()
    };
    let first = run();
    assert!(first > 0);
    for _ in 0..10 {
        assert_eq!(run(), first);
    }
}
