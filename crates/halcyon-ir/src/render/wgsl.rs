//! The WGSL writer. Unlike C, WGSL has immutable `let` values, no implicit conversions, no general pointers
//! and no ternary operator, and storage has 32-bit elements. The writer handles these differences:
//!
//! - 8- and 16-bit elements are stored in words. A store replaces its bits of the word with two atomic
//!   operations, so a work-item never overwrites bytes that another work-item stores. With [`Options::f16`]
//!   and [`Options::int16`], 16-bit elements are storage types.
//! - WGSL compilers may assume that NaN and infinities do not occur. Comparisons therefore test for NaN by
//!   its bits, and constants that are NaN or infinite are made from bits at run time. Mathematical functions
//!   are written out (`wgsl/math.rs`), because the language's own functions may be wrong by thousands of
//!   ulps.
//! - 64-bit types are `i64`, `u64` and `f64`. Not every device has them, so the caller must check.
//! - Memory may be bound only once: buffers to which a launch gives the same memory share a binding
//!   ([`Options::bindings`]).
//!
//! Buffers are in `@group(0)`, all `read_write`. Parameters are one uniform struct at `@group(1)
//! @binding(0)`, laid out by [`param_layout`].

mod helpers;
mod math;
mod storage;

use super::{Language, Source, without_subgroups};
use crate::dtype::{Class, DType};
use crate::error::{Error, Result};
use crate::kernel::ir::*;
use crate::ops::element_wise::{Rule, ScalarOp};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use storage::{Element, element, touches};

/// The features a module may use beyond plain WGSL, and the bindings of its buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Options {
    /// `f16` is a storage type.
    pub f16: bool,
    /// `i16` and `u16` are storage types (`wgpu_int16`).
    pub int16: bool,
    /// The device's `fma` of f32 is one instruction that rounds once, as on GPUs. Otherwise a helper handles
    /// products that overflow.
    pub fused: bool,
    /// The device has subgroup operations, and its subgroups are ranges of consecutive linear local indexes.
    pub subgroups: bool,
    /// The device silently stops a loop after some tens of thousands of iterations (llvmpipe: 65,535 per
    /// work-item). Loops that did not finish then set the word at `@group(1) @binding(1)`.
    pub short_loops: bool,
    /// The value that such a loop writes to this word, to identify the kernel; 0 is written as 1.
    pub mark: u32,
    /// With `short_loops`: unroll factor of loops of unknown length that have a short body without inner
    /// loops and barriers; 0 means 1.
    pub unroll: u32,
    /// The binding of each buffer. If this list does not have one entry per buffer, each buffer has its own
    /// binding. Buffers in the same memory must share a binding.
    pub bindings: Vec<usize>,
}

/// Byte offset of each parameter in the uniform struct, and the struct's size (a multiple of 16).
pub fn param_layout(types: impl IntoIterator<Item = Ty>) -> (Vec<u32>, u32) {
    let mut end = 0u32;
    let at = types.into_iter().map(|t| {
        // A bool takes a 32-bit word.
        let size = t.size() as u32;
        let at = end.next_multiple_of(size);
        end = at + size;
        at
    });
    let at = at.collect();
    (at, end.next_multiple_of(16).max(16))
}

/// Renders one verified kernel. Its entry point is `k_` followed by the kernel's name.
///
/// # Errors
/// [`Error::Unsupported`] with the feature that WGSL cannot express.
pub fn render(k: &Kernel, options: &Options) -> Result<Source> {
    batch(&[(k, k.name.clone())], options)
}

/// Renders many kernels into one module. If there is more than one, the names of each kernel's buffers,
/// parameters and workgroup arrays begin with the kernel's name.
pub(super) fn batch(kernels: &[(&Kernel, String)], options: &Options) -> Result<Source> {
    let mut helpers = Helpers { names: HashSet::new(), text: String::new() };
    let mut body = String::new();
    let mut entries = vec![];
    let (mut f16, mut int16) = (false, false);
    for (k, name) in kernels {
        if k.parts.is_some() {
            return Err(crate::Error::unsupported(
                format!("several parts in one launch in WGSL (kernel {})", k.name),
                "Launch the parts one by one",
            ));
        }
        let k: Cow<'_, Kernel> =
            if options.subgroups { Cow::Borrowed(*k) } else { Cow::Owned(without_subgroups(k)) };
        let prefix = if kernels.len() > 1 { format!("{name}_") } else { String::new() };
        let entry = format!("k_{name}");
        let w = Writer::new(&k, options, prefix);
        f16 |= w.bindings.contains(&Element::F16);
        int16 |= w.bindings.iter().any(|b| matches!(b, Element::I16 | Element::U16));
        let text = w.kernel(&entry)?;
        helpers.scan(&text, &k)?;
        let _ = write!(body, "\n{text}");
        entries.push(entry);
    }
    let mut text = format!("// {}, generated by Halcyon.\n", Language::Wgsl.name());
    for (used, line) in [(f16, "enable f16;\n"), (int16, "enable wgpu_int16;\n")] {
        text.push_str(if used { line } else { "" });
    }
    text.push_str(&helpers.text);
    text.push_str(&body);
    Ok(Source { text, entries })
}

fn unsupported(k: &Kernel, what: &str) -> Error {
    Error::unsupported(format!("{what} in WGSL (kernel {})", k.name), "Choose another device or type")
}

struct Helpers {
    names: HashSet<String>,
    text: String,
}

impl Helpers {
    /// Emits the helpers called in `text` that are not emitted yet, each after the helpers that it calls
    /// itself.
    fn scan(&mut self, text: &str, k: &Kernel) -> Result<()> {
        for name in super::calls(text) {
            if self.names.contains(name) {
                continue;
            }
            let def = helpers::definition(name).ok_or_else(|| unsupported(k, name))?;
            self.names.insert(name.to_string());
            self.scan(&def, k)?;
            self.text.push_str(&def);
        }
        Ok(())
    }
}

/// Name of a type.
fn ty_name(t: Ty) -> &'static str {
    match t {
        Ty::Bool => "bool",
        Ty::I32 => "i32",
        Ty::U32 => "u32",
        Ty::I64 => "i64",
        Ty::U64 => "u64",
        Ty::F32 => "f32",
        Ty::F64 => "f64",
        Ty::F32x2 => "vec2<f32>",
        Ty::F32x4 => "vec4<f32>",
        Ty::U32x4 => "vec4<u32>",
    }
}

/// Type used in arrays and in the parameter struct, which cannot hold bools.
fn stored_ty(t: Ty) -> &'static str {
    if t == Ty::Bool { "u32" } else { ty_name(t) }
}

fn int_constant(v: u64, ty: Ty) -> String {
    match ty {
        Ty::I32 if v as i32 == i32::MIN => "i32(-2147483648)".into(),
        Ty::I32 if (v as i32) < 0 => format!("({}i)", v as i32),
        Ty::I32 => format!("{}i", v as i32),
        Ty::U32 => format!("{}u", v as u32),
        Ty::I64 if v as i64 == i64::MIN => "(-9223372036854775807li - 1li)".into(),
        Ty::I64 if (v as i64) < 0 => format!("({}li)", v as i64),
        Ty::I64 => format!("{}li", v as i64),
        Ty::U64 => format!("{v}lu"),
        _ => if v & 1 != 0 { "true" } else { "false" }.into(),
    }
}

/// A float constant. Infinities, NaN, -0 and subnormal numbers are made from their bits, because compilers
/// may reject or change them.
fn float_constant(v: f64, ty: Ty) -> String {
    let text = match ty {
        Ty::F64 if v == 0.0 && v.is_sign_negative() || !(v == 0.0 || v.is_normal()) => {
            return format!("h_make_f64({}lu)", v.to_bits());
        }
        Ty::F64 => format!("{v:?}lf"),
        _ => {
            let v = v as f32;
            if v == 0.0 && v.is_sign_negative() || !(v == 0.0 || v.is_normal()) {
                return format!("h_make_f32({:#010x}u)", v.to_bits());
            }
            format!("{v:?}f")
        }
    };
    if text.starts_with('-') { format!("({text})") } else { text }
}

struct Writer<'a> {
    k: &'a Kernel,
    types: Vec<Ty>,
    uses: Vec<u32>,
    bound: HashMap<ExprId, String>,
    temps: usize,
    out: String,
    depth: usize,
    fused: bool,
    short_loops: bool,
    mark: u32,
    unroll: u32,
    /// Prefix of the module-scope names.
    prefix: String,
    /// Element type of each binding.
    bindings: Vec<Element>,
    /// Binding of each buffer.
    binding_of: Vec<usize>,
}

impl<'a> Writer<'a> {
    fn new(k: &'a Kernel, options: &Options, prefix: String) -> Writer<'a> {
        let mut uses = vec![0; k.exprs.len()];
        fn count(k: &Kernel, e: ExprId, uses: &mut [u32]) {
            uses[e.ix()] += 1;
            if uses[e.ix()] == 1 {
                for o in k.expr(e).operands() {
                    count(k, o, uses);
                }
            }
        }
        k.walk(&mut |s| s.exprs().into_iter().for_each(|e| count(k, e, &mut uses)));
        let binding_of: Vec<usize> = match options.bindings.len() == k.buffers.len() {
            true => options.bindings.clone(),
            false => (0..k.buffers.len()).collect(),
        };
        let touch = touches(k);
        let many = binding_of.iter().map(|b| b + 1).max().unwrap_or(0);
        let bindings = (0..many).map(|b| {
            let bufs: Vec<usize> = (0..k.buffers.len()).filter(|&i| binding_of[i] == b).collect();
            if bufs.is_empty() { Element::Word } else { element(k, &bufs, &touch, options) }
        });
        let bindings = bindings.collect();
        let types = k.types();
        Writer {
            k,
            types,
            uses,
            bound: HashMap::new(),
            temps: 0,
            out: String::new(),
            depth: 1,
            fused: options.fused,
            short_loops: options.short_loops,
            mark: options.mark.max(1),
            unroll: options.unroll.max(1),
            prefix,
            bindings,
            binding_of,
        }
    }

    fn line(&mut self, s: &str) {
        for _ in 0..self.depth {
            self.out.push_str("    ");
        }
        self.out.push_str(s);
        self.out.push('\n');
    }

    fn temp(&mut self) -> String {
        self.temps += 1;
        format!("t{}", self.temps - 1)
    }

    fn kernel(mut self, entry: &str) -> Result<String> {
        let k = self.k;
        let p = self.prefix.clone();
        let mut head = String::new();
        for (i, b) in self.bindings.iter().enumerate() {
            let t = match *b {
                Element::Own(t) | Element::Vector(t) => ty_name(t),
                Element::F16 => "f16",
                Element::I16 => "i16",
                Element::U16 => "u16",
                Element::Word => "u32",
                Element::Atomic => "atomic<u32>",
            };
            let _ = writeln!(head, "@group(0) @binding({i}) var<storage, read_write> {p}b{i}: array<{t}>;");
        }
        if !k.params.is_empty() {
            let _ = writeln!(head, "struct {p}Params {{");
            for (i, q) in k.params.iter().enumerate() {
                let _ = writeln!(head, "    p{i}: {},", stored_ty(q.ty));
            }
            let _ = writeln!(head, "}}\n@group(1) @binding(0) var<uniform> {p}params: {p}Params;");
        }
        if self.short_loops {
            let _ =
                writeln!(head, "@group(1) @binding(1) var<storage, read_write> {p}cut: array<atomic<u32>>;");
        }
        for (i, l) in k.locals.iter().enumerate() {
            let _ = writeln!(head, "var<workgroup> {p}l{i}: array<{}, {}>;", stored_ty(l.ty), l.len);
        }
        for (i, l) in k.privates.iter().enumerate() {
            self.line(&format!("var a{i}: array<{}, {}>;", stored_ty(l.ty), l.len));
        }
        self.block(&k.body)?;
        let mut args = vec![
            "@builtin(local_invocation_id) h_item: vec3<u32>",
            "@builtin(workgroup_id) h_group: vec3<u32>",
            "@builtin(num_workgroups) h_groups: vec3<u32>",
        ];
        if k.uses_subgroups() {
            args.push("@builtin(subgroup_invocation_id) h_lane: u32");
            args.push("@builtin(subgroup_size) h_width: u32");
        }
        let w = k.workgroup;
        let _ = writeln!(
            head,
            "@compute @workgroup_size({}, {}, {})\nfn {entry}(\n    {})\n{{",
            w[0],
            w[1],
            w[2],
            args.join(",\n    ")
        );
        Ok(format!("{head}{}}}\n", self.out))
    }

    fn block(&mut self, b: &[Stmt]) -> Result<()> {
        let outer = self.bound.clone();
        for s in b {
            for e in s.exprs() {
                self.share(e)?;
            }
            self.stmt(s)?;
        }
        self.bound = outer;
        Ok(())
    }

    /// Declares names for the unnamed expressions under `e` that are used more than once.
    fn share(&mut self, e: ExprId) -> Result<()> {
        let x = self.k.expr(e);
        if x.is_leaf() || self.bound.contains_key(&e) {
            return Ok(());
        }
        for o in x.operands() {
            self.share(o)?;
        }
        if self.uses[e.ix()] > 1 {
            let text = self.spell(e)?;
            let name = self.temp();
            self.line(&format!("let {name} = {text};"));
            self.bound.insert(e, name);
        }
        Ok(())
    }

    fn ex(&self, e: ExprId) -> Result<String> {
        match self.bound.get(&e) {
            Some(n) => Ok(n.clone()),
            None => self.spell(e),
        }
    }

    fn spell(&self, e: ExprId) -> Result<String> {
        let ty = self.types[e.ix()];
        Ok(match self.k.expr(e) {
            Expr::Const { ty, bits } if ty.is_float() => float_constant(const_scalar(ty, bits).as_f64(), ty),
            Expr::Const { ty, bits } => int_constant(bits, ty),
            Expr::Param(p) if ty == Ty::Bool => format!("({}params.p{} != 0u)", self.prefix, p.0),
            Expr::Param(p) => format!("{}params.p{}", self.prefix, p.0),
            Expr::Value(v) => format!("v{}", v.0),
            Expr::Id(id) => {
                let axis = |d: u8| ["x", "y", "z"][d as usize % 3];
                match id {
                    Id::Local(d) => format!("i32(h_item.{})", axis(d)),
                    Id::Group(d) => format!("i32(h_group.{})", axis(d)),
                    Id::Groups(d) => format!("i32(h_groups.{})", axis(d)),
                    Id::Lane => "i32(h_lane)".into(),
                    Id::SubgroupSize => "i32(h_width)".into(),
                }
            }
            Expr::Op(op, x) => {
                let data = self.types[x[if op.row().rule == Rule::Select { 1 } else { 0 }].ix()];
                let fused = op == ScalarOp::Fma && data == Ty::F32 && self.fused;
                let pattern = if fused { Some("fma($0, $1, $2)".into()) } else { op_pattern(op, data) };
                let pattern = pattern
                    .ok_or_else(|| unsupported(self.k, &format!("{} on {}", op.name(), data.name())))?;
                self.fill(&pattern, &x[..op.arity()])?
            }
            // Neither operand is negative, so unsigned division, which is cheaper, is correct.
            Expr::IDiv(a, b) => self.fill(&index_division(ty, '/'), &[a, b])?,
            Expr::IRem(a, b) => self.fill(&index_division(ty, '%'), &[a, b])?,
            Expr::Cast(to, a) => self.fill(&cast(to, self.types[a.ix()]), &[a])?,
            Expr::Bitcast(to, a) if to == self.types[a.ix()] => self.ex(a)?,
            Expr::Bitcast(to, a) => self.fill(&format!("bitcast<{}>($0)", ty_name(to)), &[a])?,
            Expr::Dot4I8 { a, b, acc } => self.fill("(dot4I8Packed($0, $1) + $2)", &[a, b, acc])?,
            Expr::Splat(t, a) => self.fill(&format!("{}($0)", ty_name(t)), &[a])?,
            Expr::Unpack(d, a, i) => format!("h_load_{}({}, {i}u)", d.name(), self.ex(a)?),
            Expr::Pack(d, x) => {
                let mut parts = vec![];
                for (i, &x) in x[..per_word(d)].iter().enumerate() {
                    let v = format!("h_bits_{}({})", d.name(), self.ex(x)?);
                    parts.push(if i == 0 { v } else { format!("({v} << {}u)", i as u32 * d.bits()) });
                }
                format!("({})", parts.join(" | "))
            }
            Expr::Lane(a, i) => format!("{}.{}", self.ex(a)?, ["x", "y", "z", "w"][i as usize & 3]),
            Expr::Vector(t, x) => {
                let lanes: Vec<String> = x[..t.lanes()].iter().map(|&x| self.ex(x)).collect::<Result<_>>()?;
                format!("{}({})", ty_name(t), lanes.join(", "))
            }
        })
    }

    fn fill(&self, pattern: &str, x: &[ExprId]) -> Result<String> {
        let mut out = String::new();
        let mut parts = pattern.split('$');
        out.push_str(parts.next().unwrap_or(""));
        for p in parts {
            let i = p.as_bytes().first().map_or(0, |c| c.wrapping_sub(b'0') as usize);
            if let Some(&e) = x.get(i) {
                out.push_str(&self.ex(e)?);
            }
            out.push_str(p.get(1..).unwrap_or(""));
        }
        Ok(out)
    }

    fn stmt(&mut self, s: &Stmt) -> Result<()> {
        match s {
            Stmt::Let { dst, expr } => {
                let l = format!("let v{} = {};", dst.0, self.ex(*expr)?);
                self.line(&l)
            }
            Stmt::Read {
                dst,
                read: read @ (Read::Global { guard: Some(g), .. } | Read::Vector { guard: Some(g), .. }),
            } => {
                let t = self.k.values[dst.ix()];
                self.line(&format!("var v{}: {} = {}();", dst.0, ty_name(t), ty_name(t)));
                let l = format!("if ({}) {{", self.ex(*g)?);
                self.line(&l);
                self.depth += 1;
                let v = self.read(*dst, *read)?;
                self.line(&format!("v{} = {v};", dst.0));
                self.depth -= 1;
                self.line("}")
            }
            Stmt::Read { dst, read } => {
                let v = self.read(*dst, *read)?;
                self.line(&format!("let v{} = {v};", dst.0))
            }
            Stmt::Var { var, init } => {
                let t = ty_name(self.k.vars[var.ix()]);
                let l = format!("var m{}: {t} = {};", var.0, self.ex(*init)?);
                self.line(&l)
            }
            Stmt::Set { var, value } => {
                let l = format!("m{} = {};", var.0, self.ex(*value)?);
                self.line(&l)
            }
            Stmt::Store { buf, index, value } => self.store(*buf, *index, *value)?,
            Stmt::StoreVector { buf, index, value } => self.store_vector(*buf, *index, *value)?,
            Stmt::StoreWord { buf, index, value } => {
                let (i, v) = (self.index(*index)?, self.ex(*value)?);
                self.set_word(*buf, &i, &v)
            }
            Stmt::StoreLocal { arr, index, value } => {
                let (i, v) = (self.index(*index)?, self.array_value(*value)?);
                self.line(&format!("{}l{}[{i}] = {v};", self.prefix, arr.0))
            }
            Stmt::StorePrivate { arr, index, value } => {
                let (i, v) = (self.index(*index)?, self.array_value(*value)?);
                self.line(&format!("a{}[{i}] = {v};", arr.0))
            }
            Stmt::AtomicAdd { buf, index, value, dst } => self.atomic_add(*buf, *index, *value, *dst)?,
            // The compare-exchange is weak and may fail spuriously, hence the loop.
            Stmt::SetError { buf, index, code } => {
                let (i, c) = (self.index(*index)?, self.ex(*code)?);
                let p = format!("&{}[{i}]", self.buffer(*buf));
                self.line(&format!("while (atomicLoad({p}) == 0u) {{"));
                self.line(&format!("    if (atomicCompareExchangeWeak({p}, 0u, {c}).exchanged) {{"));
                self.line("        break;");
                self.line("    }");
                self.line("}");
            }
            Stmt::For { var, start, end, step, body } => self.for_loop(*var, [*start, *end, *step], body)?,
            Stmt::If { cond, then, els } => {
                let l = format!("if ({}) {{", self.ex(*cond)?);
                self.line(&l);
                self.nested(then)?;
                if !els.is_empty() {
                    self.line("} else {");
                    self.nested(els)?;
                }
                self.line("}")
            }
            Stmt::Barrier { global } => {
                self.line("workgroupBarrier();");
                if *global {
                    self.line("storageBarrier();");
                }
            }
            Stmt::FragmentFill { .. }
            | Stmt::FragmentLoad { .. }
            | Stmt::FragmentStore { .. }
            | Stmt::FragmentMap { .. }
            | Stmt::SetElement { .. }
            | Stmt::FragmentReduce { .. }
            | Stmt::FragmentConvert { .. }
            | Stmt::Mma { .. } => return Err(unsupported(self.k, "a product of matrices")),
        }
        Ok(())
    }

    fn for_loop(&mut self, var: ValueId, [start, end, step]: [ExprId; 3], body: &[Stmt]) -> Result<()> {
        let (v, t) = (format!("v{}", var.0), ty_name(self.k.values[var.ix()]));
        let (a, b, c) = (self.ex(start)?, self.ex(end)?, self.ex(step)?);
        if self.short_loops {
            let known = |e: ExprId| match self.k.expr(e) {
                Expr::Const { bits, .. } => i64::try_from(bits).ok(),
                _ => None,
            };
            let rounds = (|| {
                let (n, step) = (known(end)?.checked_sub(known(start)?)?, known(step)?);
                (n > 0 && step > 0).then(|| n / step + (n % step != 0) as i64)
            })();
            return self.short_loop(&[&v, t, &a, &b, &c], body, rounds);
        }
        self.line(&format!("for (var {v}: {t} = {a}; {v} < {b}; {v} += {c}) {{"));
        self.nested(body)?;
        self.line("}");
        Ok(())
    }

    fn atomic_add(&mut self, buf: BufId, index: ExprId, value: ExprId, dst: Option<ValueId>) -> Result<()> {
        let signed = self.k.buffers[buf.ix()].dtype == DType::I32;
        let (i, v) = (self.index(index)?, self.ex(value)?);
        let v = if signed { format!("bitcast<u32>({v})") } else { v };
        let x = format!("atomicAdd(&{}[{i}], {v})", self.buffer(buf));
        let l = match dst {
            Some(d) if signed => format!("let v{} = bitcast<i32>({x});", d.0),
            Some(d) => format!("let v{} = {x};", d.0),
            None => format!("{x};"),
        };
        self.line(&l);
        Ok(())
    }

    /// Emits a loop (counter, its type, start, end, step) that reports if the device stopped it. The device
    /// counts the iterations of all nested loops together, so iterations of short bodies are merged. A loop
    /// of unknown length is unrolled with a test between iterations. A loop whose number of iterations is
    /// `known` is unrolled by 8 without tests if 8 divides this number. Loops with few known iterations are
    /// written out.
    fn short_loop(
        &mut self,
        [v, t, start, end, step]: &[&str; 5],
        body: &[Stmt],
        known: Option<i64>,
    ) -> Result<()> {
        // Larger bodies would cost more to compile than unrolling saves.
        let size = straight(body);
        let short = size.is_some_and(|n| n <= 16);
        // The device does not count the iterations of a loop that is written out.
        let whole = match (known, size) {
            (Some(1), _) => Some(1),
            (Some(n @ 2..=32), Some(size)) if n as usize * size <= 256 => Some(n),
            _ => None,
        };
        if let Some(n) = whole {
            self.line("{");
            self.depth += 1;
            self.line(&format!("var {v}: {t} = {start};"));
            for round in 0..n {
                if round > 0 {
                    self.line(&format!("{v} += {step};"));
                }
                self.line("{");
                self.nested(body)?;
                self.line("}");
            }
            self.depth -= 1;
            self.line("}");
            return Ok(());
        }
        let rounds = match known {
            _ if !short => 1,
            None => self.unroll,
            Some(n) if n > 8 && n % 8 == 0 => 8,
            Some(_) => 1,
        };
        let tests = known.is_none();
        self.line("{");
        self.depth += 1;
        self.line(&format!("var {v}: {t} = {start};"));
        self.line(&format!("while ({v} < {end}) {{"));
        for round in 0..rounds {
            if round > 0 && tests {
                self.line(&format!("if ({v} < {end}) {{"));
            }
            self.depth += (round == 0 || tests) as usize;
            self.line("{");
            self.nested(body)?;
            self.line("}");
            self.line(&format!("{v} += {step};"));
        }
        for _ in 0..if tests { rounds } else { 1 } {
            self.depth -= 1;
            self.line("}");
        }
        self.line(&format!("if ({v} < {end}) {{"));
        self.line(&format!("    atomicStore(&{}cut[0], {}u);", self.prefix, self.mark));
        self.line("}");
        self.depth -= 1;
        self.line("}");
        Ok(())
    }

    /// A value in the type that arrays hold.
    fn array_value(&self, e: ExprId) -> Result<String> {
        let v = self.ex(e)?;
        Ok(if self.types[e.ix()] == Ty::Bool { format!("u32({v})") } else { v })
    }

    fn nested(&mut self, b: &[Stmt]) -> Result<()> {
        self.depth += 1;
        let r = self.block(b);
        self.depth -= 1;
        r
    }

    fn read(&mut self, dst: ValueId, r: Read) -> Result<String> {
        let t = self.k.values[dst.ix()];
        let element = |text: String| if t == Ty::Bool { format!("({text} != 0u)") } else { text };
        Ok(match r {
            Read::Global { buf, index, .. } => self.load(buf, index)?,
            Read::Vector { buf, ty, index, .. } => self.load_vector(buf, ty, index)?,
            Read::Word { buf, index } => {
                let i = self.index(index)?;
                self.word(buf, &i)
            }
            Read::Local { arr, index } => {
                element(format!("{}l{}[{}]", self.prefix, arr.0, self.index(index)?))
            }
            Read::Private { arr, index } => element(format!("a{}[{}]", arr.0, self.index(index)?)),
            Read::Var(v) => format!("m{}", v.0),
            Read::SubgroupReduce { op, value } => {
                format!("h_subgroup_{}_{}({}, h_width)", op.op().name(), t.name(), self.ex(value)?)
            }
            Read::SubgroupShuffleXor { value, mask } => {
                format!("subgroupShuffleXor({}, u32({}))", self.ex(value)?, self.ex(mask)?)
            }
            Read::SubgroupShuffle { value, lane } => {
                format!("subgroupShuffle({}, u32({}))", self.ex(value)?, self.ex(lane)?)
            }
            Read::Element { .. } => return Err(unsupported(self.k, "a product of matrices")),
        })
    }
}

/// Number of statements in a block without loops and barriers; `None` if it contains one.
fn straight(b: &[Stmt]) -> Option<usize> {
    b.iter().try_fold(0, |n, s| match s {
        Stmt::For { .. } | Stmt::Barrier { .. } => None,
        Stmt::If { then, els, .. } => Some(n + 1 + straight(then)? + straight(els)?),
        _ => Some(n + 1),
    })
}

fn index_division(ty: Ty, op: char) -> String {
    match ty {
        Ty::I32 => format!("i32(u32($0) {op} u32($1))"),
        Ty::I64 => format!("i64(u64($0) {op} u64($1))"),
        _ => format!("($0 {op} $1)"),
    }
}

/// Spelling of a scalar op on operands of type `t`; `None` if there is none.
fn op_pattern(op: ScalarOp, t: Ty) -> Option<String> {
    let s = t.name();
    let (float, bool) = (t.is_float(), t == Ty::Bool);
    let fixed = match op {
        ScalarOp::Neg if matches!(t, Ty::U32 | Ty::U64) => Some("(~$0 + 1)"),
        ScalarOp::Abs if float => Some("abs($0)"),
        ScalarOp::Floor => Some("floor($0)"),
        ScalarOp::Ceil if t == Ty::F32 => Some("ceil($0)"),
        ScalarOp::Round if t == Ty::F32 => Some("round($0)"),
        ScalarOp::Trunc if t == Ty::F32 => Some("trunc($0)"),
        ScalarOp::Ceil => Some("h_ceil_f64($0)"),
        ScalarOp::Round => Some("h_round_f64($0)"),
        ScalarOp::Trunc => Some("h_trunc_f64($0)"),
        ScalarOp::Sqrt => Some("sqrt($0)"),
        ScalarOp::Recip => Some("(1.0 / $0)"),
        ScalarOp::Div if float && t.lanes() == 1 => {
            Some(if t == Ty::F64 { "h_div_f64($0, $1)" } else { "h_div_f32($0, $1)" })
        }
        ScalarOp::Fma if t.lanes() > 1 => Some("fma($0, $1, $2)"),
        ScalarOp::Not if bool => Some("(!$0)"),
        ScalarOp::Not => Some("(~$0)"),
        ScalarOp::Xor | ScalarOp::Ne if bool => Some("($0 != $1)"),
        ScalarOp::Lt if bool => Some("(!$0 & $1)"),
        ScalarOp::Le if bool => Some("(!$0 | $1)"),
        ScalarOp::Gt if bool => Some("($0 & !$1)"),
        ScalarOp::Ge if bool => Some("($0 | !$1)"),
        ScalarOp::Min if bool => Some("($0 & $1)"),
        ScalarOp::Max if bool => Some("($0 | $1)"),
        ScalarOp::Min if !float => Some("min($0, $1)"),
        ScalarOp::Max if !float => Some("max($0, $1)"),
        ScalarOp::Select => Some("select($2, $1, $0)"),
        _ => None,
    };
    if let Some(p) = fixed {
        return Some(p.into());
    }
    // Comparisons of floats must test for NaN.
    if float && op.row().rule == Rule::Test && op.arity() == 2 {
        return Some(format!("h_{}_{s}($0, $1)", op.name()));
    }
    let row = op.row();
    let pattern = if float { row.c_float } else { row.c_int };
    match pattern.split_once('(') {
        None => None,
        Some(("", _)) => Some(pattern.to_string()),
        Some((f, rest)) => {
            let f = f.strip_prefix("h_").unwrap_or(f);
            Some(format!("h_{f}_{s}({rest}"))
        }
    }
}

/// Pattern of a cast from a compute type to a storage type, whose result has the storage type's compute type.
fn cast(to: DType, from: Ty) -> String {
    let t = Ty::of(to);
    let name = ty_name(t);
    match (to.class(), from.dtype().class()) {
        (Class::Bool, Class::Bool) => "$0".into(),
        (Class::Bool, Class::Float) => format!("h_true_{}($0)", from.name()),
        (Class::Bool, _) => "($0 != 0)".into(),
        (Class::Float, Class::Bool) => format!("select({name}(0.0), {name}(1.0), $0)"),
        (_, Class::Bool) => format!("select({name}(0), {name}(1), $0)"),
        (Class::Float, Class::Float) => match to {
            DType::F16 => format!("h_round_f16_{}($0)", from.name()),
            DType::BF16 => format!("h_round_bf16_{}($0)", from.name()),
            _ if t == from => "$0".into(),
            _ => format!("{name}($0)"),
        },
        (Class::Float, _) => match to {
            // f32 represents integers exactly up to 2^24, which is above f16's range.
            DType::F16 => "h_round_f16_f32(f32($0))".into(),
            DType::BF16 => format!("h_int_bf16_{}($0)", from.name()),
            _ => format!("{name}($0)"),
        },
        (_, Class::Float) => format!("h_sat_{}_{}($0)", to.name(), from.name()),
        _ => {
            let x = convert(from, t);
            match to {
                DType::U8 => format!("({x} & 255u)"),
                DType::U16 => format!("({x} & 65535u)"),
                DType::I8 => format!("(({x} << 24u) >> 24u)"),
                DType::I16 => format!("(({x} << 16u) >> 16u)"),
                _ => x,
            }
        }
    }
}

/// Wraps one integer type to another: first the width, then the sign.
fn convert(from: Ty, to: Ty) -> String {
    let wide = |t: Ty| matches!(t, Ty::I64 | Ty::U64);
    if from == to {
        return "$0".into();
    }
    let same_sign = match (from, wide(to)) {
        (Ty::I32 | Ty::I64, true) => Ty::I64,
        (Ty::I32 | Ty::I64, false) => Ty::I32,
        (_, true) => Ty::U64,
        (_, false) => Ty::U32,
    };
    let x = match (from, same_sign) {
        (a, b) if a == b => "$0".into(),
        // Mesa 22.3 loses the sign when it computes with the widened value.
        (Ty::I32, Ty::I64) => "h_widen_i32($0)".into(),
        (_, b) => format!("{}($0)", ty_name(b)),
    };
    if same_sign == to { x } else { format!("{}({x})", ty_name(to)) }
}
