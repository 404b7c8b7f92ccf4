//! Arguments of `halcyon run`, and the input arguments shared with other commands.

use super::{BackendArgs, OrtArgs, QuantizeArgs, Runtime, SplitArgs};
use clap::{Args, ValueEnum};
use halcyon::onnx::MAX_ITERATIONS;
use std::path::PathBuf;

/// The inputs of the model.
#[derive(Args, Debug, Clone, Default)]
pub(crate) struct InputArgs {
    /// [NAME=]SOURCE: a file (.npy, .npz, .json, ONNX .pb, an image), numbers as JSON ('[1,2,3]'),
    /// random|zeros|ones[:SHAPE] (1x3x8x8), or text (text:"hello", @lines.txt). Repeatable
    ///
    /// Without a NAME, inputs are taken in the model's order. NumPy files have no type for some inputs: bf16,
    /// f8... and f4... are read from f32, i4 and i2 from i8, u4 and u2 from u8. JSON with fewer dimensions
    /// than the model declares gets leading dimensions of size 1. Inputs of strings take JSON, text with one
    /// string on each line, or .npy; maps take JSON objects. Text for inputs of token ids needs a tokenizer
    /// (see --tokenizer).
    #[arg(long = "input", short = 'i', value_name = "[NAME=]SOURCE")]
    pub inputs: Vec<String>,
    /// Tokenizer that turns text into token ids (default: tokenizer.json in the model's folder)
    ///
    /// It fills the model's inputs for token ids (input_ids, ids, token_ids or tokens), the mask
    /// (attention_mask, mask or input_mask) and token types (token_type_ids, type_ids or segment_ids). Lines
    /// are padded to the length that the model's shape fixes, else to the longest line. Lines are cut to the
    /// smallest limit of tokenizer.json, tokenizer_config.json, config.json and the model's shapes, with a
    /// warning.
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Seed of the random numbers for `random`
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Size to which images are scaled, instead of the size in the model's shape
    #[arg(long, value_name = "WxH")]
    pub image_size: Option<String>,
    /// Subtracted from an image's values, which are in 0..1: one number, or one per channel
    #[arg(long, value_name = "A[,B,C]", value_delimiter = ',', allow_hyphen_values = true)]
    pub image_mean: Vec<f64>,
    /// Divides an image's values after the subtraction: one number, or one per channel
    #[arg(long, value_name = "A[,B,C]", value_delimiter = ',')]
    pub image_std: Vec<f64>,
    /// Order of an image's axes, instead of the one that the model's shape suggests
    #[arg(long, value_name = "ORDER")]
    pub image_layout: Option<ImageLayout>,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageLayout {
    Nchw,
    Nhwc,
}

/// Which values of the outputs are printed.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Print {
    /// Name, type, shape and the first values
    First,
    /// Every value
    All,
}

/// How outputs are written.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Npy,
    Npz,
    Json,
    Csv,
}

#[derive(Args, Debug)]
#[command(after_help = RUN)]
pub(crate) struct RunArgs {
    /// ONNX model. Its external data is read from the same folder
    pub model: PathBuf,
    /// More inputs, as with --input
    #[arg(value_name = "INPUT")]
    pub more: Vec<String>,
    #[command(flatten)]
    pub input: InputArgs,
    /// Images or lines of text per run, if the model leaves its batch size open (default 1 image, 32 lines)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub batch: Option<u32>,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// halcyon or ort (ONNX Runtime). It is the program that runs the model. With ort, --backend chooses the
    /// execution provider (auto, cuda, rocm, metal or cpu), and options that only Halcyon has are errors
    #[arg(
        long,
        value_name = "NAME",
        default_value = "halcyon",
        help_heading = "Device",
        hide_possible_values = true
    )]
    pub runtime: Runtime,
    #[command(flatten)]
    pub ort: OrtArgs,
    #[command(flatten)]
    pub quantize: Box<QuantizeArgs>,
    #[command(flatten)]
    pub split: SplitArgs,
    /// Writes the outputs to a file: .npy, .npz, .json or .csv, or - for standard output. Repeatable
    ///
    /// .npz and .json hold every output. .npy and .csv hold one, which NAME=FILE chooses if the model has
    /// several. With --top-k, .csv holds the classes instead of the values. A file with another extension
    /// needs --format. Without --format, standard output, pipes and devices get JSON.
    #[arg(long = "output", short = 'o', value_name = "[NAME=]FILE")]
    pub output: Vec<String>,
    /// Format of --output if the file name has no known extension (-, pipes)
    #[arg(long, value_name = "FORMAT", requires = "output")]
    pub format: Option<Format>,
    /// Saves every output in this folder as NAME.npy. Strings and the keys of maps are saved as NAME.json.
    /// Characters other than letters, digits and ._- become _. Types that NumPy lacks are saved as f32, i8 or
    /// u8, with a warning
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
    /// Prints the first values of each output, or all values
    #[arg(long, value_name = "WHAT")]
    pub print: Option<Print>,
    /// Prints the N largest values of every row of the first output
    #[arg(long, value_name = "N")]
    pub top_k: Option<usize>,
    /// File with one class name per line. Unless --top-k is given, prints the best 5 classes, or the best one
    /// for each of several images
    #[arg(long, value_name = "FILE")]
    pub labels: Option<PathBuf>,
    /// Runs N times and reports the median time. With -v and --json also the minimum and the maximum
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// Limit of the iterations of a loop: a loop that exceeds it is an error. A smaller trip count of the
    /// model ends the loop first
    #[arg(long, value_name = "N", default_value_t = MAX_ITERATIONS, value_parser = clap::value_parser!(u64).range(1..))]
    pub max_iterations: u64,
    /// Measures what each transformation gained and how far the result is from level O0
    #[arg(long, conflicts_with_all = ["split", "may_leave"])]
    pub receipts: bool,
    /// Runs once more and checks a share of the plan's steps on another backend at level O0: BACKEND[:SHARE],
    /// such as cpu:1%, or cpu for all steps. Ends with exit code 6 at the first step that differs, and saves
    /// this step in a replay file
    #[arg(long, value_name = "BACKEND[:SHARE]", conflicts_with_all = ["split", "may_leave"])]
    pub verify: Option<String>,
    /// Seed of the choice of steps for --verify, to repeat the run that printed it
    #[arg(long, value_name = "N", requires = "verify")]
    pub verify_seed: Option<u64>,
    /// Replay file for a step that fails or differs (default of --verify: MODEL.replay in the working
    /// directory)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["split", "may_leave"])]
    pub save_replay: Option<PathBuf>,
    /// Prints one JSON object with every value; NaN and infinities are the strings "NaN", "Infinity" and
    /// "-Infinity"
    #[arg(long, conflicts_with = "print")]
    pub json: bool,
}

const RUN: &str = "\
Images: values are scaled to 0..1, then replaced by (x - mean) / std. The model's shape determines the size, and its number of channels whether the image is read as grey or as colour.

Several pictures: repeat --input, or name a folder (its images: PNG, JPEG, TIFF, WebP, BMP, PNM) or a pattern ('pics/*.png'). Each picture is a row, in natural order (2.png before 10.png). If a picture cannot be read, it is reported, the other pictures run, and the exit code is 1.

Text: -i @lines.txt -o embeddings.npy, where tokenizer.json lies beside the model.

random: floats uniform in 0..1, integers uniform in 0..9, bools false or true; the same numbers for the same --seed.

Examples:
  halcyon run models/digits.onnx --input models/digit-7.png --top-k 3
  halcyon run models/digits.onnx -i models/ --batch 16 --top-k 1 -o digits.csv
  halcyon run models/digits.onnx -i image=models/digit-7.png --image-mean 0.1
  halcyon run models/digits.onnx -i random:16x1x8x8 --output-dir out
  halcyon run models/digits.onnx -i ones --level O1 --repeat 20 --receipts
  halcyon run models/digits.onnx -i ones --backend cpu --verify cpu:5%
  halcyon run models/digits.onnx -i ones --level O3 --max-error 0.5
  halcyon run models/digits.onnx -i ones --runtime ort --repeat 20";
