//! The map of a model's parameters.
//!
//! Main type: [`WeightMap`]. It is checked when it is created or deserialized: each stored tensor
//! consists of parameters without gaps and overlaps. Writing all parameters therefore writes every
//! element of every tensor exactly once.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::composition::{Component, Composition, Slice};
use crate::{Origin, WeightMapError};

/// A parameter: its path in the module, the tensors that store it, and the origin of its initial
/// values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "WeightRecord", into = "WeightRecord")]
pub struct Weight {
    /// The module path.
    path: String,
    /// The stored tensors that form it.
    composition: Composition,
    /// The origin of its initial values.
    origin: Origin,
}

impl Weight {
    /// Returns the parameter at a module path. Its values are read from files.
    #[must_use]
    pub fn new(path: impl Into<String>, composition: Composition) -> Self {
        Self { path: path.into(), composition, origin: Origin::File }
    }

    /// Returns the same parameter with another origin.
    #[must_use]
    pub fn with_origin(mut self, origin: Origin) -> Self {
        self.origin = origin;
        self
    }

    /// Returns the module path.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the composition of stored tensors that forms the parameter.
    #[must_use]
    pub fn composition(&self) -> &Composition {
        &self.composition
    }

    /// Returns the origin of the initial values.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Returns the names of the tensors that store the parameter, separated by commas.
    #[must_use]
    pub fn stored_name(&self) -> String {
        let names = self.composition.components().iter().map(|component| component.name.as_str());
        names.collect::<Vec<_>>().join(", ")
    }

    /// Returns the number of rows that the files do not contain.
    #[must_use]
    pub fn new_rows(&self) -> usize {
        match self.origin {
            Origin::Extended { new_rows } => new_rows,
            _ => 0,
        }
    }

    /// Returns the shape of the parameter in the module.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        let mut shape = self.composition.shape().to_vec();
        if let Some(rows) = shape.first_mut() {
            *rows += self.new_rows();
        }
        shape
    }

    /// Returns the number of elements in the module.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.shape().iter().product()
    }
}

/// The serialized form of a [`Weight`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WeightRecord {
    path: String,
    /// The axis along which the components are joined.
    #[serde(default, skip_serializing_if = "is_zero")]
    axis: usize,
    components: Vec<Component>,
    #[serde(default, skip_serializing_if = "Origin::is_file")]
    origin: Origin,
}

/// Returns whether an axis has its default value, which files omit.
fn is_zero(axis: &usize) -> bool {
    *axis == 0
}

impl From<Weight> for WeightRecord {
    fn from(Weight { path, composition, origin }: Weight) -> Self {
        let (axis, components) = (composition.axis(), composition.components().to_vec());
        Self { path, axis, components, origin }
    }
}

impl TryFrom<WeightRecord> for Weight {
    type Error = WeightMapError;

    fn try_from(record: WeightRecord) -> Result<Self, WeightMapError> {
        let WeightRecord { path, axis, components, origin } = record;
        Ok(Self { path, composition: Composition::join(axis, components)?, origin })
    }
}

/// A stored tensor as a composition of parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// The name in files.
    name: String,
    /// The parameters that form it.
    composition: Composition,
}

impl StoredTensor {
    /// Returns the name in files.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the shape in files.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.composition.shape()
    }

    /// Returns the composition of parameters that forms the tensor. Its names are module paths.
    #[must_use]
    pub fn composition(&self) -> &Composition {
        &self.composition
    }

    /// Returns the path of the first parameter that the tensor stores.
    #[must_use]
    pub fn first_path(&self) -> &str {
        &self.composition.components()[0].name
    }
}

/// The parameters of a model and the tensors that store them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "MapRecord", into = "MapRecord")]
pub struct WeightMap {
    /// The parameters, in the order of the module.
    weights: Vec<Weight>,
    /// The index of each parameter by path.
    by_path: HashMap<String, usize>,
    /// The tensors in files, in the order of the parameters. Copies of tied parameters are not
    /// included.
    tensors: Vec<StoredTensor>,
    /// The names of these tensors and of the copies.
    names: HashSet<String>,
    /// A prefix that the tensor names in files may lack; empty if there is none.
    optional_prefix: String,
    /// Names of tensors that are not parameters. `*` stands for a number between two dots.
    ignored: Vec<String>,
}

/// The serialized form of a [`WeightMap`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MapRecord {
    weights: Vec<Weight>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    optional_prefix: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    ignored: Vec<String>,
}

impl From<WeightMap> for MapRecord {
    fn from(WeightMap { weights, optional_prefix, ignored, .. }: WeightMap) -> Self {
        Self { weights, optional_prefix, ignored }
    }
}

impl TryFrom<MapRecord> for WeightMap {
    type Error = WeightMapError;

    fn try_from(record: MapRecord) -> Result<Self, WeightMapError> {
        let map = Self::new(record.weights)?;
        Ok(Self { optional_prefix: record.optional_prefix, ignored: record.ignored, ..map })
    }
}

impl WeightMap {
    /// Returns the map of these parameters, which are given in the order of the module.
    ///
    /// # Errors
    /// Returns an error if two parameters have the same path, if a tied parameter refers to a
    /// parameter that does not exist, if the new rows of a parameter cannot be counted, or if the
    /// elements of a stored tensor do not belong to exactly one parameter.
    pub fn new(weights: Vec<Weight>) -> Result<Self, WeightMapError> {
        let mut by_path = HashMap::new();
        for (index, weight) in weights.iter().enumerate() {
            if by_path.insert(weight.path.clone(), index).is_some() {
                return Err(WeightMapError::SamePath { path: weight.path.clone() });
            }
        }
        for weight in &weights {
            // After all paths are known: a parameter may be tied to a later one.
            check_origin(weight, &weights, &by_path)?;
        }
        let tensors = stored_tensors(&weights)?;
        let components = weights.iter().flat_map(|weight| weight.composition.components());
        // With the names of tied parameters, of which files may have copies.
        let names = components.map(|component| component.name.clone()).collect();
        let (optional_prefix, ignored) = (String::new(), Vec::new());
        Ok(Self { weights, by_path, tensors, names, optional_prefix, ignored })
    }

    /// Returns the map of parameters that are stored under their module paths, in the layout of the
    /// module.
    ///
    /// # Errors
    /// Returns [`WeightMapError::SamePath`] if two parameters have the same path, and
    /// [`WeightMapError::Shape`] if a parameter has too many elements.
    pub fn as_trained<P: Into<String>>(
        parameters: impl IntoIterator<Item = (P, Vec<usize>)>,
    ) -> Result<Self, WeightMapError> {
        let weight = |(path, shape): (P, Vec<usize>)| {
            let path = path.into();
            let composition = Composition::join(0, vec![Component::whole(path.clone(), &shape)])?;
            Ok(Weight::new(path, composition))
        };
        Self::new(parameters.into_iter().map(weight).collect::<Result<_, _>>()?)
    }

    /// Returns the map with other tensor names. `rename` gets the current name of a tensor.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new), for example if two tensors get the same name.
    pub fn renamed(self, rename: impl Fn(&str) -> String) -> Result<Self, WeightMapError> {
        self.with_compositions(|weight| Ok(weight.composition.clone().renamed(&rename)))
    }

    /// Returns the map in which the tensors of some parameters are transposed, such as the weights
    /// of `torch.nn.Linear`, whose shape is `[out, in]`. `is_transposed` gets a module path. The
    /// parameters have to be stored as in the module before.
    ///
    /// # Errors
    /// Returns [`WeightMapError::Shape`] if a parameter is not a matrix, or is not stored as in the
    /// module.
    pub fn transposed(self, is_transposed: impl Fn(&str) -> bool) -> Result<Self, WeightMapError> {
        self.with_compositions(|weight| {
            if !is_transposed(&weight.path) {
                return Ok(weight.composition.clone());
            }
            let Some(name) = weight.composition.same_as() else {
                return Err(WeightMapError::shape(
                    &weight.path,
                    "it is not stored as in the module",
                ));
            };
            let shape: Vec<_> = weight.composition.shape().iter().rev().copied().collect();
            Composition::join(0, vec![Component::whole(name, &shape).transposed()])
        })
    }

    /// Returns the map with other compositions.
    fn with_compositions(
        self,
        composition: impl Fn(&Weight) -> Result<Composition, WeightMapError>,
    ) -> Result<Self, WeightMapError> {
        let weight =
            |weight: &Weight| Ok(Weight { composition: composition(weight)?, ..weight.clone() });
        let map = Self::new(self.weights.iter().map(weight).collect::<Result<_, _>>()?)?;
        Ok(Self { optional_prefix: self.optional_prefix, ignored: self.ignored, ..map })
    }

    /// Returns the map with other origins of some parameters. `origin` returns `None` for
    /// parameters that keep theirs.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new).
    pub fn with_origins(
        self,
        origin: impl Fn(&Weight) -> Option<Origin>,
    ) -> Result<Self, WeightMapError> {
        let weight = |weight: Weight| match origin(&weight) {
            Some(origin) => weight.with_origin(origin),
            None => weight,
        };
        let map = Self::new(self.weights.into_iter().map(weight).collect())?;
        Ok(Self { optional_prefix: self.optional_prefix, ignored: self.ignored, ..map })
    }

    /// Returns the map with a prefix that tensor names in files may lack. Names in the map have it.
    #[must_use]
    pub fn with_optional_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.optional_prefix = prefix.into();
        self
    }

    /// Returns the map with names of tensors that are not parameters and are ignored in files, such
    /// as `h.*.attn.bias`, where `*` stands for a number between two dots.
    #[must_use]
    pub fn with_ignored<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.ignored = names.into_iter().map(Into::into).collect();
        self
    }

    /// Returns the map with the optional prefix and the ignored names of `other`.
    #[must_use]
    pub fn like(self, other: &Self) -> Self {
        let (optional_prefix, ignored) = (other.optional_prefix.clone(), other.ignored.clone());
        Self { optional_prefix, ignored, ..self }
    }

    /// Returns the parameter at a module path.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<&Weight> {
        self.by_path.get(path).map(|index| &self.weights[*index])
    }

    /// Returns all parameters, in the order of the module. Tied parameters are included.
    #[must_use]
    pub fn weights(&self) -> &[Weight] {
        &self.weights
    }

    /// Returns the parameters with values of their own, in the order of the module.
    pub fn parameters(&self) -> impl Iterator<Item = &Weight> {
        self.weights.iter().filter(|weight| !matches!(weight.origin, Origin::Tied { .. }))
    }

    /// Returns the tied parameters, each with the parameter to which it is tied.
    pub fn tied(&self) -> impl Iterator<Item = (&Weight, &Weight)> {
        self.weights.iter().filter_map(|weight| match &weight.origin {
            Origin::Tied { to } => Some((weight, self.get(to)?)),
            _ => None,
        })
    }

    /// Returns the tensors that store the parameters with values of their own. They are sorted by
    /// the first parameter that they store a part of.
    #[must_use]
    pub fn stored_tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// Returns the name under which the parameter or buffer at a module path is stored: the names
    /// of its tensors, separated by commas, or the path if it is not in the map.
    #[must_use]
    pub fn stored_name(&self, path: &str) -> String {
        self.get(path).map_or_else(|| path.to_owned(), Weight::stored_name)
    }

    /// Returns the name that the map has for a tensor in a file, which may lack the optional
    /// prefix. Returns `None` if the tensor is ignored. Unknown names are returned unchanged.
    #[must_use]
    pub fn tensor_name(&self, in_file: &str) -> Option<String> {
        let with_prefix = format!("{}{in_file}", self.optional_prefix);
        // The exact name has precedence over the name with the prefix.
        let names = [in_file, &with_prefix];
        if names.iter().any(|name| self.ignored.iter().any(|it| matches_pattern(it, name))) {
            return None;
        }
        let known = names.into_iter().find(|name| self.has_tensor(name));
        Some(known.unwrap_or(in_file).to_owned())
    }

    /// Returns whether a parameter is stored in the tensor `name`, or a copy of a tied parameter.
    #[must_use]
    pub fn has_tensor(&self, name: &str) -> bool {
        self.names.contains(name)
    }
}

/// Returns whether a name matches a pattern, in which `*` stands for a number between two dots.
fn matches_pattern(pattern: &str, name: &str) -> bool {
    let (mut pattern, mut name) = (pattern.split('.'), name.split('.'));
    loop {
        match (pattern.next(), name.next()) {
            (None, None) => return true,
            (Some("*"), Some(number)) if number.parse::<usize>().is_ok() => {}
            (Some(expected), Some(found)) if expected == found => {}
            _ => return false,
        }
    }
}

/// Checks the origin of a parameter.
fn check_origin(
    weight: &Weight,
    weights: &[Weight],
    by_path: &HashMap<String, usize>,
) -> Result<(), WeightMapError> {
    let Weight { path, composition, origin } = weight;
    match origin {
        Origin::Tied { to } => match by_path.get(to).map(|index| &weights[*index]) {
            // With chains of ties, values would depend on the order in which they are copied.
            Some(Weight { origin: Origin::Tied { .. }, .. }) | None => {
                Err(WeightMapError::Tied { path: path.clone(), to: to.clone() })
            }
            Some(_) => Ok(()),
        },
        Origin::Extended { new_rows } => {
            let rows = composition.shape().first().and_then(|rows| rows.checked_add(*new_rows));
            let width = composition.shape().iter().skip(1).product::<usize>();
            match rows.and_then(|rows| rows.checked_mul(width)) {
                Some(_) => Ok(()),
                None => Err(WeightMapError::shape(path, format!("it cannot get {new_rows} rows"))),
            }
        }
        _ => Ok(()),
    }
}

/// A component of a parameter, which a stored tensor contains.
struct PlacedComponent<'a> {
    /// The parameter.
    weight: &'a Weight,
    /// The component, which belongs to the stored tensor.
    component: &'a Component,
    /// The first position of the component along the axis of the parameter.
    start: usize,
}

/// Returns the stored tensors as compositions of parameters.
fn stored_tensors(weights: &[Weight]) -> Result<Vec<StoredTensor>, WeightMapError> {
    let mut order: BTreeMap<&str, usize> = BTreeMap::new();
    let mut found: Vec<Vec<PlacedComponent<'_>>> = Vec::new();
    // Tied parameters are left out, or each shared tensor would be covered twice.
    for weight in weights.iter().filter(|it| !matches!(it.origin, Origin::Tied { .. })) {
        for (component, start) in weight.composition.placed() {
            let index = *order.entry(&component.name).or_insert(found.len());
            if index == found.len() {
                found.push(Vec::new());
            }
            found[index].push(PlacedComponent { weight, component, start });
        }
    }
    found.into_iter().map(stored_tensor).collect()
}

/// Returns a stored tensor that consists of these parts, of which there is at least one.
fn stored_tensor(mut parts: Vec<PlacedComponent<'_>>) -> Result<StoredTensor, WeightMapError> {
    let (name, shape, first_path) =
        (parts[0].component.name.clone(), &parts[0].component.shape, &parts[0].weight.path);
    if let Some(other) = parts.iter().find(|part| part.component.shape != *shape) {
        return Err(WeightMapError::Disagreement {
            name,
            first: shape.clone(),
            first_path: first_path.clone(),
            second: other.component.shape.clone(),
            second_path: other.weight.path.clone(),
        });
    }
    // Parts of one tensor are slices along one axis. A part without a slice is all of it.
    let axis = parts.iter().find_map(|part| part.component.slice.as_ref()).map_or(0, |it| it.axis);
    if parts.iter().any(|part| part.component.slice.as_ref().is_some_and(|it| it.axis != axis)) {
        return Err(WeightMapError::Axes { name });
    }
    let size = shape.get(axis).copied().unwrap_or(1);
    let range = |part: &PlacedComponent<'_>| match &part.component.slice {
        Some(Slice { range, .. }) => range.clone(),
        None => 0..size,
    };
    // In the order of the tensor, gaps and overlaps are between neighbors.
    parts.sort_by_key(|part| range(part).start);
    let covered =
        |range, left: &PlacedComponent<'_>, right: &PlacedComponent<'_>| WeightMapError::Covered {
            name: name.clone(),
            axis,
            range,
            paths: [left, right].map(|part| part.weight.path.clone()),
        };
    let uncovered = |range| WeightMapError::Uncovered { name: name.clone(), axis, range };
    let mut next = 0;
    for (index, part) in parts.iter().enumerate() {
        let Range { start, end } = range(part);
        // An array without elements cannot be divided, so a second part covers the same elements.
        if start < next || index > 0 && size == 0 {
            return Err(covered(start..next.min(end), &parts[index - 1], part));
        }
        if start > next {
            return Err(uncovered(next..start));
        }
        next = end;
    }
    if next < size {
        return Err(uncovered(next..size));
    }
    let components = parts.iter().map(inverse).collect();
    Ok(StoredTensor { name, composition: Composition::join(axis, components)? })
}

/// Returns the inverse of a component: a part of a parameter as a component of a stored tensor.
fn inverse(part: &PlacedComponent<'_>) -> Component {
    let PlacedComponent { weight, component, start } = part;
    let composition = &weight.composition;
    let mut inverse = Component::whole(&weight.path, composition.shape());
    // A parameter of one component is stored as a whole.
    if composition.components().len() > 1 {
        let len = component.part_shape()[composition.axis()];
        inverse = inverse.sliced(composition.axis(), *start..start + len);
    }
    match component.transposed {
        true => inverse.transposed(),
        false => inverse,
    }
}
