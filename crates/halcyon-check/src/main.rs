//! `halcyon-check`: one binary that is copied to a machine with an accelerator, together with one data file.
//! It reports what works there and how fast; see `docs/gpu-check.md`. `cargo xtask gpu-check` builds both.
//!
//! It is a multi-call binary. With options, or without arguments, it runs the check; with a command's name it
//! acts as the `halcyon` command (`halcyon-check doctor`). It starts itself for each part of the check, so
//! that a crash or hang loses only that part.
#![forbid(unsafe_code)]

mod bench;
mod child;
mod child_section;
mod data;
mod event;
mod report;
mod run;
mod sections;

use std::process::ExitCode;

const USAGE: &str = "\
Usage: halcyon-check [options]            check this machine's accelerators and write a report
       halcyon-check COMMAND [arguments]  the halcyon command: doctor, devices, conformance, bench, ...

  --backend NAME    backend to check (repeatable); default: every accelerator found, and webgpu on the same card
  --minutes N       stop after N minutes and list what was not run (9)
  --out DIR         folder of the report (.)
  --data FILE       models and cases (halcyon-check.dat beside this file)
  --only SECTION    only this section (repeatable); --list names them
  --no-torch        do not measure PyTorch (default: measured if `python3 -c \"import torch\"` works; HALCYON_PYTHON names another Python)
  --rehearsal       tiny sizes and a sample of the cases: shows that this program works, not how fast a device is

Exit code: 0 all is right and every target was met, 1 something is wrong, 2 the command line is wrong or the check could not run, 3 nothing is wrong,
but something was left out or a target was missed.
";

fn main() -> ExitCode {
    halcyon_hal::child::end_with_parent();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.first().map(String::as_str) {
        Some("--help" | "-h" | "help") => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Some("__section") => child_section::main(&args[1..]).map(|()| 0),
        Some("__pack") => data::pack_listed(&args[1..]).map(|()| 0),
        None => run::main(&[]),
        Some(a) if a.starts_with("--") && a != "--version" => run::main(&args),
        Some(_) => return halcyon_cli::main(),
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(why) => {
            eprintln!("{why}");
            ExitCode::from(2)
        }
    }
}
