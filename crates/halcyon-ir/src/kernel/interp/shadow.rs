//! Shadow memory: the last reader and writer of each byte of a buffer and each word of workgroup memory, and
//! the epochs of their accesses. An epoch is the time between two barriers of a workgroup.

use super::Fault;
use crate::kernel::ir::BufId;

const NO_ITEM: u32 = u32::MAX;
/// A reader that stands for several work-items of one workgroup in one epoch.
const SEVERAL_ITEMS: u32 = u32::MAX - 1;
/// A reader that stands for work-items of several workgroups.
const GROUPS: u32 = u32::MAX - 2;

#[derive(Clone, Copy)]
struct Cell {
    writer: u32,
    write_epoch: u32,
    reader: u32,
    read_epoch: u32,
    /// Workgroup of the readers if `reader` is [`SEVERAL_ITEMS`].
    read_group: u32,
    set: bool,
    atomic: bool,
}

const CLEAN: Cell = Cell {
    writer: NO_ITEM,
    write_epoch: 0,
    reader: NO_ITEM,
    read_epoch: 0,
    read_group: 0,
    set: false,
    atomic: false,
};

pub(super) struct Shadow {
    global: Vec<Vec<Cell>>,
    local: Vec<Cell>,
    global_epoch: u32,
    local_epoch: u32,
}

type Found = Option<(Fault, Option<u32>)>;

impl Cell {
    fn read(&mut self, item: u32, items: u32, epoch: u32) -> Found {
        let group = item / items;
        let mut found = None;
        let w = self.writer;
        if w != NO_ITEM && w != item && (w / items != group || self.write_epoch == epoch) {
            found = Some((Fault::Race, Some(w)));
        }
        if !self.set {
            found = Some((Fault::Uninitialised, None));
        }
        let other = self.reader != NO_ITEM && self.reader != GROUPS && {
            let g = if self.reader == SEVERAL_ITEMS { self.read_group } else { self.reader / items };
            g != group
        };
        if self.reader == GROUPS || other {
            self.reader = GROUPS;
        } else if self.reader == NO_ITEM || self.read_epoch != epoch {
            self.reader = item;
        } else if self.reader != item {
            self.reader = SEVERAL_ITEMS;
        }
        self.read_epoch = epoch;
        self.read_group = group;
        found
    }

    fn write(&mut self, item: u32, items: u32, epoch: u32, atomic: bool) -> Found {
        let group = item / items;
        let mut found = None;
        let w = self.writer;
        let both_atomic = atomic && self.atomic;
        if w != NO_ITEM && w != item && !both_atomic && (w / items != group || self.write_epoch == epoch) {
            found = Some((Fault::Race, Some(w)));
        }
        match self.reader {
            NO_ITEM => {}
            GROUPS => found = Some((Fault::Race, None)),
            SEVERAL_ITEMS if self.read_group != group || self.read_epoch == epoch => {
                found = Some((Fault::Race, None))
            }
            SEVERAL_ITEMS => {}
            r if r != item && (r / items != group || self.read_epoch == epoch) => {
                found = Some((Fault::Race, Some(r)))
            }
            _ => {}
        }
        self.writer = item;
        self.write_epoch = epoch;
        self.set = true;
        self.atomic = atomic;
        found
    }
}

impl Shadow {
    pub(super) fn new(sizes: &[usize], poisoned: &[BufId], local_words: usize) -> Shadow {
        let global = sizes
            .iter()
            .enumerate()
            .map(|(i, &n)| vec![Cell { set: !poisoned.iter().any(|p| p.ix() == i), ..CLEAN }; n])
            .collect();
        Shadow { global, local: vec![CLEAN; local_words], global_epoch: 0, local_epoch: 0 }
    }

    pub(super) fn new_group(&mut self) {
        self.local.fill(CLEAN);
        // The item index tells workgroups apart, so epochs need to differ only within a workgroup.
        self.global_epoch = 0;
        self.local_epoch = 0;
    }

    pub(super) fn barrier(&mut self, global: bool) {
        self.local_epoch += 1;
        self.global_epoch += global as u32;
    }

    pub(super) fn read(&mut self, buf: usize, at: usize, bytes: usize, item: u32, items: u32) -> Found {
        let epoch = self.global_epoch;
        let cells = &mut self.global[buf][at..at + bytes];
        cells.iter_mut().fold(None, |found, c| c.read(item, items, epoch).or(found))
    }

    pub(super) fn write(
        &mut self,
        buf: usize,
        at: usize,
        bytes: usize,
        item: u32,
        items: u32,
        atomic: bool,
    ) -> Found {
        let epoch = self.global_epoch;
        let cells = &mut self.global[buf][at..at + bytes];
        cells.iter_mut().fold(None, |found, c| c.write(item, items, epoch, atomic).or(found))
    }

    /// `item` is the index in the workgroup, because workgroup memory is visible to one workgroup only.
    /// [`SEVERAL_ITEMS`] takes the place of the number of items per workgroup. It is above every index, so
    /// all items are in group 0.
    pub(super) fn read_local(&mut self, word: usize, words: usize, item: u32) -> Found {
        let epoch = self.local_epoch;
        let cells = &mut self.local[word..word + words];
        cells.iter_mut().fold(None, |found, c| c.read(item, SEVERAL_ITEMS, epoch).or(found))
    }

    /// Marks a word as never written.
    pub(super) fn forget_local(&mut self, word: usize) {
        self.local[word].set = false;
    }

    pub(super) fn write_local(&mut self, word: usize, words: usize, item: u32) -> Found {
        let epoch = self.local_epoch;
        let cells = &mut self.local[word..word + words];
        cells.iter_mut().fold(None, |found, c| c.write(item, SEVERAL_ITEMS, epoch, false).or(found))
    }
}
