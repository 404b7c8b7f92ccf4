//! Convolution of bf16 images in the blocked layout with 32 channels per block, `[N, C / 32, H, W, 32]`, with
//! sums in f32.
//!
//! A pixel's block is 64 bytes, one row of a tile register. Sixteen pixels by thirty-two channels are the
//! left operand of a tile product. The right operands are weights packed as
//! `[O / 32, C / 32 / groups, KH, KW, 2, 16, 16, 2]`. The last four axes are the halves of the output block,
//! the pairs of input channels, the output channels of a half, and the two channels of a pair. A sum runs
//! over blocks of input channels and taps without leaving the registers (`blocked_bf16_tile.rs`). Then scale,
//! bias, residual and activation are applied in f32, and the result is rounded once (or stored as f32).
//!
//! The pixels of a tile must be evenly spaced. With no padding and stride 1, the image is read in place as
//! one long row; if the kernel is larger than one pixel, the windows that begin in one row of the image and
//! end in the next belong to no output, and their sums are dropped. Otherwise each part of the work first
//! copies the input that it reads, with zeros around it. If an image has few output pixels and there are many
//! images, as in the gradient of a convolution's weights, the rows of a tile are the same pixel of different
//! images. With strides, each residue of rows and columns (modulo the stride) becomes a separate image, so
//! that each tap reads consecutive pixels. An input whose channels do not fill a block (`[N, C, H, W]`, as in
//! the first layer) is copied pixel by pixel; each step of a sum then covers a piece of a row of taps.
//!
//! Processors without tile registers compute the same sums with `vdpbf16ps`. Both instructions treat
//! denormals as zero and round to nearest even. For the tests of these layouts on every machine, the same
//! sums also run on f32 vectors.

use super::blocked::Buffers;
use super::blocked_bf16_parts::{After, Job, Part, Rect};
use super::blocked_bf16_tile::{HALF, PIXELS};
use super::blocked_int8::Bytes;
use super::blocked_tile::Activation;
use super::plain::Conv;
use super::window::Window;
use crate::cpu::library::gemm::product_bf16::Bf16Code;
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut, Team};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Channels of a block.
pub const BLOCK: usize = super::blocked_bf16_tile::BLOCK;

/// The most bytes of input for the rows of one part, so that they stay in the second-level cache.
const PART_BYTES: usize = 512 << 10;
/// The most bytes of weights for one part, when parts are groups of channels.
const PART_WEIGHTS: usize = 512 << 10;
/// Parts per thread. There are several, so that one delayed thread does not delay the whole job.
pub(crate) const PARTS: usize = 4;
/// The most channels of an input that is not in blocks; the copy interleaves them per pixel.
const MAX_UNBLOCKED_CHANNELS: usize = 16;
/// Bytes of a bf16.
const B16: usize = 2;
/// Bytes of a pixel's block.
pub(super) const PIXEL: usize = BLOCK * B16;

/// Whether convolutions with these kernels are faster than f32 convolutions: they multiply bf16 on tile
/// registers, or with `vdpbf16ps` where that instruction is faster than f32 multiply-adds.
pub fn available(isa: Isa) -> bool {
    isa.bf16_is_faster()
}

/// The epilogue `act(sum * scale + bias + residual)`. Scale and bias have one value per output channel; the
/// residual has the output's layout. Null pointers mean absent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16Epilogue {
    pub scale: SharedConst<f32>,
    pub bias: SharedConst<f32>,
    pub residual: SharedConst<u8>,
    /// Whether the residual (`residual_wide`) and the output (`wide`) are f32. Otherwise they are bf16.
    pub residual_wide: bool,
    pub wide: bool,
    pub act: Activation,
}

impl Default for Bf16Epilogue {
    fn default() -> Bf16Epilogue {
        let none = SharedConst(std::ptr::null());
        Bf16Epilogue {
            scale: none,
            bias: none,
            residual: SharedConst(std::ptr::null()),
            residual_wide: false,
            wide: false,
            act: Activation::None,
        }
    }
}

/// How the work is divided into parts.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// Rectangles of at most `rows` by `cols` output pixels, with all channels.
    Rows { rows: usize, cols: usize },
    /// Groups of `blocks` output channel blocks, with all pixels.
    Channels { blocks: usize },
    /// Ranges of at most `pixels` output pixels of all images, with one output channel block. The rows of a
    /// tile are the same pixel of different images.
    Images { pixels: usize },
}

/// The layout of the input that tiles read, in place or copied. Sizes are those of the largest part.
#[derive(Clone, Debug, Default)]
pub(super) struct Stage {
    pub copied: bool,
    /// Residues of rows and of columns, modulo the strides, that taps read.
    pub down: Vec<usize>,
    pub across: Vec<usize>,
    /// Rows and columns of the image of one residue.
    pub height: usize,
    pub width: usize,
    /// Bytes of a pixel, of a block of channels, and of an image.
    pub pixel: usize,
    pub plane: usize,
    pub image: usize,
}

/// A convolution whose output channels (and input channels, if `inner > 1`) are in blocks of 32.
#[derive(Clone, Debug)]
pub struct Blocked16 {
    pub(super) conv: Conv,
    /// Channels of an input block: 32, or 1.
    pub(super) inner: usize,
    threads: usize,
    /// The instructions that compute the sums of bf16. For bytes, [`Bf16Code::Tiles`] selects tile registers;
    /// other values select vectors.
    pub(super) code: Bf16Code,
    /// How bytes are multiplied; `None` if the values are bf16. For bytes, `conv` counts pairs of input
    /// channels.
    pub(super) bytes: Option<Bytes>,
    cut: Cut,
    pub(super) stage: Stage,
    /// For each step, the offset in bytes from a pixel to the input that the step reads.
    pub(super) offsets: Vec<isize>,
    /// Pairs of input values per step, and pieces per row of taps.
    pub(super) pairs: usize,
    pieces: usize,
}

impl Blocked16 {
    /// `None` if the channels do not come in whole blocks, if the geometry is not supported (three spatial
    /// axes, dilated inputs), or if an operand is empty. An input not in blocks must have one group, at most
    /// 16 channels and no dilation of columns. `threads` is the team's number of threads. This process must
    /// be able to run `code` ([`Bf16Code::runs`]).
    pub fn new(conv: Conv, inner: usize, threads: usize, code: Bf16Code) -> Option<Blocked16> {
        Blocked16::with(conv, inner, threads, code, None)
    }

    /// Like [`Blocked16::new`], also for bytes. With `bytes`, two bytes of consecutive channels take the
    /// place of a bf16.
    pub(super) fn with(
        conv: Conv,
        inner: usize,
        threads: usize,
        code: Bf16Code,
        bytes: Option<Bytes>,
    ) -> Option<Blocked16> {
        let w = &conv.window;
        let whole = |c: usize| (c / conv.groups).is_multiple_of(BLOCK);
        let channels = match inner {
            BLOCK => whole(conv.c_in) && whole(conv.c_out),
            1 => {
                conv.groups == 1
                    && conv.c_in <= MAX_UNBLOCKED_CHANNELS
                    && whole(conv.c_out)
                    && w.dilation[2] == 1
            }
            _ => false,
        };
        let flat = w.input[0] == 1 && w.kernel[0] == 1 && w.output[0] == 1 && w.pad_lo[0] == 0;
        let some = conv.output_len() > 0 && conv.input_len() > 0 && w.kernel_size() > 0;
        let copied = conv.can_be_copied();
        if !channels || !flat || !some || !copied || w.input_dilation != [1; 3] {
            return None;
        }
        let mut conv = conv;
        if w.is_pointwise() {
            // Treat the image as one long row, so that tiles need not end where its rows do.
            let (i, o) = (w.in_size(), w.out_size());
            conv.window = Window { input: [1, 1, i], output: [1, 1, o], ..*w };
        }
        let (mut pairs, mut pieces) = (BLOCK / 2, 1);
        if inner == 1 {
            // Cut a row of taps into equal pieces of at most sixteen pairs.
            let row = (conv.window.kernel[2] * conv.c_in.next_multiple_of(2)) / 2;
            pieces = (row.div_ceil(BLOCK / 2)..=row).find(|n| row.is_multiple_of(*n))?;
            pairs = row / pieces;
        }
        let mut b = Blocked16 {
            conv,
            inner,
            threads: threads.max(1),
            code,
            bytes,
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

    /// Number of steps of one sum. A step covers one tap of a block of input channels, or a piece of a row of
    /// taps.
    pub(super) fn depth(&self) -> usize {
        let w = &self.conv.window;
        match self.inner {
            1 => w.kernel[1] * self.pieces,
            _ => self.conv.c_in / self.conv.groups / BLOCK * w.kernel_size(),
        }
    }

    /// Bytes of the weights of one output channel block.
    pub(super) fn block_weights(&self) -> usize {
        self.depth() * 2 * HALF
    }

    pub(super) fn out_blocks(&self) -> usize {
        self.conv.c_out / BLOCK
    }

    /// Size of the packed weights in bytes.
    pub fn weights(&self) -> usize {
        self.out_blocks() * self.block_weights()
    }

    /// Bytes of one pixel of the copied input.
    fn pixel(&self) -> usize {
        if self.inner == 1 { B16 * self.conv.c_in.next_multiple_of(2) } else { PIXEL }
    }

    /// Packs `[O, C / groups, KH, KW]` bf16 weights into the layout that the kernel reads.
    ///
    /// # Safety
    /// All weights are readable at `w`; `to` is aligned to 2 bytes, writable for [`Blocked16::weights`] bytes
    /// and overlaps nothing else.
    pub unsafe fn pack(&self, team: &Team, w: *const u16, to: *mut u16) {
        let c = &self.conv;
        let (taps, kw, channels) = (c.window.kernel_size(), c.window.kernel[2], c.c_in / c.groups);
        let even = c.c_in.next_multiple_of(2);
        let (w, to) = (SharedConst(w), SharedMut(to));
        if self.inner == BLOCK {
            let blocks = channels / BLOCK;
            return team.run(self.out_blocks() * blocks, &|p| {
                let (ob, cb) = (p / blocks, p % blocks);
                let to = to.get().wrapping_add((ob * self.block_weights() + cb * taps * 2 * HALF) / B16);
                for (half, pair) in (0..2).flat_map(|h| (0..BLOCK / 2).map(move |p| (h, p))) {
                    let first = (ob * BLOCK + 16 * half) * channels + cb * BLOCK + 2 * pair;
                    for tap in 0..taps {
                        // SAFETY: two channels of sixteen outputs from `first` lie within the weights at `w`;
                        // each tap has two halves of weights at `to`, and each half a vector per pair. Each
                        // part writes one block of input channels of one output block.
                        unsafe {
                            let from = w.get().add(first * taps + tap);
                            let to = to.add((2 * tap + half) * HALF / B16 + 32 * pair);
                            for o in 0..16 {
                                *to.add(2 * o) = *from.add(o * channels * taps);
                                *to.add(2 * o + 1) = *from.add(o * channels * taps + taps);
                            }
                        }
                    }
                }
            });
        }
        team.run(self.out_blocks(), &|ob| {
            let to = to.get().wrapping_add(ob * self.block_weights() / B16);
            for (step, k) in (0..self.depth()).flat_map(|s| (0..BLOCK).map(move |k| (s, k))) {
                let (row, v) = (step / self.pieces, step % self.pieces * 2 * self.pairs + k);
                let (tap, channel) = (row * kw + v / even, v % even);
                let padding = k >= 2 * self.pairs || channel >= channels;
                for o in 0..BLOCK {
                    let at = ((2 * step + o / 16) * HALF) / B16 + k / 2 * 32 + 2 * (o % 16) + k % 2;
                    // SAFETY: channel, tap and output index lie within the weights at `w`; `at` lies within
                    // the block's weights at `to`; each part writes one block.
                    unsafe {
                        *to.add(at) = match padding {
                            true => 0,
                            false => *w.get().add(((ob * BLOCK + o) * channels + channel) * taps + tap),
                        };
                    }
                }
            }
        });
    }

    /// Number of input rows or columns that `n` rows or columns of the output read.
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
            // Each weight is then read by one thread only. The weights of a part stay in the cache while the
            // part computes all images.
            let most = (PART_WEIGHTS / self.block_weights()).clamp(1, blocks.div_ceil(PARTS * threads));
            let parts = blocks.div_ceil(most).next_multiple_of(threads).min(blocks);
            return Cut::Channels { blocks: blocks.div_ceil(parts) };
        }
        if self.across_images() {
            // Two tiles are computed together.
            let tiles = c.batch.div_ceil(PIXELS);
            return Cut::Images { pixels: if tiles.is_multiple_of(2) { 1 } else { 2 } };
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

    /// Whether tiles have the same pixel of several images.
    #[cfg(test)]
    pub(super) fn is_across_images(&self) -> bool {
        matches!(self.cut, Cut::Images { .. })
    }

    /// Whether tiles of the same pixel of many images are fuller than tiles of the pixels of one image, by a
    /// half or more. Each sum must have many terms, because the results are stored pixel by pixel.
    fn across_images(&self) -> bool {
        const STEPS: usize = 32;
        let (c, w) = (&self.conv, &self.conv.window);
        if self.inner != BLOCK || self.bytes.is_some() || self.depth() < STEPS {
            return false;
        }
        // The width of the image that tiles read. Pixels between two rows of the output are computed in vain.
        let line = match self.in_place() {
            true => w.input[2],
            false => w.output[2] + self.beyond(2),
        };
        let computed = |n: usize| n.div_ceil(PIXELS) * PIXELS;
        let one = c.batch * computed((w.output[1] - 1) * line + w.output[2]);
        let many = w.out_size() * computed(c.batch);
        2 * one >= 3 * many
    }

    /// Whether a part may be a range of columns of a row, which requires reading the input in place.
    fn row_is_cut(&self) -> bool {
        self.inner == BLOCK && self.in_place()
    }

    /// Rows or columns of the image of one residue that taps read beyond the number of the output's.
    fn beyond(&self, axis: usize) -> usize {
        let w = &self.conv.window;
        (w.kernel[axis] - 1) * w.dilation[axis] / w.stride[axis]
    }

    fn in_place(&self) -> bool {
        let w = &self.conv.window;
        // No tap reads outside the image, and with stride 1 consecutive outputs read consecutive pixels.
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
            Cut::Channels { .. } | Cut::Images { .. } => (w.output[1], w.output[2]),
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
        let (down, across) = (residues(1), residues(2));
        let (height, width) = (rows + self.beyond(1), cols + self.beyond(2));
        let plane = down.len() * across.len() * height * width * PIXEL;
        Stage { copied: true, down, across, height, width, pixel, plane, image: plane * (c.c_in / BLOCK) }
    }

    /// The offsets in bytes of all steps, in the order of the packed weights.
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
            (true, Cut::Channels { .. } | Cut::Images { .. }) => self.stage.image * self.conv.batch,
        }
    }

    /// Copies the input that a rectangle reads, in the channel blocks `planes` of the image at `x`.
    ///
    /// # Safety
    /// The image is readable at `x`; `to` is writable for [`Stage::plane`] bytes for each block below
    /// `planes.1` and overlaps nothing else.
    unsafe fn copy(&self, r: Rect, planes: (usize, usize), x: *const u8, to: *mut u8) {
        let (w, s) = (&self.conv.window, &self.stage);
        let [_, high, wide] = w.input;
        let (n_rows, n_cols) = (r.rows.1 - r.rows.0, r.cols.1 - r.cols.0);
        if self.inner == 1 {
            let (rows, cols) = (self.span(1, n_rows), self.span(2, n_cols));
            let (i0, j0) = (w.at(1, r.rows.0, 0), w.at(2, r.cols.0, 0));
            let even = s.pixel / B16;
            // The columns that lie inside the image.
            let lead = ((-j0).max(0) as usize).min(cols);
            let inside = (wide as isize - j0.max(0)).clamp(0, (cols - lead) as isize) as usize;
            for i in 0..rows {
                let row = i0 + i as isize;
                // SAFETY: `row` and the `inside` columns from `j0.max(0)` are in the image; by contract `to`
                // has a plane of `height >= rows` rows of `width` pixels.
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
                    // Columns before the image, and columns inside it.
                    let lead = ((-first).max(0) as usize).div_ceil(step).min(s.width);
                    let from = first + (lead * step) as isize;
                    let inside = (wide as isize - from).max(0) as usize;
                    let inside = inside.div_ceil(step).min(s.width - lead);
                    for i in 0..n_rows + s.height - self.part_rows() {
                        let row = w.at(1, r.rows.0, 0) + (down + i * w.stride[1]) as isize;
                        // SAFETY: `row` and the `inside` columns from `from` are in the image; by contract
                        // `to` has a plane, with one image of `height` rows of `width` pixels per residue.
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

    /// Output rows of the largest part.
    fn part_rows(&self) -> usize {
        match self.cut {
            Cut::Rows { rows, .. } => rows,
            Cut::Channels { .. } | Cut::Images { .. } => self.conv.window.output[1],
        }
    }

    /// Computes the convolution with its epilogue.
    ///
    /// # Safety
    /// In `buffers`, `x` is readable for the whole input, `w` for the weights that [`Blocked16::pack`] wrote,
    /// and `y` is writable for the output, which overlaps nothing else. `work` is writable for
    /// [`Blocked16::workspace`] bytes. The pointers of `after` are null or readable as [`Bf16Epilogue`]
    /// describes. This processor has the instructions of `code`, and `isa` permits them.
    ///
    /// # Panics
    /// If the team's number of threads is not the number for which the convolution was made.
    pub(crate) unsafe fn run(&self, team: &Team, isa: Isa, buffers: Buffers<u16, u8>, after: Bf16Epilogue) {
        // SAFETY: `run` has the contract of `run_with`.
        unsafe { self.run_with(team, isa, buffers, After::Half(after)) }
    }

    /// [`Blocked16::run`] for bf16 or bytes, with the epilogue of that type.
    ///
    /// # Safety
    /// The contract of [`Blocked16::run`]. For bytes, `x` and `w` hold bytes, as
    /// [`super::blocked_int8::Blocked8`] describes.
    pub(super) unsafe fn run_with(&self, team: &Team, isa: Isa, buffers: Buffers<u16, u8>, after: After) {
        let Buffers { x, w, y, work } = buffers;
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
        let all = self.out_blocks();
        // The address from which the first tap of the first pixel of the first image is read, if parts share
        // all images.
        let shared = || {
            if !s.copied {
                return SharedConst(self.first(whole, xs.get()));
            }
            team.ranges(c.batch * planes, (32768 / s.plane).max(1), &|a, b| {
                for k in a..b {
                    let (n, p) = (k / planes, k % planes);
                    let from = xs.get().wrapping_add(n * image);
                    // SAFETY: by contract `x` holds all images and `work` has room for their copies; each `k`
                    // writes its own plane.
                    unsafe { self.copy(whole, (p, p + 1), from, work.get().add(n * s.image)) };
                }
            });
            SharedConst(work.get() as *const u8)
        };
        match self.cut {
            Cut::Channels { blocks } => {
                let base = shared();
                by_place(team, all.div_ceil(blocks), &|_, p| {
                    let end = ((p + 1) * blocks).min(all);
                    let next = (p + 1) * blocks;
                    let part = Part {
                        images: (0, c.batch),
                        pixels: None,
                        rect: whole,
                        blocks: (p * blocks, end),
                        far: true,
                        next: Some(next).filter(|n| *n < all),
                    };
                    // SAFETY: the operands are readable and writable as `run` requires; `base` is the image
                    // in `x` or its copy in `work`; parts write disjoint channels of the output.
                    unsafe { job.part(base.get(), s.image, part) };
                });
            }
            Cut::Images { pixels } => {
                let (base, ranges) = (shared(), c.window.out_size().div_ceil(pixels));
                by_place(team, all * ranges, &|_, p| {
                    let (ob, first) = (p / ranges, p % ranges * pixels);
                    let part = Part {
                        images: (0, c.batch),
                        pixels: Some((first, (first + pixels).min(c.window.out_size()))),
                        rect: whole,
                        blocks: (ob, ob + 1),
                        far: false,
                        next: None,
                    };
                    // SAFETY: the operands are readable and writable as `run` requires; `base` is the image
                    // in `x` or its copy in `work`; parts write disjoint pixels or channels of the output.
                    unsafe { job.part(base.get(), s.image, part) };
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
                    let part =
                        Part { images: (n, n + 1), pixels: None, rect, blocks, far: false, next: None };
                    // SAFETY: the operands are readable and writable as `run` requires; the workspace has
                    // `s.image` bytes per thread, enough for the largest rectangle; rectangles are
                    // disjoint parts of the output.
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

    /// The address that the first tap reads for the first pixel of a rectangle, if the image is read in
    /// place.
    fn first(&self, r: Rect, x: *const u8) -> *const u8 {
        let w = &self.conv.window;
        let (row, col) = (w.at(1, r.rows.0, 0), w.at(2, r.cols.0, 0));
        x.wrapping_offset((row * w.input[2] as isize + col) * PIXEL as isize)
    }
}

/// Runs `f(thread, part)` for all parts. Each thread starts with its own range of parts and then takes parts
/// from the ranges of other threads. A thread's range is the same share of the work in every op. So the data
/// that one op writes are likely still in the cache of the core that reads them in the next op.
pub(crate) fn by_place(team: &Team, parts: usize, f: &(dyn Fn(usize, usize) + Sync)) {
    /// The most threads that have their own range. Further threads only take parts from these ranges.
    const MAX_OWNERS: usize = 64;
    let owners = team.threads().min(MAX_OWNERS);
    let end = |q: usize| parts * (q + 1) / owners;
    let next: [AtomicUsize; MAX_OWNERS] =
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

/// Interleaves planes into pixels: `to[k][c] = x[c][k]`, with zeros for channels `channels..even`.
///
/// # Safety
/// `n` values of each of the `channels` planes, `plane` values apart, are readable; `n * even` values are
/// writable at `to`, which overlaps none of them.
unsafe fn interleave(channels: usize, plane: usize, even: usize, n: usize, x: *const u16, to: *mut u16) {
    // SAFETY: by contract `n` values per plane are readable and `n * even` writable; vectors cover pixels
    // `first .. first + 8` with `first + 8 <= n`.
    unsafe {
        #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))]
        let mut first = 0;
        #[cfg(target_arch = "x86_64")]
        if (channels, even) == (3, 4) {
            // RGB: eight pixels at a time. SSE2 is in the baseline of x86-64.
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
