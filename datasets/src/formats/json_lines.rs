//! `.jsonl` files: one JSON object per line. Blank lines are skipped.

use std::io::{BufRead, BufReader};
use std::path::Path;

use crate::formats::compression::{TextReader, read_error};
use crate::formats::folder::{not_utf8, strip_byte_order_mark};
use crate::formats::json_row::cells;
use crate::formats::table::{RowVisitor, TableRow};
use crate::{DataError, Result};

/// Reads rows as [`crate::formats::format::read_rows`] does. Rows are
/// identified by their line numbers.
pub(crate) fn read_rows(path: &Path, columns: &[&str], visit: RowVisitor<'_>) -> Result<()> {
    let mut file = BufReader::new(TextReader::open(path)?);
    let (mut bytes, mut offset) = (Vec::new(), 0);
    for number in 1.. {
        bytes.clear();
        file.get_mut().start_row();
        let read = file.read_until(b'\n', &mut bytes).map_err(read_error(path))?;
        if read == 0 {
            break;
        }
        let line = std::str::from_utf8(&bytes)
            .map_err(|error| not_utf8(path, offset + error.valid_up_to()))?;
        let line = if offset == 0 { strip_byte_order_mark(line) } else { line };
        offset += read;
        if line.trim().is_empty() {
            continue;
        }
        let cells = cells(line.trim_end_matches(['\n', '\r']), columns).map_err(|reason| {
            DataError::invalid(
                path,
                format!(
                    "line {number}: {reason}; each line must be a JSON object with the fields that data.text_field and data.label_field name; correct or remove the line"
                ),
            )
        })?;
        visit(TableRow { path, place: ("line", number), columns, cells })?;
    }
    Ok(())
}
