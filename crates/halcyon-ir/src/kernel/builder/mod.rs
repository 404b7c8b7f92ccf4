//! Builds kernels from Rust: expression handles with operators, and closures for blocks.
//!
//! Statements, including reads, are emitted when their method is called, so memory is accessed in the order
//! of the calls. Pure expressions are hash-consed, so equal expressions are one. The builder records the
//! first misuse, and [`Builder::finish`] returns it.

mod expr;

use super::ir::*;
use crate::dtype::{DType, Scalar};
use crate::error::{Error, Result};
use crate::ops::element_wise::ScalarOp;
use std::cell::RefCell;
use std::collections::HashMap;

#[derive(Debug)]
struct Inner {
    k: Kernel,
    types: Vec<Ty>,
    cons: HashMap<Expr, ExprId>,
    blocks: Vec<Vec<Stmt>>,
    error: Option<String>,
}

/// Builds one kernel. `ix` is the type of indexes and offsets: i32, or i64 for tensors that are too large for
/// i32.
#[derive(Debug)]
pub struct Builder {
    inner: RefCell<Inner>,
    ix: Ty,
}

/// An expression under construction.
#[derive(Clone, Copy, Debug)]
pub struct E<'a> {
    b: &'a Builder,
    pub id: ExprId,
}

/// A global buffer. Accesses add its element offset, if it has one.
#[derive(Clone, Copy, Debug)]
pub struct Buf {
    pub id: BufId,
    pub dtype: DType,
    offset: Option<ExprId>,
}

/// A mutable variable.
#[derive(Clone, Copy, Debug)]
pub struct Var<'a> {
    b: &'a Builder,
    id: VarId,
}

/// A workgroup array.
#[derive(Clone, Copy, Debug)]
pub struct Local<'a> {
    b: &'a Builder,
    pub id: LocalId,
}

/// A private array of one work-item.
#[derive(Clone, Copy, Debug)]
pub struct Private<'a> {
    b: &'a Builder,
    id: PrivateId,
}

/// The device's fault word. A kernel sets it if an index was out of range.
#[derive(Clone, Copy, Debug)]
pub struct Fault<'a> {
    b: &'a Builder,
    buf: BufId,
    code: ExprId,
}

impl Fault<'_> {
    /// Sets the fault word to the launch's `fault` parameter unless it is already set.
    pub fn set(self) {
        let index = self.b.index(0).id;
        self.b.emit(Stmt::SetError { buf: self.buf, index, code: self.code })
    }
}

/// An expression, or a literal that takes the other operand's type.
pub trait Operand<'a> {
    fn operand(self, b: &'a Builder, like: Ty) -> E<'a>;
}

impl<'a> Operand<'a> for E<'a> {
    fn operand(self, _: &'a Builder, _: Ty) -> E<'a> {
        self
    }
}

macro_rules! literal {
    ($($t:ty),*) => {$(
        impl<'a> Operand<'a> for $t {
            fn operand(self, b: &'a Builder, like: Ty) -> E<'a> {
                b.constant(like, Scalar::from(self))
            }
        }
    )*};
}
literal!(i32, i64, u32, u64, usize, f32, f64, bool);

impl Builder {
    /// Starts a kernel called `name` (a C identifier) with i32 indexes.
    pub fn new(name: &str, workgroup: [u32; 3]) -> Builder {
        Builder::with_index(name, workgroup, Ty::I32)
    }

    /// Like [`Builder::new`], with indexes and offsets of type `ix`.
    pub fn with_index(name: &str, workgroup: [u32; 3], ix: Ty) -> Builder {
        let k = Kernel {
            name: name.to_string(),
            buffers: vec![],
            params: vec![],
            locals: vec![],
            privates: vec![],
            fragments: vec![],
            workgroup,
            noalias: true,
            exprs: vec![],
            values: vec![],
            vars: vec![],
            parts: None,
            body: vec![],
        };
        let inner = Inner { k, types: vec![], cons: HashMap::new(), blocks: vec![vec![]], error: None };
        Builder { inner: RefCell::new(inner), ix }
    }

    /// Allows written buffers to share memory with read buffers, for kernels that work in place, element by
    /// element.
    pub fn may_alias(&self) {
        self.inner.borrow_mut().k.noalias = false
    }

    pub fn ix(&self) -> Ty {
        self.ix
    }

    fn fail(&self, what: impl Into<String>) {
        let mut i = self.inner.borrow_mut();
        if i.error.is_none() {
            i.error = Some(what.into());
        }
    }

    fn emit(&self, s: Stmt) {
        if let Some(b) = self.inner.borrow_mut().blocks.last_mut() {
            b.push(s)
        }
    }

    fn add(&self, e: Expr) -> E<'_> {
        let mut i = self.inner.borrow_mut();
        if let Some(&id) = i.cons.get(&e) {
            return E { b: self, id };
        }
        let ty = type_of(&e, &|x| i.types[x.ix()], &i.k);
        let id = ExprId(i.k.exprs.len() as u32);
        i.k.exprs.push(e);
        i.types.push(ty);
        i.cons.insert(e, id);
        E { b: self, id }
    }

    fn value(&self, ty: Ty) -> (ValueId, E<'_>) {
        let v = {
            let mut i = self.inner.borrow_mut();
            i.k.values.push(ty);
            ValueId(i.k.values.len() as u32 - 1)
        };
        (v, self.add(Expr::Value(v)))
    }

    fn handle(&self, id: ExprId) -> E<'_> {
        E { b: self, id }
    }

    /// The constant `v`, cast to type `ty`. If `ty` is a vector of f32, every lane has this value.
    pub fn constant(&self, ty: Ty, v: impl Into<Scalar>) -> E<'_> {
        if ty.lanes() > 1 {
            let x = self.constant(Ty::F32, v);
            return self.add(Expr::Splat(ty, x.id));
        }
        self.add(Expr::Const { ty, bits: const_bits(ty, v.into()) })
    }

    /// A constant of the index type.
    pub fn index(&self, v: i64) -> E<'_> {
        self.constant(self.ix, v)
    }

    /// Declares a run-time scalar parameter, which launches set by name.
    pub fn param(&self, name: &str, ty: Ty) -> E<'_> {
        let p = {
            let mut i = self.inner.borrow_mut();
            i.k.params.push(ParamDecl { name: name.to_string(), ty });
            ParamId(i.k.params.len() as u32 - 1)
        };
        self.add(Expr::Param(p))
    }

    /// Declares a size, stride or offset parameter of the index type.
    pub fn size(&self, name: &str) -> E<'_> {
        self.param(name, self.ix)
    }

    /// Declares a buffer and its parameter `o<position>`, an element offset that all accesses add.
    pub fn buffer(&self, dtype: DType, write: bool) -> Buf {
        let n = self.inner.borrow().k.buffers.len();
        let off = self.size(&format!("o{n}"));
        Buf { offset: Some(off.id), ..self.raw_buffer(dtype, write) }
    }

    /// Declares a read-only buffer with [`Builder::buffer`].
    pub fn input(&self, dtype: DType) -> Buf {
        self.buffer(dtype, false)
    }

    /// Declares a writable buffer with [`Builder::buffer`].
    pub fn output(&self, dtype: DType) -> Buf {
        self.buffer(dtype, true)
    }

    /// Declares a buffer without an offset parameter.
    pub fn raw_buffer(&self, dtype: DType, write: bool) -> Buf {
        let mut i = self.inner.borrow_mut();
        let id = BufId(i.k.buffers.len() as u32);
        i.k.buffers.push(BufferDecl { dtype, write });
        Buf { id, dtype, offset: None }
    }

    /// Declares a workgroup array.
    pub fn local(&self, ty: Ty, len: u32) -> Local<'_> {
        let mut i = self.inner.borrow_mut();
        i.k.locals.push(ArrayDecl { ty, len });
        Local { b: self, id: LocalId(i.k.locals.len() as u32 - 1) }
    }

    /// Declares a private array of one work-item.
    pub fn private(&self, ty: Ty, len: u32) -> Private<'_> {
        let mut i = self.inner.borrow_mut();
        i.k.privates.push(ArrayDecl { ty, len });
        Private { b: self, id: PrivateId(i.k.privates.len() as u32 - 1) }
    }

    fn id(&self, id: Id) -> E<'_> {
        self.add(Expr::Id(id)).to(self.ix)
    }

    /// Index in the workgroup along dimension `d`, in the index type.
    pub fn local_id(&self, d: u8) -> E<'_> {
        self.id(Id::Local(d))
    }

    pub fn group_id(&self, d: u8) -> E<'_> {
        self.id(Id::Group(d))
    }

    pub fn groups(&self, d: u8) -> E<'_> {
        self.id(Id::Groups(d))
    }

    /// Index of the work-item in its subgroup, i32.
    pub fn lane(&self) -> E<'_> {
        self.add(Expr::Id(Id::Lane))
    }

    /// Number of work-items in a subgroup, i32.
    pub fn subgroup_size(&self) -> E<'_> {
        self.add(Expr::Id(Id::SubgroupSize))
    }

    /// Linear index of the workgroup in a grid made by [`super::Launch::fold`].
    pub fn linear_group(&self) -> E<'_> {
        self.group_id(1) * self.groups(0) + self.group_id(0)
    }

    /// Linear index of the work-item in a folded grid of one-dimensional workgroups.
    pub fn linear_id(&self) -> E<'_> {
        let n = self.inner.borrow().k.workgroup[0];
        self.linear_group() * n + self.local_id(0)
    }

    /// Applies a scalar op to its operands in order. Folds integer and bool constants, identities such as
    /// `x + 0`, and selections by a constant condition.
    pub fn op(&self, op: ScalarOp, x: &[E<'_>]) -> E<'_> {
        if x.len() != op.arity() {
            self.fail(format!("{} takes {} operands, got {}", op.name(), op.arity(), x.len()));
            return self.constant(Ty::I32, 0);
        }
        let g = |i: usize| x.get(i).unwrap_or(&x[0]).id;
        let ids = [g(0), g(1), g(2)];
        if let Some(folded) = self.fold(op, &ids[..op.arity()]) {
            return folded;
        }
        self.add(Expr::Op(op, ids))
    }

    fn konst(&self, e: ExprId) -> Option<(Ty, Scalar)> {
        match self.inner.borrow().k.exprs[e.ix()] {
            Expr::Const { ty, bits } => Some((ty, const_scalar(ty, bits))),
            _ => None,
        }
    }

    fn fold(&self, op: ScalarOp, x: &[ExprId]) -> Option<E<'_>> {
        let ty = self.inner.borrow().types[x[if op == ScalarOp::Select { 1 } else { 0 }].ix()];
        let c: Vec<Option<Scalar>> = x.iter().map(|&e| self.konst(e).map(|c| c.1)).collect();
        if op == ScalarOp::Select
            && let Some(b) = c[0]
        {
            return Some(self.handle(if b.as_bool() { x[1] } else { x[2] }));
        }
        if !ty.is_int() && ty != Ty::Bool {
            return None;
        }
        if op.takes(ty.dtype()) && c.iter().all(|c| c.is_some()) {
            let v: Vec<Scalar> = c.iter().flatten().copied().collect();
            let out = op.result(ty.dtype());
            return Some(self.constant(Ty::of(out), op.eval(ty.dtype(), &v)));
        }
        let is = |i: usize, n: i64| c.get(i).is_some_and(|s| s.is_some_and(|s| s.as_i64() == n));
        let pick = match op {
            ScalarOp::Add if is(0, 0) => x[1],
            ScalarOp::Add | ScalarOp::Sub if is(1, 0) => x[0],
            ScalarOp::Mul if is(0, 1) || is(1, 0) => x[1],
            ScalarOp::Mul if is(1, 1) || is(0, 0) => x[0],
            ScalarOp::And if ty == Ty::Bool && is(0, 1) => x[1],
            ScalarOp::And if ty == Ty::Bool && is(1, 1) => x[0],
            _ => return None,
        };
        Some(self.handle(pick))
    }

    /// Evaluates `e` at this point and binds the result.
    pub fn let_<'a>(&'a self, e: E<'a>) -> E<'a> {
        let (dst, v) = self.value(e.ty());
        self.emit(Stmt::Let { dst, expr: e.id });
        v
    }

    /// Declares a mutable variable.
    pub fn var<'a>(&'a self, init: E<'a>) -> Var<'a> {
        let var = {
            let ty = init.ty();
            let mut i = self.inner.borrow_mut();
            i.k.vars.push(ty);
            VarId(i.k.vars.len() as u32 - 1)
        };
        self.emit(Stmt::Var { var, init: init.id });
        Var { b: self, id: var }
    }

    /// Declares a mutable variable with a constant initial value.
    pub fn var_of(&self, ty: Ty, v: impl Into<Scalar>) -> Var<'_> {
        self.var(self.constant(ty, v))
    }

    fn read(&self, ty: Ty, read: Read) -> E<'_> {
        let (dst, v) = self.value(ty);
        self.emit(Stmt::Read { dst, read });
        v
    }

    fn at<'a>(&'a self, buf: Buf, index: impl Operand<'a>) -> ExprId {
        let i = index.operand(self, self.ix);
        match buf.offset {
            Some(o) => (self.handle(o) + i).id,
            None => i.id,
        }
    }

    /// Reads one element, converted to its compute type.
    pub fn load<'a>(&'a self, buf: Buf, index: impl Operand<'a>) -> E<'a> {
        let index = self.at(buf, index);
        self.read(Ty::of(buf.dtype), Read::Global { buf: buf.id, index, guard: None })
    }

    /// Reads one element if `guard` is true; otherwise the result is zero.
    pub fn load_if<'a>(&'a self, buf: Buf, index: impl Operand<'a>, guard: E<'a>) -> E<'a> {
        let index = self.at(buf, index);
        self.read(Ty::of(buf.dtype), Read::Global { buf: buf.id, index, guard: Some(guard.id) })
    }

    /// Reads a vector of a buffer declared with [`Builder::raw_buffer`] ([`Read::Vector`]). The index counts
    /// vectors.
    pub fn load_vector<'a>(&'a self, buf: Buf, ty: Ty, index: impl Operand<'a>) -> E<'a> {
        let index = self.at(buf, index);
        self.read(ty, Read::Vector { buf: buf.id, ty, index, guard: None })
    }

    /// Reads a vector if `guard` is true; otherwise the result is zero.
    pub fn load_vector_if<'a>(&'a self, buf: Buf, ty: Ty, index: impl Operand<'a>, guard: E<'a>) -> E<'a> {
        let index = self.at(buf, index);
        self.read(ty, Read::Vector { buf: buf.id, ty, index, guard: Some(guard.id) })
    }

    /// Reads a raw 32-bit word. The index, and the buffer's offset if it has one, count words.
    pub fn load_word<'a>(&'a self, buf: Buf, index: impl Operand<'a>) -> E<'a> {
        let index = self.at(buf, index);
        self.read(Ty::U32, Read::Word { buf: buf.id, index })
    }

    /// Writes one element, converted to the storage type.
    pub fn store<'a>(&'a self, buf: Buf, index: impl Operand<'a>, value: impl Operand<'a>) {
        let index = self.at(buf, index);
        let value = value.operand(self, Ty::of(buf.dtype)).id;
        self.emit(Stmt::Store { buf: buf.id, index, value })
    }

    pub fn store_vector<'a>(&'a self, buf: Buf, index: impl Operand<'a>, value: E<'a>) {
        let index = self.at(buf, index);
        self.emit(Stmt::StoreVector { buf: buf.id, index, value: value.id })
    }

    pub fn store_word<'a>(&'a self, buf: Buf, index: impl Operand<'a>, value: impl Operand<'a>) {
        let index = self.at(buf, index);
        let value = value.operand(self, Ty::U32).id;
        self.emit(Stmt::StoreWord { buf: buf.id, index, value })
    }

    /// Reads `n` consecutive elements of 8, 16 or 32 bits, starting at `first`. If the `n` elements fill a
    /// multiple of 16 bytes, each load reads 16 bytes; otherwise each load reads one word. The `n` elements
    /// must fill whole words, and `first` must be aligned to the size of the loads.
    pub fn load_run<'a>(&'a self, buf: Buf, first: E<'a>, n: u32) -> Vec<E<'a>> {
        self.run_of(buf, first, n, None)
    }

    /// Like [`Builder::load_run`], but the elements must fill a multiple of 16 bytes. If `guard` is false,
    /// nothing is read and the results are zero.
    pub fn load_run_if<'a>(&'a self, buf: Buf, first: E<'a>, n: u32, guard: E<'a>) -> Vec<E<'a>> {
        if !(n as usize * buf.dtype.size()).is_multiple_of(16) {
            self.fail("a guarded run must be a multiple of 16 bytes");
        }
        self.run_of(buf, first, n, Some(guard.id))
    }

    fn run_of<'a>(&'a self, buf: Buf, first: E<'a>, n: u32, guard: Option<ExprId>) -> Vec<E<'a>> {
        let per = per_word(buf.dtype) as u32;
        let at = buf.offset.map_or(first, |o| self.handle(o) + first);
        let words = n / per;
        let raw: Vec<E<'a>> = match words % 4 {
            0 => (0..words / 4)
                .flat_map(|q| {
                    let index = (at.idiv(4 * per) + q).id;
                    let read = Read::Vector { buf: buf.id, ty: Ty::U32x4, index, guard };
                    let v = self.read(Ty::U32x4, read);
                    (0..4).map(move |l| v.lane(l))
                })
                .collect(),
            _ => (0..words)
                .map(|w| self.read(Ty::U32, Read::Word { buf: buf.id, index: (at.idiv(per) + w).id }))
                .collect(),
        };
        let element = |e: u32| match (raw[(e / per) as usize], per) {
            (w, 1) => w.bitcast(Ty::of(buf.dtype)),
            (w, _) => w.unpack(buf.dtype, (e % per) as u8),
        };
        (0..words * per).map(element).collect()
    }

    /// Writes consecutive elements starting at `first`, with the alignment rules of [`Builder::load_run`].
    pub fn store_run<'a>(&'a self, buf: Buf, first: E<'a>, values: &[E<'a>]) {
        let per = per_word(buf.dtype);
        let at = buf.offset.map_or(first, |o| self.handle(o) + first);
        let words: Vec<E<'a>> = values
            .chunks(per)
            .map(|x| if per == 1 { x[0].bitcast(Ty::U32) } else { self.pack(buf.dtype, x) })
            .collect();
        for (q, quad) in words.chunks(4).enumerate() {
            if let (&[a, b, c, d], 0) = (quad, words.len() % 4) {
                let (index, value) = ((at.idiv(4 * per) + q).id, self.words([a, b, c, d]).id);
                self.emit(Stmt::StoreVector { buf: buf.id, index, value });
                continue;
            }
            for (w, x) in quad.iter().enumerate() {
                let index = (at.idiv(per) + (q * 4 + w)).id;
                self.emit(Stmt::StoreWord { buf: buf.id, index, value: x.id });
            }
        }
    }

    /// Adds atomically to an i32 or u32 element.
    pub fn atomic_add<'a>(&'a self, buf: Buf, index: impl Operand<'a>, value: impl Operand<'a>) {
        let index = self.at(buf, index);
        let value = value.operand(self, Ty::of(buf.dtype)).id;
        self.emit(Stmt::AtomicAdd { buf: buf.id, index, value, dst: None })
    }

    /// Adds atomically and returns the previous value.
    pub fn fetch_add<'a>(&'a self, buf: Buf, index: impl Operand<'a>, value: impl Operand<'a>) -> E<'a> {
        let index = self.at(buf, index);
        let value = value.operand(self, Ty::of(buf.dtype)).id;
        let (dst, v) = self.value(Ty::of(buf.dtype));
        self.emit(Stmt::AtomicAdd { buf: buf.id, index, value, dst: Some(dst) });
        v
    }

    /// Declares the device's fault word, which must be the last buffer, and the parameter `fault`.
    pub fn fault(&self) -> Fault<'_> {
        Fault { buf: self.raw_buffer(DType::U32, true).id, code: self.param("fault", Ty::U32).id, b: self }
    }

    fn block(&self, f: impl FnOnce()) -> Vec<Stmt> {
        self.inner.borrow_mut().blocks.push(vec![]);
        f();
        self.inner.borrow_mut().blocks.pop().unwrap_or_default()
    }

    /// `for (i = start; i < end; i += step)`. The counter has the index type.
    pub fn for_<'a>(
        &'a self,
        start: impl Operand<'a>,
        end: impl Operand<'a>,
        step: impl Operand<'a>,
        f: impl FnOnce(E<'a>),
    ) {
        let [s, e] = [start.operand(self, self.ix), end.operand(self, self.ix)];
        let p = step.operand(self, self.ix);
        let (var, v) = self.value(self.ix);
        let body = self.block(|| f(v));
        self.emit(Stmt::For { var, start: s.id, end: e.id, step: p.id, body })
    }

    pub fn if_(&self, cond: E<'_>, f: impl FnOnce()) {
        let then = self.block(f);
        self.emit(Stmt::If { cond: cond.id, then, els: vec![] })
    }

    pub fn if_else(&self, cond: E<'_>, f: impl FnOnce(), g: impl FnOnce()) {
        let (then, els) = (self.block(f), self.block(g));
        self.emit(Stmt::If { cond: cond.id, then, els })
    }

    /// Barrier of the workgroup. Orders accesses to workgroup memory.
    pub fn barrier(&self) {
        self.emit(Stmt::Barrier { global: false })
    }

    /// Like [`Builder::barrier`]. Also orders the workgroup's accesses to global memory.
    pub fn barrier_global(&self) {
        self.emit(Stmt::Barrier { global: true })
    }

    /// Combines `value` over the subgroup; every work-item gets the result.
    pub fn subgroup_reduce<'a>(&'a self, op: Reduce, value: E<'a>) -> E<'a> {
        self.read(value.ty(), Read::SubgroupReduce { op, value: value.id })
    }

    pub fn shuffle_xor<'a>(&'a self, value: E<'a>, mask: impl Operand<'a>) -> E<'a> {
        let mask = mask.operand(self, Ty::I32).id;
        self.read(value.ty(), Read::SubgroupShuffleXor { value: value.id, mask })
    }

    pub fn shuffle<'a>(&'a self, value: E<'a>, lane: impl Operand<'a>) -> E<'a> {
        let lane = lane.operand(self, Ty::I32).id;
        self.read(value.ty(), Read::SubgroupShuffle { value: value.id, lane })
    }

    /// Declares a fragment: a matrix held in the registers of a subgroup.
    pub fn fragment(&self, op: MatrixOp, part: Part) -> FragmentId {
        let mut i = self.inner.borrow_mut();
        i.k.fragments.push(FragmentDecl { op, part });
        FragmentId(i.k.fragments.len() as u32 - 1)
    }

    /// Sets all elements of a sum or row fragment.
    pub fn fill_fragment(&self, dst: FragmentId, value: f32) {
        let value = self.constant(Ty::F32, value).id;
        self.emit(Stmt::FragmentFill { dst, value })
    }

    /// Loads an operand fragment from a workgroup array of [`Ty::U32x4`]. For offset and stride see [`Tile`].
    pub fn load_fragment<'a>(
        &'a self,
        dst: FragmentId,
        arr: Local<'a>,
        offset: impl Operand<'a>,
        stride: impl Operand<'a>,
        column_major: bool,
    ) {
        let tile = self.tile(arr, offset, stride, column_major);
        self.emit(Stmt::FragmentLoad { dst, tile })
    }

    /// Stores a sum fragment to workgroup memory, row-major.
    pub fn store_fragment<'a>(
        &'a self,
        src: FragmentId,
        arr: Local<'a>,
        offset: impl Operand<'a>,
        stride: impl Operand<'a>,
    ) {
        let tile = self.tile(arr, offset, stride, false);
        self.emit(Stmt::FragmentStore { src, tile })
    }

    fn tile<'a>(
        &'a self,
        arr: Local<'a>,
        offset: impl Operand<'a>,
        stride: impl Operand<'a>,
        column_major: bool,
    ) -> Tile {
        let (offset, stride) = (offset.operand(self, self.ix).id, stride.operand(self, self.ix).id);
        Tile { arr: arr.id, offset, stride, column_major }
    }

    /// Runs `f` with the row and the column of every element of a fragment ([`Stmt::FragmentMap`]).
    pub fn map_fragment<'a>(&'a self, like: FragmentId, f: impl FnOnce(E<'a>, E<'a>)) {
        let [(row, r), (column, c)] = [self.value(Ty::I32), self.value(Ty::I32)];
        let body = self.block(|| f(r.to(self.ix), c.to(self.ix)));
        self.emit(Stmt::FragmentMap { like, row, column, body })
    }

    /// Inside [`Builder::map_fragment`]: the element at the current row and column.
    pub fn element(&self, of: FragmentId) -> E<'_> {
        self.read(Ty::F32, Read::Element { of })
    }

    /// Inside [`Builder::map_fragment`]: sets the element at the current row and column.
    pub fn set_element<'a>(&'a self, dst: FragmentId, value: E<'a>) {
        self.emit(Stmt::SetElement { dst, value: value.id })
    }

    /// Reduces each row of the sums `src` into `dst` ([`Stmt::FragmentReduce`]).
    pub fn reduce_fragment(&self, op: Reduce, dst: FragmentId, src: FragmentId) {
        self.emit(Stmt::FragmentReduce { dst, src, op })
    }

    /// Converts a range of columns of a sum fragment to a left operand. `arr`, `offset` and `stride` give the
    /// scratch memory of [`Stmt::FragmentConvert`].
    pub fn convert_fragment<'a>(
        &'a self,
        dst: FragmentId,
        (src, column): (FragmentId, u8),
        arr: Local<'a>,
        offset: impl Operand<'a>,
        stride: impl Operand<'a>,
    ) {
        let scratch = self.tile(arr, offset, stride, false);
        self.emit(Stmt::FragmentConvert { dst, src, column, scratch })
    }

    /// `sum += a b`.
    pub fn mma(&self, sum: FragmentId, a: FragmentId, b: FragmentId) {
        self.emit(Stmt::Mma { sum, a, b })
    }

    /// A 16-byte vector of four words.
    pub fn words(&self, x: [E<'_>; 4]) -> E<'_> {
        self.add(Expr::Vector(Ty::U32x4, x.map(|x| x.id)))
    }

    /// Packs 8- or 16-bit elements into a word, converting each as a store does. `x` must fill the word.
    pub fn pack(&self, d: DType, x: &[E<'_>]) -> E<'_> {
        if x.len() != per_word(d) {
            self.fail(format!("a word has {} elements of {d}, got {}", per_word(d), x.len()));
            return self.constant(Ty::U32, 0);
        }
        let g = |i: usize| x.get(i).unwrap_or(&x[0]).id;
        self.add(Expr::Pack(d, [g(0), g(1), g(2), g(3)]))
    }

    /// `acc + sum a[i] * b[i]` over the four signed bytes of two u32 words.
    pub fn dot4_i8<'a>(&'a self, a: E<'a>, b: E<'a>, acc: E<'a>) -> E<'a> {
        self.add(Expr::Dot4I8 { a: a.id, b: b.id, acc: acc.id })
    }

    /// An f32 vector of two or four lanes.
    pub fn vector(&self, lanes: &[E<'_>]) -> E<'_> {
        let ty = if lanes.len() == 2 { Ty::F32x2 } else { Ty::F32x4 };
        if lanes.len() != ty.lanes() {
            self.fail("a vector has two or four lanes");
            return self.constant(ty, 0.0);
        }
        let g = |i: usize| lanes.get(i).unwrap_or(&lanes[0]).id;
        self.add(Expr::Vector(ty, [g(0), g(1), g(2), g(3)]))
    }

    /// Reduces `value` over a one-dimensional workgroup and returns the result to every work-item. The number
    /// of work-items must be a power of two. `scratch` must have the value's type and at least one element
    /// per work-item. The result is a tree reduction in a fixed order, so it is deterministic.
    pub fn group_reduce<'a>(&'a self, op: Reduce, value: E<'a>, scratch: Local<'a>) -> E<'a> {
        let n = self.inner.borrow().k.workgroup[0];
        if !n.is_power_of_two() {
            self.fail("group_reduce needs a number of work-items that is a power of two");
        }
        let me = self.local_id(0);
        self.barrier();
        scratch.store(me, value);
        self.barrier();
        // This is a loop and not unrolled, because every barrier in the source takes time to compile.
        self.for_(0, n.ilog2(), 1, |k| {
            let step = self.constant(Ty::U32, n / 2).shr(k.to(Ty::U32)).to(self.ix);
            self.if_(me.lt(step), || {
                let (a, b) = (scratch.load(me), scratch.load(me + step));
                scratch.store(me, self.op(op.op(), &[a, b]));
            });
            self.barrier();
        });
        scratch.load(0)
    }

    /// Verifies and returns the kernel.
    ///
    /// # Errors
    /// [`Error::Argument`] with the kernel's name and the defect.
    pub fn finish(self) -> Result<Kernel> {
        let mut i = self.inner.into_inner();
        if let Some(what) = i.error {
            return Err(Error::argument(format!("kernel {}", i.k.name), what));
        }
        i.k.body = i.blocks.pop().unwrap_or_default();
        super::verify::verify(&i.k)?;
        Ok(i.k)
    }
}
