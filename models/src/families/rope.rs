//! Reads the rotation of a model: `rope_parameters` of `transformers` 5, or `rope_theta` and
//! `rope_scaling` of earlier versions.
//!
//! Main type: [`Rope`]. Fields that contradict each other are refused, because versions of
//! `transformers` differ in which one wins.

use serde_json::{Map, Value};

use super::settings::FamilySettings;
use crate::decoder::{Rotary, RotaryScaling};
use crate::hf::{ConfigFields, MAX_SIZE, ModelConfigError, check_size};

/// What the rotation depends on besides its own fields.
pub(super) struct Rope {
    head_width: usize,
    max_len: usize,
    theta: f64,
    /// Whether the types `su` and `yarn` mean `longrope`.
    is_phi3: bool,
}

/// The parameters of one rotation, as written.
struct RopeParameters {
    /// The field that they are in.
    field: &'static str,
    values: Map<String, Value>,
}

impl Rope {
    /// Returns the reader for a model with these sizes, and with this base if none is given.
    pub(super) fn new(settings: &FamilySettings, theta: f64) -> Self {
        let (head_width, max_len) = (settings.attention.head_width, settings.max_len);
        Self { head_width, max_len, theta, is_phi3: false }
    }

    /// Returns the reader for Phi 3, which has older names of types.
    pub(super) fn of_phi3(self) -> Self {
        Self { is_phi3: true, ..self }
    }

    /// Reads the rotation of all layers.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] for an unknown type or parameter, a value out of range, or a
    /// contradiction.
    pub(super) fn read(&self, fields: &mut ConfigFields) -> Result<Rotary, ModelConfigError> {
        let (field, given) = scaling(fields)?;
        let mut parameters = RopeParameters { field, values: given };
        self.rotary(fields, &mut parameters, "rope_theta", self.theta)
    }

    /// Reads the rotations of full and of sliding layers. Older fields scale the full layers only.
    ///
    /// # Errors
    /// Returns the errors of [`read`](Self::read).
    pub(super) fn read_by_layer_type(
        &self,
        fields: &mut ConfigFields,
    ) -> Result<[Rotary; 2], ModelConfigError> {
        let (field, mut given) = scaling(fields)?;
        // Version 5 has an object for each type of layer. Parameters of one rotation are never
        // objects.
        let is_by_type = given.values().any(Value::is_object);
        let mut take = |name: &str| match given.remove(name) {
            Some(Value::Object(values)) => Ok(RopeParameters { field, values }),
            None | Some(Value::Null) => Ok(RopeParameters { field, values: Map::new() }),
            Some(other) => Err(refused(field, name, &other, "an object")),
        };
        let [mut full, mut sliding] = if is_by_type {
            let both = [take("full_attention")?, take("sliding_attention")?];
            if let Some((name, value)) = given.iter().next() {
                let rule = "one of full_attention, sliding_attention";
                return Err(refused(field, name, value, rule));
            }
            both
        } else {
            [RopeParameters { field, values: given }, RopeParameters { field, values: Map::new() }]
        };
        Ok([
            self.rotary(fields, &mut full, "rope_theta", self.theta)?,
            self.rotary(fields, &mut sliding, "rope_local_base_freq", 1e4)?,
        ])
    }

    /// Reads one rotation. `theta_name` is the field with its base in older versions.
    fn rotary(
        &self,
        fields: &mut ConfigFields,
        parameters: &mut RopeParameters,
        theta_name: &'static str,
        theta: f64,
    ) -> Result<Rotary, ModelConfigError> {
        let older = optional_number(fields, theta_name)?;
        let own = parameters.number("rope_theta", 1.0)?;
        let theta = agreed(parameters, "rope_theta", own, older)?.unwrap_or(theta);
        // With such a base, all frequencies are normal f32 numbers.
        let fits = (1.0..1e30).contains(&theta);
        ModelConfigError::unless(fits, theta_name, theta, "a number above 1")?;
        let older = optional_number(fields, "partial_rotary_factor")?;
        let own = parameters.number("partial_rotary_factor", 0.0)?;
        let share = agreed(parameters, "partial_rotary_factor", own, older)?.unwrap_or(1.0);
        // Rounded towards 0, as in `transformers`.
        let width = (self.head_width as f64 * share) as usize;
        if !(share <= 1.0 && width >= 2 && width.is_multiple_of(2)) {
            let rule = format!(
                "a share for which `head_dim` = {} has an even number of rotated elements",
                self.head_width
            );
            return Err(refused(parameters.field, "partial_rotary_factor", &share.into(), &rule));
        }
        let scaling = self.scaling(fields, parameters, width, theta)?;
        parameters.finish()?;
        Ok(Rotary { width, theta, scaling })
    }

    /// Reads the scaling of the frequencies of `width` elements.
    fn scaling(
        &self,
        fields: &mut ConfigFields,
        parameters: &mut RopeParameters,
        width: usize,
        theta: f64,
    ) -> Result<RotaryScaling, ModelConfigError> {
        let kind = parameters.kind()?;
        let older = fields.optional_count("original_max_position_embeddings")?;
        // These divide by it or by its logarithm.
        if let ("llama3" | "longrope" | "su" | "yarn", Some(len)) = (kind.as_str(), older) {
            check_size("original_max_position_embeddings", len, MAX_SIZE)?;
        }
        let own = parameters.number("original_max_position_embeddings", 1.0)?;
        // Phi 3 has the length outside of the parameters, where it wins.
        let original_len = older.or(own.map(|length| length as usize)).unwrap_or(self.max_len);
        match kind.as_str() {
            "default" => Ok(RotaryScaling::Default),
            "linear" => Ok(RotaryScaling::Linear { factor: parameters.factor("factor")? }),
            // The exponent of its base divides by `width - 2`.
            "dynamic" if width > 2 => Ok(RotaryScaling::Dynamic {
                factor: parameters.factor("factor")?,
                max_len: self.max_len,
            }),
            "llama3" => {
                let low_freq_factor = parameters.required("low_freq_factor", 0.0)?;
                // A smaller factor would reverse the ramp between the two bounds.
                let high_freq_factor = parameters.required("high_freq_factor", low_freq_factor)?;
                let factor = parameters.factor("factor")?;
                Ok(RotaryScaling::Llama3 {
                    factor,
                    low_freq_factor,
                    high_freq_factor,
                    original_len,
                })
            }
            "longrope" => self.longrope(parameters, width, original_len),
            "su" | "yarn" if self.is_phi3 => self.longrope(parameters, width, original_len),
            // Its ramp divides by the logarithm of the base.
            "yarn" if theta > 1.0 => yarn(parameters, original_len),
            _ => {
                let rule = "one of default, linear, dynamic, llama3, longrope, yarn";
                Err(refused(parameters.field, "rope_type", &kind.into(), rule))
            }
        }
    }

    //= transformers 5.23.0 modeling_rope_utils.py _compute_longrope_parameters
    /// Reads two lists of divisors.
    fn longrope(
        &self,
        parameters: &mut RopeParameters,
        width: usize,
        original_len: usize,
    ) -> Result<RotaryScaling, ModelConfigError> {
        let short_factor = parameters.list("short_factor", width / 2)?;
        let long_factor = parameters.list("long_factor", width / 2)?;
        let growth = parameters.number("factor", 0.0)?;
        // Files of Phi 3 do not have `factor`, which is the ratio of the two lengths.
        let growth = growth.unwrap_or(self.max_len as f64 / original_len as f64);
        let given = parameters.number("attention_factor", 0.0)?;
        let attention_factor = given.unwrap_or(match growth <= 1.0 {
            true => 1.0,
            false => (1.0 + growth.ln() / (original_len as f64).ln()).sqrt(),
        });
        let rule = "an integer above 1, by whose logarithm the attention factor is divided";
        let name = "original_max_position_embeddings";
        ModelConfigError::unless(attention_factor.is_finite(), name, original_len, rule)?;
        Ok(RotaryScaling::LongRope { short_factor, long_factor, original_len, attention_factor })
    }
}

//= transformers 5.23.0 modeling_rope_utils.py _compute_yarn_parameters
/// Reads the parameters of [`RotaryScaling::Yarn`].
fn yarn(
    parameters: &mut RopeParameters,
    original_len: usize,
) -> Result<RotaryScaling, ModelConfigError> {
    let factor = parameters.factor("factor")?;
    let mscale = parameters.number("mscale", 0.0)?;
    let mscale_all_dim = parameters.number("mscale_all_dim", 0.0)?;
    let given = parameters.number("attention_factor", 0.0)?;
    let grown = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    let attention_factor = given.unwrap_or(match (mscale, mscale_all_dim) {
        (Some(own), Some(all)) if own != 0.0 && all != 0.0 => grown(own) / grown(all),
        _ => grown(1.0),
    });
    Ok(RotaryScaling::Yarn {
        factor,
        original_len,
        beta_fast: parameters.number("beta_fast", 0.0)?.unwrap_or(32.0),
        beta_slow: parameters.number("beta_slow", 0.0)?.unwrap_or(1.0),
        truncate: parameters.flag("truncate", true)?,
        attention_factor,
    })
}

/// Takes `rope_parameters` or `rope_scaling`, and returns the name of the field.
fn scaling(
    fields: &mut ConfigFields,
) -> Result<(&'static str, Map<String, Value>), ModelConfigError> {
    let mut object = |name| {
        fields.take_nullable(name, None, "an object or null", |value| value.as_object().cloned())
    };
    match (object("rope_parameters")?, object("rope_scaling")?) {
        (Some(new), Some(older)) if new != older => Err(ModelConfigError::Conflict {
            alias: "rope_scaling",
            alias_value: Value::from(older).to_string(),
            name: "rope_parameters",
            value: Value::from(new).to_string(),
        }),
        (Some(values), _) => Ok(("rope_parameters", values)),
        (None, values) => Ok(("rope_scaling", values.unwrap_or_default())),
    }
}

/// Takes a number or null.
fn optional_number(
    fields: &mut ConfigFields,
    name: &'static str,
) -> Result<Option<f64>, ModelConfigError> {
    fields.take_nullable(name, None, "a number or null", Value::as_f64)
}

/// Returns the value of a parameter that may also be a field outside of the parameters.
fn agreed(
    parameters: &RopeParameters,
    name: &'static str,
    own: Option<f64>,
    outside: Option<f64>,
) -> Result<Option<f64>, ModelConfigError> {
    match (own, outside) {
        (Some(own), Some(outside)) if own != outside => {
            let rule = format!("{outside}, as outside of `{}`", parameters.field);
            Err(refused(parameters.field, name, &own.into(), &rule))
        }
        (own, outside) => Ok(own.or(outside)),
    }
}

/// Returns the error for a parameter.
fn refused(field: &str, name: &str, value: &Value, rule: &str) -> ModelConfigError {
    ModelConfigError::Field(format!("`{field}.{name}` is {value}, but it must be {rule}"))
}

impl RopeParameters {
    /// Takes the type of the scaling, which earlier versions call `type`.
    fn kind(&mut self) -> Result<String, ModelConfigError> {
        let (new, older) = (self.values.remove("rope_type"), self.values.remove("type"));
        let field = self.field;
        match (new, older) {
            (Some(new), Some(older)) if new != older => {
                Err(refused(field, "type", &older, &format!("{new}, as `rope_type`")))
            }
            (Some(Value::String(kind)), _) | (None, Some(Value::String(kind))) => Ok(kind),
            (None, None) if self.values.is_empty() => Ok("default".into()),
            // `transformers` reads parameters without a type as an unscaled rotation.
            (None, None) if self.field == "rope_parameters" => Ok("default".into()),
            (kind, older) => {
                let kind = kind.or(older).unwrap_or_default();
                Err(refused(field, "rope_type", &kind, "the name of a type"))
            }
        }
    }

    /// Takes a number of at least `min`; `None` if it is missing or null.
    fn number(&mut self, name: &str, min: f64) -> Result<Option<f64>, ModelConfigError> {
        match self.values.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64().filter(|number| (min..1e30).contains(number)) {
                Some(number) => Ok(Some(number)),
                None => {
                    let rule = format!("a number of at least {min}");
                    Err(refused(self.field, name, &value, &rule))
                }
            },
        }
    }

    /// Takes a number of at least `min`, which may not be missing.
    fn required(&mut self, name: &str, min: f64) -> Result<f64, ModelConfigError> {
        let number = self.number(name, min)?;
        number.ok_or_else(|| {
            ModelConfigError::Field(format!("`{}.{name}` is missing for this type", self.field))
        })
    }

    /// Takes a divisor of frequencies.
    fn factor(&mut self, name: &str) -> Result<f64, ModelConfigError> {
        self.required(name, 1.0)
    }

    fn flag(&mut self, name: &str, default: bool) -> Result<bool, ModelConfigError> {
        match self.values.remove(name) {
            None | Some(Value::Null) => Ok(default),
            Some(Value::Bool(value)) => Ok(value),
            Some(value) => Err(refused(self.field, name, &value, "true or false")),
        }
    }

    /// Takes a list of `count` positive numbers.
    fn list(&mut self, name: &str, count: usize) -> Result<Vec<f64>, ModelConfigError> {
        let value = self.values.remove(name).unwrap_or_default();
        let numbers = value.as_array().and_then(|all| {
            let positive = |value: &Value| value.as_f64().filter(|number| *number > 0.0);
            all.iter().map(positive).collect::<Option<Vec<f64>>>()
        });
        numbers.filter(|numbers| numbers.len() == count).ok_or_else(|| {
            let rule = format!("a list of {count} positive numbers, one per pair of elements");
            refused(self.field, name, &value, &rule)
        })
    }

    /// Refuses parameters that were not read.
    fn finish(&self) -> Result<(), ModelConfigError> {
        match self.values.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, value)) => {
                Err(refused(self.field, name, value, "removed: this type does not read it"))
            }
        }
    }
}
