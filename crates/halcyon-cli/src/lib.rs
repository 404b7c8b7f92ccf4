//! The `halcyon` command. Each subcommand has a file in `cmd/`.
//!
//! A program can use it as a library, to offer the whole command with backends of its own: register them
//! ([`halcyon_hal::registry::register`]), then call [`main`]. See `examples/backend`. A program that an
//! interpreter runs calls [`main_with`].
#![forbid(unsafe_code)]

mod args;
mod cmd;
mod drivers;
mod environment;
mod image;
mod json;
mod numbers;
#[cfg(test)]
mod pages;
mod program;
mod report;
mod rows;
mod source;
mod strings;
mod suggest;
mod text;

pub use cmd::conformance::check_alive;
pub use cmd::doctor::{Section, verdict as doctor_verdict};
pub use halcyon::hal::child::Program;

/// Reads an image as the command does for the input `port` of a model, with default options. This function
/// exists only in builds of the fuzz targets.
///
/// # Errors
/// Errors of the command's own reader.
#[cfg(fuzzing)]
pub fn read_image(bytes: &[u8], port: &halcyon_formats::onnx::Port) -> Result<halcyon::ConstData> {
    image::read(bytes, port, &args::InputArgs::default(), "t").map(|(data, _)| data)
}

use args::Cli;
use clap::FromArgMatches;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use cmd::Command;
use halcyon::hal::{child, driver_output, probe};
use halcyon::{Error, Result};
use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// Runs the command that this process was started with. Returns its exit code.
pub fn main() -> ExitCode {
    let program = std::env::current_exe().ok().map(Program::from);
    ExitCode::from(main_with(std::env::args_os().collect(), program))
}

/// Runs the command with these arguments, the first of which is the program's name. Returns the exit code.
///
/// `program` starts this command again in a child process; the child's arguments follow, without a name. With
/// `None`, drivers are probed in this process, and commands that need a child fail.
///
/// The command takes over the process: its standard streams, Ctrl-C, and what is set once per process, such
/// as the verbosity.
pub fn main_with(args: Vec<OsString>, program: Option<Program>) -> u8 {
    child::end_with_parent();
    // Detected before parsing, so that usage errors are JSON too.
    let json = args.iter().skip(1).take_while(|a| *a != "--").any(|a| a == "--json");
    halcyon_hal::heap::end_when_out(json);
    program::start(&args, program);
    let cli = match parse(args) {
        Ok(cli) => cli,
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            let _ = e.print();
            return 0;
        }
        Err(e) if json => {
            let text = e.to_string();
            let message = text.trim_start_matches("error: ").trim_end();
            report::print_error_json("Usage", message, serde_json::Value::Null, 2);
            return 2;
        }
        Err(e) => {
            let _ = e.print();
            // The word is a model's file in place of a subcommand.
            if let (ErrorKind::InvalidSubcommand, Some(ContextValue::String(word))) =
                (e.kind(), e.get(ContextKind::InvalidSubcommand))
                && word.ends_with(".onnx")
            {
                report::note(&format!("To run a model: halcyon run {word}"));
            }
            return 2;
        }
    };
    // This must be called before any other thread is started.
    let relative = halcyon_hal::cache::ignore_relative();
    report::set_verbosity(cli.verbosity);
    drivers::start(&cli.command, json);
    // The stderr of these children must contain only driver output.
    let probing = matches!(cli.command, Command::Probe(_) | Command::DoctorChild(_));
    if std::env::var_os("HALCYON_LOG").is_some() && !probing {
        start_log();
    }
    for (name, path) in relative {
        tracing::info!(variable = name, path = %path.display(), "a relative folder is ignored");
        if matches!(cli.command, Command::Doctor(_)) {
            let path = report::path_text(&path);
            report::note(&format!(
                "warning: {name} is \"{path}\", which is not an absolute path, and is ignored"
            ));
        }
    }
    let result = catch_unwind(AssertUnwindSafe(|| run(cli)))
        .unwrap_or_else(|p| Err(panicked(&report::panic_text(p.as_ref()))));
    match result {
        Ok(code) => code,
        Err(e) => {
            report::print_error(&e, json);
            e.exit_code().clamp(1, 255) as u8
        }
    }
}

fn parse(given: Vec<OsString>) -> Result<Cli, clap::Error> {
    let mut command = args::command();
    let all: Vec<OsString> = rewritten(given.into_iter()).collect();
    let matches = command.try_get_matches_from_mut(&all).map_err(|e| match e.kind() {
        ErrorKind::InvalidUtf8 => not_text(&all),
        _ => e,
    })?;
    args::check_runtimes(&command, &matches).map_err(|e| e.format(&mut command))?;
    Cli::from_arg_matches(&matches).map_err(|e| e.format(&mut command))
}

/// The error of arguments of which one must be UTF-8 and is not. It names the argument, which clap does not.
fn not_text(all: &[OsString]) -> clap::Error {
    // Paths need not be UTF-8, so the argument is the one that is refused when all others are.
    let refused = |at: &usize| {
        let alone = |(i, a): (usize, &OsString)| match i == *at {
            true => a.clone(),
            false => a.to_string_lossy().into_owned().into(),
        };
        let made = args::command().try_get_matches_from(all.iter().enumerate().map(alone));
        made.is_err_and(|e| e.kind() == ErrorKind::InvalidUtf8)
    };
    let mut odd = (0..all.len()).filter(|i| all[*i].to_str().is_none());
    let Some(at) = odd.clone().find(refused).or(odd.next_back()) else {
        return clap::Error::raw(ErrorKind::InvalidUtf8, "an argument is not valid UTF-8\n");
    };
    let text = all[at].to_string_lossy();
    let before = || all[at.checked_sub(1)?].to_str().filter(|a| a.len() > 1 && a.starts_with('-'));
    let own = text.split_once('=').filter(|_| text.starts_with("--"));
    let name = match own.map(|(name, _)| name).or_else(before) {
        Some(option) => format!("the value of {option}"),
        None => format!("argument {at}"),
    };
    let value = own.map_or(&*text, |(_, value)| value);
    let what = format!("{name} is not valid UTF-8: '{value}'. Convert the text to UTF-8\n");
    clap::Error::raw(ErrorKind::InvalidUtf8, what)
}

/// Names of llama.cpp that have one dash and several letters, which clap does not know, and the same options
/// here.
const SHORT: [(&str, &str); 3] =
    [("-ngl", "--gpu-layers"), ("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v")];

/// Arguments with the names of [`SHORT`] replaced: `-ngl N` is `--gpu-layers N`.
fn rewritten(args: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut ended = false;
    args.map(move |a| {
        ended |= a == "--";
        let name = |(short, long): &(&str, &str)| {
            let rest = a.to_str()?.strip_prefix(short)?;
            (rest.is_empty() || rest.starts_with('=')).then(|| format!("{long}{rest}").into())
        };
        SHORT.iter().find_map(name).filter(|_| !ended).unwrap_or_else(|| a.clone())
    })
}

/// Converts a panic to an error. The standard library panics if the system refuses a thread, which is
/// reported as out of memory.
fn panicked(text: &str) -> Error {
    if !text.starts_with("failed to spawn thread") {
        return Error::internal(text);
    }
    let (free, total) = halcyon_host::memory().unwrap_or((0, 0));
    Error::OutOfMemory {
        device: "the host".into(),
        what: format!("starting a thread: {text}"),
        requested: 2 << 20,
        free,
        total,
        next: "Raise the limits on memory and threads (ulimit -v, ulimit -u), or give --threads 1".into(),
    }
}

/// Runs the command. Returns its exit code unless an error occurs.
fn run(cli: Cli) -> Result<u8> {
    probe::limit()?;
    halcyon_hal::cache::policy()?;
    cmd::EXTERNAL_LINKS.store(cli.allow_external_links, Ordering::Relaxed);
    cli.command.run()
}

/// Starts logging to stderr, filtered by `HALCYON_LOG` (`info`, `halcyon_hal=debug`).
fn start_log() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_env("HALCYON_LOG").unwrap_or_else(|e| {
        eprintln!("warning: HALCYON_LOG is not understood ({e}); using \"info\"");
        EnvFilter::new("info")
    });
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(driver_output::err);
    // Fails only if a logger is already set, which is not the case.
    let _ = log.try_init();
}
