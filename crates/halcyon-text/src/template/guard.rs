//! Checks of a template's source that the interpreter does not make: how long an expression may be, and that
//! no namespace contains itself.

use super::NAME;
use halcyon_ir::{Error, Result};

/// Most words, numbers, texts and signs in one tag. The interpreter nests expressions as deep as they are
/// long.
const MAX_TOKENS: usize = 2000;

/// The source in which values are checked before they are put into a namespace. If a namespace could contain
/// itself, printing it would never end.
///
/// # Errors
/// [`Error::Format`] for a tag that is too long.
pub(super) fn prepare(source: &str) -> Result<String> {
    let mut out = String::with_capacity(source.len() + 64);
    let (mut copied, mut at) = (0, 0);
    while let Some(open) = next_tag(source, at) {
        let body = open + 2;
        if source[open..].starts_with("{#") {
            at = source[body..].find("#}").map_or(source.len(), |i| body + i + 2);
            continue;
        }
        let block = source[open..].starts_with("{%");
        let (end, tokens) = scan(source.as_bytes(), body, if block { b"%}" } else { b"}}" });
        if tokens > MAX_TOKENS {
            let line = source[..open].matches('\n').count() + 1;
            let what =
                format!("the tag in line {line} has {tokens} parts, but at most {MAX_TOKENS} are allowed");
            return Err(Error::Format { file: NAME.into(), what });
        }
        at = end;
        if !block {
            continue;
        }
        let inner = source[body..end].trim_start_matches(['-', '+']).trim_end_matches(['-', '+']);
        if inner.trim() == "raw" {
            at = source[end..].find("endraw").map_or(source.len(), |i| end + i);
        } else if let Some((from, to)) = namespace_value(source, inner)? {
            out.push_str(&source[copied..from]);
            out.push('(');
            out.push_str(&source[from..to]);
            out.push_str(")|without_namespaces");
            copied = to;
        }
    }
    out.push_str(&source[copied..]);
    Ok(out)
}

fn next_tag(source: &str, at: usize) -> Option<usize> {
    let bytes = source.as_bytes();
    (at..bytes.len().saturating_sub(1))
        .find(|&i| bytes[i] == b'{' && matches!(bytes[i + 1], b'{' | b'%' | b'#'))
}

/// Where the tag ends, and of how many parts it consists.
fn scan(bytes: &[u8], body: usize, close: &[u8]) -> (usize, usize) {
    let (mut at, mut balance, mut tokens, mut in_word) = (body, 0i64, 0, false);
    while at < bytes.len() {
        if balance == 0 && bytes[at..].starts_with(close) {
            return (at, tokens);
        }
        let b = bytes[at];
        let word = b.is_ascii_alphanumeric() || b == b'_' || !b.is_ascii();
        if !(b.is_ascii_whitespace() || (word && in_word)) {
            tokens += 1;
        }
        in_word = word;
        match b {
            b'(' | b'[' | b'{' => balance += 1,
            b')' | b']' | b'}' => balance -= 1,
            b'"' | b'\'' => {
                at += 1;
                while at < bytes.len() && bytes[at] != b {
                    at += 1 + usize::from(bytes[at] == b'\\');
                }
            }
            _ => {}
        }
        at += 1;
    }
    (bytes.len(), tokens)
}

/// The range of the value, if the tag assigns to a field of a namespace.
fn namespace_value(source: &str, inner: &str) -> Result<Option<(usize, usize)>> {
    let Some(rest) = inner.trim_start().strip_prefix("set") else { return Ok(None) };
    if !rest.starts_with(|c: char| c.is_whitespace() || c == '(') {
        return Ok(None);
    }
    let target = &rest[..rest.find('=').unwrap_or(rest.len())];
    if !target.contains('.') {
        return Ok(None);
    }
    if target.len() < rest.len() {
        let from = rest.as_ptr() as usize - source.as_ptr() as usize + target.len() + 1;
        let to = inner.as_ptr() as usize - source.as_ptr() as usize + inner.len();
        return Ok(Some((from, to)));
    }
    if target.contains('|') {
        let what = "a filter on a block that sets a field of a namespace is not supported";
        return Err(Error::Format { file: NAME.into(), what: what.into() });
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_namespaces_are_checked_and_long_tags_refused() {
        let f = |s: &str| prepare(s).unwrap();
        assert_eq!(f("a{% set n.x = 1 -%}b"), "a{% set n.x =( 1 )|without_namespaces-%}b");
        for same in [
            "{% set n = '%}.' %}{{ {'a': {}} }}",
            "{% raw %}{% set n.x = 1 %}{% endraw %}",
            "{# {% set a.b=1 #}",
            "{%",
        ] {
            assert_eq!(f(same), same);
        }
        assert!(prepare(&format!("{{{{ {{1:{{1:1}}}}{} }}}}", "~1".repeat(2000))).is_err());
        assert!(prepare(&format!("{{{{ '{}' }}}}", "~1".repeat(20_000))).is_ok());
        assert!(prepare("{% set n.x | default(n) %}").is_err());
    }
}
