//! Declaration, reads and writes of buffers. 8-bit elements are stored in words. So are 16-bit elements,
//! unless the device has a storage type for them and the binding is accessed only as elements of one dtype.
//! 64-bit elements are stored in two words if buffers of another type share their binding, or if the binding
//! is also accessed by words or vectors.

use super::{Options, Writer, ty_name};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::ir::*;

/// The element type of a binding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Element {
    /// A type that is both a storage and a compute type.
    Own(Ty),
    /// A vector type, if all accesses are vectors of this type.
    Vector(Ty),
    F16,
    I16,
    U16,
    /// Words with the elements' bits.
    Word,
    /// Words that are accessed by atomic operations, because a store modifies only some bits of a word, or
    /// because the kernel itself has atomic operations on the buffer.
    Atomic,
}

/// The kinds of accesses that a kernel makes to one buffer.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Touch {
    element: bool,
    store: bool,
    vector: Option<Ty>,
    mixed_vectors: bool,
    word: bool,
    atomic: bool,
}

pub(super) fn touches(k: &Kernel) -> Vec<Touch> {
    let mut all = vec![Touch::default(); k.buffers.len()];
    let types = k.types();
    let vector = |t: &mut Touch, ty: Ty| {
        t.mixed_vectors |= t.vector.is_some_and(|v| v != ty);
        t.vector = Some(ty);
    };
    k.walk(&mut |s| match s {
        Stmt::Read { read: Read::Global { buf, .. }, .. } => all[buf.ix()].element = true,
        Stmt::Read { read: Read::Vector { buf, ty, .. }, .. } => vector(&mut all[buf.ix()], *ty),
        Stmt::Read { read: Read::Word { buf, .. }, .. } | Stmt::StoreWord { buf, .. } => {
            all[buf.ix()].word = true
        }
        Stmt::Store { buf, .. } => {
            all[buf.ix()].element = true;
            all[buf.ix()].store = true;
        }
        Stmt::StoreVector { buf, value, .. } => vector(&mut all[buf.ix()], types[value.ix()]),
        Stmt::AtomicAdd { buf, .. } | Stmt::SetError { buf, .. } => all[buf.ix()].atomic = true,
        _ => {}
    });
    all
}

/// The element type of a binding, from the buffers that share it.
pub(super) fn element(k: &Kernel, bufs: &[usize], touch: &[Touch], o: &Options) -> Element {
    let dtype = k.buffers[bufs[0]].dtype;
    let one = bufs.iter().all(|&b| k.buffers[b].dtype == dtype);
    let any = |f: &dyn Fn(&Touch) -> bool| bufs.iter().any(|&b| f(&touch[b]));
    let vector = bufs.iter().find_map(|&b| touch[b].vector);
    let plain = one && !any(&|t| t.atomic || t.word || t.vector.is_some());
    let narrow = match dtype {
        DType::F16 if o.f16 => Some(Element::F16),
        DType::I16 if o.int16 => Some(Element::I16),
        DType::U16 | DType::BF16 if o.int16 => Some(Element::U16),
        _ => None,
    };
    if plain && let Some(e) = narrow {
        return e;
    }
    let partial = bufs.iter().any(|&b| touch[b].store && k.buffers[b].dtype.bits() < 32);
    if partial || any(&|t| t.atomic) {
        return Element::Atomic;
    }
    let ty = Ty::of(dtype);
    if plain && ty != Ty::Bool && ty.dtype() == dtype {
        return Element::Own(ty);
    }
    match vector {
        Some(t) if one && !any(&|t| t.word || t.element || t.mixed_vectors) => {
            let same = bufs.iter().all(|&b| touch[b].vector.is_none_or(|v| v == t));
            if same { Element::Vector(t) } else { Element::Word }
        }
        _ => Element::Word,
    }
}

impl Writer<'_> {
    fn element(&self, buf: BufId) -> Element {
        self.bindings[self.binding_of[buf.ix()]]
    }

    pub(super) fn buffer(&self, buf: BufId) -> String {
        format!("{}b{}", self.prefix, self.binding_of[buf.ix()])
    }

    /// An index in a type that WGSL accepts.
    pub(super) fn index(&self, e: ExprId) -> Result<String> {
        let i = self.ex(e)?;
        Ok(match self.types[e.ix()] {
            Ty::I64 | Ty::U64 => format!("u32({i})"),
            _ => i,
        })
    }

    /// Declares a name for the index, as u32.
    fn named_index(&mut self, e: ExprId) -> Result<String> {
        let (i, n) = (self.ex(e)?, self.temp());
        let i = if self.types[e.ix()] == Ty::U32 { i } else { format!("u32({i})") };
        self.line(&format!("let {n} = {i};"));
        Ok(n)
    }

    /// Word `at` of a binding whose elements are words.
    pub(super) fn word(&self, buf: BufId, at: &str) -> String {
        let p = self.buffer(buf);
        match self.element(buf) {
            Element::Atomic => format!("atomicLoad(&{p}[{at}])"),
            _ => format!("{p}[{at}]"),
        }
    }

    pub(super) fn set_word(&mut self, buf: BufId, at: &str, value: &str) {
        let p = self.buffer(buf);
        let l = match self.element(buf) {
            Element::Atomic => format!("atomicStore(&{p}[{at}], {value});"),
            _ => format!("{p}[{at}] = {value};"),
        };
        self.line(&l)
    }

    /// The element at `index`, in its compute type.
    pub(super) fn load(&mut self, buf: BufId, index: ExprId) -> Result<String> {
        let dtype = self.k.buffers[buf.ix()].dtype;
        let p = self.buffer(buf);
        let plain = |w: &Self| Ok::<String, Error>(format!("{p}[{}]", w.index(index)?));
        Ok(match (self.element(buf), dtype) {
            (Element::Own(_), _) => plain(self)?,
            (Element::F16, _) => format!("f32({})", plain(self)?),
            (Element::I16, _) => format!("i32({})", plain(self)?),
            (Element::U16, DType::BF16) => format!("h_bf16_f32(u32({}))", plain(self)?),
            (Element::U16, _) => format!("u32({})", plain(self)?),
            (Element::Vector(_), _) => return Err(Error::internal("an element of a buffer of vectors")),
            (Element::Word | Element::Atomic, d) => match d.bits() {
                32 => {
                    let i = self.index(index)?;
                    let w = self.word(buf, &i);
                    match Ty::of(d) {
                        Ty::U32 => w,
                        t => format!("bitcast<{}>({w})", ty_name(t)),
                    }
                }
                64 => {
                    let i = self.named_index(index)?;
                    let (lo, hi) =
                        (self.word(buf, &format!("{i} * 2u")), self.word(buf, &format!("{i} * 2u + 1u")));
                    let v = format!("h_join_u64({lo}, {hi})");
                    if d == DType::U64 { v } else { format!("bitcast<{}>({v})", ty_name(Ty::of(d))) }
                }
                bits => {
                    let i = self.named_index(index)?;
                    let shift = if bits == 16 { 1 } else { 2 };
                    let w = self.word(buf, &format!("{i} >> {shift}u"));
                    format!("h_load_{}({w}, {i})", d.name())
                }
            },
        })
    }

    pub(super) fn store(&mut self, buf: BufId, index: ExprId, value: ExprId) -> Result<()> {
        let dtype = self.k.buffers[buf.ix()].dtype;
        let (p, v) = (self.buffer(buf), self.ex(value)?);
        match (self.element(buf), dtype) {
            (Element::Vector(_), _) => return Err(Error::internal("an element of a buffer of vectors")),
            (Element::Word | Element::Atomic, d) => match d.bits() {
                32 => {
                    let i = self.index(index)?;
                    let v = if d == DType::U32 { v } else { format!("bitcast<u32>({v})") };
                    self.set_word(buf, &i, &v);
                }
                64 => {
                    let i = self.named_index(index)?;
                    let n = self.temp();
                    let v = if d == DType::U64 { v } else { format!("bitcast<u64>({v})") };
                    self.line(&format!("let {n} = {v};"));
                    self.set_word(buf, &format!("{i} * 2u"), &format!("u32({n} & 4294967295lu)"));
                    self.set_word(buf, &format!("{i} * 2u + 1u"), &format!("u32({n} >> 32u)"));
                }
                bits => {
                    let i = self.named_index(index)?;
                    let (shift, mask) = if bits == 16 { (1, "0xffffu") } else { (2, "0xffu") };
                    let s = self.temp();
                    let per = (1 << shift) - 1;
                    self.line(&format!("let {s} = ({i} & {per}u) * {bits}u;"));
                    self.line(&format!("atomicAnd(&{p}[{i} >> {shift}u], ~({mask} << {s}));"));
                    self.line(&format!("atomicOr(&{p}[{i} >> {shift}u], h_bits_{}({v}) << {s});", d.name()));
                }
            },
            (e, d) => {
                let v = match (e, d) {
                    (Element::F16, _) => format!("f16(h_round_f16_f32({v}))"),
                    (Element::I16, _) => format!("i16({v})"),
                    (Element::U16, DType::BF16) => format!("u16(h_f32_bf16({v}))"),
                    (Element::U16, _) => format!("u16({v})"),
                    _ => v,
                };
                let i = self.index(index)?;
                self.line(&format!("{p}[{i}] = {v};"));
            }
        }
        Ok(())
    }

    pub(super) fn load_vector(&mut self, buf: BufId, ty: Ty, index: ExprId) -> Result<String> {
        if let Element::Vector(_) = self.element(buf) {
            return Ok(format!("{}[{}]", self.buffer(buf), self.index(index)?));
        }
        let i = self.named_index(index)?;
        let n = ty.lanes();
        let own = matches!(self.element(buf), Element::Own(_));
        let lane = |l: usize| {
            let w = self.word(buf, &format!("{i} * {n}u + {l}u"));
            if own || ty == Ty::U32x4 { w } else { format!("bitcast<f32>({w})") }
        };
        let lanes: Vec<String> = (0..n).map(lane).collect();
        Ok(format!("{}({})", ty_name(ty), lanes.join(", ")))
    }

    pub(super) fn store_vector(&mut self, buf: BufId, index: ExprId, value: ExprId) -> Result<()> {
        let v = self.ex(value)?;
        if let Element::Vector(_) = self.element(buf) {
            let l = format!("{}[{}] = {v};", self.buffer(buf), self.index(index)?);
            self.line(&l);
            return Ok(());
        }
        let i = self.named_index(index)?;
        let n = self.temp();
        self.line(&format!("let {n} = {v};"));
        let lanes = self.types[value.ix()].lanes();
        for l in 0..lanes {
            let lane = format!("{n}.{}", ["x", "y", "z", "w"][l & 3]);
            let own = matches!(self.element(buf), Element::Own(_));
            let lane = if own || self.types[value.ix()] == Ty::U32x4 {
                lane
            } else {
                format!("bitcast<u32>({lane})")
            };
            self.set_word(buf, &format!("{i} * {lanes}u + {l}u"), &lane);
        }
        Ok(())
    }
}
