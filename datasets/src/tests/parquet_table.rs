//! Small tables for the crate's tests and the fuzz test.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use ::parquet::basic::{Compression, ZstdLevel};
use ::parquet::data_type::{ByteArrayType, DoubleType, Int64Type};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;

/// A column and its values.
pub(crate) enum Column<'a> {
    Text(&'a str, Vec<Option<&'a str>>),
    Label(&'a str, Vec<i64>),
    Score(&'a str, Vec<f64>),
}

impl Column<'_> {
    fn declaration(&self) -> String {
        match self {
            Self::Text(name, _) => format!("optional binary {name} (UTF8);"),
            Self::Label(name, _) => format!("required int64 {name};"),
            Self::Score(name, _) => format!("required double {name};"),
        }
    }
}

/// Writes `columns` as one row group, compressed.
pub(crate) fn write_table(path: &Path, columns: &[Column<'_>]) {
    write_table_as(path, columns, Compression::ZSTD(ZstdLevel::default()));
}

/// Writes `columns` as one row group with `compression`.
pub(crate) fn write_table_as(path: &Path, columns: &[Column<'_>], compression: Compression) {
    let fields: String = columns.iter().map(Column::declaration).collect();
    let schema = parse_message_type(&format!("message schema {{ {fields} }}")).unwrap();
    let properties = WriterProperties::builder().set_compression(compression).build();
    let file = File::create(path).unwrap();
    let mut writer =
        SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for column in columns {
        let mut open = group.next_column().unwrap().unwrap();
        match column {
            Column::Text(_, texts) => {
                let levels: Vec<i16> = texts.iter().map(|text| i16::from(text.is_some())).collect();
                let values: Vec<_> = texts.iter().flatten().map(|&text| text.into()).collect();
                open.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
            }
            Column::Label(_, labels) => {
                open.typed::<Int64Type>().write_batch(labels, None, None).unwrap();
            }
            Column::Score(_, scores) => {
                open.typed::<DoubleType>().write_batch(scores, None, None).unwrap();
            }
        }
        open.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}
