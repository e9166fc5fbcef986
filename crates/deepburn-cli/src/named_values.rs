//! Options of the command line whose values have names.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// Returns the parser of an option with these values: the name of each, its help text, and what it
/// stands for. Names match in any case if the option ignores the case.
pub(crate) fn named_values<T: Copy + Send + Sync + 'static, const N: usize>(
    values: [(&'static str, &'static str, T); N],
) -> impl TypedValueParser<Value = T> {
    let names = values.map(|(name, help, _)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(names).try_map(move |given| {
        let found = values.iter().find(|(name, ..)| name.eq_ignore_ascii_case(&given));
        found.map(|(.., value)| *value).ok_or_else(|| format!("{given} is not one of the values"))
    })
}
