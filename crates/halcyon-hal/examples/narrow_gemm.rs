//! Speed of f32, bf16 and int8 matrix products compared with a register-only loop of the same instruction
//! (the peak): `cargo run --release -p halcyon-hal --example narrow_gemm [threads] [rounds] [rows]`. With
//! `rows`, only products with this number of rows run.
//!
//! Product and peak are measured alternately, so that other load on the machine affects both. Prints medians
//! over the rounds: the rate of each product, and its share, which is the rate divided by the mean of the
//! peaks measured just before and after it. The best share is the best rate divided by the best peak.

use halcyon_hal::cpu::library::gemm::product_bf16::{Bf16Code, PackedBf16, gemm_bf16, gemm_bf16_packed};
use halcyon_hal::cpu::library::gemm::product_f32::{Gemm, Mat, MatMut, gemm};
use halcyon_hal::cpu::library::gemm::product_int8::{PackedI8, gemm_i8, gemm_i8_packed};
use halcyon_hal::cpu::peak::{self, MulAdd};
use halcyon_hal::cpu::sys::Isa;
use halcyon_hal::cpu::team::Team;
use half::bf16;
use std::time::Instant;

/// Processor time used by this thread, in seconds; `None` if it is not known.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn had() -> Option<f64> {
    unsafe extern "C" {
        fn clock_gettime(clock: std::ffi::c_int, to: *mut [i64; 2]) -> std::ffi::c_int;
    }
    let mut t = [0; 2];
    // SAFETY: CLOCK_THREAD_CPUTIME_ID is 3, and a timespec is two 64-bit integers on this target.
    let ok = unsafe { clock_gettime(3, &mut t) } == 0;
    ok.then(|| t[0] as f64 + t[1] as f64 * 1e-9)
}
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
fn had() -> Option<f64> {
    None
}

/// Seconds that `f` takes: processor time if this thread works alone and the system reports it (other load
/// disturbs it less), else wall-clock time.
fn seconds(team: &Team, f: impl FnOnce()) -> f64 {
    let (t, before) = (Instant::now(), had());
    f();
    let clock = t.elapsed().as_secs_f64();
    match (before, had()) {
        (Some(b), Some(a)) if team.threads() == 1 => a - b,
        _ => clock,
    }
}

fn median(v: &mut [f64]) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

/// Operations per second (two per multiply-add) of a register-only loop on all threads.
fn peak_of(team: &Team, isa: Isa, kind: MulAdd) -> f64 {
    peak::multiply_add(team, isa, kind).map_or(0.0, |mut r| median(&mut r))
}

/// Measures the peak and the products alternately; prints each product's median rate and its median share of
/// the peak.
fn rates(
    team: &Team,
    rounds: usize,
    ops: f64,
    mut top: impl FnMut() -> f64,
    runs: &mut [(&str, &mut dyn FnMut())],
) {
    let reps = (2e9 / ops).clamp(1.0, 50.0) as usize;
    let mut tops = vec![];
    let mut found = vec![vec![]; runs.len()];
    for round in 0..rounds + 1 {
        let mut here = top();
        for (run, found) in runs.iter_mut().zip(&mut found) {
            let r = ops * reps as f64 / seconds(team, || (0..reps).for_each(|_| run.1()));
            let next = top();
            // The first round is a warm-up.
            if round > 0 {
                found.push((r, r / ((here + next) / 2.0)));
                tops.push(next);
            }
            here = next;
        }
    }
    let best = |v: &[f64]| v.iter().copied().fold(0.0, f64::max);
    let top = best(&tops);
    print!("   peak {:5.0} (best {:5.0})", median(&mut tops) / 1e9, top / 1e9);
    for ((name, _), found) in runs.iter().zip(found) {
        let (mut r, mut s): (Vec<f64>, Vec<f64>) = found.into_iter().unzip();
        let share = 100.0 * best(&r) / top;
        print!(
            "   {name} {:5.0} ({:4.1} %, best {share:4.1} %)",
            median(&mut r) / 1e9,
            100.0 * median(&mut s)
        );
    }
    println!();
}

fn main() {
    let arg = |i: usize, or: usize| std::env::args().nth(i).and_then(|s| s.parse().ok()).unwrap_or(or);
    let (team, rounds, isa) = (Team::new(arg(1, 2)), arg(2, 9), Isa::best());
    let only: Option<usize> = std::env::args().nth(3).and_then(|s| s.parse().ok());
    println!("{} threads, {}: 10^9 operations per second, medians of {rounds}", team.threads(), isa.name());
    let mut s = 1u32;
    let mut byte = || {
        s = s.wrapping_mul(1664525).wrapping_add(1013904223);
        (s >> 24) as u8
    };
    for (m, n, k) in [
        (256, 256, 256),
        (512, 512, 512),
        (1024, 1024, 1024),
        (2048, 2048, 2048),
        (4096, 4096, 4096),
        (128, 3072, 768),
        (128, 384, 384),
        (4096, 1536, 384),
        (64, 4096, 4096),
    ] {
        if only.is_some_and(|o| o != m) {
            continue;
        }
        let ops = 2.0 * (m * n * k) as f64;
        let au: Vec<u8> = (0..m * k).map(|_| byte()).collect();
        let bi: Vec<i8> = (0..k * n).map(|_| byte() as i8).collect();
        let ai: Vec<i8> = au.iter().map(|v| *v as i8).collect();
        let (af, bf): (Vec<f32>, Vec<f32>) =
            (ai.iter().map(|v| *v as f32 / 128.0).collect(), bi.iter().map(|v| *v as f32 / 128.0).collect());
        let ah: Vec<bf16> = af.iter().map(|v| bf16::from_f32(*v)).collect();
        let bh: Vec<bf16> = bf.iter().map(|v| bf16::from_f32(*v)).collect();
        let (mut cf, mut ch, mut ci) = (vec![0f32; m * n], vec![bf16::ZERO; m * n], vec![0i32; m * n]);
        let (to, half, int) = (
            MatMut::rows(cf.as_mut_ptr(), n),
            MatMut::rows(ch.as_mut_ptr(), n),
            MatMut::rows(ci.as_mut_ptr(), n),
        );
        println!("{m} {n} {k}");
        // Wraps a product in a closure to measure.
        macro_rules! run {
            ($e:expr) => {
                // SAFETY: every vector has the size of its matrix.
                &mut || unsafe { $e }
            };
        }
        let (t, i) = (&team, isa);
        let (a, b) = (Mat::rows(af.as_ptr(), k), Mat::rows(bf.as_ptr(), n));
        print!("  f32 ");
        rates(
            t,
            if m > 2048 { 1 } else { rounds },
            ops,
            || peak::fma_flops(t, i),
            &mut [("", run!(gemm(t, i, &Gemm::new((m, n, k), a, b, to))))],
        );
        if isa.has_bf16() {
            print!("  {}", Bf16Code::best(isa).name());
            let (ah, bh, bt) =
                (Mat::rows(ah.as_ptr(), k), Mat::rows(bh.as_ptr(), n), Mat::rows(bh.as_ptr(), k).t());
            // SAFETY: `bh` has `k * n` elements.
            let packed = unsafe { PackedBf16::b(isa, bh, k, n) };
            rates(
                t,
                rounds,
                ops,
                || peak_of(t, i, MulAdd::Bf16),
                &mut [
                    ("to bf16", run!(gemm_bf16(t, i, &Gemm::new((m, n, k), ah, bh, half)))),
                    ("to f32", run!(gemm_bf16(t, i, &Gemm::new((m, n, k), ah, bh, to)))),
                    ("B transposed", run!(gemm_bf16(t, i, &Gemm::new((m, n, k), ah, bt, half)))),
                    ("B packed", run!(gemm_bf16_packed(t, &Gemm::new((m, n, k), ah, &packed, half)))),
                    ("B packed to f32", run!(gemm_bf16_packed(t, &Gemm::new((m, n, k), ah, &packed, to)))),
                    ("of f32", run!(gemm_bf16(t, i, &Gemm::new((m, n, k), a, b, to)))),
                ],
            );
        }
        if isa.has_vnni() {
            let (au, ai) = (Mat::rows(au.as_ptr(), k), Mat::rows(ai.as_ptr(), k));
            let (b, bt) = (Mat::rows(bi.as_ptr(), n), Mat::rows(bi.as_ptr(), k).t());
            // SAFETY: `b` has `k * n` elements.
            let packed = unsafe { PackedI8::b(isa, b, k, n) };
            print!("  int8");
            rates(
                t,
                rounds,
                ops,
                || peak_of(t, i, MulAdd::Int8),
                &mut [
                    ("u8 i8", run!(gemm_i8(t, i, &Gemm::new((m, n, k), au, b, int)))),
                    ("i8 i8", run!(gemm_i8(t, i, &Gemm::new((m, n, k), ai, b, int)))),
                    ("B transposed", run!(gemm_i8(t, i, &Gemm::new((m, n, k), au, bt, int)))),
                    ("B packed", run!(gemm_i8_packed(t, &Gemm::new((m, n, k), au, &packed, int)))),
                ],
            );
        }
    }
}
