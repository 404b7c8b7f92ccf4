//! Arguments of the commands that write files of language models.

use super::cache::positive;
use super::{HubArgs, LoraArgs};
use clap::Args;
use std::num::NonZero;
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = QUANTIZE)]
pub(crate) struct QuantizeModelArgs {
    /// GGUF file (of a split model: any part), folder with config.json and safetensors files, or name of a
    /// model (hf:ORG/REPO)
    #[arg(value_name = "IN")]
    pub model: PathBuf,
    #[command(flatten)]
    pub hub: HubArgs,
    /// GGUF file to write
    #[arg(value_name = "OUT", required_unless_present = "dry_run")]
    pub output: Option<PathBuf>,
    /// Type of the file: f32, f16, bf16, q8_0, q6_k, q5_k_m, q5_k_s, q5_1, q5_0, q4_k_m, q4_k_s, q4_1, q4_0,
    /// iq4_nl, iq4_xs, mxfp4_moe, q3_k_l, q3_k_m, q3_k_s or q2_k
    #[arg(long = "type", short = 't', value_name = "TYPE")]
    pub file_type: String,
    /// Type of the output matrix; in a model without one, of the embeddings
    #[arg(long, visible_alias = "output-tensor-type", value_name = "TYPE")]
    pub output_type: Option<String>,
    /// Type of the embeddings
    #[arg(long, value_name = "TYPE")]
    pub token_embedding_type: Option<String>,
    /// Type of the matrices whose names contain a text, in which * stands for any characters; repeatable, the
    /// first that matches decides. For types of files with blocks
    #[arg(long, value_name = "NAME=TYPE")]
    pub tensor_type: Vec<String>,
    /// Gives all matrices the same type, with no wider types for some
    #[arg(long)]
    pub pure: bool,
    #[command(flatten)]
    pub lora: LoraArgs,
    /// Accepts weights that are in blocks already. Their errors add up
    #[arg(long)]
    pub allow_requantize: bool,
    /// Threads. Default: one per processor
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<NonZero<usize>>,
    /// Lists the tensors with their types and sizes, and writes nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Replaces OUT if it is a file that exists
    #[arg(long)]
    pub overwrite: bool,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const QUANTIZE: &str = "\
Each tensor gets the type that llama.cpp's quantiser gives it without an importance matrix. Vectors, norms and routers keep their type. A \
matrix whose rows do not consist of whole blocks gets a similar type with smaller blocks, or f16. For ONNX models: `halcyon optimize`.

Examples:
  halcyon quantize tiny.gguf tiny-q8_0.gguf --type q8_0
  halcyon quantize tiny.gguf --type q4_k_m --dry-run
  halcyon quantize tiny.gguf t.gguf --type q4_0 --tensor-type attn_v=q8_0";

#[derive(Args, Debug)]
#[command(after_help = CONVERT)]
pub(crate) struct ConvertArgs {
    /// Folder with config.json and safetensors files, GGUF file (of a split model: any part), or name of a
    /// model (hf:ORG/REPO)
    #[arg(value_name = "IN")]
    pub model: PathBuf,
    #[command(flatten)]
    pub hub: HubArgs,
    /// GGUF file to write (its name ends in .gguf), or a new folder
    #[arg(value_name = "OUT")]
    pub output: PathBuf,
    /// Type of the weights: f32, f16 or bf16. Default: that of a folder's weights; f32 for a new folder
    /// of a GGUF file; with --lora those of the model
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<String>,
    #[command(flatten)]
    pub lora: LoraArgs,
    /// Threads. Default: one per processor
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<NonZero<usize>>,
    /// Replaces OUT if it is a file that exists
    #[arg(long)]
    pub overwrite: bool,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const CONVERT: &str = "\
A folder becomes a GGUF file that llama.cpp loads too. A GGUF file becomes a folder, or a GGUF file with weights in floats. If the new file \
would mean another computation than the old one, nothing is written. With --lora, adapters are merged into the matrices: a folder may become a \
new folder, and weights keep their types (weights in blocks are decoded, merged and encoded again).

Examples:
  halcyon convert tiny.gguf tiny-f32.gguf --dtype f32
  halcyon convert tiny.gguf tiny-folder
  halcyon convert tiny-folder again.gguf --dtype f16";
