//! Which parts of a model the layers of a pipeline are.
//!
//! A pipeline names its parameters by the number of their layer or the key of their tied layer, and
//! their name in the layer: `2.attn.c_attn.weight`. Which part of the whole model a layer is
//! follows from the names and shapes within it: all parameters of layer 2 are found below
//! `transformer.h.0.`. An assignment has to be unique, because another one would load the wrong
//! weights.
//!
//! ```text
//! tied_modules.wte   weight [64, 16]                          transformer.wte.
//! 1                  weight [32, 16]                          transformer.wpe.
//! 2, 3               ln_1.weight [16], attn.c_attn.weight …   transformer.h.0., transformer.h.1.
//! 4                  weight [16], bias [16]                   transformer.ln_f., the only one that is left
//! ```
//!
//! An embedding and an output layer that are not tied have the same names and shapes. If the layers
//! found so far are in the order of the model, another layer lies between its neighbors in it, too:
//! one before the blocks, one after them.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::SavedParameter;

/// A layer of a pipeline.
struct NamedLayer<'a> {
    /// The number, or `tied_modules` and the key.
    name: &'a str,
    /// The parameters with their names in the layer.
    parameters: Vec<(&'a str, &'a SavedParameter)>,
}

/// A part of the model that a layer may be.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Submodule {
    /// What the names of its parameters in the model begin with.
    prefix: String,
    /// What the layer's names begin with, and the model's do not: the name of a wrapper.
    wrapper: String,
}

/// Returns the parameters of a pipeline by their names in the whole model, whose names and shapes
/// `model` has.
///
/// # Errors
/// Returns the layer that fits no part of the model, or more than one, as the reason in an error
/// message.
pub(crate) fn in_model<'a, 'm>(
    parameters: &'a [SavedParameter],
    model: &[(&'m str, &'m [usize])],
) -> Result<HashMap<&'m str, &'a SavedParameter>, String> {
    let mut placed = PlacedLayers::new(model);
    let mut left = layers(parameters)?;
    while !left.is_empty() {
        let candidates: Vec<_> = left.iter().map(|layer| placed.candidates(layer)).collect();
        let chosen = certain(&left, &candidates)
            .or_else(|| certain(&left, &placed.between_neighbors(&left, &candidates)));
        let Some(chosen) = chosen else { return Err(uncertain(&left[0], &candidates[0])) };
        for (at, part) in &chosen {
            placed.add(&left[*at], part);
        }
        let chosen: HashSet<_> = chosen.into_iter().map(|(at, _)| at).collect();
        let mut at = 0..;
        left.retain(|_| at.next().is_none_or(|at| !chosen.contains(&at)));
    }
    Ok(placed.found)
}

/// The layers that were found so far.
struct PlacedLayers<'a, 'm> {
    /// The position in the model and the shape of each parameter.
    model: HashMap<&'m str, (usize, &'m [usize])>,
    /// The parameters of the pipeline by their names in the model.
    found: HashMap<&'m str, &'a SavedParameter>,
    /// The position in the model of each numbered layer.
    places: BTreeMap<usize, usize>,
}

impl<'a, 'm> PlacedLayers<'a, 'm> {
    fn new(model: &[(&'m str, &'m [usize])]) -> Self {
        let placed = model.iter().enumerate().map(|(at, (name, shape))| (*name, (at, *shape)));
        Self { model: placed.collect(), found: HashMap::new(), places: BTreeMap::new() }
    }

    /// Adds a layer, which is this part of the model.
    fn add(&mut self, layer: &NamedLayer<'a>, part: &Submodule) {
        if let Some(number) = layer.number() {
            self.places.insert(number, self.place(layer, part));
        }
        for (name, parameter) in &layer.parameters {
            // A candidate has all parameters of the layer.
            if let Some((own, _)) = self.model.get_key_value(&*part.name_of(name)) {
                self.found.insert(own, parameter);
            }
        }
    }

    /// Returns the position in the model of the first parameter of a part.
    fn place(&self, layer: &NamedLayer<'_>, part: &Submodule) -> usize {
        let names = layer.parameters.iter().map(|(name, _)| part.name_of(name));
        names.filter_map(|name| Some(self.model.get(&*name)?.0)).min().unwrap_or_default()
    }

    /// Returns the parts of the model that have all parameters of a layer and are not assigned yet.
    fn candidates(&self, layer: &NamedLayer<'_>) -> Vec<Submodule> {
        let (first, _) = layer.parameters[0];
        let starts = [0].into_iter().chain(first.match_indices('.').map(|(at, _)| at + 1));
        // The names of the layer may begin with a wrapper's name, so the longest ends that fit
        // count.
        let of_wrappers = starts.map(|start| {
            let (wrapper, end) = first.split_at(start);
            let prefixes = self.model.keys().filter_map(|name| name.strip_suffix(end));
            let prefixes = prefixes.filter(|prefix| prefix.is_empty() || prefix.ends_with('.'));
            let parts = prefixes
                .map(|prefix| Submodule { prefix: prefix.to_owned(), wrapper: wrapper.to_owned() })
                .filter(|part| self.has(layer, part));
            let mut parts: Vec<_> = parts.collect();
            parts.sort_by_key(|part| numbers(&part.prefix));
            parts
        });
        let parts = of_wrappers.into_iter().find(|parts| !parts.is_empty()).unwrap_or_default();
        let is_free = |part: &Submodule| {
            layer.parameters.iter().all(|(name, _)| !self.found.contains_key(&*part.name_of(name)))
        };
        parts.into_iter().filter(is_free).collect()
    }

    /// Returns true if a part has all parameters of a layer.
    fn has(&self, layer: &NamedLayer<'_>, part: &Submodule) -> bool {
        layer.parameters.iter().all(|(name, parameter)| {
            let shape = self.model.get(&*part.name_of(name)).map(|(_, shape)| *shape);
            name.starts_with(&part.wrapper) && shape == Some(&parameter.shape[..])
        })
    }

    /// Returns the candidates that lie between the neighbors of their layer. They are empty if the
    /// layers found so far are in another order than their parts, or if there are none.
    fn between_neighbors(
        &self,
        layers: &[NamedLayer<'_>],
        candidates: &[Vec<Submodule>],
    ) -> Vec<Vec<Submodule>> {
        let in_order = self.places.values().is_sorted() && !self.places.is_empty();
        let between = layers.iter().zip(candidates).map(|(layer, parts)| {
            let Some(number) = layer.number().filter(|_| in_order) else { return Vec::new() };
            let before = self.places.range(..number).next_back().map(|(_, place)| *place);
            let after = self.places.range(number..).next().map(|(_, place)| *place);
            let lies_between = |part: &&Submodule| {
                let place = self.place(layer, part);
                before.is_none_or(|before| before < place) && after.is_none_or(|it| place < it)
            };
            parts.iter().filter(lies_between).cloned().collect()
        });
        between.collect()
    }
}

impl NamedLayer<'_> {
    /// Returns the number; `None` for a tied layer.
    fn number(&self) -> Option<usize> {
        self.name.parse().ok()
    }
}

impl Submodule {
    /// Returns the name in the model of a parameter in the layer.
    fn name_of(&self, in_layer: &str) -> String {
        format!("{}{}", self.prefix, in_layer.strip_prefix(&self.wrapper).unwrap_or(in_layer))
    }
}

/// Divides the parameters into layers, in order: first the numbered ones.
fn layers(parameters: &[SavedParameter]) -> Result<Vec<NamedLayer<'_>>, String> {
    let (mut numbered, mut tied) = (BTreeMap::new(), BTreeMap::new());
    for parameter in parameters {
        let name = parameter.name.as_str();
        let (first, rest) = name.split_once('.').ok_or_else(|| not_of_a_layer(name))?;
        if let Ok(number) = first.parse::<usize>() {
            let layer = NamedLayer { name: first, parameters: Vec::new() };
            numbered.entry(number).or_insert(layer).parameters.push((rest, parameter));
        } else {
            let (key, in_layer) = rest.split_once('.').ok_or_else(|| not_of_a_layer(name))?;
            let name = &name[..first.len() + 1 + key.len()];
            let layer = NamedLayer { name, parameters: Vec::new() };
            tied.entry(key).or_insert(layer).parameters.push((in_layer, parameter));
        }
    }
    Ok(numbered.into_values().chain(tied.into_values()).collect())
}

/// Returns the reason for a name that does not belong to a layer.
fn not_of_a_layer(name: &str) -> String {
    format!("its parameter {name} belongs to no layer, such as 2.{name} would")
}

/// Returns the layers, by position, whose parts are certain: a layer with one candidate, or else
/// equal layers with one candidate each that differ in one number. `None` if there are none.
fn certain(
    layers: &[NamedLayer<'_>],
    candidates: &[Vec<Submodule>],
) -> Option<Vec<(usize, Submodule)>> {
    for (at, parts) in candidates.iter().enumerate() {
        let alike: Vec<_> = (0..candidates.len()).filter(|at| candidates[*at] == *parts).collect();
        // A tied layer has no number, so its place among others is not known.
        let numbered = alike.iter().all(|at| layers[*at].number().is_some());
        let in_order = parts.len() == 1 || numbered && differ_in_one_number(parts);
        // Equal layers are considered once, at the first of them, and have to fill all the parts
        // that fit.
        if alike[0] == at && alike.len() == parts.len() && in_order {
            return Some(alike.into_iter().zip(parts.iter().cloned()).collect());
        }
    }
    None
}

/// Returns the components of a name that are numbers.
fn numbers(name: &str) -> Vec<usize> {
    name.split('.').filter_map(|component| component.parse().ok()).collect()
}

/// Returns true if the parts are the same but for one number in their prefixes.
fn differ_in_one_number(parts: &[Submodule]) -> bool {
    let components: Vec<Vec<&str>> =
        parts.iter().map(|part| part.prefix.split('.').collect()).collect();
    let Some((first, others)) = components.split_first() else { return false };
    let differing = |other: &Vec<&str>| {
        let pairs = first.iter().zip(other).enumerate();
        let differing: Vec<_> = pairs.filter(|(_, (a, b))| a != b).map(|(at, _)| at).collect();
        (first.len() == other.len() && differing.len() == 1).then(|| differing[0])
    };
    let places: Option<HashSet<_>> = others.iter().map(differing).collect();
    let is_number =
        |at: &usize| components.iter().all(|components| components[*at].parse::<usize>().is_ok());
    places.is_some_and(|places| places.len() == 1 && places.iter().all(is_number))
}

/// Returns the reason why the part of a layer is not certain.
fn uncertain(layer: &NamedLayer<'_>, parts: &[Submodule]) -> String {
    let names = layer.parameters.iter().map(|(name, it)| format!("{name} {:?}", it.shape));
    let names: Vec<_> = names.take(4).collect();
    let more = if layer.parameters.len() > names.len() { ", …" } else { "" };
    let (name, listed) = (layer.name, names.join(", "));
    let found = match parts {
        [] => "the names and shapes of no part of this model end like those".to_owned(),
        parts => {
            let prefixes = parts.iter().take(4).map(|part| part.prefix.trim_end_matches('.'));
            let more = if parts.len() > 4 { ", …" } else { "" };
            format!(
                "these parts of this model fit: {}{more}",
                prefixes.collect::<Vec<_>>().join(", ")
            )
        }
    };
    format!(
        "layer {name} of its pipeline ({listed}{more}) is not a certain part of this model: {found}; use the model \
         that it was saved from, with parameters of layers that are named as in the whole model"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns parameters with these names and shapes.
    fn saved(parameters: &[(&str, &[usize])]) -> Vec<SavedParameter> {
        let parameter = |(name, shape): &(&str, &[usize])| SavedParameter {
            name: (*name).to_owned(),
            shape: shape.to_vec(),
            aliases: Vec::new(),
            trainable: true,
        };
        parameters.iter().map(parameter).collect()
    }

    /// Returns the names in the model and in the pipeline, in the order of the model.
    fn assigned(
        layers: &[(&str, &[usize])],
        model: &[(&'static str, &'static [usize])],
    ) -> Result<Vec<String>, String> {
        let saved = saved(layers);
        let found = in_model(&saved, model)?;
        let own = model.iter().filter_map(|(name, _)| Some((name, found.get(name)?)));
        Ok(own.map(|(name, parameter)| format!("{name} = {}", parameter.name)).collect())
    }

    #[test]
    fn equal_blocks_are_in_the_order_of_their_numbers() {
        // The order of texts would be 10, 2, 9.
        let layers: [(&str, &[usize]); 4] =
            [("9.w", &[4]), ("10.w", &[4]), ("2.w", &[4]), ("11.norm.w", &[4])];
        let model: [(&str, &[usize]); 4] =
            [("norm.w", &[4]), ("h.8.w", &[4]), ("h.11.w", &[4]), ("h.9.w", &[4])];
        let expected = ["norm.w = 11.norm.w", "h.8.w = 2.w", "h.11.w = 10.w", "h.9.w = 9.w"];
        assert_eq!(assigned(&layers, &model).unwrap(), expected);
    }

    #[test]
    fn shapes_and_what_is_left_decide_between_equal_names() {
        let layers: [(&str, &[usize]); 4] = [
            ("0.weight", &[9, 4]),
            ("1.norm.weight", &[4]),
            ("2.weight", &[4]),
            ("tied_modules.head.weight", &[7, 4]),
        ];
        let model: [(&str, &[usize]); 4] = [
            ("tokens.weight", &[9, 4]),
            ("block.norm.weight", &[4]),
            ("norm.weight", &[4]),
            ("head.weight", &[7, 4]),
        ];
        // Layer 1 fits `norm` below `block` or at the top; layer 2 fits both norms. The
        // longest end that fits counts.
        let error = assigned(&layers, &model).unwrap_err();
        assert!(error.contains("layer 1") || error.contains("layer 2"), "{error}");
        let model = [model[0], model[1], ("end.weight", &[4][..]), model[3]];
        let expected = [
            "tokens.weight = 0.weight",
            "block.norm.weight = 1.norm.weight",
            "end.weight = 2.weight",
            "head.weight = tied_modules.head.weight",
        ];
        assert_eq!(assigned(&layers, &model).unwrap(), expected);
    }

    #[test]
    fn the_name_of_a_wrapper_is_left_out() {
        let layers: [(&str, &[usize]); 2] = [("0.inner.q.w", &[4]), ("0.inner.k.w", &[4])];
        let model: [(&str, &[usize]); 2] = [("block.q.w", &[4]), ("block.k.w", &[4])];
        let expected = ["block.q.w = 0.inner.q.w", "block.k.w = 0.inner.k.w"];
        assert_eq!(assigned(&layers, &model).unwrap(), expected);
    }

    /// An embedding and an output layer that are not tied, around two blocks.
    const UNTIED: [(&str, &[usize]); 5] = [
        ("0.weight", &[9, 4]),
        ("1.q.weight", &[4, 4]),
        ("2.q.weight", &[4, 4]),
        ("3.weight", &[4]),
        ("4.weight", &[9, 4]),
    ];

    #[test]
    fn equal_layers_lie_between_their_neighbors() {
        let model: [(&str, &[usize]); 5] = [
            ("model.embed.weight", &[9, 4]),
            ("model.h.0.q.weight", &[4, 4]),
            ("model.h.1.q.weight", &[4, 4]),
            ("model.norm.weight", &[4]),
            ("head.weight", &[9, 4]),
        ];
        let expected = [
            "model.embed.weight = 0.weight",
            "model.h.0.q.weight = 1.q.weight",
            "model.h.1.q.weight = 2.q.weight",
            "model.norm.weight = 3.weight",
            "head.weight = 4.weight",
        ];
        assert_eq!(assigned(&UNTIED, &model).unwrap(), expected);
        // In other orders, the fields of the model do not show which of the two is used first.
        for order in [[4, 0, 1, 2, 3], [0, 4, 1, 2, 3], [1, 2, 3, 0, 4], [3, 0, 1, 2, 4]] {
            let error = assigned(&UNTIED, &order.map(|at| model[at])).unwrap_err();
            assert!(error.contains("layer 0 of its pipeline"), "{order:?}: {error}");
        }
    }

    #[test]
    fn what_is_not_certain_is_refused() {
        let two: [(&str, &[usize]); 2] = [("0.w", &[4]), ("1.w", &[4])];
        let one_is_tied: [(&str, &[usize]); 2] = [("0.w", &[4]), ("tied_modules.w.w", &[4])];
        for (layers, model) in [
            // Two stacks, one more block, one block less, and names without numbers.
            (&two, &[("a.0.w", &[4][..]), ("b.1.w", &[4])][..]),
            (&two, &[("a.0.w", &[4]), ("a.1.w", &[4]), ("a.2.w", &[4])]),
            (&two, &[("a.0.w", &[4])]),
            (&two, &[("first.w", &[4]), ("last.w", &[4])]),
            (&two, &[("a.0.w", &[5]), ("a.1.w", &[4])]),
            // A tied layer may be before or after the other one.
            (&one_is_tied, &[("a.0.w", &[4]), ("a.1.w", &[4])]),
        ] {
            let error = assigned(layers, model).unwrap_err();
            assert!(error.contains("layer ") && error.contains("of its pipeline"), "{error}");
        }
        let error = assigned(&[("w", &[4])], &[("w", &[4])]).unwrap_err();
        assert!(error.contains("belongs to no layer"), "{error}");
    }
}
