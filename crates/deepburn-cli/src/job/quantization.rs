//! The parameters of a model that stay unquantized when its frozen base is stored in 8 or 4 bits.

use deepburn_config::{QuantizationJob, QuantizationPlan};
use deepburn_models::Architecture;

/// Returns the plan of a job's quantization for a model. Only parameters of the base model are
/// quantized: if parameter groups may freeze others (`freezes`), these are skipped.
///
/// Modules have the names of the model's files, with or without a common prefix such as `model.`.
/// As in `transformers`, an entry of `llm_int8_skip_modules` is a complete name, its beginning up
/// to a dot, or its end. A head that is tied to the embedding selects the embedding.
///
/// # Errors
/// Returns the reason if an entry selects no module. In `transformers` it has no effect, which
/// would hide a typing error.
pub(crate) fn quantization_plan(
    job: &QuantizationJob,
    model: &dyn Architecture,
    freezes: bool,
) -> Result<QuantizationPlan, String> {
    let map = model.weight_map();
    let mut skipped = Vec::new();
    for name in &job.skip_modules {
        let selects = |path: &str| {
            let names = [path.to_owned(), map.stored_name(path)];
            names.iter().any(|it| is_selected(it.strip_suffix(".weight").unwrap_or(it), name))
        };
        let tied = map.tied().map(|(weight, target)| (weight.path(), target.path()));
        let own = map.parameters().map(|weight| (weight.path(), weight.path()));
        let selected = own.chain(tied).filter(|(path, _)| selects(path));
        let paths: Vec<_> = selected.map(|(_, target)| target.to_owned()).collect();
        if paths.is_empty() {
            return Err(format!(
                "llm_int8_skip_modules: {name:?} selects no module of {}; give names such as \"embed_tokens\", or remove it",
                model.name()
            ));
        }
        skipped.extend(paths);
    }
    let trained = model.parameters().into_iter().filter(|it| freezes && !it.is_frozen);
    skipped.extend(trained.filter(|it| it.shape.len() == 2).map(|it| it.path));
    skipped.sort();
    skipped.dedup();
    Ok(QuantizationPlan { format: job.format, skipped })
}

/// Returns whether an entry selects the module `name`.
fn is_selected(name: &str, entry: &str) -> bool {
    let rest = name.strip_prefix(entry);
    let is_beginning = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    !entry.is_empty() && (is_beginning || name.ends_with(entry))
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepburn_config::QuantizedFormat;
    use deepburn_models::gpt2::Gpt2Config;

    fn skipped(names: &[&str]) -> Result<Vec<String>, String> {
        let skip_modules = names.iter().map(|name| (*name).to_owned()).collect();
        let job = QuantizationJob { format: QuantizedFormat::Nf4, skip_modules };
        quantization_plan(&job, &Gpt2Config::small(), false).map(|plan| plan.skipped)
    }

    #[test]
    fn entries_select_names_beginnings_and_ends() {
        assert_eq!(skipped(&[]).unwrap(), [""; 0]);
        assert_eq!(skipped(&["wte"]).unwrap(), ["wte.weight"]);
        // GPT-2's head is tied to its embedding.
        assert_eq!(skipped(&["lm_head", "wte"]).unwrap(), ["wte.weight"]);
        assert!(skipped(&["h.1"]).unwrap().iter().all(|path| path.starts_with("h.1.")));
        let ends = skipped(&["attn.c_attn"]).unwrap();
        assert!(ends.contains(&"h.11.attn.c_attn.weight".to_owned()), "{ends:?}");
    }

    #[test]
    fn an_entry_without_a_module_is_refused() {
        for name in ["wtf", "h.12", ""] {
            let error = skipped(&[name]).unwrap_err();
            assert!(error.contains(&format!("{name:?} selects no module of")), "{error}");
        }
    }
}
