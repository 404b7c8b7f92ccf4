//! The step `readme`: what README.md tells a new user to run.

use crate::report::{Outcome, run, run_watching};
use crate::test::Context;

/// Runs the first command of the README unchanged, and then with the names of the classes. The first digit
/// that the command names must be the digit of the sample image.
pub(crate) fn step(context: &Context) -> Outcome {
    let path = crate::root().join("README.md");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) => return Outcome::Failed(format!("README.md: {e}")),
    };
    let Some(line) = first_command(&text) else {
        return Outcome::Failed("README.md has no line that starts with `cargo run --release`".into());
    };
    let words: Vec<&str> = line.split_whitespace().skip(1).collect();
    if let Err(why) = run(context.cargo().args(&words)) {
        return Outcome::Failed(why);
    }
    let mut first = None;
    let names = ["--labels", "models/digits-labels.txt"];
    let result = run_watching(context.cargo().args(&words).args(names), |line| {
        first = first.take().or_else(|| digit_named(line).map(str::to_string));
    });
    match (result, first.as_deref()) {
        (Err(why), _) => Outcome::Failed(why),
        (Ok(()), Some("seven")) => Outcome::Passed(line.into()),
        (Ok(()), Some(other)) => {
            Outcome::Failed(format!("`{line}` printed {other} for the picture of a seven"))
        }
        (Ok(()), None) => Outcome::Failed(format!("`{line}` named no digit")),
    }
}

/// The first shell line of a README that runs the program.
fn first_command(text: &str) -> Option<&str> {
    let mut lines = text.lines().map(|line| line.trim_start().trim_start_matches("$ ").trim_end());
    lines.find(|line| line.starts_with("cargo run --release"))
}

/// The first name of a digit in a line.
fn digit_named(line: &str) -> Option<&str> {
    let names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
    line.split(|c: char| !c.is_alphabetic()).find(|word| names.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_first_command() {
        let text = "# Title\n\n```sh\ngit clone x\n$ cargo run --release -- run a.onnx\ncargo run --release -- devices\n```\n";
        assert_eq!(first_command(text), Some("cargo run --release -- run a.onnx"));
        assert_eq!(first_command("nothing"), None);
    }

    #[test]
    fn finds_a_digit_by_name() {
        assert_eq!(digit_named("  1. seven  99.9 %"), Some("seven"));
        assert_eq!(digit_named("backend cpu: nobody asked for one"), Some("one"));
        assert_eq!(digit_named("stone ozone"), None);
    }
}
