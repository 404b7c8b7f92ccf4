//! Convolution in the blocked layout: images as `[N, C / B, H, W, B]`, where B channels fill one vector.
//!
//! A register tile holds up to fourteen pixels of a row (as many as registers allow) by two blocks of output
//! channels. Its sums run over blocks of input channels, taps and the channels of a block, in that order.
//! Each step reads one vector of weights per output block and one input value per pixel. Both lie close to
//! what the step before read, so nothing is gathered or packed. Weights are stored in the order of the sums,
//! `[O / B, C / groups / b, KH, KW, b, B]`, where `b` is the number of channels of an input block: B, or 1
//! for an input `[N, C, H, W]`, as in the first layer. The input is read in place. If a part of the work
//! reads padding, the input that it reads is copied first, with zeros around it.

use super::blocked_tile::{Activation, Tile, depthwise, half, prefetch_lines, tile};
use super::plain::Conv;
use super::window::Window;
use crate::cpu::library::epilogue::BoundChain;
use crate::cpu::library::simd::lanes;
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut, Team};

/// The most bytes of input for the rows of one part, so that they stay in the second-level cache.
const PART_BYTES: usize = 768 << 10;
/// The most bytes of weights for one part, when parts are groups of channels.
const PART_WEIGHTS: usize = 1 << 20;
/// Parts per thread. There are several, so that one delayed thread does not delay the whole job.
const PARTS: usize = 4;

/// The epilogue `act(sum * scale + bias + residual)`. Scale and bias have one value per output channel; the
/// residual has the output's layout. Null pointers mean absent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AffineEpilogue {
    pub scale: SharedConst<f32>,
    pub bias: SharedConst<f32>,
    pub residual: SharedConst<f32>,
    pub act: Activation,
}

impl Default for AffineEpilogue {
    fn default() -> AffineEpilogue {
        let none = SharedConst(std::ptr::null());
        AffineEpilogue { scale: none, bias: none, residual: none, act: Activation::None }
    }
}

/// A convolution whose output channels (and input channels, if `inner > 1`) are in blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Blocked {
    conv: Conv,
    /// Channels of an output block: the lanes of a vector.
    lanes: usize,
    /// Channels of an input block: `lanes`, or 1.
    inner: usize,
}

/// How the work is divided into parts.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// Rectangles of at most `rows` by `cols` output pixels, with all channels.
    Rows { rows: usize, cols: usize },
    /// Groups of `pairs` pairs of output channel blocks, with all pixels.
    Channels { pairs: usize },
}

/// Where a part of the work reads its input: in place, or in a padded copy. `at` points to the element that
/// the first tap reads for the part's first pixel. Distances are in floats.
#[derive(Clone, Copy)]
struct Source {
    at: SharedConst<f32>,
    /// Distance between blocks of channels, and between rows.
    plane: usize,
    row: usize,
}

/// A rectangle of the output.
#[derive(Clone, Copy)]
struct Rect {
    rows: (usize, usize),
    cols: (usize, usize),
}

impl Blocked {
    /// `None` if the channels do not come in whole blocks, if the geometry is not supported (three spatial
    /// axes, dilated inputs), or if an operand is empty.
    pub fn new(isa: Isa, conv: Conv, inner: usize) -> Option<Blocked> {
        let lanes = lanes(isa);
        let w = &conv.window;
        let depthwise = conv.groups == conv.c_in && conv.groups == conv.c_out && conv.groups > 1;
        let whole = |c: usize, by: usize| (c / conv.groups).is_multiple_of(by);
        let channels = match depthwise {
            true => inner == lanes && conv.c_in.is_multiple_of(lanes),
            false => (inner == lanes || inner == 1) && whole(conv.c_in, inner) && whole(conv.c_out, lanes),
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
        Some(Blocked { conv, lanes, inner })
    }

    fn is_depthwise(&self) -> bool {
        self.conv.groups == self.conv.c_in && self.conv.groups == self.conv.c_out && self.conv.groups > 1
    }

    /// Size of the packed weights in floats.
    pub fn weights(&self) -> usize {
        self.conv.weight_len()
    }

    /// Most pixels of a tile.
    fn pixels(&self) -> usize {
        super::blocked_tile::pixels(self.lanes)
    }

    /// Number of input channel blocks that one output sums over.
    fn group_in(&self) -> usize {
        self.conv.c_in / self.conv.groups / self.inner
    }

    /// Number of output channel blocks.
    fn out_blocks(&self) -> usize {
        self.conv.c_out / self.lanes
    }

    /// Number of pairs of output channel blocks in all groups. Both blocks of a pair belong to one group; the
    /// last pair of a group may have only one block.
    fn pairs(&self) -> usize {
        (self.out_blocks() / self.conv.groups).div_ceil(2) * self.conv.groups
    }

    /// Packs `[O, C / groups, KH, KW]` weights into the layout that the kernel reads.
    ///
    /// # Safety
    /// [`Blocked::weights`] floats are readable at `w` and writable at `to`, which overlaps nothing else.
    pub unsafe fn pack(&self, team: &Team, w: *const f32, to: *mut f32) {
        let (b, taps) = (self.lanes, self.conv.window.kernel_size());
        let (inner, blocks) = if self.is_depthwise() { (1, 1) } else { (self.inner, self.group_in()) };
        let each = blocks * inner * taps;
        let (w, to) = (SharedConst(w), SharedMut(to));
        team.run(self.out_blocks(), &|o| {
            // SAFETY: by contract `w` and `to` hold all weights; each part reads and writes the weights of
            // one output block.
            unsafe {
                let to = to.get().add(o * each * b);
                for lane in 0..b {
                    let from = w.get().add((o * b + lane) * each);
                    for c in 0..blocks * inner {
                        for t in 0..taps {
                            let at = ((c / inner * taps + t) * inner + c % inner) * b + lane;
                            *to.add(at) = *from.add(c * taps + t);
                        }
                    }
                }
            }
        });
    }

    /// The input that a rectangle of the output reads: first row and column (negative in the padding), and
    /// numbers of rows and columns.
    fn reads(&self, r: Rect) -> (isize, isize, usize, usize) {
        let w = &self.conv.window;
        let span = |axis: usize, (a, b): (usize, usize)| {
            (b - a - 1) * w.stride[axis] + (w.kernel[axis] - 1) * w.dilation[axis] + 1
        };
        (w.at(1, r.rows.0, 0), w.at(2, r.cols.0, 0), span(1, r.rows), span(2, r.cols))
    }

    fn whole(&self) -> Rect {
        Rect { rows: (0, self.conv.window.output[1]), cols: (0, self.conv.window.output[2]) }
    }

    /// Whether a rectangle reads padding.
    fn padded(&self, r: Rect) -> bool {
        let (i, j, h, v) = self.reads(r);
        let w = &self.conv.window;
        i < 0 || j < 0 || i + h as isize > w.input[1] as isize || j + v as isize > w.input[2] as isize
    }

    fn cut(&self, threads: usize) -> Cut {
        let c = &self.conv;
        let (out, w) = (c.window.output, &c.window);
        let weights = 4 * self.weights();
        let image = 4 * c.c_in * w.in_size();
        let pairs = self.pairs();
        if !self.is_depthwise() && threads > 1 && pairs >= 2 * threads && weights > c.batch * image {
            // The weights of a part stay in the cache while the part computes all images.
            let most = (PART_WEIGHTS / (weights / pairs).max(1)).clamp(1, pairs.div_ceil(threads));
            let parts = pairs.div_ceil(most).next_multiple_of(threads);
            return Cut::Channels { pairs: pairs.div_ceil(parts) };
        }
        let want = (PARTS * threads).div_ceil(c.batch).max(1);
        let want = if threads == 1 { 1 } else { want };
        let bytes = |r: Rect| {
            let (_, _, h, v) = self.reads(r);
            h * v * 4 * if self.is_depthwise() { self.lanes } else { c.c_in }
        };
        let (mut rows, mut cols) = (out[1], out[2]);
        if out[1] == 1 {
            let tiles = out[2].div_ceil(self.pixels());
            let most = tiles.div_ceil(want);
            cols = (most * self.pixels()).min(out[2]);
            while cols > self.pixels() && bytes(Rect { rows: (0, 1), cols: (0, cols) }) > PART_BYTES {
                cols = (cols / 2).next_multiple_of(self.pixels());
            }
        } else {
            rows = out[1].div_ceil(want);
            while rows > 1 && bytes(Rect { rows: (0, rows), cols: (0, cols) }) > PART_BYTES {
                rows = rows.div_ceil(2);
            }
        }
        Cut::Rows { rows, cols }
    }

    /// Floats of workspace that a run on `threads` threads needs.
    pub fn workspace(&self, threads: usize) -> usize {
        if !self.padded(self.whole()) {
            return 0;
        }
        let channels = if self.is_depthwise() { self.lanes } else { self.conv.c_in };
        match self.cut(threads) {
            Cut::Channels { .. } => {
                let (_, _, h, v) = self.reads(self.whole());
                h * v * self.conv.c_in * self.conv.batch
            }
            Cut::Rows { rows, cols } => {
                let (_, _, h, v) = self.reads(Rect { rows: (0, rows), cols: (0, cols) });
                (h * v * channels).next_multiple_of(16) * threads
            }
        }
    }

    /// Computes the convolution with its epilogue and chain.
    ///
    /// # Safety
    /// In `buffers`, `x` is readable for the whole input, `w` for the weights that [`Blocked::pack`] wrote,
    /// and `y` is writable for the output, which overlaps nothing else. `work` is writable for
    /// [`Blocked::workspace`] floats for the team's number of threads. The pointers of `finish` are null or
    /// readable as [`AffineEpilogue`] describes. `chain` is a chain on this output (one row per block of
    /// channels) whose operands are bound. The vectors of `isa` have `self.lanes` lanes.
    pub(crate) unsafe fn run(
        &self,
        team: &Team,
        isa: Isa,
        buffers: Buffers<f32, f32>,
        finish: AffineEpilogue,
        chain: BoundChain,
    ) {
        let Buffers { x, w, y, work } = buffers;
        let c = &self.conv;
        let job = Job { b: self, isa, w: SharedConst(w), y: SharedMut(y), finish, chain };
        let (xs, work) = (SharedConst(x), SharedMut(work));
        let image = c.c_in * c.window.in_size();
        let blocks = c.c_in / self.inner;
        match self.cut(team.threads()) {
            Cut::Channels { pairs: each_part } => {
                let r = self.whole();
                let padded = self.padded(r);
                let (_, _, h, v) = self.reads(r);
                let each = h * v * self.inner;
                if padded {
                    team.ranges(c.batch * blocks, (16384 / each).max(1), &|a, b| {
                        for i in a..b {
                            let from = xs.get().wrapping_add(i * c.window.in_size() * self.inner);
                            // SAFETY: by contract `x` holds all planes and `work` has room for the padded
                            // planes; each `i` writes its own plane.
                            unsafe { self.pad(r, from, 1, work.get().add(i * each)) };
                        }
                    });
                }
                let pairs = self.pairs();
                let parts = pairs.div_ceil(each_part);
                team.run(parts, &|p| {
                    let (first, end) = (p * each_part, ((p + 1) * each_part).min(pairs));
                    for n in 0..c.batch {
                        let s = match padded {
                            true => Source {
                                at: SharedConst(work.get().wrapping_add(n * blocks * each)),
                                plane: each,
                                row: v * self.inner,
                            },
                            false => self.in_place(r, xs.get().wrapping_add(n * image)),
                        };
                        for pair in first..end {
                            // The weights may be in no cache, so prefetch the weights of the next pair while
                            // this pair is computed. After the last pair of this part, this thread's next
                            // part is most likely the one `threads` parts later.
                            let next =
                                if pair + 1 < end { pair + 1 } else { (p + team.threads()) * each_part };
                            let next = Some(next).filter(|next| n == 0 && *next < pairs);
                            // SAFETY: `s` covers the whole image, in `x` or in the padded copy; the other
                            // operands are valid as `run` requires; parts write disjoint channels of the
                            // output.
                            unsafe { job.pair(s, n, pair, r, next) };
                        }
                    }
                });
            }
            Cut::Rows { rows, cols } => {
                let (nr, nc) = (c.window.output[1].div_ceil(rows), c.window.output[2].div_ceil(cols));
                let depthwise = self.is_depthwise();
                let (_, _, h, v) = self.reads(Rect { rows: (0, rows), cols: (0, cols) });
                let channels = if depthwise { self.lanes } else { c.c_in };
                let room = (h * v * channels).next_multiple_of(16);
                let outer = if depthwise { c.batch * blocks } else { c.batch };
                team.run_with(outer * nr * nc, &|worker, p| {
                    let (k, i, j) = (p / (nr * nc), p / nc % nr, p % nc);
                    let end = |at: usize, by: usize, all: usize| (at * by, ((at + 1) * by).min(all));
                    let r = Rect {
                        rows: end(i, rows, c.window.output[1]),
                        cols: end(j, cols, c.window.output[2]),
                    };
                    let planes = if depthwise { 1 } else { blocks };
                    let from = xs.get().wrapping_add(k * planes * self.inner * c.window.in_size());
                    // SAFETY: the operands are valid as `run` requires; the workspace has `room` floats per
                    // thread, enough for the largest rectangle; rectangles are disjoint parts of the output.
                    unsafe {
                        let s = if self.padded(r) {
                            let to = work.get().add(worker * room);
                            self.pad(r, from, planes, to);
                            let (_, _, h, v) = self.reads(r);
                            Source { at: SharedConst(to), plane: h * v * self.inner, row: v * self.inner }
                        } else {
                            self.in_place(r, from)
                        };
                        if depthwise {
                            job.depthwise(s, k, r);
                        } else {
                            (0..self.pairs()).for_each(|pair| job.pair(s, k, pair, r, None));
                        }
                    }
                });
            }
        }
    }

    fn in_place(&self, r: Rect, x: *const f32) -> Source {
        let (i, j, ..) = self.reads(r);
        let w = self.conv.window.input[2];
        Source {
            at: SharedConst(x.wrapping_offset((i * w as isize + j) * self.inner as isize)),
            plane: self.conv.window.in_size() * self.inner,
            row: w * self.inner,
        }
    }

    /// Copies the input that a rectangle reads, in `planes` blocks of channels, with zeros for padding.
    ///
    /// # Safety
    /// `x` is readable for `planes` planes of the input. `to` is writable for `planes` planes with the
    /// numbers of rows and columns that [`Blocked::reads`] gives, and overlaps nothing else.
    unsafe fn pad(&self, r: Rect, x: *const f32, planes: usize, to: *mut f32) {
        let (i, j, h, v) = self.reads(r);
        let (b, [_, rows, cols]) = (self.inner, self.conv.window.input);
        // Columns before and inside the image; the rest lie after it.
        let before = (-j).clamp(0, v as isize) as usize;
        let inside = (cols as isize - j.max(0)).clamp(0, (v - before) as isize) as usize;
        let first = j.max(0) as usize;
        for p in 0..planes {
            for k in 0..h {
                // SAFETY: `row` and the `inside` columns are in the image, which `x` holds; by contract `to`
                // has room for `planes * h * v * b` floats.
                unsafe {
                    let to = to.add((p * h + k) * v * b);
                    let row = i + k as isize;
                    if row < 0 || row >= rows as isize || inside == 0 {
                        std::ptr::write_bytes(to, 0, v * b);
                        continue;
                    }
                    std::ptr::write_bytes(to, 0, before * b);
                    let from = x.add(((p * rows + row as usize) * cols + first) * b);
                    std::ptr::copy_nonoverlapping(from, to.add(before * b), inside * b);
                    std::ptr::write_bytes(to.add((before + inside) * b), 0, (v - before - inside) * b);
                }
            }
        }
    }
}

/// The buffers of a blocked convolution. `T` is the type of the input and the weights, `O` is the type of the
/// output and the workspace.
#[derive(Clone, Copy)]
pub(crate) struct Buffers<T, O> {
    pub x: *const T,
    /// Packed weights.
    pub w: *const T,
    pub y: *mut O,
    /// Memory for padded copies of the input.
    pub work: *mut O,
}

/// The operands that all parts share.
struct Job<'a> {
    b: &'a Blocked,
    isa: Isa,
    w: SharedConst<f32>,
    y: SharedMut<f32>,
    finish: AffineEpilogue,
    chain: BoundChain,
}

impl Job<'_> {
    /// Computes a pair of output channel blocks of image `n` in the rectangle `r`, from the input `s`.
    /// Prefetches the weights of pair `next`.
    ///
    /// # Safety
    /// `s` covers the input that the rectangle reads, for all input channels; the job's operands are valid as
    /// [`Blocked::run`] describes; no other thread writes this part of the output.
    unsafe fn pair(&self, s: Source, n: usize, pair: usize, r: Rect, next: Option<usize>) {
        let (b, c) = (self.b, &self.b.conv);
        let (w, lanes) = (&c.window, b.lanes);
        let per_group = b.out_blocks() / c.groups;
        let pairs = per_group.div_ceil(2);
        let first_block = |pair: usize| pair / pairs * per_group + pair % pairs * 2;
        let group = pair / pairs;
        let blocks = (per_group - pair % pairs * 2).min(2);
        let ob = first_block(pair);
        let each = b.group_in() * b.inner * w.kernel_size() * lanes;
        let (size, cols) = (w.out_size(), w.output[2]);
        let channel = |p: SharedConst<f32>| match p.get().is_null() {
            true => p.get(),
            false => p.get().wrapping_add(ob * lanes),
        };
        let y0 = (n * b.out_blocks() + ob) * size * lanes;
        let width = r.cols.1 - r.cols.0;
        let tiles = width.div_ceil(b.pixels());
        // Put two rows into one tile if they fit.
        let rows = if 2 * width <= b.pixels() { 2 } else { 1 };
        let wp = self.w.get().wrapping_add(ob * each);
        // With one channel per input block and no dilation, the taps of a row are consecutive like the
        // channels of a block.
        let (inner, taps) = match b.inner == 1 && w.dilation[2] == 1 {
            true => (w.kernel[2], (w.kernel[1], 1)),
            false => (b.inner, (w.kernel[1], w.kernel[2])),
        };
        let mut t = Tile {
            x: s.at.get(),
            w: wp,
            next_w: each,
            blocks: b.group_in(),
            inner,
            taps,
            plane: s.plane,
            tap_row: w.dilation[1] * s.row,
            tap_col: w.dilation[2] * b.inner,
            pixel: w.stride[2] * b.inner,
            y: self.y.get().wrapping_add(y0),
            next_y: size * lanes,
            scale: channel(self.finish.scale),
            bias: channel(self.finish.bias),
            residual: std::ptr::null(),
            act: self.finish.act,
            half_x: 0,
            half_y: 0,
            ahead: std::ptr::null(),
            end: std::ptr::null(),
            lines: 0,
        };
        if let Some(next) = next {
            // Spread the prefetches evenly over the steps of all tiles.
            let steps = tiles * (r.rows.1 - r.rows.0).div_ceil(rows) * b.group_in() * w.kernel_size();
            t.ahead = self.w.get().wrapping_add(first_block(next) * each);
            t.end = t.ahead.wrapping_add(2 * each);
            t.lines = prefetch_lines(2 * each, steps);
        }
        let x0 = s.at.get().wrapping_add(group * b.group_in() * s.plane);
        for row in (r.rows.0..r.rows.1).step_by(rows) {
            let line = x0.wrapping_add((row - r.rows.0) * w.stride[1] * s.row);
            let both = rows == 2 && row + 1 < r.rows.1;
            for k in 0..tiles {
                // Split the row into tiles of nearly equal width.
                let (c0, c1) = (width * k / tiles, width * (k + 1) / tiles);
                let at = (row * cols + r.cols.0 + c0) * lanes;
                t.x = line.wrapping_add(c0 * w.stride[2] * b.inner);
                t.y = self.y.get().wrapping_add(y0 + at);
                if !self.finish.residual.get().is_null() {
                    t.residual = self.finish.residual.get().wrapping_add(y0 + at);
                }
                let pixels = if both { 2 * width } else { c1 - c0 };
                (t.half_x, t.half_y) = match both {
                    true => (w.stride[1] * s.row, cols * lanes),
                    false => (half(pixels) * t.pixel, half(pixels) * lanes),
                };
                // SAFETY: `s` covers what every tap of these pixels reads; weights, scale, bias, residual and
                // output are valid for the `blocks` blocks from `ob` by the contract of `run`.
                unsafe { tile(self.isa, pixels, blocks, &mut t) };
            }
        }
        if self.chain.is_some() {
            for k in 0..blocks {
                // SAFETY: the sums of this rectangle and block are complete, and no other thread uses them.
                unsafe { self.chain(n * b.out_blocks() + ob + k, r) };
            }
        }
    }

    /// Runs the chain over a rectangle of block `plane`, counted over all images' output channel blocks.
    ///
    /// # Safety
    /// The sums of the rectangle are complete, and no other thread uses them; the chain's operands are bound.
    unsafe fn chain(&self, plane: usize, r: Rect) {
        let (b, w) = (self.b, &self.b.conv.window);
        let (cols, lanes) = (w.output[2], b.lanes);
        let y = self.y.get().wrapping_add(plane * w.out_size() * lanes);
        let run = |from: usize, to: usize| {
            // SAFETY: `from..to` lies in the rectangle's rows, whose sums are complete by contract. No other
            // thread uses these sums.
            unsafe { self.chain.run(self.isa, plane, from, to - from, y.wrapping_add(from)) };
        };
        if r.cols == (0, cols) {
            run(r.rows.0 * cols * lanes, r.rows.1 * cols * lanes);
        } else {
            for row in r.rows.0..r.rows.1 {
                run((row * cols + r.cols.0) * lanes, (row * cols + r.cols.1) * lanes);
            }
        }
    }

    /// Depthwise convolution of a rectangle of block `k`, counted over all images' channel blocks.
    ///
    /// # Safety
    /// `s` covers the input that the rectangle reads in this block; the job's operands are valid as
    /// [`Blocked::run`] describes; no other thread writes this part of the output.
    unsafe fn depthwise(&self, s: Source, k: usize, r: Rect) {
        let (b, w) = (self.b, &self.b.conv.window);
        let (ob, lanes) = (k % b.out_blocks(), b.lanes);
        let channel = |p: SharedConst<f32>| match p.get().is_null() {
            true => p.get(),
            false => p.get().wrapping_add(ob * lanes),
        };
        let y0 = k * w.out_size() * lanes;
        for row in r.rows.0..r.rows.1 {
            let at = y0 + (row * w.output[2] + r.cols.0) * lanes;
            let t = Tile {
                x: s.at.get().wrapping_add((row - r.rows.0) * w.stride[1] * s.row),
                w: self.w.get().wrapping_add(ob * w.kernel_size() * lanes),
                next_w: 0,
                blocks: 1,
                inner: lanes,
                taps: (w.kernel[1], w.kernel[2]),
                plane: 0,
                tap_row: w.dilation[1] * s.row,
                tap_col: w.dilation[2] * lanes,
                pixel: w.stride[2] * lanes,
                y: self.y.get().wrapping_add(at),
                next_y: 0,
                scale: channel(self.finish.scale),
                bias: channel(self.finish.bias),
                residual: match self.finish.residual.get() {
                    p if p.is_null() => p,
                    p => p.wrapping_add(at),
                },
                act: self.finish.act,
                half_x: 0,
                half_y: 0,
                ahead: std::ptr::null(),
                end: std::ptr::null(),
                lines: 0,
            };
            // SAFETY: `s` covers what every tap of this row reads; weights, scale, bias, residual and output
            // are valid for block `ob` by the contract of `run`.
            unsafe { depthwise(self.isa, r.cols.1 - r.cols.0, &t) };
        }
        if self.chain.is_some() {
            // SAFETY: the loop has completed the sums of this rectangle and block, and no other thread uses
            // them.
            unsafe { self.chain(k, r) };
        }
    }
}
