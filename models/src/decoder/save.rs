//! Writes decoders in the layout of `transformers`.

use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Tensor, backend::Backend};
use deepburn_files::safetensors::FloatType;

use super::model::Decoder;
use crate::architecture::Architecture;
use crate::hf::{ModelFolderError, ModelFolderWriter};

impl<B: Backend> Decoder<B> {
    /// Writes the model as a checkpoint that [`PretrainedDecoder`](super::PretrainedDecoder) and
    /// `transformers` can load.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Io`] if a file cannot be written.
    pub fn save(&self, folder: impl AsRef<Path>, float: FloatType) -> Result<(), ModelFolderError> {
        let writer = self.config.folder_writer(folder.as_ref(), float)?;
        let mut saver = ParameterWriter { writer, path: Vec::new(), outcome: Ok(()) };
        // The module shows visitors the public paths, which the writer expects.
        self.visit(&mut saver);
        saver.outcome?;
        saver.writer.finish()
    }
}

/// Writes a module's parameters as it visits them.
struct ParameterWriter {
    /// The folder that is written.
    writer: ModelFolderWriter,
    /// The names of the modules on the path to the visited parameter.
    path: Vec<String>,
    /// The first error. Nothing is written after it, because a visitor cannot stop.
    outcome: Result<(), ModelFolderError>,
}

impl<B: Backend> ModuleVisitor<B> for ParameterWriter {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if self.outcome.is_ok() {
            self.outcome = self.writer.write(&self.path.join("."), param.val().into_data());
        }
    }
}
