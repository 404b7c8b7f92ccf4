use halcyon_hal::cpu::library::attention::{Attention, Heads, attention};
use halcyon_hal::cpu::peak;
use halcyon_hal::cpu::sys::Isa;
use halcyon_hal::cpu::team::{SharedConst, SharedMut, Team};
use halcyon_hal::cpu::vmath;
use halcyon_ir::ScalarOp;
fn cpu() -> f64 {
    let s = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    s.split(' ').next().unwrap().parse::<f64>().unwrap() * 1e-9
}
fn best(_: usize, mut f: impl FnMut()) -> f64 {
    f();
    let (start, mut n) = (cpu(), 0);
    loop {
        for _ in 0..4 {
            f();
        }
        n += 4;
        let t = cpu() - start;
        if t > 0.15 {
            return t / n as f64;
        }
    }
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
    let team = Team::new(1);
    let isa = Isa::best();
    for (heads, queries, keys, d, causal) in [
        (2, 1024, 1024, 128, false),
        (2, 1024, 1024, 128, true),
        (8, 512, 512, 64, false),
        (12, 128, 128, 32, false),
        (12, 96, 132, 32, false),
    ] {
        let a = Attention { batch: 1, heads, kv_heads: heads, queries, keys, d, dv: d, scale: 0.1, causal };
        let (q, k, v) = (data(heads * queries * d), data(heads * keys * d), data(heads * keys * d));
        let mut y = vec![0f32; heads * queries * d];
        let rows = |p: &[f32], n: usize| Heads {
            ptr: SharedConst(p.as_ptr()),
            strides: [heads * n * d, n * d, d, 1].map(|s| s as isize),
        };
        let (q, k, v) = (rows(&q, queries), rows(&k, keys), rows(&v, keys));
        let out = Heads { ptr: SharedMut(y.as_mut_ptr()), strides: q.strides };
        let pairs = if causal { queries * (queries + 1) / 2 } else { queries * keys };
        let flops = 4.0 * (heads * pairs * d) as f64;
        let (mut t, mut top) = (f64::MAX, 0f64);
        for _ in 0..5 {
            top = top.max(peak::fma_flops(&team, isa));
            t = t.min(best((5e9 / flops).clamp(3.0, 100.0) as usize, || unsafe {
                attention(&team, isa, &a, q, k, v, None, &[], out)
            }));
        }
        println!(
            "{heads} x {queries} x {keys} x {d} causal {causal} {:.1} GFLOP/s {:.1} % of {:.0} {:.3} ms cpu",
            flops / t / 1e9,
            100.0 * flops / t / top,
            top / 1e9,
            t * 1e3
        );
    }
    use halcyon_hal::cpu::library::gemm::*;
    for (m, n, k, copies) in [
        (1024, 1024, 1024, 1),
        (128, 384, 384, 1),
        (128, 384, 384, 40),
        (128, 1536, 384, 1),
        (128, 1536, 384, 12),
        (128, 384, 1536, 1),
        (128, 384, 1536, 12),
        (4096, 384, 384, 1),
        (4096, 1536, 384, 1),
        (4096, 384, 1536, 1),
    ] {
        let (a, b) = (data(m * k), data(k * n));
        let mut c = vec![0f32; m * n];
        let shape = PackShape::b(isa, k, n);
        let packed: Vec<Vec<f32>> = (0..copies)
            .map(|_| {
                let mut p = vec![0f32; shape.floats()];
                unsafe { shape.pack_b(None, Mat::rows(b.as_ptr(), n), p.as_mut_ptr()) };
                p
            })
            .collect();
        let mut i = 0;
        let t = best(0, || unsafe {
            i += 1;
            let p = Packed::new(shape, packed[i % copies].as_ptr());
            gemm_packed(
                &team,
                m,
                n,
                k,
                Mat::rows(a.as_ptr(), k),
                &p,
                MatMut::rows(c.as_mut_ptr(), n),
                Epilogue::default(),
            );
        });
        println!("gemm {m} {n} {k} x{copies} {:.1} GFLOP/s {:.1} us", 2e-9 * (m * n * k) as f64 / t, t * 1e6);
    }
    {
        let mut x = [1.0f32; 64];
        let _ = &mut x;
        let t0 = cpu();
        let w0 = std::time::Instant::now();
        let mut n = 0;
        let mut f = 0.0f64;
        while cpu() - t0 < 0.3 {
            f = f.max(peak::fma_flops(&team, isa));
            n += 1;
        }
        println!("peak {f:.3e} over {n} in {:?} wall", w0.elapsed());
    }
    for op in [ScalarOp::Exp, ScalarOp::Gelu, ScalarOp::Erf, ScalarOp::Tanh, ScalarOp::Silu] {
        let x = data(4096);
        let mut y = x.clone();
        let t = best(500, || {
            y.copy_from_slice(&x);
            vmath::apply(isa, op, &mut y);
        });
        println!("{} {:.3} ns", op.name(), t * 1e9 / 4096.0);
    }
}
