//! Damaged, incomplete, mixed and foreign checkpoints: each is refused with an error that names the
//! file, or it has the same values as the intact checkpoint.

use std::fs;
use std::path::{Path, PathBuf};

use deepburn_deepspeed::{Array, DeepSpeedCheckpoint, DeepSpeedError};
use deepburn_fuzz::Mutator;
use tempfile::TempDir;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|it| it.unwrap().path()).collect();
    files.sort();
    files
}

/// Returns the folder of a fixture's only tag.
fn tag(name: &str) -> PathBuf {
    let tag = fs::read_to_string(data(name).join("latest")).unwrap();
    data(name).join(tag)
}

/// Copies a tag's folder to a temporary folder.
fn copy(name: &str) -> TempDir {
    let to = tempfile::tempdir().unwrap();
    for file in files(&tag(name)) {
        fs::copy(&file, to.path().join(file.file_name().unwrap())).unwrap();
    }
    to
}

type Everything = Vec<(String, String, Vec<u32>)>;

/// Returns all metadata and values of a checkpoint.
fn everything(path: &Path) -> Result<Everything, DeepSpeedError> {
    let checkpoint = DeepSpeedCheckpoint::open(path, None)?;
    let says = format!(
        "{} {} {} {:?} {:?} {:?}",
        checkpoint.version(),
        checkpoint.stage(),
        checkpoint.world_size(),
        checkpoint.counters(),
        checkpoint.schedule(),
        checkpoint.loss_scale()
    );
    let mut all = vec![(says, String::new(), vec![])];
    for parameter in checkpoint.parameters() {
        let name = format!("{parameter:?}");
        let moments = checkpoint.moments().iter().filter(|_| parameter.trainable);
        let arrays = moments.map(|name| Array::Moment(name)).chain([Array::Weights]);
        for array in arrays {
            let values = checkpoint.read(&parameter.name, array, 0..parameter.numel())?;
            let bits = values.iter().map(|value| value.to_bits()).collect();
            all.push((name.clone(), format!("{array:?}"), bits));
        }
    }
    Ok(all)
}

fn refused(path: &Path) -> DeepSpeedError {
    // All values would be thousands of lines.
    everything(path).map(drop).unwrap_err()
}

/// Flips random bytes and truncates files. Reading must never panic or return other values.
fn damage(name: &str, rounds: usize, seed: u64) {
    let folder = copy(name);
    let sound = everything(folder.path()).unwrap();
    let mut numbers = Mutator::new(seed);
    let mut unharmed = 0;
    for round in 0..rounds {
        let files = files(folder.path());
        let file = &files[numbers.below(files.len())];
        let bytes = fs::read(file).unwrap();
        let mut damaged = bytes.clone();
        let at = numbers.below(bytes.len());
        if round % 5 == 0 {
            damaged.truncate(at);
        } else {
            damaged[at] ^= 1 + numbers.below(255) as u8;
        }
        fs::write(file, damaged).unwrap();
        match everything(folder.path()) {
            Ok(found) => {
                assert!(found == sound, "{} reads otherwise with byte {at}", file.display());
                unharmed += 1;
            }
            Err(error) => {
                let named = file.file_name().unwrap().to_str().unwrap();
                assert!(error.to_string().contains(named), "{named}: {error}");
            }
        }
        fs::write(file, bytes).unwrap();
    }
    // Damage to names in local headers, to times and to the padding between entries has no effect.
    println!("{name}: {unharmed} of {rounds} damages did no harm");
}

#[test]
fn damages_of_stage_0_are_refused() {
    damage("s0_fp16_fused", 700, 1);
}

#[test]
fn damages_of_stage_2_are_refused() {
    damage("s2_frozen", 700, 2);
}

#[test]
fn damages_of_stage_3_are_refused() {
    damage("s3_frozen", 700, 3);
}

#[test]
fn damages_of_pipelines_are_refused() {
    damage("p3_s0_fp16", 400, 4);
    damage("p3_s1_bf16", 400, 5);
}

#[test]
fn a_flipped_value_is_refused() {
    // The byte is part of the masters of rank 1.
    let folder = copy("s3_fp16");
    let file = folder.path().join("zero_pp_rank_1_mp_rank_00_optim_states.pt");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
    let error = refused(folder.path());
    assert!(matches!(error, DeepSpeedError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("zero_pp_rank_1_mp_rank_00_optim_states.pt"), "{error}");
}

#[test]
fn every_missing_file_is_named() {
    for name in ["s0", "s2", "s3", "s1_bf16", "p2_s1", "p2_s1_frozen", "p3_s1_bf16"] {
        for file in files(&tag(name)) {
            let folder = copy(name);
            // A frozen layer is only in its own file, so the error comes when the model is loaded.
            if name == "p2_s1_frozen" && file.ends_with("layer_01-model_states.pt") {
                continue;
            }
            fs::remove_file(folder.path().join(file.file_name().unwrap())).unwrap();
            let error = refused(folder.path());
            assert!(matches!(error, DeepSpeedError::Missing { .. }), "{name} {error}");
        }
    }
}

/// Copies a checkpoint and replaces files whose names contain `pattern` by the files of another
/// checkpoint.
fn mixed(into: &str, from: &str, pattern: &str) -> TempDir {
    let folder = copy(into);
    for file in files(&tag(from)) {
        let name = file.file_name().unwrap().to_str().unwrap();
        if name.contains(pattern) {
            fs::copy(&file, folder.path().join(name)).unwrap();
        }
    }
    folder
}

#[test]
fn files_of_other_saves_are_refused() {
    // Files of another stage, another number of ranks, another model, and another save with the
    // same layout.
    for (into, from, pattern) in [
        ("s2", "s3", "rank_1_mp_rank_00_optim"),
        ("s3", "s2", "rank_1_mp_rank_00_optim"),
        ("s2_groups", "s2", "rank_1_mp_rank_00_optim"),
        ("s3", "s3_groups", "rank_1_mp_rank_00_model"),
        ("s3", "s3_groups", "rank_1_mp_rank_00_optim"),
        ("s2_groups", "s2_fp16", "mp_rank_00_model"),
        ("s1", "s2_fp16", "rank_1_mp_rank_00_optim"),
        ("one_rank", "s2_elastic", "rank_0_mp_rank_00_optim"),
        ("s0", "s1", "mp_rank_00_optim"),
        ("s1", "s3", "model_states"),
        ("p2_s1", "p3_s1_bf16", "mp_rank_01"),
        ("p2_s1", "p3_s1_bf16", "layer_02"),
        ("p2_s1", "p2_s0", "mp_rank_01_model"),
        ("p2_s0", "p2_s1", "mp_rank_01_model"),
        ("p2_s0", "p2_s1_frozen", "mp_rank_01_model"),
        ("p3_s0_fp16", "p2_s0", "layer_04"),
        ("p2_s0", "s0", "mp_rank_00_model"),
        ("s0", "p2_s0", "layer_"),
    ] {
        let folder = mixed(into, from, pattern);
        let error = refused(folder.path());
        let kind = matches!(
            error,
            DeepSpeedError::Mixed { .. }
                | DeepSpeedError::Layout { .. }
                | DeepSpeedError::Missing { .. }
        );
        assert!(kind, "{into} with {pattern} of {from}: {error}");
    }
}

#[test]
fn masters_that_do_not_match_the_model_are_refused() {
    // Both checkpoints have 3 ranks, stage 2 and 3 steps. Only the order of the flat group differs.
    let folder = mixed("s2_elastic", "s2_round_robin", "optim_states");
    let error = refused(folder.path());
    assert!(matches!(error, DeepSpeedError::Mixed { .. }), "{error}");
    assert!(error.to_string().contains("in the model of"), "{error}");
}

#[test]
fn checkpoints_without_their_frozen_parameters_are_refused() {
    let error = DeepSpeedCheckpoint::open(&data("s2_excluded"), None).unwrap_err();
    assert!(matches!(error, DeepSpeedError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("save it without exclude_frozen_parameters"), "{error}");
}

#[test]
fn foreign_files_are_refused() {
    for (name, found) in [
        ("mp_rank_01_model_states.pt", "another model-parallel rank"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "another model-parallel rank"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "experts"),
        ("other_mp_rank_00_optim_states.pt", "does not contain a rank"),
    ] {
        let folder = copy("one_rank");
        fs::write(folder.path().join(name), "").unwrap();
        let error = refused(folder.path());
        assert!(matches!(error, DeepSpeedError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(found), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
    for (name, found) in [("zero", "universal"), ("offloaded_tensors", "NVMe")] {
        let folder = copy("one_rank");
        fs::create_dir(folder.path().join(name)).unwrap();
        assert!(refused(folder.path()).to_string().contains(found));
    }
}

#[test]
fn two_files_of_one_rank_are_refused() {
    let folder = copy("one_rank");
    let file = folder.path().join("zero_pp_rank_0_mp_rank_00_optim_states.pt");
    fs::copy(&file, folder.path().join("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")).unwrap();
    assert!(matches!(refused(folder.path()), DeepSpeedError::Mixed { .. }));
}

/// The folder may be of another program, whose `latest` is not read into memory: this file would
/// take a terabyte.
#[test]
fn a_latest_that_is_too_large_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = fs::File::create(folder.path().join("latest")).unwrap();
    file.set_len(1 << 40).unwrap();
    assert!(!DeepSpeedCheckpoint::is_one(folder.path()));
    let error = refused(folder.path()).to_string();
    assert!(error.contains("it does not name a tag"), "{error}");
}

#[test]
fn checkpoints_are_found_by_tag_by_latest_and_by_folder() {
    let root = data("one_rank_s3");
    assert!(DeepSpeedCheckpoint::is_one(&root));
    assert!(DeepSpeedCheckpoint::is_one(&root.join("last")));
    assert!(!DeepSpeedCheckpoint::is_one(&data("mini")));
    for (path, tag) in
        [(root.clone(), None), (root.clone(), Some("last")), (root.join("last"), None)]
    {
        let checkpoint = DeepSpeedCheckpoint::open(&path, tag).unwrap();
        assert_eq!(checkpoint.path(), root.join("last"));
    }
    let error = DeepSpeedCheckpoint::open(&root, Some("first")).unwrap_err();
    assert!(error.to_string().contains("no checkpoint `first` here; existing checkpoints: last"));
    let outside = DeepSpeedCheckpoint::open(&root, Some("../one_rank/global_step3"));
    assert!(matches!(outside, Err(DeepSpeedError::Missing { .. })));
    let error = DeepSpeedCheckpoint::open(&data("mini"), None).unwrap_err();
    assert!(error.to_string().contains("name the tag, or its folder"));
}

#[test]
fn missing_parameters_and_ranges_are_refused() {
    let checkpoint = DeepSpeedCheckpoint::open(&data("s3_frozen"), None).unwrap();
    let read = |name: &str, array, range| checkpoint.read(name, array, range).unwrap_err();
    let error = read("other", Array::Weights, 0..1).to_string();
    assert!(error.ends_with("it has no parameter other"), "{error}");
    let error = read("transformer.wpe.weight", Array::Moment("exp_avg"), 0..1).to_string();
    assert!(error.contains("is frozen, so the optimizer has no exp_avg"), "{error}");
    let error = read("transformer.wte.weight", Array::Moment("sum"), 0..1).to_string();
    assert!(error.contains("its arrays are: exp_avg, exp_avg_sq"), "{error}");
    let error = read("transformer.wte.weight", Array::Weights, 0..193).to_string();
    assert!(error.contains("of shape [32, 6] has no elements 0..193"), "{error}");
}
