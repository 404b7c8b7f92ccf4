//! Pre-tokenizers: how a text is cut into words before pairs are merged.
//!
//! GGUF names a pre-tokenizer by `tokenizer.ggml.pre`. The patterns and flags are those of llama.cpp, with
//! its deviations from the original tokenizers, because its conversion chose the names.

use halcyon_ir::{Error, Result};
use regex::Regex;

/// A way to cut a text. A list of them is applied one after another, each to the parts that the one before
/// left.
#[derive(Debug)]
enum Cut {
    /// The matches and the text between them. `keep_last` stands for the alternative `\s+(?!\S)`, which the
    /// linear regular expressions used here cannot express: a match that ends in white space leaves its last
    /// character to the next word, unless the character is a line end and `Space` excludes them.
    Pattern(Regex, Space),
    /// Digits in groups of three, counted from the right.
    Thousands,
}

/// Whether a run of white space leaves its last character to the word that follows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Space {
    /// No.
    Whole,
    /// Yes.
    KeepLast,
    /// Yes, unless the run ends in a line end, for patterns with an alternative for line ends.
    KeepLastButLineEnd,
}

/// A pre-tokenizer with the flags that its name implies.
#[derive(Debug)]
pub(crate) struct Pre {
    cuts: Vec<Cut>,
    /// Bytes are written as printable characters in the vocabulary. Otherwise tokens are plain text.
    pub(crate) byte_level: bool,
    /// A word that is a token is not built by merging.
    pub(crate) ignore_merges: bool,
    pub(crate) add_bos: bool,
    /// Spaces are written as ▁.
    pub(crate) escape_space: bool,
    /// A run of line ends that is a token is not built by merging.
    pub(crate) whole_newlines: bool,
    /// The beginning of a text has no default token.
    pub(crate) no_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
const CONTRACTION: &str = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])";
/// The last alternatives of several patterns.
const REST: &str = r"[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+";
const DIGIT: &str = r"\p{N}";
const CHINESE_JAPANESE: &str = "[一-龥\u{3040}-ゟ゠-ヿ]+";
/// White space outside ASCII never matches a literal class in llama.cpp, so it is taken out of each class.
const CHINESE_KOREAN: &str = r"[[一-龥\u{800}-一가-\u{d7ff}]--\s]+";
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ",
    r"Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ\u{1f5f}-\u{1f7d}ᾀ-ᾴᾶ-ᾼ\u{1fbe}ῂ-ῄῆ-ῌῐ-\u{1fd3}ῖ-\u{1fdb}ῠ-Ῥ",
    r"ῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u{2126}ℨ",
    r"\u{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ",
    r"𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
);
const ASIAN: &str = concat!(
    r"[[一-\u{9fff}㐀-\u{4dbf}\u{f900}-\u{faff}\u{3040}-ゟ゠-ヿ･-ﾟ⼀-\u{2fdf}\u{e00}-\u{e7f}\u{e80}-\u{eff}",
    r"\u{1780}-\u{17ff}\u{1000}-\u{109f}\u{aa60}-\u{aa7f}\u{a9e0}-\u{a9ff}가-\u{d7af}\u{1100}-\u{11ff}]--\s]+",
);

/// Names as in GGUF, grouped by what they mean.
const NAMES: &[(&str, &[&str])] = &[
    ("default", &["default"]),
    (
        "llama3",
        &[
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
            "dbrx",
            "smaug-bpe",
            "glm4",
            "chatglm-bpe",
        ],
    ),
    (
        "qwen2",
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
    ),
    ("qwen35", &["qwen35"]),
    (
        "digit+gpt2",
        &["starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
    ),
    (
        "gpt2",
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
        ],
    ),
    ("deepseek-llm", &["deepseek-llm"]),
    ("deepseek-coder", &["deepseek-coder"]),
    ("deepseek-v3", &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"]),
    ("falcon", &["falcon"]),
    ("tekken", &["tekken"]),
    ("gpt-4o", &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"]),
    ("granite-embed", &["granite-embed-multi-97m"]),
    ("tiny_aya", &["tiny_aya", "cohere2moe"]),
    ("poro", &["poro-chat", "bloom", "gpt3-finnish"]),
    ("viking", &["viking"]),
    ("chameleon", &["chameleon"]),
    ("bailingmoe", &["bailingmoe", "bailingmoe2", "llada-moe"]),
    ("seed-coder", &["seed-coder"]),
    ("ufakzeka", &["ufakzeka"]),
    ("afmoe", &["afmoe"]),
    ("laguna", &["laguna"]),
    ("exaone-moe", &["exaone-moe"]),
    ("minicpm5", &["minicpm5"]),
    ("youtu", &["youtu"]),
    ("lines", &["gemma4", "granite-embed-multi-311m", "sarvam-moe"]),
];

/// Names whose words are not merged if they are tokens.
const IGNORE_MERGES: &[&str] = &[
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "tekken",
    "minicpm5",
    "youtu",
    "granite-embed-multi-97m",
];
/// Of those, the ones that do not begin a text with a token.
const NO_BOS: &[&str] = &["minicpm5", "youtu", "granite-embed-multi-97m"];

/// What a name means.
fn group(name: &str) -> Result<&'static str> {
    let Some((group, _)) = NAMES.iter().find(|(_, names)| names.contains(&name)) else {
        let known: Vec<&str> = NAMES.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        return Err(Error::unsupported(
            format!("pre-tokenizer '{name}' (tokenizer.ggml.pre)"),
            format!("Known are {}. Use a model with one of them, or its tokenizer.json", known.join(", ")),
        ));
    };
    Ok(group)
}

impl Pre {
    /// The pre-tokenizer of this name.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an unknown name.
    pub(crate) fn named(name: &str) -> Result<Pre> {
        let group = group(name)?;
        let lines = group == "lines";
        let ignore_merges = IGNORE_MERGES.contains(&name);
        Ok(Pre {
            cuts: cuts(group)?,
            byte_level: !lines,
            ignore_merges,
            add_bos: (ignore_merges && !NO_BOS.contains(&name)) || name == "chameleon",
            escape_space: lines,
            whole_newlines: lines && name != "sarvam-moe",
            no_bos: ["glm4", "chatglm-bpe"].contains(&name),
        })
    }

    /// The patterns of the pre-tokenizer of this name, as `tokenizer.json` has them; `None` if no pattern
    /// cuts like this.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an unknown name.
    pub(crate) fn patterns(name: &str) -> Result<Option<Vec<String>>> {
        let group = group(name)?;
        if THOUSANDS.contains(&group) {
            return Ok(None);
        }
        let minus = Regex::new(r"--([^\]]+)\]").map_err(|e| Error::internal(e.to_string()))?;
        let one = |(p, space): (String, Space)| {
            // Classes without some characters have another notation there.
            let p = minus.replace_all(&p, "&&[^$1]]").into_owned();
            match p.strip_suffix(r"|\s+").filter(|_| space != Space::Whole) {
                Some(p) => format!(r"{p}|\s+(?!\S)|\s+"),
                None => p,
            }
        };
        Ok(Some(patterns(group).into_iter().map(one).collect()))
    }

    /// Calls `word` with each word of the text, in order. The words together are the text.
    pub(crate) fn words<'a>(&self, text: &'a str, word: &mut impl FnMut(&'a str)) {
        cut(&self.cuts, text, word);
    }
}

fn cut<'a>(cuts: &[Cut], text: &'a str, word: &mut impl FnMut(&'a str)) {
    let Some((first, rest)) = cuts.split_first() else {
        if !text.is_empty() {
            word(text);
        }
        return;
    };
    // A closure that holds another one would make the types of the recursion endless, so parts are collected.
    let mut parts = vec![];
    match first {
        Cut::Pattern(pattern, space) => by_pattern(pattern, *space, text, &mut parts),
        Cut::Thousands => thousands(text, &mut parts),
    }
    match rest.is_empty() {
        true => parts.into_iter().for_each(word),
        false => parts.into_iter().for_each(|p| cut(rest, p, word)),
    }
}

fn by_pattern<'a>(pattern: &Regex, space: Space, text: &'a str, parts: &mut Vec<&'a str>) {
    let (mut at, mut done) = (0, 0);
    while let Some(m) = pattern.find_at(text, at) {
        let mut end = m.end();
        if space != Space::Whole && end < text.len() {
            let mut back = m.as_str().char_indices();
            if let Some((i, c)) = back.next_back()
                && i > 0
                && c.is_whitespace()
                && !(space == Space::KeepLastButLineEnd && matches!(c, '\r' | '\n'))
            {
                end = m.start() + i;
            }
        }
        if m.start() > done {
            parts.push(&text[done..m.start()]);
        }
        if end > m.start() {
            parts.push(&text[m.start()..end]);
        }
        // No pattern matches the empty text. Should one do so, this still ends.
        at = if end > m.start() { end } else { next_char(text, end) };
        done = end;
        if at > text.len() {
            break;
        }
    }
    if done < text.len() {
        parts.push(&text[done..]);
    }
}

fn next_char(text: &str, at: usize) -> usize {
    at + text[at..].chars().next().map_or(1, char::len_utf8)
}

/// Cuts runs of digits so that all groups but the first have three. As in llama.cpp, the text before a run
/// stays with its first group.
fn thousands<'a>(text: &'a str, parts: &mut Vec<&'a str>) {
    let mut done = 0;
    let mut chars = text.char_indices().peekable();
    while let Some((start, c)) = chars.next() {
        if !c.is_numeric() {
            continue;
        }
        let mut ends = vec![start + c.len_utf8()];
        while let Some((i, c)) = chars.next_if(|&(_, c)| c.is_numeric()) {
            ends.push(i + c.len_utf8());
        }
        for (i, &end) in ends.iter().enumerate() {
            if (ends.len() - 1 - i).is_multiple_of(3) {
                parts.push(&text[done..end]);
                done = end;
            }
        }
    }
    if done < text.len() {
        parts.push(&text[done..]);
    }
}

/// The pattern of Llama 3 and its relatives: letters with one character before them, digits, other characters
/// with line ends after them, white space.
fn llama3(letters: &str, digits: &str, others: &str) -> String {
    format!(r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?{others}|\s*[\r\n]+|\s+")
}

/// The pattern of GPT-4o and its relatives: words that begin with capitals. As in llama.cpp, letters outside
/// ASCII count as both capital and small.
fn cased(letter: &str, after: &str, digits: &str) -> String {
    let (big, small) = (format!("[{letter}--a-z]"), format!("[{letter}--A-Z]"));
    let first = r"[^\r\n\p{L}\p{N}]?";
    format!(r"{first}{big}*{small}+{after}|{first}{big}+{small}*{after}|{digits}| ?{REST}")
}

/// The pattern of DeepSeek V3. `~` is no symbol there in llama.cpp.
fn deepseek3() -> String {
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}[\p{S}--~]]?[\p{L}\p{M}]+"##,
        r"| ?[\p{P}[\p{S}--~]]+[\r\n]*|\s*[\r\n]+|\s+"
    )
    .into()
}

/// The patterns of a group, in the order in which they are applied.
fn patterns(group: &str) -> Vec<(String, Space)> {
    use Space::{KeepLast, KeepLastButLineEnd as Lines, Whole};
    let others = r"[^\s\p{L}\p{N}]+[\r\n]*";
    let qwen2 = || llama3(r"\p{L}+", DIGIT, others);
    let contraction = format!("{CONTRACTION}?");
    match group {
        "llama3" => vec![(llama3(r"\p{L}+", r"\p{N}{1,3}", others), Lines)],
        "qwen2" => vec![(qwen2(), Lines)],
        "qwen35" => vec![(llama3(r"[\p{L}\p{M}]+", DIGIT, r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"), Lines)],
        "digit+gpt2" => vec![(DIGIT.into(), Whole), (GPT2.into(), KeepLast)],
        "gpt2" => vec![(GPT2.into(), KeepLast)],
        "deepseek-llm" => vec![
            (r"[\r\n]".into(), Whole),
            (DEEPSEEK_LETTERS.into(), Whole),
            (r"\s?[!-/:-~！-／：-～‘-‟\u{3001}-。]+".into(), Whole),
            (r"\s+$".into(), Whole),
            (CHINESE_KOREAN.into(), Whole),
            (r"\p{N}+".into(), Whole),
        ],
        "deepseek-coder" => vec![
            (r"[\r\n]".into(), Whole),
            (r"\s?\p{L}+".into(), Whole),
            (r"\s?\p{P}+".into(), Whole),
            (CHINESE_KOREAN.into(), Whole),
            (DIGIT.into(), Whole),
        ],
        "deepseek-v3" => {
            vec![(r"\p{N}{1,3}".into(), Whole), (CHINESE_JAPANESE.into(), Whole), (deepseek3(), Lines)]
        }
        "falcon" => vec![
            (r"[\p{P}$+<=>\^~|`]+".into(), Whole),
            (GPT2.into(), KeepLast),
            ("[0-9][0-9][0-9]".into(), Whole),
        ],
        "tekken" => vec![(cased(r"\p{L}", "", DIGIT), Lines)],
        "gpt-4o" => vec![(cased(r"\p{L}", &contraction, r"\p{N}{1,3}"), Lines)],
        "granite-embed" => vec![(cased(r"[\p{L}\p{M}]", &contraction, r"\p{N}{1,3}"), Lines)],
        "tiny_aya" | "youtu" => {
            let digits = if group == "youtu" { DIGIT } else { r"\p{N}{1,3}" };
            let words = format!(r"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{contraction}|{digits}| ?{REST}");
            let scripts = (group == "youtu").then(|| (YOUTU_SCRIPTS.into(), Whole));
            scripts.into_iter().chain([(words, Lines)]).collect()
        }
        "poro" => vec![(POLISHED.into(), Whole)],
        "viking" => vec![(POLISHED.into(), Whole), (DIGIT.into(), Whole)],
        "chameleon" => vec![
            ("<sentinel:[0-9]+>".into(), Whole),
            ("IMGIMG[A-I]{1,4}Z".into(), Whole),
            (r"[\t\n]|    |  ".into(), Whole),
            (DIGIT.into(), Whole),
            (r"[\p{P}!-/:-@\[-`{-\x7e]".into(), Whole),
            (GPT2.into(), KeepLast),
        ],
        "bailingmoe" => {
            let p = r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}";
            vec![(format!(r"{p}| ?{others}|\s*[\r\n]|\s+"), Lines)]
        }
        "seed-coder" => vec![(llama3(r"\p{L}+", DIGIT, r"[^\s\p{L}\p{N}\r\n]+"), Lines)],
        "ufakzeka" => {
            let p = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}";
            vec![(format!(r"{p}| ?{others}|\s*[\r\n]+|\s+"), Lines)]
        }
        "afmoe" => vec![(ASIAN.into(), Whole), (deepseek3(), Lines)],
        "laguna" => vec![(r"[^\n]+|\n+".into(), Whole), (qwen2(), Lines)],
        "exaone-moe" => {
            let p = format!(r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+");
            vec![(format!(r"{p}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+"), Lines)]
        }
        "minicpm5" => {
            vec![(r"\p{N}{1,3}".into(), Whole), (llama3(r"\p{L}+", r"\p{N}+", others), Lines)]
        }
        "lines" => vec![(r"[^\n]+|\n+".into(), Whole)],
        _ => vec![
            (r"[\p{P}$+<=>\^~|]+".into(), Whole),
            (GPT2.into(), KeepLast),
            (r"\p{N}+".into(), Whole),
            ("[0-9][0-9][0-9]".into(), Whole),
        ],
    }
}

fn cuts(group: &str) -> Result<Vec<Cut>> {
    let compile = |p: &str| Regex::new(p).map_err(|e| Error::internal(format!("pattern of {group}: {e}")));
    let list = patterns(group);
    let mut cuts = list.iter().map(|(p, s)| Ok(Cut::Pattern(compile(p)?, *s))).collect::<Result<Vec<_>>>()?;
    if THOUSANDS.contains(&group) {
        cuts.insert(0, Cut::Thousands);
    }
    Ok(cuts)
}

/// Groups that cut digits from the right first.
const THOUSANDS: &[&str] = &["tiny_aya", "afmoe"];

const POLISHED: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
const YOUTU_SCRIPTS: &str =
    concat!(r"[가-힣ㄱ-ㆎ]+|[[！…“”‘’—：；，、-\u{303f}︰-﹏]--\s]+|[ㄅ-ㄯ]+", r"|[一-龥\u{3040}-ゟ゠-ヿ]+");

#[cfg(test)]
mod tests {
    use super::*;

    fn words(name: &str, text: &str) -> Vec<String> {
        let mut out = vec![];
        Pre::named(name).unwrap().words(text, &mut |w| out.push(w.to_string()));
        assert_eq!(out.concat(), text, "{name}");
        out
    }

    #[test]
    fn every_name_has_patterns_that_lose_no_text() {
        let text =
            "I'LL  say:\t'hello' 1234567 × ½\r\n\r\n  \u{3000}x ÀÉ中文ひらがな가나ñandú e\u{301} a~b ~~\n \n";
        for (_, names) in NAMES {
            for name in *names {
                words(name, text);
                words(name, "");
                words(name, " ");
            }
        }
        for name in IGNORE_MERGES.iter().chain(NO_BOS) {
            Pre::named(name).unwrap();
        }
    }

    #[test]
    fn runs_of_white_space_leave_their_last_character_to_the_next_word() {
        assert_eq!(words("gpt-2", "a   b  "), ["a", "  ", " b", "  "]);
        assert_eq!(words("gpt-2", "a \n\nb"), ["a", " \n", "\n", "b"]);
        assert_eq!(words("llama-bpe", "a \n\n  b"), ["a", " \n\n", " ", " b"]);
        assert_eq!(words("llama-bpe", "12345 I'Ll"), ["123", "45", " I", "'Ll"]);
        assert_eq!(words("qwen2", "12\t\tx"), ["1", "2", "\t", "\tx"]);
        assert_eq!(words("smollm", "x12  3"), ["x", "1", "2", "  ", "3"]);
        assert_eq!(words("gpt-4o", "HelloWORLD's iPhone"), ["Hello", "WORLD's", " i", "Phone"]);
        assert_eq!(words("tiny_aya", "1234567 12345x"), ["1", "234", "567", " ", "12", "345", "x"]);
        assert_eq!(words("gemma4", "a b\n\nc"), ["a b", "\n\n", "c"]);
    }

    #[test]
    fn an_unknown_name_is_an_error_that_lists_the_known_ones() {
        let e = Pre::named("klingon-bpe").unwrap_err();
        assert!(matches!(e, Error::Unsupported { .. }));
        let text = e.to_string();
        assert!(
            text.contains("'klingon-bpe'") && text.contains("llama-bpe") && text.contains("gemma4"),
            "{text}"
        );
    }
}
