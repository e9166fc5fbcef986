//! The safetensors file that weights are saved to.
//!
//! Main type: [`FilePlan`]. It assigns the tensors of a module to the tensors of the file. Both are
//! sorted by alignment, as the safetensors format recommends, then by name.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use deepburn_checkpoint::ElementType;
use deepburn_files::safetensors::{Header, TensorFileWriter};
use deepburn_ops::OptimizerOps;
use deepburn_weights::{Composition, Origin, WeightMap};

use super::{SaveError, SavedTensor};

/// The tensors of a module, and the tensors of the file that consist of them.
pub(super) struct FilePlan<B: OptimizerOps> {
    /// The tensors of the module that are saved, in the order of gathering, each with the
    /// components of the file's tensors that form it; `None` for a tensor that is saved as it is.
    tensors: Vec<(SavedTensor<B>, Option<Composition>)>,
    /// The header of the file.
    header: Header,
    /// The offset of the first byte of each tensor in the file.
    starts: HashMap<String, u64>,
}

/// A tensor in the file.
struct FileTensor {
    name: String,
    element: ElementType,
    shape: Vec<usize>,
}

impl<B: OptimizerOps> FilePlan<B> {
    /// Assigns the tensors of a module, in the order in which they are gathered.
    ///
    /// # Errors
    /// Returns [`SaveError::Map`] if model and map differ in a parameter, or if two tensors would
    /// have the same name.
    pub(super) fn new(
        tensors: Vec<SavedTensor<B>>,
        map: Option<&WeightMap>,
    ) -> Result<Self, SaveError> {
        let mut plan = Self { tensors: vec![], header: Header::pytorch(), starts: HashMap::new() };
        let mut elements: HashMap<String, ElementType> = HashMap::new();
        let mut file = Vec::new();
        for tensor in tensors {
            let Some(weight) = map.and_then(|map| map.get(&tensor.path)) else {
                let (name, element) = (tensor.path.clone(), tensor.element);
                file.push(FileTensor { name, element, shape: tensor.shape.clone() });
                plan.tensors.push((tensor, None));
                continue;
            };
            // Every rank skips the tensor, so none gathers it.
            if matches!(weight.origin(), Origin::Tied { .. }) {
                continue;
            }
            if weight.shape() != tensor.shape {
                let (path, shape) = (&tensor.path, &tensor.shape);
                return refuse(format!("{path} has shape {shape:?}, not {:?}", weight.shape()));
            }
            for component in weight.composition().components() {
                // A tensor of the file may join several parameters, such as fused projections, and
                // has one type.
                let first = *elements.entry(component.name.clone()).or_insert(tensor.element);
                if first != tensor.element {
                    let (name, path) = (&component.name, &tensor.path);
                    return refuse(format!("{name} is of {first}, but its part {path} is not"));
                }
            }
            plan.tensors.push((tensor, Some(weight.composition().clone())));
        }
        for stored in map.into_iter().flat_map(WeightMap::stored_tensors) {
            let paths = stored.composition().components().iter().map(|component| &component.name);
            let missing = paths.clone().find(|path| plan.tensors().all(|it| it.path != **path));
            if let Some(path) = missing {
                return refuse(format!("the model has no parameter {path}"));
            }
            let (name, shape) = (stored.name().to_owned(), stored.shape().to_vec());
            file.push(FileTensor { element: elements[&name], name, shape });
        }
        file.sort_by_cached_key(|tensor| (tensor.element.file_order(), tensor.name.clone()));
        for FileTensor { name, element, shape } in file {
            let start = plan.header.push(&name, element, &shape);
            if plan.starts.insert(name.clone(), start).is_some() {
                return refuse(format!("two tensors are called {name}"));
            }
        }
        Ok(plan)
    }

    /// Returns the tensors of the module, in the order of gathering.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &SavedTensor<B>> {
        self.tensors.iter().map(|(tensor, _)| tensor)
    }

    /// Creates the file `path`. The data is written to `path` with the suffix `.partial`, and this
    /// file is renamed when it is complete.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub(super) fn create(&self, path: &Path) -> Result<TensorFileWriter, SaveError> {
        let failed = failure(path);
        let Some(name) = path.file_name() else {
            return Err(failed(io::Error::other("the path names no file")));
        };
        if path.is_dir() {
            return Err(failed(io::ErrorKind::IsADirectory.into()));
        }
        let mut partial = name.to_owned();
        partial.push(".partial");
        TensorFileWriter::create(path, path.with_file_name(partial), &self.header).map_err(failed)
    }

    /// Writes the bytes of one of the [`tensors`](Self::tensors).
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub(super) fn write(
        &self,
        tensor: &SavedTensor<B>,
        bytes: &[u8],
        file: &mut TensorFileWriter,
    ) -> io::Result<()> {
        let own = self.tensors.iter().find(|(own, _)| own.path == tensor.path);
        let composition = own.and_then(|(_, composition)| composition.as_ref());
        let stored_as = composition.map_or(Some(&*tensor.path), Composition::same_as);
        if let Some(name) = stored_as {
            file.seek(self.starts[name])?;
            return file.write(bytes);
        }
        match (composition, tensor.element.size()) {
            (None, _) => Ok(()),
            (Some(composition), 1) => self.scatter::<1>(composition, bytes, file),
            (Some(composition), 2) => self.scatter::<2>(composition, bytes, file),
            (Some(composition), 4) => self.scatter::<4>(composition, bytes, file),
            (Some(composition), _) => self.scatter::<8>(composition, bytes, file),
        }
    }

    /// Writes elements of `N` bytes to the tensors that contain them.
    fn scatter<const N: usize>(
        &self,
        composition: &Composition,
        bytes: &[u8],
        file: &mut TensorFileWriter,
    ) -> io::Result<()>
    where
        [u8; N]: Default,
    {
        let elements = bytes.as_chunks::<N>().0;
        composition.write(elements, |name, first, values| {
            file.seek(self.starts[name] + (first * N) as u64)?;
            file.write(values.as_flattened())
        })
    }
}

/// Returns the error of a map that does not fit the model.
fn refuse<T>(reason: String) -> Result<T, SaveError> {
    Err(SaveError::Map { reason })
}

/// Returns a function that converts an I/O error at `path`.
pub(super) fn failure(path: &Path) -> impl Fn(io::Error) -> SaveError {
    move |error| SaveError::File { path: path.to_owned(), reason: error.to_string() }
}
