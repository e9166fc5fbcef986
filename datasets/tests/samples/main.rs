//! Samples for fine-tuning: encoding, the cache, packing and batches.

mod cache;
mod packing;
mod pairs;
mod rows;
mod trl;

use std::fs;
use std::path::{Path, PathBuf};

use deepburn_datasets::{
    DataError, DataRow, Fractions, InvalidRows, Packing, Padding, Sample, SampleLayout,
    SampleSource, Splits, TokenCache, open_samples,
};
use serde_json::Value;

/// Reads a file of `tests/data`.
fn data(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Writes the values as JSON lines.
fn write_lines(folder: &Path, name: &str, rows: &[Value]) -> PathBuf {
    let path = folder.join(name);
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    fs::write(&path, lines).unwrap();
    path
}

/// Encodes rows of the fields `ids` and `labels`, in which -100 marks tokens that are not trained.
fn encode(row: DataRow) -> Result<Sample, String> {
    let numbers = |name: &str| -> Result<Vec<i64>, String> {
        let field = row.fields.get(name).and_then(Value::as_array);
        let field = field.ok_or_else(|| format!("field `{name}` is not an array"))?;
        let number = |value: &Value| value.as_i64().ok_or_else(|| format!("`{name}` has {value}"));
        field.iter().map(number).collect()
    };
    let (ids, labels) = (numbers("ids")?, numbers("labels")?);
    let trained = labels.iter().map(|label| *label != -100).collect();
    Ok(Sample { ids: ids.into_iter().map(|id| id as u32).collect(), trained })
}

/// A source of rows that [`encode`] understands.
fn source(splits: &Splits) -> SampleSource<'_> {
    SampleSource {
        splits,
        fields: None,
        invalid: InvalidRows::Fail,
        vocab_size: 1000,
        encoder: &["ids and labels"],
        cache: None,
    }
}

/// A layout of one sample per row.
fn layout(max_length: Option<usize>) -> SampleLayout {
    let padding = Padding::Right { multiple_of: 1 };
    SampleLayout { max_length, packing: Packing::None, padding, pad_id: 0 }
}
