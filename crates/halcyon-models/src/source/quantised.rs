//! Folders with quantised weights: `quantization_config` of `config.json`, and the tensors in which each
//! method stores a matrix.
//!
//! The layouts are those of the programs that write them: GPTQModel, AutoAWQ, compressed-tensors, and
//! transformers for FP8 and MXFP4. Whether a matrix is quantised follows from its tensors, and its sizes
//! from their shapes; the configuration says only what the shapes leave open.

use super::folder::{Folder, bad};
use super::packed::{Codes, Form, Grid, Stored, awq_rows, scales, sequence, word};
use halcyon::ir::error::{Error, Result};
use halcyon::{ConstData, DType};
use serde_json::Value;
use std::path::Path;

/// How the folder's weights are quantised.
#[derive(Clone, Debug)]
pub(super) struct Scheme {
    method: Method,
    /// The dtype of the model, which decoded values get.
    dtype: DType,
}

#[derive(Clone, Debug)]
enum Method {
    /// Floats of 8 bits with scales by blocks, rows or tensors.
    Fp8 {
        block: Option<[usize; 2]>,
    },
    /// Which numbers of bits there are, and the shape of blocks of each group.
    Compressed {
        bits: Vec<usize>,
        block: Option<[usize; 2]>,
    },
    Gptq {
        bits: usize,
        group: usize,
        v1: bool,
        symmetric: bool,
    },
    Awq {
        group: usize,
    },
    Mxfp4,
}

/// The names of methods that are read.
const METHODS: &str = "fp8, fbgemm_fp8, compressed-tensors, gptq, awq, mxfp4";

fn unsupported(what: impl Into<String>, read: &str) -> Error {
    Error::unsupported(
        what,
        format!("{read}. Or use the model's weights in bf16, f16 or f32, or a GGUF file"),
    )
}

/// A value of the configuration, unless it is null.
fn key<'a>(c: &'a Value, name: &str) -> Option<&'a Value> {
    c.get(name).filter(|v| !v.is_null())
}

fn text<'a>(c: &'a Value, name: &str) -> Option<&'a str> {
    key(c, name)?.as_str()
}

/// A size; 0 stands for values that mean "all", such as -1.
fn size(c: &Value, name: &str) -> Option<usize> {
    let v = key(c, name)?;
    v.as_u64().map(|n| n as usize).or_else(|| v.as_i64().map(|_| 0))
}

fn pair(v: Option<&Value>) -> Option<[usize; 2]> {
    let v: Vec<usize> = v?.as_array()?.iter().filter_map(|n| n.as_u64()).map(|n| n as usize).collect();
    <[usize; 2]>::try_from(v).ok().filter(|b| b.iter().all(|n| *n > 0))
}

impl Scheme {
    /// The scheme of a configuration; `None` if the weights are not quantised.
    ///
    /// # Errors
    /// `Error::Unsupported` for a method or a variant that is not read; `Error::Format` for a malformed
    /// configuration.
    pub(super) fn of(config: &Value, file: &Path) -> Result<Option<Scheme>> {
        let inner = config.get("text_config").unwrap_or(&Value::Null);
        let find = |name| key(config, name).or_else(|| key(inner, name));
        let Some(q) = find("quantization_config").or_else(|| find("compression_config")) else {
            return Ok(None);
        };
        let dtype = match find("dtype").or_else(|| find("torch_dtype")).and_then(Value::as_str) {
            Some("bfloat16") => DType::BF16,
            Some("float16") => DType::F16,
            _ => DType::F32,
        };
        let flag = |name: &str| q.get(name).and_then(Value::as_bool) == Some(true);
        let name = match text(q, "quant_method") {
            Some(name) => name,
            None if flag("load_in_4bit") || flag("load_in_8bit") => "bitsandbytes",
            None if q.get("config_groups").is_some() => "compressed-tensors",
            None => return Err(bad(file, "quantization_config has no 'quant_method'")),
        };
        let method = match name {
            "fp8" => fp8(q)?,
            "fbgemm_fp8" => Method::Fp8 { block: None },
            "compressed-tensors" => compressed(q)?,
            "gptq" => gptq(q, file)?,
            "awq" => awq(q)?,
            "mxfp4" => Method::Mxfp4,
            other => {
                let what = format!("weights that were quantised with {other} (quant_method)");
                return Err(unsupported(what, &format!("Methods that are read: {METHODS}")));
            }
        };
        Ok(Some(Scheme { method, dtype }))
    }

    /// The tensors by which a quantised matrix is known: the ends of its name, and of their names.
    fn marks(&self) -> &'static [(&'static str, &'static str)] {
        match self.method {
            Method::Fp8 { .. } => &[
                (".weight", ".weight_scale_inv"),
                (".weight", ".weight_scale"),
                ("_proj", "_proj_scale_inv"),
            ],
            Method::Compressed { .. } => &[(".weight", ".weight_packed"), (".weight", ".weight_scale")],
            Method::Gptq { .. } | Method::Awq { .. } => &[(".weight", ".qweight")],
            Method::Mxfp4 => &[("_proj", "_proj_blocks")],
        }
    }

    /// Whether the folder stores this matrix quantised.
    pub(super) fn has(&self, f: &Folder, name: &str) -> bool {
        self.marks().iter().any(|(end, mark)| {
            name.strip_suffix(end).is_some_and(|stem| {
                // A scale beside a tensor of ordinary floats belongs to weights that are not compressed.
                let plain =
                    || f.plain(name).is_ok_and(|t| !matches!(t.dtype, DType::F32 | DType::F16 | DType::BF16));
                f.stores(&format!("{stem}{mark}")) && (!mark.contains("scale") || plain())
            })
        })
    }

    /// The names of all quantised matrices.
    pub(super) fn names(&self, f: &Folder) -> Vec<String> {
        let marks = self.marks();
        let name = |n: &str| {
            let found =
                marks.iter().find_map(|(end, mark)| Some(format!("{}{end}", n.strip_suffix(mark)?)))?;
            self.has(f, &found).then_some(found)
        };
        let mut all: Vec<String> = f.names().filter_map(name).collect();
        all.sort();
        all.dedup();
        all
    }

    /// What the method is called.
    pub(super) fn name(&self) -> &'static str {
        match self.method {
            Method::Fp8 { .. } => "FP8",
            Method::Compressed { .. } => "compressed-tensors",
            Method::Gptq { .. } => "GPTQ",
            Method::Awq { .. } => "AWQ",
            Method::Mxfp4 => "MXFP4",
        }
    }

    /// The smallest form of a matrix in memory.
    pub(super) fn form(&self, stored: &Stored) -> Form {
        stored.form(self.dtype)
    }

    /// Reads the scales and zero points of a quantised matrix.
    ///
    /// # Errors
    /// `Error::Format` for tensors that are missing or do not fit together; `Error::Unsupported` for a
    /// variant that is not read.
    pub(super) fn stored(&self, f: &Folder, name: &str) -> Result<Stored> {
        let stem = name.strip_suffix(".weight").unwrap_or(name);
        let reader = Reader { f, name, stem, size: std::cell::Cell::new(0) };
        let mut stored = match &self.method {
            Method::Fp8 { block } => reader.scaled(*block, &["weight_scale_inv", "weight_scale"])?,
            Method::Compressed { bits, block } if f.stores(&format!("{stem}.weight_packed")) => {
                reader.compressed(bits, *block)?
            }
            Method::Compressed { block, .. } => reader.scaled(*block, &["weight_scale"])?,
            Method::Gptq { bits, group, v1, symmetric } => reader.gptq(*bits, *group, *v1, *symmetric)?,
            Method::Awq { group } => reader.awq(*group)?,
            Method::Mxfp4 => reader.mxfp4()?,
        };
        stored.size = reader.size.get();
        Ok(stored)
    }
}

fn fp8(q: &Value) -> Result<Method> {
    match text(q, "fmt").unwrap_or("e4m3") {
        "e4m3" | "e5m2" => Ok(Method::Fp8 { block: pair(key(q, "weight_block_size")) }),
        other => {
            let what = format!("FP8 weights in the format {other} (fmt)");
            Err(unsupported(what, "Formats that are read: e4m3, e5m2"))
        }
    }
}

fn gptq(q: &Value, file: &Path) -> Result<Method> {
    let format = text(q, "checkpoint_format").or_else(|| text(q, "format")).unwrap_or("gptq");
    let v1 = match format {
        "gptq" => true,
        "gptq_v2" => false,
        other => {
            let what = format!("GPTQ weights in the format {other} (checkpoint_format)");
            return Err(unsupported(what, "Formats that are read: gptq, gptq_v2"));
        }
    };
    if let Some(words) = text(q, "pack_dtype").filter(|p| *p != "int32") {
        return Err(unsupported(
            format!("GPTQ weights in words of {words} (pack_dtype)"),
            "Words of int32 are read",
        ));
    }
    let bits = size(q, "bits").ok_or_else(|| bad(file, "quantization_config has no number 'bits'"))?;
    if !matches!(bits, 2 | 3 | 4 | 8) {
        return Err(unsupported(format!("GPTQ weights of {bits} bits"), "2, 3, 4 and 8 bits are read"));
    }
    let symmetric = q.get("sym").and_then(Value::as_bool) == Some(true);
    Ok(Method::Gptq { bits, group: size(q, "group_size").unwrap_or(0), v1, symmetric })
}

fn awq(q: &Value) -> Result<Method> {
    let version = text(q, "version").or_else(|| text(q, "format")).unwrap_or("gemm");
    let version = if text(q, "backend") == Some("llm-awq") { "llm-awq" } else { version };
    if !version.eq_ignore_ascii_case("gemm") {
        return Err(unsupported(format!("AWQ weights of the version {version}"), "The version gemm is read"));
    }
    match size(q, "bits").or_else(|| size(q, "w_bit")).unwrap_or(4) {
        4 => {
            Ok(Method::Awq { group: size(q, "group_size").or_else(|| size(q, "q_group_size")).unwrap_or(0) })
        }
        n => Err(unsupported(format!("AWQ weights of {n} bits"), "4 bits are read")),
    }
}

/// Formats of compressed-tensors that are read.
const COMPRESSED: &[&str] = &[
    "dense",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
];

fn compressed(q: &Value) -> Result<Method> {
    let (mut bits, mut block) = (vec![], None);
    let read = format!("Formats that are read: {}", COMPRESSED.join(", "));
    let check = |format: Option<&str>| match format {
        Some(f) if !COMPRESSED.contains(&f) => {
            Err(unsupported(format!("weights in the format {f} of compressed-tensors"), &read))
        }
        _ => Ok(()),
    };
    check(text(q, "format"))?;
    check(q.get("sparsity_config").and_then(|s| text(s, "format")))?;
    let empty = |v: &Value| {
        v.as_object().is_none_or(|o| o.get("config_groups").is_none_or(|g| g == &serde_json::json!({})))
    };
    if let Some(t) = key(q, "transform_config")
        && !empty(t)
    {
        return Err(unsupported(
            "activations that are transformed (transform_config of compressed-tensors)",
            &read,
        ));
    }
    for group in q.get("config_groups").and_then(Value::as_object).into_iter().flat_map(|g| g.values()) {
        check(text(group, "format"))?;
        let Some(w) = key(group, "weights") else { continue };
        bits.extend(size(w, "num_bits"));
        block = block.or_else(|| pair(key(w, "block_structure")));
    }
    Ok(Method::Compressed { bits, block })
}

/// Reads one matrix.
struct Reader<'a> {
    f: &'a Folder,
    name: &'a str,
    stem: &'a str,
    /// Bytes that were read.
    size: std::cell::Cell<usize>,
}

impl Reader<'_> {
    fn bad(&self, what: impl std::fmt::Display) -> Error {
        bad(self.f.path(), format!("the quantised '{}': {what}", self.name))
    }

    fn own(&self, part: &str) -> String {
        format!("{}.{part}", self.stem)
    }

    fn get(&self, name: &str) -> Result<ConstData> {
        let t = self.f.plain(name)?;
        self.size.set(self.size.get() + t.bytes().len());
        Ok(t)
    }

    fn maybe(&self, name: &str) -> Result<Option<ConstData>> {
        self.f.stores(name).then(|| self.get(name)).transpose()
    }

    /// A tensor of words, as a matrix.
    fn words(&self, part: &str) -> Result<(ConstData, usize, usize)> {
        let t = self.get(&self.own(part))?;
        match (t.dtype, &t.dims[..]) {
            (DType::I32 | DType::U32, [a, b]) => {
                let (a, b) = (*a, *b);
                Ok((t, a, b))
            }
            (dtype, dims) => Err(self.bad(format!("{part} is {dtype}{dims:?}, expected a matrix of i32"))),
        }
    }

    fn stored(&self, dims: &[usize], codes: Codes, data: ConstData, scale: Grid<f32>) -> Result<Stored> {
        if dims.contains(&0) {
            return Err(self.bad(format!("its shape is {dims:?}")));
        }
        Ok(Stored { dims: dims.to_vec(), codes, data, scale, zero: None, size: 0 })
    }

    /// The group of each of `k` columns: as listed in the tensor `list`, else runs of equal length.
    fn columns(&self, list: &str, k: usize, groups: usize, group: usize) -> Result<Vec<u32>> {
        if groups == 0 {
            return Err(self.bad("it has no scales"));
        }
        if let Some(t) = self.maybe(&self.own(list))? {
            let v = t.to_vec::<i64>();
            // compressed-tensors: -1 stands for runs.
            if v.iter().any(|g| *g != -1) {
                if v.len() != k || v.iter().any(|g| *g < 0 || *g >= groups as i64) {
                    return Err(self
                        .bad(format!("{list} does not give one of {groups} groups to each of {k} columns")));
                }
                return Ok(v.into_iter().map(|g| g as u32).collect());
            }
        }
        runs(k, groups, Some(group).filter(|g| *g > 0))
            .ok_or_else(|| self.bad(format!("{groups} groups of scales for {k} columns")))
    }

    /// Scales, or zero points, of a matrix of `dims`, from the shape in which they are stored.
    fn grid<T>(
        &self,
        values: Vec<T>,
        stored: &[usize],
        dims: &[usize],
        block: Option<[usize; 2]>,
    ) -> Result<Grid<T>> {
        let [front @ .., n, k] = dims else { return Err(self.bad(format!("its shape is {dims:?}"))) };
        let many: usize = front.iter().product();
        let no = || self.bad(format!("scales {stored:?} for a tensor {dims:?}"));
        let (rows, width) = match stored {
            _ if values.len() == 1 => {
                return Ok(Grid { values, width: 1, row: vec![0; many * n], column: vec![0; *k] });
            }
            [rows] => (*rows, 1),
            [.., rows, width] => (*rows, *width),
            [] => return Err(no()),
        };
        if rows * width * many != values.len() || rows == 0 || width == 0 {
            return Err(no());
        }
        let row = runs(*n, rows, block.map(|b| b[0])).ok_or_else(no)?;
        let column = runs(*k, width, block.map(|b| b[1])).ok_or_else(no)?;
        let all = (0..many).flat_map(|m| row.iter().map(move |r| r + (m * rows) as u32)).collect();
        Ok(Grid { values, width, row: all, column })
    }

    /// Codes of a byte each, in the tensor of the matrix's own name.
    fn scaled(&self, block: Option<[usize; 2]>, names: &[&str]) -> Result<Stored> {
        let t = self.get(self.name)?;
        let codes = match t.dtype {
            DType::F8E4M3FN | DType::F8E5M2 => Codes::F8(t.dtype),
            DType::I8 => Codes::I8,
            other => return Err(self.bad(format!("codes of type {other}"))),
        };
        let beside = format!("{}_scale_inv", self.name);
        let name = names.iter().map(|n| self.own(n)).find(|n| self.f.stores(n)).unwrap_or(beside);
        let scale = self.get(&name)?;
        let dims = t.dims.to_vec();
        let grid = self.grid(scales(&scale)?, &scale.dims, &dims, block)?;
        let mut out = self.stored(&dims, codes, t, grid)?;
        if let Some(z) = self.maybe(&self.own("weight_zero_point"))?
            && matches!(out.codes, Codes::I8)
        {
            let v = z.to_vec::<i64>().into_iter().map(|v| v as i16).collect();
            out.zero = Some(self.grid(v, &z.dims, &dims, block)?);
        }
        Ok(out)
    }

    /// `weight_packed` of compressed-tensors.
    fn compressed(&self, bits: &[usize], block: Option<[usize; 2]>) -> Result<Stored> {
        let t = self.get(&self.own("weight_packed"))?;
        let s = self.get(&self.own("weight_scale"))?;
        let [n, last] = t.dims[..] else {
            return Err(unsupported(
                format!("'{}' with packed codes {:?}", self.name, &t.dims[..]),
                "Packed matrices are read",
            ));
        };
        if t.dtype == DType::U8 {
            let dims = [n, 2 * last];
            let mut values = scales(&s)?;
            if let Some(g) = self.maybe(&self.own("weight_global_scale"))? {
                let g = scales(&g)?.first().copied().unwrap_or(1.0);
                values.iter_mut().for_each(|v| *v /= g);
            }
            let grid = self.grid(values, &s.dims, &dims, block)?;
            return self.stored(&dims, Codes::F4, t, grid);
        }
        let (_, _, words) = self.words("weight_packed")?;
        let shape = self.get(&self.own("weight_shape"))?.to_vec::<i64>();
        let k = match shape[..] {
            [rows, k] if rows == n as i64 => usize::try_from(k).unwrap_or(0),
            _ => return Err(self.bad(format!("weight_shape is {shape:?}, but there are {n} rows"))),
        };
        let fits =
            |b: &&usize| (1..=8).contains(*b) && k.checked_mul(**b).is_some_and(|n| n.div_ceil(32) == words);
        let bits = *bits.iter().find(fits).ok_or_else(|| {
            self.bad(format!("{words} words for {k} columns are not codes of {bits:?} bits"))
        })?;
        let dims = [n, k];
        let groups = s.dims.last().copied().unwrap_or(1);
        let mut scale = self.grid(scales(&s)?, &s.dims, &dims, block)?;
        if scale.width == groups {
            scale.column = self.columns("weight_g_idx", k, groups, 0)?;
        }
        let mut out = self.stored(&dims, Codes::Rows { bits, words }, t, scale)?;
        if let Some(z) = self.maybe(&self.own("weight_zero_point"))? {
            let middle = 1 << (bits - 1);
            let values: Vec<i16> = match z.dtype {
                DType::I8 => z.to_vec::<i64>().into_iter().map(|v| v as i16 + middle).collect(),
                DType::I32 if z.dims[..] == [(n * bits).div_ceil(32), groups] => {
                    let code = |r: usize, g: usize| sequence_at(z.bytes(), r, g, groups, bits);
                    (0..n * groups).map(|i| code(i / groups, i % groups) as i16).collect()
                }
                _ => return Err(self.bad(format!("weight_zero_point is {}{:?}", z.dtype, &z.dims[..]))),
            };
            let mut grid = self.grid(values, &[n, groups], &dims, block)?;
            grid.column.clone_from(&out.scale.column);
            out.zero = Some(grid);
        }
        Ok(out)
    }

    fn gptq(&self, bits: usize, group: usize, v1: bool, symmetric: bool) -> Result<Stored> {
        let (t, words, n) = self.words("qweight")?;
        let scale = self.get(&self.own("scales"))?;
        let groups = match scale.dims[..] {
            [g, rows] if rows == n => g,
            _ => return Err(self.bad(format!("scales {:?} for {n} rows", &scale.dims[..]))),
        };
        // Settings of single matrices may differ from the configuration; the list of groups has one entry
        // for each column.
        let list = self.own("g_idx");
        let listed =
            self.f.stores(&list).then(|| self.f.plain(&list)).transpose()?.map(|t| t.dims.iter().product());
        let k = listed.filter(|k| *k > 0).unwrap_or(words * 32 / bits);
        let own = (words * 32).checked_div(k).filter(|b| b * k == words * 32 && matches!(b, 2 | 3 | 4 | 8));
        let bits = own.ok_or_else(|| self.bad(format!("{words} words for {k} columns")))?;
        let group = if k.div_ceil(group.max(1)) == groups { group } else { 0 };
        let column = self.columns("g_idx", k, groups, group)?;
        let row: Vec<u32> = (0..n as u32).collect();
        let turned =
            |v: &[f32]| (0..n * groups).map(|i| v[i % groups * n + i / groups]).collect::<Vec<f32>>();
        let values = turned(&scales(&scale)?);
        let grid = Grid { values, width: groups, row: row.clone(), column: column.clone() };
        let mut out = self.stored(&[n, k], Codes::Columns { bits }, t, grid)?;
        // With three bits, programs have disagreed on where the 1 of version 1 is subtracted; without an
        // offset it does not matter.
        if symmetric && v1 && bits == 3 {
            return Ok(out);
        }
        let (z, zero_groups, width) = self.words("qzeros")?;
        if zero_groups != groups || width * 32 != n * bits {
            return Err(self.bad(format!(
                "qzeros [{zero_groups}, {width}] for {groups} groups of {n} rows of {bits} bits"
            )));
        }
        // Version 1 stores the zero points minus 1. Its writers subtract from whole words, so a carry reaches
        // the next zero point.
        let one = (0..32 / bits).map(|i| 1u32 << (i * bits)).sum::<u32>();
        let offset = if v1 && bits != 3 { one } else { 0 };
        let z: Vec<u8> =
            (0..groups * width).flat_map(|i| word(z.bytes(), i).wrapping_add(offset).to_le_bytes()).collect();
        let line = |g: usize| sequence(&z, g * width, bits, n);
        let add = i16::from(v1 && bits == 3);
        let mut values = vec![0i16; n * groups];
        for g in 0..groups {
            for (r, v) in line(g).into_iter().enumerate() {
                values[r * groups + g] = (v as i16 + add) & ((1 << bits) - 1);
            }
        }
        out.zero = Some(Grid { values, width: groups, row, column });
        Ok(out)
    }

    fn awq(&self, group: usize) -> Result<Stored> {
        let (t, k, words) = self.words("qweight")?;
        let n = words * 8;
        let scale = self.get(&self.own("scales"))?;
        let (z, groups, width) = self.words("qzeros")?;
        if scale.dims[..] != [groups, n] || width != words {
            let what = format!("scales {:?} and qzeros [{groups}, {width}] for {n} rows", &scale.dims[..]);
            return Err(self.bad(what));
        }
        let group = if k.div_ceil(group.max(1)) == groups { group } else { 0 };
        let column = self.columns("g_idx", k, groups, group)?;
        let row: Vec<u32> = (0..n as u32).collect();
        let v = scales(&scale)?;
        let values = (0..n * groups).map(|i| v[i % groups * n + i / groups]).collect();
        let mut zeros = vec![0i16; n * groups];
        for i in 0..groups * words {
            for (r, z) in awq_rows(word(z.bytes(), i)).into_iter().enumerate() {
                zeros[(i % words * 8 + r) * groups + i / words] = z as i16;
            }
        }
        let grid = Grid { values, width: groups, row: row.clone(), column: column.clone() };
        let mut out = self.stored(&[n, k], Codes::Awq, t, grid)?;
        out.zero = Some(Grid { values: zeros, width: groups, row, column });
        Ok(out)
    }

    /// The experts of gpt-oss.
    fn mxfp4(&self) -> Result<Stored> {
        let t = self.get(&format!("{}_blocks", self.name))?;
        let s = self.get(&format!("{}_scales", self.name))?;
        let (e, n, blocks) = match (&t.dims[..], t.dtype, s.dtype) {
            ([e, n, b, 16], DType::U8, DType::U8) if s.dims[..] == [*e, *n, *b] => (*e, *n, *b),
            _ => {
                let what =
                    format!("blocks {}{:?} and scales {}{:?}", t.dtype, &t.dims[..], s.dtype, &s.dims[..]);
                return Err(self.bad(what));
            }
        };
        let dims = [e, n, blocks * 32];
        let grid = self.grid(scales(&s)?, &s.dims, &dims, None)?;
        self.stored(&dims, Codes::F4, t, grid)
    }
}

/// The number at row `r` of column `g` of `[words, width]` words, packed along the rows.
fn sequence_at(bytes: &[u8], r: usize, g: usize, width: usize, bits: usize) -> u32 {
    let (w, shift) = (r * bits / 32, r * bits % 32);
    let mut v = u64::from(word(bytes, w * width + g));
    if shift + bits > 32 {
        v |= u64::from(word(bytes, (w + 1) * width + g)) << 32;
    }
    (v >> shift) as u32 & ((1 << bits) - 1)
}

/// `n` elements in `parts` runs of `length`; the last run may be shorter.
fn runs(n: usize, parts: usize, length: Option<usize>) -> Option<Vec<u32>> {
    let length = match length {
        Some(b) if n.div_ceil(b) == parts => b,
        _ if parts > 0 && n.is_multiple_of(parts) => (n / parts).max(1),
        _ => return None,
    };
    Some((0..n).map(|i| (i / length) as u32).collect())
}
