//! `halcyon help`, `halcyon completions` and `halcyon man`.

use crate::args::{CompletionsArgs, HelpArgs, ManArgs, command};
use crate::environment::{Group, VARIABLES};
use crate::report;
use halcyon::{Error, Result};
use std::path::Path;

pub(crate) fn main(a: &HelpArgs) -> Result<u8> {
    if let [topic] = &a.of[..]
        && topic == "environment"
    {
        report::print(&environment())?;
        return Ok(0);
    }
    let mut c = command();
    c.build();
    let mut at = &mut c;
    for (depth, name) in a.of.iter().enumerate() {
        let known: Vec<String> =
            at.get_subcommands().filter(|s| !s.is_hide_set()).map(|s| s.get_name().to_string()).collect();
        at = at.find_subcommand_mut(name).filter(|s| !s.is_hide_set()).ok_or_else(|| {
            let known = match known.is_empty() {
                true => format!("`halcyon {}` has no commands of its own", a.of[..depth].join(" ")),
                false if depth > 0 => format!("expected one of {}", known.join(", ")),
                false => format!("expected one of {}, or the topic environment", known.join(", ")),
            };
            Error::argument("help", format!("\"{name}\" is not a command: {known}"))
        })?;
    }
    report::print(&at.render_long_help().to_string())?;
    Ok(0)
}

/// Formats every variable with its values and meaning.
pub(crate) fn environment() -> String {
    let mut out = String::from(
        "Environment variables that halcyon reads. An option on the command line overrides a variable, and a variable overrides the configuration file.\n",
    );
    out = report::wrap(&out, "", "");
    for (group, title) in [
        (Group::User, "Settings"),
        (Group::Library, "Libraries: the path or name of a shared library, used instead of the usual ones"),
        (Group::System, "Variables of the system"),
        (Group::Development, "Tests and tools of the repository"),
    ] {
        out += &format!("\n{title}:\n");
        for v in VARIABLES.iter().filter(|v| v.group == group) {
            out += &format!("  {}={}\n", v.name, v.values);
            out += &report::wrap(v.meaning, "      ", "      ");
        }
    }
    out
}

pub(crate) fn completions(a: &CompletionsArgs) -> Result<u8> {
    let mut script = vec![];
    clap_complete::generate(a.shell, &mut command(), "halcyon", &mut script);
    let script = String::from_utf8(script).map_err(|e| Error::internal(e.to_string()))?;
    report::print(&script)?;
    Ok(0)
}

pub(crate) fn man(a: &ManArgs) -> Result<u8> {
    let io =
        |path: &Path, e: std::io::Error| Error::Io { path: path.display().to_string(), what: e.to_string() };
    let Some(dir) = &a.dir else {
        let mut page = vec![];
        let made = clap_mangen::Man::new(command()).render(&mut page);
        made.map_err(|e| Error::internal(e.to_string()))?;
        report::print(&String::from_utf8(page).map_err(|e| Error::internal(e.to_string()))?)?;
        return Ok(0);
    };
    std::fs::create_dir_all(dir).map_err(|e| io(dir, e))?;
    clap_mangen::generate_to(command(), dir).map_err(|e| io(dir, e))?;
    report::print(&format!("manual pages are in {}\n", dir.display()))?;
    Ok(0)
}
