//! The program that runs a model: Halcyon or ONNX Runtime.

use super::{BackendArgs, InputArgs};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, ValueEnum};
use std::path::PathBuf;

/// A program that runs ONNX models.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runtime {
    Halcyon,
    /// ONNX Runtime
    Ort,
}

/// Where ONNX Runtime is.
#[derive(Args, Debug, Clone, Default)]
pub(crate) struct OrtArgs {
    /// The library of ONNX Runtime, 1.17 or newer. Default: ORT_DYLIB_PATH, else the system's search, else
    /// the package onnxruntime of a Python
    #[arg(long, value_name = "FILE")]
    pub ort_library: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(after_help = COMPARE)]
pub(crate) struct CompareArgs {
    /// ONNX model. Its external data is read from the same folder
    pub model: PathBuf,
    #[command(flatten)]
    pub input: InputArgs,
    /// The two programs, halcyon or ort (ONNX Runtime). The second one is the reference
    #[arg(
        long,
        value_name = "A,B",
        value_delimiter = ',',
        default_value = "halcyon,ort",
        hide_possible_values = true
    )]
    pub runtimes: Vec<Runtime>,
    /// Model that the second program runs instead. It has the same inputs, and values are compared by name
    #[arg(long, value_name = "FILE")]
    pub against: Option<PathBuf>,
    /// Relative tolerance: floats agree within ATOL + RTOL * |reference|
    #[arg(long, value_name = "RTOL", default_value_t = 1e-3, value_parser = tolerance)]
    pub rtol: f64,
    /// Absolute tolerance
    #[arg(long, value_name = "ATOL", default_value_t = 1e-5, value_parser = tolerance)]
    pub atol: f64,
    /// Runs of each program that are timed, after two that are not. The programs alternate
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    #[command(flatten)]
    pub backend: BackendArgs,
    #[command(flatten)]
    pub ort: OrtArgs,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
    /// Set by the command for the processes that measure memory: the number of the program
    #[arg(long, hide = true, value_name = "N")]
    pub side: Option<usize>,
}

fn tolerance(s: &str) -> Result<f64, String> {
    match s.parse::<f64>() {
        Ok(v) if v.is_finite() && v >= 0.0 => Ok(v),
        _ => Err(format!("\"{s}\" is not a number from 0 on")),
    }
}

const COMPARE: &str = "\
Both programs run the model on the same inputs. Inputs that are not given are filled as by `halcyon run -i random`; dimensions that the model \
leaves open get size 1. For each output the report has the largest absolute and relative difference, and the largest share of the tolerance. \
Integers, booleans and strings must be equal. The relative tolerance is at least 1/256 for f16 and 1/64 for bf16.

If an output differs, the values between the nodes are compared too, in the order of the computation, and the report names the first node with \
a result that differs. Values inside of the branches of an If and the bodies of loops are not compared by themselves. With more values to \
return, programs fuse less, so the search may show smaller differences than the outputs have.

Times are those of a run with inputs and outputs in host memory. Memory is measured in a process for each program, with one run.

Models that draw random numbers: only types and shapes are compared. The exit code is 6 if something differs.

Examples:
  halcyon compare models/digits.onnx
  halcyon compare models/digits.onnx -i models/digit-7.png --repeat 50 --json
  halcyon export models/digits.onnx -o exported.onnx
  halcyon compare models/digits.onnx --runtimes ort,ort --against exported.onnx";

/// Options that have an effect if only ONNX Runtime runs the model. All others are Halcyon's.
const WITH_ORT: [&str; 30] = [
    "model",
    "more",
    "inputs",
    "tokenizer",
    "seed",
    "image_size",
    "image_mean",
    "image_std",
    "image_layout",
    "batch",
    "backend",
    "device",
    "threads",
    "runtime",
    "runtimes",
    "against",
    "rtol",
    "atol",
    "ort_library",
    "side",
    "output",
    "format",
    "output_dir",
    "print",
    "top_k",
    "labels",
    "repeat",
    "json",
    "verbose",
    "quiet",
];

/// Rejects options of `run` and `compare` that have no effect on the chosen programs.
///
/// # Errors
/// A usage error that names the option.
pub(crate) fn check_runtimes(all: &Command, m: &ArgMatches) -> Result<(), clap::Error> {
    let Some((name, m)) = m.subcommand() else { return Ok(()) };
    let chosen: Vec<Runtime> = match name {
        "run" => m.get_one::<Runtime>("runtime").into_iter().copied().collect(),
        "compare" => m.get_many::<Runtime>("runtimes").into_iter().flatten().copied().collect(),
        _ => return Ok(()),
    };
    let halcyon = chosen.contains(&Runtime::Halcyon);
    let ort = chosen.contains(&Runtime::Ort);
    let Some(c) = all.find_subcommand(name) else { return Ok(()) };
    let given = |id: &str| m.value_source(id) == Some(ValueSource::CommandLine);
    let idle = |id: &str| !halcyon && !WITH_ORT.contains(&id) || !ort && id == "ort_library";
    let mut odd = c.get_arguments().filter(|a| idle(a.get_id().as_str()) && given(a.get_id().as_str()));
    let Some(a) = odd.next() else { return Ok(()) };
    let option = a.get_long().map_or_else(|| a.get_id().to_string(), |l| format!("--{l}"));
    let why = match halcyon {
        false => "ONNX Runtime runs the model",
        true => "ONNX Runtime does not run the model (--runtime ort, --runtimes)",
    };
    Err(clap::Error::raw(ErrorKind::ArgumentConflict, format!("{option} has no effect, because {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::command;

    fn check(words: &str) -> Result<(), String> {
        let mut c = command();
        let m = c.try_get_matches_from_mut(words.split(' ')).map_err(|e| e.to_string())?;
        check_runtimes(&c, &m).map_err(|e| e.to_string())
    }

    #[test]
    fn options_of_one_program_need_it() {
        assert_eq!(check("halcyon run m.onnx --level O1"), Ok(()));
        assert_eq!(check("halcyon run m.onnx --runtime ort --top-k 3 --threads 1 -v"), Ok(()));
        assert_eq!(check("halcyon compare m.onnx --level O1"), Ok(()));
        for (words, option) in [
            // The default, given explicitly, has no effect either.
            ("halcyon run m.onnx --runtime ort --level O2", "--level"),
            ("halcyon run m.onnx --runtime ort --receipts", "--receipts"),
            ("halcyon run m.onnx --runtime ort --max-iterations 5", "--max-iterations"),
            ("halcyon --allow-external-links run m.onnx --runtime ort", "--allow-external-links"),
            ("halcyon run m.onnx --ort-library x.so", "--ort-library"),
            ("halcyon compare m.onnx --runtimes ort,ort --without fusion", "--without"),
            ("halcyon compare m.onnx --runtimes halcyon,halcyon --ort-library x.so", "--ort-library"),
        ] {
            let e = check(words).unwrap_err();
            assert!(e.contains(&format!("{option} has no effect")), "{words}: {e}");
        }
    }

    /// Every name of the list is an option of one of the commands.
    #[test]
    fn the_list_has_only_options() {
        let c = command();
        let ids = |name: &str| -> Vec<String> {
            let c = c.find_subcommand(name).expect("a command");
            c.get_arguments().map(|a| a.get_id().to_string()).collect()
        };
        let all = [ids("run"), ids("compare"), c.get_arguments().map(|a| a.get_id().to_string()).collect()];
        for name in WITH_ORT {
            assert!(all.concat().iter().any(|a| a == name), "{name}");
        }
    }
}
