//! The project's tasks. `cargo xtask test` tests a checkout on a fresh machine; `cargo xtask bench` measures
//! it against its peers.

mod bench;
mod binaries;
mod binary;
mod book;
mod builds;
mod c_api;
mod comments;
mod crates;
mod dist;
mod docs;
mod fuzz;
mod gpu_check;
mod isa;
mod loops;
mod mentions;
mod miri;
mod package;
mod performance;
mod prerequisites;
mod profiles;
mod python_workspace;
mod readme;
mod report;
mod start;
mod test;
mod testdata;
mod tier;
mod wheel;

pub use halcyon_test_host::{root, target_dir};
use std::process::ExitCode;

const USAGE: &str = "\
Usage: cargo xtask <command>

  test [--nightly | --fast] [--no-install] [--only STEP]... [--list]
      Install what the tests need, then run what must pass before a merge: every test, but only a sample of long tests.
      --nightly     every test, without samples
      --fast        only formatting, comments, clippy, the number of crates and the tests
      --no-install  install nothing; tests that need what is missing are skipped and named
      --only STEP   only this step (repeatable); --list names the steps and what each tier does with them
      Samples and random inputs come from a seed that the run prints; HALCYON_SEED=N repeats them.
      With HALCYON_REQUIRE_ALL=1 or CI=true no test may be skipped because a library or a model is missing. See docs/testing.md

  docs [--report FILE]...
      Write the generated parts of docs/onnx.md: the operators, and which tests of the ONNX test suite pass, from reports of
      `check_suite.py --report` (one for each backend).

  book
      Build the book of docs/ with mdBook into target/book, and check its links. Installs mdBook below target if it is missing.

  dist [--out DIR]
      Build what a release has into DIR (target/dist): the command, the Python wheel, the C library and the book, each as an
      archive, with a list of all dependencies (SBOM) and SHA-256 checksums.

  wheel
      Build the Python package as one wheel into target/wheels, for Python 3.10 or later and glibc 2.28 or later. Installs the
      tools below target if they are missing.

  fuzz [TARGET]... [--minutes N] [--list]
      Run the fuzz targets, each for N minutes (default 1). Installs cargo-fuzz if it is missing. See docs/fuzzing.md

  gpu-check [--out DIR] [--rehearse]
      Build the binary that checks and measures a machine with an accelerator, and pack its data, both into DIR (target/gpu-check).
      --rehearse    run the binary here with small sizes, on the stand-ins of CUDA and ROCm and on the CPU. See docs/gpu-check.md

  bench peers [--rounds N] [--only ITEM]... [--with torch] [--threads N] [--no-write]
      Measure Halcyon and its peers in turn, in one run.
  bench loops [--rounds N] [--threads N]
      Measure loops of ONNX models in Halcyon and onnxruntime in turn, and the memory that they take.
  bench start [--rounds N] [--json]
      Measure the time from the start of the command to its answer: version, devices, models with and without packed weights on disk.
      The exit code is 1 if a time exceeds its bound.
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match args.split_first() {
        Some((&"test", rest)) => test::all(rest),
        Some((&"docs", rest)) => docs::main(rest),
        Some((&"book", rest)) => book::main(rest),
        Some((&"dist", rest)) => dist::main(rest),
        Some((&"wheel", rest)) => wheel::main(rest),
        Some((&"fuzz", rest)) => fuzz::all(rest),
        Some((&"gpu-check", rest)) => gpu_check::main(rest),
        Some((&"bench", rest)) => match rest.split_first() {
            Some((&"peers", rest)) => bench::peers(rest),
            Some((&"start", rest)) => start::main(rest),
            Some((&"loops", rest)) => loops::main(rest),
            _ => Err(Failure::Usage(
                "bench has three forms: `bench peers`, `bench start` and `bench loops`".into(),
            )),
        },
        Some((&("help" | "-h" | "--help"), _)) => {
            print!("{USAGE}");
            Ok(true)
        }
        Some((other, _)) => Err(Failure::Usage(format!("no command `{other}`"))),
        None => Err(Failure::Usage("a command is needed".into())),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(Failure::Usage(message)) => {
            eprint!("{message}\n\n{USAGE}");
            ExitCode::from(2)
        }
        Err(Failure::Other(message)) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

/// Why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line is wrong: exit code 2.
    Usage(String),
    /// Anything else: exit code 1.
    Other(String),
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Failure::Other(message)
    }
}

/// A cargo command in the repository.
pub(crate) fn cargo() -> std::process::Command {
    let mut c = std::process::Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    c.current_dir(root());
    c
}
