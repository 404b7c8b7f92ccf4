//! The product of rows and weights: how its work is cut into parts.

use super::floats;
use super::ints::{self, Path};
use super::layout::{CHUNK, GROUP, Layout, PANEL};
use super::quantise::{Form, quantise, record_bytes};
use super::rows::{Room, Rows, Tile, Used};
#[cfg(target_arch = "x86_64")]
use super::tiles;
use crate::cpu::library::simd::{Simd, Storage, dispatch_simd};
use crate::cpu::sys::Isa;
use crate::cpu::team::{AssertSync, SharedConst, SharedMut, Team};
use halcyon_ir::blocks::BlockType;
use half::{bf16, f16};

/// Fewest bytes of weights that a part of the work reads.
const GRAIN: usize = 32 << 10;
/// Fewest activations that a part arranges.
const FEW: usize = 16 << 10;
/// Panels that are multiplied with one tile before the next, if all are packed: the tile then stays in the
/// cache.
const AT_ONCE: usize = 4;
/// The same for panels that are packed or widened first, which takes scratch memory.
const PREPARED: usize = 2;
/// With this many rows of a matrix, panels of f16 and bf16 are widened once for all tiles.
const MANY: usize = 24;

/// The type of the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Weights {
    F32,
    F16,
    BF16,
    Blocks(BlockType),
}

/// The sizes of a product: rows, outputs, elements that are summed, and matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub matrices: usize,
}

/// A product and the instructions that compute it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub size: Size,
    pub weights: Weights,
    /// Whether activations are rounded to 15 bits and not to 8, if the weights have blocks.
    pub fine: bool,
    pub isa: Isa,
    pub path: Path,
}

/// The operands of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    /// `[m, k]`.
    pub x: *const f32,
    /// The weights as they are stored, `[matrices, n, ..]`, or what [`Product::pack`] wrote.
    pub w: *const u8,
    pub packed: bool,
    /// `[m, n]`.
    pub y: *mut f32,
    /// [`Product::workspace`] bytes, aligned to 4.
    pub work: *mut u8,
}

/// What the parts of a product share.
#[derive(Clone, Copy)]
struct Job<'a> {
    o: Operands,
    rows: Rows<'a>,
    /// The rows of `x`, arranged for the kernel.
    x: *const u8,
}

impl Product {
    /// `k` of weights in blocks is a multiple of the block.
    pub(super) fn new(isa: Isa, size: Size, weights: Weights) -> Product {
        let path = Path::all(isa).next().unwrap_or(Path::Plain);
        Product { size, weights, fine: false, isa, path }
    }

    /// The instructions and the type of the weights, for the name of the kernel.
    pub(super) fn name(&self) -> String {
        match self.weights {
            Weights::Blocks(b) => format!("{b}.{}{}", self.path.name(), if self.fine { ".fine" } else { "" }),
            Weights::F32 => format!("f32.{}", self.isa.name()),
            Weights::F16 => format!("f16.{}", self.isa.name()),
            Weights::BF16 => format!("bf16.{}", self.isa.name()),
        }
    }

    /// Identifies the packed form of the weights. It is the same for all instruction sets. The number is that
    /// of the layout.
    pub(super) fn key(&self) -> String {
        let Size { n, k, matrices, .. } = self.size;
        format!("linear 1 {:?} {matrices} {n} {k}", self.weights)
    }

    fn panels(&self) -> usize {
        self.size.n.div_ceil(PANEL)
    }

    fn groups(&self) -> usize {
        self.size.k / GROUP
    }

    fn panel_bytes(&self) -> usize {
        match self.weights {
            Weights::F32 => floats::panel_bytes::<f32>(self.size.k),
            Weights::F16 | Weights::BF16 => floats::panel_bytes::<f16>(self.size.k),
            Weights::Blocks(b) => Layout::of(b).bytes(self.groups()),
        }
    }

    /// Bytes of a row of weights as they are stored.
    fn row_bytes(&self) -> usize {
        match self.weights {
            Weights::F32 => self.size.k * size_of::<f32>(),
            Weights::F16 | Weights::BF16 => self.size.k * size_of::<f16>(),
            Weights::Blocks(b) => b.bytes_of(self.size.k).unwrap_or(0),
        }
    }

    /// Bytes of the packed weights, a multiple of 64. `None` if they overflow.
    pub(super) fn packed_bytes(&self) -> Option<usize> {
        self.panels().checked_mul(self.size.matrices)?.checked_mul(self.panel_bytes())
    }

    /// Bytes of an arranged row of `x`.
    fn arranged(&self) -> usize {
        match self.weights {
            Weights::Blocks(b) => {
                let record = record_bytes(self.path.words(&Layout::of(b)));
                self.groups() * record * if self.fine { 2 } else { 1 }
            }
            _ => self.size.k * size_of::<f32>(),
        }
    }

    fn room(&self) -> Room {
        Room { rows: self.size.m, matrices: self.size.matrices }
    }

    /// Bytes of the workspace. It begins with `m` numbers of matrices.
    pub(super) fn workspace(&self) -> usize {
        self.before_rows() + self.size.m * self.arranged()
    }

    /// Bytes of the workspace before the arranged rows.
    fn before_rows(&self) -> usize {
        ((self.size.m + self.room().words()) * size_of::<u32>()).next_multiple_of(64)
    }

    /// Packs the weights of all matrices.
    ///
    /// # Safety
    /// The weights are readable as they are stored. `to` is writable for [`Product::packed_bytes`] and
    /// overlaps nothing else.
    pub(super) unsafe fn pack(&self, team: &Team, from: *const u8, to: *mut u8) {
        let (from, to, panels) = (SharedConst(from), SharedMut(to), self.panels());
        team.ranges(panels * self.size.matrices, 1, &|a, b| {
            for i in a..b {
                let to = to.get().wrapping_add(i * self.panel_bytes());
                // SAFETY: by contract all weights are readable; each panel has its own place in `to`.
                unsafe { self.pack_panel(from.get(), i / panels, i % panels, to) };
            }
        });
    }

    /// Packs panel `j` of a matrix.
    ///
    /// # Safety
    /// All weights at `from` are readable, and the matrix has this panel. `to` is writable for a panel and
    /// overlaps nothing else.
    unsafe fn pack_panel(&self, from: *const u8, matrix: usize, j: usize, to: *mut u8) {
        let Size { n, k, .. } = self.size;
        let rows = (n - j * PANEL).min(PANEL);
        // SAFETY: by contract the matrix has `rows` rows from `j * PANEL` on, and `to` has room for a panel.
        unsafe {
            let from = from.add((matrix * n + j * PANEL) * self.row_bytes());
            match self.weights {
                Weights::F32 => floats::pack(from.cast::<f32>(), rows, k, to),
                Weights::F16 | Weights::BF16 => floats::pack(from.cast::<u16>(), rows, k, to),
                Weights::Blocks(b) => Layout::of(b).pack(from, rows, self.groups(), to),
            }
        }
    }

    /// Computes the product. If `chosen`, the workspace begins with the number of the matrix of each row.
    ///
    /// # Safety
    /// The operands are as [`Operands`] says and overlap nothing that is written. The numbers of matrices are
    /// less than `matrices`.
    pub(super) unsafe fn run(&self, team: &Team, o: Operands, chosen: bool) {
        let Size { m, n, k, .. } = self.size;
        if m == 0 || n == 0 {
            return;
        }
        if k == 0 {
            // SAFETY: by contract the results are writable. Zero bytes are 0.
            unsafe { o.y.write_bytes(0, m * n) };
            return;
        }
        // SAFETY: by contract the workspace begins with `m` numbers if `chosen`. The lists follow them, and
        // the arranged rows follow the lists.
        let (rows, x) = unsafe {
            let which = chosen.then(|| std::slice::from_raw_parts(o.work.cast::<u32>(), m));
            let rows = Rows::new(self.room(), which, self.sizes(), o.work.cast::<u32>().add(m));
            (rows, o.work.add(self.before_rows()))
        };
        // SAFETY: parts arrange the rows of their own tiles, and write results of their own panels.
        let job = unsafe { AssertSync::new(Job { o, rows, x }) };
        let to = SharedMut(x);
        let each = FEW.div_ceil(k * rows.tiles[0].rows as usize);
        team.ranges(rows.tiles.len(), each, &|a, b| {
            for tile in &job.get().rows.tiles[a..b] {
                // SAFETY: the tile has `arranged` bytes for each of its rows, and no other tile has them.
                unsafe { self.arrange(job.get(), *tile, to.get()) };
            }
        });
        let total = rows.used.len() * self.panels();
        let parts = match team.threads() {
            1 => 1,
            threads => (total * self.panel_bytes() / GRAIN).clamp(1, threads * 4).min(total),
        };
        let scratch = self.scratch(o.packed, &rows);
        let memory = team.scratch((scratch * team.threads()).div_ceil(size_of::<f32>()));
        let memory = SharedMut(memory.ptr().cast::<u8>());
        team.run_with(parts, &|worker, part| {
            let (mut a, end) = (total * part / parts, total * (part + 1) / parts);
            while a < end {
                let (used, j) = (job.get().rows.used[a / self.panels()], a % self.panels());
                let some = (self.panels() - j).min(end - a);
                // SAFETY: each part has its own panels, and each worker its own scratch memory.
                unsafe {
                    self.segment(job.get(), used, (j, j + some), memory.get().add(worker * scratch));
                }
                a += some;
            }
        });
    }

    /// Bytes of scratch memory of a worker, a multiple of 64.
    fn scratch(&self, packed: bool, rows: &Rows<'_>) -> usize {
        let raw = if packed { 0 } else { PREPARED * self.panel_bytes() };
        let widens = rows.used.iter().any(|u| self.widens(rows, *u));
        let widened = if widens { PREPARED * floats::panel_bytes::<f32>(self.size.k) } else { 0 };
        let registers = rows.used.iter().any(|u| self.on_registers(rows.tiles_of(*u)) > 0);
        raw + widened + if registers { self.registers_scratch() } else { 0 }
    }

    /// How many tiles of a matrix are multiplied by tile registers. They come first.
    fn on_registers(&self, tiles: &[Tile]) -> usize {
        let most = self.sizes()[0];
        match self.weights {
            Weights::Blocks(_) if self.path.has_registers() => {
                tiles.iter().take_while(|t| t.rows as usize == most).count()
            }
            _ => 0,
        }
    }

    /// Bytes of scratch memory for tile registers, a multiple of 64.
    fn registers_scratch(&self) -> usize {
        match self.weights {
            #[cfg(target_arch = "x86_64")]
            Weights::Blocks(b) => {
                let panel = tiles::prepared_bytes(&Layout::of(b), self.groups());
                AT_ONCE * panel + tiles::work_bytes(AT_ONCE)
            }
            _ => 0,
        }
    }

    /// Whether the panels of a matrix are widened to f32 first.
    fn widens(&self, rows: &Rows<'_>, u: Used) -> bool {
        let of = rows.tiles_of(u).iter().map(|t| t.rows as usize).sum::<usize>();
        matches!(self.weights, Weights::F16 | Weights::BF16) && of >= MANY
    }

    fn sizes(&self) -> &'static [usize] {
        match self.weights {
            Weights::Blocks(_) => self.path.sizes(self.fine),
            _ => floats::sizes(self.isa),
        }
    }

    /// Arranges the rows of a tile of `x`.
    ///
    /// # Safety
    /// `x` is readable, and `to` is writable for all arranged rows; no other thread uses those of this tile.
    unsafe fn arrange(&self, job: &Job<'_>, tile: Tile, to: *mut u8) {
        let (k, first) = (self.size.k, tile.first as usize);
        // SAFETY: by contract the tile's rows are readable and have `arranged` bytes each in `to`.
        unsafe {
            let (rows, to) = (job.rows.order.as_ptr().add(first), to.add(first * self.arranged()));
            match self.weights {
                Weights::Blocks(b) => {
                    let l = Layout::of(b);
                    let form = Form {
                        fine: self.fine,
                        words: self.path.words(&l),
                        halves: l.halves(),
                        offset: l.offset(),
                        zero: self.path.zero(&l),
                    };
                    quantise(self.isa, job.o.x, k, rows, tile, form, to);
                    #[cfg(target_arch = "x86_64")]
                    if self.path.has_registers() && tile.rows as usize == self.sizes()[0] {
                        tiles::collect(to, self.groups());
                    }
                }
                _ => floats::arrange(job.o.x, k, rows, tile.rows as usize, to.cast()),
            }
        }
    }

    /// Multiplies panels `panels.0 .. panels.1` of a matrix with its rows.
    ///
    /// # Safety
    /// The operands are as [`Operands`] says, the rows are arranged, no other thread writes these columns of
    /// these rows, and `scratch` has the bytes of [`Product::scratch`], which no other thread uses.
    unsafe fn segment(&self, job: &Job<'_>, u: Used, panels: (usize, usize), scratch: *mut u8) {
        let widens = self.widens(&job.rows, u);
        let most = if widens || !job.o.packed { PREPARED } else { AT_ONCE };
        let (bytes, matrix) = (self.panel_bytes(), u.matrix as usize);
        for j in (panels.0..panels.1).step_by(most) {
            let some = (panels.1 - j).min(most);
            // SAFETY: the matrix has these panels. `scratch` has room for `PREPARED` panels as they are
            // stored, unless the weights are packed, and then for as many in f32, if they are widened, or for
            // what tile registers take.
            unsafe {
                let mut w = job.o.w.wrapping_add((matrix * self.panels() + j) * bytes);
                let mut room = scratch;
                if !job.o.packed {
                    for p in 0..some {
                        self.pack_panel(job.o.w, matrix, j + p, room.add(p * bytes));
                    }
                    (w, room) = (room, room.add(PREPARED * bytes));
                }
                let y = job.o.y.add(j * PANEL);
                match self.weights {
                    Weights::F32 => self.floats::<f32>(job, u, (w, some), y, j),
                    Weights::F16 if widens => self.widened::<f16>(job, u, (w, some), room, j),
                    Weights::BF16 if widens => self.widened::<bf16>(job, u, (w, some), room, j),
                    Weights::F16 => self.floats::<f16>(job, u, (w, some), y, j),
                    Weights::BF16 => self.floats::<bf16>(job, u, (w, some), y, j),
                    Weights::Blocks(b) => self.blocks(job, u, (w, some), &Layout::of(b), room, j),
                }
            }
        }
    }

    /// Multiplies `w.1` panels at `w.0`, of which the first is panel `j`, with all tiles of a matrix.
    ///
    /// # Safety
    /// The contract of [`Product::segment`]; the panels are packed. `room` is what follows them in the
    /// scratch memory.
    unsafe fn blocks(
        &self,
        job: &Job<'_>,
        u: Used,
        w: (*const u8, usize),
        l: &Layout,
        room: *mut u8,
        j: usize,
    ) {
        let Some(functions) = self.path.tiles_for(l) else { return };
        let (n, all) = (self.size.n, job.rows.tiles_of(u));
        let many = self.on_registers(all);
        #[cfg(target_arch = "x86_64")]
        if many > 0 {
            // SAFETY: this function has the contract of `registers`, and `scratch` has counted its memory.
            unsafe { self.registers(job, &all[..many], w, l, room, j) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = room;
        let sizes = &self.sizes()[usize::from(self.path.has_registers())..];
        for tile in &all[many..] {
            let first = tile.first as usize;
            let size = sizes.iter().position(|s| *s == tile.rows as usize).unwrap_or(0);
            for p in 0..w.1 {
                let column = (j + p) * PANEL;
                // SAFETY: the tile's rows are arranged at `first`, and the results of these rows and of the
                // panel's columns are writable. `self.path` is available. `size` is that of the tile: sizes
                // of fine tiles are halves of the first of the others.
                unsafe {
                    functions[size](&ints::Task {
                        layout: l,
                        scales: l.scales(CHUNK),
                        chunk: l.chunk(CHUNK),
                        decode: self.path.decode(),
                        groups: self.groups(),
                        panel: w.0.add(p * self.panel_bytes()),
                        x: job.x.add(first * self.arranged()),
                        rows: job.rows.order.as_ptr().add(first),
                        pairs: self.fine,
                        y: job.o.y.add(column),
                        stride: n,
                        columns: (n - column).min(PANEL),
                    });
                }
            }
        }
    }

    /// Multiplies `w.1` panels at `w.0`, of which the first is panel `j`, with tiles of the largest size by
    /// tile registers.
    ///
    /// # Safety
    /// The contract of [`Product::blocks`]; `room` has [`Product::registers_scratch`] bytes, and the path has
    /// tile registers.
    #[cfg(target_arch = "x86_64")]
    unsafe fn registers(
        &self,
        job: &Job<'_>,
        tiles: &[Tile],
        w: (*const u8, usize),
        l: &Layout,
        room: *mut u8,
        j: usize,
    ) {
        let Some(prepare) = ints::prepare_of(l) else { return };
        let bytes = tiles::prepared_bytes(l, self.groups());
        // SAFETY: by contract the panels are packed, `room` has room for `AT_ONCE` of them prepared and for
        // the working memory, and the results of these rows and columns are writable.
        unsafe {
            for p in 0..w.1 {
                prepare(l, w.0.add(p * self.panel_bytes()), self.groups(), room.add(p * bytes));
            }
            tiles::multiply(&tiles::Task {
                layout: l,
                groups: self.groups(),
                panels: room,
                count: w.1,
                tiles,
                x: job.x,
                arranged: self.arranged(),
                rows: job.rows.order.as_ptr(),
                pairs: self.fine,
                y: job.o.y.add(j * PANEL),
                stride: self.size.n,
                columns: self.size.n - j * PANEL,
                work: room.add(AT_ONCE * bytes),
            });
        }
    }

    /// Widens the panels in `room` first.
    ///
    /// # Safety
    /// The contract of [`Product::floats`]; `room` is writable for as many panels of f32.
    unsafe fn widened<T: Storage>(
        &self,
        job: &Job<'_>,
        u: Used,
        w: (*const u8, usize),
        room: *mut u8,
        j: usize,
    ) {
        let (k, bytes) = (self.size.k, floats::panel_bytes::<f32>(self.size.k));
        // SAFETY: by contract `w` has the panels of `16 k` weights and `room` has place for them in f32.
        unsafe {
            for p in 0..w.1 {
                let from = w.0.add(p * self.panel_bytes()).cast::<T>();
                widen(self.isa, from, k * PANEL, room.add(p * bytes).cast());
            }
            self.floats::<f32>(job, u, (room, w.1), job.o.y.add(j * PANEL), j);
        }
    }

    /// Multiplies `w.1` panels at `w.0`, of which the first is panel `j` with its results at `y`, with all
    /// tiles of a matrix.
    ///
    /// # Safety
    /// The contract of [`Product::segment`]; the panels are packed as elements of `T`.
    unsafe fn floats<T: Storage>(
        &self,
        job: &Job<'_>,
        u: Used,
        w: (*const u8, usize),
        y: *mut f32,
        j: usize,
    ) {
        let Size { n, k, .. } = self.size;
        let bytes = floats::panel_bytes::<T>(k);
        for tile in job.rows.tiles_of(u) {
            let first = tile.first as usize;
            let all = floats::tiles::<T>(self.isa);
            let f = all.iter().find(|f| f.rows == tile.rows as usize).unwrap_or(&all[0]);
            let mut p = 0;
            while p < w.1 {
                let (run, panels) = if p + f.panels <= w.1 { (f.many, f.panels) } else { (f.one, 1) };
                // SAFETY: the tile's rows are arranged at `first`, and the results of these rows and of the
                // panels' columns are writable. `self.isa` is available, and `f` has the tile's rows.
                unsafe {
                    run(&floats::Task {
                        k,
                        panel: w.0.add(p * bytes),
                        panel_bytes: bytes,
                        x: job.x.add(first * self.arranged()).cast(),
                        rows: job.rows.order.as_ptr().add(first),
                        y: y.add(p * PANEL),
                        stride: n,
                        columns: n - (j + p) * PANEL,
                    });
                }
                p += panels;
            }
        }
    }
}

dispatch_simd! {
    /// Widens `n` weights, a multiple of 16.
    ///
    /// # Safety
    /// `from` is readable for `n` weights; `to` is writable for `n` floats and overlaps nothing else.
    unsafe fn widen[T: Storage][T](isa, from: *const T, n: usize, to: *mut f32) = widen_body
}

/// # Safety
/// The contract of `widen`; the calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn widen_body<S: Simd, T: Storage>(from: *const T, n: usize, to: *mut f32) {
    for i in (0..n).step_by(S::W) {
        // SAFETY: by contract `n` weights are readable and `n` floats writable, and `W` divides 16.
        unsafe { S::store(to.add(i), T::load::<S>(from.add(i))) };
    }
}
