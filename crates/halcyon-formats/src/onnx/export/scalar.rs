//! Exports scalar ops as ONNX operators, according to a table.

use super::emit::{Emitter, Val, int, text};
use halcyon_ir::dtype::Class;
use halcyon_ir::ops::element_wise::Rule;
use halcyon_ir::{DType, Error, Result, Scalar, ScalarOp as S};

use DType::{BF16, Bool, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};

/// Element types that an operator accepts. Each list has the first version of the operator set in which the
/// operator accepts the types of the list.
pub(super) type Types = &'static [(i64, &'static [DType])];

pub(super) const FLOATS: Types = &[(1, &[F16, F32, F64, BF16])];
/// bf16 was added in version 22.
pub(super) const FLOATS_22: Types = &[(1, &[F16, F32, F64]), (22, &[BF16])];
const INTS: Types = &[(1, &[U8, U16, U32, U64, I8, I16, I32, I64])];
const NUMBERS: Types = &[(1, &[U8, U16, U32, U64, I8, I16, I32, I64, F16, F32, F64, BF16])];
const SIGNED: Types = &[(1, &[I8, I16, I32, I64, F16, F32, F64, BF16])];
const POW: Types = &[(1, &[I32, I64, F16, F32, F64, BF16])];
const SHIFT: Types = &[(1, &[U8, U16, U32, U64])];
const BOOL: Types = &[(1, &[Bool])];
const ANY: Types = &[(1, &[U8, U16, U32, U64, I8, I16, I32, I64, F16, F32, F64, BF16, Bool])];

type Build = fn(&mut Emitter<'_>, &[Val]) -> Result<Val>;

enum Mapping {
    /// One operator. Operands of other types are cast to a wider type that it accepts.
    Op(&'static str, Types),
    /// An operator with an attribute.
    With(&'static str, Types, fn() -> super::super::proto::AttributeProto),
    /// A formula of operators. Half types are computed in f32.
    Formula(&'static str, Build),
    /// An operator that exists from this version of the operator set on; older versions use the next row.
    Since(i64, &'static str, Types),
}

use Mapping::{Formula, Op, Since, With};

struct Row(S, &'static str, Mapping);

/// Op, classes of operands (as in [`halcyon_ir::ops::element_wise`]), spelling. The first matching row is
/// used.
const TABLE: &[Row] = &[
    Row(S::Neg, "fi", Op("Neg", SIGNED)),
    Row(
        S::Neg,
        "u",
        Formula("0 - x", |e, x| {
            let zero = e.scalar_like(&x[0], 0i64)?;
            e.calc("Sub", &[&zero, &x[0]])
        }),
    ),
    Row(S::Abs, "fiu", Op("Abs", NUMBERS)),
    Row(S::Sign, "fiu", Op("Sign", NUMBERS)),
    Row(S::Not, "b", Op("Not", BOOL)),
    Row(S::Not, "iu", Op("BitwiseNot", INTS)),
    Row(S::Floor, "f", Op("Floor", FLOATS)),
    Row(S::Ceil, "f", Op("Ceil", FLOATS)),
    Row(S::Round, "f", Op("Round", FLOATS_22)),
    Row(
        S::Trunc,
        "f",
        Formula("Where(x < 0, Ceil(x), Floor(x))", |e, x| {
            let zero = e.scalar_like(&x[0], 0.0)?;
            let (low, up, down) =
                (e.test("Less", &x[0], &zero)?, e.calc("Ceil", &[&x[0]])?, e.calc("Floor", &[&x[0]])?);
            e.calc("Where", &[&low, &up, &down])
        }),
    ),
    Row(S::Sqrt, "f", Op("Sqrt", FLOATS)),
    Row(
        S::Rsqrt,
        "f",
        Formula("Reciprocal(Sqrt(x))", |e, x| {
            let r = e.calc("Sqrt", &[&x[0]])?;
            e.calc("Reciprocal", &[&r])
        }),
    ),
    Row(S::Recip, "f", Op("Reciprocal", FLOATS)),
    Row(S::Exp, "f", Op("Exp", FLOATS)),
    Row(
        S::Exp2,
        "f",
        Formula("Pow(2, x)", |e, x| {
            let two = e.scalar_like(&x[0], 2.0)?;
            e.calc("Pow", &[&two, &x[0]])
        }),
    ),
    // Avoids the cancellation of exp(x) - 1 near 0.
    Row(
        S::Expm1,
        "f",
        Formula("Tanh(x / 2) * (Exp(x) + 1)", |e, x| {
            let (half, one) = (e.scalar_like(&x[0], 0.5)?, e.scalar_like(&x[0], 1.0)?);
            let h = e.calc("Mul", &[&x[0], &half])?;
            let t = e.calc("Tanh", &[&h])?;
            let p = e.calc("Exp", &[&x[0]])?;
            let p = e.calc("Add", &[&p, &one])?;
            e.calc("Mul", &[&t, &p])
        }),
    ),
    Row(S::Log, "f", Op("Log", FLOATS)),
    Row(
        S::Log2,
        "f",
        Formula("Log(x) / ln 2", |e, x| {
            let k = e.scalar_like(&x[0], std::f64::consts::LOG2_E)?;
            let l = e.calc("Log", &[&x[0]])?;
            e.calc("Mul", &[&l, &k])
        }),
    ),
    // log((1 + z) / (1 - z)) = 2 atanh(z) with z = x / (2 + x), which loses no precision near 0.
    Row(
        S::Log1p,
        "f",
        Formula("Where(|x| < 0.5, 2 * Atanh(x / (2 + x)), Log(1 + x))", |e, x| {
            let (half, one, two) =
                (e.scalar_like(&x[0], 0.5)?, e.scalar_like(&x[0], 1.0)?, e.scalar_like(&x[0], 2.0)?);
            let a = e.calc("Abs", &[&x[0]])?;
            let near = e.test("Less", &a, &half)?;
            // Far from 0 the quotient leaves the domain of Atanh, so x is replaced by 0 there. The last Where
            // does not select these results.
            let zero = e.scalar_like(&x[0], 0.0)?;
            let small = e.calc("Where", &[&near, &x[0], &zero])?;
            let d = e.calc("Add", &[&small, &two])?;
            let z = e.calc("Div", &[&small, &d])?;
            let z = e.calc("Atanh", &[&z])?;
            let z = e.calc("Mul", &[&z, &two])?;
            let p = e.calc("Add", &[&x[0], &one])?;
            let l = e.calc("Log", &[&p])?;
            e.calc("Where", &[&near, &z, &l])
        }),
    ),
    Row(S::Sin, "f", Op("Sin", FLOATS_22)),
    Row(S::Cos, "f", Op("Cos", FLOATS_22)),
    Row(S::Tan, "f", Op("Tan", FLOATS_22)),
    Row(S::Asin, "f", Op("Asin", FLOATS_22)),
    Row(S::Acos, "f", Op("Acos", FLOATS_22)),
    Row(S::Atan, "f", Op("Atan", FLOATS_22)),
    Row(S::Sinh, "f", Op("Sinh", FLOATS_22)),
    Row(S::Cosh, "f", Op("Cosh", FLOATS_22)),
    Row(S::Tanh, "f", Op("Tanh", FLOATS)),
    Row(S::Asinh, "f", Op("Asinh", FLOATS_22)),
    Row(S::Acosh, "f", Op("Acosh", FLOATS_22)),
    Row(S::Atanh, "f", Op("Atanh", FLOATS_22)),
    Row(S::Erf, "f", Op("Erf", FLOATS)),
    Row(S::Sigmoid, "f", Op("Sigmoid", FLOATS)),
    Row(S::Silu, "f", Since(24, "Swish", FLOATS)),
    Row(
        S::Silu,
        "f",
        Formula("x * Sigmoid(x)", |e, x| {
            let s = e.calc("Sigmoid", &[&x[0]])?;
            e.calc("Mul", &[&x[0], &s])
        }),
    ),
    Row(S::Gelu, "f", Op("Gelu", FLOATS)),
    Row(S::GeluTanh, "f", With("Gelu", FLOATS, || text("approximate", "tanh"))),
    Row(S::Relu, "fi", Op("Relu", SIGNED)),
    Row(S::IsNan, "f", Op("IsNaN", FLOATS)),
    Row(S::IsInf, "f", Op("IsInf", FLOATS)),
    Row(S::Add, "fiu", Op("Add", NUMBERS)),
    Row(S::Sub, "fiu", Op("Sub", NUMBERS)),
    Row(S::Mul, "fiu", Op("Mul", NUMBERS)),
    Row(S::Div, "fiu", Op("Div", NUMBERS)),
    Row(S::Rem, "fiu", With("Mod", NUMBERS, || int("fmod", 1))),
    Row(S::Mod, "iu", Op("Mod", INTS)),
    // The result of the operator Mod has the divisor's sign only for integers.
    Row(
        S::Mod,
        "f",
        Formula("r = Mod(x, y, fmod = 1); Where(r != 0 and (r < 0) != (y < 0), r + y, r)", |e, x| {
            let zero = e.scalar_like(&x[0], 0.0)?;
            let r = e.calc("Mod", &[&x[0], &x[1]])?;
            e.set_last(int("fmod", 1));
            let (a, b) = (e.test("Less", &r, &zero)?, e.test("Less", &x[1], &zero)?);
            let differ = e.test("Xor", &a, &b)?;
            let none = e.test("Equal", &r, &zero)?;
            let some = e.map("Not", &[&none], Bool)?;
            let both = e.test("And", &differ, &some)?;
            let s = e.calc("Add", &[&r, &x[1]])?;
            e.calc("Where", &[&both, &s, &r])
        }),
    ),
    Row(S::Pow, "fi", Op("Pow", POW)),
    Row(S::Pow, "u", Formula("Pow in a signed type", power)),
    Row(
        S::Atan2,
        "f",
        Formula(
            "a = Atan(|y| / |x|); Where(x < 0, pi - a, a) with the sign of y; -0 counts as negative",
            |e, v| {
                let (y, x) = (&v[0], &v[1]);
                let (zero, one) = (e.scalar_like(x, 0.0)?, e.scalar_like(x, 1.0)?);
                // The sign of a zero is taken from its reciprocal, which is an infinity of the same sign.
                let negative = |e: &mut Emitter<'_>, v: &Val| {
                    let r = e.calc("Reciprocal", &[v])?;
                    let (a, b) = (e.test("Less", v, &zero)?, e.test("Less", &r, &zero)?);
                    e.test("Or", &a, &b)
                };
                let (left, below) = (negative(e, x)?, negative(e, y)?);
                let (ax, ay) = (e.calc("Abs", &[x])?, e.calc("Abs", &[y])?);
                // The quotient of equal values, computed separately because 0 / 0 and inf / inf are NaN.
                let equal = e.test("Equal", &ax, &ay)?;
                let none = e.test("Equal", &ay, &zero)?;
                let same = e.calc("Where", &[&none, &zero, &one])?;
                let q = e.calc("Div", &[&ay, &ax])?;
                let q = e.calc("Where", &[&equal, &same, &q])?;
                let a = e.calc("Atan", &[&q])?;
                let pi = e.scalar_like(x, std::f64::consts::PI)?;
                let other = e.calc("Sub", &[&pi, &a])?;
                let a = e.calc("Where", &[&left, &other, &a])?;
                let minus = e.calc("Neg", &[&a])?;
                e.calc("Where", &[&below, &minus, &a])
            },
        ),
    ),
    Row(S::Min, "fiu", Op("Min", NUMBERS)),
    Row(S::Min, "b", Op("And", BOOL)),
    Row(S::Max, "fiu", Op("Max", NUMBERS)),
    Row(S::Max, "b", Op("Or", BOOL)),
    Row(S::And, "b", Op("And", BOOL)),
    Row(S::And, "iu", Op("BitwiseAnd", INTS)),
    Row(S::Or, "b", Op("Or", BOOL)),
    Row(S::Or, "iu", Op("BitwiseOr", INTS)),
    Row(S::Xor, "b", Op("Xor", BOOL)),
    Row(S::Xor, "iu", Op("BitwiseXor", INTS)),
    Row(S::Shl, "u", With("BitShift", SHIFT, || text("direction", "LEFT"))),
    Row(S::Shr, "u", With("BitShift", SHIFT, || text("direction", "RIGHT"))),
    Row(S::Eq, "fiub", Op("Equal", ANY)),
    Row(
        S::Ne,
        "fiub",
        Formula("Not(x = y)", |e, x| {
            let t = e.test("Equal", &x[0], &x[1])?;
            e.map("Not", &[&t], Bool)
        }),
    ),
    Row(S::Lt, "fiu", Op("Less", NUMBERS)),
    Row(S::Lt, "b", Formula("Not(x) and y", |e, x| implied(e, &x[0], &x[1], "And"))),
    Row(S::Le, "fiu", Op("LessOrEqual", NUMBERS)),
    Row(S::Le, "b", Formula("Not(x) or y", |e, x| implied(e, &x[0], &x[1], "Or"))),
    Row(S::Gt, "fiu", Op("Greater", NUMBERS)),
    Row(S::Gt, "b", Formula("x and Not(y)", |e, x| implied(e, &x[1], &x[0], "And"))),
    Row(S::Ge, "fiu", Op("GreaterOrEqual", NUMBERS)),
    Row(S::Ge, "b", Formula("x or Not(y)", |e, x| implied(e, &x[1], &x[0], "Or"))),
    Row(
        S::Fma,
        "f",
        Formula("x * y + z", |e, x| {
            let p = e.calc("Mul", &[&x[0], &x[1]])?;
            e.calc("Add", &[&p, &x[2]])
        }),
    ),
    Row(S::Select, "fiub", Op("Where", ANY)),
    Row(S::Threefry, "u", Formula("its twenty rounds of Add, BitShift and BitwiseXor", threefry)),
];

/// `op(not a, b)`.
fn implied(e: &mut Emitter<'_>, a: &Val, b: &Val, op: &str) -> Result<Val> {
    let n = e.map("Not", &[a], Bool)?;
    e.test(op, &n, b)
}

/// Computes powers of unsigned integers in a signed type that is at least as wide, because the low bits of a
/// power are the same in both types. Only an exponent of 2^63 or more would be negative in i64. For such an
/// exponent, the result is 0 if the base is even. If the base is odd, the exponent's top bit is left out,
/// because the 2^62th power of every odd number is 1 modulo 2^64.
fn power(e: &mut Emitter<'_>, x: &[Val]) -> Result<Val> {
    let (base, exponent) = (&x[0], &x[1]);
    let d = base.dtype();
    let to = if d == U64 || d == U32 { I64 } else { I32 };
    if d != U64 {
        let (b, p) = (e.cast(base, to), e.cast(exponent, to));
        let y = e.calc("Pow", &[&b, &p])?;
        return Ok(e.cast(&y, d));
    }
    let (low, one, zero) = (
        e.scalar_like(base, Scalar::U(i64::MAX as u64))?,
        e.scalar_like(base, Scalar::U(1))?,
        e.scalar_like(base, Scalar::U(0))?,
    );
    let rest = e.calc("BitwiseAnd", &[exponent, &low])?;
    let (b, p) = (e.cast(base, to), e.cast(&rest, to));
    let y = e.calc("Pow", &[&b, &p])?;
    let y = e.cast(&y, d);
    let odd = e.calc("BitwiseAnd", &[base, &one])?;
    let even = e.test("Equal", &odd, &zero)?;
    let high = e.test("Greater", exponent, &low)?;
    let gone = e.test("And", &even, &high)?;
    e.calc("Where", &[&gone, &zero, &y])
}

/// See [`halcyon_ir::ops::element_wise::threefry`].
fn threefry(e: &mut Emitter<'_>, x: &[Val]) -> Result<Val> {
    const R: [u32; 8] = [13, 15, 26, 6, 17, 29, 16, 24];
    let parity = e.scalar_like(&x[0], 0x1BD1_1BDAi64)?;
    let k = e.calc("BitwiseXor", &[&x[0], &x[1]])?;
    let ks = [x[0].clone(), x[1].clone(), e.calc("BitwiseXor", &[&k, &parity])?];
    let mut x0 = e.calc("Add", &[&x[2], &x[0]])?;
    let mut x1 = x[1].clone();
    for r in 0..20 {
        x0 = e.calc("Add", &[&x0, &x1])?;
        let (left, right) = (e.scalar_like(&x1, R[r % 8] as i64)?, e.scalar_like(&x1, 32 - R[r % 8] as i64)?);
        let a = e.calc("BitShift", &[&x1, &left])?;
        e.set_last(text("direction", "LEFT"));
        let b = e.calc("BitShift", &[&x1, &right])?;
        e.set_last(text("direction", "RIGHT"));
        let turned = e.calc("BitwiseOr", &[&a, &b])?;
        x1 = e.calc("BitwiseXor", &[&turned, &x0])?;
        if r % 4 == 3 {
            let j = r / 4 + 1;
            x0 = e.calc("Add", &[&x0, &ks[j % 3]])?;
            let n = e.scalar_like(&x1, j as i64)?;
            let s = e.calc("Add", &[&ks[(j + 1) % 3], &n])?;
            x1 = e.calc("Add", &[&x1, &s])?;
        }
    }
    // By now every operand has been added to `x0`, so `x0` has the shape to which the operands broadcast.
    Ok(x0)
}

fn letter(d: DType) -> char {
    match d.class() {
        Class::Float => 'f',
        Class::Int => 'i',
        Class::Uint => 'u',
        Class::Bool => 'b',
    }
}

fn takes(t: Types, opset: i64, d: DType) -> bool {
    t.iter().any(|(since, v)| *since <= opset && v.contains(&d))
}

/// The next type to try for arithmetic on `d`. Computing in this type and casting back gives the same result.
pub(super) fn wider(d: DType) -> Option<DType> {
    Some(match d {
        F16 | BF16 => F32,
        F32 => F64,
        Bool => U8,
        U8 | U16 | I8 | I16 => I32,
        I32 | U32 | U64 => I64,
        F64 | I64 => return None,
        d if d.is_float() => F32,
        d if d.class() == Class::Uint => U8,
        _ => I8,
    })
}

/// The type to which operands of type `d` are cast for an operator that accepts `types`: `d` itself if the
/// operator accepts it. `None` if there is no such type.
fn via(types: Types, opset: i64, d: DType) -> Option<DType> {
    let mut v = d;
    while !takes(types, opset, v) {
        v = wider(v)?;
    }
    Some(v)
}

/// Builds an operator that accepts only `types`: casts operands of other types and, if `back`, casts the
/// result back.
pub(super) fn within(
    e: &mut Emitter<'_>,
    op: &str,
    types: Types,
    x: &[Val],
    back: bool,
    build: impl FnOnce(&mut Emitter<'_>, &[Val]) -> Result<Val>,
) -> Result<Val> {
    let d = x.last().map_or(Bool, |v| v.dtype());
    let to = via(types, e.opset, d).ok_or_else(|| {
        Error::unsupported(
            format!("{op} on {d} in operator set {}", e.opset),
            "Cast to another element type before it",
        )
    })?;
    if to == d {
        return build(e, x);
    }
    // A condition operand keeps its type.
    let y: Vec<Val> = x.iter().map(|v| if v.dtype() == d { e.cast(v, to) } else { v.clone() }).collect();
    let y = build(e, &y)?;
    Ok(if back && y.dtype() == to { e.cast(&y, d) } else { y })
}

/// A scalar op on operands that broadcast.
pub(super) fn scalar(e: &mut Emitter<'_>, op: S, x: &[Val]) -> Result<Val> {
    let select = op.row().rule == Rule::Select;
    let on = x.get(usize::from(select)).map_or(Bool, |v| v.dtype());
    let fits =
        |r: &&Row| r.0 == op && r.1.contains(letter(on)) && !matches!(r.2, Since(v, ..) if v > e.opset);
    let row = TABLE.iter().find(fits).ok_or_else(|| {
        Error::unsupported(format!("the scalar op {} on {on} in ONNX", op.name()), "Write it as other ops")
    })?;
    let out = op.result(on);
    // A result with the operands' type is cast back; a bool result is not.
    let name = |e: &mut Emitter<'_>, op: &str, v: &[Val]| {
        let d = if out == on { v.last().map_or(out, |v| v.dtype()) } else { out };
        e.map(op, &v.iter().collect::<Vec<_>>(), d)
    };
    match &row.2 {
        Op(o, types) | Since(_, o, types) => within(e, o, types, x, out == on, |e, v| name(e, o, v)),
        With(o, types, attr) => within(e, o, types, x, out == on, |e, v| {
            let y = name(e, o, v)?;
            e.set_last(attr());
            Ok(y)
        }),
        Formula(_, f) => {
            let half: Types = if on.compute() == F32 { &[(1, &[F32])] } else { ANY };
            within(e, op.name(), half, x, out == on, f)
        }
    }
}

/// How each scalar op is exported: name, classes of operands, ONNX operators.
pub fn spellings() -> impl Iterator<Item = (S, &'static str, String)> {
    TABLE.iter().map(|Row(op, on, how)| {
        let text = match how {
            Op(o, _) => (*o).to_string(),
            With(o, _, a) => {
                let a = a();
                let v =
                    if a.s.is_empty() { a.i.to_string() } else { String::from_utf8_lossy(&a.s).into_owned() };
                format!("{o}({} = {v})", a.name)
            }
            Since(v, o, _) => format!("{o} (from operator set {v} on)"),
            Formula(text, _) => (*text).to_string(),
        };
        (*op, *on, text)
    })
}

/// The lowest value of a dtype as a literal.
pub(super) fn lowest(d: DType) -> Scalar {
    Scalar::F(d.range().0).cast(d)
}
