//! Reads the rotation of a model: `rope_parameters` of `transformers` 5, or `rope_theta` and
//! `rope_scaling` of earlier versions.
//!
//! Main type: [`Rope`]. Fields that contradict each other are refused, because versions of
//! `transformers` differ in which one wins. So are values that `transformers` does not read in a
//! family, although it reads them in others: the same file would describe two models.

use serde_json::{Map, Value};

use super::settings::FamilySettings;
use crate::decoder::{Rotary, RotaryScaling};
use crate::hf::{ConfigFields, MAX_SIZE, ModelConfigError, check_size};

/// What the rotation depends on besides its own fields.
#[derive(Clone, Copy)]
pub(super) struct Rope {
    head_width: usize,
    max_len: usize,
    theta: f64,
    form: RopeForm,
}

/// Which fields and types a family has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RopeForm {
    /// One rotation of whole heads.
    Shared,
    /// One rotation, in Phi 3: of a part of each head, unscaled or `longrope`, whose older names
    /// are `su` and `yarn`.
    Phi3,
    /// A rotation for each type of layer, in Gemma 3.
    ByLayerType,
}

/// The parameters of one rotation, as written.
struct RopeParameters {
    /// The field that they are in.
    field: &'static str,
    values: Map<String, Value>,
}

/// `original_max_position_embeddings` of a Phi 3 that does not have the field.
const ORIGINAL_LEN_OF_PHI3: usize = 4096;

impl Rope {
    /// Returns the reader for a model with these sizes, and with this base if none is given.
    pub(super) fn new(settings: &FamilySettings, theta: f64) -> Self {
        let (head_width, max_len) = (settings.attention.head_width, settings.max_len);
        Self { head_width, max_len, theta, form: RopeForm::Shared }
    }

    /// Returns the reader for Phi 3.
    pub(super) fn of_phi3(self) -> Self {
        Self { form: RopeForm::Phi3, ..self }
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

    //= transformers 5.23.0 models/gemma3/configuration_gemma3.py convert_rope_params_to_dict
    /// Reads the rotations of full and of sliding layers. `rope_scaling`, the older field, scales
    /// the full layers only.
    ///
    /// # Errors
    /// Returns the errors of [`read`](Self::read), and [`ModelConfigError::Field`] for the form of
    /// another family.
    pub(super) fn read_by_layer_type(
        &self,
        fields: &mut ConfigFields,
    ) -> Result<[Rotary; 2], ModelConfigError> {
        let (field, mut given) = scaling(fields)?;
        let [mut full, mut sliding] = match field {
            "rope_parameters" => {
                let types = [
                    ("full_attention", "rope_parameters.full_attention"),
                    ("sliding_attention", "rope_parameters.sliding_attention"),
                ];
                let both = types.map(|(name, field)| match given.remove(name) {
                    Some(Value::Object(values)) => Ok(RopeParameters { field, values }),
                    None | Some(Value::Null) => Ok(RopeParameters { field, values: Map::new() }),
                    Some(other) => Err(refused("rope_parameters", name, &other, "an object")),
                });
                if let Some((name, value)) = given.iter().find(|(_, value)| !value.is_null()) {
                    let rule = "in the objects full_attention and sliding_attention, because the model has a rotation for \
                                each type of layer";
                    return Err(refused(field, name, value, rule));
                }
                let [full, sliding] = both;
                [full?, sliding?]
            }
            // `transformers` overwrites parameters of an unscaled rotation with these, so the type
            // stays unless it has the newer name.
            _ => {
                if let (None, Some(kind)) = (given.get("rope_type"), given.get("type")) {
                    let rule =
                        "named `rope_type`: `transformers` does not read `type` in this family";
                    return Err(refused(field, "type", kind, rule));
                }
                [given, Map::new()].map(|values| RopeParameters { field, values })
            }
        };
        let rope = Self { form: RopeForm::ByLayerType, ..*self };
        Ok([
            rope.rotary(fields, &mut full, "rope_theta", self.theta)?,
            rope.rotary(fields, &mut sliding, "rope_local_base_freq", 1e4)?,
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
        let width = self.width(fields, parameters)?;
        let scaling = self.scaling(fields, parameters, width, theta)?;
        parameters.finish()?;
        Ok(Rotary { width, theta, scaling })
    }

    //= transformers 5.23.0 models/phi3/modeling_phi3.py compute_default_rope_parameters
    /// Reads the number of elements of a head that are rotated.
    fn width(
        &self,
        fields: &mut ConfigFields,
        parameters: &mut RopeParameters,
    ) -> Result<usize, ModelConfigError> {
        const NAME: &str = "partial_rotary_factor";
        let older = optional_number(fields, NAME)?;
        let own = parameters.number(NAME, 0.0)?;
        let share = agreed(parameters, NAME, own, older)?.unwrap_or(1.0);
        let refused = |rule: &str| match own {
            Some(_) => refused(parameters.field, NAME, &share.into(), rule),
            None => ModelConfigError::value(NAME, share, rule),
        };
        if self.form != RopeForm::Phi3 && share != 1.0 {
            // Unscaled rotations ignore the factor there, and scaled ones fail.
            let rule = "1: `transformers` rotates whole heads of this family, and only reads the factor in others; set it \
                        to 1 to rotate whole heads";
            return Err(refused(rule));
        }
        // Rounded towards 0, as in `transformers`.
        let width = (self.head_width as f64 * share) as usize;
        match share <= 1.0 && width >= 2 && width.is_multiple_of(2) {
            true => Ok(width),
            false => Err(refused(&format!(
                "a share for which `head_dim` = {} has an even number of rotated elements",
                self.head_width
            ))),
        }
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
        let original_len = self.original_len(fields, parameters, &kind)?;
        //= transformers 5.23.0 models/phi3/configuration_phi3.py validate_rope
        let is_known = self.form != RopeForm::Phi3
            || ["default", "longrope", "su", "yarn"].contains(&kind.as_str());
        if !is_known {
            let rule = "one of default, longrope, the types that `transformers` has for Phi 3";
            return Err(refused(parameters.field, "rope_type", &kind.into(), rule));
        }
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
            "su" | "yarn" if self.form == RopeForm::Phi3 => {
                self.longrope(parameters, width, original_len)
            }
            // Its ramp divides by the logarithm of the base.
            "yarn" if theta > 1.0 => {
                let field = parameters.field;
                let scaling = yarn(parameters, original_len)?;
                if let (RopeForm::ByLayerType, RotaryScaling::Yarn { truncate: false, .. }) =
                    (self.form, &scaling)
                {
                    let rule = "true: `transformers` does not read it in this family, and rounds; remove it";
                    return Err(refused(field, "truncate", &false.into(), rule));
                }
                Ok(scaling)
            }
            _ => {
                let rule = "one of default, linear, dynamic, llama3, longrope, yarn";
                Err(refused(parameters.field, "rope_type", &kind.into(), rule))
            }
        }
    }

    //= transformers 5.23.0 models/phi3/configuration_phi3.py original_max_position_embeddings
    /// Reads the length that the model was first trained on.
    fn original_len(
        &self,
        fields: &mut ConfigFields,
        parameters: &mut RopeParameters,
        kind: &str,
    ) -> Result<usize, ModelConfigError> {
        const NAME: &str = "original_max_position_embeddings";
        let own = parameters.number(NAME, 1.0)?;
        if let Some(length) = own.filter(|length| length.fract() != 0.0) {
            return Err(refused(parameters.field, NAME, &length.into(), "a positive integer"));
        }
        let own = own.map(|length| length as usize);
        let is_read = ["llama3", "longrope", "su", "yarn"].contains(&kind);
        let outside = match self.form {
            // Not read there, and therefore refused if it is given.
            RopeForm::ByLayerType => None,
            _ => fields.optional_count(NAME)?,
        };
        if let Some(length) = outside.filter(|_| is_read) {
            // Some types divide by it or by its logarithm.
            check_size(NAME, length, MAX_SIZE)?;
        }
        match (self.form, own, outside) {
            // Outside of the parameters, it wins.
            (_, _, Some(length)) => Ok(length),
            (RopeForm::Phi3, Some(own), None) if is_read && own != ORIGINAL_LEN_OF_PHI3 => {
                let rule = format!(
                    "{ORIGINAL_LEN_OF_PHI3}, which `transformers` uses if Phi 3 has no `{NAME}` outside of `{field}`; \
                     write it there",
                    field = parameters.field
                );
                Err(refused(parameters.field, NAME, &own.into(), &rule))
            }
            (RopeForm::Phi3, _, None) => Ok(ORIGINAL_LEN_OF_PHI3),
            (_, own, None) => Ok(own.unwrap_or(self.max_len)),
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
        Ok(RotaryScaling::LongRope {
            short_factor,
            long_factor,
            original_len,
            attention_factor,
            recomputes_keys: self.form == RopeForm::Phi3,
        })
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
    // Python's `or` takes the default for 0, too.
    let mut or = |name, default| {
        let given = parameters.number(name, 0.0)?;
        Ok(given.filter(|rotations| *rotations != 0.0).unwrap_or(default))
    };
    let (beta_fast, beta_slow) = (or("beta_fast", 32.0)?, or("beta_slow", 1.0)?);
    Ok(RotaryScaling::Yarn {
        factor,
        original_len,
        beta_fast,
        beta_slow,
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
            (None, None) if self.field != "rope_scaling" => Ok("default".into()),
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

    /// Takes a boolean. Null is refused, because `transformers` takes it for false, whatever the
    /// default.
    fn flag(&mut self, name: &str, default: bool) -> Result<bool, ModelConfigError> {
        match self.values.remove(name) {
            None => Ok(default),
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
