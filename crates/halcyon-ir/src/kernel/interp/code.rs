//! Compiles the statement tree to flat code over registers.

use super::scalar;
use crate::dtype::DType;
use crate::kernel::ir::*;
use crate::ops::element_wise::{Rule, ScalarOp};
use std::collections::HashMap;

pub(super) type Reg = u32;
/// Stands for a register that an instruction does not have.
pub(super) const NONE: Reg = u32::MAX;

#[derive(Clone, Copy, Debug)]
pub(super) enum Ins {
    Un(scalar::F1, Reg, Reg),
    Bin(scalar::F2, Reg, Reg, Reg),
    Tri(scalar::F3, Reg, Reg, Reg, Reg),
    Op(ScalarOp, Ty, Reg, [Reg; 3]),
    Cast(DType, Ty, Reg, Reg),
    /// Quotient of index arithmetic, or its remainder if the flag is true.
    Index(bool, Reg, Reg, Reg),
    Move(Reg, Reg, u8),
    Load {
        dst: Reg,
        buf: u32,
        dtype: DType,
        index: Reg,
        guard: Reg,
    },
    LoadVector {
        dst: Reg,
        buf: u32,
        lanes: u8,
        index: Reg,
        guard: Reg,
    },
    LoadWord {
        dst: Reg,
        buf: u32,
        index: Reg,
    },
    LoadLocal {
        dst: Reg,
        arr: u32,
        lanes: u8,
        index: Reg,
    },
    LoadPrivate {
        dst: Reg,
        arr: u32,
        lanes: u8,
        index: Reg,
    },
    Store {
        buf: u32,
        dtype: DType,
        index: Reg,
        value: Reg,
    },
    StoreVector {
        buf: u32,
        lanes: u8,
        index: Reg,
        value: Reg,
    },
    StoreWord {
        buf: u32,
        index: Reg,
        value: Reg,
    },
    StoreLocal {
        arr: u32,
        lanes: u8,
        index: Reg,
        value: Reg,
    },
    StorePrivate {
        arr: u32,
        lanes: u8,
        index: Reg,
        value: Reg,
    },
    AtomicAdd {
        dst: Reg,
        buf: u32,
        dtype: DType,
        index: Reg,
        value: Reg,
    },
    SetError {
        buf: u32,
        index: Reg,
        value: Reg,
    },
    Jump(u32),
    JumpUnless(Reg, u32),
    /// Jumps out of the loop to `to` if the counter has reached the end.
    Loop {
        var: Reg,
        end: Reg,
        step: Reg,
        to: u32,
    },
    Next {
        var: Reg,
        step: Reg,
        to: u32,
    },
    Barrier {
        global: bool,
    },
    Reduce {
        op: Reduce,
        ty: Ty,
        dst: Reg,
        value: Reg,
    },
    Shuffle {
        xor: bool,
        dst: Reg,
        value: Reg,
        lane: Reg,
    },
    /// `Unpack` extracts an element of a word, starting at bit `shift`; `Pack` packs up to four registers
    /// into a word.
    Unpack {
        dtype: DType,
        dst: Reg,
        word: Reg,
        shift: u8,
    },
    Pack {
        dtype: DType,
        dst: Reg,
        x: [Reg; 4],
    },
    Fill {
        dst: u32,
        value: Reg,
    },
    /// `LoadMatrix` loads a fragment from an array, and `StoreMatrix` stores it to one. `at` holds the offset
    /// and the stride.
    LoadMatrix {
        matrix: u32,
        arr: u32,
        at: [Reg; 2],
        column_major: bool,
    },
    StoreMatrix {
        matrix: u32,
        arr: u32,
        at: [Reg; 2],
    },
    Mma {
        sum: u32,
        a: u32,
        b: u32,
    },
    ReduceMatrix {
        dst: u32,
        src: u32,
        op: Reduce,
    },
    ConvertMatrix {
        dst: u32,
        src: u32,
        column: u8,
        arr: u32,
        at: [Reg; 2],
    },
    /// Waits before a fragment map, so that elements set by other work-items are visible.
    Meet,
    /// Sets `at` to the row and column of the work-item's element number `round`. Jumps to `to` after the
    /// last one.
    Place {
        like: u32,
        round: Reg,
        at: [Reg; 2],
        to: u32,
    },
    Element {
        dst: Reg,
        matrix: u32,
        at: [Reg; 2],
    },
    SetElement {
        matrix: u32,
        at: [Reg; 2],
        value: Reg,
    },
    Halt,
}

#[derive(Debug)]
pub(super) struct Code {
    pub ins: Vec<Ins>,
    /// Statement that each instruction belongs to.
    pub statements: Vec<u32>,
    pub regs: usize,
    pub constants: Vec<(Reg, u64)>,
    pub params: Vec<Reg>,
    pub ids: Vec<(Id, Reg)>,
    /// Offset in words of each array.
    pub locals: Vec<usize>,
    pub local_words: usize,
    pub privates: Vec<usize>,
    pub private_words: usize,
    /// Whether work-items synchronise.
    pub sync: bool,
}

struct Gen<'a> {
    k: &'a Kernel,
    types: Vec<Ty>,
    code: Code,
    /// Registers of the expressions. The expression of a value or parameter has the register of that value or
    /// parameter.
    exprs: Vec<Reg>,
    values: Vec<Reg>,
    vars: Vec<Reg>,
    /// Whether each expression is already computed, in the current block or in a block around it.
    ready: Vec<bool>,
    statement: u32,
    next_statement: u32,
    /// Registers of the row and column of the enclosing fragment map.
    place: [Reg; 2],
}

fn offsets(a: &[ArrayDecl]) -> (Vec<usize>, usize) {
    let mut n = 0;
    let v = a
        .iter()
        .map(|a| {
            n += a.ty.lanes() * a.len as usize;
            n - a.ty.lanes() * a.len as usize
        })
        .collect();
    (v, n)
}

impl Code {
    /// Compiles `k`, which must have been verified.
    pub(super) fn new(k: &Kernel) -> Code {
        let (locals, local_words) = offsets(&k.locals);
        let (privates, private_words) = offsets(&k.privates);
        let code = Code {
            ins: vec![],
            statements: vec![],
            regs: 0,
            constants: vec![],
            params: vec![],
            ids: vec![],
            locals,
            local_words,
            privates,
            private_words,
            sync: false,
        };
        let mut g = Gen {
            k,
            types: k.types(),
            code,
            exprs: vec![NONE; k.exprs.len()],
            values: vec![],
            vars: vec![],
            ready: vec![false; k.exprs.len()],
            statement: 0,
            next_statement: 0,
            place: [NONE; 2],
        };
        g.code.params = k.params.iter().map(|_| g.code.regs as Reg).collect();
        for i in 0..k.params.len() {
            g.code.params[i] = g.reg(Ty::I32);
        }
        g.values = k.values.iter().map(|&t| g.reg(t)).collect();
        g.vars = k.vars.iter().map(|&t| g.reg(t)).collect();
        let mut ids: HashMap<Id, Reg> = HashMap::new();
        for (i, e) in k.exprs.iter().enumerate() {
            g.exprs[i] = match *e {
                Expr::Value(v) => g.values[v.ix()],
                Expr::Param(p) => g.code.params[p.ix()],
                Expr::Const { ty, bits } => {
                    let r = g.reg(ty);
                    g.code.constants.push((r, scalar::to_reg(ty, const_scalar(ty, bits))));
                    r
                }
                Expr::Id(id) => match ids.get(&id) {
                    Some(&r) => r,
                    None => {
                        let r = g.reg(Ty::I32);
                        g.code.ids.push((id, r));
                        ids.insert(id, r);
                        r
                    }
                },
                _ => {
                    let t = g.types[i];
                    g.reg(t)
                }
            };
            g.ready[i] = e.is_leaf();
        }
        g.block(&k.body);
        g.emit(Ins::Halt);
        g.code
    }
}

impl Gen<'_> {
    fn reg(&mut self, t: Ty) -> Reg {
        self.code.regs += t.lanes();
        (self.code.regs - t.lanes()) as Reg
    }

    fn emit(&mut self, i: Ins) -> usize {
        self.code.ins.push(i);
        self.code.statements.push(self.statement);
        self.code.ins.len() - 1
    }

    fn here(&self) -> u32 {
        self.code.ins.len() as u32
    }

    /// Register of an expression; emits its code if it is not yet computed.
    fn ex(&mut self, e: ExprId) -> Reg {
        let d = self.exprs[e.ix()];
        if self.ready[e.ix()] {
            return d;
        }
        let x: Vec<Reg> = self.k.expr(e).operands().into_iter().map(|o| self.ex(o)).collect();
        let ty = self.types[e.ix()];
        let t0 = |g: &Self, o: ExprId| g.types[o.ix()];
        match self.k.expr(e) {
            Expr::Op(op, o) => {
                let data = t0(self, o[if op.row().rule == Rule::Select { 1 } else { 0 }]);
                for l in 0..data.lanes() as u32 {
                    let one = if data.lanes() > 1 { Ty::F32 } else { data };
                    let r = |i: usize| x.get(i).map_or(0, |r| r + l);
                    self.op(op, one, d + l, [r(0), r(1), r(2)]);
                }
            }
            Expr::IDiv(..) => {
                self.emit(Ins::Index(false, d, x[0], x[1]));
            }
            Expr::IRem(..) => {
                self.emit(Ins::Index(true, d, x[0], x[1]));
            }
            Expr::Cast(to, a) => {
                let from = t0(self, a);
                match scalar::cast(to, from) {
                    Some(f) => self.emit(Ins::Un(f, d, x[0])),
                    None => self.emit(Ins::Cast(to, from, d, x[0])),
                };
            }
            Expr::Bitcast(to, a) => {
                let f = scalar::bitcast(t0(self, a), to);
                self.emit(Ins::Un(f, d, x[0]));
            }
            Expr::Dot4I8 { .. } => {
                self.emit(Ins::Tri(scalar::dot4, d, x[0], x[1], x[2]));
            }
            Expr::Splat(t, _) => {
                for l in 0..t.lanes() as u32 {
                    self.emit(Ins::Move(d + l, x[0], 1));
                }
            }
            Expr::Lane(_, i) => {
                self.emit(Ins::Move(d, x[0] + i as u32, 1));
            }
            Expr::Vector(..) => {
                for l in 0..ty.lanes() {
                    self.emit(Ins::Move(d + l as u32, x[l], 1));
                }
            }
            Expr::Unpack(dtype, _, i) => {
                let shift = i * dtype.bits() as u8;
                self.emit(Ins::Unpack { dtype, dst: d, word: x[0], shift });
            }
            Expr::Pack(dtype, _) => {
                let at = |i: usize| x.get(i).copied().unwrap_or(NONE);
                self.emit(Ins::Pack { dtype, dst: d, x: [at(0), at(1), at(2), at(3)] });
            }
            Expr::Const { .. } | Expr::Param(_) | Expr::Id(_) | Expr::Value(_) => {}
        }
        self.ready[e.ix()] = true;
        d
    }

    fn op(&mut self, op: ScalarOp, ty: Ty, d: Reg, x: [Reg; 3]) {
        let direct = match op.arity() {
            1 => scalar::unary(op, ty).map(|f| Ins::Un(f, d, x[0])),
            2 => scalar::binary(op, ty).map(|f| Ins::Bin(f, d, x[0], x[1])),
            _ => scalar::ternary(op, ty).map(|f| Ins::Tri(f, d, x[0], x[1], x[2])),
        };
        self.emit(direct.unwrap_or(Ins::Op(op, ty, d, x)));
    }

    fn block(&mut self, b: &[Stmt]) {
        let ready = self.ready.clone();
        for s in b {
            self.statement = self.next_statement;
            self.next_statement += 1;
            self.stmt(s);
        }
        self.ready = ready;
    }

    fn moved(&mut self, dst: Reg, e: ExprId) {
        let (r, n) = (self.ex(e), self.types[e.ix()].lanes());
        self.emit(Ins::Move(dst, r, n as u8));
    }

    fn stmt(&mut self, s: &Stmt) {
        let k = self.k;
        let dtype = |b: BufId| k.buffers[b.ix()].dtype;
        match *s {
            Stmt::Let { dst, expr } => self.moved(self.values[dst.ix()], expr),
            Stmt::Var { var, init: e } | Stmt::Set { var, value: e } => self.moved(self.vars[var.ix()], e),
            Stmt::Read { dst, read } => self.read(dst, read),
            Stmt::Store { buf, index, value } => {
                let (index, value) = (self.ex(index), self.ex(value));
                self.emit(Ins::Store { buf: buf.0, dtype: dtype(buf), index, value });
            }
            Stmt::StoreVector { buf, index, value } => {
                let lanes = self.types[value.ix()].lanes() as u8;
                let (index, value) = (self.ex(index), self.ex(value));
                self.emit(Ins::StoreVector { buf: buf.0, lanes, index, value });
            }
            Stmt::StoreWord { buf, index, value } => {
                let (index, value) = (self.ex(index), self.ex(value));
                self.emit(Ins::StoreWord { buf: buf.0, index, value });
            }
            Stmt::StoreLocal { arr, index, value } => {
                let lanes = self.types[value.ix()].lanes() as u8;
                let (index, value) = (self.ex(index), self.ex(value));
                self.emit(Ins::StoreLocal { arr: arr.0, lanes, index, value });
            }
            Stmt::StorePrivate { arr, index, value } => {
                let lanes = self.types[value.ix()].lanes() as u8;
                let (index, value) = (self.ex(index), self.ex(value));
                self.emit(Ins::StorePrivate { arr: arr.0, lanes, index, value });
            }
            Stmt::AtomicAdd { buf, index, value, dst } => {
                let (index, value) = (self.ex(index), self.ex(value));
                let dst = dst.map_or(NONE, |d| self.values[d.ix()]);
                self.emit(Ins::AtomicAdd { dst, buf: buf.0, dtype: dtype(buf), index, value });
            }
            Stmt::SetError { buf, index, code } => {
                let (index, value) = (self.ex(index), self.ex(code));
                self.emit(Ins::SetError { buf: buf.0, index, value });
            }
            Stmt::For { var, start, end, step, ref body } => self.for_loop(var, [start, end, step], body),
            Stmt::If { cond, ref then, ref els } => self.branch(cond, then, els),
            Stmt::Barrier { global } => {
                self.code.sync = true;
                self.emit(Ins::Barrier { global });
            }
            Stmt::FragmentFill { dst, value } => {
                self.code.sync = true;
                let value = self.ex(value);
                self.emit(Ins::Fill { dst: dst.0, value });
            }
            Stmt::FragmentLoad { dst, tile: t } => {
                self.code.sync = true;
                let at = [self.ex(t.offset), self.ex(t.stride)];
                let (matrix, arr) = (dst.0, t.arr.0);
                self.emit(Ins::LoadMatrix { matrix, arr, at, column_major: t.column_major });
            }
            Stmt::FragmentStore { src, tile: t } => {
                self.code.sync = true;
                let at = [self.ex(t.offset), self.ex(t.stride)];
                self.emit(Ins::StoreMatrix { matrix: src.0, arr: t.arr.0, at });
            }
            Stmt::Mma { sum, a, b } => {
                self.code.sync = true;
                self.emit(Ins::Mma { sum: sum.0, a: a.0, b: b.0 });
            }
            Stmt::FragmentMap { like, row, column, ref body } => self.map_over(like, [row, column], body),
            Stmt::SetElement { dst, value } => {
                let value = self.ex(value);
                self.emit(Ins::SetElement { matrix: dst.0, at: self.place, value });
            }
            Stmt::FragmentReduce { dst, src, op } => {
                self.code.sync = true;
                self.emit(Ins::ReduceMatrix { dst: dst.0, src: src.0, op });
            }
            Stmt::FragmentConvert { dst, src, column, scratch: t } => {
                self.code.sync = true;
                let at = [self.ex(t.offset), self.ex(t.stride)];
                self.emit(Ins::ConvertMatrix { dst: dst.0, src: src.0, column, arr: t.arr.0, at });
            }
        }
    }

    fn read(&mut self, dst: ValueId, read: Read) {
        let k = self.k;
        let ty = k.values[dst.ix()];
        let lanes = ty.lanes() as u8;
        let dst = self.values[dst.ix()];
        let i = match read {
            Read::Global { buf, index, guard } => {
                let (index, guard) = (self.ex(index), guard.map_or(NONE, |g| self.ex(g)));
                Ins::Load { dst, buf: buf.0, dtype: k.buffers[buf.ix()].dtype, index, guard }
            }
            Read::Vector { buf, index, guard, .. } => {
                let (index, guard) = (self.ex(index), guard.map_or(NONE, |g| self.ex(g)));
                Ins::LoadVector { dst, buf: buf.0, lanes, index, guard }
            }
            Read::Word { buf, index } => Ins::LoadWord { dst, buf: buf.0, index: self.ex(index) },
            Read::Local { arr, index } => Ins::LoadLocal { dst, arr: arr.0, lanes, index: self.ex(index) },
            Read::Private { arr, index } => {
                Ins::LoadPrivate { dst, arr: arr.0, lanes, index: self.ex(index) }
            }
            Read::Var(v) => Ins::Move(dst, self.vars[v.ix()], lanes),
            Read::SubgroupReduce { op, value } => {
                self.code.sync = true;
                Ins::Reduce { op, ty, dst, value: self.ex(value) }
            }
            Read::SubgroupShuffleXor { value, mask } => {
                self.code.sync = true;
                Ins::Shuffle { xor: true, dst, value: self.ex(value), lane: self.ex(mask) }
            }
            Read::SubgroupShuffle { value, lane } => {
                self.code.sync = true;
                Ins::Shuffle { xor: false, dst, value: self.ex(value), lane: self.ex(lane) }
            }
            Read::Element { of } => Ins::Element { dst, matrix: of.0, at: self.place },
        };
        self.emit(i);
    }

    fn for_loop(&mut self, var: ValueId, [start, end, step]: [ExprId; 3], body: &[Stmt]) {
        let var = self.values[var.ix()];
        self.moved(var, start);
        let (end, step) = (self.ex(end), self.ex(step));
        let top = self.emit(Ins::Loop { var, end, step, to: 0 });
        self.block(body);
        self.emit(Ins::Next { var, step, to: top as u32 });
        let to = self.here();
        self.code.ins[top] = Ins::Loop { var, end, step, to };
    }

    fn branch(&mut self, cond: ExprId, then: &[Stmt], els: &[Stmt]) {
        let c = self.ex(cond);
        let test = self.emit(Ins::JumpUnless(c, 0));
        self.block(then);
        let mut to = self.here();
        if !els.is_empty() {
            let jump = self.emit(Ins::Jump(0));
            to = self.here();
            self.block(els);
            self.code.ins[jump] = Ins::Jump(self.here());
        }
        self.code.ins[test] = Ins::JumpUnless(c, to);
    }

    fn map_over(&mut self, like: FragmentId, at: [ValueId; 2], body: &[Stmt]) {
        self.code.sync = true;
        self.emit(Ins::Meet);
        let [zero, one, round] = [(); 3].map(|_| self.reg(Ty::I32));
        self.code.constants.extend([(zero, 0), (one, 1)]);
        self.emit(Ins::Move(round, zero, 1));
        let at = at.map(|v| self.values[v.ix()]);
        let place = |to| Ins::Place { like: like.0, round, at, to };
        let top = self.emit(place(0));
        self.place = at;
        self.block(body);
        self.emit(Ins::Next { var: round, step: one, to: top as u32 });
        self.code.ins[top] = place(self.here());
    }
}
