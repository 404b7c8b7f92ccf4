//! The kernel IR: a structured statement tree over a hash-consed arena of pure expressions.
//!
//! Reads of memory and of mutable variables are statements ([`Stmt::Read`]) that bind their result to a
//! value. Expressions are therefore pure: they may be evaluated any number of times wherever their operands
//! are in scope. Storage types are separate from compute types: a load converts to [`DType::compute`], a
//! store converts back.

use super::merged::Parts;
use crate::dtype::{Class, DType, Scalar};
use crate::ops::element_wise::{Rule, ScalarOp};
use serde::{Deserialize, Serialize};
use std::hash::{Hash, Hasher};

/// The type in which a value is computed.
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
    /// 16 bytes of memory as four u32 words. It can be moved, split into words and assembled, but not
    /// computed with.
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
            // `DType::compute` returns only the types above and f32.
            _ => Ty::F32,
        }
    }

    /// Element type of the value; of one lane for vectors.
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

    /// Size in bytes in workgroup memory.
    pub fn size(self) -> usize {
        // A bool occupies a 32-bit word there.
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

/// Bits of a scalar cast to type `ty`, zero-extended to 64 bits.
pub fn const_bits(ty: Ty, v: Scalar) -> u64 {
    u64::from_le_bytes(v.to_bytes(ty.dtype()))
}

/// The scalar of type `ty` with the given bits.
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
    /// An index into [`Kernel::exprs`].
    ExprId,
    /// A value that only one statement assigns: a let, a read, an atomic add, a loop (its counter), or a
    /// fragment map (its row and column).
    ValueId,
    /// A mutable variable.
    VarId,
    /// A global buffer.
    BufId,
    /// A run-time scalar.
    ParamId,
    /// A workgroup array.
    LocalId,
    /// A private array of one work-item.
    PrivateId,
    /// A matrix held in the registers of a subgroup.
    FragmentId
}

/// An index of the work-item, or a size of the launch. All have type i32.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Id {
    /// Index in the workgroup along a dimension.
    Local(u8),
    /// Index of the workgroup along a dimension.
    Group(u8),
    /// Number of workgroups along a dimension.
    Groups(u8),
    /// Index in the subgroup. A subgroup is a range of consecutive linear local indexes.
    Lane,
    /// Number of work-items in a subgroup.
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
    /// A scalar op. Unused operand slots repeat the first operand. On vectors: neg, add, sub, mul, div and
    /// fma only.
    Op(ScalarOp, [ExprId; 3]),
    /// Quotient of a non-negative integer and a positive one. Kernels use it for index arithmetic. Rendered
    /// code does not check the operands; the interpreter does.
    IDiv(ExprId, ExprId),
    /// Remainder, with the operands of [`Expr::IDiv`].
    IRem(ExprId, ExprId),
    /// Converts to a storage type with [`Scalar::cast`] (rounds, wraps or saturates), then to its compute
    /// type.
    Cast(DType, ExprId),
    /// Reinterprets the bits as another type of the same width.
    Bitcast(Ty, ExprId),
    /// `acc + sum of a[i] * b[i]` over the four signed bytes of two u32 words, in i32.
    Dot4I8 {
        a: ExprId,
        b: ExprId,
        acc: ExprId,
    },
    /// A vector with all lanes equal.
    Splat(Ty, ExprId),
    /// One lane of a vector.
    Lane(ExprId, u8),
    /// A vector of the first `lanes` operands.
    Vector(Ty, [ExprId; 4]),
    /// Extracts one 8- or 16-bit element of a word, in its compute type. Element 0 is in the lowest bits.
    Unpack(DType, ExprId, u8),
    /// Packs 8- or 16-bit elements into a word, converting each as a store does. Unused operand slots repeat
    /// the first operand.
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

    /// Whether the expression can be repeated in the rendered text at no cost.
    pub fn is_leaf(&self) -> bool {
        matches!(self, Expr::Const { .. } | Expr::Param(_) | Expr::Id(_) | Expr::Value(_))
    }
}

/// Elements of storage type `d` in a 32-bit word; 1 for types of 32 bits or more.
pub fn per_word(d: DType) -> usize {
    (32 / d.bits() as usize).clamp(1, 4)
}

/// How a subgroup combines one value per work-item.
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

/// A read whose result depends on when it is executed. If the guard is false, nothing is read and the result
/// is zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Read {
    /// One element, converted to its compute type.
    Global {
        buf: BufId,
        index: ExprId,
        guard: Option<ExprId>,
    },
    /// `lanes(ty)` elements of an f32 buffer, or 16 bytes of any buffer. The index counts vectors; the
    /// address must be aligned to the vector's size.
    Vector {
        buf: BufId,
        ty: Ty,
        index: ExprId,
        guard: Option<ExprId>,
    },
    /// A 32-bit word of any buffer, as u32. The index counts words.
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
    /// Reduces over the subgroup; every work-item gets the result. Needs workgroup-uniform control flow.
    SubgroupReduce {
        op: Reduce,
        value: ExprId,
    },
    /// The value of lane `lane xor mask`. Needs workgroup-uniform control flow.
    SubgroupShuffleXor {
        value: ExprId,
        mask: ExprId,
    },
    /// The value of the given lane. Needs workgroup-uniform control flow.
    SubgroupShuffle {
        value: ExprId,
        lane: ExprId,
    },
    /// Inside a [`Stmt::FragmentMap`]: the element at the current row and column; for [`Part::Rows`] the
    /// element of the current row.
    Element {
        of: FragmentId,
    },
}

/// Operand type of a matrix unit. Sums are f32.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum MatrixType {
    F16,
    BF16,
    /// f32 with 10 fraction bits: rounded to nearest, ties away from zero, when the operand is loaded.
    Tf32,
}

impl MatrixType {
    /// Storage type of the operands in memory.
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

/// A matrix multiply-accumulate performed by a subgroup: `c += a b`, with `a` m × k, `b` k × n and `c` m × n.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct MatrixOp {
    pub operand: MatrixType,
    pub m: u8,
    pub n: u8,
    pub k: u8,
    /// Number of work-items in the subgroup.
    pub width: u8,
}

/// The role of a fragment in a `MatrixOp`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Part {
    A,
    B,
    Sum,
    /// One f32 per row of the sums.
    Rows,
}

/// A matrix held in the registers of a subgroup. The device decides which work-item holds which elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct FragmentDecl {
    pub op: MatrixOp,
    pub part: Part,
}

impl FragmentDecl {
    /// Rows and columns of the fragment.
    pub fn shape(&self) -> [usize; 2] {
        let [m, n, k] = [self.op.m, self.op.n, self.op.k].map(usize::from);
        match self.part {
            Part::A => [m, k],
            Part::B => [k, n],
            Part::Sum => [m, n],
            Part::Rows => [m, 1],
        }
    }

    /// Type of the elements in memory.
    pub fn storage(&self) -> DType {
        match self.part {
            Part::A | Part::B => self.op.operand.storage(),
            Part::Sum | Part::Rows => DType::F32,
        }
    }
}

/// A matrix in a workgroup array of [`Ty::U32x4`]. Offset and stride count elements of the fragment's storage
/// type. Both must be multiples of 16 bytes and equal for all work-items of a subgroup.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Tile {
    pub arr: LocalId,
    pub offset: ExprId,
    /// Distance between rows, or between columns if the matrix is column-major.
    pub stride: ExprId,
    pub column_major: bool,
}

/// A statement.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Stmt {
    /// Evaluates an expression at this point.
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
    /// Stores one element, converted to the storage type: rounded to nearest even, or wrapped.
    Store {
        buf: BufId,
        index: ExprId,
        value: ExprId,
    },
    /// Stores `lanes` elements of an f32 buffer, or 16 bytes of any buffer. The index counts vectors.
    StoreVector {
        buf: BufId,
        index: ExprId,
        value: ExprId,
    },
    /// Stores a 32-bit word of any buffer. The index counts words.
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
    /// Adds atomically to an i32 or u32 element. `dst`, if given, receives the previous value.
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
    /// Barrier of the workgroup. Orders workgroup memory, and global memory if `global` is set.
    Barrier {
        global: bool,
    },
    /// Sets word `index` of a u32 buffer to `code` unless the word is already set. Kernels use it to report
    /// an index that was out of range.
    SetError {
        buf: BufId,
        index: ExprId,
        code: ExprId,
    },
    /// Sets every element of a sum or row fragment to an f32 value, which must be equal for all work-items of
    /// a subgroup. This and all other statements on fragments, except [`Stmt::SetElement`], need
    /// workgroup-uniform control flow.
    FragmentFill {
        dst: FragmentId,
        value: ExprId,
    },
    /// Loads an operand fragment from workgroup memory.
    FragmentLoad {
        dst: FragmentId,
        tile: Tile,
    },
    /// Stores a sum fragment to workgroup memory, row-major.
    FragmentStore {
        src: FragmentId,
        tile: Tile,
    },
    /// `sum += a b`. Products of operand values are exact; the device adds them in f32 in an unspecified
    /// order.
    Mma {
        sum: FragmentId,
        a: FragmentId,
        b: FragmentId,
    },
    /// Runs `body` for every element of a sum or row fragment, on a work-item that holds the element.
    /// Elements of row fragments may be visited by several work-items. `row` and `column` are i32. The body
    /// may read elements ([`Read::Element`]) and memory. Its only effect is to set elements.
    FragmentMap {
        like: FragmentId,
        row: ValueId,
        column: ValueId,
        body: Vec<Stmt>,
    },
    /// Inside a [`Stmt::FragmentMap`]: sets the element at the current row and column. The fragment must have
    /// been filled before.
    SetElement {
        dst: FragmentId,
        value: ExprId,
    },
    /// Combines each row of the sums `src` with the value of that row in `dst`, by addition or maximum. The
    /// order within a row is unspecified.
    FragmentReduce {
        dst: FragmentId,
        src: FragmentId,
        op: Reduce,
    },
    /// Converts a range of columns of a sum fragment, starting at `column`, to a left operand, and rounds to
    /// the operand type. On devices where sums and operands have different register layouts, the conversion
    /// goes through `scratch`. This is workgroup memory with space for all of the sums, row-major, in the
    /// operand type. Each subgroup needs its own `scratch`, whose content is overwritten.
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

/// A run-time scalar. The name is used in launches and messages; rendered names are positional.
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

/// An array in workgroup memory or private memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct ArrayDecl {
    pub ty: Ty,
    pub len: u32,
}

/// A kernel. Sizes, strides and offsets are parameters, so one kernel serves many shapes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Kernel {
    /// Template name, a C identifier. Not part of `Kernel::key`.
    pub name: String,
    pub buffers: Vec<BufferDecl>,
    pub params: Vec<ParamDecl>,
    pub locals: Vec<ArrayDecl>,
    pub privates: Vec<ArrayDecl>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fragments: Vec<FragmentDecl>,
    pub workgroup: [u32; 3],
    /// Whether the caller must ensure that written buffers share no memory with any other buffer.
    pub noalias: bool,
    pub exprs: Vec<Expr>,
    /// Types of the values.
    pub values: Vec<Ty>,
    pub vars: Vec<Ty>,
    pub body: Vec<Stmt>,
    /// Set in a kernel that runs another kernel several times, on different buffers. Its own body is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<Box<Parts>>,
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
        // An empty list is not hashed, so that kernels without fragments keep the keys they had before
        // fragments existed.
        if !self.fragments.is_empty() {
            self.fragments.hash(h);
        }
        if let Some(p) = &self.parts {
            p.hash(h);
        }
    }
}

/// FNV-1a hash of 128 bits (Fowler, Noll, Vo): equal on every platform and in every process.
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
    /// Hash of the kernel without its name and the names of its parameters. Kernels with equal keys render to
    /// the same text, except for the kernel's name.
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

    /// Type of each expression. The kernel must have been verified; types of ill-formed expressions are
    /// unspecified.
    pub fn types(&self) -> Vec<Ty> {
        let mut t: Vec<Ty> = Vec::with_capacity(self.exprs.len());
        for e in &self.exprs {
            let ty = type_of(e, &|x| t.get(x.ix()).copied().unwrap_or(Ty::I32), self);
            t.push(ty);
        }
        t
    }

    /// Calls `f` on every statement in pre-order.
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

    /// Whether the kernel uses subgroup operations or fragments.
    pub fn uses_subgroups(&self) -> bool {
        let mut yes = !self.fragments.is_empty();
        yes |= self.parts.as_ref().is_some_and(|p| p.kernel.uses_subgroups());
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

    /// Whether any value, variable, parameter, array or expression has type `ty`.
    pub fn uses_ty(&self, ty: Ty) -> bool {
        self.values.contains(&ty)
            || self.vars.contains(&ty)
            || self.params.iter().any(|p| p.ty == ty)
            || self.locals.iter().chain(&self.privates).any(|a| a.ty == ty)
            || self.types().contains(&ty)
            || self.parts.as_ref().is_some_and(|p| p.kernel.uses_ty(ty))
    }
}

/// Type of an expression, given the types of its operands.
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
    /// Expressions that the statement itself evaluates, without the expressions of nested blocks.
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
