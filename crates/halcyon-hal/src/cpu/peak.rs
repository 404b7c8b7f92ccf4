//! Measures the peaks of this machine: multiply-add rates, memory bandwidth, and the time a team takes to
//! start a job. Reported shares of a peak refer to these figures.
//!
//! Each measurement runs a loop in many short bursts and returns one figure per burst, so that the caller can
//! take the best, the median or the spread. The threads of a burst start together. In the bandwidth loops
//! each thread has its own part of the arrays, so no data moves from the cache of one core to that of
//! another.

use super::library::simd::{Simd, Sizes, dispatch_simd};
use super::memory::HostMemory;
use super::sys::Isa;
use super::team::{SharedMut, Team};
use crate::{Error, Result};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Minimum number of bursts and minimum duration of a measurement. A measurement has many bursts, because
/// other work on the machine disturbs some of them, often several in a row.
const BURSTS: usize = 12;
const TIME: Duration = Duration::from_millis(50);
/// Minimum length of a bandwidth burst, in seconds. It is long compared with the start of a job, and short
/// compared with the time slices of a busy system.
const BURST: f64 = 3e-4;
/// Number of independent sums (chains of dependent multiply-adds) in the loops for 32 registers. The number
/// is larger than latency times issue width, and the sums fit in the registers.
const CHAINS: usize = 24;

/// Multiply-adds in registers only. If there were more chains than registers, the loop would measure accesses
/// to the stack.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set; `out` has room for 16 floats.
#[inline(always)]
unsafe fn fma_loop<S: Simd>(steps: usize, out: *mut f32) {
    // SAFETY: `fma_loop` and `fma_chains` have the same contract.
    unsafe {
        match chains(S::MR * S::NV) {
            CHAINS => fma_chains::<S, CHAINS>(steps, out),
            16 => fma_chains::<S, 16>(steps, out),
            _ => fma_chains::<S, 12>(steps, out),
        }
    }
}

/// Number of chains on an instruction set whose register tile holds `sums` vectors.
const fn chains(sums: usize) -> usize {
    match sums {
        CHAINS.. => CHAINS,
        16.. => 16,
        _ => 12,
    }
}

/// `steps` multiply-adds in each of `N` independent chains.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set; `out` has room for 16 floats.
#[inline(always)]
unsafe fn fma_chains<S: Simd, const N: usize>(steps: usize, out: *mut f32) {
    // SAFETY: the contract gives the instruction set and 16 floats at `out`, which is at least `S::W`.
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
    /// # Safety
    /// `out` has room for 16 floats.
    unsafe fn fma_steps[][](isa, steps: usize, out: *mut f32) = fma_loop
}

/// Low-precision products, summed in 32 bits.
#[cfg(target_arch = "x86_64")]
mod narrow {
    use super::CHAINS;
    use crate::cpu::amx::{TileConfig, Tiles, tile};
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// # Safety
    /// The processor has AVX-512F and AVX512_BF16.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn bf16(steps: usize) {
        // 2^-7 in bf16, so that the sums grow slowly and nothing is denormal.
        let v = black_box(_mm512_set1_epi16(0x3c00));
        // SAFETY: both types have 512 bits, and every bit pattern is valid.
        let x = unsafe { std::mem::transmute::<__m512i, __m512bh>(v) };
        let mut acc = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..steps {
            for a in &mut acc {
                *a = _mm512_dpbf16_ps(*a, x, x);
            }
        }
        black_box(acc);
    }

    /// # Safety
    /// The processor has AVX-512F and AVX512_VNNI.
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

    /// Multiply-adds on four tiles of sums, like those of matrix products. The registers hold zeros, which
    /// are as fast as other numbers.
    pub(super) fn bf16_tiles(steps: usize) {
        let _tiles = Tiles::new(&TileConfig::FULL);
        for _ in 0..steps {
            // SAFETY: the guard lives, all registers have the same full size, and `narrow_loop` picks this
            // loop only if AMX-BF16 is available.
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
            // SAFETY: the guard lives, all registers have the same full size, and `narrow_loop` picks this
            // loop only if AMX-INT8 is available.
            unsafe {
                tile::u8_i8::<0, 4, 6>();
                tile::u8_i8::<1, 4, 7>();
                tile::u8_i8::<2, 5, 6>();
                tile::u8_i8::<3, 5, 7>();
            }
        }
    }

    /// 12 of the 16 registers hold sums.
    pub(super) const CHAINS_256: usize = 12;

    /// # Safety
    /// The processor has AVX2 and AVX-VNNI.
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

/// Arithmetic whose rate is measured.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum MulAdd {
    /// f32 products, added to f32.
    F32,
    /// Pairs of bf16 products, added to f32. Measured with `tdpbf16ps` if this process may use tile
    /// registers, otherwise with `vdpbf16ps`.
    Bf16,
    /// Four products of u8 and i8, added to i32. Measured with `tdpbusd` if this process may use tile
    /// registers, otherwise with `vpdpbusd`.
    Int8,
}

impl MulAdd {
    pub const ALL: [MulAdd; 3] = [MulAdd::F32, MulAdd::Bf16, MulAdd::Int8];

    /// The name: `f32`, `bf16` or `int8`.
    pub fn name(self) -> &'static str {
        match self {
            MulAdd::F32 => "f32",
            MulAdd::Bf16 => "bf16",
            MulAdd::Int8 => "int8",
        }
    }
}

/// A measurement loop that runs on this machine.
struct Loop {
    /// The measured instruction.
    instruction: &'static str,
    /// Operations per step.
    ops: usize,
    run: Box<dyn Fn(usize) + Sync>,
}

fn fma(isa: Isa) -> Loop {
    let isa = isa.check();
    let Sizes { lanes, attention: (rows, columns), .. } = Sizes::of(isa);
    let run = move |steps| {
        let mut out = [0f32; 16];
        // SAFETY: `out` has 16 floats, and `check` accepted the instruction set.
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
            // Four tiles of 16 x 16 sums, and 32 products for each sum.
            ops: 4 * 16 * 16 * 32 * 2,
            run: Box::new(narrow::bf16_tiles),
        }),
        MulAdd::Int8 if isa.has_int8_tiles() => {
            Ok(Loop { instruction: "tdpbusd", ops: 4 * 16 * 16 * 64 * 2, run: Box::new(narrow::int8_tiles) })
        }
        MulAdd::Bf16 if isa.has_bf16() => Ok(Loop {
            instruction: "vdpbf16ps",
            ops: 64 * CHAINS,
            // SAFETY: `has_bf16` found AVX-512 and AVX512_BF16.
            run: Box::new(|n| unsafe { narrow::bf16(n) }),
        }),
        MulAdd::Bf16 => Err("this processor has no vdpbf16ps (AVX512_BF16)".into()),
        MulAdd::Int8 if isa.has_vnni() => Ok(Loop {
            instruction: "vpdpbusd (512 bits)",
            ops: 128 * CHAINS,
            // SAFETY: `has_vnni` found AVX-512 and AVX512_VNNI.
            run: Box::new(|n| unsafe { narrow::int8_512(n) }),
        }),
        // AVX-VNNI extends AVX2, but no `IsaLevel` names it, so it is used only if the instruction set is not
        // limited.
        MulAdd::Int8
            if isa >= Isa::Avx2
                && is_x86_feature_detected!("avxvnni")
                && matches!(super::isa::limit(), Ok(None)) =>
        {
            Ok(Loop {
                instruction: "vpdpbusd (256 bits)",
                ops: 64 * narrow::CHAINS_256,
                // SAFETY: AVX2 and AVX-VNNI were detected.
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
        _ => Err(format!("{} products cannot be measured on {}", kind.name(), std::env::consts::ARCH)),
    }
}

fn pick(isa: Isa, kind: MulAdd) -> Result<Loop> {
    narrow_loop(isa, kind).map_err(|why| {
        Error::unsupported(
            format!("measuring the {} multiply-add rate: {why}", kind.name()),
            "The rate of f32 is measured on every machine",
        )
    })
}

/// The name of the instruction that [`multiply_add`] measures.
///
/// # Errors
/// [`Error::Unsupported`] if the processor or `isa` has no such instruction.
pub fn instruction(isa: Isa, kind: MulAdd) -> Result<&'static str> {
    pick(isa, kind).map(|l| l.instruction)
}

/// Runs `f(thread)` once on every thread of the team. All threads start together. If this is called inside a
/// part of a job, only one thread is available. Then the calls run one after another, with a pause of up to
/// `LONGEST` before each.
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

/// Runs at least `BURSTS` bursts, for at least `TIME`, and returns the result of each.
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

/// Multiply-add rate of all threads of the team, in operations per second (two per product), one figure per
/// burst. Takes about 50 ms.
///
/// # Errors
/// [`Error::Unsupported`] if the processor or `isa` lacks the instruction.
pub fn multiply_add(team: &Team, isa: Isa, kind: MulAdd) -> Result<Vec<f64>> {
    const STEPS: usize = 100_000;
    let l = pick(isa, kind)?;
    // The first run wakes the threads and raises the clock.
    (l.run)(STEPS / 10);
    let work = (l.ops * STEPS * team.threads()) as f64;
    Ok(bursts(|| work / seconds(|| together(team, &|_| (l.run)(STEPS)))))
}

/// The best of [`multiply_add`] in f32, in FLOP/s.
pub fn fma_flops(team: &Team, isa: Isa) -> f64 {
    multiply_add(team, isa, MulAdd::F32).map_or(0.0, |r| best(&r))
}

/// Sums `n` floats with eight vector accumulators; a remainder of less than eight vectors is left out.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set; `p` has `n` readable floats, `out` room for 16.
#[inline(always)]
unsafe fn read_loop<S: Simd>(p: *const f32, n: usize, out: *mut f32) {
    // SAFETY: every load lies below `n` (`i + step <= n`), and `out` has room for 16 floats, at least `S::W`.
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
    /// # Safety
    /// `p` has `n` readable floats; `out` has room for 16.
    unsafe fn read_floats[][](isa, p: *const f32, n: usize, out: *mut f32) = read_loop
}

/// `out = s * a + b` (the triad of McCalpin's STREAM). A remainder of less than a vector is left out.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set; all three pointers are valid for `n` floats.
#[inline(always)]
unsafe fn triad_loop<S: Simd>(a: *const f32, b: *const f32, out: *mut f32, n: usize) {
    // SAFETY: every vector lies below `n` (`i + S::W <= n`), and the pointers are valid for `n` floats.
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
    /// # Safety
    /// All three pointers are valid for `n` floats.
    unsafe fn triad_floats[][](isa, a: *const f32, b: *const f32, out: *mut f32, n: usize) = triad_loop
}

/// Access pattern of a bandwidth measurement.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Stream {
    /// Reads one array.
    Read,
    /// `c = s a + b` over three arrays; counts two reads and one write.
    Triad,
}

impl Stream {
    /// The name: `read` or `triad`.
    pub fn name(self) -> &'static str {
        match self {
            Stream::Read => "read",
            Stream::Triad => "triad",
        }
    }
}

/// Bandwidth of all threads of the team in bytes per second, one figure per burst. `bytes` is the working set
/// of all arrays together (raised to a multiple of 4 KiB per thread and array).
///
/// # Errors
/// [`Error::OutOfMemory`] if the arrays cannot be allocated.
pub fn bandwidth(team: &Team, isa: Isa, stream: Stream, bytes: usize) -> Result<Vec<f64>> {
    let arrays = match stream {
        Stream::Read => 1,
        Stream::Triad => 3,
    };
    let isa = isa.check();
    let threads = team.threads();
    // Whole pages per thread and array, so that threads share no cache line.
    let floats = (bytes / (4 * arrays * threads)).max(1024).next_multiple_of(1024);
    let total = floats * threads * arrays * 4;
    // Allocated like the device's own buffers, with the same alignment and pages.
    let memory = HostMemory::new(total).ok_or_else(|| Error::OutOfMemory {
        device: "cpu:0".into(),
        what: "arrays to measure bandwidth on".into(),
        requested: total as u64,
        free: 0,
        total: total as u64,
        next: "Measure on a smaller working set".into(),
    })?;
    let at = SharedMut(memory.start() as *mut f32);
    // Start of array `k` of a thread, in floats.
    let part = move |thread: usize, k: usize| (thread * arrays + k) * floats;
    together(team, &|t| {
        // SAFETY: `memory` holds `threads * arrays * floats` floats, and each thread uses its own arrays
        // only.
        unsafe { std::slice::from_raw_parts_mut(at.get().add(part(t, 0)), arrays * floats).fill(1.0) }
    });
    let time = |passes: usize| {
        seconds(|| {
            together(team, &|t| {
                let mut sink = [0f32; 16];
                for _ in 0..passes {
                    let p = black_box(at.get());
                    // SAFETY: each of this thread's arrays holds `floats` floats inside `memory`; `sink` has
                    // 16.
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
    // The first call warms up. The second measures how long one pass takes.
    time(1);
    let passes = (BURST / time(1)).ceil().clamp(1.0, 1e6) as usize;
    Ok(bursts(|| (total * passes) as f64 / time(passes)))
}

/// The best of [`bandwidth`] when reading `bytes` bytes, in bytes per second; 0 if allocation fails. Use
/// several times the size of the last-level cache.
pub fn read_bandwidth(team: &Team, isa: Isa, bytes: usize) -> f64 {
    bandwidth(team, isa, Stream::Read, bytes).map_or(0.0, |r| best(&r))
}

/// The best of [`bandwidth`] of the triad over three arrays of `bytes` bytes together, in bytes per second; 0
/// if allocation fails.
pub fn triad_bandwidth(team: &Team, isa: Isa, bytes: usize) -> f64 {
    bandwidth(team, isa, Stream::Triad, bytes).map_or(0.0, |r| best(&r))
}

/// For each of `jobs` empty jobs, the time in seconds from its start until every thread has joined it and the
/// caller continues. The caller sleeps for `rest` before each job. If `rest` is longer than the time for
/// which idle workers spin, the workers sleep too.
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
            // The upper bound exceeds every processor's rate. There is no lower bound, because other work may
            // slow the test.
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
        // Inside a job, `hand_off` is slow, but it ends.
        team.run(2, &|_| {
            assert_eq!(hand_off(&team, Duration::ZERO, 1).len(), 1);
        });
    }
}
