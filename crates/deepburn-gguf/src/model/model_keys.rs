//! The metadata keys of an architecture, such as `llama.block_count`.

use super::Architecture;
use crate::{Array, GgufError, Metadata, Value};

/// The largest size, so that the product of two sizes fits in 64 bits.
const MAX_SIZE: u64 = 1 << 24;

/// What to do with a file that describes an unsupported model.
pub(super) const REMEDY: &str = "give the Hugging Face folder of a supported model";

/// Keys that change what llama.cpp computes, with the values that change nothing. llama.cpp reads
/// no other keys for the supported architectures than these and the ones that are read here.
const FIXED: [(&str, &[f64]); 15] = [
    ("attention.causal", &[1.0]),
    ("attention.clamp_kqv", &[0.0]),
    ("attention.max_alibi_bias", &[0.0]),
    ("attention.scale", &[0.0]),
    ("attention.temperature_scale", &[0.0]),
    ("embedding_scale", &[0.0, 1.0]),
    ("expert_count", &[0.0]),
    ("expert_used_count", &[0.0]),
    ("logit_scale", &[0.0, 1.0]),
    ("nextn_predict_layers", &[0.0]),
    ("pooling_type", &[0.0]),
    ("residual_scale", &[0.0, 1.0]),
    ("rope.scaling.alpha", &[0.0]),
    ("rope.scaling.yarn_ext_factor", &[1.0, -1.0]),
    ("rope.scaling.yarn_log_multiplier", &[0.0]),
];

/// Reads the keys of an architecture. Errors name the key, its value and the rule.
pub(super) struct ModelKeys<'a> {
    metadata: &'a Metadata,
    pub(super) architecture: Architecture,
}

impl<'a> ModelKeys<'a> {
    /// Finds the architecture.
    ///
    /// # Errors
    /// Returns an error if the file is not a whole model of a supported architecture, or if a key
    /// changes what the model computes in an unsupported way.
    pub(super) fn new(metadata: &'a Metadata) -> Result<Self, GgufError> {
        const ARCHITECTURE: &str = "general.architecture";
        let value = metadata.get(ARCHITECTURE);
        let name = value.and_then(Value::as_str);
        let known = Architecture::ALL.into_iter().find(|it| Some(it.name()) == name);
        let Some(architecture) = known else {
            let found = value.map_or_else(|| "missing".to_owned(), Value::shown);
            let all = Architecture::ALL.map(Architecture::name).join(", ");
            let problem = format!("is {found}; supported are {all}; {REMEDY}");
            return Err(GgufError::metadata(ARCHITECTURE, problem));
        };
        let refuse = |key: &str, value: &Value, rule: &str| {
            Err(GgufError::metadata(key, format!("is {}; {rule}", value.shown())))
        };
        // Adapters name the architecture of their model too.
        match metadata.get("general.type") {
            Some(value) if value.as_str() != Some("model") => {
                return refuse("general.type", value, "must be model; give the file of a model");
            }
            _ => {}
        }
        match metadata.get("split.count") {
            Some(value) if value.as_u64().is_none_or(|parts| parts > 1) => {
                let rule = "the file is a part; join all parts with `llama-gguf-split --merge`";
                return refuse("split.count", value, rule);
            }
            _ => {}
        }
        let keys = Self { metadata, architecture };
        for (name, allowed) in FIXED {
            let is_allowed = |value: &Value| {
                // A list has a value for each layer, and each of them must change nothing.
                numbers(value).is_some_and(|all| all.iter().all(|it| allowed.contains(it)))
            };
            if keys.get(name).is_some_and(|value| !is_allowed(value)) {
                let neutral = allowed.first().map(f64::to_string).unwrap_or_default();
                return Err(keys.error(name, format!("only {neutral} is supported; {REMEDY}")));
            }
        }
        Ok(keys)
    }

    /// Returns the value of a key, `name` without the architecture.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.metadata.get(&self.key(name))
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    /// Returns the error about a key.
    pub(super) fn error(&self, name: &str, rule: impl AsRef<str>) -> GgufError {
        let found = self.get(name).map_or_else(|| "missing".to_owned(), Value::shown);
        GgufError::metadata(&self.key(name), format!("is {found}; {}", rule.as_ref()))
    }

    /// Reads a size, from 1.
    pub(super) fn size(&self, name: &str) -> Result<usize, GgufError> {
        let size = self.size_or_zero(name)?.filter(|size| *size > 0);
        size.ok_or_else(|| {
            self.error(name, format!("must be an integer from 1 to {MAX_SIZE}; {REMEDY}"))
        })
    }

    /// Reads a size that may be missing.
    pub(super) fn optional_size(&self, name: &str) -> Result<Option<usize>, GgufError> {
        self.get(name).map(|_| self.size(name)).transpose()
    }

    /// Reads a size that may be missing, or 0. A list with one value for each layer must have equal
    /// values.
    pub(super) fn size_or_zero(&self, name: &str) -> Result<Option<usize>, GgufError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let integer = match (value, numbers(value).as_deref()) {
            (Value::Array(_), Some([first, rest @ ..])) => {
                // Pruned models have layers of different sizes, which the decoders here do not
                // have.
                if let Some(other) = rest.iter().find(|it| *it != first) {
                    let rule =
                        format!("layers with {first} and {other} are not supported; {REMEDY}");
                    return Err(self.error(name, rule));
                }
                (first.fract() == 0.0 && *first >= 0.0).then_some(*first as u64)
            }
            _ => value.as_u64(),
        };
        let integer = integer.filter(|it| *it <= MAX_SIZE).and_then(|it| usize::try_from(it).ok());
        let rule =
            || self.error(name, format!("must be an integer from 0 to {MAX_SIZE}; {REMEDY}"));
        integer.map(Some).ok_or_else(rule)
    }

    /// Reads a number.
    pub(super) fn number(&self, name: &str) -> Result<Option<f64>, GgufError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = match value {
            Value::F32(value) => decimal(*value),
            value => value.as_f64(),
        };
        let number = number.filter(|it| it.is_finite());
        number.map(Some).ok_or_else(|| self.error(name, "must be a number"))
    }

    /// Reads a number above 0.
    pub(super) fn positive(&self, name: &str) -> Result<Option<f64>, GgufError> {
        match self.number(name)? {
            Some(number) if number <= 0.0 => Err(self.error(name, "must be above 0")),
            number => Ok(number),
        }
    }
}

/// Returns the number with the fewest decimal digits that has this value in f32. `config.json` has
/// 1e-5, which is another number in f64 than the f32 value that files have.
pub(super) fn decimal(value: f32) -> Option<f64> {
    value.to_string().parse().ok()
}

/// Returns a value or the elements of a list as numbers, truth values as 0 and 1.
pub(super) fn numbers(value: &Value) -> Option<Vec<f64>> {
    Some(match value {
        Value::Bool(value) => vec![f64::from(u8::from(*value))],
        Value::Array(Array::Bool(values)) => {
            values.iter().map(|value| f64::from(u8::from(*value))).collect()
        }
        Value::Array(Array::U32(values)) => values.iter().copied().map(f64::from).collect(),
        Value::Array(Array::I32(values)) => values.iter().copied().map(f64::from).collect(),
        value => vec![value.as_u64().map(|it| it as f64).or(value.as_f64())?],
    })
}
