//! Speed of the CPU kernels beside what this machine can do: `cargo run --release -p halcyon-hal --example cpu_kernels [threads]`.

use halcyon_hal::cpu::library::gemm::{Epilogue, Mat, MatMut, gemm};
use halcyon_hal::cpu::library::gemv::gemv;
use halcyon_hal::cpu::peak;
use halcyon_hal::cpu::sys::Isa;
use halcyon_hal::cpu::team::Team;
use std::time::Instant;

/// Best time of `f` in seconds over at least `reps` runs.
fn best(reps: usize, mut f: impl FnMut()) -> f64 {
    f();
    (0..reps)
        .map(|_| {
            let t = Instant::now();
            f();
            t.elapsed().as_secs_f64()
        })
        .fold(f64::MAX, f64::min)
}

fn data(n: usize) -> Vec<f32> {
    let mut s = 1u32;
    (0..n)
        .map(|_| {
            s = s.wrapping_mul(1664525).wrapping_add(1013904223);
            (s >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|s| s.parse().ok()).unwrap_or(2);
    let team = Team::new(threads);
    let isa = Isa::best();
    let hand_off = best(2000, || team.run(threads, &|_| {}));
    println!(
        "{} threads, {}, hand-off {:.2} us",
        team.threads(),
        isa.name(),
        hand_off * 1e6
    );

    for (m, n, k) in if std::env::args().nth(2).is_some() {
        vec![]
    } else {
        vec![
            (256, 256, 256),
            (512, 512, 512),
            (1024, 1024, 1024),
            (2048, 2048, 2048),
            (4096, 4096, 4096),
            (64, 64, 64),
            (128, 768, 768),
            (128, 3072, 768),
            (4096, 64, 4096),
            (16, 4096, 4096),
            (64, 4096, 4096),
        ]
    } {
        let (a, b) = (data(m * k), data(k * n));
        let mut c = vec![0f32; m * n];
        let flops = 2.0 * (m * n * k) as f64;
        let reps = (4e10 / flops).clamp(4.0, 300.0) as usize;
        // The peak is measured in between, since other work on the machine moves both.
        let (mut t, mut top) = (f64::MAX, 0f64);
        for _ in 0..3 {
            top = top.max(peak::fma_flops(&team, isa));
            t = t.min(best(reps.div_ceil(3), || {
                // SAFETY: the vectors have the sizes of the matrices.
                unsafe {
                    gemm(
                        &team,
                        isa,
                        m,
                        n,
                        k,
                        Mat::rows(a.as_ptr(), k),
                        Mat::rows(b.as_ptr(), n),
                        MatMut::rows(c.as_mut_ptr(), n),
                        Epilogue::default(),
                    )
                }
            }));
        }
        println!(
            "gemm {m:5} {n:5} {k:5}  {:8.1} GFLOP/s  {:5.1} % of the FMA peak ({:.0})",
            flops / t / 1e9,
            100.0 * flops / t / top,
            top / 1e9
        );
    }

    for (m, k) in [(4096, 4096), (14336, 4096), (1024, 1024)] {
        let (a, x) = (data(m * k), data(m.max(k)));
        let h: Vec<half::bf16> = a.iter().map(|v| half::bf16::from_f32(*v)).collect();
        let mut y = vec![0f32; m.max(k)];
        let bytes = (m * k * 4) as f64;
        let (mut t, mut tt, mut th, mut top) = (f64::MAX, f64::MAX, f64::MAX, 0f64);
        for _ in 0..3 {
            top = top.max(peak::read_bandwidth(&team, isa, m * k * 4));
            let am = Mat::rows(a.as_ptr(), k);
            let hm = Mat::rows(h.as_ptr(), k);
            let (x, y, e) = (x.as_ptr(), y.as_mut_ptr(), Epilogue::default());
            // SAFETY: the vectors have the sizes of the operands.
            unsafe {
                t = t.min(best(10, || gemv(&team, isa, m, k, am, x, 1, y, e)));
                tt = tt.min(best(10, || gemv(&team, isa, k, m, am.t(), x, 1, y, e)));
                th = th.min(best(10, || gemv(&team, isa, m, k, hm, x, 1, y, e)));
            }
        }
        println!(
            "gemv {m:5} {k:5}  A x {:5.1} GB/s ({:4.1} %)  x A {:5.1} GB/s ({:4.1} %)  bf16 A x {:5.1} GB/s ({:4.1} %)  of {:.1}",
            bytes / t / 1e9,
            100.0 * bytes / t / top,
            bytes / tt / 1e9,
            100.0 * bytes / tt / top,
            bytes / 2.0 / th / 1e9,
            50.0 * bytes / th / top,
            top / 1e9
        );
    }
}
