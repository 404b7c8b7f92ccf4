//! Speed of the CPU kernels compared with the machine's measured peaks: `cargo run --release -p
//! halcyon-hal --example cpu_kernels [threads]`.

use halcyon_hal::cpu::library::attention::{Attention, Heads, Operands, attention};
use halcyon_hal::cpu::library::conv::plain::{Conv, ConvOperands, ConvWeights, Window, conv_f32};
use halcyon_hal::cpu::library::gemm::product_any::gemm_any;
use halcyon_hal::cpu::library::gemm::product_f32::{Gemm, Mat, MatMut, gemm};
use halcyon_hal::cpu::library::rows::softmax::{Rows, layer_norm, softmax};
use halcyon_hal::cpu::peak;
use halcyon_hal::cpu::sys::Isa;
use halcyon_hal::cpu::team::{SharedConst, SharedMut, Team};
use halcyon_hal::cpu::vmath;
use halcyon_ir::ScalarOp;
use halcyon_ir::composite::CompositeKind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Best time of `f` in seconds over `reps` runs, which follow a warm-up run.
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

/// Attention of several sizes compared with the FMA peak.
fn attentions(team: &Team, isa: Isa) {
    for (heads, queries, keys, d, causal) in [
        (32, 1024, 1024, 128, false),
        (32, 1024, 1024, 128, true),
        (8, 512, 512, 64, false),
        (8, 2048, 2048, 64, true),
        (384, 128, 128, 32, false),
        (12, 128, 128, 32, false),
        (8, 1, 2048, 64, false),
    ] {
        let scale = (d as f32).powf(-0.5);
        let a = Attention { batch: 1, heads, kv_heads: heads, queries, keys, d, dv: d, scale, causal };
        let (q, k, v) = (data(heads * queries * d), data(heads * keys * d), data(heads * keys * d));
        let mut y = vec![0f32; heads * queries * d];
        let rows = |p: &[f32], n: usize| {
            let strides = [heads * n * d, n * d, d, 1].map(|s| s as isize);
            Heads { ptr: SharedConst(p.as_ptr()), strides }
        };
        let (q, k, v) = (rows(&q, queries), rows(&k, keys), rows(&v, keys));
        let out = Heads { ptr: SharedMut(y.as_mut_ptr()), strides: q.strides };
        // A causal mask keeps the pairs up to the diagonal.
        let pairs = if causal { queries * (queries + 1) / 2 } else { queries * keys };
        let flops = 4.0 * (heads * pairs * d) as f64;
        // The peak is measured between the runs, because other load on the machine affects both.
        let (mut t, mut top) = (f64::MAX, 0f64);
        for _ in 0..5 {
            top = top.max(peak::fma_flops(team, isa));
            let reps = (1e10 / flops).clamp(2.0, 200.0) as usize;
            // SAFETY: every vector has the length of its operand.
            t = t.min(best(reps, || unsafe {
                attention(team, isa, &a, &[], Operands { q, k, v, mask: None, y: out })
            }));
        }
        println!(
            "attention {heads} x {queries} x {keys} x {d} causal {causal}  {:.1} GFLOP/s  {:.1} % of the FMA peak ({:.0})  {:.3} ms",
            flops / t / 1e9,
            100.0 * flops / t / top,
            top / 1e9,
            t * 1e3
        );
    }
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|s| s.parse().ok()).unwrap_or(2);
    let team = Team::new(threads);
    let isa = Isa::best();
    // The tasks of the job wait for each other, so that every thread takes one.
    let here = AtomicUsize::new(0);
    let hand_off = best(5000, || {
        here.store(0, Ordering::SeqCst);
        team.run(team.threads(), &|_| {
            here.fetch_add(1, Ordering::SeqCst);
            let mut spins = 0u32;
            while here.load(Ordering::SeqCst) < team.threads() {
                std::hint::spin_loop();
                spins += 1;
                if spins.is_multiple_of(4096) {
                    std::thread::yield_now();
                }
            }
        });
    });
    // `cpu_kernels 2 attention` measures attention alone.
    if std::env::args().nth(2).as_deref() == Some(CompositeKind::Attention.name()) {
        return attentions(&team, isa);
    }
    println!("{} threads, {}, starting a job {:.2} us", team.threads(), isa.name(), hand_off * 1e6);

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
        // The peak is measured between the runs, because other load on the machine affects both.
        let (mut t, mut top) = (f64::MAX, 0f64);
        for _ in 0..3 {
            top = top.max(peak::fma_flops(&team, isa));
            t = t.min(best(reps.div_ceil(3), || {
                // SAFETY: every vector has the size of its matrix.
                unsafe {
                    let (a, b) = (Mat::rows(a.as_ptr(), k), Mat::rows(b.as_ptr(), n));
                    gemm(&team, isa, &Gemm::new((m, n, k), a, b, MatMut::rows(c.as_mut_ptr(), n)))
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

    for n in [256, 1024] {
        let a: Vec<f64> = data(n * n).into_iter().map(f64::from).collect();
        let mut c = vec![0f64; n * n];
        let i: Vec<i8> = a.iter().map(|v| (v * 100.0) as i8).collect();
        let mut ci = vec![0i32; n * n];
        // SAFETY: every vector has the size of its matrix.
        let (t, ti) = unsafe {
            let (m, o) = (Mat::rows(a.as_ptr(), n), MatMut::rows(c.as_mut_ptr(), n));
            let t = best(5, || gemm_any::<f64, f64>(&team, isa, &Gemm::new((n, n, n), m, m, o)));
            let (m, o) = (Mat::rows(i.as_ptr(), n), MatMut::rows(ci.as_mut_ptr(), n));
            (t, best(5, || gemm_any::<i8, i32>(&team, isa, &Gemm::new((n, n, n), m, m, o))))
        };
        let ops = 2e-9 * (n * n * n) as f64;
        println!("gemm_any {n}^3  f64 {:.1} GFLOP/s  i8 to i32 {:.1} Gop/s", ops / t, ops / ti);
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
            let (x, y) =
                (Mat { ptr: x.as_ptr(), rs: 1, cs: 1 }, MatMut { ptr: y.as_mut_ptr(), rs: 1, cs: 1 });
            // SAFETY: every vector has the size of its operand.
            unsafe {
                t = t.min(best(10, || gemm(&team, isa, &Gemm::new((m, 1, k), am, x, y))));
                tt = tt.min(best(10, || gemm(&team, isa, &Gemm::new((k, 1, m), am.t(), x, y))));
                th = th.min(best(10, || gemm(&team, isa, &Gemm::new((m, 1, k), hm, x, y))));
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

    // Batch, channels in and out, groups, image, kernel, stride, padding: layers of ResNet-50, SqueezeNet and
    // MobileNet.
    for (b, ci, co, g, hw, k, s, p) in [
        (1, 3, 64, 1, 224, 7, 2, 3),
        (1, 64, 64, 1, 56, 3, 1, 1),
        (1, 64, 256, 1, 56, 1, 1, 0),
        (1, 128, 128, 1, 28, 3, 1, 1),
        (1, 128, 128, 1, 56, 3, 2, 1),
        (1, 256, 256, 1, 14, 3, 1, 1),
        (1, 512, 512, 1, 7, 3, 1, 1),
        (1, 16, 64, 1, 55, 3, 1, 1),
        (1, 64, 16, 1, 55, 1, 1, 0),
        (8, 64, 64, 1, 28, 3, 1, 1),
        (1, 128, 128, 128, 56, 3, 1, 1),
    ] {
        let Ok(w) = Window::new(&[hw, hw], &[k, k], &[s, s], &[1, 1], &[(p, p), (p, p)], &[1, 1]) else {
            continue;
        };
        let Ok(c) = Conv::new(b, ci, co, g, w) else {
            continue;
        };
        let (x, w, bias) = (data(c.input_len()), data(c.weight_len()), data(co));
        let mut y = vec![0f32; c.output_len()];
        let flops = 2.0 * c.macs() as f64;
        let (mut t, mut top) = (f64::MAX, 0f64);
        // SAFETY: every vector has the length given by `c`.
        unsafe {
            let mut kept = vec![0f32; ConvWeights::floats(isa, &c).unwrap_or(0)];
            let packed = ConvWeights::floats(isa, &c).map(|_| {
                ConvWeights::pack(Some(&team), isa, &c, w.as_ptr(), kept.as_mut_ptr());
                ConvWeights::new(isa, &c, kept.as_ptr())
            });
            for _ in 0..3 {
                top = top.max(peak::fma_flops(&team, isa));
                t = t.min(best(20, || {
                    let (x, w, y) = (x.as_ptr(), w.as_ptr(), y.as_mut_ptr());
                    let operands = ConvOperands::new(x, w, y);
                    let operands = ConvOperands { bias: bias.as_ptr(), relu: true, ..operands };
                    conv_f32(&team, isa, &c, packed.as_ref(), &operands)
                }));
            }
        }
        println!(
            "conv {b}x{ci:3}->{co:3}/{g:3} {hw:3}^2 {k}x{k} s{s}  {:7.1} GFLOP/s  {:5.1} % of {:.0}, {:.3} ms",
            flops / t / 1e9,
            100.0 * flops / t / top,
            top / 1e9,
            t * 1e3
        );
    }

    for (rows, n) in [(512, 512), (4096, 4096)] {
        let x = data(rows * n);
        let mut y = vec![0f32; rows * n];
        let top = peak::triad_bandwidth(&team, isa, rows * n * 12);
        let (px, py) = (x.as_ptr(), y.as_mut_ptr());
        let scale = data(n);
        // SAFETY: every vector has the length of the rows.
        let (a, b) = unsafe {
            let rows = Rows { rows, n, x: px, y: py };
            let a = best(20, || softmax(&team, isa, &rows));
            (a, best(20, || layer_norm(&team, isa, &rows, &scale, &scale, 1e-5)))
        };
        let gb = (rows * n * 8) as f64 / 1e9;
        println!(
            "rows {rows} x {n}  softmax {:.1} GB/s  layer norm {:.1} GB/s  triad {:.1}",
            gb / a,
            gb / b,
            top / 1e9
        );
    }

    attentions(&team, isa);

    let (n, mut out) = (1 << 12, Vec::new());
    for op in [
        ScalarOp::Exp,
        ScalarOp::Log,
        ScalarOp::Tanh,
        ScalarOp::Sigmoid,
        ScalarOp::Silu,
        ScalarOp::Gelu,
        ScalarOp::Erf,
        ScalarOp::Sin,
        ScalarOp::Sqrt,
    ] {
        let x = data(n);
        let mut y = x.clone();
        let copy = best(200, || y.copy_from_slice(&x));
        let t = best(200, || {
            y.copy_from_slice(&x);
            vmath::apply(isa, op, &mut y);
        });
        out.push(format!("{} {:.2}", op.name(), (t - copy) * 1e9 / n as f64));
    }
    println!("ns per element on one thread: {}", out.join(", "));
}
