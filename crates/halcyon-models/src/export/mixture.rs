//! Types of files: which type each tensor gets. The choices are those of llama.cpp's quantiser without an
//! importance matrix, so that files have the same size and quality.
//!
//! A mixture has a base type. Tensors that matter more for the result get a wider one: the output, the values
//! of attention, and the second product of the feed-forward part, some of them only in some layers.

use halcyon::BlockType::{self, *};
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::{GgmlType, Metadata, TensorInfo};

/// A type of file.
#[derive(Clone, Copy, Debug)]
pub struct FileType {
    /// The name in lower case: `q4_k_m`.
    pub name: &'static str,
    /// The value of `general.file_type`.
    pub number: u32,
    /// The type of most matrices.
    pub base: GgmlType,
}

const fn blocks(name: &'static str, number: u32, base: BlockType) -> FileType {
    FileType { name, number, base: GgmlType::Block(base) }
}

/// Every type of file that can be written.
pub const FILE_TYPES: &[FileType] = &[
    FileType { name: "f32", number: 0, base: GgmlType::F32 },
    FileType { name: "f16", number: 1, base: GgmlType::F16 },
    FileType { name: "bf16", number: 32, base: GgmlType::BF16 },
    blocks("q8_0", 7, Q8_0),
    blocks("q6_k", 18, Q6_K),
    blocks("q5_k_m", 17, Q5_K),
    blocks("q5_k_s", 16, Q5_K),
    blocks("q5_1", 9, Q5_1),
    blocks("q5_0", 8, Q5_0),
    blocks("q4_k_m", 15, Q4_K),
    blocks("q4_k_s", 14, Q4_K),
    blocks("q4_1", 3, Q4_1),
    blocks("q4_0", 2, Q4_0),
    blocks("iq4_nl", 25, IQ4_NL),
    blocks("iq4_xs", 30, IQ4_XS),
    blocks("mxfp4_moe", 38, MXFP4),
    blocks("q3_k_l", 13, Q3_K),
    blocks("q3_k_m", 12, Q3_K),
    blocks("q3_k_s", 11, Q3_K),
    blocks("q2_k", 10, Q2_K),
];

impl FileType {
    /// The type with this name, in any case. `q3_k`, `q4_k` and `q5_k` mean the `_m` mixtures.
    ///
    /// # Errors
    /// `Error::Unsupported` for another name, with the list of those that are known.
    pub fn from_name(name: &str) -> Result<FileType> {
        let lower = name.to_ascii_lowercase();
        let full = match lower.as_str() {
            "q3_k" | "q4_k" | "q5_k" => format!("{lower}_m"),
            _ => lower,
        };
        FILE_TYPES.iter().copied().find(|t| t.name == full).ok_or_else(|| {
            let names: Vec<&str> = FILE_TYPES.iter().map(|t| t.name).collect();
            Error::unsupported(
                format!("files of type '{name}'"),
                format!("Types that can be written: {}", names.join(", ")),
            )
        })
    }
}

/// A type for the tensors whose names match a pattern.
#[derive(Clone, Debug)]
pub struct TypeRule {
    /// A part of the name. `*` stands for any characters.
    pub pattern: String,
    pub ty: GgmlType,
}

impl TypeRule {
    fn matches(&self, name: &str) -> bool {
        let mut parts = self.pattern.split('*');
        let mut rest = name;
        parts.all(|p| match rest.find(p) {
            Some(at) => {
                rest = &rest[at + p.len()..];
                true
            }
            None => false,
        })
    }
}

/// What the user chooses.
#[derive(Clone, Debug)]
pub struct MixtureOptions {
    pub file: FileType,
    /// The type of `output.weight`; in a model without it, also of the embeddings.
    pub output: Option<GgmlType>,
    /// The type of `token_embd.weight`.
    pub embedding: Option<GgmlType>,
    /// The first rule that matches decides. They hold for tensors that are quantised at all.
    pub rules: Vec<TypeRule>,
    /// All tensors that are quantised get the base type.
    pub pure: bool,
}

impl MixtureOptions {
    pub fn new(file: FileType) -> MixtureOptions {
        MixtureOptions { file, output: None, embedding: None, rules: vec![], pure: false }
    }
}

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Output,
    Embedding,
    /// Queries, keys and values in one matrix.
    Joined,
    Values,
    Keys,
    AttentionOutput,
    Down,
    Other,
}

impl Role {
    fn of(name: &str) -> Role {
        let named = |part: &str| name.contains(part);
        match name {
            "output.weight" => Role::Output,
            "token_embd.weight" | "per_layer_token_embd.weight" => Role::Embedding,
            _ if named("attn_qkv.weight") => Role::Joined,
            _ if named("attn_v.weight") || named("attn_kv_b.weight") => Role::Values,
            _ if named("attn_k.weight") => Role::Keys,
            _ if named("attn_output.weight") => Role::AttentionOutput,
            // Names with `ffn_up` and `ffn_gate` come first in llama.cpp, but none has `ffn_down` too.
            _ if named("ffn_down") => Role::Down,
            _ => Role::Other,
        }
    }

    fn has_values(self) -> bool {
        matches!(self, Role::Joined | Role::Values)
    }
}

/// Matrices that keep their type: they are small, or read in another way than by products.
const KEPT: &[&str] = &[
    "_norm.weight",
    "ffn_gate_inp.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "attn_rel_b.weight",
    ".position_embd",
    ".patch_embd",
];

/// Whether a tensor may be quantised: a matrix, or matrices of experts.
pub fn is_quantised(info: &TensorInfo) -> bool {
    let axes = info.shape.iter().skip_while(|d| **d == 1).count();
    let name = info.name.as_str();
    axes >= 2
        && name.ends_with("weight")
        && !["position_embd.weight", "token_types.weight"].contains(&name)
        && !KEPT.iter().any(|k| name.contains(k))
}

/// Chooses the types of a model's tensors, which must be given in their order: layer by layer.
#[derive(Debug)]
struct Chooser<'a> {
    options: &'a MixtureOptions,
    falcon: bool,
    /// Whether this is Llama 2 or 3 with 70 billion parameters, whose values are small and get more bits.
    large: bool,
    experts: u64,
    /// Query heads per key head.
    group: u64,
    layers: usize,
    /// Whether the embeddings are the output too.
    tied: bool,
    /// Tensors of values: how many there are, and how many have been seen.
    values: (usize, usize),
    /// Tensors of role `Down` that have been seen.
    downs: usize,
}

/// Whether layer `i` of `n` is among those that the middle mixtures give more bits: the first and the last
/// eighth, and every third between.
fn is_favoured(i: usize, n: usize) -> bool {
    i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2
}

/// The types of the tensors. They must be in llama.cpp's order: those of no layer first, then layer by layer.
///
/// # Errors
/// Errors of metadata that lacks the sizes; `Error::Argument` for a tensor of a layer that does not exist.
pub fn choose(
    metadata: &Metadata,
    tensors: &[TensorInfo],
    options: &MixtureOptions,
) -> Result<Vec<GgmlType>> {
    let arch = metadata.str("general.architecture")?;
    let key = |k: &str| format!("{arch}.{k}");
    // Some models have a list with a value for each layer.
    let first = |k: &str| -> Result<Option<u64>> {
        match metadata.get(&key(k)) {
            None => Ok(None),
            Some(halcyon_formats::gguf::Value::Array(_)) => {
                Ok(metadata.ints(&key(k))?.first().and_then(|n| u64::try_from(*n).ok()))
            }
            Some(_) => metadata.u64(&key(k)).map(Some),
        }
    };
    let layers = usize::try_from(first("block_count")?.unwrap_or(0)).unwrap_or(0);
    let heads = first("attention.head_count")?.unwrap_or(0);
    let shared = first("attention.head_count_kv")?.unwrap_or(heads);
    let values = tensors.iter().filter(|t| Role::of(&t.name).has_values()).count();
    let mut chooser = Chooser {
        options,
        falcon: arch == "falcon",
        large: matches!(arch, "llama" | "qwen2" | "deci" | "olmo")
            && layers == 80
            && (arch != "llama" || heads != shared),
        experts: first("expert_count")?.unwrap_or(0),
        group: heads.checked_div(shared).unwrap_or(0),
        layers,
        tied: !tensors.iter().any(|t| t.name == "output.weight"),
        values: (values, 0),
        downs: 0,
    };
    tensors.iter().map(|t| chooser.target(t)).collect()
}

impl Chooser<'_> {
    fn target(&mut self, info: &TensorInfo) -> Result<GgmlType> {
        if !is_quantised(info) {
            return Ok(info.ty);
        }
        let (role, o) = (Role::of(&info.name), self.options);
        if let (Some(ty), Role::Embedding) = (o.embedding, role) {
            return Ok(fitting(ty, info));
        }
        if let (Some(ty), Role::Output) = (o.output, role) {
            return Ok(fitting(ty, info));
        }
        let GgmlType::Block(base) = o.file.base else { return Ok(o.file.base) };
        let rule = o.rules.iter().find(|r| r.matches(&info.name));
        let chosen = match rule {
            Some(r) => r.ty,
            None if o.pure => o.file.base,
            None => self.mixed(base, role, info)?,
        };
        Ok(fitting(chosen, info))
    }

    /// The type by the mixture.
    fn mixed(&mut self, base: BlockType, role: Role, info: &TensorInfo) -> Result<GgmlType> {
        let (file, k) = (self.options.file.name, info.shape.last().copied().unwrap_or(1));
        let matters = role == Role::Output || self.tied && role == Role::Embedding;
        let ty = if matters {
            if let Some(ty) = self.options.output {
                return Ok(ty);
            }
            let wide = self.falcon || file == "mxfp4_moe" || !k.is_multiple_of(base.row().elements);
            if wide || base == Q8_0 { Q8_0 } else { Q6_K }
        } else if file == "mxfp4_moe" {
            let stacked = info.shape.len() > 2 && info.shape[info.shape.len() - 3] > 1;
            if stacked { MXFP4 } else { Q8_0 }
        } else {
            match role {
                Role::Joined | Role::Values => self.values(base),
                Role::Keys if self.experts == 8 => Q8_0,
                Role::AttentionOutput => self.attention_output(base),
                Role::Down => self.down(base, &info.name)?,
                _ => base,
            }
        };
        Ok(GgmlType::Block(ty))
    }

    fn values(&mut self, base: BlockType) -> BlockType {
        let (n, i) = self.values;
        self.values.1 += 1;
        let grouped = self.group >= 4;
        let mut ty = match self.options.file.name {
            "q2_k" => [Q3_K, Q4_K][usize::from(grouped)],
            "q3_k_m" => [Q4_K, Q5_K][usize::from(i < 2)],
            "q3_k_l" => Q5_K,
            "iq4_nl" | "iq4_xs" if grouped => Q5_K,
            "q4_k_m" | "q5_k_m" if is_favoured(i, n) => Q6_K,
            "q4_k_s" if i < 4 => Q5_K,
            _ => base,
        };
        if self.large && matches!(ty, Q3_K | Q4_K) {
            ty = Q5_K;
        }
        if self.experts == 8 { Q8_0 } else { ty }
    }

    fn attention_output(&self, base: BlockType) -> BlockType {
        match (self.options.file.name, self.falcon, self.experts == 8) {
            ("q3_k_l", true, _) => Q4_K,
            (_, true, _) => base,
            ("q2_k" | "q3_k_s" | "q3_k_m" | "iq4_nl" | "iq4_xs" | "q4_k_s" | "q4_k_m", _, true) => Q5_K,
            (_, _, true) => base,
            ("q2_k", ..) => Q3_K,
            ("q3_k_m", ..) => Q4_K,
            ("q3_k_l", ..) => Q5_K,
            _ => base,
        }
    }

    fn down(&mut self, base: BlockType, name: &str) -> Result<BlockType> {
        let (seen, n) = (self.downs, self.layers);
        self.downs += 1;
        // With experts, a layer may have more than one such tensor.
        let i = if self.experts > 1 { layer(name).filter(|i| *i < n) } else { Some(seen) };
        let i = i.ok_or_else(|| {
            Error::argument("export", format!("tensor '{name}' is not in one of the {n} layers"))
        })?;
        let favoured = is_favoured(i, n);
        Ok(match self.options.file.name {
            "q2_k" => Q3_K,
            "q3_k_m" if i < n / 16 => Q5_K,
            "q3_k_m" if !self.falcon || favoured => Q4_K,
            "q3_k_l" => [Q5_K, Q4_K][usize::from(self.falcon)],
            "q4_k_m" if self.falcon && i < n / 16 => Q6_K,
            "q4_k_m" if self.falcon && favoured => Q5_K,
            "q4_k_m" | "q5_k_m" if favoured && (!self.falcon || base == Q5_K) => Q6_K,
            "q4_k_s" if !self.falcon && i < n / 8 => Q5_K,
            "iq4_nl" | "iq4_xs" if i < n / 8 => Q5_K,
            _ => base,
        })
    }
}

/// The number of a tensor's layer.
pub(super) fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// The type, or a similar one whose blocks fit into the rows of the tensor: one with blocks of 32, else f16.
fn fitting(ty: GgmlType, info: &TensorInfo) -> GgmlType {
    let k = info.shape.last().copied().unwrap_or(1);
    let fits = |ty: GgmlType| k.is_multiple_of(ty.elements());
    if fits(ty) {
        return ty;
    }
    let smaller = match ty {
        GgmlType::Block(IQ4_XS) => IQ4_NL,
        GgmlType::Block(Q2_K | Q3_K) => Q4_0,
        GgmlType::Block(Q4_K) => Q5_0,
        GgmlType::Block(Q5_K) => Q5_1,
        GgmlType::Block(Q6_K) => Q8_0,
        _ => return GgmlType::F16,
    };
    let smaller = GgmlType::Block(smaller);
    if fits(smaller) { smaller } else { GgmlType::F16 }
}
