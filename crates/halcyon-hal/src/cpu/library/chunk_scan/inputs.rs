//! The inputs of the scan: the convolution, the steps, and the products of queries and keys.

use super::places::clamped;
use super::{CHANNELS, Job, MOST};
use crate::cpu::library::simd::{Simd, dispatch_simd};
use crate::cpu::vmath;

dispatch_simd! {
    /// Convolves a block of channels of a chunk; the block after the last one are the steps.
    ///
    /// # Safety
    /// The contract of [`super::chunk_scan`] for the operands of `job`. No other thread uses this part of the
    /// scratch memory.
    pub(super) unsafe fn convolve[][](isa, job: &Job<'_>, chunk: usize, block: usize) = convolve_body
}
dispatch_simd! {
    /// Divides the queries and keys of DeltaNet by their lengths, and multiplies queries and keys of a key
    /// head with keys.
    ///
    /// # Safety
    /// The contract of [`convolve`]; the channels of the chunk are convolved.
    pub(super) unsafe fn pair[][](isa, job: &Job<'_>, chunk: usize, shared: usize) = pair_body
}

/// The row of the inputs at place `at` of the window of a chunk.
///
/// # Safety
/// The contract of [`super::chunk_scan`]; `at` is less than `chunk + kernel - 1`.
unsafe fn input(job: &Job<'_>, chunk: usize, at: usize) -> *const f32 {
    let (s, o) = (job.s, &job.o);
    let rings = s.width * s.scan.ring;
    // SAFETY: the window has an element for each place of a chunk, and there is one number for each sequence.
    // An input is in the ring, a row, or the row of zeros.
    unsafe {
        let i = *o.window.get().add(chunk * (s.chunk + s.kernel - 1) + at);
        let i = clamped(i, rings + s.rows + 1, job.fault);
        if i < rings {
            let slot = clamped(*o.sequences.get().add(i / s.scan.ring), s.slots, job.fault);
            return o.ring.get().add((slot * s.scan.ring + i % s.scan.ring) * job.l.size);
        }
        match i - rings {
            row if row < s.rows => o.input.get().offset(row as isize * o.stride),
            _ => job.zeros.get().cast_const(),
        }
    }
}

/// # Safety
/// The contract of [`convolve`]; the caller is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn convolve_body<S: Simd>(job: &Job<'_>, chunk: usize, block: usize) {
    let (s, l, o) = (job.s, &job.l, &job.o);
    let first = block * CHANNELS;
    if first >= l.channels {
        // SAFETY: the contract of this function.
        return unsafe { steps_body::<S>(job, chunk) };
    }
    let n = (l.channels - first).min(CHANNELS);
    for place in 0..job.places.tops[chunk] {
        // SAFETY: the operands and the scratch memory have these channels.
        unsafe {
            let valid = *o.valid.get().add(chunk * s.chunk + place);
            let y = std::slice::from_raw_parts_mut(job.mixed(chunk, place, first), n);
            for j in 0..s.kernel {
                let x = std::slice::from_raw_parts(input(job, chunk, place + j).add(first), n);
                let tap = std::slice::from_raw_parts(o.taps.get().add(j * l.channels + first), n);
                let terms = y.iter_mut().zip(x.iter().zip(tap));
                if j == 0 {
                    terms.for_each(|(y, (x, t))| *y = x * t);
                } else {
                    terms.for_each(|(y, (x, t))| *y = fma::<S>(*x, *t, *y));
                }
            }
            if !o.bias.get().is_null() {
                let bias = std::slice::from_raw_parts(o.bias.get().add(first), n);
                y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
            y.iter_mut().for_each(|y| *y = silu::<S>(*y) * valid);
        }
    }
}

#[inline(always)]
fn fma<S: Simd>(a: f32, b: f32, c: f32) -> f32 {
    if S::FMA { vmath::fma::<true>(a, b, c) } else { vmath::fma::<false>(a, b, c) }
}

#[inline(always)]
fn silu<S: Simd>(x: f32) -> f32 {
    if S::FMA { vmath::silu::<true>(x) } else { vmath::silu::<false>(x) }
}

#[inline(always)]
fn sigmoid<S: Simd>(x: f32) -> f32 {
    if S::FMA { vmath::sigmoid::<true>(x) } else { vmath::sigmoid::<false>(x) }
}

/// `ln(1 + exp(x))`.
#[inline(always)]
fn softplus<S: Simd>(x: f32) -> f32 {
    let far = -x.abs();
    let log = match S::FMA {
        true => vmath::log1p::<true>(vmath::exp::<true>(far)),
        false => vmath::log1p::<false>(vmath::exp::<false>(far)),
    };
    (if x > 0.0 { x } else { 0.0 }) + log
}

/// The sums of logarithms and the strengths of a chunk.
///
/// # Safety
/// The contract of [`convolve_body`].
#[inline(always)]
unsafe fn steps_body<S: Simd>(job: &Job<'_>, chunk: usize) {
    let (s, o) = (job.s, &job.o);
    let (heads, delta) = (s.scan.heads, s.scan.delta);
    let limit = s.scan.limit.map(|l| (l.0 as f32, l.1 as f32));
    // SAFETY: rates and biases have `heads` elements.
    let (rate, bias) = unsafe {
        (
            std::slice::from_raw_parts(o.rate.get(), heads),
            std::slice::from_raw_parts(o.step_bias.get(), heads),
        )
    };
    for place in 0..job.places.tops[chunk] {
        // SAFETY: an input has the extras after the channels; each head has `chunk` places in the steps.
        unsafe {
            let valid = *o.valid.get().add(chunk * s.chunk + place);
            let extras = input(job, chunk, place + s.kernel - 1).add(job.l.channels);
            let step = std::slice::from_raw_parts(extras.add(if delta { heads } else { 0 }), heads);
            let strength = std::slice::from_raw_parts(extras, heads);
            for first in (0..heads).step_by(MOST) {
                let n = (heads - first).min(MOST);
                let (mut decay, mut factor) = ([0f32; MOST], [0f32; MOST]);
                for i in 0..n {
                    let h = first + i;
                    let step = softplus::<S>(step[h] + bias[h]);
                    let step = valid * limit.map_or(step, |(low, high)| step.max(low).min(high));
                    decay[i] = step * rate[h];
                    factor[i] = if delta { sigmoid::<S>(strength[h]) * valid } else { step };
                }
                for i in 0..n {
                    let sums = job.steps(chunk, false, first + i);
                    let before = if place > 0 { *sums.add(place - 1) } else { 0.0 };
                    *sums.add(place) = before + decay[i];
                    *job.steps(chunk, true, first + i).add(place) = factor[i];
                }
            }
        }
    }
}

/// # Safety
/// The contract of [`pair`]; the caller is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn pair_body<S: Simd>(job: &Job<'_>, chunk: usize, shared: usize) {
    let (s, l) = (job.s, &job.l);
    let (key, delta) = (s.scan.key, s.scan.delta);
    let (q, k) = (l.q + shared * key, l.k + shared * key);
    // SAFETY: queries and keys of a place have `key` channels, which belong to this part.
    unsafe {
        for place in 0..job.places.tops[chunk] {
            let wanted = job.places.row(chunk, place).is_some();
            if delta {
                unit::<S>(job.mixed(chunk, place, k), key, 1.0);
                if wanted {
                    unit::<S>(job.mixed(chunk, place, q), key, 1.0 / (key as f32).sqrt());
                }
            }
            for earlier in 0..=place {
                let (at, other) = (place * s.chunk + earlier, job.mixed(chunk, earlier, k));
                if wanted {
                    *job.pairs(chunk, shared, false).add(at) =
                        dot::<S>(job.mixed(chunk, place, q), other, key);
                }
                if delta && earlier < place {
                    *job.pairs(chunk, shared, true).add(at) =
                        dot::<S>(job.mixed(chunk, place, k), other, key);
                }
            }
        }
    }
}

/// Makes the length of a vector `by`, unless it is almost 0.
///
/// # Safety
/// `x` is valid for `n` floats; the caller is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn unit<S: Simd>(x: *mut f32, n: usize, by: f32) {
    // SAFETY: the contract of this function.
    unsafe {
        let length = (dot::<S>(x, x, n) + 1e-6).sqrt();
        let factor = by / length;
        std::slice::from_raw_parts_mut(x, n).iter_mut().for_each(|x| *x *= factor);
    }
}

/// The product of two vectors: a sum for each lane, and then the sum of the lanes.
///
/// # Safety
/// Both vectors have `n` readable floats; the caller is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn dot<S: Simd>(a: *const f32, b: *const f32, n: usize) -> f32 {
    // SAFETY: the contract of this function.
    unsafe {
        let mut sum = S::zero();
        let mut i = 0;
        while i + S::W <= n {
            sum = S::fma(S::load(a.add(i)), S::load(b.add(i)), sum);
            i += S::W;
        }
        if i < n {
            sum = S::fma(S::load_part(a.add(i), n - i), S::load_part(b.add(i), n - i), sum);
        }
        S::sum(sum)
    }
}
