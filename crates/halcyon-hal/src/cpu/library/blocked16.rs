//! Convolution of bf16 images in blocks of 32 channels, `[N, C / 32, H, W, 32]`, with sums in f32.
//!
//! A pixel's block is 64 bytes, one row of a tile register: sixteen pixels by thirty-two channels are the
//! left operand of a product of tiles, and weights packed as `[O / 32, C / 32 / groups, KH, KW, 2, 16, 16,
//! 2]` (halves of the output's block, pairs of input channels, output channels, the pair) the right ones.
//! Sums run over blocks of input channels and taps without leaving the registers (`blocked16_tile.rs`); then
//! scale, bias, residual and activation are applied in f32, and the result is rounded once.
//!
//! Pixels of a tile need to lie at one distance from each other. Where nothing is padded and nothing skipped,
//! the image is read in place, all of its rows as one: with a kernel wider than a pixel some sums in between
//! belong to no output and are dropped. Else the part of the image that a job reads is copied, with zeros
//! around it; of an image that is read with strides, each residue of rows and columns becomes an image of its
//! own, so that every tap reads neighbours. An input whose channels do not fill a block (`[N, C, H, W]`: the
//! first layer's) is copied pixel by pixel; a step is then a piece of a row of taps.
//!
//! `tdpbf16ps` takes denormals for zero and rounds to nearest even; where there are no tiles the same sums
//! run on vectors.

use super::blocked_tile::Act;
use super::blocked16_tile::{Finish16, HALF, PIXELS, Place, Steps, Sums, finish, on_vectors};
use super::conv::Conv;
use super::window::Window;
use crate::cpu::amx;
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut, Team};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Channels of a block.
pub const BLOCK: usize = super::blocked16_tile::BLOCK;

/// Bytes of input that the rows of one part should not pass, so that they stay in the second level's cache.
const PART_BYTES: usize = 512 << 10;
/// Bytes of weights that one part should not pass, where parts are groups of channels.
const PART_WEIGHTS: usize = 512 << 10;
/// Parts for each thread, so that one that is held up does not hold up all.
pub(crate) const PARTS: usize = 4;
/// Channels of an input that may come one by one: each pixel's are brought together.
const FEW: usize = 16;
/// Bytes of a value.
const B16: usize = 2;
/// Bytes of a pixel's block.
const PIXEL: usize = BLOCK * B16;

/// Whether this processor has what the kernels need beside this set: tile registers for bf16, and
/// instructions that narrow to it.
pub fn available(isa: Isa) -> bool {
    isa.has_bf16() && amx::available().bf16
}

/// What happens to the sums: `act(sum * scale + bias + residual)`. Scale and bias have one value for each
/// output channel, the residual lies as the output does; null where absent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct After {
    pub scale: SharedConst<f32>,
    pub bias: SharedConst<f32>,
    pub residual: SharedConst<u8>,
    /// The residual is f32, and the output; else they are bf16.
    pub residual_wide: bool,
    pub wide: bool,
    pub act: Act,
}

impl Default for After {
    fn default() -> After {
        let none = SharedConst(std::ptr::null());
        After {
            scale: none,
            bias: none,
            residual: SharedConst(std::ptr::null()),
            residual_wide: false,
            wide: false,
            act: Act::None,
        }
    }
}

/// How the work is cut.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// Into rectangles of so many rows and columns of the output, for all channels.
    Rows { rows: usize, cols: usize },
    /// Into groups of so many blocks of output channels, for all pixels.
    Channels { blocks: usize },
}

/// A rectangle of the output.
#[derive(Clone, Copy)]
struct Rect {
    rows: (usize, usize),
    cols: (usize, usize),
}

/// How the input lies when tiles read it. Sizes are those of the largest part.
#[derive(Clone, Debug, Default)]
struct Stage {
    copied: bool,
    /// Residues of rows and columns, modulo the strides, that taps read.
    down: Vec<usize>,
    across: Vec<usize>,
    /// Rows and columns of one residue's image.
    height: usize,
    width: usize,
    /// Bytes of a pixel, of a block of channels, and of an image.
    pixel: usize,
    plane: usize,
    image: usize,
}

/// A convolution whose output channels, and input channels if `inner > 1`, come in blocks of 32.
#[derive(Clone, Debug)]
pub struct Blocked16 {
    conv: Conv,
    /// Channels of a block of the input: 32, or 1.
    inner: usize,
    threads: usize,
    /// On tile registers; else on vectors.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    tiles: bool,
    cut: Cut,
    stage: Stage,
    /// For each step, from a pixel's place to what it reads.
    offsets: Vec<isize>,
    /// Pairs of input values of a step, and pieces of a row of taps.
    pairs: usize,
    pieces: usize,
}

/// A part of the work: images, a rectangle of them, blocks of output channels.
#[derive(Clone, Copy)]
struct Part {
    images: (usize, usize),
    rect: Rect,
    blocks: (usize, usize),
    /// The weights are read here alone, and come from far away; afterwards, most likely, those of this block.
    far: bool,
    next: Option<usize>,
}

impl Blocked16 {
    /// `None` where the channels do not come in whole blocks (of an input that is not in blocks: are more
    /// than a few), or the geometry is not this kernel's: three spatial axes, spread inputs, dilated columns
    /// of an input that is not in blocks. `threads` is the team's number; `tiles` says whether to use tile
    /// registers, which [`amx::available`] must have.
    pub fn new(conv: Conv, inner: usize, threads: usize, tiles: bool) -> Option<Blocked16> {
        let w = &conv.window;
        let whole = |c: usize| (c / conv.groups).is_multiple_of(BLOCK);
        let channels = match inner {
            BLOCK => whole(conv.c_in) && whole(conv.c_out),
            1 => conv.groups == 1 && conv.c_in <= FEW && whole(conv.c_out) && w.dilation[2] == 1,
            _ => false,
        };
        let flat = w.input[0] == 1 && w.kernel[0] == 1 && w.output[0] == 1 && w.pad_lo[0] == 0;
        let some = conv.output_len() > 0 && conv.input_len() > 0 && w.kernel_size() > 0;
        if !channels || !flat || !some || w.input_dilation != [1; 3] {
            return None;
        }
        let mut conv = conv;
        if w.is_pointwise() {
            // One long row: tiles need not end where the image's rows do.
            let (i, o) = (w.in_size(), w.out_size());
            conv.window = Window { input: [1, 1, i], output: [1, 1, o], ..*w };
        }
        let (mut pairs, mut pieces) = (BLOCK / 2, 1);
        if inner == 1 {
            // A row of taps in equal pieces of at most sixteen pairs.
            let row = (conv.window.kernel[2] * conv.c_in.next_multiple_of(2)) / 2;
            pieces = (row.div_ceil(BLOCK / 2)..=row).find(|n| row.is_multiple_of(*n))?;
            pairs = row / pieces;
        }
        let mut b = Blocked16 {
            conv,
            inner,
            threads: threads.max(1),
            tiles,
            cut: Cut::Channels { blocks: 1 },
            stage: Stage::default(),
            offsets: vec![],
            pairs,
            pieces,
        };
        b.cut = b.best_cut();
        b.stage = b.lay_out();
        b.offsets = b.steps();
        Some(b)
    }

    /// Steps of a sum.
    fn depth(&self) -> usize {
        let w = &self.conv.window;
        match self.inner {
            1 => w.kernel[1] * self.pieces,
            _ => self.conv.c_in / self.conv.groups / BLOCK * w.kernel_size(),
        }
    }

    /// Bytes of the weights of one block of outputs.
    fn block_weights(&self) -> usize {
        self.depth() * 2 * HALF
    }

    fn out_blocks(&self) -> usize {
        self.conv.c_out / BLOCK
    }

    /// Bytes of the weights as the kernel reads them.
    pub fn weights(&self) -> usize {
        self.out_blocks() * self.block_weights()
    }

    /// Bytes of a pixel of the staged input.
    fn pixel(&self) -> usize {
        if self.inner == 1 { B16 * self.conv.c_in.next_multiple_of(2) } else { PIXEL }
    }

    /// Packs `[O, C / groups, KH, KW]` of bf16.
    ///
    /// # Safety
    /// All weights are readable at `w`; [`Blocked16::weights`] bytes are writable at `to`, at a multiple of
    /// 2, and overlap nothing else.
    pub unsafe fn pack(&self, team: &Team, w: *const u16, to: *mut u16) {
        let c = &self.conv;
        let (taps, kw, channels) = (c.window.kernel_size(), c.window.kernel[2], c.c_in / c.groups);
        let even = c.c_in.next_multiple_of(2);
        let (w, to) = (SharedConst(w), SharedMut(to));
        team.run(self.out_blocks(), &|ob| {
            let to = to.get().wrapping_add(ob * self.block_weights() / B16);
            for step in 0..self.depth() {
                for k in 0..BLOCK {
                    // The channel and tap of this value, if there is one.
                    let from = match self.inner {
                        1 => {
                            let (row, v) = (step / self.pieces, step % self.pieces * 2 * self.pairs + k);
                            let (tap, channel) = (v / even, v % even);
                            (k < 2 * self.pairs && channel < channels).then_some((channel, row * kw + tap))
                        }
                        _ => Some((step / taps * BLOCK + k, step % taps)),
                    };
                    for o in 0..BLOCK {
                        let at = ((2 * step + o / 16) * HALF) / B16 + k / 2 * 32 + 2 * (o % 16) + k % 2;
                        // SAFETY: the caller's; parts write disjoint blocks.
                        unsafe {
                            *to.add(at) = match from {
                                Some((channel, tap)) => {
                                    *w.get().add(((ob * BLOCK + o) * channels + channel) * taps + tap)
                                }
                                None => 0,
                            };
                        }
                    }
                }
            }
        });
    }

    /// Input rows and columns that so many of the output read.
    fn span(&self, axis: usize, n: usize) -> usize {
        let w = &self.conv.window;
        (n - 1) * w.stride[axis] + (w.kernel[axis] - 1) * w.dilation[axis] + 1
    }

    fn best_cut(&self) -> Cut {
        let (c, threads) = (&self.conv, self.threads);
        let out = c.window.output;
        let weights = self.weights();
        let image = B16 * c.c_in * c.window.in_size();
        let blocks = self.out_blocks();
        if threads > 1 && blocks >= 2 * threads && weights > c.batch * image {
            // Weights are read once, by one thread; those of a part stay in the cache while the images pass.
            let most = (PART_WEIGHTS / self.block_weights()).clamp(1, blocks.div_ceil(PARTS * threads));
            let parts = blocks.div_ceil(most).next_multiple_of(threads).min(blocks);
            return Cut::Channels { blocks: blocks.div_ceil(parts) };
        }
        let want = if threads == 1 { 1 } else { (PARTS * threads).div_ceil(c.batch).max(1) };
        let bytes = |rows: usize, cols: usize| self.span(1, rows) * self.span(2, cols) * B16 * c.c_in;
        let (mut rows, mut cols) = (out[1], out[2]);
        if out[1] == 1 && self.row_is_cut() {
            cols = out[2].div_ceil(want).next_multiple_of(PIXELS).min(out[2]);
            while cols > 2 * PIXELS && bytes(1, cols) > PART_BYTES {
                cols = (cols / 2).next_multiple_of(PIXELS);
            }
        } else {
            rows = out[1].div_ceil(want);
            while rows > 1 && bytes(rows, cols) > PART_BYTES {
                rows = rows.div_ceil(2);
            }
        }
        Cut::Rows { rows, cols }
    }

    /// Whether a part may be some columns of a row: the input is read where it lies.
    fn row_is_cut(&self) -> bool {
        self.inner == BLOCK && self.in_place()
    }

    fn in_place(&self) -> bool {
        let w = &self.conv.window;
        // Nothing lies outside, and taps read neighbours.
        let inside = |axis: usize| {
            w.pad_lo[axis] <= 0 && w.at(axis, w.output[axis] - 1, w.kernel[axis] - 1) < w.input[axis] as isize
        };
        self.inner == BLOCK && w.stride == [1; 3] && inside(1) && inside(2)
    }

    fn lay_out(&self) -> Stage {
        let c = &self.conv;
        let w = &c.window;
        let (rows, cols) = match self.cut {
            Cut::Rows { rows, cols } => (rows, cols),
            Cut::Channels { .. } => (w.output[1], w.output[2]),
        };
        let pixel = self.pixel();
        if self.inner == 1 {
            let (height, width) = (self.span(1, rows), self.span(2, cols));
            let plane = (height * width * pixel).next_multiple_of(64);
            return Stage { copied: true, height, width, pixel, plane, image: plane, ..Stage::default() };
        }
        if self.in_place() {
            let plane = w.in_size() * PIXEL;
            let (height, width) = (w.input[1], w.input[2]);
            let image = plane * (c.c_in / BLOCK);
            return Stage { copied: false, height, width, pixel, plane, image, ..Stage::default() };
        }
        let residues = |axis: usize| {
            let mut v: Vec<usize> =
                (0..w.kernel[axis]).map(|t| t * w.dilation[axis] % w.stride[axis]).collect();
            v.sort_unstable();
            v.dedup();
            v
        };
        let last = |axis: usize| (w.kernel[axis] - 1) * w.dilation[axis] / w.stride[axis];
        let (down, across) = (residues(1), residues(2));
        let (height, width) = (rows + last(1), cols + last(2));
        let plane = down.len() * across.len() * height * width * PIXEL;
        Stage { copied: true, down, across, height, width, pixel, plane, image: plane * (c.c_in / BLOCK) }
    }

    /// The offsets of the steps, in the order of the packed weights.
    fn steps(&self) -> Vec<isize> {
        let (w, s) = (&self.conv.window, &self.stage);
        let mut v = Vec::with_capacity(self.depth());
        if self.inner == 1 {
            for i in 0..w.kernel[1] {
                let row = i * w.dilation[1] * s.width * s.pixel;
                v.extend((0..self.pieces).map(|p| (row + p * 4 * self.pairs) as isize));
            }
            return v;
        }
        for block in 0..self.conv.c_in / self.conv.groups / BLOCK {
            for i in 0..w.kernel[1] {
                for j in 0..w.kernel[2] {
                    let (y, x) = (i * w.dilation[1], j * w.dilation[2]);
                    let pixel = if s.copied {
                        let place = |list: &[usize], r: usize| list.iter().position(|v| *v == r).unwrap_or(0);
                        let (p, q) = (place(&s.down, y % w.stride[1]), place(&s.across, x % w.stride[2]));
                        let image = p * s.across.len() + q;
                        (image * s.height + y / w.stride[1]) * s.width + x / w.stride[2]
                    } else {
                        y * s.width + x
                    };
                    v.push((block * s.plane + pixel * PIXEL) as isize);
                }
            }
        }
        v
    }

    /// Bytes of workspace that a run needs.
    pub fn workspace(&self) -> usize {
        match (self.stage.copied, self.cut) {
            (false, _) => 0,
            (true, Cut::Rows { .. }) => self.stage.image * self.threads,
            (true, Cut::Channels { .. }) => self.stage.image * self.conv.batch,
        }
    }

    /// Copies what a rectangle reads of some blocks of channels (`planes`) of the image at `x`.
    ///
    /// # Safety
    /// The image is readable; [`Stage::plane`] bytes for each block are writable at `to` and overlap nothing.
    unsafe fn copy(&self, r: Rect, planes: (usize, usize), x: *const u8, to: *mut u8) {
        let (w, s) = (&self.conv.window, &self.stage);
        let [_, high, wide] = w.input;
        let (n_rows, n_cols) = (r.rows.1 - r.rows.0, r.cols.1 - r.cols.0);
        if self.inner == 1 {
            let (rows, cols) = (self.span(1, n_rows), self.span(2, n_cols));
            let (i0, j0) = (w.at(1, r.rows.0, 0), w.at(2, r.cols.0, 0));
            let even = s.pixel / B16;
            // The columns that lie inside of the image.
            let lead = ((-j0).max(0) as usize).min(cols);
            let inside = (wide as isize - j0.max(0)).clamp(0, (cols - lead) as isize) as usize;
            for i in 0..rows {
                let row = i0 + i as isize;
                // SAFETY: the caller's.
                unsafe {
                    let to = to.add(i * s.width * s.pixel) as *mut u16;
                    if row < 0 || row >= high as isize || inside == 0 {
                        std::ptr::write_bytes(to, 0, s.width * even);
                        continue;
                    }
                    std::ptr::write_bytes(to, 0, lead * even);
                    std::ptr::write_bytes(
                        to.add((lead + inside) * even),
                        0,
                        (s.width - lead - inside) * even,
                    );
                    let from = (x as *const u16).add(row as usize * wide + j0.max(0) as usize);
                    interleave(self.conv.c_in, high * wide, even, inside, from, to.add(lead * even));
                }
            }
            return;
        }
        for plane in planes.0..planes.1 {
            let x = x.wrapping_add(plane * high * wide * PIXEL);
            let to = to.wrapping_add(plane * s.plane);
            for (p, down) in s.down.iter().enumerate() {
                for (q, across) in s.across.iter().enumerate() {
                    let to = to.wrapping_add((p * s.across.len() + q) * s.height * s.width * PIXEL);
                    let first = w.at(2, r.cols.0, 0) + *across as isize;
                    let step = w.stride[2];
                    // Columns before the image's first, and up to its last.
                    let lead = ((-first).max(0) as usize).div_ceil(step).min(s.width);
                    let from = first + (lead * step) as isize;
                    let inside = (wide as isize - from).max(0) as usize;
                    let inside = inside.div_ceil(step).min(s.width - lead);
                    for i in 0..n_rows + s.height - self.part_rows() {
                        let row = w.at(1, r.rows.0, 0) + (down + i * w.stride[1]) as isize;
                        // SAFETY: the caller's; what is copied lies inside of the image.
                        unsafe {
                            let to = to.add(i * s.width * PIXEL);
                            if row < 0 || row >= high as isize || inside == 0 {
                                std::ptr::write_bytes(to, 0, s.width * PIXEL);
                                continue;
                            }
                            std::ptr::write_bytes(to, 0, lead * PIXEL);
                            let x = x.add((row as usize * wide + from as usize) * PIXEL);
                            let to = to.add(lead * PIXEL);
                            if step == 1 {
                                std::ptr::copy_nonoverlapping(x, to, inside * PIXEL);
                            } else {
                                for k in 0..inside {
                                    std::ptr::copy_nonoverlapping(
                                        x.add(k * step * PIXEL),
                                        to.add(k * PIXEL),
                                        PIXEL,
                                    );
                                }
                            }
                            let rest = s.width - lead - inside;
                            std::ptr::write_bytes(to.add(inside * PIXEL), 0, rest * PIXEL);
                        }
                    }
                }
            }
        }
    }

    /// Rows of the output of the largest part.
    fn part_rows(&self) -> usize {
        match self.cut {
            Cut::Rows { rows, .. } => rows,
            Cut::Channels { .. } => self.conv.window.output[1],
        }
    }

    /// The convolution.
    ///
    /// # Safety
    /// `x` covers the input, `w` what [`Blocked16::pack`] wrote, `y` the output, which overlaps nothing else;
    /// `work` covers [`Blocked16::workspace`] bytes; the pointers of `after` cover what it says.
    ///
    /// # Panics
    /// When the team has another number of threads than this was made for.
    pub(crate) unsafe fn run(
        &self,
        team: &Team,
        isa: Isa,
        x: *const u16,
        w: *const u16,
        y: *mut u8,
        after: After,
        work: *mut u8,
    ) {
        assert_eq!(team.threads(), self.threads, "the kernel was made for another team");
        let (c, s) = (&self.conv, &self.stage);
        let job = Job {
            b: self,
            isa,
            bf16: isa.has_bf16(),
            w: SharedConst(w as *const u8),
            y: SharedMut(y),
            after,
        };
        let image = B16 * c.c_in * c.window.in_size();
        let (xs, work) = (SharedConst(x as *const u8), SharedMut(work));
        let whole = Rect { rows: (0, c.window.output[1]), cols: (0, c.window.output[2]) };
        let planes = if self.inner == 1 { 1 } else { c.c_in / BLOCK };
        match self.cut {
            Cut::Channels { blocks } => {
                if s.copied {
                    team.ranges(c.batch * planes, (32768 / s.plane).max(1), &|a, b| {
                        for k in a..b {
                            let (n, p) = (k / planes, k % planes);
                            let from = xs.get().wrapping_add(n * image);
                            // SAFETY: the caller's; planes are disjoint.
                            unsafe { self.copy(whole, (p, p + 1), from, work.get().add(n * s.image)) };
                        }
                    });
                }
                let from = if s.copied { SharedConst(work.get() as *const u8) } else { xs };
                let all = self.out_blocks();
                by_place(team, all.div_ceil(blocks), &|_, p| {
                    let end = ((p + 1) * blocks).min(all);
                    let next = (p + 1) * blocks;
                    let part = Part {
                        images: (0, c.batch),
                        rect: whole,
                        blocks: (p * blocks, end),
                        far: true,
                        next: Some(next).filter(|n| *n < all),
                    };
                    let base = if s.copied { from.get() } else { self.first(whole, from.get()) };
                    // SAFETY: the caller's; blocks of channels are disjoint parts of the output.
                    unsafe { job.part(base, s.image, part) };
                });
            }
            Cut::Rows { rows, cols } => {
                let (nr, nc) = (c.window.output[1].div_ceil(rows), c.window.output[2].div_ceil(cols));
                by_place(team, c.batch * nr * nc, &|worker, p| {
                    let (n, i, j) = (p / (nr * nc), p / nc % nr, p % nc);
                    let end = |at: usize, by: usize, all: usize| (at * by, ((at + 1) * by).min(all));
                    let rect = Rect {
                        rows: end(i, rows, c.window.output[1]),
                        cols: end(j, cols, c.window.output[2]),
                    };
                    let from = xs.get().wrapping_add(n * image);
                    let blocks = (0, self.out_blocks());
                    let part = Part { images: (n, n + 1), rect, blocks, far: false, next: None };
                    // SAFETY: the caller's; each worker has its own room; rectangles are disjoint.
                    unsafe {
                        let base = if s.copied {
                            let room = work.get().add(worker * s.image);
                            self.copy(rect, (0, planes), from, room);
                            room as *const u8
                        } else {
                            self.first(rect, from)
                        };
                        job.part(base, 0, part);
                    }
                });
            }
        }
    }

    /// What the first tap of a rectangle's first pixel reads of an image that is read in place.
    fn first(&self, r: Rect, x: *const u8) -> *const u8 {
        let w = &self.conv.window;
        let (row, col) = (w.at(1, r.rows.0, 0), w.at(2, r.cols.0, 0));
        x.wrapping_offset((row * w.input[2] as isize + col) * PIXEL as isize)
    }
}

/// Runs `f(thread, part)` for all parts. Each thread begins with a range that is its own, whatever the op,
/// and then helps the others: what one op has written there, the same core's cache holds for the next one.
pub(crate) fn by_place(team: &Team, parts: usize, f: &(dyn Fn(usize, usize) + Sync)) {
    /// Of more threads, the last ones only help.
    const MOST: usize = 64;
    let owners = team.threads().min(MOST);
    let end = |q: usize| parts * (q + 1) / owners;
    let next: [AtomicUsize; MOST] =
        std::array::from_fn(|q| AtomicUsize::new(if q < owners { parts * q / owners } else { 0 }));
    team.run_with(team.threads().min(parts), &|worker, _| {
        for k in 0..owners {
            let q = (worker + k) % owners;
            loop {
                let p = next[q].fetch_add(1, Ordering::Relaxed);
                if p >= end(q) {
                    break;
                }
                f(worker, p);
            }
        }
    });
}

/// Pixels of planes as they follow each other: `to[k][c] = x[c][k]`, zeros up to `even` channels.
///
/// # Safety
/// `n` values of each plane are readable, `n * even` writable.
unsafe fn interleave(channels: usize, plane: usize, even: usize, n: usize, x: *const u16, to: *mut u16) {
    // SAFETY: the caller's.
    unsafe {
        #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))]
        let mut first = 0;
        #[cfg(target_arch = "x86_64")]
        if (channels, even) == (3, 4) {
            // Colours: eight pixels at a time. SSE2 is part of x86-64.
            use std::arch::x86_64::*;
            while first + 8 <= n {
                let plane = |c: usize| _mm_loadu_si128(x.add(c * plane + first) as *const __m128i);
                let (r, g, b, zero) = (plane(0), plane(1), plane(2), _mm_setzero_si128());
                let (rg, b0) = (_mm_unpacklo_epi16(r, g), _mm_unpacklo_epi16(b, zero));
                let (rg8, b8) = (_mm_unpackhi_epi16(r, g), _mm_unpackhi_epi16(b, zero));
                let to = to.add(4 * first) as *mut __m128i;
                _mm_storeu_si128(to, _mm_unpacklo_epi32(rg, b0));
                _mm_storeu_si128(to.add(1), _mm_unpackhi_epi32(rg, b0));
                _mm_storeu_si128(to.add(2), _mm_unpacklo_epi32(rg8, b8));
                _mm_storeu_si128(to.add(3), _mm_unpackhi_epi32(rg8, b8));
                first += 8;
            }
        }
        for k in first..n {
            for c in 0..even {
                *to.add(k * even + c) = if c < channels { *x.add(c * plane + k) } else { 0 };
            }
        }
    }
}

/// What the parts share.
struct Job<'a> {
    b: &'a Blocked16,
    isa: Isa,
    bf16: bool,
    w: SharedConst<u8>,
    y: SharedMut<u8>,
    after: After,
}

/// The tiles of a part: `lines` rows of `pixels` each (one row where rows follow each other), each cut into
/// tiles of one size.
#[derive(Clone, Copy)]
struct Grid {
    lines: usize,
    pixels: usize,
    /// Bytes from line to line.
    line: usize,
    /// Tiles of a line, and their rows. The last one begins early enough.
    tiles: usize,
    rows: usize,
    /// Pixels from one row of the output to the next.
    pitch: usize,
}

impl Grid {
    /// Image, line and first pixel of a tile.
    fn place(&self, t: usize) -> (usize, usize, usize) {
        let (line, k) = (t / self.tiles, t % self.tiles);
        (line / self.lines, line % self.lines, (k * self.rows).min(self.pixels - self.rows))
    }
}

/// Two tiles of pixels, or one: images, lines and first pixels, and where their first taps read.
#[derive(Clone, Copy)]
struct Pair {
    n: usize,
    places: [(usize, usize, usize); 2],
    at: [*const u8; 2],
    pixel: usize,
}

/// What a thread has under way.
struct Line {
    sums: [*mut f32; 2],
    last: Option<(Pair, usize, *mut f32)>,
    g: Grid,
    p: Part,
}

impl Job<'_> {
    fn grid(&self, r: Rect) -> Grid {
        let (b, s) = (self.b, &self.b.stage);
        let (rows, cols) = (r.rows.1 - r.rows.0, r.cols.1 - r.cols.0);
        let (lines, pixels, line, pitch) = match b.inner {
            1 => (rows, cols, b.conv.window.stride[1] * s.width * s.pixel, cols),
            _ => (1, (rows - 1) * s.width + cols, 0, s.width),
        };
        let tiles = pixels.div_ceil(PIXELS);
        Grid { lines, pixels, line, tiles, rows: pixels.div_ceil(tiles), pitch }
    }

    /// A part of the work. `x` is the place of the first image's first pixel, `image` bytes before the next
    /// one's.
    unsafe fn part(&self, x: *const u8, image: usize, p: Part) {
        let b = self.b;
        let g = self.grid(p.rect);
        #[cfg(target_arch = "x86_64")]
        let _tiles = b.tiles.then(|| amx::Tiles::new(&super::blocked16_tile::config(g.rows, b.pairs)));
        let all = (p.images.1 - p.images.0) * g.lines * g.tiles;
        let passes = all.div_ceil(2);
        // The weights of the block that comes next are asked for while these are used.
        let lines = b.block_weights().div_ceil(64).div_ceil(passes * b.offsets.len());
        let ahead = |ob: usize, k: usize| {
            let next = if ob + 1 < p.blocks.1 { Some(ob + 1) } else { p.next };
            match next {
                Some(n) if p.far => {
                    let at = k * b.offsets.len() * lines * 64;
                    let lines = if at < b.block_weights() { lines } else { 0 };
                    (self.w.get().wrapping_add(n * b.block_weights() + at), lines)
                }
                _ => (std::ptr::null(), 0),
            }
        };
        // The sums of one pair of tiles are finished while the next pair's are under way.
        let mut sums = [const { MaybeUninit::<Sums>::uninit() }; 2];
        let mut line = Line { sums: sums.each_mut().map(|s| s.as_mut_ptr() as *mut f32), last: None, g, p };
        // SAFETY: the caller's.
        unsafe {
            if p.far {
                for ob in p.blocks.0..p.blocks.1 {
                    for k in 0..passes {
                        let pair = self.tiles(&line, x, image, (2 * k, all));
                        self.pair(&mut line, &pair, ob, ahead(ob, k));
                    }
                }
            } else {
                for k in 0..passes {
                    let pair = self.tiles(&line, x, image, (2 * k, all));
                    for ob in p.blocks.0..p.blocks.1 {
                        self.pair(&mut line, &pair, ob, (std::ptr::null(), 0));
                    }
                }
            }
            self.done(&line);
        }
    }

    /// Two tiles, or one if it is the last.
    #[inline]
    fn tiles(&self, line: &Line, x: *const u8, image: usize, (t, all): (usize, usize)) -> Pair {
        let (b, g) = (self.b, &line.g);
        let n = (all - t).min(2);
        let places = [g.place(t), g.place(t + n - 1)];
        let pixel = if b.inner == 1 { b.conv.window.stride[2] * b.stage.pixel } else { PIXEL };
        let at = places.map(|(n, l, first)| x.wrapping_add(n * image + l * g.line + first * pixel));
        Pair { n, places, at, pixel }
    }

    /// The sums of two tiles (one, if it is the last) by one block of output channels, and the end of those
    /// before.
    #[inline]
    unsafe fn pair(&self, line: &mut Line, pair: &Pair, ob: usize, (ahead, lines): (*const u8, usize)) {
        let b = self.b;
        let group = if b.conv.groups == 1 { 0 } else { ob / (b.out_blocks() / b.conv.groups) };
        let skip = group * (b.conv.c_in / b.conv.groups / BLOCK) * b.stage.plane;
        let at = pair.at.map(|x| x.wrapping_add(skip));
        let steps = Steps {
            offsets: &b.offsets,
            pixel: pair.pixel,
            pairs: b.pairs,
            rows: line.g.rows,
            w: self.w.get().wrapping_add(ob * b.block_weights()),
            ahead,
            lines,
        };
        let to = line.sums[0];
        // SAFETY: the caller's: pixels lie in their buffers for all steps; there is room for the sums of two
        // tiles.
        unsafe {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            if b.tiles {
                super::blocked16_tile::on_tiles(&steps, &at[..pair.n], to, || self.done(line));
            } else {
                self.done(line);
                on_vectors(self.isa, &steps, &at[..pair.n], to);
            }
            #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
            {
                self.done(line);
                on_vectors(self.isa, &steps, &at[..pair.n], to);
            }
        }
        line.last = Some((*pair, ob, to));
        line.sums.swap(0, 1);
    }

    /// The end of the sums that were computed last.
    #[inline(always)]
    unsafe fn done(&self, line: &Line) {
        let Some((pair, ob, sums)) = &line.last else { return };
        for (k, place) in pair.places[..pair.n].iter().enumerate() {
            // SAFETY: the caller's; these sums were written.
            unsafe {
                self.tile_done(&line.p, &line.g, *place, *ob, sums.wrapping_add(k * line.g.rows * BLOCK))
            };
        }
    }

    /// Scale, bias, residual and activation of a tile's pixels, on their way to memory; those between rows
    /// are dropped.
    #[inline]
    unsafe fn tile_done(
        &self,
        p: &Part,
        g: &Grid,
        place: (usize, usize, usize),
        ob: usize,
        sums: *const f32,
    ) {
        let (b, w) = (self.b, &self.b.conv.window);
        let (n, line, first) = place;
        let plane = ((p.images.0 + n) * b.out_blocks() + ob) * w.out_size();
        let cols = p.rect.cols.1 - p.rect.cols.0;
        let channel = |v: SharedConst<f32>| match v.get().is_null() {
            true => v.get(),
            false => v.get().wrapping_add(ob * BLOCK),
        };
        let residual = Place { at: self.after.residual.get() as *mut u8, wide: self.after.residual_wide };
        let y = Place { at: self.y.get(), wide: self.after.wide };
        let mut done = 0;
        while done < g.rows {
            let (row, col) = ((first + done) / g.pitch, (first + done) % g.pitch);
            let run = (g.pitch - col).min(g.rows - done);
            let useful = cols.saturating_sub(col).min(run);
            if useful > 0 {
                let at = plane + (p.rect.rows.0 + line + row) * w.output[2] + p.rect.cols.0 + col;
                let f = Finish16 {
                    scale: channel(self.after.scale),
                    bias: channel(self.after.bias),
                    residual: residual.after(at * BLOCK),
                    act: self.after.act,
                    y: y.after(at * BLOCK),
                };
                // SAFETY: the caller's; these pixels are the part's own.
                unsafe { finish(self.isa, self.bf16, useful, sums.add(done * BLOCK), &f) };
            }
            done += run;
        }
    }
}
