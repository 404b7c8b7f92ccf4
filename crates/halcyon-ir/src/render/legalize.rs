//! Replaces subgroup operations for languages without them: work-items exchange values through workgroup
//! memory, in emulated subgroups of 32.

use crate::dtype::Scalar;
use crate::kernel::ir::*;
use crate::ops::element_wise::ScalarOp;
use std::collections::HashMap;

/// Size of the emulated subgroups.
const WIDTH: i64 = 32;

struct Pass {
    k: Kernel,
    types: Vec<Ty>,
    scratch: HashMap<Ty, LocalId>,
    linear: ExprId,
    lane: ExprId,
}

/// The kernel without subgroup operations. In verified kernels all work-items reach these operations, so the
/// inserted barriers are legal.
pub fn without_subgroups(kernel: &Kernel) -> Kernel {
    if !kernel.uses_subgroups() {
        return kernel.clone();
    }
    let mut k = Kernel { exprs: vec![], ..kernel.clone() };
    let mut add = |e: Expr| {
        k.exprs.push(e);
        ExprId(k.exprs.len() as u32 - 1)
    };
    let w = kernel.workgroup;
    let int = |v: i64, add: &mut dyn FnMut(Expr) -> ExprId| {
        add(Expr::Const { ty: Ty::I32, bits: const_bits(Ty::I32, Scalar::I(v)) })
    };
    let ids: Vec<ExprId> = (0..3).map(|d| add(Expr::Id(Id::Local(d)))).collect();
    let (wx, wy) = (int(w[0] as i64, &mut add), int(w[1] as i64, &mut add));
    let zy = op2(&mut add, ScalarOp::Mul, ids[2], wy);
    let y = op2(&mut add, ScalarOp::Add, ids[1], zy);
    let yx = op2(&mut add, ScalarOp::Mul, y, wx);
    let linear = op2(&mut add, ScalarOp::Add, ids[0], yx);
    let width = int(WIDTH, &mut add);
    let lane = add(Expr::IRem(linear, width));
    // The new expression of each expression. The lane and the subgroup size become their emulations.
    let mut map: Vec<ExprId> = Vec::with_capacity(kernel.exprs.len());
    for e in &kernel.exprs {
        let id = match *e {
            Expr::Id(Id::Lane) => lane,
            Expr::Id(Id::SubgroupSize) => width,
            e => {
                k.exprs.push(remap(e, &map));
                ExprId(k.exprs.len() as u32 - 1)
            }
        };
        map.push(id);
    }
    let mut body = kernel.body.clone();
    remap_block(&mut body, &map);
    let types = k.types();
    let mut p = Pass { k, types, scratch: HashMap::new(), linear, lane };
    let body = p.block(body);
    p.k.body = body;
    p.k
}

fn op2(add: &mut dyn FnMut(Expr) -> ExprId, op: ScalarOp, a: ExprId, b: ExprId) -> ExprId {
    add(Expr::Op(op, [a, b, a]))
}

fn remap(e: Expr, map: &[ExprId]) -> Expr {
    let m = |x: ExprId| map[x.ix()];
    match e {
        Expr::Const { .. } | Expr::Param(_) | Expr::Id(_) | Expr::Value(_) => e,
        Expr::Op(op, x) => Expr::Op(op, x.map(m)),
        Expr::IDiv(a, b) => Expr::IDiv(m(a), m(b)),
        Expr::IRem(a, b) => Expr::IRem(m(a), m(b)),
        Expr::Cast(d, a) => Expr::Cast(d, m(a)),
        Expr::Bitcast(t, a) => Expr::Bitcast(t, m(a)),
        Expr::Dot4I8 { a, b, acc } => Expr::Dot4I8 { a: m(a), b: m(b), acc: m(acc) },
        Expr::Splat(t, a) => Expr::Splat(t, m(a)),
        Expr::Lane(a, i) => Expr::Lane(m(a), i),
        Expr::Vector(t, x) => Expr::Vector(t, x.map(m)),
        Expr::Unpack(d, a, i) => Expr::Unpack(d, m(a), i),
        Expr::Pack(d, x) => Expr::Pack(d, x.map(m)),
    }
}

fn remap_block(b: &mut [Stmt], map: &[ExprId]) {
    let m = |x: &mut ExprId| *x = map[x.ix()];
    for s in b {
        match s {
            Stmt::Let { expr, .. } => m(expr),
            Stmt::Read { read, .. } => match read {
                Read::Global { index, guard, .. } | Read::Vector { index, guard, .. } => {
                    m(index);
                    guard.iter_mut().for_each(m);
                }
                Read::Word { index, .. } | Read::Local { index, .. } | Read::Private { index, .. } => {
                    m(index)
                }
                Read::Var(_) | Read::Element { .. } => {}
                Read::SubgroupReduce { value, .. } => m(value),
                Read::SubgroupShuffleXor { value, mask: x } | Read::SubgroupShuffle { value, lane: x } => {
                    m(value);
                    m(x);
                }
            },
            Stmt::Var { init: x, .. } | Stmt::Set { value: x, .. } => m(x),
            Stmt::Store { index, value, .. }
            | Stmt::StoreVector { index, value, .. }
            | Stmt::StoreWord { index, value, .. }
            | Stmt::StoreLocal { index, value, .. }
            | Stmt::StorePrivate { index, value, .. }
            | Stmt::AtomicAdd { index, value, .. } => {
                m(index);
                m(value);
            }
            Stmt::For { start, end, step, body, .. } => {
                m(start);
                m(end);
                m(step);
                remap_block(body, map);
            }
            Stmt::If { cond, then, els } => {
                m(cond);
                remap_block(then, map);
                remap_block(els, map);
            }
            Stmt::Barrier { .. } | Stmt::Mma { .. } | Stmt::FragmentReduce { .. } => {}
            Stmt::SetError { index, code, .. } => {
                m(index);
                m(code);
            }
            Stmt::FragmentMap { body, .. } => remap_block(body, map),
            Stmt::FragmentFill { value, .. } | Stmt::SetElement { value, .. } => m(value),
            Stmt::FragmentLoad { tile, .. }
            | Stmt::FragmentStore { tile, .. }
            | Stmt::FragmentConvert { scratch: tile, .. } => {
                m(&mut tile.offset);
                m(&mut tile.stride);
            }
        }
    }
}

impl Pass {
    fn expr(&mut self, e: Expr) -> ExprId {
        let ty = type_of(&e, &|x| self.types[x.ix()], &self.k);
        self.k.exprs.push(e);
        self.types.push(ty);
        ExprId(self.k.exprs.len() as u32 - 1)
    }

    fn op(&mut self, op: ScalarOp, a: ExprId, b: ExprId) -> ExprId {
        self.expr(Expr::Op(op, [a, b, a]))
    }

    fn int(&mut self, v: i64) -> ExprId {
        self.expr(Expr::Const { ty: Ty::I32, bits: const_bits(Ty::I32, Scalar::I(v)) })
    }

    fn value(&mut self, ty: Ty) -> (ValueId, ExprId) {
        self.k.values.push(ty);
        let v = ValueId(self.k.values.len() as u32 - 1);
        (v, self.expr(Expr::Value(v)))
    }

    fn block(&mut self, b: Vec<Stmt>) -> Vec<Stmt> {
        let mut out = vec![];
        for s in b {
            match s {
                Stmt::For { var, start, end, step, body } => {
                    let body = self.block(body);
                    out.push(Stmt::For { var, start, end, step, body });
                }
                Stmt::If { cond, then, els } => {
                    let (then, els) = (self.block(then), self.block(els));
                    out.push(Stmt::If { cond, then, els });
                }
                Stmt::Read { dst, read: Read::SubgroupReduce { op, value } } => {
                    self.reduce(&mut out, dst, op, value)
                }
                Stmt::Read { dst, read: Read::SubgroupShuffle { value, lane } } => {
                    self.shuffle(&mut out, dst, value, lane)
                }
                Stmt::Read { dst, read: Read::SubgroupShuffleXor { value, mask } } => {
                    let lane = self.op(ScalarOp::Xor, self.lane, mask);
                    self.shuffle(&mut out, dst, value, lane)
                }
                s => out.push(s),
            }
        }
        out
    }

    /// Stores each work-item's value in an array of workgroup memory and adds a barrier. Returns the array.
    fn publish(&mut self, out: &mut Vec<Stmt>, value: ExprId) -> LocalId {
        let ty = self.types[value.ix()];
        let arr = match self.scratch.get(&ty) {
            Some(&a) => a,
            None => {
                self.k.locals.push(ArrayDecl { ty, len: self.k.items() });
                let a = LocalId(self.k.locals.len() as u32 - 1);
                self.scratch.insert(ty, a);
                a
            }
        };
        out.push(Stmt::StoreLocal { arr, index: self.linear, value });
        out.push(Stmt::Barrier { global: false });
        arr
    }

    fn base(&mut self) -> ExprId {
        self.op(ScalarOp::Sub, self.linear, self.lane)
    }

    fn shuffle(&mut self, out: &mut Vec<Stmt>, dst: ValueId, value: ExprId, lane: ExprId) {
        let arr = self.publish(out, value);
        let base = self.base();
        let index = self.op(ScalarOp::Add, base, lane);
        out.push(Stmt::Read { dst, read: Read::Local { arr, index } });
        out.push(Stmt::Barrier { global: false });
    }

    fn reduce(&mut self, out: &mut Vec<Stmt>, dst: ValueId, op: Reduce, value: ExprId) {
        let ty = self.types[value.ix()];
        let arr = self.publish(out, value);
        let base = self.base();
        let init = Expr::Const { ty, bits: const_bits(ty, op.identity(ty.dtype())) };
        let init = self.expr(init);
        self.k.vars.push(ty);
        let var = VarId(self.k.vars.len() as u32 - 1);
        out.push(Stmt::Var { var, init });
        let (counter, i) = self.value(Ty::I32);
        let (x, xe) = self.value(ty);
        let (acc, ae) = self.value(ty);
        let index = self.op(ScalarOp::Add, base, i);
        let sum = self.op(op.op(), ae, xe);
        let body = vec![
            Stmt::Read { dst: x, read: Read::Local { arr, index } },
            Stmt::Read { dst: acc, read: Read::Var(var) },
            Stmt::Set { var, value: sum },
        ];
        let (start, end, step) = (self.int(0), self.int(WIDTH), self.int(1));
        out.push(Stmt::For { var: counter, start, end, step, body });
        out.push(Stmt::Read { dst, read: Read::Var(var) });
        out.push(Stmt::Barrier { global: false });
    }
}
