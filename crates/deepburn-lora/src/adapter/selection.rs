//! The modules of a model that the fields of a configuration select.

use super::*;

/// Returns the modules that a configuration adapts, in the order of the model.
///
/// # Errors
/// Returns [`LoraError`] if there are none.
pub(super) fn selected<'m>(
    config: &LoraConfig,
    targets: &Targets,
    modules: &'m [ModelModule],
) -> Result<Vec<&'m ModelModule>, LoraError> {
    let mut selected = Vec::new();
    for module in modules {
        let is_target = match targets {
            // `Adapter::new` has replaced it with the names of the family.
            Targets::OfFamily => false,
            //= peft 0.21.2 tuners/tuners_utils.py _maybe_include_all_linear_layers
            Targets::AllLinear => matches!(module.kind, ModuleKind::Linear { .. }),
            Targets::Selected(pattern) => {
                pattern.selects("target_modules", &module.name)?
                    && is_in_layers(config, targets, &module.name)?
            }
        };
        // An exclusion takes precedence over a target, as in PEFT.
        let is_excluded = match &config.exclude {
            Some(pattern) => pattern.selects("exclude_modules", &module.name)?,
            None => false,
        };
        if is_target && !is_excluded {
            selected.push(module);
        }
    }
    if let Targets::Selected(ModulePattern::Names(names)) = targets {
        // A name that selects nothing is a mistake even if others select something.
        let unknown =
            names.iter().find(|name| !modules.iter().any(|module| is_named(&module.name, name)));
        if let Some(name) = unknown {
            return Err(LoraError::module("target_modules", no_module(name, modules)));
        }
    }
    if selected.is_empty() {
        Err(nothing_selected(config, targets, modules)?)
    } else {
        Ok(selected)
    }
}

/// Returns the error for a configuration that selects no module.
///
/// # Errors
/// Returns [`LoraError`] for an expression that takes too long.
fn nothing_selected(
    config: &LoraConfig,
    targets: &Targets,
    modules: &[ModelModule],
) -> Result<LoraError, LoraError> {
    if let (Some(layers), Targets::Selected(pattern)) = (&config.layers, targets) {
        for module in modules {
            if pattern.selects("target_modules", &module.name)? {
                let reason = format!(
                    "no module of target_modules is in {layers:?}, such as `{}`",
                    module.name
                );
                return Ok(LoraError::module("layers_to_transform", reason));
            }
        }
    }
    let rule = match targets {
        // A single name is a common mistake.
        Targets::Selected(ModulePattern::Regex(_)) => {
            " by the regular expression, which has to match a whole name (a list selects by last names)"
        }
        _ => "",
    };
    let names = some_names(modules.iter().filter(|it| it.kind != ModuleKind::Other));
    let reason = format!("no module of the model is selected{rule}; it has {names}");
    Ok(LoraError::module("target_modules", reason))
}

//= peft 0.21.2 utils/other.py _set_trainable
/// Returns the modules that a name of `modules_to_save` selects. PEFT compares the ends of names as
/// texts, so `norm` selects `input_layernorm` too.
///
/// # Errors
/// Returns [`LoraError`] if there are none, or if the name also selects a module that contains
/// others, which PEFT would train with all of them.
pub(super) fn modules_to_save<'m>(
    name: &str,
    modules: &'m [ModelModule],
) -> Result<Vec<&'m ModelModule>, LoraError> {
    let field = "modules_to_save";
    let mut all = modules.iter().flat_map(|module| containers(&module.name));
    if let Some(container) = all.find(|container| container.ends_with(name)) {
        let reason = format!(
            "`{name}` selects `{container}`, which contains other modules; name these, such as {}",
            some_names(modules.iter().filter(|module| module.name.starts_with(container)))
        );
        return Err(LoraError::module(field, reason));
    }
    let chosen: Vec<_> = modules.iter().filter(|module| module.name.ends_with(name)).collect();
    match chosen.is_empty() {
        true => Err(LoraError::module(field, no_module(name, modules))),
        false => Ok(chosen),
    }
}

/// Returns the modules with trained rows, and the tokens of the rows. A tied output projection has
/// the rows of the embedding.
///
/// # Errors
/// Returns [`LoraError`] if a name does not select one embedding or output projection, or if a tied
/// output projection has rows of its own.
pub(super) fn modules_with_rows<'m>(
    tokens: &TrainedTokens,
    modules: &'m [ModelModule],
) -> Result<Vec<(&'m ModelModule, Vec<usize>)>, LoraError> {
    let embedding = modules.iter().find(|it| matches!(it.kind, ModuleKind::Embedding { .. }));
    let named = match tokens {
        TrainedTokens::None => return Ok(Vec::new()),
        TrainedTokens::OfEmbedding(tokens) => {
            return Ok(embedding.map(|it| (it, tokens.clone())).into_iter().collect());
        }
        TrainedTokens::OfModules(named) => named,
    };
    let mut found: Vec<(&ModelModule, Vec<usize>)> = Vec::new();
    for (name, tokens) in named {
        let module = modules.iter().find(|module| is_named(&module.name, name));
        let module = module.ok_or_else(|| LoraError::module(TOKENS, no_module(name, modules)))?;
        if !matches!(module.kind, ModuleKind::Embedding { .. } | ModuleKind::Head { .. }) {
            let reason = format!(
                "`{}` is neither the token embedding nor the output projection",
                module.name
            );
            return Err(LoraError::module(TOKENS, reason));
        }
        if found.iter().any(|(other, _)| *other == module) {
            let reason = format!("`{}` is named twice; name it once", module.name);
            return Err(LoraError::module(TOKENS, reason));
        }
        found.push((module, tokens.clone()));
    }
    let is_tied_head =
        |it: &&(&ModelModule, Vec<usize>)| it.0.kind == ModuleKind::Head { is_tied: true };
    let Some((head, tokens)) = found.iter().find(is_tied_head) else { return Ok(found) };
    if !found.iter().any(|(module, own)| Some(*module) == embedding && own == tokens) {
        let reason = format!(
            "`{}` is tied to the embedding, so its rows cannot be other parameters; give the ids as a list, which trains \
             the rows of both",
            head.name
        );
        return Err(LoraError::module(TOKENS, reason));
    }
    Ok(found.into_iter().filter(|it| !is_tied_head(&it)).collect())
}

/// Returns whether a module is in one of the adapted layers. As in PEFT, a module that the list
/// names in full is, whatever its layer.
///
/// # Errors
/// Returns [`LoraError::Value`] for an expression of `layers_pattern` that takes too long.
pub(super) fn is_in_layers(
    config: &LoraConfig,
    targets: &Targets,
    name: &str,
) -> Result<bool, LoraError> {
    let Some(layers) = &config.layers else { return Ok(true) };
    if let Targets::Selected(ModulePattern::Names(names)) = targets
        && names.iter().any(|own| own == name)
    {
        return Ok(true);
    }
    let number = layer_number(&config.layers_pattern, name)?;
    Ok(number.is_some_and(|number| layers.contains(&number)))
}

/// Returns `target_modules` for `adapter_config.json`: as in the configuration, or whole names.
/// PEFT stores these for `"all-linear"`, and refuses an expression that also matches a module of
/// another kind: one with modules in it, such as `model.layers.0.mlp`, or one without weights, such
/// as `model.layers.0.mlp.act_fn`. These are not in `modules`, so an expression that matches any
/// name is stored as whole names.
///
/// # Errors
/// Returns [`LoraError`] for an expression that takes too long.
pub(super) fn target_names(
    targets: &Targets,
    selected: &[&ModelModule],
    modules: &[ModelModule],
) -> Result<Value, LoraError> {
    let names = || json!(selected.iter().map(|module| &module.name).collect::<Vec<_>>());
    let pattern = match targets {
        Targets::Selected(pattern) => pattern,
        Targets::AllLinear | Targets::OfFamily => return Ok(names()),
    };
    if let ModulePattern::Regex(_) = pattern {
        for container in modules.iter().flat_map(|module| containers(&module.name)) {
            // PEFT also sees modules without parameters, which `modules` lacks. The last two names
            // stand for them.
            for name in [container, &format!("{container}._"), &format!("{container}.act_fn")] {
                if pattern.selects("target_modules", name)? {
                    return Ok(names());
                }
            }
        }
    }
    Ok(pattern.to_json())
}

/// Returns the names of the modules that contain a module.
fn containers(name: &str) -> impl Iterator<Item = &str> {
    name.match_indices('.').map(|(end, _)| &name[..end])
}

/// Returns the error message for a name that selects no module.
pub(super) fn no_module(name: &str, modules: &[ModelModule]) -> String {
    format!("no module is called `{name}`; the model has {}", some_names(modules.iter()))
}

/// Returns the different last names of modules.
pub(super) fn some_names<'m>(modules: impl Iterator<Item = &'m ModelModule>) -> String {
    let mut names: Vec<&str> = Vec::new();
    for module in modules {
        let last = module.name.rsplit('.').next().unwrap_or(&module.name);
        if !names.contains(&last) {
            names.push(last);
        }
    }
    names.join(", ")
}
