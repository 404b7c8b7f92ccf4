//! Interprets any kernel on the host, one work-item at a time, and checks its memory accesses.
//!
//! A kernel is compiled to flat code over a register file per work-item. Work-items run one after another up
//! to the next barrier or subgroup operation. A seed can shuffle their order. With [`Options::sanitize`], the
//! interpreter checks every access against shadow memory. It then reports uninitialised reads (of workgroup
//! and private memory, and of the buffers in [`Options::poisoned`]) and races. A race is a pair of accesses
//! to the same byte by two work-items without a barrier in between, where at least one access is a write; two
//! atomic accesses are no race. Out-of-bounds accesses are always reported: reads return 0, writes are
//! ignored.

mod code;
mod matrix;
mod parts;
mod scalar;
mod shadow;

use super::ir::*;
use super::{Launch, verify};
use crate::dtype::DType;
use crate::error::{Error, Result};
use code::{Code, Ins, NONE, Reg};
use shadow::Shadow;
use std::fmt;

/// The memory of a kernel's buffers, addressed by byte offset within each buffer. Callers must check bounds
/// with [`Memory::len`] first.
pub trait Memory {
    /// Size of buffer `buf` in bytes.
    fn len(&self, buf: usize) -> usize;
    /// Reads up to eight little-endian bytes.
    fn load(&self, buf: usize, at: usize, bytes: usize) -> u64;
    fn store(&mut self, buf: usize, at: usize, bytes: usize, value: u64);
    fn is_empty(&self, buf: usize) -> bool {
        self.len(buf) == 0
    }
}

impl Memory for [Vec<u8>] {
    fn len(&self, buf: usize) -> usize {
        self.get(buf).map_or(0, |b| b.len())
    }

    fn load(&self, buf: usize, at: usize, bytes: usize) -> u64 {
        let mut w = [0; 8];
        w[..bytes].copy_from_slice(&self[buf][at..at + bytes]);
        u64::from_le_bytes(w)
    }

    fn store(&mut self, buf: usize, at: usize, bytes: usize, value: u64) {
        self[buf][at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
    }
}

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Work-items per subgroup: a power of two from 1 to 64.
    pub subgroup: u32,
    /// Seed that shuffles the order of the work-items and rotates the order of the workgroups; `None` keeps
    /// both orders.
    pub seed: Option<u64>,
    /// Detects uninitialised reads and races.
    pub sanitize: bool,
    /// Buffers whose bytes count as uninitialised until they are written.
    pub poisoned: Vec<BufId>,
    /// Number of reports to keep. Further faults are only counted.
    pub max_reports: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { subgroup: 32, seed: None, sanitize: false, poisoned: vec![], max_reports: 64 }
    }
}

/// The kind of error in an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    OutOfBounds,
    Uninitialised,
    /// Another work-item accesses the same bytes, at least one of the two writes, and no barrier orders them.
    /// Also: the rows of a fragment overlap in the scratch memory of a [`Stmt::FragmentConvert`].
    Race,
    /// [`Expr::IDiv`] or [`Expr::IRem`] with a negative dividend or a divisor that is not positive.
    IndexDivision,
    /// The work-items of a subgroup disagree on a fragment's position in memory or its fill value.
    Divergent,
    /// A fragment's offset or stride in memory is not a multiple of 16 bytes.
    Misaligned,
}

/// The memory that was accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Space {
    Global(BufId),
    Local(LocalId),
    Private(PrivateId),
    /// A fragment.
    Matrix(FragmentId),
    /// No memory involved.
    None,
}

/// One fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Report {
    pub fault: Fault,
    pub space: Space,
    /// Index of the element, vector or word. For an index division, a divergent value, and an offset or
    /// stride of a fragment: the offending value.
    pub index: i64,
    /// Linear index of the work-item in the launch.
    pub item: u32,
    /// The other work-item of a race, if known.
    pub other: Option<u32>,
    /// Position of the statement in text order.
    pub statement: u32,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {:?}[{}] by item {}", self.fault, self.space, self.index, self.item)?;
        if let Some(o) = self.other {
            write!(f, " (and item {o})")?;
        }
        write!(f, ", statement {}", self.statement)
    }
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub reports: Vec<Report>,
    /// Number of faults, including those beyond [`Options::max_reports`].
    pub faults: u64,
    /// Number of instructions executed.
    pub steps: u64,
}

/// A kernel compiled for interpretation.
#[derive(Debug)]
pub struct Interp {
    code: Code,
    kernel: Kernel,
}

impl Interp {
    /// Verifies and compiles a kernel.
    ///
    /// # Errors
    /// The errors of [`verify()`].
    pub fn new(k: &Kernel) -> Result<Interp> {
        verify(k)?;
        Ok(Interp { code: Code::new(k), kernel: k.clone() })
    }

    /// Runs a launch. Buffers are in the kernel's order.
    ///
    /// # Errors
    /// [`Error::Argument`] if the launch or the subgroup size does not match the kernel. [`Error::Internal`]
    /// if work-items wait at different barriers (the verifier excludes this if the kernel has no races on
    /// workgroup memory) or a loop does not advance.
    pub fn run<M: Memory + ?Sized>(&self, launch: &Launch, memory: &mut M, o: &Options) -> Result<Outcome> {
        match &self.kernel.parts {
            Some(p) => self.run_parts(p, launch, memory, o),
            None => self.run_whole(launch, memory, o),
        }
    }

    /// Runs a launch of a kernel without parts.
    fn run_whole<M: Memory + ?Sized>(&self, launch: &Launch, memory: &mut M, o: &Options) -> Result<Outcome> {
        let k = &self.kernel;
        let bad = |what: String| Error::argument(format!("kernel {}", k.name), what);
        if launch.params.len() != k.params.len() {
            return Err(bad(format!(
                "{} parameters given, expected {}",
                launch.params.len(),
                k.params.len()
            )));
        }
        if !o.subgroup.is_power_of_two() || o.subgroup > 64 {
            return Err(bad(format!(
                "the subgroup size is {}, expected a power of two up to 64",
                o.subgroup
            )));
        }
        if let Some(f) = k.fragments.first().filter(|f| f.op.width as u32 != o.subgroup) {
            return Err(bad(format!(
                "the subgroup size is {}, the kernel's fragments need {}",
                o.subgroup, f.op.width
            )));
        }
        let items = k.items() as usize;
        let files = if self.code.sync { items } else { 1 };
        let mut regs = vec![0u64; files * self.code.regs];
        for f in regs.chunks_mut(self.code.regs.max(1)) {
            for &(r, v) in &self.code.constants {
                f[r as usize] = v;
            }
            for (i, p) in k.params.iter().enumerate() {
                f[self.code.params[i] as usize] = scalar::to_reg(p.ty, launch.params[i].cast(p.ty.dtype()));
            }
        }
        let mut order: Vec<u32> = (0..items as u32).collect();
        let mut rng = o.seed.map(|s| s.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let total = launch.groups.iter().map(|&g| g as u64).product::<u64>();
        let sizes: Vec<usize> = (0..k.buffers.len()).map(|b| memory.len(b)).collect();
        let shadow = o.sanitize.then(|| Shadow::new(&sizes, &o.poisoned, self.code.local_words));
        let mut run = Run {
            code: &self.code,
            kernel: k,
            sizes,
            memory,
            shadow,
            regs,
            locals: vec![0; self.code.local_words],
            privates: vec![0; files * self.code.private_words],
            matrices: vec![None; k.fragments.len() * items.div_ceil(o.subgroup as usize)],
            private_set: vec![false; if o.sanitize { files * self.code.private_words } else { 0 }],
            pcs: vec![0; items],
            item: 0,
            base: 0,
            group: 0,
            out: Outcome::default(),
            max_reports: o.max_reports,
            subgroup: o.subgroup,
        };
        // Workgroups may run in any order; a seed rotates the order.
        let first = rng.as_mut().map_or(0, |s| next(s) % total.max(1));
        for g in 0..total {
            let g = (g + first) % total;
            if let Some(s) = &mut rng {
                shuffle(&mut order, s);
            }
            run.group(g, launch.groups, &order)?;
        }
        Ok(run.out)
    }
}

fn next(s: &mut u64) -> u64 {
    *s ^= *s << 13;
    *s ^= *s >> 7;
    *s ^= *s << 17;
    *s
}

fn shuffle(v: &mut [u32], s: &mut u64) {
    for i in (1..v.len()).rev() {
        v.swap(i, (next(s) % (i as u64 + 1)) as usize);
    }
}

#[derive(PartialEq)]
enum Stop {
    Sync,
    Done,
}

struct Run<'a, M: Memory + ?Sized> {
    code: &'a Code,
    kernel: &'a Kernel,
    sizes: Vec<usize>,
    memory: &'a mut M,
    shadow: Option<Shadow>,
    regs: Vec<u64>,
    locals: Vec<u64>,
    privates: Vec<u64>,
    /// The fragments of all subgroups, one subgroup after another; `None` until set.
    matrices: Vec<Option<Vec<f32>>>,
    private_set: Vec<bool>,
    pcs: Vec<u32>,
    /// Local index of the running work-item, and the start of its registers and private arrays.
    item: usize,
    base: usize,
    group: u64,
    out: Outcome,
    max_reports: usize,
    subgroup: u32,
}

impl<M: Memory + ?Sized> Run<'_, M> {
    fn group(&mut self, g: u64, groups: [u32; 3], order: &[u32]) -> Result<()> {
        let (gx, gy) = (groups[0].max(1) as u64, groups[1].max(1) as u64);
        let gid = [g % gx, g / gx % gy, g / gx / gy];
        self.group = g;
        self.pcs.fill(0);
        if let Some(s) = &mut self.shadow {
            s.new_group();
        }
        self.private_set.fill(false);
        self.matrices.fill(None);
        if !self.code.sync {
            for &i in order {
                self.enter(i as usize, 0, gid, groups);
                self.private_set.fill(false);
                self.step()?;
            }
            return Ok(());
        }
        for &i in order {
            self.enter(i as usize, i as usize, gid, groups);
        }
        loop {
            let mut done = 0;
            for &i in order {
                self.item = i as usize;
                self.base = i as usize;
                if self.step()? == Stop::Done {
                    done += 1;
                }
            }
            if done == order.len() {
                return Ok(());
            }
            let pc = self.pcs[0];
            if done > 0 || self.pcs.iter().any(|&p| p != pc) {
                return Err(Error::internal(format!(
                    "kernel {}: work-items wait at different places",
                    self.kernel.name
                )));
            }
            self.meet(pc as usize)?;
            self.pcs.fill(pc + 1);
        }
    }

    fn enter(&mut self, item: usize, file: usize, gid: [u64; 3], groups: [u32; 3]) {
        self.item = item;
        self.base = file;
        self.pcs[item] = 0;
        let w = self.kernel.workgroup;
        let (x, y) = (w[0] as usize, w[1] as usize);
        let lid = [item % x, item / x % y, item / x / y];
        for &(id, r) in &self.code.ids {
            let v = match id {
                Id::Local(d) => lid[d as usize] as u64,
                Id::Group(d) => gid[d as usize],
                Id::Groups(d) => groups[d as usize] as u64,
                Id::Lane => (item % self.subgroup as usize) as u64,
                Id::SubgroupSize => self.subgroup as u64,
            };
            self.regs[file * self.code.regs + r as usize] = v;
        }
    }

    #[inline]
    fn get(&self, r: Reg) -> u64 {
        self.regs[self.base * self.code.regs + r as usize]
    }

    #[inline]
    fn set(&mut self, r: Reg, v: u64) {
        self.regs[self.base * self.code.regs + r as usize] = v
    }

    fn global_item(&self) -> u32 {
        (self.group * self.kernel.items() as u64 + self.item as u64) as u32
    }

    fn report(&mut self, fault: Fault, space: Space, index: i64, other: Option<u32>, pc: usize) {
        self.out.faults += 1;
        if self.out.reports.len() < self.max_reports {
            let (item, statement) = (self.global_item(), self.code.statements[pc]);
            self.out.reports.push(Report { fault, space, index, item, other, statement });
        }
    }

    /// Byte offset of the access if it is in bounds; otherwise reports a fault.
    #[inline]
    fn place(&mut self, buf: u32, index: i64, bytes: usize, pc: usize) -> Option<usize> {
        let size = self.sizes[buf as usize];
        match usize::try_from(index).ok().and_then(|i| i.checked_mul(bytes)) {
            Some(at) if at.checked_add(bytes).is_some_and(|end| end <= size) => Some(at),
            _ => {
                self.report(Fault::OutOfBounds, Space::Global(BufId(buf)), index, None, pc);
                None
            }
        }
    }

    fn load(&mut self, buf: u32, index: i64, bytes: usize, pc: usize) -> u64 {
        let Some(at) = self.place(buf, index, bytes, pc) else {
            return 0;
        };
        if let Some(s) = &mut self.shadow {
            let item = (self.group * self.kernel.items() as u64 + self.item as u64) as u32;
            let found = s.read(buf as usize, at, bytes, item, self.kernel.items());
            if let Some((fault, other)) = found {
                self.report(fault, Space::Global(BufId(buf)), index, other, pc);
            }
        }
        self.memory.load(buf as usize, at, bytes)
    }

    fn store(&mut self, buf: u32, index: i64, bytes: usize, v: u64, atomic: bool, pc: usize) {
        let Some(at) = self.place(buf, index, bytes, pc) else {
            return;
        };
        if let Some(s) = &mut self.shadow {
            let item = (self.group * self.kernel.items() as u64 + self.item as u64) as u32;
            let found = s.write(buf as usize, at, bytes, item, self.kernel.items(), atomic);
            if let Some((fault, other)) = found {
                self.report(fault, Space::Global(BufId(buf)), index, other, pc);
            }
        }
        self.memory.store(buf as usize, at, bytes, v)
    }

    /// Word of a workgroup array element if it is in bounds; otherwise reports a fault.
    fn local_place(&mut self, arr: u32, index: i64, pc: usize) -> Option<usize> {
        let a = self.kernel.locals[arr as usize];
        if index < 0 || index >= a.len as i64 {
            self.report(Fault::OutOfBounds, Space::Local(LocalId(arr)), index, None, pc);
            return None;
        }
        Some(self.code.locals[arr as usize] + index as usize * a.ty.lanes())
    }

    fn private_place(&mut self, arr: u32, index: i64, pc: usize) -> Option<usize> {
        let a = self.kernel.privates[arr as usize];
        if index < 0 || index >= a.len as i64 {
            self.report(Fault::OutOfBounds, Space::Private(PrivateId(arr)), index, None, pc);
            return None;
        }
        let file = if self.code.sync { self.item } else { 0 };
        Some(
            file * self.code.private_words + self.code.privates[arr as usize] + index as usize * a.ty.lanes(),
        )
    }

    /// Runs the current work-item until it ends or has to wait.
    fn step(&mut self) -> Result<Stop> {
        let code = self.code;
        let mut pc = self.pcs[self.item] as usize;
        loop {
            self.out.steps += 1;
            match code.ins[pc] {
                Ins::Un(f, d, a) => self.set(d, f(self.get(a))),
                Ins::Bin(f, d, a, b) => self.set(d, f(self.get(a), self.get(b))),
                Ins::Tri(f, d, a, b, c) => self.set(d, f(self.get(a), self.get(b), self.get(c))),
                Ins::Op(op, ty, d, x) => self.set(d, scalar::eval(op, ty, x.map(|r| self.get(r)))),
                Ins::Cast(to, from, d, a) => self.cast(to, from, d, a),
                Ins::Index(rem, d, a, b) => self.index(rem, d, [a, b], pc),
                Ins::Move(d, a, n) => self.copy(d, a, n),
                Ins::Load { dst, buf, dtype, index, guard } => {
                    self.load_element(dst, (buf, dtype), [index, guard], pc)
                }
                Ins::LoadVector { dst, buf, lanes, index, guard } => {
                    self.load_vector(dst, buf, lanes, [index, guard], pc)
                }
                Ins::LoadWord { dst, buf, index } => self.load_vector(dst, buf, 1, [index, NONE], pc),
                Ins::LoadLocal { dst, arr, lanes, index } => self.load_local(dst, arr, lanes, index, pc),
                Ins::LoadPrivate { dst, arr, lanes, index } => self.load_private(dst, arr, lanes, index, pc),
                Ins::Store { buf, dtype, index, value } => {
                    let v = scalar::store(dtype, self.get(value));
                    self.store(buf, self.get(index) as i64, dtype.size(), v, false, pc)
                }
                Ins::StoreVector { buf, lanes, index, value } => {
                    self.store_vector(buf, lanes, index, value, pc)
                }
                Ins::StoreWord { buf, index, value } => {
                    self.store(buf, self.get(index) as i64, 4, self.get(value), false, pc)
                }
                Ins::StoreLocal { arr, lanes, index, value } => {
                    self.store_local(arr, lanes, index, value, pc)
                }
                Ins::StorePrivate { arr, lanes, index, value } => {
                    self.store_private(arr, lanes, index, value, pc)
                }
                Ins::AtomicAdd { dst, buf, dtype, index, value } => {
                    self.atomic_add(dst, (buf, dtype), index, value, pc)
                }
                Ins::SetError { buf, index, value } => self.set_error(buf, index, value, pc),
                Ins::Jump(to) => {
                    pc = to as usize;
                    continue;
                }
                Ins::JumpUnless(c, to) => {
                    if self.get(c) == 0 {
                        pc = to as usize;
                        continue;
                    }
                }
                Ins::Loop { var, end, step, to } => {
                    self.advances(step)?;
                    // Indexes never exceed 2^63, so a signed comparison is correct for u64 counters too.
                    if self.get(var) as i64 >= self.get(end) as i64 {
                        pc = to as usize;
                        continue;
                    }
                }
                Ins::Next { var, step, to } => {
                    let v = self.get(var).wrapping_add(self.get(step));
                    self.set(var, v);
                    pc = to as usize;
                    continue;
                }
                Ins::Unpack { dtype, dst, word, shift } => self.unpack(dtype, dst, word, shift),
                Ins::Pack { dtype, dst, x } => self.pack(dtype, dst, x),
                Ins::Place { like, round, at, to } => {
                    if !self.next_place(like, round, at) {
                        pc = to as usize;
                        continue;
                    }
                }
                Ins::Element { dst, matrix, at } => {
                    let v = self.element(matrix, at, pc).map_or(0.0, |e| *e);
                    self.set(dst, v.to_bits() as u64)
                }
                Ins::SetElement { matrix, at, value } => self.set_element(matrix, at, value, pc),
                Ins::Barrier { .. }
                | Ins::Reduce { .. }
                | Ins::Shuffle { .. }
                | Ins::Fill { .. }
                | Ins::LoadMatrix { .. }
                | Ins::StoreMatrix { .. }
                | Ins::Mma { .. }
                | Ins::ReduceMatrix { .. }
                | Ins::ConvertMatrix { .. }
                | Ins::Meet => {
                    self.pcs[self.item] = pc as u32;
                    return Ok(Stop::Sync);
                }
                Ins::Halt => {
                    self.pcs[self.item] = pc as u32;
                    return Ok(Stop::Done);
                }
            }
            pc += 1;
        }
    }

    fn load_element(&mut self, dst: Reg, (buf, dtype): (u32, DType), [index, guard]: [Reg; 2], pc: usize) {
        let v = if guard != NONE && self.get(guard) == 0 {
            0
        } else {
            let raw = self.load(buf, self.get(index) as i64, dtype.size(), pc);
            scalar::load(dtype, raw)
        };
        self.set(dst, v)
    }

    fn copy(&mut self, d: Reg, a: Reg, n: u8) {
        for l in 0..n as u32 {
            self.set(d + l, self.get(a + l));
        }
    }

    fn cast(&mut self, to: DType, from: Ty, d: Reg, a: Reg) {
        let v = scalar::from_reg(from, self.get(a)).cast(to);
        self.set(d, scalar::to_reg(Ty::of(to), v))
    }

    fn set_element(&mut self, matrix: u32, at: [Reg; 2], value: Reg, pc: usize) {
        let v = f32::from_bits(self.get(value) as u32);
        if let Some(e) = self.element(matrix, at, pc) {
            *e = v;
        }
    }

    fn advances(&self, step: Reg) -> Result<()> {
        match self.get(step) as i64 {
            ..=0 => Err(Error::internal(format!("kernel {}: a loop does not advance", self.kernel.name))),
            _ => Ok(()),
        }
    }

    /// A quotient or a remainder of indexes.
    fn index(&mut self, rem: bool, d: Reg, [a, b]: [Reg; 2], pc: usize) {
        let (x, y) = (self.get(a) as i64, self.get(b) as i64);
        if x < 0 || y <= 0 {
            self.report(Fault::IndexDivision, Space::None, x, None, pc);
            self.set(d, 0);
        } else {
            self.set(d, (if rem { x % y } else { x / y }) as u64);
        }
    }

    fn load_vector(&mut self, dst: Reg, buf: u32, lanes: u8, [index, guard]: [Reg; 2], pc: usize) {
        let i = (self.get(index) as i64).wrapping_mul(lanes as i64);
        let skip = guard != NONE && self.get(guard) == 0;
        for l in 0..lanes as u32 {
            let v = if skip { 0 } else { self.load(buf, i + l as i64, 4, pc) };
            self.set(dst + l, v);
        }
    }

    fn load_local(&mut self, dst: Reg, arr: u32, lanes: u8, index: Reg, pc: usize) {
        let p = self.local_place(arr, self.get(index) as i64, pc);
        for l in 0..lanes as usize {
            let v = p.map_or(0, |p| self.locals[p + l]);
            self.set(dst + l as u32, v);
        }
        if let (Some(p), Some(s)) = (p, &mut self.shadow)
            && let Some((fault, other)) = s.read_local(p, lanes as usize, self.item as u32)
        {
            let index = self.get(index) as i64;
            self.report(fault, Space::Local(LocalId(arr)), index, other, pc);
        }
    }

    fn load_private(&mut self, dst: Reg, arr: u32, lanes: u8, index: Reg, pc: usize) {
        let i = self.get(index) as i64;
        let p = self.private_place(arr, i, pc);
        if let Some(p) = p
            && self.private_set.get(p) == Some(&false)
        {
            self.report(Fault::Uninitialised, Space::Private(PrivateId(arr)), i, None, pc);
        }
        for l in 0..lanes as usize {
            let v = p.map_or(0, |p| self.privates[p + l]);
            self.set(dst + l as u32, v);
        }
    }

    fn store_vector(&mut self, buf: u32, lanes: u8, index: Reg, value: Reg, pc: usize) {
        let i = (self.get(index) as i64).wrapping_mul(lanes as i64);
        for l in 0..lanes as u32 {
            self.store(buf, i + l as i64, 4, self.get(value + l), false, pc);
        }
    }

    fn store_local(&mut self, arr: u32, lanes: u8, index: Reg, value: Reg, pc: usize) {
        let i = self.get(index) as i64;
        if let Some(p) = self.local_place(arr, i, pc) {
            for l in 0..lanes as usize {
                self.locals[p + l] = self.get(value + l as u32);
            }
            if let Some(s) = &mut self.shadow
                && let Some((fault, other)) = s.write_local(p, lanes as usize, self.item as u32)
            {
                self.report(fault, Space::Local(LocalId(arr)), i, other, pc);
            }
        }
    }

    fn store_private(&mut self, arr: u32, lanes: u8, index: Reg, value: Reg, pc: usize) {
        if let Some(p) = self.private_place(arr, self.get(index) as i64, pc) {
            for l in 0..lanes as usize {
                self.privates[p + l] = self.get(value + l as u32);
            }
            if let Some(s) = self.private_set.get_mut(p) {
                *s = true;
            }
        }
    }

    fn atomic_add(&mut self, dst: Reg, (buf, dtype): (u32, DType), index: Reg, value: Reg, pc: usize) {
        let i = self.get(index) as i64;
        if let Some(at) = self.place(buf, i, 4, pc) {
            let old = self.memory.load(buf as usize, at, 4);
            let new = (old as u32).wrapping_add(self.get(value) as u32);
            self.store(buf, i, 4, new as u64, true, pc);
            if dst != NONE {
                self.set(dst, scalar::load(dtype, old));
            }
        }
    }

    fn set_error(&mut self, buf: u32, index: Reg, value: Reg, pc: usize) {
        let i = self.get(index) as i64;
        if let Some(at) = self.place(buf, i, 4, pc)
            && self.memory.load(buf as usize, at, 4) == 0
        {
            self.store(buf, i, 4, self.get(value), true, pc);
        }
    }

    fn unpack(&mut self, dtype: DType, dst: Reg, word: Reg, shift: u8) {
        let raw = self.get(word) >> shift & ((1 << dtype.bits()) - 1);
        self.set(dst, scalar::load(dtype, raw))
    }

    fn pack(&mut self, dtype: DType, dst: Reg, x: [Reg; 4]) {
        let mask = (1u64 << dtype.bits()) - 1;
        let parts = x.iter().take(per_word(dtype)).rev();
        let w = parts.fold(0, |w, &r| w << dtype.bits() | scalar::store(dtype, self.get(r)) & mask);
        self.set(dst, w)
    }

    /// Sets the row and the column of the element that the work-item visits in this round of a map. Returns
    /// false if it has no element in this round.
    fn next_place(&mut self, like: u32, round: Reg, at: [Reg; 2]) -> bool {
        let [rows, columns] = self.kernel.fragments[like as usize].shape();
        let width = self.subgroup as usize;
        let place = self.get(round) as usize * width + self.item % width;
        if place >= rows * columns {
            return false;
        }
        self.set(at[0], (place / columns) as u64);
        self.set(at[1], (place % columns) as u64);
        true
    }

    /// Executes an instruction at which all work-items of the workgroup have arrived.
    fn meet(&mut self, pc: usize) -> Result<()> {
        let (n, width) = (self.kernel.items() as usize, self.subgroup as usize);
        let at = |item: usize, r: Reg, regs: usize| item * regs + r as usize;
        let regs = self.code.regs;
        match self.code.ins[pc] {
            Ins::Barrier { global } => {
                if let Some(s) = &mut self.shadow {
                    s.barrier(global);
                }
            }
            Ins::Reduce { op, ty, dst, value } => {
                for start in (0..n).step_by(width) {
                    let mut acc = self.regs[at(start, value, regs)];
                    for i in start + 1..(start + width).min(n) {
                        acc = scalar::eval(op.op(), ty, [acc, self.regs[at(i, value, regs)], 0]);
                    }
                    for i in start..(start + width).min(n) {
                        self.regs[at(i, dst, regs)] = acc;
                    }
                }
            }
            Ins::Shuffle { xor, dst, value, lane } => {
                let all: Vec<u64> = (0..n).map(|i| self.regs[at(i, value, regs)]).collect();
                for i in 0..n {
                    let l = self.regs[at(i, lane, regs)] as i64 as usize;
                    let l = if xor { (i % width) ^ l } else { l };
                    // A shuffle from a lane outside of the subgroup is undefined on devices. Here it yields
                    // the work-item's own value.
                    let from = i / width * width + l;
                    self.regs[at(i, dst, regs)] = if l < width && from < n { all[from] } else { all[i] };
                }
            }
            Ins::Meet => {}
            Ins::Fill { .. }
            | Ins::LoadMatrix { .. }
            | Ins::StoreMatrix { .. }
            | Ins::Mma { .. }
            | Ins::ReduceMatrix { .. }
            | Ins::ConvertMatrix { .. } => {
                for first in (0..n).step_by(width) {
                    self.matrix(first, pc);
                }
            }
            ref i => return Err(Error::internal(format!("work-items do not wait at {i:?}"))),
        }
        Ok(())
    }
}

/// Interprets a kernel once over byte buffers.
///
/// # Errors
/// The errors of [`Interp::new`] and [`Interp::run`].
pub fn run(k: &Kernel, launch: &Launch, buffers: &mut [Vec<u8>], o: &Options) -> Result<Outcome> {
    Interp::new(k)?.run(launch, buffers, o)
}
