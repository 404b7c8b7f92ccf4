//! Tests of products of bf16 and of integers of 8 and 16 bits. Products of bf16 are compared with products in
//! f64, and products of integers with products in i64. In most tests, the operands lie between guard pages.

use super::product_bf16::*;
use super::product_f32::{Batch, Epilogue, Gemm, Mat, MatMut};
use super::product_int8::*;
use super::product_int16::gemm_pairs;
use crate::cpu::library::testing::*;
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, Team};
use half::bf16;

/// Row stride and column stride of a matrix, and the number of elements from its first to its last. Layout 0
/// is row-major, 1 column-major, 2 row-major with gaps after the rows; 3 has no stride of 1.
fn strides(layout: usize, rows: usize, cols: usize) -> (usize, usize, usize) {
    let (rs, cs) = [(cols, 1), (1, rows), (cols + 3, 1), (2 * cols + 1, 2)][layout];
    let len = if rows * cols == 0 { 0 } else { (rows - 1) * rs + (cols - 1) * cs + 1 };
    (rs, cs, len)
}

const SIZES: [usize; 26] =
    [0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 37, 63, 65, 67, 97];

const CODES: [Bf16Code; 3] = [Bf16Code::Tiles, Bf16Code::Pairs, Bf16Code::Wide];

#[derive(Clone, Copy, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    /// Layouts of A, B and C.
    l: [usize; 3],
    side: Side,
}

fn random_case(rng: &mut Rng) -> Case {
    let mut size = || SIZES[rng.below(SIZES.len())];
    let (m, n, k) = (size(), size(), size());
    let l = [rng.below(4), rng.below(4), rng.below(4)];
    Case { m, n, k, l, side: [Side::Start, Side::End][rng.below(2)] }
}

/// Shapes that have several K blocks, several blocks of rows or several ranges of B's columns, or for which B
/// is packed once for all threads.
const LARGE: [(usize, usize, usize); 7] = [
    (9, 530, 2103),
    (530, 11, 2100),
    (200, 40, 2200),
    (40, 301, 4097),
    (301, 20, 2051),
    (65, 300, 33),
    (35, 70, 8300),
];

/// The padding of a packed matrix is multiplied by zeros. If packing left a NaN there, the products would be
/// NaN.
#[test]
#[cfg(target_arch = "x86_64")]
fn packing_for_tile_registers_writes_every_byte() {
    use super::tile_registers::PackedShape;
    if !Isa::best().has_bf16() {
        println!("skipped: no AVX512_BF16");
        return;
    }
    for (k, n) in [(1, 1), (3, 40), (16, 63), (31, 32), (33, 17), (64, 5)] {
        for layout in 0..4 {
            let s = strides(layout, k, n);
            let b = Guarded::new(&vec![bf16::ONE; s.2], Side::End);
            let shape = PackedShape { k, n, group: 2 };
            let mut to = vec![bf16::NAN; shape.bytes() / 2];
            // SAFETY: `b` holds the matrix, `to` has `shape.bytes()` bytes, and AVX512_BF16 was found above.
            unsafe { shape.pack(None, mat(&b, s), to.as_mut_ptr().cast()) };
            assert!(to.iter().all(|v| *v == bf16::ONE || v.to_bits() == 0), "{k} x {n}, layout {layout}");
            assert_eq!(to.iter().filter(|v| **v == bf16::ONE).count(), k * n, "layout {layout}");
        }
    }
}

fn mat<T: Copy>(g: &Guarded<T>, s: (usize, usize, usize)) -> Mat<T> {
    Mat { ptr: g.ptr(), rs: s.0 as isize, cs: s.1 as isize }
}

fn mat_mut<T: Copy>(g: &Guarded<T>, s: (usize, usize, usize)) -> MatMut<T> {
    MatMut { ptr: g.mut_ptr(), rs: s.0 as isize, cs: s.1 as isize }
}

/// Prints which instructions this processor lacks.
fn tell(isa: Isa) {
    if isa == Isa::best() {
        let lack = |has: bool, what: &str| {
            if !has {
                println!("skipped: this processor has no {what}; the code for other instructions is tested");
            }
        };
        lack(isa.has_bf16(), "AVX512_BF16");
        lack(isa.has_vnni(), "AVX512_VNNI");
        lack(isa.has_bf16_tiles(), "AMX-BF16 for this process");
        lack(isa.has_int8_tiles(), "AMX-INT8 for this process");
    }
}

fn as_is(x: f32) -> f32 {
    x
}

/// Checks a product of matrices with elements `A` and `B`, with f32 and bf16 results, and with B packed or
/// not.
fn check_bf16<A: Bf16Elem, B: Bf16Elem>(
    team: &Team,
    isa: Isa,
    rng: &mut Rng,
    c: Case,
    (to_a, value_a): (fn(f32) -> A, fn(A) -> f32),
    (to_b, value_b): (fn(f32) -> B, fn(B) -> f32),
) {
    let (m, n, k) = (c.m, c.n, c.k);
    let (sa, sb, sc) = (strides(c.l[0], m, k), strides(c.l[1], k, n), strides(c.l[2], m, n));
    let a = Guarded::new(&(0..sa.2).map(|_| to_a(rng.f32())).collect::<Vec<A>>(), c.side);
    let b = Guarded::new(&(0..sb.2).map(|_| to_b(rng.f32())).collect::<Vec<B>>(), c.side);
    let beta = [0.0, 0.0, 1.0, 0.25][rng.below(4)];
    let old: Vec<f32> = (0..sc.2).map(|_| if beta == 0.0 { f32::NAN } else { rng.f32() }).collect();
    let (rows, cols) = (Guarded::new(&rng.vec(m), c.side), Guarded::new(&rng.vec(n), c.side));
    let null = SharedConst(std::ptr::null());
    let (br, bc) = (rng.below(3) == 0, rng.below(3) == 0);
    let epi = Epilogue {
        alpha: [1.0, 1.0, -0.5][rng.below(3)],
        beta,
        bias_row: if br { SharedConst(rows.ptr()) } else { null },
        bias_col: if bc { SharedConst(cols.ptr()) } else { null },
        relu: rng.below(3) == 0,
        ..Epilogue::default()
    };
    let what = (isa, team.threads(), c, epi);
    // The factors rounded to bf16, and their rounding errors. Results may differ by these errors, because
    // products that are computed in f32 do not round the factors.
    let rounding = |x: f32| (bf16::from_f32(x).to_f64(), (x as f64 - bf16::from_f32(x).to_f64()).abs());
    let (av, bv): (Vec<_>, Vec<_>) = (
        a.slice().iter().map(|v| rounding(value_a(*v))).collect(),
        b.slice().iter().map(|v| rounding(value_b(*v))).collect(),
    );
    let mut want = vec![];
    for i in 0..m {
        for j in 0..n {
            let (mut s, mut mag, mut slack) = (0f64, 1f64, 0f64);
            for q in 0..k {
                let ((x, dx), (y, dy)) = (av[i * sa.0 + q * sa.1], bv[q * sb.0 + j * sb.1]);
                s += x * y;
                mag += (x * y).abs();
                slack += dx * (y.abs() + dy) + dy * x.abs();
            }
            let at = i * sc.0 + j * sc.1;
            let bias =
                if br { rows.slice()[i] as f64 } else { 0.0 } + if bc { cols.slice()[j] as f64 } else { 0.0 };
            let kept = if beta != 0.0 { (beta as f64 * old[at] as f64).abs() } else { 0.0 };
            want.push((at, epi.alpha as f64 * s + bias, mag + bias.abs() + kept, slack));
        }
    }
    let tolerance = sum_tolerance(k);
    let act = |v: f64| if epi.relu { v.max(0.0) } else { v };
    let exact = |code: Bf16Code| code != Bf16Code::Wide && m.min(n) > super::gemv::ROWS;
    let verify = |code: Bf16Code, got: &[f32]| {
        let mut touched = vec![false; sc.2];
        for &(at, w, mag, slack) in &want {
            touched[at] = true;
            let w = if beta != 0.0 { w + beta as f64 * old[at] as f64 } else { w };
            let slack = if exact(code) { 0.0 } else { slack };
            close(got[at], act(w), mag + slack / tolerance, tolerance, &(what, code, at));
        }
        for (at, t) in touched.iter().enumerate() {
            assert!(*t || got[at].to_bits() == old[at].to_bits(), "wrote between the elements: {what:?}");
        }
    };
    let verify_rounded = |got: &[bf16], old: &[bf16]| {
        let mut touched = vec![false; sc.2];
        for &(at, w, mag, slack) in &want {
            touched[at] = true;
            let w = act(w);
            // The error of the sums, plus half a unit in the last of bf16's eight bits for the rounded
            // result.
            close(got[at].to_f32(), w, (w.abs() + slack) / 256.0 + slack + tolerance * mag, 1.0, &(what, at));
        }
        for (at, t) in touched.iter().enumerate() {
            assert!(*t || got[at].to_bits() == old[at].to_bits(), "wrote between the elements: {what:?}");
        }
    };
    let (am, bm) = (mat(&a, sa), mat(&b, sb));
    let poison = vec![bf16::NAN; sc.2];
    for code in CODES.into_iter().filter(|c| c.runs(isa)) {
        // SAFETY: the guarded vectors hold the elements that the strides reach; results are separate memory;
        // `runs` has checked the instructions.
        unsafe {
            let out = Guarded::new(&old, c.side);
            gemm_bf16_by(code, team, isa, &Gemm::new((m, n, k), am, bm, mat_mut(&out, sc)).with(epi));
            verify(code, out.slice());
            let out = Guarded::new(&poison, c.side);
            gemm_bf16_by(code, team, isa, &Gemm::new((m, n, k), am, bm, mat_mut(&out, sc)).with(epi));
            verify_rounded(out.slice(), &poison);
            let packed = PackedBf16::b_for(code, isa, bm, k, n);
            let out = Guarded::new(&old, c.side);
            gemm_bf16_packed(team, &Gemm::new((m, n, k), am, &packed, mat_mut(&out, sc)).with(epi));
            verify(code, out.slice());
            let out = Guarded::new(&poison, c.side);
            gemm_bf16_packed(team, &Gemm::new((m, n, k), am, &packed, mat_mut(&out, sc)).with(epi));
            verify_rounded(out.slice(), &poison);
        }
    }
}

fn check_bf16_kinds(team: &Team, isa: Isa, rng: &mut Rng, mut next: impl FnMut(&mut Rng) -> Case) {
    let (to, of) = (bf16::from_f32, bf16::to_f32);
    let c = next(rng);
    check_bf16::<bf16, bf16>(team, isa, rng, c, (to, of), (to, of));
    let c = next(rng);
    check_bf16::<f32, f32>(team, isa, rng, c, (as_is, as_is), (as_is, as_is));
    let c = next(rng);
    check_bf16::<f32, bf16>(team, isa, rng, c, (as_is, as_is), (to, of));
}

#[test]
fn bf16_products_follow_f64_between_guard_pages() {
    let mut rng = Rng::new();
    for threads in [1, 3] {
        let team = Team::new(threads);
        for isa in Isa::available() {
            tell(isa);
            for _ in 0..120 {
                check_bf16_kinds(&team, isa, &mut rng, random_case);
            }
        }
    }
}

#[test]
fn larger_bf16_products_cross_every_blocking() {
    let mut rng = Rng::new();
    let team = Team::new(2);
    for (m, n, k) in LARGE.into_iter().filter(|&(m, n, k)| bearable(m, n, k)) {
        check_bf16_kinds(&team, Isa::best(), &mut rng, |r| Case { m, n, k, ..random_case(r) });
    }
}

/// Checks a product of matrices with 8-bit elements `A` and `B` and a result in i32, with B packed or not.
fn check_i8<A: Byte + TryFrom<i64>, B: Byte + TryFrom<i64>>(team: &Team, isa: Isa, rng: &mut Rng, c: Case)
where
    i64: From<A> + From<B>,
{
    // Any value of the type, with extreme values half of the time.
    fn draw<T: TryFrom<i64>>(rng: &mut Rng) -> T {
        const ENDS: [i64; 8] = [-128, 127, 0, 255, -1, 1, -64, 64];
        loop {
            let v = if rng.below(2) == 0 { ENDS[rng.below(8)] } else { rng.below(384) as i64 - 128 };
            if let Ok(v) = T::try_from(v) {
                return v;
            }
        }
    }
    let (m, n, k) = (c.m, c.n, c.k);
    let (sa, sb, sc) = (strides(c.l[0], m, k), strides(c.l[1], k, n), strides(c.l[2], m, n));
    let a = Guarded::new(&(0..sa.2).map(|_| draw(rng)).collect::<Vec<A>>(), c.side);
    let b = Guarded::new(&(0..sb.2).map(|_| draw(rng)).collect::<Vec<B>>(), c.side);
    let poison: Vec<i32> = (0..sc.2).map(|_| rng.bits() as i32).collect();
    let mut want = poison.clone();
    for i in 0..m {
        for j in 0..n {
            let term = |q: usize| {
                i64::from(a.slice()[i * sa.0 + q * sa.1]) * i64::from(b.slice()[q * sb.0 + j * sb.1])
            };
            want[i * sc.0 + j * sc.1] = (0..k).map(term).sum::<i64>() as i32;
        }
    }
    let what = (isa, team.threads(), c, A::SIGNED, B::SIGNED);
    let (am, bm) = (mat(&a, sa), mat(&b, sb));
    for code in [Code::of(isa), Code::vectors(isa)] {
        // SAFETY: the guarded vectors hold the elements that the strides reach; results are separate memory;
        // `Code` returned instructions that this processor has.
        unsafe {
            let out = Guarded::new(&poison, c.side);
            on_threads(code, team, (team.threads(), isa), &Gemm::new((m, n, k), am, bm, mat_mut(&out, sc)));
            assert!(out.slice() == want, "{code:?} {what:?}");
            let out = Guarded::new(&poison, c.side);
            let packed = PackedI8::b_for(code, isa, bm, k, n);
            gemm_i8_packed(team, &Gemm::new((m, n, k), am, &packed, mat_mut(&out, sc)));
            assert!(out.slice() == want, "packed {code:?} {what:?}");
        }
    }
}

/// Checks a product of 16-bit integers with any strides, whose sums wrap.
fn check_i16(team: &Team, isa: Isa, rng: &mut Rng, c: Case) {
    const ENDS: [i16; 4] = [i16::MIN, i16::MAX, 0, -1];
    let draw = |rng: &mut Rng| if rng.below(4) == 0 { ENDS[rng.below(4)] } else { rng.bits() as i16 };
    let (m, n, k) = (c.m, c.n, c.k);
    let (sa, sb, sc) = (strides(c.l[0], m, k), strides(c.l[1], k, n), strides(c.l[2], m, n));
    let a = Guarded::new(&(0..sa.2).map(|_| draw(rng)).collect::<Vec<i16>>(), c.side);
    let b = Guarded::new(&(0..sb.2).map(|_| draw(rng)).collect::<Vec<i16>>(), c.side);
    let poison: Vec<i32> = (0..sc.2).map(|_| rng.bits() as i32).collect();
    let mut want = poison.clone();
    for i in 0..m {
        for j in 0..n {
            let term = |q: usize| {
                i64::from(a.slice()[i * sa.0 + q * sa.1]) * i64::from(b.slice()[q * sb.0 + j * sb.1])
            };
            want[i * sc.0 + j * sc.1] = (0..k).map(term).sum::<i64>() as i32;
        }
    }
    let (am, bm) = (mat(&a, sa), mat(&b, sb));
    let (epilogue, size) = (Epilogue::default(), (m, n, k));
    for threads in [1, team.threads()] {
        let out = Guarded::new(&poison, c.side);
        // SAFETY: the guarded vectors hold the elements that the strides reach; results are separate memory.
        unsafe { gemm_pairs(team, threads, isa, &Gemm::new(size, am, bm, mat_mut(&out, sc)).with(epilogue)) };
        assert!(out.slice() == want, "{isa:?} {threads} {c:?}");
    }
}

#[test]
fn products_of_16_bits_are_exact_between_guard_pages() {
    let mut rng = Rng::new();
    for threads in [1, 3] {
        let team = Team::new(threads);
        for isa in Isa::available() {
            for _ in 0..150 {
                let c = random_case(&mut rng);
                check_i16(&team, isa, &mut rng, c);
            }
            for (m, n, k) in LARGE.into_iter().take(2).filter(|&(m, n, k)| bearable(m, n, k)) {
                let c = Case { m, n, k, ..random_case(&mut rng) };
                check_i16(&team, isa, &mut rng, c);
            }
        }
    }
}

fn check_i8_kinds(team: &Team, isa: Isa, rng: &mut Rng, mut next: impl FnMut(&mut Rng) -> Case) {
    let c = next(rng);
    check_i8::<u8, i8>(team, isa, rng, c);
    let c = next(rng);
    check_i8::<i8, i8>(team, isa, rng, c);
    let c = next(rng);
    check_i8::<i8, u8>(team, isa, rng, c);
    let c = next(rng);
    check_i8::<u8, u8>(team, isa, rng, c);
}

#[test]
fn byte_products_are_exact_between_guard_pages() {
    let mut rng = Rng::new();
    for threads in [1, 3] {
        let team = Team::new(threads);
        for isa in Isa::available() {
            tell(isa);
            for _ in 0..150 {
                check_i8_kinds(&team, isa, &mut rng, random_case);
            }
        }
    }
}

#[test]
fn larger_byte_products_cross_every_blocking() {
    let mut rng = Rng::new();
    let team = Team::new(2);
    for isa in Isa::available() {
        // Other instruction sets divide the work in the same way, only with smaller tiles, so one shape is
        // enough for them.
        let some = LARGE.into_iter().take(if isa == Isa::best() { 7 } else { 1 });
        for (m, n, k) in some.filter(|&(m, n, k)| bearable(m, n, k)) {
            check_i8_kinds(&team, isa, &mut rng, |r| Case { m, n, k, ..random_case(r) });
        }
    }
}

#[test]
fn bytes_wrap_in_their_own_type() {
    let mut rng = Rng::new();
    let team = Team::new(2);
    for isa in Isa::available() {
        for (m, n, k) in [(0, 4, 4), (1, 1, 0), (3, 50, 17), (70, 33, 129)] {
            let a: Vec<i8> = (0..m * k).map(|_| rng.bits() as i8).collect();
            let b: Vec<i8> = (0..k * n).map(|_| rng.bits() as i8).collect();
            let mut c = vec![77i8; m * (n + 2)];
            // SAFETY: the vectors hold the matrices; results are separate memory.
            unsafe {
                let (a, b) = (Mat::rows(a.as_ptr(), k), Mat::rows(b.as_ptr(), n));
                gemm_i8_wrapped(&team, isa, &Gemm::new((m, n, k), a, b, MatMut::rows(c.as_mut_ptr(), n + 2)));
            }
            for i in 0..m {
                for j in 0..n {
                    let w = (0..k).map(|q| i64::from(a[i * k + q]) * i64::from(b[q * n + j])).sum::<i64>();
                    assert_eq!(c[i * (n + 2) + j], w as i8, "{isa:?} {m} {n} {k}");
                }
                assert_eq!(c[i * (n + 2) + n..(i + 1) * (n + 2)], [77, 77]);
            }
        }
    }
}

#[test]
fn narrow_results_do_not_depend_on_the_number_of_threads() {
    let mut rng = Rng::new();
    let teams: Vec<Team> = [1, 2, 3].map(Team::new).into();
    for isa in Isa::available() {
        for (m, n, k) in [(5, 400, 700), (130, 170, 2300), (700, 33, 300), (64, 2000, 64), (301, 40, 640)] {
            let (a, b) = (rng.vec(m * k), rng.vec(k * n));
            let ab: Vec<bf16> = a.iter().map(|v| bf16::from_f32(*v)).collect();
            let bb: Vec<bf16> = b.iter().map(|v| bf16::from_f32(*v)).collect();
            let ai: Vec<i8> = a.iter().map(|v| (v * 128.0) as i8).collect();
            let bi: Vec<i8> = b.iter().map(|v| (v * 128.0) as i8).collect();
            type Results = (Vec<f32>, Vec<f32>, Vec<bf16>, Vec<i32>);
            let runs: Vec<Results> = teams
                .iter()
                .map(|t| {
                    let mut r: Results = (
                        vec![f32::NAN; m * n],
                        vec![f32::NAN; m * n],
                        vec![bf16::ZERO; m * n],
                        vec![7; m * n],
                    );
                    // SAFETY: the vectors hold the matrices; results are separate memory.
                    unsafe {
                        let (am, bm) = (Mat::rows(a.as_ptr(), k), Mat::rows(b.as_ptr(), n));
                        gemm_bf16(t, isa, &Gemm::new((m, n, k), am, bm, MatMut::rows(r.0.as_mut_ptr(), n)));
                        let (am, bm) = (Mat::rows(ab.as_ptr(), k), Mat::rows(bb.as_ptr(), k).t());
                        gemm_bf16(t, isa, &Gemm::new((m, n, k), am, bm, MatMut::rows(r.1.as_mut_ptr(), n)));
                        gemm_bf16(t, isa, &Gemm::new((m, n, k), am, bm, MatMut::rows(r.2.as_mut_ptr(), n)));
                        let (am, bm) = (Mat::rows(ai.as_ptr(), k), Mat::rows(bi.as_ptr(), n));
                        gemm_i8(t, isa, &Gemm::new((m, n, k), am, bm, MatMut::rows(r.3.as_mut_ptr(), n)));
                    }
                    r
                })
                .collect();
            for r in &runs[1..] {
                assert!(runs[0] == *r, "{isa:?} {m} {n} {k}");
            }
        }
    }
}

#[test]
fn narrow_batches_follow_single_products() {
    let mut rng = Rng::new();
    for threads in [1, 2, 5] {
        let team = Team::new(threads);
        for isa in Isa::available() {
            for (items, m, n, k) in
                [(0, 3, 4, 5), (1, 17, 19, 23), (12, 64, 64, 64), (5, 1, 30, 64), (40, 33, 70, 90)]
            {
                let a: Vec<bf16> = rng.vec(items * m * k).into_iter().map(bf16::from_f32).collect();
                let b: Vec<bf16> = rng.vec(k * n).into_iter().map(bf16::from_f32).collect();
                let ai: Vec<u8> = a.iter().map(|v| (v.to_f32() * 127.0 + 128.0) as u8).collect();
                let bi: Vec<i8> = b.iter().map(|v| (v.to_f32() * 127.0) as i8).collect();
                let (mut batched, mut single) =
                    (vec![bf16::NAN; items * m * n], vec![bf16::ZERO; items * m * n]);
                let (mut ib, mut is) = (vec![1i32; items * m * n], vec![2i32; items * m * n]);
                let (step, to) = ((m * k) as isize, (m * n) as isize);
                // All items share B.
                // SAFETY: the vectors hold the matrices of all items; results are separate memory.
                unsafe {
                    let (am, bm) = (Mat::rows(a.as_ptr(), k), Mat::rows(b.as_ptr(), n));
                    let c = MatMut::rows(batched.as_mut_ptr(), n);
                    let all = Batch { count: items, a: step, b: 0, c: to };
                    gemm_bf16_batched(&team, isa, all, &Gemm::new((m, n, k), am, bm, c));
                    let c = MatMut::rows(single.as_mut_ptr(), n);
                    for i in 0..items as isize {
                        gemm_bf16(
                            &team,
                            isa,
                            &Gemm::new((m, n, k), am.offset(i * step), bm, c.offset(i * to)),
                        );
                    }
                    let (am, bm) = (Mat::rows(ai.as_ptr(), k), Mat::rows(bi.as_ptr(), n));
                    let c = MatMut::rows(ib.as_mut_ptr(), n);
                    gemm_i8_batched(&team, isa, all, &Gemm::new((m, n, k), am, bm, c));
                    let c = MatMut::rows(is.as_mut_ptr(), n);
                    for i in 0..items as isize {
                        gemm_i8(&team, isa, &Gemm::new((m, n, k), am.offset(i * step), bm, c.offset(i * to)));
                    }
                }
                // `batched` starts as NaN, which equals nothing, so this also checks that every element was
                // written.
                assert!(batched == single && ib == is, "{isa:?} {threads} {items} {m} {n} {k}");
            }
        }
    }
}

#[test]
fn bf16_keeps_infinities_and_nan_and_drops_denormals() {
    let isa = Isa::best();
    if !isa.has_bf16() {
        println!("skipped: this processor has no AVX512_BF16");
        return;
    }
    for code in [Bf16Code::Pairs, Bf16Code::Tiles].into_iter().filter(|c| c.runs(isa)) {
        special_values(isa, code);
    }
}

fn special_values(isa: Isa, code: Bf16Code) {
    let team = Team::new(1);
    let (m, n, k) = (24, 32, 5);
    let run = |x: f32, y: f32| {
        let a: Vec<bf16> =
            (0..m * k).map(|i| if i % k == 4 { bf16::from_f32(x) } else { bf16::ZERO }).collect();
        let b: Vec<bf16> =
            (0..k * n).map(|i| if i / n == 4 { bf16::from_f32(y) } else { bf16::ONE }).collect();
        let mut c = vec![7f32; m * n];
        // SAFETY: the vectors hold the matrices; results are separate memory.
        unsafe {
            let (a, b) = (Mat::rows(a.as_ptr(), k), Mat::rows(b.as_ptr(), n));
            let to = MatMut::rows(c.as_mut_ptr(), n);
            gemm_bf16_by(code, &team, isa, &Gemm::new((m, n, k), a, b, to).with(Epilogue::default()));
        }
        assert!(c.iter().all(|v| v.to_bits() == c[0].to_bits()));
        c[0]
    };
    assert_eq!(run(f32::INFINITY, 2.0), f32::INFINITY);
    assert_eq!(run(f32::INFINITY, -2.0), f32::NEG_INFINITY);
    assert!(run(f32::INFINITY, 0.0).is_nan());
    assert!(run(f32::NAN, 1.0).is_nan());
    assert_eq!(run(3.0, 0.5), 1.5);
    assert_eq!(run(f32::MIN_POSITIVE, 1.0), f32::MIN_POSITIVE);
    // A denormal factor, then normal factors with a denormal product.
    assert_eq!(run(f32::MIN_POSITIVE / 4.0, 1024.0), 0.0);
    assert_eq!(run(f32::MIN_POSITIVE, 0.5), 0.0);
}
