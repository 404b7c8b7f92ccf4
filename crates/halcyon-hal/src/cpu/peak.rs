//! What this machine can do: multiply-add rates, memory bandwidth and the team's hand-off, measured. Every
//! share of a peak is against these.
//!
//! Each measurement gives one figure per burst, so that its reader can take the best, the median or the
//! spread. Threads of a burst start together, and in the bandwidth loops each has its own part of the arrays,
//! which stays in its own caches.

use super::library::simd::{Simd, Sizes, dispatch_simd};
use super::memory::HostMemory;
use super::sys::Isa;
use super::team::{SharedMut, Team};
use crate::{Error, Result};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Fewest bursts of a measurement, and how long it goes on: other work on the machine spoils some bursts, and
/// often several in a row.
const BURSTS: usize = 12;
const TIME: Duration = Duration::from_millis(50);
/// Least length of a burst that reads memory, in seconds: long beside the hand-off, and short beside the
/// slices of time in which a busy system shares its processors out.
const BURST: f64 = 3e-4;
/// Independent chains of the multiply-add loops on 32 registers: more than latency times issue width, as many
/// as they hold.
const CHAINS: usize = 24;

/// Multiply-adds in registers only: chains beyond what the registers hold would measure the stack.
#[inline(always)]
unsafe fn fma_loop<S: Simd>(steps: usize, out: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        match chains(S::MR * S::NV) {
            CHAINS => fma_chains::<S, CHAINS>(steps, out),
            16 => fma_chains::<S, 16>(steps, out),
            _ => fma_chains::<S, 12>(steps, out),
        }
    }
}

/// Chains of an instruction set whose register tiles hold `sums` vectors.
const fn chains(sums: usize) -> usize {
    match sums {
        CHAINS.. => CHAINS,
        16.. => 16,
        _ => 12,
    }
}

#[inline(always)]
unsafe fn fma_chains<S: Simd, const N: usize>(steps: usize, out: *mut f32) {
    // SAFETY: the caller's pointer covers 16 floats.
    unsafe {
        let (x, y) = (S::splat(0.999_999), S::splat(1e-7));
        let mut acc = [S::splat(1.0); N];
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

/// Products of narrow numbers, added up in 32 bits.
#[cfg(target_arch = "x86_64")]
mod narrow {
    use super::CHAINS;
    use crate::cpu::amx::{TileConfig, Tiles, tile};
    use std::arch::x86_64::*;
    use std::hint::black_box;

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn bf16(steps: usize) {
        // 2^-7 in bf16, so that the sums grow slowly and nothing is denormal.
        let v = black_box(_mm512_set1_epi16(0x3c00));
        // SAFETY: both types are 512 bits of which every pattern is a value.
        let x = unsafe { std::mem::transmute::<__m512i, __m512bh>(v) };
        let mut acc = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..steps {
            for a in &mut acc {
                *a = _mm512_dpbf16_ps(*a, x, x);
            }
        }
        black_box(acc);
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) fn int8_512(steps: usize) {
        let (x, y) = (black_box(_mm512_set1_epi8(3)), black_box(_mm512_set1_epi8(-5)));
        let mut acc = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..steps {
            for a in &mut acc {
                *a = _mm512_dpbusd_epi32(*a, x, y);
            }
        }
        black_box(acc);
    }

    /// Four tiles of sums, as products use them. Zeros are as fast as other numbers.
    pub(super) fn bf16_tiles(steps: usize) {
        let _tiles = Tiles::new(&TileConfig::FULL);
        for _ in 0..steps {
            // SAFETY: the guard lives, the registers have one size, and whoever picks this loop has looked
            // for AMX-BF16.
            unsafe {
                tile::bf16::<0, 4, 6>();
                tile::bf16::<1, 4, 7>();
                tile::bf16::<2, 5, 6>();
                tile::bf16::<3, 5, 7>();
            }
        }
    }

    pub(super) fn int8_tiles(steps: usize) {
        let _tiles = Tiles::new(&TileConfig::FULL);
        for _ in 0..steps {
            // SAFETY: as above, with AMX-INT8.
            unsafe {
                tile::u8_i8::<0, 4, 6>();
                tile::u8_i8::<1, 4, 7>();
                tile::u8_i8::<2, 5, 6>();
                tile::u8_i8::<3, 5, 7>();
            }
        }
    }

    /// Of 16 registers, 12 hold sums.
    pub(super) const CHAINS_256: usize = 12;

    #[target_feature(enable = "avx2,avxvnni")]
    pub(super) fn int8_256(steps: usize) {
        let (x, y) = (black_box(_mm256_set1_epi8(3)), black_box(_mm256_set1_epi8(-5)));
        let mut acc = [_mm256_setzero_si256(); CHAINS_256];
        for _ in 0..steps {
            for a in &mut acc {
                *a = _mm256_dpbusd_avx_epi32(*a, x, y);
            }
        }
        black_box(acc);
    }
}

/// Arithmetic whose rate can be measured.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum MulAdd {
    /// f32 times f32, added to f32.
    F32,
    /// Pairs of bf16 products, added to f32 (`tdpbf16ps` on tile registers where this process has them, else
    /// `vdpbf16ps`).
    Bf16,
    /// Four products of u8 and i8, added to i32 (`tdpbusd` on tile registers where this process has them,
    /// else `vpdpbusd`).
    Int8,
}

impl MulAdd {
    pub const ALL: [MulAdd; 3] = [MulAdd::F32, MulAdd::Bf16, MulAdd::Int8];

    /// `f32`, `bf16`, `int8`.
    pub fn name(self) -> &'static str {
        match self {
            MulAdd::F32 => "f32",
            MulAdd::Bf16 => "bf16",
            MulAdd::Int8 => "int8",
        }
    }
}

/// A loop that can run here.
struct Loop {
    /// What it is made of.
    instruction: &'static str,
    /// Operations of one step.
    ops: usize,
    run: Box<dyn Fn(usize) + Sync>,
}

fn fma(isa: Isa) -> Loop {
    let isa = isa.check();
    let Sizes { lanes, attention: (rows, columns), .. } = Sizes::of(isa);
    let run = move |steps| {
        let mut out = [0f32; 16];
        // SAFETY: 16 floats, and the set was checked.
        unsafe { fma_steps(isa, steps, out.as_mut_ptr()) };
        black_box(out);
    };
    let instruction = match isa {
        Isa::Portable if cfg!(target_arch = "x86_64") => "mulps, addps",
        Isa::Portable if cfg!(target_arch = "aarch64") => "fmla",
        Isa::Portable => "multiply, add",
        Isa::Avx2 | Isa::Avx512 => "vfmadd",
    };
    Loop { instruction, ops: 2 * lanes * chains(rows * columns / lanes), run: Box::new(run) }
}

#[cfg(target_arch = "x86_64")]
fn narrow_loop(isa: Isa, kind: MulAdd) -> std::result::Result<Loop, String> {
    match kind {
        MulAdd::F32 => Ok(fma(isa)),
        MulAdd::Bf16 if isa.has_bf16_tiles() => Ok(Loop {
            instruction: "tdpbf16ps",
            // 16 x 16 sums of 16 pairs.
            ops: 4 * 16 * 16 * 32 * 2,
            run: Box::new(narrow::bf16_tiles),
        }),
        MulAdd::Int8 if isa.has_int8_tiles() => {
            Ok(Loop { instruction: "tdpbusd", ops: 4 * 16 * 16 * 64 * 2, run: Box::new(narrow::int8_tiles) })
        }
        MulAdd::Bf16 if isa.has_bf16() => Ok(Loop {
            instruction: "vdpbf16ps",
            ops: 64 * CHAINS,
            // SAFETY: the processor has the instructions.
            run: Box::new(|n| unsafe { narrow::bf16(n) }),
        }),
        MulAdd::Bf16 => Err("this processor has no vdpbf16ps (AVX512_BF16)".into()),
        MulAdd::Int8 if isa.has_vnni() => Ok(Loop {
            instruction: "vpdpbusd (512 bits)",
            ops: 128 * CHAINS,
            // SAFETY: the processor has the instructions.
            run: Box::new(|n| unsafe { narrow::int8_512(n) }),
        }),
        // A set of its own beside AVX2, which no step of `IsaLevel` names: it counts where there is no limit.
        MulAdd::Int8
            if isa >= Isa::Avx2
                && is_x86_feature_detected!("avxvnni")
                && matches!(super::isa::limit(), Ok(None)) =>
        {
            Ok(Loop {
                instruction: "vpdpbusd (256 bits)",
                ops: 64 * narrow::CHAINS_256,
                // SAFETY: the processor has the instructions.
                run: Box::new(|n| unsafe { narrow::int8_256(n) }),
            })
        }
        MulAdd::Int8 => Err("this processor has no vpdpbusd (AVX512_VNNI or AVX_VNNI)".into()),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn narrow_loop(isa: Isa, kind: MulAdd) -> std::result::Result<Loop, String> {
    match kind {
        MulAdd::F32 => Ok(fma(isa)),
        _ => Err(format!("no loop of {} products is written for {}", kind.name(), std::env::consts::ARCH)),
    }
}

fn pick(isa: Isa, kind: MulAdd) -> Result<Loop> {
    narrow_loop(isa, kind).map_err(|why| {
        Error::unsupported(
            format!("measuring the {} multiply-add rate: {why}", kind.name()),
            "f32 is measured everywhere",
        )
    })
}

/// The instruction that [`multiply_add`] measures.
///
/// # Errors
/// [`Error::Unsupported`] where the processor or `isa` has none.
pub fn instruction(isa: Isa, kind: MulAdd) -> Result<&'static str> {
    pick(isa, kind).map(|l| l.instruction)
}

/// Runs `f(thread)` once on every thread of the team, all at a time. Called from a part of a job, which runs
/// on one thread, the calls follow each other after a pause.
fn together(team: &Team, f: &(dyn Fn(usize) + Sync)) {
    const LONGEST: Duration = Duration::from_millis(100);
    let (threads, here) = (team.threads(), AtomicUsize::new(0));
    team.run_with(threads, &|thread, _| {
        here.fetch_add(1, Ordering::SeqCst);
        let (mut spins, mut since) = (0u32, None);
        while here.load(Ordering::SeqCst) < threads {
            std::hint::spin_loop();
            spins += 1;
            if spins.is_multiple_of(4096) {
                std::thread::yield_now();
                if since.get_or_insert_with(Instant::now).elapsed() > LONGEST {
                    break;
                }
            }
        }
        f(thread)
    });
}

fn seconds(f: impl FnOnce()) -> f64 {
    let t = Instant::now();
    f();
    t.elapsed().as_secs_f64().max(1e-9)
}

/// What each burst of a measurement gives.
fn bursts(mut burst: impl FnMut() -> f64) -> Vec<f64> {
    let (start, mut all) = (Instant::now(), Vec::new());
    while all.len() < BURSTS || start.elapsed() < TIME {
        all.push(burst());
    }
    all
}

fn best(rates: &[f64]) -> f64 {
    rates.iter().copied().fold(0.0, f64::max)
}

/// Multiply-adds of all threads of the team, in operations per second (two per product), one figure for each
/// burst. Takes some 50 ms.
///
/// # Errors
/// [`Error::Unsupported`] where the processor or `isa` lacks the instruction.
pub fn multiply_add(team: &Team, isa: Isa, kind: MulAdd) -> Result<Vec<f64>> {
    const STEPS: usize = 100_000;
    let l = pick(isa, kind)?;
    // The first burst brings threads and clocks up.
    (l.run)(STEPS / 10);
    let work = (l.ops * STEPS * team.threads()) as f64;
    Ok(bursts(|| work / seconds(|| together(team, &|_| (l.run)(STEPS)))))
}

/// The best of [`multiply_add`] in f32, in FLOP/s.
pub fn fma_flops(team: &Team, isa: Isa) -> f64 {
    multiply_add(team, isa, MulAdd::F32).map_or(0.0, |r| best(&r))
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

/// How memory is gone through.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Stream {
    /// One array is read.
    Read,
    /// `c = s a + b` over three arrays, counting two reads and one write.
    Triad,
}

impl Stream {
    /// `read`, `triad`.
    pub fn name(self) -> &'static str {
        match self {
            Stream::Read => "read",
            Stream::Triad => "triad",
        }
    }
}

/// Bandwidth of all threads of the team on a working set of `bytes`, all arrays together (at least 4 KiB for
/// each thread and array), in bytes per second, one figure for each burst.
///
/// # Errors
/// [`Error::OutOfMemory`] where the system has no memory for the arrays.
pub fn bandwidth(team: &Team, isa: Isa, stream: Stream, bytes: usize) -> Result<Vec<f64>> {
    let arrays = match stream {
        Stream::Read => 1,
        Stream::Triad => 3,
    };
    let isa = isa.check();
    let threads = team.threads();
    // Whole pages for each thread and array: nobody shares a line.
    let floats = (bytes / (4 * arrays * threads)).max(1024).next_multiple_of(1024);
    let total = floats * threads * arrays * 4;
    // Memory as the device's own buffers have it: the same alignment, the same pages.
    let memory = HostMemory::new(total).ok_or_else(|| Error::OutOfMemory {
        device: "cpu:0".into(),
        what: "arrays to measure bandwidth on".into(),
        requested: total as u64,
        free: 0,
        total: total as u64,
        next: "Measure on a smaller working set".into(),
    })?;
    let at = SharedMut(memory.start() as *mut f32);
    // Array `k` of a thread.
    let part = move |thread: usize, k: usize| (thread * arrays + k) * floats;
    together(team, &|t| {
        // SAFETY: this thread's arrays, which lie in the memory one after another.
        unsafe { std::slice::from_raw_parts_mut(at.get().add(part(t, 0)), arrays * floats).fill(1.0) }
    });
    let time = |passes: usize| {
        seconds(|| {
            together(team, &|t| {
                let mut sink = [0f32; 16];
                for _ in 0..passes {
                    let p = black_box(at.get());
                    // SAFETY: this thread's arrays, each of `floats` floats; 16 floats in `sink`.
                    unsafe {
                        match stream {
                            Stream::Read => read_floats(isa, p.add(part(t, 0)), floats, sink.as_mut_ptr()),
                            Stream::Triad => triad_floats(
                                isa,
                                p.add(part(t, 0)),
                                p.add(part(t, 1)),
                                p.add(part(t, 2)),
                                floats,
                            ),
                        }
                    }
                }
                black_box(sink);
            })
        })
    };
    // Once to warm up, once to know how long a pass takes.
    time(1);
    let passes = (BURST / time(1)).ceil().clamp(1.0, 1e6) as usize;
    Ok(bursts(|| (total * passes) as f64 / time(passes)))
}

/// The best of [`bandwidth`] reading `bytes` of memory, in bytes per second; 0 where there is no memory. Use
/// several times the last cache.
pub fn read_bandwidth(team: &Team, isa: Isa, bytes: usize) -> f64 {
    bandwidth(team, isa, Stream::Read, bytes).map_or(0.0, |r| best(&r))
}

/// The best of [`bandwidth`] of the triad over three arrays of `bytes` together, in bytes per second; 0 where
/// there is no memory.
pub fn triad_bandwidth(team: &Team, isa: Isa, bytes: usize) -> f64 {
    bandwidth(team, isa, Stream::Triad, bytes).map_or(0.0, |r| best(&r))
}

/// Seconds from the start of a job until every thread of the team has joined it and the caller goes on,
/// `jobs` times, each after `rest`. A rest longer than the workers' patience makes them park.
pub fn hand_off(team: &Team, rest: Duration, jobs: usize) -> Vec<f64> {
    together(team, &|_| {});
    (0..jobs)
        .map(|_| {
            if !rest.is_zero() {
                std::thread::sleep(rest);
            }
            seconds(|| together(team, &|_| {}))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_plausible() {
        let team = Team::new(2);
        for isa in Isa::available() {
            let f = fma_flops(&team, isa);
            // Above all processors' rates; how far below, the machine's other work decides.
            assert!(f > 0.0 && f < 1e13, "{f}");
            for stream in [Stream::Read, Stream::Triad] {
                let b = bandwidth(&team, isa, stream, 1 << 20).expect("a mebibyte is there");
                assert!(b.len() >= BURSTS, "{b:?}");
                assert!(b.iter().all(|b| *b > 0.0 && *b < 1e13), "{b:?}");
            }
            let b = (read_bandwidth(&team, isa, 1 << 22), triad_bandwidth(&team, isa, 1 << 22));
            assert!(b.0 > 0.0 && b.1 > 0.0 && b.0 < 1e13 && b.1 < 1e13, "{b:?}");
        }
    }

    #[test]
    fn narrow_products_are_measured_or_named_as_absent() {
        let team = Team::new(1);
        for isa in Isa::available() {
            for kind in MulAdd::ALL {
                match (instruction(isa, kind), multiply_add(&team, isa, kind)) {
                    (Ok(name), Ok(r)) => {
                        assert!(!name.is_empty() && r.iter().all(|r| *r > 0.0 && *r < 1e14), "{r:?}")
                    }
                    (Err(a), Err(b)) => {
                        assert_ne!(kind, MulAdd::F32);
                        assert!(
                            matches!(a, Error::Unsupported { .. }) && a.to_string() == b.to_string(),
                            "{a}"
                        );
                        assert!(a.to_string().contains(kind.name()), "{a}");
                    }
                    (a, b) => panic!("{a:?} but {b:?}"),
                }
            }
        }
    }

    #[test]
    fn hands_off_with_and_without_rest() {
        let team = Team::new(2);
        let t = hand_off(&team, Duration::ZERO, 50);
        assert!(t.len() == 50 && t.iter().all(|t| *t > 0.0 && t.is_finite()));
        assert_eq!(hand_off(&team, Duration::from_millis(1), 3).len(), 3);
        // From inside a job: slow, but it ends.
        team.run(2, &|_| {
            assert_eq!(hand_off(&team, Duration::ZERO, 1).len(), 1);
        });
    }
}
