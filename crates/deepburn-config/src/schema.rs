//! A JSON Schema of the keys, with which editors complete and check configurations.
//!
//! Main function: [`schema`]. It is generated from the same key tables as the check of a file, but
//! is less strict: rules that involve several keys are not part of the schema.

use serde_json::{Map, Value, json};

use crate::key::{Key, Kind, Literal, SectionVariant, Status};
use crate::keys::DeepSpeed;
use crate::keys::job::JobFile;
use crate::range::{Integers, Reals};
use crate::section::Section;

/// Returns the JSON Schema (draft 7) of a job file, or of a DeepSpeed configuration alone.
///
/// `deepburn keys --schema` prints it. An editor that finds its path in `$schema` completes keys
/// and marks unknown ones while they are typed:
///
/// ```
/// let schema = deepburn_config::schema(false);
/// let prescale = &schema["properties"]["prescale_gradients"];
/// assert_eq!((&prescale["type"], &prescale["default"]), (&"boolean".into(), &false.into()));
/// // An unknown key is marked.
/// assert_eq!(schema["additionalProperties"], false);
/// ```
pub fn schema(of_job: bool) -> Value {
    let (keys, title) = match of_job {
        true => (JobFile::KEYS, "DeepBurn job file"),
        false => (DeepSpeed::KEYS, "DeepSpeed configuration, as DeepBurn reads it"),
    };
    let mut schema = section(keys);
    schema["$schema"] = json!("http://json-schema.org/draft-07/schema#");
    schema["title"] = json!(title);
    schema
}

/// Returns the schema of a section, which allows no other keys.
fn section(keys: &'static [Key]) -> Value {
    let mut properties = Map::new();
    for key in keys {
        let schema = property(key);
        // A schema cannot give a property two names, so each name is a property.
        for name in key.names() {
            properties.insert(name.to_owned(), schema.clone());
        }
    }
    let mut schema =
        json!({ "type": "object", "properties": properties, "additionalProperties": false });
    let required: Vec<_> =
        keys.iter().filter(|key| key.is_required()).map(|key| key.name).collect();
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}

/// Returns the schema of a key, with its description, unit, status and default.
fn property(key: &Key) -> Value {
    let mut schema = values(key);
    let unit = if key.unit.is_empty() { String::new() } else { format!(" In {}.", key.unit) };
    let status = match key.status {
        Status::Honored => String::new(),
        status => format!(" {status}."),
    };
    schema["description"] = json!(format!("{}{unit}{status}", key.doc));
    if !key.default.node().is_null() {
        schema["default"] = key.default.node().to_json();
    }
    schema
}

/// Returns the schema of the values of a key, including `null` and `"auto"` if they are allowed.
fn values(key: &Key) -> Value {
    // No value is valid.
    if matches!(key.status, Status::Refused { .. }) {
        return json!({ "not": {} });
    }
    // The value is not checked, as in DeepSpeed.
    if matches!(key.status, Status::Ignored(_)) {
        return json!({});
    }
    let mut of_kind = kind(&key.kind);
    let mut choices = match of_kind.get_mut("anyOf").and_then(Value::as_array_mut) {
        Some(choices) => std::mem::take(choices),
        None => vec![of_kind],
    };
    if key.auto {
        choices.push(json!({ "const": "auto" }));
    }
    if key.default == Literal::Null {
        choices.push(json!({ "type": "null" }));
    }
    match choices.len() {
        1 => choices.swap_remove(0),
        _ if choices[0] == json!({}) => json!({}),
        _ => json!({ "anyOf": choices }),
    }
}

/// Returns the schema of the values of a kind.
fn kind(kind: &Kind) -> Value {
    match kind {
        Kind::Flag => json!({ "type": "boolean" }),
        Kind::FlagOr(name) => json!({
            "anyOf": [{ "type": "boolean" }, { "enum": [name] }, { "type": "string", "pattern": any_case(&[name]) }]
        }),
        Kind::Integer(range) => integer(*range),
        Kind::Steps(range) => {
            let ratio = json!({ "type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1 });
            json!({ "anyOf": [integer(*range), ratio] })
        }
        Kind::Integers(range) => json!({ "type": "array", "items": integer(*range) }),
        Kind::Real(range) => real(*range),
        Kind::PerGroup(range) => json!({ "anyOf": [real(*range), tuple(1, *range)] }),
        Kind::Tuple(len, range) => tuple(*len, *range),
        Kind::Text | Kind::TextOf(_) | Kind::Split => json!({ "type": "string" }),
        // Names are compared without regard to case, which a schema can only express by a pattern.
        Kind::Choice(names) => {
            json!({ "anyOf": [{ "enum": names }, { "type": "string", "pattern": any_case(names) }] })
        }
        Kind::List => json!({ "type": "array" }),
        Kind::TextList => json!({ "type": "array", "items": { "type": "string" } }),
        Kind::Texts => json!({ "anyOf": [{ "type": "string" }, self::kind(&Kind::TextList)] }),
        Kind::Section(keys) => section(keys),
        Kind::Sections(keys) => json!({ "type": "array", "items": section(keys) }),
        Kind::Variants(variants) => parameters(variants),
        Kind::SectionOrPath(keys) => json!({ "anyOf": [section(keys), { "type": "string" }] }),
        Kind::Free => json!({}),
    }
}

/// Returns a pattern that matches each name in any case.
fn any_case(names: &[&str]) -> String {
    let insensitive = |name: &&str| {
        name.chars()
            .map(|c| match c.is_ascii_alphabetic() {
                true => format!("[{}{}]", c.to_ascii_uppercase(), c.to_ascii_lowercase()),
                false => c.to_string(),
            })
            .collect::<String>()
    };
    format!("^({})$", names.iter().map(insensitive).collect::<Vec<_>>().join("|"))
}

/// Returns the schema of integers in a range.
fn integer(range: Integers) -> Value {
    // `5e8` is an integer in a schema as well.
    let mut schema = json!({ "type": "integer" });
    if range.min != i64::MIN {
        schema["minimum"] = json!(range.min);
    }
    if range.max != i64::MAX {
        schema["maximum"] = json!(range.max);
    }
    schema
}

/// Returns the schema of a list of `len` numbers.
fn tuple(len: usize, range: Reals) -> Value {
    json!({ "type": "array", "items": real(range), "minItems": len, "maxItems": len })
}

/// Returns the schema of numbers in an interval.
fn real(range: Reals) -> Value {
    match range {
        Reals::Any => json!({ "type": "number" }),
        Reals::NotNegative => json!({ "type": "number", "minimum": 0 }),
        Reals::Positive => json!({ "type": "number", "exclusiveMinimum": 0 }),
        Reals::Decay => json!({ "type": "number", "minimum": 0, "exclusiveMaximum": 1 }),
        Reals::Fraction => json!({ "type": "number", "minimum": 0, "maximum": 1 }),
    }
}

/// Returns the schema of the parameters of all variants. The parameters of a particular `type` are
/// only checked when a file is read.
fn parameters(variants: &'static [SectionVariant]) -> Value {
    let mut properties: Map<String, Value> = Map::new();
    for key in variants.iter().flat_map(|variant| variant.keys) {
        let of_one = property(key);
        let entry = properties.entry(key.name).or_insert_with(|| of_one.clone());
        // A key that one type refuses may be a parameter of another type.
        if *entry != of_one && entry.get("not").is_some() {
            *entry = of_one;
        }
    }
    json!({ "type": "object", "properties": properties, "additionalProperties": false })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{deepspeed_keys, job_keys};

    /// Finds the schema of a key. `params[AdamW]` is `params`, and the name after `groups[]` is a
    /// key of each item.
    fn find<'a>(schema: &'a Value, path: &str) -> Option<&'a Value> {
        path.split('.').try_fold(schema, |schema, name| {
            let name = name.split('[').next().unwrap_or(name);
            let of = |schema: &'a Value| {
                let section = schema.get("items").unwrap_or(schema);
                section.get("properties").and_then(|all| all.get(name))
            };
            let choices = schema.get("anyOf").and_then(Value::as_array);
            of(schema).or_else(|| choices.into_iter().flatten().find_map(of))
        })
    }

    #[test]
    fn every_key_is_in_the_schema_with_its_doc() {
        for (schema, keys) in [(schema(true), job_keys()), (schema(false), deepspeed_keys())] {
            for entry in keys {
                let property = find(&schema, &entry.path);
                let property = property.unwrap_or_else(|| panic!("no {}", entry.path));
                assert!(property["description"].is_string(), "{}", entry.path);
            }
        }
    }

    #[test]
    fn kinds_become_types_and_ranges() {
        let schema = schema(false);
        let stage = find(&schema, "zero_optimization.stage").unwrap();
        assert_eq!((&stage["type"], &stage["maximum"]), (&json!("integer"), &json!(3)));
        assert_eq!(stage["default"], json!(0));
        let bucket = find(&schema, "zero_optimization.reduce_bucket_size").unwrap();
        assert_eq!(bucket["anyOf"][1], json!({ "const": "auto" }), "{bucket}");
        assert!(bucket["description"].as_str().unwrap().contains("In elements."));
        assert_eq!(find(&schema, "zero_optimization.nothing"), None);
    }
}
