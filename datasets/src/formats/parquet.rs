//! `.parquet` files: tables stored by column, the usual format on the Hub.
//!
//! Only the requested columns are decoded. Pages may be plain, or compressed with snappy, zstd,
//! gzip, LZ4 (both kinds) or brotli. The `parquet` crate panics on some damaged files. Such a panic
//! is reported as an error, like any other damage.

use std::cell::RefCell;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use ::parquet::errors::ParquetError;
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use ::parquet::record::Field;
use ::parquet::record::reader::RowIter;
use ::parquet::schema::types::Type;

use serde_json::{Map, Number, Value};

use crate::formats::folder::open_file;
use crate::formats::json_row::{Wanted, insert_unread};
use crate::formats::table::{Cell, RowVisitor, TableRow, no_column, no_field, shortened};
use crate::guard::guarded;
use crate::{DataError, Result};

/// Reads rows as [`crate::formats::format::read_rows`] does. Rows are numbered from 1.
pub(crate) fn read_rows(path: &Path, columns: &[&str], visit: RowVisitor<'_>) -> Result<()> {
    let select = |schema: &Type| {
        let found = columns.iter().map(|column| {
            let found = schema.get_fields().iter().find(|field| field.name() == *column);
            found.map(Arc::clone).ok_or_else(|| no_column(path, column, names(schema)))
        });
        found.collect()
    };
    visit_records(path, &select, &mut |number, fields| {
        let cells = fields.into_iter().map(|(_, field)| cell(field)).collect();
        visit(TableRow { path, place: ("row", number), columns, cells })
    })
}

/// A callback for the number of a row, and its fields or the problem.
pub(crate) type ObjectVisitor<'a> =
    &'a mut dyn FnMut(usize, Result<Map<String, Value>, String>) -> Result<()>;

/// Calls `visit` for each row, with values of any depth. Of the columns, only those in `wanted` are
/// decoded, and the others are null; `None` for all.
///
/// # Errors
/// Returns an error if the file is damaged or has none of these columns. Errors of `visit` are
/// passed on.
pub(crate) fn visit_objects(
    path: &Path,
    wanted: Wanted<'_>,
    visit: ObjectVisitor<'_>,
) -> Result<()> {
    let all = RefCell::new(Vec::new());
    let select = |schema: &Type| {
        all.replace(names(schema).map(str::to_owned).collect());
        let is_wanted = |field: &&Arc<Type>| {
            wanted.is_none_or(|wanted| wanted.iter().any(|name| name == field.name()))
        };
        let found: Vec<_> = schema.get_fields().iter().filter(is_wanted).cloned().collect();
        match found.is_empty() {
            true => Err(no_field(path, wanted.unwrap_or_default(), names(schema))),
            false => Ok(found),
        }
    };
    visit_records(path, &select, &mut |number, fields| {
        let row = group(fields).map(|mut row| {
            insert_unread(&mut row, all.borrow().iter().map(String::as_str));
            row
        });
        visit(number, row)
    })
}

/// Returns the names of the columns in `schema`.
fn names(schema: &Type) -> impl Iterator<Item = &str> {
    schema.get_fields().iter().map(|field| field.name())
}

/// The number of a row and its fields.
type RecordVisitor<'a> = &'a mut dyn FnMut(usize, Vec<(String, Field)>) -> Result<()>;
/// Selects the columns of a file to decode.
type ColumnSelection<'a> = &'a dyn Fn(&Type) -> Result<Vec<Arc<Type>>>;

/// Calls `visit` for each row, with the selected columns.
fn visit_records(path: &Path, select: ColumnSelection<'_>, visit: RecordVisitor<'_>) -> Result<()> {
    let file = open_file(path)?;
    // A file without a byte has no rows, like an empty file of another format.
    if file.metadata().is_ok_and(|metadata| metadata.len() == 0) {
        return Ok(());
    }
    let contradiction = |_| invalid(path, "its parts contradict each other");
    let mut records = guarded(|| open(file, path, select)).map_err(contradiction)??;
    for number in 1.. {
        // Only the library call is guarded, because a panic in `visit` is not caused by the file.
        let Some(record) = guarded(|| records.next()).map_err(contradiction)? else { break };
        let record = record.map_err(|error| invalid(path, &error.to_string()))?;
        visit(number, record.into_columns())?;
    }
    Ok(())
}

/// Opens the records of `file`, restricted to the selected columns.
fn open(file: File, path: &Path, select: ColumnSelection<'_>) -> Result<RowIter<'static>> {
    let invalid = |error: ParquetError| invalid(path, &error.to_string());
    let reader = SerializedFileReader::new(file).map_err(invalid)?;
    let schema = reader.metadata().file_metadata().schema();
    let fields = select(schema)?;
    let projection = Type::group_type_builder(schema.name()).with_fields(fields).build();
    let projection = projection.map_err(invalid)?;
    RowIter::from_file_into(Box::new(reader)).project(Some(projection)).map_err(invalid)
}

/// Returns the error of a damaged file.
fn invalid(path: &Path, reason: &str) -> DataError {
    let reason = reason.replace('\n', " ");
    DataError::invalid(
        path,
        format!(
            "cannot be read as parquet: {reason}; it must be a complete file with snappy, zstd, gzip, LZ4, brotli or no compression; fetch or write it again"
        ),
    )
}

/// Converts a field to a cell. Booleans become 0 and 1.
fn cell(field: Field) -> Cell {
    match field {
        Field::Str(text) => Cell::Text(text),
        // Some writers do not mark text columns as text.
        Field::Bytes(bytes) => match String::from_utf8(bytes.data().to_vec()) {
            Ok(text) => Cell::Text(text),
            Err(_) => Cell::Other("bytes that are not UTF-8"),
        },
        Field::Bool(flag) => Cell::Integer(flag.into()),
        Field::Byte(value) => Cell::Integer(value.into()),
        Field::Short(value) => Cell::Integer(value.into()),
        Field::Int(value) => Cell::Integer(value.into()),
        Field::Long(value) => Cell::Integer(value),
        Field::UByte(value) => Cell::Integer(value.into()),
        Field::UShort(value) => Cell::Integer(value.into()),
        Field::UInt(value) => Cell::Integer(value.into()),
        Field::ULong(value) => match i64::try_from(value) {
            Ok(value) => Cell::Integer(value),
            Err(_) => Cell::Decimal(value.to_string()),
        },
        Field::Null => Cell::Null,
        Field::Float16(value) => Cell::Decimal(value.to_string()),
        Field::Float(value) => Cell::Decimal(value.to_string()),
        Field::Double(value) => Cell::Decimal(value.to_string()),
        Field::Group(_) => Cell::Other("a group of fields"),
        Field::ListInternal(list) => {
            Cell::List(list.elements().iter().map(|field| cell(field.clone())).collect())
        }
        Field::MapInternal(_) => Cell::Other("a map"),
        Field::Decimal(_) => Cell::Other("a decimal"),
        Field::Date(_) => Cell::Other("a date"),
        Field::TimeMillis(_) | Field::TimeMicros(_) => Cell::Other("a time of day"),
        Field::TimestampMillis(_) | Field::TimestampMicros(_) => Cell::Other("a timestamp"),
    }
}

/// Converts the fields of a row to JSON, or returns the problem, which names the field.
fn group(fields: Vec<(String, Field)>) -> Result<Map<String, Value>, String> {
    let convert = |(name, field): (String, Field)| match json(field) {
        Ok(value) => Ok((name, value)),
        Err(kind) => {
            let name = shortened(&name);
            Err(format!("field `{name}` has {kind}, which JSON does not have"))
        }
    };
    fields.into_iter().map(convert).collect()
}

/// Converts a field to JSON, or returns the kind of a value that JSON does not have.
fn json(field: Field) -> Result<Value, &'static str> {
    let number = |value: f64| {
        Number::from_f64(value).map(Value::Number).ok_or("a number that is not finite")
    };
    Ok(match field {
        Field::Bool(flag) => flag.into(),
        // JSON has all of these numbers, while a cell only has 64-bit integers with a sign.
        Field::ULong(value) => value.into(),
        Field::Float16(value) => return number(value.to_f64()),
        // As Python prints it: 0.1, not 0.10000000149011612.
        Field::Float(value) => return number(value.to_string().parse().unwrap_or(f64::NAN)),
        Field::Double(value) => return number(value),
        Field::Group(row) => {
            let fields = row.into_columns().into_iter();
            fields.map(|(name, field)| Ok((name, json(field)?))).collect::<Result<_, &str>>()?
        }
        Field::ListInternal(list) => {
            list.elements().iter().map(|field| json(field.clone())).collect::<Result<_, &str>>()?
        }
        Field::MapInternal(map) => {
            let entry = |(key, value): &(Field, Field)| match key {
                Field::Str(key) => Ok((key.clone(), json(value.clone())?)),
                _ => Err("a map whose keys are not strings"),
            };
            map.entries().iter().map(entry).collect::<Result<_, &str>>()?
        }
        other => match cell(other) {
            Cell::Text(text) => text.into(),
            Cell::Integer(integer) => integer.into(),
            Cell::Null => Value::Null,
            other => return Err(other.kind()),
        },
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use ::parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};

    use super::*;
    use crate::tests::parquet_table::{Column, write_table, write_table_as};

    fn table() -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.parquet");
        let texts = vec![Some("one"), None, Some("caf\u{e9}")];
        write_table(&path, &[Column::Text("text", texts), Column::Label("label", vec![2, 0, -1])]);
        fs::read(path).unwrap()
    }

    fn read(contents: &[u8], columns: &[&str]) -> Result<Vec<Vec<Cell>>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.parquet");
        fs::write(&path, contents).unwrap();
        let mut rows = Vec::new();
        read_rows(&path, columns, &mut |row| {
            rows.push(row.cells);
            Ok(())
        })?;
        Ok(rows)
    }

    #[test]
    fn columns_come_in_the_order_asked_for() {
        let text = |text: &str| Cell::Text(text.into());
        let rows = read(&table(), &["label", "text"]).unwrap();
        let expected = [
            [Cell::Integer(2), text("one")],
            [Cell::Integer(0), Cell::Null],
            [Cell::Integer(-1), text("caf\u{e9}")],
        ];
        assert_eq!(rows, expected);
        assert_eq!(read(&table(), &["label"]).unwrap().len(), 3);
        let message = read(&table(), &["body"]).unwrap_err().to_string();
        assert!(message.contains("no column `body`, only [`text`, `label`]"), "{message}");
    }

    #[test]
    fn an_empty_file_has_no_rows() {
        assert_eq!(read(b"", &["text"]).unwrap().len(), 0);
        assert!(read(b"PAR1", &["text"]).is_err());
    }

    #[test]
    fn values_are_read_or_named_by_their_type() {
        let zero = Field::Float16(Default::default());
        assert_eq!(cell(zero), Cell::Decimal("0".into()));
        let date = cell(Field::Date(1));
        assert_eq!(date, Cell::Other("a date"));
        assert_eq!(cell(Field::TimestampMicros(1)), Cell::Other("a timestamp"));
        assert_eq!(cell(Field::TimeMillis(1)), Cell::Other("a time of day"));
        let decimal = ::parquet::data_type::Decimal::from_i32(15, 3, 1);
        assert_eq!(cell(Field::Decimal(decimal)), Cell::Other("a decimal"));
    }

    #[test]
    fn every_compression_gives_the_same_rows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.parquet");
        let texts = ["one", "two", "three"].repeat(50);
        let texts: Vec<_> = texts.into_iter().map(Some).collect();
        let scores = [0.0, 1.0, 2.5].repeat(50);
        for compression in [
            Compression::UNCOMPRESSED,
            Compression::SNAPPY,
            Compression::GZIP(GzipLevel::default()),
            Compression::LZ4,
            Compression::LZ4_RAW,
            Compression::BROTLI(BrotliLevel::default()),
            Compression::ZSTD(ZstdLevel::default()),
        ] {
            let columns =
                [Column::Text("text", texts.clone()), Column::Score("score", scores.clone())];
            write_table_as(&path, &columns, compression);
            let rows = read(&fs::read(&path).unwrap(), &["text", "score"]).unwrap();
            assert_eq!(rows.len(), 150, "{compression}");
            let expected = |text: &str, score: &str| {
                vec![Cell::Text(text.into()), Cell::Decimal(score.into())]
            };
            assert_eq!(
                rows[148..],
                [expected("two", "1"), expected("three", "2.5")],
                "{compression}"
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// Damage that no checksum detects may change the rows, but must not cause a panic.
        #[test]
        fn damaged_tables_never_panic(place in 0.0f64..1.0, byte: u8, cut in 0.0f64..2.0) {
            let mut contents = table();
            let at = (contents.len() as f64 * place) as usize;
            contents[at] = byte;
            contents.truncate((contents.len() as f64 * cut) as usize);
            let _ = read(&contents, &["text", "label"]);
        }
    }
}
