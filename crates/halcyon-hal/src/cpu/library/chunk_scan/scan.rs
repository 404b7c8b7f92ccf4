//! The scan of one head over the chunks of a sequence.

use super::places::clamped;
use super::products::{Matrix, change, columns, load, store, times};
use super::{Job, Layout, MOST};
use crate::cpu::library::simd::{Simd, dispatch_simd};
use crate::cpu::vmath;
use halcyon_ir::ops::ChunkScanSizes;

/// Floats of scratch memory of a thread: a matrix, and four rows of values for each place.
pub(super) fn room(s: &ChunkScanSizes, l: &Layout) -> usize {
    s.scan.key * s.scan.value + 4 * s.chunk * l.wide
}

dispatch_simd! {
    /// Computes the rows of a head of a sequence, and its kept matrices.
    ///
    /// # Safety
    /// The contract of [`super::chunk_scan`] for the operands of `job`, whose inputs are complete. No other
    /// thread writes results of this sequence and head, or uses the [`room`] floats at `own`.
    pub(super) unsafe fn scan[][](isa, job: &Job<'_>, sequence: usize, head: usize, own: *mut f32) = scan_body
}

/// A head of a chunk.
struct Part<'a> {
    job: &'a Job<'a>,
    chunk: usize,
    head: usize,
    /// The key head.
    shared: usize,
    m: Matrix,
    /// The keys of the places that are computed.
    keys: &'a [*const f32],
    /// The sums of logarithms, and the strengths, of these places.
    sums: &'a [f32],
    strengths: &'a [f32],
    /// Scratch memory for what is added to the matrix at each place, and for two more rows of values for
    /// each.
    added: *mut f32,
    other: [*mut f32; 2],
}

/// # Safety
/// The contract of [`scan`]; the caller is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn scan_body<S: Simd>(job: &Job<'_>, sequence: usize, head: usize, own: *mut f32) {
    let (s, l, o) = (job.s, &job.l, &job.o);
    let shared = match s.scan.tiled {
        true => head % s.scan.shared,
        false => head / (s.scan.heads / s.scan.shared),
    };
    let m = Matrix { key: s.scan.key, value: s.scan.value, wide: l.wide };
    let size = m.key * m.value;
    let rows = |i: usize| own.wrapping_add(size + i * s.chunk * l.wide);
    // SAFETY: there is a number for each sequence, and by contract the operand has the matrices.
    let mut from = unsafe {
        let start = clamped(*o.start.get().add(sequence), s.matrices, job.fault);
        o.matrices.get().add(start * l.all + head * size)
    };
    for chunk in (0..s.depth).map(|d| d * s.width + sequence) {
        let top = job.places.tops[chunk];
        let mut keys = [std::ptr::null(); MOST];
        for (place, key) in keys[..top].iter_mut().enumerate() {
            *key = job.mixed(chunk, place, l.k + shared * m.key).cast_const();
        }
        let mut kept = (0..s.kept).filter(|i| job.places.kept[*i] == chunk);
        let kept_at = |i: usize| o.y.get().wrapping_add(s.rows * l.inner + i * l.all + head * size);
        // SAFETY: the contract of this function; the steps have `top` places of the chunk.
        unsafe {
            let part = Part {
                job,
                chunk,
                head,
                shared,
                m,
                keys: &keys[..top],
                sums: std::slice::from_raw_parts(job.steps(chunk, false, head), top),
                strengths: std::slice::from_raw_parts(job.steps(chunk, true, head), top),
                added: rows(0),
                other: [rows(1), rows(2)],
            };
            part.fill::<S>(from);
            part.rows::<S>(from);
            if job.places.full[chunk] {
                let to = kept.next().map_or(own, kept_at);
                part.change::<S>(from, rows(3), to);
                from = to;
            }
            for i in kept {
                std::ptr::copy_nonoverlapping(from, kept_at(i), size);
            }
        }
    }
}

#[inline(always)]
fn exp<S: Simd>(x: f32) -> f32 {
    if S::FMA { vmath::exp::<true>(x) } else { vmath::exp::<false>(x) }
}

/// `first + Σ_j factors[j] parts[j]` for `N` vectors.
///
/// # Safety
/// There are `N` readable vectors at `parts` for each factor, `wide` floats apart. The caller is compiled for
/// the instruction set of `S`.
#[inline(always)]
unsafe fn plus<S: Simd, const N: usize>(
    mut sum: [S::V; N],
    factors: &[f32],
    parts: *const f32,
    wide: usize,
) -> [S::V; N] {
    // SAFETY: the contract of this function.
    unsafe {
        for (j, factor) in factors.iter().enumerate() {
            let by = S::splat(*factor);
            for (n, sum) in sum.iter_mut().enumerate() {
                *sum = S::fma(by, S::load(parts.add(j * wide + n * S::W)), *sum);
            }
        }
    }
    sum
}

impl Part<'_> {
    /// The factor and the product of place `i` with each of the first `n` places: of its key, or its query.
    ///
    /// # Safety
    /// The contract of [`scan_body`].
    #[inline(always)]
    unsafe fn factors<S: Simd>(&self, keys: bool, i: usize, n: usize) -> [f32; MOST] {
        let mut y = [0f32; MOST];
        // SAFETY: the products of the place are in scratch memory.
        let pairs = unsafe {
            let all = self.job.pairs(self.chunk, self.shared, keys);
            std::slice::from_raw_parts(all.add(i * self.job.s.chunk), n)
        };
        for ((y, pair), sum) in y.iter_mut().zip(pairs).zip(self.sums) {
            let d = self.sums[i] - sum;
            *y = exp::<S>(if d < 0.0 { d } else { 0.0 }) * pair;
        }
        y
    }

    /// The value of a place.
    fn value(&self, place: usize) -> *const f32 {
        self.job.mixed(self.chunk, place, self.job.l.v + self.head * self.m.value).cast_const()
    }

    /// Computes what is added to the matrix at each place.
    ///
    /// # Safety
    /// The contract of [`scan_body`]; `from` is the head's matrix before the chunk.
    #[inline(always)]
    unsafe fn fill<S: Simd>(&self, from: *const f32) {
        let (m, stored) = (self.m, self.other[0]);
        let delta = self.job.s.scan.delta;
        // SAFETY: the contract of the functions of a part; scratch memory has `wide` floats for each place.
        unsafe {
            if delta {
                times::<S>(m, self.keys, from, stored);
            }
            for (i, strength) in self.strengths.iter().enumerate() {
                let (value, to) = (self.value(i), self.added.add(i * m.wide));
                let strength = S::splat(*strength);
                let mut factors = [0f32; MOST];
                if delta {
                    factors = self.factors::<S>(true, i, i);
                    factors[..i].iter_mut().for_each(|f| *f = -*f);
                }
                let away = S::splat(-exp::<S>(self.sums[i]));
                columns!(S, m, |at, NV, last| {
                    let mut sum: [S::V; NV] = std::array::from_fn(|n| {
                        load::<S>(value.add(at + n * S::W), if n + 1 < NV { S::W } else { last })
                    });
                    if delta {
                        for (n, sum) in sum.iter_mut().enumerate() {
                            *sum = S::fma(away, S::load(stored.add(i * m.wide + at + n * S::W)), *sum);
                        }
                        sum = plus::<S, NV>(sum, &factors[..i], self.added.add(at), m.wide);
                    }
                    for (n, sum) in sum.iter().enumerate() {
                        S::store(to.add(at + n * S::W), S::mul(strength, *sum));
                    }
                });
            }
        }
    }

    /// Computes the rows that are wanted.
    ///
    /// # Safety
    /// The contract of [`scan_body`]; `from` is the head's matrix before the chunk.
    #[inline(always)]
    unsafe fn rows<S: Simd>(&self, from: *const f32) {
        let (job, m, read) = (self.job, self.m, self.other[1]);
        let l = &job.l;
        let mut queries = [std::ptr::null(); MOST];
        let mut wanted = [(0usize, 0usize); MOST];
        let mut count = 0;
        for place in 0..self.keys.len() {
            if let Some(row) = job.places.row(self.chunk, place) {
                queries[count] = job.mixed(self.chunk, place, l.q + self.shared * m.key).cast_const();
                wanted[count] = (place, row);
                count += 1;
            }
        }
        // SAFETY: the contract of the functions of a part; a row has `inner` values.
        unsafe {
            times::<S>(m, &queries[..count], from, read);
            let skip = job.o.skip.get();
            let skip = if skip.is_null() { None } else { Some(S::splat(*skip.add(self.head))) };
            for (i, (place, row)) in wanted[..count].iter().enumerate() {
                let (value, read) = (self.value(*place), read.add(i * m.wide));
                let y = job.o.y.get().add(row * l.inner + self.head * m.value);
                let factors = self.factors::<S>(false, *place, place + 1);
                let kept = S::splat(exp::<S>(self.sums[*place]));
                columns!(S, m, |at, NV, last| {
                    let lanes = |n: usize| if n + 1 < NV { S::W } else { last };
                    let sum: [S::V; NV] =
                        std::array::from_fn(|n| S::mul(kept, S::load(read.add(at + n * S::W))));
                    let sum = plus::<S, NV>(sum, &factors[..place + 1], self.added.add(at), m.wide);
                    for (n, sum) in sum.iter().enumerate() {
                        let sum = match skip {
                            Some(by) => S::fma(by, load::<S>(value.add(at + n * S::W), lanes(n)), *sum),
                            None => *sum,
                        };
                        store::<S>(y.add(at + n * S::W), sum, lanes(n));
                    }
                });
            }
        }
    }

    /// Computes the matrix after the chunk, all places of which are computed.
    ///
    /// # Safety
    /// The contract of [`scan_body`]; `from` is the head's matrix before the chunk. `parts` is
    /// scratch memory, and `to` the matrix after the chunk.
    #[inline(always)]
    unsafe fn change<S: Simd>(&self, from: *const f32, parts: *mut f32, to: *mut f32) {
        let m = self.m;
        let last = self.sums.last().copied().unwrap_or(0.0);
        // SAFETY: the contract of the functions of a part; scratch memory has `wide` floats for each place.
        unsafe {
            for (i, sum) in self.sums.iter().enumerate() {
                let d = last - sum;
                let by = S::splat(exp::<S>(if d < 0.0 { d } else { 0.0 }));
                for at in (i * m.wide..(i + 1) * m.wide).step_by(S::W) {
                    S::store(parts.add(at), S::mul(by, S::load(self.added.add(at))));
                }
            }
            change::<S>(m, exp::<S>(last), self.keys, parts, from, to);
        }
    }
}
