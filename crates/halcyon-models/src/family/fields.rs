//! Tests that fields of configurations take effect or are refused by name.

use super::from_config;
use crate::spec::Spec;
use halcyon::ir::error::{Error, Result};
use serde_json::{Value, json};
use std::path::Path;

/// The stored configuration of a family, with other values; null removes a field.
fn with(family: &str, changes: &Value) -> Result<Spec> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(family);
    let text = std::fs::read(dir.join("config.json")).expect("a configuration");
    let mut config: Value = serde_json::from_slice(&text).expect("JSON");
    for (key, v) in changes.as_object().expect("fields") {
        config[key] = v.clone();
    }
    from_config(&config, &dir)
}

#[test]
fn fields_take_effect() {
    let cases = [
        ("qwen2", json!({"hidden_act": "relu"})),
        ("qwen3", json!({"hidden_act": "gelu"})),
        ("qwen3_moe", json!({"hidden_act": "gelu"})),
        ("qwen3_moe", json!({"use_sliding_window": true, "sliding_window": 4, "max_window_layers": 99})),
        ("mixtral", json!({"hidden_act": "gelu"})),
        ("phi3", json!({"hidden_act": "gelu"})),
        ("glm4_moe", json!({"hidden_act": "gelu"})),
        ("glm4_moe", json!({"norm_topk_prob": false})),
        ("deepseek_v2", json!({"hidden_act": "gelu"})),
        ("deepseek_v3", json!({"hidden_act": "gelu"})),
        ("olmo2", json!({"hidden_act": "gelu"})),
        ("granite", json!({"hidden_act": "gelu"})),
        ("smollm3", json!({"hidden_act": "gelu"})),
        ("cohere2", json!({"hidden_act": "gelu"})),
        ("cohere2", json!({"layer_types": null, "sliding_window_pattern": 3})),
        ("gpt2", json!({"scale_attn_weights": false})),
        ("smollm3", json!({"layer_types": null, "use_sliding_window": true, "sliding_window": 4})),
    ];
    for (family, changes) in cases {
        let before = with(family, &json!({})).expect("a valid configuration");
        let after = with(family, &changes).unwrap_or_else(|e| panic!("{family} {changes}: {e}"));
        assert_ne!(format!("{before:?}"), format!("{after:?}"), "{family} {changes}");
    }
}

#[test]
fn what_is_absent_has_the_values_of_transformers() {
    let spec = |f, c: Value| format!("{:?}", with(f, &c).expect("a valid configuration"));
    let rope = json!({"rope_type": "default", "rope_theta": 1e4});
    let half = json!({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5});
    let old = json!({"rope_parameters": null, "rope_scaling": null, "rope_theta": 1e4});
    let old_half = json!({"rope_parameters": null, "rope_theta": 1e4, "partial_rotary_factor": 0.5});
    let of = |r: &Value| spec("glm4_moe", json!({"rope_parameters": r, "partial_rotary_factor": null}));
    assert_eq!(of(&rope), of(&half));
    assert_eq!(spec("glm4_moe", old), spec("glm4_moe", old_half));
    assert_eq!(
        spec("glm4_moe", json!({"norm_topk_prob": null})),
        spec("glm4_moe", json!({"norm_topk_prob": true}))
    );
    // Llama's own models have no window.
    assert_eq!(spec("llama", json!({"sliding_window": 4})), spec("llama", json!({})));
}

#[test]
fn what_is_not_supported_is_named() {
    let long = json!({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0],
        "original_max_position_embeddings": 16});
    let apart = json!({"full_attention": {"rope_type": "default", "rope_theta": 1e4}});
    let cases = [
        ("qwen3_5", json!({"hidden_act": "gelu"}), "hidden_act"),
        ("granitemoehybrid", json!({"hidden_act": "gelu"}), "hidden_act"),
        ("qwen2", json!({"hidden_act": "mish"}), "mish"),
        ("gemma3", json!({"layer_types": ["chunked_attention"]}), "chunked_attention"),
        ("cohere2", json!({"layer_types": ["full_attention"]}), "layer_types"),
        ("llama", json!({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}), "mrope"),
        ("llama", json!({"rope_parameters": apart}), "rope_parameters"),
        ("llama", json!({"rope_parameters": long}), "factors"),
        ("llama", json!({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}), "Linear"),
    ];
    for (family, changes, named) in cases {
        let e = with(family, &changes).expect_err(&format!("{family} {changes}"));
        assert!(e.to_string().contains(named), "{family} {changes}: {e}");
        assert!(!matches!(e, Error::Internal(_)), "{e}");
    }
}
