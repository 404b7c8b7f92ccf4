//! The composite `chunk_scan`: the convolution and the scan of recurrent layers, by chunks of positions.
//!
//! Only the places of a chunk that a row wants are computed, with those before them that they see. A row
//! reads the matrix of a head in place. With the sum `G` of the logarithms of the factors up to a place,
//! row `i` of a chunk is
//!
//! ```text
//! y_i = exp(G_i) q_i S + Σ_{j ≤ i} exp(G_i - G_j) (q_i · k_j) u_j
//! ```
//!
//! In Mamba 2, `u` is the value times the step. In DeltaNet it is what remains of the value after the part
//! that is already stored for the key is taken away:
//!
//! ```text
//! u_i = strength_i (v_i - exp(G_i) k_i S - Σ_{j < i} exp(G_i - G_j) (k_i · k_j) u_j)
//! ```
//!
//! Results are batch-invariant: the operations for a place and their order depend on that place of its chunk
//! only, not on which other places are computed, nor on the number of chunks or threads. Sums over the
//! elements of a key are in their order, one value per lane; sums over places are in their order.

#[cfg(test)]
mod call_tests;
mod inputs;
mod places;
mod products;
mod scan;
#[cfg(test)]
mod tests;

use super::calls::dense;
use super::simd::Sizes as Vectors;
use super::{CpuKernel, Fault, Run};
use crate::Declined;
use crate::cpu::sys::Isa;
use crate::cpu::team::{AssertSync, SharedConst, SharedMut, Team};
use crate::library_call::CallForm;
use halcyon_ir::composite::Composite;
use halcyon_ir::layout::View;
use halcyon_ir::ops::ChunkScanSizes;
use places::Places;

/// The most positions of a chunk.
const MOST: usize = 64;
/// Channels that a part of the work convolves.
const CHANNELS: usize = 256;
/// Calls with fewer operations than this in a phase run it on the calling thread.
const SERIAL: usize = 100_000;

/// The operands of a call, as [`halcyon_ir::ops::ChunkScan`] describes them. All are dense, except for the
/// rows of the input.
#[derive(Clone, Copy, Debug)]
struct Operands {
    input: SharedConst<f32>,
    /// Distance of two rows of the input, in floats.
    stride: isize,
    ring: SharedConst<f32>,
    matrices: SharedConst<f32>,
    taps: SharedConst<f32>,
    rate: SharedConst<f32>,
    step_bias: SharedConst<f32>,
    sequences: SharedConst<i32>,
    window: SharedConst<i32>,
    valid: SharedConst<f32>,
    full: SharedConst<f32>,
    start: SharedConst<i32>,
    kept: SharedConst<i32>,
    back: SharedConst<i32>,
    /// Null if there is none.
    skip: SharedConst<f32>,
    bias: SharedConst<f32>,
    y: SharedMut<f32>,
}

/// A kernel for the composite `chunk_scan`.
pub(crate) fn call(isa: Isa, call: &CallForm<'_>, c: &Composite) -> Result<CpuKernel, Declined> {
    let because = |what: &str| Err(Declined::because(what.to_string()));
    let Some(s) = c.chunk_scan_sizes(call.inputs, call.outputs) else {
        return because("the operands have other types or shapes");
    };
    if s.chunk > MOST {
        return because("the chunks are too long");
    }
    let places = s.rows.saturating_add(s.slots.saturating_mul(s.scan.ring));
    if [places, s.depth * s.width * s.chunk, s.matrices].iter().any(|n| i32::try_from(*n).is_err()) {
        return because("there are more places than an i32 can number");
    }
    if s.depth * s.width == 0 && (s.rows > 0 || s.kept > 0) {
        return because("there are no chunks");
    }
    if s.width > 0 && (s.slots == 0 || s.matrices == 0) {
        return because("there are no sequences");
    }
    let used = 13 + usize::from(!s.scan.delta) + usize::from(s.scan.bias);
    dense(call, &(1..used).collect::<Vec<_>>())?;
    let rows = &call.inputs[0].view;
    if rows.strides[1] != 1 && rows.shape[1] > 1 {
        return Err(Declined::needs_dense([0]));
    }
    let views: Vec<View> = call.inputs.iter().map(|o| o.view.clone()).collect();
    CpuKernel::new(format!("cpu.{}.{}", c.kind, isa.name()), call, move |r| {
        // SAFETY: the operands have the types, shapes and strides checked above. `CpuKernel::run` has checked
        // that they lie in their buffers, and that the output shares no buffer with an input.
        unsafe { chunk_scan(r.team, r.isa, &s, operands(r, &s, &views), r.fault) }
    })
}

fn operands(r: &Run<'_>, s: &ChunkScanSizes, views: &[View]) -> Operands {
    let floats = |i: usize| SharedConst(r.ptr::<f32>(i, &views[i]));
    let ints = |i: usize| SharedConst(r.ptr::<i32>(i, &views[i]));
    let perhaps = |i: usize, is: bool| if is { floats(i) } else { SharedConst(std::ptr::null()) };
    let skip = !s.scan.delta;
    Operands {
        input: floats(0),
        stride: views[0].strides[0],
        ring: floats(1),
        matrices: floats(2),
        taps: floats(3),
        rate: floats(4),
        step_bias: floats(5),
        sequences: ints(6),
        window: ints(7),
        valid: floats(8),
        full: floats(9),
        start: ints(10),
        kept: ints(11),
        back: ints(12),
        skip: perhaps(13, skip),
        bias: perhaps(13 + usize::from(skip), s.scan.bias),
        y: SharedMut(r.bufs[views.len()].ptr as *mut f32),
    }
}

/// Sizes that follow from those of the call.
#[derive(Clone, Copy, Debug)]
struct Layout {
    channels: usize,
    /// Channels and further inputs.
    size: usize,
    /// First channels of queries, keys and values.
    q: usize,
    k: usize,
    v: usize,
    /// Values of a row, and elements of the matrices of all heads.
    inner: usize,
    all: usize,
    /// Floats of a value in scratch memory, a multiple of the lanes.
    wide: usize,
}

impl Layout {
    fn new(s: &ChunkScanSizes, lanes: usize) -> Layout {
        let c = &s.scan;
        let (keys, inner) = (c.shared * c.key, c.heads * c.value);
        let channels = 2 * keys + inner;
        let (q, k, v) = if c.delta { (0, keys, 2 * keys) } else { (inner + keys, inner, 0) };
        let wide = c.value.next_multiple_of(lanes);
        Layout { channels, size: channels + c.extras(), q, k, v, inner, all: inner * c.key, wide }
    }
}

/// What all parts of a call share.
struct Job<'a> {
    s: &'a ChunkScanSizes,
    l: Layout,
    o: Operands,
    fault: Fault<'a>,
    places: Places,
    /// The convolved channels, `[chunks, chunk, channels]`.
    mixed: SharedMut<f32>,
    /// For each chunk and head, the sums of the logarithms of the factors, and the strengths:
    /// `[chunks, 2, heads, chunk]`.
    steps: SharedMut<f32>,
    /// For each chunk and key head, the products of queries with keys, and in DeltaNet of keys with keys:
    /// `[chunks, shared, 2, chunk, chunk]`.
    pairs: SharedMut<f32>,
    /// An input of zeros.
    zeros: SharedMut<f32>,
}

impl Job<'_> {
    /// The convolved channels of a place, from `channel` on.
    fn mixed(&self, chunk: usize, place: usize, channel: usize) -> *mut f32 {
        self.mixed.get().wrapping_add((chunk * self.s.chunk + place) * self.l.channels + channel)
    }

    /// The sums of logarithms, or the strengths, of the places of a chunk for a head.
    fn steps(&self, chunk: usize, strength: bool, head: usize) -> *mut f32 {
        let heads = self.s.scan.heads;
        let at = ((chunk * 2 + usize::from(strength)) * heads + head) * self.s.chunk;
        self.steps.get().wrapping_add(at)
    }

    /// The products of queries, or of keys, with keys.
    fn pairs(&self, chunk: usize, shared: usize, keys: bool) -> *mut f32 {
        let at = (chunk * self.s.scan.shared + shared) * 2 + usize::from(keys);
        self.pairs.get().wrapping_add(at * self.s.chunk * self.s.chunk)
    }
}

/// Computes the rows and the matrices.
///
/// # Safety
/// The operands have the shapes of `s`, whose numbers of places fit i32, and are readable. `y` is writable
/// and overlaps nothing else. If there are rows or kept matrices, there are chunks; if there are sequences,
/// there are slots and matrices.
unsafe fn chunk_scan(team: &Team, isa: Isa, s: &ChunkScanSizes, o: Operands, fault: Fault<'_>) {
    let chunks = s.depth * s.width;
    if chunks == 0 {
        return;
    }
    let l = Layout::new(s, Vectors::of(isa).lanes);
    // SAFETY: by contract the operands are readable.
    let places = unsafe { Places::new(s, &o, fault) };
    let sizes = [
        chunks * s.chunk * l.channels,
        2 * chunks * s.chunk * s.scan.heads,
        2 * chunks * s.scan.shared * s.chunk * s.chunk,
        l.size,
    ];
    let each = scan::room(s, &l);
    let scratch = team.scratch(sizes.iter().sum());
    let own = team.scratch(each * team.threads());
    let mut at = scratch.ptr();
    let [mixed, steps, pairs, zeros] = sizes.map(|n| {
        let this = SharedMut(at);
        at = at.wrapping_add(n);
        this
    });
    // SAFETY: the scratch memory has room for the zeros at the end.
    unsafe { zeros.get().write_bytes(0, l.size) };
    let own = SharedMut(own.ptr());
    // SAFETY: the pointers are those of the operands, which are only read, of `y`, and of scratch memory.
    // Parts of a phase write different places of these.
    let job = unsafe { AssertSync::new(Job { s, l, o, fault, places, mixed, steps, pairs, zeros }) };
    let (heads, key) = (s.scan.heads, s.scan.key);
    let computed: usize = job.get().places.tops.iter().sum();
    let wanted = job.get().places.wanted();
    let phase = |parts: usize, work: usize, f: &(dyn Fn(usize, usize) + Sync)| match work < SERIAL {
        true => (0..parts).for_each(|p| f(0, p)),
        false => team.run_with(parts, f),
    };
    let blocks = l.channels.div_ceil(CHANNELS) + 1;
    phase(chunks * blocks, computed * l.channels * 4, &|_, p| {
        // SAFETY: the contract of this function covers the operands. Each part has its own channels of its
        // own chunk, or its steps.
        unsafe { inputs::convolve(isa, job.get(), p / blocks, p % blocks) }
    });
    let sums = if s.scan.delta { computed } else { wanted };
    phase(chunks * s.scan.shared, sums * s.scan.shared * key * s.chunk / 4, &|_, p| {
        // SAFETY: the first phase has ended. Each part has its own chunk and key head.
        unsafe { inputs::pair(isa, job.get(), p / s.scan.shared, p % s.scan.shared) }
    });
    let rows = if s.scan.delta { computed + wanted } else { wanted };
    let changed = job.get().places.full.iter().filter(|f| **f).count() * s.chunk;
    phase(s.width * heads, (rows + changed) * l.all, &|worker, p| {
        let own = own.get().wrapping_add(worker * each);
        // SAFETY: the earlier phases have ended. Each part has its own sequence and head, and each thread
        // `each` floats of scratch memory.
        unsafe { scan::scan(isa, job.get(), p / heads, p % heads, own) }
    });
    for &(from, to) in &job.get().places.repeated {
        // SAFETY: all rows that others repeat are computed; row `to` is not among them.
        unsafe {
            let y = o.y.get();
            std::ptr::copy_nonoverlapping(y.add(from * l.inner), y.add(to * l.inner), l.inner);
        }
    }
}
