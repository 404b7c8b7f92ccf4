//! The tiled attention kernel, for prompts (many queries) on GPUs without matrix units.

use super::super::common::*;
use super::problem::Io;
use super::running::Running;
use super::{Cx, NEG_INF};
use crate::kernel::lower::Lowered;
use crate::kernel::{Buf, Builder, E};
use crate::target::Declined;

/// The numbers of queries and keys in a tile, which a workgroup of 128 work-items computes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Tile {
    pub queries: u32,
    pub keys: u32,
}

const TILE_ITEMS: u32 = 128;

impl Tile {
    pub(super) fn choose(cx: &Cx<'_>) -> Option<Tile> {
        [(16, 32), (8, 16)].map(|(queries, keys)| Tile { queries, keys }).into_iter().find(|t| t.legal(cx))
    }

    pub(super) fn legal(self, cx: &Cx<'_>) -> bool {
        let words = (self.queries + self.keys) * (cx.p.width + 1) + 2 * self.queries * (self.keys + 1);
        // Each work-item keeps its columns in variables; more than sixteen would spill.
        let columns = cx.p.width * self.queries / TILE_ITEMS;
        // The work-items of one query share its keys and columns evenly.
        let items_per_query = TILE_ITEMS / self.queries;
        let even = self.keys.is_multiple_of(items_per_query) && cx.p.width.is_multiple_of(items_per_query);
        even && columns <= 16 && cx.caps.max_workgroup >= TILE_ITEMS && cx.fits(words)
    }
}

impl Cx<'_> {
    /// Each workgroup computes one tile of queries. It reads the keys, and then the values, through workgroup
    /// memory.
    pub(super) fn tiled(&self, args: Args, t: Tile) -> Result<Lowered, Declined> {
        let (n, pitch, row_pitch) = (TILE_ITEMS, self.p.width + 1, t.keys + 1);
        // Work-items per query, and columns of each work-item.
        let items_per_query = n / t.queries;
        let columns = self.p.width / items_per_query;
        let b = Builder::with_index("attention_tiled", [n, 1, 1], self.ix);
        let io = Io::declare(&b, self);
        let queries = b.local(self.ty, t.queries * pitch);
        let tile = b.local(self.ty, t.keys * pitch);
        let (scores, weights) =
            (b.local(self.ty, t.queries * row_pitch), b.local(self.ty, t.queries * row_pitch));
        let rows = b.let_(io.shared * io.sq);
        let tiles = b.let_(rows.div_ceil(t.queries));
        let g = b.let_(b.linear_group());
        b.if_(g.lt(io.bh * tiles), || {
            let lid = b.local_id(0);
            let (bk, r0) = (b.let_(g.idiv(tiles)), b.let_(g.imod(tiles) * t.queries));
            let (k0, v0) = io.heads(bk);
            let (r, m) = (b.let_(lid.idiv(items_per_query)), b.let_(lid.imod(items_per_query)));
            // Rows past the end repeat the last row; their stores are skipped.
            let mine = io.query(bk, b.let_((r0 + r).min(rows - 1)));
            for step in 0..columns {
                let j = m + step * items_per_query;
                queries.store(r * pitch + j, b.load_if(io.q, mine.q + j, j.lt(io.d)));
            }
            // The largest number of keys that a query of the tile attends to.
            let end = if io.causal {
                let last = b.let_((r0 + (t.queries - 1)).min(rows - 1));
                let one_head = r0.idiv(io.sq).equals(last.idiv(io.sq));
                let i = one_head.select(last.imod(io.sq), io.sq - 1);
                b.let_((i + 1 + io.sk - io.sq).min(io.sk))
            } else {
                io.sk
            };
            let fill = |buf: Buf, start: E<'_>, stride: E<'_>, first: E<'_>| {
                for step in 0..(t.keys * self.p.width / n) {
                    let e = lid + step * n;
                    let (c, j) = (e.idiv(self.p.width), e.imod(self.p.width));
                    let key = first + c;
                    let v = b.load_if(buf, start + key * stride + j, key.lt(io.sk).and(j.lt(io.d)));
                    tile.store(c * pitch + j, v);
                }
            };
            let run = Running::new(&b, self.ty);
            let acc: Vec<_> = (0..columns).map(|_| b.var_of(self.ty, 0)).collect();
            b.for_(0, end, t.keys, |first| {
                b.barrier();
                fill(io.k, k0, io.ks[2], first);
                b.barrier();
                let dots: Vec<_> = (0..t.keys / items_per_query).map(|_| b.var_of(self.ty, 0)).collect();
                b.for_(0, io.d, 1, |j| {
                    let x = queries.load(r * pitch + j);
                    for (s, dot) in dots.iter().enumerate() {
                        let c = m + s as u32 * items_per_query;
                        dot.set(x.mul_add(tile.load(c * pitch + j), dot.get()));
                    }
                });
                let mut own = vec![];
                for (s, dot) in dots.iter().enumerate() {
                    let c = m + s as u32 * items_per_query;
                    let v = io.score(&mine, first + c, dot.get());
                    scores.store(r * row_pitch + c, v);
                    own.push((c, v));
                }
                b.barrier();
                let top = b.var_of(self.ty, NEG_INF);
                b.for_(0, t.keys, 1, |c| top.set(top.get().max(scores.load(r * row_pitch + c))));
                let (shift, decay) = run.raise(top.get());
                for (c, v) in own {
                    weights.store(r * row_pitch + c, (v - shift).exp());
                }
                fill(io.v, v0, io.vs[2], first);
                b.barrier();
                for a in &acc {
                    a.set(a.get() * decay);
                }
                b.for_(0, t.keys, 1, |c| {
                    let w = weights.load(r * row_pitch + c);
                    run.add(w);
                    for (s, a) in acc.iter().enumerate() {
                        let v = tile.load(c * pitch + m + s as u32 * items_per_query);
                        a.set(w.mul_add(v, a.get()));
                    }
                });
            });
            b.if_((r0 + r).lt(rows), || {
                for (s, a) in acc.iter().enumerate() {
                    let j = m + s as u32 * items_per_query;
                    b.if_(j.lt(io.d), || b.store(io.y, mine.y + j, a.get() / run.sum.get()));
                }
            });
        });
        let tiles = (self.p.shared * self.p.sq).div_ceil(t.queries as usize);
        single(b, &args, self.p.b * self.p.hk * tiles, self.caps)
    }
}
