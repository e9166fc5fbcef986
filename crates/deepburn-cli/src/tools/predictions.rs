//! Writes predictions as rows of a file or to standard output.
//!
//! Main type: [`PredictionWriter`]. It writes a file under a temporary name and renames it at the
//! end, so that an existing file is unchanged if writing fails.
//!
//! A row has the columns of the input, then the prediction, then the probability of each class. In
//! CSV these are `predicted_label`, `predicted_class`, `probability` and one `probability_CLASS`
//! per class. In JSON lines the probabilities are one object. With several labels for each text,
//! `predicted_labels` is a list, which is JSON text in CSV. A regression has `predicted_value`, or
//! with several numbers for each text one `predicted_value_NAME` for each:
//!
//! ```text
//! {"text": "a joy", "id": "007", "predicted_label": "good", "predicted_class": 1, "probability": 0.75,
//!  "probabilities": {"bad": 0.25, "good": 0.75}}
//! {"text": "It crashed", "predicted_labels": ["bug"], "probabilities": {"billing": 0.1, "bug": 0.9}}
//! {"text": "a joy", "predicted_value": 4.25}
//! {"text": "a joy", "predicted_values": {"plot": 4.25, "music": 3.5}}
//! ```

use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::Path;

use deepburn_datasets::{TableText, TextColumns};
use deepburn_files::PartialFile;
use deepburn_models::hf::ProblemType;
use serde_json::{Map, Value, json};

use crate::failure::Failure;
use crate::tools::trained_classifier::{likeliest, likely};

/// A row of the input with its prediction.
#[derive(Debug)]
pub(crate) struct Prediction {
    /// The text, its label and the columns to copy.
    pub(crate) row: TableText,
    /// The probabilities of all classes, or the predicted numbers.
    pub(crate) outputs: Vec<f64>,
}

/// The columns of the output.
///
/// Columns of the input keep their names. If two columns have the same name, it is an error.
/// Renaming one of them would make the output ambiguous.
#[derive(Debug, Clone)]
pub(crate) struct OutputColumns {
    /// Columns of the input, which come first.
    pub(crate) table: TextColumns,
    /// What the model predicts.
    pub(crate) problem_type: ProblemType,
    /// Name or number of each class, or of each predicted number.
    pub(crate) classes: Vec<String>,
    /// Whether classes have no names.
    pub(crate) are_numbers: bool,
}

/// Writes predictions, one row each.
///
/// The columns are checked when the writer starts, so that invalid ones are reported before a text
/// is classified.
pub(crate) struct PredictionWriter {
    /// Names of the columns.
    columns: OutputColumns,
    /// Format and destination of the rows.
    sink: OutputSink,
    /// The file to rename at the end.
    file: Option<PartialFile>,
}

/// Format and destination of the rows.
enum OutputSink {
    /// A CSV file with a header.
    Csv(Box<csv::Writer<BufWriter<File>>>),
    /// A file with one JSON object per line.
    JsonLines(BufWriter<File>),
    /// JSON objects on standard output.
    Screen(io::Stdout),
}

impl PredictionWriter {
    /// Starts the output file `output`, a `.csv` or `.jsonl` file. Without a file, rows are JSON
    /// objects on standard output.
    ///
    /// # Errors
    /// Returns a user's mistake if the format is not supported, if the path cannot be written to,
    /// or if two columns have the same name.
    pub(crate) fn start(output: Option<&Path>, columns: OutputColumns) -> Result<Self, Failure> {
        // Before the file is made, so that a mistake leaves nothing.
        columns.check()?;
        let Some(path) = output else {
            return Ok(Self { columns, sink: OutputSink::Screen(io::stdout()), file: None });
        };
        let is_csv = match path.extension().and_then(|it| it.to_str()) {
            Some("csv") => true,
            Some("jsonl") => false,
            _ => {
                return Err(Failure::mistake(format!(
                    "--output: unsupported format: {}; use a name that ends in .csv or .jsonl",
                    path.display()
                )));
            }
        };
        let refused = |error: io::Error| {
            Failure::mistake(format!(
                "--output: {} cannot be written ({error}); give another path",
                path.display()
            ))
        };
        if path.is_dir() {
            return Err(refused(ErrorKind::IsADirectory.into()));
        }
        let whole = PartialFile::beside(path).map_err(refused)?;
        let file = BufWriter::new(whole.file().try_clone().map_err(refused)?);
        let sink = match is_csv {
            true => OutputSink::Csv(Box::new(csv::Writer::from_writer(file))),
            false => OutputSink::JsonLines(file),
        };
        let mut writer = Self { columns, sink, file: Some(whole) };
        writer.write_header().map_err(|error| writer.failed(error))?;
        Ok(writer)
    }

    /// Writes the CSV header. JSON lines have none.
    fn write_header(&mut self) -> io::Result<()> {
        let OutputSink::Csv(writer) = &mut self.sink else { return Ok(()) };
        Ok(writer.write_record(self.columns.names())?)
    }

    /// Writes a row. Returns `false` if standard output was closed.
    ///
    /// # Errors
    /// Returns a failure while running if the output cannot be written, for example because the
    /// disk is full.
    pub(crate) fn write(&mut self, row: &Prediction) -> Result<bool, Failure> {
        let outcome = match &mut self.sink {
            OutputSink::Csv(writer) => {
                writer.write_record(self.columns.cells(row)).map_err(io::Error::from)
            }
            OutputSink::JsonLines(file) => writeln!(file, "{}", self.columns.object(row)),
            OutputSink::Screen(screen) => match writeln!(screen, "{}", self.columns.object(row)) {
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(false),
                outcome => outcome,
            },
        };
        outcome.map_err(|error| self.failed(error)).map(|()| true)
    }

    /// Completes the file and renames it to its final name.
    ///
    /// # Errors
    /// Returns a failure while running if the file cannot be written, for example because the disk
    /// is full.
    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        let written = match &mut self.sink {
            OutputSink::Csv(writer) => writer.flush(),
            OutputSink::JsonLines(file) => file.flush(),
            OutputSink::Screen(_) => return Ok(()),
        };
        written.map_err(|error| self.failed(error))?;
        let Some(file) = self.file else { return Ok(()) };
        let path = file.path().to_owned();
        file.finish_synced().map_err(|error| cannot_write(&path, error))
    }

    /// Returns the failure of a write.
    fn failed(&self, error: io::Error) -> Failure {
        cannot_write(self.file.as_ref().map_or(Path::new("standard output"), |it| it.path()), error)
    }
}

/// Returns the failure of a write to `path`.
fn cannot_write(path: &Path, error: io::Error) -> Failure {
    Failure::run(format!("{} cannot be written: {error}", path.display()))
}

/// The columns of a prediction of one class, between the columns of the input and the probabilities
/// of the classes.
const OWN: [&str; 3] = ["predicted_label", "predicted_class", "probability"];
/// The column of a predicted set of labels.
const LABELS: &str = "predicted_labels";
/// The column of a predicted number.
const VALUE: &str = "predicted_value";
/// The fields of JSON lines that stand for a column of each class or number.
const OBJECTS: [&str; 2] = ["probabilities", "predicted_values"];

impl OutputColumns {
    /// Returns the names of all columns: the columns of the input, the prediction, and a
    /// probability for each class.
    fn names(&self) -> Vec<String> {
        let each = |prefix: &str| {
            let columns = self.classes.iter().map(|class| format!("{prefix}_{class}"));
            columns.collect::<Vec<_>>()
        };
        let own = match self.problem_type {
            ProblemType::SingleLabelClassification => {
                OWN.map(str::to_owned).into_iter().chain(each("probability")).collect()
            }
            ProblemType::MultiLabelClassification => {
                [LABELS.to_owned()].into_iter().chain(each("probability")).collect()
            }
            ProblemType::Regression if self.classes.len() == 1 => vec![VALUE.to_owned()],
            ProblemType::Regression => each(VALUE),
        };
        self.inputs().map(|(_, name)| name.clone()).chain(own).collect()
    }

    /// Returns the name of a class as JSON: a number if classes have no names.
    fn label(&self, class: usize) -> Value {
        match self.are_numbers {
            true => json!(class),
            false => json!(self.classes[class]),
        }
    }

    /// Returns the predicted set of labels as JSON.
    fn labels(&self, outputs: &[f64]) -> Value {
        likely(outputs).into_iter().map(|class| self.label(class)).collect::<Vec<_>>().into()
    }

    /// Returns the columns of the input, each with its command-line option.
    fn inputs(&self) -> impl Iterator<Item = (&'static str, &String)> {
        let TextColumns { text, label, copied, .. } = &self.table;
        let label = label.iter().map(|name| ("--label-field", name));
        let copied = copied.iter().map(|name| ("--keep", name));
        [("--text-field", text)].into_iter().chain(label).chain(copied)
    }

    /// Refuses columns of the input that are named twice or have the name of an output column.
    ///
    /// # Errors
    /// Returns a user's mistake with the option of the column.
    fn check(&self) -> Result<(), Failure> {
        let mut names = self.names();
        // JSON has these fields instead of a column for each class.
        names.extend(OBJECTS.map(str::to_owned));
        for (option, name) in self.inputs() {
            if self.inputs().filter(|(_, other)| *other == name).count() > 1 {
                return Err(Failure::mistake(format!(
                    "{option}: the column `{name}` is named twice; name it once"
                )));
            }
            if names.iter().filter(|other| *other == name).count() > 1 {
                return Err(Failure::mistake(format!(
                    "{option}: the output has a column `{name}` of its own; rename the column of the table"
                )));
            }
        }
        Ok(())
    }

    /// Returns the cells of a CSV row, in the order of [`names`](Self::names).
    fn cells(&self, prediction: &Prediction) -> Vec<String> {
        let Prediction { row, outputs } = prediction;
        let mut cells = vec![row.text.clone()];
        if self.table.label.is_some() {
            cells.push(row.label.clone().unwrap_or_default());
        }
        cells.extend(row.copied.iter().map(|cell| cell.clone().unwrap_or_default()));
        match self.problem_type {
            ProblemType::SingleLabelClassification => {
                let class = likeliest(outputs);
                let probability = rounded(outputs[class]).to_string();
                cells.extend([self.classes[class].clone(), class.to_string(), probability]);
            }
            ProblemType::MultiLabelClassification => cells.push(self.labels(outputs).to_string()),
            ProblemType::Regression => {
                cells.extend(outputs.iter().map(|it| (*it as f32).to_string()));
                // A regression has no probabilities.
                return cells;
            }
        }
        cells.extend(outputs.iter().map(|it| rounded(*it).to_string()));
        cells
    }

    /// Returns a row as a JSON object.
    ///
    /// If classes have no names, `predicted_label` is a number.
    fn object(&self, prediction: &Prediction) -> Value {
        let Prediction { row, outputs } = prediction;
        let mut object = Map::new();
        object.insert(self.table.text.clone(), json!(row.text));
        if let Some(name) = &self.table.label {
            object.insert(name.clone(), row.label.as_deref().map_or(Value::Null, shown_label));
        }
        let copied = row.copied.iter().map(|it| it.as_deref().map_or(Value::Null, shown));
        object.extend(self.table.copied.iter().cloned().zip(copied));
        match self.problem_type {
            ProblemType::SingleLabelClassification => {
                let class = likeliest(outputs);
                let own = [self.label(class), json!(class), json!(rounded(outputs[class]))];
                object.extend(OWN.map(str::to_owned).into_iter().zip(own));
            }
            ProblemType::MultiLabelClassification => {
                object.insert(LABELS.to_owned(), self.labels(outputs));
            }
            ProblemType::Regression => {
                match outputs[..] {
                    [only] => object.insert(VALUE.to_owned(), number(only)),
                    _ => {
                        let values = self.classes.iter().cloned();
                        let values: Map<_, _> =
                            values.zip(outputs.iter().map(|it| number(*it))).collect();
                        object.insert(OBJECTS[1].to_owned(), values.into())
                    }
                };
                return object.into();
            }
        }
        let probabilities = outputs.iter().map(|it| json!(rounded(*it)));
        let probabilities: Map<_, _> = self.classes.iter().cloned().zip(probabilities).collect();
        object.insert(OBJECTS[0].to_owned(), probabilities.into());
        object.into()
    }
}

/// Returns a cell as JSON: a number or a string.
///
/// A cell is only a number if it would be printed in the same way again. So ids such as `007`, or
/// ids with more digits than a number can have, stay strings.
fn shown(cell: &str) -> Value {
    match serde_json::from_str(cell) {
        Ok(Value::Number(number)) if number.to_string() == cell => Value::Number(number),
        _ => json!(cell),
    }
}

/// Returns the cell of a label as JSON, which is also a list if its text is one.
fn shown_label(cell: &str) -> Value {
    match serde_json::from_str(cell) {
        Ok(list @ Value::Array(_)) => list,
        _ => shown(cell),
    }
}

/// Returns a predicted number with the digits of f32.
fn number(value: f64) -> Value {
    let digits = (value as f32).to_string();
    digits.parse::<f64>().map_or(Value::Null, |value| json!(value))
}

/// Rounds a probability to eight decimals. Further decimals are rounding errors of f32.
fn rounded(probability: f64) -> f64 {
    (probability * 1e8).round() / 1e8
}

#[cfg(test)]
mod tests {
    use std::fs;

    use deepburn_datasets::LabelKind;

    use super::*;

    fn columns(text: &str, label: Option<&str>, copied: &[&str]) -> OutputColumns {
        OutputColumns {
            table: TextColumns {
                text: text.to_owned(),
                label: label.map(str::to_owned),
                kind: LabelKind::Class,
                copied: copied.iter().map(|&name| name.to_owned()).collect(),
            },
            problem_type: ProblemType::default(),
            classes: vec!["bad".to_owned(), "good".to_owned()],
            are_numbers: false,
        }
    }

    /// Returns the CSV header and row, and the JSON object of a prediction.
    fn written(problem_type: ProblemType, classes: &[&str], outputs: &[f64]) -> (String, Value) {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let columns = OutputColumns {
                problem_type,
                classes: classes.iter().map(|&name| name.to_owned()).collect(),
                ..columns("text", Some("label"), &[])
            };
            let path = folder.path().join(name);
            let mut writer = PredictionWriter::start(Some(&path), columns).unwrap();
            let label = Some("[\"good\"]".to_owned());
            let row = TableText { text: "x".to_owned(), label, copied: Vec::new() };
            writer.write(&Prediction { row, outputs: outputs.to_vec() }).unwrap();
            writer.finish().unwrap();
            fs::read_to_string(path).unwrap()
        };
        (write("a.csv"), serde_json::from_str(&write("a.jsonl")).unwrap())
    }

    #[test]
    fn sets_of_labels_are_lists() {
        let (table, object) =
            written(ProblemType::MultiLabelClassification, &["bad", "good"], &[0.25, 0.5]);
        let expected = "text,label,predicted_labels,probability_bad,probability_good\n\
                        x,\"[\"\"good\"\"]\",\"[\"\"good\"\"]\",0.25,0.5\n";
        assert_eq!(table, expected);
        let expected = json!({"text": "x", "label": ["good"], "predicted_labels": ["good"],
            "probabilities": {"bad": 0.25, "good": 0.5}});
        assert_eq!(object, expected);
        let (_, object) =
            written(ProblemType::MultiLabelClassification, &["bad", "good"], &[0.25, 0.4]);
        assert_eq!(object["predicted_labels"], json!([]));
    }

    #[test]
    fn predicted_numbers_have_the_digits_of_f32() {
        let tenth = f64::from(0.1_f32);
        let (table, object) = written(ProblemType::Regression, &["0"], &[tenth]);
        assert_eq!(table, "text,label,predicted_value\nx,\"[\"\"good\"\"]\",0.1\n");
        assert_eq!(object["predicted_value"], json!(0.1));
        let (table, object) = written(ProblemType::Regression, &["plot", "music"], &[tenth, -2e-9]);
        assert!(table.starts_with("text,label,predicted_value_plot,predicted_value_music\n"));
        assert_eq!(object["predicted_values"], json!({"plot": 0.1, "music": -2e-9}));
    }

    fn row() -> Prediction {
        Prediction {
            row: TableText {
                text: "one, \"two\"\nthree".to_owned(),
                label: Some("1".to_owned()),
                copied: vec![Some("007".to_owned()), Some("0.5".to_owned()), None],
            },
            outputs: vec![0.25, 0.75],
        }
    }

    #[test]
    fn keeps_the_columns_of_the_input() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let path = folder.path().join(name);
            let columns = columns("text", Some("label"), &["id", "score", "note"]);
            let mut writer = PredictionWriter::start(Some(&path), columns).unwrap();
            assert!(writer.write(&row()).unwrap());
            assert!(!path.exists(), "it is not complete yet");
            writer.finish().unwrap();
            fs::read_to_string(path).unwrap()
        };
        let expected = "text,label,id,score,note,predicted_label,predicted_class,probability,\
                        probability_bad,probability_good\n\"one, \"\"two\"\"\nthree\",1,007,0.5,,good,1,\
                        0.75,0.25,0.75\n";
        assert_eq!(write("a.csv"), expected);
        let object: Value = serde_json::from_str(&write("a.jsonl")).unwrap();
        let expected = json!({
            "text": "one, \"two\"\nthree", "label": 1, "id": "007", "score": 0.5, "note": null,
            "predicted_label": "good",
            "predicted_class": 1, "probability": 0.75, "probabilities": {"bad": 0.25, "good": 0.75},
        });
        assert_eq!(object, expected);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn keeps_the_existing_file_until_finished() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        fs::write(&path, "old").unwrap();
        let mut writer =
            PredictionWriter::start(Some(&path), columns("text", None, &["a", "b", "c"])).unwrap();
        writer.write(&row()).unwrap();
        drop(writer);
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn rejects_invalid_outputs() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("b.csv")).unwrap();
        for (output, columns, expected) in [
            (path("a.parquet"), columns("text", None, &[]), "--output"),
            (path("b.csv"), columns("text", None, &[]), "--output"),
            (path("c/a.csv"), columns("text", None, &[]), "--output"),
            (path("a.csv"), columns("probability", None, &[]), "--text-field: the output has a"),
            (path("a.csv"), columns("text", Some("probability_bad"), &[]), "--label-field"),
            (path("a.csv"), columns("text", Some("text"), &[]), "`text` is named twice"),
            (path("a.csv"), columns("text", None, &["id", "id"]), "`id` is named twice"),
            (path("a.csv"), columns("text", None, &["probability"]), "--keep: the output has a"),
        ] {
            let error = PredictionWriter::start(Some(&output), columns).err().unwrap();
            assert!(error.to_string().contains(expected), "{error}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
