//! The examples of language models, with small models.

#[path = "../../../examples/05_chat.rs"]
#[allow(dead_code, reason = "its main is not called")]
mod chat;
#[path = "../../../examples/06_embed.rs"]
#[allow(dead_code, reason = "its main is not called")]
mod embed;
#[path = "../../../examples/07_lora.rs"]
#[allow(dead_code, reason = "its main is not called")]
mod lora;

use halcyon::prelude::*;
use halcyon_models::{
    Engine, EngineOptions, GenerateOptions, Generator, Lora, LoraOptions, ModelFile, Sampling,
};
use halcyon_test::models;
use halcyon_text::ChatTemplate;
use std::sync::Arc;

#[test]
fn a_chat_streams_its_answers_and_keeps_them() {
    let Some(dir) = models("a_chat_streams_its_answers_and_keeps_them", "stories260k") else { return };
    let b = Backend::cpu().expect("the CPU");
    let file = ModelFile::open(&dir).expect("a model");
    let decoder = Arc::new(file.load(&b, 256).expect("the weights load"));
    let options = EngineOptions { positions: 256, ..EngineOptions::default() };
    let engine = Engine::new(decoder, options).expect("an engine");
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let template = ChatTemplate::new(template).expect("a template");
    let mut g = Generator::new(engine, file.tokenizer().expect("it is valid"), Some(template));
    let options = GenerateOptions {
        max_tokens: Some(8),
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        ..GenerateOptions::default()
    };
    let (input, mut out) = ("Once upon a time\nand then\n\nnever read\n", vec![]);
    let all = chat::chat(&mut g, Some("Stories"), input.as_bytes(), &mut out, &options).expect("a chat");
    let roles: Vec<&str> = all.iter().map(|m| m.role.as_str()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    let answers: Vec<&str> = [2, 4].iter().filter_map(|i| all[*i].content.as_str()).collect();
    assert!(answers.iter().all(|a| !a.is_empty()), "{answers:?}");
    assert_eq!(String::from_utf8(out).expect("UTF-8"), format!("{}\n{}\n", answers[0], answers[1]));
    // The answer is the one that the whole chat gives at once.
    let again = g.chat(&all[..2], &options).expect("an answer");
    assert_eq!(again.text, answers[0]);
}

#[test]
fn a_search_finds_the_text_itself() {
    let Some(dir) = models("a_search_finds_the_text_itself", "stories260k") else { return };
    let b = Backend::cpu().expect("the CPU");
    let texts = ["The cat sat on the mat.", "Tim had a red ball.", "It was a sunny day."];
    let model = embed::open(&dir, &b).expect("an embedder");
    let mut index = embed::Index::new(model, texts.map(String::from).to_vec()).expect("an index");
    for text in texts {
        let found = index.search(text, 2).expect("texts");
        assert_eq!((found.len(), found[0].1), (2, text));
        assert!((found[0].0 - 1.0).abs() < 1e-4 && found[0].0 > found[1].0, "{found:?}");
    }
}

#[test]
fn training_a_lora_teaches_a_text_and_files_keep_it() {
    let Some(dir) = models("training_a_lora_teaches_a_text_and_files_keep_it", "stories260k") else { return };
    let (b, work) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    let mut model = ModelFile::open(&dir).expect("a model");
    let tokenizer = model.tokenizer().expect("it is valid").expect("it is there");
    let text = "Once upon a time, a robot built a red boat of old metal. ".repeat(6);
    let ids = tokenizer.encode(&text, true, false).expect("tokens");
    let targets = vec!["*_proj".into()];
    let options = LoraOptions { targets, ..LoraOptions::default() };
    let (trained, losses) = lora::train(&b, &model, &ids, &options, 12).expect("adapters");
    assert!(losses[11] < 0.7 * losses[0], "{losses:?}");
    let prompt = "Once upon a time, a";
    let plain = lora::continued(&b, &model, None, prompt).expect("a text");
    let with = lora::continued(&b, &model, Some(&trained), prompt).expect("a text");
    assert_ne!(plain, with);
    let folder = work.path().join("adapter");
    trained.save(&folder, "stories260k").expect("written");
    let read = Lora::load(&folder, &model, &b).expect("adapters");
    assert_eq!(lora::continued(&b, &model, Some(&read), prompt).expect("a text"), with);
    let merged = work.path().join("merged.gguf");
    lora::export(&mut model, &read, &merged).expect("written");
    let merged = ModelFile::open(&merged).expect("a model");
    assert_eq!(lora::continued(&b, &merged, None, prompt).expect("a text"), with);
    assert!(lora::train(&b, &model, &ids[..20], &options, 1).is_err());
}
