//! Small changes to ONNX models, after which most models are still valid: edge-case numbers, other types,
//! other names, missing parts.
#![allow(unreachable_pub, reason = "public for the test files that include this one")]

use bytes::Bytes;
use halcyon_formats::onnx::ops;
use halcyon_formats::onnx::proto::*;

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A number below `n`, which must not be 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    pub fn pick<T: Copy>(&mut self, v: &[T]) -> T {
        v[self.below(v.len())]
    }
    /// True with probability 1 / `n`.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// Numbers that provoke errors in size arithmetic.
pub const NUMBERS: &[i64] = &[
    0,
    1,
    -1,
    2,
    -2,
    3,
    4,
    7,
    8,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    4095,
    4096,
    4097,
    65_535,
    65_536,
    1 << 20,
    (1 << 24) + 1,
    i32::MAX as i64 - 1,
    i32::MAX as i64,
    1 << 31,
    u32::MAX as i64,
    1 << 32,
    1 << 40,
    1 << 45,
    1 << 46,
    1 << 47,
    1 << 61,
    1 << 62,
    i64::MAX - 1,
    i64::MAX,
    i64::MIN,
    i64::MIN + 1,
    -(1 << 31),
    -4,
    -(1 << 40),
    -(1 << 62),
];

const FLOATS: &[f32] = &[
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-30,
    1e30,
    -1e30,
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    3.0,
    1e9,
    -2.5,
];

const TEXTS: &[&str] = &[
    "",
    "SAME_UPPER",
    "SAME_LOWER",
    "VALID",
    "NOTSET",
    "reflect",
    "edge",
    "wrap",
    "constant",
    "linear",
    "nearest",
    "cubic",
    "asymmetric",
    "pytorch_half_pixel",
    "tf_crop_and_resize",
    "align_corners",
    "tf_half_pixel_for_nn",
    "floor",
    "none",
    "add",
    "mul",
    "max",
    "min",
    "tanh",
    "bilinear",
    "border",
    "zeros",
    "sum",
    "mean",
    "bidirectional",
    "reverse",
    "forward",
    "Tanh",
    "larger",
    "\u{1b}[2J\n",
    "i,j->ij",
    "ii",
    "...i->...",
    "avg",
    "bicubic",
    "RGB",
    "UPPER",
    "TF",
    "TFIDF",
    "stretch",
];

pub fn number(r: &mut Rng) -> i64 {
    match r.below(4) {
        0 => r.below(6) as i64 - 2,
        1 => r.below(100) as i64,
        _ => r.pick(NUMBERS),
    }
}

/// An ONNX type code, sometimes an invalid one.
pub fn element_type(r: &mut Rng) -> i32 {
    if r.once_in(2) { r.pick(&[1, 7, 6, 9, 10, 11, 2, 3]) } else { r.below(30) as i32 }
}

fn list<T: Copy>(v: &mut Vec<T>, r: &mut Rng, new: impl Fn(&mut Rng) -> T) {
    match r.below(6) {
        0 => v.push(new(r)),
        1 => {
            v.pop();
        }
        2 => v.extend((0..r.below(70)).map(|_| new(r)).collect::<Vec<_>>()),
        3 if !v.is_empty() => {
            let k = r.below(v.len());
            v.remove(k);
        }
        _ if v.is_empty() => v.push(new(r)),
        _ => {
            let k = r.below(v.len());
            v[k] = new(r);
        }
    }
}

pub fn tensor(t: &mut TensorProto, r: &mut Rng) {
    match r.below(9) {
        0 => list(&mut t.dims, r, number),
        1 => t.data_type = element_type(r),
        2 => {
            let mut b = t.raw_data.clone().unwrap_or_default().to_vec();
            b.truncate(r.below(b.len() + 1));
            t.raw_data = Some(b.into());
        }
        3 => t.raw_data = None,
        4 => {
            // Changes sizes and data together.
            t.dims = vec![r.below(4) as i64];
            t.data_type = 7;
            t.raw_data =
                Some((0..t.dims[0]).flat_map(|_| number(r).to_le_bytes()).collect::<Vec<u8>>().into());
        }
        _ => {
            let width = match t.data_type {
                7 | 11 | 13 => 8,
                1 | 6 | 12 => 4,
                10 | 16 | 4 | 5 => 2,
                _ => 1,
            };
            let mut b = t.raw_data.clone().unwrap_or_default().to_vec();
            if b.len() >= width {
                let at = r.below(b.len() / width) * width;
                let v = if t.data_type == 1 {
                    u64::from(r.pick(FLOATS).to_bits()).to_le_bytes()
                } else {
                    number(r).to_le_bytes()
                };
                b[at..at + width].copy_from_slice(&v[..width]);
                t.raw_data = Some(b.into());
            }
            if !t.int64_data.is_empty() {
                list(&mut t.int64_data, r, number);
            }
            if !t.int32_data.is_empty() {
                list(&mut t.int32_data, r, |r| number(r) as i32);
            }
            if !t.float_data.is_empty() {
                list(&mut t.float_data, r, |r| r.pick(FLOATS));
            }
        }
    }
}

pub fn attribute(a: &mut AttributeProto, r: &mut Rng) {
    match r.below(12) {
        0 => a.r#type = r.below(13) as i32,
        1 => a.name = r.pick(TEXTS).to_string(),
        _ => match a.r#type {
            attribute::FLOAT => a.f = r.pick(FLOATS),
            attribute::INT => a.i = number(r),
            attribute::STRING => a.s = Bytes::from_static(r.pick(TEXTS).as_bytes()),
            attribute::TENSOR => {
                if let Some(t) = &mut a.t {
                    tensor(t, r)
                }
            }
            attribute::GRAPH => {
                if let Some(g) = &mut a.g {
                    graph(g, r)
                }
            }
            attribute::FLOATS => list(&mut a.floats, r, |r| r.pick(FLOATS)),
            attribute::INTS => list(&mut a.ints, r, number),
            attribute::STRINGS => {
                let k = r.below(a.strings.len() + 1);
                let text = Bytes::from_static(r.pick(TEXTS).as_bytes());
                match a.strings.get_mut(k) {
                    Some(s) => *s = text,
                    None => a.strings.push(text),
                }
            }
            _ => a.i = number(r),
        },
    }
}

/// Another attribute of the operator, or one that it does not have.
pub fn new_attribute(op: &str, r: &mut Rng) -> AttributeProto {
    let known = ops::rows().find(|o| o.op == op).map_or(&[][..], |o| o.attrs);
    let name = if known.is_empty() || r.once_in(20) { "axis" } else { known[r.below(known.len())] };
    let mut a = AttributeProto { name: name.into(), ..Default::default() };
    // Mostly the type that the name suggests.
    a.r#type = match name {
        n if n.ends_with('s') && !n.contains("dims") && r.below(4) > 0 => attribute::INTS,
        "mode"
        | "auto_pad"
        | "direction"
        | "equation"
        | "reduction"
        | "approximate"
        | "coordinate_transformation_mode" => attribute::STRING,
        n if n.contains("alpha") || n.contains("beta") || n.contains("epsilon") || n.contains("scale") => {
            attribute::FLOAT
        }
        _ if r.once_in(3) => r.pick(&[1, 3, 4, 6, 7, 8]),
        _ => attribute::INT,
    };
    a.i = number(r);
    a.f = r.pick(FLOATS);
    a.s = Bytes::from_static(r.pick(TEXTS).as_bytes());
    a.ints = (0..r.below(5)).map(|_| number(r)).collect();
    a.floats = (0..r.below(5)).map(|_| r.pick(FLOATS)).collect();
    a.strings = (0..r.below(3)).map(|_| Bytes::from_static(r.pick(TEXTS).as_bytes())).collect();
    a.t = Some(Into::into(small_tensor("", r)));
    a
}

/// A tensor of a few elements, mostly integers.
pub fn small_tensor(name: &str, r: &mut Rng) -> TensorProto {
    let rank = r.below(3);
    let dims: Vec<i64> = (0..rank).map(|_| r.below(4) as i64).collect();
    let n: i64 = dims.iter().product();
    let data_type = r.pick(&[7, 7, 7, 1, 1, 6, 9]);
    let mut b: Vec<u8> = vec![];
    for _ in 0..n {
        match data_type {
            7 => b.extend(number(r).to_le_bytes()),
            6 => b.extend((number(r) as i32).to_le_bytes()),
            1 => b.extend(r.pick(FLOATS).to_le_bytes()),
            _ => b.push(r.below(2) as u8),
        }
    }
    TensorProto { dims, data_type, name: name.into(), raw_data: Some(b.into()), ..Default::default() }
}

fn value_info(v: &mut ValueInfoProto, r: &mut Rng) {
    let Some(TypeProto { value: Some(TypeValue::Tensor(t)) }) = &mut v.r#type else {
        if r.once_in(2) {
            v.r#type = None;
        }
        return;
    };
    match r.below(6) {
        0 => t.elem_type = element_type(r),
        1 if r.once_in(4) => t.shape = None,
        _ => {
            let s = t.shape.get_or_insert_with(Default::default);
            let dim = |r: &mut Rng| Dimension {
                value: match r.below(8) {
                    0 => None,
                    1 => Some(DimValue::Param("n".into())),
                    2..5 => Some(DimValue::Value(r.below(5) as i64)),
                    _ => Some(DimValue::Value(number(r))),
                },
            };
            match r.below(4) {
                0 => s.dim.push(dim(r)),
                1 => {
                    s.dim.pop();
                }
                _ if s.dim.is_empty() => {}
                _ => {
                    let k = r.below(s.dim.len());
                    s.dim[k] = dim(r);
                }
            }
        }
    }
}

fn node(n: &mut NodeProto, names: &[String], r: &mut Rng) {
    match r.below(12) {
        0 if !n.input.is_empty() => {
            let k = r.below(n.input.len());
            n.input[k] = if r.once_in(4) || names.is_empty() {
                String::new()
            } else {
                names[r.below(names.len())].clone()
            };
        }
        1 => {
            n.input.pop();
        }
        2 if !names.is_empty() => n.input.push(names[r.below(names.len())].clone()),
        3 => {
            let all: Vec<&str> = ops::rows().map(|o| o.op).collect();
            n.op_type = all[r.below(all.len())].into();
        }
        4 => n.output.push(format!("extra{}", r.below(100))),
        5 => {
            n.output.pop();
        }
        6 => n.attribute.push(new_attribute(&n.op_type, r)),
        7 if !n.attribute.is_empty() => {
            let k = r.below(n.attribute.len());
            n.attribute.remove(k);
        }
        8 if r.once_in(4) => n.domain = r.pick(&["", "ai.onnx", "ai.onnx.ml", "com.microsoft", "x"]).into(),
        _ if !n.attribute.is_empty() => {
            let k = r.below(n.attribute.len());
            attribute(&mut n.attribute[k], r);
        }
        _ => n.attribute.push(new_attribute(&n.op_type, r)),
    }
}

pub fn graph(g: &mut GraphProto, r: &mut Rng) {
    let mut names: Vec<String> = g.input.iter().map(|v| v.name.clone()).collect();
    names.extend(g.initializer.iter().map(|t| t.name.clone()));
    names.extend(g.node.iter().flat_map(|n| n.output.clone()));
    match r.below(16) {
        0..3 if !g.input.is_empty() => {
            let k = r.below(g.input.len());
            value_info(&mut g.input[k], r);
        }
        3..6 if !g.initializer.is_empty() => {
            let k = r.below(g.initializer.len());
            tensor(&mut g.initializer[k], r);
        }
        6 if !g.input.is_empty() => {
            // Turns an input into a weight.
            let k = r.below(g.input.len());
            let t = small_tensor(&g.input[k].name.clone(), r);
            g.initializer.push(t);
        }
        7 if r.once_in(3) && !g.node.is_empty() => {
            let k = r.below(g.node.len());
            let n = g.node[k].clone();
            g.node.push(n);
        }
        8 if r.once_in(3) && !g.node.is_empty() => {
            let k = r.below(g.node.len());
            g.node.remove(k);
        }
        9 if r.once_in(3) && !g.output.is_empty() && !names.is_empty() => {
            let k = r.below(g.output.len());
            g.output[k].name = names[r.below(names.len())].clone();
        }
        _ if !g.node.is_empty() => {
            let k = r.below(g.node.len());
            node(&mut g.node[k], &names, r);
        }
        _ => {}
    }
}

/// Makes one to four changes.
pub fn model(m: &mut ModelProto, r: &mut Rng) {
    for _ in 0..1 + r.below(4) {
        match r.below(20) {
            0 => {
                if let Some(s) = m.opset_import.first_mut() {
                    s.version = r.below(30) as i64;
                }
            }
            1 if !m.functions.is_empty() => {
                let k = r.below(m.functions.len());
                let f = &mut m.functions[k];
                if !f.node.is_empty() {
                    let at = r.below(f.node.len());
                    node(&mut f.node[at], &f.input, r);
                }
            }
            _ => {
                if let Some(g) = &mut m.graph {
                    graph(g, r);
                }
            }
        }
    }
}
