//! Kernels that together use every statement and expression of the kernel IR.
#![allow(unreachable_pub, reason = "public for the test files that include this one")]
#![allow(dead_code)]

use halcyon_ir::blocks::BlockType;
use halcyon_ir::graph::Graph;
use halcyon_ir::kernel::lower::{choices, lower_op, lower_op_as};
use halcyon_ir::kernel::*;
use halcyon_ir::layout::View;
use halcyon_ir::ops::element_wise::{ROWS, Rule};
use halcyon_ir::ops::{
    CacheOperands, CachedAttention, Conv, KINDS, Op, Pool, PoolKind, ReduceKind, RowMatmul, ScatterKind,
};
use halcyon_ir::target::{Caps, Operand};
use halcyon_ir::{DType, NodeId, ScalarOp, TensorType};
use std::collections::BTreeSet;

/// `y = a x + y` over `n` elements of a number type.
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

/// A kernel with vectors, words, bytes, arrays, atomics, loops, branches and the fault word. [`subgroup`] and
/// [`matrices`] have the other statements and expressions.
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
    let quad = quad.fma(b.constant(Ty::F32x4, 2.0), -quad)
        + quad * b.vector(&[pair.lane(0), pair.lane(1), pair.lane(0), pair.lane(1)]);
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

/// For every matrix op in `ops`: products with both operand orders in workgroup memory, a row fragment, and a
/// sum that is converted to an operand.
pub fn matrices(ops: &[MatrixOp]) -> Kernel {
    let b = Builder::new("matrices", [64, 1, 1]);
    let (x, y) = (b.raw_buffer(DType::F16, false), b.raw_buffer(DType::F32, true));
    let l = b.local(Ty::U32x4, 256);
    let i = b.local_id(0);
    for part in 0..4 {
        let e = i + part * 64;
        l.store(e, b.load_vector_if(x, Ty::U32x4, e, e.lt(250)));
    }
    b.barrier();
    for op in ops {
        let [a, w, s] = [Part::A, Part::B, Part::Sum].map(|p| b.fragment(*op, p));
        b.fill_fragment(s, 0.5);
        for turned in [false, true] {
            b.load_fragment(a, l, 0, 24, turned);
            b.load_fragment(w, l, 512, 24, turned);
            b.mma(s, a, w);
        }
        let rows = b.fragment(*op, Part::Rows);
        b.fill_fragment(rows, 0.0);
        b.reduce_fragment(Reduce::Max, rows, s);
        b.map_fragment(s, |row, column| {
            let x = b.element(s) - b.element(rows);
            b.set_element(s, row.lt(column).select(x, 0.0));
        });
        b.map_fragment(rows, |row, _| b.set_element(rows, row.to(Ty::F32)));
        b.reduce_fragment(Reduce::Add, rows, s);
        b.map_fragment(s, |_, _| b.set_element(s, b.element(s) * b.element(rows)));
        b.barrier();
        let own = i.idiv(op.width as u32) * (2048 / op.operand.storage().size() as u32);
        b.convert_fragment(a, (s, op.n - op.k), l, own, 24);
        b.mma(s, a, w);
        b.barrier();
        b.store_fragment(s, l, i.idiv(op.width as u32) * 512, 24);
        b.barrier();
    }
    let quad = l.load(i);
    let word =
        b.pack(DType::BF16, &[quad.lane(0).unpack(DType::F16, 1), quad.lane(1).unpack(DType::BF16, 0)]);
    let byte = b.pack(DType::I8, &[0, 1, 2, 3].map(|k| quad.lane(2).unpack(DType::U8, k).cast(DType::I8)));
    b.store_vector(y, i, b.words([word, byte, quad.lane(3), byte]));
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

/// Every scalar op on every compute type that it accepts.
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
    DType::native().filter(keep).flat_map(|a| DType::native().filter(keep).map(move |b| cast(a, b))).collect()
}

/// The kinds of ops without a template. They become parts of fused kernels, buffers or views; a custom op has
/// its own kernel. Every other kind must be in [`templates`].
const WITHOUT_TEMPLATE: &[&str] = &[
    "scalar",
    "reduce",
    "custom",
    "input",
    "arg",
    "const",
    "full",
    "iota",
    "cast",
    "bitcast",
    "reshape",
    "permute",
    "expand",
    "slice",
    "pad",
    "recompute",
];

/// Every template on every type it accepts. These kernels are rendered and compiled in every language.
pub fn templates(f64: bool) -> Vec<Kernel> {
    let mut out = vec![];
    let mut seen = BTreeSet::new();
    let caps = Caps { f64, ..Caps::generous() };
    let mut add = |op: Op, x: &[(DType, &[usize])], d: DType, shape: &[usize]| {
        let o = |d: DType, s: &[usize]| Operand { dtype: d, view: View::dense(s) };
        let x: Vec<Operand> = x.iter().map(|(d, s)| o(*d, s)).collect();
        seen.insert(op.kind());
        match lower_op(&op, &x, &[o(d, shape)], false, &caps) {
            Ok(l) => out.extend(l.steps.into_iter().map(|s| s.0)),
            Err(e) => panic!("{} on {d}: {}", op.name(), e.reason),
        }
    };
    let composite = |d: DType, n: usize, f: &dyn Fn(&mut Graph, &[NodeId]) -> NodeId| -> Op {
        let mut g = Graph::new();
        let shape = |i: usize| -> &[usize] {
            match (n, i) {
                (3, _) => &[2, 2, 4, 4],
                (_, 0) => &[4, 4],
                _ => &[4],
            }
        };
        let x: Vec<NodeId> = (0..n).map(|i| g.input("x", TensorType::new(d, shape(i)))).collect();
        let id = f(&mut g, &x);
        g.node(id).op.clone()
    };
    for d in DType::native().filter(|&d| f64 || d != DType::F64) {
        let s: &[usize] = &[4, 4];
        let i = (DType::I64, s);
        add(Op::Gather { axis: 0 }, &[(d, s), (DType::I32, &[3])], d, &[3, 4]);
        add(Op::GatherElements { axis: 1 }, &[(d, s), i], d, s);
        add(Op::UpdateSlice { axis: 0 }, &[(d, s), (d, &[1, 4]), (DType::I64, &[])], d, s);
        add(Op::Concat { axis: 1 }, &[(d, s), (d, s)], d, &[4, 8]);
        add(Op::ArgSort { axis: 1, descending: true }, &[(d, s)], DType::I64, s);
        add(Op::ArgReduce { max: true, axis: 1, keep: false, last: true }, &[(d, s)], DType::I64, &[4]);
        if d == DType::Bool {
            continue;
        }
        for ignore in [None, Some(-100)].into_iter().filter(|_| d.is_int()) {
            add(Op::ClassIndex { classes: 4.into(), ignore }, &[(d, s)], DType::I64, s);
        }
        for kind in [ScatterKind::Set, ScatterKind::Add, ScatterKind::Min] {
            add(Op::ScatterElements { axis: 1, kind }, &[(d, s), i, (d, s)], d, s);
        }
        add(
            Op::ScatterRows { axis: 0, kind: ScatterKind::Mul },
            &[(d, s), (DType::I32, &[3]), (d, &[3, 4])],
            d,
            s,
        );
        add(
            Op::ScatterRows { axis: 0, kind: ScatterKind::Set },
            &[(d, s), (DType::I32, &[3]), (d, &[3, 4])],
            d,
            s,
        );
        add(Op::Scan { kind: ReduceKind::Sum, axis: 0, exclusive: true, reverse: true }, &[(d, s)], d, s);
        add(Op::Matmul, &[(d, s), (d, s)], d, s);
        add(Op::Matmul, &[(d, &[64, 64]), (d, &[64, 64])], d, &[64, 64]);
        add(Op::Matmul, &[(d, &[1, 300]), (d, &[300, 1])], d, &[1, 1]);
        let kinds = [PoolKind::Max, PoolKind::Avg { count_include_pad: true }];
        for kind in kinds.into_iter().filter(|k| d.is_float() || *k == PoolKind::Max) {
            let two = || [2, 2].as_slice().into();
            let p = Pool {
                kind,
                kernel: two(),
                stride: two(),
                pad: [(0, 0), (0, 0)].as_slice().into(),
                dilation: two(),
            };
            let (x, y): (&[usize], &[usize]) = (&[1, 2, 5, 5], &[1, 2, 2, 2]);
            add(Op::Pool(p.clone()), &[(d, x)], d, y);
            if d.is_float() {
                add(Op::PoolGrad(p), &[(d, x), (d, y), (d, y)], d, x);
            }
        }
        if !d.is_float() {
            continue;
        }
        add(Op::Conv(Conv::new(2)), &[(d, &[1, 2, 4, 4]), (d, &[3, 2, 3, 3])], d, &[1, 3, 2, 2]);
        let c = Conv { input_dilation: [2, 2].as_slice().into(), ..Conv::new(2) };
        add(Op::Conv(c), &[(d, &[1, 2, 4, 4]), (d, &[3, 2, 3, 3])], d, &[1, 3, 5, 5]);
        add(composite(d, 1, &|g, x| g.softmax(x[0], 1).unwrap()), &[(d, s)], d, s);
        add(composite(d, 1, &|g, x| g.log_softmax(x[0], 1).unwrap()), &[(d, s)], d, s);
        add(composite(d, 2, &|g, x| g.rms_norm(x[0], x[1], 1e-5).unwrap()), &[(d, s), (d, &[4])], d, s);
        let layer = composite(d, 2, &|g, x| g.layer_norm(x[0], x[1], Some(x[1]), 1, 1e-5).unwrap());
        add(layer, &[(d, s), (d, &[4]), (d, &[4])], d, s);
        let q: &[usize] = &[2, 2, 4, 4];
        let att = composite(d, 3, &|g, x| g.attention(x[0], x[1], x[2], None, true, 0.5).unwrap());
        add(att, &[(d, q), (d, q), (d, q)], d, q);
    }
    let blocks = |ty: BlockType, n: usize| ty.bytes_of(n).unwrap();
    for ty in BlockType::ALL.iter().copied() {
        add(Op::DecodeBlocks(ty), &[(DType::U8, &[2, blocks(ty, 256)])], DType::F32, &[2, 256]);
    }
    for kind in KINDS.iter().filter(|k| !WITHOUT_TEMPLATE.contains(k)) {
        assert!(seen.contains(kind), "the template of {kind} is not in this list");
    }
    out
}

/// The kernels of language models, for a GPU and for a CPU: products with every type of weights, for one row
/// and for a tile of rows, and attention over a cache, with the parts divided among workgroups or not.
pub fn language_models() -> Vec<Kernel> {
    let mut out = vec![];
    let gpu = Caps::generous();
    let whole = Caps { compute_units: Some(0), ..gpu.clone() };
    let cpu = Caps { is_cpu: true, ..gpu.clone() };
    let mut add = |caps: &Caps, x: &[(DType, &[usize])], f: &dyn Fn(&mut Graph, &[NodeId]) -> NodeId| {
        let mut g = Graph::new();
        let ids: Vec<NodeId> = x.iter().map(|(d, s)| g.input("x", TensorType::new(*d, *s))).collect();
        let y = f(&mut g, &ids);
        let dense = |d: DType, s: &[usize]| Operand { dtype: d, view: View::dense(s) };
        let inputs: Vec<Operand> = x.iter().map(|(d, s)| dense(*d, s)).collect();
        let output = [dense(DType::F32, &g.shape(y).known().unwrap())];
        let low = lower_op(&g.node(y).op, &inputs, &output, false, caps).unwrap();
        out.extend(low.steps.into_iter().map(|s| s.0));
    };
    for (m, caps) in [(1, &gpu), (8, &gpu), (3, &cpu)] {
        for ty in BlockType::ALL.iter().copied() {
            let w: &[usize] = &[6, ty.bytes_of(512).unwrap()];
            add(caps, &[(DType::F32, &[m, 512]), (DType::U8, w)], &|g, x| {
                g.row_matmul(x[0], x[1], Some(ty), None).unwrap()
            });
        }
        for d in [DType::F32, DType::F16, DType::BF16] {
            for k in [64, 77] {
                add(caps, &[(DType::F32, &[m, k]), (d, &[6, k])], &|g, x| {
                    g.row_matmul(x[0], x[1], None, None).unwrap()
                });
            }
        }
        let bytes = BlockType::Q4_K.bytes_of(256).unwrap();
        let x: &[(DType, &[usize])] =
            &[(DType::F32, &[m, 256]), (DType::U8, &[4, 6, bytes]), (DType::I64, &[m])];
        add(caps, x, &|g, x| g.row_matmul(x[0], x[1], Some(BlockType::Q4_K), Some(x[2])).unwrap());
    }
    for caps in [&gpu, &whole, &cpu] {
        let types = [(DType::F32, 64), (DType::F16, 128), (DType::BF16, 50), (DType::U8, 96)];
        for (d, size) in types {
            let columns = if d == DType::U8 { BlockType::Q8_0.bytes_of(size).unwrap() } else { size };
            let cache: &[usize] = &[40, 2, 16, columns];
            let ints: &[usize] = &[3];
            let x: &[(DType, &[usize])] = &[
                (DType::F32, &[3, 8, size]),
                (d, cache),
                (d, cache),
                (DType::I32, &[2, 30]),
                (DType::I32, ints),
                (DType::I32, ints),
                (DType::F32, &[8]),
            ];
            let plain = size == 64;
            let options = CachedAttention {
                scale: 0.125,
                softcap: (!plain).then_some(30.0),
                window: (!plain).then_some(300),
            };
            let operands = if plain { &x[..6] } else { x };
            add(caps, operands, &|g, x| {
                let cache = CacheOperands {
                    keys: x[1],
                    values: x[2],
                    table: x[3],
                    sequence: x[4],
                    position: x[5],
                    sinks: x.get(6).copied(),
                };
                g.cached_attention(x[0], cache, options).unwrap()
            });
        }
    }
    out
}

/// Attention for few queries: with one row and with a full workgroup of rows, with and without a split of the
/// keys, and with reads of 16 bytes and of single elements.
pub fn few_queries(f64: bool) -> Vec<Kernel> {
    let mut out = vec![];
    let caps = Caps { f64, compute_units: Some(64), ..Caps::generous() };
    for d in DType::native().filter(|d| d.is_float() && (f64 || *d != DType::F64)) {
        for (heads, keys, size) in [(1, 300, 64), (4, 300, 128), (8, 300, 50), (8, 40, 128)] {
            let (q, kv) = ([1, heads, 1, size], [1, 1, keys, size]);
            let mut g = Graph::new();
            let x = [&q, &kv, &kv].map(|s| g.input("x", TensorType::new(d, *s)));
            let y = g.attention(x[0], x[1], x[2], None, true, 0.125).unwrap();
            let inputs = [&q, &kv, &kv].map(|s| Operand { dtype: d, view: View::dense(s) });
            let output = [inputs[0].clone()];
            let low = lower_op(&g.node(y).op, &inputs, &output, false, &caps).unwrap();
            assert_eq!(low.steps.len(), if keys > 256 { 2 } else { 1 });
            out.extend(low.steps.into_iter().map(|s| s.0));
        }
    }
    out
}

/// Products on matrix units. For each type, each operand is contiguous along K or across it, and is read with
/// and without 16-byte reads. One of these layouts is built with every tile.
pub fn matrix_products(caps: &Caps) -> Vec<Kernel> {
    let mut out: Vec<Kernel> = vec![];
    let types: BTreeSet<MatrixType> = caps.matrix.iter().map(|o| o.operand).collect();
    for t in types {
        let d = t.storage();
        for n in [256, 250] {
            for [x, y] in [[false, false], [true, false], [false, true], [true, true]] {
                let o = |turn: bool| {
                    let v = View::dense(&[n, n]);
                    Operand { dtype: d, view: if turn { v.permute(&[1, 0]) } else { v } }
                };
                let dense = || Operand { dtype: d, view: View::dense(&[n, n]) };
                let (inputs, output) = ([o(x), o(y)], [dense()]);
                let c = choices(&Op::Matmul, &inputs, &output, caps).unwrap();
                let all = c.others.iter().chain([&c.default]).filter(|v| v.kernel == "matrix");
                // All tiles for one layout; only the heuristic's choice for the others.
                for v in all.filter(|v| (n, x, y) == (256, false, false) || **v == c.default) {
                    let low = lower_op_as(&Op::Matmul, &inputs, &output, caps, v).unwrap();
                    out.extend(low.steps.into_iter().map(|s| s.0));
                }
            }
        }
    }
    out
}

/// Products of language models on matrix units: every type of weights for one row, and a type of each kind
/// for further numbers of rows, with activations of one part and of two.
pub fn matrix_language_products(caps: &Caps) -> Vec<Kernel> {
    let mut out = vec![];
    let mut add = |m: usize, (d, w): (DType, &[usize]), k: usize, options: RowMatmul| {
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, [m, k]));
        let w = (g.input("w", TensorType::new(d, w)), Operand { dtype: d, view: View::dense(w) });
        let y = g.row_matmul(x, w.0, options, None).unwrap();
        let dense = |s: &[usize]| Operand { dtype: DType::F32, view: View::dense(s) };
        let (inputs, output) = ([dense(&[m, k]), w.1], [dense(&g.shape(y).known().unwrap())]);
        let low = lower_op(&g.node(y).op, &inputs, &output, false, caps).unwrap();
        assert_eq!(low.steps[0].0.name, "row_product_matrix");
        out.extend(low.steps.into_iter().map(|s| s.0));
    };
    let kinds = [BlockType::Q4_0, BlockType::Q4_K, BlockType::Q6_K];
    for ty in BlockType::ALL.iter().copied() {
        let rows: &[usize] = if kinds.contains(&ty) { &[1, 16, 32, 64, 512] } else { &[1] };
        for &m in rows {
            for fine in [false, true].into_iter().filter(|fine| !fine || kinds.contains(&ty)) {
                let w: &[usize] = &[2048, ty.bytes_of(512).unwrap()];
                add(m, (DType::U8, w), 512, RowMatmul { blocks: Some(ty), fine });
            }
        }
    }
    for d in [DType::F16, DType::BF16] {
        for (m, k) in [(1, 512), (64, 512), (512, 512), (64, 77)] {
            add(m, (d, &[2048, k]), k, RowMatmul::default());
        }
    }
    out
}

/// Attention on matrix units. For each type: calls with a causal limit and shared heads, built with the
/// heuristic's choice, and for f16 with every tile. For f16 also: calls with other row lengths, masks, odd
/// sizes and large offsets, built with the heuristic's choice.
pub fn matrix_attention(caps: &Caps) -> Vec<Kernel> {
    let mut out: Vec<Kernel> = vec![];
    let types: BTreeSet<MatrixType> = caps.matrix.iter().map(|o| o.operand).collect();
    for t in types {
        let d = t.storage();
        // Batch, query heads, key heads, queries, keys and row length; whether the call is causal, has a
        // mask, and is built with every tile.
        let calls = [
            ([2, 8, 4, 512, 512, 64], true, false, true),
            ([1, 8, 2, 512, 512, 128], true, false, true),
            ([1, 4, 4, 77, 99, 61], true, true, false),
            ([1, 4, 4, 90, 90, 64], false, true, false),
            ([1 << 12, 32, 32, 256, 256, 64], false, false, false),
        ];
        // The kernels of the types differ only in one instruction. So types other than f16 need only the
        // calls that f16 builds with every tile.
        for ([b, h, hk, sq, sk, w], causal, masked, every) in
            calls.into_iter().filter(|c| t == MatrixType::F16 || c.3)
        {
            let mut g = Graph::new();
            let shapes = [vec![b, h, sq, w], vec![b, hk, sk, w], vec![b, hk, sk, w], vec![sq, sk]];
            let shapes = &shapes[..if masked { 4 } else { 3 }];
            // The call with a mask but without a causal limit imitates mixed precision: its mask is f32, the
            // compute type of the composite.
            let mixed = masked && !causal;
            let wide = |d| if mixed { DType::F32 } else { d };
            let x: Vec<NodeId> =
                shapes.iter().map(|s| g.input("x", TensorType::new(wide(d), &s[..]))).collect();
            let y = g.attention(x[0], x[1], x[2], x.get(3).copied(), causal, 0.125).unwrap();
            let dense = |d: DType, s: &[usize]| Operand { dtype: d, view: View::dense(s) };
            let inputs: Vec<Operand> =
                shapes.iter().enumerate().map(|(i, s)| dense(if i == 3 { wide(d) } else { d }, s)).collect();
            let (op, output) = (&g.node(y).op, [dense(d, &[b, h, sq, w])]);
            let c = choices(op, &inputs, &output, caps).unwrap();
            assert_eq!(c.default.kernel, "matrix", "{}", c.key);
            let all = c.others.iter().chain([&c.default]).filter(|v| v.kernel == "matrix");
            for v in all.filter(|v| every && t == MatrixType::F16 || **v == c.default) {
                let low = lower_op_as(op, &inputs, &output, caps, v).unwrap();
                out.extend(low.steps.into_iter().map(|s| s.0));
            }
        }
    }
    out
}

/// Kernels for the compile tests of a language.
pub fn everything_for(f64: bool) -> Vec<Kernel> {
    let mut k = vec![everything(), constants()];
    for d in DType::native().filter(|&d| d != DType::Bool && (f64 || d != DType::F64)) {
        k.push(axpy(d));
        k.push(row_sum(d));
    }
    for d in [DType::F32, DType::I32, DType::U32] {
        k.push(subgroup(d));
    }
    k.extend(templates(f64));
    k.extend(few_queries(f64));
    k.extend(language_models());
    k.extend(all_scalars(f64));
    k.extend(all_casts(f64));
    k
}

/// Parses and validates a WGSL module with all 64-bit and 16-bit capabilities that a device may have.
pub fn naga_validates(text: &str) -> Result<(), String> {
    use naga::valid::{Capabilities, ValidationFlags, Validator};
    let module = naga::front::wgsl::parse_str(text).map_err(|e| e.emit_to_string(text))?;
    Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map(|_| ())
        .map_err(|e| e.emit_to_string(text))
}
