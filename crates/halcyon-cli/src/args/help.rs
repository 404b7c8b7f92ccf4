//! Builds the help texts from the argument definitions.
//!
//! Each text is written once: as the doc comment of an option or the `after_help` of a command. `--help`
//! shows all of it. `-h` shows only the beginning of an option's text (its first paragraph, or its first
//! sentence if there is one paragraph), omits rare options, and gives one example.

use super::{BackendArgs, Cli, InputArgs};
use clap::builder::StyledStr;
use clap::{Arg, Args, Command, CommandFactory};
use std::path::PathBuf;

#[derive(Args, Debug)]
pub(crate) struct HelpArgs {
    /// A command (`run`, `bench ops`), or `environment` for the environment variables
    #[arg(value_name = "COMMAND|TOPIC")]
    pub of: Vec<String>,
}

#[derive(Args, Debug)]
#[command(after_help = COMPLETIONS)]
pub(crate) struct CompletionsArgs {
    /// Shell that the script is for
    pub shell: clap_complete::Shell,
}

const COMPLETIONS: &str = "\
Bash: run `source halcyon.bash` in ~/.bashrc. Fish: put the script into ~/.config/fish/completions. Zsh: put it into a folder of $fpath, as \
_halcyon. PowerShell: add the command's output to $PROFILE.

Examples:
  halcyon completions bash > halcyon.bash
  halcyon completions fish > halcyon.fish
  halcyon completions zsh > _halcyon";

#[derive(Args, Debug)]
#[command(after_help = MAN)]
pub(crate) struct ManArgs {
    /// Folder to write one page per command to. Without it, the page of `halcyon` is printed
    pub dir: Option<PathBuf>,
}

const MAN: &str = "\
Examples:
  halcyon man > halcyon.1
  halcyon man man1";

/// Options that `-h` omits, in addition to those whose definition has `hide_short_help`.
const RARE: [&str; 56] = [
    "max_iterations",
    "ort_library",
    "allow_external_links",
    "format",
    "seed",
    "image_size",
    "image_mean",
    "image_std",
    "image_layout",
    "may_leave",
    "fallback",
    "matmul_precision",
    "force_precision",
    "memory_pool",
    "without",
    "tuning",
    "tuning_cache",
    "verify_seed",
    "save_replay",
    "receipts",
    "verify",
    "patience",
    "retry",
    "import",
    "export",
    "json_lines",
    "tolerance",
    "cases",
    "within",
    "model_file",
    "chunk",
    "kv_dtype",
    "cache_type_k",
    "cache_type_v",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "activations",
    "gpu_layers",
    "layer_split",
    "cpu_moe",
    "n_cpu_moe",
    "draft",
    "draft_max",
    "lookup",
    "mtp",
    "lora",
    "lora_scaled",
    "typical",
    "samplers",
    "min_p",
    "parallel",
    "prompt_tokens",
    "draw_seed",
    "chat_template",
];

/// The definition of the whole command, with its help texts.
pub(crate) fn command() -> Command {
    let of =
        |args: Command| -> Vec<String> { args.get_arguments().map(|a| a.get_id().to_string()).collect() };
    let groups = [
        ("Input", of(InputArgs::augment_args(Command::new("input")))),
        ("Device", of(BackendArgs::augment_args(Command::new("device")))),
        (
            "Device",
            ["split", "may_leave", "layer_split", "gpu_layers", "cpu_moe", "n_cpu_moe"]
                .map(String::from)
                .to_vec(),
        ),
        ("Output", vec!["json".into(), "json_lines".into()]),
    ];
    finished(Cli::command(), &groups)
}

fn finished(c: Command, groups: &[(&'static str, Vec<String>)]) -> Command {
    let option = |a: Arg| {
        let a = match groups.iter().find(|(_, ids)| ids.iter().any(|i| i == a.get_id().as_str())) {
            Some((heading, _)) if a.get_help_heading().is_none() && !a.is_positional() => {
                a.help_heading(*heading)
            }
            _ => a,
        };
        let a = match RARE.contains(&a.get_id().as_str()) {
            true => a.hide_short_help(true),
            false => a,
        };
        // A number with a sign is a value, and its option says what is wrong with it.
        let a = if a.get_action().takes_values() { a.allow_negative_numbers(true) } else { a };
        match (a.get_help().map(StyledStr::to_string), a.get_long_help()) {
            (Some(text), None) => a.help(first_sentence(&text).to_string()).long_help(text),
            _ => a,
        }
    };
    let c = c.mut_args(option);
    let c = match (c.get_after_help().map(StyledStr::to_string), c.get_after_long_help()) {
        (Some(text), None) => c.after_help(short_notes(&text)).after_long_help(text),
        _ => c,
    };
    c.mut_subcommands(|s| finished(s, groups))
}

/// A sentence ends with a full stop that is followed by a space and a capital or a digit.
fn first_sentence(text: &str) -> &str {
    let ends = text.match_indices(". ").map(|(i, _)| i);
    let mut ends =
        ends.filter(|i| text[i + 2..].starts_with(|c: char| c.is_uppercase() || c.is_ascii_digit()));
    ends.next().map_or(text, |i| &text[..i])
}

/// The first example that fits on a line, and a hint at `--help`.
fn short_notes(text: &str) -> String {
    let example =
        examples(text).find(|e| e.len() <= 76).map_or(String::new(), |e| format!("Example:\n  {e}\n\n"));
    format!("{example}--help says more.")
}

/// The examples of a text: the lines after "Examples:".
pub(crate) fn examples(text: &str) -> impl Iterator<Item = &str> {
    text.lines().skip_while(|l| *l != "Examples:").skip(1).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(c: &Command, path: &str, to: &mut Vec<(String, Command)>) {
        to.push((path.to_string(), c.clone()));
        for s in c.get_subcommands().filter(|s| !s.is_hide_set()) {
            all(s, &format!("{path} {}", s.get_name()), to);
        }
    }

    fn commands() -> Vec<(String, Command)> {
        let (mut c, mut to) = (command(), vec![]);
        c.build();
        all(&c, "halcyon", &mut to);
        to
    }

    #[test]
    fn the_definition_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn sentences_end_where_the_next_begins() {
        assert_eq!(first_sentence("One. Two"), "One");
        assert_eq!(first_sentence("an ONNX .pb file, e.g. one"), "an ONNX .pb file, e.g. one");
        assert_eq!(
            short_notes("All.\n\nExamples:\n  halcyon a\n  halcyon b"),
            "Example:\n  halcyon a\n\n--help says more."
        );
    }

    /// Texts are wrapped only to the terminal's width: no line is broken by hand, and examples fit into 80
    /// columns.
    #[test]
    fn texts_are_wrapped_once_and_examples_fit() {
        for (path, c) in commands() {
            let Some(text) = c.get_after_long_help().map(StyledStr::to_string) else { continue };
            let (notes, _) = text.split_once("Examples:").unwrap_or((&text, ""));
            for p in notes.split("\n\n") {
                assert!(!p.trim().contains('\n'), "{path}: {p}");
            }
            for e in examples(&text) {
                let run = e.starts_with("halcyon ") || e.contains("| halcyon ");
                assert!(run && e.len() <= 78, "{path}: {e}");
            }
        }
    }

    #[test]
    fn short_help_is_short() {
        for (path, mut c) in commands() {
            c = c.term_width(80);
            let text = c.render_help().to_string();
            let lines = text.lines().count();
            assert!(lines <= 60, "{path} -h has {lines} lines:\n{text}");
            let long = c.render_long_help().to_string();
            assert!(long.len() >= text.len(), "{path}");
            for a in c.get_arguments().filter(|a| !a.is_hide_set()) {
                assert!(a.get_help().is_some(), "{path}: {} has no help", a.get_id());
            }
        }
    }

    /// Every option of [`RARE`] exists in some command.
    #[test]
    fn rare_options_exist() {
        let all: Vec<String> = commands()
            .iter()
            .flat_map(|(_, c)| c.get_arguments().map(|a| a.get_id().to_string()).collect::<Vec<_>>())
            .collect();
        for r in RARE {
            assert!(all.iter().any(|a| a == r), "{r}");
        }
    }
}
