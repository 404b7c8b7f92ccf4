//! Shapes with known and symbolic dimensions.
//!
//! A [`Dim`] is a non-negative integer or a polynomial over symbols in a normal form, so `b*s` equals `s*b`.
//! Graphs may contain symbolic dimensions. Plans never do: [`crate::Graph::bind`] replaces every symbol
//! first.
//!
//! Arithmetic never wraps and never panics. A result that does not fit 64 bits, or an expression that exceeds
//! [`MAX_ATOMS`], becomes [`Dim::LOST`], as does everything computed from it. [`TensorType::check`] rejects
//! types that contain it, and so do [`crate::Graph::push`] and [`crate::Graph::check`].

use crate::error::{Error, Result, one_line};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, LazyLock, RwLock};

/// Concrete sizes.
pub type Dims = SmallVec<[usize; 6]>;

/// Values of symbols.
pub type Bindings = BTreeMap<Arc<str>, usize>;

/// A factor of a term of a dimension.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Atom {
    Sym(Arc<str>),
    /// Floored quotient.
    Div(Poly, Poly),
    Max(Poly, Poly),
}

/// A sum of terms `coefficient * product of atoms`. The terms are sorted, and no coefficient is zero.
pub type Poly = Vec<(Vec<Atom>, i64)>;

#[derive(Default)]
struct Interner {
    polys: Vec<Poly>,
    ids: HashMap<Poly, i64>,
}

static INTERNER: LazyLock<RwLock<Interner>> = LazyLock::new(Default::default);

/// Maximum number of axes of a tensor (as in NumPy).
pub const MAX_AXES: usize = 64;
/// Maximum size of a tensor in bytes. A dimension of 0 counts as 1. A 64-bit process can address this much.
/// Element counts, offsets and strides of such tensors, and sums of a few of these, fit an `isize`.
pub const MAX_BYTES: u64 = 1 << 47;
/// Maximum number of symbols, quotients, maxima and terms in one expression, including nested ones.
pub const MAX_ATOMS: usize = 256;

/// One dimension: a size, or an expression over symbols.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Dim(i64);

/// Number of atoms and terms in an expression. Counting stops soon after [`MAX_ATOMS`].
fn weight(p: &Poly) -> usize {
    let mut n = p.len();
    for a in p.iter().flat_map(|(a, _)| a) {
        n += match a {
            Atom::Sym(_) => 1,
            Atom::Div(x, y) | Atom::Max(x, y) => 1 + weight(x) + weight(y),
        };
        if n > MAX_ATOMS {
            break;
        }
    }
    n
}

impl Dim {
    /// A size that does not fit 64 bits, or an expression that is too large. It equals no valid dimension,
    /// has no value and cannot be bound.
    pub const LOST: Dim = Dim(i64::MIN);

    /// The symbol `name`.
    pub fn sym(name: &str) -> Dim {
        Dim::intern(vec![(vec![Atom::Sym(name.into())], 1)])
    }

    /// Whether this is [`Dim::LOST`].
    pub fn is_lost(self) -> bool {
        self == Dim::LOST
    }

    fn intern(p: Poly) -> Dim {
        match p.as_slice() {
            [] => return Dim(0),
            [(atoms, c)] if atoms.is_empty() && *c >= 0 => return Dim(*c),
            _ if weight(&p) > MAX_ATOMS => return Dim::LOST,
            _ => {}
        }
        // After a panic of another thread the table is still valid: at worst it has a polynomial without an
        // id.
        if let Some(id) = INTERNER.read().unwrap_or_else(|e| e.into_inner()).ids.get(&p) {
            return Dim(*id);
        }
        let mut t = INTERNER.write().unwrap_or_else(|e| e.into_inner());
        if let Some(id) = t.ids.get(&p) {
            return Dim(*id);
        }
        t.polys.push(p.clone());
        let id = -(t.polys.len() as i64);
        t.ids.insert(p, id);
        Dim(id)
    }

    /// The terms of the expression. Must not be called on [`Dim::LOST`], which is not an expression.
    pub fn poly(self) -> Poly {
        match self.0 {
            0 => vec![],
            n if n > 0 => vec![(vec![], n)],
            id => INTERNER.read().unwrap_or_else(|e| e.into_inner()).polys[(-id - 1) as usize].clone(),
        }
    }

    /// The size; `None` for an expression, a negative number and [`Dim::LOST`].
    pub fn known(self) -> Option<usize> {
        (self.0 >= 0).then_some(self.0 as usize)
    }

    pub fn is(self, n: usize) -> bool {
        self.known() == Some(n)
    }

    fn combine(terms: impl IntoIterator<Item = Option<(Vec<Atom>, i64)>>) -> Dim {
        let mut m: BTreeMap<Vec<Atom>, i64> = BTreeMap::new();
        for t in terms {
            let Some((a, c)) = t else { return Dim::LOST };
            let sum = m.entry(a).or_default();
            match sum.checked_add(c) {
                Some(v) => *sum = v,
                None => return Dim::LOST,
            }
            // Limits intermediate sums as well as results.
            if m.len() > MAX_ATOMS {
                return Dim::LOST;
            }
        }
        Dim::intern(m.into_iter().filter(|(_, c)| *c != 0).collect())
    }

    pub fn mul(self, o: Dim) -> Dim {
        match (self.known(), o.known()) {
            (Some(a), Some(b)) => {
                return a.checked_mul(b).and_then(|p| i64::try_from(p).ok()).map_or(Dim::LOST, Dim);
            }
            _ if self.is_lost() || o.is_lost() => return Dim::LOST,
            _ => {}
        }
        let (a, b) = (self.poly(), o.poly());
        Dim::combine(a.iter().flat_map(|(x, c)| {
            b.iter().map(move |(y, d)| {
                let mut v: Vec<Atom> = x.iter().chain(y).cloned().collect();
                v.sort();
                Some((v, c.checked_mul(*d)?))
            })
        }))
    }

    pub fn add(self, o: Dim) -> Dim {
        match (self.known(), o.known()) {
            (Some(a), Some(b)) => (a as i64).checked_add(b as i64).map_or(Dim::LOST, Dim),
            _ if self.is_lost() || o.is_lost() => Dim::LOST,
            _ => Dim::combine(self.poly().into_iter().chain(o.poly()).map(Some)),
        }
    }

    /// This dimension plus `by`.
    pub fn offset(self, by: i64) -> Dim {
        match self.known().map(|n| (n as i64).checked_add(by)) {
            Some(None) => Dim::LOST,
            Some(Some(n)) if n >= 0 => Dim(n),
            _ if self.is_lost() => Dim::LOST,
            _ => Dim::combine(self.poly().into_iter().chain([(vec![], by)]).map(Some)),
        }
    }

    pub fn sub(self, o: Dim) -> Dim {
        match (self.known(), o.known()) {
            (Some(a), Some(b)) if a >= b => Dim((a - b) as i64),
            _ if self.is_lost() || o.is_lost() => Dim::LOST,
            _ => {
                let minus = o.poly().into_iter().map(|(a, c)| Some((a, c.checked_neg()?)));
                Dim::combine(self.poly().into_iter().map(Some).chain(minus))
            }
        }
    }

    pub fn max(self, o: Dim) -> Dim {
        match (self.known(), o.known()) {
            (Some(a), Some(b)) => Dim::from(a.max(b)),
            _ if self == o => self,
            _ if self.is_lost() || o.is_lost() => Dim::LOST,
            _ => Dim::intern(vec![(vec![Atom::Max(self.poly(), o.poly())], 1)]),
        }
    }

    /// Floored quotient. It is simplified if the divisor has a single term that divides every term of this
    /// dimension, or if both are equal. Otherwise it stays a quotient until it is bound. A divisor of 0 is an
    /// error.
    pub fn div(self, o: Dim) -> Result<Dim> {
        if o.is(0) {
            return Err(Error::shape("shape", "division of a dimension by zero"));
        }
        if let (Some(a), Some(b)) = (self.known(), o.known()) {
            return Ok(Dim::from(a / b));
        }
        if self.is_lost() || o.is_lost() {
            return Ok(Dim::LOST);
        }
        let whole = || Dim::intern(vec![(vec![Atom::Div(self.poly(), o.poly())], 1)]);
        if let [(atoms, c)] = o.poly().as_slice() {
            let mut out = vec![];
            for (a, k) in self.poly() {
                let mut rest = a.clone();
                // `checked_rem` is `None` for i64::MIN by -1, whose quotient does not fit 64 bits.
                let ok = k.checked_rem(*c) == Some(0)
                    && atoms.iter().all(|x| match rest.iter().position(|y| y == x) {
                        Some(i) => {
                            rest.remove(i);
                            true
                        }
                        None => false,
                    });
                if !ok {
                    return Ok(whole());
                }
                out.push(k.checked_div(*c).map(|q| (rest, q)));
            }
            return Ok(Dim::combine(out));
        }
        if self == o {
            return Ok(Dim(1));
        }
        Ok(whole())
    }

    /// The error text for a dimension that no tensor can have. `None` if it is valid or depends on symbols.
    fn fault(self) -> Option<String> {
        if self.0 >= 0 {
            return None;
        }
        if self.is_lost() {
            return Some("a size does not fit 64 bits, or its expression is too long".into());
        }
        match self.poly().as_slice() {
            [(atoms, c)] if atoms.is_empty() => Some(format!("size {c} is negative")),
            _ => None,
        }
    }

    /// Replaces symbols by their values.
    pub fn bind(self, b: &Bindings) -> Result<Dim> {
        if self.0 >= 0 {
            return Ok(self);
        }
        if let Some(why) = self.fault() {
            return Err(Error::shape("bind", why));
        }
        let v = eval_poly(&self.poly(), b)?;
        usize::try_from(v)
            .map(Dim::from)
            .map_err(|_| Error::shape("bind", format!("dimension {self} becomes {v}, which is negative")))
    }

    /// Adds the names of the symbols in the expression to `out`.
    pub fn symbols(self, out: &mut std::collections::BTreeSet<Arc<str>>) {
        fn walk(p: &Poly, out: &mut std::collections::BTreeSet<Arc<str>>) {
            for a in p.iter().flat_map(|(a, _)| a) {
                match a {
                    Atom::Sym(s) => {
                        out.insert(s.clone());
                    }
                    Atom::Div(x, y) | Atom::Max(x, y) => {
                        walk(x, out);
                        walk(y, out);
                    }
                }
            }
        }
        if !self.is_lost() {
            walk(&self.poly(), out)
        }
    }
}

fn eval_poly(p: &Poly, b: &Bindings) -> Result<i64> {
    let overflow = || Error::shape("bind", "a dimension overflows 64 bits");
    let mut sum = 0i64;
    for (atoms, c) in p {
        let mut t = *c;
        for a in atoms {
            let v = match a {
                Atom::Sym(s) => {
                    let n = *b.get(s).ok_or_else(|| {
                        Error::shape("bind", format!("no size given for the symbolic dimension \"{s}\""))
                    })?;
                    i64::try_from(n).map_err(|_| overflow())?
                }
                Atom::Div(x, y) => {
                    let d = eval_poly(y, b)?;
                    if d == 0 {
                        return Err(Error::shape("bind", "division of a dimension by zero"));
                    }
                    eval_poly(x, b)?.checked_div_euclid(d).ok_or_else(overflow)?
                }
                Atom::Max(x, y) => eval_poly(x, b)?.max(eval_poly(y, b)?),
            };
            t = t.checked_mul(v).ok_or_else(overflow)?;
        }
        sum = sum.checked_add(t).ok_or_else(overflow)?;
    }
    Ok(sum)
}

impl From<usize> for Dim {
    fn from(n: usize) -> Dim {
        Dim(n.min(i64::MAX as usize) as i64)
    }
}
impl From<&str> for Dim {
    fn from(n: &str) -> Dim {
        Dim::sym(n)
    }
}

fn show(p: &Poly, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (i, (atoms, c)) in p.iter().rev().enumerate() {
        if i > 0 {
            f.write_str(if *c < 0 { "-" } else { "+" })?;
        } else if *c < 0 {
            f.write_str("-")?;
        }
        let size = c.unsigned_abs();
        if size != 1 || atoms.is_empty() {
            write!(f, "{size}")?;
        }
        for (j, a) in atoms.iter().enumerate() {
            if j > 0 || size != 1 {
                f.write_str("*")?;
            }
            match a {
                Atom::Sym(s) => f.write_str(&one_line(s))?,
                Atom::Div(x, y) | Atom::Max(x, y) => {
                    f.write_str(if matches!(a, Atom::Div(..)) { "floor((" } else { "max(" })?;
                    show(x, f)?;
                    f.write_str(if matches!(a, Atom::Div(..)) { ")/(" } else { "," })?;
                    show(y, f)?;
                    f.write_str(if matches!(a, Atom::Div(..)) { "))" } else { ")" })?;
                }
            }
        }
    }
    Ok(())
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known() {
            Some(n) => write!(f, "{n}"),
            None if self.is_lost() => f.write_str("(too large)"),
            None => show(&self.poly(), f),
        }
    }
}
impl fmt::Debug for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum DimRepr {
    Known(i64),
    Poly(Vec<(Vec<AtomRepr>, i64)>),
}
#[derive(Serialize, Deserialize)]
enum AtomRepr {
    Sym(String),
    Div(Vec<(Vec<AtomRepr>, i64)>, Vec<(Vec<AtomRepr>, i64)>),
    Max(Vec<(Vec<AtomRepr>, i64)>, Vec<(Vec<AtomRepr>, i64)>),
}
fn to_repr(p: &Poly) -> Vec<(Vec<AtomRepr>, i64)> {
    let atom = |a: &Atom| match a {
        Atom::Sym(s) => AtomRepr::Sym(s.to_string()),
        Atom::Div(x, y) => AtomRepr::Div(to_repr(x), to_repr(y)),
        Atom::Max(x, y) => AtomRepr::Max(to_repr(x), to_repr(y)),
    };
    p.iter().map(|(a, c)| (a.iter().map(atom).collect(), *c)).collect()
}
fn of_repr(p: Vec<(Vec<AtomRepr>, i64)>) -> Option<Poly> {
    let atom = |a: AtomRepr| {
        Some(match a {
            AtomRepr::Sym(s) => Atom::Sym(s.into()),
            AtomRepr::Div(x, y) => Atom::Div(of_repr(x)?, of_repr(y)?),
            AtomRepr::Max(x, y) => Atom::Max(of_repr(x)?, of_repr(y)?),
        })
    };
    // Normalise: a file may hold terms in any form.
    let mut m: BTreeMap<Vec<Atom>, i64> = BTreeMap::new();
    for (a, c) in p {
        let mut a: Vec<Atom> = a.into_iter().map(atom).collect::<Option<_>>()?;
        a.sort();
        let sum = m.entry(a).or_default();
        *sum = sum.checked_add(c)?;
    }
    let p: Poly = m.into_iter().filter(|(_, c)| *c != 0).collect();
    (weight(&p) <= MAX_ATOMS).then_some(p)
}
impl Serialize for Dim {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        match self.known() {
            Some(n) => DimRepr::Known(n as i64),
            // Written as a value that deserialises to an error, because it has no valid form.
            None if self.is_lost() => DimRepr::Known(i64::MIN),
            None => DimRepr::Poly(to_repr(&self.poly())),
        }
        .serialize(s)
    }
}
impl<'de> Deserialize<'de> for Dim {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Dim, D::Error> {
        match DimRepr::deserialize(d)? {
            DimRepr::Known(n) if n >= 0 => Ok(Dim(n)),
            DimRepr::Known(n) => Err(serde::de::Error::custom(format!("negative dimension {n}"))),
            DimRepr::Poly(p) => of_repr(p)
                .map(Dim::intern)
                .ok_or_else(|| serde::de::Error::custom("the expression of a dimension is too long")),
        }
    }
}

/// Dimensions of a tensor, outermost first. Rank 0 is a scalar.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
pub struct Shape(pub SmallVec<[Dim; 6]>);

impl Shape {
    pub fn scalar() -> Shape {
        Shape::default()
    }

    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// The sizes, if the shape contains no symbol.
    pub fn known(&self) -> Option<Dims> {
        self.0.iter().map(|d| d.known()).collect()
    }

    /// The sizes, or an error that shows the symbolic dimensions.
    pub fn dims(&self) -> Result<Dims> {
        self.known()
            .ok_or_else(|| Error::shape("shape", format!("{self} has symbolic dimensions; bind them first")))
    }

    /// Number of elements.
    pub fn numel(&self) -> Dim {
        self.0.iter().fold(Dim::from(1), |a, d| a.mul(*d))
    }

    pub fn bind(&self, b: &Bindings) -> Result<Shape> {
        self.0.iter().map(|d| d.bind(b)).collect::<Result<_>>().map(Shape)
    }

    /// NumPy broadcasting of two shapes. A symbolic dimension is compatible only with itself and with 1.
    pub fn broadcast(&self, o: &Shape) -> Result<Shape> {
        let n = self.rank().max(o.rank());
        let get = |s: &Shape, i: usize| (i + s.rank()).checked_sub(n).map_or(Dim::from(1), |j| s.0[j]);
        (0..n)
            .map(|i| match (get(self, i), get(o, i)) {
                (a, b) if a == b || b.is(1) => Ok(a),
                (a, b) if a.is(1) => Ok(b),
                (a, b) => Err(Error::shape(
                    "broadcast",
                    format!("{self} and {o} cannot be broadcast: {a} and {b} differ"),
                )),
            })
            .collect::<Result<_>>()
            .map(Shape)
    }

    /// Turns a possibly negative axis into an index.
    pub fn axis(&self, axis: i64) -> Result<usize> {
        let n = self.rank() as i64;
        let a = if axis < 0 { axis + n } else { axis };
        if a < 0 || a >= n {
            return Err(Error::shape("axis", format!("axis {axis} is outside -{n}..{n} of shape {self}")));
        }
        Ok(a as usize)
    }
}

impl std::ops::Deref for Shape {
    type Target = [Dim];
    fn deref(&self) -> &[Dim] {
        &self.0
    }
}
impl<D: Into<Dim> + Copy> From<&[D]> for Shape {
    fn from(d: &[D]) -> Shape {
        Shape(d.iter().map(|d| (*d).into()).collect())
    }
}
impl<D: Into<Dim>, const N: usize> From<[D; N]> for Shape {
    fn from(d: [D; N]) -> Shape {
        Shape(d.into_iter().map(|d| d.into()).collect())
    }
}
impl<D: Into<Dim>> From<Vec<D>> for Shape {
    fn from(d: Vec<D>) -> Shape {
        Shape(d.into_iter().map(|d| d.into()).collect())
    }
}
impl From<&Dims> for Shape {
    fn from(d: &Dims) -> Shape {
        Shape(d.iter().map(|d| Dim::from(*d)).collect())
    }
}
impl FromIterator<Dim> for Shape {
    fn from_iter<T: IntoIterator<Item = Dim>>(t: T) -> Shape {
        Shape(t.into_iter().collect())
    }
}
impl From<&Shape> for Shape {
    fn from(s: &Shape) -> Shape {
        s.clone()
    }
}
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.0.iter().enumerate() {
            write!(f, "{}{d}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str("]")
    }
}
impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The type of a tensor: dtype and shape.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct TensorType {
    pub dtype: crate::DType,
    pub shape: Shape,
}

impl TensorType {
    pub fn new(dtype: crate::DType, shape: impl Into<Shape>) -> TensorType {
        TensorType { dtype, shape: shape.into() }
    }

    /// Rejects types that no device can hold: more than [`MAX_AXES`] axes, a size that is negative or does
    /// not fit 64 bits, or more than [`MAX_BYTES`] bytes. In the number of bytes, a symbolic dimension counts
    /// as 1. A dimension of 0 also counts as 1, because the strides, which are products of the other
    /// dimensions, must not overflow either.
    ///
    /// # Errors
    /// [`Error::Shape`] that names `op`.
    pub fn check(&self, op: &str) -> Result<()> {
        match self.fault() {
            None => Ok(()),
            Some(why) => Err(Error::shape(op, why)),
        }
    }

    /// The error text of [`TensorType::check`].
    pub(crate) fn fault(&self) -> Option<String> {
        if self.shape.rank() > MAX_AXES {
            return Some(format!("it has {} axes; at most {MAX_AXES} are supported", self.shape.rank()));
        }
        let mut bits = u64::from(self.dtype.bits());
        for d in self.shape.iter() {
            match d.known() {
                Some(n) => bits = bits.saturating_mul(n.max(1) as u64),
                None => {
                    if let Some(why) = d.fault() {
                        return Some(format!("{self}: {why}"));
                    }
                }
            }
        }
        (bits.div_ceil(8) > MAX_BYTES).then(|| format!("{self} is too large to address"))
    }
}
impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbolic_arithmetic_has_a_normal_form() {
        let (b, s) = (Dim::sym("b"), Dim::sym("s"));
        assert_eq!(b.mul(s), s.mul(b));
        assert_eq!(b.mul(s).mul(Dim::from(12)).div(Dim::from(12)).unwrap(), b.mul(s));
        assert_eq!(b.add(s).sub(s), b);
        assert_eq!(b.mul(Dim::from(384)).div(b).unwrap(), Dim::from(384));
        let odd = b.offset(1).div(Dim::from(2)).unwrap();
        assert_eq!(odd.bind(&[("b".into(), 6)].into()).unwrap(), Dim::from(3));
        assert!(b.bind(&Bindings::new()).is_err());
        assert!(b.offset(-7).bind(&[("b".into(), 6)].into()).is_err());
    }

    #[test]
    fn overflow_of_dimensions_is_sticky() {
        let big = Dim::from(usize::MAX);
        let b = Dim::sym("b");
        let sym = b.mul(big);
        assert_eq!(big.known(), Some(i64::MAX as usize));
        for lost in [
            big.mul(2.into()),
            big.add(big),
            big.offset(1),
            sym.mul(sym),
            sym.add(sym),
            sym.mul(2.into()),
            Dim::from(0).sub(sym).sub(sym).sub(b).sub(b),
        ] {
            assert!(lost.is_lost(), "{lost}");
            assert_eq!(lost.known(), None);
            assert!(lost.mul(b).is_lost() && lost.add(b).is_lost() && b.sub(lost).is_lost());
            assert!(lost.max(b).is_lost() && b.div(lost).unwrap().is_lost() && lost.offset(-1).is_lost());
            assert!(lost.bind(&[("b".into(), 6)].into()).is_err());
            let mut names = Default::default();
            lost.symbols(&mut names);
            assert!(names.is_empty());
            assert!(serde_json::from_str::<Dim>(&serde_json::to_string(&lost).unwrap()).is_err());
        }
        // The lowest i64 has no negation and no quotient by -1.
        let low = Dim::from(0).offset(i64::MIN);
        let minus = Dim::from(0).offset(-1);
        assert!(low.sub(low).is_lost() && !low.div(minus).unwrap().to_string().is_empty());
        assert!(b.mul(low).div(minus).unwrap().bind(&[("b".into(), 1)].into()).is_err());
        assert!(b.bind(&[("b".into(), usize::MAX)].into()).is_err());
    }

    #[test]
    fn expressions_do_not_grow_without_end() {
        // Squares of sums, quotients of quotients, maxima of maxima.
        let (a, b) = (Dim::sym("a"), Dim::sym("b"));
        let mut square = a.add(b);
        let mut deep = a.offset(1);
        let mut wide = a;
        for i in 0..10_000 {
            square = square.mul(square);
            deep = deep.div(3.into()).unwrap().offset(1);
            wide = wide.max(b.offset(i));
        }
        assert!(square.is_lost() && deep.is_lost() && wide.is_lost());
        let mut e = a;
        for _ in 0..50 {
            e = e.offset(1).div(2.into()).unwrap();
        }
        assert_eq!(e.bind(&[("a".into(), 1 << 40)].into()).unwrap(), Dim::from(1));
        let nested = "[[[{\"Sym\":\"a\"}],1],[[{\"Sym\":\"a\"}],9223372036854775807]]";
        assert!(serde_json::from_str::<Dim>(nested).is_err());
        // A file may list terms in any order, repeated or with coefficient 0.
        let odd = "[[[{\"Sym\":\"b\"},{\"Sym\":\"a\"}],1],[[{\"Sym\":\"a\"},{\"Sym\":\"b\"}],1],[[],0]]";
        assert_eq!(serde_json::from_str::<Dim>(odd).unwrap(), a.mul(b).mul(2.into()));
    }

    #[test]
    fn types_too_large_to_address_are_errors() {
        use crate::DType::*;
        let check = |d, s: Shape| TensorType::new(d, s).check("t");
        check(F32, [1usize << 45].into()).unwrap();
        check(F32, [Dim::sym("b"), 4.into()].into()).unwrap();
        check(U8, vec![1usize; MAX_AXES].into()).unwrap();
        for s in [
            Shape::from([(1usize << 45) + 1]),
            [1usize << 40, 1 << 40].into(),
            [0usize, 1 << 40, 1 << 40].into(),
            [usize::MAX].into(),
            vec![1usize; MAX_AXES + 1].into(),
            [Dim::sym("b"), (1usize << 50).into()].into(),
            [Dim::LOST].into(),
            [Dim::from(3).offset(-7)].into(),
        ] {
            assert!(matches!(check(F32, s.clone()), Err(Error::Shape { .. })), "{s}");
        }
        assert!(Shape::from([1usize << 40, 1 << 40]).numel().is_lost());
    }

    #[test]
    fn dims_survive_serialisation() {
        for d in [
            Dim::from(7),
            Dim::sym("b"),
            Dim::sym("b").mul(Dim::sym("s")).offset(3),
            Dim::sym("b").offset(1).div(Dim::from(2)).unwrap(),
        ] {
            let j = serde_json::to_string(&d).unwrap();
            assert_eq!(serde_json::from_str::<Dim>(&j).unwrap(), d, "{j}");
        }
    }

    #[test]
    fn broadcasting() {
        let s = |v: &[usize]| Shape::from(v);
        assert_eq!(s(&[3, 1]).broadcast(&s(&[4])).unwrap(), s(&[3, 4]));
        assert_eq!(s(&[0, 2]).broadcast(&s(&[1, 2])).unwrap(), s(&[0, 2]));
        assert!(s(&[3]).broadcast(&s(&[4])).is_err());
        let b = Shape::from([Dim::sym("b"), 4.into()]);
        assert_eq!(b.broadcast(&s(&[1, 4])).unwrap(), b);
    }
}
