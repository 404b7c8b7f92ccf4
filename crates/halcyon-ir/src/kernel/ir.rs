//! The kernel IR: a structured statement tree over a hash-consed arena of pure expressions.
//!
//! Everything that reads memory or a mutable variable is a statement ([`Stmt::Read`]) that names its result
//! once, so an expression is pure: it may be evaluated anywhere its operands are visible, once or many times.
//! Storage types are separate from compute types: a load converts to [`DType::compute`], a store converts
//! back.

use crate::dtype::{Class, DType, Scalar};
use crate::scalar_op::{Rule, ScalarOp};
use serde::{Deserialize, Serialize};
use std::hash::{Hash, Hasher};

/// Type a value is computed in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Ty {
    Bool,
    I32,
    U32,
    I64,
    U64,
    F32,
    F64,
    F32x2,
    F32x4,
    /// Sixteen bytes as they lie in memory: moved, taken apart and put together, never computed with.
    U32x4,
}

impl Ty {
    /// The compute type of a storage type.
    pub fn of(d: DType) -> Ty {
        match d.compute() {
            DType::Bool => Ty::Bool,
            DType::I32 | DType::I8 | DType::I16 => Ty::I32,
            DType::U32 | DType::U8 | DType::U16 => Ty::U32,
            DType::I64 => Ty::I64,
            DType::U64 => Ty::U64,
            DType::F64 => Ty::F64,
            // Compute types are among those above and f32.
            _ => Ty::F32,
        }
    }

    /// Element type of the value; for vectors, of one lane.
    pub fn dtype(self) -> DType {
        match self {
            Ty::Bool => DType::Bool,
            Ty::I32 => DType::I32,
            Ty::U32 | Ty::U32x4 => DType::U32,
            Ty::I64 => DType::I64,
            Ty::U64 => DType::U64,
            Ty::F32 | Ty::F32x2 | Ty::F32x4 => DType::F32,
            Ty::F64 => DType::F64,
        }
    }

    pub fn lanes(self) -> usize {
        match self {
            Ty::F32x2 => 2,
            Ty::F32x4 | Ty::U32x4 => 4,
            _ => 1,
        }
    }

    pub fn is_int(self) -> bool {
        matches!(self, Ty::I32 | Ty::U32 | Ty::I64 | Ty::U64)
    }

    pub fn is_float(self) -> bool {
        self.dtype().class() == Class::Float
    }

    /// Bytes in workgroup memory.
    pub fn size(self) -> usize {
        // A bool takes a whole word there.
        if self == Ty::Bool { 4 } else { self.dtype().size() * self.lanes() }
    }

    pub fn name(self) -> &'static str {
        match self {
            Ty::F32x2 => "f32x2",
            Ty::F32x4 => "f32x4",
            Ty::U32x4 => "u32x4",
            t => t.dtype().name(),
        }
    }
}

/// Bits of a scalar as type `ty` (after a cast to it), zero-extended.
pub fn const_bits(ty: Ty, v: Scalar) -> u64 {
    u64::from_le_bytes(v.to_bytes(ty.dtype()))
}

/// The scalar that `bits` hold as `ty`.
pub fn const_scalar(ty: Ty, bits: u64) -> Scalar {
    Scalar::from_bytes(ty.dtype(), &bits.to_le_bytes())
}

macro_rules! ids {
    ($($(#[$m:meta])* $n:ident),*) => {$(
        $(#[$m])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
        pub struct $n(pub u32);
        impl $n {
            pub fn ix(self) -> usize {
                self.0 as usize
            }
        }
    )*};
}
ids! {
    /// An expression of [`Kernel::exprs`].
    ExprId,
    /// A value that is set once: a let, a read or a loop counter.
    ValueId,
    /// A mutable variable.
    VarId,
    /// A global buffer.
    BufId,
    /// A run-time scalar.
    ParamId,
    /// A workgroup array.
    LocalId,
    /// A per-item array.
    PrivateId,
    /// A matrix that a subgroup holds in registers.
    FragmentId
}

/// Position of the work-item. All have type i32.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Id {
    /// Index in the workgroup along a dimension.
    Local(u8),
    /// Index of the workgroup along a dimension.
    Group(u8),
    /// Number of workgroups along a dimension.
    Groups(u8),
    /// Index in the subgroup. Subgroups are runs of the linear local index.
    Lane,
    /// Work-items in a subgroup.
    SubgroupSize,
}

/// A pure expression.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Expr {
    Const {
        ty: Ty,
        bits: u64,
    },
    Param(ParamId),
    Id(Id),
    Value(ValueId),
    /// A scalar op; unused operands repeat the first. On vectors: neg, add, sub, mul, div, fma only.
    Op(ScalarOp, [ExprId; 3]),
    /// Quotient of integers that are not negative by a positive one (index arithmetic: no check).
    IDiv(ExprId, ExprId),
    /// Remainder, as [`Expr::IDiv`].
    IRem(ExprId, ExprId),
    /// [`Scalar::cast`] to a storage type, held in its compute type: rounds, wraps or saturates to it.
    Cast(DType, ExprId),
    /// Same bits as another type of the same width.
    Bitcast(Ty, ExprId),
    /// `acc + sum of a[i] * b[i]` over four bytes of two words (i8 by i8, into i32).
    Dot4I8 {
        a: ExprId,
        b: ExprId,
        acc: ExprId,
    },
    /// A vector of equal lanes.
    Splat(Ty, ExprId),
    /// One lane of a vector.
    Lane(ExprId, u8),
    /// A vector of the first lanes given.
    Vector(Ty, [ExprId; 4]),
    /// One element of a word that holds elements of 8 or 16 bits, the first lowest, in its compute type.
    Unpack(DType, ExprId, u8),
    /// A word of elements of 8 or 16 bits, each converted as a store does; unused ones repeat the first.
    Pack(DType, [ExprId; 4]),
}

impl Expr {
    /// Operands, in order.
    pub fn operands(&self) -> smallvec::SmallVec<[ExprId; 4]> {
        let mut v = smallvec::SmallVec::new();
        match *self {
            Expr::Const { .. } | Expr::Param(_) | Expr::Id(_) | Expr::Value(_) => {}
            Expr::Op(op, x) => v.extend(x[..op.arity()].iter().copied()),
            Expr::IDiv(a, b) | Expr::IRem(a, b) => v.extend([a, b]),
            Expr::Cast(_, a)
            | Expr::Bitcast(_, a)
            | Expr::Splat(_, a)
            | Expr::Lane(a, _)
            | Expr::Unpack(_, a, _) => v.push(a),
            Expr::Dot4I8 { a, b, acc } => v.extend([a, b, acc]),
            Expr::Vector(t, x) => v.extend(x[..t.lanes()].iter().copied()),
            Expr::Pack(d, x) => v.extend(x[..per_word(d)].iter().copied()),
        }
        v
    }

    /// Whether writing it twice costs nothing.
    pub fn is_leaf(&self) -> bool {
        matches!(self, Expr::Const { .. } | Expr::Param(_) | Expr::Id(_) | Expr::Value(_))
    }
}

/// Elements of a storage type in a word; types of 32 bits and more have one.
pub fn per_word(d: DType) -> usize {
    (32 / d.bits() as usize).clamp(1, 4)
}

/// How a subgroup combines one value of each work-item.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Reduce {
    Add,
    Mul,
    Min,
    Max,
}

impl Reduce {
    pub fn op(self) -> ScalarOp {
        match self {
            Reduce::Add => ScalarOp::Add,
            Reduce::Mul => ScalarOp::Mul,
            Reduce::Min => ScalarOp::Min,
            Reduce::Max => ScalarOp::Max,
        }
    }

    /// Neutral element in type `d`.
    pub fn identity(self, d: DType) -> Scalar {
        let (lo, hi) = match d {
            DType::I64 => return Scalar::I([0, 1, i64::MAX, i64::MIN][self as usize]),
            DType::U64 => return Scalar::U([0, 1, u64::MAX, 0][self as usize]),
            d => d.range(),
        };
        Scalar::F(match self {
            Reduce::Add => 0.0,
            Reduce::Mul => 1.0,
            Reduce::Min => hi,
            Reduce::Max => lo,
        })
        .cast(d)
    }
}

/// A read that depends on when it happens. With a guard that is false nothing is read and the result is zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Read {
    /// One element, converted to the compute type.
    Global {
        buf: BufId,
        index: ExprId,
        guard: Option<ExprId>,
    },
    /// `lanes(ty)` elements of an f32 buffer, or 16 bytes of any buffer; the index counts vectors and the
    /// address is aligned to them.
    Vector {
        buf: BufId,
        ty: Ty,
        index: ExprId,
        guard: Option<ExprId>,
    },
    /// A 32-bit word of any buffer, as u32; the index counts words.
    Word {
        buf: BufId,
        index: ExprId,
    },
    Local {
        arr: LocalId,
        index: ExprId,
    },
    Private {
        arr: PrivateId,
        index: ExprId,
    },
    Var(VarId),
    /// The same value for all work-items of the subgroup. Needs workgroup-uniform control flow.
    SubgroupReduce {
        op: Reduce,
        value: ExprId,
    },
    /// The value that lane `lane xor mask` gives. Needs workgroup-uniform control flow.
    SubgroupShuffleXor {
        value: ExprId,
        mask: ExprId,
    },
    /// The value that a lane gives. Needs workgroup-uniform control flow.
    SubgroupShuffle {
        value: ExprId,
        lane: ExprId,
    },
    /// In a [`Stmt::FragmentMap`], the element at its place; of [`Part::Rows`] the one of its row.
    Element {
        of: FragmentId,
    },
}

/// Type of the operands of a matrix unit. Sums are f32.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum MatrixType {
    F16,
    BF16,
    /// f32 of which 10 bits of the significand count: rounded to nearest, ties away from zero, when it is
    /// loaded.
    Tf32,
}

impl MatrixType {
    /// How operands lie in memory.
    pub fn storage(self) -> DType {
        match self {
            MatrixType::F16 => DType::F16,
            MatrixType::BF16 => DType::BF16,
            MatrixType::Tf32 => DType::F32,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            MatrixType::F16 => "f16",
            MatrixType::BF16 => "bf16",
            MatrixType::Tf32 => "tf32",
        }
    }
}

/// One multiply-accumulate of matrices, done by a subgroup together: `c += a b`, with `a` m × k, `b` k × n
/// and `c` m × n.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct MatrixOp {
    pub operand: MatrixType,
    pub m: u8,
    pub n: u8,
    pub k: u8,
    /// Work-items of the subgroup.
    pub width: u8,
}

/// Which of its matrices.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Part {
    A,
    B,
    Sum,
    /// One f32 for each row of the sums.
    Rows,
}

/// A matrix that a subgroup holds in its registers; which work-item has which elements is the device's
/// matter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct FragmentDecl {
    pub op: MatrixOp,
    pub part: Part,
}

impl FragmentDecl {
    /// Rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        let [m, n, k] = [self.op.m, self.op.n, self.op.k].map(usize::from);
        match self.part {
            Part::A => [m, k],
            Part::B => [k, n],
            Part::Sum => [m, n],
            Part::Rows => [m, 1],
        }
    }

    /// How its elements lie in memory.
    pub fn storage(&self) -> DType {
        match self.part {
            Part::A | Part::B => self.op.operand.storage(),
            Part::Sum | Part::Rows => DType::F32,
        }
    }
}

/// A matrix in a workgroup array of [`Ty::U32x4`]. Offset and stride count elements of the fragment's storage
/// type, are multiples of 16 bytes, and are the same for all work-items of a subgroup.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Tile {
    pub arr: LocalId,
    pub offset: ExprId,
    /// From row to row, or where it is column-major from column to column.
    pub stride: ExprId,
    pub column_major: bool,
}

/// A statement.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Stmt {
    /// Evaluates an expression here.
    Let {
        dst: ValueId,
        expr: ExprId,
    },
    Read {
        dst: ValueId,
        read: Read,
    },
    /// Declares a mutable variable.
    Var {
        var: VarId,
        init: ExprId,
    },
    Set {
        var: VarId,
        value: ExprId,
    },
    /// Converts to the storage type: rounds to nearest even, or wraps.
    Store {
        buf: BufId,
        index: ExprId,
        value: ExprId,
    },
    /// `lanes` elements of an f32 buffer, or 16 bytes of any buffer; the index counts vectors.
    StoreVector {
        buf: BufId,
        index: ExprId,
        value: ExprId,
    },
    /// A 32-bit word of any buffer.
    StoreWord {
        buf: BufId,
        index: ExprId,
        value: ExprId,
    },
    StoreLocal {
        arr: LocalId,
        index: ExprId,
        value: ExprId,
    },
    StorePrivate {
        arr: PrivateId,
        index: ExprId,
        value: ExprId,
    },
    /// Adds to an i32 or u32 element; the result, where asked for, is the value before.
    AtomicAdd {
        buf: BufId,
        index: ExprId,
        value: ExprId,
        dst: Option<ValueId>,
    },
    /// `for (var = start; var < end; var += step)`, with a positive step.
    For {
        var: ValueId,
        start: ExprId,
        end: ExprId,
        step: ExprId,
        body: Vec<Stmt>,
    },
    If {
        cond: ExprId,
        then: Vec<Stmt>,
        els: Vec<Stmt>,
    },
    /// All work-items of the group wait; orders workgroup memory, and global memory if asked.
    Barrier {
        global: bool,
    },
    /// Sets word `index` of an u32 buffer to a code unless it is already set (a bad index was met and
    /// clamped).
    SetError {
        buf: BufId,
        index: ExprId,
        code: ExprId,
    },
    /// Sets every element of sums or rows to an f32 value, which is the same for all work-items of a
    /// subgroup.
    FragmentFill {
        dst: FragmentId,
        value: ExprId,
    },
    /// Reads an operand from workgroup memory. This and what follows needs workgroup-uniform control flow.
    FragmentLoad {
        dst: FragmentId,
        tile: Tile,
    },
    /// Writes sums, row-major.
    FragmentStore {
        src: FragmentId,
        tile: Tile,
    },
    /// `sum += a b`: products of the operands' values are exact, and the device adds them in f32 in an order
    /// of its own.
    Mma {
        sum: FragmentId,
        a: FragmentId,
        b: FragmentId,
    },
    /// Does `body` for every place of sums, or of rows: for each by a work-item that has it in its registers,
    /// and rows maybe by several. `row` and `column` are i32. The body reads elements ([`Read::Element`]) and
    /// sets them, and has no other effect.
    FragmentMap {
        like: FragmentId,
        row: ValueId,
        column: ValueId,
        body: Vec<Stmt>,
    },
    /// In a [`Stmt::FragmentMap`], sets the element at its place, of a matrix that was filled before.
    SetElement {
        dst: FragmentId,
        value: ExprId,
    },
    /// Combines each row of sums, in an order of the device's own, and what `dst` has of it: a sum or the
    /// largest.
    FragmentReduce {
        dst: FragmentId,
        src: FragmentId,
        op: Reduce,
    },
    /// Sums, from a column on, rounded to a left operand. On devices that hold the two in other places they
    /// go through `scratch`, a place for all of the sums as operands, row-major, that the subgroup has for
    /// itself. What lies there is lost.
    FragmentConvert {
        dst: FragmentId,
        src: FragmentId,
        column: u8,
        scratch: Tile,
    },
}

/// A global buffer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct BufferDecl {
    /// Storage type.
    pub dtype: DType,
    pub write: bool,
}

/// A run-time scalar. Its name is for launches and messages only; rendered names are positional.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ParamDecl {
    pub name: String,
    pub ty: Ty,
}

impl Hash for ParamDecl {
    fn hash<H: Hasher>(&self, h: &mut H) {
        self.ty.hash(h)
    }
}

/// An array in workgroup or private memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct ArrayDecl {
    pub ty: Ty,
    pub len: u32,
}

/// A kernel. Sizes, strides and offsets are parameters, so one kernel serves every shape.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Kernel {
    /// Template name, a C identifier. Not part of the program key.
    pub name: String,
    pub buffers: Vec<BufferDecl>,
    pub params: Vec<ParamDecl>,
    pub locals: Vec<ArrayDecl>,
    pub privates: Vec<ArrayDecl>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fragments: Vec<FragmentDecl>,
    pub workgroup: [u32; 3],
    /// No written buffer shares memory with another buffer.
    pub noalias: bool,
    pub exprs: Vec<Expr>,
    /// Types of the values and variables.
    pub values: Vec<Ty>,
    pub vars: Vec<Ty>,
    pub body: Vec<Stmt>,
}

impl Hash for Kernel {
    fn hash<H: Hasher>(&self, h: &mut H) {
        self.buffers.hash(h);
        self.params.hash(h);
        self.locals.hash(h);
        self.privates.hash(h);
        self.workgroup.hash(h);
        self.noalias.hash(h);
        self.exprs.hash(h);
        self.values.hash(h);
        self.vars.hash(h);
        self.body.hash(h);
        // Keys of kernels without any are as they were before there were fragments.
        if !self.fragments.is_empty() {
            self.fragments.hash(h);
        }
    }
}

/// FNV-1a with 128 bits (Fowler, Noll, Vo): the same on every platform and in every process.
pub(super) struct Fnv(pub(super) u128);

impl Fnv {
    pub(super) fn new() -> Fnv {
        Fnv(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        self.0 as u64
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.0 = (self.0 ^ b as u128).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013B);
        }
    }
    fn write_u32(&mut self, i: u32) {
        self.write(&i.to_le_bytes())
    }
    fn write_u64(&mut self, i: u64) {
        self.write(&i.to_le_bytes())
    }
    fn write_usize(&mut self, i: usize) {
        self.write(&(i as u64).to_le_bytes())
    }
    fn write_isize(&mut self, i: isize) {
        self.write(&(i as i64).to_le_bytes())
    }
}

impl Kernel {
    /// Program key: equal for kernels that render to the same text up to their name.
    pub fn key(&self) -> u128 {
        let mut h = Fnv::new();
        self.hash(&mut h);
        h.0
    }

    pub fn expr(&self, e: ExprId) -> Expr {
        self.exprs[e.ix()]
    }

    pub fn items(&self) -> u32 {
        self.workgroup.iter().product()
    }

    /// Bytes of workgroup memory.
    pub fn local_bytes(&self) -> usize {
        self.locals.iter().map(|l| l.ty.size() * l.len as usize).sum()
    }

    /// Type of each expression. The kernel must have been verified (types of ill-formed expressions are
    /// arbitrary).
    pub fn types(&self) -> Vec<Ty> {
        let mut t: Vec<Ty> = Vec::with_capacity(self.exprs.len());
        for e in &self.exprs {
            let ty = type_of(e, &|x| t.get(x.ix()).copied().unwrap_or(Ty::I32), self);
            t.push(ty);
        }
        t
    }

    /// Calls `f` on every statement, outer before inner.
    pub fn walk<'a>(&'a self, f: &mut dyn FnMut(&'a Stmt)) {
        fn go<'a>(b: &'a [Stmt], f: &mut dyn FnMut(&'a Stmt)) {
            for s in b {
                f(s);
                match s {
                    Stmt::For { body, .. } => go(body, f),
                    Stmt::If { then, els, .. } => {
                        go(then, f);
                        go(els, f);
                    }
                    Stmt::FragmentMap { body, .. } => go(body, f),
                    _ => {}
                }
            }
        }
        go(&self.body, f)
    }

    /// Whether any subgroup operation occurs.
    pub fn uses_subgroups(&self) -> bool {
        let mut yes = !self.fragments.is_empty();
        yes |= self.exprs.iter().any(|e| matches!(e, Expr::Id(Id::Lane | Id::SubgroupSize)));
        self.walk(&mut |s| {
            yes |= matches!(
                s,
                Stmt::Read {
                    read: Read::SubgroupReduce { .. }
                        | Read::SubgroupShuffle { .. }
                        | Read::SubgroupShuffleXor { .. },
                    ..
                }
            )
        });
        yes
    }

    /// Whether a type occurs in the values, variables, parameters or arrays.
    pub fn uses_ty(&self, ty: Ty) -> bool {
        self.values.contains(&ty)
            || self.vars.contains(&ty)
            || self.params.iter().any(|p| p.ty == ty)
            || self.locals.iter().chain(&self.privates).any(|a| a.ty == ty)
            || self.types().contains(&ty)
    }
}

/// Type of one expression whose operands' types are known.
pub(crate) fn type_of(e: &Expr, ty: &dyn Fn(ExprId) -> Ty, k: &Kernel) -> Ty {
    match *e {
        Expr::Const { ty, .. } => ty,
        Expr::Param(p) => k.params.get(p.ix()).map_or(Ty::I32, |p| p.ty),
        Expr::Id(_) => Ty::I32,
        Expr::Value(v) => k.values.get(v.ix()).copied().unwrap_or(Ty::I32),
        Expr::Op(op, x) => match op.row().rule {
            Rule::Test => Ty::Bool,
            Rule::Same => ty(x[0]),
            Rule::Select => ty(x[1]),
        },
        Expr::IDiv(a, _) | Expr::IRem(a, _) => ty(a),
        Expr::Cast(d, _) => Ty::of(d),
        Expr::Bitcast(t, _) | Expr::Splat(t, _) | Expr::Vector(t, _) => t,
        Expr::Dot4I8 { .. } => Ty::I32,
        Expr::Lane(a, _) if ty(a) == Ty::U32x4 => Ty::U32,
        Expr::Lane(..) => Ty::F32,
        Expr::Unpack(d, ..) => Ty::of(d),
        Expr::Pack(..) => Ty::U32,
    }
}

impl Stmt {
    /// Expressions the statement itself evaluates (not those of its blocks).
    pub fn exprs(&self) -> smallvec::SmallVec<[ExprId; 6]> {
        let mut v: smallvec::SmallVec<[ExprId; 6]> = smallvec::SmallVec::new();
        match self {
            Stmt::Let { expr, .. } => v.push(*expr),
            Stmt::Read { read, .. } => match *read {
                Read::Global { index, guard, .. } | Read::Vector { index, guard, .. } => {
                    v.push(index);
                    v.extend(guard);
                }
                Read::Word { index, .. } | Read::Local { index, .. } | Read::Private { index, .. } => {
                    v.push(index)
                }
                Read::Var(_) | Read::Element { .. } => {}
                Read::SubgroupReduce { value, .. } => v.push(value),
                Read::SubgroupShuffleXor { value, mask: m } | Read::SubgroupShuffle { value, lane: m } => {
                    v.extend([value, m])
                }
            },
            Stmt::Var { init: x, .. } | Stmt::Set { value: x, .. } => v.push(*x),
            Stmt::Store { index, value, .. }
            | Stmt::StoreVector { index, value, .. }
            | Stmt::StoreWord { index, value, .. }
            | Stmt::StoreLocal { index, value, .. }
            | Stmt::StorePrivate { index, value, .. }
            | Stmt::AtomicAdd { index, value, .. } => v.extend([*index, *value]),
            Stmt::For { start, end, step, .. } => v.extend([*start, *end, *step]),
            Stmt::If { cond, .. } => v.push(*cond),
            Stmt::Barrier { .. }
            | Stmt::Mma { .. }
            | Stmt::FragmentMap { .. }
            | Stmt::FragmentReduce { .. } => {}
            Stmt::SetError { index, code, .. } => v.extend([*index, *code]),
            Stmt::FragmentFill { value, .. } | Stmt::SetElement { value, .. } => v.push(*value),
            Stmt::FragmentLoad { tile, .. }
            | Stmt::FragmentStore { tile, .. }
            | Stmt::FragmentConvert { scratch: tile, .. } => v.extend([tile.offset, tile.stride]),
        }
        v
    }
}
