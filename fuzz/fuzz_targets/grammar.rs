//! Fuzz target: grammars in GBNF and Lark; some tokens of a text that matches are chosen.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| halcyon_fuzz::language::grammar(data));
