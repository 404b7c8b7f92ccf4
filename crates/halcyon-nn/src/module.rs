//! Modules: structs that own parameters, and the methods that every module has.

use crate::slot::{Buffer, Param, Slot, SlotKind};
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon::summary::grouped;
use halcyon::{Backend, Tensor};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write;
use std::sync::Arc;

/// A struct that owns parameters, buffers and other modules. Derive it:
///
/// ```
/// use halcyon::prelude::*;
/// use halcyon_nn::{Linear, Module, ModuleExt};
///
/// #[derive(Module)]
/// struct Mlp {
///     fc1: Linear,
///     fc2: Linear,
/// }
///
/// impl Mlp {
///     fn forward(&self, x: &Tensor) -> Tensor {
///         self.fc2.forward(&self.fc1.forward(x).relu())
///     }
/// }
///
/// # fn main() -> halcyon::Result<()> {
/// let b = Backend::cpu()?;
/// let mlp = Mlp { fc1: Linear::new(&b, 4, 8)?, fc2: Linear::new(&b, 8, 2)? };
/// let names: Vec<String> = mlp.parameters().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]);
/// let y = mlp.forward(&Tensor::ones(&b, [3, 4], DType::F32));
/// assert_eq!(y.dims()?.as_slice(), [3, 2]);
/// # Ok(())
/// # }
/// ```
///
/// The forward of a module is an ordinary function of tensors. The trait has no forward, so you choose its
/// arguments.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a module",
    note = "derive it with `#[derive(Module)]`, or mark a field that holds no parameters with `#[module(skip)]`"
)]
pub trait Module {
    /// Visits the parameters, buffers and modules that this module owns, in the order of declaration.
    fn visit(&self, visit: &mut Visit<'_>);

    /// The name of the type, for [`ModuleExt::summary`].
    fn kind(&self) -> &'static str {
        ""
    }
}

/// A visit of a module's parameters and buffers. It keeps track of the path of the current module.
pub struct Visit<'v> {
    path: String,
    found: &'v mut dyn FnMut(&str, &Slot),
    entered: &'v mut dyn FnMut(&str, &'static str),
}

impl std::fmt::Debug for Visit<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Visit(at {:?})", self.path)
    }
}

impl Visit<'_> {
    /// Visits a module that the current module owns. `name` is the module's name in paths.
    pub fn child<M: Module + ?Sized>(&mut self, name: &str, module: &M) {
        let len = self.path.len();
        if len > 0 {
            self.path.push('.');
        }
        self.path.push_str(name);
        (self.entered)(&self.path, module.kind());
        module.visit(self);
        self.path.truncate(len);
    }

    /// Reports a parameter or buffer at the current path.
    pub fn slot(&mut self, slot: &Slot) {
        slot.found_at(&self.path);
        (self.found)(&self.path, slot);
    }
}

impl Module for Param {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit.slot(&self.0);
    }
}

impl Module for Buffer {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit.slot(&self.0);
    }
}

macro_rules! through {
    ($($ty:ty),*) => {
        $(impl<M: Module + ?Sized> Module for $ty {
            fn visit(&self, visit: &mut Visit<'_>) {
                (**self).visit(visit);
            }
            fn kind(&self) -> &'static str {
                (**self).kind()
            }
        })*
    };
}
through!(Box<M>, Arc<M>, std::rc::Rc<M>, &M);

impl<M: Module> Module for Option<M> {
    fn visit(&self, visit: &mut Visit<'_>) {
        if let Some(m) = self {
            m.visit(visit);
        }
    }
    fn kind(&self) -> &'static str {
        self.as_ref().map_or("", Module::kind)
    }
}

impl<M: Module> Module for [M] {
    fn visit(&self, visit: &mut Visit<'_>) {
        for (i, m) in self.iter().enumerate() {
            visit.child(&i.to_string(), m);
        }
    }
}

impl<M: Module> Module for Vec<M> {
    fn visit(&self, visit: &mut Visit<'_>) {
        self.as_slice().visit(visit);
    }
}

impl<M: Module, const N: usize> Module for [M; N] {
    fn visit(&self, visit: &mut Visit<'_>) {
        self.as_slice().visit(visit);
    }
}

/// The name of an entry in paths is its key.
impl<M: Module> Module for BTreeMap<String, M> {
    fn visit(&self, visit: &mut Visit<'_>) {
        for (name, m) in self {
            visit.child(name, m);
        }
    }
}

macro_rules! tuples {
    ($(($($name:ident $i:tt),*))*) => {
        $(impl<$($name: Module),*> Module for ($($name,)*) {
            fn visit(&self, visit: &mut Visit<'_>) {
                $(visit.child(stringify!($i), &self.$i);)*
            }
        })*
    };
}
tuples!((A 0) (A 0, B 1) (A 0, B 1, C 2) (A 0, B 1, C 2, D 3) (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5));

macro_rules! without_parameters {
    ($($ty:ty),*) => {
        $(impl Module for $ty {
            fn visit(&self, _: &mut Visit<'_>) {}
        })*
    };
}
without_parameters!(
    (),
    bool,
    char,
    u8,
    u16,
    u32,
    u64,
    usize,
    i8,
    i16,
    i32,
    i64,
    isize,
    f32,
    f64,
    String,
    &'static str
);

impl<T> Module for std::marker::PhantomData<T> {
    fn visit(&self, _: &mut Visit<'_>) {}
}

/// The names for which [`crate::LoadWeights`] found no counterpart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unmatched {
    /// Names that are in the model but not in the file.
    pub missing: Vec<String>,
    /// Names that are in the file but not in the model.
    pub unexpected: Vec<String>,
}

/// Methods of every module.
pub trait ModuleExt: Module {
    /// Calls `f` with the path and slot of every parameter and buffer, in order. A slot that several fields
    /// share is passed once for each field.
    fn each_slot(&self, mut f: impl FnMut(&str, &Slot)) {
        self.visit(&mut Visit { path: String::new(), found: &mut f, entered: &mut |_, _| {} });
    }

    /// Parameters and buffers with their paths. A slot that several fields share appears once, under the
    /// first path.
    fn slots(&self) -> Vec<(String, Slot)> {
        let (mut out, mut seen) = (vec![], HashSet::new());
        self.each_slot(|path, slot| {
            if seen.insert(slot.id()) {
                out.push((path.to_string(), slot.clone()));
            }
        });
        out
    }

    /// Parameters with their paths, each once.
    fn parameters(&self) -> Vec<(String, Slot)> {
        let mut slots = self.slots();
        slots.retain(|(_, s)| s.kind() == SlotKind::Param);
        slots
    }

    /// The trainable parameters with their paths, each once.
    fn trainable(&self) -> Vec<(String, Slot)> {
        let mut slots = self.slots();
        slots.retain(|(_, s)| s.is_trainable());
        slots
    }

    /// Buffers with their paths, each once.
    fn buffers(&self) -> Vec<(String, Slot)> {
        let mut slots = self.slots();
        slots.retain(|(_, s)| s.kind() == SlotKind::Buffer);
        slots
    }

    /// The slot at a path.
    ///
    /// # Errors
    /// `Error::Argument` if there is no such slot; the message names the most similar path.
    fn slot(&self, path: &str) -> Result<Slot> {
        let mut found = None;
        self.each_slot(|p, s| {
            if p == path {
                found.get_or_insert_with(|| s.clone());
            }
        });
        found.ok_or_else(|| {
            let mut names = vec![];
            self.each_slot(|p, _| names.push(p.to_string()));
            let what = match nearest(path, &names) {
                Some(n) => format!("there is no parameter or buffer `{path}`. Did you mean `{n}`?"),
                None => format!("there is no parameter or buffer `{path}`"),
            };
            Error::argument("slot", what)
        })
    }

    /// Number of elements of all parameters; shared ones count once.
    ///
    /// # Errors
    /// An error that a parameter's value carries.
    fn parameter_count(&self) -> Result<usize> {
        self.parameters().iter().map(|(_, s)| elements(s)).sum()
    }

    /// Selects the parameters for which `which(path)` is true. If `on` is true, makes them trainable;
    /// otherwise freezes them. Returns their number.
    fn set_trainable_where(&self, which: impl Fn(&str) -> bool, on: bool) -> usize {
        let mut n = 0;
        let mut seen = HashSet::new();
        self.each_slot(|path, s| {
            if s.kind() == SlotKind::Param && which(path) && seen.insert(s.id()) {
                s.set_trainable(on);
                n += 1;
            }
        });
        n
    }

    /// Freezes the parameters whose paths match a pattern; see [`Pattern`]. Returns the number of these
    /// parameters.
    ///
    /// # Errors
    /// `Error::Argument` if the pattern is invalid or matches nothing.
    fn freeze(&self, pattern: &str) -> Result<usize> {
        let p = Pattern::new(pattern)?;
        p.matched(self.set_trainable_where(|path| p.matches(path), false))
    }

    /// Makes the parameters whose paths match a pattern trainable again; see [`Pattern`]. Returns the number
    /// of these parameters.
    ///
    /// # Errors
    /// `Error::Argument` if the pattern is invalid or matches nothing.
    fn unfreeze(&self, pattern: &str) -> Result<usize> {
        let p = Pattern::new(pattern)?;
        p.matched(self.set_trainable_where(|path| p.matches(path), true))
    }

    /// Replaces every parameter and buffer by `f(path, value)`. The shape must stay the same. If `f` or the
    /// evaluation of a result fails, or if `f` changes a shape, nothing is replaced.
    ///
    /// # Errors
    /// The first error of `f`, or of evaluating its results; `Error::Shape` if `f` changes a shape.
    fn map(&self, mut f: impl FnMut(&str, &Tensor) -> Result<Tensor>) -> Result<()> {
        let slots = self.slots();
        let new = slots.iter().map(|(path, s)| f(path, &s.stored())).collect::<Result<Vec<_>>>()?;
        let mut by_backend: HashMap<String, Vec<Tensor>> = HashMap::new();
        for t in &new {
            by_backend.entry(t.backend().id().to_string()).or_default().push(t.clone());
        }
        by_backend.values().try_for_each(|v| halcyon::eval(v))?;
        slots.iter().zip(&new).try_for_each(|((_, s), t)| s.accepts(t))?;
        slots.iter().zip(new).try_for_each(|((_, s), t)| s.replace(t))
    }

    /// Moves all parameters and buffers to a backend.
    ///
    /// # Errors
    /// Errors of the copies; then nothing has moved.
    fn to_device(&self, backend: &Backend) -> Result<()> {
        self.map(|_, t| t.to(backend))
    }

    /// Casts all parameters and buffers whose dtype is a float to `dtype`.
    ///
    /// # Errors
    /// `Error::Argument` if `dtype` is not a float; errors of the device. After an error nothing has changed.
    fn to_dtype(&self, dtype: DType) -> Result<()> {
        if !dtype.is_float() {
            return Err(Error::argument("to_dtype", format!("parameters are floats, not {dtype}")));
        }
        self.map(|_, t| Ok(if t.dtype()?.is_float() { t.cast(dtype) } else { t.clone() }))
    }

    /// A table of the modules with their types, the shapes of their parameters and the numbers of elements.
    ///
    /// # Errors
    /// An error that a parameter's value carries.
    fn summary(&self) -> Result<String>
    where
        Self: Sized,
    {
        summary(self)
    }
}

impl<M: Module + ?Sized> ModuleExt for M {}

pub(crate) fn elements(slot: &Slot) -> Result<usize> {
    Ok(slot.stored().dims()?.iter().product())
}

/// The name whose common prefix and common suffix with `path` have the largest total length; `None` if that
/// length is 2 or less.
fn nearest<'n>(path: &str, names: &'n [String]) -> Option<&'n str> {
    let same = |n: &str| {
        let start = n.chars().zip(path.chars()).take_while(|(a, b)| a == b).count();
        start + n.chars().rev().zip(path.chars().rev()).take_while(|(a, b)| a == b).count()
    };
    names
        .iter()
        .map(|n| (same(n), n.as_str()))
        .max_by_key(|(s, _)| *s)
        .filter(|(s, _)| *s > 2)
        .map(|(_, n)| n)
}

/// A pattern of paths: `*` stands for any characters of a path, dots included, `?` for one character, `[ab]`
/// for one of the characters in brackets. A pattern also matches all paths below a path that it matches:
/// `encoder` matches `encoder.0.weight`.
#[derive(Clone, Debug)]
pub struct Pattern(glob::Pattern);

impl Pattern {
    /// # Errors
    /// `Error::Argument` if the pattern is invalid.
    pub fn new(pattern: &str) -> Result<Pattern> {
        let p = glob::Pattern::new(pattern);
        p.map(Pattern).map_err(|e| Error::argument("pattern", format!("`{pattern}` is invalid: {}", e.msg)))
    }

    /// Whether a path matches.
    pub fn matches(&self, path: &str) -> bool {
        let ends = path.match_indices('.').map(|(i, _)| i).chain([path.len()]);
        ends.into_iter().any(|end| self.0.matches(&path[..end]))
    }

    fn matched(&self, n: usize) -> Result<usize> {
        match n {
            0 => Err(Error::argument("pattern", format!("no parameter matches `{}`", self.0.as_str()))),
            n => Ok(n),
        }
    }
}

/// One line of a summary.
struct Line {
    path: String,
    kind: &'static str,
    shapes: Vec<String>,
    params: usize,
    trainable: usize,
}

fn summary<M: Module>(module: &M) -> Result<String> {
    // One line for the root, then one for every entered module that has a type name, in order. A slot belongs
    // to the closest module above it that has a line. If several lines have that path, the last one gets it.
    let lines = std::cell::RefCell::new(vec![line("", module.kind())]);
    let (mut seen, mut failed) = (HashSet::new(), None);
    let mut total = [0usize; 3];
    let mut found = |path: &str, slot: &Slot| {
        if !seen.insert(slot.id()) {
            return;
        }
        let (n, t) = match (elements(slot), slot.stored().shape()) {
            (Ok(n), Ok(s)) => (n, s),
            (Err(e), _) | (_, Err(e)) => {
                failed.get_or_insert(e);
                return;
            }
        };
        let mut lines = lines.borrow_mut();
        // Lists, tuples and maps have no line, so the owner may be several names up.
        let owners = path.match_indices('.').map(|(i, _)| i).rev().chain([0]);
        let owner = owners.into_iter().find_map(|end| lines.iter().rposition(|l| l.path == path[..end]));
        let Some(line) = owner.and_then(|i| lines.get_mut(i)) else { return };
        let name = path[line.path.len()..].trim_start_matches('.');
        line.shapes.push(format!("{name} {t}"));
        match slot.kind() {
            SlotKind::Buffer => total[2] += n,
            SlotKind::Param => {
                line.params += n;
                total[0] += n;
                if slot.is_trainable() {
                    line.trainable += n;
                    total[1] += n;
                }
            }
        }
    };
    let mut entered = |path: &str, kind: &'static str| {
        if !kind.is_empty() {
            lines.borrow_mut().push(line(path, kind));
        }
    };
    module.visit(&mut Visit { path: String::new(), found: &mut found, entered: &mut entered });
    if let Some(e) = failed {
        return Err(e);
    }
    Ok(table(&lines.into_inner(), total))
}

fn line(path: &str, kind: &'static str) -> Line {
    Line { path: path.to_string(), kind, shapes: vec![], params: 0, trainable: 0 }
}

fn table(lines: &[Line], [params, trainable, buffers]: [usize; 3]) -> String {
    let name = |l: &Line| {
        let depth = if l.path.is_empty() { 0 } else { 1 + l.path.matches('.').count() };
        let own = l.path.rsplit('.').next().unwrap_or_default();
        let kind = if l.kind.is_empty() { "module" } else { l.kind };
        match own.is_empty() {
            true => kind.to_string(),
            false => format!("{}{own}: {kind}", "  ".repeat(depth)),
        }
    };
    let rows: Vec<[String; 3]> = lines
        .iter()
        .map(|l| {
            let count = match l.params {
                0 => String::new(),
                n if l.trainable == 0 => format!("{} frozen", grouped(n as u64)),
                n => grouped(n as u64),
            };
            [name(l), l.shapes.join(", "), count]
        })
        .collect();
    let width = |i: usize| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or(0);
    let (first, second, third) = (width(0).max(6), width(1).max(6), width(2).max(10));
    let mut out = String::new();
    let mut row = |a: &str, b: &str, c: &str| {
        let text = format!("{a:first$}  {b:second$}  {c:>third$}");
        let _ = writeln!(out, "{}", text.trim_end());
    };
    row("module", "shapes", "parameters");
    rows.iter().for_each(|[a, b, c]| row(a, b, c));
    let _ = writeln!(
        out,
        "{} parameters, {} trainable, {} elements in buffers",
        grouped(params as u64),
        grouped(trainable as u64),
        grouped(buffers as u64)
    );
    out
}
