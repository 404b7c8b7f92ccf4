//! Arguments of the commands for language models.

use super::cache::{Seed, proposals, seed, whole};
use super::{BackendArgs, CacheArgs, HubArgs, LoraArgs};
use clap::{Args, ValueEnum};
use halcyon::{Error, Result};
use std::path::PathBuf;

/// The model, and how it is run.
#[derive(Args, Debug)]
pub(crate) struct LanguageArgs {
    /// GGUF file, folder, or name of a model: hf:ORG/REPO[@REVISION][:FILE]. Of a split GGUF file, any part;
    /// a folder has config.json and safetensors files; FILE may be a type such as Q4_K_M
    #[arg(value_name = "MODEL", required_unless_present = "model_file")]
    pub model: Option<PathBuf>,
    /// The same as MODEL
    #[arg(short = 'm', long = "model", value_name = "MODEL", conflicts_with = "model")]
    pub model_file: Option<PathBuf>,
    #[command(flatten)]
    pub cache: CacheArgs,
    /// How activations are rounded in products with quantised weights: fast (to 8 bits, as llama.cpp does) or
    /// fine (to 15 bits; up to twice the time of a prompt). Only kernels of the CPU round them. Default: fine
    /// for `chat`, `logits` and `perplexity`, otherwise fast
    #[arg(long, value_name = "HOW")]
    pub activations: Option<String>,
    #[command(flatten)]
    pub lora: LoraArgs,
    #[command(flatten)]
    pub place: PlaceArgs,
    #[command(flatten)]
    pub hub: HubArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
}

impl LanguageArgs {
    /// The model's path.
    pub(crate) fn path(&self) -> PathBuf {
        self.model.clone().or_else(|| self.model_file.clone()).unwrap_or_default()
    }
}

/// Where the parts of a model are computed.
#[derive(Args, Debug)]
pub(crate) struct PlaceArgs {
    /// Layers on the chosen device, as in llama.cpp (also -ngl): the last N. The others, the embedding and
    /// the head are on the CPU. 0: all on the CPU; all, auto, or as many as the model has: all on the device
    #[arg(long, visible_alias = "n-gpu-layers", value_name = "N", allow_hyphen_values = true)]
    pub gpu_layers: Option<String>,
    /// Splits the layers over several devices. DEVICES is a list of NAME[:NUMBER][=SHARE], separated by
    /// commas, in the order of the layers; SHARE is the device's part of the bytes of weights and cache.
    /// Without shares the free memory counts
    #[arg(
        id = "layer_split",
        long = "split",
        value_name = "DEVICES",
        conflicts_with_all = ["backend", "device", "backends", "fallback", "gpu_layers"]
    )]
    pub split: Option<String>,
    /// Keeps the feed-forward parts with experts on the CPU
    #[arg(long, conflicts_with = "n_cpu_moe")]
    pub cpu_moe: bool,
    /// Keeps the feed-forward parts with experts of the first N layers on the CPU
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    pub n_cpu_moe: Option<usize>,
}

/// What `fit` computes for a language model.
#[derive(Args, Debug)]
#[command(next_help_heading = "Language models")]
pub(crate) struct LanguageFitArgs {
    #[command(flatten)]
    pub hub: HubArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    pub lora: LoraArgs,
    /// Smaller model that proposes tokens, in memory next to the model
    #[arg(long, visible_alias = "model-draft", value_name = "MODEL")]
    pub draft: Option<PathBuf>,
    #[command(flatten)]
    pub mtp: MtpArgs,
    #[command(flatten)]
    pub place: PlaceArgs,
}

impl LanguageFitArgs {
    /// Refuses these options for a model of another kind.
    pub(crate) fn refuse(&self) -> Result<()> {
        let given = [
            ("--context", self.cache.context.is_some()),
            ("--kv-dtype", self.cache.kv_dtype.is_some()),
            ("--cache-type-k", self.cache.cache_type_k.is_some()),
            ("--cache-type-v", self.cache.cache_type_v.is_some()),
            ("--chunk", self.cache.chunk.is_some()),
            ("--lora", !self.lora.is_empty()),
            ("--draft", self.draft.is_some()),
            ("--mtp", self.mtp.mtp != Mtp::Auto),
            ("--offline", self.hub.offline),
            ("--gpu-layers", self.place.gpu_layers.is_some()),
            ("--split", self.place.split.is_some()),
            ("--cpu-moe", self.place.cpu_moe),
            ("--n-cpu-moe", self.place.n_cpu_moe.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((name, _)) => Err(Error::argument(*name, "only language models have this option")),
            None => Ok(()),
        }
    }
}

/// How tokens are chosen.
#[derive(Args, Debug)]
pub(crate) struct SamplingArgs {
    /// The most tokens to generate. Default: until the model ends the text or the context is full
    #[arg(
        short = 'n',
        long,
        visible_aliases = ["n-predict", "num-predict"],
        value_name = "N",
        value_parser = whole::<usize>
    )]
    pub max_tokens: Option<usize>,
    /// Divides the logits; 0 always takes the most probable token
    #[arg(long, visible_alias = "temp", value_name = "T", default_value_t = 0.8)]
    pub temperature: f32,
    /// Draws only among the K most probable tokens; 0: all
    #[arg(
        long,
        value_name = "K",
        default_value_t = 40,
        value_parser = whole::<usize>
    )]
    pub top_k: usize,
    /// Draws only among typical tokens that together reach this probability; 1: all. Typical tokens have
    /// information near to the expected one
    #[arg(long, visible_alias = "typical-p", value_name = "P", default_value_t = 1.0)]
    pub typical: f32,
    /// Draws only among the most probable tokens that together reach this probability
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    pub top_p: f32,
    /// Draws only among tokens that are at least P times as probable as the most probable one
    #[arg(long, value_name = "P", default_value_t = 0.05)]
    pub min_p: f32,
    /// Makes tokens less probable that occurred in the last 64; 1: no change
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub repeat_penalty: f32,
    /// Subtracted from the logits of tokens that occurred in the last 64
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens for each time that they occurred in the last 64
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub frequency_penalty: f32,
    /// The steps in their order, separated by ; or ,. Default:
    /// penalties;top_k;typ_p;top_p;min_p;temperature. A step that is not named is left out
    #[arg(long, value_name = "LIST")]
    pub samplers: Option<String>,
    /// Seed of the draws. The same seed gives the same text on the same device. Default, and for -1: a new
    /// one, which -v prints
    #[arg(
        short = 's',
        long = "seed",
        id = "draw_seed",
        value_name = "N",
        value_parser = seed
    )]
    pub draw_seed: Option<Seed>,
    /// Ends the text at this string, which is not printed; repeatable
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Treats tokens that end a text as ordinary tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// Only texts of this grammar (GBNF or Lark): a file, or the grammar
    #[arg(long, value_name = "FILE|TEXT", conflicts_with = "json_schema")]
    pub grammar: Option<String>,
    /// Only JSON that satisfies this schema: a file, or the schema itself
    #[arg(long, value_name = "FILE|TEXT")]
    pub json_schema: Option<String>,
}

/// How tokens are proposed, so that a step of the model computes several.
#[derive(Args, Clone, Debug)]
pub(crate) struct SpeculationArgs {
    /// Smaller model with the same tokens that proposes the next ones; the text stays the same
    #[arg(long, visible_alias = "model-draft", value_name = "MODEL", conflicts_with = "lookup")]
    pub draft: Option<PathBuf>,
    /// Proposes what followed the last tokens where they occurred before; the text stays the same
    #[arg(long)]
    pub lookup: bool,
    /// The most tokens that are proposed at once, up to 15
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = proposals)]
    pub draft_max: usize,
    #[command(flatten)]
    pub mtp: MtpArgs,
}

/// Whether the model's own layer for further tokens is used.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mtp {
    /// If the model has one, and it fits into memory
    Auto,
    #[value(alias = "draft-mtp")]
    On,
    #[value(alias = "none")]
    Off,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct MtpArgs {
    /// Whether the model's own layer for further tokens (MTP) proposes them; the text stays the same. With
    /// --prompts, auto is off
    #[arg(long, visible_alias = "spec-type", value_name = "WHEN", value_enum, default_value_t = Mtp::Auto)]
    pub mtp: Mtp,
}

#[derive(Args, Debug)]
#[command(after_help = GENERATE)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub language: LanguageArgs,
    /// Text to continue; - reads it from standard input
    #[arg(short = 'p', long, value_name = "TEXT", required_unless_present_any = ["prompt_tokens", "prompts"])]
    pub prompt: Option<String>,
    /// Tokens to continue: an .npy file of integers
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub prompt_tokens: Option<PathBuf>,
    /// File of prompts to continue together, one per line
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_tokens"])]
    pub prompts: Option<PathBuf>,
    /// The most prompts of --prompts that are computed at once. Default: 8
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    pub parallel: Option<usize>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    /// Prints one JSON object: tokens, text, finish_reason, times. With --prompts one per line
    #[arg(long)]
    pub json: bool,
}

const GENERATE: &str = "\
Standard output has the text only; the times go to standard error. The text ends with finish reason `stop` if the model ends it or a stop \
string appears, and with `length` if --max-tokens is reached or the context is full.

A line of --prompts that begins with { is a JSON object with `prompt` or `prompt_tokens`, and perhaps `seed` and `max_tokens`. Each prompt has the cache's --context for itself, and the same tokens as alone. The answers come in the order of the lines.

Examples:
  halcyon generate tiny.gguf -p \"Once upon a time\" -n 16
  halcyon generate tiny.gguf -p hello -n 8 --temperature 0 --ignore-eos --json
  halcyon generate tiny.gguf -p 'a b a' -n 8 --lookup -v
  halcyon generate tiny.gguf -p 'Yes or no?' --grammar 'root ::= \"Yes\" | \"No\"'
  halcyon generate tiny.gguf --prompts prompts.txt -n 8 --json";

#[derive(Args, Debug)]
#[command(after_help = CHAT)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub language: LanguageArgs,
    /// First message, which tells the model how to behave
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// File with a chat template (Jinja) in place of the model's
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Neither reads nor writes the history of messages, which arrow keys bring back on a terminal
    #[cfg(feature = "edit")]
    #[arg(long, hide_short_help = true)]
    pub no_history: bool,
    /// Does not print what the model thinks before it answers
    #[arg(long)]
    pub hide_thinking: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
}

const CHAT: &str = "\
Type a message and press Enter. A line that ends with \\ continues on the next line, and a message between \"\"\" and \"\"\" has several lines and is never a command. /help lists the commands of the chat. Ctrl-C stops an \
answer, Ctrl-D or /quit ends the chat. What the model thinks is dimmed on a terminal. If the context is full, the oldest messages are dropped, and a note says so.

Examples:
  echo hello | halcyon chat tiny.gguf -n 8
  printf 'hi\\n/context\\n' | halcyon chat tiny.gguf --system 'Be brief.' -n 8";

#[derive(Args, Debug)]
#[command(after_help = LOGITS)]
pub(crate) struct LogitsArgs {
    #[command(flatten)]
    pub language: LanguageArgs,
    /// Tokens: an .npy file of integers
    #[arg(long, value_name = "FILE")]
    pub tokens: PathBuf,
    /// File for the logits: .npy, f32 [tokens, vocabulary]
    #[arg(long, short = 'o', value_name = "FILE")]
    pub output: PathBuf,
}

const LOGITS: &str = "\
The logits after each token, given all tokens before it.

Examples:
  halcyon logits tiny.gguf --tokens ids.npy --output logits.npy";

#[derive(Args, Debug)]
#[command(after_help = EMBED)]
pub(crate) struct EmbedArgs {
    /// GGUF file, folder with config.json and safetensors files, perhaps of sentence-transformers, or name of
    /// a model (hf:ORG/REPO)
    pub model: PathBuf,
    #[command(flatten)]
    pub hub: HubArgs,
    /// Texts
    #[arg(value_name = "TEXT")]
    pub texts: Vec<String>,
    /// File with one text per line; - reads standard input
    #[arg(short = 'f', long, value_name = "FILE", conflicts_with = "texts")]
    pub file: Option<PathBuf>,
    /// Tokens in place of texts: an .npy file of integers; each row is a text
    #[arg(long, value_name = "FILE", conflicts_with_all = ["texts", "file"])]
    pub tokens: Option<PathBuf>,
    /// cls, max, mean, mean_sqrt_len_tokens, weightedmean or lasttoken. Default: as the model says, else mean
    #[arg(long, value_name = "NAME")]
    pub pooling: Option<String>,
    /// Gives vectors the length 1. Default: as the model says, else no
    #[arg(long, conflicts_with = "no_normalize")]
    pub normalize: bool,
    /// Leaves the length of vectors as it is
    #[arg(long)]
    pub no_normalize: bool,
    /// A prompt of the model that comes before each text
    #[arg(long, value_name = "NAME")]
    pub prompt_name: Option<String>,
    /// The most tokens of a text; longer texts are cut. Default: as the model says
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    pub max_tokens: Option<usize>,
    /// File for the embeddings: .npy, f32 [texts, size]
    #[arg(short = 'o', long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub lora: LoraArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
}

const EMBED: &str = "\
Prints one line of numbers per text, or {\"embeddings\": [[...]]} with --json.

Examples:
  halcyon embed tiny.gguf 'a text' 'another text' --json
  halcyon embed tiny.gguf --file text.txt --output vectors.npy
  halcyon embed tiny.gguf --tokens ids.npy --pooling lasttoken";

#[derive(Args, Debug)]
#[command(after_help = PERPLEXITY)]
pub(crate) struct PerplexityArgs {
    #[command(flatten)]
    pub language: LanguageArgs,
    /// Text file
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    pub text: PathBuf,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const PERPLEXITY: &str = "\
The text is cut into windows of the context's size (512 by default). In each window the second half is predicted, as llama.cpp's perplexity tool does.

Examples:
  halcyon perplexity tiny.gguf -f text.txt -c 64";

#[derive(Args, Debug)]
#[command(after_help = TOKENIZE)]
pub(crate) struct TokenizeArgs {
    /// GGUF file, folder with tokenizer.json, or name of a model (hf:ORG/REPO)
    pub model: PathBuf,
    #[command(flatten)]
    pub hub: HubArgs,
    /// Text; - reads it from standard input
    pub text: String,
    /// Adds the tokens that begin and end a text
    #[arg(long)]
    pub add_special: bool,
    /// Reads special tokens that are written in the text
    #[arg(long)]
    pub parse_special: bool,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const TOKENIZE: &str = "\
Examples:
  halcyon tokenize tiny.gguf 'Once upon a time'
  echo hello | halcyon tokenize tiny.gguf - --json";

#[derive(Args, Debug)]
#[command(after_help = BENCH_LLM)]
pub(crate) struct BenchLlmArgs {
    #[command(flatten)]
    pub language: LanguageArgs,
    /// Tokens of a prompt; 0: prompts are not measured
    #[arg(short = 'p', long, visible_alias = "n-prompt", value_name = "N", default_value_t = 512, value_parser = whole::<usize>)]
    pub prompt: usize,
    /// Tokens to generate; 0: generation is not measured
    #[arg(short = 'n', long, visible_alias = "n-gen", value_name = "N", default_value_t = 128, value_parser = whole::<usize>)]
    pub generate: usize,
    /// Positions before those that are measured, with commas between
    #[arg(
        short = 'd',
        long,
        visible_alias = "n-depth",
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "0",
        value_parser = whole::<usize>
    )]
    pub depth: Vec<usize>,
    /// Number of measured runs of each test
    #[arg(short = 'r', long, visible_alias = "repetitions", value_name = "N", default_value_t = 5, value_parser = whole::<u32>)]
    pub repeat: u32,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const BENCH_LLM: &str = "\
llama-bench's protocol and names: pp512 is a prompt of 512 random tokens, tg128 are 128 tokens one after the other, @ d4096 is after 4096 positions. The first run of each test is not counted.

Examples:
  halcyon bench llm tiny.gguf -p 16 -n 4 -d 0,32 -r 1";
