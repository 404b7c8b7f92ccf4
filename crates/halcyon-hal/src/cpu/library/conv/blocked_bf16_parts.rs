//! The parts of a convolution of bf16 images in the blocked layout: tiles of pixels, their sums, and their
//! epilogue.

use super::blocked_bf16::{Bf16Epilogue, Blocked16, PIXEL};
#[cfg(target_arch = "x86_64")]
use super::blocked_bf16_tile::config;
use super::blocked_bf16_tile::{
    BLOCK, Bf16TileEpilogue, PIXELS, Place, Steps, Sums, finish, on_pairs, on_vectors,
};
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::blocked_bf16_tile::{on_signed_tiles, on_tiles, on_unsigned_tiles};
use super::blocked_int8::ByteEpilogue;
use super::blocked_int8_tile::{self as int8, ByteTile};
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx;
use crate::cpu::library::gemm::product_bf16::Bf16Code;
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut};
use std::mem::MaybeUninit;

/// A rectangle of the output.
#[derive(Clone, Copy)]
pub(super) struct Rect {
    pub rows: (usize, usize),
    pub cols: (usize, usize),
}

/// A part of the work: a range of images, a rectangle of their outputs, and a range of output channel blocks.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub images: (usize, usize),
    /// A range of pixels of the rectangle, if a tile has the same pixel of several images.
    pub pixels: Option<(usize, usize)>,
    pub rect: Rect,
    pub blocks: (usize, usize),
    /// Whether only this part reads its weights. If so, the weights are not in a cache, and the part
    /// prefetches them.
    pub far: bool,
    /// The output channel block whose weights this thread will most likely read next.
    pub next: Option<usize>,
}

/// The epilogue of sums of bf16 products, or of products of bytes.
#[derive(Clone, Copy)]
pub(super) enum After {
    Half(Bf16Epilogue),
    Bytes(ByteEpilogue),
}

/// The operands that all parts share.
pub(super) struct Job<'a> {
    pub b: &'a Blocked16,
    pub isa: Isa,
    pub bf16: bool,
    pub w: SharedConst<u8>,
    pub y: SharedMut<u8>,
    pub after: After,
}

/// The tiles of a part. The part has `lines` lines of `pixels` pixels each (a single line if the rows are
/// consecutive in memory). Each line is cut into tiles of the same size. If a tile has the same pixel of
/// several images, a line is a pixel, and its `pixels` are the images.
#[derive(Clone, Copy)]
struct Grid {
    lines: usize,
    pixels: usize,
    /// Bytes between lines.
    line: usize,
    /// Tiles per line, and pixels per tile. The last tile overlaps the one before it if it would reach past
    /// the line.
    tiles: usize,
    rows: usize,
    /// Pixels of a line from the start of one output row to the start of the next.
    pitch: usize,
}

impl Grid {
    /// Image, line and first pixel of tile `t`.
    fn place(&self, t: usize) -> (usize, usize, usize) {
        let (line, k) = (t / self.tiles, t % self.tiles);
        (line / self.lines, line % self.lines, (k * self.rows).min(self.pixels - self.rows))
    }
}

/// One or two tiles of pixels: their images, lines and first pixels, and the addresses that their first taps
/// read.
#[derive(Clone, Copy)]
struct Pair {
    n: usize,
    places: [(usize, usize, usize); 2],
    at: [*const u8; 2],
    pixel: usize,
}

/// The state of a thread within a part: two buffers for sums, and the pair whose epilogue has not run yet.
struct Line {
    sums: [*mut f32; 2],
    last: Option<(Pair, usize, *mut f32)>,
    g: Grid,
    p: Part,
}

impl Job<'_> {
    fn grid(&self, p: &Part) -> Grid {
        let (b, s, r) = (self.b, &self.b.stage, &p.rect);
        let (rows, cols) = (r.rows.1 - r.rows.0, r.cols.1 - r.cols.0);
        let (lines, pixels, line, pitch) = match (p.pixels, b.inner) {
            (Some((first, end)), _) => (end - first, p.images.1 - p.images.0, 0, 1),
            (None, 1) => (rows, cols, b.conv.window.stride[1] * s.width * s.pixel, cols),
            (None, _) => (1, (rows - 1) * s.width + cols, 0, s.width),
        };
        let tiles = pixels.div_ceil(PIXELS);
        Grid { lines, pixels, line, tiles, rows: pixels.div_ceil(tiles), pitch }
    }

    /// Computes a part. `x` is the address that the first image's first pixel reads; images are `image` bytes
    /// apart.
    ///
    /// # Safety
    /// `x` covers all input that the taps of the part's pixels read, in all images of the part; the job's
    /// operands are valid as [`Blocked16::run`] describes; no other thread writes this part of the output.
    pub(super) unsafe fn part(&self, x: *const u8, image: usize, p: Part) {
        let b = self.b;
        let g = self.grid(&p);
        #[cfg(target_arch = "x86_64")]
        let _tiles = (b.code == Bf16Code::Tiles).then(|| amx::Tiles::new(&config(g.rows, b.pairs)));
        let images = if p.pixels.is_some() { 1 } else { p.images.1 - p.images.0 };
        let all = images * g.lines * g.tiles;
        let passes = all.div_ceil(2);
        // The weights of the next block are prefetched while this one is computed.
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
        // The epilogue of one pair of tiles runs while the products of the next pair are in progress.
        let mut sums = [const { MaybeUninit::<Sums>::uninit() }; 2];
        let mut line = Line { sums: sums.each_mut().map(|s| s.as_mut_ptr() as *mut f32), last: None, g, p };
        // SAFETY: the contract covers all tiles of the part; `line` has room for the sums of two pairs, and
        // the tile registers were configured above if they are used.
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

    /// Tiles `t` and `t + 1`, or only tile `t` if it is the last of the `all` tiles.
    #[inline]
    fn tiles(&self, line: &Line, x: *const u8, image: usize, (t, all): (usize, usize)) -> Pair {
        let (b, g) = (self.b, &line.g);
        let n = (all - t).min(2);
        let places = [g.place(t), g.place(t + n - 1)];
        if let Some((from, _)) = line.p.pixels {
            let at = places.map(|(_, l, first)| {
                let (row, col) = ((from + l) / b.conv.window.output[2], (from + l) % b.conv.window.output[2]);
                x.wrapping_add(first * image + (row * b.stage.width + col) * PIXEL)
            });
            return Pair { n, places, at, pixel: image };
        }
        let pixel = if b.inner == 1 { b.conv.window.stride[2] * b.stage.pixel } else { PIXEL };
        let at = places.map(|(n, l, first)| x.wrapping_add(n * image + l * g.line + first * pixel));
        Pair { n, places, at, pixel }
    }

    /// Computes the sums of one or two tiles for one output channel block, and runs the epilogue of the
    /// previous pair.
    ///
    /// # Safety
    /// The addresses of `pair` cover what all taps of its pixels read; the job's operands are valid as
    /// [`Blocked16::run`] describes; `line` holds two buffers of [`Sums`], and no other thread writes the
    /// tiles of `line`. If tile registers are used, they are configured for `line.g.rows` rows.
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
        // SAFETY: by contract all steps read inside the input and the weights, and `to` has room for the sums
        // of two tiles. `done` works on the other buffer and does not use tile registers.
        unsafe {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            if b.code == Bf16Code::Tiles {
                let done = || self.done(line);
                match b.bytes {
                    None => on_tiles(&steps, &at[..pair.n], to, done),
                    Some(bytes) if bytes.signed => on_signed_tiles(&steps, &at[..pair.n], to, done),
                    Some(_) => on_unsigned_tiles(&steps, &at[..pair.n], to, done),
                }
            } else {
                self.on_vectors(line, &steps, &at[..pair.n], (ob, to));
            }
            #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
            self.on_vectors(line, &steps, &at[..pair.n], (ob, to));
        }
        line.last = Some((*pair, ob, to));
        line.sums.swap(0, 1);
    }

    /// [`Job::pair`] without tile registers.
    ///
    /// # Safety
    /// The contract of [`Job::pair`]; `to` is the buffer of sums that is not in `line.last`.
    unsafe fn on_vectors(
        &self,
        line: &Line,
        steps: &Steps<'_>,
        at: &[*const u8],
        (ob, to): (usize, *mut f32),
    ) {
        // SAFETY: `on_vectors` has the contract of `pair`. `vdpbf16ps` is used only if the convolution was
        // made for it, and then this processor has it. The weights of bytes end with the trailer that
        // `Blocked8::pack` wrote.
        unsafe {
            self.done(line);
            match &self.b.bytes {
                None if self.b.code == Bf16Code::Pairs => on_pairs(steps, at, to),
                None => on_vectors(self.isa, steps, at, to),
                Some(bytes) => {
                    let all = self.b.out_blocks();
                    let end = self.w.get().add(all * self.b.block_weights()) as *const i32;
                    let small = *end.add(all * BLOCK) != 0;
                    int8::on_vectors(bytes, small, steps, at, to as *mut i32, end.add(ob * BLOCK));
                }
            }
        }
    }

    /// Applies the epilogue to the sums that were computed last and stores them.
    ///
    /// # Safety
    /// `line.last` is `None` or its sums are complete; the job's output and epilogue operands are valid for
    /// its tiles as [`Blocked16::run`] describes, and no other thread writes them.
    #[inline(always)]
    unsafe fn done(&self, line: &Line) {
        let Some((pair, ob, sums)) = &line.last else { return };
        for (k, place) in pair.places[..pair.n].iter().enumerate() {
            // SAFETY: by contract the sums of all `pair.n` tiles, `rows * BLOCK` floats each, are complete
            // and the output is this thread's.
            unsafe {
                self.tile_done(&line.p, &line.g, *place, *ob, sums.wrapping_add(k * line.g.rows * BLOCK))
            };
        }
    }

    /// Applies scale, bias, residual and activation to the pixels of a tile and stores them. Pixels that lie
    /// between two rows of the output are dropped.
    ///
    /// # Safety
    /// `sums` is readable for `g.rows` pixels and aligned to 64 bytes; the output and epilogue operands are
    /// valid for these pixels and block `ob`, and no other thread writes them.
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
        // The number of output blocks, the block to which these sums belong, and the place of the sums in
        // that block.
        let (blocks, of, part) = match b.bytes {
            None => (b.out_blocks(), ob, 0),
            Some(_) => (b.out_blocks() / 2, ob / 2, ob % 2),
        };
        if let Some((from, _)) = p.pixels {
            for k in 0..g.rows {
                let at = ((p.images.0 + first + k) * blocks + of) * w.out_size() + from + line;
                // SAFETY: `k < g.rows`; pixel `from + line` of this image belongs to the part.
                unsafe { self.finish(1, sums.add(k * BLOCK), ob, (at, part)) };
            }
            return;
        }
        let plane = ((p.images.0 + n) * blocks + of) * w.out_size();
        let cols = p.rect.cols.1 - p.rect.cols.0;
        let mut done = 0;
        while done < g.rows {
            let (row, col) = ((first + done) / g.pitch, (first + done) % g.pitch);
            let run = (g.pitch - col).min(g.rows - done);
            let useful = cols.saturating_sub(col).min(run);
            if useful > 0 {
                let at = plane + (p.rect.rows.0 + line + row) * w.output[2] + p.rect.cols.0 + col;
                // SAFETY: `done + useful <= g.rows` pixels of sums are readable, and the pixels from `at` lie
                // in the part's output, which only this thread writes.
                unsafe { self.finish(useful, sums.add(done * BLOCK), ob, (at, part)) };
            }
            done += run;
        }
    }

    /// Applies the epilogue to the sums of `n` pixels, which begin at pixel `at` of the output.
    ///
    /// # Safety
    /// `sums` is readable for `n` pixels; the output and the operands of the epilogue are valid for these
    /// pixels, and no other thread writes them.
    #[inline(always)]
    unsafe fn finish(&self, n: usize, sums: *const f32, ob: usize, (at, part): (usize, usize)) {
        let channel = |v: SharedConst<f32>| match v.get().is_null() {
            true => v.get(),
            false => v.get().wrapping_add(ob * BLOCK),
        };
        match &self.after {
            After::Half(after) => {
                let residual = Place { at: after.residual.get() as *mut u8, wide: after.residual_wide };
                let f = Bf16TileEpilogue {
                    scale: channel(after.scale),
                    bias: channel(after.bias),
                    residual: residual.after(at * BLOCK),
                    act: after.act,
                    y: Place { at: self.y.get(), wide: after.wide }.after(at * BLOCK),
                };
                // SAFETY: by contract `sums`, the output and the operands are valid for these `n` pixels, as
                // the function `finish` of the tile requires.
                unsafe { finish(self.isa, self.bf16, n, sums, &f) }
            }
            After::Bytes(after) => {
                let first = 2 * at * BLOCK + part * BLOCK;
                let residual = after.residual.get();
                let f = ByteTile {
                    scale: channel(after.scale),
                    bias: channel(after.bias),
                    residual: if residual.is_null() { residual } else { residual.wrapping_add(first) },
                    act: after.act,
                    to: after.to,
                    y: self.y.get().wrapping_add(first * after.to.size()),
                };
                // SAFETY: by contract the pointers are valid for these `n` pixels. For bytes, `sums` points
                // to i32 sums.
                unsafe { int8::finish(self.isa, n, sums as *const i32, &f) }
            }
        }
    }
}
