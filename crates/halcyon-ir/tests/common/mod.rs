//! Kernels that between them use every node of the IR.
#![allow(dead_code)]

use halcyon_ir::kernel::*;
use halcyon_ir::scalar_op::{ROWS, Rule};
use halcyon_ir::{DType, ScalarOp};

/// `y = a x + y` over `n` elements, of any number type.
pub fn axpy(d: DType) -> Kernel {
    let b = Builder::new("axpy", [64, 1, 1]);
    b.may_alias();
    let (x, y) = (b.input(d), b.output(d));
    let (n, a) = (b.size("n"), b.param("a", Ty::of(d)));
    let i = b.linear_id();
    b.if_(i.lt(n), || {
        let v = b.load(x, i).mul_add(a, b.load(y, i));
        b.store(y, i, v);
    });
    b.finish().unwrap()
}

/// Element-wise cast from one storage type to another.
pub fn cast(from: DType, to: DType) -> Kernel {
    let b = Builder::new("cast", [64, 1, 1]);
    let (x, y) = (b.input(from), b.output(to));
    let n = b.size("n");
    let i = b.linear_id();
    b.if_(i.lt(n), || b.store(y, i, b.load(x, i).cast(to)));
    b.finish().unwrap()
}

/// A scalar op on operands of one type.
pub fn scalar(op: ScalarOp, d: DType) -> Kernel {
    let b = Builder::new("scalar", [64, 1, 1]);
    let x: Vec<Buf> = (0..op.arity())
        .map(|i| b.input(if i == 0 && op.row().rule == Rule::Select { DType::Bool } else { d }))
        .collect();
    let y = b.output(op.result(d));
    let n = b.size("n");
    let i = b.linear_id();
    b.if_(i.lt(n), || {
        let v: Vec<E> = x.iter().map(|x| b.load(*x, i)).collect();
        b.store(y, i, b.op(op, &v));
    });
    b.finish().unwrap()
}

/// Sums and maxima of rows of `n`, one workgroup per row, through a tree in workgroup memory.
pub fn row_sum(d: DType) -> Kernel {
    let b = Builder::new("row_sum", [64, 1, 1]);
    let (x, y, z) = (b.input(d), b.output(d), b.output(d));
    let n = b.size("n");
    let ty = Ty::of(d);
    let scratch = b.local(ty, 64);
    let (row, me) = (b.linear_group(), b.local_id(0));
    let sum = b.var_of(ty, 0);
    let max = b.var(b.constant(ty, Reduce::Max.identity(ty.dtype())));
    b.for_(me, n, 64, |i| {
        let v = b.load(x, row * n + i);
        sum.set(sum.get() + v);
        max.set(max.get().max(v));
    });
    let total = b.group_reduce(Reduce::Add, sum.get(), scratch);
    let most = b.group_reduce(Reduce::Max, max.get(), scratch);
    b.if_(me.equals(0), || {
        b.store(y, row, total);
        b.store(z, row, most);
    });
    b.finish().unwrap()
}

/// Subgroup operations: sum, product and extremes over the subgroup, and two shuffles.
pub fn subgroup(ty: DType) -> Kernel {
    let b = Builder::new("subgroup", [64, 1, 1]);
    let (x, y) = (b.input(ty), b.output(ty));
    let size = b.output(DType::I32);
    let i = b.linear_id();
    let v = b.load(x, i);
    for (k, op) in [Reduce::Add, Reduce::Mul, Reduce::Min, Reduce::Max].into_iter().enumerate() {
        b.store(y, i * 6 + k, b.subgroup_reduce(op, v));
    }
    b.store(y, i * 6 + 4, b.shuffle_xor(v, 1));
    b.store(y, i * 6 + 5, b.shuffle(v, b.subgroup_size() - 1 - b.lane()));
    b.store(size, i, b.subgroup_size());
    b.finish().unwrap()
}

/// Vectors, words, bytes, private arrays, atomics, the fault word and every other node.
pub fn everything() -> Kernel {
    let b = Builder::new("everything", [16, 2, 2]);
    let (v, w) = (b.raw_buffer(DType::F32, false), b.raw_buffer(DType::F32, true));
    let (packed, words) = (b.raw_buffer(DType::I8, false), b.raw_buffer(DType::U8, true));
    let counts = b.output(DType::U32);
    let flags = b.output(DType::Bool);
    let fault = b.fault();
    let n = b.size("n");
    let wide = b.param("wide", Ty::I64);
    let (lx, ly, lz) = (b.local_id(0), b.local_id(1), b.local_id(2));
    let me = b.let_((lz * 2 + ly) * 16 + lx);
    let g = b.linear_group() * 64 + me;
    let tile = b.local(Ty::F32, 64);
    let marks = b.local(Ty::Bool, 64);
    let stack = b.private(Ty::F32, 4);
    b.for_(0, 4, 1, |k| stack.store(k, k.to(Ty::F32) * 0.5));
    tile.store(me, b.load_vector(v, Ty::F32x4, g).lane(2));
    marks.store(me, me.imod(3).equals(0));
    b.barrier_global();
    let pair = b.vector(&[tile.load((me + 1).imod(64)), stack.load(3)]);
    let quad = b.load_vector(v, Ty::F32x4, g);
    let quad = quad.fma(b.constant(Ty::F32x4, 2.0), -quad) + quad * b.vector(&[pair.lane(0), pair.lane(1), pair.lane(0), pair.lane(1)]);
    b.store_vector(w, g, quad / b.constant(Ty::F32x4, 4.0) - quad);
    let a = b.load_word(packed, g);
    let dot = b.dot4_i8(a, a.xor(0x0101_0101u32), b.constant(Ty::I32, 3));
    b.store_word(words, g, dot.bitcast(Ty::U32));
    b.if_else(
        marks.load(me).and(g.lt(n)),
        || b.atomic_add(counts, 0, 1u32),
        || {
            let old = b.fetch_add(counts, 1, 2u32);
            b.if_(old.gt(1_000_000u32), || fault.set());
        },
    );
    b.store(flags, g, wide.idiv(3).imod(2).equals(0).or(marks.load(-me + 63)));
    b.finish().unwrap()
}

/// Infinities, NaN and the ends of the integer types as constants.
pub fn constants() -> Kernel {
    let b = Builder::new("constants", [1, 1, 1]);
    let f = b.raw_buffer(DType::F32, true);
    for (i, v) in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-45, 3.4e38, -0.1].into_iter().enumerate() {
        b.store(f, i, b.constant(Ty::F32, v));
    }
    let l = b.raw_buffer(DType::I64, true);
    b.store(l, 0, b.constant(Ty::I64, i64::MIN));
    b.store(l, 1, b.constant(Ty::I64, i64::MAX));
    let i = b.raw_buffer(DType::I32, true);
    b.store(i, 0, b.constant(Ty::I32, i32::MIN));
    b.store(i, 1, b.constant(Ty::I32, -7));
    let u = b.raw_buffer(DType::U64, true);
    b.store(u, 0, b.constant(Ty::U64, u64::MAX));
    b.finish().unwrap()
}

/// Every scalar op on every type it takes, of the compute types.
pub fn all_scalars(f64: bool) -> Vec<Kernel> {
    let mut out = vec![];
    for d in [DType::Bool, DType::I32, DType::U32, DType::I64, DType::U64, DType::F32, DType::F64] {
        for r in ROWS.iter().filter(|r| r.op.takes(d) && (f64 || d != DType::F64)) {
            out.push(scalar(r.op, d));
        }
    }
    out
}

/// Every cast.
pub fn all_casts(f64: bool) -> Vec<Kernel> {
    let keep = |d: &DType| f64 || *d != DType::F64;
    DType::all()
        .filter(keep)
        .flat_map(|a| DType::all().filter(keep).map(move |b| cast(a, b)))
        .collect()
}

/// Kernels for the compile tests of a language.
pub fn everything_for(f64: bool) -> Vec<Kernel> {
    let mut k = vec![everything(), constants()];
    for d in DType::all().filter(|&d| d != DType::Bool && (f64 || d != DType::F64)) {
        k.push(axpy(d));
        k.push(row_sum(d));
    }
    for d in [DType::F32, DType::I32, DType::U32] {
        k.push(subgroup(d));
    }
    k.extend(all_scalars(f64));
    k.extend(all_casts(f64));
    k
}
