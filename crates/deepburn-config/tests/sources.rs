//! A configuration is the same whether it comes from a file, a string, base64 or memory.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE;
use deepburn_config::{ConfigError, RawConfig, RunContext, deepspeed_keys, job_keys, resolve};

const TEXT: &str =
    "{ // per rank\n \"train_micro_batch_size_per_gpu\": 2, \"gradient_clipping\": 5e-1, }";

#[test]
fn every_source_gives_the_same_plan() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    std::fs::write(&path, TEXT).unwrap();
    let value = serde_json::json!({"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5});
    let plans = [
        RawConfig::from_json(TEXT),
        RawConfig::from_file(&path),
        RawConfig::from_argument(path.to_str().unwrap()),
        RawConfig::from_argument(&URL_SAFE.encode(TEXT)),
        RawConfig::from_value(&value),
    ]
    .map(|written| resolve(&written.unwrap(), &RunContext::on_host(3)).unwrap().plan);
    assert_eq!(plans[0].batch.train_batch_size, 6);
    assert!(plans.iter().all(|plan| *plan == plans[0]));
}

#[test]
fn an_argument_that_is_neither_names_both() {
    let error = RawConfig::from_argument("ds_confg.json").unwrap_err();
    assert!(matches!(error, ConfigError::Argument { .. }), "{error}");
    assert!(error.to_string().contains("neither an existing file nor a base64"), "{error}");
    assert!(
        RawConfig::from_argument(&URL_SAFE.encode("{")).unwrap_err().to_string().contains("line 1")
    );
}

#[test]
fn every_key_is_listed_with_its_status() {
    let keys = deepspeed_keys();
    let status = |path: &str| {
        let entry = keys.iter().find(|entry| entry.path == path);
        entry.unwrap_or_else(|| panic!("no {path}")).status.to_string()
    };
    assert_eq!(status("zero_optimization.reduce_bucket_size"), "supported");
    assert_eq!(status("fp16.hysteresis"), "supported");
    assert_eq!(status("fp16.fp16_master_weights_and_grads"), "unsupported: fp16 master weights");
    assert_eq!(status("optimizer.params[AdamW].lr"), "supported");
    assert_eq!(status("aio.block_size"), "supported");
    assert!(status("aio.single_submit").starts_with("no effect"));
    assert!(job_keys().iter().any(|entry| entry.path == "deepspeed.zero_optimization.stage"));
}
