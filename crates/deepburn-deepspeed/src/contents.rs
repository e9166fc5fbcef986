//! The values in a file of `torch.save`, by name.
//!
//! Main types: [`Contents`], an open file, and [`PickleValue`], a value in it with its dotted name
//! for error messages. The pickle is read by this crate's walker, which keeps the order of dicts
//! and the attributes of objects.

use std::path::Path;
use std::sync::Arc;

use crate::archive::Archive;
use crate::pickle::Pickle;
use crate::pickle_node::{NodeId, PickleNode};
use crate::{DeepSpeedError, Tensor};

/// An open file.
#[derive(Debug)]
pub(crate) struct Contents {
    /// The zip archive, which tensors share to read their values.
    archive: Arc<Archive>,
    /// The values, with references to storages.
    pickle: Pickle,
}

impl Contents {
    /// Opens a file and reads its pickle, but no tensors. Every storage that the pickle names must
    /// have as many bytes as its elements need.
    ///
    /// # Errors
    /// Returns an error if the archive, the pickle or a storage is damaged.
    pub(crate) fn open(path: &Path) -> Result<Self, DeepSpeedError> {
        let archive = Arc::new(Archive::open(path)?);
        let pickle = Pickle::parse(&archive.pickle()?)
            .map_err(|reason| DeepSpeedError::damaged(path, format!("its pickle: {reason}")))?;
        for (key, element, len) in pickle.storages() {
            let size = archive.storage_size(key)?;
            // Storages of other types, such as integers, are never read, so their sizes do not
            // matter.
            let expected = element.map(|it| (len as u64).checked_mul(it.size() as u64));
            if expected.is_some_and(|expected| expected != Some(size)) {
                let reason = format!("storage {key} has {size} bytes for {len} elements");
                return Err(DeepSpeedError::damaged(path, reason));
            }
        }
        Ok(Self { archive, pickle })
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        self.archive.path()
    }

    /// Returns the root of the pickle, a dict.
    pub(crate) fn root(&self) -> PickleValue<'_> {
        PickleValue { contents: self, id: self.pickle.root(), name: String::new() }
    }
}

/// A value of a file.
#[derive(Debug, Clone)]
pub(crate) struct PickleValue<'a> {
    /// The file.
    contents: &'a Contents,
    /// The node in the pickle.
    id: NodeId,
    /// The path from the root, such as `optimizer_state_dict.loss_scaler.cur_scale`; empty for the
    /// root.
    name: String,
}

impl<'a> PickleValue<'a> {
    /// Returns the node of the value.
    fn node(&self) -> &'a PickleNode {
        self.contents.pickle.node(self.id)
    }

    /// Returns a child with its dotted name.
    fn below(&self, id: NodeId, key: &str) -> Self {
        let dot = if self.name.is_empty() { "" } else { "." };
        Self { contents: self.contents, id, name: format!("{}{dot}{key}", self.name) }
    }

    /// Returns the error that this value violates `rule`.
    pub(crate) fn refuse(&self, rule: impl Into<String>) -> DeepSpeedError {
        let found = match self.node() {
            PickleNode::None => "None".to_owned(),
            PickleNode::Bool(value) => value.to_string(),
            PickleNode::Int(value) => value.to_string(),
            PickleNode::Float(value) => value.to_string(),
            PickleNode::Text(text) => format!("`{}`", text.chars().take(80).collect::<String>()),
            PickleNode::List(list) => format!("a list of {}", list.len()),
            PickleNode::Dict(dict) => format!("a dict of {}", dict.len()),
            PickleNode::Tensor(tensor) => format!("a tensor of shape {:?}", tensor.shape),
            PickleNode::Object { .. } | PickleNode::Class(..) => "an object".to_owned(),
            PickleNode::Opaque | PickleNode::Storage { .. } => "something else".to_owned(),
        };
        DeepSpeedError::Layout {
            path: self.contents.path().to_owned(),
            value: if self.name.is_empty() { "the root".to_owned() } else { self.name.clone() },
            found,
            rule: rule.into(),
        }
    }

    /// Returns the entries of a dict or the attributes of an object.
    fn pairs(&self) -> Option<&'a [(NodeId, NodeId)]> {
        match self.node() {
            PickleNode::Dict(pairs) => Some(pairs),
            PickleNode::Object { attributes, .. } => {
                match self.contents.pickle.node((*attributes)?) {
                    PickleNode::Dict(pairs) => Some(pairs),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Returns an entry of a dict or an attribute of an object; `None` if it does not exist or is
    /// Python's `None`. Integer keys are given as digits.
    pub(crate) fn get(&self, key: &str) -> Option<Self> {
        let number = key.parse().ok();
        // As in Python, the last of several equal keys counts.
        let mut pairs = self.pairs()?.iter().rev();
        let (_, id) = pairs.find(|(found, _)| match self.contents.pickle.node(*found) {
            PickleNode::Text(text) => text == key,
            PickleNode::Int(found) => Some(*found) == number,
            _ => false,
        })?;
        let value = self.below(*id, key);
        (!value.is_none()).then_some(value)
    }

    /// Returns an entry or attribute that must exist.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::Layout`] that names the key. All other accessors return this error
    /// too, for a value of another kind.
    pub(crate) fn need(&self, key: &str) -> Result<Self, DeepSpeedError> {
        self.get(key).ok_or_else(|| self.refuse(format!("a dict or object with `{key}`")))
    }

    /// Returns true for Python's `None`.
    pub(crate) fn is_none(&self) -> bool {
        matches!(self.node(), PickleNode::None)
    }

    /// Returns true for a tensor.
    pub(crate) fn is_tensor(&self) -> bool {
        matches!(self.node(), PickleNode::Tensor(_))
    }

    /// Returns the entries of a dict in order, with integer keys as digits.
    ///
    /// # Errors
    /// Returns an error for other keys, and for a key that occurs twice: the order of the entries
    /// determines the positions of parameters in flat groups, so it has to be unambiguous.
    pub(crate) fn entries(&self) -> Result<Vec<(String, Self)>, DeepSpeedError> {
        let PickleNode::Dict(pairs) = self.node() else { return Err(self.refuse("a dict")) };
        let entries = pairs.iter().map(|(key, id)| {
            let key = match self.contents.pickle.node(*key) {
                PickleNode::Text(text) => text.clone(),
                PickleNode::Int(number) => number.to_string(),
                _ => return Err(self.refuse("a dict with names or numbers as keys")),
            };
            let value = self.below(*id, &key);
            Ok((key, value))
        });
        let entries: Vec<_> = entries.collect::<Result<_, _>>()?;
        let mut seen = std::collections::HashSet::new();
        if !entries.iter().all(|(key, _)| seen.insert(key)) {
            return Err(self.refuse("a dict without duplicate keys"));
        }
        Ok(entries)
    }

    /// Returns the elements of a list.
    pub(crate) fn list(&self) -> Result<Vec<Self>, DeepSpeedError> {
        let PickleNode::List(list) = self.node() else { return Err(self.refuse("a list")) };
        Ok(list.iter().enumerate().map(|(at, id)| self.below(*id, &at.to_string())).collect())
    }

    /// Returns true for a list, tuple, set or size.
    pub(crate) fn is_list(&self) -> bool {
        matches!(self.node(), PickleNode::List(_))
    }

    /// Returns an integer, or the integer value of an enum member.
    ///
    /// Enum members are objects with their value as the only argument.
    pub(crate) fn int(&self) -> Result<i64, DeepSpeedError> {
        // An enum member is pickled as a call of its class with the value as the only argument.
        let inner = match self.node() {
            PickleNode::Object { arguments, .. } => match self.contents.pickle.node(*arguments) {
                PickleNode::List(list) if list.len() == 1 => self.contents.pickle.node(list[0]),
                node => node,
            },
            node => node,
        };
        match inner {
            PickleNode::Int(value) => Ok(*value),
            _ => Err(self.refuse("an integer")),
        }
    }

    /// Returns an integer that is not negative.
    pub(crate) fn count(&self) -> Result<u64, DeepSpeedError> {
        u64::try_from(self.int()?).map_err(|_| self.refuse("zero or more"))
    }

    /// Returns an integer that is not negative as a size.
    pub(crate) fn size(&self) -> Result<usize, DeepSpeedError> {
        usize::try_from(self.int()?).map_err(|_| self.refuse("zero or more"))
    }

    /// Returns a number as a float.
    pub(crate) fn float(&self) -> Result<f64, DeepSpeedError> {
        match self.node() {
            PickleNode::Float(value) => Ok(*value),
            PickleNode::Int(value) => Ok(*value as f64),
            _ => Err(self.refuse("a number")),
        }
    }

    /// Returns a bool.
    pub(crate) fn bool(&self) -> Result<bool, DeepSpeedError> {
        match self.node() {
            PickleNode::Bool(value) => Ok(*value),
            _ => Err(self.refuse("True or False")),
        }
    }

    /// Returns a string.
    pub(crate) fn text(&self) -> Result<&'a str, DeepSpeedError> {
        self.contents.pickle.text(self.id).ok_or_else(|| self.refuse("a text"))
    }

    /// Returns a shape whose number of elements is in range.
    pub(crate) fn shape(&self) -> Result<Vec<usize>, DeepSpeedError> {
        let shape: Vec<_> = self.list()?.iter().map(Self::size).collect::<Result<_, _>>()?;
        let numel = shape.iter().try_fold(1_usize, |all, dim| all.checked_mul(*dim));
        // With this limit, sums over all parameters of a pickle cannot overflow.
        let fits = numel.is_some_and(|numel| numel < 1 << 40);
        if fits { Ok(shape) } else { Err(self.refuse("a size below 2^40 elements")) }
    }

    /// Returns a dense tensor with an element type of parameters.
    ///
    /// # Errors
    /// Returns an error for another element type or a tensor that is not contiguous.
    pub(crate) fn tensor(&self) -> Result<Arc<Tensor>, DeepSpeedError> {
        let PickleNode::Tensor(node) = self.node() else { return Err(self.refuse("a tensor")) };
        let PickleNode::Storage { key, element, .. } = self.contents.pickle.node(node.storage)
        else {
            return Err(self.refuse("a tensor with a storage"));
        };
        let (Some(element), true) = (*element, node.contiguous) else {
            return Err(self.refuse("a contiguous tensor of f32, f16 or bf16"));
        };
        Ok(Arc::new(Tensor {
            archive: self.contents.archive.clone(),
            key: self.contents.pickle.text(*key).unwrap_or_default().to_owned(),
            element,
            offset: node.offset,
            shape: node.shape.clone(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use deepburn_files::safetensors::FloatType;
    use half::{bf16, f16};
    use pytorch_reader::PytorchReader;

    use super::*;

    /// Returns the files of all fixtures.
    fn files() -> Vec<std::path::PathBuf> {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
        let below = |path: &Path| {
            let entries = std::fs::read_dir(path).unwrap();
            entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
        };
        let folders = below(&data).into_iter().filter(|path| path.join("latest").exists());
        let tags = folders.flat_map(|path| below(&path)).filter(|path| path.is_dir());
        tags.flat_map(|path| below(&path)).collect()
    }

    #[test]
    fn another_reader_reads_the_same_values() {
        let mut tensors = 0;
        // The other reader looks for the directory of a file at another place if its name has 21
        // letters, as the name of a layer has (see `entries` in archive.rs).
        let is_layer = |file: &std::path::PathBuf| file.to_string_lossy().contains("/layer_");
        for file in files().into_iter().filter(|file| !is_layer(file)) {
            let contents = Contents::open(&file).unwrap();
            let reader = PytorchReader::new(&file).unwrap();
            for (name, second) in reader.tensors() {
                let found = find(&contents.root(), name);
                let tensor = found.unwrap_or_else(|| panic!("{name}")).tensor().unwrap();
                let bytes = second.read().unwrap();
                let halves = bytes.as_chunks::<2>().0.iter();
                let expected: Vec<f32> = match tensor.element {
                    FloatType::F32 => {
                        bytes.as_chunks::<4>().0.iter().map(|it| f32::from_le_bytes(*it)).collect()
                    }
                    FloatType::F16 => halves.map(|it| f16::from_le_bytes(*it).to_f32()).collect(),
                    FloatType::Bf16 => halves.map(|it| bf16::from_le_bytes(*it).to_f32()).collect(),
                };
                let mut values = vec![];
                tensor.read(0..tensor.numel(), &mut values).unwrap();
                // Bits are compared, because the padding of stage 3 is uninitialized memory and may
                // contain NaN.
                let same =
                    values.iter().map(|it| it.to_bits()).eq(expected.iter().map(|it| it.to_bits()));
                assert!(same, "{name} of {}", file.display());
                tensors += 1;
            }
        }
        assert!(tensors > 1000, "{tensors}");
    }

    /// Returns the value of a dotted name, whose keys may contain dots.
    fn find<'a>(value: &PickleValue<'a>, name: &str) -> Option<PickleValue<'a>> {
        if name.is_empty() {
            return Some(value.clone());
        }
        let entries = match value.node() {
            PickleNode::List(_) => {
                let numbered = value.list().unwrap().into_iter().enumerate();
                numbered.map(|(at, value)| (at.to_string(), value)).collect()
            }
            PickleNode::Dict(_) => value.entries().unwrap_or_default(),
            _ => vec![],
        };
        let mut fitting = entries.into_iter().filter_map(|(key, below)| {
            let rest = name.strip_prefix(&key)?;
            find(&below, rest.strip_prefix('.').unwrap_or(rest))
        });
        fitting.next_back()
    }

    #[test]
    fn errors_name_the_value_and_the_rule() {
        let file = files()
            .into_iter()
            .find(|file| file.ends_with("s0/global_step6/mp_rank_00_model_states.pt"));
        let contents = Contents::open(&file.unwrap()).unwrap();
        let root = contents.root();
        let refused = |result: Result<i64, DeepSpeedError>| result.unwrap_err().to_string();
        let error = refused(root.need("ds_version").and_then(|value| value.int()));
        assert!(error.contains("ds_version is `0.19.8`, and it has to be an integer"), "{error}");
        let error = refused(root.need("module").and_then(|module| module.need("x")?.int()));
        assert!(error.contains("a dict or object with `x`"), "{error}");
        let error = root.need("module").unwrap().tensor().unwrap_err().to_string();
        assert!(error.contains("module is a dict of"), "{error}");
        assert!(root.need("global_steps").unwrap().text().is_err());
        assert!(root.need("ds_config").unwrap().list().is_err());
        assert!(root.get("data_sampler").is_none());
    }
}
