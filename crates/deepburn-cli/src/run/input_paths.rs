//! Refuses inputs of a job that its run would replace or remove.
//!
//! A run writes to fixed places in its output folder. An input in one of them would be lost: the
//! run removes `test.json` of an earlier run at its start, for example, and replaces `model/` at
//! its end.

use std::path::{Path, PathBuf};

use deepburn_config::{CONFIG_FOLDER, Job, JobRequest, Place, SplitPlan, find};

use crate::failure::Failure;
use crate::job::model_folder::{ADAPTER, MODEL, trained_adapter_in};
use crate::run::result_files::{REMOVED, REPLACED};
use crate::whole_file::is_same_file;

/// Checks that the run does not write to the folders of the pretrained model and of the adapter.
/// `pretrained` is the folder of the model itself.
///
/// # Errors
/// Returns a user's mistake that names the folder.
pub(crate) fn check_model_folders(job: &Job, pretrained: Option<&Path>) -> Result<(), Failure> {
    let output = &job.training.output_dir;
    let given = job.model.adapter.as_deref();
    // The adapter of a run is in a subfolder.
    let inner = given.and_then(trained_adapter_in);
    let inputs = [
        ("model.pretrained", pretrained),
        ("model.adapter", given),
        ("model.adapter", inner.as_deref()),
    ];
    for (key, folder) in inputs.into_iter().filter_map(|(key, it)| Some((key, it?))) {
        if is_same_file(folder, output) {
            return Err(Failure::mistake(format!(
                "training.output_dir: {} is the folder of {key}, which the results would be mixed with; give another folder",
                output.display()
            )));
        }
        // Also if this run saves no such folder: it would then ask to remove an earlier run's.
        for name in [MODEL, ADAPTER] {
            let place = output.join(name);
            if is_same_file(folder, &place) {
                return Err(Failure::mistake(format!(
                    "training.output_dir: {} is the folder of {key}, and the place where a run with this output_dir \
                     saves its own {name}; give another folder",
                    place.display()
                )));
            }
        }
    }
    Ok(())
}

/// Checks that the run does not write to the files that it reads: the job file, a DeepSpeed
/// configuration and the data.
///
/// # Errors
/// Returns a user's mistake that names the file.
pub(crate) fn check_input_files(request: &JobRequest, job: &Job) -> Result<(), Failure> {
    let output = &job.training.output_dir;
    for (what, path) in input_files(request, job) {
        let places = REPLACED.iter().chain(&REMOVED).map(|name| output.join(name));
        if let Some(place) = places.into_iter().find(|place| is_same_file(place, &path)) {
            return Err(Failure::mistake(format!(
                "training.output_dir: {} is {what}, which the run would replace by its own file of this name; give \
                 another folder",
                place.display()
            )));
        }
    }
    Ok(())
}

/// Returns the local files and folders that the job reads, and what they are.
fn input_files(request: &JobRequest, job: &Job) -> Vec<(&'static str, PathBuf)> {
    // A missing file has already been reported.
    let folders = [PathBuf::new(), PathBuf::from(CONFIG_FOLDER)];
    let config = find(&request.config, &folders, "file").ok();
    let mut files =
        vec![("the job file", config), ("the file of --deepspeed", request.deepspeed.clone())];
    match &job.data.splits {
        SplitPlan::Shares { path: Some(Place::Local(path)), .. } => {
            files.push(("data.path", Some(path.clone())));
        }
        SplitPlan::Paths { train, eval, test, .. } => files.extend([
            ("data.splits.train", Some(train.clone())),
            ("data.splits.eval", eval.clone()),
            ("data.splits.test", test.clone()),
        ]),
        // The files of a data set are in folders that only the Hub's layout names.
        SplitPlan::Shares { .. } | SplitPlan::Named { .. } => {}
    }
    files.into_iter().filter_map(|(what, path)| Some((what, path?))).collect()
}
