//! `deepburn predict`: classify texts with a trained classifier.
//!
//! A file is read, classified and written in parts of at most [`PART_TEXTS`] texts, so that memory
//! does not grow with the file. A second thread reads the next part while the current one is
//! classified.
//!
//! The names of columns and the maximum length come from the record of the model, so that texts are
//! read and truncated as in training. Options override them. If the table has labels, the summary
//! shows the accuracy, or the mean absolute error of a regression:
//!
//! ```text
//! texts classified: 1000; accuracy 91.30 % (913 of 1000 with a known label)
//! ```

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use clap::Args;
use deepburn::kernels::RowEncoding;
use deepburn_datasets::{
    DataError, LABEL_FIELD, TEXT_FIELD, TableText, TextColumns, has_column, read_texts,
};

use crate::console;
use crate::data::texts::label_kind;
use crate::failure::Failure;
use crate::job::held_matrices::held_type_parser;
use crate::job::model_folder::{ModelFolder, ModelRecord};
use crate::tools::prediction_summary::PredictionSummary;
use crate::tools::predictions::{OutputColumns, Prediction, PredictionWriter};
use crate::tools::trained_classifier::TrainedClassifier;
use crate::whole_file::is_same_file;

/// Maximum number of texts in a part.
const PART_TEXTS: usize = 1024;
/// A part is also complete if its texts have this many bytes.
const PART_BYTES: usize = 4 << 20;

/// Options of `deepburn predict`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("input").required(true))]
pub(crate) struct PredictArguments {
    /// Folder of a run that trained a classifier, or of its model.
    #[arg(long)]
    model: PathBuf,
    /// Hold the matrices in fewer bits, so that the model takes less memory.
    #[arg(long, value_name = "TYPE", value_parser = held_type_parser(), ignore_case = true)]
    quantize: Option<RowEncoding>,
    /// Text to classify; repeatable.
    #[arg(long, group = "input")]
    text: Vec<String>,
    /// Table of texts to classify: .csv, .json, .jsonl or .parquet; all except .parquet also with
    /// .gz or .zst.
    #[arg(long, group = "input")]
    file: Option<PathBuf>,
    /// Output file, .csv or .jsonl [default: JSON lines on standard output].
    #[arg(long)]
    output: Option<PathBuf>,
    /// Column of the texts [default: from training, else `text`].
    #[arg(long, value_name = "NAME")]
    text_field: Option<String>,
    /// Column of the labels, which is copied to the output [default: from training, else `label`,
    /// if the table has it].
    #[arg(long, value_name = "NAME")]
    label_field: Option<String>,
    /// Another column to copy to the output, such as an id; repeatable.
    #[arg(long, value_name = "NAME", requires = "file")]
    keep: Vec<String>,
    /// Maximum tokens of a text; longer ones are cut [default: from training, else the model's
    /// maximum].
    #[arg(long, value_name = "N")]
    max_length: Option<usize>,
}

/// Classifies texts and writes a row for each.
///
/// # Errors
/// Returns a user's mistake if the model, the table or the output is invalid, or a failure while
/// running. No output file is created then.
pub(crate) fn predict(arguments: &PredictArguments) -> Result<(), Failure> {
    deepburn::start_threads().map_err(Failure::run)?;
    // All inputs are checked before the output is made.
    let folder = ModelFolder::find(&arguments.model, "--model")?;
    check_places(arguments)?;
    let recorded = folder.record.sequence_length.filter(|length| *length > 0);
    let length = arguments.max_length.or(recorded);
    let classifier = TrainedClassifier::open(&folder.path, length, arguments.quantize)?;
    if length.is_none() {
        console::eprint(&format!(
            "texts are cut to the {} tokens that the model supports; without the model's {}, their length in \
             training is unknown (--max-length)",
            classifier.max_length,
            ModelRecord::FILE
        ));
    }
    let columns = columns(arguments, &folder.record, &classifier)?;
    let table = columns.table.clone();
    let writer = PredictionWriter::start(arguments.output.as_deref(), columns)?;
    let summary = PredictionSummary::new(classifier.problem_type);
    let mut run = PredictionRun { classifier, writer, summary };
    match &arguments.file {
        None => {
            let texts = arguments.text.iter().cloned();
            let part =
                texts.map(|text| TableText { text, label: None, copied: Vec::new() }).collect();
            run.classify(part)?;
        }
        Some(path) => {
            thread::scope(|scope| {
                // The channel buffers one part, so that at most three parts are in memory: one is
                // read, one waits in the channel, and one is classified.
                let (sender, parts) = sync_channel(1);
                scope.spawn(move || send_parts(path, &table, &sender));
                run.classify_all(parts)
            })?;
        }
    }
    run.writer.finish()?;
    if arguments.file.is_some() {
        console::eprint(&run.summary.line());
    }
    Ok(())
}

/// Refuses an output that would overwrite the table, because its other columns would be lost.
///
/// # Errors
/// Returns a user's mistake if input and output are the same file.
fn check_places(arguments: &PredictArguments) -> Result<(), Failure> {
    let (Some(file), Some(output)) = (&arguments.file, &arguments.output) else { return Ok(()) };
    match is_same_file(file, output) {
        true => Err(Failure::mistake(format!(
            "--output: {} is also the input; give another file",
            output.display()
        ))),
        false => Ok(()),
    }
}

/// Returns the columns to read and to write.
///
/// The label column of the run is optional, because tables to classify often have no labels. A
/// label column from the command line is required. If classes have no names, their numbers are
/// shown.
fn columns(
    arguments: &PredictArguments,
    record: &ModelRecord,
    classifier: &TrainedClassifier,
) -> Result<OutputColumns, Failure> {
    let text = arguments.text_field.as_deref().or(record.text_field.as_deref());
    let text = text.unwrap_or(TEXT_FIELD).to_owned();
    let label = match (&arguments.label_field, &arguments.file) {
        (Some(name), Some(_)) => Some(name.clone()),
        (None, Some(path)) => {
            let name = record.label_field.as_deref().unwrap_or(LABEL_FIELD);
            has_column(path, name).then(|| name.to_owned())
        }
        (_, None) => None,
    };
    let class = |class: usize| match classifier.name(class) {
        Some(name) => name.to_owned(),
        None => class.to_string(),
    };
    let classes = (0..classifier.limits.num_classes).map(class).collect();
    let kind = label_kind(classifier.problem_type);
    let table = TextColumns { text, label, kind, copied: arguments.keep.clone() };
    Ok(OutputColumns {
        table,
        problem_type: classifier.problem_type,
        classes,
        are_numbers: classifier.name(0).is_none(),
    })
}

/// A part of the table's rows, or the error that ended reading.
type Part = Result<Vec<TableText>, DataError>;

/// Reads the table part by part, until its end or until the receiver is dropped.
///
/// If reading fails, the error is sent as the last part.
fn send_parts(path: &Path, columns: &TextColumns, parts: &SyncSender<Part>) {
    let (mut part, mut bytes) = (Vec::new(), 0);
    let outcome = read_texts(path, columns, &mut |row| {
        bytes += row.text.len();
        part.push(row);
        // There are two limits, because a part may have many short texts or few long ones.
        if part.len() < PART_TEXTS && bytes < PART_BYTES {
            return true;
        }
        bytes = 0;
        parts.send(Ok(std::mem::take(&mut part))).is_ok()
    });
    // If the receiver was dropped, classification has already failed.
    let _ = match outcome {
        Ok(()) => parts.send(Ok(part)),
        Err(error) => parts.send(Err(error)),
    };
}

/// A classifier, and where its predictions go.
struct PredictionRun {
    classifier: TrainedClassifier,
    writer: PredictionWriter,
    summary: PredictionSummary,
}

impl PredictionRun {
    /// Classifies and writes all parts.
    ///
    /// # Errors
    /// Returns a failure if a part cannot be read or classified, or if the table has no rows.
    fn classify_all(&mut self, parts: Receiver<Part>) -> Result<(), Failure> {
        for part in parts {
            if !self.classify(part.map_err(Failure::mistake)?)? {
                return Ok(());
            }
        }
        match self.summary.texts {
            0 => Err(Failure::mistake("--file: the table has no rows; give a table with texts")),
            _ => Ok(()),
        }
    }

    /// Classifies and writes a part. Returns whether the output is still open.
    ///
    /// # Errors
    /// Returns a failure if a text cannot be tokenized, if logits are not finite, or if the output
    /// cannot be written.
    fn classify(&mut self, part: Vec<TableText>) -> Result<bool, Failure> {
        if part.is_empty() {
            return Ok(true);
        }
        let texts: Vec<&str> = part.iter().map(|row| row.text.as_str()).collect();
        let found = self.classifier.predict(&texts)?;
        for (row, outputs) in part.into_iter().zip(found) {
            self.summary.count(row.label.as_deref(), &outputs, &self.classifier);
            if !self.writer.write(&Prediction { row, outputs })? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
