//! Recognizes folders of other programs, so that the error can say what to do with them.

use std::path::Path;

use crate::{CheckpointError, disk};

/// Returns an error that names the program that wrote the folder; `None` if it is not recognized.
pub(crate) fn explain(folder: &Path) -> Option<CheckpointError> {
    // A folder that cannot be read is not recognized; the caller has its own error for it.
    let names = disk::names(folder).ok()?;
    let found = looks_like(&names)?;
    Some(CheckpointError::Foreign { path: folder.to_owned(), found: found.to_owned() })
}

/// Returns what the files look like and what to do with them, for the end of an error message;
/// `None` if no name is recognized. Names are enough: the content is not read.
fn looks_like(names: &[String]) -> Option<&'static str> {
    let any = |test: fn(&str) -> bool| names.iter().any(|name| test(name));
    if any(|name| name.ends_with("_model_states.pt") || name.ends_with("_optim_states.pt"))
        || any(|name| name.starts_with("global_step"))
    {
        Some(
            "one of DeepSpeed; resume from it with finetune --resume FOLDER or \
             Engine::load_deepspeed_checkpoint",
        )
    } else if any(|name| name.ends_with(".distcp")) {
        Some(
            "one of PyTorch's distributed checkpoints; make weights of it with torch.distributed.\
             checkpoint.format_utils, and start from them as a pretrained model",
        )
    } else if any(|name| name.starts_with("pytorch_model") || name.starts_with("model-0"))
        || any(|name| name == "model.safetensors" || name == "config.json")
    {
        Some("weights in Hugging Face's layout; start from them as a pretrained model instead")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_told_apart() {
        let cases = [
            (&["mp_rank_00_model_states.pt"][..], "DeepSpeed"),
            (&["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed"),
            (&["global_step10", "latest", "zero_to_fp32.py"], "DeepSpeed"),
            (&["__0_0.distcp", ".metadata"], "PyTorch"),
            (&["config.json", "model.safetensors"], "Hugging Face"),
            (&["model-00001-of-00002.safetensors"], "Hugging Face"),
            (&["pytorch_model.bin"], "Hugging Face"),
        ];
        for (files, whose) in cases {
            let folder = tempfile::tempdir().unwrap();
            for file in files {
                std::fs::write(folder.path().join(file), "").unwrap();
            }
            let error = explain(folder.path()).unwrap().to_string();
            assert!(error.contains(whose), "{error}");
        }
        assert!(explain(tempfile::tempdir().unwrap().path()).is_none());
        assert!(explain(Path::new("/nowhere")).is_none());
    }
}
