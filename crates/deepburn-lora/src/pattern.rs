//! Patterns for the names of modules, with the meaning that they have in PEFT.
//!
//! Main types: [`ModulePattern`] and [`PatternMap`]. A name is the path of a module in
//! `transformers`, such as `model.layers.0.self_attn.q_proj`.

use fancy_regex::Regex;

use crate::LoraError;

/// The number of steps after which a regular expression is given up. Expressions of adapters need a
/// few hundred.
const BACKTRACKING_LIMIT: usize = 100_000;

/// A list of names, or a regular expression.
#[derive(Clone, Debug)]
pub enum ModulePattern {
    /// A module is selected if its name is in the list, or ends with a dot and a name of the list.
    Names(Vec<String>),
    /// A module is selected if the expression matches its whole name.
    Regex(ModuleRegex),
}

/// A regular expression for whole names of modules, in the syntax of Python.
#[derive(Clone, Debug)]
pub struct ModuleRegex {
    text: String,
    compiled: Regex,
}

impl ModuleRegex {
    /// Compiles an expression, which is the value of the field `name`.
    ///
    /// # Errors
    /// Returns [`LoraError::Value`] if it is not a regular expression.
    pub(crate) fn new(name: &str, text: &str) -> Result<Self, LoraError> {
        // `re.fullmatch` of Python: alternatives need the group, or the anchors would belong to
        // single ones.
        let compiled = compiled(name, text, &format!(r"\A(?:{text})\z"))?;
        Ok(Self { text: text.to_owned(), compiled })
    }
}

/// Compiles the expression `whole`, which is made from `text`, the value of the field `name`.
///
/// # Errors
/// Returns [`LoraError::Value`] if it is not a regular expression.
fn compiled(name: &str, text: &str, whole: &str) -> Result<Regex, LoraError> {
    let mut builder = fancy_regex::RegexBuilder::new(whole);
    builder.backtrack_limit(BACKTRACKING_LIMIT).build().map_err(|error| {
        // The lines before show the position in an expression that the user did not write in this
        // form.
        let reason = error.to_string().lines().last().unwrap_or_default().to_owned();
        LoraError::value(name, format!("{text:?}"), format!("a regular expression ({reason})"))
    })
}

/// Returns whether `regex` matches `module`. An expression that takes too long is an error.
///
/// # Errors
/// Returns [`LoraError::Value`] for the field `name`, whose value is `text`.
fn matches(regex: &Regex, name: &str, text: &str, module: &str) -> Result<bool, LoraError> {
    regex.is_match(module).map_err(|_| too_slow(name, text, module))
}

/// Returns the error for an expression that takes too long.
fn too_slow(name: &str, text: &str, module: &str) -> LoraError {
    let rule = format!("an expression that needs fewer steps for the module `{module}`");
    LoraError::value(name, format!("{text:?}"), rule)
}

//= peft 0.21.2 tuners/tuners_utils.py check_target_module_exists layers_to_transform
/// Returns the number of the layer that a module is in: the first number in its name after the name
/// of a list of layers. `patterns` are expressions for this name; the first of them that matches
/// counts. Without them, any name that has another one before it does. A layer itself, whose name
/// ends with the number, is in no layer.
///
/// # Errors
/// Returns [`LoraError::Value`] for the field `layers_pattern` if a pattern is not a regular
/// expression or takes too long.
pub(crate) fn layer_number(patterns: &[String], module: &str) -> Result<Option<usize>, LoraError> {
    const NAME: &str = "layers_pattern";
    let any = [r"(?<=\.)[^.]*".to_owned()];
    for pattern in if patterns.is_empty() { &any } else { patterns } {
        let whole = format!(r"\A(?:(?:\A|.*?\.){pattern}\.(?P<number>\d+)\.)");
        let found = compiled(NAME, pattern, &whole)?.captures(module);
        let found = found.map_err(|_| too_slow(NAME, pattern, module))?;
        if let Some(found) = found {
            // An alternative of the pattern may match without a number.
            return Ok(found.name("number").and_then(|number| number.as_str().parse().ok()));
        }
    }
    Ok(None)
}

/// Returns whether `module` is `name`, or ends with a dot and `name`.
pub(crate) fn is_named(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|start| start.is_empty() || start.ends_with('.'))
}

impl ModulePattern {
    //= peft 0.21.2 tuners/tuners_utils.py check_target_module_exists
    /// Returns whether the pattern, which is the value of the field `name`, selects a module.
    ///
    /// # Errors
    /// Returns [`LoraError::Value`] for an expression that takes too long.
    pub(crate) fn selects(&self, name: &str, module: &str) -> Result<bool, LoraError> {
        match self {
            Self::Names(names) => Ok(names.iter().any(|name| is_named(module, name))),
            Self::Regex(ModuleRegex { text, compiled }) => matches(compiled, name, text, module),
        }
    }

    /// Returns the list of names, or the text of the expression.
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Names(names) => names.clone().into(),
            Self::Regex(regex) => regex.text.clone().into(),
        }
    }
}

impl PartialEq for ModulePattern {
    fn eq(&self, other: &Self) -> bool {
        self.to_json() == other.to_json()
    }
}

/// Values for some modules: `rank_pattern` and `alpha_pattern`.
///
/// A key is a regular expression for the end of a name, which begins at a dot. The first key that
/// matches a module counts.
#[derive(Clone, Debug, Default)]
pub struct PatternMap<T>(Vec<(String, Regex, T)>);

impl<T: Copy> PatternMap<T> {
    /// Compiles the keys of the field `name`.
    ///
    /// # Errors
    /// Returns [`LoraError::Value`] if a key is not a regular expression.
    pub(crate) fn new(name: &str, values: Vec<(String, T)>) -> Result<Self, LoraError> {
        //= peft 0.21.2 utils/other.py get_pattern_key
        let compile = |(key, value): (String, T)| {
            let regex = compiled(name, &key, &format!(r"\A(?:(.*\.)?({key}))\z"))?;
            Ok((key, regex, value))
        };
        Ok(Self(values.into_iter().map(compile).collect::<Result<_, _>>()?))
    }

    //= peft 0.21.2 utils/other.py get_pattern_key
    /// Returns the value for a module.
    ///
    /// # Errors
    /// Returns [`LoraError::Value`] for an expression that takes too long.
    pub(crate) fn value_for(&self, name: &str, module: &str) -> Result<Option<T>, LoraError> {
        for (key, regex, value) in &self.0 {
            if matches(regex, name, key, module)? {
                return Ok(Some(*value));
            }
        }
        Ok(None)
    }

    /// Returns the keys that match none of these modules.
    ///
    /// # Errors
    /// Returns [`LoraError::Value`] for an expression that takes too long.
    pub(crate) fn unmatched(&self, name: &str, modules: &[&str]) -> Result<Vec<&str>, LoraError> {
        let mut unmatched = Vec::new();
        for (key, regex, _) in &self.0 {
            let mut is_matched = false;
            for module in modules {
                is_matched |= matches(regex, name, key, module)?;
            }
            if !is_matched {
                unmatched.push(key.as_str());
            }
        }
        Ok(unmatched)
    }

    /// Returns keys and values, in order.
    pub fn entries(&self) -> impl Iterator<Item = (&str, T)> {
        self.0.iter().map(|(key, _, value)| (key.as_str(), *value))
    }
}

impl<T: Copy + PartialEq> PartialEq for PatternMap<T> {
    fn eq(&self, other: &Self) -> bool {
        self.entries().eq(other.entries())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    //= peft 0.21.2 tuners/tuners_utils.py check_target_module_exists
    #[test]
    fn names_are_whole_or_follow_a_dot() {
        let pattern = ModulePattern::Names(vec!["q_proj".into(), "layers.1.mlp.up".into()]);
        for (module, expected) in [
            ("q_proj", true),
            ("model.layers.0.self_attn.q_proj", true),
            ("model.layers.0.self_attn.eq_proj", false),
            ("model.layers.1.mlp.up", true),
            ("model.layers.11.mlp.up", false),
        ] {
            assert_eq!(pattern.selects("target_modules", module), Ok(expected), "{module}");
        }
    }

    //= peft 0.21.2 tuners/tuners_utils.py check_target_module_exists
    #[test]
    fn expressions_match_the_whole_name() {
        let regex = |text| ModuleRegex::new("target_modules", text).map(ModulePattern::Regex);
        let pattern = regex(r".*layers\.[01]\.self_attn\.(q|k)_proj").unwrap();
        for (module, expected) in [
            ("model.layers.1.self_attn.k_proj", true),
            ("model.layers.2.self_attn.k_proj", false),
            ("model.layers.1.self_attn.k_proj.x", false),
        ] {
            assert_eq!(pattern.selects("target_modules", module), Ok(expected), "{module}");
        }
        // Python has look-arounds.
        let pattern = regex(r"^(?!.*vision).*proj$").unwrap();
        assert_eq!(pattern.selects("t", "model.q_proj"), Ok(true));
        assert_eq!(pattern.selects("t", "vision.q_proj"), Ok(false));
        let error = regex("q_(").unwrap_err().to_string();
        assert!(error.contains("`target_modules` is \"q_(\""), "{error}");
    }

    //= peft 0.21.2 utils/other.py get_pattern_key
    #[test]
    fn the_first_key_counts() {
        let values = vec![("q_proj".into(), 2), (r"layers\.1\..*".into(), 3), ("_proj".into(), 4)];
        let map = PatternMap::new("rank_pattern", values).unwrap();
        for (module, expected) in [
            ("model.layers.1.self_attn.q_proj", Some(2)),
            ("model.layers.1.self_attn.k_proj", Some(3)),
            ("model.layers.0.self_attn.k_proj", None),
        ] {
            assert_eq!(map.value_for("rank_pattern", module), Ok(expected), "{module}");
        }
    }

    //= peft 0.21.2 tuners/tuners_utils.py check_target_module_exists layers_to_transform
    /// The numbers are the layers for which PEFT 0.21.2 selects the module.
    #[test]
    fn layers_are_numbered_as_in_peft() {
        let modules = [
            "model.layers.1.q",
            "layers.1.q",
            "model.layers.1",
            "a.1.q",
            "model.layers.1.experts.0.q",
            "h.2.x.layers.3.q",
            "model.mylayers.4.q",
            "transformer.h.10.attn.q",
            "x.h.1.layers.2.q",
            "model.layers.01.q",
        ];
        let cases: [(&[&str], [Option<usize>; 10]); 6] = [
            (
                &[],
                [Some(1), None, None, None, Some(1), Some(3), Some(4), Some(10), Some(1), Some(1)],
            ),
            (
                &["layers"],
                [Some(1), Some(1), None, None, Some(1), Some(3), None, None, Some(2), Some(1)],
            ),
            (
                &["h", "layers"],
                [Some(1), Some(1), None, None, Some(1), Some(2), None, Some(10), Some(1), Some(1)],
            ),
            (
                &["layers", "h"],
                [Some(1), Some(1), None, None, Some(1), Some(3), None, Some(10), Some(2), Some(1)],
            ),
            (
                &["l[a-z]+s"],
                [Some(1), Some(1), None, None, Some(1), Some(3), None, None, Some(2), Some(1)],
            ),
            // The first alternative ends before the number.
            (&["layers|h"], [None; 10]),
        ];
        for (patterns, numbers) in cases {
            let patterns: Vec<_> = patterns.iter().map(|&it| it.to_owned()).collect();
            for (module, number) in modules.iter().zip(numbers) {
                assert_eq!(
                    layer_number(&patterns, module).unwrap(),
                    number,
                    "{patterns:?} {module}"
                );
            }
        }
        let error = layer_number(&["(".to_owned()], "").unwrap_err().to_string();
        assert!(error.contains("layers_pattern"), "{error}");
    }
}
