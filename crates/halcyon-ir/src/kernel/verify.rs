//! Checks that a kernel is well-formed before it is rendered or run.

use super::ir::*;
use super::merged;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ops::element_wise::{Rule, ScalarOp};

/// Checks a kernel with [`verify`] and against the limits of a device.
///
/// # Errors
/// [`Error::Unsupported`] with the exceeded limit, and the errors of `verify`.
pub fn verify_for(k: &Kernel, caps: &crate::target::Caps) -> Result<()> {
    verify(k)?;
    let over = |what: String| {
        Err(Error::unsupported(
            format!("kernel {}: {what}", k.name),
            "Choose a smaller tile or another device",
        ))
    };
    if k.items() > caps.max_workgroup {
        return over(format!(
            "{} work-items in a workgroup, the device allows {}",
            k.items(),
            caps.max_workgroup
        ));
    }
    if k.local_bytes() > caps.workgroup_memory as usize {
        return over(format!(
            "{} bytes of workgroup memory, the device has {}",
            k.local_bytes(),
            caps.workgroup_memory
        ));
    }
    let arguments = merged::argument_bytes(k);
    if k.parts.is_some() && arguments > caps.max_argument_bytes as usize {
        return over(format!("{arguments} bytes of arguments, the device takes {}", caps.max_argument_bytes));
    }
    if k.parts.is_none() && k.buffers.len() > caps.max_bindings as usize {
        return over(format!("{} buffers, the device binds {}", k.buffers.len(), caps.max_bindings));
    }
    let bad = k.buffers.iter().find(|b| !caps.storage.contains(&b.dtype));
    if let Some(b) = bad {
        return over(format!("a buffer of {}, which the device does not store", b.dtype));
    }
    if let Some(f) = k.fragments.iter().find(|f| !caps.matrix.contains(&f.op)) {
        let MatrixOp { operand, m, n, k, width } = f.op;
        return over(format!(
            "products of {m}×{n}×{k} in {} by subgroups of {width}; the device has no matrix unit for them",
            operand.name()
        ));
    }
    let i64s = k.uses_ty(Ty::I64) || k.uses_ty(Ty::U64);
    if i64s && !caps.i64 {
        return over("64-bit integers on a device without them".into());
    }
    let f64s = k.uses_ty(Ty::F64) || k.buffers.iter().any(|b| b.dtype == DType::F64);
    if f64s && !caps.f64 {
        return Err(Error::unsupported(
            format!("kernel {}: f64 on a device without f64 arithmetic", k.name),
            "Use f32 or another device",
        ));
    }
    Ok(())
}

/// Checks types, scopes, access rights, and constant indexes into workgroup and private arrays. Checks that
/// barriers and subgroup operations are reached by all work-items of a workgroup or by none.
///
/// # Errors
/// [`Error::Argument`] with the kernel's name and the defect.
pub fn verify(k: &Kernel) -> Result<()> {
    let fail = |what: String| Err(Error::argument(format!("kernel {}", k.name), what));
    if k.items() == 0 {
        return fail("the workgroup is empty".into());
    }
    let mut c = k.name.chars();
    if !c.next().is_some_and(|c| c.is_ascii_alphabetic()) || !c.all(|c| c.is_ascii_alphanumeric() || c == '_')
    {
        return fail("the name is not a C identifier".into());
    }
    if k.uses_subgroups() && !k.items().is_multiple_of(64) {
        return fail("subgroup operations need whole subgroups: a multiple of 64 work-items".into());
    }
    for (i, a) in k.locals.iter().chain(&k.privates).enumerate() {
        if a.len == 0 {
            return fail(format!("array {i} is empty"));
        }
    }
    if let Some(f) = k.fragments.first() {
        if k.fragments.iter().any(|g| g.op.width != f.op.width) {
            return fail("its matrices belong to subgroups of two widths".into());
        }
        if !matches!(f.op.width, 32 | 64) || k.fragments.iter().any(|f| f.shape().contains(&0)) {
            return fail("a matrix is empty, or its subgroup has neither 32 nor 64 work-items".into());
        }
    }
    let casts = k.exprs.iter().filter_map(|e| if let Expr::Cast(d, _) = e { Some(*d) } else { None });
    if let Some(d) = k.buffers.iter().map(|b| b.dtype).chain(casts).find(|d| !d.is_native()) {
        return fail(format!("{d} is not a native dtype; the passes must replace it"));
    }
    if let Some(p) = &k.parts {
        return p.verify(k);
    }
    if k.params.iter().any(|p| p.ty == Ty::Bool || p.ty.lanes() > 1) {
        return fail("a parameter must be a scalar number".into());
    }
    let mut types: Vec<Ty> = Vec::with_capacity(k.exprs.len());
    for (i, e) in k.exprs.iter().enumerate() {
        if let Some(bad) = e.operands().iter().find(|o| o.ix() >= i) {
            return fail(format!("expression {i} uses expression {}, which does not precede it", bad.0));
        }
        if let Err(what) = check_expr(e, &types, k) {
            return fail(format!("expression {i} ({e:?}): {what}"));
        }
        types.push(type_of(e, &|x| types[x.ix()], k));
    }
    let mut v = Verifier {
        k,
        types: &types,
        visible: vec![false; k.values.len()],
        defined: vec![false; k.values.len()],
        vars: vec![false; k.vars.len()],
        value_div: vec![false; k.values.len()],
        var_div: vec![false; k.vars.len()],
        position: 0,
        changed: false,
        judge: false,
        in_scope: vec![false; k.exprs.len()],
        div_memo: vec![None; k.exprs.len()],
        map: None,
    };
    // A variable is divergent if its value may differ between the work-items of a workgroup. A variable that
    // is set at the end of a loop's body can make an earlier statement divergent in the next iteration. So
    // the analysis is repeated until nothing changes; then barriers are checked. Each repetition marks at
    // least one more variable, so the loop terminates.
    loop {
        v.reset();
        v.block(&k.body, false).or_else(&fail)?;
        if !v.changed {
            break;
        }
    }
    v.reset();
    v.judge = true;
    v.block(&k.body, false).or_else(&fail)
}

fn check_expr(e: &Expr, t: &[Ty], k: &Kernel) -> std::result::Result<(), String> {
    let ty = |x: ExprId| t[x.ix()];
    match *e {
        Expr::Const { ty, .. } if ty.lanes() > 1 => Err("a constant must be a scalar".into()),
        Expr::Param(p) if p.ix() >= k.params.len() => Err("no such parameter".into()),
        Expr::Value(v) if v.ix() >= k.values.len() => Err("no such value".into()),
        Expr::Id(Id::Local(d) | Id::Group(d) | Id::Groups(d)) if d > 2 => Err("no such dimension".into()),
        Expr::Op(op, x) => {
            let n = op.arity();
            let (data, cond) = match op.row().rule {
                Rule::Select => (&x[1..3], Some(x[0])),
                _ => (&x[..n], None),
            };
            if cond.is_some_and(|c| ty(c) != Ty::Bool) {
                return Err("the condition is not a bool".into());
            }
            let d = ty(data[0]);
            if data.iter().any(|&x| ty(x) != d) {
                return Err(format!(
                    "operand types differ: {:?}",
                    data.iter().map(|&x| ty(x)).collect::<Vec<_>>()
                ));
            }
            let vector_ops =
                [ScalarOp::Neg, ScalarOp::Add, ScalarOp::Sub, ScalarOp::Mul, ScalarOp::Div, ScalarOp::Fma];
            if d == Ty::U32x4 || (d.lanes() > 1 && !vector_ops.contains(&op)) {
                return Err(format!("{} has no vector form", op.name()));
            }
            if !op.takes(d.dtype()) {
                Err(format!("{} does not take {}", op.name(), d.name()))
            } else {
                Ok(())
            }
        }
        Expr::IDiv(a, b) | Expr::IRem(a, b) if ty(a) != ty(b) || !ty(a).is_int() => {
            Err("index division needs two integers of one type".into())
        }
        Expr::Cast(_, a) if ty(a).lanes() > 1 => Err("a vector cannot be cast".into()),
        Expr::Bitcast(to, a) => {
            let from = ty(a);
            let ok = to != Ty::Bool && from != Ty::Bool && to.lanes() == 1 && from.lanes() == 1;
            if ok && to.size() == from.size() {
                Ok(())
            } else {
                Err("a bitcast needs two scalar number types of the same width".into())
            }
        }
        Expr::Dot4I8 { a, b, acc } if ty(a) != Ty::U32 || ty(b) != Ty::U32 || ty(acc) != Ty::I32 => {
            Err("dot4 needs operands of types u32, u32 and i32".into())
        }
        Expr::Splat(t, a) if t.lanes() == 1 || t.dtype() != DType::F32 || ty(a) != Ty::F32 => {
            Err("a splat needs an f32 and a vector type of f32".into())
        }
        Expr::Lane(a, i) if i as usize >= ty(a).lanes() || ty(a).lanes() == 1 => Err("no such lane".into()),
        Expr::Vector(t, x)
            if t.lanes() == 1 || x[..t.lanes()].iter().any(|&x| ty(x) != Ty::of(t.dtype())) =>
        {
            Err("the lanes of a vector must have its element type".into())
        }
        Expr::Unpack(d, a, i) if per_word(d) == 1 || i as usize >= per_word(d) || ty(a) != Ty::U32 => {
            Err(format!("cannot unpack element {i} of a word of {d}"))
        }
        Expr::Pack(d, x) if per_word(d) == 1 || x[..per_word(d)].iter().any(|&x| ty(x) != Ty::of(d)) => {
            Err(format!("a word of {d} cannot be packed from values of other types"))
        }
        _ => Ok(()),
    }
}

struct Verifier<'a> {
    k: &'a Kernel,
    types: &'a [Ty],
    visible: Vec<bool>,
    defined: Vec<bool>,
    vars: Vec<bool>,
    /// Whether a value may differ between the work-items of a workgroup.
    value_div: Vec<bool>,
    var_div: Vec<bool>,
    position: usize,
    changed: bool,
    judge: bool,
    /// Expressions known to be in scope until the current block ends.
    in_scope: Vec<bool>,
    /// Whether each expression visited so far is divergent. Values are assigned once, so an entry stays valid
    /// for a round.
    div_memo: Vec<Option<bool>>,
    /// The fragment over which the enclosing map iterates.
    map: Option<FragmentId>,
}

type Check = std::result::Result<(), String>;

/// Whether a statement may appear in a fragment map, which may change nothing but elements of fragments.
fn local_effect(s: &Stmt) -> bool {
    match s {
        Stmt::Let { .. } | Stmt::Read { .. } | Stmt::SetElement { .. } => true,
        Stmt::If { then, els, .. } => then.iter().chain(els).all(local_effect),
        _ => false,
    }
}

impl Verifier<'_> {
    fn reset(&mut self) {
        self.visible.fill(false);
        self.defined.fill(false);
        self.vars.fill(false);
        self.value_div.fill(false);
        self.in_scope.fill(false);
        self.div_memo.fill(None);
        self.position = 0;
        self.changed = false;
    }

    fn divergent(&mut self, e: ExprId) -> bool {
        if let Some(d) = self.div_memo[e.ix()] {
            return d;
        }
        let d = match self.k.expr(e) {
            Expr::Id(Id::Local(_) | Id::Lane) => true,
            Expr::Value(v) => self.value_div[v.ix()],
            x => x.operands().iter().any(|&o| self.divergent(o)),
        };
        self.div_memo[e.ix()] = Some(d);
        d
    }

    /// Checks that all values used by an expression are in scope.
    fn scope(&mut self, e: ExprId) -> Check {
        if self.in_scope[e.ix()] {
            return Ok(());
        }
        match self.k.expr(e) {
            Expr::Value(v) if !self.visible[v.ix()] => return Err(format!("value {} is not in scope", v.0)),
            x => x.operands().iter().try_for_each(|&o| self.scope(o))?,
        }
        self.in_scope[e.ix()] = true;
        Ok(())
    }

    fn want(&self, e: ExprId, ty: Ty, what: &str) -> Check {
        let got = self.types[e.ix()];
        if got == ty { Ok(()) } else { Err(format!("{what} is {}, not {}", got.name(), ty.name())) }
    }

    fn integer(&self, e: ExprId) -> Check {
        let got = self.types[e.ix()];
        if got.is_int() { Ok(()) } else { Err(format!("an index is {}, not an integer", got.name())) }
    }

    fn buffer(&self, b: BufId, write: bool) -> std::result::Result<DType, String> {
        let d = self.k.buffers.get(b.ix()).ok_or_else(|| format!("no buffer {}", b.0))?;
        if write && !d.write {
            return Err(format!("buffer {} is read-only", b.0));
        }
        Ok(d.dtype)
    }

    fn array(&self, list: &[ArrayDecl], i: usize, index: ExprId) -> std::result::Result<Ty, String> {
        let a = list.get(i).ok_or_else(|| format!("no array {i}"))?;
        self.integer(index)?;
        if let Expr::Const { ty, bits } = self.k.expr(index) {
            let v = const_scalar(ty, bits).as_i64();
            if v < 0 || v >= a.len as i64 {
                return Err(format!("index {v} of array {i}, which has {} elements", a.len));
            }
        }
        Ok(a.ty)
    }

    fn define(&mut self, v: ValueId, ty: Ty, div: bool) -> Check {
        let want = *self.k.values.get(v.ix()).ok_or_else(|| format!("no value {}", v.0))?;
        if std::mem::replace(&mut self.defined[v.ix()], true) {
            return Err(format!("value {} is set twice", v.0));
        }
        if want != ty {
            return Err(format!("value {} is {}, set to {}", v.0, want.name(), ty.name()));
        }
        self.visible[v.ix()] = true;
        self.value_div[v.ix()] = div;
        Ok(())
    }

    fn set_var(&mut self, v: VarId, value: ExprId, div: bool) -> Check {
        let ty = *self.k.vars.get(v.ix()).ok_or_else(|| format!("no variable {}", v.0))?;
        self.want(value, ty, "the value of a variable")?;
        if (div || self.divergent(value)) && !self.var_div[v.ix()] {
            self.var_div[v.ix()] = true;
            self.changed = true;
        }
        Ok(())
    }

    fn uniform(&self, div: bool, what: &str) -> Check {
        if div && self.judge {
            return Err(format!("{what} in control flow that differs between work-items"));
        }
        Ok(())
    }

    fn block(&mut self, b: &[Stmt], div: bool) -> Check {
        let (visible, vars) = (self.visible.clone(), self.vars.clone());
        for s in b {
            let at = self.position;
            self.position += 1;
            self.stmt(s, div)
                .map_err(|e| if e.starts_with("statement") { e } else { format!("statement {at}: {e}") })?;
        }
        self.visible = visible;
        self.vars = vars;
        self.in_scope.fill(false);
        Ok(())
    }

    fn stmt(&mut self, s: &Stmt, div: bool) -> Check {
        for e in s.exprs() {
            if e.ix() >= self.types.len() {
                return Err(format!("no expression {}", e.0));
            }
            self.scope(e)?;
        }
        let ty = |v: &Self, e: ExprId| v.types[e.ix()];
        match *s {
            Stmt::Let { dst, expr } => {
                let d = self.divergent(expr);
                self.define(dst, ty(self, expr), d)
            }
            Stmt::Read { dst, read } => {
                let (t, d) = self.read(read, div)?;
                self.define(dst, t, d)
            }
            Stmt::Var { var, init } => {
                self.set_var(var, init, div)?;
                self.vars[var.ix()] = true;
                Ok(())
            }
            Stmt::Set { var, value } => {
                self.set_var(var, value, div)?;
                if self.vars[var.ix()] { Ok(()) } else { Err(format!("variable {} is not in scope", var.0)) }
            }
            Stmt::Store { buf, index, value } => {
                let d = self.buffer(buf, true)?;
                self.integer(index)?;
                self.want(value, Ty::of(d), "the stored value")
            }
            Stmt::StoreVector { buf, index, value } => {
                let d = self.buffer(buf, true)?;
                self.vector(d, ty(self, value))?;
                self.integer(index)
            }
            Stmt::StoreWord { buf, index, value } => {
                self.buffer(buf, true)?;
                self.integer(index)?;
                self.want(value, Ty::U32, "the stored word")
            }
            Stmt::StoreLocal { arr, index, value } => {
                let t = self.array(&self.k.locals, arr.ix(), index)?;
                self.want(value, t, "the stored value")
            }
            Stmt::StorePrivate { arr, index, value } => {
                let t = self.array(&self.k.privates, arr.ix(), index)?;
                self.want(value, t, "the stored value")
            }
            Stmt::AtomicAdd { buf, index, value, dst } => self.atomic_add(buf, index, value, dst),
            Stmt::For { var, start, end, step, ref body } => {
                self.for_loop(var, [start, end, step], body, div)
            }
            Stmt::If { cond, ref then, ref els } => {
                self.want(cond, Ty::Bool, "a condition")?;
                let d = div || self.divergent(cond);
                self.block(then, d)?;
                self.block(els, d)
            }
            Stmt::Barrier { .. } => self.uniform(div, "a barrier"),
            Stmt::SetError { buf, index, code } => {
                if self.buffer(buf, true)? != DType::U32 {
                    return Err("the error word must be in a buffer of u32".into());
                }
                self.integer(index)?;
                self.want(code, Ty::U32, "the error code")
            }
            Stmt::FragmentFill { dst, value } => {
                self.fragment(dst, Part::Sum).or_else(|_| self.fragment(dst, Part::Rows))?;
                self.want(value, Ty::F32, "the value of a sum")?;
                self.uniform(div, "a fill of a matrix")
            }
            Stmt::FragmentLoad { dst, tile } => {
                let operand = self.fragment(dst, Part::A).or_else(|_| self.fragment(dst, Part::B));
                operand.map_err(|_| format!("matrix {} is not an operand", dst.0))?;
                self.tile(tile)?;
                self.uniform(div, "a load of a matrix")
            }
            Stmt::FragmentStore { src, tile } => self.store_matrix(src, tile, div),
            Stmt::Mma { sum, a, b } => self.product(sum, [a, b], div),
            Stmt::FragmentMap { like, row, column, ref body } => {
                self.map_over(like, [row, column], body, div)
            }
            Stmt::SetElement { dst, value } => {
                self.place(dst, true)?;
                self.want(value, Ty::F32, "an element of a matrix")
            }
            Stmt::FragmentReduce { dst, src, op } => self.reduce_rows(dst, src, op, div),
            Stmt::FragmentConvert { dst, src, column, scratch } => {
                self.convert(dst, src, column, scratch, div)
            }
        }
    }

    fn product(&mut self, sum: FragmentId, [a, b]: [FragmentId; 2], div: bool) -> Check {
        let op = self.fragment(sum, Part::Sum)?;
        if self.fragment(a, Part::A)? != op || self.fragment(b, Part::B)? != op {
            return Err("the matrices of a product differ in shape or type".into());
        }
        self.uniform(div, "a product of matrices")
    }

    fn store_matrix(&mut self, src: FragmentId, tile: Tile, div: bool) -> Check {
        self.fragment(src, Part::Sum)?;
        if tile.column_major {
            return Err("sums must be stored row-major".into());
        }
        self.tile(tile)?;
        self.uniform(div, "a store of a matrix")
    }

    fn for_loop(&mut self, var: ValueId, [start, end, step]: [ExprId; 3], body: &[Stmt], div: bool) -> Check {
        let t = self.types[start.ix()];
        self.integer(start)?;
        self.want(end, t, "the end of a loop")?;
        self.want(step, t, "the step of a loop")?;
        if let Expr::Const { ty, bits } = self.k.expr(step)
            && const_scalar(ty, bits).as_f64() <= 0.0
        {
            return Err("the step of a loop is not positive".into());
        }
        let d = [start, end, step].iter().any(|&e| self.divergent(e));
        self.define(var, t, d)?;
        let r = self.block(body, div || d);
        self.visible[var.ix()] = false;
        r
    }

    fn atomic_add(&mut self, buf: BufId, index: ExprId, value: ExprId, dst: Option<ValueId>) -> Check {
        let d = self.buffer(buf, true)?;
        if !matches!(d, DType::I32 | DType::U32) {
            return Err(format!("atomic add on {d}: only i32 and u32 have it"));
        }
        self.integer(index)?;
        self.want(value, Ty::of(d), "the added value")?;
        dst.map_or(Ok(()), |v| self.define(v, Ty::of(d), true))
    }

    fn map_over(&mut self, like: FragmentId, [row, column]: [ValueId; 2], body: &[Stmt], div: bool) -> Check {
        self.fragment(like, Part::Sum).or_else(|_| self.fragment(like, Part::Rows))?;
        self.uniform(div, "a map over a matrix")?;
        if let Some(s) = body.iter().find(|s| !local_effect(s)) {
            return Err(format!("a map over a matrix does more than set its elements: {s:?}"));
        }
        self.define(row, Ty::I32, true)?;
        self.define(column, Ty::I32, true)?;
        self.map = Some(like);
        let r = self.block(body, true);
        self.map = None;
        self.visible[row.ix()] = false;
        self.visible[column.ix()] = false;
        r
    }

    fn convert(&mut self, dst: FragmentId, src: FragmentId, column: u8, scratch: Tile, div: bool) -> Check {
        let op = self.fragment(dst, Part::A)?;
        if self.fragment(src, Part::Sum)? != op {
            return Err("an operand cannot be made from sums of another shape or type".into());
        }
        if !column.is_multiple_of(op.k) || column as u16 + op.k as u16 > op.n as u16 {
            return Err(format!("an operand cannot be made from column {column} of sums"));
        }
        if scratch.column_major {
            return Err("sums must be stored row-major".into());
        }
        self.tile(scratch)?;
        self.uniform(div, "a conversion of a matrix")
    }

    fn reduce_rows(&mut self, dst: FragmentId, src: FragmentId, op: Reduce, div: bool) -> Check {
        if self.fragment(dst, Part::Rows)? != self.fragment(src, Part::Sum)? {
            return Err("the rows belong to a matrix of another shape or type".into());
        }
        if !matches!(op, Reduce::Add | Reduce::Max) {
            return Err("rows of a matrix can only be added, or reduced to their maximum".into());
        }
        self.uniform(div, "a reduction of a matrix")
    }

    fn vector(&self, d: DType, ty: Ty) -> Check {
        match ty {
            Ty::U32x4 => Ok(()),
            Ty::F32x2 | Ty::F32x4 if d == DType::F32 => Ok(()),
            _ => Err(format!("a vector access of {} to a buffer of {d}", ty.name())),
        }
    }

    fn fragment(&self, f: FragmentId, part: Part) -> std::result::Result<MatrixOp, String> {
        match self.k.fragments.get(f.ix()) {
            Some(d) if d.part == part => Ok(d.op),
            Some(_) => Err(format!("matrix {} is not the expected part of a product", f.0)),
            None => Err(format!("no matrix {}", f.0)),
        }
    }

    /// Checks that `f` has an element at the row and column of the enclosing map, and that the element may be
    /// set if `set` is true. A map over sums can read the elements of row fragments but not set them.
    fn place(&self, f: FragmentId, set: bool) -> Check {
        let Some(like) = self.map.map(|l| self.k.fragments[l.ix()]) else {
            return Err("an element of a matrix outside of a map".into());
        };
        let d = self.k.fragments.get(f.ix()).ok_or_else(|| format!("no matrix {}", f.0))?;
        let row = d.part == Part::Rows && like.part == Part::Sum && !set;
        if d.op == like.op && (d.part == like.part || row) {
            return Ok(());
        }
        Err(format!("matrix {} has no element at the row and column of the map", f.0))
    }

    fn tile(&self, t: Tile) -> Check {
        let a = self.k.locals.get(t.arr.ix()).ok_or_else(|| format!("no array {}", t.arr.0))?;
        if a.ty != Ty::U32x4 {
            return Err(format!("a tile must be in an array of u32x4, found {}", a.ty.name()));
        }
        self.integer(t.offset)?;
        self.integer(t.stride)
    }

    fn read(&mut self, r: Read, div: bool) -> std::result::Result<(Ty, bool), String> {
        Ok(match r {
            Read::Global { buf, index, guard } => {
                let d = self.buffer(buf, false)?;
                self.integer(index)?;
                if let Some(g) = guard {
                    self.want(g, Ty::Bool, "a guard")?;
                }
                // All work-items that read the same index of a buffer that is never written get the same
                // value.
                let same = !self.k.buffers[buf.ix()].write && self.k.noalias;
                (Ty::of(d), !same || self.divergent(index) || guard.is_some_and(|g| self.divergent(g)))
            }
            Read::Vector { buf, ty, index, guard } => {
                let d = self.buffer(buf, false)?;
                self.vector(d, ty)?;
                self.integer(index)?;
                if let Some(g) = guard {
                    self.want(g, Ty::Bool, "a guard")?;
                }
                (ty, true)
            }
            Read::Word { buf, index } => {
                self.buffer(buf, false)?;
                self.integer(index)?;
                (Ty::U32, true)
            }
            // Reads of workgroup memory at a uniform index count as uniform. This holds for the results of
            // group reductions; for other reads it is not proved.
            Read::Local { arr, index } => {
                (self.array(&self.k.locals, arr.ix(), index)?, div || self.divergent(index))
            }
            Read::Private { arr, index } => (self.array(&self.k.privates, arr.ix(), index)?, true),
            Read::Var(v) => {
                let ty = *self.k.vars.get(v.ix()).ok_or_else(|| format!("no variable {}", v.0))?;
                if !self.vars[v.ix()] {
                    return Err(format!("variable {} is not in scope", v.0));
                }
                (ty, self.var_div[v.ix()])
            }
            Read::SubgroupReduce { value, .. } => {
                let t = self.types[value.ix()];
                if t == Ty::Bool || t.lanes() > 1 {
                    return Err("a subgroup reduction takes a scalar number".into());
                }
                self.uniform(div, "a subgroup reduction")?;
                (t, true)
            }
            Read::SubgroupShuffle { value, lane: m } | Read::SubgroupShuffleXor { value, mask: m } => {
                let t = self.types[value.ix()];
                if t == Ty::Bool || t.lanes() > 1 {
                    return Err("a shuffle takes a scalar number".into());
                }
                self.want(m, Ty::I32, "a lane")?;
                self.uniform(div, "a shuffle")?;
                (t, true)
            }
            Read::Element { of } => {
                self.place(of, false)?;
                (Ty::F32, true)
            }
        })
    }
}
