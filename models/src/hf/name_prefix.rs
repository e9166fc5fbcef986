//! Prefixes that wrappers add to tensor names.
//!
//! PyTorch names a tensor by the attributes that lead to it. If a model is saved from inside a
//! wrapper, for example `DistributedDataParallel`, every name starts with the attribute in which
//! the wrapper stores the model:
//!
//! ```text
//! transformer.h.0.ln_1.weight                     the name in `transformers`
//! module._orig_mod.transformer.h.0.ln_1.weight    the same tensor, saved from DDP around a compiled model
//! ```
//!
//! Main function: [`find_prefix`]. A prefix of known wrappers is removed. Any other prefix is an
//! error, because the model may be one of several in the file.

use std::collections::BTreeMap;

/// Prefixes of known wrappers. They can be combined in any order.
const WRAPPERS: [&str; 7] = [
    // DataParallel, DistributedDataParallel and DeepSpeed's engine.
    "module.",
    // torch.compile.
    "_orig_mod.",
    // FullyShardedDataParallel.
    "_fsdp_wrapped_module.",
    // Lightning's strategies.
    "_forward_module.",
    // PEFT, after its adapters have been merged.
    "base_model.model.",
    "base_model.",
    // A LightningModule or another module with the attribute `model`.
    "model.",
];

/// Attributes of wrappers around single layers, which are in the middle of names: nested FSDP,
/// activation checkpointing and compiled layers.
const LAYER_WRAPPERS: [&str; 3] =
    ["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"];

/// Parts of the names that PEFT gives to the tensors of a LoRA adapter.
const ADAPTER_PARTS: [&str; 4] =
    [".lora_A.", ".lora_B.", ".lora_embedding_A", ".lora_magnitude_vector"];

/// Returns the prefix that all of the model's tensors have in addition to their own names; empty if
/// there is none.
///
/// `is_own` returns whether a name without a prefix belongs to a parameter of the model. Other
/// names are ignored.
///
/// # Errors
/// Returns the reason as text if the tensors have different prefixes, or a prefix that is not one
/// of [`WRAPPERS`].
pub(crate) fn find_prefix<'n>(
    names: impl Iterator<Item = &'n str>,
    is_own: impl Fn(&str) -> bool,
) -> Result<&'n str, String> {
    // Each prefix with the number of its tensors and an example.
    let mut found: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    for name in names {
        // The name may begin after any dot. The first match leaves the shortest prefix.
        let mut starts = [0].into_iter().chain(name.match_indices('.').map(|(at, _)| at + 1));
        if let Some(start) = starts.find(|start| is_own(&name[*start..])) {
            found.entry(&name[..start]).or_insert((0, name)).0 += 1;
        }
    }
    if found.len() > 1 {
        let groups = found.iter().map(|(prefix, (count, example))| match *prefix {
            "" => format!("{count} without a prefix, such as `{example}`"),
            prefix => format!("{count} with `{prefix}`, such as `{example}`"),
        });
        let groups: Vec<_> = groups.collect();
        return Err(format!(
            "the names of its tensors have different prefixes: {}; save a single model, with one name for each tensor",
            groups.join("; ")
        ));
    }
    let Some((prefix, (count, example))) = found.into_iter().next() else { return Ok("") };
    match is_known(prefix) {
        true => Ok(prefix),
        false => Err(format!(
            "the names of its tensors have the unknown prefix `{prefix}`: {count} such as `{example}`; remove the prefix \
             from the names"
        )),
    }
}

/// Returns a name without the attributes of wrappers around layers. A wrapper at the start is a
/// prefix and stays.
pub(crate) fn without_layer_wrappers(name: &str) -> String {
    let parts = name.split('.').enumerate();
    let own = parts.filter(|(at, part)| *at == 0 || !LAYER_WRAPPERS.contains(part));
    own.map(|(_, part)| part).collect::<Vec<_>>().join(".")
}

/// Returns whether a prefix consists of the prefixes of known wrappers.
fn is_known(prefix: &str) -> bool {
    prefix.is_empty()
        || WRAPPERS.iter().any(|wrapper| prefix.strip_prefix(wrapper).is_some_and(is_known))
}

/// Returns the reason for refusing a file if one of `names` belongs to a LoRA adapter.
pub(crate) fn adapter_in<'n>(mut names: impl Iterator<Item = &'n str>) -> Option<String> {
    let name = names.find(|name| ADAPTER_PARTS.iter().any(|part| name.contains(part)))?;
    Some(format!("it has the weights of a LoRA adapter, such as `{name}`; {MERGE}"))
}

/// The remedy for a folder or a file with a LoRA adapter.
pub(crate) const MERGE: &str = "give the base model, and train the adapter further with model.adapter or merge it with \
                                `deepburn merge`";

#[cfg(test)]
mod tests {
    use super::*;

    fn find<'n>(names: &[&'n str]) -> Result<&'n str, String> {
        find_prefix(names.iter().copied(), |name| ["wte", "h.0.bias"].contains(&name))
    }

    #[test]
    fn prefixes_of_wrappers_are_found() {
        for (names, expected) in [
            (&["wte", "h.0.bias"][..], ""),
            (&["module.wte", "module.h.0.bias", "module.more"], "module."),
            (&["_orig_mod.module.wte", "other"], "_orig_mod.module."),
            (&["module._orig_mod.h.0.bias"], "module._orig_mod."),
            (&["base_model.model.wte"], "base_model.model."),
            (&["module.base_model.model.wte"], "module.base_model.model."),
            (&["model._fsdp_wrapped_module.wte"], "model._fsdp_wrapped_module."),
            (&["bias", "0.bias", "module.bias"], ""),
            (&[], ""),
        ] {
            assert_eq!(find(names).as_deref(), Ok(expected), "{names:?}");
        }
    }

    #[test]
    fn wrappers_around_layers_are_removed() {
        for (name, expected) in [
            ("h.0._fsdp_wrapped_module.attn._orig_mod.bias", "h.0.attn.bias"),
            ("h.0._checkpoint_wrapped_module.bias", "h.0.bias"),
            ("_orig_mod.h.0.bias", "_orig_mod.h.0.bias"),
            ("h.0.bias", "h.0.bias"),
        ] {
            assert_eq!(without_layer_wrappers(name), expected);
        }
    }

    #[test]
    fn other_prefixes_are_named_once() {
        for (names, parts) in [
            (
                &["policy.wte", "policy.h.0.bias"][..],
                &["unknown prefix `policy.`: 2 such as `policy.wte`"][..],
            ),
            (&["module.ema.wte"], &["unknown prefix `module.ema.`"]),
            (&["submodule.wte"], &["unknown prefix `submodule.`"]),
            (
                &["wte", "module.wte"],
                &["1 without a prefix, such as `wte`", "1 with `module.`, such as `module.wte`"],
            ),
            (&["module.wte", "_orig_mod.h.0.bias"], &["`module.`", "`_orig_mod.`"]),
        ] {
            let reason = find(names).unwrap_err();
            assert!(parts.iter().all(|part| reason.contains(part)), "{reason}");
        }
    }

    #[test]
    fn adapters_are_recognized() {
        let name = "base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight";
        let reason = adapter_in(["wte", name].into_iter()).unwrap();
        assert!(reason.contains(name) && reason.contains("deepburn merge"), "{reason}");
        assert_eq!(adapter_in(["wte.weight", "lora_A"].into_iter()), None);
    }
}
