//! Translates RE2 patterns for Rust's regex engine, whose syntax is nearly the same.

use std::iter::Peekable;
use std::str::Chars;

/// Why a pattern cannot be compiled.
#[derive(Debug, PartialEq)]
pub(super) enum PatternError {
    /// Not a valid RE2 pattern.
    Invalid(String),
    /// A valid pattern with a feature that the engine lacks.
    Unsupported(String),
}

/// Compiles a pattern to match whole strings. Matching takes time linear in the string's length.
pub(super) fn compile(re2: &str) -> Result<regex::Regex, PatternError> {
    let own = translate(re2)?;
    let build = |p: &str| {
        regex::RegexBuilder::new(p).octal(true).size_limit(1 << 24).build().map_err(|e| match e {
            regex::Error::CompiledTooBig(n) => {
                PatternError::Unsupported(format!("its compiled form takes more than {n} bytes"))
            }
            e => PatternError::Invalid(e.to_string().replace('\n', " ")),
        })
    };
    // The pattern is first compiled alone, so that an unbalanced parenthesis cannot close the group that is
    // added around it.
    build(&own)?;
    build(&format!(r"\A(?:{own})\z"))
}

/// The classes that RE2 limits to ASCII, as the contents of a bracket expression.
fn ascii(c: char) -> Option<&'static str> {
    Some(match c.to_ascii_lowercase() {
        'd' => "0-9",
        'w' => "0-9A-Za-z_",
        's' => r"\t\n\x0c\r ",
        _ => return None,
    })
}

/// Rewrites the pattern where RE2's syntax and the engine's differ.
fn translate(re2: &str) -> Result<String, PatternError> {
    let mut out = String::with_capacity(re2.len() * 2);
    let mut rest = re2.chars().peekable();
    // Whether the position is inside brackets, and at their first character.
    let (mut class, mut first) = (false, false);
    while let Some(c) = rest.next() {
        let was_first = std::mem::replace(&mut first, false);
        match c {
            '\\' => escape(&mut out, &mut rest, class)?,
            '[' if !class => {
                out.push('[');
                class = true;
                first = true;
                if rest.next_if_eq(&'^').is_some() {
                    out.push('^');
                }
            }
            '[' if rest.peek() == Some(&':') => {
                // Copies `[:alpha:]` up to its end.
                out.push('[');
                while let Some(c) = rest.next() {
                    out.push(c);
                    if c == ':' && rest.peek() == Some(&']') {
                        out.push(']');
                        rest.next();
                        break;
                    }
                }
            }
            // Escapes a bracket at the start of a class, and characters that only Rust's engine treats as
            // operators in a class.
            ']' if was_first => out.push_str(r"\]"),
            '[' | '&' | '~' if class => {
                out.push('\\');
                out.push(c);
            }
            ']' if class => {
                out.push(']');
                class = false;
            }
            c => out.push(c),
        }
    }
    Ok(out)
}

fn escape(out: &mut String, rest: &mut Peekable<Chars<'_>>, class: bool) -> Result<(), PatternError> {
    let Some(c) = rest.next() else {
        return Err(PatternError::Invalid("it ends with a backslash".into()));
    };
    match c {
        'd' | 'w' | 's' | 'D' | 'W' | 'S' => {
            let inside = ascii(c).unwrap_or("");
            match (c.is_ascii_uppercase(), class) {
                (false, true) => out.push_str(inside),
                (false, false) => out.push_str(&format!("[{inside}]")),
                (true, _) => out.push_str(&format!("[^{inside}]")),
            }
        }
        'b' if !class => out.push_str(r"(?-u:\b)"),
        'B' if !class => return Err(PatternError::Unsupported(r"\B".into())),
        'C' => return Err(PatternError::Unsupported(r"\C".into())),
        'Q' => {
            let mut literal = String::new();
            while let Some(c) = rest.next() {
                if c == '\\' && rest.next_if_eq(&'E').is_some() {
                    break;
                }
                literal.push(c);
            }
            out.push_str(&regex::escape(&literal));
        }
        // In Rust's engine, `\<` and `\>` are word boundaries.
        '<' | '>' => out.push(c),
        c => {
            out.push('\\');
            out.push(c);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, text: &str) -> bool {
        compile(pattern).unwrap().is_match(text)
    }

    #[test]
    fn whole_strings_match() {
        assert!(matches("a|bc", "bc"));
        assert!(!matches("a|bc", "abc"));
        assert!(!matches("a", "a\n"));
        assert!(!matches("a$", "a\n"));
        assert!(matches("", ""));
        assert!(matches("a.c", "aéc"));
        assert!(!matches("a.c", "a\nc"));
        assert!(matches("(?s)a.c", "a\nc"));
        assert!(matches("(?i)straße", "STRAßE"));
    }

    #[test]
    fn classes_are_ascii_as_in_re2() {
        assert!(matches(r"\d+", "12"));
        assert!(!matches(r"\d", "٣"));
        assert!(!matches(r"\w", "é"));
        assert!(matches(r"\W", "é"));
        assert!(matches(r"[\w.]+", "a_b.c"));
        assert!(matches(r"[^\W\d]+", "ab_"));
        assert!(!matches(r"[^\W\d]+", "a1"));
        assert!(matches(r".*\bé", "aé"));
        assert!(matches(r"\pL\p{Greek}", "éα"));
    }

    #[test]
    fn character_classes_follow_re2() {
        assert!(matches(r"[[a]+", "[a"));
        assert!(matches(r"[]a]+", "]a"));
        assert!(matches(r"[^]a]+", "bc"));
        assert!(matches(r"[a&&b]+", "&ab"));
        assert!(matches(r"[[:alpha:]~]+", "a~"));
        assert!(matches(r"\Qa.b[\E+", "a.b[["));
        assert!(matches(r"\<a\>", "<a>"));
        assert!(matches(r"\x{e9}\101", "éA"));
    }

    #[test]
    fn invalid_patterns_are_errors() {
        for p in ["a)|(b", "(", "[a", "a\\", "(?=a)", r"(a)\1x\k", "*"] {
            assert!(matches!(compile(p), Err(PatternError::Invalid(_))), "{p}");
        }
        assert!(matches!(compile(r"\C"), Err(PatternError::Unsupported(_))));
        assert!(matches!(compile(r"(?:\w{1000}){1000}"), Err(PatternError::Unsupported(_))));
    }
}
