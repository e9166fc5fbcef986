//! Nulls that stand for missing fields.
//!
//! Arrow gives all objects at one place the same fields, and a null to each field that an object
//! does not have. Its writers of JSON lines (`to_json` of `datasets`) keep these nulls. One row
//! does not show whether a null was meant, so [`SchemaNulls`] compares the objects of all rows.

use std::collections::BTreeMap;

use crate::RowObject;
use crate::formats::table::shortened;
use crate::samples::index::NotedRows;

/// The number of fields that are compared. Data without a schema may have a new name in every row.
const MAX_FIELDS: usize = 10_000;

/// The objects of all rows, by their place.
#[derive(Debug, Default)]
pub(crate) struct SchemaNulls {
    places: BTreeMap<String, ObjectPlace>,
    num_fields: usize,
}

/// The objects at a place.
#[derive(Debug, Default)]
struct ObjectPlace {
    objects: usize,
    fields: BTreeMap<String, FieldUse>,
}

/// How often the objects at a place have a field.
#[derive(Debug, Default)]
struct FieldUse {
    nulls: usize,
    values: usize,
    /// The number of rows with a null.
    rows: usize,
    /// The file and the number of the first and of the last one.
    first: (usize, usize),
    last: (usize, usize),
}

impl SchemaNulls {
    /// Adds the objects of a row. Rows are added in order.
    pub(crate) fn add(&mut self, row: (usize, usize), objects: Vec<RowObject>) {
        for RowObject { path, fields } in objects {
            if self.num_fields >= MAX_FIELDS && !self.places.contains_key(&path) {
                continue;
            }
            let place = self.places.entry(path).or_default();
            place.objects += 1;
            for (name, is_null) in fields {
                if !place.fields.contains_key(&name) {
                    if self.num_fields >= MAX_FIELDS {
                        continue;
                    }
                    self.num_fields += 1;
                }
                place.fields.entry(name).or_default().add(row, is_null);
            }
        }
    }

    /// Returns the rows with a null in a field that all objects at its place have, and that has a
    /// value in another one.
    pub(crate) fn noted_rows(&self) -> Option<NotedRows> {
        let all = self.places.iter().flat_map(|(path, place)| {
            let fields = place.fields.iter().filter(|(_, it)| it.is_of_schema(place.objects));
            fields.map(move |(name, field)| (path, name, field))
        });
        let (path, name, field) = all.min_by_key(|(.., field)| field.first)?;
        let (file, number) = field.first;
        let field_path = format!("{path}.{name}");
        let field_path = shortened(&field_path);
        let text = format!(
            "`{field_path}` is null, and has a value elsewhere: the rows were probably written with a schema, which adds a \
             null for each field that a row does not have, and templates print it; write them as Parquet (`to_parquet` of \
             `datasets`), whose nulls are left out, or remove the nulls"
        );
        Some(NotedRows { count: field.rows, file, number, text })
    }
}

impl FieldUse {
    fn add(&mut self, row: (usize, usize), is_null: bool) {
        if !is_null {
            self.values += 1;
            return;
        }
        if self.rows == 0 {
            self.first = row;
        }
        self.rows += usize::from(self.rows == 0 || self.last != row);
        self.nulls += 1;
        self.last = row;
    }

    fn is_of_schema(&self, objects: usize) -> bool {
        // If the writer left the field out elsewhere, a null was meant.
        self.nulls > 0 && self.values > 0 && self.nulls + self.values == objects
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nulls_beside_values_of_a_field_that_all_objects_have_are_noted() {
        let object = |fields: &str| RowObject {
            path: "p".into(),
            fields: fields
                .chars()
                .map(|it| (it.to_lowercase().collect(), it.is_lowercase()))
                .collect(),
        };
        // A small letter is a null, a capital one a value.
        for (rows, expected) in [
            (vec!["A", "AB"], None),
            (vec!["Ab", "Ab"], None),
            // The field is missing in the last one.
            (vec!["Ab", "AB", "A"], None),
            (vec!["Ab", "AB", "Ab", "aB"], Some((2, 0, "`p.b` is null"))),
            (vec!["AB", "aB"], Some((1, 1, "`p.a` is null"))),
        ] {
            let mut nulls = SchemaNulls::default();
            for (number, row) in rows.iter().enumerate() {
                nulls.add((0, number), vec![object(row)]);
            }
            let found = nulls.noted_rows();
            let found = found.as_ref().map(|it| (it.count, it.number, &it.text[..13]));
            assert_eq!(found, expected, "{rows:?}");
        }
        // Two objects of one row are one row.
        let mut nulls = SchemaNulls::default();
        nulls.add((0, 3), vec![object("a"), object("a"), object("A")]);
        assert_eq!(nulls.noted_rows().map(|it| (it.count, it.number)), Some((1, 3)));
    }

    #[test]
    fn the_number_of_fields_is_bounded() {
        let mut nulls = SchemaNulls::default();
        for number in 0..2 * MAX_FIELDS {
            let fields = vec![(number.to_string(), true)];
            nulls.add((0, number), vec![RowObject { path: (number % 7).to_string(), fields }]);
        }
        assert_eq!(nulls.places.values().map(|it| it.fields.len()).sum::<usize>(), MAX_FIELDS);
    }
}
