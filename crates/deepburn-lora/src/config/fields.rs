//! The values of fields, with errors that name them.

use super::*;

/// Reads fields. Null counts as absent.
pub(super) struct Fields<'a>(pub(super) &'a Map<String, Value>);

impl Fields<'_> {
    pub(super) fn given(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// Reads a rank.
    pub(super) fn rank_of(name: &str, value: &Value) -> Result<usize, LoraError> {
        let rank = |value: &Value| value.as_u64().filter(|rank| (1..=LARGEST_RANK).contains(rank));
        let rule = || format!("a whole number from 1 to {LARGEST_RANK}");
        let found = rank(value).map(|rank| rank as usize);
        found.ok_or_else(|| LoraError::mistyped(name, value, &rule(), rank))
    }

    /// Reads a number.
    pub(super) fn number_of(name: &str, value: &Value) -> Result<f64, LoraError> {
        let number = |value: &Value| value.as_f64().filter(|number| number.is_finite());
        number(value).ok_or_else(|| LoraError::mistyped(name, value, "a finite number", number))
    }

    pub(super) fn rank(&self, name: &str) -> Result<Option<usize>, LoraError> {
        self.given(name).map(|value| Self::rank_of(name, value)).transpose()
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<f64>, LoraError> {
        self.given(name).map(|value| Self::number_of(name, value)).transpose()
    }

    pub(super) fn flag(&self, name: &str) -> Result<bool, LoraError> {
        let Some(value) = self.given(name) else { return Ok(false) };
        let flag = Value::as_bool;
        flag(value).ok_or_else(|| LoraError::mistyped(name, value, "true or false", flag))
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<String>, LoraError> {
        let Some(value) = self.given(name) else { return Ok(None) };
        let text = value.as_str().map(|text| Some(text.to_owned()));
        text.ok_or_else(|| LoraError::value(name, value, "a text"))
    }

    /// Reads a name or a list of names.
    pub(super) fn names(&self, name: &str) -> Result<Vec<String>, LoraError> {
        let Some(value) = self.given(name) else { return Ok(Vec::new()) };
        let rule = "a list of names, none of them empty";
        let texts = match value {
            Value::String(text) => vec![Some(text.as_str())],
            Value::Array(list) => list.iter().map(Value::as_str).collect(),
            _ => return Err(LoraError::value(name, value, rule)),
        };
        let names =
            texts.into_iter().map(|text| Some(text.filter(|it| !it.is_empty())?.to_owned()));
        let names: Option<Vec<String>> = names.collect();
        names.ok_or_else(|| LoraError::value(name, value, rule))
    }

    /// Reads a list of names, or a regular expression.
    pub(super) fn pattern(&self, name: &str) -> Result<Option<ModulePattern>, LoraError> {
        Ok(match self.given(name) {
            None => None,
            Some(Value::String(text)) => Some(ModulePattern::Regex(ModuleRegex::new(name, text)?)),
            Some(Value::Array(list)) if list.is_empty() => None,
            Some(_) => Some(ModulePattern::Names(self.names(name)?)),
        })
    }

    pub(super) fn targets(&self) -> Result<Targets, LoraError> {
        let name = "target_modules";
        if let Some(value) = self.given(name) {
            // PEFT compares this name without regard to case.
            if value.as_str().is_some_and(|text| text.eq_ignore_ascii_case("all-linear")) {
                return Ok(Targets::AllLinear);
            }
            // A list without names is a mistake, and not a request for the names of the family.
            if *value == json!([]) {
                return Err(LoraError::value(name, value, "absent or not empty"));
            }
        }
        Ok(self.pattern(name)?.map_or(Targets::OfFamily, Targets::Selected))
    }

    pub(super) fn layers(&self) -> Result<Option<Vec<usize>>, LoraError> {
        let name = "layers_to_transform";
        let Some(value) = self.given(name) else { return Ok(None) };
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let numbers = list.iter().map(|number| usize::try_from(number.as_u64()?).ok());
        let numbers: Option<Vec<usize>> = numbers.collect();
        let numbers = numbers
            .ok_or_else(|| LoraError::value(name, value, "a list of numbers of layers, from 0"))?;
        // PEFT takes an empty list as all layers.
        Ok((!numbers.is_empty()).then_some(numbers))
    }

    /// Reads the tokens whose rows are trained. As in PEFT, an empty list or object is none.
    pub(super) fn tokens(&self) -> Result<TrainedTokens, LoraError> {
        let name = "trainable_token_indices";
        Ok(match self.given(name) {
            None => TrainedTokens::None,
            Some(value) if is_empty(value) => TrainedTokens::None,
            Some(Value::Object(modules)) => {
                let ids = modules.iter().map(|(module, value)| {
                    Ok((module.clone(), Self::token_ids(&format!("{name}.{module}"), value)?))
                });
                TrainedTokens::OfModules(ids.collect::<Result<_, _>>()?)
            }
            Some(value) => TrainedTokens::OfEmbedding(Self::token_ids(name, value)?),
        })
    }

    /// Reads a list of different token ids.
    pub(super) fn token_ids(name: &str, value: &Value) -> Result<Vec<usize>, LoraError> {
        let list = value.as_array().filter(|list| !list.is_empty());
        let ids = list.and_then(|list| {
            list.iter().map(|id| usize::try_from(id.as_u64()?).ok()).collect::<Option<Vec<_>>>()
        });
        let ids = ids.ok_or_else(|| {
            let rule = "a list of token ids (whole numbers from 0), or an object of module names and such lists";
            LoraError::value(name, value, rule)
        })?;
        let mut sorted = ids.clone();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            None => Ok(ids),
            Some(pair) => {
                let rule = format!("a list without repetition: {} occurs twice", pair[0]);
                Err(LoraError::value(name, value, rule))
            }
        }
    }

    pub(super) fn biases(&self) -> Result<TrainedBiases, LoraError> {
        let Some(value) = self.given("bias") else { return Ok(TrainedBiases::None) };
        let found = TrainedBiases::NAMES.iter().find(|(_, name)| value == name);
        let rule = "\"none\", \"lora_only\" or \"all\"";
        found.map(|(own, _)| *own).ok_or_else(|| LoraError::value("bias", value, rule))
    }

    pub(super) fn initial(&self) -> Result<InitialFactors, LoraError> {
        let name = "init_lora_weights";
        match self.given(name) {
            None | Some(Value::Bool(true)) => Ok(InitialFactors::Uniform),
            Some(Value::Bool(false)) => Ok(InitialFactors::Nonzero),
            Some(Value::String(text)) if text == "gaussian" => Ok(InitialFactors::Gaussian),
            // These methods change the base weights or read data.
            Some(value) => Err(LoraError::Unsupported {
                name: name.into(),
                value: value.to_string(),
                consequence:
                    "the base weights and the factors would have other values; use true, false or \
                              \"gaussian\", or convert the adapter to plain LoRA with PEFT"
                        .into(),
            }),
        }
    }

    pub(super) fn pattern_map<T: Copy>(
        &self,
        name: &str,
        read: impl Fn(&str, &Value) -> Result<T, LoraError>,
    ) -> Result<PatternMap<T>, LoraError> {
        let Some(value) = self.given(name) else { return PatternMap::new(name, Vec::new()) };
        let Value::Object(entries) = value else {
            return Err(LoraError::value(name, value, "an object of names and values"));
        };
        let entries = entries
            .iter()
            .map(|(key, value)| Ok((key.clone(), read(&format!("{name}.{key}"), value)?)));
        PatternMap::new(name, entries.collect::<Result<_, _>>()?)
    }
}
