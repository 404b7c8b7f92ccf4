//! Which rows a kernel multiplies together: the rows of each matrix, cut into tiles.

/// Rows that are multiplied together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(super) struct Tile {
    /// Place of the first row in the order.
    pub first: u32,
    pub rows: u32,
}

/// A matrix that has rows, and its tiles `tiles.0 .. tiles.1`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(super) struct Used {
    pub matrix: u32,
    pub tiles: (u32, u32),
}

/// Where in the workspace the lists are kept. All are lists of u32, or of structures of u32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub rows: usize,
    pub matrices: usize,
}

impl Room {
    /// Number of u32: the order, the tiles, the matrices and the counts of rows per matrix.
    pub(super) fn words(&self) -> usize {
        let used = self.rows.min(self.matrices);
        self.rows + 2 * self.rows + 3 * used + self.matrices + 1
    }
}

/// The rows in the order in which kernels multiply them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    /// The rows of the first matrix that has any, then those of the next.
    pub order: &'a [u32],
    pub tiles: &'a [Tile],
    pub used: &'a [Used],
}

impl<'a> Rows<'a> {
    /// Sorts the rows by matrix and cuts the rows of each matrix into tiles. `which` has the matrix of each
    /// row; without it, there is one matrix. `sizes` are the numbers of rows that a tile may have, in
    /// descending order; the last is 1.
    ///
    /// # Safety
    /// `room` is writable for [`Room::words`] and aligned to 4 bytes, and nothing else uses it during `'a`.
    /// The numbers in `which` are less than `matrices`.
    pub(super) unsafe fn new(size: Room, which: Option<&[u32]>, sizes: &[usize], room: *mut u32) -> Rows<'a> {
        let m = size.rows;
        // SAFETY: by contract the room has `words` words. They are set to 0 before references to them are
        // made, and the parts do not overlap. `Tile` and `Used` are two and three u32.
        let (order, tiles, used, ends) = unsafe {
            room.write_bytes(0, size.words());
            let most = m.min(size.matrices);
            let (tiles, used) = (room.add(m), room.add(3 * m));
            (
                std::slice::from_raw_parts_mut(room, m),
                std::slice::from_raw_parts_mut(tiles.cast::<Tile>(), m),
                std::slice::from_raw_parts_mut(used.cast::<Used>(), most),
                std::slice::from_raw_parts_mut(used.add(3 * most), size.matrices + 1),
            )
        };
        match which {
            None => {
                order.iter_mut().enumerate().for_each(|(i, o)| *o = i as u32);
                ends[0] = m as u32;
            }
            Some(which) => {
                // `ends[j]` is the place of the next row of matrix `j`; at last it is the end of its rows.
                which.iter().for_each(|j| ends[*j as usize + 1] += 1);
                (1..ends.len()).for_each(|j| ends[j] += ends[j - 1]);
                for (i, j) in which.iter().enumerate() {
                    let at = &mut ends[*j as usize];
                    order[*at as usize] = i as u32;
                    *at += 1;
                }
            }
        }
        let (mut t, mut u, mut first) = (0, 0, 0u32);
        for j in 0..if which.is_some() { size.matrices } else { 1 } {
            let (end, before) = (ends[j], t);
            while first < end {
                let left = (end - first) as usize;
                let rows = sizes.iter().copied().find(|s| *s <= left).unwrap_or(1) as u32;
                tiles[t] = Tile { first, rows };
                (t, first) = (t + 1, first + rows);
            }
            if t > before {
                used[u] = Used { matrix: j as u32, tiles: (before as u32, t as u32) };
                u += 1;
            }
        }
        Rows { order, tiles: &tiles[..t], used: &used[..u] }
    }

    /// The tiles of a used matrix.
    pub(super) fn tiles_of(&self, u: Used) -> &'a [Tile] {
        &self.tiles[u.tiles.0 as usize..u.tiles.1 as usize]
    }
}
