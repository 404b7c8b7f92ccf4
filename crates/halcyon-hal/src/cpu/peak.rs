//! What this machine can do: multiply-add rate and memory bandwidth, measured. Every share of a peak is against these.

use super::library::simd::{Simd, dispatch_simd};
use super::sys::Isa;
use super::team::{SharedConst, SharedMut, Team};
use std::time::Instant;

/// Multiply-adds in registers only: 24 independent chains, more than latency times issue width.
#[inline(always)]
unsafe fn fma_loop<S: Simd>(steps: usize, out: *mut f32) {
    // SAFETY: the caller's pointer covers 16 floats.
    unsafe {
        let (x, y) = (S::splat(0.999_999), S::splat(1e-7));
        let mut acc = [S::splat(1.0); 24];
        for _ in 0..steps {
            for a in &mut acc {
                *a = S::fma(*a, x, y);
            }
        }
        let mut t = acc[0];
        for a in &acc[1..] {
            t = S::add(t, *a);
        }
        S::store(out, t);
    }
}
dispatch_simd! {
    unsafe fn fma_steps[][](isa, steps: usize, out: *mut f32) = fma_loop
}

/// Sums W-lane vectors over `n` floats with eight accumulators.
#[inline(always)]
unsafe fn read_loop<S: Simd>(p: *const f32, n: usize, out: *mut f32) {
    // SAFETY: the caller's pointers cover `n` and 16 floats.
    unsafe {
        let mut acc = [S::zero(); 8];
        let step = 8 * S::W;
        let mut i = 0;
        while i + step <= n {
            for (v, a) in acc.iter_mut().enumerate() {
                *a = S::add(*a, S::load(p.add(i + v * S::W)));
            }
            i += step;
        }
        let mut t = acc[0];
        for a in &acc[1..] {
            t = S::add(t, *a);
        }
        S::store(out, t);
    }
}
dispatch_simd! {
    unsafe fn read_floats[][](isa, p: *const f32, n: usize, out: *mut f32) = read_loop
}

/// `out = s * a + b` (the triad of McCalpin's STREAM).
#[inline(always)]
unsafe fn triad_loop<S: Simd>(a: *const f32, b: *const f32, out: *mut f32, n: usize) {
    // SAFETY: the caller's pointers cover `n` floats.
    unsafe {
        let s = S::splat(3.0);
        let mut i = 0;
        while i + S::W <= n {
            S::store(out.add(i), S::fma(s, S::load(a.add(i)), S::load(b.add(i))));
            i += S::W;
        }
    }
}
dispatch_simd! {
    unsafe fn triad_floats[][](isa, a: *const f32, b: *const f32, out: *mut f32, n: usize) = triad_loop
}

/// Best time in seconds of a few runs of `f`.
fn best(runs: usize, mut f: impl FnMut()) -> f64 {
    (0..runs)
        .map(|_| {
            let t = Instant::now();
            f();
            t.elapsed().as_secs_f64()
        })
        .fold(f64::MAX, f64::min)
        .max(1e-9)
}

/// f32 multiply-adds of all threads of the team, in FLOP/s (two per multiply-add). Takes some 10 ms.
pub fn fma_flops(team: &Team, isa: Isa) -> f64 {
    const STEPS: usize = 60_000;
    let n = team.threads();
    let mut sink = vec![0f32; 16 * n];
    let out = SharedMut(sink.as_mut_ptr());
    let lanes = match isa {
        Isa::Avx512 => 16,
        Isa::Avx2 => 8,
        Isa::Portable => 4,
    };
    let t = best(8, || {
        // SAFETY: 16 floats per part.
        team.run(n, &|p| unsafe { fma_steps(isa, STEPS, out.get().add(16 * p)) });
    });
    std::hint::black_box(&sink);
    2.0 * (24 * lanes * STEPS * n) as f64 / t
}

/// Bandwidth of all threads of the team reading `bytes` of memory, in bytes per second. Use several times the last cache.
pub fn read_bandwidth(team: &Team, isa: Isa, bytes: usize) -> f64 {
    let n = (bytes / 4).max(1 << 12);
    let data = vec![1f32; n];
    let parts = team.threads() * 8;
    let mut sink = vec![0f32; 16 * parts];
    let (p, out) = (SharedConst(data.as_ptr()), SharedMut(sink.as_mut_ptr()));
    let t = best(8, || {
        team.run(parts, &|i| {
            let (a, b) = (n * i / parts, n * (i + 1) / parts);
            // SAFETY: parts of `data`, and 16 floats per part.
            unsafe { read_floats(isa, p.get().add(a), b - a, out.get().add(16 * i)) }
        });
    });
    std::hint::black_box(&sink);
    (n * 4) as f64 / t
}

/// Bandwidth of `out = s a + b` over three arrays of `bytes` together, counting two reads and one write.
pub fn triad_bandwidth(team: &Team, isa: Isa, bytes: usize) -> f64 {
    let n = (bytes / 12).max(1 << 12);
    let (a, b) = (vec![1f32; n], vec![2f32; n]);
    let mut c = vec![0f32; n];
    let parts = team.threads() * 8;
    let (pa, pb, pc) = (SharedConst(a.as_ptr()), SharedConst(b.as_ptr()), SharedMut(c.as_mut_ptr()));
    let t = best(8, || {
        team.run(parts, &|i| {
            let (s, e) = (n * i / parts, n * (i + 1) / parts);
            // SAFETY: parts of the arrays.
            unsafe { triad_floats(isa, pa.get().add(s), pb.get().add(s), pc.get().add(s), e - s) }
        });
    });
    std::hint::black_box(&c);
    (n * 12) as f64 / t
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_plausible() {
        let team = Team::new(1);
        for isa in Isa::available() {
            let f = fma_flops(&team, isa);
            assert!(f > 1e8 && f < 1e13, "{f}");
            let b = read_bandwidth(&team, isa, 1 << 22);
            assert!(b > 1e8 && b < 1e13, "{b}");
            let t = triad_bandwidth(&team, isa, 1 << 22);
            assert!(t > 1e8 && t < 1e13, "{t}");
        }
    }
}
