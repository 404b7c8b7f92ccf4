//! Matrix products of types other than f32: f64, wrapping integers, and f16 or bf16 with results of the same
//! type.

use super::product_f32::{Epilogue, Gemm, Mat, MatMut, PackElem, gemm};
use crate::cpu::library::accumulator::Accumulated;
use crate::cpu::library::epilogue::BoundChain;
use crate::cpu::sys::{Isa, dispatch_raw};
use crate::cpu::team::{SharedMut, Team};

/// Rows and columns whose sums are computed together.
const MR: usize = 4;
const NR: usize = 64;

/// A tile of C: rows `i0..i1`, columns `j..j + cols`. `b` holds B's columns packed as `[k][NR]`.
struct Job<T: Accumulated, O> {
    k: usize,
    a: Mat<T>,
    b: *const T::Acc,
    c: MatMut<O>,
    i0: usize,
    i1: usize,
    j: usize,
    cols: usize,
}

/// Computes `R` rows. The sums stay in the first-level cache. Each time a sum is loaded, eight products are
/// added to it, in the order of k. The last `k % 8` products are added one at a time.
///
/// # Safety
/// The contract of [`tile`] for rows `i .. i + R`.
#[inline(always)]
unsafe fn rows_body<const FMA: bool, T: Accumulated, O: Accumulated<Acc = T::Acc>, const R: usize>(
    w: &Job<T, O>,
    i: usize,
) {
    let mut acc = [[T::Acc::default(); NR]; R];
    let mut k = 0;
    macro_rules! steps {
        ($kb:literal) => {
            while w.k - k >= $kb {
                let mut x = [[T::Acc::default(); $kb]; R];
                for r in 0..R {
                    for q in 0..$kb {
                        let at = (i + r) as isize * w.a.rs + (k + q) as isize * w.a.cs;
                        // SAFETY: the contract makes the rows of A readable in columns below `w.k`, and
                        // `r < R`, `k + q < w.k`.
                        x[r][q] = unsafe { *w.a.ptr.offset(at) }.up();
                    }
                }
                // SAFETY: the contract gives `w.k` rows of NR elements at `b`, and `k + $kb <= w.k`.
                let b = unsafe { &*(w.b.add(k * NR) as *const [[T::Acc; NR]; $kb]) };
                for r in 0..R {
                    for j in 0..NR {
                        let mut s = acc[r][j];
                        for q in 0..$kb {
                            s = T::mul_add::<FMA>(x[r][q], b[q][j], s);
                        }
                        acc[r][j] = s;
                    }
                }
                k += $kb;
            }
        };
    }
    steps!(8);
    steps!(1);
    for (r, sums) in acc.iter().enumerate() {
        for (j, s) in sums.iter().enumerate().take(w.cols) {
            // SAFETY: `r < R` and `j < w.cols`, and the contract makes these rows of C writable in columns
            // `w.j .. w.j + w.cols`.
            unsafe { *w.c.ptr.offset((i + r) as isize * w.c.rs + (w.j + j) as isize * w.c.cs) = O::down(*s) };
        }
    }
}

/// The body of [`tile`].
///
/// # Safety
/// The contract of [`tile`].
#[inline(always)]
unsafe fn tile_body<const FMA: bool, T: Accumulated, O: Accumulated<Acc = T::Acc>>(w: &Job<T, O>) {
    let mut i = w.i0;
    // SAFETY: both loops stay in rows `w.i0..w.i1`, which the contract makes valid.
    unsafe {
        while i + MR <= w.i1 {
            rows_body::<FMA, T, O, MR>(w, i);
            i += MR;
        }
        while i < w.i1 {
            rows_body::<FMA, T, O, 1>(w, i);
            i += 1;
        }
    }
}
dispatch_raw! {
    /// Computes a tile.
    ///
    /// # Safety
    /// Rows `w.i0..w.i1` of A are readable in columns `0..w.k`. `w.b` holds `w.k` rows of [`NR`] elements,
    /// and `w.cols <= NR`. Rows `w.i0..w.i1` of C are writable in columns `w.j .. w.j + w.cols` and used by
    /// nothing else.
    unsafe fn tile[T: Accumulated, O: Accumulated<Acc = T::Acc>][T, O](isa, w: &Job<T, O>) = tile_body
}

/// `C = A B` for any element type, summed in the element's accumulation type in the order of k. `O` may be
/// another type with the same accumulation type, for example i8 times i8 into i32.
///
/// # Safety
/// All `m x k` elements of A and `k x n` of B are readable. The elements of C are writable, overlap nothing
/// and are used by nothing else.
pub unsafe fn gemm_any<T: Accumulated, O: Accumulated<Acc = T::Acc>>(
    team: &Team,
    isa: Isa,
    g: &Gemm<Mat<T>, Mat<T>, MatMut<O>, ()>,
) {
    let Gemm { m, n, k, a, b, c, .. } = *g;
    if m == 0 || n == 0 {
        return;
    }
    let panels = n.div_ceil(NR);
    let threads = team.threads();
    let work = g.work();
    let bands = if work < 100_000 { 1 } else { (threads * 4).div_ceil(panels).min(m.div_ceil(MR)) };
    // If the size overflows, it saturates, and `scratch` panics.
    let each = k.saturating_mul(NR * size_of::<T::Acc>()).div_ceil(4).next_multiple_of(64);
    let scratch = team.scratch(each.saturating_mul(threads));
    let buf = SharedMut(scratch.ptr());
    let body = |worker: usize, part: usize| {
        // Capture whole matrices, which are `Sync`, instead of their raw pointer fields, which are not.
        let (a, b, c) = (a.offset(0), b.offset(0), c.offset(0));
        let (q, band) = (part % panels, part / panels);
        let j = q * NR;
        let cols = (n - j).min(NR);
        let packed = buf.get().wrapping_add(worker * each) as *mut T::Acc;
        for r in 0..k {
            for s in 0..NR {
                // SAFETY: `r < k` and `j + s < n` lie in B; the scratch of `k * NR` elements belongs to this
                // worker.
                unsafe {
                    let v = if s < cols {
                        (*b.ptr.offset(r as isize * b.rs + (j + s) as isize * b.cs)).up()
                    } else {
                        T::Acc::default()
                    };
                    packed.add(r * NR + s).write(v);
                }
            }
        }
        let (i0, i1) = (m * band / bands, m * (band + 1) / bands);
        // SAFETY: `gemm_any` requires readable A and writable C, and `i1 <= m`, `j + cols <= n`. The loop
        // above packed `k` rows at `packed`. Parts have disjoint tiles.
        unsafe { tile(isa, &Job { k, a, b: packed, c, i0, i1, j, cols }) };
    };
    if work < 100_000 {
        (0..panels * bands).for_each(|p| body(0, p));
    } else {
        team.run_with(panels * bands, &body);
    }
}

/// `C = act(alpha A B + bias)` with f16, bf16 or f32 operands and result, summed in f32 and rounded once. The
/// rows of C are contiguous; `beta` of the epilogue is ignored. A chain of the epilogue is applied to the f32
/// sums.
///
/// # Safety
/// The contract of [`gemm`]. C has column stride 1. The chain's operands are bound.
pub unsafe fn gemm_rounded<T: PackElem>(team: &Team, isa: Isa, g: &Gemm<Mat<T>, Mat<T>, MatMut<T>>) {
    let Gemm { m, n, c, .. } = *g;
    debug_assert!(c.cs == 1 || n < 2);
    if m == 0 || n == 0 {
        return;
    }
    let scratch = team.scratch(m * n);
    let sums = SharedMut(scratch.ptr());
    let chain = g.epilogue.chain;
    let plain = Epilogue { beta: 0.0, chain: BoundChain::default(), ..g.epilogue };
    let to_sums = g.with_c(MatMut::rows(sums.get(), n)).with(plain);
    // SAFETY: `gemm_rounded` has the contract of `gemm` for A and B; the scratch holds the `m * n` sums.
    unsafe { gemm(team, isa, &to_sums) };
    team.ranges(m, (16 << 10) / n.max(1), &|i0, i1| {
        // Capture the whole matrix, which is `Sync`, instead of its raw pointer, which is not.
        let c = c.offset(0);
        // SAFETY: `gemm` wrote all `m * n` sums, and different ranges have different rows of them. The
        // chain's operands are bound by contract.
        unsafe { chain.run_rows(isa, (i0, i1 - i0), (0, n), sums.get().add(i0 * n), n) };
        for i in i0..i1 {
            // SAFETY: `gemm` wrote all `m * n` sums, and different ranges have different rows of C.
            unsafe {
                let row = std::slice::from_raw_parts(sums.get().add(i * n), n);
                T::narrow_slice(row, std::slice::from_raw_parts_mut(c.ptr.offset(i as isize * c.rs), n));
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::library::testing::*;
    use half::{bf16, f16};

    fn check<T: Accumulated, O: Accumulated<Acc = T::Acc> + Default>(
        rng: &mut Rng,
        make: fn(&mut Rng) -> T,
        same: &dyn Fn(O, &[(T, T)]),
    ) {
        for threads in [1, 3] {
            let team = Team::new(threads);
            for isa in Isa::available() {
                for (m, n, k) in [(0, 3, 4), (1, 1, 1), (5, 17, 9), (13, 3, 0), (70, 65, 33), (4, 130, 300)] {
                    let mut vec = |n: usize| (0..n).map(|_| make(rng)).collect::<Vec<T>>();
                    // A is row-major, B is transposed, and the columns of C are two elements apart.
                    let a = Guarded::new(&vec(m * k), Side::End);
                    let b = Guarded::new(&vec(k * n), Side::Start);
                    let c = Guarded::new(&vec![O::default(); m * n * 2], Side::End);
                    let cm = MatMut { ptr: c.mut_ptr(), rs: 2 * n as isize, cs: 2 };
                    // SAFETY: the guarded vectors hold `m * k`, `k * n` and `2 m n` elements.
                    unsafe {
                        let (am, bm) = (Mat::rows(a.ptr(), k), Mat::rows(b.ptr(), k).t());
                        gemm_any(&team, isa, &Gemm::new((m, n, k), am, bm, cm));
                    };
                    for i in 0..m {
                        for j in 0..n {
                            let terms: Vec<(T, T)> =
                                (0..k).map(|q| (a.slice()[i * k + q], b.slice()[j * k + q])).collect();
                            same(c.slice()[(i * n + j) * 2], &terms);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn f64_and_integers_follow_their_definition() {
        let mut rng = Rng::new();
        check::<f64, f64>(&mut rng, |r| r.f32() as f64, &|got, t| {
            let want: f64 = t.iter().map(|(a, b)| a * b).sum();
            assert!((got - want).abs() < 1e-12 * (1.0 + t.len() as f64), "{got} {want}");
        });
        macro_rules! ints {
            ($($t:ty, $o:ty;)*) => {$(
                check::<$t, $o>(&mut rng, |r| r.bits() as $t, &|got, t| {
                    let want = t.iter().fold(0i128, |s, (a, b)| s.wrapping_add((*a as i128).wrapping_mul(*b as i128)));
                    assert_eq!(got, want as $o);
                });
            )*};
        }
        ints!(i8, i8; i8, i32; u8, u8; u8, u32; i16, i16; u16, u16; i32, i32; u32, u32; i64, i64; u64, u64;);
    }

    #[test]
    fn halves_round_once() {
        let mut rng = Rng::new();
        let team = Team::new(2);
        for isa in Isa::available() {
            for (m, n, k) in [(1, 9, 300), (5, 17, 9), (40, 33, 70)] {
                let a: Vec<f16> = rng.vec(m * k).into_iter().map(f16::from_f32).collect();
                let b: Vec<f16> = rng.vec(k * n).into_iter().map(f16::from_f32).collect();
                let mut c = vec![f16::NAN; m * n];
                let ab: Vec<bf16> = a.iter().map(|v| bf16::from_f32(v.to_f32())).collect();
                let bb: Vec<bf16> = b.iter().map(|v| bf16::from_f32(v.to_f32())).collect();
                let mut cb = vec![bf16::NAN; m * n];
                // SAFETY: the vectors hold `m * k`, `k * n` and `m * n` elements.
                unsafe {
                    let (am, bm) = (Mat::rows(a.as_ptr(), k), Mat::rows(b.as_ptr(), n));
                    let cm = MatMut::rows(c.as_mut_ptr(), n);
                    gemm_rounded(&team, isa, &Gemm::new((m, n, k), am, bm, cm));
                    let (am, bm) = (Mat::rows(ab.as_ptr(), k), Mat::rows(bb.as_ptr(), n));
                    let cm = MatMut::rows(cb.as_mut_ptr(), n);
                    gemm_rounded(&team, isa, &Gemm::new((m, n, k), am, bm, cm));
                }
                for i in 0..m {
                    for j in 0..n {
                        // Allow the error of the sum, and a little more than half a unit in the last place of
                        // the result.
                        let close_to = |got: f32, terms: &dyn Fn(usize) -> f64, rounding: f64| {
                            let w: f64 = (0..k).map(terms).sum();
                            let mag: f64 = (0..k).map(|q| terms(q).abs()).sum();
                            let scale = sum_tolerance(k) * (1.0 + mag) + rounding * w.abs();
                            close(got, w, scale, 1.0, &(m, n, k));
                        };
                        let term = |q: usize| a[i * k + q].to_f64() * b[q * n + j].to_f64();
                        close_to(c[i * n + j].to_f32(), &term, 6e-4);
                        let term = |q: usize| ab[i * k + q].to_f64() * bb[q * n + j].to_f64();
                        close_to(cb[i * n + j].to_f32(), &term, 4.5e-3);
                    }
                }
            }
        }
    }
}
