//! The part of an answer in which a model thinks: `<think> … </think>`. A terminal shows it dimmed, and it
//! can be hidden.

const BEGIN: &str = "<think>";
const END: &str = "</think>";
const DIM: &str = "\u{1b}[2m";
const NORMAL: &str = "\u{1b}[0m";

/// How thoughts are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    Plain,
    Dimmed,
    Hidden,
}

/// Passes the pieces of an answer on, with its thoughts as `shown` says.
pub(super) struct Thoughts {
    shown: Shown,
    inside: bool,
    /// The end of the text so far, which may be the beginning of a mark.
    held: String,
}

impl Thoughts {
    /// `inside` says whether the answer begins with a thought, because the prompt ends with its mark.
    pub(super) fn new(shown: Shown, inside: bool) -> Thoughts {
        Thoughts { shown, inside, held: String::new() }
    }

    /// Whether an answer to `prompt` begins with a thought.
    pub(super) fn begin_in(prompt: &str) -> bool {
        prompt.trim_end().ends_with(BEGIN)
    }

    /// What to print for a piece.
    pub(super) fn push(&mut self, piece: &str) -> String {
        self.held.push_str(piece);
        let mut out = String::new();
        loop {
            let mark = if self.inside { END } else { BEGIN };
            if let Some(at) = self.held.find(mark) {
                let end = at + if self.inside { mark.len() } else { 0 };
                self.show(&self.held[..end], &mut out);
                let rest = if self.inside { end } else { at };
                // The mark itself belongs to the thought.
                let mark = if self.inside { "" } else { mark };
                self.inside = !self.inside;
                self.held = self.held[rest + mark.len()..].to_string();
                if !mark.is_empty() {
                    self.show(mark, &mut out);
                }
                continue;
            }
            let keep = (1..mark.len()).rev().find(|n| self.held.ends_with(&mark[..*n])).unwrap_or(0);
            let rest = self.held.split_off(self.held.len() - keep);
            self.show(&self.held, &mut out);
            self.held = rest;
            return out;
        }
    }

    /// What was held back.
    pub(super) fn finish(&mut self) -> String {
        let mut out = String::new();
        let held = std::mem::take(&mut self.held);
        self.show(&held, &mut out);
        out
    }

    fn show(&self, text: &str, out: &mut String) {
        match (self.inside, self.shown) {
            _ if text.is_empty() => {}
            (true, Shown::Hidden) => {}
            // Each piece ends the style, so that nothing else is dimmed if the program ends.
            (true, Shown::Dimmed) => *out += &format!("{DIM}{text}{NORMAL}"),
            _ => out.push_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(shown: Shown, inside: bool, pieces: &[&str]) -> String {
        let mut t = Thoughts::new(shown, inside);
        let all: String = pieces.iter().map(|p| t.push(p)).collect();
        all + &t.finish()
    }

    #[test]
    fn thoughts_are_dimmed_or_hidden_across_pieces() {
        let pieces = ["a <th", "ink>b", "c</thi", "nk>d <", "e"];
        assert_eq!(run(Shown::Plain, false, &pieces), "a <think>bc</think>d <e");
        assert_eq!(run(Shown::Hidden, false, &pieces), "a d <e");
        let dimmed = run(Shown::Dimmed, false, &pieces);
        assert!(dimmed.starts_with("a \u{1b}[2m<think>\u{1b}[0m\u{1b}[2mb\u{1b}[0m"), "{dimmed:?}");
        assert!(dimmed.ends_with("</think>\u{1b}[0md <e"), "{dimmed:?}");
        // The prompt begins the thought.
        assert!(Thoughts::begin_in("<|assistant|>\n<think>\n"));
        assert_eq!(run(Shown::Hidden, true, &["x", "y</think>", "z"]), "z");
        // A thought that never ends, and a mark that is only begun.
        assert_eq!(run(Shown::Hidden, false, &["a<think>b"]), "a");
        assert_eq!(run(Shown::Hidden, false, &["a<thin"]), "a<thin");
        assert_eq!(run(Shown::Hidden, false, &["<think>a</think><think>b</think>é"]), "é");
    }
}
